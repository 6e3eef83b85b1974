r"""LipSDP for whole networks: prove, or find, a gain by the block-tridiagonal LMI.

Works on exported networks that are a run Linear, activation, Linear, ..., Linear with activations of slope in [0, 1],
with any 1-Lipschitz or scaling modules before and after it (Flatten, input and output scaling).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lipkit.bounds.lmi import proves_gain
from lipkit.bounds.lmi_solver import minimise_gain
from lipkit.errors import NoRuleError, OptionError
from lipkit.lowering import lipschitz
from lipkit.modules import Network
from lipkit.modules.activations import slope_restricted
from lipkit.modules.chains import SlopeRun, slope_runs


@dataclass(frozen=True)
class GainProof:
    """A gain that was proved.

    Attributes:
        gain: upper bound of the l2 gain of the whole network, proved in floating point.
        product: the product of the layers' norms, for comparison.
        multipliers: by index of the activation in the network: the diagonals that prove it.
        steps: Newton steps taken to find them.
    """

    gain: float
    product: float
    multipliers: dict[int, Tensor]
    steps: int


def _single_run(network: Network) -> SlopeRun:
    """The one run of linear layers in the network, multipliers aside."""
    if type(network) is not Network:
        raise OptionError(f"expected the result of lipkit.export, got {type(network).__qualname__}")
    probe = {
        i: torch.ones(network[i - 1].out_features)
        for i in range(1, len(network))
        if slope_restricted(network[i]) and type(network[i - 1]) is nn.Linear
    }
    runs = slope_runs(Network(list(network), network.input_shape, probe))
    if len(runs) != 1:
        kinds = [type(m).__name__ for m in network]
        raise NoRuleError(
            f"expected one run Linear, activation with slope in [0, 1], Linear, ..., got {len(runs)} in {kinds}"
        )
    return runs[0]


def _rest(network: Network, run: SlopeRun) -> float:
    """Constant of everything outside the run, rounded up."""
    shape: tuple[int, ...] | None = network.input_shape
    before = float(lipschitz(nn.Sequential(*list(network)[: run.start]), shape))
    after = float(lipschitz(nn.Sequential(*list(network)[run.stop :])))
    return _times_up(before, after)


def _times_up(a: float, b: float) -> float:
    """The product of two bounds, rounded up; infinite where one is zero and the other infinite."""
    return math.inf if math.isnan(a * b) else math.nextafter(a * b, math.inf)


def verify(network: Network, gamma: float, multipliers: Mapping[int, Tensor] | Sequence[Tensor]) -> bool:
    """True if these multipliers prove, in floating point, that the whole network has gain at most ``gamma``.

    Args:
        network: result of ``lipkit.export``.
        gamma: the gain to prove.
        multipliers: positive diagonals ``(n_{k+1},)``, in the order of the activations or by their index.

    Returns:
        True is a proof for the stored weights in exact arithmetic; False says nothing.

    Raises:
        NoRuleError: the network is not one run of linear layers and slope-restricted activations.
        ShapeError, OptionError: multipliers that do not fit or are not positive.

    >>> layers = [nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)]
    >>> for layer in layers[::2]: _ = nn.init.eye_(layer.weight)
    >>> net = Network(layers, (2,))
    >>> verify(net, 1.001, [torch.ones(2)]), verify(net, 0.999, [torch.ones(2)])
    (True, False)

    References:
        Fazlyab et al., NeurIPS 2019; [LBDN] section 2; the proof by Cholesky is Rump, BIT 2006.
    """
    run = _single_run(network)
    if isinstance(multipliers, Mapping):
        multipliers = [multipliers[i] for i in sorted(multipliers)]
    rest = _rest(network, run)
    if rest == 0:
        return gamma >= 0
    return proves_gain(run.weights, list(multipliers), math.nextafter(gamma / rest, 0.0))


def solve(network: Network, *, accuracy: float = 1e-5, max_steps: int = 300) -> GainProof:
    """The smallest gain that the LMI can prove for this network, nearly, with the multipliers that prove it.

    Args:
        network: result of ``lipkit.export``.
        accuracy: relative distance from the optimum of the semidefinite program.
        max_steps: most Newton steps.

    Returns:
        :class:`GainProof`; never a gain that :func:`verify` has not proved, and never above the product of norms.

    Cost:
        Grows with the cube of the total width: see ``docs/lipsdp.md`` for measured times.

    >>> net = Network([nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)], (3,))
    >>> proof = solve(net)
    >>> 0 < proof.gain <= proof.product
    True
    """
    run = _single_run(network)
    rest = _rest(network, run)
    found = minimise_gain(run.weights, accuracy=accuracy, max_steps=max_steps)
    multipliers = {run.start + 1 + 2 * k: m for k, m in enumerate(found.multipliers)}
    gain, product = (_times_up(v, rest) for v in (found.gain, found.product))
    return GainProof(gain, product, multipliers, found.steps)


def attach(network: Network, multipliers: Mapping[int, Tensor]) -> Network:
    """A copy of the network that carries these multipliers: ``lipschitz`` then uses what they prove.

    >>> net = Network([nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)], (3,))
    >>> proved = attach(net, solve(net).multipliers)
    >>> bool(lipschitz(proved) <= lipschitz(net))
    True
    """
    modules = list(Network([network], network.input_shape))
    attached = Network(modules, network.input_shape, multipliers)
    attached.input_range = network.input_range
    return attached
