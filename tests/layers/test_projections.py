"""Work after an optimiser step: every training path does it, and the bound by numpy's SVD stays near 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import lipkit
from lipkit import wasserstein
from lipkit.errors import OptionError, ShapeError
from lipkit.experiments import run as pipeline
from lipkit.experiments.recipe import load_recipe
from lipkit.layers import AfterStep, MaxMin, Residual, SvcmConv2d, after_step, register_after_step
from lipkit.layers.projections import seen_shapes
from lipkit.wasserstein import wgan

SHAPE, TOLERANCE = (1, 6, 6), 0.03


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        SvcmConv2d(1, 4, 3, orthogonal=False),
        *(MaxMin(), SvcmConv2d(4, 4, 1, stride=2, orthogonal=False)),
        *(Residual(SvcmConv2d(4, 4, 3, orthogonal=False)), nn.Flatten()),
        nn.Linear(36, 2),
    )  # fmt: skip


def samples(n: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(n, *SHAPE, generator=torch.Generator().manual_seed(1)), torch.arange(n) % 2


def largest(model: nn.Module, input_shape: tuple[int, ...] = SHAPE) -> float:
    """The largest singular value of all projected kernels, each on the image it sees, by numpy."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SvcmConv2d)}
    values = []
    for name, (_, h, w) in seen_shapes(model, layers, input_shape):
        size = (h // layers[name].stride, w // layers[name].stride)
        kernel = layers[name].free.detach().double().numpy()
        spectrum = np.fft.fft2(kernel, s=size).transpose(2, 3, 0, 1)
        values.append(float(np.linalg.svd(spectrum, compute_uv=False).max()))
    return max(values)


def steps(model: nn.Module, after, epochs: int = 2) -> nn.Module:
    """A loop as a user writes it: two epochs of Adam."""
    x, y = samples()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    after = after(optimizer, model) or (lambda step: None)
    for step in range(1, 3 * epochs + 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(8 * model(x), y).backward()
        optimizer.step()
        after(step)
    return model


def test_a_loop_that_forgets_it_is_told_by_the_true_bound():
    """The reverse of the tests below: without the function the norm does leave 1, and the bounds say by how much."""
    model = steps(network(), lambda optimizer, model: None)
    assert largest(model) > 1.2
    for i, shape in ((0, SHAPE), (2, (4, 6, 6))):
        expected = largest(model[i], shape)
        assert float(lipkit.lipschitz(model[i], shape).detach()) == pytest.approx(expected, rel=1e-5)
        assert float(lipkit.lipschitz(lipkit.export(model[i], shape))) >= expected * (1 - 1e-6)


@pytest.mark.thorough
def test_a_loop_that_calls_it():
    def after(optimizer, model):
        return lambda step: after_step(model, SHAPE, step if step < 6 else None)

    assert largest(steps(network(), after)) <= 1 + TOLERANCE


@pytest.mark.thorough
def test_an_optimizer_that_calls_it():
    handles = []

    def register(optimizer, model):
        handles.append(register_after_step(optimizer, model, SHAPE))

    model = steps(network(), register)
    assert largest(model) <= 1 + TOLERANCE
    handles[0].remove()
    assert largest(steps(model, lambda optimizer, model: None)) > 1 + TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize("ema", [None, 0.9])
def test_fit(ema):
    model = network()
    seen = []
    run = lipkit.fit(
        model, samples(), epochs=2, batch_size=8, lr=0.05, loss="cross_entropy", ema=ema, accelerator="cpu",
        evaluate=lambda evaluated: seen.append(largest(evaluated)) or {"norm": seen[-1]},
    )  # fmt: skip
    assert largest(run.model) <= 1 + TOLERANCE
    assert largest(run.result) <= 1 + TOLERANCE
    assert (run.result is model) == (ema is None)
    assert len(seen) == 2
    assert max(seen) <= 1 + TOLERANCE


@pytest.mark.thorough
def test_fit_knows_the_size_after_augmentation():
    def smaller(x, generator):
        return x[..., : 4 + int(torch.randint(1, (1,), generator=generator)), :4]

    torch.manual_seed(0)
    model = nn.Sequential(SvcmConv2d(1, 4, 3, orthogonal=False), nn.Flatten(), nn.Linear(64, 2))
    lipkit.fit(model, samples(), epochs=2, batch_size=8, lr=0.05, augment=smaller, accelerator="cpu")
    assert largest(model, (1, 4, 4)) <= 1 + TOLERANCE


@pytest.mark.thorough
def test_the_command_line(tmp_path):
    quick = ["data.limit=60", "train.epochs=2", "train.lr=0.05", "train.evaluate_samples=2"]
    recipe = load_recipe("digits_svcm", quick)
    runs, train = [], pipeline.loop.train

    def trained(session):
        runs.append(train(session))
        return runs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.loop, "train", trained)
        patch.setattr(pipeline, "finish", lambda *args: None)  # training is what is tested
        pipeline.train(recipe, out=tmp_path)
    assert largest(runs[0].result, (1, 8, 8)) <= 1 + TOLERANCE


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:the critics still rose")
def test_critics():
    x = samples()[0]
    found = wasserstein.distance(x, 0.5 * x.flip(0), critic=network()[:-1].append(nn.Linear(36, 1)), steps=6, lr=0.05)
    assert all(float(lipkit.lipschitz(critic[0])) <= 1 + TOLERANCE for critic in found.critics)
    made = wgan.train(x, latent=2, critic=network()[:-1].append(nn.Linear(36, 1)), steps=2, critic_lr=0.05)
    assert largest(made.critic) <= 1 + TOLERANCE


class Halved(nn.Linear, AfterStep):
    """A layer of somebody else, called with a keyword: its bias is halved at every second step."""

    interval = 2
    told: tuple[int, ...] = ()

    def after_step(self, input_shape):
        self.told = input_shape
        self.bias.mul_(0.5)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Halved(6, 1)

    def forward(self, x):
        return self.inner(input=x)


def test_any_layer_may_declare_work():
    model, shape = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (6, 6)), Named()), (36,)
    inner = model[-1].inner
    nn.init.ones_(inner.bias)
    assert [after_step(model, shape, step) for step in (1, 2, 3, 4)] == [0, 1, 0, 1]
    assert inner.told == (6, 6)
    assert inner.bias.item() == 0.25
    assert after_step(model, shape) == 1
    assert inner.bias.item() == 0.125
    assert inner.bias.requires_grad
    assert model.training


@pytest.mark.thorough
def test_each_layer_is_told_the_size_that_it_sees_and_the_model_is_not_touched():
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = [name for name, m in model.named_modules() if isinstance(m, SvcmConv2d)]
    assert seen_shapes(model, names, SHAPE) == [("0", (1, 6, 6)), ("2", (4, 6, 6)), ("3.nodes.0", (4, 3, 3))]
    assert model.training
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        for name in names:
            model.get_submodule(name).free.normal_()
    assert after_step(model, SHAPE) == 3
    assert largest(model) <= 1 + TOLERANCE
    assert model[0].free.requires_grad
    assert after_step(nn.Sequential(nn.Linear(2, 2)), (2,)) == 0


def test_refusals():
    with pytest.raises(OptionError, match="step: expected an integer of at least 1, got 0"):
        after_step(network(), SHAPE, 0)
    with pytest.raises(ShapeError, match="does not accept inputs of shape"):
        after_step(network(), (1, 4, 4))
    with pytest.raises(ShapeError, match=r"expected input of shape \(B, 1, H, W\)"):
        after_step(network(), (3, 6, 6))
