"""The tables of docs/lab/wasserstein.md: estimates of W1 against closed forms, exact assignment and across families.

    python benchmarks/wasserstein.py [gauss] [spheres] [assignment] [coverage] [families]

One thread; process time; a few minutes in all. Without arguments every table.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import Tensor

from lipkit import data, models, wasserstein
from lipkit.wasserstein import Estimate

SEEDS = range(5)


def normal(seed: int, n: int, d: int, shift: float = 0.0) -> Tensor:
    """(n, d) normal samples, the first coordinate shifted."""
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
    x[:, 0] += shift
    return x


def sphere(seed: int, n: int, d: int, radius: float) -> Tensor:
    """(n, d) uniform samples of a sphere."""
    x = normal(seed, n, d)
    return radius * x / x.norm(dim=1, keepdim=True)


def expected(found: Estimate, x: Tensor, y: Tensor) -> float:
    """What the estimate is unbiased for, from many fresh samples."""
    with torch.no_grad():
        values = [float((f(x).double() - f(y).double()).mean()) / found.constant for f in found.critics]
    return statistics.mean(values)


def gauss() -> None:
    """N(0, I) against a shift of length 1."""
    print("| d | samples | seed | value | interval | expected value | mean shift of the samples | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    summary = []
    for d, n, seeds in ((16, 10_000, SEEDS), (2, 10_000, SEEDS)):
        near, expectations, below, covered = 0, [], 0, 0
        for seed in seeds:
            x, y = normal(1000 + seed, n, d), normal(2000 + seed, n, d, 1.0)
            start = time.process_time()
            found = wasserstein.distance(x, y, seed=seed)
            seconds = time.process_time() - start
            fresh = normal(3000 + seed, 200_000, d)
            shifted = fresh.clone()
            shifted[:, 0] += 1  # the same draws: the difference has hardly any noise
            mean = expected(found, fresh, shifted)
            samples = float((y.mean(0) - x.mean(0))[0])
            near += abs(found.value - 1) <= 0.02
            below += found.low <= 1
            covered += found.low <= mean <= found.high
            expectations.append(mean)
            print(
                f"| {d} | {n} | {seed} | {found.value:.4f} | {found.low:.4f} to {found.high:.4f} | {mean:.4f} | "
                f"{samples:.4f} | {seconds:.1f} |",
                flush=True,
            )
        summary.append((d, n, len(seeds), near, min(expectations), max(expectations), below, covered))
    print("\n| d | samples | seeds | value within 2 % | expected value | low <= 1 | expected value in the interval |")
    print("|---|---|---|---|---|---|---|")
    for d, n, seeds_, near, low, high, below, covered in summary:
        print(f"| {d} | {n} | {seeds_} | {near} | {low:.4f} to {high:.4f} | {below} | {covered} |")


def spheres() -> None:
    """Spheres of radius 1 and 2 around one centre: W1 = 1, by a critic that is not linear."""
    print("| d | critic | steps | value | Student's interval | proved interval, fresh samples | seconds |")
    print("|---|---|---|---|---|---|---|")
    for d in (2, 16):
        for family in ("cayley", "sandwich"):
            steps = 1000
            x, y = sphere(1, 10_000, d, 1.0), sphere(2, 10_000, d, 2.0)
            start = time.process_time()
            found = wasserstein.distance(x, y, critic=family, steps=steps, lr=0.005)
            seconds = time.process_time() - start
            # Fresh samples for the first critic; the diameter of the larger sphere is 4.
            x, y = sphere(3, 10_000, d, 1.0), sphere(4, 10_000, d, 2.0)
            half = wasserstein.distance(x, y, critic=found.critic, steps=0, diameter=4.0)
            print(
                f"| {d} | {family} | {steps} | {found.value:.4f} | {found.low:.4f} to {found.high:.4f} | "
                f"{half.low:.4f} to {half.high:.4f} | {seconds:.1f} |",
                flush=True,
            )


def assignment() -> None:
    """Samples of few points, against the exact distance of the two samples."""
    print("| P and Q | samples | exact W1 of the samples | value | interval |")
    print("|---|---|---|---|---|")
    pairs = {
        "N(0, I), d = 1 and shifted by 1": (normal(1, 1000, 1), normal(2, 1000, 1, 1.0)),
        "N(0, I), d = 2 and N((3, 0), I / 4)": (normal(1, 1000, 2), normal(2, 1000, 2) / 2 + torch.tensor([3.0, 0.0])),
        "N(0, I), d = 2 and a circle of radius 3": (normal(1, 1000, 2), sphere(2, 1000, 2, 3.0)),
        "two draws of N(0, I), d = 2": (normal(1, 1000, 2), normal(2, 1000, 2)),
    }
    for name, (x, y) in pairs.items():
        found = wasserstein.distance(x, y)
        exact = wasserstein.assignment(x, y)
        print(f"| {name} | 1000 | {exact:.4f} | {found.value:.4f} | {found.low:.4f} to {found.high:.4f} |", flush=True)


def coverage() -> None:
    """How often the intervals cover what they are for, with small samples and a small critic."""
    print("| samples | runs | Student covers | Student low <= W1 | half width | Bernstein covers | half width |")
    print("|---|---|---|---|---|---|---|")
    runs, half = 60, 3.0
    shift = torch.tensor([1.0, 0.0])
    torch.manual_seed(0)
    critic = models.mlp([16], input_shape=(2,), classes=1)
    for n in (50, 400):
        hits = [0, 0, 0]
        widths: tuple[list[float], list[float]] = ([], [])
        for run in range(runs):
            # Cut to a box, so that the supports have a diameter; the shift, and so W1, stays 1.
            x = normal(10_000 + run, n, 2).clamp(-half, half)
            y = normal(20_000 + run, n, 2).clamp(-half, half) + shift
            found = wasserstein.distance(x, y, critic=critic, steps=40, seed=run, lr=0.02, batch_size=64)
            fresh = normal(30_000 + run, 20_000, 2).clamp(-half, half)
            mean = expected(found, fresh, fresh + shift)
            hits[0] += found.low <= mean <= found.high
            hits[1] += found.low <= 1
            widths[0].append(found.high - found.value)
            # The same critics and means: only the half width is another.
            proved = wasserstein.distance(
                x, y, critic=critic, steps=40, seed=run, lr=0.02, batch_size=64,
                diameter=((2 * half + 1) ** 2 + (2 * half) ** 2) ** 0.5,
            )  # fmt: skip
            hits[2] += proved.low <= mean <= proved.high
            widths[1].append(proved.high - proved.value)
        print(
            f"| {n} | {runs} | {hits[0] / runs:.1%} | {hits[1] / runs:.1%} | {statistics.mean(widths[0]):.3f} | "
            f"{hits[2] / runs:.1%} | {statistics.mean(widths[1]):.3f} |",
            flush=True,
        )


def families() -> None:
    """Digits against a generator trained on others of them, by convolutional critics of several families."""
    digits = data.load("digits")
    train, test = digits.train.batch(slice(None))[0], digits.test.batch(slice(None))[0]
    images = torch.cat([train, test])
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    seen, fresh = images[order[:897]], images[order[897:]]
    start = time.process_time()
    made = wasserstein.wgan.train(seen, steps=100)
    print(f"Generator: {time.process_time() - start:.0f} s.\n")
    generated = made.sample(len(fresh), seed=1)
    print("| critic | proved constant | value | interval | on its training samples | seconds |")
    print("|---|---|---|---|---|---|")
    for family in ("cayley", "bcop", "rko", "ossn", "sandwich"):
        start = time.process_time()
        found = wasserstein.distance(fresh, generated, critic=family, steps=100, batch_size=128)
        print(
            f"| {family} | {found.constant:.6f} | {found.value:.4f} | {found.low:.4f} to {found.high:.4f} | "
            f"{found.train_value:.4f} | {time.process_time() - start:.0f} |",
            flush=True,
        )


TABLES = {
    "gauss": gauss,
    "spheres": spheres,
    "assignment": assignment,
    "coverage": coverage,
    "families": families,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or TABLES:
        print(f"\n### {name}\n")
        TABLES[name]()
