"""The network as it is stepped: on its device, wrapped for its processes, with its optimiser and its average."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lipkit.errors import OptionError
from lipkit.training import optim
from lipkit.training.options import TrainOptions


@dataclass(frozen=True)
class Session:
    """One network in training.

    Attributes:
        fabric: the launched Fabric.
        model: the network given, whose parameters the optimiser changes.
        wrapped: what is called in the forward pass: ``model`` with the processes' wrapper, perhaps compiled.
        optimizer: Fabric's.
        rates: the peak learning rate of each of its groups.
        names: names of the trained parameters.
        parameters: the trained parameters, those that the optimiser holds, in the order of ``names``.
        average: their moving averages, in the order of ``names``; None without.
    """

    fabric: Any
    model: nn.Module
    wrapped: Any
    optimizer: Any
    rates: tuple[float, ...]
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    average: list[Tensor] | None


def prepare(fabric: Any, model: nn.Module, options: TrainOptions) -> Session:
    """Place (in place), wrap and compile ``model``, and make its optimiser."""
    if options.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    wrapped = fabric.setup_module(torch.compile(model) if options.compile else model)
    optimizer = fabric.setup_optimizers(optimizer_of(options, model))
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    average = [p.detach().clone() for p in found.values()] if options.ema is not None else None
    rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
    parameters = tuple(found.values())
    return Session(fabric, model, wrapped, optimizer, rates, tuple(found), parameters, average)


def optimizer_of(options: TrainOptions, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser that ``options`` name, of all trained parameters of ``model``.

    Raises:
        OptionError: an optimiser that would leave the manifold of Stiefel layers, or one for it without such layers.
    """
    inner, outer = optim.split(model)
    along = options.optimizer in ("spectral", "riemannian_adam")
    if along != bool(inner):
        wanted = (
            "optimizer spectral or riemannian_adam for Stiefel layers"
            if inner
            else (f"Stiefel layers for optimizer {options.optimizer}")
        )
        raise OptionError(f"expected {wanted}, got {options.optimizer if inner else type(model).__name__}")
    if not along:
        return make_optimizer(options, outer)
    if options.optimizer == "spectral":
        rate = 0.02 if options.manifold_lr is None else options.manifold_lr
        first: torch.optim.Optimizer = optim.SpectralDescent(inner, rate)
    else:
        first = optim.RiemannianAdam(inner, options.lr if options.manifold_lr is None else options.manifold_lr)
    rest = [make_optimizer(options, outer)] if outer else []
    return optim.Together([first, *rest])


def make_optimizer(options: TrainOptions, parameters: Any) -> torch.optim.Optimizer:
    """The optimiser that ``options`` name for unconstrained parameters, or groups of them.

    A list of parameters on a CPU is changed in one call: torch's choice there is a dozen for each parameter.
    """
    lr, decay = options.lr, options.weight_decay
    on_cpu = all(isinstance(p, Tensor) and p.is_floating_point() and p.device.type == "cpu" for p in parameters)
    fused = True if on_cpu else None
    if options.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=options.momentum, weight_decay=decay, fused=fused)
    adam = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
    return adam(parameters, lr=lr, weight_decay=decay, fused=fused)


def check_whole(fabric: Any) -> None:
    """Raise OptionError for a strategy that keeps parameters in parts: a constrained layer needs them whole."""
    name = type(fabric.strategy).__name__
    if name in ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"):
        raise OptionError(f"expected strategy ddp or another that leaves parameters whole, got Fabric's {name}")


def average_by_name(session: Session) -> dict[str, Tensor] | None:
    """The averages by the names of their parameters; None without."""
    return None if session.average is None else dict(zip(session.names, session.average, strict=True))


def load_average(session: Session, values: Mapping[str, Tensor]) -> None:
    """Continue the averages of a checkpoint."""
    for name, value in (average_by_name(session) or {}).items():
        value.copy_(values[name])


def measured_model(session: Session, finish: Callable[[nn.Module], None]) -> nn.Module:
    """The module that is evaluated: the network, or a copy with its averages, which no projection has seen."""
    average = average_by_name(session)
    if average is None:
        return session.model
    twin = averaged(session.model, average)
    with torch.no_grad():
        finish(twin)
    return twin


def nonfinite_parameter(session: Session) -> str | None:
    """The name of a parameter with NaN or infinity; None if all are finite. All processes must call it."""
    nonfinite = torch.stack([~torch.isfinite(p.detach()).all() for p in session.parameters]).float()
    if session.fabric.world_size > 1:
        nonfinite = session.fabric.all_reduce(nonfinite, reduce_op="sum")
    found = nonfinite.nonzero().flatten().tolist()
    return session.names[found[0]] if found else None


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


def averaged(model: nn.Module, average: Mapping[str, Tensor]) -> nn.Module:
    """A copy of ``model`` in evaluation mode with the averages as its parameters; its buffers are those of ``model``.

    >>> model = nn.Linear(1, 1)
    >>> averaged(model, {"weight": torch.ones(1, 1)}).weight.item()
    1.0
    """
    twin = copy.deepcopy(model)
    parameters = dict(twin.named_parameters())
    with torch.no_grad():
        for name, value in average.items():
            parameters[name].copy_(value)
    return twin.eval()
