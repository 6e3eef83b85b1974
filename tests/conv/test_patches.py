"""The reshaped kernel: the factor sqrt(kh kw) holds for every image size, and is attained."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipkit.conv.patches import contraction_from_matrix
from lipkit.errors import ShapeError


def dense(kernel: np.ndarray, h: int, w: int) -> np.ndarray:
    """The circular convolution as a matrix, from loops over its taps; taps beyond the image wrap around."""
    cout, cin, kh, kw = kernel.shape
    a = np.zeros((cout, h, w, cin, h, w))
    for i in range(h):
        for j in range(w):
            for s in range(kh):
                for t in range(kw):
                    a[:, i, j, :, (i + s - (kh - 1) // 2) % h, (j + t - (kw - 1) // 2) % w] += kernel[:, :, s, t]
    return a.reshape(cout * h * w, -1)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_norm_is_at_most_that_of_the_matrix_for_every_size(cout, cin, kh, kw, h, w, seed):
    matrix = np.random.default_rng(seed).standard_normal((cout, cin * kh * kw))
    kernel = contraction_from_matrix(torch.from_numpy(matrix), kh, kw).numpy()
    assert np.linalg.norm(dense(kernel, h, w), 2) <= np.linalg.norm(matrix, 2) * (1 + 1e-12)


@pytest.mark.parametrize(("kh", "kw", "h", "w"), [(3, 3, 6, 5), (3, 3, 2, 1), (1, 4, 3, 3), (5, 5, 1, 1)])
def test_factor_is_attained(kh, kw, h, w):
    matrix = torch.full((1, kh * kw), 1 / math.sqrt(kh * kw), dtype=torch.float64)
    kernel = contraction_from_matrix(matrix, kh, kw).numpy()
    assert abs(np.linalg.norm(dense(kernel, h, w), 2) - 1) < 1e-12


def test_there_and_back():
    kernel = torch.randn(4, 3, 2, 5, dtype=torch.float64)
    again = contraction_from_matrix(kernel.flatten(1), 2, 5) * math.sqrt(10)
    assert torch.allclose(again, kernel, atol=1e-15)


def test_refusals():
    with pytest.raises(ShapeError, match=r"expected shape \(cout, cin \* 3 \* 3\), got \(2, 10\)"):
        contraction_from_matrix(torch.ones(2, 10), 3, 3)
