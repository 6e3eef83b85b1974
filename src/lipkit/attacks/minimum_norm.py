r"""Minimum-norm attacks look for the closest adversarial example, whatever its distance.

FAB projects on the linearised boundary, in l2 and l_inf. Carlini and Wagner's attack minimises l2 distance and margin
in one objective by Adam, and searches for its weight.
"""

import math
import warnings

import torch
from torch import Tensor

from lipkit.attacks.ascent import Box, Model, ball, check_inputs, clip, like, misclassified, norms, seeded
from lipkit.attacks.losses import correct_samples, rise, rivals, value_and_gradient
from lipkit.errors import ShapeError, finite
from lipkit.linalg.matrices import check_integer, check_positive


def shrink(model: Model, x: Tensor, adversarial: Tensor, y: Tensor, *, steps: int = 20) -> Tensor:
    r"""The closest misclassified point that bisection finds on the segment from each sample to its adversarial example.

    It bisects b in ``x + b (x' - x)``; the upper end stays misclassified. The closer an example is to the boundary, the
    sharper is its comparison with a certificate.

    **Guarantee.** The returned point was seen to be misclassified, or is ``adversarial`` itself. It lies in every box
    that holds both ends, up to one rounding of the sum.

    Args:
        model, y: see `lipkit.attacks.pgd`.
        x, adversarial: (N, ...) of one shape and dtype.
        steps: number of halvings; after 20 the point is within a millionth of the distance from the boundary.

    Raises:
        ShapeError: the shapes differ. OptionError: ``steps`` is below 1.

    >>> x, far = torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])
    >>> near = shrink(lambda x: torch.stack([0.25 - x[:, 0], x[:, 0] - 0.25], 1), x, far, torch.tensor([0]))
    >>> 0.25 < near[0, 0].item() < 0.251
    True
    """
    if x.shape != adversarial.shape:
        raise ShapeError(f"expected adversarial examples of shape {tuple(x.shape)}, got {tuple(adversarial.shape)}")
    check_positive(steps=steps)
    best = adversarial.detach().clone()
    shape = (len(x), *[1] * (x.ndim - 1))
    low, high = x.new_zeros(shape), x.new_ones(shape)
    with torch.no_grad():
        for _ in range(steps):
            middle = (low + high) / 2
            point = x + middle * (adversarial - x)
            wrong = misclassified(model(point), y).view(shape)
            best = torch.where(wrong, point, best)
            low, high = torch.where(wrong, low, middle), torch.where(wrong, middle, high)
    return best


def _warn_where_flat(attack: str, model: Model, x: Tensor, y: Tensor) -> None:
    """Warn if samples ``x``, for which no example was found, have a margin with zero gradient."""
    flat = int((value_and_gradient(model, x, y, "margin")[2] == 0).flatten(1).all(dim=1).sum()) if len(x) else 0
    if flat:
        where = f"{flat} of {len(x)} samples that it found no example for"
        warnings.warn(f"{attack} could not search at {where}: the gradient is 0; they may not be robust", stacklevel=3)


_NEWTON_STEPS = 16


def towards_hyperplane(point: Tensor, normal: Tensor, gap: Tensor, norm: str, box: Box) -> Tensor:
    r"""The smallest step from each point to its hyperplane, without leaving the box.

        minimise ||d||    subject to    <w, d> = gap,   point + d in box

    The solution is ``d_j = sign(w_j gap) min(s r_j, room_j)`` with ``r_j = |w_j|`` for l2 and 1 for l_inf. The length
    ``s`` solves ``sum_j |w_j| min(s r_j, room_j) = |gap|``, whose left side is concave and piecewise linear: Newton's
    method from below grows towards the root and never passes it. Where the hyperplane does not meet the box, the step
    goes to the corner nearest to it. Points, ``normal`` w and steps are (N, d); the step is 0 where ``normal`` is.
    """
    # scaled to largest entry 1, so that squares neither overflow nor vanish
    largest = normal.abs().amax(dim=1, keepdim=True)
    known = (largest > 0) & largest.isfinite()  # no gradient, no hyperplane
    unit = torch.where(known, normal / torch.where(known, largest, 1.0), 0.0)
    aim = torch.where(known, gap[:, None] / torch.where(known, largest, 1.0), 0.0)
    size = unit.abs()
    rate = size if norm == "l2" else (size > 0).to(size)  # r_j in the docstring
    forward = torch.sign(unit) * torch.sign(aim)  # direction of each entry towards the hyperplane
    room = torch.full_like(point, torch.inf)
    if box is not None:
        room = torch.where(forward > 0, box[1] - point, point - box[0]).clamp_min(0)  # to the face that lies ahead
    aim = aim.abs()
    length = aim / (size * rate).sum(dim=1, keepdim=True).clamp_min(1e-30)
    for _ in range(_NEWTON_STEPS if box is not None else 0):
        free = length * rate < room  # entries that have not met their face
        reached = (size * torch.where(free, length * rate, room)).sum(dim=1, keepdim=True)
        slope = torch.where(free, size * rate, 0.0).sum(dim=1, keepdim=True)
        missing = (aim - reached).clamp_min(0)
        if not bool((missing > 0).any()):
            break
        length = torch.where(slope > 0, length + missing / slope.clamp_min(1e-30), length)
    return forward * torch.minimum(length * rate, room)


