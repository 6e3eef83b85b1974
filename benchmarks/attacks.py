"""The table of docs/attacks.md: how near attacks come to the certified radii of random small networks, by family.

    OMP_NUM_THREADS=1 python benchmarks/attacks.py [--networks 1000] [--families bro,cholesky]

Each network is a convolution and two dense layers of one family on 1 x 4 x 4 inputs, three classes, at its random
initial weights after a random rescaling of the inputs; five samples each. The attacks run in float64 without a box. An
adversarial example inside a certified radius stops the program.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict

import torch
from torch import nn

from lipkit.attacks import fab, pgd, shrink
from lipkit.attacks.ascent import misclassified, norms
from lipkit.certificates import certify
from lipkit.layers import MaxMin, families
from lipkit.lowering import export
from lipkit.modules import Network
from lipkit.modules.storage import float64_copy

SHAPE = (1, 4, 4)


def random_network(family: str, seed: int) -> Network:
    """A small network of the family, exported."""
    made = families.get(family)
    between: list[nn.Module] = [] if made.own_activation else [MaxMin()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kernel = 1 if made.accepts(1, 4, 4) and seed % 4 == 3 else next(k for k in (3, 2, 1) if made.accepts(k, 4, 4))
        model = nn.Sequential(
            made.conv(1, 4, kernel), *between, nn.Flatten(), made.linear(64, 8), *between, made.last(8, 3)
        )
        return export(model.eval(), SHAPE)


def tightness(network: Network, seed: int, samples: int = 5) -> dict[str, list[float]]:
    """Certified radius over the distance of each attack, sample by sample.

    Raises:
        AssertionError: an attack lands inside a certified radius.
    """
    generator = torch.Generator().manual_seed(seed)
    exact = float64_copy(network)
    x = torch.rand(samples, *SHAPE, generator=generator, dtype=torch.float64)
    y = exact(x).argmax(dim=1)
    radius = certify(network, x, y).radius
    near = {"fab": fab(exact, x, y, box=None, steps=20, polish=4)}
    far = pgd(exact, x, y, eps=3 * radius.clamp_min(1e-3), steps=20, box=None)
    near["pgd"] = shrink(exact, x, far, y)
    found = {}
    for name, points in near.items():
        distance = norms(points, x)
        wrong = misclassified(exact(points), y)
        inside = wrong & (distance < radius)
        assert not inside.any(), f"{name}: {distance[inside].tolist()} inside {radius[inside].tolist()}"
        found[name] = (radius / distance)[wrong & (radius > 0)].tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", type=int, default=1000)
    parser.add_argument("--families", default=",".join(families.names()))
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.families.split(",")
    ratios: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in names}
    count = dict.fromkeys(names, 0)
    for seed in range(options.networks):
        family = names[seed % len(names)]
        count[family] += 1
        for attack, values in tightness(random_network(family, seed), seed).items():
            ratios[family][attack] += values
    print("| family | networks | FAB: median | largest | PGD: median | largest |\n|---|---|---|---|---|---|")
    for name in names:
        found = [ratios[name][attack] or [math.nan] for attack in ("fab", "pgd")]
        cells = [f"{kind(values):.3f}" for values in found for kind in (statistics.median, max)]
        print(f"| {name} | {count[name]} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
