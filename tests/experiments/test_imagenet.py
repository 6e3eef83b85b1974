"""The ImageNet recipe at toy size: image folders, two processes, AT+LipReg, label smoothing, moving average."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lipkit import modules
from lipkit.report import read_record
from lipkit.training import checkpoints

pytestmark = pytest.mark.thorough

TOY = [
    "data=images:32:images", "model.options.blocks=[1, 1, 1, 1]", "model.options.width=4", "train.epochs=1",
    "train.batch_size=8", "train.accelerator=cpu", "train.strategy=ddp", "adversary.steps=2", "augment.crop=4",
    "certify.attack_steps=2", "certify.attack_samples=4", "certify.eps=36/255",
]  # fmt: skip


def images(folder: Path) -> None:
    """JPEG files of several sizes in ImageNet's folders: two classes, one dark and one bright."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 4)):
        for label, level in (("n01", 60), ("n02", 190)):
            place = folder / split / label
            place.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(level - 50, level + 50, (40 + number, 36, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.JPEG")


@pytest.mark.slow
def test_at_lipreg_on_image_folders_in_two_processes(tmp_path: Path) -> None:
    images(tmp_path / "images")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # What torchrun gives each process.
    common = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1", "GROUP_RANK": "0",
    }  # fmt: skip
    command = "import sys; from lipkit.cli.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["train", "imagenet_resnet101_at_lipreg", *TOY, "--out", "runs"]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", command, *arguments], cwd=tmp_path,
            env={**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    try:
        outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
    assert "Starting with 2 processes" in outputs[0]
    (folder,) = (tmp_path / "runs").iterdir()
    rows = checkpoints.read_metrics(folder)
    assert [row["epoch"] for row in rows] == [1]
    assert all(row["penalty"] != 0 for row in rows)
    settings = checkpoints.read_json(folder / "settings.json")
    assert settings["ema"] == 0.999
    assert "smoothing" in str(settings["loss"])
    record = read_record(folder)
    assert record.recipe is not None
    assert record.recipe["penalty"] == {"method": "lipbound", "weight": 0.0006, "l1": 0.0}
    assert record.data.name.startswith("images:32:")
    network = modules.load(folder / "network")
    assert network.input_shape == (3, 32, 32)
