"""Layers whose weight is a point of the Stiefel manifold, along which the optimiser moves it."""

from typing import Any

import torch
from torch import Tensor

from lipkit.bounds import spectral_norm
from lipkit.errors import OptionError
from lipkit.layers.base import ConstrainedLinear, KernelConv2d
from lipkit.layers.dense import orthogonal_free
from lipkit.layers.export import export_kernel_conv, export_linear
from lipkit.layers.projections import AfterStep
from lipkit.linalg import at_least_float32
from lipkit.linalg.stiefel import retract
from lipkit.modules import Shape, export_rule, lipschitz_rule


class OnManifold(AfterStep):
    """A layer whose parameter ``free`` is semi-orthogonal and stays so under an optimiser made for it.

    `lipkit.training.SpectralDescent` and `lipkit.training.RiemannianAdam` move it along the manifold; every hundredth
    step removes accumulated rounding. Under another optimiser ``lipschitz`` and ``export`` give the norm as it is.
    """

    interval = 100  # a step adds about 1e-7 to the residual of a square matrix
    free: Tensor

    @torch.no_grad()
    def after_step(self, input_shape: Shape) -> None:
        """Replace the weight by the nearest semi-orthogonal one."""
        self.free.copy_(retract(self.free.flatten(1)).reshape(self.free.shape))


class StiefelLinear(ConstrainedLinear, OnManifold):
    """Dense layer ``y = Wx + b`` with the semi-orthogonal parameter W itself: a forward pass is that of ``nn.Linear``.

    The optimiser does the work: see `lipkit.training.SpectralDescent`.

    Args: those of :class:`lipkit.layers.base.ConstrainedLinear`. Parameters ``free`` W (out_features, in_features),
    semi-orthogonal at the start, and ``bias``.

    Guarantee:
        No claimed constant: ``lipschitz`` is the proved norm of W as it is, 1 + 1e-6 or less on the manifold.

    >>> from lipkit.linalg import orthogonality_residual
    >>> bool(orthogonality_residual(StiefelLinear(5, 3).weight()) < 1e-5)
    True
    """

    def make_parameters(self, device: Any, dtype: Any) -> None:
        self.free = orthogonal_free(self.shape, device, dtype)

    def weight(self) -> Tensor:
        return at_least_float32(self.free)


class StiefelConv2d(KernelConv2d, OnManifold):
    r"""Pointwise convolution by the semi-orthogonal parameter W itself; with a stride s, W acts on s x s patches.

    Args:
        in_channels, out_channels, ..., dtype: those of `lipkit.layers.base.ConstrainedConv2d`; ``kernel_size`` is 1,
            since a step on one matrix does not keep the relations between taps that make a larger kernel orthogonal.

    Parameters ``free`` W (out_channels, s^2 in_channels, 1, 1), semi-orthogonal at the start, and ``bias``.

    Guarantee:
        No claimed constant: ``lipschitz`` is the proved norm of W as it is.

    >>> StiefelConv2d(3, 48, 1, stride=4)(torch.ones(2, 3, 8, 8)).shape
    torch.Size([2, 48, 2, 2])
    """

    def make_parameters(self, device: Any, dtype: Any) -> None:
        if not self.pointwise:
            raise OptionError(f"kernel_size: expected 1, got {self.kernel_size}")
        self.free = orthogonal_free(self.shape, device, dtype)

    def kernel(self) -> Tensor:
        return at_least_float32(self.free)


lipschitz_rule(StiefelLinear)(lambda layer, input_shape: spectral_norm(layer.weight()))
lipschitz_rule(StiefelConv2d)(lambda layer, input_shape: spectral_norm(layer.kernel().flatten(1)))
export_rule(StiefelLinear)(export_linear)
export_rule(StiefelConv2d)(export_kernel_conv)
