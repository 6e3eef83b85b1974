"""Run times of layers, networks and matrix exponentials, as ratios, by the clocks of ``benchmarks.speed``.

All are process times of one thread. The contenders take turns, for ``seconds`` each and at least twice; a ratio is one
of median times. A step of training is forward pass, cross-entropy, backward pass and Adam, on ``batch`` random images;
its measurements give ``ratio``, and ``ms`` of one step.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.speed import work
from benchmarks.speed.clock import Work, cpu_clock, interleaved, measuring, median, ratio
from benchmarks.speed.networks import CIRCULAR, step
from benchmarks.speed.shapes import Shape
from torch import nn

from lipkit import models
from lipkit.errors import OptionError
from lipkit.experiments.recipe import load_recipe
from lipkit.layers.families import get
from lipkit.linalg.exponential import skew_bound, skew_part, taylor
from lipkit.lowering import export
from lipkit.models import lipconvnet
from lipkit.models.convolutional import BLOCKS


def times(
    seed: int, make: Callable[[], Mapping[str, Work]], seconds: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Median times of the contenders, by name: relative to the first, and in ms. ``make`` builds them, seeded."""
    with torch.random.fork_rng(devices=[]), measuring("cpu"):
        torch.manual_seed(seed)
        samples = interleaved(make(), cpu_clock, seconds=seconds, least=2)
    first = next(iter(samples.values()))
    return (
        {name: ratio(one, first) for name, one in samples.items()},
        {name: 1e3 * median(one) for name, one in samples.items()},
    )


def compared(seed: int, make: Callable[[], tuple[Work, Work]], seconds: float) -> dict[str, float]:
    """Time of the second contender: ``ratio`` to that of the first, and ``ms``."""
    ratios, ms = times(seed, lambda: dict(zip(("plain", "other"), make(), strict=True)), seconds)
    return {"ratio": ratios["other"], "ms": ms["other"]}


def network_step(
    *,
    seed: int = 0,
    model: str,
    layer: str,
    batch: int = 128,
    seconds: float = 5.0,
    **options: Any,
) -> dict[str, float]:
    """Time of a training step on 3 x 32 x 32 images, relative to the same network with plain circular convolutions.

    Args:
        model: name of the architecture, ``lipkit list models``.
        layer: acronym of the family, or ``plain_conv``: plain convolutions in front of Cayley's dense layers.
        options: of both networks.
    """
    make, own = partial(models.build, model, **options), CIRCULAR if layer == "plain_conv" else {}
    return compared(
        seed, lambda: (step(make(layer="plain", **CIRCULAR), batch), step(make(layer=layer, **own), batch)), seconds
    )


def recipe_step(
    *,
    seed: int = 0,
    recipe: str,
    over: str,
    set: Sequence[str] = (),
    both: Sequence[str] = (),
    side: int = 32,
    classes: int = 100,
    batch: int | None = None,
    seconds: float = 5.0,
) -> dict[str, float]:
    """Time of a training step of a recipe's network, relative to another recipe's.

    Args:
        recipe, set: a packaged recipe and its changes.
        over: the other recipe.
        both: changes made to both recipes.
        side, classes: height and width of the random RGB images, and number of outputs.
        batch: None for the batch size of each recipe.
    """
    shape = (3, side, side)

    def contender(name: str, changes: Sequence[str]) -> Work:
        read = load_recipe(name, list(changes))
        network = models.build(read.model.name, input_shape=shape, classes=classes, **read.model.options)
        return step(network, batch or read.train.batch_size, shape=shape)

    return compared(seed, lambda: (contender(over, both), contender(recipe, [*set, *both])), seconds)


def lipconvnet_step(
    *,
    seed: int = 0,
    depth: int,
    network: Mapping[str, Any],
    over: Mapping[str, Any],
    width: float = 1.0,
    batch: int = 128,
    seconds: float = 5.0,
) -> dict[str, float]:
    """Time of a training step of a LipConvnet on 3 x 32 x 32 images, relative to another one.

    Args:
        depth, width: of both networks.
        network, over: further options of `lipkit.models.lipconvnet`, for the two networks.
    """
    make = partial(lipconvnet, depth, width=width)
    return compared(seed, lambda: (step(make(**over), batch), step(make(**network), batch)), seconds)


