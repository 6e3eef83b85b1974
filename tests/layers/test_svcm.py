"""SVCM: the projection against numpy's singular values, the explicit step, and the bound from the numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from lipkit.conv import fold
from lipkit.errors import OptionError, ShapeError
from lipkit.layers import SvcmConv2d, families
from lipkit.layers.svcm import clip, project
from lipkit.lowering import export, lipschitz
from lipkit.testing import check_layer, dense_matrix

LAYERS = [(3, 8, 3, 1), (8, 3, 3, 1), (2, 9, 3, 3), (3, 12, 2, 2)]


def fft_values(kernel: torch.Tensor, h: int, w: int) -> np.ndarray:
    """Singular values at every frequency by numpy's transform (kernels that fit the image)."""
    spectrum = np.fft.fft2(kernel.detach().double().numpy(), s=(h, w))
    return np.linalg.svd(spectrum.transpose(2, 3, 0, 1), compute_uv=False)


@pytest.mark.thorough
@pytest.mark.parametrize(("cin", "cout", "k", "stride"), LAYERS)
def test_obeys_the_laws(cin, cout, k, stride):
    family = families.get("svcm")

    def make(**named):
        return family.conv(**{"in_channels": cin, "out_channels": cout, "kernel_size": k, "stride": stride, **named})

    shapes = [(cin, 2 * stride, stride), (cin, stride, stride), (cin, 2 * stride, 3 * stride)]
    check_layer(
        make,
        input_shape=shapes,
        claim=family.claim,
        laws=(1, 2, 3, 9, 10, 11),  # the others do not depend on the shape: tests/laws
    )


@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (2, 5), (3, 4, 4), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_clip_replaces_what_exceeds_one_and_touches_nothing_else(shape, dtype):
    torch.manual_seed(0)
    a = torch.randn(shape, dtype=dtype)
    u, s, vh = np.linalg.svd(a.numpy(), full_matrices=False)
    expected = (u * np.minimum(s, 1)[..., None, :]) @ vh
    assert np.abs(clip(a).numpy() - expected).max() < 1e-12
    small = a / (2 * float(np.max(s)))
    assert torch.equal(clip(small), small)


@pytest.mark.thorough
@pytest.mark.usual(20)
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((8, 8, 3, 3), (8, 8)),
        ((16, 3, 3, 3), (12, 10)),
        ((3, 16, 3, 3), (16, 16)),
        ((4, 4, 2, 4), (7, 6)),
        ((4, 6, 5, 5), (5, 5)),
        ((6, 6, 1, 1), (4, 4)),
        ((2, 2, 3, 3), (32, 32)),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 3.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_largest_singular_value_after_fifty_rounds(shape, size, scale, dtype):
    torch.manual_seed(1)
    kernel = scale * torch.randn(shape, dtype=dtype) / np.prod(shape[1:]) ** 0.5
    after = project(kernel, *size, orthogonal=False)
    assert after.shape == kernel.shape
    assert after.dtype == dtype
    values = fft_values(after, *size)
    assert values.max() <= 1.02
    assert values.max() >= 0.999
    assert values.min() >= 0


def test_hardest_case_known_ends_where_the_docstring_says():
    values = fft_values(project(torch.ones(1, 1, 3, 3), 32, 32, orthogonal=False), 32, 32)
    assert 1.02 < values.max() < 1.03


@pytest.mark.parametrize(("shape", "size"), [((4, 3, 3, 3), (1, 1)), ((3, 4, 5, 3), (2, 6)), ((2, 2, 4, 4), (3, 2))])
def test_taps_beyond_the_image_share_the_change(shape, size):
    torch.manual_seed(2)
    kernel = 3 * torch.randn(shape, dtype=torch.float64)
    after = project(kernel, *size, orthogonal=False)
    folded = fold(after, *size)
    assert (
        np.linalg.svd(np.fft.fft2(folded.numpy(), s=size).transpose(2, 3, 0, 1), compute_uv=False).max() <= 1.0 + 1e-6
    )
    # The change is the smallest one with this effect: orthogonal to every kernel that folds to zero.
    change = after - kernel
    other = torch.randn(shape, dtype=torch.float64)
    invisible = other - project_zero(other, size)
    assert float(fold(invisible, *size).abs().max()) < 1e-12
    assert abs(float((change * invisible).sum())) < 1e-10


