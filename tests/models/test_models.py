"""Architectures: published shapes, parameter counts by formula, the target constant reached."""

from __future__ import annotations

import doctest
import inspect
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lipkit
from lipkit import models
from lipkit.errors import LipkitError, OptionError, ShapeError
from lipkit.layers import CayleyConv2d, CayleyLinear, MaxMin, Normalize, Scale
from lipkit.lowering import export, lipschitz
from lipkit.models import MODELS, build, kwlarge, lipconvnet, small

COMMON = ("input_shape", "classes", "lipschitz", "mean", "std")
FRAMED = sorted(set(MODELS) - {"lbdn", "mlp", "rebuild", "sequence_classifier"})


@pytest.mark.parametrize("name", FRAMED)
def test_every_architecture_for_images_has_the_common_keywords(name: str) -> None:
    builder = MODELS[name]
    found = inspect.signature(builder).parameters
    assert [n for n in found if n in COMMON] == list(COMMON)
    assert all(found[n].kind is inspect.Parameter.KEYWORD_ONLY for n in COMMON)
    assert not {"image", "common"} & found.keys()
    text = inspect.getdoc(builder) or ""
    undescribed = [n for n in found if not re.search(rf"^    (\w+, )*{n}(, \w+)*: ", text, re.M)]
    assert not undescribed
    assert name in {test.name.rpartition(".")[2] for test in doctest.DocTestFinder().find(inspect.getmodule(builder))}
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        builder(colour=3)
    with pytest.raises(ShapeError, match=rf"^{name}: expected an input shape \(C, H, W\).*, got \(8, 8\)$"):
        builder(input_shape=(8, 8))
    with pytest.raises(OptionError, match="classes: expected an integer of at least 2, got 1"):
        builder(classes=1)


@pytest.mark.parametrize(
    ("name", "option", "expected"),
    [
        ("kwlarge", {"width": "abc"}, "width: expected an integer of at least 1, got 'abc'"),
        ("kwlarge", {"width": True}, "width: expected an integer of at least 1, got True"),
        ("kwlarge", {"dense": 5}, "dense: expected a list of sizes, got 5"),
        ("kwlarge", {"pool": 1}, "pool: expected True or False, got 1"),
        ("lbdn_conv", {"hidden": "ab"}, "hidden: expected a list of sizes, got 'ab'"),
        ("lipconvnet", {"width": "abc"}, "width: expected a positive finite number, got 'abc'"),
        ("lipconvnet", {"width": 0.0}, r"width: expected a positive finite number, got 0.0"),
        ("lipconvnet", {"first": 6}, "first: expected a number of blocks from 0 to 5, got 6"),
        (
            "lipconvnet",
            {"last_options": {"dtype": torch.float64}},
            "dtype: expected no such option, got torch.float64: .*",
        ),
        ("kwlarge", {"lipschitz": 0}, "lipschitz: expected a positive finite number, got 0"),
        ("small", {"widht": 2}, r"model small: unknown option 'widht', did you mean 'width'\?"),
        ("small", {"bogus": 2}, "model small: unknown option 'bogus'; known: layer, width, .*, those of its layers"),
        ("resnet_plain", {"blocks": [1, 1, 1, 0]}, r"blocks\[3\]: expected an integer of at least 1, got 0"),
    ],
)
def test_options_of_another_kind_are_refused_by_name(name: str, option: dict[str, Any], expected: str) -> None:
    with pytest.raises(OptionError, match=f"^{expected}$"):
        build(name, **option)
    assert build("sllnet", channels=4, depth=None, dense=(8, 8), last_layer_normalization=True) is not None


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def by_formula(layers: list[tuple[int, ...]]) -> int:
    """Weights, one scale and the biases of a Cayley layer: (cin, cout) dense, (cin, cout, k, stride) conv."""
    total = 0
    for cin, cout, *rest in layers:
        k, stride = rest or (1, 1)
        total += cin * stride**2 * cout * k * k + 1 + cout
    return total


