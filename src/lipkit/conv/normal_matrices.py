r"""The matrices N that the Cayley transform solves with at each frequency, and the solves on the rows of images.

With the symbol :math:`[W_1\ W_2]` of a wide kernel (of a tall one, :math:`[W_1; W_2]`)

.. math:: N = I + W_1 - W_1^* + G, \qquad G = W_2 W_2^* \text{ (wide)}, \quad W_2^* W_2 \text{ (tall)}.

The skew part of the kernel is taken before its transform, so that N comes from one small product. Factors solve N and
:math:`N^\top`, so :math:`N^* k = g` (:mod:`lipkit.conv.cayley_conv`) is solved for the conjugates of g and k.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lipkit.conv.spectrum import Symbol, as_pair, at_frequencies, frequencies
from lipkit.conv.symbol import centred, check_kernel, wave_table
from lipkit.linalg.cayley import Factors, solve_rows
from lipkit.linalg.matrices import eye_like
from lipkit.linalg.precision import without_autocast
from lipkit.linalg.transforms import plain_gradients, transformed

Form = Literal["wide", "tall", "second", "first adjoint"]  # see solve_form


class NormalMatrices(NamedTuple):
    """:math:`N^\\top` and :math:`W_2` (None if square): real at self-conjugate frequencies, complex at the pairs."""

    real: Tensor
    pair: Tensor
    rest_real: Tensor | None
    rest_pair: Tensor | None


def normal_matrices(kernel: Tensor, h: int, w: int) -> NormalMatrices:
    """The matrices N^T and W_2 of a kernel ``(cout, cin, kh, kw)`` on ``h x w`` images; differentiable."""
    check_kernel(kernel)
    cout, cin = kernel.shape[:2]
    n = min(cout, cin)
    rest = None if cout == cin else kernel[:, n:] if cout < cin else kernel[n:]
    return normal_matrices_of(kernel[:n, :n], rest, h, w, wide=cout < cin)


def normal_matrices_of(own: Tensor, rest: Tensor | None, h: int, w: int, *, wide: bool) -> NormalMatrices:
    """:func:`normal_matrices` of a kernel given in two parts, which saves copies of the kernel and of its gradient.

    ``own`` is W_1 ``(n, n, kh, kw)``. ``rest`` is W_2, ``(n, p, kh, kw)`` if wide, else ``(p, n, kh, kw)``; None for a
    square kernel.
    """
    own = centred(own)
    taps = own.permute(2, 3, 0, 1).flatten(0, 1)
    centre = (torch.arange(len(taps), device=taps.device) == len(taps) // 2)[:, None, None]
    # The taps of (I + W - W^*)^T: (W^*)^T = conj(W) has those of W, a kernel of odd sizes, in reverse.
    real, pair = _symbol(taps.mT - taps.flip(0) + centre * eye_like(taps), own.shape[2:], h, w)
    if rest is None:
        return NormalMatrices(real, pair, None, None)
    rest = centred(rest)
    rest_real, rest_pair = _symbol(rest.permute(2, 3, 0, 1).flatten(0, 1), rest.shape[2:], h, w)
    return NormalMatrices(add_gram(real, rest_real, wide), add_gram(pair, rest_pair, wide), rest_real, rest_pair)


class _AddGram(torch.autograd.Function):
    """:func:`add_gram`, where the gradient of W is one product with a Hermitian matrix, instead of two.

    On an AMD EPYC it is 1.5 to 1.65 times as fast, and a sandwich layer's training step 1.07 (128@16) or 1.0 (64@16).
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, w: Tensor, wide: bool) -> Tensor:
        ctx.save_for_backward(w)
        ctx.wide = wide
        return _add_gram(a, w, wide)

    @staticmethod
    @without_autocast()
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (w,) = ctx.saved_tensors
        both = g.mT + g.conj()  # d(conj(W) W^T) acts on both factors: (G^T + conj G) W
        return g, both @ w if ctx.wide else w @ both, None


def _add_gram(a: Tensor, w: Tensor, wide: bool) -> Tensor:
    return torch.baddbmm(a, *((w.conj(), w.mT) if wide else (w.mT, w.conj())))


def add_gram(a: Tensor, w: Tensor, wide: bool) -> Tensor:
    """``A + conj(W) W^T`` for A ``(F, n, n)``, W ``(F, n, p)`` if wide, else ``A + W^T conj(W)``, W ``(F, p, n)``."""
    if transformed() or torch.compiler.is_compiling():
        return _add_gram(a, w, wide)
    return _AddGram.apply(a, w, wide)


