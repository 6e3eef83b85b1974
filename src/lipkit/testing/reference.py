"""Singular values and norms of a layer by applying it, independent of its formulas; numpy in float64."""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lipkit.modules import Shape


def tolerance(n: int, dtype: torch.dtype, c: float = 4.0) -> float:
    r"""Relative rounding allowance :math:`c \, n \, \varepsilon` of an operation on ``n`` numbers of this dtype."""
    return c * n * torch.finfo(dtype).eps


Function = Callable[[Tensor], Tensor]
Matrix = NDArray[np.float64]


def dense_matrix(f: Function, input_shape: Shape, dtype: torch.dtype = torch.float64) -> Matrix:
    """The matrix ``(outputs, inputs)`` of an affine map, whose columns are ``f(e_i) - f(0)`` for the unit vectors.

    ``f`` maps ``(B, *input_shape)`` of this dtype to ``(B, ...)``; the matrix is float64.

    >>> dense_matrix(lambda x: 2 * x + 1, (2,)).tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    n = math.prod(input_shape)
    points = torch.cat((torch.zeros(1, n, dtype=dtype), torch.eye(n, dtype=dtype)))  # the first one gives the bias
    with torch.no_grad():
        y = f(points.reshape(n + 1, *input_shape)).flatten(1).double().numpy()
    return (y[1:] - y[0]).T  # row i of y is the image of e_i: a column


def jacobians(f: Function, x: Tensor) -> list[Matrix]:
    """The Jacobian ``(outputs, inputs)`` at each point of ``x`` ``(B, *input_shape)``, by one backward pass.

    Samples of a batch must not depend on each other.

    >>> jacobians(torch.square, torch.tensor([[1.0, 3.0]]))[0].tolist()
    [[2.0, 0.0], [0.0, 6.0]]
    """
    with torch.no_grad():
        outputs = f(x[:1]).numel()
    copies = x.detach().repeat_interleave(outputs, 0).requires_grad_()  # each point once for each of its outputs
    with torch.enable_grad():
        # Output i of copy i, from the diagonal, has row i of the Jacobian as its gradient.
        own = f(copies).reshape(len(x), outputs, outputs).diagonal(dim1=1, dim2=2)
        (rows,) = torch.autograd.grad(own.sum(), copies)
    return list(rows.reshape(len(x), outputs, -1).double().numpy())


def is_affine(f: Function, x: Tensor) -> bool:
    """True if ``f(a) + f(b) - f(0) = f(a + b)`` up to rounding, for pairs and opposite points of ``x``.

    >>> x = torch.randn(4, 3)
    >>> is_affine(lambda x: 2 * x + 1, x), is_affine(torch.relu, x)
    (True, False)
    """
    with torch.no_grad():
        # Opposite points detect a kink along a plane through 0.
        a, b = torch.cat((4 * x, 4 * x)), torch.cat((4 * x.roll(1, 0), -4 * x))
        zero, first, second, whole = f(torch.cat((0 * x[:1], a, b, a + b))).split((1, *[len(a)] * 3))
        parts = first + second - zero
    allowed = tolerance(64 * x[0].numel(), x.dtype)  # three evaluations, far from the origin
    return float((parts - whole).norm()) <= allowed * max(float(whole.norm()), float(parts.norm()))


def operators(f: Function, x: Tensor) -> list[Matrix]:
    """The matrix of ``f`` if it is affine, else its Jacobians at the points of ``x``."""
    return [dense_matrix(f, tuple(x.shape[1:]), x.dtype)] if is_affine(f, x) else jacobians(f, x)


def singular_values(matrices: list[Matrix]) -> Matrix:
    """All singular values of all matrices, in float64."""
    return np.concatenate([np.linalg.svd(m, compute_uv=False) for m in matrices])


def steepest_secant(f: Function, x: Tensor) -> float:
    """The largest ``||f(x) - f(y)|| / ||x - y||`` over pairs of points, far and near: a lower estimate."""
    # Pairs of samples, the same direction at 1/16 of the distance, and two pairs far out on one ray.
    starts = torch.cat((x, x, x, 100 * x))
    ends = torch.cat((x.roll(1, 0), x + (x.roll(1, 0) - x) / 16, 1000 * x, 200 * x))
    with torch.no_grad():
        there, here = f(torch.cat((ends, starts))).double().chunk(2)
    rise, run = ((to - at).flatten(1).norm(dim=1) for to, at in ((there, here), (ends.double(), starts.double())))
    return float((rise / run).max())
