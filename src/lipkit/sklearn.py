r"""Networks with a proved constant as estimators of scikit-learn, for tables.

.. math:: f(x) = L\,W_K\,\sigma(W_{K-1} \cdots \sigma(W_1 D z + b_1)) + b_K, \qquad z = (x - \mu) / s

:math:`\sigma` sorts pairs of units (`MaxMin`), the W come from `lipkit.layers.aol.aol_matrix`, D is a diagonal of at
most 1, so f is L-Lipschitz in z. Radii, eps and gains are in units of z: eps = 0.3 is three tenths of the standard
deviation of one feature, or the same l2 norm spread over several. `MaxMin` is increasing, so f is monotone in a
feature from which all paths have positive weights: `lipkit.certificates.monotone` proves it from the exported numbers.

Equal rows are merged and their weights added before training, so a weight of 2 is the same as two rows, bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from lipkit.certificates import Certificate, RegressionCertificate, certify, certify_regression, monotone, prove
from lipkit.certificates.margins import margin_errors
from lipkit.certificates.measurement import measure_by
from lipkit.conformal import Calibration, calibrate
from lipkit.errors import CertificateViolation, OptionError, finite
from lipkit.interop import write_onnx
from lipkit.layers.aol import aol_matrix
from lipkit.layers.export import filled
from lipkit.linalg.matrices import check_positive
from lipkit.lowering import lipschitz
from lipkit.modules import Affine, MaxMin, Network
from lipkit.modules.storage import float64_copy
from lipkit.proof.roundoff import UNIT, grow, next_down, next_up
from lipkit.shown import axes

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.exceptions import NotFittedError
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state, column_or_1d, compute_sample_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_monotonic_cst, _check_sample_weight, check_is_fitted, validate_data
except ImportError as missing:
    raise ImportError('expected scikit-learn 1.6 or later: pip install "lipkit[sklearn]"') from missing

Array = np.ndarray[Any, Any]

# Relative allowance for the rounding of all layers' weights to float32.
_SLACK = 1e-5


# Each field is a parameter of the estimator: scikit-learn reads them from the signature that dataclass makes.
@dataclasses.dataclass(eq=False, repr=False)
class _LipschitzEstimator(BaseEstimator):
    """Base of both estimators; ``export_`` is the exported network on scaled features."""

    hidden_layer_sizes: Any = (64, 64)
    lipschitz: float = 1.0
    scale: Any = "std"
    monotonic_cst: Any = None
    learning_rate_init: float = 0.01
    batch_size: int = 200
    max_iter: int = 200
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 20
    tol: float = 1e-4
    random_state: Any = None

    def _fit(self, X: Array, y: Array, weights: Array, outputs: int) -> None:
        """Train and export. ``y`` are class indices or targets; ``weights`` are positive."""
        sizes = np.atleast_1d(np.asarray(self.hidden_layer_sizes, dtype=object)).tolist()
        for name in ("lipschitz", "learning_rate_init"):
            finite(name, getattr(self, name), positive=True)
        check_positive(batch_size=self.batch_size, max_iter=self.max_iter, n_iter_no_change=self.n_iter_no_change)
        if not 0 < finite("validation_fraction", self.validation_fraction) < 1:
            raise OptionError(f"validation_fraction: expected a number in (0, 1), got {self.validation_fraction!r}")
        if not all(isinstance(n, int | np.integer) and n >= 2 and n % 2 == 0 for n in sizes):
            raise OptionError(f"hidden_layer_sizes: expected even numbers, got {self.hidden_layer_sizes!r}")
        signs = _check_monotonic_cst(self, self.monotonic_cst)  # scikit-learn's: from a list or a dict
        if signs.any() and outputs > 1:
            raise OptionError(f"monotonic_cst: expected two classes, or a regression, got {outputs} classes")
        rows, inverse = np.unique(np.column_stack((X, y)), axis=0, return_inverse=True)
        X, y, weights = rows[:, :-1], rows[:, -1], np.bincount(inverse.ravel(), weights)  # sums of equal rows
        self.mean_ = np.average(X, axis=0, weights=weights)
        self.scale_ = self._scales(X, weights)
        seeds = check_random_state(self.random_state)
        labels = isinstance(self, ClassifierMixin)
        middle = 0.0 if labels else np.average(y, weights=weights)
        unit = 1.0 if labels else np.sqrt(np.average((y - middle) ** 2, weights=weights)) or 1.0  # constant: 1
        target = y if labels else (y - middle) / unit
        data = [torch.from_numpy(a) for a in ((X - self.mean_) / self.scale_, target, weights)]
        held = None
        if self.early_stopping:
            rows, share = np.arange(len(X)), self.validation_fraction
            groups = train_test_split(rows, test_size=share, random_state=seeds, stratify=y if labels else None)
            data, held = ([a[g] for a in data] for g in groups)
        trained = _Trained([X.shape[1], *map(int, sizes), outputs], signs, float(self.lipschitz), labels)
        self._train(trained, data, held, torch.Generator().manual_seed(int(seeds.randint(2**31))))
        self.export_ = trained.exported(float(unit), float(middle))
        self.lipschitz_ = float(lipschitz(self.export_))
        vars(self).pop("conformity_scores_", None)  # they belong to an earlier network
        _check_signs(self.export_, signs)

    def _scales(self, X: Array, weights: Array) -> Array:
        if isinstance(self.scale, str) and self.scale == "std":
            found = np.sqrt(np.average((X - self.mean_) ** 2, axis=0, weights=weights))
            # A feature that varies by rounding only counts as constant.
            return np.where(found > (len(X) + 10) * np.finfo(float).eps * np.abs(self.mean_), found, 1.0)
        given = math.nan if isinstance(self.scale, str) else self.scale  # another word is refused below
        found = np.ones(X.shape[1]) if given is None else np.asarray(given, dtype=float)
        if found.shape not in ((), (X.shape[1],)) or not (np.isfinite(found) & (found > 0)).all():
            raise OptionError(
                f"scale: expected 'std', None or {X.shape[1]} positive numbers, one a feature, got {self.scale!r}"
            )
        return np.broadcast_to(found, X.shape[1]).copy()

    def _train(self, network: _Trained, data: list[Tensor], held: list[Tensor] | None, random: torch.Generator) -> None:
        for weight in network.free:
            nn.init.orthogonal_(weight, generator=random)  # the rescaling leaves it unchanged
        optimizer = torch.optim.Adam(network.parameters(), self.learning_rate_init, fused=True)
        steps = math.ceil(len(data[0]) / self.batch_size)  # batches of nearly equal size, see chunk
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.max_iter * steps)
        best, waited, kept = math.inf, 0, network.state_dict()
        self.loss_curve_: list[float] = []
        for _ in range(self.max_iter):
            mean_loss = 0.0
            for batch in torch.randperm(len(data[0]), generator=random).chunk(steps):
                optimizer.zero_grad()
                loss = network.loss(*(a[batch] for a in data))
                loss.backward()
                optimizer.step()
                schedule.step()
                mean_loss += float(loss.detach()) / steps
            self.loss_curve_.append(mean_loss)
            watched = mean_loss
            if held is not None:
                with torch.no_grad():
                    watched = float(network.loss(*held))
                if watched < best:  # keep any improvement; tol only decides when to stop
                    kept = {name: value.clone() for name, value in network.state_dict().items()}
            waited = 0 if watched < best - self.tol else waited + 1
            best = min(best, watched)  # after `waited`, which compares with the best before
            if waited >= self.n_iter_no_change:
                break
        self.n_iter_ = len(self.loss_curve_)
        network.load_state_dict(kept)

    def _scaled(self, X: Any) -> Tensor:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        return torch.from_numpy((X - self.mean_) / self.scale_)

    def _near(self, X: Any, eps: float) -> tuple[Tensor, float]:
        """Scaled features z, and a bound on the distance from z to the scaled features of inputs within eps."""
        eps = finite("eps", eps, least=0)
        z = self._scaled(X)
        return z, eps + _room(z, eps)

    def _outputs(self, X: Any) -> Tensor:
        z = self._scaled(X)  # first, because it refuses an estimator that was not fitted
        found: Tensor = float64_copy(self.export_)(z)
        return found

    def _targets(self, y: Any) -> Tensor:
        raise NotImplementedError

    def calibrate(self, X: Any, y: Any) -> Self:
        """Compute conformity scores on data that were not used for training, for sets or intervals."""
        z = self._scaled(X)  # first, because it refuses an estimator that was not fitted
        self.conformity_scores_ = calibrate(self.export_, z, self._targets(y)).scores.numpy()
        return self

    def _calibration(self) -> Calibration:
        if not hasattr(self, "conformity_scores_"):
            raise NotFittedError("expected calibrate(X, y) on data that were not trained on, before sets or intervals")
        scores = torch.from_numpy(self.conformity_scores_)
        return Calibration(scores, isinstance(self, ClassifierMixin), prove(self.export_))

    def feature_gains(self) -> Array:
        r"""Proved bounds (features,) on the l2 change of the outputs if one feature changes by one scaled unit."""
        check_is_fitted(self)
        first, *rest = self.export_
        assert isinstance(first, nn.Linear)
        # Each column by itself, as if no other feature changed.
        alone = [filled(nn.Linear(1, len(w), bias=False), w, None) for w in first.weight.split(1, 1)]
        return np.array([float(lipschitz(Network([one, *rest], (1,)))) for one in alone])

    def plot_gains(self, ax: Any = None) -> Any:
        """Draw `feature_gains` as bars, the largest first; returns the axes of matplotlib."""
        gains, ax = self.feature_gains(), axes(ax, "output per scaled unit (proved bound)", "")
        names = getattr(self, "feature_names_in_", [f"x{i}" for i in range(len(gains))])
        order = np.argsort(gains)  # barh draws from the bottom
        ax.barh([str(names[i]) for i in order], gains[order])
        return ax

    def to_onnx(self, path: str | Path) -> Path:
        """Write the network for unscaled features, in float32; its outputs are the logits, or the targets.

        Certificates hold for ``export_`` in float64; they do not include the rounding of this scaling in float32.
        """
        check_is_fitted(self)
        scaling = Affine(torch.from_numpy(1 / self.scale_).float(), torch.from_numpy(-self.mean_ / self.scale_).float())
        return write_onnx(Network([scaling, *self.export_], self.export_.input_shape), path)


@dataclasses.dataclass(eq=False, repr=False)
class LipschitzClassifier(ClassifierMixin, _LipschitzEstimator):
    r"""A classifier whose logits are L-Lipschitz in the scaled features z.

    Log-odds move by at most :math:`\sqrt2 L \|\Delta z\|`.

    Args:
        hidden_layer_sizes: even numbers of units; () for a linear model.
        lipschitz: L. A small one gives large radii, a large one a closer fit.
        scale: one unit of each feature: ``"std"`` for the standard deviation of the training data, None for unscaled
            features, or numbers.
        monotonic_cst: for each feature 1, -1 or 0, or a dict by name: the probability of the second class never falls,
            never rises, or is free; for two classes only, as in `HistGradientBoostingClassifier`.
        learning_rate_init, batch_size, max_iter: Adam, its rate falling to 0 along a cosine, at most max_iter epochs.
        early_stopping, validation_fraction, n_iter_no_change, tol: stop when the training loss (with early_stopping the
            loss of held-out data) has not fallen by tol for n_iter_no_change epochs.
        class_weight: None, ``"balanced"``, or weights by class.
        random_state: of initial weights, order and held-out data.

    Guarantee:
        ``lipschitz_`` is proved from the numbers of ``export_``, and at most ``lipschitz``.

    >>> X = np.random.default_rng(0).normal(size=(200, 2))
    >>> model = LipschitzClassifier((16,), max_iter=30, random_state=0).fit(X[:100], X[:100, 0] > 0)
    >>> model.score(X[100:], X[100:, 0] > 0) > 0.9, model.lipschitz_ <= 5
    (True, True)
    >>> model.calibrate(X[100:], X[100:, 0] > 0).predict_set([[2.0, 0.0]], alpha=0.1, eps=0.3)
    array([[False,  True]])
    """

    lipschitz: float = 3.0
    class_weight: Any = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on X (n, features) and labels y (n,)."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        weights = weights * compute_sample_weight(self.class_weight, y)
        X, y, weights = X[weights > 0], y[weights > 0], weights[weights > 0]
        self.classes_, numbers = np.unique(y, return_inverse=True)  # of rows with positive weight
        if len(self.classes_) < 2:
            raise OptionError(f"expected at least 2 classes, got {len(self.classes_)} class")
        self._fit(X, numbers, weights, len(self.classes_) if len(self.classes_) > 2 else 1)
        return self

    def _targets(self, y: Any) -> Tensor:
        labels, numbers = column_or_1d(y).tolist(), {label: k for k, label in enumerate(self.classes_.tolist())}
        if unknown := [label for label in dict.fromkeys(labels) if label not in numbers]:
            raise OptionError(f"expected labels among {list(numbers)}, got {unknown}")
        return torch.tensor([numbers[label] for label in labels])

    def predict_proba(self, X: Any) -> Array:
        """Probabilities (n, classes): the softmax of the logits."""
        return self._outputs(X).softmax(1).numpy()

    def predict(self, X: Any) -> Array:
        """The most probable class (n,)."""
        best = self._outputs(X).argmax(1).numpy()  # first: it refuses an estimator that was not fitted
        found: Array = self.classes_[best]
        return found

    def certify(self, X: Any, y: Any) -> Certificate:
        """Radii, in scaled units, within which the prediction cannot change: see `lipkit.certify`."""
        z = self._scaled(X)
        found = certify(self.export_, z, self._targets(y))
        radius = found.radius * (1 - 16 * UNIT) - _room(z, 0.0)  # together _room(z, radius)
        return dataclasses.replace(found, radius=radius.clamp_min(0))

    def predict_set(self, X: Any, alpha: float = 0.1, eps: float = 0.0) -> Array:
        """Sets (n, classes) of bool that hold the label with probability 1 - alpha, even if X was moved by up to eps.

        Needs `calibrate`. See `lipkit.conformal`.
        """
        (z, distance), calibration = self._near(X, eps), self._calibration()
        return calibration.predict_set(z, alpha, distance).sets.numpy()

    def worst_case(self, X: Any, eps: float) -> Array:
        """Proved lower and upper bounds (n, classes, 2) of the probabilities of all inputs within eps."""
        z, distance = self._near(X, eps)
        measured = measure_by(self.export_, z, None)
        logits, classes = measured.logits, measured.outputs.shape[1]
        assert logits is not None  # the proof includes rounding
        constants, rows = measured.proof.pair_constants(classes)
        ends = []
        for k in range(classes):
            at, slope = margin_errors(logits, torch.full((len(z),), k, dtype=torch.int64), rows)
            over = logits.values - logits.values[:, [k]]
            # 2^-40 and 2^-50 are far above the rounding of these few operations in float64.
            moved = (at + (constants[k] + slope) * distance) * (1 + 2.0**-40) + 2.0**-50 * over.abs()
            low, high = (1 / torch.exp(over + s * moved).sum(1) * (1 - s * 2.0**-40) for s in (1, -1))
            # An overflowing exponential does not make the probability 0; overflowing logits (NaN) give bounds 0 and 1.
            ends.append(torch.stack([low.nan_to_num(0.0), high.nan_to_num(1.0) + 2.0**-1000], 1))
        return torch.stack(ends, 1).clamp(0, 1).numpy()


@dataclasses.dataclass(eq=False, repr=False)
class LipschitzRegressor(RegressorMixin, _LipschitzEstimator):
    r"""A regression whose prediction moves by at most L standard deviations of the target for one scaled unit.

    Args:
        lipschitz: L, for targets scaled to unit standard deviation.
        hidden_layer_sizes, scale, monotonic_cst, learning_rate_init, batch_size, max_iter, early_stopping,
        validation_fraction, n_iter_no_change, tol, random_state: as in `LipschitzClassifier`.

    Guarantee:
        ``lipschitz_`` is proved from the numbers of ``export_``, in units of the target, and at most ``lipschitz``
        times the target's standard deviation (times 1 for a constant target).

    >>> X = np.random.default_rng(0).normal(size=(200, 2))
    >>> model = LipschitzRegressor((16,), max_iter=100, random_state=0).fit(X, X[:, 0])
    >>> model.score(X, X[:, 0]) > 0.95
    True
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on X (n, features) and targets y (n,)."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        X, y, weights = X[weights > 0], y[weights > 0].astype(np.float64), weights[weights > 0]
        if len(X) < 2:
            raise OptionError(f"expected at least 2 samples, got n_samples = {len(X)}")
        self._fit(X, y, weights, 1)
        return self

    def _targets(self, y: Any) -> Tensor:
        return torch.from_numpy(column_or_1d(y).astype(np.float64))

    def predict(self, X: Any) -> Array:
        """Predictions (n,)."""
        return self._outputs(X)[:, 0].numpy()

    def certify(self, X: Any, y: Any, eps: float = 0.1) -> RegressionCertificate:
        """Deviations and worst errors for inputs within eps, see `lipkit.certificates.certify_regression`."""
        z, distance = self._near(X, eps)
        return certify_regression(self.export_, z, self._targets(y), delta=distance)

    def predict_interval(self, X: Any, alpha: float = 0.1, eps: float = 0.0) -> Array:
        """Intervals (n, 2) that hold the target with probability 1 - alpha, even if X was moved by up to eps.

        Needs `calibrate`. See `lipkit.conformal`.
        """
        (z, distance), calibration = self._near(X, eps), self._calibration()
        found = calibration.predict_interval(z, alpha, distance)
        return torch.cat((found.low, found.high), 1).numpy()

    def worst_case(self, X: Any, eps: float) -> Array:
        """Proved lower and upper bounds (n, 2) of the predictions for all inputs within eps."""
        found = self.certify(X, np.zeros(len(X)), eps)
        half = grow(found.moved + found.prediction_error + found.rounding_error)  # rounded up
        return torch.cat((next_down(found.prediction - half), next_up(found.prediction + half)), 1).numpy()


