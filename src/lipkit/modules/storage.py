"""Stored networks: their hash, their exact copy in float64, and their folder of a configuration and weights, no code.

Loading builds exactly the modules that the configuration names by their short names, from a closed list: the row of
each says how it is stored (`lipkit.modules.plain.Stored`). It checks every shape against the weights file and never
imports or evaluates anything that a file says.

**Weights as integers** make a file nearly four times smaller, and its bound stays proved. Blocks of 64 consecutive
numbers of a weight are stored as integers n and one step: w = step * n. The product is one rounded multiplication, so
every machine reads the same weights, and proofs are made from the weights that are read.
"""

import copy
import hashlib
import inspect
import json
import math
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from lipkit.errors import DataError, OptionError, ShapeError, first_line, suggestion
from lipkit.files import parse_json, read_bytes, read_text, write_atomic
from lipkit.modules.guarding import guard, type_name
from lipkit.modules.limits import Elementary, MatrixProduct, Product
from lipkit.modules.network import Network
from lipkit.modules.plain import Stored, row_of, stored_type, stored_types, submodule, submodules
from lipkit.modules.registry import check_samples_apart
from lipkit.networks import names, resolved
from lipkit.proof.roundoff import WIDE

# 2: the order of the frequencies of Fourier convolutions above 64 pixels changed.
SCHEMA_VERSION = 2

CONFIG, WEIGHTS = "config.json", "model.safetensors"

# Numbers in the Fourier transforms of one network, which a configuration names by their size alone.
MAX_TRANSFORM = 1 << 28

STEPS = ".steps"  # ending of the name under which the steps of a tensor are stored

_INTEGERS = {8: torch.int8, 16: torch.int16}
BITS = tuple(_INTEGERS)

# Smaller blocks cost more steps, larger ones a coarser step where a row's numbers differ in size, as those of trained
# dense layers do: 512 x 4096 gain 4.9 % in norm with one step for each row, 1.3 % with blocks of 64.
_BLOCK = 64

# Smaller tensors stay as they are: they save little, as dense layers fill most of a file, but each adds to the bound.
_SMALLEST = 1 << 15


def to_integers(tensors: Mapping[str, Tensor], bits: int | Mapping[str, int]) -> dict[str, Tensor]:
    """Round tensors of at least 32,768 finite numbers to integers of ``bits`` bits, block by block; keep the others.

    n = round(w / step) with step = max |block| / (2^(bits-1) - 1). Each weight changes by at most step / 2, and by what
    rounding the step to a narrow format adds. ``NAME.steps`` (blocks,) are the steps of tensor ``NAME``. Tensors with
    at most ``bits`` bits per number are kept, too, and those that a mapping of names to bits leaves out.

    >>> stored = to_integers({"weight": torch.randn(256, 128), "bias": torch.zeros(256)}, 8)
    >>> {name: (t.dtype, tuple(t.shape)) for name, t in stored.items()}
    {'weight': (torch.int8, (256, 128)), 'weight.steps': (torch.float32, (512,)), 'bias': (torch.float32, (256,))}
    """
    stored = dict[str, Tensor]()
    for name, tensor in tensors.items():
        wanted = bits.get(name, 64) if isinstance(bits, Mapping) else bits
        if tensor.numel() < _SMALLEST or 8 * tensor.itemsize <= wanted or not bool(tensor.isfinite().all()):
            stored[name] = tensor
            continue
        blocks, most = _blocks(tensor), 2 ** (wanted - 1) - 1
        steps = blocks.abs().amax(1) / most  # the largest number becomes the largest integer
        # Any step serves a block of zeros, or one whose division underflows.
        steps = torch.where(steps > 0, steps, torch.ones_like(steps))
        # If the step was rounded down, the largest number could exceed ``most`` and come back with the other sign.
        integers = (blocks / steps[:, None]).round().clamp(-most, most).to(_INTEGERS[wanted])
        stored[name] = integers.reshape(-1)[: tensor.numel()].reshape(tensor.shape)  # without the filling zeros
        stored[name + STEPS] = steps
    return stored


