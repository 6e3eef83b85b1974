"""Crop and flip against loops in numpy; pure, and decided by the generator alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lipkit.data import random_crop, random_flip
from lipkit.errors import OptionError, ShapeError

SHAPES = [(5, 3, 8, 8), (4, 1, 5, 7), (1, 2, 1, 1), (3, 1, 6, 1), (0, 3, 4, 4)]
DTYPES = [torch.uint8, torch.float32, torch.float64, torch.bfloat16]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(1, 200, shape, generator=seeded(9)).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_crop_is_a_window_of_the_padded_image(shape, dtype, padding):
    x = images(shape, dtype)
    cropped = random_crop(x, padding, seeded())
    offsets = torch.randint(2 * padding + 1, (2, shape[0]), generator=seeded()).numpy()
    padded = np.pad(x.double().numpy(), ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    expected = np.zeros(shape)
    for n in range(shape[0]):
        i, j = offsets[:, n]
        expected[n] = padded[n, :, i : i + shape[2], j : j + shape[3]]
    assert cropped.dtype == dtype
    assert np.array_equal(cropped.double().numpy(), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_flip_mirrors_the_chosen_images(shape, dtype):
    x = images(shape, dtype)
    flipped = random_flip(x, seeded())
    chosen = torch.randint(2, (shape[0],), generator=seeded()).numpy()
    expected = x.double().numpy().copy()
    for n in np.flatnonzero(chosen):
        expected[n] = expected[n][:, :, ::-1]
    assert flipped.dtype == dtype
    assert np.array_equal(flipped.double().numpy(), expected)


@pytest.mark.parametrize("augment", [lambda x, g: random_crop(x, 2, g), random_flip])
def test_pure_and_decided_by_the_generator(augment):
    x = images((16, 3, 8, 8))
    before, state = x.clone(), torch.get_rng_state()
    first = augment(x, seeded(1))
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    assert torch.equal(augment(x, seeded(1)), first)
    assert not torch.equal(augment(x, seeded(2)), first)
    generator = seeded(1)
    augment(x, generator)
    assert not torch.equal(augment(x, generator), first)  # the generator moves on
    first.zero_()
    assert torch.equal(x, before)  # the result is no view


def test_every_offset_occurs_equally_often():
    n, padding = 20_000, 2
    x = torch.zeros(n, 1, 5, 5)
    x[:, 0, 2, 2] = 1
    place = random_crop(x, padding, seeded()).flatten(1).argmax(1)
    counts = np.bincount(place.numpy(), minlength=25)
    expected = n / 25
    assert ((counts - expected) ** 2 / expected).sum() < 60  # chi-squared with 24 degrees: p = 6e-5


def test_half_is_flipped():
    x = torch.tensor([0.0, 1.0]).reshape(1, 1, 1, 2).repeat(10_000, 1, 1, 1)
    share = random_flip(x, seeded())[:, 0, 0, 0].mean()
    assert abs(share - 0.5) < 4 * 0.005


@pytest.mark.thorough
def test_gradients_pass_through():
    x = images((3, 2, 4, 4), torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: random_crop(x, 1, seeded()), x)
    assert torch.autograd.gradcheck(lambda x: random_flip(x, seeded()), x)


def test_refusals():
    with pytest.raises(ShapeError, match=r"\(N, C, H, W\), got \(3, 4, 4\)"):
        random_crop(torch.zeros(3, 4, 4), 1, seeded())
    with pytest.raises(ShapeError, match=r"\(N, C, H, W\), got \(2, 3\)"):
        random_flip(torch.zeros(2, 3), seeded())
    for padding in (-1, 1.5, True):
        with pytest.raises(OptionError, match=f"padding: expected an integer of at least 0, got {padding}"):
            random_crop(torch.zeros(1, 3, 4, 4), padding, seeded())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_does_not_matter():
    x = images((8, 3, 6, 6))
    for augment in (lambda x, g: random_crop(x, 2, g), random_flip):
        on_device = augment(x.cuda(), seeded(3))
        assert on_device.device.type == "cuda"
        assert torch.equal(on_device.cpu(), augment(x, seeded(3)))
        own = augment(x.cuda(), torch.Generator("cuda").manual_seed(3))
        assert own.device.type == "cuda"
