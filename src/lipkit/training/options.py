"""The options of training, for ``fit``, for the section ``train`` of a recipe and for the settings of a run."""

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)
from torch import Tensor, nn

from lipkit.errors import OptionError, suggestion
from lipkit.text import printable
from lipkit.training import losses, schedules
from lipkit.training.adversarial import Adversary
from lipkit.training.progress import Progress
from lipkit.training.schedules import parse_budget
from lipkit.training.sources import Augment

Evaluate = Callable[[nn.Module], Mapping[str, float]]
PostStep = Callable[[nn.Module, int, bool], None]
Penalty = Callable[[nn.Module], Tensor]

_DECIMAL = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?"
NUMBER = re.compile(rf"\s*({_DECIMAL})\s*(?:/\s*({_DECIMAL})\s*)?", re.ASCII)


# Parameters stay in float32 or float64, because constraints do not hold in less; "mixed" is autocast.
Precision = Literal["32-true", "64-true", "bf16-mixed", "16-mixed"]


def parse_number(value: Any) -> Any:
    """A number, or the text of a decimal or of a quotient of two, as a float (an int stays one); else ValueError.

    >>> parse_number("36/255") == 36 / 255, parse_number("1e-3"), parse_number(2)
    (True, 0.001, 2)
    >>> parse_number("2**0.5")
    Traceback (most recent call last):
    ValueError: expected a number such as 0.5 or 36/255, got '2**0.5'
    """
    value = value.item() if isinstance(value, np.generic) else value  # neither JSON nor YAML holds numpy's numbers
    if isinstance(value, str):
        match = NUMBER.fullmatch(value)
        denominator = float(match[2]) if match and match[2] else 1.0  # so that "36/255" is exactly Python's 36 / 255
        if match and denominator != 0:
            return float(match[1]) / denominator
    elif isinstance(value, int | float) and not isinstance(value, bool):  # True is an int
        return value
    raise ValueError(f"expected a number such as 0.5 or 36/255, got {printable(repr(value), 80)}")


TABLES: dict[str, Mapping[str, Callable[..., Any]]] = {"loss": losses.LOSSES, "schedule": schedules.SCHEDULES}


