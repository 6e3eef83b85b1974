"""Work that layers declare for the end of an optimiser step, such as a projection onto their constraint."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lipkit.errors import ShapeError, rewording
from lipkit.linalg.matrices import check_positive
from lipkit.modules import Shape
from lipkit.modules.network import first_floating

Call = tuple[nn.Module, Tensor, Any]


class AfterStep(ABC):
    """Mix-in for layers whose weights need work after an optimiser step, such as a projection.

    Most layers need none: they make their constrained weights at each forward pass.
    """

    interval: ClassVar[int] = 1  # steps between two calls, above 1 if the work costs much more than a step

    @abstractmethod
    def after_step(self, input_shape: Shape) -> None:
        """Change the parameters in place. ``input_shape`` is that of one input of this layer, without the batch."""


def after_step_layers(model: nn.Module) -> dict[str, AfterStep]:
    """The layers of ``model`` that declare work after an optimiser step, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AfterStep)}


@torch.no_grad()
def after_step(model: nn.Module, input_shape: Shape, step: int | None = None) -> int:
    """Call `AfterStep.after_step` of the layers of ``model`` that have one, and return the number of calls.

    Every training loop must call this; ``lipkit.fit``, ``lipkit train`` and `lipkit.wasserstein` do. In your own::

        optimizer.step()
        lipkit.layers.after_step(model, (3, 32, 32), step)   # in the loop, the steps counted from 1
        ...
        lipkit.layers.after_step(model, (3, 32, 32))         # once more at the end

    or use `register_after_step`. Without these calls, ``lipschitz`` and ``export`` give the bound of the weights as
    they are, which can be far above 1.

    Args:
        model: any module, not wrapped for several processes.
        input_shape: of one input of the model, without the batch. A copy of the model runs one such input, to find the
            shape that each layer sees.
        step: number of this step, counted from 1: each layer acts at multiples of its ``interval``. None: all act.

    >>> from lipkit.layers import SvcmConv2d, after_step
    >>> after_step(nn.Sequential(SvcmConv2d(1, 2, 3), SvcmConv2d(2, 2, 3, stride=2)), (1, 8, 8))
    2
    """
    if step is not None:
        check_positive(step=step)
    due = {name: m for name, m in after_step_layers(model).items() if step is None or step % m.interval == 0}
    shapes = seen_shapes(model, due, input_shape) if due else []  # one forward pass, only if a layer acts
    for name, shape in shapes:
        due[name].after_step(shape)
    return len(shapes)


def register_after_step(optimizer: torch.optim.Optimizer, model: nn.Module, input_shape: Shape) -> RemovableHandle:
    """Let ``optimizer`` call `after_step` for all layers of ``model`` at the end of each of its steps.

    The bound then holds wherever the loop ends. The cost is the work of every layer at every step, whatever its
    ``interval``. Call ``remove()`` of the returned handle to stop it.

    >>> from lipkit.layers import SvcmConv2d, register_after_step
    >>> model = nn.Sequential(SvcmConv2d(1, 1, 3))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> handle = register_after_step(optimizer, model, (1, 6, 6))
    >>> model[0].free.grad = -torch.ones(1, 1, 3, 3)  # a step to norm 10
    >>> optimizer.step()
    >>> bool(model[0].free.sum() < 2)  # projected back
    True
    """

    def hook(*_: Any) -> None:
        after_step(model, input_shape)

    return optimizer.register_step_post_hook(hook)


@torch.no_grad()
def seen_shapes(model: nn.Module, names: Iterable[str], input_shape: Shape) -> list[tuple[str, Shape]]:
    """The distinct input shapes of the submodules ``names`` when ``model`` gets one input of ``input_shape``."""
    twin = copy.deepcopy(model)  # statistics and hooks of the model stay as they are
    modules = {twin.get_submodule(name): name for name in names}
    calls = watched(twin, torch.zeros(1, *input_shape).to(first_floating(twin)), modules)[1]
    return list(dict.fromkeys((modules[module], tuple(x.shape[1:])) for module, x, _ in calls))


@torch.no_grad()
def watched(model: nn.Module, x: Tensor, modules: Iterable[nn.Module]) -> tuple[Any, list[Call]]:
    """The output for x in evaluation mode, and the calls of ``modules``: the module, its first input, its output.

    ``ShapeError`` for an x that the model does not accept.
    """
    calls: list[Call] = []

    def note(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        calls.append((module, next(iter((*args, *named.values()))), output))  # the first argument, however given

    modes = [(module, module.training) for module in model.modules()]
    handles = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    refused = f"{type(model).__name__} does not accept inputs of shape {tuple(x.shape[1:])}: "
    try:
        with rewording(ShapeError, refused, RuntimeError, ValueError, IndexError):
            return model.eval()(x), calls
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
