"""The tables of a record, and the format of figures in them."""

import math

from lipkit.certificates.intervals import Share
from lipkit.evaluation import Latency
from lipkit.report.schema import AnyRecord, Record, RegressionRecord, RoundingRecord, ShareRecord
from lipkit.shown import lower, upper
from lipkit.text import format_radius, printable, table


def percent(value: float) -> str:
    """A fraction as a percentage with two decimals.

    >>> percent(0.98765), percent(float("nan"))
    ('98.77 %', 'n/a')
    """
    return "n/a" if math.isnan(value) else f"{100 * value:.2f} %"


def interval(share: Share | ShareRecord) -> str:
    """The interval of an accuracy in per cent, rounded to two decimals."""
    return f"{100 * share.low:.2f} to {100 * share.high:.2f}"


def seconds(value: float) -> str:
    """Seconds as a time that is easy to read.

    >>> seconds(0.1234), seconds(75.2), seconds(7384)
    ('0.12 s', '1 min 15 s', '2 h 03 min')
    """
    if value < 60:
        return f"{value:.2f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def accuracy_rows(record: Record) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the accuracy table: clean, then one row for each radius.

    The header has the numbers of samples if only a part was attacked.
    """
    level = f"{100 * record.confidence:g} % interval"
    attacked = {row.eps: row for row in record.attacked}
    total, part = record.clean.total, min((row.share.total for row in record.attacked), default=record.clean.total)
    whole, some = (f" (all {total})", f" ({part} of them)") if part < total else ("", "")
    header = ["l2 radius", f"certified{whole}", level, f"{record.attack.short.upper()}{some}", level]
    rows = [["0 (clean)", percent(record.clean.value), interval(record.clean), "", ""]]
    both = any(row.ignored is not None for row in record.certified)  # with and without rounding
    if both:
        header.append("rounding ignored")
        rows[0].append(percent(record.clean.value))
    certified = {row.eps: row for row in record.certified}
    for eps in sorted(certified.keys() | attacked.keys()):
        cells = [format_radius(eps)]
        for found in (certified.get(eps), attacked.get(eps)):
            cells += [percent(found.share.value), interval(found.share)] if found else ["", ""]
        if both:
            ignored = certified[eps].ignored if eps in certified else None
            cells.append(percent(ignored.value) if ignored else "")
        rows.append(cells)
    return header, rows


def class_rows(record: Record) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table by class."""
    radii = [format_radius(row.eps) for row in record.certified]
    header = ["class", "samples", "clean", *(f"certified {radius}" for radius in radii)]
    rows = []
    for row in record.per_class:
        shares = [row.clean, *row.certified]
        rows.append([row.name, str(row.clean.total), *(percent(share.value) for share in shares)])
    return header, rows


def output_rows(record: RegressionRecord) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table by output: error, largest deviation for delta, constant, steepest slope seen."""
    header = ["output", "RMSE", f"deviation for {record.delta:g}", "certified gain", "steepest seen", "tightness"]
    rows = []
    for number, row in enumerate(record.outputs):
        tightness = row.steepest / row.constant if row.constant > 0 else math.nan
        figures = [f"{row.rmse:.5g}", upper(row.deviation, 5), upper(row.constant, 5), lower(row.steepest, 5)]
        rows.append([str(number), *figures, percent(tightness)])
    return header, rows


def summary(record: AnyRecord) -> str:
    """A record in plain text: name, Lipschitz constants, accuracies or errors."""
    lines = [record.name, f"L <= {upper(record.lipschitz.computed)} (proved, {record.lipschitz.method})"]
    if isinstance(record, RegressionRecord):
        lines += [
            f"lower bound {lower(record.lower)}, tightness {percent(record.tightness)}",
            f"test MSE {record.mse:.5g}; outputs move by at most {upper(record.deviation, 5)} "
            f"for an input that moves by {record.delta:g}",
        ]
    if record.rounding is not None:
        lines.append(rounding(record.rounding))
    if record.latency is not None:
        lines.append(latency(record.latency))
    figures = output_rows(record) if isinstance(record, RegressionRecord) else accuracy_rows(record)
    return "\n".join([*map(printable, lines), "", table(*figures)])


def rounding(found: RoundingRecord) -> str:
    """One sentence that tells whether certificates include rounding errors."""
    if found.rounding != "sound":
        return "certified for real arithmetic, rounding errors ignored"
    return f"certified for {found.evaluator.replace('_', ' ')} evaluation, rounding errors included"


def latency(found: Latency) -> str:
    """The latency in one sentence.

    >>> latency(Latency(median=0.123456, low=0.1, high=0.2, runs=100, threads=1, device="cpu"))
    'batch 1: 0.123 ms (median of 100 runs, 80 % between 0.1 and 0.2 ms, 1 thread, cpu)'
    """
    threads = f"{found.threads} thread{'' if found.threads == 1 else 's'}"
    spread = f"80 % between {found.low:.3g} and {found.high:.3g} ms"
    return f"batch 1: {found.median:.3g} ms (median of {found.runs} runs, {spread}, {threads}, {found.device})"
