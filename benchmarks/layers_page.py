"""The table of docs/layers.md: every family's promises, singular values, tightness and cost in one place.

    python benchmarks/layers_page.py          # measures the costs, takes the rest from its pages, writes the table
    python benchmarks/layers_page.py --keep   # the costs stay as they are

Singular values are those of docs/families.md, tightness is the median of FAB in docs/attacks.md. Costs are ratios to
nn.Conv2d with circular padding: 64 -> 64 channels, 3 x 3 kernel, 12 x 12 images, batches of 32, float32, one thread,
process time, medians over rounds in which all take turns; a training step (forward and backward), and one pass of the
exported layer. The plain convolution has no activation; those of SLL, CPL and sandwich are inside the layer.
"""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path

from benchmarks.speed.clock import cpu_clock, interleaved, measuring
from benchmarks.speed.shapes import PHASES, Shape
from benchmarks.speed.work import REFERENCE, contenders

from lipkit.files import write_atomic
from lipkit.layers.families import FAMILIES

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "layers.md"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.S)
HEAD = ("family", "promises", "singular values", "radius / example", "training step", "exported forward", "accepts")
SHAPE, BATCH = Shape(64, 64, 12), 32
# The page that explains each of them.
PAGES = {
    **dict.fromkeys(("cayley", "lot", "bro"), "frequency"), "eco": "eco", "soc": "soc",
    **dict.fromkeys(("bcop", "cayley_bcop", "aoc"), "bcop"), **dict.fromkeys(("sll", "cpl"), "residual"),
    "sandwich": "sandwich",
    **dict.fromkeys(("aol", "rko", "crko", "ossn", "svcm", "liresnet", "cholesky"), "rescaling"),
}  # fmt: skip


def table_rows(text: str) -> dict[str, list[str]]:
    """The rows of the tables in a page, by the family that they begin with."""
    rows = [[c.strip() for c in line.strip().strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    named = {re.sub(r"[\[\]`]|\(.*\)", "", row[0]): row for row in rows}
    return {name: named[name] for name in FAMILIES if name in named}


def ratios(phase: str) -> dict[str, str]:
    """By family: the median over the rounds of its time over that of the plain convolution."""
    with measuring("cpu"):
        work = contenders(FAMILIES.values(), SHAPE, BATCH, phase, makers=("lipkit",))
        samples = interleaved(work, cpu_clock, seconds=0.5, repeats=9, least=3)
    found = {}
    for name, times in samples.items():
        both = [t / r for t, r in zip(times, samples[REFERENCE], strict=True) if t is not None and r is not None]
        found[name.removesuffix(":lipkit")] = f"{statistics.median(both):.1f}"
    return found


def table(costs: dict[str, tuple[str, str]]) -> str:
    """The table, with these costs of training step and exported forward pass."""
    families = table_rows((DOCS / "families.md").read_text())
    attacks = table_rows((DOCS / "attacks.md").read_text())
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for name, page in PAGES.items():
        _, _, _, _, promises, accepts, smallest, largest, *_ = families[name]
        cells = (
            f"[`{name}`](mathematics/{page}.md)", promises, f"{float(smallest):.2f} to {float(largest):.2f}",
            attacks[name][2], *costs[name], accepts,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(keep: bool) -> None:
    text = PAGE.read_text()
    if keep:
        costs = {name: (row[4], row[5]) for name, row in table_rows(text).items()}
    else:
        train, forward = (ratios(phase) for phase in PHASES)
        costs = {name: (train[name], forward[name]) for name in FAMILIES}
    write_atomic(PAGE, TABLE.sub(lambda _: table(costs), text).encode())


if __name__ == "__main__":
    main("--keep" in sys.argv[1:])
