"""Classifiers and regressors of sequences with a prescribed gain, around one recurrent layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import ShapeError, check_choice
from lipkit.layers import CayleyLinear, LinearSystem, R2dn, Ren
from lipkit.layers.recurrent import RecurrentLayer, masked
from lipkit.linalg.matrices import check_integer
from lipkit.models.frame import Positive, bounded, checked
from lipkit.modules import Affine, Mean, Shape, export_rule, lipschitz_rule
from lipkit.modules.chains import chain_constant
from lipkit.modules.network import checked_shape
from lipkit.modules.registry import export_plain, output_shape

LAYERS: dict[str, Callable[..., RecurrentLayer]] = {"r2dn": R2dn, "ren": Ren, "linear": LinearSystem}
"""The recurrent layers by the names that the models give them."""


class SumOverTime(nn.Module):
    r"""The sum over the steps of a sequence, :math:`\sum_t y_t / \sqrt T`: 1-Lipschitz, ``(B, T, n) -> (B, n)``.

    With a mask ``(B, T)`` it sums the steps where the mask is True, and T is their number.

    >>> SumOverTime()(torch.ones(1, 4, 2)).tolist()
    [[2.0, 2.0]]
    """

    def forward(self, y: Tensor, mask: Tensor | None = None) -> Tensor:
        if y.ndim != 3:
            raise ShapeError(f"SumOverTime: expected (B, T, n), got {tuple(y.shape)}")
        if mask is None:
            return y.sum(1) / math.sqrt(y.shape[1])  # a sum of T vectors has norm root T
        return masked(y, mask).sum(1) / mask.sum(1, keepdim=True).clamp_min(1).to(y).sqrt()


class SequenceModel(nn.Sequential):
    """A chain whose recurrent layer and sum over time take the mask of a padded batch.

    >>> model = sequence_classifier(4, 8, input_shape=(6, 3), classes=2)
    >>> mask = torch.arange(6)[None] < torch.tensor([[6], [4]])
    >>> u = torch.randn(2, 6, 3)
    >>> bool(torch.allclose(model(u, mask)[1], model(u[1:, :4])[0], atol=1e-6))
    True
    """

    def forward(self, u: Tensor, mask: Tensor | None = None) -> Tensor:
        for module in self:
            takes = mask is not None and isinstance(module, RecurrentLayer | SumOverTime)  # others act step by step
            u = module(u, mask) if takes else module(u)
        return u


def recurrent(name: str) -> Callable[..., RecurrentLayer]:
    """The recurrent layer of this name, or an OptionError."""
    check_choice("layer", name, LAYERS)
    return LAYERS[name]


def _layer(kind: str, inputs: int, outputs: int, states: int, units: int, options: dict[str, Any]) -> RecurrentLayer:
    own = (states,) if kind == "linear" else (states, units)  # a linear system has no units
    return recurrent(kind)(inputs, outputs, *own, **options)


def _head(model: str, input_shape: Shape, mean: Sequence[float] | None, std: Sequence[float] | None) -> list[nn.Module]:
    """The normalisation of each feature, if any; ``ShapeError`` unless inputs are (T, features)."""
    shape = checked_shape(input_shape)
    if len(shape) != 2:
        raise ShapeError(f"{model}: expected an input shape (steps, features), got {input_shape}")
    if not bounded([], mean=mean, std=std, channels=shape[1]):  # checks the numbers
        return []
    scale = 1 / torch.tensor(std, dtype=torch.float64)  # rounded to the default dtype once, at the end
    shift, dtype = -torch.tensor(mean, dtype=torch.float64) * scale, torch.get_default_dtype()
    return [Affine(scale[None].to(dtype), shift[None].to(dtype))]  # [None]: (1, features), for all steps


@checked
def sequence_classifier(
    states: int = 32,
    units: int = 64,
    layer: str = "r2dn",
    *,
    features: int | None = None,
    input_shape: Shape,
    classes: int,
    lipschitz: Positive = 1.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **options: Any,
) -> nn.Sequential:
    r"""Recurrent layer, sum over time, orthogonal last layer: logits of a whole sequence.

    Args:
        states, units: of the recurrent layer.
        layer: 'r2dn', 'ren' or 'linear'.
        features: outputs of the recurrent layer; by default as many as states, at least as many as classes.
        input_shape: (steps, features) of one sequence. Export it for any number of steps.
        classes: number of outputs.
        lipschitz: target constant of everything after the normalisation.
        mean, std: input normalisation of each feature, part of the network.
        options: of the recurrent layer, such as ``phi`` and ``rate``.

    >>> sequence_classifier(8, 16, input_shape=(20, 3), classes=4, lipschitz=2.0)(torch.zeros(2, 20, 3)).shape
    torch.Size([2, 4])
    """
    check_integer("classes", classes, 2)
    head, outputs = _head("sequence_classifier", input_shape, mean, std), features or max(states, classes)
    core = _layer(layer, input_shape[1], outputs, states, units, {"gamma": lipschitz, **options})
    return SequenceModel(*head, core, SumOverTime(), CayleyLinear(outputs, classes))


@checked
def sequence_regressor(
    states: int = 32,
    units: int = 64,
    layer: str = "r2dn",
    *,
    outputs: int = 1,
    input_shape: Shape,
    lipschitz: Positive = 1.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **options: Any,
) -> nn.Sequential:
    """Sequences ``(B, T, features)`` to sequences ``(B, T, outputs)`` of prescribed gain: models of dynamic systems.

    Args: as :func:`sequence_classifier`; ``outputs``: numbers in each step.

    >>> sequence_regressor(8, 16, input_shape=(20, 1), lipschitz=3.0)(torch.zeros(2, 20, 1)).shape
    torch.Size([2, 20, 1])
    """
    head = _head("sequence_regressor", input_shape, mean, std)
    return SequenceModel(*head, _layer(layer, input_shape[1], outputs, states, units, {"gamma": lipschitz, **options}))


lipschitz_rule(SumOverTime)(1.0)
lipschitz_rule(SequenceModel)(chain_constant)


def _sum(steps: int, like: Tensor) -> nn.Module:
    """The plain form of `SumOverTime` for ``steps`` steps, its factor rounded down so that the constant is below 1."""
    root = torch.tensor([math.sqrt(steps)], dtype=torch.float64).to(like)  # root * mean = sum / root
    return nn.Sequential(Mean(1), Affine(root * (1 - 4 * torch.finfo(root.dtype).eps), torch.zeros_like(root)))


@export_rule(SumOverTime)
def _export_sum(module: SumOverTime, input_shape: Shape) -> nn.Module:
    output_shape(module, input_shape)
    return _sum(input_shape[0], torch.zeros(1))


@export_rule(SequenceModel)
def _export(model: SequenceModel, input_shape: Shape) -> nn.Module:
    parts, like = list[nn.Module](), next(model.parameters())
    for module in model:
        one = _sum(input_shape[0], like) if type(module) is SumOverTime else module
        parts.append(export_plain(one, input_shape))
        input_shape = output_shape(parts[-1], input_shape)  # of the next module
    return nn.Sequential(*parts)
