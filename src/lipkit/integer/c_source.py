"""An integer program as one C99 file and a header: no dependencies, no floating point."""

import math
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lipkit.errors import OptionError, RunError
from lipkit.integer.program import Fold, IntBlend, IntLinear, Move, Operation, Program, Sort

RADIUS_FRACTION = 30
"""Radii of the C program are multiples of 2^-30."""

_ROUND = """\
/* floor(2^-shift sum + 1/2), without a shift of a negative number; the sum is below 2^62 by proof */
static int32_t rounded(int64_t sum, int shift)
{
    sum += (int64_t)1 << (shift - 1);
    return (int32_t)(sum >= 0 ? sum >> shift : ~(~sum >> shift));
}
"""

_FUNCTIONS = {
    "move": """\
static void move(const int32_t *x, int32_t *y, const int32_t *index, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        y[i] = index[i] < 0 ? 0 : x[index[i]];
}
""",
    "sort": """\
/* columns of length numbers in descending order */
static void sort(const int32_t *x, int32_t *y, int32_t outer, int32_t length, int32_t inner)
{
    int32_t o, i, j, k;
    for (o = 0; o < outer; o++, x += length * inner, y += length * inner) {
        if (length == 2) {
            for (i = 0; i < inner; i++) {
                const int32_t a = x[i], b = x[inner + i];
                y[i] = a > b ? a : b;
                y[inner + i] = a > b ? b : a;
            }
            continue;
        }
        for (i = 0; i < inner; i++)
            for (k = 0; k < length; k++) {
                const int32_t value = x[k * inner + i];
                for (j = k; j > 0 && y[(j - 1) * inner + i] < value; j--)
                    y[j * inner + i] = y[(j - 1) * inner + i];
                y[j * inner + i] = value;
            }
    }
}
""",
    "fold": """\
/* max(x, sign x) of the first count numbers: sign 0 is ReLU, sign -1 the absolute value */
static void fold(const int32_t *x, int32_t *y, int32_t sign, int32_t count, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        y[i] = i < count && x[i] < 0 ? sign * x[i] : x[i];
}
""",
    "blend": """\
static void blend(const int32_t **x, const int32_t *factors, int count, int32_t *y, int shift, int32_t n)
{
    int32_t i;
    int k;
    for (i = 0; i < n; i++) {
        int64_t sum = 0;
        for (k = 0; k < count; k++)
            sum += (int64_t)factors[k] * x[k][i];
        y[i] = rounded(sum, shift);
    }
}
""",
    "dense": """\
static void dense(const int32_t *x, int32_t *y, const int32_t *w, const int64_t *b, int32_t rows, int32_t n, int shift)
{
    int32_t i, j;
    for (i = 0; i < rows; i++, w += n) {
        int64_t sum = b[i];
        for (j = 0; j < n; j++)
            sum += (int64_t)w[j] * x[j];
        y[i] = rounded(sum, shift);
    }
}
""",
    "convolve": """\
/* without padding; shape: rows, groups, channels, height, width, kernel, stride and dilation of rows and columns */
static void convolve(const int32_t *x, int32_t *y, const int32_t *w, const int64_t *b, const int32_t *shape, int shift)
{
    const int32_t rows = shape[0], groups = shape[1], inner = shape[2] / groups, height = shape[3], width = shape[4];
    const int32_t kh = shape[5], kw = shape[6], sy = shape[7], sx = shape[8], dy = shape[9], dx = shape[10];
    const int32_t oh = (height - dy * (kh - 1) - 1) / sy + 1, ow = (width - dx * (kw - 1) - 1) / sx + 1;
    int32_t row, oy, ox, c, ky, kx, k;
    int64_t sum[64];
    for (row = 0; row < rows; row++)
        for (oy = 0; oy < oh; oy++)
            for (ox = 0; ox < ow; ox += 64) {
                const int32_t *weight = w + row * inner * kh * kw;
                const int32_t *image = x + row / (rows / groups) * inner * height * width;
                const int32_t n = ow - ox < 64 ? ow - ox : 64;
                for (k = 0; k < n; k++)
                    sum[k] = b[row];
                for (c = 0; c < inner; c++, image += height * width)
                    for (ky = 0; ky < kh; ky++)
                        for (kx = 0; kx < kw; kx++) {
                            const int32_t *in = image + (oy * sy + ky * dy) * width + ox * sx + kx * dx;
                            const int64_t factor = *weight++;
                            for (k = 0; k < n; k++)
                                sum[k] += factor * in[k * sx];
                        }
                for (k = 0; k < n; k++)
                    y[(row * oh + oy) * ow + ox + k] = rounded(sum[k], shift);
            }
}
""",
}