def layer_step(
    *,
    seed: int = 0,
    family: str,
    vary: str,
    values: Sequence[int],
    batch: int = 128,
    seconds: float = 0.6,
    cin: int = 32,
    cout: int = 32,
    side: int = 16,
) -> dict[str, float]:
    """Time of a layer's forward and backward pass, relative to the plain circular convolution of the same shape.

    Args:
        family: acronym of the layer.
        vary: the quantity that varies: ``channels`` (cin and cout), ``cin``, ``cout``, ``side`` or ``kernel``.
        values: its values, one for each point of the curve.
        cin, cout, side: of the layer, where they do not vary; the kernel is then 3.

    Returns:
        ``ratio(V)`` and ``ms(V)`` for each value V.
    """
    fixed = {"cin": cin, "cout": cout, "side": side, "kernel": 3}
    if vary not in ("channels", *fixed):
        raise OptionError(f"vary: expected channels, {', '.join(fixed)}, got {vary!r}")
    figures: dict[str, float] = {}
    for value in values:
        c = fixed | ({"cin": value, "cout": value} if vary == "channels" else {vary: value})
        one = compared(seed, partial(layer_and_plain, family, batch, **c), seconds)
        figures |= {f"{name}({value})": figure for name, figure in one.items()}
    return figures


def layer_and_plain(family: str, batch: int, cin: int, cout: int, side: int, kernel: int) -> tuple[Work, Work]:
    """Training steps of a plain circular convolution, and of the family's layer of the same shape."""
    plain = nn.Conv2d(cin, cout, kernel, padding=kernel // 2, padding_mode="circular")
    tensors = work.tensors(Shape(cin, cout, side), batch, "cpu")
    return work.train_step(plain, *tensors), work.train_step(get(family).conv(cin, cout, kernel), *tensors)


def block_evaluation(
    *, seed: int = 0, depth: int, width: float = 1.0, batch: int = 128, seconds: float = 3.0
) -> dict[str, float]:
    """Evaluation time of the third block of a LipConvnet of SOC layers, relative to that of exported ECO layers.

    Args:
        depth, width: of the network, whose block has depth / 5 convolutions on 6 x 6 pixels.

    Returns:
        Three forms of the SOC block, relative to ECO's export, which takes ``ms``: ``convolutions``, the export with
        zero padding, 10 convolutions per layer with weights computed beforehand, as [ECO] compares; ``layers``, the
        layers in evaluation mode, which bound their kernel at each call; ``exported``, the export with circular
        padding, one Fourier convolution per layer.
    """

    def make() -> dict[str, Work]:
        blocks = {family: third_block(depth, family, width).eval() for family in ("eco", "soc")}
        blocks["convolutions"] = third_block(depth, "soc", width, padding_mode="zeros").eval()
        channels = max(2, 2 * round(BLOCKS[1][1] * width / 2))
        x = torch.rand(batch, channels, 6, 6)
        fixed = {family: export(block, (channels, 6, 6)) for family, block in blocks.items()}
        forward = work.forward_pass
        return {name: forward(block, x) for name, block in fixed.items()} | {"layers": forward(blocks["soc"], x)}

    ratios, ms = times(seed, make, seconds)
    exported = {"convolutions": ratios["convolutions"], "exported": ratios["soc"]}
    return {"layers": ratios["layers"], **exported, "ms": ms["eco"]}


def third_block(depth: int, family: str, width: float = 1.0, **options: Any) -> nn.Sequential:
    """The third block of ``lipconvnet(depth, layer=family, last_options=options)``: convolutions, each with a MaxMin.

    >>> [type(layer).__name__ for layer in third_block(10, "eco", 0.1)]
    ['EcoConv2d', 'MaxMin', 'EcoConv2d', 'MaxMin']
    """
    network = lipconvnet(depth, layer=family, width=width, last_options=options)
    layers = [layer for layer in network if not isinstance(layer, nn.ZeroPad2d)]
    each = 2 * depth // len(BLOCKS)
    return nn.Sequential(*layers[2 * each : 3 * each])


def exponential(*, seed: int = 0, channels: int, seconds: float = 3.0) -> dict[str, float]:
    """Time of the exact exponential of a layer's skew matrices, relative to a Taylor polynomial, without gradients.

    The layer has a 3 x 3 kernel, and so five matrices; the polynomial is of degree 10.

    Args:
        seed: of the matrices: the skew part of normal ones, divided by a bound of its norm.
        channels: size of the matrices.

    Returns:
        ``ratio``, and ``ms`` of the polynomial.
    """
    a = skew_part(torch.randn(5, channels, channels, generator=torch.Generator().manual_seed(seed)))
    a = a / skew_bound(a)[:, None, None]
    both = {"truncated": lambda: taylor(a, 10), "exact": lambda: torch.linalg.matrix_exp(a)}
    with torch.inference_mode():
        ratios, ms = times(seed, lambda: both, seconds)
    return {"ratio": ratios["exact"], "ms": ms["truncated"]}
