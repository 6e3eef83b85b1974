"""A page to look at finished runs: pick an image, slide the radius, see certificate and attack. Loopback only.

Names are imported on first use: `lipkit explore` opens its port before torch is there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lipkit.explorer.runs import ExploredRun as ExploredRun
    from lipkit.explorer.runs import open_runs as open_runs
    from lipkit.explorer.server import listen as listen
    from lipkit.explorer.server import make_app as make_app
    from lipkit.explorer.server import serve as serve

# Public name -> the module it lives in.
_HOME = {"ExploredRun": "runs", "open_runs": "runs", "listen": "server", "make_app": "server", "serve": "server"}

__all__ = ["ExploredRun", "listen", "make_app", "open_runs", "serve"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"lipkit.explorer.{_HOME[name]}"), name)
    raise AttributeError(f"module 'lipkit.explorer' has no attribute {name!r}")


__dir__ = __all__.copy
