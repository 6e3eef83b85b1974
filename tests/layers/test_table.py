"""The table of families: complete entries, constructors with the argument order of torch."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lipkit.errors import OptionError
from lipkit.layers import families
from lipkit.layers.families import FAMILIES, Family
from lipkit.models import LBDN

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
def test_an_activation_behind_a_layer_may_work_in_place(name: str) -> None:
    family = FAMILIES[name]
    for (i, o), batch in (((3, 8), 64), ((4, 4), 2), ((4, 4), 64), ((16, 4), 8)):
        torch.manual_seed(0)
        layer, n = family.conv(i, o, 3, 2, dtype=torch.float64), 2 * _image(family, 3)
        x, weights = torch.randn(batch, i, n, n, dtype=torch.float64), torch.randn(o, 1, 1, dtype=torch.float64)
        gradients = [
            torch.autograd.grad((weights * nn.ELU(inplace=inplace)(layer(x))).sum(), [*layer.parameters()])
            for inplace in (False, True)
        ]
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(*gradients, strict=True))


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


FAMILY = """
from torch import nn

from lipkit.layers.base import Family, KernelConv2d
from lipkit.layers.cayley import CayleyLinear
from lipkit.layers.export import register_one_lipschitz
from lipkit.layers.dense import orthogonal_free


class HalvedConv2d(KernelConv2d):
    def make_parameters(self, device, dtype, *, factor=0.5):
        self.factor = factor
        self.free = orthogonal_free((self.out_channels, self.inner_channels, *self.kernel_size), device, dtype)

    def kernel(self):
        return self.factor * self.free / max(1.0, float(self.free.detach().abs().sum()))


register_one_lipschitz(HalvedConv2d)
HALVED = Family(name="halved", title="t", paper="p", equation="e", conv=HalvedConv2d, linear=CayleyLinear)
"""
USE = """
import lipkit
from lipkit.cli.main import main

net = lipkit.models.kwlarge(layer="halved", factor=0.25, input_shape=(1, 8, 8), dense=(8, 8))
assert lipkit.lipschitz(lipkit.export(net, (1, 8, 8))) <= lipkit.lipschitz(net) == 1
main(["list", "layers"])
"""


@pytest.mark.slow
def test_a_new_family_is_its_own_file_and_its_name_in_the_table(tmp_path: Path) -> None:
    package = Path(families.__file__).parents[1]
    shutil.copytree(package, tmp_path / "lipkit", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "lipkit/layers/halved.py").write_text(FAMILY)
    table = tmp_path / "lipkit/layers/families.py"
    text = table.read_text().replace("(CAYLEY, ", "(HALVED, CAYLEY, ", 1)
    table.write_text(text.replace("import LOT", "import LOT\nfrom lipkit.layers.halved import HALVED", 1))
    done = subprocess.run(
        [sys.executable, "-c", USE], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "halved" in done.stdout


HALF = {
    "convolution": (lambda family: family.conv(4, 4, 3), (4, 6, 6)),
    "strided convolution": (lambda family: family.conv(4, 8, 3, stride=2), (4, 6, 6)),
    "1 x 1 convolution": (lambda family: family.conv(4, 6, 1), (4, 5, 5)),
    "dense": (lambda family: family.linear(6, 4), (6,)),
    "last": (lambda family: family.last(6, 4), (6,)),
    "last without a bias": (lambda family: family.last(6, 4, bias=False), (6,)),
}


def in_half(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A layer of half precision returns the dtype of its input, within its rounding of what float64 computes."""
    layer = layer.eval().to(dtype)
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    y = layer(x)
    assert y.dtype == dtype
    exact = copy.deepcopy(layer).double()(x.detach().double()).detach()
    gap = float((y.detach().double() - exact).abs().max() / exact.abs().max())
    # Float32 inside, one rounding at the end: half of the machine epsilon, and room for float32.
    assert gap <= 0.5 * torch.finfo(dtype).eps + 1e-4
    y.float().square().sum().backward()
    for name, value in (("x", x), *layer.named_parameters()):
        assert value.grad is not None, name
        assert value.grad.dtype == dtype
        assert bool(value.grad.isfinite().all())


@pytest.mark.thorough
@pytest.mark.usual(72)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", HALF)
@each_family
def test_half_precision_goes_through_float32(name: str, kind: str, dtype: torch.dtype) -> None:
    make, shape = HALF[kind]
    torch.manual_seed(0)
    in_half(make(FAMILIES[name]), shape, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_network_in_half_precision_goes_through_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    in_half(LBDN([6, 8, 8, 3], gamma=2.0), (6,), dtype)
