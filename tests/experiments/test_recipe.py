from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel

from lipkit.errors import OptionError, RecipeError
from lipkit.experiments import recipe as recipes
from lipkit.experiments.recipe import load_recipe
from lipkit.experiments.recipe_schema import Recipe, parse_number
from lipkit.training import TrainOptions

SMALL = "name: a\ndata: digits\nmodel: small\ntrain: {epochs: 1}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "r.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", recipes.names())
def test_every_packaged_recipe_is_whole_and_survives_its_own_yaml(tmp_path, name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description
    assert load_recipe(write(tmp_path, recipes.to_yaml(recipe))) == recipe


def test_the_default_is_digits():
    assert load_recipe().data.spec == "digits"


def test_every_field_is_described():
    def walk(model: type[BaseModel]) -> int:
        count = 0
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            count += 1
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                count += walk(field.annotation)
        return count

    assert walk(Recipe) > 35


def test_fractions_and_exponents_are_numbers_everywhere(tmp_path):
    text = SMALL.replace("{epochs: 1}", "{epochs: 1, lr: 1e-3, weight_decay: 1/200}")
    text += "certify: {eps: [36/255, 1], attack_eps: 72/255}\nloss: {name: hinge, options: {eps0: 36/255}}\n"
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.certify.eps == (36 / 255, 1.0)
    assert recipe.certify.attack_eps == (72 / 255,)
    assert recipe.loss.options == {"eps0": 36 / 255}
    assert (recipe.train.lr, recipe.train.weight_decay) == (0.001, 0.005)


def test_the_range_of_data_is_two_numbers(tmp_path):
    plain = load_recipe()
    assert "range" not in recipes.to_yaml(plain)  # the text of older recipes, by which a table finds its runs
    for given, expected in {"-1,1/2": (-1.0, 0.5), "[0, 40]": (0.0, 40.0), "null": None}.items():
        recipe = load_recipe("digits_cayley", [f"data.range={given}"])
        assert recipe.data.range == expected
        assert load_recipe(write(tmp_path, recipes.to_yaml(recipe))) == recipe
    for given in ("5", "1,2,3", "wide"):
        with pytest.raises(RecipeError, match=r"data\.range"):
            load_recipe("digits_cayley", [f"data.range={given}"])


def test_numbers_are_parsed_not_evaluated():
    assert parse_number("-3/4") == -0.75
    assert parse_number(" 1.5e-2 / 3 ") == 0.005
    for text in ("1/0", "1/0.0", "2**3", "__import__('os')", "1/2/3", "", "nan", "inf", "0x10", "1_000", "٣"):
        with pytest.raises(ValueError, match="expected a number such as"):
            parse_number(text)
    for value in (True, None, [1]):
        with pytest.raises(ValueError, match="expected a number such as"):
            parse_number(value)


def test_overrides_apply_in_order_and_open_short_forms():
    recipe = load_recipe(
        "digits_cayley",
        [
            "data=folder:/tmp/x=y",
            "data.limit=7",
            "model=small",
            "model.options.width=2",
            "loss=offset_cross_entropy",
            "loss.options.temperature=1/4",
            "train.schedule=multistep",
            "train.schedule.options.milestones=[1/4, 3/4]",
            "train.lr=0.5",
            "train.lr=1/4",
            "certify.attack_samples=null",
            "certify.eps=36/255, 1",
        ],
    )
    assert (recipe.data.spec, recipe.data.limit) == ("folder:/tmp/x=y", 7)
    assert recipe.model.options == {"width": 2}
    assert recipe.loss.options == {"temperature": 0.25}
    assert recipe.train.schedule.options == {"milestones": [0.25, 0.75]}
    assert recipe.train.lr == 0.25
    assert recipe.certify.attack_samples is None
    assert recipe.certify.eps == (36 / 255, 1.0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trian.lr=1", "unknown key 'trian', did you mean 'train'"),
        ("train.epoch=1", "unknown key 'train.epoch', did you mean 'train.epochs'"),
        ("lr=1", "unknown key 'lr', did you mean 'train.lr'"),
        ("model.width=2", "unknown key 'model.width', did you mean 'model.options.width'"),
        ("model.options.layer=foo", "model: layer: expected one of cayley, .*, plain, plain_conv, got 'foo'"),
        ("model.options.activation=foo", "model: activation: expected one of arcsinh, arctan, celu, .*, got 'foo'"),
        ("model={name: lbdn, options: {activation: [relu, foo]}}", "activation: expected one of .*, got 'foo'"),
        ("model={name: lipconvnet, options: {first_blocks: foo}}", "layer: expected one of cayley, .*, got 'foo'"),
        ("model={name: patchnet, options: {layer: aol}}", "model patchnet: unknown option 'layer'; known: .*std"),
        ("certify.eps=", "certify.eps: expected numbers such as 36/255,1, got None"),
        (f"train.seed={10**20}", f"train.seed: expected an integer of 64 bits, got {10**20}"),
        ("model=foo", "recipe digits_cayley: model: expected one of bronet, .*, got 'foo'"),
        ("data.range=1", r"data.range: expected two numbers LOW,HIGH with LOW < HIGH, got 1"),
        ("penalty={method: foo}", "penalty: expected method as one of .*, got 'foo'"),
        ("adversary={eps: 1, norm: foo}", "adversary.norm: expected 'linf' or 'l2', got 'foo'"),
        ("augment.zzz=2", "unknown key 'augment.zzz'; known there: crop, flip"),
        ("train.lr=fast", "train.lr: expected a number such as 0.5 or 36/255, got 'fast'"),
        ("train.lr=0", "train.lr: expected greater than 0, got 0"),
        ("train.lr=.inf", "train.lr: expected a finite number, got inf"),
        ("train.epochs=2.5", "train.epochs: expected a valid integer, got 2.5"),
        ("train.epochs=true", "train.epochs: expected a valid integer, got True"),
        ("train.seed=-1", "train.seed: expected greater than or equal to 0, got -1"),
        ("train.optimizer=adm", "train.optimizer: expected 'adam', 'adamw', 'sgd', .*, got 'adm'"),
        ("train.momentum=1", "train.momentum: expected less than 1"),
        ("train.devices=1.5", "train.devices: expected"),
        ("train=5", "train: expected keys and values, got 5"),
        ("certify.eps=-1", "certify.eps: expected greater than or equal to 0, got -1"),
        ("certify.eps=[]", "certify.eps: .*at least 1 item"),
        ("certify.confidence=1", "certify.confidence: expected less than 1"),
        ("loss=hing", "loss: expected loss as one of hinge, .* got 'hing'"),
        ("loss.options.eps=1", "loss: expected options of loss 'hinge' among eps0, lipschitz, got 'eps'"),
        ("loss.options={kind: 1}", "loss: expected options of loss 'hinge' among eps0, lipschitz, got 'kind'"),
        ("loss.options={name: 1}", "loss: expected options of loss 'hinge' among eps0, lipschitz, got 'name'"),
        ("loss.options.eps0=-1", "loss: expected eps0 > 0, got -1"),
        (f"loss.options.eps0={10**400}", "loss: expected numbers as options of hinge, got"),
        ("loss=mse", "expected for task classification a loss.name among .*, got mse"),
        ("train.schedule=multistep", None),
        ("train.schedule.options.knots=[0, 1]", "train.schedule: expected as many factors as knots"),
        ("train.schedule.options.knots=abcd", "train.schedule: expected"),
        ("name=../x", "name: .*got '../x'"),
        ("name=", "name: expected"),
        ("train", "expected an override key=value such as train.epochs=5, got 'train'"),
        ("=3", "expected an override key=value"),
        ("train..lr=3", "expected an override key=value"),
        ("train.lr=[1", r"override 'train.lr=\[1': expected YAML"),
        ("train.lr=!!python/object/apply:os.getcwd []", "expected YAML, got: could not determine"),
        ("train.epochs=010", "YAML reads 010 as 8: write 8, or '010' in quotes"),
        ("train.epochs=-0_7", "YAML reads -0_7 as -7"),
        ("train.epochs=!!int '010'", "YAML reads 010 as 8"),
        ("train.epochs=1:30", "YAML reads 1:30 as 90"),
        ("train.lr=1:30.5", "YAML reads 1:30.5 as 90.5"),
        ("augment.flip=No", "YAML reads No as false: write false, or 'No' in quotes"),
        ("model.options={on: 1}", "YAML reads on as true"),
        ("train.lr.x=1", "override 'train.lr.x=1': expected train.lr to have keys, got 0.01"),
    ],
)
def test_overrides_that_are_wrong(override, message):
    if message is None:
        load_recipe("digits_cayley", [override])
        return
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe("digits_cayley", [override])
    assert "\n" not in str(caught.value)


