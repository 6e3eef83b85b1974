"""A measurement as tables in Markdown: targets first, then every shape; and their place in a document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed import floor, targets
from benchmarks.speed.clock import geometric_mean, median, ratio
from benchmarks.speed.networks import epoch
from benchmarks.speed.others import Others
from benchmarks.speed.run import rates_of
from benchmarks.speed.shapes import parse
from benchmarks.speed.targets import AUTOCAST, TARGETS, Verdict, verdicts
from benchmarks.speed.work import COMPILED, HALF, LAST, MAKERS, PADDED, REFERENCE

from lipkit.errors import OptionError
from lipkit.files import write_atomic
from lipkit.text import table as aligned

Result = Mapping[str, Any]
PHASE_NAMES = {"train": "training step", "forward": "exported forward"}
# The plain convolution with TF32 and in bfloat16 is timed on CUDA only.
PLAIN = ("zero", f"{REFERENCE} {LAST}", "conv tf32", "conv bf16")
MEMBERS = ("lipkit", LAST, PADDED, HALF, COMPILED, *(maker for maker in MAKERS if maker != "lipkit"))


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, its head first; empty if there is no other row."""
    head, *others = rows
    return aligned(head, others, markdown=True) if others else ""


def number(value: float) -> str:
    """Three digits, or a dash for nan.

    >>> number(0.12345), number(12.345), number(float("nan"))
    ('0.123', '12.3', '-')
    """
    return "-" if math.isnan(value) else f"{value:.3g}"


def family_table(result: Result, family: str, phase: str, others: Others | None = None) -> str:
    """Every shape of one family in one phase, as ratios to the plain convolution, and the geometric means.

    Columns with a star are figures of ``others``, measured elsewhere.
    """
    own = f"{family}:lipkit"
    cells = [c for c in result["cells"] if c["phase"] == phase and own in c["samples"]]
    if not cells:
        return ""
    present = {label for cell in cells for label in cell["samples"]}
    plain = [label for label in PLAIN if label in present]
    members = [maker for maker in MEMBERS if f"{family}:{maker}" in present]
    labels = [*plain, *(f"{family}:{maker}" for maker in members)]
    with_floor = family in floor.FAMILIES and not result["options"].get("autocast")
    cases = [(others or {}).get((family, cell["shape"], cell["batch"], phase), {}) for cell in cells]
    libraries = sorted({library for case in cases for library in case})
    heads = ["shape", "batch", f"{REFERENCE} ms", *plain, *members, *(f"{library}*" for library in libraries)]
    rows = [heads + (["floor ms", "operations ms", "bytes ms", "gap"] if with_floor else [])]
    for cell, case in zip(cells, cases, strict=True):
        samples, reference = cell["samples"], cell["samples"][REFERENCE]
        ratios = [ratio(samples[label], reference) if label in samples else math.nan for label in labels]
        ratios += [case.get(library, math.nan) for library in libraries]
        row = [cell["shape"], str(cell["batch"]), number(1e3 * median(reference)), *map(number, ratios)]
        if with_floor:
            row += _floor_cells(result, cell, family, phase)
        rows.append(row)
    for batch in dict.fromkeys(cell["batch"] for cell in cells):
        means = []
        for label in labels:
            same = [c["samples"] for c in cells if c["batch"] == batch and label in c["samples"]]
            means.append(number(geometric_mean(ratio(s[label], s[REFERENCE]) for s in same)))
        rows.append(["geometric mean", str(batch), "", *means, *[""] * (len(libraries) + (4 if with_floor else 0))])
    return _markdown(rows)


def _floor_cells(result: Result, cell: Mapping[str, Any], family: str, phase: str) -> list[str]:
    shape, batch, rates = parse(cell["shape"]), cell["batch"], rates_of(result)
    least = floor.floor(family, shape, batch, phase, rates)
    counted = floor.operations(family, shape, batch, phase) / rates.operations
    moved = floor.traffic(family, shape, batch, phase) / rates.bytes
    gap = median(cell["samples"][f"{family}:lipkit"]) / least
    return [*(number(1e3 * value) for value in (least, counted, moved)), number(gap)]


def target_table(found: Sequence[Verdict]) -> str:
    """Targets beside the geometric means; those with nothing measured are left out."""
    rows = [["target", "phase", "batch", "limit", "measured", "worst shape", "shapes", ""]]
    for one in found:
        if one.met is not None:
            of = "" if one.shapes == one.of else f" of {one.of}"
            rows.append([
                one.target.title, PHASE_NAMES[one.target.phase], str(one.target.batch), number(one.target.limit),
                number(one.mean), number(one.worst), f"{one.shapes}{of}", "met" if one.met else "missed",
            ])  # fmt: skip
    return _markdown(rows)


