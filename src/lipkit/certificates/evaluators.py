r"""Evaluators: the arithmetic that a certificate holds for, and the settings under which torch keeps to it.

A certificate holds for *every* evaluation in the model of `lipkit.proof.roundoff`:
IEEE operations in the evaluator's format, inner products in any order, flushing to zero or not. Settings of torch that
break the model (products in TF32 or bfloat16, autocast, algorithms that are not inner products such as Winograd's or a
fast Fourier transform) are refused.
"""

import contextlib
import copy
import dataclasses

import torch
from torch import nn

from lipkit import modules
from lipkit.errors import OptionError, check_choice
from lipkit.linalg.precision import check_underflow, flushes, product_settings, reduced_products
from lipkit.linalg.transforms import nnpack_enabled
from lipkit.modules.convolutions import windows_overlap
from lipkit.modules.dense import BLOCK, blocked
from lipkit.proof.roundoff import FLOAT64, Arithmetic, arithmetic_of

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "float32_blocked": torch.float32, "integer": torch.int32}
ROUNDINGS = ("sound", "ignore")
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d, modules.TaylorConv2d)


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """The evaluation that a certificate holds for, and where it was made; plain values only.

    Attributes:
        name: ``"float64"``, ``"float32"``, ``"float32_blocked"`` (the network `machine` returns), ``"integer"`` (the
            program `lipkit.integer.quantisation.quantise` returns), or ``"real"``: no machine, rounding was ignored.
        dtype: format of numbers and operations.
        block: inner products of dense layers and convolutions are summed in blocks of this many terms; None for any
            order.
        device: type of the device (cpu, cuda).
        torch: version of torch.
        settings: of torch and its libraries for arithmetic, by name, as the function `settings` finds them.
    """

    name: str
    dtype: str
    block: int | None
    device: str
    torch: str
    settings: dict[str, str]

    @property
    def option(self) -> str:
        """The argument ``evaluator`` of `lipkit.certify` that gives this evaluator."""
        return "float64" if self.name == "real" else self.name

    def check(self, network: nn.Module | None = None) -> None:
        """Raise unless the certificate holds for an evaluation under the present settings of torch.

        ``network`` is the one to be evaluated; None assumes one with convolutions.
        """
        if self.name in ("real", "integer"):  # exact integers are the same on every machine
            return
        if torch.__version__ != self.torch:
            raise OptionError(
                f"made for torch {self.torch}: expected that version, got {torch.__version__}; certify again"
            )
        _sound_settings(self.name, self.device, network)


def evaluator(
    name: str, device: str | torch.device, network: nn.Module | None = None, rounding: str = "sound"
) -> Evaluator:
    """The evaluator of this name, ``"real"`` if rounding is ignored; refuses settings of torch that break its model."""
    kind = torch.device(device).type
    check_choice("rounding", rounding, ROUNDINGS)
    if rounding == "ignore":
        if name != "float64":
            raise OptionError(f"expected rounding='sound' for the evaluator {name!r}, got 'ignore', which knows none")
        return Evaluator("real", "real", None, kind, torch.__version__, {})
    check_choice("evaluator", name, _DTYPES)
    found = _sound_settings(name, kind, network)
    dtype = str(_DTYPES[name]).removeprefix("torch.")
    return Evaluator(name, dtype, BLOCK if name.endswith("blocked") else None, kind, torch.__version__, found)


def arithmetic(name: str, network: nn.Module) -> Arithmetic:
    """The arithmetic of an evaluator; it rounds the network's numbers if they are stored in a wider format."""
    if name == "integer":
        return FLOAT64  # of the proof; the program's errors are its own
    dtype = _DTYPES[name]
    found = arithmetic_of(dtype)
    wider = any(
        torch.finfo(t.dtype).eps < torch.finfo(dtype).eps
        for t in (*network.parameters(), *network.buffers())
        if t.is_floating_point()
    )
    return dataclasses.replace(found, block=BLOCK if name.endswith("blocked") else None, stored=int(wider))


def machine(network: modules.Network, name: str) -> modules.Network:
    """The network as the evaluator of this name runs it, on the CPU; inputs must have its dtype."""
    check_choice("evaluator", name, [known for known in _DTYPES if known != "integer"])
    check_underflow()  # small float32 numbers would be lost on their way to float64
    twin = copy.deepcopy(network).cpu().to(_DTYPES[name])  # weights are rounded to the evaluator's format here
    made = blocked(twin) if name.endswith("blocked") else twin
    assert isinstance(made, modules.Network)
    return made


