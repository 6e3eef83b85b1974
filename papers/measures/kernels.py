"""Bounds and estimates of convolutions against the true norm, and how well layers keep the norm of their inputs."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor, nn

from lipkit import data as datasets
from lipkit.bounds import METHODS, circular, lipbound, lipbound_estimate
from lipkit.bounds.power import farnia_lower_estimate
from lipkit.data import Split
from lipkit.errors import OptionError
from lipkit.layers import EcoConv2d
from lipkit.layers.families import get
from lipkit.linalg.exponential import skew_bound, skew_part, taylor
from lipkit.linalg.precision import on_threads
from lipkit.models import lipconvnet
from papers.measures.networks import Conv, power_method

SIDE = 32  # height and width of the images in tables of bounds


def methods(n: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Name -> bound, or one of the papers' reference estimates, of a kernel on images of n x n.

    >>> sorted(set(methods(32)) - set(METHODS))  # doctest: +NORMALIZE_WHITESPACE
    ['circular', 'circular, mean', 'farnia_lower_estimate', "lipbound, paper's factor", 'lipbound_estimate',
    'power method', 'symbol on 10 x 10']
    """
    return {
        **METHODS,
        "lipbound, paper's factor": lambda k: lipbound(k, correction="paper"),
        "circular": lambda k: circular(k, n, n),
        "circular, mean": lambda k: singular_values(k, n).mean(),
        "lipbound_estimate": lipbound_estimate,
        "symbol on 10 x 10": lambda k: singular_values(k, 10).amax(),
        "power method": lambda k: power_method(k, Conv(k.shape[1], k.shape[0], k.shape[2], 1, n)),
        "farnia_lower_estimate": lambda k: farnia_lower_estimate(k, n, n),
    }


