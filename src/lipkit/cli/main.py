"""``lipkit``: the group of commands, each imported on use, and the one place where errors become exit codes."""

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import click

import lipkit
from lipkit.errors import LipkitError, alike, lacks_memory, suggestion
from lipkit.memory import keep_freed_memory
from lipkit.text import printable

# Command -> the sections of the recipe that it takes as KEY=VALUE, unless it takes all.
SECTIONS = {"certify": ("certify", "data")}


def no_option(error: click.NoSuchOption, given: Sequence[str]) -> str:
    """The message for an unknown option; if a key of the recipe is meant, how to write it."""
    command = None if error.ctx is None else error.ctx.command
    if command is None or not any("KEY=VALUE" in (p.metavar or "") for p in command.params):
        return error.format_message()
    value = next((_value(given, i) for i, a in enumerate(given) if a.partition("=")[0] == error.option_name), "VALUE")
    if found := keys_like(error.option_name, SECTIONS.get(command.name or "", ())):
        changes = " or ".join(f"{key}={value}" for key in found)
        return f"No such option '{error.option_name}': a key of the recipe is written {changes}"
    return f"{error.format_message()} Keys of the recipe are written KEY=VALUE; lipkit recipe show lists them"


def keys_like(option: str, sections: Sequence[str] = ()) -> list[str]:
    """The keys of a recipe that an unknown option may mean: keys of the same name, else of the closest name.

    >>> keys_like("--epochs"), keys_like("--batch-size", ["certify"]), keys_like("--epoch"), keys_like("--data")
    (['train.epochs'], ['certify.batch_size'], ['train.epochs'], ['data'])
    """
    from lipkit.experiments.recipe import SHORT
    from lipkit.experiments.recipe_schema import keys

    word = option.lstrip("-").replace("-", "_")
    known = [path for path, _, section in keys() if section is None or path in SHORT]
    known = [path for path in known if not sections or path[0] in sections]
    found = [path for path in known if word in (path[-1], ".".join(path))]
    if not found:
        close = alike(word, {path[-1] for path in known}, cutoff=0.75)
        found = [path for path in known if path[-1] in close]
    return [".".join(path) for path in found]


def _value(given: Sequence[str], place: int) -> str:
    """The value that the option at this index of the arguments was given, or the word VALUE."""
    _, equals, value = given[place].partition("=")
    if equals:
        return value
    following = given[place + 1] if place + 1 < len(given) else "-"
    # What follows a flag is another option or an override, not a value.
    return "VALUE" if following.startswith("-") or "=" in following else following


# Each command is a module of this package with a function `command`; in the order of the help.
VERBS = (
    *("train", "certify", "check", "attack", "report", "compare", "bound", "wasserstein"),
    *("list", "recipe", "export", "explore"),
)


def data_root(path: Path) -> str:
    """The override that sets ``data.root`` to the absolute path, quoted for YAML, so that it holds in every folder.

    >>> data_root(Path("/it's here"))
    "data.root='/it''s here'"
    """
    return "data.root='" + str(path.expanduser().resolve()).replace("'", "''") + "'"


def once(changes: Sequence[str]) -> Sequence[str]:
    """Return the changes ``KEY=VALUE``, those made by options included; a usage error if two set the same key.

    >>> once(["train.epochs=5", "train.lr=1"])
    ['train.epochs=5', 'train.lr=1']
    """
    seen: dict[str, str] = {}
    for change in changes:
        key = change.partition("=")[0].strip()
        if key in seen:
            raise click.UsageError(f"expected each key once, got {seen[key]} and {change}")
        seen[key] = change
    return changes


# Options that several commands share. Every command that can run code named by a recipe has ALLOW_CODE.
ALLOW_CODE = click.option("--allow-code", is_flag=True, help="Run the code that RUN's recipe names (pkg.mod:factory).")
DEVICE = click.option("--device", default="cpu", show_default=True, help="Where to compute: cpu, cuda, mps.")
LARGE_EPS = click.option("--large-eps", is_flag=True, help="Accept radii above 8 for images (often a forgotten /255).")
ROOT = click.option(  # arrives as the overrides of a recipe
    "--root", type=click.Path(path_type=Path), metavar="DATA", help="Folder of the data sets (data.root).",
    callback=lambda _, __, path: [] if path is None else [data_root(path)],
)  # fmt: skip


class _Lazy(click.Group):
    """A group that imports the module of a command on its first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return importlib.import_module(f"lipkit.cli.{name}").command if name in VERBS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            hint = suggestion(args[0], VERBS) or f"; known: {', '.join(VERBS)}"
            raise click.UsageError(f"No such command {args[0]!r}{hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(lipkit.__version__, prog_name="lipkit")
@click.option("--debug", is_flag=True, help="Show the traceback of an error; also after the command.")
def cli(debug: bool) -> None:
    """Lipschitz-bounded neural networks: train, certify, report."""


def main(arguments: Sequence[str] | None = None, command: click.Command = cli, name: str = "lipkit") -> int:
    """Run a command and return its exit code; ``--debug`` anywhere shows the traceback of an error.

    0: done. 1: unexpected error. 2: wrong usage or input, one line on stderr. 130: interrupted.
    ``arguments`` are without the program's name.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and given[:1] == ["train"]:
        keep_freed_memory()  # training allocates tensors of the same sizes again and again
    end = given.index("--") if "--" in given else len(given)  # options end here
    debug = "--debug" in given[:end]
    given = [a for i, a in enumerate(given) if a != "--debug" or i > end]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: click.echo(f"lipkit: warning: {printable(message)}", err=True)
            code = command.main(given, prog_name=name, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        message = no_option(error, given) if isinstance(error, click.NoSuchOption) else error.format_message()
        _show(error, debug, message)
        return 2
    except (KeyboardInterrupt, click.Abort):
        click.echo("lipkit: interrupted", err=True)
        return 130
    except BrokenPipeError:  # the reader of stdout has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's last flush fails again
        return 1
    except OSError as error:
        _show(error, debug, f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return 2
    except (LipkitError, MemoryError) as error:
        _show(error, debug, str(error) or type(error).__name__)
        return 2
    except Exception as error:
        if lacks_memory(error):
            _show(error, debug, f"not enough memory: {error}")
            return 2
        _show(error, debug, f"unexpected {type(error).__name__}: {error} (--debug shows where)")
        return 1
    return code if isinstance(code, int) else 0


def _show(error: BaseException, debug: bool, message: str) -> None:
    if debug:
        traceback.print_exception(error)
    click.echo(f"lipkit: {printable(' '.join(message.split()))}", err=True)


if __name__ == "__main__":
    sys.exit(main())
