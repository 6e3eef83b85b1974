"""The Wasserstein distance of images and generated images, as far as a critic of each family sees it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from lipkit import data as datasets
from lipkit import wasserstein as w1


def wasserstein(
    *,
    seed: int = 0,
    root: Path | None = None,
    family: str,
    data: str,
    samples: int = 5000,
    generator_steps: int = 2000,
    steps: int = 2000,
    batch_size: int = 64,
    rates: Sequence[float] = (0.1, 0.01, 0.001, 0.0001),
) -> dict[str, float]:
    """Train a generator, then a critic of the family at each rate: the best held-out bound of their distance.

    The generator is the same for every family: it is trained against a Cayley critic with ``seed``.

    Args:
        seed: of everything.
        root: folder of the data sets.
        family: acronym of the critic's layers.
        data: name of the data set.
        samples: images, and generated images.
        generator_steps: of the generator's training; 0 takes its random initial weights.
        steps: of each critic's training.
        batch_size: samples of a step.
        rates: learning rates of the critic.

    Returns:
        ``distance`` and its interval ``low`` and ``high``, in the l2 norm of images in [0, 1]; ``rate``.
    """
    x, _ = datasets.load(data, root=root, limit=samples).train.batch(torch.arange(samples))
    made = w1.wgan.train(x, steps=max(1, generator_steps), batch_size=batch_size, seed=seed)
    fake = made.sample(len(x), seed=seed)
    found = {
        rate: w1.distance(x, fake, critic=family, steps=steps, batch_size=batch_size, lr=rate, seed=seed)
        for rate in rates
    }
    rate, best = max(found.items(), key=lambda item: item[1].value)
    return {"distance": best.value, "low": best.low, "high": best.high, "rate": rate, "constant": best.constant}
