"""``lipkit bound``: lower and upper bound of a network's Lipschitz constant, and what each layer contributes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lipkit.errors import ShapeError, interval

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, ...]
# Suffixes of files written with pickle; loading one can run any code in it.
PICKLES = {".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".tar"}

EXPECTED = "expected pkg.mod:factory, a folder of lipkit.save, an ONNX or a .pt2 file"


@click.command("bound")
@click.argument("model")
@click.option("--input-shape", metavar="C,H,W", help="Shape of one sample, such as 3,224,224.")
@click.option("--method", default="auto", show_default=True, help="Bound of convolutions: auto, best, symbol_sup, ...")
@click.option("--restarts", default=2, show_default=True, help="Starts of the search for the lower bound; 0: none.")
@click.option("--steps", default=5, show_default=True, help="Steps of that search.")
@click.option("--box", metavar="LOW,HIGH", help="Range of input entries; products of two values need it.")
@click.option(
    "--tight/--no-tight", default=None, help="LipSDP for runs of layers, too; default: up to 600 hidden units."
)
@click.option("--all", "everything", is_flag=True, help="Show layers that contribute nothing, too.")
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON.")
def command(
    model: str, input_shape: str | None, method: str, restarts: int, steps: int, box: str | None, tight: bool | None,
    everything: bool, as_json: bool,
) -> None:  # fmt: skip
    """Bound the Lipschitz constant (l2) of MODEL.

    MODEL is pkg.mod:factory, a function without arguments that makes an nn.Module (it is imported, so run); a folder
    written by lipkit.save; or an ONNX or .pt2 file. It is bounded in evaluation mode. Prints the product of the layers'
    constants, the tighter bound by LipSDP, and the steepest secant that a search found.
    """
    limits = None if box is None else interval("--box", box.split(","))
    network, shape = read(model, parse_shape(input_shape))
    from lipkit.analysis import analyze

    found = analyze(network, shape, method=method, restarts=restarts, steps=steps, box=limits, tight=tight)
    click.echo(found.to_json() if as_json else found.describe(everything))


def parse_shape(text: str | None) -> Shape | None:
    """The shape in a text such as ``3,224,224``; a usage error unless all sizes are positive."""
    if text is None:
        return None
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))  # 3x224x224 is accepted, too
    except ValueError:
        shape = ()  # refused below
    if not shape or min(shape) < 1:
        raise click.UsageError(f"--input-shape: expected positive sizes such as 3,224,224, got {text!r}")
    return shape


def read(model: str, shape: Shape | None) -> tuple[nn.Module, Shape]:
    """The network that the argument MODEL names, in evaluation mode, and the shape of one input.

    ``shape`` comes from the command line: it must agree with the network's, and fills in sizes that a file leaves open.
    """
    path = Path(model)
    suffix = path.suffix.lower()
    network: Any
    if model and path.is_dir():
        from lipkit.modules import load

        network = load(path)
    elif suffix in PICKLES:
        advice = "build the network in Python and call lipkit.analyze, or give a factory that does"
        raise click.UsageError(f"{EXPECTED}, got the pickle {model!r}: reading one runs the code in it; {advice}")
    elif suffix == ".onnx":
        from lipkit.interop.onnx_reader import read_onnx

        try:
            network = read_onnx(path, shape)  # the shape fills in open sizes
        except ShapeError as error:
            raise click.UsageError(f"expected --input-shape C,H,W as in {model}: {error}") from None
    elif suffix == ".pt2":
        from lipkit.interop.program_reader import read_program

        network = read_program(path)
    elif ":" not in model:
        raise click.UsageError(f"{EXPECTED}, got {model!r}, which is none of them")
    elif shape is None:
        raise click.UsageError("expected --input-shape C,H,W for a factory, got none")
    else:
        from lipkit.data.registry import imported
        from lipkit.experiments.build import network_of

        click.echo(f"importing {model}: this runs the code of its module", err=True)
        return network_of(model, imported(model), {}).eval(), shape
    from lipkit.interop.reading import check_sizes

    known = network.input_shape or shape
    if known is None:
        raise click.UsageError(f"expected --input-shape C,H,W for {model}, which leaves it open, got none")
    if shape not in (None, known):
        raise click.UsageError(f"expected --input-shape {','.join(map(str, known))} as in {model}, got {shape}")
    check_sizes(network, known)
    return network, known
