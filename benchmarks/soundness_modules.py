"""Draws of `benchmarks.soundness` in which the user's options are odd: what they assume must be checked, not believed.

Integer programs are compared with float64, which is exact enough by far, and attacked inside their radii; products
behind modules of negative options are compared with secants in the box; modules are put on ranks and sizes that they
were not made for, by `lipkit` and by the checker, and must compute what torch does, sample by sample.
"""

from __future__ import annotations

import copy
import json
import random
import tempfile
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch
from benchmarks.soundness_draws import FORMATS, Failure, entries, linear
from torch import Tensor, nn

import lipkit
import lipkit_check
from benchmarks import forward_passes
from lipkit.errors import LipkitError
from lipkit.interop import integer_program
from lipkit.modules import (
    Affine,
    GroupSort,
    L2NormPool2d,
    MaxMin,
    Mean,
    Network,
    Permute,
    Piece,
    Reshape,
    Roll,
    Shift2d,
)
from lipkit.modules.storage import describe

# --- integer programs -------------------------------------------------------------------------------------------------

WINDOWS = (2, 3, 5, 6, 7, (1, 3), (1, 5), (1, 6), (3, 1), (5, 1), (2, 3), (3, 5))


def _pooling(draw: random.Random) -> tuple[nn.Module, tuple[int, int]]:
    """An average, and the height and width of images that it takes."""
    window = draw.choice(WINDOWS)
    kernel = window if isinstance(window, tuple) else (window, window)
    size = (kernel[0] * draw.choice((1, 1, 2)), kernel[1] * draw.choice((1, 1, 2)))
    kind = draw.randrange(5)
    if kind == 0:
        return nn.AdaptiveAvgPool2d(draw.choice((1, (size[0] // kernel[0], size[1] // kernel[1]), (1, None)))), size
    if kind == 1:
        return Mean(2, 3, keepdim=draw.random() < 0.5), size
    stride = draw.choice((None, None, 1, 2, kernel))
    divisor = draw.choice((None, None, None, 3, 5, -7, -4, 10))
    return nn.AvgPool2d(window, stride, divisor_override=divisor), size


def integer_programs(draw: random.Random) -> None:
    """Averages in integer programs: errors within those proved, and no other class inside a radius."""
    dtype = draw.choice(list(FORMATS.values()))
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    pool, size = _pooling(draw)
    channels = draw.choice((1, 1, 2))
    shape = (channels, *size)
    front = draw.choice((None, None, "affine", "relu", "leaky", "conv", "maxmin"))
    body: list[nn.Module] = []
    if front == "affine":
        body.append(Affine(torch.randn(channels, generator=generator).to(dtype), torch.zeros(channels, dtype=dtype)))
    elif front == "conv":
        body.append(nn.Conv2d(channels, channels, draw.choice((1, 3)), 1, "same", dtype=dtype))
        body[0].weight.data = torch.randn(body[0].weight.shape, generator=generator).to(dtype)
    elif front == "maxmin" and channels == 2:
        body.append(MaxMin())
    elif front in ("relu", "leaky"):
        body.append(nn.ReLU() if front == "relu" else nn.LeakyReLU(draw.choice((0.1, 0.3, -0.5))))
    body += [pool, nn.Flatten()]
    with torch.no_grad():
        features = nn.Sequential(*body)(torch.zeros(1, *shape, dtype=dtype)).shape[1]
    classes = draw.choice((2, 2, 3))
    weight = torch.randn(classes, features, generator=generator, dtype=torch.float64)
    weight = weight.sign() if draw.random() < 0.3 else weight
    bias = torch.randn(classes, generator=generator, dtype=torch.float64) * draw.choice((0.0, 0.1, 0.5, 2.0))
    low, high = draw.choice(((0.0, 1.0), (0.0, 1.0), (-1.0, 1.0), (-0.5, 3.0)))
    # Inputs on a grid, some of them all alike: sums of few numbers then decide.
    x = torch.rand(4, *shape, generator=generator, dtype=torch.float64)
    x[0], x[1] = draw.choice((0.9375, 0.25, 1.0)), x[1].round()
    x = (x * (high - low) + low).mul(2**20).round().div(2**20)
    for head in ([], [linear(weight.to(dtype), bias.to(dtype))]):
        network = lipkit.export(nn.Sequential(*body, *head), shape)
        network.input_range = (low, high)
        _errors(network, x)
    program, exact = integer_program(network)[0], copy.deepcopy(network).double()
    x, labels = x.to(dtype), program(x.to(dtype)).argmax(1)
    certificate = lipkit.certify(network, x, labels, evaluator="integer")
    for sample, label, radius in zip(x.double(), labels.tolist(), certificate.radius.tolist(), strict=True):
        if radius > 0:
            _attacked(network, exact, sample, label, radius, generator)


def _errors(network: Network, x: Tensor) -> None:
    """The outputs of the integer program are as near to the exact ones as it is proved."""
    program, _ = integer_program(network)
    exact = copy.deepcopy(network).double()
    with torch.no_grad():
        y, found = exact(x), program(x)
    off, scale = (found - y).abs(), 2.0**-46 * (1 + float(y.abs().max()))
    if program.own_error is None:
        most = torch.full((len(x), 1), program.body_error, dtype=torch.float64)
        off = off.norm(dim=1, keepdim=True)
    else:
        most = (program.own_error + exact[-1].weight.norm(dim=1) * program.body_error).expand_as(off)
    if bool((off > most * (1 + 1e-9) + scale).any()):
        worst = float((off / most).max())
        raise Failure(f"{list(network)} on {network.input_range}: {worst:.3g} times the error that is proved")


def _attacked(
    network: Network, exact: nn.Module, x: Tensor, label: int, radius: float, generator: torch.Generator
) -> None:
    """Points inside the radius, in float64: towards each other class of the exact function, and anywhere."""
    low, high = network.input_range or (0.0, 1.0)
    program, _ = integer_program(network)
    point = x.clone().requires_grad_()
    with torch.enable_grad():
        y = exact(point[None])[0]
        rivals = [value - y[label] for i, value in enumerate(y) if i != label]
        slopes = [torch.autograd.grad(rival, point, retain_graph=True)[0] for rival in rivals]
    directions = torch.stack([*slopes, *torch.randn(8, *x.shape, generator=generator, dtype=torch.float64)])
    points = []
    for direction in directions:
        if float(direction.norm()) > 0:
            unit = direction / direction.norm()
            points += [x + radius * f * unit for f in (1 - 1e-12, 1 - 1e-10, 1 - 1e-9, 1 - 1e-8, 1 - 1e-6, 0.5)]
    if not points:
        return
    moved = torch.stack(points)
    moved = torch.cat((moved, moved.clamp(low, high)))
    moved = moved[(moved - x).flatten(1).norm(dim=1) * (1 + 1e-15) < radius]
    logits = program.run(program.quantise(moved))
    others = logits.clone()
    others[:, label] = -(2**62)
    if bool((logits[:, label] <= others.amax(1)).any()):
        at = int((logits[:, label] <= others.amax(1)).nonzero()[0])
        distance = float((moved[at] - x).norm())
        where = x.flatten().tolist()
        raise Failure(f"{list(network)}: radius {radius!r} for class {label} at {where}, another at {distance!r}")


# --- products on a box ------------------------------------------------------------------------------------------------


def _halving(draw: random.Random, channels: int) -> nn.Module:
    """A module that halves images of 4 x 4, often with a sign, count or slope that is not positive."""
    number = draw.choice((-4.0, -1.5, -1.0, -0.5, 0.0, 0.5, 2.0, 3.0))
    half = lambda: nn.AvgPool2d(2, divisor_override=draw.choice((None, -4, -1, 1, 3, 4, -7)))  # noqa: E731
    numbers = lambda: torch.randn(channels)  # noqa: E731
    prelu, batch = nn.PReLU(channels), nn.BatchNorm2d(channels)
    group, instance = nn.GroupNorm(1, channels), nn.InstanceNorm2d(channels, affine=True)
    for module in (prelu, batch, group, instance):
        module.weight.data = numbers()
    batch.running_mean, batch.running_var = numbers(), torch.rand(channels) + 0.1
    makers: list[Callable[[], list[nn.Module]]] = [
        *(lambda: [half()],) * 4,
        lambda: [half(), nn.LeakyReLU(number)],
        lambda: [nn.LeakyReLU(number), half()],
        lambda: [half(), nn.ELU(number)],
        lambda: [half(), nn.CELU(number or 1.0)],
        lambda: [half(), nn.Softplus(number or 1.0)],
        lambda: [half(), nn.Hardtanh(min(number, 0.25), max(number, 0.75))],
        lambda: [half(), nn.Softshrink(abs(number))],
        lambda: [prelu, half()],
        lambda: [batch, half()],
        lambda: [group, half()],
        lambda: [instance, half()],
        lambda: [nn.Conv2d(channels, channels, 2, 2)],
        lambda: [nn.MaxPool2d(2)],
        lambda: [nn.MaxPool2d(3, 2, 1)],
        lambda: [nn.AvgPool2d(3, 2, 1, False, draw.random() < 0.5, draw.choice((None, -2, 5)))],
        lambda: [nn.AdaptiveAvgPool2d(2), Affine(numbers(), numbers())],
        lambda: [half(), draw.choice((nn.Sigmoid, nn.Tanh, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish))()],
        lambda: [half(), nn.Softmax(draw.choice((1, 2, -1, -3)))],
        lambda: [half(), nn.Flatten(2), nn.LayerNorm(4, eps=0.1), nn.Unflatten(2, (2, 2))],
        lambda: [half(), nn.Upsample(scale_factor=2), half()],
    ]
    return nn.Sequential(*draw.choice(makers)())


class Products(nn.Module):
    """Products and sums of halved images."""

    JOINS = (
        *("p * q", "p * q + r", "torch.relu(p * q) - r", "(p * q) * r", "p * q / 4 + p", "torch.cat((p * q, r), 1)"),
        *("p @ q", "torch.maximum(p * q, r)", "p * torch.sigmoid(q)", "-(p * p)", "p * (1 - q)", "(p - q) * (p + q)"),
        *("(p + q) * r", "(p + q) * (p + r)", "(p + q) ** 2 - r", "torch.maximum(p, q) * r", "(p - q) * (r + q)"),
    )

    def __init__(self, draw: random.Random, channels: int) -> None:
        super().__init__()
        self.p, self.q, self.r = (_halving(draw, channels) for _ in range(3))
        self.join = draw.choice(self.JOINS)
        self.function = {join: eval(f"lambda p, q, r: {join}", {"torch": torch}) for join in self.JOINS}[self.join]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.p(x), self.q(x), self.r(x))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        pools = [m for m in self.modules() if isinstance(m, nn.AvgPool2d)]
        return f"{self.join}; divisors {[pool.divisor_override for pool in pools]}"


def boxes(draw: random.Random) -> None:
    """Products of two values on a box: the bound is above all secants, and the export is the same function there."""
    torch.manual_seed(draw.randrange(2**31))
    channels = draw.choice((1, 2))
    model, shape = Products(draw, channels).eval(), (channels, 4, 4)
    low, high = draw.choice(((0.0, 1.0), (-1.0, 1.0), (-2.0, 0.5), (0.5, 3.0), (-3.0, -1.0)))
    upper = lipkit.analyze(model, shape, box=(low, high), restarts=0).upper
    plain = lipkit.export(model, shape, box=(low, high))
    bound = float(lipkit.lipschitz(plain).detach())
    x = torch.rand(60, *shape)
    x[10:30] = x[10:30].round()
    x[:4] = torch.tensor([0.0, 1.0, 0.5, 1.0]).view(4, 1, 1, 1)
    x = low + (high - low) * x
    nearby = (x + torch.randn_like(x) * torch.tensor([1.0, 0.1, 0.01]).repeat(20).view(60, 1, 1, 1)).clamp(low, high)
    with torch.no_grad():
        y, z, w = model(x).double(), model(nearby).double(), plain(x).double()
    what = f"{' '.join(str(model).split())} on {(low, high)}"
    if not bool(((y - w).abs() <= 1e-4 * (1 + y.abs().max())).all()):
        raise Failure(f"{what}: the export is another function, off by {float((y - w).abs().max()):.3g}")
    moved, distance = (y - z).flatten(1).norm(dim=1), (x - nearby).double().flatten(1).norm(dim=1)
    noise = 1e-5 * (1 + float(y.abs().max()))
    for name, value in (("analyze", upper), ("lipschitz of the export", bound)):
        if bool((moved > value * (1 + 1e-6) * distance + noise).any()):
            steepest = float(((moved - noise) / distance).max())
            raise Failure(f"{what}: {name} says {value:.6g}, a secant has slope {steepest:.6g}")


# --- ranks and sizes --------------------------------------------------------------------------------------------------


INSTANCES = (nn.InstanceNorm1d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def _module(draw: random.Random, n: int) -> nn.Module:
    """A module with a rule, its options made for about n channels."""
    dim = draw.randint(-4, 4)
    two = draw.choice((1, 2, 3, (1, 2), (2, 1)))
    other = draw.choice((n, n, n, 1, 2, 3))
    makers: list[Callable[[], nn.Module]] = [
        *(lambda: nn.Softmax(dim),) * 3,
        *(lambda k=k: k(n, affine=draw.random() < 0.5) for k in INSTANCES),
        *(lambda k=k: k(n) for k in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)),
        lambda: nn.GroupNorm(draw.choice((1, n)), n),
        lambda: nn.LayerNorm(draw.choice(((n,), (n, n), (other,), (2, n)))),
        lambda: nn.Linear(n, other),
        lambda: nn.Conv1d(n, other, draw.choice((1, 2))),
        lambda: nn.Conv2d(n, other, two),
        lambda: nn.Conv3d(n, other, 1),
        lambda: nn.ConvTranspose1d(n, other, 2, 2),
        lambda: nn.ConvTranspose2d(n, other, two),
        lambda: nn.AvgPool2d(two, draw.choice((None, 1)), divisor_override=draw.choice((None, None, -4, 3))),
        lambda: nn.MaxPool2d(two),
        lambda: nn.AdaptiveAvgPool2d(draw.choice((1, 2, (1, None), (None, 1), 3))),
        lambda: L2NormPool2d(draw.choice((None, 1, 2))),
        lambda: MaxMin(),
        lambda: GroupSort(draw.choice((1, 2, n))),
        lambda: nn.PReLU(draw.choice((1, n))),
        lambda: nn.Flatten(draw.choice((1, 1, 0, 2, -1, -2)), draw.choice((-1, -1, -2, 2, 0))),
        lambda: nn.Unflatten(draw.choice((1, 0, 2, -1)), draw.choice(((n, 1), (-1, 1), (1, -1), (2, -1)))),
        lambda: nn.PixelShuffle(draw.choice((1, 2))),
        lambda: nn.PixelUnshuffle(draw.choice((1, 2))),
        lambda: nn.ChannelShuffle(draw.choice((1, n))),
        lambda: nn.Upsample(scale_factor=2, mode=draw.choice(("nearest", "bilinear"))),
        lambda: nn.ZeroPad2d(draw.choice((1, (0, 1, 1, 0), -1))),
        lambda: Affine(torch.randn(n), torch.randn(n)),
        lambda: Mean(*draw.sample((1, 2, 3, 4), draw.randint(1, 2)), keepdim=draw.random() < 0.5),
        lambda: Permute(draw.choice(((1, 2, 0), (1, 0), (0, 2, 1), (2, 1, 0)))),
        lambda: Reshape(draw.choice(((-1,), (n, -1), (-1, n), (1, -1)))),
        lambda: Roll(draw.choice((1, -1)), draw.choice((0, 1, 2, 3))),
        lambda: Piece(draw.choice((0, 1, 2)), 0, 1),
        lambda: Shift2d(1, draw.choice((0, 1))),
        lambda: draw.choice((nn.ReLU, nn.Tanh, nn.GELU, nn.Softplus, nn.Identity, nn.Dropout, nn.Dropout2d))(),
    ]
    return draw.choice(makers)()


def ranks(draw: random.Random) -> None:
    """One module on a shape that it may not be made for: refused, or what torch computes, sample by sample."""
    torch.manual_seed(draw.randrange(2**31))
    n = draw.choice((1, 2, 3, 4))
    try:
        module = _module(draw, n).eval()
    except (LipkitError, TypeError, ValueError, RuntimeError, IndexError):
        return
    for parameter in module.parameters():
        parameter.data = entries(draw, torch.float32, *parameter.shape).clamp(-3, 3)
    sizes = [draw.choice((1, 2, 3, 4)) for _ in range(draw.randint(1, 4))]
    if draw.random() < 0.8:
        sizes[0 if draw.random() < 0.6 else -1] = n
    shape = tuple(sizes)
    x = torch.randn(3, *shape)
    try:
        with torch.no_grad():
            alone = torch.cat([module(sample[None]) for sample in x])
            together = module(x)
        good = alone.shape == together.shape and torch.allclose(alone, together, 1e-4, 1e-5) and len(together) == len(x)
        raises = False
    except (RuntimeError, ValueError, IndexError, LipkitError):
        alone, good, raises = x, False, True  # most modules that could be forged keep the shape
    slope = _slope(module, x) if good else 0.0
    what = f"{module} on {shape}"
    answers = 0
    for name, ask in (
        ("lipschitz", lambda: float(lipkit.lipschitz(Network([copy.deepcopy(module)], shape)).detach())),
        ("analyze", lambda: lipkit.analyze(module, shape, restarts=0).upper),
        ("export", lambda: _exported(module, shape, x, alone, good, what)),
        ("load", lambda: _loaded(module, shape, x, alone, good, what)),
        ("checker", lambda: _checked(module, shape, x, alone, good, what)),
    ):
        try:
            bound = ask()
        except (LipkitError, lipkit_check.Refused):
            continue
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            if name == "checker":
                continue  # a raw error there is no confirmation
            if raises and name in ("lipschitz", "export"):
                continue
            raise Failure(f"{what}: {name} raised {type(error).__name__}: {error}") from None
        answers += 1
        if raises and name in ("lipschitz", "export"):
            continue  # there is no such function, and nothing that claims to have met it
        if bound is not None and not good:
            raise Failure(f"{what}: {name} says {bound:.6g} of what torch does not compute sample by sample")
        if bound is not None and not slope <= bound * (1 + 1e-5) + 1e-5:
            raise Failure(f"{what}: {name} says {bound:.6g}, a difference has slope {slope:.6g}")
    if answers == 0:
        raise lipkit.errors.NoRuleError("refused by all")


def _slope(module: nn.Module, x: Tensor) -> float:
    worst = 0.0
    with torch.no_grad():
        for _ in range(20):
            step = torch.randn_like(x) * 0.1
            moved = (module(x + step) - module(x)).double().reshape(len(x), -1).norm(dim=1)
            far = ((x + step) - x).double().flatten(1).norm(dim=1)
            worst = max(worst, float(((moved - 1e-5 * (1 + moved)) / far).max()))
    return worst


def _compare(found: Tensor, alone: Tensor, what: str) -> None:
    if found.shape != alone.shape or not torch.allclose(found, alone, 1e-3, 1e-4, equal_nan=True):
        raise Failure(f"{what}: another function than the module's own")


def _exported(module: nn.Module, shape: tuple[int, ...], x: Tensor, alone: Tensor, good: bool, what: str) -> float:
    plain = lipkit.export(copy.deepcopy(module), shape)
    if good:
        with torch.no_grad():
            _compare(plain(x), alone, f"{what}: export")
    return float(lipkit.lipschitz(plain).detach())


def _forged(module: nn.Module, shape: tuple[int, ...], out: int) -> Network:
    """A classifier of inputs of this shape whose first module is the given one."""
    return Network([copy.deepcopy(module), nn.Flatten(), nn.Linear(out, 2)], shape)


def _loaded(module: nn.Module, shape: tuple[int, ...], x: Tensor, alone: Tensor, good: bool, what: str) -> None:
    """``save`` and ``load`` refuse a network that is none, or give back the same function."""
    network = _forged(module, shape, alone[0].numel())
    with tempfile.TemporaryDirectory() as folder:
        lipkit.modules.save(network, folder)
        found = lipkit.modules.load(folder)
    if not good:
        raise Failure(f"{what}: load gives a network of what torch does not compute sample by sample")
    with torch.no_grad():
        _compare(found(x), network(x), f"{what}: load")


def _checked(module: nn.Module, shape: tuple[int, ...], x: Tensor, alone: Tensor, good: bool, what: str) -> None:
    """The independent checker: refused, or the same logits as torch and a constant above the slope."""
    network = _forged(module, shape, alone[0].numel())
    tensors = {name: value.detach().numpy() for name, value in network.state_dict().items()}
    lipkit_check.ops = lipkit_check.Floats()
    found = lipkit_check.Network(json.loads(json.dumps(describe(network))), tensors)
    logits = np.concatenate([c for c, _ in found.logits(x.numpy(), 1)])
    if not good:
        raise Failure(f"{what}: the checker computes what torch does not, sample by sample")
    with torch.no_grad():
        _compare(torch.from_numpy(logits.astype(np.float64)), network(x).double(), f"{what}: checker")
    slope = _slope(network, x)
    if Fraction(slope) * (1 - Fraction(1, 10**5)) - Fraction(1, 10**5) > found.gain:
        raise Failure(f"{what}: the checker says {float(found.gain):.6g}, a difference has slope {slope:.6g}")


# --- forward passes ---------------------------------------------------------------------------------------------------


def forward(draw: random.Random) -> None:
    """Networks that look at the batch, and others: `benchmarks.forward_passes`."""
    kinds = [kind for kind in forward_passes.KINDS if kind != "hidden"]
    kind, shape, source = forward_passes.draw(draw.randrange(2**31), 0, kinds)
    word, found = forward_passes.attempt(kind, shape, source)
    if found:
        raise Failure(f"{source!r}: {'; '.join(found)}")
    if word.endswith("refused"):
        raise lipkit.errors.NoRuleError(word)


KINDS = (integer_programs, boxes, ranks, forward)