_HEADER = """\
/* The integer program of a network whose certificates hold for this program, its rounding included.
   Network: sha256 {sha}
   Written by lipkit; nothing here uses floating point, and every target computes the same bits. */
#ifndef {guard}
#define {guard}

#include <stdint.h>

#ifdef __cplusplus
extern "C" {{
#endif

#define {P}INPUTS {inputs} /* numbers of an input, in the order {shape} */
#define {P}INPUT_FRACTION {program.input_fraction} /* an input number q stands for q / 2^{program.input_fraction} */
#define {P}INPUT_LOW ({program.ends[0]}) /* {program.box[0]!r} */
#define {P}INPUT_HIGH ({program.ends[1]}) /* {program.box[1]!r} */
#define {P}CLASSES {radii.classes}
#define {P}LOGIT_FRACTION {program.fraction} /* a logit q stands for q / 2^{program.fraction} */
#define {P}LOGIT_ERROR {radii.error} /* a logit is this close to the exact network's, at every real input in the box */
#define {P}WORK {work} /* numbers of the memory that the caller lends */
#define {P}RADIUS_FRACTION {radius_fraction} /* a radius q stands for q / 2^{radius_fraction}, in units of the input */

/* The nearest input number of value / full, for 0 <= value <= full: (pixel, 255) of an 8-bit image in [0, 1].
   INT32_MAX, which no box holds, for those further above the box. */
int32_t {p}input(int32_t value, int32_t full);

/* The class with the largest logit, the first one of several; -1, and no logits, for numbers outside of the box. */
int {p}classify(const int32_t *x, int32_t *logits, int32_t *work);

/* For every real input closer to x (l2) than this, clamped to the box and rounded to the nearest numbers, the program
   gives the class `label` a larger logit than any other: proved, rounded down; INT64_MAX where nothing changes it;
   0 for a label that is none, as -1. */
int64_t {p}radius(const int32_t *logits, int label);

#ifdef __cplusplus
}}
#endif
#endif
"""

_API = """\
int32_t {p}input(int32_t value, int32_t full)
{{
    const int64_t unit = (int64_t)full << {down};
    if (value > (int64_t)full * ((int64_t){P}INPUT_HIGH + 1) / ((int64_t)1 << {up}))
        return INT32_MAX;
    return (int32_t)((((int64_t)value << {up}) + unit / 2) / unit);
}}

int {p}classify(const int32_t *x, int32_t *logits, int32_t *work)
{{
    int32_t i;
    int best = 0;
    (void)work; /* a single layer needs none */
    for (i = 0; i < {P}INPUTS; i++)
        if (x[i] < {P}INPUT_LOW || x[i] > {P}INPUT_HIGH)
            return -1;
{calls}
    for (i = 1; i < {P}CLASSES; i++)
        if (logits[i] > logits[best])
            best = (int)i;
    return best;
}}

int64_t {p}radius(const int32_t *logits, int label)
{{
    int64_t radius = INT64_MAX;
    int i;
    if (label < 0 || label >= {P}CLASSES)
        return 0;
    for (i = 0; i < {P}CLASSES; i++) {{
        const int pair = label * {P}CLASSES + i;
        const int64_t margin = (int64_t)logits[label] - logits[i] - margin_error[pair];
        if (i == label)
            continue;
        if (margin <= 0)
            return 0;
        if (rate[pair] >= 0 && (margin * rate[pair]) >> {radii.fraction} < radius)
            radius = (margin * rate[pair]) >> {radii.fraction};
    }}
    return radius;
}}

#ifdef LIPKIT_MAIN
#include <inttypes.h>
#include <stdio.h>

static int32_t image[{P}INPUTS], logits[{P}CLASSES], work[{P}WORK];

/* A file of inputs, 32-bit integers with the lowest byte first; a line for each: class, radius, logits. */
int main(int argc, char **argv)
{{
    FILE *file = argc == 2 ? fopen(argv[1], "rb") : NULL;
    unsigned char bytes[4];
    size_t got = 0;
    int32_t n = 0;
    int i;
    if (!file) {{
        fprintf(stderr, "expected one file of {inputs} int32 numbers for each input\\n");
        return 2;
    }}
    while ((got = fread(bytes, 1, 4, file)) == 4) {{
        const uint32_t u = bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
        int label;
        image[n++] = u >> 31 ? -(int32_t)~u - 1 : (int32_t)u;
        if (n < {P}INPUTS)
            continue;
        n = 0;
        label = {p}classify(image, logits, work);
        if (label < 0) {{
            fprintf(stderr, "expected numbers from {program.ends[0]} to {program.ends[1]}\\n");
            fclose(file);
            return 3;
        }}
        {{
            const int64_t radius = {p}radius(logits, label);
            const int64_t rest = radius & (((int64_t)1 << {P}RADIUS_FRACTION) - 1);
            if (radius == INT64_MAX)
                printf("%d inf", label);
            else
                printf("%d %" PRId64 ".%09" PRId64, label, radius >> {P}RADIUS_FRACTION,
                       (rest * 1000000000) >> {P}RADIUS_FRACTION);
        }}
        for (i = 0; i < {P}CLASSES; i++)
            printf(" %" PRId32, logits[i]);
        printf("\\n");
    }}
    fclose(file);
    if (n || got) {{
        fprintf(stderr, "expected whole inputs of {inputs} numbers\\n");
        return 4;
    }}
    return 0;
}}
#endif
"""


