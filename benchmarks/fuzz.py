"""Claim: no file makes a reader crash, hang, or take memory without bound.

Valid files are mutated (flipped bits, cut, repeated and spliced pieces, extreme integers, words of the format) and
read; a reader may succeed or raise an error of lipkit, within `SECONDS` and `BYTES`. Anything else stops the run and
keeps the file. `python benchmarks/fuzz.py --minutes 10`; the same seed gives the same files.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import pickle
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

import lipkit
from lipkit import models, modules
from lipkit.certificates.certificate_file import describe, read_certificate, write_certificate
from lipkit.data.binary import read_binary, read_idx, read_images, read_python
from lipkit.errors import LipkitError
from lipkit.interop import from_pretrained, save_pretrained

SECONDS, BYTES = 20, 1 << 29
WORDS = (
    b"null", b"NaN", b"Infinity", b"-1", b"1e999", b"[]", b"{}", b'""', b"true", b"[[[[[[", b'{"a":', b"\x00",
    b"\xff" * 8, b"os\nsystem\n", b"cnumpy\nndarray\n", b"(", b".", b"\x80\x02", b"\x8c\x02os", b"\x93",
    b"F32", b"BF16", b"data_offsets",
)  # fmt: skip
Reader = Callable[[Path], object]


def corpus(folder: Path) -> dict[str, tuple[Path, Path, Reader]]:
    """By name: the valid file, what its reader is given, and the reader."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    options = {"input_shape": (1, 6, 6), "classes": 3, "layer": "cayley"}
    model = models.build("small", **options)
    network = lipkit.export(model, (1, 6, 6))
    modules.save(network, folder / "network")
    save_pretrained(
        model, folder / "hub", name="small", options=options, input_shape=(1, 6, 6), classes=["a", "b", "c"]
    )
    x, y = torch.rand(4, 1, 6, 6), torch.tensor([0, 1, 2, 0])
    certificate = lipkit.certify(network, x, y)
    write_certificate(describe(certificate, network, x, y, "toy"), folder / "certificate.jsonl")
    images = struct.pack(">IIII", 2051, 5, 4, 3) + rng.bytes(60)
    (folder / "images").write_bytes(images)
    (folder / "images.gz").write_bytes(gzip.compress(images))
    (folder / "cifar.bin").write_bytes(b"".join(bytes([label]) + rng.bytes(3072) for label in (0, 9)))
    batch = {b"data": rng.integers(0, 256, (2, 3072), dtype=np.uint8), b"labels": [3, 4], b"batch_label": b"b"}
    for protocol in (2, 4):
        (folder / f"cifar.pickle{protocol}").write_bytes(pickle.dumps(batch, protocol=protocol))
    (folder / "stl.bin").write_bytes(rng.bytes(3 * 96 * 96))
    np.savez(folder / "a.npz", x_train=rng.random((3, 2)), y_train=[0, 1, 0], x_test=rng.random((2, 2)), y_test=[0, 1])

    def rehashed(path: Path) -> object:
        # With the hash of what is there, so that the weights themselves are looked at.
        config = json.loads((path / "config.json").read_text())
        config["sha256"] = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
        (path / "config.json").write_text(json.dumps(config))
        return from_pretrained(path)

    def alone(name: str, reader: Reader) -> tuple[Path, Path, Reader]:
        return folder / name, folder / name, reader

    return {
        "certificate": alone("certificate.jsonl", read_certificate),
        "network config": (folder / "network" / "config.json", folder / "network", modules.load),
        "network weights": (folder / "network" / "model.safetensors", folder / "network", modules.load),
        "hub config": (folder / "hub" / "config.json", folder / "hub", from_pretrained),
        "hub weights": (folder / "hub" / "model.safetensors", folder / "hub", rehashed),
        "idx": alone("images", lambda path: read_idx(path, 3)),
        "idx.gz": alone("images.gz", lambda path: read_idx(path, 3)),
        "cifar binary": alone("cifar.bin", read_binary),
        "cifar pickle 2": alone("cifar.pickle2", read_python),
        "cifar pickle 4": alone("cifar.pickle4", read_python),
        "stl binary": alone("stl.bin", read_images),
        "npz": alone("a.npz", lambda path: lipkit.data.load(f"npz:{path}")),
    }


