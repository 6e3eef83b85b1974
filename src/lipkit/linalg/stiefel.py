r"""Steps on the Stiefel manifold of semi-orthogonal matrices: tangents, matrix signs and retractions.

W (..., m, n) with m <= n has orthonormal rows; a tall matrix is transposed first. Products with the larger side
dominate the cost: everything else happens in the m x m Gram matrices.
"""

import torch
from torch import Tensor

from lipkit.linalg.matrices import check_matrix, check_positive, eye_like, mirrored_product
from lipkit.linalg.polar import polar

# The quintic with the steepest slope at 0 that maps [0, 1] near 1: Jordan et al., Muon (2024).
QUINTIC = (3.4445, -4.7750, 2.0315)
# The cubic step converges from residuals ||W W^T - I||_F below this, and about squares them.
NEAR = 0.5


def tangent(w: Tensor, g: Tensor) -> Tensor:
    r"""The part of G along the manifold at a wide W: :math:`G - \mathrm{sym}(G W^T) W`; for a tall W transposed.

    The gradient in the Euclidean metric (Edelman, Arias & Smith, SIAM J. Matrix Anal. Appl. 20, 1998, section 2.2).
    """
    if w.shape[-2] > w.shape[-1]:
        return tangent(w.mT, g.mT).mT
    s = g @ w.mT
    return g - 0.5 * (s + s.mT) @ w


def sign_factor(gram: Tensor, steps: int) -> Tensor:
    r"""P with :math:`P T \approx \mathrm{msign}(T)`, the polar factor of T: a polynomial in ``gram`` = :math:`T T^T`.

    In four steps, singular values of T above a hundredth of its Frobenius norm end between 0.68 and 1.21; smaller ones
    grow by at most 3.4445 in each step.
    """
    eye = eye_like(gram)
    scale = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(torch.finfo(gram.dtype).tiny)
    k, p = gram / scale, eye
    a, b, c = QUINTIC
    for number in range(steps):
        q = a * eye + b * k + c * mirrored_product(k, k)
        p = q if number == 0 else mirrored_product(q, p)
        if number + 1 < steps:
            # q is a polynomial in k, so q k q is the Gram matrix of the next iterate: T itself is never multiplied.
            k = mirrored_product(mirrored_product(q, k), q)
    return p * scale.rsqrt()  # P was made for T / ||T||_F


@torch.no_grad()
def spectral_step(w: Tensor, g: Tensor, angle: float, steps: int = 4) -> Tensor:
    r"""One step of steepest descent in the spectral norm along the manifold.

    With T = `tangent` (W, G) and U the part of :math:`\mathrm{msign}(T)` along the manifold (all of it for square W),

    .. math:: W \leftarrow R\,(W - \alpha U), \qquad
        R = \tfrac{15}{8} I - \tfrac54 G + \tfrac38 G^2 \approx G^{-1/2}, \quad G = (W - \alpha U)(W - \alpha U)^T.

    U is tangent, so that :math:`G = I + \alpha^2 U U^T`, and R leaves a residual of about
    :math:`\tfrac58 (\alpha \sigma)^6` for a singular value :math:`\sigma` of U. For square W with
    :math:`(U W^T)^2 = -I` this is a rotation by :math:`\arctan \alpha` in every plane of :math:`U W^T`.

    The angle is in radians, 0.01 to 0.05 in practice; ``steps`` are those of the iteration for U (Jordan et al., Muon,
    2024). A wide or tall W corrects its rounding itself; a square one accumulates it: call `retract` from time to time.
    It takes six products of size m m n, and about 25 of size m m m (square: 20 in all).
    """
    check_matrix(w)
    check_positive(steps=steps)
    if w.shape[-2] > w.shape[-1]:
        return spectral_step(w.mT, g.mT, angle, steps).mT
    eye, s = eye_like(w, w.shape[-2]), g @ w.mT
    skew = 0.5 * (s - s.mT)
    if w.shape[-2] == w.shape[-1]:
        # T W^T is the skew part of G W^T for square W, so the step is a rotation of W: products of one size.
        new = eye - angle * sign_factor(mirrored_product(skew, skew.mT), steps) @ skew
        return _closing(mirrored_product(new, new.mT)) @ new @ w
    half, own = 0.5 * (s + s.mT), mirrored_product(w, w.mT)
    t = g - half @ w
    gram, across = mirrored_product(t, t.mT), s - half @ own
    p = sign_factor(gram, steps)
    turn = p @ across  # P T W^T, which is skew for square W only: its symmetric part is taken off
    # W - a U = left W + right T. W W^T is not taken as I: where T is small beside the normal part of G, the rounding
    # in it would multiply in each step.
    left, right = eye + 0.5 * angle * (turn + turn.mT), -angle * p
    mixed = right @ across @ left.mT
    r = _closing(left @ own @ left.mT + mixed + mixed.mT + right @ gram @ right.mT)
    return (r @ left) @ w + (r @ right) @ t


def _closing(gram: Tensor) -> Tensor:
    """The inverse square root of a matrix near I, with an error of at most about 5/16 ||G - I||^3."""
    return 1.875 * eye_like(gram) - 1.25 * gram + 0.375 * mirrored_product(gram, gram)


def retract(w: Tensor) -> Tensor:
    """The semi-orthogonal matrix nearest to a real W: two cubic steps if W is near it, else a polar factor."""
    check_matrix(w)
    if w.shape[-2] > w.shape[-1]:
        return retract(w.mT).mT
    for _ in range(2):
        gram = w @ w.mT
        if not bool((torch.linalg.matrix_norm(gram - eye_like(gram)) < NEAR).all()):
            return polar(w)
        w = 1.5 * w - 0.5 * gram @ w  # Björck's step: the residual is squared
    return w
