"""The common part of the readers of ONNX and .pt2 files: the network they make, checks of its sizes, its export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from lipkit.errors import DataError, NoRuleError, ShapeError, rewording
from lipkit.linalg.matrices import all_finite
from lipkit.lowering import export
from lipkit.lowering.tracing import flat
from lipkit.modules import Network
from lipkit.modules.network import first_floating

LARGEST = 2**28
"""Limit of the numbers stored in a file: 1 GB in float32."""
VALUES = 2**26
"""Limit of the numbers in all values of one sample: 256 MB in float32. An export needs several times as much."""


class ReadNetwork(nn.Module):
    """The graph of a file as calls of functions and modules, in topological order."""

    input_shape: tuple[int, ...] | None  # of one sample; None where the file leaves sizes open
    whole: tuple[int, ...] | None = None  # all sizes of the input, where the first, above 1, was taken for the batch

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        # step(network, values by name) -> made; the names of what is made; True if that is a list
        self.steps: list[tuple[Callable[[Any, dict[str, Any]], Any], list[str], bool]] = []
        self.names: dict[str, str] = {}  # stored tensors that are computed with -> the attributes that hold them
        self.source = self.result = ""

    def forward(self, x: Tensor) -> Any:
        values: dict[str, Any] = {name: getattr(self, attribute) for name, attribute in self.names.items()}
        values[self.source] = x
        for step, outputs, several in self.steps:
            made = step(self, values)
            values.update(zip(outputs, made, strict=True) if several else [(outputs[0], made)])
        return values[self.result]


def load(
    network: Any, path: str | Path, input_shape: tuple[int, ...] | None, box: tuple[float, float] | None = None
) -> Network:
    """The export of a network that was read from a file; its ``input_shape`` is None if the file leaves it open."""
    shape = network.input_shape or input_shape
    if shape is None or input_shape not in (None, shape):
        raise ShapeError(f"{path}: expected the input_shape {shape or 'of one sample'}, got {input_shape}")
    check_sizes(network, shape)
    if isinstance(network, Network) and box in (None, network.input_range):
        return network  # with its multipliers
    start = f"{path}: expected a network, got "
    with rewording(NoRuleError, start, Exception, named=True):  # of torch, about a graph that somebody else wrote
        plain = export(network, shape, box=box)
    if not all_finite(*plain.parameters(), *plain.buffers()):
        raise DataError(f"{path}: expected -inf in masks alone, got it as a factor")
    return plain


class Budget(TorchFunctionMode):
    """Limits memory: every call of torch runs on the meta device first, where it makes nothing.

    All values of one sample together may have `VALUES` numbers, where ``batch`` samples count as one. What is computed
    from the ``stored`` numbers of a file may have as many more.
    """

    def __init__(self, batch: int = 1, stored: int = 0) -> None:
        super().__init__()
        self.batch, self.stored, self.made, self.computed = batch, stored, 0, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [t for t in flat((args, kwargs)) if isinstance(t, Tensor)]
        moving = any(t.is_meta for t in given)
        name = getattr(func, "__name__", "a function")
        try:
            sizes: Any = fx.node.map_aggregate((args, kwargs if given else kwargs | {"device": "meta"}), _on_meta)
            first = func(*sizes[0], **sizes[1])
        except Exception as error:  # the call reads numbers, which meta tensors lack, or fails
            if "overflow" in str(error):
                raise DataError(f"{name}: expected values of at most {VALUES} numbers together, got more") from None
            if moving:
                raise
            first = None
        value = func(*args, **kwargs) if first is None else first
        held = {id(t) for t in flat((args, kwargs, sizes))}
        for t in flat(value):
            if not isinstance(t, Tensor) or id(t) in held:  # a call in place makes nothing
                continue
            if moving:
                n, rest = divmod(t.numel(), self.batch)
                self.made += t.numel() if rest else n
                if self.made > VALUES and self.batch > 1 and (rest or n % self.batch == 0):
                    raise NoRuleError(f"{name}: expected samples apart from each other, got values of several together")
            elif t._base is None and kwargs.get("device") != "meta":  # a view takes no memory
                self.computed += t.numel()
        for made, most in ((self.made, VALUES), (self.computed, VALUES + self.stored)):
            if made > most:
                raise DataError(f"{name}: expected values of at most {most} numbers together, got {made}")
        return value if moving or first is None else func(*args, **kwargs)  # now with numbers


def _on_meta(value: Any) -> Any:
    """A tensor on the meta device, without memory; anything else as it is."""
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) and not value.is_meta else value


def check_sizes(network: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Refuse stored numbers that are not finite, and networks that need more than ``VALUES`` numbers for one sample."""
    for name, t in (*network.named_parameters(), *network.named_buffers()):
        operand = name in getattr(network, "names", {}).values()  # -inf may hide entries there: the export sees to that
        if not all_finite(t.masked_fill(t.isneginf(), 0.0) if operand else t):
            raise DataError(f"expected finite numbers in the file, got infinite ones or NaN in {name}")
    dtype = first_floating(network).dtype
    try:
        with torch.no_grad(), Budget():
            network(torch.empty(1, *input_shape, device="meta", dtype=dtype))
    except Exception as error:
        if isinstance(error, DataError):  # the export will report all others
            raise
