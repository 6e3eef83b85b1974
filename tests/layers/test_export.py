"""Exports are the layer: parameters of which float32 and float64 make different weights are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lipkit import export, layers
from lipkit.errors import OptionError


def deficient(layer: nn.Module) -> None:
    """One direction of rank only, in every tap alike."""
    with torch.no_grad():
        free = layer.get_parameter("free")
        rows = torch.randn(len(free), *[1] * (free.ndim - 1))
        free.copy_(rows.expand_as(free))
        if isinstance(layer, layers.BroConv2d | layers.BroLinear):
            # V = E + g N / sqrt(depth): N takes E away.
            free -= layer.directions() - free


def ill_conditioned(layer: nn.Module) -> None:
    deficient(layer)
    with torch.no_grad():
        layer.get_parameter("free").add_(1e-7 * torch.randn_like(layer.get_parameter("free")))


def tiny(layer: nn.Module) -> None:
    with torch.no_grad():
        next(p for p in layer.parameters() if p.ndim > 1).mul_(1e-38)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LotConv2d": (lambda: layers.LotConv2d(4, 4, 3), (4, 6, 6)),
    "LotConv2d, pointwise": (lambda: layers.LotConv2d(4, 3, 1), (4, 6, 6)),
    "BroConv2d": (lambda: layers.BroConv2d(4, 5, 3, rank=3), (4, 6, 6)),
    "BroLinear": (lambda: layers.BroLinear(5, 6, rank=3), (5,)),
    "AolConv2d": (lambda: layers.AolConv2d(3, 4, 3), (3, 6, 6)),
    "AolLinear": (lambda: layers.AolLinear(5, 4), (5,)),
    "NativeConv2d": (lambda: layers.NativeConv2d(3, 4, 3, padding=1, constraint="aol"), (3, 6, 6)),
    "OrthogonalLinear": (lambda: layers.OrthogonalLinear(5, 4, orthogonalize="polar"), (5,)),
}
CASES = [
    *((name, spoil) for name in ("LotConv2d", "LotConv2d, pointwise") for spoil in (deficient, ill_conditioned)),
    *((name, ill_conditioned) for name in ("BroConv2d", "BroLinear", "OrthogonalLinear")),
    *((name, tiny) for name in ("AolConv2d", "AolLinear", "NativeConv2d")),
]


@pytest.mark.parametrize(("name", "spoil"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_layer_that_float32_makes_otherwise_is_refused(name: str, spoil: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make().eval()
    assert gap(layer, export(layer, shape), shape) < 1e-5
    spoil(layer)
    with pytest.raises(OptionError, match=r"rank \d of \d and singular values from \S+ to \S+: give them full"):
        export(layer, shape)
    assert gap(layer.double(), export(layer, shape), shape) < 1e-5


def test_the_rank_that_is_named_is_the_lowest_of_all_frequencies() -> None:
    layer = layers.LotConv2d(4, 4, 3)
    torch.nn.init.zeros_(layer.free)
    with torch.no_grad():
        layer.free[:, :, 1, 1] = torch.diag(torch.tensor([3.0, 2.0, 1e-9, 1e-9]))
        left, right = torch.linalg.qr(torch.randn(2, 4, 4))[0]
        layer.free[:, :, 1, 1] = left @ layer.free[:, :, 1, 1] @ right
    with pytest.raises(OptionError, match=r"rank 2 of 4 and singular values from \S+e-\d+ to 3:"):
        export(layer, (4, 5, 5))


def gap(layer: nn.Module, exported: nn.Module, shape: tuple[int, ...]) -> float:
    """Norm of the difference of both linear parts."""
    like = next(layer.parameters())
    x = torch.eye(torch.Size(shape).numel(), dtype=like.dtype).view(-1, *shape)

    def linear(module: nn.Module) -> Tensor:
        return (module(x) - module(torch.zeros_like(x))).flatten(1)

    with torch.no_grad():
        return float(torch.linalg.matrix_norm(linear(layer) - linear(exported), 2))
