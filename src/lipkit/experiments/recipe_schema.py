"""The schema of recipes: one YAML file describes a run, and is checked before anything is loaded or trained."""

import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BeforeValidator, Field, StrictBool, StrictStr, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from lipkit import models
from lipkit.data.registry import is_code
from lipkit.training import losses, schedules
from lipkit.training.options import (
    NUMBER,
    Count,
    NotNegative,
    Numbers,
    Positive,
    Section,
    Whole,
    chosen,
    option,
    parse_number,
)
from lipkit.training.regularisation import PENALTIES


def parse_numbers(value: Any) -> Any:
    """A list, a text with commas, or a single number as a tuple of numbers; None stays None.

    >>> parse_numbers("1/2, 1"), parse_numbers([1, "1/4"]), parse_numbers(0.5)
    ((0.5, 1.0), (1, 0.25), (0.5,))
    """
    if value is None:
        return None
    parts = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value  # 1/2, 1,
    return tuple(map(parse_number, parts if isinstance(parts, list | tuple) else [parts]))


def parse_range(value: Any) -> Any:
    """Two numbers in ascending order, see `parse_numbers`."""
    numbers = parse_numbers(value)
    if numbers is not None and (len(numbers) != 2 or numbers[0] >= numbers[1]):
        raise ValueError(f"expected two numbers LOW,HIGH with LOW < HIGH, got {value!r}")
    return numbers


