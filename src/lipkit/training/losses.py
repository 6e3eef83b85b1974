r"""Training losses: pure functions of (outputs, targets), and the table that names them.

Notation: ``y`` (N, K) outputs, ``t`` (N,) labels, ``M_n = y_nt - max_{i != t} y_ni`` the margin of sample
n, L = ``lipschitz`` > 0 the Lipschitz constant that the network was built for, ``eps`` or ``eps0`` > 0 the l2 radius
to train for, in units of the input, T = ``temperature`` > 0. In the HKR losses, ``alpha`` in [0, 1] is the weight of
the hinge (0 keeps the Wasserstein part only), and m = ``min_margin`` > 0. K is at least 2. No certificate depends on
the loss.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.attacks.ascent import margin_loss
from lipkit.errors import OptionError

Loss = Callable[[Tensor, Tensor], Tensor]


def hinge(outputs: Tensor, targets: Tensor, *, eps0: float = 0.5, lipschitz: float = 1.0) -> Tensor:
    r"""Multi-class hinge loss that asks for a certified radius of ``eps0``.

        mean_n 1/K sum_{i != t} max(0, sqrt(2) L eps0 - y_nt + y_ni)

    It is zero exactly when every sample is certified at radius ``eps0`` by the global constant L.

    >>> hinge(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), eps0=0.5).item()
    0.0
    >>> round(hinge(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), eps0=2**0.5).item(), 6)
    0.5

    Source: Trockman, Kolter, "Orthogonalizing Convolutional Layers with the Cayley Transform", ICLR 2021, Sec. 5.
    """
    _check("> 0", eps0=eps0, lipschitz=lipschitz)
    return F.multi_margin_loss(outputs, targets, margin=math.sqrt(2) * lipschitz * eps0)


def largest_hinge(outputs: Tensor, targets: Tensor, *, eps0: float = 0.5, lipschitz: float = 1.0) -> Tensor:
    r"""Hinge loss of the margin, like `hinge` for the strongest rival only: ``mean_n max(0, sqrt(2) L eps0 - M_n)``.

    >>> largest_hinge(torch.tensor([[1.0, 0.0, 0.5]]), torch.tensor([0]), eps0=0.5**0.5).item()
    0.5

    Source: Crammer, Singer, JMLR 2001; deel-torchlip's CategoricalHingeLoss with ``min_margin = sqrt(2) L eps0``.
    """
    _check("> 0", eps0=eps0, lipschitz=lipschitz)
    return F.relu(math.sqrt(2) * lipschitz * eps0 + margin_loss(outputs, targets)).mean()


def offset_cross_entropy(
    outputs: Tensor, targets: Tensor, *, temperature: float = 0.25, offset: float = 1.5 * math.sqrt(2)
) -> Tensor:
    r"""Cross-entropy at temperature T after u is subtracted from the true class: ``T CE((y - u onehot(t)) / T, t)``.

    The gradient stays large until the margin exceeds u, so the network learns margins and not only classes.

    Args:
        outputs: (N, K); or (N, 1) for two classes, the logit of class 1 against class 0 (the logistic loss).
        offset: u, in units of the outputs; not negative. ``sqrt(2) L eps0`` asks for the radius eps0; with one output
            ``L eps0`` does.

    >>> y = torch.tensor([[3.0, 1.0]])
    >>> round(offset_cross_entropy(y, torch.tensor([0]), temperature=1.0, offset=2.0).item(), 4)
    0.6931

    Source: Prach, Lampert, "Almost-Orthogonal Layers for Efficient General-Purpose Lipschitz Networks", ECCV 2022; and
    Wang, Manchester, "Direct Parameterization of Lipschitz-Bounded Deep Networks", ICML 2023 (T = 1/4, u = 1.5 sqrt 2).
    """
    _check("> 0", temperature=temperature)
    _check(">= 0", offset=offset)
    if outputs.shape[-1] == 1:
        outputs = F.pad(outputs, (1, 0))  # a class 0 whose output is 0
    shift = offset * F.one_hot(targets, outputs.shape[-1]).to(outputs.dtype)
    return temperature * F.cross_entropy((outputs - shift) / temperature, targets)


def cross_entropy(outputs: Tensor, targets: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy with the softmax, averaged over the samples.

    With s = ``smoothing`` in [0, 1) the target is ``1 - s`` for the label plus ``s / K`` for every class.

    >>> round(cross_entropy(torch.zeros(1, 2), torch.tensor([0])).item(), 4)
    0.6931
    """
    if not 0 <= smoothing < 1:
        raise OptionError(f"smoothing: expected a number in [0, 1), got {smoothing}")
    return F.cross_entropy(outputs, targets, label_smoothing=smoothing)


