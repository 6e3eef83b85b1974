"""A law that cannot fail is no test: for each of the thirteen, layers broken by hand that it must catch.

The unbroken twin is ``CayleyLinear`` (or its convolution), which passes the same law with the same arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lipkit.layers import AfterStep, CayleyConv2d, CayleyLinear
from lipkit.layers.export import export_linear, register_one_lipschitz
from lipkit.lowering import export
from lipkit.modules import ROWS, Affine, export_rule, lipschitz_rule
from lipkit.testing import LAWS, LawBroken, check_layer, conv_refusals, linear_refusals


class Loud(CayleyLinear):
    """Law 1: the weight is 1 % too large."""

    def weight(self) -> Tensor:
        return 1.01 * super().weight()


class LoudForward(CayleyLinear):
    """Law 1: the weight is right, its use is not."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.01 * super().forward(x)


class LoudInTraining(CayleyLinear):
    """Law 1: only training mode is too large."""

    def weight(self) -> Tensor:
        return (1.01 if self.training else 1.0) * super().weight()


class LoudSomewhere(CayleyLinear):
    """Law 1, not affine: a steep piece of the function far from the origin."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.where(y.abs() > 50, 1.5 * y, y)


class Overclaimed(CayleyLinear):
    """Law 1: lipschitz says 2 where 1 is promised."""


class Quiet(CayleyLinear):
    """Law 2: one per cent of the gain is lost."""

    def weight(self) -> Tensor:
        return 0.99 * super().weight()


class OneQuiet(CayleyLinear):
    """Law 2: one of five singular values is lost."""

    def weight(self) -> Tensor:
        return super().weight() * torch.tensor([1, 1, 0.98, 1, 1], dtype=self.free.dtype)


class NoBiasOnExport(CayleyLinear):
    """Law 3: the bias is lost on export."""


class ExportsItself(CayleyLinear):
    """Law 3: the export is no plain module."""


class ExportSharesMemory(CayleyLinear):
    """Its rule hands out the bias itself."""


class Lazy(CayleyLinear):
    """Law 4: the gain is made by the first forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "shift"):
            self.shift = nn.Parameter(x.new_zeros(self.out_features))
        return super().forward(x) + self.shift


class Idle(CayleyLinear):
    """Law 4: a parameter that nothing uses."""

    def make_parameters(self, device: Any, dtype: Any) -> None:
        super().make_parameters(device, dtype)
        self.unused = nn.Parameter(torch.ones(3, device=device, dtype=dtype))


class Detached(CayleyLinear):
    """Law 4: a parameter that acts but gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        assert self.bias is not None
        return y - self.bias + self.bias.detach()


class Counting(CayleyLinear):
    """Law 5: a buffer that a forward pass changes."""

    def make_parameters(self, device: Any, dtype: Any) -> None:
        super().make_parameters(device, dtype)
        self.register_buffer("calls", torch.zeros((), device=device))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Remembering(CayleyLinear):
    """Law 5: an attribute that a forward pass sets."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        return super().forward(x)


class TwoFaced(CayleyLinear):
    """Law 5: training and evaluation mode differ."""

    def weight(self) -> Tensor:
        return super().weight() if self.training else -super().weight()


