"""The published tables that ``lipkit reproduce`` can repeat: rows of recipes beside the figures of the paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        label: what the paper calls it.
        recipe: a packaged recipe.
        overrides: changes of the recipe, ``key=value``.
        published: figures of the paper by their names in a record's ``metrics()``, shares in [0, 1].
    """

    label: str
    recipe: str
    overrides: tuple[str, ...] = ()
    published: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table of a paper.

    Attributes:
        source: paper and number of the table.
        description: one line.
        rows: in the paper's order.
        seeds: runs of each row.
        smoke: changes of every recipe for a first look (``--scale smoke``, one seed).
        also: further figures of the records to show beside the published ones.
        parallel: whether runs are small enough to train one on each core.
    """

    source: str
    description: str
    rows: tuple[Row, ...]
    seeds: int = 1
    smoke: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    parallel: bool = False


# [LBDN] table 1: tightness at gain 1, 5 and 10. ReLU for every family, as in Appendix E of the paper; sandwich and SLL
# layers allow no MaxMin. Widths are the paper's; the recipe itself is that of the sandwich network.
_SQUARE_WAVE: tuple[tuple[str, str, tuple[float, float, float]], ...] = (
    ("AOL", "layer: aol, activation: relu", (0.772, 0.452, 0.479)),
    ("orthogonal", "layer: cayley, activation: relu", (0.741, 0.728, 0.645)),
    ("SLL", "layer: sll, activation: relu", (0.999, 0.905, 0.679)),
    ("sandwich", "", (0.999, 0.993, 0.940)),
)


def _square_wave_rows() -> tuple[Row, ...]:
    rows = []
    hidden = ", ".join(["128"] * 8)
    for label, options, values in _SQUARE_WAVE:
        model = f"model={{name: mlp, options: {{{options}, hidden: [{hidden}]}}}}"
        for gamma, value in zip((1, 5, 10), values, strict=True):
            overrides = (*([model] if options else []), f"model.options.gamma={gamma}")
            rows.append(Row(f"{label}, gamma {gamma}", "square_wave", overrides, {"tightness": value}))
    return tuple(rows)


TABLES: dict[str, Table] = {
    "cayley_kwlarge": Table(
        source="Trockman & Kolter, ICLR 2021",
        description="KWLarge on CIFAR-10, mean of 5 runs in the paper; a GPU is wanted",
        rows=(
            Row(
                "Cayley",
                "cifar10_cayley",
                published={"clean": 0.7533, "certified(36/255)": 0.5916},
            ),
        ),
        smoke=("train.epochs=1", "data.limit=256", "certify.attack_samples=16"),
    ),
    "square_wave": Table(
        source="Wang & Manchester, ICML 2023, table 1",
        description="a function that jumps: lower bound of the slope over the certified gain, mean over the seeds",
        rows=_square_wave_rows(),
        seeds=3,
        smoke=("train.epochs=4", "certify.search_restarts=8", "certify.search_steps=20"),
        also=("test_mse", "lower", "lipschitz"),
        parallel=True,
    ),
}
