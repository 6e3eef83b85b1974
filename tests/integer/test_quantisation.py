"""Integer programs against float64, and against Python's integers, which cannot overflow."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lipkit
from lipkit import layers, modules
from lipkit.certificates.margins import integer_logits
from lipkit.errors import NoRuleError, OptionError
from lipkit.integer.program import WORD, Fold, IntBlend, IntLinear, Move, Operation, Program, Sort, rounded
from lipkit.integer.quantisation import Builder, IntValue
from lipkit.interop import integer_program
from lipkit.modules.machine import enlarged
from lipkit.modules.storage import float64_copy

# The largest ratio of the proved error to one that is seen on a few inputs: the bound adds norms of roundings that
# point nowhere in particular, layer after layer.
LOOSE = 60


def images(network: modules.Network, count: int = 40, seed: int = 0) -> Tensor:
    """Random inputs of the box; every other one is a corner of it."""
    low, high = network.input_range or (0.0, 1.0)
    x = torch.rand(count, *network.input_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x[1::2] = x[1::2].round()
    return low + (high - low) * x


def chain(
    *parts: nn.Module, shape: tuple[int, ...] = (2, 6, 6), box: tuple[float, float] = (0.0, 1.0)
) -> modules.Network:
    """The exported network of these parts."""
    network = lipkit.export(nn.Sequential(*parts).eval(), shape)
    network.input_range = box
    return network


def _conv() -> modules.Network:
    return chain(
        nn.Conv2d(2, 6, 3, padding=1),
        modules.GroupSort(3),
        nn.Conv2d(6, 4, 3, padding=2, dilation=2, padding_mode="circular", groups=2),
        nn.LeakyReLU(0.3),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 6, (2, 3), stride=(1, 2), padding=1),
        modules.HalfAbs(),
        nn.Flatten(),
        nn.Linear(48, 3),
    )


def _moves() -> modules.Network:
    return chain(
        modules.Affine(torch.tensor([0.7, -1.3]), torch.tensor([0.1, 0.2])),
        nn.PixelUnshuffle(2),
        modules.Pad(0, 0, 0, 0, 0, 2),
        modules.Shift2d(10, 2),
        modules.Affine(torch.ones(1, 1, 1), torch.linspace(-1, 1, 90).view(10, 3, 3)),
        modules.MaxMin(),
        nn.Conv2d(10, 4, 1, bias=False),
        modules.GroupSort(None),
        modules.Mean(2, 3),
        nn.Linear(4, 5),
        box=(-1.0, 3.0),
    )


def _residual() -> modules.Network:
    return chain(
        layers.SllConv2d(2, 2, 3, padding=1, padding_mode="circular"),
        layers.Residual(nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU())),
        nn.Flatten(),
        layers.SllLinear(72, 72),
        nn.Linear(72, 4),
    )


def _symbols() -> modules.Network:
    return chain(
        layers.CayleyConv2d(2, 4, 3, padding=1, padding_mode="circular"),
        modules.MaxMin(),
        layers.EcoConv2d(4, 4, 3, padding=1, padding_mode="circular"),
        modules.MaxMin(),
        layers.SocConv2d(4, 4, 3, padding=1),
        nn.Flatten(),
        modules.MaxMin(),
    )


class Own(nn.Module):
    """The residual network below with a forward pass of its own."""

    def __init__(self, first: nn.Module, body: nn.Module, skip: nn.Module) -> None:
        super().__init__()
        self.first, self.body, self.skip = first, body, skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.body(x) + self.skip(x)


def _graph() -> modules.Network:
    """Every join, three and one values, values read twice, pieces that are put together again."""
    joins = [modules.Add(1, -1, 1), modules.Blend(torch.tensor(0.3)), modules.Concatenate(1), modules.Maximum()]
    return chain(
        nn.Conv2d(2, 4, 3, padding=1),
        modules.Graph(
            [nn.Conv2d(4, 4, 1), nn.ReLU(), *joins[:2], modules.Piece(1, 0, 1), modules.Piece(1, 1, 4), *joins[2:]],
            [[0], [1], [0, 2, 1], [3, 1], [4], [4], [6, 5], [7, 0, 3]],
        ),
        modules.Graph([modules.Add(-1)], [[0]]),
        nn.Flatten(),
        nn.Linear(144, 3),
    )


NETWORKS: dict[str, Callable[[], modules.Network]] = {
    "convolutions": _conv,
    "moves": _moves,
    "residuals": _residual,
    "symbols": _symbols,
    "graph": _graph,
    "digits": lambda: lipkit.load("digits-cayley"),
}


@pytest.fixture(scope="module", params=NETWORKS)
def made(request: pytest.FixtureRequest) -> tuple[modules.Network, Program]:
    torch.manual_seed(1)
    network = NETWORKS[request.param]()
    return network, integer_program(network)[0]


def errors(network: modules.Network, program: Program, x: Tensor) -> Tensor:
    """l2 distance of the program's outputs from those in float64."""
    with torch.no_grad():
        return torch.linalg.vector_norm(float64_copy(network)(x) - program(x), dim=1)


