"""Prove the gain of an MLP from its ONNX file alone: numpy and onnx, no torch, no lipkit.

    python verify_onnx.py controller.onnx [samples.npz]

The file holds a chain: scaling (Mul, Add), then Gemm, activation, Gemm, ..., Gemm, then scaling. Its metadata hold a
gain gamma for the part between the scalings and positive numbers lambda_k, one for each hidden unit. They are a claim;
the proof is that this matrix, built from the weights in the file, is positive semidefinite:

    H = [  gamma I    -W0' L0                         ]
        [ -L0 W0       2 L0     -W1' L1               ]     L_k = diag(lambda_k)
        [             -L1 W1     2 L1    -W2'         ]     Fazlyab et al., NeurIPS 2019
        [                       -W2      gamma I      ]

With samples (arrays x and y) the file is also run in onnxruntime: largest difference from y, and latency at batch 1.
"""

import json
import sys
import time

import numpy as np
import onnx
from onnx import numpy_helper

U = 2.0**-53  # unit roundoff of float64
SLOPE_IN_0_1 = {"Relu", "Tanh", "Sigmoid", "Softplus", "Softsign"}


def read(path):
    """The scalings' largest factors (input, output), the weights between them, and the claim: gamma and the lambdas."""
    model = onnx.load(path)
    onnx.checker.check_model(model)
    if model.functions:
        raise ValueError(f"expected a file with no functions of its own, got {[f.name for f in model.functions]}")
    graph, claim = model.graph, {entry.key: entry.value for entry in model.metadata_props}
    constants = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in graph.initializer}
    if not all(np.isfinite(c).all() for c in constants.values()):
        raise ValueError("expected finite numbers, got others")
    at, width = graph.input[0].name, graph.input[0].type.tensor_type.shape.dim[-1].dim_value
    kinds, weights, factors = "", [], [1.0, 1.0]
    for node in graph.node:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        others = [constants.get(name) for name in node.input if name != at]
        if node.domain or len(others) != len(node.input) - 1 or any(c is None for c in others):
            raise ValueError(f"expected a chain of ONNX operators, got {node.op_type} of {list(node.input)}")
        if node.op_type == "Gemm" and node.input[0] == at and others[0].shape[attributes.get("transB", 0)] == width:
            if attributes.get("alpha", 1.0) != 1.0 or attributes.get("transA", 0) != 0:
                raise ValueError(f"expected Gemm as x W' + b, got {attributes}")
            weights.append(others[0] if attributes.get("transB", 0) else others[0].T)
            kinds, width = kinds + "G", len(weights[-1])
        elif node.op_type in SLOPE_IN_0_1:
            kinds += "a"
        elif node.op_type in ("Mul", "Add") and others[0].shape == (width,):  # one number for each component
            factors[bool(weights)] *= np.abs(others[0]).max() if node.op_type == "Mul" else 1.0
            kinds += "s"
        else:
            raise ValueError(f"expected Gemm, Mul, Add or one of {SLOPE_IN_0_1} of width {width}, got {node.op_type}")
        at = node.output[0]
    ends = ([i.name for i in graph.input][1:], [o.name for o in graph.output])
    if kinds.strip("s") != "Ga" * (len(weights) - 1) + "G" or ends != ([], [at]):
        raise ValueError(f"expected scaling, Gemm, activation, ..., Gemm, scaling, got {kinds}")
    lambdas = [np.array(values, dtype=np.float64) for values in json.loads(claim.get("lipkit.multipliers", "[]"))]
    if [v.shape for v in lambdas] != [(len(w),) for w in weights[:-1]]:
        raise ValueError(f"expected one multiplier for each hidden unit, got {[v.shape for v in lambdas]}")
    return factors, weights, float(claim.get("lipkit.gamma", "nan")), lambdas


def proves(weights, lambdas, gamma):
    """True if floating-point arithmetic proves that H is positive semidefinite."""
    n = [weights[0].shape[1], *map(len, weights)]
    h = np.diag(np.concatenate([np.full(n[0], gamma), *(2 * v for v in lambdas), np.full(n[-1], gamma)]))
    for k, w in enumerate(weights):
        block = -w if k == len(lambdas) else -lambdas[k][:, None] * w
        rows, columns = slice(sum(n[: k + 1]), sum(n[: k + 2])), slice(sum(n[:k]), sum(n[: k + 1]))
        h[rows, columns], h[columns, rows] = block, block.T
    if not (np.isfinite(h).all() and (h.diagonal() > 0).all()):
        return False
    # D H D with D of powers of two, which multiply without rounding, has a diagonal of about 1.
    d = 2.0 ** -np.round(np.log2(h.diagonal()) / 2)
    h = d[:, None] * h * d
    # H >= 0 if the Cholesky factorisation of H - cI succeeds in floating point with c slightly above (n + 1) u trace(H)
    # (Rump, BIT 2006, theorem 2.3). Four times that also covers the subtraction, and 2 u |H| covers the products L W.
    c = 4 * (len(h) + 3) * U * np.trace(h) + 2 * U * np.linalg.norm(h)
    try:
        np.linalg.cholesky(h - 1.01 * c * np.eye(len(h)))
    except np.linalg.LinAlgError:
        return False
    return True


def run(path, samples, repeats=2000):
    """Largest difference of onnxruntime's outputs from y; median and 99th percentile of a call's microseconds."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    x, y = samples["x"], samples["y"]
    difference = np.abs(session.run(None, {name: x})[0] - y).max(axis=0)
    one, times = {name: x[:1]}, []
    for _ in range(repeats):
        start = time.perf_counter()
        session.run(None, one)
        times.append(1e6 * (time.perf_counter() - start))
    return difference, *np.percentile(times, (50, 99))


def main(path, samples=None):
    (before, after), weights, gamma, lambdas = read(path)
    sizes = " -> ".join(str(n) for n in [weights[0].shape[1], *map(len, weights)])
    whole = np.nextafter(np.nextafter(before * gamma, np.inf) * after, np.inf)
    if not (np.isfinite(whole) and proves(weights, lambdas, gamma)):
        print(f"NOT proved: gain {gamma:g} of {sizes}")
        return 1
    product = np.prod([np.linalg.norm(w, 2) for w in weights])
    print(f"proved: gain of {sizes} between the scalings <= {gamma:g} (product of norms: {product:.4g})")
    print(f"        gain from input to output <= {before:g} * {gamma:g} * {after:g} = {whole:.6g}")
    if samples is not None:
        difference, median, late = run(path, np.load(samples))
        print(f"onnxruntime: largest difference from lipkit's outputs {', '.join(f'{d:.1e}' for d in difference)}")
        print(f"             one input takes {median:.1f} us (median; 99th percentile {late:.1f} us) on one thread")
    used = {"torch", "lipkit"} & set(sys.modules)
    if __name__ == "__main__" and used:
        raise RuntimeError(f"expected neither torch nor lipkit in this process, got {used}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
