"""Networks of one stored module with one argument or one rank changed: what torch, `lipkit.load` and the checker say.

``python -m tests.checker.forger --count 20000`` draws changes of argument and rank together and reports every fault.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from tests.checker.test_graphs import BENT, LINEAR, as_json
from tests.modules.test_storage import EXAMPLES
from torch import Tensor, nn

import lipkit
import lipkit_check as k
from lipkit import modules
from lipkit.errors import DataError, LipkitError
from lipkit.modules.graph import Add, Blend, Concatenate, Graph, Maximum
from lipkit.modules.limits import MatrixProduct, Product
from lipkit.modules.storage import build, describe
from lipkit.modules.views import EnlargeBilinear, Permute

Shape = tuple[int, ...]
IMAGE = (2, 4, 4)


def wired(*joins: nn.Module) -> nn.Module:
    return Graph([nn.ReLU(), *joins], [[0], *([i, i + 1] for i in range(len(joins)))])


def block(kind: Callable[..., nn.Module]) -> nn.Module:
    return kind(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), torch.rand(4) + 0.5)


MORE: list[tuple[nn.Module, Shape]] = [
    (modules.Network([nn.Tanh()], (3,)), (3,)),
    (wired(Add(1, -1), Maximum(), Blend(torch.tensor(0.3)), Concatenate(1)), (4,)),
    (Graph([nn.ReLU(), Product(torch.tensor([0.5, 2.0]))], [[0], [0, 1]]), (4,)),
    (Graph([Permute(2, 1), MatrixProduct(2, 3, 2, torch.rand(2))], [[0], [0, 1]]), (2, 3)),
    (modules.Sine(), (3,)), (modules.Cosine(), (3,)), (modules.Arctan(), (3,)), (modules.Arcsinh(), (3,)),
    (modules.Elementary("log", torch.tensor([0.5, 2.0])), (3,)),
    (modules.LayerCenter(2, 3), IMAGE), (modules.UnitNorm(1, 3, eps=0.5), IMAGE), (EnlargeBilinear(1, 2), IMAGE),
    (modules.FourierConv2d(2, 2, 4, 4, (2, 4), complex_pairs=False), IMAGE),
    (modules.TaylorConv2d(2, 3, (3, 1), 3), IMAGE), (block(modules.SandwichBlock), (3,)),
    (block(modules.SlopeResidual), (3,)), (modules.Pad(0, 0, 0, 0, 0, 1), IMAGE),
    (modules.GradientStep(nn.Linear(4, 3), nn.Softmax(-1), torch.rand(())), (2, 4)),
    (modules.GradientStep(nn.Linear(4, 6), modules.Attraction(2), torch.rand(())), (3, 4)),
    (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), IMAGE),
    (nn.Conv2d(2, 2, (1, 2), padding=(0, 1), padding_mode="circular"), (2, 1, 4)),
]  # fmt: skip
BASES = [(make(), shape) for make, shape in EXAMPLES.values()] + LINEAR + BENT + MORE
SIZES: tuple[Any, ...] = (-3, -2, -1, 0, 1, 2, 3, 4, 16, 2**31, 2**40, 10**30)
ODD: tuple[Any, ...] = (None, True, False, "1", "no", "", 1.0, 0.5, float("nan"), float("inf"), [], [1], {}, [[1]])
WORDS = ("same", "valid", "zeros", "circular", "reflect", "replicate", "none", "tanh", "edge")


def values(old: Any) -> Iterator[Any]:
    """What stands there instead of an argument, at the right type and at wrong ones."""
    yield from ODD
    if isinstance(old, bool):
        yield not old
    elif isinstance(old, int | float):
        yield from (*SIZES, old + 1, 2 * old, -old, str(old), [old], [old, old], -0.5, 1e-300, 1e299, 1e301)
    elif isinstance(old, str):
        yield from (*WORDS, old.upper(), [old])
    elif isinstance(old, list):
        yield from (old[:-1], old[1:], old + old[-1:], old[::-1], [*old, None], *SIZES[:8])
        if len(set(map(str, old))) == 1:
            yield old[0]
    elif old is None:
        yield from (*SIZES, [2, None])


def places(config: Any) -> Iterator[tuple[Any, Any]]:
    """Every argument, and every entry of a list, as the object that holds it and its key."""
    for key, value in list(config.items() if isinstance(config, dict) else enumerate(config)):
        if key != "type":
            yield config, key
        if isinstance(value, dict | list):
            yield from places(value)


def forged(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Copies with one change."""
    yield copy.deepcopy(config)
    for turn, (holder, key) in enumerate(places(config)):
        for new in values(holder[key]):
            changed = copy.deepcopy(config)
            other, _ = list(places(changed))[turn]
            other[key] = new
            yield changed
        if isinstance(holder, dict):
            changed = copy.deepcopy(config)
            del list(places(changed))[turn][0][key]
            yield changed
    for key, value in (("bias", True), ("kernel_size", [2, 2]), ("inplace", False), ("multipliers", {})):
        if key not in config:
            yield config | {key: value}


