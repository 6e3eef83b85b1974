"""Folders of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lipkit.data import load
from lipkit.errors import DataError


def rgb(seed: int, height: int = 5, width: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def save(pixels: np.ndarray, path: Path, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    (image if mode is None else image.convert(mode)).save(path)


@pytest.fixture
def folder(tmp_path):
    save(rgb(0), tmp_path / "train" / "dog" / "b.png")
    save(rgb(1), tmp_path / "train" / "dog" / "a.bmp")
    save(rgb(2), tmp_path / "train" / "cat" / "x.ppm")
    save(rgb(3), tmp_path / "test" / "dog" / "y.png")
    (tmp_path / "train" / ".hidden").mkdir()
    (tmp_path / "train" / "cat" / ".DS_Store").write_bytes(b"x")
    return tmp_path


def test_load(folder):
    data = load(f"folder:{folder}")
    assert data.classes == ("cat", "dog")
    assert data.input_shape == (3, 5, 4)
    assert data.train.x.dtype == torch.uint8
    assert data.train.y.tolist() == [0, 1, 1]
    assert data.test.y.tolist() == [1]
    for image, seed in zip(data.train.x, (2, 1, 0), strict=True):  # by class, then by name
        assert np.array_equal(image.numpy(), rgb(seed).transpose(2, 0, 1))


@pytest.mark.parametrize("mode", ["L", "1"])
def test_grey(tmp_path, mode):
    for part in ("train", "test"):
        save(rgb(4), tmp_path / part / "a" / "x.png", mode)
    data = load(f"folder:{tmp_path}")
    assert data.input_shape == (1, 5, 4)
    expected = np.asarray(Image.fromarray(rgb(4)).convert(mode).convert("L"))
    assert np.array_equal(data.train.x[0, 0].numpy(), expected)


def test_palette_becomes_rgb(tmp_path):
    for part in ("train", "test"):
        save(rgb(4), tmp_path / part / "a" / "x.png", "P")
    expected = np.asarray(Image.open(tmp_path / "train" / "a" / "x.png").convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(load(f"folder:{tmp_path}").train.x[0].numpy(), expected)


def refused(folder: Path, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(f"folder:{folder}")


def test_another_size(folder):
    save(rgb(9, 5, 5), folder / "test" / "cat" / "z.png")
    refused(folder, r"z\.png: expected an image of shape \(3, 5, 4\) .* got \(3, 5, 5\)")


def test_another_number_of_channels(folder):
    save(rgb(9), folder / "train" / "dog" / "z.png", "L")
    refused(folder, r"z\.png: expected an image of shape \(3, 5, 4\) .* got \(1, 5, 4\)")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "I;16"])
def test_modes_that_would_lose_something(folder, mode):
    save(rgb(9), folder / "train" / "dog" / "z.png", mode)
    refused(folder, f"without transparency, got mode {mode}")


def test_a_class_that_is_not_in_train(folder):
    save(rgb(9), folder / "test" / "bird" / "z.png")
    refused(folder, "only the classes of train, got bird")


def test_missing_folders(tmp_path):
    refused(tmp_path / "none", r"none/train, got none; the layout is train/CLASS")
    (tmp_path / "train" / "a").mkdir(parents=True)
    refused(tmp_path, "test, got none")
    (tmp_path / "test").mkdir()
    refused(tmp_path, r"expected images in .*train/CLASS, got none")


def test_other_files(folder):
    (folder / "train" / "dog" / "notes.txt").write_text("x")
    refused(folder, r"notes\.txt: expected an image file .* got \.txt")
    (folder / "train" / "dog" / "notes.txt").unlink()
    (folder / "train" / "readme.png").write_text("x")
    refused(folder, r"folder at .*readme\.png")


def test_damaged_images(folder):
    path = folder / "train" / "dog" / "z.png"
    save(rgb(9, 64, 64), path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:20], b"", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"):
        path.write_bytes(content)
        refused(folder, r"z\.png: expected a complete image")


def test_the_suffix_does_not_choose_another_decoder(folder):
    Image.fromarray(rgb(9)).save(folder / "train" / "dog" / "z.png", format="TIFF")
    refused(folder, r"z\.png: expected a complete image, got UnidentifiedImageError")


def test_too_many_pixels(folder, monkeypatch):
    monkeypatch.setattr("lipkit.data.folder.MAX_PIXELS", 24)
    save(rgb(9, 5, 5), folder / "train" / "dog" / "z.png")
    refused(folder, "at most 24 pixels, got 5 x 5")


def test_too_much_memory(folder, monkeypatch):
    monkeypatch.setattr("lipkit.data.folder.MAX_BYTES", 100)
    refused(folder, "at most 100 bytes of images, got 180")
