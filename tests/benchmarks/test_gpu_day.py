"""The steps for a GPU at toy size on the CPU: their first minute there is not spent on their bugs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import gpu_day


def found(out: Path, step: str) -> dict:
    return json.loads((out / f"{step}.json").read_text())["found"]


@pytest.mark.thorough
def test_a_day_at_toy_size(tmp_path: Path) -> None:
    start = ["--out", str(tmp_path), "--toy"]
    gpu_day.main(start)  # the first step
    checks = found(tmp_path, "checks")
    assert set(checks) == {"cayley", "eco"}
    assert all(isinstance(value, float) for row in checks.values() for value in row.values()), checks
    gpu_day.main(start)  # the next one
    assert all(len(row["cayley"]) == 2 for row in found(tmp_path, "speed").values())
    gpu_day.main([*start, "--step", "inverses"])
    row = found(tmp_path, "inverses")["4 of 32, complex64"]
    assert row["torch.linalg.inv, ms"] > 0
    assert row["by blocks, ms"] > 0
    assert row["distance"] < 1e-5
    assert "## flagship\n\nnot made" in (tmp_path / "report.md").read_text()
    with pytest.raises(SystemExit, match="expected one of checks"):
        gpu_day.main([*start, "--step", "nothing"])


@pytest.mark.slow
def test_a_training_at_toy_size(tmp_path: Path) -> None:
    start = ["--out", str(tmp_path), "--toy"]
    gpu_day.main([*start, "--step", "kwlarge"])
    assert found(tmp_path, "kwlarge")["status"] == 0, found(tmp_path, "kwlarge")["said"]
    gpu_day.main([*start, "--step", "kwlarge"])  # resumes a run that is complete
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.thorough
def test_what_is_cut_is_called_again(tmp_path: Path) -> None:
    gpu_day.main(["--out", str(tmp_path), "--toy", "--limit", "0"])
    assert "cut" in found(tmp_path, "checks")
    assert not gpu_day.finished(tmp_path / "checks.json")
    assert gpu_day.run(["sleep", "60"], 0.0)["status"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected a GPU, got none"):
        gpu_day.main(["--out", str(tmp_path)])


@pytest.mark.thorough
def test_a_broken_device_is_found() -> None:
    torch.manual_seed(0)
    here, x = gpu_day.network("cayley"), torch.rand(2, 3, 8, 8)

    class Off(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.001 * self.net(x)

    there = Off(gpu_day.copy.deepcopy(here))
    for name in ("forward", "gradients"):
        check, most = gpu_day.CHECKS[name]
        assert check(here, here, x, "cpu") <= most < check(here, there, x, "cpu")
