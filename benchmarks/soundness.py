"""Claim: no bound lies below the truth, and no point inside a sound radius is classified otherwise by the machine.

    python -m benchmarks.soundness --minutes 10          # draws until the time is over, or a failure
    python -m benchmarks.soundness --only 417            # one draw again

Each draw makes something extreme from its own seed: parameters and inputs from the whole range of a number format,
settings of torch, functions that change dtypes. A sentence of lipkit (`LipkitError`) is a fair answer; a raw error, a
bound below a dense norm or a finite difference, or a point inside a radius that breaks it, is a failure.
`lipschitz` is compared with singular values and finite differences, `analyze` with finite differences, `certify` with
an attack in the evaluator's own arithmetic. Integer programs, products on a box, modules at odd ranks and forward
passes that look at the batch are in `benchmarks.soundness_modules`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from benchmarks.soundness_draws import (
    EXPONENTS,
    FORMATS,
    Failure,
    entries,
    extreme,
    linear,
    norm_of,
    not_above,
    setting,
)
from torch import Tensor, nn

import lipkit
from benchmarks import soundness_modules
from lipkit.errors import LipkitError
from lipkit.layers import families
from lipkit.modules import Affine, GroupSort, MaxMin
from lipkit.testing import dense_matrix


def activation(draw: random.Random, dtype: torch.dtype, width: int) -> nn.Module:
    """An activation or an entrywise layer, its parameters anywhere in the format."""
    number = lambda: extreme(draw, dtype)  # noqa: E731
    prelu = nn.PReLU(width, dtype=dtype)
    prelu.weight.data = entries(draw, dtype, width)
    # Above the subnormal numbers, which torch 2.11 takes for 0 where they are flushed, and refuses.
    norm = nn.BatchNorm1d(width, eps=max(abs(number()) or 1e-5, 1e-300), dtype=dtype).eval()
    norm.weight.data, norm.bias.data = entries(draw, dtype, width), entries(draw, dtype, width)
    norm.running_var = entries(draw, dtype, width).abs()
    low, high = sorted((number(), number()))
    made: list[Callable[[], nn.Module]] = [
        lambda: nn.Softplus(beta=number(), threshold=number()),
        lambda: nn.Softplus(beta=draw.choice((1, 1000, 1e-3)), threshold=draw.choice((20, 80, 100, 700, 710, 1e6))),
        lambda: nn.LeakyReLU(number()),
        # A slope below the normal range, which the format rounds by much more than a unit in the last place.
        lambda: nn.LeakyReLU(math.ldexp(draw.uniform(1, 2), draw.choice(EXPONENTS[dtype][:4]))),
        lambda: prelu,
        lambda: nn.ELU(number()),
        lambda: nn.CELU(number() or 1.0),
        lambda: nn.Hardtanh(low, high) if low < high else nn.Hardtanh(),
        lambda: nn.Softshrink(abs(number())),
        lambda: norm,
        lambda: Affine(entries(draw, dtype, width), entries(draw, dtype, width)),
        lambda: draw.choice((nn.ReLU, nn.ReLU6, nn.Tanh, nn.Softsign, nn.LogSigmoid, nn.Sigmoid, nn.Tanhshrink))(),
        lambda: draw.choice((nn.GELU, nn.SiLU, nn.Mish, nn.SELU, nn.Hardswish, nn.Hardsigmoid))(),
        lambda: MaxMin() if width % 2 == 0 else GroupSort(1),
        lambda: nn.LayerNorm(width, eps=abs(number()) or 1e-5, dtype=dtype),
    ]
    return draw.choice(made)()


def matrix_norms(draw: random.Random) -> None:
    """Dense layers and kernels of any numbers against their dense matrices."""
    dtype = draw.choice(list(FORMATS.values()))
    if draw.random() < 0.5:
        module: nn.Module = linear(entries(draw, dtype, draw.randint(1, 4), draw.randint(1, 4)))
        truth, exponent = norm_of(module.weight.data)
        shape: tuple[int, ...] = (module.in_features,)
    else:
        size, padding = draw.choice((1, 2, 3)), draw.choice((0, 1))
        mode = draw.choice(("zeros", "circular"))
        module = nn.Conv2d(2, 2, size, draw.choice((1, 2)), padding, padding_mode=mode, bias=False, dtype=dtype)
        module.weight.data = entries(draw, dtype, *module.weight.shape)
        shape = (2, 4, 4)
        scale = int(torch.frexp(module.weight.data.double().abs().max())[1])
        twin = nn.Conv2d(2, 2, size, module.stride, padding, padding_mode=mode, bias=False, dtype=torch.float64)
        twin.weight.data = torch.from_numpy(np.ldexp(module.weight.data.double().numpy(), -scale))
        truth, exponent = float(np.linalg.norm(dense_matrix(twin, shape), 2)), scale
    with setting(draw) as name:
        bound = float(lipkit.lipschitz(module, shape).detach())
    not_above(truth, exponent, bound, f"{module} {name}")


def layers(draw: random.Random) -> None:
    """Layers of every family with scaled, cut or repeated parameters: the export against its dense matrix."""
    family = families.get(draw.choice(families.names()))
    if family.own_activation:
        return
    torch.manual_seed(draw.randrange(2**31))
    dense = draw.random() < 0.4
    cin, cout = draw.randint(1, 4), draw.randint(1, 4)
    layer, shape = (
        (family.linear(cin, cout), (cin,)) if dense else (family.conv(cin, cout, draw.choice((1, 3))), (cin, 6, 6))
    )
    for parameter in layer.parameters():
        kind = draw.random()
        if kind < 0.3:
            parameter.data *= draw.choice((0.0, 1e-30, 1e-8, 1e-3, 1e3, 1e8, 1e30))
        elif kind < 0.45 and parameter.ndim > 1:
            parameter.data[:] = parameter.data[:1].clone()
    exported = lipkit.export(layer.eval(), shape)
    for name, bias in exported.state_dict(keep_vars=True).items():
        if name.endswith("bias"):
            bias.data.zero_()  # the dense matrix is read from differences, which a huge bias would drown
    bound = float(lipkit.lipschitz(exported, shape).detach())
    if not all(bool(p.isfinite().all()) for p in exported.parameters()):
        if math.isfinite(bound):
            raise Failure(f"{layer}: its export holds numbers that are not finite, and the bound is {bound}")
        return
    matrix = dense_matrix(exported.double(), shape)
    if not np.isfinite(matrix).all():
        return
    truth = float(np.linalg.norm(matrix, 2))
    not_above(truth, 0, bound, f"{layer}", 1e-9)


def _inside(points: Tensor, x: Tensor, radius: float) -> Tensor:
    """The points that are certainly closer to x than the radius."""
    difference = points.double() - x.double()
    biggest = difference.abs().amax(1, keepdim=True).clamp_min(1e-300)
    length = (difference / biggest).square().sum(1).sqrt() * biggest[:, 0] * (1 + 1e-12)
    return points[(length < radius) & points.isfinite().all(1)]


def _matching(draw: random.Random, body: list[nn.Module], dtype: torch.dtype) -> float:
    """The inverse of a number that an activation holds: the size of inputs at which its rounding shows."""
    numbers = [abs(v) for module in body for v in vars(module).values() if isinstance(v, float) and abs(v) > 0]
    largest = float(torch.finfo(dtype).max) / 2**12
    return min(1 / max(draw.choice(numbers), 1e-300), largest) if numbers else 1.0


def networks(draw: random.Random) -> None:
    """Short chains of any numbers: the machine's own predictions at points inside each sound radius."""
    name = draw.choice(list(FORMATS))
    dtype, width, classes = FORMATS[name], draw.randint(1, 4), draw.randint(2, 3)
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    body: list[nn.Module] = []
    for _ in range(draw.choice((1, 1, 2))):
        if draw.random() < 0.3:
            body.append(linear(entries(draw, dtype, width, width), entries(draw, dtype, width)))
        body.append(activation(draw, dtype, width))
    size = draw.choice((1.0, extreme(draw, dtype, signed=False), *[_matching(draw, body, dtype)] * 2))
    x = torch.randn(3, width, generator=generator, dtype=torch.float64)
    # Of one sign, as behind a ReLU or in front of the other half of one: nothing large hides what is small.
    x = (draw.choice((x, x.abs(), -x.abs())) * size).to(dtype)
    try:
        with torch.no_grad():
            features = nn.Sequential(*body)(x)
            nn.Sequential(*copy.deepcopy(body)).double()(x.double())
    except RuntimeError:
        return  # torch itself refuses parameters that do not fit the format
    # A last layer that brings one feature of the first sample near 1, and one class near a tie: errors then decide.
    feature = abs(float(features[0, draw.randrange(width)].nan_to_num()))
    scale = min(1 / max(feature, 1e-300), float(torch.finfo(dtype).max) / 8)
    weight = (torch.randn(classes, width, generator=generator, dtype=torch.float64) * scale).to(dtype)
    bias = torch.zeros(classes, dtype=dtype)
    with torch.no_grad():
        logits = (features[:1] @ weight.T)[0].double().nan_to_num()
    tie = float(logits.max() - logits[0]) * (1 + draw.choice((0.5, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-12)))
    bias[0] = min(tie, float(torch.finfo(dtype).max))
    network = lipkit.export(nn.Sequential(*body, linear(weight, bias)), (width,))
    x = torch.where(x.isfinite(), x, torch.zeros_like(x))
    with setting(draw) as changed:
        # Of the exact function as nearly as float64 tells it: the machine must agree where there is a radius.
        try:
            labels = copy.deepcopy(network).double()(x.double()).argmax(1)
        except RuntimeError:
            return
        certificate = lipkit.certify(network, x, labels, method="local", evaluator=name)  # the larger of both radii
        for sample, label, radius in zip(x, labels.tolist(), certificate.radius.tolist(), strict=True):
            if radius > 0:
                _attacked(network, sample, label, radius, generator, f"{list(network)} {name} {changed}")


