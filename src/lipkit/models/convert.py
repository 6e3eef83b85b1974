"""``convert``: the constrained counterpart of an existing network, and a report of what has none.

Geometry comes last: which convolutions have a constrained counterpart of the same shapes, and with which kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.layers import families
from lipkit.models.nearest import start_near
from lipkit.modules.guarding import guard, refuse_wrapper
from lipkit.modules.registry import Shape, rules

# SyncBatchNorm inherits from none of the others.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Converted:
    """A layer that was replaced: its name, the old and the new type, and where the new one starts."""

    name: str
    old: str
    new: str
    start: str
    note: str = ""


@dataclass(frozen=True)
class Kept:
    """A layer that was kept although it is not known to be 1-Lipschitz, and why."""

    name: str
    kind: str
    reason: str


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
    layer: str = "cayley",
    *,
    input_shape: Shape | None = None,
    skip: Collection[str] = (),
    **options: Any,
) -> Conversion:
    """A copy of ``model`` whose ``nn.Conv2d`` and ``nn.Linear`` are layers of one family, near their old weights.

    Zero padding becomes circular padding, a stride becomes invertible downsampling (of an image that it divides), and
    norms become at most 1: the new network computes another function, meant to be trained further. Everything that
    is not such a layer is kept as it is; what is kept and not bounded by 1 is reported, never silently accepted. A
    module that is used twice is replaced once.

    **Guarantee.** None about the whole: ask ``lipkit.lipschitz`` or ``lipkit.analyze`` of the result. Each converted
    layer has what its family claims.

    Args:
        model: any module; it is not changed.
        layer: acronym of a family (``lipkit.layers.families``); 'sll' and 'cpl' contain their activation and cannot
            replace a bare linear layer, 'sandwich' does so without its activation.
        input_shape: of one input, without the batch. If given, the image size at each convolution is found by one
            evaluation of zeros, layers that do not accept it are kept, and the output shape is compared.
        skip: names of modules to leave alone, with all inside them (``"head"`` leaves ``head.0`` alone too).
        options: keyword options of the family's convolution, for instance ``orthogonalize="bjorck"`` of LOT.

    Returns:
        A :class:`Conversion`; ``print`` it.

    Raises:
        NoRuleError: a model that wraps the network, such as DataParallel: convert what it wraps.
        OptionError: an unknown family or option, a name in ``skip`` that the model does not have.
        ShapeError: with ``input_shape``, a result that does not accept it, or ends in another shape.

    >>> conv = nn.Conv2d(3, 8, 3, padding=1)
    >>> net = nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    >>> result = convert(net, "lot", input_shape=(3, 8, 8))
    >>> print(result)
    2 layers converted, 1 kept that need a look
      converted  0: Conv2d -> LotConv2d, nearest; zero padding became circular
      converted  4: Linear -> OrthogonalLinear, nearest
      kept       1: BatchNorm2d: its constant depends on its statistics: leave it out, or use lipkit.models.rebuild
    """
    family = families.get(layer)
    if family.name in ("sll", "cpl"):
        raise OptionError(
            f"layer: expected a family of bare linear maps, got {layer!r}, whose layers contain their activation"
        )
    for module in model.modules():
        refuse_wrapper(module, "convert")
    names = {name for name, _ in model.named_modules()}
    if unknown := sorted(set(skip) - names):
        raise OptionError(f"skip: expected names of modules of the model, got {unknown}")
    result = copy.deepcopy(model)
    sizes = _image_sizes(result, input_shape) if input_shape is not None else {}
    converted: list[Converted] = []
    kept: list[Kept] = []
    replaced: dict[int, nn.Module] = {}
    for name, module in list(result.named_modules()):
        if any(name == s or name.startswith(f"{s}.") for s in skip):
            if type(module) in (nn.Conv2d, nn.Linear):
                kept.append(Kept(name, type(module).__name__, "skipped"))
            continue
        reason = _refusal(module, family, sizes.get(id(module)))
        if reason is not None:
            kept.append(Kept(name, type(module).__name__, reason))
        elif type(module) in (nn.Conv2d, nn.Linear):
            seen = sizes.get(id(module), set())
            new, row = constrained(module, name, family, options, next(iter(seen)) if len(seen) == 1 else None)
            replaced[id(module)] = new.train(module.training)
            converted.append(row)
    result = _replace(result, replaced)
    if input_shape is not None:
        _compare(model, result, input_shape)
    return Conversion(result, tuple(converted), tuple(kept))


def constrained(
    module: nn.Module, name: str, family: families.Family, options: dict[str, Any], size: tuple[int, int] | None
) -> tuple[nn.Module, Converted]:
    """The layer of the family near a convolution or linear layer, and the row that reports it."""
    new = _build(module, family, options)
    start = start_near(new, _weight(module), size)
    _copy_bias(new, module)
    note = ""
    if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1) and module.padding_mode != "circular":
        note = f"{module.padding_mode.removesuffix('s')} padding became circular"
    return new, Converted(name, type(module).__name__, type(new).__name__, start, note)


def obstacle_of(module: nn.Module, family: families.Family, sizes: set[tuple[int, int]] | None) -> str | None:
    """The reason why no layer of the family replaces this convolution or linear layer, or None."""
    try:
        guard(module)
    except NoRuleError as error:
        return str(error)
    if not isinstance(module, nn.Conv2d):
        return None
    if (why := obstacle(module)) is not None:
        return why
    k, step = kernel_size(module), module.stride[0]
    for h, w in sorted(sizes or ()):
        if h % step or w % step:
            return f"the stride {step} does not divide its image of {h} x {w}"
        if not all(family.accepts(side, h // step, w // step) for side in k):
            return f"{family.name} accepts {family.sizes}, got a kernel of {k} for {h // step} x {w // step}"
    if not sizes and not all(family.accepts(side, side, side) for side in k):
        return f"{family.name} accepts {family.sizes}, got a kernel of {k}"
    return None


def _refusal(module: nn.Module, family: families.Family, sizes: set[tuple[int, int]] | None) -> str | None:
    """Why a module is kept and reported; None if it can be converted or needs no change."""
    kind = type(module)
    if kind in (nn.Conv2d, nn.Linear):
        return obstacle_of(module, family, sizes)
    if isinstance(module, BATCH_NORMS):
        return "its constant depends on its statistics: leave it out, or use lipkit.models.rebuild"
    own = any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))
    leaf = not any(True for _ in module.children())
    if (leaf or own) and not rules().get(kind, (False, False))[0]:
        return "no Lipschitz rule: register one with lipkit.modules.lipschitz_rule, or replace it"
    return None


def _weight(module: nn.Module) -> Tensor:
    if isinstance(module, nn.Conv2d):
        return unstrided_kernel(module)
    return module.get_parameter("weight").detach()


def _build(module: nn.Module, family: families.Family, options: dict[str, Any]) -> nn.Module:
    weight = module.get_parameter("weight")
    # Half precision cannot hold a constraint: such a layer becomes float32.
    dtype = weight.dtype if weight.dtype in (torch.float32, torch.float64) else torch.float32
    common: dict[str, Any] = {
        "bias": getattr(module, "bias", None) is not None,
        "device": weight.device,
        "dtype": dtype,
    }
    try:
        if isinstance(module, nn.Conv2d):
            bare = {"activation": None} if family.own_activation else {}
            return family.conv(
                module.in_channels,
                module.out_channels,
                kernel_size(module),
                stride=module.stride[0],
                **{**common, **bare, **options},
            )
        assert isinstance(module, nn.Linear)
        return family.last(module.in_features, module.out_features, **common)
    except TypeError as error:
        raise OptionError(f"expected options of the family {family.name!r}, got {sorted(options)} ({error})") from None


def _copy_bias(new: nn.Module, old: nn.Module) -> None:
    bias, target = getattr(old, "bias", None), getattr(new, "bias", None)
    if isinstance(bias, Tensor) and isinstance(target, Tensor) and bias.shape == target.shape:
        with torch.no_grad():
            target.copy_(bias)


def _replace(model: nn.Module, replaced: dict[int, nn.Module]) -> nn.Module:
    if id(model) in replaced:
        return replaced[id(model)]
    for module in list(model.modules()):
        # Not named_children, which names a child that is used twice only once.
        for name, child in list(module._modules.items()):
            if id(child) in replaced:
                setattr(module, name, replaced[id(child)])
    return model


def _evaluated(model: nn.Module, input_shape: Shape) -> Tensor:
    """The output for one input of zeros, in evaluation mode; modes are restored."""
    modes = [(module, module.training) for module in model.modules()]
    first = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    try:
        with torch.no_grad():
            out = model.eval()(torch.zeros(1, *input_shape, device=first.device, dtype=first.dtype))
    finally:
        for module, mode in modes:
            module.training = mode
    if not isinstance(out, Tensor):
        raise OptionError(f"expected a model that returns a tensor, got {type(out).__name__}")
    return out


def _image_sizes(model: nn.Module, input_shape: Shape) -> dict[int, set[tuple[int, int]]]:
    """Heights and widths that each convolution sees, by the module's id."""
    sizes: dict[int, set[tuple[int, int]]] = {}

    def watch(module: nn.Module) -> Callable[..., None]:
        def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            sizes.setdefault(id(module), set()).add((inputs[0].shape[-2], inputs[0].shape[-1]))

        return note

    handles = [m.register_forward_pre_hook(watch(m)) for m in model.modules() if type(m) is nn.Conv2d]
    try:
        _evaluated(model, input_shape)
    finally:
        for handle in handles:
            handle.remove()
    return sizes


