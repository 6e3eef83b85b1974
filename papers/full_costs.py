"""The cost of one full training of each row, in hours of one CPU thread, extrapolated from single steps.

    python -m papers.full_costs     # resumable: costs in papers/full_costs.json are kept; no data are needed
    python -m papers.pages          # writes the costs into the pages

The network of the full recipe is trained on random samples of the right shape, by steps of `lipkit.fit`: augmentation,
attack, both passes, penalty, optimiser. We measure process time, without the first step, at the batch sizes 2, 8 and
32, and at the recipe's unless a step would take more than SLOW seconds and more than twice the last one. If a step of 2
samples takes more than SLOW seconds, the batch sizes are 2 and 16. A line through the two largest sizes extrapolates to
the recipe's; its value times steps and epochs is the cost. (lbdn_2_times measured eight networks of lbdn_2 at the
recipe's size.) Evaluations, certificates and attacks are not included, nor networks that need more than MEMORY.
"""

import itertools
import json
import math
import resource
import time
from typing import Any

import torch
from torch import nn

import lipkit
from lipkit.data import Data, Split
from lipkit.errors import ShapeError, first_line, lacks_memory
from lipkit.experiments.build import build_model
from lipkit.experiments.recipe import Recipe
from lipkit.experiments.run import training_options
from lipkit.files import write_atomic
from papers.pages import COSTS, SHAPES, cost_key
from papers.table_runs import plan
from papers.tables import TABLES

SLOW, MEMORY = 5.0, 8 << 30


def noise(spec: str, samples: int) -> Data:
    """Random samples with the shape and classes of a data set."""
    _, shape, classes = SHAPES[spec]
    y = torch.arange(samples) % classes if classes else torch.rand(samples, 1)
    split = Split(torch.rand(samples, *shape), y)
    return Data(spec, split, split, tuple(map(str, range(classes))))


def step_seconds(recipe: Recipe, model: nn.Module, batch: int, steps: int) -> float:
    """Process time of a training step: the shortest of ``steps`` but the first."""
    data, clock = noise(recipe.data.spec, steps * batch), list[float]()

    def post_step(*_: Any) -> None:
        clock.append(time.process_time())

    options = training_options(recipe, data).changed(
        batch_size=batch, epochs=1, evaluate=None, accelerator="cpu", devices=1, post_step=post_step
    )
    lipkit.fit(model, data.train, options)
    return min(after - before for before, after in itertools.pairwise(clock[:steps]))


def line(times: list[tuple[int, float]], batch: int) -> float:
    """The time at ``batch`` on the line through the last two (batch, time); one alone is scaled in proportion."""
    b, t = times[-1]
    if len(times) == 1:
        return t * batch / b
    slope = max(0.0, (t - times[-2][1]) / (b - times[-2][0]))
    return t + slope * (batch - b)


def reason(error: Exception) -> str:
    """Why a network was not measured: too little memory, or the first line of the error."""
    return f"needs more than {MEMORY >> 30} GiB" if lacks_memory(error) else first_line(error)


def cost(recipe: Recipe) -> dict[str, Any]:
    """Number of parameters, measured steps and hours of one training, or the reason why they are missing."""
    full, times = recipe.train.batch_size, list[tuple[int, float]]()
    try:
        model = build_model(recipe, noise(recipe.data.spec, SHAPES[recipe.data.spec][2] or 1))
    except (MemoryError, RuntimeError, ShapeError) as error:
        return {"left_out": reason(error)}
    parameters = sum(p.numel() for p in model.parameters())
    for batch in [*(b for b in (2, 8, 16, 32) if b < full), full]:
        expected = line(times, batch) if times else 0.0
        # Measure a slow network at two distant batches: a line from 2 to 4 was wrong by a factor of 14 at 256.
        slow = bool(times) and times[0][1] > SLOW
        if batch in ((8, 32) if slow else (16,)):
            continue
        if batch == full and expected > max(SLOW, 2 * times[-1][1]):
            break
        try:
            times.append((batch, step_seconds(recipe, model, batch, 3 if expected < SLOW / 2 else 2)))
        except (MemoryError, RuntimeError) as error:
            if not times:
                return {"parameters": parameters, "left_out": reason(error)}
            break
    steps = math.ceil(SHAPES[recipe.data.spec][0] / full) * (recipe.train.epochs or 0)
    seconds = line(times, full)
    measured = {str(batch): round(t, 4) for batch, t in times}
    hours = round(seconds * steps / 3600, 3)
    return {"parameters": parameters, "steps_measured": measured, "step": round(seconds, 4), "hours": hours}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    costs = json.loads(COSTS.read_text()) if COSTS.exists() else {}
    # Tables with published figures first.
    for name, table in sorted(TABLES.items(), key=lambda pair: not any(row.published for row in pair[1].rows)):
        for run in plan(table, seeds=1):
            # With a budget the cost is the budget.
            if run.recipe is None or run.recipe.train.budget is not None:
                continue
            key = cost_key(run.recipe)
            if all(known["recipe"] != key for known in costs.values()):
                costs[f"{name}: {run.row.label}"] = {"recipe": key, **cost(run.recipe)}
                write_atomic(COSTS, (json.dumps(costs, indent=1) + "\n").encode())
                print(name, run.row.label, costs[f"{name}: {run.row.label}"], flush=True)
