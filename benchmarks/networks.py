"""Bounds of all convolutions of well-known networks: time and tightness of each method against 10 power iterations.

    python benchmarks/networks.py --budget 45

One thread, one network after the other; each distinct convolution is timed once and counts as often as it occurs. The
power method is the one of the paper's tables: 10 iterations of convolution and transposed convolution on one image of
the layer's true size, which gives a LOWER estimate. Shapes are the published ones, weights torch's initial values.
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from papers.measures.networks import NETWORKS, Conv, measure

from lipkit.bounds import METHODS

# Those of docs/lab/networks.md; the others by --networks.
USUAL = ("AlexNet", "SqueezeNet", "ResNet-18", "DenseNet-121", "ResNet-50", "ResNet-152", "WRN-50-2", "VGG-16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", default=list(USUAL), choices=list(NETWORKS))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of one method before it is left out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[tuple[str, Conv], tuple[float, float]] = {}
    spent: Counter[str] = Counter()
    methods = ["power", *arguments.methods]
    print("seconds for all convolutions (geometric mean of bound / power estimate)\n")
    print(f"| network | convolutions | {' | '.join(methods)} |\n|{'---|' * (len(methods) + 2)}")
    for name in arguments.networks:
        counts = Counter(NETWORKS[name]())
        cells = []
        for method in methods:
            for conv in counts:
                if (method, conv) not in known and spent[method] < arguments.budget:
                    known[method, conv] = measure(method, conv)
                    spent[method] += known[method, conv][0]
            if any((method, conv) not in known for conv in counts):
                cells.append("over budget")
                continue
            seconds = sum(known[method, conv][0] * count for conv, count in counts.items())
            if any(("power", conv) not in known for conv in counts):
                cells.append(f"{seconds:.2f}")
                continue
            ratios = [known[method, conv][1] / known["power", conv][1] for conv in counts for _ in range(counts[conv])]
            mean = float(torch.tensor(ratios, dtype=torch.float64).log().mean().exp())
            reference = sum(known["power", conv][0] * count for conv, count in counts.items())
            speed = "" if method == "power" else f", {reference / seconds:.2g}x as fast"
            cells.append(f"{seconds:.2f}{speed} ({mean:.3f})")
        print(f"| {name} | {sum(counts.values())} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
