"""Exported networks in other runtimes: ONNX and ``torch.export`` programs, written and run."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit import modules
from lipkit.errors import DataError, OptionError, first_line
from lipkit.files import write_atomic

# Inputs (N, *input_shape) to outputs, whatever computes them.
Runtime = Callable[[Tensor], Tensor]
OPSET = 18


def write_onnx(network: modules.Network, path: str | Path) -> Path:
    """Write an exported network as one ONNX file with a dynamic batch: real arithmetic and standard operators only.

    The numbers of the weights are those of the network, bit for bit; inputs are called ``input`` and outputs
    ``output``, float32 or float64 as the network.

    Raises:
        OptionError: onnx or onnxscript is not installed, or the network is not an exported one.
    """
    _check_network(network)
    try:
        import onnxscript  # noqa: F401  what torch writes ONNX with
    except ImportError as error:
        raise OptionError('expected onnx and onnxscript to write ONNX: pip install "lipkit[onnx]"') from error
    with _quiet():
        program = torch.onnx.export(
            _portable(network),
            (_example(network),),
            dynamo=True,
            opset_version=OPSET,
            input_names=["input"],
            output_names=["output"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
    if program is None:
        raise OptionError("expected an ONNX program from torch.onnx.export, got None")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, program.model_proto.SerializeToString())
    return path


class _PatchProduct(nn.Module):
    """An ``nn.Conv2d`` on separate patches as a rearrangement and a product."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.stride, self.weight, self.bias = conv.stride[0], conv.weight, conv.bias

    def forward(self, x: Tensor) -> Tensor:
        patches = F.pixel_unshuffle(x, self.stride).movedim(1, -1)
        return F.linear(patches, self.weight.flatten(1), self.bias).movedim(-1, 1)


def _portable(network: modules.Network) -> nn.Module:
    """The network to be written: in float64 without the convolutions that are products: onnxruntime has none."""
    twin = copy.deepcopy(network)
    for parent in list(twin.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Conv2d and child.weight.dtype == torch.float64 and _on_patches(child):
                setattr(parent, name, _PatchProduct(child))
    return twin


def _on_patches(conv: nn.Conv2d) -> bool:
    sizes = {*conv.kernel_size, *conv.stride}
    return len(sizes) == 1 and conv.padding in ((0, 0), "valid") and conv.groups == 1 and conv.dilation == (1, 1)


def write_program(network: modules.Network, path: str | Path) -> Path:
    """Write an exported network as a ``torch.export`` program (``.pt2``) with a dynamic batch.

    Raises:
        OptionError: the network is not an exported one.
    """
    _check_network(network)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _quiet():
        program = torch.export.export(
            network, (_example(network),), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=False
        )
        torch.export.save(program, path)
    return path


def onnx_runtime(path: str | Path, threads: int = 1) -> Runtime:
    """The network of an ONNX file in onnxruntime on the CPU.

    Raises:
        OptionError: onnxruntime is not installed. DataError: the file cannot be read.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise OptionError('expected onnxruntime to run ONNX: pip install "lipkit[onnx]"') from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a class of its own for each kind of failure
        raise DataError(f"{path}: expected an ONNX model, got {first_line(error)}") from error
    name = session.get_inputs()[0].name
    double = session.get_inputs()[0].type == "tensor(double)"

    def run(x: Tensor) -> Tensor:
        values = x.detach().cpu().to(torch.float64 if double else torch.float32).contiguous().numpy()
        return torch.from_numpy(session.run(None, {name: values})[0])

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


def module_runtime(module: nn.Module) -> Runtime:
    """A module of torch as it is, without gradients."""
    first = next((t for t in module.state_dict().values() if t.is_floating_point()), torch.zeros(()))

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = module(x.to(device=first.device, dtype=first.dtype))
        return out.cpu()

    return run


def _check_network(network: object) -> None:
    if not isinstance(network, modules.Network):
        raise OptionError(
            f"expected an exported network (lipkit.modules.Network), got {type(network).__name__}: "
            "call lipkit.export(model, input_shape)"
        )


def _example(network: modules.Network) -> Tensor:
    # Two samples: torch takes a batch of 1 for a constant.
    first = next((t for t in network.state_dict().values() if t.is_floating_point()), torch.zeros(()))
    return torch.zeros(2, *network.input_shape, dtype=first.dtype, device=first.device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks about its own internals."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
