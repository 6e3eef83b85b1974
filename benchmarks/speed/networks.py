"""Whole networks: one training step at CIFAR-10's size, against the same network of plain layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.speed.clock import Work, clock_of, interleaved
from benchmarks.speed.work import half_precision
from torch import nn

from lipkit.models import kwlarge, lipconvnet

INPUT, CLASSES, IMAGES = (3, 32, 32), 10, 50_000
Build = Callable[[], nn.Module]

CIRCULAR: dict[str, Any] = {"padding_mode": "circular"}
PLAIN_KWLARGE = partial(kwlarge, "plain", **CIRCULAR)
PLAIN_LIPCONVNET = partial(lipconvnet, 20, layer="plain", first_options=CIRCULAR, last_options=CIRCULAR)
# By title: the constrained network, and the same one of plain layers with circular convolutions.
NETWORKS: dict[str, tuple[Build, Build]] = {
    **{
        f"KWLarge ({family})": (partial(kwlarge, family), PLAIN_KWLARGE) for family in ("cayley", "bcop", "rko", "ossn")
    },
    "LBDN small (sandwich)": (
        partial(kwlarge, "sandwich", dense=(512, 512)),
        partial(PLAIN_KWLARGE, dense=(512, 512), activation="relu"),
    ),
    "LipConvnet-20 (soc, eco)": (partial(lipconvnet, 20), PLAIN_LIPCONVNET),
    "LipConvnet-20 (eco)": (partial(lipconvnet, 20, layer="eco"), PLAIN_LIPCONVNET),
}


def step(
    network: nn.Module, batch: int, device: str = "cpu", *, shape: tuple[int, ...] = INPUT, autocast: bool = False
) -> Work:
    """One step of training on images of this shape: cross-entropy, backward, Adam."""
    network = network.to(device).train()
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(batch, *shape, generator=generator).to(device)
    labels = torch.randint(CLASSES, (batch,), generator=generator).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)

    def run() -> None:
        optimizer.zero_grad()
        with half_precision(device, autocast):
            loss = F.cross_entropy(network(x), labels)
        loss.backward()
        optimizer.step()

    return run


def measure(
    title: str, batch: int, device: str = "cpu", *, seconds: float = 3.0, repeats: int = 10, autocast: bool = False
) -> dict[str, list[float | None]]:
    """Samples of ``plain`` and ``lipkit`` for one network, in turns."""
    torch.manual_seed(0)
    build, plain = NETWORKS[title]
    work = {
        name: step(make(), batch, device, autocast=autocast) for name, make in (("plain", plain), ("lipkit", build))
    }
    return interleaved(work, clock_of(device), seconds=seconds, repeats=repeats, least=min(2, repeats))


def epoch(seconds: float, batch: int) -> float:
    """Seconds of one epoch of CIFAR-10 at this pace, without data loading and evaluation.

    >>> epoch(0.5, 128)
    195.5
    """
    return seconds * -(-IMAGES // batch)
