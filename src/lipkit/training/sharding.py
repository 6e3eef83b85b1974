"""Sharded training (FSDP2): each process keeps a part of the parameters, gradients and optimiser's state.

A constrained layer makes its weight from whole parameters, and a network may use those of one layer in another, so the
whole network is one unit: its parameters are gathered before the forward pass and used whole.
Lightning Fabric's ``FSDPStrategy`` is for CUDA alone and flattens parameters; its ``ModelParallelStrategy``, with
``torch.distributed.fsdp.fully_shard``, leaves them as they are and runs on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lipkit.errors import OptionError


def strategy() -> Any:
    """Fabric's strategy for ``strategy="fsdp"``."""
    from lightning_fabric.strategies import ModelParallelStrategy

    return ModelParallelStrategy(lambda model, mesh: shard(model))


def shard(model: nn.Module) -> nn.Module:
    """Shard a network among all processes, in place, as one unit.

    Scalars, such as a layer's gain, cannot be sharded: each process keeps them, see `sync_scalars`.
    """
    fully_shard(model, ignored_params=set(scalars(model)))
    return model


def scalars(model: nn.Module) -> list[nn.Parameter]:
    """The parameters without dimensions."""
    return [p for p in model.parameters() if p.ndim == 0]


def groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """The trained parameters for the optimiser: sharded ones and scalars apart, for they cannot be mixed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    parts = [[p for p in trained if p.ndim], [p for p in trained if not p.ndim]]
    return [{"params": part} for part in parts if part]


def sync_scalars(fabric: Any, model: nn.Module) -> None:
    """Average the gradients of the scalars over the processes, as sharding does those of all others."""
    own = [p for p in scalars(model) if p.grad is not None]
    if own:
        mean = fabric.all_reduce(torch.stack([p.grad for p in own if p.grad is not None]), reduce_op="mean")
        for parameter, gradient in zip(own, mean, strict=True):
            parameter.grad = gradient.clone()


def clip_gradients(model: nn.Module, max_norm: float) -> None:
    """Scale all gradients down to the l2 norm ``max_norm``, as one vector, sharded or not."""
    found = groups(model)
    norms = [get_total_norm([p.grad for p in group["params"] if p.grad is not None]) for group in found]
    total = torch.stack([whole(norm) for norm in norms]).norm()
    for group in found:
        clip_grads_with_norm_(group["params"], max_norm, total)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, sharded or not. All processes must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(value: Tensor, tensor: Tensor) -> Tensor:
    """A whole value, sharded as ``tensor`` is."""
    value = value.to(device=tensor.device, dtype=tensor.dtype)
    return distribute_tensor(value, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else value


@torch.no_grad()
def gather(sharded: nn.Module, model: nn.Module) -> None:
    """Copy parameters and buffers of the sharded network to its whole twin. All processes must call it."""
    target = model.state_dict()
    for name, value in sharded.state_dict().items():
        target[name].copy_(whole(value))


def optimizer_state(sharded: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimiser's whole state by parameter names. All processes must call it; the first gets it."""
    return dict(get_optimizer_state_dict(sharded, optimizer, options=_options()))


def load_optimizer_state(sharded: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `optimizer_state` gave. All processes must call it, each with the whole state."""
    set_optimizer_state_dict(sharded, optimizer, state, options=_options())


def check_whole(wanted: Sequence[tuple[str, object]]) -> None:
    """Raise OptionError for what works on the weights outside the forward pass, where they are not whole."""
    for name, value in wanted:
        if value is not None:
            raise OptionError(
                f"expected no {name} with strategy fsdp, where parameters are whole in the forward pass only, "
                "got one: use ddp"
            )


def _options() -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, cpu_offload=True)
