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
    "block_evaluation": "speed",
    "exponential": "speed",
    "gap": "kernels",
    "kernel_bounds": "kernels",
    "layer_step": "speed",
    "lipconvnet_step": "speed",
    "modulus": "kernels",
    "network_bounds": "networks",
    "network_step": "speed",
    "recipe_step": "speed",
    "square_wave_fit": "square_wave",
    "norm_preservation": "preservation",
    "truncation": "kernels",
    "wasserstein": "trained",
}
AFTER = {
    "accuracy": "trained",
    "attack": "trained",
    "attack_steps": "trained",
    "jacobian_norms": "trained",
    "layer_gains": "trained",
    "layer_norms": "trained",
    "responses": "trained",
    "local_lipschitz": "trained",
    "secant_slopes": "trained",
}
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
