r"""Circular convolutions by the Cayley transform in solve form, without forming the layer's matrices.

With the matrices of :mod:`lipkit.conv.normal_matrices`, the product of the Cayley transform with a vector x takes one
solve at each frequency, as does its derivative:

.. math:: \text{wide:}\quad y = 2h - x_1,\; N h = x_1 - W_2 x_2; \qquad
          \text{tall:}\quad y = [2h - x;\, -2 W_2 h],\; N h = x; \qquad \nabla_N = -2 k h^*,\; N^* k = \nabla_y .

Sandwich layers use the halves of the wide transform [A B] alone: :math:`Bx` and :math:`A^* x`. B is formed where x has
fewer channels than the batch has images.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipkit.conv.cayley_rounded import RoundedSolve, rounded_symbol
from lipkit.conv.normal_matrices import (
    Form,
    Group,
    NormalMatrices,
    backward_rows,
    forward_rows,
    gradients,
    normal_matrices,
    plain_solve,
    second_half,
)
from lipkit.conv.spectrum import Symbol, apply_symbol, count_real, to_images, to_rows, transform_matrices
from lipkit.conv.spread import spread_cayley, spread_pays
from lipkit.conv.symbol import check_images, check_kernel
from lipkit.errors import OptionError, ShapeError
from lipkit.linalg.cayley import Factors, factorize
from lipkit.linalg.matrices import at_least_float32
from lipkit.linalg.precision import autocast_off, without_autocast
from lipkit.linalg.transforms import transformed


class Rounded(NamedTuple):
    """Inverses of N in the half precision of the features, and the factors that they come from."""

    inverse: Symbol
    factors: tuple[Factors, Factors]


class _Solved(torch.autograd.Function):
    """`solve_form` on images with a hand-written derivative; second derivatives use :func:`plain_solve`.

    On an AMD EPYC 1.7 (64@32) to 1.1 (256@8, where the products dominate) times as fast as :func:`plain_solve`.
    """

    @staticmethod
    def forward(ctx: Any, form: Form, *inputs: Any) -> Tensor:
        x, bias, scale, real, _, rest_real, _, *constants = inputs
        (h, w), matrices = x.shape[-2:], constants[4:]
        rows = to_rows(x, matrices)
        # Scale in place between the transforms: a pass into fresh memory costs several in-place passes.
        if scale is not None and form == "first adjoint":
            rows.mul_(scale)
        n = real.shape[-1]
        out = x.new_empty(h * w, len(x), n + rest_real.shape[1] if form == "tall" and rest_real is not None else n)
        kept = [t for group in _groups(form, inputs) for t in forward_rows(form, group, rows, out)]
        kept += [None] * (4 - len(kept))  # two for each group; without pairs one group is left
        if scale is not None and form == "second":
            out.mul_(scale)
        y = to_images(out, h, w, matrices, bias)
        ctx.form = form
        ctx.save_for_backward(y if scale is not None and form == "second" else None, *kept, *inputs)
        return y

    @staticmethod
    @without_autocast()
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        form, saved = ctx.form, ctx.saved_tensors  # once: a checkpoint unpacks each tensor a single time
        (y, *kept), inputs = saved[:5], saved[5:]
        x, bias, scale, _, _, _, _, *constants = inputs
        none = (None,) * len(constants)
        if torch.is_grad_enabled() or transformed(g):
            return None, *gradients(form, inputs[:7], g), *none
        (h, w), matrices = x.shape[-2:], constants[4:]
        for_bias, for_scale, for_x = None, None, None
        g_rows = to_rows(g, matrices)
        if bias is not None:
            for_bias = g_rows[0].sum(0).mul_(math.sqrt(h * w))
        if y is not None:
            # y = scale z + bias, and z is not kept: <g, z> = (<g, y> - bias sum(g)) / scale.
            along = (g * y).sum((0, 2, 3))
            for_scale = (along if for_bias is None else along - bias * for_bias) / scale
            g_rows.mul_(scale)
        out = torch.empty(h * w, *x.shape[:2], dtype=x.dtype, device=x.device)
        needed = any(ctx.needs_input_grad[4:8])  # by N or W_2
        found: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * 2  # at the real frequencies, at the pairs
        for i, group in enumerate(_groups(form, inputs)):
            found[i] = backward_rows(form, group, kept[2 * i], kept[2 * i + 1], g_rows, out, for_symbol=needed)
        scaled = scale is not None and y is None
        if ctx.needs_input_grad[1] or scaled:
            for_x = to_images(out, h, w, matrices)
        if scaled and for_x is not None:
            for_scale = (for_x * x).sum((0, 2, 3))
            for_x.mul_(scale[:, None, None])
        (for_real, for_rest_real), (for_pair, for_rest_pair) = found
        return None, for_x, for_bias, for_scale, for_real, for_pair, for_rest_real, for_rest_pair, *none


def _groups(form: Form, inputs: Sequence[Any]) -> list[Group]:
    """The group of self-conjugate frequencies, then that of pairs if any; without W_2 for 'first adjoint'."""
    h, w = inputs[0].shape[-2:]
    n = count_real(h, w)
    rest_real, rest_pair = (None, None) if form == "first adjoint" else inputs[5:7]
    groups = [Group(Factors(*inputs[7:9]), rest_real, slice(0, n))]
    return [*groups, Group(Factors(*inputs[9:11]), rest_pair, slice(n, None))] if h * w > n else groups


def solve_form(
    form: Form,
    x: Tensor,
    normal: NormalMatrices,
    factors: tuple[Factors, Factors] | Rounded | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    r"""Apply the Cayley transform of the matrices in ``normal``, or a half of it, at every frequency of ``x``.

    Args:
        form: 'wide' or 'tall', the shape of the transformed matrices (either for square ones); of a wide transform
            [A B] also 'second', which gives B x, and 'first adjoint', which gives A* x.
        x: ``(B, C, h, w)``. Half precision is multiplied in its own dtype by inverses made in the dtype of ``normal``.
        normal: :func:`normal_matrices` on h x w.
        factors: :func:`factors_for` x, made here if not given.
        bias: added to every pixel.
        scale: s, nonzero, one for each channel: 'second' gives s B x + bias, 'first adjoint' gives A* (s x).
    """
    if scale is not None and form not in ("second", "first adjoint"):
        raise OptionError(f"scale: expected None with form={form!r}, got shape {tuple(scale.shape)}")
    exact = normal.real.dtype
    factors = factors_for(normal, x) if factors is None else factors
    if x.dtype != exact:
        if not isinstance(factors, Rounded):
            return solve_form(form, x.to(exact), normal, factors, bias, scale).to(x.dtype)
        if form == "second" and FEW_ROWS * x.shape[1] <= len(x):
            half = second_half(normal, factors.factors, scale).to(x.dtype)
            return apply_symbol(half, x, bias=None if bias is None else bias.to(x.dtype))
        return RoundedSolve.apply(form, x, bias, scale, *normal, *factors.inverse)
    if factors is None:
        return plain_solve(form, x, bias, scale, normal)
    if isinstance(factors, Rounded):  # made for half precision, but the activation between the two maps has widened x
        factors = factors.factors
    matrices = transform_matrices(*x.shape[-2:], dtype=x.dtype, device=x.device)
    if form == "second" and x.shape[1] < len(x):
        return apply_symbol(second_half(normal, factors, scale), x, matrices, bias)
    return _Solved.apply(form, x, bias, scale, *normal, *factors[0], *factors[1], *matrices)


# From this many images per input channel on, forming B in float32 pays: features then take a single product.
FEW_ROWS = 8


def factors_for(normal: NormalMatrices, x: Tensor, uses: int = 1) -> tuple[Factors, Factors] | Rounded | None:
    """Factors for :func:`solve_form`, as constants; for an ``x`` of half precision, inverses in its dtype.

    None under a compiler and under transforms of functions, where `solve_form` does without them. ``uses`` counts the
    calls of `solve_form`, on as many images as x, that share the factors.
    """
    if torch.compiler.is_compiling() or transformed():
        return None
    rows, exact = uses * len(x), x.dtype == normal.real.dtype
    # `factorize` inverts from rows = n / 2 on. Half-precision products are faster, so there it pays from n / 3 on.
    rows = rows if exact else 3 * rows // 2
    with torch.no_grad():
        real, pair = factorize(normal.real, rows), factorize(normal.pair, rows)
        if exact or real.pivots is not None or pair.pivots is not None:  # LU factors: no inverse to round
            return real, pair
        return Rounded(rounded_symbol(real.matrix, pair.matrix, x.dtype), (real, pair))


def cayley_conv2d(kernel: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Orthogonal circular convolution of ``x`` by the Cayley transform of the kernel's symbol, [Cayley] algorithm 1.

    Args:
        kernel: ``(cout, cin, kh, kw)``, real.
        x: ``(B, cin, h, w)``, of the dtype of the kernel, or of half precision: see :func:`solve_form`.
        bias: ``(cout,)``, added to every pixel.

    Returns:
        ``(B, cout, h, w)``, with the norm of x if cout >= cin and there is no bias.

    Cost:
        For c = min(cout, cin), at each of about h w / 2 frequencies: LU factors of size c and a solve for B images
        forward, a solve and one product of B c^2 backward. From B = c / 2 on, an inverse replaces the solves. Where
        `spread_pays`, only the few inputs are transformed, and one plain convolution makes the outputs.

    Raises:
        ShapeError: the kernel does not have four dimensions, or x does not fit it.

    >>> x = torch.arange(24.0).reshape(1, 2, 3, 4)
    >>> y = cayley_conv2d(torch.ones(2, 2, 1, 1), x)
    >>> torch.allclose(y, x, atol=1e-4)
    True
    """
    check_kernel(kernel)
    kernel, (cout, cin) = at_least_float32(kernel), kernel.shape[:2]
    batch, channels, h, w = check_images(x)
    if channels != cin:
        raise ShapeError(f"kernel and x: expected one number of inputs, got {tuple(kernel.shape)} and {tuple(x.shape)}")
    with autocast_off(x):
        if batch and spread_pays(kernel, h, w):  # torch refuses to transform empty batches
            return spread_cayley(kernel, x, bias)
        return solve_form("tall" if cout >= cin else "wide", x, normal_matrices(kernel, h, w), bias=bias)


def solves_pay(x: Tensor, side: int) -> bool:
    """True if a dense layer on ``x`` (..., n) is faster by solves with matrices of this size than by forming Q.

    Forming Q is faster for small matrices and for batches larger than them: solves take more calls and run at a lower
    rate (on a CPU the two meet at sizes of 256 to 384).

    >>> solves_pay(torch.ones(128, 4096), 512), solves_pay(torch.ones(128, 20), 20)
    (True, False)
    """
    return side >= 384 and math.prod(x.shape[:-1]) <= side
