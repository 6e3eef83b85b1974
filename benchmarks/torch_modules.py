"""The table of docs/lab/torch_modules.md: every module of torch.nn, its constant or the reason why it has none.

    python -m benchmarks.torch_modules --keep

`tests/docs/test_torch_modules.py` sees that no class is missing, that each constant is what `lipkit.lipschitz` says,
and that the others are refused.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lipkit.testing import dense_matrix

PAGE = Path(__file__).parents[1] / "docs/lab/torch_modules.md"


class Known(NamedTuple):
    """A module with a constant.

    Attributes:
        make: an instance. shape: of one sample.
        words: the constant. value: of the instance, in closed form.
        slack: how far the proved one may lie above it, relative.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: str
    value: float | Callable[[Any], float]
    slack: float = 1e-6


def _linear(make: Callable[[], nn.Module], shape: tuple[int, ...], words: str, slack: float = 1e-5) -> Known:
    return Known(make, shape, words, lambda f: float(np.linalg.norm(dense_matrix(f, shape, torch.float32), 2)), slack)


def _steepest(make: Callable[[], nn.Module], words: str) -> Known:
    def value(module: Any) -> float:
        x = torch.linspace(-6, 6, 200_001, dtype=torch.float64).requires_grad_()
        (slopes,) = torch.autograd.grad(module.double()(x).sum(), x)
        return float(slopes.abs().max())

    return Known(make, (3,), words, value)


def _running(make: Callable[..., Any], shape: tuple[int, ...]) -> Known:
    def made() -> nn.Module:
        module = make(2)
        module.running_var = torch.tensor([0.25, 4.0])
        return module

    return Known(
        made, shape, "max of weight / sqrt(running_var + eps); in training none", lambda m: (0.25 + m.eps) ** -0.5
    )


def _without_memory() -> nn.Module:
    rnn = nn.RNN(2, 2, batch_first=True)
    nn.init.zeros_(rnn.weight_hh_l0)
    return rnn


def _own(make: Callable[[], Any], shape: tuple[int, ...]) -> Known:
    return Known(make, shape, "max of weight / sqrt(eps)", lambda m: m.eps**-0.5)


def _one(make: Callable[[], nn.Module], *shape: int, words: str = "1") -> Known:
    return Known(make, shape or (3,), words, 1.0)


