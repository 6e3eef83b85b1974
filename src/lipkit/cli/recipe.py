"""``lipkit recipe``: the keys of a recipe, and the text of the packaged ones."""

from __future__ import annotations

import inspect
import textwrap
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pydantic import BaseModel

WIDTH = 110


@click.group("recipe")
def command() -> None:
    """The keys of a recipe, and the text of the packaged ones."""


@command.command("show")
@click.argument("name", required=False)
@click.argument("changes", nargs=-1, metavar="[KEY=VALUE ...]")
def show(name: str | None, changes: tuple[str, ...]) -> None:
    """Describe every key of a recipe: its values, its default and what it means.

    With NAME (lipkit list recipes, or the path of a YAML file): the whole recipe as YAML, every key described,
    defaults filled in and KEY=VALUE applied. The text is itself a recipe.
    """
    from lipkit.experiments.recipe import load_recipe
    from lipkit.text import printable_lines

    if name is not None and "=" in name:
        raise click.UsageError(f"expected a recipe in front of changes KEY=VALUE, got {name!r}")
    click.echo(reference() if name is None else printable_lines(commented(load_recipe(name, changes).plain())))


@dataclass(frozen=True)
class Key:
    """One key of a recipe."""

    path: tuple[str, ...]  # the names of its sections, then its own
    values: str  # what it takes, in words
    default: str | None  # as YAML; None if it must be given
    description: str
    section: bool  # whether it holds keys


def keys() -> list[Key]:
    """Every key in the order of the schema, sections before their keys.

    >>> [(k.values, k.default) for k in keys() if k.path == ("train", "lr")]
    [('number > 0', '0.001')]
    """
    from lipkit.experiments.recipe_schema import keys as schema_keys

    schemas: dict[type[BaseModel], dict[str, Any]] = {}
    found = []
    for path, owner, field, section in schema_keys():
        text, default = field.description or "", None
        if section is None:
            if owner not in schemas:
                schemas[owner] = owner.model_json_schema()["properties"]
            values = _values(schemas[owner][path[-1]])
            default = None if field.is_required() else _plain(field.get_default(call_default_factory=True))
        else:
            lines = (inspect.getdoc(section) or "").split(". ")
            text = ". ".join([text, *(line for line in lines if line.startswith("A plain string"))])
            nullable = type(None) in typing.get_args(field.annotation)
            values, default = ("null, or keys", "null") if nullable else ("keys", None)
        found.append(Key(path, values, default, text, section is not None))
    return found


# Limits of numbers: names of pydantic and of JSON Schema.
SIGNS = {
    ">": ("gt", "exclusiveMinimum"),
    ">=": ("ge", "minimum"),
    "<": ("lt", "exclusiveMaximum"),
    "<=": ("le", "maximum"),
}


def _values(content: Mapping[str, Any]) -> str:
    """The values that a key takes, in words.

    >>> _values({"anyOf": [{"type": "number", "gt": 0, "exclusiveMaximum": 1}, {"type": "null"}]})
    'number > 0 and < 1, or null'
    """
    if "anyOf" in content:
        return ", or ".join(map(_values, content["anyOf"]))
    if "enum" in content or "const" in content:
        return " | ".join(_yaml(value) for value in content.get("enum", [content.get("const")]))
    name = content.get("type", "any value")
    if name == "array":
        return f"list of {_values(content.get('items', {}))}"
    kind = {"string": "text", "boolean": "true | false", "object": "keys and values"}.get(name, name)
    limits = " and ".join(f"{s} {content[key]:g}" for s, keys in SIGNS.items() for key in keys if key in content)
    pattern = f"matching {content['pattern']}" if "pattern" in content else ""
    return " ".join(filter(None, (kind, limits, pattern)))


def _yaml(value: Any) -> str:
    """A value on one line of YAML.

    >>> _yaml(None), _yaml([0.5, 1]), _yaml({}), _yaml("adam")
    ('null', '[0.5, 1]', '{}', 'adam')
    """
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("...\n").strip()  # YAML's end mark after a bare value


