"""The polar factor by a singular value decomposition, with a derivative that repeated singular values do not break."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lipkit.errors import OptionError
from lipkit.linalg._common import at_least_float32, check_matrix


def _inverse(values: Tensor, largest: Tensor, n: int) -> Tensor:
    """``1 / values`` where they stand out of rounding, with a floor of ``n eps`` of the largest; 1 at a zero matrix."""
    floor = largest * (n * torch.finfo(values.dtype).eps)
    return 1 / torch.where(largest > 0, torch.maximum(values, floor), torch.ones_like(values))


class _FirstOnly(torch.autograd.Function):
    """``value``, tied to ``w`` by a derivative that raises: U, S and V are constants of the backward pass below.

    (``once_differentiable`` looks at the incoming gradient alone, and would drop the dependence on ``w`` in silence.)
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, w: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise OptionError("polar: expected a first derivative, got a second one: use bjorck or cayley instead")


class _TallPolar(torch.autograd.Function):
    """Q = U V* of W = U S V*. Its derivative is self-adjoint, so the backward pass is the differential itself."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        u, s, vh = torch.linalg.svd(w, full_matrices=False)
        ctx.save_for_backward(w, u, s, vh)
        return u @ vh

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        w, u, s, vh = ctx.saved_tensors
        n = max(u.shape[-2:])
        along = grad @ vh.mH
        inner = u.mH @ along
        sums = s[..., :, None] + s[..., None, :]
        result = u @ ((inner - inner.mH) * _inverse(sums, s[..., :1, None], n))
        if u.shape[-2] > u.shape[-1]:
            result = result + (along - u @ inner) * _inverse(s, s[..., :1], n)[..., None, :]
        return _FirstOnly.apply(result @ vh, w)


def polar(w: Tensor) -> Tensor:
    r"""The semi-orthogonal matrix closest to ``w``: its polar factor :math:`Q = UV^*`, :math:`W = USV^*`.

    Its differential, :math:`U_\perp U_\perp^* = I - UU^*` for tall matrices, is

    .. math:: dQ = U\Big[\frac{(A - A^*)_{ij}}{s_i + s_j}\Big]V^* + U_\perp U_\perp^*\, dW\, V S^{-1} V^*,
              \qquad A = U^* dW\, V,

    the solution of a Sylvester equation: sums of singular values, never differences.

    Args:
        w: ``(..., m, n)``, real or complex, any batch dimensions. Half precision is widened to float32.

    Returns:
        ``(..., m, n)`` with :math:`Q^*Q = I` (m >= n) or :math:`QQ^* = I` (m <= n) up to a few roundings, for every
        ``w``: where it is rank-deficient the polar factor is not unique, and one is returned.

    Guarantee:
        Norm 1 up to rounding. The gradient is exact for full rank; singular values below ``n eps`` of the largest
        count as that in its denominators, and 1 at a zero matrix, so it is finite everywhere. A second derivative
        raises.

    Cost:
        One singular value decomposition; four to six products backward.

    Raises:
        ShapeError: ``w`` is not a floating or complex matrix. OptionError: a second derivative.

    >>> polar(torch.tensor([[0.0, -2.0], [3.0, 0.0]])).abs().round(decimals=5)
    tensor([[0., 1.],
            [1., 0.]])

    References:
        Higham, Functions of Matrices (2008), chapter 8; the derivative is that of W = QH with H Hermitian.
    """
    check_matrix(w)
    w = at_least_float32(w)
    if w.shape[-2] < w.shape[-1]:
        return polar(w.mH).mH
    return _TallPolar.apply(w)
