"""A product of Householder reflections, in closed form."""

import torch
from torch import Tensor

from lipkit.linalg.bjorck import bjorck_step
from lipkit.linalg.matrices import eye_like, near_one, on_tall


@on_tall
def householder(w: Tensor) -> Tensor:
    r"""Semi-orthogonal matrix: the first n columns of a product of reflections along the columns of ``w``.

    .. math:: Q = \Big[\prod_{i=1}^{n} \Big(I - 2\frac{w_i w_i^*}{\|w_i\|^2}\Big)\Big]_{:,\,:n}
                = I_{m \times n} - V T^{-1} V_{:n}^*, \qquad
              T = \tfrac12 I + \mathrm{striu}(V^*V), \quad v_i = w_i/\|w_i\|

    for tall or square matrices; wide ones by :math:`W^*`. A zero column gives the factor I.

    Returns:
        ``(..., m, n)`` with :math:`Q^*Q = I` (m >= n) or :math:`QQ^* = I` (m <= n) up to rounding. The product of n
        reflections: a real square Q has determinant :math:`(-1)^n`, and a real 1 x 1 one is always -1.

    Guarantee:
        Norm 1 up to rounding, for every ``w``, zero and linearly dependent columns included: one closing step
        :math:`Q(\tfrac32 I - \tfrac12 Q^*Q)` removes rounding that the triangular solve amplifies (5e-5 in float32).
        It takes four products of size m n min(m, n) and a triangular solve.

    >>> householder(torch.tensor([[1.0], [1.0]])).round(decimals=5).tolist()
    [[0.0], [-1.0]]

    References:
        Mhammedi et al., ICML 2017; Joffrain, Low, Quintana-Orti & van de Geijn, "Accumulating Householder
        transformations, revisited", ACM TOMS 32 (2006), theorem 2.
    """
    m, n = w.shape[-2:]
    w = near_one(w, -2)  # each column by itself
    norms = torch.linalg.vector_norm(w, dim=-2, keepdim=True)
    v = w / torch.where(norms > 0, norms, 1)
    # The product of all n reflections is I - V T^-1 V*, so one triangular solve replaces n rank-one updates.
    t = 0.5 * eye_like(v) + torch.triu(v.mH @ v, diagonal=1)
    solved = torch.linalg.solve_triangular(t, v[..., :n, :].mH, upper=True)
    return bjorck_step(torch.eye(m, n, dtype=v.dtype, device=v.device) - v @ solved)