def singular_values(kernel: Tensor, n: int) -> Tensor:
    """Singular values (n, n, min(cout, cin)) of the circular convolution on n x n pixels, one set for each frequency.

    >>> singular_values(torch.ones(1, 1, 1, 1), 2).flatten().tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    return torch.linalg.svdvals(torch.fft.fft2(kernel.double(), (n, n)).permute(2, 3, 0, 1))


def true_norm(kernel: Tensor, n: int) -> float:
    """Norm of the convolution with zero padding (k - 1) // 2 on n x n pixels, by Lanczos iteration in float64.

    >>> round(true_norm(torch.ones(1, 1, 1, 1), 4), 9)
    1.0
    """
    k = kernel.double()
    p = (k.shape[-1] - 1) // 2
    shape_in = (1, k.shape[1], n, n)
    shape_out = F.conv2d(torch.zeros(shape_in, dtype=k.dtype), k, padding=p).shape

    def forward(v: np.ndarray) -> np.ndarray:
        return F.conv2d(torch.from_numpy(v.reshape(shape_in).copy()), k, padding=p).numpy().ravel()

    def adjoint(v: np.ndarray) -> np.ndarray:
        return F.conv_transpose2d(torch.from_numpy(v.reshape(shape_out).copy()), k, padding=p).numpy().ravel()

    size = (int(np.prod(shape_out)), int(np.prod(shape_in)))
    operator: Any = LinearOperator(size, matvec=forward, rmatvec=adjoint, dtype=np.float64)  # type: ignore[call-arg, misc]
    if min(size) <= 64:
        dense = np.stack([forward(e) for e in np.eye(size[1])], 1)
        return float(np.linalg.norm(dense, 2))
    return float(svds(operator, k=1, tol=1e-6, return_singular_vectors=False, random_state=0)[0])


def random_kernel(*shape: int, seed: int) -> Tensor:
    """A kernel of independent standard normal entries."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained_kernel(images: Split, *, seed: int, steps: int) -> Tensor:
    """The kernel (32, 3, 3, 3) of the first layer of a small CNN after ``steps`` steps of Adam on ``images``.

    >>> images = Split(torch.rand(8, 3, 32, 32), torch.arange(8))
    >>> trained_kernel(images, seed=0, steps=1).shape
    torch.Size([32, 3, 3, 3])
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first, second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, stride=2)
        model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.AvgPool2d(3), nn.Flatten(), nn.Linear(800, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
        for _ in range(steps):
            x, y = images.batch(torch.randint(len(images), (32,)))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return first.weight.detach()


def kernel_bounds(
    *,
    seed: int = 0,
    root: Path | None = None,
    method: str,
    shape: Sequence[int],
    kernels: int = 20,
    data: str = "",
    steps: int = 150,
) -> dict[str, float]:
    """Mean ratio of a method's value to the true norm on SIDE x SIDE images, and its median process time on one thread.

    Args:
        seed: number of the set of kernels; sets share no kernel.
        method: a name in `methods`.
        shape: of the kernels, (cout, cin, k, k).
        kernels: number of kernels.
        data: data set on which `trained_kernel` trains each kernel; empty for `random_kernel`.
        steps: steps of that training.

    Returns:
        ``ratio``, its standard deviation ``ratio_deviation``, and ``ms``.
    """
    table = methods(SIDE)
    if method not in table:
        raise OptionError(f"expected method as one of {', '.join(table)}, got {method!r}")
    ratios, times = [], []
    images = datasets.load(data, root=root).train if data else None
    with on_threads(1):
        for number in range(seed * kernels, (seed + 1) * kernels):
            kernel = random_kernel(*shape, seed=number)
            if images is not None:
                kernel = trained_kernel(images, seed=number, steps=steps)[: shape[0]]
            start = time.process_time()
            value = float(table[method](kernel))
            times.append(time.process_time() - start)
            ratios.append(value / true_norm(kernel, SIDE))
    return {"ratio": statistics.fmean(ratios), "ratio_deviation": statistics.pstdev(ratios),
            "ms": 1e3 * statistics.median(times)}  # fmt: skip


def gap(*, seed: int = 0, shape: Sequence[int], sizes: Sequence[int]) -> dict[str, float]:
    """LipBound of a random kernel, maximised over a grid of 400 x 400, minus the kernel's norm on n x n images.

    Args:
        shape: of the kernel, (cout, cin, k, k).
        sizes: values of n.

    Returns:
        ``gap(N)`` for each size.

    >>> found = gap(shape=[1, 2, 3, 3], sizes=[4, 8])
    >>> found["gap(4)"] > found["gap(8)"] > 0
    True
    """
    kernel = random_kernel(*shape, seed=seed)
    bound = float(lipbound_estimate(kernel, points=400))
    return {f"gap({n})": bound - true_norm(kernel, n) for n in sizes}


def modulus(*, seed: int = 0, size: int, points: int = 24) -> dict[str, float]:
    r"""The modulus of :math:`f(\omega) = \sum_h k_h e^{i h \cdot \omega}` for a random kernel, on a grid.

    Args:
        size: height and width of the kernel.
        points: points on each axis of the grid, which divides [0, 2 pi).

    Returns:
        ``modulus(I,J)`` at the point I, J of the grid, and the ``largest`` of these values.
    """
    values = singular_values(random_kernel(1, 1, size, size, seed=seed), points)[..., 0]
    figures = {f"modulus({i},{j})": float(values[i, j]) for i in range(points) for j in range(points)}
    return {"largest": float(values.max()), **figures}


def truncation(*, seed: int = 0, terms: int, width: float = 1.0) -> dict[str, float]:
    r"""Truncation error of the exponentials in the ECO layers of an untrained LipConvnet-5, in float64.

    .. math:: \|\exp(A) - p_T(A)\|_2, \qquad \Big|\frac{\|\mathrm{conv}(x)\|}{\|x\|} - 1\Big|

    A are the layers' skew matrices, of norm close to 1, and x is normal.

    Args:
        terms: degree T of the Taylor polynomial p_T.
        width: of the network.

    Returns:
        The means ``error``, over all matrices, and ``deviation``, over all layers that keep every dimension of x;
        ``worst``, the largest error of a matrix that is rescaled to ``||A|| = 1``.

    >>> found = truncation(terms=5, width=0.125)
    >>> found["error"] < found["worst"] < 0.0015
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = lipconvnet(5, width=width).double()
        errors: list[Tensor] = []
        worst: list[Tensor] = []
        deviations: list[Tensor] = []
        for layer in model:
            if not isinstance(layer, EcoConv2d):
                continue
            skew = skew_part(layer.free.detach())
            errors.append(_taylor_error(skew / skew_bound(skew, layer.squarings)[:, None, None], terms).mean())
            worst.append(_taylor_error(skew / torch.linalg.matrix_norm(skew, 2)[:, None, None], terms).max())
            layer.eval_terms = terms
            side = layer.kernel_size[0] * layer.stride
            x = torch.randn(8, layer.in_channels, side, side, dtype=torch.float64)
            # A layer with fewer outputs than inputs drops a part of x, whatever the truncation.
            if layer.in_channels * layer.stride**2 <= layer.out_channels:
                with torch.no_grad():
                    y = layer.eval()(x) - (0 if layer.bias is None else layer.bias[:, None, None])
                deviations.append((y.norm() / x.norm() - 1).abs())
    return {
        "error": float(torch.stack(errors).mean()),
        "worst": float(torch.stack(worst).max()),
        "deviation": float(torch.stack(deviations).mean()) if deviations else 0.0,
    }