def proved(network: modules.Network, program: Program) -> float:
    """The bound of the error of all outputs."""
    if program.own_error is None:
        return program.body_error
    last = list(network)[-1]
    assert isinstance(last, nn.Linear)
    return float(torch.linalg.matrix_norm(last.weight.double(), 2) * program.body_error + program.own_error.norm())


@pytest.mark.thorough
def test_the_error_is_within_its_bound_and_the_bound_is_no_guess(made: tuple[modules.Network, Program]) -> None:
    network, program = made
    seen = float(errors(network, program, images(network)).max())
    bound = proved(network, program)
    assert seen <= bound <= LOOSE * seen
    assert bound < 1e-4


def exactly(operation: Operation, values: list[list[int]]) -> list[int]:
    """An operation in Python's integers, with every number on the way within its word."""
    x = values[0]
    if isinstance(operation, Move):
        return [0 if i < 0 else x[i] for i in operation.index.tolist()]
    if isinstance(operation, Fold):
        head = [max(v, 0) if operation.kind == "relu" else abs(v) for v in x[: operation.count]]
        return head + x[operation.count :]
    if isinstance(operation, Sort):
        grid = np.array(x).reshape(operation.outer, operation.length, operation.inner)
        return (-np.sort(-grid, axis=1)).flatten().tolist()
    if isinstance(operation, IntBlend):
        sums = [[f * v for f, v in zip(operation.factors, row, strict=True)] for row in zip(*values, strict=True)]
        return [_rounded(terms, 0, operation.shift) for terms in sums]
    grid = np.array(x, dtype=object).reshape(operation.image)
    weight, (h, w) = operation.weight.numpy().astype(object), operation.places
    rows, per_group = len(weight), operation.image[0] // operation.groups
    out = []
    for row, oy, ox in itertools.product(range(rows), range(h), range(w)):
        first = row // (rows // operation.groups) * per_group
        (sy, sx), (dy, dx), (kh, kw) = operation.stride, operation.dilation, weight.shape[2:]
        window = grid[first : first + per_group, oy * sy :: dy, ox * sx :: dx][:, :kh, :kw]
        assert sum(v * v for v in window.flatten()) <= operation.window**2
        terms = (window * weight[row]).flatten().tolist()
        out.append(_rounded(terms, int(operation.bias[row]), operation.shift))
    return out


def _rounded(terms: list[int], bias: int, shift: int) -> int:
    # Sums in any order lie between that of the negative and that of the positive terms.
    assert sum(map(abs, terms)) + abs(bias) + 2 ** (shift - 1) < 2**63
    return (2 * (sum(terms) + bias) + 2**shift) // 2 ** (shift + 1)


