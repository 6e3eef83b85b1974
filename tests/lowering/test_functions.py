"""Functions of torch as plain modules: the same numbers, and a constant that no Jacobian exceeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit import analyze, export, lipschitz
from lipkit.errors import NoRuleError
from lipkit.interop import load_program
from lipkit.testing.reference import jacobians

SHAPE = (3, 6)


class Net(nn.Module):
    def __init__(self, f: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.f, self.linear, self.columns = f, nn.Linear(6, 6), nn.Unfold(2, padding=1, stride=2)
        self.w, self.m = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(3, 6))
        self.soft, self.least, self.pixels = nn.Softmax(dim=-1), nn.Softmin(dim=2), nn.Softmax2d()
        self.register_buffer(
            "both", torch.tensor([[[1, 0], [0, 0], [0, 1]], [[0, 0], [1, 0], [0, 1]]]).bool().repeat(1, 1, 3)
        )
        self.register_buffer("gaps", torch.tensor([[1, 0, 0, 1, 0, 1], [0, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0]]).bool())
        self.register_buffer("runs", torch.tensor([[1, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]).bool())

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, x)


def _softmax_and_sum(x: Tensor) -> Tensor:
    return x.softmax(-1) + x


CAUSAL = torch.ones(3, 3, dtype=torch.bool).triu(1)  # what is hidden

# Name: function of the network and the input.
SAME: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "largest along a dimension": lambda s, x: x.max(1)[0],
    "its values by name": lambda s, x: torch.max(s.linear(x), dim=2).values,
    "smallest": lambda s, x: x.min(-1, keepdim=True).values,
    "largest of two dimensions": lambda s, x: x.amax((1, 2)),
    "smallest of the first": lambda s, x: torch.amin(x, dim=1, keepdim=True),
    "largest, the batch second": lambda s, x: x.transpose(0, 1).max(0)[0],
    "largest, the batch last": lambda s, x: x.permute(2, 1, 0).amax(0).T,
    "larger than a constant": lambda s, x: torch.maximum(x, s.w),
    "smaller than a constant": lambda s, x: torch.minimum(s.m, 2 * x),
    "torch.min of a value and a constant": lambda s, x: torch.min(x, other=s.w),
    "smaller of two values": lambda s, x: x.min(x.tanh()),
    "limits that are tensors": lambda s, x: x.clamp(min=s.w, max=s.w + 1),
    "limits that are tensors and numbers": lambda s, x: torch.clamp(x, -1.0).clamp(max=s.m),
    "a limit without dimensions": lambda s, x: x.clamp(torch.tensor(-0.5), torch.tensor(1.0)),
    "limits that move": lambda s, x: x.clamp(-5 * x.flip(2), 3 * x.amax(2, keepdim=True)),
    "a limit that moves": lambda s, x: s.linear(x).clamp_max(4 * x),
    "crossed limits": lambda s, x: x + x.clamp(s.w + 1, s.w),
    "absolute values": lambda s, x: s.linear(x).abs() - torch.abs(x),
    "three largest": lambda s, x: s.linear(x).topk(3)[0],
    "two smallest, by name": lambda s, x: torch.topk(x, k=2, dim=1, largest=False).values,
    "two largest, the batch second": lambda s, x: torch.topk(x.transpose(0, 1), 2, 0)[0].sum(0),
    "repeated": lambda s, x: x.repeat(1, 2, 3),
    "tiles": lambda s, x: torch.tile(x, (2,)),
    "narrow": lambda s, x: x.narrow(-1, -3, 2),
    "chunks by name": lambda s, x: torch.chunk(input=x, chunks=2, dim=2)[1],
    "pieces by name": lambda s, x: x.split(split_size=2, dim=-1)[1],
    "numbers around": lambda s, x: F.pad(x, (1, 0, 0, 2), value=1.5),
    "a mask": lambda s, x: torch.where(s.w > 0, x, s.linear(x)),
    "a mask and a constant": lambda s, x: torch.where(s.m > 0, s.w, x),
    "a mask, the batch last": lambda s, x: torch.where(
        s.w[:, None, None] > 0, x.permute(2, 1, 0), -x.permute(2, 1, 0)
    ).permute(2, 1, 0),
    "filled by a mask": lambda s, x: x.masked_fill(s.m > 0, 0.5),
    "hidden": lambda s, x: (x @ s.linear.weight[:3].T).masked_fill(CAUSAL, -math.inf).softmax(-1) @ s.m,
    "hidden by a sum": lambda s, x: s.soft(x[..., :3] + torch.full((3, 3), -math.inf).triu(1)),
    "hidden by a choice": lambda s, x: torch.where(~CAUSAL, x[..., :3], -math.inf).softmax(dim=2),
    "hidden columns": lambda s, x: torch.softmax(x[:, :, 3:].masked_fill(CAUSAL.T, -math.inf), 1),
    "hidden in runs": lambda s, x: F.softmax(s.linear(x).masked_fill(s.runs, -math.inf), -1),
    "hidden, the same in all rows": lambda s, x: (x.masked_fill(s.runs[0], -math.inf) + s.m).softmax(-1),
    "hidden twice": lambda s, x: (x.masked_fill(s.runs, -math.inf) + (torch.arange(6) > 0).log()).softmax(-1),
    "hidden, the batch second": lambda s, x: (
        x.transpose(0, 1).clone().masked_fill_(s.runs[:, None], -math.inf).softmax(-1).transpose(0, 1)
    ),
    "hidden beside moving terms": lambda s, x: (x.masked_fill(s.runs, -math.inf) + s.linear(x).tanh()).softmax(-1),
    "hidden with gaps": lambda s, x: (
        (x + (torch.arange(6) % 2).log()).softmax(-1) + x.masked_fill(s.gaps, -math.inf).softmax(2)
    ),
    "hidden with gaps, along the first": lambda s, x: torch.softmax(
        s.linear(x).masked_fill(s.gaps.T[:3, 1:2], -math.inf), dim=1
    ),
    "deviations": lambda s, x: x.std(-1) + torch.std(x.transpose(0, 1), (0, 2), unbiased=False)[:, None],
    "deviations by name": lambda s, x: s.linear(x).std(dim=(1, 2), correction=3, keepdim=True) + x,
    "similarities": lambda s, x: F.cosine_similarity(x[:, None], s.m[None, :, None], dim=-1, eps=0.1),
    "similarities of columns": lambda s, x: torch.cosine_similarity(x1=x, x2=s.m[None], eps=0.5),
    "distances of pairs": lambda s, x: (
        F.pairwise_distance(x, s.m, keepdim=True)[..., 0] - F.pairwise_distance(s.w, x, eps=1.0)
    ),
    "distances to centres": lambda s, x: torch.cdist(x, s.m) + torch.cdist(x, x, p=2.0),
    "smallest share": lambda s, x: F.softmin(x, dim=1) + s.least(x) - s.pixels(x[..., None])[..., 0],
    "thresholds": lambda s, x: F.threshold(x, 0.25, 0.25) + F.threshold(s.linear(x), -1.0, -1.0, True),
    "instances": lambda s, x: F.instance_norm(x, weight=s.w[:3], eps=0.2) + F.instance_norm(x, eps=0.5),
    "products with a factor": lambda s, x: torch.addmm(s.w, x[:, 0], s.linear.weight, beta=3, alpha=-2),
    "a vector": lambda s, x: x @ s.w,
    "side by side": lambda s, x: torch.hstack((x, x.tanh())),
    "constants in between": lambda s, x: torch.cat(
        [torch.ones_like(x), x[:, :, :1], x.new_full((1, 3, 2), 2.0).expand(x.shape[0], -1, -1), x], -1
    ),
    "rotations": lambda s, x: torch.stack(
        [(t := x[:, 0]).cos(), -t.sin(), torch.zeros_like(t), t.sin(), t.cos(), z := t.new_zeros(t.shape), z, z, z + 1],
        1,
    ).unflatten(1, (3, 3)),
    "stacked with rows, the batch second": lambda s, x: torch.stack(
        [torch.ones(3, x.shape[0], 6).chunk(2, 2)[1], x[:, :, :3].transpose(0, 1), torch.zeros(3, x.shape[0], 3)], 0
    ).movedim(2, 0),
    "expanded as the input": lambda s, x: torch.cat((s.w.expand_as(x), s.linear(x), x[:, :1].expand_as(x)), 2),
    "dropouts": lambda s, x: F.alpha_dropout(F.dropout1d(x, 0.5, s.training), 0.5, s.training),
    "subtracted from": lambda s, x: torch.rsub(x, s.w, alpha=2) + (1 - x).double().to(x.dtype),
    "signs": lambda s, x: torch.negative(torch.positive(x)),
    "a pool without strides": lambda s, x: F.avg_pool1d(x, 2, ()),
    "windows that overlap": lambda s, x: x.unfold(1, 2, 1).unfold(dimension=-2, size=3, step=2) @ s.m,
    "patches": lambda s, x: x.transpose(0, 2).unfold(0, 2, 2).transpose(0, 2),
    "columns": lambda s, x: F.unfold(x[:, None], (2, 3), (1, 2), (1, 0), 2),
    "columns of a module": lambda s, x: s.columns(torch.stack((x, x.tanh()), 1)),
    "running sums": lambda s, x: x.cumsum(1) + torch.cumsum(x, dim=-1),
    "copies beside each other": lambda s, x: x.repeat_interleave(3, dim=-1),
    "copies, some more": lambda s, x: torch.repeat_interleave(x, torch.tensor([2, 0, 1]), 1),
    "norms": lambda s, x: x.norm(dim=1) + torch.linalg.vector_norm(s.linear(x), dim=1),
    "norms of two dimensions": lambda s, x: torch.linalg.norm(x, dim=(1, 2)) + torch.norm(x, 2, (1, 2)),
    "distances": lambda s, x: (x[:, :, None] - s.m).norm(p=2, dim=-1),
    "a norm, the batch second": lambda s, x: torch.norm(x.transpose(0, 1), "fro", 0),
    "products along dimensions": lambda s, x: (
        torch.tensordot(x, s.m, dims=([1, 2], [0, 1]))[:, None]
        + torch.tensordot(x, s.linear.weight, 1).sum(2)
        - torch.tensordot(s.m, x.movedim(0, 1), dims=([0], [0])).movedim(0, 1)[..., 0].mean(1, keepdim=True)
    ),
    "inner products": lambda s, x: torch.inner(x, s.w) + torch.inner(x, s.m) @ s.w[:3],
    "products of linalg": lambda s, x: torch.linalg.matmul(x, s.m.T),
    "a bilinear form of a constant": lambda s, x: F.bilinear(
        s.w.expand(x.shape[0], 3, 6), x, s.m[None].repeat(6, 2, 1), s.w
    ),
    "deviations and means": lambda s, x: torch.cat(torch.std_mean(x, (1, 2), keepdim=True), 2),
    "a turn": lambda s, x: torch.rot90(x, 1, (1, 2)) - x.rot90(-3, (-2, -1)) + 2 * torch.rot90(x, 3, (2, 1)),
    "half a turn": lambda s, x: x.rot90(2, (1, 2)) @ s.linear.weight + torch.fliplr(x) + torch.rot90(x, 4, (1, 2)),
    "shuffled channels": lambda s, x: torch.channel_shuffle(x.transpose(1, 2), 3) * s.w[:, None],
    "columns put together": lambda s, x: F.fold(
        F.unfold(x[:, None], (2, 3), (2, 1), (1, 2), (2, 1)), (3, 6), (2, 3), (2, 1), (1, 2), (2, 1)
    ),
    "columns put apart": lambda s, x: F.fold(x[:, :1].repeat(1, 4, 1)[..., 2:], (3, 5), 2, 1, 0, (1, 3)),
    "numbers of numpy": lambda s, x: (
        np.float32(1.5) * x + x / np.float64(3) - np.float32(0.25) + x[..., np.array([5, 0])].sum(-1, keepdim=True)
    ),
    "the format asked for": lambda s, x: (
        x + torch.finfo(x.dtype).eps * {x.dtype: 2.0}[s.linear(x).dtype] + (x.device.type == "cpu") * x.tanh()
    ),
    "products added": lambda s, x: torch.addcmul(x, s.linear(x), s.w, value=-2) + s.w.addcmul(x, s.m),
    "differences": lambda s, x: (
        torch.diff(x, dim=1)[:, :1] * s.w + x.diff(2, -1, x[..., :1], append=x[..., 4:5]) + x[:, :2].diff(dim=1)
    ),
    "lengths": lambda s, x: torch.hypot(x, s.linear(x)) - x.hypot(2 * x.flip(2)),
    "functions of equal rows": lambda s, x: torch.cat(
        (-torch.exp(s.w.expand_as(x)), x, torch.zeros_like(x[..., :1]).repeat(1, 1, 6).matmul(s.linear.weight) ** 2), 2
    ),
    "modules made on the way": lambda s, x: nn.Sequential(nn.Softplus(), nn.ELU(inplace=True))(x) + nn.Softmax(1)(x),
    "products by name": lambda s, x: torch.addmm(s.w, mat1=x.mean(1), mat2=s.linear.weight),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SAME)
def test_the_same_numbers_and_no_jacobian_above_the_constant(name: str) -> None:
    torch.manual_seed(1)
    net, x = Net(SAME[name]).double().eval(), 2 * torch.randn(4, *SHAPE, dtype=torch.float64)
    plain = export(net, SHAPE)
    with torch.no_grad():
        torch.testing.assert_close(plain(x).reshape(net(x).shape), net(x))

    def flat(x: Tensor) -> Tensor:
        return plain(x).reshape(len(x), -1)

    slope = max(float(torch.linalg.matrix_norm(torch.as_tensor(j), 2)) for j in jacobians(flat, x))
    for constant in (lipschitz(plain), analyze(net, SHAPE, restarts=0).upper):
        assert slope <= float(constant) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda s, x: x.masked_fill(s.m > 0, -math.inf).amax(-1), r"masked_fill .*: expected finite numbers"),
        (lambda s, x: 2 * (x + (s.m > 0).log()), r"operator.add .*: expected finite numbers, .*in front of a softmax"),
        (
            lambda s, x: _softmax_and_sum(x[..., :3].masked_fill(CAUSAL, -math.inf)),
            r"operator.add .*: expected finite numbers",
        ),
        (lambda s, x: (x - (s.m > 0).log()).softmax(-1), r"operator.sub .*: expected finite numbers"),
        (
            lambda s, x: x.masked_fill(s.w > -99, -math.inf).softmax(-1),
            r"softmax .*: expected a number in each row of a mask, got a row of -inf alone",
        ),
        (
            lambda s, x: torch.stack((x, x), 1).masked_fill(s.both, -math.inf).softmax(-1),
            "varies along -1 and one other, got",
        ),
        (lambda s, x: torch.maximum(x, s.w / 0), r"torch\.maximum .*: expected finite numbers as limits"),
        (lambda s, x: F.pad(x, (1, 1), value=math.inf), "expected a finite number around the input, got inf"),
        (lambda s, x: x.max(1)[1], "whole numbers, bits and truth values jump"),
        (lambda s, x: x.max(1)[0] + x.max(1)[1], "whole numbers, bits and truth values jump"),
        (lambda s, x: x.max(0)[0], "mixes the batch with other dimensions"),
        (lambda s, x: x.transpose(0, 1).amax(1), "mixes the batch with other dimensions"),
        (lambda s, x: x.repeat(2, 1, 1), "mixes the batch with other dimensions"),
        (lambda s, x: x.topk(2, 0)[0].sum(0), "mixes the batch with other dimensions"),
        (lambda s, x: (-2.0) ** x, "expected a base > 0, got -2.0"),
        (lambda s, x: torch.where(x > 0, x, -x), "whole numbers, bits and truth values jump"),
    ],
)
def test_refused(f: Callable[[Any, Tensor], Tensor], words: str) -> None:
    with pytest.raises(NoRuleError, match=words):
        export(Net(f).eval(), SHAPE)


BOXED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "variance": lambda s, x: s.linear(x).var(-1) + torch.var(x.transpose(0, 1), (0, 2), unbiased=False)[:, None],
    "variance and mean": lambda s, x: torch.cat(torch.var_mean(x, (1, 2), correction=2, keepdim=True), 2),
    "an unbiased normalisation": lambda s, x: (x - x.mean(1, True)) * torch.rsqrt(x.var(1, keepdim=True) + 0.1),
    "a bilinear form": lambda s, x: F.bilinear(s.linear(x), x, s.m[None].repeat(6, 2, 1), s.w) + s.pairs(x, x),
    "products of pairs": lambda s, x: torch.baddbmm(x.mT @ x, x.mT, s.linear(x), beta=0.5, alpha=2),
    "powers of numbers": lambda s, x: 2**x - torch.pow(s.w.abs() + 0.1, s.linear(x)) + torch.pow(0.5, x[:, :1]),
    "interpolations": lambda s, x: torch.lerp(x, s.linear(x), x.sigmoid()) + torch.lerp(x, s.w.expand_as(x), weight=x),
    "neighbours": lambda s, x: F.local_response_norm(x, 3, 0.5) - F.local_response_norm(s.linear(x), 2, k=2.0),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", BOXED)
def test_products_on_a_box(name: str) -> None:
    torch.manual_seed(1)
    net = Net(BOXED[name])
    net.pairs = nn.Bilinear(6, 6, 6)
    net, x = net.double().eval(), torch.rand(6, *SHAPE, dtype=torch.float64)
    x[3:] = x[3:].round()  # corners
    plain = export(net, SHAPE, box=(0, 1))
    with torch.no_grad():
        torch.testing.assert_close(plain(x).reshape(net(x).shape), net(x))
    slope = max(
        float(torch.linalg.matrix_norm(j, 2)) for j in map(torch.as_tensor, jacobians(lambda v: net(v).flatten(1), x))
    )
    assert slope <= float(lipschitz(plain)) <= 100 * slope
    for verb in (export, analyze):
        with pytest.raises(NoRuleError, match=r"no Lipschitz constant on all of space.*box"):
            verb(net, SHAPE)


READ = ("largest along a dimension", "larger than a constant", "absolute values", "numbers around", "subtracted from")


@pytest.mark.thorough
@pytest.mark.parametrize("name", READ)
def test_programs_have_the_functions_of_torch(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    net, x = Net(SAME[name]).eval(), torch.randn(4, *SHAPE)
    batch = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(net, (x,), dynamic_shapes=batch), tmp_path / "net.pt2")
    found = load_program(tmp_path / "net.pt2")
    torch.testing.assert_close(found(x), net(x))
    assert float(lipschitz(found)) == pytest.approx(float(lipschitz(net, SHAPE).detach()), rel=1e-6)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_a_resizing_is_bounded_by_its_exact_weights(mode: str) -> None:
    resize = nn.Upsample(size=(8, 8), mode=mode, align_corners=True)
    units = torch.eye(35, dtype=torch.float64).view(35, 1, 5, 7)
    norm = float(torch.linalg.matrix_norm(resize(units).flatten(1), 2))
    for bound in (lipschitz(resize, (1, 5, 7)), analyze(resize, (1, 5, 7), restarts=0).upper):
        assert norm * (1 - 1e-14) <= float(bound) <= norm * (1 + 1e-12)  # in float32 weights it was 5e-8 lower


def test_circular_padding_by_entries_that_are_cut_off_is_refused() -> None:
    # Torch then reads memory that nothing was written to: the module has no function.
    for pad in ((-2, 3), (3, -1), (-3, 1)):
        with pytest.raises(NoRuleError, match=r"expected circular padding by the -?\d+ entries that are kept, got"):
            lipschitz(nn.CircularPad2d((0, 1, *pad)), (4, 3, 4))
    layer, x = nn.CircularPad2d((2, -2, -1, 2)), torch.randn(2, 1, 3, 4)
    assert torch.equal(export(layer, (1, 3, 4))(x), layer(x))
