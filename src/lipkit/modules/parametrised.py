"""Modules with computed weights, from parametrizations or hooks, as modules that hold the present values."""

import collections
import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lipkit.errors import NoRuleError
from lipkit.modules.guarding import methods, type_name


def settled(module: nn.Module) -> nn.Module:
    """The module with its computed weights as plain parameters of their present values; children stay as they are.

    Computed weights are parametrised tensors and what the hooks of ``nn.utils.weight_norm`` and ``spectral_norm`` make.
    The values keep their derivatives. Options that are scalars of numpy become Python's. All else is shared with the
    module, which does not change; if it has none of these, it is returned itself.

    Raises:
        NoRuleError: a value that changes between evaluations, as by spectral normalisation in training mode; a
            parametrised class that torch did not create.
    """
    if not isinstance(module, nn.Module):
        return module  # type: ignore[unreachable]  # a user's, which the look-up of its rule refuses by name
    for hook in module._forward_pre_hooks.values():
        if type(hook) in (SpectralNorm, WeightNorm):
            return settled(_without_hook(module, hook))  # there may be others
    options = options_of_python(module)
    if not parametrize.is_parametrized(module):
        return alike(module, **options) if options else module
    kind, lists = type(module), module._modules["parametrizations"]
    assert isinstance(lists, nn.ModuleDict)
    base: type[nn.Module] = kind.__bases__[0]  # torch derives a class from it
    name = f"{type_name(base)} with parametrizations on {sorted(lists)}"
    own = set(methods(kind))
    if kind.__name__ != f"Parametrized{base.__name__}" or own - {"__getstate__", "__deepcopy__", *lists}:
        raise NoRuleError(f"{name}: expected the class that torch makes of it, got {kind.__name__} with {sorted(own)}")
    _check_still(module, name)
    # Not the module's attributes: inside of torch's `cached`, a copy has those of the original.
    values = {key: one() for key, one in lists.items()}
    kept = {key: parametrize._cache.get((id(module), key)) for key in lists}
    if stale := [key for key, t in kept.items() if t is not None and not torch.equal(t, values[key])]:
        raise NoRuleError(f"{name}: expected numbers that stay inside of parametrize.cached(), got other {stale} since")
    options["_modules"] = {key: part for key, part in module._modules.items() if part is not lists}
    options["_parameters"] = {**{key: _parameter(v) for key, v in values.items()}, **module._parameters}
    return alike(module, base, **options)


def alike(module: nn.Module, kind: type[nn.Module] | None = None, **changes: Any) -> nn.Module:
    """A module of the same type, or of ``kind``, that shares all attributes but ``changes``."""
    kind = kind or type(module)
    made = kind.__new__(kind)
    vars(made).update(vars(module) | changes)
    return made


# Attributes that count channels, or groups of them.
_COUNTS = ("in_channels", "out_channels", "groups", "num_features", "num_groups", "num_channels")


def repeated(module: nn.Module, copies: int) -> nn.Module:
    """A module of channels, for the joined channels of ``copies`` images: each image is treated alone."""

    def each(t: Any) -> Any:
        return t.repeat(copies, *[1] * (t.ndim - 1)) if t is not None and t.ndim else t  # without dimensions: steps

    counts = {key: copies * vars(module)[key] for key in _COUNTS if key in vars(module)}
    stored = {key: None if t is None else _parameter(each(t)) for key, t in module._parameters.items()}
    return alike(module, **counts, _parameters=stored, _buffers={k: each(t) for k, t in module._buffers.items()})


def _parameter(value: Tensor) -> Tensor:
    return value if value.requires_grad else nn.Parameter(value, requires_grad=False)


def _without_hook(module: nn.Module, hook: Any) -> nn.Module:
    """The module without this hook, with the weight that the hook computes in evaluation mode as a parameter."""
    ends: tuple[str, ...]
    if type(hook) is WeightNorm:
        value, ends = hook.compute_weight(module), ("_g", "_v")
    elif module.training:
        raise NoRuleError(
            "spectral normalisation: expected evaluation mode, got training mode, where each forward pass changes the "
            "weight; call .eval()"
        )
    else:
        value, ends = hook.compute_weight(module, do_power_iteration=False), ("_orig", "_u", "_v")
    gone, plain = {hook.name, *(hook.name + end for end in ends)}, alike(module)
    own = vars(plain)
    for name in gone & own.keys():
        del own[name]  # the hook's last weight
    for place in ("_parameters", "_buffers"):
        own[place] = {name: v for name, v in own[place].items() if name not in gone}
    own["_parameters"][hook.name] = _parameter(value)
    for place in ("_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks"):
        # A hook of states refers to that of the forward pass, and may be wrapped. Torch wants a dict of this type.
        known = {k: getattr(getattr(one, "hook", one), "fn", one) for k, one in own[place].items()}
        own[place] = collections.OrderedDict((k, own[place][k]) for k, one in known.items() if one is not hook)
    return plain


def options_of_python(module: nn.Module) -> dict[str, Any]:
    """The attributes that hold scalars of numpy, as Python's numbers: numpy would compute in float32 or int8 with them.

    >>> options_of_python(nn.LeakyReLU(np.float32(0.5)))
    {'negative_slope': 0.5}
    """
    found: dict[str, Any] = {}
    for key, value in vars(module).items():
        if isinstance(value, np.generic):
            found[key] = value.item()
        elif type(value) in (tuple, list) and any(isinstance(item, np.generic) for item in value):
            found[key] = type(value)(item.item() if isinstance(item, np.generic) else item for item in value)
    return found


def _check_still(module: nn.Module, name: str) -> None:
    """Raise ``NoRuleError`` if an evaluation changes the parametrised values, or the tensors they are made from."""
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
