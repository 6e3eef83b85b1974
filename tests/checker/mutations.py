"""Single changes of the checker, each of which the tests must find.

``python -m tests.checker.mutations`` runs the tests of this folder against each changed copy, those first that should
find it, then the others that are not thorough, then the thorough ones, and reports what survives. `HARMLESS` says why a
change may.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

CHECKER = Path(__file__).parents[2] / "src" / "lipkit_check.py"
FILES = {
    name: str(Path(__file__).parent / f"test_{name}.py")
    for name in ("constants", "files", "arithmetic", "graphs", "bombs", "forged_networks", "runs")
}

# Files and names of the tests that come first: (what stands there once, what stands there instead).
MUTATIONS = [(first, old, new) for first, changes in {
    # scalars
    "arithmetic: scalars or gamma": [
    ("return -(-x.numerator * GRID // x.denominator)", "return x.numerator * GRID // x.denominator"),
    ("-(-v >> k)", "(v >> k)"),
    ("return r + (r * r < n)", "return r"),
    ("Fraction(n, (1 << 53) - n)", "Fraction(n, (1 << 54) - n)"),
    ],
    # arithmetic
    "arithmetic: stored or products or operations or floor or too_large or isometry": [
    ("return gamma(n + 3)", "return gamma(n)"),
    ("return gamma(n + 3)", "return gamma(3)"),
    ("unit = Fraction(2, 1 << PLACES)", "unit = Fraction(1, 4 << PLACES)"),
    ("np.abs(a).sum(-1).max())) * (1 + gamma(a.shape[-1]))", "np.abs(a).sum(-1).min())) * (1 + gamma(a.shape[-1]))"),
    ("Fraction(float(np.abs(a).sum(-1).max())) * (1 + gamma(a.shape[-1]))", "Fraction(float(np.abs(a.sum(-1)).max()))"),
    ("root(Fraction(v) * (1 + gamma(c.shape[1] + 4)))", "root(Fraction(v))"),
    ("root(Fraction(v) * (1 + gamma(c.shape[1] + 4)))", "Fraction(v) * (1 + gamma(c.shape[1] + 4))"),
    ("c = np.ldexp(c, -places[:, None])", "places = 0 * places"),
    ("Fraction(1, 1 << 51)", "Fraction(0)"),
    ("(product(c0, a0) >> 22)) >> 22)", "(product(c0, a0) >> 44)) >> 22)"),
    ("product(c0, a1) + (product", "(product"),
    ("need(c.shape[-1] * max(p * q, (p + q) * low, low * low) < 1 << 62", "need(True"),
    ("np.where(bits < 0, -found, found), self.unit", "found, self.unit"),
    ("np.where(bits < 0, -found, found), self.unit", "np.where(bits < 0, -found, found), Fraction(0)"),
    ],
    # norms
    "arithmetic: norm or stack or several or error_of_the or lose_a_unit": [
    ("norm + error * ones(*a.shape[1:])", "norm"),
    ("norm + error * ones(*a.shape[1:])", "norm + error"),
    ("norm = max(_powers(a[i : i + step])", "norm = min(_powers(a[i : i + step])"),
    ("    start += ops.rounding(m) * square\n", ""),
    ("t * t + n * ops.unit))", "t * t))"),
    ("halved(e, s) + lost", "halved(e, s)"),
    ("symmetric(ops.dot(columns, columns)), n * ops.unit", "symmetric(ops.dot(columns, columns)), Fraction(0)"),
    ("if e > GRID:", "if e > 2 * GRID:"),
    ("if t + e < b:", "if t < b:"),
    ("ops.rounding(n) * t * t + n * ops.unit))", "Fraction(0)))"),
    ("b = bound = t + e\n", "b = bound = t\n"),
    ("isqrt(halved(bound * GRID, -scale))", "isqrt(bound * GRID)"),
    ("halved(e * (2 * b + e), places) + rounding", "rounding"),
    ("Fraction(best, GRID) * Fraction(2) ** first", "Fraction(best, GRID)"),
    ("np.tril(p) + np.tril(p, -1).swapaxes(-1, -2)", "np.tril(p) + np.tril(p).swapaxes(-1, -2)"),
    ],
    # transforms
    "arithmetic runs: cosines or isometry or convolution or family": [
    ("(4 * arctan(5) - arctan(239))", "(4 * arctan(5) - arctan(238))"),
    ("(j - 1) % 4 < 2 else -term", "(j - 1) % 4 < 3 else -term"),
    ("(1 if 2 * j % w == 0 else 2) << 124", "2 << 124"),
    ("(pair[q, 0], -imaginary)", "(pair[q, 0], imaginary)"),
    ("np.concatenate((real, -imaginary), 2)", "np.concatenate((real, imaginary), 2)"),
    ("(i, -j) for i in above for j in right]", "(i, j) for i in above for j in right]"),
    ],
    # modules
    "constants arithmetic runs: not shares": [
    ("return plain.own(_padded(y, [(0, 0), *edges]))", "return plain.forward(_padded(y, [(0, 0), *edges])), 0"),
    ("(self.a * length(c) if self.a else 0) + self.b", "self.a * length(c)"),
    ("(self.a * length(c) if self.a else 0) + self.b", "self.b"),
    ("return c, up(self.norm * e + lost)", "return c, lost"),
    ("return c, up(self.norm * e + lost)", "return c, up(self.norm * e)"),
    ("up(each * ones(*shape))", "up(Fraction(each))"),
    ("+ error * ones(m, n)\n", "+ error\n"),
    ("erring(stack, error) * root(Fraction(overlap))", "erring(stack, error)"),
    ("return max(ops.lengths(c.reshape(len(c), -1)))", "return min(ops.lengths(c.reshape(len(c), -1)))"),
    ("    norm *= root(Fraction(repeated))\n", ""),
    ("disjoint = all(s > span", "disjoint = all(s >= span"),
    ("root(spectral(stack, wave_error) ** 2 / math.prod(strides))", "spectral(stack, wave_error) / math.prod(strides)"),
    ("(padded if repeated > 1 else sides)[i] + spans[i])", "(padded if repeated > 1 else sides)[i])"),
    ("norm = max(Fraction(1), largest(slope) + error)", "norm = Fraction(1)"),
    ("(1.09983933, lambda", "(1.0998393, lambda"),
    ('"GELU": (lambda approximate: 1.1289931 if', '"GELU": (lambda approximate: 1.12890415 if'),
    ("norm = root(largest(weight) ** 2 / eps)", "norm = largest(weight)"),
    ("shared *= int(np.bincount(index[inside]).max())", "shared = int(np.bincount(index[inside]).max())"),
    ("norm, bias = up(root(high) + uneven * grow)", "norm, bias = up(uneven * grow)"),
    ("up(both * both / 2)", "up(both * both / 4)"),
    ("max(Fraction(1), gram - 1) + spectral(rest, more) * parts[0].norm", "Fraction(1)"),
    ],
    # graphs and the modules in them
    "constants graphs: not twelve": [
    ("norm, each = largest(scale) + error", "norm, each = ops.number(np.abs(scale).min()) + error"),
    ("root(sum(e * e for e in errors))", "max(errors)"),
    ("return sum(w * e for w, e", "return sum(e for w, e"),
    ("total[s] = up(total.get(s, 0) + weight * a)", "total[s] = up(max(total.get(s, 0), weight * a))"),
    ("total[s] = up(total.get(s, 0) + weight * a)", "total[s] = up(total.get(s, 0) + a)"),
    ("[abs(exact), abs(1 - exact)]", "[abs(exact), 1 - exact]"),
    ("norm = root(sum(a * a for row in columns for a in row))", "norm = max(map(max, columns))"),
    ("norm = min(norm, most * spectral(", "norm = min(norm, spectral("),
    ("if counts.max() > 1:", "if False:"),
    ("if any(row and any(cut)", "if False and any(row and any(cut)"),
    ("known.append({s: up(part.norm * a)", "known.append({s: up(a)"),
    ("weights = [q * ones(inner, cols), p * ones(rows, inner)]", "weights = [q, p]"),
    ("alike(shapes, 2), [q, p]", "alike(shapes, 2), [p, q]"),
    ("(error + ops.rounding(8) * (1 + w)) * length(c)", "error * length(c)"),
    ("return y, ops.rounding(len(values)) * sum(map(length, values))", "return y, Fraction(0)"),
    ("lost + ops.rounding(inner) * length(u) * length(v)", "lost"),
    ("zip(weights, shapes, strict=True)) + 2 * ops.unit * ones(*shape)", "zip(weights, shapes, strict=True))"),
    ("return values[len(parts)]\n", "return values[len(parts)][0], Fraction(0)\n"),
    ("up(part.error([values[j][1] for j in read]) + lost)", "up(lost)"),
    ('need((stored >= 0).all(), "limits of at least 0")', "pass"),
    ("need(np.isfinite(c).all()", "need(True"), ("need(np.isfinite(values[i + 1][0]).all()", "need(True"),
    ("need(largest < 1 << 62", "need(True"),
    ("for of in (min, max):", "for of in (max,):"),
    ("root(Fraction(int(copies)))", "Fraction(1)"),
    ("fold, 5 * (ops.rounding(2) + 2 * tau), 8", "fold, 0, 8"),
    ("2 * tau), 8 * ops.unit))", "2 * tau), 0))"),
    ("2 * (error + ops.rounding(1) * largest(stored))", "2 * error"),
    ("forward, ops.rounding(p * q), each)", "forward, Fraction(0), each)"),
    ("out, forward, root(Fraction(1, n)))", "out, forward, Fraction(1, n))"),
    ("Node((cout, *out), adjoint.norm, own", "Node((cout, *out), plain.norm / 2, own"),
    ],
    # the LMI
    "constants arithmetic runs: multipliers or positive or inequality or runs or matrices": [
    ("2**500 or not all(((v > 0) & np.isfinite(v)).all() for v in multipliers)", "2**500"),
    ("    if not usable:\n        return parts, None\n", ""),
    ("scaled(2 * value, Fraction(0)", "scaled(4 * value, Fraction(0)"),
    ('"a" if i in multipliers and restricted(node)', '"a" if i in multipliers'),
    ("(i in multipliers and units(node) < math.inf)", "i in multipliers"),
    ("    y = ops.add(y, -shift)\n", ""),
    ("h * ones(len(a)) + (lost", "(lost"),
    ("filter(None, (eliminated, read))", "filter(None, (read,))"),
    ("filter(None, (eliminated, read))", "filter(None, (eliminated,))"),
    ("h[np.ix_(here[k], here[j])] = -block, -block.T\n", "h[np.ix_(here[k], here[j])] = -block, 0\n"),
    ("return error + sum(each)", "return error"),
    ("[[j] for j in range(len(node.parts))]", "[[0]] * len(node.parts)"),
    ("(float(first) / unit) ** 2 * gain", "(float(first) / unit) ** 2 * gain * 2"),
    ("ops.rowsum(rest) + lost + error <= ops.number(c)", "ops.rowsum(rest) + lost + error >= 0"),
    ("ops.rowsum(rest) + lost + error <= ops.number(c)", "ops.rowsum(rest) + lost <= ops.number(c)"),
    ],
    # systems
    "constants: system": [
    ("rows[:nv, :nw] *= order[:nv, None] > order[:nw]", "pass"),
    ("max(Fraction(1), rate) ** (shape[0] - 1)", "1"),
    ('need(size >= nv, "one block of units")', "pass"),
    ("        weight = np.repeat(weight[:1], nv)\n", ""),
    ("np.diag((1 + slopes) * (lam", "np.diag(2 * (lam"),
    ("slopes, given = not nv or restricted(phi)", "slopes, given = True"),
    ("h[nw:before, :nw] = -moved[:, nw:].T", "pass"),
    ("h[after : after + m, :before] = product, o", "h[after : after + m, :before] = product, 0"),
    ("h[before:after, :before], h[after : after", "h[:0, :before], h[after : after"),
    ],
    # files
    "files runs forged_networks: corruptions or json or files or keys or graphs": [
    ('need(start == end and stop', "need(stop"),
    ('need(end == len(body), "safetensors: bytes that belong to no tensor")', "pass"),
    ('need(MULTIPLIER.search(name) or np.isfinite(a).all(), f"{name}: numbers that are not finite")', "pass"),
    ("regular = stat.S_ISREG(status.st_mode) and", "regular ="),
    ("need(sane and bounds", "need(bounds"),
    ('need(found == config["sha256"]', "need(found"),
    ('need(len({k for k, _ in pairs}) == len(pairs), "JSON with a key that stands twice")', "pass"),
    ('need(not unused, f"tensors that no module has: {sorted(unused)[:3]}")', "pass"),
    ],
    # the verdict
    "files runs: hand or pairs or tolerance or range or corruptions or labels or own_one or body": [
    ("whole = root(Fraction(2)) * self.gain", "whole = self.gain"),
    ("up(min(whole, self.body * far))", "up(max(whole, self.body * far))"),
    ("self.body * far)", "far)"),
    ("for node in self.nodes[:-1]))", "for node in self.nodes[:-2]))"),
    ("near = up(root(Fraction(2)) * e)", "near = up(e)"),
    ("if gap <= near:", "if gap < -near:"),
    ("return min(((g - near) / k", "return min(((g + near) / k"),
    ("return min(((g - near)", "return max(((g - near)"),
    ('if row["label"] != label:', "if False:"),
    ('values[row["prediction"]] < top - slack:', "False:"),
    ('abs(Fraction(row["margin"]) - gap) > slack:', "False:"),
    ("own < Fraction(value) * (1 - TOLERANCE)", "own < Fraction(value) * (1 - 10 * TOLERANCE)"),
    ('for key in ("radius", "radius_ignored"):\n', 'for key in ("radius",):\n'),
    ("if own > value * (1 + TOLERANCE)]", "if False]"),
    ('"REFUSED" if refused or short else', '"REFUSED" if refused else'),
    ("checked - confirmed + len(short)", "checked - confirmed"),
    ('made.hexdigest() == header["data"]["sha256"]', "True"),
    ("need(bounds[0] <= x.min() and x.max() <= bounds[1]", "need(bounds[0] <= x.min()"),
    ("[1] > 0)", "[0] < 0)"),
    ],
    # arguments, dimensions and ranks
    "forged_networks: not taken": [
    ("(len(shape) + 1) * (config[\"dim\"] < 0)", "len(shape) * (config[\"dim\"] < 0)"),
    ("1 <= axis <= len(shape)", "0 <= axis <= len(shape)"),
    ("need(len(shape) == 3 and all(len(sizes) == 2 for sizes in found),", "need(True,"),
    ("need(set(stride) == {1}", "need(True"),
    ('n - (mode == "reflect") for n', "n for n"),
    ("            arguments(part)\n", ""),
    ("    arguments(config)\n", ""),
    ("need(given.keys() == marks.keys()", "need(True"),
    ("(type(n) is int and least <= n", "(isinstance(n, int) and least <= n"),
    ("(n is None and mark ==", "(n is None or mark =="),
    ("return type(value) in (int, float) and abs(value)", "return abs(float(value))"),
    ("return type(value) is {", "return type(value) in (str, int) or type(value) is {"),
    ("and value in WORDS[key]", ""),
    ("-(1 << 31) if key in SIGNED else 1, isinstance", "-(1 << 31), isinstance"),
    ('(("*", "/", "|", "~") if several else ("", "|", "~"))', '("", "*", "/", "|", "~")'),
    ("need(\"Network\" not in {", "need(True or \"Network\" not in {"),
    ("need(i in places and", "need("),
    ("places and type(n) is int", "places"),
    ('need(size != 1 and', "need("),
    ('need(min_val < max_val', 'need(min_val <= max_val'),
    ('need(not isinstance(config["kernel_size"], list) and', "need("),
    ],
    # sizes
    "bombs: kind or forms or slopes": [
    ("    ops.left -= count + work\n", ""),
    ("ops.left -= count + work", "ops.left -= work"),
    ("need(count <= LIMIT and ops", "need(ops"),
    ("self.norm < 1 << 1100", "True"),
    *[(text, "pass") for text in (
        'spend(0, f"a norm of', 'spend(len(which) << 8', "spend(self.room + 512", "spend(4 * g * m * n * h",
        "spend(angles.size", "spend((4 * m * n + 16)", "spend(terms * step.room", "spend(16 * n,", "spend(4 * (factors",
        "spend(4 * len(starts)", "spend(16 * o * n", "spend(16 * len(starts)", "spend(2 * math.prod(shape)",
        "spend(sum(map(len, given))", "spend(sum(map(len, rows))", "spend(len(read)", "spend(math.prod(shape), f",
        "spend(last.shape[0]", "spend(8 * int(ends",
    )],
    ],
    # gains
    "runs: gain": [
    ("good = own <= Fraction(gain) * (1 + TOLERANCE)", "good = True"),
    ("return int(good), int(not good)", "return int(good), 0"),
    ("tensors, classes=False", "tensors"),
    ],
}.items() for old, new in changes]  # fmt: skip


# Changes that no test can find, and why. What a refusal takes from a confirmed radius proves nothing false.
HARMLESS = {
    (
        "need(len(shape) == 3 and all(len(sizes) == 2 for sizes in found),",
        "need(True,",
    ): "sizes that do not go together raise where they are paired, or where windows are taken",
    ("if e > GRID:", "if e > 2 * GRID:"): "it only ends the search: a larger error is in the bound that it proves",
    (
        "-(1 << 31) if key in SIGNED else 1, isinstance",
        "-(1 << 31), isinstance",
    ): "no tensor and no activation has a size below one: every rule refuses it again",
    ("if t + e < b:", "if t < b:"): "another bound of the same norm, of which the least is taken",
}


def changed(old: str, new: str) -> str:
    """The source with one change; of ``pass``, the whole line where it stands."""
    source = CHECKER.read_text()
    assert source.count(old) == 1, (source.count(old), old)
    if new == "pass" and old.startswith("spend"):
        at = source.index(old)
        old = source[at : source.index("\n", at)]
    return source.replace(old, new)


def survives(old: str, new: str, log: Path, stages: list[list[str]]) -> bool:
    """Run the tests, each stage in a process of its own, which has imported all but the checker."""
    source = changed(old, new)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CHECKER.name).write_text(source)
        for stage in stages:
            child = os.fork()
            if child == 0:
                code, said = 70, io.StringIO()
                try:
                    sys.path.insert(0, folder)
                    import pytest

                    with redirect_stdout(said), redirect_stderr(said):
                        marks = "not thorough and not slow"
                        fixed = ["-x", "-q", "-m", marks, "-p", "no:cacheprovider", "--assert=plain"]
                        code = int(pytest.main([*fixed, *stage]))
                    log.write_text(said.getvalue()[-4000:])
                finally:
                    os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code:
                assert code == 1 or "error" in log.read_text(), f"the tests did not run: {code}"
                return False
    return True


def main(arguments: list[str] | None = None) -> list[tuple[str, str]]:
    """Survivors that are not known to be harmless."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--quick", action="store_true", help="only the tests that come first")
    given = parser.parse_args(arguments)
    import hypothesis  # noqa: F401
    import mpmath  # noqa: F401
    import scipy.special  # noqa: F401
    import torch  # noqa: F401
    from tests.analysis import test_architectures  # noqa: F401

    survivors = []
    chosen = range(len(MUTATIONS)) if given.only is None else given.only
    for i in chosen:
        start, log = time.monotonic(), Path(tempfile.gettempdir(), f"mutation-{os.getpid()}.log")
        first, old, new = MUTATIONS[i]
        files, names = first.split(":")
        stages = [[*map(FILES.get, files.split()), *["-k", names.strip()] * bool(names)]]
        known = HARMLESS.get((old, new), "")
        if not given.quick and not known:
            stages += [[*FILES.values()], [*FILES.values(), "-m", "thorough and not slow"]]  # the last -m counts
        alive = survives(old, new, log, stages)
        survivors += [(old, new)] if alive and not known else []
        found = next((line for line in log.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        said = f"SURVIVES {known}" if alive else f"found by {found.removeprefix('FAILED ')}"
        print(f"{i:3d} {time.monotonic() - start:5.0f} s  {old[:50]!r} -> {new[:30]!r}  {said[:110]}", flush=True)
    print(f"{len(chosen)} mutations, {len(survivors)} survivors: {survivors}")
    return survivors


if __name__ == "__main__":
    main()
