"""Training: losses, schedules, the loop and its run folders, recipes.

`recipe` needs pydantic and pyyaml, so it is imported by its own name: ``from lipkit.training import recipe``.
"""

from __future__ import annotations

from lipkit.training.loop import Progress, Run, fit

__all__ = ["Progress", "Run", "fit"]
