"""The configuration of plain modules: JSON values that name modules of a closed list by their short names.

Each module's file says how it is stored (`stored`). Building makes exactly those modules and never imports or evaluates
anything that a configuration says.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from lipkit.errors import DataError, OptionError
from lipkit.modules.network import Network

Accepts = Callable[[Any], bool]
"""True for a value of a configuration that the argument takes."""


def flag(value: Any) -> bool:
    """True or false."""
    return isinstance(value, bool)


def real(value: Any) -> bool:
    """A finite number."""
    return type(value) in (int, float) and abs(value) < 1e300


def whole(least: int = -(2**31), most: int = 2**31 - 1, count: int | None = None) -> Accepts:
    """An integer, or up to 16 of them; with ``count``, just as many."""

    def accepts(value: Any) -> bool:
        if isinstance(value, tuple):
            fits = len(value) <= 16 and count in (len(value), None)
            return fits and all(not isinstance(v, tuple) and accepts(v) for v in value)
        return type(value) is int and least <= value <= most

    return accepts


def either(accepts: Accepts | None, *others: str | None) -> Accepts:
    """Accepts whatever ``accepts`` does, if given, and these words or None."""

    def accepted(value: Any) -> bool:
        if isinstance(value, tuple):
            return len(value) <= 16 and all(not isinstance(v, tuple) and accepted(v) for v in value)
        if value is None or isinstance(value, str):
            return value in others
        return accepts is not None and accepts(value)

    return accepted


def submodule(value: Any) -> bool:
    """A module, described like any other."""
    return isinstance(value, dict)


def submodules(value: Any) -> bool:
    """Modules, likewise."""
    return isinstance(value, tuple)


def mapping(value: Any) -> bool:
    """Numbers by name, which ``make`` reads."""
    return isinstance(value, dict)


INTEGER, COUNT = whole(), whole(1)


class _Stored(NamedTuple):
    kind: type[nn.Module]
    arguments: dict[str, Accepts]
    read: Callable[[Any], dict[str, Any]]
    make: Callable[..., nn.Module]


_STORED: dict[str, _Stored] = {}

# How deep the modules of one network may be nested.
MAX_DEPTH = 50


def stored(
    kind: type[nn.Module],
    read: Callable[[Any], dict[str, Any]] | None = None,
    make: Callable[..., nn.Module] | None = None,
    **arguments: Accepts,
) -> None:
    """Let networks with modules of exactly this type be saved and loaded.

    Args:
        kind: the type.
        read: the arguments of a module; by default its attributes of those names (of ``bias``, whether there is one).
        make: from the arguments to a module, its tensors unset; by default ``kind``.
        arguments: what each accepts.
    """

    def attributes(module: Any) -> dict[str, Any]:
        found = {name: getattr(module, name) for name in arguments if name != "bias"}
        return found | ({"bias": module.bias is not None} if "bias" in arguments else {})

    _STORED[kind.__name__] = _Stored(kind, arguments, read or attributes, make or kind)


def stored_types() -> tuple[type[nn.Module], ...]:
    """Every type that can be saved."""
    return tuple(entry.kind for entry in _STORED.values())


def _network(modules: Any, input_shape: Any, multipliers: dict[str, int]) -> Network:
    given = {int(i): torch.zeros(operator.index(n)) for i, n in multipliers.items()}
    return Network(modules, input_shape, given)


def _read_network(network: Network) -> dict[str, Any]:
    sizes = {str(i): len(m) for i, m in network.multipliers().items()}
    # Not children(): that would list a module that stands in the chain twice only once.
    return {"modules": tuple(network), "input_shape": network.input_shape, "multipliers": sizes}


stored(Network, _read_network, _network, modules=submodules, input_shape=INTEGER, multipliers=mapping)
stored(nn.Sequential, lambda m: {"modules": tuple(m)}, lambda modules: nn.Sequential(*modules), modules=submodules)


def describe(module: nn.Module) -> dict[str, Any]:
    """The configuration of one plain module, as JSON values.

    Raises:
        OptionError: the module is not in the closed list of plain modules.

    >>> describe(nn.LeakyReLU(0.1))
    {'type': 'LeakyReLU', 'negative_slope': 0.1}
    """
    kind = type(module)
    entry = _STORED.get(kind.__name__)
    if entry is None or entry.kind is not kind:
        raise OptionError(
            f"expected a plain module ({', '.join(sorted(_STORED))}), got {kind.__module__}.{kind.__qualname__}; "
            "call lipkit.export first"
        )
    config: dict[str, Any] = {"type": kind.__name__}
    for name, value in entry.read(module).items():
        if entry.arguments[name] is submodule:
            value = describe(value)
        elif entry.arguments[name] is submodules:
            value = [describe(part) for part in value]
        config[name] = list(value) if isinstance(value, tuple) else value
    return config


def build(config: Any) -> nn.Module:
    """The module of a configuration made by :func:`describe`, its tensors unset.

    Raises:
        DataError: the configuration names an unknown module or unknown arguments.

    >>> build({"type": "LeakyReLU", "negative_slope": 0.1})
    LeakyReLU(negative_slope=0.1)
    """
    return _build(config, 0)


def _build(config: Any, depth: int) -> nn.Module:
    if depth > MAX_DEPTH:
        raise DataError(f"network configuration: expected at most {MAX_DEPTH} levels of nesting, got more")
    if not isinstance(config, dict) or not isinstance(config.get("type"), str):
        raise DataError(f"network configuration: expected an object with a 'type', got {str(config)[:80]!r}")
    name = config["type"]
    if name not in _STORED:
        raise DataError(f"network configuration: unknown or missing {name!r} in {str(config)[:80]!r}")
    entry = _STORED[name]
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items() if k != "type"}
    if set(given) != set(entry.arguments):
        raise DataError(f"{name}: expected the arguments {sorted(entry.arguments)}, got {sorted(given)}")
    for key, accepts in entry.arguments.items():
        if not accepts(given[key]):
            raise DataError(f"{name}: expected another value of {key}, got {str(given[key])[:80]!r}")
        if accepts is submodule:
            given[key] = _build(given[key], depth + 1)
        elif accepts is submodules:
            given[key] = tuple(_build(part, depth + 1) for part in given[key])
    try:
        return entry.make(**given)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"network configuration: {name} cannot be built: {error}") from None
