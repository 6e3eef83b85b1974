"""The published tables that ``python -m papers`` can repeat: data files in ``papers/published``, one for each paper."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lipkit import data as datasets
from lipkit.data import Data, Split
from lipkit.errors import DataError, OptionError

Scale = Literal["full", "budget", "smoke"]
SCALES: tuple[Scale, ...] = ("full", "budget", "smoke")
# Figures that are fractions, printed in per cent: names in ``metrics()`` without their brackets.
FRACTIONS = (
    "clean", "clean_attacked", "certified", "pgd", "pgd_linf", "pgd_after", "cw", "cw_after",
    "autoattack", "autoattack_apgd", "autoattack_early",
    "tightness", "reached", "error_after", "layer_gain", "least_layer_gain",
)  # fmt: skip


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Row(_Part):
    """One line of a table: the runs of a recipe, a measurement, or neither."""

    label: str = Field(description="what the paper calls it")
    recipe: str | None = Field(default=None, description="a packaged recipe instead of the table's")
    measure: str | None = Field(default=None, description="a measurement (papers.measures) instead of a recipe")
    options: Mapping[str, Any] = Field(default_factory=dict, description="of the measurement")
    absent: str | None = Field(default=None, description="why the row has neither; it is printed without figures")
    set: tuple[str, ...] = Field(default=(), description="changes of the recipe, key=value, at every scale")
    budget: tuple[str, ...] = Field(default=(), description="further changes at the scale budget")
    smoke: tuple[str, ...] = Field(default=(), description="further changes at the scale smoke")
    budget_options: Mapping[str, Any] = Field(default_factory=dict, description="options at the scale budget")
    smoke_options: Mapping[str, Any] = Field(default_factory=dict, description="options at the scale smoke")
    samples: int | None = Field(default=None, description="samples of the reference run; far fewer: a slow machine")
    thin: bool = Field(default=False, description="whether a neighbour differs in one number only: --skip-thin")
    published: tuple[float | None, ...] = Field(default=(), description="the paper's figures, one for each column")
    deviations: tuple[float | None, ...] = Field(default=(), description="their standard deviations, where printed")


class After(_Part):
    """A further measurement of a trained network; its figures are added to the record."""

    measure: str = Field(description="a measurement of trained networks (papers.measures)")
    options: Mapping[str, Any] = Field(default_factory=dict, description="at the scale full")
    budget: Mapping[str, Any] = Field(default_factory=dict, description="changes at the scale budget")
    smoke: Mapping[str, Any] = Field(default_factory=dict, description="changes at the scale smoke")
    skip: tuple[Scale, ...] = Field(default=(), description="scales that leave it out")


class Reference(_Part):
    """A published figure drawn with a row's curve: a point at ``x``, a slope ``through`` a point, else a level."""

    figure: str = Field(description="figure of the records, in a column of the table")
    x: float | None = Field(default=None, description="place of the point; the measured point is drawn as well")
    through: tuple[float, float] | None = Field(default=None, description="point of the line that has the slope")


class Picture(_Part):
    """How the figures of a table are drawn: a point for each row, rows of a series joined to a curve.

    If ``y`` ends with ``(*)``, each row is a curve through its figures ``y(1)``, ``y(2)``, ... If it ends with
    ``(*,*)``, each row is a contour plot of its figures ``y(1,1)``, ``y(1,2)``, ..., with the largest marked.
    """

    rows: str = Field(
        default="(?P<series>.*)", description="pattern of the labels drawn, with groups series, panel and x as needed"
    )
    x: str | None = Field(default=None, description="figure of the records; null for the group x of the label")
    y: tuple[str, ...] = Field(min_length=1, description="figures of the records, a panel for each")
    x_label: str = Field(default="", description="in place of the figure's name")
    y_labels: Mapping[str, str] = Field(default_factory=dict, description="figure -> label in place of its name")
    beside: Mapping[str, tuple[Reference, ...]] = Field(
        default_factory=dict,
        description="figure of the curves -> published figures drawn with them; slopes only on linear axes",
    )
    log_x: bool = Field(default=False, description="whether x is on a logarithmic axis")
    log_y: bool = Field(default=False, description="whether y is on a logarithmic axis")
    points: bool = Field(default=False, description="whether the points of a series stay apart")


