"""A data set made by a function of the user's own, named `pkg.mod:factory`."""

from __future__ import annotations

import importlib
from dataclasses import replace

from lipkit.data.convert import as_data, as_split
from lipkit.data.split import Data
from lipkit.errors import DataError


def load_custom(spec: str) -> Data:
    """Import `pkg.mod`, call `factory()` and turn what it returns into a Data.

    The factory takes no arguments and returns a Data, or a pair (train, test) of which each is a Split, a
    pair (x, y) of tensors or arrays, or a map-style torch Dataset of such pairs (see `as_split`).

    Args:
        spec: `pkg.mod:factory`. It runs the code of that module: use only what you trust.

    Raises:
        DataError: if it cannot be imported, fails, or returns something else.
    """
    module_name, _, attribute = spec.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except AttributeError as error:
        raise DataError(f"{spec}: expected {module_name} to have {attribute}, got none ({error})") from error
    except Exception as error:  # the module is the user's code and may raise anything
        raise DataError(
            f"{spec}: expected a module that can be imported, got {type(error).__name__}: {error}"
        ) from error
    if not callable(factory):
        raise DataError(f"{spec}: expected a function that makes the data, got {type(factory).__name__}")
    try:
        made = factory()
    except Exception as error:
        raise DataError(f"{spec}: expected data, got {type(error).__name__}: {error}") from error
    if isinstance(made, Data):
        return replace(made, name=spec)
    if not isinstance(made, tuple | list) or len(made) != 2:
        got = f"{len(made)} values" if isinstance(made, tuple | list) else type(made).__name__
        raise DataError(f"{spec}: expected a lipkit.data.Data or a pair (train, test), got {got}")
    return as_data(spec, as_split(made[0], f"{spec}: train"), as_split(made[1], f"{spec}: test"))
