"""A trained network, whatever its forward pass, as one of constrained layers: joins and averages included."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError, OptionError
from lipkit.layers import families
from lipkit.layers.structure import ConvexSum, ScaledAvgPool2d
from lipkit.models.convert import Conversion, Converted, Kept, constrained, obstacle_of
from lipkit.modules import (
    Add,
    Affine,
    Concatenate,
    Enlarge,
    EnlargeBilinear,
    Graph,
    MaxMin,
    Mean,
    Shape,
    export,
    lipschitz,
    load,
    output_shape,
)
from lipkit.modules.activations import ACTIVATIONS
from lipkit.modules.graph import Join, Wiring, value_shapes


def rebuild(
    model: nn.Module,
    layer: str = "cayley",
    *,
    input_shape: Shape,
    activation: str | None = None,
    **options: Any,
) -> Conversion:
    r"""A network of constrained layers in the structure of ``model``, near its weights: 1-Lipschitz wherever it can be.

    The forward pass of ``model`` is traced and exported (`lipkit.export`), which folds batch normalisation into the
    convolution before it. Then, one by one:

    - convolutions and linear layers become those of the family (`lipkit.convert`);
    - sums become convex combinations with a learnable share (`lipkit.layers.ConvexSum`), concatenations of k values are
      divided by :math:`\sqrt k`, nearest-neighbour upsampling by the root of its factor;
    - averages over windows that do not overlap are rescaled to norm 1 (`lipkit.layers.ScaledAvgPool2d`);
    - a normalisation of the inputs becomes a translation, others that are left are dropped;
    - biases start at 0, but for a layer that computes the same as before.

    What is kept with a constant above 1 is reported, never silently accepted.

    Args:
        model: in evaluation mode; it is not changed.
        layer: acronym of a family, as `lipkit.convert`.
        input_shape: of one input, without the batch.
        activation: ``"maxmin"`` takes the place of scalar activations wherever the number of channels is even; None
            keeps them.
        options: keyword options of the family's convolution.

    Returns:
        A :class:`lipkit.models.Conversion`; its model is an ``nn.Sequential``, to be trained further.

    Raises:
        NoRuleError: what `lipkit.export` refuses.
        OptionError: an unknown family, option or activation.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
    ...     def forward(self, x): return torch.relu(x + self.norm(self.conv(x)))
    >>> result = rebuild(Block().eval(), "cayley", input_shape=(4, 8, 8))
    >>> print(result)
    2 layers converted, 0 kept that need a look
      converted  0.nodes.0: Conv2d -> CayleyConv2d, own start; zero padding became circular
      converted  0.nodes.1: Add -> ConvexSum, share 0.5
    >>> round(float(lipschitz(result.model, (4, 8, 8)).detach()), 6)
    1.0
    """
    family = families.get(layer)
    if family.name in ("sll", "cpl"):
        raise OptionError(f"layer: expected a family of bare linear maps, got {layer!r}: its layers hold activations")
    if activation not in (None, "maxmin"):
        raise OptionError(f"activation: expected 'maxmin' or None, got {activation!r}")
    plain = export(model, input_shape)
    builder = _Builder(family, activation, options)
    wiring, value, shape = Wiring(), 0, plain.input_shape
    for name, module in plain.named_children():
        value, shape = builder.place(wiring, module, name, (value,), shape)
    result = nn.Sequential(*wiring.chain(value))
    for parameter in result.parameters():
        parameter.requires_grad_(True)
    return Conversion(result, tuple(builder.converted), tuple(builder.kept))


def rebuilt(
    network: str,
    input_shape: Shape,
    classes: int | None = None,
    layer: str = "cayley",
    activation: str | None = "maxmin",
    **options: Any,
) -> nn.Module:
    """`rebuild` of a saved network, as recipes take it: ``model: {name: rebuild, options: {network: RUN/network}}``.

    Args:
        network: a folder of `lipkit.save`, or the name of a network of the package.
        input_shape, classes: of the data.
        layer, activation, options: as `rebuild`.

    Raises:
        OptionError: the network has other outputs. ShapeError, DataError: see `lipkit.export` and `lipkit.load`.
    """
    plain = load(network)
    outputs = output_shape(plain, plain.input_shape)
    if classes is not None and outputs != (classes,):
        raise OptionError(f"network {network}: expected {classes} outputs, got {outputs}")
    return rebuild(plain, layer, input_shape=tuple(input_shape), activation=activation, **options).model


class _Builder:
    def __init__(self, family: families.Family, activation: str | None, options: dict[str, Any]) -> None:
        self.family, self.activation, self.options = family, activation, options
        self.converted: list[Converted] = []
        self.kept: list[Kept] = []

    def place(
        self, wiring: Wiring, module: nn.Module, name: str, values: tuple[int, ...], shape: Shape
    ) -> tuple[int, Shape]:
        """The value that the new form of a module makes, and its shape."""
        if type(module) is Graph:
            return self._graph(wiring, module, name, values[0], shape)
        after = output_shape(module, shape)
        for part in self._parts(module, name, shape):
            values = (wiring.add(part, *values),)
        return values[0], after

    def _graph(self, wiring: Wiring, graph: Graph, name: str, value: int, shape: Shape) -> tuple[int, Shape]:
        place, shapes = [value], value_shapes(graph, shape)
        for i, (node, read) in enumerate(zip(graph.nodes, graph.sources, strict=True)):
            given, path = tuple(place[v] for v in read), f"{name}.nodes.{i}"
            if isinstance(node, Join):
                value = given[0]
                for part in self._joined(node, path, len(read)):
                    value = wiring.add(part, *(given if isinstance(part, Join) else (value,)))
                place.append(value)
            else:
                place.append(self.place(wiring, node, path, given, shapes[read[0]])[0])
        return place[-1], shapes[-1]

    def _joined(self, node: Join, name: str, count: int) -> Iterable[nn.Module]:
        if type(node) is Add and count == 2 and node.signs == (1, 1):
            self._note(name, node, "ConvexSum", "share 0.5")
            return [ConvexSum()]
        if type(node) is Concatenate:
            self._note(name, node, "Concatenate", f"divided by the root of {count}")
            return [node, _gain(1 / math.sqrt(count))]
        self.kept.append(Kept(name, type(node).__name__, "its constant is that of several values together"))
        return [node]

    def _note(self, name: str, old: nn.Module, new: str, start: str, note: str = "") -> None:
        self.converted.append(Converted(name, type(old).__name__, new, start, note))

    def _parts(self, module: nn.Module, name: str, shape: Shape) -> list[nn.Module]:
        kind = type(module)
        if isinstance(module, nn.ConvTranspose2d) and (blocks := _blocks(module)) is not None:
            return [*self._parts(blocks, name, shape), nn.PixelShuffle(module.stride[0])]
        if kind in (nn.Conv2d, nn.Linear):
            size = (shape[1], shape[2]) if kind is nn.Conv2d else None
            reason = obstacle_of(module, self.family, set() if size is None else {size})
            if reason is None:
                new, row = constrained(module, name, self.family, self.options, size)
                if isinstance(new.bias, Tensor) and not _same(new, module, shape):
                    nn.init.zeros_(new.bias)  # biases scaled for norm 30 would saturate a layer of norm 1
                self.converted.append(row)
                return [new]
            self.kept.append(Kept(name, kind.__name__, reason))
            return [module]
        if kind in ACTIVATIONS and self.activation and len(shape) in (1, 3) and shape[0] % 2 == 0:
            return [MaxMin()]
        if kind is Affine and name == "0":
            # A translation of the inputs: learnt scales have no place in a network of norm 1.
            self._note(name, module, "Affine", "its scales became 1")
            scale = module.get_buffer("scale")
            signs = torch.where(scale < 0, -1.0, 1.0).to(scale)
            return [Affine(signs, module.get_buffer("shift") / scale.abs().clamp_min(1e-3))]
        if kind is Affine:
            self._note(name, module, "nothing", "the layers around it have biases")
            return []
        if kind in (Enlarge, EnlargeBilinear):
            self._note(name, module, kind.__name__, "divided by the root of its factor")
            return [module, _gain(1 / math.sqrt(module.rows * module.cols))]  # type: ignore[operator]
        pool = _window(module, shape)
        if pool is not None:
            self._note(name, module, "ScaledAvgPool2d", "rescaled")
            flat = [nn.Flatten()] if len(output_shape(module, shape)) == 1 else []
            return [ScaledAvgPool2d(pool), *flat]
        try:
            constant = float(lipschitz(module, shape).detach())
        except NoRuleError as error:
            self.kept.append(Kept(name, kind.__name__, str(error)))
        else:
            if constant > 1 + 1e-9:
                self.kept.append(Kept(name, kind.__name__, f"its constant is {constant:.4g}"))
        return [module]


def _same(new: nn.Module, old: nn.Module, shape: Shape) -> bool:
    """True if a layer computes the same as the old one, within a hundredth."""
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(old.get_parameter("weight"))
    with torch.no_grad():
        expected = old(x)
        return float((new(x) - expected).norm()) <= 0.01 * float(expected.norm())


def _gain(factor: float) -> Affine:
    return Affine(torch.tensor([factor]), torch.zeros(1))


def _blocks(module: nn.ConvTranspose2d) -> nn.Conv2d | None:
    """The 1 x 1 convolution that makes the blocks which a transposed one writes, as channels; None if they overlap."""
    k = module.kernel_size[0]
    apart = module.kernel_size == module.stride == (k, k) and module.dilation == (1, 1) and module.groups == 1
    if not apart or module.padding != (0, 0) or module.output_padding != (0, 0):
        return None
    conv = nn.Conv2d(module.in_channels, module.out_channels * k * k, 1, bias=module.bias is not None)
    conv = conv.to(module.weight)
    with torch.no_grad():
        conv.weight.copy_(module.weight.flatten(1).t()[:, :, None, None])
        if conv.bias is not None and module.bias is not None:
            conv.bias.copy_(module.bias.repeat_interleave(k * k))
    return conv


def _window(module: nn.Module, shape: Shape) -> int | None:
    """The side of the square windows of an average that do not overlap and cover the image; None for others."""
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
