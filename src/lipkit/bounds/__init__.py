"""Upper bounds of one linear map: proved, differentiable, float64. Lower bounds and estimates say so in their names."""

from collections.abc import Callable

from torch import Tensor

from lipkit.bounds.kernels import aol, fantastic_four, grid_correction, lipbound, lipbound_estimate, reshaped
from lipkit.bounds.symbol_sup import circular, gram, symbol_sup, symbol_sup_estimate
from lipkit.conv.patches import polyphase
from lipkit.proof.norms import spectral_norm, spectral_norms

METHODS: dict[str, Callable[..., Tensor]] = {
    "symbol_sup": symbol_sup,
    "lipbound": lipbound,
    "gram": gram,
    "fantastic_four": fantastic_four,
    "aol": aol,
    "reshaped": reshaped,
}
"""Methods with one signature, ``method(kernel, *, groups=1) -> 0-d float64``: proved bounds for every image size."""

__all__ = ["METHODS", "aol", "fantastic_four", "gram", "lipbound", "reshaped", "symbol_sup"]  # the table and its rows
__all__ += ["circular", "grid_correction", "lipbound_estimate", "polyphase", "spectral_norm", "spectral_norms"]
__all__ += ["symbol_sup_estimate"]

__dir__ = __all__.copy
