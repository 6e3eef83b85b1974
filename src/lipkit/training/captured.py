"""A training step as a CUDA graph: one launch instead of a thousand, so small networks do not wait for Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import OptionError, first_line, lacks_memory
from lipkit.training.session import Session
from lipkit.training.step import Step

# Ordinary steps of each kind before the recorded one: they create the optimiser's state and choose algorithms.
WARM = 3


class CapturedStep:
    """A step of `lipkit.training.step`, recorded once and replayed on new batches.

    A graph is a fixed list of kernels at fixed addresses. So each batch is copied to the address of the recorded one,
    learning rates are tensors on the device, and each shape of a batch has its own graph, as has each phase of
    `SpectralDescent`, which moves large matrices every second step. A replay runs no Python: if an attribute of the
    network, loss or penalty has changed since the last step, steps are recorded anew. Changes in closures and globals
    are not noticed.

    The network of ``session`` is on a CUDA device; the groups of its optimiser are changed in place.

    Raises:
        OptionError: when called, if a step waits for numbers from the device, or changes attributes.
    """

    def __init__(self, step: Step, session: Session) -> None:
        self.step, self.parts = step, getattr(session.optimizer, "parts", [session.optimizer])
        for group in session.optimizer.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(session.fabric.device)
            group["capturable"] = True  # Adam then counts its steps on the device
        self.warmed: dict[Any, int] = {}  # number of ordinary steps of each kind
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
        self.holders = {"network": session.model, "loss": session.loss, "penalty": session.options.penalty}
        self._look()

    def __call__(self, session: Session, x: Tensor, y: Tensor, **more: Any) -> Tensor:
        """Take a step, as `take_step` does."""
        if _read(self.places) != self.seen:  # a callback changed them between two steps
            self.graphs.clear()
            self.warmed.clear()
            self._look()
        counters = [s for part in self.parts for s in part.state.values() if isinstance(s.get("step"), int)]
        every = max(group.get("every", 1) for part in self.parts for group in part.param_groups)
        phases = tuple(state["step"] % every for state in counters)  # whether large matrices move in this step
        key = (x.shape, x.dtype, y.shape, y.dtype, more["size"], more["counted"], phases)
        if key not in self.graphs:
            self.warmed[key] = self.warmed.get(key, 0) + 1
            if self.warmed[key] <= WARM:
                sums = self._beside(session, x, y, more)
                if self.warmed[key] == WARM:
                    self._check_attributes()  # the first steps may change some, as lazy modules do
                self._look()
                return sums
            held = x.clone(), y.clone()  # where later batches are copied to
            self.graphs[key] = (*_recorded(lambda: self.step(session, *held, **more)), *held)
            self._check_attributes()
        else:
            for state in counters:  # Python does not run in a replay
                state["step"] += 1
        graph, sums, held_x, held_y = self.graphs[key]
        held_x.copy_(x)
        held_y.copy_(y)
        graph.replay()
        return sums.clone()  # the next replay overwrites them

    def _look(self) -> None:
        """Remember the attributes that must not change while a recorded step is replayed."""
        self.places = _places(self.holders)
        self.seen = _read(self.places)

    def _check_attributes(self) -> None:
        for (name, _, _), before, now in zip(self.places, self.seen, _read(self.places), strict=True):
            if now != before:
                raise OptionError(f"cuda_graph: expected steps that change tensors in place, got a new value of {name}")

    def _beside(self, session: Session, x: Tensor, y: Tensor, more: dict[str, Any]) -> Tensor:
        """A step on a separate stream, which torch requires before a backward pass is recorded."""
        stream, main = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            sums = self.step(session, x, y, **more)
        main.wait_stream(stream)
        return sums


def _recorded(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Record ``run()`` without executing its kernels: the graph, and the tensor that will hold the result."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = run()
    except RuntimeError as error:
        if lacks_memory(error):
            raise
        raise OptionError(
            f"cuda_graph: expected steps that do not wait for numbers from the device, got {first_line(error)}"
        ) from error
    return graph, result


def _places(holders: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], str]]:
    """The place (name, mapping, key) of each tensor, number, text or module in an attribute, also of submodules."""
    found = []
    for root, holder in holders.items():
        for name, part in holder.named_modules() if isinstance(holder, nn.Module) else [("", holder)]:
            own = getattr(part, "__dict__", {})  # a module keeps tensors and submodules in three dicts in it
            for values in (own, *(own[key] for key in ("_parameters", "_buffers", "_modules") if key in own)):
                for key, value in values.items():
                    if value is None or isinstance(value, bool | int | float | str | Tensor | nn.Module):
                        found.append((".".join(filter(None, (root, name, key))), values, key))
    return found


def _read(places: Sequence[tuple[str, Mapping[str, Any], str]]) -> list[Any]:
    """The present state of each attribute, for comparison: a tensor by address and requires_grad, objects by id."""
    found: list[Any] = []
    for _, values, key in places:
        value = values.get(key)
        if isinstance(value, Tensor):
            found.append((value.data_ptr(), value.requires_grad))
        else:
            found.append(value if isinstance(value, bool | int | float | str | nn.Module) else id(value))
    return found