def option_values(value: Any) -> Any:
    """Options read from YAML, with texts such as ``36/255`` converted to numbers."""
    if isinstance(value, dict):
        return {key: option_values(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [option_values(part) for part in value]
    if isinstance(value, np.generic) or (isinstance(value, str) and NUMBER.fullmatch(value)):  # other texts are names
        return parse_number(value)
    return value


Radii = Annotated[tuple[NotNegative, ...], BeforeValidator(parse_numbers)]
Options = Annotated[dict[StrictStr, Any], BeforeValidator(lambda value: {} if value is None else option_values(value))]


class DataSection(Section):
    """Which data. A plain string stands for ``spec``."""

    spec: StrictStr = Field(
        description="digits, mnist, cifar10, folder:PATH, images:SIZE:PATH, idx:PATH, npz:PATH, or pkg.mod:factory "
        "(your function, which is run)"
    )
    root: StrictStr | None = option(None, "folder of the data sets; default $LIPKIT_DATA, else ./data")
    range: Annotated[tuple[float, float] | None, BeforeValidator(parse_range)] = option(
        None, "LOW,HIGH of every entry, which attacks respect; null: 0,1 for images (C, H, W), else none"
    )
    limit: Count | None = option(None, "at most this many samples of each split, drawn with a fixed seed")


class ModelSection(Section):
    """Which network. A plain string stands for ``name``."""

    name: StrictStr = Field(description="an architecture of lipkit.models, or pkg.mod:factory (your function)")
    options: Options = Field(default_factory=dict, description="its options, such as layer, width, mean, std")


class AugmentSection(Section):
    """Random changes of the training images."""

    crop: Annotated[Whole, Field(ge=0)] = option(0, "shift by up to this many pixels, zeros come in")
    flip: StrictBool = option(False, "mirror left to right with probability 1/2")

    @model_validator(mode="before")
    @classmethod
    def _without_jitter(cls, section: Any) -> Any:
        """Drop amounts of colour jitter that are 0, as older recipes hold them; others are refused as unknown keys."""
        jitter = ("brightness", "contrast", "saturation", "hue")
        return {k: v for k, v in section.items() if k not in jitter or v} if isinstance(section, dict) else section


class LossSection(Section):
    """The loss that is minimised. A plain string stands for ``name``."""

    name: StrictStr = option("hinge", f"one of {', '.join(losses.LOSSES)}")
    options: Options = Field(default_factory=dict, description="its options, such as eps0 of hinge")


class PenaltySection(Section):
    """An addition to the loss: ``weight`` times the sum of the logarithms of the layers' bounds."""

    method: StrictStr = option("lipbound", f"bound of each layer: one of {', '.join(PENALTIES)}")
    weight: NotNegative = option(0.008, "weight of the sum of logarithms of the bounds")
    l1: NotNegative = option(0.0, "weight of the sum of Frobenius norms of the weights")

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.method not in PENALTIES:
            raise ValueError(f"expected method as one of {', '.join(PENALTIES)}, got {self.method!r}")
        return self


class AdversarySection(Section):
    """The attack whose examples each step trains on, in place of the samples."""

    norm: Literal["linf", "l2"] = option("linf", "linf or l2")
    eps: Positive = Field(description="radius in units of the input; 8/255 is understood")
    steps: Count = option(10, "gradient steps")
    step_size: Positive | None = option(0.2, "of each step, as a fraction of eps; null: decreasing")
    random_start: StrictBool = option(True, "whether ascent starts at a random point of the ball")
    loss: Literal["ce", "margin"] = option("ce", "loss that the attack raises: ce or margin")
    beside: StrictBool = option(False, "train on the samples as well, as the loss trades needs it")


class ScheduleSection(Section):
    """The learning rate as a function of the fraction of training done. A plain string stands for ``name``."""

    name: StrictStr = option("piecewise_linear", f"one of {', '.join(schedules.SCHEDULES)}")
    options: Options = Field(default_factory=dict, description="its options, such as milestones of multistep")


class TrainSection(Numbers):
    """The training: those options of `lipkit.training.TrainOptions` that YAML can hold."""

    schedule: ScheduleSection = option(ScheduleSection(), "of the learning rate")


class CertifySection(Section):
    """Certification and attack after training, on all test samples unless said otherwise."""

    eps: Annotated[Radii, Field(min_length=1)] = option(
        (36 / 255, 72 / 255, 108 / 255, 1.0), "l2 radii of certified accuracy; 36/255 is understood"
    )
    method: Literal["global", "local", "best"] = option(
        "global", "how radii are proved: by constants, or also by linear bounds around each sample"
    )
    attack_eps: Radii | None = option(None, "l2 radii of the attack; null for those of eps")
    attack_steps: Count = option(50, "gradient steps of the attack")
    attack_restarts: Count = option(1, "starts of the attack")
    attack_samples: Count | None = option(1000, "test samples attacked; null for all")
    confidence: Annotated[Positive, Field(lt=1)] = option(0.95, "of the Clopper-Pearson intervals")
    batch_size: Count = option(256, "samples evaluated at once")
    delta: NotNegative = option(0.1, "regression: l2 deviation of the input for which output deviations are certified")
    search_restarts: Count = option(64, "regression: starts of the search for steep secants")
    search_steps: Count = option(200, "regression: steps of that search")


class Recipe(Section):
    """A run: data, network, loss, training, certification."""

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)] = Field(
        description="of the run's folder: letters, digits, _, . and -"
    )
    description: StrictStr = option("", "one line about the run")
    task: Literal["classification", "regression"] = option("classification", "what the targets are")
    data: DataSection = Field(description="which data")
    model: ModelSection = Field(description="which network")
    augment: AugmentSection = option(AugmentSection(), "random changes of the images")
    loss: LossSection = option(LossSection(), "what is minimised")
    penalty: PenaltySection | None = option(None, "Lipschitz regularisation; null for none")
    adversary: AdversarySection | None = option(None, "adversarial training; null for none")
    train: TrainSection = Field(description="how it is trained")
    certify: CertifySection = option(CertifySection(), "what is certified and attacked")

    @model_validator(mode="after")
    def _fits(self, info: ValidationInfo) -> Self:
        """Check that model, loss and schedule take their options, and that loss and adversary fit the task."""
        sections: dict[str, Any] = {"model": self.model, "loss": self.loss, "train.schedule": self.train.schedule}
        for key, section in sections.items():
            try:
                if key != "model":
                    chosen("loss" if key == "loss" else "schedule", section.name, **section.options)
                elif ":" not in section.name and (info.context or {}).get("build", True):  # no code is run here
                    models.check_names(section.name, section.options)
            except ValueError as error:
                raise ValueError(f"{key}: {str(error).removeprefix(f'{key}: ')}") from None
            except (TypeError, OverflowError) as error:  # an integer of 400 digits overflows
                expected = f"expected numbers as options of {section.name}"
                raise ValueError(f"{key}: {expected}, got {section.options}: {error}") from None
        regression = self.task == "regression"
        fitting = sorted(name for name in losses.LOSSES if (name in losses.REGRESSION) == regression)
        if self.loss.name not in fitting:
            among = ", ".join(fitting)
            raise ValueError(f"expected for task {self.task} a loss.name among {among}, got {self.loss.name}")
        if self.loss.name == "trades" and not (self.adversary and self.adversary.beside):
            raise ValueError("expected adversary.beside = true for loss.name trades, got none, or false")
        if self.adversary is not None and regression:
            raise ValueError(f"expected an adversary for task classification only, got task {self.task}")
        return self

    def code(self) -> dict[str, str]:
        """The keys that name code, ``pkg.mod:factory``, and what they name."""
        named = {"data.spec": self.data.spec, "model.name": self.model.name}
        return {key: spec for key, spec in named.items() if is_code(spec)}


Path = tuple[str, ...]
"""The names of the sections that a key is in, then its own."""


def keys(model: type[Section] = Recipe, prefix: Path = ()) -> Iterator[tuple[Path, FieldInfo, type[Section] | None]]:
    """Every key of a recipe, a section before its keys: (path, field, its section or None)."""
    for name, field in model.model_fields.items():
        kinds = typing.get_args(field.annotation) or (field.annotation,)  # several if it may be null
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        yield (*prefix, name), field, section
        if section is not None:
            yield from keys(section, (*prefix, name))
