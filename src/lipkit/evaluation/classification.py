"""Clean, certified and attacked accuracy together, with the attack checked against the certificate."""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from lipkit import modules
from lipkit.certificates import Certificate, certify
from lipkit.certificates.intervals import Share, as_radii, check_radii, share
from lipkit.certificates.measurement import check_network
from lipkit.data import as_split
from lipkit.errors import OptionError
from lipkit.evaluation.attack import Attack, Attacked, CrossCheck, attack_samples, resolved_box
from lipkit.shown import Shown, Told, figures
from lipkit.text import format_radius

EPS = (36 / 255, 72 / 255, 108 / 255, 255 / 255)
"""The usual radii in the literature, for images in [0, 1]."""


@dataclasses.dataclass(frozen=True)
class ClassRow:
    """One class: clean accuracy, and certified accuracy at each eps of the evaluation."""

    name: str
    clean: Share
    certified: tuple[Share, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Evaluation(Shown):
    """The findings of `evaluate`; ``times`` are seconds.

    ``eps`` runs in parallel with ``certified`` and with ``certified_ignored``, which ignores the rounding of logits.
    """

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
    certified_ignored: tuple[Share, ...]

    def metrics(self) -> dict[str, float]:
        """Flat numbers, for a line of metrics: ``clean``, ``certified(36/255)``, ``pgd(36/255)``, ``lipschitz``."""
        result = {"clean": self.clean.value}
        for eps, certified in zip(self.eps, self.certified, strict=True):
            result[f"certified({format_radius(eps)})"] = certified.value
        for row in self.attacked:
            result[f"{self.attack.name}({format_radius(row.eps)})"] = row.share.value
        result["lipschitz"] = self.certificate.constant
        return result

    def describe(self) -> str:
        """The certificate, and every figure."""
        return "\n".join([self.certificate.describe(), figures(self.metrics())])


def evaluate(
    network: modules.Network,
    split: Any,
    *,
    method: str = "global",
    eps: Sequence[float] = EPS,
    attack: Attack | None = None,
    classes: Sequence[str] = (),
    batch_size: int = 256,
    confidence: float = 0.95,
    device: str | torch.device = "cpu",
    large_eps: bool = False,
    progress: Told | None = None,
) -> Evaluation:
    r"""Certify every sample, attack some of them, and stop if the two disagree.

    The attack runs in l2 at each of its radii, and once at each sample's certified radius; see `attack_samples`.

    **Guarantee.** If this returns, none of the examples found lies inside a certified radius, and accuracy under attack
    is at least the certified accuracy of the same samples. That tests the certificates; they do not depend on it.

    Args:
        network: an exported network (`lipkit.export`).
        split: samples and int64 labels, as `lipkit.data.as_split` takes them: a pair (x, y), say.
        method: of the certificate, see `lipkit.certify`.
        eps: l2 radii for certified accuracy, in units of the input.
        attack: the l2 attack; None is ``Attack()``: PGD at ``eps``, on 1000 samples. ``Attack(eps=())`` runs none.
        classes: class names, one for each logit; empty names them 0, 1, ...
        batch_size, device: as in `lipkit.certify`, and for the attack.
        confidence: of the Clopper-Pearson intervals.
        large_eps: accept radii above 8 widths of ``input_range``, otherwise refused as slips (16 for 16/255).
        progress: as in `lipkit.certify`; during the attack it is called with ``"attacked"``.

    Raises:
        CertificateViolation: an adversarial example lies inside a certified radius: the bound is wrong.
        OptionError: an implausible eps (`lipkit.certificates.intervals.check_radii`).
        NoRuleError: the network is not exported.
    """
    attack = Attack() if attack is None else attack
    eps = as_radii("eps", eps)
    radii = eps if attack.eps is None else as_radii("eps of the attack", attack.eps)
    if attack.norm != "l2":
        raise OptionError(f"expected an attack in l2, got {attack.norm!r}: lipkit.evaluation.attack_samples takes both")
    check_network(network, "evaluate")
    start = time.perf_counter()
    x, y = as_split(split).batch(slice(None))  # a slice copies no tensor that is in memory
    seen = (float(x.min()), float(x.max()))
    check_radii((*eps, *radii), network.input_shape, network.input_range, seen=seen, large=large_eps)
    attack = dataclasses.replace(attack, eps=radii, box=resolved_box(attack.box, x))
    certificate = certify(network, x, y, method=method, batch_size=batch_size, device=device, progress=progress)
    certified_at = time.perf_counter()
    attacked: tuple[Attacked, ...] = ()
    cross_check = CrossCheck(0, math.inf)
    if radii:
        attempt = attack_samples(
            network, certificate, x, y, attack, batch_size=batch_size, confidence=confidence, device=device,
            progress=progress,
        )  # fmt: skip
        attacked, cross_check = attempt.rows, attempt.cross_check
    end = time.perf_counter()
    return Evaluation(
        certificate, eps, share(certificate.correct, confidence),
        certified=tuple(share(certificate.certified(radius), confidence) for radius in eps),
        attack=attack, attacked=attacked, cross_check=cross_check,
        per_class=per_class(certificate, eps, classes, confidence=confidence), confidence=confidence,
        times={"certify": certified_at - start, "attack": end - certified_at},
        certified_ignored=tuple(share(certificate.certified(r, rounding="ignore"), confidence) for r in eps),
    )  # fmt: skip


def per_class(
    certificate: Certificate, eps: Sequence[float], classes: Sequence[str] = (), *, confidence: float = 0.95
) -> tuple[ClassRow, ...]:
    """Clean and certified accuracy of each class; without ``classes``, of each label (OptionError: too few names)."""
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
