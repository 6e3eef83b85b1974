r"""Constraints on the weights of your own layers, as parametrizations of ``torch.nn.utils.parametrize``.

Each function takes one linear layer or convolution of torch, or a network for all of them, and returns it. State dicts,
``remove_parametrizations``, ``parametrize.cached()``, AMP, ``copy.deepcopy`` and DDP behave as with torch's own
parametrizations; ``lipkit.lipschitz`` and ``lipkit.export`` take the result.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lipkit.bounds.power import start_vector
from lipkit.conv.circular import circular_pad
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.layers import NativeConv1d, NativeConv2d, NativeConvTranspose1d, NativeConvTranspose2d, families
from lipkit.layers.base import ConstrainedLinear, KernelConv2d, check_dtype
from lipkit.linalg.precision import autocast_off
from lipkit.models.constrained import OWN, start_near
from lipkit.modules import Shape
from lipkit.modules.convolutions import kernel_with_stride, windows_overlap
from lipkit.modules.registry import lipschitz

__all__ = ["FamilyWeight", "NormBound", "gaps", "norm_at_most", "orthogonal", "spectral_norm"]


def __dir__() -> list[str]:
    return sorted(__all__)


_CONVOLUTIONS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: NativeConv1d,
    nn.Conv2d: NativeConv2d,
    nn.ConvTranspose1d: NativeConvTranspose1d,
    nn.ConvTranspose2d: NativeConvTranspose2d,
}
# Families whose kernels have the whole geometry of torch: the constraint and the function of a native layer.
_NATIVE = {"aoc": ("aoc", "bjorck"), "bcop": ("aoc", "bjorck"), "cayley": ("aoc", "cayley")}
_NATIVE |= {"cayley_bcop": ("aoc", "cayley"), "rko": ("rko", "bjorck"), "crko": ("rko", "cayley")}
_NATIVE |= {"aol": ("aol", "bjorck")}
# Side of the image on which training estimates a norm that is proved for every size.
_SIDE = 16


def _kind(layer: nn.Module) -> type[nn.Module]:
    """The type of a layer, or the one that was parametrised."""
    return type(layer).__bases__[0] if parametrize.is_parametrized(layer) else type(layer)


def _layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The linear layers and convolutions in a module.

    Raises:
        OptionError: none, or another module that holds a matrix.
    """
    found = []
    for name, part in module.named_modules():
        if _kind(part) is nn.Linear or _kind(part) in _CONVOLUTIONS:
            found.append((name, part))
        elif ".parametrizations" not in f".{name}" and any(p.ndim > 1 for p in part.parameters(recurse=False)):
            raise OptionError(
                f"expected matrices in nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d and nn.ConvTranspose2d "
                f"only, got {type(part).__name__}{f' at {name!r}' if name else ''}"
            )
    if not found:
        raise OptionError(f"expected a linear layer, a convolution, or a network of them, got {type(module).__name__}")
    return found


def _bare(layer: nn.Module) -> Any:
    """The geometry of a layer: a copy of its type without numbers."""
    bare = _kind(layer).__new__(_kind(layer))
    nn.Module.__init__(bare)
    plain = vars(nn.Module())
    vars(bare).update({key: value for key, value in vars(layer).items() if key not in plain})
    bare.training = False
    bare._parameters.update(weight=None, bias=None)
    return bare


def _with_weight(bare: Any, weight: Tensor) -> Any:
    """The layer of this geometry, without bias."""
    layer = copy.copy(bare)
    layer._parameters = {"weight": weight, "bias": None}
    return layer


def _register(module: Any, make: Callable[[nn.Module], nn.Module]) -> Any:
    """A parametrization on the weight of each layer; none at all if one of them is refused."""
    made = []
    for name, layer in _layers(module):
        weight: Tensor = layer.weight  # type: ignore[assignment]
        try:
            check_dtype(weight.dtype)
            if weight.ndim > 2:
                lipschitz(_with_weight(_bare(layer), torch.zeros(weight.shape)))  # refuses geometries
            made.append((layer, make(layer)))
        except (NoRuleError, OptionError) as error:
            raise type(error)(f"at {name!r}: {error}" if name else str(error)) from None
    for layer, parametrization in made:
        parametrize.register_parametrization(layer, "weight", parametrization)
    return module


