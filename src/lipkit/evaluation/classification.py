r"""Clean, certified and attacked accuracy together, with the attack held against the certificate."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lipkit import plain
from lipkit.attacks.minimum_norm import shrink
from lipkit.attacks.pgd import Box, misclassified, norms, pgd_l2
from lipkit.certificates.certificate import Certificate, certify, float64_copy
from lipkit.certificates.intervals import Share, share
from lipkit.certificates.units import format_radius
from lipkit.errors import CertificateViolation, OptionError

if TYPE_CHECKING:
    from lipkit.data import Split

EPS = (36 / 255, 72 / 255, 108 / 255, 255 / 255)


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
class ClassRow:
    """One class: clean accuracy, and certified accuracy at each eps of the evaluation."""

    name: str
    clean: Share
    certified: tuple[Share, ...]


@dataclasses.dataclass(frozen=True)
class CrossCheck:
    """Adversarial examples compared with radii: how many, and the smallest ``norm / radius`` (>= 1; inf if none)."""

    compared: int
    closest: float


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What `evaluate` measured. ``eps`` and ``certified`` run in parallel; ``times`` are seconds."""

    certificate: Certificate
    eps: tuple[float, ...]
    clean: Share
    certified: tuple[Share, ...]
    attack: Attack
    attacked: tuple[Attacked, ...]
    cross_check: CrossCheck
    per_class: tuple[ClassRow, ...]
    confidence: float
    times: dict[str, float]

    def metrics(self) -> dict[str, float]:
        """Flat numbers, for a line of metrics: ``clean``, ``certified(36/255)``, ``pgd(36/255)``, ``lipschitz``."""
        result = {"clean": self.clean.value}
        for eps, certified in zip(self.eps, self.certified, strict=True):
            result[f"certified({format_radius(eps)})"] = certified.value
        for row in self.attacked:
            result[f"pgd({format_radius(row.eps)})"] = row.share.value
        result["lipschitz"] = self.certificate.constant
        return result


def evaluate(
    network: plain.Network,
    split: Split,
    *,
    eps: Sequence[float] = EPS,
    attack_eps: Sequence[float] | None = None,
    attack_steps: int = 50,
    attack_restarts: int = 1,
    attack_samples: int | None = 1000,
    classes: Sequence[str] = (),
    box: Box | Literal["auto"] = "auto",
    batch_size: int = 256,
    confidence: float = 0.95,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Evaluation:
    r"""Certify every sample, attack some of them, and stop if the two disagree.

    The attack (`lipkit.attacks.pgd_l2`, margin loss) runs at each ``attack_eps`` and once at each sample's own radius.
    Each example it finds is confirmed by the float64 network that was certified, moved as close to its sample as
    bisection brings it, and its float64 norm compared with the sample's certified radius.

    **Guarantee.** If this returns, no adversarial example it found lies inside a certified radius, and PGD accuracy is
    at least the certified accuracy at every ``attack_eps``, on the same samples. That is a test of the certificates,
    which do not rest on it.

    Args:
        network: an exported network (`lipkit.export`).
        split: samples and int64 labels; ``split.batch(index)`` gives inputs and labels.
        eps: l2 radii for certified accuracy, in units of the input.
        attack_eps: radii to attack; None takes ``eps``; an empty sequence attacks nothing.
        attack_steps: gradient steps per restart.
        attack_restarts: starts of the attack.
        attack_samples: how many samples are attacked, drawn by ``seed``; None for all.
        classes: class names, one for each logit; empty names them 0, 1, ...
        box: range of valid input entries for the attack; None for no limit; ``"auto"`` is [0, 1] if every sample lies
            in it (images), else None.
        batch_size: samples evaluated at once.
        confidence: of the Clopper-Pearson intervals.
        seed: of the choice of samples and of the attack.
        device: where logits and the attack are computed (see `lipkit.certify`).

    Raises:
        CertificateViolation: an adversarial example lies inside a certified radius: the bound is wrong.
        OptionError: an eps below 0 or not finite, or another value outside its range.
        NoRuleError, ShapeError: see `lipkit.certify`.
    """
    eps = _radii("eps", eps)
    attack_eps = eps if attack_eps is None else _radii("attack_eps", attack_eps)
    if attack_samples is not None and attack_samples < 0:
        raise OptionError(f"expected attack_samples >= 0 or None, got {attack_samples}")
    start = time.perf_counter()
    x, y = split.batch(torch.arange(len(split)))
    if box == "auto":
        box = (0.0, 1.0) if bool(((x >= 0) & (x <= 1)).all()) else None
    attack = Attack(attack_eps, attack_steps, attack_restarts, attack_samples, box, seed)
    certificate = certify(network, x, y, batch_size=batch_size, device=device)
    certified_at = time.perf_counter()
    attacked, cross_check = attack_certificate(
        network, certificate, x, y, attack, batch_size=batch_size, confidence=confidence, device=device
    )
    end = time.perf_counter()
    return Evaluation(
        certificate=certificate,
        eps=eps,
        clean=share(certificate.correct, confidence),
        certified=tuple(share(certificate.certified(radius), confidence) for radius in eps),
        attack=attack,
        attacked=attacked,
        cross_check=cross_check,
        per_class=per_class(certificate, eps, classes, confidence=confidence),
        confidence=confidence,
        times={"certify": certified_at - start, "attack": end - certified_at},
    )


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
    fast = copy.deepcopy(network).to(device)
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


def per_class(
    certificate: Certificate, eps: Sequence[float], classes: Sequence[str] = (), *, confidence: float = 0.95
) -> tuple[ClassRow, ...]:
    """Clean and certified accuracy of the samples of each class; without names, of labels 0 to the largest one.

    Raises:
        OptionError: fewer names than classes that occur.
    """
    top = int(certificate.label.max()) + 1
    if classes and len(classes) < top:
        raise OptionError(f"expected at least {top} class names, got {len(classes)}")
    rows = []
    for index, name in enumerate(classes or map(str, range(top))):
        own = certificate.label == index
        clean = share(certificate.correct[own], confidence)
        certified = tuple(share(certificate.certified(radius)[own], confidence) for radius in eps)
        rows.append(ClassRow(str(name), clean, certified))
    return tuple(rows)


def _choose(total: int, samples: int | None, seed: int) -> Tensor:
    if samples is None or samples >= total:
        return torch.arange(total)
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:samples].sort().values


def _radii(name: str, values: Sequence[float]) -> tuple[float, ...]:
    for value in values:
        if not (value >= 0 and math.isfinite(value)):
            raise OptionError(f"expected every {name} to be finite and >= 0, got {value}")
    return tuple(float(value) for value in values)