def _symbol(taps: Tensor, size: Sequence[int], h: int, w: int) -> tuple[Tensor, Tensor]:
    """The symbol of a kernel of this size, given tap by tap: real at the real frequencies, complex at the pairs."""
    _, cout, cin = taps.shape
    numbers = torch.promote_types(taps.dtype, torch.complex64)
    if h * w * len(taps) == 1:  # a dense layer has one frequency, where the symbol is its matrix
        return taps, taps.new_empty(0, cout, cin, dtype=numbers)
    grid = frequencies(h, w)
    f1, f2 = torch.cat(grid).unbind(1)
    waves = wave_table(f1, f2, h, w, (size[0], size[1]), taps)
    flat, n_real = taps.flatten(1), len(grid.real)
    # A complex product of real taps saves the pass that joins two real results.
    pair = torch.complex(*waves[:, n_real:]) @ flat.to(numbers)
    return (waves[0, :n_real] @ flat).reshape(-1, cout, cin), pair.reshape(-1, cout, cin)


class _Solution(torch.autograd.Function):
    """The solutions h of ``N h = x`` for the rows x of X ``(F, rows, n)``, from ``N^T`` and its factors: ``X N^-T``.

    On an AMD EPYC 1.9 to 2.7 times as fast as solves without factors; a sandwich layer's training step 1.08 (64@16).
    """

    @staticmethod
    def forward(ctx: Any, transposed: Tensor, rows: Tensor, matrix: Tensor, pivots: Tensor | None) -> Tensor:
        h = solve_rows(Factors(matrix, pivots), rows)
        ctx.save_for_backward(transposed, rows, matrix, pivots, h)
        return h

    @staticmethod
    @without_autocast()
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        transposed, rows, matrix, pivots, h = ctx.saved_tensors
        if torch.is_grad_enabled() or transformed(g):
            return *plain_gradients(_solution, (transposed, rows), g), None, None
        # N^* k = g is solved as N^T conj(k) = conj(g).
        k = conjugated(solve_rows(Factors(matrix, pivots), g.conj(), transposed=True))
        return product(h.conj_physical().mT, k, -1) if ctx.needs_input_grad[0] else None, k, None, None


def _solution(transposed: Tensor, rows: Tensor) -> Tensor:
    return torch.linalg.solve(transposed.mT, rows.mT).mT


def second_half(normal: NormalMatrices, factors: tuple[Factors, Factors], scale: Tensor | None) -> Symbol:
    r"""The half B of a wide transform [A B] as a symbol: :math:`\hat B = -2 N^{-1} W_2`, rows times ``scale``."""
    assert normal.rest_real is not None
    assert normal.rest_pair is not None
    real = -2 * _Solution.apply(normal.real, normal.rest_real.mT, *factors[0]).mT  # columns of W_2 as rows
    half = Symbol(real, as_pair(-2 * _Solution.apply(normal.pair, normal.rest_pair.mT, *factors[1]).mT))
    return half if scale is None else Symbol(*(part * scale[:, None] for part in half))


def _rows_of(z: Tensor) -> Tensor:
    """Complex ``(F, B, C)`` as a real view ``(F, 2, B, C)``, of which one strided pass is cheaper than one per part."""
    return torch.view_as_real(z.resolve_conj()).movedim(-1, 1) if z.is_complex() else z


def product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The batched product ``scale a b``, in one pass."""
    return a.new_empty(len(a), a.shape[1], b.shape[2]).baddbmm_(a, b, beta=0, alpha=scale)


def conjugated(g: Tensor) -> Tensor:
    """The conjugate, made in place; real numbers stay. Of a lazily conjugated tensor only the flag is cleared."""
    if not g.is_complex():
        return g
    return g.conj() if g.is_conj() else g.conj_physical_()


class Group(NamedTuple):
    """The frequencies of one kind, real or in pairs: their factors, and views of their rows of transformed images."""

    factors: Factors
    rest: Tensor | None
    rows: slice

    def view(self, rows: Tensor, channels: slice) -> Tensor:
        """The group's rows as a view: real ``(n_r, B, C)``, or pairs ``(n_p, 2, B, C)``."""
        part = rows[self.rows]
        part = part.unflatten(0, (-1, 2)) if self.factors.matrix.is_complex() else part
        return part[..., channels]

    def read(self, rows: Tensor, channels: slice, *, conjugate: bool = False) -> Tensor:
        """The group's rows as numbers, real or complex like its matrices: ``(frequencies, B, C)``."""
        part = self.view(rows, channels)
        if not self.factors.matrix.is_complex():
            return part.contiguous()
        made = torch.complex(part[:, 0], part[:, 1])
        return made.conj_physical_() if conjugate else made

    def write(self, out: Tensor, channels: slice, z: Tensor, scale: float) -> None:
        """Write ``scale z`` into the group's rows of ``out``."""
        torch.mul(_rows_of(z), scale, out=self.view(out, channels))

    def reflect(self, out: Tensor, rows: Tensor, channels: slice, z: Tensor) -> None:
        """Write ``2 z - rows`` into the group's rows of ``out``."""
        # lerp with the weight 2 is rows + 2 (z - rows) = 2 z - rows, in one pass.
        torch.lerp(self.view(rows, channels), _rows_of(z), 2.0, out=self.view(out, channels))