def _taylor_error(a: Tensor, terms: int) -> Tensor:
    return torch.linalg.matrix_norm(torch.linalg.matrix_exp(a) - taylor(a, terms), 2)


def norm_preservation(
    *,
    seed: int = 0,
    family: str = "cayley",
    channels: Sequence[int],
    side: int = 16,
    steps: int = 0,
    samples: int = 256,
) -> dict[str, float]:
    r"""The quotient :math:`\|f(x)\| / \|x\|` for normal x and a chain f of convolutions without biases.

    Args:
        family: acronym of the layers.
        channels: (c0, c1, ..., ck) of a chain of k layers.
        side: height and width of the images.
        steps: steps of Adam at rate 0.01 towards random outputs, so that trained weights are measured; 0 for initial
            ones.
        samples: number of inputs.

    Returns:
        ``smallest`` and ``largest`` quotient; ``ppm(Q)``, every fifth percentile Q of the quotient minus 1, in
        millionths; for a chain of several layers ``after(K)``, the mean quotient after K layers.

    >>> found = norm_preservation(channels=[2, 4], side=4, samples=8)
    >>> 0.99999 < found["smallest"] <= found["largest"] < 1.00001
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pairs = pairwise(channels)
        chain = nn.Sequential(*(get(family).conv(cin, cout, 3, bias=False) for cin, cout in pairs))
        x = torch.randn(samples, channels[0], side, side)
        target = torch.randn(min(samples, 32), channels[-1], side, side)
        optimizer = torch.optim.Adam(chain.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            F.mse_loss(chain(x[: len(target)]), target).backward()
            optimizer.step()
        after: list[Tensor] = []
        with torch.no_grad():
            y = x
            for layer in chain.eval():
                y = layer(y)
                after.append(_norms(y) / _norms(x))
    quotient = after[-1]
    percentages = torch.linspace(0, 1, 21, dtype=torch.float64)
    ppm = 1e6 * (quotient.quantile(percentages) - 1)
    figures = {"smallest": float(quotient.min()), "largest": float(quotient.max())}
    figures |= {f"ppm({round(100 * float(q))})": float(v) for q, v in zip(percentages, ppm, strict=True)}
    return figures | {f"after({k})": float(v.mean()) for k, v in enumerate(after, 1) if len(after) > 1}


def _norms(x: Tensor) -> Tensor:
    return x.double().flatten(1).norm(dim=1)
