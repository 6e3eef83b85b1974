"""Cost against size: how a training step and its memory grow with channels, side and batch.

    OMP_NUM_THREADS=1 python -m benchmarks.growth [--families cayley,eco] [--doc docs/lab/performance.md]

From 128 channels, 16 x 16 images (12 x 12 for ECO, whose kernels of 3 divide the side) and batches of 32, one size at a
time moves. Times are process time of one thread, the median of a few steps; memory is the peak of a fresh process above
what it held before. The exponent is the slope between the last two sizes: doubling the size multiplies the cost by two
to that power. The last table extrapolates memory linearly in the batch, from two batches, to 24 GiB.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

from benchmarks.speed.clock import cpu_clock, measuring
from benchmarks.speed.memory import fresh
from benchmarks.speed.shapes import Shape
from benchmarks.speed.work import REFERENCE, contenders

from lipkit.files import write_atomic
from lipkit.layers.families import FAMILIES
from lipkit.text import table

CHANNELS, BATCHES = (32, 64, 128, 256, 512, 1024), (1, 8, 32, 128, 512)
SIDES = {"eco": (6, 12, 24, 48)}
MARKS = ("<!-- growth -->", "<!-- end of growth -->")
CEILING, BETWEEN = 24 * 2**30, (16, 64)
LARGEST = 20.0
"""Seconds of a step, beyond which larger sizes are left out."""


def seconds(label: str, shape: Shape, batch: int) -> float:
    """A training step: the median of five, or one where it is long."""
    name, _, maker = label.partition(":")
    with measuring("cpu"):
        work = contenders([FAMILIES[name]] if maker else [], shape, batch, "train", makers=(maker,))[label]
        first = cpu_clock(work, 1)
        calls = max(1, math.ceil(0.05 / first))
        return first if first > 2 else statistics.median(cpu_clock(work, calls) for _ in range(5))


def sweep(label: str, along: str) -> list[tuple[int, float, int]]:
    """Size, seconds and bytes along one axis."""
    family = label.partition(":")[0]
    side, sides = (12, SIDES["eco"]) if family == "eco" else (16, (8, 16, 32, 64))
    found: list[tuple[int, float, int]] = []
    for size in {"channels": CHANNELS, "side": sides, "batch": BATCHES}[along]:
        channels, n = (size if along == "channels" else 128), (size if along == "side" else side)
        shape, batch = Shape(channels, channels, n), size if along == "batch" else 32
        if found and found[-1][1] > LARGEST / 4:
            break
        found.append((size, seconds(label, shape, batch), fresh(label, shape, batch, "train")["added"]))
    return found


def exponent(found: list[tuple[int, float, int]], what: int) -> float:
    """The slope between the last two sizes, in logarithms.

    >>> exponent([(1, 3.0, 1), (2, 12.0, 1)], 1)
    2.0
    """
    one, two = found[-2:]
    return math.log(two[what] / max(one[what], 1e-9)) / math.log(two[0] / one[0])


def growth_table(labels: list[str], along: str) -> str:
    """Milliseconds and MiB at each size, and the exponents."""
    runs = {label: sweep(label, along) for label in labels}
    sizes = sorted({size for found in runs.values() for size, _, _ in found})
    head, rows = [along, *map(str, sizes), "exponent of time", "of memory"], []
    for label, found in runs.items():
        cells = {size: f"{1e3 * time:.3g} / {memory / 2**20:.0f}" for size, time, memory in found}
        slopes = [f"{exponent(found, what):.1f}" for what in (1, 2)]
        rows.append([label.partition(":")[0], *(cells.get(n, "") for n in sizes), *slopes])
    return table(head, rows, markdown=True)


def ceiling_table(labels: list[str]) -> str:
    """The largest batch whose training step fits into 24 GiB, for a few layers."""
    shapes = [Shape(c, c, n) for c, n in ((128, 32), (256, 32), (512, 16))]
    head, rows = ["largest batch in 24 GiB", *map(str, shapes)], []
    for label in labels:
        cells = []
        for shape in shapes:
            if label.startswith("eco"):
                shape = Shape(shape.cin, shape.cout, 3 * shape.side // 4)
            # The peak of a small batch is that of making the kernel: between these two the images count.
            small, large = (fresh(label, shape, batch, "train")["added"] for batch in BETWEEN)
            each = (large - small) / (BETWEEN[1] - BETWEEN[0])
            fits = f"{int((CEILING - large) / each) + BETWEEN[1]:,}" if each > 0 else "not seen"
            cells.append(fits if shape.side in (16, 32) else f"{fits} ({shape})")
        rows.append([label.partition(":")[0], *cells])
    return table(head, rows, markdown=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="cayley,eco,bcop,aol,soc")
    parser.add_argument("--doc", type=Path, help="put the tables in there, between their marks")
    given = parser.parse_args()
    labels = [REFERENCE, *(f"{name}:lipkit" for name in given.families.split(","))]
    parts = []
    for along in ("channels", "side", "batch", None):
        # Each is printed as soon as it is there: the next may take ten minutes.
        parts.append(ceiling_table(labels) if along is None else growth_table(labels, along))
        print(parts[-1], end="\n\n", flush=True)
    text = "\n\n".join(parts)
    if given.doc is not None:
        page = given.doc.read_text()
        before, _, rest = page.partition(MARKS[0])
        write_atomic(given.doc, f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}".encode())


if __name__ == "__main__":
    main()
