"""What only a GPU can show, in steps of at most nine minutes: checks on the device, the suite, speed, two trainings.

    python -m benchmarks.gpu_day --out DIR --data DATA       # the next step that is not done, then stops
    python -m benchmarks.gpu_day --out DIR --all             # one after the other
    python -m benchmarks.gpu_day --out DIR --step kwlarge    # this one; a training goes on where it was cut
    python -m benchmarks.gpu_day --out DIR --toy             # seconds on a CPU: shows that the steps run

lipkit is installed with its development extra. DIR/STEP.json holds what was measured, DIR/report.md all of it. A check
that fails is a finding, not an end.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lipkit
from lipkit import models
from lipkit.files import read_text, write_atomic
from lipkit.layers import families
from lipkit.linalg.accretive import inverse_by_blocks

LIMIT = 540.0  # seconds of one step
ROOT = Path(__file__).parents[1]
# Tests that use a GPU where there is one.
SUITE = ("test_devices.py", "laws", "data")
TRAININGS = {"kwlarge": "cifar10_cayley", "flagship": "cifar10_patchnet_gpu"}


def clock(work: Callable[[], Any], device: str, calls: int = 5, rounds: int = 5) -> float:
    """Median seconds of one call, after one that warms up."""
    work()
    found = []
    for _ in range(rounds):
        synchronise(device)
        start = time.perf_counter()
        for _ in range(calls):
            work()
        synchronise(device)
        found.append((time.perf_counter() - start) / calls)
    return statistics.median(found)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def arithmetic(kind: str, device: str) -> Iterator[None]:
    """float32, tf32 (products of float32 with fewer digits), or bfloat16 (autocast)."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = kind == "tf32"
    try:
        with torch.autocast(device, torch.bfloat16, enabled=kind == "bfloat16"):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


# --- checks -----------------------------------------------------------------------------------------------------------


def network(name: str) -> nn.Module:
    """A small network of one family."""
    kernel = {"kernel_size": 2} if name == "eco" else {}
    return models.build("small", layer=name, input_shape=(3, 8, 8), classes=4, width=1, **kernel)


def distance(a: Tensor, b: Tensor) -> float:
    """Relative l2 distance, on the CPU in float64."""
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def check_forward(here: nn.Module, there: nn.Module, x: Tensor, device: str) -> float:
    """The same outputs in float64."""
    return distance(copy.deepcopy(there).double()(x.double().to(device)), copy.deepcopy(here).double()(x.double()))


def check_gradients(here: nn.Module, there: nn.Module, x: Tensor, device: str) -> float:
    """The same gradients in float64."""
    pair = copy.deepcopy(here).double(), copy.deepcopy(there).double()
    for model, inputs in zip(pair, (x.double(), x.double().to(device)), strict=True):
        model(inputs).square().sum().backward()
    ours, theirs = (torch.cat([p.grad.flatten().cpu() for p in m.parameters() if p.grad is not None]) for m in pair)
    return distance(theirs, ours)


def check_bound(here: nn.Module, there: nn.Module, x: Tensor, device: str) -> float:
    """The same constant."""
    shape = tuple(x.shape[1:])
    constants = [float(lipkit.lipschitz(model, shape).detach()) for model in (here, there)]
    return abs(constants[1] / constants[0] - 1)


def check_certificate(here: nn.Module, there: nn.Module, x: Tensor, device: str) -> float:
    """Radii of the network that was exported on the device: none larger than those of the CPU by more than rounding."""
    shape = tuple(x.shape[1:])
    plain = lipkit.export(here.eval(), shape)
    labels = plain(x).argmax(1)
    ours = lipkit.certify(plain, x, labels).radius
    network = lipkit.export(there.eval(), shape)
    theirs = lipkit.certify(network, x.to(device), labels.to(device), device=device).radius
    return distance(theirs, ours)