_SYMBOL = "largest singular value of the convolution: exact for circular padding, above it by 1 % at most on the plane"
_EXACT = "largest singular value, exact"
_POOL = "root of the most windows that one pixel lies in"
KNOWN: dict[str, Known] = {
    "AdaptiveAvgPool1d": _linear(lambda: nn.AdaptiveAvgPool1d(2), (2, 5), _EXACT),
    "AdaptiveAvgPool2d": _linear(lambda: nn.AdaptiveAvgPool2d((2, 3)), (1, 4, 5), _EXACT),
    "AdaptiveMaxPool1d": Known(lambda: nn.AdaptiveMaxPool1d(2), (2, 5), _POOL, 2**0.5),
    "AdaptiveMaxPool2d": Known(lambda: nn.AdaptiveMaxPool2d((2, 2)), (2, 5, 4), _POOL, 2**0.5),
    "AlphaDropout": _one(nn.AlphaDropout, words="1; in training none"),
    "AvgPool1d": _linear(lambda: nn.AvgPool1d(3, 2), (2, 9), _EXACT),
    "AvgPool2d": _linear(lambda: nn.AvgPool2d(3, 2), (1, 7, 7), _EXACT),
    "BatchNorm1d": _running(nn.BatchNorm1d, (2,)),
    "BatchNorm2d": _running(nn.BatchNorm2d, (2, 3, 3)),
    "BatchNorm3d": _running(nn.BatchNorm3d, (2, 2, 2, 2)),
    "CELU": _steepest(nn.CELU, "1"),
    "ChannelShuffle": _one(lambda: nn.ChannelShuffle(2), 4, 3, 3),
    "Conv1d": _linear(lambda: nn.Conv1d(2, 3, 3), (2, 40), _SYMBOL, 0.05),
    "Conv2d": _linear(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 6, 6), _SYMBOL),
    "ConvTranspose1d": _linear(lambda: nn.ConvTranspose1d(2, 3, 3), (2, 40), _SYMBOL, 0.05),
    "ConvTranspose2d": _linear(lambda: nn.ConvTranspose2d(2, 3, 2, 2), (2, 3, 3), _SYMBOL),
    "Dropout": _one(nn.Dropout, words="1; in training none"),
    "Dropout1d": _one(nn.Dropout1d, 2, 3, words="1; in training none"),
    "Dropout2d": _one(nn.Dropout2d, 2, 3, 3, words="1; in training none"),
    "Dropout3d": _one(nn.Dropout3d, 2, 2, 2, 2, words="1; in training none"),
    "ELU": _steepest(lambda: nn.ELU(2.0), "max(1, alpha)"),
    "FeatureAlphaDropout": _one(nn.FeatureAlphaDropout, 2, 3, words="1; in training none"),
    "Flatten": _one(nn.Flatten),
    "Fold": _linear(lambda: nn.Fold((3, 3), 2), (4, 4), _SYMBOL, 0.05),
    "GELU": _steepest(nn.GELU, "1.1290"),
    "GroupNorm": _own(lambda: nn.GroupNorm(1, 2), (2, 3)),
    "Hardsigmoid": _steepest(nn.Hardsigmoid, "1/6"),
    "Hardswish": Known(nn.Hardswish, (3,), "1.5", 1.5),
    "Hardtanh": _steepest(nn.Hardtanh, "1"),
    "Identity": _one(nn.Identity),
    "InstanceNorm1d": _own(lambda: nn.InstanceNorm1d(2), (2, 3)),
    "InstanceNorm2d": _own(lambda: nn.InstanceNorm2d(2), (2, 3, 3)),
    "InstanceNorm3d": _own(lambda: nn.InstanceNorm3d(2), (2, 2, 2, 2)),
    "LayerNorm": _own(lambda: nn.LayerNorm(3), (3,)),
    "LeakyReLU": _steepest(nn.LeakyReLU, "max(1, slope)"),
    "Linear": _linear(lambda: nn.Linear(3, 2), (3,), _EXACT),
    "LogSigmoid": Known(nn.LogSigmoid, (3,), "1", 1.0),
    "MaxPool1d": Known(lambda: nn.MaxPool1d(3, 2), (2, 9), _POOL, 2**0.5),
    "MaxPool2d": Known(lambda: nn.MaxPool2d(3, 2), (2, 9, 9), _POOL, 2.0),
    "Mish": _steepest(nn.Mish, "1.0885"),
    "PReLU": _steepest(nn.PReLU, "max(1, slopes)"),
    "PixelShuffle": _one(lambda: nn.PixelShuffle(2), 4, 3, 3),
    "PixelUnshuffle": _one(lambda: nn.PixelUnshuffle(2), 1, 4, 4),
    "RMSNorm": _own(lambda: nn.RMSNorm(3, 1e-3), (3,)),
    "RNN": Known(
        _without_memory,
        (3, 2),
        "smallest gain by the linear matrix inequality; here without memory, the norm of the input weights",
        lambda m: float(torch.linalg.matrix_norm(m.weight_ih_l0.detach().double(), 2)),
        1e-2,
    ),
    "ReLU": _steepest(nn.ReLU, "1"),
    "ReLU6": _steepest(nn.ReLU6, "1"),
    "SELU": _steepest(nn.SELU, "1.7581"),
    "Sequential": Known(lambda: nn.Sequential(nn.AvgPool2d(2), nn.ReLU()), (1, 4, 4), "product of its parts'", 0.5),
    "SiLU": _steepest(nn.SiLU, "1.0998"),
    "Sigmoid": _steepest(nn.Sigmoid, "1/4"),
    "Softmax": Known(lambda: nn.Softmax(1), (3,), "1/2", 0.5),
    "Softmax2d": Known(nn.Softmax2d, (2, 1, 1), "1/2", 0.5),
    "Softmin": Known(lambda: nn.Softmin(1), (3,), "1/2", 0.5),
    "Softplus": Known(nn.Softplus, (3,), "1", 1.0),
    "Softshrink": _steepest(nn.Softshrink, "1"),
    "Softsign": _steepest(nn.Softsign, "1"),
    "Tanh": _steepest(nn.Tanh, "1"),
    "Tanhshrink": Known(nn.Tanhshrink, (3,), "1", 1.0),
    "RNNCell": Known(
        lambda: nn.RNNCell(3, 2),
        (3,),
        "one step: largest singular value of the weight of the input; called step by step, by its sums and products",
        lambda m: float(torch.linalg.matrix_norm(m.weight_ih.detach(), 2)),
    ),
    "Threshold": Known(
        lambda: nn.Threshold(0.5, 0.5), (3,), "1; none if the value is not the threshold: it jumps", 1.0
    ),
    "Unflatten": _one(lambda: nn.Unflatten(1, (1, 3))),
    "Unfold": _linear(lambda: nn.Unfold(2, padding=1), (2, 3, 4), _EXACT),
    "Upsample": _linear(lambda: nn.Upsample(scale_factor=2.5, mode="bilinear"), (1, 2, 2), _EXACT),
    "UpsamplingBilinear2d": _linear(lambda: nn.UpsamplingBilinear2d(scale_factor=2), (1, 2, 3), _EXACT),
    "UpsamplingNearest2d": _linear(lambda: nn.UpsamplingNearest2d(size=(4, 3)), (1, 2, 2), _EXACT),
    "ZeroPad1d": _one(lambda: nn.ZeroPad1d(1), 2, 3),
    "ZeroPad2d": _one(lambda: nn.ZeroPad2d(1), 1, 2, 2),
}
for _n in (1, 2):
    KNOWN[f"ConstantPad{_n}d"] = _one(lambda n=_n: getattr(nn, f"ConstantPad{n}d")(1, 0.5), *(1, 3, 3)[: _n + 1])
    for _pad in ("Circular", "Reflection", "Replication"):
        KNOWN[f"{_pad}Pad{_n}d"] = _linear(
            lambda kind=f"{_pad}Pad{_n}d": getattr(nn, kind)(1), (1, 4, 3)[: _n + 1], _EXACT
        )

