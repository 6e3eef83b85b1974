"""Attention of constant 1: against numpy, against dense Jacobians, and what is proved from stored numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lipkit
from lipkit.errors import OptionError, ShapeError
from lipkit.layers import MemoryAttention, TokenAttention
from lipkit.modules import Attraction, GradientStep, MaxMin
from lipkit.modules.attention import distances
from lipkit.testing import LAWS, Refusal, check_layer

DOUBLE = torch.float64


def moved(layer: Any, size: float) -> Any:
    """In float64, its matrix of this spectral norm."""
    layer = layer.double()
    with torch.no_grad():
        layer.free.normal_()
        layer.free *= size / torch.linalg.matrix_norm(layer.free, 2)
    return layer


def jacobians(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Dense ones at each of the points x (N, n, d)."""
    found: Tensor = torch.func.vmap(torch.func.jacrev(lambda one: f(one[None])[0]))(x)
    return found.detach().reshape(len(x), x[0].numel(), x[0].numel())


def reference_memory(x: np.ndarray, a: np.ndarray, c: np.ndarray) -> np.ndarray:
    z = np.exp(x @ a.T + c)
    p = z / z.sum(-1, keepdims=True)
    return x - 4 / np.linalg.norm(a, 2) ** 2 * p @ a


def reference_tokens(x: np.ndarray, a: np.ndarray, heads: int) -> np.ndarray:
    """Token by token, head by head."""
    y, n = x.copy(), len(x)
    for rows in np.split(a, heads):
        for i in range(n):
            for j in range(n):
                d = rows @ (x[j] - x[i])
                y[i] += 2 / np.linalg.norm(a, 2) ** 2 / n * rows.T @ d / np.sqrt(1 + d @ d)
    return y


@pytest.mark.parametrize("image", [False, True])
def test_both_are_what_their_equations_say(image: bool) -> None:
    torch.manual_seed(0)
    memory, tokens = moved(MemoryAttention(4, 7), 3.0), moved(TokenAttention(4, 6, heads=2), 3.0)
    x = torch.randn(2, 6, 4, dtype=DOUBLE)
    a, c, b = (t.detach().numpy() for t in (memory.free, memory.bias, tokens.free))
    expected = reference_memory(x.numpy(), a, c), np.stack([reference_tokens(one, b, 2) for one in x.numpy()])
    given = x.mT.reshape(2, 4, 3, 2) if image else x
    for layer, value in zip((memory, tokens), expected, strict=True):
        y = layer(given).detach()
        y = y.flatten(2).mT if image else y
        # The norm is taken up to 3 % too large, so the step is up to 6 % shorter.
        step = (y - x) / torch.from_numpy(value - x.numpy())
        assert 0.94 < float(step.min()) <= float(step.max()) <= 1 + 1e-12
        assert float(step.std()) < 1e-10


