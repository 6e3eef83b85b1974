"""``check_layer`` itself: its arguments, its references, and layers of other people."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lipkit.errors import OptionError
from lipkit.layers import CayleyLinear
from lipkit.modules import ROWS, export_rule, lipschitz_rule
from lipkit.testing import Case, LawBroken, Refusal, check_layer, dense_matrix, is_affine, jacobians, run_law, tolerance


class Rotation(nn.Module):
    """A layer of somebody else: one angle, no ``dtype`` argument, two rules of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.angle = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        c, s = self.angle.cos(), self.angle.sin()
        return torch.stack((c * x[:, 0] - s * x[:, 1], s * x[:, 0] + c * x[:, 1]), 1)


@pytest.fixture(autouse=True, scope="module")
def _rules() -> Iterator[None]:
    @lipschitz_rule(Rotation)
    def _one(module: Rotation, input_shape: tuple[int, ...] | None) -> float:
        return 1.0

    @export_rule(Rotation)
    def _matrix(module: Rotation, input_shape: tuple[int, ...]) -> nn.Module:
        plain = nn.Linear(2, 2, bias=False, dtype=module.angle.dtype)
        plain.weight.copy_(module(torch.eye(2, dtype=module.angle.dtype)).mT)
        return plain

    yield
    del ROWS[Rotation]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_layer_of_somebody_else_passes_every_law(dtype: torch.dtype) -> None:
    measured = check_layer(Rotation, input_shape=(2,), dtype=dtype)
    assert list(measured) == list(range(1, 14))
    assert measured[4]["parameters"] == 1


def test_what_it_measures() -> None:
    measured = check_layer(partial(CayleyLinear, 4, 6), input_shape=(4,), laws=[1, 2])
    assert measured[1]["claimed"] == 1.0
    assert abs(measured[1]["norm"] - 1) < 1e-14
    assert abs(measured[2]["smallest"] - 1) < 1e-14


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    check_layer(partial(CayleyLinear, 4, 6), input_shape=(4,), laws=[1, 5, 7, 9])
    assert torch.equal(before, torch.get_rng_state())


def test_a_layer_without_rules_breaks_a_law_with_the_reason() -> None:
    with pytest.raises(
        LawBroken, match=r"law 1 \(sound\).*NoRuleError: lipschitz has no rule for .*LogSoftmax"
    ) as caught:
        check_layer(partial(nn.LogSoftmax, 1), input_shape=(2,), laws=[1])
    assert isinstance(caught.value, AssertionError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"claim": "isometry"}, "claim: expected one of orthogonal, contraction, none, got 'isometry'"),
        ({"dtype": torch.float16}, "dtype: expected torch.float32 or torch.float64, got torch.float16"),
        ({"laws": [14]}, "laws: expected numbers from 1 to 13, got 14"),
        ({"input_shape": []}, "input_shape: expected at least one shape, got none"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_layer(Rotation, **{"input_shape": (2,), **arguments})


def test_options_that_are_all_refused_or_single_are_no_test() -> None:
    make = partial(CayleyLinear, in_features=3, out_features=3)
    with pytest.raises(LawBroken, match="at least two values"):
        check_layer(make, input_shape=(3,), laws=[8], options={"bias": (True,)})
    with pytest.raises(LawBroken, match="at least one value that is accepted"):
        check_layer(make, input_shape=(3,), laws=[8], options={"out_features": (0, -1)})


def test_a_refusal_that_does_not_happen_breaks_law_13() -> None:
    fine = Refusal("nothing", lambda make: make(), OptionError)
    with pytest.raises(LawBroken, match="nothing: expected OptionError, got no error"):
        check_layer(Rotation, input_shape=(2,), laws=[13], refusals=[fine])


def test_references_agree_with_closed_forms() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(4, 3, dtype=torch.float64)
    matrix = linear.weight.detach().numpy()
    assert np.allclose(dense_matrix(linear, (4,)), matrix, rtol=0, atol=1e-15)
    x = torch.randn(5, 4, dtype=torch.float64)
    slopes = [np.diag(1 - np.tanh(point) ** 2) @ matrix for point in linear(x).detach().numpy()]
    for found, expected in zip(jacobians(nn.Sequential(linear, nn.Tanh()), x), slopes, strict=True):
        assert np.allclose(found, expected, rtol=0, atol=1e-15)
    assert is_affine(linear, x)
    assert not is_affine(nn.Sequential(linear, nn.ReLU()), x)


def test_run_law_on_a_case() -> None:
    case = Case(Rotation, ((2,),))
    assert run_law(2, case)["largest"] == pytest.approx(1, abs=tolerance(8, torch.float64))
