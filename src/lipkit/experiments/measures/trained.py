"""Measurements of a trained, exported network beside its certificates, and of a WGAN by critics of each family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from lipkit import data as datasets
from lipkit import modules
from lipkit import wasserstein as w1
from lipkit.analysis import lipschitz_lower_bound
from lipkit.attacks import run_attack
from lipkit.attacks.ascent import misclassified
from lipkit.bounds import spectral_norm
from lipkit.certificates import format_radius
from lipkit.data import Data
from lipkit.experiments.recipe_schema import parse_numbers


def attack(
    network: modules.Network,
    data: Data,
    *,
    seed: int = 0,
    name: str,
    eps: float | str | Sequence[float | str],
    norm: str = "l2",
    steps: int | None = None,
    restarts: int | None = None,
    samples: int = 1000,
    batch_size: int = 250,
) -> dict[str, float]:
    """Accuracy under an attack, with a figure ``NAME(eps)``, or ``NAME_linf(eps)``, for each radius.

    Args:
        network: exported.
        data: whose first test samples are attacked.
        seed: of the attack.
        name, norm, steps, restarts: see `lipkit.attacks.run_attack`.
        eps: radii, in units of the norm; ``36/255`` is understood.
        samples: at most this many.
        batch_size: samples attacked at once.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    twin = network.to(device)
    x, y = data.test.batch(torch.arange(min(samples, len(data.test))))
    box = (0.0, 1.0) if len(data.input_shape) == 3 else None
    figures = {}
    for radius in parse_numbers(eps):
        survived = 0
        for part in torch.arange(len(x)).split(batch_size):
            found = run_attack(
                name, twin, x[part].to(device), y[part].to(device), eps=radius, norm=norm, steps=steps,
                restarts=restarts, box=box, generator=torch.Generator().manual_seed(seed),
            )  # fmt: skip
            distance = (found.points.cpu().double() - x[part].double()).flatten(1)
            size = distance.abs().amax(1) if norm == "linf" else distance.norm(dim=1)
            with torch.no_grad():
                wrong = misclassified(twin(found.points).cpu(), y[part])
                # An example outside the ball, as attacks of minimum norm return them, is none.
                wrong = (wrong & (size <= radius)) | misclassified(twin(x[part].to(device)).cpu(), y[part])
            survived += int((~wrong).sum())
        suffix = "_linf" if norm == "linf" else ""
        figures[f"{name}{suffix}({format_radius(radius)})"] = survived / len(x)
    return figures


def local_lipschitz(
    network: modules.Network, data: Data, *, seed: int = 0, samples: int = 64, steps: int = 100
) -> dict[str, float]:
    """``lower``: the steepest secant found from test samples, a lower bound of the Lipschitz constant."""
    x, _ = data.test.batch(torch.arange(len(data.test)))
    box = (0.0, 1.0) if len(data.input_shape) == 3 else None
    found = lipschitz_lower_bound(network, box, start=x, restarts=samples, steps=steps, seed=seed)
    return {"lower": found.lower}


def layer_norms(network: modules.Network, data: Data, *, seed: int = 0) -> dict[str, float]:
    """``norm_product`` and ``largest_norm``: of the spectral norms of the dense layers."""
    norms = [float(spectral_norm(m.weight)) for m in network.modules() if isinstance(m, nn.Linear)]
    return {"norm_product": math.prod(norms), "largest_norm": max(norms, default=0.0)}


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
