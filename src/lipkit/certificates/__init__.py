"""Certificates of exported networks from proved Lipschitz constants: radii of classifiers, deviations of outputs."""

from __future__ import annotations

from lipkit.certificates import lipsdp
from lipkit.certificates.certificate import Certificate, certify
from lipkit.certificates.regression import RegressionCertificate, certify_regression
from lipkit.certificates.units import format_radius

__all__ = ["Certificate", "RegressionCertificate", "certify", "certify_regression", "format_radius", "lipsdp"]