def _plain(value: Any) -> str:
    return _yaml(list(value) if isinstance(value, tuple) else value)


def reference() -> str:
    """Every key with its values, default and meaning; and the options of every model, loss and other named choice."""
    lines = [
        "A recipe is a YAML file. A section (data, model, loss, train.schedule) may be written as the one name in it.",
        "`base: NAME` starts from a packaged recipe: keys are merged, but another name of a section (model, loss,",
        "train.schedule) drops the options of the base there. Numbers may be quotients such as 36/255.",
        "",
    ]
    for key in keys():
        default = "required" if key.default is None and not key.section else f"default {key.default}"
        facts = key.values if key.default is None and key.section else f"{key.values}; {default}"
        lines.append(f"{'.'.join(key.path)}  ({facts})")
        lines += textwrap.wrap(key.description, WIDTH, initial_indent="    ", subsequent_indent="    ")
    for title, table in _named().items():
        lines += ["", f"{title}, by name:"]
        for name, options in table.items():
            entry = f"{name}: {', '.join(options) or 'none'}"
            lines += textwrap.wrap(entry, WIDTH, initial_indent="    ", subsequent_indent="        ")
    return "\n".join(lines)


def _named() -> dict[str, dict[str, list[str]]]:
    """Section -> name -> its options with their defaults."""
    from lipkit.layers.families import FAMILIES
    from lipkit.models import MODELS
    from lipkit.training import losses, schedules

    layers = {
        name: [f"{option} (such as {' | '.join(map(_plain, values))})" for option, values in family.options.items()]
        for name, family in FAMILIES.items()
    }
    return {
        "model.options": {name: _options(build, ()) for name, build in MODELS.items()},
        "model.options of the layers": layers,
        "loss.options": {name: _options(f, ("outputs", "targets")) for name, f in losses.LOSSES.items()},
        "train.schedule.options": {name: _options(f, ("fraction",)) for name, f in schedules.SCHEDULES.items()},
    }


def _options(function: Callable[..., Any], given: tuple[str, ...]) -> list[str]:
    known = inspect.signature(function).parameters.values()
    # The data decide the first two, the trainer the others.
    given = (*given, "input_shape", "classes", "device", "dtype")
    named = [p for p in known if p.name not in given and p.kind is not p.VAR_KEYWORD]
    texts = [p.name if p.default is p.empty else f"{p.name}={_plain(p.default)}" for p in named]
    for rest in (p for p in known if p.kind is p.VAR_KEYWORD):
        # A TypedDict names the keywords; without one they are passed on to the layer.
        kind = next(iter(typing.get_args(typing.get_type_hints(function)[rest.name])), None)
        texts += sorted(set(typing.get_type_hints(kind)) - set(given)) if kind else ["and those of the layer"]
    return texts


def commented(content: Mapping[str, Any]) -> str:
    """A whole recipe as YAML with a comment behind every key.

    >>> from lipkit.experiments.recipe import load_recipe
    >>> print(commented(load_recipe("digits_cayley").plain()).splitlines()[2])
    task: classification                            # what the targets are (classification | regression)
    """
    lines: list[tuple[str, str]] = []
    for key in keys():
        place: Any = content
        for part in key.path[:-1]:
            place = place.get(part) if isinstance(place, Mapping) else None
        if not isinstance(place, Mapping):
            continue  # its section is null
        value = place[key.path[-1]]
        text = "" if key.section and value is not None else f" {_yaml(value)}"
        facts = key.description if key.section else f"{key.description} ({key.values})"
        lines.append((f"{'  ' * (len(key.path) - 1)}{key.path[-1]}:{text}", facts))
    width = min(46, max(len(line) for line, _ in lines))  # comments are aligned, except after longer lines
    return "\n".join(f"{line:<{width}}  # {facts}" for line, facts in lines)
