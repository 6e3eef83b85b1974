"""Corruptions of a run, drawn from a seed: every one makes a claim false, or a file unreadable, and must be refused.

``python -m tests.checker.corruptions --count 10000`` draws many, under a limit of memory, and reports those that pass.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Random = np.random.Generator
CERTIFICATE, CONFIG, WEIGHTS = "certificate.jsonl", "network/config.json", "network/model.safetensors"
FILES = (CERTIFICATE, CONFIG, WEIGHTS)


class Run:
    """The three files of a run, taken apart and put together again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        header, *rows = (folder / CERTIFICATE).read_text().splitlines()
        self.header, self.rows = json.loads(header), [json.loads(row) for row in rows]
        self.config = json.loads((folder / CONFIG).read_text())
        content = (folder / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        self.names, body = json.loads(content[8 : 8 + size]), content[8 + size :]
        self.tensors = {
            name: np.frombuffer(body[slice(*entry["data_offsets"])], "<f4").reshape(entry["shape"]).copy()
            for name, entry in self.names.items()
            if name != "__metadata__"
        }

    def write(self, *, rehash: bool = True) -> None:
        """All three files, with hashes that fit them if asked."""
        if rehash:
            digest = hashlib.sha256(json.dumps(self.config["network"], sort_keys=True).encode())
            for name, a in sorted(self.tensors.items()):
                digest.update(f"{name} torch.float32 {a.shape}".encode() + a.tobytes())
            self.config["sha256"] = self.header["network_sha256"] = digest.hexdigest()
            self.header["architecture"] = [part.get("type") for part in self.config["network"]["modules"]]
        lines = [json.dumps(self.header), *map(json.dumps, self.rows)]
        (self.folder / CERTIFICATE).write_text("\n".join(lines) + "\n")
        (self.folder / CONFIG).write_text(json.dumps(self.config))
        header, body = {}, b""
        for name, a in self.tensors.items():
            header[name] = {"dtype": "F32", "shape": a.shape, "data_offsets": [len(body), len(body) + a.nbytes]}
            body += a.tobytes()
        text = json.dumps(header).encode()
        (self.folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + body)


def bit_of_a_weight(folder: Path, rng: Random) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    (size,) = struct.unpack("<Q", content[:8])
    content[rng.integers(8 + size, len(content))] ^= 1 << int(rng.integers(8))
    (folder / WEIGHTS).write_bytes(content)


def larger_radius(folder: Path, rng: Random) -> None:
    run = Run(folder)
    row = run.rows[rng.integers(len(run.rows))]
    for key in ("radius", "radius_ignored")[int(rng.integers(2)) :]:
        row[key] += float(10 ** rng.uniform(-4, 1))
    run.write()


def infinite_radius(folder: Path, rng: Random) -> None:
    run = Run(folder)
    run.rows[rng.integers(len(run.rows))]["radius"] = ("Infinity", "NaN", float("nan"), -1.0, "1", None, True)[
        rng.integers(7)
    ]
    run.write()


def other_label(folder: Path, rng: Random) -> None:
    run = Run(folder)
    row = run.rows[rng.integers(len(run.rows))]
    key = ("label", "prediction")[rng.integers(2)]
    row[key] = int((row[key] + rng.integers(1, 10)) % 10) if rng.integers(4) else int(rng.choice([-1, 10, 2**40]))
    run.write()


def other_margin(folder: Path, rng: Random) -> None:
    run = Run(folder)
    run.rows[rng.integers(len(run.rows))]["margin"] += float(rng.choice([-1, 1]) * 10 ** rng.uniform(-5, 1))
    run.write()


def class_order(folder: Path, rng: Random) -> None:
    run = Run(folder)
    name, order = max(n for n in run.tensors if n.endswith(".weight")), np.roll(np.arange(10), int(rng.integers(1, 10)))
    for key in (name, name.replace("weight", "bias")):
        run.tensors[key] = np.ascontiguousarray(run.tensors[key][order])
    run.write()


def swapped_samples(folder: Path, rng: Random) -> None:
    run = Run(folder)
    i, j = rng.choice(len(run.rows), 2, replace=False)
    run.rows[i], run.rows[j] = run.rows[j] | {"index": int(i)}, run.rows[i] | {"index": int(j)}
    run.write()


def swapped_images(folder: Path, rng: Random) -> None:
    run = Run(folder)
    with np.load(folder / "samples.npz") as arrays:
        found = dict(arrays)
    i, j = rng.choice(len(run.rows), 2, replace=False)
    found["x_test"][[i, j]] = found["x_test"][[j, i]]
    np.savez(folder / "samples.npz", **found)
    if rng.integers(2):
        digest = hashlib.sha256()
        for kind, a in (("float32", found["x_test"]), ("int64", found["y_test"])):
            digest.update(f"torch.{kind} {a.shape}".encode() + a.tobytes())
        run.header["data"]["sha256"] = digest.hexdigest()
    run.write()


def scaled_layer(folder: Path, rng: Random) -> None:
    run = Run(folder)
    names = sorted({name.rsplit(".", 1)[0] for name in run.tensors})
    layer, factor = names[rng.integers(len(names))], np.float32(2.0 ** (rng.choice([-1, 1]) * rng.uniform(0.01, 3)))
    for name in run.tensors:
        if name.startswith(layer + "."):
            run.tensors[name] = run.tensors[name] * factor
    run.write()


def other_activation(folder: Path, rng: Random) -> None:
    run = Run(folder)
    modules = run.config["network"]["modules"]
    places = [i for i, part in enumerate(modules) if part["type"] == "MaxMin"]
    others: tuple[dict[str, Any], ...] = (
        {"type": "ReLU"}, {"type": "HalfAbs"}, {"type": "GroupSort", "group_size": 4}, {"type": "Tanh"},
        {"type": "LeakyReLU", "negative_slope": 0.5}, {"type": "Abs"}, {"type": 3}, {"kind": "MaxMin"},
    )  # fmt: skip
    modules[rng.choice(places)] = others[rng.integers(len(others))]
    run.write()


def without_module(folder: Path, rng: Random) -> None:
    run = Run(folder)
    modules = run.config["network"]["modules"]
    modules.pop(int(rng.integers(len(modules))))
    run.write()


def not_a_number(folder: Path, rng: Random) -> None:
    run = Run(folder)
    a = run.tensors[sorted(run.tensors)[rng.integers(len(run.tensors))]].reshape(-1)
    a[rng.integers(len(a))] = rng.choice([np.nan, np.inf, -np.inf])
    run.write()


def huge_dimension(folder: Path, rng: Random) -> None:
    run = Run(folder)
    huge = int(rng.choice([2**31 - 1, 10**9, 2**62, 10**30, 0, -1], p=[0.3, 0.3, 0.1, 0.1, 0.1, 0.1]))
    network = run.config["network"]
    match int(rng.integers(4)):
        case 0:
            network["input_shape"][rng.integers(3)] = huge
        case 1:
            part = network["modules"][rng.integers(len(network["modules"]))]
            keys = [k for k, v in part.items() if type(v) is int and k not in ("start_dim", "end_dim")]
            part[keys[rng.integers(len(keys))] if keys else "size"] = huge
        case 2:
            huge = max(huge, 10**9)
            extra = [
                {"type": "Pad", "padding": [huge] * 4},
                {"type": "AdaptiveAvgPool2d", "output_size": huge},
                {"type": "Reshape", "shape": [huge, huge]},
                {"type": "AvgPool2d", "kernel_size": 1, "stride": 1, "padding": huge, "ceil_mode": False,
                 "count_include_pad": True, "divisor_override": None},
                {"type": "Expand", "shape": [huge] * 3},
            ]  # fmt: skip
            network["modules"].insert(0, extra[rng.integers(len(extra))])
        case _:
            content = (folder / WEIGHTS).read_bytes()
            (size,) = struct.unpack("<Q", content[:8])
            entry = run.names[sorted(run.tensors)[rng.integers(len(run.tensors))]]
            key = ("shape", "data_offsets")[rng.integers(2)]
            place = int(rng.integers(len(entry[key])))
            entry[key][place] = huge if huge != entry[key][place] else 10**9
            text = json.dumps(run.names).encode()
            length = len(text) if rng.integers(4) else abs(huge) % 2**64
            (folder / WEIGHTS).write_bytes(struct.pack("<Q", length) + text + content[8 + size :])
            return
    run.write()


def truncated(folder: Path, rng: Random) -> None:
    path = folder / FILES[rng.integers(3)]
    content = path.read_bytes()
    path.write_bytes(content[: rng.integers(len(content.rstrip()))])


def longer(folder: Path, rng: Random) -> None:
    path = folder / FILES[rng.integers(3)]
    tail = (b"{}", b"x" * 100, b'\n{"index":0}\n', b"\0")[rng.integers(4)]
    path.write_bytes(path.read_bytes() + tail)


def missing(folder: Path, rng: Random) -> None:
    path = folder / FILES[rng.integers(3)]
    path.unlink()
    if rng.integers(2):
        os.mkfifo(path)


def header(folder: Path, rng: Random) -> None:
    run = Run(folder)
    changes: tuple[tuple[str, Any], ...] = (
        ("kind", "certificate"), ("schema_version", "2.0"), ("task", "regression"), ("norm", "linf"),
        ("network_sha256", "0" * 64), ("architecture", ["Linear"]), ("input_shape", [1, 8, 9]),
        ("constant", run.header["constant"] * (1 - float(10 ** rng.uniform(-4, 0)))), ("constant", -1.0),
        ("constant", "x"), ("data", None), ("data", run.header["data"] | {"samples": 3}),
        ("body_constant", run.header["body_constant"] * (1 - float(10 ** rng.uniform(-4, 0)))),
        ("data", run.header["data"] | {"sha256": "0" * 64}),
    )  # fmt: skip
    key, value = changes[rng.integers(len(changes))]
    run.write()
    run.header[key] = value
    run.write(rehash=False)


def rows(folder: Path, rng: Random) -> None:
    run = Run(folder)
    i = int(rng.integers(len(run.rows)))
    match int(rng.integers(6)):
        case 0:
            run.rows.pop(i)
        case 1:
            run.rows.append(run.rows[i] | {"index": len(run.rows)})
        case 2:
            run.rows[i]["index"] += 1
        case 3:
            run.rows[i].pop("margin")
        case 4:
            run.rows[i]["more"] = 1
        case _:
            run.rows[i] = [1, 2, 3]
    run.write()


def form(folder: Path, rng: Random) -> None:
    """JSON that other readers read in other ways, or that is too deep."""
    run = Run(folder)
    run.write()
    path = folder / (CERTIFICATE, CONFIG)[rng.integers(2)]
    text = path.read_text()
    match int(rng.integers(4)):
        case 0:
            text = text.replace('"schema_version":', '"schema_version": 7, "schema_version":', 1)
        case 1:
            text = "[" * 10**5 + text
        case 2:
            text = text.replace('"input_shape": [', '"input_shape": [NaN, ', 1)
        case _:
            text = text.encode("utf-16").decode("latin-1")
    path.write_text(text)


def tensors(folder: Path, rng: Random) -> None:
    """Tensors that are missing, too many, of another shape, or of a type that nobody reads."""
    run = Run(folder)
    name = sorted(run.tensors)[rng.integers(len(run.tensors))]
    match int(rng.integers(4)):
        case 0:
            run.tensors.pop(name)
        case 1:
            run.tensors[name + "x"] = np.zeros(3, np.float32)
        case 2:
            run.tensors[name] = run.tensors[name].reshape(-1, 1, *run.tensors[name].shape[1:])
        case _:
            content = (folder / WEIGHTS).read_bytes()
            (folder / WEIGHTS).write_bytes(content.replace(b'"F32"', b'"I32"', 1))
            return
    run.write()


CORRUPTIONS: tuple[Callable[[Path, Random], None], ...] = (
    bit_of_a_weight, larger_radius, infinite_radius, other_label, other_margin, class_order, swapped_samples,
    swapped_images, scaled_layer, other_activation, without_module, not_a_number, huge_dimension, truncated, longer,
    missing, header, rows, form, tensors,
)  # fmt: skip


def corrupted(source: Path, seed: int, target: Path) -> str:
    """A corrupted copy of a run in ``target``, and the name of what was done to it."""
    rng = np.random.default_rng(seed)
    corruption = CORRUPTIONS[seed % len(CORRUPTIONS)]
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    corruption(target, rng)
    return corruption.__name__


def main() -> None:
    import torch
    from tests.checker.runs import digits, tiny, verdict, write_run

    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--memory", type=int, default=2 << 30, help="bytes beyond what the process has")
    count = parser.parse_args().count
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        source, target = Path(place, "run"), Path(place, "corrupted")
        write_run(source, tiny(), digits(12)[0])
        assert verdict(source) == 0
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + parser.parse_args().memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        passed, kinds, slowest, reasons = [], Counter(), 0.0, Counter()
        for seed in range(count):
            name = corrupted(source, seed, target)
            said, start = io.StringIO(), time.process_time()
            with contextlib.redirect_stdout(said):
                code = verdict(target)
            slowest = max(slowest, time.process_time() - start)
            kinds[name] += 1
            reasons[said.getvalue().strip().splitlines()[-1][:40]] += 1
            if code != 1:
                passed.append((seed, name))
        print(f"{count} corruptions of {len(kinds)} kinds, {len(passed)} passed, slowest {slowest:.2f} s of CPU")
        print(passed[:50])
        for reason, number in reasons.most_common(40):
            print(f"{number:6d}  {reason}")


if __name__ == "__main__":
    main()
