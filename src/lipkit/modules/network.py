"""The result of an export: a chain of plain modules for one input shape."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import ShapeError
from lipkit.linalg.transforms import is_empty, with_zeros
from lipkit.modules.parametrised import options_of_python
from lipkit.shown import LINES, preformatted, screen


def flatten(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Tensor | None]]:
    """The chain without nesting and identities; each module with its multiplier, if it has one."""
    flat: list[tuple[nn.Module, Tensor | None]] = []
    for module in modules:
        if isinstance(module, Network):
            flat.extend((child, module.multiplier(i)) for i, child in enumerate(module))
        elif type(module) is nn.Sequential:
            flat.extend(flatten(module))
        elif type(module) is not nn.Identity:
            flat.append((module, None))
    return flat


def checked_shape(input_shape: Iterable[int]) -> tuple[int, ...]:
    """The shape as a tuple of positive sizes."""
    try:
        sizes = [*input_shape]
        shape = () if bool in map(type, sizes) else tuple(map(operator.index, sizes))  # True is an integer to Python
    except TypeError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ShapeError(
            f"input_shape: expected positive sizes without the batch, such as (3, 32, 32), got {input_shape}"
        )
    return shape


def first_floating(module: nn.Module) -> Tensor:
    """The first floating parameter or buffer, for its dtype and device; ``torch.zeros(())`` if there is none."""
    held = (*module.parameters(), *module.buffers())
    return next((t for t in held if t.is_floating_point()), torch.zeros(()))


class Network(nn.Sequential):
    """A constant network of plain modules: what is evaluated, certified, attacked and shipped.

    Chains inside are flattened and identities dropped, so the last module of a classifier is its last linear layer.
    It is in evaluation mode, nothing in it asks for a gradient or works in place, and options that are scalars of numpy
    become Python's.

    Args:
        modules: plain modules, applied in order.
        input_shape: shape of one input, without the batch; another one raises ``ShapeError``.
        multipliers: for activations between linear layers, by index in the flat chain: positive diagonals ``(n,)`` of
            the LMI (``lipkit.bounds.lmi``) that bounds the whole run of linear layers; at a `Graph` those of all its
            activations, one after the other. They travel with the network and are a claim that is checked, never
            trusted.

    Attributes:
        input_range: (low, high) of every entry of the inputs that the network was made for, such as (0, 1) of images;
            None if unknown. Certificates refuse inputs outside. It is stored, but no part of `lipkit.modules.sha256`.

    >>> net = Network([nn.Flatten(), nn.Sequential(nn.ReLU(), nn.Identity())], (1, 2, 2))
    >>> len(net), net(torch.ones(3, 1, 2, 2)).shape
    (2, torch.Size([3, 4]))
    """

    input_range: tuple[float, float] | None = None

    def __init__(
        self,
        modules: Iterable[nn.Module],
        input_shape: tuple[int, ...],
        multipliers: Mapping[int, Tensor] | None = None,
    ) -> None:
        flat = flatten(modules)
        super().__init__(*(module for module, _ in flat))
        self.input_shape = checked_shape(input_shape)
        given = {i: m for i, (_, m) in enumerate(flat) if m is not None} | dict(multipliers or {})
        for i, values in sorted(given.items()):
            self.carry(i, values)
        for module in self.modules():
            vars(module).update(options_of_python(module))
            if hasattr(module, "inplace"):
                setattr(module, "inplace", False)  # noqa: B010
        self.requires_grad_(False)
        self.eval()

    def carry(self, index: int, values: Tensor) -> None:
        """Set the multiplier of the activation at ``index``. A list of numbers becomes float64."""
        values = values if isinstance(values, Tensor) else torch.as_tensor(values, dtype=torch.float64)
        if not 0 <= index < len(self) or values.ndim != 1:
            shape = tuple(values.shape)
            raise ShapeError(f"multiplier {index}: expected shape (n,) at an index below {len(self)}, got {shape}")
        device = next(self.parameters(), values).device
        self.register_buffer(f"multiplier{index}", values.detach().to(device, copy=True))

    def multiplier(self, index: int) -> Tensor | None:
        """The multiplier of the module at ``index``, if it has one."""
        return self._buffers.get(f"multiplier{index}")

    def multipliers(self) -> dict[int, Tensor]:
        """Every multiplier, by index in the chain."""
        found = {i: self.multiplier(i) for i in range(len(self))}
        return {i: m for i, m in found.items() if m is not None}

    def __getitem__(self, index: slice | int) -> Any:
        # A part of the chain has another input shape: it is an ordinary Sequential.
        modules = list(self)[index]
        return nn.Sequential(*modules) if isinstance(modules, list) else modules

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.input_shape:
            raise ShapeError(f"expected input of shape (B, {str(self.input_shape)[1:-1]}), got {tuple(x.shape)}")
        if is_empty(x):
            return with_zeros(self, x)
        for module in self:
            x = module(x)
        return x

    def extra_repr(self) -> str:
        return f"input_shape={self.input_shape}"

    def __str__(self) -> str:
        """The modules one below the other, at most a screen of them, and where multipliers are claimed."""
        rows = []
        for i, module in enumerate(self):
            first, *rest = repr(module).splitlines()
            rows += [f"{i:>4} {first}", *(f"     {line}" for line in rest)]
        if len(rows) > LINES - 2:
            half = (LINES - 3) // 2
            rows = [*rows[:half], f"     ... {len(rows) - 2 * half} lines more: repr() has all", *rows[-half:]]
        numbers = sum(t.numel() for t in self.state_dict().values())
        head = f"Network of {len(self)} modules, {numbers:,} constant numbers, for inputs of shape {self.input_shape}"
        head += "" if self.input_range is None else f" in [{self.input_range[0]:g}, {self.input_range[1]:g}]"
        claim = f"multipliers claimed at {', '.join(map(str, self.multipliers()))}: checked when the network is proved"
        return screen("\n".join([head, *rows, *([claim] if self.multipliers() else [])]))

    def _repr_html_(self) -> str:
        return preformatted(str(self))
