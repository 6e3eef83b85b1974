"""Exported networks in other runtimes: ONNX and ``torch.export`` programs, written and run."""

from __future__ import annotations

import base64
import copy
import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from lipkit import modules
from lipkit.certificates.measurement import check_network
from lipkit.errors import DataError, LipkitError, OptionError, first_line, lacks_memory
from lipkit.files import parse_json
from lipkit.interop.check import Runtime, check_runtime, module_runtime, write_checked
from lipkit.interop.reading import check_sizes
from lipkit.modules import storage
from lipkit.modules.network import first_floating
from lipkit.modules.pooling import _pair

# The first versions of ONNX with circular padding, and with torch's number of windows under ceil_mode.
OPSET, CEIL_OPSET = 19, 22
# The key under which a file names the network that it was written from.
CLAIM = "lipkit.json"


def write_onnx(network: modules.Network, path: str | Path) -> Path:
    """Write an exported network as one ONNX file with a dynamic batch: real arithmetic and standard operators only.

    The numbers of the weights are those of the network, bit for bit; inputs are called ``input`` and outputs
    ``output``, float32 or float64 as the network. No file is left that ``onnx.checker`` refuses, or that gives other
    outputs for random inputs in onnxruntime (where that lacks an operator, in the reference evaluator of onnx).

    Raises:
        OptionError: onnx or onnxscript is not installed. NoRuleError: the network is not an exported one.
        DataError, CertificateViolation: torch wrote a file that is not valid, or another function.
    """
    check_network(network, "write")
    model = onnx_model(network)
    import onnx

    stored = {t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
    model.metadata_props.add(key=CLAIM, value=claim(network, stored))

    def check(draft: Path) -> None:
        try:
            onnx.checker.check_model(model, full_check=True)
            check_runtime(network, _evaluator(draft), batch_size=3)
        except LipkitError:
            raise
        except Exception as error:  # onnx has a class of its own for each kind of failure
            raise DataError(f"{path}: expected torch to write a valid ONNX model, got {first_line(error)}") from error

    return write_checked({Path(path): model.SerializeToString()}, check)


def onnx_model(network: modules.Network) -> Any:
    """The model that :func:`write_onnx` writes, without the claim. Equal networks give equal models."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401  what torch writes ONNX with
    except ImportError as error:
        raise OptionError('expected onnx and onnxscript to write ONNX: pip install "lipkit[onnx]"') from error
    if _example(network).dtype == torch.bfloat16:
        raise OptionError("expected a network of float16, float32 or float64, got bfloat16: write network.float()")
    with _quiet():
        program = torch.onnx.export(
            _portable(network),
            (_example(network).cpu(),),
            dynamo=True,
            opset_version=CEIL_OPSET if any(getattr(m, "ceil_mode", False) for m in network.modules()) else OPSET,
            input_names=["input"],
            output_names=["output"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
    if program is None:
        raise OptionError("expected an ONNX program from torch.onnx.export, got None")
    model = program.model_proto
    for node in model.graph.node:  # where in the source each node was made
        node.ClearField("metadata_props")
    return model


def claim(network: modules.Network, stored: Mapping[str, Tensor]) -> str:
    """The claim of a file as text: the network's configuration, and the tensors that the file itself does not hold."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in network.state_dict().items()}
    names = [n for n, t in tensors.items() if n in stored and t.dtype == stored[n].dtype and torch.equal(t, stored[n])]
    more = save_safetensors({name: t for name, t in tensors.items() if name not in names})
    config = {**storage.configuration(network), "stored": names, "more": base64.b64encode(more).decode()}
    return json.dumps(config, allow_nan=False)


def claimed(text: str, stored: Mapping[str, Tensor], same: Callable[[modules.Network], bool]) -> modules.Network | None:
    """The network that a file written by lipkit claims to be; None without a claim, or if the claim is false.

    A claim proves nothing. ``same`` writes the network again and compares: a graph that is written for a network
    computes what the network does. Its multipliers are proved wherever they are used.
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
    try:
        return onnx_runtime(path)
    except DataError as error:
        if "NOT_IMPLEMENTED" not in str(error):
            raise
    except OptionError:
        pass
    from onnx.reference import ReferenceEvaluator

    run: Callable[..., Any] = ReferenceEvaluator(str(path)).run
    return lambda x: torch.from_numpy(run(None, {"input": x.cpu().numpy()})[0])


def _without_divisor(pool: nn.AvgPool2d, dtype: torch.dtype) -> nn.Module:
    """The pooling as padding, plain average and factor, because torch.onnx drops ``divisor_override``."""
    size, strides, paddings = (_pair(n) for n in (pool.kernel_size, pool.stride, pool.padding))
    ends = [min(p + s - 1, k - 1) if pool.ceil_mode else p for k, s, p in zip(size, strides, paddings, strict=True)]
    pad = nn.ZeroPad2d((paddings[1], ends[1], paddings[0], ends[0]))  # left, right, top, bottom
    factor = torch.tensor([math.prod(size) / (pool.divisor_override or 1)], dtype=dtype)
    mean = nn.AvgPool2d((size[0], size[1]), (strides[0], strides[1]))
    return nn.Sequential(pad, mean, modules.Affine(factor, torch.zeros_like(factor)))


class _PatchProduct(nn.Module):
    """An ``nn.Conv2d`` on separate patches as a rearrangement and a product."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.stride, self.weight, self.bias = conv.stride[0], conv.weight, conv.bias

    def forward(self, x: Tensor) -> Tensor:
        patches = F.pixel_unshuffle(x, self.stride).movedim(1, -1)  # channels last: in the order of the flat kernel
        return F.linear(patches, self.weight.flatten(1), self.bias).movedim(-1, 1)


def _portable(network: modules.Network) -> nn.Module:
    """The network as it is written, on the CPU: divisors of pools, and float64 convolutions on patches, rewritten."""
    twin = copy.deepcopy(network).cpu()
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.AvgPool2d and child.divisor_override is not None:
                setattr(parent, name, _without_divisor(child, _example(network).dtype))
            elif type(child) is nn.Conv2d and child.weight.dtype == torch.float64:
                patches = len({*child.kernel_size, *child.stride}) == 1 and child.padding in ((0, 0), "valid")
                if patches and child.groups == 1 and child.dilation == (1, 1):
                    setattr(parent, name, _PatchProduct(child))
    return twin


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
        program = torch.export.export(
            network, (_example(network),), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=False
        )
        torch.export.save(program, file, extra_files={CLAIM: claim(network, network.state_dict())})
        return file.getvalue()


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
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class of its own for each kind of failure
        raise DataError(f"{path}: expected an ONNX model, got {first_line(error)}") from error
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
    try:
        with _quiet():
            module = torch.export.load(path).module()
    except Exception as error:  # torch reports a broken archive by many classes
        raise DataError(f"{path}: expected a torch.export program, got {first_line(error)}") from error
    return module_runtime(module)


def _example(network: modules.Network) -> Tensor:
    # Two samples: torch takes a batch of 1 for a constant.
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