def chosen(kind: Literal["loss", "schedule"], name: str, /, **options: Any) -> Any:
    """The loss or schedule of this name with its keyword arguments bound; wrong ones are refused at once.

    >>> chosen("schedule", "multistep", milestones=[0.5])(0.75)
    0.1
    """
    table = TABLES[kind]
    if name not in table:
        raise OptionError(f"expected {kind} as one of {', '.join(table)}, got {name!r}")
    # The keyword-only parameters are the options; the others are the fraction, or outputs and targets.
    known = [p.name for p in inspect.signature(table[name]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option, value in options.items():
        if option not in known:
            among = ", ".join(known) or "(none)"
            raise OptionError(f"expected options of {kind} {name!r} among {among}, got {option!r}")
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if kind == "loss" and not number:
            raise OptionError(f"expected {option} of loss {name!r} as a finite number, got {value!r}")
    bound = functools.partial(table[name], **options)
    outputs = torch.zeros(2, 3)
    targets = outputs if name in losses.REGRESSION else torch.zeros(2, dtype=torch.int64)
    bound(*((outputs, targets) if kind == "loss" else (0.5,)))  # runs the range checks
    return bound


Positive = Annotated[float, BeforeValidator(parse_number), Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, BeforeValidator(parse_number), Field(ge=0, allow_inf_nan=False)]


def _whole(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, int) and not -(2**63) <= value < 2**63:  # torch's seeds and sizes are int64
        raise ValueError(f"expected an integer of 64 bits, got {value}")
    return value


Whole = Annotated[StrictInt, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=1)]


def _budget(value: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    text = f"{value}s" if number else value  # a bare number means seconds
    if isinstance(text, str):
        parse_budget(text)  # only to refuse it; a run records the text
    return text


Budgeted = Annotated[StrictStr, BeforeValidator(_budget)]


class Section(BaseModel):
    """Base of the sections of options: immutable, with declared keys only, each checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


def option(default: Any, description: str) -> Any:
    """A key of a section: its default, and its description in `lipkit recipe show`."""
    return Field(default=default, description=description)


class Numbers(Section):
    """The options that a recipe can set. To add one, write an entry here and the code where it acts."""

    epochs: Count | None = option(None, "passes over the training data; null: until the budget is used")
    budget: Budgeted | None = option(
        None,
        "time (400s, 10min, 1h of the processor, or 1h wall) or samples (1.5M images) whose used fraction the learning "
        "rate follows; null for no limit. With epochs, training stops at whichever comes first",
    )
    batch_size: Count = option(128, "samples of one step, all devices together")
    lr: Positive = option(0.001, "peak learning rate")
    optimizer: Literal["adam", "adamw", "sgd", "spectral", "riemannian_adam"] = option(
        "adam",
        "adam, adamw, sgd; spectral or riemannian_adam for Stiefel layers along their manifold (all else by adam)",
    )
    manifold_lr: Positive | None = option(
        None,
        "peak rate of Stiefel layers: of spectral in radians a step, null for 0.02; of riemannian_adam null for lr",
    )
    momentum: Annotated[NotNegative, Field(lt=1)] = option(0.9, "momentum of sgd; others ignore it")
    weight_decay: NotNegative = option(0.0, "as the optimiser defines it")
    schedule: Any = option("piecewise_linear", "of the learning rate")
    grad_clip: Positive | None = option(None, "largest l2 norm of the gradient; null for no limit")
    accumulate: Count = option(1, "pieces into which each device splits its part of a batch, to save memory")
    ema: Annotated[Positive, Field(lt=1)] | None = option(
        None,
        "decay of an average of the parameters, such as 0.999, evaluated and exported instead; null for none",
    )
    seed: Annotated[Whole, Field(ge=0)] = option(0, "seed of initial weights, shuffling, augmentation")
    evaluate_every: Count = option(1, "epochs between evaluations; the last epoch always has one")
    evaluate_samples: Count = option(1000, "test samples of each evaluation during a recipe's training")
    checkpoint_every: Count = option(1, "epochs between checkpoints (the last two are kept); the last epoch has one")
    checkpoint_seconds: Positive | None = option(None, "seconds between checkpoints within an epoch; null for none")
    max_minutes: Positive | None = option(None, "minutes until training stops, to be resumed; null for no limit")
    tensorboard: StrictBool = option(False, "TensorBoard events in the run's folder (needs the package tensorboard)")
    accelerator: StrictStr = option("auto", "auto, cpu, cuda or mps")
    devices: Whole | StrictStr | list[Whole] = option(1, "devices on each machine: a number, auto, or a list")
    nodes: Count = option(1, "number of machines; torchrun sets it")
    strategy: StrictStr = option("auto", "Lightning Fabric's strategy for several devices: ddp")
    precision: Precision = option("32-true", "32-true, 64-true, bf16-mixed, 16-mixed; constraints do not hold in less")
    compile: StrictBool = option(False, "compile the forward pass of training by torch.compile")
    cuda_graph: StrictBool = option(False, "record the step on one GPU as a CUDA graph: small networks train faster")
    channels_last: StrictBool = option(False, "store images and kernels channels last")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.epochs is None and self.budget is None:
            raise ValueError("expected epochs, or a budget, got neither")
        return self


PLACEMENT = ("accelerator", "devices", "nodes", "strategy", "max_minutes", "checkpoint_seconds", "tensorboard")
"""Options of where, how long and with which monitoring a run is made; they do not affect its results."""
# Options that may differ when a run is resumed: they do not affect its weights.
_NOT_RECORDED = {
    *PLACEMENT,
    *("evaluate", "evaluate_every", "evaluate_samples", "post_step", "progress"),
    *("checkpoint_every", "compile", "channels_last"),
}


class TrainOptions(Numbers):
    """The options of ``lipkit.fit``: those that a recipe can set, and functions.

    Attributes:
        loss: a name of `losses.LOSSES`, or a function of (outputs, targets) that returns a mean.
        schedule: a name of `schedules.SCHEDULES`, or a function of the fraction of training done.
        augment: a function of (x, generator on the CPU), applied to each batch on the training device.
        evaluate: called with the model in evaluation mode, under no_grad and without effect on torch's random state,
            after every ``evaluate_every``-th epoch and the last; the numbers it returns are added to the metrics, under
            names that these do not have yet.
        post_step: called as ``post_step(model, step, epoch_end)`` under no_grad after each optimiser step (counted from
            1) and `lipkit.layers.after_step`. With ``ema`` also called with the averaged copy and epoch_end True.
        penalty: called with the model in training mode at each step; its result is added to the loss (see
            `LipschitzPenalty`), and its value at the end of each epoch to the metrics.
        adversary: called as ``adversary(model, x, y, generator)`` with the model in evaluation mode, after the
            augmentation; the step trains on the examples that it returns (see `PgdAdversary`).
        progress: called with a `Progress` every few steps and at the end of each epoch.
        epochs, ..., channels_last: keys of ``train`` in a recipe; ``lipkit recipe show`` describes them.

    Raises:
        OptionError: an unknown option, or one outside its values.

    >>> TrainOptions(epochs=3, lr=0.1).batch_size
    128
    >>> TrainOptions(epochs=0)
    Traceback (most recent call last):
    lipkit.errors.OptionError: epochs: expected greater than or equal to 1, got 0
    """

    loss: str | losses.Loss = "hinge"
    schedule: str | schedules.Schedule = "piecewise_linear"
    augment: Augment | None = None
    evaluate: Evaluate | None = None
    post_step: PostStep | None = None
    penalty: Penalty | None = None
    adversary: Adversary | None = None
    progress: Callable[[Progress], None] | None = None

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            found, known = error.errors()[0], list(type(self).model_fields)  # the other errors may follow from it
            key = str(found["loc"][0]) if found["loc"] else ""
            if found["type"] == "extra_forbidden":
                hint = suggestion(key, known) or f", expected one of {', '.join(known)}"
                raise OptionError(f"unknown option {key!r}{hint}") from None
            message = "expected a name or a function" if key in TABLES else found["msg"]
            raise OptionError(worded(key, message, found["input"])) from None
        for kind, table in TABLES.items():
            if isinstance(name := getattr(self, kind), str) and name not in table:
                raise OptionError(f"expected {kind} as one of {', '.join(table)}, got {name!r}")

    def changed(self, **changes: Any) -> Self:
        """A copy with some options replaced, checked again."""
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **changes})

    def settings(self, samples: int) -> dict[str, Any]:
        """The options that a run records: those that affect the weights, and the number of training ``samples``.

        Functions are recorded by name, a partial or a dataclass with its bound options.

        >>> TrainOptions(epochs=1, loss=functools.partial(losses.hinge, eps0=0.5)).settings(9)["loss"]
        'hinge(eps0=0.5)'
        """
        found: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            # cuda_graph=False is left out, so that runs from before this option can be resumed.
            if name in _NOT_RECORDED or (name == "cuda_graph" and not value):
                continue
            if not (value is None or isinstance(value, str | int | float)):
                bound = value if isinstance(value, functools.partial) else None
                inner = value if bound is None else bound.func
                value = repr(inner) if is_dataclass(inner) else getattr(inner, "__qualname__", type(inner).__qualname__)
                if bound is not None:
                    texts = [*map(repr, bound.args), *(f"{k}={v!r}" for k, v in bound.keywords.items())]
                    value += f"({', '.join(texts)})"
            found[name] = value
        return {**found, "samples": samples}


def worded(key: str, message: str, got: Any) -> str:
    """A message of pydantic as a sentence about ``key``, with the value received.

    >>> worded("lr", "Input should be greater than 0", -1.0)
    'lr: expected greater than 0, got -1.0'
    """
    message = message.removeprefix("Value error, ").replace("Input should be", "expected", 1)  # pydantic's words
    message = message.replace("a valid tuple", "numbers such as 36/255,1")
    if not key or message.startswith(f"{key}: "):
        return message
    shown = "" if ", got " in message else f", got {printable(repr(got), 80)}"
    return f"{key}: {message[0].lower()}{message[1:]}{shown}"
