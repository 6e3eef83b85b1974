r"""Recurrent layers of prescribed gain over sequences: R2DN, recurrent equilibrium networks, linear systems.

Each makes one system (M, b) of `lipkit.linalg.scan` whose dissipation inequality (`lipkit.bounds.dissipation`) holds
with the metric P = I for all values of its parameters: the state contracts in the l2 norm itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError, OptionError, ShapeError, finite
from lipkit.layers.base import ConstrainedLinear, check_dtype, check_positive, slope_activation
from lipkit.layers.export import exactly, in_float64
from lipkit.layers.sandwich import ContractionLinear, SandwichLinear
from lipkit.linalg import at_least_float32
from lipkit.linalg.precision import autocast_off
from lipkit.linalg.scan import simulate
from lipkit.lowering import lipschitz
from lipkit.modules import HalfAbs, MaxMin, Recurrent, Shape, export_rule, guard, lipschitz_rule, output_shape
from lipkit.modules.activations import slope_restricted
from lipkit.modules.parametrised import settled
from lipkit.modules.recurrent import unitwise
from lipkit.modules.registry import export_part


class Parts(NamedTuple):
    """The numbers of a system (M, b) that a layer makes from its parameters."""

    matrix: Tensor  # M, from (w, x, u) to (v, x+, y)
    bias: Tensor  # b
    multiplier: Tensor  # the diagonal of Lambda
    units: tuple[int, int]  # nv and nw
    block: int  # how many units are computed at once: none of them reads another


class RecurrentLayer(nn.Module):
    """Abstract: sequences ``(B, T, in_features) -> (B, T, out_features)`` from rest, by the system of :meth:`parts`."""

    phi: nn.Module

    def __init__(
        self,
        in_features: int,
        out_features: int,
        states: int,
        gamma: float = 1.0,
        rate: float = 1.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_dtype(dtype)
        check_positive(in_features=in_features, out_features=out_features, states=states)
        if not 0 < finite("rate", rate) <= 1:
            raise OptionError(f"rate: expected a number in (0, 1], got {rate}")
        self.in_features, self.out_features, self.states = in_features, out_features, states
        self.gamma, self.rate = finite("gamma", gamma, positive=True), float(rate)
        self.state_bias, self.output_bias = (
            nn.Parameter(torch.zeros(n, device=device, dtype=dtype)) for n in (states, out_features)
        )

    @property
    def place(self) -> dict[str, Any]:
        """Device and dtype of the parameters."""
        return {"device": self.state_bias.device, "dtype": self.state_bias.dtype}

    def parts(self) -> Parts:
        """The system as it is now, in float32 or better."""
        raise NotImplementedError

    def _made(self, k: Tensor, bias: Tensor, multiplier: Tensor, block: int, shift: Tensor | float = 0.0) -> Parts:
        """The system of a contraction k from (w, a x, sqrt(gamma) u) to (v, x+, y / sqrt(gamma)).

        ``bias`` is that of the units; ``shift`` is a further constant in the outputs of k.
        """
        nx, ny, nu, root = self.states, self.out_features, self.in_features, math.sqrt(self.gamma)
        rows, columns = k.new_ones(len(k)), k.new_ones(k.shape[1])
        rows[-ny:], columns[-nu - nx : -nu], columns[-nu:] = root, self.rate, root
        b = torch.cat((bias, at_least_float32(self.state_bias), at_least_float32(self.output_bias))) + rows * shift
        return Parts(rows[:, None] * k * columns, b, multiplier, (len(k) - nx - ny, k.shape[1] - nx - nu), block)

    def forward(self, u: Tensor, mask: Tensor | None = None) -> Tensor:
        """The outputs ``(B, T, out_features)``.

        Args:
            u: ``(B, T, in_features)``.
            mask: ``(B, T)``, true at the steps that count. At all other steps, inputs and outputs are replaced by 0,
                so that sequences of several lengths fit into one batch. The gain stays the same.
        """
        if u.ndim != 3 or u.shape[2] != self.in_features:
            raise ShapeError(f"{type(self).__name__}: expected (B, T, {self.in_features}), got {tuple(u.shape)}")
        if mask is not None:
            u = masked(u, mask)
        with autocast_off(u):
            made = self.parts()
            alone, given = not made.units[0] or unitwise(self.phi), u.to(made.matrix.dtype)  # no units: no phi
            system = (made.matrix, made.bias, self.states, made.units, made.block)
            y = simulate(*system, self.phi, given, alone)[0].to(u.dtype)
        return y if mask is None else masked(y, mask)

    def extra_repr(self) -> str:
        sizes = f"{self.in_features}, {self.out_features}, states={self.states}"
        return f"{sizes}, gamma={self.gamma:g}, rate={self.rate:g}"


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Values ``(B, T, n)``, replaced by 0 where the mask ``(B, T)`` is false, NaN included."""
    if mask.shape != values.shape[:2] or mask.dtype != torch.bool:
        raise ShapeError(
            f"mask: expected booleans {tuple(values.shape[:2])}, got {mask.dtype} of shape {tuple(mask.shape)}"
        )
    return torch.where(mask[..., None], values, 0.0)


