"""Files that the checker refuses, one reason at a time: each of its checks is the only one that finds the fault."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checker.runs import digits, verdict, write_run
from torch import nn

import lipkit_check as k


def packed(tensors: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(start: int, stop: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(stop - start) // 4], "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("tensors", "size", "why"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "offsets"),
        ({"a": entry(0, 8), "b": entry(12, 16)}, 16, "offsets"),
        ({"a": entry(0, 8)}, 12, "bytes that belong to no tensor"),
        ({"a": entry(0, 8)}, 4, "offsets"),
        ({"a": entry(0, 8) | {"shape": [3]}}, 8, "offsets"),
        ({"a": entry(0, 8) | {"more": 1}}, 8, "safetensors: a"),
        ({"a": entry(0, 8) | {"dtype": "C64"}}, 8, "safetensors: a"),
    ],
)
def test_tensors_cover_their_file_once(tensors: dict[str, Any], size: int, why: str) -> None:
    with pytest.raises(k.Refused, match=why):
        k.safetensors(packed(tensors, bytes(size)))
    good, _ = k.safetensors(packed({"a": entry(0, 8), "b": entry(8, 12)}, bytes(12)))["b"]
    assert good.tolist() == [0.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_are_finite(bad: float) -> None:
    body = np.array([1.0, bad], np.float32).tobytes()
    with pytest.raises(k.Refused, match="numbers that are not finite"):
        k.numbers(k.safetensors(packed({"a": entry(0, 8)}, body)))


def test_only_regular_files_of_a_fair_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(bytes(9))
    for name in ("pipe", "long"):
        with pytest.raises(k.Refused, match="no regular file of at most 8 bytes"):
            k.read(tmp_path / name, 8)
    with pytest.raises(k.Refused, match="no regular file"):
        k.read("/dev/zero", 8)
    assert k.read(tmp_path / "long", 9) == bytes(9)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("files") / "run"
    write_run(folder, nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.LeakyReLU(2.0), nn.Linear(5, 10)), digits(6)[0])
    return folder


def rewritten(run: Path, target: Path, change: Callable[[dict[str, Any], list[dict[str, Any]]], None]) -> Path:
    """A copy with another certificate."""
    shutil.copytree(run, target)
    path = target / "certificate.jsonl"
    header, *rows = map(json.loads, path.read_text().splitlines())
    change(header, rows)
    path.write_text("\n".join(json.dumps(line) for line in (header, *rows)) + "\n")
    return target


def test_a_hash_that_is_not_that_of_the_network(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    path = folder / "network" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"sha256": "0" * 64}))
    with pytest.raises(k.Refused, match="its hash is"):
        k.load_network(folder / "network")


def test_labels_of_others(run: Path, tmp_path: Path, capsys: Any) -> None:
    def change(header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        # Of a sample without a radius, no other field says anything of the label.
        row = next(row for row in rows if row["radius"] == 0)
        row["label"] = next(i for i in range(10) if i not in (row["label"], row["prediction"]))
        row["margin"] = -1e-9

    assert verdict(rewritten(run, tmp_path / "run", change)) == 1
    assert "label" in capsys.readouterr().out


def test_a_radius_above_the_own_one_is_no_success(run: Path, tmp_path: Path, capsys: Any) -> None:
    def change(header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        row = next(row for row in rows if row["radius"] > 0)
        row["radius"] *= 1.01

    assert verdict(rewritten(run, tmp_path / "run", change)) == 1
    assert "5 radii confirmed, 1 refused" in capsys.readouterr().out


@pytest.mark.parametrize("machine", [k.Floats, k.Integers])
def test_a_factor_found_in_any_way_proves_only_what_it_proves(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = machine()
    monkeypatch.setattr(k, "ops", ops)
    monkeypatch.setattr(ops, "factor", lambda h: h * 0, raising=False)
    error = Fraction(1, 16)
    for value in (-0.5, 1 / 32):
        assert not k.positive(ops.of(np.eye(3) * value)[0], error)


def test_the_body_is_all_but_the_last_layer(run: Path) -> None:
    k.ops = k.Floats()
    config, tensors, _ = k.load_network(run / "network")
    network = k.Network(config["network"], tensors)
    first = 2 * np.linalg.norm(tensors["1.weight"].astype(np.float64), 2)
    assert first * (1 - 1e-12) <= float(network.body) <= first * (1 + 1e-6)


@pytest.mark.parametrize("found", [[], 0, False, "01", [0], [0, "1"], [0, True], [0, 1, 2], {"0": 1}, [1, 0], [1, 1]])
def test_a_range_of_inputs_is_two_numbers(found: Any, run: Path, tmp_path: Path, capsys: Any) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    path = folder / "network" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"input_range": found}))
    assert verdict(folder) == 1
    assert "input_range" in capsys.readouterr().out
