"""A page to look at finished runs: pick an image, slide the radius, see certificate and attack. Loopback only."""

from __future__ import annotations

from lipkit.explorer.runs import ExploredRun, open_runs
from lipkit.explorer.server import make_app, serve

__all__ = ["ExploredRun", "make_app", "open_runs", "serve"]
