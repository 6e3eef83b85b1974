"""Networks with their own forward pass the whole way, at true size: constant, lower bound found, rounding, time.

    python -m benchmarks.own_forward                 # all twelve, minutes
    python -m benchmarks.own_forward LeNet VGG-11

Weights are torch's initial values; statistics of batch normalisation are those of a new network. Times are process
times of one thread. Two networks have a constant on the box [0, 1] only.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from benchmarks.architectures import NETWORKS, ON_A_BOX

from lipkit import certify, export, lipschitz
from lipkit.analysis import lipschitz_lower_bound


def row(name: str) -> str:
    """One row of the table."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model = make().eval()
    count = sum(p.numel() for p in model.parameters())
    start = time.process_time()
    plain = export(model, shape, box=(0.0, 1.0) if name in ON_A_BOX else None)
    exported = time.process_time() - start
    start = time.process_time()
    bound = float(lipschitz(plain))
    bounded = time.process_time() - start
    lower = lipschitz_lower_bound(plain.double(), restarts=1, steps=10).lower
    plain = plain.float()
    x = torch.rand(4, *shape)
    kept = "-"
    if plain(x).ndim == 2:
        labels = plain(x).argmax(1)
        start = time.process_time()
        radii = [certify(plain, x, labels, rounding=rounding).radius for rounding in ("sound", "ignore")]
        share = statistics.median((radii[0] / radii[1]).tolist())
        kept = f"{radii[1].median():.2g} ({100 * (1 - share):.2g} % lost)"
    error = float((plain(x) - model(x)).detach().abs().max() / model(x).detach().abs().max())
    row = [name, f"{count / 1e6:.2f} M", f"{bound:.4g}", f"{lower:.3g}", f"{exported:.1f}", f"{bounded:.1f}", kept]
    return f"| {' | '.join(row)} | {error:.0e} |"


def main() -> None:
    print("| network | parameters | constant | search | export, s | constant, s | radius | difference |")
    print("|---|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or NETWORKS:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
