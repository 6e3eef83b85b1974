"""``convert``: the constrained counterpart of a network, and a report of the layers without one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lipkit.errors import LipkitError, NoRuleError, OptionError, ShapeError, rewording
from lipkit.layers import Family, families
from lipkit.layers.export import filled
from lipkit.layers.structure import ConvexSum, ScaledAvgPool2d
from lipkit.lowering import export, lipschitz
from lipkit.lowering.copies import computed_tensors
from lipkit.models.constrained import Converted, Converter, Kept
from lipkit.models.settle import replaced, settled, tried
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
    load,
    output_shape,
)
from lipkit.modules.activations import ACTIVATIONS
from lipkit.modules.graph import Join, Wiring, value_shapes
from lipkit.modules.guarding import refuse_wrapper
from lipkit.modules.plain import bounded
from lipkit.modules.pooling import pair

# SyncBatchNorm inherits from none of the others.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Conversion:
    """The new model that `convert` returns, and what happened to each layer of the old one."""

    model: nn.Module
    converted: tuple[Converted, ...]
    kept: tuple[Kept, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} layers converted, {len(self.kept)} kept that need a look"]
        for row in self.converted:
            note = f"; {row.note}" if row.note else ""
            lines.append(f"  converted  {row.name}: {row.old} -> {row.new}, {row.start}{note}")
        lines += [f"  kept       {row.name}: {row.kind}: {row.reason}" for row in self.kept]
        return "\n".join(lines)


def convert(
    model: nn.Module,
    layer: str | None = "cayley",
    *,
    input_shape: Shape | None = None,
    forward: Literal["keep", "rebuild"] = "keep",
    activation: Literal["maxmin"] | None = None,
    skip: Collection[str] = (),
    box: tuple[float, float] | None = None,
    **options: Any,
) -> Conversion:
    r"""A copy of ``model`` whose convolutions and linear layers belong to one family, with weights near the old ones.

    The copy should be trained further. In it, zero padding is circular, a stride is an invertible downsampling (of an
    image that it divides), and norms are at most 1. The report names layers without a bound of 1.

    =================== ================================================================================================
    forward="keep"      replaces ``nn.Conv2d`` and ``nn.Linear`` in place; all other modules stay as they are. A module
                        used twice is replaced once; two modules that tied a weight get two.
    forward="rebuild"   makes an ``nn.Sequential`` of the exported network, 1-Lipschitz wherever possible. Sums become
                        convex combinations with a learnable weight (`lipkit.layers.ConvexSum`), concatenations of k
                        values are divided by :math:`\sqrt k`, enlarged images by the root of the factor; averages
                        over windows that do not overlap get norm 1 (`lipkit.layers.ScaledAvgPool2d`). A normalisation
                        of the inputs becomes a translation, all others are dropped. Biases start at 0, except in a
                        layer that still computes the same.
    layer=None          replaces no layer by a constrained one; it only makes the plain layers of the next paragraph.
    =================== ================================================================================================

    With ``input_shape``, parametrised layers (``torch.nn.utils.parametrizations`` or your own), layers with the older
    ``torch.nn.utils.spectral_norm``, and layers of deel-torchlip or orthogonium become plain layers with the weights
    that they have in evaluation mode. Each of them, and the whole network, is compared with the original on one random
    input. So with ``layer=None`` such a network stays the same function, and can be bounded, exported and certified.

    **Guarantee.** None about the whole: ask ``lipkit.lipschitz`` or ``lipkit.analyze`` of the result. Each converted
    layer has what its family claims.

    Args:
        model: any module; it is not changed. In evaluation mode if its forward pass is rebuilt.
        layer: acronym of a family (``lipkit.layers.families``); 'sll' and 'cpl' contain their activation and cannot
            replace a bare linear layer, 'sandwich' does so without its activation.
        input_shape: of one input, without the batch; optional if the forward pass is kept. If given, one evaluation
            finds the image size at each convolution, convolutions without a counterpart for it are kept, and output
            shapes are compared.
        forward: whether the forward pass is kept or rebuilt.
        activation: with ``forward="rebuild"``, ``"maxmin"`` replaces scalar activations of even numbers of channels.
        skip: with ``forward="keep"``, names of modules to leave alone, with all inside them.
        box: with ``forward="rebuild"``, the range of the inputs, which limits products of values as in `lipkit.export`.
        options: keyword options of the family's convolution, for instance ``orthogonalize="bjorck"`` of LOT.

    Returns:
        The new model and the report to ``print``; the model is in evaluation mode if ``layer`` is None.

    Raises:
        NoRuleError: a model that wraps the network, such as DataParallel: convert what it wraps. With ``layer=None``, a
            layer whose plain form computes something else. With ``forward="rebuild"``, what `lipkit.export` refuses.
        OptionError: an unknown family or option, a name in ``skip`` that the model does not have.
        ShapeError: a result that does not accept ``input_shape``, or ends in another shape.

    >>> conv = nn.Conv2d(3, 8, 3, padding=1)
    >>> net = nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    >>> print(convert(net, "lot", input_shape=(3, 8, 8)))
    2 layers converted, 1 kept that need a look
      converted  0: Conv2d -> LotConv2d, nearest; zero padding became circular
      converted  4: Linear -> OrthogonalLinear, nearest
      kept       1: BatchNorm2d: its constant depends on its statistics: leave it out, or use forward="rebuild"
    """
    for module in model.modules():
        refuse_wrapper(module, "convert")
    if layer is not None and families.get(layer).name in ("sll", "cpl"):
        raise OptionError(
            f"layer: expected a family of bare linear maps, got {layer!r}, whose layers contain their activation"
        )
    if forward not in ("keep", "rebuild"):
        raise OptionError(f"forward: expected 'keep' or 'rebuild', got {forward!r}")
    if activation not in (None, "maxmin"):
        raise OptionError(f"activation: expected 'maxmin' or None, got {activation!r}")
    if isinstance(skip, str):  # its letters would be taken for names
        raise OptionError(f"skip: expected a list of names, got {skip!r}")
    if unknown := sorted(set(skip) - {name for name, _ in model.named_modules()}):
        raise OptionError(f"skip: expected names of modules of the model, got {unknown}")
    rebuild = forward == "rebuild"
    if input_shape is None and (rebuild or layer is None):
        raise OptionError("input_shape: expected the shape of one input, to run the model on, got None")
    if layer is None and (rebuild or options):
        raise OptionError(f"layer: expected a family for forward={forward!r} and {dict(options)}, got None")
    if skip and rebuild:
        raise OptionError(f"skip: expected no names where the forward pass is rebuilt, got {sorted(skip)}")
    for name, value in (("activation", activation), ("box", box)):
        if value is not None and not rebuild:
            raise OptionError(f"{name}: expected None where the forward pass is kept, got {value!r}")

    def skipped(name: str) -> bool:
        return any(name == s or name.startswith(f"{s}.") for s in skip)  # the module, or one inside it

    if input_shape is None:
        plain, rows, errors = copy.deepcopy(model, computed_tensors(model)), list[Converted](), list[LipkitError]()
    else:
        plain, rows, errors = settled(model, input_shape, skipped)
    if layer is None:
        if errors:  # with a family the report names these layers
            raise errors[0]
        return Conversion(plain.eval(), tuple(rows), ())
    if rebuild and input_shape is not None:
        builder = Builder(families.get(layer), options, activation)
        made = builder.network(export(plain, input_shape, box=box))
        return Conversion(made, tuple(builder.converted), tuple(builder.kept))
    converter = Converter(families.get(layer), options)
    result = _constrained(plain, converter, input_shape, skipped)
    if input_shape is not None:
        wrong = "expected a model that gives its layers one input, by position, got "
        with rewording(OptionError, wrong, TypeError):
            shapes = [tuple(tried(each, input_shape)[0].shape) for each in (model, result)]
        if shapes[0] != shapes[1]:
            raise ShapeError(f"expected a converted model with outputs of shape {shapes[0]}, got {shapes[1]}")
    by_name = {row.name: row for row in (*rows, *converter.converted)}  # a settled layer may be converted, too
    return Conversion(result, tuple(by_name.values()), tuple(converter.kept))


def _constrained(
    model: nn.Module, converter: Converter, input_shape: Shape | None, skipped: Callable[[str], bool]
) -> nn.Module:
    """Replace the layers of the model in place, and return it."""
    sizes: dict[nn.Module, set[tuple[int, int]]] = {}
    if input_shape is not None:
        _, calls = tried(model, input_shape, [m for m in model.modules() if type(m) is nn.Conv2d])
        sizes = {conv: {(x.shape[-2], x.shape[-1]) for x, _ in seen} for conv, seen in calls.items()}
    new: dict[nn.Module, nn.Module] = {}
    for name, module in model.named_modules():
        if skipped(name):
            if isinstance(module, nn.Conv2d | nn.Linear):
                converter.keep(name, module, "skipped")
        elif type(module) in (nn.Conv2d, nn.Linear):
            new[module] = converter.layer(name, module, sizes.get(module, set()))
        elif (reason := _reason(module)) is not None:
            converter.keep(name, module, reason)
    return replaced(model, new)


def _reason(module: nn.Module) -> str | None:
    """Why the report lists a module that no family replaces; None if its constant stays at most 1 or needs a shape."""
    if isinstance(module, BATCH_NORMS):
        return 'its constant depends on its statistics: leave it out, or use forward="rebuild"'
    if parametrize.is_parametrized(module):
        return "it is parametrised: with input_shape, it becomes a plain layer first, if that computes the same"
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    leaf = not [*module.children()]  # a container counts only if it owns numbers
    if (leaf or own) and not bounded(type(module)):
        return "no Lipschitz rule: register one with lipkit.modules.lipschitz_rule, or replace it"
    with suppress(LipkitError):  # dropout in training, and what needs a shape
        if (leaf or own) and (reason := _above(module)) is not None:
            return reason
    free = own and type(module).__module__.startswith("torch.nn")
    return "no family replaces it: its constant may grow in training" if free else None


def _above(module: nn.Module, shape: Shape | None = None) -> str | None:
    """A module's constant, in words, if it is above 1 by more than rounding up adds."""
    constant = float(lipschitz(module, shape).detach())
    return f"its constant is {constant:.4g}" if constant > 1 + 1e-9 else None


