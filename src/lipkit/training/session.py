"""One training: the network as it is stepped, with its optimiser, its average, its data and its clocks."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lipkit.errors import OptionError
from lipkit.layers import after_step
from lipkit.layers.steps import after_step_layers
from lipkit.modules import Shape
from lipkit.training import losses, optim, schedules
from lipkit.training.clocks import Budget, Clock
from lipkit.training.options import TrainOptions
from lipkit.training.sources import Source, kept_random_state


@dataclass(frozen=True)
class Session:
    """One training: the network as it is stepped, and what all its epochs share."""

    fabric: Any  # launched
    options: TrainOptions
    data: Source
    folder: Path | None  # of the run; None writes nothing
    model: nn.Module  # the network given, whose parameters the optimiser changes
    wrapped: Any  # what the forward pass calls: ``model`` with the processes' wrapper, perhaps compiled
    optimizer: Any  # Fabric's
    peaks: tuple[float, ...]  # the largest learning rate of each of its groups
    parameters: dict[str, nn.Parameter]  # those that the optimiser holds, by name
    average: dict[str, Tensor] | None  # their moving averages; None without ``ema``
    loss: losses.Loss
    rate: schedules.Schedule
    clock: Clock  # ends training, or asks for a checkpoint
    budget: Budget
    input_shape: Shape | None  # of one input as the model gets it, if a layer needs it after a step

    @property
    def steps(self) -> int:
        """Steps of one epoch."""
        return math.ceil(len(self.data) / self.options.batch_size)

    def fraction(self, number: int) -> float:
        """Fraction of training done after step ``number`` (from 1): by steps or by budget, whichever is larger.

        All processes get the fraction of the first one: they must end together.
        """
        epochs = self.options.epochs
        by_steps = 0.0 if epochs is None else number / (epochs * self.steps)
        if self.options.budget is None:
            return by_steps
        used, fabric = self.budget.fraction, self.fabric
        return max(by_steps, fabric.broadcast(used, src=0) if fabric.world_size > 1 else used)

    def finish_step(self, model: nn.Module, number: int, last: bool) -> None:
        """The work of the layers and of ``post_step`` after step ``number``; ``last`` of an epoch."""
        if self.input_shape is not None:
            after_step(model, self.input_shape, None if last else number)
        if self.options.post_step is not None:
            with torch.no_grad():
                self.options.post_step(model, number, last)

    def measured(self, epochs: int) -> nn.Module:
        """The module that is evaluated: the network, or a copy with its averages, which no projection has seen."""
        if self.average is None:
            return self.model
        twin = copy.deepcopy(self.model).eval()  # its buffers are those of the network
        parameters = dict(twin.named_parameters())
        with torch.no_grad():
            for name, value in self.average.items():
                parameters[name].copy_(value)
        self.finish_step(twin, epochs * self.steps, last=True)
        return twin

    def nonfinite_parameter(self) -> str | None:
        """The name of a parameter with NaN or infinity; None if all are finite. All processes must call it."""
        nonfinite = torch.stack([~torch.isfinite(p.detach()).all() for p in self.parameters.values()]).float()
        if self.fabric.world_size > 1:
            nonfinite = self.fabric.all_reduce(nonfinite, reduce_op="sum")
        found = nonfinite.nonzero().flatten().tolist()  # one wait for the device
        return list(self.parameters)[found[0]] if found else None


def prepare(
    fabric: Any, model: nn.Module, options: TrainOptions, data: Source, folder: Path | None = None, used: float = 0.0
) -> Session:
    """Place (in place), wrap and compile ``model``, and make its optimiser; ``used`` is what earlier parts took."""
    if options.channels_last:  # before the optimiser's state takes the layout of the parameters
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    wrapped = fabric.setup_module(torch.compile(model) if options.compile else model)
    optimizer = fabric.setup_optimizers(optimizer_of(options, model))  # after the model is where it stays
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return Session(
        fabric=fabric,
        options=options,
        data=data,
        folder=folder,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        peaks=tuple(float(group["lr"]) for group in optimizer.param_groups),
        parameters=parameters,
        average={n: p.detach().clone() for n, p in parameters.items()} if options.ema is not None else None,
        loss=losses.build(options.loss) if isinstance(options.loss, str) else options.loss,
        rate=schedules.build(options.schedule) if isinstance(options.schedule, str) else options.schedule,
        clock=Clock(options.max_minutes, options.checkpoint_seconds),
        budget=Budget(options.budget, used),
        input_shape=_input_shape(options, data, fabric.device) if after_step_layers(model) else None,
    )


def _input_shape(options: TrainOptions, data: Source, device: torch.device) -> Shape:
    """The shape of one input as the model gets it: the first sample's, augmented."""
    with kept_random_state(device):
        x = data.batch(torch.zeros(1, dtype=torch.int64))[0].to(device)  # where augmentation runs
        augmented = x if options.augment is None else options.augment(x, torch.Generator().manual_seed(0))
        return tuple(augmented.shape[1:])


