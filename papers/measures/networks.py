"""Bounds of all convolutions of well-known networks: time of a bound against ten power iterations.

Shapes are the published ones, and weights are torch's initial values. Each distinct convolution is timed once and
counted as often as it occurs.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.bounds import METHODS, lipbound_estimate
from lipkit.errors import OptionError
from lipkit.linalg.precision import on_threads


class Conv(NamedTuple):
    """Channels, kernel size, stride, and height of the input."""

    cin: int
    cout: int
    k: int
    stride: int
    n: int


def alexnet() -> Iterator[Conv]:
    """Convolutions of AlexNet (Krizhevsky et al.) in the variant with one tower."""
    yield from (Conv(3, 64, 11, 4, 224), Conv(64, 192, 5, 1, 27), Conv(192, 384, 3, 1, 13))
    yield from (Conv(384, 256, 3, 1, 13), Conv(256, 256, 3, 1, 13))


def vgg(depths: tuple[int, ...]) -> Iterator[Conv]:
    """Convolutions of a VGG network (Simonyan & Zisserman); ``depths`` counts those before each pooling layer."""
    cin, n = 3, 224
    for width, depth in zip((64, 128, 256, 512, 512), depths, strict=True):
        for _ in range(depth):
            yield Conv(cin, width, 3, 1, n)
            cin = width
        n //= 2


def resnet(depths: tuple[int, ...], bottleneck: bool, widen: int = 1) -> Iterator[Conv]:
    """Convolutions of a ResNet (He et al.) with ``depths`` blocks in each stage.

    In a bottleneck the 3 x 3 convolution has the stride, and ``widen`` multiplies its width (wide ResNet).
    """
    yield Conv(3, 64, 7, 2, 224)
    cin, n = 64, 56
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        cout = 4 * width if bottleneck else width
        for block in range(depth):
            stride = 2 if stage and not block else 1
            inner = width * widen
            if bottleneck:
                yield from (Conv(cin, inner, 1, 1, n), Conv(inner, inner, 3, stride, n))
                yield Conv(inner, cout, 1, 1, n // stride)
            else:
                yield from (Conv(cin, width, 3, stride, n), Conv(width, width, 3, 1, n // stride))
            if stride != 1 or cin != cout:
                yield Conv(cin, cout, 1, stride, n)
            cin, n = cout, n // stride


def densenet(depths: tuple[int, ...], growth: int = 32) -> Iterator[Conv]:
    """Convolutions of a DenseNet (Huang et al.): bottlenecks of 4 ``growth`` channels, transitions to half of them."""
    yield Conv(3, 2 * growth, 7, 2, 224)
    channels, n = 2 * growth, 56
    for stage, depth in enumerate(depths):
        for _ in range(depth):
            yield from (Conv(channels, 4 * growth, 1, 1, n), Conv(4 * growth, growth, 3, 1, n))
            channels += growth
        if stage < len(depths) - 1:
            yield Conv(channels, channels // 2, 1, 1, n)
            channels, n = channels // 2, n // 2


def squeezenet(newer: bool = False) -> Iterator[Conv]:
    """Convolutions of SqueezeNet 1.0 (Iandola et al.), or of version 1.1, which pools earlier."""
    yield Conv(3, 64, 3, 2, 224) if newer else Conv(3, 96, 7, 2, 224)
    cin, n = (64, 55) if newer else (96, 54)
    fires = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
    halved = (1, 3) if newer else (2, 6)
    for number, (squeeze, expand) in enumerate(fires):
        yield from (Conv(cin, squeeze, 1, 1, n), Conv(squeeze, expand, 1, 1, n), Conv(squeeze, expand, 3, 1, n))
        cin, n = 2 * expand, n // 2 if number in halved else n
    yield Conv(512, 1000, 1, 1, n)


NETWORKS: dict[str, Callable[[], Iterator[Conv]]] = {
    "AlexNet": alexnet,
    "SqueezeNet": squeezenet,
    "SqueezeNet 1-1": lambda: squeezenet(True),
    "ResNet-18": lambda: resnet((2, 2, 2, 2), False),
    "ResNet-34": lambda: resnet((3, 4, 6, 3), False),
    "ResNet-50": lambda: resnet((3, 4, 6, 3), True),
    "ResNet-101": lambda: resnet((3, 4, 23, 3), True),
    "ResNet-152": lambda: resnet((3, 8, 36, 3), True),
    "DenseNet-121": lambda: densenet((6, 12, 24, 16)),
    "DenseNet-161": lambda: densenet((6, 12, 36, 24), 48),
    "DenseNet-169": lambda: densenet((6, 12, 32, 32)),
    "DenseNet-201": lambda: densenet((6, 12, 48, 32)),
    "VGG-11": lambda: vgg((1, 1, 2, 2, 2)),
    "VGG-13": lambda: vgg((2, 2, 2, 2, 2)),
    "VGG-16": lambda: vgg((2, 2, 3, 3, 3)),
    "VGG-19": lambda: vgg((2, 2, 4, 4, 4)),
    "WRN-50-2": lambda: resnet((3, 4, 6, 3), True, 2),
}


def weight(conv: Conv) -> Tensor:
    """The convolution's initial weight in torch, from seed 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Conv2d(conv.cin, conv.cout, conv.k).weight.detach()


