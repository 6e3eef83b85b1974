"""The network as it is stepped: on its device, wrapped for its processes, with its optimiser and its average."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lipkit.errors import OptionError, RunError
from lipkit.training import optim
from lipkit.training.options import TrainOptions


@dataclass(frozen=True)
class Trainee:
    """One network in training.

    Attributes:
        fabric: the launched Fabric.
        model: the network given, whole. Sharded training steps a copy, and `whole` brings its weights here.
        stepped: the module whose parameters the optimiser changes: ``model`` itself unless sharded.
        wrapped: what is called in the forward pass: ``stepped`` with the processes' wrapper, perhaps compiled.
        optimizer: Fabric's.
        rates: the peak learning rate of each of its groups.
        sharded: whether ``stepped`` is sharded.
        names: names of the trained parameters.
        parameters: the trained parameters, those that the optimiser holds, in the order of ``names``.
        average: their moving averages, in the order of ``names``; None without.
    """

    fabric: Any
    model: nn.Module
    stepped: nn.Module
    wrapped: Any
    optimizer: Any
    rates: tuple[float, ...]
    sharded: bool
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    average: list[Tensor] | None


def prepare(fabric: Any, model: nn.Module, options: TrainOptions) -> Trainee:
    """Place, wrap and compile ``model``, and make its optimiser.

    Args:
        fabric: a launched Fabric.
        model: on any device; moved in place.
        options: of training.
    """
    sharded = is_sharded(fabric)
    if options.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    stepped = copy.deepcopy(model) if sharded else model
    wrapped = fabric.setup_module(torch.compile(stepped) if options.compile else stepped)
    if sharded:
        from lipkit.training.sharding import groups

        fabric.strategy.precision.convert_module(model)
        fabric.to_device(model)
        optimizer = fabric.setup_optimizers(make_optimizer(options, groups(stepped)))
    else:
        optimizer = fabric.setup_optimizers(optimizer_of(options, stepped))
    found = {name: p for name, p in stepped.named_parameters() if p.requires_grad}
    average = [p.detach().clone() for p in found.values()] if options.ema is not None else None
    rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
    parameters = tuple(found.values())
    return Trainee(fabric, model, stepped, wrapped, optimizer, rates, sharded, tuple(found), parameters, average)


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


def is_sharded(fabric: Any) -> bool:
    """True if Fabric shards the parameters.

    Raises:
        OptionError: by a strategy that flattens them, so that layers do not find their own.
    """
    name = type(fabric.strategy).__name__
    if name in ("FSDPStrategy", "DeepSpeedStrategy"):
        raise OptionError(f"expected strategy fsdp, ddp or another that leaves parameters whole, got Fabric's {name}")
    return name == "ModelParallelStrategy"


def whole(trainee: Trainee) -> nn.Module:
    """``trainee.model`` with the weights of now. All processes must call it."""
    if trainee.sharded:
        from lipkit.training.sharding import gather

        gather(trainee.stepped, trainee.model)
    return trainee.model


def whole_average(trainee: Trainee) -> dict[str, Tensor] | None:
    """The averages by name, whole; None without. All processes must call it."""
    if trainee.average is None:
        return None
    if not trainee.sharded:
        return dict(zip(trainee.names, trainee.average, strict=True))
    from lipkit.training.sharding import whole as gathered

    return {name: gathered(value) for name, value in zip(trainee.names, trainee.average, strict=True)}


def load_average(trainee: Trainee, values: Mapping[str, Tensor]) -> None:
    """Continue the averages of a checkpoint."""
    assert trainee.average is not None
    if trainee.sharded:
        from lipkit.training.sharding import placed_like

        values = {n: placed_like(values[n], a) for n, a in zip(trainee.names, trainee.average, strict=True)}
    for name, value in zip(trainee.names, trainee.average, strict=True):
        value.copy_(values[name])


def optimizer_state(trainee: Trainee) -> dict[str, Any]:
    """The optimiser's state as plain containers. All processes must call it."""
    if not trainee.sharded:
        return dict(trainee.optimizer.state_dict())
    from lipkit.training import sharding

    return sharding.optimizer_state(trainee.stepped, trainee.optimizer.optimizer)


def load_optimizer_state(trainee: Trainee, state: dict[str, Any]) -> None:
    """Continue the optimiser of a checkpoint; one written with sharding continues only with it.

    Raises:
        RunError: the checkpoint was written with sharding and this run is not sharded, or the reverse.
    """
    by_name = any(isinstance(key, str) for key in state["state"])
    if state["state"] and by_name != trainee.sharded:
        before, now = ("fsdp", "another") if by_name else ("another strategy", "fsdp")
        raise RunError(f"expected the strategy that the run was started with, got {now} after {before}")
    if not trainee.sharded:
        trainee.optimizer.load_state_dict(state)
        return
    from lipkit.training import sharding

    sharding.load_optimizer_state(trainee.stepped, trainee.optimizer.optimizer, state)


def measured_model(trainee: Trainee, finish: Callable[[nn.Module], None]) -> nn.Module:
    """The module that is evaluated: the network, or a copy with its averages. All processes must call it.

    Args:
        trainee: in training.
        finish: applied to the copy, whose averages no projection has seen.
    """
    model, average = whole(trainee), whole_average(trainee)
    if average is None:
        return model
    twin = averaged(model, average)
    with torch.no_grad():
        finish(twin)
    return twin


def spoilt_parameter(trainee: Trainee) -> str | None:
    """The name of a parameter with NaN or infinity; None if all are finite. All processes must call it."""
    local: list[Tensor] = [p.detach() for p in trainee.parameters]
    if trainee.sharded:
        from torch.distributed.tensor import DTensor  # half a second to import: paid by those who shard

        local = [p.to_local() if isinstance(p, DTensor) else p for p in local]
    spoilt = torch.stack([~torch.isfinite(p).all() for p in local]).float()
    if trainee.fabric.world_size > 1:
        spoilt = trainee.fabric.all_reduce(spoilt, reduce_op="sum")
    found = spoilt.nonzero().flatten().tolist()
    return trainee.names[found[0]] if found else None


def update(average: Sequence[Tensor], parameters: Sequence[Tensor], decay: float, step: int) -> None:
    r"""One step of the average, in place.

    .. math:: a_s = d_s \, a_{s-1} + (1 - d_s) \, \theta_s, \qquad d_s = \min(d, (1 + s) / (10 + s))

    Until :math:`d_s` reaches d, about step 9 / (1 - d), the average forgets its start faster, so that a short run
    is not held at its initial values.

    Args:
        average: :math:`a_{s-1}`, becomes :math:`a_s`.
        parameters: :math:`\theta_s`, as many tensors of the same shapes.
        decay: d, in (0, 1).
        step: s, counted from 1.

    Cost:
        One fused pass over the parameters, without waiting for the device.

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
