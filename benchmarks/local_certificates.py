"""Claim: no local radius is above the exact distance to another class, and no attack inside one succeeds.

    python -m benchmarks.local_certificates truth --radii 300      # ReLU networks of at most 12 units, all patterns
    python -m benchmarks.local_certificates attacks --networks 100 # joins, pooling, every activation; both formats
    python -m benchmarks.local_certificates cifar10 --root DATA    # an ordinary network, trained plainly and with PGD

The exact distance is the least over all patterns of the units (off or on) and all other classes: that of a polyhedron,
by non-negative least squares (Lawson & Hanson, "Solving Least Squares Problems", chapter 23). A pattern is given up as
soon as part of it is empty or farther than what is known. Records are in `records/local_certificates/`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import torch
from benchmarks.soundness_draws import linear
from torch import Tensor, nn

import lipkit
from lipkit import modules
from lipkit.attacks import autoattack
from lipkit.attacks.ascent import margin_loss
from lipkit.certificates import certify
from lipkit.data import random_flip
from lipkit.training import PgdAdversary

RECORDS = Path(__file__).parent.parent / "records" / "local_certificates"


# --- the truth --------------------------------------------------------------------------------------------------------


def distance(g: Any, h: Any) -> float:
    """The least |d| with g d >= h; inf where there is none."""
    if not (h > 0).any():
        return 0.0
    size = np.linalg.norm(g, axis=1)
    if ((size == 0) & (h > 0)).any():
        return math.inf
    g, h = g[size > 0] / size[size > 0, None], h[size > 0] / size[size > 0]
    goal = np.zeros(g.shape[1] + 1)
    goal[-1] = scale = max(1e-3, float(h.max()))
    matrix = np.vstack([g.T, h[None]])
    u, rest = scipy.optimize.nnls(matrix, goal, maxiter=1000)
    residual = matrix @ u - goal
    if rest < 1e-9 * scale or residual[-1] >= 0:
        return math.inf
    return float(np.linalg.norm(residual[:-1] / residual[-1]))


def nearest_flip(weights: Sequence[tuple[Any, Any]], x: Any, label: int, best: float = math.inf) -> float:
    """The exact distance from x to another class of a ReLU network, if it is below ``best``."""

    def search(layer: int, unit: int, g: Any, h: Any, now: tuple[Any, Any], after: tuple[Any, Any]) -> None:
        # now: the values that go into this layer's activation, A d + c; after: those that come out, as far as chosen.
        nonlocal best
        matrix, shift = now
        if layer == len(weights) - 1:
            for other in set(range(len(shift))) - {label}:
                row, bound = matrix[other] - matrix[label], shift[label] - shift[other]
                best = min(best, distance(np.vstack([g, row]), np.append(h, bound)))
        elif unit == len(shift):
            w, b = weights[layer + 1]
            following = w @ after[0], w @ after[1] + b
            search(layer + 1, 0, g, h, following, (np.zeros((0, g.shape[1])), np.zeros(0)))
        else:
            for on in (shift[unit] > 0, shift[unit] <= 0):
                sign = 1.0 if on else -1.0
                more, bound = np.vstack([g, sign * matrix[unit]]), np.append(h, -sign * shift[unit])
                if distance(more, bound) < best:
                    rows = np.vstack([after[0], on * matrix[unit]]), np.append(after[1], on * shift[unit])
                    search(layer, unit + 1, more, bound, now, rows)

    w, b = weights[0]
    n = w.shape[1]
    search(0, 0, np.zeros((0, n)), np.zeros(0), (w, w @ x + b), (np.zeros((0, n)), np.zeros(0)))
    return best


def truth(radii: int, seed: int = 0) -> dict[str, Any]:
    """Quotients of local radii and exact distances, by shape of the network."""
    shapes = [(2, 12, 3), (3, 6, 6, 3), (5, 4, 4, 4, 2), (8, 12, 4), (2, 3, 3, 3, 3, 3), (6, 8, 4, 5)]
    found: dict[str, list[float]] = {str(shape): [] for shape in shapes}
    broken = 0
    for number in itertools.count(seed):
        shape = shapes[number % len(shapes)]
        if sum(map(len, found.values())) >= radii:
            break
        torch.manual_seed(number)
        layers = [nn.Linear(a, b, dtype=torch.float64) for a, b in itertools.pairwise(shape)]
        parts = [part for layer in layers for part in (layer, nn.ReLU())][:-1]
        network = modules.Network(parts, (shape[0],))
        for layer in layers:
            layer.weight.mul_(1.5)
        x = torch.randn(3, shape[0], dtype=torch.float64)
        labels = network(x).argmax(1)
        certified = certify(network, x, labels, method="local").radius.tolist()
        weights = [(layer.weight.numpy(), layer.bias.numpy()) for layer in layers]
        for point, label, r in zip(x.numpy(), labels.tolist(), certified, strict=True):
            exact = nearest_flip(weights, point, label)
            if math.isfinite(exact) and r > 0:
                broken += r > exact * (1 + 1e-8)
                found[str(shape)].append(r / exact)
    ratios = [ratio for each in found.values() for ratio in each]
    return {
        "radii": len(ratios),
        "above the exact distance": broken,
        "radius / exact distance": {
            "least": min(ratios), "median": statistics.median(ratios), "largest": max(ratios),
            "at least 0.99": sum(ratio > 0.99 for ratio in ratios) / len(ratios),
        },
        "median by shape": {shape: statistics.median(each) for shape, each in found.items() if each},
    }  # fmt: skip


# --- attacks ----------------------------------------------------------------------------------------------------------


def activations(channels: int) -> list[nn.Module]:
    """One of every kind, with slopes and thresholds of all signs."""
    prelu = nn.PReLU(channels)
    prelu.weight.data.uniform_(-1.5, 1.5)
    return [
        nn.ReLU(), nn.LeakyReLU(0.1), nn.LeakyReLU(-0.4), nn.LeakyReLU(1.7), prelu, nn.ReLU6(), nn.Hardtanh(-0.3, 0.5),
        nn.Softshrink(0.2), nn.Hardsigmoid(), nn.Hardswish(), modules.NActivation(channels), modules.HalfAbs(),
        nn.Tanh(), nn.Sigmoid(), nn.Softsign(), nn.Tanhshrink(), nn.Softplus(), nn.LogSigmoid(), nn.CELU(0.5),
        nn.SELU(), nn.ELU(), nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.Mish(), modules.MaxMin(), modules.GroupSort(2),
    ]  # fmt: skip


def joined(draw: random.Random, layer: Any, act: Any) -> nn.Module:
    """A graph that keeps its shape: residual, concatenated, blended or the larger of two branches."""
    branch = [layer(), act(), layer()]
    return draw.choice(
        [
            lambda: modules.Graph([*branch, modules.Add(1, -1)], [[0], [1], [2], [0, 3]]),
            lambda: modules.Graph([*branch, modules.Add(1, 1, -1)], [[0], [1], [2], [0, 3, 1]]),
            lambda: modules.Graph([*branch, modules.Blend(torch.rand(()))], [[0], [1], [2], [3, 0]]),
            lambda: modules.Graph([*branch, modules.Maximum()], [[0], [1], [2], [3, 0, 1]]),
            lambda: modules.Graph(
                [*branch, modules.Concatenate(1), modules.Piece(1, 0, 8, 2), modules.Add(1, 1)],
                [[0], [1], [2], [2, 3], [4], [5, 1]],
            ),
        ]
    )()


def random_network(seed: int) -> modules.Network:
    """A dense or convolutional network in float32, the activations in turn."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    order = itertools.count(seed)

    def act() -> nn.Module:
        kinds = activations(4)
        return kinds[next(order) % len(kinds)]

    def dense() -> nn.Module:
        return nn.Linear(4, 4, bias=draw.random() < 0.8)

    def conv() -> nn.Module:
        mode = draw.choice(["zeros", "circular", "reflect", "replicate"])
        return nn.Conv2d(4, 4, 3, padding=1, padding_mode=mode, groups=draw.choice([1, 2]))

    shift = modules.Affine(torch.randn(4), torch.randn(4) * 0.1)
    if seed % 3:
        layers = [nn.Linear(5, 4), act(), joined(draw, dense, act), shift, act(), joined(draw, dense, act)]
        layers += [act(), nn.Linear(4, 3)]
        shape: tuple[int, ...] = (5,)
    else:
        pool = [
            nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.AvgPool2d(3, 2, 1, ceil_mode=True),
            nn.MaxPool2d(2, 2, dilation=2), nn.AvgPool2d(2, divisor_override=3), nn.Conv2d(4, 4, 2, 2),
        ]  # fmt: skip
        layers = [nn.Conv2d(2, 4, 3, padding=1), act(), joined(draw, conv, act), shift, draw.choice(pool), act()]
        size = math.prod(nn.Sequential(*layers)(torch.zeros(1, 2, 5, 6)).shape)
        layers += [nn.Flatten(), nn.Linear(size, 4), act(), nn.Linear(4, 3)]
        shape = (2, 5, 6)
    network = lipkit.export(nn.Sequential(*layers), shape)
    network.input_range = (0.0, 1.0) if seed % 2 else None
    return network


