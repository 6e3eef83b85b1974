"""The two open functions of the library, ``lipschitz`` and ``export``, and the rules of torch's and plain modules."""

from lipkit.protocol import activation_rules as activation_rules
from lipkit.protocol import conv_rules as conv_rules
from lipkit.protocol import normalization_rules as normalization_rules
from lipkit.protocol import plain_rules as plain_rules
from lipkit.protocol import slope_rules as slope_rules
from lipkit.protocol import sum_rules as sum_rules
from lipkit.protocol import torch_rules as torch_rules
from lipkit.protocol.guarding import guard
from lipkit.protocol.registry import (
    Shape,
    export,
    export_rule,
    lipschitz,
    lipschitz_rule,
    output_shape,
    rules,
)

__all__ = ["Shape", "export", "export_rule", "guard", "lipschitz", "lipschitz_rule", "output_shape", "rules"]
