r"""Activations of slope +-1: isometries on each of their pieces, with thresholds, slopes or angles that are trained."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import OptionError, finite
from lipkit.linalg.matrices import check_positive
from lipkit.modules.activations import LIBRARY, Activation, add_activation, comparing, pointwise
from lipkit.modules.plain import COUNT, Plain, RoundingError, Shape, Shown, add_plain
from lipkit.modules.views import channels_of, per_channel
from lipkit.proof.roundoff import Arithmetic, grow


class HalfAbs(nn.Module):
    """Absolute values of the first ``C // 2`` of C channels (dimension 1); the others stay. 1-Lipschitz.

    On two channels it is MaxMin between two rotations by 45 degrees, at a third of its cost.

    >>> HalfAbs()(torch.tensor([[-1.0, 2.0, -3.0, 4.0]])).tolist()
    [[1.0, 2.0, -3.0, 4.0]]

    References:
        Anil, Lucas & Grosse, ICML 2019, section 4.1 (the absolute value and MaxMin).
    """

    def forward(self, x: Tensor) -> Tensor:
        n = channels_of(x, "HalfAbs") // 2  # rounded down
        return torch.cat((x[:, :n].abs(), x[:, n:]), dim=1)


class NActivation(Shown):
    r"""A line of slope 1 that goes down with slope -1 between two trained thresholds of each channel: 1-Lipschitz.

    .. math:: x - 2 t_1 \ (x < t_1), \qquad -x \ (t_1 \le x \le t_2), \qquad x - 2 t_2 \ (x > t_2)

    Args:
        low, high: thresholds at the start. In whichever order training leaves them, the smaller one is t_1.

    Raises:
        OptionError: ``channels`` below 1, thresholds that are not finite. ShapeError: a wrong number of channels.

    >>> NActivation(1, -1.0, 0.0)(torch.tensor([[-3.0], [-0.5], [2.0]])).flatten().tolist()
    [-1.0, 0.5, 2.0]

    References:
        Prach & Lampert, "1-Lipschitz Neural Networks are more expressive with N-Activations", 2023.
    """

    def __init__(self, channels: int, low: float = -0.5, high: float = 0.5) -> None:
        super().__init__()
        check_positive(channels=channels)
        self.channels = channels
        ends = [[finite("low", low)], [finite("high", high)]]
        self.thresholds = nn.Parameter(torch.tensor(ends).repeat(1, channels))

    def forward(self, x: Tensor) -> Tensor:
        low, high = (per_channel(self, t, x) for t in (self.thresholds.amin(0), self.thresholds.amax(0)))
        return torch.where(x < low, x - 2 * low, torch.where(x > high, x - 2 * high, -x))


class LPReLU(Shown):
    """PReLU whose trained slopes are clipped to [-1, 1]: 1-Lipschitz, as in deel-torchlip. Options as ``nn.PReLU``.

    Raises:
        OptionError: ``num_parameters`` below 1, ``init`` not finite.

    >>> LPReLU(init=-3.0)(torch.tensor([[-2.0, 2.0]])).tolist()
    [[2.0, 2.0]]
    """

    def __init__(self, num_parameters: int = 1, init: float = 0.25) -> None:
        super().__init__()
        check_positive(num_parameters=num_parameters)
        self.num_parameters = num_parameters
        self.slopes = nn.Parameter(torch.full((num_parameters,), finite("init", init)))

    def forward(self, x: Tensor) -> Tensor:
        return F.prelu(x, self.slopes.clamp(-1, 1))


class Householder(Shown):
    r"""Reflects pairs of channels (one of each half) that lie on the far side of a line at a trained angle.

    .. math:: (a, b) \text{ if } a \sin\tfrac\theta2 - b \cos\tfrac\theta2 > 0, \qquad \text{else}\quad
              (a \cos\theta + b \sin\theta,\ a \sin\theta - b \cos\theta)

    Continuous, and an isometry on either side: the plane is folded along the line. MaxMin is :math:`\theta = \pi/2`.

    Args:
        order: how many folds follow each other, each with angles of its own.

    Parameters ``angles`` (order, channels / 2), at the start :math:`\pi/2` for the first fold, then half for each next.

    Raises:
        OptionError: an odd number of channels, ``order`` below 1. ShapeError: a wrong number of channels.

    >>> Householder(2)(torch.tensor([[1.0, 5.0], [3.0, 2.0]])).round(decimals=4).tolist()
    [[5.0, 1.0], [3.0, 2.0]]

    References:
        Singla, Singla & Feizi, ICLR 2022, section 5 (there higher orders by a recursion over sectors of the plane).
    """

    def __init__(self, channels: int, order: int = 1) -> None:
        super().__init__()
        if channels < 2 or channels % 2 or order < 1:
            raise OptionError(
                f"Householder: expected an even number of channels and an order of at least 1, got {channels}, {order}"
            )
        self.channels, self.order = channels, order
        start = torch.tensor([math.pi / 2 / 2**i for i in range(order)])
        self.angles = nn.Parameter(start[:, None].repeat(1, channels // 2))

    def forward(self, x: Tensor) -> Tensor:
        angles = per_channel(self, self.angles, x)
        for theta in angles:
            a, b = x.chunk(2, dim=1)
            c, s = theta.cos(), theta.sin()
            keep = a * (theta / 2).sin() > b * (theta / 2).cos()  # on the near side of the line
            x = torch.cat((torch.where(keep, a, a * c + b * s), torch.where(keep, b, a * s - b * c)), dim=1)
        return x


def _export_lprelu(module: LPReLU, input_shape: Shape) -> nn.Module:
    slopes = module.slopes.detach().clamp(-1, 1)
    plain = nn.PReLU(len(slopes)).to(slopes)
    plain.load_state_dict({"weight": slopes})
    return plain


def _n_error(module: NActivation, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    # One difference. A threshold that is off by a rounding moves the kink, where both pieces meet, by as much.
    largest = float(module.thresholds.detach().abs().amax())
    return pointwise(2.0, 8 * largest, 0.0, input_shape, arithmetic, 2 * largest)


def _householder_error(module: Householder, input_shape: Shape, arithmetic: Arithmetic) -> RoundingError:
    # Sine and cosine by the library, of an angle that is off by a rounding; two products and a sum. A pair that the
    # comparison puts on the wrong side is within its rounding of the line, and reflection moves it by twice that.
    largest = float(module.angles.detach().abs().amax())
    each = 4 * (LIBRARY + 8 + 2 * largest) * arithmetic.unit
    together = grow(math.expm1(module.order * math.log1p(each))) / arithmetic.unit
    return pointwise(together, 0.0, 0.0, input_shape, arithmetic, largest)


add_activation(Activation(NActivation, 1.0, _n_error, {"channels": COUNT}))

# Not scalar: what happens to a number depends on its channel, or on another number.
add_plain(Plain(HalfAbs, 1.0, comparing, {}))
add_plain(Plain(Householder, 1.0, _householder_error, {"channels": COUNT, "order": COUNT}))
add_plain(Plain(LPReLU, 1.0, export=_export_lprelu))