def crafted() -> list[modules.Network]:
    """Networks in which rounding decides, in float32."""

    def dense(weight: Any, bias: Any = None) -> nn.Linear:
        return linear(torch.tensor(weight), None if bias is None else torch.tensor(bias))

    def skip(t: float) -> modules.Network:
        last = dense([[0.0], [1.0]], [t, 0.0])
        return modules.Network(
            [modules.Graph([dense([[2.0**-25]]), modules.Add(1, -1), last], [[0], [0, 1], [2]])], (1,)
        )

    skips = [skip(t) for t in (1 - 2.0**-24, 1.0, 1 + 2.0**-23, 2.0)]
    swallowed = [
        modules.Network([dense([[1.0], [0.0]], [2.0**p, 2.0**p]), nn.ReLU(), dense([[1.0, -1.0]]),
                         dense([[0.0], [1.0]], [0.25, 0.0])], (1,))
        for p in (20, 22, 23, 24, 25)
    ]  # fmt: skip
    return skips + swallowed


def attacked(network: modules.Network, x: Tensor, labels: Tensor, radius: Tensor, tries: int) -> tuple[int, int]:
    """Points inside the open balls (and the range) that were tried, and how many the network gives another class.

    Tries are random directions, steps of the gradient, and points at the rim moved by last places, in x's format.
    """
    box, count, flips = network.input_range, 0, 0
    ahead = (-1, *[1] * (x.ndim - 1))
    wide = radius.clamp_max(100.0)
    direction = torch.randn(x.shape, dtype=torch.float64)
    for trial in range(tries):
        if trial % 5 == 0:
            direction = torch.randn(x.shape, dtype=torch.float64)
        elif trial % 5 < 4:
            point = (x.double() + direction).to(x.dtype).requires_grad_()
            slope = torch.autograd.grad(margin_loss(network(point), labels).sum(), point)[0].double()
            length = slope.flatten(1).norm(dim=1).clamp_min(1e-300).view(ahead)
            direction = direction + 2 * slope / length * wide.view(ahead)
        length = direction.flatten(1).norm(dim=1).clamp_min(1e-300)
        direction = direction * (wide / length * (1 - 1e-9)).view(ahead)
        point = x.double() + direction
        if box is not None:
            point = point.clamp(*box)
        point = point.to(x.dtype)
        if trial % 5 == 4:
            point = point * (1 + torch.finfo(x.dtype).eps * torch.randint(-2, 3, x.shape).to(x.dtype))
        inside = (point.double() - x.double()).flatten(1).norm(dim=1) < radius
        if box is not None:
            inside &= ((point >= box[0]) & (point <= box[1])).flatten(1).all(1)
        with torch.no_grad():
            y = network(point)
            other = y.scatter(1, labels[:, None], -math.inf).amax(1)
            flips += int((inside & ~(y.gather(1, labels[:, None])[:, 0] > other)).sum())
        count += int(inside.sum())
    return count, flips


