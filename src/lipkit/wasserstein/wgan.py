r"""A small Wasserstein GAN: a generator trained against a Lipschitz critic.

.. math:: \min_G \max_{f\ 1\text{-Lipschitz}} E f(x) - E f(G(z)),\qquad z \sim N(0, I)

The critic keeps its constant by construction, without gradient penalty or clipping.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import OptionError, ShapeError, finite
from lipkit.layers import after_step
from lipkit.linalg.matrices import check_positive
from lipkit.modules import Affine, Shape
from lipkit.training import devices, sources
from lipkit.wasserstein import critics
from lipkit.wasserstein.critics import descend, kr_loss, one_output, trainable
from lipkit.wasserstein.samples import as_samples, centre_and_unit

HIDDEN = 256


@dataclass(frozen=True)
class Wgan:
    """A trained generator, which maps (n, latent) to samples (n, *shape), and its last critic.

    ``history`` has for each generator step the critic's mean on a batch of data minus that on generated samples.
    """

    generator: nn.Module
    critic: nn.Module
    latent: int
    history: tuple[float, ...]

    def sample(self, count: int, seed: int = 0, batch_size: int = 1024) -> Tensor:
        """Draw ``count`` independent samples, on the CPU; equal seeds give equal samples."""
        drawn = sources.generator(seed, 5)
        parameter = next(self.generator.parameters())
        z = torch.randn(count, self.latent, generator=drawn)
        with torch.no_grad():
            return torch.cat([self.generator(part.to(parameter)).cpu() for part in z.split(batch_size)])


def generator(shape: Shape, latent: int) -> nn.Sequential:
    """A network latent - 256 - 256 - shape with ReLU; images (C, H, W), which lie in [0, 1], get a sigmoid at the end.

    >>> generator((1, 8, 8), 4)(torch.zeros(2, 4)).shape
    torch.Size([2, 1, 8, 8])
    """
    sizes = [latent, HIDDEN, HIDDEN, math.prod(shape)]
    layers = [m for p, q in pairwise(sizes) for m in (nn.Linear(p, q), nn.ReLU())]
    return nn.Sequential(*layers[:-1], *([nn.Sigmoid()] if len(shape) == 3 else []), nn.Unflatten(1, tuple(shape)))


def train(
    x: Any,
    *,
    latent: int = 16,
    generator: nn.Module | None = None,
    critic: str | nn.Module | None = None,
    steps: int = 300,
    critic_steps: int = 5,
    batch_size: int = 128,
    lr: float = 0.001,
    critic_lr: float = 0.005,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int, float], None] | None = None,
) -> Wgan:
    """Train a generator whose samples are distributed like x.

    Each of ``steps`` generator steps follows ``critic_steps`` steps of the critic. Both use Adam with the betas
    (0.5, 0.9); the rates fall linearly to zero.

    Args:
        x: data, tensor or array (n, *shape); uint8 images are divided by 255.
        latent: dimension of the normal z.
        generator: maps (n, latent) to (n, *shape); a copy is trained. None: `generator`, for vectors moved and scaled.
        critic: as in `wasserstein.distance`.
        steps, critic_steps: number of generator steps, and of critic steps before each.
        batch_size: samples of a step.
        lr, critic_lr: rates at the start, of the generator and of the critic.
        seed: of weights, batches and z. torch's global random state is left as it was.
        device: where to train.
        progress: called with the step, from 1, and the critic's estimate on the last batch.

    Raises:
        OptionError: a loss that becomes NaN or infinite.

    >>> x = 2 + 0.1 * torch.randn(256, 1, generator=torch.Generator().manual_seed(0))
    >>> made = train(x, latent=2, steps=60, batch_size=64).sample(500)
    >>> bool((made.mean() - 2).abs() < 0.2)
    True

    References:
        Arjovsky, Chintala, Bottou, "Wasserstein Generative Adversarial Networks", ICML 2017, algorithm 1, with a
        critic as in Anil, Lucas, Grosse, "Sorting out Lipschitz function approximation", ICML 2019.
    """
    data = as_samples(x, "x")
    check_positive(latent=latent, steps=steps, critic_steps=critic_steps, batch_size=batch_size)
    lr, critic_lr = finite("lr", lr, positive=True), finite("critic_lr", critic_lr, positive=True)
    if not isinstance(generator, nn.Module | None):
        raise OptionError(f"expected generator as an nn.Module, got {type(generator).__name__}")
    where, shape = devices.device_here(device), tuple(data.shape[1:])
    with sources.own_random_state(where, seed, 3):
        # globals(): the argument hides the function `generator`.
        maker = copy.deepcopy(generator) if generator is not None else globals()["generator"](shape, latent)
        if generator is None and len(shape) != 3:  # images end in a sigmoid
            centre, spread = centre_and_unit(data)
            maker = nn.Sequential(maker, Affine(torch.ones_like(centre) * spread, centre))
        judge, unit = critics.instance(critic, data)
        drawn = sources.generator(seed, 4)
        making, judging = (
            torch.optim.Adam(trainable(net.to(where).train(), name), betas=(0.5, 0.9))
            for net, name in ((maker, "generator"), (judge, "critic"))
        )

        def made() -> Tensor:
            fake = maker(torch.randn(batch_size, latent, generator=drawn).to(where))
            if tuple(fake.shape) != (batch_size, *shape):
                raise ShapeError(f"expected a generator of samples of shape {shape}, got {tuple(fake.shape[1:])}")
            return fake

        history: list[float] = []
        for step in range(steps):
            found, left = 0.0, 1 - step / steps
            for inner in range(critic_steps):
                real = data[torch.randint(len(data), (batch_size,), generator=drawn)].to(where, torch.float32)
                with torch.no_grad():
                    fake = made()
                both = one_output(judge(torch.cat([real, fake])), 2 * batch_size)  # one pass for both
                loss = kr_loss(both[:batch_size], both[batch_size:])
                descend(judging, loss, critic_lr * left, unit)
                number = step * critic_steps + inner + 1  # counts all critic steps, for `after_step`
                after_step(judge, shape, number if number < steps * critic_steps else None)
                found = -float(loss.detach())
            loss = -one_output(judge(made()), batch_size).mean()
            descend(making, loss, lr * left, unit)
            if not (math.isfinite(found) and math.isfinite(float(loss.detach()))):
                raise OptionError(f"expected finite losses, got {found} at step {step + 1}: try other rates or units")
            history.append(found)
            if progress is not None:
                progress(step + 1, found)
    return Wgan(maker.eval(), judge.eval(), latent, tuple(history))