class Noisy(CayleyLinear):
    """Law 5: a forward pass draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-30 * torch.randn_like(x[..., :1])


class SecretSigns(CayleyLinear):
    """Law 6: random signs that are not in the state_dict."""

    def make_parameters(self, device: Any, dtype: Any) -> None:
        super().make_parameters(device, dtype)
        self.signs = 2.0 * torch.bernoulli(torch.full((self.out_features,), 0.5, dtype=dtype)) - 1

    def weight(self) -> Tensor:
        return self.signs[:, None] * super().weight()


class Graph(CayleyLinear):
    """Law 6: a cached weight with a graph, which cannot be copied."""

    def weight(self) -> Tensor:
        self.cache = super().weight()
        return self.cache


class SharedCopy(CayleyLinear):
    """Law 6: a deepcopy that shares its parameters with the original."""

    def __deepcopy__(self, memo: Any) -> SharedCopy:
        twin = self.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin


class Cached(CayleyLinear):
    """Law 7: evaluation mode keeps the first weight that it made."""

    def weight(self) -> Tensor:
        if self.training:
            return super().weight()
        if not hasattr(self, "cache"):
            self.cache = super().weight().detach()
        return self.cache


class ClearedByTrain(CayleyLinear):
    """Law 7: a cache that only train() clears, so load_state_dict in evaluation mode is not seen."""

    cache: Tensor | None = None

    def train(self, mode: bool = True) -> ClearedByTrain:
        self.cache = None
        return super().train(mode)

    def weight(self) -> Tensor:
        if self.training or self.cache is None:
            self.cache = super().weight().detach() if not self.training else None
        return super().weight() if self.cache is None else self.cache


class Versioned(CayleyLinear):
    """Law 7: a cache keyed on the version counter, which an assignment of .data does not raise."""

    def weight(self) -> Tensor:
        key = (self.free._version, self.scale._version)
        if getattr(self, "key", None) != key:
            self.key, self.cache = key, super().weight().detach()
        return self.cache


class IgnoresGain(CayleyLinear):
    """Law 8: an option without an effect."""

    def __init__(self, *args: Any, gain: float = 1.0, **named: Any) -> None:
        super().__init__(*args, **named)


class UsesGain(CayleyLinear):
    """The twin of :class:`IgnoresGain`."""

    def __init__(self, *args: Any, gain: float = 1.0, **named: Any) -> None:
        self.gain = gain
        super().__init__(*args, **named)

    def weight(self) -> Tensor:
        return self.gain * super().weight()


class PolarBySvd(CayleyLinear):
    """Law 9: U V^T of an SVD, whose derivative divides by the differences of singular values."""

    def weight(self) -> Tensor:
        u, _, vh = torch.linalg.svd(self.free * self.scale, full_matrices=False)
        return u @ vh


class DividesByZero(CayleyLinear):
    """Law 9: a normalisation without a guard at zero."""

    def weight(self) -> Tensor:
        free = self.free * self.scale / self.free.norm()
        return torch.matrix_exp(free @ free.mT - free @ free.mT) @ super().weight() + 0 * free


class WrongGradient(CayleyLinear):
    """Law 9: the bias counts half in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        half = self.bias / 2
        return super().forward(x) - half + half.detach()


class OnlyAtBirth(CayleyLinear):
    """Law 10: orthogonal when made, free afterwards."""

    def make_parameters(self, device: Any, dtype: Any) -> None:
        super().make_parameters(device, dtype)
        with torch.no_grad():
            self.free.copy_(super().weight())
            self.scale.fill_(1)

    def weight(self) -> Tensor:
        return self.free * self.scale


class LoudAfterStep(CayleyLinear, AfterStep):
    """Law 10: what it does after a step spoils it."""

    loud = False

    def after_step(self, input_shape: tuple[int, ...]) -> None:
        self.loud = True

    def weight(self) -> Tensor:
        return (1.01 if self.loud else 1.0) * super().weight()


class FirstSizeOnly(CayleyConv2d):
    """Law 11: the size of the first image is kept for the later ones."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "size"):
            self.size = x.shape[-2:]
        return super().forward(x[..., : self.size[0], : self.size[1]])


class EvenOnly(CayleyConv2d):
    """Law 11: an inverse real transform that is not told the size turns 7 columns into 6."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft2(torch.fft.rfft2(super().forward(x)))


class StaleSize(CayleyConv2d):
    """Law 11: the second size is given the wave of the first."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not hasattr(self, "width"):
            self.width = x.shape[-1]
        return y if x.shape[-1] == self.width else y.roll(1, -1)


class BatchMixing(CayleyConv2d):
    """Law 11: a sample depends on the others in its batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 0.01 * x.mean(0, keepdim=True))


class LeftBehind(CayleyLinear):
    """Law 12: a constant that is no buffer stays where it was made."""

    def make_parameters(self, device: Any, dtype: Any) -> None:
        super().make_parameters(device, dtype)
        self.signs = torch.ones(self.out_features, 1, dtype=dtype)

    def weight(self) -> Tensor:
        return self.signs * super().weight()


class AlwaysSingle(CayleyLinear):
    """Law 12: float64 in, float32 out."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class HalfUnderAutocast(CayleyLinear):
    """Law 12: autocast lowers the precision of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight(), self.bias)


class BranchesOnValues(CayleyLinear):
    """Law 12: a decision on values, which a compiler cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) < 1e9 else -super().forward(x)


class _Untouched(torch.autograd.Function):
    """An operation in the style that torch.func does not follow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class OldFunction(CayleyLinear):
    """Law 12: torch.func cannot follow an operation of its own."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Untouched.apply(super().forward(x))
        return made


class _Halved(torch.autograd.Function):
    """The identity with a wrong derivative forwards."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0] / 2


