"""``lipkit attack``: the accuracy of a run's network under an attack, beside its certified accuracy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lipkit.cli.list import Source
from lipkit.cli.main import ALLOW_CODE, DEVICE, LARGE_EPS, ROOT

if TYPE_CHECKING:
    from lipkit.evaluation import Attack, Attempt

NAMES = Source("lipkit.attacks.named").keys("ATTACKS")


@click.command("attack")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--attack", "name", type=click.Choice(NAMES), default="apgd", show_default=True)
@click.option("--norm", type=click.Choice(("l2", "linf")), default="l2", show_default=True)
@click.option("--eps", metavar="R[,R...]", help="Radii, such as 36/255,1; default: of the recipe (l2), 8/255 (linf).")
@click.option("--samples", type=click.IntRange(1), help="Test samples to attack, drawn by the seed; default: all.")
@click.option("--steps", type=click.IntRange(1), help="Steps of pgd, apgd, fab and cw; default: its own.")
@click.option("--restarts", type=click.IntRange(1), help="Starts of pgd, apgd and fab.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of samples and attack.")
@click.option("--images", type=click.IntRange(0), default=16, show_default=True, help="Examples kept and shown.")
@click.option("--batch-size", type=click.IntRange(1), default=256, show_default=True)
@ROOT
@DEVICE
@LARGE_EPS
@ALLOW_CODE
def command(
    run: Path, name: str, norm: str, eps: str | None, samples: int | None, steps: int | None, restarts: int | None,
    seed: int, images: int, batch_size: int, root: list[str], device: str, large_eps: bool, allow_code: bool,
) -> None:  # fmt: skip
    """Attack the network of RUN and compare every example with the certified radii.

    Prints the accuracy under attack beside the certified accuracy of the same samples. Writes both, the examples and
    a page that shows them into RUN, under a different name for each setting. An adversarial example inside a certified
    radius stops the command with an error.
    """
    if name == "cw" and norm == "linf":  # before the imports, which take seconds
        raise click.UsageError("expected --norm l2 for --attack cw, got linf")
    import dataclasses
    import time

    from lipkit.attacks.named import ATTACKS
    from lipkit.certificates import certify
    from lipkit.certificates.intervals import check_radii
    from lipkit.cli.console import display
    from lipkit.errors import RunError
    from lipkit.evaluation import Attack, attack_samples, choose_samples
    from lipkit.experiments.build import load_data
    from lipkit.experiments.run import load_network, read_recipe, told
    from lipkit.report.attack_page import save_attack
    from lipkit.text import printable
    from lipkit.training.devices import device_here

    given = {"steps": steps, "restarts": restarts}
    if unused := [f"--{key}" for key, value in given.items() if value and key not in ATTACKS[name].takes]:
        raise click.UsageError(f"--attack {name} does not use {', '.join(unused)}")
    with display() as show:
        recipe = read_recipe(run, root, allow_code=allow_code, build=False)
        if recipe.task != "classification":
            raise RunError(f"expected a run of a classification, got {run}, which is a {recipe.task}")
        network = load_network(run)
        radii = read_radii(eps) if eps is not None else recipe.certify.eps if norm == "l2" else (8 / 255,)
        device_here(device)  # refuse a missing device before reading data
        data = load_data(recipe)
        box = data.input_range
        name_of_radii = "certify.eps" if eps is None else "--eps"
        check_radii(radii, data.input_shape, box, name=name_of_radii, norm=norm, large=large_eps)
        numbers = choose_samples(len(data.test), samples, seed)
        x, y = data.test.batch(numbers)
        attack = Attack(tuple(radii), steps, restarts, samples, box, seed, name, norm)
        show.note(f"certifying and attacking {len(x)} of {len(data.test)} test samples")
        progress = told(show)
        certificate = certify(network, x, y, batch_size=batch_size, device=device, progress=progress)
        start = time.perf_counter()
        attempt = attack_samples(
            network, certificate, x, y, dataclasses.replace(attack, samples=None),  # x holds the chosen samples only
            batch_size=batch_size, confidence=recipe.certify.confidence, device=device, numbers=numbers,
            progress=progress,
        )  # fmt: skip
        path = save_attack(
            run, attempt, attack, certificate, numbers, x, data=data.name, classes=data.classes, images=images,
            seconds=time.perf_counter() - start, device=device,
        )  # fmt: skip
    click.echo(
        f"{table(attempt, attack)}\n\nfigures  {printable(path)}\nimages   {printable(path.with_suffix('.html'))}"
    )


def read_radii(text: str) -> tuple[float, ...]:
    """The radii of ``--eps``: ``1/2, 1`` is (0.5, 1.0)."""
    from lipkit.experiments.recipe_schema import parse_numbers

    try:
        radii: tuple[float, ...] = tuple(float(value) for value in parse_numbers(text))
    except ValueError as error:
        raise click.UsageError(f"--eps: {error}") from None
    if not radii or not all(math.isfinite(r) and r >= 0 for r in radii):
        raise click.UsageError(f"--eps: expected radii that are finite and >= 0, got {text!r}")
    return radii


def table(attempt: Attempt, attack: Attack) -> str:
    """Accuracy under attack and certified accuracy at each radius, and how close an example came to its radius."""
    from lipkit import text
    from lipkit.report.tables import interval, percent
    from lipkit.text import format_radius

    rows = [
        [format_radius(row.eps), percent(row.share.value), interval(row.share), percent(row.certified.value)]
        for row in attempt.rows
    ]
    check = attempt.cross_check  # of every example with the certified radius of its sample
    lines = [
        f"{'; '.join(attempt.ran) or 'no sample is classified correctly: nothing to attack'}",
        f"clean {percent(attempt.clean.value)} of {attempt.clean.total} samples",
        "",
        text.table([f"radius ({attack.norm})", "under attack", "interval", "certified"], rows),
        "",
        f"{check.compared} adversarial examples compared with the certified radii: none inside",
    ]
    if check.compared and check.closest < float("inf"):
        lines[-1] += f", the closest at {check.closest:.4f} times the radius"
    return "\n".join(lines)
