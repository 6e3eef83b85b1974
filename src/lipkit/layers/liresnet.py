"""LiResNet: a linear residual convolution, divided by a proved bound of its norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lipkit.layers import definitions
from lipkit.layers.base import Family, KernelConv2d, always_proved, check_positive, proved_norm, training_norm
from lipkit.layers.bro import near_identity, residual_parameters
from lipkit.layers.cholesky import CholeskyLinear
from lipkit.layers.export import export_kernel_conv
from lipkit.linalg import at_least_float32
from lipkit.modules import Shape, export_rule, lipschitz_rule


class LiResConv2d(KernelConv2d):
    r"""Convolution by :math:`(E + s\, g N) / \beta`, where :math:`\beta` bounds the norm of the kernel above it.

    E is the identity on the first channels, :math:`s = 1/\sqrt{\mathrm{depth}}`: a residual connection around a linear
    layer, with the constant of one kernel. [LiResNet] keeps the kernel and multiplies power estimates of the norms in
    the loss. Dividing by :math:`\beta` gives the same network up to the size of its biases.

    Args:
        in_channels, out_channels, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedConv2d`.
        padding_mode: 'circular', or 'zeros' (odd kernels).
        depth: of the network, at least 1.

    Parameters ``free`` N (out_channels, s^2 in_channels, kh, kw), ``scale`` g (out_channels, 1, 1, 1) and ``bias``.

    Guarantee:
        1-Lipschitz on every image size: :math:`\beta` is proved, within 2 % of the supremum over all frequencies. One
        exception: in training mode, kernels of up to 3 x 3 taps with 64 channels and more take the number that the
        proof tries first (:func:`lipkit.bounds.symbol_sup_estimate`). It is the same, bit for bit, unless its search
        misses the supremum by more than 2 %. Then this step has a larger constant, which ``lipschitz`` proves.
        Evaluation and exports always have the proved weights.

    Cost:
        One :func:`lipkit.bounds.symbol_sup` per forward pass: some hundred Cholesky factorisations of the smaller
        channel number, whatever the image. A training step without proof takes a search and one singular vector.

    Raises:
        OptionError: an argument that is not supported.

    >>> LiResConv2d(3, 8, 3)(torch.ones(1, 3, 7, 5)).shape
    torch.Size([1, 8, 7, 5])

    References:
        [LiResNet] Hu, Zou, Wang, Leino & Fredrikson, "Unlocking Deterministic Robustness Certification on ImageNet",
        NeurIPS 2023, section 3; Leino, Wang & Fredrikson, "Globally-Robust Neural Networks", ICML 2021 (the norms in
        the loss).
    """

    padding_modes = ("circular", "zeros")
    shown = ("padding_mode",)

    def make_parameters(self, device: Any, dtype: Any, *, depth: int = 1) -> None:
        check_positive(depth=depth)
        self.depth = depth
        self.free, self.scale = residual_parameters(self.shape, device, dtype)

    def kernel(self) -> Tensor:
        """The kernel of norm at most 1; zero stays zero."""
        return self._over(proved_norm)

    def kernel_in_use(self) -> Tensor:
        return self._over(training_norm if self.training else proved_norm)

    def _over(self, norm: Callable[[Tensor], Tensor]) -> Tensor:
        kernel = self.undivided()
        bound = norm(kernel)
        return kernel / torch.where(bound > 0, bound, torch.ones_like(bound)).to(kernel.dtype)

    def undivided(self) -> Tensor:
        r"""The kernel above :math:`\beta`, in float32 or better."""
        return near_identity(at_least_float32(self.free), at_least_float32(self.scale), self.depth)


@lipschitz_rule(LiResConv2d)
@torch.no_grad()
def _lires(layer: LiResConv2d, input_shape: Shape | None) -> float:
    if always_proved(layer.free) or not layer.training:
        return 1.0
    kernel = layer.undivided()
    proved, used = float(proved_norm(kernel)), float(training_norm(kernel)) or 1.0  # zero stays undivided
    return 1.0 if proved <= used else proved / used * (1 + 1e-15)  # above two roundings of float64


export_rule(LiResConv2d)(export_kernel_conv)


LIRESNET = Family(
    name="liresnet",
    title="Identity plus noise, divided by a proved bound of its norm",
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
