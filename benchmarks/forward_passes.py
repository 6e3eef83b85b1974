"""Claim: what is bounded is a function of one sample, the bound is above its slopes, and its export is that function.

    python -m benchmarks.forward_passes --minutes 10        # draws until the time is over; all failures are listed
    python -m benchmarks.forward_passes --only 417          # one draw again, with its source
    python -m benchmarks.forward_passes --check FILE        # the bodies of a kept file

Networks with forward passes put together at random (`benchmarks.forward_bodies`). The truth is found without lipkit:
samples alone, in batches of 1 to 70, 128 and 257, in 120 calls of one network, under every mode of derivatives and from
memory laid out otherwise must give the same outputs, and differences give slopes. A network for which they do not is no
function of one sample, and must be refused. `analyze` and `export` may refuse whatever they like; they may not bound
such a network, nor bound another one below a slope, nor export another function, nor raise an error that is not theirs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import functools
import itertools
import json
import math
import operator
import random
import re
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.forward_bodies import KINDS, SHAPES, body
from torch import Tensor, fx, nn

import lipkit
from lipkit.errors import CertificateViolation, LipkitError

BATCHES = (*range(1, 71), 128, 257)
CALLS = 120


class Flat(torch.autograd.Function):
    """Three times its input, with a derivative of 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 0 * grad


def _linear(generator: torch.Generator, outputs: int = 4) -> nn.Linear:
    made = nn.Linear(4, outputs)
    made.weight.data = torch.randn(outputs, 4, generator=generator) / 2
    made.bias.data = torch.randn(outputs, generator=generator) / 2
    return made


def _norm(generator: torch.Generator) -> nn.BatchNorm1d:
    made = nn.BatchNorm1d(4)
    made.running_mean = torch.randn(4, generator=generator)
    made.running_var = torch.rand(4, generator=generator) + 0.5
    return made.eval()


def _conv(generator: torch.Generator) -> nn.Conv2d:
    made = nn.Conv2d(2, 2, 3, padding=1)
    made.weight.data = torch.randn(2, 2, 3, 3, generator=generator) / 4
    made.bias.data = torch.randn(2, generator=generator)
    return made


# What a network may hold, by the name of the attribute.
MAKERS: dict[str, Callable[[Any, torch.Generator], Any]] = {
    "a": lambda s, g: _linear(g),
    "b": lambda s, g: _linear(g),
    "head": lambda s, g: _linear(g, 1),
    "first": lambda s, g: s.a,
    "w": lambda s, g: nn.Parameter(torch.randn(4, 4, generator=g) / 2),
    "token": lambda s, g: nn.Parameter(torch.randn(1, 1, 4, generator=g)),
    "act": lambda s, g: nn.ReLU(inplace=True),
    "relu": lambda s, g: nn.ReLU(),
    "same": lambda s, g: nn.Identity(),
    "drop": lambda s, g: nn.Dropout(),
    "norm": lambda s, g: _norm(g),
    "ln": lambda s, g: nn.LayerNorm(4),
    "conv": lambda s, g: _conv(g),
    "parts": lambda s, g: nn.ModuleList([_linear(g), _linear(g)]),
    "calls": lambda s, g: 0,
    "number": lambda s, g: 2.5,
    "flag": lambda s, g: False,
    "word": lambda s, g: "",
    "log": lambda s, g: [],
    "table": lambda s, g: {},
    "seen": lambda s, g: set(),
    "bytes": lambda s, g: bytearray(),
    "pair": lambda s, g: (0, 0),
    "queue": lambda s, g: collections.deque(maxlen=99),
    "nested": lambda s, g: ([0], {"n": 0}),
    "deep": lambda s, g: {"a": [{"b": 0}]},
    "tensors": lambda s, g: [torch.zeros(())],
    "free": lambda s, g: torch.zeros(()),
    "array": lambda s, g: np.zeros(1),
    "box": lambda s, g: types.SimpleNamespace(n=0),
    "later": lambda s, g: _later(s),
    "counter": lambda s, g: itertools.count(),
    "tick": lambda s, g: functools.partial(next, itertools.count()),
    "iterator": lambda s, g: iter(range(10**6)).__next__,
    "lru": lambda s, g: functools.lru_cache(lambda n: False),
    "generator": lambda s, g: torch.Generator(),
    "hidden": lambda s, g: [_linear(g)],
    "bound": lambda s, g: _linear(g).forward,
    "function": lambda s, g: lambda y: 5 * y,
    "partial": lambda s, g: functools.partial(F.linear, weight=3 * torch.eye(4)),
    "me": lambda s, g: id(s),
    "mine": lambda s, g: id(s.a.weight),
    "place": lambda s, g: s.w.data_ptr(),
    "stats": lambda s, g: nn.BatchNorm1d(4, track_running_stats=False),
    "soft0": lambda s, g: nn.Softmax(0),
    "flat0": lambda s, g: nn.Flatten(0),
    "unflat": lambda s, g: nn.Unflatten(0, (1, -1)),
    "dropin": lambda s, g: nn.Dropout(inplace=True),
    "celu": lambda s, g: nn.CELU(inplace=True),
    "seq": lambda s, g: nn.Sequential(nn.ReLU(inplace=True), _linear(g)),
    "instance": lambda s, g: nn.InstanceNorm1d(4),
    "pool": lambda s, g: nn.AvgPool1d(2),
}