class LinearSystem(RecurrentLayer):
    r"""A linear time-invariant system, :math:`x^+ = A x + B u + b_x,\ y = C x + D u + b_y`, of prescribed gain.

    .. math:: \begin{pmatrix} A & B \\ C & D \end{pmatrix} =
              \begin{pmatrix} I & \\ & \sqrt\gamma I \end{pmatrix} K
              \begin{pmatrix} a I & \\ & \sqrt\gamma I \end{pmatrix}, \qquad \|K\|_2 \le 1

    Args:
        in_features, out_features, states: numbers of inputs, outputs and states.
        gamma: bound of the gain, that is of the H-infinity norm of the transfer function.
        rate: a in (0, 1]: one step multiplies differences of states by at most a.
        place: device and dtype of the parameters (float32 or float64).

    Parameters: those of ``through``, a :class:`ContractionLinear` that makes K, ``state_bias`` and ``output_bias``.

    Guarantee:
        :math:`\|\Delta y\| \le \gamma \|\Delta u\|` over sequences of any length, and :math:`\|\Delta x_{t+1}\| \le a
        \|\Delta x_t\|` under the same inputs. Complete for a = 1: by the bounded real lemma every stable system with a
        smaller H-infinity norm has such coordinates. The export is proved from its stored numbers.

    >>> layer = LinearSystem(2, 3, 4, gamma=2.0)
    >>> layer(torch.zeros(1, 5, 2)).shape, float(lipschitz(layer))
    (torch.Size([1, 5, 3]), 2.0)

    References:
        Zhou, Doyle & Glover, "Robust and Optimal Control", 1996, section 21 (discrete bounded real lemma).
    """

    def __init__(
        self, in_features: int, out_features: int, states: int, gamma: float = 1.0, rate: float = 1.0, **place: Any
    ) -> None:
        super().__init__(in_features, out_features, states, gamma, rate, **place)
        self.through, self.phi = _birth(self), nn.Identity()

    def parts(self) -> Parts:
        k = self.through.weight()
        return self._made(k, k.new_zeros(0), k.new_zeros(0), 1)


def _birth(layer: RecurrentLayer) -> ContractionLinear:
    """The initial K: states keep 0.95 of themselves, and inputs reach outputs."""
    nx, nu, ny = layer.states, layer.in_features, layer.out_features
    made = ContractionLinear(nx + nu, nx + ny, bias=False, **layer.place)
    k = 0.3 * made.weight().detach()
    k[:nx, :nx] = 0.95 * torch.eye(nx, device=k.device)
    k = k / torch.linalg.matrix_norm(k, 2).clamp_min(1) * (1 - 1e-3)  # inside the ball, where A is invertible
    values, vectors = torch.linalg.eigh(k @ k.mT)  # those of A = (I - K K^T)^(1/2)
    made.set_factors(vectors * (1 - values).clamp_min(0).sqrt() @ vectors.mT, k)
    return made