def attacks(networks: int, points: int, seed: int = 0) -> dict[str, Any]:
    """Attacks on random networks and those made for rounding, in both formats."""
    result: dict[str, Any] = {}
    for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        tried = flips = beyond = positive = larger = 0
        drawn = [random_network(seed + i) for i in range(networks)]
        for i, network in enumerate([*drawn, *crafted()]):
            network = network.to(dtype)
            torch.manual_seed(i)
            x = torch.rand(10, *network.input_shape).to(dtype)
            if i >= networks:  # where x decides by its last places
                x = (1 + 2.0**-24 * torch.arange(-5, 5)[:, None]).to(dtype)
            labels = network(x).argmax(1)
            found = certify(network, x, labels, method="local", evaluator=name).radius
            plain = certify(network, x, labels, evaluator=name).radius
            positive, larger = positive + int((found > 0).sum()), larger + int((found > plain).sum())
            held = found > 0
            if bool(held.any()):
                tries = math.ceil(points / (2 * networks * int(held.sum())))
                more = attacked(network, x[held], labels[held], found[held], tries)
                tried, flips = tried + more[0], flips + more[1]
                beyond += attacked(network, x[held], labels[held], 4 * found[held], 10)[1]
        result[name] = {
            "networks": networks, "made for rounding": len(crafted()), "positive radii": positive,
            "larger than by constants": larger, "points inside": tried, "succeeded": flips,
            "succeeded within 4 times the radii": beyond,
        }  # fmt: skip
    return result


