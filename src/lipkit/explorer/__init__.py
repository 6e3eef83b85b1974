"""A page that shows finished runs: pick an image, slide the radius, see certificate and attack. Loopback by default.

Modules that need torch are imported on first use, so that `lipkit explore` opens its port before torch is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lipkit.explorer.server import listen, make_app, serve

if TYPE_CHECKING:
    from lipkit.explorer.runs import ExploredRun as ExploredRun
    from lipkit.explorer.runs import open_runs as open_runs

__all__ = ["ExploredRun", "listen", "make_app", "open_runs", "serve"]


def __getattr__(name: str) -> Any:
    if name in ("ExploredRun", "open_runs"):
        return getattr(importlib.import_module("lipkit.explorer.runs"), name)
    raise AttributeError(f"module 'lipkit.explorer' has no attribute {name!r}")


__dir__ = __all__.copy