_OVERSHOOT, _BACK, _MOST_ORIGINAL = 1.05, 0.9, 0.1


def fab(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    norm: str = "l2",
    steps: int = 50,
    restarts: int = 1,
    targets: int | None = 9,
    box: Box = (0.0, 1.0),
    generator: torch.Generator | None = None,
    polish: int = 10,
) -> Tensor:
    r"""The closest adversarial example that FAB finds for each sample, whatever its distance.

    For each target class i in turn, let ``f = y_i - y_t``, and let ``P(z)`` be the point nearest to z in the box and on
    the hyperplane ``f(x_k) + <grad f(x_k), . - x_k> = 0``. With ``d_k = P(x_k) - x_k`` and
    ``d_0 = P(x) - x``

        x_{k+1} = (1 - a) (x_k + 1.05 d_k) + a (x + 1.05 d_0),    a = min( ||d_k|| / (||d_k|| + ||d_0||), 0.1 )

    and after an adversarial point the search goes on at ``x + 0.9 (x_{k+1} - x)``. At the end bisection moves the
    closest point to the boundary, and ``polish`` projections ``P(x)`` start from there, each followed by bisection and
    kept where it is closer: on a piecewise linear network they end at the nearest point of a face.

    **Guarantee.** A returned point that is not the sample was seen to be misclassified, and lies in ``box``. Its
    distance is an upper bound of the distance to the boundary. The sample itself is returned where it is misclassified
    already or nothing was found.

    **Cost.** ``restarts targets steps + polish`` gradients, and 20 evaluations for each of ``polish + 1`` bisections.

    Args:
        model, x, y, norm, box, generator: as in `lipkit.attacks.pgd`, which names the errors.
        steps: iterations for each class and start.
        restarts: starts for each class: the sample, then random points at half the distance found so far.
        targets: how many classes are tried, the largest wrong logits first; None for all.
        polish: projections at the end; 0 for FAB as published.

    Raises:
        OptionError, ShapeError: see `lipkit.attacks.pgd`.

    >>> model, x = lambda x: torch.stack([1 - x[:, 0], x[:, 1]], 1), torch.zeros(1, 2)
    >>> near = fab(model, x, torch.tensor([0]), box=None)
    >>> 0 <= torch.linalg.vector_norm(near).item() - 0.5**0.5 < 1e-5
    True

    References: Croce & Hein, "Minimally distorted adversarial examples with a fast adaptive boundary attack", ICML
    2020, algorithm 1, equations 7 to 10.
    """
    space = ball(norm)
    check_inputs(x, y, 0.0, steps, restarts, box)
    check_integer("polish", polish, 0)
    if targets is not None:
        check_positive(targets=targets)
    generator = seeded(generator)
    best = x.detach().clone()
    index, logits = correct_samples(model, best, y)
    if not len(index):
        return best
    centre, label = best[index], y[index]
    order = rivals(logits, label, targets)
    distance = torch.full((len(x),), torch.inf, dtype=torch.float64, device=x.device)

    def keep(points: Tensor) -> Tensor:
        """Keep points that are misclassified and closer than before; return which rows are misclassified."""
        with torch.no_grad():
            wrong = misclassified(model(points), label)
        size = space.distance(points, centre).to(distance)
        closer = wrong & (size < distance[index])
        best[index[closer]] = points[closer]
        distance[index[closer]] = size[closer]
        return wrong

    for rival in range(order.shape[1]):
        target = order[:, rival]
        for start in range(restarts):
            point = centre.clone()
            if start:
                reach = (distance[index] / 2).nan_to_num(posinf=0.0)  # infinity: nothing found yet
                point = clip(centre + space.random(centre, generator) * like(reach, centre), box)
            for _ in range(steps):
                here, origin = _project(model, point, centre, label, target, norm, box)
                near = space.distance(point + here, point)
                both = near + space.distance(centre + origin, centre)
                a = like((near / both.clamp_min(1e-30)).clamp_max(_MOST_ORIGINAL), point)
                point = (1 - a) * (point + _OVERSHOOT * here) + a * (centre + _OVERSHOOT * origin)
                point = clip(torch.where(point.isfinite(), point, centre), box)
                wrong = keep(point)
                point = torch.where(like(wrong, point), centre + _BACK * (point - centre), point)
    found = distance[index].isfinite()
    _warn_where_flat("FAB", model, centre[~found], label[~found])
    index, centre, label = index[found], centre[found], label[found]
    for turn in range(polish + 1 if len(index) else 0):
        near = shrink(model, centre, best[index], label)
        keep(near)
        if turn < polish:
            _, origin = _project(model, best[index], centre, label, None, norm, box)
            ahead = centre + origin * (1 + 1e-4)  # a little beyond the face, so that it is misclassified
            keep(clip(torch.where(ahead.isfinite(), ahead, centre), box))
    return best


