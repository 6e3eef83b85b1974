"""Whether an ``nn.Conv2d`` has a constrained counterpart of the same shapes, and the kernel that one needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def obstacle(conv: nn.Conv2d) -> str | None:
    """Why no layer of the library maps the same shapes as this convolution, or None.

    Constrained convolutions keep the image size, or divide it by an emulated stride s (the image must be a multiple
    of s): :math:`\\lfloor (H + 2p - k)/s \\rfloor + 1 = H/s` for all such H iff
    :math:`\\lfloor (2p - k)/s \\rfloor = -1` on both axes.

    >>> obstacle(nn.Conv2d(3, 8, 3, stride=2, padding=1)) is None
    True
    >>> obstacle(nn.Conv2d(3, 8, 3))
    'padding 0 with kernel_size 3 and stride 1 changes the image size, expected padding 1'
    """
    if conv.groups != 1:
        return f"groups={conv.groups}, expected 1"
    if conv.dilation != (1, 1):
        return f"dilation={conv.dilation}, expected (1, 1)"
    if len(set(conv.stride)) != 1:
        return f"stride={conv.stride}, expected the same on both axes"
    step = conv.stride[0]
    if isinstance(conv.padding, str):
        return (
            None if conv.padding == "same" or conv.kernel_size == (1, 1) else "padding='valid' changes the image size"
        )
    for k, p in zip(conv.kernel_size, conv.padding, strict=True):
        if (2 * p - k) // step != -1:
            return (
                f"padding {p} with kernel_size {k} and stride {step} changes the image size, "
                f"expected padding {max(0, (k - step + 1) // 2)}"
            )
    return None


def left_padding(conv: nn.Conv2d) -> tuple[int, int]:
    """Pixels before the first one on each axis: the tap that sits on the pixel itself.

    >>> left_padding(nn.Conv2d(1, 1, 5, padding="same")), left_padding(nn.Conv2d(1, 1, 3, padding=1))
    ((2, 2), (1, 1))
    """
    if isinstance(conv.padding, str):
        rows, cols = ((k - 1) // 2 for k in conv.kernel_size)
        return rows, cols
    rows, cols = conv.padding
    return int(rows), int(cols)


def kernel_size(conv: nn.Conv2d) -> tuple[int, int]:
    """Taps that the same convolution has after downsampling by its stride (odd, so that the centre is a pixel).

    A tap at offset d from the pixel lies in the patch ``floor(d / s)``. Without a stride the kernel keeps its size.

    >>> kernel_size(nn.Conv2d(3, 8, 7, stride=2, padding=3)), kernel_size(nn.Conv2d(3, 8, 2, stride=2))
    ((5, 5), (1, 1))
    """
    step = conv.stride[0]
    if step == 1:
        rows, cols = conv.kernel_size
        return rows, cols
    sizes = []
    for k, p in zip(conv.kernel_size, left_padding(conv), strict=True):
        reach = max(-(-p // step), (k - 1 - p) // step)
        sizes.append(2 * reach + 1)
    return sizes[0], sizes[1]


def unstrided_kernel(conv: nn.Conv2d) -> Tensor:
    """The kernel ``(cout, s^2 cin, kh, kw)`` that gives the same map after invertible downsampling.

    Equal to the convolution itself away from the border, and everywhere if its padding is circular.

    >>> unstrided_kernel(nn.Conv2d(3, 8, 3, stride=2, padding=1)).shape
    torch.Size([8, 12, 3, 3])
    """
    step = conv.stride[0]
    weight = conv.weight.detach()
    if step == 1:
        return weight.clone()
    cout, cin, kh, kw = weight.shape
    (rows, cols), (top, left) = kernel_size(conv), left_padding(conv)
    kernel = torch.zeros(cout, cin, step, step, rows, cols, device=weight.device, dtype=weight.dtype)
    for i in range(kh):
        for j in range(kw):
            (patch_i, inner_i), (patch_j, inner_j) = divmod(i - top, step), divmod(j - left, step)
            kernel[:, :, inner_i, inner_j, patch_i + rows // 2, patch_j + cols // 2] = weight[:, :, i, j]
    return kernel.flatten(1, 3)
