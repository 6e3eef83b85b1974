"""Certified radii: from margins and proved Lipschitz constants, on exported networks only."""

from __future__ import annotations

from lipkit.certificates.certificate import Certificate, certify
from lipkit.certificates.units import format_radius

__all__ = ["Certificate", "certify", "format_radius"]
