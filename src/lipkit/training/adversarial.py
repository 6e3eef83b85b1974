"""Adversarial training: each batch is replaced by adversarial examples against the current network."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lipkit.attacks.ascent import BALLS, Box
from lipkit.attacks.pgd import LOSSES, pgd
from lipkit.errors import NoRuleError, OptionError, check_choice, finite, interval
from lipkit.linalg.matrices import check_positive
from lipkit.lowering import export

Adversary = Callable[[nn.Module, Tensor, Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class PgdAdversary:
    r"""Adversarial examples by projected gradient ascent, for ``fit(..., adversary=...)``.

    .. math:: \min_\theta \mathbb{E} \max_{\|t\| \le \epsilon} \text{loss}(N_\theta(x + t), y)

    The attack runs in evaluation mode: the examples of a batch do not depend on each other, and running statistics do
    not change. The training step runs in training mode. If the network has constrained layers, the attack uses its
    ``export``, which builds the weights once for all steps.

    Args:
        norm: "linf" or "l2".
        eps: radius of the ball, in units of the input, positive: 8/255 (linf) for CIFAR in the paper.
        steps: gradient steps: 10 in the paper.
        step_size: of each step, as a fraction of eps: 1/5 in the paper; None for the decreasing steps of the attacks.
        random_start: whether ascent starts at a random point of the ball rather than at the sample.
        loss: what the attack raises, "ce" or "margin".
        box: the range of valid input entries, None for no limit.
        beside: True trains on the samples followed by their examples, as ``losses.trades`` needs. By default the
            examples replace the samples.

    Raises:
        OptionError: an option outside its range.

    >>> adversary = PgdAdversary("linf", eps=0.25, steps=4, random_start=False)
    >>> net = nn.Linear(2, 2, bias=False)
    >>> _ = net.weight.data.copy_(torch.eye(2))
    >>> adversary(net.eval(), torch.tensor([[0.5, 0.5]]), torch.tensor([0]), torch.Generator()).round(decimals=4)
    tensor([[0.3000, 0.7000]])

    References:
        Madry et al., "Towards deep learning models resistant to adversarial attacks", ICLR 2018; [LipBound] section 6.
    """

    norm: Literal["linf", "l2"] = "linf"
    eps: float = 8 / 255
    steps: int = 10
    step_size: float | None = 0.2
    random_start: bool = True
    loss: Literal["ce", "margin"] = "ce"
    box: Box = (0.0, 1.0)
    beside: bool = False

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, BALLS)
        check_choice("loss", self.loss, LOSSES)
        check_positive(steps=self.steps)
        if self.box is not None:
            interval("box", self.box, finite=False)
        finite("eps", self.eps, positive=True)
        if self.step_size is not None:
            finite("step_size", self.step_size, positive=True)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        """Adversarial examples for ``model``, which is in evaluation mode; its parameters get no gradient."""
        if y.is_floating_point():
            raise OptionError(f"adversary: expected integer labels (classification), got targets of {y.dtype}")
        attacked = frozen(model, tuple(x.shape[1:]))
        dtype = next((p.dtype for p in (*attacked.parameters(), *attacked.buffers()) if p.is_floating_point()), x.dtype)
        # PGD works in the dtype of the samples, the network in its own.
        return pgd(
            lambda points: attacked(points.to(dtype)).to(points.dtype), x, y, eps=self.eps, norm=self.norm,
            steps=self.steps if self.step_size is None else [self.step_size] * self.steps, box=self.box,
            loss=self.loss, generator=generator, stop_early=False, random_start=self.random_start,
        )  # fmt: skip


def frozen(model: nn.Module, input_shape: tuple[int, ...]) -> nn.Module:
    """The network to attack in training: an export if that saves building weights, else ``model`` itself."""
    # Only lipkit's modules with parameters build weights in every forward pass.
    ours = (m for m in model.modules() if type(m).__module__.startswith(("lipkit.layers.", "lipkit.models.")))
    if all(next(module.parameters(recurse=False), None) is None for module in ours):
        return model
    try:
        return export(model, input_shape)
    except (NoRuleError, OptionError):  # the gradient is the same, only slower
        return model
