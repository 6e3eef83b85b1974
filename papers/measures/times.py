"""Run times of LipConvnets, of their third block and of matrix exponentials, by the clocks of ``benchmarks.speed``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lipkit.linalg.exponential import skew_bound, skew_part, taylor
from lipkit.lowering import export
from lipkit.models import lipconvnet
from lipkit.models.convolutional import BLOCKS
from papers.measures.speed import benchmark


def _times(work: Mapping[str, Callable[[], object]], seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    """Median time of each contender over the first one's, and in ms; the contenders take turns."""
    clock = benchmark("clock")
    samples = clock.interleaved(work, clock.cpu_clock, seconds=seconds, least=2)
    ratio = benchmark("ratios")
    first = next(iter(samples))
    return (
        {name: ratio.ratio(times, samples[first]) for name, times in samples.items()},
        {name: 1e3 * ratio.median(times) for name, times in samples.items()},
    )


def lipconvnet_step(
    *,
    seed: int = 0,
    root: Path | None = None,
    depth: int,
    network: Mapping[str, Any],
    over: Mapping[str, Any],
    width: float = 1.0,
    batch: int = 128,
    seconds: float = 5.0,
) -> dict[str, float]:
    """A training step of a LipConvnet on 3 x 32 x 32 images over that of another one.

    Args:
        depth, width: of both.
        network, over: further options of `lipkit.models.lipconvnet`.
        batch: images of a step: forward, cross-entropy, backward, Adam.
        seconds: budget of each of the two, which take turns; at least two steps each.

    Returns:
        ``ratio`` of the medians, and ``ms``, process time of one step on one thread.
    """
    with torch.random.fork_rng(devices=[]), benchmark("clock").measuring("cpu"):
        torch.manual_seed(seed)
        both = {"over": over, "network": network}
        step = benchmark("networks").step
        work = {name: step(lipconvnet(depth, width=width, **o), batch) for name, o in both.items()}
        ratios, ms = _times(work, seconds)
    return {"ratio": ratios["network"], "ms": ms["network"]}


def block_evaluation(
    *, seed: int = 0, root: Path | None = None, depth: int, width: float = 1.0, batch: int = 128, seconds: float = 3.0
) -> dict[str, float]:
    """Evaluation of the third block of a LipConvnet of SOC layers over that of ECO layers, exported.

    ``convolutions`` is the comparison in [ECO]: weights are computed beforehand, SOC takes 10 convolutions per layer.

    Args:
        depth, width: of the network, whose block has depth / 5 convolutions on 6 x 6 pixels.
        batch: images.
        seconds: budget of each contender, which take turns.

    Returns:
        ``convolutions``, ``layers`` and ``exported``: time of SOC's Taylor recurrence (its export with zero padding),
        of its layers in evaluation mode, which bound their kernel at each call, and of their export with circular
        padding, one Fourier convolution; all relative to ECO's export, which takes ``ms``.
    """
    with torch.random.fork_rng(devices=[]), benchmark("clock").measuring("cpu"):
        torch.manual_seed(seed)
        blocks = {family: third_block(depth, family, width).eval() for family in ("eco", "soc")}
        blocks["convolutions"] = third_block(depth, "soc", width, padding_mode="zeros").eval()
        channels = max(2, 2 * round(BLOCKS[1][1] * width / 2))
        x = torch.rand(batch, channels, 6, 6)
        fixed = {family: export(block, (channels, 6, 6)) for family, block in blocks.items()}
        forward = benchmark("work").forward_pass
        work = {name: forward(block, x) for name, block in fixed.items()} | {"layers": forward(blocks["soc"], x)}
        ratios, ms = _times(work, seconds)
    exported = {"convolutions": ratios["convolutions"], "exported": ratios["soc"]}
    return {"layers": ratios["layers"], **exported, "ms": ms["eco"]}


def third_block(depth: int, family: str, width: float = 1.0, **options: Any) -> nn.Sequential:
    """The third block of ``lipconvnet(depth, layer=family, last_options=options)``: convolutions, MaxMin after each.

    >>> [type(layer).__name__ for layer in third_block(10, "eco", 0.1)]
    ['EcoConv2d', 'MaxMin', 'EcoConv2d', 'MaxMin']
    """
    network = lipconvnet(depth, layer=family, width=width, last_options=options)
    layers = [layer for layer in network if not isinstance(layer, nn.ZeroPad2d)]
    each = 2 * depth // len(BLOCKS)
    return nn.Sequential(*layers[2 * each : 3 * each])


def exponential(
    *,
    seed: int = 0,
    root: Path | None = None,
    channels: int,
    count: int = 5,
    terms: int = 10,
    seconds: float = 3.0,
) -> dict[str, float]:
    """Time of the exact exponential of a layer's skew matrices over that of their Taylor polynomial, without gradients.

    Args:
        seed: of the matrices, normal and divided by a bound of their norm.
        channels: size of the matrices.
        count: how many; 5 for kernels of 3 x 3.
        terms: T, the degree.
        seconds: budget of each of the two, which take turns.

    Returns:
        ``ratio`` of the medians, and ``ms`` of the polynomial; process time on one thread.
    """
    generator = torch.Generator().manual_seed(seed)
    a = skew_part(torch.randn(count, channels, channels, generator=generator))
    a = a / skew_bound(a)[:, None, None]
    with benchmark("clock").measuring("cpu"), torch.inference_mode():
        work = {"truncated": lambda: taylor(a, terms), "exact": lambda: torch.linalg.matrix_exp(a)}
        ratios, ms = _times(work, seconds)
    return {"ratio": ratios["exact"], "ms": ms["truncated"]}
