"""LOT: the polar factor of the kernel's symbol at each frequency."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lipkit.conv import Symbol, kernel_symbol
from lipkit.errors import ShapeError
from lipkit.layers import definitions
from lipkit.layers.base import Family, SymbolConv2d
from lipkit.layers.dense import OrthogonalLinear, delta_orthogonal_free
from lipkit.layers.export import export_symbol_conv, resampled_size
from lipkit.linalg import at_least_float32
from lipkit.linalg.table import Orthogonalize, function_name, orthogonalized, proved, resolve
from lipkit.modules import Shape, export_rule, lipschitz_rule
from lipkit.modules.fourier import symbol_norm


class LotConv2d(SymbolConv2d):
    r"""Orthogonal circular convolution: the semi-orthogonal matrix closest to the kernel's symbol, per frequency.

    .. math:: \hat y(f) = (\hat V \hat V^*)^{-1/2} \hat V\, \hat x(f) + b \quad (c_{out} \le c_{in}), \qquad
              \hat V (\hat V^* \hat V)^{-1/2} \quad (c_{out} > c_{in})

    Args:
        in_channels, out_channels, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedConv2d`.
        orthogonalize: a name of ``linalg.ORTHOGONALIZE`` or a function on complex batches. 'polar' is LOT by singular
            values: exact, and on a CPU several times faster. 'newton_schulz' is LOT as published; 'bjorck' is a
            steadier iteration to the same limit, by products only. 'cayley' is a different map.

    Parameters ``free`` V (out_channels, s^2 in_channels, kh, kw) and ``bias``. V starts as a semi-orthogonal centre tap
    plus noise of a third of its size: well conditioned at every frequency.

    Guarantee:
        1-Lipschitz for the named functions. Singular values are 1 up to rounding for 'polar', and below 1 where an
        iteration stops early. For another function ``lipschitz`` computes the norm, and needs ``input_shape``.

    Cost:
        One decomposition at each of about H W / (2 s^2) frequencies; a single one for a 1 x 1 kernel.

    >>> x = torch.ones(1, 3, 7, 5)
    >>> bool(torch.isclose(LotConv2d(3, 8, 3, bias=False)(x).norm(), x.norm()))
    True

    References:
        Xu, Li & Li, "LOT: Layer-wise Orthogonal Training on Improving l2 Certified Robustness", NeurIPS 2022,
        equation 4 and algorithm 1.
    """

    shown = ("orthogonalize",)

    def make_parameters(self, device: Any, dtype: Any, *, orthogonalize: str | Orthogonalize = "polar") -> None:
        self.orthogonalize = resolve(orthogonalize)
        cout, cin, kh, kw = self.shape
        # The symbol of noise of variance v has singular values of up to sqrt(v kh kw) (sqrt(cout) + sqrt(cin)).
        size = math.sqrt(kh * kw) * (math.sqrt(cout) + math.sqrt(cin))
        noise = torch.randn(self.shape, device=device, dtype=dtype) / (3 * size)
        self.free = delta_orthogonal_free(self.shape, device, dtype)
        self.free.data += noise

    def symbol(self, height: int, width: int) -> Symbol:
        raw = kernel_symbol(at_least_float32(self.free), height, width)
        return raw.map(lambda free: orthogonalized(self.orthogonalize, free))


@lipschitz_rule(LotConv2d)
def _lot(layer: LotConv2d, input_shape: Shape | None) -> Tensor | float:
    if proved(layer.orthogonalize):
        return 1.0
    if input_shape is None:
        raise ShapeError(
            f"LotConv2d with orthogonalize={function_name(layer.orthogonalize)}: expected an input_shape, because "
            "nothing is proved about that function and the norm is computed at each frequency, got None"
        )
    return symbol_norm(layer.symbol(*resampled_size(layer, input_shape)))


export_rule(LotConv2d)(export_symbol_conv)

LOT = Family(
    name="lot",
    title="Polar factor at each frequency",
    paper="Xu, Li & Li, NeurIPS 2022",
    equation="equation 4, algorithm 1",
    definition=definitions.lot,
    conv=LotConv2d,
    linear=partial(OrthogonalLinear, orthogonalize="polar"),
    options={"orthogonalize": ("polar", "bjorck", "newton_schulz", "cayley")},
)