def from_integers(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of what `to_integers` stored: w = step * n, rounded to the dtype of the steps."""
    integers = {name: t for name, t in stored.items() if t.dtype in _INTEGERS.values()}
    tensors = {name: t for name, t in stored.items() if not {name, name.removesuffix(STEPS)} & integers.keys()}
    for name, tensor in integers.items():
        steps = stored.get(name + STEPS)
        count = -(-tensor.numel() // _BLOCK)
        good = steps is not None and steps.is_floating_point() and tuple(steps.shape) == (count,)
        if steps is None or not good or not bool((steps.isfinite() & (steps > 0)).all()):
            found = "none" if steps is None else f"{steps.dtype} of shape {tuple(steps.shape)}"
            raise DataError(f"{name}: expected {count} positive finite steps beside its integers, got {found}")
        numbers = _blocks(tensor).to(steps.dtype) * steps[:, None]  # rounded once, as the format says
        tensors[name] = numbers.reshape(-1)[: tensor.numel()].reshape(tensor.shape)
    return tensors


def _blocks(tensor: Tensor) -> Tensor:
    """All numbers in rows of one block each, the last one filled up with zeros."""
    flat = tensor.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % _BLOCK)).reshape(-1, _BLOCK)


# How deep the modules of one network may be nested.
MAX_DEPTH = 50


def describe(module: nn.Module) -> dict[str, Any]:
    """The configuration of one plain module, as JSON values.

    Raises:
        OptionError: the module is not plain, or an argument is a value that JSON cannot hold.

    >>> describe(nn.LeakyReLU(0.1)), build(describe(nn.LeakyReLU(0.1)))
    ({'type': 'LeakyReLU', 'negative_slope': 0.1}, LeakyReLU(negative_slope=0.1))
    """
    kind = type(module)
    entry = row_of(kind).stored
    if not isinstance(entry, Stored):
        known = ", ".join(sorted(known.__name__ for known in stored_types()))
        raise OptionError(f"expected a plain module ({known}), got {type_name(kind)}; call lipkit.export first")
    config: dict[str, Any] = {"type": kind.__name__}
    bias = {"bias": module.bias is not None} if "bias" in entry.arguments and not entry.read else {}
    own = entry.read(module) if entry.read else {name: getattr(module, name) for name in entry.arguments} | bias
    for name, value in own.items():
        if entry.arguments[name] is submodule:
            value = describe(value)
        elif entry.arguments[name] is submodules:
            value = [describe(part) for part in value]
        if not isinstance(value, bool | int | float | str | tuple | list | dict | None):
            raise OptionError(f"{kind.__name__}: expected {name} as a number of Python or a word, got {value!r}")
        config[name] = list(value) if isinstance(value, tuple) else value
    return config


def build(config: Any, depth: int = 0) -> nn.Module:
    """The module of a configuration made by `describe`, its tensors unset; ``depth`` modules enclose it.

    Raises:
        DataError: the configuration names an unknown module or unknown arguments.
    """
    if depth > MAX_DEPTH:
        raise DataError(f"network configuration: expected at most {MAX_DEPTH} levels of nesting, got more")
    if not isinstance(config, dict) or not isinstance(config.get("type"), str):
        raise DataError(f"network configuration: expected an object with a 'type', got {str(config)[:80]!r}")
    name = config["type"]
    kind = stored_type(name)
    entry = None if kind is None else row_of(kind).stored
    if kind is None or not isinstance(entry, Stored):
        raise DataError(f"network configuration: unknown or missing {name!r} in {str(config)[:80]!r}")
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items() if k != "type"}
    if set(given) != set(entry.arguments):
        raise DataError(f"{name}: expected the arguments {sorted(entry.arguments)}, got {sorted(given)}")
    for key, accepts in entry.arguments.items():
        if not accepts(given[key]):
            raise DataError(f"{name}: expected a value that {key} accepts, got {str(given[key])[:80]!r}")
        if accepts is submodule:
            given[key] = build(given[key], depth + 1)
        elif accepts is submodules:
            given[key] = tuple(build(part, depth + 1) for part in given[key])
    try:
        make = entry.make or kind
        starred = [key for key, p in inspect.signature(make).parameters.items() if p.kind is p.VAR_POSITIONAL]
        listed = [value for key in starred for value in given.pop(key, ())]
        return make(*listed, **given)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"network configuration: {name} cannot be built: {error}") from None


def sha256(network: nn.Module) -> str:
    """Hash of the configuration and of every stored tensor (name, dtype, shape, bytes) of a plain network."""
    return digest(contents(network))


Contents = list[tuple[str, np.ndarray[Any, Any]]]


def digest(stored: Contents) -> str:
    """The `sha256` of a network with these contents."""
    found = hashlib.sha256()
    for text, numbers in stored:
        found.update(text.encode())
        found.update(numbers.data)
    return found.hexdigest()


def contents(network: nn.Module) -> Contents:
    """All that `sha256` reads: the configuration, and the names and bytes of tensors, without copies if possible."""
    found: Contents = [(json.dumps(describe(network), sort_keys=True), np.empty(0, np.uint8))]
    for name, tensor in sorted(stored_tensors(network).items()):
        data = tensor.detach().cpu().contiguous().resolve_neg()
        known = data if data.dtype in (torch.float32, torch.float64) else data.reshape(-1)[:, None].view(torch.uint8)
        numbers = known.numpy().reshape(-1)
        words = numbers.view(np.uint8 if numbers.nbytes % 8 else np.int64)  # words of eight bytes are compared faster
        found.append((f"{name} {data.dtype} {tuple(data.shape)}", words))
    return found


def parts(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The module and all its submodules with their paths; a module in two places comes twice.

    ``named_modules`` is not used, because an instance could hide it. Parts of a chain are named by their places.
    """
    yield path, module
    for place, (name, part) in enumerate(vars(module)["_modules"].items()):
        if part is not None:
            name = str(place) if isinstance(module, nn.Sequential | nn.ModuleList) else name
            yield from parts(part, f"{path}.{name}".removeprefix("."))


def guard_parts(network: nn.Module) -> None:
    """`lipkit.modules.guard` the network and all its parts."""
    guard(*(part for _, part in parts(network)))


def stored_tensors(network: nn.Module) -> dict[str, Tensor]:
    """The tensors that ``state_dict`` names, read from the modules: hooks of ``state_dict`` could show others."""
    return {
        f"{place}.{name}".removeprefix("."): tensor
        for place, module in parts(network)
        for name, tensor in (module._parameters | module._buffers).items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    }


def same_contents(a: Contents, b: Contents) -> bool:
    """True if two networks are the same byte by byte, in an eighth of the time of two hashes."""
    texts = [[text for text, _ in each] for each in (a, b)]
    return texts[0] == texts[1] and all(np.array_equal(x, y) for (_, x), (_, y) in zip(a, b, strict=True))


# Attributes that no forward pass of exactly these types reads: a line of the source, the initial value of a weight.
_IDLE = {"where": (Product, MatrixProduct, Elementary), "init": (nn.PReLU,)}

# Attributes of every module that `guard` checks, or that no forward pass reads.
_NO_SWITCHES = vars(nn.Module()).keys() - {"training"} | {"input_range"}


# Only values of exactly these types are compared: a subclass may define its own comparison.
_PLAIN = (bool, int, float, str, type(None), np.float64, torch.dtype, types.FunctionType, types.BuiltinFunctionType)


def _exact(value: Any) -> bool:
    """True if == compares the value reliably: one of the types `_PLAIN`, or a tuple, list or set of such values."""
    return all(map(_exact, value)) if type(value) in (tuple, list, set, torch.Size) else type(value) in _PLAIN


def exact_copy(network: Network, device: str | torch.device = "cpu") -> Network:
    """A float64 copy, rebuilt from what is stored and hashed; on the CPU if ``device`` has no float64.

    Raises:
        NoRuleError, OptionError: hooks, methods, attributes or buffers of the network differ from its stored form.
    """
    guard_parts(network)
    numbers = {name: t.detach().to("cpu", torch.float64, copy=True) for name, t in stored_tensors(network).items()}
    try:
        exact = rebuilt({"network": describe(network)}, numbers, run=False)  # no trial run: the proof runs it
    except (DataError, OptionError):  # a network that no file could hold, such as one with a wrong in_features
        exact = float64_copy(network)
        for name, copied in stored_tensors(exact).items():
            if not torch.equal(copied.double().view(torch.int64), numbers[name].view(torch.int64)):
                raise OptionError(f"expected a copy with the same numbers, got others in {name!r}") from None
    exact.input_range = network.input_range
    for (_, module), (_, twin) in zip(parts(network), parts(exact), strict=True):
        twin.training = module.training  # not stored
        if hasattr(twin, "inplace"):
            setattr(twin, "inplace", False)  # noqa: B010
    check_alike(network, exact, "expected the module {!r} as its stored form gives it", "make it anew")
    return exact.to(float64_device(device))


def check_alike(network: Network, exact: Network, expected: str, remedy: str) -> None:
    """Raise if a network differs from the float64 copy of its stored form: in types, attributes or unstored buffers."""
    for (name, module), (_, twin) in zip(parts(network), parts(exact), strict=True):
        kind, unread = type(module), {key for key, types in _IDLE.items() if type(module) in types}
        pairs = {"type": (kind, type(twin))}
        # No forward pass reads an attribute that the copy and its class lack.
        for key in dict.fromkeys((*vars(module), *vars(twin))):
            if key not in _NO_SWITCHES | unread and hasattr(module, key) and hasattr(twin, key):
                pairs[key] = getattr(module, key), getattr(twin, key)
        if kind is type(twin) and getattr(module, "padding_mode", None) == "zeros":
            pairs.pop("_reversed_padding_repeated_twice", None)  # torch reads it in other modes only
        for key, pair in pairs.items():
            if key != "type" and not all(map(_exact, pair)):
                what = f"{key} as a number of Python or a word, got {pair[0]!r}"
                raise OptionError(f"{type_name(kind)}: expected {what}: make a tensor a buffer")
            value, then = (tuple(v) if isinstance(v, list) else v for v in pair)
            if value != then:
                raise OptionError(f"{expected.format(name)}, with {key} = {then!r}, got {value!r}: {remedy}")
        for key in twin._non_persistent_buffers_set:  # the twin has made them anew, from its sizes
            now, anew = getattr(module, key), getattr(twin, key).cpu()
            if not torch.equal(now.cpu(), anew.to(now.dtype)):
                raise OptionError(f"expected {key!r} of {module} as its sizes give it, got other numbers: load it anew")


def float64_copy(network: Network) -> Network:
    """A copy in float64, on the CPU, that holds exactly the same numbers."""
    return copy.deepcopy(network).cpu().double()  # first to the CPU: mps cannot even hold a float64 tensor


def float64_device(device: str | torch.device) -> torch.device:
    """``device``, or the CPU where that device has no float64."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise OptionError(f"device: expected a device of torch, such as 'cpu' or 'cuda', got {device!r}") from None
    return torch.device("cpu") if found.type == "mps" else found


def save(network: Network, folder: str | Path, *, bits: int | Mapping[str, int] | None = None) -> Path:
    """Write an exported network to ``folder`` (made if needed): ``config.json`` and ``model.safetensors``.

    Args:
        bits: 8 or 16 rounds the weights to integers of as many bits (`to_integers`): a quarter or half of the size in
            float32. A mapping names tensors of ``state_dict()``: 8 bits for the largest and 16 for the others cost
            little. What ``load`` returns is then another network than ``network``: certify that one.

    Raises:
        OptionError: ``network`` is not the result of ``lipkit.export``, or holds a module that is not plain, or one
            with an argument that a configuration does not accept; ``bits`` are neither 8 nor 16, or of no tensor.
            NoRuleError: hooks.
    """
    if type(network) is not Network:
        raise OptionError(f"save: expected the result of lipkit.export, got {type(network).__qualname__}")
    guard_parts(network)
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in network.state_dict().items()}
    named = bits if isinstance(bits, Mapping) else {}
    if unknown := sorted(map(str, named.keys() - tensors.keys())):
        raise OptionError(f"save: expected bits of tensors of the network, got {', '.join(unknown)}")
    for wanted in named.values() if isinstance(bits, Mapping) else (bits,):
        if wanted not in (None, *BITS):
            raise OptionError(f"save: expected bits to be 8, 16 or None, got {wanted!r}")
    stored = tensors if bits is None else to_integers(tensors, bits)
    if bits is not None:
        tensors, network = from_integers(stored), copy.deepcopy(network)
        network.load_state_dict(tensors)
    config = configuration(network)
    try:
        text = json.dumps(config, indent=1, allow_nan=False) + "\n"
        _skeleton(json.loads(text)["network"], tensors)
        _input_range(config)
    except (DataError, TypeError, ValueError) as error:
        raise OptionError(f"save: expected a network that can be read back, got one that cannot: {error}") from None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / WEIGHTS, save_safetensors(stored))
    write_atomic(folder / CONFIG, text.encode())
    return folder


def _skeleton(config: Any, tensors: dict[str, torch.Tensor], run: bool = True) -> Network:
    """A configuration as a network on torch's meta device, checked against its tensors and, with ``run``, executed."""
    with torch.device("meta"):
        skeleton = build(config)  # no memory yet: a file may claim any size
    if type(skeleton) is not Network:
        raise DataError(f"expected a Network at the top, got {type(skeleton).__name__}")
    check_tensors(skeleton, tensors)
    stored = skeleton.state_dict()
    transforms = sum(b.numel() for name, b in skeleton.named_buffers() if name not in stored)
    if transforms > MAX_TRANSFORM:
        raise DataError(f"expected at most {MAX_TRANSFORM} numbers in Fourier transforms, got {transforms}")
    try:
        if run:
            _check_batches(skeleton)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"the modules do not accept inputs of shape {skeleton.input_shape}: {first_line(error)}"
        ) from None
    return skeleton


