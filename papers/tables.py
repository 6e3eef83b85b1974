"""The published tables that ``python -m papers`` repeats, read from ``papers/published``, one file for each paper."""

import functools
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lipkit import data as datasets
from lipkit.data import Data, Split
from lipkit.errors import DataError, OptionError, check_choice
from papers.measures import AFTER, MEASURES, OF_FOLDER

Scale = Literal["full", "budget", "smoke"]
SCALES: tuple[Scale, ...] = ("full", "budget", "smoke")
# Figures that are fractions, printed in per cent: names in ``metrics()`` without their brackets.
FRACTIONS = (
    "clean", "clean_attacked", "certified", "pgd", "pgd_linf", "pgd_after", "cw", "cw_after",
    "autoattack", "autoattack_apgd", "autoattack_early",
    "tightness", "reached", "error_after", "layer_gain", "least_layer_gain",
)  # fmt: skip


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Row(_Section):
    """One line of a table: the runs of a recipe, a measurement, or published figures alone."""

    label: str = Field(description="what the paper calls it")
    recipe: str | None = Field(default=None, description="a packaged recipe instead of the table's")
    measure: str | None = Field(default=None, description="a measurement (papers.measures) instead of a recipe")
    options: Mapping[str, Any] = Field(default_factory=dict, description="of the measurement")
    absent: str | None = Field(default=None, description="why the row is not made; only published figures are printed")
    set: tuple[str, ...] = Field(default=(), description="changes of the recipe, key=value, at every scale")
    budget: tuple[str, ...] = Field(default=(), description="further changes at the scale budget")
    smoke: tuple[str, ...] = Field(default=(), description="further changes at the scale smoke")
    budget_options: Mapping[str, Any] = Field(default_factory=dict, description="options at the scale budget")
    smoke_options: Mapping[str, Any] = Field(default_factory=dict, description="options at the scale smoke")
    samples: int | None = Field(default=None, description="samples seen by the reference run; fewer: a slow machine")
    thin: bool = Field(default=False, description="whether --skip-thin leaves it out: a neighbour is alike")
    published: tuple[float | None, ...] = Field(default=(), description="the paper's figures, one for each column")
    deviations: tuple[float | None, ...] = Field(default=(), description="their standard deviations, where printed")


class After(_Section):
    """A measurement of the trained network after a run; its figures are added to the record."""

    measure: str = Field(description="a measurement of trained networks (papers.measures)")
    options: Mapping[str, Any] = Field(default_factory=dict, description="at the scale full")
    budget: Mapping[str, Any] = Field(default_factory=dict, description="changes at the scale budget")
    smoke: Mapping[str, Any] = Field(default_factory=dict, description="changes at the scale smoke")
    skip: tuple[Scale, ...] = Field(default=(), description="scales that leave it out")


class Reference(_Section):
    """A published figure drawn with a row's curve: a point at ``x``, a line ``through`` a point, or a level."""

    figure: str = Field(description="figure of the records, in a column of the table")
    x: float | None = Field(default=None, description="place of the point; its measured value is drawn as well")
    through: tuple[float, float] | None = Field(default=None, description="point of the line; the figure is its slope")


class Picture(_Section):
    """How the figures of a table are drawn: each row is a point, and a curve joins the rows of a series.

    If ``y`` ends with ``(*)``, each row is a curve through its figures ``y(1)``, ``y(2)``, ... If ``y`` ends with
    ``(*,*)``, each row is a contour plot of its figures ``y(1,1)``, ``y(1,2)``, ..., with the largest marked.
    """

    rows: str = Field(
        default="(?P<series>.*)", description="pattern of the labels to draw, which may have groups series, panel and x"
    )
    x: str | None = Field(default=None, description="figure of the records on the x axis; null: the label's group x")
    y: tuple[str, ...] = Field(min_length=1, description="figures of the records on the y axis, a panel for each")
    x_label: str = Field(default="", description="in place of the figure's name")
    y_labels: Mapping[str, str] = Field(default_factory=dict, description="figure -> label in place of its name")
    beside: Mapping[str, tuple[Reference, ...]] = Field(
        default_factory=dict,
        description="figure in y -> published figures drawn in its panel, lines only on linear axes",
    )
    log_x: bool = Field(default=False, description="whether x is on a logarithmic axis")
    log_y: bool = Field(default=False, description="whether y is on a logarithmic axis")
    points: bool = Field(default=False, description="whether the points of a series are left unjoined")


