"""AutoAttack: the parts of pyautoattack, or lipkit's APGD and FAB followed by pyautoattack's Square."""

import importlib.util
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lipkit.attacks.ascent import Best, Box, Model, ball, check_inputs, like, misclassified, seeded
from lipkit.attacks.losses import correct_samples, rivals
from lipkit.attacks.minimum_norm import fab
from lipkit.attacks.pgd import climb
from lipkit.errors import OptionError, rewording

_SMALLEST, _FEWEST_CLASSES = 5, 4
_STEPS, _LOOK, _TARGETS = 100, 10, 9

STANDARD = ("apgd-ce", "apgd-t", "fab-t", "square")
"""pyautoattack's names of the four parts of its standard version."""


def autoattack(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float | Tensor,
    norm: str = "l2",
    box: Box = (0.0, 1.0),
    generator: torch.Generator | None = None,
    batch_size: int = 250,
    parts: Sequence[str] | None = STANDARD,
) -> Tensor:
    r"""AutoAttack, the standard version of pyautoattack: APGD-CE, targeted APGD, targeted FAB, and Square.

    With ``parts=None`` lipkit's APGD and FAB come first, at about 0.7 of the evaluations: all target classes of a
    sample share a batch, starts whose margin rises too slowly are given up, and FAB skips samples without a start left.

    It needs pyautoattack, the box [0, 1], images of at least 5 x 5 pixels, at least 4 classes and one ``eps`` > 0 for
    all samples. Points that overshoot ``eps`` in float32 are projected on the ball and count only if they are still
    misclassified. Targets are the 9 largest wrong logits. The global random state is restored.

    **Guarantee.** Every returned point is within ``eps``, measured in float64 on the returned numbers, and in ``box``.
    Where no example was found it is the sample itself.

    Args:
        model, x, y, eps, norm, box: see `lipkit.attacks.apgd`.
        generator: AutoAttack's seed is drawn from it.
        batch_size: samples (with ``parts=None`` starts) attacked at once.
        parts: names of pyautoattack's attacks, one start each; None for lipkit's APGD and FAB, then Square.

    Raises:
        OptionError: it cannot run on these inputs, or pyautoattack is not installed.

    References: Croce & Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
    attacks", ICML 2020.
    """
    space = ball(norm)
    radius = check_inputs(x, y, eps, 1, 1, box)
    generator = seeded(generator)
    found = x.detach().clone()
    if not len(x):
        return found
    index, logits = correct_samples(model, x, y)
    if why := obstacle(x, radius, logits.shape[1], box):
        raise OptionError(f"expected inputs that AutoAttack can run on: it {why}; the attack 'apgd' takes any")
    if importlib.util.find_spec("pyautoattack") is None:
        raise OptionError(
            "expected the package pyautoattack to run AutoAttack, got none: pip install lipkit[attack]; "
            "the attack 'apgd' needs no package"
        )
    if parts is None:
        found[index], wrong = _searched(
            model, x[index].detach(), y[index], radius[index], logits, norm, box, generator, batch_size
        )
        index, parts = index[~wrong], ("square",)  # for the samples that survived
    if len(index):
        seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
        centre = x[index].detach()
        points = _run(parts, model, centre, y[index], float(radius[0]), norm, seed, logits.shape[1], batch_size)
        points = space.project(points, centre, radius[index], box)  # float32 overshoots eps a little
        with torch.no_grad():
            wrong = misclassified(model(points), y[index])
        found[index] = torch.where(like(wrong, points), points, found[index])
    return found


class _Rows(Best):
    """`Best` with a row per start and several starts per sample; once one succeeds, all starts of its sample end."""

    def __init__(self, x: Tensor, y: Tensor, owner: Tensor) -> None:
        super().__init__(x, y)
        self.owner, self.won = owner, self.fooled.clone()

    def improve(self, index: Tensor, points: Tensor, logits: Tensor, loss: Tensor | None = None) -> None:
        super().improve(index, points, logits, loss)
        self.won[index] |= misclassified(logits, self.labels[index])
        self.fooled = torch.isin(self.owner, self.owner[self.won])


