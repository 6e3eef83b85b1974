r"""Spectral norms proved in floating point: a Cholesky factorisation is the proof.

If the float64 Cholesky factorisation of :math:`t I - G` runs to completion, then :math:`t I - G + cI` is positive
semidefinite for :math:`c = \gamma_{n+1}/(1-\gamma_{n+1})\,\mathrm{tr}(tI - G)` (Rump, "Verification of positive
definiteness", BIT 2006). With :math:`G` the computed Gram matrix and its a-priori rounding error this bounds the
norm of the matrix *as stored*, whatever the eigenvalue routine did: it only proposes ``t``.
"""

import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from scipy.linalg import LinAlgError, eigh
from scipy.sparse.linalg import ArpackError, aslinearoperator, eigsh
from torch import Tensor

from lipkit.errors import ShapeError
from lipkit.linalg.matrices import mirrored_product
from lipkit.linalg.singular_value import singular_value
from lipkit.linalg.transforms import differentiated, transformed
from lipkit.proof.roundoff import UNIT, check_readable, gamma, to_double, up

_CHUNK_BYTES = 1 << 27
# ARPACK restarts from random vectors after an invariant space: seed them. Older versions of SciPy do so themselves.
_SEEDED = {"rng": 0} if "rng" in inspect.signature(eigsh).parameters else {}
ALONE = 96
"""From this side on, LAPACK is faster when asked for the largest eigenpair only."""
MANY = 1500
"""From this side on, Lanczos is faster than LAPACK for real matrices."""


def gram_matrix(a: Tensor) -> Tensor:
    """``A* A`` of a tall matrix, ``A A*`` of a wide one: the smaller of the two Gram matrices."""
    return a.mH @ a if a.shape[-2] >= a.shape[-1] else a @ a.mH


def _level(a: Tensor, gram: Tensor, guess: Tensor, slacks: Sequence[float]) -> Tensor:
    """Proved upper bounds (F,) of the squared norms of a (F, m, n) with float64 Gram matrices (F, p, p).

    It tries ``guess * (1 + slack)``, guess (F,), for one slack after the other.
    """
    p, inner = gram.shape[-1], max(a.shape[-2:])
    frobenius = up(a.abs().square().sum((-2, -1)), 4 + a.shape[-1] * a.shape[-2])
    # sqrt(2) gamma_{2 m} ||A||_F^2 covers the rounding of a complex Gram matrix, and of a real one a fortiori.
    gram_error = 1.5 * gamma(2 * inner + 4) * frobenius
    # Rump's constant for t I - G, enlarged fourfold for complex arithmetic; its trace is at most p t.
    cholesky_error = gamma(4 * (p + 2)) * p
    eye = torch.eye(p, dtype=gram.dtype, device=gram.device)
    proved = frobenius.clone()  # holds without any factorisation
    open_ = torch.arange(len(a), device=a.device)
    for slack in slacks:
        t = guess[open_].clamp_min(0) * (1 + max(slack, 2 * cholesky_error + 8 * UNIT))
        _, info = torch.linalg.cholesky_ex(t[:, None, None] * eye - gram[open_])
        good = info == 0
        value = up(t * (1 + 2 * cholesky_error + 4 * UNIT) + gram_error[open_], 4)
        closed = open_[good]
        proved[closed] = torch.minimum(value[good], frobenius[closed])
        open_ = open_[~good]
        if not len(open_):
            break
    return proved


def _largest_eigenvalue(gram: Tensor) -> Tensor:
    """Estimates (F,) of the largest eigenvalues of Hermitian matrices (F, p, p): by Lanczos from side `MANY` on."""
    if gram.shape[-1] >= MANY and not gram.is_complex():
        return torch.stack([_lanczos(one)[0] for one in gram])
    if _by_lapack(gram):
        return torch.stack([largest_eigenpair(one)[0] for one in gram])
    return torch.linalg.eigvalsh(gram)[..., -1] if gram.shape[-1] > 1 else gram[..., 0, 0].real


