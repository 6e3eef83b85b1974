"""Proofs in the worst arithmetic that their model allows: every allowance for rounding counts, as never by chance.

Where all numbers are positive, errors towards zero in every sum make every norm smaller at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lipkit.bounds import METHODS, circular, gram, symbol_sup
from lipkit.bounds.dissipation import System, proves_dissipation
from lipkit.bounds.gram_symbol import GramSymbol
from lipkit.bounds.lmi import gain_bound, proves_gain, sandwich_gain
from lipkit.proof.norms import quick_spectral_norm, spectral_norms

PRODUCTS = {"mm": torch.mm, "bmm": torch.bmm, "mv": torch.mv, "dot": torch.dot}


class TowardsZero(TorchDispatchMode):
    """Arithmetic with the largest errors of its model; a Cholesky factorisation errs towards success."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__.rstrip("_"), kwargs or {}
        if name == "linalg_cholesky_ex":  # completes for H + E, |E_ij| <= (n + 1) u sqrt(H_ii H_jj)
            root = args[0].diagonal(dim1=-2, dim2=-1).real.clamp_min(0).sqrt()
            allowed = (root.shape[-1] + 1) * torch.finfo(root.dtype).eps / 2
            args = (args[0] + allowed * root[..., None] * root[..., None, :], *args[1:])
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor) or not (out.is_floating_point() or out.is_complex()):
            return out
        terms = args[0].numel() / max(out.numel(), 1) if args and isinstance(args[0], Tensor) else 1
        if name in PRODUCTS:
            roundings, size = args[0].shape[-1], PRODUCTS[name](args[0].abs(), args[1].abs())
        elif name == "sum":
            roundings, size = terms - 1, func(args[0].abs(), *args[1:], **kwargs)
        elif name == "linalg_vector_norm":
            roundings, size = terms / 2 + 1, out
        elif name in ("mul", "div"):
            roundings, size = not any(map(is_power_of_two, args[:2] if name == "mul" else args[1:2])), out.abs()
        else:
            roundings, size = name in ("sqrt", "rsqrt", "pow", "cos", "sin"), out.abs()
        return out.sub_(roundings * torch.finfo(out.dtype).eps / 2 * size * out.sgn()) if roundings else out


def is_power_of_two(factor: Any) -> bool:
    """By these, products are exact."""
    factor = torch.as_tensor(factor)
    return not factor.is_complex() and bool((torch.frexp(factor.double())[0].abs() == 0.5).all())


def full(*shape: int, value: float = 1 / 3) -> Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def corrected(points: int, taps: int = 3) -> mpmath.mpf:
    return 1 / mpmath.cos(mpmath.pi * (taps - 1) / (2 * points)) ** 2


BOUNDS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {name: (METHODS[name], 1) for name in METHODS}
BOUNDS |= {"lipbound": (METHODS["lipbound"], corrected(10)), "gram": (METHODS["gram"], corrected(16))}
BOUNDS |= {"circular": (lambda k: circular(k, 6, 6), 1), "points": (lambda k: symbol_sup(k, points=9), corrected(9))}
del BOUNDS["symbol_sup"]  # 1 % above: see test_cells
BOUNDS |= {f"gram {t}": (lambda k, t=t: gram(k, size=(6, 6), iterations=t), 1) for t in (0, 3)}


@pytest.mark.usual(45)
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("channels", [(25, 100), (100, 25), (1, 1), (1, 400)])
@pytest.mark.parametrize("taps", [3, 1])
def test_bounds_of_kernels(name: str, channels: tuple[int, int], taps: int) -> None:
    method, factor = BOUNDS[name]
    with mpmath.workdps(40), torch.no_grad(), TowardsZero():
        truth = mpmath.mpf(1 / 3) * math.isqrt(math.prod(channels)) * taps**2 * (factor if taps > 1 else 1)
        bound = float(method(full(*channels, taps, taps)))
        assert truth <= bound <= truth * (1 + 1e-10)


