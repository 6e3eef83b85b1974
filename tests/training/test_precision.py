"""Training under bfloat16 autocast: every family keeps its claim, and makes its constrained object in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lipkit import training
from lipkit.layers import families
from lipkit.lowering import export, lipschitz

MAKERS = ("weight", "kernel", "symbol", "phases", "unit_kernel")


def network(family):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(family.conv(2, 2, 1), nn.Flatten(), family.linear(32, 6))


@pytest.mark.thorough
@pytest.mark.parametrize("name", families.names())
def test_bf16_autocast_never_reaches_the_constraint(name, monkeypatch):
    family = families.get(name)
    model = network(family)
    dtypes, low = set(), set()

    def recorded(make):
        def method(self, *args, **kwargs):
            made = make(self, *args, **kwargs)
            dtypes.update(part.dtype for part in (made if isinstance(made, tuple) else (made,)))
            return made

        return method

    with monkeypatch.context() as patch:
        for kind in {type(model[0]), type(model[2])}:
            for maker in MAKERS:
                if isinstance(getattr(kind, maker, None), type(network)):
                    patch.setattr(kind, maker, recorded(getattr(kind, maker)))
        generator = torch.Generator().manual_seed(1)
        x, y = torch.rand(24, 2, 4, 4, generator=generator), torch.arange(24) % 6
        start = [p.detach().clone() for p in model.parameters()]

        def loss(outputs, targets):
            low.add(outputs.dtype)
            return nn.functional.cross_entropy(8 * outputs, targets)

        training.fit(
            model, (x, y), loss=loss, epochs=2, batch_size=8, lr=0.3, precision="bf16-mixed", accelerator="cpu",
        )  # fmt: skip
    assert dtypes <= {torch.float32, torch.complex64}
    assert dtypes or name in ("sandwich", "sll", "cpl")  # they make their weights in functions, not in a method
    assert low <= {torch.bfloat16, torch.float32}
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert any(not torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True))

    claimed = float(lipschitz(model, (2, 4, 4)).detach())
    proved = float(lipschitz(export(model, (2, 4, 4))))
    # 1 + 5e-5 is far below the 1.03 of an orthogonalisation in bfloat16, and above rounding and truncation in float32
    assert proved <= claimed * (1 + family.slack) * (1 + 5e-5)
    if family.claim == "orthogonal":
        assert claimed == pytest.approx(1, abs=1e-6)
        assert proved >= 1 - 5e-5
    elif family.claim == "contraction":
        assert claimed <= (1 + family.slack) ** 2 * (1 + 1e-6)


def test_the_network_itself_runs_in_bf16():
    seen = set()

    class Watch(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.add(y.dtype)
            return y

    model = nn.Sequential(families.get("cayley").linear(4, 4), Watch(4, 2))
    data = (torch.rand(8, 4), torch.arange(8) % 2)
    training.fit(model, data, epochs=1, batch_size=8, lr=0.1, precision="bf16-mixed", accelerator="cpu")
    assert seen == {torch.bfloat16}