def power_method(kernel: Tensor, conv: Conv, iterations: int = 10) -> Tensor:
    """Norm of the zero-padded convolution by power iteration on one random image: a LOWER estimate."""
    x = torch.randn(1, conv.cin, conv.n, conv.n, generator=torch.Generator().manual_seed(0))
    padding, out = conv.k // 2, -(-conv.n // conv.stride)
    lost = conv.n + 2 * padding - conv.k - (out - 1) * conv.stride  # rows at the end that no output sees
    for _ in range(iterations):
        y = F.conv2d(x, kernel, stride=conv.stride, padding=padding)
        x = F.conv_transpose2d(y, kernel, stride=conv.stride, padding=padding, output_padding=max(lost, 0))
        x = x / x.norm()
    return F.conv2d(x, kernel, stride=conv.stride, padding=padding).norm()


def measure(method: str, conv: Conv) -> tuple[float, float]:
    """(process time in seconds, value) of a bound, of ``lipbound_estimate``, or of ``power``, the `power_method`."""
    kernel = weight(conv)
    best, value = float("inf"), 0.0
    bounds = {**METHODS, "lipbound_estimate": lipbound_estimate}
    # Repeat a quick call, so that the start-up cost of the first one does not count.
    while True:
        start = time.process_time()
        value = float(power_method(kernel, conv) if method == "power" else bounds[method](kernel))
        took = time.process_time() - start
        if took > 0.2 or best < float("inf"):
            return min(took, best), value
        best = took


def network_bounds(*, seed: int = 0, network: str, shrink: int = 1) -> dict[str, float]:
    """Time of `lipbound_estimate` on all convolutions of a network against ten power iterations, on one thread.

    Args:
        network: a name of `NETWORKS`.
        shrink: divides the image, which speeds up the power iterations alone; 1 is the network's own size.

    Returns:
        ``bound_ms``, ``power_ms``, their quotient ``speed``, and ``ratio``: geometric mean of bound over estimate.
    """
    if network not in NETWORKS:
        raise OptionError(f"expected network as one of {', '.join(NETWORKS)}, got {network!r}")
    convs = [conv._replace(n=max(conv.k, conv.n // shrink)) for conv in NETWORKS[network]()]
    with on_threads(1):
        found = {conv: (measure("lipbound_estimate", conv), measure("power", conv)) for conv in dict.fromkeys(convs)}
    bound, power = (sum(found[conv][i][0] for conv in convs) for i in (0, 1))
    ratio = statistics.geometric_mean(found[conv][0][1] / found[conv][1][1] for conv in convs)
    return {"bound_ms": 1e3 * bound, "power_ms": 1e3 * power, "speed": power / bound, "ratio": ratio}
