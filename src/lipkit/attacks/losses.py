r"""The losses that attacks raise: differences of logits, per sample, positive where the sample is misclassified.

With logits y, label t and target i

    margin               max_{i != t} y_i - y_t
    dlr                  (max_{i != t} y_i - y_t) / (y_(1) - y_(3))
    targeted margin      y_i - y_t
    targeted dlr         (y_i - y_t) / (y_(1) - (y_(3) + y_(4)) / 2)

where ``y_(1) >= y_(2) >= ...`` are the sorted logits. DLR does not change with the scale or the offset of the logits;
it needs 3 classes, its targeted form 4. Cross-entropy is offered for comparison: it overstates robustness.

References: Croce & Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
attacks", ICML 2020, equations 6 and 7.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.attacks.ascent import Model, check_logits, margin_loss, misclassified
from lipkit.errors import OptionError, ShapeError, check_choice, rewording

LOSSES = ("margin", "dlr", "ce")
_TINY = 1e-12  # added to the denominator of DLR: equal logits give 0 rather than NaN


def rise(logits: Tensor, labels: Tensor, loss: str, target: Tensor | None = None) -> Tensor:
    """The named loss of each sample (N,); with ``target`` (N,), its targeted form."""
    if loss == "ce":
        if target is None:
            return F.cross_entropy(logits, labels, reduction="none")
        return -F.cross_entropy(logits, target, reduction="none")  # towards the target its cross-entropy falls
    own = logits.gather(1, labels[:, None])[:, 0]
    gap = margin_loss(logits, labels) if target is None else logits.gather(1, target[:, None])[:, 0] - own
    if loss == "margin":
        return gap
    first = logits.topk(3 if target is None else 4, dim=1).values
    spread = first[:, 0] - (first[:, 2] if target is None else first[:, 2:].mean(dim=1))
    return gap / (spread + _TINY)


def check_loss(loss: str, classes: int, *, targeted: bool) -> None:
    """Raise unless the loss is known and defined for this many classes.

    >>> check_loss("dlr", 3, targeted=True)
    Traceback (most recent call last):
    lipkit.errors.OptionError: expected at least 4 classes for the targeted loss 'dlr', got 3
    """
    check_choice("loss", loss, LOSSES)
    least = (4 if targeted else 3) if loss == "dlr" else 2
    if classes < least:
        raise OptionError(
            f"expected at least {least} classes for the {'targeted ' * targeted}loss {loss!r}, got {classes}"
        )


def first_logits(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """(N, K) logits of the samples, without gradients; raise unless model, samples and labels fit together."""
    given = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    start = f"expected inputs that the model accepts, got {given}: "
    with torch.no_grad(), rewording(ShapeError, start, RuntimeError, ValueError, TypeError):
        logits = model(x)
    check_logits(logits, y)
    return logits.detach()


def correct_samples(model: Model, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(M,) indices of the samples that the model classifies correctly, and their logits (M, K)."""
    if not len(x):
        return torch.arange(0, device=x.device), x.new_zeros(0, 2)
    logits = first_logits(model, x, y)
    index = (~misclassified(logits, y)).nonzero()[:, 0]
    return index, logits[index]


def rivals(logits: Tensor, labels: Tensor, count: int | None = None) -> Tensor:
    """(N, min(count, K - 1)) wrong classes of each sample, the largest logit first; all for ``count=None``."""
    order = logits.scatter(1, labels[:, None], -torch.inf).argsort(dim=1, descending=True, stable=True)[:, :-1]
    return order if count is None else order[:, :count]


def value_and_gradient(
    model: Model, point: Tensor, labels: Tensor, loss: str, target: Tensor | None = None, *, gradient: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each sample (infinity for NaN), the logits, and the gradient of the loss with respect to ``point``.

    Parameters get no gradient. With ``gradient=False`` the returned gradient is 0.
    """
    with torch.set_grad_enabled(gradient):
        point = point.detach().requires_grad_(gradient)
        logits = model(point)
        check_logits(logits, labels)
        value = rise(logits, labels, loss, target)
        slope = torch.autograd.grad(value.sum(), point)[0] if value.requires_grad else torch.zeros_like(point)
    return value.detach().nan_to_num(nan=torch.inf), logits.detach(), slope
