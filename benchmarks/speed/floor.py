"""The least time that a layer's arithmetic and traffic take on a machine: counted, over measured rates.

Counted are float32 operations (a multiplication and an addition are two) and bytes of ECO in phase form and of Cayley
in solve form; elementwise passes, norms, padding and everything that a perfect program would fuse are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from benchmarks.speed.clock import Clock
from benchmarks.speed.shapes import Shape

FAMILIES = ("eco", "cayley")


@dataclass(frozen=True)
class Rates:
    """What the machine does at best: operations per second in a product of matrices, bytes per second in a copy."""

    operations: float
    bytes: float


def measure_rates(clock: Clock, device: str = "cpu", *, side: int = 768, megabytes: int = 64, runs: int = 5) -> Rates:
    """Best of a few products of ``side x side`` matrices, and of copies (each byte is read and written)."""
    a = torch.randn(side, side, device=device)
    source = torch.zeros(megabytes << 18, device=device)
    target = torch.empty_like(source)
    products = min(clock(lambda: a @ a, 1) for _ in range(runs))
    copies = min(clock(lambda: target.copy_(source), 1) for _ in range(runs))
    return Rates(2 * side**3 / max(products, 1e-9), 2 * source.nbytes / max(copies, 1e-9))


def operations(family: str, shape: Shape, batch: int, phase: str) -> float:
    """Floating-point operations of one pass.

    ECO: a product of cin x cout per pixel and image (training: three), and in training nine products of c x c for each
    of the (k^2 + 1) / 2 distinct matrices (Taylor polynomial of degree 5 by three products, twice that backward).
    Cayley: complex products, 8 cin cout each, at half of the pixels; per transform the two separable real products; in
    training an LU factorisation of c x c, solves and the outer product. With a 1 x 1 kernel one real matrix: a product
    of cin x cout for each patch and image (training: three), and in training a factorisation and two solves of c x c.

    >>> operations("eco", Shape(8, 8, 6), 2, "forward") == 2 * 2 * 36 * 64
    True
    """
    pixels, product = shape.out**2, 2 * batch * shape.inner * shape.cout
    c = min(shape.inner, shape.cout)
    if family == "eco":
        once = float(pixels * product)
        return (
            once
            if phase == "forward"
            else 3 * once + (shape.kernel**2 + 1) // 2 * 9 * 2 * max(shape.inner, shape.cout) ** 3
        )
    if shape.kernel == 1:
        once = float(pixels * product)
        return once if phase == "forward" else 3 * once + (2 / 3 + 4) * c**3
    transforms = 4.0 * shape.out * pixels * batch * (shape.inner + shape.cout)
    once = transforms + 2.0 * pixels * product
    return once if phase == "forward" else 3 * once - transforms + pixels / 2 * (16 / 3) * c**3


def traffic(family: str, shape: Shape, batch: int, phase: str) -> float:
    """Bytes that must pass through memory once: inputs, outputs, and Cayley's symbol.

    >>> traffic("eco", Shape(8, 8, 6), 2, "forward") == 4 * 2 * 36 * 16
    True
    """
    pixels = shape.out**2
    entering, leaving = (4.0 * batch * pixels * c for c in (shape.inner, shape.cout))
    matrices = pixels if shape.kernel > 1 else 1
    symbol = 4.0 * matrices * shape.inner * shape.cout if family == "cayley" else 0.0
    return entering + leaving + symbol if phase == "forward" else 3 * entering + 2 * leaving + 3 * symbol


def floor(family: str, shape: Shape, batch: int, phase: str, rates: Rates) -> float:
    """Seconds: the larger of operations over their rate and bytes over theirs."""
    counted = operations(family, shape, batch, phase) / rates.operations
    return max(counted, traffic(family, shape, batch, phase) / rates.bytes)