def _attacked(network: nn.Module, x: Tensor, label: int, radius: float, generator: torch.Generator, what: str) -> None:
    reach = min(radius, float(torch.finfo(x.dtype).max) / 16)
    directions = torch.randn(24, len(x), generator=generator, dtype=torch.float64)
    directions = torch.cat((directions, torch.eye(len(x)).double(), -torch.eye(len(x)).double()))
    if len(x) and not torch.is_inference_mode_enabled():
        point = x.clone().requires_grad_()
        with torch.enable_grad():
            logits = network(point[None])[0]
            for rival in range(len(logits)):
                if rival != label and logits.requires_grad:
                    slope = torch.autograd.grad(logits[rival] - logits[label], point, retain_graph=True)[0]
                    if bool(slope.isfinite().all()) and bool((slope != 0).any()):
                        directions = torch.cat((directions, (slope.double() / slope.double().abs().max())[None]))
    directions = directions / directions.norm(dim=1, keepdim=True)
    fractions = torch.tensor([1 - 1e-9, 1 - 1e-4, 0.9, 0.5, 0.1, 1e-3, 1e-9], dtype=torch.float64)
    points = x.double() + (reach * fractions[:, None, None] * directions).reshape(-1, len(x))
    points = torch.cat((x[None], _inside(points.to(x.dtype), x, radius)))
    with torch.no_grad():
        found = torch.stack([network(point[None])[0] for point in points[:1]])
        found = torch.cat((found, network(points[1:]))) if len(points) > 1 else found
    wrong = found.isnan().any(1) | (found.argmax(1) != label)
    # A tie is decided by the order of the classes: inside a radius the label's logit is larger than all others.
    others = found.clone()
    others[:, label] = -math.inf
    wrong |= ~(found[:, label] > others.amax(1))
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise Failure(
            f"{what}: radius {radius} for class {label} at {x.tolist()}, but the logits are {found[at].tolist()} "
            f"at {points[at].tolist()}"
        )


