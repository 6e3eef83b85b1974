"""torch's own attention on a box of inputs: the same function, with a constant that no secant exceeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lipkit
from lipkit.errors import NoRuleError
from lipkit.lowering.copies import PLAIN, constant_copy
from lipkit.testing.reference import jacobians

BOX, SHAPE = (-1.0, 1.0), (3, 4)


class Net(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor], *given: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f, self.attention = forward, nn.MultiheadAttention(*given, **options)
        for p in self.attention.parameters():
            nn.init.normal_(p, std=0.7)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.attention, x)


def self_attention(a: nn.MultiheadAttention, x: Tensor) -> Tensor:
    found: Tensor = a(x, x, x, need_weights=False)[0]
    return found


def of_a_batch_behind(a: nn.MultiheadAttention, x: Tensor) -> Tensor:
    return self_attention(a, x.transpose(0, 1)).transpose(0, 1)


def encoder(first: bool, layers: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(4, 2, 8, norm_first=first, layer_norm_eps=0.5, batch_first=True, **options)
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(4), enable_nested_tensor=False) if layers else layer


class Fused(Net):
    """The function of torch that computes heads at once, with keys and values of their own sizes."""

    def __init__(self, heads: int = 2, **options: Any) -> None:
        super().__init__(self_attention, 4, 2)
        self.heads, self.options = heads, options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.attention.in_proj_weight, self.attention.in_proj_bias).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q[:, 1:], k, v))
        found = F.scaled_dot_product_attention(q, key=k, value=v, **self.options)
        return found.transpose(1, 2).flatten(2)


class Grouped(Fused):
    """Four heads of queries, of which two share a key."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.attention.in_proj_weight, self.attention.in_proj_bias).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (4, 1)).transpose(1, 2) for t in (q, k, v))
        found = F.scaled_dot_product_attention(q, k[:, :2], v[:, 2:], is_causal=True, enable_gqa=True)
        return found.transpose(1, 2).flatten(2)


class Masked(nn.Module):
    """A module called with masks."""

    def __init__(self, inner: nn.Module, **masks: Any) -> None:
        super().__init__()
        self.inner, self.masks = inner, masks

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x, **self.masks)
        return found


class Padded(nn.Module):
    """An encoder with hidden tokens, the same in all samples."""

    def __init__(self, inner: nn.Module, hidden: Tensor | None = None, **masks: Any) -> None:
        super().__init__()
        self.inner, self.masks = inner, masks
        self.register_buffer("hidden", torch.tensor([False, True, False]) if hidden is None else hidden)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x, src_key_padding_mask=self.hidden.expand((x.shape[0], 3)), **self.masks)
        return found


CAUSAL = torch.ones(3, 3, dtype=torch.bool).triu(1)  # what is hidden
FINITE = torch.tensor([[0.5, -1.0, 0.0], [0.0, 2.0, 1.0], [-3.0, 0.0, 0.0]])
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "fused": Fused,
    "fused, scaled": lambda: Fused(1, scale=1.5, dropout_p=0.0, is_causal=False),
    "batch first": lambda: Net(self_attention, 4, 2, batch_first=True),
    "batch behind": lambda: Net(of_a_batch_behind, 4, 2),
    "one head, no bias": lambda: Net(self_attention, 4, 1, batch_first=True, bias=False),
    "stored queries": lambda: Net(lambda a, x: a(x.new_ones((x.size(0), 2, 4)), x, x)[0], 4, 2, batch_first=True),
    "with weights": lambda: Net(lambda a, x: a(x, x, x)[0] + a(x, x, x)[1][..., :1], 4, 2, batch_first=True),
    "weights of each head": lambda: Net(lambda a, x: a(x, x, x, average_attn_weights=False)[1], 4, 2, batch_first=True),
    "keys of another size": lambda: Net(
        lambda a, x: a(x, x[..., :3], x[..., 1:])[0], 4, 2, kdim=3, vdim=3, batch_first=True
    ),
    "encoder layer": lambda: encoder(False),
    "encoder layer, norm first": lambda: encoder(True, activation="gelu"),
    "encoder": lambda: encoder(True, 2),
    "causal": lambda: Net(lambda a, x: a(x, x, x, attn_mask=CAUSAL, is_causal=True)[0], 4, 2, batch_first=True),
    "masked by numbers": lambda: Net(lambda a, x: a(x, x, x, attn_mask=FINITE)[0], 4, 2, batch_first=True),
    "hidden tokens": lambda: Net(
        lambda a, x: a(x, x, x, key_padding_mask=torch.tensor([[0, 1, 0]]).bool().repeat(x.shape[0], 1))[0], 4, 2,
        batch_first=True),
    "hidden tokens, by numbers, and a causal mask": lambda: Net(
        lambda a, x: a(x, x, x, key_padding_mask=torch.tensor([[0.5, -torch.inf, 1]]).repeat(x.shape[0], 1),
                       attn_mask=torch.zeros(3, 3).masked_fill(CAUSAL, -torch.inf))[0], 4, 2, batch_first=True),
    "a mask with gaps": lambda: Net(
        lambda a, x: a(x, x, x, attn_mask=torch.eye(3)[[2, 1, 0]].bool())[0], 4, 2, batch_first=True),
    "encoder layer, hidden tokens": lambda: Padded(encoder(False)),
    "causal encoder, hidden tokens": lambda: Padded(encoder(True, 2), mask=CAUSAL),
    "fused, heads in groups": Grouped,
    "fused, causal": lambda: Fused(is_causal=True),
    "fused, masked": lambda: Fused(attn_mask=~CAUSAL[1:]),
    "fused, masked by numbers": lambda: Fused(attn_mask=FINITE[:2] + torch.full((2, 3), -torch.inf).triu(1)),
    "causal encoder layer": lambda: Masked(encoder(False), src_mask=CAUSAL, is_causal=True),
    "causal encoder": lambda: Masked(encoder(True, 2), mask=torch.zeros(3, 3).masked_fill(CAUSAL, -torch.inf)),
}  # fmt: skip


