"""A batch normalisation and the linear layer beside it as one linear layer."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn

from lipkit.proof.roundoff import gamma, to_double, up

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def foldable(linear: nn.Module, norm: nn.Module, linear_shape: tuple[int, ...]) -> bool:
    """Whether the channels of both are the same dimension, ``linear_shape`` being a sample of either's input.

    >>> foldable(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), (1, 5, 5)), foldable(nn.Linear(4, 2), nn.BatchNorm1d(3), (3, 4))
    (True, False)
    """
    if type(norm) not in NORMS or norm.running_var is None:
        return False
    return type(linear) in (*CONVOLUTIONS, *TRANSPOSED) or (type(linear) is nn.Linear and len(linear_shape) == 1)


def folded_bound(
    linear: nn.Module, norm: nn.Module, *, norm_first: bool, bound: Callable[[nn.Module], Tensor]
) -> Tensor:
    """Lipschitz bound of both together: ``bound`` of the folded kernel, and what its rounding can add.

    Args:
        linear: convolution, transposed convolution or linear layer.
        norm: batch normalisation in evaluation mode.
        norm_first: whether the normalisation comes before the linear layer.
        bound: Lipschitz bound of one module.

    Returns:
        0-d float64.

    Guarantee:
        Upper, including rounding.

    >>> import torch; from lipkit import lipschitz
    >>> norm = nn.BatchNorm1d(2, eps=0.0).eval()
    >>> _ = norm.running_var.copy_(torch.tensor([0.25, 4.0])); layer = nn.Linear(2, 2)
    >>> _ = layer.weight.data.copy_(torch.diag(torch.tensor([1.0, 2.0])))
    >>> round(folded_bound(layer, norm, norm_first=False, bound=lipschitz).item(), 9)
    2.0
    """
    scale = (to_double(norm.running_var) + norm.eps).rsqrt()  # type: ignore[arg-type, operator]
    if norm.weight is not None:
        scale = scale * to_double(norm.weight)  # type: ignore[arg-type]
    weight = to_double(linear.weight.detach())  # type: ignore[operator]
    groups = int(getattr(linear, "groups", 1))
    # Rows of a transposed convolution are its input channels.
    along_rows = norm_first if type(linear) in TRANSPOSED else not norm_first
    if along_rows:
        folded = weight * scale.view(-1, *(1,) * (weight.ndim - 1))
    else:
        blocks = weight.unflatten(0, (groups, -1)) * scale.view(groups, 1, -1, *(1,) * (weight.ndim - 2))
        folded = blocks.flatten(0, 1)
    layer = copy.deepcopy(linear)
    layer.weight = nn.Parameter(folded, requires_grad=False)
    layer.bias = None  # type: ignore[assignment]
    # Each entry carries a few roundings; taps add up in the worst case, channels by the Frobenius norm.
    size = folded.abs().reshape(*folded.shape[:2], -1).sum(-1).square().sum().sqrt()
    lost = up(size, folded.numel() + 8) * gamma(16)
    # Squares and products below the normal range are lost, unless there is nothing to lose.
    moves = (weight != 0).any() & (scale != 0).any()
    return up(bound(layer) + lost + moves.double() * 2.0**-500, 2)  # in float32 it would be 0
