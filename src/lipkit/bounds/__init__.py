"""Upper bounds of one linear map: proved, differentiable, float64."""

from lipkit.bounds.circular import circular
from lipkit.bounds.symbol_sup import grid_correction, symbol_sup
from lipkit.bounds.verified import spectral_norm, spectral_norms

__all__ = ["circular", "grid_correction", "spectral_norm", "spectral_norms", "symbol_sup"]
