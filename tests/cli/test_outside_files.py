"""Files from outside are regular ones of bounded size, whoever reads them: a device, a pipe or a folder is refused."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from papers.table_runs import read_any_record
from PIL import Image

import lipkit
from lipkit import files
from lipkit.certificates.certificate_file import read_certificate
from lipkit.data.binary import read_binary, read_idx, read_images, read_python
from lipkit.data.images import decode
from lipkit.data.reading import load_npz, read_npy
from lipkit.errors import LipkitError, RecipeError
from lipkit.experiments.recipe import load_recipe
from lipkit.interop import from_pretrained
from lipkit.report import read_record
from lipkit.report.curve import load_curve
from lipkit.report.examples import load_examples
from lipkit.training.checkpoints import read_json, read_metrics

RUN = Path(__file__).parents[1] / "experiments" / "run_of_schema_1"
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "certificate": ("certificate.jsonl", read_certificate),
    "record": ("record.json", read_record),
    "any record": ("record.json", read_any_record),
    "recipe": ("recipe.yaml", load_recipe),
    "metrics": ("metrics.jsonl", lambda path: read_metrics(path.parent)),
    "settings": ("settings.json", read_json),
    "examples": ("examples.safetensors", lambda path: load_examples(path.parent)),
    "curve": ("curve.safetensors", lambda path: load_curve(path.parent)),
    "configuration": ("network/config.json", lambda path: lipkit.load(path.parent)),
    "weights": ("network/model.safetensors", lambda path: lipkit.load(path.parent)),
    "model": ("hub/config.json", lambda path: from_pretrained(path.parent)),
    "parameters": ("hub/model.safetensors", lambda path: from_pretrained(path.parent)),
    "npz": ("data.npz", load_npz),
    "npy": ("data.npy", read_npy),
    "idx": ("data.idx", lambda path: read_idx(path, 1)),
    "cifar": ("data.bin", read_binary),
    "pickle": ("data.pkl", read_python),
    "stl10": ("images.bin", read_images),
    "image": ("image.png", decode),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUN, tmp_path / "run"))


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """A reader that waits for a pipe or a device would wait for ever."""

    def stop(*_: object) -> None:
        pytest.fail("waited for a file that is no regular one")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 10)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("reader", READERS)
def test_only_regular_files_are_read(run: Path, reader: str, kind: str) -> None:
    name, read = READERS[reader]
    path = run / name
    path.unlink(missing_ok=True)
    ends: tuple[int, ...] = ()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        ends = os.openpty()
        path.symlink_to(os.ttyname(ends[1]))
    else:
        path.mkdir()
    try:
        with pytest.raises(LipkitError) as caught:
            read(path)
    finally:
        for end in ends:
            os.close(end)
    assert str(run) in str(caught.value)


@pytest.mark.parametrize(
    "name", ["record.json", "recipe.yaml", "metrics.jsonl", "settings.json", "network/config.json"]
)
def test_a_text_without_end_is_refused_before_it_is_read(run: Path, name: str) -> None:
    path = run / name
    os.truncate(path, 1 << 37)  # sparse: 128 GiB that take no space
    read = next(read for file, read in READERS.values() if file == name)
    with pytest.raises(LipkitError, match=r"137438953472 bytes, more than \d+") as caught:
        read(path)
    assert str(run) in str(caught.value)


def test_weights_without_end_are_refused_before_they_are_read(run: Path) -> None:
    os.truncate(run / "network" / "model.safetensors", 1 << 37)
    with pytest.raises(LipkitError, match=f"137438953472 bytes, more than {files.MAX_BYTES}"):
        lipkit.load(run / "network")


def test_links_to_regular_files_are_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "linked.npy").symlink_to(tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", np.arange(3))
    assert read_npy(tmp_path / "linked.npy").tolist() == [0, 1, 2]
    Image.fromarray(np.full((2, 2), 7, np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "linked.png").symlink_to(tmp_path / "a.png")
    assert decode(tmp_path / "linked.png").tolist() == [[[7, 7], [7, 7]]]
    (tmp_path / "network").symlink_to(run / "network")
    assert lipkit.modules.sha256(lipkit.load(tmp_path / "network")) == read_record(run).network_sha256


@pytest.mark.parametrize("name", ["record.json", "settings.json", "metrics.jsonl", "network/config.json"])
def test_deep_nesting_is_refused(run: Path, name: str) -> None:
    path = run / name
    path.write_text("[" * 200_000 + "\n")
    for file, read in READERS.values():
        if file == name:
            with pytest.raises(LipkitError, match=r"expected|not a saved network"):
                read(path)


OPTIONS = "name: a\ndata: digits\ntrain: {{epochs: 1}}\nmodel:\n  name: small\n  options:\n{}"
LINES = [f"    a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)]
MERGED = [f"    a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OPTIONS.format("    a0: &a0 [1]\n" + "".join(LINES)), "its aliases multiply"),
        (OPTIONS.format("    a0: &a0 {x: 1}\n" + "".join(MERGED)), "its aliases multiply"),
        (OPTIONS.format("    a0: &a0 [*a0]\n"), "an anchor that holds itself"),
        (OPTIONS.format("    a0: &a0 {b: {c: *a0}}\n"), "an anchor that holds itself"),
        (OPTIONS.format(f"    width: {'[' * 1000}\n"), "expected YAML"),
    ],
)
def test_recipes_that_multiply_or_hold_themselves_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(path)
    assert len(str(caught.value)) < 1000


def test_aliases_that_stay_small_are_values(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(OPTIONS.format("    mean: &m [1/2]\n    std: *m\n"))
    assert load_recipe(path).model.options == {"mean": [0.5], "std": [0.5]}
    with pytest.raises(RecipeError, match="an anchor that holds itself"):
        load_recipe("digits_cayley", ["model.options=&a [*a]"])


@pytest.mark.thorough
def test_a_long_text_that_is_almost_a_number_is_seen_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(OPTIONS.format(f"    width: {'1' * 500_000}x\n"))
    assert load_recipe(path).model.options["width"] == "1" * 500_000 + "x"


def test_a_write_that_fails_names_its_file(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        with pytest.raises(OSError, match="File too large") as whole:
            files.write_atomic(tmp_path / "a.bin", bytes(100_000))
        (tmp_path / "b.txt").write_bytes(bytes(1000))
        with pytest.raises(OSError, match="File too large") as line:
            files.append_line(tmp_path / "b.txt", "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert whole.value.filename == str(tmp_path / "a.bin")
    assert line.value.filename == str(tmp_path / "b.txt")
    assert not (tmp_path / "a.bin").exists()
