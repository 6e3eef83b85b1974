"""Which Hermitian matrices of a batch have a Cholesky factorisation that runs to completion, in float64."""

from __future__ import annotations

import torch
from scipy.linalg import lapack
from torch import Tensor

# Below this size the cost of a call is more than that of the factorisation: the batch goes to torch at once.
_SMALL = 16


def cholesky_succeeds(h: Tensor) -> Tensor:
    """Whether the float64 Cholesky factorisation of each matrix completes. ``h`` is overwritten.

    Args:
        h: ``(N, p, p)``, complex128, contiguous, finite. Only one triangle is read.

    Returns:
        bool ``(N,)``.

    Cost:
        ``4/3 p^3`` real operations each; a factorisation that fails stops at the first negative pivot. On a CPU by
        LAPACK in place, which takes half the time of a batched call that copies and clears triangles.

    >>> cholesky_succeeds(torch.stack((torch.eye(20), -torch.eye(20))).to(torch.complex128)).tolist()
    [True, False]
    """
    if h.shape[-1] == 1:
        return h[:, 0, 0].real > 0
    if h.device.type != "cpu" or h.shape[-1] < _SMALL:
        return torch.linalg.cholesky_ex(h)[1] == 0
    # The transpose of a Hermitian matrix, in the memory order of LAPACK, is its conjugate: as definite as itself.
    return torch.tensor([lapack.zpotrf(a.T, lower=0, clean=0, overwrite_a=1)[1] == 0 for a in h.numpy()])
