"""From a recipe to a certified network with its report: the functions behind ``lipkit train`` and ``lipkit certify``.

RUN/
  recipe.yaml, settings.json, metrics.jsonl, checkpoints/     see lipkit.training.checkpoints
  network/                                                    the exported network (lipkit.modules)
  record.json, report.html                                    see lipkit.report
  certificate.jsonl, examples.safetensors                     of a classification; `lipkit check` verifies the first
  lipkit_check.py                           and so does this, without lipkit: `python lipkit_check.py .`
  predictions.csv, curve.safetensors                          of a regression
  certify-001/, ...                                           the same files of each later `lipkit certify`
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lipkit
from lipkit import modules
from lipkit.data import Data, Split
from lipkit.errors import DataError, RecipeError, RunError, ShapeError
from lipkit.evaluation import Attack, Evaluation, RegressionEvaluation, evaluate, evaluate_regression, latency
from lipkit.experiments.build import augment, build_model, load_data
from lipkit.experiments.recipe import Recipe, differences, load_recipe, to_yaml, unplaced
from lipkit.files import write_atomic
from lipkit.lowering import export, lipschitz
from lipkit.report import Record, RegressionRecord, read_record, save_evaluation, write_report
from lipkit.report.curve import CURVE
from lipkit.report.examples import EXAMPLES
from lipkit.report.html import REPORT
from lipkit.report.record import PREDICTIONS, RECORD, Facts, from_evaluation, from_regression, seen
from lipkit.report.run_files import CERTIFICATE, NETWORK
from lipkit.shown import Shown, figures
from lipkit.training import LipschitzPenalty, PgdAdversary, Progress, TrainOptions, checkpoints, loop
from lipkit.training.devices import device_here, make_fabric, threads_for
from lipkit.training.options import chosen
from lipkit.training.session import Session

RECIPE, AGAIN = "recipe.yaml", "certify"
CHECKER = "lipkit_check.py"  # a module outside the package; every folder with a certificate gets a copy
WRITTEN = (RECORD, NETWORK, CERTIFICATE, CHECKER, EXAMPLES, PREDICTIONS, CURVE, REPORT)  # at the end of a run


class Display:
    """Receives the progress of a run. This base class shows nothing."""

    def note(self, text: str) -> None:
        """Show one line."""

    def progress(self, event: Progress) -> None:
        """Show the progress of training."""


@dataclass(frozen=True, repr=False)
class Outcome(Shown):
    """Folder, figures and record of a run that has ended.

    Attributes:
        folder: the run's folder; for a later certification, its folder inside the run's.
        metrics: figures by name: clean, certified(36/255), pgd(36/255), lipschitz, ... or test_mse, tightness, ...
        record: the record that holds these figures.
    """

    folder: Path
    metrics: Mapping[str, float]
    record: Record | RegressionRecord

    def describe(self) -> str:
        """The figures and their folder."""
        return f"{figures(self.metrics)}\n{self.folder}"


def train(
    recipe: Recipe | str | Path,
    *,
    out: str | Path = "runs",
    folder: str | Path | None = None,
    resume: str | Path | None = None,
    display: Display | None = None,
    fabric: Any = None,
    large_eps: bool = False,
) -> Outcome | None:
    """Train, export, certify, attack, record, report.

    Args:
        recipe: a `Recipe`, or the name of a packaged one or the path of a file, as for `load_recipe`.
        out: folder of runs; the new run gets a folder ``<name>-001`` in it, or the next free number.
        folder: the new run's own folder, in place of one in ``out``; it must not hold a run.
        resume: the folder of a run to continue, in place of a new run; its recipe must be ``recipe``.
        display: receives progress and messages; None shows nothing.
        fabric: a launched Fabric; None makes one as ``recipe.train`` says.
        large_eps: accept radii above 8 for images, see `lipkit.certificates.intervals.check_radii`.

    Returns:
        The outcome; for a run that was already finished, the one in its record. None if ``train.max_minutes`` ended
        training early, and in every training process but the first.

    Raises:
        LipkitError: invalid data, model or options; all are checked before training.
    """
    display = display or Display()
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    for spec in recipe.code().values():
        display.note(f"importing {spec}: this runs the code of its module")
    data = load_data(recipe, large_eps)
    options = training_options(recipe, data, display.progress)
    model = build_model(recipe, data)
    fabric = fabric or make_fabric(recipe.train)
    if resume is not None:
        if unplaced(read_recipe(resume, allow_code=True)) != unplaced(recipe):
            raise RunError(f"expected the recipe of the run in {resume}, got another: start a new run for it")
        if (Path(resume) / RECORD).exists():
            return _ended(Path(resume), display) if fabric.is_global_zero else None
    session = Session(fabric, model, options, data.train)
    section, count = recipe.train, sum(p.numel() for p in session.parameters.values())
    name, changed = differences(recipe)
    new: dict[str, Any] = {}
    if resume is None:
        new = {"name": None if folder else name, "files": {RECIPE: to_yaml(recipe).encode()}, "taken": WRITTEN}
    threads = threads_for(fabric, count, section.batch_size * math.prod(data.input_shape))
    with threads, session.opened(Path(resume or folder or out), resume is not None, **new):  # until all is written
        assert session.folder is not None
        folder = session.folder
        again = f"lipkit train --resume {folder}{' --allow-code' if recipe.code() else ''}"
        if fabric.is_global_zero:
            samples = f"{len(data.train)} training samples, {count} parameters"
            display.note(f"{folder}: {recipe.name}, {samples}, {fabric.device}")
        start = time.perf_counter()
        try:
            run = loop.train(session)
        except KeyboardInterrupt:
            display.note(f"interrupted: {again} continues")
            raise
        if not fabric.is_global_zero:
            return None
        if not run.finished:
            done = f"{run.epochs_done}{'' if section.epochs is None else f' of {section.epochs}'} epochs done"
            display.note(f"stopped after {section.max_minutes:g} minutes with {done}: {again} continues")
            return None
        # Includes the time before a resume.
        seconds = max(time.perf_counter() - start, sum(row.get("seconds", 0.0) for row in run.history))
        display.note(_pace(run.history, seconds))

        network = export(run.result, data.input_shape)
        network.input_range = data.input_range  # attacks of this network stay in it
        modules.save(network, folder / NETWORK)
        facts: Facts = {
            "claimed": float(lipschitz(run.result, data.input_shape).detach()),
            "parameters": count,
            "seed": section.seed,
            "train_samples": len(data.train),
            "seen": seen(run.history, len(data.train)),
            "times": {"train": seconds},
            "device": str(fabric.device),
            "changed": changed,
        }
        return finish(folder, recipe, network, data, facts, display, fabric.device)


def training_options(recipe: Recipe, data: Data, progress: Callable[[Progress], None] | None = None) -> TrainOptions:
    """The options of ``lipkit.fit`` that a recipe describes; ``RecipeError`` if the data cannot be augmented."""
    section, penalty, adversary, change = recipe.train, recipe.penalty, recipe.adversary, recipe.augment
    moved = functools.partial(augment, crop=change.crop, flip=change.flip) if change.crop or change.flip else None
    if moved is not None and len(data.input_shape) != 3:
        raise RecipeError(f"expected images (C, H, W) to augment, got samples of shape {data.input_shape}")
    if change.crop and change.crop >= (side := min(data.input_shape[1:])):
        raise RecipeError(f"augment.crop: expected less than the shorter side of the images, {side}, got {change.crop}")
    split = data.test.take(section.evaluate_samples)

    def measure(model: nn.Module) -> Mapping[str, float]:  # without attack
        network = export(model, data.input_shape)  # measure the exported form, as at the end
        if recipe.task == "regression":
            return {"test_mse": _mse(network, split)}
        device, network.input_range = next(model.parameters()).device, data.input_range
        return evaluate(
            network, split, eps=recipe.certify.eps, attack=Attack(eps=()), batch_size=recipe.certify.batch_size,
            device=device, large_eps=True,  # the radii were checked with the recipe
        ).metrics()  # fmt: skip

    functions = {
        "loss": chosen("loss", recipe.loss.name, **recipe.loss.options),
        "schedule": chosen("schedule", section.schedule.name, **section.schedule.options),
        "augment": moved,
        "evaluate": measure,
        "penalty": None if penalty is None else LipschitzPenalty(**penalty.model_dump()),
        "adversary": None if adversary is None else PgdAdversary(**adversary.model_dump(), box=data.input_range),
        "progress": progress,
    }
    return TrainOptions.model_construct(**dict(section) | functions)  # its numbers were checked with the recipe


def finish(
    folder: Path, recipe: Recipe, network: modules.Network, data: Data, facts: Facts, display: Display,
    device: torch.device,
) -> Outcome:  # fmt: skip
    """Evaluate an exported network as the recipe says, and write record and report.

    Both go into the run's folder; a later certification gets a subfolder, ``certify-001``, with its recipe. If a
    certificate is disproved, a CertificateViolation is raised and nothing is written.
    """
    facts = {**facts, "latency": latency(network), "recipe": recipe.model_dump(mode="json")}
    section, split = recipe.certify, data.test
    search = {"restarts": section.search_restarts, "steps": section.search_steps, "seed": recipe.train.seed}
    record: Record | RegressionRecord
    found: Evaluation | RegressionEvaluation
    if recipe.task == "regression":
        display.note(f"certifying {len(split)} test samples, searching for steep secants from {search['restarts']}")
        found = evaluate_regression(
            network, split, delta=section.delta, batch_size=section.batch_size, device=device, **search
        )
    else:
        attacked = 0 if section.attack_eps == () else min(len(split), section.attack_samples or len(split))  # None: all
        display.note(f"certifying {len(split)} test samples, attacking {attacked}")
        # Decode once for evaluation, examples and certificate file: image files are decoded at every access.
        split = Split(*split.batch(slice(None)))
        attack = Attack(
            eps=section.attack_eps, steps=section.attack_steps, restarts=section.attack_restarts,
            samples=section.attack_samples, box=data.input_range, seed=recipe.train.seed,
        )  # fmt: skip
        found = evaluate(
            network, split, method=section.method, eps=section.eps, attack=attack, classes=data.classes,
            confidence=section.confidence, batch_size=section.batch_size, device=device,
            large_eps=data.input_range is not None,  # checked when the recipe was read
            progress=told(display),
        )  # fmt: skip
    target, name = folder, folder.name
    if (folder / RECORD).exists():  # the record is what a certification writes last
        target = checkpoints.create(folder, AGAIN)
        name = f"{folder.name}/{target.name}"
        write_atomic(target / RECIPE, to_yaml(recipe).encode())
    if isinstance(found, RegressionEvaluation):
        record = from_regression(found, name=name, data=data.name, search=search, **facts)
    else:
        record = from_evaluation(found, name=name, data=data.name, classes=data.classes, **facts)
        write_atomic(target / CHECKER, (Path(lipkit.__file__).parents[1] / CHECKER).read_bytes())
    save_evaluation(target, found, network, split, record)
    write_report(target)  # from the files just written, so that anybody can repeat it
    return Outcome(target, record.metrics(), record)


def certify(
    folder: str | Path, recipe: Recipe, *, device: str = "cpu", display: Display | None = None, large_eps: bool = False
) -> Outcome:
    """Certify and attack the network of a run once more, and write another record and report.

    The first certification of a run lies in its folder, each later one in a new subfolder (``certify-001``, ...):
    no measurement is replaced.

    Args:
        folder: the run's folder.
        recipe: the run's recipe, see `read_recipe`; its sections ``certify`` and ``data`` may be changed.
        device: where to compute.
        display, large_eps: as in `train`.

    Raises:
        RunError: the folder has no exported network.
        CertificateViolation: an adversarial example lies inside a certified radius.
    """
    folder, where = Path(folder), device_here(device)
    network = load_network(folder)
    data = load_data(recipe, large_eps)
    _check_range(network, data)
    facts: Facts = {"seed": recipe.train.seed, "train_samples": len(data.train), "device": device}
    if (folder / RECORD).exists():
        before = read_record(folder)
        facts |= {"claimed": before.lipschitz.claimed, "parameters": before.parameters, "seen": before.seen}
        facts["times"] = {key: value for key, value in before.times.items() if key == "train"}
    return finish(folder, recipe, network, data, facts, display or Display(), where)


def certify_network(
    network: modules.Network, recipe: Recipe, out: str | Path, *, device: str = "cpu", display: Display | None = None,
    large_eps: bool = False,
) -> Outcome:  # fmt: skip
    """Certify and attack a network that was trained elsewhere, as `certify` does; writes a new run in ``out``.

    The recipe gives data, name of the network and ``certify``; its ``train`` is not used. ``ShapeError`` if the inputs
    or outputs of the network do not fit the data, ``DataError`` if the ranges of both differ.
    """
    data = load_data(recipe, large_eps)
    found = modules.output_shape(network, network.input_shape)
    if network.input_shape != data.input_shape or found != (data.outputs,):
        raise ShapeError(
            f"expected a network from inputs of shape {data.input_shape} to {data.outputs} outputs, as the data "
            f"{data.name}, got one from {network.input_shape} to {found}"
        )
    _check_range(network, data)
    network.input_range = network.input_range or data.input_range
    folder = checkpoints.create(Path(out), recipe.name)
    write_atomic(folder / RECIPE, to_yaml(recipe).encode())
    modules.save(network, folder / NETWORK)
    count = sum(t.numel() for t in network.state_dict().values())
    facts: Facts = {"claimed": float(lipschitz(network)), "parameters": count, "seed": recipe.train.seed}
    facts |= {"train_samples": 0, "times": {}, "device": device}
    return finish(folder, recipe, network, data, facts, display or Display(), torch.device(device))


def _check_range(network: modules.Network, data: Data) -> None:
    """Raise DataError if network and data state different ranges of inputs: radii would have other units."""
    own, given = network.input_range, data.input_range
    if own is not None and given is not None and tuple(own) != tuple(given):
        raise DataError(
            f"expected data in the network's input_range [{own[0]:g}, {own[1]:g}], got {data.name} in [{given[0]:g}, "
            f"{given[1]:g}]: give data.range={own[0]:g},{own[1]:g} if theirs is the same, or correct the network's"
        )


def load_network(folder: Path) -> modules.Network:
    """The exported network of a run; ``RunError`` if the folder has none."""
    if not (folder / NETWORK).is_dir():
        above = folder.resolve().parent  # the run, if the folder is that of a later certification
        hint = f"{above} has one" if (above / NETWORK).is_dir() else "train it to the end first"
        raise RunError(f"expected a finished run with a folder {NETWORK}, got {folder}: {hint}")
    return modules.load(folder / NETWORK)


def read_recipe(
    folder: str | Path, overrides: Sequence[str] = (), *, allow_code: bool = False, build: bool = True
) -> Recipe:
    """The recipe of a run. The run may come from somebody else, so code (``pkg.mod:factory``) is refused by default.

    Args:
        folder, overrides: the run's folder, and changes as in `load_recipe`.
        allow_code: whether data and model may be code, which `train` and `certify` then run; else it raises `RunError`.
        build: whether the caller will build the model; if not, its name may be code, or the path of a file.

    Raises:
        RunError: the folder has no run, or its recipe names code; the message says which.
    """
    path = Path(folder) / RECIPE
    if not path.is_file():
        above = Path(folder).resolve().parent
        hint = f"; {above} is one" if (above / RECIPE).is_file() else ""
        raise RunError(f"expected a run folder with {RECIPE}, got {folder}{hint}")
    recipe = load_recipe(path, overrides, build=build)
    for key, spec in recipe.code().items():
        if not allow_code and (build or key != "model.name"):
            raise RunError(
                f"{path}: {key}: expected a name of lipkit's, got {spec!r}, which runs the module "
                f"{spec.partition(':')[0]}: read that module, then give --allow-code (allow_code=True)"
            )
    return recipe


def told(display: Display) -> Callable[[str, int, int], None]:
    """A ``progress`` for `lipkit.certify` that notes the samples done and the time left, at most every ten seconds."""
    begun: dict[str, float] = {}
    noted = called = time.monotonic()

    def tell(what: str, done: int, total: int) -> None:
        nonlocal noted, called
        start = begun.setdefault(what, called)  # a stage begins at the last call of the stage before
        if (called := time.monotonic()) - noted >= 10 and done < total:
            noted, left = called, (called - start) / done * (total - done)
            display.note(f"{done} of {total} samples {what}, left {duration(left)}")

    return tell


def duration(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> duration(7), duration(75), duration(3700), duration(float("nan"))
    ('0:07', '1:15', '1:01:40', '-:--')
    """
    if seconds != seconds:  # NaN
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _ended(folder: Path, display: Display) -> Outcome:
    display.note(f"{folder} was finished before; lipkit certify {folder} measures it once more")
    record = read_record(folder)
    if not (folder / REPORT).exists():
        write_report(folder)
    return Outcome(folder, record.metrics(), record)


@torch.no_grad()
def _mse(network: modules.Network, split: Split) -> float:
    total = 0.0
    for x, y in map(split.batch, torch.arange(len(split)).split(1024)):
        parameter = next(iter(network.state_dict().values()), x)  # for device and dtype
        total += float((network(x.to(parameter.device, parameter.dtype)).cpu() - y).double().square().sum())
    return total / split.y.numel()


def _pace(history: Sequence[Mapping[str, Any]], seconds: float) -> str:
    """Duration, pace and memory of training, in words.

    >>> _pace([{"epoch": 1, "samples_per_second": 512.3, "memory_mib": 300}], 61)
    'trained in 1:01, 512 samples per second, at most 300 MiB'
    """
    paces, memory = ([row[key] for row in history if key in row] for key in ("samples_per_second", "memory_mib"))
    pace = f", {statistics.median(paces):.0f} samples per second" if paces else ""
    return f"trained in {duration(seconds)}{pace}{f', at most {max(memory)} MiB' if memory else ''}"
