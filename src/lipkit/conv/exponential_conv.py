r"""The exponential of a skew kernel, applied to images by its Taylor polynomial :math:`\sum_{i=0}^{T} A^i / i!`.

A kernel with :math:`K[s] = -K[-s]^\top` is a skew-symmetric convolution, with circular and with zero padding. Such an
operator A is normal with eigenvalues :math:`i\theta`, :math:`|\theta| \le \|A\|`, so :math:`e^A` is orthogonal. The
polynomial :math:`p_T(A)` has the singular values :math:`|p_T(i\theta)|`, which ``taylor_range`` bounds.

It is evaluated in one of three ways: on the **features**, by T convolutions (Singla & Feizi, ICML 2021, algorithm 1);
at the **frequencies** of the transformed images, by T products with the matrices of the symbol; or on the **symbol**,
by products of its matrices and one with the images.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from lipkit.conv.circular import circular_conv2d
from lipkit.conv.spectrum import apply_symbol, as_complex, at_frequencies, kernel_symbol
from lipkit.conv.symbol import check_images, check_kernel, fold
from lipkit.errors import OptionError, ShapeError
from lipkit.linalg.exponential import check_terms, taylor, taylor_products, taylor_range
from lipkit.linalg.matrices import at_least_float32
from lipkit.linalg.precision import autocast_off, autocast_on


def adjoint(kernel: Tensor) -> Tensor:
    """The kernel of the transposed convolution, of odd sizes: channels exchanged, taps reversed.

    Raises:
        ShapeError: an even kernel size; its reversed taps have another centre.

    >>> import torch
    >>> adjoint(torch.tensor([[[[1.0, 2.0, 3.0]]]])).flatten().tolist()
    [3.0, 2.0, 1.0]
    """
    check_kernel(kernel)
    if not (kernel.shape[2] % 2 and kernel.shape[3] % 2):
        raise ShapeError(f"kernel: expected odd sizes, got {tuple(kernel.shape[2:])}")
    return kernel.transpose(0, 1).flip(2, 3)


def skew(kernel: Tensor) -> Tensor:
    r"""Twice the skew part of M ``(c, c, kh, kw)``, of odd kh and kw: :math:`K[s] = M[s] - M[-s]^\top`.

    The result is skew to the last bit: each tap and its partner are one rounded difference with two signs. Its
    exponential is orthogonal (Singla & Feizi, ICML 2021, theorem 2).

    Raises:
        ShapeError: channels differ, or a size is even.

    >>> import torch
    >>> skew(torch.tensor([[[[1.0, 2.0, 4.0]]]])).flatten().tolist()
    [-3.0, 0.0, 3.0]
    """
    check_kernel(kernel)
    if kernel.shape[0] != kernel.shape[1]:
        raise ShapeError(f"kernel: expected as many outputs as inputs, got shape {tuple(kernel.shape)}")
    return kernel - adjoint(kernel)


def taylor_features(x: Tensor, apply: Callable[[Tensor], Tensor], terms: int) -> Tensor:
    r""":math:`p_T(A)\, x = \sum_{i=0}^{T} A^i x / i!` by :math:`x_i = A x_{i-1} / i`, ``apply`` being A."""
    check_terms(terms)
    y = x
    for i in range(1, terms + 1):
        x = apply(x) / i
        y = y + x
    return y


def taylor_rows(rows: Tensor, a: Tensor, terms: int, outputs: int, scale: Tensor | float = 1.0) -> Tensor:
    r"""The first ``outputs`` entries of :math:`p_T(A / s)\, x` for each row x, zero-padded, by Horner's scheme."""
    full, z = F.pad(rows, (0, a.shape[-1] - rows.shape[-1])), rows
    for i in range(terms, 0, -1):  # z <- x + A z / i, so that A^i gets 1 / i!
        m = a if z.shape[-1] == a.shape[-1] else a[..., : z.shape[-1]]  # first step: the zeros need no columns
        m = m[..., :outputs, :] if i == 1 and outputs < a.shape[-1] else m  # last step: only the rows kept
        z = full[..., : m.shape[-2]] + z @ m.mT / (i * scale)
    return z


def taylor_norm(angle: float, error: float, terms: int) -> float:
    r"""Upper bound of :math:`\|p_T(S + E)\|` for a skew S of norm at most ``angle`` and any E of at most ``error``.

    .. math:: \|p_T(S + E)\| \le \max_{|\theta| \le a} |p_T(i\theta)| + \sum_i \frac{(a + e)^i - a^i}{i!}
              \le \max_{|\theta| \le a} |p_T(i\theta)| + e\, e^{a + e}

    :math:`p_T` is `taylor` with T = ``terms``; a = ``angle``, e = ``error``. Rounded up; ``inf`` if a + e > 100.

    >>> taylor_norm(1.0, 0.0, 3), taylor_norm(1.0, 0.1, 3) > 1.3
    (1.0, True)
    """
    if not angle + error <= 100:  # true for NaN, too
        return math.inf
    gain = taylor_range(angle, terms)[1]
    return gain if error == 0 else (gain + error * math.exp(angle + error)) * (1 + 1e-12)


