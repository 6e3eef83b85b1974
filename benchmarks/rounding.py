"""What rounding costs a certificate: accuracies and radii for each evaluator, and the time of `certify`.

    python benchmarks/rounding.py --root DATA mnist
    python benchmarks/rounding.py --root DATA cifar10

A network of the recipe's architecture (mnist_cayley: small; cifar10: kwlarge, both Cayley) is trained for a few steps
of Adam on the first training images, with the hinge loss of the recipes, and certified on the first test images; or
--network names one that `lipkit train` exported, or one that comes with lipkit.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import lipkit
from lipkit import certify, export, models, modules
from lipkit.certificates.evaluators import machine
from lipkit.data import Data, load
from lipkit.errors import LipkitError
from lipkit.text import table
from lipkit.training.options import chosen

EPS = 36 / 255
STATEMENTS: dict[str, dict[str, str]] = {
    "rounding ignored": {"rounding": "ignore"},
    "float64": {"evaluator": "float64"},
    "float32": {"evaluator": "float32"},
    "float32, blocked": {"evaluator": "float32_blocked"},
    "integer": {"evaluator": "integer"},
}


def trained(name: str, data: Data, samples: int, epochs: int, batch_size: int) -> modules.Network:
    """The recipe's model after ``epochs`` passes over the first ``samples`` training images."""
    torch.manual_seed(0)
    model = models.small(input_shape=(1, 28, 28)) if name == "mnist" else models.kwlarge()
    loss_of = chosen("loss", "hinge", eps0=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps = epochs * max(1, samples // batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(epochs):
        for index in torch.randperm(samples).split(batch_size)[: max(1, samples // batch_size)]:
            x, y = data.train.batch(index)
            optimizer.zero_grad()
            loss_of(model(x), y).mean().backward()
            optimizer.step()
            schedule.step()
    network = export(model.eval(), tuple(data.train.batch(torch.arange(1))[0].shape[1:]))
    network.input_range = (0.0, 1.0)
    return network


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
    parser.add_argument(
        "--network", help="an exported network instead of training one: a folder, or a name of lipkit list networks"
    )
    parser.add_argument("--train", type=int, default=6000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--test", type=int, default=10000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.nnpack.set_flags(False)
    data = load(args.data, root=args.root)
    start = time.process_time()
    if args.network is None:
        network = trained(args.data, data, args.train, args.epochs, args.batch_size)
        print(f"trained on {args.train} images in {time.process_time() - start:.0f} s")
    else:
        network = lipkit.load(args.network)
    x, y = data.test.batch(torch.arange(args.test))
    header = ["statement", "clean %", "certified % at 36/255", "radius lost / 255: median", "largest", "seconds"]
    print(table(header, measure(network, x, y), markdown=True))
    for name, error in actual(network, x[:1000]):
        print(f"{name}: logit differences of 1000 samples are off by at most {error:.2g}")


if __name__ == "__main__":
    main()
