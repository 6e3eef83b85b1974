"""Attacks search for inputs that a network gets wrong: results bound its robustness from above, and certify nothing."""

from lipkit.attacks.autoattack import autoattack
from lipkit.attacks.minimum_norm import carlini_wagner, fab, shrink
from lipkit.attacks.named import ATTACKS, AttackResult, Named, run_attack
from lipkit.attacks.pgd import apgd, pgd

__all__ = ["ATTACKS", "AttackResult", "Named", "run_attack"]  # the table
__all__ += ["apgd", "autoattack", "carlini_wagner", "fab", "pgd", "shrink"]

__dir__ = __all__.copy