def certificate_regularized_cross_entropy(
    outputs: Tensor, targets: Tensor, *, weight: float = 0.1, lipschitz: float = 1.0
) -> Tensor:
    r"""Cross-entropy minus the mean certified radius.

        CE(y, t) - weight mean_n max(0, M_n) / (sqrt(2) L),     weight >= 0

    >>> y, t = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> gain = cross_entropy(y, t) - certificate_regularized_cross_entropy(y, t, weight=1.0)
    >>> round(gain.item(), 4)
    1.4142

    Source: Singla, Singla, Feizi, "Improved deterministic l2 robustness on CIFAR-10 and CIFAR-100", ICLR 2022
    (certificate regularization).
    """
    _check("> 0", lipschitz=lipschitz)
    _check(">= 0", weight=weight)
    radius = F.relu(-margin_loss(outputs, targets)) / (math.sqrt(2) * lipschitz)
    return F.cross_entropy(outputs, targets) - weight * radius.mean()


def emma(
    outputs: Tensor, targets: Tensor, *, eps: float = 36 / 255, temperature: float = 1.0, lipschitz: float = 1.0
) -> Tensor:
    r"""Cross-entropy with each rival raised by what the radius ``eps`` allows, but not above the true class (EMMA).

    .. math:: T\,\mathrm{CE}\Bigl(\frac{y + e \sqrt2 L \varepsilon}{T}, t\Bigr), \qquad
        e_i = \mathrm{clip}\Bigl(\frac{y_t - y_i}{\sqrt2 L \varepsilon}, 0.01, 1\Bigr) \ (i \ne t), \quad e_t = 0

    A rival within reach is raised only until it ties with the true class, so that samples that cannot be certified do
    not dominate. No gradient flows through e.

    >>> y, t = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    >>> round(emma(y, t, eps=2.0).item(), 4) == round(math.log(2), 4)  # in reach: raised to a tie
    True

    Source: Hu, Zou, Wang, Leino, Fredrikson, "Unlocking Deterministic Robustness Certification on ImageNet", NeurIPS
    2023 (there with the distances of the rows of the last layer in place of sqrt(2)).
    """
    _check("> 0", eps=eps, temperature=temperature, lipschitz=lipschitz)
    reach = math.sqrt(2) * lipschitz * eps
    raised = ((outputs.gather(1, targets[:, None]) - outputs) / reach).clamp(0.01, 1).detach()
    raised = raised.scatter(1, targets[:, None], 0.0)
    return temperature * F.cross_entropy((outputs + raised * reach) / temperature, targets)


def gloro(outputs: Tensor, targets: Tensor, *, eps: float = 36 / 255, lipschitz: float | Tensor = 1.0) -> Tensor:
    r"""Cross-entropy with a further class "not certified": the largest output that a rival can reach within ``eps``.

    .. math:: \mathrm{CE}\bigl((y_1, \dots, y_K, y_\bot), t\bigr), \qquad
        y_\bot = \max_{i \ne j} y_i + \sqrt2 L \varepsilon, \quad j = \arg\max_i y_i

    For layers without a constraint L is ``lipkit.lipschitz(network, input_shape)``; training then lowers it, too.

    >>> y, t = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    >>> expected = math.log(2 * math.e + 1) - 1  # at the radius of the certificate the rival ties with the class
    >>> round(gloro(y, t, eps=0.5**0.5).item(), 4) == round(expected, 4)
    True

    Source: Leino, Wang, Fredrikson, "Globally-Robust Neural Networks", ICML 2021, section 3 (there with a constant
    for each pair of classes in place of sqrt(2) L).
    """
    _check("> 0", eps=eps, lipschitz=float(torch.as_tensor(lipschitz).detach()))
    two = outputs.topk(2, dim=1).values
    rival = two[:, 1:] + (math.sqrt(2) * eps * lipschitz)
    return F.cross_entropy(torch.cat((outputs, rival.to(outputs.dtype)), 1), targets)


