"""The frame of all architectures: keywords, checked options, activations, families, normalisation and gain in front.

An architecture is a function from an `Image` to layers. `architecture` turns it into the builder that users call.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from numbers import Integral
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar, get_type_hints

from torch import nn

from lipkit.errors import OptionError, ShapeError, check_flag, finite
from lipkit.layers import CayleyLinear, Family, MaxMin, Normalize, Scale, families
from lipkit.layers.base import check_positive
from lipkit.linalg.matrices import check_integer
from lipkit.modules import GroupSort, HalfAbs, Shape
from lipkit.modules.activations import BY_NAME, slope_restricted
from lipkit.modules.network import checked_shape

P = ParamSpec("P")
Made = TypeVar("Made")
Count = int  # an option of at least 0
Positive = float  # a finite one above 0


class Common(TypedDict, total=False):
    """The keywords of every architecture, see `architecture`."""

    input_shape: Shape
    classes: int
    lipschitz: float
    mean: Sequence[float] | None
    std: Sequence[float] | None


# Inserted into the docstring of every builder, below the line ``image:``.
DESCRIBED = """\
    classes: number of outputs.
    lipschitz: target constant of what follows the normalisation, apart from a last layer of unit rows; a gain in front.
    mean, std: input normalisation, part of the network."""


@dataclass(frozen=True)
class Image:
    """The checked shape of the images that the layers are made for, and the number of classes."""

    model: str
    channels: int
    rows: int
    columns: int
    classes: int

    def divided(self, by: int) -> tuple[int, int]:
        """Rows and columns divided by a factor; ``ShapeError`` unless it divides both."""
        check_image((self.channels, self.rows, self.columns), by, self.model)
        return self.rows // by, self.columns // by

    def pixels(self, by: int) -> int:
        """Number of pixels after both sides are divided: ``rows columns / by^2``."""
        return math.prod(self.divided(by))


def architecture(
    input_shape: Shape = (3, 32, 32), classes: int = 10
) -> Callable[[Callable[Concatenate[Image, P], list[nn.Module]]], Callable[P, nn.Sequential]]:
    """Turn a function ``(image, options) -> layers`` into a builder that takes the keywords of `Common` for the image.

    In the docstring, their descriptions replace the line for ``image``. A function without ``**options`` ends in
    ``**common: Unpack[Common]``, for type checkers only. The builder is `checked`.

    Args:
        input_shape, classes: defaults of the builder.

    >>> @architecture(classes=2)
    ... def net(image, width=4):
    ...     return [nn.Flatten(), nn.Linear(image.channels * image.pixels(1), width), nn.Linear(width, image.classes)]
    >>> net(8, input_shape=(1, 4, 4), lipschitz=2.0)[0], inspect.signature(net).parameters["classes"]
    (Scale(gamma=2, learnable=False), <Parameter "classes: int = 2">)
    """
    defaults = {"input_shape": input_shape, "classes": classes, "lipschitz": 1.0, "mean": None, "std": None}
    keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    common = [keyword(name, default=defaults[name], annotation=t) for name, t in get_type_hints(Common).items()]

    def frame(layers: Callable[Concatenate[Image, P], list[nn.Module]]) -> Callable[P, nn.Sequential]:
        _, *given = inspect.signature(layers).parameters.values()  # the image comes first
        own = [p for p in given if p.annotation != "Unpack[Common]"]  # annotations are strings here
        ordered = sorted([*own, *common], key=lambda p: p.kind)  # keywords before ``**options``, as Python requires
        signature = inspect.Signature(ordered, return_annotation=nn.Sequential)

        @functools.wraps(layers)
        def build(*args: P.args, **options: P.kwargs) -> nn.Sequential:
            values: list[Any] = [options.pop(name, default) for name, default in defaults.items()]
            shape, outputs, gain, mean, std = values  # in the order of `defaults`
            image = Image(layers.__name__, *check_image(shape, 1, layers.__name__), outputs)
            check_integer("classes", outputs, 2)
            check_options(options)
            return bounded(layers(image, *args, **options), gain, mean, std, image.channels)

        build.__signature__ = signature  # type: ignore[attr-defined]
        described = rf"    input_shape: \1\n{DESCRIBED}"  # \1: the rest of the line ``image:``
        build.__doc__ = re.sub("^    image: (.*)$", described, inspect.cleandoc(layers.__doc__ or ""), flags=re.M)
        return checked(build)

    return frame


def checked(builder: Callable[P, Made]) -> Callable[P, Made]:
    """Make ``builder`` check its options by their annotations, and get Python's integers in place of numpy's.

    Each ``int``, also in sequences, is a size of at least 1, each ``Count`` at least 0, each ``bool`` true or false,
    each ``float`` a finite number, each ``Positive`` one above 0.
    """
    signature = inspect.signature(builder)

    @functools.wraps(builder)
    def build(*args: P.args, **options: P.kwargs) -> Made:
        bound = signature.bind(*args, **options)  # raises a TypeError about the caller's arguments
        for name, value in bound.arguments.items():
            bound.arguments[name] = python_integers(value)
            _check_kind(name, bound.arguments[name], signature.parameters[name].annotation)
        return builder(*bound.args, **bound.kwargs)

    return build


def python_integers(value: Any) -> Any:
    """The value with Python's integers in place of numpy's, also inside lists, tuples and mappings."""
    if type(value) in (list, tuple):
        return type(value)(map(python_integers, value))
    if type(value) is dict:
        return {key: python_integers(each) for key, each in value.items()}
    return value if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def _check_kind(name: str, value: Any, annotation: Any) -> None:
    """Raise ``OptionError`` unless the value of an option fits its annotation, given as a string."""
    kind = str(annotation).removesuffix(" | None")
    if value is None and kind != annotation:
        return
    if kind in ("int", "Count"):
        check_integer(name, value, 1 if kind == "int" else 0)
    elif kind in ("Sequence[int]", "Sequence[Sequence[int]]"):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise OptionError(f"{name}: expected a list of sizes, got {value!r}")
        check_sizes(**{name: list(value)})
    elif kind == "bool":
        check_flag(name, value)
    elif kind in ("float", "Positive"):
        finite(name, value, positive=kind == "Positive")


def check_image(input_shape: Shape, multiple: int, model: str) -> tuple[int, int, int]:
    """(C, H, W), or ``ShapeError`` unless H and W are multiples of ``multiple``."""
    shape = checked_shape(input_shape)
    if len(shape) != 3 or shape[1] % multiple or shape[2] % multiple:
        sides = f" with H and W multiples of {multiple}" if multiple > 1 else ""
        raise ShapeError(f"{model}: expected an input shape (C, H, W){sides}, got {input_shape}")
    return shape[0], shape[1], shape[2]


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ``OptionError`` for options that would reach only the convolutions and so break the model."""
    for name in ("device", "dtype"):
        if name in options:
            raise OptionError(f"{name}: expected no such option, got {options[name]}: move the whole model with .to()")