def corners(network: modules.Network) -> Tensor:
    """The corners of the box that drive the first linear layer, and the outputs, furthest in first order."""
    low, high = network.input_range or (0.0, 1.0)
    exact = float64_copy(network)
    found = [torch.full((1, *network.input_shape), end).double() for end in (low, high)]
    for output in range(2):
        x = torch.full((1, *network.input_shape), (low + high) / 2, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(exact(x)[0, output], x)
        found += [torch.where(slope > 0, high, low), torch.where(slope > 0, low, high)]
    return torch.cat(found)


@pytest.mark.thorough
def test_every_number_fits_into_its_word_and_the_outputs_are_those_of_exact_integers(
    made: tuple[modules.Network, Program],
) -> None:
    network, program = made
    q = program.quantise(torch.cat([corners(network), images(network, 2)]))[:6]
    got = program.run(q).tolist()
    for row, wanted in zip(q.tolist(), got, strict=True):
        values = [row]
        for operation, reads in program.operations:
            values.append(exactly(operation, [values[i] for i in reads]))
            assert max(map(abs, values[-1])) <= WORD
        assert values[-1] == wanted


def test_sums_that_use_their_last_bit_are_exact() -> None:
    # A row of equal signs at a corner reaches the bound by Cauchy and Schwarz: what float64 alone could not sum.
    network = chain(nn.Flatten(), nn.Linear(72, 2))
    with torch.no_grad():
        network[1].weight.copy_(torch.tensor([[1.0], [-1.0]]) * torch.full((2, 72), 0.9999998807907104))
        network[1].bias.zero_()
    program = integer_program(network)[0]
    linear = program.operations[-1][0]
    assert isinstance(linear, IntLinear)
    q = program.quantise(torch.ones(1, 2, 6, 6))
    exact = [sum(a * b for a, b in zip(q[0].tolist(), row, strict=True)) for row in linear.weight.flatten(1).tolist()]
    assert linear.sums(q).flatten().tolist() == exact
    assert max(map(abs, exact)) > 2**60


@pytest.mark.thorough
@given(st.integers(-(2**61), 2**61), st.integers(1, 61))
def test_rounding_is_half_up(value: int, shift: int) -> None:
    assert rounded(torch.tensor(value), shift).item() == (2 * value + 2**shift) // 2 ** (shift + 1)


@pytest.mark.thorough
@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(-3, 3),
    st.sampled_from([2.0**-30, 1e-3, 1.0, 40.0, 3e5]),
    st.sampled_from([1e-6, 1.0, 300.0]),
)
def test_scales_of_all_sizes_keep_the_bound(seed: int, low: float, weight: float, width: float) -> None:
    torch.manual_seed(seed)
    network = chain(nn.Linear(5, 6), modules.MaxMin(), nn.Linear(6, 3), shape=(5,), box=(low, low + width))
    with torch.no_grad():
        network[0].weight.mul_(weight)
        network[2].bias.mul_(weight)
    program = integer_program(network)[0]
    x = images(network, 8, seed)
    assert float(errors(network, program, x).max()) <= proved(network, program) * (1 + 1e-6) + 1e-12


def test_inputs_outside_of_the_box_are_clamped_and_nan_is_refused() -> None:
    network = chain(nn.Flatten(), nn.Linear(72, 2), box=(0.0, 1.0))
    program = integer_program(network)[0]
    x = torch.tensor([-5.0, 7.0]).view(2, 1, 1, 1).expand(2, 2, 6, 6)
    assert torch.equal(program.quantise(x), program.quantise(x.clamp(0, 1)))
    with pytest.raises(OptionError, match="expected inputs that are numbers, got NaN"):
        program.quantise(x * torch.nan)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (nn.Tanh(), r"expected modules that an integer program can compute \(.*MaxMin.*\), got .*Tanh: certify for"),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), "'zeros' or 'circular', got reflect"),
        (nn.Conv2d(2, 2, 7, padding=3, padding_mode="circular"), r"windows within the image \(6, 6\), got \(7, 7\)"),
        (nn.AvgPool2d(3, 2, 1), "no padding and no ceil_mode"),
        (nn.Sequential(modules.Reshape(6, 12), nn.AvgPool2d(2)), "images with channels, got inputs of shape"),
        (layers.CayleyConv2d(2, 16, 3, padding=1, padding_mode="circular"), None),
        (modules.Mean(1), "rows and columns of images"),
        (
            modules.Graph([modules.Product(torch.ones(2))], [[0, 0]]),
            "Product: expected joins Add, Blend, .*, got Product",
        ),
        (nn.Linear(6, 6), "inputs of one dimension"),
    ],
)
def test_what_it_cannot_do_is_refused(part: nn.Module, message: str | None) -> None:
    network = chain(part)
    if message is None:
        assert integer_program(network)[0].operations
        return
    with pytest.raises(NoRuleError, match=message):
        integer_program(network)


@pytest.mark.thorough
def test_a_forward_pass_of_its_own_has_the_radii_of_the_same_network_from_blocks() -> None:
    torch.manual_seed(3)
    first, last = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(72, 3)
    body, skip = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 1)), nn.Conv2d(2, 2, 1)
    blocks = chain(first, modules.Graph([body, skip, modules.Add(1, 1)], [[0], [0], [1, 2]]), nn.Flatten(), last)
    own = chain(Own(first, body, skip), nn.Flatten(), last)
    x = images(own)
    found = [lipkit.certify(net, x, own(x.float()).argmax(1), evaluator="integer") for net in (blocks, own)]
    torch.testing.assert_close(found[0].radius, found[1].radius, rtol=1e-12, atol=0)
    assert bool((found[0].radius > 0).all())


