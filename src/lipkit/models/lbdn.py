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
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.bounds.lmi import gain_bound, proves_gain
from lipkit.errors import OptionError, ShapeError, finite
from lipkit.layers.base import half_through_float32
from lipkit.layers.export import linear_module
from lipkit.layers.recurrent import UNFOLDED, Unfolded, margins, unproved
from lipkit.layers.sandwich import ContractionLinear, SandwichLinear
from lipkit.layers.structure import shown
from lipkit.linalg import at_least_float32
from lipkit.linalg.precision import autocast_off
from lipkit.lowering import lipschitz
from lipkit.models.frame import Positive, bounded, check_sizes, checked, python_integers
from lipkit.modules import Network, Shape, export_rule, lipschitz_rule
from lipkit.modules.activations import slope_restricted
from lipkit.modules.network import checked_shape
from lipkit.modules.registry import export_part
from lipkit.modules.storage import guard_parts

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
        sizes = python_integers(tuple(sizes))
        check_sizes(sizes=sizes)
        gamma = finite("gamma", gamma, positive=True)
        hidden = len(sizes) - 2
        one = isinstance(activation, str) or not isinstance(activation, Sequence)
        each: list[Any] = [activation] * hidden if one else list(activation)  # type: ignore[arg-type]
        if len(each) != hidden:
            raise OptionError(f"activation: expected one for each of {hidden} hidden layers, got {len(each)}")
        make: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.sizes, self.fixed_gamma = sizes, gamma
        pairs = zip(pairwise(sizes[:-1]), each, strict=True)
        self.hidden = nn.ModuleList(SandwichLinear(p, q, activation=a, **make) for (p, q), a in pairs)
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
            last = root * self.output.weight()  # the other root of gamma multiplies x
        h = root.to(x.dtype) * x
        for layer in self.hidden:
            h = layer(h)
        return F.linear(h, last, self.output.bias_as(last))

    def weights(self) -> list[Tensor]:
        """:math:`W_0 .. W_L` of the plain network, each ``(sizes[k + 1], sizes[k])``."""
        gamma, last = self.gamma(), self.output.weight()
        # W_k is lefts[k] times befores[k] = A_{k-1}^T Psi_{k-1}; befores[0], a multiple of I, is stored as a number.
        lefts, befores = list[Tensor](), [(gamma / 2).sqrt().to(last.dtype)]
        for layer in self._sandwiches():
            (at, b), psi = layer.factors(), layer.psi()
            lefts.append(2 * b / psi[:, None])  # 2 Psi_k^-1 B_k
            befores.append(at * psi)  # A_k^T Psi_k
        lefts.append(last * (2 * gamma).sqrt().to(last.dtype))  # 2 / Psi_L
        return [a * b if b.ndim == 0 else a @ b for a, b in zip(lefts, befores, strict=True)]

    def multipliers(self) -> list[Tensor]:
        """:math:`\\Lambda_k = \\Psi_k^2`, each ``(sizes[k + 1],)``."""
        return [layer.psi().square() for layer in self._sandwiches()]

    def _sandwiches(self) -> list[SandwichLinear]:
        return [layer for layer in self.hidden if isinstance(layer, SandwichLinear)]

    def extra_repr(self) -> str:
        return f"{list(self.sizes)}, gamma={shown(self.gamma())}, learnable_gamma={self.log_gamma is not None}"


@lipschitz_rule(LBDN)
def _lbdn(network: LBDN, input_shape: Shape | None) -> Tensor:
    for layer in (*network.hidden, network.output):
        lipschitz(layer)  # refuses hooks and replaced activations
    return network.gamma()


