"""OSSN: the kernel divided by the convolution's own spectral norm, estimated by power and Krylov steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lipkit.bounds import circular
from lipkit.bounds.power import krylov_lower_estimate
from lipkit.conv import circular_conv2d, fold
from lipkit.errors import ShapeError
from lipkit.layers import definitions
from lipkit.layers.base import ConstrainedConv2d, Family, check_positive, half_through_float32
from lipkit.layers.dense import BjorckLinear, delta_orthogonal_free
from lipkit.layers.export import circular_module, resampled_size, stride_modules
from lipkit.linalg import at_least_float32
from lipkit.linalg.precision import autocast_off
from lipkit.modules import Shape, export_rule, lipschitz_rule


class OssnConv2d(ConstrainedConv2d):
    r"""One-sided spectral normalisation: :math:`K = V / \hat\sigma_{H \times W}(V)`.

    :math:`\hat\sigma` is a *lower* estimate on the image size at hand (``bounds.power.krylov_lower_estimate``), so the
    layer's norm is 1 or slightly above. It has a fixed start and no state. The papers' power method takes more steps.

    Args:
        in_channels, out_channels, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedConv2d`.
        iterations: steps of the estimate, at least 1; few channels need none. Its vectors are constants to gradients.

    Parameters ``free`` V (out_channels, s^2 in_channels, kh, kw) and ``bias``. V starts with all singular values 1.

    Guarantee:
        No claimed constant: ``lipschitz(layer, input_shape)`` proves one from the numbers, for this layer and for its
        export, at least 1 up to rounding. Random kernels, with close singular values at many frequencies, are the
        hardest: 78 of 32 to 256 channels had 1.002 on average and at most 1.041. The gradient is exact if the estimate
        is the norm and its singular value simple.

    Cost:
        Per forward pass eight convolutions of a quarter of one image (of a whole one for large kernels and odd sides),
        eight products by vectors at 16 frequencies (more for small layers) and ``2 iterations`` at three of them; next
        to nothing backward. Few channels (up to 32 on 16 x 16, 20 on 32 x 32) take eigenvalues at all frequencies
        instead, and the estimate is the norm.

    Raises:
        OptionError: an argument that is not supported. ShapeError: an input that does not fit, or ``lipschitz``
        without an input shape.

    >>> from lipkit.lowering import lipschitz
    >>> layer = OssnConv2d(3, 8, 3)
    >>> 0.9999 < lipschitz(layer, (3, 7, 5)).item() < 1.001
    True

    References:
        [Cayley] section 5 (the baseline OSSN); Gouk et al., Machine Learning 110 (2021); Miyato et al., ICLR 2018.
    """

    shown = ("iterations",)

    def make_parameters(self, device: Any, dtype: Any, *, iterations: int = 16) -> None:
        check_positive(iterations=iterations)
        self.iterations = iterations
        self.free = delta_orthogonal_free(self.shape, device, dtype)

    def kernel(self, height: int, width: int) -> Tensor:
        """The kernel divided by its estimated norm on ``height x width`` (after downsampling); zero stays zero."""
        free = fold(at_least_float32(self.free), height, width)
        # Dividing by the largest entry keeps powers from over- and underflow; the result does not depend on it.
        biggest = free.detach().abs().amax()
        free = free / torch.where(biggest > 0, biggest, 1)
        norm = krylov_lower_estimate(free, height, width, self.iterations)
        return free / torch.where(norm > 0, norm, 1)

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        x = self.resample(x)
        with autocast_off(x):
            kernel = self.kernel(*x.shape[-2:])
        return circular_conv2d(x, kernel, self.bias_as(kernel))


@lipschitz_rule(OssnConv2d)
def _ossn(layer: OssnConv2d, input_shape: Shape | None) -> Tensor:
    if input_shape is None:
        raise ShapeError(
            "OssnConv2d: expected an input_shape such as (3, 32, 32), got None: the kernel is divided by its norm on "
            "that image size"
        )
    size = resampled_size(layer, input_shape)
    return circular(layer.kernel(*size), *size)


@export_rule(OssnConv2d)
def _export_ossn(layer: OssnConv2d, input_shape: Shape) -> nn.Module:
    kernel = layer.kernel(*resampled_size(layer, input_shape))
    return nn.Sequential(*stride_modules(layer), circular_module(kernel, layer.bias))


OSSN = Family(
    name="ossn",
    title="divided by its norm, estimated by power and Krylov steps",
    paper="Gouk et al., Machine Learning 2021",
    equation="section 3",
    definition=definitions.ossn,
    conv=OssnConv2d,
    linear=BjorckLinear,
    claim="none",
    smooth=False,
)
