"""Bounds of all convolutions of well-known networks: time and tightness of each method against 10 power iterations.

    python benchmarks/networks.py --budget 45

One thread, one network after the other; each distinct convolution is timed once and counts as often as it occurs. The
power method is the one of the paper's tables: 10 iterations of convolution and transposed convolution on one image of
the layer's true size, which gives a LOWER estimate. Shapes are the published ones, weights torch's initial values.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.bounds import METHODS


class Conv(NamedTuple):
    """Channels, kernel size, stride, and height of the input."""

    cin: int
    cout: int
    k: int
    stride: int
    n: int

    @property
    def out(self) -> int:
        """Height of the output, padding ``k // 2``."""
        return -(-self.n // self.stride)


def alexnet() -> Iterator[Conv]:
    """One tower, as in torchvision."""
    yield from (Conv(3, 64, 11, 4, 224), Conv(64, 192, 5, 1, 27), Conv(192, 384, 3, 1, 13))
    yield from (Conv(384, 256, 3, 1, 13), Conv(256, 256, 3, 1, 13))


def vgg16() -> Iterator[Conv]:
    """Simonyan & Zisserman, configuration D."""
    cin, n = 3, 224
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            yield Conv(cin, width, 3, 1, n)
            cin = width
        n //= 2


def resnet(depths: tuple[int, ...], bottleneck: bool, widen: int = 1) -> Iterator[Conv]:
    """He et al.; the stride of a bottleneck is in its 3 x 3 convolution; ``widen`` as in wide ResNets."""
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


def densenet121() -> Iterator[Conv]:
    """Huang et al., growth 32."""
    yield Conv(3, 64, 7, 2, 224)
    channels, n = 64, 56
    for stage, depth in enumerate((6, 12, 24, 16)):
        for _ in range(depth):
            yield from (Conv(channels, 128, 1, 1, n), Conv(128, 32, 3, 1, n))
            channels += 32
        if stage < 3:
            yield Conv(channels, channels // 2, 1, 1, n)
            channels, n = channels // 2, n // 2


def squeezenet() -> Iterator[Conv]:
    """Iandola et al., version 1.0."""
    yield Conv(3, 96, 7, 2, 224)
    cin, n = 96, 54
    for squeeze, expand, halve in (
        (16, 64, False), (16, 64, False), (32, 128, True), (32, 128, False), (48, 192, False), (48, 192, False),
        (64, 256, True), (64, 256, False),
    ):  # fmt: skip
        yield from (Conv(cin, squeeze, 1, 1, n), Conv(squeeze, expand, 1, 1, n), Conv(squeeze, expand, 3, 1, n))
        cin, n = 2 * expand, n // 2 if halve else n
    yield Conv(512, 1000, 1, 1, n)


NETWORKS: dict[str, Callable[[], Iterator[Conv]]] = {
    "AlexNet": alexnet,
    "SqueezeNet": squeezenet,
    "ResNet-18": lambda: resnet((2, 2, 2, 2), False),
    "DenseNet-121": densenet121,
    "ResNet-50": lambda: resnet((3, 4, 6, 3), True),
    "ResNet-152": lambda: resnet((3, 8, 36, 3), True),
    "WRN-50-2": lambda: resnet((3, 4, 6, 3), True, 2),
    "VGG-16": vgg16,
}


def weight(conv: Conv) -> Tensor:
    """torch's initial values."""
    torch.manual_seed(0)
    return torch.nn.Conv2d(conv.cin, conv.cout, conv.k).weight.detach()


def power_method(kernel: Tensor, conv: Conv, iterations: int = 10) -> Tensor:
    """The convolutional power method with zero padding: a LOWER estimate."""
    x = torch.randn(1, conv.cin, conv.n, conv.n)
    padding, lost = conv.k // 2, conv.n + 2 * (conv.k // 2) - conv.k - (conv.out - 1) * conv.stride
    for _ in range(iterations):
        y = F.conv2d(x, kernel, stride=conv.stride, padding=padding)
        x = F.conv_transpose2d(y, kernel, stride=conv.stride, padding=padding, output_padding=max(lost, 0))
        x = x / x.norm()
    return F.conv2d(x, kernel, stride=conv.stride, padding=padding).norm()


def measure(method: str, conv: Conv) -> tuple[float, float]:
    """Seconds (process time) and value."""
    kernel = weight(conv)
    best, value = float("inf"), 0.0
    # Once more where it is quick, so that the first call of a kind does not count its start-up.
    while True:
        start = time.process_time()
        value = float(power_method(kernel, conv) if method == "power" else METHODS[method](kernel))
        took = time.process_time() - start
        if took > 0.2 or best < float("inf"):
            return min(took, best), value
        best = took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of one method before it is left out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[tuple[str, Conv], tuple[float, float]] = {}
    spent: Counter[str] = Counter()
    methods = ["power", *arguments.methods]
    print("seconds for all convolutions (geometric mean of bound / power estimate)\n")
    print(f"| network | convolutions | {' | '.join(methods)} |\n|{'---|' * (len(methods) + 2)}")
    for name in arguments.networks:
        counts = Counter(NETWORKS[name]())
        cells = []
        for method in methods:
            for conv in counts:
                if (method, conv) not in known and spent[method] < arguments.budget:
                    known[method, conv] = measure(method, conv)
                    spent[method] += known[method, conv][0]
            if any((method, conv) not in known for conv in counts):
                cells.append("over budget")
                continue
            seconds = sum(known[method, conv][0] * count for conv, count in counts.items())
            if any(("power", conv) not in known for conv in counts):
                cells.append(f"{seconds:.2f}")
                continue
            ratios = [known[method, conv][1] / known["power", conv][1] for conv in counts for _ in range(counts[conv])]
            mean = float(torch.tensor(ratios, dtype=torch.float64).log().mean().exp())
            reference = sum(known["power", conv][0] * count for conv, count in counts.items())
            speed = "" if method == "power" else f", {reference / seconds:.2g}x as fast"
            cells.append(f"{seconds:.2f}{speed} ({mean:.3f})")
        print(f"| {name} | {sum(counts.values())} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