def mutate(content: bytes, random_: random.Random) -> bytes:
    """A few random edits; most near the start, where the headers are."""
    data = bytearray(content)
    for _ in range(random_.choice((1, 1, 2, 3, 8))):
        size = len(data)
        at = random_.randrange(size + 1) if random_.random() < 0.5 else random_.randrange(min(size, 400) + 1)
        kind = random_.randrange(8)
        if kind == 0 and size:
            data[at % size] ^= 1 << random_.randrange(8)
        elif kind == 1 and size:
            data[at % size] = random_.choice((0, 1, 0x7F, 0x80, 0xFF, random_.randrange(256)))
        elif kind == 2:
            del data[at : at + random_.choice((1, 4, 64, size))]
        elif kind == 3:
            data[at:at] = data[at : at + random_.choice((1, 16, 256))] * random_.choice((1, 2, 50))
        elif kind == 4:
            data[at:at] = random_.choice(WORDS)
        elif kind == 5:
            word = random_.choice(WORDS)
            data[at : at + len(word)] = word
        elif kind == 6:
            form, value = random_.choice(
                (("<I", 2**32 - 1), (">I", 2**31 - 1), ("<Q", 2**63), ("<Q", 2**40), (">I", 0))
            )
            packed = struct.pack(form, value)
            data[at : at + len(packed)] = packed
        else:
            numbers = [i for i in range(min(size, 4000)) if chr(data[i]).isdigit()]
            if numbers:
                start = random_.choice(numbers)
                data[start : start + 1] = random_.choice(
                    (b"-1", b"0", b"99999999999", b"1e400", b"4096", b"2147483648")
                )
    return bytes(data)


def _late(*_: object) -> NoReturn:
    raise TimeoutError(f"expected the reader to end within {SECONDS} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", type=Path, default=Path("fuzz-failure"), help="where a file that breaks a reader goes"
    )
    given = parser.parse_args()
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _late)
    random_ = random.Random(given.seed)
    counts: dict[str, list[int]] = {}
    slowest: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        targets = corpus(Path(name))
        contents = {key: path.read_bytes() for key, (path, _, _) in targets.items()}
        for key, (_, given_path, reader) in targets.items():
            reader(given_path)  # the unchanged file is read
            counts[key] = [0, 0]
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        tracemalloc.start()
        end = time.monotonic() + 60 * given.minutes
        while time.monotonic() < end:
            key = random_.choice(list(targets))
            path, given_path, reader = targets[key]
            content = mutate(contents[key], random_)
            path.write_bytes(content)
            tracemalloc.reset_peak()
            before, started = tracemalloc.get_traced_memory()[0], time.process_time()
            signal.alarm(SECONDS)
            try:
                reader(given_path)
                counts[key][0] += 1
            except LipkitError:
                counts[key][1] += 1
            except BaseException as error:
                signal.alarm(0)
                given.keep.write_bytes(content)
                sys.exit(f"{key}: {type(error).__name__}: {error}\nthe file is kept as {given.keep}")
            signal.alarm(0)
            peak = tracemalloc.get_traced_memory()[1] - before
            if peak > BYTES:
                given.keep.write_bytes(content)
                sys.exit(f"{key}: expected at most {BYTES} bytes, got {peak}\nthe file is kept as {given.keep}")
            slowest[key] = max(slowest.get(key, 0.0), time.process_time() - started)
            path.write_bytes(contents[key])
    total = {
        key: {"read": a, "refused": b, "slowest s": round(slowest.get(key, 0), 3)} for key, (a, b) in counts.items()
    }
    print(json.dumps(total, indent=1))
    print(f"{sum(a + b for a, b in counts.values())} files, seed {given.seed}, {given.minutes} minutes: no failure")


if __name__ == "__main__":
    main()
