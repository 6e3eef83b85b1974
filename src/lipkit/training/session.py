"""The state that all epochs of a training share: network, optimiser, average, data and clocks."""

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
from lipkit.layers.projections import after_step_layers
from lipkit.modules import Shape
from lipkit.training import losses, optim, schedules
from lipkit.training.clocks import Budget, Clock
from lipkit.training.options import TrainOptions
from lipkit.training.sources import Source, kept_random_state


@dataclass(frozen=True)
class Session:
    """The network in training, and the other state that all epochs share."""

    fabric: Any  # launched
    options: TrainOptions
    data: Source
    folder: Path | None  # of the run; None writes nothing
    model: nn.Module  # the given network, whose parameters the optimiser changes
    wrapped: Any  # ``model`` with Fabric's wrapper, perhaps compiled; for forward passes
    optimizer: Any  # Fabric's
    peaks: tuple[float, ...]  # peak learning rate of each group
    parameters: dict[str, nn.Parameter]  # the trained ones, by name
    average: dict[str, Tensor] | None  # their moving averages; None without ``ema``
    loss: losses.Loss
    rate: schedules.Schedule
    clock: Clock  # requests a checkpoint, or the end of training
    budget: Budget
    input_shape: Shape | None  # of one augmented input, if `after_step` needs it

    @property
    def steps(self) -> int:
        """Steps of one epoch."""
        return math.ceil(len(self.data) / self.options.batch_size)

    def fraction(self, number: int) -> float:
        """Fraction of training done after step ``number`` (from 1): by steps or by budget, whichever is larger.

        All processes use the fraction of the first one, because they must end together.
        """
        epochs = self.options.epochs
        by_steps = 0.0 if epochs is None else number / (epochs * self.steps)
        if self.options.budget is None:
            return by_steps
        used, fabric = self.budget.fraction, self.fabric
        return max(by_steps, fabric.broadcast(used, src=0) if fabric.world_size > 1 else used)

    def finish_step(self, model: nn.Module, number: int, last: bool) -> None:
        """Call `after_step` and the user's ``post_step`` after step ``number``; ``last``: it ends the epoch."""
        if self.input_shape is not None:
            after_step(model, self.input_shape, None if last else number)
        if self.options.post_step is not None:
            with torch.no_grad():
                self.options.post_step(model, number, last)

    def measured(self, epochs: int) -> nn.Module:
        """The module to evaluate: the network, or with ``ema`` a copy with the averages, after `finish_step`."""
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
    """Move ``model`` to the device in place, wrap and compile it, make its optimiser; ``used``: see `Budget`."""
    if options.channels_last:  # first: the optimiser's state copies the layout of the parameters
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    wrapped = fabric.setup_module(torch.compile(model) if options.compile else model)
    optimizer = fabric.setup_optimizers(optimizer_of(options, model))  # when the model is on its device
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
    """The shape of one input after augmentation, from the first sample."""
    with kept_random_state(device):
        x = data.batch(torch.zeros(1, dtype=torch.int64))[0].to(device)  # augmentation runs there
        augmented = x if options.augment is None else options.augment(x, torch.Generator().manual_seed(0))
        return tuple(augmented.shape[1:])


def optimizer_of(options: TrainOptions, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser named by ``options`` for all trained parameters of ``model``.

    Raises:
        OptionError: the network has Stiefel layers and the optimiser would leave their manifold, or the reverse.
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
    rest = [make_optimizer(options, outer)] if outer else []  # torch refuses an empty optimiser
    return optim.Together([first, *rest])


def make_optimizer(options: TrainOptions, parameters: Any) -> torch.optim.Optimizer:
    """The optimiser named by ``options`` for unconstrained parameters, or groups of them.

    On a CPU it is fused to one call for all parameters; torch's default makes a dozen calls for each.
    """
    lr, decay = options.lr, options.weight_decay
    on_cpu = all(isinstance(p, Tensor) and p.is_floating_point() and p.device.type == "cpu" for p in parameters)
    fused = True if on_cpu else None  # None: torch's default
    if options.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=options.momentum, weight_decay=decay, fused=fused)
    adam = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
    return adam(parameters, lr=lr, weight_decay=decay, fused=fused)


def check_whole(fabric: Any) -> None:
    """Raise OptionError for a strategy that splits parameters, because constrained layers need them whole."""
    name = type(fabric.strategy).__name__
    if name in ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"):
        raise OptionError(f"expected strategy ddp or another that leaves parameters whole, got Fabric's {name}")


def update(average: Sequence[Tensor], parameters: Sequence[Tensor], decay: float, step: int) -> None:
    r"""One step of the average, in place.

    .. math:: a_s = d_s \, a_{s-1} + (1 - d_s) \, \theta_s, \qquad d_s = \min(d, (1 + s) / (10 + s))

    Until :math:`d_s` reaches d = ``decay``, at about step 9 / (1 - d), the average forgets its start faster, so that it
    does not stay near the initial values in a short run. Steps s count from 1. It costs one fused pass over the
    parameters, without waiting for the device.

    >>> a = [torch.zeros(1)]
    >>> update(a, [torch.ones(1)], 0.9, step=8)
    >>> a
    [tensor([0.5000])]
    """
    get_ema_multi_avg_fn(min(decay, (1 + step) / (10 + step)))(list(average), list(parameters), step)
