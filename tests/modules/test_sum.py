"""Sums of branches: what they compute, their bound from both sides, export and storage."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from lipkit import modules
from lipkit.errors import DataError, NoRuleError, OptionError, ShapeError
from lipkit.lowering import export, lipschitz
from lipkit.modules import Add, Graph


def total(*branches: nn.Module) -> Graph:
    """``f_1(x) + ... + f_k(x)``."""
    count = len(branches)
    return Graph([*branches, Add(*[1] * count)], [*([0] for _ in branches), range(1, count + 1)])


def block() -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1, bias=False))
    net = nn.Sequential(total(body, nn.Identity()), total(nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1)))
    net.train()(torch.randn(16, 3, 6, 6))
    return net.eval()


def test_linear_branches_add_and_the_bound_is_reached_where_they_agree() -> None:
    first, second = nn.Linear(4, 4, bias=False).double(), nn.Linear(4, 4, bias=False).double()
    both = total(first, second)
    x = torch.randn(5, 4, dtype=torch.float64)
    assert torch.equal(both(x), first(x) + second(x))
    norms = [np.linalg.norm(m.weight.detach().numpy(), 2) for m in (first, second)]
    bound = float(lipschitz(both).detach())
    assert sum(norms) <= bound <= sum(norms) * (1 + 1e-9)
    twice = total(first, first, nn.Identity())
    assert float(lipschitz(twice).detach()) == pytest.approx(2 * norms[0] + 1, rel=1e-9)
    assert float(lipschitz(total(nn.ReLU()))) == 1.0
    lipschitz(both).backward()
    assert first.weight.grad is not None
    assert second.weight.grad is not None


def test_the_bound_is_above_every_jacobian() -> None:
    net = block().double()
    bound = float(lipschitz(net, (3, 6, 6)).detach())
    x = torch.randn(1, 3, 6, 6, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(net, x).reshape(-1, 108).numpy()
    assert np.linalg.norm(jacobian, 2) <= bound


@pytest.mark.thorough
def test_export_and_storage_keep_the_function(tmp_path) -> None:
    net = block()
    x = torch.randn(2, 3, 6, 6)
    exported = export(net, (3, 6, 6))
    assert torch.allclose(exported(x), net(x), atol=1e-5)
    assert not any(p.requires_grad for p in exported.parameters())
    assert not any(isinstance(m, nn.BatchNorm2d) for m in exported.modules())
    assert float(lipschitz(exported)) == pytest.approx(float(lipschitz(net, (3, 6, 6)).detach()), rel=1e-5)
    modules.save(exported, tmp_path / "net")
    loaded = modules.load(tmp_path / "net")
    assert torch.equal(loaded(x), exported(x))
    assert float(lipschitz(loaded)) == float(lipschitz(exported))
    config = json.loads((tmp_path / "net" / "config.json").read_text())
    config["network"]["modules"][0]["modules"] = []
    (tmp_path / "net" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="Graph"):
        modules.load(tmp_path / "net")


def test_refusals() -> None:
    with pytest.raises(OptionError, match="one sign"):
        total()
    with pytest.raises(ShapeError, match="2 values of one shape"):
        total(nn.Linear(3, 1), nn.Identity())(torch.ones(2, 3))
    with pytest.raises(ShapeError, match="2 values of one shape"):
        export(total(nn.Linear(3, 1), nn.Identity()), (3,))
    with pytest.raises(NoRuleError, match="in-place ReLU"):
        lipschitz(total(nn.ReLU(inplace=True), nn.Identity()))
    hooked = total(nn.ReLU())
    hooked.nodes.register_forward_hook(lambda *_: None)
    for function in (lipschitz, lambda m: export(m, (3,))):
        with pytest.raises(NoRuleError, match="hooks"):
            function(hooked)

    class Custom(nn.Module):
        def forward(self, x):
            return 2 * x

    with pytest.raises(NoRuleError, match=r"input_shape, because .*Custom"):
        lipschitz(total(nn.Identity(), Custom()))
    assert float(lipschitz(total(nn.Identity(), Custom()), (3,))) == pytest.approx(3.0)
