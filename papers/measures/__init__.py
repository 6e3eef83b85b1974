"""Measurements for the rows of tables, with and without a trained network.

A measurement is a function ``(seed, root, **options) -> figures by name``; one of a trained, exported network is a
function ``(network, data, **options) -> figures by name``. Both draw every random number (of weights, inputs, samples)
from their own ``seed``. ``root`` is the folder of the data sets, ``data`` holds the test samples; not all need them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from lipkit.errors import OptionError

# Default number of samples that `attack` attacks.
ATTACKED = 1000
# Name in a table -> module of this package that holds a function of that name.
MEASURES = {
    **dict.fromkeys(("gap", "kernel_bounds", "modulus", "truncation"), "kernels"),
    **dict.fromkeys(("layer_step", "network_step", "recipe_step", "lipconvnet_step"), "speed"),
    **dict.fromkeys(("block_evaluation", "exponential"), "speed"),
    "network_bounds": "networks",
    "norm_preservation": "preservation",
    "square_wave_fit": "square_wave",
    "wasserstein": "trained",
}
# Measurements of a trained network.
AFTER = dict.fromkeys(
    ("accuracy", "attack", "attack_steps", "jacobian_norms", "layer_gains", "layer_norms", "responses",
     "local_lipschitz", "secant_slopes"), "trained"
)  # fmt: skip
# Measurements from the files that training wrote to the run's folder: ``(folder, **options) -> figures by name``.
OF_FOLDER = {"learning_curve": "trained"}


def find(name: str, table: dict[str, str] | None = None) -> Callable[..., dict[str, float]]:
    """The measurement called ``name``.

    Raises:
        OptionError: no measurement has this name.

    >>> find("truncation").__name__
    'truncation'
    """
    table = MEASURES if table is None else table
    if name not in table:
        raise OptionError(f"expected a measurement among {', '.join(table)}, got {name!r}")
    function: Any = getattr(importlib.import_module(f"papers.measures.{table[name]}"), name)
    return function