def _network(kind: type[nn.Module], source: str) -> nn.Module:
    """A network with each attribute that the source names; its class holds its forward pass alone."""
    made = kind()
    generator = torch.Generator().manual_seed(0)
    made.register_buffer("mid", torch.tensor([0.5, -1.0, 2.0, 1.5]))
    made.register_buffer("count", torch.zeros(()))
    named = set(re.findall(r"\bs\.(\w+)", source)) | set(re.findall(r"\(s, '(\w+)'", source))
    for name, make in MAKERS.items():
        if name in named or (name == "a" and "first" in named) or (name == "box" and "later" in named):
            setattr(made, name, make(made, generator))
    return made


def _later(network: Any) -> Callable[[], None]:
    box = network.box

    def later() -> None:
        box.n += 1

    return later


@functools.cache
def _compiled(source: str) -> types.CodeType:
    lines = "\n    ".join(source.split("\n"))
    return compile(f"def forward(s, x):\n    {lines}\n    return x\n", "<forward>", "exec")


def build(source: str) -> nn.Module:
    """A new network, in evaluation mode, with this body; always with the same weights."""
    modules = (torch, np, math, operator, time, random, functools, contextlib, copy)
    space: dict[str, Any] = {module.__name__: module for module in modules}
    space |= {"nn": nn, "F": F, "fx": fx, "np": np, "Flat": Flat, "__name__": "forward"}
    space |= {"CONSTANT": 5.0, "KEPT": [], "CELL": {}, "TABLE": 3 * torch.eye(4), "OUTSIDE": lambda y: 5 * y}
    space["TICKS"] = functools.partial(next, itertools.count())
    exec(_compiled(source), space)
    kind = type("Body", (nn.Module,), {"forward": space["forward"], "__module__": __name__})
    return _network(kind, source).eval()


@dataclass(frozen=True)
class Truth:
    """What is known of a network without lipkit.

    Attributes:
        varies: why it is no function of one sample; empty for a function.
        slope: the largest slope found.
        x, y: samples, and the outputs of each alone.
    """

    varies: str
    slope: float
    x: Tensor
    y: Tensor


class Invalid(Exception):
    """A body that no batch passes."""


