"""Optimisers on the manifold: they stay there, they arrive, and `fit` uses and resumes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lipkit.errors import OptionError, ShapeError
from lipkit.layers import CayleyLinear, MaxMin, StiefelConv2d, StiefelLinear
from lipkit.linalg import orthogonality_residual
from lipkit.linalg.stiefel import retract, spectral_step, tangent
from lipkit.lowering import lipschitz
from lipkit.training import RiemannianAdam, Run, SpectralDescent, Together, TrainOptions, fit, optim

OPTIMISERS = {"spectral": lambda p: SpectralDescent(p, 0.05), "riemannian": lambda p: RiemannianAdam(p, 0.05)}


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(4, 4), (3, 6), (6, 3)])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_procrustes_is_solved(name: str, shape: tuple[int, int]) -> None:
    # The semi-orthogonal W nearest to A, its polar factor, has the largest trace of W^T A.
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(shape, generator=generator, dtype=torch.float64)
    u, s, vh = np.linalg.svd(a.numpy(), full_matrices=False)
    w = nn.Parameter(retracted(torch.randn(shape, generator=generator, dtype=torch.float64)))
    if shape[0] == shape[1] and np.linalg.det(u @ vh) * np.linalg.det(w.detach().numpy()) < 0:
        with torch.no_grad():
            w[0].neg_()  # the orthogonal group has two parts, and a path stays in one
    optimizer = OPTIMISERS[name]([w])
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 200)
        optimizer.zero_grad()
        (-(w * a).sum()).backward()
        optimizer.step()
        assert float(orthogonality_residual(w.detach())) < 1e-6
    assert float((w.detach() * a).sum()) > (1 - 1e-3) * s.sum()
    assert np.abs(w.detach().numpy() - u @ vh).max() < 0.05


def retracted(w: torch.Tensor) -> torch.Tensor:
    u, _, vh = torch.linalg.svd(w, full_matrices=False)
    return u @ vh


def test_momentum_is_an_average_with_a_look_ahead() -> None:
    w = nn.Parameter(torch.eye(3, dtype=torch.float64))
    optimizer = SpectralDescent([w], 0.1, momentum=0.8)
    first, second = torch.rand(2, 3, 3, dtype=torch.float64)
    for g in (first, second):
        before = w.detach().clone()
        w.grad = g.clone()
        optimizer.step()
    average = 0.8 * (0.2 * first) + 0.2 * second
    torch.testing.assert_close(optimizer.state[w]["momentum_buffer"], average)
    ahead = spectral_step(before, 0.8 * average + 0.2 * second, 0.1, 4)
    torch.testing.assert_close(w.detach(), ahead)
    assert float((ahead - spectral_step(before, average, 0.1, 4)).abs().max()) > 1e-3


def test_riemannian_adam_equals_its_formula() -> None:
    w = nn.Parameter(torch.eye(4, 3, dtype=torch.float64))
    optimizer, mean, square = RiemannianAdam([w], 0.1, betas=(0.8, 0.7), eps=0.01), torch.zeros(4, 3), 0.0
    for step, gradient in enumerate(torch.rand(3, 4, 3, dtype=torch.float64), 1):
        before, g = w.detach().clone(), tangent(w.detach(), gradient)
        mean = 0.8 * tangent(before, mean.double()) + 0.2 * g
        square = 0.7 * square + 0.3 * float(g.norm()) ** 2 / 12
        size = (square / (1 - 0.7**step)) ** 0.5 + 0.01
        w.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(w.detach(), retract(before - 0.1 * mean / (1 - 0.8**step) / size))


@pytest.mark.parametrize(
    ("name", "manifold_lr", "rates"),
    [("spectral", None, [0.02, 0.1]), ("riemannian_adam", None, [0.1, 0.1]), ("riemannian_adam", 0.3, [0.3, 0.1])],
)
def test_each_trained_parameter_has_the_rate_of_its_kind(
    name: str, manifold_lr: float | None, rates: list[float]
) -> None:
    model = network()
    for frozen in (model[0].free, model[5].bias):
        frozen.requires_grad_(False)
    options = TrainOptions(epochs=1, optimizer=name, lr=0.1, manifold_lr=manifold_lr)
    built = optim.build(options, model, torch.device("cpu"))
    assert [group["lr"] for group in built.param_groups] == rates
    expected = [[model[3].free], [model[0].bias, model[3].bias, model[5].weight]]
    assert [[*map(id, g["params"])] for g in built.param_groups] == [[*map(id, ps)] for ps in expected]
    assert all(a is b for a, b in zip(built.param_groups, (p.param_groups[0] for p in built.parts), strict=True))


def test_large_matrices_wait_for_every_second_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "LARGE", 12)
    large, small = (nn.Parameter(torch.eye(3, n, dtype=torch.float64)) for n in (4, 3))
    g = torch.rand(2, 3, 4, dtype=torch.float64)
    optimizer, states = SpectralDescent([large, small], 0.01, momentum=0.5), []
    for each in g:
        large.grad, small.grad = each.clone(), each[:, :3].clone()
        optimizer.step()
        states.append((large.detach().clone(), small.detach().clone()))
    assert torch.equal(states[0][0], torch.eye(3, 4, dtype=torch.float64))
    assert not torch.equal(states[0][1], torch.eye(3, dtype=torch.float64))
    average = 0.25 * g[0] + 0.5 * g[1]
    expected = spectral_step(torch.eye(3, 4, dtype=torch.float64), 0.5 * average + 0.5 * g[1], 0.02)
    torch.testing.assert_close(states[1][0], expected)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        StiefelConv2d(1, 8, 1, stride=2), MaxMin(), nn.Flatten(), StiefelLinear(32, 8), MaxMin(), nn.Linear(8, 2)
    )  # fmt: skip


def train(model: nn.Module | None = None, **options: Any) -> Run:
    x = torch.rand(200, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0, 0, 0] > x[:, 0, 3, 3]).long()
    given = {"optimizer": "spectral", "epochs": 5, "batch_size": 4, "lr": 0.015, **options}
    return fit(network() if model is None else model, (x, y), loss="cross_entropy", accelerator="cpu", **given)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options", [{}, {"optimizer": "riemannian_adam"}, pytest.param({"manifold_lr": 0.1}, marks=pytest.mark.slow)]
)
def test_fit_learns_and_stays_on_the_manifold(options: dict[str, Any]) -> None:
    run = train(**options)
    assert run.history[-1]["accuracy"] > 0.85
    for layer in (run.model[0], run.model[3]):
        assert abs(float(lipschitz(layer, (1, 4, 4) if layer is run.model[0] else (32,)).detach()) - 1) < 1e-5
        assert not torch.equal(layer.free, network()[0 if layer is run.model[0] else 3].free)


@pytest.mark.thorough
def test_both_rates_follow_the_schedule() -> None:
    model, seen = network(), []
    original = SpectralDescent.moved

    def watch(self: Any, w: Any, g: Any, state: Any, group: Any) -> Any:
        seen.append(group["lr"])
        return original(self, w, g, state, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpectralDescent, "moved", watch)
        run = train(model, epochs=1, schedule=lambda fraction: 1 - fraction / 2, manifold_lr=0.3)
    assert seen[::2] == [0.3 * (1 - step / 100) for step in range(1, 51)]
    assert run.history[0]["lr"] == 0.3 * 0.5


@pytest.mark.thorough
def test_a_cut_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = train(epochs=2)
    part = train(epochs=2, run_dir=tmp_path, max_minutes=1e-9)
    assert not part.finished
    part = train(epochs=2, run_dir=tmp_path, resume=True)
    for one, other in zip(whole.model.parameters(), part.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_optimisers_that_do_not_fit_the_layers_are_refused() -> None:
    with pytest.raises(OptionError, match=r"expected optimizer spectral or .* for Stiefel layers, got adam"):
        train(optimizer="adam")
    with pytest.raises(OptionError, match="expected Stiefel layers for optimizer spectral, got Sequential"):
        train(nn.Sequential(nn.Flatten(), CayleyLinear(16, 2)))


def test_one_for_several() -> None:
    model = network()
    inner, outer = optim.split(model)
    assert [tuple(p.shape) for p in inner] == [(8, 4, 1, 1), (8, 32)]
    assert len(outer) == 4
    both = Together([SpectralDescent(inner), torch.optim.Adam(outer)])
    with pytest.raises(OptionError, match="expected the states of 2 optimisers, got 1"):
        both.load_state_dict({"parts": [{}]})
    model(torch.rand(2, 1, 4, 4)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    both.step()
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    twin = Together([SpectralDescent(inner), torch.optim.Adam(outer)])
    twin.load_state_dict(both.state_dict())
    assert twin.param_groups[0] is twin.parts[0].param_groups[0]
    both.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_refusals() -> None:
    w = nn.Parameter(torch.eye(2))
    for make, message in (
        (lambda: SpectralDescent([w], momentum=1.0), r"momentum: expected a number in \[0, 1\), got 1.0"),
        (lambda: SpectralDescent([w], lr=-1.0), "lr: expected a finite number >= 0, got -1.0"),
        (lambda: SpectralDescent([w], steps=0), "steps: expected an integer of at least 1, got 0"),
        (lambda: RiemannianAdam([w], betas=(0.9, 1.0)), "betas: expected two numbers"),
        (lambda: RiemannianAdam([w], eps=0.0), "eps: expected a positive finite number, got 0.0"),
    ):
        with pytest.raises(OptionError, match=message):
            make()
    with pytest.raises(ShapeError, match="expected matrices, got a parameter"):
        SpectralDescent([nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_one_call_for_all_parameters_takes_the_same_step(name: str) -> None:
    def parameters() -> nn.ParameterList:
        return nn.ParameterList([torch.arange(6.0).reshape(2, 3), torch.tensor(-2.0)])

    ours, theirs = parameters(), parameters()
    options = TrainOptions(epochs=1, optimizer=name, lr=0.1, weight_decay=0.01, momentum=0.9)
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    more = {"momentum": 0.9} if name == "sgd" else {}
    one = optim.build(options, ours, torch.device("cpu"))
    two = kinds[name](theirs, lr=0.1, weight_decay=0.01, fused=False, foreach=False, **more)
    for step in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad, q.grad = (t.detach().sin() * (step + 1) for t in (p, q))
        one.step()
        two.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)
