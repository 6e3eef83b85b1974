"""The polyphase kernel against the strided convolution of torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lipkit.bounds import polyphase
from lipkit.conv import downsample
from lipkit.errors import OptionError, ShapeError

SIZES = st.integers(1, 5)


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(kh=SIZES, kw=SIZES, s1=st.integers(1, 3), s2=st.integers(1, 3), groups=st.integers(1, 2))
def test_it_acts_on_moved_pixels_as_the_stride(kh: int, kw: int, s1: int, s2: int, groups: int) -> None:
    torch.manual_seed(0)
    kernel = torch.randn(4, 3, kh, kw, dtype=torch.float64)
    made = polyphase(kernel, (s1, s2))
    assert made.shape == (4, 3 * s1 * s2, -(-kh // s1), -(-kw // s2))
    h, w = s1 * (made.shape[2] + 2), s2 * (made.shape[3] + 1)
    x = torch.randn(2, 3 * groups, h, w, dtype=torch.float64)
    moved = x.reshape(2, 3 * groups, h // s1, s1, w // s2, s2).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
    # Zeros beyond the image make every window of the polyphase kernel a window of the strided one.
    direct = F.conv2d(F.pad(x, (0, -kw % s2, 0, -kh % s1)), kernel, stride=(s1, s2), groups=groups)
    ours = F.conv2d(moved, made, groups=groups)
    torch.testing.assert_close(ours, direct[:, :, : ours.shape[2], : ours.shape[3]])
    if s1 == s2:
        torch.testing.assert_close(moved, downsample(x, s1))


def test_bad_input_is_named() -> None:
    with pytest.raises(OptionError, match=r"stride: expected integers of at least 1, got \(0, 1\)"):
        polyphase(torch.ones(1, 1, 2, 2), (0, 1))
    with pytest.raises(ShapeError, match="kernel: expected shape"):
        polyphase(torch.ones(1, 2, 2), (1, 1))