def _pool(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(max(BATCHES), *shape, generator=generator)
    sizes = torch.tensor([1.0, 1.0, 0.1, 30.0, 1.0, 3000.0, 0.5, 8.0])[torch.arange(len(x)) % 8]
    x = x * sizes.view(-1, *[1] * len(shape))
    x[11::13] = x[11::13].abs()
    return x


def _call(network: nn.Module, x: Tensor) -> Tensor:
    """The output on a copy of x; settings that the network changes are put back."""
    grad = torch.is_grad_enabled()
    try:
        y = network(x)
    finally:
        torch.set_grad_enabled(grad)
    if isinstance(y, Tensor) and len(x) == 1 and (y.ndim == 0 or len(y) != 1):
        y = y[None]  # squeezed: the numbers are what counts
    if not isinstance(y, Tensor) or y.ndim == 0 or len(y) != len(x):
        raise ValueError("no tensor with one row for each sample")
    return y.detach().double()


def _same(found: Tensor, wanted: Tensor, x: Tensor, slack: float = 1e-4) -> bool:
    if found.shape != wanted.shape:
        return False
    size = x.double().flatten(1).abs().amax(1)
    y = wanted.reshape(len(wanted), -1).nan_to_num(0.0, 0.0, 0.0)
    scale = (y.abs().amax(1) if y.shape[1] else y.sum(1)) + size + 1e-3
    limit = (slack * scale).view(-1, *[1] * (wanted.ndim - 1)).expand_as(wanted)
    close = ((found - wanted).abs() <= limit) | (found == wanted) | (found.isnan() & wanted.isnan())
    return bool(close.all())


@contextlib.contextmanager
def _inference(x: Tensor) -> Iterator[Tensor]:
    with torch.inference_mode():
        yield x.clone()


# How a batch may come: with what it carries, and what is on around the call.
MODES: dict[str, Callable[[Tensor], Any]] = {
    "with derivatives": lambda x: contextlib.nullcontext(x.clone()),
    "from a leaf": lambda x: contextlib.nullcontext(x.clone().requires_grad_()),
    "from a computed input": lambda x: contextlib.nullcontext(x.clone().requires_grad_() * 1),
    "in inference mode": _inference,
    "from a strided input": lambda x: contextlib.nullcontext(x.movedim(0, -1).contiguous().movedim(-1, 0)),
    "from a slice": lambda x: contextlib.nullcontext(torch.cat((x[:1], x))[1:]),
}


def truth(source: str, shape: tuple[int, ...]) -> Truth:
    """Whether the network is a function of one sample, and its steepest slope.

    Raises:
        Invalid: no batch passes.
    """
    x = _pool(shape)
    none = torch.empty(0)
    with torch.no_grad():
        works = 0
        for size in (1, 2, 3, 8):
            with contextlib.suppress(Exception):
                works += len(_call(build(source), x[:size].clone())) > 0
        if works == 0:
            raise Invalid(source)
        try:
            alone = [_call(build(source), sample[None].clone()) for sample in x]
            y = torch.cat(alone)
        except Exception as error:
            return Truth(f"fails for one sample: {type(error).__name__}", math.nan, x, none)
        for size in BATCHES:
            try:
                found = _call(build(source), x[:size].clone())
            except Exception as error:
                return Truth(f"fails for batches of {size}: {type(error).__name__}", math.nan, x, y)
            if not _same(found, y[:size], x[:size]):
                return Truth(f"another output in a batch of {size}", math.nan, x, y)
        network = build(source)
        for call in range(CALLS):
            size = 3 if call % 10 else 1 + call // 4
            try:
                if not _same(_call(network, x[:size].clone()), y[:size], x[:size]):
                    return Truth(f"another output in call {call + 1}", math.nan, x, y)
            except Exception as error:
                return Truth(f"fails in call {call + 1}: {type(error).__name__}", math.nan, x, y)
    for name, mode in MODES.items():
        for frozen in (False, True):
            network = build(source).requires_grad_(not frozen)
            # Derivatives cannot be taken of some calls in place, nor of numpy: that says nothing.
            with contextlib.suppress(RuntimeError), mode(x[:5]) as given:
                if not _same(_call(network, given), y[:5], x[:5]):
                    return Truth(f"another output {name}{' of frozen weights' * frozen}", math.nan, x, y)
    return Truth("", _slope(build(source), shape), x, y)


def _slope(network: nn.Module, shape: tuple[int, ...]) -> float:
    """The steepest secant along right singular vectors of difference quotients, less what rounding can add."""
    generator = torch.Generator().manual_seed(7)
    n, found = math.prod(shape), 0.0
    for scale in (0.03, 1.0, 30.0, 3000.0):
        points = torch.randn(12, n, generator=generator) * scale
        points[::4] = points[::4].abs()
        for point in points:
            for step in (1e-2 * scale, 1e-3 * scale):
                ends = torch.cat((point[None], point + step * torch.eye(n)))
                with torch.no_grad(), contextlib.suppress(Exception):
                    y = _call(network, ends.view(-1, *shape).clone()).flatten(1)
                    quotient = ((y[1:] - y[0]) / (ends[1:] - point).double().diagonal()[:, None]).numpy()
                    noise = 1e-6 * float(y.abs().max() + scale) / step
                    if not np.isfinite(quotient).all():
                        continue
                    # At a kink the differences along the axes are of several pieces: one secant belongs together.
                    along = np.linalg.svd(quotient.T)[2][0]
                    two = torch.stack((point, point + step * torch.from_numpy(along).float()))
                    y = _call(network, two.view(-1, *shape).clone()).flatten(1)
                    slope = float((y[1] - y[0]).norm() / (two[1] - two[0]).double().norm())
                    found = max(found, slope - noise) if math.isfinite(slope) else found
    return found


def verdict(source: str, shape: tuple[int, ...], known: Truth | None = None) -> dict[str, Any]:
    """What lipkit says: of ``analyze`` and ``export`` the bound, "refused", or a raw error; of the export whether it
    is another function than the one known."""
    said: dict[str, Any] = {}
    network = build(source)
    grad = torch.is_grad_enabled()
    for name in ("analyze", "export"):
        try:
            if name == "analyze":
                said[name] = float(lipkit.analyze(network, shape, restarts=0).upper)
            else:
                plain = lipkit.export(network, shape)
                said[name] = float(lipkit.lipschitz(plain).detach())
                if known is not None and not known.varies:
                    said["other function"] = not _exports(plain, known)
        except CertificateViolation as error:
            said[name] = f"violation: {error}"
        except LipkitError:
            said[name] = "refused"
        except Exception as error:
            said[name] = f"raw {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        finally:
            torch.set_grad_enabled(grad)
    if known is not None and not known.varies:
        with torch.no_grad():
            said["changed"] = not _same(_call(network, known.x[:3].clone()), known.y[:3], known.x[:3])
    return said


def _exports(plain: nn.Module, known: Truth) -> bool:
    with torch.no_grad():
        for size in (1, 2, 3, 8, 65):
            x = known.x[:size]
            if not _same(_call(plain, x.clone()), known.y[:size], x, 1e-3):
                return False
    return True


def faults(said: dict[str, Any], varies: str, slope: float) -> list[str]:
    """What is wrong with a verdict, in words."""
    found = []
    for name in ("analyze", "export"):
        if isinstance(said[name], str):
            if said[name] != "refused":
                found.append(f"{name}: {said[name]}")
        elif varies:
            found.append(f"{name}: bounded by {said[name]:.6g}, but {varies}")
        elif not said[name] * (1 + 1e-3) + 1e-6 >= slope:
            found.append(f"{name}: bound {said[name]:.6g} below the slope {slope:.6g}")
    found += ["the export is another function"] if said.get("other function") else []
    return found + (["the network was changed"] if said.get("changed") else [])


def draw(seed: int, index: int, kinds: Iterable[str] = KINDS) -> tuple[str, str, str]:
    """Kind, shape's name and source of a draw."""
    chance = random.Random(f"{seed} {index}")
    (kind,) = chance.choices([*kinds], [KINDS[kind] for kind in kinds])
    return kind, *body(chance, kind)


def attempt(kind: str, shape: str, source: str) -> tuple[str, list[str]]:
    """What was found of one body, in a word, and its faults."""
    try:
        known = truth(source, SHAPES[shape])
    except Invalid:
        return f"{kind}: no network", []
    said = verdict(source, SHAPES[shape], known)
    bounded = "bounded" if isinstance(said["analyze"], float) or isinstance(said["export"], float) else "refused"
    found = faults(said, known.varies, known.slope)
    return f"{kind}: {'varies' if known.varies else 'function'}, {bounded}", found


def reference(source: str, shape: tuple[int, ...], varies: str, slope: float) -> Truth:
    """The truth of a kept body, its outputs computed again."""
    x = _pool(shape)[:65]
    if varies:
        return Truth(varies, slope, x, torch.empty(0))
    with torch.no_grad():
        return Truth("", slope, x, _call(build(source), x.clone()))


def kept(name: str, shape: str, source: str) -> dict[str, Any]:
    """A row of the kept file: a body with its truth and today's verdicts.

    Raises:
        Invalid: no batch passes.
    """
    known = truth(source, SHAPES[shape])
    said = verdict(source, SHAPES[shape], known)
    row: dict[str, Any] = {"name": name, "shape": shape, "body": source}
    row |= {"varies": known.varies} if known.varies else {"slope": float(f"{known.slope:.6g}")}
    short = {k: float(f"{v:.6g}") if type(v) is float else v[:60] if isinstance(v, str) else v for k, v in said.items()}
    row["before"] = {k: v for k, v in short.items() if v is not False}
    return row | ({"wrong": True} if faults(said, known.varies, known.slope) else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="make this draw alone")
    parser.add_argument("--kind", choices=KINDS, help="these draws alone")
    parser.add_argument("--check", type=Path, help="judge the bodies of this file instead")
    parser.add_argument("--keep", type=int, help="print the rows of this many draws for the kept file")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kinds = [given.kind] if given.kind else [*KINDS]
    if given.keep:
        for index in range(given.keep):
            kind, shape, source = draw(given.seed, index, kinds)
            with contextlib.suppress(Invalid):
                print(json.dumps(kept(f"{kind} {index}", shape, source)), flush=True)
        return
    if given.only is not None:
        drawn = draw(given.seed, given.only, kinds)
        print(drawn[2], *attempt(*drawn), sep="\n")
        return
    rows = json.loads(given.check.read_text()) if given.check else []
    bodies: Iterator[tuple[str, str, str]] = (
        ((row["name"].rstrip(" 0123456789"), row["shape"], row["body"]) for row in rows)
        if given.check
        else (draw(given.seed, index, kinds) for index in itertools.count())
    )
    counts: collections.Counter[str] = collections.Counter()
    end, wrong = time.monotonic() + 60 * given.minutes, 0
    for index, (kind, shape, source) in enumerate(bodies):
        word, found = attempt(kind, shape, source)
        # The identity of an integer, an iterator and a closure leave no trace: found by luck, and counted alone.
        counts[f"{word}, not found" if found and kind == "hidden" else word] += 1
        if found and kind != "hidden":
            wrong += 1
            print(f"draw {index} ({kind}): {found}: {source!r}", flush=True)
        if time.monotonic() > end:
            break
    for word, number in sorted(counts.items()):
        print(f"{number:6d}  {word}")
    print(f"{sum(counts.values())} bodies, seed {given.seed}: {wrong} failures")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
