"""Gains on boxes and of entries against exact patterns of ReLU, sampled derivatives and chords."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lipkit
from lipkit import modules
from lipkit.bounds.lmi import proves_gain
from lipkit.certificates import gain_matrix, gains, local_gain, runs, tight
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.layers import MaxMin
from lipkit.lowering import lipschitz
from lipkit.modules import Add, Affine, Arcsinh, Arctan, Blend, Concatenate, Graph, Network, Piece, Reshape, Roll


def mlp(
    sizes: list[int], make: type[nn.Module] = nn.Tanh, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Network:
    generator = torch.Generator().manual_seed(seed)
    modules: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layer = nn.Linear(a, b, dtype=dtype)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(b, a, generator=generator, dtype=torch.float64) * a**-0.5 * 1.5)
            layer.bias.copy_(torch.randn(b, generator=generator, dtype=torch.float64) * 0.3)
        modules += [layer, make()]
    return Network(modules[:-1], (sizes[0],))


def derivatives(network: Network, x: Tensor) -> Tensor:
    """(N, outputs, inputs)."""
    jacobian = torch.func.jacrev(lambda v: network(v[None])[0])
    found: Tensor = torch.func.vmap(jacobian)(x)
    return found


def inside(low: float, high: float, count: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return low + (high - low) * torch.rand(count, width, generator=generator, dtype=torch.float64)


NARROW, ASIDE, WIDE = (-0.1, 0.1), (0.5, 2.0), (-3.0, 3.0)
MORE = [(nn.ReLU, WIDE), (nn.GELU, NARROW), (nn.GELU, ASIDE), (nn.ELU, WIDE)]
MORE += [(kind, ASIDE) for kind in (nn.Sigmoid, nn.Softplus, nn.SiLU)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "box"),
    [(nn.ReLU, NARROW), (nn.ReLU, ASIDE), (nn.GELU, WIDE), (nn.Tanh, WIDE), (nn.Hardtanh, ASIDE)]
    + [pytest.param(*one, marks=pytest.mark.thorough) for one in MORE],
)
def test_no_sampled_derivative_is_above_the_bounds(make: type[nn.Module], box: tuple[float, float]) -> None:
    network = mlp([2, 4, 3, 2], make)
    sampled = derivatives(network, inside(*box, 500, 2))
    gain, matrix = local_gain(network, box), gain_matrix(network, box)
    assert float(torch.linalg.matrix_norm(sampled, 2).amax()) <= gain <= float(lipschitz(network))
    assert bool((sampled.abs().amax(0) <= matrix).all())
    assert bool((matrix <= gain_matrix(network) * (1 + 1e-3)).all())
    assert gain <= local_gain(network, (-9.0, 9.0)) * (1 + 1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_one_hidden_layer_of_relu_has_the_exact_matrix_of_its_patterns(seed: int) -> None:
    network = mlp([2, 6, 2], nn.ReLU, seed)
    first, last = network[0].weight.numpy(), network[2].weight.numpy()
    terms = last[:, :, None] * first[None]
    # Every pattern of six units, whether an input has it or not: the bound of slopes in [0, 1] is their maximum.
    patterns = [np.abs((terms * np.array(on)[None, :, None]).sum(1)) for on in itertools.product([0, 1], repeat=6)]
    assert gain_matrix(network).numpy() == pytest.approx(np.max(patterns, 0), rel=2e-3)
    jacobians = [last @ (np.array(on)[:, None] * first) for on in itertools.product([0, 1], repeat=6)]
    found = local_gain(network, (-math.inf, math.inf))
    assert max(np.linalg.norm(j, 2) for j in jacobians) <= found <= 1.5 * max(np.linalg.norm(j, 2) for j in jacobians)


@pytest.mark.thorough
def test_entries_without_a_path_need_no_lmi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two channels side by side: their cross entries are 0 up to rounding, where the solver finds no end."""
    network = mlp([2, 8, 2])
    with torch.no_grad():
        for k, half in enumerate((slice(0, 4), slice(4, 8))):
            network[0].weight[half, k] = network[2].weight[k, half] = 0
    turn = nn.Linear(2, 2, bias=False, dtype=torch.float64)  # there and back: products that are 0 up to rounding
    nn.init.orthogonal_(turn.weight)
    back = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    back.weight.data = turn.weight.data.mT.contiguous()
    calls = list[tuple[int, int]]()
    entry = runs.Run.entry
    monkeypatch.setattr(runs.Run, "entry", lambda run, i, j: [calls.append((i, j)), entry(run, i, j)][1])
    found = gain_matrix(Network([turn, back, *network], (2,)))
    zero = found < 1e-13
    assert len(calls) == int(zero.sum()) == 2
    sampled = derivatives(network, inside(-3, 3, 2000, 2)).abs().amax(0)
    assert bool((sampled[~zero] <= found[~zero] * (1 + 1e-12)).all() & (sampled[zero] == 0).all())


