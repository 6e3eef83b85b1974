"""Run times of layers and networks as ratios to plain ones, by the clocks of ``benchmarks.speed``."""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lipkit
from lipkit import models
from lipkit.errors import OptionError
from lipkit.experiments.recipe import load_recipe
from lipkit.layers.families import get


def benchmark(name: str) -> Any:
    """Import a module of ``benchmarks.speed``, a folder of the source tree that is not in the wheel.

    Raises:
        OptionError: there is no folder ``benchmarks`` beside the sources.

    >>> benchmark("shapes").Shape(3, 8, 16).input_shape
    (3, 16, 16)
    """
    root = Path(lipkit.__file__).parents[2]
    if not (root / "benchmarks" / "speed").is_dir():
        raise OptionError(f"run times: expected the source tree of lipkit, with benchmarks/speed, got {root}")
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return importlib.import_module(f"benchmarks.speed.{name}")


def _ratio(samples: dict[str, list[float | None]]) -> tuple[float, float]:
    """Median over the rounds of the layer's time over the plain one's, and the layer's median time in ms."""
    both = [(t, r) for t, r in zip(samples["layer"], samples["plain"], strict=True) if t is not None and r is not None]
    return statistics.median(t / r for t, r in both), 1e3 * statistics.median(t for t, _ in both)


def network_step(
    *,
    seed: int = 0,
    root: Path | None = None,
    model: str,
    layer: str,
    batch: int = 128,
    seconds: float = 5.0,
    **options: Any,
) -> dict[str, float]:
    """A training step of a network on 3 x 32 x 32 images over that of the same network of plain circular layers.

    Args:
        model: name of the architecture, ``lipkit list models``.
        layer: acronym of the family, or ``plain_conv``: plain convolutions before Cayley's dense layers.
        batch: images of a step: forward, cross-entropy, backward, Adam.
        seconds: budget of each of the two, which take turns; at least two steps each.
        options: of both networks.

    Returns:
        ``ratio``, median over the turns, and ``ms``, process time of one step on one thread.
    """
    clock, networks = benchmark("clock"), benchmark("networks")
    circular = {"padding_mode": "circular"}
    with torch.random.fork_rng(devices=[]), clock.measuring("cpu"):
        torch.manual_seed(seed)
        plain = models.build(model, layer="plain", **circular, **options)
        network = models.build(model, layer=layer, **(circular if layer == "plain_conv" else {}), **options)
        work = {"plain": networks.step(plain, batch), "layer": networks.step(network, batch)}
        ratio, ms = _ratio(clock.interleaved(work, clock.cpu_clock, seconds=seconds, least=2))
    return {"ratio": ratio, "ms": ms}


def recipe_step(
    *,
    seed: int = 0,
    root: Path | None = None,
    recipe: str,
    over: str,
    set: Sequence[str] = (),
    both: Sequence[str] = (),
    side: int = 32,
    classes: int = 100,
    batch: int | None = None,
    seconds: float = 5.0,
) -> dict[str, float]:
    """A training step of a recipe's network over that of another recipe's.

    Args:
        recipe, set: a packaged recipe and its changes.
        over: the other recipe.
        both: changes made to both recipes.
        side, classes: of the random images, 3 x side x side, and of the outputs.
        batch: images of a step: forward, cross-entropy, backward, Adam. None: those of the recipe.
        seconds: budget of each of the two, which take turns; at least two steps each.

    Returns:
        ``ratio``, median over the turns, and ``ms``, process time of one step on one thread.
    """
    clock, networks = benchmark("clock"), benchmark("networks")
    shape = (3, side, side)
    with torch.random.fork_rng(devices=[]), clock.measuring("cpu"):
        torch.manual_seed(seed)
        work = {}
        for name, read in (("plain", load_recipe(over, list(both))), ("layer", load_recipe(recipe, [*set, *both]))):
            network = models.build(read.model.name, input_shape=shape, classes=classes, **read.model.options)
            work[name] = networks.step(network, batch or read.train.batch_size, shape=shape)
        ratio, ms = _ratio(clock.interleaved(work, clock.cpu_clock, seconds=seconds, least=2))
    return {"ratio": ratio, "ms": ms}


def layer_step(
    *,
    seed: int = 0,
    root: Path | None = None,
    family: str,
    vary: str,
    values: Sequence[int],
    batch: int = 128,
    seconds: float = 0.6,
    cin: int = 32,
    cout: int = 32,
    side: int = 16,
    kernel: int = 3,
) -> dict[str, float]:
    """Forward and backward pass of a layer over those of the plain circular convolution of its shape.

    Args:
        family: acronym of the layer.
        vary: the quantity that varies: ``channels`` (cin and cout), ``cin``, ``cout``, ``side`` or ``kernel``.
        values: of that quantity, one for each point of the curve.
        batch: images.
        seconds: budget of each of the two, which take turns, at each point.
        cin, cout, side, kernel: of the layer, where they do not vary.

    Returns:
        ``ratio(V)`` and ``ms(V)`` for each value V.
    """
    fixed = {"cin": cin, "cout": cout, "side": side, "kernel": kernel}
    if vary not in ("channels", *fixed):
        raise OptionError(f"vary: expected channels, {', '.join(fixed)}, got {vary!r}")
    clock, work, shapes = benchmark("clock"), benchmark("work"), benchmark("shapes")
    figures: dict[str, float] = {}
    for value in values:
        c = fixed | ({"cin": value, "cout": value} if vary == "channels" else {vary: value})
        with torch.random.fork_rng(devices=[]), clock.measuring("cpu"):
            torch.manual_seed(seed)
            plain = nn.Conv2d(c["cin"], c["cout"], c["kernel"], padding=c["kernel"] // 2, padding_mode="circular")
            layer = get(family).conv(c["cin"], c["cout"], c["kernel"])
            arguments = work.tensors(shapes.Shape(c["cin"], c["cout"], c["side"]), batch, "cpu")
            both = {"plain": work.train_step(plain, *arguments), "layer": work.train_step(layer, *arguments)}
            ratio, ms = _ratio(clock.interleaved(both, clock.cpu_clock, seconds=seconds))
        figures |= {f"ratio({value})": ratio, f"ms({value})": ms}
    return figures