def rebuild(
    network: str,
    input_shape: Shape,
    classes: int | None = None,
    layer: str = "cayley",
    activation: Literal["maxmin"] | None = "maxmin",
    **options: Any,
) -> nn.Module:
    """`convert` of a saved network with ``forward="rebuild"``; ``model: {name: rebuild, options: {...}}`` in a recipe.

    ``network`` is a folder of `lipkit.save`, or the name of a network of the package; it must have ``classes`` outputs.
    """
    plain = load(network)
    outputs = output_shape(plain, plain.input_shape)
    if classes is not None and outputs != (classes,):
        raise OptionError(f"network {network}: expected {classes} outputs, got {outputs}")
    shape = tuple(input_shape)
    return convert(plain, layer, input_shape=shape, forward="rebuild", activation=activation, **options).model


class Builder(Converter):
    """A `Converter` that rebuilds a whole exported network from 1-Lipschitz parts."""

    def __init__(self, family: Family, options: dict[str, Any], activation: str | None) -> None:
        super().__init__(family, options)
        self.activation, self.wiring = activation, Wiring()

    def network(self, plain: Network) -> nn.Sequential:
        """The network with every part in its 1-Lipschitz form. Call it once per builder."""
        value, shape = 0, plain.input_shape
        for name, module in plain.named_children():
            value, shape = self._place(module, name, (value,), shape), output_shape(module, shape)
        return nn.Sequential(*self.wiring.chain(value)).requires_grad_(True)

    def _place(self, module: nn.Module, name: str, values: tuple[int, ...], shape: Shape) -> int:
        """Wire the new form of a module to ``values``, the first of this ``shape``; return the number of its output."""
        if type(module) is Graph:
            place, shapes = [*values], value_shapes(module, shape)  # graph value -> new value
            for i, (node, read) in enumerate(zip(module.nodes, module.sources, strict=True)):
                given = tuple(place[v] for v in read)
                place.append(self._place(node, f"{name}.nodes.{i}", given, shapes[read[0]]))
            return place[-1]
        join = isinstance(module, Join)
        for part in self._joined(module, name, len(values)) if join else self._parts(module, name, shape):
            values = (self.wiring.add(part, *values),)  # a join comes first and takes all values
        return values[0]

    def _joined(self, node: nn.Module, name: str, count: int) -> list[nn.Module]:
        if type(node) is Add and count == 2 and node.signs == (1, 1):
            self.note(name, node, "ConvexSum", "weight 0.5")
            return [ConvexSum()]
        if type(node) is Concatenate:
            self.note(name, node, "Concatenate", f"divided by the root of {count}")
            return [node, _gain(1 / math.sqrt(count))]  # k values of norm 1 side by side have norm root k
        return [self.keep(name, node, "its constant is that of several values together")]

    def _parts(self, module: nn.Module, name: str, shape: Shape) -> list[nn.Module]:
        kind = type(module)
        if isinstance(module, nn.ConvTranspose2d) and (blocks := _blocks(module)) is not None:
            return [*self._parts(blocks, name, shape), nn.PixelShuffle(module.stride[0])]  # blocks do not overlap
        if kind in (nn.Conv2d, nn.Linear):
            new = self.layer(name, module, {(shape[1], shape[2])} if kind is nn.Conv2d else set())
            if new is not module and isinstance(new.bias, Tensor) and not _same(new, module, shape):
                nn.init.zeros_(new.bias)  # biases scaled for norm 30 would saturate a layer of norm 1
            return [new]
        if kind in ACTIVATIONS and self.activation and len(shape) in (1, 3) and shape[0] % 2 == 0:  # pairs of channels
            return [MaxMin()]
        if kind is Affine and module.get_buffer("scale").ndim == 1:  # one number for each channel
            if name != "0":
                self.note(name, module, "nothing", "the layers around it have biases")
                return []
            # Only the translation is kept: learnt scales could raise the norm above 1.
            self.note(name, module, "Affine", "its scales became 1")
            scale, shift = module.get_buffer("scale"), module.get_buffer("shift")
            return [Affine(torch.where(scale < 0, -1.0, 1.0).to(scale), shift / scale.abs().clamp_min(1e-3))]
        if kind in (Expand, EnlargeBilinear):
            self.note(name, module, kind.__name__, "divided by the root of its factor")
            return [module, _gain(math.sqrt(math.prod(shape) / math.prod(output_shape(module, shape))))]
        if (pool := _window(module, shape)) is not None:
            self.note(name, module, "ScaledAvgPool2d", "rescaled")
            flat = [nn.Flatten()] if len(output_shape(module, shape)) == 1 else []
            return [ScaledAvgPool2d(pool), *flat]
        try:
            reason = _above(module, shape)
        except NoRuleError as error:
            reason = str(error)
        return [module if reason is None else self.keep(name, module, reason)]


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
    bias = None if module.bias is None else module.bias.repeat_interleave(k * k)  # one bias for each pixel of a block
    return filled(conv.to(module.weight), module.weight.flatten(1).t()[:, :, None, None], bias)


def _window(module: nn.Module, shape: Shape) -> int | None:
    """The side of an average's windows if they are square, disjoint and cover the image; else None."""
    if len(shape) != 3:
        return None
    after = output_shape(module, shape)
    if type(module) is Mean and module.dims == (2, 3):
        return shape[1] if shape[1] == shape[2] else None
    sides: set[int] = set()  # of windows and their distances: one number if they are square and disjoint
    if type(module) is nn.AdaptiveAvgPool2d:
        sides = {shape[1] // after[1], shape[2] // after[2]}
    elif type(module) is nn.AvgPool2d and not any(pair(module.padding)):
        sides = {*pair(module.kernel_size), *pair(module.stride)}
    exact = len(sides) == 1 and (after[1] * max(sides), after[2] * max(sides)) == shape[1:]  # they cover the image
    return sides.pop() if exact else None
