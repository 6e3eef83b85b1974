"""Matrices divided by a Cholesky factor of their Gram matrix: contractions, and block reflectors."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.errors import OptionError, finite
from lipkit.linalg.bjorck import bjorck_step
from lipkit.linalg.matrices import at_least_float32, check_integer, check_matrix, eye_like, near_one, on_tall


def _divided(w: Tensor, ridge: float) -> Tensor:
    """``W L^{-*}`` for tall W, with ``L L* = W* W + ridge trace(W* W) I``; zero stays zero."""
    ridge = max(ridge, 4 * torch.finfo(w.dtype).eps)  # below this, rounding may leave no factor, or large rows
    w = near_one(w)
    gram = w.mH @ w
    trace = torch.diagonal(gram, dim1=-2, dim2=-1).real.sum(-1)[..., None, None]
    shift = torch.where(trace > 0, ridge * trace, 1)  # for a zero matrix any shift: the factor only has to exist
    factor = torch.linalg.cholesky_ex(gram + shift * eye_like(gram))[0]
    return torch.linalg.solve_triangular(factor, w.mH, upper=False).mH  # L^-1 W^* is (W L^-*)^*


@on_tall
def cholesky(w: Tensor, ridge: float = 1e-3) -> Tensor:
    r"""The rows of a wide matrix made nearly orthonormal by one triangular solve: a contraction.

    .. math:: Q = L^{-1} W, \qquad LL^* = WW^* + eI, \qquad e = \mathrm{ridge} \cdot \mathrm{mean\ diag}(WW^*)

    and :math:`WL^{-*}` with :math:`LL^* = W^*W + eI` for tall matrices. :math:`Q^*Q` (or :math:`QQ^*`) is similar to
    :math:`G(G + eI)^{-1}`, so a singular value s of W becomes :math:`s / \sqrt{s^2 + e} < 1`.

    Args:
        ridge: e as a fraction of the mean squared norm of the rows (of the columns of tall matrices); positive, and
            raised where e would be below 4 roundings of the trace of :math:`WW^*`.

    Guarantee:
        Norm at most 1 up to rounding, for every ``w``; a zero matrix stays zero.
        It takes one Gram matrix of the smaller side, one Cholesky factorisation and one triangular solve.

    Raises:
        OptionError: ``ridge`` is not positive.

    >>> cholesky(torch.tensor([[3.0, 0.0], [0.0, 3.0]]), ridge=3.0).tolist()
    [[0.5, 0.0], [0.0, 0.5]]

    References:
        Hu, Leino, Wang & Fredrikson, "A Recipe for Improved Certifiable Robustness", ICLR 2024 (its dense layers).
    """
    return _divided(w, finite("ridge", ridge, positive=True) / w.shape[-1])


def block_reflector(v: Tensor, rows: int | None = None, columns: int | None = None) -> Tensor:
    r"""The reflection of the space that the columns of ``v`` span, or its upper left block.

    .. math:: W = I - 2 V (V^*V)^{-1} V^*

    Hermitian and unitary: m eigenvalues are -1, the others 1.

    Args:
        v: ``(..., n, m)`` with n >= m.
        rows, columns: of the result, at most n; n by default. With all rows or all columns it is semi-orthogonal.

    Guarantee:
        Norm at most 1 up to rounding, for every ``v``: the Gram matrix is shifted by :math:`e = 4 \epsilon\,
        \mathrm{trace}(V^*V)`, so that its factor exists, and a closing step :math:`Q(\tfrac32 I - \tfrac12 Q^*Q)` of
        :math:`Q = VL^{-*}` takes the shift back. A singular value s of V gives the eigenvalue -1 up to
        :math:`\tfrac32 (e/s^2)^2`: between -1 and 1 where V loses its rank.
        It takes one Cholesky factorisation and one triangular solve of size m, and four products.

    Raises:
        OptionError: v has more columns than rows, or ``rows`` or ``columns`` are out of range.

    >>> block_reflector(torch.tensor([[1.0], [1.0]])).round(decimals=5).tolist()
    [[0.0, -1.0], [-1.0, 0.0]]

    References:
        Schreiber & Parlett, "Block reflectors: theory and computation", SIAM J. Numer. Anal. 25 (1988); Lai et al.,
        "Enhancing Certified Robustness via Block Reflector Orthogonal Layers and Logit Annealing Loss", ICML 2025.
    """
    v = _directions(v)
    n = v.shape[-2]
    rows, columns = n if rows is None else rows, n if columns is None else columns
    check_integer("rows", rows, 1, n)
    check_integer("columns", columns, 1, n)
    q = bjorck_step(v)
    return torch.eye(rows, columns, dtype=v.dtype, device=v.device) - 2 * q[..., :rows, :] @ q[..., :columns, :].mH


def reflect(x: Tensor, v: Tensor, size: int) -> Tensor:
    r"""Rows times :func:`block_reflector`, which is not formed: cheaper for fewer than n / 2 rows.

    .. math:: y = x - 2 Q S^2 Q^* x, \qquad S = \tfrac32 I - \tfrac12 Q^* Q, \qquad Q = V L^{-*}

    S is the closing step of :func:`block_reflector`: both agree even where V loses rank, and both are contractions.
    Rows ``(..., B, k)``, k at most n, are padded with zeros to n; rows of the product are cut to ``size``.
    V ``(..., n, m)`` has the dtype of x, float32 or float64, real or complex.
    """
    q = _directions(v)
    k = x.shape[-1]
    outwards, back = q.mT, q.conj().resolve_conj()
    s, gram = x @ back[..., :k, :], outwards @ back
    for _ in range(2):
        s = 1.5 * s - 0.5 * (s @ gram)  # S acts twice
    padded = F.pad(x, [0, size - k]) if size > k else x[..., :size]
    return padded - 2 * s @ outwards[..., :size]


def _directions(v: Tensor) -> Tensor:
    check_matrix(v, "v")
    v = at_least_float32(v)
    n, m = v.shape[-2:]
    if m > n:
        raise OptionError(f"v: expected at most as many columns as rows, got {m} and {n}")
    return _divided(v, 0.0)