class Radii(NamedTuple):
    """Integers that give the C program's radii: ``(margin - error) rate 2^-fraction`` for each pair of classes."""

    classes: int
    errors: list[int]  # of each pair, rounded up
    rates: list[int]  # of each pair, rounded down; -1 if no input changes the margin
    fraction: int
    error: int  # bounds the error of every logit


def c_files(program: Program, radii: Radii, *, sha256: str, header: str, prefix: str) -> tuple[str, str]:
    """The texts of the C file and of its header, in which all declared names start with ``prefix``."""
    places, work = _memory(program)
    tables: list[str] = []
    calls: list[str] = []
    for i, (operation, reads) in enumerate(program.operations):
        x = ", ".join(places[value] for value in reads)
        calls.append(f"    {_call(operation, i, x, places[i + 1], tables)}")
    values = {
        "p": f"{prefix.lower()}_",
        "P": f"{prefix.upper()}_",
        "guard": f"{prefix.upper()}_NETWORK_H",
        "sha": sha256,
        "shape": " x ".join(map(str, program.input_shape)),
        "inputs": math.prod(program.input_shape),
        "program": program,
        "up": max(program.input_fraction, 0),
        "down": min(max(-program.input_fraction, 0), 30),  # the quotient is 0 from 2 on
        "radii": radii,
        "radius_fraction": RADIUS_FRACTION,
        "work": max(work, 1),
        "calls": "\n".join(calls),
    }
    used = [name for name in _FUNCTIONS if any(call.strip().startswith(f"{name}(") for call in calls)]
    parts = [
        f'#include "{header}"\n',
        *tables,
        _table("int64_t", "margin_error", radii.errors),
        _table("int32_t", "rate", radii.rates),
        *([_ROUND] if {"blend", "dense", "convolve"} & set(used) else []),
        *(_FUNCTIONS[name] for name in used),
        _API.format(**values),
    ]
    return "\n".join(parts), _HEADER.format(**values)


