"""Lower estimates: never above the dense norm, close to it, and with the exact gradient of what they return."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lipkit.bounds import circular, power
from lipkit.bounds.power import (
    CANDIDATES,
    ENTRIES,
    farnia_lower_estimate,
    krylov_lower_estimate,
    start_vector,
)
from lipkit.conv import symbol_at
from lipkit.errors import OptionError, ShapeError

KERNELS = [(3, 4, 3, 3), (4, 3, 1, 3), (2, 2, 2, 4), (1, 5, 5, 5), (6, 1, 3, 3)]
SIZES = [(5, 4), (1, 1), (2, 3), (7, 7), (6, 1)]


def dense_norm(kernel: torch.Tensor, h: int, w: int) -> float:
    """Largest singular value of the circular convolution, from a matrix built by loops over its taps."""
    k = kernel.detach().double().numpy()
    cout, cin, kh, kw = k.shape
    a = np.zeros((cout, h, w, cin, h, w))
    for i in range(h):
        for j in range(w):
            for s in range(kh):
                for t in range(kw):
                    a[:, i, j, :, (i + s - (kh - 1) // 2) % h, (j + t - (kw - 1) // 2) % w] += k[:, :, s, t]
    return float(np.linalg.norm(a.reshape(cout * h * w, -1), 2))


@pytest.mark.thorough
@pytest.mark.usual(26)
@pytest.mark.parametrize("shape", KERNELS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_convolution_estimate_is_below_and_close_to_the_dense_norm(shape, size, dtype):
    torch.manual_seed(0)
    kernel = torch.randn(shape, dtype=dtype)
    truth = dense_norm(kernel, *size)
    for iterations in (0, 1, 10, 60):
        assert float(farnia_lower_estimate(kernel, *size, iterations)) <= truth * (1 + 100 * torch.finfo(dtype).eps)
    assert float(farnia_lower_estimate(kernel, *size, 10)) >= 0.95 * truth
    assert float(farnia_lower_estimate(kernel, *size, 200)) >= 0.999 * truth


@pytest.mark.parametrize("estimate", [farnia_lower_estimate, krylov_lower_estimate])
@pytest.mark.parametrize(("dtype", "powers"), [(torch.float32, (-100, 120)), (torch.float64, (-900, 1000))])
def test_tiny_and_huge_kernels_are_estimated_like_those_near_one(estimate, dtype, powers):
    torch.manual_seed(7)
    kernel = torch.randn(2, 3, 3, 2, dtype=dtype)
    truth = dense_norm(kernel, 5, 4)
    for power_of_two in powers:  # exact scaling: its square leaves the range
        found = float(estimate((kernel.double() * 2.0**power_of_two).to(dtype), 5, 4)) * 2.0**-power_of_two
        assert 0.95 * truth <= found <= truth * (1 + 100 * torch.finfo(dtype).eps)
    assert bool(estimate(kernel.clone().fill_(torch.nan), 5, 4).isnan())


def test_quotient_of_the_best_frequency_beats_the_plain_one():
    torch.manual_seed(1)
    kernel = torch.randn(16, 16, 3, 3)
    truth = float(circular(kernel, 8, 8))
    plain = start_vector(16 * 64, kernel).reshape(1, 16, 8, 8)

    def convolution(x):
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), kernel)

    def transposed(y):
        return F.conv2d(F.pad(y, (1, 1, 1, 1), mode="circular"), kernel.flip(-2, -1).transpose(0, 1))

    for _ in range(10):
        plain = transposed(convolution(plain))
        plain = plain / plain.norm()
    reached = float(convolution(plain).norm())
    best = float(farnia_lower_estimate(kernel, 8, 8, 10))
    assert reached < best <= truth * (1 + 1e-5)
    assert (truth - best) < 0.5 * (truth - reached)


def test_rounding_noise_of_dead_frequencies_does_not_count():
    # A pass-band filter: after 200 steps the other frequencies hold nothing but rounding.
    kernel = torch.ones(1, 1, 3, 3)
    assert float(farnia_lower_estimate(kernel, 12, 12, 200)) <= 9 * (1 + 1e-5)


@pytest.mark.thorough
def test_gradients_are_those_of_the_number_returned():
    torch.manual_seed(3)
    kernel = torch.randn(2, 3, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda k: farnia_lower_estimate(k, 4, 3, 3), kernel)


@pytest.fixture
def by_steps(monkeypatch):
    """Takes steps also where eigenvalues would be cheap."""
    monkeypatch.setattr(power, "EXACT", 0)


@pytest.fixture(params=["steps", "eigenvalues"])
def either_way(request, monkeypatch):
    monkeypatch.setattr(power, "EXACT", 0 if request.param == "steps" else 10**9)


@pytest.mark.usefixtures("either_way")
@pytest.mark.usual(40)
@pytest.mark.parametrize("shape", KERNELS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_krylov_estimate_is_the_dense_norm_of_small_kernels(shape, size, dtype):
    torch.manual_seed(0)
    kernel = torch.randn(shape, dtype=dtype)
    truth, room = dense_norm(kernel, *size), 100 * torch.finfo(dtype).eps
    for iterations in (0, 1, 2):
        assert float(krylov_lower_estimate(kernel, *size, iterations)) <= truth * (1 + room)
    assert abs(float(krylov_lower_estimate(kernel, *size, 8)) - truth) <= room * truth


# 84 frequencies of which not all go on, found from a quarter of them; wide, square and tall.
SCREENED = [(64, 56), (56, 56), (56, 64)]


def norm_by_its_definition(kernel, h, w):
    """The largest norm of the matrices at all frequencies, without the symmetry."""
    f1, f2 = torch.arange(h).repeat_interleave(w), torch.arange(w).repeat(h)
    return torch.linalg.matrix_norm(symbol_at(kernel, f1, f2, h, w), 2).amax()


@pytest.mark.parametrize("channels", [(3, 8), (8, 3), (6, 6)])
def test_few_channels_need_no_steps(channels):
    assert 10 * 6 * min(channels) ** 3 <= power.EXACT
    torch.manual_seed(0)
    kernel = torch.randn(*channels, 3, 3, dtype=torch.float64, requires_grad=True)
    truth, estimate = norm_by_its_definition(kernel, 10, 10), krylov_lower_estimate(kernel, 10, 10, 0)
    assert torch.allclose(estimate, truth, rtol=1e-13)
    gradients = [torch.autograd.grad(one, kernel)[0] for one in (truth, estimate)]
    assert torch.allclose(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.usefixtures("by_steps")
@pytest.mark.parametrize("channels", SCREENED)
def test_krylov_estimate_and_its_gradient_converge_to_the_norm(channels):
    assert max(CANDIDATES, ENTRIES // (56 * 56)) < 12 * 7
    torch.manual_seed(1)
    kernel = torch.randn(*channels, 3, 3, dtype=torch.float64, requires_grad=True)
    truth = norm_by_its_definition(kernel, 12, 12)
    (expected,) = torch.autograd.grad(truth, kernel)
    errors = []
    for iterations in (2, 8, 24):
        estimate = krylov_lower_estimate(kernel, 12, 12, iterations)
        (found,) = torch.autograd.grad(estimate, kernel)
        # A lower estimate whose error is of second order in that of the vectors.
        errors.append((float((1 - estimate / truth).detach()), float((found - expected).norm() / expected.norm())))
    (coarse, coarse_gradient), (middle, middle_gradient), (fine, fine_gradient) = errors
    assert coarse > middle > -1e-14
    assert abs(fine) < 1e-12
    assert coarse_gradient > middle_gradient > 1e-8
    assert fine_gradient < 1e-6


@pytest.mark.thorough
@pytest.mark.usefixtures("by_steps")
def test_krylov_estimate_takes_steps_better_than_the_power_method():
    torch.manual_seed(1)
    kernel = torch.nn.init.orthogonal_(torch.empty(56, 56))[:, :, None, None] + 0.03 * torch.randn(56, 56, 3, 3) / 20
    truth = float(circular(kernel, 12, 12))
    krylov, power = (float(f(kernel, 12, 12, 16)) for f in (krylov_lower_estimate, farnia_lower_estimate))
    assert power < krylov <= truth * (1 + 1e-5)


# Torch warns of its own code when it first takes a forward derivative.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("shape", [(5, 4), (24, 200)])
def test_krylov_estimate_under_transforms(shape):
    torch.manual_seed(2)
    kernels = torch.randn(2, *shape, 3, 3, dtype=torch.float64)

    def norm(kernel):
        return krylov_lower_estimate(kernel, 7, 6, 12)

    assert torch.allclose(torch.func.vmap(norm)(kernels), torch.stack([norm(k) for k in kernels]), rtol=1e-12)
    gradients = torch.func.vmap(torch.func.grad(norm))(kernels)
    along = torch.func.jvp(norm, (kernels[0],), (kernels[1],))[1]
    assert torch.allclose((gradients[0] * kernels[1]).sum(), along, rtol=1e-9)


@pytest.mark.usefixtures("either_way")
def test_zero_has_a_zero_estimate_and_a_finite_gradient():
    kernel = torch.zeros(2, 3, 3, 3, requires_grad=True)
    estimate = farnia_lower_estimate(kernel, 4, 4)
    estimate.backward()
    other = krylov_lower_estimate(kernel, 4, 4)
    other.backward()
    assert estimate.item() == other.item() == 0
    assert torch.isfinite(kernel.grad).all()


@pytest.mark.usefixtures("either_way")
def test_same_argument_same_number_whatever_the_global_generator():
    kernel = torch.arange(36.0).reshape(2, 2, 3, 3)
    torch.manual_seed(0)
    one = farnia_lower_estimate(kernel, 5, 5)
    torch.manual_seed(1)
    torch.rand(3)
    assert torch.equal(one, farnia_lower_estimate(kernel, 5, 5))
    assert torch.equal(krylov_lower_estimate(kernel, 5, 5), krylov_lower_estimate(kernel, 5, 5))


def test_names_say_lower():
    for function in (farnia_lower_estimate, krylov_lower_estimate):
        assert "lower" in function.__name__
        assert "LOWER" in function.__doc__.splitlines()[0]


def test_refusals():
    with pytest.raises(OptionError, match=r"iterations: expected an integer of at least 0, got -1"):
        farnia_lower_estimate(torch.ones(1, 1, 3, 3), 4, 4, -1)
    with pytest.raises(OptionError, match=r"got 1.5"):
        farnia_lower_estimate(torch.ones(1, 1, 3, 3), 4, 4, 1.5)
    with pytest.raises(ShapeError, match=r"expected shape \(cout, cin, kh, kw\)"):
        farnia_lower_estimate(torch.ones(3, 3), 4, 4)
    with pytest.raises(OptionError, match=r"h: expected an integer of at least 1, got 0"):
        farnia_lower_estimate(torch.ones(1, 1, 3, 3), 0, 4)
    with pytest.raises(OptionError, match=r"w: expected an integer of at least 1, got 0"):
        krylov_lower_estimate(torch.ones(1, 1, 3, 3), 4, 0)
    with pytest.raises(OptionError, match=r"iterations: expected an integer of at least 0, got True"):
        krylov_lower_estimate(torch.ones(1, 1, 3, 3), 4, 4, True)
