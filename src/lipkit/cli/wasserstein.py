"""``lipkit wasserstein``: a lower bound of the Wasserstein-1 distance of two samples, with its interval."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from torch import Tensor

    from lipkit.wasserstein import Estimate


@click.command("wasserstein")
@click.argument("x")
@click.argument("y", required=False)
@click.option("--critic", default="cayley", show_default=True, help="Family of the critic: lipkit list layers.")
@click.option("--steps", default=500, show_default=True, help="Training steps of each critic.")
@click.option("--batch-size", default=256, show_default=True, help="Samples of each side in one step.")
@click.option("--lr", default=0.002, show_default=True, help="Learning rate of the critic at the start.")
@click.option("--folds", default=2, show_default=True, help="Parts; each is held out once. 1: one half is held out.")
@click.option("--confidence", default=0.95, show_default=True, help="Confidence level of the interval.")
@click.option("--diameter", type=float, help="Diameter of the union of the supports; gives a proved interval.")
@click.option("--limit", type=click.IntRange(min=4), help="At most this many samples of each side.")
@click.option("--generator-steps", default=300, show_default=True, help="Training steps of the generator, without Y.")
@click.option("--root", help="Folder of the data sets; default $LIPKIT_DATA, else ./data.")
@click.option("--seed", default=0, show_default=True, help="Seed of weights, batches and parts.")
@click.option("--device", default="cpu", show_default=True, help="Where to train.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    x: str, y: str | None, root: str | None, limit: int | None, generator_steps: int, as_json: bool, critic: str,
    seed: int, device: str, **training: Any,
) -> None:  # fmt: skip
    """Bound W1 (l2) of X and Y from below.

    X and Y are each a .npy file of samples (n, ...), or a data set as in recipes, of which the training images are
    taken; SPEC@test takes the test images. Without Y, a small generator (WGAN) is trained on half of X and compared
    with the other half. The interval is for the lower bound that the critics reach: its low end bounds W1, its high
    end does not.
    """
    import torch

    from lipkit.wasserstein import distance, wgan

    first = samples(x, root, limit)
    if y is None:
        order = torch.randperm(len(first), generator=torch.Generator().manual_seed(seed))
        # Compare with the unseen half: the distance to samples seen in training would be too small.
        seen, first = first[order[: len(first) // 2]], first[order[len(first) // 2 :]]
        click.echo(f"training a generator on {len(seen)} samples", err=True)
        made = wgan.train(seen, critic=critic, steps=generator_steps, seed=seed, device=device)
        second = made.sample(len(first), seed=seed)
    else:
        second = samples(y, root, limit)
    found = distance(first, second, critic=critic, seed=seed, device=device, **training)
    click.echo(json.dumps(facts(found)) if as_json else found.describe())


def samples(spec: str, root: str | None, limit: int | None) -> Tensor:
    """The samples (n, ...) that the argument X or Y names, as floating-point numbers."""
    import torch

    from lipkit import data
    from lipkit.data.reading import read_npy
    from lipkit.data.split import fixed_permutation
    from lipkit.wasserstein.samples import as_samples

    if spec.endswith(".npy"):
        values = as_samples(read_npy(Path(spec)), spec)
        if limit is not None and limit < len(values):
            values = values[torch.from_numpy(fixed_permutation(len(values), 0)[:limit].copy())]
        return values
    name, _, part = spec.partition("@")
    if part not in ("", "train", "test"):
        raise click.UsageError(f"expected SPEC, SPEC@train or SPEC@test, got {spec!r}")
    if data.registry.is_code(name):
        click.echo(f"importing {name}: this runs the code of its module", err=True)
    split = getattr(data.load(name, root=root, limit=limit), part or "train")
    return as_samples(split.batch(slice(None))[0], spec)


def facts(found: Estimate) -> dict[str, Any]:
    """The result as values of JSON."""
    names = ("value", "low", "high", "confidence", "method", "proved", "constant", "steps")
    train_value = None if math.isnan(found.train_value) else found.train_value  # JSON lacks NaN
    more = {"train_value": train_value, "held_out": list(found.held_out), "folds": len(found.critics)}
    return {name: getattr(found, name) for name in names} | more
