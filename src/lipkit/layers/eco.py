"""ECO: explicitly constructed orthogonal convolutions, by orthogonal matrices at the k^2 frequencies of a period."""

from typing import Any

import torch
from torch import Tensor, nn

from lipkit.conv import Symbol, downsample
from lipkit.conv.phases import apply_phases, check_fits, dilated_conv2d, distinct_frequencies, kernel_of_symbol
from lipkit.errors import OptionError, check_choice, check_flag
from lipkit.layers import definitions
from lipkit.layers.base import ConstrainedConv2d, Family, half_through_float32
from lipkit.layers.cayley import CayleyLinear
from lipkit.layers.dense import orthogonal_stack
from lipkit.layers.export import patch_module, resampled_size, stride_modules
from lipkit.linalg.exponential import SQUARINGS, check_terms, taylor_range
from lipkit.linalg.matrices import check_integer
from lipkit.linalg.precision import autocast_off, product_dtype
from lipkit.linalg.skew_polynomial import taylor_exponential
from lipkit.linalg.table import Orthogonalize, function_name, orthogonalized, proved, resolve
from lipkit.modules import FourierConv2d, Shape, export_rule, lipschitz_rule
from lipkit.modules.fourier import symbol_norm

EVALUATIONS = ("phase", "dilated")
TRAIN_TERMS, EVAL_TERMS = 5, 10


