"""Which Hermitian matrices of a batch have a Cholesky factorisation that runs to completion, in float64 or float32.

Matrices come as a list of stored entries. On a CPU that list is LAPACK's rectangular full packed format, half of the
matrix in the order in which its blocked factorisation reads it: half of the work to form, none to copy.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.linalg import lapack
from torch import Tensor

# Below this size a call costs more than the factorisation itself, so torch factorises the whole batch in one call.
_SMALL = 16


def _packed(side: int, device: torch.device) -> bool:
    return device.type == "cpu" and side >= _SMALL


def stored_entries(side: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and sign of the imaginary part of each entry that :func:`cholesky_succeeds` reads, each ``(E,)``.

    >>> row, column, sign = stored_entries(2, torch.device("cpu"))
    >>> row.tolist(), column.tolist()
    ([0, 0, 1, 1], [0, 1, 0, 1])
    >>> len(stored_entries(20, torch.device("cpu"))[0])
    210
    """
    if not _packed(side, device):
        row, column = torch.cartesian_prod(torch.arange(side), torch.arange(side)).reshape(-1, 2).unbind(1)
        return row.to(device), column.to(device), torch.ones(side * side, dtype=torch.float64, device=device)
    # LAPACK itself says where each entry goes, and which ones it conjugates.
    marks = np.arange(side * side).reshape(side, side) + 1j
    packed = lapack.ztrttf(np.asfortranarray(marks), transr="N", uplo="L")[0]  # type: ignore[attr-defined]
    row, column = np.divmod(packed.real.astype(np.int64), side)
    return torch.from_numpy(row), torch.from_numpy(column), torch.from_numpy(packed.imag.copy())


def cholesky_succeeds(entries: Tensor, side: int) -> Tensor:
    """True for each matrix whose Cholesky factorisation completes. ``entries`` is overwritten.

    Args:
        entries: ``(N, E)``, complex128 or complex64, contiguous, finite: those of :func:`stored_entries`, the
            imaginary parts times their signs.
        side: number of rows of each matrix.

    Returns:
        bool ``(N,)``.

    Cost:
        ``4/3 side^3`` real operations each; a factorisation that fails stops at the first negative pivot.

    >>> row, column, _ = stored_entries(20, torch.device("cpu"))
    >>> identity = (row == column).to(torch.complex128)
    >>> cholesky_succeeds(torch.stack((identity, -identity)), 20).tolist()
    [True, False]
    """
    if side == 1:
        return entries[:, 0].real > 0
    if not _packed(side, entries.device):
        return torch.linalg.cholesky_ex(entries.unflatten(1, (side, side)))[1] == 0
    factor = getattr(lapack, "zpftrf" if entries.dtype == torch.complex128 else "cpftrf")
    return torch.tensor(
        [factor(side, a, transr="N", uplo="L", overwrite_a=1)[1] == 0 for a in entries.numpy()], dtype=torch.bool
    )
