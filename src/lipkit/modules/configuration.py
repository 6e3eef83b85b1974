"""The configuration of plain modules: JSON values that name modules of a closed list by their short names.

The row of each module says how it is stored (`lipkit.modules.plain.Stored`). Building makes exactly those modules and
never imports or evaluates anything that a configuration says.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from lipkit.errors import DataError, OptionError
from lipkit.modules.guarding import type_name
from lipkit.modules.plain import Accepts, Stored, row_of, stored_type, stored_types


def flag(value: Any) -> bool:
    """Accepts true and false."""
    return isinstance(value, bool)


def real(value: Any) -> bool:
    """Accepts a finite number."""
    return type(value) in (int, float) and abs(value) < 1e300  # a bool is no number, and NaN compares false


def each(accepts: Accepts, count: int | None = None) -> Accepts:
    """Accepts what ``accepts`` does, and tuples of up to 16 of these (exactly ``count``, if given)."""

    def accepted(value: Any) -> bool:
        if not isinstance(value, tuple):
            return accepts(value)
        return len(value) <= 16 and count in (len(value), None) and all(map(accepts, value))

    return accepted


def whole(least: int = -(2**31), most: int = 2**31 - 1, count: int | None = None) -> Accepts:
    """Accepts an integer in [least, most], or a tuple of up to 16 (exactly ``count``, if given)."""
    return each(lambda value: type(value) is int and least <= value <= most, count)  # a bool is no integer


def either(accepts: Accepts | None, *others: str | None) -> Accepts:
    """Accepts each of ``others`` (words or None), what ``accepts`` does (if given), and tuples of up to 16 of these."""

    def one(value: Any) -> bool:
        if value is None or isinstance(value, str):
            return value in others
        return accepts is not None and not isinstance(value, tuple) and accepts(value)

    return each(one)


def submodule(value: Any) -> bool:
    """Accepts the configuration of a module."""
    return isinstance(value, dict)


def submodules(value: Any) -> bool:
    """Accepts a tuple of configurations of modules."""
    return isinstance(value, tuple)


INTEGER, COUNT = whole(), whole(1)

# How deep the modules of one network may be nested.
MAX_DEPTH = 50


def describe(module: nn.Module) -> dict[str, Any]:
    """The configuration of one plain module, as JSON values.

    Raises:
        OptionError: the module is not plain, or an argument is neither a number of Python nor a word.

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
