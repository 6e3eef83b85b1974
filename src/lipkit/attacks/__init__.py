"""Attacks: search for inputs that a network gets wrong. What they find is a lower bound, never a certificate."""

from __future__ import annotations

from lipkit.attacks.lipschitz_search import SecantSearch, lipschitz_lower_bound
from lipkit.attacks.minimum_norm import shrink
from lipkit.attacks.pgd import pgd_l2
from lipkit.attacks.pgd_linf import pgd_linf

__all__ = ["SecantSearch", "lipschitz_lower_bound", "pgd_l2", "pgd_linf", "shrink"]