def _project(
    model: Model, point: Tensor, centre: Tensor, label: Tensor, target: Tensor | None, norm: str, box: Box
) -> tuple[Tensor, Tensor]:
    """Steps from the point and from the sample to the hyperplane on which the loss, linearised at the point, is 0."""
    value, _, slope = value_and_gradient(model, point, label, "margin", target)
    normal = slope.flatten(1)
    value = value.nan_to_num(posinf=0.0, neginf=0.0).to(normal)
    flat, origin = point.flatten(1), centre.flatten(1)
    here = towards_hyperplane(flat, normal, -value, norm, box)
    gap = -(value + (normal * (origin - flat)).sum(dim=1))
    return here.view_as(point), towards_hyperplane(origin, normal, gap, norm, box).view_as(point)


# The search starts inside this fraction of the box, because atanh(1) is infinite.
_INSIDE = 1 - 1e-6


def carlini_wagner(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    steps: int = 200,
    searches: int = 9,
    rate: float = 0.01,
    weight: float = 1e-2,
    confidence: float = 0.0,
    targets: int = 2,
    box: Box = (0.0, 1.0),
) -> Tensor:
    r"""The closest adversarial example for each sample that Carlini and Wagner's objective finds; l2.

        minimise over w    ||x'(w) - x||^2 + c max( y_t(x') - y_i(x'), -confidence )

    with ``x'(w) = middle + half width tanh(w)``, which never leaves the box, or ``x' = w`` without a box. The weight c
    of each sample is searched: halved where the attack succeeded, multiplied by 10 until it does, then bisected. The
    target i is the class whose boundary is nearest by the gradients at the sample, then the next one. At the end
    bisection moves the closest point seen to the boundary.

    **Guarantee.** A returned point that is not the sample was seen to be misclassified, and lies in ``box``. Its
    distance is an upper bound of the distance to the boundary. The sample itself is returned where it is misclassified
    already or nothing was found.

    **Cost.** ``targets searches steps`` gradients. It draws nothing at random.

    Args:
        model, x, y, box: as in `lipkit.attacks.pgd`, which names the errors.
        steps: of Adam for each weight.
        searches: values of the weight c that are tried.
        rate: learning rate of Adam, for x' in units of half the width of the box (1 without a finite box).
        weight: the first c.
        confidence: margin, in logits, that the objective asks for.
        targets: how many classes are tried.

    Raises:
        OptionError, ShapeError: see `lipkit.attacks.pgd`.

    >>> model, x = lambda x: torch.stack([1 - x[:, 0], x[:, 1]], 1), torch.zeros(1, 2)
    >>> near = carlini_wagner(model, x, torch.tensor([0]), box=None)
    >>> 0 <= torch.linalg.vector_norm(near).item() - 0.5**0.5 < 0.01
    True

    References: Carlini & Wagner, "Towards evaluating the robustness of neural networks", S&P 2017, Sec. V and VI.A;
    Kingma & Ba, "Adam", ICLR 2015, algorithm 1.
    """
    check_inputs(x, y, 0.0, steps, 1, box)
    check_positive(searches=searches, targets=targets)
    rate, weight = finite("rate", rate, positive=True), finite("weight", weight, positive=True)
    confidence = finite("confidence", confidence, least=0)
    best = x.detach().clone()
    index, logits = correct_samples(model, best, y)
    if not len(index):
        return best
    centre, label = best[index], y[index]
    order = nearest_rivals(model, centre, label, logits)
    near, distance = centre, torch.full((len(index),), torch.inf, dtype=torch.float64, device=x.device)
    for target in order[:, :targets].unbind(dim=1):
        near, distance = _search(
            model, centre, label, target, near, distance, box,
            steps=steps, searches=searches, rate=rate, weight=weight, confidence=confidence,
        )  # fmt: skip
    found = distance.isfinite()
    _warn_where_flat("Carlini-Wagner", model, centre[~found], label[~found])
    if bool(found.any()):
        best[index[found]] = shrink(model, centre[found], near[found], label[found])
    return best


