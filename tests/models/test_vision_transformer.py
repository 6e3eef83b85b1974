"""The vision transformer: its parts, its constant, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lipkit
from lipkit import models
from lipkit.errors import OptionError, ShapeError
from lipkit.layers import MemoryAttention, TokenAttention

SMALL: dict[str, Any] = {"patch": 2, "width": 8, "depth": 2, "heads": 2, "dense": (16,), "input_shape": (1, 8, 8)}


@pytest.mark.thorough
def test_its_constant_is_claimed_and_proved() -> None:
    torch.manual_seed(0)
    net: Any = models.build("vision_transformer", slots=5, lipschitz=2.0, **SMALL)
    kinds = [type(m) for m in net if isinstance(m, TokenAttention | MemoryAttention)]
    assert kinds == [TokenAttention, MemoryAttention] * 2
    assert not any(isinstance(m, nn.LayerNorm) for m in net.modules())
    plain = lipkit.export(net, (1, 8, 8))
    assert float(lipkit.lipschitz(net)) == 2.0
    assert 2.0 * (1 - 1e-6) <= float(lipkit.lipschitz(plain)) <= 2.0 * (1 + 1e-5)
    x = torch.rand(4, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(plain(x), net(x))
        # Tokens are told apart by their place, once it is trained.
        nn.init.normal_(net[2].offset)
        assert not torch.allclose(net(x.flip(-1)), net(x), atol=1e-3)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"patch": 3}, ShapeError, "multiples of 3"),
        ({"heads": 3}, OptionError, "heads"),
        ({"width": 0}, OptionError, "width"),
        ({"slots": 0}, OptionError, "slots"),
        ({"dense": (0,)}, OptionError, "dense"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        models.build("vision_transformer", **{**SMALL, **options})