@pytest.mark.parametrize(
    ("shape", "width", "classes"), [((3, 32, 32), 1, 10), ((1, 8, 8), 2, 4), ((1, 28, 28), 1, 10), ((3, 12, 8), 1, 2)]
)
def test_kwlarge_has_the_published_structure(shape: tuple[int, int, int], width: int, classes: int) -> None:
    model = kwlarge(input_shape=shape, width=width, classes=classes)
    kinds = [type(m) for m in model]
    conv, dense = [CayleyConv2d, MaxMin], [CayleyLinear, MaxMin]
    assert kinds == [*conv * 4, nn.Flatten, *dense * 2, CayleyLinear]
    convs = [m for m in model if isinstance(m, CayleyConv2d)]
    c, w = shape[0], width
    assert [(m.in_channels, m.out_channels, m.kernel_size, m.stride) for m in convs] == [
        (c, 32 * w, (3, 3), 1),
        (32 * w, 32 * w, (1, 1), 2),
        (32 * w, 64 * w, (3, 3), 1),
        (64 * w, 64 * w, (1, 1), 2),
    ]
    features = 64 * w * shape[1] * shape[2] // 16
    linears = [m for m in model if isinstance(m, CayleyLinear)]
    sizes = [(m.in_features, m.out_features) for m in linears]
    assert sizes == [(features, 512 * w), (512 * w, 512), (512, classes)]
    layers: list[tuple[int, ...]] = [(c, 32 * w, 3, 1), (32 * w, 32 * w, 1, 2), (32 * w, 64 * w, 3, 1)]
    layers += [(64 * w, 64 * w, 1, 2), *sizes]
    assert parameters(model) == by_formula(layers)


def test_kwlarge_on_cifar_has_about_two_point_four_million_parameters() -> None:
    assert parameters(kwlarge()) == 2_405_425


# Channels and units in the order of computation, as the papers print them, and the number of parameters here.
# KWLarge, ResNet9, WideResNet10-10: Trockman & Kolter, section 5 and published code. LipConvnet: ECO, table 1.
# The others: LBDN, tables 4 to 6; SLL small: Araujo et al. 2023.
PUBLISHED: list[tuple[str, dict[str, Any], list[int], int]] = [
    ("kwlarge", {}, [32, 32, 64, 64, 512, 512, 10], 2_405_425),
    ("kwlarge", {"width": 3}, [96, 96, 192, 192, 1536, 512, 10], 20_021_361),
    (
        "kwlarge",
        {"layer": "aol", "pool": True, "dense": (640, 512), "classes": 100},
        [32, 32, 64, 64, 640, 512, 100],
        3_067_140,
    ),
    ("resnet9", {}, [64, 128, 128, 128, 256, 512, 512, 512, 512, 10], 7_619_990),
    ("wide_resnet", {}, [16, 160, 160, 160, 320, 320, 320, 640, 640, 640, 640, 10], 8_561_273),
    ("wrn_plain", {}, [16, *[160] * 9, *[320] * 9, *[640] * 9, 10], 36_479_194),
    ("lipconvnet", {}, [64, 128, 256, 512, 1024, 10], 8_306_635),
    ("lipconvnet", {"depth": 10}, [32, 64, 64, 128, 128, 256, 256, 512, 512, 1024, 10], 9_136_043),
    (
        "lipconvnet",
        {"depth": 40, "layer": "soc"},
        [n for first in (32, 64, 128, 256, 512) for n in [*[first] * 7, 2 * first]] + [10],
        16_791_275,
    ),
    ("lbdn", {"hidden": (190, 190, 128), "input_shape": (784,), "classes": 10}, [190, 190, 128, 10], 300_378),
    ("lbdn_conv", {}, [64, 64, 128, 128, 256, 256, 2048, 2048, 1024, 100], 25_806_390),
    (
        "lbdn_conv",
        {"blocks": 4, "input_shape": (3, 64, 64), "classes": 200},
        [64, 64, 128, 128, 256, 256, 512, 512, 2048, 2048, 1024, 200],
        39_149_214,
    ),
    ("sllnet", {"classes": 100}, [45] * 20 + [2880] * 7, 41_357_052),
    ("sllnet", {"size": "large", "classes": 100}, [90] * 50 + [5760] * 10, 118_208_760),
]


