"""``lipkit recipe show``: a recipe as YAML, with every key described."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import click

from lipkit.cli.main import once

if TYPE_CHECKING:
    from lipkit.experiments import Recipe


@click.group("recipe")
def command() -> None:
    """Show recipes and their keys."""


@command.command("show")
@click.argument("name", required=False)
@click.argument("changes", nargs=-1, metavar="[KEY=VALUE ...]")
def show(name: str | None, changes: tuple[str, ...]) -> None:
    """Show a whole recipe as YAML: every key described, defaults filled in and KEY=VALUE applied.

    NAME is a packaged recipe (lipkit list recipes) or the path of a YAML file. Without it: digits_cayley, and the
    options of every model, layer, loss and schedule. The text is itself a recipe.
    """
    from lipkit.experiments.recipe import DEFAULT, load_recipe
    from lipkit.text import printable_lines

    if name is not None and "=" in name:
        raise click.UsageError(f"expected a recipe in front of changes KEY=VALUE, got {name!r}")
    text = printable_lines(commented(load_recipe(DEFAULT if name is None else name, once(changes))))
    click.echo("\n".join([text, *named_options()]) if name is None else text)


def commented(recipe: Recipe) -> str:
    """A whole recipe as YAML with a comment after every key; the keys of a section that is null are commented out.

    >>> from lipkit.experiments import load_recipe
    >>> print(commented(load_recipe("digits_cayley")).splitlines()[2])
    task: classification                            # what the targets are (classification | regression)
    """
    import yaml
    from pydantic import TypeAdapter

    from lipkit.experiments.recipe_schema import keys

    content, lines = recipe.model_dump(mode="json"), []
    for path, field, section in keys():
        place: Any = content
        for part in path[:-1]:
            place = None if place is None else place[part]
        if place is not None:
            value = place[path[-1]]
        else:  # the section is null: show the defaults
            value = "(required)" if field.is_required() else field.get_default(call_default_factory=True)
        texts = (yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=u) for u in (True, False))
        plain, escaped = (str(text).removesuffix("...\n").strip() for text in texts)
        shown = plain if plain.isprintable() else escaped  # YAML's own escapes, so that it reads the value back
        start = f"{'# ' * (place is None)}{'  ' * (len(path) - 1)}{path[-1]}:"
        line = start if section and value is not None else f"{start} {shown}"
        kind: Any = Annotated[field.annotation, None, *field.metadata]
        values = takes(TypeAdapter(kind).json_schema())
        text = section.__doc__ if section else f"{field.description} ({values})"
        lines.append((line, (text or "").replace("``", "")))
    width = min(46, max(len(line) for line, _ in lines))  # comments are aligned, except after longer lines
    return "\n".join(f"{line:<{width}}  # {text}" for line, text in lines)


# Limits of numbers: names of pydantic and of JSON Schema.
SIGNS = {"gt": ">", "exclusiveMinimum": ">", "ge": ">=", "minimum": ">=", "lt": "<", "exclusiveMaximum": "<"}


def takes(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, in words.

    >>> takes({"anyOf": [{"type": "number", "gt": 0, "exclusiveMaximum": 1}, {"type": "null"}]})
    'number > 0 and < 1, or null'
    """
    if parts := schema.get("anyOf"):
        return ", or ".join(map(takes, parts))
    if among := schema.get("enum"):
        return " | ".join(map(str, among))
    if schema.get("type") == "array":
        return f"list of {takes(schema.get('items', {}))}"
    kinds = {"string": "text", "boolean": "true | false", "object": "keys and values"}
    name = schema.get("type", "number")  # of the items of a pair
    limits = " and ".join(f"{SIGNS[key]} {schema[key]:g}" for key in SIGNS if key in schema)
    return f"{kinds.get(name, name)} {limits}".rstrip()


def named_options() -> list[str]:
    """The options of every model, layer, loss and schedule with their defaults, as comments of YAML."""
    from lipkit.layers.families import FAMILIES
    from lipkit.models import MODELS
    from lipkit.training.options import TABLES

    # Arguments that the program passes, which a recipe cannot set.
    given = ("input_shape", "classes", "device", "dtype", "outputs", "targets", "fraction")
    lines = []
    for kind, table in {"model": MODELS, **TABLES}.items():
        for name, function in table.items():
            known = [p for p in inspect.signature(function).parameters.values() if p.name not in given]
            texts = [str(p.replace(annotation=p.empty)) for p in known]
            lines.append(f"# options of {kind} {name}: {', '.join(texts) or 'none'}")
    return lines + [f"# options of layer {name}: {', '.join(f.options) or 'none'}" for name, f in FAMILIES.items()]
