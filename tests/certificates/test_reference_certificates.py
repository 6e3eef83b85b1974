"""The kept certificates of twenty seeded networks, made again: another machine may differ in the last places alone."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("reference_certificates", ROOT / "benchmarks/reference_certificates.py")
assert SPEC is not None
assert SPEC.loader is not None
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)
KEPT = json.loads(reference.FILE.read_text())
# Weights are float32 numbers, rounded once: logits of order 1 move by a few of their last places.
TOLERANCE = 2e-6


def test_every_family_and_twenty_networks_are_kept() -> None:
    assert list(KEPT) == reference.names()
    assert len(KEPT) >= 20


@pytest.mark.parametrize("name", list(KEPT))
def test_the_certificates_are_those_that_were_kept(name: str) -> None:
    with torch.backends.nnpack.flags(False):
        found = reference.certificates(name)
    kept = KEPT[name]
    assert found.keys() == kept.keys()
    assert (found["labels"], found["method"]) == (kept["labels"], kept["method"])
    for key in ("bound", "constant", "body_constant"):
        assert float.fromhex(found[key]) == pytest.approx(float.fromhex(kept[key]), rel=TOLERANCE)
    for key in (key for key in kept if key.startswith("radius")):
        ours, theirs = ([float.fromhex(r) for r in radii] for radii in (found[key], kept[key]))
        assert ours == pytest.approx(theirs, abs=TOLERANCE), key
        assert max(ours) > 1e-3
