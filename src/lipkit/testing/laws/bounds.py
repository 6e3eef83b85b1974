"""Laws of the bound, the shapes and the gradients: sound (1), attained (2), gradients (9), trained (10), sizes (11)."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.func import functional_call

from lipkit.layers import after_step
from lipkit.lowering import export, lipschitz
from lipkit.modules import Shape
from lipkit.testing.case import Case, LawBroken, forward, require, require_bound, require_same, states
from lipkit.testing.reference import operators, singular_values, steepest_secant, tolerance


def true_norm(layer: nn.Module, case: Case, shape: Shape, dtype: torch.dtype) -> float:
    """The norm of an affine layer's matrix, else the largest of its Jacobians and secants."""
    x = case.x(shape, batch=4, dtype=dtype)
    return max(float(singular_values(operators(layer, x[:2])).max()), steepest_secant(layer, x))


def check_bounds(layer: nn.Module, case: Case, shape: Shape) -> dict[str, float]:
    """Check norm <= bound of the export <= bound of the layer, in its present mode and at one input shape."""
    eps = case.eps(shape)
    claimed = float(lipschitz(layer, shape).detach())
    require(math.isfinite(claimed), f"input {shape}: expected a finite lipschitz(layer), got {claimed}")
    reached = true_norm(layer, case, shape, case.dtype)
    place = f"input {shape} (training={layer.training}): expected"
    require_bound(reached, claimed, eps, f"{place} a norm of at most lipschitz(layer)")
    network = export(layer, shape)
    proved = float(lipschitz(network))
    # The proof adds a rounding allowance of the order n^2 u times the condition of a diagonal scaling.
    proof = tolerance(max(8, math.prod(shape)) ** 2, torch.float64, c=256.0)
    allowed = case.slack + eps + proof
    require_bound(proved, claimed, allowed, f"{place} lipschitz(export(layer)) of at most lipschitz(layer)")
    exported = true_norm(network, case, shape, case.dtype)
    require_bound(exported, proved, eps, f"{place} the exported layer to have a norm of at most its bound")
    if case.dtype != torch.float64:
        # In float64 arithmetic the bound of the same numbers must hold to float64 rounding.
        double = copy.deepcopy(network).double()
        exact, bound = true_norm(double, case, shape, torch.float64), float(lipschitz(double))
        allowed = tolerance(max(8, math.prod(shape)), torch.float64)
        what = f"{place} the exported layer in float64 to have a norm of at most its bound"
        require_bound(exact, bound, allowed, what)
    return {"norm": reached, "claimed": claimed, "proved": proved, "exported": exported}


def sound(case: Case) -> dict[str, float]:
    """Law 1, at every input shape: true norms and bounds stay in order for the layers of `states`."""
    measured: dict[str, float] = {}
    for shape in case.input_shapes:
        for layer in states(case):
            found = check_bounds(layer, case, shape)
            measured = {key: max(value, measured.get(key, 0.0)) for key, value in found.items()}
            if case.claim != "none":
                what = f"input {shape} (training={layer.training}): expected lipschitz(layer) of at most the gamma"
                require_bound(found["claimed"], case.gamma * (1 + case.slack), case.eps(shape), f"{what} claimed")
    return measured


def attained(case: Case) -> dict[str, float]:
    """Law 2, at every input shape: the bound is reached, by all singular values if orthogonal, else by the largest."""
    smallest, largest = float("inf"), 0.0
    for shape in case.input_shapes:
        for layer in states(case):
            claimed = float(lipschitz(layer, shape).detach())
            x = case.x(shape, batch=4)
            # Far from the origin the biases do not decide on which side of its kink a unit is.
            values = singular_values(operators(layer, torch.cat((x[:2], 30 * x[2:]))))
            low, high = float(values.min()), float(values.max())
            smallest, largest = min(smallest, low), max(largest, high)
            if case.claim == "orthogonal":
                # Declared truncation may lower singular values by as much as it raises the bound.
                allowed = case.eps(shape) + min(max(claimed / case.gamma - 1, 0.0), case.slack)
                fits = case.gamma * (1 - allowed) <= low and high <= case.gamma * (1 + allowed)
                what = f"every singular value in {case.gamma:.6g} * (1 +- {allowed:.2g})"
            else:
                aim = case.attained * (case.gamma if case.claim == "contraction" else claimed) * (1 - case.eps(shape))
                fits = high >= aim
                what = f"a largest singular value of at least {aim:.6g}, {case.attained:.3g} of the bound"
            place, got = f"input {shape}: expected", f"(training={layer.training}), got {low:.9g} to {high:.9g}"
            require(fits, f"{place} {what} {got}")
    return {"smallest": smallest, "largest": largest}


STEPS, RATE = 5, 1.0