@pytest.mark.parametrize(("name", "options", "widths", "count"), PUBLISHED)
def test_models_of_the_papers_have_their_widths(
    name: str, options: dict[str, Any], widths: list[int], count: int
) -> None:
    with torch.device("meta"):
        model = build(name, **options)
    layers = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
    sizes = [getattr(m, "out_channels", getattr(m, "out_features", None)) for m in layers]
    assert [size for size in sizes if isinstance(size, int)] == widths
    assert parameters(model) == count


def test_blocks_of_lipconvnet_halve_the_image_as_printed() -> None:
    with torch.device("meta"):
        model = lipconvnet(10, layer="cayley")
    convs = [m for m in model if isinstance(m, CayleyConv2d)]
    kernels = [(3, 3)] * 7 + [(1, 1)] * 3  # one pixel is left from the last layer of block 4 on
    assert [m.stride for m in convs] == [1, 2, 1, 2, 1, 2, 1, 3, 1, 1]
    assert [m.kernel_size for m in convs] == kernels


@pytest.mark.parametrize(("kernel", "strided"), [(1, 1), (2, 1), (3, 1), (5, 2), (7, 3)])
def test_strided_layers_have_half_the_kernel(kernel: int, strided: int) -> None:
    model = kwlarge(input_shape=(1, 8, 8), kernel_size=kernel)
    kernels = [m.kernel_size for m in model if isinstance(m, CayleyConv2d)]
    assert kernels == [(kernel, kernel), (strided, strided)] * 2


@pytest.mark.parametrize(
    ("shape", "convs", "features"), [((1, 8, 8), 2, 512), ((1, 28, 28), 3, 32 * 49), ((3, 6, 10), 2, 480)]
)
def test_small(shape: tuple[int, int, int], convs: int, features: int) -> None:
    model = small(input_shape=shape, classes=3)
    assert sum(isinstance(m, CayleyConv2d) for m in model) == convs
    assert [m.in_features for m in model if isinstance(m, CayleyLinear)] == [features, 256]
    assert model(torch.randn(2, *shape)).shape == (2, 3)


def gain(model: nn.Module, shape: tuple[int, ...], seed: int) -> float:
    """Largest singular value of a Jacobian: a lower bound of the Lipschitz constant."""
    x = torch.rand(1, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    jacobian = torch.autograd.functional.jacobian(model, x).reshape(-1, math.prod(shape))
    return float(np.linalg.norm(jacobian.numpy(), 2))


@pytest.mark.thorough
@pytest.mark.parametrize("make", [kwlarge, small])
@pytest.mark.parametrize("target", [0.1, 1.0, 7.5])
def test_the_target_constant_is_claimed_and_reached(make: Any, target: float) -> None:
    torch.manual_seed(0)
    shape = (1, 8, 8)
    model = make(input_shape=shape, lipschitz=target, classes=10)
    claimed = float(lipschitz(model).detach())
    # Exactly the number that the model holds.
    assert claimed == float(torch.tensor(target))
    plain = export(model, shape)
    bound = float(lipschitz(plain))
    assert target * (1 - 1e-6) <= bound <= target * (1 + 1e-4)
    model = model.double()
    exact = export(model, shape)
    bound = float(lipschitz(exact))
    assert claimed * (1 - 1e-10) <= bound <= claimed * (1 + 1e-9)
    lower = max(gain(exact, shape, seed) for seed in range(2))
    assert lower <= bound
    # MaxMin loses nothing where gradients flow: the bound is not vacuous.
    assert lower >= 0.05 * target


@pytest.mark.thorough
def test_normalisation_multiplies_by_the_inverse_of_the_smallest_std() -> None:
    shape = (3, 8, 8)
    model = kwlarge(input_shape=shape, lipschitz=2.0, mean=(0.5, 0.4, 0.3), std=(0.25, 0.125, 0.5))
    assert type(model[0]) is Normalize
    assert type(model[1]) is Scale
    assert float(lipschitz(model)) == pytest.approx(16.0, rel=1e-12)
    plain = export(model, shape)
    assert float(lipschitz(plain)) == pytest.approx(16.0, rel=1e-4)
    x = torch.rand(2, *shape)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.5, 0.4, 0.3), (0.25, 0.125, 0.5)))
    bare = nn.Sequential(*list(model)[2:])
    assert torch.allclose(model(x), bare(2.0 * (x - mean) / std), atol=1e-5)
    assert torch.allclose(plain(x), model(x), atol=1e-4)
    assert gain(export(model.double(), shape), shape, 0) <= 16.0 * (1 + 1e-9)


