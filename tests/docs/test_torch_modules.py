"""The table of torch.nn is complete, and says what lipschitz says."""

from __future__ import annotations

import pytest
import torch
from benchmarks.torch_modules import KNOWN, MADE, PAGE, REASONS, classes, page, sample
from torch import nn

from lipkit import lipschitz
from lipkit.errors import NoRuleError


def test_every_module_has_one_line() -> None:
    assert not {*KNOWN} & {*REASONS}
    if torch.__version__.startswith("2.13."):  # the version of the page; others have more classes, or fewer
        assert sorted([*KNOWN, *REASONS]) == sorted(classes())
        assert PAGE.read_text() == page(), "run: python -m benchmarks.torch_modules --keep"


@pytest.mark.parametrize("name", KNOWN)
def test_constants_are_what_lipschitz_says(name: str) -> None:
    module, value = sample(KNOWN[name])
    assert type(module).__name__ == name
    found = float(lipschitz(module, KNOWN[name].shape).detach())
    assert float(value) * (1 - 1e-6) <= found <= float(value) * (1 + KNOWN[name].slack)


@pytest.mark.parametrize("name", [name for name in REASONS if hasattr(nn, name)])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_others_are_refused(name: str) -> None:
    module = MADE.get(name, getattr(nn, name))().eval()
    with pytest.raises(NoRuleError):
        lipschitz(module, (2,) if name.endswith("Cell") else (2, 4, 4))
