"""A run as the explorer shows it: its test images, certified radii, and attacks at any radius."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipkit import modules
from lipkit.attacks import pgd
from lipkit.attacks.ascent import misclassified
from lipkit.attacks.balls import norms
from lipkit.certificates import format_radius
from lipkit.certificates.measurement import float64_copy
from lipkit.data import Split
from lipkit.errors import OptionError, RunError
from lipkit.report import Record, read_record
from lipkit.report.examples import class_name, data_uri, is_image
from lipkit.report.run_files import RADII, read_radii
from lipkit.text import printable

# Gradient steps of one attack: a fraction of a second on a small network.
ATTACK_STEPS = 40
NETWORK = "network"


@dataclass(frozen=True, eq=False)
class ExploredRun:
    """A finished classification of images, opened to be looked at.

    ``network`` is the exported network, ``exact`` its float64 copy, ``split`` the test samples, and ``correct``,
    ``prediction``, ``radius`` and ``margin`` (N,) what its certificate says of them.
    """

    name: str
    record: Record
    network: modules.Network
    exact: modules.Network
    split: Split
    classes: tuple[str, ...]
    correct: Tensor
    prediction: Tensor
    radius: Tensor
    margin: Tensor

    def __len__(self) -> int:
        return len(self.radius)

    @property
    def largest(self) -> float:
        """End of the radius slider: above the largest certified radius and every radius of the record, in 1/255."""
        finite = self.radius[self.radius.isfinite()]
        top = max([*(row.eps for row in self.record.certified), *finite.tolist(), 1 / 255])
        return math.ceil(top * 1.25 * 255) / 255

    def summary(self, largest: float) -> dict[str, Any]:
        """Facts of the run and its certified accuracy at every position of the slider, up to ``largest``."""
        eps = torch.arange(round(255 * largest) + 1, dtype=torch.float64) / 255
        held = self.radius[self.correct].sort().values
        above = len(held) - torch.searchsorted(held, eps, right=True)
        return {
            "name": self.name,
            "data": printable(self.record.data.name),
            "samples": len(self),
            "clean": float(self.correct.double().mean()),
            "constant": self.record.lipschitz.computed,
            "curve": {"eps": eps.tolist(), "certified": (above.double() / max(len(self), 1)).tolist()},
        }

    def sample(self, index: int) -> dict[str, Any]:
        """One test sample: picture, label, prediction, margin and certified radius."""
        x, y = self._at(index)
        return {
            "index": index,
            "image": data_uri(x[0]),
            "label": self._name(int(y[0])),
            "prediction": self._name(int(self.prediction[index])),
            "correct": bool(self.correct[index]),
            "margin": float(self.margin[index]),
            "radius": _finite(float(self.radius[index])),
            "radius_text": format_radius(float(self.radius[index])),
        }

    def attack(self, index: int, eps: float) -> dict[str, Any]:
        """The point that l2 PGD finds within ``eps`` of a sample, confirmed in float64, beside what is certified there.

        Raises:
            OptionError: an index or radius out of range.
        """
        x, y = self._at(index)
        if not (0 <= eps <= 1e6):
            raise OptionError(f"expected a radius between 0 and 1000000, got {eps}")
        certified = bool(self.correct[index]) and float(self.radius[index]) > eps
        result = {"index": index, "eps": eps, "eps_text": format_radius(eps), "certified": certified, "found": False}
        if not bool(self.correct[index]):
            return result | {"verdict": "wrong"}
        found = x
        if eps > 0:
            box = self.network.input_range or ((0.0, 1.0) if bool(((x >= 0) & (x <= 1)).all()) else None)
            found = pgd(self.network, x, y, eps=eps, steps=ATTACK_STEPS, restarts=2, box=box)
        with torch.no_grad():
            logits = self.exact(found.double())
        broken = bool(misclassified(logits, y)[0])
        difference = (found - x)[0]
        size = float(difference.abs().max())
        result |= {
            "found": broken,
            "norm": float(norms(found.double(), x.double())[0]),
            "largest_change": size,
            "verdict": "broken" if broken else "certified" if certified else "unknown",
        }
        if broken:
            # Grey is no change; the largest change of this example is black or white.
            result |= {
                "prediction": self._name(int(logits.argmax(1)[0])),
                "image": data_uri(found[0]),
                "difference": data_uri(0.5 + difference / (2 * max(size, 1e-12))),
            }
        return result

    def page(self, start: int, count: int) -> list[dict[str, Any]]:
        """Pictures of up to 64 samples from ``start`` on."""
        index = torch.arange(len(self))[max(start, 0) : max(start + min(count, 64), 0)]
        if not len(index):
            return []
        x, _ = self.split.batch(index)
        return [
            {"index": int(i), "image": data_uri(image), "correct": bool(self.correct[i]), "radius": _finite(float(r))}
            for i, image, r in zip(index, x, self.radius[index], strict=True)
        ]

    def _at(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise OptionError(f"expected a sample between 0 and {len(self) - 1}, got {index}")
        x, y = self.split.batch(torch.tensor([index]))
        return x.float(), y

    def _name(self, label: int) -> str:
        return class_name(self.classes, label)


def open_run(folder: Path, split: Split, classes: Sequence[str]) -> ExploredRun:
    """Open one run folder beside its test data.

    Raises:
        RunError: not a finished classification of images, or files that do not belong together.
    """
    record = read_record(folder)
    if not isinstance(record, Record) or not is_image(tuple(record.data.input_shape)):
        raise RunError(f"{folder}: expected a run that classifies images, got {record.task} of {record.data.name}")
    again = f"run lipkit certify {folder}, and open the folder that it makes"
    # A later certification lies in a folder of its own in the run's.
    network = modules.load(folder / NETWORK if (folder / NETWORK).is_dir() else folder.parent / NETWORK)
    if modules.sha256(network) != record.network_sha256:
        raise RunError(f"{folder}: expected the network of its record, got another: {again}")
    radii = read_radii(folder)
    if radii is None:
        raise RunError(f"{folder}: expected a certified run with {RADII}: {again}")
    if len(radii) != len(split):
        raise RunError(f"{folder}: expected radii of {len(split)} test samples, got {len(radii)}")
    return ExploredRun(
        name=printable(record.name),
        record=record,
        network=copy.deepcopy(network).float(),
        exact=float64_copy(network),
        split=split,
        classes=tuple(map(printable, classes)),
        correct=torch.from_numpy(radii.correct),
        prediction=torch.from_numpy(radii.prediction),
        radius=torch.from_numpy(radii.radius),
        margin=torch.from_numpy(radii.margin),
    )


def open_runs(opened: Sequence[tuple[Path, Split, Sequence[str]]]) -> list[ExploredRun]:
    """One run, or two on the same test samples to be compared.

    Raises:
        RunError: see `open_run`. OptionError: none or more than two, or runs on different test samples.
    """
    if not 1 <= len(opened) <= 2:
        raise OptionError(f"expected one run, or two to compare, got {len(opened)}")
    runs = [open_run(folder, split, classes) for folder, split, classes in opened]
    if len(runs) == 2:
        data = [(run.record.data.name, run.record.data.input_shape, len(run)) for run in runs]
        if data[0] != data[1]:
            raise OptionError(f"expected two runs on the same test samples, got {data[0]} and {data[1]}")
    return runs


def _finite(value: float) -> float | None:
    """The value; None for infinity and NaN, which JSON lacks."""
    return value if math.isfinite(value) else None
