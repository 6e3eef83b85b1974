r"""Lipschitz regularisation: the sum of the logarithms of the layers' bounds, added to the loss.

The sum is the logarithm of the product of the bounds, so the gradient in one layer does not depend on the others.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lipkit.bounds import METHODS
from lipkit.bounds.power import farnia_lower_estimate
from lipkit.errors import NoRuleError, OptionError, check_choice, finite
from lipkit.proof.roundoff import to_double

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_REFUSED = (nn.Conv3d, nn.ConvTranspose3d)
# Bounds are raised to this, so that a layer of zeros has a finite logarithm, with gradient 0.
_SMALLEST = torch.finfo(torch.float32).tiny


def _farnia(kernel: Tensor, *, groups: int = 1) -> Tensor:
    height, width = (16 if size > 1 else 1 for size in kernel.shape[2:])  # a dense layer is one matrix
    found = [farnia_lower_estimate(part, height, width) for part in kernel.chunk(groups)]
    return to_double(torch.stack(found)).amax()


PENALTIES: dict[str, Callable[..., Tensor]] = {**METHODS, "farnia_lower_estimate": _farnia}
"""The methods of penalties, ``method(kernel, *, groups=1) -> 0-d float64``: bounds of the norm, and one estimate."""


@dataclass(frozen=True)
class LipschitzPenalty:
    r"""A term for the loss, for ``fit(..., penalty=...)``.

    .. math:: l_1 \sum_i \|\theta_i\|_F + l_2 \sum_i \log \text{bound}(\theta_i)

    over the convolutions (transposed ones too), dense layers and batch norms of any network. Each counts once, the last
    dense layer not at all, because it sets the scale of the logits. Other modules are not penalised.

    Args:
        method: bound of a kernel, a name of `lipkit.bounds.METHODS`: "lipbound" is the paper's, "symbol_sup" the
            tightest. Or "farnia_lower_estimate", the paper's baseline AT+PM: ten power iterations on a circular image
            of 16 x 16. That is an ESTIMATE from below, so the product is no bound. A dense layer is a 1 x 1 kernel. The
            bound of a batch norm is :math:`\max_c |\gamma_c| / \sqrt{v_c + \epsilon}` with the running variance v.
        weight: :math:`l_2`, not negative. The paper: 0.008 on CIFAR-10, 0.0006 to 0.001 on ImageNet.
        l1: :math:`l_1`, not negative; :math:`\theta_i` is the weight without bias.

    Guarantee:
        None. The network is trained to have a small bound; ``lipschitz`` or ``analyze`` compute one.

    Raises:
        OptionError: an option outside its range; when called, no layer to regularise.
        NoRuleError: when called, a 3-D convolution or a batch norm without running statistics.

    >>> net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1, eps=0.0), nn.Flatten(), nn.Linear(4, 2))
    >>> _ = nn.init.constant_(net[0].weight, 3.0), nn.init.constant_(net[1].weight, 2.0)
    >>> round(LipschitzPenalty("lipbound", weight=1.0)(net).exp().item(), 6)
    6.0

    References:
        [LipBound] section 5, "Lipschitz regularization" (equation for AT+LipReg).
    """

    method: str = "lipbound"
    weight: float = 0.008
    l1: float = 0.0

    def __post_init__(self) -> None:
        check_choice("method", self.method, PENALTIES)
        finite("weight", self.weight, least=0)
        finite("l1", self.l1, least=0)

    def __call__(self, model: nn.Module) -> Tensor:
        """The penalty, 0-d float64, differentiable in the model's parameters."""
        layers = list(regularised(model))
        if not layers:
            expected = "expected a network with convolutions, batch norms or two dense layers of torch.nn"
            raise OptionError(f"penalty: {expected}, got {type(model).__name__} without any")
        total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
        if self.weight:
            bounds = [layer_bound(layer, self.method, name).clamp_min(_SMALLEST) for name, layer in layers]
            total = total + self.weight * torch.stack(bounds).log().sum()
        if self.l1:
            for _, layer in layers:
                if isinstance(layer.weight, Tensor):  # a batch norm may have none
                    total = total + self.l1 * to_double(layer.weight).norm()
        return total


def regularised(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The penalised layers with their names, each once, in the order of registration; without the last linear layer."""
    dense = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for name, module in model.named_modules():
        if isinstance(module, _REFUSED):
            got = f"{type(module).__name__} at {name!r}"
            raise NoRuleError(f"penalty: expected convolutions of one or two dimensions, got {got}")
        if isinstance(module, (*_CONVOLUTIONS, nn.Linear, *_NORMS)) and module not in dense[-1:]:
            yield name, module


def layer_bound(module: nn.Module, method: str, name: str = "") -> Tensor:
    """The bound of one layer by ``method``, 0-d float64, differentiable (an estimate by ``farnia_lower_estimate``).

    It holds for zero padding of any width and for any stride and dilation. With reflected or replicated borders the
    norm can be larger.
    """
    if isinstance(module, _NORMS):
        if module.running_var is None:
            got = f"track_running_stats=False at {name!r}"
            raise NoRuleError(f"penalty: expected batch norm with running statistics, got {got}")
        scale = (to_double(module.running_var) + module.eps).rsqrt()
        return (scale if module.weight is None else scale * to_double(module.weight).abs()).amax()
    weight = module.weight
    assert isinstance(weight, Tensor)
    # As kernels of images: a dense layer has 1 x 1 taps, a signal has width 1. A transposed convolution has the norm of
    # its adjoint, the convolution with the same kernel.
    kernel = weight[(..., *[None] * (4 - weight.ndim))]
    groups = module.groups if isinstance(module, _CONVOLUTIONS) else 1
    return PENALTIES[method](kernel, groups=groups)
