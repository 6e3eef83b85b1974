"""Transforms of functions by torch: what writes into memory of its own must give way to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from lipkit.errors import OptionError
from lipkit.linalg.torch_private import functions_transformed, without_transforms


def transformed() -> bool:
    """Whether ``torch.func`` (vmap, jvp, grad, ...), a batch of gradients or a dual number is at work.

    These follow torch's own operations, not those that write into memory of ours: pure functions take another way then.

    >>> transformed(), torch.func.vmap(lambda x: x if transformed() else 2 * x)(torch.ones(2))
    (False, tensor([1., 1.]))
    """
    return functions_transformed()


def differentiated(a: Tensor) -> bool:
    """Whether a derivative with respect to ``a`` may be taken: through its graph, or by a transform.

    >>> differentiated(torch.ones(1)), differentiated(torch.ones(1, requires_grad=True))
    (False, True)
    """
    return (torch.is_grad_enabled() and a.requires_grad) or transformed()


@contextlib.contextmanager
def outside(a: Tensor) -> Iterator[Tensor]:
    """The numbers of ``a``, apart from its graph and tangent, where no transform of ``torch.func`` is at work.

    For proofs, which look at numbers and hand them to other libraries. They are constants to what is around.

    Raises:
        OptionError: ``a`` is a batch of ``torch.func.vmap``.

    >>> def twice(x):
    ...     with outside(x) as numbers:
    ...         size = float(numbers.numpy().sum())
    ...     return x.sum() * size
    >>> torch.func.grad(twice)(torch.ones(2))
    tensor([2., 2.])
    """
    if not transformed():
        yield a.detach()
        return
    with without_transforms(a) as numbers:
        if numbers is None:
            raise OptionError("expected one matrix or kernel to prove a bound for, got a batch of torch.func.vmap")
        yield numbers
