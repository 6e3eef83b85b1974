"""Torch's attention written in operations that have rules: classes that replace torch's own in the copy that is traced.

Only the class of a copied module changes, not its numbers. `lipkit.lowering.observe` compares the copy's outputs with
those of the network.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.errors import NoRuleError


def _refuse_masks(name: str, *masks: Any) -> None:
    if any(mask is not None and mask is not False for mask in masks):
        raise NoRuleError(
            f"analyze: nn.{name}: expected no mask and is_causal=False, got one: -inf has no range; leave the tokens "
            "out, or write attention with torch.matmul and torch.softmax"
        )


class PlainAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` head by head: products, a softmax, products."""

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        _refuse_masks("MultiheadAttention", key_padding_mask, attn_mask, is_causal)
        if self.bias_k is not None or self.bias_v is not None or self.add_zero_attn:
            raise NoRuleError("analyze: nn.MultiheadAttention: expected add_bias_kv=False and add_zero_attn=False")
        if key is None or value is None:
            raise NoRuleError("analyze: nn.MultiheadAttention: expected three tensors, as in attention(x, x, x)[0]")
        if query.ndim != 3:
            what = f"expected 3 dimensions, got {query.ndim}: it would take the batch for a sequence"
            raise NoRuleError(f"analyze: nn.MultiheadAttention: {what}")
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)  # stored one below the other: q, k, v
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        # (B, heads, n, features of a head)
        q, k, v = (
            F.linear(x if self.batch_first else x.transpose(0, 1), w, b)
            .unflatten(-1, (self.num_heads, self.head_dim))
            .transpose(1, 2)
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        p = F.dropout((q * self.head_dim**-0.5 @ k.transpose(-2, -1)).softmax(-1), self.dropout, self.training)
        y = F.linear((p @ v).transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        shown = (p.mean(1) if average_attn_weights else p) if need_weights else None  # 1: the heads
        return (y if self.batch_first else y.transpose(0, 1)), shown


class PlainEncoderLayer(nn.TransformerEncoderLayer):
    """``nn.TransformerEncoderLayer`` without its fast path."""

    def forward(self, src: Tensor, *masks: Any, **named: Any) -> Tensor:
        _refuse_masks("TransformerEncoderLayer", *masks, *named.values())
        if self.norm_first:
            src = src + self._sa_block(self.norm1(src), None, None)
            return src + self._ff_block(self.norm2(src))
        src = self.norm1(src + self._sa_block(src, None, None))
        return self.norm2(src + self._ff_block(src))


class PlainEncoder(nn.TransformerEncoder):
    """``nn.TransformerEncoder``: its layers one after the other."""

    def forward(self, src: Tensor, *masks: Any, **named: Any) -> Any:
        _refuse_masks("TransformerEncoder", *masks, *named.values())
        for layer in self.layers:
            src = layer(src)
        return src if self.norm is None else self.norm(src)


PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: PlainAttention,
    nn.TransformerEncoderLayer: PlainEncoderLayer,
    nn.TransformerEncoder: PlainEncoder,
}


def plain_attention(copied: nn.Module) -> None:
    """Give torch's attention modules in a copy, in place, the classes that can be traced."""
    for module in copied.modules():
        module.__class__ = PLAIN.get(type(module), type(module))