# One step of a graph: most keep a bound, some change the dtype or jump, and must be refused or bounded rightly.
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.relu(),
    "scaled": lambda x: -1.5 * x,
    "half scaled": lambda x: x / 4 + 1,
    "sum": lambda x: x + x.flip(1),
    "in place": lambda x: x.clone().mul_(2).add_(x),
    "tanh": lambda x: x.tanh(),
    "cat": lambda x: torch.cat((x, x), 1)[:, 1:4],
    "chunks": lambda x: torch.cat(x.chunk(3, 1)[::-1], 1),
    "maximum": lambda x: torch.maximum(x, x.roll(1, 1)),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "view bits": lambda x: x.view(torch.int32).float(),
    "view bits named": lambda x: x.view(dtype=torch.int32).to(torch.float32),
    "integers": lambda x: x.int().float(),
    "to long": lambda x: x.to(torch.long).to(x.dtype),
    "type as": lambda x: x.type(torch.int16).type_as(x),
    "bool": lambda x: x.bool().float(),
    "compare": lambda x: (x > 0).float(),
    "where": lambda x: torch.where(x > 0, x, x + 1),
    "masked": lambda x: x * (x > 0.5),
    "round": lambda x: x.round(),
    "floor": lambda x: torch.floor(x),
    "sign": lambda x: torch.sign(x),
    "frac": lambda x: torch.frac(x),
    "remainder": lambda x: torch.remainder(x, 1.0),
    "fmod": lambda x: x.fmod(1.0),
    "frexp": lambda x: torch.frexp(x)[0],
    "complex": lambda x: torch.complex(x, x).abs(),
    "real view": lambda x: torch.view_as_real(torch.complex(x, x)).sum(-1),
    "square": lambda x: x * x,
    "power": lambda x: x**2,
    "divide": lambda x: 1 / x,
    "exp": lambda x: x.exp(),
    "sqrt": lambda x: x.abs().sqrt(),
    "log": lambda x: torch.log(x.abs()),
    "norm": lambda x: x / x.norm(dim=1, keepdim=True),
    "sorted": lambda x: x.sort(1)[0],
    "indices": lambda x: x.sort(1)[1].float(),
    "argmax": lambda x: x.argmax(1, keepdim=True).float().expand(-1, 3),
    "gathered": lambda x: x.gather(1, (x > 0).long()),
    "topk": lambda x: x.topk(2, 1)[0],
    "cumulated": lambda x: x.cumsum(1),
    "products": lambda x: x.cumprod(1),
    "double": lambda x: x.double().float(),
    "half": lambda x: x.half().float(),
    "detached": lambda x: x.detach() * 2,
    "data": lambda x: x.data + x,
    "quantised": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255),
    "softmax": lambda x: x.softmax(1),
    "einsum": lambda x: torch.einsum("bi,bj->bij", x, x).flatten(1),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "nan": lambda x: torch.nan_to_num(x),
    "bits": lambda x: x.to(torch.uint8).bitwise_and(7).float(),
    "heaviside": lambda x: torch.heaviside(x, torch.zeros(())),
    "copysign": lambda x: torch.copysign(torch.ones(()), x),
    "batch": lambda x: x - x.mean(0),
}


