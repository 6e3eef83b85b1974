"""A multilayer perceptron of prescribed gain from the dense layers of any family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from lipkit.layers import Scale
from lipkit.models.frame import Layers, Positive, bounded, checked
from lipkit.modules import Shape
from lipkit.modules.network import checked_shape


@checked
def mlp(
    hidden: Sequence[int] = (256, 256),
    layer: str = "cayley",
    gamma: Positive = 1.0,
    *,
    input_shape: Shape,
    classes: int,
    activation: str | nn.Module | None = None,
    learnable_gamma: bool = False,
    bias: bool = True,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **options: Any,
) -> nn.Sequential:
    r"""Flatten, dense layers of one family with activations between them, and a gain of gamma.

    A factor :math:`\sqrt\gamma` stands before the first and one before the last dense layer, so that the last module is
    the last linear layer.

    Args:
        hidden: units of the hidden layers.
        layer: acronym of the family (``lipkit list layers``), or ``plain``: unconstrained.
        gamma: the gain of everything after the normalisation, positive and finite.
        input_shape: shape of one input, flattened by the network.
        classes: number of outputs.
        activation: between the layers: None for MaxMin, a name such as 'relu', or a 1-Lipschitz module; for layers with
            an inner activation, that one.
        learnable_gamma: whether both factors are trained.
        bias: whether the layers have biases.
        mean, std: input normalisation per channel, part of the network.
        options: options of the family's dense layer, in the hidden layers.

    >>> from lipkit.lowering import lipschitz
    >>> net = mlp([16, 16], "sandwich", gamma=4.0, input_shape=(1, 4, 4), classes=3)
    >>> [type(m).__name__ for m in net], float(lipschitz(net))
    (['Flatten', 'Scale', 'SandwichLinear', 'SandwichLinear', 'Scale', 'SandwichLinear'], 4.0)

    References:
        [LBDN] section 5.1 (the four families of the square wave), Table 4.
    """
    sizes, made = [math.prod(checked_shape(input_shape)), *hidden], Layers(layer, options, activation)
    # The root of gamma is rounded, so a network of one dense layer has the factor gamma itself.
    factors = [math.sqrt(gamma)] * 2 if hidden else [gamma]
    scaled = gamma != 1.0 or learnable_gamma  # a constant factor of 1 is left out
    gains = [Scale(factor, learnable_gamma) for factor in factors if scaled]
    layers = [*gains[:1], *made.dense(*sizes, bias=bias, **options), *gains[1:]]
    flat = [] if len(input_shape) == 1 else [nn.Flatten()]
    last = made.family.last(sizes[-1], classes, bias=bias)
    return bounded([*flat, *layers, last], 1.0, mean, std, input_shape[0])
