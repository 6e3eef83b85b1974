"""The end of reading a network from an ONNX or a .pt2 file: sizes that fit into memory, and its export."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lipkit.errors import DataError, ShapeError
from lipkit.modules import Network, export

LARGEST = 2**28
"""Numbers of one value of one sample: 1 GB in float32."""


def load(
    network: Any, path: str | Path, input_shape: tuple[int, ...] | None, box: tuple[float, float] | None = None
) -> Network:
    """The export of a network that was read from a file and says its ``input_shape``, or None.

    Raises:
        DataError: a value of more than ``LARGEST`` numbers.
        ShapeError: no ``input_shape``, or another one than the file says.
    """
    shape = network.input_shape or input_shape
    if shape is None or input_shape not in (None, shape):
        raise ShapeError(f"{path}: expected the input_shape {shape or 'of one sample'}, got {input_shape}")
    check_sizes(network, shape)
    return export(network, shape, box=box)


class _Sizes(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        if isinstance(value, Tensor):
            _check_size(value, getattr(func, "__name__", "a function"))
        return value


def _check_size(value: Tensor, name: str) -> None:
    if value.numel() > LARGEST:
        raise DataError(f"{name}: expected values of at most {LARGEST} numbers, got shape {tuple(value.shape)}")


def check_sizes(network: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Refuse a network of which one value has more than ``LARGEST`` numbers, before memory is taken for it.

    Raises:
        DataError: such a value, by the function that makes it.
    """
    held = (*network.parameters(), *network.buffers())
    # Tensors without memory: shapes alone.
    memo: dict[int, Any] = {}
    for t in held:
        shape = torch.empty_like(t, device="meta")
        memo[id(t)] = nn.Parameter(shape, requires_grad=False) if isinstance(t, nn.Parameter) else shape
    twin = copy.deepcopy(network, memo)
    like = next((t.dtype for t in held if t.is_floating_point()), torch.float32)
    try:
        x = torch.empty(1, *input_shape, device="meta", dtype=like)
        _check_size(x, "the input")
        with torch.no_grad(), _Sizes():
            twin(x)
    except DataError:
        raise
    except Exception:  # found, and said, where the network runs
        return
