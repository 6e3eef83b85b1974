"""Recipes with an adversary and a penalty, from YAML to the report."""

from __future__ import annotations

import pytest

from lipkit import modules
from lipkit.data import load
from lipkit.errors import RecipeError
from lipkit.experiments import run as pipeline
from lipkit.experiments.recipe import load_recipe
from lipkit.training import LipschitzPenalty, PgdAdversary
from lipkit.training import checkpoints as run_folder

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("no_plots")]

QUICK = [
    "data.limit=60", "train.epochs=1", "train.batch_size=20", "train.accelerator=cpu", "adversary.steps=2",
    "certify.attack_steps=2", "certify.attack_samples=20", "certify.eps=0.1",
]  # fmt: skip


def test_a_plain_network_is_trained_certified_and_reported(tmp_path) -> None:
    outcome = pipeline.train(load_recipe("digits_at_lipreg", QUICK), out=tmp_path)
    network = modules.load(outcome.folder / "network")
    assert not any("Norm" in type(m).__name__ for m in network.modules())  # folded, as it is in evaluation
    assert outcome.metrics["lipschitz"] > 1
    assert (outcome.folder / "report.html").exists()
    row = run_folder.read_metrics(outcome.folder)[0]
    assert row["penalty"] != 0
    settings = run_folder.read_json(outcome.folder / "settings.json")
    assert settings["penalty"] == "LipschitzPenalty(method='lipbound', weight=0.1, l1=0.0)"
    assert settings["adversary"].startswith("PgdAdversary(norm='linf', eps=0.15, steps=2, step_size=0.4")
    again = pipeline.train(pipeline.read_recipe(outcome.folder), resume=outcome.folder)
    assert again.record.network_sha256 == outcome.record.network_sha256


def test_sections_become_what_fit_takes() -> None:
    recipe = load_recipe("cifar10_wrn28_10_at_lipreg")
    data = load("digits")
    taken = pipeline.training_options(recipe, data)
    assert taken.penalty == LipschitzPenalty("lipbound", 0.008, 0.0)
    assert taken.adversary == PgdAdversary("linf", 8 / 255, 10, 0.2, True, "ce", (0.0, 1.0))
    plain = pipeline.training_options(load_recipe("digits_cayley"), data)
    assert (plain.penalty, plain.adversary) == (None, None)
    attack = pipeline.training_options(load_recipe("digits_at"), load("square_wave")).adversary
    assert isinstance(attack, PgdAdversary)
    assert attack.box is None
    base, changed = load_recipe("digits_at"), load_recipe("digits_at_lipreg")
    assert base.penalty is None
    assert changed.adversary == base.adversary
    assert load_recipe("digits_at_lipreg", ["penalty=null", "name=digits_at"]).penalty is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("penalty.wieght=1", "unknown key 'penalty.wieght', did you mean 'penalty.weight'?"),
        ("penalty.method=power", "penalty: expected method as one of symbol_sup, lipbound,.* got 'power'"),
        ("penalty.weight=-1", "penalty.weight: expected greater than or equal to 0, got -1"),
        ("adversary.norm=l1", "adversary.norm: expected 'linf' or 'l2', got 'l1'"),
        ("adversary.step=1", "unknown key 'adversary.step', did you mean 'adversary.steps'?"),
        ("adversary.eps=0", "adversary.eps: expected greater than 0, got 0"),
        ("adversary={}", "expected the key 'adversary.eps', got none"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("digits_at_lipreg", [override])


@pytest.mark.parametrize("name", ["digits_cayley", "digits_at"])
def test_trades_needs_samples_beside_their_examples(name: str) -> None:
    with pytest.raises(RecipeError, match=r"expected adversary.beside = true for loss.name trades"):
        load_recipe(name, ["loss=trades"])
    assert load_recipe("digits_at", ["loss=trades", "adversary.beside=true"]).loss.name == "trades"


def test_regression_has_no_adversary() -> None:
    with pytest.raises(RecipeError, match="expected an adversary for task classification only, got task regression"):
        load_recipe("square_wave", ["adversary.eps=0.1"])