@export_rule(LBDN)
def _export(network: LBDN, input_shape: Shape) -> nn.Module:
    if input_shape[-1] != network.sizes[0]:
        raise ShapeError(f"expected input of shape (..., {network.sizes[0]}), got {input_shape}")
    gamma, double = float(lipschitz(network)), copy.deepcopy(network).double()  # float32 would round the factors, too
    multipliers = [m.to(network.output.y_free) for m in double.multipliers()]  # the proof needs the stored numbers
    weights = _provable(network, double.weights(), multipliers, gamma)
    modules: list[nn.Module] = []
    for layer, weight in zip((*network.hidden, network.output), weights, strict=True):
        modules.append(linear_module(weight, layer.bias))
        if isinstance(layer, SandwichLinear) and layer.activation is not None:
            modules.append(export_part(layer.activation, (1,)))
    return Network(modules, input_shape, {2 * k + 1: m for k, m in enumerate(multipliers)})  # activations


def _unfolded(network: LBDN) -> Unfolded | None:
    """An LBDN as plain dense layers, for `lipkit.layers.R2dn`; None if its activations differ."""
    kinds, weights = [layer.activation for layer in network._sandwiches()], network.weights()
    if len(set(map(repr, kinds))) != 1 or kinds[0] is None:  # repr shows the settings of an activation, too
        return None
    layers = (*network.hidden, network.output)
    biases = [w.new_zeros(len(w)) if m.bias is None else m.bias.to(w) for m, w in zip(layers, weights, strict=True)]
    return Unfolded(weights, biases, kinds[0], network.multipliers())


UNFOLDED[LBDN] = _unfolded


def _provable(network: LBDN, weights: Sequence[Tensor], multipliers: Sequence[Tensor], gamma: float) -> list[Tensor]:
    r"""The weights, rounded to the network's dtype and reduced just enough for their LMI to be proved at ``gamma``.

    The LMI of :math:`(1 - \delta) W` is :math:`(1 - \delta) H + \delta\, \mathrm{diag}(H)`: positive definite by a
    margin of :math:`\delta` where H is only semidefinite.
    """
    dtype = network.output.y_free.dtype
    for delta in margins(dtype):
        stored = [((1 - delta) * w).to(dtype) for w in weights]
        # Leave room for the few roundings that `lipschitz` adds when it multiplies by the modules around the run. If a
        # weight is 0, it takes the product of norms instead, because no eigenvalue proposes a gain.
        room = any(not bool(w.any()) for w in stored) or gain_bound(stored, multipliers) <= gamma * (1 - 1e-14)
        if room and proves_gain(stored, multipliers, gamma):
            return stored
    raise unproved(network, float(network.gamma()))


@checked
def lbdn(
    sizes: Sequence[int] | None = None,
    gamma: Positive = 1.0,
    activation: Activations = "relu",
    *,
    hidden: Sequence[int] | None = None,
    input_shape: Shape | None = None,
    classes: int | None = None,
    learnable_gamma: bool = False,
    bias: bool = True,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    device: Any = None,
    dtype: Any = None,
) -> nn.Module:
    """A network of prescribed gain, from its ``sizes``, or from ``hidden``, ``input_shape`` and ``classes``.

    Args:
        sizes, gamma, activation, learnable_gamma, bias, device, dtype: as in :class:`LBDN`, which is the result.
        hidden, input_shape, classes: instead of ``sizes``, for flattened inputs and a chain that ends in an `LBDN`.
        mean, std: input normalisation per channel, part of the network; the gain is that of the rest.

    >>> type(lbdn([12, 64, 64, 4], gamma=2)).__name__
    'LBDN'
    >>> lbdn(hidden=[19, 12], input_shape=(1, 28, 28), classes=10)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])

    References:
        [LBDN] equations 8 and 9; the MNIST network of Table 4 is ``hidden=[190, 190, 128]``.
    """
    options: dict[str, Any] = {"learnable_gamma": learnable_gamma, "bias": bias, "device": device, "dtype": dtype}
    if sizes is not None:
        given = {"hidden": hidden, "input_shape": input_shape, "classes": classes, "mean": mean, "std": std}
        if extra := [name for name, value in given.items() if value is not None]:
            raise OptionError(f"sizes: expected no {', '.join(extra)} beside it, got sizes={sizes!r}")
        return LBDN(sizes, gamma, activation, **options)
    if hidden is None or input_shape is None or classes is None:
        raise OptionError(
            "expected sizes, or hidden, input_shape and classes, got "
            f"hidden={hidden!r}, input_shape={input_shape!r}, classes={classes!r}"
        )
    network = LBDN([math.prod(checked_shape(input_shape)), *hidden, classes], gamma, activation, **options)
    layers = [network] if len(input_shape) == 1 else [nn.Flatten(), network]
    chain = bounded(layers, 1.0, mean, std, input_shape[0])
    return chain.to(device=device, dtype=dtype) if device is not None or dtype is not None else chain


