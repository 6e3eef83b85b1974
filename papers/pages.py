"""Writes the tables of docs/reproduce.md and of two pages of docs/lab: the papers' figures, and those measured here.

    python -m papers.pages    # from papers/published, records/ and full_costs.json; nothing is trained

docs/reproduce.md has the totals of each paper, lab/reproduce.md every numbered item with its command and its records,
and lab/published_figures.md every published figure with the measured one, or with its cost (`papers.full_costs`).
"""

import functools
import inspect
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lipkit import models
from lipkit.experiments.recipe import Recipe, load_recipe
from lipkit.files import write_atomic
from papers.measures import MEASURES
from papers.table_runs import TableRecord, TableRun, by_figure, interval, kept, plan, shown
from papers.tables import PAPERS, SCALES, TABLES, Row, Table, is_fraction

ROOT = Path(__file__).parents[1]
PAGE, RECORDS = ROOT / "docs" / "reproduce.md", ROOT / "records"
INDEX, FIGURES = (ROOT / "docs" / "lab" / name for name in ("reproduce.md", "published_figures.md"))
COSTS = ROOT / "papers" / "full_costs.json"
# Data -> training samples, shape of a sample, classes (0: regression).
SHAPES = {
    "mnist": (60_000, (1, 28, 28), 10),
    "cifar10": (50_000, (3, 32, 32), 10),
    "cifar100": (50_000, (3, 32, 32), 100),
    "tiny_imagenet": (100_000, (3, 64, 64), 200),
    "imagenet": (1_281_167, (3, 224, 224), 1000),
    "square_wave": (300, (1,), 0),
}
# Data sets that the maintainers do not have.
ABSENT = {"cifar100": "CIFAR-100", "tiny_imagenet": "Tiny-ImageNet", "imagenet": "ImageNet", "stl10": "STL-10"}
# Options of a network that do not change its cost.
FREE = {"lipschitz", "gamma", "learnable_gamma", "mean", "std"}
MADE = re.compile(r"(?<=<!-- made -->\n).*?(?=<!-- end of made -->)", re.S)
VERDICTS = ("reached", "one seed", "missed", "budget", "not compared", "not made")
COUNTED = ("as printed", "not as printed")
# Higher is better for fractions and the figures in MORE, lower for those in LESS. All others, and the fractions in
# NEAR, describe a network: they should be close to the paper's value, and neither direction is better.
MORE = {"ppm(0)"}
NEAR = {"reached", "tightness", "least_layer_gain"}
LESS = {"ppm(100)", "worst", "deviation", "gap(50)", "gap(224)"}
# Times, and ratios of times, that the papers measured on a GPU.
TIMES = {"ms", "bound_ms", "power_ms", "convolutions", "layers", "exported", "speed"}
QUOTIENTS = {"lipconvnet_step.ratio", "recipe_step.ratio", "exponential.ratio"}
UNMEASURED = "cost not measured"


class Missing(NamedTuple):
    """A missing run: its core hours, or why they are unknown, and its data set if the maintainers do not have it."""

    hours: float | None
    data: str | None = None
    reason: str = UNMEASURED


def order(item: str) -> tuple[str, int, str]:
    """Sort key of a paper's items: tables, then figures, then the rest, each by number."""
    kind, _, rest = item.partition(" ")
    number = re.match(r"\d+", rest)
    return str({"table": 0, "figure": 1}.get(kind, 2)), int(number[0]) if number else 0, item


def cost_key(recipe: Recipe) -> dict[str, Any]:
    """The part of a recipe that decides the cost of training; CIFAR-10 stands for CIFAR-100, which costs the same."""
    plain = recipe.model_dump(mode="json")
    options = {k: v for k, v in plain["model"]["options"].items() if k not in FREE}
    train = {k: plain["train"][k] for k in ("batch_size", "epochs", "optimizer", "ema")}
    data = {"cifar100": "cifar10"}.get(recipe.data.spec, recipe.data.spec)
    penalty = None if recipe.penalty is None else recipe.penalty.method
    adversary = None if recipe.adversary is None else recipe.adversary.steps
    return {"data": data, "model": recipe.model.name, **options, **train, "penalty": penalty, "adversary": adversary}


@functools.cache
def found_of(name: str) -> dict[str, list[TableRecord]]:
    """The kept records of a table, by the labels of its rows."""
    return kept(TABLES[name], RECORDS / name)


