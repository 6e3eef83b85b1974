"""Weights as integers: how a file of a network becomes four times smaller, and its bound stays proved.

A row of a weight (an output channel, a frequency) is stored as integers and one step, w = step * n. The product is one
rounded multiplication, so that every machine reads the same numbers; what is proved of a network is proved of these.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lipkit.errors import DataError

STEP = ".step"
"""Ending of the name under which the steps of a tensor are stored."""

_INTEGERS = {8: torch.int8, 16: torch.int16}
BITS = tuple(_INTEGERS)

# Smaller tensors (biases, scales) stay as they are: there is nothing to gain.
_SMALLEST = 1024


def to_integers(tensors: Mapping[str, Tensor], bits: int) -> dict[str, Tensor]:
    """Round the large tensors to integers of ``bits`` bits, row by row.

    n = round(w / step), step = max |row| / (2^(bits-1) - 1): an error of at most step / 2 for each weight.

    Args:
        tensors: by name. Those of at least two dimensions and 1,024 finite floating numbers are rounded; a row is an
            index of the first dimension. All others stay.
        bits: 8 or 16.

    Returns:
        The tensors, each rounded one as integers, with its steps (rows,) under its name and ``.step``.

    >>> stored = to_integers({"weight": torch.randn(32, 32), "bias": torch.zeros(32)}, 8)
    >>> {name: (t.dtype, tuple(t.shape)) for name, t in stored.items()}
    {'weight': (torch.int8, (32, 32)), 'weight.step': (torch.float32, (32,)), 'bias': (torch.float32, (32,))}
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        rows = tensor.reshape(len(tensor), -1) if tensor.ndim > 1 else tensor[:, None]
        if tensor.ndim < 2 or tensor.numel() < _SMALLEST or not bool(tensor.isfinite().all()):
            stored[name] = tensor
            continue
        step = rows.abs().amax(1) / (2 ** (bits - 1) - 1)
        # A row of zeros has no step of its own; any serves. The same holds where the division underflows.
        step = torch.where(step > 0, step, torch.ones_like(step))
        stored[name] = (rows / step[:, None]).round().to(_INTEGERS[bits]).reshape(tensor.shape)
        stored[name + STEP] = step
    return stored


def from_integers(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that `to_integers` stored, rounded: w = step * n in the dtype of the steps.

    Raises:
        DataError: integers without steps, or steps that are not one positive finite number for each row.

    >>> w = torch.randn(32, 32)
    >>> bool(((from_integers(to_integers({"w": w}, 16))["w"] - w).abs() <= w.abs().amax(1, True) / 65000).all())
    True
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if tensor.dtype not in _INTEGERS.values():
            if not (name.endswith(STEP) and name.removesuffix(STEP) in stored):
                tensors[name] = tensor
            continue
        step = stored.get(name + STEP)
        rows = (len(tensor),) if tensor.ndim else ()
        good = step is not None and step.is_floating_point() and tuple(step.shape) == rows and tensor.ndim > 1
        if step is None or not good or not bool((step.isfinite() & (step > 0)).all()):
            found = "none" if step is None else f"{step.dtype} of shape {tuple(step.shape)}"
            raise DataError(f"{name}: expected a positive finite step for each row of its integers, got {found}")
        tensors[name] = tensor.to(step.dtype) * step.reshape(-1, *[1] * (tensor.ndim - 1))
    return tensors
