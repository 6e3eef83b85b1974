r"""The nearest point of a hyperplane in a box, in l2 and l_inf: what a linearised decision boundary asks for."""

from __future__ import annotations

import torch
from torch import Tensor

from lipkit.attacks.ascent import Box

_NEWTON_STEPS = 16


def towards_hyperplane(point: Tensor, normal: Tensor, gap: Tensor, norm: str, box: Box) -> Tensor:
    r"""The smallest step from each point to its hyperplane, without leaving the box.

        minimise ||d||    subject to    <w, d> = gap,   point + d in box

    The solution is ``d_j = sign(w_j gap) min(s r_j, room_j)`` with ``r_j = |w_j|`` for l2 and 1 for l_inf. The length
    ``s`` solves ``sum_j |w_j| min(s r_j, room_j) = |gap|``, whose left side is concave and piecewise linear: Newton's
    method from below grows towards the root and never passes it. Where the hyperplane does not meet the box, the step
    goes to the corner nearest to it.

    Args:
        point: (N, d), in the box.
        normal: (N, d), the vectors w.
        gap: (N,).
        norm: ``"l2"`` or ``"linf"``.
        box: (low, high) or None.

    Returns:
        (N, d) steps; 0 where ``normal`` is 0.

    >>> w = torch.tensor([[3.0, 4.0]])
    >>> towards_hyperplane(torch.zeros(1, 2), w, torch.tensor([5.0]), "l2", None).tolist()
    [[0.6000000238418579, 0.800000011920929]]
    >>> towards_hyperplane(torch.zeros(1, 2), w, torch.tensor([3.5]), "linf", (0, 1)).tolist()
    [[0.5, 0.5]]
    """
    # scaled to largest entry 1, so that squares neither overflow nor vanish
    largest = normal.abs().amax(dim=1, keepdim=True)
    known = (largest > 0) & largest.isfinite()
    unit = torch.where(known, normal / torch.where(known, largest, 1.0), 0.0)
    aim = torch.where(known, gap[:, None] / torch.where(known, largest, 1.0), 0.0)
    size = unit.abs()
    rate = size if norm == "l2" else (size > 0).to(size)
    forward = torch.sign(unit) * torch.sign(aim)
    room = torch.full_like(point, torch.inf)
    if box is not None:
        room = torch.where(forward > 0, box[1] - point, point - box[0]).clamp_min(0)
    aim = aim.abs()
    length = aim / (size * rate).sum(dim=1, keepdim=True).clamp_min(1e-30)
    for _ in range(_NEWTON_STEPS if box is not None else 0):
        free = length * rate < room
        reached = (size * torch.where(free, length * rate, room)).sum(dim=1, keepdim=True)
        slope = torch.where(free, size * rate, 0.0).sum(dim=1, keepdim=True)
        missing = (aim - reached).clamp_min(0)
        if not bool((missing > 0).any()):
            break
        length = torch.where(slope > 0, length + missing / slope.clamp_min(1e-30), length)
    return forward * torch.minimum(length * rate, room)
