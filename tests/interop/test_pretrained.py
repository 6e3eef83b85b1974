"""Model folders: read back offline, altered files refused, nothing named in a file is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import lipkit
from lipkit import models
from lipkit.errors import DataError, OptionError
from lipkit.interop import from_pretrained, save_pretrained
from lipkit.modules.storage import check_tensors

OPTIONS: dict[str, Any] = {"layer": "cayley", "input_shape": (1, 6, 6), "classes": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = models.build("small", **OPTIONS)
    return save_pretrained(model, tmp_path / "hub", name="small", options=OPTIONS, input_shape=(1, 6, 6), card="# a")


@pytest.mark.thorough
@pytest.mark.parametrize("layer", ["cayley", "eco", "sandwich", "svcm"])
def test_a_model_comes_back_and_trains_on(layer: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = {**OPTIONS, "layer": layer}
    model = models.build("small", **options).eval()
    save_pretrained(model, tmp_path, name="small", options=options, input_shape=(1, 6, 6), classes=["a", "b", "c"])
    back = from_pretrained(tmp_path)
    x = torch.rand(4, 1, 6, 6)
    assert torch.equal(back(x), model(x))
    assert torch.equal(lipkit.load(tmp_path / "network")(x), lipkit.export(model, (1, 6, 6))(x))
    assert [p.requires_grad for p in back.parameters()] == [p.requires_grad for p in model.parameters()]
    back.train()(x).sum().backward()
    assert all(p.grad is not None for p in back.parameters() if p.requires_grad)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["convnet", "small"])
def test_models_with_counters_and_models_with_a_split_gain_come_back(name: str, tmp_path: Path) -> None:
    options = {"input_shape": (1, 8, 8), "classes": 3, "lipschitz": 2.0, "split": True}
    model = models.build(name, **options)
    x = torch.rand(4, 1, 8, 8)
    if name == "convnet":
        model(x)  # in training: batch norm counts the batch
        assert any(int(n) == 1 for key, n in model.state_dict().items() if key.endswith("num_batches_tracked"))
    save_pretrained(model.eval(), tmp_path, name=name, options=options, input_shape=(1, 8, 8))
    back = from_pretrained(tmp_path)
    assert torch.equal(back(x), model(x))
    wanted, found = model.state_dict(), back.state_dict()
    assert {key: (t.dtype, t.tolist()) for key, t in found.items()} == {
        key: (t.dtype, t.tolist()) for key, t in wanted.items()
    }


@pytest.mark.thorough
@pytest.mark.parametrize("more", [{}, {"phi": "relu"}, {"layer": "ren"}, {"layer": "linear"}], ids=str)
def test_recurrent_models_come_back(more: dict[str, Any], tmp_path: Path) -> None:
    options = {"states": 3, "units": 4, "input_shape": (5, 2), "classes": 3, "lipschitz": 2.0, **more}
    model = models.build("sequence_classifier", **options).eval()
    save_pretrained(model, tmp_path, name="sequence_classifier", options=options, input_shape=(5, 2))
    x = torch.randn(4, 5, 2)
    assert torch.equal(from_pretrained(tmp_path)(x), model(x))


def test_the_card_is_written(folder: Path) -> None:
    assert (folder / "README.md").read_text() == "# a"


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schema_version": 2}, "expected schema_version 1, got 2"),
        ({"sha256": "0" * 64}, "expected the weights with sha256 000"),
        ({"model": {"name": "os:system", "options": {}}}, "expected a model of the table"),
        ({"model": {"name": "builtins.eval", "options": {}}}, "expected a model of the table"),
        ({"model": {"name": ["small"], "options": {}}}, "expected a model"),
        ({"model": {"name": "rebuild", "options": {"network": "digits-cayley"}}}, "of the table .*, got 'rebuild'"),
        ({"model": {"name": "small", "options": {**OPTIONS, "layer": "os.system"}}}, "expected options that build it"),
        ({"model": {"name": "small", "options": {**OPTIONS, "wrong": 1}}}, "expected options that build it"),
        ({"model": {"name": "small", "options": {**OPTIONS, "classes": 4}}}, "expected shape"),
        ({"model": {"name": "small", "options": {**OPTIONS, "width": 10**6}}}, "expected shape"),
        (
            {"model": {"name": "sllnet", "options": {"depth": 10**9}}},
            "a model with many more tensors than its file has",
        ),
        ({"model": {"name": "mlp", "options": {"hidden": [2] * 9999, "input_shape": [2], "classes": 2}}}, "many more"),
        ({"model": 3}, "expected a model with a name and options"),
        ({"classes": 3}, "expected input_shape and classes as lists"),
    ],
    ids=lambda v: "" if isinstance(v, str) else next(iter(v)),
)
def test_altered_configurations_are_refused(folder: Path, values: dict[str, Any], message: str) -> None:
    change(folder, **values)
    with pytest.raises(DataError, match=message):
        from_pretrained(folder)


def test_a_key_twice_is_refused(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(
        path.read_text().replace('{\n "schema_version": 1,', '{\n "schema_version": 2, "schema_version": 1,')
    )
    with pytest.raises(DataError, match="expected JSON, got: a key twice"):
        from_pretrained(folder)


def test_an_integer_in_place_of_a_weight_and_the_reverse_are_refused() -> None:
    model = nn.BatchNorm1d(2)
    state = model.state_dict()
    with pytest.raises(DataError, match=r"num_batches_tracked: expected torch\.int64, got torch\.float32"):
        check_tensors(model, {**state, "num_batches_tracked": torch.zeros(())})
    with pytest.raises(DataError, match=r"weight: expected a floating dtype, got torch\.int64"):
        check_tensors(model, {**state, "weight": torch.zeros(2, dtype=torch.int64)})
    check_tensors(model, {**state, "weight": torch.zeros(2).double()})


def test_broken_and_missing_files_are_refused(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1])
    with pytest.raises(DataError, match="expected the weights with sha256"):
        from_pretrained(folder)
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(DataError, match="expected the weights with sha256"):
        from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"expected config\.json and model\.safetensors"):
        from_pretrained(folder)
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"expected config\.json|expected JSON"):
        from_pretrained(folder)


@pytest.mark.thorough
def test_what_cannot_be_built_again_is_not_written(tmp_path: Path) -> None:
    model = models.build("small", **OPTIONS)
    with pytest.raises(OptionError, match="a folder holds no code"):
        save_pretrained(model, tmp_path, name="my.module:net", options={}, input_shape=(1, 6, 6))
    with pytest.raises(OptionError, match="no second network"):
        save_pretrained(model, tmp_path, name="rebuild", options={"network": "a"}, input_shape=(1, 6, 6))
    with pytest.raises(OptionError, match="expected a model that its name and options make again"):
        save_pretrained(model, tmp_path, name="small", options={**OPTIONS, "classes": 5}, input_shape=(1, 6, 6))
    with pytest.raises(OptionError, match="expected a model that its name and options make again"):
        save_pretrained(model, tmp_path, name="small", options={**OPTIONS, "layer": nn.ReLU()}, input_shape=(1, 6, 6))
    assert not list(tmp_path.iterdir())
