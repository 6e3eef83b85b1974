"""``lipkit``: the group of verbs, each imported when it is named, and the one place where errors become exit codes."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import click

import lipkit
from lipkit.cli import hints
from lipkit.errors import LipkitError
from lipkit.memory import keep_freed_memory
from lipkit.text import printable

# A verb is the module of that name in this package, which holds its `command`; in the order of the help.
VERBS = (
    *("train", "certify", "check", "attack", "report", "bound", "wasserstein"),
    *("list", "recipe", "reproduce", "export", "explore"),
)
# Verbs that take the same large tensors again and again.
TRAINING = ("train", "reproduce")


class _Lazy(click.Group):
    """A group that imports the module of a verb when the verb is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module = importlib.import_module(f"lipkit.cli.{name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise click.UsageError(hints.no_command(args[0], VERBS), ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(lipkit.__version__, prog_name="lipkit")
@click.option("--debug", is_flag=True, help="Show the traceback of an error; also after the verb.")
def cli(debug: bool) -> None:
    """Lipschitz-bounded neural networks: train, certify, report."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: done. 2: wrong usage or input, one line on stderr. 1: an error that lipkit does not know. 130: interrupted.

    Args:
        arguments: without the program's name; None takes them from ``sys.argv``.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and given and given[0] in TRAINING:
        keep_freed_memory()  # this process is the program's own
    end = given.index("--") if "--" in given else len(given)
    debug = "--debug" in given[:end]
    given = [a for i, a in enumerate(given) if a != "--debug" or i > end]
    try:
        code = cli.main(given, prog_name="lipkit", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.NoSuchOption as error:
        _show(error, debug, hints.no_option(error, given))
        return 2
    except click.ClickException as error:
        _show(error, debug, error.format_message())
        return 2
    except (KeyboardInterrupt, click.Abort):
        click.echo("lipkit: interrupted", err=True)
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (LipkitError, OSError, MemoryError) as error:
        _show(error, debug, str(error) or type(error).__name__)
        return 2
    except Exception as error:
        _show(error, debug, f"unexpected {type(error).__name__}: {error} (--debug shows where)")
        return 1
    return code if isinstance(code, int) else 0


def _show(error: BaseException, debug: bool, message: str) -> None:
    if debug:
        traceback.print_exception(error)
    click.echo(f"lipkit: {printable(' '.join(message.split()))}", err=True)


if __name__ == "__main__":
    sys.exit(main())