def test_where_the_pattern_is_fixed_a_relu_network_is_linear() -> None:
    network = mlp([3, 5, 5, 2], nn.ReLU, 3)
    x = torch.tensor([0.7, -0.4, 0.2], dtype=torch.float64)
    exact = derivatives(network, x[None])[0]
    for radius in (0.0, 1e-6):
        box = (x - radius, (x + radius).numpy())
        assert local_gain(network, box) == pytest.approx(float(torch.linalg.matrix_norm(exact, 2)), rel=1e-9)
        assert gain_matrix(network, box).numpy() == pytest.approx(exact.abs().numpy(), rel=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [nn.Tanh, nn.GELU])
def test_a_box_of_one_point_gives_the_derivative_there(make: type[nn.Module]) -> None:
    network = mlp([3, 5, 5, 2], make)
    exact = derivatives(network, torch.full((1, 3), 0.25, dtype=torch.float64))[0]
    found = gain_matrix(network, (0.25, 0.25))
    assert bool((exact.abs() <= found).all())
    assert found.numpy() == pytest.approx(exact.abs().numpy(), abs=1e-6)
    size = float(torch.linalg.matrix_norm(exact, 2))
    assert size <= local_gain(network, (0.25, 0.25)) < size * (1 + 1e-4)


@pytest.mark.thorough
def test_chords_across_kinks_count() -> None:
    identity = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    for kink, box, exact in [
        (nn.LeakyReLU(-0.5), (-1.0, -1e-9), 0.5),
        (nn.LeakyReLU(-2.0), (-1.0, 1.0), 2.0),
        (nn.Hardtanh(-1.0, 1.0), (-2.0, -1.00001), 0.0),
        (nn.Hardtanh(-1.0, 1.0), (-2.0, -0.99), 1.0),
        (nn.Hardtanh(0.0, 6.0), (6.00001, 7.0), 0.0),
        (nn.ReLU(), (-1.0, -1e-9), 0.0),
        (nn.ReLU(), (-1.0, 1e-300), 1.0),
        (Arctan(), (50.0, 90.0), 1 / 2501),  # far from 0 the slope still falls
        (Arctan(), (-3.0, -2.0), 0.2),
        (Arcsinh(), (100.0, 1e6), 1 / math.hypot(1, 100)),
        (Arcsinh(), (-1.0, 3.0), 1.0),
    ]:
        network = Network([identity, kink], (1,))
        with torch.no_grad():
            identity.weight.fill_(1.0)
        assert exact <= local_gain(network, box) <= exact + 1e-9, (kink, box)
    # Of another beta the slope still rises at 80.
    assert local_gain(Network([identity, nn.Softplus(0.05)], (1,)), (60.0, 80.0)) >= 1 / (1 + math.exp(-4))
    # The least value of a leaky ReLU of negative slope is that at its kink.
    with torch.no_grad():
        shifted = Network(
            [identity, nn.LeakyReLU(-0.5), Affine(torch.ones(1), torch.full((1,), -0.1)), nn.ReLU()], (1,)
        )
        assert local_gain(shifted, (-1.0, 1.0)) >= 1.0 - 1e-12
        last = Network([identity, nn.LeakyReLU(-1.0), Affine(-torch.ones(1), torch.full((1,), 0.5)), nn.ReLU()], (1,))
    assert local_gain(last, (-1.0, 1.0)) >= 1.0 - 1e-12  # it moves where |x| < 1/2 only


