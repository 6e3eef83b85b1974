"""Independent references: the sparse matrix of a convolution, its largest singular value, suprema of symbols."""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize
from scipy.sparse import coo_matrix, csr_matrix
from scipy.sparse.linalg import ArpackError, svds
from torch import Tensor


def conv_matrix(
    kernel: Tensor,
    n: int,
    *,
    padding: int = 0,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    mode: str = "zeros",
) -> csr_matrix:
    """The matrix of ``nn.Conv2d`` on an ``n x n`` image, by loops over taps."""
    k = kernel.detach().double().numpy()
    cout, cin, kh, kw = k.shape
    high, wide = ((n + 2 * padding - (size - 1) - 1) // stride + 1 for size in (kh, kw))
    i, j = (a.ravel() for a in np.meshgrid(np.arange(high), np.arange(wide), indexing="ij"))
    rows, columns, values = [], [], []
    for o in range(cout):
        group = o // (cout // groups)
        for c in range(cin):
            for s in range(kh):
                for t in range(kw):
                    y, x = i * stride + s - padding, j * stride + t - padding
                    if mode == "circular":
                        y, x, inside = y % n, x % n, np.ones_like(y, bool)
                    elif mode == "replicate":
                        y, x, inside = y.clip(0, n - 1), x.clip(0, n - 1), np.ones_like(y, bool)
                    elif mode == "reflect":
                        y, x = (n - 1 - np.abs(n - 1 - np.abs(a)) for a in (y, x))
                        inside = np.ones_like(y, bool)
                    else:
                        inside = (y >= 0) & (y < n) & (x >= 0) & (x < n)
                    rows.append((o * high * wide + i * wide + j)[inside])
                    columns.append(((group * cin + c) * n * n + y * n + x)[inside])
                    values.append(np.full(inside.sum(), k[o, c, s, t]))
    shape = (cout * high * wide, cin * groups * n * n)
    entries = (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))
    return coo_matrix(entries, shape=shape).tocsr()


def norm(matrix: csr_matrix) -> float:
    """Largest singular value: dense where small, else converged Lanczos (which is never above it)."""
    if min(matrix.shape) <= 300:
        return float(np.linalg.norm(matrix.toarray(), 2))
    try:
        return float(svds(matrix, k=1, return_singular_vectors=False, tol=1e-9, random_state=0)[0])
    except ArpackError:
        # Multiples of orthogonal matrices leave Lanczos nothing to do: any vector attains the norm.
        v = np.random.default_rng(0).standard_normal(matrix.shape[1])
        for _ in range(100):
            v = matrix.T @ (matrix @ v)
            v /= np.linalg.norm(v)
        return float(np.linalg.norm(matrix @ v))


def symbol_norm(kernel: Tensor, w: np.ndarray) -> np.ndarray:
    """``||F(w)||`` at angles ``(N, 2)``, by numpy."""
    k = kernel.detach().double().numpy()
    first = np.exp(1j * np.outer(w[:, 0], np.arange(k.shape[2])))
    second = np.exp(1j * np.outer(w[:, 1], np.arange(k.shape[3])))
    symbols = np.tensordot(first[:, :, None] * second[:, None, :], k, axes=((1, 2), (2, 3)))
    return np.linalg.svd(symbols, compute_uv=False)[:, 0]


def supremum(kernel: Tensor) -> float:
    """The largest ``||F(w)||``: a fine grid, then the best points improved by Nelder and Mead."""
    side = [1 if k == 1 else 8 * k for k in kernel.shape[2:]]
    w = np.stack(np.meshgrid(*(2 * np.pi * np.arange(s) / s for s in side), indexing="ij"), -1)
    w = w[: side[0] // 2 + 1].reshape(-1, 2)  # w and -w have the same norm
    values = symbol_norm(kernel, w)
    best = values.max()
    for start in w[np.argsort(values)[-5:]]:
        found = minimize(
            lambda x: -symbol_norm(kernel, x[None])[0], start, method="Nelder-Mead", options={"xatol": 1e-6}
        )
        best = max(best, -found.fun)
    return float(best)
