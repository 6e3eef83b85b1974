"""Whether torch takes float32 products in IEEE arithmetic, by what it has been told."""

from __future__ import annotations

from collections.abc import Callable

import torch

# What a setting of float32 products says when they are IEEE float32; "none" leaves the choice to the setting above.
_EXACT = ("none", "ieee")


def product_settings(kind: str) -> dict[str, str]:
    """What torch has been told about float32 products on a type of device ("cpu", "cuda").

    A setting that torch does not read out because several backends were told different things is "mixed": what each
    of them was told stands beside it.

    >>> product_settings("cpu")["float32_matmul_precision"]
    'highest'
    """
    backends = torch.backends
    found = {
        "float32_matmul_precision": _read(torch.get_float32_matmul_precision),
        "fp32_precision": _precision(backends),
    }
    if kind == "cuda":
        return found | {
            "cuda.matmul.fp32_precision": _precision(backends.cuda.matmul),
            "cuda.matmul.allow_tf32": _read(lambda: backends.cuda.matmul.allow_tf32),
        }
    mkldnn = backends.mkldnn
    return found | {
        "mkldnn.fp32_precision": _precision(mkldnn),
        "mkldnn.matmul.fp32_precision": _precision(getattr(mkldnn, "matmul", None)),
        "mkldnn.conv.fp32_precision": _precision(getattr(mkldnn, "conv", None)),
    }


def _precision(holder: object) -> str:
    return _read(lambda: getattr(holder, "fp32_precision", "none"))


def _read(get: Callable[[], object]) -> str:
    try:
        return str(get())
    except RuntimeError:
        return "mixed"


def reduced_products(found: dict[str, str]) -> list[str]:
    """Which of these settings may take float32 products in less than IEEE float32, a sentence for each.

    >>> reduced_products({"float32_matmul_precision": "high", "mkldnn.matmul.fp32_precision": "none"})
    ["torch.get_float32_matmul_precision() is not 'highest'"]
    """
    wrong = [
        f"{key} is {value!r} (expected 'ieee' or 'none')"
        for key, value in found.items()
        if key.endswith("fp32_precision") and value not in _EXACT
    ]
    if found.get("float32_matmul_precision") not in ("highest", "mixed"):
        wrong.append("torch.get_float32_matmul_precision() is not 'highest'")
    if found.get("cuda.matmul.allow_tf32") == "True":
        wrong.append("torch.backends.cuda.matmul.allow_tf32 is True")
    return wrong
