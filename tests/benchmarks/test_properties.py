from __future__ import annotations

import pytest
from benchmarks.properties import BOXES, property_text

from lipkit.certificates.vnnlib import cases


@pytest.mark.parametrize("number", BOXES)
def test_properties_of_acas_xu_are_boxes_of_normalised_inputs(number: int) -> None:
    (case,) = cases(property_text(number), 5, 5)
    assert all(-1 < low <= high < 1 for low, high in case.box)
    assert len(case.outputs) == (1 if number == 1 else 4)
    assert len(case.inputs) == 10