def settings(kind: str) -> dict[str, str]:
    """The settings of torch and its libraries that affect arithmetic and choice of algorithms on a type of device.

    `violations` names those that break the model of arithmetic; the others are for the record.
    """
    backends = torch.backends
    found: dict[str, object] = {
        "autocast": torch.is_autocast_enabled(kind),
        "flush_denormal": flushes(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "cpu_capability": backends.cpu.get_cpu_capability(),
    }
    if kind == "cuda":
        sums = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
        for name in ("enabled", "allow_tf32", "benchmark", "deterministic"):
            found[f"cudnn.{name}"] = getattr(backends.cudnn, name)
        found |= {f"cuda.matmul.{name}": getattr(backends.cuda.matmul, name) for name in sums}
        found["cuda.blas"] = str(backends.cuda.preferred_blas_library()).split(".")[-1]
        found["cuda.linalg"] = str(backends.cuda.preferred_linalg_library()).split(".")[-1]
    else:
        found |= {"nnpack": nnpack_enabled(), "mkldnn": backends.mkldnn.enabled}
    return product_settings(kind) | {name: str(value) for name, value in found.items()}


def violations(name: str, kind: str, found: dict[str, str], network: nn.Module | None = None) -> list[str]:
    """Which `settings` break the model of arithmetic of this evaluator, in words; empty if none does."""
    if name in ("float64", "integer"):
        # No setting of torch lowers the precision of float64 products; cuDNN is switched off while it is in use.
        wrong = [reason for reason in reduced_products(found) if "DOUBLE" in reason]
        if found["flush_denormal"] == "True":
            wrong.append("torch.set_flush_denormal(True) loses small float32 numbers where they become float64")
        return wrong
    wrong = reduced_products(found)
    if found["autocast"] == "True":
        wrong.append("autocast is on")
    blocks = name.endswith("blocked")
    modules = [] if network is None else [m for m in network.modules() if _convolves(m, blocks)]
    if kind == "cuda" and (network is None or modules):
        wrong.append("cuDNN may evaluate convolutions by Winograd's algorithm or in TF32 (certify for the CPU)")
    if kind == "cpu" and found["nnpack"] == "True" and (network is None or any(map(_shares_windows, modules))):
        wrong.append(
            "NNPACK may evaluate convolutions by Winograd's algorithm (torch.backends.nnpack.set_flags(False), in the "
            "certifying and in the evaluating process)"
        )
    if kind not in ("cpu", "cuda"):
        wrong.append(f"nothing is known about the arithmetic of {kind}")
    return wrong


def _convolves(module: nn.Module, blocks: bool) -> bool:
    """True if the module calls torch's convolution; ``blocks``: if it still does in the blocked evaluator."""
    if isinstance(module, modules.FourierConv2d):
        return not module.whole and module.kernel_size == (1, 1)
    return type(module) in _CONVOLUTIONS and not (blocks and type(module) is nn.Conv2d and module.groups == 1)


def _shares_windows(module: nn.Module) -> bool:
    """True if windows of the module may overlap, so that algorithms such as Winograd's could share work."""
    if type(module) is nn.Conv2d:
        return windows_overlap(module)
    return not isinstance(module, modules.FourierConv2d)


def _sound_settings(name: str, kind: str, network: nn.Module | None) -> dict[str, str]:
    """The present settings; raises if they break the model of this evaluator's arithmetic."""
    found = settings(kind)
    if wrong := violations(name, kind, found, network):
        other = "" if name == "float64" else ", or use evaluator='float64'"
        raise OptionError(
            f"rounding='sound': expected IEEE {name.removesuffix('_blocked')} arithmetic, got settings that break it: "
            f"{'; '.join(wrong)}; change them{other}"
        )
    return found


def inner_products_only(device: torch.device, wanted: bool = True) -> contextlib.AbstractContextManager[None]:
    """A context that switches cuDNN off on CUDA, since some of its convolutions are not inner products."""
    cuda = wanted and device.type == "cuda"
    return torch.backends.cudnn.flags(enabled=False) if cuda else contextlib.nullcontext()