def project_zero(kernel: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """The part of a kernel that a fold sees: the average over the taps that meet (least squares by numpy)."""
    shape = kernel.shape
    rows = [fold(unit.reshape(shape), *size).flatten() for unit in torch.eye(kernel.numel(), dtype=kernel.dtype)]
    matrix = torch.stack(rows, 1).numpy()
    return torch.from_numpy(np.linalg.pinv(matrix) @ matrix @ kernel.flatten().numpy()).reshape(shape)


def test_a_kernel_that_obeys_is_not_touched():
    kernel = torch.randn(3, 4, 3, 3, dtype=torch.float64)
    kernel /= 1.001 * fft_values(kernel, 6, 6).max()
    assert torch.equal(project(kernel, 6, 6, orthogonal=False), kernel)


def test_is_the_nearest_kernel_for_one_tap():
    torch.manual_seed(3)
    kernel = torch.randn(5, 4, 1, 1, dtype=torch.float64)
    u, s, vh = np.linalg.svd(kernel[:, :, 0, 0].numpy(), full_matrices=False)
    expected = (u * np.minimum(s, 1)) @ vh
    assert np.abs(project(kernel, 3, 3, orthogonal=False)[:, :, 0, 0].numpy() - expected).max() < 1e-12


@pytest.mark.thorough
def test_more_rounds_come_closer():
    torch.manual_seed(4)
    kernel = torch.randn(4, 4, 3, 3, dtype=torch.float64)
    tops = [fft_values(project(kernel, 12, 12, rounds, orthogonal=False), 12, 12).max() for rounds in (1, 5, 50)]
    assert tops[0] > tops[1] > tops[2] > 0.999


@pytest.mark.thorough
def test_bound_follows_the_numbers_before_and_after_a_projection():
    torch.manual_seed(5)
    layer = SvcmConv2d(2, 6, 3, stride=2, orthogonal=False)
    nn.init.normal_(layer.free)
    shape = (2, 12, 8)
    for _ in range(2):
        with torch.no_grad():
            truth = np.linalg.norm(dense_matrix(layer, shape, torch.float32), 2)
        bound = lipschitz(layer, shape).item()
        assert truth * (1 - 1e-5) <= bound <= truth * (1 + 1e-5)
        assert bound <= lipschitz(layer).item() <= 1.02 * max(bound, lipschitz(export(layer, (2, 64, 64))).item())
        layer.project_(shape[1:])
    assert bound <= 1.02


def alternated(kernel: np.ndarray, size: tuple[int, int], rounds: int) -> np.ndarray:
    """Polar factor at each frequency, then the taps, by numpy with singular value decompositions."""
    kh, kw = kernel.shape[-2:]
    rows, columns = [(np.arange(k) - (k - 1) // 2) % n for k, n in zip((kh, kw), size, strict=True)]
    for _ in range(rounds):
        placed = np.zeros((*kernel.shape[:2], *size))
        placed[:, :, rows[:, None], columns] = kernel
        u, _, vh = np.linalg.svd(np.fft.fft2(placed).transpose(2, 3, 0, 1), full_matrices=False)
        kernel = np.fft.ifft2((u @ vh).transpose(2, 3, 0, 1)).real[:, :, rows[:, None], columns]
    return kernel


@pytest.mark.parametrize(("shape", "size"), [((4, 4, 3, 3), (8, 8)), ((6, 3, 3, 3), (7, 5)), ((3, 6, 2, 4), (6, 9))])
@pytest.mark.parametrize("rounds", [1, 4])
def test_orthogonal_rounds_are_those_of_numpy(shape, size, rounds):
    torch.manual_seed(6)
    kernel = torch.randn(shape, dtype=torch.float64)
    found = project(kernel, *size, rounds)
    np.testing.assert_allclose(found.numpy(), alternated(kernel.numpy(), size, rounds), rtol=0, atol=1e-10)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_near_an_orthogonal_kernel_it_becomes_one(dtype):
    torch.manual_seed(7)
    layer = SvcmConv2d(8, 8, 3, dtype=dtype)
    start = layer.free.detach().clone()
    assert float((project(start, 9, 9) - start).abs().max()) < 1e-5  # a fixed point
    with torch.no_grad():
        layer.free += 0.05 * torch.randn(layer.free.shape, dtype=dtype)
    before, top = (fft_values(layer.free.detach(), 9, 9) for _ in range(2))
    layer.project_((9, 9))
    after = fft_values(layer.free.detach(), 9, 9)
    assert before.min() < 0.8 < 1.2 < top.max()
    assert 0.95 < after.min() < after.max() < 1.05


def test_orthogonal_and_clipped_differ_below_one():
    kernel = torch.full((1, 1, 1, 1), 0.3, dtype=torch.float64)
    assert float(project(kernel, 4, 4)) == pytest.approx(1, abs=1e-12)
    assert float(project(kernel, 4, 4, orthogonal=False)) == 0.3
    layer = SvcmConv2d(1, 1, 1, orthogonal=False, dtype=torch.float64)
    with torch.no_grad():
        layer.free.copy_(kernel)
    layer.project_((4, 4))
    assert float(layer.free.detach()) == 0.3


def test_refusals():
    with pytest.raises(OptionError, match="orthogonal: expected True or False, got 'false'"):
        SvcmConv2d(1, 1, 3, orthogonal="false")
    with pytest.raises(OptionError, match=r"rounds: expected an integer of at least 1, got 0"):
        project(torch.ones(1, 1, 3, 3), 4, 4, rounds=0)
    with pytest.raises(ShapeError, match="got 0 x 4"):
        project(torch.ones(1, 1, 3, 3), 0, 4)
    with pytest.raises(ShapeError, match="multiples of 2"):
        SvcmConv2d(1, 4, 1, stride=2).project_((5, 4))
