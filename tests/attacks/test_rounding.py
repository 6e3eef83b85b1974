"""The rounding attack breaks radii that ignore rounding, and none that allow for it."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from tests.attacks.rounding import exact_distance, rounding_attack
from torch import Tensor, nn

from lipkit import modules
from lipkit.certificates import certify
from lipkit.errors import OptionError, ShapeError

OFFSET = {torch.float32: 2.0**12, torch.float64: 2.0**30}


def crafted(seed: int, dtype: torch.dtype) -> modules.Network:
    """An orthogonal layer, a large offset that is taken away again, a last layer: its radii are tight."""
    generator = torch.Generator().manual_seed(seed)
    first, middle, last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
    first.weight.data = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q.to(dtype)
    first.bias.data = torch.full((4,), OFFSET[dtype], dtype=dtype)
    middle.weight.data, middle.bias.data = torch.eye(4, dtype=dtype), torch.full((4,), -OFFSET[dtype], dtype=dtype)
    last.weight.data = torch.randn(3, 4, generator=generator, dtype=torch.float64).to(dtype)
    last.bias.data = torch.zeros(3, dtype=dtype)
    return modules.Network([first, nn.ReLU(), middle, last], (4,))


def cases(dtype: torch.dtype, networks: int) -> tuple[int, int, int]:
    """How many samples were attacked, and on how many a radius that ignores rounding, or allows for it, was broken."""
    attacked = ignoring = sound = 0
    name = str(dtype).removeprefix("torch.")
    for seed in range(networks):
        network = crafted(seed, dtype)
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        y = network(x).argmax(dim=1)
        bad = certify(network, x, y, rounding="ignore").radius
        good = certify(network, x, y, rounding="sound", evaluator=name).radius
        for sample, label, claimed, kept in zip(x, y.tolist(), bad.tolist(), good.tolist(), strict=True):
            if not claimed:
                continue
            attacked += 1
            found = rounding_attack(network, sample, label, claimed, rounds=6, candidates=128)
            ignoring += found is not None
            if found is not None:
                assert exact_distance(found.point, sample)[0] < Fraction(claimed) ** 2
                assert int(network(found.point[None]).argmax()) == found.prediction != label
                assert found.point.dtype == dtype
            sound += kept > 0 and rounding_attack(network, sample, label, kept, rounds=2, candidates=64) is not None
    return attacked, ignoring, sound


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_ignores_rounding_is_broken_and_what_allows_for_it_is_not(dtype: torch.dtype) -> None:
    attacked, ignoring, sound = cases(dtype, 12)
    assert attacked > 15
    assert ignoring > attacked / 2
    assert sound == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hundreds_of_crafted_cases(dtype: torch.dtype) -> None:
    attacked, ignoring, sound = cases(dtype, 200)
    assert attacked > 300
    assert ignoring > attacked / 2
    assert sound == 0


def flat(x: Tensor) -> Tensor:
    """The boundary is at ``x_0 = 0``, and float32 numbers near 2^20 are 1/16 apart."""
    return torch.stack([2.0**20 - x[:, 0], 2.0**20 + x[:, 0]], dim=1)


@pytest.mark.parametrize("radius", [0.25, 0.25 * (1 - 1e-3), 0.24])
def test_a_radius_computed_by_hand(radius: float) -> None:
    x = torch.tensor([0.25, 0.0])
    found = rounding_attack(flat, x, 1, radius)
    assert found is not None
    assert found.distance < radius
    # half a gap from the tie, float32 sees no difference; a whole gap away it does
    assert rounding_attack(flat, x, 1, 0.25 - 1 / 8) is None


def test_what_float64_can_tell_apart_is_not_broken() -> None:
    x = torch.tensor([0.25, 0.0], dtype=torch.float64)
    assert rounding_attack(flat, x, 1, 0.25 * (1 - 1e-6)) is None


def test_the_exact_distance_is_rounded_up_and_never_by_more_than_one_number() -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-30, 1.0, 1e12):
        a, b = (scale * torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)).unbind()
        square, up = exact_distance(a, b)
        assert Fraction(up) ** 2 >= square
        assert Fraction(math.nextafter(up, 0.0)) ** 2 < square
        assert up == pytest.approx(torch.dist(a, b).item(), rel=1e-14)
    assert exact_distance(a, a) == (0, 0.0)


@pytest.mark.thorough
def test_same_generator_same_point_and_inside_the_box() -> None:
    network = crafted(3, torch.float32)
    x = torch.rand(4, generator=torch.Generator().manual_seed(1))
    y = int(network(x[None]).argmax())
    radius = float(certify(network, x[None], torch.tensor([y]), rounding="ignore").radius)
    before = torch.get_rng_state()
    first, again = (rounding_attack(network, x, y, radius) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert first is not None
    assert torch.equal(first.point, again.point)
    wide = rounding_attack(network, x, y, radius, box=(-9.0, 9.0))
    assert wide is None or (wide.point.abs() <= 9).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"radius": math.inf}, OptionError, "finite and >= 0, got inf"),
        ({"radius": -1.0}, OptionError, "finite and >= 0, got -1.0"),
        ({"label": 0}, OptionError, "classifies as 0, got 1"),
        ({"label": 2}, OptionError, "expected labels from 0 to 1"),
        ({"candidates": 0}, OptionError, "candidates >= 1"),
        ({"x": torch.tensor([1, 2])}, OptionError, "float32 or float64"),
        ({"box": (0.5, 1.0)}, OptionError, "inside the box"),
        ({"model": nn.Linear(3, 2)}, ShapeError, "inputs that the model accepts"),
    ],
)
def test_refusals(change: dict, error: type[Exception], message: str) -> None:
    arguments: dict = {"model": flat, "x": torch.tensor([0.25, 0.0]), "label": 1, "radius": 0.1}
    with pytest.raises(error, match=message):
        rounding_attack(**(arguments | change))


def test_radius_zero_holds_nothing() -> None:
    assert rounding_attack(flat, torch.tensor([0.25, 0.0]), 1, 0.0) is None
