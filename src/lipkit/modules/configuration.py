"""The configuration of plain modules: JSON values that name modules of a closed list by their short names.

Building makes exactly those and never imports or evaluates anything that a configuration says.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn

from lipkit.errors import DataError, OptionError
from lipkit.modules.activations import GroupSort, MaxMin
from lipkit.modules.dense import Affine
from lipkit.modules.fourier import FourierConv2d
from lipkit.modules.network import Network
from lipkit.modules.phase import PhaseConv2d
from lipkit.modules.rearrange import ResizeChannels
from lipkit.modules.residual import ConvexResidual, SlopeResidual, Sum
from lipkit.modules.sandwich import SandwichBlock
from lipkit.modules.taylor import TaylorConv2d

# The constructor arguments that each plain module is rebuilt from, read from attributes of the same names.
_CONV = (
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "groups",
    "padding_mode",
)


ARGUMENTS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("in_features", "out_features"),
    nn.Conv1d: _CONV,
    nn.Conv2d: _CONV,
    nn.Identity: (),
    nn.ZeroPad2d: ("padding",),
    nn.Flatten: ("start_dim", "end_dim"),
    nn.Unflatten: ("dim", "unflattened_size"),
    nn.PixelUnshuffle: ("downscale_factor",),
    nn.PixelShuffle: ("upscale_factor",),
    nn.AvgPool2d: ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
    nn.MaxPool2d: ("kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    nn.AdaptiveAvgPool2d: ("output_size",),
    nn.ReLU: (),
    nn.ReLU6: (),
    nn.LeakyReLU: ("negative_slope",),
    nn.PReLU: ("num_parameters",),
    nn.ELU: ("alpha",),
    nn.CELU: ("alpha",),
    nn.SELU: (),
    nn.GELU: ("approximate",),
    nn.SiLU: (),
    nn.Mish: (),
    nn.Tanh: (),
    nn.Sigmoid: (),
    nn.Softplus: ("beta", "threshold"),
    nn.Softsign: (),
    nn.LogSigmoid: (),
    nn.Hardtanh: ("min_val", "max_val"),
    nn.Hardsigmoid: (),
    nn.Hardswish: (),
    nn.Softshrink: ("lambd",),
    nn.Tanhshrink: (),
    nn.Softmax: ("dim",),
    nn.LayerNorm: ("normalized_shape", "eps", "elementwise_affine"),
    nn.GroupNorm: ("num_groups", "num_channels", "eps", "affine"),
    nn.InstanceNorm1d: ("num_features", "eps", "affine"),
    nn.InstanceNorm2d: ("num_features", "eps", "affine"),
    nn.InstanceNorm3d: ("num_features", "eps", "affine"),
    MaxMin: (),
    GroupSort: ("group_size",),
    ResizeChannels: ("in_channels", "out_channels"),
    FourierConv2d: ("in_channels", "out_channels", "height", "width"),
    PhaseConv2d: ("in_channels", "out_channels", "height", "width", "kernel_size", "complex_pairs"),
    TaylorConv2d: ("in_channels", "out_channels", "kernel_size", "terms"),
}


_WITH_BIAS = (nn.Linear, nn.Conv1d, nn.Conv2d, FourierConv2d, PhaseConv2d, TaylorConv2d, nn.LayerNorm)


_BY_NAME = {kind.__name__: kind for kind in ARGUMENTS}


# What a configuration may give for an argument; whatever is not named here is an integer, or a list of them.
_FLAGS = {"bias", "complex_pairs", "ceil_mode", "count_include_pad", "affine", "elementwise_affine"}


_REALS = {"negative_slope", "alpha", "beta", "threshold", "min_val", "max_val", "lambd", "eps"}


_WORDS = {
    "padding": ("same", "valid"),
    "padding_mode": ("zeros", "reflect", "replicate", "circular"),
    "approximate": ("none", "tanh"),
}


_OPTIONAL = {"divisor_override", "output_size", "dim"}


_AT_LEAST_ONE = {
    *("in_features", "out_features", "in_channels", "out_channels", "channels", "groups"),
    *("num_parameters", "num_groups", "num_channels", "num_features"),
}


_MOST = {"terms": 1000, "height": 1 << 16, "width": 1 << 16}


# Blocks of two linear maps around an activation, with a multiplier.
_BLOCKS: dict[str, type[nn.Module]] = {"SandwichBlock": SandwichBlock, "SlopeResidual": SlopeResidual}


_CHAINS = {"Network": {"modules", "input_shape", "multipliers"}, "Sequential": {"modules"}}


# How deep the modules of one network may be nested.
MAX_DEPTH = 50


def describe(module: nn.Module) -> dict[str, Any]:
    """The configuration of one plain module, as JSON values.

    Raises:
        OptionError: the module is not in the closed list of plain modules.

    >>> describe(nn.LeakyReLU(0.1))
    {'type': 'LeakyReLU', 'negative_slope': 0.1}
    """
    kind = type(module)
    if kind in (Network, nn.Sequential):
        # Not children(): that would list a module that stands in the chain twice only once.
        modules = [describe(child) for child in module]  # type: ignore[attr-defined]
        config: dict[str, Any] = {"type": kind.__name__, "modules": modules}
        if isinstance(module, Network):
            config["input_shape"] = list(module.input_shape)
            config["multipliers"] = {str(i): len(m) for i, m in module.multipliers().items()}
        return config
    if kind is Affine:
        return {"type": "Affine", "channels": len(module.scale)}  # type: ignore[arg-type]
    if kind is ConvexResidual:
        return {
            "type": "ConvexResidual",
            "body": describe(module.body),  # type: ignore[arg-type]
            "shortcut": describe(module.shortcut),  # type: ignore[arg-type]
        }
    if kind is Sum:
        return {"type": "Sum", "modules": [describe(branch) for branch in module.branches]}  # type: ignore[union-attr]
    if kind in _BLOCKS.values():
        return {
            "type": kind.__name__,
            "channels": len(module.multiplier),  # type: ignore[arg-type]
            "first": describe(module.first),  # type: ignore[arg-type]
            "activation": describe(module.activation),  # type: ignore[arg-type]
            "second": describe(module.second),  # type: ignore[arg-type]
        }
    if kind not in ARGUMENTS:
        raise OptionError(
            f"expected a plain module ({', '.join(sorted(_BY_NAME))}), got {kind.__module__}.{kind.__qualname__}; "
            "call lipkit.export first"
        )
    config = {"type": kind.__name__, **{name: getattr(module, name) for name in ARGUMENTS[kind]}}
    if kind in _WITH_BIAS:
        config["bias"] = module.bias is not None
    return {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}


def build(config: Any) -> nn.Module:
    """The module of a configuration made by :func:`describe`, its tensors unset.

    Raises:
        DataError: the configuration names an unknown module or unknown arguments.

    >>> build({"type": "LeakyReLU", "negative_slope": 0.1})
    LeakyReLU(negative_slope=0.1)
    """
    return _build(config, 0)


def _acceptable(name: str, value: Any) -> bool:
    if name in _FLAGS:
        return isinstance(value, bool)
    if name in _REALS:
        return type(value) in (int, float) and abs(value) < 1e300
    if isinstance(value, str):
        return value in _WORDS.get(name, ())
    if isinstance(value, tuple):
        return len(value) <= 16 and all(not isinstance(v, tuple) and _acceptable(name, v) for v in value)
    if value is None:
        return name in _OPTIONAL
    least = 1 if name in _AT_LEAST_ONE else -(2**31)
    return type(value) is int and least <= value <= _MOST.get(name, 2**31)


def _check_arguments(name: str, arguments: dict[str, Any], allowed: set[str]) -> None:
    if set(arguments) != allowed:
        raise DataError(f"{name}: expected the arguments {sorted(allowed)}, got {sorted(arguments)}")
    for key, value in arguments.items():
        if not isinstance(value, dict) and key != "modules" and not _acceptable(key, value):
            raise DataError(f"{name}: expected another value of {key}, got {str(value)[:80]!r}")


def _build(config: Any, depth: int) -> nn.Module:
    if depth > MAX_DEPTH:
        raise DataError(f"network configuration: expected at most {MAX_DEPTH} levels of nesting, got more")
    if not isinstance(config, dict) or not isinstance(config.get("type"), str):
        raise DataError(f"network configuration: expected an object with a 'type', got {str(config)[:80]!r}")
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items() if k != "type"}
    name = config["type"]
    try:
        if name in _CHAINS:
            _check_arguments(name, arguments, _CHAINS[name])
            modules = [_build(child, depth + 1) for child in arguments["modules"]]
            if name == "Sequential":
                return nn.Sequential(*modules)
            sizes = config["multipliers"].items()
            multipliers = {int(i): torch.zeros(operator.index(n)) for i, n in sizes}
            return Network(modules, arguments["input_shape"], multipliers)
        if name == "Affine":
            _check_arguments(name, arguments, {"channels"})
            return Affine(torch.zeros(arguments["channels"]), torch.zeros(arguments["channels"]))
        if name == "ConvexResidual":
            _check_arguments(name, arguments, {"body", "shortcut"})
            body, shortcut = (_build(arguments[branch], depth + 1) for branch in ("body", "shortcut"))
            return ConvexResidual(body, torch.zeros(()), shortcut)
        if name == "Sum":
            _check_arguments(name, arguments, {"modules"})
            return Sum(*(_build(child, depth + 1) for child in arguments["modules"]))
        if name in _BLOCKS:
            parts = ("first", "activation", "second")
            _check_arguments(name, arguments, {"channels", *parts})
            built = [_build(arguments[part], depth + 1) for part in parts]
            return _BLOCKS[name](*built, torch.zeros(arguments["channels"]))
        allowed = set(ARGUMENTS[_BY_NAME[name]]) | ({"bias"} if _BY_NAME[name] in _WITH_BIAS else set())
        _check_arguments(name, arguments, allowed)
        return _BY_NAME[name](**arguments)
    except KeyError as error:
        raise DataError(f"network configuration: unknown or missing {error} in {str(config)[:80]!r}") from None
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"network configuration: {name} cannot be built: {error}") from None
