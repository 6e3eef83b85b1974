from __future__ import annotations

import json

import numpy as np
import pytest

from lipkit.cli.main import main


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.normal(size=(400, 2)).astype(np.float32))
    np.save(tmp_path / "y.npy", rng.normal(size=(400, 2)) + np.array([2, 0]))
    return tmp_path


FAST = ["--steps", "40", "--folds", "2", "--lr", "0.02", "--batch-size", "64"]


@pytest.mark.thorough
def test_two_files(files, capsys):
    assert main(["wasserstein", str(files / "x.npy"), str(files / "y.npy"), *FAST]) == 0
    out = capsys.readouterr().out
    assert out.startswith("lower bound of W1: ")
    assert float(out.split()[4].rstrip(",")) == pytest.approx(2, abs=0.3)
    assert "asymptotic" in out


@pytest.mark.thorough
def test_json_and_a_diameter(files, capsys):
    arguments = [str(files / "x.npy"), str(files / "y.npy"), "--diameter", "20", "--limit", "100", "--json"]
    assert main(["wasserstein", *arguments, *FAST]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "bernstein"
    assert found["proved"] is True
    assert found["held_out"] == [100, 100]
    assert found["low"] < found["value"] < found["high"]


@pytest.mark.thorough
def test_data_sets_and_a_generator(capsys):
    fast = ["--steps", "2", "--folds", "2", "--limit", "40", "--batch-size", "8"]
    assert main(["wasserstein", "digits", "digits@test", *fast]) == 0
    assert main(["wasserstein", "digits", *fast, "--generator-steps", "2"]) == 0
    assert "training a generator on 20 samples" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.npy", "none.npy"], r"none.npy, got none; write one with numpy.save"),
        (["digits@val", "digits"], "expected SPEC, SPEC@train or SPEC@test"),
        (["nothing", "digits"], "expected a data set"),
        (["digits", "digits", "--critic", "x"], "x"),
        (["digits", "digits", "--device", "toaster"], "expected a device of this machine, got 'toaster'"),
    ],
)
def test_refusals(arguments, message, capsys):
    assert main(["wasserstein", *arguments]) == 2
    err = capsys.readouterr().err.strip()
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"x", b"\x93NUMPY\x01\x00v\x00{", None, "objects", "archive"])
def test_damaged_files(files, content, capsys):
    path = files / "z.npy"
    if content == "objects":
        np.save(path, np.array([{}, {}]), allow_pickle=True)
    elif content == "archive":
        with path.open("wb") as stream:
            np.savez(stream, a=np.zeros(3))
    else:
        path.write_bytes((files / "x.npy").read_bytes()[:-8] if content is None else content)
    assert main(["wasserstein", str(path), str(files / "y.npy")]) == 2
    assert "z.npy: expected" in capsys.readouterr().err
