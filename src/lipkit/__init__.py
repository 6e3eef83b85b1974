"""lipkit: Lipschitz-bounded neural networks in PyTorch.

Build them, train them, bound them, certify them, ship them::

    net = lipkit.models.kwlarge(layer="cayley")
    L = lipkit.lipschitz(net)
    plain = lipkit.export(net, input_shape=(3, 32, 32))
    cert = lipkit.certify(plain, images, labels)

Names are imported on first use, so that ``import lipkit`` is instant and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
"""The version of the package."""

# Public name -> the module it lives in.
_HOME = {
    "analyze": "lipkit.analysis",
    "lipschitz": "lipkit.certificates.gains",
    "export": "lipkit.lowering",
    "save": "lipkit.modules",
    "load": "lipkit.modules",
    "certify": "lipkit.certificates",
    "prove": "lipkit.certificates",
    "convert": "lipkit.models",
    "fit": "lipkit.training",
}
_PACKAGES = (
    "analysis",
    "attacks",
    "bounds",
    "certificates",
    "conformal",
    "conv",
    "data",
    "errors",
    "evaluation",
    "experiments",
    "explorer",
    "integer",
    "interop",
    "layers",
    "linalg",
    "lowering",
    "models",
    "modules",
    "networks",
    "parametrize",
    "proof",
    "report",
    "sklearn",
    "testing",
    "training",
    "wasserstein",
)

__all__ = ["__version__", *sorted(_HOME), *_PACKAGES]

if TYPE_CHECKING:
    from lipkit.analysis import analyze as analyze
    from lipkit.certificates import certify as certify
    from lipkit.certificates import prove as prove
    from lipkit.lowering import export as export
    from lipkit.lowering import lipschitz as lipschitz
    from lipkit.models import convert as convert
    from lipkit.modules import load as load
    from lipkit.modules import save as save
    from lipkit.training import fit as fit


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"lipkit.{name}")
    raise AttributeError(f"module 'lipkit' has no attribute {name!r}")


__dir__ = __all__.copy
