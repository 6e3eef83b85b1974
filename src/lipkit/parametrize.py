r"""Constraints on the weights of your own layers, as parametrizations of ``torch.nn.utils.parametrize``.

Each function takes one linear layer or convolution of torch, or a network for all of them, and returns it. State dicts,
``remove_parametrizations``, ``parametrize.cached()``, AMP, ``copy.deepcopy`` and DDP behave as with torch's own
parametrizations; ``lipkit.lipschitz`` and ``lipkit.export`` take the result.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lipkit.bounds.power import maps, start_vector, unit
from lipkit.errors import NoRuleError, OptionError, ShapeError, finite, rewording
from lipkit.layers import NativeConv1d, NativeConv2d, NativeConvTranspose1d, NativeConvTranspose2d, families
from lipkit.layers.base import ConstrainedLinear, KernelConv2d, check_dtype
from lipkit.layers.geometry import GEOMETRY
from lipkit.linalg.precision import autocast_off
from lipkit.models.constrained import OWN, start_near
from lipkit.modules import Shape
from lipkit.modules.convolutions import kernel_with_stride, windows_overlap
from lipkit.modules.registry import lipschitz

__all__ = ["FamilyWeight", "NormBound", "gaps", "norm_at_most", "orthogonal", "spectral_norm"]

# Layers of torch -> the constrained convolution with the same geometry (None for linear layers).
_NATIVE: dict[type[nn.Module], Any] = {nn.Linear: None, nn.Conv1d: NativeConv1d, nn.Conv2d: NativeConv2d}
_NATIVE |= {nn.ConvTranspose1d: NativeConvTranspose1d, nn.ConvTranspose2d: NativeConvTranspose2d}
# Families that support every stride, dilation and group -> options of the layers above: constraint, orthogonalize.
_FAMILIES = {"aoc": ("aoc", "bjorck"), "bcop": ("aoc", "bjorck"), "cayley": ("aoc", "cayley")}
_FAMILIES |= {"cayley_bcop": ("aoc", "cayley"), "rko": ("rko", "bjorck"), "crko": ("rko", "cayley")}
_FAMILIES |= {"aol": ("aol", "bjorck")}
_SIDE = 16  # side of the image on which training estimates the norm

__dir__ = __all__.copy


def _kind(layer: nn.Module) -> type[nn.Module]:
    """The type of a layer, before it was parametrised."""
    # Torch makes a parametrised layer an instance of a subclass.
    return type(layer).__bases__[0] if parametrize.is_parametrized(layer) else type(layer)


def _with_weight(layer: nn.Module, weight: Tensor) -> Any:
    """A layer of the same geometry with this weight, without bias, hooks and parametrizations."""
    made = _kind(layer).__new__(_kind(layer))  # __init__ would make weights
    nn.Module.__init__(made)
    vars(made).update({key: value for key, value in vars(layer).items() if key not in vars(made)})
    vars(made)["_parameters"] = {"weight": weight, "bias": None}
    return made


def _register(module: Any, kind: type[Any], **options: Any) -> Any:
    """Put a parametrization on the weight of each layer; change nothing if one is refused."""
    found, made = [], []
    for name, part in module.named_modules():
        if _kind(part) in _NATIVE:
            found.append((name, part))
        elif ".parametrizations" not in f".{name}" and any(p.ndim > 1 for p in part.parameters(recurse=False)):
            kinds = ", ".join(f"nn.{one.__name__}" for one in _NATIVE)
            where = f" at {name!r}" if name else ""
            raise OptionError(f"expected matrices in {kinds} only, got {type(part).__name__}{where}")
    if not found:
        raise OptionError(f"expected a linear layer, a convolution, or a network of them, got {type(module).__name__}")
    if options.get("input_shape") is not None and found[0][1] is not module:
        raise OptionError("input_shape: expected none for a network, whose layers see several: give one to each layer")
    for name, layer in found:
        try:
            check_dtype(layer.weight.dtype)
            if not (isinstance(layer.weight, nn.Parameter) or parametrize.is_parametrized(layer, "weight")):
                ways = "nn.utils.remove_spectral_norm, remove_weight_norm or prune.remove"
                raise OptionError(f"expected a weight that is a parameter, got one made by a hook: use {ways} first")
            if kind is FamilyWeight and parametrize.is_parametrized(layer, "weight"):
                raise OptionError("expected a layer without a parametrization on its weight, got one that has it")
            if layer.weight.ndim > 2:
                lipschitz(_with_weight(layer, torch.zeros(layer.weight.shape)))  # refuses geometries without a bound
            made.append(kind(layer, **options))
        except (NoRuleError, OptionError) as error:
            raise type(error)(f"at {name!r}: {error}" if name else str(error)) from None
    for (_, layer), one in zip(found, made, strict=True):
        parametrize.register_parametrization(layer, "weight", one)
    return module


class NormBound(nn.Module):
    r"""The parametrization of :func:`spectral_norm` and :func:`norm_at_most`: a weight divided by its layer's norm.

    .. math:: W \mapsto \gamma W / \|W\| \quad\text{or}\quad W \min(1, \gamma / \|W\|)

    In training :math:`\|W\|` is estimated from below by the power method on the layer's operator (a zero-padded one is
    replaced by the circular one), one step each forward pass. In evaluation it is the proved bound of
    ``lipkit.lipschitz``, enlarged by the rounding of the weight.

    Buffer ``v`` (1, channels, height, width): the image of the power method.

    >>> bound = NormBound(nn.Linear(2, 2), 3.0).eval()
    >>> bound(2 * torch.eye(2)).tolist(), bound(6 * torch.eye(2)).round(decimals=4).tolist()
    ([[2.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 3.0]])
    """

    v: Tensor

    def __init__(self, layer: Any, gamma: float, always: bool = False, input_shape: Shape | None = None) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.gamma, self.always = finite("gamma", gamma, positive=True), always
        # Only its geometry; in a tuple, so that it is not registered as a submodule.
        self.bare, self.groups = (_with_weight(layer, weight.to("meta")),), getattr(layer, "groups", 1)
        if input_shape is not None and len(input_shape) != (numbers := max(weight.ndim - 1, 1)):
            raise ShapeError(f"input_shape: expected {numbers} numbers, got {input_shape}")
        kernel = self._kernel(weight)
        sides = [1 if k == 1 else max(_SIDE, k) for k in kernel.shape[2:]]
        if input_shape is not None and getattr(layer, "padding_mode", "") == "circular":
            axes = [*zip(input_shape[1:], weight.shape[2:], layer.stride, layer.dilation, strict=True)]
            if all(n >= k and n % s == 0 and d == 1 for n, k, s, d in axes):
                sides = [1] * (3 - len(input_shape)) + [n // s for n, _, s, _ in axes]
            else:
                input_shape = None  # take the bound for every size
        self.input_shape = input_shape
        channels = kernel.shape[1] * self.groups
        self.register_buffer("v", start_vector(channels * math.prod(sides), weight).reshape(1, channels, *sides))
        self.estimate(weight, 15)  # good enough to start from; later passes continue from v

    def _kernel(self, weight: Tensor) -> Tensor:
        """A kernel of stride 1 whose circular convolution has the norm of the layer."""
        return weight[..., None, None] if weight.ndim == 2 else kernel_with_stride(_with_weight(self.bare[0], weight))

    def estimate(self, weight: Tensor, steps: int = 0) -> Tensor:
        """The norm that training divides by: a differentiable 0-d lower bound, after ``steps`` of the power method."""
        with autocast_off(weight):
            kernel, v = self._kernel(weight), self.v.clone()
            with torch.no_grad():  # the gradient treats singular vectors as constants
                apply, adjoint = maps(kernel.detach(), self.groups)
                for _ in range(steps):
                    v = unit(adjoint(apply(v)))
                self.v.copy_(v)
            return torch.linalg.vector_norm(maps(kernel, self.groups)[0](v))

    def proved(self, weight: Tensor) -> Tensor:
        """The norm that evaluation divides by: a proved upper bound, 0-d float64, differentiable."""
        return lipschitz(_with_weight(self.bare[0], weight), self.input_shape)

    def forward(self, weight: Tensor) -> Tensor:
        norm = self.estimate(weight, 1) if self.training else self.proved(weight)
        factor = self.gamma / torch.where(norm > 0, norm, 1)  # zero stays zero
        factor = factor.clamp(max=torch.finfo(weight.dtype).max)  # for subnormal weights
        if self.training:
            return weight * (factor if self.always else factor.clamp(max=1))
        # Two roundings of half a unit move a tap by eps of its Frobenius norm, which is at most sqrt(rank) |W|.
        room = 1.01 * torch.finfo(weight.dtype).eps * math.prod(weight.shape[2:]) * math.sqrt(weight.shape[0])
        return weight if not self.always and norm <= self.gamma else weight * (factor / (1 + room))

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight

    def extra_repr(self) -> str:
        size = "every size" if self.input_shape is None else f"inputs {self.input_shape}"
        return f"norm {'=' if self.always else '<='} {self.gamma:g}, proved for {size}"


def spectral_norm(module: Any, *, input_shape: Shape | None = None) -> Any:
    r"""Divide the weight of a layer, or of each layer of a network, by the norm of the layer: it becomes 1.

    .. math:: W \mapsto W / \|W\|, \qquad \|W\| = \sup_x \|W * x\| / \|x\|

    with the layer's own stride, padding, dilation and groups. ``torch.nn.utils.parametrizations.spectral_norm`` divides
    by the norm of the reshaped kernel, which leaves a convolution with a norm of up to the root of its number of taps.

    Args:
        module: ``nn.Linear``, ``nn.Conv1d``, ``nn.Conv2d``, a transposed convolution, or a network with no other
            matrices. It is returned with a :class:`NormBound` on each weight.
        input_shape: of one sample, for a single layer with circular padding, whose norm is then exact.

    Guarantee:
        In evaluation and in exports the norm is at most 1, rounding of the weights included, for inputs of every size
        (or of ``input_shape``). In training it is an estimate: :func:`gaps` shows by how much.

    Cost:
        Three convolutions of one image for each step of training. In evaluation a proof at each forward pass: export
        the network, or stay in ``torch.nn.utils.parametrize.cached()``.

    Raises:
        OptionError: a layer of another type, other matrices in the network, a float format below float32.
        NoRuleError: a geometry without a bound. ShapeError: an ``input_shape`` of other dimensions.

    >>> layer = spectral_norm(nn.Conv2d(2, 3, 3, padding=1)).eval()
    >>> 0.98 < float(lipschitz(layer).detach()) < 1.02
    True

    References:
        Miyato et al., ICLR 2018 (warm-started steps, there on the reshaped kernel).
    """
    return _register(module, NormBound, gamma=1.0, always=True, input_shape=input_shape)


def norm_at_most(module: Any, gamma: float, *, input_shape: Shape | None = None) -> Any:
    r"""Like :func:`spectral_norm`, but keep norms at or below gamma, positive and finite, instead of making them 1.

    >>> layer = norm_at_most(nn.Linear(3, 3), 5.0).eval()
    >>> float(lipschitz(layer).detach()) < 2
    True
    """
    return _register(module, NormBound, gamma=gamma, input_shape=input_shape)


def gaps(network: nn.Module) -> dict[str, tuple[float, float]]:
    """For each layer whose first parametrization is a :class:`NormBound`: the norm estimated in training, and proved.

    >>> (estimate, proved), = gaps(spectral_norm(nn.Linear(4, 4))).values()
    >>> estimate <= proved * (1 + 1e-6)
    True
    """
    found = {}
    for name, module in network.named_modules():
        one: Any = module.parametrizations["weight"] if parametrize.is_parametrized(module, "weight") else [None]
        if isinstance(one[0], NormBound):
            with torch.no_grad():
                found[name] = float(one[0].estimate(one.original)), float(one[0].proved(one.original))
    return found


class _Maker(nn.Module):
    """Makes a weight of this shape from constrained layers, one for each group of channels or one for all."""

    def __init__(self, parts: list[nn.Module], shape: torch.Size) -> None:
        super().__init__()
        self.parts, self.shape = nn.ModuleList(parts), shape

    def forward(self) -> Tensor:
        parts: Any = self.parts
        made = [part.kernel() if isinstance(part, KernelConv2d) else part.weight() for part in parts]
        return torch.stack(made).reshape(self.shape)


class FamilyWeight(nn.Module):
    """The parametrization of :func:`orthogonal`: the matrix or kernel of a constrained layer of lipkit."""

    def __init__(self, layer: Any, family: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.family, self.options, self.started = family, options, False
        # In tuples, so that they are not registered as submodules.
        self.bare = (_with_weight(layer, layer.weight.detach().to("meta")),)
        self.maker = (self._made(layer.weight).to("meta"),)

    def _made(self, like: Tensor) -> _Maker:
        bare, row, groups = self.bare[0], families.get(self.family), getattr(self.bare[0], "groups", 1)
        named = {"bias": False, "device": like.device, "dtype": like.dtype, **self.options}
        wrong = f"expected options of the family {self.family!r}, got {self.options} ("
        with rewording(OptionError, wrong, TypeError, end=")"):
            if like.ndim == 2 or not windows_overlap(bare):
                sizes = math.prod(like.shape[1:]), len(like) // groups
                parts = [row.last(*sizes, **named) for _ in range(groups)]
                fits = all(isinstance(part, ConstrainedLinear) for part in parts)
            elif self.family in _FAMILIES:
                constraint, function = _FAMILIES[self.family]
                named = {"constraint": constraint, "orthogonalize": function, **named}
                make: Any = _NATIVE[type(bare)]
                parts, fits = [make(**{key: getattr(bare, key) for key in GEOMETRY}, **named)], True
            else:
                fits = type(bare) is nn.Conv2d and row.claim != "none" and {*bare.stride, *bare.dilation, groups} == {1}
                parts = [row.conv(bare.in_channels, bare.out_channels, bare.kernel_size, **named)] if fits else []
                fits = fits and isinstance(parts[0], KernelConv2d) and parts[0].kernel().shape == like.shape
        if not fits:
            raise OptionError(
                "family: expected one with a matrix, or for windows that overlap a kernel of this layer's size, stride "
                f"and groups ({', '.join(_FAMILIES)}; of stride 1 also liresnet, cholesky), got {self.family!r}"
            )
        return _Maker(parts, like.shape)

    def forward(self, *free: Tensor) -> Tensor:
        names = [name for name, _ in self.maker[0].named_parameters()]
        with autocast_off(free[0]):
            made: Tensor = torch.func.functional_call(self.maker[0], dict(zip(names, free, strict=True)), ())
        return made.to(free[0].dtype)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, ...]:
        maker = self._made(weight)
        dense = isinstance(maker.parts[0], ConstrainedLinear)
        given = weight.flatten(1).unflatten(0, (len(maker.parts), -1)) if dense else weight[None]
        near = [start_near(part, one) for part, one in zip(maker.parts, given, strict=True)]
        if self.started and OWN in near:  # the layer would ignore the assigned weight
            raise OptionError(f"expected a family that starts near a given weight, got {self.family!r} on this layer")
        self.started = True
        return tuple(p.detach() for p in maker.parameters())


def orthogonal(module: Any, family: str = "cayley", **options: Any) -> Any:
    r"""Constrain the weight of a layer, or of each layer of a network, by a family: orthogonal, or a contraction.

    Args:
        module: as in :func:`spectral_norm`.
        family, options: an acronym of ``lipkit list layers``, and options of its layer. Linear layers, and convolutions
            whose windows do not overlap, use its matrix; other convolutions use its kernel: aoc, bcop, cayley,
            cayley_bcop (block convolutions of projectors, made by Björck or Cayley), rko, crko and aol with any stride,
            dilation and groups, transposed or not; other families with a kernel for stride 1 only.

    Returns:
        ``module``, with a :class:`FamilyWeight` on each weight, which has new parameters. They start near the present
        weight if ``lipkit.convert`` can do so, else at the family's initial values; then assigning a weight is refused.

    Guarantee:
        1-Lipschitz with zero padding, and with circular padding of images that the stride divides. Other images, and
        reflected or replicated pixels, count some pixels more than once; ``lipkit.export`` bounds the layer for them.
        Orthogonal where `lipkit.layers.NativeConv2d` is: a convolution with zero padding is a contraction.

    Raises:
        OptionError: no matrix or kernel of the family, or a parametrised weight. NoRuleError: a geometry without bound.

    >>> layer = orthogonal(nn.Linear(3, 3))
    >>> torch.allclose(layer.weight @ layer.weight.T, torch.eye(3), atol=1e-6)
    True
    """
    return _register(module, FamilyWeight, family=family, options=options)
