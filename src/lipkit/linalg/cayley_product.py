r"""Products with the Cayley transform of a matrix that is never made: one solve for the vectors forward, one backward.

With a wide :math:`W = [W_1\ W_2]` (a tall one: :math:`[W_1; W_2]`) and

.. math:: N = I + W_1 - W_1^\top + G, \qquad G = W_2 W_2^\top \text{ (wide)}, \quad W_2^\top W_2 \text{ (tall)},

.. math:: \text{wide:}\quad y = 2h - x_1,\; N h = x_1 - W_2 x_2; \qquad
          \text{tall:}\quad y = [2h - x;\, -2 W_2 h],\; N h = x .

The derivative is written out: small layers cost their calls, large ones their products, and both are fewer so.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.errors import ShapeError
from lipkit.linalg.cayley import Factors, cayley, factorize, solve_rows
from lipkit.linalg.matrices import mirrored_product
from lipkit.linalg.transforms import transformed


def cayley_linear(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Product of ``x`` with the Cayley transform of ``weight``, which is never made.

    Args:
        weight: ``(m, n)``, real, of the dtype of x.
        x: ``(..., n)``.
        bias: ``(m,)``.

    Returns:
        ``(..., m)``.

    Cost:
        Of products of the larger by the smaller side squared, with a batch smaller than that: one for a wide or tall
        matrix forward and one backward, where making the transform takes two and three. LU factors in place of an
        inverse for up to 3/2 min(m, n) vectors.

    Raises:
        ShapeError: ``weight`` is not a matrix, or x does not have its columns.

    >>> from lipkit.linalg import cayley
    >>> w, x = torch.arange(6.0).reshape(2, 3), torch.ones(4, 3)
    >>> torch.allclose(cayley_linear(w, x), x @ cayley(w).mT, atol=1e-6)
    True
    """
    if weight.ndim != 2 or x.shape[-1:] != weight.shape[1:]:
        raise ShapeError(
            f"expected a matrix (m, n) and inputs (..., n), got {tuple(weight.shape)} and {tuple(x.shape)}"
        )
    if torch.compiler.is_compiling() or transformed():
        return _plain(weight, x, bias)
    if x.ndim == 2:
        rows: Tensor = _Product.apply(weight, x, bias)
        return rows
    rows = _Product.apply(weight, x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), bias)
    return rows.view(*x.shape[:-1], len(weight))


def _plain(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """The function of :class:`_Product`, by operations that every tracer and every derivative of torch knows."""
    return F.linear(x, cayley(weight), bias)


def _parts(weight: Tensor) -> tuple[Tensor, Tensor]:
    """W_1 and W_2; W_2 of a square matrix is empty."""
    m, n = weight.shape
    return (weight[:, :m], weight[:, m:]) if m < n else (weight[:n], weight[n:])


def _transposed(weight: Tensor) -> Tensor:
    """The transpose of N."""
    m, n = weight.shape
    own, rest = _parts(weight)
    made = own.mT - own
    if m != n:
        one, two = (rest, rest.mT) if m < n else (rest.mT, rest)
        made += mirrored_product(one, two, torch.empty_like(made))
    made.diagonal().add_(1)
    return made


class _Product(torch.autograd.Function):
    """``y = Q x + b`` for rows x; a second derivative goes by :func:`_plain`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        (m, n), (_, rest) = weight.shape, _parts(weight)
        factors = factorize(_transposed(weight), len(x))
        if m < n:
            own = x[:, :m]
            h = solve_rows(factors, torch.addmm(own, x[:, m:], rest.mT, alpha=-1))
            y = torch.lerp(own, h, 2.0)
        else:
            h = solve_rows(factors, x)
            y = x.new_empty(len(x), m)
            torch.lerp(x, h, 2.0, out=y[:, :n])
            if m > n:
                y[:, n:].addmm_(h, rest.mT, beta=0, alpha=-2)
        ctx.save_for_backward(weight, x, bias, h, *factors)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        weight, x, bias, h, *factors = ctx.saved_tensors
        with torch.autocast(g.device.type, enabled=False):
            if torch.is_grad_enabled() or transformed():
                # The gradient itself is to be differentiated, or there is a batch of them.
                given = (weight, x) if bias is None else (weight, x, bias)
                found = torch.func.vjp(lambda *a: _plain(*a, *(() if len(a) == 3 else (None,))), *given)[1](g)
                return (*found, None)[:3]
            for_weight, for_x = _gradients(weight, x, h, Factors(*factors), g, asked=ctx.needs_input_grad[:2])
        return for_weight, for_x, g.sum(0) if ctx.needs_input_grad[2] else None


def _gradients(
    weight: Tensor, x: Tensor, h: Tensor, factors: Factors, g: Tensor, *, asked: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    r"""The gradients of W and x: with :math:`N^\top k = g_1` (tall: :math:`g_1 - W_2^\top g_2`),
    :math:`\nabla_N = -2 k h^\top`, and x gets :math:`[2k - g_1;\, -2 W_2^\top k]` (tall: :math:`2k - g_1`).
    """
    (m, n), (_, rest) = weight.shape, _parts(weight)
    wide = m < n
    first = g if wide else g[:, :n]
    top = first if m <= n else torch.addmm(first, g[:, n:], rest, alpha=-1)
    k = solve_rows(factors, top, transposed=True)
    for_x = None
    if asked[1]:
        for_x = torch.empty_like(x)
        torch.lerp(first, k, 2.0, out=for_x[:, :m] if wide else for_x)
        if wide:
            for_x[:, m:].addmm_(k, rest, beta=0, alpha=-2)
    if not asked[0]:
        return None, for_x
    normal = (k.mT @ h).mul_(-2)
    made = torch.empty_like(weight)
    for_own, for_rest = _parts(made)
    torch.sub(normal, normal.mT, out=for_own)
    if wide:
        torch.mm(normal + normal.mT, rest, out=for_rest)
        for_rest.addmm_(k.mT, x[:, m:], alpha=-2)
    elif m > n:
        torch.mm(rest, normal + normal.mT, out=for_rest)
        for_rest.addmm_(g[:, n:].mT, h, alpha=-2)
    return made, for_x