def test_numbers_and_texts_that_everyone_reads_alike():
    texts = ('"1:30"', "'no'", "0x10", "1_000", "0", "-0", "0.5", "00.5", "True", "0o10", "a:b", ".inf")
    read = [load_recipe("digits_cayley", [f"model.options.a={text}"]).model.options["a"] for text in texts]
    assert read == ["1:30", "no", 16, 1000, 0, 0, 0.5, 0.5, True, "0o10", "a:b", float("inf")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected keys and values, got NoneType"),
        ("- a\n", "expected keys and values, got list"),
        ("a: [\n", "expected YAML, got"),
        ("name: a\nname: b\n", "expected YAML, got: key 'name' twice"),
        (SMALL.replace("epochs: 1", "epochs: 1, epochs: 2"), "key 'epochs' twice"),
        (SMALL.replace("data: digits\n", ""), "expected the key 'data', got none"),
        (SMALL.replace("epochs: 1", "lr: 1"), "train: expected epochs, or a budget, got neither$"),
        ("{}", "the keys 'name', 'data', 'model', 'train', got none; the line 'base: digits_cayley' takes"),
        (
            "name: a\ndata: {limit: 3}\nmodel: {}\ntrain: {lr: 1}\n",
            "train: expected epochs, or a budget, got neither; expected the keys 'data.spec', 'model.name', ",
        ),
        ("modle: small\n", "unknown key 'modle', did you mean 'model'.; expected the keys 'name', 'data', 'model'"),
        ("name: !!python/object/apply:os.system ['true']\n", "expected YAML, got: could not determine a constructor"),
        (SMALL + "\nvalue:\n  - 007\n", "line [0-9]+: YAML reads 007 as 7: write 7"),
        ("? [a]\n: 1\n", "unknown key|expected"),
        ("\x00", "expected YAML, got"),
    ],
)
def test_files_that_are_wrong(tmp_path, text, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(write(tmp_path, text))


def test_unknown_recipes_and_missing_files(tmp_path):
    with pytest.raises(
        RecipeError, match=r"unknown recipe 'digit_cayley', did you mean 'digits_cayley'. lipkit list recipes"
    ):
        load_recipe("digit_cayley")
    with pytest.raises(RecipeError, match=r"expected a recipe file, got 'nowhere.yaml': No such file"):
        load_recipe("nowhere.yaml")
    with pytest.raises(RecipeError, match=r"expected a recipe file, got .*: Is a directory"):
        load_recipe(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(RecipeError, match="expected YAML"):
        load_recipe(tmp_path / "latin.yaml")


def test_a_recipe_does_not_change_after_it_was_checked():
    recipe = load_recipe()
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.epochs = 3


def test_plain_is_json_with_all_defaults():
    plain = load_recipe().model_dump(mode="json")
    assert plain["certify"]["eps"][0] == 36 / 255
    assert plain["train"]["momentum"] == 0.9
    assert math.isclose(plain["loss"]["options"]["eps0"], 0.5)


@pytest.mark.thorough
def test_base_is_merged_and_every_family_has_a_digits_recipe() -> None:
    from lipkit.layers import families

    for family in families.names():
        recipe = load_recipe(f"digits_{family}")
        assert recipe.name == f"digits_{family}"
        assert recipe.model.options["layer"] == family
        assert recipe.train == load_recipe("digits_cayley").train
    assert load_recipe("digits_eco").model.options == {"layer": "eco", "width": 1, "kernel_size": 4}


def test_another_name_drops_the_options_of_the_base(tmp_path: Path) -> None:
    def load(text: str) -> Recipe:
        return load_recipe(write(tmp_path, f"base: digits_cayley\nname: mine\n{text}"))

    base = load_recipe("digits_cayley")
    assert base.model.options == {"layer": "cayley", "width": 1}
    changed = load("model: {name: kwlarge, options: {width: 2}}\nloss: {name: cross_entropy}\n")
    assert (changed.model.name, changed.model.options) == ("kwlarge", {"width": 2})
    assert (changed.loss.name, changed.loss.options) == ("cross_entropy", {})
    assert load("model: kwlarge\n").model.options == {}
    for same in ("model: {options: {width: 2}}\n", "model: {name: small, options: {width: 2}}\n"):
        assert load(same).model.options == {"layer": "cayley", "width": 2}
    assert load("model: small\nloss: hinge\n").loss == base.loss
    # Overrides too, in any order.
    for text in ("loss.name=hinge", "loss=hinge"):
        assert load_recipe("cifar10_patchnet", [text]).loss.options == {}
    given = load_recipe("cifar10_patchnet", ["loss.options.eps0=0.2", "loss.name=hinge", "model.name=patchnet"])
    assert given.loss.options == {"eps0": 0.2}
    assert given.model == load_recipe("cifar10_patchnet").model
    assert load("train: {schedule: {name: multistep}}\n").train.schedule.options == {}


def test_names_are_compared_along_the_whole_chain_of_bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "root": SMALL.replace("model: small", "model: {name: small, options: {width: 1}}")
        + "loss: {options: {eps0: 0.5}}\n",
        "middle": "base: root\nmodel: {options: {layer: soc}}\nloss: {options: {lipschitz: 2}}\n",
        "other": "base: middle\nmodel: {name: kwlarge, options: {dense: [8]}}\nloss: hinge\n",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.setattr(recipes.importlib.resources, "files", lambda package: tmp_path)
    assert load_recipe("middle").model.options == {"width": 1, "layer": "soc"}
    other = load_recipe("other")
    assert other.model.options == {"dense": [8]}
    # hinge is what a loss without a name is: no other name
    assert other.loss.options == load_recipe("middle").loss.options == {"eps0": 0.5, "lipschitz": 2}


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    plain = load_recipe("digits_cayley").model_dump()
    eps = [np.float32(0.5), np.float64(1)]
    plain["train"] |= {"lr": np.float32(0.5), "epochs": np.int64(3), "seed": np.int32(1)}
    plain |= {"loss": {"name": "hinge", "options": {"eps0": np.float32(0.25)}}, "certify": {"eps": eps}}
    plain["model"]["options"] = {"layer": "cayley", "width": np.int64(2), "mean": [np.float32(0.5)]}
    recipe = Recipe.model_validate(plain)
    changes = ["train.lr=0.5", "train.epochs=3", "train.seed=1", "loss.options.eps0=0.25", "certify={eps: [0.5, 1]}"]
    expected = load_recipe("digits_cayley", [*changes, "model.options={layer: cayley, width: 2, mean: [0.5]}"])
    assert recipe == expected
    assert load_recipe(write(tmp_path, recipes.to_yaml(recipe))) == recipe
    options = TrainOptions(epochs=np.int64(2), lr=np.float32(0.5), momentum=np.float64(0.5))
    assert json.dumps(options.settings(8)) == json.dumps(TrainOptions(epochs=2, lr=0.5, momentum=0.5).settings(8))
    for wrong in (np.float64(2.5), np.bool_(True), np.array([1, 2])):
        with pytest.raises(OptionError, match="epochs: expected"):
            TrainOptions(epochs=wrong)


@pytest.mark.parametrize("base", ["digits_nothing", "mine.yaml", 3])
def test_unknown_base_is_refused(tmp_path: Path, base: object) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: {base}\nname: mine\n")
    with pytest.raises(RecipeError, match="base: expected another packaged recipe"):
        load_recipe(path)


def test_recipes_of_runs_that_could_jitter_colours_are_read_if_they_did_not(tmp_path: Path) -> None:
    unused = "augment: {flip: true, brightness: 0.0, contrast: 0.0, saturation: 0.0, hue: 0.0}\n"
    assert load_recipe(write(tmp_path, SMALL + unused)).augment.flip
    with pytest.raises(RecipeError, match="hue"):
        load_recipe(write(tmp_path, SMALL + unused.replace("hue: 0.0", "hue: 0.1")))
