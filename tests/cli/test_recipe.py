"""lipkit recipe show: every key is described, and what is shown is a recipe."""

from __future__ import annotations

import pytest
import yaml

from lipkit.cli.main import main
from lipkit.cli.recipe import keys
from lipkit.experiments.recipe import load_recipe, names
from lipkit.experiments.recipe_schema import Recipe


def paths(content: dict[str, object], prefix: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    found = set()
    for key, value in content.items():
        found.add((*prefix, key))
        if isinstance(value, dict) and not key.endswith("options"):
            found |= paths(value, (*prefix, key))
    return found


def test_every_key_is_described_once() -> None:
    found = keys()
    assert len({key.path for key in found}) == len(found)
    assert all(key.description.strip() for key in found)
    assert {key.path for key in found} >= paths(load_recipe("cifar10_wrn28_10_at_lipreg").plain())
    assert {key.path for key in found if len(key.path) == 1} == {(name,) for name in Recipe.model_fields}


@pytest.mark.parametrize(
    ("key", "values", "default"),
    [
        ("train.lr", "number > 0", "0.001"),
        ("train.momentum", "number >= 0 and < 1", "0.9"),
        ("train.optimizer", "adam | adamw | sgd | spectral | riemannian_adam", "adam"),
        ("train.epochs", "integer >= 1, or null", "null"),
        ("train.grad_clip", "number > 0, or null", "null"),
        ("augment.flip", "true | false", "false"),
        ("model.options", "keys and values", "{}"),
        ("adversary", "null, or keys", "null"),
        ("adversary.step_size", "number > 0, or null", "0.2"),
        ("certify.attack_samples", "integer >= 1, or null", "1000"),
    ],
)
def test_values_and_defaults_are_the_schemas(key: str, values: str, default: str | None) -> None:
    found = {".".join(k.path): k for k in keys()}[key]
    assert (found.values, found.default) == (values, default)


def test_the_reference_names_every_key_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "show"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    for key in keys():
        assert sum(line.startswith(f"{'.'.join(key.path)}  (") for line in lines) == 1, key.path
    for part in ("kwlarge: layer=cayley", "hinge: eps0=0.5, lipschitz=1.0", "multistep: milestones=[0.25, 0.75]"):
        assert part in text


@pytest.mark.thorough
@pytest.mark.parametrize("name", names())
def test_a_shown_recipe_is_that_recipe(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "show", name, "train.epochs=3"]) == 0
    text = capsys.readouterr().out
    assert Recipe.model_validate(yaml.safe_load(text)) == load_recipe(name, ["train.epochs=3"])
    assert all("  # " in line for line in text.splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits_cayle"], "unknown recipe 'digits_cayle', did you mean"),
        (["digits_cayley", "train.epoch=3"], "did you mean 'train.epochs'?"),
        (["train.epochs=3"], "expected a recipe in front of changes"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "show", *arguments]) == 2
    assert message in capsys.readouterr().err