@functools.cache
def known_costs() -> dict[str, dict[str, Any]]:
    """`cost_key` as JSON text -> its measured cost."""
    return {json.dumps(one["recipe"], sort_keys=True): one for one in json.loads(COSTS.read_text()).values()}


def measurement_hours(row: Row, found: Sequence[TableRecord]) -> float | None:
    """Core hours of a measurement at the scale full, in proportion to the batch of its kept record."""
    if not found or row.measure is None:
        return None
    record: Any = found[0].record  # of a measurement
    default = inspect.signature(MEASURES[row.measure]).parameters.get("batch")
    full = row.options.get("batch", default.default if default else 1)
    return float(record.times["measure"]) / 3600 * full / record.options.get("batch", full)


@functools.cache
def missing_runs(name: str) -> dict[str, dict[str, Missing]]:
    """Label -> text of the recipe -> a run that the row still needs at the scale full.

    Tables that share a run have it under the same text, so that `merged` counts it once.
    """
    out: dict[str, dict[str, Missing]] = {row.label: {} for row in TABLES[name].rows}
    for run in plan(TABLES[name]):
        found = found_of(name)[run.row.label]
        if not any((one.scale, one.seed) == ("full", run.seed) for one in found):
            text = f"{name}, {run.row.label}, {run.seed}" if run.recipe is None else run.recipe.model_dump_json()
            out[run.row.label][text] = missing_run(run, found)
    return out


def missing_run(run: TableRun, found: Sequence[TableRecord]) -> Missing:
    """Cost of a run; for a training, the mean time of the row's full records, else the extrapolated one."""
    if run.recipe is None:
        return Missing(measurement_hours(run.row, found), ABSENT.get(str(run.row.options.get("data"))))
    made = [one.record.times["train"] / 3600 for one in found if one.scale == "full"]
    cost = known_costs().get(json.dumps(cost_key(run.recipe), sort_keys=True), {})
    hours = statistics.fmean(made) if made else cost.get("hours")
    return Missing(hours, ABSENT.get(run.recipe.data.spec), cost.get("left_out", UNMEASURED))


def price(runs: Mapping[str, Missing]) -> str:
    """The total hours of the runs in words, and the data sets that are missing."""
    hours = [run.hours for run in runs.values() if run.hours is not None]
    total = float(f"{sum(hours):.2g}")
    words = "more than" if len(hours) < len(runs) else "about"
    text = f"{words} {total:,.12g} core hours" if hours else next(run.reason for run in runs.values())
    data = sorted({run.data for run in runs.values() if run.data})
    names = " and ".join(filter(None, (", ".join(data[:-1]), *data[-1:])))
    return f"{text}; {names} not at hand" if data else text


def reaches(
    figure: str,
    paper: float,
    ours: float,
    digit: float,
    ends: tuple[float, float] | None,
    deviation: float | None = None,
) -> bool:
    """True if the measured figure is as good as the paper's, by the rule in docs/reproduce.md.

    Args:
        figure: its name in the record, which decides the better direction.
        paper, ours: the published and the measured value.
        digit: half a unit of the last digit that the paper prints.
        ends: 95 % interval of the measured value, if known.
        deviation: standard deviation that the paper prints; it replaces the usual margin and ``ends``.
    """
    more, less = (is_fraction(figure) and figure not in NEAR) or figure in MORE, figure in LESS
    margin = 0.01 if is_fraction(figure) else max(0.05 * abs(paper), digit)
    if deviation is not None:
        margin, ends = max(deviation, digit), None
    near = (less or ours >= paper - margin) and (more or ours <= paper + margin)
    return near or (ends is not None and ends[0] <= paper <= ends[1])


def half_digit(table: Table, row: Row, column: str) -> float:
    """Half a unit of the last digit of a published figure; a zero takes the finest digit of its column."""
    own = table.published(row)[column]
    values = [own] if own else [table.published(other)[column] for other in table.rows]
    places = [-int(Decimal(str(value)).as_tuple().exponent) for value in values if value is not None]
    return 0.5 * 10.0 ** -max(places)


@functools.cache
def millions_of(name: str, changes: tuple[str, ...]) -> float:
    """Number of parameters, in millions, of a recipe's network, built on the meta device."""
    recipe = load_recipe(name, changes)
    _, shape, classes = SHAPES[recipe.data.spec]
    with torch.device("meta"):
        network = models.build(recipe.model.name, input_shape=shape, classes=classes, **recipe.model.options)
    return sum(p.numel() for p in network.parameters()) / 1e6


