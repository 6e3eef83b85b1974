r"""Critics: networks f of one output and Lipschitz constant at most 1; and losses that make f high on P, low on Q.

``fx`` and ``fy``, of any shape, are the values of f on samples of P and of Q.
"""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import OptionError, finite
from lipkit.layers import Scale, families
from lipkit.models import mlp
from lipkit.models.frame import Layers
from lipkit.modules import Affine, Shape
from lipkit.wasserstein.samples import centre_and_unit

HIDDEN, CHANNELS, UNITS = (64, 64), (16, 32), 128


def critic(input_shape: Shape, family: str = "cayley", **options: Any) -> nn.Sequential:
    """A critic of one family's layers: dense for vectors, convolutional for images.

    Vectors, and images with an odd side, get dense layers of 64, 64 and 1 units. Images (C, H, W) with even sides get a
    3 x 3 convolution to 16 channels, one of stride 2 to 32 (smaller kernels if the family needs them), and dense layers
    of 128 and 1 units. Between them is MaxMin or the family's own activation. ``options`` are those of the family's
    convolution, or of its dense layer for vectors.

    >>> [type(m).__name__ for m in critic((3,))]
    ['CayleyLinear', 'MaxMin', 'CayleyLinear', 'MaxMin', 'CayleyLinear']
    >>> [type(m).__name__ for m in critic((1, 8, 8), "rko")]
    ['RkoConv2d', 'MaxMin', 'RkoConv2d', 'MaxMin', 'Flatten', 'BjorckLinear', 'MaxMin', 'BjorckLinear']
    """
    made = Layers(families.get(family).name, options)
    if len(input_shape) != 3 or input_shape[1] % 2 or input_shape[2] % 2 or not math.prod(input_shape):
        return mlp(HIDDEN, family, input_shape=input_shape, classes=1, **options)
    channels, height, width = input_shape
    wide, deep = CHANNELS
    # The largest kernel up to 3 x 3 that the family accepts at each size.
    fits = made.family.accepts
    first, second = (next(k for k in (3, 2, 1) if fits(k, height // s, width // s) or k == 1) for s in (1, 2))
    return nn.Sequential(
        *made.conv(channels, wide, first),
        *made.conv(wide, deep, second, 2),
        nn.Flatten(),
        *made.dense(deep * height * width // 4, UNITS),  # the stride halved both sides
        made.last(UNITS, 1),
    )


def instance(given: str | nn.Module | None, *samples: Tensor) -> tuple[nn.Module, float]:
    """A critic to train and the unit u of its values: a copy of a module (u = 1), or f(x) = u g((x - c) / u).

    g is new, of the named family (None: "cayley"), c and u by `centre_and_unit`: like W1, f moves and scales with x.
    """
    if isinstance(given, nn.Module):
        return copy.deepcopy(given), 1.0
    centre, unit = centre_and_unit(*samples)
    inwards = Affine(torch.ones_like(centre) / unit, -centre / unit)
    return nn.Sequential(inwards, *critic(tuple(centre.shape), given or "cayley"), Scale(unit)), unit


def kr_loss(fx: Tensor, fy: Tensor) -> Tensor:
    r"""The dual objective of Kantorovich and Rubinstein, with the sign of a loss.

    .. math:: \mathrm{mean}_j\, f(y_j) - \mathrm{mean}_i\, f(x_i)

    Over all L-Lipschitz f the infimum of its expectation is :math:`-L\, W_1(P, Q)`.

    >>> kr_loss(torch.tensor([2.0, 4.0]), torch.tensor([1.0])).item()
    -2.0

    References:
        Arjovsky, Chintala, Bottou, "Wasserstein Generative Adversarial Networks", ICML 2017, equation 2.
    """
    return fy.mean() - fx.mean()


def hinge_kr_loss(fx: Tensor, fy: Tensor, *, alpha: float = 10.0, margin: float = 1.0) -> Tensor:
    r"""The dual objective plus a hinge, which makes the sign of f separate P and Q by a margin.

    .. math:: \mathrm{mean}\, f(y) - \mathrm{mean}\, f(x)
              + \tfrac\alpha2 \big(\mathrm{mean}\, (m - f(x))_+ + \mathrm{mean}\, (m + f(y))_+\big)

    P and Q have the weight 1/2 each in the hinge, whatever the numbers of samples.

    Raises:
        OptionError: ``alpha`` (the weight of the hinge) is negative, or ``margin`` (m, in units of f) is not positive.

    >>> hinge_kr_loss(torch.tensor([2.0]), torch.tensor([-0.5]), alpha=10.0).item()
    0.0

    References:
        Serrurier et al., "Achieving robustness in classification using optimal transport with hinge regularization",
        CVPR 2021, section 3.
    """
    alpha, margin = finite("alpha", alpha, least=0), finite("margin", margin, positive=True)
    return kr_loss(fx, fy) + alpha / 2 * (F.relu(margin - fx).mean() + F.relu(margin + fy).mean())


def trainable(model: nn.Module, name: str) -> list[nn.Parameter]:
    """The parameters that training changes; a model without any is refused."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise OptionError(f"expected a {name} with parameters to train, got {type(model).__name__} without any")
    return parameters


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, lr: float, unit: float) -> None:
    """One step of the optimiser on ``loss / unit`` at the rate ``lr``: Adam's squares have a range."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)
    (loss / unit).backward()
    optimizer.step()


def one_output(values: Tensor, count: int) -> Tensor:
    """The outputs (n, 1) or (n,) of a critic as (n,); others are refused."""
    got = tuple(values.shape) if isinstance(values, Tensor) else f"of a {type(values).__name__}"
    if got not in ((count, 1), (count,)):
        raise OptionError(f"expected a critic of one output, {count} values, got the shape {got}")
    return values.reshape(count)