def _lanczos(a: Tensor, tolerance: float = 1e-10, *, factor: bool = False) -> tuple[Tensor, Tensor]:
    """Estimates of the largest eigenvalue and its vector of a symmetric ``a``, or of ``a a^T`` if a is a ``factor``."""
    # The start vector is fixed, so that equal matrices give equal bounds.
    start = torch.linspace(0.5, 1.5, len(a), dtype=a.dtype, device="cpu").cos()
    matrix: Any = a.cpu().numpy()
    if factor:
        matrix = aslinearoperator(matrix) @ aslinearoperator(matrix.T)
    try:
        values, vectors = eigsh(matrix, k=1, which="LA", v0=start.numpy(), tol=tolerance, **_SEEDED)
    except ArpackError:  # no convergence, or a zero matrix
        return largest_eigenpair(gram_matrix(a) if factor else a)
    return torch.from_numpy(values)[0].to(a.device), torch.from_numpy(vectors[:, 0]).to(a.device)


def spectral_norms(a: Tensor) -> Tensor:
    r"""Proved upper bounds of the spectral norms of a batch of matrices.

    Args:
        a: ``(..., m, n)``, real or complex, any floating dtype.

    Returns:
        float64 ``(...)``, no gradient, at least :math:`\|A\|_2` of the matrix as stored and above it by a
        fraction of about ``1e-15 m n`` (1e-8 from 1,500 rows and columns on); 0 exactly for a zero matrix, ``inf``
        where an entry is not finite.

    Guarantee:
        Upper bound including all rounding of this computation (IEEE float64, any order of summation).

    Cost:
        One Gram matrix on the smaller side, its eigenvalues (from side 96 only the largest; from side 1,500 by
        a few hundred products with a vector) and one Cholesky factorisation, all float64.

    Raises:
        ShapeError: ``a`` has fewer than two dimensions or an empty one, or is not of a floating or complex dtype.

    >>> norms = spectral_norms(torch.diag(torch.tensor([3.0, 1.0])))
    >>> 3.0 <= float(norms) < 3.0 + 1e-11
    True
    """
    if a.ndim < 2 or 0 in a.shape[-2:]:
        raise ShapeError(f"expected matrices (..., m, n) with m, n >= 1, got shape {tuple(a.shape)}")
    if not (a.is_floating_point() or a.is_complex()):
        raise ShapeError(f"expected matrices of a floating or complex dtype, got {a.dtype}")
    check_readable(a)
    batch = a.shape[:-2]
    flat = a.detach().reshape(-1, *a.shape[-2:])
    if not len(flat):
        return torch.zeros(batch, dtype=torch.float64, device=a.device)
    bytes_each = 16 * (a.shape[-1] * a.shape[-2] + 3 * min(a.shape[-2:]) ** 2)
    norms = []
    for part in flat.split(max(1, _CHUNK_BYTES // bytes_each)):
        scaled, exponent, kind = _scaled(to_double(part))
        gram = gram_matrix(scaled)
        norms.append(_unscaled(_level(scaled, gram, _largest_eigenvalue(gram), _SLACKS), scaled, exponent, kind))
    return torch.cat(norms).reshape(batch)


def power_of_two(exponent: Tensor) -> Tensor:
    """``2^exponent`` in float64, exactly, from its bits: ``torch.ldexp`` goes through a rounded ``pow``."""
    return ((exponent.to(torch.int64).clamp(-1022, 1023) + 1023) << 52).view(torch.float64)


def times_power_of_two(value: Tensor, exponent: Tensor) -> Tensor:
    """``value * 2^exponent``, exact in the normal range; in two steps, since the power itself may leave it."""
    half = exponent // 2
    return value * power_of_two(half) * power_of_two(exponent - half)


def scaled_back(bound: Tensor, exponent: Tensor) -> Tensor:
    """``bound * 2^exponent``, never rounded down: below the normal range by at most 2^-1074."""
    value = times_power_of_two(bound, exponent)
    return torch.where((bound > 0) & (value < 2.0**-1000), value + 2.0**-1074, value)


# Relative slacks above a guess: none if it is exact up to rounding, then two for less accurate guesses.
_SLACKS = (0.0, 1e-8, 1e-3)


def _scaled(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Matrices ``(F, m, n)`` as ``2^e A`` with entries of A near 1: A, the exponents e (F,), and the kinds (F,).

    The kind is 0 for a zero matrix, inf for one with entries that are not finite, and 1 otherwise.
    """
    finite = torch.isfinite(a).flatten(1).all(1)
    # Real and imaginary parts apart: the modulus of a finite complex number can overflow.
    parts = torch.view_as_real(a.resolve_conj()).flatten(-2) if a.is_complex() else a
    biggest = parts.abs().amax((-2, -1))
    # A power of two (exact) brings the largest entry near 1: no overflow or underflow can enter the Gram matrix.
    _, exponent = torch.frexp(torch.where(finite & (biggest > 0), biggest, 1))
    scaled = torch.where(finite[:, None, None], times_power_of_two(a, -exponent[:, None, None]), 1)
    return scaled, exponent, torch.where(finite, (biggest > 0).double(), torch.inf)


def _unscaled(level: Tensor, scaled: Tensor, exponent: Tensor, kind: Tensor) -> Tensor:
    """Norms of the unscaled matrices from ``level``, proved squared norms of the scaled ones."""
    # Entries that the scaling (or the products) made subnormal lose at most 2^-1000 each.
    lost = scaled.shape[-1] * scaled.shape[-2] * 2.0**-500
    norm = scaled_back(up(level.sqrt(), 2) + lost, exponent)
    return torch.where((kind == 0) | kind.isinf(), kind, norm)  # the kinds 0 and inf are norms themselves


class Quick(NamedTuple):
    """A bound of the norm of one matrix, proved or estimated, and the vectors that give its gradient.

    Attributes:
        bound: 0-d float64.
        u, v: unit vectors with ``u^T A v`` within 5 % of the norm; its singular vectors if the largest singular value
            is simple and the steps have converged. float64 if proved.
        ratio: ``bound / (u^T A v)``; 0 for matrices that are zero or not finite.
    """

    bound: Tensor
    u: Tensor
    v: Tensor
    ratio: Tensor


def quick_spectral_norm(a: Tensor) -> Quick:
    r"""Proved upper bound of the spectral norm of one real matrix with many rows and columns; no gradient.

    Lanczos steps in float32 propose a level, one Cholesky factorisation in float64 proves it.

    Guarantee:
        Upper bound as :func:`spectral_norms`; in the normal range about 0.1 % above the norm and at most 5 %.

    Cost:
        Half of a float64 Gram matrix on the smaller side, a few dozen products by vectors, a factorisation.
    """
    if a.ndim != 2 or 0 in a.shape or not a.is_floating_point():
        raise ShapeError(f"expected a real matrix (m, n) with m, n >= 1, got {a.dtype} of shape {tuple(a.shape)}")
    scaled, exponent, kind = _scaled(to_double(a.detach())[None])
    wide = scaled[0] if a.shape[0] <= a.shape[1] else scaled[0].mT
    rows, columns = (wide.new_zeros(n) for n in wide.shape)
    level, ratio = wide.new_zeros(1), wide.new_zeros(())  # of matrices that are zero or not finite
    if float(kind) == 1:
        gram = mirrored_product(wide, wide.mT)
        # Up to side 8, all eigenvalues cost less than a call of Lanczos.
        value, rows = _lanczos(wide.float(), 1e-3, factor=True) if len(gram) > 8 else largest_eigenpair(gram)
        level = _level(scaled, gram[None], value.double()[None], (_ABOVE, 1e-2, 5e-2))
        if not bool(level < 1.1 * value):
            # Lanczos missed the largest eigenvalue, so only the Frobenius norm is proved: start again with LAPACK.
            value, rows = largest_eigenpair(gram)
            level = _level(scaled, gram[None], value[None], _SLACKS)
        rows = rows.to(wide.dtype)
        columns = wide.mT @ rows
        reached = torch.linalg.vector_norm(columns)
        columns, ratio = columns / reached, level[0].sqrt() / reached
    u, v = (rows, columns) if a.shape[0] <= a.shape[1] else (columns, rows)
    return Quick(_unscaled(level, scaled, exponent, kind)[0], u, v, ratio)


# Relative slack above Lanczos' estimate of a squared norm that `quick_spectral_norm` tries first.
_ABOVE = 2e-3


def quick_norm_estimate(a: Tensor) -> Quick:
    """The estimate that `quick_spectral_norm` tries to prove, without the proof; for matrices of norm about 1, or 0."""
    wide = a.detach() if a.shape[0] <= a.shape[1] else a.detach().mT
    if not bool(torch.linalg.vector_norm(wide).isfinite()):
        return quick_spectral_norm(a)
    value, rows = _lanczos(wide.float(), 1e-3, factor=True)
    columns = wide.mT @ rows.to(wide.dtype)
    reached = torch.linalg.vector_norm(columns).double().clamp_min(1e-30)
    bound, columns = (value.double() * (1 + _ABOVE)).sqrt(), columns / reached
    u, v = (rows, columns) if a.shape[0] <= a.shape[1] else (columns, rows)
    return Quick(bound, u, v, bound / reached)


def _by_lapack(gram: Tensor) -> bool:
    """True if LAPACK should compute only the largest eigenvalue, matrix by matrix: on a CPU, from side `ALONE` on."""
    plain = gram.device.type == "cpu" and not transformed() and not torch.compiler.is_compiling()
    return plain and gram.shape[-1] >= ALONE


def largest_eigenpair(gram: Tensor) -> tuple[Tensor, Tensor]:
    """The largest eigenvalue of one Hermitian matrix and its vector, from a dense eigenvalue routine."""
    if _by_lapack(gram):
        last = len(gram) - 1
        with suppress(LinAlgError):
            value, vector = eigh(gram.detach().resolve_conj().numpy(), subset_by_index=[last, last])
            if len(value):  # LAPACK may find none where all eigenvalues coincide, as for an orthogonal matrix
                return torch.from_numpy(value)[0], torch.from_numpy(vector)[:, 0]
    values, vectors = torch.linalg.eigh(gram)
    return values[-1], vectors[:, -1]


def spectral_norm(a: Tensor) -> Tensor:
    """Proved upper bound of the largest spectral norm in a batch ``(..., m, n)``: 0-d float64, differentiable.

    The value is that of :func:`spectral_norms`; the derivatives are those of the largest singular value, exact where
    that value is simple. Errors are those of :func:`spectral_norms`, and ``ShapeError`` for an empty batch.

    >>> a = torch.diag(torch.tensor([3.0, 1.0])).requires_grad_()
    >>> spectral_norm(a).backward()
    >>> a.grad
    tensor([[1., 0.],
            [0., 0.]])
    """
    norms = spectral_norms(a).reshape(-1)
    if not len(norms):
        raise ShapeError(f"expected one matrix or more, got shape {tuple(a.shape)}")
    bound = norms.max()
    if not differentiated(a) or not torch.isfinite(bound):
        return bound
    if bound == 0:
        return to_double(a).abs().sum()  # with a gradient of zeros
    return scale_to(bound, largest_singular_value(to_double(a.reshape(-1, *a.shape[-2:])[int(norms.argmax())])))


def largest_singular_value(a: Tensor) -> Tensor:
    r"""Estimate :math:`u^* A v` of the largest singular value, float64, with the derivatives of `singular_value`."""
    with torch.no_grad():
        # Entries near 1, so that the Gram matrix of huge or tiny ones stays in range.
        fixed = a.detach()
        largest = torch.linalg.vector_norm(fixed.reshape(-1), math.inf)
        scaled = fixed / largest if bool(largest >= 2.0**-1000) else fixed * 2.0**1000
        gram = gram_matrix(scaled)
        many = len(gram) >= MANY and not gram.is_complex()
        one_side = (_lanczos if many else largest_eigenpair)(gram)[1]
        tall = a.shape[0] >= a.shape[1]
        other = scaled @ one_side if tall else scaled.mH @ one_side
        other = other / torch.linalg.vector_norm(other)
        u, v = (other, one_side) if tall else (one_side, other)
        value = u.conj() @ fixed @ v
    return singular_value(a, u, v, value.real if value.is_complex() else value)


def scale_to(bound: Tensor, surrogate: Tensor) -> Tensor:
    r"""The value ``bound`` with the gradient of :math:`\text{bound} \cdot s / s_0`, for a differentiable estimate s.

    >>> x = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    >>> y = scale_to(torch.tensor(4.5, dtype=torch.float64), x * x)
    >>> y.backward(); y.item(), x.grad.item()
    (4.5, 4.5)
    """
    value, bound = surrogate.detach(), bound.detach()
    if not bool(value > 0):
        return bound
    return bound + (surrogate - value) * (bound / value)