def logit_annealing(
    outputs: Tensor, targets: Tensor, *, temperature: float = 0.75, offset: float = 2.0, power: float = 5.0
) -> Tensor:
    r"""Offset cross-entropy whose weight :math:`(1 - p)^\beta` falls with the probability p of the true class.

    .. math:: \frac{1}{N} \sum_n -T (1 - p_n)^\beta \log p_n, \qquad
        p = \mathrm{softmax}\Bigl(\frac{y - \xi\,\mathrm{onehot}(t)}{T}\Bigr)_t

    with xi = ``offset`` >= 0 in units of the outputs, beta = ``power``; beta = 0 is the offset cross-entropy.

    >>> y, t = torch.tensor([[3.0, 1.0]]), torch.tensor([0])
    >>> round(logit_annealing(y, t, temperature=1.0, offset=2.0, power=1.0).item(), 4)
    0.3466

    Source: Lai et al., "Enhancing Certified Robustness via Block Reflector Orthogonal Layers and Logit Annealing
    Loss", ICML 2025 (T = 0.75, xi = 2, beta = 5).
    """
    _check("> 0", temperature=temperature)
    _check(">= 0", offset=offset, power=power)
    shift = offset * F.one_hot(targets, outputs.shape[-1]).to(outputs.dtype)
    logs = F.log_softmax((outputs - shift) / temperature, dim=1).gather(1, targets[:, None])[:, 0]
    # 1 - p, without cancellation for p near 1; never 0, where a power below 1 has no derivative
    missing = -torch.expm1(logs.clamp_max(-1e-12))
    return (-temperature * missing**power * logs).mean()


def hkr(outputs: Tensor, targets: Tensor, *, alpha: float = 0.9, min_margin: float = 1.0) -> Tensor:
    r"""Hinge-Kantorovich-Rubinstein loss: a hinge for accuracy plus a Wasserstein term for large margins.

        alpha H - (1 - alpha) KR
        KR = 1/K sum_k (mean of y_nk over t_n = k - mean of y_nk over t_n != k)
        H  = mean_n 1/K sum_k v_nk max(0, m / 2 - s_nk y_nk)

    with s_nk = 1, v_nk = K - 1 where t_n = k, and s_nk = -1, v_nk = 1 elsewhere. One output (N, 1) is that of label 1
    against label 0, with v = 1. Means are over the batch; a side without samples has mean 0.

    >>> y = torch.tensor([[2.0], [-1.0]])
    >>> hkr(y, torch.tensor([1, 0]), alpha=0.0).item(), hkr(y, torch.tensor([1, 0]), alpha=1.0, min_margin=5.0).item()
    (-3.0, 1.0)

    Source: Serrurier et al., "Achieving Robustness in Classification Using Optimal Transport with Hinge
    Regularization", CVPR 2021; weights and halves as in deel-torchlip.
    """
    _check("> 0", min_margin=min_margin)
    _check("in [0, 1]", alpha=alpha)
    classes = outputs.shape[-1]
    own = F.one_hot(targets, classes) > 0 if classes > 1 else targets[:, None] > 0  # (N, K)
    sides = (own, ~own)
    means = [torch.where(side, outputs, 0).sum(0) / side.sum(0).clamp_min(1) for side in sides]
    half = min_margin / 2
    short = torch.where(own, max(classes - 1, 1) * F.relu(half - outputs), F.relu(half + outputs))
    return alpha * short.mean() - (1 - alpha) * (means[0] - means[1]).mean()  # both means also divide by K


