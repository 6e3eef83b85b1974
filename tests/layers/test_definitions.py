"""Each family's definition, in plain torch, computes what its layers compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lipkit.layers import FAMILIES

CASES = [
    (3, 5, 3, 1, (6, 9)),
    (5, 3, 3, 1, (9, 6)),
    (2, 12, 3, 2, (12, 6)),
    (4, 2, 1, 2, (4, 6)),
    (2, 2, (3, 1), 1, (3, 5)),
]


@torch.no_grad()
def compared(name: str, layer: nn.Module, x: Tensor) -> None:
    for parameter in layer.parameters():
        if parameter.ndim and parameter.shape[0] > 1 and parameter.ndim < 3:
            # Biases, rows of q and psi of their own.
            parameter.data += 0.1 * torch.randn_like(parameter)
    definition = FAMILIES[name].definition
    assert definition is not None
    for mode in (layer.train(), layer.eval()):
        expected = definition(mode, x)
        found = mode(x)
        assert expected.shape == found.shape
        assert float((found - expected).abs().amax()) <= 1e-9 * float(expected.abs().amax())


@pytest.mark.usual(45)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_convolution_is_its_definition(name: str, case: tuple) -> None:
    torch.manual_seed(5)
    inputs, outputs, kernel, stride, size = case
    layer = FAMILIES[name].conv(inputs, outputs, kernel, stride=stride, dtype=torch.float64)
    compared(name, layer, torch.randn(2, inputs, *size, dtype=torch.float64))


@pytest.mark.parametrize("orthogonalize", ["cayley", "exponential", "householder"])
@pytest.mark.parametrize("name", ["bcop", "rko", "lot"])
def test_so_it_is_for_other_functions(name: str, orthogonalize: str) -> None:
    torch.manual_seed(7)
    layer = FAMILIES[name].conv(2, 3, 3, orthogonalize=orthogonalize, dtype=torch.float64)
    compared(name, layer, torch.randn(2, 2, 5, 6, dtype=torch.float64))


def test_so_is_a_strided_convolution_of_one_channel() -> None:
    torch.manual_seed(8)
    layer = FAMILIES["aoc"].conv(1, 2, 5, stride=2, dtype=torch.float64)  # no projectors
    compared("aoc", layer, torch.randn(2, 1, 6, 8, dtype=torch.float64))


@pytest.mark.parametrize("name", FAMILIES)
def test_so_it_is_without_a_bias(name: str) -> None:
    torch.manual_seed(6)
    compared(name, FAMILIES[name].conv(2, 4, 3, bias=False, dtype=torch.float64), torch.randn(2, 2, 6, 6).double())


@pytest.mark.parametrize("sizes", [(3, 5), (5, 3), (40, 33)], ids=str)
@pytest.mark.parametrize("name", ["cayley", "aol", "bro", "cholesky", "sll", "cpl", "sandwich"])
def test_a_dense_layer_is_its_definition_on_one_pixel(name: str, sizes: tuple[int, int]) -> None:
    torch.manual_seed(6)
    layer = FAMILIES[name].linear(*sizes, dtype=torch.float64)
    compared(name, layer, torch.randn(4, sizes[0], dtype=torch.float64))
