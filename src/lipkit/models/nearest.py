r"""Starts a constrained layer at the feasible weights nearest to given ones, where the family defines them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipkit.layers.aol import AolConv2d, AolLinear
from lipkit.layers.cayley import CayleyConv2d, CayleyLinear
from lipkit.layers.dense import BjorckLinear, OrthogonalLinear
from lipkit.layers.lot import LotConv2d
from lipkit.layers.ossn import OssnConv2d
from lipkit.layers.rko import RkoConv2d
from lipkit.layers.svcm import SvcmConv2d
from lipkit.linalg import bjorck, newton_schulz, polar

# What `start_near` did, in the words of the report.
NEAREST, DIRECTION, UNPROJECTED, OWN = "nearest", "rescaled", "not projected yet", "own start"
# Limit of these functions: the semi-orthogonal matrix nearest to their argument.
_POLAR = (polar, bjorck, newton_schulz)
# Smallest singular value of I + Q for which the Cayley transform is inverted: beyond it float32 loses the matrix.
_CAYLEY_GAP = 1e-3


def inverse_cayley(q: Tensor) -> Tensor | None:
    r"""A matrix whose Cayley transform (``lipkit.linalg.cayley``) is the semi-orthogonal ``q``, or None.

    For a tall :math:`Q = [Q_1; Q_2]`: :math:`X = (Q_1 + I)/2`, :math:`V = -\tfrac12 Q_2 X^{-1}` and
    :math:`U = \tfrac14 (X^{-1} - X^{-*})`, since :math:`X^{-1} = I + U - U^* + V^*V`.

    Args:
        q: ``(m, n)`` with orthonormal columns (m >= n) or rows.

    Returns:
        ``(m, n)``; None where I + Q_1 is singular or nearly so: no Cayley transform comes near (every orthogonal
        matrix of determinant -1, for instance).

    >>> turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    >>> from lipkit.linalg import cayley
    >>> torch.allclose(cayley(inverse_cayley(turn)), turn, atol=1e-6)
    True
    >>> inverse_cayley(-torch.eye(2)) is None
    True

    References:
        [Cayley] proposition A.7, solved for its argument.
    """
    m, n = q.shape
    if m < n:
        wide = inverse_cayley(q.mT)
        return None if wide is None else wide.mT
    top = q[:n] + torch.eye(n, dtype=q.dtype, device=q.device)
    if float(torch.linalg.svdvals(top)[-1]) < _CAYLEY_GAP:
        return None
    inverse = 2 * torch.linalg.inv(top)
    return torch.cat(((inverse - inverse.mT) / 4, -q[n:] @ inverse / 2))


def start_near(layer: nn.Module, weight: Tensor, size: tuple[int, int] | None = None) -> str:
    """Set the free parameters of a constrained layer from the weight of an ordinary one.

    =============================== ====================================================================================
    nearest                         LOT (at each frequency), RKO (as a matrix), Björck and polar dense layers (polar
                                    factor), Cayley dense layers and 1 x 1 convolutions whose polar factor is a Cayley
                                    transform; SVCM (by its projection on that image size)
    rescaled                        OSSN, AOL: the weight itself, divided by the bound
    not projected yet               SVCM of an unknown image size: the weight as it is
    own start                       every other: its feasible set is not parameterised by a kernel of this size
    =============================== ====================================================================================

    Args:
        layer: constrained, changed in place.
        weight: ``(out, in)``, or the kernel ``(cout, s^2 cin, kh, kw)`` after downsampling.
        size: height and width of the layer's input, before downsampling.

    Returns:
        The column of the table above.

    >>> layer = BjorckLinear(2, 2)
    >>> start_near(layer, torch.tensor([[0.0, -3.0], [2.0, 0.0]]))
    'nearest'
    >>> layer.weight().round(decimals=4).add(0.0).tolist()
    [[0.0, -1.0], [1.0, 0.0]]
    """
    weight = weight.detach()
    if not bool(torch.isfinite(weight).all()) or not bool(weight.any()):
        return OWN
    with torch.no_grad():
        if type(layer) in (CayleyLinear, CayleyConv2d):
            return _start_cayley(layer, weight)
        if isinstance(layer, SvcmConv2d):
            layer.free.copy_(weight)
            if size is not None:
                layer.project_(size)
            return NEAREST if size is not None else UNPROJECTED
        exact = type(layer) is BjorckLinear or (
            type(layer) in (OrthogonalLinear, LotConv2d, RkoConv2d) and layer.orthogonalize in _POLAR
        )
        if not exact and type(layer) not in (OssnConv2d, AolConv2d, AolLinear):
            return OWN
        free = layer.get_parameter("free")
        if type(layer) in (BjorckLinear, RkoConv2d):
            # The iteration stops early for badly conditioned matrices: give it the limit itself.
            free.copy_(polar(weight.double().flatten(1)).reshape(weight.shape))
        else:
            free.copy_(weight)
        return NEAREST if exact else DIRECTION


def _start_cayley(layer: nn.Module, weight: Tensor) -> str:
    if weight.shape[2:].numel() != 1:
        return OWN
    raw = inverse_cayley(polar(weight.double().flatten(1)))
    if raw is None:
        return OWN
    # The transform reads scale * free / ||free||.
    layer.get_parameter("free").copy_(raw.reshape(weight.shape))
    layer.get_parameter("scale").copy_(torch.linalg.vector_norm(raw))
    return NEAREST
