"""Measurements for the rows of tables, with and without a trained network, by name.

A measurement is a function ``(seed, **options) -> figures by name``, with ``root``, the folder of the data sets, if it
has an option ``data``. A measurement of a trained, exported network is a function ``(network, data, seed, **options)
-> figures by name``; ``data`` holds the test samples, which some ignore. ``seed`` decides every random number.
"""

from collections.abc import Callable

from papers.measures import kernels, networks, speed, square_wave, trained

Measure = Callable[..., dict[str, float]]


def _named(*functions: Measure) -> dict[str, Measure]:
    return {function.__name__: function for function in functions}


MEASURES = _named(
    *(kernels.gap, kernels.kernel_bounds, kernels.modulus, kernels.truncation, kernels.norm_preservation),
    *(speed.layer_step, speed.network_step, speed.recipe_step, speed.lipconvnet_step),
    *(speed.block_evaluation, speed.exponential),
    *(networks.network_bounds, square_wave.square_wave_fit, trained.wasserstein),
)
# Measurements of a trained network.
AFTER = _named(
    *(trained.accuracy, trained.attack, trained.attack_steps, trained.secant_slopes, trained.local_lipschitz),
    *(trained.jacobian_norms, trained.layer_gains, trained.layer_norms, trained.responses),
)
# Measurements that read the files in a run's folder: ``(folder, **options) -> figures by name``.
OF_FOLDER = _named(trained.learning_curve)