def figure_cells(table: Table, row: Row, found: Sequence[TableRecord]) -> dict[str, tuple[str, str]]:
    """Column -> (verdict of VERDICTS or COUNTED, cell), for every published figure of a row."""
    out, measured = {}, by_figure(found)
    for column, paper in table.published(row).items():
        if paper is None:
            continue
        figure, digit, recipe = table.columns[column], half_digit(table, row, column), table.recipe_of(row)
        values = measured.get(figure, [])
        if figure == "million_parameters" and recipe is not None:  # known without a run
            values = [millions_of(recipe, tuple(table.overrides(row, "full")))]
        if not values:
            out[column] = ("not made", f"{shown(figure, paper)}: not made")
            continue
        ours = statistics.fmean(values)
        ends = interval(found, figure)
        off, side = shown(figure, abs(ours - paper)), "below" if ours < paper else "above"
        if figure == "million_parameters":
            verdict = words = COUNTED[not reaches(figure, paper, ours, digit, None)]
        elif {figure, f"{row.measure}.{figure}"} & (TIMES | QUOTIENTS):
            verdict, words = "not compared", "on a CPU"
        elif found[0].scale != "full":
            verdict, words = "budget", f"{found[0].scale}: {off} {side}"
        elif reaches(figure, paper, ours, digit, ends, table.deviations(row)[column]):
            alone = row.measure is None and len(found) == 1
            verdict, words = "one seed" if alone else "reached", f"reached, {shown(figure, ours - paper, sign=True)}"
            words += ", one seed" * alone
        else:
            verdict, words = "missed", f"missed by {off}, {side}"
        out[column] = (verdict, f"{shown(figure, paper)} → {shown(figure, ours)}: {words}")
    return out


def counts(verdicts: Sequence[str]) -> str:
    """Number of figures with each verdict, in words; numbers of parameters need no training and are counted apart."""
    parts = [f"{word} {verdicts.count(word)}" for word in VERDICTS if word in verdicts]
    right, wrong = (verdicts.count(word) for word in COUNTED)
    parts += [f"{right} of {right + wrong} numbers of parameters as printed"] if right + wrong else []
    return ", ".join(parts)


def verdicts_of(name: str, rows: Sequence[Row]) -> list[str]:
    """The verdict of every published figure of these rows."""
    return [v for row in rows for v, _ in figure_cells(TABLES[name], row, found_of(name)[row.label]).values()]


def recorded(name: str, rows: Sequence[Row]) -> str:
    """The number of rows with records at each scale, in words."""
    scales = [records[0].scale for row in rows if (records := found_of(name)[row.label])]
    numbers = ", ".join(f"{scales.count(scale)} {scale}" for scale in SCALES if scale in scales)
    return f"{numbers} of {len(rows)} rows: `records/{name}/`" if scales else f"none of {len(rows)} rows"


def summary(name: str, rows: Sequence[Row], said: str | None) -> str:
    """A cell: verdicts on the published figures of these rows, the remark ``said``, and the cost of missing runs."""
    verdicts = verdicts_of(name, rows)
    text = "; ".join(filter(None, [f"[{counts(verdicts)}]({FIGURES.name}#{name})" if verdicts else "", said]))
    missing = merged(missing_runs(name)[row.label] for row in rows)
    return f"{text}; in full: {price(missing)}" if missing else text


def merged(parts: Iterable[Mapping[str, Missing]]) -> dict[str, Missing]:
    """The runs of all parts, each once."""
    return {text: run for part in parts for text, run in part.items()}


def row_line(name: str, row: Row, columns: Sequence[str]) -> str:
    """A row's line in lab/published_figures.md."""
    found, missing = found_of(name)[row.label], missing_runs(name)[row.label]
    cells = figure_cells(TABLES[name], row, found)
    if found:
        wanted = TABLES[name].seeds if found[0].scale == "full" else 1
        star = "" if all(one.current for one in found) else "*"
        number = f"{len(found)} of {wanted}" if len(found) < wanted else len(found)
        day = max(one.record.created for one in found)[:10]
        how = f"{found[0].scale}{star}, {number} run{'s' * (wanted > 1)}, {day}"
        how += f"; in full: {price(missing)}" if missing else ""
    else:
        how = row.absent or f"not made: {price(missing)}"
    return f"| {' | '.join([row.label, how, *(cells[c][1] if c in cells else '' for c in columns)])} |"


