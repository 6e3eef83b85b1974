"""Plain networks as a folder: ``config.json`` + ``model.safetensors``, no code in either.

A configuration names modules of a closed list by their short names; loading builds exactly those, checks every
shape against the weights file and never imports or evaluates anything that a file says.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import nn

from lipkit.errors import DataError, OptionError
from lipkit.files import write_atomic
from lipkit.plain.activations import GroupSort, MaxMin
from lipkit.plain.elementwise import Affine, ConvexResidual
from lipkit.plain.fourier import FourierConv2d
from lipkit.plain.network import Network

SCHEMA_VERSION = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"

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
    MaxMin: (),
    GroupSort: ("group_size",),
    FourierConv2d: ("in_channels", "out_channels", "height", "width"),
}
_WITH_BIAS = (nn.Linear, nn.Conv1d, nn.Conv2d, FourierConv2d)
_BY_NAME = {kind.__name__: kind for kind in ARGUMENTS}


def describe(module: nn.Module) -> dict[str, Any]:
    """The configuration of one plain module, as JSON values.

    Raises:
        OptionError: the module is not in the closed list of plain modules.

    >>> describe(nn.LeakyReLU(0.1))
    {'type': 'LeakyReLU', 'negative_slope': 0.1}
    """
    kind = type(module)
    if kind in (Network, nn.Sequential):
        modules = [describe(child) for child in module.children()]
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
    if not isinstance(config, dict) or not isinstance(config.get("type"), str):
        raise DataError(f"network configuration: expected an object with a 'type', got {str(config)[:80]!r}")
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items() if k != "type"}
    name = config["type"]
    try:
        if name in ("Network", "Sequential"):
            modules = [build(child) for child in arguments["modules"]]
            if name == "Sequential":
                return nn.Sequential(*modules)
            multipliers = {int(i): torch.zeros(int(n)) for i, n in arguments["multipliers"].items()}
            return Network(modules, arguments["input_shape"], multipliers)
        if name == "Affine":
            return Affine(torch.zeros(arguments["channels"]), torch.zeros(arguments["channels"]))
        if name == "ConvexResidual":
            return ConvexResidual(build(arguments["body"]), torch.zeros(()), build(arguments["shortcut"]))
        allowed = set(ARGUMENTS[_BY_NAME[name]]) | ({"bias"} if _BY_NAME[name] in _WITH_BIAS else set())
        if set(arguments) != allowed:
            raise DataError(f"{name}: expected the arguments {sorted(allowed)}, got {sorted(arguments)}")
        return _BY_NAME[name](**arguments)
    except KeyError as error:
        raise DataError(f"network configuration: unknown or missing {error} in {str(config)[:80]!r}") from None
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"network configuration: {name} cannot be built: {error}") from None


def sha256(network: nn.Module) -> str:
    """Hash of the configuration and of every stored tensor (name, dtype, shape, bytes) of a plain network.

    >>> a = Network([nn.ReLU()], (3,)); sha256(a) == sha256(Network([nn.ReLU()], (3,)))
    True
    """
    digest = hashlib.sha256(json.dumps(describe(network), sort_keys=True).encode())
    for name, tensor in sorted(network.state_dict().items()):
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {data.dtype} {tuple(data.shape)}".encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save(network: Network, folder: str | Path) -> Path:
    """Write an exported network to ``folder`` (made if needed): ``config.json`` and ``model.safetensors``.

    Raises:
        OptionError: ``network`` is not the result of ``lipkit.export``, or holds a module that is not plain.
    """
    if type(network) is not Network:
        raise OptionError(f"save: expected the result of lipkit.export, got {type(network).__qualname__}")
    config = {"schema_version": SCHEMA_VERSION, "network": describe(network)}
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in network.state_dict().items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / WEIGHTS, save_safetensors(tensors))
    write_atomic(folder / CONFIG, (json.dumps(config, indent=1) + "\n").encode())
    return folder


def load(folder: str | Path) -> Network:
    """Read a network written by :func:`save`.

    Raises:
        DataError: a file is missing or corrupt, or weights and configuration do not fit each other.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG).read_text())
        tensors = load_safetensors((folder / WEIGHTS).read_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{folder}: expected {CONFIG} and {WEIGHTS}, got no {error.filename}") from None
    except (ValueError, SafetensorError) as error:
        raise DataError(f"{folder}: not a saved network: {error}") from None
    if not isinstance(config, dict) or config.get("schema_version") != SCHEMA_VERSION:
        got = config.get("schema_version") if isinstance(config, dict) else config
        raise DataError(f"{folder / CONFIG}: expected schema_version {SCHEMA_VERSION}, got {got!r}")
    with torch.device("meta"):
        skeleton = build(config.get("network"))
    if type(skeleton) is not Network:
        raise DataError(f"{folder / CONFIG}: expected a Network at the top, got {type(skeleton).__name__}")
    expected = {name: tuple(t.shape) for name, t in skeleton.state_dict().items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise DataError(f"{folder / WEIGHTS}: {name}: expected shape {expected.get(name)}, got {found.get(name)}")
    network = build(config["network"])
    assert isinstance(network, Network)
    network.load_state_dict(tensors, assign=True)
    network.requires_grad_(False)
    return network._apply(lambda t: t)
