"""One claim of ``benchmarks/performance``: measure what it needs, print its tables."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from lipkit.benchmark.run import Plan, measure
from lipkit.benchmark.table import sections


def show(claim: str | None, plan: Plan, arguments: list[str] | None = None) -> None:
    """Measure a plan and print its tables.

    Args:
        claim: in words, the help of the script.
        plan: what to measure.
        arguments: ``--device``, ``--seconds``; None takes them from ``sys.argv``.
    """
    parser = argparse.ArgumentParser(description=claim)
    parser.add_argument("--device", default=plan.device)
    parser.add_argument("--seconds", type=float, default=plan.seconds, help="of each contender at each shape")
    given = parser.parse_args(arguments)
    chosen = dataclasses.replace(plan, device=given.device, seconds=given.seconds, keep_memory=arguments is None)
    result = measure(chosen, lambda line: print(line, file=sys.stderr, flush=True))
    for table in sections({"command": " ".join(["python", *sys.argv]), **result}).values():
        print(f"{table}\n")
