"""``lipkit export``: the network of a run in another form, its certificate checked again there."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lipkit.cli.main import ALLOW_CODE

if TYPE_CHECKING:
    from lipkit.interop.check import Runtime

FORMS = ("onnx", "torch", "c", "safetensors", "hub", "robustbench")


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--to", "form", type=click.Choice(FORMS), required=True, help="See below.")
@click.option("--out", type=click.Path(path_type=Path), help="File or folder to write; default: RUN/export/...")
@click.option("--samples", type=click.IntRange(min=1), default=1000, show_default=True, help="Test samples to check.")
@click.option("--licence", help="SPDX identifier of the weights' licence, for the model card.")
@click.option("--root", type=click.Path(path_type=Path), metavar="DATA", help="Folder of the data sets (data.root).")
@ALLOW_CODE
def command(
    run: Path, form: str, out: Path | None, samples: int, licence: str | None, root: Path | None, allow_code: bool
) -> None:
    """Write the network of RUN and check it where it will run.

    \b
    onnx         network.onnx, dynamic batch, standard operators, real arithmetic
    torch        network.pt2, a torch.export program, dynamic batch
    c            network.c and network.h, C99 with integers alone, which certificates with rounding included speak of
    safetensors  a folder of config.json and model.safetensors (lipkit.load)
    hub          a model folder with card: lipkit.interop.from_pretrained, and the network inside
    robustbench  the network's folder and model_info.json; lipkit.interop.RobustBenchModel wraps the network

    After writing, the file is read back in its runtime and evaluated on test samples: outputs, predictions and
    certified accuracy are compared with the float64 network.
    """
    from lipkit.cli.train import data_root
    from lipkit.experiments import run as pipeline
    from lipkit.experiments.build import load_data
    from lipkit.interop import check_runtime
    from lipkit.text import printable

    changes = [] if root is None else [data_root(root)]
    recipe = pipeline.read_recipe(run, changes, allow_code=allow_code, build=form == "hub")
    network = pipeline.load_network(run)
    data = load_data(recipe)
    network.input_range = data.input_range
    target, runtime = _write(run, form, out, licence, network)
    import torch

    x, y = data.test.batch(torch.arange(min(samples, len(data.test))))
    check = check_runtime(network, runtime, x, y, eps=recipe.certify.eps)
    click.echo(check)
    if form == "c":
        from lipkit.certificates import certify, format_radius
        from lipkit.integer.c_source import compiler

        if compiler() is None:
            click.echo("no C compiler here (cc, gcc, clang): its operations were evaluated by torch")
        certificate = certify(network, x, y, evaluator="integer")
        for eps in recipe.certify.eps:
            share = 100 * certificate.accuracy(eps, large_eps=True)
            click.echo(f"certified({format_radius(eps)})  {share:.2f} % for the C program, its rounding included")
    click.echo(f"written {printable(target)}")


def _write(run: Path, form: str, out: Path | None, licence: str | None, network: object) -> tuple[Path, Runtime]:
    """Write one form; the path, and what runs it."""
    from lipkit import interop, modules
    from lipkit.errors import OptionError
    from lipkit.files import write_atomic
    from lipkit.report import Record, read_record

    assert isinstance(network, modules.Network)
    folder = run / "export"
    if form == "onnx":
        path = interop.write_onnx(network, out or folder / "network.onnx")
        return path, interop.onnx_runtime(path)
    if form == "torch":
        path = interop.write_program(network, out or folder / "network.pt2")
        return path, interop.program_runtime(path)
    if form == "c":
        path = interop.write_c(network, out or folder / "network.c")
        place = click.get_current_context().with_resource(tempfile.TemporaryDirectory())
        return path, interop.c_runtime(path, network, place)
    if form == "safetensors":
        path = modules.save(network, out or folder / "network")
        return path, interop.module_runtime(modules.load(path))
    if form == "hub":
        path = _write_hub(run, out or folder / "hub", licence)
        return path, interop.module_runtime(modules.load(path / "network"))
    path = modules.save(network, out or folder / "robustbench")
    record = read_record(run)
    if not isinstance(record, Record):
        raise OptionError("expected a run of a classification for robustbench, got a regression")
    info = json.dumps(interop.robustbench_info(record), indent=1)
    write_atomic(path / "model_info.json", (info + "\n").encode())
    return path, interop.module_runtime(interop.RobustBenchModel(modules.load(path)))


def _write_hub(run: Path, folder: Path, licence: str | None) -> Path:
    """The model folder of a run: its recipe says the architecture, its last checkpoint the parameters."""
    from lipkit import interop
    from lipkit.errors import RunError
    from lipkit.experiments import run as pipeline
    from lipkit.experiments.build import build_model, load_data
    from lipkit.report import read_record
    from lipkit.training import checkpoints

    recipe = pipeline.read_recipe(run, allow_code=True)  # the command has asked
    data = load_data(recipe)
    model = build_model(recipe, data)
    found = checkpoints.load_checkpoint(run)
    if found is None:
        raise RunError(
            f"expected a run with a checkpoint, got {run}: only its exported network is left (--to safetensors)"
        )
    checkpoints.load_weights(model, found[1], run)
    outputs = len(data.classes) if data.task == "classification" else int(data.train.y.shape[1])
    return interop.save_pretrained(
        model,
        folder,
        name=recipe.model.name,
        options={"input_shape": data.input_shape, "classes": outputs, **recipe.model.options},
        input_shape=data.input_shape,
        input_range=data.input_range,
        classes=data.classes,
        card=interop.model_card(read_record(run), folder=folder.name, licence=licence),
    )
