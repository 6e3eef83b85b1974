"""Folders as a run leaves them, for the checker: a network, its certificate, its samples."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import lipkit
import lipkit_check
from lipkit import layers
from lipkit.certificates.certificate_file import describe, write_certificate
from lipkit.data import load

_digits = cache(lambda: load("digits").test)


def digits(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first test images and labels."""
    x, y = _digits().batch(slice(0, count))
    return x.clone(), y.clone()


def tiny() -> nn.Module:
    """A network of a Fourier convolution, one of windows, and two dense layers, which takes little time to check."""
    return nn.Sequential(
        layers.CayleyConv2d(1, 4, 3), layers.MaxMin(), layers.CayleyConv2d(4, 8, 2, stride=2), layers.MaxMin(),
        nn.Flatten(), layers.CayleyLinear(128, 32), layers.MaxMin(), layers.NormalizedLinear(32, 10),
    )  # fmt: skip


def write_run(folder: Path, model: nn.Module, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
    """Export, certify and write; labels are the network's own for all but the last samples, unless given."""
    plain = lipkit.export(model.eval(), tuple(x.shape[1:]))
    plain.input_range = (float(x.min()), float(x.max()))
    if y is None:
        with torch.no_grad():
            y = plain.double()(x.double()).argmax(1)
        plain = plain.float()
        y[-2:] = (y[-2:] + 1) % plain(x[:1]).shape[1]
    certificate = lipkit.certify(plain, x, y)
    lipkit.save(plain, folder / "network")
    write_certificate(describe(certificate, plain, x, y, "toy"), folder / "certificate.jsonl")
    nothing = np.zeros((1, *x.shape[1:]), np.float32), np.zeros(1, np.int64)
    arrays = dict(zip(("x_train", "y_train", "x_test", "y_test"), (*nothing, x.numpy(), y.numpy()), strict=True))
    np.savez(folder / "samples.npz", **arrays)
    return certificate


def verdict(folder: Path, *options: str) -> int:
    """The exit code."""
    return lipkit_check.main([str(folder), str(folder / "samples.npz"), *options])
