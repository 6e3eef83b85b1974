"""What rounding costs a certificate: accuracies and radii for each evaluator, and the time of `certify`.

    python benchmarks/rounding.py --root DATA mnist --network mnist-cayley
    python benchmarks/rounding.py --root DATA cifar10 --network RUN/network --test 1000

The network comes with lipkit or was exported by `lipkit train`; it is certified on the first test images.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import lipkit
from lipkit import certify, modules
from lipkit.certificates.evaluators import machine
from lipkit.data import load
from lipkit.errors import LipkitError
from lipkit.text import table

EPS = 36 / 255
STATEMENTS: dict[str, dict[str, str]] = {
    "rounding ignored": {"rounding": "ignore"},
    "float64": {"evaluator": "float64"},
    "float32": {"evaluator": "float32"},
    "float32, blocked": {"evaluator": "float32_blocked"},
    "integer": {"evaluator": "integer"},
}


def measure(network: modules.Network, x: torch.Tensor, y: torch.Tensor) -> list[list[str]]:
    """One row for each statement."""
    rows = []
    for name, options in STATEMENTS.items():
        start = time.process_time()
        try:
            found = certify(network, x, y, **options)
        except LipkitError as error:
            print(f"{name}: {error}")
            continue
        seconds = time.process_time() - start
        lost = (found.radius_ignored - found.radius)[found.correct & (found.radius_ignored > 0)]
        rows.append(
            [
                name,
                f"{100 * found.clean_accuracy:.2f}",
                f"{100 * found.accuracy(EPS):.2f}",
                f"{255 * float(lost.median()):.2g}",
                f"{255 * float(lost.max()):.2g}",
                f"{seconds:.1f}",
            ]
        )
    return rows


def actual(network: modules.Network, x: torch.Tensor) -> list[tuple[str, float]]:
    """What float32 evaluations of these samples really lose: largest error of a difference of two logits."""
    with torch.no_grad():
        exact = machine(network, "float64")(x.double())
        found = []
        for name in ("float32", "float32_blocked"):
            error = machine(network, name)(x).double() - exact
            found.append((name, float((error.amax(1) - error.amin(1)).max())))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=("mnist", "cifar10"))
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--network", required=True, help="a folder, or a name of lipkit list networks")
    parser.add_argument("--test", type=int, default=10000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.nnpack.set_flags(False)
    network = lipkit.load(args.network)
    x, y = load(args.data, root=args.root).test.batch(torch.arange(args.test))
    header = ["statement", "clean %", "certified % at 36/255", "radius lost / 255: median", "largest", "seconds"]
    print(table(header, measure(network, x, y), markdown=True))
    for name, error in actual(network, x[:1000]):
        print(f"{name}: logit differences of 1000 samples are off by at most {error:.2g}")


if __name__ == "__main__":
    main()
