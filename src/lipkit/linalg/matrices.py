"""Checks and small helpers for matrices, and products that are known to be symmetric or skew."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec

import numpy as np
import torch
from torch import Tensor

from lipkit.errors import OptionError, ShapeError
from lipkit.linalg.transforms import transformed

P = ParamSpec("P")


def check_integer(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raise ``OptionError`` unless ``value`` is an integer of at least ``least`` and at most ``most``, if given."""
    fits = isinstance(value, int | np.integer) and not isinstance(value, bool)  # True and False are integers to Python
    if not fits or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise OptionError(f"{name}: expected an integer {limits}, got {value!r}")


def check_positive(**values: int) -> None:
    """Raise ``OptionError`` unless every value is an integer of at least 1."""
    for name, value in values.items():
        check_integer(name, value, 1)


def check_matrix(a: Tensor, name: str = "w") -> None:
    """Raise ``ShapeError`` unless ``a`` is a floating or complex tensor of shape ``(..., m, n)``, m, n >= 1."""
    if a.ndim < 2 or a.shape[-1] == 0 or a.shape[-2] == 0:
        raise ShapeError(f"{name}: expected a matrix (..., m, n) with m, n >= 1, got shape {tuple(a.shape)}")
    if not (a.is_floating_point() or a.is_complex()):
        raise ShapeError(f"{name}: expected a floating or complex dtype, got {a.dtype}")


def at_least_float32(a: Tensor) -> Tensor:
    """``a``, widened to float32 if it is half precision, which is too coarse for constrained weights."""
    return a.float() if a.dtype in (torch.float16, torch.bfloat16) else a


def on_tall(function: Callable[Concatenate[Tensor, P], Tensor]) -> Callable[Concatenate[Tensor, P], Tensor]:
    """Decorator for a function of tall matrices: checks w, widens it to float32, and takes a wide w by its adjoint."""

    @functools.wraps(function)
    def made(w: Tensor, *args: P.args, **named: P.kwargs) -> Tensor:
        check_matrix(w)
        w = at_least_float32(w)
        return function(w, *args, **named) if w.shape[-2] >= w.shape[-1] else function(w.mH, *args, **named).mH

    return made


def near_one(w: Tensor, dim: int | tuple[int, ...] = (-2, -1)) -> Tensor:
    """``w`` divided by its largest absolute entry (constant to gradients): squares stay in range; 0 stays 0."""
    biggest = w.detach().abs().amax(dim, keepdim=True)
    least = torch.finfo(w.dtype).tiny if w.is_complex() else 0.0  # complex division by a subnormal number gives NaN
    return w / torch.where(biggest > 0, biggest.clamp_min(least), 1)


def eye_like(a: Tensor, n: int | None = None) -> Tensor:
    """The n x n identity (n defaults to the number of columns) in the dtype and on the device of ``a``."""
    return torch.eye(a.shape[-1] if n is None else n, dtype=a.dtype, device=a.device)


def orthogonality_residual(q: Tensor) -> Tensor:
    r"""How far ``q`` is from semi-orthogonal: :math:`\max |Q^*Q - I|` (tall) or :math:`\max |QQ^* - I|` (wide).

    For matrices ``(..., m, n)``, real or complex, a real tensor of shape ``(...)``.

    >>> float(orthogonality_residual(2 * torch.eye(3)))
    3.0
    """
    check_matrix(q, "q")
    gram = q.mH @ q if q.shape[-2] >= q.shape[-1] else q @ q.mH
    return (gram - eye_like(gram)).abs().amax((-2, -1))


def all_finite(*values: Tensor) -> bool:
    """True if no number is infinite or NaN, told from the extremes without a mask. Meta tensors count as finite."""
    real = [torch.view_as_real(v.resolve_conj()) if v.is_complex() else v for v in map(torch.detach, values)]
    real = [v.float() if v.dtype.itemsize == 1 else v for v in real if v.numel()]  # float8 has no aminmax
    return all(v.is_meta or bool(torch.stack(v.aminmax()).isfinite().all()) for v in real)


def thin_svd(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.linalg.svd(w, full_matrices=False)``, repeated in double precision where LAPACK fails.

    LAPACK's divide and conquer stalls, or returns NaN, on some finite matrices with many nearly equal singular values,
    such as nearly orthogonal ones. Double precision mends nearly all of them; if it does not, the matrix is reflected,
    :math:`WH = US(V^*H)` with a Householder matrix H, which changes every rounding. Raises
    ``torch.linalg.LinAlgError`` if an entry is not finite or nothing helps.
    """
    stalled = torch.linalg.LinAlgError("linalg.svd: expected finite factors of finite matrices, got infinity or NaN")
    try:
        u, s, vh = torch.linalg.svd(w, full_matrices=False)
        if transformed() or torch.compiler.is_compiling() or all_finite(u, s, vh) or not all_finite(w):
            return u, s, vh
    except torch.linalg.LinAlgError as error:
        if transformed() or not all_finite(w):
            raise
        stalled = error
    wide = w.to(torch.promote_types(w.dtype, torch.float64))
    for turn in range(4):
        # A reflection from the right keeps U and the singular values, but changes the numbers on which LAPACK failed.
        # Turn 0 has v = 0, no reflection. The vectors of the later turns share no pattern with a weight.
        v = turn * torch.cos(turn * torch.arange(1, w.shape[-1] + 1, dtype=torch.float64, device=w.device))
        v = (v / v.norm().clamp_min(1e-300)).to(wide.dtype)
        try:
            u, s, vh = torch.linalg.svd(wide - 2 * (wide @ v)[..., None] * v, full_matrices=False)
        except torch.linalg.LinAlgError:
            continue
        if all_finite(u, s, vh):
            return u.to(w.dtype), s.to(w.real.dtype), (vh - 2 * (vh @ v)[..., None] * v).to(w.dtype)
    raise stalled


# Fewest rows of a panel of `mirrored_product`.
PANEL = 64


def mirrored_product(x: Tensor, y: Tensor, negative: bool = False) -> Tensor:
    """``x @ y``, known to be symmetric (skew if ``negative``).

    Examples are products of commuting symmetric or skew matrices, and of a matrix by its transpose. Of large products
    only the upper blocks are computed. The factors have the same number of dimensions, at most three.
    """
    c = y.shape[-1]
    if c < 4 * PANEL or torch.compiler.is_compiling() or x.device.type != "cpu":
        return x @ y
    out, step = x.new_empty(*x.shape[:-1], c), -(-c // (4 if c >= 8 * PANEL else 2))
    for first, rows, panel in zip(range(0, c, step), x.split(step, -2), out.split(step, -2), strict=True):
        last = first + step
        # A panel holds rows from their diagonal block on; the part right of this block is mirrored below it.
        if first:
            y, panel = y[..., step:], panel[..., first:]
        torch.matmul(rows, y, out=panel)
        if last < c:
            above = panel[..., step:].mT
            out[..., last:, first:last] = above.neg() if negative else above
    return out
