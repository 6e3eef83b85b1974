"""A network whose forward pass is rebuilt as a graph of 1-Lipschitz parts: joins and averages included."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError
from lipkit.layers import Family
from lipkit.layers.export import filled
from lipkit.layers.structure import ConvexSum, ScaledAvgPool2d
from lipkit.lowering import lipschitz
from lipkit.models.constrained import Converter
from lipkit.modules import (
    Add,
    Affine,
    Concatenate,
    EnlargeBilinear,
    Expand,
    Graph,
    MaxMin,
    Mean,
    Network,
    Shape,
    output_shape,
)
from lipkit.modules.activations import ACTIVATIONS
from lipkit.modules.graph import Join, Wiring, value_shapes


class Builder(Converter):
    """A `Converter` of a whole network: the graph of 1-Lipschitz parts near an exported one."""

    def __init__(self, family: Family, options: dict[str, Any], activation: str | None) -> None:
        super().__init__(family, options)
        self.activation, self.wiring = activation, Wiring()

    def network(self, plain: Network) -> nn.Sequential:
        """The parts one by one in their 1-Lipschitz forms. A builder makes one network."""
        value, shape = 0, plain.input_shape
        for name, module in plain.named_children():
            value, shape = self._place(module, name, (value,), shape)
        return nn.Sequential(*self.wiring.chain(value)).requires_grad_(True)

    def _place(self, module: nn.Module, name: str, values: tuple[int, ...], shape: Shape) -> tuple[int, Shape]:
        """The value that the new form of a module makes, and its shape."""
        if type(module) is Graph:
            return self._graph(module, name, values[0], shape)
        after = output_shape(module, shape)
        for part in self._parts(module, name, shape):
            values = (self.wiring.add(part, *values),)
        return values[0], after

    def _graph(self, graph: Graph, name: str, value: int, shape: Shape) -> tuple[int, Shape]:
        place, shapes = [value], value_shapes(graph, shape)
        for i, (node, read) in enumerate(zip(graph.nodes, graph.sources, strict=True)):
            given, path = tuple(place[v] for v in read), f"{name}.nodes.{i}"
            if isinstance(node, Join):
                value = given[0]
                for part in self._joined(node, path, len(read)):
                    value = self.wiring.add(part, *(given if isinstance(part, Join) else (value,)))
                place.append(value)
            else:
                place.append(self._place(node, path, given, shapes[read[0]])[0])
        return place[-1], shapes[-1]

    def _joined(self, node: Join, name: str, count: int) -> Iterable[nn.Module]:
        if type(node) is Add and count == 2 and node.signs == (1, 1):
            self.note(name, node, "ConvexSum", "share 0.5")
            return [ConvexSum()]
        if type(node) is Concatenate:
            self.note(name, node, "Concatenate", f"divided by the root of {count}")
            return [node, _gain(1 / math.sqrt(count))]
        return [self.keep(name, node, "its constant is that of several values together")]

    def _parts(self, module: nn.Module, name: str, shape: Shape) -> list[nn.Module]:
        kind = type(module)
        if isinstance(module, nn.ConvTranspose2d) and (blocks := _blocks(module)) is not None:
            return [*self._parts(blocks, name, shape), nn.PixelShuffle(module.stride[0])]
        if kind in (nn.Conv2d, nn.Linear):
            new = self.layer(name, module, {(shape[1], shape[2])} if kind is nn.Conv2d else set())
            if new is not module and isinstance(new.bias, Tensor) and not _same(new, module, shape):
                nn.init.zeros_(new.bias)  # biases scaled for norm 30 would saturate a layer of norm 1
            return [new]
        if kind in ACTIVATIONS and self.activation and len(shape) in (1, 3) and shape[0] % 2 == 0:
            return [MaxMin()]
        per_channel = kind is Affine and module.get_buffer("scale").ndim == 1
        if per_channel and name == "0":
            # Only the translation is kept: learnt scales could raise the norm above 1.
            self.note(name, module, "Affine", "its scales became 1")
            scale = module.get_buffer("scale")
            signs = torch.where(scale < 0, -1.0, 1.0).to(scale)
            return [Affine(signs, module.get_buffer("shift") / scale.abs().clamp_min(1e-3))]
        if per_channel:
            self.note(name, module, "nothing", "the layers around it have biases")
            return []
        if kind in (Expand, EnlargeBilinear):
            self.note(name, module, kind.__name__, "divided by the root of its factor")
            return [module, _gain(math.sqrt(math.prod(shape) / math.prod(output_shape(module, shape))))]
        pool = _window(module, shape)
        if pool is not None:
            self.note(name, module, "ScaledAvgPool2d", "rescaled")
            flat = [nn.Flatten()] if len(output_shape(module, shape)) == 1 else []
            return [ScaledAvgPool2d(pool), *flat]
        try:
            constant = float(lipschitz(module, shape).detach())
        except NoRuleError as error:
            self.keep(name, module, str(error))
        else:
            if constant > 1 + 1e-9:
                self.keep(name, module, f"its constant is {constant:.4g}")
        return [module]


def _same(new: nn.Module, old: nn.Module, shape: Shape) -> bool:
    """True if the outputs of two layers on random inputs differ by at most 1 % in norm."""
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(old.get_parameter("weight"))
    with torch.no_grad():
        expected = old(x)
        return float((new(x) - expected).norm()) <= 0.01 * float(expected.norm())


def _gain(factor: float) -> Affine:
    return Affine(torch.tensor([factor]), torch.zeros(1))


def _blocks(module: nn.ConvTranspose2d) -> nn.Conv2d | None:
    """The 1 x 1 convolution whose channels are the blocks of a transposed convolution; None if blocks overlap."""
    k = module.kernel_size[0]
    apart = module.kernel_size == module.stride == (k, k) and module.dilation == (1, 1) and module.groups == 1
    if not apart or module.padding != (0, 0) or module.output_padding != (0, 0):
        return None
    conv = nn.Conv2d(module.in_channels, module.out_channels * k * k, 1, bias=module.bias is not None)
    bias = None if module.bias is None else module.bias.repeat_interleave(k * k)
    return filled(conv.to(module.weight), module.weight.flatten(1).t()[:, :, None, None], bias)


def _window(module: nn.Module, shape: Shape) -> int | None:
    """The side of an average's windows if they are square, disjoint and cover the image; else None."""
    if len(shape) != 3:
        return None
    after = output_shape(module, shape)
    if type(module) is Mean and module.dims == (2, 3):
        return shape[1] if shape[1] == shape[2] else None
    if type(module) is nn.AdaptiveAvgPool2d or (
        type(module) is nn.AvgPool2d
        and module.kernel_size in (module.stride, (module.stride,) * 2)
        and module.padding in (0, (0, 0))
    ):
        sides = {shape[1] // after[1], shape[2] // after[2]}
        exact = (after[1] * max(sides), after[2] * max(sides)) == shape[1:]
        return sides.pop() if len(sides) == 1 and exact else None
    return None
