"""A run as the explorer shows it: test images, certified radii, and attacks at any radius."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipkit import modules
from lipkit.attacks import pgd
from lipkit.attacks.ascent import misclassified, norms
from lipkit.certificates import Certificate
from lipkit.data import Split
from lipkit.errors import OptionError, RunError
from lipkit.modules.storage import float64_copy
from lipkit.report import Record, read_record
from lipkit.report.examples import class_name, data_uri, is_image
from lipkit.report.run_files import CERTIFICATE, NETWORK, certificate_in, certified_curve
from lipkit.text import format_radius, printable

# Gradient steps of one attack: a fraction of a second on a small network.
ATTACK_STEPS = 40


@dataclass(frozen=True, eq=False)
class ExploredRun:
    """A finished classification run on images, opened for the explorer."""

    name: str
    record: Record
    network: modules.Network  # the exported one, in float32, which is attacked
    exact: modules.Network  # its float64 copy, which confirms examples
    split: Split  # the test samples
    classes: tuple[str, ...]
    certificate: Certificate  # of these samples

    def __len__(self) -> int:
        return len(self.certificate)

    @property
    def largest(self) -> float:
        """End of the radius slider, a multiple of 1/255 above every certified radius and every radius of the record."""
        finite = self.certificate.radius[self.certificate.radius.isfinite()]
        top = max([*(row.eps for row in self.record.certified), *finite.tolist(), 1 / 255])
        return math.ceil(top * 1.25 * 255) / 255  # the slider moves in steps of 1/255

    def summary(self, largest: float) -> dict[str, Any]:
        """Facts of the run, and its certified accuracy at each position of the slider, from 0 to ``largest``."""
        eps = np.arange(round(255 * largest) + 1) / 255
        return {
            "name": self.name,
            "data": printable(self.record.data.name),
            "samples": len(self),
            "clean": self.certificate.clean_accuracy,
            "constant": self.record.lipschitz.computed,
            "curve": {"eps": eps.tolist(), "certified": certified_curve(self.certificate, eps).tolist()},
        }

    def sample(self, index: int) -> dict[str, Any]:
        """One test sample: picture, label, prediction, margin and certified radius."""
        x, y = self._at(index)
        radius = float(self.certificate.radius[index])
        return {
            "index": index,
            "image": data_uri(x[0]),
            "label": class_name(self.classes, int(y[0])),
            "prediction": class_name(self.classes, int(self.certificate.prediction[index])),
            "correct": bool(self.certificate.correct[index]),
            "margin": float(self.certificate.margin[index]),
            "radius": _finite(radius),
            "radius_text": format_radius(radius),
        }

    def attack(self, index: int, eps: float) -> dict[str, Any]:
        """Attack a sample by l2 PGD within ``eps``: the example that float64 confirms, and whether eps is certified."""
        x, y = self._at(index)
        if not (0 <= eps <= 1e6):
            raise OptionError(f"expected a radius between 0 and 1000000, got {eps}")
        correct = bool(self.certificate.correct[index])
        certified = correct and float(self.certificate.radius[index]) > eps
        result = {"index": index, "eps": eps, "eps_text": format_radius(eps), "certified": certified, "found": False}
        if not correct:
            return result | {"verdict": "wrong"}
        found = x
        if eps > 0:
            # Without a range of the network, images in [0, 1] stay there.
            box = self.network.input_range or ((0.0, 1.0) if bool(((x >= 0) & (x <= 1)).all()) else None)
            found = pgd(self.network, x, y, eps=eps, steps=ATTACK_STEPS, restarts=2, box=box)
        with torch.no_grad():
            logits = self.exact(found.double())
        broken = bool(misclassified(logits, y)[0])
        difference = (found - x)[0]
        size = float(difference.abs().max())
        result |= {
            "found": broken,
            "norm": float(norms(found, x)[0]),
            "largest_change": size,
            "verdict": "broken" if broken else "certified" if certified else "unknown",
        }
        if broken:
            # Grey means no change; black or white is the largest change of this example.
            result |= {
                "prediction": class_name(self.classes, int(logits.argmax(1)[0])),
                "image": data_uri(found[0]),
                "difference": data_uri(0.5 + difference / (2 * max(size, 1e-12))),
            }
        return result

    def page(self, start: int, count: int) -> list[dict[str, Any]]:
        """Pictures of up to 64 samples from ``start`` on."""
        shown = range(len(self))[max(start, 0) : max(start + min(count, 64), 0)]
        if not shown:
            return []
        x, _ = self.split.batch(torch.tensor(shown))
        correct, radius = self.certificate.correct.tolist(), self.certificate.radius.tolist()
        return [
            {"index": i, "image": data_uri(image), "correct": correct[i], "radius": _finite(radius[i])}
            for i, image in zip(shown, x, strict=True)
        ]

    def _at(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise OptionError(f"expected a sample between 0 and {len(self) - 1}, got {index}")
        return self.split.batch(torch.tensor([index]))


def open_run(folder: Path, split: Split, classes: Sequence[str]) -> ExploredRun:
    """Open one run folder with its test data; ``RunError`` if its files do not belong together."""
    record = read_record(folder)
    if not isinstance(record, Record) or not is_image(tuple(record.data.input_shape)):
        raise RunError(f"{folder}: expected a run that classifies images, got {record.task} of {record.data.name}")
    again = f"run lipkit certify {folder}, and open the folder that it makes"
    # A later certification is a subfolder; the network is in the run's folder.
    network = modules.load(folder / NETWORK if (folder / NETWORK).is_dir() else folder.parent / NETWORK)
    if modules.sha256(network) != record.network_sha256:
        raise RunError(f"{folder}: expected the network of its record, got another: {again}")
    certificate = certificate_in(folder)
    if certificate is None:
        raise RunError(f"{folder}: expected a certified run with {CERTIFICATE}: {again}")
    if len(certificate) != len(split):
        raise RunError(f"{folder}: expected radii of {len(split)} test samples, got {len(certificate)}")
    return ExploredRun(
        name=printable(record.name),
        record=record,
        network=copy.deepcopy(network).float(),
        exact=float64_copy(network),
        split=split,
        classes=tuple(map(printable, classes)),
        certificate=certificate,
    )


def open_runs(opened: Sequence[tuple[Path, Split, Sequence[str]]]) -> list[ExploredRun]:
    """Open one run, or two on the same test samples to compare.

    Raises:
        RunError: see `open_run`. OptionError: none or more than two, or runs on different test samples.
    """
    if not 1 <= len(opened) <= 2:
        raise OptionError(f"expected one run, or two to compare, got {len(opened)}")
    runs = [open_run(*one) for one in opened]
    first, last = ((run.record.data.name, run.record.data.input_shape, len(run)) for run in (runs[0], runs[-1]))
    if first != last:
        raise OptionError(f"expected two runs on the same test samples, got {first} and {last}")
    return runs


def _finite(value: float) -> float | None:
    """The value; None for infinity and NaN, which JSON lacks."""
    return value if math.isfinite(value) else None
