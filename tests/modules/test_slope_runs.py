"""The matrix of a linear graph against exact rational arithmetic, and the gains that follow from it."""

from __future__ import annotations

import copy
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lipkit import export, lipschitz, modules
from lipkit.certificates import gains, lipsdp
from lipkit.modules import Add, Affine, Blend, Concatenate, Expand, Graph, Mean, Network, Pad, Permute, Piece, Roll
from lipkit.modules.slope_runs import is_linear, slope_runs
from lipkit.modules.views import Reshape

exact = np.vectorize(Fraction, otypes=[object])


def rational(node: Any, values: list[Any], sign: Any = lambda number: number) -> Any:
    """The exact output of a node for one sample, without its shift; with ``sign=abs``, of the moduli of its numbers."""
    x = values[0]
    match node:
        case nn.Linear():
            return x @ sign(exact(node.weight.detach().double().numpy())).T
        case Affine():
            return x * sign(exact(node.scale.double().numpy())).reshape(-1, *[1] * (x.ndim - 1))
        case Add():
            return sum(sign(one) * value for one, value in zip(node.signs, values, strict=True))
        case Blend():
            share = Fraction(float(node.share))
            return share * values[0] + (1 - share) * values[1]
        case Concatenate():
            return np.concatenate(values, node.dim - 1)
        case Mean():
            axes = tuple(d - 1 for d in node.dims)
            return x.sum(axes, keepdims=node.keepdim) / Fraction(int(np.prod([x.shape[a] for a in axes])))
        case Pad():
            return np.pad(x, [(0, 0)] * (x.ndim - 1) + [node.padding], constant_values=Fraction(0))
        case Piece():
            return x[(slice(None),) * (node.dim - 1) + (slice(node.start, node.stop, node.step),)]
        case Permute():
            return x.transpose([d - 1 for d in node.dims])
        case Roll():
            return np.roll(x, node.shift, node.dim - 1)
        case Expand():
            return np.broadcast_to(x, node.shape)
        case Reshape():
            return x.reshape(node.shape)
    raise TypeError(type(node))


