"""Newton-Schulz: the inverse square root of the Gram matrix, which makes a matrix semi-orthogonal."""

import torch
from torch import Tensor

from lipkit.linalg.bjorck import bjorck_step, into_unit_ball
from lipkit.linalg.matrices import check_positive, eye_like, on_tall


@on_tall
def newton_schulz(w: Tensor, iterations: int = 20) -> Tensor:
    r"""Semi-orthogonal polar factor :math:`W (W^*W)^{-1/2}`, iterating on the small Gram matrix only.

    With W divided by a proved upper bound of its norm, :math:`Y_0 = W^*W + \epsilon I` and :math:`Z_0 = I`,

    .. math:: T = \tfrac12 (3 I - Z Y), \qquad Y \leftarrow Y T, \qquad Z \leftarrow T Z, \qquad Z \to Y_0^{-1/2},

    then :math:`X = W Z` and one closing step :math:`X(\tfrac32 I - \tfrac12 X^*X)`; wide matrices by :math:`W^*`.

    In exact arithmetic and without the ridge this is :func:`bjorck` of order 1, cheaper if the sides differ by a factor
    of 1.5 or more. It rounds more: singular values below :math:`\sqrt\epsilon` of the norm bound are lost in the Gram
    matrix and do not reach 1. Prefer :func:`bjorck` for square or badly conditioned matrices.

    Args:
        iterations: number of coupled steps, at least 1. A small singular value grows by 1.5 per step.

    Returns:
        ``(..., m, n)``: the singular vectors of ``w`` with singular values in [0, 1], 1 on convergence; zero for a zero
        matrix.

    Guarantee:
        Spectral norm at most 1 up to rounding, for every ``iterations``. An eigenvalue g of :math:`Y_0` (at most 1)
        has :math:`\sqrt{g}\,z \in [0, 1]` after each step, by the argument of :func:`bjorck`, and W has the singular
        value :math:`\sqrt{g - \epsilon} \le \sqrt g`. The ridge, a few roundings of the Gram matrix, keeps all g
        positive: a negative one would make the iteration diverge. The closing step removes the rounding errors of Z
        (more for larger condition numbers): it maps :math:`[0, \sqrt3]` into [0, 1].
        It takes three products of size min(m, n) per step, and five of size m n min(m, n) in all.

    Raises:
        OptionError: ``iterations`` below 1.

    >>> newton_schulz(torch.tensor([[3.0, 0.0], [0.0, -0.5]])).round(decimals=4).abs().tolist()
    [[1.0, 0.0], [0.0, 1.0]]

    References:
        Higham, Functions of Matrices (2008), equation 6.35; Huang et al., CVPR 2020 (ONI); Xu, Li & Li,
        "LOT: Layer-wise Orthogonal Training", NeurIPS 2022, algorithm 1.
    """
    check_positive(iterations=iterations)
    w = into_unit_ball(w)[0]
    eye = eye_like(w)
    ridge = 4 * w.shape[-2] ** 0.5 * torch.finfo(w.dtype).eps
    y, z = w.mH @ w + ridge * eye, eye
    for _ in range(iterations):
        t = 1.5 * eye - 0.5 * (z @ y)
        y, z = y @ t, t @ z
    return bjorck_step(w @ z)
