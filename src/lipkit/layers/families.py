"""The table of layer families. Each file of a family ends in its row, a :class:`lipkit.layers.base.Family`."""

from collections.abc import Mapping

from lipkit.errors import check_choice
from lipkit.layers.aol import AOL
from lipkit.layers.base import Family
from lipkit.layers.bcop import BCOP, CAYLEY_BCOP
from lipkit.layers.bro import BRO, LIRESNET
from lipkit.layers.cayley import CAYLEY
from lipkit.layers.eco import ECO
from lipkit.layers.geometry import AOC
from lipkit.layers.lot import LOT
from lipkit.layers.rko import CHOLESKY, CRKO, RKO
from lipkit.layers.sandwich import SANDWICH
from lipkit.layers.sll import CPL, SLL
from lipkit.layers.soc import SOC
from lipkit.layers.svcm import OSSN, SVCM

FAMILIES: dict[str, Family] = {
    row.name: row
    for row in (
        *(CAYLEY, AOL, RKO, CRKO, OSSN, SVCM, LOT, SOC, ECO, BCOP, CAYLEY_BCOP, SLL, CPL, SANDWICH),
        *(BRO, LIRESNET, CHOLESKY, AOC),
    )
}
"""Every family by its acronym, which the models take as ``layer``."""


def get(name: str, others: Mapping[str, Family] = {}) -> Family:
    """The family of this acronym in the table, or among ``others``; ``OptionError`` lists the known ones."""
    known = {**FAMILIES, **others}
    check_choice("layer", name, known)
    return known[name]


def names() -> list[str]:
    """Every acronym, in the order of the table."""
    return list(FAMILIES)
