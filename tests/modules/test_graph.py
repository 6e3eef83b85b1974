"""Graphs: constants against dense matrices, rounding against what float32 loses, storage, and what is refused."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lipkit import certify, export, lipschitz
from lipkit.certificates.evaluators import machine
from lipkit.errors import DataError, NoRuleError, OptionError, ShapeError
from lipkit.modules import (
    Add,
    Affine,
    Blend,
    Concatenate,
    EnlargeBilinear,
    Expand,
    Graph,
    LayerCenter,
    Maximum,
    Mean,
    Network,
    Pad,
    Permute,
    Piece,
    Reshape,
    Roll,
    load,
    local_error,
    save,
)
from lipkit.modules.graph import Wiring, value_shapes
from lipkit.proof.roundoff import FLOAT32, FLOAT64


def random_graph(seed: int, width: int = 6, steps: int = 6, *, linear: bool = False) -> Graph:
    """Linear layers, activations, pieces and joins of vectors, in an order that nobody planned."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    wiring, sizes = Wiring(), [width]

    def pick() -> int:
        return rng.randrange(max(0, len(sizes) - 4), len(sizes))

    def add(module: nn.Module, size: int, *values: int) -> int:
        sizes.append(size)
        return wiring.add(module, *values)

    def dense(value: int, size: int) -> int:
        layer = nn.Linear(sizes[value], size)
        layer.weight.data = torch.randn(layer.weight.shape, generator=generator) * rng.choice([0.3, 1.0, 2.0])
        layer.bias.data = torch.randn(layer.bias.shape, generator=generator)
        return add(layer, size, value)

    for _ in range(steps):
        value = pick()
        kind = rng.choice(["dense", "activation", "add", "cat", "maximum", "cut"])
        if kind == "activation" and not linear:
            add(rng.choice([nn.ReLU(), nn.Tanh(), nn.LeakyReLU(0.2)]), sizes[value], value)
        elif kind in ("add", "maximum") and not (linear and kind == "maximum"):
            other = pick()
            other = other if sizes[other] == sizes[value] else dense(other, sizes[value])
            sums = [Add(1, 1), Add(-1, 1), Blend(torch.tensor(rng.random()))]
            join = rng.choice(sums) if kind == "add" else Maximum()
            add(join, sizes[value], value, other)
        elif kind == "cat" and sizes[value] <= 12:
            other = pick()
            add(Concatenate(1), sizes[value] + sizes[other], value, other)
        elif kind == "cut" and sizes[value] > 2:
            at = rng.randrange(1, sizes[value])
            left = add(Piece(1, 0, at), at, value)
            right = add(Piece(1, at, sizes[value]), sizes[value] - at, value)
            moved = dense(left, at)
            add(Concatenate(1), sizes[value], moved, right)
        else:
            dense(value, rng.choice([3, 4, 6]))
    # The last value reads two of the others, so that nothing is a chain by chance.
    last, other = len(sizes) - 1, rng.randrange(len(sizes))
    end = add(Concatenate(1), sizes[last] + sizes[other], last, other)
    final = nn.Sequential(*wiring.chain(end))
    return final[0] if len(final) == 1 else Graph(final, [[i] for i in range(len(final))])


def jacobian(module: nn.Module, x: Tensor) -> Tensor:
    found = torch.autograd.functional.jacobian(lambda v: module(v[None])[0], x)
    assert isinstance(found, Tensor)
    return found


@pytest.mark.thorough
@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_the_constant_is_above_every_jacobian(seed: int) -> None:
    graph = random_graph(seed).double()
    bound = float(lipschitz(graph, (6,)).detach())
    for x in 2 * torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)):
        assert float(torch.linalg.matrix_norm(jacobian(graph, x), 2)) <= bound


