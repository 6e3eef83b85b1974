"""Any forward pass as plain modules: a chain, with a `Graph` where values branch.

``tracing``, ``recording`` and ``running`` find out what is computed, ``visiting`` walks over it, ``functional`` and
``structure`` say which modules compute the same. The verbs `lipschitz` and `export` live here, because a network with a
forward pass of its own needs all of that.
"""

from lipkit.lowering.functional import function_module
from lipkit.lowering.structure import structure
from lipkit.modules.registry import export, lipschitz

__all__ = ["export", "function_module", "lipschitz", "structure"]


def __dir__() -> list[str]:
    return sorted(__all__)
