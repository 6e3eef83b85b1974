"""Circular padding and its derivatives, against indices modulo the image size and against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lipkit.conv.circular import circular_conv2d, circular_pad, fold_border

PADS = [[1, 1, 1, 1], [0, 2, 1, 0], [5, 3, 4, 4], [0, 0, 2, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_pixels_and_gradients_are_those_of_indices_modulo_the_size(
    pads: list[int], memory: torch.memory_format
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64).to(memory_format=memory).requires_grad_()
    left, right, top, bottom = pads
    rows, cols = np.arange(-top, 4 + bottom) % 4, np.arange(-left, 5 + right) % 5
    y = circular_pad(x, pads)
    assert np.array_equal(y.detach().numpy(), x.detach().numpy()[:, :, rows][..., cols])
    g = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, x, g)
    expected = np.zeros(x.shape)
    np.add.at(expected, np.s_[:, :, rows[:, None], cols[None, :]], g.numpy())
    assert np.abs(found.numpy() - expected).max() < 1e-14


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of torch itself
def test_derivatives_of_every_order_and_kind() -> None:
    torch.manual_seed(0)
    x, v = torch.randn(2, 2, 2, 3, 4, dtype=torch.float64)
    pads = [1, 2, 1, 0]
    torch.autograd.gradcheck(lambda x: circular_pad(x, pads), x.clone().requires_grad_())
    torch.autograd.gradgradcheck(lambda x: circular_pad(x, pads).pow(3), x.clone().requires_grad_())

    def energy(x: torch.Tensor) -> torch.Tensor:
        return circular_pad(x, pads).square().sum()

    def plain(x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, pads, mode="circular").square().sum()

    assert torch.allclose(torch.func.hessian(energy)(x), torch.func.hessian(plain)(x))
    assert torch.allclose(torch.func.jvp(energy, (x,), (v,))[1], torch.func.jvp(plain, (x,), (v,))[1])
    # A batch of gradients through one graph.
    free = x.clone().requires_grad_()
    y = circular_pad(free, pads)
    (batch,) = torch.autograd.grad(y, free, torch.stack([torch.ones_like(y), y.detach()]), is_grads_batched=True)
    assert torch.allclose(batch[1], fold_border(y.detach(), pads))


def test_the_convolution_is_that_of_torch() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(3, 4, (3, 5), padding="same", padding_mode="circular", dtype=torch.float64)
    x = torch.randn(2, 3, 6, 7, dtype=torch.float64)
    assert torch.allclose(circular_conv2d(x, layer.weight, layer.bias), layer(x), atol=1e-14)
