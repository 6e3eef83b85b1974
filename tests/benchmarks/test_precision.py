"""The emulated arithmetic of benchmarks/precision.py against numpy, and against what it must not touch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks import precision


@pytest.mark.parametrize("bits", [8, 11, 23])
def test_numbers_are_rounded_to_nearest(bits):
    torch.manual_seed(0)
    x = torch.cat((torch.randn(2000), torch.randn(50) * 1e-30, torch.tensor([0.0, -0.0, 1.0, 2.0 - 2**-23])))
    mantissa, exponent = np.frexp(x.double().numpy())
    expected = np.ldexp(np.round(mantissa * 2.0**bits), exponent - bits)  # numpy rounds halves to even
    assert np.array_equal(precision.significant(x, bits).double().numpy(), expected)
    if bits == 8:
        assert torch.equal(precision.significant(x, bits), x.bfloat16().float())
    z = torch.complex(x, x.flip(0))
    assert torch.equal(precision.significant(z, bits).real, precision.significant(x, bits))


@pytest.mark.thorough
@pytest.mark.parametrize("product", ["mm", "bmm", "matmul", "addmm", "baddbmm", "conv2d", "einsum"])
def test_every_product_takes_rounded_factors_and_nothing_else_does(product):
    torch.manual_seed(0)
    a, b, c = torch.randn(1, 6, 6), torch.randn(1, 6, 6), torch.randn(1, 6, 6)
    calls = {
        "mm": lambda a, b: a[0] @ b[0],
        "bmm": torch.bmm,
        "matmul": torch.matmul,
        "addmm": lambda a, b: torch.addmm(c[0], a[0], b[0]),
        "baddbmm": lambda a, b: c.clone().baddbmm_(a, b),
        "conv2d": lambda a, b: F.conv2d(a[None], b[None, :, :3, :3]),
        "einsum": lambda a, b: torch.einsum("nij,njk->ik", a, b),
    }
    call = calls[product]
    with precision.Rounded(8):
        ours, other = call(a, b), (a + b, torch.linalg.inv(a))
    torch.testing.assert_close(ours, call(a.bfloat16().float(), b.bfloat16().float()), rtol=1e-6, atol=1e-6)
    assert float((ours - call(a, b)).abs().max()) > 1e-4
    assert torch.equal(other[0], a + b)
    assert torch.equal(other[1], torch.linalg.inv(a))