class EcoConv2d(ConstrainedConv2d):
    r"""Orthogonal circular convolution with taps H / kh and W / kw apart: one orthogonal matrix per frequency.

    .. math:: P_0[p, q] = \exp(A_l), \quad A_l = \frac{W_l - W_l^*}{\beta(W_l - W_l^*)}, \quad l = I[p, q], \qquad
              y = \mathrm{DFT}^{-1}(P_0) *_{(H/k_h,\, W/k_w)} x + b

    exp stands for its Taylor polynomial of degree T, :math:`\beta` for a proved bound of the norm
    (``linalg.exponential.skew_bound``), and I for the index of the distinct frequencies
    (``conv.phases.frequency_map``). The parameters do not depend on the image size.

    Args:
        in_channels, out_channels, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedConv2d`.
        kernel_size: k, or (kh, kw), odd or even, that divide height and width of the image (after downsampling). On
            one pixel it is 1 and the layer a dense orthogonal matrix. ``dilation`` stays 1: the image size sets it.
        orthogonalize: 'taylor' (the paper), 'exponential' (exact, neither normalised nor truncated), 'cayley',
            another name of ``linalg.ORTHOGONALIZE``, or a function ``(..., m, n) -> (..., m, n)``.
        train_terms, eval_terms: T in training mode (5) and in evaluation mode (10), with 'taylor'; the modes differ in
            nothing else.
        squarings: of the bound of the norm, 3 to 6 (default 4), with 'taylor'. More make it tighter: rotations come
            closer to 1 rad.
        complex_p0: whether the matrices of conjugate pairs of frequencies are unitary instead of real orthogonal
            (Appendix B). At twice the cost these reach more maps, such as shifts.
        square: whether W is square, of side max(out_channels, s^2 in_channels), and its matrices are cropped, as in the
            paper. False: rows and columns beyond the layer's are zeros, which saves products.
        evaluation: 'phase', a product for each distinct frequency, or 'dilated', one convolution by :meth:`kernel`.

    Parameters ``free`` W (L, c, c), L distinct frequencies, c = max(out_channels, s^2 in_channels), with complex
    matrices also ``imaginary`` (number of conjugate pairs, c, c), and ``bias``; (..., out_channels, s^2 in_channels)
    without ``square``. The first columns or rows of the orthogonal matrix act.

    Guarantee:
        1-Lipschitz, all singular values 1 up to rounding, for 'exponential' and 'cayley'. For 'taylor' all of them lie
        in ``taylor_range(1, T)``: at most 1.00091 for T = 5 and 1 + 2e-8 for T = 10; ``lipschitz`` returns that bound
        for the present mode, exports use ``eval_terms``. For a function outside the table it computes the norm.

    Cost:
        L matrices of size c per forward pass (without ``square`` of the smaller side, if that is below 0.4 c), and per
        image the H W / s^2 products of out_channels x s^2 in_channels of a 1 x 1 convolution.

    >>> x = torch.ones(1, 3, 6, 9)
    >>> bool(torch.isclose(EcoConv2d(3, 8, 3, bias=False, orthogonalize="exponential")(x).norm(), x.norm()))
    True

    References:
        [ECO] Yu, Li, Cai & Li, ICLR 2022, algorithm 1, Appendices A and B.
    """

    free: nn.Parameter
    imaginary: nn.Parameter | None

    def make_parameters(
        self,
        device: Any,
        dtype: Any,
        *,
        orthogonalize: str | Orthogonalize = "taylor",
        train_terms: int | None = None,
        eval_terms: int | None = None,
        squarings: int | None = None,
        complex_p0: bool = False,
        square: bool = True,
        evaluation: str = "phase",
    ) -> None:
        of_taylor = {"train_terms": train_terms, "eval_terms": eval_terms, "squarings": squarings}
        for name, value in of_taylor.items():
            if value is not None and orthogonalize != "taylor":
                raise OptionError(f"{name}: expected None without orthogonalize='taylor', got {value!r}")
            if value is not None:
                check_integer(name, value, 3, 6) if name == "squarings" else check_terms(value, name)
        for name, flag in (("complex_p0", complex_p0), ("square", square)):
            check_flag(name, flag)
        check_choice("evaluation", evaluation, EVALUATIONS)
        # None stands for the Taylor polynomial, whose degree follows the mode.
        self.orthogonalize = None if orthogonalize == "taylor" else resolve(orthogonalize, "taylor, ")
        self.train_terms = TRAIN_TERMS if train_terms is None else train_terms
        self.eval_terms = EVAL_TERMS if eval_terms is None else eval_terms
        self.squarings = SQUARINGS if squarings is None else squarings
        self.complex_p0, self.square, self.evaluation = complex_p0, square, evaluation
        n_real, n_pair = distinct_frequencies(self.kernel_size)  # self-conjugate ones, and one of each other pair
        matrix = (max(self.shape[:2]),) * 2 if square else self.shape[:2]  # square ones are cropped, as in the paper
        self.free = orthogonal_stack((n_real + n_pair, *matrix), device, dtype)
        imaginary = orthogonal_stack((n_pair, *matrix), device, dtype) if complex_p0 and n_pair else None
        self.register_parameter("imaginary", imaginary)

    @property
    def terms(self) -> int:
        """T, the degree of the Taylor polynomial in the present mode."""
        return self.train_terms if self.training else self.eval_terms

    def symbol(self, terms: int | None = None) -> Symbol:
        """The matrices at the distinct frequencies, in float32 or better; ``terms`` replaces T of the present mode.

        ``real`` (n_r, out_channels, s^2 in_channels) and ``pair`` (n_p, 1, ...), or (n_p, 2, ...) if complex.
        """
        n_real, _ = distinct_frequencies(self.kernel_size)
        terms = self.terms if terms is None else terms
        if self.imaginary is None:
            made = self._make(self.free, terms)
            return Symbol(made[:n_real], made[n_real:, None])  # one part: real matrices at the pairs, too
        free = Symbol(self.free[:n_real], torch.stack((self.free[n_real:], self.imaginary), 1))
        return free.map(lambda part: self._make(part, terms))

    def _make(self, free: Tensor, terms: int) -> Tensor:
        if self.orthogonalize is None:
            made = taylor_exponential(free, terms, self.squarings)
        else:
            made = orthogonalized(self.orthogonalize, free) if len(free) else free  # small kernels have no pairs
        return made[..., : self.out_channels, : self.inner_channels]

    def kernel(self) -> Tensor:
        """W0 ``(out_channels, s^2 in_channels, kh, kw)``, to be applied with the dilations H / (s kh), W / (s kw)."""
        return kernel_of_symbol(self.symbol(), self.kernel_size)

    def check_input(self, x: Tensor) -> None:
        super().check_input(x)
        height, width = (side // self.stride for side in x.shape[-2:])
        check_fits(height, width, self.kernel_size, f"{type(self).__name__}: kernel_size")

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        self.check_input(x)
        with autocast_off(x):
            symbol = self.symbol()
            kernel = None if self.evaluation == "phase" else kernel_of_symbol(symbol, self.kernel_size)
        x = x.to(product_dtype(x, symbol.real.dtype))
        if self.pointwise:
            return self.on_patches(x, symbol.real[0])  # one frequency
        x = downsample(x, self.stride)
        if kernel is None:
            return apply_phases(symbol, x, self.kernel_size, bias=self.bias)
        return self.add_bias(dilated_conv2d(x, kernel))

    def extra_repr(self) -> str:
        made = "taylor" if self.orthogonalize is None else function_name(self.orthogonalize)
        of_taylor = ("train_terms", "eval_terms", "squarings") * (self.orthogonalize is None)
        shown = [f"{name}={getattr(self, name)}" for name in (*of_taylor, "complex_p0", "square", "evaluation")]
        return ", ".join((super().extra_repr(), f"orthogonalize={made}", *shown))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        found, wanted = state_dict.get(prefix + "free"), tuple(self.free.shape)
        if found is not None and tuple(found.shape) != wanted:
            other = "square=False" if self.square else "square=True"
            rest[-1].append(
                f"{prefix}free: expected {wanted}, got {tuple(found.shape)}: saved with {other} or other sizes"
            )


@lipschitz_rule(EcoConv2d)
def _eco(layer: EcoConv2d, input_shape: Shape | None) -> Tensor | float:
    if layer.orthogonalize is None:
        # The bound that divides the skew matrices is itself rounded, c times in each product. A root of degree 2^i
        # divides the relative error of the power 2^i by 2^i.
        rounding = 16 * max(layer.inner_channels, layer.out_channels) * torch.finfo(layer.free.dtype).eps
        return taylor_range(1 + rounding, layer.terms)[1]
    if proved(layer.orthogonalize):
        return 1.0
    return symbol_norm(layer.symbol())


@export_rule(EcoConv2d)
def _export_eco(layer: EcoConv2d, input_shape: Shape) -> nn.Module:
    """Pixel-unshuffle and the phase form, whose bound is exact; of a 1 x 1 kernel, one strided convolution.

    A dilated ``nn.Conv2d`` does not serve: it halves its circular 'same' padding of ``d (k - 1)``, which shifts an even
    kernel by half a dilation, and the bound of a dilated kernel over all image sizes exceeds 1.
    """
    size, symbol = resampled_size(layer, input_shape), layer.symbol(layer.eval_terms)
    if layer.pointwise:
        return patch_module(symbol.real[0], layer.stride, layer.bias)
    made = FourierConv2d.from_symbol(symbol, *size, layer.bias, layer.kernel_size)
    return nn.Sequential(*stride_modules(layer), made)


ECO = Family(
    name="eco",
    title="Exponential of skew matrices at the k^2 frequencies of a dilated kernel",
    paper="Yu, Li, Cai & Li, ICLR 2022",
    equation="algorithm 1, equations 14 to 17, appendices A and B",
    definition=definitions.eco,
    conv=EcoConv2d,
    linear=CayleyLinear,
    sizes="kernels that divide the image (after downsampling), odd or even",
    accepts=lambda k, h, w: h % k == 0 and w % k == 0,
    options={
        "orthogonalize": ("taylor", "exponential", "cayley"),
        "train_terms": (3, 5),
        "eval_terms": (5, 10),
        "squarings": (3, 5),
        "square": (True, False),
        "complex_p0": (False, True),
        "evaluation": ("phase", "dilated"),
    },
    slack=1e-3,
    train_gap=1.5e-3,
)
