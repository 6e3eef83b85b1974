"""Options and refusals that every layer with the arguments of ``nn.Conv2d`` or ``nn.Linear`` shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lipkit.errors import LipkitError, OptionError, ShapeError
from lipkit.lowering import export
from lipkit.modules import output_shape
from lipkit.testing.case import Refusal

Make = Callable[..., nn.Module]


def _argument(
    name: str, value: Any, error: type[LipkitError] = OptionError, words: tuple[str, ...] | None = None
) -> Refusal:
    def call(make: Make) -> Any:
        return make(**{name: value})

    return Refusal(f"{name}={value!r}", call, error, (name, repr(value)) if words is None else words)


def _input(what: str, shape: tuple[int, ...], words: tuple[str, ...]) -> Refusal:
    return Refusal(what, lambda make: output_shape(make(), shape), ShapeError, words)


def _export(what: str, shape: tuple[int, ...], words: tuple[str, ...]) -> Refusal:
    return Refusal(what, lambda make: export(make(), shape), ShapeError, words)


def conv_refusals(in_channels: int, height: int, width: int) -> tuple[Refusal, ...]:
    """Bad arguments of every constrained convolution, for a factory that takes them as keywords.

    Args:
        in_channels, height, width: of an input that the layer accepts.
    """
    wrong = (in_channels + 1, height, width)
    return (
        _argument("kernel_size", 0, words=("kernel_size", "0")),
        _argument("kernel_size", (3, 3, 3)),
        _argument("stride", 0, words=("stride", "0")),
        _argument("stride", (1, 2)),
        _argument("padding", 7),
        _argument("padding_mode", "mirror"),
        _argument("dilation", 3),
        _argument("groups", 3),
        _argument("in_channels", 0),
        _argument("out_channels", -1),
        _argument("out_channels", 2.5),
        _argument("dtype", torch.float16),
        _input("another number of channels", wrong, (str(in_channels), str(in_channels + 1))),
        _export("export for another number of channels", wrong, (str(in_channels), str(in_channels + 1))),
        _export("export for a vector", (in_channels,), (str(in_channels),)),
    )


def linear_refusals(in_features: int) -> tuple[Refusal, ...]:
    """Bad arguments of every constrained dense layer, for a factory that takes them as keywords."""
    wrong = (in_features + 1,)
    return (
        _argument("in_features", 0),
        _argument("out_features", -1),
        _argument("out_features", True),
        _argument("dtype", torch.bfloat16),
        _export("export for another number of features", wrong, (str(in_features), str(in_features + 1))),
    )


def conv_options() -> dict[str, tuple[Any, ...]]:
    """Values of the arguments of ``nn.Conv2d`` that a constrained convolution must act on, or refuse."""
    return {
        "kernel_size": (1, 3),
        "stride": (1, 2),
        "padding": ("same", 0),
        "padding_mode": ("circular", "zeros"),
        "dilation": (1, 2),
        "groups": (1, 2),
        "bias": (True, False),
        "dtype": (torch.float32, torch.float64),
    }


def linear_options() -> dict[str, tuple[Any, ...]]:
    """Values of the arguments of ``nn.Linear`` that a constrained dense layer must act on."""
    return {"bias": (True, False), "dtype": (torch.float32, torch.float64)}
