"""Integer programs in C: bits on test images with the compilers at hand, and the time of an image beside onnxruntime.

    python benchmarks/integer.py --root DATA [digits-cayley mnist-patchnet cifar10-patchnet-hour]

Bits: the logits of each build on the first images are those of the reference in torch. Time: one image at a time, C
(-O3 -march=native, called through ctypes) and onnxruntime in float32 with one thread by turns, process time, medians.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import onnxruntime
import torch

import lipkit
from lipkit.data import load
from lipkit.integer.c_source import compile_c, run_c
from lipkit.interop import integer_program, write_c, write_onnx

STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic"]
FLAGS = (["-O0"], ["-O3"], ["-fsanitize=undefined,address", "-fno-sanitize-recover=all"])
# Other processors, emulated: Debian's gcc-arm-linux-gnueabihf, gcc-powerpc-linux-gnu and qemu-user.
OTHERS = {
    "32-bit ARM": ("arm-linux-gnueabihf-gcc", ["qemu-arm"]),
    "big-endian 32-bit PowerPC": ("powerpc-linux-gnu-gcc", ["qemu-ppc"]),
}
BUILDS: list[tuple[str, str, list[str], list[str]]] = [
    *((f"{cc} {' '.join(flags)}", cc, flags, []) for cc in ("gcc", "clang") for flags in FLAGS),
    *((name, cc, ["-O2", "-static"], emulator) for name, (cc, emulator) in OTHERS.items()),
]


def bits(source: Path, q: torch.Tensor, wanted: torch.Tensor) -> None:
    """Say for each build on how many inputs the logits are the wanted ones."""
    for name, cc, flags, emulator in BUILDS:
        if missing := [tool for tool in (cc, *emulator) if shutil.which(tool) is None]:
            print(f"{name}: not run without {missing[0]}", flush=True)
            continue
        start = time.perf_counter()
        program = compile_c(source, source.with_suffix(""), [*STRICT, *flags], cc)
        seconds = time.perf_counter() - start
        same = int((run_c(program, q, emulator).logits == wanted).all(1).sum())
        print(f"{name}: {same} of {len(q)} the same, compiled in {seconds:.0f} s", flush=True)


def latency(network: lipkit.modules.Network, source: Path, x: torch.Tensor, q: torch.Tensor) -> tuple[float, float]:
    """Seconds of one image: the C program, and onnxruntime in float32."""
    library = source.with_suffix(".so")
    flags = ["-std=c99", "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(["cc", *flags], check=True)
    classify = ctypes.CDLL(str(library)).lipkit_classify
    work = (ctypes.c_int32 * 10**6)()
    logits = (ctypes.c_int32 * 1000)()
    inputs = [(ctypes.c_int32 * len(row))(*row) for row in q.tolist()]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    path = str(write_onnx(network, source.with_suffix(".onnx")))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    ours, theirs = [], []
    for image, given in zip(x.float().numpy()[:, None], inputs, strict=True):
        start = time.process_time()
        classify(given, logits, work)
        middle = time.process_time()
        session.run(None, {"input": image})
        ours.append(middle - start)
        theirs.append(time.process_time() - middle)
    return statistics.median(ours[10:]), statistics.median(theirs[10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["digits-cayley", "mnist-patchnet", "cifar10-patchnet-hour"])
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--test", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.networks:
        data = load(name.split("-")[0], root=args.root)
        parts = [part.batch(torch.arange(min(args.test, len(part))))[0] for part in (data.test, data.train)]
        x = torch.cat(parts)[: args.test]  # the digits have fewer test images
        network = lipkit.load(name)
        program, _ = integer_program(network)
        q = program.quantise(x)
        wanted = torch.cat([program.run(part) for part in q.split(100)])
        with tempfile.TemporaryDirectory() as folder:
            source = write_c(network, Path(folder) / "network.c")
            print(f"{name}: {source.stat().st_size / 1e6:.1f} MB of C, {len(x)} images", flush=True)
            bits(source, q, wanted)
            ours, theirs = latency(network, source, x, q)
            print(f"one image: C {1e3 * ours:.3f} ms, onnxruntime float32 {1e3 * theirs:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
