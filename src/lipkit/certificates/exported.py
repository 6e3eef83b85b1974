"""What every certificate starts from: an exported network in float64, its bounds, and inputs that fit it."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from lipkit import plain
from lipkit.certificates import margins
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.protocol import lipschitz


def float64_copy(network: plain.Network, device: str | torch.device = "cpu") -> plain.Network:
    """A copy in float64 that holds exactly the same numbers; on the CPU where ``device`` has no float64."""
    return copy.deepcopy(network).cpu().double().to(float64_device(device))  # mps cannot even hold a float64 tensor


def float64_device(device: str | torch.device) -> torch.device:
    """``device``, or the CPU where that device has no float64.

    >>> float64_device("mps")
    device(type='cpu')
    """
    device = torch.device(device)
    return torch.device("cpu") if device.type == "mps" else device


def split_last_layer(network: plain.Network) -> tuple[nn.Sequential, nn.Linear] | None:
    """(everything before it, the last layer) of a network that ends in exactly an ``nn.Linear``, else None."""
    modules = list(network)
    if not modules or type(modules[-1]) is not nn.Linear:
        return None
    return nn.Sequential(*modules[:-1]), modules[-1]


def proved_bound(network: nn.Sequential, input_shape: tuple[int, ...]) -> float:
    """``lipschitz`` of a chain, rounded up once more; 1 for an empty one.

    Raises:
        OptionError: the bound is NaN.
    """
    if len(network) == 0:
        return 1.0
    bound = float(lipschitz(network, input_shape).detach())
    margins.check_constant(bound)
    return math.nextafter(bound, math.inf) if bound > 0 else 0.0


def check_inputs(network: object, x: Tensor, batch_size: int) -> None:
    """Raise unless ``network`` is exported and ``x`` holds at least one floating-point input of its shape."""
    if not isinstance(network, plain.Network):
        raise NoRuleError(
            f"expected an exported network (lipkit.plain.Network), got {type(network).__name__}: "
            "certify lipkit.export(model, input_shape)"
        )
    shape = tuple(network.input_shape)
    if tuple(x.shape[1:]) != shape or x.ndim != len(shape) + 1:
        raise ShapeError(f"expected inputs of shape (N, {', '.join(map(str, shape))}), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise OptionError(f"expected floating-point inputs (images in [0, 1]), got {dtype_name(x)}")
    if len(x) == 0:
        raise OptionError("expected at least one sample to certify, got 0")
    if batch_size < 1:
        raise OptionError(f"expected batch_size >= 1, got {batch_size}")


def dtype_name(values: Tensor) -> str:
    """How a message writes the dtype of a tensor.

    >>> dtype_name(torch.zeros(1))
    'float32'
    """
    return str(values.dtype).removeprefix("torch.")