def test_the_ends_of_a_box_are_not_rounded_to_float32() -> None:
    low = 0.1  # float32 has 0.1 + 1.5e-9
    network = Network([nn.Linear(1, 1, dtype=torch.float64), nn.ReLU()], (1,))
    with torch.no_grad():
        network[0].weight.fill_(-1.0)
        network[0].bias.fill_(low + 1e-10)
    assert local_gain(network, (low, 1.0)) >= 1.0


@pytest.mark.thorough
def test_entries_and_channels_have_boxes_of_their_own() -> None:
    network = Network([Affine(torch.ones(2), torch.zeros(2)), nn.Flatten(), *mlp([8, 6, 2], nn.ReLU, 5)], (2, 2, 2))
    low, high = torch.tensor([-0.1, 0.5]), torch.tensor([0.2, 0.6])
    channel = local_gain(network, (low, high))
    each = local_gain(network, (low.view(2, 1, 1).expand(2, 2, 2), high.view(2, 1, 1).expand(2, 2, 2).numpy()))
    assert channel == each <= local_gain(network, (-0.1, 0.6)) * (1 + 1e-6)
    for wrong, error in [
        ((1.0, 0.0), OptionError),
        ((math.nan, 1.0), OptionError),
        ((torch.zeros(3), 1.0), ShapeError),
    ]:
        with pytest.raises(error, match="box: expected"):
            local_gain(network, wrong)
    with pytest.raises(OptionError, match="box: expected"):
        local_gain(network, 3.0)  # type: ignore[arg-type]
    for solve in (functools.partial(local_gain, box=(0.0, 1.0)), tight):
        with pytest.raises(OptionError, match="units: expected an integer of at least 0, got '3'"):
            solve(network, units="3")  # type: ignore[arg-type]


@pytest.mark.thorough
def test_other_modules_count_by_their_constants_and_have_no_matrix() -> None:
    network = lipkit.export(
        nn.Sequential(nn.Conv2d(1, 2, 3), MaxMin(), nn.Flatten(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)),
        (1, 4, 4),
    )
    double = Network(network, (1, 4, 4)).double()
    sampled = derivatives(double, inside(-1, 1, 50, 16).view(-1, 1, 4, 4)).flatten(2)
    found = local_gain(network, (-1.0, 1.0))
    assert float(torch.linalg.matrix_norm(sampled, 2).amax()) <= found <= float(lipschitz(network))
    with pytest.raises(NoRuleError, match="expected dense layers"):
        gain_matrix(network)
    far = Network([nn.Linear(1, 1), nn.LayerNorm(1, eps=1.0), nn.Linear(1, 1), nn.ReLU()], (1,))
    for module, bias in ((far[0], 100.0), (far[2], -50.0)):  # values behind the normalisation are not known
        module.weight.fill_(1.0), module.bias.fill_(bias)
    assert local_gain(far, (-1.0, 1.0)) >= 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("index", [0, 2])
def test_numbers_that_are_not_finite_bound_nothing(bad: float, index: int) -> None:
    network = mlp([2, 3, 2], nn.ReLU)
    with torch.no_grad():
        network[index].bias[0] = bad
    assert local_gain(network, (0.0, 1.0)) == math.inf
    assert bool(gain_matrix(network, (0.0, 1.0)).isinf().all())


def test_units_that_are_off_and_layers_of_zeros() -> None:
    network = mlp([3, 4, 2], nn.ReLU)
    with torch.no_grad():
        network[0].bias.fill_(-100.0)
    assert local_gain(network, (-1.0, 1.0)) == 0
    assert float(gain_matrix(network, (-1.0, 1.0)).max()) < 1e-300
    scale = Affine(torch.tensor([2.0, 0.0]), torch.ones(2))
    assert local_gain(Network([scale], (2,)), (0.0, 1.0)) == 2.0
    for layers in ([scale], [scale, nn.ReLU()]):
        found = gain_matrix(Network(layers, (2,)), (0.0, 1.0))
        assert found.flatten().tolist() == pytest.approx([2, 0, 0, 0])


