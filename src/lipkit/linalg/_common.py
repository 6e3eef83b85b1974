"""Small facts about matrices that every file of this package shares."""

from __future__ import annotations

import torch
from torch import Tensor

from lipkit.errors import OptionError, ShapeError


def check_positive(**values: int) -> None:
    """Raise ``OptionError`` unless every value is an integer of at least 1.

    >>> check_positive(iterations=3, order=1)
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name}: expected an integer of at least 1, got {value!r}")


def check_matrix(a: Tensor, name: str = "w") -> None:
    """Raise ``ShapeError`` unless ``a`` is a floating or complex tensor of shape ``(..., m, n)``, m, n >= 1."""
    if a.ndim < 2 or a.shape[-1] == 0 or a.shape[-2] == 0:
        raise ShapeError(f"{name}: expected a matrix (..., m, n) with m, n >= 1, got shape {tuple(a.shape)}")
    if not (a.is_floating_point() or a.is_complex()):
        raise ShapeError(f"{name}: expected a floating or complex dtype, got {a.dtype}")


def at_least_float32(a: Tensor) -> Tensor:
    """``a`` itself, or its float32 copy if it is half precision: constrained weights are never made in less."""
    return a.float() if a.dtype in (torch.float16, torch.bfloat16) else a


def eye_like(a: Tensor, n: int | None = None) -> Tensor:
    """The n x n identity (n defaults to the number of columns) in the dtype and on the device of ``a``."""
    return torch.eye(a.shape[-1] if n is None else n, dtype=a.dtype, device=a.device)


def orthogonality_residual(q: Tensor) -> Tensor:
    r"""How far ``q`` is from semi-orthogonal: :math:`\max |Q^*Q - I|` (tall) or :math:`\max |QQ^* - I|` (wide).

    Args:
        q: matrices ``(..., m, n)``, real or complex.

    Returns:
        A real tensor of shape ``(...)``, zero exactly for semi-orthogonal matrices.

    >>> float(orthogonality_residual(2 * torch.eye(3)))
    3.0
    """
    check_matrix(q, "q")
    gram = q.mH @ q if q.shape[-2] >= q.shape[-1] else q @ q.mH
    return (gram - eye_like(gram)).abs().amax((-2, -1))
