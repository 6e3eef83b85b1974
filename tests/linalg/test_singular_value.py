"""The largest singular value with derivatives of every order, and the layers that divide by it."""

import pytest
import torch
from torch import nn

from lipkit.bounds import spectral_norm
from lipkit.layers import CplConv2d, CplLinear, LiResConv2d, OssnConv2d
from lipkit.linalg.singular_value import singular_value

pytestmark = pytest.mark.fast


def largest(a: torch.Tensor) -> torch.Tensor:
    u, s, vh = torch.linalg.svd(a.detach())
    return singular_value(a, u[:, 0], vh[0].conj(), s[0])


# Torch warns of its own code when it first takes a forward derivative.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (3, 3), (1, 2)])
def test_derivatives_are_those_of_the_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a = torch.randn(shape, dtype=dtype, requires_grad=True)
    assert torch.autograd.gradcheck(largest, a, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(largest, a, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.thorough
def test_third_derivatives_and_torch_func() -> None:
    torch.manual_seed(1)
    a = torch.randn(3, 2, dtype=torch.float64)

    def second(b: torch.Tensor) -> torch.Tensor:
        return torch.autograd.functional.hessian(largest, b, create_graph=True).square().sum()

    assert torch.autograd.gradcheck(second, a.clone().requires_grad_())
    reference = torch.autograd.functional.hessian(lambda b: torch.linalg.matrix_norm(b, 2), a)
    assert torch.allclose(torch.func.hessian(largest)(a), reference)


def test_other_singular_values_may_coincide() -> None:
    a = torch.diag(torch.tensor([3.0, 1.0, 1.0], dtype=torch.float64))
    hessian = torch.autograd.functional.hessian(largest, a)
    assert hessian[1, 0, 1, 0].item() == pytest.approx(3 / 8)  # s / (s^2 - t^2)
    assert hessian[0, 1, 2, 0].item() == 0
    proved = torch.autograd.functional.hessian(spectral_norm, a)
    assert torch.allclose(proved, hessian, rtol=1e-6)


LAYERS = {
    "cpl": lambda: CplConv2d(2, 2, 3, activation="tanh"),
    "cpl, strided": lambda: CplConv2d(1, 4, 3, stride=2, activation="tanh"),
    "cpl, dense": lambda: CplLinear(3, 4, activation="tanh"),
    "liresnet": lambda: LiResConv2d(2, 3, 3),
    "ossn": lambda: OssnConv2d(2, 3, 3),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_have_second_derivatives_in_their_parameters(kind: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind]().double()
    assert isinstance(layer, nn.Module)
    x = torch.randn((1, 3) if "dense" in kind else (1, layer.in_channels, 4, 4), dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    values = [(p + 0.3 * torch.randn_like(p)).detach().requires_grad_() for p in layer.parameters()]

    def f(*given: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(names, given, strict=True)), (x,)).square().sum()

    assert torch.autograd.gradgradcheck(f, values, fast_mode=True)
