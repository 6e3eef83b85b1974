"""What the layers are held to: ratios that their geometric means over the shapes should not exceed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.speed.clock import geometric_mean, ratio
from benchmarks.speed.shapes import Shape, parse, shapes_of
from benchmarks.speed.work import HALF, LAST, REFERENCE

Cell = Mapping[str, Any]
"""``shape`` (text), ``batch``, ``phase`` and ``samples`` by contender."""


@dataclass(frozen=True)
class Target:
    """A limit for the geometric mean of ``family:own`` over ``against``; ``worst`` is one for every shape."""

    title: str
    family: str
    phase: str
    limit: float
    batch: int = 128
    against: str = REFERENCE
    own: str = "lipkit"
    least_channels: int = 0
    worst: float | None = None

    def holds_for(self, shape: Shape) -> bool:
        """Whether the shape belongs to the mean: one of the family's own, of enough output channels."""
        return shape in shapes_of(self.family) and shape.cout >= self.least_channels


@dataclass(frozen=True)
class Verdict:
    """A target beside what was measured; ``mean`` and ``worst`` are nan where nothing was."""

    target: Target
    mean: float
    worst: float
    shapes: int
    of: int

    @property
    def met(self) -> bool | None:
        """Whether the limits hold; None where nothing was measured."""
        if not self.shapes or math.isnan(self.mean):
            return None
        return self.mean <= self.target.limit and (self.target.worst is None or self.worst <= self.target.worst)


def _pair(title: str, family: str, train: float | None, forward: float | None, **rest: Any) -> list[Target]:
    limits = {"train": train, "forward": forward}
    return [Target(title, family, phase, limit, **rest) for phase, limit in limits.items() if limit is not None]


TARGETS: tuple[Target, ...] = (
    *_pair("ECO (no shape above 0.6)", "eco", 0.30, 0.25, worst=0.6),
    *_pair("ECO, channels last (no shape above 0.6)", "eco", 0.30, 0.25, worst=0.6, own=LAST),
    *_pair("Cayley, c >= 64", "cayley", 0.9, 0.5, least_channels=64),
    *_pair("Cayley, c >= 128", "cayley", 1.6, 0.6, least_channels=128, batch=32),
    *_pair("Cayley against the textbook", "cayley", 1 / 5, 1 / 12, against="cayley:textbook", batch=32),
    *_pair("Cayley against the textbook", "cayley", 1 / 3, 1 / 6, against="cayley:textbook"),
    *_pair("sandwich against our Cayley", "sandwich", 2.2, 2.2, against="cayley:lipkit", batch=32),
    *_pair("sandwich against our Cayley", "sandwich", 2.2, 2.2, against="cayley:lipkit"),
    *(
        target
        for batch in (32, 128)
        for name in ("bcop", "cayley_bcop", "rko")
        for target in _pair(name, name, None, 1.1, batch=batch)
    ),
    *_pair("SOC", "soc", None, 3.0, batch=32),
    *_pair("SOC", "soc", None, 3.0),
)
AUTOCAST: tuple[Target, ...] = (
    Target("ECO, channels last", "eco", "train", 0.35, own=LAST),
    Target("ECO, bfloat16 weights", "eco", "forward", 0.30, own=HALF),
    Target("Cayley, c >= 64", "cayley", "train", 1.0, least_channels=64),
    Target("Cayley, c >= 64, bfloat16 weights", "cayley", "forward", 0.6, least_channels=64, own=HALF),
    *(Target(name, name, "forward", 1.1) for name in ("bcop", "rko", "aol", "soc")),
    Target("sandwich against our Cayley", "sandwich", "train", 2.2, against="cayley:lipkit"),
)
"""The limits under autocast to bfloat16, the plain convolution under it, too."""
MEMORY = (("cayley", "128@16", 128, {"train": 4.0, "forward": 2.0}),)
"""Family, shape, batch, and the largest ratio of memory to the plain convolution's by phase."""


def verdicts(cells: Sequence[Cell], targets: Sequence[Target] = TARGETS) -> list[Verdict]:
    """Each target beside the ratios measured.

    >>> cell = {"shape": "32@24", "batch": 128, "phase": "train", "samples": {"conv": [2.0], "eco:lipkit": [0.5]}}
    >>> found = verdicts([cell], TARGETS[:1])[0]
    >>> found.mean, found.worst, found.shapes, found.of, found.met
    (0.25, 0.25, 1, 9, True)
    """
    found = []
    for target in targets:
        values = []
        for cell in cells:
            samples, own = cell["samples"], f"{target.family}:{target.own}"
            if (cell["batch"], cell["phase"]) != (target.batch, target.phase) or not target.holds_for(
                parse(cell["shape"])
            ):
                continue
            if own in samples and target.against in samples:
                values.append(ratio(samples[own], samples[target.against]))
        of = sum(map(target.holds_for, shapes_of(target.family)))
        found.append(Verdict(target, geometric_mean(values), max(values, default=math.nan), len(values), of))
    return found
