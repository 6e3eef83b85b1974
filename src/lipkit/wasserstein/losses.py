r"""The losses that a critic f minimises, so that it becomes high on P and low on Q.

``fx`` and ``fy``, of any shape, are the values of f on samples of P and of Q.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lipkit.errors import finite


def kr_loss(fx: Tensor, fy: Tensor) -> Tensor:
    r"""The dual objective of Kantorovich and Rubinstein, with the sign of a loss.

    .. math:: \mathrm{mean}_j\, f(y_j) - \mathrm{mean}_i\, f(x_i)

    Over all L-Lipschitz f the infimum of its expectation is :math:`-L\, W_1(P, Q)`.

    >>> import torch
    >>> kr_loss(torch.tensor([2.0, 4.0]), torch.tensor([1.0])).item()
    -2.0

    References:
        Arjovsky, Chintala, Bottou, "Wasserstein Generative Adversarial Networks", ICML 2017, equation 2.
    """
    return fy.mean() - fx.mean()


def hinge_kr_loss(fx: Tensor, fy: Tensor, *, alpha: float = 10.0, margin: float = 1.0) -> Tensor:
    r"""The dual objective plus a hinge, which makes the sign of f separate P and Q by a margin.

    .. math:: \mathrm{mean}\, f(y) - \mathrm{mean}\, f(x)
              + \tfrac\alpha2 \big(\mathrm{mean}\, (m - f(x))_+ + \mathrm{mean}\, (m + f(y))_+\big)

    P and Q have the weight 1/2 each in the hinge, whatever the numbers of samples.

    Raises:
        OptionError: ``alpha`` (the weight of the hinge) is negative, or ``margin`` (m, in units of f) is not positive.

    >>> import torch
    >>> hinge_kr_loss(torch.tensor([2.0]), torch.tensor([-0.5]), alpha=10.0).item()
    0.0

    References:
        Serrurier et al., "Achieving robustness in classification using optimal transport with hinge regularization",
        CVPR 2021, section 3.
    """
    alpha, margin = finite("alpha", alpha, least=0), finite("margin", margin, positive=True)
    return kr_loss(fx, fy) + alpha / 2 * (F.relu(margin - fx).mean() + F.relu(margin + fy).mean())
