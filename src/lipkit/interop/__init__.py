"""Export and import of networks: other runtimes, model folders and cards, forms for other benchmarks."""

from lipkit.interop.c_program import c_runtime, integer_program, write_c
from lipkit.interop.card import RobustBenchModel, model_card, robustbench_info
from lipkit.interop.check import RuntimeCheck, check_runtime, module_runtime
from lipkit.interop.onnx_reader import load_onnx
from lipkit.interop.pretrained import from_pretrained, save_pretrained
from lipkit.interop.program_reader import load_program
from lipkit.interop.runtimes import onnx_runtime, program_runtime, write_onnx, write_program

__all__ = [
    "RobustBenchModel",
    "RuntimeCheck",
    "c_runtime",
    "check_runtime",
    "from_pretrained",
    "integer_program",
    "load_onnx",
    "load_program",
    "model_card",
    "module_runtime",
    "onnx_runtime",
    "program_runtime",
    "robustbench_info",
    "save_pretrained",
    "write_c",
    "write_onnx",
    "write_program",
]

__dir__ = __all__.copy
