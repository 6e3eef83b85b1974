"""Colour jitter against Pillow's enhancers and colorsys; pure, and decided by the generator alone."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from lipkit.data import color_jitter
from lipkit.data.augment import grey, rotate_hue
from lipkit.errors import OptionError, ShapeError

NAMES = ("brightness", "contrast", "saturation", "hue")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int = 6, channels: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(0, 256, (n, channels, 5, 4), generator=seeded(9)).to(dtype) / 255


def amounts(n: int, seed: int = 0) -> np.ndarray:
    return torch.rand(4, n, generator=seeded(seed), dtype=torch.float64).numpy()


@pytest.mark.parametrize(
    ("name", "row", "enhancer"),
    [
        ("brightness", 0, ImageEnhance.Brightness),
        ("contrast", 1, ImageEnhance.Contrast),
        ("saturation", 2, ImageEnhance.Color),
    ],
)
@pytest.mark.parametrize("amount", [0.3, 1.5])
def test_as_pillow(name, row, enhancer, amount):
    x = images()
    found = color_jitter(x, seeded(), **{name: amount})
    low = max(0.0, 1 - amount)
    for n, drawn in enumerate(amounts(len(x))[row]):
        factor = low + (1 + amount - low) * drawn
        pixels = Image.fromarray((x[n] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())
        expected = np.asarray(enhancer(pixels).enhance(factor)).transpose(2, 0, 1) / 255
        # Pillow rounds grey levels, their mean and the result to whole levels; the first two times the factor.
        assert np.abs(found[n].numpy() - expected).max() <= (0.5 + 1.5 * max(1, abs(1 - factor))) / 255


def test_hue_as_colorsys():
    x = images(dtype=torch.float64)
    x[0, :, 0, 0], x[1, :, 0, 0], x[2, :, 0, 0] = 0.0, 1.0, 0.25  # black, white and grey have no hue
    found = color_jitter(x, seeded(3), hue=0.5)
    turns = 0.5 * (2 * amounts(len(x), 3)[3] - 1)
    for n in range(len(x)):
        for i in range(5):
            for j in range(4):
                h, s, v = colorsys.rgb_to_hsv(*x[n, :, i, j].tolist())
                expected = colorsys.hsv_to_rgb((h + turns[n]) % 1, s, v)
                assert found[n, :, i, j].tolist() == pytest.approx(expected, abs=1e-12)


def test_a_whole_turn_is_nothing_and_a_third_permutes():
    x = images(dtype=torch.float64)
    assert torch.allclose(rotate_hue(x, torch.tensor(1.0)), x, atol=1e-12)
    assert torch.allclose(rotate_hue(x, torch.tensor(1 / 3)), x.roll(1, dims=1), atol=1e-12)


def test_all_four_in_order():
    x = images(dtype=torch.float64)
    b, c, s, h = amounts(len(x))
    options = {"brightness": 0.4, "contrast": 0.3, "saturation": 0.2, "hue": 0.1}
    z = x.numpy()
    weights = np.array([0.299, 0.587, 0.114])[:, None, None]

    def blend(z, other, amount, drawn):
        f = (1 - amount + 2 * amount * drawn)[:, None, None, None]
        return np.clip(f * z + (1 - f) * other, 0, 1)

    z = blend(z, 0, 0.4, b)
    z = blend(z, (z * weights).sum(1, keepdims=True).mean((2, 3), keepdims=True), 0.3, c)
    z = blend(z, (z * weights).sum(1, keepdims=True), 0.2, s)
    expected = rotate_hue(torch.from_numpy(z), torch.from_numpy(0.1 * (2 * h - 1))[:, None, None])
    assert torch.allclose(color_jitter(x, seeded(), **options), expected, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_stays_in_the_unit_interval_and_keeps_the_dtype(dtype):
    x = images(64, dtype=dtype)
    z = color_jitter(x, seeded(), brightness=3.0, contrast=3.0, saturation=3.0, hue=0.5)
    assert z.dtype == dtype
    assert z.shape == x.shape
    assert float(z.min()) >= 0
    assert float(z.max()) <= 1


def test_pure_and_decided_by_the_generator():
    x = images()
    before, state = x.clone(), torch.get_rng_state()
    options = dict.fromkeys(NAMES, 0.3)
    first = color_jitter(x, seeded(1), **options)
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(color_jitter(x, seeded(1), **options), first)
    assert not torch.equal(color_jitter(x, seeded(2), **options), first)
    nothing = color_jitter(x, seeded(1))
    assert torch.equal(nothing, x)
    nothing.zero_()
    assert torch.equal(x, before)


def test_one_argument_does_not_change_what_another_does():
    x, first, second = images(), seeded(4), seeded(4)
    color_jitter(x, first, brightness=0.1)
    color_jitter(x, second, **dict.fromkeys(NAMES, 0.2))
    assert torch.equal(first.get_state(), second.get_state())


@pytest.mark.parametrize("name", NAMES)
def test_every_option_acts_and_each_image_has_its_own_amount(name):
    x = images(1).repeat(50, 1, 1, 1)
    z = color_jitter(x, seeded(), **{name: 0.2}).flatten(1)
    assert len(torch.unique(z, dim=0)) == 50


def test_factors_cover_their_range_evenly():
    z = color_jitter(torch.full((20_000, 1, 1, 1), 0.5, dtype=torch.float64), seeded(), brightness=0.4).flatten()
    assert 0.3 <= float(z.min()) < 0.301
    assert 0.699 < float(z.max()) <= 0.7
    assert abs(float(z.mean()) - 0.5) < 4 * 0.4 / 12**0.5 / 20_000**0.5


def test_grey_images():
    x = images(channels=1)
    assert torch.equal(grey(x), x)
    z = color_jitter(x, seeded(), brightness=0.2, contrast=0.2)
    assert z.shape == x.shape
    assert not torch.equal(z, x)
    assert color_jitter(x[:0], seeded(), brightness=0.2, contrast=0.2).shape == (0, 1, 5, 4)


def test_refusals():
    with pytest.raises(ShapeError, match=r"got \(3, 4, 4\)"):
        color_jitter(torch.zeros(3, 4, 4), seeded())
    with pytest.raises(ShapeError, match="3 channels for saturation and hue"):
        color_jitter(images(channels=1), seeded(), hue=0.1)
    with pytest.raises(OptionError, match=r"floating-point images in .*, got uint8"):
        color_jitter(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), seeded())
    with pytest.raises(OptionError, match=r"hue as a number from 0 to 0.5, got 0.6"):
        color_jitter(images(), seeded(), hue=0.6)
    for wrong in (-0.1, float("nan"), float("inf"), True, "1"):
        with pytest.raises(OptionError, match="brightness as a finite number >= 0, got"):
            color_jitter(images(), seeded(), brightness=wrong)
