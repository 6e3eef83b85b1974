"""Functions that are replaced while a forward pass is traced or recorded: those of einops.

einops computes every size of a shape from those of its input, which the batch may be a part of. Where it is, -1 says
the same, and a traced graph holds the same calls for a batch of any size. What einops itself computes is compared with
the graph, as for every network (`lipkit.lowering.observe`).
"""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def replaced(functions: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Set these attributes of modules and classes for the ``with`` block."""
    kept = [vars(home).get(name) for home, name in functions]  # None: of the base class
    for (home, name), function in functions.items():
        setattr(home, name, function)
    try:
        yield
    finally:
        for (home, name), own in zip(functions, kept, strict=True):
            delattr(home, name) if own is None else setattr(home, name, own)


@contextmanager
def einops_by_torch(symbol: type) -> Iterator[None]:
    """Apply patterns of einops by `_applied`, to tensors and to values of type ``symbol``, if einops is imported.

    Its private functions are those of version 0.8.2; without them its calls stay as they are, and are refused.
    """
    functions, layers = (sys.modules.get(f"einops.{name}") for name in ("einops", "layers.torch"))
    known = getattr(sys.modules.get("einops._backends"), "_type2backend", None)
    if functions is None or known is None or not hasattr(functions, "_apply_recipe"):
        yield
        return
    backend = functions.get_backend(torch.empty(0))

    def apply(recipe: Any, tensor: Any, reduction_type: Any, axes_lengths: Any = (), axes_dims: Any = ()) -> Any:
        return _applied(functions, backend, recipe, tensor, reduction_type, (*axes_lengths, *axes_dims))

    made = {(functions, "_apply_recipe"): lambda backend, *given, **named: apply(*given, **named)}
    if layers is not None:
        made[layers, "apply_for_scriptable_torch"] = apply
    known.setdefault(symbol, backend)
    with replaced(made):
        yield


def _applied(einops: Any, backend: Any, recipe: Any, x: Any, reduction: Any, named: Iterable[tuple[str, Any]]) -> Any:
    """The result of a recipe of einops: x is reshaped, permuted, reduced, expanded and reshaped."""
    lengths = [*recipe.elementary_axes_lengths]
    for name, length in named:
        lengths[recipe.axis_name2elementary_axis[name]] = length
    joined = recipe.input_composition_known_unknown  # of each dimension of x: the axes of known and unknown length
    for size, (known, unknown) in zip(x.shape, joined, strict=True):
        if unknown:  # at most one; its size divides evenly, or einops has refused it
            inner = _product([lengths[axis] for axis in known])
            whole = type(size) is int and type(inner) is int
            lengths[unknown[0]] = size if not known else size // inner if whole else -1
    order = recipe.axes_permutation
    if any(len(known) + len(unknown) != 1 for known, unknown in joined):
        x = backend.reshape(x, lengths[: len(order)])
    if order != [*range(len(order))]:
        x = backend.transpose(x, order)
    if recipe.first_reduced_axis < len(order):
        x = einops._reduce_axes(x, reduction, [*range(recipe.first_reduced_axis, len(order))], backend)
    added = {place: lengths[axis] for place, axis in recipe.added_axes.items()}
    if added:
        x = backend.add_axes(x, n_axes=len(order) + len(added), pos2len=added)
    groups = [[lengths[axis] for axis in group] for group in recipe.output_composite_axes]
    return backend.reshape(x, [_product(g) for g in groups]) if any(len(g) != 1 for g in groups) else x


def _product(lengths: Sequence[Any]) -> Any:
    """The product of lengths; -1 if the size of the batch is one of several."""
    if len(lengths) == 1:
        return lengths[0]
    return math.prod(lengths) if all(type(n) is int and n >= 0 for n in lengths) else -1
