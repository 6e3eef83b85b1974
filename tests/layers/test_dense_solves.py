"""Dense layers that solve for the batch, against those that make their matrices."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from lipkit import export
from lipkit.conv import cayley_linear
from lipkit.errors import ShapeError
from lipkit.layers import CayleyLinear, SandwichLinear
from lipkit.layers import cayley as cayley_layer
from lipkit.layers import sandwich as sandwich_layer
from lipkit.linalg import cayley
from lipkit.testing import LAWS, check_layer


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


# Of a batch of half the smaller side or less the gradient is made from products with the batch alone.
@pytest.mark.parametrize("shape", [(3, 3), (3, 7), (7, 3), (1, 1), (1, 4), (12, 15), (15, 12)], ids=str)
@pytest.mark.parametrize("batch", [(5,), (2, 4), (), (0,)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_is_that_with_the_matrix(shape: tuple[int, int], batch: tuple[int, ...], biased: bool) -> None:
    w, x = (random(*shape) / 2).requires_grad_(), random(*batch, shape[1], seed=1).requires_grad_()
    bias = random(shape[0], seed=2).requires_grad_() if biased else None
    expected = x @ cayley(w).mT + (0 if bias is None else bias)
    y = cayley_linear(w, x, bias)
    torch.testing.assert_close(y, expected)
    g, inputs = random(*y.shape, seed=3), [w, x, *([] if bias is None else [bias])]
    for one, two in zip(torch.autograd.grad(y, inputs, g), torch.autograd.grad(expected, inputs, g), strict=True):
        torch.testing.assert_close(one, two)


def test_gradients_of_both_orders() -> None:
    w, x, b = (t.requires_grad_() for t in (random(2, 3), random(2, 3, seed=1), random(2, seed=2)))
    assert torch.autograd.gradcheck(cayley_linear, (w, x, b))
    assert torch.autograd.gradgradcheck(cayley_linear, (w, x, b), fast_mode=True)


class Quiet(CayleyLinear):
    def weight(self) -> Tensor:
        return super().weight() / 2


@pytest.mark.parametrize("shape", [(40, 50), (50, 40)], ids=str)
def test_layers_solve_but_with_a_matrix_of_their_own_or_under_autocast(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer, x = CayleyLinear(*shape), torch.randn(4, shape[0])
    made = torch.nn.functional.linear(x, layer.weight(), layer.bias)
    torch.testing.assert_close(layer(x), made, atol=1e-5, rtol=0)
    assert not torch.equal(layer(x), made)
    quiet = Quiet(*shape, bias=False)
    assert torch.equal(quiet(x), torch.nn.functional.linear(x, quiet.weight()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
    assert layer(x).dtype is torch.float32


@pytest.mark.parametrize("asked", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
@pytest.mark.parametrize("shape", [(3, 3), (3, 7), (7, 3)], ids=str)
def test_only_the_gradients_that_are_asked_for(shape: tuple[int, int], asked: tuple[bool, ...]) -> None:
    given = random(*shape), random(4, shape[1], seed=1), random(shape[0], seed=2)
    inputs = [t.requires_grad_(ask) for t, ask in zip(given, asked, strict=True)]
    wanted = [t for t in inputs if t.requires_grad]
    w, x, b = inputs
    (one,) = torch.autograd.grad(cayley_linear(w, x, b).square().sum(), wanted)
    (two,) = torch.autograd.grad((x @ cayley(w).mT + b).square().sum(), wanted)
    torch.testing.assert_close(one, two)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((34, 40), torch.float64), ((34, 40), torch.float32), ((40, 34), torch.float64), ((33, 33), torch.float32)],
    ids=str,
)
def test_layers_that_solve_obey_the_laws(shape: tuple[int, int], dtype: torch.dtype) -> None:
    laws = [number for number in LAWS if number != 13]  # refusals do not depend on the size
    options = {"claim": "orthogonal", "backends": ("aot_eager",) if shape == (33, 33) else ()}
    check_layer(partial(CayleyLinear, *shape), input_shape=(shape[0],), dtype=dtype, laws=laws, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["cayley", "relu", "tanh"])
@pytest.mark.parametrize(("m", "n"), [(384, 400), (400, 384)])
def test_large_layers_are_their_exports(m: int, n: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = CayleyLinear(n, m) if kind == "cayley" else SandwichLinear(n, m, activation=kind)
    x = torch.randn(2, 3, n, requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(export(layer, (n,))(x.flatten(0, 1)).view_as(y), y, atol=2e-5, rtol=0)
    g = torch.randn_like(y)
    inputs = [x, *layer.parameters()]
    found = torch.autograd.grad(y, inputs, g)
    # The same layer by its matrices.
    for module in (cayley_layer, sandwich_layer):
        monkeypatch.setattr(module, "solves_pay", lambda x, side: False)
    monkeypatch.setattr(cayley_layer, "autocast_on", lambda x: True)
    made = layer(x)
    assert not torch.equal(made, y)  # it was the other way
    for one, two in zip(found, torch.autograd.grad(made, inputs, g), strict=True):
        torch.testing.assert_close(one, two, atol=1e-4 * float(two.abs().max()), rtol=0)


def test_wrong_inputs_are_named() -> None:
    with pytest.raises(ShapeError, match=r"got \(2, 3\) and \(5, 4\)"):
        cayley_linear(torch.ones(2, 3), torch.ones(5, 4))
    with pytest.raises(ShapeError, match=r"SandwichLinear: expected input of shape \(..., 400\), got \(2, 399\)"):
        SandwichLinear(400, 384)(torch.ones(2, 399))
    with pytest.raises(ShapeError, match=r"CayleyLinear: expected input of shape \(..., 400\), got \(2, 399\)"):
        CayleyLinear(400, 384)(torch.ones(2, 399))