# --- an ordinary network ----------------------------------------------------------------------------------------------


def ordinary() -> nn.Sequential:
    """Convolutions of 16 and 32 channels with stride 2, dense layers of 100 and 10."""
    return nn.Sequential(
        modules.Affine(torch.full((3,), 4.0), torch.full((3,), -2.0)), nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(),
        nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 100), nn.ReLU(), nn.Linear(100, 10),
    )  # fmt: skip


def cifar10(root: str | None, epochs: int, images: int, seed: int = 0) -> dict[str, Any]:
    """Certified accuracy at 36/255 by constants and locally, beside AutoAttack, on the first test images."""
    data, eps, result = lipkit.data.load("cifar10", root=root), 36 / 255, dict[str, Any]()
    x, y = data.test.batch(slice(0, images))
    for name, adversary in (("plain", None), ("PGD", PgdAdversary("l2", 2 * eps, steps=5, step_size=0.4))):
        torch.manual_seed(seed)
        options = {
            "epochs": epochs,
            "batch_size": 128,
            "lr": 2e-3,
            "augment": random_flip,
            "seed": seed,
            "accelerator": "cpu",
        }
        lipkit.fit(net := ordinary(), data.train, loss="cross_entropy", adversary=adversary, **options)
        plain = lipkit.export(net, (3, 32, 32))
        plain.input_range = (0.0, 1.0)
        found = result[name] = {"images": images, "epochs": epochs, "constant": float(lipkit.lipschitz(plain))}
        for method in ("global", "local"):
            begun = time.process_time()
            cert = certify(plain, x, y, method=method)
            found[f"{method}: seconds an image"] = round((time.process_time() - begun) / images, 3)
            found[f"{method}: certified"] = float(cert.accuracy(eps))
            found[f"{method}: median radius where right"] = float(np.median(cert.radius[cert.prediction == cert.label]))
        found["peak MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        found["clean"] = float(cert.clean_accuracy)
        there = autoattack(plain, x, y, eps=eps, parts=None)
        found["AutoAttack (early)"] = float((plain(there).argmax(1) == y).float().mean())
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings, keep them with ``--keep``; 1 if a radius is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("truth", "attacks", "cifar10"))
    parser.add_argument("--radii", type=int, default=300)
    parser.add_argument("--networks", type=int, default=100)
    parser.add_argument("--points", type=int, default=330_000)
    parser.add_argument("--root", help="of the data sets")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help=f"in {RECORDS.name}")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    begun = time.process_time()
    with torch.backends.nnpack.flags(enabled=False):
        if given.study == "truth":
            found = truth(given.radii, given.seed)
        elif given.study == "attacks":
            found = attacks(given.networks, given.points, given.seed)
        else:
            found = cifar10(given.root, given.epochs, given.images, given.seed)
    found |= {"seed": given.seed, "torch": torch.__version__, "seconds": round(time.process_time() - begun)}
    text = json.dumps(found, indent=1)
    print(text)
    if given.keep:
        RECORDS.mkdir(parents=True, exist_ok=True)
        (RECORDS / f"{given.study}.json").write_text(text + "\n")
    wrong = [found.get("above the exact distance", 0)]
    wrong += [each["succeeded"] for each in found.values() if isinstance(each, dict) and "succeeded" in each]
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
