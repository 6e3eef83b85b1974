"""Certificates of exported networks from proved Lipschitz constants: radii of classifiers, deviations of outputs."""

from __future__ import annotations

from lipkit.certificates import lipsdp as lipsdp
from lipkit.certificates.certificate import Certificate, certify
from lipkit.certificates.gains import gain_matrix, local_gain, tight
from lipkit.certificates.intervals import format_radius
from lipkit.certificates.measurement import Proof, prove
from lipkit.certificates.regression import RegressionCertificate, certify_regression

__all__ = [
    "Certificate",
    "Proof",
    "RegressionCertificate",
    "certify",
    "certify_regression",
    "format_radius",
    "gain_matrix",
    "lipsdp",
    "local_gain",
    "prove",
    "tight",
]


def __dir__() -> list[str]:
    return sorted(__all__)