def trained(case: Case) -> dict[str, float]:
    """Law 10: bounds hold after Adam steps of rate 1 that push the outputs away from zero, and after `after_step`."""
    layer = case.layer()
    if any(p.requires_grad for p in layer.parameters()):
        optimiser = torch.optim.Adam(layer.parameters(), lr=RATE)
        for step in range(STEPS):
            optimiser.zero_grad()
            y = layer(case.x(extra=37 + step))
            (-y.square().mean() + y.mean()).backward()  # outputs grow; the mean avoids gradients of zero by symmetry
            optimiser.step()
        broken = [name for name, p in layer.named_parameters() if not bool(torch.isfinite(p).all())]
        what = f"{STEPS} Adam steps of rate {RATE}"
        require(not broken, f"expected finite parameters after {what}, got others in {broken}")
    before = {**check_bounds(layer, case, case.shape), **check_bounds(layer.eval(), case, case.shape)}
    if not after_step(layer, case.shape):
        return before
    finished = check_bounds(layer, case, case.shape)
    return {name: max(value, finished[name]) for name, value in before.items()}


def expected_shape(layer: nn.Module, shape: Shape) -> Shape | None:
    """Output shape that follows from the attributes of a layer; None if they do not tell."""
    attribute: dict[str, Any] = vars(layer)
    if "out_features" in attribute:
        return (*shape[:-1], attribute["out_features"])
    if "out_channels" in attribute and len(shape) == 3:
        stride = attribute.get("stride", 1)
        steps = (stride, stride) if isinstance(stride, int) else tuple(stride)
        return (attribute["out_channels"], shape[1] // steps[0], shape[2] // steps[1])
    return None


def sizes(case: Case) -> dict[str, float]:
    """Law 11: shapes are right, and a layer that has seen other sizes gives the outputs of a new one."""
    used = case.moved(case.layer())
    for shape in (*case.input_shapes, *reversed(case.input_shapes)):
        x = case.x(shape)
        y = forward(used, x)
        expected = case.output_shape(shape) if case.output_shape else expected_shape(used, shape)
        if expected is not None:
            what = f"input {shape}: expected an output of shape {tuple(expected)}, got {tuple(y.shape[1:])}"
            require(tuple(y.shape) == (len(x), *expected), what)
        new = case.moved(case.layer())
        require_same(y, forward(new, x), case.eps(shape), f"input {shape} after other sizes, against a new layer")
        one = forward(used, x[:1])
        require_same(one, y[:1], case.eps(shape), f"input {shape}: one sample against the same one in a batch")
    return {"sizes": float(len(case.input_shapes))}


def _repeated_matrices(p: Tensor) -> Tensor:
    """Random semi-orthogonal matrices of the shape of p: all their singular values are 1."""
    if p.ndim < 2:
        return p
    tall = p.shape[-2] >= p.shape[-1]
    q, _ = torch.linalg.qr(torch.randn_like(p if tall else p.mT, dtype=torch.float64))
    return q if tall else q.mT  # orthonormal columns, or rows


def _repeated_kernel(p: Tensor) -> Tensor:
    """A kernel of the shape of p with one random semi-orthogonal tap: the convolution has all singular values 1."""
    if p.ndim != 4:
        return _repeated_matrices(p)
    kernel = torch.zeros_like(p)
    kernel[:, :, (p.shape[2] - 1) // 2, (p.shape[3] - 1) // 2] = _repeated_matrices(p[:, :, 0, 0])
    return kernel


POINTS: dict[str, Callable[[Tensor], Tensor]] = {
    "random parameters": lambda p: p,
    "repeated singular values of matrices": _repeated_matrices,
    "repeated singular values of a kernel": _repeated_kernel,
    "zero matrices": lambda p: torch.zeros_like(p) if p.ndim >= 2 else p,
    "zero parameters": torch.zeros_like,
}


def _finite(layer: nn.Module, x: Tensor, where: str) -> None:
    x = x.clone().requires_grad_()
    y = layer(x)
    bad = int((~y.isfinite()).sum())
    require(not bad, f"{where}: expected a finite output, got {bad} others")
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)).sum().backward()
    for name, p in (("input", x), *layer.named_parameters()):
        grad = p.grad
        bad = 0 if grad is None else int((~grad.isfinite()).sum())
        require(not bad, f"{where}: expected a finite gradient of {name}, got {bad} entries that are not")


def _right(layer: nn.Module, x: Tensor, where: str) -> None:
    names = [name for name, p in layer.named_parameters() if p.requires_grad]
    values = [p.detach().clone().requires_grad_() for p in layer.parameters() if p.requires_grad]

    def f(x: Tensor, *parameters: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            gradcheck(f, (x.clone().requires_grad_(), *values), fast_mode=True)  # along random directions
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise LawBroken(f"{where}: expected gradients that agree with finite differences, got {reason}") from None


def gradients(case: Case) -> dict[str, float]:
    """Law 9, in float64: gradients pass gradcheck at random weights and repeated singular values; finite at zero."""
    x = case.x(batch=2, dtype=torch.float64)  # finite differences need float64
    for where, point in POINTS.items():
        layer = case.moved(case.layer(dtype=torch.float64))
        with case.random(31), torch.no_grad():
            for p in layer.parameters():
                p.copy_(point(p.detach().clone()))
        _finite(layer, x, where)
        if where.startswith("random") or (where.startswith("repeated") and case.smooth):
            _right(layer, x, where)
        if not any(True for _ in layer.parameters()):
            break
    return {}
