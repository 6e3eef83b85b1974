"""Bodies of forward passes, as source text: innocents, and those whose output is no function of one sample alone.

A body reads ``s``, the network of `benchmarks.forward_passes`, and ``x``; what it leaves in ``x`` is the output. One
piece of a kind (`forward_bodies.txt`) is put between innocent steps; a use of the batch's size is put together from
where the size is read, what is computed from it, and what that does to ``x``.
"""

from __future__ import annotations

import random
from pathlib import Path

SHAPES = {"vector": (4,), "sequence": (3, 4), "image": (2, 4, 4)}
# How often each kind is drawn.
KINDS = {
    "batch": 60,
    "mixing": 40,
    "mixing sequence": 25,
    "in place": 40,
    "state": 35,
    "hidden": 8,
    "random": 12,
    "modes": 35,
    "casts": 25,
    "rare": 35,
    "duck": 25,
    "looks": 25,
    "calls": 35,
    "innocent": 60,
    "innocent sequence": 25,
    "image": 20,
}
BEFORE = ("", "", "", "x = s.a(x)\n", "x = torch.relu(s.a(x))\n", "x = x + s.a(x)\n", "x = x.clone()\n", "x = 2 * x\n")
AFTER = ("", "", "", "\nx = s.relu(x)", "\nx = x + 1", "\nx = x.flatten(1)", "\nx = torch.cat((x, x), 1)")


def _read(path: Path) -> dict[str, list[str]]:
    pieces: dict[str, list[str]] = {}
    for line in path.read_text().splitlines()[1:]:
        if line.startswith("# "):
            name = line[2 : line.index(":")]
            pieces[name] = []
        elif line:
            pieces[name].append(line.replace("\\n", "\n"))
    return pieces


PIECES = _read(Path(__file__).with_suffix(".txt"))


def body(draw: random.Random, kind: str) -> tuple[str, str]:
    """A shape's name and the source of a body of this kind."""
    shape = "sequence" if kind.endswith("sequence") else "image" if kind == "image" else "vector"
    if kind == "batch":
        number = draw.choice(PIECES["constants" if draw.random() < 0.06 else "numbers"])
        found = f"n = {draw.choice(PIECES['sizes'])}\nk = {number}\n{draw.choice(PIECES['uses'])}"
    else:
        found = draw.choice(PIECES[kind])
    for name, values in {"<t>": (4, 5, 9, 30, 50), "<f>": (5, 101), "<v>": (5, 8, 50, 1000)}.items():
        found = found.replace(name, str(draw.choice(values)))
    before, after = (draw.choice(BEFORE), draw.choice(AFTER)) if shape == "vector" else ("", "")
    if kind.startswith("innocent") and draw.random() < 0.5:
        found += "\n" + draw.choice(PIECES[kind])
    return shape, (before + found + after).strip()
