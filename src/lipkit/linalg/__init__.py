"""Pure functions that turn matrices ``(..., m, n)`` into semi-orthogonal ones or contractions.

All take real and complex matrices with any batch dimensions and widen half precision to float32. They raise
``ShapeError`` unless the argument is a matrix of a floating or complex dtype.
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

__all__ = ["ORTHOGONALIZE", "resolve"]  # the table
__all__ += ["bjorck", "cayley", "exponential", "householder", "newton_schulz", "polar"]  # its rows: semi-orthogonal
__all__ += ["block_reflector", "cholesky", "taylor_exponential"]  # reflections and contractions
__all__ += ["at_least_float32", "orthogonality_residual"]

__dir__ = __all__.copy
