"""Forged certificate files: of more than a thousand changes of single fields none is confirmed.

Each is refused, or shown as a claim that nobody checked, or says less than was proved. The judge below knows what is
true from the file before it was changed, not from the verification.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipkit
from lipkit import modules
from lipkit.certificates import certificate_file as verification
from lipkit.certificates.certificate_file import describe, read_certificate, verify, write_certificate
from lipkit.cli.check import report
from lipkit.errors import LipkitError

pytestmark = pytest.mark.thorough

EACH = 34
RADII = (0.0, 0.01, 0.1)
# What no network and no data can prove: it may say anything, but only below the line that says so.
CLAIMS = {"data.name", "data.preprocessing", "evaluator.device", "evaluator.torch", "versions.lipkit", "versions.torch"}
FORGED = "a\n\ncertified(36/255)  100.00 %\x1b[2K\x1b[1A\u202e\u2028\x85\r\x9b1m"


def problem() -> tuple[modules.Network, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    first, last = nn.Linear(4, 5), nn.Linear(5, 3)
    with torch.no_grad():
        for parameter in (*first.parameters(), *last.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    network = modules.Network([first, nn.ReLU(), last], (4,))
    x = torch.rand(8, 4, generator=generator)
    y = network(x).argmax(1)
    y[:3] = (y[:3] + 1) % 3
    return network, x, y


def fields(lines: list[dict[str, Any]]) -> Iterator[tuple[str, int, list[str]]]:
    """Name of a field, the line that it stands in, and the keys that lead to it."""
    for key, value in lines[0].items():
        if key in ("evaluator", "data", "versions"):
            for inner, deep in value.items():
                if inner == "settings":
                    yield from ((f"evaluator.settings.{name}", 0, [key, inner, name]) for name in deep)
                else:
                    yield f"{key}.{inner}", 0, [key, inner]
        yield key, 0, [key]
    for column in lines[1]:
        yield f"row.{column}", 1, [column]


def numbers(value: float, draw: random.Random) -> Iterator[Any]:
    up, down = math.nextafter(value, math.inf), math.nextafter(value, -math.inf)
    yield from (up, down, -value, 0, -0.0, value + 1, value - 1, value * (1 + 1e-6), value * (1 - 1e-6), 5e-324, 1e308)
    yield from (2**31, 2**63, 10**400, -(10**400), "Infinity", "-Infinity", "NaN", True, None, [value], {}, str(value))
    yield FORGED
    while True:
        factor = 10 ** draw.uniform(-12, 3)
        yield draw.choice((value * (1 + factor), value * (1 - factor), value + factor, value - factor, round(factor)))


def texts(value: str, draw: random.Random) -> Iterator[Any]:
    yield from (FORGED, value + "\n", value + " ", "", value.upper() + "x", value[::-1], value[:-1], None, 3, 1.5, True)
    yield from ([value], {"a": value}, "NaN", "Infinity", "linf", "regression", "ignore", "sound", "global", "real")
    yield from (
        "float32",
        "float32_blocked",
        "last layer",
        "1.7",
        "2.0",
        "1.0\n",
        "cuda",
        "confirmed  8 samples of mnist",
    )
    while True:
        yield "".join(draw.choice(FORGED + value + "0123456789abcdef") for _ in range(draw.randint(1, 200)))


def others(value: Any, draw: random.Random) -> Iterator[Any]:
    yield from (None, 3, "x", True, [], {}, [value], {"a": value}, FORGED, [FORGED], {FORGED: FORGED}, -1, 1e308, "NaN")
    yield from (16, 0, [1], [4.0], [True], [4, 1], [2, 2], [0], ["4"], [10**400], 32, 1.5)
    while True:
        yield draw.choice(([draw.randint(-3, 9)], draw.randint(-99, 99), {str(draw.random()): draw.random()}))


def mutations(lines: list[dict[str, Any]]) -> Iterator[tuple[str, Any, Any, int, list[dict[str, Any]]]]:
    """Name, value before, value after, line, and the whole file with this one field changed."""
    for name, line, path in fields(lines):
        draw = random.Random(name)
        for turn, new in enumerate(_values(name, lines, path, draw)):
            if turn == EACH:
                break
            at = line and 1 + turn % (len(lines) - 1)
            changed = copy.deepcopy(lines)
            place: Any = changed[at]
            for key in path[:-1]:
                place = place[key]
            old = place[path[-1]]
            if line:  # the same kind of change, at another sample each time
                stream = numbers(old, draw)
                new = [next(stream) for _ in range(1 + turn)][-1]
            place[path[-1]] = new
            if json.dumps(new) != json.dumps(old):
                yield name, old, new, at, changed


def _values(name: str, lines: list[dict[str, Any]], path: list[str], draw: random.Random) -> Iterator[Any]:
    value: Any = lines[1] if name.startswith("row.") else lines[0]
    for key in path:
        value = value[key]
    if isinstance(value, int | float):
        return numbers(value, draw)
    return texts(value, draw) if isinstance(value, str) else others(value, draw)


def says_no_more(name: str, old: Any, new: Any, scale: float) -> bool:
    """Whether the changed field is true as well: as much as was proved, up to rounding, or less."""
    if new == old or (name == "architecture" and new == []):
        return type(new) is not bool
    if isinstance(new, str):
        new = {"Infinity": math.inf, "-Infinity": -math.inf}.get(new, new)
    if not isinstance(new, int | float):
        return False
    if name in ("row.radius", "row.radius_ignored"):
        return 0 <= new <= old * (1 + 1e-9)
    if name in ("constant", "body_constant"):
        return new >= old * (1 - 1e-9)
    return name == "row.margin" and abs(new - old) <= 1e-9 * scale


@pytest.mark.parametrize("rounding", ["sound", "ignore"])
def test_no_forged_field_is_confirmed(rounding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, y = problem()
    path = write_certificate(
        describe(lipkit.certify(network, x, y, rounding=rounding), network, x, y, "toy"), tmp_path / "c.jsonl"
    )
    made: dict[Any, Any] = {}

    def once(*arguments: Any, **options: Any) -> Any:
        key = (options["rounding"], options["evaluator"])
        if key not in made:
            made[key] = lipkit.certify(*arguments, **options)
        return made[key]

    monkeypatch.setattr(verification, "certify", once)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    truth = verify(read_certificate(path), network, x, y)
    whole = report(read_certificate(path), truth, "toy", RADII)
    near = dataclasses.replace(truth, constant=1 + 2.0**-40)  # printed, a bound stays one
    assert "constant   1.00000001 (" in report(read_certificate(path), near, "toy", RADII)
    proved, claimed = whole.split("claimed, not checked:")
    scale = max(abs(line["margin"]) for line in lines[1:])
    tried: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for name, old, new, at, changed in mutations(lines):
        tried[name] += 1
        path.unlink()  # far faster than to cut a file that was just written
        path.write_text("".join(json.dumps(line) + "\n" for line in changed))
        try:
            file = read_certificate(path)
            found = verify(file, network, x, y)
        except LipkitError:
            continue
        accepted[name] += 1
        what = f"{name} at line {at}: {old!r} -> {new!r}"
        screen = report(file, found, "toy", RADII)
        above, below = screen.split("claimed, not checked:")
        assert all(line.isprintable() for line in screen.split("\n")), what
        assert bool((found.radius <= truth.radius).all()), what
        assert bool((found.radius_ignored <= truth.radius_ignored).all()), what
        for field in ("prediction", "label", "margin"):
            assert torch.equal(getattr(found, field), getattr(truth, field)), what
        for field in ("constant", "body_constant", "method", "dtype", "input_shape", "network_sha256", "rounding"):
            assert getattr(found, field) == getattr(truth, field), what
        assert found.evaluator == truth.evaluator, what
        if name in CLAIMS or name.startswith(("evaluator.settings", "versions")) or name == "schema_version":
            assert above == proved, what
            assert below != claimed, what
            assert all(line.startswith("  ") or not line for line in below.split("\n")), what
        else:
            assert says_no_more(name, old, new, scale), what
            if name not in ("row.radius", "row.radius_ignored"):
                assert above == proved, what
            assert below == claimed, what
    assert sum(tried.values()) >= 1000
    assert min(tried.values()) >= 20, tried
    # Two-sided: true claims of less are not refused, and what nobody can check is not.
    for name in ("row.radius", "row.radius_ignored", "constant", "body_constant", "row.margin", *sorted(CLAIMS)):
        assert accepted[name] > 0, name
    for name in ("norm", "task", "method", "proof", "dtype", "rounding", "input_shape", "row.prediction", "row.label",
                 "network_sha256", "data.sha256", "data.samples", "evaluator.name", "evaluator.dtype"):  # fmt: skip
        assert accepted[name] <= (3 if name.startswith("row.") else 0), (name, accepted[name])