# A reason, and the modules that are refused for it.
REFUSED: dict[str, str] = {
    "a loss, which compares two inputs": "BCELoss BCEWithLogitsLoss CTCLoss CosineEmbeddingLoss CrossEntropyLoss "
    "GaussianNLLLoss HingeEmbeddingLoss HuberLoss KLDivLoss L1Loss LinearCrossEntropyLoss MSELoss MarginRankingLoss "
    "MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss NLLLoss2d PoissonNLLLoss SmoothL1Loss "
    "SoftMarginLoss TripletMarginLoss TripletMarginWithDistanceLoss AdaptiveLogSoftmaxWithLoss",
    "takes two inputs: bounded inside of a forward pass of one": "CosineSimilarity PairwiseDistance",
    "has no forward pass: it only holds others": "Container Module ModuleDict ModuleList ParameterDict ParameterList",
    "has no weights before its first input; then it is the layer without `Lazy`": "LazyBatchNorm1d LazyBatchNorm2d "
    "LazyBatchNorm3d LazyConv1d LazyConv2d LazyConv3d LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d "
    "LazyInstanceNorm1d LazyInstanceNorm2d LazyInstanceNorm3d LazyLinear",
    "recurrent: its state goes through all steps, and gates multiply values": "GRU LSTM RNNBase RNNCellBase",
    "gates multiply values: called step by step in a forward pass, it has a constant on a box": "GRUCell LSTMCell",
    "multiplies values that depend on the input: on a box `attention(x, x, x)[0]` has a constant": "MultiheadAttention",
    "multiplies values that depend on the input: write it with `nn.MultiheadAttention`, on a box": "Transformer "
    "TransformerDecoder TransformerDecoderLayer",
    "multiplies values that depend on the input: it has a constant on a box": "GLU LocalResponseNorm "
    "TransformerEncoder TransformerEncoderLayer",
    "multiplies its two inputs: called in a forward pass of one, it has a constant on a box": "Bilinear",
    "jumps: no constant": "Hardshrink",
    "takes whole numbers": "Embedding EmbeddingBag",
    "takes whole numbers beside its input": "MaxUnpool1d MaxUnpool2d MaxUnpool3d",
    "draws its windows at random": "FractionalMaxPool2d FractionalMaxPool3d",
    "draws slopes at random in training; in evaluation write `nn.LeakyReLU`": "RReLU",
    "no rules for volumes": "AdaptiveAvgPool3d AdaptiveMaxPool3d AvgPool3d Conv3d ConvTranspose3d LPPool3d "
    "MaxPool3d CircularPad3d ConstantPad3d ReflectionPad3d ReplicationPad3d ZeroPad3d",
    "no rule: pooling by norms is `lipkit.modules.L2NormPool2d`": "LPPool1d LPPool2d",
    "no rule: each output depends on the norms of neighbouring channels": "CrossMapLRN2d",
    "no rule: its constant would be the root of the number of classes; leave it to the loss": "LogSoftmax",
    "belongs to several processes: `nn.BatchNorm2d` holds the same numbers": "SyncBatchNorm",
    "wraps a network: pass its `.module`": "DataParallel",
}
REASONS = {name: reason for reason, names in REFUSED.items() for name in names.split()}