def optimizer_of(options: TrainOptions, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser that ``options`` name, of all trained parameters of ``model``.

    Raises:
        OptionError: an optimiser that would leave the manifold of Stiefel layers, or one for it without such layers.
    """
    inner, outer = optim.split(model)
    along = options.optimizer in ("spectral", "riemannian_adam")
    if along != bool(inner):
        wanted = "optimizer spectral or riemannian_adam for Stiefel layers"
        wanted = wanted if inner else f"Stiefel layers for optimizer {options.optimizer}"
        raise OptionError(f"expected {wanted}, got {options.optimizer if inner else type(model).__name__}")
    if not along:
        return make_optimizer(options, outer)
    if options.optimizer == "spectral":
        rate = 0.02 if options.manifold_lr is None else options.manifold_lr  # radians a step, whatever lr is
        first: torch.optim.Optimizer = optim.SpectralDescent(inner, rate)
    else:
        first = optim.RiemannianAdam(inner, options.lr if options.manifold_lr is None else options.manifold_lr)
    rest = [make_optimizer(options, outer)] if outer else []  # torch refuses an optimiser of nothing
    return optim.Together([first, *rest])


def make_optimizer(options: TrainOptions, parameters: Any) -> torch.optim.Optimizer:
    """The optimiser that ``options`` name for unconstrained parameters, or groups of them.

    A list of parameters on a CPU is changed in one call: torch's choice there is a dozen for each parameter.
    """
    lr, decay = options.lr, options.weight_decay
    on_cpu = all(isinstance(p, Tensor) and p.is_floating_point() and p.device.type == "cpu" for p in parameters)
    fused = True if on_cpu else None  # None: torch's choice
    if options.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=options.momentum, weight_decay=decay, fused=fused)
    adam = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
    return adam(parameters, lr=lr, weight_decay=decay, fused=fused)


def check_whole(fabric: Any) -> None:
    """Raise OptionError for a strategy that keeps parameters in parts: a constrained layer needs them whole."""
    name = type(fabric.strategy).__name__
    if name in ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"):
        raise OptionError(f"expected strategy ddp or another that leaves parameters whole, got Fabric's {name}")


def update(average: Sequence[Tensor], parameters: Sequence[Tensor], decay: float, step: int) -> None:
    r"""One step of the average, in place.

    .. math:: a_s = d_s \, a_{s-1} + (1 - d_s) \, \theta_s, \qquad d_s = \min(d, (1 + s) / (10 + s))

    Until :math:`d_s` reaches d = ``decay``, about step 9 / (1 - d), the average forgets its start faster, so that a
    short run is not held at its initial values. Steps s count from 1. The price is one fused pass over the parameters,
    without waiting for the device.

    >>> a = [torch.zeros(1)]
    >>> update(a, [torch.ones(1)], 0.9, step=8)
    >>> a
    [tensor([0.5000])]
    """
    get_ema_multi_avg_fn(min(decay, (1 + step) / (10 + step)))(list(average), list(parameters), step)
