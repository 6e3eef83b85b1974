"""Law 11: the image size comes from the input, each time."""

from __future__ import annotations

from typing import Any

from torch import nn

from lipkit.modules import Shape
from lipkit.testing.case import Case, forward, require, require_same


def expected_shape(layer: nn.Module, shape: Shape) -> Shape | None:
    """Output shape that the attributes of a layer promise; None if they say nothing."""
    attribute: dict[str, Any] = vars(layer)
    if "out_features" in attribute:
        return (*shape[:-1], attribute["out_features"])
    if "out_channels" in attribute and len(shape) == 3:
        stride = attribute.get("stride", 1)
        steps = (stride, stride) if isinstance(stride, int) else tuple(stride)
        return (attribute["out_channels"], shape[1] // steps[0], shape[2] // steps[1])
    return None


def sizes(case: Case) -> dict[str, float]:
    """Law 11: shapes are right, and after all other sizes each one gives what a new layer gives."""
    used = case.moved(case.layer())
    for shape in (*case.input_shapes, *reversed(case.input_shapes)):
        x = case.x(shape)
        y = forward(used, x)
        expected = case.output_shape(shape) if case.output_shape else expected_shape(used, shape)
        if expected is not None:
            require(
                tuple(y.shape) == (len(x), *expected),
                f"input {shape}: expected an output of shape {tuple(expected)}, got {tuple(y.shape[1:])}",
            )
        new = case.moved(case.layer())
        require_same(y, forward(new, x), case.eps(shape), f"input {shape} after other sizes, against a new layer")
        one = forward(used, x[:1])
        require_same(one, y[:1], case.eps(shape), f"input {shape}: one sample against the same one in a batch")
    return {"sizes": float(len(case.input_shapes))}