class WrongForwards(CayleyLinear):
    """Law 12: the derivative forwards is not that backwards."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        # torch.compile takes no function with a derivative forwards.
        return y if torch.compiler.is_compiling() else _Halved.apply(y)


class Careless(CayleyLinear):
    """Law 13: a wrong size is met by another library's error."""

    def __init__(self, in_features: int, out_features: int, *args: Any, **named: Any) -> None:
        if in_features < 1:
            raise ValueError("bad size")
        super().__init__(in_features, out_features, *args, **named)


class Silent(CayleyLinear):
    """Law 13: a wrong dtype is replaced without a word."""

    def __init__(self, *args: Any, dtype: Any = None, **named: Any) -> None:
        super().__init__(*args, dtype=dtype if dtype in (torch.float32, torch.float64) else torch.float32, **named)


class Taciturn(CayleyLinear):
    """Law 13: the right error without the actual value."""

    def __init__(self, in_features: int, out_features: int, *args: Any, **named: Any) -> None:
        try:
            super().__init__(in_features, out_features, *args, **named)
        except ValueError as error:
            raise type(error)("expected other sizes, got wrong ones") from None


class TakesAnyImage(CayleyConv2d):
    """Law 13: another number of channels is cut off instead of refused."""

    def resample(self, x: Tensor) -> Tensor:
        return super().resample(x[:, : self.in_channels])


class Twin(CayleyLinear):
    """Nothing is broken."""


LINEAR = (
    *(Loud, LoudForward, LoudInTraining, LoudSomewhere, Quiet, OneQuiet, Lazy, Idle, Detached, Counting),
    *(Remembering, TwoFaced, Noisy, SecretSigns, Graph, SharedCopy, Cached, ClearedByTrain, Versioned, IgnoresGain),
    *(
        UsesGain,
        PolarBySvd,
        DividesByZero,
        WrongGradient,
        OnlyAtBirth,
        LoudAfterStep,
        LeftBehind,
        AlwaysSingle,
        HalfUnderAutocast,
    ),
    *(BranchesOnValues, Careless, Silent, Taciturn, Twin),
)
CONV = (FirstSizeOnly, EvenOnly, StaleSize, BatchMixing, TakesAnyImage)


@pytest.fixture(autouse=True, scope="module")
def _rules_of_this_file() -> Iterator[None]:
    before = dict(ROWS)
    register_one_lipschitz(*LINEAR, *CONV)
    lipschitz_rule(Overclaimed)(lambda module, input_shape: 2.0)
    lipschitz_rule(NoBiasOnExport, ExportsItself, ExportSharesMemory)(lambda module, input_shape: 1.0)
    export_rule(Overclaimed)(export_linear)

    @export_rule(NoBiasOnExport)
    def _no_bias(module: NoBiasOnExport, input_shape: Any) -> nn.Module:
        plain = nn.Linear(module.in_features, module.out_features, False, dtype=module.free.dtype)
        plain.weight.copy_(module.weight())
        return plain

    @export_rule(ExportsItself)
    def _itself(module: ExportsItself, input_shape: Any) -> nn.Module:
        return module

    @export_rule(ExportSharesMemory)
    def _shares(module: ExportSharesMemory, input_shape: Any) -> nn.Module:
        assert module.bias is not None
        linear = nn.Linear(module.in_features, module.out_features, False, dtype=module.free.dtype)
        linear.weight.copy_(module.weight())
        last = Affine(torch.ones_like(module.bias), torch.zeros_like(module.bias))
        last.shift = module.bias.detach()
        return nn.Sequential(linear, last)

    yield
    ROWS.clear()
    ROWS.update(before)