Way = Literal["features", "frequencies", "symbol"]
# Largest symbol, in numbers: 256 MiB in float32, and a training step holds several.
MOST_NUMBERS = 2**26
# Speed-up of a convolution of features by autocast to bfloat16.
HALF_GAIN = 2.5


def operations(channels: int, kernel_size: tuple[int, int], pixels: int, batch: int, terms: int) -> dict[Way, float]:
    """Number of real operations for each ``way`` of `exponential_conv2d`; only 'features' if a symbol is too large.

    >>> few, many = operations(64, (3, 3), 256, 128, 5), operations(512, (3, 3), 16, 32, 5)
    >>> min(few, key=few.get), min(many, key=many.get)
    ('symbol', 'frequencies')
    """
    taps, numbers = math.prod(kernel_size), pixels * channels**2
    counts: dict[Way, float] = {"features": 2.0 * terms * taps * batch * numbers}
    if numbers <= MOST_NUMBERS:
        # Both other ways make the symbol and transform the images there and back; their products are complex.
        both = 2.0 * taps * numbers + 8 * math.sqrt(pixels) * batch * pixels * channels
        counts["frequencies"] = both + 4.0 * terms * batch * numbers
        counts["symbol"] = both + 4.0 * taylor_products(terms) * numbers * channels + 4.0 * batch * numbers
    return counts


def exponential_conv2d(
    kernel: Tensor, x: Tensor, terms: int, outputs: int | None = None, *, way: Way | None = None
) -> Tensor:
    r"""The Taylor polynomial :math:`\sum_{i=0}^{T} K^{*i} * x / i!` of a circular convolution.

    Args:
        kernel: K, ``(c, c, kh, kw)`` of the dtype of x; larger than the image is allowed.
        x: ``(B, n, h, w)`` with n <= c; missing channels are zeros.
        terms: T, the highest power.
        outputs: how many channels of the result ``(B, outputs, h, w)`` are kept, by default c.
        way: 'features' (Singla & Feizi, ICML 2021, algorithm 1), 'frequencies' or 'symbol'; by default the cheapest.
            Under autocast, products of features run in its dtype, all others in that of the kernel, and 'frequencies'
            is not chosen.

    Raises:
        ShapeError: the kernel has not as many outputs as inputs, or fewer channels than x. OptionError: another way, or
            terms out of range.

    >>> import torch
    >>> turn = torch.tensor([[0.0, -torch.pi / 2], [torch.pi / 2, 0.0]])[:, :, None, None]
    >>> x = torch.tensor([1.0, 0.0]).reshape(1, 2, 1, 1)
    >>> exponential_conv2d(turn, x, 15).flatten().round(decimals=4).abs().tolist()
    [0.0, 1.0]
    """
    check_kernel(kernel)
    check_terms(terms)
    batch, given, h, w = check_images(x)
    c = len(kernel)
    if kernel.shape[1] != c or given > c:
        raise ShapeError(
            f"kernel: expected as many outputs as inputs, at least {given}, got shape {tuple(kernel.shape)}"
        )
    if way is not None and way not in get_args(Way):
        raise OptionError(f"way: expected None or one of {', '.join(get_args(Way))}, got {way!r}")
    outputs = c if outputs is None else outputs
    if way is None:
        counts = operations(c, (kernel.shape[2], kernel.shape[3]), h * w, batch, terms)
        if autocast_on(x):
            counts.pop("frequencies", None)
            counts["features"] /= HALF_GAIN  # their convolutions run in the dtype of autocast
        way = min([(cost, each) for each, cost in counts.items()])[1]  # a list: torch.compile traces no generator
    if way == "features":
        folded = fold(kernel, h, w)
        padded = F.pad(x, (0, 0, 0, 0, 0, c - given))
        return taylor_features(padded, lambda term: circular_conv2d(term, folded), terms)[:, :outputs]
    with autocast_off(x):
        raw = kernel_symbol(at_least_float32(kernel), h, w)
        if way == "frequencies":
            powers = partial(taylor_rows, terms=terms, outputs=outputs)
            return at_frequencies(powers, x.to(raw.real.dtype), [raw.real], [as_complex(raw.pair)]).to(x.dtype)
        raw = raw.map(lambda part: taylor(part, terms)[:, :outputs, :given])
    return apply_symbol(raw.to(kernel.dtype), x)
