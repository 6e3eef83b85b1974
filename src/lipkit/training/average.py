r"""Exponential moving average of the raw parameters: what is evaluated in place of the last step's.

The average is taken of the parameters, not of the constrained weights that they make: an average of orthogonal matrices
is not orthogonal, while any parameters make a matrix that keeps its constraint.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


def update(average: Sequence[Tensor], parameters: Sequence[Tensor], decay: float, step: int) -> None:
    r"""One step of the average, in place.

    .. math:: a_s = d_s \, a_{s-1} + (1 - d_s) \, \theta_s, \qquad d_s = \min(d, (1 + s) / (10 + s))

    Until :math:`d_s` reaches d, about step 9 / (1 - d), the average forgets its start faster, so that a short run
    is not held at its initial values.

    Args:
        average: :math:`a_{s-1}`, becomes :math:`a_s`.
        parameters: :math:`\theta_s`, as many tensors of the same shapes.
        decay: d, in (0, 1).
        step: s, counted from 1.

    Cost:
        One fused pass over the parameters, without waiting for the device.

    >>> a = [torch.zeros(1)]
    >>> update(a, [torch.ones(1)], 0.9, step=8)
    >>> a
    [tensor([0.5000])]
    """
    get_ema_multi_avg_fn(min(decay, (1 + step) / (10 + step)))(list(average), list(parameters), step)


def averaged(model: nn.Module, average: Mapping[str, Tensor]) -> nn.Module:
    """A copy of ``model`` in evaluation mode with the averages as its parameters; its buffers are those of ``model``.

    >>> model = nn.Linear(1, 1)
    >>> averaged(model, {"weight": torch.ones(1, 1)}).weight.item()
    1.0
    """
    twin = copy.deepcopy(model)
    parameters = dict(twin.named_parameters())
    with torch.no_grad():
        for name, value in average.items():
            parameters[name].copy_(value)
    return twin.eval()
