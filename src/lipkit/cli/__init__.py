"""The command line: one file for each command. Nothing here imports torch before a command runs."""

import sys


def run() -> int:
    """Entry point of the command ``lipkit``: the exit code of `lipkit.cli.main.main`; 2 without click."""
    try:
        from lipkit.cli.main import main
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        print("lipkit: the command line needs the package click, of the extra train: pip install 'lipkit[train]'",
              file=sys.stderr)  # fmt: skip
        return 2
    return main()
