"""The batch anywhere among the dimensions: exported as it computes where samples stay apart, else refused."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit import analyze, export, lipschitz
from lipkit.errors import NoRuleError, ShapeError
from lipkit.lowering.tracing import batch_axis
from lipkit.testing.reference import jacobians

M, V, I, G = (3, 4), (4,), (4, 4, 8), (5, 8)  # noqa: E741
Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, f: Forward) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.f = f
        self.w, self.cls = nn.Parameter(torch.empty(4, 4)), nn.Parameter(torch.empty(1, 1, 4))
        self.a, self.qkv, self.layer = nn.Linear(4, 4), nn.Linear(8, 24), nn.LayerNorm(4, eps=0.5)
        self.bias, self.mask = nn.Parameter(torch.empty(2, 4, 4)), nn.Parameter(torch.empty(4, 4, 4))
        self.gelu, self.norm, self.soft, self.conv = nn.GELU(), nn.BatchNorm1d(4), nn.Softmax(-1), nn.Conv1d(4, 4, 1)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, x)


def attention(s: Net, x: Tensor) -> Tensor:
    """As timm writes it; of windows, too, whose batch is merged."""
    n, length, width = x.shape
    q, k, v = s.qkv(x).reshape(n, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
    weights = q @ k.transpose(-2, -1) * (width // 2) ** -0.5
    return (weights.softmax(-1) @ v).transpose(1, 2).reshape(n, length, width)


def picked(s: Net, x: Tensor) -> Tensor:
    n, length, width = x.shape
    qkv = s.qkv(x).reshape(n, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
    q, k, v = qkv[0], qkv[1], qkv[2]
    return ((0.5 * q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(n, length, width)


def windows_back(s: Net, x: Tensor) -> Tensor:
    """As SAM writes it: the number of samples is that of the windows over the windows of one."""
    n, h, w, c = x.shape
    windows = x.view(n, h // 2, 2, w // 2, 2, c).transpose(2, 3).reshape(-1, 4, c)
    windows = s.qkv(windows)[..., 4:12].softmax(1)
    n = windows.shape[0] // (h * w // 4)
    windows = windows.reshape(n * h // 2, w // 2, 2, 2, -1)  # of all samples, as MobileViT does
    return windows.view(n, h // 2, w // 2, 2, 2, -1).transpose(2, 3).reshape(n, h, w, -1)


def sizes_behind(s: Net, x: Tensor) -> Tensor:
    n = x.flatten(0, 1).shape[0] // 5
    moved = x.transpose(0, 1).relu()
    length, b, width = moved.shape
    last = moved.transpose(0, 1)
    return last.reshape(n, length * width) + last.reshape(b, length * width)


def heads_in_the_batch(s: Net, x: Tensor) -> Tensor:
    """As nn.MultiheadAttention computes: tokens first, heads merged with the batch."""
    x = x.transpose(0, 1)
    length, n, width = x.shape
    q, k, v = (t.reshape(length, n * 2, width // 2).transpose(0, 1) for t in s.qkv(x).chunk(3, -1))
    y = torch.bmm((0.5 * torch.bmm(q, k.mT)).softmax(-1), v)
    return y.transpose(0, 1).reshape(length, n, width).transpose(0, 1)


def windows(s: Net, x: Tensor) -> Tensor:
    n, height, width, c = x.shape
    y = x.roll((-1, -1), (1, 2))
    y = y.view(n, height // 2, 2, width // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
    rows, length, _ = y.shape
    q, k, v = s.qkv(y).reshape(rows, length, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
    weights = 0.5 * q @ k.transpose(-2, -1) + s.bias.unsqueeze(0)
    weights = weights.view(rows // 4, 4, 2, length, length) + s.mask.unsqueeze(1).unsqueeze(0)
    y = (weights.view(-1, 2, length, length).softmax(-1) @ v).transpose(1, 2).reshape(rows, length, c)
    y = y.view(n, height // 2, width // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(n, height, width, c)
    return x + y.roll((1, 1), (1, 2))


def tokens_first(s: Net, x: Tensor) -> Tensor:
    x = x.permute(1, 0, 2)
    _, n, width = x.shape
    x = torch.cat((s.cls.expand(-1, n, -1), x))
    x = s.layer(s.gelu(s.a(x)) + x) * s.w[:, None, :]
    return x[0] + x[1:].mean(0) - x.reshape(2, 2, n, width).sum((0, 1))


def latents(s: Net, x: Tensor) -> Tensor:
    """Stored queries, the same for each sample, attend to the sample, in two heads."""
    n, length, width = x.shape
    q = s.a(s.w.expand(n, -1, -1)).reshape(n, 4, 2, 2).transpose(1, 2)
    k, v = (t.view(n, length, 2, -1).transpose(1, 2) for t in (s.a(x), x))
    return ((0.5 * q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(n, 4, width)


def contracted_latents(s: Net, x: Tensor) -> Tensor:
    q = s.a(s.w.repeat(x.size(0), 1, 1))
    return torch.einsum("bij,bjd->bid", torch.einsum("bid,bjd->bij", q, s.a(x)).softmax(-1), x) + q


def steps(s: Net, x: Tensor) -> Tensor:
    for t in torch.tensor([0.0, 0.5]):
        time = t * torch.ones_like(x[:, :1])
        x = x + 0.5 * torch.tanh(s.a(torch.cat((x[:, :3], time), 1)))
    return x


def contracted_heads(s: Net, x: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in s.qkv(x).chunk(3, -1))
    weights = torch.einsum("bhid,bhjd->bhij", 0.5 * q, k).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v).transpose(1, 2).flatten(2)


# With products of two moving values, on a box.
ATTENTION: dict[str, tuple[tuple[int, ...], Forward]] = {
    "unbound": (G, attention),
    "picked": (G, picked),
    "heads in the batch": (G, heads_in_the_batch),
    "contracted heads": (G, contracted_heads),
    "divided by lengths": (M, lambda s, x: x / (s.a(x).norm(dim=-1, keepdim=True) + 1)),
    "response": (M, lambda s, x: (g := x.norm(dim=1, keepdim=True), x + x * g / (g.mean(-1, True) + 0.5))[1]),
    "stored queries": (M, latents),
    "stored queries, contracted": (M, contracted_latents),
    "contracted, tokens first": (
        M,
        lambda s, x: torch.einsum("ibd,jbd->bij", 0.1 * x.transpose(0, 1), s.a(x).transpose(0, 1)),
    ),
    "contracted to a number": (V, lambda s, x: torch.einsum("bi,bi->b", x, s.a(x))),
    "outer products": (M, lambda s, x: torch.einsum("bni,bnj->bjni", 0.1 * x, s.a(x))),
    "windows": (I, windows),
    "products of rows": (M, lambda s, x: (0.1 * x.permute(1, 0, 2) * s.a(x).permute(1, 0, 2)).transpose(0, 1)),
}
RIGHT: dict[str, tuple[tuple[int, ...], Forward]] = {
    "tokens first": (M, tokens_first),
    "class token": (M, lambda s, x: torch.cat((s.cls.expand(x.shape[0], -1, -1), x), dim=1) + s.w),
    "class token behind": (M, lambda s, x: torch.cat((x, s.a(x), s.cls.repeat(x.size(0), 1, 1)), dim=1)),
    "zeros around": (V, lambda s, x: torch.cat((torch.zeros_like(x), x, x.new_ones(x.shape[0], 1)), -1)),
    "rows added": (V, lambda s, x: x + s.w[0].expand(x.shape[0], -1) - torch.ones_like(x)),
    "rows of an activation": (V, lambda s, x: torch.tanh(s.a(x)) - torch.tanh(s.a(torch.zeros_like(x)))),
    "rows of time": (V, steps),
    "contracted with rows": (V, lambda s, x: torch.einsum("bi,bi->bi", x, torch.ones_like(x))),
    "mean of several": (V, lambda s, x: torch.stack([s.a(x), x, x.relu()]).mean(0)),
    "smaller of several": (V, lambda s, x: torch.min(torch.stack((s.a(x), -x), dim=0), dim=0).values),
    "stacked and permuted": (M, lambda s, x: torch.stack((x, s.a(x)), -4).permute(2, 1, 0, 3).transpose(0, 1)),
    "stacked, tokens first": (M, lambda s, x: torch.stack((y := x.transpose(0, 1), 2 * y), 2).permute(1, 3, 2, 0)),
    "stacked, merged": (M, lambda s, x: torch.stack((y := x.flatten(0, 1), s.a(y)), 1).view(-1, 3, 2, 4)),
    "matrices for each": (M, lambda s, x: x[:, :2, None].relu() @ s.mask[:2]),
    "matrices for each from the left": ((4, 4, 3), lambda s, x: torch.matmul(s.mask, x)),
    "matrices for each, repeated": ((4, 3, 4), lambda s, x: x @ s.mask.expand(x.shape[0], -1, -1, -1)),
    "matrices of several": (V, lambda s, x: torch.bmm(x[None].expand(2, -1, -1), s.bias).sum(0) + (x @ s.bias)[0]),
    "transposed twice": (V, lambda s, x: (x.T.relu() + 1).T),
    "t": (V, lambda s, x: torch.softmax(s.w @ x.t(), 0).t()),
    "mT": (V, lambda s, x: x.mT.relu().mT),
    "moved": (M, lambda s, x: torch.movedim(s.a(x).movedim(0, -1) * s.w[:3, :, None], (2, 0), (0, 1))),
    "swapped": (M, lambda s, x: x.swapaxes(0, 1).swapdims(1, 0).moveaxis(-1, 1)),
    "batch in rows": (M, lambda s, x: s.a(x.view(-1, 4)).relu().view(-1, 3, 4)),
    "merged and split": (M, lambda s, x: s.layer(x.flatten(0, 1)).unflatten(0, (-1, 3)).flatten(1)),
    "merged by its size": (M, lambda s, x: x.reshape(x.shape[0] * 3, 4).softmax(-1).reshape(x.shape[0], 12)),
    "merged and split elsewhere": ((4, 2), lambda s, x: x.flatten(0, 1).view(-1, 2, 2, 2).mean(1).flatten(1)),
    "merged behind tokens": ((3, 2, 4), lambda s, x: s.a(x.transpose(0, 1).flatten(1, 2)).view(3, -1, 2, 4).sum(0)),
    "patches": ((1, 4, 4), lambda s, x: s.a(x.view(-1, 2, 2, 2, 2).transpose(2, 3).reshape(x.shape[0], 4, 4))),
    "whole batch in an index": (M, lambda s, x: x.permute(2, 0, 1)[1:, :, None, -1].transpose(0, 1)),
    "new first dimension": (V, lambda s, x: (x[None] + s.w[:, None])[2]),
    "first of all": (V, lambda s, x: x.unsqueeze(0).expand(1, -1, -1).squeeze(0) * s.w[0]),
    "pieces": (M, lambda s, x: torch.cat([t.relu() for t in x.transpose(0, 1).split((1, 2))][::-1], 0).transpose(0, 1)),
    "rolled tokens": (M, lambda s, x: x.transpose(0, 1).roll((1, 1), (0, 2)).transpose(0, 1)),
    "softmax of tokens": (M, lambda s, x: s.soft(x.transpose(0, 1)).softmax(0).transpose(0, 1)),
    "matrix behind": (M, lambda s, x: (x.transpose(0, 1) @ s.w).transpose(0, 1)),
    "matrix before": (M, lambda s, x: (s.w[:, :3] @ x.permute(2, 1, 0)).permute(2, 1, 0)),
    "numbers": (V, lambda s, x: x.T.mean(0)),
    "contracted": (M, lambda s, x: torch.einsum("hd, bnd -> bhn", s.w, x)),
    "contracted, tokens first": (M, lambda s, x: torch.einsum("nbi,ij->jbn", x.transpose(0, 1), s.w).transpose(0, 1)),
    "contracted twice": (M, lambda s, x: torch.einsum("bni,nij->bj", x, torch.stack([s.w, 2 * s.w, s.w.T]))),
    "contracted to a number": (V, lambda s, x: torch.einsum("bi,i->b", x, s.w[0])),
    "contracted with a number": (V, lambda s, x: torch.einsum(",bi->ib", s.w[0, 0], x).T),
    "outer product with a weight": (V, lambda s, x: torch.einsum("bi,jk->bkij", x, s.w)),
    "contracted, a list": (M, lambda s, x: torch.einsum("bni,ij->bnj", [x, s.w])),
    "contracted, a weight for each": (M, lambda s, x: torch.einsum("nbi,ni->bn", x.transpose(0, 1), s.w[:3])),
    "contracted, a matrix for each": (M, lambda s, x: torch.einsum("nij,bni->bjn", torch.stack([s.w, -s.w, s.w.T]), x)),
    "contracted with three": (V, lambda s, x: torch.einsum("bi,ij,jk->bk", x, s.w, s.w.T)),
    "contracted, a factor that waits": (V, lambda s, x: torch.einsum("bi,k,ij->kbj", x, s.w[0], s.w).transpose(0, 1)),
    "transposed by letters": (M, lambda s, x: torch.einsum("bij->bji", x)),
    "summed by letters": (M, lambda s, x: torch.einsum("ibj->bj", x.transpose(0, 1))),
    "contracted behind dots": (I, lambda s, x: torch.einsum("...ji,ki->...jk", x, torch.cat((s.w, s.w.T), 1))),
    "contracted in dots": (M, lambda s, x: torch.einsum("b...i,i...->...b", x, s.w[:, :3]).T),
    "contracted, no result named": (M, lambda s, x: torch.einsum("bni,ij", x, s.w)),
    "contracted, dots in no result": (M, lambda s, x: torch.einsum("...i,ji", x, s.w)),
    "contracted, a sum of its own": (M, lambda s, x: torch.einsum("bni,ij->bj", x, s.w)),
    "contracted, sums of both": (M, lambda s, x: torch.einsum("bni,kj->bi", x, s.w)),
    "a vector before": (M, lambda s, x: s.w[0] @ x.mT),
    "one matrix for all": (M, lambda s, x: x @ s.w[None]),
    "contracted, nothing summed": ((4, 3), lambda s, x: torch.einsum("bni,n->bin", x, s.w[0])),
    "interpolated": (M, lambda s, x: torch.lerp(x.transpose(0, 1), s.a(x).transpose(0, 1), 0.3).transpose(0, 1)),
    "interpolated by numbers": (V, lambda s, x: (x + 1).lerp_(s.a(x), s.w[0])),
    "interpolated with constants": (M, lambda s, x: torch.lerp(s.w[:3], x, -1.5).lerp(end=s.w[0], weight=s.w[1])),
    "sum and product": (V, lambda s, x: s.w[:1].addmm(x, s.w) + torch.addmm(s.w[1], x, s.w)),
    "sum with the input": (V, lambda s, x: torch.addmm(x, x, s.w)),
    "selected": (M, lambda s, x: x.select(index=-1, dim=-2) + torch.select(x.transpose(0, 1), 0, 1)),
    "reflected": ((2, 5, 6), lambda s, x: F.pad(x, (2, 1, 3, 0), mode="reflect")),
    "replicated, tokens first": (M, lambda s, x: F.pad(x.transpose(0, 1), (5, 2), "replicate").transpose(0, 1)),
    "periodic": ((2, 5, 6), lambda s, x: F.pad(x, (2, -1, 3, 3), mode="circular")),
    "padded": (M, lambda s, x: F.pad(x.transpose(0, 1), (1, 0)).transpose(0, 1)),
    "windows back by their number": (I, windows_back),
    "windows back, twice": (I, lambda s, x: windows_back(s, windows_back(s, x))),
    "sizes behind a quotient": (G, sizes_behind),
    "larger of two": (M, lambda s, x: torch.maximum(x.mT.permute(1, 2, 0), s.a(x).permute(2, 1, 0)).permute(2, 0, 1)),
}


def compared(forward: Forward, shape: tuple[int, ...], **options: Any) -> nn.Module:
    network = Net(forward).eval()
    plain = export(network, shape, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for size in (1, 3, 8, 65):
            x = torch.rand(size, *shape, generator=generator)
            y = network(x)
            if size == 8:
                alone = torch.cat([network(row[None]).reshape(1, *y.shape[1:]) for row in x])
                assert torch.allclose(y, alone, rtol=1e-4, atol=1e-5)
            assert plain(x).shape == y.shape
            assert torch.allclose(plain(x), y, rtol=1e-4, atol=1e-5)
    return plain


@pytest.mark.thorough
@pytest.mark.parametrize("name", RIGHT)
def test_exported_and_bounded(name: str) -> None:
    shape, forward = RIGHT[name]
    plain = compared(forward, shape)
    bound = float(lipschitz(plain))
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    double = plain.double()
    steepest = max(float(np.linalg.norm(j, 2)) for j in jacobians(lambda v: double(v).reshape(len(v), -1), x))
    assert steepest <= bound * (1 + 1e-9)
    assert analyze(Net(forward).eval(), shape, restarts=0).upper >= steepest * (1 - 1e-9)


@pytest.mark.thorough
def test_constants_of_contractions_and_copies() -> None:
    w = Net(lambda s, x: x).w.detach().double().numpy()
    whole = np.concatenate([w, 2 * w, w.T])  # of all entries of a sample
    for forward, shape, norm in (
        (RIGHT["contracted twice"][1], M, np.linalg.norm(whole, 2)),
        (RIGHT["outer product with a weight"][1], V, np.linalg.norm(w)),
        (RIGHT["reflected"][1], (2, 5, 6), 2.0),  # the entries that are copied once in each direction
        (RIGHT["replicated, tokens first"][1], M, math.sqrt(6)),  # the first, five times
    ):
        assert norm <= float(lipschitz(export(Net(forward).eval(), shape))) <= norm * (1 + 1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_on_a_box(name: str) -> None:
    shape, forward = ATTENTION[name]
    assert float(lipschitz(compared(forward, shape, box=(0.0, 1.0)))) > 0
    with pytest.raises(NoRuleError, match=r"one factor to be constant|a constant divisor"):
        export(Net(forward).eval(), shape)


@pytest.mark.thorough
def test_moving_the_batch_adds_no_module() -> None:
    plain = export(Net(lambda s, x: s.a(x.permute(1, 0, 2)).transpose(0, 1)).eval(), M)
    assert [type(module) for module in plain] == [nn.Linear]
    token = export(Net(lambda s, x: torch.cat((s.cls.expand(x.shape[0], -1, -1), x), 1)).eval(), M)
    assert [type(module).__name__ for module in token] == ["Pad", "Affine"]
    assert float(lipschitz(token)) == 1


IMAGES: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "convolution": ((4, 6, 6), lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2)),
    "circular convolution": ((4, 6, 6), lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False)),
    "transposed convolution": ((4, 3, 3), lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2)),
    "sequences": ((4, 7), lambda: nn.Sequential(nn.Conv1d(4, 3, 3), nn.BatchNorm1d(3), nn.MaxPool1d(2))),
    "batch normalisation": ((4, 6, 6), lambda: nn.Sequential(nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3), nn.ReLU())),
    "features": ((4,), lambda: nn.BatchNorm1d(4)),
    "group normalisation": ((4, 3, 3), lambda: nn.GroupNorm(2, 4, eps=0.3)),
    "instance normalisation": ((4, 3, 3), lambda: nn.InstanceNorm2d(4, eps=0.3, affine=True)),
    "pools": ((2, 8, 8), lambda: nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1))),
    "features of all channels": ((4, 2, 3), lambda: nn.Sequential(nn.Dropout2d(), nn.Flatten(), nn.Linear(24, 2))),
    "normalised weight": ((4, 3, 3), lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 2, 2))),
}


class Frames(nn.Module):
    """A module of images for each of the frames of a sample."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.flatten(0, 1)).reshape(x.shape[0], -1)