# Arguments, and the refused modules of which they make an instance.
_ARGUMENTS: dict[tuple[Any, ...], str] = {
    (1,): "CircularPad3d ReflectionPad3d ReplicationPad3d ZeroPad3d",
    (1, 0.0): "ConstantPad3d",
    (2,): "AdaptiveAvgPool3d AdaptiveMaxPool3d AvgPool3d MaxPool3d CrossMapLRN2d LazyLinear LocalResponseNorm "
    "MaxUnpool1d MaxUnpool2d MaxUnpool3d SyncBatchNorm",
    (2, 2): "FractionalMaxPool2d FractionalMaxPool3d GRU GRUCell LPPool1d LPPool2d LPPool3d LSTM LSTMCell LazyConv1d "
    "LazyConv2d LazyConv3d LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d LinearCrossEntropyLoss",
    (3, 2): "Embedding EmbeddingBag",
    (4, 2): "MultiheadAttention",
    (1, 1, 2): "Conv3d ConvTranspose3d",
    (2, 2, 2): "Bilinear",
    (4, 2, 4): "TransformerDecoderLayer TransformerEncoderLayer",
    (4, 4, (2,)): "AdaptiveLogSoftmaxWithLoss",
    (2, 2, True, 1): "RNNCellBase",
    (4, 2, 1, 1, 4): "Transformer",
    ("LSTM", 2, 2): "RNNBase",
}
MADE: dict[str, Callable[[], nn.Module]] = {
    "DataParallel": lambda: nn.DataParallel(nn.ReLU()),
    "TransformerDecoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 4), 1),
    "TransformerEncoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 4), 1, enable_nested_tensor=False
    ),
}
for _arguments, _names in _ARGUMENTS.items():
    MADE |= {name: partial(getattr(nn, name), *_arguments) for name in _names.split() if hasattr(nn, name)}


def classes() -> list[str]:
    """The modules that ``torch.nn`` shows in the installed version."""
    shown = [(name, getattr(nn, name)) for name in dir(nn)]
    return [name for name, one in shown if inspect.isclass(one) and issubclass(one, nn.Module)]


def page() -> str:
    rows = [
        f"| `{name}` | {KNOWN[name].words} | |" if name in KNOWN else f"| `{name}` | none | {REASONS[name]} |"
        for name in classes()
    ]
    return "\n".join(
        [
            "# Every module of torch.nn",
            "",
            f"{sum(name in KNOWN for name in classes())} of the {len(rows)} modules of torch.nn "
            f"(torch {torch.__version__.split('+')[0]}) have a constant on all of space; the others are refused, by "
            "name and with a reason. Some of those have a constant on [a box of inputs](../networks.md"
            "#products-quotients-exponentials-attention-a-box-of-inputs). Constants are proved upper bounds in l2, in "
            "evaluation mode. Made by "
            "`python -m benchmarks.torch_modules --keep`; a test compares each line with `lipkit.lipschitz`.",
            "",
            "| module | constant | why none, and what to write |",
            "|:--|:--|:--|",
            *rows,
            "",
        ]
    )


def sample(known: Known) -> tuple[nn.Module, Tensor]:
    """The instance in evaluation mode, and its constant in closed form."""
    torch.manual_seed(0)
    module = known.make().eval()
    value = known.value if isinstance(known.value, float) else known.value(module)
    return module.float(), torch.tensor(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help=f"write {PAGE.name}")
    if parser.parse_args().keep:
        PAGE.write_text(page())
    else:
        print(page())


if __name__ == "__main__":
    main()