def figures_of(name: str, rows: Sequence[Row]) -> str:
    """A table's section of lab/published_figures.md: a line for each of these rows, full scale first."""
    table = TABLES[name]
    columns = [column for column in table.columns if any(table.published(row)[column] is not None for row in rows)]
    found = found_of(name)
    scales = {row.label: SCALES.index(found[row.label][0].scale) if found[row.label] else len(SCALES) for row in rows}
    lines = [row_line(name, row, columns) for row in sorted(rows, key=lambda row: scales[row.label])]
    head = f"| row | made | {' | '.join(columns)} |\n|---|---|{'---|' * len(columns)}\n"
    notes = "".join(f"\n- {note}" for note in table.notes)
    body = head + "\n".join(lines) + "\n" + (f"{notes}\n" if notes else "")
    return f"### {name}\n\n{table.source}: {counts(verdicts_of(name, rows))}.\n\n{body}"


def published() -> str:
    """The generated part of lab/published_figures.md."""
    rows = {name: [row for row in TABLES[name].rows if any(v is not None for v in row.published)] for name in TABLES}
    silent = [
        f"### {name}\n\n{TABLES[name].source}.\n\n" + "".join(f"- {note}\n" for note in TABLES[name].notes)
        for name, some in rows.items()
        if not some and TABLES[name].notes
    ]
    verdicts = [verdict for name in TABLES for verdict in verdicts_of(name, rows[name])]
    missing = merged(missing_runs(name)[row.label] for name in TABLES for row in rows[name])
    every = merged(runs for name in TABLES for runs in missing_runs(name).values())
    total = (
        f"{len(verdicts)} published figures: {counts(verdicts)}.\n\nTo make their rows in full, each run once, would "
        f"take {price(missing)}; with the rows that have no published figures: {price(every)}.\n"
    )
    tables = [figures_of(name, some) for name, some in rows.items() if some]
    return "\n" + "\n".join([total, *tables, "## Notes on tables without published figures\n", *silent]) + "\n"


def index() -> str:
    """The generated part of lab/reproduce.md: the items of each paper in their `order`."""
    parts = []
    for paper in PAPERS.values():
        lines = [(item, f"| {item} | not made: {reason} | | |") for item, reason in paper.not_made.items()]
        for item, arguments, name, rows in paper.rows(TABLES):
            made, verdicts = recorded(name, rows), summary(name, rows, paper.said.get(item))
            lines.append((item, f"| {item} | `python -m papers {arguments}` | {made} | {verdicts} |"))
        head = f"### {paper.source}\n\n| item | command | records | published figures |\n|---|---|---|---|\n"
        parts.append(head + "\n".join(line for _, line in sorted(lines, key=lambda pair: order(pair[0]))) + "\n")
    return "\n" + "\n".join(parts) + "\n"


def totals() -> str:
    """The generated part of docs/reproduce.md: a column of totals for each paper."""
    heads = ["published", "reached", "by one seed", "missed", "at 400 s", "times", "not made", "parameters", "left"]
    columns = []
    for paper in PAPERS.values():
        tables = [name for name, table in TABLES.items() if table.source.startswith(paper.source)]
        verdicts = [verdict for name in tables for verdict in verdicts_of(name, TABLES[name].rows)]
        right, wrong = (verdicts.count(word) for word in COUNTED)
        counted = f"{right} of {right + wrong} right" if right + wrong else ""
        missing = merged(runs for name in tables for runs in missing_runs(name).values())
        left = price(missing).partition(";")[0].removesuffix(" core hours")
        numbers = [len(verdicts), *(verdicts.count(word) for word in VERDICTS)]
        columns.append([paper.source.partition(",")[0], *numbers, counted, left])
    head, *rows = zip(["", *heads], *columns, strict=True)
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, ["--:"] * len(head), *rows)]
    return "\n" + "\n".join(lines) + "\n\n"


def rewritten(page: str, made: str) -> str:
    """The page with the text between its two marks replaced by ``made``."""
    start, end = MADE.search(page).span()  # type: ignore[union-attr]
    return page[:start] + made + page[end:]


if __name__ == "__main__":
    for page, text in ((PAGE, totals()), (INDEX, index()), (FIGURES, published())):
        write_atomic(page, rewritten(page.read_text(), text).encode())