def bounded(
    layers: Sequence[nn.Module],
    lipschitz: float = 1.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    channels: int | None = None,
) -> nn.Sequential:
    """A chain with an optional input normalisation in front and a gain of ``lipschitz`` after it.

    The gain comes before the layers, so that the last module of a classifier stays its last linear layer. Dividing
    by std multiplies the constant of the whole network by ``1 / min(std)``; ``lipschitz`` is that of the rest.
    """
    lipschitz = finite("lipschitz", lipschitz, positive=True)
    gain = [] if lipschitz == 1.0 else [Scale(lipschitz)]  # the constant of what follows the normalisation
    if mean is None and std is None:
        return nn.Sequential(*gain, *layers)
    if mean is None or std is None:
        raise OptionError(f"mean and std: expected both or neither, got mean={mean}, std={std}")
    normalize = Normalize(mean, std)
    if channels is not None and len(normalize.mean) != channels:
        raise OptionError(f"mean and std: expected {channels} numbers, one per channel, got mean={mean}")
    return nn.Sequential(normalize, *gain, *layers)


def split_gain(model: nn.Module, lipschitz: float) -> nn.Module:
    """The chain with its gain L (``lipschitz``) spread evenly: L^(1/m) before each of its m layers with parameters.

    A residual block is one layer. Without biases the function is the same where activations are homogeneous: [Cayley]
    section 5.1, "Ensuring Lipschitz constraints".
    """
    gain = next((layer for layer in model.children() if isinstance(layer, Scale)), None)
    if gain is None:  # `bounded` makes none for a gain of 1
        return model
    layers = [layer for layer in model.children() if layer is not gain]
    owners = [layer for layer in layers if next(layer.parameters(), None) is not None]  # not a Normalize
    part = lipschitz ** (1 / len(owners))  # their product is L again
    return nn.Sequential(*(m for layer in layers for m in ((Scale(part), layer) if layer in owners else (layer,))))


ACTIVATIONS: dict[str, type[nn.Module]] = {"maxmin": MaxMin, "halfabs": HalfAbs, **BY_NAME}


def check_sizes(**sizes: Any) -> None:
    """Raise ``OptionError`` unless each size, or each in a list of them, is an integer of at least 1.

    >>> check_sizes(width=3, dense=[16, 0])
    Traceback (most recent call last):
    lipkit.errors.OptionError: dense[1]: expected an integer of at least 1, got 0
    """
    for name, value in sizes.items():
        if isinstance(value, list | tuple):
            check_sizes(**{f"{name}[{i}]": each for i, each in enumerate(value)})
        else:
            check_positive(**{name: value})


