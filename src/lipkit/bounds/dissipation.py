r"""The dissipation inequality of a discrete-time system: a proof of its gain over sequences and of its contraction.

For the system :math:`(v, x^+, y) = M (w, x, u) + b`, :math:`w = \phi(v)`, of `lipkit.linalg.scan`, with the rows
V, S, O of M, let differences of two trajectories satisfy, for a metric :math:`P \succeq 0` and a diagonal
:math:`\Lambda \succeq 0`,

.. math:: \|x^+\|_P^2 - a^2 \|x\|_P^2 + \tfrac1\gamma \|y\|^2 - \gamma \|u\|^2 + q(v, w) \le 0, \qquad q \ge 0 .

Where :math:`\phi` acts on each unit with slopes in [0, 1], :math:`q = 2 w^\top \Lambda (v - w)`; where it is
L-Lipschitz (on each unit, or on all together with :math:`\Lambda = \lambda I`),
:math:`q = L^2 v^\top \Lambda v - w^\top \Lambda w`. Then two trajectories with the same inputs approach each other,
:math:`\|x_t\|_P \le a^t \|x_0\|_P`, and from the same state, summed with the weights :math:`a^{-2t}`,

.. math:: \|y\| \le \gamma \max(1, a)^{T-1} \|u\| \quad\text{over T steps}, \qquad
          \|x_T\|_P \le \sqrt\gamma \max(1, a)^{T-1} \|u\|, \qquad \|y_t\| \le \sqrt\gamma\, a\, \|x_t\|_P
          \ \text{where the inputs agree.}

By Schur complements the inequality is :math:`H \succeq 0`, linear in all of :math:`P, \Lambda, \gamma` and in M:

.. math:: H = \begin{pmatrix} K & N^\top \\ N & \mathrm{diag}(P, \gamma I) \end{pmatrix}, \quad
          K = \mathrm{diag}(2\Lambda, a^2 P, \gamma I) - J^\top \Lambda V - V^\top \Lambda J, \quad
          N = \begin{pmatrix} P S \\ O \end{pmatrix}

with :math:`J = [I\ 0\ 0]`; for L-Lipschitz functions :math:`K = \mathrm{diag}(\Lambda, a^2 P, \gamma I)`, and N and the
diagonal have the further rows :math:`L \Lambda V` and :math:`\Lambda`.

Source: Revay, Wang & Manchester, IEEE TAC 2024, theorem 1 (slopes); Barbara, Wang & Manchester, 2025 (Lipschitz maps).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lipkit.bounds.lmi import is_positive_within
from lipkit.bounds.lmi_solver import newton
from lipkit.errors import OptionError
from lipkit.proof.roundoff import UNIT, gamma, to_double

# Newton steps of `least_gain`, and its distance from the least gain, relative.
_MOST_STEPS, _ACCURACY = 400, 1e-4


class System(NamedTuple):
    """The matrix M of a system (module docstring) and its sizes; D11 is the block of M that maps w to v.

    Attributes:
        matrix: M ``(nv + nx + ny, nw + nx + nu)``; entries on and above the diagonal blocks of D11 count as 0.
        states: nx, the number of states.
        units: (nv, nw), the sizes of v and w; equal for slopes in [0, 1].
        block: side of the diagonal blocks of D11.
        lipschitz: L of phi; None for slopes in [0, 1] of each unit.
    """

    matrix: Tensor
    states: int
    units: tuple[int, int]
    block: int
    lipschitz: float | None = None

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """V, S and O in float64."""
        (nv, nw), m = self.units, to_double(self.matrix.detach()).clone()
        order = torch.arange(max(nv, nw), device=m.device) // max(self.block, 1)
        m[:nv, :nw] *= order[:nv, None] > order[:nw]
        return m[:nv], m[nv : nv + self.states], m[nv + self.states :]


def dissipation_matrix(
    system: System, metric: Tensor, multiplier: Tensor, gain: float, rate: float
) -> tuple[Tensor, Tensor]:
    """H of the module docstring, dense, float64, and a bound of the rounding of each entry.

    Rows and columns are w, x, u, then the rows of N. Of the metric P only the lower triangle is read; the multiplier is
    the diagonal of Lambda (one repeated number if phi acts on all units together).
    """
    (v, s, o), (nv, nw), nx = system.rows(), system.units, system.states
    lower, lam = to_double(metric.detach()).tril(), to_double(multiplier.detach())
    p, before = lower + lower.tril(-1).mT, v.shape[1]  # `before`: the side of K, whose rows are w, x, u
    units = lam if nv == nw else lam[:1].expand(nw)
    # The rows of N, bounds of their errors (relative ones come below), and the blocks of the diagonal beside N.
    rows, ends = [p @ s, o], [p, torch.eye(len(o), dtype=p.dtype, device=p.device) * gain]
    lost = [gamma(nx + 4) * (p.abs() @ s.abs()) + nx * 2.0**-1070, torch.zeros_like(o)]
    if system.lipschitz is not None:
        rows, ends = [*rows, system.lipschitz * lam[:, None] * v], [*ends, lam.diag()]
        lost.append(2.0**-1070 * v.abs())  # the first of two products, below the normal range
    n, off = torch.cat(rows), torch.cat(lost)
    h = torch.block_diag(units.diag() * (1 if system.lipschitz is not None else 2), rate * rate * p)
    h = torch.block_diag(h, torch.eye(before - nw - nx, dtype=p.dtype, device=p.device) * gain, *ends)
    h[before:, :before], h[:before, before:] = n, n.mT
    if system.lipschitz is None and nv:
        pulled = lam[:, None] * v
        h[:nw, :before] -= pulled
        h[:before, :nw] -= pulled.mT
    error = 4 * UNIT * h.abs()  # products of at most three numbers
    error[nw : nw + nx, nw : nw + nx] += 2.0**-1070 * p.abs()
    error[before:, :before] += off
    error[:before, before:] += off.mT
    return h, error


def proves_dissipation(system: System, metric: Tensor, multiplier: Tensor, gain: float, rate: float) -> bool:
    """True if one Cholesky factorisation proves ``H >= 0`` in floating point, for the numbers as they are stored.

    Guarantee:
        True is a proof of the inequalities of the module docstring, in exact arithmetic. False says nothing.

    >>> half = System(torch.tensor([[0.5, 1.0], [1.0, 0.0]]), 1, (0, 0), 1)
    >>> [proves_dissipation(half, torch.eye(1), torch.ones(0), gain, 1.0) for gain in (2.001, 1.999)]
    [True, False]
    """
    given = (system.matrix, metric, multiplier)
    if not (0 < gain < math.inf and 0 < rate < math.inf and all(bool(t.isfinite().all()) for t in given)):
        return False
    return is_positive_within(*dissipation_matrix(system, metric, multiplier, gain, rate))


class Dissipation(NamedTuple):
    """A gain and a rate, and the metric and multiplier that prove them."""

    gain: float
    rate: float
    metric: Tensor
    multiplier: Tensor


def least_gain(system: System) -> Dissipation:
    r"""Nearly the smallest gain that the inequality proves for a system of units with slopes in [0, 1].

    A barrier method: minimise :math:`t \gamma - \log\det H - \log\det P` over :math:`\gamma, P, \Lambda` by Newton
    steps. It starts from a rate at which a multiple of I is feasible as P, and lowers it to 1 or to the smallest rate
    that it finds. :func:`proves_dissipation` proves the result; without a proof the gain is ``inf``.

    Cost:
        Tens of Newton steps of :math:`(n_x^2/2 + n_v)^3` operations each: seconds for 32 states, minutes for 64.

    >>> half = System(torch.tensor([[0.5, 1.0], [1.0, 0.0]]), 1, (0, 0), 1)
    >>> found = least_gain(half)
    >>> 2 < found.gain < 2.001, found.rate
    (True, 1.0)
    """
    system = system._replace(matrix=system.matrix.cpu())  # many small steps: the CPU is faster
    barrier = _Barrier(system)
    z, rate = barrier.start()
    weight, steps_left = barrier.size / float(z[0]), _MOST_STEPS
    while steps_left > 0:
        z, used = newton(_Barrier(system, rate), z, weight, steps_left)
        steps_left -= used
        # First the rate: its centre is feasible for smaller ones, too. When they gain little, the gain: size / weight
        # is the distance of a centre's gain from the least one.
        lower = barrier.lower_rate(z, rate)
        if lower < rate * 0.997 or lower == 1 < rate:
            rate = lower
        elif barrier.size / weight > _ACCURACY * float(z[0]):
            weight *= 20
        else:
            break
    gain, metric, multiplier = barrier.parts(z)
    for slack in (1e-9, 1e-7, 1e-5, 1e-3, 1e-1):
        if proves_dissipation(system, metric, multiplier, gain * (1 + slack), rate):
            return Dissipation(gain * (1 + slack), rate, metric, multiplier)
    return Dissipation(math.inf, rate, metric, multiplier)


class _Barrier:
    r"""-log det H - log det P and its derivatives in :math:`z = (\gamma, p, \lambda)`, p the lower triangle of P.

    .. math:: H = \gamma E + \textstyle\sum_k c_k U_k^\top P U_k + \sum_i \lambda_i (e_i q_i^\top + q_i e_i^\top),
              \qquad c = (a^2, 1, -1),\quad q_i = e_i - V_i

    where :math:`U_1` selects x and :math:`U_4` the rows of P S from a vector of H's size, :math:`U_3 = S` and
    :math:`U_2 = U_4 + S`.
    So with :math:`G = H^{-1}` every second derivative :math:`\mathrm{tr}(G\, \partial_i H\, G\, \partial_j H)` is made
    of products of entries of :math:`U_k G U_l^\top`, :math:`e_i^\top G q_j` and the like.
    """

    def __init__(self, system: System, rate: float = 1.0) -> None:
        self.system, self.rate = system, rate
        (v, s, o), nx, self.nv = system.rows(), system.states, system.units[0]
        before = v.shape[1]
        self.n = before + nx + len(o)  # the side of H
        self.size = self.n + nx  # the barrier's parameter: the sides of H and P
        self.rows, self.columns = torch.tril_indices(nx, nx)
        self.nx, places = nx, torch.eye(self.n, dtype=torch.float64)
        x, ends = places[self.nv : self.nv + nx], places[before : before + nx]
        s = torch.nn.functional.pad(s, (0, self.n - before))
        self.u, self.c = (x, ends + s, s), (rate * rate, 1.0, -1.0)
        self.units = places[:, : self.nv]
        self.q = self.units - torch.nn.functional.pad(v, (0, self.n - before)).mT
        self.free = torch.ones(self.n, dtype=torch.float64)  # the diagonal of E: rows whose diagonal holds gamma
        self.free[: self.nv + nx] = 0
        self.free[before : before + nx] = 0

    def parts(self, z: Tensor) -> tuple[float, Tensor, Tensor]:
        """Split z into gain, metric and multiplier."""
        p = z.new_zeros(self.nx, self.nx)
        p[self.rows, self.columns] = z[1 : 1 + len(self.rows)]
        return float(z[0]), p + p.tril(-1).mT, z[1 + len(self.rows) :]

    def start(self) -> tuple[Tensor, float]:
        """A strictly feasible point, and the rate for which it is.

        P and the multipliers of later units are small, gain and rate large.
        """
        d11 = float(self.q[: self.nv, : self.nv].norm()) if self.nv else 1.0
        step = min(1.0, 1 / (2 * d11 * self.nv)) ** 2 if self.system.block < self.nv else 1.0
        lam = step ** (torch.arange(self.nv) // max(self.system.block, 1)).double()
        small = 0.2 * float(lam.min()) if self.nv else 1.0
        p = small / (1 + float(torch.linalg.matrix_norm(self.u[2], 2)) ** 2) * torch.eye(self.nx, dtype=torch.float64)
        for k in range(400):
            rate = max(1.0, 2.0 ** (k / 4 - 8))
            z = torch.cat((torch.tensor([2.0 ** (k / 2)], dtype=torch.float64), p[self.rows, self.columns], lam))
            if math.isfinite(_Barrier(self.system, rate).value(z)):
                return z, rate
        raise OptionError("expected a system with finite numbers near 1, got one for which no gain was found")

    def lower_rate(self, z: Tensor, rate: float) -> float:
        """1 if z is strictly feasible for that; else nine tenths of the way from ``rate`` to the smallest such rate."""
        if math.isfinite(_Barrier(self.system).value(z)):
            return 1.0
        low, high = 1.0, rate
        while high - low > 1e-6 * rate:
            middle = (low + high) / 2
            fits = math.isfinite(_Barrier(self.system, middle).value(z))
            low, high = (low, middle) if fits else (middle, high)
        return min(rate, high + (rate - high) / 10)

    def value(self, z: Tensor) -> float:
        """The barrier at z, or inf outside the cone."""
        gain, p, lam = self.parts(z)
        if not (gain > 0 and bool((lam > 0).all())):
            return math.inf
        h = dissipation_matrix(self.system, p, lam, gain, self.rate)[0]
        (one, wrong), (two, fails) = torch.linalg.cholesky_ex(h), torch.linalg.cholesky_ex(p)
        if int(wrong) or int(fails):
            return math.inf
        return -2 * float(one.diagonal().log().sum() + two.diagonal().log().sum())

    def derivatives(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient and Hessian of the barrier at z."""
        gain, p, lam = self.parts(z)
        g = torch.linalg.inv(dissipation_matrix(self.system, p, lam, gain, self.rate)[0])
        inverse = torch.linalg.inv(p)
        ge, gq = g @ self.units, g @ self.q
        # Coefficients of P are symmetric (nx, nx); those off the diagonal count twice in a derivative by p.
        twice = torch.where(self.rows == self.columns, 1.0, 2.0).double()

        def in_p(full: Tensor) -> Tensor:
            return twice * ((full + full.mT) / 2)[..., self.rows, self.columns]

        terms = list(zip(self.c, self.u, strict=True))  # (c_k, U_k): H holds the sum of c_k U_k^T P U_k
        in_trace = sum(c * u @ g @ u.mT for c, u in terms)
        gradient = -torch.cat(
            ((g.diagonal() @ self.free)[None], in_p(in_trace + inverse), 2 * (self.units * gq).sum(0))
        )
        # block[i, k] block[j, l] + block[i, l] block[j, k] for all pairs (i, j) and (k, l) of the lower triangle.
        i, j = self.rows, self.columns

        def in_pp(block: Tensor) -> Tensor:
            upper, lower = block[i].mT.contiguous(), block[j].mT.contiguous()
            return (upper[i] * lower[j] + upper[j] * lower[i]).mT

        second = in_pp(inverse) + sum(c * d * in_pp(u @ g @ w.mT) for c, u in terms for d, w in terms)
        hessian, inner = z.new_zeros(len(z), len(z)), slice(1, 1 + len(self.rows))
        hessian[inner, inner] = twice[:, None] * second * twice / 2
        hessian[0, 0] = self.free @ g.square() @ self.free
        hessian[0, inner] = in_p(sum(c * (u @ g * self.free) @ g @ u.mT for c, u in terms))
        last = slice(1 + len(self.rows), None)
        hessian[0, last] = 2 * self.free @ (ge * gq)
        hessian[last, last] = 2 * (
            (self.units.mT @ ge) * (self.q.mT @ gq) + (self.units.mT @ gq) * (self.units.mT @ gq).mT
        )
        hessian[last, inner] = sum(2 * c * in_p(torch.einsum("ik,jk->kij", u @ ge, u @ gq)) for c, u in terms)
        hessian[inner, 0], hessian[inner, last] = hessian[0, inner], hessian[last, inner].mT
        hessian[last, 0] = hessian[0, last]
        return gradient, hessian
