"""Runs beside each other: one row for each setting, mean and standard deviation over its seeds, and the curves."""

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import markupsafe
import numpy as np

from lipkit.errors import RunError
from lipkit.report import plots
from lipkit.report.html import environment
from lipkit.report.record import RECORD, read_record
from lipkit.report.run_files import certificate_in, certified_curve
from lipkit.report.schema import AnyRecord
from lipkit.shown import upper
from lipkit.text import csv_text, flatten, table
from lipkit.training.options import PLACEMENT

# Keys of a recipe in which runs of one setting may differ. If settings differ in more than MOST_KEYS other keys, rows
# show the names of runs instead.
SAME = re.compile(rf"name|description|data\.root|train\.(seed|{'|'.join(PLACEMENT)})")
MOST_KEYS = 4


@dataclass(frozen=True)
class Setting:
    """Runs whose recipes agree except in `SAME`; ``keys`` are those that tell settings apart, with their values."""

    keys: dict[str, str]
    runs: tuple[Path, ...]
    records: tuple[AnyRecord, ...]

    def values(self, figure: str) -> list[float]:
        """The values of one figure, for every run that has it."""
        return [r.metrics()[figure] for r in self.records if figure in r.metrics()]


def settings(paths: Sequence[Path]) -> list[Setting]:
    """The runs in these folders, each a run or a folder of runs, grouped by setting, in order of first appearance."""
    runs = list({run.resolve(): run for path in paths for run in _runs(path)}.values())  # each run counts once
    records = [read_record(run) for run in runs]
    recipes = [{k: v for k, v in flatten(record.recipe) if not SAME.fullmatch(k)} for record in records]
    names = dict.fromkeys(name for recipe in recipes for name in recipe)
    differing = [name for name in names if len({recipe.get(name) for recipe in recipes}) > 1]
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, recipe in enumerate(recipes):
        groups.setdefault(tuple(recipe.get(name, "") for name in differing), []).append(number)
    # Names of runs without their number; used below only if no other setting has the same.
    bare = [re.sub(r"-\d+$", "", records[members[0]].name) for members in groups.values()]
    result = []
    for (values, members), name in zip(groups.items(), bare, strict=True):
        keys = dict(zip(differing, values, strict=True))
        if not 0 < len(keys) <= MOST_KEYS:
            keys = {"run": name if bare.count(name) == 1 else records[members[0]].name}
        result.append(Setting(keys, tuple(runs[i] for i in members), tuple(records[i] for i in members)))
    return result


def _runs(path: Path) -> list[Path]:
    if path.is_file() or (path / RECORD).exists():
        return [path]
    found = sorted(p for p in path.iterdir() if (p / RECORD).exists()) if path.is_dir() else []
    if not found:
        raise RunError(f"expected a finished run, or a folder of finished runs, got {path}")
    return found


def _columns(found: Sequence[Setting]) -> tuple[list[str], list[str]]:
    """All keys and all figures of the settings, in the order of their first occurrence."""
    keys = dict.fromkeys(key for one in found for key in one.keys)
    figures = dict.fromkeys(name for one in found for record in one.records for name in record.metrics())
    return list(keys), list(figures)


