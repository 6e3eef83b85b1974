"""Adversarial training: which network is attacked, in which mode, with which randomness, and that it helps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lipkit import training
from lipkit.attacks import pgd
from lipkit.attacks.ascent import misclassified
from lipkit.errors import OptionError, RunError
from lipkit.layers import CayleyLinear, MaxMin
from lipkit.modules import Network
from lipkit.training import PgdAdversary
from lipkit.training.adversarial import frozen
from lipkit.training.losses import trades

COMMON = {"batch_size": 16, "lr": 0.03, "loss": "cross_entropy", "accelerator": "cpu"}


def data(n: int = 96) -> tuple[Tensor, Tensor]:
    """The first pixel tells the label clearly, the 15 others faintly: by less than an attack of 0.1 moves them."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 2
    x = 0.01 * torch.rand(n, 1, 4, 4, generator=generator) + 0.05 * y[:, None, None, None]
    x[:, 0, 0, 0] = 0.4 * y
    return x, y


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))


class Watch(nn.Module):
    """Notes the mode and type of what runs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.modes = net, []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append((self.training, torch.is_grad_enabled()))
        return self.net(x)


class Traced(Watch):
    """A forward pass of its own that notes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Odd(Watch):
    """A forward pass that depends on its data: nothing traces it, nothing exports it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if x.sum() > 0 else self.net(-x)


@pytest.mark.thorough
def test_the_attack_runs_in_evaluation_mode_and_the_step_in_training_mode() -> None:
    net = Watch(network())
    training.fit(net, data(32), epochs=1, adversary=PgdAdversary(eps=0.1, steps=3), **COMMON)
    attack, step = [(False, True)] * 3 + [(False, False)], [(True, True)]
    assert net.modes == (attack + step) * 2
    # One update of the running statistics for each step: the iterates of the attack leave them alone.
    assert net.net[2].num_batches_tracked == 2


def test_the_adversary_gets_the_augmented_batch_and_the_step_what_it_returns() -> None:
    x, y = data(16)
    seen = []

    def adversary(model, points, labels, generator):
        assert all(p.grad is None for p in model.parameters())
        seen.append((points.clone(), labels.clone(), torch.rand(1, generator=generator).item()))
        return 0 * points

    net = Watch(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)))
    before = net.net[1].weight.detach().clone()
    training.fit(net, (x, y), epochs=2, augment=lambda x, generator: x + 1, adversary=adversary, **COMMON)
    assert torch.equal(net.net[1].weight, before)  # inputs of zero have no gradient in the weight
    assert all(points.min() >= 1 for points, _, _ in seen)
    assert {tuple(labels.shape) for _, labels, _ in seen} == {(16,)}
    assert seen[0][2] != seen[1][2]  # each epoch its own randomness
    again = []
    training.fit(
        nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), (x, y), epochs=2,
        adversary=lambda m, x, y, g: again.append(torch.rand(1, generator=g).item()) or x, **COMMON,
    )  # fmt: skip
    assert again == [r for _, _, r in seen]


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_examples_lie_in_ball_and_box_and_raise_the_loss(norm: str) -> None:
    x, y = data()
    net = network().eval()
    adversary = PgdAdversary(norm, eps=0.3, steps=5, step_size=0.4)
    found = adversary(net, x, y, torch.Generator().manual_seed(0))
    distance = (found - x).flatten(1).norm(math.inf if norm == "linf" else 2, dim=1)
    assert distance.max() <= 0.3 * (1 + 1e-6)
    assert distance.min() > 0.03
    assert 0 <= found.min() <= found.max() <= 1
    loss = nn.CrossEntropyLoss(reduction="none")
    assert (loss(net(found), y) >= loss(net(x), y) - 1e-6).all()
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(found, adversary(net, x, y, torch.Generator().manual_seed(0)))
    assert not torch.equal(found, adversary(net, x, y, torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_network_of_another_dtype_is_attacked_in_its_own(dtype: torch.dtype) -> None:
    x, y = data(8)
    found = PgdAdversary(eps=0.1, steps=2)(network().eval().to(dtype), x, y, torch.Generator())
    assert found.dtype == torch.float32


@pytest.mark.thorough
def test_constrained_layers_are_attacked_as_their_export_with_weights_built_once(monkeypatch) -> None:
    net = nn.Sequential(nn.Flatten(), CayleyLinear(16, 8), MaxMin(), CayleyLinear(8, 2)).eval()
    x, y = data(8)
    assert type(frozen(net, (1, 4, 4))) is Network
    assert torch.allclose(frozen(net, (1, 4, 4))(x), net(x), atol=1e-5)
    calls = []
    # The transform, not the layer's method: a layer whose methods were replaced is not exported.
    build = torch.linalg.inv_ex
    monkeypatch.setattr(torch.linalg, "inv_ex", lambda a: calls.append(1) or build(a))
    PgdAdversary(eps=0.1, steps=7)(net, x, y, torch.Generator())
    assert len(calls) == 4  # for each layer in float64 and in its own format, however many steps follow
    assert type(frozen(Traced(net).eval(), (1, 4, 4))) is Network
    kept = Watch(net).eval()  # a list that grows is state
    assert frozen(kept, (1, 4, 4)) is kept
    own = Odd(net).eval()
    assert frozen(own, (1, 4, 4)) is own
    plain = network().eval()
    assert frozen(plain, (1, 4, 4)) is plain
    training.fit(net, data(32), epochs=1, adversary=PgdAdversary(eps=0.05, steps=2), **COMMON)


def test_samples_beside_their_examples() -> None:
    x, y = data(16)

    class Moved:
        beside = True

        def __call__(self, model, points, labels, generator):
            return points + 0.5

    net, seen = Watch(nn.Sequential(nn.Flatten(), nn.Linear(16, 2))), []

    def loss(outputs, targets):
        seen.append((outputs.detach(), targets))
        return trades(outputs, targets, beta=2.0)

    weight = net.net[1].weight.detach().clone(), net.net[1].bias.detach().clone()
    run = training.fit(net, (x, y), epochs=1, adversary=Moved(), **{**COMMON, "loss": loss})
    (outputs, targets), *_ = seen
    assert len(seen) == 1
    assert torch.equal(targets[:16], targets[16:])
    # Each example lies behind its own sample.
    moved = outputs[16:] - outputs[:16]
    torch.testing.assert_close(moved, (0.5 * weight[0].sum(1)).expand(16, 2))
    # Samples are counted once.
    right = (outputs[16:].argmax(1) == targets[16:]).double().mean()
    assert run.history[0]["accuracy"] == pytest.approx(float(right))


@pytest.mark.thorough
def test_adversarial_training_withstands_the_attack_that_breaks_ordinary_training() -> None:
    x, y = data()
    share = {}
    for name, adversary in {"clean": None, "adversarial": PgdAdversary(eps=0.1, steps=5, step_size=0.4)}.items():
        net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
        nn.init.zeros_(net[1].weight)
        training.fit(net, (x, y), epochs=20, adversary=adversary, **COMMON)
        found = pgd(net, x, y, eps=0.1, norm="linf", steps=10)
        share[name] = 1 - float(misclassified(net(found), y).float().mean())
        assert not misclassified(net(x), y).any()
    assert share["clean"] < 0.2
    assert share["adversarial"] > 0.9


@pytest.mark.thorough
def test_a_run_is_resumed_with_its_own_adversary_only(tmp_path) -> None:
    def fit(adversary, **options):
        return training.fit(network(), data(32), epochs=2, adversary=adversary, **options, **COMMON)

    whole = fit(PgdAdversary(eps=0.1, steps=2)).model.state_dict()

    class Stop(Exception):
        pass

    def stop(event):
        if event.row is not None:
            raise Stop

    with pytest.raises(Stop):
        fit(PgdAdversary(eps=0.1, steps=2), run_dir=tmp_path / "r", progress=stop)
    for other in None, PgdAdversary(eps=0.1, steps=3):
        with pytest.raises(RunError, match=r"expected adversary = .PgdAdversary"):
            fit(other, run_dir=tmp_path / "r", resume=True)
    resumed = fit(PgdAdversary(eps=0.1, steps=2), run_dir=tmp_path / "r", resume=True).model.state_dict()
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)


def test_refusals() -> None:
    for options, message in (
        ({"norm": "l1"}, "norm: expected one of l2, linf, got .l1."),
        ({"loss": "dlr"}, "loss: expected one of margin, ce, got .dlr."),
        ({"eps": 0.0}, "eps: expected a positive finite number, got 0.0"),
        ({"eps": None}, "eps: expected a positive finite number, got None"),
        ({"step_size": math.nan}, "step_size: expected a positive finite number, got nan"),
        ({"steps": 0}, "steps: expected an integer of at least 1, got 0"),
        ({"steps": True}, "steps: expected an integer of at least 1, got True"),
    ):
        with pytest.raises(OptionError, match=message):
            PgdAdversary(**options)
    with pytest.raises(OptionError, match=r"expected integer labels .* got targets of torch.float32"):
        PgdAdversary()(network(), torch.rand(2, 1, 4, 4), torch.rand(2, 1), torch.Generator())