def _call(operation: Operation, i: int, x: str, y: str, tables: list[str]) -> str:
    """The C call of operation i, from places x to place y; the tables of its constants are appended to ``tables``."""
    match operation:
        case Move():
            tables.append(_table("int32_t", f"index{i}", operation.index.tolist()))
            return f"move({x}, {y}, index{i}, {operation.size});"
        case Sort():
            return f"sort({x}, {y}, {operation.outer}, {operation.length}, {operation.inner});"
        case Fold():
            return f"fold({x}, {y}, {-1 if operation.kind == 'abs' else 0}, {operation.count}, {operation.size});"
        case IntBlend():
            factors, count = ", ".join(map(str, operation.factors)), len(operation.factors)
            given = f"(const int32_t *[]){{{x}}}, (const int32_t[]){{{factors}}}, {count}"
            return f"blend({given}, {y}, {operation.shift}, {operation.size});"
    assert isinstance(operation, IntLinear)
    tables.append(_table("int32_t", f"weight{i}", operation.weight.flatten().tolist()))
    tables.append(_table("int64_t", f"bias{i}", operation.bias.tolist()))
    given = f"{x}, {y}, weight{i}, bias{i}"
    rows, pixels, shift = len(operation.weight), math.prod(operation.image[1:]), operation.shift
    if operation.groups == 1 and pixels == 1:
        return f"dense({given}, {rows}, {operation.image[0]}, {shift});"
    shape = [rows, operation.groups, *operation.image, *operation.weight.shape[2:]]
    tables.append(_table("int32_t", f"shape{i}", [*shape, *operation.stride, *operation.dilation]))
    return f"convolve({given}, shape{i}, {shift});"


def _memory(program: Program) -> tuple[list[str], int]:
    """The C expression of each value's place, and the size of ``work``, the memory of all intermediate values.

    A place is free again after the last use of its value.
    """
    last = {value: i for i, (_, reads) in enumerate(program.operations) for value in reads}
    places, most = ["x"], 0
    taken: dict[int, tuple[int, int]] = {}
    for i, (operation, _) in enumerate(program.operations):
        taken = {value: span for value, span in taken.items() if last.get(value, -1) >= i}  # read now or later
        if i == len(program.operations) - 1:
            places.append("logits")
            break
        start = 0
        for begin, end in sorted(taken.values()):
            if begin - start >= operation.size:  # the first gap that is large enough
                break
            start = max(start, end)
        taken[i + 1] = (start, start + operation.size)
        most = max(most, start + operation.size)
        places.append(f"work + {start}")
    return places, most


def _table(kind: str, name: str, numbers: Sequence[int]) -> str:
    lines = (",".join(map(str, numbers[i : i + 16])) for i in range(0, len(numbers), 16))
    suffix = "LL" if kind == "int64_t" else ""
    text = ",\n".join(lines).replace(",", f"{suffix},") + suffix
    return f"static const {kind} {name}[{len(numbers)}] = {{\n{text}\n}};\n"


class Answers(NamedTuple):
    """The outputs of a compiled program for N inputs."""

    label: Tensor  # (N,) classes
    radius: Tensor  # (N,) float64
    logits: Tensor  # (N, K) integers


def compiler() -> str | None:
    """The path of a C compiler, if there is one."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def compile_c(source: str | Path, target: str | Path, flags: Iterable[str] = ("-O3",), cc: str | None = None) -> Path:
    """Compile a file of `write_c` to a program with ``main``; ``RunError`` if the compiler refuses it."""
    cc = cc or compiler()
    if cc is None:
        raise OptionError("expected a C compiler called cc, gcc or clang, found none")
    wanted = [cc, "-std=c99", *flags, "-DLIPKIT_MAIN", str(source), "-o", str(target)]
    done = subprocess.run(wanted, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"expected {cc} to compile {source}, got: {done.stderr.strip()[:2000]}")
    return Path(target)


def run_c(program: str | Path, q: Tensor, emulator: Sequence[str] = ()) -> Answers:
    """The answers of a compiled program to integer inputs (N, n), as `Program.quantise` makes them.

    ``emulator`` is a command that runs programs of another processor, such as ``["qemu-arm"]``.
    """
    with tempfile.NamedTemporaryFile(suffix=".i32") as file:
        file.write(q.numpy().astype("<i4").tobytes())  # the lowest byte first, as `main` reads
        file.flush()
        done = subprocess.run([*emulator, str(program), file.name], capture_output=True, text=True)
    if done.returncode or done.stderr:
        raise RunError(f"expected answers of {program}, got status {done.returncode}: {done.stderr.strip()[:2000]}")
    rows = [line.split() for line in done.stdout.splitlines()]
    label = torch.tensor([int(row[0]) for row in rows])
    radius = torch.tensor([float(row[1]) for row in rows], dtype=torch.float64)
    return Answers(label, radius, torch.from_numpy(np.array([row[2:] for row in rows], dtype=np.int64)))
