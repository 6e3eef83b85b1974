"""lipkit recipe show: every key is described, and what is shown is a recipe."""

from __future__ import annotations

import pytest
import yaml

from lipkit.cli.main import main
from lipkit.cli.recipe import commented
from lipkit.experiments.recipe import DEFAULT, load_recipe, names
from lipkit.experiments.recipe_schema import Recipe, keys
from lipkit.text import printable_lines


def paths(content: dict[str, object], prefix: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    found = set()
    for key, value in content.items():
        found.add((*prefix, key))
        if isinstance(value, dict) and not key.endswith("options"):
            found |= paths(value, (*prefix, key))
    return found


def test_every_key_is_described_once() -> None:
    found = [path for path, *_ in keys()]
    assert len(set(found)) == len(found)
    assert all((field.description or "").strip() for _, field, _ in keys())
    assert set(found) >= paths(load_recipe("cifar10_wrn28_10_at_lipreg").model_dump())
    assert {path for path in found if len(path) == 1} == {(name,) for name in Recipe.model_fields}


@pytest.mark.thorough
def test_without_a_name_every_key_and_option_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "show"]) == 0
    text = capsys.readouterr().out
    lines = [line.removeprefix("# ").strip() for line in text.splitlines()]
    described = [line for line in lines if "  # " in line]
    assert [line.split(":")[0] for line in described] == [path[-1] for path, *_ in keys()]
    assert all(line.rpartition("  # ")[2].strip() for line in described)
    # Keys of a section that is null are comments.
    assert any(line.startswith("#   step_size: 0.2 ") for line in text.splitlines())
    assert any(line.startswith("#   eps: (required) ") for line in text.splitlines())
    # Behind a description stands what the key takes.
    for end in (
        "peak learning rate (number > 0)",
        "(number >= 0 and < 1)",
        "(global | local | best)",
        "l2 radii of the attack; null for those of eps (list of number >= 0, or null)",
    ):
        assert any(line.endswith(end) for line in lines), end
    for part in (
        "options of model kwlarge: layer='cayley', width=1",
        "options of loss hinge: eps0=0.5, lipschitz=1.0",
        "options of schedule multistep: milestones=(0.25, 0.75), gamma=0.1",
        "options of layer rko: orthogonalize",
    ):
        assert any(line.startswith(part) for line in lines), part
    assert Recipe.model_validate(yaml.safe_load(text)) == load_recipe(DEFAULT)


@pytest.mark.thorough
@pytest.mark.usual(15)
@pytest.mark.parametrize("name", names())
def test_a_shown_recipe_is_that_recipe(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "show", name, "train.epochs=3"]) == 0
    text = capsys.readouterr().out
    assert Recipe.model_validate(yaml.safe_load(text)) == load_recipe(name, ["train.epochs=3"])
    assert all("  # " in line for line in text.splitlines())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "text", ["a\u200db\u202e\xa0", "Größe # 日本: 😀", "a\n\n  b # c\n", "\0\x1b[1m\u2028", "010", ""]
)
def test_a_text_is_shown_as_yaml_reads_it(text: str) -> None:
    recipe = load_recipe(DEFAULT).model_copy(update={"description": text})
    shown = printable_lines(commented(recipe))
    assert Recipe.model_validate(yaml.safe_load(shown)) == recipe


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits_cayle"], "unknown recipe 'digits_cayle', did you mean"),
        ([""], "unknown recipe ''"),
        (["digits_cayley", "train.epoch=3"], "did you mean 'train.epochs'?"),
        (["train.epochs=3"], "expected a recipe in front of changes"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "show", *arguments]) == 2
    assert message in capsys.readouterr().err