def from_network(
    network: nn.Module,
    gamma: float | None = None,
    multipliers: Mapping[int, Tensor] | Sequence[Tensor] | None = None,
    *,
    learnable_gamma: bool = False,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    r"""The LBDN that computes the same function as a plain network whose LMI holds, to fine-tune with the guarantee.

    .. math:: \Psi_k = \Lambda_k^{1/2},\quad B_k = \tfrac12 \Psi_k W_k \Psi_{k-1}^{-1} A_{k-1}^{-\top},\quad
              A_k = (I - B_k B_k^\top)^{1/2}

    Args:
        network: ``lipkit.modules.Network`` or ``nn.Sequential`` of ``nn.Linear`` and activations with slope in [0, 1]
            between them, perhaps with an ``nn.Flatten`` in front. It is not changed.
        gamma: gain of the result; by default the smallest that the multipliers prove.
        multipliers: positive diagonals, in the order of the activations or by their index in the network; by default
            those that the network carries. ``certificates.lipsdp.solve`` finds them for any network.
        learnable_gamma: whether gamma is trained.
        dtype: of the parameters; by default that of the weights. They are computed in float64.

    Guarantee:
        The result, an :class:`LBDN` (after an ``nn.Flatten`` if the network has one), is gamma-Lipschitz. Its weights
        are those of ``network`` up to a relative 1e-6 (1e-15 where the LMI is strict), or an error is raised.

    Raises:
        OptionError: modules that are not as above, no multipliers, or an LMI that does not hold at ``gamma``.

    >>> layers = [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)]
    >>> for layer in layers[::2]: _ = nn.init.orthogonal_(layer.weight)
    >>> net = from_network(nn.Sequential(*layers), gamma=1.01, multipliers=[torch.ones(5)])
    >>> x = torch.randn(4, 3)
    >>> bool(torch.allclose(net(x), nn.Sequential(*layers)(x), atol=1e-5))
    True

    References:
        [LBDN] theorem 3.1 and proposition 3.3; Appendix D.3, equation 32, with the symmetric root for A.
    """
    flatten, linears, activations, carried = _taken_apart(network, multipliers)
    weights = [linear.weight.detach().double() for linear in linears]
    dtype = dtype or linears[0].weight.dtype
    # gain_bound checks shapes and signs of the multipliers.
    smallest = gain_bound(weights, carried)
    gamma = smallest if gamma is None else float(gamma)
    if not (math.isfinite(gamma) and gamma > 0):
        raise OptionError(f"gamma: expected a positive gain that the multipliers prove, got {gamma}")
    sizes = [weights[0].shape[1], *(w.shape[0] for w in weights)]
    bias = any(linear.bias is not None for linear in linears)
    result = LBDN(
        sizes, gamma, activations, learnable_gamma=learnable_gamma, bias=bias, device=weights[0].device, dtype=dtype
    )
    _assign(result, weights, [m.detach().double() for m in carried], gamma)
    with torch.no_grad():
        for layer, linear in zip((*result.hidden, result.output), linears, strict=True):
            if layer.bias is not None:
                layer.bias.copy_(layer.bias.new_zeros(()) if linear.bias is None else linear.bias)
        allowed = max(1e-6, 16 * max(sizes) * torch.finfo(dtype).eps)  # or the rounding of the dtype
        for k, (made, given) in enumerate(zip(copy.deepcopy(result).double().weights(), weights, strict=True)):
            gap = float((made - given).norm() / given.norm().clamp_min(1e-300))  # 1e-300: a layer may be all zeros
            if not gap <= allowed:  # True for NaN, too
                raise OptionError(
                    f"expected weights and multipliers whose LMI holds at gamma = {gamma} (they are proved for "
                    f"{smallest}), got layer {k} off by a relative {gap:.3g}"
                )
    return result if flatten is None else nn.Sequential(flatten, result)


def _taken_apart(
    network: nn.Module, multipliers: Mapping[int, Tensor] | Sequence[Tensor] | None
) -> tuple[nn.Module | None, list[nn.Linear], list[nn.Module], list[Tensor]]:
    """The parts of a chain, in order: a Flatten in front (or None), linear layers, activations, multipliers."""
    if type(network) not in (Network, nn.Sequential):
        raise OptionError(f"expected a lipkit.modules.Network or nn.Sequential, got {type(network).__qualname__}")
    guard_parts(network)
    # A copy, because Network changes the modes and requires_grad of its modules.
    chain = Network([copy.deepcopy(network)], getattr(network, "input_shape", (1,)))
    modules = list(chain)
    start = 1 if modules and type(modules[0]) is nn.Flatten else 0  # then Linear, activation, Linear, ...
    linears, activations = modules[start::2], modules[start + 1 :: 2]
    fits = len(linears) == len(activations) + 1 and all(type(m) is nn.Linear for m in linears)
    if not fits or not all(map(slope_restricted, activations)):
        kinds = ", ".join(type(m).__name__ for m in modules)
        raise OptionError(f"expected Linear, activation with slope in [0, 1], Linear, ..., Linear, got {kinds}")
    given = chain.multipliers() if multipliers is None else multipliers
    ordered = [given[i] for i in sorted(given)] if isinstance(given, Mapping) else list(given)
    if len(ordered) != (n := len(activations)):
        raise OptionError(f"multipliers: expected one for each of {n} activations (lipsdp.solve), got {len(ordered)}")
    return modules[0] if start else None, linears, activations, ordered  # type: ignore[return-value]


def _assign(result: LBDN, weights: list[Tensor], multipliers: list[Tensor], gamma: float) -> None:
    """Set A, B and Psi by the recursion of [LBDN] theorem 3.1. If the LMI fails, some B has norm > 1, cut to 1 here."""
    like = weights[0]
    before = like.new_full((like.shape[1],), math.sqrt(gamma / 2))  # Psi_-1, and A_-1 = I
    inverse = torch.eye(like.shape[1], dtype=like.dtype, device=like.device)
    psis = [m.sqrt() for m in multipliers] + [like.new_full((weights[-1].shape[0],), math.sqrt(2 / gamma))]
    for layer, weight, psi in zip((*result.hidden, result.output), weights, psis, strict=True):
        b = (psi[:, None] * weight / before / 2) @ inverse  # Psi_k W_k Psi_k-1^-1 A_k-1^-T / 2
        values, vectors = torch.linalg.eigh(b @ b.mT)  # squared singular values of B
        b = (vectors * values.clamp_min(1).rsqrt()) @ (vectors.mT @ b)  # singular values above 1 become 1
        roots = (1 - values).clamp_min(0).sqrt()  # eigenvalues of A, the symmetric root of I - B B^T
        layer.set_factors(vectors * roots @ vectors.mT, b)
        # Invert all directions above 1e-9, which is below the root of the rounding error of I - B B^T.
        kept = roots > 1e-9
        inverse = (vectors[:, kept] / roots[kept]) @ vectors[:, kept].mT
        before = psi
        if isinstance(layer, SandwichLinear) and layer.log_psi is not None:
            with torch.no_grad():
                layer.log_psi.copy_(psi.log())