class _Trained(nn.Module):
    """The function f (top of the file) with its free parameters; one output for two classes and regressions."""

    def __init__(self, sizes: list[int], signs: Array, gain: float, labels: bool) -> None:
        super().__init__()
        self.signs = torch.from_numpy(signs.astype(np.float64)) if signs.any() else None
        self.gain, self.labels = gain, labels
        self.free = nn.ParameterList(torch.empty(q, p, dtype=torch.float64) for p, q in pairwise(sizes))
        self.bias = nn.ParameterList(torch.zeros(q, dtype=torch.float64) for q in sizes[1:])
        self.columns = nn.Parameter(torch.ones(sizes[0], dtype=torch.float64))  # diagonal of D, before it is scaled

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """The matrices W_1 D, W_2, ..., L W_K of f (top of the file) and the biases.

        For two classes the single output m becomes the logits -m / sqrt(2) and m / sqrt(2).
        """
        weights, biases = list[Tensor](), [*self.bias]
        for i, free in enumerate(self.free):
            if self.signs is not None:
                free = torch.where(self.signs == 0, free, free.abs() * self.signs) if i == 0 else free.abs()
            # Rescale the shorter side, on which the diagonal bound is tight for orthogonal vectors.
            weights.append(aol_matrix(free) if len(free) >= free.shape[1] else aol_matrix(free.mT).mT)
        weights[0] = weights[0] * (self.columns.abs() / self.columns.abs().max())  # D, of norm 1
        weights[-1] = weights[-1] * self.gain
        if self.labels and len(weights[-1]) == 1:
            weights[-1], biases[-1] = (torch.cat((-t, t)) / math.sqrt(2) for t in (weights[-1], biases[-1]))
        return list(zip(weights, biases, strict=True))

    def loss(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        *hidden, last = self.layers()
        for weight, bias in hidden:
            x = MaxMin()(nn.functional.linear(x, weight, bias))
        outputs = nn.functional.linear(x, *last)
        if self.labels:
            each = nn.functional.cross_entropy(outputs, y.long(), reduction="none")
        else:
            each = (outputs[:, 0] - y).square()
        return (each * weights).sum() / weights.sum()

    @torch.no_grad()
    def exported(self, unit: float, middle: float) -> Network:
        """The network in float32, its outputs multiplied by ``unit``, plus ``middle``."""
        *hidden, (weight, bias) = self.layers()
        modules: list[nn.Module] = []
        for w, b in (*hidden, (weight * (unit * (1 - _SLACK)), bias * unit + middle)):
            modules += [filled(nn.Linear(w.shape[1], len(w)), w, b), MaxMin()]
        return Network(modules[:-1], (self.free[0].shape[1],))  # without MaxMin at the end


def _check_signs(network: Network, signs: Array) -> None:
    """Raise ``CertificateViolation`` unless the stored numbers prove that the last output has slopes of these signs."""
    # Test each sign with its own network: for a slope of 0 both are right.
    turned = Network([*network, Affine(-torch.ones(1), torch.zeros(1))], network.input_shape)
    rises, falls = (monotone(one)[-1].numpy() == 1 for one in (network, turned))
    if (((signs > 0) & ~rises) | ((signs < 0) & ~falls)).any():
        raise CertificateViolation(f"expected slopes of the signs {signs.tolist()}, got a network that proves others")


def _room(z: Tensor, eps: float) -> float:
    """Bound on what rounding of the scaling adds to the distance of a sample and an input within eps."""
    return 16 * UNIT * (float(z.norm(dim=1).max()) + eps)  # `certify` relies on this being linear in eps


__all__ = ["LipschitzClassifier", "LipschitzRegressor"]

__dir__ = __all__.copy
