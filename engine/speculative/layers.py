"""Decoder layers over paged K/V, for drafters: rows of any raggedness, with a draft tree's mask.

    x += o(attend(rope(q), rope(k), v))      of rms_norm(x)
    x += down(silu(gate) * up)               of rms_norm(x)

The weights are engine.models.decoder.Layer, the operations the engine's. Where the K/V lie is FullAttention's; this calls
its views with the mask that Batch does not carry. Knows no drafter. Rejected: Decoder.forward (it needs a HostBatch, which
a draft step on the device does not have).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.attention.full import FullAttention
from engine.models.decoder import Decoder, Layer
from engine.ops import Ops
from engine.speculative.rows import Rows
from kernels.attention import Tree
from kernels.flash_decode import MAX_QUERIES

After = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True)
class Where:
    """Where rows stand and what they see. `plan`: the reference's indices, made once for all layers; None on kernels."""

    positions: torch.Tensor  # int64 [t]
    slots: torch.Tensor  # int64 [t]
    block_table: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    tree: Tree | None = None
    plan: object | None = None


def where_of(rows: Rows, kv: FullAttention) -> Where:
    """Plain causal rows."""
    return planned(Where(rows.positions, rows.slots, rows.block_table, rows.cu_seqlens, rows.seq_lens, rows.max_query_len), kv)


def planned(where: Where, kv: FullAttention) -> Where:
    """With what every layer shares, where the references run."""
    if not kv.on_reference:
        return where
    plan = kv.ops.plan_attention(
        where.block_table, where.cu_seqlens, where.seq_lens, kv.page_size, len(where.positions), device=where.slots.device, tree=where.tree
    )
    return Where(where.positions, where.slots, where.block_table, where.cu_seqlens, where.seq_lens, where.max_query_len, where.tree, plan)


def run_layers(
    model: Decoder, layers: Sequence[Layer], x: torch.Tensor, where: Where, kv: FullAttention, ops: Ops, after: After | None = None
) -> torch.Tensor:
    """The residual stream [t, hidden] after these layers; layer i's K/V are kept in kv's layer i.

    Args:
        model: whose shapes, rope tables and family's rule for q and k they are.
        after: called with (layer, residual stream) after each.
    """
    config, rows = model.config, len(x)
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    positions = where.positions.clamp(0, len(model.cos) - 1)  # a draft behind the model's end is cut before it is verified
    for index, layer in enumerate(layers):
        qkv = ops.linear(ops.rms_norm(x, layer.input_norm, config.rms_norm_eps), layer.qkv, layer.qkv_bias)
        q, k, v = qkv.view(rows, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), 1)
        q, k = model.queries_keys(layer, q, k, ops)
        ops.rope(q, k, model.cos, model.sin, positions)
        ops.kv_write(k, v, kv.k[index], kv.v[index], where.slots)
        out = attend(kv, index, q, where)
        x = x + ops.linear(out.reshape(rows, heads * dim), layer.o, layer.o_bias)
        y = ops.linear(ops.rms_norm(x, layer.post_norm, config.rms_norm_eps), layer.gate_up, layer.gate_up_bias)
        x = x + ops.linear(ops.silu_mul(y), layer.down, layer.down_bias)
        if after is not None:
            after(index, x)
    return x


def attend(kv: FullAttention, layer: int, q: torch.Tensor, where: Where) -> torch.Tensor:
    """q [t, heads, head_dim] → the same, over what each row sees."""
    inputs = (q, kv.k[layer], kv.v[layer], where.block_table, where.cu_seqlens, where.seq_lens, kv.scale, where.max_query_len)
    if not kv.on_reference and kv.has_decode and where.max_query_len <= MAX_QUERIES:
        return kv.ops.flash_decode(*inputs, tree=where.tree)
    if kv.on_reference:
        return kv.ops.flash_prefill(*inputs, tree=where.tree, host=where.plan)
    return kv.ops.flash_prefill(*inputs, tree=where.tree)
