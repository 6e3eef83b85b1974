r"""Circular convolutions by the Cayley transform in solve form: the matrices of the layer are never made.

With the symbol :math:`[W_1\ W_2]` of a wide kernel (at each frequency; of a tall one, :math:`[W_1; W_2]`) and

.. math:: N = I + W_1 - W_1^* + G, \qquad G = W_2 W_2^* \text{ (wide)}, \quad W_2^* W_2 \text{ (tall)},

the product of the Cayley transform with a vector x takes one solve, as does its derivative:

.. math:: \text{wide:}\quad y = 2h - x_1,\; N h = x_1 - W_2 x_2; \qquad
          \text{tall:}\quad y = [2h - x;\, -2 W_2 h],\; N h = x; \qquad \nabla_N = -2 k h^*,\; N^* k = \nabla_y .

The two halves of the wide transform [A B] are also there on their own, :math:`Bx` and :math:`A^* x`, for sandwich
layers. N comes straight from a small product: the skew part of the kernel is taken before its transform.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.conv.frequency_solve import Form, Group, backward_rows, forward_rows
from lipkit.conv.kernel_exponential import adjoint
from lipkit.conv.symbol import check_kernel, symbol_parts
from lipkit.conv.transform import (
    count_real,
    frequencies,
    pure_images,
    pure_rows,
    to_images,
    to_rows,
    transform_matrices,
)
from lipkit.linalg.cayley import Factors, factorize


class NormalMatrices(NamedTuple):
    """:math:`N^\\top` and :math:`W_2` (None for a square kernel) at the real frequencies and, complex, at the pairs."""

    real: Tensor
    pair: Tensor
    rest_real: Tensor | None
    rest_pair: Tensor | None


def normal_matrices(kernel: Tensor, h: int, w: int) -> NormalMatrices:
    """The matrices of the solve form for a kernel ``(cout, cin, kh, kw)`` on ``h x w``; differentiable.

    >>> n = normal_matrices(torch.ones(2, 3, 3, 3), 4, 4)
    >>> n.pair.shape, n.rest_pair.shape
    (torch.Size([6, 2, 2]), torch.Size([6, 2, 1]))
    """
    check_kernel(kernel)
    cout, cin, kh, kw = kernel.shape
    n = min(cout, cin)
    # Even sizes get a zero tap in front, which makes the centre the middle.
    kernel = F.pad(kernel, (1 - kw % 2, 0, 1 - kh % 2, 0))
    own = kernel[:n, :n]
    eye = torch.zeros_like(own)
    eye[:, :, eye.shape[2] // 2, eye.shape[3] // 2] = torch.eye(n, dtype=own.dtype, device=own.device)
    real, pair = _symbol((eye + own - adjoint(own)).transpose(0, 1), h, w)
    if cout == cin:
        return NormalMatrices(real, pair, None, None)
    rest_real, rest_pair = _symbol(kernel[:, n:] if cout < cin else kernel[n:], h, w)

    wide = cout < cin
    return NormalMatrices(
        _AddGram.apply(real, rest_real, wide), _AddGram.apply(pair, rest_pair, wide), rest_real, rest_pair
    )


class _AddGram(torch.autograd.Function):
    """``A + conj(W) W^T`` (wide) or ``A + W^T conj(W)``: the gradient of W is one product with a Hermitian matrix."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, w: Tensor, wide: bool) -> Tensor:
        ctx.save_for_backward(w)
        ctx.wide = wide
        other = w.conj().resolve_conj()
        return torch.baddbmm(a, other, w.mT) if wide else torch.baddbmm(a, w.mT, other)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        (w,) = ctx.saved_tensors
        with torch.autocast(g.device.type, enabled=False):
            both = g.mT + g.conj()
            return g, (both @ w if ctx.wide else w @ both), None


def _symbol(kernel: Tensor, h: int, w: int) -> tuple[Tensor, Tensor]:
    """The symbol at the real frequencies and, complex, at the pairs."""
    cout, cin, kh, kw = kernel.shape
    f = frequencies(h, w)
    taps = kernel.permute(2, 3, 0, 1).reshape(kh * kw, cout * cin)
    each_tap = torch.eye(kh * kw, dtype=kernel.dtype, device=kernel.device).reshape(-1, 1, kh, kw)
    own, pairs = (symbol_parts(each_tap, grid[:, 0], grid[:, 1], h, w) for grid in f)
    # A complex product of real taps: its result is complex without another pass over it.
    pair = torch.complex(*pairs).flatten(1) @ taps.to(torch.complex(*pairs).dtype)
    return (own[0].flatten(1) @ taps).reshape(-1, cout, cin), pair.reshape(-1, cout, cin)


