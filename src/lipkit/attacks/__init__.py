"""Attacks: search for inputs that a network gets wrong. What they find is an upper bound of its robustness, never a
certificate."""

from __future__ import annotations

from lipkit.attacks.apgd import apgd
from lipkit.attacks.autoattack import Found, autoattack
from lipkit.attacks.carlini_wagner import carlini_wagner
from lipkit.attacks.ensemble import ensemble
from lipkit.attacks.fab import fab, shrink
from lipkit.attacks.named import NAMES, run_attack
from lipkit.attacks.pgd import pgd_l2
from lipkit.attacks.pgd_linf import pgd_linf
from lipkit.attacks.random_search import random_search

__all__ = [
    "NAMES",
    "Found",
    "apgd",
    "autoattack",
    "carlini_wagner",
    "ensemble",
    "fab",
    "pgd_l2",
    "pgd_linf",
    "random_search",
    "run_attack",
    "shrink",
]


def __dir__() -> list[str]:
    return sorted(__all__)
