"""A batch normalisation and the linear layer beside it as one linear layer."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from lipkit.bounds.rounding import gamma, to_double, up
from lipkit.protocol import lipschitz_parts

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
