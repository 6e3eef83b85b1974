"""Measurements for the rows of tables, with and without a trained network.

A measurement is a function ``(seed, **options) -> figures by name``, with ``root``, the folder of the data sets, if it
has an option ``data``. A measurement of a trained, exported network is a function ``(network, data, seed, **options)
-> figures by name``; ``data`` holds the test samples, which some ignore. ``seed`` decides every random number.
"""

import importlib
from collections.abc import Callable, Mapping

from lipkit.errors import OptionError

# Default number of samples that `attack` attacks.
ATTACKED = 1000
# Name of a measurement -> module of this package that defines it.
MEASURES = {
    **dict.fromkeys(("gap", "kernel_bounds", "modulus", "truncation", "norm_preservation"), "kernels"),
    **dict.fromkeys(("layer_step", "network_step", "recipe_step", "lipconvnet_step"), "speed"),
    **dict.fromkeys(("block_evaluation", "exponential"), "speed"),
    "network_bounds": "networks",
    "square_wave_fit": "square_wave",
    "wasserstein": "trained",
}
# Measurements of a trained network.
AFTER = dict.fromkeys(
    ("accuracy", "attack", "attack_steps", "jacobian_norms", "layer_gains", "layer_norms", "responses",
     "local_lipschitz", "secant_slopes"), "trained"
)  # fmt: skip
# Measurements that read the files in a run's folder: ``(folder, **options) -> figures by name``.
OF_FOLDER = {"learning_curve": "trained"}


def find(name: str, table: Mapping[str, str] = MEASURES) -> Callable[..., dict[str, float]]:
    """The measurement called ``name``.

    Raises:
        OptionError: no measurement has this name.

    >>> find("truncation").__name__
    'truncation'
    """
    if name not in table:
        raise OptionError(f"expected a measurement among {', '.join(table)}, got {name!r}")
    return getattr(importlib.import_module(f"papers.measures.{table[name]}"), name)
