"""Training: losses, schedules, the loop and its run folders, regularisation, adversarial training, recipes.

`recipe` needs pydantic and pyyaml, so it is imported by its own name: ``from lipkit.training import recipe``.
"""

from __future__ import annotations

from lipkit.training.adversarial import PgdAdversary
from lipkit.training.loop import Progress, Run, fit
from lipkit.training.regularisation import LipschitzPenalty

__all__ = ["LipschitzPenalty", "PgdAdversary", "Progress", "Run", "fit"]