def prepare(matrices: NormalMatrices, batch: int) -> tuple[Factors, Factors]:
    """Factors of the real and of the complex N for ``batch`` images, as constants."""
    with torch.no_grad():
        return factorize(matrices.real, batch), factorize(matrices.pair, batch)


class _Solved(torch.autograd.Function):
    """One of the forms on images, with the derivative of the solve form; a second derivative goes by :func:`_plain`."""

    @staticmethod
    def forward(
        ctx: Any,
        form: Form,
        x: Tensor,
        bias: Tensor | None,
        real: Tensor,
        pair: Tensor,
        rest_real: Tensor | None,
        rest_pair: Tensor | None,
        *constants: Tensor | None,
    ) -> Tensor:
        h, w = x.shape[-2:]
        inputs = (x, bias, real, pair, rest_real, rest_pair)
        groups = _groups(h, w, rest_real, rest_pair, constants)
        matrices = _transform(constants)
        rows = to_rows(x, matrices)
        n = real.shape[-1]
        out = x.new_empty(h * w, len(x), n + rest_real.shape[1] if form == "tall" and rest_real is not None else n)
        kept = [t for group in groups for t in forward_rows(form, group, rows, out)]
        if bias is not None:
            # A constant image is the coefficient of frequency 0, the first row.
            out[0].add_(bias, alpha=math.sqrt(h * w))
        ctx.form = form
        ctx.save_for_backward(*inputs, *constants, *kept)
        return to_images(out, h, w, matrices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        inputs, constants, kept = ctx.saved_tensors[:6], ctx.saved_tensors[6:12], ctx.saved_tensors[12:]
        x, rest_real, rest_pair = inputs[0], inputs[4], inputs[5]
        none = (None,) * len(constants)
        matrices = _transform(constants)
        if torch.is_grad_enabled():
            return None, *_differentiable_gradients(ctx.form, inputs, ctx.needs_input_grad[1:7], g, matrices), *none
        h, w = x.shape[-2:]
        with torch.autocast(g.device.type, enabled=False):
            g_rows = to_rows(g, matrices)
            out = torch.empty(h * w, *x.shape[:2], dtype=x.dtype, device=x.device)
            symbol = any(ctx.needs_input_grad[3:7])
            for_symbol: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * 2
            for i, group in enumerate(_groups(h, w, rest_real, rest_pair, constants)):
                one, two = kept[2 * i], kept[2 * i + 1]
                for_symbol[i] = backward_rows(ctx.form, group, one, two, g_rows, out, symbol=symbol)
            for_bias = g_rows[0].sum(0).mul_(math.sqrt(h * w)) if ctx.needs_input_grad[2] else None
            for_x = to_images(out, h, w, matrices) if ctx.needs_input_grad[1] else None
        (for_real, for_rest_real), (for_pair, for_rest_pair) = for_symbol
        return None, for_x, for_bias, for_real, for_pair, for_rest_real, for_rest_pair, *none


def _differentiable_gradients(
    form: Form, inputs: tuple[Any, ...], asked: tuple[bool, ...], g: Tensor, matrices: list[Tensor]
) -> list[Tensor | None]:
    """The gradients of the inputs of :class:`_Solved` as functions that can be differentiated."""
    # Views of them: N depends on W_2, and must count as independent of it here.
    views: list[Any] = [None if t is None else t.view_as(t) for t in inputs]
    y = _plain(form, views[0], views[1], NormalMatrices(*views[2:]), matrices)
    wanted = [view for view, ask in zip(views, asked, strict=True) if ask]
    found = iter(torch.autograd.grad(y, wanted, g, create_graph=True, allow_unused=True))
    return [next(found) if ask else None for ask in asked]


def _transform(constants: tuple[Tensor | None, ...]) -> list[Tensor]:
    return [t for t in constants[4:] if t is not None]


def _groups(
    h: int, w: int, rest_real: Tensor | None, rest_pair: Tensor | None, constants: tuple[Tensor | None, ...]
) -> list[Group]:
    real, real_pivots, pair, pair_pivots = constants[:4]
    assert real is not None
    assert pair is not None
    n = count_real(h, w)
    groups = [Group(Factors(real, real_pivots), rest_real, slice(0, n))]
    return [*groups, Group(Factors(pair, pair_pivots), rest_pair, slice(n, None))] if h * w > n else groups


def _plain(form: Form, x: Tensor, bias: Tensor | None, normal: NormalMatrices, matrices: list[Tensor]) -> Tensor:
    """What :class:`_Solved` computes, by operations that every tracer and every derivative of torch knows."""
    h, w = x.shape[-2:]
    n_real = count_real(h, w)
    rows = pure_rows(x, matrices)

    def one(transposed: Tensor, rest: Tensor | None, z: Tensor) -> Tensor:
        n = transposed.shape[-1]
        if form == "first adjoint":
            return 2 * torch.linalg.solve(transposed.conj(), z.mT).mT - z
        if form == "second":
            assert rest is not None
            return -2 * torch.linalg.solve(transposed.mT, rest @ z.mT).mT
        t = z[..., :n] if form == "tall" or rest is None else z[..., :n] - z[..., n:] @ rest.mT
        solved = torch.linalg.solve(transposed.mT, t.mT).mT
        top = 2 * solved - z[..., :n]
        return top if form == "wide" or rest is None else torch.cat((top, -2 * solved @ rest.mT), -1)

    out = [one(normal.real, normal.rest_real, rows[:n_real])]
    if len(rows) > n_real:
        pair = rows[n_real:].reshape(-1, 2, *rows.shape[1:])
        z = one(normal.pair, normal.rest_pair, torch.complex(pair[:, 0], pair[:, 1]))
        out.append(torch.stack((z.real, z.imag), 1).flatten(0, 1))
    y = pure_images(torch.cat(out), h, w, matrices)
    return y if bias is None else y + bias[:, None, None]


def solve_form(
    form: Form,
    x: Tensor,
    normal: NormalMatrices,
    factors: tuple[Factors, Factors] | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    r"""Apply the Cayley transform with these matrices, or a half of it, at every frequency of ``x``.

    Args:
        form: 'wide' or 'tall', the shape of the transformed matrices (either for square ones); of a wide transform
            [A B] also 'second', which gives B x, and 'first adjoint', which gives A* x.
        x: ``(B, C, h, w)``.
        normal: :func:`normal_matrices` on h x w.
        factors: :func:`prepare` of them, made here if not given.
        bias: added to every pixel.

    Returns:
        ``(B, C', h, w)``.
    """
    h, w = x.shape[-2:]
    matrices = transform_matrices(h, w, dtype=x.dtype, device=x.device)
    if torch.compiler.is_compiling():
        return _plain(form, x, bias, normal, matrices)
    real, pair = prepare(normal, len(x)) if factors is None else factors
    constants = (*real, *pair, *matrices, *(None,) * (2 - len(matrices)))
    y: Tensor = _Solved.apply(form, x, bias, *normal, *constants)
    return y


def cayley_conv2d(kernel: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Orthogonal circular convolution of ``x`` with the Cayley transform of the symbol of ``kernel``.

    Args:
        kernel: ``(cout, cin, kh, kw)``, real, of the dtype of x.
        x: ``(B, cin, h, w)``.
        bias: ``(cout,)``, added to every pixel.

    Returns:
        ``(B, cout, h, w)``, with the norm of x if cout >= cin and there is no bias.

    Cost:
        For c = min(cout, cin): at each of about h w / 2 frequencies, LU factors of size c and a solve for B images
        forward, a solve and one product of B c^2 backward; an inverse instead of the solves for B above 3 c / 2.

    >>> x = torch.arange(24.0).reshape(1, 2, 3, 4)
    >>> y = cayley_conv2d(torch.ones(2, 2, 1, 1), x)
    >>> torch.allclose(y, x, atol=1e-4)
    True

    References:
        [Cayley] Trockman & Kolter, ICLR 2021, algorithm 1.
    """
    cout, cin = kernel.shape[:2]
    return solve_form("tall" if cout >= cin else "wide", x, normal_matrices(kernel, *x.shape[-2:]), bias=bias)