def test_a_large_fourier_layer_is_refused() -> None:
    network = modules.Network([modules.FourierConv2d(3, 32, 32, 32)], (3, 32, 32))
    network.input_range = (0.0, 1.0)
    with pytest.raises(NoRuleError, match=r"FourierConv2d: expected at most 16777216 products .* on 32 x 32 pixels"):
        integer_program(network)


def test_ranges_that_are_unknown_or_too_wide_are_refused() -> None:
    network = chain(nn.Flatten(), nn.Linear(72, 2))
    network.input_range = None
    with pytest.raises(OptionError, match=r"input_range is known.*set network.input_range"):
        integer_program(network)
    network.input_range = (1.0, 0.0)
    with pytest.raises(OptionError, match="expected two numbers, the smaller one first"):
        integer_program(network)
    network = chain(nn.Flatten(), nn.Linear(72, 2))
    with torch.no_grad():
        network[1].weight.fill_(1e38)
    with pytest.raises(OptionError, match=r"ranges of the values are too wide \(weights up to 1e\+38"):
        integer_program(network)
    network = modules.Network([nn.Linear(2, 2)], (2,))
    network.input_range = (0.0, 1.0)
    network[0].weight.fill_(1e-40)
    network[0].bias.fill_(1e30)
    with pytest.raises(OptionError, match=r"too wide \(weights up to 1e-40, biases up to 1e\+30, inputs up to 1\)"):
        integer_program(network)


