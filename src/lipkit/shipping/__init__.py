"""Networks that leave: other runtimes, model folders and cards, other evaluations' forms."""

from __future__ import annotations

from lipkit.shipping.card import model_card
from lipkit.shipping.check import RuntimeCheck, check_runtime
from lipkit.shipping.pretrained import from_pretrained, save_pretrained
from lipkit.shipping.robustbench import RobustBenchModel, robustbench_info
from lipkit.shipping.runtimes import module_runtime, onnx_runtime, program_runtime, write_onnx, write_program

__all__ = [
    "RobustBenchModel",
    "RuntimeCheck",
    "check_runtime",
    "from_pretrained",
    "model_card",
    "module_runtime",
    "onnx_runtime",
    "program_runtime",
    "robustbench_info",
    "save_pretrained",
    "write_onnx",
    "write_program",
]