@pytest.mark.thorough
def test_the_last_module_is_the_last_linear_layer() -> None:
    for model in (kwlarge(input_shape=(1, 8, 8), lipschitz=3.0), small(lipschitz=3.0, mean=[0.5], std=[0.5])):
        assert type(model[-1]) is CayleyLinear
        assert type(export(model, (1, 8, 8))[-1]) is nn.Linear


@pytest.mark.thorough
def test_trained_weights_reach_the_export() -> None:
    model = small(input_shape=(1, 8, 8))
    x = torch.rand(4, 1, 8, 8)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        model(x).square().sum().backward()
        optimiser.step()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    plain = export(model, (1, 8, 8))
    assert torch.allclose(plain(x), model(x), atol=1e-4)
    assert float(lipschitz(plain)) == pytest.approx(1.0, abs=1e-4)


OTHERS: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "kwlarge": ({}, (3, 8, 8)),
    "small": ({}, (1, 12, 12)),
    "resnet9": ({"width": 2}, (3, 16, 16)),
    "wide_resnet": ({"depth": 10, "widen": 1}, (1, 16, 16)),
    "lipconvnet": ({"layer": "cayley", "width": 0.0625}, (3, 20, 28)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(OTHERS))
def test_every_architecture_builds_claims_and_exports(name: str) -> None:
    options, shape = OTHERS[name]
    torch.manual_seed(0)
    model = build(name, input_shape=shape, classes=5, lipschitz=3.0, **options)
    assert float(lipschitz(model).detach()) == pytest.approx(3.0, rel=1e-6)
    plain = export(model, shape)
    x = torch.rand(2, *shape)
    assert plain(x).shape == (2, 5)
    assert torch.allclose(plain(x), model(x), atol=1e-4)
    assert 2.9 <= float(lipschitz(plain)) <= 3.01
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    normalised = build(name, input_shape=shape, mean=[0.5] * shape[0], std=[0.25] * shape[0], **options)
    assert float(lipschitz(normalised).detach()) == pytest.approx(4.0, rel=1e-6)