class Table(_Section):
    """A table, or a figure, of a paper."""

    source: str = Field(description="paper and number of the table")
    description: str = Field(description="one line")
    notes: tuple[str, ...] = Field(default=(), description="sentences below the table: what differs from the paper")
    recipe: str | None = Field(default=None, description="the packaged recipe of rows that name none")
    columns: Mapping[str, str] = Field(default_factory=dict, description="the paper's heading -> figure of our records")
    per_cent: bool = Field(default=True, description="whether the paper prints fractions in per cent")
    also: tuple[str, ...] = Field(default=(), description="further figures of the records, one column each")
    seeds: int = Field(default=1, ge=1, description="runs of each row at the scale full")
    parallel: bool = Field(default=False, description="whether to train one run on each core")
    after: Mapping[str, After] = Field(default_factory=dict, description="measurements of the trained networks")
    budget: tuple[str, ...] = Field(default=(), description="changes of every recipe at the scale budget")
    smoke: tuple[str, ...] = Field(default=(), description="changes of every recipe at the scale smoke")
    figure: Picture | None = Field(default=None, description="how it is drawn, if it is")
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
            if row.measure is not None:
                check_choice("measure", row.measure, MEASURES)
            for given in (row.published, row.deviations):
                if given and len(given) != len(self.columns):
                    raise ValueError(f"row {row.label!r}: expected {len(self.columns)} published figures, got {given}")
        for one in self.after.values():
            check_choice("measure", one.measure, {**AFTER, **OF_FOLDER})
        return self

    def recipe_of(self, row: Row) -> str | None:
        """The recipe of a row, None if it has none."""
        return None if row.measure or row.absent else row.recipe or self.recipe

    def overrides(self, row: Row, scale: Scale) -> list[str]:
        """The changes of a row's recipe at a scale, in the order in which they apply."""
        return [*row.set, *_at(scale, self.budget, self.smoke), *_at(scale, row.budget, row.smoke)]

    def options(self, row: Row, scale: Scale) -> dict[str, Any]:
        """The options of a row's measurement at a scale."""
        return {**row.options, **dict(_at(scale, row.budget_options, row.smoke_options))}

    def after_options(self, scale: Scale) -> dict[str, tuple[str, dict[str, Any]]]:
        """Name -> (measurement, options), for each measurement of trained networks at a scale."""
        return {
            name: (one.measure, {**one.options, **dict(_at(scale, one.budget, one.smoke))})
            for name, one in self.after.items()
            if scale not in one.skip
        }

    def published(self, row: Row) -> dict[str, float | None]:
        """The paper's figures by column, fractions in [0, 1]; None where the paper prints no number."""
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


class Paper(_Section):
    """Every numbered table, figure and further experiment of a paper: the command that repeats it, or why none does.

    It is the value of the key ``.paper`` in the paper's file in ``published``.
    """

    source: str = Field(description="authors, conference and year")
    made: Mapping[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="item, such as 'table 1' -> arguments of python -m papers, one text for each table",
    )
    not_made: Mapping[str, str] = Field(default_factory=dict, description="item -> why it is not made")
    said: Mapping[str, str] = Field(
        default_factory=dict, description="item under made -> remark beside its figures, or in their place"
    )

    @model_validator(mode="after")
    def _either(self) -> Self:
        if both := sorted(self.made.keys() & self.not_made.keys()):
            raise ValueError(f"expected each item under made or under not_made, got under both: {', '.join(both)}")
        if unknown := sorted(self.said.keys() - self.made.keys()):
            raise ValueError(f"said: expected items that are under made, got {', '.join(unknown)}")
        return self

    def rows(self, tables: Mapping[str, Table]) -> Iterator[tuple[str, str, str, tuple[Row, ...]]]:
        """(item, arguments, name of the table, its rows) of everything that is made.

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


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, where PyYAML was built with it: ten times faster
_PUBLISHED: dict[str, dict[str, Any]] = {
    file.stem: yaml.load(file.read_text(encoding="utf-8"), _LOADER)
    for file in sorted((Path(__file__).parent / "published").glob("*.yaml"))
}
# By the names of the files.
PAPERS = {name: Paper.model_validate(tables[".paper"]) for name, tables in _PUBLISHED.items() if ".paper" in tables}
# By name, in the order of the files. Keys that begin with a dot hold `Paper` or YAML anchors that several tables share.
TABLES: dict[str, Table] = {
    name: Table.model_validate(table)
    for tables in _PUBLISHED.values()
    for name, table in tables.items()
    if not name.startswith(".")
}

DIGITS = "papers.tables:enlarged_digits"
# Data set -> substitutes with as many channels, in order of preference.
STAND_INS = {
    **dict.fromkeys(("cifar100", "tiny_imagenet", "stl10", "imagenet"), ("cifar10", DIGITS)),
    "cifar10": (DIGITS,),
    "mnist": ("digits",),
}
NAMES = {DIGITS: "digits enlarged to 3 x 32 x 32"}


def enlarged_digits() -> Data:
    """The 8 x 8 digits at four times their side, every pixel a square of 4 x 4, in three equal channels.

    >>> enlarged_digits().input_shape
    (3, 32, 32)
    """

    def enlarged(split: Split) -> Split:
        x, y = split.batch(torch.arange(len(split)))
        x = x.repeat_interleave(4, -2).repeat_interleave(4, -1)
        return Split(x.expand(-1, 3, -1, -1).contiguous(), y)

    data = datasets.load("digits")
    return replace(data, train=enlarged(data.train), test=enlarged(data.test))


def available_in(root: Path | None) -> Callable[[str], bool]:
    """A function that tells which data sets are at hand, and tries to load each once.

    The user's own data count as at hand: loading them reports the error. ``root`` is the folder of the data sets, see
    `lipkit.data.data_root`.
    """

    @functools.cache
    def at_hand(spec: str) -> bool:
        if spec in STAND_INS:
            try:
                datasets.load(spec, root=root, limit=1)
            except (DataError, OptionError):
                return False
        return True

    return at_hand