def ranks(shape: Shape) -> list[Shape]:
    """The shape itself, and others of as many dimensions, fewer and more."""
    found = [shape, shape[:-1], shape[1:], (1, *shape), (2, *shape), (*shape, 1), (*shape, 3), (1,), (3,), (2, 3)]
    found += [(*shape[:i], n, *shape[i + 1 :]) for i in range(len(shape)) for n in (1, shape[i] + 1, 2 * shape[i])]
    return list(dict.fromkeys(s for s in found if s))


def tensors(config: dict[str, Any], base: nn.Module) -> dict[str, Tensor]:
    """Numbers for every tensor that the changed module has, where it can be built."""
    try:
        with torch.device("meta"):
            shapes = {name: t.shape for name, t in build(config).state_dict().items()}
    except LipkitError:
        shapes = {name: t.shape for name, t in base.state_dict().items()}
    if sum(s.numel() for s in shapes.values()) > 10_000:
        shapes = {name: t.shape for name, t in base.state_dict().items()}
    draw = torch.Generator().manual_seed(0)
    positive = ("multiplier", "limits", "scale", "share")
    found = {name: torch.rand(s, generator=draw) - 0.5 * (not name.endswith(positive)) for name, s in shapes.items()}
    return {f"0.{name}": t for name, t in found.items()}


def write(folder: Path, module: dict[str, Any], shape: Shape, stored: dict[str, Tensor]) -> None:
    """A network of this one module, with the hash of what stands there."""
    network = {"type": "Network", "modules": [module], "input_shape": list(shape), "multipliers": {}}
    text = json.dumps(network, sort_keys=True).replace("Infinity", "1e400")
    digest = hashlib.sha256(json.dumps(json.loads(text), sort_keys=True).encode())
    for name, t in sorted(stored.items()):
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode() + t.numpy().tobytes())
    (folder / "config.json").write_text(f'{{"schema_version": 2, "sha256": "{digest.hexdigest()}", "network": {text}}}')
    (folder / "model.safetensors").write_bytes(save(stored))


def fault(folder: Path, module: dict[str, Any], shape: Shape, base: nn.Module, seen: Counter[str]) -> str | None:
    """What is wrong between torch, load and the checker on one forged network, if anything."""
    write(folder, module, shape, tensors(module, base))
    try:
        loaded = lipkit.load(folder).double()
    except DataError:
        loaded = None
    k.ops = k.Floats()
    try:
        config, stored, _ = k.load_network(folder)
        k.ops.left = k.FREE + k.SHARE * sum(a.size for a in stored.values())
        node = k.build(config["network"], k.Tensors(stored), shape)
        x = np.random.default_rng(0).normal(size=(3, *shape))
        got, e = node.run(x, k.Fraction(0))
    except Exception:  # whatever it says, it does not confirm
        node = None
    seen[f"{'loaded' if loaded else 'refused'}, {'checked' if node else 'refused'}"] += 1
    if loaded is None:
        return "the checker takes what load refuses" if node else None
    with torch.no_grad():
        each = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        try:
            if copy.deepcopy(loaded).to("meta")(each.to("meta")).numel() > 1e6:
                return "the checker takes what is huge" if node else None
            together, alone = loaded(each), torch.cat([loaded(one[None]) for one in each])
        except (RuntimeError, ValueError, IndexError) as error:
            return f"load takes what does not run: {error}"[:99]
        if together.shape != alone.shape or not torch.allclose(together, alone, atol=1e-9, equal_nan=True):
            return "load takes what mixes the samples of a batch"
        if node is None:
            return None
        want, moved = loaded(torch.from_numpy(x)), loaded(torch.from_numpy(x + 1e-6 * each.numpy()))
    if want.shape[1:] != node.shape or np.linalg.norm(got - want.numpy()) > float(e) * 2 + 1e-9:
        return "the checker computes another function"
    steps = (moved - want).flatten(1).norm(dim=1) / (1e-6 * each).flatten(1).norm(dim=1)
    if float(node.norm) < 1e100 and float(steps.max()) > float(node.norm) * (1 + 1e-6) + 1e-6:
        return f"the constant is {float(node.norm)}, not {float(steps.max())}"
    return None


def faults(case: int, share: float, both: bool, seed: int = 0) -> tuple[list[str], Counter[str]]:
    """Faults of a share of the changes of one base; with ``both``, of argument and rank together."""
    module, shape = BASES[case]
    right = as_json(describe(module))
    draw, found, seen = random.Random(seed * 1000 + case), [], Counter[str]()
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for config in forged(right):
            for other in ranks(shape):
                plain = other == shape or config == right
                if (plain or both) and draw.random() < share:
                    what = fault(Path(place), config, other, module, seen)
                    found += [f"{what}: {json.dumps(config)} on {other}"] if what else []
    return found, seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    given, total, start = parser.parse_args(), Counter[str](), time.monotonic()
    for case in range(len(BASES)):
        found, seen = faults(case, given.share, True, given.seed)
        total += seen
        print(f"{case:3d} {type(BASES[case][0]).__name__:16s} {dict(seen)}", *found, sep="\n    ", flush=True)
    print(f"{sum(total.values())} networks in {time.monotonic() - start:.0f} s: {dict(total)}")


if __name__ == "__main__":
    main()
