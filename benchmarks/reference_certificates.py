"""Seeded networks and their certificates: what a change that should not touch a proof must reproduce.

    python -m benchmarks.reference_certificates --check     # against tests/certificates/reference_certificates.json
    python -m benchmarks.reference_certificates --write     # after a change that is meant to touch proofs

One small network of each family, a few larger ones, and the twelve networks of `benchmarks.architectures`, which have a
forward pass of their own. The file holds, for each, its SHA-256, its constants, the logits of the first sample, and
radii for each way of counting rounding, floats in hexadecimal; a refused evaluator is kept as None. ``--check`` asks
for the same bits, which one machine with one torch gives; another machine's libraries round differently in the last
places, so that the test of the suite compares with a tolerance.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from benchmarks.architectures import NETWORKS, ON_A_BOX, SMALL, settle
from torch import nn

import lipkit
from lipkit import models
from lipkit.errors import LipkitError
from lipkit.layers import families

FILE = Path(__file__).parents[1] / "tests" / "certificates" / "reference_certificates.json"
SAMPLES = 8
WAYS = (
    *(("sound", evaluator) for evaluator in ("float64", "float32", "float32_blocked", "integer")),
    ("ignore", "float64"),
)
SMALL_FAMILY = {"input_shape": (2, 6, 6), "classes": 4, "width": 1}
# Beside one small network of each family: (model, options), with depth, skips, gains and unconstrained layers.
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "lbdn": ("lbdn", {"sizes": [12, 16, 16, 4], "gamma": 2.0}),
    "lbdn_conv": ("lbdn_conv", {"blocks": 1, "width": 4, "hidden": [16], "input_shape": (2, 8, 8), "classes": 4}),
    "lipconvnet": ("lipconvnet", {"width": 0.125, "classes": 4, "input_shape": (3, 32, 32)}),
    "kwlarge": ("kwlarge", {"input_shape": (3, 8, 8), "classes": 4, "mean": (0.5,) * 3, "std": (0.25,) * 3}),
    "wide_resnet": ("wide_resnet", {"widen": 1, "input_shape": (3, 16, 16), "classes": 4}),
    "convnet": ("convnet", {"classes": 4}),
}


def names() -> list[str]:
    """The networks, in their order."""
    return [*families.names(), *FURTHER, *SMALL]


def network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """The model of this name with seeded parameters, in evaluation mode, and the shape of its inputs."""
    if name in SMALL:
        torch.manual_seed(1)
        shape = NETWORKS[name][1]
        model: nn.Module = settle(SMALL[name]()).float()
        if name == "U-Net":  # its outputs are images
            model = nn.Sequential(model, nn.Flatten(), nn.Linear(math.prod(shape), 10))
        return model.eval(), shape
    # Families that join later must not move the seeds of these.
    torch.manual_seed(14 + list(FURTHER).index(name) if name in FURTHER else families.names().index(name))
    if name in FURTHER:
        kind, options = FURTHER[name]
        shape = options.get("input_shape", (12,) if kind == "lbdn" else (1, 8, 8))
        return models.build(kind, **options).eval(), shape
    return models.build("small", layer=name, **SMALL_FAMILY).eval(), SMALL_FAMILY["input_shape"]


def certificates(name: str, ways: tuple[tuple[str, str], ...] = WAYS) -> dict[str, Any]:
    """SHA-256, constants, logits and radii of one network, floats as hexadecimal strings."""
    model, shape = network(name)
    exported = lipkit.export(model, shape, box=(0.0, 1.0) if name in ON_A_BOX else None)
    exported.input_range = (0.0, 1.0)  # integer programs hold no inputs outside a range
    x = torch.rand(SAMPLES, *shape, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        logits = exported(x)
    labels = logits.argmax(1)
    bound = lipkit.lipschitz(exported if name in ON_A_BOX else model, shape)
    found: dict[str, Any] = {"bound": float(bound.detach()).hex(), "labels": labels.tolist()}
    found["logits"] = [value.hex() for value in logits[0].tolist()]
    for rounding, evaluator in ways:
        key = f"radius {rounding} {evaluator}"
        try:
            # Float32 certificates are refused while NNPACK may evaluate convolutions: the caller switches it off.
            made = lipkit.certify(exported, x, labels, rounding=rounding, evaluator=evaluator)
        except LipkitError:
            found[key] = None
            continue
        found |= {
            "sha256": made.network_sha256,
            "constant": made.constant.hex(),
            "body_constant": None if made.body_constant is None else made.body_constant.hex(),
            "method": made.method,
            key: [r.hex() for r in made.radius.tolist()],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true")
    what.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.nnpack.set_flags(False)
    found = {name: certificates(name) for name in names()}
    if given.write:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} networks written to {FILE.name}")
        return
    kept = json.loads(FILE.read_text())
    wrong = [
        f"{name}: {key}"
        for name in kept
        for key in kept[name]
        if name not in found or found[name].get(key) != kept[name][key]
    ]
    if wrong or found.keys() != kept.keys():
        sys.exit("\n".join(["not the same bits:", *wrong, *sorted(found.keys() ^ kept.keys())]))
    print(f"{len(found)} networks, {len(WAYS)} certificates each: the same bits")


if __name__ == "__main__":
    main()
