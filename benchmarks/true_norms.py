"""Norms that `lipkit.parametrize.spectral_norm` and torch's own leave, by dense singular values, of 1,000 convolutions.

    python -m benchmarks.true_norms --keep records/parametrize/norms.json

Layers of every geometry, weights normal, one in four without negative ones, scaled by 10^[-2, 2]; float32, evaluation
mode, exact numbers of the stored weights. `own` is what lipkit leaves, `torch` the same for
`torch.nn.utils.parametrizations.spectral_norm` after 50 power iterations.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lipkit.modules.parametrised import settled
from lipkit.parametrize import spectral_norm
from lipkit.testing import dense_matrix

Drawn = tuple[nn.Module, tuple[int, ...], tuple[int, ...] | None]


def _channels(draw: random.Random, groups: int = 1) -> tuple[int, int]:
    return groups * draw.randint(1, 3), groups * draw.randint(1, 3)


def circular(draw: random.Random) -> Drawn:
    k, n, s = draw.choice((1, 3, 5)), 2 * draw.randint(3, 4), draw.choice((1, 1, 2))
    groups = draw.choice((1, 1, 2))
    cin, cout = _channels(draw, groups)
    layer = nn.Conv2d(cin, cout, k, s, (k - 1) // 2, groups=groups, padding_mode="circular")
    return layer, (cin, n, n), (cin, n, n)


def circular_every_size(draw: random.Random) -> Drawn:
    layer, shape, _ = circular(draw)
    return layer, shape, None


def zeros(draw: random.Random) -> Drawn:
    k, (cin, cout) = draw.choice((2, 3, 5)), _channels(draw)
    return nn.Conv2d(cin, cout, k, padding=draw.randint(0, k // 2)), (cin, 8, 8), None


def strided(draw: random.Random) -> Drawn:
    k, s, (cin, cout) = draw.choice((2, 3, 4, 5)), draw.choice((2, 3)), _channels(draw)
    return nn.Conv2d(cin, cout, k, s, k // 2), (cin, 9, 9), None


def dilated(draw: random.Random) -> Drawn:
    k, d, (cin, cout) = draw.choice((2, 3)), draw.choice((2, 3)), _channels(draw)
    return nn.Conv2d(cin, cout, k, padding=d, dilation=d), (cin, 9, 9), None


def grouped(draw: random.Random) -> Drawn:
    groups = draw.choice((2, 3))
    cin, cout = _channels(draw, groups)
    return nn.Conv2d(cin, cout, 3, padding=1, groups=groups), (cin, 8, 8), None


def transposed(draw: random.Random) -> Drawn:
    k, s, (cin, cout) = draw.choice((2, 3, 4)), draw.choice((1, 2)), _channels(draw)
    return nn.ConvTranspose2d(cin, cout, k, s, draw.randint(0, 1)), (cin, 5, 5), None


def signals(draw: random.Random) -> Drawn:
    k, s, (cin, cout) = draw.choice((3, 5)), draw.choice((1, 2)), _channels(draw)
    make: Any = draw.choice((nn.Conv1d, nn.ConvTranspose1d))
    return make(cin, cout, k, s, 1), (cin, 16), None


def dense(draw: random.Random) -> Drawn:
    layer = nn.Linear(draw.randint(1, 12), draw.randint(1, 12))
    return layer, (layer.in_features,), None


KINDS: dict[str, Callable[[random.Random], Drawn]] = {
    "circular, of one size": circular,
    "circular": circular_every_size,
    "zeros, 8 x 8": zeros,
    "strided, 9 x 9": strided,
    "dilated, 9 x 9": dilated,
    "grouped, 8 x 8": grouped,
    "transposed, 5 x 5": transposed,
    "signals, 16": signals,
    "dense": dense,
}


def norm(layer: nn.Module, shape: tuple[int, ...]) -> float:
    """The largest singular value of the stored weights' linear map, in float64."""
    with torch.no_grad():
        fixed: Any = copy.deepcopy(settled(layer)).double()
    fixed.bias = None
    return float(np.linalg.norm(dense_matrix(fixed, shape), 2))


def measured(count: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """For each kind of layer: how many, and the largest, smallest and middle norms left."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for i in range(count):
        kind = [*KINDS][i % len(KINDS)]
        draw = random.Random(f"{seed} {i}")
        torch.manual_seed(1000 * seed + i)
        layer, shape, size = KINDS[kind](draw)
        weight = layer.get_parameter("weight")
        with torch.no_grad():
            weight.normal_().mul_(10 ** draw.uniform(-2, 2))
            if draw.random() < 0.25:
                weight.abs_()
        theirs = parametrizations.spectral_norm(copy.deepcopy(layer), n_power_iterations=50).eval()
        own = spectral_norm(layer, input_shape=size).eval()
        found[kind].append((norm(own, shape), norm(theirs, shape)))
    table = {}
    for kind, pairs in found.items():
        own, theirs = ([pair[i] for pair in pairs] for i in (0, 1))
        table[kind] = {
            "layers": len(pairs),
            "own_max": max(own),
            "own_min": min(own),
            "own_median": statistics.median(own),
            "torch_max": max(theirs),
            "torch_median": statistics.median(theirs),
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    table = measured(given.count)
    for kind, row in table.items():
        print(kind, {name: round(value, 6) for name, value in row.items()}, sep="\t")
    if given.keep is not None:
        given.keep.parent.mkdir(parents=True, exist_ok=True)
        given.keep.write_text(json.dumps({"torch": torch.__version__, "norms": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