def soft_hkr(
    outputs: Tensor, targets: Tensor, *, alpha: float = 0.9, min_margin: float = 1.0, temperature: float = 1.0
) -> Tensor:
    r"""HKR of each sample: its class against a softmax-weighted mean of the other classes.

    .. math:: \frac1N \sum_n \sum_k w_{nk}
        \bigl[\alpha \max(0, \tfrac m2 - s_{nk} y_{nk}) - (1 - \alpha) s_{nk} y_{nk}\bigr]

    The true class has s = 1 and w = 1. The others have s = -1, and w is their softmax at the inverse temperature
    :math:`\tau m / \max(m, \text{mean} |y|)`, which gets no gradient: a larger ``temperature`` tau puts more weight on
    the strongest rival.

    >>> y, t = torch.tensor([[2.0, 1.0, 1.0]]), torch.tensor([0])
    >>> soft_hkr(y, t, alpha=0.0).item(), soft_hkr(y, t, alpha=1.0).item()
    (-1.0, 1.5)

    Source: Serrurier et al., "On the explainable properties of 1-Lipschitz neural networks", NeurIPS 2023. Where
    deel-torchlip keeps a running mean of |y|, this is the mean of the batch, so no state is kept between calls.
    """
    _check("> 0", min_margin=min_margin, temperature=temperature)
    _check("in [0, 1]", alpha=alpha)
    own = F.one_hot(targets, outputs.shape[-1]) > 0
    with torch.no_grad():
        inverse = temperature * min_margin / outputs.abs().mean().clamp_min(min_margin)
    weights = torch.where(own, 1, (inverse * outputs).masked_fill(own, -math.inf).softmax(1))
    signed = torch.where(own, outputs, -outputs)  # s y
    each = alpha * F.relu(min_margin / 2 - signed) - (1 - alpha) * signed
    return (weights * each).sum(1).mean()


def lse_hkr(
    outputs: Tensor, targets: Tensor, *, alpha: float = 0.9, min_margin: float = 1.0, temperature: float = 1.0,
    penalty: float = 1.0,
) -> Tensor:  # fmt: skip
    r"""HKR of the true class and of a smooth maximum of the others.

    .. math:: \frac1N \sum_n \alpha \bigl[(\tfrac m2 - y_t)_+ + (\tfrac m2 + \ell)_+\bigr] - (1 - \alpha)(y_t - \ell),
        \quad \ell = \frac1c \log \sum_{k \ne t} e^{c y_k}, \; c = \frac{2 \log(K - 1)}{m p}

    so that l exceeds the largest of the others by at most m p / 2, with p = ``penalty`` > 0 and K >= 3; ``temperature``
    multiplies the outputs first.

    >>> y, t = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0])
    >>> round(lse_hkr(y, t, alpha=0.0).item(), 4)  # the smooth maximum of two zeros is m / 2
    -1.5

    Source: deel-torchlip 1.0's LseHKRMulticlassLoss.
    """
    _check("> 0", min_margin=min_margin, temperature=temperature, penalty=penalty)
    _check("in [0, 1]", alpha=alpha)
    outputs = temperature * outputs
    rivals = outputs.scatter(1, targets[:, None], -math.inf)
    sharpness = 2 * math.log(max(outputs.shape[1] - 1, 2)) / (min_margin * penalty)  # c, not 0 for two classes
    rival = torch.logsumexp(sharpness * rivals, 1) / sharpness
    own, half = outputs.gather(1, targets[:, None])[:, 0], min_margin / 2
    return (alpha * (F.relu(half - own) + F.relu(half + rival)) - (1 - alpha) * (own - rival)).mean()


