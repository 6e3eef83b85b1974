"""Refusal of modules whose forward pass is not the one that their type names.

The check finds hooks, methods replaced on the instance or on a class, parametrizations, weights that are not ordinary
tensors of numbers, and modes that change the operations of torch. It cannot find changes below the classes: in torch's
own functions, in the code object of a method, or in a method that asks if it is being traced (`docs/rounding.md`).
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize, prune

from lipkit.errors import NoRuleError
from lipkit.linalg.transforms import active_modes, has_global_hooks

# Attributes of nn.Module that a call of a module goes through; of its subclasses every method counts.
_CALLED = {"__call__", "__getattr__", "__getattribute__", "_call_impl", "_compiled_call_impl", "_slow_forward"}
_CALLED |= {"_wrapped_call_impl", "forward"}

# The methods of each class when a rule was registered for it: a rule covers those functions and no others.
_METHODS: dict[type, dict[str, object]] = {}


def type_name(kind: type) -> str:
    """The full name of a type."""
    return f"{kind.__module__}.{kind.__qualname__}"


def remember(kind: type[nn.Module]) -> None:
    """Record the methods of a class and its bases as the ones that its rule covers. Only the first call counts."""
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise NoRuleError(f"expected rules for types of modules, as by @lipschitz_rule(Layer), got {kind!r}")
    for base in kind.__mro__[:-1]:
        _METHODS.setdefault(base, methods(base))


def methods(kind: type) -> dict[str, object]:
    """The methods and descriptors that a class itself defines; of ``nn.Module`` those that a call goes through."""
    own = vars(kind)
    if kind is nn.Module:
        return {name: own[name] for name in _CALLED & own.keys()}
    return {name: value for name, value in own.items() if callable(value) or hasattr(type(value), "__get__")}


def guard(*modules: nn.Module) -> None:
    """Refuse modules whose forward pass may not be the one that their types name.

    Raises:
        NoRuleError: forward hooks or pre-hooks (of the module or global), methods replaced on the instance or on a
            class, parametrizations, weights that are not ordinary dense tensors, a mode of torch that sees its
            operations.
    """
    for mode in active_modes():
        raise NoRuleError(
            "expected no TorchFunctionMode or TorchDispatchMode, which can change every operation, got "
            f"{type_name(type(mode))}: leave it first"
        )
    for kind in dict.fromkeys(map(type, modules)):
        name, alike = type_name(kind), [module for module in modules if type(module) is kind]
        for module in alike:
            _refuse_hooks(module, name)
            _refuse_weights(module, name)
        for attribute in dict.fromkeys(key for module in alike for key in vars(module)):
            if callable(getattr(kind, attribute, None)):
                raise NoRuleError(
                    f"{name} has an instance-level {attribute!r} that hides the method of its class, expected none: "
                    "make it a subclass with its own rule"
                )
        _refuse_methods(kind, name)


def _refuse_hooks(module: nn.Module, name: str) -> None:
    if parametrize.is_parametrized(module):
        raise NoRuleError(
            f"{name} has parametrizations on {sorted(module.parametrizations)}, "  # type: ignore[arg-type]
            "expected none: lipkit.convert(model, None, input_shape=...) makes a copy with the weights as they are now"
        )
    if module._forward_hooks or module._forward_pre_hooks:
        hooks = module._forward_pre_hooks.values()
        pruned = [f"prune.remove(layer, {h._tensor_name!r})" for h in hooks if isinstance(h, prune.BasePruningMethod)]
        raise NoRuleError(
            f"{name} has forward hooks or pre-hooks, which can change its output, expected none: remove them"
            + (f"; those of torch.nn.utils.prune by {' and '.join(pruned)}" if pruned else "")
        )
    if vars(module).get("_compiled_call_impl") is not None:
        raise NoRuleError(
            f"{name} has a _compiled_call_impl, which replaces its forward pass, expected none: take the module as "
            "it was before .compile(), or set that attribute to None"
        )
    if has_global_hooks():
        raise NoRuleError(
            f"global forward hooks are installed, which can change the output of {name}, expected none: remove them"
        )


def _refuse_methods(kind: type[nn.Module], name: str) -> None:
    for base in kind.__mro__[:-1]:
        known = _METHODS.get(base)
        if known is not None and (now := methods(base)) != known:
            changed = sorted(key for key in {*known, *now} if known.get(key) is not now.get(key))
            raise NoRuleError(
                f"the class {type_name(base)}, which {name} is or derives from, has methods that were replaced after "
                f"its rule was registered, {', '.join(changed)}; expected the original ones: make it a subclass with "
                "its own rule"
            )


def _refuse_weights(module: nn.Module, name: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise NoRuleError(f"{name}: expected a module in Python, got TorchScript: pass the network it was made from")
    own = vars(module)
    for key in ("_parameters", "_buffers", "_modules"):
        if type(own[key]) not in (dict, OrderedDict):
            raise NoRuleError(f"{name}: expected {key!r} as torch's own dict, got a {type_name(type(own[key]))}")
    held = {**own["_parameters"], **own["_buffers"]}
    names = [*own["_parameters"], *own["_buffers"], *own["_modules"]]
    if hidden := sorted(key for key in names if key in own or hasattr(type(module), key) or names.count(key) > 1):
        raise NoRuleError(f"{name} has an attribute that hides its own {hidden[0]!r}, expected none: delete it")
    if unstored := sorted(own["_non_persistent_buffers_set"] & own["_parameters"].keys()):
        raise NoRuleError(f"{name}: expected parameters that are stored, got {unstored[0]!r} marked as a buffer")
    for key, value in (*held.items(), *own.items()):
        if not isinstance(value, Tensor):
            continue
        if type(value) not in (Tensor, nn.Parameter):
            got = f"a {type_name(type(value))}, whose operations are its own: replace it by a torch.Tensor"
        elif value.is_meta:
            got = "one on the meta device, which holds no numbers: load it first"
        elif value.layout is not torch.strided:
            got = f"one of layout {value.layout}: replace it by its .to_dense()"
        elif value.is_quantized:
            got = f"one of dtype {value.dtype}: replace it by its .dequantize()"
        elif hidden := sorted(attribute for attribute in vars(value) if hasattr(Tensor, attribute)):
            got = f"one with an attribute {hidden[0]!r} that hides torch's own: delete it"
        else:
            continue
        raise NoRuleError(f"{name}: expected {key!r} as an ordinary dense tensor, got {got}")


# Types that wrap a network, and the attribute that holds it; by name, as some are slow to import.
_WRAPPERS = {
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
}


def refuse_wrapper(module: object, function: str) -> None:
    """Refuse lazy modules before their first batch, and wrappers, with the attribute that holds the network."""
    if isinstance(module, LazyModuleMixin):
        got = f"{type_name(type(module))} before its first batch"
        raise NoRuleError(f"{function}: expected known weights, got {got}: run the network once")
    for kind in type(module).__mro__:
        if attribute := _WRAPPERS.get(type_name(kind)):
            raise NoRuleError(
                f"{function}: expected the network itself, got {type_name(type(module))}, which wraps it: pass its "
                f".{attribute}"
            )
