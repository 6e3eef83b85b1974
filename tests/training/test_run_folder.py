from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from lipkit import training
from lipkit.errors import DataError, RunError
from lipkit.training import checkpoints as run_folder


def save(folder, epoch, model=None):
    run_folder.save_checkpoint(folder, epoch, model or nn.Linear(2, 1), {"epoch": epoch})


def test_folders_are_never_shared(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: run_folder.create(tmp_path, "run"), range(40)))
    assert len(set(made)) == 40
    assert sorted(p.name for p in made) == [f"run-{i:03d}" for i in range(1, 41)]


def test_a_deleted_run_does_not_give_its_number_away(tmp_path):
    run_folder.create(tmp_path, "run")
    second = run_folder.create(tmp_path, "run")
    (tmp_path / "run-001").rmdir()
    assert run_folder.create(tmp_path, "run").name == "run-003"
    assert run_folder.create(tmp_path, "run-x").name == "run-x-001"
    with pytest.raises(RunError, match=r"expected a folder to write to, got .*: File name too long"):
        run_folder.create(tmp_path, "x" * 300)
    assert second.exists()


def test_a_started_run_is_not_overwritten(tmp_path):
    def opened(lr, resume, folder=tmp_path):
        with run_folder.opened(folder, {"lr": lr}, resume):
            return json.loads((folder / "settings.json").read_text())

    assert opened(0.1, False) == opened(0.1, True) == {"lr": 0.1}
    with pytest.raises(RunError, match="expected a new run folder, got"):
        opened(0.1, False)
    with pytest.raises(RunError, match=r"expected lr = 0.1, as the run in .* was started, got 0.2"):
        opened(0.2, True)
    with pytest.raises(RunError, match=r"expected a run folder with settings.json, got none at"):
        opened(0.1, True, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_one_at_a_time_trains_in_a_folder(tmp_path):
    data, refused = (torch.rand(8, 2), torch.arange(8) % 2), []

    def fit(**options):
        return training.fit(nn.Linear(2, 2), data, epochs=1, run_dir=tmp_path / "run", accelerator="cpu", **options)

    def meanwhile(model):
        with ThreadPoolExecutor(1) as other:
            for again in (lambda: other.submit(fit, resume=True).result(), lambda: fit(resume=True)):
                with pytest.raises(RunError, match=r"got .*run, which another process holds"):
                    again()
                refused.append(True)
        return {}

    fit(evaluate=meanwhile)
    assert refused == [True, True]
    assert fit(resume=True).finished  # the lock is free again


def test_metrics_round_trip_with_nan_as_null(tmp_path):
    run_folder.append_metrics(tmp_path, {"epoch": 1, "loss": 0.5})
    run_folder.append_metrics(tmp_path, {"epoch": 2, "loss": float("inf")})
    assert run_folder.read_metrics(tmp_path) == [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": None}]
    assert run_folder.truncate_metrics(tmp_path, 1) == [{"epoch": 1, "loss": 0.5}]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_torn_last_line_is_left_out_but_another_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 1}\n{"epo')
    assert run_folder.read_metrics(tmp_path) == [{"epoch": 1}]
    path.write_text('{"epo\n{"epoch": 2}\n')
    with pytest.raises(RunError, match="expected a JSON object on line 1"):
        run_folder.read_metrics(tmp_path)


def test_the_last_two_checkpoints_are_kept(tmp_path):
    assert run_folder.load_checkpoint(tmp_path) is None
    for epoch in range(1, 12):
        save(tmp_path, epoch)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["epoch-0010", "epoch-0011"]
    assert run_folder.load_checkpoint(tmp_path)[0] == 11


def test_checkpoints_that_a_crash_left_half_written_do_not_push_out_whole_ones(tmp_path):
    save(tmp_path, 8)
    for step in (90, 120):
        (tmp_path / "checkpoints" / f"epoch-0008-step-{step:06d}").mkdir()
    for step in (60, 70):
        run_folder.save_checkpoint(tmp_path, 8, nn.Linear(2, 1), {"step": step}, step=step)
    assert run_folder.load_checkpoint(tmp_path)[2] == {"step": 70}


def test_a_failed_run_removes_only_what_it_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    theirs = tmp_path / "other" / "a" / "b"
    theirs.mkdir(parents=True)
    for name in ("settings.json", ".lock", "recipe.yaml"):
        (theirs / name).write_text("mine")
    before = sorted(tmp_path.rglob("*"))

    def fail(files=None):
        with run_folder.opened(Path("a/b"), {}, files=files):
            os.chdir("other")  # in the user's code
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left on device"):
        fail()
    assert sorted(tmp_path.rglob("*")) == before
    (theirs / "settings.json").unlink()
    with pytest.raises(RunError, match=r"expected a new run folder, got a/b with recipe.yaml in it"):
        fail({"recipe.yaml": b"another"})
    (tmp_path / "other" / "other").mkdir()
    with pytest.raises(OSError, match="No space left on device"):
        fail({"recipe.yaml": b"mine"})
    assert sorted(os.listdir(theirs)) == [".lock", "recipe.yaml"]


def test_weights_round_trip_with_tied_and_non_contiguous_tensors(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    model[0].bias.data = torch.randn(6)[::2]
    save(tmp_path, 1, model)
    epoch, weights, state = run_folder.load_checkpoint(tmp_path)
    assert (epoch, state) == (1, {"epoch": 1})
    assert weights.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(weights[name], value)
        assert weights[name].dtype == value.dtype


@pytest.mark.parametrize("damage", ["cut", "flip", "no manifest", "bad manifest", "no file"])
def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path, damage):
    save(tmp_path, 1)
    save(tmp_path, 2)
    newest = tmp_path / "checkpoints" / "epoch-0002"
    weights, manifest = newest / "model.safetensors", newest / "checkpoint.json"
    content = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(content[:-1])
    elif damage == "flip":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "bad manifest":
        manifest.write_text("[]")
    else:
        weights.unlink()
    assert run_folder.load_checkpoint(tmp_path)[0] == 1


def test_only_damaged_checkpoints_are_an_error(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / "epoch-0001" / "state.pt").write_bytes(b"")
    with pytest.raises(RunError, match=r"expected an intact checkpoint .* got damaged ones only"):
        run_folder.load_checkpoint(tmp_path)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'pwned'}",)

    for content in (pickle.dumps(Evil(), protocol=2), _torch_saved(Evil())):
        save(tmp_path, 1)
        folder = tmp_path / "checkpoints" / "epoch-0001"
        (folder / "state.pt").write_bytes(content)
        manifest = json.loads((folder / "checkpoint.json").read_text())
        manifest["sha256"]["state.pt"] = hashlib.sha256(content).hexdigest()
        (folder / "checkpoint.json").write_text(json.dumps(manifest))
        with pytest.raises(RunError, match="got damaged ones only"):
            run_folder.load_checkpoint(tmp_path)
        assert not (tmp_path / "pwned").exists()


def _torch_saved(value):
    buffer = io.BytesIO()
    torch.save({"optimizer": value}, buffer)
    return buffer.getvalue()


def test_state_that_is_no_tensor_is_refused(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state): ...

    with pytest.raises(RunError, match="expected tensors in the model's state_dict, got dict at '_extra_state'"):
        save(tmp_path, 1, Extra(1, 1))
    assert not (tmp_path / "checkpoints").exists()


def test_weights_of_another_model_are_refused(tmp_path):
    with pytest.raises(RunError, match=r"run in .*, with bias \(3,\), got another, with bias \(2,\)"):
        run_folder.check_weights(nn.Linear(2, 2), nn.Linear(2, 3).state_dict(), tmp_path)


def tiny(run_dir, model=None, y=None, **options):
    data = torch.rand(8, 2), torch.arange(8) % 2 if y is None else y
    options = {"epochs": 1, "run_dir": run_dir, "accelerator": "cpu"} | options
    return training.fit(nn.Linear(2, 2) if model is None else model, data, **options)


@pytest.mark.thorough
def test_a_refused_folder_leaves_the_model_as_it_was(tmp_path):
    tiny(tmp_path / "run", precision="64-true")
    (tmp_path / "file").write_text("")
    model = nn.Linear(2, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for folder, options, message in (
        ("run", {}, "expected a new run folder"),
        ("run", {"resume": True, "lr": 0.5}, "expected lr = 0.001"),
        ("file", {}, "expected a folder to write to, got .*file: File exists"),
        ("file/run", {}, "expected a folder to write to, got .*run: Not a directory"),
        ("none", {"resume": True}, "expected a run folder with settings.json"),
    ):
        with pytest.raises(RunError, match=message):
            tiny(tmp_path / folder, model, precision="64-true", **options)
    # Nor does a resume with another network, not even the part that fits.
    other = nn.Sequential()
    other.weight, other.bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))
    with pytest.raises(RunError, match=r"with bias \(2,\), got another, with bias \(3,\)"):
        tiny(tmp_path / "run", other, precision="64-true", resume=True)
    assert all(value.dtype == torch.float32 for net in (model, other) for value in net.state_dict().values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert bool((other.weight == 1).all())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "run"]


@pytest.mark.thorough
@pytest.mark.parametrize("present", [True, False])
def test_what_fails_in_its_first_epoch_leaves_nothing(tmp_path, present):
    folder = tmp_path / "run"
    if present:
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")

    def diverge(outputs, targets):
        return outputs.sum() * float("nan")

    for options, error, message in (
        ({"y": torch.arange(8)}, DataError, "expected labels below the number of outputs 2, got 7"),
        ({"loss": diverge}, RunError, "expected a finite loss, got nan .* no checkpoint was written"),
    ):
        with pytest.raises(error, match=message):
            tiny(folder, **options)
        assert [p.name for p in folder.glob("*")] == (["notes.txt"] if present else [])
        assert folder.exists() == present
    assert tiny(folder).finished
    # After its first epoch a run is kept.
    with pytest.raises(RunError, match="the last good checkpoint is kept in"):
        tiny(
            tmp_path / "late", epochs=2, post_step=lambda model, step, end: model.weight.mul_(1 if step == 1 else 1e39)
        )
    assert tiny(tmp_path / "late", epochs=2, resume=True).finished