def check_tensors(skeleton: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """``DataError`` unless the tensors have the names and shapes of the module's state and floating dtypes.

    Counters, as batch norm has them, keep their dtype.
    """
    state = skeleton.state_dict()
    expected = {name: tuple(t.shape) for name, t in state.items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise DataError(f"{name}: expected shape {expected.get(name)}, got {found.get(name)}")
        given, wanted = tensors[name].dtype, state[name].dtype
        if given not in (WIDE if wanted.is_floating_point else [wanted]):
            kind = "a floating dtype" if wanted.is_floating_point else wanted
            raise DataError(f"{name}: expected {kind}, got {given}")


def _check_batches(skeleton: Network) -> None:
    """Run batches of one and two samples; refuse modules that change the number of samples or whose shapes vary."""
    runs: list[list[tuple[int, ...]]] = []

    def before(module: nn.Module, values: tuple[Tensor, ...]) -> None:
        shape = tuple(values[0].shape[1:])
        check_samples_apart(module, shape)
        if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d):  # torch checks these on real tensors only
            steps = map(max, module.stride, module.dilation)
            if shape[0] != module.in_channels or any(p >= s for p, s in zip(module.output_padding, steps, strict=True)):
                raise ShapeError(f"{module}: expected other channels or a smaller output_padding, got {shape}")

    def after(module: nn.Module, values: tuple[Tensor, ...], y: Tensor) -> None:
        if len(y) != len(runs) or min(y.shape) < 1:
            raise ShapeError(f"{type(module).__name__}: expected one output for each sample, got {tuple(y.shape)}")
        runs[-1].append(tuple(y.shape[1:]))

    hooks = [m.register_forward_pre_hook(before) for m in skeleton.modules()]
    hooks += [m.register_forward_hook(after) for m in skeleton.modules()]
    for batch in (1, 2):
        runs.append([])
        skeleton(torch.empty(batch, *skeleton.input_shape, device="meta"))
    for hook in hooks:
        hook.remove()
    if runs[0] != runs[1]:
        raise ShapeError("the shape of an output depends on the number of samples")


def _input_range(config: dict[str, Any]) -> tuple[float, float] | None:
    found = config.get("input_range")
    if found is None:
        return None
    numbers = isinstance(found, list) and len(found) == 2 and all(type(n) in (int, float) for n in found)
    if not numbers or not -math.inf < found[0] < found[1] < math.inf:
        raise DataError(f"input_range: expected two numbers, the smaller one first, got {str(found)[:80]!r}")
    return float(found[0]), float(found[1])


def configuration(network: Network) -> dict[str, Any]:
    """The configuration that `rebuilt` takes: the network without its tensors."""
    config = {"schema_version": SCHEMA_VERSION, "sha256": sha256(network), "network": describe(network)}
    return config | ({} if network.input_range is None else {"input_range": list(network.input_range)})


def rebuilt(config: dict[str, Any], tensors: dict[str, Tensor], *, run: bool = True) -> Network:
    """The network of a configuration and its tensors; ``run`` also checks it by a forward pass on the meta device."""
    network = _skeleton(config.get("network"), tensors, run)
    network.input_range = _input_range(config)
    network.load_state_dict(tensors, assign=True)  # shapes and dtypes are checked
    network.requires_grad_(False)
    # Transforms are no state: they are made here, from sizes that the tensors have confirmed.
    network._apply(lambda t: t)
    return network


def load(folder: str | Path) -> Network:
    """Read a network written by :func:`save`, or one that comes with the package.

    Args:
        folder: where it was saved; or, if nothing lies there, a name of ``lipkit list networks``.

    Raises:
        DataError: a file is missing or corrupt, or weights and configuration do not fit each other.

    >>> network = load("digits-cayley")
    >>> network(torch.zeros(1, 1, 8, 8)).shape
    torch.Size([1, 10])
    """
    found = resolved(folder)
    folder = found if found == Path(folder) else found / "network"
    try:
        config = parse_json(read_text(folder / CONFIG))
        tensors = load_safetensors(read_bytes(folder / WEIGHTS))
    except FileNotFoundError as error:
        inner = [path.parent for path in sorted(folder.glob(f"*/{CONFIG}"))]  # a run keeps its network in a folder
        hint = f"; {' and '.join(map(str, inner))} has them" if inner else suggestion(str(folder), names())
        raise DataError(f"{folder}: expected {CONFIG} and {WEIGHTS}, got no {error.filename}{hint}") from None
    except OSError as error:
        raise DataError(f"{folder}: {CONFIG} and {WEIGHTS} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError, SafetensorError) as error:
        raise DataError(f"{folder}: not a saved network: {error}") from None
    if not isinstance(config, dict) or config.get("schema_version") != SCHEMA_VERSION:
        got = config.get("schema_version") if isinstance(config, dict) else config
        raise DataError(f"{folder / CONFIG}: expected schema_version {SCHEMA_VERSION}, got {got!r}")
    try:
        network = rebuilt(config, from_integers(tensors))
    except DataError as error:
        raise DataError(f"{folder}: {error}") from None
    if sha256(network) != config.get("sha256"):
        raise DataError(f"{folder}: expected the network with sha256 {config.get('sha256')}, got {sha256(network)}")
    return network
