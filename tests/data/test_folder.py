"""Folders of images."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lipkit.data import ImageFiles, load
from lipkit.data.images import decode
from lipkit.errors import DataError, OptionError


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


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_exif_data_says(tmp_path, orientation, convert):
    """Camera and viewer agree on what is up; so must who labels an image and who certifies it."""
    pixels, exif = rgb(0), Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path, exif=exif)
    # EXIF 2.3, tag 274: where the first row and the first column are in what is seen.
    flipped = {2: pixels[:, ::-1], 3: pixels[::-1, ::-1], 4: pixels[::-1]}
    turned = pixels.transpose(1, 0, 2)
    flipped |= {5: turned, 6: turned[:, ::-1], 7: turned[::-1, ::-1], 8: turned[::-1]}
    expected = flipped.get(orientation, pixels).transpose(2, 0, 1)
    assert np.array_equal(decode(path, convert=convert), expected)
    if orientation == 6:
        assert np.array_equal(expected, np.rot90(pixels, -1).transpose(2, 0, 1))  # clockwise


def test_another_size(folder):
    save(rgb(9, 5, 5), folder / "test" / "cat" / "z.png")
    refused(
        folder, r"z\.png: expected an image of shape \(3, 5, 4\) .* got \(3, 5, 5\); images:SIZE:PATH in place of fol"
    )
    assert load(f"images:5:{folder}").input_shape == (3, 5, 5)  # the remedy is one


def test_another_number_of_channels(folder):
    save(rgb(9), folder / "train" / "dog" / "z.png", "L")
    refused(folder, r"z\.png: expected an image of shape \(3, 5, 4\) .* got \(1, 5, 4\)")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "I;16"])
def test_modes_that_would_lose_something(folder, mode):
    save(rgb(9), folder / "train" / "dog" / "z.png", mode)
    remedy = "; images:SIZE:PATH" if mode != "I;16" else "$"
    refused(folder, f"without transparency, got mode {mode}{remedy}")


def test_a_class_that_is_not_in_train(folder):
    save(rgb(9), folder / "test" / "bird" / "z.png")
    refused(folder, "only the classes of train, got bird")


def test_missing_folders(tmp_path):
    refused(tmp_path / "none", r"none/train, got none; the layout is train/CLASS")
    (tmp_path / "train" / "a").mkdir(parents=True)
    refused(tmp_path, "test, got none")
    (tmp_path / "test").mkdir()
    refused(tmp_path, r"expected images in .*train/a, got none")
    save(rgb(0), tmp_path / "train" / "b" / "x.png")
    save(rgb(0), tmp_path / "test" / "b" / "x.png")
    refused(tmp_path, r"expected images in .*train/a, got none")


def test_other_files(folder):
    (folder / "train" / "dog" / "notes.txt").write_text("x")
    refused(folder, r"notes\.txt: expected an image file .* got \.txt")
    (folder / "train" / "dog" / "notes.txt").unlink()
    (folder / "train" / "readme.png").write_text("x")
    refused(folder, r"folder at .*readme\.png, got a file")


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
    monkeypatch.setattr("lipkit.data.images.MAX_PIXELS", 24)
    save(rgb(9, 5, 5), folder / "train" / "dog" / "z.png")
    refused(folder, "at most 24 pixels, got 5 x 5")


def test_a_decompression_bomb_is_one_error_and_no_warning(folder):
    # The header of a PNG of 60 000 x 60 000; nothing of that size may be decoded or allocated.
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    for side in (10_000, 60_000):
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
        blob = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
        (folder / "train" / "dog" / "z.png").write_bytes(blob)
        refused(folder, r"z\.png: expected at most 67108864 pixels, got")


def test_what_does_not_fit_in_memory_is_decoded_when_asked_for(folder, monkeypatch):
    whole = load(f"folder:{folder}")
    monkeypatch.setattr("lipkit.data.registry.HELD_BYTES", 100)
    data = load(f"folder:{folder}")
    assert isinstance(data.train.x, ImageFiles)
    assert isinstance(data.test.x, torch.Tensor)  # its one image fits
    assert data.input_shape == (3, 5, 4)
    for index in (torch.tensor([2, 0, 2]), slice(1, 3), torch.arange(len(whole.train)) == 1):
        for found, expected in zip(data.train.batch(index), whole.train.batch(index), strict=True):
            assert torch.equal(found, expected)
    subset = data.train.take(2)
    assert isinstance(subset.x, ImageFiles)
    assert torch.equal(subset.x[:], whole.train.take(2).x)
    save(rgb(9, 5, 5), folder / "train" / "dog" / "a.bmp")
    with pytest.raises(DataError, match=r"a\.bmp: expected an image of shape \(3, 5, 4\) .* got \(3, 5, 5\)"):
        data.train.batch(torch.arange(3))
    (folder / "train" / "dog" / "a.bmp").unlink()
    with pytest.raises(DataError, match=r"expected an image at .*a\.bmp, got none"):
        data.train.batch(torch.arange(3))


def test_only_what_is_taken_is_decoded(folder):
    kept = load(f"folder:{folder}", limit=1).train
    files = [folder / "train" / "cat" / "x.ppm", folder / "train" / "dog" / "a.bmp", folder / "train" / "dog" / "b.png"]
    shown = next(
        f for f, s in zip(files, (2, 1, 0), strict=True) if (kept.x[0].numpy() == rgb(s).transpose(2, 0, 1)).all()
    )
    for file in files:
        if file not in (shown, files[0]):  # the first one gives the shape
            file.write_bytes(b"")
    assert torch.equal(load(f"folder:{folder}", limit=1).train.x, kept.x)


def test_many_files_keep_their_order(tmp_path):
    for i in range(40):
        save(np.full((2, 2, 3), i, np.uint8), tmp_path / "train" / "a" / f"{i:02}.png")
    save(rgb(0, 2, 2), tmp_path / "val" / "a" / "x.png")
    data = load(f"folder:{tmp_path}")
    assert data.train.x[:, 0, 0, 0].tolist() == list(range(40))
    assert len(data.test) == 1  # val in the place of test


@pytest.mark.thorough
def test_training_from_files_is_training_from_memory(folder, monkeypatch):
    from torch import nn

    from lipkit.training import fit

    def weights() -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(60, 2))
        fit(model, load(f"folder:{folder}").train, epochs=2, batch_size=2, lr=0.1, accelerator="cpu")
        return model[1].weight.detach().clone()

    held = weights()
    monkeypatch.setattr("lipkit.data.registry.HELD_BYTES", 0)
    assert torch.equal(weights(), held)


def test_images_of_any_size(tmp_path):
    for i, (height, width) in enumerate([(40, 60), (64, 64), (9, 90)]):
        save(rgb(i, height, width), tmp_path / "train" / "a" / f"{i}.png")
    for mode in ("L", "RGBA", "P", "CMYK"):
        suffix = "jpg" if mode == "CMYK" else "png"
        save(rgb(5, 40, 60), tmp_path / "val" / "a" / f"{mode}.{suffix}", mode)
    data = load(f"images:28:{tmp_path}")
    assert data.input_shape == (3, 28, 28)
    assert (len(data.train), len(data.test)) == (3, 4)
    # The short side becomes 28 * 256 / 224 = 32: 40 x 60 becomes 32 x 48, cut at (10, 2).
    expected = Image.fromarray(rgb(0, 40, 60)).resize((48, 32), Image.Resampling.BILINEAR).crop((10, 2, 38, 30))
    assert np.array_equal(data.train.x[0].numpy(), np.asarray(expected).transpose(2, 0, 1))


@pytest.mark.parametrize("spec", ["images:0:{}", "images:5000:{}"])
def test_a_size_out_of_range(tmp_path, spec):
    with pytest.raises(OptionError, match="size of images: expected an integer from 1 to 4096"):
        load(spec.format(tmp_path))


def test_a_strip_that_would_grow_without_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("lipkit.data.images.MAX_PIXELS", 20_000)
    for part in ("train", "test"):
        save(rgb(0, 1, 1000), tmp_path / part / "a" / "x.png")
    with pytest.raises(DataError, match="after resizing"):
        load(f"images:28:{tmp_path}")


def test_imagenet(tmp_path):
    with pytest.raises(DataError, match=r"imagenet/train, got none; put the images .*https://image-net\.org"):
        load("imagenet", root=tmp_path)
    for part, wnid in (("train", "n02"), ("train", "n01"), ("val", "n02")):
        path = tmp_path / "imagenet" / part / wnid / "x.JPEG"
        path.parent.mkdir(parents=True)
        Image.fromarray(rgb(1, 30, 50)).save(path)
    data = load("imagenet", root=tmp_path)
    assert (data.name, data.input_shape, data.classes) == ("imagenet", (3, 224, 224), ("n01", "n02"))
    assert data.test.y.tolist() == [1]
    (tmp_path / "imagenet" / "val" / "ILSVRC2012_val_00000001.JPEG").write_bytes(b"x")
    with pytest.raises(DataError, match=r"only the classes of train, got ILSVRC2012_val.*sorted into the folders"):
        load("imagenet", root=tmp_path)