def check_step(here: nn.Module, there: nn.Module, x: Tensor, device: str) -> float:
    """Ten steps of Adam under bfloat16 autocast; the constant that is proved afterwards, above that of before."""
    model = copy.deepcopy(there).train()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    before = float(lipkit.lipschitz(there, tuple(x.shape[1:])).detach())
    for _ in range(10):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = model(x.to(device)).float().square().sum()
        loss.backward()
        optimizer.step()
        lipkit.layers.after_step(model, tuple(x.shape[1:]))
    plain = lipkit.export(model.eval(), tuple(x.shape[1:]))
    return max(0.0, float(lipkit.lipschitz(plain)) / before - 1)


# name: (check, largest value)
CHECKS: dict[str, tuple[Callable[[nn.Module, nn.Module, Tensor, str], float], float]] = {
    "forward": (check_forward, 1e-10),
    "gradients": (check_gradients, 1e-8),
    "bound": (check_bound, 1e-5),
    "certificate": (check_certificate, 1e-3),
    "bfloat16 training": (check_step, 1e-4),
}


def checks(device: str, toy: bool, end: float) -> dict[str, Any]:
    """Every family on the device against the CPU: {family: {check: value or what went wrong}}."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found: dict[str, Any] = {}
    for name in ["cayley", "eco"] if toy else families.names():
        torch.manual_seed(0)
        here = network(name)
        there, x = copy.deepcopy(here).to(device), torch.rand(4, 3, 8, 8)
        found[name] = {}
        for what, (check, most) in CHECKS.items():
            if time.monotonic() > end:
                return found | {"cut": f"before {name}, {what}"}
            try:
                value = check(here, there, x, device)
            except Exception as error:  # a finding
                found[name][what] = f"{type(error).__name__}: {str(error)[:300]}"
            else:
                found[name][what] = value if value <= most else f"expected at most {most:g}, got {value:g}"
    return found


# --- suite, speed, training -------------------------------------------------------------------------------------------


def suite(folder: str) -> Callable[[str, bool, float], dict[str, Any]]:
    """The tests of one file or folder in a process of its own."""

    def step(device: str, toy: bool, end: float) -> dict[str, Any]:
        place = "tests/benchmarks/test_arithmetic.py" if toy else f"tests/{folder}"
        options = ["-p", "no:cacheprovider", "-p", "no:benchmark", "-m", "fast"]
        return run([sys.executable, "-m", "pytest", place, *options], end)

    return step


def run(command: list[str], end: float) -> dict[str, Any]:
    """A command until it ends or time is up: exit status (None if cut) and its last lines."""
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
    )
    try:
        said, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
        status: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()  # a training has its checkpoint
        said, status = process.communicate()[0], None
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "said": said.splitlines()[-40:]}


def speed(device: str, toy: bool, end: float) -> dict[str, Any]:
    """Milliseconds of a training step and of the exported forward pass, for each arithmetic, over nn.Conv2d's."""
    found: dict[str, Any] = {}
    shapes = [(8, 6, 4)] if toy else [(128, 16, 128), (256, 8, 128), (512, 8, 256)]
    for channels, side, batch in shapes:
        x = torch.rand(batch, channels, side, side, device=device)
        plain = nn.Conv2d(channels, channels, 3, padding=1, padding_mode="circular").to(device)
        for kind in ("float32", "tf32", "bfloat16"):
            with arithmetic(kind, device):
                reference = times(plain, plain, x, device)
                row: dict[str, Any] = {"nn.Conv2d, ms": [round(1e3 * seconds, 4) for seconds in reference]}
                found[f"{channels}@{side} batch {batch} {kind}"] = row
                for name in ["cayley"] if toy else families.names():
                    if time.monotonic() > end:
                        return found | {"cut": f"before {name}"}
                    family = families.get(name)
                    if not family.accepts(3, side, side):
                        continue
                    try:
                        layer = family.conv(channels, channels, 3).to(device)
                        exported = lipkit.export(copy.deepcopy(layer).eval(), (channels, side, side))
                        ratio = [a / b for a, b in zip(times(layer, exported, x, device), reference, strict=True)]
                        row[name] = [round(r, 3) for r in ratio]
                    except Exception as error:  # a finding
                        row[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def times(layer: nn.Module, exported: nn.Module, x: Tensor, device: str) -> tuple[float, float]:
    """Seconds of a training step and of a forward pass without gradients."""

    def step() -> None:
        layer.zero_grad()
        layer(x).square().sum().backward()

    def forward() -> None:
        with torch.no_grad():
            exported(x)

    return clock(step, device), clock(forward, device)


def inverses(device: str, toy: bool, end: float) -> dict[str, Any]:
    """Milliseconds of the inverses of Cayley layers: by LU factors, and by blocks, which the CPU alone uses so far."""
    found: dict[str, Any] = {}
    for count, side in [(4, 32)] if toy else [(510, 32), (126, 64), (126, 128), (30, 256), (6, 512)]:
        for dtype in (torch.complex64, torch.float32):
            if time.monotonic() > end:
                return found | {"cut": f"before {count} of {side}"}
            g = torch.randn(count, side, side, dtype=dtype, device=device) / side**0.5
            n = torch.eye(side, dtype=dtype, device=device) + g - g.mH
            found[f"{count} of {side}, {str(dtype).removeprefix('torch.')}"] = {
                "torch.linalg.inv, ms": round(1e3 * clock(partial(torch.linalg.inv, n), device), 3),
                "by blocks, ms": round(1e3 * clock(partial(inverse_by_blocks, n), device), 3),
                "distance": float((inverse_by_blocks(n) - torch.linalg.inv(n)).abs().max()),
            }
    return found


def memory(device: str, toy: bool, end: float) -> dict[str, Any]:
    """MiB that a training step of KWLarge takes at most, beside that of the plain network."""
    found: dict[str, Any] = {}
    for layer in ("plain", "cayley", "eco", "soc", "bcop"):
        if time.monotonic() > end:
            return found | {"cut": f"before {layer}"}
        shape = (3, 8, 8) if toy else (3, 32, 32)
        kernel = {"kernel_size": 2 if toy else 4} if layer == "eco" else {}
        try:
            model = models.build("kwlarge", layer=layer, input_shape=shape, **kernel).to(device)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            x = torch.rand(4 if toy else 256, *shape, device=device)
            model(x).square().sum().backward()
            found[layer] = round(torch.cuda.max_memory_allocated() / 2**20) if device == "cuda" else "no GPU"
        except Exception as error:  # a finding
            found[layer] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def recorded(device: str, toy: bool, end: float) -> dict[str, Any]:
    """Images a second of PatchNets in training: launched kernel by kernel, and recorded as a CUDA graph."""
    found: dict[str, Any] = {}
    sizes = {"the hour's": ([[32, 3], [128, 3]], 512), "twice as large": ([[128, 4], [512, 8]], 1024)}
    count = 1024 if toy else 50000
    data = lipkit.data.Split(torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8), torch.arange(count) % 10)
    options: dict[str, Any] = {"epochs": 1 if toy else 2, "optimizer": "spectral", "accelerator": device}
    for (name, (stages, batch)), graph in itertools.product(sizes.items(), (False, True)):
        if time.monotonic() > end:
            return found | {"cut": f"before {name}"}
        model = models.patchnet(2, stages, narrow=64, input_shape=(3, 32, 32), classes=10)
        try:
            run = lipkit.fit(model, data, batch_size=batch, cuda_graph=graph and not toy, **options)
            found[f"{name}{', recorded' if graph else ''}"] = run.history[-1]["samples_per_second"]
        except Exception as error:  # a finding
            found[f"{name}{', recorded' if graph else ''}"] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def training(name: str, out: Path, data: str | None) -> Callable[[str, bool, float], dict[str, Any]]:
    """A recipe at its full size, cut when time is up and continued by the next call."""

    def step(device: str, toy: bool, end: float) -> dict[str, Any]:
        folder = out / "runs"
        begun = sorted(folder.glob(f"{TRAININGS[name]}-*")) if folder.is_dir() else []
        train = [sys.executable, "-m", "lipkit.cli.main", "train"]
        if begun:
            return run([*train, "--resume", str(begun[-1])], end)
        recipe = ["digits_cayley", f"name={TRAININGS[name]}", "train.epochs=1", "certify.attack_steps=2"]
        if not toy:
            recipe = [TRAININGS[name], "train.checkpoint_seconds=60", f"train.accelerator={device}"]
            recipe += [] if data is None else [f"data.root={data}"]
        return run([*train, *recipe, "--out", str(folder)], end)

    return step


