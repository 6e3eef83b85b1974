"""The polar factor by a singular value decomposition, with a derivative that survives repeated singular values."""

from typing import Any

import torch
from torch import Tensor

from lipkit.errors import OptionError
from lipkit.linalg.matrices import on_tall, thin_svd
from lipkit.linalg.precision import autocast_off


def _inverse(values: Tensor, largest: Tensor, n: int) -> Tensor:
    """``1 / max(values, n eps largest)``, and 1 for a zero matrix: finite everywhere."""
    floor = largest * (n * torch.finfo(values.dtype).eps)
    return 1 / torch.where(largest > 0, torch.maximum(values, floor), torch.ones_like(values))


class _FirstOnly(torch.autograd.Function):
    """Returns ``value``, and raises if a derivative of it with respect to ``w`` is asked for.

    The derivative below takes U, S and V as constants, so its own derivative would be wrong. (``once_differentiable``
    looks at the incoming gradient alone, and would silently drop the dependence on ``w``.)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, w: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is kept: there is no derivative."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise OptionError("polar: expected a first derivative, got a second one: use bjorck or cayley instead")


def _differential(change: Tensor, w: Tensor, u: Tensor, s: Tensor, vh: Tensor) -> Tensor:
    """The differential of the polar factor of W = U S V* along ``change``.

    The map is self-adjoint, so this is the gradient, too.
    """
    n = max(u.shape[-2:])
    with autocast_off(change):
        along = change @ vh.mH
        inner = u.mH @ along
        sums = s[..., :, None] + s[..., None, :]  # never differences: equal singular values do no harm
        result = u @ ((inner - inner.mH) * _inverse(sums, s[..., :1, None], n))
        if u.shape[-2] > u.shape[-1]:
            # (I - U U*) dW V S^-1, without the projector of the larger side; S^-1 scales columns.
            result = result + (along - u @ inner) * _inverse(s, s[..., :1], n)[..., None, :]
        return _FirstOnly.apply(result @ vh, w)


class _TallPolar(torch.autograd.Function):
    """Returns Q = U V* of W = U S V*, and for the derivative U, S and V*, which carry no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor) -> tuple[Tensor, ...]:
        u, s, vh = thin_svd(w)
        return u @ vh, u, s, vh

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.save_for_forward(*inputs, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *unused: None) -> Tensor | None:
        return None if grad is None else _differential(grad, *ctx.saved_tensors)


class _WithForwardMode(_TallPolar):
    """`_TallPolar` with forward-mode derivatives, which ``torch.compile`` does not take."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor | None, ...]:
        return _differential(tangent, *ctx.saved_tensors), None, None, None


@on_tall
def polar(w: Tensor) -> Tensor:
    r"""The semi-orthogonal matrix closest to ``w``: its polar factor :math:`Q = UV^*`, :math:`W = USV^*` (Higham 2008).

    Its differential, with sums of singular values and never differences, is that of W = QH with H Hermitian:

    .. math:: dQ = U\Big[\frac{(A - A^*)_{ij}}{s_i + s_j}\Big]V^* + (I - UU^*)\, dW\, V S^{-1} V^*,
              \qquad A = U^* dW\, V

    for tall matrices.

    Returns:
        ``(..., m, n)`` with :math:`Q^*Q = I` (m >= n) or :math:`QQ^* = I` (m <= n) up to a few roundings, for every
        ``w``. A rank-deficient matrix has several polar factors, of which one is returned.

    Guarantee:
        Norm 1 up to rounding. The gradient is exact for full rank, and finite everywhere: its denominators are at
        least ``n eps`` of the largest singular value, and 1 at a zero matrix. A second derivative raises OptionError.
        It takes one singular value decomposition; backward, four products (five for rectangular matrices).

    >>> polar(torch.tensor([[0.0, -2.0], [3.0, 0.0]])).abs().round(decimals=5).tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    function = _TallPolar if torch.compiler.is_compiling() else _WithForwardMode
    return function.apply(w)[0]