class R2dn(RecurrentLayer):
    r"""Robust recurrent deep network: a linear system around a 1-Lipschitz network phi, of prescribed gain [R2DN].

    .. math:: \begin{pmatrix} v \\ x^+ \\ y/\sqrt\gamma \end{pmatrix} =
              \begin{pmatrix} 0 & V \\ W & A_W K C_V \end{pmatrix}
              \begin{pmatrix} w \\ a x \\ \sqrt\gamma u \end{pmatrix} + b, \qquad w = \phi(v)

    with :math:`C_V^\top C_V + V^\top V = I`, :math:`A_W A_W^\top + W W^\top = I` and :math:`\|K\| \le 1`: the matrix
    is a contraction.

    Args:
        in_features, out_features, states: numbers of inputs, outputs and states.
        units: how many numbers phi takes.
        phi: 'abs', another 1-Lipschitz scalar activation by name or as a module, or a 1-Lipschitz network from
            ``(B, units)``, such as ``models.lbdn([units, 64, units])``. Dense layers with one kind of activation
            between them are unfolded into M; any other network is run as it is, step by step, which takes longer.
        options: gamma, rate, device and dtype, as :class:`LinearSystem`.

    Parameters: those of ``read`` (C_V, V), ``write`` (A_W, W), ``through`` (K) and phi, and three biases.

    Guarantee:
        As :class:`LinearSystem`; the state contracts in the l2 norm.

    >>> layer = R2dn(2, 3, 4, 8, gamma=2.0, rate=0.9)
    >>> layer(torch.zeros(1, 5, 2)).shape, float(lipschitz(layer))
    (torch.Size([1, 5, 3]), 2.0)

    References:
        Barbara, Wang & Manchester, "R2DN: Scalable parameterization of contracting and Lipschitz recurrent deep
        networks", 2025.
    """

    def __init__(
        self, in_features: int, out_features: int, states: int, units: int, phi: str | nn.Module = "abs", **options: Any
    ) -> None:
        super().__init__(in_features, out_features, states, **options)
        check_positive(units=units)
        self.inner: nn.Module | None = None
        written = units
        if not isinstance(phi, nn.Module):
            # |v| is LeakyReLU of slope -1. Unlike ReLU, (v + |v|) / 2, it has no linear part: K provides that.
            self.phi: nn.Module = nn.LeakyReLU(-1.0) if phi == "abs" else slope_activation(phi)
        elif not (bound := float(lipschitz(phi, (units,)).detach())) <= 1 + 1e-9:
            raise OptionError(f"phi: expected a 1-Lipschitz network, got one with a bound of {bound}")
        elif unitwise(phi):
            self.phi = export_part(phi, (1,))
        else:
            self.inner, layers = phi, unfolded(phi, units)
            self.phi = phi if layers is None else layers.activation
            (written,) = output_shape(phi, (units,))
        self.units = units
        self.read = ContractionLinear(units, states + in_features, bias=False, **self.place)
        self.write = ContractionLinear(written, states + out_features, bias=False, **self.place)
        self.through = _birth(self)
        self.unit_bias = nn.Parameter(torch.zeros(units, **self.place))

    def parts(self) -> Parts:
        (read, v), (write, w) = self.read.factors(), self.write.factors()
        # factors() gives A^T and B with A A^T + B B^T = I: C_V and V^T of `read`, A_W^T and W of `write`.
        z, v = write.mT @ self.through.weight() @ read, v.mT
        layers = None if self.inner is None else unfolded(self.inner, self.units)
        if layers is None:
            ends = [torch.eye(n, device=v.device, dtype=v.dtype) for n in (len(v), w.shape[1])]
            layers = Unfolded(ends, [v.new_zeros(len(end)) for end in ends], self.phi, [v.new_ones(len(v))])
        # The first dense layer of phi multiplies V, the last one is multiplied by W, and those between stand in D11.
        (first, *between, last), sizes = layers.weights, [len(m) for m in layers.weights[:-1]]
        d11 = torch.block_diag(v.new_zeros(sizes[0], 0), *between, v.new_zeros(0, last.shape[1]))
        k, columns = torch.block_diag(d11, z), d11.shape[1]
        k[: sizes[0], columns:], k[len(d11) :, columns - last.shape[1] : columns] = first @ v, w @ last
        bias = torch.cat((layers.biases[0] + first @ at_least_float32(self.unit_bias), *layers.biases[1:-1]))
        shift = torch.cat((torch.zeros_like(bias), w @ layers.biases[-1]))
        return self._made(k, bias, torch.cat(layers.multipliers), math.gcd(*sizes), shift)


