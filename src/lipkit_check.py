r"""An independent checker of lipkit certificates: ``python -m lipkit_check RUN [DATA]``. numpy, no torch, no lipkit.

It reads ``RUN/certificate.jsonl[.gz]`` and ``RUN/network/{config.json, model.safetensors}``, recomputes every hash,
proves a Lipschitz constant for each layer from the stored numbers, encloses the logits of each sample, and confirms a
radius only if its own proof reaches it. It knows a closed list of modules and refuses every other by name. Exit code
0: all confirmed. ``python -m lipkit_check NETWORK --gain G`` reads config.json and model.safetensors alone, as
``lipkit.save`` writes them, and proves the gain of f: ||f(x) - f(x')|| <= G (1 + 1e-5) ||x - x'|| for all x and x'.

**What is stated.** f is the exact real function of the stored numbers (Fourier layers with the exact transform). For
each confirmed sample x with label t and each x' with ||x' - x||_2 < r (1 - 1e-5): f_t(x') > f_i(x') for all i != t.
The rounding of the machine that evaluates f later is no part of this; the certificate's own radius already subtracts
it.

**Numbers.** Scalars (norms, error radii, radii) are rationals, rounded up on the grid 2^-100: no rounding to argue
about. Arrays are float64, or with ``--exact`` integers that count 2^-44. u = 2^-53, gamma_n = n u / (1 - n u).

**Theorem 1 (products).** An inner product of n float64 terms, in any order, is within gamma_n |a|.|b| of the exact
one (Higham 2002, 3.1); with a bias added, gamma_{n+1}. For a matrix A this gives an l2 error of at most gamma || |A|
|| ||c||, and || |A| ||^2 <= ||A||_1 ||A||_inf. The integer product is the floor of the exact one: one unit per entry.

**Theorem 2 (norms).** M_0 = A^T A / 2^s_0, M_{j+1} = M_j^2 / 2^s_{j+1} are computed as P_j with ||P_j - M_j|| <= e_j,
where e_{j+1} = (2 b e + e^2 + rounding) / 2^s, b >= ||M_j||, rounding = gamma_n t^2 (integers: n units), t = || |P_j|
||_inf. For symmetric M, ||M|| <= ||M||_inf, hence b = t_j + e_j will do, and ||A|| follows by j + 1 square roots with
||M_{j-1}||^2 = 2^s_j ||M_j||. What is found bounds every ||M_j|| again: b, e_j and the result improve in a few
rounds. If the entries of A are known up to h, the norm is at most h sqrt(m n) larger.

**Theorem 3 (convolutions).** A circular convolution is unitarily similar to the blocks F(f) = sum_t K[t] exp(2 pi i
f.(d t - p)/N), each of the norm of the real matrix [[Re F, -Im F], [Im F, Re F]]. With stride s | N: the blocks [F(f +
j N/s)]_j / sqrt(s) per axis. Zero padding is a part of the circular convolution on N = n + d (k - 1), rounded up to a
multiple of s. If windows do not overlap, the norm is that of the kernel as a matrix. Where outputs repeat m times, or
padding repeats inputs m times, it grows by sqrt(m). A transposed convolution is the adjoint of one. Two circular
convolutions in a row, minus the input, have the blocks F S - E. Cosines come from Taylor's series in integers of 200
bits, so no mathematical library is trusted.

**Theorem 4 (balls).** If ||h - c|| <= e for the exact h and the computed c, and ||fl f(c) - f(c)|| <= a ||c|| + b,
then ||f(h) - fl f(c)|| <= L e + a ||c|| + b. Every module has its (L, a, b).

**Theorem 5 (activations).** Constants are largest slopes. MaxMin and GroupSort sort: 1. Folds of the plane along a line
(Householder): 1; the wrong side costs twice the distance from the line. Norms of windows that do not overlap: 1. Layer,
group and instance normalisation v / sqrt(|v|^2/n + eps) has the Jacobian (I - v v^T / (n s^2)) P / s, s^2 = |v|^2/n +
eps: at most 1 / sqrt(eps). Softmax: diag(p) - p p^T has row sums 2 p (1 - p) <= 1/2. Max pooling: sqrt of the most
windows that share an input. What only moves numbers: sqrt of the most copies of one, which are counted.

**Theorem 6 (sandwich).** y = W2 s(W1 x), slopes D in [0, 1], l > 0 diagonal, p = l W1 u, q = W2* v / l, |u| = |v| =
1: v* W2 D W1 u = sum d p q <= sum max(p q, 0) <= |p + q|^2 / 4 <= || [l W1 | W2* / l] ||^2 / 2.

**Theorem 7 (residual).** y = x + W2 s(W1 x), E = W2 + W1* l^2: I - W1* l^2 D W1 has norm <= max(1, ||l W1||^2 - 1),
so the constant is at most that plus ||E|| ||W1||. Parts of maps, as zero padding takes them, have no larger norms.

**Theorem 8 (LMI of a run).** Linear parts and activations with slopes in [0, 1], in a chain or in graphs: z_0 = x, z_k
the value of activation k, v_k = sum_j V_kj z_j what it acts on, y = sum_j Y_j z_j, for changes, so without biases.
z_k' l_k (v_k - z_k) >= 0 for diagonal l_k > 0. If g |x|^2 - |y|^2 / g - 2 sum z_k' l_k (v_k - z_k) >= 0 for all z, the
gain is at most g. Where y does not read x, z_0 is eliminated. What is left, H >= 0, is scaled by a diagonal (a
congruence) and proved by a factor found in any way: H - c I = L L' + R with ||R||_inf <= c implies H >= 0.

**Theorem 9 (radius).** |(f_t - f_i)(x') - (f_t - f_i)(x)| <= K ||x' - x||, K = min(sqrt(2) L, L_body ||w_t - w_i||),
so r = min_i (y_t - y_i - sqrt(2) e) / K with y the computed logits and e their error radius.

**Theorem 10 (graphs).** dv is the change of a value v for a change dx of the input. Each v has numbers g >= 0 with
||dv|| <= sum_s g_s ||ds||, s the input and the pieces of values that are cut into pieces without common entries. A
module multiplies by its constant; weighted sums add up. Of a product, |u| <= a and |v| <= b by entry: ||d(u v)|| <= b
||du|| + a ||dv||; for matrices too, with ||U|| <= ||U||_F. A concatenation or entrywise maximum (|max u_i - max v_i|^2
<= sum |u_i - v_i|^2) has rows of such numbers, G: ||dy|| <= || G (||ds||)_s ||. For the pieces p of v: sum
||dp||^2 <= ||dv||^2, so the columns of all pieces add at most || (G_p)_p || ||dv||: as a row of their own or, if some
row has other columns too, by Minkowski's inequality. Errors combine in the same way if the input of the graph is exact;
else the constant of the graph times e is added.

**Theorem 11 (gradient steps).** y = x - s A* F(A x + c), F the gradient of a convex function with constant l: the
Jacobian I - s A* H A, 0 <= H <= l, has its eigenvalues in [1 - s l ||A||^2, 1]. Softmax and activations with slopes in
[0, 1] are such F. So is attraction, u_i to the mean of d / sqrt(1 + |d|^2) over d = u_i - u_j: H = B* D B / n with
0 <= D <= 1 and ||B||^2 = n, so l = 1; an error of gamma in a term counts |u_i| + |u_j|.

**Theorem 12 (systems over T steps).** (v, x+, y) = M (w, x, u) + b, w = s(v), x_0 = 0. For P >= 0, diagonal l >= 0, and
q = 2 w' l (v - w) (slopes in [0, 1]) or L^2 v' l v - w' l w (constant L), changes have q >= 0. If x+' P x+ - a^2 x' P x
+ |y|^2 / g - g |u|^2 + q <= 0, then sum a^-2t (|y_t|^2 - g^2 |u_t|^2) <= 0, so the gain is at most g max(1, a)^(T-1).
By Schur complements this is H >= 0, where x+, y (and v) have rows and columns of their own.

**Assumed.** IEEE 754 float64; numpy's matrix products are sums of their own n products in some order (not Strassen's,
not FFT); exp, log, log1p, tanh, erf, sin, cos, arctan and arcsinh within 16 units in the last place (smooth
activations only, which ``--exact`` refuses); Python's integers, hashlib and json; this file.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import io
import itertools
import json
import math
import os
import re
import stat
import struct
import sys
import zipfile
import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np

GRID, PLACES, LIMIT = 1 << 100, 44, 1 << 26  # grid of scalars; binary places of --exact; numbers in one array
FREE, SHARE = 1 << 22, 1 << 10  # numbers that any network may make, and more for each that is stored
ROW, MOST = 1 << 17, 1 << 27  # still more for each multiplier, up to a limit: inequalities are square in their rows
MULTIPLIER = re.compile(r"(^|\.)multiplier\d+$")
SLACKS = [Fraction(k, 10**9) for k in (1, 30, 1000, 5000, 10**5, 10**7)]  # of a gain, until its inequality is proved
PIECE = 1 << 22  # numbers of matrices that are squared together
TOLERANCE = Fraction(1, 100_000)  # of radii and constants
MARGIN = Fraction(1, 10**8)  # of claimed margins, relative to the logits: they were measured in floating point


class Refused(Exception):
    """A claim is not confirmed; the message is the reason."""


def need(condition, reason):
    if not condition:
        raise Refused(reason)


def spend(count, what, work=0):
    """Charge ``count`` numbers and ``work`` to the budget, which grows with the stored numbers; refuse to exceed it."""
    ops.left -= count + work
    need(count <= LIMIT and ops.left >= 0, f"{what}: more than the stored numbers pay for")


def counts(x):
    """x in units of the grid's step, rounded up to an integer."""
    return -(-x.numerator * GRID // x.denominator)  # the ceiling: minus the floor of -x


def up(x):
    """x rounded up to the grid."""
    return Fraction(counts(x), GRID)


def halved(v, k):
    """v / 2^k for an integer v, rounded up to an integer."""
    return -(-v >> k) if k >= 0 else v << -k


def isqrt(n):
    """The square root of an integer, rounded up to an integer."""
    r = math.isqrt(n)  # rounded down, so one more unless it is exact
    return r + (r * r < n)


def root(x):
    """The square root of x, rounded up to the grid."""
    return Fraction(isqrt(-(-x.numerator * GRID * GRID // x.denominator)), GRID)


def ones(*shape):
    """The l2 norm of an array of ones: times h, it bounds the l2 error of an array whose entries err by at most h."""
    return root(Fraction(math.prod(shape)))


def gamma(n):
    return Fraction(n, (1 << 53) - n)


# --- arithmetic of arrays ---------------------------------------------------------------------------------------------


class Floats:
    """Arrays of float64; Theorem 1 bounds the rounding errors."""

    left = math.inf  # what may still be spent; a network sets it
    unit = Fraction(1, 1 << 900)  # more than what underflow loses in one entry
    steps = 32  # squarings of a Gram matrix: at most a factor n^(2^-33) above the norm is left
    # numpy's own: one rounding an entry. ``factor`` may be wrong: `positive` looks at what it leaves.
    scale, add, shift, sqrt, inverse, factor = map(
        staticmethod, (np.multiply, np.add, np.ldexp, np.sqrt, np.reciprocal, np.linalg.cholesky)
    )

    def of(self, a):
        """Stored numbers as an array of this arithmetic, and a bound of the error of each."""
        return np.asarray(a, np.float64), Fraction(0)

    def table(self, a):
        """As `of`, for numbers in [-2, 2] given as integer multiples of 2^-62, with errors of at most 2 units."""
        return np.array([int(v) / (1 << 62) for v in a.flat]).reshape(a.shape), Fraction(1, 1 << 51)

    def dot(self, c, a):
        return c @ a.swapaxes(-1, -2)

    def rounding(self, n):
        """Relative error of an inner product of n terms, then a bias, a factor and a sum."""
        return gamma(n + 3)

    def rowsum(self, a):
        """Upper bound of the largest absolute row sum."""
        return Fraction(float(np.abs(a).sum(-1).max())) * (1 + gamma(a.shape[-1]))

    def lengths(self, c):
        """l2 norms of the rows, rounded up."""
        _, places = np.frexp(np.abs(c).max(1, initial=0))  # largest entries near 1: no square that counts underflows
        c = np.ldexp(c, -places[:, None])
        squares = zip(np.einsum("ij,ij->i", c, c).tolist(), places.tolist(), strict=True)
        return [root(Fraction(v) * (1 + gamma(c.shape[1] + 4))) * Fraction(2) ** k for v, k in squares]

    def norms(self, c):
        """l2 norms of the rows as an array, rounded either way: `lengths` bounds them."""
        return np.sqrt(np.einsum("ij,ij->i", c, c))

    def number(self, v):
        return Fraction(float(v))

    def near(self, x):
        """A number of this arithmetic near the rational x, without a bound of the distance."""
        return np.float64(float(x))


class Integers:
    """Arrays of multiples of 2^-44, as integers: no floating point. Products, by 22-bit halves, are rounded down."""

    left = math.inf
    unit = Fraction(2, 1 << PLACES)
    steps = 25

    def of(self, a):
        bits = np.array(a, np.float64).view(np.int64)
        exponent = (bits >> 52) & 2047  # float64: a sign, 11 bits of exponent, 52 of mantissa
        mantissa = (bits & ((1 << 52) - 1)) | np.where(exponent > 0, np.int64(1) << 52, 0)  # subnormal: no leading 1
        places = np.maximum(exponent, 1) - 1075 + PLACES  # 1075 = 1023 of the exponent + 52 of the mantissa
        need(np.all(places <= 9), "--exact: a number of 2^18 or more")
        down = np.minimum(-np.minimum(places, 0), 62)  # further down, nothing is left of 53 bits
        found = np.where(places >= 0, mantissa << np.maximum(places, 0), mantissa >> down)
        return np.where(bits < 0, -found, found), self.unit

    def table(self, a):
        return np.array([int(v) >> (62 - PLACES) for v in a.flat], np.int64).reshape(a.shape), self.unit

    def dot(self, c, a):
        c, a = (np.ascontiguousarray(v) for v in (c, a))
        (c1, c0), (a1, a0) = ((v >> 22, v & ((1 << 22) - 1)) for v in (c, a))
        p, q = (int(np.abs(v).max(initial=0)) + 1 for v in (c1, a1))  # + 1: >> rounds negative numbers down
        low = 1 << 22
        need(c.shape[-1] * max(p * q, (p + q) * low, low * low) < 1 << 62, "--exact: numbers too large for 64 bits")

        def product(x, y):
            return np.einsum("...ik,...jk->...ij", x, y)

        return product(c1, a1) + ((product(c1, a0) + product(c0, a1) + (product(c0, a0) >> 22)) >> 22)

    def rounding(self, n):
        return Fraction(0)

    def scale(self, c, s):
        # Python's integers, which cannot overflow; c may be a single number.
        return np.asarray((np.asarray(c).astype(object) * np.asarray(s).astype(object)) >> PLACES).astype(np.int64)

    def add(self, x, y):
        largest = sum(int(np.abs(a).max(initial=0)) for a in (x, y))
        need(largest < 1 << 62, "--exact: numbers too large for 64 bits")
        return x + y

    def shift(self, a, s):
        need(int(np.abs(a).max(initial=0)) << max(s, 0) < 1 << 62, "--exact: numbers too large for 64 bits")
        return a << s if s >= 0 else a >> -s  # a floor: one unit lost at most

    def rowsum(self, a):
        return self.number(np.abs(a).sum(-1).max())

    def lengths(self, c):
        return [root(Fraction(int(v), 1 << 2 * PLACES)) for v in (c.astype(object) ** 2).sum(1)]

    def norms(self, c):
        return np.array([math.isqrt(int(v)) for v in (c.astype(object) ** 2).sum(1)], np.int64)

    def number(self, v):
        return Fraction(int(v), 1 << PLACES)

    def near(self, x):
        found = (x.numerator << PLACES) // x.denominator
        need(abs(found) < 1 << 62, "--exact: a number of 2^18 or more")
        return np.int64(found)

    def sqrt(self, a):
        return np.array([math.isqrt(int(v) << PLACES) for v in a.flat], np.int64).reshape(a.shape)

    def inverse(self, a):
        return np.array([(1 << 2 * PLACES) // max(int(v), 1) for v in a.flat], object).astype(np.int64).reshape(a.shape)

    def factor(self, h):
        spend(0, f"an exact factor of {len(h)} rows", len(h) ** 3 >> 4)
        left, h = np.zeros(h.shape, object), h.astype(object)
        for k in range(len(h)):
            need(h[k, k] > 0, "not positive definite")
            left[k:, k] = (h[k:, k] << PLACES) // math.isqrt(h[k, k] << PLACES)
            h[k + 1 :, k + 1 :] -= np.outer(left[k + 1 :, k], left[k + 1 :, k]) >> PLACES
        return left.astype(np.int64)


ops = Floats()


def largest(a):
    return ops.number(np.abs(a).max(initial=0))


def erring(a, error, terms=None):
    """Theorem 1: relative l2 error of products by matrices whose entries err by ``error``; ``terms`` per sum, or n."""
    m, n = a.shape[-2:]
    return ops.rounding(terms or n) * root(ops.rowsum(a) * ops.rowsum(a.swapaxes(-1, -2))) + error * ones(m, n)


def spectral(a, error=Fraction(0)):
    """Theorem 2: an upper bound of the norms of matrices (count, m, n) whose entries are known up to ``error``."""
    a = a if a.shape[1] >= a.shape[2] else a.swapaxes(1, 2)
    step = max(1, PIECE // (a.shape[1] * a.shape[2]))
    spend(0, f"a norm of {a.shape} numbers", (len(a) // step + 1 << 16) + a.size * (a.shape[2] // 64))
    norm = max(_powers(a[i : i + step]) for i in range(0, len(a), step))
    return up(norm + error * ones(*a.shape[1:]))


def _powers(a):
    m, n = a.shape[1:]
    size = ops.rowsum(a)
    if not size:
        return size
    first = min(0, _exponent(size))  # small matrices are enlarged: fixed point keeps few of their digits
    columns = np.ascontiguousarray(ops.shift(a, -first).swapaxes(1, 2))
    p, start = symmetric(ops.dot(columns, columns)), n * ops.unit
    square = ops.rowsum(columns) * ops.rowsum(columns.swapaxes(1, 2))
    start += ops.rounding(m) * square
    steps = []  # (exponent of s_j, t_j, rounding of the next product), the last two and all below in steps of the grid
    for _ in range(ops.steps):
        s = _exponent(ops.rowsum(p))
        p = ops.shift(p, -s)
        t = ops.rowsum(p)
        steps.append((s, counts(t), counts(ops.rounding(n) * t * t + n * ops.unit)))
        p = symmetric(ops.dot(p, p))
    places = GRID.bit_length() - 1  # a product of two counts is that many binary places too long
    best, start, lost = counts(root(square)), counts(start), counts(n * ops.unit)  # ||A||^2 <= ||A||_1 ||A||_inf
    for _ in range(5):  # a bound of ||A|| bounds every ||M_j||, and so every e_j better
        b, e, scales = halved(best * best, places), start, []
        for s, t, rounding in steps:
            b, e = halved(b, s), halved(e, s) + lost
            if e > GRID:  # M_j has a norm of about 1: nothing is left to be found, and e would square from here on
                break
            scales.append(s)
            if t + e < b:
                b = bound = t + e
                for scale in reversed(scales):
                    bound = isqrt(halved(bound * GRID, -scale))
                best = min(best, bound)
            # (M + E)^2 - M^2, and the rounding of the product.
            b, e = halved(b * b, places), halved(e * (2 * b + e), places) + rounding
    return Fraction(best, GRID) * Fraction(2) ** first


def symmetric(p):
    """The lower triangle mirrored; error bounds of the entries still hold, as the exact matrix is symmetric."""
    return np.tril(p) + np.tril(p, -1).swapaxes(-1, -2)  # -1: the diagonal once


def _exponent(x):
    """s with 2^(s-1) < x < 2^(s+1)."""
    return x.numerator.bit_length() - x.denominator.bit_length() if x else 0


def arctan(inverse):
    """The arctangent of 1 / ``inverse``, an integer in units of 2^-200."""
    return sum((-1) ** (k // 2) * ((1 << 200) // (k * inverse**k)) for k in range(1, 87, 2))  # 5^87 > 2^200


TURN = 8 * (4 * arctan(5) - arctan(239))  # 2 pi by Machin's formula


def wave(angle):
    """cos and sin, integers in units of 2^-62, of an angle in [-8, 8], an integer in units of 2^-200."""
    term, sums = 1 << 200, [0, 0]
    for j in range(1, 120):
        sums[(j - 1) % 2] += term if (j - 1) % 4 < 2 else -term  # signs + + - -: cos takes even powers, sin odd ones
        term = (term * angle >> 200) // j
    return sums[0] >> 138, sums[1] >> 138  # 138 = 200 - 62


def cosines(turns, n):
    """cos and sin of 2 pi ``turns`` / n, for an integer array ``turns``, as integers in units of 2^-62."""
    which, place = np.unique(turns % n, return_inverse=True)
    spend(len(which) << 8, "the angles of a transform")
    waves = [wave(TURN * k // n) for k in which.tolist()]  # each angle once
    table = np.array(waves, object).reshape(-1, 2)[place.reshape(-1)]
    return table[:, 0].reshape(turns.shape), table[:, 1].reshape(turns.shape)


# --- modules ----------------------------------------------------------------------------------------------------------


class Node:
    """A module: output shape, Lipschitz constant ``norm``, forward pass, (a, b) of Theorem 4; b = ``each`` * `ones`.

    ``own`` replaces forward, a and each: it maps c to the output and a bound of its rounding error. ``blocks`` belong
    to a linear module: the stack of matrices it is similar to, the error of an entry, the number of rows per channel,
    and a kind; two stacks may be multiplied only if their kinds agree. ``room``: numbers held per sample.
    """

    def __init__(self, shape, norm, forward=None, a=0, each=0, *, own=None, blocks=None, room=0):
        self.shape, self.norm, self.forward, self.blocks = shape, up(Fraction(norm)), forward, blocks
        self.a, self.b = up(Fraction(a)), up(each * ones(*shape))
        self.own, self.room = own or self._rounded, max(room, math.prod(shape))
        spend(self.room + 512, f"an activation of shape {shape}")
        need(min(shape) >= 1 and self.norm < 1 << 1100, f"an activation of shape {shape} and constant below 2^1100")

    def _rounded(self, c):
        return self.forward(c), (self.a * length(c) if self.a else 0) + self.b

    def run(self, c, e):
        """The value computed at c, and how far it can be from the exact value at any input within e of c."""
        need(np.isfinite(c).all(), "values that are not finite")
        c, lost = self.own(c)
        return c, up(self.norm * e + lost)


def length(c):
    """The largest l2 norm of a sample of the batch."""
    return max(ops.lengths(c.reshape(len(c), -1)))


def chain(nodes):
    """The composition of nodes as one node."""

    def own(c):
        lost = Fraction(0)
        for node in nodes:
            c, lost = node.run(c, lost)
        return c, lost

    return Node(nodes[-1].shape, math.prod(n.norm for n in nodes), own=own, room=max(n.room for n in nodes))


def improved(node, norm):
    """The node with the constant ``norm`` if that is smaller; its rounding errors stay."""
    return Node(node.shape, min(node.norm, norm), own=node.own, room=node.room)


def shifted(forward, bias):
    return forward if bias is None else lambda c: ops.add(forward(c), bias)


def product(stack, error, shape, forward, norm, bias=None, overlap=1, **more):
    """A node that multiplies by ``stack`` (count, m, n), whose entries err by ``error``, and adds ``bias``."""
    each = 2 * ops.unit
    if bias is not None:
        each += ops.rounding(stack.shape[2]) * largest(bias) + ops.unit
    a = erring(stack, error) * root(Fraction(overlap))
    return Node(shape, norm, shifted(forward, bias), a, each, **more)


def linear(config, get, shape):
    n, m = config["in_features"], config["out_features"]
    need(shape[-1] == n, f"{n} features, got {shape}")
    (w, error), bias = ops.of(get("weight", (m, n))), get.bias(config, m)
    stack, out = w[None], (*shape[:-1], m)

    def forward(c):
        return ops.dot(c.reshape(-1, n), w).reshape(len(c), *out)

    return product(stack, error, out, forward, spectral(stack, error), bias, blocks=(stack, error, 1, "dense"))


def symbol(kernel, error, sides, starts, dilation, strides):
    """Theorem 3: real blocks of kernels (g, m, n, kh, kw) on a circular image of ``sides``; the error of an entry."""
    (h, w), (kh, kw), (sh, sw) = sides, kernel.shape[3:], strides
    g, m, n = kernel.shape[:3]
    columns = w // 2 + 1 if sh * sw == 1 else w  # of real kernels the others are conjugates; strides mix both halves
    spend(4 * g * m * n * h * columns + 16 * h * columns * kh * kw, f"a convolution on {h} x {w}")
    rows, cols = (np.arange(k) * d - p for k, d, p in zip((kh, kw), dilation, starts, strict=True))
    turns = np.add.outer(np.outer(np.arange(h), rows) * w, np.outer(np.arange(columns), cols) * h)
    waves, tau = ops.table(np.stack(cosines(turns.transpose(0, 2, 1, 3).reshape(-1, kh * kw), h * w)))
    flat = kernel.reshape(-1, kh * kw)
    total = ops.rowsum(flat)
    found = ops.dot(flat, waves.reshape(-1, kh * kw)).reshape(g, m, n, 2, h, columns)
    error = (ops.rounding(kh * kw) + tau) * total + error * kh * kw * (1 + tau) + ops.unit
    found = found.reshape(g, m, n, 2, sh, h // sh, sw, columns // sw).transpose(0, 5, 7, 3, 1, 4, 6, 2)
    real, imaginary = found.reshape(-1, 2, m, sh * sw * n).swapaxes(0, 1)
    return complex_blocks(real, imaginary), error


def complex_blocks(real, imaginary):
    return np.concatenate((np.concatenate((real, -imaginary), 2), np.concatenate((imaginary, real), 2)), 1)


PAD = {"zeros": "constant", "circular": "wrap", "reflect": "reflect", "replicate": "edge"}
PLAIN = {"type": "Conv2d", "stride": [1, 1], "padding": "same", "padding_mode": "zeros", "dilation": [1, 1],
         "groups": 1, "bias": False}  # fmt: skip


def geometry(config, shape):
    """Kernel, stride and dilation, each of two sizes."""
    found = [config[k] for k in ("kernel_size", "stride", "dilation")]
    need(len(shape) == 3 and all(len(sizes) == 2 for sizes in found), f"{config['type']} of {found} on {shape}")
    return found


def convolution(config, get, shape):
    kernel, stride, dilation = geometry(config, shape)
    padding, mode, g = config["padding"], config["padding_mode"], config["groups"]
    cin, cout, sides = config["in_channels"], config["out_channels"], shape[1:]
    spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if padding == "same":
        need(set(stride) == {1}, "a stride of 1")
        pads = [(s // 2, s - s // 2) for s in spans]  # as torch pads: the odd one behind
    else:
        pads = [(p, p) for p in ([0, 0] if padding == "valid" else padding)]
    need(shape[0] == cin and cin % g == 0 and cout % g == 0, f"{cin} channels, got {shape}")
    # A reflection does not repeat the border; zeros can be any number.
    most = [math.inf if mode == "zeros" else n - (mode == "reflect") for n in sides]
    need(all(0 <= p <= n for pad, n in zip(pads, most, strict=True) for p in pad), f"padding {padding}")
    padded = [n + left + right for n, (left, right) in zip(sides, pads, strict=True)]
    out = [(n - span - 1) // s + 1 for n, span, s in zip(padded, spans, stride, strict=True)]
    need(all(n > span for n, span in zip(padded, spans, strict=True)), "a kernel larger than its input")
    stored = get("weight", (cout, cin // g, *kernel))
    (w, error), bias = ops.of(stored.reshape(g, cout // g, -1)), get.bias(config, cout, 1, 1)
    n, taps = w.shape[2], kernel[0] * kernel[1]
    disjoint = all(s > span for s, span in zip(stride, spans, strict=True))  # no pixel in two windows
    disjoint &= mode == "zeros" or not any(map(any, pads))
    repeated, blocks = 1, None
    if mode in ("reflect", "replicate"):
        indices = [np.pad(np.arange(n), pad, mode=PAD[mode]) for n, pad in zip(sides, pads, strict=True)]
        repeated = math.prod(int(np.bincount(index).max()) for index in indices)
    if disjoint:
        norm = spectral(w, error)
        blocks = (w, error, 1, "window" if taps > 1 or stride != [1, 1] else "point") if g == 1 else None
    else:
        circle, strides = list(sides), list(stride)
        for i in range(2):
            if mode != "circular":  # padding that repeats inputs stays in front of the circle's zeros
                circle[i] = -(-((padded if repeated > 1 else sides)[i] + spans[i]) // stride[i]) * stride[i]
            else:
                repeated *= -(-((out[i] - 1) * stride[i] + 1) // sides[i])
                strides[i] = stride[i] if sides[i] % stride[i] == 0 else 1  # else a part of the outputs without stride
        split = w.reshape(g, cout // g, cin // g, *kernel)
        stack, wave_error = symbol(split, error, circle, [p for p, _ in pads], dilation, strides)
        norm = root(spectral(stack, wave_error) ** 2 / math.prod(strides))
        if mode in ("circular", "zeros") and g == 1 and out == list(sides) and stride == [1, 1]:
            kind = "rows first" if mode == "circular" else "a part of rows first"
            blocks = (stack, wave_error, 2, (kind, *circle))

    def forward(c):
        c = np.pad(c, [(0, 0), (0, 0), *pads], mode=PAD[mode])
        views = np.lib.stride_tricks.sliding_window_view(c, [s + 1 for s in spans], (2, 3))
        views = views[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]
        rows = views.transpose(0, 2, 3, 1, 4, 5).reshape(-1, g, n).swapaxes(0, 1)
        y = ops.dot(np.ascontiguousarray(rows), w).swapaxes(0, 1)
        return y.reshape(len(c), *out, cout).transpose(0, 3, 1, 2)

    norm *= root(Fraction(repeated))
    room, overlap = math.prod(out) * g * n, repeated * (1 if disjoint else taps)
    return product(w, error, (cout, *out), forward, norm, bias, overlap, blocks=blocks, room=room)


def transposed(config, get, shape):
    """A transposed convolution: zeros between the inputs, then a kernel rotated by 180 degrees; norm of its adjoint."""
    kernel, stride, dilation = geometry(config, shape)
    pads, more = config["padding"], config["output_padding"]
    cin, cout, g = config["in_channels"], config["out_channels"], config["groups"]
    need(shape[0] == cin and g >= 1 and cin % g == 0 and cout % g == 0, f"{cin} channels, got {shape}")
    edges = [(d * (k - 1) - p, d * (k - 1) - p + m) for d, k, p, m in zip(dilation, kernel, pads, more, strict=True)]
    apart = [(n - 1) * s + 1 for n, s in zip(shape[1:], stride, strict=True)]  # s - 1 zeros between two inputs
    wide = grown(cin, *(n + left + right for n, (left, right) in zip(apart, edges, strict=True)))
    out = tuple(n - d * (k - 1) for n, d, k in zip(wide[1:], dilation, kernel, strict=True))
    stored = get("weight", (cin, cout // g, *kernel)).reshape(g, cin // g, cout // g, *kernel)
    turned = PLAIN | {"in_channels": cout, "out_channels": cin, "kernel_size": kernel, "stride": stride}
    turned |= {"padding": pads, "dilation": dilation, "groups": g}
    adjoint = convolution(turned, Tensors({"weight": stored.reshape(cin, cout // g, *kernel)}), (cout, *out))
    need(min(more) >= 0 and adjoint.shape == shape, f"an output padding below the stride, got {more}")
    tensors = {"weight": stored.swapaxes(1, 2)[..., ::-1, ::-1].reshape(cout, cin // g, *kernel)}  # turned by half
    tensors |= {"bias": get("bias", (cout,))} if config["bias"] else {}
    turned |= {"in_channels": cin, "out_channels": cout, "stride": [1, 1], "padding": [0, 0], "bias": config["bias"]}
    plain = convolution(turned, Tensors(tensors), wide)

    def own(c):
        y = np.zeros((len(c), cin, *apart), c.dtype)
        y[:, :, :: stride[0], :: stride[1]] = c
        return plain.own(_padded(y, [(0, 0), *edges]))

    return Node((cout, *out), adjoint.norm, own=own, room=max(plain.room, cin * math.prod(apart)))


def frequencies(h, w):
    """The order in which symbols are stored: self-conjugate frequencies, then one of each pair."""
    rows, cols = ([0, n // 2] if n % 2 == 0 else [0] for n in (h, w))  # frequencies that are their own negatives
    above, right = range(1, (h + 1) // 2), range(1, (w + 1) // 2)
    if h * w <= 64:
        pairs = [(i, j) for i in rows for j in right] + [(i, j) for i in above for j in cols]
        pairs += [(i, j) for i in above for j in right] + [(i, -j) for i in above for j in right]
        return [(i, j) for i in rows for j in cols], pairs
    pairs = [(i, j) for j in cols for i in above]
    pairs += [(i, j) for j in right for i in (*rows, *above, *(-i for i in above))]
    return [(i, j) for j in cols for i in rows], pairs


def transform(h, w):
    """Orthonormal transform of real h x w images to half of their spectrum: along the width, then along the height."""
    half = w // 2 + 1
    cos, sin = cosines(np.outer(np.arange(half), np.arange(w)), w)
    weight = [math.isqrt((1 if 2 * j % w == 0 else 2) << 124) for j in range(half)]  # sqrt(2) for two conjugates
    wide = np.stack((cos, -sin), 1) * np.array(weight, object)[:, None, None] // math.isqrt(w << 124)
    cos, sin = (t * (1 << 62) // math.isqrt(h << 124) for t in cosines(np.outer(np.arange(h), np.arange(h)), h))
    tall = np.stack((np.stack((cos, sin), 2), np.stack((-sin, cos), 2)), 1)
    return ops.table(wide.reshape(2 * half, w)), ops.table(tall.reshape(2 * h, 2 * h))


def fourier(config, get, shape):
    n, m, h, w = (config[k] for k in ("in_channels", "out_channels", "height", "width"))
    need(shape == (n, h, w), f"shape {(n, h, w)}, got {shape}")
    kh, kw = config["kernel_size"]
    need(h % kh == 0 and w % kw == 0, f"a kernel of {kh} x {kw}")
    spend((4 * m * n + 16) * kh * kw + 16 * kw * kw + 64 * kh * kh, f"a symbol of {kh} x {kw} frequencies")
    reals, pairs = frequencies(kh, kw)
    parts = 1 + config["complex_pairs"]
    real, error = ops.of(get("real", (len(reals), m, n)))
    pair = ops.of(get("pair", (len(pairs), parts, m, n)))[0]
    half, dh, dw, bias = kw // 2 + 1, h // kh, w // kw, get.bias(config, m, 1, 1)
    zeros = np.zeros((m, n), real.dtype)
    grid = {(i % kh, j % kw): (real[q], zeros) for q, (i, j) in enumerate(reals)}
    for q, (i, j) in enumerate(pairs):
        imaginary = pair[q, 1] if parts == 2 else zeros
        grid[i % kh, j % kw], grid[-i % kh, -j % kw] = (pair[q, 0], imaginary), (pair[q, 0], -imaginary)
    cells = [grid[i, j] for j in range(half) for i in range(kh)]  # column by column, as the transform has them
    stack = complex_blocks(np.stack([cell[0] for cell in cells]), np.stack([cell[1] for cell in cells]))
    (wide, tau), (tall, _) = transform(kh, kw)
    norm = spectral(stack, error)

    def forward(c):
        b = len(c) * dh * dw
        c = c.reshape(-1, n, kh, dh, kw, dw).transpose(0, 3, 5, 1, 2, 4)
        c = ops.dot(c.reshape(-1, kw), wide).reshape(b, n, kh, half, 2).transpose(0, 1, 3, 2, 4)
        c = ops.dot(c.reshape(-1, 2 * kh), tall).reshape(b, n, half, kh, 2).transpose(2, 3, 0, 4, 1)
        c = ops.dot(np.ascontiguousarray(c).reshape(half * kh, b, 2 * n), stack)
        c = c.reshape(half, kh, b, 2, m).transpose(2, 4, 0, 1, 3)
        c = ops.dot(c.reshape(-1, 2 * kh), tall.T).reshape(b, m, half, kh, 2).transpose(0, 1, 3, 2, 4)
        c = ops.dot(c.reshape(-1, 2 * half), wide.T).reshape(-1, dh, dw, m, kh, kw)
        return c.transpose(0, 3, 4, 1, 5, 2).reshape(-1, m, h, w)

    moved = erring(wide, tau, 2 * kw + 2) + erring(tall, tau, 2 * kh)
    a = (2 * norm * moved + erring(stack, error)) * Fraction(101, 100)  # products of two errors are below a hundredth
    each = 4 * (norm + 1) * ops.unit + (0 if bias is None else ops.rounding(4) * largest(bias) + ops.unit)
    each *= root(Fraction(4 * max(m, n), m))  # of the numbers on the way
    blocks = (stack, error, 2, (h, w)) if (kh, kw) == (h, w) else None
    return Node((m, h, w), norm, shifted(forward, bias), a, each, blocks=blocks, room=4 * max(m, n) * h * w)


def affine(config, get, shape):
    sizes, rest = [config[k] for k in ("scale", "shift")], (1,) * (len(shape) - len(config["scale"]))
    fit = len(sizes[0]) == len(sizes[1]) <= len(shape)
    fit &= all(a in (1, b) for each in sizes for a, b in zip([*each, *rest], shape, strict=False))
    need(fit, f"{sizes[0]} factors, got {shape}")
    stored = [get(k, each).reshape(*each, *rest) for k, each in zip(("scale", "shift"), sizes, strict=True)]
    (scale, error), (move, _) = map(ops.of, stored)
    norm, each = largest(scale) + error, ops.rounding(1) * largest(move) + 3 * ops.unit
    return Node(shape, norm, lambda c: ops.add(ops.scale(c, scale), move), ops.rounding(1) * norm + error, each)


def taylor(config, get, shape):
    """Taylor polynomial P(A), A = S + E, S skew: norm <= max |P(i t)| over |t| <= ||S||, plus ||E|| exp(||A||)."""
    cin, cout, kernel, terms = (config[k] for k in ("in_channels", "out_channels", "kernel_size", "terms"))
    need(shape[0] == cin and all(k % 2 == 1 for k in kernel) and 1 <= terms <= 100, "a polynomial of this form")
    inner, sides = max(cin, cout), shape[1:]
    stored = get("kernel", (inner, inner, *kernel))
    plain = PLAIN | {"in_channels": inner, "out_channels": inner, "kernel_size": kernel}
    step = convolution(plain, Tensors({"weight": stored}), (inner, *sides))
    (w, error), circle = ops.of(stored), [n + k - 1 for n, k in zip(sides, kernel, strict=True)]
    twice = w + w.swapaxes(0, 1)[:, :, ::-1, ::-1]  # the symmetric part
    error, uneven = 2 * error + ops.rounding(1) * largest(twice), Fraction(0)
    if twice.any() or error:
        uneven = spectral(*symbol(twice[None], error, circle, [k // 2 for k in kernel], (1, 1), (1, 1))) / 2
    top = step.norm + uneven
    need(top <= 40, "an exponent above 40")
    spend(terms * step.room + (terms**2 << 9), f"a polynomial of {terms} terms")
    # |P(it)|^2 = sum_m q_m t^2m, cell by cell: positive terms at the upper end, negative ones at the lower.
    inverse = [Fraction(1, math.factorial(k)) for k in range(terms + 1)]
    q = [Fraction(0)] * (terms + 1)
    for i, j in itertools.product(range(terms + 1), repeat=2):
        if (i + j) % 2 == 0:
            q[(i + j) // 2] += inverse[i] * inverse[j] * (1 if (i - j) % 4 == 0 else -1)
    scale = math.factorial(terms) ** 2  # the common denominator of all q

    def terms_of(sign, x):
        total, power = 0, 1  # exactly, in integers
        for v in reversed(q):
            total, power = total * x.numerator + int(max(sign * v * scale, 0)) * power, power * x.denominator
        return Fraction(total * x.denominator, scale * power)

    cells = itertools.pairwise((top * i / 512) ** 2 for i in range(513))
    high = max(up(terms_of(1, end) - terms_of(-1, low)) for low, end in cells)
    grow = up(sum(inverse[k] * up(top) ** k for k in range(terms + 1)))
    norm, bias = up(root(high) + uneven * grow), get.bias(config, cout, 1, 1)

    def own(c):
        wide = np.zeros((len(c), inner, *sides), c.dtype)
        wide[:, :cin] = c
        total, term, lost, size, gone = wide, wide, Fraction(0), Fraction(0), Fraction(0)
        for k in range(1, terms + 1):
            term, gone = step.run(term, gone)
            reciprocal, tau = ops.table(np.array([(1 << 62) // k], object))
            term, gone = ops.scale(term, reciprocal), up(gone / k + (tau + ops.rounding(1)) * length(term))
            gone += ops.unit * ones(*term[0].shape)
            total, lost = ops.add(total, term), lost + gone
            size += length(term)
        y, each = total[:, :cout], ones(cout, *sides)
        if bias is not None:
            y, size = ops.add(y, bias), size + largest(bias) * each
        return y, lost + ops.rounding(terms) * (size + length(wide)) + ops.unit * each

    return Node((cout, *sides), norm, own=own, room=step.room)


def unary(slope, function, scale=1, exact=False):
    """A rule for an activation of this largest slope; unless ``exact``, it errs by 64 u max(scale, 1) (|c| + 1)."""

    def build(config, get, shape):
        given = {key: value for key, value in config.items() if key != "type"}
        steepest, factor = (Fraction(v(**given) if callable(v) else v) for v in (slope, scale))
        lost = Fraction(0) if exact else ops.rounding(64) * max(factor, 1)
        function(np.zeros(1), **given)  # refuses wrong arguments early
        return Node(shape, steepest, lambda c: function(c, **given), lost, lost)

    return build


def leaky(config, get, shape):
    stored = get("weight", (config["num_parameters"],)) if config["type"] == "PReLU" else [config["negative_slope"]]
    need(len(stored) in (1, shape[0]), f"{len(stored)} slopes, got {shape}")
    slope, error = ops.of(np.asarray(stored, np.float64).reshape(-1, *(1,) * (len(shape) - 1)))
    norm = max(Fraction(1), largest(slope) + error)
    a = ops.rounding(1) * norm + error
    node = Node(shape, norm, lambda c: np.where(c > 0, c, ops.scale(c, slope)), a, ops.unit)
    node.restricted = bool((slope >= 0).all()) and norm == 1
    return node


def _sigmoid(c):
    return np.exp(-np.logaddexp(0, -c))


def _gelu(c, approximate):
    if approximate == "tanh":
        return 0.5 * c * (1 + np.tanh(math.sqrt(2 / math.pi) * (c + 0.044715 * c**3)))
    return 0.5 * c * (1 + np.array([math.erf(v / math.sqrt(2)) for v in c.flat]).reshape(c.shape))


def _elu(c, alpha):
    return np.where(c > 0, c, alpha * np.expm1(np.minimum(c, 0)))


def _positive(what, value):
    need(value > 0, f"{what} {value}")
    return Fraction(value)


SELU = (1.0507009873554805, 1.6732632423543772)
SMOOTH = {  # name: largest slope (rounded up), function, what its values are multiplied by; arguments come by name
    "Sigmoid": (0.25, _sigmoid),
    "Tanh": (1, np.tanh),
    "Tanhshrink": (1, lambda c: c - np.tanh(c)),
    "Softsign": (1, lambda c: c / (1 + np.abs(c))),
    "LogSigmoid": (1, lambda c: -np.logaddexp(0, -c)),
    "SiLU": (1.09983933, lambda c: c * _sigmoid(c)),
    "Mish": (1.0884982, lambda c: c * np.tanh(np.logaddexp(0, c))),
    "GELU": (lambda approximate: 1.1289931 if approximate == "tanh" else 1.12890415, _gelu),
    "Hardsigmoid": (Fraction(1, 6), lambda c: np.clip(c + 3, 0, 6) / 6),
    "Hardswish": (1.5, lambda c: c * np.clip(c + 3, 0, 6) / 6),
    "Hardtanh": (lambda min_val, max_val: need(min_val < max_val, "Hardtanh with its ends in order") or 1,
                 lambda c, min_val, max_val: np.clip(c, min_val, max_val)),
    "SELU": (SELU[0] * SELU[1] * (1 + 1e-15), lambda c: SELU[0] * _elu(c, SELU[1])),
    "ELU": (lambda alpha: max(1, _positive("ELU with alpha", alpha)), _elu, lambda alpha: alpha),
    "CELU": (1, lambda c, alpha: alpha * _elu(c / alpha, 1), lambda alpha: _positive("CELU with alpha", alpha)),
    "Softplus": (1, lambda c, beta, threshold: np.logaddexp(0, beta * c) / beta, lambda beta, threshold:
                 need(threshold >= 20, "a Softplus that jumps") or 1 / _positive("Softplus with beta", beta)),
    "Arctan": (1, np.arctan),
    "Arcsinh": (1, np.arcsinh),
    "Sine": (1, np.sin),
    "Cosine": (1, np.cos),
    "Softshrink": (1, lambda c, lambd: np.sign(c) * np.maximum(np.abs(c) - lambd, 0),
                   lambda lambd: need(lambd >= 0, "Softshrink below 0") or 1),
}  # fmt: skip
RESTRICTED = {"ReLU", "Sigmoid", "Tanh", "Tanhshrink", "Softsign", "LogSigmoid", "Hardsigmoid", "Hardtanh",
              "Arctan", "Arcsinh", "CELU", "Softplus", "Softshrink"}  # fmt: skip
CURVES = {  # monotone functions, the modulus of their slopes, monotone too, and the intervals that they are smooth on
    "exp": (np.exp, math.exp, lambda low, high: high <= 700),
    "log": (np.log, lambda x: 1 / x, lambda low, high: low >= 2.0**-100),
    "sqrt": (np.sqrt, lambda x: 0.5 / math.sqrt(x), lambda low, high: low >= 2.0**-100),
    "reciprocal": (np.reciprocal, lambda x: 1 / x / x, lambda low, high: low >= 2.0**-100 or high <= -(2.0**-100)),
}
FLOATING = {*SMOOTH, "Elementary", "Softmax", "Attraction", "LayerNorm", "LayerCenter", "UnitNorm", "EnlargeBilinear"}


def elementary(config, get, shape):
    """A monotone function after clipping to two limits; its slope is largest at one of them."""
    (low, high), (function, slope, smooth) = get("limits", (2,)).tolist(), CURVES[config["function"]]
    need(-math.inf < low <= high < math.inf and smooth(low, high), f"{config['function']} between {low} and {high}")
    room = 1 + Fraction(1, 1 << 40)
    steepest, largest = (
        max(abs(Fraction(float(f(v)))) for v in (low, high)) * room + ops.unit for f in (slope, function)
    )
    return Node(shape, steepest, lambda c: function(np.clip(c, low, high)), 0, ops.rounding(64) * largest)


def group_sort(config, get, shape):
    """Sorts each group of channels in descending order: adjacent ones, or, for MaxMin of n channels, i and i + n/2."""
    size = config.get("group_size", 2)  # 2: of MaxMin
    k = shape[0] if size is None else size
    need(size != 1 and shape[0] % k == 0, f"groups of {k}, got {shape}")
    seen, axis = ((2, -1), 1) if config["type"] == "MaxMin" else ((-1, k), 2)
    return Node(shape, 1, lambda c: -np.sort(-c.reshape(len(c), *seen, *shape[1:]), axis).reshape(c.shape))


def half_abs(config, get, shape):
    k = shape[0] // 2
    return Node(shape, 1, lambda c: np.concatenate((np.abs(c[:, :k]), c[:, k:]), 1))


def n_activation(config, get, shape):
    need(config["channels"] == shape[0], f"{config['channels']} channels, got {shape}")
    stored, error = ops.of(get("thresholds", (2, shape[0])))
    low, high = (t.reshape(-1, *(1,) * (len(shape) - 1)) for t in (stored.min(0), stored.max(0)))

    def forward(c):
        return np.where(c < low, ops.add(c, -2 * low), np.where(c > high, ops.add(c, -2 * high), -c))

    # The value moves by at most twice as much as a threshold.
    return Node(shape, 1, forward, ops.rounding(1), 2 * (error + ops.rounding(1) * largest(stored)))


def householder(config, get, shape):
    """Folds the plane along lines at half of an angle; on the wrong side it errs by twice the distance to the line."""
    n, order = config["channels"], config["order"]
    need(n == shape[0] and n % 2 == 0 and order >= 1, f"{n} channels, got {shape}")
    angles = get("angles", (order, n // 2))
    need(np.abs(angles).max() <= 8, "angles of modulus up to 8")
    spend(angles.size << 11, f"{angles.size} angles")
    nodes = []
    for row in angles:
        units = [int(Fraction(v) * (1 << 199)) for v in row.tolist()]  # half of the angle, in units of 2^-200
        waves = np.array([[*wave(2 * v), *wave(v)] for v in units], object)
        table, tau = ops.table(waves.T.reshape(4, n // 2, *(1,) * (len(shape) - 1)))

        def fold(c, table=table):
            a, b = c[:, : n // 2], c[:, n // 2 :]
            cos, sin, half_cos, half_sin = table
            keep = ops.scale(a, half_sin) > ops.scale(b, half_cos)  # the side of the line that stays
            turned = ops.add(ops.scale(a, cos), ops.scale(b, sin)), ops.add(ops.scale(a, sin), -ops.scale(b, cos))
            return np.concatenate((np.where(keep, a, turned[0]), np.where(keep, b, turned[1])), 1)

        nodes.append(Node(shape, 1, fold, 5 * (ops.rounding(2) + 2 * tau), 8 * ops.unit))
    return chain(nodes)


def softmax(config, get, shape):
    axis = config["dim"] + (len(shape) + 1) * (config["dim"] < 0)
    need(1 <= axis <= len(shape), f"a softmax along a dimension of {shape}, got {config['dim']}")

    def forward(c):
        y = np.exp(c - c.max(axis, keepdims=True))
        return y / y.sum(axis, keepdims=True)

    return Node(shape, Fraction(1, 2), forward, ops.rounding(2), ops.rounding(64 + math.prod(shape)))


def attraction(config, get, shape):
    """The attraction of Theorem 11 between tokens of a sequence, head by head, computed token by token."""
    heads = config["heads"]
    need(len(shape) >= 2 and shape[-1] % heads == 0, f"tokens of {heads} heads, got {shape}")
    n, e = shape[-2], shape[-1] // heads
    spend(0, f"distances of {n} tokens", n * math.prod(shape))

    def forward(c):
        u = c.reshape(len(c), -1, n, heads, e).swapaxes(2, 3)
        y = np.empty_like(u)
        for i in range(n):
            d = u[..., i : i + 1, :] - u
            y[..., i, :] = (d / np.sqrt(1 + (d * d).sum(-1, keepdims=True))).sum(-2) / n
        return y.swapaxes(2, 3).reshape(c.shape)

    return Node(shape, 1, forward, 2 * ops.rounding(e + n + 8), n * ops.unit, room=4 * math.prod(shape))


def gradient_step(config, get, shape):
    """The gradient step of Theorem 11: a graph of its parts, with the constant that the theorem proves."""
    need(config["first"].get("type") == "Linear", "a dense layer first")
    first = build(config["first"], get.at("first"), shape)
    force = build(config["force"], get.at("force"), first.shape)
    need(force.shape == first.shape, "a force of the size of its input")
    (w, error, *_), stored = first.blocks, get("step", ())
    (step, off), exact, turned = ops.of(stored), Fraction(float(stored)), w.swapaxes(1, 2)
    m = w.shape[1]

    def back(c):
        return ops.dot(c.reshape(-1, m), np.ascontiguousarray(turned[0])).reshape(-1, *shape)

    lost = ops.rounding(1) * abs(exact) + off
    scaled = Node(shape, abs(exact), lambda c: ops.scale(c, -step), lost, ops.unit)
    node = residual(shape, [first, force, product(turned, error, shape, back, first.norm), scaled])
    kind, curvature = config["force"]["type"], abs(exact) * force.norm * first.norm**2
    convex = exact >= 0 and (kind in ("Softmax", "Attraction") or restricted(force))
    return improved(node, max(Fraction(1), curvature - 1) if convex else node.norm)


def layer_norm(config, get, shape):
    """Centres groups of n numbers, divides them by their standard deviation and applies the affine map."""
    eps, size = Fraction(config["eps"]), tuple(config["normalized_shape"])
    need(eps > Fraction(1, 1 << 400), "LayerNorm with eps above 2^-400")
    need(shape[len(shape) - len(size) :] == size, f"a shape that ends in {size}, got {shape}")
    weight = get("weight", size) if config["elementwise_affine"] else np.ones(())
    bias = get("bias", size) if config["elementwise_affine"] & config["bias"] else np.zeros(())
    n = math.prod(size)
    norm = root(largest(weight) ** 2 / eps)

    def forward(c):
        c = c.reshape(len(c), -1, n)
        c = c - c.mean(2, keepdims=True)
        c = c / np.sqrt((c * c).mean(2, keepdims=True) + float(config["eps"]))
        return c.reshape(-1, *shape) * weight + bias

    lost = norm * (3 * gamma(n + 4) + gamma(n + 16))  # centring moves c; the quotient is at most ``norm`` times |c|
    return Node(shape, norm, forward, lost, gamma(8) * largest(bias))


def _two(value):
    return tuple(value) if isinstance(value, list) else (value,) * 2


def _together(config, shape):
    """The dimensions of a sample that a module reduces together, and how many numbers they hold."""
    dims = config["dims"]
    need(dims and len(set(dims)) == len(dims) and all(1 <= d <= len(shape) for d in dims), f"dimensions {dims}")
    return tuple(dims), math.prod(shape[d - 1] for d in dims)


def mean(config, get, shape):
    (dims, n), keep = _together(config, shape), config["keepdim"]
    rest = [d for d in range(1, len(shape) + 1) if d not in dims]
    spend(16 * n, f"a mean of {n} numbers")
    table, tau = ops.table(np.array([[(1 << 62) // n] * n], object))
    out = tuple(1 if d in dims else shape[d - 1] for d in range(1, len(shape) + 1) if keep or d not in dims)

    def forward(c):
        return ops.dot(c.transpose(0, *rest, *dims).reshape(-1, n), table).reshape(len(c), *out)

    need(out, "a mean of everything")
    return product(table[None], tau, out, forward, root(Fraction(1, n)))


def layer_center(config, get, shape):
    """Subtracts the mean of n numbers from each of them: an orthogonal projection."""
    dims, n = _together(config, shape)
    # The mean is wrong by gamma(n + 2) of that of the moduli, n times; |mean| sqrt(n) <= |x|.
    return Node(shape, 1, lambda c: c - c.mean(dims, keepdims=True), ops.rounding(n + 2), ops.unit)


def unit_norm(config, get, shape):
    """Projects onto the ball of radius eps and divides by eps."""
    eps = Fraction(config["eps"])
    need(eps > Fraction(1, 1 << 400), "UnitNorm with eps above 2^-400")
    dims, n = _together(config, shape)

    def forward(c):
        return c / np.maximum(np.sqrt((c * c).sum(dims, keepdims=True)), float(config["eps"]))

    # Results have norm 1 in each group at most; squares that underflow lose less than 2^-500 of the norm.
    return Node(shape, 1 / eps, forward, 0, 4 * ops.rounding(n + 8))


def bilinear(config, get, shape):
    """Bilinear enlargement by f per axis: a nonnegative matrix with row sums 1, column sums f, so of norm sqrt(f)."""
    factors = config["rows"], config["cols"]
    need(len(shape) == 3, f"EnlargeBilinear of images, got {shape}")
    need(all(f >= 1 and f & (f - 1) == 0 for f in factors), f"factors {factors} that are powers of two")
    c0, h, w = shape
    grown(c0, h, factors[0], w, factors[1])
    spend(4 * (factors[0] * h * h + factors[1] * w * w), f"an enlargement by {factors}")

    def weights(n, f):
        # Multiples of 1 / 2f: exact.
        place = np.clip((np.arange(f * n) + 0.5) / f - 0.5, 0, n - 1)
        return np.maximum(0, 1 - np.abs(place[:, None] - np.arange(n)))

    left, right = weights(h, factors[0]), weights(w, factors[1])
    norm = root(Fraction(factors[0] * factors[1]))
    lost = norm * (ops.rounding(h) + ops.rounding(w)) * 2
    out = (c0, h * factors[0], w * factors[1])
    return Node(out, norm, lambda c: left @ c @ right.T, lost, 4 * ops.unit)


def l2_pool(config, get, shape):
    need(len(shape) == 3, f"images, got {shape}")
    c0, h, w = shape
    p, q = (h, w) if config["kernel_size"] is None else _two(config["kernel_size"])
    need(not isinstance(config["kernel_size"], list) and h % p == 0 and w % q == 0, f"windows of {p} x {q} on {shape}")

    def forward(c):
        c = c.reshape(-1, c0, h // p, p, w // q, q).transpose(0, 1, 2, 4, 3, 5)
        return ops.norms(c.reshape(-1, p * q)).reshape(-1, c0, h // p, w // q)

    # Squares that underflow lose less than 2^-1074 each, and the root of their sum less than 2^-500.
    each = (ops.unit + Fraction(1, 1 << 500)) * ones(p, q)
    return Node((c0, h // p, w // q), 1, forward, ops.rounding(p * q), each)


def _axes(config, shape):
    """For each axis of an image: its size, kernel, padding, dilation, and the first position of each pooling window."""
    need(len(shape) == 3, f"images, got {shape}")
    given = (_two(config.get(k, 1)) for k in ("kernel_size", "stride", "padding", "dilation"))  # AvgPool2d: not dilated
    for n, k, s, p, d in zip(shape[1:], *given, strict=True):
        need(k >= 1 and s >= 1 and d >= 1 and 0 <= 2 * p <= k, "pooling windows")
        free = n + 2 * p - d * (k - 1) - 1
        out = (-(-free // s) if config["ceil_mode"] else free // s) + 1
        need(out >= 1, "pooling windows")  # with ``ceil_mode`` one may be larger than its input
        out -= config["ceil_mode"] and (out - 1) * s >= n + p  # torch drops a last window that starts behind the input
        yield n, k, p, d, np.arange(out) * s - p


def max_pool(config, get, shape):
    axes, shared = [], 1
    for n, k, _, d, starts in _axes(config, shape):
        spend(4 * len(starts) * k, "pooling windows")
        index = starts[:, None] + np.arange(k) * d
        inside = (index >= 0) & (index < n)
        need(bool(inside.any(1).all()), "pooling windows inside their input")
        shared *= int(np.bincount(index[inside]).max())  # windows of one pixel, at most: Theorem 5
        # A place outside takes the value of one inside: the maximum stays.
        axes.append(np.where(inside, index, np.where(inside, index, -1).max(1)[:, None]))
    room, out = shape[0] * axes[0].size * max(shape[2], axes[1].size), (shape[0], len(axes[0]), len(axes[1]))
    return Node(out, root(Fraction(shared)), lambda c: c[:, :, axes[0]].max(3)[:, :, :, axes[1]].max(4), room=room)


def average_pool(config, get, shape):
    """Average pooling as one matrix per axis, which sums each window and divides by its count."""
    windows, divisor = [], config.get("divisor_override")
    if config["type"] == "AdaptiveAvgPool2d":
        need(config["output_size"] is not None and len(shape) == 3, f"an output size, and images, got {shape}")
        for n, o in zip(shape[1:], _two(config["output_size"]), strict=True):
            o = n if o is None else o
            spend(16 * o * n, f"an output size of {o}")
            cuts = np.arange(o + 1) * n
            windows.append((n, cuts[:-1] // o, -(-cuts[1:] // o), False))  # -(-): rounded up
    else:
        for n, k, p, _, starts in _axes(config, shape):
            spend(16 * len(starts) * n, "pooling windows")
            windows.append((n, starts, np.minimum(starts + k, n + p), config["count_include_pad"]))
    made = []
    for n, starts, ends, padding_counts in windows:
        first, stop = np.maximum(starts, 0), np.minimum(ends, n)
        counts = ends - starts if padding_counts else stop - first
        if divisor is not None:
            counts = np.full(len(starts), 1 if made else divisor)  # of the window: divided by once, on the first axis
        need(counts.all() and (first < stop).all(), "pooling windows that are not empty")
        table = np.zeros((len(starts), n), object)
        for row, a, b, count in zip(table, first, stop, counts.tolist(), strict=True):
            row[a:b] = (1 << 62) // count  # a floor: less than one unit off
        made.append(ops.table(table))
    (tall, tau), (wide, _) = made

    def forward(c):
        y = ops.dot(c.reshape(-1, shape[2]), wide).reshape(*c.shape[:3], -1).swapaxes(2, 3)
        return ops.dot(y.reshape(-1, shape[1]), tall).reshape(*y.shape[:3], -1).swapaxes(2, 3)

    norms, lost = [spectral(t[None], tau) for t in (tall, wide)], erring(tall, tau) + erring(wide, tau)
    out = (shape[0], len(tall), len(wide))
    room = shape[0] * max(len(tall), shape[1]) * max(len(wide), shape[2])
    each = ops.unit * 2 * (norms[0] + 1) * root(Fraction(room, math.prod(out)))
    return Node(out, math.prod(norms), forward, 2 * lost * (1 + sum(norms)), each, room=room)


def grown(*shape):
    """The shape, charged to the budget: a configuration can ask for large activations without stored numbers."""
    need(len(shape) <= 8 and min(shape) >= 1, f"an activation of shape {shape}")
    spend(2 * math.prod(shape), f"an activation of shape {shape}")
    return shape


def rearrangement(config, get, shape):
    """A module that moves, drops or repeats numbers; its constant is the root of the most copies of one number."""
    forward = _moves(config, shape)
    index = forward(np.arange(1, math.prod(grown(*shape)) + 1).reshape(1, *shape))
    copies = np.bincount(index.reshape(-1), minlength=2)[1:].max()  # [1:]: 0 is padding
    return Node(grown(*index.shape[1:]), root(Fraction(int(copies))), forward)


def _dim(config, shape):
    need(1 <= config["dim"] <= len(shape), f"a dimension of a sample, got {config['dim']}")
    return config["dim"]


def _padded(c, edges):
    """Pads each dimension of a sample with zeros before and after; negative sizes crop."""
    keep = tuple(slice(max(-a, 0), n + min(b, 0)) for n, (a, b) in zip(c.shape[1:], edges, strict=True))
    return np.pad(c[(slice(None), *keep)], [(0, 0)] + [(max(a, 0), max(b, 0)) for a, b in edges])


def _moves(config, shape):
    kind, n = config["type"], len(shape)
    if kind == "Flatten":
        need((config["start_dim"], config["end_dim"]) == (1, -1), "Flatten of whole samples")
        return lambda c: c.reshape(len(c), -1)
    if kind == "Reshape":
        out = tuple(config["shape"])
        need(math.prod(out) == math.prod(shape) and min(out, default=0) >= 1, f"Reshape of {shape} to {out}")
        return lambda c: c.reshape(len(c), *out)
    if kind == "Permute":
        dims = config["dims"]
        need(sorted(dims) == list(range(1, n + 1)), f"Permute of {shape} by {dims}")
        return lambda c: c.transpose(0, *dims)
    if kind == "Piece":
        dim, taken = _dim(config, shape), range(config["start"], config["stop"], config["step"])
        inside = taken and taken.start >= 0 and taken.step >= 1 and taken[-1] < shape[dim - 1]
        need(inside, f"Piece: entries {taken} of {shape}")
        return lambda c: c[(slice(None),) * dim + (slice(taken.start, taken.stop, taken.step),)]
    if kind == "Roll":
        dim, by = _dim(config, shape), config["shift"]
        return lambda c: np.roll(c, by, dim)
    if kind == "Expand":
        out = grown(*config["shape"])
        need(len(out) == n and all(a in (1, b) for a, b in zip(shape, out, strict=True)), f"Expand of {shape} to {out}")
        return lambda c: np.broadcast_to(c, (len(c), *out))
    if kind == "Pad":
        sizes = config["padding"]
        need(len(sizes) % 2 == 0 and len(sizes) <= 2 * n, f"{kind} of {shape} by {sizes}")
        edges = [(0, 0)] * (n - len(sizes) // 2) + [*zip(sizes[::2], sizes[1::2], strict=True)][::-1]
        for of in (min, max):  # only cropped, then only padded: no side may vanish, and the largest shape is paid for
            grown(*(m + of(a, 0) + of(b, 0) for m, (a, b) in zip(shape, edges, strict=True)))
        return lambda c: _padded(c, edges)
    channels, moved = config["channels"], config["moved"]  # of a Shift2d
    need(n == 3 and shape[0] == channels and moved >= 1 and 4 * moved <= channels, f"{kind} of {shape}")

    def shifted(c):
        groups = np.split(c, [channels - k * moved for k in (4, 3, 2, 1)], 1)
        moves = zip(groups[1:], ((1, 2), (-1, 2), (1, 3), (-1, 3)), strict=True)
        return np.concatenate([groups[0], *(np.roll(part, by, axis) for part, (by, axis) in moves)], 1)

    return shifted


# --- values that meet -------------------------------------------------------------------------------------------------


class Join:
    """A sum of values with ``weights``, or (None) their concatenation or maximum; forward returns (value, error)."""

    def __init__(self, shape, weights, forward):
        self.shape, self.weights, self.forward, self.room = shape, weights, forward, math.prod(shape)

    def error(self, errors):
        if self.weights is None:
            return root(sum(e * e for e in errors))
        return sum(w * e for w, e in zip(self.weights, errors, strict=True))

    def form(self, given, known):
        if self.weights is None:
            return settled(given, known)
        total = {}
        spend(sum(map(len, given)) << 6, "a sum of values of many pieces")
        for weight, form in zip(self.weights, given, strict=True):
            for s, a in form.items():
                total[s] = up(total.get(s, 0) + weight * a)
        return total


def alike(shapes, count):
    need(len(shapes) == count and len(set(shapes)) == 1, f"{count} values of one shape, got {shapes}")
    return shapes[0]


def added(shapes, signs):
    def forward(values):
        y = signs[0] * values[0]
        for sign, c in zip(signs[1:], values[1:], strict=True):
            y = ops.add(y, sign * c)
        return y, ops.rounding(len(values)) * sum(map(length, values))

    need(signs and all(sign in (1, -1) for sign in signs), f"signs 1 and -1, got {signs}")
    return Join(alike(shapes, len(signs)), [Fraction(1)] * len(signs), forward)


def blended(shapes, stored):
    (share, error), exact = ops.of(stored), Fraction(float(stored))
    shares, weights = (share, ops.of(np.float64(1))[0] - share), [abs(exact), abs(1 - exact)]
    shape = alike(shapes, 2)
    each = 2 * ops.unit * ones(*shape)

    def forward(values):
        lost = [(error + ops.rounding(8) * (1 + w)) * length(c) for w, c in zip(weights, values, strict=True)]
        return ops.add(*(ops.scale(c, s) for c, s in zip(values, shares, strict=True))), sum(lost) + each

    return Join(shape, weights, forward)


def multiplied(config, get, shapes):
    """The product of two values, each clipped to [-limit, limit], entry by entry or as matrices."""
    stored, entries = get("limits", (2,)), config["type"] == "Product"
    need((stored >= 0).all(), "limits of at least 0")
    ((a, b), error), (p, q) = ops.of(stored), (Fraction(float(v)) for v in stored)
    if entries:
        inner, shape, weights = 1, alike(shapes, 2), [q, p]
    else:
        rows, inner, cols = config["rows"], config["inner"], config["cols"]
        need(len(shapes) == 2 and len(shapes[0]) >= 2, f"two stacks of matrices, got {shapes}")
        lead, shape = shapes[0][:-2], (*shapes[0][:-2], rows, cols)
        need(shapes == [(*lead, rows, inner), (*lead, inner, cols)], f"matrices that can be multiplied, got {shapes}")
        weights = [q * ones(inner, cols), p * ones(rows, inner)]
    lost = sum(w * error * ones(*s) for w, s in zip(weights, shapes, strict=True)) + 2 * ops.unit * ones(*shape)

    def forward(values):
        u, v = (np.clip(c, -limit, limit) for c, limit in zip(values, (a, b), strict=True))
        y = ops.scale(u, v) if entries else ops.dot(u, np.ascontiguousarray(v.swapaxes(-1, -2)))
        return y, lost + ops.rounding(inner) * length(u) * length(v)

    return Join(shape, weights, forward)


def join(config, get, shapes):
    kind = config["type"]
    if kind == "Add":
        return added(shapes, config["signs"])
    if kind == "Blend":
        return blended(shapes, get("share", ()))
    if kind == "Concatenate":
        dim = _dim(config, shapes[0])
        need(len({(*s[: dim - 1], *s[dim:]) for s in shapes}) == len({*map(len, shapes)}) == 1, f"shapes {shapes}")
        shape = (*shapes[0][: dim - 1], sum(s[dim - 1] for s in shapes), *shapes[0][dim:])
        return Join(shape, None, lambda values: (np.concatenate(values, dim), Fraction(0)))
    if kind == "Maximum":
        return Join(alike(shapes, len(shapes)), None, lambda values: (np.max(values, 0), Fraction(0)))
    return multiplied(config, get, shapes)


def settled(rows, known, whole=False):
    """The numbers g of Theorem 10 for a concatenation of values: a dict {source s: g_s} with a single source.

    ``rows`` are such dicts of the values, ``known`` those of all values of the graph. They replace pieces by the value
    that was cut, the last one first, until one source is left; with ``whole`` until it is the input, ().
    """
    while len(sources := set().union(*rows)) > 1 or (whole and sources - {()}):
        spend(sum(map(len, rows)) << 6, "values of many pieces")
        key = max(s[:2] for s in sources)  # the last value that was cut: its own form has pieces of earlier ones
        pieces = sorted(s for s in sources if s[:2] == key)
        rows = [{**row} for row in rows]
        columns = [[row.pop(s, Fraction(0)) for s in pieces] for row in rows]  # (G_p)_p of Theorem 10
        most = max(map(max, columns)) or Fraction(1)
        norm = root(sum(a * a for row in columns for a in row))
        if len(columns) * len(pieces) <= 1 << 12:  # entries rounded up: the norm only grows
            above = [[math.nextafter(float(a / most), 2) for a in row] for row in columns]
            norm = min(norm, most * spectral(*ops.of([above])))
        moved = {s: up(norm * a) for s, a in known[key[0]].items()}
        if any(row and any(cut) for row, cut in zip(rows, columns, strict=True)):  # a row with other columns, too
            rest = {s: root(sum(row.get(s, 0) ** 2 for row in rows)) for s in set().union(*rows)}
            rows = [{s: rest.get(s, 0) + moved.get(s, 0) for s in {*rest, *moved}}]
        else:
            rows = [row for row in (*rows, moved) if row]
    return {s: root(sum(row.get(s, 0) ** 2 for row in rows)) for s in sources}


def partitions(parts, sources):
    """{i: piece (value, dim, start, stop, step)} for the parts i that cut one, unless pieces of that value overlap."""
    cuts, together = {}, {}
    for i, (part, read) in enumerate(zip(parts, sources, strict=True)):
        if getattr(part, "kind", "") == "Piece":
            dim, *taken = (part.config[k] for k in ("dim", "start", "stop", "step"))
            cuts[i] = (read[0], dim, taken[0], range(*taken)[-1] + 1, taken[2])
            together.setdefault(cuts[i][:2], set()).add(cuts[i])
    for key, pieces in together.items():
        counts = np.zeros(max(stop for *_, stop, _ in pieces), np.int32)
        for *_, start, stop, step in pieces:
            counts[start:stop:step] += 1
        if counts.max() > 1:  # pieces that share entries are no partition
            cuts = {i: cut for i, cut in cuts.items() if cut[:2] != key}
    return cuts


def wired(shape, parts, sources):
    """A graph as one node (Theorem 10): value 0 is the input, part i maps values ``sources[i]`` to value i + 1."""
    last = {value: i for i, read in enumerate(sources) for value in read}
    sizes = [math.prod(shape), *(math.prod(part.shape) for part in parts)]
    live = [sum(sizes[j] for j in range(i + 1) if last.get(j, -1) >= i) + part.room for i, part in enumerate(parts)]
    cuts, known = partitions(parts, sources), [{(): Fraction(1)}]
    for i, (part, read) in enumerate(zip(parts, sources, strict=True)):
        if isinstance(part, Join):
            known.append(part.form([known[j] for j in read], known))
        elif i in cuts:
            known.append({cuts[i]: Fraction(1)})
        else:
            known.append({s: up(part.norm * a) for s, a in known[read[0]].items()})
    norm = settled([known[-1]], known, whole=True)[()]

    def own(c):
        values = {0: (c, Fraction(0))}
        for i, (part, read) in enumerate(zip(parts, sources, strict=True)):
            if isinstance(part, Join):
                y, lost = part.forward([values[j][0] for j in read])
                values[i + 1] = y, up(part.error([values[j][1] for j in read]) + lost)
            else:
                values[i + 1] = part.run(*values[read[0]])
            need(np.isfinite(values[i + 1][0]).all(), "values that are not finite")
            for j in {j for j in read if last[j] == i}:
                del values[j]
        return values[len(parts)]

    return Node(parts[-1].shape, norm, own=own, room=max(live))


def residual(shape, nodes):
    """The sum of the input x and of a chain of nodes applied to x."""
    return wired(shape, [chain(nodes), added([shape] * 2, [1, 1])], [[0], [0, 1]])


def graph(config, get, shape):
    modules, sources, shapes, parts = config["modules"], config["sources"], [shape], []
    need(1 <= len(modules) == len(sources) <= 4096, "a graph of 1 to 4096 modules with their sources")
    need(set().union(*sources) >= {*range(len(modules))}, "a graph that reads every value but the last")
    for i, (part, read) in enumerate(zip(modules, sources, strict=True)):
        need(read and all(type(j) is int and 0 <= j <= i for j in read), f"module {i} reads values {read}")
        given, below = [shapes[j] for j in read], get.at(f"nodes.{i}")
        if part.get("type") in JOINS:
            arguments(part)
            parts.append(join(part, below, given))
            parts[-1].kind = part["type"]
        else:
            need(len(read) == 1, f"module {i}, no join, reads values {read}")
            parts.append(build(part, below, given[0]))
        shapes.append(parts[-1].shape)
        spend(len(read) * parts[-1].room, f"an activation of shape {shapes[-1]}")
    node = wired(shape, parts, sources)
    node.parts = parts
    return node


JOINS = ("Add", "Blend", "Concatenate", "Maximum", "Product", "MatrixProduct")


def _parts(config, get, shape):
    """A block's three parts, and (s, s W1, its error, W2, its error), s = sqrt(multiplier); None without a proof."""
    first = build(config["first"], get.at("first"), shape)
    middle = build(config["activation"], get.at("activation"), first.shape)
    second = build(config["second"], get.at("second"), middle.shape)
    parts, multiplier = [first, middle, second], get("multiplier", (config["channels"],))
    usable = first.blocks and second.blocks and restricted(middle) and (multiplier > 0).all()
    if not usable:
        return parts, None
    (w1, error1, each, kind1), (w2, error2, _, kind2) = first.blocks, second.blocks
    same = kind1 == kind2 != "window" or (kind1, kind2) == ("window", "point")
    if not same or len(w1) != len(w2) or not w1.shape[1] == w2.shape[2] == each * len(multiplier):
        return parts, None
    s = np.tile(ops.sqrt(ops.of(multiplier)[0]), each)  # real and imaginary rows have one multiplier
    # Entries of s W1, s any positive numbers: their rounding is an error of the entries.
    left = ops.scale(w1, s[:, None])
    error = error1 * largest(s) + ops.rounding(1) * largest(left) + ops.unit
    return parts, (s, left, error, w2, error2)


def restricted(node):
    """True if the slope of an activation lies in [0, 1]."""
    unit = node.kind == "ELU" and 0 < node.config["alpha"] <= 1
    return unit or node.kind in RESTRICTED or getattr(node, "restricted", False)


def sandwich(config, get, shape):
    parts, proof = _parts(config, get, shape)
    node = chain(parts)
    if proof is None or not (proof[0] > 0).all():
        return node
    s, left, error, w2, error2 = proof
    inverse = ops.inverse(s)
    right = ops.scale(w2, inverse).swapaxes(1, 2)
    more = error2 * largest(inverse) + ops.rounding(2) * largest(right) + ops.unit * (1 + largest(w2))
    both = spectral(np.concatenate((left, right), 2), max(error, more))
    return improved(node, up(both * both / 2))


def slope_residual(config, get, shape):
    parts, proof = _parts(config, get, shape)
    need(parts[-1].shape == shape, "parts that keep the shape")
    node = residual(shape, parts)
    if proof is None or parts[0].blocks[3] == "window":
        return node
    s, left, error, w2, error2 = proof
    gram = spectral(left, error) ** 2
    rest = w2 + ops.scale(left, s[:, None]).swapaxes(1, 2)
    size = largest(w2) + largest(left) * largest(s)
    more = error2 + error * largest(s) + ops.rounding(4) * size + ops.unit
    return improved(node, max(Fraction(1), gram - 1) + spectral(rest, more) * parts[0].norm)  # Theorem 7


def spread(config, get, shape):
    """y = F * first(x) - [x; 0] + b as a graph; its constant is the largest norm of F S - E, E x = [x; 0]."""
    first = build(config["first"], get.at("first"), shape)
    (n, h, w), m, kernel = shape, config["out_channels"], config["kernel_size"]
    need(first.shape == shape and first.blocks and first.blocks[3] == (h, w), "a Fourier layer that keeps the shape")
    need(m >= n and len(kernel) == 2 and 1 <= kernel[0] <= h and 1 <= kernel[1] <= w, "a kernel")
    plain = PLAIN | {"in_channels": n, "out_channels": m, "kernel_size": kernel}
    second = convolution(plain | {"padding_mode": "circular", "bias": config["bias"]}, get, shape)
    embedded = Node(second.shape, 1, lambda c: np.pad(c, [(0, 0), (0, m - n), (0, 0), (0, 0)]))
    node = wired(shape, [chain([first, second]), embedded, added([second.shape] * 2, [1, -1])], [[0], [0], [1, 2]])
    if not second.blocks or second.blocks[3] != ("rows first", h, w):
        return node
    (s, error1, *_), (f, error2, *_) = first.blocks, second.blocks
    # Of a convolution the frequencies are stored row by row, of a Fourier layer column by column.
    f = np.ascontiguousarray(f.reshape(h, -1, *f.shape[1:]).swapaxes(0, 1)).reshape(-1, *f.shape[1:])
    eye, _ = ops.of(np.kron(np.eye(2), np.eye(m, n)))
    product, columns = ops.dot(f, s.swapaxes(1, 2)), ops.rowsum(s.swapaxes(1, 2))
    error = ops.rounding(2 * n) * ops.rowsum(f) * largest(s) + error2 * columns + error1 * ops.rowsum(f)
    error += 2 * n * error1 * error2 + ops.rounding(1) * (largest(product) + 1) + 4 * ops.unit
    return improved(node, spectral(ops.add(product, -eye), error))


def recurrent(config, get, shape):
    """Theorem 12: the gain alone; values are not computed."""
    n, m, nx, size = (config[k] for k in ("in_features", "out_features", "states", "block"))
    need(len(config["units"]) == 2 and all(type(k) is int and k >= 0 for k in config["units"]), "two numbers of units")
    need(len(shape) == 2 and shape[1] == n, f"sequences of {n} numbers, got {shape}")
    (nv, nw), gain, rate = config["units"], Fraction(config["gain"]), Fraction(config["rate"])
    need(nv % size == 0 and (size >= nv or nv == nw), f"blocks of {size} of {nv} units")
    need(gain > 0 < rate and shape[0] < 2000, "a gain and a rate above 0, and sequences of less than 2000 steps")
    rows, lower = get("matrix", (nv + nx + m, nw + nx + n)), get("metric", (nx, nx))
    weight, _ = get("multiplier", (nv,)), get("bias", (nv + nx + m,))
    phi = build(config["phi"], get.at("phi"), (nv or 1,))
    need(not nv or phi.shape == (nw,), f"{nw} numbers behind {nv} units, got {phi.shape}")
    if phi.kind not in {"ReLU", "LeakyReLU", "HalfAbs", *SMOOTH}:  # those act on each unit alone
        need(size >= nv, "one block of units")
        weight = np.repeat(weight[:1], nv)
    order = np.arange(max(nv, nw)) // size
    rows[:nv, :nw] *= order[:nv, None] > order[:nw]  # units read those of earlier blocks
    rows, off = ops.of(rows)
    (v, s, o), p, lam = np.split(rows, [nv, nv + nx]), symmetric(ops.of(lower)[0]), ops.of(weight)[0]
    before, after = nw + nx + n, nw + 2 * nx + n  # w, x, u; then rows for x+, for y, and for v
    slopes, given = not nv or restricted(phi), [gain, rate * rate, Fraction(1) if not nv else phi.norm]
    count = after + m + (0 if slopes else nv)
    spend(8 * count * count, f"a matrix inequality of {count} rows")
    near = [ops.near(value) for value in given]
    moved, product = ops.scale(v, lam[:, None]), ops.dot(p, np.ascontiguousarray(s.T))
    h = np.zeros((count, count), p.dtype)  # the lower triangle
    h[nw : nw + nx, nw : nw + nx], h[before:after, before:after] = ops.scale(p, near[1]), p
    h[before:after, :before], h[after : after + m, :before] = product, o
    h[:nw, :nw] = np.diag((1 + slopes) * (lam if nv == nw else np.repeat(lam[:1], nw)))
    if slopes and nv:
        h[:nw, :nw] -= moved[:, :nw]
        h[nw:before, :nw] = -moved[:, nw:].T
    elif not slopes:
        h[after + m :, :before], h[after + m :, after + m :] = ops.scale(moved, near[2]), np.diag(lam)
    h = symmetric(h)
    # Errors: of the product P S, of the stored numbers, of the three numbers that are only near, and of roundings.
    sizes = [ops.rowsum(a) for a in (p, s, s.T, o, *((moved, moved.T) if nv else ()))]
    error = ops.rounding(nx) * sizes[0] * root(sizes[1] * sizes[2]) + (nx + 8 + given[2]) * count * ops.unit
    error += off * (sizes[0] + 1 + largest(lam) * (1 + given[2])) * ones(count, before)
    error += max(abs(ops.number(a) - b) for a, b in zip(near, given, strict=True)) * (1 + sum(sizes))
    for slack in (Fraction(0), *SLACKS):
        trial, found = h.copy(), ops.near(gain * (1 + slack))
        for start, stop in ((nw + nx, before), (after, after + m)):
            trial[start:stop, start:stop] += found * np.eye(stop - start, dtype=h.dtype)
        if positive(trial, error + ops.rounding(8) * ops.rowsum(trial)):
            whole = max(gain * (1 + slack), ops.number(found)) * max(Fraction(1), rate) ** (shape[0] - 1)
            return Node((shape[0], m), whole, own=lambda c: need(False, "no values of a Recurrent, only its gain"))
    raise Refused(f"a Recurrent whose gain of {config['gain']:.9g} is not proved")


def network(config, get, shape):
    nodes = []
    need(config["input_shape"] == list(shape), f"a network for {config['input_shape']}, got {shape}")
    for i, part in enumerate(config["modules"]):
        nodes.append(build(part, get.at(str(i)), nodes[-1].shape if nodes else shape))
    multipliers = {}
    need("Network" not in {part["type"] for part in config["modules"]}, "a network with a network in its chain")
    places = {*map(str, range(len(nodes)))}
    for i, n in config["multipliers"].items():
        need(i in places and type(n) is int, f"multiplier {i} of {n!r:.80} numbers")
        multipliers[int(i)] = get(f"multiplier{i}", (n,))
    node = improved(chain(nodes or [Node(shape, 1, lambda c: c)]), up(with_runs(nodes, multipliers, shape)))
    node.parts = nodes
    return node


# Rule of each type, and the names of its arguments: an integer, or by the mark behind it: ? true or false, . a number,
# ' a word, * a list of integers, / that or a word, | that or an integer, ~ as | or null, % a list that its rule reads,
# ! an object.
ROWS = {
    "Linear": (linear, "in_features out_features bias?"), "NActivation": (n_activation, "channels"),
    "Conv2d": (
        convolution, "in_channels out_channels kernel_size* stride* padding/ dilation* groups padding_mode' bias?"),
    "ConvTranspose2d": (
        transposed, "in_channels out_channels kernel_size* stride* padding* output_padding* groups bias? dilation*"),
    "FourierConv2d": (fourier, "in_channels out_channels height width kernel_size* complex_pairs? bias?"),
    "TaylorConv2d": (taylor, "in_channels out_channels kernel_size* terms bias?"), "Affine": (affine, "scale* shift*"),
    "SpreadConv2d": (spread, "first! out_channels kernel_size* bias?"), "Householder": (householder, "channels order"),
    "SandwichBlock": (sandwich, "channels first! activation! second!"), "LeakyReLU": (leaky, "negative_slope."),
    "SlopeResidual": (slope_residual, "channels first! activation! second!"), "PReLU": (leaky, "num_parameters"),
    "GradientStep": (gradient_step, "first! force!"), "Attraction": (attraction, "heads"), "Softmax": (softmax, "dim"),
    "ReLU": (unary(1, lambda c: np.maximum(c, 0), exact=True), ""), "Elementary": (elementary, "function'"),
    "MaxMin": (group_sort, ""), "GroupSort": (group_sort, "group_size~"), "HalfAbs": (half_abs, ""),
    "MaxPool2d": (max_pool, "kernel_size| stride| padding| dilation| ceil_mode?"),
    "AvgPool2d": (average_pool, "kernel_size| stride| padding| ceil_mode? count_include_pad? divisor_override~"),
    "AdaptiveAvgPool2d": (average_pool, "output_size~"), "L2NormPool2d": (l2_pool, "kernel_size~"),
    "LayerNorm": (layer_norm, "normalized_shape* eps. elementwise_affine? bias?"), "Mean": (mean, "dims* keepdim?"),
    "UnitNorm": (unit_norm, "dims* eps."), "LayerCenter": (layer_center, "dims*"), "Permute": (rearrangement, "dims*"),
    "EnlargeBilinear": (bilinear, "rows cols"), "Piece": (rearrangement, "dim start stop step"),
    "Flatten": (rearrangement, "start_dim end_dim"), "Reshape": (rearrangement, "shape*"),
    "Roll": (rearrangement, "dim shift"), "Pad": (rearrangement, "padding*"), "Expand": (rearrangement, "shape*"),
    "Shift2d": (rearrangement, "channels moved"), "Graph": (graph, "modules% sources%"),
    "Recurrent": (recurrent, "in_features out_features states units% block phi! gain. rate."),
    "Network": (network, "modules% input_shape* multipliers!"),
}  # fmt: skip
KINDS = {kind: rule for kind, (rule, _) in ROWS.items()} | {kind: unary(*row) for kind, row in SMOOTH.items()}
ARGUMENTS = {kind: names for kind, (_, names) in ROWS.items()} | {
    "CELU": "alpha.", "ELU": "alpha.", "Softplus": "beta. threshold.", "Hardtanh": "min_val. max_val.",
    "Softshrink": "lambd.", "GELU": "approximate'", "Add": "signs*", "Concatenate": "dim",
    "MatrixProduct": "rows inner cols",
}  # fmt: skip
ARGUMENTS = {kind: names.split() for kind, names in ARGUMENTS.items()}
WORDS = {"padding": ("same", "valid"), "padding_mode": PAD, "approximate": ("none", "tanh"), "function": tuple(CURVES)}
SIGNED = {"padding", "output_padding", "start_dim", "end_dim", "dim", "start", "signs", "shift", "divisor_override"}


def arguments(config):
    """Refuse a module whose arguments differ from those of its type, by name or by form: lipkit would not read it."""
    kind, given = config["type"], {key: value for key, value in config.items() if key != "type"}
    marks = {re.sub(r"\W", "", name): re.sub(r"\w", "", name) for name in ARGUMENTS.get(kind, ())}
    need(given.keys() <= marks.keys(), f"{kind}: arguments {sorted(given.keys() - marks)} that it does not have")
    need(given.keys() == marks.keys(), f"{kind}: no arguments {sorted(marks.keys() - given)}")
    for key, value in given.items():
        need(_fits(key, marks[key], value), f"{kind}: another value of {key}, got {value!r:.80}")


def _fits(key, mark, value):
    if mark == ".":
        return type(value) in (int, float) and abs(value) < (1 << 53 if type(value) is int else 1e38)
    if mark in ("?", "%", "!"):
        return type(value) is {"?": bool, "%": list, "!": dict}[mark]
    if isinstance(value, str):
        return mark in ("'", "/") and value in WORDS[key]
    least, several = -(1 << 31) if key in SIGNED else 1, isinstance(value, list)
    fits = mark in (("*", "/", "|", "~") if several else ("", "|", "~")) and (not several or 1 <= len(value) <= 16)
    entries = value if several else [value]
    return fits and all((n is None and mark == "~") or (type(n) is int and least <= n < 1 << 31) for n in entries)


def build(config, get, shape):
    need(isinstance(config, dict), "a module is no object")
    kind = config.get("type")
    need(isinstance(kind, str) and kind in KINDS, f"no rule for a module of type {kind!r:.80}")
    arguments(config)
    need(isinstance(ops, Floats) or kind not in FLOATING, f"--exact knows no {kind}")
    node = KINDS[kind](config, get, shape)
    node.kind, node.config = kind, config
    return node


# --- matrix inequalities ----------------------------------------------------------------------------------------------

DENSE = {"Linear", "Conv2d", "ConvTranspose2d", "Graph"}  # what begins a run
SAME = {"Affine", "Flatten", "Reshape"}  # of vectors
LINEAR = (DENSE - {"Graph"}) | SAME | {
    "Mean", "AvgPool2d", "AdaptiveAvgPool2d", "EnlargeBilinear", "LayerCenter", "Expand", "Pad", "Permute", "Piece",
    "Roll", "Shift2d", "Add", "Blend", "Concatenate",
}  # fmt: skip


def units(node):
    """The number of values behind activations in a node of Theorem 8; inf if it has other parts."""
    if node.kind in ("Graph", "Network"):
        return sum(map(units, node.parts))
    return 0 if node.kind in LINEAR else math.prod(node.shape) if restricted(node) else math.inf


def with_runs(nodes, multipliers, shape):
    """The constant of a chain, in which the longest runs with multipliers count by their inequalities."""
    # D: a layer; R: one that acts on each row of a sample; m: another linear module; s: one that only scales or
    # reshapes vectors, and ends no run; a: an activation with a multiplier.
    shapes, marks = [shape, *(node.shape for node in nodes)], ""
    for i, (node, before, after) in enumerate(zip(nodes, shapes, shapes[1:], strict=False)):
        vectors = all(math.prod(s) == s[-1] for s in (before, after))
        if node.kind in DENSE:
            fits = units(node) == 0 or (i in multipliers and units(node) < math.inf)
            rows = node.kind == "Linear" and math.prod(before) != before[-1]
            marks += ("R" if rows else "D") if fits else "."
        elif node.kind in LINEAR:
            marks += "s" if vectors and node.kind in SAME else "m"
        else:
            marks += "a" if i in multipliers and restricted(node) else "."
    # Multipliers that balance two runs may not balance the run that both make: the smaller product counts.
    whole = norm = math.prod(node.norm for node in nodes)
    found = {}
    for pattern in ("D(?:[Dmsa]*[Dm])?|R(?:[Ra]*R)?", "D(?:s*a[sm]*D)*|R(?:aR)*"):
        total = whole
        for start, stop in (run.span() for run in re.finditer(pattern, marks)):
            alone, given = nodes[start:stop], {i - start: m for i, m in multipliers.items() if start <= i < stop}
            product = math.prod(node.norm for node in alone)
            if given and product:
                if (start, stop) not in found:
                    numbers = unrolled(alone, given, shapes[start], marks[start] == "R")
                    found[start, stop] = min(product, lmi(*numbers, product))
                total = total / product * found[start, stop]
        norm = min(norm, total)
    return norm


def unrolled(nodes, multipliers, shape, by_rows):
    """V, the diagonals l and Y of Theorem 8, for nodes, multipliers by their places, and the shape of the input.

    A row of V, and Y, is a dict {j: (the matrix, transposed: images of unit vectors; the l2 error of each image)}. Of
    layers ``by_rows`` only the first row of a sample is looked at: the others stay 0.
    """
    rows, weights = [], []

    def vectors(k, shape):
        count = shape[-1] if by_rows else math.prod(shape)
        spend(count * math.prod(shape), f"a matrix inequality of {count} rows")
        return {k: (ops.of(np.eye(count, math.prod(shape)))[0].reshape(count, *shape), Fraction(0))}

    def behind(node, given):
        if node.kind in ("Graph", "Network"):
            reads = node.config["sources"] if node.kind == "Graph" else [[j] for j in range(len(node.parts))]
            for part, read in zip(node.parts, reads, strict=True):
                given = [*given, behind(part, [given[j] for j in read])]
            return given[-1]
        if node.kind in LINEAR:
            return {j: moved(node, given, j) for j in sorted(set().union(*given))}
        rows.append(flat(given[0]))
        return vectors(len(rows), node.shape)

    def flat(form):
        count = None if not by_rows else next(iter(form.values()))[0].shape[-1]
        return {j: (columns.reshape(len(columns), -1)[:, :count], error) for j, (columns, error) in form.items()}

    form = vectors(0, shape)
    for i, node in enumerate(nodes):
        form = behind(node, [form])
        sizes = [next(iter(row.values()))[0].shape[1] for row in rows[len(weights) :]]
        if sizes:
            value, count = ops.of(multipliers[i])[0], sum(sizes)
            need(len(value) in (1, count), f"multipliers of {count} units, got {len(value)}")
            weights += np.split(np.broadcast_to(value, count), np.cumsum(sizes)[:-1])
    return rows, weights, flat(form)


def moved(node, forms, j):
    """The matrix of z_j behind a linear node, without its shift, and its error, from the values that the node reads."""
    count = next(len(form[j][0]) for form in forms if j in form)
    spend(count * node.room, f"a matrix inequality of {count} rows")
    given = []
    for form in forms:
        like = next(iter(form.values()))[0]
        given.append(form.get(j, (np.zeros((count, *like.shape[1:]), like.dtype), Fraction(0))))
    if isinstance(node, Join):
        y, lost = node.forward([c for c, _ in given])
        return y, up(node.error([e for _, e in given]) + lost)
    ((c, e),) = given
    if node.kind == "Linear" and not e:
        w, off, *_ = node.blocks
        vectors = c.reshape(-1, w.shape[2])
        used = vectors != 0
        if (used.sum(1) <= 1).all() and (vectors[used] == ops.of(1.0)[0]).all():  # unit vectors: exact columns of w
            return ops.dot(vectors, w[0]).reshape(len(c), *node.shape), off * ones(*node.shape)
    (y, e), (shift, off) = node.run(c, e), node.run(np.zeros_like(c[:1]), Fraction(0))
    y = ops.add(y, -shift)
    return y, up(e + off + ops.rounding(1) * length(y))


def lmi(rows, multipliers, out, most):
    """Theorem 8: a gain of what `unrolled` returns, near the smallest that these multipliers prove, or ``most``."""
    if not 2**-500 < most < 2**500 or not all(((v > 0) & np.isfinite(v)).all() for v in multipliers):
        return most
    kept, inputs = [*({0} & {*out}), *range(1, len(rows) + 1)], len((rows or [out])[0][0][0])  # the first reads x
    # The congruence: any positive numbers, here l^-1/2, and one of the size of g^-1/2 for x.
    first, steps = ops.near(1 / root(most)), ops.rounding(8)
    d = [np.full(inputs, first), *(ops.inverse(ops.sqrt(v)) for v in multipliers)]

    def scaled(a, h, *factors):
        """The product of a, whose rows err by h in l2, with the factors, and a bound of its error in the same norm."""
        size, lost = largest(a), Fraction(0)
        for factor in factors:
            big = largest(factor)
            a, h, lost, size = ops.scale(a, factor), h * big, lost * big + ops.unit, size * big
        return a, h * ones(len(a)) + (lost + steps * size) * ones(*a.shape)

    ends = np.cumsum([0, *(len(d[j]) for j in kept)])
    here = {j: np.arange(start, stop) for j, start, stop in zip(kept, ends, ends[1:], strict=False)}
    spend(8 * int(ends[-1]) ** 2, f"a matrix inequality of {ends[-1]} rows")
    h, error = np.zeros((ends[-1], ends[-1]), d[0].dtype), Fraction(0)
    eliminated = []  # (places, a factor A of A A^T / g, which is subtracted, its error)
    for k, (row, value) in enumerate(zip(rows, multipliers, strict=True), 1):
        h[here[k], here[k]], lost = scaled(2 * value, Fraction(0), d[k], d[k])
        error += lost
        for j, (columns, e) in row.items():
            if j not in here:
                block, lost = scaled(columns, e, value, d[k])
                eliminated.append((here[k], block.T, lost))
                continue
            block, lost = scaled(columns, e, value, d[k], d[j][:, None])
            h[np.ix_(here[j], here[k])], h[np.ix_(here[k], here[j])] = -block, -block.T
            error += lost
    read = [(here[j], *scaled(columns, e, d[j][:, None])) for j, (columns, e) in out.items()]
    grams = []  # (places, A A^T, and a bound of its error)
    for parts in filter(None, (eliminated, read)):
        places, blocks, errors = zip(*parts, strict=True)
        places, a, lost = np.concatenate(places), np.concatenate(blocks), sum(errors)
        square = ops.rowsum(a) * ops.rowsum(a.T)  # at least ||A||^2
        off = lost * (2 * root(square) + lost) + ops.rounding(a.shape[1]) * square + len(a) * ops.unit
        gram = ops.dot(a, a)
        grams.append((np.ix_(places, places), gram, off + ops.rounding(2) * ops.rowsum(gram)))

    def loss(inverse):
        """A bound of the errors of what is subtracted, in the l2 norm."""
        each = (inverse * off + len(gram) * ops.unit for _, gram, off in grams)
        return error + sum(each)

    def seems(gain):
        """True if `positive` is likely to hold: a guess in floating point, which proves nothing."""
        unit = float(ops.near(Fraction(1)))
        trial = h / unit
        if 0 in here:
            trial[here[0], here[0]] = (float(first) / unit) ** 2 * gain
        for place, gram, _ in grams:
            trial[place] -= gram / (unit * gain)
        size = Fraction(float(np.abs(trial).sum(-1).max()))
        shift = float(room(len(trial), size, loss(1 / Fraction(gain)) + ops.rounding(8) * size))
        try:
            return np.linalg.cholesky(trial - shift * np.eye(len(trial))) is not None
        except np.linalg.LinAlgError:
            return False

    low, high = float(most) / (1 << 40), float(most)
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if seems(middle) else (middle, high)
    for slack in SLACKS:
        inverse = ops.near(1 / (Fraction(high) * (1 + slack)))  # 1 / inverse is the gain that is proved
        inverse_exact = ops.number(inverse)
        need(inverse_exact > 0, "a gain that is not finite")
        trial, lost = h.copy(), loss(inverse_exact)
        if 0 in here:
            exact = ops.number(first) ** 2 / inverse_exact
            trial[here[0], here[0]] = ops.near(exact)
            lost += abs(exact - ops.number(ops.near(exact)))
        for place, gram, _ in grams:
            trial[place] -= ops.scale(gram, inverse)
        if positive(trial, lost + ops.rounding(8) * ops.rowsum(trial)):
            return up(1 / inverse_exact)
    return most


def room(n, size, error):
    """A shift of an n x n matrix with row sums up to ``size`` that leaves room for its error and for a factor's."""
    return error * Fraction(65, 64) + size / 10**12 + n * n * ops.unit


def positive(h, error):
    """True if every symmetric matrix within spectral distance ``error`` of h is proved positive semidefinite."""
    h = symmetric(h)
    n, allowed = len(h), room(len(h), ops.rowsum(h), error)
    for _ in range(5):
        c = ops.near(allowed)
        try:
            left = ops.factor(h - c * np.eye(n, dtype=h.dtype))
        except (np.linalg.LinAlgError, Refused):
            return False
        rest = h - c * np.eye(n, dtype=h.dtype) - symmetric(ops.dot(left, left))
        size = ops.rowsum(left) * ops.rowsum(left.T) + ops.rowsum(h) + ops.number(c)
        lost = ops.rounding(n + 4) * size + n * ops.unit
        if ops.rowsum(rest) + lost + error <= ops.number(c):
            return True
        allowed *= 8  # the shift has to cover what the factor loses
    return False


# --- networks ---------------------------------------------------------------------------------------------------------


class Tensors:
    """Stored tensors whose names start with a prefix; ``used`` collects those that were asked for."""

    def __init__(self, stored, prefix="", used=None):
        self.stored, self.prefix, self.used = stored, prefix, set() if used is None else used

    def __call__(self, name, shape):
        name = self.prefix + name
        need(name in self.stored, f"no tensor {name}")
        found = self.stored[name]
        need(found.shape == tuple(shape), f"{name}: expected shape {tuple(shape)}, got {found.shape}")
        self.used.add(name)
        return found.astype(np.float64)

    def at(self, prefix):
        need(self.prefix.count(".") < 50, "modules nested more than 50 deep")
        return Tensors(self.stored, f"{self.prefix}{prefix}.", self.used)

    def bias(self, config, n, *ones):
        return ops.of(self("bias", (n,)))[0].reshape(n, *ones) if config["bias"] else None


class Network:
    """The network of a configuration, its constant ``gain``, and ``body``, the constant of all but the last layer."""

    def __init__(self, config, tensors, classes=True):
        need(config.get("type") == "Network" and config["modules"], "no Network at the top")
        claimed = sum(a.size for name, a in tensors.items() if MULTIPLIER.search(name))
        ops.left = FREE + SHARE * sum(a.size for a in tensors.values()) + min(ROW * claimed, MOST)
        get, shape = Tensors(tensors), tuple(config["input_shape"])
        spend(math.prod(shape), f"input shape {shape}")
        top = build(config, get, shape)
        self.nodes, self.gain = top.parts, top.norm
        unused = set(tensors) - get.used
        need(not unused, f"tensors that no module has: {sorted(unused)[:3]}")
        last = self.nodes[-1]
        self.rows = last.blocks[0][0] if last.kind == "Linear" and len(last.shape) == 1 else None
        self.body = up(math.prod(node.norm for node in self.nodes[:-1]))
        if classes:
            need(len(last.shape) == 1 and last.shape[0] >= 2, f"logits of shape {last.shape}")
            spend(last.shape[0] ** 2 << 4, f"pairs of {last.shape[0]} classes")

    def logits(self, x, batch):
        """Yield the logits of each batch of float32 samples, and the radius of their error."""
        for start in range(0, len(x), batch):
            c, e = ops.of(x[start : start + batch].astype(np.float64))
            e *= ones(*c[0].shape)
            for node in self.nodes:
                c, e = node.run(c, e)
            yield c, e

    def constants(self):
        """K[t][i] of Theorem 9."""
        k = self.nodes[-1].shape[0]
        whole = root(Fraction(2)) * self.gain
        if self.rows is None:
            return [[whole] * k for _ in range(k)]
        error = 2 * self.nodes[-1].blocks[1] * root(Fraction(self.rows.shape[1]))
        distances = ([far * (1 + ops.rounding(1)) + error for far in ops.lengths(w - self.rows)] for w in self.rows)
        return [[up(min(whole, self.body * far)) for far in row] for row in distances]


# --- files ------------------------------------------------------------------------------------------------------------

TYPES = {"F64": ("<f8", "float64"), "F32": ("<f4", "float32"), "F16": ("<f2", "float16"), "BF16": ("<u2", "bfloat16"),
         "I8": ("<i1", "int8"), "I16": ("<i2", "int16")}  # fmt: skip


def read(path, most=1 << 30):
    """The content of a regular file of at most ``most`` bytes, unpacked if its name ends in .gz."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        status = os.fstat(file.fileno())
        regular = stat.S_ISREG(status.st_mode) and status.st_size <= most
        need(regular, f"{path}: no regular file of at most {most} bytes")
        content = file.read(status.st_size)
    if str(path).endswith(".gz"):
        stream = zlib.decompressobj(31)  # 31: a gzip header, and the largest window
        content = stream.decompress(content, most)
        need(stream.eof and not stream.unused_data, f"{path}: no gzip file of at most {most} bytes")
    return content


def parse(text):
    """JSON without NaN, infinities and duplicate keys."""

    def once(pairs):
        need(len({k for k, _ in pairs}) == len(pairs), "JSON with a key that stands twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once, parse_constant=lambda name: need(False, f"JSON with {name}"))


def safetensors(content):
    """Tensors by name as (array of their stored type, name of that type). Offsets must cover the file exactly once."""
    need(len(content) >= 8, "safetensors: no header")
    (size,) = struct.unpack("<Q", content[:8])
    need(size <= min(len(content) - 8, 1 << 24), "safetensors: a header longer than the file")
    header, body = parse(content[8 : 8 + size]), memoryview(content)[8 + size :]
    need(isinstance(header, dict), "safetensors: a header that is no object")
    header.pop("__metadata__", None)
    tensors, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
        need(set(entry) == {"dtype", "shape", "data_offsets"} and entry["dtype"] in TYPES, f"safetensors: {name}")
        code, kind = TYPES[entry["dtype"]]  # code[2]: the bytes of a number
        (start, stop), shape = entry["data_offsets"], entry["shape"]
        sane = len(shape) <= 8 and all(type(n) is int and 0 <= n <= 1 << 40 for n in (*shape, start, stop))
        need(sane, f"{name}: sizes")
        need(start == end and stop - start == math.prod(shape) * int(code[2]) and stop <= len(body), f"{name}: offsets")
        tensors[name], end = (np.frombuffer(body[start:stop], code).reshape(shape), kind), stop
    need(end == len(body), "safetensors: bytes that belong to no tensor")
    return tensors


def numbers(stored):
    """Tensors by name as (float array, its bytes, dtype name); stored integers are multiplied by their steps."""
    found = {}
    integers = {name for name, (_, kind) in stored.items() if kind.startswith("int")}
    for name, (a, kind) in stored.items():
        if name.removesuffix(".steps") in integers and name not in integers:
            continue
        if name in integers:
            need(name + ".steps" in stored, f"{name}: integers without steps")
            steps, kind = stored[name + ".steps"]
            need(kind in ("float32", "float64") and steps.shape == (-(-a.size // 64),), f"{name}: steps")
            need(bool((np.isfinite(steps) & (steps > 0)).all()), f"{name}: steps that are not positive")
            # One rounded product, which the format defines.
            a = (a.reshape(-1).astype(steps.dtype) * np.repeat(steps, 64)[: a.size]).reshape(a.shape)
        raw = np.ascontiguousarray(a).tobytes()
        a = (a.astype(np.uint32) << 16).view(np.float32) if kind == "bfloat16" else a  # the upper half of a float32
        # Multipliers of a narrow format can be infinite: `lmi` drops them.
        need(MULTIPLIER.search(name) or np.isfinite(a).all(), f"{name}: numbers that are not finite")
        found[name] = a, raw, kind
    return found


def load_network(folder, beside=False):
    """Configuration, tensors and hash of the network in or beside a folder; refuses a stated hash that differs."""
    places = (folder / "network", folder, *[folder.parent / "network"] * beside)
    folder = next((place for place in places if (place / "config.json").exists()), None)
    need(folder is not None, "no network/config.json")
    config = parse(read(folder / "config.json", 1 << 22))
    need(isinstance(config, dict) and config.get("schema_version") == 2, "config.json: schema_version 2 expected")
    tensors = numbers(safetensors(read(folder / "model.safetensors")))
    digest = hashlib.sha256(json.dumps(config["network"], sort_keys=True).encode())
    for name, (a, raw, kind) in sorted(tensors.items()):
        digest.update(f"{name} torch.{kind} {a.shape}".encode())
        digest.update(raw)
    found = digest.hexdigest()
    need(found == config["sha256"], f"config.json: its hash is {config['sha256']!r:.80}, not {found}")
    return config, {name: a for name, (a, _, _) in tensors.items()}, found


COLUMNS = ("index", "label", "prediction", "radius", "radius_ignored", "margin")
STATED = {"kind": "lipkit certificate", "schema_version": "1.0", "task": "classification", "norm": "l2"}


def load_certificate(folder):
    """Header and rows of the certificate in a folder, after a check of their form."""
    paths = [p for p in (folder / "certificate.jsonl", folder / "certificate.jsonl.gz") if p.exists()]
    need(len(paths) == 1, f"{folder}: expected one certificate.jsonl[.gz] (none with --gain), got {len(paths)}")
    header, *rows = (parse(line) for line in read(paths[0], 1 << 26).decode().splitlines())
    for key, value in STATED.items():
        need(header.get(key) == value, f"certificate: expected {key} {value!r}, got {header.get(key)!r:.80}")
    for i, row in enumerate(rows):
        need(tuple(row) == COLUMNS and row["index"] == i, f"certificate: line {i + 2}")
        need(all(type(row[k]) is int and row[k] >= 0 for k in COLUMNS[:3]), f"certificate: line {i + 2}")
        for key in COLUMNS[3:]:
            value = math.inf if row[key] == "Infinity" else row[key]
            need(type(value) in (int, float) and value == value, f"certificate: line {i + 2}: {key} {row[key]!r:.40}")
            row[key] = value
        need(min(row["radius"], row["radius_ignored"]) >= 0, f"certificate: line {i + 2}: a radius below 0")
    need(rows and header["data"]["samples"] == len(rows), f"certificate: {len(rows)} lines of samples")
    return header, rows


def _order(n, seed):
    return np.argsort(np.random.PCG64(seed).random_raw(n), kind="stable")


def _idx(folder, name):
    path = folder / name
    content = read(path if path.exists() else folder / f"{name}.gz")
    dims = content[3]
    sizes = struct.unpack(f">{dims}I", content[4 : 4 + 4 * dims])
    need(content[:3] == b"\0\0\x08" and len(content) == 4 + 4 * dims + math.prod(sizes), f"{path}: no IDX file")
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dims).reshape(sizes)


def load_samples(spec, root_folder):
    """Test samples (float32, channels first) and labels (int64)."""
    base = Path(root_folder or os.environ.get("LIPKIT_DATA") or "data").expanduser()
    if spec == "digits":
        package = importlib.util.find_spec("sklearn")  # found, not imported
        need(package is not None, "digits: scikit-learn, whose files hold them, is not installed")
        path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
        table = np.loadtxt(io.BytesIO(read(path, 1 << 24)), delimiter=",")
        x, y = (table[:, :64] / 16).astype(np.float32).reshape(-1, 1, 8, 8), table[:, 64].astype(np.int64)
        order, held = _order(len(y), 0), np.zeros(len(y), bool)
        for label in range(10):
            members = order[y[order] == label]
            held[members[: round(0.2 * len(members))]] = True  # a fifth of each class
        return x[held], y[held]
    if spec == "mnist" or spec.startswith("idx:"):
        place = base / "MNIST" / "raw" if spec == "mnist" else Path(spec[4:]).expanduser()
        x, y = (_idx(place, f"t10k-{part}-ubyte") for part in ("images-idx3", "labels-idx1"))
        x = x[:, None]
    elif spec == "cifar10":
        content = read(base / "cifar-10-batches-bin" / "test_batch.bin")
        need(len(content) % 3073 == 0, "test_batch.bin: no CIFAR-10 file")
        rows = np.frombuffer(content, np.uint8).reshape(-1, 3073)
        x, y = rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]
    else:
        path = Path(spec.removeprefix("npz:")).expanduser()
        with zipfile.ZipFile(io.BytesIO(read(path, 1 << 32))) as archive:
            claimed = sum(info.file_size for info in archive.infolist())
            need(claimed <= 1 << 33, f"{path}: {claimed} bytes unpacked")
        with np.load(path, allow_pickle=False) as arrays:
            x, y = arrays["x_test"], arrays["y_test"]
        x = x[:, None] if x.ndim == 3 and x.dtype == np.uint8 else x
    x = x.astype(np.float32) / np.float32(255) if x.dtype == np.uint8 else x.astype(np.float32)
    need(len(x) == len(y) and y.ndim == 1, "samples and labels of different number")
    return x, y.astype(np.int64)


# --- the verdict ------------------------------------------------------------------------------------------------------


def check_gain(config, tensors, digest, gain, say):
    """Check the claim that the network has this gain: returns (claims confirmed, claims not confirmed)."""
    need(0 <= gain < math.inf, f"a finite gain, got {gain}")
    own = Network(config["network"], tensors, classes=False).gain
    good = own <= Fraction(gain) * (1 + TOLERANCE)
    word = "confirmed" if good else "REFUSED"
    say(f"{word}  gain: claimed {gain:.9g}, proved here {float(own):.9g}; network {digest[:16]}")
    return int(good), int(not good)


def load_run(folder, spec, root_folder):
    """Header, rows, configuration, tensors, hash of the network, samples and labels of a run; refuses any mismatch."""
    config, tensors, digest = load_network(folder, beside=True)
    header, rows = load_certificate(folder)
    types = [part.get("type") for part in config["network"]["modules"]]
    shape = config["network"]["input_shape"]
    for key, found in (("network_sha256", digest), ("architecture", types), ("input_shape", shape)):
        got, wanted = repr(header.get(key)), repr(found)  # as text: 1, 1.0 and true are equal, and only 1 is a size
        need(got == wanted, f"certificate: {key} {got:.80}, the network has {wanted:.80}")
    x, y = load_samples(spec or header["data"]["name"], root_folder)
    if len(rows) < len(x):  # a part, as lipkit draws it
        index = np.sort(_order(len(x), 20240)[: len(rows)])
        x, y = x[index], y[index]
    made = hashlib.sha256()
    for kind, a in (("float32", x), ("int64", y)):
        made.update(f"torch.{kind} {a.shape}".encode() + np.ascontiguousarray(a).tobytes())
    same = len(x) == len(rows) and made.hexdigest() == header["data"]["sha256"]
    need(same, "samples: another hash than the certificate's")
    need(list(x.shape[1:]) == shape, f"samples of shape {x.shape[1:]}")
    bounds = config.get("input_range", [-math.inf, math.inf])
    sane = isinstance(bounds, list) and len(bounds) == 2 and all(type(b) in (int, float) for b in bounds)
    need(sane and bounds[0] < bounds[1], f"input_range: two numbers, got {bounds!r:.80}")
    need(bounds[0] <= x.min() and x.max() <= bounds[1], f"samples outside {bounds}")
    for key in ("constant", "body_constant"):
        need(type(header.get(key)) in (int, float, type(None)), f"certificate: {key} {header.get(key)!r:.80}")
    return header, rows, config, tensors, digest, x, y


@np.errstate(over="raise", invalid="raise", divide="raise")
def check(folder, spec=None, root_folder=None, count=None, exact=False, say=print, gain=None):
    """Check the claims of a run: returns (radii confirmed, claims not confirmed); raises if its files disagree."""
    global ops
    ops = Integers() if exact else Floats()
    if gain is not None:
        return check_gain(*load_network(Path(folder)), gain, say)
    header, rows, config, tensors, digest, x, y = load_run(Path(folder), spec, root_folder)
    network = Network(config["network"], tensors)
    least = [("constant", Fraction(header["constant"]), network.gain)]
    if header.get("body_constant") is not None:
        least.append(("body_constant", Fraction(header["body_constant"]), network.body))
    short = [(key, value, own) for key, value, own in least if own > value * (1 + TOLERANCE)]
    for key, value, own in short:
        say(f"refused  {key}: claimed {float(value):.9g}, proved here {float(own):.9g}")
    count = len(rows) if count is None else min(count, len(rows))
    need(count >= 1, f"expected at least one sample to check, got {count}")
    constants, batch = network.constants(), max(1, (1 << 23) // max(node.room for node in network.nodes))
    confirmed, full, lost, checked, unchecked = 0, 0, Fraction(0), 0, 0
    samples = ((logits, e) for c, e in network.logits(x[:count], batch) for logits in c)
    for checked, (row, label, (logits, e)) in enumerate(zip(rows, y.tolist(), samples, strict=False), 1):
        own, reason = objection(row, label, logits, constants, e)
        if reason is None:
            confirmed += 1
            full += own is None or own >= row["radius"]
            if own is not None and row["radius"]:
                lost = max(lost, 1 - own / Fraction(row["radius"]))
        elif reason.startswith("radius") and header.get("method") == "local":
            unchecked += 1  # from linear bounds, which nothing here proves
        elif checked - confirmed - unchecked <= 20:
            say(f"refused  sample {checked - 1}: {reason}")
    refused = checked - confirmed - unchecked
    word = "REFUSED" if refused or short else "UNCHECKED" if unchecked else "confirmed"
    if unchecked:
        say(f"claimed, not checked: {unchecked} local radii, which no constant proves (lipkit check does)")
    say(
        f"{word}  {confirmed} radii confirmed, {refused} refused; "
        f"{full} reached in full, at most {float(lost):.1e} lost; constant {float(network.gain):.9g}, "
        f"network {digest[:16]}"
    )
    return confirmed, checked - confirmed + len(short)


def objection(row, label, logits, constants, e):
    """The radius proved here (None: unlimited), and the reason why a sample's row is refused, or None."""
    own, gap, near = radius(logits, label, constants, e)
    values = [ops.number(v) for v in logits]
    top = max(values)
    slack = near + MARGIN * (1 + max(abs(v) for v in values))
    if row["label"] != label:
        return own, f"label {row['label']}, the sample has {label}"
    if row["prediction"] >= len(values) or values[row["prediction"]] < top - slack:
        return own, f"prediction {row['prediction']}, the network has {values.index(top)}"
    if math.isinf(row["margin"]) or abs(Fraction(row["margin"]) - gap) > slack:
        return own, f"margin {row['margin']:.9g}, the network has {float(gap):.9g}"
    for key in ("radius", "radius_ignored"):
        value = row[key]
        if own is not None and (math.isinf(value) or own < Fraction(value) * (1 - TOLERANCE)):
            share = 1 if math.isinf(value) else 1 - float(own / Fraction(value))
            return own, f"{key} {value:.9g}, proved here {float(own):.9g}: {100 * share:.4g} % lost"
    return own, None


def radius(logits, label, constants, e):
    """Radius of Theorem 9 (None: unlimited), margin, and error of the margin."""
    need(label < len(logits), f"label {label} of {len(logits)} classes")
    near = up(root(Fraction(2)) * e)  # a difference of two logits: sqrt(2) e at most
    values, others = [ops.number(v) for v in logits], [i for i in range(len(logits)) if i != label]
    gaps = [(values[label] - values[i], constants[label][i]) for i in others]
    gap = min(g for g, _ in gaps)
    if gap <= near:
        return Fraction(0), gap, near
    return min(((g - near) / k for g, k in gaps if k), default=None), gap, near


def main(arguments=None):
    parser = argparse.ArgumentParser("python -m lipkit_check", description="Check a lipkit certificate independently.")
    parser.add_argument("run", help="folder with certificate.jsonl[.gz] and network/; for --gain, a saved network")
    parser.add_argument("data", nargs="?", help="digits, mnist, cifar10 or FILE.npz; default: the certificate's")
    parser.add_argument("--root", help="folder of the data sets; default $LIPKIT_DATA or ./data")
    parser.add_argument("--samples", type=int, help="only the first so many samples")
    parser.add_argument("--gain", type=float, help="prove that the network has at most this l2 gain, nothing else")
    parser.add_argument("--exact", action="store_true", help="integers and rationals only, no floating point")
    given = parser.parse_args(arguments)
    try:
        return int(check(given.run, given.data, given.root, given.samples, given.exact, gain=given.gain)[1] > 0)
    except Refused as error:
        reason = f"{error}"
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
    except Exception as error:  # whatever a file makes fail is not confirmed
        reason = f"{'missing entry' if isinstance(error, KeyError) else type(error).__name__}: {error}"
    print(f"REFUSED  {reason}".encode("ascii", "replace").decode()[:300])
    return 1


if __name__ == "__main__":
    sys.exit(main())
