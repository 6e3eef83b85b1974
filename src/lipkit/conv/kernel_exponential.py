r"""The exponential in the algebra of kernels, by its Taylor polynomial :math:`p_T(A) = \sum_{i=0}^{T} A^i / i!`.

A kernel with :math:`K[s] = -K[-s]^\top` is a skew-symmetric convolution, with circular and with zero padding. Such an
operator is normal with eigenvalues :math:`i\theta`, :math:`|\theta| \le \|A\|`, so :math:`e^A` is orthogonal and the
singular values of :math:`p_T(A)` are :math:`|p_T(i\theta)|`, which ``linalg.exponential.taylor_range`` bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from lipkit.conv.symbol import check_kernel
from lipkit.errors import ShapeError
from lipkit.linalg.exponential import check_terms, taylor_range


def adjoint(kernel: Tensor) -> Tensor:
    """The kernel of the transposed convolution: channels exchanged, taps reversed (odd sizes keep their centre).

    Raises:
        ShapeError: an even kernel size, whose reversed taps have another centre.

    >>> import torch
    >>> adjoint(torch.tensor([[[[1.0, 2.0, 3.0]]]])).flatten().tolist()
    [3.0, 2.0, 1.0]
    """
    check_kernel(kernel)
    if not (kernel.shape[2] % 2 and kernel.shape[3] % 2):
        raise ShapeError(f"kernel: expected odd sizes, got {tuple(kernel.shape[2:])}")
    return kernel.transpose(0, 1).flip(2, 3)


def skew(kernel: Tensor) -> Tensor:
    r"""The skew part, without the half: :math:`K[s] = M[s] - M[-s]^\top`.

    The result is skew to the last bit: each tap and its partner are one rounded difference with two signs.

    Args:
        kernel: M, ``(c, c, kh, kw)`` with odd kh and kw.

    Raises:
        ShapeError: channels differ, or a size is even.

    >>> import torch
    >>> skew(torch.tensor([[[[1.0, 2.0, 4.0]]]])).flatten().tolist()
    [-3.0, 0.0, 3.0]

    References:
        Singla & Feizi, ICML 2021, theorem 2.
    """
    check_kernel(kernel)
    if kernel.shape[0] != kernel.shape[1]:
        raise ShapeError(f"kernel: expected as many outputs as inputs, got shape {tuple(kernel.shape)}")
    return kernel - adjoint(kernel)


def taylor_features(x: Tensor, apply: Callable[[Tensor], Tensor], terms: int) -> Tensor:
    r""":math:`p_T(A)\, x = \sum_{i=0}^{T} A^i x / i!` by the recurrence :math:`x_i = A x_{i-1} / i`.

    Args:
        x: any tensor that ``apply`` keeps the shape of.
        apply: the linear map A.
        terms: T, the highest power, at least 1.

    Cost:
        T applications of A.

    Raises:
        OptionError: ``terms`` below 1.

    >>> import torch
    >>> round(float(taylor_features(torch.tensor(1.0), lambda x: x, 10)), 5)
    2.71828
    """
    check_terms(terms)
    y = x
    for i in range(1, terms + 1):
        x = apply(x) / i
        y = y + x
    return y


def taylor_norm(angle: float, error: float, terms: int) -> float:
    r"""Upper bound of :math:`\|p_T(S + E)\|` for a skew S of norm at most ``angle`` and any E of at most ``error``.

    .. math:: \|p_T(S + E)\| \le \max_{|\theta| \le a} |p_T(i\theta)| + \sum_i \frac{(a + e)^i - a^i}{i!}
              \le \max_{|\theta| \le a} |p_T(i\theta)| + e\, e^{a + e}

    Args:
        angle: a, at least 0. error: e, at least 0. terms: T.

    Returns:
        The bound, rounded up; ``inf`` where one of the two is not finite or their sum exceeds 100.

    >>> taylor_norm(1.0, 0.0, 3), taylor_norm(1.0, 0.1, 3) > 1.3
    (1.0, True)
    """
    if not angle + error <= 100:
        return math.inf
    gain = taylor_range(angle, terms)[1]
    if error == 0:
        return gain
    return (gain + error * math.exp(angle + error)) * (1 + 1e-12)
