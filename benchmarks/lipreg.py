"""The tables of docs/lab/lipreg.md: adversarial training with and without the regularisation, mean of three seeds.

    python benchmarks/lipreg.py
    python benchmarks/lipreg.py --data mnist --root DATA --limit 1500 --epochs 6 --samples 300 --rows AT "AT+LipReg 0.1"

Each row trains the recipe digits_at (`convnet`, PGD in the l_inf ball of 0.15) with another penalty. What is printed of
each network, exported: the product of the bounds of its regularised layers, by LipBound and by the supremum of the
symbol; the proved bound of the whole network; accuracy on test samples, clean and under PGD with margin loss, 40 steps
and 2 restarts (an upper limit of the accuracy under the best attack).
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

import lipkit
from lipkit import data as datasets
from lipkit import models
from lipkit.attacks import pgd
from lipkit.attacks.ascent import misclassified
from lipkit.training import LipschitzPenalty, PgdAdversary, fit

ATTACKS = [("linf", 0.1), ("linf", 0.15), ("linf", 0.2), ("l2", 0.5)]
ADVERSARY = PgdAdversary("linf", eps=0.15, steps=5, step_size=0.4)
ROWS: dict[str, tuple[PgdAdversary | None, LipschitzPenalty | None]] = {
    "no attack": (None, None),
    "AT": (ADVERSARY, None),
    "AT+LipReg 0.03": (ADVERSARY, LipschitzPenalty("lipbound", 0.03)),
    "AT+LipReg 0.1": (ADVERSARY, LipschitzPenalty("lipbound", 0.1)),
    "AT+LipReg 0.3": (ADVERSARY, LipschitzPenalty("lipbound", 0.3)),
    "AT+symbol_sup 0.1": (ADVERSARY, LipschitzPenalty("symbol_sup", 0.1)),
}


def measured(name: str, data: datasets.Data, seed: int, epochs: int, samples: int) -> list[float]:
    """Train one network and measure it: seconds, two products of bounds, the proved bound, accuracies."""
    adversary, penalty = ROWS[name]
    torch.manual_seed(seed)
    model = models.build("convnet", input_shape=data.input_shape, classes=len(data.classes))
    start = time.perf_counter()
    fit(
        model, data.train, epochs=epochs, batch_size=64, lr=0.01, loss="cross_entropy", seed=seed, accelerator="cpu",
        adversary=adversary, penalty=penalty,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    with torch.no_grad():
        products = [float(LipschitzPenalty(method, weight=1.0)(model).exp()) for method in ("lipbound", "symbol_sup")]
    network = lipkit.export(model, data.input_shape)
    x, y = data.test.batch(torch.arange(min(samples, len(data.test))))
    shares = [1 - float(misclassified(network(x), y).float().mean())]
    for norm, eps in ATTACKS:
        found = pgd(network, x, y, eps=eps, norm=norm, steps=40, restarts=2)
        shares.append(1 - float(misclassified(network(found), y).float().mean()))
    return [seconds, *products, float(lipkit.lipschitz(network)), *shares]


def line(name: str, runs: list[list[float]]) -> str:
    """One line of the table: means over the seeds; the products' are geometric."""
    seconds, *rest = zip(*runs, strict=True)
    bounds = [f"{statistics.geometric_mean(values):.3g}" for values in rest[:3]]
    shares = [f"{statistics.fmean(values):.3f}" for values in rest[3:]]
    return f"| {name} | {' | '.join([*bounds, *shares])} | {statistics.fmean(seconds):.0f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="digits")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=500, help="test samples attacked")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    data = datasets.load(chosen.data, root=chosen.root, limit=chosen.limit)
    heads = ["training", "LipBounds", "symbol suprema", "proved bound", "clean"]
    heads += [f"PGD {norm} {eps}" for norm, eps in ATTACKS]
    print(f"| {' | '.join([*heads, 'training time'])} |\n|---|{'---|' * len(heads)}")
    for name in chosen.rows:
        runs = [measured(name, data, seed, chosen.epochs, chosen.samples) for seed in range(chosen.seeds)]
        print(line(name, runs), flush=True)


if __name__ == "__main__":
    main()
