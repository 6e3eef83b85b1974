"""What a package shows is what it documents: ``dir`` gives ``__all__``, and no function asks for too much."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

import lipkit

PACKAGES = [name for name in lipkit.__all__ if inspect.ismodule(getattr(lipkit, name))]


def functions(package: Any) -> dict[str, Any]:
    """The public functions of a package, by their full names."""
    found = {name: getattr(package, name) for name in package.__all__}
    return {f"{package.__name__}.{name}": f for name, f in found.items() if inspect.isfunction(f)}


def test_dir_of_the_library_is_its_list_of_names() -> None:
    assert dir(lipkit) == sorted(lipkit.__all__)
    assert len(PACKAGES) >= 20


@pytest.mark.parametrize("name", PACKAGES)
def test_dir_of_a_package_is_its_list_of_names(name: str) -> None:
    package = importlib.import_module(f"lipkit.{name}")
    assert dir(package) == sorted(package.__all__)
    for public in package.__all__:
        assert getattr(package, public) is not None


@pytest.mark.parametrize("name", PACKAGES)
def test_no_public_function_takes_more_than_twelve_parameters(name: str) -> None:
    # What a decorator adds is shared by many functions, and counts as one.
    found = {n: inspect.unwrap(f) for n, f in functions(getattr(lipkit, name)).items()}
    counts = {n: len(inspect.signature(f).parameters) for n, f in found.items()}
    assert {n: count for n, count in counts.items() if count > 12} == {}


def test_kernels_have_a_dozen_public_names() -> None:
    assert len(lipkit.conv.__all__) <= 15