GAINS = {"options": {"gain": (1.0, 0.5)}}
BAD_SIZES = {"refusals": linear_refusals(5)}
# Law, broken layer, what the message must say, and arguments of check_layer.
BROKEN: list[tuple[int, type[nn.Module], str, dict[str, Any]]] = [
    (1, Loud, "lipschitz", {}),
    (1, LoudForward, "norm of at most", {}),
    (1, LoudInTraining, "training=True", {}),
    (1, LoudSomewhere, "norm of at most", {}),
    (1, Overclaimed, "gamma claimed = 1", {}),
    (2, Quiet, "every singular value in 1", {}),
    (2, OneQuiet, "got 0.98", {}),
    (2, Overclaimed, "every singular value in 2", {"gamma": 2.0}),
    (2, Quiet, "largest singular value of at least", {"claim": "contraction", "attained": 1.0}),
    (3, NoBiasOnExport, "output of the export", {}),
    (3, ExportsItself, "plain modules", {}),
    (4, Lazy, "same parameters", {}),
    (4, Idle, "unused: expected a gradient, got None", {}),
    (4, Detached, "bias: expected a gradient that is not all zero", {}),
    (5, Counting, "got changes of ['calls']", {}),
    (5, Remembering, "got changes of ['.last']", {}),
    (5, TwoFaced, "train() against eval()", {}),
    (5, Noisy, "no random numbers", {}),
    (6, SecretSigns, "fresh layer with the saved state_dict", {}),
    (6, Graph, "deepcopy", {}),
    (6, SharedCopy, "the original after a change of its deepcopy", {}),
    (7, Cached, "after an optimiser step (training=False)", {}),
    (7, ClearedByTrain, "(training=False)", {}),
    (7, Versioned, "after an assignment of .data", {}),
    (8, IgnoresGain, "option gain: expected 1.0 and 0.5", GAINS),
    (9, PolarBySvd, "repeated singular values", {}),
    (9, DividesByZero, "zero matrices", {}),
    (9, WrongGradient, "finite differences", {}),
    (10, OnlyAtBirth, "lipschitz(layer) = 1", {}),
    (10, LoudAfterStep, "lipschitz(layer) = 1", {}),
    (12, LeftBehind, "device", {}),
    (12, AlwaysSingle, "float64 output, got torch.float32", {}),
    (12, HalfUnderAutocast, "bfloat16 autocast", {}),
    (12, BranchesOnValues, "got", {}),
    (12, OldFunction, "torch.func: expected a layer that vmap, jvp and grad can follow", {}),
    (12, WrongForwards, "torch.func.jvp: expected a relative difference", {}),
    (13, Careless, "expected OptionError, got ValueError", BAD_SIZES),
    (13, Silent, "got no error", BAD_SIZES),
    (13, Taciturn, "expected a message that holds", BAD_SIZES),
]
SIZES = [(2, 7, 7), (2, 4, 6), (2, 1, 1)]
BROKEN_CONV: list[tuple[int, type[nn.Module], str, dict[str, Any]]] = [
    (11, FirstSizeOnly, "expected an output of shape (3, 4, 6), got (3, 1, 1)", {"input_shape": SIZES[::-1]}),
    (11, EvenOnly, "expected an output of shape (3, 7, 7), got (3, 7, 6)", {}),
    (11, StaleSize, "after other sizes", {}),
    (11, BatchMixing, "one sample against the same one in a batch", {}),
    (13, TakesAnyImage, "another number of channels: expected ShapeError", {"refusals": conv_refusals(2, 7, 7)}),
]


def _check(kind: Callable[..., nn.Module], number: int, arguments: dict[str, Any]) -> None:
    if issubclass(kind, CayleyConv2d):  # type: ignore[arg-type]
        make = functools.partial(kind, in_channels=2, out_channels=3, kernel_size=3)
        check_layer(make, laws=[number], **{"input_shape": SIZES, **arguments})
    else:
        dtype = torch.float32 if number == 12 else torch.float64
        make = functools.partial(kind, in_features=5, out_features=7)
        check_layer(make, laws=[number], input_shape=(5,), dtype=dtype, **arguments)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "kind", "says", "arguments"),
    [*BROKEN, *BROKEN_CONV],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_broken_layer_fails(number: int, kind: type[nn.Module], says: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(LawBroken) as caught:
        _check(kind, number, arguments)
    message = str(caught.value)
    assert message.startswith(f"law {number} ({LAWS[number].name}), torch.float")
    assert "expected" in message
    assert "got" in message
    assert says in message


def test_an_export_owns_its_memory_whatever_the_rule_hands_out() -> None:
    layer, x = ExportSharesMemory(5, 4), torch.randn(3, 5)
    network = export(layer, (5,))
    before = network(x)
    with torch.no_grad():
        layer.bias += 1.0
    assert torch.equal(network(x), before)
    assert not torch.equal(layer(x), before)


def test_every_law_has_a_broken_layer() -> None:
    assert {number for number, *_ in [*BROKEN, *BROKEN_CONV]} == set(LAWS) == set(range(1, 14))


@pytest.mark.thorough
@pytest.mark.parametrize("number", LAWS)
def test_the_unbroken_twin_passes(number: int) -> None:
    used: dict[str, Any] = {}
    for law, _, _, arguments in BROKEN:
        if law == number and not {"claim", "gamma"} & set(arguments):
            used.update(arguments)
    _check(UsesGain if number == 8 else Twin, number, used)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [11, 13])
def test_the_unbroken_convolution_passes(number: int) -> None:
    for law, _, _, arguments in BROKEN_CONV:
        if law == number:
            _check(CayleyConv2d, number, arguments)
