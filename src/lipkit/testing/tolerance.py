"""The one place where tolerances come from."""

from __future__ import annotations

import torch


def tolerance(n: int, dtype: torch.dtype, c: float = 4.0) -> float:
    r"""Relative rounding allowance :math:`c \, n \, \varepsilon` of an operation on ``n`` numbers.

    Args:
        n: size of the operation, usually the number of inputs or outputs of the layer.
        dtype: of the arithmetic; :math:`\varepsilon` is ``torch.finfo(dtype).eps``.
        c: constant of the operation.

    >>> tolerance(1, torch.float64, c=1.0) == 2.0**-52
    True
    """
    return c * n * torch.finfo(dtype).eps
