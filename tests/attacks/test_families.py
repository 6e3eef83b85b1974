"""Random small networks of every family: no attack lands inside a certified radius, and none of the radii is empty."""

from __future__ import annotations

import pytest

from benchmarks import attacks as benchmark
from lipkit.layers import families

pytestmark = pytest.mark.thorough


def check(count: int, **options: int) -> list[float]:
    """The largest ratio of radius and distance of each network."""
    names = families.names()
    largest = []
    for seed in range(count):
        found = benchmark.tightness(benchmark.random_network(names[seed % len(names)], seed), seed, **options)
        largest += [max(values) for values in found.values() if values]
    return largest


def test_networks_of_half_of_the_families() -> None:
    largest = check(len(families.names()) // 2, samples=2)
    assert len(largest) > 11  # both attacks find something on nearly every network
    assert max(largest) <= 1
    assert max(largest) > 0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*could not search at:UserWarning")  # of so many networks some are flat at a sample
def test_a_thousand_networks() -> None:
    assert max(check(1000)) <= 1


def test_a_radius_that_is_too_large_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    right = benchmark.certify

    def wrong(*arguments, **options):
        certificate = right(*arguments, **options)
        return dataclasses.replace(certificate, radius=certificate.radius * 8)

    monkeypatch.setattr(benchmark, "certify", wrong)
    with pytest.raises(AssertionError, match=r"inside \["):
        check(3)
