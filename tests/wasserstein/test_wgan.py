"""The generator learns a distribution: measured by the exact distance, not by its critic."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lipkit.errors import DataError, OptionError, ShapeError
from lipkit.wasserstein import assignment, wgan

pytestmark = pytest.mark.thorough


def ring(seed: int, n: int) -> torch.Tensor:
    angle = 6.2831853 * torch.rand(n, generator=torch.Generator().manual_seed(seed))
    return torch.stack([3 + angle.cos(), angle.sin()], 1)


def test_it_comes_closer():
    x, fresh = ring(0, 1000), ring(1, 400)
    seen: list[int] = []
    made = wgan.train(x, latent=2, steps=100, batch_size=64, progress=lambda step, value: seen.append(step))
    before = wgan.train(x, latent=2, steps=1, batch_size=64)
    far, near = (assignment(fresh, g.sample(400, seed=5)) for g in (before, made))
    assert far > 0.8  # it starts where the samples lie
    assert near < 0.4
    assert seen == list(range(1, 101))
    assert max(made.history) > 0.5 > 0.3 > made.history[-1]


def test_neither_unit_nor_origin_matters():
    x = ring(0, 200)
    sample = wgan.train(x, latent=2, steps=3, batch_size=32).sample(50)
    scaled = wgan.train(2.0**30 * x, latent=2, steps=3, batch_size=32).sample(50)
    assert torch.equal(scaled, 2.0**30 * sample)
    moved = wgan.train(x + 1000, latent=2, steps=3, batch_size=32).sample(50)
    torch.testing.assert_close(moved - 1000, sample, rtol=0, atol=0.05)


def test_images_lie_in_the_unit_interval_and_seeds_decide():
    x = torch.rand(16, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    state = torch.get_rng_state()
    made = wgan.train(x, latent=3, steps=2, critic_steps=1, batch_size=4)
    assert torch.equal(torch.get_rng_state(), state)
    sample = made.sample(9)
    assert sample.shape == (9, 1, 4, 4)
    assert 0 <= float(sample.min()) < float(sample.max()) <= 1
    assert torch.equal(wgan.train(x, latent=3, steps=2, critic_steps=1, batch_size=4).sample(9), sample)
    assert not torch.equal(made.sample(9, seed=1), sample)
    assert torch.equal(made.sample(9, batch_size=2), sample) or torch.allclose(made.sample(9, batch_size=2), sample)


def test_own_networks_are_copied():
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    before = generator.weight.detach().clone()
    made = wgan.train(torch.randn(8, 3), latent=2, generator=generator, critic=critic, steps=2, batch_size=4)
    assert torch.equal(generator.weight, before)
    assert made.sample(3).shape == (3, 3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": 0}, OptionError, "steps: expected an integer of at least 1, got 0"),
        ({"latent": 1.5}, OptionError, "latent: expected an integer of at least 1, got 1.5"),
        ({"lr": 0.0}, OptionError, "lr: expected a positive finite number"),
        ({"generator": nn.Linear(16, 2)}, ShapeError, r"samples of shape \(3,\), got \(2,\)"),
        ({"critic": nn.Linear(3, 2)}, OptionError, "critic of one output"),
        ({"critic": nn.Flatten()}, OptionError, "a critic with parameters to train, got Flatten"),
        ({"generator": nn.Tanh()}, OptionError, "a generator with parameters to train, got Tanh"),
        ({"device": "toaster"}, OptionError, "expected a device of this machine, got 'toaster'"),
        ({"generator": lambda z: z}, OptionError, "expected generator as an nn.Module, got function"),
    ],
)
def test_refusals(options, error, message):
    with pytest.raises(error, match=message):
        wgan.train(torch.zeros(8, 3), **{"steps": 1, "batch_size": 4} | options)
    with pytest.raises(OptionError, match="samples: expected a spread from 1e-37 to 1e38"):
        wgan.train(1e40 * torch.rand(8, 3, dtype=torch.float64))
    with pytest.raises(DataError, match="finite"):
        wgan.train(torch.full((8, 3), float("inf")))
