"""Makes a recipe's data and network; an error in the user's code becomes one sentence."""

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipkit import data as datasets
from lipkit import models
from lipkit.certificates.intervals import check_radii
from lipkit.data.registry import imported, is_code
from lipkit.errors import LipkitError, OptionError, RecipeError, ShapeError, rewording
from lipkit.experiments.recipe import Recipe
from lipkit.lowering import export, lipschitz


def load_data(recipe: Recipe, large_eps: bool | None = None) -> datasets.Data:
    """The recipe's data; ``RecipeError`` if they are for another task.

    Unless ``large_eps`` is None, the recipe's radii are checked for these data, see
    `lipkit.certificates.intervals.check_radii`.
    """
    section = recipe.data
    root = None if section.root is None else Path(section.root)
    data = datasets.load(section.spec, root=root, limit=section.limit, limits=section.range)
    if data.task != recipe.task:
        raise RecipeError(f"expected data for task {recipe.task}, got {section.spec!r}, which is for {data.task}")
    if large_eps is not None:
        certify, adversary = recipe.certify, recipe.adversary
        radii: list[tuple[str, Sequence[float], str]] = [("certify.delta", [certify.delta], "l2")]
        if recipe.task == "classification":
            radii = [("certify.eps", certify.eps, "l2"), ("certify.attack_eps", certify.attack_eps or (), "l2")]
        if adversary is not None:
            radii.append(("adversary.eps", [adversary.eps], adversary.norm))
        for name, eps, norm in radii:
            check_radii(eps, data.input_shape, data.input_range, name=name, norm=norm, large=large_eps)
    return data


def build_model(recipe: Recipe, data: datasets.Data) -> nn.Module:
    """The recipe's network for this data, its initial weights drawn from ``train.seed``.

    The user's factory gets the ``input_shape`` and the number of outputs, ``classes``, if it has parameters of these
    names. torch's global random state is restored. A network that does not fit the data, or cannot be bounded and
    exported, is refused here, before hours of training.
    """
    name, options = recipe.model.name, dict(recipe.model.options)
    given = {"input_shape": data.input_shape, "classes": data.outputs}
    factory = imported(name) if is_code(name) else functools.partial(models.build, name)
    known = inspect.signature(factory).parameters
    # lipkit's architectures take both; the user's function may fix them itself.
    takes_all = not is_code(name) or any(p.kind is p.VAR_KEYWORD for p in known.values())
    accepted = {key: value for key, value in given.items() if takes_all or key in known}
    if "input_shape" in options:
        options["input_shape"] = tuple(options["input_shape"])
        if options["input_shape"] != data.input_shape:
            raise ShapeError(
                f"expected model.options.input_shape {data.input_shape} as in the data {data.name}, "
                f"got {options['input_shape']}"
            )
    with torch.random.fork_rng(devices=[]):  # networks are made on the CPU
        torch.manual_seed(recipe.train.seed)
        model = network_of(name, factory, {**accepted, **options}).eval()
        lipschitz(model, data.input_shape)  # raises where a module has no rule
        start = f"model {name}: expected it to take inputs of shape {data.input_shape}, got: "
        with torch.no_grad(), rewording(ShapeError, start, RuntimeError, IndexError):
            shape = tuple(export(model, data.input_shape)(torch.zeros(1, *data.input_shape)).shape)
    if shape != (1, data.outputs):
        found = ", ".join(map(str, shape[1:]))
        raise ShapeError(f"model {name}: expected outputs of shape (n, {data.outputs}), got (n, {found})")
    return model


def augment(x: Tensor, generator: torch.Generator, *, crop: int, flip: bool) -> Tensor:
    """Shift by up to ``crop`` pixels, then mirror with probability 1/2 if ``flip``."""
    if crop:
        x = datasets.random_crop(x, crop, generator)
    return datasets.random_flip(x, generator) if flip else x


def network_of(name: str, factory: Callable[..., Any], options: dict[str, Any]) -> nn.Module:
    """The network that a factory makes; ``OptionError`` with the model's name if it fails or makes something else."""
    try:
        model = factory if isinstance(factory, nn.Module) else factory(**options)  # it may be the network itself
    except LipkitError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise OptionError(f"model {name}: expected a network, got {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise OptionError(f"model {name}: expected an nn.Module, got {type(model).__name__}")
    return model
