"""The table of families: complete entries, constructors with the argument order of torch."""

from __future__ import annotations

import pytest
import torch

from lipkit.errors import OptionError
from lipkit.layers import families
from lipkit.layers.families import FAMILIES, Family

each_family = pytest.mark.parametrize("name", FAMILIES)


@each_family
def test_an_entry_is_complete(name: str) -> None:
    family = FAMILIES[name]
    assert family.name == name
    assert name.isidentifier()
    assert name == name.lower()
    assert family.claim in ("orthogonal", "contraction", "none")
    for text in (family.title, family.paper, family.equation, family.sizes):
        assert text.strip()
    assert all(len(values) > 1 for values in family.options.values())


def _image(family: Family, kernel: int) -> int:
    return next(n for n in range(kernel, 13) if family.accepts(kernel, n, n))


@each_family
def test_a_convolution_takes_the_arguments_of_torch_in_their_order(name: str) -> None:
    family = FAMILIES[name]
    n = 2 * _image(family, 3)
    layer = family.conv(2, 8, 3, 2, "same", 1, 1, False, "circular", "cpu", torch.float64)
    assert layer(torch.zeros(2, 2, n, n, dtype=torch.float64)).shape == (2, 8, n // 2, n // 2)
    assert "bias" not in dict(layer.named_parameters())
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    padded = family.conv(2, 3, kernel_size=(3, 3), padding=1)
    assert padded(torch.zeros(1, 2, n, n)).shape == (1, 3, n, n)
    assert "bias" in dict(padded.named_parameters())


@each_family
def test_a_dense_layer_takes_the_arguments_of_torch_in_their_order(name: str) -> None:
    layer = FAMILIES[name].linear(4, 6, False, "cpu", torch.float64)
    assert layer(torch.zeros(2, 3, 4, dtype=torch.float64)).shape == (2, 3, 6)
    assert "bias" not in dict(layer.named_parameters())
    assert {p.dtype for p in layer.parameters()} == {torch.float64}


def test_get_names_what_is_known() -> None:
    assert families.get("cayley") is FAMILIES["cayley"]
    with pytest.raises(OptionError, match=r"expected one of cayley, .*, got 'caley'"):
        families.get("caley")
    assert families.names() == list(FAMILIES)
