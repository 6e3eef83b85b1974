"""What ``lipschitz`` and ``export`` promise, and everything that must not fool them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.utils.parametrizations as parametrizations
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import lipkit
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.layers import (
    CayleyConv2d,
    CayleyLinear,
    NativeConv2d,
    Normalize,
    R2dn,
    Residual,
    SandwichLinear,
    Scale,
    ScaledAvgPool2d,
    SllLinear,
)
from lipkit.lowering import export, lipschitz
from lipkit.models import LBDN
from lipkit.modules import (
    ROWS,
    Affine,
    Blend,
    FourierConv2d,
    Graph,
    GroupSort,
    LayerCenter,
    MaxMin,
    Network,
    Plain,
    Reshape,
    SandwichBlock,
    SlopeResidual,
    add_plain,
    export_rule,
    lipschitz_rule,
    output_shape,
    rules,
)


def value(module: nn.Module, shape: tuple[int, ...] | None = None) -> float:
    return float(lipschitz(module, shape).detach())


def dense(module: nn.Module, shape: tuple[int, ...]) -> np.ndarray:
    """The linear part of an affine module, in float64."""
    n = math.prod(shape)
    module = copy.deepcopy(module).double()
    with torch.no_grad():
        zero = module(torch.zeros(1, *shape, dtype=torch.float64))
        return (module(torch.eye(n, dtype=torch.float64).reshape(n, *shape)) - zero).flatten(1).T.numpy()


def check_linear(module: nn.Module, shape: tuple[int, ...], tightness: float, with_shape: bool = True) -> None:
    truth = np.linalg.norm(dense(module, shape), 2)
    bound = value(module, shape) if with_shape else value(module)
    assert truth * (1 - 1e-13) <= bound <= truth * tightness


# ---------------------------------------------------------------- true constants of linear modules


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (3, 5), (40, 30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_linear(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_linear(nn.Linear(*shape).to(dtype), (shape[0],), 1 + 1e-10)


CIRCULAR = [
    {"kernel_size": 3, "padding": "same"},
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 2, "padding": "same"},
    {"kernel_size": (3, 5), "padding": (1, 2)},
    {"kernel_size": 5, "padding": 1},
    {"kernel_size": 3, "padding": "valid"},
    {"kernel_size": 3, "padding": 1, "stride": 2},
    {"kernel_size": 3, "padding": 2, "dilation": 2},
    {"kernel_size": 3, "padding": "same", "dilation": 2},
    {"kernel_size": 1, "padding": 0},
]


@pytest.mark.parametrize("options", CIRCULAR, ids=str)
@pytest.mark.parametrize("size", [(6, 7), (5, 8)])
def test_circular_convolution(options: dict[str, object], size: tuple[int, int]) -> None:
    for groups in (1, 2):
        layer = nn.Conv2d(2, 4, padding_mode="circular", groups=groups, **options)  # type: ignore[arg-type]
        truth = np.linalg.norm(dense(layer, (2, *size)), 2)
        assert truth * (1 - 1e-13) <= value(layer, (2, *size))
        assert truth * (1 - 1e-13) <= value(layer)
        exact = options["padding"] in ("same", 1) and "stride" not in options and options["kernel_size"] != 5
        if exact and "dilation" not in options:
            assert value(layer, (2, *size)) <= truth * (1 + 1e-10)


ZEROS = [
    {"kernel_size": 3, "padding": "same"},
    {"kernel_size": 3, "padding": 0},
    {"kernel_size": 3, "padding": 5},
    {"kernel_size": 4, "padding": "same"},
    {"kernel_size": 3, "padding": 1, "stride": 2},
    {"kernel_size": 3, "padding": "valid", "dilation": 2},
    {"kernel_size": (1, 4), "padding": (2, 1)},
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("options", ZEROS, ids=str)
def test_zero_padded_convolution(options: dict[str, object]) -> None:
    torch.manual_seed(0)  # of some kernels the bound on a large image is more than twice the norm on this one
    layer = nn.Conv2d(3, 2, **options)  # type: ignore[arg-type]
    truth = np.linalg.norm(dense(layer, (3, 7, 6)), 2)
    for bound in (value(layer), value(layer, (3, 7, 6))):
        assert truth * (1 - 1e-13) <= bound <= truth * 2


@pytest.mark.parametrize("padding", [2, (1, 2), (3, 0)])
def test_circular_overpadding_is_refused_and_would_be_wrong(padding: object) -> None:
    layer = nn.Conv2d(1, 1, 3, padding=padding, padding_mode="circular", bias=False)  # type: ignore[arg-type]
    with pytest.raises(NoRuleError, match=r"expected at most .* got"):
        lipschitz(layer, (1, 5, 5))
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[0, 0, 1, 1] = 1
    assert np.linalg.norm(dense(layer, (1, 5, 5)), 2) > 1.4


def test_the_padding_that_counts_is_the_one_that_forward_uses() -> None:
    layer = nn.Conv2d(1, 1, 3, padding=2, padding_mode="circular", bias=False)
    layer.padding = (1, 1)  # has no effect on the forward pass
    with pytest.raises(NoRuleError, match="expected at most"):
        lipschitz(layer, (1, 5, 5))
    layer = nn.Conv2d(1, 1, 1, padding=0, padding_mode="circular", bias=False)
    layer.kernel_size = (9, 9)  # neither has this
    check_linear(layer, (1, 4, 4), 1 + 1e-10)


def test_padding_mode_changed_afterwards_counts() -> None:
    layer = nn.Conv2d(1, 1, 3, padding=2)
    layer.padding_mode = "circular"
    with pytest.raises(NoRuleError, match="expected at most"):
        lipschitz(layer)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_in_evaluation_mode(kind: type[nn.Module], affine: bool) -> None:
    module = kind(3, affine=affine)
    with torch.no_grad():
        module.running_var.copy_(torch.tensor([0.5, 2.0, 0.01]))
        module.running_mean.normal_()
        if affine:
            module.weight.copy_(torch.tensor([1.0, -9.0, 0.3]))
    shape = (3, 2, 2, 2)[: {nn.BatchNorm1d: 2, nn.BatchNorm2d: 3, nn.BatchNorm3d: 4}[kind]]
    check_linear(module.eval(), shape, 1 + 1e-10)
    plain = export(module, shape)
    x = torch.randn(4, *shape)
    assert torch.allclose(plain(x), module(x), atol=1e-5)
    assert value(plain) == pytest.approx(value(module), rel=1e-6)
    with pytest.raises(ShapeError):
        export(module, (1, *shape[1:]))


def test_batch_norm_that_depends_on_the_batch_is_refused() -> None:
    for module in (nn.BatchNorm2d(3), nn.BatchNorm2d(3, track_running_stats=False).eval()):
        with pytest.raises(NoRuleError, match="batch statistics"):
            lipschitz(module)
        with pytest.raises(NoRuleError, match="batch statistics"):
            export(module, (3, 4, 4))
        with pytest.raises(NoRuleError):
            lipschitz(nn.Sequential(nn.Sequential(nn.Identity(), module)))


def test_a_refused_batch_norm_is_not_run() -> None:
    module = nn.BatchNorm2d(3)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(NoRuleError):
        lipschitz(nn.Sequential(nn.Identity(), module, nn.ReLU()), (3, 4, 4))
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_batch_norm_with_a_negative_variance_bounds_nothing() -> None:
    module = nn.BatchNorm1d(2).eval()
    module.running_var.fill_(-1.0)
    for function in (lipschitz, export):
        with pytest.raises(NoRuleError, match=r"BatchNorm1d: expected running_var \+ eps above 0, got -0.999"):
            function(module, (2,))
    module.running_var.fill_(math.nan)
    assert value(module) == math.inf


@pytest.mark.parametrize(
    "kind", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout]
)
def test_dropout(kind: type[nn.Module]) -> None:
    module = kind()
    with pytest.raises(NoRuleError, match="random"):
        lipschitz(module)
    with pytest.raises(NoRuleError, match="random"):
        export(module, (2, 3, 3))
    assert value(module.eval()) == 1.0
    assert len(export(module, (2, 3, 3))) == 0


def test_attraction_without_heads_is_refused() -> None:
    with pytest.raises(OptionError, match="heads: expected an integer of at least 1, got 0"):
        lipkit.modules.Attraction(0)


@pytest.mark.parametrize("padding", [1, (1, 2, 0, 3), -1, (2, -1, 0, -1)])
def test_zero_padding_layers(padding: object) -> None:
    layer = nn.ZeroPad2d(padding)  # type: ignore[arg-type]
    check_linear(layer, (2, 4, 4), 1 + 1e-12)
    with pytest.raises(ShapeError, match="at least 2"):
        lipschitz(layer, (4,))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Flatten(), (2, 3, 4)),
        (nn.Flatten(2), (2, 3, 4)),
        (nn.Flatten(-2), (2, 3, 4)),
        (nn.Flatten(-3), (2, 3, 4)),
        (nn.Unflatten(1, (2, 3)), (6, 2)),
        (nn.Unflatten(-1, (2, 3)), (2, 6)),
        (nn.PixelShuffle(2), (8, 3, 3)),
        (nn.PixelUnshuffle(2), (2, 4, 6)),
    ],
)
def test_reshapes_are_isometries(module: nn.Module, shape: tuple[int, ...]) -> None:
    check_linear(module, shape, 1 + 1e-12)
    assert value(export(module, shape)) == 1.0


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Flatten(0), None),
        (nn.Flatten(0), (2, 3)),
        (nn.Flatten(-3), None),
        (nn.Flatten(-3), (2, 3)),
        (nn.Unflatten(0, (1, -1)), (3,)),
        (nn.Unflatten(-2, (1, -1)), (3,)),
        (nn.Unflatten(-2, (1, -1)), None),
    ],
)
def test_reshapes_of_the_batch_are_refused(module: nn.Module, shape: tuple[int, ...] | None) -> None:
    with pytest.raises(NoRuleError, match="batch"):
        lipschitz(module, shape)


def test_a_softmax_without_its_dimension_asks_for_it() -> None:
    with pytest.raises(NoRuleError, match=r"got None .*: torch guesses it; give -1"):
        export(nn.Softmax(), (3,))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Flatten(0), (2, 3)),
        (nn.Unflatten(0, (2, -1)), (3,)),
        (nn.Softmax(dim=0), (3,)),
        (nn.Conv2d(2, 2, 1), (4, 4)),
        (nn.PixelUnshuffle(2), (4, 4)),
        (nn.ZeroPad2d(1), (4,)),
        (nn.MaxPool2d(2, return_indices=True), (1, 4, 4)),
    ],
)
def test_a_network_that_mixes_samples_is_not_exported(module: nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises((NoRuleError, ShapeError), match=r"expected .* got"):
        export(module, shape)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (lipkit.modules.LPReLU(5), (3,)),
        (nn.ZeroPad2d(-2), (2, 3, 3)),
        (nn.ZeroPad2d((1, 1, 2, -2)), (1, 1, 2)),
        (lipkit.modules.MaxMinShift2d(16, 2), (15, 4, 4)),
    ],
)
def test_a_shape_that_the_module_does_not_accept_is_not_exported(module: nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError):
        export(module, shape)


def test_unbatched_input_of_torch_is_not_taken_for_a_batch() -> None:
    # An nn.Conv2d reads a 3-D input as one image: the batch would become its channels.
    layer = nn.Conv2d(2, 2, 1)
    with pytest.raises(ShapeError, match="expected 3 dimensions"):
        lipschitz(layer, (4, 4))
    for module in (nn.PixelShuffle(2), nn.PixelUnshuffle(2)):
        with pytest.raises(ShapeError, match="at least 3"):
            lipschitz(module, (4, 4))
    # Shifts the batch by one without changing its size.
    with pytest.raises(ShapeError, match="at least 2"):
        lipschitz(Network([nn.ZeroPad2d((0, 0, 1, -1))], (4,)))


# ---------------------------------------------------------------- lipkit's own modules


def test_affine() -> None:
    module = Affine(torch.tensor([0.5, -3.0, 1.0]), torch.ones(3))
    check_linear(module, (3, 2, 2), 1 + 1e-12)
    assert value(module) == 3.0


def test_affine_does_not_broadcast_one_channel_to_many() -> None:
    module = Affine(torch.ones(4), torch.zeros(4))  # on one channel the norm would be 2
    with pytest.raises(ShapeError, match=r"scale \(4,\) and shift"):
        module(torch.zeros(2, 1))
    with pytest.raises(ShapeError):
        lipschitz(Network([module, nn.ReLU()], (1,)))
    with pytest.raises(ShapeError):
        Affine(torch.ones(2), torch.ones(3))
    with pytest.raises(ShapeError):
        Affine(torch.ones(0), torch.ones(0))


def blend(body: nn.Module, share: float, shortcut: nn.Module) -> Graph:
    return Graph([body, shortcut, Blend(torch.tensor(share))], [[0], [0], [1, 2]])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, -0.5, 1.5])
def test_blends_of_two_branches(share: float) -> None:
    body, shortcut = nn.Linear(4, 3), nn.Linear(4, 3)
    module = blend(body, share, shortcut)
    truth = np.linalg.norm(dense(module, (4,)), 2)
    bound = value(module, (4,))
    expected = abs(share) * value(body) + abs(1 - share) * value(shortcut)
    assert truth * (1 - 1e-13) <= bound
    assert bound == pytest.approx(expected, rel=1e-6)
    # Attained when both branches are the same, and a convex combination needs no room for rounding.
    same = blend(body, 0.3, body)
    assert value(same) == value(body)
    assert value(same) >= np.linalg.norm(dense(same, (4,)), 2) * (1 - 1e-13)


@pytest.mark.parametrize("make", [lambda b: Residual(b), lambda b: blend(b, 0.5, nn.Identity())])
def test_branches_that_overwrite_their_input_are_refused(make: object) -> None:
    body = nn.Sequential(nn.LeakyReLU(5.0, inplace=True))
    module = make(body)  # type: ignore[operator]
    x = torch.tensor([[-1.0]])
    with torch.no_grad():
        change = float((module(x.clone()) - module(2 * x)).norm())
    assert change > 0.5 * 5 + 0.5  # what a bound of the two branches apart would say
    for function in (lambda m: lipschitz(m), lambda m: export(m, (1,))):
        with pytest.raises(NoRuleError, match="inplace=False"):
            function(module)
    body[0].inplace = False
    assert value(module) == pytest.approx(3.0)


def test_a_slope_residual_that_overwrites_its_input_is_refused() -> None:
    second = nn.Linear(1, 1, bias=False)
    nn.init.constant_(second.weight, 0.1)
    block = SlopeResidual(Reshape(1), nn.LeakyReLU(-5.0, inplace=True), second, torch.ones(1))
    with torch.no_grad():
        change = float((block(torch.tensor([[-1.0]])) - block(torch.tensor([[0.0]]))).norm())
    assert change == pytest.approx(5.5)  # 1 + 5 / 10 without the overwriting
    with pytest.raises(NoRuleError, match="inplace=False"):
        lipschitz(block, (1,))
    block.activation.inplace = False
    assert value(block, (1,)) == pytest.approx(1.5)


@pytest.mark.parametrize("strides", [1, 3])
def test_a_kernel_of_another_size_than_its_layer_says_counts_as_it_is(strides: int) -> None:
    first, second = nn.Conv2d(1, 2, 1, strides, bias=False), nn.Conv2d(2, 1, 1, bias=False)
    first.weight, second.weight = nn.Parameter(torch.ones(2, 1, 3, 3)), nn.Parameter(torch.ones(1, 2, 1, 1))
    block = SandwichBlock(first, nn.ReLU(), second, torch.full((2,), 1 / 3))
    images = torch.eye(144, dtype=torch.float64).view(-1, 1, 12, 12)  # positive: ReLU does nothing
    with torch.no_grad():
        norm = np.linalg.norm(block.double()(images).flatten(1).numpy(), 2)
    assert norm * (1 - 1e-12) <= value(block, (1, 12, 12)) <= norm * 1.3


def test_exports_leave_their_input_as_it_is() -> None:
    plain = export(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2)), (2,))
    x = torch.tensor([[-1.0, 1.0]])
    plain(x)
    assert x.tolist() == [[-1.0, 1.0]]


def test_a_network_made_by_hand_leaves_its_input_as_it_is() -> None:
    plain = Network([nn.ReLU(inplace=True), nn.Linear(2, 2)], (2,))
    x = torch.tensor([[-1.0, 1.0]])
    plain(x)
    assert x.tolist() == [[-1.0, 1.0]]
    assert lipkit.analysis.lipschitz_lower_bound(plain, restarts=1, steps=1).lower > 0
    plain[0].inplace = True
    with pytest.raises(OptionError, match="with inplace = False, got True: make it anew"):
        lipkit.certificates.prove(plain)


@pytest.mark.parametrize("size", [(1, 1), (4, 4), (5, 6), (9, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fourier_convolution(size: tuple[int, int], dtype: torch.dtype) -> None:
    layer = FourierConv2d(2, 3, *size).to(dtype)
    with torch.no_grad():
        layer.real.normal_()
        layer.pair.normal_()
    bound = value(layer)
    n = 2 * size[0] * size[1]
    with torch.no_grad():
        basis = torch.eye(n, dtype=dtype).reshape(n, 2, *size)
        matrix = (layer(basis) - layer.bias[:, None, None]).flatten(1).T.double().numpy()
    truth = np.linalg.norm(matrix, 2)
    eps = torch.finfo(dtype).eps
    assert truth * (1 - 20 * eps) <= bound <= truth * (1 + 500 * eps + 1e-10)
    check_linear(layer, (2, *size), 1 + 500 * eps + 1e-10)


def test_fourier_convolution_with_a_stored_transform_that_is_off_is_still_bounded() -> None:
    layer = FourierConv2d(1, 1, 3, 3).double()
    layer.real.fill_(1.0)
    layer.pair[:, 0] = 1.0
    layer.transform0.mul_(3.0)
    n = 9
    matrix = layer(torch.eye(n, dtype=torch.float64).reshape(n, 1, 3, 3)).flatten(1).numpy()
    assert value(layer) >= np.linalg.norm(matrix, 2) * (1 - 1e-13)


def test_normalize_and_scale_bound_whatever_was_loaded() -> None:
    module = Normalize([0.1, 0.2, 0.3], [0.25, 0.5, 0.3])
    check_linear(module, (3, 2, 2), 1 + 1e-6)
    module.std.copy_(torch.tensor([-0.1, 0.5, 0.3]))
    assert value(module) == pytest.approx(10.0)
    module.std[0] = math.nan
    assert value(module) == math.inf
    module.std[0] = 0.0
    assert value(module) == math.inf
    scale = Scale(2.0)
    scale.fixed_gamma.fill_(-3.0)
    assert value(scale) == 3.0
    assert value(export(scale, (2,))) == pytest.approx(3.0, rel=1e-14)


def test_normalize_is_rounded_up() -> None:
    for std in np.random.default_rng(0).uniform(0.1, 1, 50):
        module = Normalize([0.0], [float(std)])
        assert Fraction(value(module)) * Fraction(float(module.std[0])) >= 1


def test_residual() -> None:
    module = Residual(nn.Linear(3, 3), 0.25)
    expected = 0.25 * value(module.nodes[0]) + 0.75
    assert value(module) == pytest.approx(expected, rel=1e-6)
    assert np.linalg.norm(dense(module, (3,)), 2) <= value(module) * (1 + 1e-7)
    one = Residual(CayleyLinear(3, 3), 0.7)
    assert value(one) == 1.0
    gain = Residual(Scale(2.0, learnable=True), 0.25, Scale(2.0, learnable=True))
    lipschitz(gain).backward()
    # d/d log gamma of (s g_f + (1 - s) g_s): 0.25 * 2 and 0.75 * 2.
    assert gain.nodes[0].log_gamma.grad.item() == pytest.approx(0.5)
    assert gain.nodes[1].log_gamma.grad.item() == pytest.approx(1.5)


def test_scaled_average_pooling_has_norm_one() -> None:
    check_linear(ScaledAvgPool2d(2), (2, 4, 6), 1 + 1e-12)
    check_linear(export(ScaledAvgPool2d(3), (1, 6, 6))[0], (1, 6, 6), 1 + 1e-12)


# ---------------------------------------------------------------- chains


def test_the_bound_of_a_chain_is_the_product() -> None:
    a, b = nn.Linear(3, 5), nn.Linear(5, 2)
    chain = nn.Sequential(a, nn.ReLU(), nn.Sequential(nn.LeakyReLU(3.0), b))
    assert value(chain) == pytest.approx(3 * value(a) * value(b), rel=1e-12)
    assert value(chain) >= 3 * value(a) * value(b) * (1 - 1e-15)
    assert value(nn.Sequential()) == 1.0


def test_a_shared_module_counts_as_often_as_it_is_applied() -> None:
    layer = nn.Linear(3, 3, bias=False)
    chain = nn.Sequential(layer, layer, nn.Sequential(layer))
    assert value(chain) == pytest.approx(value(layer) ** 3, rel=1e-12)
    plain = export(chain, (3,))
    assert len(plain) == 3
    assert value(plain) == pytest.approx(value(layer) ** 3, rel=1e-12)
    x = torch.randn(4, 3)
    assert torch.allclose(plain(x), chain(x), atol=1e-6)
    own = Network([nn.Sequential(layer, layer)], (3,))
    assert len(own) == 2
    assert torch.allclose(own(x), layer(layer(x)), atol=1e-6)
    assert value(own) == pytest.approx(value(layer) ** 2, rel=1e-12)


def test_the_input_shape_travels_through_a_chain() -> None:
    chain = nn.Sequential(
        nn.PixelUnshuffle(2), nn.Conv2d(4, 3, 3, padding="same", padding_mode="circular"), nn.AdaptiveAvgPool2d(1)
    )
    exact = np.linalg.norm(dense(chain[1], (4, 4, 3)), 2) / math.sqrt(12)
    assert value(chain, (1, 8, 6)) == pytest.approx(exact, rel=1e-9)
    with pytest.raises(ShapeError, match="input_shape="):
        lipschitz(chain)
    with pytest.raises(ShapeError):
        lipschitz(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), (4,))


def test_a_gelu_that_torch_does_not_compute_has_no_bound() -> None:
    assert value(nn.GELU("erf")) == math.inf > value(nn.GELU("tanh"))


@pytest.mark.thorough
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_pair_of_inputs_beats_the_bound_of_a_random_network(seed: int) -> None:
    torch.manual_seed(seed)
    activations = [
        nn.ReLU(),
        nn.GELU(),
        nn.SiLU(),
        nn.Mish(),
        nn.SELU(),
        nn.Hardswish(),
        nn.ELU(2.0),
        MaxMin(),
        GroupSort(),
    ]
    pick = [activations[i] for i in torch.randint(len(activations), (2,)).tolist()]
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        pick[0],
        nn.MaxPool2d(3, 2, 1),
        Residual(nn.Conv2d(4, 4, 3, padding="same", padding_mode="circular")),
        pick[1],
        nn.AvgPool2d(2, 1, 1),
        nn.Flatten(),
        nn.Linear(64, 3),
        nn.Softmax(1),
    ).double()
    model(torch.zeros(1, 1, 6, 6, dtype=torch.float64))
    bound = value(model, (1, 6, 6))
    x = 3 * torch.randn(40, 1, 6, 6, dtype=torch.float64)
    d = torch.randn_like(x) * 10.0 ** torch.randint(-3, 1, (40, 1, 1, 1))
    with torch.no_grad():
        ratio = (model(x + d) - model(x)).norm(dim=1) / d.flatten(1).norm(dim=1)
    assert float(ratio.max()) <= bound
    plain = export(model, (1, 6, 6))
    assert value(plain) <= bound * (1 + 1e-9)
    assert torch.allclose(plain(x), model(x))


def test_undefined_weights_bound_nothing() -> None:
    for bad in (math.nan, math.inf):
        layer = nn.Linear(2, 2)
        conv = nn.Conv2d(1, 1, 3)
        with torch.no_grad():
            layer.weight[0, 0] = bad
            conv.weight[0, 0, 0, 0] = bad
        zero = Affine(torch.zeros(1), torch.zeros(1))
        for module in (layer, conv, nn.Sequential(zero, layer), Affine(torch.tensor([bad]), torch.zeros(1))):
            assert value(module) == math.inf
        with_parts = SllLinear(2, 2), SandwichLinear(2, 2), NativeConv2d(2, 2, 3), R2dn(2, 2, 2, 2), LBDN([2, 2, 2])
        for module in with_parts:
            with torch.no_grad():
                next(p for p in module.parameters() if p.ndim > 1).flatten()[0] = bad
            assert value(module) == math.inf
    prelu = nn.PReLU(init=math.nan)
    assert value(prelu) == math.inf
    assert value(blend(nn.Identity(), math.nan, nn.Identity())) == math.inf


# ---------------------------------------------------------------- refusals


class Tenfold(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class MySequential(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 10 * super().forward(x)


class MyConv(nn.Conv2d):
    pass


def hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda m, a, y: 10 * y)
    return module


def pre_hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda m, a: (10 * a[0],))
    return module


def kwargs_hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda m, a, k, y: 10 * y, with_kwargs=True, always_call=True)
    return module


def instance_forward() -> nn.Module:
    module = nn.Linear(2, 2)
    module.forward = lambda x: 10 * x  # type: ignore[method-assign]
    return module


def instance_call_impl() -> nn.Module:
    module = nn.Conv2d(1, 1, 1)
    module._conv_forward = lambda x, w, b: 10 * x  # type: ignore[method-assign, misc]
    return module


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)


def frozen_subclass() -> nn.Module:
    return Tenfold(2, 2).requires_grad_(False)


FOOLS = {
    "subclass": lambda: Tenfold(2, 2),
    "frozen subclass": frozen_subclass,
    "unknown": Unknown,
    "sequential subclass": lambda: MySequential(nn.ReLU()),
    "empty subclass": lambda: MyConv(1, 1, 3),
    "hook": hooked,
    "pre-hook": pre_hooked,
    "hook with kwargs": kwargs_hooked,
    "instance forward": instance_forward,
    "instance method": instance_call_impl,
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(2, 2)),
    "pruned": pruned,
    "batch norm": lambda: nn.BatchNorm1d(2),
    "lazy": lambda: nn.LazyLinear(3),
    "hard shrink": nn.Hardshrink,
    "layer norm without eps": lambda: nn.LayerNorm(2, eps=0.0),
    "dropout": nn.Dropout,
}


# What computes something else than its base says so by its own forward pass, which is traced.
TRACED = ("subclass", "frozen subclass", "unknown", "sequential subclass", "empty subclass")


@pytest.mark.parametrize("name", TRACED)
@pytest.mark.parametrize("deep", [False, True])
def test_a_forward_pass_of_ones_own_is_bounded_as_what_it_computes(name: str, deep: bool) -> None:
    module = FOOLS[name]()
    shape = (1, 4, 4) if name == "empty subclass" else (2,)
    expected = {"unknown": 1.0, "sequential subclass": 10.0}.get(name)
    if name in ("subclass", "frozen subclass"):
        expected = 10 * float(torch.linalg.matrix_norm(module.weight.detach().double(), 2))
    if deep:
        module = nn.Sequential(nn.Identity(), nn.Sequential(nn.ReLU(), module), nn.LeakyReLU(2.0))
        expected = None if expected is None else 2 * expected
    with pytest.raises(NoRuleError, match="input_shape"):
        lipschitz(module)
    plain = export(module, shape)
    if expected is not None:
        assert float(lipschitz(module, shape)) == pytest.approx(expected, rel=1e-6)
        assert float(lipschitz(plain)) == pytest.approx(expected, rel=1e-6)
    assert float(lipschitz(plain)) == pytest.approx(float(lipschitz(module, shape)), rel=1e-6)
    x = torch.randn(5, *shape)
    assert torch.allclose(plain(x), module(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in FOOLS if name not in TRACED])
@pytest.mark.parametrize("deep", [False, True])
def test_what_is_not_the_module_its_type_names_is_refused(name: str, deep: bool) -> None:
    module = FOOLS[name]()
    if deep:
        inner = blend(nn.Sequential(nn.ReLU(), module), 0.5, nn.Identity())
        module = nn.Sequential(nn.Identity(), nn.Sequential(Residual(nn.Sequential(inner))))
    with pytest.raises(NoRuleError):
        lipschitz(module)
    # Where branches end in different shapes, that is found first.
    with pytest.raises((NoRuleError, ShapeError)):
        lipschitz(module, (2,))
    with pytest.raises((NoRuleError, ShapeError)):
        export(module, (2,))


def test_messages_name_the_remedy() -> None:
    for name, word in {
        "hook": "remove them",
        "spectral norm": r"call \.eval\(\)",
        "instance forward": "subclass with its own rule",
        "unknown": "input_shape",
        "hard shrink": "lipschitz_rule",
    }.items():
        with pytest.raises(NoRuleError, match=word):
            lipschitz(FOOLS[name]())
    with pytest.raises(NoRuleError, match=r"expected an nn\.Module"):
        lipschitz(lambda x: x)  # type: ignore[arg-type]


def parallel(network: nn.Module) -> nn.Module:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return nn.parallel.DistributedDataParallel(network)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("wrap", "attribute"),
    [
        (nn.DataParallel, "module"),
        (parallel, "module"),
        (AveragedModel, "module"),
        (torch.compile, "_orig_mod"),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch.compile's own import
def test_wrappers_name_the_attribute_that_holds_the_network(wrap: object, attribute: str) -> None:
    network = nn.Sequential(nn.Linear(2, 2))
    wrapped = wrap(network)  # type: ignore[operator]
    calls = {
        "lipschitz": lambda: lipschitz(wrapped),
        "export": lambda: export(wrapped, (2,)),
        "analyze": lambda: lipkit.analyze(wrapped, (2,)),
        "convert": lambda: lipkit.convert(wrapped),
        "certify": lambda: lipkit.certify(wrapped, torch.zeros(1, 2), torch.tensor([0])),
        "at '0': analyze": lambda: lipkit.analyze(nn.Sequential(wrapped), (2,)),
    }
    for name, call in calls.items():
        with pytest.raises(NoRuleError, match=rf"^{name}: expected the network itself, .* pass its \.{attribute}$"):
            call()
    inner = getattr(wrapped, attribute)
    bound = float(lipschitz(network).detach())
    assert float(lipschitz(inner).detach()) == bound == lipkit.analyze(inner, (2,), restarts=0).upper


def test_a_hooked_export_is_refused_again() -> None:
    plain = export(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (2,))
    handle = plain[0].register_forward_hook(lambda m, a, y: 10 * y)
    with pytest.raises(NoRuleError, match="hooks"):
        lipschitz(plain)
    handle.remove()
    assert value(plain) > 0


@pytest.mark.parametrize(
    "register", [torch_module.register_module_forward_hook, torch_module.register_module_forward_pre_hook]
)
def test_global_hooks_are_refused(register: object) -> None:
    handle = register(lambda *a: None)  # type: ignore[operator]
    try:
        with pytest.raises(NoRuleError, match="global forward hooks"):
            lipschitz(nn.ReLU())
    finally:
        handle.remove()
    assert value(nn.ReLU()) == 1.0


def test_a_class_whose_forward_was_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: 10 * x)
    with pytest.raises(NoRuleError, match="replaced after its rule was registered"):
        lipschitz(nn.Tanh())
    monkeypatch.undo()
    assert value(nn.Tanh()) == 1.0


def test_integer_weights_are_refused() -> None:
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ShapeError, match="dtype"):
        lipschitz(module)


@pytest.mark.parametrize("shape", [(), (0, 3), (-1,), (2.5,), ("a",), 5, "33"])
def test_wrong_input_shapes(shape: object) -> None:
    with pytest.raises(ShapeError, match="expected positive sizes"):
        lipschitz(nn.ReLU(), shape)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="expected positive sizes"):
        export(nn.ReLU(), shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (nn.Linear(2, 3), (7,), r"Linear: expected in_features=2, got inputs of shape \(7,\)"),
        (nn.Sequential(nn.Flatten(), nn.Linear(2, 3)), (1, 7), r"in_features=2, got inputs of shape \(7,\)"),
        (nn.Conv2d(3, 4, 3), (5, 8, 8), r"Conv2d: expected in_channels=3, got inputs of shape \(5, 8, 8\)"),
        (CayleyConv2d(3, 3, 3), (5, 8, 8), r"CayleyConv2d: expected in_channels=3"),
    ],
)
def test_a_shape_with_other_channels_has_no_constant(layer: nn.Module, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        lipschitz(layer, shape)
    assert float(lipschitz(layer).detach()) > 0


def test_layers_take_sizes_of_numpy() -> None:
    layer, x = CayleyLinear(np.int64(3), np.int32(3)), torch.randn(2, 3)
    torch.testing.assert_close(export(layer, (3,))(x), layer(x))
    with pytest.raises(OptionError, match="in_features: expected an integer of at least 1, got True"):
        CayleyLinear(True, 3)


def test_rules_of_ones_own() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    class Negative(Double):
        pass

    @lipschitz_rule(Double)
    def _(module: nn.Module, input_shape: object) -> float:
        return 2.0

    @export_rule(Double)
    def _(module: nn.Module, input_shape: object) -> nn.Module:
        return Affine(torch.tensor([2.0]), torch.zeros(1))

    assert value(nn.Sequential(Double(), Double())) == pytest.approx(4.0)
    assert value(export(nn.Sequential(Double(), Double()), (3,))) == pytest.approx(4.0)
    assert rules()[Double] == (True, True)
    # A rule does not carry over to a subclass, whose own forward pass counts.
    assert float(lipschitz(Negative(), (3,))) == pytest.approx(2.0)
    with pytest.raises(NoRuleError, match="already has a rule"):
        lipschitz_rule(Double)(lambda m, s: 1.0)
    lipschitz_rule(Negative)(lambda m, s: -1.0)
    with pytest.raises(NoRuleError, match=r"gave -1.0, expected one number >= 0"):
        lipschitz(Negative())


@pytest.mark.parametrize("made", [None, "1", 1j, [1.0, 2.0], torch.ones(2)], ids=repr)
def test_rules_that_give_something_else(made: Any) -> None:
    class Layer(nn.Module):
        pass

    lipschitz_rule(Layer)(lambda m, s: made)
    export_rule(Layer)(lambda m, s: made)
    with pytest.raises(NoRuleError, match=r"the rule of .*Layer gave .*, expected one number >= 0"):
        lipschitz(Layer())
    with pytest.raises(NoRuleError, match=r"the export rule of .*Layer gave .*, expected a module"):
        export(Layer(), (3,))


@pytest.mark.parametrize(
    "wrong", [nn.ReLU(), "nn.ReLU", Tensor, lambda module, shape: 1.0], ids=("module", "name", "tensor", "rule")
)
def test_rules_are_for_types_of_modules(wrong: Any) -> None:
    """``@lipschitz_rule`` without its argument takes the rule for a type."""
    before = dict(ROWS)
    for register in (lipschitz_rule, export_rule, lambda kind: add_plain(Plain(kind, 1.0))):
        with pytest.raises(NoRuleError, match="expected rules for types of modules"):
            register(wrong)
    assert before == ROWS


def _inner(module: Any, shape: object) -> nn.Module:
    return cast(nn.Module, module.inner)


def _weight(module: Any, shape: object) -> nn.Module:
    made = nn.Linear(3, 2)
    made.weight = module.inner.weight
    return made


@pytest.mark.parametrize("rule", [_inner, _weight, lambda m, s: nn.Sequential(nn.ReLU(), m.inner)])
def test_what_a_rule_shares_with_its_module_is_copied(rule: Callable[[Any, Any], nn.Module]) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

    export_rule(Wrapper)(rule)
    model = Wrapper()
    address = model.inner.weight.data_ptr()
    plain, x = export(model, (3,)), torch.rand(4, 3)
    before = plain(x)
    assert all(p.requires_grad for p in model.parameters())  # training goes on
    assert all(m.training for m in model.modules())
    assert model.inner.weight.data_ptr() == address
    with torch.no_grad():
        model.inner.weight.add_(1.0)
    assert torch.equal(plain(x), before)
    assert not any(p.requires_grad for p in plain.parameters())


def test_multipliers_of_a_rule_of_ones_own_stay() -> None:
    class Tight(nn.Module):
        pass

    @export_rule(Tight)
    def _(module: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
        parts = [nn.Unflatten(1, (3,)), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)]  # the first is exported in turn
        return Network(parts, input_shape, {2: torch.tensor([1.0, 2.0])})

    network = export(nn.Sequential(Tight()), (3,))
    assert [m.tolist() for m in network.multipliers().values()] == [[1.0, 2.0]]
    assert type(network[next(iter(network.multipliers()))]) is nn.ReLU


def test_every_type_with_a_rule_has_both() -> None:
    one_sided = [
        k.__qualname__ for k, both in rules().items() if k.__module__.startswith(("torch", "lipkit")) and not all(both)
    ]
    assert one_sided == []


# ---------------------------------------------------------------- output_shape, export


def test_output_shape() -> None:
    assert output_shape(nn.Conv2d(3, 5, 3, stride=2), (3, 9, 9)) == (5, 4, 4)
    assert output_shape(nn.Linear(3, 2).double(), (4, 3)) == (4, 2)
    with pytest.raises(ShapeError, match="does not accept"):
        output_shape(nn.Linear(3, 2), (4,))
    with pytest.raises(ShapeError, match="one output per sample"):
        output_shape(nn.Flatten(0), (4,))


def test_export_is_independent_constant_and_sized() -> None:
    model = nn.Sequential(CayleyConv2d(1, 4, 3), MaxMin(), nn.Dropout(), nn.Flatten(), CayleyLinear(64, 3)).eval()
    plain = export(model, (1, 4, 4))
    assert type(plain) is Network
    assert not plain.training
    assert not any(p.requires_grad for p in plain.parameters())
    x = torch.randn(5, 1, 4, 4)
    before = plain(x)
    assert torch.allclose(before, model(x), atol=1e-5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    assert torch.equal(plain(x), before)
    for shape in ((1, 4, 5), (2, 4, 4), (16,)):
        with pytest.raises(ShapeError, match="expected input of shape"):
            plain(torch.zeros(2, *shape))
    with pytest.raises(ShapeError, match="exported for inputs of shape"):
        lipschitz(plain, (1, 5, 5))
    assert value(plain, (1, 4, 4)) == value(plain)
    assert value(plain) == pytest.approx(1.0, abs=1e-5)


def test_the_bound_of_an_export_follows_its_numbers() -> None:
    plain = export(nn.Sequential(CayleyLinear(3, 3), CayleyLinear(3, 3)), (3,))
    plain[0].weight.mul_(7.0)
    assert value(plain) == pytest.approx(7.0, rel=1e-5)


def test_nothing_has_a_gradient_or_side_effect() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    lipschitz(model, (3,))
    export(model, (3,))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_the_bound_is_differentiable_through_a_chain() -> None:
    model = nn.Sequential(Scale(3.0, learnable=True), nn.Linear(3, 3), nn.ReLU()).double()
    bound = lipschitz(model)
    bound.backward()
    gain = float(model[0].gamma().detach())
    # d L / d log gamma = L.
    assert model[0].log_gamma.grad.item() == pytest.approx(float(bound.detach()), rel=1e-9)
    u, _, vh = np.linalg.svd(model[1].weight.detach().numpy())
    assert np.abs(model[1].weight.grad.numpy() - gain * np.outer(u[:, 0], vh[0])).max() < 1e-8


def test_parameters_beyond_rounding_are_refused_by_size() -> None:
    layer = CayleyLinear(3, 3)
    with torch.no_grad():
        layer.free.copy_(torch.triu(torch.ones(3, 3), 1))
        layer.scale.fill_(3e30)  # beside a skew matrix of this size, of odd order and so singular, I is rounded away
    with pytest.raises(OptionError, match=r"CayleyLinear .* of size 3e\+30: expected about 1e6 or less"):
        export(layer, (3,))


def test_modules_of_lipkit_are_not_called_those_of_torch() -> None:
    with pytest.raises(ShapeError, match=r"^LayerCenter: expected at least 2 dimensions without the batch, got \(3,\)"):
        lipschitz(LayerCenter(2), (3,))
    with pytest.raises(ShapeError, match=r"^nn\.AvgPool1d: expected 2 dimensions"):
        lipschitz(nn.AvgPool1d(2), (4,))
