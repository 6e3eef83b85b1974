"""APGD against closed forms on linear models; its promises about ball and box; every attack by its name."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lipkit.attacks import ATTACKS, Named, apgd, carlini_wagner, fab, run_attack
from lipkit.attacks.ascent import ball, misclassified
from lipkit.attacks.pgd import checkpoints
from lipkit.errors import OptionError, ShapeError


def linear(scale: float = 1.0, classes: int = 4) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(5, classes)
    layer.weight.data *= scale
    layer.bias.data *= scale
    return layer


def points(count: int, *shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def boundary_distance(layer: nn.Linear, x: Tensor, y: Tensor, norm: str = "l2") -> Tensor:
    """The gap over the dual norm."""
    logits, rows = layer(x).double().detach(), layer.weight.double().detach()
    apart = rows[y][:, None] - rows[None]
    size = apart.norm(dim=2) if norm == "l2" else apart.abs().sum(dim=2)
    return ((logits.gather(1, y[:, None]) - logits) / size).nan_to_num(math.inf).amin(dim=1)


@pytest.mark.thorough
@pytest.mark.usual(6)
@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("attack", ["margin", "dlr"])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_linear_models_fall_exactly_beyond_the_distance_to_their_boundary(attack: str, norm: str, scale: float) -> None:
    layer = linear(scale)
    x = points(40, 5)
    y = layer(x).argmax(dim=1)
    distance = boundary_distance(layer, x, y, norm)

    def run(eps: Tensor) -> Tensor:
        found = apgd(layer, x, y, eps=eps, norm=norm, loss=attack, targeted=True, steps=30, box=None)
        assert (ball(norm).distance(found, x) <= eps).all()
        return misclassified(layer(found), y)

    assert not run(0.999 * distance).any()
    assert run(1.01 * distance + 1e-6).all()
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.thorough
def test_an_untargeted_start_may_come_before_the_targeted_ones() -> None:
    layer, x = linear(), points(40, 5)
    y = layer(x).argmax(dim=1)
    eps, steps, calls = 1.01 * boundary_distance(layer, x, y) + 1e-6, 2, []

    def run(**more: object) -> Tensor:
        calls.append(0)

        def model(inputs: Tensor) -> Tensor:
            calls[-1] += 1
            return layer(inputs)

        return apgd(model, x, y, eps=eps, steps=steps, box=None, stop_early=False, **more)  # type: ignore[arg-type]

    assert torch.equal(run(), run(targeted=None, restarts=1))
    first, every = (misclassified(layer(found), y) for found in (run(), run(targeted=None)))
    assert every[first].all()
    run(targeted=None, restarts=3)
    # The logits once, then each start; four classes have three rivals.
    assert calls == [1 + starts * (steps + 1) for starts in (1, 1, 1, 1 + 3, 3)]


@pytest.mark.thorough
def test_cross_entropy_alone_overstates_robustness_even_of_a_linear_model() -> None:
    layer = linear(1e4)
    x = points(40, 5)
    y = layer(x).argmax(dim=1)
    eps = 1.02 * boundary_distance(layer, x, y)
    lost = {loss: int(misclassified(layer(apgd(layer, x, y, eps=eps, loss=loss, box=None)), y).sum())
            for loss in ("ce", "margin")}  # fmt: skip
    assert lost["ce"] < lost["margin"] / 2


@pytest.mark.thorough
def test_apgd_finds_no_less_than_plain_steps_on_a_network() -> None:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    x = points(80, 12)
    y = network(x).argmax(dim=1)
    lost = {
        name: int(misclassified(network(run_attack(name, network, x, y, eps=0.25, steps=40).points), y).sum())
        for name in ("pgd", "apgd")
    }
    assert lost["apgd"] >= lost["pgd"] > 5


@pytest.mark.thorough
@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    st.floats(-8, 2),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([(0.0, 1.0), (-1.0, 2.0), None]),
    st.sampled_from(["l2", "linf"]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_never_outside_ball_or_box(
    exponent: float, dtype: torch.dtype, box: tuple[float, float] | None, norm: str, targeted: bool, seed: int
) -> None:
    eps = 10.0**exponent
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).to(dtype)
    x = points(4, 3, 2, 2, seed=seed, dtype=dtype).round(decimals=1)  # some samples on the faces of the box
    y = torch.zeros(4, dtype=torch.int64)
    common = {"norm": norm, "box": box, "generator": torch.Generator().manual_seed(seed), "steps": 4}
    found = apgd(model, x, y, eps=eps, targeted=targeted, loss="dlr", stop_early=False, **common)
    assert (ball(norm).distance(found, x) <= eps).all()
    assert found.dtype == dtype
    if box is not None:
        assert found.min() >= box[0]
        assert found.max() <= box[1]


def test_same_generator_same_points_and_global_randomness_untouched() -> None:
    layer, x = linear(), points(8, 5)
    y = layer(x).argmax(dim=1)
    before = torch.get_rng_state()
    runs = [apgd(layer, x, y, eps=0.01, steps=5, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*runs)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in ATTACKS if not ATTACKS[name].package])
def test_every_attack_runs_by_name_under_no_grad_on_one_sample(name: str) -> None:
    layer, x = linear(), points(1, 5)
    y = layer(x).argmax(dim=1)
    eps = float(1.05 * boundary_distance(layer, x, y))
    with torch.no_grad():
        found = run_attack(name, layer, x, y, eps=eps, box=None, steps=60)
    assert misclassified(layer(found.points), y).all()
    assert ball("l2").distance(found.points, x).item() <= eps
    assert found.ran
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_an_attack_of_the_table_is_run_by_its_name_with_the_options_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(model: object, x: Tensor, y: Tensor, *, eps: float, steps: int = 3, box: object = None) -> Tensor:
        return x - eps * steps / 100

    assert [name for name, attack in ATTACKS.items() if attack.minimum_norm] == ["fab", "cw"]
    monkeypatch.setitem(ATTACKS, "backwards", Named(backwards, "steps back"))
    layer, x, y = linear(), points(2, 5), torch.zeros(2, dtype=torch.int64)
    found = run_attack("backwards", layer, x, y, eps=0.5)
    assert torch.equal(found.points, x - 0.5 * 3 / 100)
    assert found.ran == "steps back"
    assert torch.equal(run_attack("backwards", layer, x, y, eps=0.5, steps=1, restarts=4).points, x - 0.5 / 100)
    assert torch.equal(run_attack("backwards", layer, x, y, eps=0.5, steps=50).points, x)  # outside the ball
    with pytest.raises(OptionError, match="expected norm 'l2' for the attack 'backwards', got 'linf'"):
        run_attack("backwards", layer, x, y, eps=0.5, norm="linf")


def test_empty_batches_stay_empty_and_are_refused_by_name() -> None:
    layer, x, y = linear(), torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)
    assert apgd(layer, x, y, eps=0.1).shape == (0, 5)
    for minimum in (fab, carlini_wagner):
        assert minimum(layer, x, y).shape == (0, 5)
    with pytest.raises(OptionError, match="at least one sample to attack, got 0"):
        run_attack("apgd", layer, x, y, eps=0.1)


def test_checkpoints_grow_denser_and_end_within_the_steps() -> None:
    for steps in (1, 2, 5, 17, 100, 1000):
        marks = sorted(checkpoints(steps))
        assert marks[-1] <= steps
        gaps = [b - a for a, b in zip([0, *marks], marks, strict=False)]
        assert gaps == sorted(gaps, reverse=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"steps": 0}, OptionError, "steps: expected an integer of at least 1, got 0"),
        ({"restarts": 0}, OptionError, "restarts: expected an integer of at least 1, got 0"),
        ({"loss": "mse"}, OptionError, "got 'mse'"),
        ({"norm": "l1"}, OptionError, "norm: expected one of l2, linf, got 'l1'"),
        ({"eps": -1.0}, OptionError, "finite and >= 0"),
        ({"eps": math.inf}, OptionError, "finite and >= 0"),
        ({"y": torch.zeros(2, dtype=torch.int64)}, ShapeError, "expected 3 labels"),
        ({"y": torch.tensor([0, 4, 1])}, OptionError, "labels from 0 to 3 for 4 logits, got labels from 0 to 4"),
        ({"y": torch.zeros(3)}, OptionError, "int64.*got float32"),
        ({"x": torch.full((3, 5), 1.5)}, OptionError, "got values from 1.5 to 1.5"),
        ({"x": torch.full((3, 5), math.nan), "box": None}, OptionError, "finite inputs"),
        ({"x": torch.zeros(3, 7)}, ShapeError, r"model accepts, got float32 \(3, 7\)"),
        ({"x": torch.zeros(3, 5, dtype=torch.float64)}, ShapeError, r"model accepts, got float64"),
        ({"x": torch.zeros(3, 5, dtype=torch.uint8)}, OptionError, "float32 or float64"),
        ({"model": lambda x: x[:, 0]}, ShapeError, r"got \(3,\)"),
        ({"model": linear(classes=3), "loss": "dlr", "targeted": True}, OptionError, "at least 4 classes"),
        ({"model": linear(classes=2), "loss": "dlr"}, OptionError, "at least 3 classes"),
    ],
)
def test_refusals(change: dict, error: type[Exception], message: str) -> None:
    arguments: dict = {"model": linear(), "x": points(3, 5), "y": torch.zeros(3, dtype=torch.int64), "eps": 0.1}
    attack: Callable = apgd
    with pytest.raises(error, match=message):
        attack(**(arguments | change))


def test_refusals_by_name() -> None:
    x, y = points(3, 5), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(OptionError, match=r"attack: expected one of pgd, .*got 'fgsm'"):
        run_attack("fgsm", linear(), x, y, eps=0.1)
    with pytest.raises(OptionError, match="expected norm 'l2' for the attack 'cw'"):
        run_attack("cw", linear(), x, y, eps=0.1, norm="linf")
    with pytest.raises(OptionError, match="labels from 0 to 3"):
        run_attack("pgd", linear(), x, y + 9, eps=0.1)
    with pytest.raises(OptionError, match="rate: expected a positive finite number"):
        carlini_wagner(linear(), x, y, rate=0.0)
