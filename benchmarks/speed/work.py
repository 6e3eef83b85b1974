"""What is timed: training steps and evaluation passes of one convolution, by contender."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Literal, cast

import torch
from benchmarks.speed import others, textbook
from benchmarks.speed.checks import check_mixed, check_timed
from benchmarks.speed.clock import Work
from benchmarks.speed.shapes import Shape
from torch import Tensor, nn

from lipkit.layers.families import Family
from lipkit.lowering import export

REFERENCE = "conv"
"""The plain convolution that all are compared with: circular, same channels and stride, kernel 3."""
MAKERS = ("lipkit", "textbook", *others.LIBRARIES)
LAST = "channels last"
"""A further maker: lipkit's layer on tensors in the ``channels_last`` memory format, where it returns that format."""
LAST_FAMILIES = ("eco",)
PADDED = "with zeros"
"""A further maker: lipkit's layer with zero padding, in families that have both; its reference is still circular."""
HALF = "bfloat16 weights"
"""A further maker under autocast: lipkit's exported layer in bfloat16, on images in bfloat16."""
COMPILED = "compiled"
"""A further maker: ``torch.compile`` of lipkit's layer, which takes up to a minute for each shape."""


def conv(shape: Shape, padding_mode: Literal["circular", "zeros"] = "circular") -> nn.Conv2d:
    """The plain convolution of a shape.

    >>> conv(Shape(3, 8, 16, 2))(torch.zeros(1, 3, 16, 16)).shape
    torch.Size([1, 8, 8, 8])
    """
    return nn.Conv2d(shape.cin, shape.cout, 3, shape.stride, padding=1, padding_mode=padding_mode)


def half_precision(device: str, enabled: bool = True) -> torch.autocast:
    """The autocast of the measurements: products of features in bfloat16."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=enabled)


def train_step(layer: nn.Module, x: Tensor, gradient: Tensor, autocast: bool = False) -> Work:
    """Forward (the constrained weight is built in it) and backward, to the parameters and to the input.

    Under autocast the gradient arrives in the dtype of the outputs, as it does from another layer.
    """
    x = x.detach().clone().requires_grad_()
    parameters = list(layer.parameters())
    gradients = {dtype: gradient.to(dtype) for dtype in (torch.float32, torch.bfloat16)}

    def step() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        with half_precision(x.device.type, autocast):
            y = layer(x)
        y.backward(gradients[y.dtype])

    return step


def forward_pass(layer: nn.Module, x: Tensor, autocast: bool = False) -> Work:
    """One pass in inference mode."""
    x = x.detach()

    @torch.inference_mode()
    def run() -> Tensor:
        with half_precision(x.device.type, autocast):
            y: Tensor = layer(x)
        return y

    return run


def tensors(shape: Shape, batch: int, device: str) -> tuple[Tensor, Tensor]:
    """Inputs, and the gradient that arrives at the outputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, *shape.input_shape, generator=generator)
    gradient = torch.randn(batch, shape.cout, shape.out, shape.out, generator=generator)
    return x.to(device), gradient.to(device)


def make(family: Family, shape: Shape, **options: Any) -> nn.Module:
    """The convolution of a family at this shape."""
    return family.conv(shape.cin, shape.cout, shape.kernel, stride=shape.stride, **options)


def accepts(family: Family, shape: Shape) -> bool:
    """Whether the family has a layer of this shape.

    >>> from lipkit.layers.families import get
    >>> accepts(get("eco"), Shape(8, 8, 16)), accepts(get("eco"), Shape(8, 8, 12))
    (False, True)
    """
    if family.conv.__name__ in ("SllConv2d", "CplConv2d") and shape.inner != shape.cout:
        return False
    return family.accepts(shape.kernel, shape.out, shape.out)


