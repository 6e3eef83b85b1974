"""The optimiser of a run; optimisers of semi-orthogonal parameters, and one that joins several optimisers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lipkit.errors import OptionError, ShapeError, finite
from lipkit.layers.stiefel import OnManifold
from lipkit.linalg.matrices import check_positive
from lipkit.linalg.stiefel import retract, spectral_step, tangent
from lipkit.training.options import Numbers


class _ManifoldOptimizer(Optimizer):
    """Base of optimisers that move each matrix independently of the others; a subclass defines `moved`.

    A parameter (m, ...) is flattened to a matrix (m, n), such as the kernel of a 1 x 1 convolution.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim < 2:
                    shape = tuple(p.shape)
                    raise ShapeError(f"{type(self).__name__}: expected matrices, got a parameter {shape}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    p.copy_(self.moved(p.flatten(1), p.grad.flatten(1), state, group).reshape(p.shape))
        return loss

    def moved(self, w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """The next matrix, at step number ``state["step"]``; the rest of ``state`` is changed in place."""
        raise NotImplementedError


# From this number of entries on, a step of spectral descent costs as much as the products of the layer.
LARGE = 2**17


class SpectralDescent(_ManifoldOptimizer):
    r"""Steepest descent in the spectral norm on the manifold of semi-orthogonal matrices.

    .. math:: M \leftarrow \beta M + (1 - \beta) G, \qquad W \leftarrow s_\alpha(W, \beta M + (1 - \beta) G)

    with s = `lipkit.linalg.stiefel.spectral_step`: all singular directions of the tangent turn by about the same angle.
    Matrices of at least ``LARGE`` entries move at every k-th gradient only, by :math:`k \alpha`, because their steps
    would take a third of the training time.

    Args:
        params: semi-orthogonal matrices, such as `lipkit.layers.StiefelLinear` has.
        lr: :math:`\alpha`, radians a step; 0.01 to 0.05 in practice. Large matrices leave the manifold if
            :math:`k \alpha \ge 0.6`.
        momentum: :math:`\beta`, in [0, 1).
        steps: of the iteration for the matrix sign, at least 1.
        every: k, at least 1.

    Raises:
        OptionError: an argument is out of range. ShapeError: a parameter is not a matrix.

    >>> w = nn.Parameter(torch.eye(2))
    >>> optimizer = SpectralDescent([w], lr=0.1)
    >>> w.grad = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    >>> optimizer.step()
    >>> bool(w[0, 1] < -0.05), bool((w @ w.mT - torch.eye(2)).abs().max() < 1e-3)
    (True, True)

    References:
        docs/mathematics; Jordan et al., Muon (2024), is the same step without a constraint.
    """

    def __init__(
        self, params: Any, lr: float = 0.02, *, momentum: float = 0.95, steps: int = 4, every: int = 2
    ) -> None:
        if not 0 <= momentum < 1:
            raise OptionError(f"momentum: expected a number in [0, 1), got {momentum}")
        finite("lr", lr, least=0)
        check_positive(steps=steps, every=every)
        super().__init__(params, {"lr": lr, "momentum": momentum, "steps": steps, "every": every})

    def moved(self, w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        beta = group["momentum"]
        average = state.setdefault("momentum_buffer", torch.zeros_like(g))
        average.lerp_(g, 1 - beta)
        waits = group["every"] if w.numel() >= LARGE else 1
        if state["step"] % waits:
            return w  # moves at the k-th gradient only
        return spectral_step(w, torch.lerp(average, g, 1 - beta), waits * group["lr"], group["steps"])


class RiemannianAdam(_ManifoldOptimizer):
    r"""Adam on the manifold: momentum of tangents, one second moment for each matrix, and a retraction.

    With G the tangent of the gradient, of N entries,

    .. math:: M \leftarrow \beta_1 T_W(M) + (1 - \beta_1) G, \quad v \leftarrow \beta_2 v + (1 - \beta_2) \|G\|_F^2 / N,
        \quad W \leftarrow \mathrm{retract}(W - \alpha \hat M / (\sqrt{\hat v} + \epsilon))

    A second moment for each entry, as in Adam, would depend on the basis and make steps leave the tangent space.

    Args:
        params: semi-orthogonal matrices.
        lr, betas, eps: :math:`\alpha`, :math:`(\beta_1, \beta_2)`, :math:`\epsilon`.

    Raises:
        OptionError: an argument is out of range. ShapeError: a parameter is not a matrix.

    >>> w = nn.Parameter(torch.eye(2))
    >>> optimizer = RiemannianAdam([w], lr=0.1)
    >>> w.grad = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    >>> optimizer.step()
    >>> bool(w[0, 1] < -0.05), bool((w @ w.mT - torch.eye(2)).abs().max() < 1e-5)
    (True, True)

    References:
        Bécigneul & Ganea, ICLR 2019 (one second moment for each manifold of a product).
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        if not (0 <= betas[0] < 1 and 0 <= betas[1] < 1):
            raise OptionError(f"betas: expected two numbers in [0, 1), got {betas}")
        finite("lr", lr, least=0)
        finite("eps", eps, positive=True)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def moved(self, w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        one, two = group["betas"]
        g = tangent(w, g)
        # The momentum is tangent at the last point: project it onto the tangent space here.
        mean = g * (1 - one) if state["step"] == 1 else tangent(w, state["exp_avg"]).lerp(g, 1 - one)
        # v starts at 0; dividing by 1 - two ** step below removes the bias towards 0
        square = two * state.get("exp_avg_sq", torch.zeros((), device=g.device)) + (1 - two) * g.square().mean()
        state["exp_avg"], state["exp_avg_sq"] = mean, square
        size = (square / (1 - two ** state["step"])).sqrt() + group["eps"]
        return retract(w - group["lr"] * mean / ((1 - one ** state["step"]) * size))


class Together(Optimizer):
    """Joins optimisers of disjoint parameters: it has the groups of all, and one step is a step of each.

    >>> weight, bias = nn.Parameter(torch.eye(2)), nn.Parameter(torch.zeros(2))
    >>> both = Together([SpectralDescent([weight]), torch.optim.Adam([bias])])
    >>> [len(group["params"]) for group in both.param_groups]
    [1, 1]
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every part."""
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()  # without closure: the gradients are computed
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The states of the parts."""
        return {"state": {}, "parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of every part; ``OptionError`` for another number of parts."""
        states = state_dict.get("parts", [])
        if len(states) != len(self.parts):
            raise OptionError(f"expected the states of {len(self.parts)} optimisers, got {len(states)}")
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)  # makes new groups
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def build(options: Numbers, model: nn.Module, device: torch.device) -> Optimizer:
    """The optimiser named by ``options`` for all trained parameters of ``model``, which will be on ``device``.

    Raises:
        OptionError: Stiefel layers without an optimiser for their manifold, or such an optimiser without these layers.
    """
    inner, outer = split(model)
    along, lr = options.optimizer in ("spectral", "riemannian_adam"), options.lr
    if along != bool(inner):
        wanted = "optimizer spectral or riemannian_adam for Stiefel layers"
        wanted = wanted if inner else f"Stiefel layers for optimizer {options.optimizer}"
        raise OptionError(f"expected {wanted}, got {options.optimizer if inner else type(model).__name__}")
    parts: list[Optimizer] = []
    if options.optimizer == "spectral":  # its rate is in radians a step, so it does not default to lr
        parts = [SpectralDescent(inner, options.manifold_lr or 0.02)]
    elif options.optimizer == "riemannian_adam":
        parts = [RiemannianAdam(inner, options.manifold_lr or lr)]
    if outer:  # torch refuses an empty optimiser
        # On a CPU one call for all parameters; torch's default makes a dozen calls for each.
        fused = True if device.type == "cpu" and all(p.is_floating_point() for p in outer) else None
        kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        more = {"momentum": options.momentum} if options.optimizer == "sgd" else {}
        make = kinds.get(options.optimizer, torch.optim.Adam)
        parts.append(make(outer, lr=lr, weight_decay=options.weight_decay, fused=fused, **more))
    return Together(parts) if along else parts[0]


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trained parameters of ``model``: those of Stiefel layers, and all others."""
    free = [m.free for m in model.modules() if isinstance(m, OnManifold)]
    first = [p for p in free if isinstance(p, nn.Parameter) and p.requires_grad]
    known = {id(p) for p in first}  # ids, because == compares entries
    return first, [p for p in model.parameters() if p.requires_grad and id(p) not in known]
