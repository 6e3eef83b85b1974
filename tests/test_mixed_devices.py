"""No operation mixes devices: on a device that is only pretended, so that a machine without a GPU finds it.

The numbers of a `Pretended` tensor lie on the CPU, its label says cuda:0. Every operation of torch that has such a
tensor among its operands computes on the CPU, and fails where CUDA would: beside a tensor of the CPU, unless that is a
number (0-d) in an elementwise operation, an index, or the source of a copy. Control flow sees true values, so proofs
run to their end. torch's own FakeTensorMode knows no values, and lets 0-d tensors pass everywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import lipkit
from lipkit import certificates, conformal, interop, layers, modules
from lipkit.analysis import lipschitz_lower_bound
from lipkit.bounds import dissipation
from lipkit.bounds.dissipation import System, least_gain
from lipkit.layers import families

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_devices.py uses it")
CUDA = torch.device("cuda", 0)
COPIES = {"aten::_to_copy", "aten::copy_", "aten::_foreach_copy_"}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# Elementwise in the sense that counts here, without torch's tag.
WITH_NUMBERS = {"aten::masked_fill", "aten::masked_fill_", "aten::fill_", "aten::where"}
WITHOUT_NUMBERS = {"aten::nextafter"}


class Pretended(Tensor):
    """A tensor that claims to be on cuda:0. torch itself takes it for a meta tensor."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Pretended:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.shape, strides=numbers.stride(), storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype, device="meta",
        )  # fmt: skip
        made.numbers = numbers
        torch._C._set_conj(made, numbers.is_conj())
        torch._C._set_neg(made, numbers.is_neg())
        return made  # type: ignore[no-any-return]

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pretended({self.numbers})"

    def numpy(self, **_: Any) -> Any:  # type: ignore[override]
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, **options: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, **{"dtype": self.dtype, **options}).to(CUDA)

    def __getitem__(self, index: Any) -> Tensor:
        lists = index if isinstance(index, tuple) else (index,)
        return super().__getitem__(tuple(torch.tensor(i) if isinstance(i, list) else i for i in lists))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            made = memo[id(self)] = Pretended(self.numbers.detach().clone())
            made.__dict__.update({name: value for name, value in vars(self).items() if name != "numbers"})
            made.requires_grad_(self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})


class Device(TorchDispatchMode):
    """Answers calls that name the device cuda:0."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})


def run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation of torch, on the numbers."""
    name, given = function._schema.name, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    there = any(isinstance(t, Pretended) for t in given)
    if kwargs.get("device") is not None:
        # Formulas of derivatives ask for numbers on the device of a tensor that torch takes for a meta tensor.
        there = torch.device(kwargs["device"]).type in ("cuda", "meta")
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if there and kwargs.get("generator") is not None:
        raise RuntimeError(f"{name}: expected a generator of cuda:0, got one of the CPU")
    if name not in COPIES and any(isinstance(t, Pretended) for t in given):
        refuse_mixed(function, name, args, given)
    plain = tree_map(lambda t: t.numbers if isinstance(t, Pretended) else t, (args, kwargs))
    out = function(*plain[0], **plain[1])
    if any(r.alias_info is not None and r.alias_info.is_write for r in function._schema.returns):
        if torch.Tag.inplace_view in function.tags and there:
            with no_dispatch():
                function(*args, **kwargs)
        return kwargs.get("out", args[0])
    return tree_map(lambda t: Pretended(t) if there and isinstance(t, Tensor) else t, out)


def refuse_mixed(function: Any, name: str, args: Any, given: list[Tensor]) -> None:
    apart = [t for t in given if not isinstance(t, Pretended)]
    numbers = (torch.Tag.pointwise in function.tags and name not in WITHOUT_NUMBERS) or name in WITH_NUMBERS | INDEXING
    if name in INDEXING and isinstance(args[0], Pretended):
        apart = [t for t in apart if not any(t is i for i in args[1])]
    if any(t.ndim or not numbers for t in apart):
        shapes = ", ".join(str(tuple(t.shape)) for t in apart)
        raise RuntimeError(f"{name}: expected all tensors on one device, got cuda:0 and on the CPU {shapes}")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda _: False)
    # lipkit refuses modes and tensors of another kind.
    monkeypatch.setattr("lipkit.modules.guarding.active_modes", list)
    monkeypatch.setattr("lipkit.linalg.transforms.active_modes", list)
    monkeypatch.setattr("lipkit.modules.guarding._refuse_weights", lambda *_: None)
    lift, overwrite = torch._C._only_lift_cpu_tensors(), torch.__future__.get_overwrite_module_params_on_conversion()
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    with Device():
        yield CUDA
    torch._C._set_only_lift_cpu_tensors(lift)
    torch.__future__.set_overwrite_module_params_on_conversion(overwrite)


