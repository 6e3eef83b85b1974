"""An attack on the samples of a certificate: accuracy at each radius, the closest examples, and their cross-check.

No adversarial example may lie inside a certified radius.
"""

import copy
import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor

from lipkit import modules
from lipkit.attacks import ATTACKS, run_attack, shrink
from lipkit.attacks.ascent import Box, ball, clip, like, misclassified, norms
from lipkit.certificates.certificate import Certificate
from lipkit.certificates.intervals import Share, as_radii, share
from lipkit.errors import CertificateViolation, OptionError, check_choice, interval
from lipkit.linalg.matrices import check_integer
from lipkit.modules.storage import float64_copy
from lipkit.proof.roundoff import product, root
from lipkit.shown import Told


@dataclasses.dataclass(frozen=True)
class CrossCheck:
    """Adversarial examples compared with radii: how many, and the smallest ``norm / radius`` (>= 1; inf if none)."""

    compared: int
    closest: float


def check_examples(certificate: Certificate, index: Tensor, distance: Tensor, numbers: Tensor | None = None) -> float:
    """Compare adversarial examples, at l2 ``distance`` (M,) from the samples ``index`` (M,), with certified radii.

    ``numbers`` (N,) name the samples in the message; None counts from 0. Returns the smallest ratio of distance and
    radius; inf if no sample has a positive radius.

    Raises:
        CertificateViolation: a distance is below the radius.
    """
    radius = certificate.radius[index]
    ratio = torch.where(radius > 0, distance / radius, math.inf)  # a radius of 0 certifies nothing
    inside = distance < radius
    if bool(inside.any()):
        worst = int(ratio.argmin())
        sample = int(index[worst])
        name, proved = sample if numbers is None else int(numbers[sample]), float(certificate.radius[sample])
        raise CertificateViolation(
            f"sample {name}: expected no adversarial example within its certified radius {proved:.9g}, got one at l2 "
            f"norm {float(distance[worst]):.9g} ({int(inside.sum())} such examples; Lipschitz bound used: "
            f"{certificate.constant:.9g})"
        )
    return float(ratio.min()) if len(ratio) else math.inf


@dataclasses.dataclass(frozen=True)
class Attack:
    """The settings of an attack on the samples of a certificate.

    Attributes:
        eps: radii in units of ``norm``, empty for no attack; None for those that `evaluate` certifies.
        steps, restarts: of the attack; None for its defaults.
        samples: how many samples are attacked, drawn by ``seed``; None for all.
        box: range of valid input entries, None for no limit; "auto" is [0, 1] if every sample lies in it (images),
            else None.
        seed: of the choice of samples and of the attack.
        name: one of `lipkit.attacks.ATTACKS`.
        norm: ``"l2"`` or ``"linf"``.
    """

    eps: tuple[float, ...] | None = None
    steps: int | None = None
    restarts: int | None = None
    samples: int | None = 1000
    box: Box | Literal["auto"] = "auto"
    seed: int = 0
    name: str = "pgd"
    norm: str = "l2"

    def __post_init__(self) -> None:
        if self.samples is not None:
            check_integer("samples", self.samples, 0)
        check_integer("seed", self.seed, -(2**63), 2**63 - 1)


