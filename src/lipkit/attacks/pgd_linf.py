r"""Projected gradient ascent in an l_inf ball (PGD): every entry of the input moves by at most eps."""

from __future__ import annotations

import torch
from torch import Tensor

from lipkit.attacks.ascent import Ball, Box, Model, ascend, clip, like


def pgd_linf(
    model: Model,
    x: Tensor,
    y: Tensor,
    eps: float | Tensor,
    *,
    steps: int = 50,
    restarts: int = 1,
    box: Box = (0.0, 1.0),
    loss: str = "margin",
    generator: torch.Generator | None = None,
    stop_early: bool = True,
    step_size: float | None = None,
    random_start: bool = False,
) -> Tensor:
    r"""Adversarial examples within ``eps`` of each entry of each sample.

        x_{k+1} = P( x_k + alpha_k sign(g_k) ),    alpha_k = eps (0.01 + 0.99 (1 + cos(pi k / steps)) / 2)

    where ``g_k`` is the gradient of the loss and ``P`` clips to ball and box, which is the Euclidean projection.
    Starts, losses and what is returned are those of `lipkit.attacks.pgd_l2`; random points are uniform in the cube.

    **Guarantee.** Every returned point satisfies ``max |x' - x| <= eps``, measured in float64 on the returned numbers,
    and lies in ``box``. Not finding an adversarial example proves nothing.

    Args:
        model: any callable from (N, ...) to logits (N, K >= 2) that treats samples independently (modules: ``eval()``).
        x: (N, ...) float32 or float64.
        y: (N,) int64 labels.
        eps: radius, one number or (N,), in units of an input entry: 8/255 for images in [0, 1].
        steps: gradient steps per restart.
        restarts: number of starts, at least 1.
        box: smallest and largest value of an input entry, or None.
        loss: ``"margin"`` or ``"ce"``.
        generator: randomness of starts and directions; None is a CPU generator with seed 0.
        stop_early: leave a sample alone once it is misclassified.
        step_size: the same length for all steps, as a share of eps (1/5 in adversarial training); None for the cosine
            above, which finds more in as many steps.
        random_start: whether the first start is a random point of the cube too.

    Returns:
        (N, ...), the best point found for each sample: a misclassified one if there was one, else the one of largest
        loss. Same dtype and device as ``x``.

    Raises:
        OptionError: an option outside the documented values, or ``x`` outside ``box``.
        ShapeError: ``y`` or ``eps`` does not fit ``x``.

    >>> x, y = torch.tensor([[0.5, 0.5]]), torch.tensor([0])
    >>> pgd_linf(lambda x: x * torch.tensor([1.0, -1.0]) + 0.9, x, y, 0.25, steps=10).tolist()
    [[0.25, 0.25]]

    References: Madry et al., "Towards deep learning models resistant to adversarial attacks", ICLR 2018, Sec. 2.1.
    """
    return ascend(
        BALL, model, x, y, eps, steps=steps, restarts=restarts, box=box, loss=loss, generator=generator,
        stop_early=stop_early, step_size=step_size, random_start=random_start,
    )  # fmt: skip


def project(point: Tensor, centre: Tensor, radius: Tensor, box: Box) -> Tensor:
    """Clip to the cube around ``centre`` and to the box.

    Args:
        point, centre: (N, ...); ``centre`` lies in ``box``.
        radius: (N,) float64.
        box: (low, high) or None.

    Returns:
        (N, ...) with ``|result - centre| <= radius`` in float64, entry by entry.

    >>> project(torch.tensor([[0.5, 4.0]]), torch.zeros(1, 2), torch.tensor([0.75]).double(), (0, 0.7)).tolist()
    [[0.5, 0.699999988079071]]
    """
    wide = centre.to(radius.dtype)
    size = like(radius, wide)
    result = torch.minimum(torch.maximum(point, (wide - size).to(point)), (wide + size).to(point))
    # The faces were rounded to this dtype: one number towards the centre is inside.
    outside = (result.to(radius.dtype) - wide).abs() > size
    result = torch.where(outside, torch.nextafter(result, centre), result)
    return clip(result, box)


def largest(point: Tensor, centre: Tensor) -> Tensor:
    """(N,) l_inf distances, computed in float64 from the numbers as they are (on the CPU where a device has none).

    >>> largest(torch.tensor([[3.0, -4.0]]), torch.zeros(1, 2)).tolist()
    [4.0]
    """
    if point.device.type == "mps":
        return largest(point.cpu(), centre.cpu()).float().to(point.device)
    return (point.double() - centre.double()).flatten(1).abs().amax(dim=1)


def _signs(gradient: Tensor, generator: torch.Generator) -> Tensor:
    """The sign of each entry; random signs where a sample has no gradient, or one that is not a number."""
    flat = gradient.flatten(1)
    bad = ~flat.isfinite().all(dim=1) | (flat == 0).all(dim=1)
    if bool(bad.any()):
        flat = torch.where(bad[:, None], _cube(flat, generator), flat)
    return flat.sign().view_as(gradient)


def _cube(shape: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in [-1, 1]^n, of the shape, dtype and device of the argument."""
    return (2 * torch.rand(shape.shape, generator=generator, device=generator.device) - 1).to(shape)


BALL = Ball(direction=_signs, random=_cube, project=project, distance=largest)
