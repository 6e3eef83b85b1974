"""The attack held against the certificate: no adversarial example may lie inside a certified radius."""

from __future__ import annotations

import copy
import dataclasses
import math

import torch
from torch import Tensor

from lipkit import plain
from lipkit.attacks.minimum_norm import shrink
from lipkit.attacks.pgd import Box, misclassified, norms, pgd_l2
from lipkit.certificates.certificate import Certificate
from lipkit.certificates.exported import float64_copy
from lipkit.certificates.intervals import Share, share
from lipkit.errors import CertificateViolation


@dataclasses.dataclass(frozen=True)
class Attack:
    """An l2 PGD with margin loss at the radii ``eps``, on ``samples`` samples (None: all) drawn by ``seed``."""

    eps: tuple[float, ...]
    steps: int
    restarts: int
    samples: int | None
    box: Box
    seed: int


@dataclasses.dataclass(frozen=True)
class Attacked:
    """Accuracy under attack at one radius; ``certified`` is the certified accuracy of the same samples."""

    eps: float
    share: Share
    certified: Share


@dataclasses.dataclass(frozen=True)
class CrossCheck:
    """Adversarial examples compared with radii: how many, and the smallest ``norm / radius`` (>= 1; inf if none)."""

    compared: int
    closest: float


def attack_certificate(
    network: plain.Network,
    certificate: Certificate,
    x: Tensor,
    y: Tensor,
    attack: Attack,
    *,
    batch_size: int = 256,
    confidence: float = 0.95,
    device: str | torch.device = "cpu",
) -> tuple[tuple[Attacked, ...], CrossCheck]:
    """Attack the samples of a certificate at ``attack.eps`` and at their own radii; see `evaluate`.

    Args:
        network: the network that was certified.
        certificate: of the samples ``x``, ``y``, in this order.
        x: (N, *input_shape), within ``attack.box``.
        y: (N,) int64.

    Raises:
        CertificateViolation: an adversarial example lies inside a certified radius.
    """
    if not attack.eps:
        return (), CrossCheck(0, math.inf)
    exact = float64_copy(network)
    # The attack runs in float32, whatever the network was trained in; the float64 copy confirms what it finds.
    fast = copy.deepcopy(network).to(device=device, dtype=torch.float32)
    generator = torch.Generator().manual_seed(attack.seed)
    chosen = _choose(len(x), attack.samples, attack.seed)
    order = sorted(range(len(attack.eps)), key=attack.eps.__getitem__)
    survived = torch.zeros(len(attack.eps), len(x), dtype=torch.bool)
    compared, closest = 0, math.inf
    for index in chosen.split(batch_size):
        index = index[certificate.correct[index]]  # a wrong prediction is lost already, at any radius
        if not len(index):
            continue
        clean, labels = x[index].cpu(), y[index].cpu()
        own = certificate.radius[index]
        own = torch.where(own.isfinite(), own, max(attack.eps))
        alive = torch.ones(len(index), dtype=torch.bool)
        for row in range(len(order) + 1):
            # what fell at a smaller radius has fallen at a larger one; last, every sample at its own radius
            active = alive.nonzero()[:, 0] if row < len(order) else torch.arange(len(index))
            found = pgd_l2(
                fast,
                clean[active].to(device),
                labels[active].to(device),
                attack.eps[order[row]] if row < len(order) else own,
                steps=attack.steps,
                restarts=attack.restarts,
                box=attack.box,
                generator=generator,
            ).cpu()
            with torch.no_grad():  # the float64 network decides: it is the one that was certified
                wrong = misclassified(exact(found.double()), labels[active])
            if row < len(order):
                alive[active[wrong]] = False
                survived[order[row], index] = alive
            if bool(wrong.any()):
                fallen = active[wrong]
                start, end = clean[fallen].double(), found[wrong].double()
                near = shrink(exact, start, end, labels[fallen])
                closest = min(closest, check_examples(certificate, index[fallen], norms(near, start)))
                compared += len(fallen)
    rows = []
    for eps, alive in zip(attack.eps, survived, strict=True):
        certified = certificate.certified(eps)
        check_accuracy(certificate, chosen, alive, eps)
        rows.append(Attacked(eps, share(alive[chosen], confidence), share(certified[chosen], confidence)))
    return tuple(rows), CrossCheck(compared, closest)


def check_examples(certificate: Certificate, index: Tensor, distance: Tensor) -> float:
    """Compare adversarial examples with certified radii.

    Args:
        certificate: of all samples.
        index: (M,) the samples that the examples belong to.
        distance: (M,) float64, l2 distance of each example from its sample.

    Returns:
        The smallest ``distance / radius``; ``inf`` if no sample with a positive radius is among them.

    Raises:
        CertificateViolation: a distance is below the radius.
    """
    radius = certificate.radius[index]
    ratio = torch.where(radius > 0, distance / radius, math.inf)
    inside = distance < radius
    if bool(inside.any()):
        worst = int(ratio.argmin())
        raise CertificateViolation(
            f"sample {int(index[worst])}: expected no adversarial example within its certified radius "
            f"{float(radius[worst]):.9g}, got one at l2 norm {float(distance[worst]):.9g} "
            f"({int(inside.sum())} such examples; Lipschitz bound used: {certificate.constant:.9g})"
        )
    return float(ratio.min()) if len(ratio) else math.inf


def check_accuracy(certificate: Certificate, chosen: Tensor, survived: Tensor, eps: float) -> None:
    """Raise `CertificateViolation` if a sample certified at ``eps`` did not survive an attack with that radius.

    Args:
        certificate: of N samples.
        chosen: (M,) the samples that were attacked.
        survived: (N,) bool, still correct under attack.
        eps: radius that no attacked point exceeded.
    """
    broken = chosen[(certificate.certified(eps) & ~survived)[chosen]]
    if len(broken):
        sample = int(broken[0])
        raise CertificateViolation(
            f"sample {sample}: expected no adversarial example within its certified radius "
            f"{float(certificate.radius[sample]):.9g}, got one at l2 norm at most {eps:.9g} "
            f"({len(broken)} such samples)"
        )


def _choose(total: int, samples: int | None, seed: int) -> Tensor:
    if samples is None or samples >= total:
        return torch.arange(total)
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:samples].sort().values
