"""Replaces one layer by a layer of a family with a weight close to the old one, or tells why none fits.

The last three functions treat geometry: which convolutions have a counterpart of the same shapes, with which kernel.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.conv.patches import polyphase
from lipkit.errors import NoRuleError, OptionError, rewording
from lipkit.layers import families
from lipkit.layers.aol import AolConv2d, AolLinear
from lipkit.layers.cayley import CayleyConv2d, CayleyLinear
from lipkit.layers.dense import BjorckLinear, OrthogonalLinear
from lipkit.layers.lot import LotConv2d
from lipkit.layers.rko import RkoConv2d
from lipkit.layers.sandwich import free_pair
from lipkit.layers.svcm import OssnConv2d, SvcmConv2d
from lipkit.linalg import bjorck, newton_schulz, polar
from lipkit.linalg.matrices import eye_like
from lipkit.modules.convolutions import borders
from lipkit.modules.guarding import guard

# Results of `start_near`, printed in the report.
NEAREST, DIRECTION, UNPROJECTED, OWN = "nearest", "rescaled", "not projected yet", "own start"
# These functions converge to the semi-orthogonal matrix nearest to their argument.
_POLAR = (polar, bjorck, newton_schulz)
# If I + Q has a smaller singular value, the Cayley transform is not inverted: float32 would lose the matrix.
_CAYLEY_GAP = 1e-3


@dataclass(frozen=True)
class Converted:
    """A replaced layer: its name, the old and the new type, and how the new one's parameters start."""

    name: str
    old: str
    new: str
    start: str
    note: str = ""


@dataclass(frozen=True)
class Kept:
    """A layer that was kept although it is not known to be 1-Lipschitz, and why."""

    name: str
    kind: str
    reason: str


