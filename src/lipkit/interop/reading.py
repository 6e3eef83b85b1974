"""The end of reading a network from an ONNX or a .pt2 file: sizes that fit into memory, and its export."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lipkit.errors import DataError, LipkitError, NoRuleError, ShapeError, first_line, lacks_memory
from lipkit.lowering import export
from lipkit.modules import Network

LARGEST = 2**28
"""Numbers that a file may store, 1 GB in float32."""
VALUES = 2**26
"""Numbers of all values that a network makes of one sample: 256 MB in float32, of which an export takes several."""


def load(
    network: Any, path: str | Path, input_shape: tuple[int, ...] | None, box: tuple[float, float] | None = None
) -> Network:
    """The export of a network that was read from a file and says its ``input_shape``, or None.

    Raises:
        DataError: see `check_sizes`.
        NoRuleError: the graph has no plain form.
        ShapeError: no ``input_shape``, or another one than the file says.
    """
    shape = network.input_shape or input_shape
    if shape is None or input_shape not in (None, shape):
        raise ShapeError(f"{path}: expected the input_shape {shape or 'of one sample'}, got {input_shape}")
    check_sizes(network, shape)
    try:
        return export(network, shape, box=box)
    except Exception as error:  # of torch, about a graph that somebody else wrote
        if isinstance(error, LipkitError) or lacks_memory(error):
            raise
        raise NoRuleError(f"{path}: expected a network, got {type(error).__name__}: {first_line(error)}") from error


class _Sizes(TorchFunctionMode):
    made = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        self.made += value.numel() if isinstance(value, Tensor) else 0
        if self.made > VALUES:
            name = getattr(func, "__name__", "a function")
            raise DataError(f"{name}: expected values of at most {VALUES} numbers together, got {self.made}")
        return value


def check_sizes(network: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Refuse a network whose values have more than ``VALUES`` numbers, before memory is taken for them.

    Raises:
        DataError: so many, by the function that makes them; a stored number that is infinite or NaN.
    """
    held = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    for name, t in held.items():
        if not t.isfinite().all():
            raise DataError(f"expected finite numbers in the file, got infinite ones or NaN in {name}")
    # Tensors without memory: shapes alone.
    memo: dict[int, Any] = {}
    for t in held.values():
        shape = torch.empty_like(t, device="meta")
        memo[id(t)] = nn.Parameter(shape, requires_grad=False) if isinstance(t, nn.Parameter) else shape
    twin = copy.deepcopy(network, memo)
    like = next((t.dtype for t in held.values() if t.is_floating_point()), torch.float32)
    try:
        with torch.no_grad(), _Sizes():
            twin(torch.empty(1, *input_shape, device="meta", dtype=like))
    except DataError:
        raise
    except Exception:  # found, and said, where the network runs
        return
