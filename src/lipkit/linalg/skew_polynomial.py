r"""The normalised Taylor polynomial of a skew matrix, with a backward pass that knows the matrix is skew.

The powers of a skew :math:`A^* = -A` commute and are self-adjoint (even) or skew (odd). So the products for the
norm serve the polynomial too, and the gradient of a square :math:`X^2` is one product, :math:`SX` and its adjoint,
where S is the part of the upstream gradient that shares the symmetry of the square. Nine products of size c in all,
forward and backward, where differentiating :func:`lipkit.linalg.exponential.taylor` and
:func:`lipkit.linalg.exponential.schatten_bound` takes eighteen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.linalg._common import at_least_float32, check_matrix
from lipkit.linalg.exponential import SMALLEST_NORM, check_terms, schatten_bound, skew_part, taylor

# Degrees that need no power of A beyond those of the norm.
MAX_DEGREE = 5
# Matrices taken together: numbers that stay in the cache between the elementwise passes.
TOGETHER = 2**17
# Rows of a panel of a product that is known to be symmetric.
PANEL = 64


class Powers(NamedTuple):
    """``a`` of about unit norm, and its powers 2, 4 and 8: ``(n, c, c)``.

    ``scale`` and ``share`` ``(n, 1, 1)`` belong to the unscaled A = scale a: A / beta = share a.
    """

    a: Tensor
    a2: Tensor
    a4: Tensor
    a8: Tensor
    scale: Tensor
    share: Tensor


def empty_powers(batch: Sequence[int], c: int, like: Tensor) -> Powers:
    """Room for the powers of matrices ``(*batch, c, c)``, in the dtype and on the device of ``like``."""
    matrices = [like.new_empty(*batch, c, c) for _ in range(4)]
    return Powers(*matrices, *(like.new_empty(*batch, 1, 1) for _ in range(2)))


def _symmetric_product(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """The product of commuting symmetric, or skew, matrices: large ones by the panels above the diagonal, mirrored."""
    c = x.shape[-1]
    step = max(PANEL, -(-c // 4))
    if c < 4 * PANEL or torch.compiler.is_compiling() or x.device.type != "cpu":
        return torch.bmm(x, y, out=out)
    for first in range(0, c, step):
        last = min(first + step, c)
        torch.bmm(x[:, first:last], y[:, :, first:], out=out[:, first:last, first:])
        out[:, last:, first:last] = out[:, first:last, last:].mT
    return out


def fill_powers(a: Tensor, smallest: float, out: Powers) -> None:
    r"""What value and gradient share, for skew ``a`` ``(n, c, c)``, written into ``out``.

    ``share`` is :math:`1 / \|a^8\|_F^{1/8}`, so that share a has at most the norm 1, but not more than
    ``scale / smallest``: matrices of a smaller norm are not scaled up.
    """
    norm = torch.linalg.vector_norm(a, dim=(-2, -1), keepdim=True)
    # The eigenvalues then have the mean square 1: no power under- or overflows.
    out.scale.copy_((norm / math.sqrt(a.shape[-1])).clamp_min(smallest))
    torch.mul(a, 1 / out.scale, out=out.a)
    _symmetric_product(out.a, out.a, out.a2)
    _symmetric_product(out.a2, out.a2, out.a4)
    _symmetric_product(out.a4, out.a4, out.a8)
    beta = torch.linalg.vector_norm(out.a8, dim=(-2, -1), keepdim=True) ** 0.125
    torch.minimum(1 / beta, out.scale / smallest, out=out.share)


def _coefficients(t: Tensor, terms: int) -> list[Tensor]:
    """``t^i / i!``, and zero beyond the degree."""
    return [t**i * (1 / math.factorial(i) if i <= terms else 0.0) for i in range(MAX_DEGREE + 1)]


def _combination(p: Powers, constant: Tensor, second: Tensor, fourth: Tensor, out: Tensor | None = None) -> Tensor:
    """``constant + second a^2 + fourth a^4``."""
    made = torch.mul(p.a2, second, out=out).addcmul_(p.a4, fourth)
    made.diagonal(dim1=-2, dim2=-1).add_(constant[..., 0])
    return made


def value(p: Powers, terms: int, out: Tensor | None = None) -> Tensor:
    """The polynomial of share a: ``(n, c, c)``, an even and an odd part."""
    c = _coefficients(p.share, terms)
    even = _combination(p, c[0], c[2], c[4], out)
    return even.baddbmm_(p.a, _combination(p, c[1], c[3], c[5]))


def gradient(p: Powers, g: Tensor, terms: int, smallest: float) -> Tensor:
    """The gradient of the unscaled A, itself skew, from the upstream ``g`` ``(n, c, c)`` of the polynomial."""
    t = p.share
    c = _coefficients(t, terms)
    even = (g + g.mT).mul_(0.5)
    skew = g - even
    odd = torch.bmm(skew, _combination(p, c[1], c[3], c[5]))
    room = torch.bmm(p.a, skew)
    # Of the gradient of a self-adjoint factor only the self-adjoint part acts.
    around = (room + room.mT).mul_(-0.5)
    g2 = torch.mul(even, c[2], out=skew).addcmul_(around, c[3])
    g4 = torch.mul(even, c[4], out=even).addcmul_(around, c[5])
    # The derivative along A itself counts each power by its exponent. It acts through share = ||a^8||^(-1/8), unless
    # that is held, and the gradient of a^4 is a multiple of a^12.
    dots = [torch.mul(x, y, out=around).sum((-2, -1), True) for x, y in ((odd, p.a), (g2, p.a2), (g4, p.a4))]
    along = dots[0] + 2 * dots[1] + 4 * dots[2]
    g8 = torch.where(t < p.scale / smallest, along * t**16 / -4, torch.zeros_like(t))
    g4.addcmul_(_symmetric_product(p.a8, p.a4, room), g8)
    torch.bmm(g4, p.a2, out=room)
    g2.add_(room).add_(room.mT)
    odd.baddbmm_(g2, p.a, beta=0.5, alpha=-1)
    odd.mul_(1 / p.scale)
    return odd - odd.mT


def taylor_exponential(w: Tensor, terms: int = 10) -> Tensor:
    r"""Nearly semi-orthogonal matrix of the same shape as ``w``, by the Taylor polynomial of a normalised skew matrix.

    .. math:: A = W - W^*, \qquad \bar A = A / \beta(A), \qquad Q = p_T(\bar A) \text{ cropped to } m \times n

    with :math:`\beta(A) \ge \|A\|_2` the bound of :func:`schatten_bound`: :math:`\|\bar A\| \le 1` is proved, which a
    power iteration does not give. Rotations are at most 1 rad, and the scale of ``w`` has no effect.

    Args:
        w: ``(..., m, n)``, real or complex.
        terms: T, the highest power.

    Returns:
        ``(..., m, n)`` with singular values inside :func:`taylor_range` of ``(1, terms)``, up to rounding. For
        ``w = 0`` it is the identity (cropped).

    Cost:
        For real matrices and T up to 5, four products of size max(m, n), and five in the backward pass. Else three for
        the norm and :math:`2 \sqrt T` for the polynomial, and twice that backward.

    >>> q = taylor_exponential(torch.arange(6.0).reshape(3, 2))
    >>> torch.allclose(q.mT @ q, torch.eye(2), atol=1e-6)
    True

    References:
        [ECO] algorithm 1, with an upper bound where the paper has a power iteration.
    """
    check_matrix(w)
    check_terms(terms)
    w = at_least_float32(w)
    if terms > MAX_DEGREE or w.is_complex() or w.numel() == 0:
        return _taylor_exponential(w, terms)
    function = _TaylorExponential if torch.compiler.is_compiling() else _WithForwardMode
    made: Tensor = function.apply(w, terms)[0]
    return made


def _taylor_exponential(w: Tensor, terms: int) -> Tensor:
    """:func:`taylor_exponential` by operations that are differentiable any number of times."""
    a = skew_part(w)
    scale = schatten_bound(a).clamp_min(SMALLEST_NORM)
    return taylor(a / scale[..., None, None], terms)[..., : w.shape[-2], : w.shape[-1]]


def _groups(count: int, side: int, device: torch.device) -> list[slice]:
    """Matrices that are taken together, by as many as the cache holds; all of them where that is not known."""
    step = max(1, TOGETHER // side**2)
    if torch.compiler.is_compiling() or device.type != "cpu":
        step = count
    return [slice(first, first + step) for first in range(0, count, step)]


class _TaylorExponential(torch.autograd.Function):
    """:func:`_taylor_exponential` of real matrices for a small degree, with half of its products.

    The powers are returned so that the backward pass can have them; they carry no gradient.
    """

    @staticmethod
    def forward(w: Tensor, terms: int) -> tuple[Tensor, ...]:
        *batch, m, n = w.shape
        c = max(m, n)
        made = w.new_empty(w.shape)
        kept = empty_powers(batch, c, w)
        w, flat, *rows = (t.reshape(-1, *t.shape[-2:]) for t in (w, made, *kept))
        for group in _groups(len(flat), c, w.device):
            part = Powers(*(t[group] for t in rows))
            fill_powers(skew_part(w[group]), SMALLEST_NORM, part)
            if m == n:
                value(part, terms, out=flat[group])
            else:
                flat[group] = value(part, terms)[:, :m, :n]
        return made, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        w, ctx.terms = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(w, *output[1:])
        ctx.save_for_forward(w)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *unused: None) -> tuple[Tensor | None, None]:
        if g is None:
            return None, None
        w, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            # The gradient itself is to be differentiated.
            return torch.func.vjp(lambda w: _taylor_exponential(w, ctx.terms), w)[1](g)[0], None
        m, n = w.shape[-2:]
        c = max(m, n)
        flat = g.reshape(-1, m, n)
        made = g.new_empty(g.shape)
        rows = made.view(-1, m, n)
        for group in _groups(len(flat), c, w.device):
            part = Powers(*(t.reshape(-1, *t.shape[-2:])[group] for t in kept))
            padded = F.pad(flat[group], (0, c - n, 0, c - m)) if m != n else flat[group]
            of_a = gradient(part, padded, ctx.terms, SMALLEST_NORM)
            # A = W - W^T, and its gradient is skew.
            torch.mul(of_a[:, :m, :n], 2, out=rows[group])
        return made, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], w: Tensor, terms: int) -> tuple[tuple[Tensor, ...], int]:
        return _TaylorExponential.apply(w.movedim(in_dims[0], 0), terms), 0


class _WithForwardMode(_TaylorExponential):
    """The same with forward-mode derivatives, which ``torch.compile`` does not take."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, terms: None) -> tuple[Tensor | None, ...]:
        (w,) = ctx.saved_tensors
        # The gradient is linear in its upstream: transposed once more it is the derivative.
        pull = torch.func.vjp(lambda w: _taylor_exponential(w, ctx.terms), w)[1]
        (change,) = torch.func.vjp(lambda v: pull(v)[0], torch.zeros_like(w))[1](tangent)
        return change, *(None for _ in range(6))
