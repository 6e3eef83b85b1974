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
        published: figures of the paper by the names of `lipkit.cli.pipeline.Outcome.metrics`, shares in [0, 1].
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
    """

    source: str
    description: str
    rows: tuple[Row, ...]
    seeds: int = 1


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
    ),
}
