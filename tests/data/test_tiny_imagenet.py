"""Tiny-ImageNet-200 in its folders."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from lipkit.data import load
from lipkit.errors import DataError

WNIDS = ["n02", "n01", "n03"]


def save(path, seed: int, mode: str = "RGB", side: int = 64) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    for label, wnid in enumerate(WNIDS):
        for i in range(2):
            save(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", 10 * label + i, "L" if i else "RGB")
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text("n\t0\t0\t9\t9\n")
    lines = [f"val_{i}.JPEG\t{wnid}\t0\t32\t44\t62\n" for i, wnid in enumerate(("n03", "n01"))]
    for i in range(2):
        save(folder / "val" / "images" / f"val_{i}.JPEG", 50 + i)
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    return folder


def test_load(folder):
    data = load("tiny_imagenet", root=folder.parent)
    assert (data.classes, data.input_shape) == (("n01", "n02", "n03"), (3, 64, 64))
    assert data.train.y.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.test.y.tolist() == [2, 0]
    for split, index, name in (
        (data.train, 2, "train/n02/images/n02_0.JPEG"),
        (data.train, 3, "train/n02/images/n02_1.JPEG"),  # grey becomes RGB
        (data.test, 1, "val/images/val_1.JPEG"),
    ):
        expected = np.asarray(Image.open(folder / name).convert("RGB")).transpose(2, 0, 1)
        assert np.array_equal(split.x[index].numpy(), expected)


@pytest.mark.thorough
def test_a_recipe_of_cifar_takes_them(folder, one_recipe):
    assert one_recipe("cifar10_patchnet", "tiny_imagenet", folder.parent, "model.options.patch=16") == 3


def refused(folder, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load("tiny_imagenet", root=folder.parent)


def test_missing(tmp_path):
    refused(tmp_path / "tiny-imagenet-200", r"wnids\.txt, got none; unpack tiny-imagenet-200\.zip")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("wnids.txt", "", "different classes, got 0"),
        ("wnids.txt", "n01\nn01\n", "different classes, got 2"),
        ("wnids.txt", "../n01\n", r"WordNet numbers such as .*, got '\.\./n01'"),
        ("wnids.txt", "n01\nn09\n", r"train/n09/images, got none; unpack"),
        ("val/val_annotations.txt", "", "at least one line"),
        ("val/val_annotations.txt", "val_0.JPEG\tn99\t0\t0\t0\t0\n", r"a class of wnids\.txt, got 'val_0"),
        ("val/val_annotations.txt", "../../secret.JPEG\tn01\n", r"expected lines of a file name.*got '\.\."),
        ("val/val_annotations.txt", "/etc/x.JPEG\tn01\n", "expected lines of a file name"),
        ("val/val_annotations.txt", "val_9.JPEG\tn01\n", r"expected an image at .*val_9\.JPEG, got none"),
    ],
)
def test_wrong_texts(folder, name, text, message):
    (folder / name).write_text(text)
    refused(folder, message)


def test_not_text(folder):
    (folder / "wnids.txt").write_bytes(b"\xff\xfe\x00")
    refused(folder, "readable, complete file, got UnicodeDecodeError")


def test_wrong_images(folder):
    path = folder / "val" / "images" / "val_0.JPEG"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(folder, r"val_0\.JPEG: expected a complete image")
    save(path, 0, side=65)
    refused(folder, r"expected an image of shape \(3, 64, 64\) .* got \(3, 65, 65\)")
    for file in (folder / "train" / "n01" / "images").iterdir():
        file.unlink()
    refused(folder, r"expected images in .*n01/images, got none")