class NormBound(nn.Module):
    r"""The parametrization of :func:`spectral_norm` and :func:`norm_at_most`: a weight divided by its layer's norm.

    .. math:: W \mapsto \gamma W / \|W\| \quad\text{or}\quad W \min(1, \gamma / \|W\|)

    In training :math:`\|W\|` is estimated from below, by steps of the power method on the layer's own operator (that of
    the circular convolution around a zero-padded one) that go on from the last forward pass; in evaluation it is the
    proved bound of ``lipkit.lipschitz``, enlarged by what the rounding of the weight can add.

    Args:
        layer: whose geometry counts.
        gamma: positive.
        always: whether smaller norms are raised to gamma.
        input_shape: of one sample; None: every size.
        steps: of the power method for each forward pass in training.

    Buffer ``v`` (1, channels, height, width): the image of the power method.

    >>> layer = nn.Linear(2, 2)
    >>> bound = NormBound(layer, 3.0).eval()
    >>> bound(2 * torch.eye(2)).tolist(), bound(6 * torch.eye(2)).round(decimals=4).tolist()
    ([[2.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 3.0]])

    References:
        Miyato et al., ICLR 2018 (warm-started steps, there on the reshaped kernel).
    """

    v: Tensor

    def __init__(
        self,
        layer: nn.Module,
        gamma: float,
        always: bool = False,
        input_shape: Shape | None = None,
        steps: int = 1,
    ) -> None:
        super().__init__()
        if not (math.isfinite(gamma) and gamma > 0):
            raise OptionError(f"gamma: expected a positive finite number, got {gamma}")
        if steps < 1:
            raise OptionError(f"steps: expected at least 1, got {steps}")
        self.gamma, self.always, self.steps, self.bare = float(gamma), always, steps, (_bare(layer),)
        weight: Tensor = layer.weight.detach()  # type: ignore[assignment,operator]
        self.input_shape = None if input_shape is None else tuple(input_shape)
        if self.input_shape is not None and len(self.input_shape) != max(weight.ndim - 1, 1):
            raise ShapeError(f"input_shape: expected {max(weight.ndim - 1, 1)} numbers, got {self.input_shape}")
        kernel, taps = self._kernel(weight), weight.shape[2:]
        sides = [1 if k == 1 else max(_SIDE, k) for k in kernel.shape[2:]]
        bare = self.bare[0]
        if self.input_shape is not None and getattr(bare, "padding_mode", "") == "circular":
            exact = zip(self.input_shape[1:], taps, bare.stride, bare.dilation, strict=True)
            if all(n >= k and n % s == 0 and d == 1 for n, k, s, d in exact):
                own = [n // s for n, s in zip(self.input_shape[1:], bare.stride, strict=True)]
                sides = [1] * (2 - len(own)) + own
            else:
                self.input_shape = None  # the bound of every size
        self.groups = getattr(bare, "groups", 1)
        channels = kernel.shape[1] * self.groups
        start = start_vector(channels * math.prod(sides), weight).reshape(1, channels, *sides)
        self.register_buffer("v", start)
        with torch.no_grad():
            self._power(kernel, 15)

    def _kernel(self, weight: Tensor) -> Tensor:
        """A kernel of stride 1 whose circular convolution has the norm of the layer."""
        if weight.ndim == 2:
            return weight[:, :, None, None]
        return kernel_with_stride(_with_weight(self.bare[0], weight))

    def _power(self, kernel: Tensor, steps: int) -> Tensor:
        """The image of the power method under the operator, after some steps, and its unit vector."""
        kh, kw = kernel.shape[2:]
        with torch.no_grad():
            fixed, v = kernel.detach(), self.v
            for _ in range(steps):
                u = _unit(F.conv2d(circular_pad(v, [0, kw - 1, 0, kh - 1]), fixed, groups=self.groups))
                back = circular_pad(u, [kw - 1, 0, kh - 1, 0])
                v = _unit(F.conv_transpose2d(back, fixed, padding=(kh - 1, kw - 1), groups=self.groups))
            if steps:
                self.v.copy_(v)
        return F.conv2d(circular_pad(v, [0, kw - 1, 0, kh - 1]), kernel, groups=self.groups)

    def estimate(self, weight: Tensor, steps: int = 0) -> Tensor:
        """The norm that training divides by: 0-d, differentiable, at most the true one; no bound."""
        with autocast_off(weight):
            return torch.linalg.vector_norm(self._power(self._kernel(weight), steps))

    def proved(self, weight: Tensor) -> Tensor:
        """The norm that evaluation divides by: 0-d float64, differentiable.

        Guarantee:
            Upper bound of the layer's norm, for ``input_shape`` or for inputs of every size.
        """
        return lipschitz(_with_weight(self.bare[0], weight), self.input_shape)

    def forward(self, weight: Tensor) -> Tensor:
        norm = self.estimate(weight, self.steps) if self.training else self.proved(weight)
        factor = self.gamma / torch.where(norm > 0, norm, 1)
        if not self.training:
            # Two roundings of half a unit move a tap by eps of its Frobenius norm, which is at most sqrt(rank) |W|.
            room = 1.01 * torch.finfo(weight.dtype).eps * math.prod(weight.shape[2:]) * math.sqrt(weight.shape[0])
            return weight if not self.always and norm <= self.gamma else weight * (factor / (1 + room))
        return weight * (factor if self.always else factor.clamp(max=1))

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight

    def extra_repr(self) -> str:
        size = "every size" if self.input_shape is None else f"inputs {self.input_shape}"
        return f"norm {'=' if self.always else '<='} {self.gamma:g}, proved for {size}"


def _unit(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x)
    return x / torch.where(norm > 0, norm, 1)


def spectral_norm(module: Any, *, input_shape: Shape | None = None, steps: int = 1) -> Any:
    r"""Divide the weight of a layer, or of each layer of a network, by the norm of the layer: it becomes 1.

    .. math:: W \mapsto W / \|W\|, \qquad \|W\| = \sup_x \|W * x\| / \|x\|

    with the layer's own stride, padding, dilation and groups. ``torch.nn.utils.parametrizations.spectral_norm`` takes
    the norm of the reshaped kernel instead, which leaves a convolution of norm up to the root of its taps.

    Args:
        module: ``nn.Linear``, ``nn.Conv1d``, ``nn.Conv2d``, their transposed ones, or a network whose matrices are all
            in such layers.
        input_shape: of one sample of a single layer with circular padding: the norm is then exact for images of this
            size, where otherwise it is one for images of every size. Stride and dilation as in ``lipkit.lipschitz``.
        steps: of the power method in each forward pass in training.

    Returns:
        ``module``, with a :class:`NormBound` on each weight.

    Guarantee:
        In evaluation and in exports the norm is at most 1, rounding of the weights included. In training it is an
        estimate: :func:`gaps` shows by how much.

    Cost:
        Three convolutions of one image, 16 x 16 or ``input_shape``, for each step of training. In evaluation a proof at
        each forward pass: export the network, or stay in ``torch.nn.utils.parametrize.cached()``.

    Raises:
        OptionError: no such layer, matrices elsewhere, a float format below float32. NoRuleError: a geometry without
            a bound. ShapeError: an ``input_shape`` of other dimensions.

    >>> layer = spectral_norm(nn.Conv2d(2, 3, 3, padding=1)).eval()
    >>> 0.98 < float(lipschitz(layer).detach()) < 1.02
    True

    References:
        Miyato et al., ICLR 2018; the bounds are those of :mod:`lipkit.bounds`.
    """
    return _register(module, lambda layer: NormBound(layer, 1.0, True, _own_shape(module, layer, input_shape), steps))


def norm_at_most(module: Any, gamma: float, *, input_shape: Shape | None = None, steps: int = 1) -> Any:
    r"""Keep the norm of a layer, or of each layer of a network, at or below gamma; smaller ones stay as they are.

    .. math:: W \mapsto W \min(1, \gamma / \|W\|)

    Args: as :func:`spectral_norm`, and ``gamma``: positive.

    Raises:
        OptionError: as :func:`spectral_norm`; gamma not positive and finite.

    >>> layer = norm_at_most(nn.Linear(3, 3), 5.0).eval()
    >>> float(lipschitz(layer).detach()) < 2
    True
    """
    return _register(
        module, lambda layer: NormBound(layer, gamma, False, _own_shape(module, layer, input_shape), steps)
    )


def _own_shape(module: nn.Module, layer: nn.Module, input_shape: Shape | None) -> Shape | None:
    if input_shape is not None and layer is not module:
        raise OptionError("input_shape: expected none for a network, whose layers see several: give one to each layer")
    return input_shape


def gaps(network: nn.Module) -> dict[str, tuple[float, float]]:
    """For each layer of :func:`spectral_norm` and :func:`norm_at_most` the norm that training would divide by, and the
    proved one: the second over the first is by how much the layer is steeper in training than it says.

    >>> (estimate, proved), = gaps(spectral_norm(nn.Linear(4, 4))).values()
    >>> estimate <= proved * (1 + 1e-6)
    True
    """
    found = {}
    for name, module in network.named_modules():
        lists: Any = module.parametrizations if parametrize.is_parametrized(module) else {}
        for original in lists.values():
            one = copy.deepcopy(original).eval()
            free = [one.original] if one.is_tensor else [getattr(one, f"original{i}") for i in range(one.ntensors)]
            with torch.no_grad():
                for part in one:
                    if isinstance(part, NormBound):
                        found[name] = float(part.estimate(*free)), float(part.proved(*free))
                    free = [part(*free)]
    return found


class _Maker(nn.Module):
    """Constrained layers whose matrices or kernels, one behind the other, are a weight of this shape."""

    def __init__(self, parts: list[nn.Module], shape: torch.Size) -> None:
        super().__init__()
        self.parts, self.shape = nn.ModuleList(parts), shape

    def forward(self) -> Tensor:
        parts: Any = self.parts
        made = [part.kernel() if isinstance(part, KernelConv2d) else part.weight() for part in parts]
        return (torch.stack(made) if len(made) > 1 else made[0]).reshape(self.shape)


class FamilyWeight(nn.Module):
    """The parametrization of :func:`orthogonal`: the matrix or kernel of a constrained layer of lipkit.

    Args:
        layer: whose geometry counts. family, options: of the constrained layer.

    >>> FamilyWeight(nn.Linear(3, 2), "cayley", {})
    FamilyWeight(family=cayley)
    """

    def __init__(self, layer: nn.Module, family: str, options: dict[str, Any]) -> None:
        super().__init__()
        weight: Tensor = layer.weight.detach()  # type: ignore[assignment,operator]
        self.family, self.options, self.started = family, options, False
        self.bare, self.shape = (_bare(layer),), weight.shape
        # A tuple, so that its parameters are no parameters of this module.
        self.maker = (self._made(weight).to("meta"),)

    def _made(self, like: Tensor) -> _Maker:
        bare, row = self.bare[0], families.get(self.family)
        named = {"bias": False, "device": like.device, "dtype": like.dtype, **self.options}
        groups, linear = getattr(bare, "groups", 1), isinstance(bare, nn.Linear)
        try:
            if linear or not windows_overlap(bare):
                sizes = math.prod(self.shape[1:]), self.shape[0] // groups
                parts = [
                    self._checked((row.affine or row.linear)(*sizes, **named), ConstrainedLinear) for _ in range(groups)
                ]
                return _Maker(parts, self.shape)
            if self.family in _NATIVE:
                names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode")
                geometry = {name: getattr(bare, name) for name in names} | {"groups": groups}
                constraint, function = _NATIVE[self.family]
                native = {"constraint": constraint, "orthogonalize": function, **named}
                return _Maker([_CONVOLUTIONS[type(bare)](**geometry, **native)], self.shape)
            if type(bare) is not nn.Conv2d or row.claim == "none":
                raise OptionError(self._expected())
            made = self._checked(row.conv(bare.in_channels, bare.out_channels, bare.kernel_size, **named), KernelConv2d)
            shape = made.kernel().shape  # type: ignore[operator]
            if shape != self.shape or {*bare.stride, *bare.dilation, groups} != {1}:
                raise OptionError(self._expected())
            return _Maker([made], self.shape)
        except TypeError as error:
            raise OptionError(f"expected options of the family {self.family!r}, got {self.options} ({error})") from None

    def _expected(self) -> str:
        return (
            f"family: expected one with a kernel of this layer's size, stride and groups ({', '.join(_NATIVE)}; of "
            f"layers of stride 1 also liresnet, cholesky), got {self.family!r}"
        )

    def _checked(self, made: nn.Module, kind: type[nn.Module]) -> nn.Module:
        if not isinstance(made, kind):
            raise OptionError(
                self._expected()
                if kind is KernelConv2d
                else f"family: expected one whose dense layer is a matrix, got {self.family!r}"
            )
        return made

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
        if self.started and OWN in near:
            raise OptionError(f"expected a family that starts near a given weight, got {self.family!r} on this layer")
        self.started = True
        return tuple(p.detach() for p in maker.parameters())

    def extra_repr(self) -> str:
        return f"family={self.family}"


def orthogonal(module: Any, family: str = "cayley", **options: Any) -> Any:
    r"""Make the weight of a layer, or of each layer of a network, by a family of lipkit: orthogonal or a contraction.

    Args:
        module: as of :func:`spectral_norm`.
        family: an acronym of ``lipkit list layers`` that yields a matrix or a kernel. Linear layers, and convolutions
            whose windows do not overlap, take its matrix. Other convolutions take its kernel: of aoc, bcop, cayley and
            cayley_bcop (block convolutions of projectors, made by Björck or Cayley), rko, crko and aol with any stride,
            dilation and groups, transposed or not; of other families with a kernel for a stride of 1 alone.
        options: of the family.

    Returns:
        ``module``, with a :class:`FamilyWeight` on each weight. It starts near the present weight where
        ``lipkit.convert`` does, and anew elsewhere: there a weight that is assigned later is refused. Its parameters
        are new: give them to the optimiser.

    Guarantee:
        1-Lipschitz with circular or zero padding; reflected and replicated pixels count more than once. Orthogonal
        where `lipkit.layers.NativeConv2d` is: a convolution with zero padding is a contraction.

    Raises:
        OptionError: a family without a matrix or a kernel for the layer. NoRuleError: a geometry without a bound.

    >>> layer = orthogonal(nn.Linear(3, 3))
    >>> torch.allclose(layer.weight @ layer.weight.T, torch.eye(3), atol=1e-6)
    True

    References:
        Those of the families.
    """
    return _register(module, functools.partial(FamilyWeight, family=family, options=options))
