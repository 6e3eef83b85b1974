"""Suggestions for commands and options that do not exist."""

from __future__ import annotations

from collections.abc import Sequence

import click

from lipkit.errors import alike, suggestion

# Commands that take KEY=VALUE, and the sections of a recipe that they may change; none for all.
KEYED: dict[str, tuple[str, ...]] = {"train": (), "reproduce": (), "show": (), "certify": ("certify", "data")}


def no_command(name: str, known: Sequence[str]) -> str:
    """The message for an unknown command.

    >>> no_command("trian", ["train", "report"])
    "No such command 'trian', did you mean 'train'?"
    >>> no_command("fly", ["train", "report"])
    "No such command 'fly'; known: train, report"
    """
    return f"No such command {name!r}{suggestion(name, known) or '; known: ' + ', '.join(known)}"


def no_option(error: click.NoSuchOption, given: Sequence[str]) -> str:
    """The message for an unknown option: how to write it where it is a key of the recipe.

    Args:
        error: as click raised it.
        given: the arguments of the command line.
    """
    command = "" if error.ctx is None else error.ctx.command.name or ""
    if command not in KEYED:
        return error.format_message()
    value = next((_value(given, i) for i, a in enumerate(given) if a.partition("=")[0] == error.option_name), "VALUE")
    if found := keys_like(error.option_name, KEYED[command]):
        changes = " or ".join(f"{key}={value}" for key in found)
        return f"No such option '{error.option_name}': a key of the recipe is written {changes}"
    return f"{error.format_message()} Keys of the recipe are written KEY=VALUE; lipkit recipe show lists them"


def keys_like(option: str, sections: Sequence[str] = ()) -> list[str]:
    """The keys of a recipe that an option may stand for: those of its name, else that of the closest name.

    >>> keys_like("--epochs"), keys_like("--batch-size", ["certify"]), keys_like("--epoch"), keys_like("--data")
    (['train.epochs'], ['certify.batch_size'], ['train.epochs'], ['data'])
    """
    from lipkit.cli.recipe import keys
    from lipkit.experiments.recipe import SHORT

    word = option.lstrip("-").replace("-", "_")
    known = [k.path for k in keys() if not k.section or k.path in SHORT]
    known = [path for path in known if not sections or path[0] in sections]
    found = [path for path in known if word in (path[-1], ".".join(path))]
    if not found:
        close = alike(word, {path[-1] for path in known}, cutoff=0.75)
        found = [path for path in known if path[-1] in close]
    return [".".join(path) for path in found]


def _value(given: Sequence[str], place: int) -> str:
    """The value given to the option at this place."""
    _, equals, value = given[place].partition("=")
    if equals:
        return value
    following = given[place + 1] if place + 1 < len(given) else "-"
    return "VALUE" if following.startswith("-") or "=" in following else following
