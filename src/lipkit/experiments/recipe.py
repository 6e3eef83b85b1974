"""Recipes read from files: packaged ones by name, others by path, changed by overrides ``a.b=c``."""

import difflib
import importlib.resources
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lipkit.errors import RecipeError, suggestion
from lipkit.experiments.recipe_schema import LossSection, Recipe, ScheduleSection, TrainSection, keys
from lipkit.files import read_bytes
from lipkit.text import flatten, printable
from lipkit.training.options import PLACEMENT, worded

DEFAULT = "digits_cayley"
# Limits far above the size of any recipe.
MOST_BYTES, MOST_VALUES = 1 << 20, 100_000

# Type that YAML reads -> texts that it reads so by surprise: 010 is 8, 1:30 is 90, no is false.
_ODD = {"int": r"[-+]?0[\d_]+|.*:.*", "float": r".*:.*", "bool": r"(?i)yes|no|on|off"}

# Sections that may be written as one string, and the key that the string sets.
SHORT = {("data",): "spec", ("model",): "name", ("loss",): "name", ("train", "schedule"): "name"}
# Sections whose options belong to their name -> the default name.
_NAMED = {("model",): None, ("loss",): LossSection().name, ("train", "schedule"): ScheduleSection().name}


def names() -> list[str]:
    """The packaged recipes, sorted.

    >>> DEFAULT in names()
    True
    """
    folder = importlib.resources.files("lipkit.recipes")
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def load_recipe(name_or_path: str | Path = DEFAULT, overrides: Sequence[str] = (), *, build: bool = True) -> Recipe:
    """Read and check a recipe.

    Args:
        name_or_path: the name of a packaged recipe, or the path of a YAML file (one that ends in .yaml, .yml or .json,
            or holds a path separator). Its key ``base`` names a packaged recipe that it changes: keys are merged,
            values replaced. Where it changes the ``name`` of a part (model, loss, train.schedule), the base's
            ``options`` of that part are dropped: they belong to the other name. An override does the same.
        overrides: ``key=value`` with dotted keys, applied in order, those that set a ``name`` first; values are YAML,
            and ``36/255`` is a number.
        build: whether the model must be one that can be built; False for a network whose ``name`` is that of a file.

    Raises:
        RecipeError: no such recipe, not YAML, an unknown key (the message names the closest one), or a value that the
            key does not take.

    >>> load_recipe("digits_cayley", ["train.epochs=2", "certify.eps=36/255,1"]).certify.eps == (36 / 255, 1.0)
    True
    >>> load_recipe("digits_cayley", ["train.epoch=2"])
    Traceback (most recent call last):
    lipkit.errors.RecipeError: recipe digits_cayley: unknown key 'train.epoch', did you mean 'train.epochs'?
    """
    content: dict[str, Any] = {}
    for part in reversed(_chain(name_or_path)):  # from the base on: `_merged` asks for the name that a part changes
        content = _merged(content, part)
    named = [".".join((*path, "name")) for path in _NAMED]
    for override in sorted(overrides, key=lambda text: text.partition("=")[0].strip() not in named):
        content = _override(content, override)  # names before options, which are those of the new name
    try:
        return Recipe.model_validate(content, context={"build": build})
    except ValidationError as error:
        raise RecipeError(f"recipe {name_or_path}: {_sentences(error.errors())}") from None


def _chain(name_or_path: str | Path) -> list[dict[str, Any]]:
    """The keys and values of a recipe, then those of its base, and so on, each without the key ``base``."""
    seen, chain = list[Any](), list[dict[str, Any]]()
    base: Any = name_or_path
    while base is not None:
        if seen and (base in seen or base not in names()):
            raise RecipeError(f"recipe {name_or_path}: base: expected another packaged recipe, got {_short(base)}")
        seen.append(text := str(base))
        if isinstance(base, Path) or "/" in text or "\\" in text or text.endswith((".yaml", ".yml", ".json")):
            try:
                read = read_bytes(text, MOST_BYTES)
            except OSError as error:
                raise RecipeError(f"expected a recipe file, got {text!r}: {error.strerror}") from None
        elif text in (known := names()):
            read = (importlib.resources.files("lipkit.recipes") / f"{text}.yaml").read_bytes()
        else:
            rest = f"; known: {', '.join(known)}, or the path of a YAML file"
            hint = suggestion(text, known)
            raise RecipeError(f"unknown recipe {text!r}{f'{hint} lipkit list recipes shows all' if hint else rest}")
        parsed = _load(read, f"recipe {text}")
        if not isinstance(parsed, dict):
            raise RecipeError(f"recipe {text}: expected keys and values, got {type(parsed).__name__}")
        base = parsed.pop("base", None)
        chain.append(parsed)
    return chain