class Converter:
    """Makes layers of one family in place of ordinary ones, and collects the rows of the report."""

    def __init__(self, family: families.Family, options: dict[str, Any]) -> None:
        self.family, self.options = family, options
        self.converted: list[Converted] = []
        self.kept: list[Kept] = []

    def note(self, name: str, old: nn.Module, new: str, start: str, note: str = "") -> None:
        self.converted.append(Converted(name, type(old).__name__, new, start, note))

    def keep(self, name: str, module: nn.Module, reason: str) -> nn.Module:
        self.kept.append(Kept(name, type(module).__name__, reason))
        return module

    def layer(self, name: str, module: nn.Module, sizes: set[tuple[int, int]]) -> nn.Module:
        """The family's layer for a linear layer or a convolution on images of ``sizes``; the old one if none fits."""
        if (reason := self._obstacle(module, sizes)) is not None:
            return self.keep(name, module, reason)
        new, weight, note = self._made(module), module.get_parameter("weight").detach(), ""
        if isinstance(module, nn.Conv2d):
            weight = unstrided_kernel(module)
            if module.kernel_size != (1, 1) and module.padding_mode != "circular":
                note = f"{module.padding_mode.removesuffix('s')} padding became circular"
        start = start_near(new, weight, next(iter(sizes)) if len(sizes) == 1 else None)
        bias, target = getattr(module, "bias", None), getattr(new, "bias", None)
        if isinstance(bias, Tensor) and isinstance(target, Tensor) and bias.shape == target.shape:
            target.data.copy_(bias)
        self.note(name, module, type(new).__name__, start, note)
        return new.train(module.training)

    def _obstacle(self, module: nn.Module, sizes: set[tuple[int, int]]) -> str | None:
        """The reason why no layer of the family replaces this convolution or linear layer, or None."""
        try:
            guard(module)
        except NoRuleError as error:
            return str(error)
        if not isinstance(module, nn.Conv2d):
            return None
        if (why := obstacle(module)) is not None:
            return why
        family, k, step = self.family, kernel_size(module), module.stride[0]
        for h, w in sorted(sizes):  # sorted: the same message each time
            if h % step or w % step:
                return f"the stride {step} does not divide its image of {h} x {w}"
            if not all(family.accepts(side, h // step, w // step) for side in k):
                return f"{family.name} accepts {family.sizes}, got a kernel of {k} for {h // step} x {w // step}"
        if not sizes and not all(family.accepts(side, side, side) for side in k):
            return f"{family.name} accepts {family.sizes}, got a kernel of {k}"
        return None

    def _made(self, module: nn.Module) -> nn.Module:
        weight, family = module.get_parameter("weight"), self.family
        # Half precision cannot hold a constraint: such a layer becomes float32.
        dtype = weight.dtype if weight.dtype in (torch.float32, torch.float64) else torch.float32
        common: dict[str, Any] = {"bias": module.bias is not None, "device": weight.device, "dtype": dtype}
        if isinstance(module, nn.Linear):
            return family.last(module.in_features, module.out_features, **common)
        assert isinstance(module, nn.Conv2d)
        sizes = (module.in_channels, module.out_channels, kernel_size(module), module.stride[0])
        bare = {"activation": None} if family.own_activation else {}  # the network keeps its own activations
        wrong = f"expected options of the family {family.name!r}, got {sorted(self.options)} ("
        with rewording(OptionError, wrong, TypeError, end=")"):
            return family.conv(*sizes, **{**common, **bare, **self.options})


def inverse_cayley(q: Tensor) -> Tensor | None:
    """A matrix whose Cayley transform (``lipkit.linalg.cayley``) is the semi-orthogonal ``q``, or None.

    For a tall q = [A^T; B^T] it is [(X - X^T) / 2; Y], with X and Y by `lipkit.layers.sandwich.free_pair`. None where
    I + A^T is singular or nearly so: no Cayley transform is close to q (if q has determinant -1, for instance).
    """
    m, n = q.shape
    if m < n:
        wide = inverse_cayley(q.mT)
        return None if wide is None else wide.mT
    if float(torch.linalg.svdvals(q[:n] + eye_like(q))[-1]) < _CAYLEY_GAP:
        return None
    x, y = free_pair(q[:n].mT, q[n:].mT)
    return torch.cat(((x - x.mT) / 2, y))  # the smallest X with this skew part


def start_near(layer: nn.Module, weight: Tensor, size: tuple[int, int] | None = None) -> str:
    """Set the free parameters of a constrained layer so that its weight is near that of an ordinary one.

    ``weight`` is ``(out, in)``, or the kernel ``(cout, s^2 cin, kh, kw)`` after downsampling by s; ``size`` is the size
    of the image before that. Returns what was done:

    =============================== ====================================================================================
    nearest                         LOT (at each frequency), RKO (as a matrix), Björck and polar dense layers (polar
                                    factor), Cayley dense layers and 1 x 1 convolutions whose polar factor is a Cayley
                                    transform; SVCM (by its projection on that image size)
    rescaled                        OSSN, AOL: the weight itself, divided by the bound
    not projected yet               SVCM of an unknown image size: the weight as it is
    own start                       every other: its feasible set is not parameterised by a kernel of this size
    =============================== ====================================================================================

    >>> layer = BjorckLinear(2, 2)
    >>> start_near(layer, torch.tensor([[0.0, -3.0], [2.0, 0.0]]))
    'nearest'
    >>> layer.weight().round(decimals=4).add(0.0).tolist()
    [[0.0, -1.0], [1.0, 0.0]]
    """
    weight = weight.detach()
    if not bool(torch.isfinite(weight).all()) or not bool(weight.any()):
        return OWN
    with torch.no_grad():
        if type(layer) in (CayleyLinear, CayleyConv2d):
            raw = inverse_cayley(polar(weight.double().flatten(1))) if weight.shape[2:].numel() == 1 else None
            if raw is None:
                return OWN
            # The transform reads scale * free / ||free||.
            layer.get_parameter("free").copy_(raw.reshape(weight.shape))
            layer.get_parameter("scale").copy_(torch.linalg.vector_norm(raw))
            return NEAREST
        if isinstance(layer, SvcmConv2d):
            layer.free.copy_(weight)
            if size is None:
                return UNPROJECTED
            layer.project_(size)
            return NEAREST
        exact = type(layer) is BjorckLinear or (
            type(layer) in (OrthogonalLinear, LotConv2d, RkoConv2d) and layer.orthogonalize in _POLAR
        )
        if not exact and type(layer) not in (OssnConv2d, AolConv2d, AolLinear):
            return OWN
        free = layer.get_parameter("free")
        if type(layer) in (BjorckLinear, RkoConv2d):
            # On badly conditioned matrices the iteration stops early, so start at its limit.
            free.copy_(polar(weight.double().flatten(1)).reshape(weight.shape))
        else:
            free.copy_(weight)  # the projection or bound of the layer does the rest
        return NEAREST if exact else DIRECTION


def obstacle(conv: nn.Conv2d) -> str | None:
    """The reason why no constrained convolution has the shapes of this one, or None.

    Constrained convolutions keep the image size, or divide it by an emulated stride s (the image must be a multiple
    of s): :math:`\\lfloor (H + 2p - k)/s \\rfloor + 1 = H/s` for all such H iff
    :math:`\\lfloor (2p - k)/s \\rfloor = -1` on both axes.

    >>> obstacle(nn.Conv2d(3, 8, 3, stride=2, padding=1)) is None
    True
    >>> obstacle(nn.Conv2d(3, 8, 3))
    'padding 0 with kernel_size 3 and stride 1 changes the image size, expected padding 1'
    """
    if conv.groups != 1:
        return f"groups={conv.groups}, expected 1"
    if conv.dilation != (1, 1):
        return f"dilation={conv.dilation}, expected (1, 1)"
    if len(set(conv.stride)) != 1:
        return f"stride={conv.stride}, expected the same on both axes"
    step = conv.stride[0]
    if isinstance(conv.padding, str):
        keeps = conv.padding == "same" or conv.kernel_size == (1, 1)
        return None if keeps else "padding='valid' changes the image size"
    for k, p in zip(conv.kernel_size, conv.padding, strict=True):
        if (2 * p - k) // step != -1:  # see the docstring
            fits = f"expected padding {max(0, (k - step + 1) // 2)}"
            return f"padding {p} with kernel_size {k} and stride {step} changes the image size, {fits}"
    return None


def kernel_size(conv: nn.Conv2d) -> tuple[int, int]:
    """Kernel size of the same convolution after downsampling by its stride; odd, so that the centre is a pixel.

    A tap at offset d from the pixel lies in the patch ``floor(d / s)``. Without a stride the kernel keeps its size.

    >>> kernel_size(nn.Conv2d(3, 8, 7, stride=2, padding=3)), kernel_size(nn.Conv2d(3, 8, 2, stride=2))
    ((5, 5), (1, 1))
    """
    step = conv.stride[0]
    rows, cols = (
        # patches before the centre (rounded up) and after it
        k if step == 1 else 2 * max(-(-p // step), (k - 1 - p) // step) + 1
        for k, (p, _) in zip(conv.kernel_size, borders(conv), strict=True)
    )
    return rows, cols


def unstrided_kernel(conv: nn.Conv2d) -> Tensor:
    """The kernel ``(cout, s^2 cin, kh, kw)`` that gives the same map after invertible downsampling.

    Equal to the convolution itself away from the border, and everywhere if its padding is circular.
    """
    step, weight = conv.stride[0], conv.weight.detach()
    if step == 1:
        return weight.clone()
    pads: list[int] = []
    for size, k, (p, _) in zip(kernel_size(conv), weight.shape[2:], borders(conv), strict=True):
        before = size // 2 * step - p  # zeros that move the centre tap to the start of the centre patch
        pads = [before, size * step - before - k, *pads]  # F.pad takes the last axis first
    return polyphase(F.pad(weight, pads), (step, step))
