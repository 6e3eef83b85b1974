"""What the draws of `benchmarks.soundness` share: numbers from a whole format, settings of torch, comparisons."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

FORMATS = {"float64": torch.float64, "float32": torch.float32}
# Exponents of two where formats change: below the normal range of either, near 1, near the largest numbers.
EXPONENTS = {
    torch.float64: (-1071, -1055, -1040, -1022, -600, -140, -60, -20, -3, 0, 3, 20, 60, 100, 600, 1000, 1020),
    torch.float32: (-146, -142, -138, -134, -126, -100, -60, -20, -3, 0, 3, 20, 60, 100, 120),
}


class Failure(AssertionError):
    """A claim that does not hold, with the numbers."""


def extreme(draw: random.Random, dtype: torch.dtype, signed: bool = True) -> float:
    """A number of the format: zero, subnormal, ordinary or huge."""
    if draw.random() < 0.05:
        return 0.0
    if draw.random() < 0.3:
        value = draw.choice((0.01, 0.1, 0.5, 1.0, 1.5, 3.0, 10.0, 20.0, 1000.0)) * draw.uniform(0.9, 1.1)
    else:
        value = math.ldexp(draw.uniform(1, 2), min(draw.choice(EXPONENTS[dtype]) + draw.randint(-3, 3), 1020))
        value = min(value, float(torch.finfo(dtype).max) / 8)
    value = -value if signed and draw.random() < 0.4 else value
    return float(torch.tensor(value, dtype=torch.float64).to(dtype)) if dtype == torch.float32 else value


def entries(draw: random.Random, dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of the format whose entries share a scale, or have one each."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    mixed = draw.random() < 0.3
    scale = [extreme(draw, dtype) for _ in range(math.prod(shape) if mixed else 1)]
    base = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (base * torch.tensor(scale, dtype=torch.float64).reshape(shape if mixed else ())).to(dtype).nan_to_num()


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A dense layer with these numbers."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    made.weight.data = weight
    if bias is not None:
        made.bias.data = bias
    return made


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "flush_denormal": (lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
    "float64 default": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "medium products": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
}


@contextlib.contextmanager
def setting(draw: random.Random) -> Iterator[str]:
    """One time in four, a setting of torch that changes arithmetic or defaults."""
    name = draw.choice(("autocast", "inference", *SETTINGS)) if draw.random() < 0.25 else ""
    if name == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            yield name
    elif name == "inference":
        with torch.inference_mode():
            yield name
    elif name:
        put, back = SETTINGS[name]
        put()
        try:
            yield name
        finally:
            back()
    else:
        yield name


def not_above(truth: float, exponent: int, bound: float, what: str, slack: float = 1e-12) -> None:
    """Raise unless ``truth 2^exponent <= bound``, in rational arithmetic: either number may leave float64."""
    if math.isnan(bound):
        raise Failure(f"{what}: expected a number, got nan")
    if math.isinf(bound):
        return
    if Fraction(truth) * (1 - Fraction(slack)) * Fraction(2) ** exponent > Fraction(bound):
        raise Failure(f"{what}: {truth} 2^{exponent} is above the bound {bound}")


def norm_of(matrix: Tensor) -> tuple[float, int]:
    """Largest singular value, as a number and an exponent of two: entries are brought near 1 exactly."""
    array = matrix.double().numpy()
    exponent = int(np.frexp(np.abs(array).max())[1])
    return float(np.linalg.norm(np.ldexp(array, -exponent), 2)), exponent