# Newer keys, written only if they are set: so the text of an older recipe, whose hash names folders of runs, is kept.
LATER = frozenset({"budget", "manifold_lr", "range"})


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe, defaults included, as YAML that `load_recipe` reads back to an equal recipe."""
    content = recipe.model_dump(mode="json")
    for part in ("train", "data"):
        content[part] = {key: value for key, value in content[part].items() if key not in LATER or value is not None}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=110)


def unplaced(recipe: Recipe) -> Recipe:
    """The recipe with the default devices and time limit; a resumed run may have others, but must agree in the rest."""
    plain = {key: TrainSection.model_fields[key].default for key in PLACEMENT}
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=plain)})


def differences(recipe: Recipe) -> tuple[str, list[str]]:
    """The name of a run, and the keys in which its recipe differs from the packaged recipe of the same name, if any.

    Seed, device and data folder do not count. Changes of model and loss become part of the name.

    >>> differences(load_recipe("mnist_cayley", ["model.options={layer: aol, width: 2}", "train.epochs=5"]))
    ('mnist_cayley-aol-width2', ['model.options.layer', 'model.options.width', 'train.epochs'])
    """
    packaged = load_recipe(recipe.name) if recipe.name in names() else recipe
    before, now = (dict(flatten(r.model_dump(mode="json"))) for r in (packaged, recipe))
    unlike = {"data.root", "train.seed", *(f"train.{key}" for key in PLACEMENT)}
    changed = {key: value for key, value in now.items() if before.get(key) != value and key not in unlike}
    words = [recipe.name]
    for key, value in changed.items():
        if key.startswith(("model.", "loss.")) and value != "{}":
            words.append(value if value[:1].isalpha() else f"{key.rpartition('.')[2]}{value}")  # a number: width2
    return re.sub(r"[^\w.+-]+", "_", "-".join(words))[:60], list(changed)


def seeded(recipe: Recipe, seed: int) -> Recipe:
    """The recipe with this ``train.seed``."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": seed})})


