"""The soundness fuzzer of benchmarks/soundness.py: its first draws hold, and it sees what is wrong."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import lipkit

SPEC = importlib.util.spec_from_file_location("soundness", Path(__file__).parents[1] / "benchmarks/soundness.py")
assert SPEC is not None
assert SPEC.loader is not None
soundness = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(soundness)


def draws(count: int, seed: int = 0, **options: Any) -> list[tuple[str, str]]:
    # Float32 certificates are refused while NNPACK may evaluate convolutions.
    with torch.backends.nnpack.flags(False):
        return [soundness.attempt(seed, index, **options) for index in range(count)]


@pytest.mark.thorough
def test_the_first_draws_hold() -> None:
    found = draws(150)
    for kind in ("matrix_norms", "layers", "networks"):
        assert (kind, "held") in found
    assert ("graphs", "held") in found
    assert ("graphs", "refused") in found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_ten_thousand_draws_hold(seed: int) -> None:
    assert len(draws(10_000, seed)) == 10_000


@pytest.mark.parametrize(("kind", "name"), [("matrix_norms", "lipschitz"), ("layers", "lipschitz")])
def test_it_sees_a_bound_that_is_too_small(monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    right = getattr(lipkit, name)
    monkeypatch.setattr(lipkit, name, lambda *given, **options: right(*given, **options) * 0.999, raising=False)
    with pytest.raises(soundness.Failure, match="is above the bound"):
        draws(40, kinds=[getattr(soundness, kind)])


def test_it_sees_a_radius_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lipkit.certify

    def wrong(*given: Any, **options: Any) -> lipkit.certificates.Certificate:
        found = right(*given, **options)
        return dataclasses.replace(found, radius=1.5 * found.radius)

    monkeypatch.setattr(lipkit, "certify", wrong, raising=False)
    with pytest.raises(soundness.Failure, match="but the logits are"):
        draws(150, kinds=[soundness.networks])


def test_it_sees_a_graph_whose_bound_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lipkit.analyze

    def wrong(*given: Any, **options: Any) -> lipkit.analysis.NetworkBound:
        found = right(*given, **options)
        return dataclasses.replace(found, upper=0.3 * found.upper)

    monkeypatch.setattr(lipkit, "analyze", wrong, raising=False)
    with pytest.raises(soundness.Failure, match="bound"):
        draws(100, kinds=[soundness.graphs])