class Table(_Part):
    """A table of a paper, or a figure."""

    source: str = Field(description="paper and number of the table")
    description: str = Field(description="one line")
    notes: tuple[str, ...] = Field(default=(), description="sentences printed below: what differs from the paper")
    recipe: str | None = Field(default=None, description="a packaged recipe, for rows that name none")
    columns: Mapping[str, str] = Field(default_factory=dict, description="the paper's heading -> figure of our records")
    per_cent: bool = Field(default=True, description="whether fractions among the published figures are in per cent")
    also: tuple[str, ...] = Field(default=(), description="further figures of the records to show")
    seeds: int = Field(default=1, ge=1, description="runs of each row at the scale full")
    parallel: bool = Field(default=False, description="whether a run is small enough to train one on each core")
    after: Mapping[str, After] = Field(default_factory=dict, description="measurements of the trained networks")
    budget: tuple[str, ...] = Field(default=(), description="changes of every recipe at the scale budget")
    smoke: tuple[str, ...] = Field(default=(), description="changes of every recipe at the scale smoke")
    figure: Picture | None = Field(default=None, description="the picture that is drawn of it")
    rows: tuple[Row, ...] = Field(description="in the paper's order")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        labels = [row.label for row in self.rows]
        if len(set(labels)) != len(labels):
            raise ValueError(f"expected different labels, got {labels}")
        for row in self.rows:
            ways = [row.measure is not None, row.absent is not None]
            if sum(ways) > 1 or (not any(ways) and self.recipe_of(row) is None):
                raise ValueError(f"row {row.label!r}: expected one of recipe, measure and absent")
            for given in (row.published, row.deviations):
                if given and len(given) != len(self.columns):
                    raise ValueError(f"row {row.label!r}: expected {len(self.columns)} published figures, got {given}")
        return self

    def recipe_of(self, row: Row) -> str | None:
        """The recipe of a row, None if it has none."""
        return None if row.measure or row.absent else row.recipe or self.recipe

    def overrides(self, row: Row, scale: Scale) -> list[str]:
        """Changes of the row's recipe at a scale, in the order in which they apply."""
        return [*row.set, *_at(scale, self.budget, self.smoke), *_at(scale, row.budget, row.smoke)]

    def options(self, row: Row, scale: Scale) -> dict[str, Any]:
        """Options of the row's measurement at a scale."""
        return {**row.options, **dict(_at(scale, row.budget_options, row.smoke_options))}

    def after_options(self, scale: Scale) -> dict[str, tuple[str, dict[str, Any]]]:
        """Name -> measurement of the trained networks and its options at a scale."""
        return {
            name: (one.measure, {**one.options, **dict(_at(scale, one.budget, one.smoke))})
            for name, one in self.after.items()
            if scale not in one.skip
        }

    def published(self, row: Row) -> dict[str, float | None]:
        """The paper's figures by column, fractions in [0, 1]; None where the paper has no number."""
        return self._by_column(row.published)

    def deviations(self, row: Row) -> dict[str, float | None]:
        """The standard deviations that the paper prints, by column."""
        return self._by_column(row.deviations)

    def _by_column(self, values: Sequence[float | None]) -> dict[str, float | None]:
        figures = values or (None,) * len(self.columns)
        return {
            column: value / 100 if value is not None and self.per_cent and is_fraction(figure) else value
            for (column, figure), value in zip(self.columns.items(), figures, strict=True)
        }


def _at(scale: Scale, budget: Any, smoke: Any) -> Any:
    """The changes at a scale; the full one has none."""
    return {"full": (), "budget": budget, "smoke": smoke}[scale]


