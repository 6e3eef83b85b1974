"""The parts of the proof: cells that cover the torus, shares that hold, tests that never accept what is above."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lipkit.bounds import symbol_sup
from lipkit.bounds.cover import divided, first_cells, fraction
from lipkit.bounds.gram_symbol import GramSymbol, cholesky_succeeds, stored_entries
from lipkit.bounds.peak import find_peak
from lipkit.conv.block import FEW_COLUMNS, autocorrelation, half_lags

from .reference import symbol_norm


def symbol_of(*shape: int, seed: int = 0) -> tuple[GramSymbol, torch.Tensor]:
    kernels = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    kernels *= 2.0 ** -math.frexp(float(kernels.abs().max()))[1]
    return GramSymbol(kernels), kernels


def turns(cells: torch.Tensor, periods: tuple[int, int]) -> np.ndarray:
    return (2 * math.pi * cells[:, 1:].double() / torch.tensor(periods)).numpy()


@pytest.mark.parametrize("shape", [(2, 3, 4, 3, 3), (1, 5, 3, 2, 4), (1, 30, 40, 3, 3), (2, 26, 24, 1, 3)])
@pytest.mark.parametrize("single", [False, True])
def test_tests_are_two_sided(shape: tuple[int, ...], single: bool) -> None:
    symbol, kernels = symbol_of(*shape)
    cells, periods = first_cells(symbol, (6 if shape[3] > 1 else 1, 8)), (6 if shape[3] > 1 else 1, 8)
    truth = np.array([symbol_norm(kernels[c[0]], turns(c[None], periods))[0] ** 2 for c in cells])
    table = symbol.single_table if single else symbol._table
    # What float32 loses to its rounding allowance.
    slack = 1e-3 if single else 1e-9
    for i, cell in enumerate(cells):
        assert not symbol._test(cell[None], periods, truth[i] * (1 - 1e-12), table)[0]
        assert symbol._test(cell[None], periods, truth[i] * (1 + slack), table)[0]
        assert torch.linalg.eigvalsh(symbol.at(cell, periods))[-1] == pytest.approx(truth[i], rel=1e-11)
    level = float(np.median(truth))
    below = symbol.below(cells, periods, level).numpy()
    assert not below[truth > level].any()
    assert below[truth < level * (1 - 1e-3)].all()


@pytest.mark.parametrize("degrees", [(2, 2), (1, 3), (0, 2), (4, 0)])
def test_cells_cover_all_frequencies(degrees: tuple[int, int]) -> None:
    symbol, _ = symbol_of(1, 1, 1, degrees[0] + 1, degrees[1] + 1)
    periods = tuple(4 * m if m else 1 for m in degrees)
    cells = first_cells(symbol, periods)  # type: ignore[arg-type]
    # A random part is divided: together they must still cover.
    g = torch.Generator().manual_seed(0)
    chosen = torch.rand(len(cells), generator=g) < 0.4
    finer, fine = divided(cells[chosen], periods)  # type: ignore[arg-type]
    points = torch.rand(2000, 2, generator=g, dtype=torch.float64) * 2 * math.pi
    held = torch.zeros(len(points), dtype=torch.bool)
    for part, per in ((cells[~chosen], periods), (finer, fine)):
        centre = torch.from_numpy(turns(part, per))
        phi = max(m * math.pi / n for m, n in zip(degrees, per, strict=True))
        for sign in (1, -1):
            away = torch.remainder(sign * points[:, None] - centre + math.pi, 2 * math.pi) - math.pi
            angle = (away.abs() * torch.tensor(degrees)).sum(-1) / 2
            held |= (angle <= phi * (1 + 1e-12)).any(1)
    assert bool(held.all())


@pytest.mark.thorough
def test_shares_hold_for_every_pair_of_frequencies() -> None:
    for seed in range(20):
        symbol, kernels = symbol_of(1, 1 + seed % 3, 2, 3, 3, seed=seed)
        w = np.random.default_rng(seed).uniform(0, 2 * np.pi, (400, 2))
        fine = np.stack(np.meshgrid(*[2 * np.pi * np.arange(48) / 48] * 2), -1).reshape(-1, 2)
        values = symbol_norm(kernels[0], fine) ** 2
        top, level = fine[values.argmax()], values.max()
        away = np.abs((w - top + np.pi) % (2 * np.pi) - np.pi)
        phi = away.sum(1)  # degree 2: (2 |d1| + 2 |d2|) / 2
        found = symbol_norm(kernels[0], w) ** 2
        # The peak of the grid is itself up to 1 % below the supremum.
        near = phi < math.pi / 2
        assert (found[near] >= level * (np.cos(phi[near]) ** 2 - 0.04)).all()
        assert (found >= level * (1 - 2 * phi**2 * symbol.curvature / level) - 0.04 * level).all()


@pytest.mark.parametrize("channels", [(1, 1), (3, 2)])
@pytest.mark.parametrize("taps", [(3, 3), (2, 4), (5, 1), (1, 5)])
def test_curvature_lies_between_spectral_and_frobenius_norms(channels: tuple[int, int], taps: tuple[int, int]) -> None:
    for part in (np.s_[:, :], np.s_[:1, :], np.s_[:, :1]):  # the last two depend on one frequency alone
        kernel = torch.zeros(1, *channels, *taps, dtype=torch.float64)
        kernel[..., *part] = symbol_of(*kernel.shape)[1][..., *part]
        f = np.fft.fft2(kernel[0].numpy(), [2 * n - 1 for n in taps])
        a = np.fft.ifft2(np.einsum("oixy,ojxy->xyij", f, f.conj()), axes=(0, 1))
        lags = np.meshgrid(*(np.fft.fftfreq(2 * n - 1, 1 / (2 * n - 1)) for n in taps), indexing="ij")
        reach = np.max([(lag / max(n - 1, 1)) ** 2 for lag, n in zip(lags, taps, strict=True)], 0)
        exact, above = ((reach * np.linalg.norm(a, kind, axis=(2, 3))).sum() for kind in (2, "fro"))
        assert exact * (1 - 1e-12) <= GramSymbol(kernel).curvature <= above * (1 + 1e-12) + 1e-11


def test_the_share_is_sharp() -> None:
    # |F|^2 = 2 + 2 cos 2w for the taps 1, 0, 1: cos^2 of the angle itself.
    kernel = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64).reshape(1, 1, 1, 1, 3)
    symbol = GramSymbol(kernel / 2)
    for n in (8, 16):
        exact = math.cos(2 * math.pi / n) ** 2
        assert fraction(symbol, (1, n), 1.0) == pytest.approx(exact, abs=1e-12)


def test_constant_symbols_need_few_cells() -> None:
    matrix = torch.linalg.qr(torch.randn(20, 20, dtype=torch.float64))[0]
    kernel = torch.zeros(1, 20, 20, 3, 3, dtype=torch.float64)
    kernel[0, :, :, 1, 1] = 0.9 * matrix
    assert fraction(GramSymbol(kernel), (2, 2), 0.81) > 0.999


@pytest.mark.parametrize("side", [1, 2, 5, 16, 17, 30])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_cholesky_says_what_eigenvalues_say(side: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(side)
    a = torch.randn(12, side, side, dtype=torch.complex128, generator=g)
    h = a + a.mH + 1.5 * side**0.5 * torch.eye(side)
    row, column, sign = stored_entries(side, torch.device("cpu"))
    values = h[:, row, column]
    entries = torch.complex(values.real, values.imag * sign).to(dtype).contiguous()
    expected = torch.linalg.eigvalsh(h)[:, 0] > 0
    assert cholesky_succeeds(entries, side).tolist() == expected.tolist()


@pytest.mark.thorough
def test_the_search_finds_the_peak() -> None:
    for seed in range(6):
        _, kernels = symbol_of(2, 4, 3, 3, 5, seed=seed)
        peak = find_peak(kernels)
        w = np.array([[2 * np.pi * p / n for p, n in zip(peak.point, peak.periods, strict=True)]])
        fine = np.stack(np.meshgrid(*[2 * np.pi * np.arange(64) / 64] * 2), -1).reshape(-1, 2)
        largest = max(symbol_norm(k, fine).max() for k in kernels)
        assert symbol_norm(kernels[peak.group], w)[0] >= 0.98 * largest


# Few columns make one product of all pairs of taps, many a call for each tap.
@pytest.mark.parametrize("cin", [2, FEW_COLUMNS // 6, FEW_COLUMNS // 6 + 1])
def test_autocorrelation_is_the_definition(cin: int) -> None:
    kernel = torch.randn(3, cin, 2, 3, dtype=torch.float64)
    full = autocorrelation(kernel)
    assert full.shape == (cin, cin, 3, 5)
    for d1, d2 in half_lags(2, 3).tolist():
        wanted = torch.zeros(cin, cin, dtype=torch.float64)
        for s in range(2):
            for t in range(3):
                if 0 <= s + d1 < 2 and 0 <= t + d2 < 3:
                    wanted += kernel[:, :, s + d1, t + d2].mT @ kernel[:, :, s, t]
        assert torch.allclose(full[:, :, 1 + d1, 2 + d2], wanted)
        assert torch.allclose(full[:, :, 1 - d1, 2 - d2], wanted.mT)


def test_lower_precision_of_products_does_not_enter_the_proof() -> None:
    kernel = torch.randn(40, 32, 3, 3, generator=torch.Generator().manual_seed(3))
    before = torch.get_float32_matmul_precision()
    plain = symbol_sup(kernel)
    try:
        torch.set_float32_matmul_precision("medium")
        symbol, _ = symbol_of(1, 40, 32, 3, 3)
        cells = first_cells(symbol, (8, 8))
        truth = torch.stack([torch.linalg.eigvalsh(symbol.at(cell, (8, 8)))[-1] for cell in cells])
        below = symbol.below(cells, (8, 8), float(truth.median()), room=1.0)
        assert not bool((below & (truth > truth.median())).any())
        assert bool(below[truth < truth.median() * (1 - 1e-3)].all())
        # The search may go elsewhere; the bound stays one.
        assert float(symbol_sup(kernel)) == pytest.approx(float(plain), rel=0.01)
    finally:
        torch.set_float32_matmul_precision(before)
