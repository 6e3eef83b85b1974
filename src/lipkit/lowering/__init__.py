"""Any forward pass as plain modules: a chain, with a `Graph` where values branch.

``copies``, ``tracing``, ``calls`` and ``observe`` find out what is computed; ``build``, ``axes``, ``functional``,
``moves``, ``functions`` and ``written`` say which modules a call becomes; ``structure`` walks over all calls.
`lipschitz` and `export` are imported from here, because a network with its own forward pass needs all of that.
"""

from lipkit.lowering.functional import function_module
from lipkit.lowering.structure import structure
from lipkit.modules.registry import export, lipschitz

__all__ = ["export", "function_module", "lipschitz", "structure"]

__dir__ = __all__.copy