def contenders(
    families: Iterable[Family],
    shape: Shape,
    batch: int,
    phase: str,
    device: str = "cpu",
    *,
    makers: Collection[str] = MAKERS,
    autocast: bool = False,
    absent: dict[str, str] | None = None,
) -> dict[str, Work]:
    """Everything to be timed at one shape, batch and phase: the plain convolution first, then ``family:maker``.

    Each family's layer passes `check_timed` on the way. What another library cannot build or run is left out.

    Args:
        families: of lipkit; those that do not accept the shape are left out.
        shape, batch, phase, device: what is timed; phase is 'train' or 'forward'.
        makers: whose layers; of the libraries those that are installed.
        autocast: whether all of them run under autocast to bfloat16.
        absent: filled with the reasons of what was left out.

    Raises:
        RunError: a layer of lipkit is wrong.
    """
    torch.manual_seed(0)
    absent = {} if absent is None else absent
    x, gradient = tensors(shape, batch, device)

    def work(layer: nn.Module, fixed: Callable[[], nn.Module], images: Tensor = x, arriving: Tensor = gradient) -> Work:
        mixed = autocast and images.dtype == torch.float32
        if phase == "train":
            return train_step(layer.to(images).train(), images, arriving, mixed)
        return forward_pass(fixed().to(images).eval(), images, mixed)

    def plain(padding_mode: Literal["circular", "zeros"] = "circular") -> nn.Conv2d:
        return conv(shape, padding_mode).to(device)

    reference, zero = plain(), plain("zeros")
    found = {REFERENCE: work(reference, lambda: reference), "zero": work(zero, lambda: zero)}
    families = list(families)
    last = [t.contiguous(memory_format=torch.channels_last) for t in (x, gradient)]
    if any(family.name in LAST_FAMILIES and accepts(family, shape) for family in families):
        other = plain()
        found[f"{REFERENCE} {LAST}"] = work(other, lambda: other, *last)
    if torch.device(device).type == "cuda":
        half, tf32 = plain().bfloat16(), plain()
        found["conv bf16"] = work(half, lambda: half, x.bfloat16(), gradient.bfloat16())
        found["conv tf32"] = _with_tf32(work(tf32, lambda: tf32))
    for family in families:
        if not accepts(family, shape):
            continue
        layer = make(family, shape).to(device)
        exported = export(layer, shape.input_shape)
        check_timed(family, shape, layer, exported, x)
        if autocast:
            check_mixed(family, shape, layer, exported, x)
        name = family.name
        if "lipkit" in makers:
            found[f"{name}:lipkit"] = work(layer, partial(_same, exported))
            if name in LAST_FAMILIES:
                found[f"{name}:{LAST}"] = work(layer, partial(_same, exported), *last)
            if "zeros" in getattr(family.conv, "padding_modes", ()) and shape.kernel > 1:
                padded = make(family, shape, padding_mode="zeros").to(device)
                fixed = export(padded, shape.input_shape)
                check_timed(family, shape, padded, fixed, x)
                found[f"{name}:{PADDED}"] = work(padded, partial(_same, fixed))
            if autocast and phase == "forward":
                images = (last[0] if name in LAST_FAMILIES else x).bfloat16()
                found[f"{name}:{HALF}"] = work(layer, partial(copy.deepcopy, exported), images)
        if COMPILED in makers:
            twin = cast(nn.Module, torch.compile(copy.deepcopy(layer) if phase == "train" else exported))
            _try(found, f"{name}:{COMPILED}", partial(work, twin, partial(_same, twin)), absent)
        book = textbook.build(name, shape.cin, shape.cout, shape.kernel, shape.stride)
        if "textbook" in makers and book is not None:
            found[f"{name}:textbook"] = work(book, partial(textbook.evaluated, book, shape.out))
        for library in others.installed():
            if library in makers and (library, name) in others.LAYERS:
                build = partial(_other, library, name, shape, device, work)
                _try(found, f"{name}:{library}", build, absent)
    return found


def _same(module: nn.Module) -> nn.Module:
    return module


def _other(library: str, family: str, shape: Shape, device: str, work: Callable[..., Work]) -> Work:
    layer = others.build(library, family, shape).to(device)
    with torch.no_grad():
        found = tuple(layer(torch.zeros(1, *shape.input_shape, device=device)).shape[1:])
    if found != (shape.cout, shape.out, shape.out):
        raise ValueError(f"expected outputs of {shape.cout} x {shape.out} x {shape.out}, got {found}")
    return work(layer, lambda: others.evaluated(layer))


def _try(found: dict[str, Work], name: str, build: Callable[[], Work], absent: dict[str, str]) -> None:
    try:
        run = build()
        run()
    except Exception as error:  # another library's code may fail in any way; its column is then empty
        absent[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    else:
        found[name] = run


def _with_tf32(work: Work) -> Work:
    def run() -> None:
        torch.backends.cudnn.allow_tf32 = True
        try:
            work()
        finally:
            torch.backends.cudnn.allow_tf32 = False

    return run
