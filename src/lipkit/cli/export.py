"""``lipkit export``: write the network of a run in another format, and check its certificate there."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lipkit.cli.main import ALLOW_CODE, ROOT

if TYPE_CHECKING:
    from lipkit.data import Data
    from lipkit.experiments import Recipe
    from lipkit.interop.check import Runtime
    from lipkit.modules import Network

FORMS = ("onnx", "torch", "c", "safetensors", "hub", "robustbench")


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--to", "form", type=click.Choice(FORMS), required=True, help="See below.")
@click.option("--out", type=click.Path(path_type=Path), help="File or folder to write; default: RUN/export/...")
@click.option("--samples", type=click.IntRange(min=1), default=1000, show_default=True, help="Test samples to check.")
@click.option("--licence", help="SPDX identifier of the weights' licence, for the model card.")
@ROOT
@ALLOW_CODE
def command(
    run: Path, form: str, out: Path | None, samples: int, licence: str | None, root: list[str], allow_code: bool
) -> None:
    """Write the network of RUN and check it where it will run.

    \b
    onnx         network.onnx, dynamic batch, standard operators, real arithmetic
    torch        network.pt2, a torch.export program, dynamic batch
    c            network.c and network.h, C99 in integer arithmetic, certified with its rounding included
    safetensors  a folder of config.json and model.safetensors (lipkit.load)
    hub          a model folder with card: lipkit.interop.from_pretrained, and the network inside
    robustbench  the network's folder and model_info.json; lipkit.interop.RobustBenchModel wraps the network

    After writing, the file is read back in its runtime and evaluated on test samples: outputs, predictions and
    certified accuracy are compared with the float64 network.
    """
    from lipkit.experiments import run as pipeline
    from lipkit.experiments.build import load_data
    from lipkit.interop import check_runtime
    from lipkit.text import printable

    recipe = pipeline.read_recipe(run, root, allow_code=allow_code, build=form == "hub")
    network = pipeline.load_network(run)
    data = load_data(recipe)
    network.input_range = data.input_range  # sets the quantisation of C programs
    target, runtime = _write(run, form, out, licence, network, recipe, data)
    import torch

    x, y = data.test.batch(torch.arange(min(samples, len(data.test))))
    click.echo(check_runtime(network, runtime, x, y, eps=recipe.certify.eps))
    if form == "c":
        from lipkit.certificates import certify, certify_regression
        from lipkit.integer.c_source import compiler
        from lipkit.text import format_radius

        if compiler() is None:
            click.echo("no C compiler here (cc, gcc, clang): its operations were evaluated by torch")
        if y.is_floating_point():
            error = certify_regression(network, x, y, delta=0.0, evaluator="integer").rounding_error.max()
            click.echo(f"outputs of the C program within {error:.3g} of the exact network's on the whole box: proved")
        else:
            certificate = certify(network, x, y, evaluator="integer")
            for eps in recipe.certify.eps:
                share = 100 * certificate.accuracy(eps, large_eps=True)
                click.echo(f"certified({format_radius(eps)})  {share:.2f} % for the C program, its rounding included")
    click.echo(f"written {printable(target)}")


def _write(
    run: Path, form: str, out: Path | None, licence: str | None, network: Network, recipe: Recipe, data: Data
) -> tuple[Path, Runtime]:
    """Write one form; return its path and a runtime that evaluates it."""
    from lipkit import interop, modules
    from lipkit.errors import OptionError, RunError
    from lipkit.experiments.build import build_model
    from lipkit.files import write_atomic
    from lipkit.report import Record, read_record
    from lipkit.training import checkpoints

    place = click.get_current_context().with_resource(tempfile.TemporaryDirectory())  # of the compiled C program

    def hub(_: Network, path: Path) -> Path:
        """The model folder: architecture from the recipe, parameters from the last checkpoint."""
        model = build_model(recipe, data)
        found = checkpoints.load_checkpoint(run)
        if found is None:
            raise RunError(
                f"expected a run with a checkpoint, got {run}: only its exported network is left (--to safetensors)"
            )
        checkpoints.check_weights(model, found[1], run)
        model.load_state_dict(found[1])
        options = {"input_shape": data.input_shape, "classes": data.outputs, **recipe.model.options}
        return interop.save_pretrained(
            model, path, name=recipe.model.name, options=options, input_shape=data.input_shape,
            input_range=data.input_range, classes=data.classes,
            card=interop.model_card(read_record(run), folder=path.name, licence=licence),
        )  # fmt: skip

    def robustbench(network: Network, path: Path) -> Path:
        """The network's folder with model_info.json, the facts that RobustBench lists."""
        record = read_record(run)
        if not isinstance(record, Record):
            raise OptionError("expected a run of a classification for robustbench, got a regression")
        folder = modules.save(network, path)
        write_atomic(
            folder / "model_info.json", json.dumps(interop.robustbench_info(record), indent=1).encode() + b"\n"
        )
        return folder

    # form -> (name in RUN/export, writer, runtime)
    forms: dict[str, tuple[str, Callable[[Network, Path], Path], Callable[[Path], Runtime]]] = {
        "onnx": ("network.onnx", interop.write_onnx, interop.onnx_runtime),
        "torch": ("network.pt2", interop.write_program, interop.program_runtime),
        "c": ("network.c", interop.write_c, lambda path: interop.c_runtime(path, network, place)),
        "safetensors": ("network", modules.save, lambda path: interop.module_runtime(modules.load(path))),
        "hub": ("hub", hub, lambda path: interop.module_runtime(modules.load(path / "network"))),
        "robustbench": (
            "robustbench",
            robustbench,
            lambda path: interop.module_runtime(interop.RobustBenchModel(modules.load(path))),
        ),
    }
    name, write, runtime = forms[form]
    path = write(network, out or run / "export" / name)
    return path, runtime(path)
