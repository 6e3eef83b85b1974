"""Exported networks in other runtimes: ONNX and ``torch.export`` programs, written and run."""

from __future__ import annotations

import base64
import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from lipkit import modules
from lipkit.certificates.measurement import check_network
from lipkit.errors import DataError, OptionError, lacks_memory, rewording
from lipkit.files import parse_json
from lipkit.interop.check import Runtime, check_runtime, module_runtime, write_checked
from lipkit.interop.onnx_writer import model_of
from lipkit.interop.reading import check_sizes
from lipkit.modules import storage
from lipkit.modules.network import first_floating

# The key under which a file names the network that it was written from.
CLAIM = "lipkit.json"


def write_onnx(network: modules.Network, path: str | Path) -> Path:
    """Write an exported network as one ONNX file with a dynamic batch: real arithmetic and standard operators only.

    The numbers of the weights are those of the network, bit for bit; inputs are called ``input`` and outputs
    ``output``, float32 or float64 as the network. No file is left that ``onnx.checker`` refuses, or that gives other
    outputs for random inputs in onnxruntime (where that lacks an operator, in the reference evaluator of onnx).

    Raises:
        OptionError: onnx is not installed, or the network has bfloat16. NoRuleError: it is not exported, or one of its
        modules calls a function of torch that has no rule in `lipkit.interop.onnx_writer`.
        DataError, CertificateViolation: the file would not be valid, or another function.
    """
    check_network(network, "write")
    model = onnx_model(network)
    import onnx

    stored = {t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
    model.metadata_props.add(key=CLAIM, value=claim(network, stored))

    def check(draft: Path) -> None:
        start = f"{path}: expected to write a valid ONNX model, got "
        with rewording(DataError, start, Exception):  # onnx has a class of its own for each kind of failure
            onnx.checker.check_model(model, full_check=True)
            check_runtime(network, _evaluator(draft), batch_size=3)

    return write_checked({Path(path): model.SerializeToString()}, check)


def onnx_model(network: modules.Network) -> Any:
    """The ONNX model that :func:`write_onnx` writes, without its :func:`claim`. Equal networks give equal models."""
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise OptionError('expected onnx to write ONNX: pip install "lipkit[onnx]"') from error
    if _example(network).dtype == torch.bfloat16:
        raise OptionError("expected a network of float16, float32 or float64, got bfloat16: write network.float()")
    return model_of(_program(network))


def claim(network: modules.Network, stored: Mapping[str, Tensor]) -> str:
    """A file's claim as text: the configuration of its network, and the tensors that the file does not hold itself."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in network.state_dict().items()}
    names = [n for n, t in tensors.items() if n in stored and t.dtype == stored[n].dtype and torch.equal(t, stored[n])]
    more = save_safetensors({name: t for name, t in tensors.items() if name not in names})
    config = {**storage.configuration(network), "stored": names, "more": base64.b64encode(more).decode()}
    return json.dumps(config, allow_nan=False)


def claimed(text: str, stored: Mapping[str, Tensor], same: Callable[[modules.Network], bool]) -> modules.Network | None:
    """The network that a file written by lipkit claims to be; None without a claim, or if the claim is false.

    A claim is not trusted: ``same`` writes the claimed network again and compares it with the file, because equal
    graphs compute the same function. The network's multipliers are proved wherever they are used.
    """
    try:
        config = parse_json(text)
        more = load_safetensors(base64.b64decode(config["more"], validate=True))
        network = storage.rebuilt(config, {**{name: stored[name] for name in config["stored"]}, **more})
        check_sizes(network, network.input_shape)
        return network if same(network) else None
    except Exception as error:  # a forged claim can break any of the assumptions, and other versions write otherwise
        if lacks_memory(error):
            raise
        return None


def _evaluator(path: Path) -> Runtime:
    """An ONNX file in onnxruntime, or in onnx's reference evaluator if that is missing or lacks an operator."""
    try:
        return onnx_runtime(path)
    except DataError as error:
        if "NOT_IMPLEMENTED" not in str(error):
            raise
    except OptionError:
        pass
    from onnx.reference import ReferenceEvaluator

    evaluate: Callable[..., Any] = ReferenceEvaluator(str(path)).run

    def run(x: Tensor) -> Tensor:
        with np.errstate(all="ignore"):  # it computes what a choice leaves out, too
            return torch.from_numpy(evaluate(None, {"input": x.cpu().numpy()})[0])

    return run


def write_program(network: modules.Network, path: str | Path) -> Path:
    """Write an exported network as a ``torch.export`` program (``.pt2``) with a dynamic batch.

    Raises:
        NoRuleError: the network is not an exported one. CertificateViolation: torch wrote another function.
    """
    check_network(network, "write")

    def check(draft: Path) -> None:
        check_runtime(network, program_runtime(draft), batch_size=3)

    return write_checked({Path(path): program_bytes(network)}, check)


def program_bytes(network: modules.Network) -> bytes:
    """The bytes of the file that :func:`write_program` writes."""
    network = copy.deepcopy(network).cpu()
    with _quiet(), io.BytesIO() as file:
        torch.export.save(_program(network), file, extra_files={CLAIM: claim(network, network.state_dict())})
        return file.getvalue()


def _program(network: modules.Network) -> torch.export.ExportedProgram:
    """The graph of the network on the CPU, for any size of the batch."""
    network = copy.deepcopy(network).cpu()
    with _quiet():
        return torch.export.export(
            network, (_example(network),), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=False
        )


def onnx_runtime(path: str | Path) -> Runtime:
    """The network of an ONNX file in onnxruntime, which must be installed, on the CPU.

    Raises:
        OptionError: onnxruntime is not installed. DataError: the file cannot be read.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise OptionError('expected onnxruntime to run ONNX: pip install "lipkit[onnx]"') from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # errors only
    with rewording(DataError, f"{path}: expected an ONNX model, got ", Exception):  # of many classes
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = session.get_inputs()[0]
    dtype = {"tensor(double)": torch.float64, "tensor(float16)": torch.float16}.get(given.type, torch.float32)

    def run(x: Tensor) -> Tensor:
        values = x.detach().cpu().to(dtype).contiguous().numpy()
        return torch.from_numpy(session.run(None, {given.name: values})[0])

    return run


def program_runtime(path: str | Path) -> Runtime:
    """The network of a ``torch.export`` program.

    Raises:
        DataError: the file cannot be read.
    """
    with rewording(DataError, f"{path}: expected a torch.export program, got ", Exception), _quiet():  # of many, too
        module = torch.export.load(path).module()
    return module_runtime(module)


def _example(network: modules.Network) -> Tensor:
    """Two inputs: torch would take a batch of 1 for a constant."""
    return torch.zeros(2, *network.input_shape).to(first_floating(network))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warnings about its own internals."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logging.disable(before)
