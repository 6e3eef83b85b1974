"""One layer under test: its factory, claims, inputs, and the arguments that it refuses."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import LipkitError, OptionError, ShapeError, check_choice
from lipkit.lowering import export
from lipkit.modules import Shape, output_shape
from lipkit.testing.reference import tolerance

CLAIMS = ("orthogonal", "contraction", "none")


class LawBroken(AssertionError):
    """A layer breaks one of the laws; the message names the law, what it expects and what it found."""


def require_bound(value: float, bound: float, allowed: float, what: str) -> None:
    """Raise ``LawBroken`` unless ``value <= bound * (1 + allowed)``; ``what`` begins the message."""
    require(value <= bound * (1 + allowed), f"{what} = {bound:.17g}, got {value:.17g}")


def require(condition: bool, sentence: str) -> None:
    """Raise ``LawBroken`` with ``sentence`` ("expected ..., got ...") unless ``condition`` holds."""
    if not condition:
        raise LawBroken(sentence)


@dataclass(frozen=True)
class Refusal:
    """A documented bad argument.

    Attributes:
        what: the bad argument in words, for the report.
        call: makes the wrong call, given ``make`` (a factory that takes keywords).
        error: the error that it raises.
        words: parts of the message, including the actual value; "expected" and "got" are always required.
    """

    what: str
    call: Callable[[Callable[..., nn.Module]], Any]
    error: type[LipkitError]
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A layer under test: how it is made, what it promises, and on which inputs it is tested.

    Attributes:
        make: factory of the layer, see :func:`lipkit.testing.check_layer`.
        input_shapes: shapes without the batch that the same layer accepts.
        dtype: float32 or float64.
        claim: 'orthogonal' (every singular value is gamma), 'contraction' (none is above gamma), or 'none'
            (``lipschitz`` computes the constant from the numbers).
        gamma: the claimed constant.
        slack: relative amount by which ``lipschitz(layer)`` may exceed gamma (a declared truncation error).
        attained: fraction of ``lipschitz(layer)`` that the largest singular value (or Jacobian) reaches at random
            weights; for 'none' `check_layer` takes 0.9 by default. Not used for 'orthogonal'.
        train_gap: declared relative difference between training and evaluation mode (Taylor terms).
        smooth: whether the layer is differentiable where singular values of a parameter coincide (a division by a
            spectral norm is not); if not, gradients there need only be finite.
        options: constructor keyword -> at least two values; any two must act differently, or one must raise.
        refusals: documented bad arguments and their errors, such as ``conv_refusals`` and ``linear_refusals``.
        output_shape: input shape -> output shape; default: from the attributes ``stride``, ``out_channels`` and
            ``out_features`` of the layer, if any.
        backends: of ``torch.compile``.
        fullgraph: whether the layer must compile as one graph; False if its steps depend on values.
        seed: of the weights and inputs. The global random state is left as it was.

    Raises:
        OptionError: an unknown claim or dtype, or no shape.
    """

    make: Callable[..., nn.Module]
    input_shapes: tuple[Shape, ...]
    dtype: torch.dtype = torch.float64
    claim: str = "orthogonal"
    gamma: float = 1.0
    slack: float = 0.0
    attained: float = 0.1
    train_gap: float = 0.0
    smooth: bool = True
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    refusals: Sequence[Refusal] = ()
    output_shape: Callable[[Shape], Shape] | None = None
    backends: Sequence[str] = ("aot_eager",)
    fullgraph: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("claim", self.claim, CLAIMS)
        if self.dtype not in (torch.float32, torch.float64):
            raise OptionError(f"dtype: expected torch.float32 or torch.float64, got {self.dtype}")
        if not self.input_shapes:
            raise OptionError("input_shape: expected at least one shape, got none")

    @property
    def shape(self) -> Shape:
        """The first input shape, on which the laws that need only one are tested."""
        return self.input_shapes[0]

    @contextmanager
    def random(self, extra: int = 0) -> Iterator[None]:
        """Seed torch inside the block with the seed of this case, and restore the caller's random state after it."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(1000 * self.seed + extra)
            yield

    def layer(self, *, dtype: torch.dtype | None = None, extra: int = 0, **options: Any) -> nn.Module:
        """Make a new layer in training mode; calls with the same ``extra`` give the same random weights."""
        dtype = dtype or self.dtype
        with self.random(extra):
            try:
                return self.make(dtype=dtype, **options).train()
            except TypeError as error:
                if "unexpected keyword argument 'dtype'" not in str(error):
                    raise
        # Some modules take no dtype: an activation, a pooling, a container.
        with self.random(extra):
            return self.make(**options).to(dtype).train()

    def moved(self, layer: nn.Module, extra: int = 1) -> nn.Module:
        """Add random numbers of about 0.3 times its size to every parameter, in place; return the layer."""
        with self.random(extra), torch.no_grad():
            for p in layer.parameters():
                spread = p.square().mean().sqrt() + 0.05  # 0.05 moves parameters that are zero
                p.add_(torch.randn(p.shape, dtype=p.dtype).to(p.device) * spread * 0.3)
        return layer

    def x(self, shape: Shape | None = None, batch: int = 3, dtype: torch.dtype | None = None, extra: int = 2) -> Tensor:
        """Random inputs ``(batch, *shape)``."""
        with self.random(extra):
            return torch.randn(batch, *(shape or self.shape), dtype=torch.float64).to(dtype or self.dtype)

    def eps(self, shape: Shape | None = None) -> float:
        """The rounding allowance for one input of ``shape``."""
        return tolerance(max(8, math.prod(shape or self.shape)), self.dtype)


def states(case: Case) -> list[nn.Module]:
    """Layers to test bounds on: a new one in training mode; one with moved weights in evaluation mode.

    If the modes differ, also the moved one in training mode.
    """
    found = [case.layer(), case.moved(case.layer()).eval()]  # initial weights can be special
    return [*found, case.moved(case.layer())] if case.train_gap else found


def distance(a: Tensor, b: Tensor) -> float:
    """Relative l2 distance ``||a - b|| / max(||a||, ||b||)``; inf if shapes differ or it is not finite."""
    if a.shape != b.shape:
        return math.inf
    a, b = a.detach().double().cpu(), b.detach().double().cpu()  # subtract in float64
    gap, *sizes = (float(torch.linalg.vector_norm(t)) for t in (a - b, a, b))
    if not math.isfinite(gap):
        return math.inf
    return gap / max(sizes) if gap else 0.0


def require_same(a: Tensor, b: Tensor, allowed: float, what: str) -> float:
    """Raise ``LawBroken`` unless the relative distance of ``a`` and ``b`` is at most ``allowed``; return it."""
    return require_small(distance(a, b), allowed, what)


def require_small(gap: float, allowed: float, what: str) -> float:
    """Raise ``LawBroken`` unless the relative difference ``gap`` is at most ``allowed``; return it."""
    require(gap <= allowed, f"{what}: expected a relative difference of at most {allowed:.2g}, got {gap:.3g}")
    return gap


def forward(layer: nn.Module, x: Tensor) -> Tensor:
    """The output of the layer, without an autograd graph."""
    with torch.no_grad():
        return layer(x)


def _argument(name: str, value: Any) -> Refusal:
    return Refusal(f"{name}={value!r}", lambda make: make(**{name: value}), OptionError, (name, repr(value)))


def _arguments(**values: tuple[Any, ...]) -> list[Refusal]:
    return [_argument(name, value) for name, bad in values.items() for value in bad]


def _input(what: str, verb: Callable[[nn.Module, Shape], Any], shape: Shape, *sizes: int) -> Refusal:
    return Refusal(what, lambda make: verb(make(), shape), ShapeError, tuple(map(str, sizes)))


def conv_refusals(in_channels: int, height: int, width: int) -> tuple[Refusal, ...]:
    """Bad arguments of a convolution, as keywords of its factory, and bad inputs; inputs of this shape are right."""
    wrong = (in_channels + 1, height, width)
    return (
        *_arguments(kernel_size=(0, (3, 3, 3), 3.0), stride=(0, (1, 2)), padding=(7, None), padding_mode=("mirror",)),
        *_arguments(dilation=(3,), groups=(3,), in_channels=(0,), out_channels=(-1, 2.5), dtype=(torch.float16,)),
        _input("another number of channels", output_shape, wrong, in_channels, in_channels + 1),
        _input("export for another number of channels", export, wrong, in_channels, in_channels + 1),
        _input("export for a vector", export, (in_channels,), in_channels),
    )


def linear_refusals(in_features: int) -> tuple[Refusal, ...]:
    """Bad arguments of a dense layer, as keywords of its factory, and bad inputs."""
    return (
        *_arguments(in_features=(0,), out_features=(-1, True), dtype=(torch.bfloat16,)),
        _input("another number of features", output_shape, (in_features + 1,), in_features, in_features + 1),
        _input("export for another number of features", export, (in_features + 1,), in_features, in_features + 1),
    )


def conv_options() -> dict[str, tuple[Any, ...]]:
    """Values of ``nn.Conv2d``'s arguments, which must have an effect in a constrained convolution or be refused."""
    return {
        "kernel_size": (1, 3),
        "stride": (1, 2),
        "padding": ("same", 0),
        "padding_mode": ("circular", "zeros"),
        "dilation": (1, 2),
        "groups": (1, 2),
        **linear_options(),
    }


def linear_options() -> dict[str, tuple[Any, ...]]:
    """Values of the arguments of ``nn.Linear``, which must have an effect in a constrained dense layer."""
    return {"bias": (True, False), "dtype": (torch.float32, torch.float64)}