class Graph(nn.Module):
    """Steps one after the other between two dense layers."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names, self.first = names, nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for name in self.names:
            x = STEPS[name](x)
        return x


def graphs(draw: random.Random) -> None:
    """Random functions: `analyze` refuses them or is above every finite difference."""
    torch.manual_seed(draw.randrange(2**31))
    model = Graph([draw.choice(list(STEPS)) for _ in range(draw.randint(1, 3))]).eval()
    try:
        bound = lipkit.analyze(model, (3,), restarts=0).upper
    except LipkitError:
        raise
    except (RuntimeError, IndexError) as error:
        with contextlib.suppress(RuntimeError, IndexError):
            model(torch.randn(2, 3))
            raise Failure(f"{model.names}: analyze raised {type(error).__name__}: {error}") from None
        return
    x = torch.randn(400, 3) * torch.tensor([0.1, 1.0, 30.0])[torch.randint(3, (400, 1))]
    with torch.no_grad():
        for size in (1.0, 1e-2, 1e-4):
            nearby = x + size * torch.randn_like(x)
            a, b = model(x).double().flatten(1), model(nearby).double().flatten(1)
            moved, distance = (a - b).norm(dim=1), (x.double() - nearby.double()).norm(dim=1)
            # The bound is one of exact arithmetic: each value carries float32 rounding, whatever steps enlarge.
            noise = 1e-4 * (1 + bound) * (1 + x.norm(dim=1).double())
            wrong = ~(moved <= bound * distance + noise)
            if bool(wrong.any()):
                at = int(wrong.nonzero()[0])
                raise Failure(f"{model.names}: {float(moved[at])} over {float(distance[at])}, bound {bound}")


KINDS = (matrix_norms, layers, networks, networks, graphs, *soundness_modules.KINDS)


def attempt(seed: int, index: int, kinds: Sequence[Callable[[random.Random], None]] = KINDS) -> tuple[str, str]:
    """Draw number ``index``: its kind, and "held" or "refused".

    Raises:
        Failure: a claim that does not hold.
    """
    draw = random.Random(f"{seed} {index}")
    kind = draw.choice(kinds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            kind(draw)
        except LipkitError:
            return kind.__name__, "refused"
        except Failure as error:
            raise Failure(f"draw {index} ({kind.__name__}): {error}") from None
        except Exception as error:
            raise Failure(f"draw {index} ({kind.__name__}): raw {type(error).__name__}: {error}") from error
    return kind.__name__, "held"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="make this draw alone")
    parser.add_argument("--kind", choices=[kind.__name__ for kind in dict.fromkeys(KINDS)], help="these draws alone")
    parser.add_argument("--all", action="store_true", help="go on after a failure, and list them")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.nnpack.set_flags(False)
    kinds = [kind for kind in KINDS if given.kind in (None, kind.__name__)]
    if given.only is not None:
        print(*attempt(given.seed, given.only, kinds))
        return
    counts: collections.Counter[str] = collections.Counter()
    end, index, failures = time.monotonic() + 60 * given.minutes, 0, []
    while time.monotonic() < end:
        try:
            counts[" ".join(attempt(given.seed, index, kinds))] += 1
        except Failure as error:
            if not given.all:
                sys.exit(str(error))
            failures.append(index)
            print(error, flush=True)
        index += 1
    print(dict(sorted(counts.items())))
    print(f"{index} draws, seed {given.seed}, {given.minutes} minutes: {len(failures)} failures {failures[:20]}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