@dataclasses.dataclass(frozen=True)
class Attacked:
    """Accuracy under attack at one radius; ``certified`` is the certified accuracy of the same samples."""

    eps: float
    share: Share
    certified: Share


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """The closest adversarial example found for each sample that has one, in the order of the samples.

    Attributes:
        index, prediction: (M,) the sample, and the class of the point.
        point: (M, *input_shape) float64, misclassified by the float64 network.
        l2, linf: (M,) distances of the float64 points from their samples.
    """

    index: Tensor
    point: Tensor
    l2: Tensor
    linf: Tensor
    prediction: Tensor

    def __len__(self) -> int:
        return len(self.index)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The result of `attack_samples`: ``clean`` is the accuracy without attack, ``ran`` names the attacks that ran."""

    rows: tuple[Attacked, ...]
    cross_check: CrossCheck
    examples: Examples
    clean: Share
    ran: tuple[str, ...]


def attack_samples(
    network: modules.Network,
    certificate: Certificate,
    x: Tensor,
    y: Tensor,
    attack: Attack,
    *,
    batch_size: int = 256,
    confidence: float = 0.95,
    device: str | torch.device = "cpu",
    numbers: Tensor | None = None,
    progress: Told | None = None,
) -> Attempt:
    r"""Attack the samples of a certificate at ``attack.eps``, in l2 also at their own radii; see `evaluate`.

    Every example is confirmed in float64, moved closer by bisection, and its l2 norm compared with the certified
    radius, whatever the norm of the search. The l_inf ball of radius ``eps`` lies in the l2 ball of radius
    ``eps sqrt(d)``, so a sample with a larger radius counts as certified there.

    Args:
        network, certificate: the network that was certified for the samples ``x``, ``y``, in this order.
        x, y: (N, *input_shape), within ``attack.box``; (N,) int64.
        attack: what to run. A minimum-norm attack runs once, with radii or without; its example counts at each radius
            that holds it.
        numbers: (N,) how messages and `Examples` number the samples; None counts from 0.
        progress: called as in `lipkit.certify`, with ``"attacked"``.
        batch_size, confidence, device: as in `evaluate`.

    Raises:
        CertificateViolation: an adversarial example lies inside a certified radius.
        OptionError: the certificate is of other samples. OptionError, ShapeError: see `lipkit.attacks.run_attack`.
    """
    if not torch.equal(certificate.label, y.cpu()):
        got = "other labels" if len(y) == len(certificate) else len(y)
        raise OptionError(f"expected the {len(certificate)} samples that were certified, in this order, got {got}")
    numbers = torch.arange(len(x)) if numbers is None else numbers
    box, radii = resolved_box(attack.box, x), as_radii("eps", attack.eps)
    if certificate.method == "local" and certificate.input_range is not None:
        # Local radii hold only for inputs in the range; rounding may have put samples slightly outside.
        low, high = certificate.input_range
        box = min(low, float(x.min())), max(high, float(x.max()))
    check_choice("attack", attack.name, ATTACKS)
    space, minimum_norm = ball(attack.norm), ATTACKS[attack.name].minimum_norm
    exact = float64_copy(network)
    # The attack runs in float32, whatever the network was trained in; the float64 copy confirms its examples.
    fast = copy.deepcopy(network).to(device=device, dtype=torch.float32)
    generator = torch.Generator().manual_seed(attack.seed)
    chosen = choose_samples(len(x), attack.samples, attack.seed)
    # How far each sample was moved until it fell, in the norm of the attack; 0 if it is wrong already.
    reach = torch.full((len(x),), math.inf, dtype=torch.float64).masked_fill(~certificate.correct, 0.0)
    # The closest example of each sample that has one, and its l2 distance.
    nearest: dict[int, Tensor] = {}
    size = torch.full((len(x),), math.inf, dtype=torch.float64)
    compared, closest = 0, math.inf
    ran: dict[str, None] = {}
    for batch, index in enumerate(chosen.split(batch_size)):
        if progress is not None and batch:
            progress("attacked", batch * batch_size, len(chosen))
        index = index[certificate.correct[index]]  # a wrong prediction needs no attack
        if not len(index):
            continue
        clean, labels = x[index].cpu(), y[index].cpu()
        searches: list[float | Tensor | None] = [None] if minimum_norm else [*sorted(radii)]
        if attack.norm == "l2" and not minimum_norm:
            own = certificate.radius[index]
            # An infinite radius cannot be attacked.
            searches.append(torch.where(own.isfinite(), own, max(radii, default=0.0)))
        for eps in searches:
            # A sample that fell within eps is not attacked there again; at their own radii all are attacked.
            left = reach[index] > eps if isinstance(eps, float) else torch.ones(len(index), dtype=torch.bool)
            active = left.nonzero()[:, 0]
            if not len(active):  # torch's PixelUnshuffle fails on empty batches
                continue
            # AutoAttack knows one radius for all samples.
            one_radius = ATTACKS[attack.name].package == "pyautoattack"
            name = "apgd" if one_radius and isinstance(eps, Tensor) else attack.name
            found = run_attack(
                name, fast, clean[active].to(device, torch.float32), labels[active].to(device), norm=attack.norm,
                box=box, steps=attack.steps, restarts=attack.restarts, generator=generator, eps=eps,
            )  # fmt: skip
            ran[found.ran] = None
            points = _confirmed(exact, clean[active], found.points.cpu(), labels[active], box)
            with torch.no_grad():  # the float64 network decides: it is the one that was certified
                wrong = misclassified(exact(points), labels[active])
            fallen, end = active[wrong], points[wrong]
            if not len(fallen):
                continue
            at, start = index[fallen], clean[fallen].double()
            reach[at] = torch.minimum(reach[at], space.distance(end, start))
            example = shrink(exact, start, end, labels[fallen])
            distance = norms(example, start)
            closest = min(closest, check_examples(certificate, at, distance, numbers))
            compared += len(at)
            closer = distance < size[at]
            size[at[closer]] = distance[closer]
            nearest.update(zip(at[closer].tolist(), example[closer], strict=True))
    rows = []
    for eps in radii:
        # The l2 radius of the ball around a cube of half side eps, rounded up.
        sphere = eps if attack.norm == "l2" else product(root(x[0].numel()), eps)
        # A sample certified there has survived: `check_examples` saw every example that was found.
        survived, certified = (reach > eps)[chosen], certificate.certified(sphere)[chosen]
        rows.append(Attacked(eps, share(survived, confidence), share(certified, confidence)))
    index = torch.tensor(sorted(nearest), dtype=torch.int64)
    points = torch.stack([nearest[i] for i in index.tolist()]) if nearest else x[:0].cpu().double()
    with torch.no_grad():
        prediction = torch.cat([exact(part).argmax(dim=1) for part in points.split(batch_size)]) if nearest else index
    change = (points - x[index].cpu().double()).flatten(1)
    return Attempt(
        rows=tuple(rows),
        cross_check=CrossCheck(compared, closest),
        examples=Examples(numbers[index], points, size[index], change.abs().amax(dim=1), prediction),
        clean=share(certificate.correct[chosen], confidence),
        ran=tuple(ran),
    )


def choose_samples(total: int, samples: int | None, seed: int) -> Tensor:
    """Indices of the samples to attack, ascending: all, or ``samples`` of them drawn by ``seed``."""
    if samples is None or samples >= total:
        return torch.arange(total)
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:samples].sort().values


def resolved_box(box: Box | Literal["auto"], x: Tensor) -> Box:
    """The box, with "auto" replaced by [0, 1] if every sample lies in it, else by None."""
    if isinstance(box, str) and box == "auto":
        return (0.0, 1.0) if bool(((x >= 0) & (x <= 1)).all()) else None
    return None if box is None else interval("box", box, finite=False)


def _confirmed(exact: modules.Network, clean: Tensor, points: Tensor, labels: Tensor, box: Box) -> Tensor:
    """Points in float64, moved outward by a relative 1e-4 at most where the float64 network classifies correctly."""
    clean, points = clean.double(), points.double()
    result = points
    for further in (1e-6, 1e-5, 1e-4):  # in float32 the boundary may be a little closer
        with torch.no_grad():
            right = ~misclassified(exact(result), labels)
        if not bool(right.any()):
            break
        ahead = clip(clean + (points - clean) * (1 + further), box)
        result = torch.where(like(right, ahead), ahead, result)
    return result
