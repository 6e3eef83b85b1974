"""A batch of no samples gives one of no outputs, as torch's own layers do, and its sums have derivatives of 0."""

import copy
import itertools

import pytest
import torch

import lipkit
from lipkit.layers.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_no_samples_give_no_outputs(family: str) -> None:
    model = lipkit.models.small(layer=family, kernel_size=2 if family == "eco" else 3)
    networks = (model, copy.deepcopy(model).eval(), lipkit.export(model, (1, 8, 8)))
    for network, grad in itertools.product(networks, (True, False)):
        x = torch.zeros(0, 1, 8, 8, requires_grad=grad)
        with torch.set_grad_enabled(grad):
            y = network(x)
        assert y.shape == (0, 10)
        if grad:
            assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape
