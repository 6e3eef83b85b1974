"""Certified networks that come with the package, each in the form of a finished run without its training's logs.

NAME/network/                what ``lipkit.load(NAME)`` returns
NAME/README.md               its card
NAME/recipe.yaml, record.json, certificate.jsonl.gz     of a classification: how it was made, and what was proved
NAME/estimate.json           of a critic: the Wasserstein distance that it bounds from below
"""

import os
from pathlib import Path

from lipkit.errors import OptionError, suggestion

__all__ = ["folder", "names", "resolved"]

_FOLDER = Path(__file__).resolve().parent


def names() -> tuple[str, ...]:
    """Names of the networks, sorted.

    >>> "digits-cayley" in names()
    True
    """
    return tuple(sorted(path.name for path in _FOLDER.iterdir() if (path / "network").is_dir()))


def folder(name: str) -> Path:
    """The folder of a network of the package; ``OptionError`` if there is none of this name.

    >>> folder("digits-caley")
    Traceback (most recent call last):
    lipkit.errors.OptionError: unknown network 'digits-caley', did you mean 'digits-cayley'?
    """
    if name not in names():
        hint = suggestion(name, names()) or f"; known: {', '.join(names())}"
        raise OptionError(f"unknown network {name!r}{hint}")
    return _FOLDER / name


def resolved(path: str | os.PathLike[str]) -> Path:
    """``path``, or the folder of the package's network of this name if nothing lies at ``path``."""
    found, name = Path(path), os.fspath(path)
    return _FOLDER / name if not found.exists() and name in names() else found


__dir__ = __all__.copy