def _merged(below: dict[str, Any], above: dict[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """A copy of the recipe ``below`` changed by ``above``; a section of ``above`` may be given as one string."""
    out = dict(below)
    if path in _NAMED and "name" in above and above["name"] != below.get("name", _NAMED[path]):
        out.pop("options", None)  # they belong to the other model, loss or schedule
    for key, value in above.items():
        inner, place = out.get(key), (*path, key)
        short = {SHORT[place]: value} if place in SHORT and isinstance(value, str) else value
        out[key] = _merged(inner if isinstance(inner, dict) else {}, short, place) if isinstance(short, dict) else short
    return out


def _load(content: str | bytes, origin: str) -> Any:
    """The value of a YAML text. `_count` checks it before it is built: aliases and merge keys multiply values."""
    try:
        loader = yaml.SafeLoader(content)  # builds plain values only
        node = loader.get_single_node()
        if node is None:
            return None  # an empty text
        _count(node, {}, set())
        return loader.construct_document(node)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise RecipeError(f"{origin}: expected YAML, got: {' '.join(str(error).split())}") from None


def _count(node: yaml.Node, known: dict[int, int], above: set[int]) -> int:
    """The number of values below a node of YAML, each alias counted as often as it is used.

    Raises:
        ValueError: more than MOST_VALUES; an anchor that holds itself; what `_inner` refuses.
    """
    if id(node) in above:
        raise ValueError("expected values, got an anchor that holds itself")
    if id(node) not in known:
        above.add(id(node))  # the nodes on the path from the root: one that recurs holds itself
        known[id(node)] = 1 + sum(_count(part, known, above) for part in _inner(node))
        above.remove(id(node))
    if known[id(node)] > MOST_VALUES:
        raise ValueError(f"expected at most {MOST_VALUES} values, got more: its aliases multiply")
    return known[id(node)]


def _inner(node: yaml.Node) -> list[yaml.Node]:
    """The nodes in a node; refuses a key written twice, of which YAML keeps the last, and a text it misreads."""
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise ValueError(f"key {key.value!r} twice, on line {key.start_mark.line + 1} again")
            seen.add(key.value)
        return [part for pair in node.value for part in pair]  # keys are values, too
    if (odd := _ODD.get(node.tag.rpartition(":")[2])) and re.fullmatch(odd, text := node.value):
        read, line = json.dumps(yaml.safe_load(text)), node.start_mark.line + 1
        raise ValueError(f"line {line}: YAML reads {text} as {read}: write {read}, or {text!r} in quotes")
    return []


def _override(content: dict[str, Any], override: str) -> dict[str, Any]:
    """The recipe ``content`` changed by one override ``key=value``; the value of a section replaces all of it."""
    key, equals, text = override.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise RecipeError(f"expected an override key=value such as train.epochs=5, got {override!r}")
    above = _load(text, f"override {override!r}")
    place = content
    for depth, part in enumerate(path[:-1], 1):
        inner = place.get(part)
        if not isinstance(inner, dict | None):
            expected = f"expected {'.'.join(path[:depth])} to have keys"
            raise RecipeError(f"override {override!r}: {expected}, got {_short(inner)}")
        place = inner or {}
    if isinstance(place.get(path[-1]), dict):
        del place[path[-1]]  # `_merged` would keep its keys
    for part in reversed(path):
        above = {part: above}
    return _merged(content, above)


def _sentences(errors: Sequence[ErrorDetails]) -> str:
    """The message about the first wrong value and all missing keys."""
    known, missing, wrong, section_lacks = {path: field for path, field, _ in keys()}, list[str](), list[str](), False
    for error in errors:
        path = tuple(map(str, error["loc"]))
        key = ".".join(path)
        if error["type"] == "missing":  # of a missing section, name its required keys
            inner = [".".join(k) for k, field in known.items() if k[:-1] == path and field.is_required()]
            missing += [key] if path in SHORT else inner or [key]
            section_lacks = section_lacks or len(path) == 1
        elif error["type"] == "extra_forbidden":
            wrong.append(f"unknown key {key!r}{_key_hint(path)}")
        else:
            while path and path not in known:  # pydantic appends the alternative of a union and the index in a list
                path = path[:-1]
            key, got = ".".join(path), error["input"]
            section = error["type"] in ("model_type", "dict_type")
            wrong.append(
                f"{key}: expected keys and values, got {_short(got)}" if section else worded(key, error["msg"], got)
            )
    wanted = f"the key{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}"
    remedy = f"; the line 'base: {DEFAULT}' takes the missing keys from that recipe" if section_lacks else ""
    return "; ".join([*wrong[:1], *([f"expected {wanted}, got none{remedy}"] if missing else [])])


def _key_hint(path: tuple[str, ...]) -> str:
    """A hint at the key that was probably meant: a similar one in that section, or the same one in another section."""
    known = [found for found, *_ in keys()]
    siblings = [k[-1] for k in known if k[:-1] == path[:-1]]
    if similar := difflib.get_close_matches(path[-1], siblings, 1, 0.7):
        return f", did you mean {'.'.join((*path[:-1], similar[0]))!r}?"
    if elsewhere := [k for k in known if k[-1] == path[-1]]:
        return f", did you mean {'.'.join(elsewhere[0])!r}?"
    if "options" in siblings:  # perhaps an option of the model, loss or schedule
        return f", did you mean {'.'.join((*path[:-1], 'options', path[-1]))!r}?"
    return f"; known there: {', '.join(siblings)}"


def _short(value: Any) -> str:
    return printable(repr(value), 80)


__all__ = ["DEFAULT", "Recipe", "differences", "load_recipe", "names", "seeded", "to_yaml", "unplaced"]
