"""PatchNet: its structure, a body that keeps norms, certificates that attacks do not break, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import lipkit
from lipkit import attacks, experiments
from lipkit.data import load
from lipkit.errors import OptionError, ShapeError
from lipkit.experiments.recipe import load_recipe
from lipkit.layers import StiefelConv2d, StiefelLinear
from lipkit.lowering import lipschitz
from lipkit.models import build, patchnet
from lipkit.modules import Shift2d

SMALL: dict[str, Any] = {"patch": 2, "stages": [(8, 2), (16, 1)], "narrow": 4, "dense": [12], "classes": 5}


def test_structure() -> None:
    net = patchnet(**SMALL, moved=1 / 8, input_shape=(1, 8, 12))
    convs = [(m.in_channels, m.out_channels, m.stride) for m in net if isinstance(m, StiefelConv2d)]
    assert convs == [(1, 8, 2), (8, 8, 1), (8, 16, 2), (16, 4, 1)]
    assert [m.moved for m in net if isinstance(m, Shift2d)] == [1, 1, 2]
    assert [(m.in_features, m.out_features) for m in net if isinstance(m, StiefelLinear)] == [(4 * 2 * 3, 12)]
    assert net(torch.rand(2, 1, 8, 12)).shape == (2, 5)
    assert not any(isinstance(m, Shift2d) for m in patchnet(**SMALL, moved=0, input_shape=(1, 8, 8)))


@pytest.mark.parametrize(("options", "constant"), [({}, 1.0), ({"lipschitz": 3.0, "mean": [0.5], "std": [0.5]}, 6.0)])
def test_the_body_keeps_norms(options: dict[str, Any], constant: float) -> None:
    torch.manual_seed(0)
    wide = {**SMALL, "stages": [(8, 2), (32, 1)], "narrow": None, "dense": [128]}  # nothing is dropped
    body = patchnet(**wide, **options, input_shape=(1, 8, 8))[:-1].double()
    assert float(lipschitz(body, (1, 8, 8)).detach()) == pytest.approx(constant, rel=1e-5)
    x, step = torch.rand(4, 1, 8, 8, dtype=torch.float64), 1e-7 * torch.randn(4, 1, 8, 8, dtype=torch.float64)
    moved = (body(x + step) - body(x)).flatten(1).norm(dim=1) / step.flatten(1).norm(dim=1)
    torch.testing.assert_close(moved, torch.full((4,), constant, dtype=torch.float64), rtol=1e-3, atol=0)


@pytest.mark.thorough
def test_it_learns_and_its_certificate_holds() -> None:
    torch.manual_seed(0)
    data = load("digits")
    net = patchnet(2, [(16, 2)], dense=[32], input_shape=data.input_shape)
    run = lipkit.fit(net, data.train, epochs=6, optimizer="spectral", lr=0.003, batch_size=64, accelerator="cpu")
    plain = lipkit.export(run.result, data.input_shape)
    x, y = data.test.x[:200], data.test.y[:200]
    certificate = lipkit.certify(plain, x, y)
    assert certificate.accuracy(0) > 0.9
    assert certificate.accuracy(0.2) > 0.5
    radius = certificate.radius.clamp_min(0)
    for eps in (0.2, 0.5):
        found = attacks.pgd(plain, x, y, eps=eps, steps=20, generator=torch.Generator().manual_seed(0))
        fooled = plain(found).argmax(1) != y
        assert not (fooled & (radius > eps)).any()
        assert fooled.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch": 0}, "patch: expected an integer of at least 1, got 0"),
        ({"stages": []}, "stages: expected one or more pairs"),
        ({"stages": [(8,)]}, "stages: expected one or more pairs"),
        ({"stages": [8, 2]}, "stages: expected one or more pairs"),
        ({"stages": [(8, 0)]}, r"stages\[0\]\[1\]: expected an integer of at least 1, got 0"),
        ({"narrow": 0}, "narrow: expected an integer of at least 1, got 0"),
        ({"dense": []}, "dense: expected the units of at least one layer, got none"),
        ({"dense": [8, -1]}, r"dense\[1\]: expected an integer of at least 1, got -1"),
        ({"moved": 0.3}, "moved: expected a fraction from 0 to 1/4, got 0.3"),
        ({"classes": 1}, "classes: expected an integer of at least 2, got 1"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build("patchnet", **{**SMALL, "input_shape": (1, 8, 8), **change})


def test_images_that_do_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"patchnet: expected an input shape .* multiples of 4, got"):
        patchnet(**SMALL, input_shape=(1, 8, 6))


def test_channels_are_odd_only_where_the_activation_says_so() -> None:
    with pytest.raises(ShapeError, match="MaxMin: expected an even number of channels"):
        patchnet(**{**SMALL, "dense": [13]}, input_shape=(1, 8, 8))(torch.rand(1, 1, 8, 8))


def test_its_layers_are_all_of_it() -> None:
    kinds = {type(m) for m in lipkit.export(patchnet(**SMALL, input_shape=(1, 8, 8)), (1, 8, 8))}
    assert kinds == {nn.Conv2d, lipkit.modules.MaxMin, Shift2d, nn.Flatten, nn.Linear}


def _cifar100(root: Path) -> None:
    (root / "cifar-100-binary").mkdir()
    for name in ("train", "test"):
        rows = np.random.default_rng(0).integers(0, 256, (6, 2 + 3072), np.uint8)
        rows[:, 0] %= 20
        rows[:, 1] = [0, 99, 3, 4, 5, 6]
        (root / "cifar-100-binary" / f"{name}.bin").write_bytes(rows.tobytes())


def _tiny_imagenet(root: Path) -> None:
    folder = root / "tiny-imagenet-200"
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    for path in (*(f"train/{n}/images/{n}_0.JPEG" for n in ("n01", "n02")), "val/images/val_0.JPEG"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        image.save(folder / path)
    (folder / "val/val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t9\t9\n")
    (folder / "wnids.txt").write_text("n01\nn02\n")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "write"), [("cifar100", _cifar100), pytest.param("tiny_imagenet", _tiny_imagenet, marks=pytest.mark.slow)]
)
def test_the_recipe_runs_on_other_data(name: str, write: Callable[[Path], None], tmp_path: Path) -> None:
    """From the files in the form that their authors give them."""
    write(tmp_path)
    changes = [f"data={name}", f"data.root={tmp_path}", "train.budget=null", "train.epochs=1", "train.batch_size=2"]
    changes += ["model.options.narrow=4", "model.options.dense=[16]"]  # the proof of a large dense layer takes seconds
    recipe = load_recipe("cifar10_patchnet", [*changes, "certify.attack_steps=2", "certify.attack_samples=2"])
    outcome = experiments.train(recipe, folder=tmp_path / "run")
    assert outcome is not None
    assert outcome.record.data.name == name
    assert outcome.metrics["certified(36/255)"] <= outcome.metrics["pgd(36/255)"] <= outcome.metrics["clean"]


def test_position_codes_and_other_activations() -> None:
    net = patchnet(**SMALL, activation="halfabs", position=True, input_shape=(1, 8, 8))
    kinds = [type(m).__name__ for m in net]
    assert kinds[1:3] == ["PositionCode", "HalfAbs"]
    assert "MaxMin" not in kinds
    assert kinds.count("PositionCode") == 1