def there(module: nn.Module, *shape: int) -> modules.Network:
    torch.manual_seed(0)
    return lipkit.export(module.to(CUDA).eval(), shape)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_the_device_refuses_what_cuda_refuses(device: torch.device) -> None:
    x, here = torch.ones(3).to(device), torch.ones(3)
    assert {t.device for t in (x + 1, x.sum(), torch.zeros(2, device=device), x.new_zeros(2), here.to(x))} == {device}
    assert (x + torch.tensor(1.0)).cpu().tolist() == [2.0, 2.0, 2.0]
    for call in (
        lambda: x + here,
        lambda: torch.stack([x.sum(), here.sum()]),
        lambda: torch.nextafter(x, here.sum()),
        lambda: here[x > 0],
        lambda: here.add_(x),
        lambda: torch.rand(2, device=device, generator=torch.Generator()),
    ):
        with pytest.raises(RuntimeError, match="expected"):
            call()
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n in ("cpl", "sll", "svcm"))) for n in families.names()]
)
def test_training_steps_exports_and_constants(device: torch.device, name: str) -> None:
    torch.manual_seed(0)
    family, kernel = families.get(name), 2 if name == "eco" else 3
    made: list[tuple[nn.Module, tuple[int, ...]]] = [(family.conv(2, 2, kernel), (2, 4, 4))]
    for layer, shape in [*made, (family.linear(3, 2), (3,))] if family.linear else made:
        layer.to(device)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1, foreach=False)
        layer(torch.rand(2, *shape).to(device)).square().sum().backward()
        optimizer.step()
        assert lipkit.lipschitz(layer, shape) > 0
        plain = lipkit.export(layer.eval(), shape)
        assert {t.device for t in plain.state_dict().values()} == {device}
        assert plain(torch.rand(2, *shape).to(device)).device == device
        assert float(lipkit.lipschitz(plain)) > 0


def tight(folder: Path) -> None:
    network = certificates.tight(there(mlp(), 3))
    assert {t.device for t in network.state_dict().values()} == {CUDA}
    assert float(lipkit.lipschitz(network)) > 0
    block = layers.Residual(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(), nn.Conv2d(1, 1, 1)))
    branches = there(nn.Sequential(block, nn.Flatten(), nn.Linear(9, 2)), 1, 3, 3)
    assert float(lipkit.lipschitz(certificates.tight(branches))) < float(lipkit.lipschitz(branches))


def tight_branches(folder: Path) -> None:
    torch.manual_seed(0)
    block = modules.Graph([nn.Linear(4, 4), nn.Tanh(), modules.Blend(torch.tensor(0.5))], [[0], [1], [2, 0]])
    slices = modules.Graph([modules.Piece(1, 0, 4, 2), modules.Affine(torch.ones(2), torch.ones(2))], [[0], [1]])
    chain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), block, nn.ReLU(), slices, modules.Roll(1, 1), nn.Linear(2, 2))
    network = there(chain, 3)
    product, gain = float(lipkit.lipschitz(network)), float(lipkit.lipschitz(certificates.tight(network)))
    assert 0 < gain < product
    linear = there(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), modules.Roll(1, 1), slices, nn.Linear(2, 2)), 3)
    assert 0 < float(lipkit.lipschitz(certificates.tight(linear))) < float(lipkit.lipschitz(linear))
    assert 0 < certificates.local_gain(network, (-1.0, 1.0)) <= product
    assert certificates.gain_matrix(network).shape == (2, 3)


def monotone(folder: Path) -> None:
    assert certificates.monotone(there(mlp(), 3)).shape == (2, 3)


def labels_there(folder: Path) -> None:
    conformal.calibrate(there(mlp(), 3), torch.rand(9, 3).to(CUDA), (torch.arange(9) % 2).to(CUDA))


def scores_of_both(folder: Path) -> None:
    network = there(nn.Linear(3, 1), 3)
    certificates.auroc(network, torch.rand(4, 3).to(CUDA), torch.rand(4, 3), 0.1)


def outputs_there(folder: Path) -> None:
    # The constant of each output, with its scale, is found where the network lies.
    network = there(nn.Sequential(nn.Linear(3, 2), layers.Rescale([2.0, 3.0], [0.0, 1.0])), 3)
    x, y = torch.rand(9, 3).to(CUDA), torch.rand(9, 2).to(CUDA)
    certificates.certify_regression(network, x, y, delta=0.1, device=CUDA)
    found = conformal.calibrate(network, x, y, proof=certificates.prove(network, device=CUDA))
    found.predict_interval(x, 0.5, 0.1)


def box_there(folder: Path) -> None:
    box = torch.zeros(3).to(CUDA), torch.ones(3).to(CUDA)
    assert lipschitz_lower_bound(mlp().to(CUDA), box, input_shape=(3,), restarts=2, steps=2).lower > 0


def recurrent(folder: Path) -> None:
    half = System(torch.tensor([[0.5, 1.0], [1.0, 0.0]]).to(CUDA), 1, (0, 0), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dissipation, "_ACCURACY", 0.02)
        assert 2 < least_gain(half).gain < 2.5


def runtimes(folder: Path) -> None:
    network = there(mlp(), 3)
    interop.check_runtime(network, interop.module_runtime(copy.deepcopy(network)), torch.rand(4, 3).to(CUDA))
    interop.write_program(network, folder / "net.pt2")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "use",
    [tight, tight_branches, monotone, labels_there, scores_of_both, outputs_there, box_there, recurrent, runtimes],
    ids=lambda f: f.__name__,
)
def test_uses(device: torch.device, tmp_path: Path, use: Callable[[Path], None]) -> None:
    use(tmp_path)


@pytest.mark.thorough
def test_local_certificates(device: torch.device) -> None:
    x = torch.rand(2, 3).to(device)
    network = there(mlp(), 3)
    found = certificates.certify(network, x, network(x).argmax(1), method="local", device=device)
    assert bool((found.radius > 0).all())
