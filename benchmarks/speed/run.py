"""A whole measurement, from the checks to a dictionary that JSON can hold."""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.speed import floor, memory, networks, others, targets, textbook
from benchmarks.speed.checks import check_small, check_textbook
from benchmarks.speed.clock import clock_of, interleaved, measuring
from benchmarks.speed.shapes import BATCHES, PHASES, Shape, parse, shapes_of
from benchmarks.speed.work import COMPILED, MAKERS, REFERENCE, accepts, contenders

from lipkit.errors import OptionError
from lipkit.layers.families import get
from lipkit.memory import keep_freed_memory
from lipkit.report.record import hardware, versions

FAMILIES = ("eco", "cayley", "sandwich", "bcop", "cayley_bcop", "rko", "soc", "aol", "ossn", "sll", "cpl")
"""Those with a target, or a rival in `others.csv`."""
PARTS = ("layers", "memory", "networks")
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        families: acronyms.
        shapes: for all families; empty: each family's own.
        own_only: whether a family is left out at shapes that are not its own.
        batches, phases, device: of the layers.
        seconds, repeats, least: budget of each contender at each shape; see `interleaved`.
        compiled: whether ``torch.compile`` of each layer is timed too.
        autocast: whether all run under autocast to bfloat16.
        parts: 'layers', 'memory', 'networks'.
        keep_memory: whether this process keeps freed memory from then on, as ``lipkit train`` does; what fresh
            memory costs depends on all that was allocated before, and is the largest part of the noise.
    """

    families: tuple[str, ...] = FAMILIES
    shapes: tuple[Shape, ...] = ()
    own_only: bool = False
    batches: tuple[int, ...] = BATCHES
    phases: tuple[str, ...] = PHASES
    device: str = "cpu"
    seconds: float = 0.6
    repeats: int = 20
    least: int = 3
    compiled: bool = False
    autocast: bool = False
    parts: tuple[str, ...] = PARTS
    keep_memory: bool = False

    def __post_init__(self) -> None:
        for name in self.families:
            get(name)
        if not set(self.parts) <= set(PARTS):
            raise OptionError(f"parts: expected some of {', '.join(PARTS)}, got {', '.join(self.parts)}")
        clock_of(self.device)

    def cells(self) -> list[tuple[Shape, list[str]]]:
        """Each shape with the families that are measured at it; those of one shape take turns with each other."""
        found: dict[Shape, list[str]] = {}
        for name in self.families:
            own = shapes_of(name)
            for shape in self.shapes or own:
                if accepts(get(name), shape) and (shape in own or not self.own_only):
                    found.setdefault(shape, []).append(name)
        return list(found.items())


QUICK = Plan(
    families=("eco", "cayley", "sandwich"),
    shapes=tuple(map(parse, ("64->64s2@16", "256@8", "128@12", "256@6"))),
    own_only=True,
    batches=(128,),
    seconds=0.2,
    repeats=5,
    least=2,
    parts=("layers",),
)
"""Two shapes of each of the families that matter most."""


def measure(
    plan: Plan, note: Callable[[str], None] = lambda text: None, keep: Callable[[Result], None] | None = None
) -> Result:
    """Check the layers, measure what the plan says, and return everything with the facts of the machine.

    Args:
        plan: what to measure.
        note: told what is being measured.
        keep: given the result so far after every step, so that an interruption loses little.

    Raises:
        RunError: a layer is not what it promises to be; nothing is timed then.
    """
    start = time.perf_counter()
    result = facts(plan)
    result["keeps_memory"] = plan.keep_memory and keep_freed_memory()
    clock = clock_of(plan.device)
    result["gate"] = {name: check_small(get(name)) for name in plan.families}
    result["gate"] |= {f"{name} textbook": check_textbook(name) for name in plan.families if name in textbook.LAYERS}
    with measuring(plan.device):
        result["rates"] = dataclasses.asdict(floor.measure_rates(clock, plan.device))
        jobs: list[tuple[str, Callable[[], None]]] = []
        if "layers" in plan.parts:
            for shape, names in plan.cells():
                for batch in plan.batches:
                    for phase in plan.phases:
                        what = f"{shape}, batch {batch}, {phase}: {', '.join(names)}"
                        jobs.append((what, partial(_cell, result, plan, shape, names, batch, phase)))
        if "memory" in plan.parts:
            jobs += [(f"memory: {label} {shape} {phase}", partial(_memory, result, plan, label, shape, batch, phase))
                     for label, shape, batch, phase in memory_jobs(plan)]  # fmt: skip
        if "networks" in plan.parts:
            jobs += [(f"network: {title}", partial(_network, result, plan, title)) for title in networks.NETWORKS]
        for number, (what, job) in enumerate(jobs, start=1):
            note(f"[{number}/{len(jobs)}, {time.perf_counter() - start:.0f} s] {what}")
            job()
            result["seconds"] = time.perf_counter() - start
            if keep is not None:
                keep(result)
    return result


def facts(plan: Plan) -> Result:
    """Machine, versions, options and date; the lists of figures are empty."""
    options = dataclasses.asdict(plan) | {"shapes": [str(shape) for shape in plan.shapes]}
    return {
        "schema": 1,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(plan.device).model_dump(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": versions() | others.installed(),
        "options": options,
        "cells": [],
        "memory": [],
        "networks": [],
        "absent": {},
        "seconds": 0.0,
    }


def _cell(result: Result, plan: Plan, shape: Shape, names: Sequence[str], batch: int, phase: str) -> None:
    absent: dict[str, str] = {}
    makers = (*MAKERS, COMPILED) if plan.compiled else MAKERS
    families = [get(name) for name in names]
    work = contenders(families, shape, batch, phase, plan.device, makers=makers, autocast=plan.autocast, absent=absent)
    samples = interleaved(work, clock_of(plan.device), seconds=plan.seconds, repeats=plan.repeats, least=plan.least)
    result["cells"].append({"shape": str(shape), "batch": batch, "phase": phase, "samples": samples})
    result["absent"] |= {label: f"{reason}, at {shape}, {phase}" for label, reason in absent.items()}


def memory_jobs(plan: Plan) -> list[tuple[str, Shape, int, str]]:
    """Label, shape, batch and phase of every memory measurement: the plain convolution, lipkit and the textbook."""
    found = []
    for family, shape, batch, limits in targets.MEMORY:
        if family in plan.families:
            labels = (REFERENCE, f"{family}:lipkit", *((f"{family}:textbook",) if family in textbook.LAYERS else ()))
            found += [(label, parse(shape), batch, phase) for phase in limits for label in labels]
    return found


def _memory(result: Result, plan: Plan, label: str, shape: Shape, batch: int, phase: str) -> None:
    found = memory.fresh(label, shape, batch, phase, plan.device)
    result["memory"].append({"label": label, "shape": str(shape), "batch": batch, "phase": phase, **found})


def _network(result: Result, plan: Plan, title: str) -> None:
    batch = max(plan.batches)
    samples = networks.measure(
        title, batch, plan.device, seconds=5 * plan.seconds, repeats=plan.repeats, autocast=plan.autocast
    )
    result["networks"].append({"title": title, "batch": batch, "samples": samples})


def rates_of(result: Mapping[str, Any]) -> floor.Rates:
    """The machine's rates in a result."""
    return floor.Rates(**result["rates"])
