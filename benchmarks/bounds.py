"""The tables of docs/bounds.md: each bound of a convolution against the truth and against ten power iterations.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python benchmarks/bounds.py [--json FILE] [--kernels 10] [--repeats 7]

Truth is the norm of the convolution with zero padding (k - 1) // 2 on a 32 x 32 image, by Lanczos to convergence in
float64. Times are process times on one thread, medians of interleaved runs, divided by those of ten iterations of the
convolutional power method (one image, conv2d and conv_transpose2d) in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from papers.measures.kernels import methods, random_kernel, true_norm
from torch import Tensor

from lipkit.bounds import symbol_sup

N = 32
SHAPES = {
    "1x3x3x3": (1, 3, 3, 3),
    "32x3x3x3": (32, 3, 3, 3),
    "64x64x3x3": (64, 64, 3, 3),
    "256x256x3x3": (256, 256, 3, 3),
}


def smooth_kernel(*shape: int, seed: int) -> Tensor:
    """Like a trained one: a low-pass part common to all taps, and noise."""
    g = torch.Generator().manual_seed(seed)
    r = torch.arange(shape[-1]) - shape[-1] // 2
    bump = torch.exp(-(r[:, None] ** 2 + r**2) / 3)
    return 0.3 * torch.randn(shape, generator=g) + torch.randn(*shape[:2], 1, 1, generator=g) * bump


def times(kernel: Tensor, repeats: int) -> dict[str, float]:
    """Median process time of each method over that of the power iterations, interleaved."""
    functions = methods(N)
    large = kernel.numel() > 10**5
    slow = ("gram", "circular") if large else ()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for name, f in functions.items():
        if name not in slow:
            f(kernel)
    for i in range(repeats):
        for name, f in functions.items():
            if i and name in slow:
                continue
            inner = 1 if large else 5
            start = time.process_time()
            for _ in range(inner):
                f(kernel)
            seconds[name].append((time.process_time() - start) / inner)
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    power = medians["power method"]
    return {name: s / power for name, s in medians.items()} | {"power, ms": 1e3 * power}


def total(f: Callable[[Tensor], Tensor], kernels: list[Tensor], inner: int) -> float:
    """Process time over some kernels."""
    start = time.process_time()
    for kernel in kernels:
        for _ in range(inner):
            f(kernel)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument(
        "--kernels", type=int, default=10, help="random kernels for the ratios (3 and 1 for the larger)"
    )
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    out: dict[str, dict] = {"ratio": {}, "time": {}, "distance": {}, "symbol_sup time": {}}

    for label, shape in SHAPES.items():
        count = args.kernels if shape[0] < 64 else 3 if shape[0] < 256 else 1
        ratios: dict[str, list[float]] = {}
        for seed in range(count):
            kernel = random_kernel(*shape, seed=seed)
            exact = true_norm(kernel, N)
            for name, f in methods(N).items():
                ratios.setdefault(name, []).append(float(f(kernel)) / exact)
        out["ratio"][label] = {n: (statistics.mean(r), statistics.pstdev(r), len(r)) for n, r in ratios.items()}
        out["time"][label] = times(random_kernel(*shape, seed=0), args.repeats)

    print(f"| method | {' | '.join(f'{s} ratio | time' for s in SHAPES)} |")
    print(f"|---|{'---|---|' * len(SHAPES)}")
    for name in methods(N):
        cells = []
        for s in SHAPES:
            mean, deviation, _ = out["ratio"][s][name]
            cells += [f"{mean:.3f} ± {deviation:.3f}", f"{out['time'][s][name]:.2f}"]
        print(f"| {name} | {' | '.join(cells)} |")
    power = ", ".join(f"{s} {out['time'][s]['power, ms']:.1f} ms" for s in SHAPES)
    print(f"\nTen power iterations: {power}.\n")

    power_method = methods(N)["power method"]
    print("| kernels | random | smooth | random, equispaced grid (points=32) |\n|---|---|---|---|")
    for label, seeds in (("64x64x3x3", 5), ("256x256x3x3", 2)):
        row = {}
        inner = 4 if seeds > 2 else 1
        for kind, make in (("random", random_kernel), ("smooth", smooth_kernel)):
            kernels = [make(*SHAPES[label], seed=seed) for seed in range(seeds)]
            runs = [total(f, kernels, inner) for _ in range(args.repeats) for f in (power_method, symbol_sup)]
            row[kind] = statistics.median(runs[1::2]) / statistics.median(runs[::2])
            if kind == "random":
                grid = total(lambda k: symbol_sup(k, points=32), kernels[:1], 1) * seeds * inner
                row["grid"] = grid / statistics.median(runs[::2])
        out["symbol_sup time"][label] = row
        print(f"| {seeds} of {label} | {row['random']:.2f} | {row['smooth']:.2f} | {row['grid']:.1f} |")

    sizes, taps = (3, 5, 8, 16, 32), (1, 2, 3, 5, 7)
    print(f"\n| k | {' | '.join(f'n = {n}' for n in sizes)} |\n|---|{'---|' * len(sizes)}")
    for k in taps:
        cells = []
        for n in sizes:
            ratios_ = []
            for seed in range(5):
                kernel = random_kernel(4, 3, k, k, seed=seed)
                ratios_.append(float(symbol_sup(kernel, tolerance=1e-3)) / true_norm(kernel, n))
            out["distance"][f"k={k}, n={n}"] = (statistics.mean(ratios_), max(ratios_))
            cells.append(f"{statistics.mean(ratios_):.3f} (max {max(ratios_):.3f})")
        print(f"| {k} | {' | '.join(cells)} |")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(out, file, indent=1)


if __name__ == "__main__":
    main()
