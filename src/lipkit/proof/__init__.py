"""Arithmetic of the proofs: rounding in float64, proved norms, models of machine arithmetic."""

from lipkit.proof.norms import spectral_norm, spectral_norms
from lipkit.proof.roundoff import Arithmetic, Line, arithmetic_of

__all__ = ["Arithmetic", "Line", "arithmetic_of", "spectral_norm", "spectral_norms"]

__dir__ = __all__.copy