def make_activation(activation: str | nn.Module | None) -> nn.Module:
    """The activation of this name, or a copy of this module; ``None`` is MaxMin.

    >>> make_activation(None), make_activation("relu")
    (MaxMin(), ReLU())
    """
    activation = "maxmin" if activation is None else activation
    if isinstance(activation, str) and activation in ACTIVATIONS:
        return ACTIVATIONS[activation]()
    sorting = type(activation) in (MaxMin, GroupSort, HalfAbs)  # 1-Lipschitz, though not scalar
    if isinstance(activation, nn.Module) and (sorting or slope_restricted(activation)):
        return copy.deepcopy(activation)
    raise OptionError(
        f"activation: expected one of {', '.join(sorted(ACTIVATIONS))}, or a module of these types, got {activation!r}"
    )


def plain_conv2d(
    in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, *, padding_mode: Any = "zeros", **named: Any
) -> nn.Conv2d:
    """``nn.Conv2d`` with odd kernels whose output is as large as the input divided by the stride."""
    if kernel_size % 2 == 0:
        raise OptionError(f"kernel_size: expected an odd number for plain convolutions, got {kernel_size}")
    same = kernel_size // 2
    if (padding := named.pop("padding", same)) != same:
        raise OptionError(f"padding: expected {same} for kernel_size {kernel_size}, got {padding!r}")
    return nn.Conv2d(in_channels, out_channels, kernel_size, stride, same, padding_mode=padding_mode, **named)


_plain = partial(Family, paper="", equation="", claim="none", sizes="odd kernels, any image")
# Not in the table of families: these layers are unconstrained, so the laws of layers do not hold for them.
UNCONSTRAINED: dict[str, Family] = {
    "plain": _plain(name="plain", title="nn.Conv2d and nn.Linear", conv=plain_conv2d, linear=nn.Linear),
    "plain_conv": _plain(
        name="plain_conv",
        title="circular nn.Conv2d, dense layers by the Cayley transform",
        conv=partial(plain_conv2d, padding_mode="circular"),
        linear=CayleyLinear,
    ),
}
# The family of an acronym, the unconstrained ones among them; ``OptionError`` lists all.
find = partial(families.get, others=UNCONSTRAINED)


class Layers:
    """Layers of a family, each followed by an activation (None: MaxMin) unless the family has one inside its layers.

    ``options`` are those of the family's convolutions. An activation inside the layers serves the dense ones, too.

    >>> made = Layers("cayley", {})
    >>> made.dense(4, 2), made.strided(5), Layers("plain", {}).strided(5)
    ([CayleyLinear(4, 2, bias=True), MaxMin()], 2, 5)
    """

    def __init__(self, name: str, options: Mapping[str, Any], activation: str | nn.Module | None = None) -> None:
        check_options(options)
        self.family = find(name)
        self.outer: list[nn.Module] = [] if self.family.own_activation else [make_activation(activation)]
        inner = {"activation": activation} if self.family.own_activation and activation is not None else {}
        self.options = {**options, **inner}
        self.inner = {k: v for k, v in self.options.items() if self.family.own_activation and k == "activation"}

    def conv(self, cin: int, cout: int, kernel_size: int, stride: int = 1) -> list[nn.Module]:
        return [self.bare(cin, cout, kernel_size, stride), *self.behind()]

    def bare(self, cin: int, cout: int, kernel_size: int, stride: int = 1) -> nn.Module:
        """A convolution without an activation after it."""
        return self.family.conv(cin, cout, kernel_size, stride=stride, **self.options)

    def dense(self, *sizes: int, **options: Any) -> list[nn.Module]:
        """Hidden dense layers, from each size to the next."""
        named = {**options, **self.inner}
        return [m for p, q in pairwise(sizes) for m in (self.family.linear(p, q, **named), *self.behind())]

    def last(self, inputs: int, outputs: int) -> nn.Module:
        return self.family.last(inputs, outputs)

    def behind(self) -> list[nn.Module]:
        """The modules after a layer: a copy of the activation, or none."""
        return copy.deepcopy(self.outer)  # activations may have parameters, so each place needs its own

    def strided(self, kernel_size: int, emulated: int | None = None) -> int:
        """Kernel size of a strided layer; a family that downsamples first gets ``emulated``, by default half of it."""
        if self.family.name in UNCONSTRAINED:  # a real stride
            return kernel_size
        return max(1, kernel_size // 2) if emulated is None else emulated