def forward_rows(form: Form, group: Group, rows: Tensor, out: Tensor) -> tuple[Tensor, Tensor | None]:
    """Fill ``out`` with ``form`` applied to the rows; return the arguments h and x2 of :func:`backward_rows`.

    h is the conjugate of N's solution ('first adjoint': the solution of N^*), x2 that of the inputs of W_2, or None.
    """
    if form == "first adjoint":
        return _adjoint_rows(form, group, rows, out), None
    n, rest, x2 = group.factors.matrix.shape[-1], group.rest, None
    own, other = slice(0, n), slice(n, None)
    if form == "second":
        assert rest is not None
        x2 = group.read(rows, slice(None))
        # N h = -W_2 x_2, so that y = -2 N^-1 W_2 x_2 is 2 h and the derivatives are those of 'wide'.
        x = product(x2, rest.mT, -1)
    else:
        x = group.read(rows, own)
        if form == "wide" and rest is not None:
            x2 = group.read(rows, other)
            x = torch.baddbmm(x, x2, rest.mT, alpha=-1)
    h = solve_rows(group.factors, x)
    if form == "second":
        group.write(out, own, h, 2.0)
    else:
        group.reflect(out, rows, own, h)
    if form == "tall" and rest is not None:
        group.write(out, other, h @ rest.mT, -2.0)
    # The derivative needs the conjugates only, so they are made in place.
    return conjugated(h), None if x2 is None else conjugated(x2)


def _adjoint_rows(form: Form, group: Group, g: Tensor, out: Tensor) -> Tensor:
    """Fill ``out`` with the adjoint of ``form`` at g ('first adjoint': that form itself); return its solve with N^*."""
    n, rest = group.factors.matrix.shape[-1], group.rest
    own, other = slice(0, n), slice(n, None)
    # The conjugates of the rows, because the factors solve N^T and not N^*.
    top = group.read(g, own, conjugate=True)
    if form == "tall" and rest is not None:
        top = torch.baddbmm(top, group.read(g, other, conjugate=True), rest, alpha=-1)
    k = solve_rows(group.factors, top, transposed=True)
    if form != "tall" and rest is not None:
        group.write(out, slice(None) if form == "second" else other, conjugated(k @ rest), -2.0)
    # Conjugate the features rather than the gradients of the matrices, which can be larger.
    k = conjugated(k)
    if form != "second":
        group.reflect(out, g, own, k)
    return k


def backward_rows(
    form: Form, group: Group, h: Tensor, x2: Tensor | None, g: Tensor, out: Tensor, *, for_symbol: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Fill ``out`` with the gradient of the input; if ``for_symbol``, return the gradients of N^T and of W_2.

    Args:
        h, x2: the results of :func:`forward_rows`.
        g: rows of the upstream gradient.
    """
    if form == "first adjoint":  # the adjoint of A* is A, the square transform
        k = forward_rows("wide", group, g, out)[0]
        return (product(k.mT, h, -2) if for_symbol else None), None
    k = _adjoint_rows(form, group, g, out)
    if not for_symbol:
        return None, None
    for_rest = None
    if form == "tall" and group.rest is not None:
        for_rest = product(group.read(g, slice(k.shape[-1], None)).mT, h, -2)
    elif x2 is not None:
        for_rest = product(k.mT, x2, -2)
    return product(h.mT, k, -2), for_rest  # h is kept as a conjugate: the gradient of N^T is -2 conj(h) k^T


def plain_solve(form: Form, x: Tensor, bias: Tensor | None, scale: Tensor | None, normal: NormalMatrices) -> Tensor:
    """`solve_form` in operations that torch can trace and differentiate to any order."""

    def one(z: Tensor, transposed: Tensor, rest: Tensor | None) -> Tensor:
        if form == "first adjoint":
            z = z if scale is None else z * scale
            return 2 * _solution(transposed.mH, z) - z  # A* = 2 N^-* - I, and the conjugate of N^T is N^*
        if form == "second":
            assert rest is not None
            half = -2 * _solution(transposed, (rest @ z.mT).mT)
            return half if scale is None else half * scale
        own, other = z.tensor_split([transposed.shape[-1]], -1)
        solved = _solution(transposed, own if form == "tall" or rest is None else own - other @ rest.mT)
        top = 2 * solved - own
        return top if form == "wide" or rest is None else torch.cat((top, -2 * solved @ rest.mT), -1)

    y = at_frequencies(one, x, normal[::2], normal[1::2])  # (N^T, W_2), real and complex
    return y if bias is None else y + bias[:, None, None]


def gradients(form: Form, inputs: Sequence[Any], g: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of x, bias, scale and each part of `NormalMatrices`, N and W_2 as independent variables."""
    return plain_gradients(lambda x, bias, scale, *n: plain_solve(form, x, bias, scale, NormalMatrices(*n)), inputs, g)
