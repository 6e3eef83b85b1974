"""Networks of prescribed gain: from sizes, for a data set, or from a trained plain network [LBDN]."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.bounds.lmi import gain_bound
from lipkit.errors import OptionError
from lipkit.layers.sandwich import SandwichLinear
from lipkit.models._lbdn import LBDN, Activations
from lipkit.models._parts import flat_size
from lipkit.models.frame import bounded
from lipkit.modules import Network, Shape
from lipkit.modules.activations import slope_restricted

__all__ = ["LBDN", "from_network", "lbdn"]


def lbdn(
    sizes: Sequence[int] | None = None,
    gamma: float = 1.0,
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
    """A network of prescribed gain: either from its ``sizes``, or for data from ``hidden``, shape and classes.

    Args:
        sizes: numbers of inputs, hidden units and outputs; the result is an :class:`LBDN`.
        gamma: the gain (behind the normalisation).
        activation: one with slope in [0, 1], or one for each hidden layer.
        hidden, input_shape, classes: instead of ``sizes``; inputs are flattened, and the result is a chain that ends
            in an :class:`LBDN`. ``classes`` is the number of outputs.
        learnable_gamma: whether gamma is trained.
        bias: whether the layers have biases.
        mean, std: input normalisation per channel, part of the network.
        device, dtype: of the parameters.

    Raises:
        OptionError: both or neither of ``sizes`` and the other three, or values that do not fit.

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
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise OptionError(f"sizes: expected no {', '.join(extra)} beside it, got sizes={sizes!r}")
        return LBDN(sizes, gamma, activation, **options)
    if hidden is None or input_shape is None or classes is None:
        raise OptionError(
            "expected sizes, or hidden, input_shape and classes, got "
            f"hidden={hidden!r}, input_shape={input_shape!r}, classes={classes!r}"
        )
    inputs = flat_size(input_shape)
    network = LBDN([inputs, *hidden, classes], gamma, activation, **options)
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
    r"""The LBDN that is the same function as a plain network whose LMI holds: to fine-tune it under the guarantee.

    .. math:: \Psi_k = \Lambda_k^{1/2},\quad B_k = \tfrac12 \Psi_k W_k \Psi_{k-1}^{-1} A_{k-1}^{-\top},\quad
              A_k = (I - B_k B_k^\top)^{1/2}

    Args:
        network: ``lipkit.modules.Network`` or ``nn.Sequential`` of ``nn.Linear`` and activations with slope in [0, 1]
            between them, perhaps with an ``nn.Flatten`` in front. It is left as it is.
        gamma: gain of the result; by default the smallest that the multipliers prove.
        multipliers: positive diagonals, in the order of the activations or by their index in the network; by default
            those that the network carries. ``certificates.lipsdp.solve`` finds them for any network.
        learnable_gamma: whether gamma is trained.
        dtype: of the parameters; by default that of the weights. They are computed in float64.

    Returns:
        :class:`LBDN`, behind an ``nn.Flatten`` if the network has one.

    Guarantee:
        The result is gamma-Lipschitz, as every LBDN. Its weights are those of ``network`` up to a relative 1e-6 (about
        1e-15 where H is positive definite), or an error is raised.

    Raises:
        OptionError: modules that are not as above, no multipliers, or an LMI that does not hold at ``gamma``.
        ShapeError: multipliers or weights that do not fit.

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
                layer.bias.copy_(torch.zeros_like(layer.bias) if linear.bias is None else linear.bias)
        allowed = max(1e-6, 16 * max(sizes) * torch.finfo(dtype).eps)
        for k, (made, given) in enumerate(zip(copy.deepcopy(result).double().weights(), weights, strict=True)):
            gap = float((made - given).norm() / given.norm().clamp_min(1e-300))
            if not gap <= allowed:
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
    # A copy: Network sets modes and gradients of what it is given.
    chain = Network([copy.deepcopy(network)], getattr(network, "input_shape", (1,)))
    modules = list(chain)
    start = 1 if modules and type(modules[0]) is nn.Flatten else 0
    linears, activations = modules[start::2], modules[start + 1 :: 2]
    fits = len(linears) == len(activations) + 1 and all(type(m) is nn.Linear for m in linears)
    if not fits or not all(slope_restricted(m) for m in activations):
        kinds = ", ".join(type(m).__name__ for m in modules)
        raise OptionError(f"expected Linear, activation with slope in [0, 1], Linear, ..., Linear, got {kinds}")
    given = chain.multipliers() if multipliers is None else multipliers
    ordered = [given[i] for i in sorted(given)] if isinstance(given, Mapping) else list(given)
    if len(ordered) != len(activations):
        raise OptionError(f"multipliers: expected one for each of {len(activations)} activations, got {len(ordered)}")
    return modules[0] if start else None, linears, activations, ordered  # type: ignore[return-value]


def _assign(result: LBDN, weights: list[Tensor], multipliers: list[Tensor], gamma: float) -> None:
    """The recursion of theorem 3.1. An infeasible LMI shows as B of norm above 1, which is cut to 1."""
    like = weights[0]
    before = like.new_full((like.shape[1],), math.sqrt(gamma / 2))
    inverse = torch.eye(like.shape[1], dtype=like.dtype, device=like.device)
    psis = [m.sqrt() for m in multipliers] + [like.new_full((weights[-1].shape[0],), math.sqrt(2 / gamma))]
    for layer, weight, psi in zip((*result.hidden, result.output), weights, psis, strict=True):
        b = (psi[:, None] * weight / before / 2) @ inverse
        values, vectors = torch.linalg.eigh(b @ b.mT)
        b = (vectors * values.clamp_min(1).rsqrt()) @ (vectors.mT @ b)
        roots = (1 - values).clamp_min(0).sqrt()
        layer.set_factors(vectors * roots @ vectors.mT, b)
        # Kept directions are inverted, however small; 1e-9 is below the root of the rounding error of I - B B^T.
        kept = roots > 1e-9
        inverse = (vectors[:, kept] / roots[kept]) @ vectors[:, kept].mT
        before = psi
        if isinstance(layer, SandwichLinear) and layer.log_psi is not None:
            with torch.no_grad():
                layer.log_psi.copy_(psi.log())