def test_constants_of_joins_are_attained() -> None:
    eye, three = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    eye.weight.data, three.weight.data = torch.eye(4), 3 * torch.eye(4)
    halves = [Piece(1, 0, 2), Piece(1, 2, 4)]
    small = nn.Linear(2, 2, bias=False)
    small.weight.data = 3 * torch.eye(2)
    for graph, expected in (
        (Graph([eye, three, Add(1, -1)], [[0], [0], [1, 2]]), 4.0),
        (Graph([eye, three, Blend(torch.tensor(0.25))], [[0], [0], [1, 2]]), 2.5),
        (Graph([eye, three, Blend(torch.tensor(-0.5))], [[0], [0], [1, 2]]), 5.0),
        (Graph([eye, three, Concatenate(1)], [[0], [0], [1, 2]]), math.sqrt(10)),
        (Graph([eye, three, Maximum()], [[0], [0], [1, 2]]), math.sqrt(10)),
        # Disjoint pieces count by their maximum, overlapping ones by the whole.
        (Graph([*halves, small, Concatenate(1)], [[0], [0], [1], [3, 2]]), 3.0),
        (Graph([halves[0], Piece(1, 1, 4), small, Concatenate(1)], [[0], [0], [1], [3, 2]]), math.sqrt(10)),
    ):
        assert float(lipschitz(graph, (4,)).detach()) == pytest.approx(expected, rel=1e-9)
        assert float(lipschitz(graph, (4,)).detach()) >= expected * (1 - 1e-15)


def test_a_layer_of_no_finite_numbers_has_no_bound_behind_a_constant_map() -> None:
    zero, unknown = (nn.Linear(2, 2, bias=False) for _ in range(2))
    zero.weight.data.zero_()
    unknown.weight.data.fill_(math.nan)
    wirings: list[tuple[list[nn.Module], list[list[int]]]] = [
        ([zero, unknown], [[0], [1]]),
        ([zero, unknown, Add(1, 1)], [[0], [1], [0, 2]]),
        ([zero, unknown, Concatenate(1)], [[0], [1], [0, 2]]),
        # Pieces of the constant value: their own gains over each other's sources are zeros, too.
        ([zero, Piece(1, 0, 1), Piece(1, 1, 2), nn.PReLU(init=math.inf), Concatenate(1)], [[0], [1], [1], [2], [4, 3]]),
    ]
    for modules, sources in wirings:
        graph = Graph(modules, sources)
        assert not graph(torch.ones(1, 2)).isfinite().all()
        assert lipschitz(graph) == math.inf
        graph.nodes[0].weight.data.fill_(1.0)
        assert lipschitz(graph) == math.inf
        for module in graph.nodes:
            for weight in module.parameters():
                weight.data.zero_()
        assert lipschitz(graph) <= 1 + 1e-12  # the wiring itself has a bound
        for module in (zero, unknown):
            module.weight.data.fill_(0.0 if module is zero else math.nan)


def test_the_bound_has_derivatives() -> None:
    gain = nn.Linear(2, 2, bias=False)
    block = Graph([gain, Add(1, 1)], [[0], [0, 1]])
    lipschitz(block, (2,)).backward()
    assert gain.weight.grad is not None
    assert float(gain.weight.grad.norm()) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(12))
def test_rounding_is_covered_and_the_bound_is_not_idle(seed: int) -> None:
    graph = random_graph(seed, steps=8)
    double = random_graph(seed, steps=8).double()
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        lost = (graph(x).double() - double(x.double())).norm(dim=1)
    bound = local_error(double, (6,), FLOAT32)(x.double()).error.at
    assert bool((lost <= bound).all())
    assert float(bound.max()) <= 3000 * max(float(lost.max()), 1e-7)
    # Away from the sample the bound grows with the distance.
    moved = x + 0.1 * torch.randn(200, 6, generator=torch.Generator().manual_seed(seed + 1))
    line = local_error(double, (6,), FLOAT32)(x.double()).error
    with torch.no_grad():
        lost = (graph(moved).double() - double(moved.double())).norm(dim=1)
    assert bool((lost <= line.at + line.slope * (moved - x).double().norm(dim=1)).all())
    assert float(local_error(double, (6,), FLOAT64)(x.double()).error.at.max()) < 1e-6 * float(bound.max())