GOOD: dict[str, Any] = {"input_shape": (3, 8, 8), "classes": 10}
BAD: dict[str, dict[str, Any]] = {
    "unknown family": {"layer": "nope"},
    "unknown option": {"colour": 3},
    "occupied option": {"stride": 2},
    "device": {"device": "cpu"},
    "dtype": {"dtype": torch.float64},
    "one class": {"classes": 1},
    "no class": {"classes": 0},
    "classes as a float": {"classes": 2.5},
    "classes as a flag": {"classes": True},
    "width zero": {"width": 0},
    "negative width": {"width": -1},
    "fractional width": {"width": 1.5},
    "kernel zero": {"kernel_size": 0},
    "negative kernel": {"kernel_size": -3},
    "fractional kernel": {"kernel_size": 3.5},
    "padding mode": {"padding_mode": "zeros"},
    "groups": {"groups": 2},
    "dilation": {"dilation": 2},
    "two sides": {"input_shape": (8, 8)},
    "four sides": {"input_shape": (1, 3, 8, 8)},
    "odd sides": {"input_shape": (3, 7, 8)},
    "empty sides": {"input_shape": (3, 0, 8)},
    "negative sides": {"input_shape": (3, -8, 8)},
    "sides as floats": {"input_shape": (3, 8.0, 8.0)},
    "no sides": {"input_shape": ()},
    "sides as a number": {"input_shape": 8},
    "sides as text": {"input_shape": "388"},
    "constant zero": {"lipschitz": 0.0},
    "negative constant": {"lipschitz": -1.0},
    "infinite constant": {"lipschitz": math.inf},
    "undefined constant": {"lipschitz": math.nan},
    "mean without std": {"mean": (0.5, 0.5, 0.5)},
    "std without mean": {"std": (0.5, 0.5, 0.5)},
    "two means": {"mean": (0.5, 0.5), "std": (0.5, 0.5)},
    "lengths differ": {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5)},
    "std zero": {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.0, 0.5)},
    "negative std": {"mean": (0.5, 0.5, 0.5), "std": (0.5, -0.5, 0.5)},
    "mean as a number": {"mean": 0.5, "std": 0.5},
    "infinite mean": {"mean": (0.5, math.inf, 0.5), "std": (0.5, 0.5, 0.5)},
}


@pytest.mark.parametrize("name", ["kwlarge", "small"])
@pytest.mark.parametrize("case", list(BAD))
def test_every_bad_option_raises_one_sentence(name: str, case: str) -> None:
    with pytest.raises(LipkitError) as caught:
        build(name, **(GOOD | BAD[case]))
    assert isinstance(caught.value, (OptionError, ShapeError))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "options", "shape"),
    [
        (models.kwlarge, {"width": 1, "dense": [4, 6], "input_shape": (1, 4, 4), "classes": 3}, (1, 4, 4)),
        (models.wrn_plain, {"depth": 10, "widen": 1, "input_shape": (1, 4, 4), "classes": 3}, (1, 4, 4)),
        (models.patchnet, {"stages": [[4, 1]], "dense": (6,), "input_shape": (1, 4, 4), "classes": 3}, (1, 4, 4)),
        (models.mlp, {"hidden": [4], "input_shape": (1, 2, 3), "classes": 2}, (1, 2, 3)),
        (models.lbdn, {"sizes": [3, 4, 2]}, (3,)),
        (models.LBDN, {"sizes": [3, 4, 2]}, (3,)),
        (models.sequence_classifier, {"states": 3, "units": 4, "input_shape": (5, 2), "classes": 2}, (5, 2)),
        (models.unet, {"channels": 4, "depth": 0, "blocks": 1, "input_shape": (1, 4, 4)}, (1, 4, 4)),
        (models.autoencoder, {"stages": [4], "code": 2, "input_shape": (1, 4, 4)}, (1, 4, 4)),
    ],
)
def test_integers_of_numpy_are_sizes_like_those_of_python(
    make: Any, options: dict[str, Any], shape: tuple[int, ...], tmp_path: Path
) -> None:
    def as_numpy(value: Any) -> Any:
        return np.int64(value) if isinstance(value, int) else type(value)(map(as_numpy, value))

    made = []
    for given in (options, {name: as_numpy(value) for name, value in options.items()}):
        torch.manual_seed(0)
        made.append(make(**given))
    assert repr(made[0]) == repr(made[1])
    x = torch.ones(1, *shape)
    assert torch.equal(made[0].eval()(x), made[1].eval()(x))
    lipkit.save(export(made[1], shape), tmp_path / "network")  # JSON has no numbers of numpy
    flags = {name: np.bool_(True) if isinstance(value, int) else value for name, value in options.items()}
    with pytest.raises(LipkitError):
        make(**flags if flags != options else {"sizes": [True, 2]})


