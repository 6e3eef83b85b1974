"""The attack held against the certificate: no adversarial example may lie inside a certified radius."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from lipkit.certificates.certificate import Certificate
from lipkit.errors import CertificateViolation


@dataclasses.dataclass(frozen=True)
class CrossCheck:
    """Adversarial examples compared with radii: how many, and the smallest ``norm / radius`` (>= 1; inf if none)."""

    compared: int
    closest: float


def check_examples(certificate: Certificate, index: Tensor, distance: Tensor, numbers: Tensor | None = None) -> float:
    """Compare adversarial examples with certified radii.

    Args:
        certificate: of all samples.
        index: (M,) the samples that the examples belong to.
        distance: (M,) float64, l2 distance of each example from its sample.
        numbers: (N,) what the message calls the samples; None counts from 0.

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
        found = f"{float(distance[worst]):.9g}"
        remark = f"{int(inside.sum())} such examples; Lipschitz bound used: {certificate.constant:.9g}"
        raise _violation(certificate, int(index[worst]), numbers, found, remark)
    return float(ratio.min()) if len(ratio) else math.inf


def check_accuracy(
    certificate: Certificate, chosen: Tensor, survived: Tensor, eps: float, numbers: Tensor | None = None
) -> None:
    """Raise `CertificateViolation` if a sample certified at ``eps`` did not survive an attack with that radius.

    Args:
        certificate: of N samples.
        chosen: (M,) the samples that were attacked.
        survived: (N,) bool, still correct under attack.
        eps: l2 radius that no attacked point exceeded.
        numbers: (N,) what the message calls the samples; None counts from 0.
    """
    broken = chosen[(certificate.certified(eps) & ~survived)[chosen]]
    if len(broken):
        raise _violation(certificate, int(broken[0]), numbers, f"at most {eps:.9g}", f"{len(broken)} such samples")


def _violation(
    certificate: Certificate, sample: int, numbers: Tensor | None, distance: str, remark: str
) -> CertificateViolation:
    name = sample if numbers is None else int(numbers[sample])
    return CertificateViolation(
        f"sample {name}: expected no adversarial example within its certified radius "
        f"{float(certificate.radius[sample]):.9g}, got one at l2 norm {distance} ({remark})"
    )