FAST = ("fused", "batch first", "keys of another size", "encoder layer")
each_network = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name not in FAST)) for name in NETWORKS]
)


@pytest.mark.thorough
@each_network
def test_the_same_function_on_a_box(name: str) -> None:
    net = NETWORKS[name]().eval()
    plain = lipkit.export(net, SHAPE, box=BOX)
    x = 2 * torch.rand(20, *SHAPE) - 1
    with torch.no_grad():
        expected = net(x)
        assert torch.allclose(plain(x), expected, atol=1e-5)
        assert not torch.allclose(plain(20 * x), net(20 * x), atol=1e-3) or "encoder" in name  # limits act outside
    # An independent reference: the steepest direction at points of the box.
    steepest = max(float(np.linalg.norm(j, 2)) for j in jacobians(lambda v: net(v).flatten(1), x[:3]))
    bound = float(lipkit.lipschitz(plain))
    assert 0 < steepest <= bound < 1e9
    found = lipkit.analyze(net, SHAPE, box=BOX, restarts=0).upper
    # The dense layers of an encoder, with their residual connection, are in one LMI.
    assert steepest <= found <= bound * (1 + 1e-6)
    assert found < 0.9 * bound or name != "encoder layer"


@pytest.mark.thorough
@pytest.mark.usual(5)
@each_network
def test_without_a_box_the_product_is_named(name: str) -> None:
    for verb in (lipkit.export, lipkit.lipschitz)[: 1 + (name in FAST)]:
        with pytest.raises(NoRuleError, match=r"(matmul|scaled_dot_product).*box=\(0, 1\)"):
            verb(NETWORKS[name]().eval(), SHAPE)


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "zeros for hidden tokens": (
        lambda: Padded(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1)), SHAPE,
        "expected enable_nested_tensor=False, got True"),
    "no token seen": (
        lambda: Padded(encoder(True, 2), torch.tensor([True, False, False]), mask=CAUSAL), SHAPE, "row of -inf alone"),
    "hidden by the input": (
        lambda: Net(lambda a, x: a(x, x, x, key_padding_mask=x[..., 0] < 0)[0], 4, 2, batch_first=True), SHAPE,
        "truth values jump"),
    "bias_k": (lambda: Net(self_attention, 4, 2, batch_first=True, add_bias_kv=True), SHAPE, "add_bias_kv=False"),
    "zeros": (lambda: Net(self_attention, 4, 2, batch_first=True, add_zero_attn=True), SHAPE, "add_zero_attn=False"),
    "the batch as tokens": (lambda: Net(self_attention, 4, 2), SHAPE, "mixes the batch|one row per sample"),
    "vectors": (lambda: Net(self_attention, 4, 2), (4,), "take the batch for a sequence"),
    "encoder of a batch behind": (lambda: nn.TransformerEncoderLayer(4, 2, 8), SHAPE, "mixes the batch|row per sample"),
    "fused, nothing seen": (lambda: Fused(attn_mask=CAUSAL[1:]), SHAPE, r"softmax.*a row of -inf alone"),
    "another mask that is said to be causal": (
        lambda: Net(lambda a, x: a(x, x, x, attn_mask=CAUSAL.T, is_causal=True, need_weights=False)[0], 4, 2,
                    batch_first=True), SHAPE, "the causal mask beside is_causal"),
    "fused dropout": (lambda: Fused(dropout_p=0.5), SHAPE, "without random numbers|expected no dropout"),
    "a chain": (lambda: nn.Sequential(nn.MultiheadAttention(4, 2)), SHAPE, r"attention\(x, x, x\)\[0\]"),
    "a decoder": (lambda: nn.Sequential(nn.TransformerDecoderLayer(4, 2)), SHAPE, "on a box only"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    make, shape, message = REFUSED[name]
    with pytest.raises(NoRuleError, match=message):
        lipkit.export(make().eval(), shape, box=BOX)


@pytest.mark.thorough
def test_training_mode_is_refused() -> None:
    with pytest.raises(NoRuleError, match="training mode"):
        lipkit.export(Net(self_attention, 4, 2, batch_first=True, dropout=0.1).train(), SHAPE, box=BOX)


@pytest.mark.thorough
def test_subclasses_and_the_network_itself_stay_as_they_are() -> None:
    class Own(nn.MultiheadAttention):
        pass

    both = nn.ModuleList([nn.MultiheadAttention(4, 2), Own(4, 2)])
    assert [type(m) for m in constant_copy(both).children()] == [PLAIN[nn.MultiheadAttention], Own]
    net = encoder(False).eval()
    lipkit.export(net, SHAPE, box=BOX)
    assert type(net) is nn.TransformerEncoderLayer
    assert type(net.self_attn) is nn.MultiheadAttention