def _search(
    model: Model, centre: Tensor, label: Tensor, target: Tensor, near: Tensor, distance: Tensor, box: Box, *,
    steps: int, searches: int, rate: float, weight: float, confidence: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attack one ``target`` class for each sample; return the closest points so far, and their distances."""
    bounded = box is not None and math.isfinite(box[1] - box[0])  # else no tanh reaches all of the box
    middle, half = ((box[0] + box[1]) / 2, (box[1] - box[0]) / 2) if box is not None and bounded else (0.0, 1.0)
    origin = (centre - middle) / half
    begin = torch.atanh(origin * _INSIDE) if bounded else origin
    low, high = torch.zeros_like(distance), torch.full_like(distance, torch.inf)
    c = torch.full_like(distance, weight)
    for _ in range(searches):
        free = begin.clone()
        mean, square = torch.zeros_like(free), torch.zeros_like(free)
        done = torch.zeros_like(distance, dtype=torch.bool)  # any point of this search fooled the model
        for step in range(1, steps + 1):
            with torch.enable_grad():
                free = free.detach().requires_grad_()
                scaled = torch.tanh(free) if bounded else free
                point = clip(middle + half * scaled, box)  # the sum may round out of the box
                logits = model(point)
                gap = (-rise(logits, label, "margin", target)).clamp_min(-confidence)
                # Squared distance in units of the half width; the search for c compensates for the unit.
                far = (scaled - origin).flatten(1).square().sum(dim=1)
                slope = torch.autograd.grad(far.sum() + (c.to(gap) * gap).sum(), free)[0]
            wrong = misclassified(logits.detach(), label)
            size = norms(point.detach(), centre).to(distance)
            closer = wrong & (size < distance)
            near = torch.where(like(closer, near), point.detach(), near)
            distance = torch.where(closer, size, distance)
            done |= wrong
            # Adam, written out: torch.optim takes seconds to import.
            slope = torch.where(slope.isfinite(), slope, 0.0)
            mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * slope.square()
            free = free.detach() - rate * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        high = torch.where(done, torch.minimum(high, c), high)
        low = torch.where(done, low, torch.maximum(low, c))
        c = torch.where(high.isfinite(), (low + high) / 2, 10 * c)  # bisection once both ends are known
    return near, distance


def nearest_rivals(model: Model, x: Tensor, y: Tensor, logits: Tensor) -> Tensor:
    """(N, min(9, K - 1)) classes of the largest wrong logits, those of the nearest boundary first.

    The l2 distance of a boundary is estimated as margin / gradient norm at the sample.
    """
    order, distance = rivals(logits, y, 9), []
    for target in order.unbind(dim=1):
        value, _, slope = value_and_gradient(model, x, y, "margin", target)
        distance.append(-value / norms(slope, torch.zeros_like(slope)).to(value).clamp_min(1e-30))
    nearest = torch.stack(distance, dim=1).nan_to_num(nan=torch.inf).argsort(dim=1, stable=True)
    return order.gather(1, nearest)