class Unfolded(NamedTuple):
    """A chain of dense layers with one kind of activation between them."""

    weights: list[Tensor]  # of the L + 1 linear maps
    biases: list[Tensor]
    activation: nn.Module  # on each unit alone
    multipliers: list[Tensor]  # diagonals of Lambda with which the inequality holds, of the L activations


def unfolded(network: nn.Module, units: int) -> Unfolded | None:
    """The dense layers of a network from (B, units), as they are now; None for other layers or mixed activations.

    MaxMin becomes :class:`lipkit.modules.HalfAbs` between two rotations, which go into the layers beside it.
    """
    if type(network) in UNFOLDED:
        return UNFOLDED[type(network)](network)
    like = at_least_float32(next(network.parameters(), torch.empty(0)))
    weights, biases, kinds, multipliers = list[Tensor](), list[Tensor](), list[nn.Module](), list[Tensor]()
    w, b = torch.eye(units, device=like.device, dtype=like.dtype), like.new_zeros(units)
    for weight, bias, phi in _pieces(network):
        if weight is not None and phi is None:
            w, b = weight @ w, weight @ b + (0 if bias is None else at_least_float32(bias))
            continue
        if phi is None:
            return None
        turn = _rotation(w) if type(phi) is MaxMin else torch.eye(len(w), device=w.device, dtype=w.dtype)
        weights.append(turn.mT @ w)  # R^T into the layer before, R into the one after
        biases.append(turn.mT @ b)
        kinds.append(HalfAbs() if type(phi) is MaxMin else phi)
        multipliers.append(w.new_ones(len(w)) if weight is None else weight.square())  # Psi^2 of a sandwich
        w, b = turn, w.new_zeros(len(w))
    # HalfAbs acts by a unit's place in its block, so that all blocks must have its width.
    uneven = any(type(kind) is HalfAbs for kind in kinds) and len(set(map(len, weights))) > 1
    alike = len(set(map(repr, kinds))) == 1 and not uneven
    return Unfolded([*weights, w], [*biases, b], kinds[0], multipliers) if alike else None


UNFOLDED: dict[type[nn.Module], Callable[[Any], Unfolded | None]] = {}
"""Functions that unfold a module of this exact type, such as `lipkit.models.LBDN`; its own file adds the entry."""


def _pieces(network: nn.Module) -> Iterator[tuple[Tensor | None, Tensor | None, nn.Module | None]]:
    """(matrix, bias, None) of a linear map; (diagonal of Psi or None, None, activation); all None for other modules."""
    if type(network) is nn.Sequential:
        for child in network:
            yield from _pieces(child)
    elif type(network) is SandwichLinear and network.activation is not None:
        first, second = network.halves()
        yield from ((first, network.bias, None), (network.psi(), None, network.activation), (second, None, None))
    elif isinstance(network, ConstrainedLinear):
        yield network.weight(), network.bias, None
    else:
        known = slope_restricted(network) or type(network) in (MaxMin, HalfAbs)
        yield None, None, network if known else None