def aligned(parts: list[nn.Module], box: tuple[float, float] = (0.0, 1.0)) -> float:
    """The largest error by its bound, of constant inputs whose entries all round alike and in the bad direction."""
    network = modules.Network(parts, (64,))
    network.input_range = box
    program = integer_program(network)[0]
    unit, top = 2.0**-program.input_fraction, int(box[1] * 2.0**program.input_fraction)
    whole = torch.arange(top // 2, top // 2 + 400).double()
    x = torch.cat([(whole + side) * unit for side in (-0.499, 0.499)])[:, None].expand(-1, 64)
    exact = copy.deepcopy(network).double()
    with torch.no_grad():
        # Exact on multiples of the unit that are near: the difference of two numbers of 53 bits each.
        seen = torch.linalg.vector_norm(exact(x) - program(x), dim=1).max()
    return float(seen) / program.body_error


def by(scale: float, shift: float = 0.0) -> modules.Affine:
    return modules.Affine(torch.full((64,), scale), torch.full((64,), shift))


@pytest.mark.parametrize(
    ("parts", "least"),
    [
        # One rounding of every output, beside that of the input.
        ([by(0.75)], 0.99),
        ([by(0.75), by(0.75)], 0.97),
        # A weight of more binary places than the grid has.
        ([by(1.0 / 3.0)], 0.7),
        # Branches with roundings of their own, and a share that is no multiple of the grid.
        ([modules.Graph([by(0.75), modules.Blend(torch.tensor(0.5))], [[0], [1, 0]])], 0.9),
        ([modules.Graph([by(0.0), modules.Blend(torch.tensor(2.0**-34 * 3))], [[0], [1, 0]])], 0.6),
        ([modules.Graph([by(0.75), by(0.625), modules.Add(1, 1, 1)], [[0], [0], [0, 1, 2]])], 0.8),
        ([modules.Graph([by(0.75), by(0.625), modules.Concatenate(1)], [[0], [0], [1, 2]])], 0.7),
    ],
)
def test_bounds_are_attained_where_all_roundings_align(parts: list[nn.Module], least: float) -> None:
    assert least <= aligned(parts) <= 1


POOLS: dict[str, Callable[[int], nn.Module]] = {
    "AvgPool2d": lambda k: nn.AvgPool2d((1, k)),
    "negative divisor": lambda k: nn.AvgPool2d((1, k), divisor_override=-k),
    "AdaptiveAvgPool2d": lambda k: nn.AdaptiveAvgPool2d(1),
    "Mean": lambda k: modules.Mean(2, 3, keepdim=True),
}


@pytest.mark.parametrize("window", [2, 3, 5, 6, 7])
@pytest.mark.parametrize("pool", POOLS)
def test_averages_hold_for_every_window(pool: str, window: int) -> None:
    # Equal pixels are their own mean, and the other class is sqrt(window) times as far as the mean is.
    body = modules.Network([POOLS[pool](window), nn.Flatten()], (1, 1, window))
    network = modules.Network([*body, nn.Linear(1, 2)], (1, 1, window))
    body.input_range = network.input_range = (0.0, 1.0)
    with torch.no_grad():
        network[2].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        network[2].bias.copy_(torch.tensor([-0.4, 0.4]))
    unit = 2.0**-30
    pixels = ((torch.arange(1000).double() / (1000 * unit)).floor() + 0.499) * unit
    x = pixels.view(-1, 1, 1, 1).expand(-1, 1, 1, window)
    means = -pixels if pool == "negative divisor" else pixels
    program = integer_program(body)[0]
    assert float((program(x)[:, 0] - means).abs().max()) <= program.body_error <= 8 * unit
    threshold = float(network[2].bias.detach()[1])
    radius = lipkit.certify(network, x, (means < threshold).long(), evaluator="integer").radius
    distance = (means - threshold).abs() * math.sqrt(window)
    assert bool((radius <= distance).all())
    assert bool((radius >= distance - 40 * unit).all())


def test_the_radii_count_the_whole_error_of_the_program() -> None:
    program = integer_program(chain(nn.Flatten(), nn.Linear(72, 2), modules.MaxMin(), nn.Linear(2, 2)))[0]
    for error in (program.body_error, 0.1, 1 / 3, 1e-300):
        logits = integer_logits(replace(program, body_error=error), torch.rand(3, 2, 6, 6))
        assert logits.walk.error.at.tolist() == logits.walk.centre_error.tolist() == [error] * 3


def test_biases_that_are_no_multiples_of_the_grid_count() -> None:
    # Numbers so small that the sums have hardly more places than the outputs.
    found = [aligned([by(1.0, (k + side) * 2.0**-61)], (0.0, 2.0**-30)) for k in (2, 3) for side in (-0.49, 0.49)]
    assert 0.95 <= max(found) <= 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", NETWORKS)
def test_each_module_multiplies_the_error_before_it_and_adds_its_own(name: str) -> None:
    torch.manual_seed(1)
    network = float64_copy(NETWORKS[name]())
    sandwich = lipkit.export(layers.SandwichLinear(6, 5).eval(), (6,))
    for plain in (network, float64_copy(sandwich)):
        shape = plain.input_shape
        for module in plain:
            n = math.prod(shape)
            value = IntValue(0, shape, 28, torch.full((1, n), 1 << 26), 0.0, 0.1, 2.0, 4.0 * n)
            gain = enlarged(lipkit.lipschitz(module, shape))
            writer = Builder(n)
            found = writer.chain([module], value, [None])
            off = Builder(n).chain([module], replace(value, error=0.01), [None])
            assert gain * 0.01 * (1 - 1e-12) <= off.error <= gain * 0.01 * (1 + 1e-9) + 2 * found.error + 1e-6
            assert off.reach == found.reach >= gain * value.reach * (1 - 1e-12)
            changed = any(isinstance(operation, (IntLinear, IntBlend)) for operation in writer.wiring.modules)
            rounding = math.sqrt(found.centre.shape[1]) * 2.0 ** -(found.fraction + 1)
            assert found.error >= (rounding if changed else 0)
            shape = found.shape


def test_branches_start_where_the_program_may_be() -> None:
    value = IntValue(0, (4,), 28, torch.zeros(1, 4, dtype=torch.long), 0.25, 1.0, 2.0, 4.0)
    assert value.spread >= 1.5
    inner = Builder(4).branch([], value)
    assert (inner.error, inner.reach) == (0.0, value.spread)
    twice = Builder(4).chain([modules.Graph([modules.Add(1, 1)], [[0, 0]])], value, [None])
    assert 2 * value.spread <= twice.largest <= 2 * value.spread * (1 + 1e-6)
    assert twice.error >= 2 * value.error


@pytest.mark.parametrize("count", range(1, 6))
def test_sums_of_many_values_stay_within_their_word(count: int) -> None:
    value = IntValue(0, (4,), 0, torch.full((1, 4), WORD - 1), 0.0, 0.0, WORD - 1, 2.0 * WORD)
    writer = Builder(4)
    writer.blend(value, count, [value] * count, [1.99] * count)
    operation = writer.wiring.modules[0]
    assert isinstance(operation, IntBlend)
    assert 2**59 < sum(operation.factors) * (WORD - 1) < 2**62
