"""A training step as a CUDA graph: its thousand launches become one, and small networks do not wait for Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lipkit.errors import OptionError, first_line
from lipkit.training.options import TrainOptions
from lipkit.training.session import Session

# Steps of each kind that run as usual before one is recorded: they make the optimiser's state and choose algorithms.
WARM = 3
Step = Callable[..., Tensor]


class CapturedStep:
    """A step of `lipkit.training.epoch`, recorded once and replayed on new batches.

    A graph is a fixed list of kernels at fixed addresses. So batches are copied to where the recorded one lay, learning
    rates are numbers on the device, and there is a graph for each shape of a batch and each phase of `SpectralDescent`,
    which moves large matrices every second step.

    Args:
        step: what is recorded, called with (session, objective, x, y) and keywords.
        session: its network, on a CUDA device; the groups of its optimiser are changed in place.
        options: of the training.

    Raises:
        OptionError: what a graph cannot hold: another device, several of them, an adversary, an optimiser whose steps
            wait for numbers from the device. When it is called: a network whose steps do.
    """

    def __init__(self, step: Step, session: Session, options: TrainOptions) -> None:
        fabric = session.fabric
        for wanted, holds, got in (
            ("one CUDA device", fabric.device.type == "cuda" and fabric.world_size == 1, fabric.device),
            ("no adversary", options.adversary is None, type(options.adversary).__name__),
            (
                "optimizer adam, adamw or spectral",
                options.optimizer in ("adam", "adamw", "spectral"),
                options.optimizer,
            ),
            ("another precision", options.precision != "16-mixed", options.precision),
        ):
            if not holds:
                raise OptionError(f"cuda_graph: expected {wanted}, got {got}")
        self.step, self.parts = step, getattr(session.optimizer, "parts", [session.optimizer])
        for group in session.optimizer.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(fabric.device)
            group["capturable"] = True
        self.warmed: dict[Any, int] = {}
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}

    def __call__(self, session: Session, objective: Any, x: Tensor, y: Tensor, **more: Any) -> Tensor:
        """As the step itself."""
        counters = [s for part in self.parts for s in part.state.values() if isinstance(s.get("step"), int)]
        every = max(group.get("every", 1) for part in self.parts for group in part.param_groups)
        phase = counters[0]["step"] % every if counters else 0
        key = (x.shape, y.shape, y.dtype, more["size"], more["counted"], phase)
        if key not in self.graphs:
            self.warmed[key] = self.warmed.get(key, 0) + 1
            if self.warmed[key] <= WARM:
                return self._beside(session, objective, x, y, more)
            held = x.clone(), y.clone()
            self.graphs[key] = (*_recorded(lambda: self.step(session, objective, *held, **more)), *held)
        else:
            for state in counters:  # what Python counted while the step was recorded
                state["step"] += 1
        graph, sums, held_x, held_y = self.graphs[key]
        held_x.copy_(x)
        held_y.copy_(y)
        graph.replay()
        return sums.clone()

    def _beside(self, session: Session, objective: Any, x: Tensor, y: Tensor, more: dict[str, Any]) -> Tensor:
        """A step on a stream of its own, as torch asks for before a backward pass is recorded."""
        stream, main = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            sums = self.step(session, objective, x, y, **more)
        main.wait_stream(stream)
        return sums


def _recorded(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The kernels of ``run()``, which are not run, and where its result will lie."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = run()
    except RuntimeError as error:
        raise OptionError(
            f"cuda_graph: expected steps that do not wait for numbers from the device, got {first_line(error)}"
        ) from error
    return graph, result
