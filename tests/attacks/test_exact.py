"""Attacks that minimise the norm against exact distances: linear models, boxes, and a ReLU network solved exactly."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize, nnls
from torch import Tensor, nn

from lipkit import modules
from lipkit.attacks import apgd, carlini_wagner, fab, pgd, shrink
from lipkit.attacks.ascent import ball, misclassified
from lipkit.attacks.minimum_norm import towards_hyperplane
from lipkit.certificates import certify
from lipkit.modules.storage import float64_copy

pytestmark = pytest.mark.thorough


def network() -> modules.Network:
    torch.manual_seed(0)
    return modules.Network([nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3)], (16,))


def least_distance(a: np.ndarray, b: np.ndarray) -> float:
    """The norm of the shortest d with ``a d >= b``, infinite if there is none (Lawson & Hanson, problem LDP)."""
    size = np.abs(a).max(axis=1, keepdims=True)
    a, b = a / size, b / size[:, 0]
    matrix = np.vstack([a.T, b])
    aim = np.zeros(len(matrix))
    aim[-1] = 1.0
    rest = matrix @ nnls(matrix, aim, maxiter=1000)[0] - aim
    return math.inf if np.linalg.norm(rest) < 1e-9 else float(np.linalg.norm(rest[:-1] / rest[-1]))


def exact_distance(net: modules.Network, x: Tensor, label: int) -> float:
    """Over all patterns of the ReLU and all rivals: a quadratic program on the polytope where the network is affine."""
    wide = float64_copy(net)
    (w1, b1), (w2, b2) = [(layer.weight.numpy(), layer.bias.numpy()) for layer in (wide[0], wide[2])]
    point, best = x.double().numpy(), math.inf
    for pattern in itertools.product((0.0, 1.0), repeat=len(b1)):
        on = np.array(pattern)
        sign = 2 * on - 1
        for rival in set(range(len(b2))) - {label}:
            row = w2[rival] - w2[label]
            slope, offset = (row * on) @ w1, (row * on) @ b1 + b2[rival] - b2[label]
            a = np.vstack([sign[:, None] * w1, slope])
            if not np.any(slope):
                continue
            b = np.concatenate([-sign * (w1 @ point + b1), [-(slope @ point + offset)]])
            best = min(best, least_distance(a, b))
    return best


def points(count: int, size: int) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(1))


def test_the_least_distance_program_is_right() -> None:
    assert least_distance(np.array([[3.0, 4.0]]), np.array([5.0])) == pytest.approx(1)
    assert least_distance(np.array([[1.0, 0], [0, 1.0]]), np.array([1.0, 2.0])) == pytest.approx(5**0.5)
    assert least_distance(np.array([[1.0, 0], [-1.0, 0]]), np.array([1.0, 1.0])) == math.inf


def test_no_attack_on_a_relu_network_is_closer_than_the_exact_distance_and_the_best_reach_it() -> None:
    net = network()
    x = points(12, 16)
    y = net(x).argmax(dim=1)
    exact = torch.tensor([exact_distance(net, sample, int(label)) for sample, label in zip(x, y, strict=True)])
    assert exact.isfinite().all()
    assert (certify(net, x, y).radius <= exact).all()
    found = {
        "fab": fab(net, x, y, box=None),
        "cw": carlini_wagner(net, x, y, box=None, searches=6, steps=100, rate=0.05),
        "apgd": shrink(net, x, apgd(net, x, y, eps=1.02 * exact, targeted=True, steps=60, box=None), y),
        "pgd": shrink(net, x, pgd(net, x, y, eps=3 * exact, box=None), y),
    }
    ratio = {name: ball("l2").distance(near, x) / exact for name, near in found.items()}
    wrong = {name: misclassified(net(near), y) for name, near in found.items()}
    for name in found:
        assert (ratio[name][wrong[name]] >= 1 - 1e-5).all(), name
    assert wrong["fab"].all()
    assert ratio["fab"].mean() < 1.03
    assert wrong["cw"].all()
    assert ratio["cw"].mean() < 1.1
    assert wrong["apgd"].float().mean() > 0.7


def linear(classes: int = 4) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, classes).requires_grad_(False)


@pytest.mark.parametrize("attack", ["fab-l2", "fab-linf", "cw"])
@pytest.mark.parametrize("box", [None, (-4.0, 5.0)])
def test_on_linear_models_the_true_distance_is_reached(attack: str, box: tuple[float, float] | None) -> None:
    layer = linear()
    x = torch.rand(10, 5, generator=torch.Generator().manual_seed(1))
    y = layer(x).argmax(dim=1)
    norm = "linf" if attack == "fab-linf" else "l2"
    logits, rows = layer(x).double(), layer.weight.double()
    apart = rows[y][:, None] - rows[None]
    size = apart.norm(dim=2) if norm == "l2" else apart.abs().sum(dim=2)
    distance = ((logits.gather(1, y[:, None]) - logits) / size).nan_to_num(math.inf).amin(dim=1)
    if attack == "cw":
        near = carlini_wagner(layer, x, y, box=box, targets=1, searches=6, steps=100, rate=0.05, weight=0.1)
    else:
        near = fab(layer, x, y, norm=norm, box=box)
    assert misclassified(layer(near), y).all()
    ratio = ball(norm).distance(near, x) / distance
    assert ratio.min() >= 1 - 2e-6
    assert ratio.max() <= (1.03 if attack == "cw" else 1.0001)


def test_in_a_tight_box_fab_is_as_close_as_a_general_solver() -> None:
    layer = linear()
    x = torch.rand(8, 5, generator=torch.Generator().manual_seed(2))
    y = layer(x).argmax(dim=1)
    near = {norm: fab(layer, x, y, norm=norm, targets=None) for norm in ("l2", "linf")}
    rows, offset = layer.weight.double().numpy(), layer.bias.double().numpy()
    for i, sample in enumerate(x.double().numpy()):
        best = {"l2": math.inf, "linf": math.inf}
        for rival in set(range(4)) - {int(y[i])}:
            w, b = rows[rival] - rows[y[i]], offset[rival] - offset[y[i]]
            if w.clip(0).sum() + b < 0:
                continue
            done = minimize(
                lambda z, c=sample: ((z - c) ** 2).sum(), (w > 0).astype(float), jac=lambda z, c=sample: 2 * (z - c),
                bounds=[(0, 1)] * 5, constraints={"type": "ineq", "fun": lambda z, w=w, b=b: w @ z + b,
                "jac": lambda z, w=w: w}, method="SLSQP", options={"ftol": 1e-15, "maxiter": 500},
            )  # fmt: skip
            best["l2"] = min(best["l2"], done.fun**0.5)
            cube = linprog(
                [0, 0, 0, 0, 0, 1.0],
                A_ub=np.vstack([np.c_[np.eye(5), -np.ones(5)], np.c_[-np.eye(5), -np.ones(5)], [*-w, 0.0]]),
                b_ub=np.r_[sample, -sample, b], bounds=[*[(0, 1)] * 5, (0, None)],
            )  # fmt: skip
            best["linf"] = min(best["linf"], cube.fun)
        for norm, points_found in near.items():
            reached = float(ball(norm).distance(points_found[i : i + 1], x[i : i + 1]))
            assert bool(misclassified(layer(points_found[i : i + 1]), y[i : i + 1])) == math.isfinite(best[norm])
            if math.isfinite(best[norm]):
                assert best[norm] * (1 - 1e-4) <= reached <= best[norm] * 1.02, (norm, i)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_the_step_to_a_hyperplane_reaches_it_or_ends_in_the_corner(norm: str) -> None:
    generator = torch.Generator().manual_seed(3)
    point = torch.rand(200, 6, generator=generator, dtype=torch.float64)
    normal = torch.randn(200, 6, generator=generator, dtype=torch.float64)
    gap = 2 * torch.randn(200, generator=generator, dtype=torch.float64)
    step = towards_hyperplane(point, normal, gap, norm, (0.0, 1.0))
    assert (point + step).min() >= -1e-15
    assert (point + step).max() <= 1 + 1e-15
    most = torch.where(normal * gap[:, None] > 0, (1 - point) * normal, -point * normal).sum(dim=1)
    reached = (normal * step).sum(dim=1)
    expected = torch.where(gap.abs() < most.abs(), gap, most)
    torch.testing.assert_close(reached, expected, rtol=1e-9, atol=1e-12)
    assert (step[normal.abs().amax(dim=1) == 0] == 0).all()
    zero = towards_hyperplane(point, torch.zeros_like(normal), gap, norm, (0.0, 1.0))
    assert torch.equal(zero, torch.zeros_like(zero))


def test_misclassified_samples_stay_and_nothing_found_is_the_sample() -> None:
    x, y = torch.rand(4, 5), torch.zeros(4, dtype=torch.int64)

    def constant(x: Tensor) -> Tensor:
        return torch.stack([torch.ones(len(x)), torch.zeros(len(x))], dim=1) + 0 * x.sum(dim=1, keepdim=True)

    for label in (0, 1):
        for attack in (fab, carlini_wagner):
            # Of class 0 all are right, and the margin is flat; of class 1 none is.
            with nullcontext() if label else pytest.warns(UserWarning, match="could not search at 4 of 4 samples"):
                assert torch.equal(attack(constant, x, y + label, steps=3), x)
