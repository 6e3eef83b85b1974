"""Records the calls of a forward pass: every function that reads a value computed from the input.

A traced graph is the network only if both call the same functions with the same constants. The outputs for one batch do
not show that: code that asks for the type of its argument, or catches an error of the tracing, may go another way only
for the values of other batches.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lipkit.lowering.composed import COMPOSED
from lipkit.lowering.patched import einops_by_torch
from lipkit.lowering.tracing import METADATA, METADATA_METHODS, flat, is_leaf

# Attributes and methods that are not recorded, because tracing answers them itself.
_METADATA = {*METADATA, *METADATA_METHODS}
_SIZES = ("shape", "size", "numel", "nelement")
# Python's operations on whole numbers; `operator.index` cannot be recorded.
_OPERATORS = set(vars(int)) - set(vars(object)) - {"__getnewargs__", "__index__"}
_OPERATORS |= {f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "hash", "repr", "format")}
_OPERATORS = {name for name in _OPERATORS if callable(getattr(int, name))}


class Calls(TorchFunctionMode):
    """The calls with an argument that depends on the input ``x``, while the mode is on: ``made``, in order.

    Python's own operations on the batch size (arithmetic, comparisons, look-ups) count as calls. ``axes`` gives for
    each call the dimension of the batch in each tensor of its result; without it any size may be that of the batch.
    """

    def __init__(self, x: Tensor, axes: Sequence[Sequence[int | None]] | None = None) -> None:
        super().__init__()
        self.made: list[tuple[Any, ...]] = []
        self.shapes: list[list[tuple[int, ...]]] = []
        self._axes = axes or ()
        self._inside = 0
        self._size = type("int", (int,), {name: self._recorder(name) for name in _OPERATORS})
        # torch.Size shows its numbers without calling their methods.
        words = {f"__{name}__": self._recorder(f"__{name}__", tuple) for name in ("repr", "format", "hash")}
        self._shape = type("Size", (tuple,), {"numel": lambda sizes: math.prod(sizes), **words})
        # The dimension of the batch in each tensor that moves; -1 if it may be any.
        self._moving = WeakIdKeyDictionary()
        self._moving[x] = -1 if axes is None else 0

    @contextmanager
    def leaves(self, root: nn.Module) -> Iterator[None]:
        """Count each module of ``root`` with a rule as one call, and ignore the calls inside it."""
        with ExitStack() as hooks:
            hooks.enter_context(einops_by_torch(Tensor))
            for module in filter(is_leaf, root.modules()):
                hooks.enter_context(module.register_forward_pre_hook(lambda m, args: self._step(m, args, 1)))
                hooks.enter_context(module.register_forward_hook(lambda m, args, result: self._step(m, result, -1)))
            yield

    def _step(self, module: nn.Module, value: Any, into: int) -> None:
        self._inside += into > 0  # sizes are plain numbers inside
        if self._inside == 1:
            self._make((type(module).__name__, self._summary(value)), value, into < 0)
        self._inside -= into < 0

    def _make(self, call: tuple[Any, ...], value: Any, result: bool = True) -> None:
        known = self._axes[len(self.made)] if len(self.made) < len(self._axes) else ()
        self.made.append(call)
        self.shapes.append([tuple(t.shape) for t in tensors(value)])
        for t, axis in zip(tensors(value), known, strict=False):
            if result and t in self._moving:
                self._moving[t] = axis

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.einsum and isinstance(args[1], (tuple, list)):
            args = (args[0], *args[1])  # as it calls itself, and as a graph holds it
        given = tensors((args, kwargs))
        if not any(t in self._moving for t in given):
            return func(*args, **kwargs)
        recorded = not self._inside
        if recorded and func in COMPOSED:
            with self:
                return COMPOSED[func](*args, **kwargs)
        name = _name(func)
        told = name in _METADATA or (name == "len" and (self._moving[args[0]] or 0) > 0)  # not the batch's length
        what = None if told or not recorded else (name, self._summary(args), self._summary(kwargs))
        # Tensors of inference mode count no versions.
        before = [(t, t._version) for t in given if not t.is_inference()]
        result = func(*args, **kwargs)
        changed = [t for t, version in before if t._version != version]  # overwritten in place
        for t in (*tensors(result), *changed):
            self._moving.setdefault(t, -1)
        if what is not None:
            self._make((*what, self._summary(result)), result)
        if recorded and name in _SIZES:
            axis = self._moving[args[0]]
            sizes = [self._size(n) if axis in (i, -1) else n for i, n in enumerate(args[0].shape)]  # -1: any
            if isinstance(result, torch.Size):
                return self._shape(sizes)
            return sizes[(*args[1:], *kwargs.values())[0]] if name == "size" else self._size(result)
        return result

    def _recorder(self, name: str, kind: type = int) -> Callable[..., Any]:
        def method(number: Any, *args: Any) -> Any:
            self._make((name,), None)  # a call without tensors: the next one keeps its number
            return getattr(kind, name)(number, *args)

        return method

    def _summary(self, value: Any) -> Any:
        """A summary of arguments or results that is equal for two calls that compute the same."""
        value = value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value  # as a graph holds it
        if isinstance(value, Tensor):
            form = (value.dtype, tuple(value.shape))
            if value in self._moving or value.layout is not torch.strided or value.is_complex() or value.is_meta:
                return form
            # Two sums identify a constant without keeping it. None cancels, as that of centred weights would.
            numbers = value.detach().double()
            return (*form, float((numbers.abs() + numbers / 2).sum()), float(numbers.abs().sum()))
        if type(value) is self._size:
            return "the size of the batch"
        if isinstance(value, dict):
            return [(key, self._summary(item)) for key, item in value.items()]
        if isinstance(value, slice):
            return [self._summary(end) for end in (value.start, value.stop, value.step)]
        if isinstance(value, (tuple, list)):
            return [self._summary(item) for item in value]
        simple = isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device, type(None)))
        return value if simple else type(value).__name__


def _name(func: Callable[..., Any]) -> str:
    """Name of a function, a method (``add`` for ``__add__``) or the attribute that is read."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name).removeprefix("__").removesuffix("__")


def tensors(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    return [t for t in flat(value) if isinstance(t, Tensor)]


def alike(a: Any, b: Any) -> bool:
    """True if two records have the same calls, with numbers equal within 1e-6."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    if type(a) is float and type(b) is float:
        return a == b or (a != a and b != b) or math.isclose(a, b, rel_tol=1e-6)  # two NaN are alike
    return type(a) is type(b) and bool(a == b)


def difference(network: list[tuple[Any, ...]], graph: list[tuple[Any, ...]]) -> str | None:
    """The first difference between the calls of network and graph, in words; None if all agree."""
    for a, b in zip(network, graph, strict=False):
        if not alike(a, b):
            other = f"{b[0]} instead" if a[0] != b[0] else "other arguments"
            return f"the network calls {a[0]}, the graph {other}"
    if len(network) == len(graph):
        return None
    longer, who = (network, "network") if len(network) > len(graph) else (graph, "graph")
    return f"only the {who} calls {longer[min(len(network), len(graph))][0]}"