def memory_table(result: Result) -> str:
    """Megabytes, as measured and as multiples of the plain convolution's, beside the limits."""
    rows = [["layer", "shape", "batch", "phase", "peak MB", "added MB", "ratio", "saved MB", "ratio", "limit", ""]]
    limits = {(f, s, b): limit for f, s, b, limit in targets.MEMORY}
    base = {(m["shape"], m["batch"], m["phase"]): m for m in result["memory"] if m["label"] == REFERENCE}
    for one in result["memory"]:
        plain = base.get((one["shape"], one["batch"], one["phase"]), {})
        added, saved = (one[k] / plain[k] if plain.get(k) else math.nan for k in ("added", "saved"))
        family, _, maker = one["label"].partition(":")
        limit = limits.get((family, one["shape"], one["batch"]), {}).get(one["phase"])
        judged = [limit is not None and maker == "lipkit", all(r <= (limit or 0) for r in (added, saved) if r == r)]
        rows.append([
            one["label"], one["shape"], str(one["batch"]), PHASE_NAMES[one["phase"]], number(one["peak"] / 1e6),
            number(one["added"] / 1e6), number(added), number(one["saved"] / 1e6), number(saved),
            number(limit) if judged[0] and limit else "", ("met" if judged[1] else "missed") if judged[0] else "",
        ])  # fmt: skip
    return _markdown(rows)


def network_table(result: Result) -> str:
    """Seconds of one training step and of an epoch of CIFAR-10 at that pace."""
    rows = [["network", "batch", "plain step s", "lipkit step s", "ratio", "plain epoch s", "lipkit epoch s"]]
    for one in result["networks"]:
        plain, own = median(one["samples"]["plain"]), median(one["samples"]["lipkit"])
        pace = ratio(one["samples"]["lipkit"], one["samples"]["plain"])
        epochs = [f"{epoch(value, one['batch']):.0f}" for value in (plain, own)]
        rows.append([one["title"], str(one["batch"]), number(plain), number(own), number(pace), *epochs])
    return _markdown(rows)


def provenance(result: Result) -> str:
    """On what, when, with what and by which command."""
    machine, rates = result["hardware"], rates_of(result)
    parts = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    load = "" if result["load"] is None else f"; load average at the start {result['load']:.2f}"
    load += ", freed memory kept" if result.get("keeps_memory") else ""
    load += ", all under autocast to bfloat16" if result["options"].get("autocast") else ""
    return (
        f"`{result['command']}`, {result['created']}, {result['seconds'] / 60:.1f} minutes: {machine['cpu']}, "
        f"{machine['device']}, one thread of {machine['cores']} cores{load}. {parts}. Measured rates: products of "
        f"matrices {rates.operations / 1e9:.3g} GFLOP/s, copies {rates.bytes / 1e9:.3g} GB/s (float32)."
    )


def sections(result: Result, others: Others | None = None) -> dict[str, str]:
    """The text of each part that was measured: 'layers', 'memory', 'networks'; ``others`` as in `family_table`."""
    found = {}
    if result["cells"]:
        limits = AUTOCAST if result["options"].get("autocast") else TARGETS
        blocks = [target_table(verdicts(result["cells"], limits))]
        for family in result["options"]["families"]:
            for phase in result["options"]["phases"]:
                table = family_table(result, family, phase, others)
                blocks += [f"### {family}: {PHASE_NAMES[phase]}", table] if table else []
        if result["absent"]:
            blocks.append("Left out: " + "; ".join(f"{k} ({v})" for k, v in result["absent"].items()) + ".")
        found["layers"] = "\n\n".join(filter(None, blocks))
    found |= {"memory": memory_table(result), "networks": network_table(result)}
    return {part: f"{provenance(result)}\n\n{text}" for part, text in found.items() if text}


def write_document(path: Path, result: Result, others: Others | None = None) -> list[str]:
    """Replace the measured parts of a document between their markers, and return their names.

    The markers of part P on device D are the lines ``<!-- bench D P -->`` and ``<!-- end of D P -->``; of a result
    under autocast they name ``autocast P``.

    Raises:
        OptionError: a marker is missing; the document is then as it was.
    """
    text = path.read_text(encoding="utf-8")
    device = str(result["options"]["device"]).partition(":")[0]
    device += " autocast" if result["options"].get("autocast") else ""
    found = sections(result, others)
    for part, content in found.items():
        first, last = f"<!-- bench {device} {part} -->", f"<!-- end of {device} {part} -->"
        before, one, rest = text.partition(first)
        _, two, after = rest.partition(last)
        if not one or not two:
            raise OptionError(f"{path}: expected the lines {first} and {last}, got a document without them")
        text = f"{before}{first}\n{content}\n{last}{after}"
    write_atomic(path, text.encode())
    return list(found)