def test_small_above_twelve_pixels_needs_multiples_of_four() -> None:
    with pytest.raises(ShapeError, match="multiples of 4"):
        small(input_shape=(1, 14, 14))
    assert small(input_shape=(1, 6, 6))(torch.zeros(1, 1, 6, 6)).shape == (1, 10)


def test_unknown_architecture_and_missing_options() -> None:
    with pytest.raises(OptionError, match=r"expected one of .*kwlarge.* got 'alexnet'"):
        build("alexnet", **GOOD)
    assert isinstance(build("small", input_shape=(1, 8, 8), classes=2), nn.Sequential)


def test_another_image_size_is_refused_by_the_export() -> None:
    plain: nn.Module = export(small(input_shape=(1, 8, 8)), (1, 8, 8))
    bad: list[Tensor] = [torch.zeros(1, 1, 8, 10), torch.zeros(1, 3, 8, 8), torch.zeros(1, 64)]
    for x in bad:
        with pytest.raises(ShapeError):
            plain(x)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "parts", "options"),
    [("kwlarge", 7, {}), ("resnet9", 8, {"width": 4}), ("wide_resnet", 6, {"depth": 10, "widen": 1})],
)
def test_a_split_gain_is_as_large_and_the_same_function_without_biases(
    name: str, parts: int, options: dict[str, Any]
) -> None:
    shape = (3, 16, 16)
    models = []
    for split in (False, True):
        torch.manual_seed(0)
        model = build(name, input_shape=shape, lipschitz=2.0, split=split, **options)
        for part in model.modules():
            if isinstance(getattr(part, "bias", None), nn.Parameter):
                nn.init.zeros_(part.bias)
        assert isinstance(model, nn.Sequential)
        models.append(model)
    front, split_model = models
    gains = [m for m in split_model.children() if isinstance(m, Scale)]
    assert len(gains) == parts == sum(next(m.parameters(), None) is not None for m in split_model.children())
    assert [float(g.gamma()) for g in gains] == pytest.approx([2 ** (1 / parts)] * parts, rel=1e-6)
    assert isinstance(split_model[-1], CayleyLinear)
    assert float(lipschitz(split_model).detach()) == pytest.approx(2.0, rel=1e-5)
    x = torch.randn(4, *shape)
    with torch.no_grad():
        torch.testing.assert_close(split_model(x), front(x), rtol=1e-4, atol=1e-5)
        front[-1].bias.fill_(1.0)
        split_model[-1].bias.fill_(1.0)
        torch.testing.assert_close(split_model(x), front(x), rtol=1e-4, atol=1e-5)  # behind the last gain
        front[1].bias.fill_(1.0)
        split_model[1].bias.fill_(1.0)
        assert (split_model(x) - front(x)).abs().max() > 0.01  # the others' biases meet different gains


def test_a_gain_of_one_has_no_parts_and_none_is_refused() -> None:
    model = build("kwlarge", input_shape=(3, 8, 8), split=True, lipschitz=1.0)
    assert not [m for m in model.children() if isinstance(m, Scale)]
    with pytest.raises(OptionError, match="model lbdn: expected the option lipschitz beside split, got none to split"):
        build("lbdn", split=True, input_shape=(2,), classes=2, hidden=[4], gamma=2.0)


def test_a_gain_inside_a_layer_is_not_split() -> None:
    options = {"states": 3, "units": 4, "input_shape": (5, 2), "classes": 2}
    with pytest.raises(OptionError, match="model sequence_classifier: expected no split, since its gain is inside"):
        build("sequence_classifier", split=True, lipschitz=2.0, **options)
