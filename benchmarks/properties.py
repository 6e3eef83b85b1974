"""Claim: properties 1 to 4 of ACAS Xu networks are decided within a minute each, none wrongly.

    python -m benchmarks.properties FOLDER --seconds 60      # every ACASXU_run2a_*.onnx in FOLDER; writes a table

The properties are those of Katz et al., "Reluplex", CAV 2017, appendix VI, with the networks' normalisation of inputs
(and of output 0 in property 1). What holds is tried at random inputs in the evaluator's arithmetic besides.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
import time
from pathlib import Path

import torch

from lipkit.certificates import read_vnnlib, verify_property
from lipkit.interop import load_onnx
from lipkit.text import table

# Distance, angle, heading, own speed, speed of the intruder: mean and range, and the box of each property.
MEANS, RANGES = (19791.091, 0.0, 0.0, 650.0, 600.0), (60261.0, 6.28318530718, 6.28318530718, 1100.0, 1200.0)
FAR = ((55947.691, 60760.0), (-math.pi, math.pi), (-math.pi, math.pi), (1145.0, 1200.0), (0.0, 60.0))
NEAR = ((1500.0, 1800.0), (-0.06, 0.06))
BOXES = {
    1: FAR,
    2: FAR,
    3: (*NEAR, (3.1, math.pi), (980.0, 1200.0), (960.0, 1200.0)),
    4: (*NEAR, (0.0, 0.0), (1000.0, 1200.0), (700.0, 800.0)),
}
# Output 0 is above 1500; it is the largest; it is the smallest.
LARGE = (1500 - 7.5188840201005975) / 373.94992
UNSAFE = {
    1: [f"(>= Y_0 {LARGE!r})"],
    2: [f"(>= Y_0 Y_{i})" for i in range(1, 5)],
    **{number: [f"(<= Y_0 Y_{i})" for i in range(1, 5)] for number in (3, 4)},
}


def property_text(number: int) -> str:
    """The property as VNN-LIB.

    >>> property_text(4).splitlines()[4]
    '(assert (and (>= X_2 0.0) (<= X_2 0.0)))'
    """
    names = [*(f"X_{i}" for i in range(5)), *(f"Y_{i}" for i in range(5))]
    lines = ["".join(f"(declare-const {name} Real)" for name in names)]
    lines.append(f"; property {number}: an input and outputs that break it")
    for i, ((low, high), mean, width) in enumerate(zip(BOXES[number], MEANS, RANGES, strict=True)):
        lines.append(f"(assert (and (>= X_{i} {(low - mean) / width!r}) (<= X_{i} {(high - mean) / width!r})))")
    return "\n".join([*lines, *(f"(assert {atom})" for atom in UNSAFE[number])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--samples", type=int, default=1_000_000, help="random inputs where a property holds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for path in sorted(options.folder.glob("*ACASXU_run2a_*.onnx")):
        network, name = load_onnx(path), "_".join(re.findall(r"run2a_(\d)_(\d)", path.name)[0])
        for number in BOXES:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / f"property_{number}.vnnlib"
                file.write_text(property_text(number))
                cases = read_vnnlib(file, network)
            begun = time.process_time()
            found = verify_property(network, cases, seconds=options.seconds)
            seconds = time.process_time() - begun
            low, high = (
                torch.tensor([float(end[i]) for end in cases[0].box]).view(network.input_shape) for i in (0, 1)
            )
            broken = 0
            for _ in range(options.samples // 10_000):
                with torch.no_grad():
                    y = network(low + (high - low) * torch.rand(10_000, *network.input_shape)).double()
                others = y[:, 1:]
                broken += int(
                    {1: y[:, 0] >= LARGE, 2: (y[:, :1] >= others).all(1)}.get(number, (y[:, :1] <= others).all(1)).sum()
                )
            if found.answer == "holds" and broken:
                raise SystemExit(f"{name}: property {number} holds, and {broken} random inputs break it")
            rows.append([name, str(number), found.answer, f"{found.boxes}", f"{seconds:.1f}", f"{broken}"])
            print(rows[-1], flush=True)
    print(
        table(["network", "property", "answer", "boxes", "seconds", "random inputs that break it"], rows, markdown=True)
    )


if __name__ == "__main__":
    main()
