"""The commands in the documents exist: verbs, options and their values, scripts and tests that are named."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import click
import pytest

from lipkit.cli.main import VERBS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    p.relative_to(ROOT).as_posix()
    for p in [*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))]
)
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.S | re.M)
_INDENTED = re.compile(r"^(?: {4,}).*$", re.M)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_FILES = re.compile(r"(?:python|pytest|bash) ((?:benchmarks|examples|tests|\.ci)/[\w/.]+)")


def commands(text: str) -> list[tuple[list[str], bool]]:
    """The arguments of every ``lipkit VERB ...``, and whether it stands in a block, to be typed as it is."""
    outside = _FENCE.sub("", text)
    blocks = [m[3] for m in _FENCE.finditer(text) if m[2] in ("", "sh", "bash", "console")]
    lines = "\n".join([*blocks, *_INDENTED.findall(outside)]).replace("\\\n", " ").splitlines()
    found = [(arguments, True) for line in lines for arguments in _read(line)]
    inline = [m[1].replace("\\|", "|") for m in _INLINE.finditer(outside)]
    return found + [(arguments, False) for line in inline for arguments in _read(line)]


def _read(line: str) -> list[list[str]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quotation mark in prose
        return []
    found: list[list[str]] = []
    at_start, current = True, None
    for k, word in enumerate(words):
        if word in ("&&", ";", "|", ">"):
            at_start, current = True, None
        elif current is not None:
            current.append(word)
        elif (word == "lipkit" and at_start) or (word == "lipkit.cli.main" and words[k - 1] == "-m"):
            current = []
            found.append(current)
        else:
            at_start = word == "$" or re.fullmatch(r"[A-Z_]+=\S*", word) is not None
    return [each for arguments in found for each in _alternatives(arguments) if each]


def _alternatives(arguments: list[str]) -> list[list[str]]:
    """``list layers|models`` is two commands."""
    for k, word in enumerate(arguments):
        if "|" in word:
            rest = [[*arguments[:k], choice, *arguments[k + 1 :]] for choice in word.split("|")]
            return [each for one in rest for each in _alternatives(one)]
    return [arguments]


def parse(arguments: list[str], whole: bool) -> None:
    """Raise unless the verb takes these arguments; of a mention in prose, arguments may be missing."""
    verb, *rest = arguments
    if verb in ("--help", "--version", "-h") or (verb == "VERB" and not whole):
        return
    assert verb in VERBS, f"lipkit has no verb {verb!r}"
    command: click.Command = importlib.import_module(f"lipkit.cli.{verb}").command
    if "--help" in rest:
        return
    try:
        command.make_context(verb, list(rest))
    except (click.MissingParameter, click.exceptions.NoArgsIsHelpError):
        if whole:
            raise


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page: str) -> None:
    for arguments, whole in commands((ROOT / page).read_text()):
        try:
            parse(arguments, whole)
        except (click.ClickException, AssertionError) as error:
            message = error.format_message() if isinstance(error, click.ClickException) else str(error)
            pytest.fail(f"{page}: lipkit {shlex.join(arguments)}: {message}")


@pytest.mark.parametrize("page", PAGES)
def test_scripts_exist(page: str) -> None:
    for path in _FILES.findall((ROOT / page).read_text()):
        assert (ROOT / path.rstrip(".")).exists(), f"{page} names {path}"


def test_commands_are_found() -> None:
    block = "    OMP_NUM_THREADS=1 lipkit train x && lipkit report RUN   # words\n    lipkit list a|b\n"
    text = f"See `lipkit bound`.\n\n{block}"
    assert commands(text) == [
        (["train", "x"], True),
        (["report", "RUN"], True),
        (["list", "a"], True),
        (["list", "b"], True),
        (["bound"], False),
    ]
    parse(["attack", "RUN", "--eps", "1"], True)
    parse(["attack"], False)
    for wrong in (["attack"], ["attack", "RUN", "--epsilon", "1"], ["list", "a"], ["export", "RUN", "--to", "x"]):
        with pytest.raises(click.ClickException):
            parse(wrong, True)
    with pytest.raises(AssertionError, match="no verb"):
        parse(["fly"], True)
