"""A lack of memory is reported as one, not as a shape that is not accepted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lipkit.attacks.losses import first_logits
from lipkit.data.split import Data, Split
from lipkit.errors import ShapeError
from lipkit.experiments import build
from lipkit.experiments.recipe import load_recipe
from lipkit.layers.projections import seen_shapes
from lipkit.lowering import structure
from lipkit.modules import output_shape
from lipkit.modules.graph import Graph, value_shapes


class Greedy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.empty(2**50)  # more than a process can address


class Full(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.ones(5, 1)


def _checked(module: nn.Module) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "lipschitz", lambda model, shape: 1.0)
        patch.setattr(build, "export", lambda model, shape: model)
        patch.setattr(build, "network_of", lambda name, factory, options: module)
        split = Split(torch.zeros(2, 3), torch.tensor([0, 1]))
        data = Data("mine", split, split, ("a", "b"))
        build.build_model(load_recipe("digits_cayley"), data)


@pytest.mark.parametrize(
    "ask",
    [
        lambda module: output_shape(module, (3,)),
        lambda module: value_shapes(Graph([module], [[0]]), (3,)),
        lambda module: seen_shapes(module, [], (3,)),
        lambda module: structure(module, (3,)),
        lambda module: first_logits(module, torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)),
        _checked,
    ],
    ids=["output_shape", "value_shapes", "seen_shapes", "structure", "first_logits", "build_model"],
)
def test_a_lack_of_memory_is_let_through(ask: Callable[[nn.Module], object]) -> None:
    with pytest.raises(RuntimeError, match="allocate memory"):
        ask(Greedy())
    with pytest.raises(torch.OutOfMemoryError, match="CUDA"):
        ask(Full())
    with pytest.raises(ShapeError, match="cannot be multiplied"):
        ask(Narrow())