class Paper(_Part):
    """Every numbered table, figure and further experiment of a paper: the command that repeats it, or why none does.

    Read from the key ``.paper`` of a file in ``published``.
    """

    source: str = Field(description="authors, conference and year")
    made: Mapping[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="the paper's name, such as 'table 1' -> arguments of python -m papers: tables, or rows of them",
    )
    not_made: Mapping[str, str] = Field(default_factory=dict, description="the paper's name -> why it is not made")
    said: Mapping[str, str] = Field(
        default_factory=dict, description="an item under made -> the paper's text with, or instead of, its figures"
    )

    @model_validator(mode="after")
    def _either(self) -> Self:
        if both := sorted(self.made.keys() & self.not_made.keys()):
            raise ValueError(f"expected each item under made or under not_made, got under both: {', '.join(both)}")
        if unknown := sorted(self.said.keys() - self.made.keys()):
            raise ValueError(f"said: expected items that are under made, got {', '.join(unknown)}")
        return self

    def rows(self, tables: Mapping[str, Table]) -> Iterator[tuple[str, str, str, tuple[Row, ...]]]:
        """Item, arguments, name of the table and its rows, for everything that is made.

        Raises:
            OptionError: ``made`` names an unknown table or row.
        """
        for item, commands in self.made.items():
            for arguments in commands:
                name, *options = shlex.split(arguments)
                labels = [option for option in options if option != "--row"]
                rows = tuple(
                    r for r in (tables[name].rows if name in tables else ()) if not labels or r.label in labels
                )
                if len(rows) < max(1, len(labels)):
                    raise OptionError(f"{self.source}, {item}: expected a table and its rows, got {arguments!r}")
                yield item, arguments, name, rows


def is_fraction(figure: str) -> bool:
    """True for a figure of a record that is a fraction in [0, 1].

    >>> is_fraction("certified(36/255)"), is_fraction("lipschitz")
    (True, False)
    """
    return figure.partition("(")[0] in FRACTIONS


@cache
def _published() -> dict[str, dict[str, Any]]:
    files = sorted((Path(__file__).parent / "published").glob("*.yaml"))
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, where PyYAML was built with it: ten times faster
    return {file.stem: yaml.load(file.read_text(encoding="utf-8"), loader) for file in files}


def load_papers() -> dict[str, Paper]:
    """The numbered items of each paper, by the name of its file in ``published``.

    >>> load_papers()["cayley"].made["table 8"]
    ('cayley_8',)
    """
    return {name: Paper.model_validate(tables[".paper"]) for name, tables in _published().items() if ".paper" in tables}


# By name, in the order of the files' names. Keys that begin with a dot hold YAML anchors that several tables share.
TABLES: dict[str, Table] = {
    name: Table.model_validate(table)
    for tables in _published().values()
    for name, table in tables.items()
    if not name.startswith(".")
}

DIGITS = "papers.tables:enlarged_digits"
# Substitutes for a data set, with the same number of channels, in order of preference.
STAND_INS = {
    "cifar100": ("cifar10", DIGITS),
    "tiny_imagenet": ("cifar10", DIGITS),
    "stl10": ("cifar10", DIGITS),
    "imagenet": ("cifar10", DIGITS),
    "cifar10": (DIGITS,),
    "mnist": ("digits",),
}
NAMES = {DIGITS: "digits enlarged to 3 x 32 x 32"}


def enlarged_digits() -> Data:
    """The 8 x 8 digits with every pixel repeated four times in both directions, in three equal channels.

    >>> enlarged_digits().input_shape
    (3, 32, 32)
    """

    def enlarged(split: Split) -> Split:
        x, y = split.batch(torch.arange(len(split)))
        x = x.repeat_interleave(4, -2).repeat_interleave(4, -1)
        return Split(x.expand(-1, 3, -1, -1).contiguous(), y)

    data = datasets.load("digits")
    return replace(data, train=enlarged(data.train), test=enlarged(data.test))


class Available:
    """Tells which data sets are at hand; looks for each once.

    Args:
        root: folder of the data sets; see `lipkit.data.data_root`.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._known: dict[str, bool] = {}

    def __call__(self, spec: str) -> bool:
        """True if ``spec`` can be loaded. The user's own data count as available, so that loading reports the error."""
        if spec not in STAND_INS:
            return True
        if spec not in self._known:
            try:
                datasets.load(spec, root=self._root, limit=1)
                self._known[spec] = True
            except (DataError, OptionError):
                self._known[spec] = False
        return self._known[spec]

    def stand_in(self, spec: str) -> str:
        """``spec`` if it is at hand, else its first stand-in that is."""
        return next(name for name in (spec, *STAND_INS.get(spec, ())) if self(name))
