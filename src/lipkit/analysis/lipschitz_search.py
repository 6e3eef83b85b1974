"""Empirical lower bounds of a Lipschitz constant: a search for the pair of inputs with the steepest secant."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipkit.attacks.ascent import clip, like
from lipkit.certificates.gains import Box, box_ends
from lipkit.errors import OptionError, ShapeError, interval
from lipkit.linalg.matrices import check_positive


class SecantSearch(NamedTuple):
    """The steepest secant found: its slope, and the two inputs (without the batch dimension)."""

    lower: float
    x: Tensor
    y: Tensor


def lipschitz_lower_bound(
    model: nn.Module,
    box: Box | None = None,
    *,
    input_shape: tuple[int, ...] | None = None,
    start: Tensor | None = None,
    restarts: int = 64,
    steps: int = 200,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> SecantSearch:
    r"""Ascend :math:`\|f(x + d) - f(x)\|_2 / \|d\|_2` over both x and d, from many starting points.

    First Adam on (x, d), with d of many lengths, finds the steep regions even if f is piecewise linear. Then power
    iteration on the Jacobian at the best points improves the direction. The result is a secant evaluated in float64.

    Args:
        model: any module; all but a :class:`lipkit.modules.Network` need ``input_shape``, of one sample, or ``start``.
        box: (low, high) of both inputs, numbers or tensors of shape ``input_shape``; None for all of space.
        start: points to search around ``(n, *input_shape)``, for instance test images; None for the middle of the
            box and uniform points in it, or the origin and normal ones without a box.
        restarts, steps, seed: number of starting points, of ascent steps, and the seed of points and directions.
        dtype: of the search, float64 or float32. The final slopes are float64 in both cases.

    Guarantee:
        LOWER, up to the rounding of one float64 evaluation: never a certificate.

    Raises:
        ShapeError: the input shape is unknown or does not fit. OptionError: a bad box, restarts, steps or dtype.

    >>> layer = nn.Linear(2, 2)
    >>> found = lipschitz_lower_bound(layer, input_shape=(2,), restarts=4, steps=20)
    >>> abs(found.lower - torch.linalg.matrix_norm(layer.weight, 2).item()) < 1e-4
    True

    References:
        Yang et al., NeurIPS 2020 (local search around test points); [LBDN] section 6 (global search).
    """
    shape = tuple(input_shape or getattr(model, "input_shape", ()) or (start.shape[1:] if start is not None else ()))
    if not shape:
        raise ShapeError("expected input_shape=(...) for a model that does not know its own, got None")
    check_positive(restarts=restarts, steps=steps)
    ends: Any = box
    if isinstance(box, tuple) and isinstance(box[0], Tensor):
        ends = box_ends(box, shape)
    elif box is not None:
        ends = interval("box", box)
    if dtype not in (torch.float64, torch.float32):
        raise OptionError(f"dtype: expected torch.float64 or torch.float32, got {dtype}")
    exact = _twin(model, torch.float64)
    f = exact if dtype == torch.float64 else _twin(model, dtype)
    generator = torch.Generator().manual_seed(seed)
    x = _starting_points(shape, ends, start, restarts, generator)
    # Step lengths over four decades: short ones see the Jacobian, long ones see across kinks.
    length = 10 ** (-4 * torch.rand(restarts, generator=generator, dtype=torch.float64))
    d = torch.randn(restarts, *shape, generator=generator, dtype=torch.float64)
    d = d * like(length / _norms(d).clamp_min(1e-300), d)
    x, y = (clip(point.double(), ends) for point in _ascend(f, x.to(dtype), (x + d).to(dtype), ends, steps))
    best = _slopes(exact, x, y).argsort(descending=True)[: max(1, restarts // 4)]  # the best quarter
    px, py = _polish(f, x[best], y[best] - x[best], ends, dtype)
    x, y = torch.cat((x[best], px)), torch.cat((y[best], py))
    slopes = _slopes(exact, x, y)
    winner = int(slopes.argmax())
    return SecantSearch(float(slopes[winner]), x[winner], y[winner])


def _twin(model: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    twin = copy.deepcopy(model).cpu().to(dtype).eval().requires_grad_(False)
    return lambda x: twin(x).reshape(len(x), -1)


def _starting_points(
    shape: tuple[int, ...], box: Box | None, start: Tensor | None, count: int, generator: torch.Generator
) -> Tensor:
    if start is not None:
        if tuple(start.shape[1:]) != shape or not len(start):
            wanted = ", ".join(map(str, ("n", *shape)))
            raise ShapeError(f"start: expected shape ({wanted}) with n >= 1, got {tuple(start.shape)}")
        pick = torch.randint(len(start), (count,), generator=generator)
        return start.detach().cpu().double()[pick]
    if box is not None:
        points = box[0] + (box[1] - box[0]) * torch.rand(count, *shape, generator=generator, dtype=torch.float64)
    else:
        points = 3 * torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    if count > 1:  # many networks are steepest in the middle
        points[-1] = 0.0 if box is None else box[0] / 2 + box[1] / 2
    return points


def _norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.flatten(1), dim=1)


def _slopes(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return _slopes_of(x, y, f(x), f(y))


def _slopes_of(x: Tensor, y: Tensor, fx: Tensor, fy: Tensor) -> Tensor:
    """Slopes of the secants; zero for inputs or outputs so close that rounding could raise the quotient."""
    distance, rise = _norms(y - x), _norms(fy - fx)
    # At a distance of 1e-9 float64 has seven digits left, at 1e-5 float32 two: enough to search, the result is float64.
    lost = 1e-9 if x.dtype == torch.float64 else 1e-5
    apart = (distance > lost * (1 + _norms(x))) & (rise > lost * _norms(fx))
    return torch.where(apart, rise / distance.clamp_min(1e-30), 0.0)


def _ascend(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, box: Any, steps: int) -> tuple[Tensor, Tensor]:
    """Improve both ends (x, y) of secants by Adam, and return the steepest pair seen from each start."""
    box = box and (torch.as_tensor(box[0], dtype=x.dtype), torch.as_tensor(box[1], dtype=x.dtype))
    x, y = clip(x, box).requires_grad_(), clip(y, box).requires_grad_()
    best_x, best_y, best = x.detach().clone(), y.detach().clone(), x.new_zeros(len(x))
    optimizer = torch.optim.Adam([x, y], lr=0.02)

    def compare(fx: Tensor, fy: Tensor) -> None:
        nonlocal best
        now = _slopes_of(x, y, fx, fy)
        better = now > best
        best = torch.where(better, now, best)
        best_x[better], best_y[better] = x[better], y[better]

    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / steps) + 1e-4  # falls to 1e-4, not to 0
        optimizer.zero_grad()
        fx, fy = f(x), f(y)
        with torch.no_grad():
            compare(fx, fy)
        distance = _norms(y - x).clamp_min(1e-7)
        # Minus the slope's logarithm, whose gradient is independent of the scale of the network.
        (distance.log() - _norms(fy - fx).clamp_min(1e-30).log()).sum().backward()
        optimizer.step()
        with torch.no_grad():
            if box is not None:
                x.clamp_(*box)
                y.clamp_(*box)
    with torch.no_grad():
        compare(f(x), f(y))
    return best_x, best_y


def _polish(
    f: Callable[[Tensor], Tensor], x: Tensor, d: Tensor, box: Box | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Both ends (x, y) of a short secant at x along the direction that the Jacobian stretches most.

    Power iteration finds the direction, from ``d``.
    """
    d = torch.where(like(_norms(d) > 0, d), d, torch.ones_like(d)).to(dtype)
    at = x.to(dtype).detach().requires_grad_()
    y = f(at) + 0 * at.flatten(1).sum(1, keepdim=True)  # a network that ignores its input has a derivative as well
    # The Jacobian stays the same, so one graph serves all steps: its transpose is the derivative of y, and it itself
    # that of its transpose, which is linear in its argument.
    dual = torch.zeros_like(y).requires_grad_()
    (transposed,) = torch.autograd.grad(y, at, dual, create_graph=True)
    for _ in range(20):
        d = d / like(_norms(d).clamp_min(1e-30), d)
        (pushed,) = torch.autograd.grad(transposed, dual, d, retain_graph=True)
        (pulled,) = torch.autograd.grad(y, at, pushed, retain_graph=True)
        d = torch.where(like(_norms(pulled) > 0, d), pulled, d)
    d = d.double()
    d = d / like(_norms(d).clamp_min(1e-300), d)
    step = 1e-5 * d
    if box is not None:
        # A corner of the box may block the direction: step back into it where that helps.
        inward = (x + step < box[0]) | (x + step > box[1])
        step = torch.where(like(inward.flatten(1).any(1), step), -step, step)
    return x, clip(x + step, box)
