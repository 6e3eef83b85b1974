"""The record: what is written is what is read, by this version and by later ones."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from lipkit import modules
from lipkit.data import Split
from lipkit.errors import RunError
from lipkit.evaluation import Attack, Evaluation, evaluate
from lipkit.report.plots import accuracy_curve
from lipkit.report.record import Record, from_evaluation, hardware, read_record, seen, write_record
from lipkit.report.tables import accuracy_rows


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    torch.manual_seed(0)
    network = modules.Network([nn.Flatten(), nn.Linear(16, 3)], (1, 4, 4))
    x = torch.rand(30, 1, 4, 4)
    data = Split(x, network(x).argmax(dim=1))
    return evaluate(network, data, eps=(36 / 255, 0.5), attack=Attack(steps=5), classes=("a", "b", "c"))


@pytest.fixture
def record(evaluation: Evaluation) -> Record:
    return from_evaluation(
        evaluation,
        name="run-001",
        data="toy",
        classes=("a", "b", "c"),
        train_samples=120,
        recipe={"data": {"name": "toy"}, "epochs": 3, "eps": [0.1, 36 / 255], "note": None},
        seed=7,
        claimed=1.0,
        parameters=51,
        times={"train": 1.5},
    )


def test_holds_the_figures_of_the_evaluation(record: Record, evaluation: Evaluation) -> None:
    assert record.clean.value == evaluation.clean.value
    assert [row.eps for row in record.certified] == [36 / 255, 0.5]
    assert [row.share.count for row in record.certified] == [share.count for share in evaluation.certified]
    assert [row.share.count for row in record.attacked] == [row.share.count for row in evaluation.attacked]
    assert record.lipschitz.computed == evaluation.certificate.constant
    assert record.lipschitz.body == evaluation.certificate.body_constant
    assert record.network_sha256 == evaluation.certificate.network_sha256
    assert record.attack.closest == evaluation.cross_check.closest
    assert [row.name for row in record.per_class] == ["a", "b", "c"]
    assert set(record.times) == {"train", "certify", "attack"}
    assert record.recipe == {"data": {"name": "toy"}, "epochs": 3, "eps": [0.1, 36 / 255], "note": None}
    assert (record.seed, record.parameters, record.lipschitz.claimed, record.times["train"]) == (7, 51, 1.0, 1.5)
    assert (record.data.train_samples, record.data.test_samples, record.data.classes) == (120, 30, ["a", "b", "c"])
    assert [row.ignored and row.ignored.count for row in record.certified] == [
        share.count for share in evaluation.certified_ignored
    ]
    assert record.versions["torch"] == torch.__version__
    assert record.hardware.cores >= 1
    assert record.hardware.threads == torch.get_num_threads()
    assert record.schema_version == "1.0"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["pgd", "apgd", "fab"])
def test_figures_under_attack_have_the_name_of_the_attack(name: str, evaluation: Evaluation) -> None:
    attack = dataclasses.replace(evaluation.attack, name=name)
    other = from_evaluation(dataclasses.replace(evaluation, attack=attack), name="a", data="b")
    assert other.metrics() == dataclasses.replace(evaluation, attack=attack).metrics()
    assert accuracy_rows(other)[0][3] == name.upper()
    assert f"{name.upper()} (30 attacked)" in accuracy_curve(other)
    odd = other.model_copy(update={"attack": other.attack.model_copy(update={"name": "$<b> l2"})})
    assert [*odd.metrics()][-2] == "attack(0.5)"


def test_what_a_training_has_seen_is_not_guessed() -> None:
    row = {"steps": 2, "samples": 100, "cpu_seconds": 0.5}
    found = seen([row, row], 50)
    assert found is not None
    assert (found.steps, found.samples, found.epochs, found.samples_per_cpu_second) == (4, 200, 4.0, 200.0)
    assert seen([], 50) is None
    assert seen([row, {"steps": 2}], 50) is None  # of an older version


def test_the_record_of_a_measurement_is_none_of_a_run(record: Record, tmp_path: Path) -> None:
    content = json.loads(record.model_dump_json()) | {
        "task": "measurement",
        "measure": "m",
        "options": {},
        "figures": {},
    }
    (tmp_path / "record.json").write_text(json.dumps(content))
    with pytest.raises(RunError, match="expected the record of a run, got that of the measurement run-001"):
        read_record(tmp_path)


def test_the_threads_of_torch_are_named_and_old_records_load_without(record: Record, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert hardware().threads == count
    finally:
        torch.set_num_threads(before)
    content = json.loads(record.model_dump_json())
    assert content["hardware"].pop("threads") == record.hardware.threads
    (tmp_path / "record.json").write_text(json.dumps(content))
    old = read_record(tmp_path)
    assert old.hardware.threads is None
    assert old.model_copy(update={"hardware": record.hardware}).model_dump_json() == record.model_dump_json()


def test_round_trip(record: Record, tmp_path: Path) -> None:
    write_record(record, tmp_path / "record.json")
    assert read_record(tmp_path / "record.json").model_dump_json() == record.model_dump_json()
    assert read_record(tmp_path).lipschitz == record.lipschitz  # the folder is enough
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_nan_and_infinity_survive_in_strict_json(record: Record, tmp_path: Path) -> None:
    odd = record.model_copy(
        update={
            "attack": record.attack.model_copy(update={"closest": math.inf}),
            "clean": record.clean.model_copy(update={"value": math.nan}),
            "recipe": {"clip": math.inf},
        }
    )
    write_record(odd, tmp_path / "record.json")

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    json.loads((tmp_path / "record.json").read_text(), parse_constant=refuse)
    back = read_record(tmp_path)
    assert back.attack.closest == math.inf
    assert math.isnan(back.clean.value)
    assert back.recipe == {"clip": "Infinity"}


def test_a_field_added_later_is_kept(record: Record, tmp_path: Path) -> None:
    content = json.loads(record.model_dump_json())
    content |= {"schema_version": "1.7", "tightness": 0.9}
    content["clean"]["method"] = "new"
    (tmp_path / "record.json").write_text(json.dumps(content))
    back = read_record(tmp_path)
    assert (back.model_extra, back.schema_version) == ({"tightness": 0.9}, "1.7")
    assert json.loads(back.model_dump_json()) == content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": "2.0"}, "expected a record of schema version 1, got 2.0"),
        ({"schema_version": None}, "expected a record with a schema_version, got none"),
        ({"clean": {"value": 1.0}}, r"record\.json: clean\.count: Field required"),
        ({"certified": "none"}, "certified: Input should be a valid list"),
    ],
)
def test_refuses_other_records(record: Record, tmp_path: Path, change: dict, message: str) -> None:
    (tmp_path / "record.json").write_text(json.dumps(json.loads(record.model_dump_json()) | change))
    with pytest.raises(RunError, match=message):
        read_record(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_refuses_what_is_no_record(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "record.json").write_bytes(content)
    with pytest.raises(RunError, match=r"expected (JSON|a JSON object) in .*record\.json, got"):
        read_record(tmp_path)


def test_a_missing_record_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"expected a run folder with record\.json, got none"):
        read_record(tmp_path)
