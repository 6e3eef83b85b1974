"""A plain ResNet with `lipkit.parametrize.spectral_norm` on every layer by one line, beside torch's own spectral norm.

    LIPKIT_DATA=data python -m benchmarks.resnet_norms --keep records/parametrize/resnet.json

CIFAR-10, the same batches and seed, Adam, cross-entropy of the logits times 16; in turns, one thread, process time.
Afterwards: the proved bound of each export, and certified accuracy of the first test images.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import lipkit
from lipkit.data import load
from lipkit.memory import keep_freed_memory
from lipkit.parametrize import gaps, spectral_norm


class Block(nn.Module):
    """relu(conv(relu(conv(x))) + shortcut(x))."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(cin, cout, 3, stride, 1), nn.Conv2d(cout, cout, 3, 1, 1)
        self.shortcut = nn.Identity() if (cin, stride) == (cout, 1) else nn.Conv2d(cin, cout, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.two(torch.relu(self.one(x))) + self.shortcut(x))


def resnet(width: int = 16) -> nn.Sequential:
    """Three blocks between a convolution and the mean."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        Block(width, width, 1),
        Block(width, 2 * width, 2),
        Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def by_torch(net: nn.Module) -> nn.Module:
    for module in list(net.modules()):
        if isinstance(module, nn.Conv2d | nn.Linear):
            parametrizations.spectral_norm(module)
    return net


HOW: dict[str, Callable[[nn.Module], Any]] = {"lipkit": spectral_norm, "torch": by_torch, "none": lambda net: net}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tested", type=int, default=500)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    data = load("cifar10")
    torch.manual_seed(0)
    start = resnet()
    nets = {how: make(copy.deepcopy(start)) for how, make in HOW.items()}
    optimisers = {how: torch.optim.Adam(net.parameters()) for how, net in nets.items()}
    schedules = {
        how: torch.optim.lr_scheduler.OneCycleLR(one, 4e-3, total_steps=given.steps) for how, one in optimisers.items()
    }
    times: dict[str, list[float]] = {how: [] for how in nets}
    losses: dict[str, list[float]] = {how: [] for how in nets}
    for _ in range(given.steps):
        x, y = data.train.batch(torch.randint(len(data.train), (given.batch,)))
        for how, net in nets.items():
            begin = time.process_time()
            optimisers[how].zero_grad()
            loss = nn.functional.cross_entropy(16 * net(x - 0.5), y)
            loss.backward()
            optimisers[how].step()
            times[how].append(time.process_time() - begin)
            losses[how].append(loss.item())
            schedules[how].step()
    x, y = data.test.batch(slice(given.tested))
    x = x - 0.5
    found: dict[str, dict[str, Any]] = {}
    ratios = {how: statistics.median(a / b for a, b in zip(times[how], times["torch"], strict=True)) for how in nets}
    for how, net in nets.items():
        plain = lipkit.export(net.eval(), (3, 32, 32))
        certified = lipkit.certify(plain, x, y)
        every = max(given.steps // 20, 1)
        curve = [statistics.fmean(losses[how][i : i + every]) for i in range(0, given.steps, every)]
        found[how] = {
            "bound": float(lipkit.lipschitz(plain)),
            "clean": certified.accuracy(0.0),
            "certified_0.05": certified.accuracy(0.05),
            "certified_0.1": certified.accuracy(0.1),
            "median_radius": float(certified.radius[certified.prediction == certified.label].median()),
            "step_over_torch": ratios[how],
            "loss": [round(value, 4) for value in curve],
        }
        print(how, found[how], flush=True)
    pairs = gaps(nets["lipkit"]).values()
    found["lipkit"]["gap"] = [round(proved / estimate - 1, 5) for estimate, proved in pairs]
    print("gap", found["lipkit"]["gap"])
    if given.keep is not None:
        given.keep.parent.mkdir(parents=True, exist_ok=True)
        options = {"steps": given.steps, "batch": given.batch, "tested": given.tested, "torch": torch.__version__}
        given.keep.write_text(json.dumps({**options, "networks": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
