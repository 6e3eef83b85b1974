"""Modules as those of the numbers that they use now: parametrizations evaluated, options of numpy in Python's types."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lipkit.errors import NoRuleError
from lipkit.modules.guarding import type_name


def settled(module: nn.Module) -> nn.Module:
    """The module with its own parametrised tensors (not those of its parts) as parameters of their present values.

    The values have the derivatives of the parametrizations. Options that are numbers of numpy become Python's. All else
    is shared with the module, which stays as it is and is returned itself if it has neither.

    Raises:
        NoRuleError: a value that is not the same at each evaluation, as of spectral normalisation in training mode; a
            class that torch has not made.

    >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    >>> type(settled(layer)), torch.equal(settled(layer).weight, layer.weight)
    (<class 'torch.nn.modules.linear.Linear'>, True)
    """
    options = options_of_python(module) if isinstance(module, nn.Module) else {}
    if not parametrize.is_parametrized(module):
        if not options:
            return module
        same = type(module).__new__(type(module))
        vars(same).update(vars(module) | options)
        return same
    kind, lists = type(module), module._modules["parametrizations"]
    assert isinstance(lists, nn.ModuleDict)
    base: type[nn.Module] = kind.__bases__[0]  # torch derives a class from it
    name = f"{type_name(base)} with parametrizations on {sorted(lists)}"
    own = {key for key, value in vars(kind).items() if callable(value) or hasattr(type(value), "__get__")}
    if kind.__name__ != f"Parametrized{base.__name__}" or own - {"__getstate__", "__deepcopy__", *lists}:
        raise NoRuleError(f"{name}: expected the class that torch makes of it, got {kind.__name__} with {sorted(own)}")
    _check_still(module, name)
    # Not the module's attributes: inside of torch's `cached`, a copy has those of the original.
    values = {key: one() for key, one in lists.items()}
    kept = {key: parametrize._cache.get((id(module), key)) for key in lists}
    if stale := [key for key, t in kept.items() if t is not None and not torch.equal(t, values[key])]:
        raise NoRuleError(f"{name}: expected numbers that stay inside of parametrize.cached(), got other {stale} since")
    plain = base.__new__(base)
    vars(plain).update(vars(module) | options)
    vars(plain)["_modules"] = {key: part for key, part in module._modules.items() if part is not lists}
    made = {key: v if v.requires_grad else nn.Parameter(v, requires_grad=False) for key, v in values.items()}
    vars(plain)["_parameters"] = {**made, **module._parameters}
    return plain


def options_of_python(module: nn.Module) -> dict[str, Any]:
    """The attributes that hold numbers of numpy, in Python's types: numpy computes in float32 or int8 where they do.

    >>> options_of_python(nn.LeakyReLU(np.float32(0.5)))
    {'negative_slope': 0.5}
    """
    found: dict[str, Any] = {}
    for key, value in vars(module).items():
        items = value if type(value) in (tuple, list) else (value,)
        if any(isinstance(item, np.generic) for item in items):
            plain = [item.item() if isinstance(item, np.generic) else item for item in items]
            found[key] = plain[0] if items is not value else tuple(plain) if isinstance(value, tuple) else plain
    return found


def _check_still(module: nn.Module, name: str) -> None:
    """Raise ``NoRuleError`` unless the values, and the tensors that they are made from, stay as they are."""
    seen: list[dict[str, Tensor]] = []
    with torch.inference_mode(False):
        # Not the module: an nn.RNN keeps the values of its last run, which cannot be copied.
        lists: Any = copy.deepcopy(module._modules["parametrizations"])
        state = [*lists.parameters(), *lists.buffers()]
        versions = [t._version for t in state]
        for graph in (False, True, False):
            with torch.set_grad_enabled(graph):
                seen.append({key: one().detach().clone() for key, one in lists.items()})
        with torch.inference_mode():  # networks are often run in this mode
            seen.append({key: one().clone() for key, one in lists.items()})
    same = all(bool(((t == one[key]) | (t != t)).all()) for one in seen[1:] for key, t in seen[0].items())
    if not same or versions != [t._version for t in state]:
        training = any(part.training for part in lists.modules())
        raise NoRuleError(
            f"{name}: expected the same numbers at each evaluation, got ones that change"
            + (" in training mode: call .eval()" if training else "")
        )