def _rotation(like: Tensor) -> Tensor:
    """R, orthogonal, with MaxMin(z) = R HalfAbs(R^T z): the maximum and minimum of a and b by |a - b| and a + b."""
    half = torch.eye(len(like) // 2, device=like.device, dtype=like.dtype) * math.sqrt(0.5)
    return torch.cat((torch.cat((half, half), 1), torch.cat((-half, half), 1)))


class Ren(RecurrentLayer):
    r"""Recurrent equilibrium network, explicit: each unit reads those before it in the same step [REN].

    .. math:: v = C_1 x + D_{11} w + D_{12} u + b_v,\quad w = \sigma(v),\quad
              x^+ = A x + B_1 w + B_2 u + b_x,\quad y = C_2 x + D_{21} w + D_{22} u + b_y

    with a strictly lower triangular :math:`D_{11}`. From a free X (2 nx + nv, 2 nx + nv), square, and others,

    .. math:: D_{22} = \gamma N, \quad R = \gamma (I - N^\top N), \quad
              m_R = [-N^\top C_2,\ -N^\top D_{21} - D_{12}^\top,\ B_2^\top],\quad m_Q = [C_2,\ D_{21},\ 0],

    .. math:: H = X^\top X + \epsilon I + m_R^\top R^{-1} m_R + m_Q^\top m_Q / \gamma, \quad
              E = \tfrac12 (H_{11} + H_{33} / a^2 + Y - Y^\top), \quad \Lambda = \tfrac12 \mathrm{diag}(H_{22}),

    .. math:: A = E^{-1} H_{31},\ B_1 = E^{-1} H_{32},\ B_2 \leftarrow E^{-1} B_2,\ C_1 = -\Lambda^{-1} H_{21},
              D_{11} = -\Lambda^{-1} \mathrm{tril}(H_{22}, -1),\ D_{12} \leftarrow \Lambda^{-1} D_{12} .

    The dissipation inequality holds with :math:`P = E^\top H_{33}^{-1} E`. The layer takes the coordinates
    :math:`L^{-1} E x` with :math:`L L^\top = H_{33}`, in which P is I.

    Args:
        in_features, out_features, states, units: nu, ny, nx and nv.
        activation: one with slope in [0, 1].
        options: gamma, rate, device and dtype, as :class:`LinearSystem`; the system is made in float64.

    Guarantee:
        As :class:`LinearSystem`. Complete: every contracting network of this form with this gain has such parameters.
        Its units are computed one after the other: train an R2DN, unless you need the wider class.

    >>> layer = Ren(2, 3, 4, 8, gamma=2.0, rate=0.9)
    >>> layer(torch.zeros(1, 5, 2)).shape, float(lipschitz(layer))
    (torch.Size([1, 5, 3]), 2.0)

    References:
        Revay, Wang & Manchester, "Recurrent equilibrium networks: flexible dynamic models with guaranteed stability and
        robustness", IEEE TAC 2024, section V; N is the Cayley transform of its equation 43.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        states: int,
        units: int,
        activation: str | nn.Module = "relu",
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, states, **options)
        check_positive(units=units)
        self.phi, self.units, place = slope_activation(activation), units, self.place
        nx, nv, nu, ny = states, units, in_features, out_features

        def drawn(rows: int, columns: int, scale: float) -> Tensor:
            return torch.randn(rows, columns, **place) * scale / math.sqrt(max(columns, 1))

        # The initial H is near one for which A = 0.9 I.
        kept = torch.eye(2 * nx + nv, **place)
        kept[nx + nv :, :nx] = kept[:nx, nx + nv :] = 0.9 * torch.eye(nx)  # H31 and H13
        self.x = nn.Parameter(torch.linalg.cholesky(kept).mT + 0.3 * drawn(2 * nx + nv, 2 * nx + nv, 1.0))
        self.y = nn.Parameter(drawn(nx, nx, 0.1))
        self.b2, self.d12 = (nn.Parameter(drawn(rows, nu, 0.5)) for rows in (nx, nv))
        self.c2, self.d21 = (nn.Parameter(drawn(ny, columns, 0.5)) for columns in (nx, nv))
        d = min(nu, ny)
        self.x3 = nn.Parameter(torch.eye(d, **place) + drawn(d, d, 0.1))
        self.y3, self.z3 = (nn.Parameter(drawn(rows, d, 0.1)) for rows in (d, abs(ny - nu)))
        self.unit_bias = nn.Parameter(torch.zeros(nv, **place))

    def parts(self) -> Parts:
        nx, nv, ny, nu, gamma = self.states, self.units, self.out_features, self.in_features, self.gamma
        # The parameters B2, D12, C2 and D21 are in units of the root of gamma, so that gamma cancels in H.
        b2, d12, c2, d21 = (p.double() for p in (self.b2, self.d12, self.c2, self.d21))
        n = self._passed()
        eye = torch.eye(2 * nx + nv, dtype=n.dtype, device=n.device)
        m_r = torch.cat((-n.mT @ c2, -n.mT @ d21 - d12.mT, b2.mT), 1)
        m_q = torch.cat((c2, d21, c2.new_zeros(ny, nx)), 1)
        x = self.x.double()
        h = x.mT @ x + EPSILON * eye + m_r.mT @ torch.linalg.solve(eye[:nu, :nu] - n.mT @ n, m_r) + m_q.mT @ m_q
        sizes = [nx, nv, nx]
        (h11, *_), (h21, h22, _), (h31, h32, h33) = (rows.split(sizes, 1) for rows in h.split(sizes))
        root = torch.linalg.cholesky(h33)  # L
        y = self.y.double()
        back = torch.linalg.solve((h11 + h33 / self.rate**2 + y - y.mT) / 2, root)  # E^-1 L
        lam, scale = h22.diagonal() / 2, math.sqrt(gamma)
        d11 = -torch.tril(h22, -1)  # a unit reads those before it
        units = torch.cat((d11, -h21 @ back, scale * d12), 1) / lam[:, None]
        moved = torch.linalg.solve_triangular(root, torch.cat((h32, h31 @ back, scale * b2), 1), upper=False)
        matrix = torch.cat((units, moved, torch.cat((scale * d21, scale * c2 @ back, gamma * n), 1)))
        bias = torch.cat((self.unit_bias, self.state_bias, self.output_bias)).double()
        like = at_least_float32(self.x)
        return Parts(matrix.to(like), bias.to(like), lam.to(like), (nv, nv), 1)

    def _passed(self) -> Tensor:
        """N (ny, nu), of norm below 1, in float64."""
        x, y, z = (p.double() for p in (self.x3, self.y3, self.z3))
        eye = torch.eye(len(x), dtype=x.dtype, device=x.device)
        m = x.mT @ x + y - y.mT + z.mT @ z + EPSILON * eye
        inverse = torch.linalg.inv(eye + m)
        n = torch.cat(((eye - m) @ inverse, -2 * z @ inverse))  # tall
        return n if self.out_features >= self.in_features else n.mT


EPSILON = 1e-9  # keeps H positive definite, and the norm of N below 1


@lipschitz_rule(LinearSystem, R2dn, Ren)
def _bound(layer: RecurrentLayer, input_shape: Shape | None) -> float:
    """gamma; raises if phi was replaced by one without the guarantee."""
    for part in (layer.phi, *(getattr(layer, name) for name in ("read", "write", "through") if hasattr(layer, name))):
        guard(settled(part))
    bound = 1.0 if type(layer) is LinearSystem else math.inf
    if isinstance(layer, R2dn) and layer.inner is not None:
        bound = float(lipschitz(layer.inner, (layer.units,)).detach())
    elif unitwise(layer.phi):
        bound = float(lipschitz(layer.phi).detach())
    if not bound <= 1 + 1e-9 or (type(layer) is Ren and not slope_restricted(layer.phi)):
        raise NoRuleError(f"{type(layer).__name__}: expected the phi that it was made with, got {layer.phi!r}")
    return layer.gamma


def margins(dtype: torch.dtype) -> list[float]:
    """Relative reductions to try, 1e-13, 2e-13, 5e-13, ..., 0.05, without those that this dtype would round away."""
    steps = (m * 10.0**-k for k in range(13, 1, -1) for m in (1, 2, 5))
    return [delta for delta in steps if delta >= torch.finfo(dtype).eps / 8]


def unproved(network: nn.Module, gamma: float) -> OptionError:
    """The error of an export for which none of the `margins` gives a proof."""
    largest = torch.tensor([float(p.detach().abs().max()) for p in network.parameters()], dtype=torch.float64).max()
    wanted = f"finite parameters with a proof of gain {gamma}"
    return OptionError(f"expected {wanted}, got none even with weights reduced by 5 %: the largest is {largest:.3g}")


@export_rule(LinearSystem, R2dn, Ren)
def _export(layer: RecurrentLayer, input_shape: Shape) -> nn.Module:
    if len(input_shape) != 2 or input_shape[1] != layer.in_features:
        raise ShapeError(f"expected input of shape (T, {layer.in_features}), got {input_shape}")
    gamma = float(lipschitz(layer))
    matrix, bias, multiplier = exactly(layer, lambda made: made.parts()[:3])
    made, phi = in_float64(layer).parts(), export_part(layer.phi, (getattr(layer, "units", 1),))
    # P = I, exact in every format.
    metric = torch.eye(layer.states, dtype=matrix.dtype, device=matrix.device)
    # (1 - delta) M satisfies the inequality of M with a margin of delta on the diagonal blocks.
    for delta in margins(matrix.dtype):
        stored = ((1 - delta) * made.matrix).to(matrix)
        plain = Recurrent(
            *(stored, bias, metric, multiplier, phi, layer.states, made.units, made.block, gamma, layer.rate)
        )
        if plain.proved(gamma):
            return plain
    raise unproved(layer, layer.gamma)