@pytest.mark.parametrize("name", IMAGES)
def test_images_merged_into_the_batch_are_joined_channels(name: str) -> None:
    size, make = IMAGES[name]
    torch.manual_seed(0)
    module = make().eval()
    with torch.no_grad():
        for tensor in (*module.parameters(), *(b for b in module.buffers() if b.ndim)):
            tensor.copy_(torch.rand(tensor.shape) + 0.5)  # variances, too
    network, x = Frames(module).eval(), torch.randn(5, 3, *size)
    plain, alone = export(network, (3, *size)), export(module, size)
    with torch.no_grad():
        torch.testing.assert_close(plain(x), network(x))
    torch.testing.assert_close(lipschitz(plain).detach(), lipschitz(alone).detach())
    bound = lipschitz(network, (3, *size))
    torch.testing.assert_close(bound.detach(), lipschitz(module, size).detach())
    assert analyze(network, (3, *size), restarts=0).upper == pytest.approx(float(lipschitz(plain)))
    if bound.requires_grad:
        bound.backward()
        assert any(bool(p.grad.abs().sum() > 0) for p in module.parameters() if p.grad is not None)


UNBATCHED: dict[str, tuple[tuple[int, ...], nn.Module]] = {
    "average": ((5, 6), nn.AdaptiveAvgPool2d((2, 3))),
    "windows": ((3, 4), nn.AvgPool2d((3, 1), (1, 1), (1, 0))),
    "largest": ((5, 6), nn.MaxPool2d(3, 1, 1)),
    "sequences": ((7,), nn.AdaptiveAvgPool1d(5)),
}