JOINED = {
    "sum": [Add(1, 1)],
    "difference": [Add(1, -1)],
    "blend": [Blend(torch.tensor(0.3))],
    "beside": [Concatenate(1)],
    "maximum": [Maximum()],
}


@pytest.mark.parametrize("end", JOINED)
@pytest.mark.parametrize("rough", ["neither", "first", "second"])
def test_errors_of_either_operand_and_of_the_join_itself_count(end: str, rough: str) -> None:
    # Pieces of the input are exact; x + 2^14 - 2^14 has lost the last places of x.
    lossy = [Affine(torch.ones(1), torch.tensor([2.0**14])), Affine(torch.ones(1), torch.tensor([-(2.0**14)]))]
    modules: list[nn.Module] = [Piece(1, 0, 3), Piece(1, 3, 6), *([] if rough == "neither" else lossy)]
    one = 2 if rough == "second" else 1
    sources = [[0], [0]] if rough == "neither" else [[0], [0], [one], [3]]
    read = {"neither": [1, 2], "first": [4, 2], "second": [1, 4]}[rough]
    graph = Graph([*modules, *JOINED[end]], [*sources, read])
    x = torch.rand(300, 6, generator=torch.Generator().manual_seed(0)) + 0.5
    if end == "difference":
        x[:, 3:] *= 7  # numbers within a factor of two have an exact one
    double = copy.deepcopy(graph).double()
    lost = (graph(x).double() - double(x.double())).norm(dim=1)
    bound = local_error(double, (6,), FLOAT32)(x.double()).error.at
    assert bool((lost <= bound).all())
    if end in ("beside", "maximum") and rough == "neither":
        assert float(lost.max()) == 0
    else:
        assert float(bound.max()) <= 60 * float(lost.max())


