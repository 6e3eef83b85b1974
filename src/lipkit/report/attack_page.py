"""The files of an attack in a run folder: figures as JSON, the examples, and a page that shows them."""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_json
from torch import Tensor

from lipkit.certificates import Certificate
from lipkit.evaluation import Attack, Attacked, Attempt
from lipkit.files import MAX_TEXT, read_bytes, write_atomic
from lipkit.report.examples import is_image
from lipkit.report.html import environment
from lipkit.report.record import now, versions
from lipkit.report.run_files import write_tensors

SCHEMA_VERSION = "1.0"
# Fields of place, time and speed, ignored when results are compared.
_INCIDENTAL = {"created", "seconds", "device", "versions"}


def save_attack(
    folder: Path, attempt: Attempt, attack: Attack, certificate: Certificate, numbers: Tensor, x: Tensor, *,
    data: str, classes: Sequence[str] = (), images: int = 16, seconds: float = math.nan, device: str = "cpu",
) -> Path:  # fmt: skip
    """Write ``attack_NAME_NORM_HASH`` with the endings ``.json``, ``.safetensors`` and ``.html`` into a run folder.

    The hash covers the attack's settings, the data and the network. Existing files are never replaced: an equal result
    of these settings is not written again, a different one gets a name that ends in ``-2``, and so on. Returns the path
    of the JSON file.

    Args:
        certificate: of the attacked samples ``x`` (N, *input_shape); ``numbers`` are their indices in the test set.
        images: number of examples to show and keep, those closest to their certified radius first.
    """
    settings: dict[str, Any] = {
        "attack": attack.name,
        "norm": attack.norm,
        "eps": attack.eps or (),
        **{name: getattr(attack, name) for name in ("steps", "restarts", "samples", "seed", "box")},
        "data": data,
        "network_sha256": certificate.network_sha256,
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    stem = folder / f"attack_{attack.name}_{attack.norm}_{key}"
    place = {int(number): row for row, number in enumerate(numbers)}
    examples = attempt.examples
    at = torch.tensor([place[i] for i in examples.index.tolist()], dtype=torch.int64)  # the row of x of each example
    columns = {"sample": examples.index, "label": certificate.label[at], "prediction": examples.prediction}
    columns |= {"l2": examples.l2, "linf": examples.linf, "radius": certificate.radius[at]}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*map(Tensor.tolist, columns.values()), strict=True)]
    ratio = torch.where(columns["radius"] > 0, examples.l2 / columns["radius"], math.inf)
    order = ratio.sort(stable=True).indices[:images]
    record = {
        "schema_version": SCHEMA_VERSION,
        "run": folder.name,
        "created": now(),
        **settings,
        "ran": attempt.ran,
        "clean": vars(attempt.clean),
        "attacked": [
            {"eps": row.eps, "robust": vars(row.share), "certified": vars(row.certified)} for row in attempt.rows
        ],
        "compared": attempt.cross_check.compared,
        "closest": attempt.cross_check.closest,
        "examples": rows,
        "seconds": seconds,
        "device": device,
        "versions": versions(),
        "kept": len(order),
    }
    # JSON lacks NaN and infinities: they become strings, as in the record of a run.
    record = json.loads(to_json(record, inf_nan_mode="strings"))
    told = {name: value for name, value in record.items() if name not in _INCIDENTAL}
    for number in itertools.count(1):
        path = stem.with_name(stem.name + (f"-{number}" if number > 1 else "") + ".json")
        if not path.exists():
            break
        try:
            there = json.loads(read_bytes(path, MAX_TEXT))
        except (OSError, ValueError, RecursionError):
            continue  # do not replace an unreadable file either
        if isinstance(there, dict) and {k: v for k, v in there.items() if k not in _INCIDENTAL} == told:
            return path
    tensors = {"image": x[at[order]].cpu().float(), "adversarial": examples.point[order]}
    tensors |= {"index": examples.index[order]}
    tensors |= {name: columns[name][order] for name in ("label", "prediction", "l2", "linf")}
    shown = [rows[i] for i in order]
    write_tensors(path.with_suffix(".safetensors"), tensors)
    page = render(record, attempt.rows, shown, tensors["image"], tensors["adversarial"], classes)
    write_atomic(path.with_suffix(".html"), page.encode())
    write_atomic(path, json.dumps(record, indent=2, allow_nan=False).encode() + b"\n")
    return path


def render(
    record: Mapping[str, Any], rows: Sequence[Attacked], shown: Sequence[Mapping[str, Any]], image: Tensor,
    adversarial: Tensor, classes: Sequence[str],
) -> str:  # fmt: skip
    """The page as HTML: accuracies, and each example beside its sample and the difference."""
    figures = []
    if is_image(tuple(image.shape[1:])):
        for row, before, after in zip(shown, image, adversarial, strict=True):
            change = after.float() - before
            grey = 0.5 + change / (2 * change.abs().amax().clamp_min(1e-12))
            figures.append((row, (before, after, grey)))
    page = environment().get_template("attack.html.j2")
    return page.render(record=record, rows=rows, figures=figures, classes=classes)