def _compare(old: nn.Module, new: nn.Module, input_shape: Shape) -> None:
    """Raise unless both models end in the same shape."""
    shapes = [tuple(_evaluated(model, input_shape).shape) for model in (old, new)]
    if shapes[0] != shapes[1]:
        raise ShapeError(f"expected a converted model with outputs of shape {shapes[0]}, got {shapes[1]}")


def obstacle(conv: nn.Conv2d) -> str | None:
    """Why no layer of the library maps the same shapes as this convolution, or None.

    Constrained convolutions keep the image size, or divide it by an emulated stride s (the image must be a multiple
    of s): :math:`\\lfloor (H + 2p - k)/s \\rfloor + 1 = H/s` for all such H iff
    :math:`\\lfloor (2p - k)/s \\rfloor = -1` on both axes.

    >>> obstacle(nn.Conv2d(3, 8, 3, stride=2, padding=1)) is None
    True
    >>> obstacle(nn.Conv2d(3, 8, 3))
    'padding 0 with kernel_size 3 and stride 1 changes the image size, expected padding 1'
    """
    if conv.groups != 1:
        return f"groups={conv.groups}, expected 1"
    if conv.dilation != (1, 1):
        return f"dilation={conv.dilation}, expected (1, 1)"
    if len(set(conv.stride)) != 1:
        return f"stride={conv.stride}, expected the same on both axes"
    step = conv.stride[0]
    if isinstance(conv.padding, str):
        return (
            None if conv.padding == "same" or conv.kernel_size == (1, 1) else "padding='valid' changes the image size"
        )
    for k, p in zip(conv.kernel_size, conv.padding, strict=True):
        if (2 * p - k) // step != -1:
            return (
                f"padding {p} with kernel_size {k} and stride {step} changes the image size, "
                f"expected padding {max(0, (k - step + 1) // 2)}"
            )
    return None