def drawn(seed: int, exponent: int = 0) -> tuple[Graph, tuple[int, ...]]:
    """A random linear graph, its input shape, and weights of the order of 2^exponent."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape: tuple[int, ...] = draw.choice([(4,), (3, 2), (2, 3)])
    nodes, sources, shapes = list[nn.Module](), list[list[int]](), [shape]

    def put(node: nn.Module, *read: int) -> int:
        nodes.append(node)
        sources.append([*read])
        one = node(*(torch.zeros(1, *shapes[k]) for k in read))
        shapes.append(tuple(one.shape[1:]))
        return len(nodes)

    def weights(*size: int) -> Tensor:
        return torch.randn(size) * 2.0**exponent

    def layer(k: int) -> int:
        s = shapes[k]
        linear = nn.Linear(s[-1], 3)
        linear.weight.data = weights(3, s[-1])
        moves: list[nn.Module] = [
            linear, Affine(weights(s[0]), torch.ones(s[0])), Piece(1, 0, s[0], draw.randint(1, 2)), Roll(1, 1),
            Pad(1, 2), Permute(*range(len(s), 0, -1)), Reshape(int(np.prod(s))), Mean(1, keepdim=True),
        ]  # fmt: skip
        if s[0] == 1:
            moves.append(Expand(2, *s[1:]))
        return put(draw.choice(moves), k)

    value = 0
    for _ in range(draw.randint(1, 3)):
        first = layer(value)
        second = value if draw.random() < 0.5 else layer(value)
        if shapes[first] == shapes[second]:
            value = put(draw.choice((Add(1, -1), Blend(torch.tensor(0.1)), Concatenate(1))), first, second)
        else:
            value = put(Concatenate(1), *(put(Reshape(int(np.prod(shapes[k]))), k) for k in (first, second)))
    return Graph(nodes, sources), shape


@pytest.mark.parametrize("exponent", [0, -500, 300])
@pytest.mark.parametrize("seed", range(25))
def test_the_matrix_is_exact_up_to_its_error(seed: int, exponent: int) -> None:
    graph, shape = drawn(seed)
    if exponent:  # weights beyond the range of float32
        graph = graph.double()
        for p in (*graph.parameters(), *(m.scale for m in graph.nodes if isinstance(m, Affine))):
            p.data.mul_(2.0**exponent)
    (run,) = slope_runs(Network([graph], shape), candidates=True)
    matrix, error = run.weights[0].numpy(), run.errors[0].numpy()
    if not np.isfinite(matrix).all():
        assert exponent == 300
        return

    def columns(sign: Any) -> Any:
        found = []
        for unit in np.eye(int(np.prod(shape))):
            values = [exact(unit.reshape(shape))]
            for node, read in zip(graph.nodes, graph.sources, strict=True):
                values.append(rational(node, [values[k] for k in read], sign))
            found.append(values[-1].ravel())
        return np.stack(found, 1)

    assert all(abs(exact(matrix) - columns(lambda number: number)).ravel() <= exact(error).ravel())
    assert error.max() <= 1e-13 * columns(abs).max() + 1e-310


def test_products_with_a_graph_keep_its_error() -> None:
    torch.manual_seed(0)
    a, b, first, last = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(4, 3), nn.Linear(2, 2)
    layers = [first, Graph([a, b, Blend(torch.tensor(0.1))], [[0], [0], [1, 2]]), last]
    (run,) = slope_runs(Network(layers, (4,)), candidates=True)
    w = [exact(m.weight.detach().double().numpy()) for m in (first, a, b, last)]
    share = Fraction(float(torch.tensor(0.1)))
    truth = w[3] @ (share * w[1] + (1 - share) * w[2]) @ w[0]
    errors = abs(exact(run.weights[0].numpy()) - truth)
    assert (errors <= exact(run.errors[0].numpy())).all()
    assert float(run.errors[0].max()) < 1e-14


IMAGES: list[list[nn.Module]] = [
    [nn.Conv2d(2, 3, 3, 2, 1)], [nn.Conv2d(2, 2, (2, 3), padding="same", padding_mode="reflect", groups=2)],
    [nn.Conv2d(2, 2, 2, dilation=2, bias=False)], [nn.ConvTranspose2d(2, 3, 3, 2, 1, 1)], [nn.AdaptiveAvgPool2d(3)],
    [nn.AvgPool2d(3, 2, 1)], [nn.AvgPool2d(2, divisor_override=-7)], [modules.EnlargeBilinear(2, 1)],
    [modules.LayerCenter(1, 3)], [Pad(0, 0, 0, 0, 0, 6), modules.Shift2d(8, 2)],
]  # fmt: skip


@pytest.mark.parametrize("parts", IMAGES, ids=lambda parts: type(parts[-1]).__name__)
def test_matrices_of_modules_of_images_are_exact_up_to_their_errors(parts: list[nn.Module]) -> None:
    torch.manual_seed(0)
    first, parts = nn.Linear(3, 32), [copy.deepcopy(part).double() for part in parts]
    (run,) = slope_runs(Network([first, Reshape(2, 4, 4), *parts, nn.Flatten()], (3,)), candidates=True)
    own = torch.eye(32, dtype=torch.float64).view(-1, 2, 4, 4)
    with torch.no_grad():
        for part in parts:
            if getattr(part, "bias", None) is not None:
                part.bias.zero_()  # type: ignore[operator, union-attr]
            own = part(own)
    # A weight at a time: torch's matrix is exact, but for quotients.
    quotient = not any(hasattr(part, "weight") for part in parts)
    of = np.vectorize(lambda v: Fraction(v).limit_denominator(10**4) if quotient else Fraction(v), otypes=[object])
    truth = of(own.flatten(1).T.numpy()) @ exact(first.weight.detach().double().numpy())
    assert (abs(exact(run.weights[0].numpy()) - truth) <= exact(run.errors[0].numpy())).all()
    assert float(run.errors[0].max()) <= 1e-13


def heads() -> dict[str, tuple[list[nn.Module], float]]:
    torch.manual_seed(2)
    v, a, k, h = nn.Linear(8, 1), nn.Linear(8, 3), nn.Linear(2, 3), nn.Linear(3, 2)
    centred = [v, a, Mean(1, keepdim=True), Expand(3), Expand(3), Add(1, 1, -1)]
    return {
        "concatenated": ([Graph([v, a, Concatenate(1)], [[0], [0], [1, 2]])], 1.05),
        "a value and advantages": ([Graph(centred, [[0], [0], [2], [1], [3], [4, 2, 5]])], 1.05),
        "two layers": ([Graph([v, a, Concatenate(1)], [[0], [0], [1, 2]]), nn.Tanh(), nn.Linear(4, 2)], 1.3),
        "an observer": (
            [
                Graph(
                    [Piece(1, 0, 3), Piece(1, 3, 5), h, Add(1, -1), k, Add(1, 1)], [[0], [0], [1], [2, 3], [4], [1, 5]]
                )
            ],
            1 + 1e-9,
        ),
    }


@pytest.mark.parametrize("name", heads())
def test_heads_count_as_one_layer(name: str, tmp_path: Any) -> None:
    parts, near = heads()[name]
    inputs = 5 if name == "an observer" else 4
    front = [] if name == "an observer" else [nn.Linear(4, 8), nn.ReLU()]
    network = export(nn.Sequential(*front, *parts).double().eval(), (inputs,))
    tight = gains.tight(network)
    x = torch.randn(3000, inputs, dtype=torch.float64)
    torch.testing.assert_close(tight(x), network(x), rtol=0, atol=0)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda v: network(v[None])[0]))(x)
    slope, gain = float(torch.linalg.matrix_norm(jacobians, 2).max()), float(lipschitz(tight))
    assert slope * (1 - 1e-12) <= gain <= near * 1.35 * slope
    assert gain < 0.98 * float(lipschitz(network))
    modules.save(tight, tmp_path / "network")
    assert float(lipschitz(modules.load(tmp_path / "network"))) == gain
    proof = lipsdp.solve(network)
    assert lipsdp.verify(network, proof.gain * (1 + 1e-9), proof.multipliers)
    assert not lipsdp.verify(network, slope * (1 - 1e-6), proof.multipliers)


def test_other_graphs_and_numbers_that_are_not_finite() -> None:
    a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    assert not is_linear(Graph([a, nn.ReLU(), b, Add(1, 1)], [[0], [1], [0], [2, 3]]), (3,))
    assert is_linear(a, (3,))
    assert not is_linear(nn.Conv1d(3, 3, 1), (3, 1))
    wide = Graph([nn.Linear(3000, 3000, bias=False), Add(1, 1)], [[0], [0, 1]])
    assert not is_linear(wide, (3000,))  # as large as nine million entries
    broken = nn.Linear(3, 2)
    broken.bias.data[0] = float("nan")  # only the norms show it
    network = Network([Graph([a, broken, Add(1, 1)], [[0], [0], [1, 2]])], (3,))
    assert float(lipschitz(gains.tight(network))) == float("inf")
