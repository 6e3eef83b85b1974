r"""Rounding errors of the convolutions that are evaluated in the Fourier basis, and of Taylor polynomials.

The exact function of a Fourier layer is :math:`T^\top \mathrm{diag}(M_f)\, T x + b` with the stored matrices and the
*exact* orthonormal transform T. What the machine does is counted, with room, as follows; another order of rows,
columns and products changes nothing here.

* T and its inverse: one product by each matrix of ``matrices()`` (n terms each, :math:`\||T_i|\| \le \sqrt{n}`); of
  two matrices the larger one counts with 2 n terms, for the butterfly is part of its product or a step of its own.
  Four roundings of room for each. As T is orthogonal the errors of the stages add up.
* Matrix entries: rounded to the format, after a float64 computation that is within 64 u of :math:`\sqrt{2/n}`.
* A bias is added to the pixels, or, times the root of their number, to the coefficients of frequency 0.
* Each frequency: an inner product of 2 cin real terms with coefficients :math:`|R|, |S|` (cin for a real matrix),
  four roundings of room.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipkit.bounds import symbol_sup
from lipkit.certificates.rounding.arithmetic import FLOAT64, Arithmetic, Line, grow_number, size
from lipkit.certificates.rounding.registry import Local, Measure, entries, rounding_rule
from lipkit.plain import FourierConv2d, PhaseConv2d, TaylorConv2d
from lipkit.plain.stored_symbol import StoredSymbol
from lipkit.protocol.registry import Shape, lipschitz, output_shape

_ROOM = 4


def transform_error(sizes: list[int], arithmetic: Arithmetic) -> float:
    r"""Relative error of the transform by square matrices of these sizes: :math:`\|\hat T x - T x\| \le e \|x\|`."""
    total = 0.0
    # The butterfly may be part of the product along either side, which then has twice as many terms.
    for n in [*sorted(sizes)[:-1], (len(sizes) > 1) * max(sizes) + max(sizes)]:
        entry = 64 * FLOAT64.unit * math.sqrt(2.0 * n)
        total += arithmetic.gamma(n + _ROOM) * math.sqrt(n) * (1 + entry) + entry
    # The stages follow each other: each enlarges what came before by at most its own relative error.
    return grow_number(total * (1 + total)) if total < 0.1 else math.inf


def schur(magnitude: Tensor) -> float:
    """The largest root of row sum times column sum in a batch of non-negative matrices (F, m, n); 0 for none."""
    if not magnitude.numel():
        return 0.0
    products = magnitude.sum(2).amax(1) * magnitude.sum(1).amax(1)
    return grow_number(math.sqrt(float(products.amax())) * (1 + FLOAT64.gamma(magnitude.shape[1] + magnitude.shape[2])))


def spectral_blocks(module: StoredSymbol) -> float:
    """Bound of the norm of the matrices of moduli of all frequencies."""
    real, pair = module.real.detach().double().abs(), module.pair.detach().double().abs()
    # For the block [[|R|, |S|], [|S|, |R|]] row and column sums are those of |R| + |S|.
    return max(schur(real), schur(pair.sum(1)))


def relative_to_input(
    relative: float,
    floor: float,
    bias: Tensor | None,
    outputs: int,
    gain: float,
    arithmetic: Arithmetic,
    carried: float = 0.0,
) -> Measure:
    """A linear map with the error ``relative ||h|| + floor``, and the sum with a bias for each channel.

    Args:
        carried: relative error of what the bias may still pass through after it is added.
    """
    shift = 0.0 if bias is None else size(bias.detach()[None]).item() * math.sqrt(outputs / len(bias))
    adding = 0.0 if bias is None else arithmetic.gamma(1 + arithmetic.stored)
    of_bias = 0.0 if bias is None else arithmetic.gamma(4 + arithmetic.stored) + carried
    shift, factor = grow_number(shift), grow_number(relative + adding * (gain + relative))
    constant = grow_number(floor + of_bias * shift + 4 * math.sqrt(outputs) * arithmetic.tiny)

    def measure(x: Tensor) -> Local:
        reached = Line(size(x), 1.0)
        peak = reached.times(grow_number((2 + gain + relative) * math.sqrt(2.0)))
        extra = torch.full_like(reached.at, 1.0)
        return Local(
            reached.times(factor).plus(Line(extra * constant, 0.0)), peak.plus(Line(extra * (shift + constant), 0.0))
        )

    return measure


@rounding_rule(FourierConv2d, PhaseConv2d)
def _stored_symbol(module: StoredSymbol, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    outputs, cin = entries(output_shape(module, input_shape)), module.in_channels
    gain = float(lipschitz(module, input_shape)) * (1 + 2.0**-44)
    blocks = spectral_blocks(module)
    parts = module.pair.shape[1] if module.pair.numel() else 1
    terms = parts * cin
    sizes = [len(matrix) for matrix in module.matrices()]
    transform = transform_error(sizes, arithmetic)
    product = arithmetic.gamma(terms + _ROOM + arithmetic.stored) * blocks
    there = gain * transform + product * (1 + transform)
    # Back: the error so far, and that of the inverse transform on numbers of at most (gain + there) ||x||.
    relative = grow_number(there + transform * (gain + there))
    # Underflow: at most two for each operation, each carried on by a norm of at most sqrt(2) (1 + blocks) sqrt(terms).
    steps = entries(input_shape) + outputs
    biggest = float(torch.cat([module.real.flatten(), module.pair.flatten()]).detach().abs().amax())
    carried = (sum(sizes) + terms + 8) * (2 + blocks) ** 2 * (1 + biggest)
    floor = 8 * math.sqrt(steps) * carried * arithmetic.tiny
    # Numbers below the normal range are lost: of each entry of the transform and of the matrices, at most eta.
    relative += 4 * (steps + sum(sizes) + terms) * (2 + blocks) * arithmetic.tiny
    found = relative_to_input(relative, floor, module.bias, outputs, gain + blocks, arithmetic, transform)
    if biggest > arithmetic.room:
        return lambda x: found(x)._replace(peak=Line(torch.full_like(size(x), math.inf), 0.0))
    return found


@rounding_rule(TaylorConv2d)
def _taylor(module: TaylorConv2d, input_shape: Shape, arithmetic: Arithmetic) -> Measure:
    r"""Terms :math:`x_i = A x_{i-1} / i`: ``e_i = (a e_{i-1} + gamma |A| (n_{i-1} + e_{i-1})) / i``, relative to x."""
    kernel = module.kernel.detach().double()
    channels = len(kernel)
    terms = channels * math.prod(module.kernel_size)
    norm = float(symbol_sup(kernel)) * (1 + 2.0**-44)
    magnitude = schur(kernel.abs().flatten(2).sum(2)[None])
    weight = arithmetic.gamma(terms + 2 + arithmetic.stored)
    reached, error, total_reached, total = 1.0, 0.0, 1.0, 0.0
    for i in range(1, module.terms + 1):
        error = (norm * error + weight * magnitude * (reached + error)) / i
        reached = norm * reached / i
        total_reached += reached + error
        total += error + arithmetic.gamma(1) * total_reached
    steps = channels * math.prod(input_shape[-2:])
    lost = 8 * module.terms * terms * (1 + magnitude) ** 2 * math.sqrt(steps) * arithmetic.tiny
    # Underflow in one term is carried through the later ones, whose factors sum to at most e^|A|.
    grown = math.exp(min(norm + magnitude, 700.0))
    outputs = entries(output_shape(module, input_shape))
    relative = grow_number(total * (1 + 2.0**-40) + lost * grown)
    peak = magnitude + total_reached * (1 + magnitude)
    return relative_to_input(relative, lost * grown, module.bias, outputs, grow_number(peak), arithmetic)
