"""The attacks by name, with one signature: what the command line and the evaluation choose from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lipkit.attacks.apgd import apgd
from lipkit.attacks.ascent import Box, Model, check_choice
from lipkit.attacks.autoattack import Found, autoattack
from lipkit.attacks.carlini_wagner import carlini_wagner
from lipkit.attacks.fab import fab
from lipkit.attacks.losses import first_logits
from lipkit.attacks.pgd import pgd_l2
from lipkit.attacks.pgd_linf import pgd_linf
from lipkit.errors import OptionError

STEPS = {"pgd": 50, "apgd": 100, "fab": 50, "cw": 200, "autoattack": 100}
NAMES = tuple(STEPS)
"""The attacks that :func:`run_attack` knows by name."""
MINIMUM_NORM = ("fab", "cw")


def run_attack(
    name: str,
    model: Model,
    x: Tensor,
    y: Tensor,
    eps: float | Tensor,
    *,
    norm: str = "l2",
    steps: int | None = None,
    restarts: int | None = None,
    box: Box = (0.0, 1.0),
    generator: torch.Generator | None = None,
) -> Found:
    """Run one attack. ``fab`` and ``cw`` look for the closest example, which may lie outside ``eps``; the others do not
    leave the ball.

    Args:
        name: ``"pgd"`` (margin loss), ``"apgd"`` (margin loss; each further start towards one class), ``"fab"``,
            ``"cw"`` (l2 only), or ``"autoattack"``.
        model: any callable from (N, ...) to logits (N, K >= 2) that treats samples independently (modules: ``eval()``).
        x: (N, ...) float32 or float64, at least one sample.
        y: (N,) int64 labels.
        eps: radius, one number or (N,), in the norm's units.
        norm: ``"l2"`` or ``"linf"``.
        steps: see the attack; None for its default, `STEPS`.
        restarts: of pgd and fab (None: 1), and of apgd (None: one, then one for each of the 9 largest wrong logits).
        box: smallest and largest value of an input entry, or None.
        generator: randomness; None is a CPU generator with seed 0.

    Returns:
        `Found`: the points, and which attack ran.

    Raises:
        OptionError: an unknown name, no sample, cw in l_inf, or see the attack.
        ShapeError: see the attack.

    >>> x, y = torch.tensor([[0.5, 0.5]]), torch.tensor([0])
    >>> model = lambda x: x * torch.tensor([1.0, -1.0]) + 0.1
    >>> found = run_attack("fab", model, x, y, 1.0, box=None)
    >>> model(found.points).argmax(1).item(), found.ran
    (1, 'FAB')
    """
    check_choice("attack", name, NAMES)
    check_choice("norm", norm, ("l2", "linf"))
    if not len(x):
        raise OptionError("expected at least one sample to attack, got 0")
    steps = STEPS[name] if steps is None else steps
    common: dict[str, Any] = {"steps": steps, "box": box, "generator": generator}
    if name == "autoattack":
        return autoattack(model, x, y, eps, norm=norm, **common)
    if name == "cw":
        if norm != "l2":
            raise OptionError(f"expected norm 'l2' for the attack 'cw', got {norm!r}")
        return Found(carlini_wagner(model, x, y, steps=steps, box=box), "Carlini-Wagner")
    if name == "fab":
        return Found(fab(model, x, y, norm=norm, restarts=restarts or 1, **common), "FAB")
    first_logits(model, x[:1], y[:1])
    if name == "pgd":
        pgd = pgd_l2 if norm == "l2" else pgd_linf
        return Found(pgd(model, x, y, eps, restarts=restarts or 1, **common), "PGD, margin loss")
    points = apgd(model, x, y, eps, norm=norm, restarts=1, **common)
    if restarts != 1:
        with torch.no_grad():
            left = (model(points).argmax(dim=1) == y).nonzero()[:, 0]
        if len(left):
            radius = torch.as_tensor(eps, dtype=torch.float64 if x.device.type != "mps" else torch.float32).to(x.device)
            more = None if restarts is None else restarts - 1
            points[left] = apgd(model, x[left], y[left], radius.expand(len(x))[left], norm=norm, targeted=True,
                                restarts=more, **common)  # fmt: skip
    return Found(points, "APGD, margin loss")
