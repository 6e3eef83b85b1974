r"""LBDN: feed-forward networks with a prescribed gain, as tight as the semidefinite bound [LBDN].

.. math:: h_0 = \sqrt\gamma\, x,\qquad
          h_{k+1} = \sqrt2 A_k^\top \Psi_k\, \sigma\big(\sqrt2 \Psi_k^{-1} B_k h_k + b_k\big),\qquad
          y = \sqrt\gamma\, B_L h_L + b_L

is the plain network :math:`z_{k+1} = \sigma(W_k z_k + b_k)`, :math:`y = W_L z_L + b_L` with

.. math:: W_k = 2 \Psi_k^{-1} B_k A_{k-1}^\top \Psi_{k-1},\qquad
          A_{-1} = I,\ \Psi_{-1} = \sqrt{\gamma/2}\, I,\ \Psi_L = \sqrt{2/\gamma}\, I,

and its LMI (``lipkit.bounds.lmi``) holds with :math:`\Lambda_k = \Psi_k^2`. Conversely every network whose LMI holds is
of this form.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.bounds.lmi import gain_bound, proves_gain
from lipkit.errors import OptionError, ShapeError
from lipkit.layers.base import half_through_float32
from lipkit.layers.export import linear_module
from lipkit.layers.recurrent import UNFOLDED, Unfolded
from lipkit.layers.sandwich import ContractionLinear, SandwichLinear, plain_activation
from lipkit.linalg import at_least_float32
from lipkit.linalg.precision import autocast_off
from lipkit.lowering import lipschitz
from lipkit.models._parts import check_sizes
from lipkit.modules import Network, Shape, export_rule, lipschitz_rule

Activations = str | nn.Module | Sequence[str | nn.Module]


class LBDN(nn.Module):
    r"""A feed-forward network whose gain is at most gamma for every value of its parameters.

    Args:
        sizes: numbers of inputs, of units in each hidden layer, and of outputs.
        gamma: the gain, positive and finite.
        activation: name or module of an activation with slope in [0, 1], or one for each hidden layer.
        learnable_gamma: whether gamma is trained (as its logarithm); ``lipschitz`` is then differentiable.
        bias: whether the layers have biases.
        device, dtype: of the parameters (float32 or float64).

    Shapes:
        ``(B, ..., sizes[0]) -> (B, ..., sizes[-1])``.

    Guarantee:
        gamma-Lipschitz. The export is a plain chain of ``nn.Linear`` and activations with the multipliers
        :math:`\Psi_k^2`; their LMI is proved in floating point for the stored weights at exactly this gamma. To make
        room for the rounding of the weights, they are multiplied by :math:`1 - \delta`, with the smallest
        :math:`\delta` of 1e-13, 2e-13, 5e-13, ... that suffices (about 1e-12 in float64 and 1e-7 in float32): the
        outputs change by about :math:`(L + 1) \delta`, relatively.

    Cost:
        One inverse of the layer's width for each layer and forward pass.

    Raises:
        OptionError: sizes, gamma or activations that are not as above.

    >>> from lipkit.lowering import export
    >>> net = LBDN([12, 16, 16, 4], gamma=2.0, dtype=torch.float64)
    >>> plain = export(net, (12,))
    >>> [type(m).__name__ for m in plain], bool(lipschitz(plain) <= 2.0)
    (['Linear', 'ReLU', 'Linear', 'ReLU', 'Linear'], True)

    References:
        [LBDN] Wang & Manchester, ICML 2023, equations 8 and 9, theorem 3.1. The multiplier is that of Appendix D.3
        (:math:`\Psi^2`; half of it, as printed in section 3, does not satisfy the LMI).
    """

    log_gamma: nn.Parameter | None

    def __init__(
        self,
        sizes: Sequence[int],
        gamma: float = 1.0,
        activation: Activations = "relu",
        *,
        learnable_gamma: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(sizes, Sequence) or len(sizes) < 2:
            raise OptionError(f"sizes: expected inputs, hidden layers and outputs, got {sizes!r}")
        sizes = tuple(sizes)
        check_sizes(sizes=sizes)
        gamma = float(gamma)
        if not (math.isfinite(gamma) and gamma > 0):
            raise OptionError(f"gamma: expected a positive finite number, got {gamma}")
        hidden = len(sizes) - 2
        each = [activation] * hidden if isinstance(activation, str | nn.Module) else list(activation)
        if len(each) != hidden:
            raise OptionError(f"activation: expected one for each of {hidden} hidden layers, got {len(each)}")
        make: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.sizes, self.fixed_gamma = sizes, gamma
        self.hidden = nn.ModuleList(
            SandwichLinear(p, q, activation=a, **make) for p, q, a in zip(sizes[:-2], sizes[1:-1], each, strict=True)
        )
        self.output = ContractionLinear(sizes[-2], sizes[-1], **make)
        log_gamma = nn.Parameter(torch.tensor(math.log(gamma), device=device, dtype=dtype)) if learnable_gamma else None
        self.register_parameter("log_gamma", log_gamma)

    def gamma(self) -> Tensor:
        """The gain as it is now, 0-d float64."""
        if self.log_gamma is None:
            return torch.tensor(self.fixed_gamma, dtype=torch.float64, device=self.output.y_free.device)
        return self.log_gamma.double().exp()

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        with autocast_off(x):
            root = self.gamma().sqrt().to(at_least_float32(self.output.y_free).dtype)
            last = root * self.output.weight()
        h = root.to(x.dtype) * x
        for layer in self.hidden:
            h = layer(h)
        return F.linear(h, last, None if self.output.bias is None else self.output.bias.to(last.dtype))

    def weights(self) -> list[Tensor]:
        """:math:`W_0 .. W_L` of the plain network, each ``(sizes[k + 1], sizes[k])``."""
        gamma = self.gamma()
        # A_{k-1}^T Psi_{k-1} of the layer before, which multiplies W_k from the right.
        before = (gamma / 2).sqrt().to(self.output.weight().dtype)
        found = []
        for layer in self._sandwiches():
            at, b = layer.factors()
            psi = layer.psi()
            left = 2 * b / psi[:, None]
            found.append(left * before if before.ndim == 0 else left @ before)
            before = at * psi
        left = self.output.weight() * (2 * gamma).sqrt().to(before.dtype)
        return [*found, left * before if before.ndim == 0 else left @ before]

    def multipliers(self) -> list[Tensor]:
        """:math:`\\Lambda_k = \\Psi_k^2`, each ``(sizes[k + 1],)``."""
        return [layer.psi().square() for layer in self._sandwiches()]

    def _sandwiches(self) -> list[SandwichLinear]:
        return [layer for layer in self.hidden if isinstance(layer, SandwichLinear)]

    def extra_repr(self) -> str:
        gamma = float(self.gamma().detach())
        return f"{list(self.sizes)}, gamma={gamma:.6g}, learnable_gamma={self.log_gamma is not None}"


@lipschitz_rule(LBDN)
def _lbdn(network: LBDN, input_shape: Shape | None) -> Tensor:
    for layer in (*network.hidden, network.output):
        lipschitz(layer)  # refuses hooks, and activations that were replaced by others
    return network.gamma()


@export_rule(LBDN)
def _export(network: LBDN, input_shape: Shape) -> nn.Module:
    if input_shape[-1] != network.sizes[0]:
        raise ShapeError(f"expected input of shape (..., {network.sizes[0]}), got {input_shape}")
    gamma, dtype = float(lipschitz(network)), network.output.y_free.dtype
    double = copy.deepcopy(network).double()
    multipliers = [m.to(dtype) for m in double.multipliers()]
    weights = _provable(double.weights(), multipliers, gamma, dtype)
    modules: list[nn.Module] = []
    for layer, weight in zip((*network.hidden, network.output), weights, strict=True):
        modules.append(linear_module(weight, layer.bias))
        if isinstance(layer, SandwichLinear) and layer.activation is not None:
            modules.append(plain_activation(layer.activation))
    return Network(modules, input_shape, {2 * k + 1: m for k, m in enumerate(multipliers)})


def _unfolded(network: LBDN) -> Unfolded | None:
    """Its plain network, for `lipkit.layers.R2dn`; None where activations differ."""
    kinds, weights = [layer.activation for layer in network._sandwiches()], network.weights()
    if len(set(map(repr, kinds))) != 1 or kinds[0] is None:
        return None
    layers = (*network.hidden, network.output)
    biases = [w.new_zeros(len(w)) if m.bias is None else m.bias.to(w) for m, w in zip(layers, weights, strict=True)]
    return Unfolded(weights, biases, kinds[0], network.multipliers())


UNFOLDED[LBDN] = _unfolded


def _provable(
    weights: Sequence[Tensor], multipliers: Sequence[Tensor], gamma: float, dtype: torch.dtype
) -> list[Tensor]:
    r"""The weights, rounded to ``dtype`` and reduced just enough for their LMI to be proved at ``gamma``.

    The LMI of :math:`(1 - \delta) W` is :math:`(1 - \delta) H + \delta\, \mathrm{diag}(H)`: positive definite by a
    margin of :math:`\delta` where H is only semidefinite.
    """
    steps = [m * 10.0**-k for k in range(13, 1, -1) for m in (1, 2, 5)]
    for delta in steps:
        # A smaller reduction than the rounding of the weights has no effect.
        if delta < torch.finfo(dtype).eps / 8:
            continue
        stored = [((1 - delta) * w).to(dtype) for w in weights]
        # Leave room for the few roundings that `lipschitz` adds when it multiplies by the modules around the run.
        if proves_gain(stored, multipliers, gamma) and gain_bound(stored, multipliers) <= gamma * (1 - 1e-14):
            return stored
    raise OptionError(
        f"expected finite parameters with a proof of gain {gamma}, got none even with weights reduced by {steps[-1]}"
    )