@pytest.mark.thorough
def test_wide_runs_are_proved_in_pieces() -> None:
    network = mlp([3, 12, 12, 12, 12, 2], nn.ReLU)
    product, pieces, one = (float(lipschitz(n)) for n in (network, tight(network, units=24), tight(network)))
    assert one < pieces < product
    assert sorted(tight(network, units=24).multipliers()) == [1, 3, 7]
    assert float(lipschitz(tight(network, units=5))) == product
    sampled = derivatives(network, inside(-2, 2, 200, 3))
    largest = float(torch.linalg.matrix_norm(sampled, 2).amax())
    assert largest <= one
    assert largest <= local_gain(network, (-2.0, 2.0), units=20) <= product
    assert local_gain(tight(network), (-9.0, 9.0), units=0) <= float(lipschitz(tight(network)))


@pytest.mark.thorough
def test_a_policy_has_less_than_half_of_its_product_and_less_on_a_box() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)]
    network = lipkit.export(nn.Sequential(*layers), (5,))
    product, found = float(lipschitz(network)), float(lipschitz(tight(network)))
    assert local_gain(network, (-0.1, 0.1)) < 0.6 * found < 0.3 * product


@pytest.mark.thorough
@pytest.mark.parametrize("box", [None, (-1.0, 1.0)])
def test_an_output_without_dimensions_is_a_vector_of_one_entry(box: tuple[float, float] | None) -> None:
    number = Network([*(vector := mlp([3, 8, 8, 1])), Reshape()], (3,))
    found, expected = (lipkit.analyze(net, (3,), restarts=0, tight=True, box=box) for net in (number, vector))
    assert found.upper == expected.upper < expected.product
    assert found.how == expected.how


def test_broken_proofs_are_found() -> None:
    (run,) = gains._parts(mlp([3, 6, 5, 2], nn.Tanh), (-0.5, 0.5), None)
    gain, multipliers = run.least()
    weights, errors = zip(*run.weights, strict=True)
    assert proves_gain(weights, multipliers, gain, errors)
    assert not proves_gain(weights, multipliers, gain * (1 - 1e-4), errors)
    for layer, unit, factor in [(0, 0, 1.3), (0, 3, 0.5), (1, 2, 1.3), (1, 4, 0.5)]:
        changed = [m.clone() for m in multipliers]
        changed[layer][unit] *= factor
        assert not proves_gain(weights, changed, gain, errors)
    # A weight that may be off by 1e-3 of itself proves no gain so close.
    assert not proves_gain(weights, multipliers, gain, [1e-3 * w.abs() for w in weights])


def test_slopes_and_values_hold_every_number_of_an_interval() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = [nn.ReLU(), nn.LeakyReLU(-0.7), nn.Tanh(), nn.Sigmoid(), nn.Softplus(), nn.SiLU(), nn.GELU(), nn.Mish()]
    for module in [
        *kinds,
        nn.GELU("tanh"),
        nn.ReLU6(),
        nn.Hardtanh(-0.3, 0.2),
        nn.SELU(),
        nn.CELU(0.5),
        nn.LeakyReLU(3.0),
        nn.ELU(5.0),
        nn.ELU(-2.0),
        nn.Hardswish(),
        nn.PReLU(init=-0.5).double().requires_grad_(False),
        nn.PReLU(init=2.0).double().requires_grad_(False),
    ]:
        ends = (torch.randn(2, 300, generator=generator, dtype=torch.float64) * 4).sort(0).values
        (a, b), (low, high) = runs.slopes_of(module, ends[0], ends[1], float(lipschitz(module).detach()))
        share = torch.linspace(0, 1, 60, dtype=torch.float64)[:, None]
        x = (ends[0] + share * (ends[1] - ends[0])).clamp(*ends)
        y = module(x)
        chord = (y[1:] - y[:-1]) / (x[1:] - x[:-1])
        assert bool(((low <= y) & (y <= high)).all()), module
        assert bool(((a - 1e-9 <= chord) & (chord <= b + 1e-9)).all()), module


@pytest.mark.parametrize(
    ("module", "least"),
    [
        (nn.SELU(), 0.0),
        (nn.ELU(5.0), 0.0),
        (nn.PReLU(init=0.25), 0.25),
        (nn.PReLU(init=-2.0), -2.0),
        (nn.Hardswish(), -0.5),
    ],
)
def test_the_least_slope_is_known(module: nn.Module, least: float) -> None:
    ends = torch.tensor([[-30.0], [30.0]], dtype=torch.float64)
    (low, _), _ = runs.slopes_of(module, ends[0], ends[1], float(lipschitz(module).detach()))
    x = torch.linspace(-30, 30, 60001, dtype=torch.float64)
    y = module.double().requires_grad_(False)(x)
    steepest = float(((y[1:] - y[:-1]) / (x[1:] - x[:-1])).min())
    assert least - 1e-12 <= float(low) <= steepest + 1e-9
    assert steepest <= least + 1e-3  # no larger number is a bound


