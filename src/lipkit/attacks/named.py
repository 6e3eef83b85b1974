"""The attacks by name, with one signature: the command line and the evaluation choose from this table."""

import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lipkit.attacks.ascent import Box, Model, ball, check_inputs, like
from lipkit.attacks.autoattack import autoattack
from lipkit.attacks.losses import first_logits
from lipkit.attacks.minimum_norm import carlini_wagner, fab
from lipkit.attacks.pgd import apgd, pgd
from lipkit.errors import OptionError, check_choice


@dataclass(frozen=True)
class Named:
    """One attack of the table.

    Attributes:
        function: (model, x, y, *, box, ...) -> (N, ...) points; takes those options of `run_attack` that it declares.
        words: name shown to the user.
        package: name of a package that it needs, or empty; `AttackResult.ran` states the package's version.
    """

    function: Callable[..., Tensor]
    words: str
    package: str = ""

    @property
    def takes(self) -> Mapping[str, Any]:
        """The parameters of ``function``, by name."""
        return inspect.signature(self.function).parameters

    @property
    def minimum_norm(self) -> bool:
        """True if it looks for the closest example, whatever its distance, rather than within ``eps``."""
        return "eps" not in self.takes


ATTACKS = {
    "pgd": Named(pgd, "PGD, margin loss"),
    "apgd": Named(partial(apgd, targeted=None), "APGD, margin loss"),
    "fab": Named(fab, "FAB"),
    "cw": Named(carlini_wagner, "Carlini-Wagner"),
    "autoattack": Named(autoattack, "AutoAttack standard", package="pyautoattack"),
    "autoattack_early": Named(
        partial(autoattack, parts=None), "AutoAttack, lipkit's APGD and FAB before its Square", package="pyautoattack"
    ),
    # Trockman & Kolter, ICLR 2021, section 5.2, say that these two are their "AutoAttack".
    "autoattack_apgd": Named(
        partial(autoattack, parts=("apgd-ce", "apgd-dlr")), "AutoAttack's APGD-CE and APGD-DLR", package="pyautoattack"
    ),
}
"""The attacks that `run_attack` knows by name."""


@dataclass(frozen=True)
class AttackResult:
    """``points`` (N, ...) within ``eps``, adversarial or the best found; ``ran`` names the attack and its package."""

    points: Tensor
    ran: str


def run_attack(
    name: str,
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: float | Tensor | None,
    norm: str = "l2",
    steps: int | None = None,
    restarts: int | None = None,
    box: Box = (0.0, 1.0),
    generator: torch.Generator | None = None,
) -> AttackResult:
    """Run one attack by its name, and return its points within ``eps``.

    ``fab`` and ``cw`` may find their closest example outside ``eps``: then the sample itself is returned.

    Args:
        name: of `ATTACKS`: ``"pgd"`` (margin loss), ``"apgd"`` (margin loss; each further start towards one class),
            ``"fab"``, ``"cw"`` (l2 only), ``"autoattack"`` (the standard version), ``"autoattack_apgd"`` (its two APGD
            parts only) or ``"autoattack_early"`` (gives up hopeless starts).
        model, x, y, norm, box, generator: see `lipkit.attacks.pgd`; at least one sample.
        eps: radii, see `lipkit.attacks.pgd`; None for the closest example of ``fab`` and ``cw``, whatever its distance.
        steps: see the attack; None for its default. AutoAttack has its own.
        restarts: of pgd and fab (None: 1), and of apgd (None: one, then one for each of the 9 largest wrong logits).

    Raises:
        OptionError: ``cw`` in l_inf, no sample, or what the attack itself refuses.

    >>> x, y = torch.tensor([[0.5, 0.5]]), torch.tensor([0])
    >>> model = lambda x: x * torch.tensor([1.0, -1.0]) + 0.1
    >>> found = run_attack("fab", model, x, y, eps=1.0, box=None)
    >>> model(found.points).argmax(1).item(), found.ran
    (1, 'FAB')
    """
    check_choice("attack", name, ATTACKS)
    attack = ATTACKS[name]
    space = ball(norm)
    if norm != "l2" and "norm" not in attack.takes:
        raise OptionError(f"expected norm 'l2' for the attack {name!r}, got {norm!r}")
    if not len(x):
        raise OptionError("expected at least one sample to attack, got 0")
    if eps is None and not attack.minimum_norm:
        raise OptionError(f"expected a radius eps for the attack {name!r}, got None")
    radius = check_inputs(x, y, 0.0 if eps is None else eps, 1, 1, box)
    first_logits(model, x[:1], y[:1])  # refuse samples that do not fit the model before a long attack
    given = {"eps": eps, "norm": norm, "steps": steps, "restarts": restarts, "generator": generator}
    options = {key: value for key, value in given.items() if key in attack.takes and value is not None}
    points = attack.function(model, x, y, box=box, **options)
    if eps is not None:
        points = torch.where(like(space.distance(points, x) <= radius, points), points, x)
    version = f" ({attack.package} {importlib.metadata.version(attack.package)})" if attack.package else ""
    return AttackResult(points, attack.words + version)
