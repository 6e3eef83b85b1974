"""The singular value decomposition that goes on where LAPACK gives up; products of known symmetry."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lipkit.linalg import polar
from lipkit.linalg.matrices import PANEL, all_finite, mirrored_product, thin_svd


def stall(monkeypatch: pytest.MonkeyPatch, failures: int, *, silently: bool = False) -> list[torch.dtype]:
    """Make LAPACK give up so many times, with an error or silently; the formats that it is asked in."""
    svd, asked = torch.linalg.svd, list[torch.dtype]()

    def stalling(w: Tensor, full_matrices: bool) -> tuple[Tensor, ...]:
        asked.append(w.dtype)
        if len(asked) <= failures and silently:
            return tuple(factor * torch.nan for factor in svd(w, full_matrices=full_matrices))
        if len(asked) <= failures:
            raise torch.linalg.LinAlgError("The algorithm failed to converge")
        return svd(w, full_matrices=full_matrices)  # type: ignore[no-any-return]

    monkeypatch.setattr(torch.linalg, "svd", stalling)
    return asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex128])
@pytest.mark.parametrize("failures", [0, 1, 2, 4])
@pytest.mark.parametrize("silently", [False, True])
def test_a_stalled_decomposition_is_made_otherwise(monkeypatch, dtype, failures, silently):
    torch.manual_seed(0)
    w = torch.randn(3, 6, 4, dtype=dtype)
    expected = torch.linalg.svdvals(w.to(torch.promote_types(dtype, torch.float64)))
    asked = stall(monkeypatch, failures, silently=silently)
    u, s, vh = thin_svd(w)
    assert asked == [dtype] + [torch.promote_types(dtype, torch.float64)] * failures
    assert (u.dtype, s.dtype, vh.dtype) == (dtype, w.real.dtype, dtype)
    close = 100 * torch.finfo(dtype).eps
    assert (s - expected).abs().max() < close
    assert ((u * s[..., None, :]) @ vh - w).abs().max() < close
    assert (vh @ vh.mH - torch.eye(4)).abs().max() < close


def test_it_gives_up_on_what_is_not_finite_and_after_five_failures(monkeypatch):
    asked = stall(monkeypatch, 9)
    with pytest.raises(torch.linalg.LinAlgError):
        thin_svd(torch.eye(3))
    assert len(asked) == 5
    with pytest.raises(torch.linalg.LinAlgError):
        thin_svd(torch.full((2, 2), float("nan")))
    assert len(asked) == 6


def test_the_polar_factor_goes_on(monkeypatch):
    w = torch.diag(torch.tensor([2.0, -3.0])).requires_grad_()
    stall(monkeypatch, 2)
    q = polar(w)
    assert (q - torch.diag(torch.tensor([1.0, -1.0]))).abs().max() < 1e-5
    (grad,) = torch.autograd.grad(q[0, 1], w)
    # U = diag(1, -1), V = I: both entries come from (A - A*) / (2 + 3) with A = U* dW, and U makes their signs equal.
    assert (grad - torch.tensor([[0.0, 0.2], [0.2, 0.0]])).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("number", [float("inf"), -float("inf"), float("nan")])
def test_one_number_that_is_not_finite_is_found(dtype, number):
    for place in range(3):
        values = torch.ones(3, 2).index_fill_(0, torch.tensor(place), number).to(dtype)
        views = (values, values.T, values.conj(), nn.Parameter(values))
        assert not any(map(all_finite, views))
        assert all_finite(values[:place], values.to("meta"))
    assert all_finite(torch.ones(2, dtype=dtype).conj(), torch.empty(0), torch.arange(3), torch.tensor(True))


def test_a_conjugated_view_that_is_not_finite_is_refused_as_such() -> None:
    with pytest.raises(torch.linalg.LinAlgError):
        thin_svd(torch.full((2, 2), float("nan"), dtype=torch.complex64).mH)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_mirrored_products(batch: tuple[int, ...], negative: bool) -> None:
    torch.manual_seed(0)
    large = 4 * PANEL + 3  # products by panels
    x = torch.randn(*batch, large, 9, dtype=torch.float64)
    y = torch.randn(*batch, 9, large, dtype=torch.float64)
    # [x, y^T] [y; +-x^T] equals its transpose or the negative of it.
    left, right = torch.cat((x, y.mT), -1), torch.cat((y, -x.mT if negative else x.mT), -2)
    made = mirrored_product(left, right, negative)
    torch.testing.assert_close(made, left @ right, rtol=1e-12, atol=1e-12)