def left_padding(conv: nn.Conv2d) -> tuple[int, int]:
    """Pixels before the first one on each axis: the tap that sits on the pixel itself.

    >>> left_padding(nn.Conv2d(1, 1, 5, padding="same")), left_padding(nn.Conv2d(1, 1, 3, padding=1))
    ((2, 2), (1, 1))
    """
    if isinstance(conv.padding, str):
        rows, cols = ((k - 1) // 2 for k in conv.kernel_size)
        return rows, cols
    rows, cols = conv.padding
    return int(rows), int(cols)


def kernel_size(conv: nn.Conv2d) -> tuple[int, int]:
    """Taps that the same convolution has after downsampling by its stride (odd, so that the centre is a pixel).

    A tap at offset d from the pixel lies in the patch ``floor(d / s)``. Without a stride the kernel keeps its size.

    >>> kernel_size(nn.Conv2d(3, 8, 7, stride=2, padding=3)), kernel_size(nn.Conv2d(3, 8, 2, stride=2))
    ((5, 5), (1, 1))
    """
    step = conv.stride[0]
    if step == 1:
        rows, cols = conv.kernel_size
        return rows, cols
    sizes = []
    for k, p in zip(conv.kernel_size, left_padding(conv), strict=True):
        reach = max(-(-p // step), (k - 1 - p) // step)
        sizes.append(2 * reach + 1)
    return sizes[0], sizes[1]


def unstrided_kernel(conv: nn.Conv2d) -> Tensor:
    """The kernel ``(cout, s^2 cin, kh, kw)`` that gives the same map after invertible downsampling.

    Equal to the convolution itself away from the border, and everywhere if its padding is circular.

    >>> unstrided_kernel(nn.Conv2d(3, 8, 3, stride=2, padding=1)).shape
    torch.Size([8, 12, 3, 3])
    """
    step = conv.stride[0]
    weight = conv.weight.detach()
    if step == 1:
        return weight.clone()
    cout, cin, kh, kw = weight.shape
    (rows, cols), (top, left) = kernel_size(conv), left_padding(conv)
    kernel = torch.zeros(cout, cin, step, step, rows, cols, device=weight.device, dtype=weight.dtype)
    for i in range(kh):
        for j in range(kw):
            (patch_i, inner_i), (patch_j, inner_j) = divmod(i - top, step), divmod(j - left, step)
            kernel[:, :, inner_i, inner_j, patch_i + rows // 2, patch_j + cols // 2] = weight[:, :, i, j]
    return kernel.flatten(1, 3)
