"""The report of a run: one HTML page that loads nothing, made from the run folder alone."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from lipkit.errors import RunError
from lipkit.files import write_atomic
from lipkit.report import plots, tables
from lipkit.report.curve import curve_plot, load_curve
from lipkit.report.examples import GROUPS, Example, class_name, data_uri, is_image, load_examples
from lipkit.report.record import read_record
from lipkit.report.run_files import certificate_in, read_series
from lipkit.report.schema import RegressionRecord
from lipkit.shown import lower, upper
from lipkit.text import flatten, format_radius, printable, visible

REPORT = "report.html"


def write_report(folder: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    Reads ``record.json`` and, if present, ``certificate.jsonl``, ``metrics.jsonl``, ``examples.safetensors`` and
    ``curve.safetensors`` (of a regression). The page holds its pictures and styles, and may load nothing else.

    Raises:
        RunError, DataError: the folder has no record, or a file in it cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"expected a run folder, got {folder}: no such folder")
    record = read_record(folder)
    # SVG text was escaped by matplotlib; nothing else enters the page unescaped.
    if isinstance(record, RegressionRecord):
        graph = load_curve(folder)
        curve = "" if graph is None else curve_plot(record, graph)
        results: dict[str, Any] = {"outputs": tables.output_rows(record)}
    else:
        curve = plots.accuracy_curve(record, certificate_in(folder))
        results = {"accuracy": tables.accuracy_rows(record), "groups": _groups(folder)}
    page = environment().get_template(f"{record.task}.html.j2")
    training = markupsafe.Markup(plots.training_curves(read_series(folder)))
    recipe, model = list(flatten(record.recipe)), _model(record.recipe)
    text = page.render(
        record=record, training=training, recipe=recipe, model=model, curve=markupsafe.Markup(curve), **results
    )
    write_atomic(folder / REPORT, text.encode())
    return folder / REPORT


def environment() -> jinja2.Environment:
    """The jinja environment of a run's pages: templates, and filters that format figures."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("lipkit.report"),
        autoescape=True,  # names come from outside
        undefined=jinja2.StrictUndefined,
        finalize=visible,  # control characters in names show as such
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "percent": tables.percent,
        "interval": tables.interval,
        "radius": format_radius,
        "seconds": tables.seconds,
        "latency": tables.latency,
        "breakable": _breakable,
        "number": lambda value: f"{value:.8g}",
        "upper": upper,
        "lower": lower,
        "uri": data_uri,
        "name_of": lambda label, classes: class_name(classes, label),
    }
    return made


def _breakable(name: str) -> markupsafe.Markup:
    """A dotted name as HTML, with a possible line break after each dot and underscore."""
    escaped = markupsafe.escape(printable(name))  # escape before adding tags
    for mark in "._":
        escaped = escaped.replace(mark, markupsafe.Markup(f"{mark}<wbr>"))
    return escaped


def _model(recipe: Mapping[str, Any]) -> str:
    """The network in words: its name and its options, such as small, layer cayley."""
    model = recipe.get("model")
    if not isinstance(model, Mapping) or "name" not in model:
        return ""
    options = (f"{key} {value}" for key, value in flatten(model.get("options") or {}))
    return ", ".join([str(model["name"]), *options])


def _groups(folder: Path) -> list[tuple[str, list[Example]]]:
    """The groups of examples that can be shown, each with its title."""
    images = [example for example in load_examples(folder) if is_image(tuple(example.image.shape))]
    groups = [(title, [image for image in images if image.group == number]) for number, title in enumerate(GROUPS)]
    return [group for group in groups if group[1]]