def cosine(
    outputs: Tensor, targets: Tensor, *, share: float = 0.0, eps: float = 36 / 255, lipschitz: float = 1.0
) -> Tensor:
    r"""Negative cosine between the outputs and the axis of the true class, plus a penalty on radii below ``eps``.

    .. math:: \frac1N \sum_n -(1 - \gamma) \frac{y_t}{\|y\|} + \gamma \sum_{k \ne t} q_k c_k, \qquad
        c_k = \Bigl(\varepsilon - \frac{y_t - y_k}{\sqrt2 L}\Bigr)_+, \; q = \mathrm{softmax}(c)

    with gamma = ``share`` in [0, 1], the weight of the penalty.

    >>> y, t = torch.tensor([[3.0, 4.0]]), torch.tensor([0])
    >>> round(cosine(y, t).item(), 4), round(cosine(y, t, share=1.0, eps=1.0, lipschitz=0.5**0.5).item(), 4)
    (-0.6, 2.0)

    Source: orthogonium 0.0's CosineLoss and Cosine_VRA_Loss (its "classwise" constant L is sqrt(2) L here).
    """
    _check("> 0", eps=eps, lipschitz=lipschitz)
    _check("in [0, 1]", share=share)
    own = outputs.gather(1, targets[:, None])
    missing = F.relu(eps - (own - outputs) / (math.sqrt(2) * lipschitz))
    others = F.one_hot(targets, outputs.shape[-1]) == 0
    weights = missing.masked_fill(~others, -math.inf).softmax(1)
    angle = F.cosine_similarity(outputs, (~others).to(outputs.dtype))
    return (share * (weights * missing).sum(1) - (1 - share) * angle).mean()


def trades(outputs: Tensor, targets: Tensor, *, beta: float = 6.0) -> Tensor:
    r"""Cross-entropy of samples plus the KL divergence of the softmax at their adversarial examples.

    .. math:: \frac1N \sum_n \mathrm{CE}(y_n, t_n) + \beta\, \mathrm{KL}\bigl(\mathrm{softmax}(y_n) \,\|\,
        \mathrm{softmax}(y'_n)\bigr)

    Args:
        outputs: (2N, K): y of the samples, then y' of their adversarial examples in the same order, as
            ``PgdAdversary(beside=True)`` makes them (it raises the cross-entropy; the paper's raises the KL term).
        targets: (2N,), the labels twice.
        beta: weight of robustness, not negative.

    >>> y = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
    >>> round(trades(y, torch.tensor([0, 0]), beta=1.0).item(), 4) == round(math.log(2) + 0.5 * math.log(4 / 3), 4)
    True

    Source: Zhang et al., "Theoretically Principled Trade-off between Robustness and Accuracy", ICML 2019, eq. (5).
    """
    _check(">= 0", beta=beta)
    if len(outputs) % 2 or not torch.equal(*targets.chunk(2)):
        expected = "expected samples and then their adversarial examples, with the same labels"
        raise OptionError(f"trades: {expected}, got a batch of {len(outputs)} without: set adversary.beside")
    clean, moved = outputs.chunk(2)  # the samples come first
    change = F.kl_div(moved.log_softmax(1), clean.log_softmax(1), reduction="batchmean", log_target=True)
    return F.cross_entropy(clean, targets[: len(clean)]) + beta * change


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean of the squared differences over samples and outputs, for regression; shapes must agree exactly.

    >>> mse(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]])).item()
    2.0
    """
    if outputs.shape != targets.shape:  # broadcasting (N,) against (N, 1) would silently compare all pairs
        raise OptionError(f"expected targets of shape {tuple(outputs.shape)}, got {tuple(targets.shape)}")
    return F.mse_loss(outputs, targets)


LOSSES: dict[str, Callable[..., Tensor]] = {
    **{loss.__name__: loss for loss in (hinge, offset_cross_entropy, cross_entropy)},
    "certificate_regularized": certificate_regularized_cross_entropy,
    **{loss.__name__: loss for loss in (emma, gloro, hkr, soft_hkr, lse_hkr, largest_hinge, logit_annealing)},
    **{loss.__name__: loss for loss in (cosine, trades, mse)},
}
REGRESSION = frozenset({"mse"})

RULES: dict[str, Callable[[float], bool]] = {  # NaN is refused by each
    "> 0": lambda value: value > 0,
    ">= 0": lambda value: value >= 0,
    "in [0, 1]": lambda value: 0 <= value <= 1,
}


def _check(rule: str, **values: float) -> None:
    for name, value in values.items():
        if not RULES[rule](value):
            raise OptionError(f"expected {name} {rule}, got {value}")
