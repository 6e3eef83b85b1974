r"""Certificates of an exported network: radii from bounds recomputed in float64 on its own numbers."""

import dataclasses
import importlib
import os
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipkit import modules
from lipkit.certificates import margins
from lipkit.certificates.evaluators import ROUNDINGS, Evaluator, inner_products_only
from lipkit.certificates.intervals import check_radii
from lipkit.certificates.local import Bounds
from lipkit.certificates.measurement import Proof, Samples, as_tensor, check_inputs, measure
from lipkit.errors import OptionError, check_choice, check_labels
from lipkit.files import write_atomic
from lipkit.shown import Shown, Told, axes, upper
from lipkit.text import csv_text, format_radius, table


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Certificate(Shown):
    r"""Proved radii of N samples. All tensors are on the CPU.

    Attributes:
        radius: (N,) float64, certified l2 radius in units of the input, rounded down; 0 where nothing is certified.
        radius_ignored: (N,) float64, the radius as if no logit were rounded: the field's convention, for comparison.
        prediction: (N,) int64; -1 where a logit is NaN.
        label: (N,) int64.
        margin: (N,) float64, signed: ``y_t - max_{i != t} y_i``.
        constant: proved upper bound L of the network's l2 Lipschitz constant, rounded up.
        body_constant: the same for everything before the last linear layer; None without such a split.
        method: ``"last layer"`` (pairwise, with `body_constant`) or ``"global"`` (margin / (sqrt(2) L)); ``"local"``
            where linear bounds around each sample were tried too, and the larger radius counts.
        dtype: arithmetic of bounds and logits.
        input_shape: shape of one input.
        network_sha256: fingerprint of the network that was certified.
        rounding: ``"sound"``: `radius` holds for the machine's evaluation; ``"ignore"``: for real arithmetic on
            logits taken as exact.
        evaluator: the evaluation that `radius` holds for, and the settings it was made under.
        input_range: of the network (`lipkit.modules.Network`); None if it is unknown. Radii of the method
            ``"local"`` hold for inputs in this range.
        sample_range: (low, high) of the entries of the samples; None for a certificate read from a file.
    """

    radius: Tensor
    radius_ignored: Tensor
    prediction: Tensor
    label: Tensor
    margin: Tensor
    constant: float
    body_constant: float | None
    method: str
    dtype: str
    input_shape: tuple[int, ...]
    network_sha256: str
    rounding: str
    evaluator: Evaluator
    input_range: tuple[float, float] | None = None
    sample_range: tuple[float, float] | None = None

    def __len__(self) -> int:
        return len(self.label)

    @property
    def correct(self) -> Tensor:
        """(N,) bool: the prediction is the label."""
        return self.prediction == self.label

    @property
    def clean_accuracy(self) -> float:
        """Fraction of samples whose prediction is the label."""
        return float(self.correct.double().mean())

    def certified(self, eps: float, *, rounding: str | None = None) -> Tensor:
        """(N,) bool: correct, with a radius above ``eps``; ``rounding="ignore"`` takes `radius_ignored`.

        Raises:
            OptionError: a negative eps, or a sound radius asked of a certificate that ignored rounding.
        """
        given: Any = eps
        if not ((isinstance(given, Real) or getattr(given, "ndim", None) == 0) and given >= 0):
            raise OptionError(f"expected one radius >= 0, such as 36 / 255, got {eps!r}")
        wanted = self.rounding if rounding is None else rounding
        check_choice("rounding", wanted, ROUNDINGS)
        if wanted == "sound" and self.rounding != "sound":
            raise OptionError("expected a certificate with rounding='sound', got one with rounding='ignore'")
        return self.correct & ((self.radius_ignored if wanted == "ignore" else self.radius) > eps)

    def accuracy(self, eps: float, *, rounding: str | None = None, large_eps: bool = False) -> float:
        """Certified accuracy: fraction of samples that are correct with a radius above ``eps`` (units of the input).

        Raises:
            OptionError: see `certified`; or an ``eps`` that is probably a slip (36 for 36/255) by the range of the
                inputs, see `lipkit.certificates.intervals.check_radii`: ``large_eps`` allows a large one.
        """
        found = self.certified(eps, rounding=rounding)
        check_radii([eps], self.input_shape, self.input_range, seen=self.sample_range, large=large_eps)
        return float(found.double().mean())

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one row per sample, with numbers that read back exactly.

        Columns: ``index,label,prediction,correct,radius,margin,radius_ignored``.
        """
        columns = self._columns() | {"correct": self.correct.long()}
        rows = zip(range(len(self)), *(column.tolist() for column in columns.values()), strict=True)
        write_atomic(Path(path), csv_text([["index", *columns], *rows]).encode())

    def _columns(self) -> dict[str, Tensor]:
        names = ("label", "prediction", "correct", "radius", "margin", "radius_ignored")
        return {name: getattr(self, name) for name in names}

    def to_frame(self) -> Any:
        """The columns of `save_csv` as a DataFrame of pandas, which must be installed; one row per sample.

        Raises:
            OptionError: pandas is not installed.
        """
        try:
            pandas: Any = importlib.import_module("pandas")
        except ModuleNotFoundError as error:
            raise OptionError("expected the package pandas for to_frame, got none: pip install pandas") from error
        columns = {name: column.numpy() for name, column in self._columns().items()}
        return pandas.DataFrame(columns).rename_axis("index")

    def describe(self) -> str:
        """Accuracies, the proved constant and what the radii hold for, in three lines."""
        image = len(self.input_shape) == 3
        known = torch.where(self.radius.isfinite(), self.radius, 1.0)  # inf counts as 1: it has no quantile
        spread = known.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
        eps = [36 / 255, 72 / 255, 108 / 255] if image else sorted(float(f"{r:.3g}") for r in spread if r > 0)
        shown = format_radius if image else "{:g}".format  # 8-bit steps are for images
        shares = [f"{100 * float(self.certified(r).double().mean()):.1f} %" for r in eps]
        head = f"{len(self)} samples: clean {100 * self.clean_accuracy:.1f} %"
        head += f", certified({shown(eps[0])}) {shares[0]}" if eps else ", nothing certified"
        included = "included" if self.rounding == "sound" else "ignored"
        head += f", L <= {upper(self.constant)}, rounding {included}"
        curve = table([], [["radius", *map(shown, eps)], ["certified", *shares]])
        how = "radii by linear bounds around each sample" if self.method == "local" else self.method
        made = f"L proved from the stored numbers ({how}), for {self.evaluator.name} evaluation"
        return "\n".join([head, *([curve] if eps else []), made])

    def plot(self, ax: Any = None) -> Any:
        """Draw certified accuracy against the l2 radius on axes of matplotlib, None for new ones; returns them.

        Raises:
            OptionError: matplotlib is not installed.
        """
        ax = axes(ax, "l2 radius", "certified accuracy")
        for radius, style in ((self.radius, "-"), (self.radius_ignored, ":")):
            end = radius[self.correct].sort().values  # steps down at each radius
            left = 1 - torch.arange(1, len(end) + 1) / max(len(end), 1)
            x = torch.cat((torch.zeros(1, dtype=torch.float64), end)).tolist()
            y = (torch.cat((torch.ones(1), left)) * self.clean_accuracy).tolist()
            if style == "-" or not torch.equal(self.radius, radius):
                label = "rounding included" if style == "-" and self.rounding == "sound" else "rounding ignored"
                ax.step(x, y, style, where="post", label=label)
        ax.set(ylim=(0, 1.02), xlim=(0, None))
        ax.legend()
        return ax


def certify(
    network: modules.Network,
    x: Samples,
    y: Samples | None = None,
    *,
    method: str = "global",
    rounding: str = "sound",
    evaluator: str = "float64",
    batch_size: int = 128,
    device: str | torch.device = "cpu",
    proof: Proof | None = None,
    progress: Told | None = None,
) -> Certificate:
    r"""Certified l2 radii of a classifier. For a regression see `lipkit.certificates.certify_regression`.

    With ``K_ti = min(sqrt(2) L, L_b ||w_t - w_i||)`` (the second only for a network that ends in ``nn.Linear``)

        r(x) = min_{i != t} (y_t(x) - y_i(x) - a_ti(x)) / (K_ti + b_ti)

    if the prediction is the label t, else 0. There ``a_ti + b_ti s`` bounds all rounding errors of ``y_t - y_i`` within
    a distance s of x (`docs/rounding.md`); with ``rounding="ignore"`` both are 0.

    **Guarantee.** For every input x' of the evaluator's number format closer than r(x), the machine computes a logit
    of the label that is larger than all others. L and L_b are computed from the stored numbers, in float64, and rounded
    up (`lipkit.lipschitz`); the logits are measured in float64, and the errors of this measurement and of the evaluator
    are bounded a priori, for sums in any order, with or without fused operations and flushing to zero. Radii are
    rounded down. `docs/rounding.md` lists the assumptions about the machine; settings of torch that break them are
    refused. With ``rounding="ignore"``, the convention of the field, the statement is about real arithmetic only and a
    rounding error can break it.

    With ``method="local"`` linear bounds around each sample (`lipkit.certificates.local`) give another proved radius,
    for inputs in the network's ``input_range``; the larger of both counts, also in `radius_ignored`.

    Args:
        network: a `lipkit.modules.Network`, from `lipkit.export` or `lipkit.modules.load`.
        x: (N, *input_shape), floating point, a tensor on any device or a numpy array.
        y: (N,) int64 labels, a tensor or a numpy array.
        method: ``"global"``; ``"local"``; or ``"best"``: as local, but the certificate is called so only if a local
            radius is the larger one for some sample.
        rounding: ``"sound"`` or ``"ignore"``.
        evaluator: whose evaluation the radii hold for: ``"float64"``, ``"float32"``, ``"float32_blocked"``, which
            sums inner products in blocks of 16 (`lipkit.certificates.evaluators.machine` returns that network), or
            ``"integer"``: the integer program of the network (`lipkit.integer.quantisation`, `lipkit.interop.write_c`),
            for every real x', which it clamps and rounds itself; logits and predictions are then the program's own.
        batch_size: samples evaluated at once; the radii do not depend on it beyond rounding.
        device: where the logits are measured. A device without float64 (mps) is replaced by the CPU.
        proof: of this network for this rounding, evaluator and device, from `lipkit.prove`; None proves it here.
        progress: called with ``"evaluated"`` or ``"with local radii"``, the number of samples done, and that of all.

    Cost:
        The bounds of the layers, or a comparison of all numbers with the ``proof``; one to three passes in float64.
        Local radii take 0.2 s per sample for an MLP of 2 x 256, seconds for a convolutional network.

    Raises:
        NoRuleError: ``network`` is not an exported network, or holds a module without a rule.
        ShapeError: ``x`` does not fit the network, or ``y`` does not fit ``x``.
        OptionError: no tensors or arrays (a DataLoader, say), labels that are not integers in [0, K), no sample or one
            that is not finite or not in the network's ``input_range``, an option with another value, local bounds of an
            integer program, settings of torch under which the evaluator's arithmetic is not IEEE, or a ``proof`` of
            another network or evaluation.

    References: Tsuzuku, Sato, Sugiyama, "Lipschitz-Margin Training", NeurIPS 2018, Prop. 1 (global); Singla, Singla,
    Feizi, "Improved deterministic l2 robustness on CIFAR-10 and CIFAR-100", ICLR 2022, Sec. 4 (last layer); Higham,
    "Accuracy and Stability of Numerical Algorithms", 2nd ed., Secs. 3.1 and 3.5 (inner products).
    """
    check_choice("method", method, ("global", "local", "best"))
    if method != "global" and evaluator == "integer":
        raise OptionError(f"method: expected 'global' for an integer program, got {method!r}")
    x, y = as_tensor(x), as_tensor(y)  # y may be missing so that certify(loader) gets a clear error
    seen = check_inputs(network, x)
    check_labels(y, len(x))
    measured = measure(
        network, x, rounding=rounding, evaluator=evaluator, batch_size=batch_size, device=device, proof=proof,
        check=margins.check_logits, progress=progress,
    )  # fmt: skip
    proof, outputs, labels = measured.proof, measured.outputs, y.cpu()
    margins.check_logits(outputs, labels)
    constants, rows = proof.pair_constants(outputs.shape[1])
    if measured.logits is None:
        radius = ignored = margins.radii(outputs, labels, constants)
    else:
        radius, ignored = margins.sound_radii(measured.logits, labels, constants, rows, proof.arithmetic)
    name = "global" if proof.body_constant is None else "last layer"
    if method != "global":
        # The search differentiates the network, so its tensors must not be made in inference mode.
        with torch.inference_mode(False), inner_products_only(proof.device):
            bounds = Bounds(proof.network, proof.arithmetic if rounding == "sound" else None, network.input_range)
            at, known = (t.to(proof.device, torch.float64, copy=True) for t in (x, radius))
            local = bounds.radii(at, labels.to(proof.device, copy=True), known, progress).cpu()
        name = "local" if method == "local" or bool((local > radius).any()) else name
        radius, ignored = torch.maximum(radius, local), torch.maximum(ignored, local)
    return Certificate(
        radius=radius,
        radius_ignored=ignored,
        prediction=margins.predictions(outputs),
        label=labels.clone(),
        margin=margins.margins(outputs, labels),
        constant=proof.constant,
        body_constant=proof.body_constant,
        method=name,
        dtype="float64",
        input_shape=tuple(network.input_shape),
        network_sha256=proof.network_sha256,
        rounding=rounding,
        evaluator=measured.evaluator,
        input_range=network.input_range,
        sample_range=seen,
    )