def _searched(
    model: Model, x: Tensor, y: Tensor, radius: Tensor, logits: Tensor, norm: str, box: Box,
    generator: torch.Generator, batch_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Adversarial points by APGD and FAB (the sample where none was found), and (N,) whether one was found."""
    found, wrong = x.clone(), torch.zeros_like(y, dtype=torch.bool)
    space, order, near = ball(norm), rivals(logits, y, _TARGETS), []
    for targets in (None, order):
        starts = 1 if targets is None else order.shape[1]
        for index in (~wrong).nonzero()[:, 0].split(max(1, batch_size // starts)):
            owner = index.repeat_interleave(starts)
            rows = _Rows(x[owner], y[owner], owner)
            target = None if targets is None else targets[index].flatten()
            stayed = climb(
                space, model, rows, rows.left(False), radius[owner], target is not None, target, "margin", _STEPS, box,
                generator, True, _LOOK,
            )  # fmt: skip
            found[owner[rows.won]], wrong[owner[rows.won]] = rows.points[rows.won], True
            near.append(owner[stayed])  # FAB is expensive: it tries only these
    index = torch.cat(near).unique() if near else order.new_empty(0)
    for part in index[~wrong[index]].split(batch_size):
        points = fab(model, x[part], y[part], norm=norm, box=box, generator=generator, polish=0, steps=20, targets=3)
        size = space.distance(points, x[part])
        hit = (size > 0) & (size <= radius[part])  # 0: FAB found nothing and returned the sample
        found[part[hit]], wrong[part[hit]] = points[hit], True
    return found, wrong


def obstacle(x: Tensor, radius: Tensor, classes: int, box: Box) -> str:
    """The reason why AutoAttack cannot run on these inputs, as the end of a sentence; empty if it can.

    >>> obstacle(torch.zeros(1, 1, 4, 4), torch.ones(1), 10, (0.0, 1.0))
    'needs images of at least 5 x 5 pixels, got 4 x 4'
    """
    if box is None or tuple(box) != (0.0, 1.0):
        return f"knows only the box [0, 1], got {box}"
    if x.ndim != 4:
        return f"needs images (N, C, H, W), got shape {tuple(x.shape)}"
    if min(x.shape[2:]) < _SMALLEST:
        return f"needs images of at least {_SMALLEST} x {_SMALLEST} pixels, got {x.shape[2]} x {x.shape[3]}"
    if classes < _FEWEST_CLASSES:
        return f"needs at least {_FEWEST_CLASSES} classes, got {classes}"
    low, high = float(radius.min()), float(radius.max())
    if low != high or not low > 0:
        return f"needs one eps > 0 for all samples, got {low:g} to {high:g}"
    return ""


class _Isolated(torch.autograd.Function):
    """The model with a backward pass to the input only: parameters get no gradient."""

    @staticmethod
    def forward(ctx: Any, point: Tensor, model: Model, dtype: torch.dtype) -> Tensor:
        with torch.enable_grad():
            ctx.point = point.detach().requires_grad_()
            ctx.logits = model(ctx.point.to(dtype)).to(point.dtype)
        return ctx.logits.detach().clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.logits.requires_grad:
            return torch.zeros_like(ctx.point), None, None
        return torch.autograd.grad(ctx.logits, ctx.point, slopes[0], retain_graph=True)[0], None, None


def _run(
    parts: Sequence[str], model: Model, x: Tensor, y: Tensor, eps: float, norm: str, seed: int, classes: int,
    batch_size: int,
) -> Tensor:  # fmt: skip
    """Run pyautoattack, which computes in float32, and return its points; the global random state is left as it was."""
    from pyautoattack import AutoAttack

    def isolated(point: Tensor) -> Tensor:
        if torch.is_grad_enabled() and point.requires_grad:
            return _Isolated.apply(point, model, x.dtype)
        with torch.no_grad():
            return model(point.to(x.dtype)).to(point.dtype)

    # pyautoattack only calls the model, so a function will do.
    attack: Any = AutoAttack(isolated, norm={"l2": "L2", "linf": "Linf"}[norm], eps=eps, seed=seed, device=x.device)  # type: ignore[arg-type]
    # The default version "standard" has set one start for each attack.
    attack.attacks_to_run = list(parts)
    attack.apgd_targeted.n_target_classes = attack.fab.n_target_classes = min(_TARGETS, classes - 1)
    silent = logging.Logger("lipkit.autoattack")
    silent.addHandler(logging.NullHandler())
    attack.logger = attack.apgd.logger = attack.apgd_targeted.logger = silent
    trace = sys.gettrace()  # pyautoattack removes it
    start, end = "expected logits that pyautoattack can attack, got its error: ", "; the attack 'apgd' takes any"
    try:  # it cannot take infinite logits, nor a tie in every sample
        with torch.random.fork_rng(), rewording(OptionError, start, RuntimeError, AssertionError, end=end):
            points, _ = attack.run_standard_evaluation(x.float(), y, batch_size=batch_size)
    finally:
        sys.settrace(trace)
    return points.detach().to(x)
