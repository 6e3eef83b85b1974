"""One training step of the default recipe: calls of torch and process time, in milliseconds.

    OMP_NUM_THREADS=1 python benchmarks/digits_step.py [rounds]

To compare two states of the code, run them in turn, and take the medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lipkit.experiments.build import build_model, load_data
from lipkit.experiments.recipe import load_recipe
from lipkit.experiments.run import training_options
from lipkit.memory import keep_freed_memory
from lipkit.training.devices import make_fabric
from lipkit.training.session import Session
from lipkit.training.step import take_step

STEPS = 20


class Count(TorchDispatchMode):
    """Counts the operations that reach torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def main(rounds: int) -> None:
    """Print the calls of a step, and the median and the least of its process times over the rounds."""
    keep_freed_memory()
    torch.set_num_threads(1)
    recipe = load_recipe("digits_cayley")
    data = load_data(recipe)
    torch.manual_seed(0)
    model, options = build_model(recipe, data).train(), training_options(recipe, data)
    session = Session(make_fabric(options), model, options, data.train)
    size = recipe.train.batch_size
    x, y = data.train.batch(torch.arange(size))

    def step() -> None:
        take_step(session, x, y, size=size, counted=size, attack=torch.Generator())

    with session.opened(None):
        for _ in range(5):
            step()
        with Count() as count:
            step()
        found = []
        for _ in range(rounds):
            start = time.process_time()
            for _ in range(STEPS):
                step()
            found.append((time.process_time() - start) / STEPS * 1e3)
    print(f"{count.calls} calls; process time {statistics.median(found):.2f} ms (median), {min(found):.2f} ms (least)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
