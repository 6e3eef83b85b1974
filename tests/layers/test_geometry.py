"""Native geometry: dense singular values over strides, groups, dilations, paddings, transposed layers and signals."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lipkit
from lipkit.conv.patches import aol_scales, period, rko_factor
from lipkit.errors import OptionError, ShapeError
from lipkit.layers import NativeConv1d, NativeConv2d, NativeConvTranspose1d, NativeConvTranspose2d
from lipkit.modules.views import Reshape

# Torch says so of 'same' padding, a layer of its own included.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

LAYERS: dict[str, Any] = {
    "conv1d": NativeConv1d,
    "conv2d": NativeConv2d,
    "transposed1d": NativeConvTranspose1d,
    "transposed2d": NativeConvTranspose2d,
}


def dense(layer: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """The matrix of a layer without bias on samples of this shape."""
    with torch.no_grad():
        images = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
        return layer(images).flatten(1).mT


@dataclass(frozen=True)
class Geometry:
    kind: str
    constraint: str
    channels: tuple[int, int]
    groups: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: Any
    mode: str
    sides: tuple[int, ...]

    def make(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        cin, cout = (c * self.groups for c in self.channels)
        named = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}
        named |= {"padding_mode": self.mode, "constraint": self.constraint, "dtype": dtype}
        layer = LAYERS[self.kind](cin, cout, self.kernel, bias=False, **named)
        with torch.no_grad():
            for p in layer.parameters():
                p.add_(0.3 * torch.randn_like(p))
        return layer

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels[0] * self.groups, *self.sides)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    kind = draw(st.sampled_from(["conv2d", "conv2d", "conv2d", "conv1d", "transposed2d", "transposed1d"]))
    axes = 1 if "1d" in kind else 2

    def sizes(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(axes))

    constraint = draw(st.sampled_from(["aoc", "rko", "aol"]))
    kernel, stride, dilation = sizes(1, 4), sizes(1, 3), sizes(1, 3)
    mode = "zeros" if "transposed" in kind else draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
    named = [] if "transposed" in kind else ["valid"] + ["same"] * (set(stride) == {1})
    padding = draw(st.one_of(st.tuples(*[st.integers(0, 3)] * axes), *(st.just(name) for name in named)))
    channels = (draw(st.integers(1, 3)), draw(st.integers(1, 5)))
    sides = sizes(1, 8 if axes == 1 else 6)
    if mode == "circular":
        sides = tuple(-(-n // s) * s for n, s in zip(sides, stride, strict=True))
    return Geometry(kind, constraint, channels, draw(st.integers(1, 2)), kernel, stride, dilation, padding, mode, sides)


def isometric(g: Geometry) -> bool | None:
    """What the docstrings promise of an orthogonal layer: True for all singular values 1, None for no promise."""
    if g.constraint != "aoc" or g.mode in ("reflect", "replicate"):
        return None
    reach = [d * (k - 1) for d, k in zip(g.dilation, g.kernel, strict=True)]
    cin, cout = g.channels
    patches = math.prod(g.stride)
    if "transposed" in g.kind:
        return True if not any(g.padding) and cin <= patches * cout else None
    total = reach if g.padding == "same" else [0] * len(reach) if g.padding == "valid" else [2 * p for p in g.padding]
    if g.mode == "circular" and all(r - s < t for r, t, s in zip(reach, total, g.stride, strict=True)):
        return True
    if not any(total) and cout <= patches * cin:
        return True
    full = g.padding not in ("same", "valid") and list(g.padding) == reach
    return True if g.mode == "zeros" and full and cout >= patches * cin else None


def lone_convolution(plain: nn.Module) -> type[nn.Module]:
    """The type of the only module of an export that does more than reshape: signals are images of one row."""
    (found,) = {type(m) for m in plain} - {Reshape}
    return found


def check(g: Geometry, counts: dict[str, int]) -> None:
    try:
        layer = g.make()
        layer.check_input(g.shape)
    except (OptionError, ShapeError):
        reject()
    matrix = dense(layer, g.shape)
    values = torch.linalg.svdvals(matrix)
    bound = float(lipkit.lipschitz(layer, g.shape))
    assert float(values[0]) <= bound * (1 + 1e-9)
    counts[f"{g.constraint} {g.mode}"] = counts.get(f"{g.constraint} {g.mode}", 0) + 1
    if isometric(g):
        counts["isometric"] = counts.get("isometric", 0) + 1
        torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=1e-5)
    plain = lipkit.export(layer, g.shape)
    assert lone_convolution(plain) is (nn.ConvTranspose2d if "transposed" in g.kind else nn.Conv2d)
    torch.testing.assert_close(dense(plain, g.shape), matrix, rtol=0, atol=1e-12)
    proved = float(lipkit.lipschitz(plain, g.shape))
    assert float(values[0]) <= proved * (1 + 1e-12)


PROFILE = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


@pytest.mark.thorough
@given(geometries())
@PROFILE
def test_every_geometry_keeps_its_promise(g: Geometry) -> None:
    torch.manual_seed(0)
    check(g, {})


@pytest.mark.slow
@given(geometries())
@settings(PROFILE, max_examples=2500)
def test_thousands_of_geometries_keep_their_promise(g: Geometry) -> None:
    torch.manual_seed(0)
    check(g, {})


SQUARE = Geometry("conv2d", "aoc", (2, 8), 1, (3, 3), (2, 2), (1, 1), (1, 1), "circular", (6, 4))
ORTHOGONAL = {
    "stride": SQUARE,
    "stride, fewer outputs": replace(SQUARE, channels=(3, 5)),
    "stride, many outputs": replace(SQUARE, channels=(2, 11)),
    "stride, even kernel": replace(SQUARE, kernel=(4, 2), padding=(1, 0)),
    "stride of one axis": replace(SQUARE, stride=(1, 2), channels=(2, 3), padding=(1, 1)),
    "groups and dilation": replace(SQUARE, groups=3, dilation=(3, 1), padding=(3, 1), sides=(8, 6)),
    "valid": replace(SQUARE, mode="zeros", padding="valid", sides=(7, 9)),
    "full zeros": replace(SQUARE, mode="zeros", padding=(2, 2), channels=(2, 9)),
    "transposed": replace(SQUARE, kind="transposed2d", channels=(8, 2), padding=(0, 0), mode="zeros"),
    "signal": Geometry("conv1d", "aoc", (2, 4), 2, (5,), (2,), (1,), (2,), "circular", (8,)),
}


@pytest.mark.parametrize("name", ORTHOGONAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_aoc_is_orthogonal_where_it_says_so(name: str, dtype: torch.dtype) -> None:
    g = ORTHOGONAL[name]
    assert isometric(g)
    torch.manual_seed(1)
    values = torch.linalg.svdvals(dense(g.make(dtype).double(), g.shape))
    torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=1e-5)
    if name == "stride":
        broken = torch.linalg.svdvals(dense(replace(g, padding=(0, 1)).make(), g.shape))
        assert float(broken[-1]) > 0.999  # rows of the whole: still orthonormal
        zeros = torch.linalg.svdvals(dense(replace(g, mode="zeros").make(), g.shape))
        assert float(zeros[0]) <= 1 + 1e-9
        assert float(zeros[-1]) < 0.9


def test_windows_that_do_not_overlap_lose_nothing() -> None:
    g = replace(SQUARE, constraint="rko", kernel=(2, 2), padding=(0, 0))
    values = torch.linalg.svdvals(dense(g.make(), g.shape))
    torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=1e-5)
    overlapping = torch.linalg.svdvals(dense(replace(g, kernel=(3, 3), padding=(1, 1)).make(), g.shape))
    assert 0.5 - 1e-6 <= float(overlapping[0]) <= 1


@pytest.mark.parametrize(("stride", "dilation"), [(2, 1), (2, 2), (3, 2), (4, 6), (1, 3)])
def test_the_factor_of_rko_is_attained(stride: int, dilation: int) -> None:
    # Ones everywhere: the matrix of patches of one channel, and how often each pixel is in one.
    kernel, side = 5, 24
    taps = torch.eye(kernel, dtype=torch.float64)[:, None]
    conv = nn.Conv1d(1, kernel, kernel, stride, dilation=dilation, bias=False, dtype=torch.float64)
    conv.requires_grad_(False).weight.copy_(taps)
    x = torch.eye(side * 4, dtype=torch.float64)[:, None]
    patches = conv(x).flatten(1)
    copies = patches.square().sum(1).max().sqrt()
    factor = rko_factor((1, kernel), period((1, stride), (1, dilation)))
    assert float(copies) == pytest.approx(factor, rel=1e-12)
    for constraint in ("rko", "aol"):  # divided by that factor, the same taps have the norm 1
        layer = NativeConv1d(1, kernel, kernel, stride, 0, dilation, bias=False, dtype=x.dtype, constraint=constraint)
        layer.construction.free.detach().copy_(7 * taps[:, 0])
        assert torch.linalg.matrix_norm(dense(layer, (1, side * 4)), 2) == pytest.approx(1.0, rel=1e-9)


def test_aol_of_stride_one_is_the_published_one() -> None:
    from lipkit.layers.aol import aol_kernel

    kernel = torch.randn(5, 3, 3, 2, dtype=torch.float64)
    scaled = kernel[None] * aol_scales(kernel[None], (1, 1)).rsqrt()[:, None]
    torch.testing.assert_close(scaled[0], aol_kernel(kernel), rtol=1e-12, atol=0)


def test_aol_knows_its_stride() -> None:
    # A single tap for each pixel of a patch: nothing overlaps, and each tap has the gain 1 of its own.
    kernel = torch.eye(4, dtype=torch.float64).reshape(1, 4, 1, 2, 2) * 7
    scaled = kernel * aol_scales(kernel, (2, 2)).rsqrt()[:, None]
    torch.testing.assert_close(scaled, kernel / 7)


@pytest.mark.parametrize(("mode", "expected"), [("reflect", 2.0), ("replicate", 2.0), ("zeros", 1.0)])
def test_constants_of_paddings(mode: str, expected: float) -> None:
    layer = NativeConv2d(2, 3, 3, padding=1, padding_mode=mode)
    bound = float(lipkit.lipschitz(layer, (2, 6, 6)))
    assert expected <= bound <= expected * (1 + 1e-12)
    assert float(lipkit.lipschitz(layer)) >= bound


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"constraint": "cayley"}, "constraint: expected one of aoc, rko, aol"),
    ({"orthogonalize": torch.nn.functional.normalize}, "orthogonalize: expected a name"),
    ({"kernel_size": 2, "stride": 3}, "at least the stride"),
    ({"stride": (2, 1), "dilation": (4, 1)}, "no common divisor"),
    ({"stride": (1, 3), "dilation": (1, 3)}, "no common divisor"),
    ({"padding": -1}, "padding: expected numbers of at least 0"),
    ({"stride": 0}, "stride"),
    ({"kernel_size": (3,)}, r"kernel_size: expected one integer for each of 2 axes, got \(3,\)"),
    ({"padding": (1, 1, 1)}, r"padding: expected one integer for each of 2 axes, got \(1, 1, 1\)"),
    ({"groups": 2}, "expected arguments of nn.Conv2d"),
    ({"padding": "same", "stride": 2}, "expected arguments of nn.Conv2d"),
    ({"padding": 2, "padding_mode": "circular"}, "outputs beyond one period"),
    ({"kernel_size": 2, "padding": 1, "padding_mode": "circular"}, "outputs beyond one period"),
    ({"padding_mode": "mirror"}, "expected arguments of nn.Conv2d"),
    ({"dtype": torch.float16}, "float16"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_refusals(change: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        NativeConv2d(**{"in_channels": 3, "out_channels": 4, "kernel_size": 3, **change})


def test_signals_have_one_axis() -> None:
    for kind in (NativeConv1d, NativeConvTranspose1d):
        with pytest.raises(OptionError, match=r"padding: expected one integer for each of 1 axes, got \(1, 1\)"):
            kind(3, 4, 3, padding=(1, 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"padding": "same"}, "padding: expected numbers of at least 0, got 'same'"),
        ({"padding": 0.5}, "padding: expected numbers of at least 0, got 0.5"),
        ({"output_padding": 1}, r"output_padding: expected less than the stride or .*, got \(1, 1\)"),
        ({"output_padding": -1}, "output_padding"),
    ],
)
def test_refusals_of_transposed_layers(change: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        NativeConvTranspose2d(3, 4, 3, **change)


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        ({}, (4, 6, 6)),
        ({}, (3, 6)),
        ({}, (3, 2, 6)),
        ({"padding": 1, "dilation": 2}, (3, 2, 6)),
        ({"padding": 1, "padding_mode": "circular", "stride": 2}, (3, 6, 5)),
        ({"padding": 3, "padding_mode": "reflect"}, (3, 3, 6)),
        ({"padding": 2, "padding_mode": "circular", "dilation": 2}, (3, 1, 6)),
    ],
)
def test_images_that_do_not_fit(change: dict[str, Any], shape: tuple[int, ...]) -> None:
    layer = NativeConv2d(3, 4, 3, **change)
    for act in (lambda: layer(torch.zeros(1, *shape)), lambda: lipkit.export(layer, shape)):
        with pytest.raises(ShapeError, match=r"expected .* got"):
            act()


def test_arguments_come_in_the_order_of_torch() -> None:
    conv = NativeConv2d(4, 6, 3, 2, 3, 3, 2, False, "zeros")
    assert (conv.dilation, conv.groups, conv.bias, conv.padding) == ((3, 3), 2, None, (3, 3))
    turned = NativeConvTranspose2d(4, 6, 3, 2, 1, 1, 2, False, 3)
    assert (turned.output_padding, turned.groups, turned.bias, turned.dilation) == ((1, 1), 2, None, (3, 3))
    theirs = nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2, False, 3)
    x = torch.randn(2, 4, 5, 5)
    assert turned(x).shape == theirs(x).shape


@pytest.mark.thorough
def test_gradients_of_both_orders_and_autocast() -> None:
    torch.manual_seed(0)
    layer = replace(SQUARE, groups=2, mode="zeros").make()
    x = torch.randn(2, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *p: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, p, strict=True)), (x,))

    inputs = (x, *(v.detach().requires_grad_() for v in values))
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True, atol=1e-4)
    low = NativeConv2d(4, 8, 3, padding=1, groups=2)
    with torch.autocast("cpu", torch.bfloat16):
        y = low(torch.ones(1, 4, 5, 5))
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), low(torch.ones(1, 4, 5, 5)), atol=0.05)


@pytest.mark.thorough
def test_a_network_of_native_layers_is_certified() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        NativeConv2d(1, 8, 4, 2, 1),
        lipkit.layers.MaxMin(),
        NativeConv2d(8, 16, 3, 2, 1, groups=2, constraint="aol"),
        lipkit.layers.MaxMin(),
        NativeConvTranspose2d(16, 4, 2, 2),
        nn.Flatten(),
        lipkit.layers.BjorckLinear(4 * 16, 10),
    )
    plain = lipkit.export(net, (1, 8, 8))
    assert float(lipkit.lipschitz(plain)) < 1.001
    x = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(plain(x), net(x))
    found = lipkit.certify(plain, x, plain(x).argmax(1))
    assert (found.radius > 0).all()


def test_a_number_of_pixels_does_not_keep_the_size_of_an_image_under_an_even_kernel() -> None:
    conv = lipkit.layers.families.get("aoc").conv
    with pytest.raises(OptionError, match=r"padding: expected 'same' for kernel_size \(2, 2\), got 1"):
        conv(2, 2, 2, padding=1)
    assert conv(2, 2, 3, padding=1)(torch.zeros(1, 2, 4, 4)).shape == (1, 2, 4, 4)
    assert conv(2, 2, 4, 2, padding=[1, 1])(torch.zeros(1, 2, 4, 4)).shape == (1, 2, 2, 2)