@pytest.mark.parametrize("name", UNBATCHED)
def test_images_without_channels_are_not_joined(name: str) -> None:
    size, module = UNBATCHED[name]  # it takes the batch for channels, and joined images for one
    for function in (export, lipschitz, analyzed):
        with pytest.raises(NoRuleError, match="batch"):
            function(Frames(module).eval(), (3, *size))


def test_the_size_of_the_batch_splits_images_off() -> None:
    network, x = (
        Net(lambda s, x: s.a(x.flatten(0, 1)).unflatten(0, (x.shape[0], 3)).amax(1)).eval(),
        torch.randn(5, 3, 4),
    )
    torch.testing.assert_close(export(network, (3, 4))(x), network(x))
    with pytest.raises(NoRuleError, match="mixes the batch"):
        export(Net(lambda s, x: s.a(x.flatten(0, 1)).unflatten(0, (3, x.shape[0])).amax(0)).eval(), (3, 4))


def test_where_the_batch_is() -> None:
    assert batch_axis((2,), (3,)) == (0, 1)
    assert batch_axis((4, 8, 2), (4, 12, 2)) == (1, 4)
    assert batch_axis((2, 4), (2, 4)) is None  # constant
    assert batch_axis((2, 2), (3, 3)) is None  # twice
    assert batch_axis((3, 4), (4, 4)) is None  # B + 1
    assert batch_axis((2, 4), (3, 4, 1)) is None