# n tokens of d features, at the points: 500 for each kind of layer.
SIZES = [(1, 4, 62), (2, 3, 220), (6, 4, 200), (32, 1, 12), (64, 1, 4), (128, 1, 2)]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["tokens", "memory", "large memory"])
@pytest.mark.parametrize("exported", [False, True])
def test_dense_jacobians_at_500_points(kind: str, exported: bool) -> None:
    torch.manual_seed(1)
    largest, least = 0.0, 1.0
    for n, d, count in SIZES:
        slots = 5 * d if kind == "large memory" else d
        layer = moved(TokenAttention(d, 2 * d, heads=2) if kind == "tokens" else MemoryAttention(d, slots), 3.0)
        for size in (0.05, 1.0):
            x = size * torch.randn(count // 2, n, d, dtype=DOUBLE)
            net = lipkit.export(layer, (n, d)) if exported else layer
            values = torch.linalg.svdvals(jacobians(net, x))[:, 0]
            largest, least = max(largest, float(values.max())), min(least, float(values.min()))
    assert largest <= 1 + 1e-12
    assert least >= 1 - 1e-6 or kind == "large memory"


@pytest.mark.thorough
@pytest.mark.parametrize("make", [lambda: MemoryAttention(3, 5), lambda: TokenAttention(4, heads=2)])
def test_derivatives(make: Callable[[], Any]) -> None:
    torch.manual_seed(2)
    layer = moved(make(), 1.5)
    names, values = zip(*layer.named_parameters(), strict=True)

    def f(x: Tensor, *given: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(layer, dict(zip(names, given, strict=True)), (x,))
        return found

    x = torch.randn(2, 3, layer.features, dtype=DOUBLE, requires_grad=True)
    x = torch.cat((x, x[:, :1]), 1)  # two tokens alike
    assert torch.autograd.gradcheck(f, (x, *values))
    assert torch.autograd.gradgradcheck(f, (x, *values), fast_mode=True)


def test_a_backward_pass_under_autocast_multiplies_distances_in_full() -> None:
    torch.manual_seed(3)
    u, found = torch.randn(2, 6, 4, requires_grad=True), []
    for half in (False, True):
        squares = distances(u)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            found.append(torch.autograd.grad(squares, u, squares.detach())[0])
    assert torch.equal(*found)


def bad(what: str, call: Any, error: Any, *words: str) -> Refusal:
    return Refusal(what, call, error, words)


LAYERS: dict[str, tuple[Callable[..., nn.Module], Any, dict[str, Any]]] = {
    "memory": (partial(MemoryAttention, 5), [(3, 5), (4, 5)], {"options": {"slots": (4, 9), "bias": (True, False)}}),
    "memory of images": (partial(MemoryAttention, 4, 9), [(4, 2, 3), (4, 3, 3)], {}),
    "memory of vectors": (partial(MemoryAttention, 6, 3), (6,), {}),
    "tokens": (
        partial(TokenAttention, 4),
        [(6, 4), (1, 4), (9, 4)],
        {"options": {"heads": (1, 2), "hidden": (4, 6)}},
    ),
    "tokens of images": (partial(TokenAttention, 4, heads=2), [(4, 2, 3), (4, 3, 3)], {}),
}
REFUSALS = (
    bad("no features", lambda make: MemoryAttention(0, 3), OptionError, "features", "0"),
    bad("no slots", lambda make: MemoryAttention(3, 0), OptionError, "slots", "0"),
    bad("heads", lambda make: TokenAttention(4, heads=3), OptionError, "hidden=4", "3"),
    bad("dtype", lambda make: TokenAttention(4, dtype=torch.float16), OptionError, "float16"),
    bad("features of an input", lambda make: TokenAttention(4)(torch.ones(1, 2, 3)), ShapeError, "(1, 2, 3)"),
    bad("tokens of vectors", lambda make: TokenAttention(4)(torch.ones(2, 4)), ShapeError, "(2, 4)"),
    bad("export", lambda make: lipkit.export(MemoryAttention(4, 2), (3,)), ShapeError, "(1, 3)"),
)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
@pytest.mark.parametrize("name", LAYERS)
def test_the_laws(name: str, dtype: torch.dtype) -> None:
    make, shapes, promises = LAYERS[name]
    make = partial(make, slots=4) if name == "memory" else make
    # The compiler takes seconds.
    laws = None if (name, dtype) == ("tokens", DOUBLE) else set(LAWS) - {12} if dtype == DOUBLE else {1, 2, 3, 10, 11}
    found = check_layer(
        make,
        input_shape=shapes,
        claim="contraction",
        dtype=dtype,
        refusals=REFUSALS,
        laws=laws,
        attained=0.9,
        **promises,
    )
    assert found[1]["norm"] <= 1 + (1e-12 if dtype == DOUBLE else 1e-6)


# Numbers that nobody constrained: what is proved is what a Jacobian has.


def gradient_step(a: list[list[float]], force: nn.Module, step: float) -> GradientStep:
    weight = torch.tensor(a, dtype=DOUBLE)
    first = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=DOUBLE)
    first.weight = nn.Parameter(weight)
    return GradientStep(first, force, torch.tensor(step, dtype=DOUBLE))


@pytest.mark.parametrize("step", [-1.0, 0.0, 0.5, 1.9, 2.0, 2.5, 7.0])
@pytest.mark.parametrize(
    ("a", "force", "shape"),
    [
        ([[1.0], [-1.0]], nn.Softmax(-1), (1,)),
        ([[1.0]], Attraction(), (2, 1)),
        ([[0.6, 0.8]], nn.ReLU(), (2,)),
    ],
)
def test_the_constant_of_any_step_is_attained(a: Any, force: nn.Module, shape: tuple[int, ...], step: float) -> None:
    module = gradient_step(a, force, step)
    x = torch.full((1, *shape), 1e-9, dtype=DOUBLE).view(1, -1, shape[-1])
    jacobian = jacobians(lambda v: module(v[0][None] if len(shape) > 1 else v[0]).view(v.shape), x)
    norm, bound = float(torch.linalg.matrix_norm(jacobian[0], 2)), float(lipkit.lipschitz(module, shape).detach())
    assert norm * (1 - 1e-15) <= bound <= max(norm, 1.0) * (1 + 1e-11)
    if 0 <= step <= 1.9:
        assert bound == 1.0


def test_what_is_no_gradient_is_a_residual() -> None:
    module = gradient_step([[1.0, 0.0], [0.0, 1.0]], MaxMin(), 1.0)
    assert float(lipkit.lipschitz(module, (2,)).detach()) == pytest.approx(2.0)
    for broken in (float("nan"), float("inf")):
        module.step.fill_(broken)
        assert float(lipkit.lipschitz(module, (2,)).detach()) == float("inf")
    with pytest.raises(OptionError, match=r"expected an nn[.]Linear first, got ReLU"):
        GradientStep(nn.ReLU(), nn.ReLU(), torch.tensor(1.0))  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"0-d step, got shape \(1,\)"):
        GradientStep(nn.Linear(1, 1), nn.ReLU(), torch.ones(1))
    with pytest.raises(ShapeError, match="multiple of 2"):
        Attraction(2)(torch.ones(1, 2, 3))


@pytest.mark.thorough
def test_a_certificate_holds_and_loses_little_to_rounding() -> None:
    torch.manual_seed(3)
    net = nn.Sequential(
        TokenAttention(8, heads=2), MemoryAttention(8, 12), nn.Flatten(), lipkit.layers.CayleyLinear(80, 4)
    )
    plain, x = lipkit.export(net, (10, 8)), torch.rand(30, 10, 8)
    y = plain(x).argmax(1)
    assert float(lipkit.lipschitz(plain)) <= 1 + 1e-6
    exact = lipkit.certify(plain, x, y, rounding="ignore").radius
    for evaluator, lost in (("float64", 1e-9), ("float32", 1e-3)):
        radius = lipkit.certify(plain, x, y, evaluator=evaluator).radius
        assert bool((radius <= exact).all())
        assert bool((radius >= exact - lost).all())


def test_the_step_is_rounded_down() -> None:
    for _ in range(20):
        for layer in (MemoryAttention(3, 1), TokenAttention(3, 1)):  # of one row, whose norm is not enlarged
            torch.nn.init.normal_(layer.free)
            weight, step = layer.matrix_and_step()
            product = step.item() * float(weight.detach().double().square().sum()) * layer.slope
            assert 2 * (1 - 1e-6) <= product <= 2
