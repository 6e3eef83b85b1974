"""Bounds of all convolutions of well-known networks: time and tightness of each method against 10 power iterations.

    python benchmarks/networks.py --budget 45

One thread, one network after the other; each distinct convolution is timed once and counts as often as it occurs. The
power method is the one of the paper's tables: 10 iterations of convolution and transposed convolution on one image of
the layer's true size, which gives a LOWER estimate. Shapes are the published ones, weights torch's initial values.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict

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
    known: dict[str, dict[Conv, tuple[float, float]]] = defaultdict(dict)
    methods = ["power", *arguments.methods]
    print("seconds for all convolutions (geometric mean of bound / power estimate)\n")
    print(f"| network | convolutions | {' | '.join(methods)} |\n|{'---|' * (len(methods) + 2)}")
    for name in arguments.networks:
        convs, cells = [*NETWORKS[name]()], []
        for method in methods:
            found, power = known[method], known["power"]
            for conv in convs:
                if conv not in found and sum(seconds for seconds, _ in found.values()) < arguments.budget:
                    found[conv] = measure(method, conv)
            if any(conv not in found for conv in convs):
                cells.append("over budget")
                continue
            seconds = sum(found[conv][0] for conv in convs)
            if any(conv not in power for conv in convs):
                cells.append(f"{seconds:.2f}")
                continue
            mean = statistics.geometric_mean(found[conv][1] / power[conv][1] for conv in convs)
            reference = sum(power[conv][0] for conv in convs)
            speed = "" if method == "power" else f", {reference / seconds:.2g}x as fast"
            cells.append(f"{seconds:.2f}{speed} ({mean:.3f})")
        print(f"| {name} | {len(convs)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
