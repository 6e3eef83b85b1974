"""Pure functions on matrices ``(..., m, n)``: to semi-orthogonal ones and contractions.

All take real and complex matrices with any batch dimensions, widen half precision to float32, and raise ``ShapeError``
for what is no floating or complex matrix.
"""

from lipkit.linalg.bjorck import bjorck
from lipkit.linalg.cayley import cayley
from lipkit.linalg.cholesky import block_reflector, cholesky
from lipkit.linalg.exponential import exponential
from lipkit.linalg.householder import householder
from lipkit.linalg.matrices import at_least_float32, orthogonality_residual
from lipkit.linalg.newton_schulz import newton_schulz
from lipkit.linalg.polar import polar
from lipkit.linalg.skew_polynomial import taylor_exponential
from lipkit.linalg.table import ORTHOGONALIZE, resolve

__all__ = ["ORTHOGONALIZE", "bjorck", "cayley", "exponential", "householder", "newton_schulz", "polar", "resolve"]
__all__ += ["at_least_float32", "block_reflector", "cholesky"]  # contractions, helpers
__all__ += ["orthogonality_residual", "taylor_exponential"]

__dir__ = __all__.copy
