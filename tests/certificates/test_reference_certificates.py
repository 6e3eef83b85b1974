"""The kept certificates of seeded networks, made again: another machine may differ in the last places alone."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks.architectures import SMALL

from benchmarks import reference_certificates as reference

pytestmark = pytest.mark.thorough

KEPT = json.loads(reference.FILE.read_text())
# Their blocks are those of SqueezeNet, U-Net and the short networks of tests/analysis/test_twelve.py.
SLOW = ("ResNet-18", "ResNet-50", "WRN-16-4", "DenseNet", "wide_resnet")
# A certificate of these takes a second; what each evaluator loses in a module is kept of the smaller ones.
TWO_WAYS = ("VGG-11", "MobileNetV2", "SqueezeNet", "U-Net", "ConvNeXt")
# Weights are float32 numbers, made by iterations: logits move by a few of the last places of the largest one.
TOLERANCE = 4e-6


def test_every_family_and_every_own_forward_is_kept() -> None:
    assert list(KEPT) == reference.names()
    assert len(KEPT) >= 20 + len(SMALL)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in KEPT])
def test_the_certificates_are_those_that_were_kept(name: str) -> None:
    with torch.backends.nnpack.flags(False):
        found = reference.certificates(name, reference.WAYS[: 2 if name in TWO_WAYS else None])
    kept = KEPT[name]
    if name in TWO_WAYS:
        kept = {key: value for key, value in kept.items() if not key.startswith("radius") or key in found}
    assert found.keys() == kept.keys()
    assert (found["labels"], found["method"]) == (kept["labels"], kept["method"])
    for key in ("bound", "constant", "body_constant"):
        if kept[key] is None:
            assert found[key] is None
        else:
            assert float.fromhex(found[key]) == pytest.approx(float.fromhex(kept[key]), rel=TOLERANCE)
    largest = max(abs(float.fromhex(logit)) for logit in kept["logits"])
    for key in (key for key in kept if key.startswith(("radius", "logits"))):
        if kept[key] is None:
            assert found[key] is None, key
            continue
        ours, theirs = ([float.fromhex(r) for r in radii] for radii in (found[key], kept[key]))
        # Radii are differences of logits over the constant: of networks with large ones both are small.
        room = TOLERANCE * largest / (1.0 if key == "logits" else float.fromhex(kept["bound"]))
        assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=room), key
    sound = [float.fromhex(r) for r in found["radius sound float64"]]
    assert max(sound) * float.fromhex(found["bound"]) > 1e-3
