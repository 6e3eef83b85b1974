"""Processor seconds of `python -m lipkit_check`, the independent checker, loading included (docs/lab/networks.md).

    python benchmarks/checker.py --root DATA [digits-cayley kwlarge-eco ...]

The networks that come with lipkit on their whole test sets, KWLarge with random weights on 1,000 images; each once in
floating point, and 100 samples with ``--exact``.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tests.checker.runs import write_run

import lipkit
from lipkit import models
from lipkit.data import load
from lipkit.text import table

SHIPPED = ("digits-cayley", "mnist-cayley", "mnist-patchnet", "mnist-lbdn", "cifar10-patchnet-hour", "cifar10-patchnet")
KWLARGE = tuple(f"kwlarge-{family}" for family in ("cayley", "eco", "bcop", "soc"))


def seconds(folder: Path, *options: str) -> tuple[float, str]:
    """Of a check, and the last line that it says."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "lipkit_check", str(folder), str(folder / "samples.npz"), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = (done.stdout + done.stderr).strip().splitlines() or [""]
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, said[-1]


def kwlarge(family: str) -> torch.nn.Module:
    """With random weights; ECO's kernels divide the image."""
    return models.kwlarge(family, kernel_size=4 if family == "eco" else 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=[*SHIPPED, *KWLARGE])
    parser.add_argument("--root", type=Path, default=Path("data"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in args.networks:
        torch.manual_seed(0)
        dataset = "cifar10" if name in KWLARGE else name.split("-")[0]
        test = load(dataset, root=args.root).test
        count = 1000 if name in KWLARGE else len(test)
        x, y = test.batch(torch.arange(count))
        network = kwlarge(name.split("-")[1]) if name in KWLARGE else lipkit.load(name)
        with tempfile.TemporaryDirectory() as place:
            write_run(Path(place), network, x, None if name in KWLARGE else y)
            plain, said = seconds(Path(place))
            exact, exact_said = seconds(Path(place), "--samples", "100", "--exact")
        print(f"{name}: {plain:.0f} s: {said}\n    {exact:.0f} s: {exact_said}", flush=True)
        rows.append([name, f"{count:,}", f"{plain:.0f}", "100", f"{exact:.0f}"])
    print(table(["network", "samples", "float64", "samples", "`--exact`"], rows, markdown=True))


if __name__ == "__main__":
    main()
