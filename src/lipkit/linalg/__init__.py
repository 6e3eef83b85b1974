"""Pure functions on matrices ``(..., m, n)``, real or complex, batched: any matrix to a semi-orthogonal one."""

from lipkit.linalg._common import at_least_float32, orthogonality_residual
from lipkit.linalg.cayley import cayley

__all__ = ["at_least_float32", "cayley", "orthogonality_residual"]
