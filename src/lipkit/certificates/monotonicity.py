r"""Proofs that an output is monotone in an input, from the signs of the stored weights.

.. math:: \partial y_i / \partial x_j \ge 0 \text{ everywhere, if every path from } x_j \text{ to } y_i \text{ has a
   product of weights} \ge 0

through activations that do not decrease (`ReLU`, `tanh`, `MaxMin`, ...). No number is rounded: a sign is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipkit.certificates.measurement import check_network, exact_copy
from lipkit.errors import NoRuleError
from lipkit.linalg.matrices import all_finite
from lipkit.linalg.precision import check_underflow
from lipkit.modules import GroupSort, MaxMin, Network
from lipkit.modules.activations import slope_restricted
from lipkit.modules.dense import Affine
from lipkit.modules.guarding import type_name


def monotone(network: Network) -> Tensor:
    """A matrix that tells which outputs are proved monotone in which inputs.

    Args:
        network: result of ``lipkit.export``: dense layers, scalings and activations of slopes in [0, 1] or sorting,
            in a chain, for inputs that are vectors.

    Returns:
        (outputs, inputs) int64: 1 where the output never decreases with the input, -1 where it never increases, 0 where
        neither is proved. An output that does not depend on the input counts as 1.

    Guarantee:
        Everywhere, not only in an input range; for the exact function of the stored numbers.

    Raises:
        NoRuleError: another module, numbers that are not finite, or inputs that are no vectors.
        OptionError: torch.set_flush_denormal(True), under which the sign of a small weight is lost.

    >>> net = Network([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)], (2,))
    >>> _ = net[0].weight.copy_(torch.tensor([[1.0, -1.0], [2.0, 3.0]])), net[2].weight.fill_(1.0)
    >>> monotone(net).tolist()
    [[1, 0]]
    """
    check_network(network, "check")
    check_underflow()
    if len(network.input_shape) != 1:
        raise NoRuleError(f"monotone: expected inputs that are vectors, got the shape {network.input_shape}")
    (count,) = network.input_shape
    same = torch.eye(count, dtype=torch.bool)
    # (units, inputs) each: True if the unit never falls with the input, and if it never rises.
    up, down = torch.ones_like(same), ~same
    for module in exact_copy(network):
        if not all_finite(*module.parameters(), *module.buffers()):
            raise NoRuleError(f"monotone: expected finite numbers, got NaN or infinity in {module}")
        if type(module) is nn.Linear:
            rising, falling = (module.weight > 0).double(), (module.weight < 0).double()
            # These weights break a rise: positive ones of units that may fall, negative ones of units that may rise.
            against = [rising @ (~a).double() + falling @ (~b).double() for a, b in ((up, down), (down, up))]
            up, down = against[0] == 0, against[1] == 0
        elif type(module) is Affine:
            scale = module.scale.expand(len(up))[:, None]
            up, down = ((scale == 0) | torch.where(scale > 0, a, b) for a, b in ((up, down), (down, up)))
        elif type(module) is MaxMin:
            up, down = (a.view(2, -1, count).all(0).repeat(2, 1) for a in (up, down))  # max and min rise if both do
        elif type(module) is GroupSort:
            size = module.group_size or len(up)
            up, down = (a.view(-1, size, count).all(1).repeat_interleave(size, 0) for a in (up, down))
        elif not (slope_restricted(module) or type(module) is nn.Flatten):
            kind = type_name(type(module))
            raise NoRuleError(f"monotone: expected dense layers and activations that never fall, got {kind}")
    return torch.where(up, 1, torch.where(down, -1, 0))
