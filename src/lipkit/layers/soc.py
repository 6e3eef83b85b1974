"""SOC: orthogonal convolutions as exponentials of skew-symmetric ones."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.conv import Symbol, downsample, exponential_conv2d, kernel_symbol
from lipkit.conv.exponential_conv import skew, taylor_features, taylor_norm, taylor_rows
from lipkit.layers import definitions
from lipkit.layers.base import ConstrainedConv2d, Family, half_through_float32
from lipkit.layers.cayley import CayleyLinear
from lipkit.layers.export import patch_module, resampled_size, stride_modules
from lipkit.linalg import at_least_float32
from lipkit.linalg.exponential import SMALLEST, check_terms, gram_norm, taylor, taylor_products
from lipkit.linalg.precision import autocast_off, flushes
from lipkit.linalg.transforms import plain_gradients, transformed
from lipkit.modules import FourierConv2d, Shape, export_rule, lipschitz_rule
from lipkit.modules.fourier import TaylorConv2d
from lipkit.proof.norms import quick_norm_estimate, quick_spectral_norm


def reshaped_norm(kernel: Tensor, proved: bool = True) -> Tensor:
    r"""Upper bound of the norm of a convolution with zero or circular padding, from two reshapings of its kernel.

    .. math:: \sqrt{k_h k_w}\; \min\big( \|K\|_{c \times c k_h k_w},\; \|K\|_{c k_h \times c k_w} \big)

    With the phases :math:`a = a_1 \otimes a_2` of all taps at w, rows and columns, the symbol is :math:`F(w) = K (I
    \otimes a)` with :math:`\|a\| = \sqrt{k_h k_w}` for the first, and :math:`(I \otimes a_1)^\top K (I \otimes a_2)`
    with :math:`\|a_1\| \|a_2\| = \sqrt{k_h k_w}` for the second. For skew kernels the other two of the "Fantastic Four"
    (Singla & Feizi, ICLR 2021, theorem 1) have the same norms.
    """
    c, n, kh, kw = kernel.shape
    norm = _norm(kernel.reshape(c, n * kh * kw), proved)
    # With one row of taps both reshapings are the same matrix; with one column, a skew kernel gives the same norm.
    if 1 not in (kh, kw):
        # Rows (output, vertical tap), columns (input, horizontal tap).
        norm = torch.minimum(norm, _norm(kernel.transpose(1, 2).reshape(c * kh, n * kw), proved))
    return norm * (math.sqrt(kh * kw) * (1 + 1e-12))


LARGE = 128  # from this side on, a factorisation costs less than the squarings of a smooth bound


def _norm(matrix: Tensor, proved: bool = True) -> Tensor:
    """Bound of the norm of a matrix, at least 1e-3.

    On a CPU, large matrices use Lanczos steps and one proof (or, not ``proved``, the estimate alone): within
    0.1 %. Accelerators, traces, transforms and compiled graphs use `gram_norm`, within 3 %, which is products only.
    """
    ordinary = type(matrix) is Tensor and matrix.device.type == "cpu" and not torch.jit.is_tracing()
    if not ordinary or min(matrix.shape) < LARGE or transformed() or torch.compiler.is_compiling() or flushes():
        return gram_norm(matrix)
    return _QuickNorm.apply(matrix, proved)[0]


class _QuickNorm(torch.autograd.Function):
    """`quick_spectral_norm`, or its estimate unless ``proved``, with second derivatives of :func:`gram_norm`.

    On an AMD EPYC 0.8 to 3.6 (estimates: 1.6 to 40) times as fast as `gram_norm`; SOC's training step 0.98 to 1.55.
    """

    @staticmethod
    def forward(matrix: Tensor, proved: bool) -> tuple[Tensor, ...]:
        bound, *rest = (quick_spectral_norm if proved else quick_norm_estimate)(matrix)
        return bound.clamp_min(SMALLEST), *rest

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[0], *output)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *unused: None) -> tuple[Tensor | None, None]:
        matrix, bound, u, v, ratio = ctx.saved_tensors
        if g is None:
            return None, None
        if torch.is_grad_enabled() or transformed(g):  # a second derivative
            return plain_gradients(gram_norm, (matrix,), g)[0], None
        factor = torch.where(bound > SMALLEST, g * ratio, 0.0)  # 0 where the bound is clamped
        return torch.outer((factor * u).to(matrix.dtype), v.to(matrix.dtype)), None


class SocConv2d(ConstrainedConv2d):
    r"""Orthogonal convolution up to truncation: the exponential of a skew kernel, applied to the features.

    .. math:: y = \sum_{i=0}^{T} \frac{K^{*i}}{i!} * x + b, \qquad K = \frac{M - M^{\mathsf T}}{B(M - M^{\mathsf T})}

    where :math:`M^{\mathsf T}` is the kernel of the transposed convolution and B a proved upper bound of the norm
    (:func:`reshaped_norm`; the paper divides by a power estimate). So :math:`\|K\| \le 1`. This norm is the largest
    rotation in radians: 0.5 to 0.8 for random kernels, 1 for those of 1 x 1.

    Args:
        in_channels, out_channels, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedConv2d`.
        kernel_size: odd.
        padding_mode: 'circular' (exports as an exact Fourier convolution) or 'zeros' (as its Taylor recurrence).
        train_terms, eval_terms: T in training mode and in evaluation mode.

    Parameters ``free`` M (c, c, kh, kw) with c = max(s^2 in_channels, out_channels), and ``bias``. Missing input
    channels are zeros, surplus output channels are dropped.

    Guarantee:
        :math:`\max_{|\theta| \le 1} |p_T(i\theta)|`-Lipschitz, 1.0009 for T = 5 and 1 + 2e-8 for T = 10; ``lipschitz``
        returns it for the present mode. If out_channels >= s^2 in_channels, the singular values are 1 up to the
        truncation error :math:`1/(T+1)!`. One exception: in training mode on a CPU, where B is a norm of 128 rows and
        columns or more, B is estimated by Lanczos steps. The estimate equals the proved bound up to rounding unless the
        steps miss the norm; then this step has a larger constant, which ``lipschitz`` proves. Evaluation and export
        divide by proved bounds.

    Cost:
        T convolutions with c x c channels, or the cheapest way of :func:`lipkit.conv.exponential_conv2d` if circular.
        B takes matrix products of size c max(kh, kw).

    >>> x = torch.ones(1, 3, 7, 5)
    >>> bool(torch.isclose(SocConv2d(3, 8, 3, bias=False).eval()(x).norm(), x.norm()))
    True

    References:
        Singla & Feizi, "Skew Orthogonal Convolutions", ICML 2021, theorems 2 to 4 and algorithm 1.
    """

    padding_modes = ("circular", "zeros")
    needs_odd, shown = "a skew kernel has a centre", ("padding_mode", "train_terms", "eval_terms")

    def make_parameters(self, device: Any, dtype: Any, *, train_terms: int = 5, eval_terms: int = 10) -> None:
        check_terms(train_terms, "train_terms")
        check_terms(eval_terms, "eval_terms")
        self.train_terms, self.eval_terms = train_terms, eval_terms
        c = max(self.inner_channels, self.out_channels)
        free = torch.empty(c, c, *self.kernel_size, device=device, dtype=dtype)
        self.free = nn.Parameter(nn.init.kaiming_uniform_(free, a=math.sqrt(5)))

    @property
    def terms(self) -> int:
        """The highest power in the present mode."""
        return self.train_terms if self.training else self.eval_terms

    def generator(self, proved: bool = True) -> Tensor:
        """The exponent: the skew kernel K ``(c, c, kh, kw)`` of norm at most 1, in float32 or better."""
        return torch.div(*self._quotient(proved))

    def _quotient(self, proved: bool) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of the exponent."""
        kernel = skew(at_least_float32(self.free))
        # First to unit Frobenius norm, so that nothing underflows on the way to the bound. This factor cancels.
        kernel = kernel / torch.linalg.vector_norm(kernel.detach()).clamp_min(1e-12)
        return kernel, reshaped_norm(kernel, proved).to(kernel.dtype)

    def polynomial(self, kernel: Tensor, terms: int) -> Tensor:
        """The exponential of a 1 x 1 ``kernel``: one matrix (out_channels, s^2 in_channels) for all pixels."""
        return taylor(kernel[:, :, 0, 0], terms)[: self.out_channels, : self.inner_channels]

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        self.check_input(x)
        with autocast_off(x):
            kernel, bound = self._quotient(not self.training)
            terms, rows = self.terms, x.numel() // self.inner_channels
            # The polynomial of the matrix, unless T products with few patches cost less.
            few = self.pointwise and terms * rows <= taylor_products(terms) * len(kernel)
            kernel = kernel if few else kernel / bound
            matrix = self.polynomial(kernel, terms) if self.pointwise and not few else None
        if matrix is not None:
            return self.on_patches(x, matrix)
        x = downsample(x, self.stride)
        if few:
            y = taylor_rows(x.movedim(1, -1), kernel.flatten(1), terms, self.out_channels, bound)
            return self.add_bias(y.movedim(-1, 1))
        if self.padding_mode == "circular":
            return self.add_bias(exponential_conv2d(kernel, x.to(kernel.dtype), self.terms, self.out_channels))
        half = [k // 2 for k in self.kernel_size]
        x = F.pad(x, (0, 0, 0, 0, 0, len(kernel) - self.inner_channels))  # axes from the last one: channels
        y = taylor_features(x, lambda term: F.conv2d(term, kernel, padding=half), self.terms)
        return self.add_bias(y[:, : self.out_channels])


@lipschitz_rule(SocConv2d)
def _soc(module: SocConv2d, input_shape: Shape | None) -> float:
    # K was divided by its bound in its own dtype. Relative roundings u of its entries move the norm by at most
    # u sqrt(kh kw) ||K||_F <= u sqrt(kh kw c) ||K||.
    channels, _, kh, kw = module.free.shape
    angle = 1 + (4 + 2 * math.sqrt(kh * kw * channels)) * torch.finfo(module.free.dtype).eps
    if module.training:  # a step may have divided by an estimate
        with torch.no_grad():
            angle = max(angle, float(reshaped_norm(module.generator(proved=False))))
    return taylor_norm(angle, 0.0, module.terms)


@export_rule(SocConv2d)
def _export_soc(layer: SocConv2d, input_shape: Shape) -> nn.Module:
    (height, width), kernel = resampled_size(layer, input_shape), layer.generator()
    if layer.pointwise:
        return patch_module(layer.polynomial(kernel, layer.eval_terms), layer.stride, layer.bias)
    if layer.padding_mode == "circular":
        both = kernel_symbol(kernel.double(), height, width).map(lambda matrix: taylor(matrix, layer.eval_terms))
        cut = Symbol(*(m[..., : layer.out_channels, : layer.inner_channels].to(kernel.dtype) for m in both))
        fourier = FourierConv2d.from_symbol(cut, height, width, layer.bias)
        return nn.Sequential(*stride_modules(layer), fourier)
    sizes = (layer.inner_channels, layer.out_channels, layer.kernel_size, layer.eval_terms, layer.bias is not None)
    plain = TaylorConv2d(*sizes).to(kernel)
    plain.kernel.copy_(kernel)
    if plain.bias is not None and layer.bias is not None:
        plain.bias.copy_(layer.bias)
    return nn.Sequential(*stride_modules(layer), plain)


SOC = Family(
    name="soc",
    title="Exponential of a skew kernel, by Taylor terms",
    paper="Singla & Feizi, ICML 2021",
    equation="theorems 2 to 4, algorithm 1",
    definition=definitions.soc,
    conv=SocConv2d,
    linear=CayleyLinear,
    sizes="odd kernels, any image",
    accepts=lambda k, h, w: k % 2 == 1,
    options={"train_terms": (3, 5), "eval_terms": (5, 10)},
    slack=1e-3,
    train_gap=1.5e-3,
)