def rows(found: Sequence[Setting]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: the keys in which settings differ, number of runs, mean and standard deviation of figures."""
    keys, figures = _columns(found)
    header = [*(key.rpartition(".")[2] for key in keys), "runs"]
    header += ["L <=" if name == "lipschitz" else name for name in figures]
    body = []
    for one in found:
        cells = [*(one.keys.get(key, "") for key in keys), str(len(one.runs))]
        body.append(cells + [_cell(name, one.values(name)) for name in figures])
    return header, body


def _cell(name: str, values: Sequence[float]) -> str:
    """Mean and standard deviation as text, such as 98.00 ± 1.41 %."""
    if not values or name == "lipschitz":  # the largest bound holds for all runs
        return upper(max(values)) if values else ""
    per_cent = name == "clean" or name.endswith(")")  # certified(36/255)
    known = len(values) > 1 and all(map(math.isfinite, values))  # the tightness of a constant network is NaN
    mean, spread = statistics.fmean(values), statistics.stdev(values) if known else None
    if per_cent:
        return f"{100 * mean:.2f}{'' if spread is None else f' ± {100 * spread:.2f}'} %"
    return f"{mean:.5g}{'' if spread is None else f' ± {spread:.2g}'}"


def to_text(found: Sequence[Setting]) -> str:
    """The table in aligned columns."""
    header, body = rows(found)
    text = table(header, body)
    if any(len(one.runs) > 1 for one in found):
        text += "\n\nmean ± standard deviation (n - 1) over the runs of a row"
    # Networks from elsewhere have no seed.
    seeds = [[record.seed for record in one.records if record.seed is not None] for one in found]
    repeated = sum(len(row) - len(set(row)) for row in seeds)
    return text + (f"; runs that repeat a seed of their row: {repeated}" if repeated else "")


def to_csv(found: Sequence[Setting]) -> str:
    """CSV with a line for each run: run, the keys in which settings differ, seed, figures that read back exactly."""
    keys, figures = _columns(found)
    apart = [key for key in keys if key != "run"]  # the column of folders has it
    lines: list[list[object]] = [["run", *apart, "seed", *figures]]
    for one in found:
        values = [one.keys.get(key, "") for key in apart]
        for run, record in zip(one.runs, one.records, strict=True):
            lines.append([run, *values, record.seed, *(record.metrics().get(name, "") for name in figures)])
    return csv_text(lines).rstrip("\n")


def to_latex(found: Sequence[Setting]) -> str:
    r"""The table for a paper, with the rules of the package booktabs."""
    header, body = rows(found)
    lines = [" & ".join(_latex(cell) for cell in row) + r" \\" for row in (header, *body)]
    columns = "l" * (header.index("runs")) + "r" * (len(header) - header.index("runs"))
    top = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule"]
    return "\n".join([*top, *lines[1:], r"\bottomrule", r"\end{tabular}"])


def _latex(cell: str) -> str:
    r"""A cell in LaTeX.

    >>> print(_latex("cayley_bcop: 98.0 ± 1.4 %, L <= 1"))
    cayley\_bcop: 98.0 $\pm$ 1.4 \%, L $\le$ 1
    """
    # Escape LaTeX's special characters; replace those whose escape would be a command.
    cell = re.sub(r"([&%#_{}$])", r"\\\1", cell.replace("\\", "/").replace("~", " ").replace("^", " "))
    return cell.replace("±", r"$\pm$").replace("<=", r"$\le$")


def to_html(found: Sequence[Setting]) -> str:
    """The table and the curves of certified accuracy as a page that loads nothing."""
    curves = {}  # name of the setting -> certificates of its runs, and where the curve ends
    for one in found:
        made = [each for each in map(certificate_in, filter(Path.is_dir, one.runs)) if each is not None]
        if made:
            name = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in one.keys.items())
            known = [each.radius[each.radius.isfinite()] for each in made]
            curves[name] = (made, max((float(radii.quantile(0.99)) for radii in known if len(radii)), default=1.0))
    eps = np.linspace(0, max((end for _, end in curves.values()), default=1.0), 300)
    lines = {
        name: (eps, np.mean([certified_curve(c, eps) for c in made], axis=0)) for name, (made, _) in curves.items()
    }
    picture = markupsafe.Markup(plots.certified_curves(lines) if lines else "")
    header, body = rows(found)
    runs = [(run, record) for one in found for run, record in zip(one.runs, one.records, strict=True)]
    page = environment().get_template("comparison.html.j2")
    return page.render(header=header, rows=body, curves=picture, runs=runs)


FORMS = {"text": to_text, "csv": to_csv, "latex": to_latex, "html": to_html}
"""Writers of a comparison, by the name of the form."""
