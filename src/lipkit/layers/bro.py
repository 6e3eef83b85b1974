"""BRO and LiResNet: kernels near the identity, as block reflectors of low rank or divided by a bound of their norm."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.conv import Symbol, kernel_symbol
from lipkit.conv.circular import circular_pads
from lipkit.conv.spectrum import as_complex, at_frequencies
from lipkit.errors import OptionError
from lipkit.layers import base, definitions
from lipkit.layers.base import Family
from lipkit.layers.export import export_kernel_conv, register_one_lipschitz
from lipkit.layers.rko import CholeskyLinear
from lipkit.linalg import at_least_float32, block_reflector
from lipkit.linalg.cholesky import reflect
from lipkit.linalg.precision import product_dtype
from lipkit.modules import Shape, export_rule, lipschitz_rule


class NearIdentity(base.Constrained):
    r"""Base of BRO and LiResNet layers: a kernel ``E + g N /`` :math:`\sqrt{\mathrm{depth}}` with parameters N and g.

    E is 1 at the centre tap from channel i to channel i, 0 elsewhere: a residual connection inside the kernel.
    """

    def make_residual(self, shape: tuple[int, ...], depth: int, device: Any, dtype: Any) -> None:
        """Create N, noise of this shape and of variance 1 / (n kh kw), and g (n, 1, 1, 1) of ones, for the outputs."""
        base.check_positive(depth=depth)
        n, _, kh, kw = shape
        noise = torch.randn(shape, device=device, dtype=dtype) / math.sqrt(n * kh * kw)  # columns of norm about 1
        self.depth, self.free = depth, nn.Parameter(noise)
        self.scale = nn.Parameter(torch.ones(n, 1, 1, 1, device=device, dtype=dtype))

    def directions(self) -> Tensor:
        """The kernel (n, m, kh, kw), in float32 or better; a reflector takes it as V."""
        noise, scale = at_least_float32(self.free), at_least_float32(self.scale)
        identity = torch.eye(*noise.shape[:2], dtype=noise.dtype, device=noise.device)[:, :, None, None]
        return F.pad(identity, circular_pads(*noise.shape[2:])) + scale * noise / self.depth**0.5


class Reflector(NearIdentity):
    """Base of `BroLinear` and `BroConv2d`: V is a kernel, with a single tap in the dense layer."""

    shown = ("rank",)

    def make_parameters(self, device: Any, dtype: Any, *, rank: int | None = None, depth: int = 1) -> None:
        n = max(self.shape[:2])
        self.rank = max(1, n // 2) if rank is None else rank
        base.check_positive(rank=self.rank)
        if self.rank > max(1, n - 1):  # n columns give -I, whatever their numbers are
            raise OptionError(f"rank: expected at most {max(1, n - 1)}, below the {n} rows of V, got {rank}")
        self.make_residual((n, self.rank, *(self.shape[2:] or (1, 1))), depth, device, dtype)


class BroLinear(Reflector, base.ConstrainedLinear):
    r"""Dense layer by one block reflector: ``y = W x + b``, :math:`W = I - 2V(V^\top V)^{-1}V^\top`, cut to size.

    Args:
        in_features, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedLinear`.
        rank: m, columns of V, below n = max(in, out); n / 2 by default.
        depth: of the network; the noise of V starts :math:`\sqrt{\mathrm{depth}}` times smaller.

    Parameters ``free`` N (n, m), ``scale`` g (n, 1) and ``bias``; :math:`V = E + g N / \sqrt{\mathrm{depth}}`.

    Guarantee:
        1-Lipschitz; all singular values 1 up to rounding where V is well conditioned (`lipkit.linalg.block_reflector`).
        Source: Lai et al., ICML 2025, section 4.

    >>> x = torch.ones(1, 3)
    >>> bool(torch.isclose(BroLinear(3, 5, bias=False)(x).norm(), x.norm()))
    True
    """

    def weight(self) -> Tensor:
        return block_reflector(self.directions().flatten(1), *self.shape)


class BroConv2d(Reflector, base.SymbolConv2d):
    r"""Orthogonal circular convolution: a block reflector of low rank at each frequency, cut to size.

    .. math:: \hat y(f) = \big[I - 2\hat V (\hat V^*\hat V)^{-1}\hat V^*\big]_{:c_{out},\,:s^2 c_{in}}\, \hat x(f) + b

    Exact, without iteration or series. Reflectors are Hermitian: half the dimensions and parameters of unitary ones.

    Args:
        in_channels, out_channels, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedConv2d`.
        rank, depth: as in :class:`BroLinear`, with n = max(s^2 in_channels, out_channels).

    Parameters ``free`` N (n, m, kh, kw), ``scale`` g (n, 1, 1, 1) and ``bias``; V = E + g N / sqrt(depth), where E is
    the identity on the first m channels: V starts well conditioned at every frequency.

    Guarantee:
        As :class:`BroLinear`.

    Cost:
        One Cholesky factorisation of size m and two products at each of about H W / (2 s^2) frequencies.

    >>> x = torch.ones(1, 3, 7, 5)
    >>> bool(torch.isclose(BroConv2d(3, 8, 3, bias=False)(x).norm(), x.norm()))
    True

    References:
        Lai et al., "Enhancing Certified Robustness via Block Reflector Orthogonal Layers and Logit Annealing Loss",
        ICML 2025, section 4 (there on images padded with zeros by one pixel and cropped again).
    """

    def symbol(self, height: int, width: int) -> Symbol:
        raw, sizes = kernel_symbol(self.directions(), height, width), self.shape[:2]
        return raw.map(lambda directions: block_reflector(directions, *sizes))

    @base.half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        self.check_input(x)
        n, v = max(self.inner_channels, self.out_channels), self.directions()
        # Reflecting few images gains 1.4 for 32 of 128 channels (AMD EPYC), 1.2 for 64, and nothing for 128.
        if self.pointwise or 2 * len(x) > n or product_dtype(x, v.dtype) != v.dtype:
            return super().forward(x)
        x = self.resample(x).to(v.dtype)
        raw, reflected = kernel_symbol(v, *x.shape[-2:]), partial(reflect, size=self.out_channels)
        return self.add_bias(at_frequencies(reflected, x, [raw.real], [as_complex(raw.pair)]))


register_one_lipschitz(BroLinear, BroConv2d)


class LiResConv2d(NearIdentity, base.KernelConv2d):
    r"""Convolution by :math:`(E + g N / \sqrt{\mathrm{depth}}) / \beta`, :math:`\beta` a bound of the numerator's norm.

    E is the identity on the first channels, so one kernel holds a residual connection and a linear layer. [LiResNet]
    uses the numerator as its kernel and puts estimates of the norms into the loss. Dividing by :math:`\beta` gives the
    same network up to the size of its biases.

    Args:
        in_channels, out_channels, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedConv2d`.
        padding_mode: 'circular', or 'zeros' (odd kernels).
        depth: of the network, at least 1.

    Parameters ``free`` N (out_channels, s^2 in_channels, kh, kw), ``scale`` g (out_channels, 1, 1, 1) and ``bias``.

    Guarantee:
        1-Lipschitz on every image size: :math:`\beta` is proved, within 2 % of the supremum over all frequencies. One
        exception: training mode divides kernels of up to 3 x 3 taps with 64 channels and more by
        :func:`lipkit.bounds.symbol_sup_estimate`. This equals the proved bound, bit for bit, unless its search misses
        the supremum by more than 2 %; then the layer has a larger constant in this step, which ``lipschitz`` proves.
        Evaluation and exports always use the proof.

    Cost:
        One :func:`lipkit.bounds.symbol_sup` per forward pass: a few hundred Cholesky factorisations of the smaller
        channel number. A training step without proof takes a search instead.

    >>> LiResConv2d(3, 8, 3)(torch.ones(1, 3, 7, 5)).shape
    torch.Size([1, 8, 7, 5])

    References:
        [LiResNet] Hu, Zou, Wang, Leino & Fredrikson, "Unlocking Deterministic Robustness Certification on ImageNet",
        NeurIPS 2023, section 3; Leino, Wang & Fredrikson, ICML 2021 (the norms in the loss).
    """

    padding_modes = ("circular", "zeros")
    shown = ("padding_mode",)

    def make_parameters(self, device: Any, dtype: Any, *, depth: int = 1) -> None:
        self.make_residual(self.shape, depth, device, dtype)

    def kernel(self, proved: bool = True) -> Tensor:
        """The kernel divided by :math:`\\beta`; ``proved=False``: by the norm of a training step. Zero stays zero."""
        kernel = self.directions()
        bound = (base.proved_norm if proved else base.training_norm)(kernel)
        return kernel / torch.where(bound > 0, bound, torch.ones_like(bound)).to(kernel.dtype)

    def kernel_in_use(self) -> Tensor:
        return self.kernel(not self.training)


@lipschitz_rule(LiResConv2d)
@torch.no_grad()
def _lires(layer: LiResConv2d, input_shape: Shape | None) -> float:
    if base.always_proved(layer.free) or not layer.training:
        return 1.0
    kernel = layer.directions()
    proved, used = float(base.proved_norm(kernel)), float(base.training_norm(kernel)) or 1.0  # 0 is not divided by
    return 1.0 if proved <= used else proved / used * (1 + 1e-15)  # covers two float64 roundings


export_rule(LiResConv2d)(export_kernel_conv)

BRO = Family(
    name="bro",
    title="Block reflector of low rank at each frequency",
    paper="Lai et al., ICML 2025",
    equation="section 4",
    definition=definitions.bro,
    conv=BroConv2d,
    linear=BroLinear,
    options={"rank": (1, 2), "depth": (1, 4)},
)
LIRESNET = Family(
    name="liresnet",
    title="Identity plus a free kernel, divided by a proved bound of their norm",
    paper="Hu et al., NeurIPS 2023",
    equation="section 3",
    definition=definitions.liresnet,
    conv=LiResConv2d,
    linear=CholeskyLinear,
    claim="contraction",
    attained=0.5,
    smooth=False,
    options={"depth": (1, 4)},
)
