"""The largest singular value of a matrix with given singular vectors, and its derivatives of every order."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.linalg.precision import autocast_off


class _Value(torch.autograd.Function):
    """Returns ``value``. Its gradient by A is u v*, taken from `_Pair`, so second derivatives see u and v change."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, u: Tensor, v: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.save_for_forward(*inputs[:3])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        return g * _Pair.apply(*ctx.saved_tensors), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *unused: None) -> Tensor:
        change: Tensor = (_Pair.apply(*ctx.saved_tensors).conj() * tangent).sum()
        return change.real if change.is_complex() else change


class _Pair(torch.autograd.Function):
    """Returns u v* as a function of A, whose singular vectors change with it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return torch.outer(u, v.conj())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return _turned(g, *ctx.saved_tensors), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *unused: None) -> Tensor:
        return _turned(tangent, *ctx.saved_tensors)


def _turned(change: Tensor, a: Tensor, pair: Tensor) -> Tensor:
    r"""The differential of u v* along ``change``. The map is self-adjoint, so this is the gradient, too.

    The singular value s is an eigenvalue of :math:`K = [0, A; A^*, 0]` with the eigenvector (u, v). The projection Z on
    it has :math:`dZ = S\, dK\, Z + Z\, dK\, S`, where S is the inverse of s I - K on the other eigenvectors.
    """
    m, n = a.shape

    def dilated(b: Tensor) -> Tensor:
        corner = F.pad(b, (m, 0, 0, n))
        return corner + corner.mH

    with autocast_off(a):
        both, dk = dilated(pair), dilated(change)
        z, s = (both + both @ both) / 2, (pair.conj() * a).sum().real
        eye = torch.eye(m + n, dtype=a.dtype, device=a.device)
        dz = torch.linalg.solve(s * eye - dilated(a) + z, dk @ z - z @ dk @ z)
        return 2 * (dz + dz.mH)[:m, m:]


def singular_value(a: Tensor, u: Tensor, v: Tensor, value: Tensor) -> Tensor:
    r"""``value`` = :math:`u^* A v`, with the derivatives of the largest singular value s of A; u and v are its vectors.

    .. math:: ds = \mathrm{Re}\, u^*\, dA\, v

    The derivatives of every order are exact if s is simple and u and v are exact.
    """
    if torch.compiler.is_compiling():  # which takes no forward-mode derivative, and refuses second ones by itself
        product = u.conj() @ a @ v
        product = product.real if product.is_complex() else product
        return value + (product - product.detach())
    return _Value.apply(a, u, v, value)
