"""Dense layers: a semi-orthogonal matrix, by Björck iteration or any function of ``linalg.table``, or unit rows."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.bounds import spectral_norm
from lipkit.conv.circular import circular_pads
from lipkit.layers.base import ConstrainedLinear, check_positive
from lipkit.layers.export import export_linear, register_one_lipschitz
from lipkit.linalg import at_least_float32
from lipkit.linalg.bjorck import bjorck
from lipkit.linalg.table import Orthogonalize, orthogonalized, proved, resolve
from lipkit.modules import Shape, export_rule, lipschitz_rule


def orthogonal_free(shape: tuple[int, ...], device: Any, dtype: Any) -> nn.Parameter:
    """A free weight that starts semi-orthogonal as a matrix ``(shape[0], the rest)``."""
    return nn.Parameter(nn.init.orthogonal_(torch.empty(shape, device=device, dtype=dtype)))


def orthogonal_stack(shape: tuple[int, ...], device: Any, dtype: Any) -> nn.Parameter:
    """Free matrices ``(count, m, n)`` that start semi-orthogonal."""
    free = torch.empty(shape, device=device, dtype=dtype)
    for matrix in free:
        nn.init.orthogonal_(matrix)
    return nn.Parameter(free)


def delta_orthogonal_free(shape: tuple[int, ...], device: Any, dtype: Any) -> nn.Parameter:
    """A free kernel ``(cout, cin, kh, kw)`` that starts with all singular values 1: one semi-orthogonal tap."""
    matrix = nn.init.orthogonal_(torch.empty(shape[:2], device=device, dtype=dtype))
    return nn.Parameter(F.pad(matrix[:, :, None, None], circular_pads(*shape[2:])))


class BjorckLinear(ConstrainedLinear):
    r"""Dense layer ``y = Qx + b`` whose matrix is the Björck iterate of a free one, a contraction at every stage.

    Args:
        in_features, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedLinear`.
        iterations, order: of :func:`lipkit.linalg.bjorck`, at least 1.

    Parameters ``free`` (out_features, in_features), semi-orthogonal at the start, and ``bias``.

    Guarantee:
        1-Lipschitz for every ``iterations`` and ``order``; all singular values 1 on convergence, which
        ``linalg.orthogonality_residual(layer.weight())`` measures.

    >>> from lipkit.linalg import orthogonality_residual
    >>> bool(orthogonality_residual(BjorckLinear(3, 5).weight()) < 1e-5)
    True

    References:
        Anil, Lucas & Grosse, ICML 2019, section 4.2; Björck & Bowie, SIAM J. Numer. Anal. 8 (1971).
    """

    shown = ("iterations", "order")

    def make_parameters(self, device: Any, dtype: Any, *, iterations: int = 20, order: int = 1) -> None:
        check_positive(iterations=iterations, order=order)
        self.iterations, self.order = iterations, order
        self.free = orthogonal_free(self.shape, device, dtype)

    def weight(self) -> Tensor:
        return bjorck(self.free, self.iterations, self.order)


class OrthogonalLinear(ConstrainedLinear):
    r"""Dense layer ``y = Qx + b``, :math:`Q = \mathrm{orthogonalize}(W)` of a free matrix W.

    Args:
        in_features, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedLinear`.
        orthogonalize: a name of ``linalg.ORTHOGONALIZE``, or a function ``(m, n) -> (m, n)``, for instance
            ``functools.partial(bjorck, iterations=50)``.

    Parameters ``free`` W (out_features, in_features), semi-orthogonal at the start, and ``bias``.

    Guarantee:
        1-Lipschitz with a function of the table. Another function is not trusted: ``lipschitz`` computes the spectral
        norm of the matrix it makes.

    >>> layer = OrthogonalLinear(5, 3, orthogonalize="polar")
    >>> (layer.weight() @ layer.weight().mT).allclose(torch.eye(3), atol=1e-5)
    True
    """

    shown = ("orthogonalize",)

    def make_parameters(self, device: Any, dtype: Any, *, orthogonalize: str | Orthogonalize = "exponential") -> None:
        self.orthogonalize = resolve(orthogonalize)
        self.free = orthogonal_free(self.shape, device, dtype)

    def weight(self) -> Tensor:
        return orthogonalized(self.orthogonalize, self.free)


class NormalizedLinear(ConstrainedLinear):
    r"""Last layer with unit rows: :math:`y_i = \langle v_i / \|v_i\|, x \rangle + b_i`.

    After a 1-Lipschitz body, the margin :math:`y_t - y_i` has the constant :math:`\|w_t - w_i\| \le 2`, with unit rows
    w: the pairwise certificate of :func:`lipkit.certify`.

    Args: as ``nn.Linear``. Parameters ``free`` V (out_features, in_features) and ``bias``.

    Guarantee:
        Unit rows up to rounding; **not** 1-Lipschitz as a whole: ``lipschitz`` is the proved spectral norm of the
        weight as it is now, at most the root of the number of rows.

    >>> NormalizedLinear(8, 3).weight().norm(dim=1).round(decimals=5).tolist()
    [1.0, 1.0, 1.0]

    References:
        Singla, Singla & Feizi, ICLR 2022 (LLN); [LBDN] section 6.3.
    """

    def make_parameters(self, device: Any, dtype: Any) -> None:
        free = torch.empty(self.shape, device=device, dtype=dtype)
        self.free = nn.Parameter(nn.init.kaiming_uniform_(free, a=math.sqrt(5)))  # as nn.Linear

    def weight(self) -> Tensor:
        v = at_least_float32(self.free)
        return v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(1e-12)  # a zero row stays zero


@lipschitz_rule(OrthogonalLinear)
def _orthogonal_linear(layer: OrthogonalLinear, input_shape: Shape | None) -> Tensor | float:
    return 1.0 if proved(layer.orthogonalize) else spectral_norm(layer.weight())


lipschitz_rule(NormalizedLinear)(lambda layer, input_shape: spectral_norm(layer.weight()))
export_rule(OrthogonalLinear, NormalizedLinear)(export_linear)
register_one_lipschitz(BjorckLinear)