def broken(seed: int, name: str, points: int = 600) -> tuple[int, int, int]:
    """Attacks on a classifier of a random graph: how many were made, succeeded inside sound radii, inside ignored ones.

    Samples lie within roundings of their boundary, and farther away; points go along the gradient of the margin, and
    anywhere. They are evaluated in the evaluator's arithmetic.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if name == "float64" else torch.float32
    last = nn.Linear(_outputs(seed), 3)
    last.weight.data = torch.randn(last.weight.shape, generator=generator)
    plain = export(nn.Sequential(random_graph(seed), last), (6,)).to(dtype)
    made, inside_sound, inside_ignored = 0, 0, 0
    for power in (-1, -1, 0, 0, 0.5, 1, 3, 6):
        x = torch.randn(1, 6, generator=generator).to(dtype)
        network = copy.deepcopy(plain)
        with torch.no_grad():
            logits = plain(x)[0]
            first, second, *_ = logits.argsort(descending=True).tolist()
            # Nearly a tie: a few units in the last place of what the logits are made of.
            gap = 4.0**power * float(logits.abs().max()) * torch.finfo(dtype).eps
            network[-1].bias[second] += logits[first] - logits[second] - gap
            y = network.double()(x.double()).argmax(1) if dtype is torch.float64 else network(x).argmax(1)
            network = network.to(dtype)
        found = certify(network, x, y, evaluator=name)
        run, exact = machine(network, name), copy.deepcopy(network).double()
        across = torch.autograd.functional.jacobian(lambda v, net=exact: net(v[None])[0], x[0].double())
        others = [i for i in range(3) if i != int(y)]
        ways = torch.cat((across[others] - across[y], torch.randn(62, 6, generator=generator).double()))
        ways = ways / ways.norm(dim=1, keepdim=True).clamp_min(1e-300)
        for radius, sound in ((found.radius, True), (found.radius_ignored, False)):
            far = torch.rand(points // 10, 1, generator=generator).double().pow(0.1)
            which = torch.randint(0, len(ways), (points // 10,), generator=generator)
            which[::2] %= 2
            moved = (x.double() + ways[which] * far * radius.clamp_max(10.0)).to(dtype)
            inside = (moved.double() - x.double()).norm(dim=1) < radius
            with torch.no_grad():
                lost = int((inside & (run(moved).argmax(1) != y)).sum())
            made += int(inside.sum())
            inside_sound, inside_ignored = inside_sound + lost * sound, inside_ignored + lost * (not sound)
    return made, inside_sound, inside_ignored


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["float64", "float32", "float32_blocked"])
def test_no_attack_succeeds_inside_a_sound_radius(name: str) -> None:
    made, sound, ignored = (sum(column) for column in zip(*(broken(seed, name) for seed in range(12)), strict=True))
    assert made > 3000
    assert sound == 0
    # The attacks are strong enough to break what rounding may not be left out of: about half of the graphs. Which ones
    # depends on the processor and on where in memory numbers lie: of three, none may be.
    assert ignored > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float64", "float32", "float32_blocked"])
def test_no_attack_succeeds_inside_a_sound_radius_of_a_hundred_graphs(name: str) -> None:
    made, sound, ignored = (
        sum(column) for column in zip(*(broken(seed, name) for seed in range(200, 300)), strict=True)
    )
    print(f"{name}: {made} attacks inside, {sound} succeeded inside sound radii, {ignored} inside ignored ones")
    assert made > 30_000
    assert sound == 0 < ignored


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_saved_and_loaded(seed: int, tmp_path: Path) -> None:
    plain = export(nn.Sequential(random_graph(seed), nn.Linear(_outputs(seed), 3)), (6,))
    twin = load(save(plain, tmp_path / "net"))
    x = torch.randn(5, 6)
    assert torch.equal(twin(x), plain(x))
    assert float(lipschitz(twin)) == float(lipschitz(plain))
    first = certify(plain, x, plain(x).argmax(1)).radius
    assert torch.equal(certify(twin, x, plain(x).argmax(1)).radius, first)
    assert bool((first > 0).any())


def _outputs(seed: int) -> int:
    return value_shapes(random_graph(seed), (6,))[-1][0]


def test_a_forged_file_is_refused(tmp_path: Path) -> None:
    block = Graph([nn.Linear(2, 2), Add(1, 1)], [[0], [0, 1]])
    folder = save(export(block, (2,)), tmp_path / "net")
    config = json.loads((folder / "config.json").read_text())
    for sources in ([[0], [0, 2]], [[0], [0]], [[0], [0, -1]], [[0]], "01", [[0], 1], [[1], [0, 1]], [[0], [0, 0]]):
        config["network"]["modules"][0]["sources"] = sources
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(DataError):
            load(folder)


def test_refusals() -> None:
    with pytest.raises(OptionError, match="values 0 to 0"):
        Graph([nn.ReLU()], [[1]])
    with pytest.raises(OptionError, match="one source for the ReLU"):
        Graph([nn.ReLU(), nn.ReLU()], [[0], [0, 1]])
    with pytest.raises(OptionError, match=r"values \[1\] that are not"):
        Graph([nn.ReLU(), nn.Tanh()], [[0], [0]])
    with pytest.raises(OptionError, match="got 0 and 0"):
        Graph([], [])
    with pytest.raises(OptionError, match="one sign"):
        Add(2, 1)
    with pytest.raises(OptionError, match="after the batch"):
        Concatenate(0)
    with pytest.raises(ShapeError, match="values of one shape"):
        Graph([nn.Linear(2, 1), Add(1, 1)], [[0], [0, 1]])(torch.ones(3, 2))
    with pytest.raises(ShapeError, match="module 1"):
        lipschitz(Graph([nn.Linear(2, 1), Add(1, 1)], [[0], [0, 1]]), (2,))
    with pytest.raises(NoRuleError, match="in-place"):
        lipschitz(Graph([nn.ReLU(inplace=True), Add(1, 1)], [[0], [0, 1]]), (2,))

    class Sum(Add):
        def forward(self, *values: Tensor) -> Tensor:
            return 5 * super().forward(*values)

    for function in (lambda m: lipschitz(m, (2,)), lambda m: export(m, (2,))):
        with pytest.raises(NoRuleError, match=r"joins Add, .* exactly"):
            function(Graph([nn.ReLU(), Sum(1, 1)], [[0], [0, 1]]))


VIEWS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (Reshape(3, 4), (2, 6)),
    (Permute(3, 1, 2), (2, 3, 4)),
    (Piece(2, 1, 5, 2), (2, 6)),
    (Roll(2, -2), (2, 6)),
    (Pad(1, 2, 0, 1), (2, 6)),
    (Pad(-1, 0), (2, 6)),
    (Expand(2, 3, 4), (2, 1, 4)),
    (Mean(1, 3), (2, 3, 4)),
    (Mean(2, keepdim=True), (2, 3, 4)),
    (Affine(torch.randn(1, 3), torch.randn(2, 1)), (2, 3)),
    (Affine(torch.randn(2), torch.randn(2)), (2, 3)),
    (nn.Upsample(scale_factor=2), (1, 2, 3)),
    (nn.Upsample(size=(4, 12)), (1, 2, 3)),
    (nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 5)),
    (nn.Upsample(size=(8, 12), mode="bilinear", align_corners=False), (1, 2, 3)),
    (EnlargeBilinear(1, 8), (1, 1, 4)),
    (LayerCenter(2, 3), (2, 3, 5)),
    (LayerCenter(1, 3), (2, 3, 5)),
    (LayerCenter(1), (4,)),
    (nn.ChannelShuffle(2), (6, 2, 3)),
]


def test_a_shape_that_cannot_be_expanded_gets_no_constant() -> None:
    with pytest.raises(ShapeError, match="expected samples that can be repeated"):
        lipschitz(Expand(2, 3), (7,))


@pytest.mark.parametrize(("module", "shape"), VIEWS, ids=lambda v: str(v)[:30])
def test_views_have_the_norm_of_their_matrix(module: nn.Module, shape: tuple[int, ...], tmp_path: Path) -> None:
    module = module.double()
    x = torch.randn(shape, dtype=torch.float64)
    matrix = jacobian(module, x).reshape(-1, x.numel())
    norm = float(torch.linalg.matrix_norm(matrix, 2))
    assert norm * (1 - 1e-12) <= float(lipschitz(module, shape)) <= norm * (1 + 1e-9)
    plain = export(module, shape)
    assert float(lipschitz(plain)) == pytest.approx(norm, rel=1e-9)
    assert torch.allclose(plain(x[None]), module(x[None]), atol=1e-14)
    assert torch.equal(load(save(plain, tmp_path / "net"))(x[None]), plain(x[None]))
    batch = torch.randn(50, *shape)
    single = export(module.float(), shape)
    module = module.double()
    with torch.no_grad():
        lost = (single(batch).double() - module(batch.double())).flatten(1).norm(dim=1)
    measured = local_error(Network(single.double(), shape), shape, FLOAT32)(batch.double()).error.at
    assert bool((lost <= measured).all())


def test_views_refuse() -> None:
    for make, word in (
        (lambda: Reshape(0), "positive sizes"),
        (lambda: Permute(0, 1), "1, 2, ..."),
        (lambda: Piece(0, 0, 1), "dimension from 1 on"),
        (lambda: Piece(1, 2, 2), "entries"),
        (lambda: Roll(0, 1), "after the batch"),
        (lambda: Pad(1), "before and after"),
        (lambda: Mean(), "after the batch"),
        (lambda: Mean(1, 1), "different dimensions"),
    ):
        with pytest.raises(OptionError, match=word):
            make()
    for module, x in (
        (Reshape(2), torch.ones(1, 3)),
        (Piece(1, 0, 4), torch.ones(1, 3)),
        (Pad(1, 1), torch.ones(3)),
        (Affine(torch.ones(2), torch.ones(1)), torch.ones(1, 3)),
        (Affine(torch.ones(2, 1), torch.ones(1, 2)), torch.ones(1, 2)),
    ):
        with pytest.raises(ShapeError):
            module(x)
