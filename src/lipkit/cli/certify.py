"""``lipkit certify``: certify and attack the network of a run again, or one without a run; check a property."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from lipkit.cli.main import ALLOW_CODE, DEVICE, LARGE_EPS, ROOT, once

if TYPE_CHECKING:
    from lipkit.experiments import Recipe
    from lipkit.modules import Network

# Form of the command -> options that it does not use, and so refuses.
UNUSED = {
    "RUN": ("out", "input_shape", "seconds"),
    "MODEL DATA": ("seconds",),
    "MODEL PROPERTY.vnnlib": ("out", "root", "device", "method"),
}


@click.command("certify")
@click.argument("run", metavar="RUN|MODEL")
@click.argument("changes", nargs=-1, metavar="[DATA] [KEY=VALUE ...]")
@ROOT
@click.option("--input-shape", metavar="C,H,W", help="Shape of one sample, if MODEL leaves it open.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), metavar="RUNS", help="Folder for MODEL.")
@DEVICE
@click.option("--method", type=click.Choice(("global", "local", "best")), help="Proof of radii, see lipkit.certify.")
@click.option("--seconds", default=60.0, show_default=True, help="Time for a property (.vnnlib).")
@LARGE_EPS
@ALLOW_CODE
def command(
    run: str, changes: tuple[str, ...], root: list[str], input_shape: str | None, out: Path, device: str,
    method: str | None, seconds: float, large_eps: bool, allow_code: bool,
) -> None:  # fmt: skip
    """Certify a network and attack it, and write a record and a report.

    RUN is the folder of a run. The new files go into RUN/certify-001, RUN/certify-002 and so on; reports, tables and
    exports of RUN keep showing the first ones.

    MODEL DATA is a network without a run and the name of a data set (or folder:PATH, npz:FILE, ...). MODEL is an ONNX
    or .pt2 file, a folder of lipkit.save, or pkg.mod:factory, a function without arguments that makes an nn.Module (it
    is imported, so run). It becomes a run in RUNS.

    MODEL PROPERTY.vnnlib checks a property; the answer is holds (proved), violated (with a point) or unknown.

    An adversarial example inside a certified radius stops the command with an error. KEY=VALUE changes the section
    certify or data of the recipe: certify.eps=36/255,1 certify.attack_steps=200. data.range=LOW,HIGH is for samples
    (C, H, W) that are not images in [0, 1]. The method for MODEL is local if one of its layers has a constant above 1.
    """
    # A path may hold the sign, too: folder:/data/a=b.
    data = changes[0] if changes and not re.match(r"[\w.]+=", changes[0]) else None
    for change in changes[data is not None :]:  # without DATA, if given
        if "=" not in change or change.split(".")[0] not in ("certify", "data"):
            raise click.UsageError(f"expected changes certify.KEY=VALUE or data.KEY=VALUE, got {change!r}")
    form = "RUN" if data is None else "MODEL PROPERTY.vnnlib" if data.lower().endswith(".vnnlib") else "MODEL DATA"
    source = click.get_current_context().get_parameter_source
    unused = [f"--{name}".replace("_", "-") for name in UNUSED[form] if source(name) is ParameterSource.COMMANDLINE]
    if unused := [*unused, *(changes[1:] if form.endswith(".vnnlib") else ())]:
        raise click.UsageError(f"lipkit certify {form} does not use {', '.join(unused)}")
    if data is not None and form.endswith(".vnnlib"):
        from lipkit.certificates import read_vnnlib, verify_property

        network, _ = exported(run, input_shape)
        click.echo(verify_property(network, read_vnnlib(data, network), seconds=seconds).describe())
        return
    from lipkit.cli.console import display
    from lipkit.cli.train import result
    from lipkit.experiments import run as pipeline

    wanted = [] if method is None else [f"certify.method={method}"]
    wanted = [*once([*wanted, *changes[data is not None :], *root])]
    if data is None:
        if not Path(run).exists():
            raise click.UsageError(f"expected the folder of a run, or MODEL DATA, got {run!r}, which does not exist")
        recipe = pipeline.read_recipe(run, wanted, allow_code=allow_code, build=False)
        with display() as show:
            outcome = pipeline.certify(run, recipe, device=device, display=show, large_eps=large_eps)
    else:
        network, name = exported(run, input_shape)
        # For unconstrained layers the product of constants is far too large to certify anything.
        if not any(change.startswith("certify.method=") for change in wanted) and (why := steep(network)):
            wanted.insert(0, "certify.method=local")
            click.echo(f"radii by local bounds: {why} (--method global is faster)", err=True)
        recipe = named(name, run, data, wanted)
        with display() as show:
            outcome = pipeline.certify_network(network, recipe, out, device=device, display=show, large_eps=large_eps)
    click.echo(result(outcome))


def exported(model: str, input_shape: str | None) -> tuple[Network, str]:
    """The exported network that MODEL names, and a name for its run that a recipe accepts."""
    from lipkit.cli.bound import parse_shape, read
    from lipkit.lowering import export

    network, shape = read(model, parse_shape(input_shape))
    words = Path(model).stem if Path(model).exists() else model  # pkg.mod:factory has no suffix
    name = re.sub(r"[^A-Za-z0-9_-]", "_", words).lstrip("_-")[:100]
    return export(network, shape), name or "network"


def steep(network: Network) -> str:
    """A sentence about the first layer whose constant exceeds 1; empty if the network is bounded by construction."""
    from torch import nn

    from lipkit.lowering import lipschitz
    from lipkit.modules import SandwichBlock, SlopeResidual

    if network.multipliers():  # they prove a constant of the network as a whole
        return ""
    parts = list(network.named_modules())
    # The weights of a block are bounded together, not one by one.
    blocks = tuple(f"{name}." for name, part in parts if isinstance(part, SandwichBlock | SlopeResidual))
    layers = [(name, part) for name, part in parts if type(part) in (nn.Linear, nn.Conv2d)]
    for name, layer in layers[:-1]:  # the last one may scale the logits
        if not name.startswith(blocks) and (constant := float(lipschitz(layer))) > 1 + 1e-3:  # beyond rounding
            return f"layer {name} has the constant {constant:.3g}, so the network is not bounded by construction"
    return ""


def named(name: str, model: str, data: str, changes: list[str]) -> Recipe:
    """A recipe that certifies ``model``, a network without a recipe, on ``data``, with these ``changes``."""
    from lipkit.experiments import load_recipe

    facts = [f"name={name}", "description=a network from elsewhere", f"data={data}", "model.options={}"]
    recipe = load_recipe("digits_cayley", [*facts, *changes])  # for its section certify
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": model})})