@pytest.mark.parametrize("shape", [(1, 1), (25, 100), (100, 25), (10, 10)])
@pytest.mark.parametrize("part", [1, (1 + 1j) / 2])
def test_norms_of_matrices(shape: tuple[int, int], part: complex) -> None:
    with torch.no_grad(), TowardsZero():
        truth, a = Fraction(1 / 3) ** 2 * math.prod(shape), full(*shape)
        assert truth * (1 + Fraction(1, 10**11)) >= Fraction(float(quick_spectral_norm(a).bound)) ** 2 >= truth
        squared = Fraction(float(spectral_norms(a * part))) ** 2 * (1 if part == 1 else 2)
        assert truth * (1 + Fraction(1, 10**11)) >= squared >= truth


def never_below(proves: Callable[[float], bool], truth: Fraction, room: float = 1e-9) -> None:
    """Numbers below the truth are refused, and those a little above it proved."""
    with torch.no_grad(), TowardsZero():
        for e in range(10 if room > 1e-6 else 28, 53, 2):
            below = float(truth * (1 - Fraction(1, 2**e)))
            assert Fraction(below) >= truth or not proves(below), e
        assert proves(float(truth) * (1 + room))


@pytest.mark.thorough
@pytest.mark.usual(9)
@pytest.mark.parametrize("shape", [(1, 1, 1), (400, 1, 1), (9, 25, 4), (64, 100, 16)])
@pytest.mark.parametrize("multiplier", [1.0, 3.0, 2.0**40])
def test_gains(shape: tuple[int, int, int], multiplier: float) -> None:
    m, n, p = shape
    weights, multipliers = [full(n, m), full(p, n, value=1 / 7)], [full(n, value=multiplier)]
    first, second, scale = Fraction(1 / 3) ** 2 * n * m, Fraction(1 / 7) ** 2 * n * p, Fraction(multiplier)
    truth = (scale**2 * first + second) / (2 * scale)
    never_below(lambda gain: proves_gain(weights, multipliers, gain), truth)
    never_below(lambda gain: proves_gain(weights[:1], [], gain), Fraction(1 / 3) * math.isqrt(n * m))
    with torch.no_grad(), TowardsZero():
        assert gain_bound(weights, multipliers) >= truth
        if multiplier != 3.0:  # whose root is rounded: another multiplier
            assert truth * (1 + Fraction(1, 10**9)) >= Fraction(float(sandwich_gain(*weights, *multipliers))) >= truth


@pytest.mark.thorough
@pytest.mark.parametrize("states", [1, 16, 64])
def test_gains_over_time(states: int) -> None:
    system = torch.zeros(states + 1, states + 1, dtype=torch.float64)
    system[:-1, :-1], system[-1, :-1], system[:-1, -1] = 0.5 / states, states**-0.5, states**-0.5
    one, none = torch.eye(states, dtype=torch.float64), torch.ones(0)
    # On the mean of the states: x+ = x / 2 + u, y = x.
    never_below(lambda gain: proves_dissipation(System(system, states, (0, 0), 1), one, none, gain, 1.0), Fraction(2))


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", [(1, 1, 1, 3, 3), (1, 15, 15, 1, 2), (2, 25, 8, 1, 5), (2, 1, 1, 5, 5)])
def test_cells(kernel: tuple[int, ...]) -> None:
    truth = Fraction(1, 4) * math.prod(kernel[1:3]) * math.prod(kernel[3:]) ** 2
    cell, periods = torch.tensor([[0, 0, 0]]), (8 if kernel[3] > 1 else 1, 8)
    with torch.no_grad(), TowardsZero():
        symbol = GramSymbol(full(*kernel, value=0.5))
    never_below(lambda level: bool(symbol.below(cell, periods, level)), truth)
    if kernel[0] > 1:  # other float32 products are numpy's
        never_below(lambda level: bool(symbol._test(cell, periods, level, symbol.single_table)), truth, 1e-3)
