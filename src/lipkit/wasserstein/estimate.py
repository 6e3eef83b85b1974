r"""The distance :math:`W_1(P, Q) = \sup_{f\ 1\text{-Lipschitz}} E f(x) - E f(y)` from samples, bounded from below.

A critic f of proved constant L has :math:`(E f(x) - E f(y)) / L \le W_1(P, Q)`, however it was trained. Trained on one
part of the samples, it is independent of the other part, whose means estimate the left-hand side without bias. The
confidence intervals at the end are of a difference of means from two independent samples.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from scipy.special import stdtrit
from torch import Tensor, nn

from lipkit.certificates.intervals import check_confidence
from lipkit.certificates.measurement import Proof, evaluate, prove
from lipkit.errors import DataError, OptionError, finite
from lipkit.layers import after_step
from lipkit.linalg.matrices import check_integer, check_positive
from lipkit.lowering import export, lipschitz
from lipkit.modules import Network
from lipkit.shown import Shown, lower, upper
from lipkit.training import devices, sources
from lipkit.training.losses import Loss
from lipkit.wasserstein import critics
from lipkit.wasserstein.critics import descend, kr_loss, one_output, trainable
from lipkit.wasserstein.samples import as_pair

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, repr=False)
class Estimate(Shown):
    r"""An estimated lower bound of :math:`W_1(P, Q)`.

    Attributes:
        value: (held-out mean of f(x) minus that of f(y)) / constant, averaged over the folds, in units of the samples'
            l2 norm. Its expectation is at most W1.
        low, high: interval for that expectation, not for W1. ``low`` bounds W1 from below, with this confidence;
            ``high`` does **not** bound W1 from above: critics trained too briefly leave both below it.
        confidence: of the two-sided interval.
        method: "student" (asymptotic) or "bernstein" (proved for every sample size).
        constant: largest proved Lipschitz constant of the critics, by which their values were divided.
        critics: the critic of each fold, exported.
        train_value: like ``value``, on the training samples of the critics; its excess over ``value`` shows
            overfitting. NaN if the critics were not trained.
        steps: training steps of each critic.
        held_out: numbers of held-out samples of P and of Q, all folds together.
    """

    value: float
    low: float
    high: float
    confidence: float
    method: str
    constant: float
    critics: tuple[Network, ...]
    train_value: float
    steps: int
    held_out: tuple[int, int]

    @property
    def critic(self) -> Network:
        """The critic of the first fold."""
        return self.critics[0]

    @property
    def proved(self) -> bool:
        """True if the coverage is proved for this sample size (given the diameter), not only asymptotic."""
        return self.method == "bernstein"

    def describe(self) -> str:
        """The estimate with its interval and critics."""
        kind = "proved for this sample size, given the diameter" if self.proved else "asymptotic: Student's t"
        return (
            f"lower bound of W1: {self.value:.6g}, estimated on {self.held_out[0]} and {self.held_out[1]} "
            "held-out samples\n"
            f"interval at {100 * self.confidence:g} %: {lower(self.low, 6)} to {upper(self.high, 6)}  ({kind})\n"
            "  of this lower bound: W1 may lie above it\n"
            f"critics: {len(self.critics)}, L <= {upper(self.constant)} (proved), on their training samples "
            f"{self.train_value:.6g}"
        )


def distance(
    x: Any,
    y: Any,
    *,
    critic: str | nn.Module | None = None,
    steps: int = 500,
    batch_size: int = 256,
    lr: float = 0.002,
    loss: Loss = kr_loss,
    folds: int = 2,
    confidence: float = 0.95,
    diameter: float | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Estimate:
    r"""Estimate :math:`W_1(P, Q)` (l2) from below by a Lipschitz critic, with a confidence interval.

    .. math:: \hat W = \frac1K \sum_k \frac1{L_k}
              \Big(\mathrm{mean}_{i \in A_k} f_k(x_i) - \mathrm{mean}_{j \in B_k} f_k(y_j)\Big)

    The samples are cut at random into K = ``folds`` parts; :math:`f_k` is trained on all parts but the k-th
    (:math:`A_k, B_k`), exported, and evaluated in float64 on the k-th; :math:`L_k` is ``lipschitz`` of its export.

    Guarantee:
        :math:`E \hat W \le W_1(P, Q)`, if the samples are independent draws: a critic is independent of its held-out
        samples. Without ``diameter`` the interval is Welch's, whose coverage is asymptotic. With ``diameter`` it is the
        empirical Bernstein bound, proved for every sample size because :math:`|f(x) - f(y)| \le L D`. Both are widened
        by a bound on the rounding of f's values. Neither tells how far the critic is below W1; a warning is given if it
        was still rising.

    Args:
        x: samples of P, tensor or array (n, *shape); uint8 images are divided by 255.
        y: samples of Q, (m, *shape).
        critic: acronym of a family for `critics.critic` (None: "cayley") of centred and scaled samples; or a module
            with one output that ``export`` takes, independent of the samples: a copy is trained for each fold.
        steps: training steps; 0 evaluates the given module as it is, on all samples.
        batch_size: samples of each of P and Q in one step.
        lr: of Adam, at the start; it falls linearly to zero.
        loss: of (f(x), f(y)): `kr_loss`, or `hinge_kr_loss` with its options bound.
        folds: K >= 2; or 1: train on one random half, evaluate on the other. More folds leave more samples to train on
            and make a wider interval.
        confidence: of the interval, in (0, 1).
        diameter: D, at least the l2 distance of any two points of the union of both supports; chosen before the
            samples were seen. Images in [0, 1] with d numbers have D = sqrt(d).
        seed: of the parts, initial weights and batches. torch's global random state is left as it was.
        device: where to train.

    Raises:
        DataError, ShapeError: samples that are not as above, or further apart than ``diameter``.
        NoRuleError: a critic without a proved constant.
        OptionError: another argument out of range, a critic of several outputs, or a loss that is not finite.

    >>> x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    >>> found = distance(x[:1000], x[1000:] + 3.0, steps=200, lr=0.01)
    >>> 3.9 < found.low < 3 * 2**0.5 < found.high < 4.5, found.proved
    (True, False)

    References:
        Villani, "Optimal Transport: Old and New", 2009, equation 5.11 (the dual); Anil, Lucas, Grosse, "Sorting out
        Lipschitz function approximation", ICML 2019, section 6 (Lipschitz critics give lower bounds);
        Chernozhukov et al., "Double/debiased machine learning", Econometrics Journal 21 (2018) (cross-fitting).
    """
    x, y = as_pair(x, y)
    check_integer("steps", steps, 0)
    check_integer("seed", seed, 0)
    check_positive(batch_size=batch_size, folds=folds)
    lr = finite("lr", lr, positive=True)
    check_confidence(confidence)
    if diameter is not None:
        _check_diameter(x, y, finite("diameter", diameter, positive=True))
    if steps == 0 and not isinstance(critic, nn.Module):
        raise OptionError("expected steps >= 1 for a new critic, got 0 (a module given as critic needs none)")
    where, shape = devices.device_here(device), tuple(x.shape[1:])
    parts = _parts(len(x), len(y), folds if steps else 0, seed)  # 0: hold out all samples

    exported, held_out = list[Network](), list[tuple[Moments, Moments]]()
    constants, fitted, curves, rounding = list[float](), list[float](), list[list[float]](), 0.0
    for k, (train, test) in enumerate(parts):
        with sources.own_random_state(where, seed, k, 1):
            seen = x[train[0]], y[train[1]]
            model, unit = critics.instance(critic, *seen)
            model.to(where)
            if steps:
                generator = sources.generator(seed, k, 2)
                curves.append(fit(model, *seen, steps, batch_size, lr, loss, generator, where, unit))
        network = export(model.eval(), shape)
        proof = prove(network, device=where)
        # The larger constant of the measured float64 copy and the returned network: Fourier layers round differently.
        constant = max(proof.chain.constant * proof.chain.slack, float(lipschitz(network, shape)))
        if not 0 < constant < math.inf:
            raise OptionError(f"expected a critic of positive finite constant, got {constant}")
        first, second, error = _evaluate(proof, x[test[0]], y[test[1]], batch_size, constant)
        held_out.append((moments(first), moments(second)))
        rounding += error / len(parts)
        if steps:
            first, second, _ = _evaluate(proof, x[train[0]], y[train[1]], batch_size, constant)
            fitted.append(float(first.mean() - second.mean()))
        exported.append(network)
        constants.append(constant)

    value = sum(a.mean - b.mean for a, b in held_out) / len(parts)
    half = student(held_out, confidence) if diameter is None else bernstein(held_out, confidence, diameter)
    half += rounding
    if value > half and steps >= 6 and (rise := _rise(torch.tensor(curves))) > 0.01:
        warnings.warn(
            f"the critics still rose by {100 * rise:.1f} % over the last third of {steps} steps: the interval, "
            f"{value - half:.4g} to {value + half:.4g}, is of a lower bound that more steps may raise, not of W1",
            stacklevel=2,
        )
    return Estimate(
        value=value, low=value - half, high=value + half, confidence=confidence,
        method="student" if diameter is None else "bernstein", constant=max(constants), critics=tuple(exported),
        train_value=sum(fitted) / len(fitted) if fitted else math.nan, steps=steps,
        held_out=(sum(a.count for a, _ in held_out), sum(b.count for _, b in held_out)),
    )  # fmt: skip


def fit(
    model: nn.Module, x: Tensor, y: Tensor, steps: int, batch_size: int, lr: float, loss: Loss,
    generator: torch.Generator, device: torch.device, unit: float,
) -> list[float]:  # fmt: skip
    """Train a critic in place, by Adam, on batches from ``generator``; return its difference of means on each batch."""
    parameters = trainable(model, "critic")
    model.train()
    optimizer, dtype, curve = torch.optim.Adam(parameters, lr=lr), parameters[0].dtype, []
    for step in range(steps):
        drawn = [s[torch.randint(len(s), (batch_size,), generator=generator)] for s in (x, y)]
        values = one_output(model(torch.cat(drawn).to(device, dtype)), 2 * batch_size)
        value = loss(values[:batch_size], values[batch_size:])
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise OptionError(f"loss: expected one number that depends on the critic's values, got {value!r}")
        if not math.isfinite(found := float(value.detach())):
            raise OptionError(f"expected a finite loss, got {found} at step {step + 1}: try another lr or unit")
        curve.append(-float(kr_loss(values[:batch_size], values[batch_size:]).detach()))
        descend(optimizer, value, lr * (1 - step / steps), unit)
        after_step(model, tuple(x.shape[1:]), step + 1 if step + 1 < steps else None)
    return curve


def _rise(curves: Tensor) -> float:
    """Relative rise of the curves (folds, steps) from their second to their last third; 0 within their noise."""
    third = curves.shape[1] // 3  # the first third, a warm-up, is ignored
    before, after = curves[:, -2 * third : -third], curves[:, -third:]
    rise = (after - before).mean()
    noise = (before.var(1) + after.var(1)).sum().div(third).sqrt() / len(curves)
    return float(rise / after.mean()) if rise > 2 * noise else 0.0


def _parts(n: int, m: int, folds: int, seed: int) -> list[tuple[Pair, Pair]]:
    """For each fold the indices (of x, of y) to train on and those held out; 0 folds: everything is held out."""
    generator = sources.generator(seed, 0)
    orders = [torch.randperm(count, generator=generator) for count in (n, m)]
    if folds == 0:
        nothing = orders[0][:0]
        return [((nothing, nothing), (orders[0], orders[1]))]
    first, second = (order.tensor_split(max(folds, 2)) for order in orders)  # one fold needs two parts, too
    if min(len(part) for part in (*first, *second)) < 2:
        raise DataError(f"expected at least {2 * max(folds, 2)} samples of each for {folds} folds, got {n} and {m}")
    rest = [[torch.cat(pieces[:k] + pieces[k + 1 :]) for pieces in (first, second)] for k in range(folds)]
    return [((rest[k][0], rest[k][1]), (first[k], second[k])) for k in range(folds)]


def _evaluate(proof: Proof, x: Tensor, y: Tensor, batch_size: int, constant: float) -> tuple[Tensor, Tensor, float]:
    """Values of (f - f(x[0])) / constant on x and on y; a bound of the rounding of the difference of their means."""
    measured = evaluate(proof, torch.cat((x, y)), proof.evaluator, max(batch_size, 1024))
    values = one_output(measured.outputs, len(x) + len(y))
    values = (values - values[0]) / constant  # so that an offset costs sums no digits
    sums = len(values) * 2.0**-48 * float(values.abs().max())  # of means and deviations, in any order
    errors = measured.errors(0.0)[0].flatten().split((len(x), len(y)))
    first, second = values.split((len(x), len(y)))
    return first, second, sum(float(e.mean()) for e in errors) / constant * (1 + 2.0**-20) + sums


def _check_diameter(x: Tensor, y: Tensor, diameter: float) -> None:
    """Refuse samples further than the diameter from the first one; checking all pairs would cost n^2."""
    first = x[:1].double()
    for name, samples in (("x", x), ("y", y)):
        far = max(float((part.double() - first).flatten(1).norm(dim=1).max()) for part in samples.split(4096))
        if far > diameter * (1 + 1e-12):  # the given diameter may be rounded
            raise DataError(f"expected samples within the diameter {diameter:g}, got one of {name} at distance {far:g}")


@dataclass(frozen=True)
class Moments:
    """Number, mean and unbiased variance of a sample."""

    count: int
    mean: float
    variance: float


def moments(values: Tensor) -> Moments:
    """The moments of an (n,) tensor of two values or more, in float64.

    >>> moments(torch.tensor([1.0, 3.0]))
    Moments(count=2, mean=2.0, variance=2.0)
    """
    values = values.double()
    return Moments(len(values), float(values.mean()), float(values.var()))


def student(pairs: list[tuple[Moments, Moments]], confidence: float) -> float:
    r"""Half the width of Welch's interval for the average over K folds of the difference of two means.

    .. math:: \frac1K \sum_k t_{\nu_k,(1 + c)/2} \sqrt{\frac{v_k}{n_k} + \frac{w_k}{m_k}}

    for sizes n, m, variances v, w, c = ``confidence``, and Welch and Satterthwaite's degrees of freedom :math:`\nu_k`.
    Standard deviations of folds are added, not their squares, because the errors of two folds are dependent: each
    critic was trained on the other's samples. If P = Q the two errors even agree (both are the product of the folds'
    random differences), and the root of summed squares would be too small by a factor of :math:`\sqrt2`.

    Guarantee:
        None for a finite sample: the coverage is at least c in the limit of large samples, if the variances are finite.

    >>> round(student([(Moments(100, 1.0, 1.0), Moments(100, 0.0, 1.0))], 0.95), 4)
    0.2789

    References:
        Welch, "The generalization of 'Student's' problem when several different population variances are involved",
        Biometrika 34 (1947).
    """
    half = 0.0
    for pair in pairs:
        terms = [(m.variance / m.count, m.count - 1) for m in pair]  # squared error, degrees of freedom
        if (total := sum(t for t, _ in terms)) != 0:
            # Divide by the total first, so that no square under- or overflows.
            freedom = 1 / sum((t / total) ** 2 / df for t, df in terms)
            half += float(stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(total)
    return half / len(pairs)


def bernstein(pairs: list[tuple[Moments, Moments]], confidence: float, width: float) -> float:
    r"""Half the width of an interval that is proved for every sample size, if the critic has a bounded range.

    .. math:: \frac1K \sum_k \sum_{v \in \{v_k, w_k\}}
              \sqrt{\frac{2 v \ln(2/\delta)}{n}} + \frac{7 D \ln(2/\delta)}{3 (n - 1)},
              \qquad \delta = \frac{1 - c}{4 K}

    Each of the 2 K means exceeds its bound with probability at most delta on either side (Maurer and Pontil). The union
    bound adds these probabilities, so the folds need not be independent.

    Guarantee:
        Covers :math:`E f(x) - E f(y)`, averaged over the folds, with probability at least c, whatever the
        distributions, if the held-out samples are independent draws and each critic f takes values in an interval of
        length D (``width``).

    >>> round(bernstein([(Moments(100, 1.0, 0.0), Moments(100, 0.0, 0.0))], 0.95, 1.0), 4)
    0.2392

    References:
        Maurer & Pontil, "Empirical Bernstein bounds and sample-variance penalization", COLT 2009, theorem 4.
    """
    log = math.log(2 / ((1 - confidence) / (4 * len(pairs))))  # union bound: K folds, two means, two sides
    means = [m for pair in pairs for m in pair]
    each = (math.sqrt(2 * m.variance * log / m.count) + 7 * width * log / (3 * (m.count - 1)) for m in means)
    return sum(each) / len(pairs)
