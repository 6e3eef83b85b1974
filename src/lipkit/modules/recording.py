"""Records the calls of a network on the way from its input to its output: every function that reads a value of them.

A traced graph is the network only if both call the same functions with the same constants. The outputs for one batch do
not show that: code that asks for the type of its argument, or catches the error of the tracing, may do nothing unusual
for the values of that batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lipkit.modules.tracing import METADATA, METADATA_METHODS

# Tracing answers these itself.
_METADATA = {*METADATA, *METADATA_METHODS, "len"}


class Calls(TorchFunctionMode):
    """The calls with an argument that depends on ``x``, while the mode is on: ``made``, in order.

    >>> x = torch.ones(2)
    >>> with Calls(x) as calls:
    ...     _ = (torch.zeros(2) + 1) * x
    >>> [name for name, *_ in calls.made]
    ['mul']
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.made: list[tuple[Any, ...]] = []
        self._moving = WeakIdKeyDictionary()
        self._moving[x] = True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors((args, kwargs))
        if not any(t in self._moving for t in given):
            return func(*args, **kwargs)
        name = _name(func)
        what = None if name in _METADATA else (name, self._summary(args), self._summary(kwargs))
        before = [t._version for t in given]
        result = func(*args, **kwargs)
        changed = [t for t, version in zip(given, before, strict=True) if t._version != version]
        for t in (*tensors(result), *changed):
            self._moving[t] = True
        if what is not None:
            self.made.append((*what, self._summary(result)))
        return result

    def _summary(self, value: Any) -> Any:
        """Of arguments and results: what two calls that compute the same have in common."""
        if isinstance(value, Tensor):
            form = (value.dtype, tuple(value.shape))
            if value in self._moving or value.layout is not torch.strided or value.is_complex() or value.is_meta:
                return form
            # Sums of a constant tell it from another one.
            numbers = value.detach().double()
            return (*form, float(numbers.sum()), float(numbers.abs().sum()))
        if isinstance(value, dict):
            return [(key, self._summary(item)) for key, item in value.items()]
        if isinstance(value, slice):
            return [self._summary(end) for end in (value.start, value.stop, value.step)]
        if isinstance(value, (tuple, list)):
            return [self._summary(item) for item in value]
        simple = isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device, type(None)))
        return value if simple else type(value).__name__


def _name(func: Callable[..., Any]) -> str:
    """Of a function, a method (operators without their underscores), or the attribute that is read."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name).removeprefix("__").removesuffix("__")


def tensors(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors(item)] if isinstance(value, (tuple, list)) else []


def alike(a: Any, b: Any) -> bool:
    """True if two records are of the same calls, numbers within rounding."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    if type(a) is float and type(b) is float:
        return a == b or (a != a and b != b) or math.isclose(a, b, rel_tol=1e-6)
    return type(a) is type(b) and bool(a == b)


def difference(network: list[tuple[Any, ...]], graph: list[tuple[Any, ...]]) -> str | None:
    """The first call of the network that is not that of the graph, in words; None if all are."""
    for a, b in zip(network, graph, strict=False):
        if not alike(a, b):
            other = f"{b[0]} instead" if a[0] != b[0] else "other arguments"
            return f"the network calls {a[0]}, the graph {other}"
    if len(network) == len(graph):
        return None
    longer, who = (network, "network") if len(network) > len(graph) else (graph, "graph")
    return f"only the {who} calls {longer[min(len(network), len(graph))][0]}"