@pytest.mark.parametrize("seed", range(12))
def test_rounding_of_products_is_inside_the_gain(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = 40
    first, last = (torch.randn(n, generator=generator, dtype=torch.float64) * 2.0**20 for _ in range(2))
    first[-1], last[-1] = 1.0, 0.0
    total = sum(Fraction(a) * Fraction(b) for a, b in zip(first.tolist(), last.tolist(), strict=True))
    last[-1] = -float(total)  # they cancel, but for one rounding
    exact = abs(float(total + Fraction(float(last[-1]))))
    inner, outer = nn.Linear(1, n, dtype=torch.float64), nn.Linear(n, 1, dtype=torch.float64)
    with torch.no_grad():
        inner.weight.copy_(first[:, None])
        inner.bias.fill_(2.0**30)
        outer.weight.copy_(last[None])
    for network in (Network([inner, outer], (1,)), Network([inner, nn.ReLU(), outer], (1,))):
        assert exact <= local_gain(network, (0.0, 1.0))
        assert exact <= float(gain_matrix(network, (0.0, 1.0))) <= 2.0


@pytest.mark.parametrize("function", [local_gain, gain_matrix])
def test_gains_are_those_of_exported_networks(function: Callable[..., object]) -> None:
    with pytest.raises(NoRuleError, match=r"expected an exported network.*: bound lipkit\.export"):
        function(nn.Linear(2, 2), (0, 1))


@pytest.mark.thorough
@pytest.mark.parametrize(("first", "last"), [(1e-300, 1e300), (1e-160, 1e-160), (1e-320, 1.0)])
def test_weights_at_the_ends_of_float64_have_a_bound(first: float, last: float) -> None:
    network = mlp([3, 3, 2], nn.ReLU)
    with torch.no_grad():
        network[0].weight.mul_(first)
        network[2].weight.mul_(last)
    plain, found = (lipkit.analyze(network, (3,), restarts=0, tight=tight) for tight in (False, True))
    x = torch.randn(20, 3, dtype=torch.float64)
    assert float(derivatives(network, x).norm(dim=(1, 2)).max()) <= 2 * found.upper <= 2 * plain.upper
    assert found.describe().startswith("L <= ")


def test_a_value_that_underflows_keeps_its_sign() -> None:
    """1e-300 * -1e-110 is below 0, where a ReLU behind it has slope 0."""
    ends = torch.tensor([[-1e-100], [-1e-110]], dtype=torch.float64)
    (low, high), (least, _) = runs.slopes_of(nn.LeakyReLU(1e-300), ends[0], ends[1], 1.0)
    assert float(low) == float(high) == 1e-300
    assert float(least) < 0


def branching(seed: int, make: type[nn.Module] = nn.Tanh) -> Network:
    """Residual blocks, dense concatenations, blends and heads, drawn at random."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    nodes, sources, widths = list[nn.Module](), list[list[int]](), [draw.randint(2, 4)]

    def put(module: nn.Module, *read: int) -> int:
        nodes.append(module)
        sources.append([*read])
        widths.append(len(module(*(torch.zeros(1, widths[k]) for k in read))[0]))
        return len(nodes)

    value = 0
    for _ in range(draw.randint(1, 3)):
        width = widths[value]
        inner = put(make(), put(nn.Linear(width, 5), value))
        other = put(nn.Linear(5, width), inner)
        kind = draw.choice(("residual", "dense", "blend", "nested", "parallel"))
        if kind == "parallel":  # both layers are computed before their activations
            first, second = put(nn.Linear(width, 3), other), put(nn.Linear(width, 3), value)
            value = put(Add(1, -1), put(make(), first), put(make(), second))
        elif kind == "residual":
            value = put(Add(1, draw.choice((1, -1))), value, other)
        elif kind == "dense":
            value = put(Concatenate(1), put(Roll(1, 1), value), inner, put(Piece(1, 0, width, 2), other))
        elif kind == "blend":
            value = put(Blend(torch.tensor(0.3)), put(Affine(torch.randn(width), torch.randn(width)), value), other)
        else:
            head = Graph([make(), nn.Linear(width, width), Add(1, 1)], [[0], [1], [0, 2]])
            value = put(Add(1, 1, 1), value, put(head, other), other)
    put(nn.Linear(widths[value], 2), value)
    inputs = widths[0]
    return lipkit.export(Graph(nodes, sources).double().eval(), (inputs,))


@pytest.mark.parametrize("seed", range(12))
def test_one_lmi_bounds_all_branches(seed: int, tmp_path: Path) -> None:
    network = branching(seed, (nn.Tanh, nn.ReLU, nn.GELU)[seed % 3])
    inputs = network.input_shape[0]
    for high in (0.1, 3.0):
        found, entries = local_gain(network, (-high, high)), gain_matrix(network, (-high, high))
        sampled = derivatives(network, inside(-high, high, 2000, inputs))
        assert float(torch.linalg.matrix_norm(sampled, 2).amax()) <= found <= float(lipschitz(network))
        assert bool((sampled.abs().amax(0) <= entries * (1 + 1e-12)).all())
    everywhere = local_gain(network, gains.EVERYWHERE)
    assert found <= everywhere * (1 + 1e-4)
    assert everywhere <= 0.95 * float(lipschitz(network))
    if seed % 3 != 2:  # LipSDP takes slopes in [0, 1], which GELU does not have
        proved = tight(network)
        # A tanh is in [-1, 1], which narrows the slopes behind it for `local_gain` alone.
        assert everywhere * (1 - 1e-4) <= float(lipschitz(proved)) <= 1.2 * everywhere
        modules.save(proved, tmp_path / "network")
        assert float(lipschitz(modules.load(tmp_path / "network"))) == float(lipschitz(proved))
        certificate = lipkit.certify(proved, inside(-1, 1, 5, inputs), torch.zeros(5, dtype=torch.int64))
        assert certificate.constant <= float(lipschitz(proved)) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_where_the_pattern_is_fixed_branches_are_linear(seed: int) -> None:
    network = branching(seed, nn.ReLU)
    for x in inside(-1, 1, 3, network.input_shape[0]):
        exact = derivatives(network, x[None])[0]
        box = (x - 1e-9, x + 1e-9)
        torch.testing.assert_close(gain_matrix(network, box), exact.abs(), rtol=1e-6, atol=1e-9)
        norm = float(torch.linalg.matrix_norm(exact, 2))
        assert norm * (1 - 1e-12) <= local_gain(network, box) <= norm * (1 + 1e-6) + 1e-200


def test_a_loop_around_a_policy_contracts() -> None:
    """x + dt (A x + B u(x)): the product of the parts is above 1, and one LMI proves less than 1."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    first, last = policy[0], policy[2]
    with torch.no_grad():
        first.bias.zero_()
        first.weight.mul_(0.1)
        gains_of_state = torch.tensor([[-1.0, -4.0]], dtype=torch.float64)
        last.weight.copy_(gains_of_state @ torch.linalg.pinv(first.weight))
    a = torch.tensor([[0.9, 0.1], [0.0, 1.1]], dtype=torch.float64)
    b = torch.tensor([[0.0], [0.1]], dtype=torch.float64)

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = policy

        def forward(self, x: Tensor) -> Tensor:
            return x @ a.T + self.policy(x) @ b.T

    network = lipkit.export(Loop().eval(), (2,))
    assert float(lipschitz(network)) > 1.5
    slope = float(torch.linalg.matrix_norm(derivatives(network, inside(-0.5, 0.5, 2000, 2)), 2).amax())
    assert slope <= local_gain(network, (-0.5, 0.5)) < 1


class Stacked(nn.Module):
    """Three branches, whose mean is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return 3 * torch.stack([torch.relu(self.layer(x)), x, -x], 1).mean(1)


class Sliced(nn.Module):
    """A residual block between constants, then every other entry."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor([1.0, 0.0, 2.0, -1.0]))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(torch.relu(x + 0.3)) * self.scale + 0.5 * x + 3
        return h.roll(1, 1)[:, ::2]


class Mixer(nn.Module):
    """A residual block on the rows of tokens, one layer on their columns."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x + torch.relu(self.rows(x))
        h = torch.relu(self.columns(h.transpose(1, 2))).transpose(1, 2)
        out: Tensor = self.head(h.flatten(1))
        return out


class Convolutional(nn.Module):
    """Strided, grouped and transposed convolutions, pooling, and a residual connection around two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.inner = nn.Conv2d(1, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
        self.back, self.up = nn.Conv2d(4, 4, 1, groups=2), nn.ConvTranspose2d(4, 1, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.into(x))
        h = h + self.back(torch.relu(self.inner(h)))
        out: Tensor = torch.nn.functional.avg_pool2d(torch.tanh(self.up(h)), 2).flatten(1)
        return out


@pytest.mark.parametrize(("make", "shape", "near"), [
    (Stacked, (3,), 1.1), (Sliced, (4,), 1.1), (Mixer, (3, 3), 1.1), (Convolutional, (1, 4, 4), 2.0),
])  # fmt: skip
def test_linear_modules_in_a_chain_are_layers(make: type[nn.Module], shape: tuple[int, ...], near: float) -> None:
    torch.manual_seed(0)
    network = lipkit.export(make().double().eval(), shape)
    x = inside(-1, 1, 2000, math.prod(shape))
    sampled = torch.func.vmap(torch.func.jacrev(lambda v: network(v.view(1, *shape))[0]))(x)
    slope = float(torch.linalg.matrix_norm(sampled, 2).amax())
    assert slope * (1 - 1e-12) <= local_gain(network, (-1.0, 1.0)) <= near * slope
    entries = gain_matrix(network, (-1.0, 1.0))
    assert bool((sampled.abs().amax(0) <= entries * (1 + 1e-12)).all())
    assert float(entries.sum()) <= (near + 0.1) * float(sampled.abs().amax(0).sum())
    if make is not Mixer:  # by rows there is a matrix for each row
        tighter = float(lipschitz(network, tight=True))
        assert slope * (1 - 1e-12) <= tighter <= near * slope
        assert tighter < 0.8 * float(lipschitz(network)) or make is not Convolutional
    assert bool((gain_matrix(Network([Roll(1, 1), nn.Flatten()], shape)).sum(0) == 1).all())  # nothing else


def test_graphs_of_other_modules_count_by_their_constants() -> None:
    torch.manual_seed(0)
    norm = Graph([nn.LayerNorm(3, eps=0.1), Add(1, 1)], [[0], [0, 1]])
    network = lipkit.export(nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 2)).double().eval(), (3,))
    assert local_gain(network, (-1.0, 1.0)) == pytest.approx(float(lipschitz(network)), rel=1e-6)
    with pytest.raises(NoRuleError, match="expected dense layers"):
        gain_matrix(network)
    wide = branching(1)
    assert local_gain(wide, (-1.0, 1.0), units=3) <= float(lipschitz(wide))
    with torch.no_grad():
        next(m for m in wide.modules() if type(m) is nn.Linear).bias[0] = math.nan
    assert local_gain(wide, (-1.0, 1.0)) == math.inf
    assert float(lipschitz(wide, tight=True)) == math.inf


@pytest.mark.parametrize("module", [modules.MaxMin(), modules.GroupSort()])
@pytest.mark.parametrize("first", [True, False])
def test_modules_of_constant_one_mix_entries(module: nn.Module, first: bool) -> None:
    """MaxMin moves entry 2 to output 1, which no weight shows: there is no matrix, and the gain counts it."""
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
    network = Network([module, layer] if first else [layer, module], (2,))
    with pytest.raises(NoRuleError, match="expected dense layers"):
        gain_matrix(network)
    assert 1 <= local_gain(network, (-1.0, 1.0)) <= 1 + 1e-9


def test_broken_proofs_of_branches_are_found() -> None:
    (run,) = gains._parts(branching(3), (-0.5, 0.5), None)
    gain, multipliers = run.least()
    weights, errors = zip(*run.weights, strict=True)
    assert proves_gain(weights, multipliers, gain, errors)
    assert not proves_gain(weights, multipliers, gain * (1 - 1e-3), errors)
    assert not proves_gain(weights, multipliers, gain, [1e-2 * w.abs() for w in weights])
