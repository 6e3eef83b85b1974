"""Whether torch is transforming functions: what writes into memory of its own must give way then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lipkit.errors import OptionError


def transformed() -> bool:
    """Whether ``torch.func`` (vmap, jvp, grad, ...), a batch of gradients or a dual number is at work.

    These follow torch's own operations, not those that write into memory of ours: pure functions take another way then.

    >>> transformed(), torch.func.vmap(lambda x: x if transformed() else 2 * x)(torch.ones(2))
    (False, tensor([1., 1.]))
    """
    # torch has no public getter of either; where a private one is missing nothing is at work.
    active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
    return bool(active()) or getattr(forward_ad, "_current_level", -1) >= 0


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
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(a):
        a = functorch.get_unwrapped(a)
    if functorch.is_batchedtensor(a):
        raise OptionError("expected one matrix or kernel to prove a bound for, got a batch of torch.func.vmap")
    with temporarily_clear_interpreter_stack():
        yield a.detach()