# --- the day ----------------------------------------------------------------------------------------------------------


def steps(out: Path, data: str | None) -> dict[str, Callable[[str, bool, float], dict[str, Any]]]:
    """Every step by name, in the order of what is worth most if time runs short."""
    return {
        "checks": checks,
        "speed": speed,
        "inverses": inverses,
        "kwlarge": training("kwlarge", out, data),
        "memory": memory,
        "recorded": recorded,
        **{f"suite-{folder}": suite(folder) for folder in SUITE},
        "flagship": training("flagship", out, data),
    }


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {"gpu": gpu, "torch": torch.__version__, "python": platform.python_version(), "lipkit": lipkit.__version__}


def finished(file: Path) -> bool:
    """A step is done unless it was cut."""
    found = json.loads(read_text(file))["found"] if file.exists() else {"cut": "not begun"}
    return "cut" not in found and found.get("status", 0) is not None


def report(out: Path, names: list[str]) -> str:
    """All that was found, as Markdown."""
    lines = ["# A day on a GPU", "", " · ".join(f"{key} {value}" for key, value in machine().items()), ""]
    for name in names:
        lines.append(f"## {name}\n")
        if not (out / f"{name}.json").exists():
            lines.append("not made\n")
            continue
        found = json.loads(read_text(out / f"{name}.json"))
        state = "" if finished(out / f"{name}.json") else ", cut: call it again"
        lines.append(f"{found['seconds']} s{state}\n\n```json\n{json.dumps(found['found'], indent=1)}\n```\n")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", help="folder of CIFAR-10")
    parser.add_argument("--step", action="append", help="this step, done or not; may be repeated")
    parser.add_argument("--all", action="store_true", help="all steps that are not done")
    parser.add_argument("--toy", action="store_true", help="seconds on the CPU")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of one step [540]")
    given = parser.parse_args(arguments)
    if not given.toy and not torch.cuda.is_available():
        sys.exit("expected a GPU, got none: --toy shows the steps on the CPU")
    known = steps(given.out, given.data)
    unknown = [name for name in given.step or () if name not in known]
    if unknown:
        sys.exit(f"--step: expected one of {', '.join(known)}, got {', '.join(unknown)}")
    given.out.mkdir(parents=True, exist_ok=True)
    left = given.step or [name for name in known if not finished(given.out / f"{name}.json")]
    for name in left if given.all or given.step else left[:1]:
        start = time.monotonic()
        found = known[name]("cpu" if given.toy else "cuda", given.toy, start + given.limit)
        content = {"machine": machine(), "seconds": round(time.monotonic() - start, 1), "found": found}
        write_atomic(given.out / f"{name}.json", json.dumps(content, indent=1).encode())
        write_atomic(given.out / "report.md", report(given.out, list(known)).encode())
        print(
            f"{name}: {content['seconds']} s, {'done' if finished(given.out / f'{name}.json') else 'cut'}", flush=True
        )


if __name__ == "__main__":
    main()