# Samples that meet: the batch is merged, contracted, reduced, moved along, or compared with another dimension.
MIXED: dict[str, tuple[tuple[int, ...], Forward]] = {
    "mean of a wrong split": ((4, 6), lambda s, x: x.flatten(0, 1).view(4, -1, 6).mean(0)),
    "three from the front": ((3, 64), lambda s, x: x.flatten(0, 1).view(3, -1, 64).mean(0)),
    "wrong factor": (M, lambda s, x: s.a(x).flatten(0, 1).view(3, -1, 4).transpose(0, 1)),
    "wrong factor of a size": (M, lambda s, x: s.a(x).flatten(0, 1).view(3, x.shape[0], 4).transpose(0, 1)),
    "split in the other order": (M, lambda s, x: x.flatten(0, 1).unflatten(0, (3, -1)).transpose(0, 1)),
    "other tokens": (M, lambda s, x: x.transpose(0, 1).reshape(-1, 3, 4)),
    "other tokens by size": (M, lambda s, x: x.transpose(0, 1).reshape(x.shape[0], 3, 4)),
    "view of the transpose": (V, lambda s, x: x.T.reshape(-1, 4)),
    "flattened transpose": (V, lambda s, x: x.T.flatten().view(-1, 4)),
    "channels of the wrong kind": (M, lambda s, x: x.permute(1, 2, 0).reshape(-1, 12)),
    "windows put back wrongly": (
        (4, 4, 1),
        lambda s, x: x.view(-1, 2, 2, 2, 2, 1).permute(1, 3, 0, 2, 4, 5).reshape(-1, 4, 4, 1),
    ),
    "mean of the merged": (M, lambda s, x: x - x.flatten(0, 1).mean(0)),
    "mean of the batch of tokens first": (
        M,
        lambda s, x: (y := x.transpose(0, 1)).sub(y.mean(1, True)).transpose(0, 1),
    ),
    "sum of the last": (V, lambda s, x: x + x.T.sum(-1)),
    "sum of two": (M, lambda s, x: x + x.permute(1, 0, 2).sum((0, 1))),
    "softmax of the merged": (M, lambda s, x: x.flatten(0, 1).softmax(0).view(-1, 3, 4)),
    "softmax of the batch": (M, lambda s, x: x.transpose(0, 1).softmax(1).transpose(0, 1)),
    "softmax module": (V, lambda s, x: s.soft(x.T).T),
    "roll of the merged": (M, lambda s, x: x.flatten(0, 1).roll(1, 0).view(-1, 3, 4)),
    "roll of the batch": (M, lambda s, x: x.transpose(0, 1).roll(1, 1).transpose(0, 1)),
    "roll of everything": (M, lambda s, x: x.transpose(0, 1).roll(1).transpose(0, 1)),
    "flip of the batch": (M, lambda s, x: x.transpose(0, 1).flip(1).transpose(0, 1)),
    "running sum": (M, lambda s, x: x.transpose(0, 1).cumsum(1).transpose(0, 1)),
    "running sum of the merged": (M, lambda s, x: x.flatten(0, 1).cumsum(0).view(-1, 3, 4)),
    "sorted": (V, lambda s, x: x.T.sort(-1)[0].T),
    "cat along the batch": (V, lambda s, x: torch.cat((x.T, 2 * x.T), 1).T.reshape(-1, 8)),
    "cat and split": (V, lambda s, x: torch.cat((x, 2 * x)).view(-1, 2, 4).sum(1)),
    "cat of the merged": (M, lambda s, x: torch.cat((x.flatten(0, 1), x.flatten(0, 1))).view(-1, 6, 4)),
    "stack and view": (V, lambda s, x: torch.stack((x, 2 * x)).view(-1, 2, 4).sum(1)),
    "repeat": (V, lambda s, x: x.repeat(2, 1).view(-1, 2, 4).sum(1)),
    "repeat of the transpose": (V, lambda s, x: x.T.repeat(1, 2).T.reshape(-1, 8)),
    "expanded in front": (V, lambda s, x: x.expand(3, -1, -1).reshape(-1, 3, 4)),
    "contracted over the batch": (V, lambda s, x: torch.einsum("bi,bj->ij", x, x) + 0 * x[:1].T),
    "contracted samples": (V, lambda s, x: torch.einsum("bi,ci->bc", x, x) @ x),
    "contracted batches": (V, lambda s, x: torch.einsum("bi,ci->ci", x, s.a(x))),
    "contracted with rows": (V, lambda s, x: torch.einsum("bi,cb->ci", x, torch.ones((x.shape[0], x.shape[0])))),
    "contracted over rows": (V, lambda s, x: x @ (torch.ones_like(x).transpose(0, 1) @ torch.ones_like(x))),
    "rows in the place of the batch": (V, lambda s, x: x @ torch.ones_like(x).view(4, -1).softmax(0)[:, :4]),
    "stacked, then added": ((2,), lambda s, x: x + torch.stack((x, 2 * x))[:, : x.shape[0]].mean(1)),
    "selected sample": (M, lambda s, x: x + x.transpose(0, 1).select(1, 0)),
    "batch around itself": (M, lambda s, x: F.pad(x.permute(1, 2, 0), (1, -1), mode="circular").permute(2, 0, 1)),
    "Gram matrix": (V, lambda s, x: 0.1 * x @ (x.T @ x)),
    "products of samples": (V, lambda s, x: 0.1 * (x @ x.T) @ x),
    "attention over the batch": (M, lambda s, x: 0.1 * (y := x.transpose(0, 1)) @ y.mT @ y),
    "attention over the wrong dimension": (M, lambda s, x: ((y := x.transpose(0, 1)) @ y.mT).softmax(-1) @ y),
    "weights of wrong rows": (M, lambda s, x: (s.w[:3, None] * x.flatten(0, 1).view(3, -1, 4)).view(-1, 3, 4)),
    "numbers against rows": (V, lambda s, x: x.T * x.sum(1)[: x.shape[0]] + x.T.sum(1, keepdim=True)),
    "numbers of samples against features": ((3,), lambda s, x: x + x.sum(1)),
    "outer sum": (V, lambda s, x: (x.sum(1)[:, None] + x.sum(1)[None]).mean(1)),
    "rows against columns": ((2,), lambda s, x: x + x.T[:, : x.shape[0]].mean(1)),
    "rows of ones": (V, lambda s, x: (torch.ones(x.shape[0], x.shape[0]) @ x) / 3),
    "batch as channels": (M, lambda s, x: F.conv1d(x.transpose(0, 1), x.new_ones(1, 1, 1).expand(1, x.shape[0], 1))),
    "norm of tokens first": (
        M,
        lambda s, x: F.layer_norm(x.transpose(1, 2).permute(1, 2, 0), (x.shape[0],)).permute(2, 0, 1),
    ),
    "norm of two": (M, lambda s, x: F.layer_norm(x.transpose(0, 1), (x.shape[0], 4)).transpose(0, 1)),
    "one norm of groups": (M, lambda s, x: F.group_norm(x.transpose(0, 1), 1).transpose(0, 1)),
    "instance norm": (M, lambda s, x: F.instance_norm(x.permute(1, 2, 0)).permute(2, 0, 1)),
    "norm by the batch": (V, lambda s, x: F.batch_norm(x, None, None, training=True)),
    "norm of columns": (V, lambda s, x: F.normalize(x.T, dim=1).T),
    "standardised": (V, lambda s, x: (x.T - x.T.mean(1, keepdim=True)).T),
    "first sample": (M, lambda s, x: x - x.transpose(0, 1)[:, :1].transpose(0, 1)),
    "last sample": (M, lambda s, x: x - x.permute(2, 0, 1)[:, -1].T),
    "every second": (M, lambda s, x: x + x.transpose(0, 1)[:, ::2].mean(1, keepdim=True).transpose(0, 1)),
    "pieces of the batch": (V, lambda s, x: torch.cat(x.T.split(1, 1)[::-1], 1).T),
    "unbound batch": (M, lambda s, x: torch.stack(x.transpose(0, 1).unbind(1)[::-1])),
    "chunks of the batch": (V, lambda s, x: torch.cat(x.T.chunk(2, 1)[::-1], 1).T),
    "padded batch": (V, lambda s, x: F.pad(x.T, (1, -1)).T),
    "pool over the batch": (M, lambda s, x: F.avg_pool1d(x.permute(1, 2, 0), 3, 1, 1).permute(2, 0, 1)),
    "largest of the batch": (V, lambda s, x: x - x.T.amax(1)),
    "convolution of the batch": (V, lambda s, x: F.conv1d(x.T[:, None], x.new_ones(1, 1, 3), padding=1)[:, 0].T),
    "table by a moved size": (V, lambda s, x: x * {65: 9.0}.get(x.T.shape[1], 1.0)),
    "moved size": (V, lambda s, x: x * (1 + x.T.size(1) // 9)),
    "size of the merged": (M, lambda s, x: x * (1 + x.flatten(0, 1).shape[0] // 20)),
    "moved size as a condition": (V, lambda s, x: 9 * x if x.T.shape[-1] > 8 else x),
    "last size": (V, lambda s, x: x.T.softmax(x.T.shape[1] // 9).T),
    "value of rows": (V, lambda s, x: torch.cat((x, x.new_full((x.shape[0], 1), x.shape[0] // 9)), 1)),
    "rows by name": (V, lambda s, x: x + torch.full(size=(1, 4), fill_value=x.shape[0] + 0.0)),
    "fill first": (V, lambda s, x: torch.cat((x, torch.full(fill_value=x.shape[0], size=(4,)).expand_as(x)), 1)),
    "the square of the batch": (G, lambda s, x: x.repeat(x.shape[0], 1, 1).view(x.shape[0] * x.shape[0], 5, 8)[:1] + x),
    "another multiple": (G, lambda s, x: x.expand(5, 8).reshape((80 // x.shape[0]) * x.shape[0] // 80 * 5, 8)[None]),
    "a share of merged entries": (G, lambda s, x: x.reshape(x.flatten(0, 1).shape[0] // 4, 5, 8)),  # 5 at a batch of 4
    "rows that count": (V, lambda s, x: torch.cat((x, torch.ones_like(x).cumsum(0)), 1)),
    "token of the batch": (M, lambda s, x: torch.cat((x.mean(0, keepdim=True).expand(x.shape[0], -1, -1), x), 1)),
    "another dimension of one sample": (M, lambda s, x: x.squeeze(0).softmax(1).view(-1, 3, 4)),
    "another dimension where it moved": (
        M,
        lambda s, x: x.permute(1, 2, 0).squeeze(dim=-1).softmax(-2).reshape(3, 4, -1).permute(2, 0, 1),
    ),
    "token in another dimension": (V, lambda s, x: torch.cat((s.w[:, :1].expand(-1, x.shape[0]).T, x, x.T[:4].T), 0)),
}


def analyzed(model: nn.Module, shape: tuple[int, ...]) -> Any:
    return analyze(model, shape, restarts=0)


# The bound traces as the export does, and the constant is that of the export: they are asked of every second and third.
ASKED = [
    pytest.param(name, f, marks=[pytest.mark.slow] * (i % every > 0))
    for i, name in enumerate(MIXED)
    for f, every in ((export, 1), (analyzed, 2), (lipschitz, 3))
]


@pytest.mark.parametrize(("name", "function"), ASKED)
def test_refused_where_samples_meet(name: str, function: Callable[..., Any]) -> None:
    shape, forward = MIXED[name]
    assert meets(forward, shape), name
    with pytest.raises((NoRuleError, ShapeError)) as error:
        function(Net(forward).eval(), shape, **({"box": (0.0, 1.0)} if function is export else {}))
    # By the rules: that outputs differ is a second line, which sees the samples that it draws.
    assert "differ" not in str(error.value)
    assert "compute the same" not in str(error.value)


@functools.cache
def meets(forward: Forward, shape: tuple[int, ...]) -> bool:
    """True if an output of some batch is not that of its samples alone; the truth, without lipkit."""
    network = Net(forward).eval()
    x = torch.randn(65, *shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for size in (1, 2, 3, 8, 65):
            try:
                y = network(x[:size].clone())
                alone = torch.cat([network(row[None]) for row in x[:size]]).reshape(y.shape)
            except (RuntimeError, IndexError, ValueError):
                return True
            if not torch.allclose(y, alone, rtol=1e-3, atol=1e-4):
                return True
    return False
