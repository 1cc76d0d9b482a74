"""Full causal attention: each page keeps K and V of every layer for page_size tokens.

Page layout, in elements of the cache type: [layer][K, V][page_size][kv_heads][head_dim]. A layer's K cache is
a strided view over all pages of the arena, so kernels see [pages, page_size, kv_heads, head_dim] with a page
stride of a whole page.
"""

from __future__ import annotations

import torch

from engine.attention.base import Projection, Rope
from engine.batch import Batch, HostBatch
from engine.config import ModelConfig
from engine.ops import Ops, torch_ops
from kernels.flash_decode import MAX_QUERIES


def bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """2 × layers × kv_heads × head_dim × bytes."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


class FullAttention:
    """The views of one arena that a Llama-like model writes and reads.

    Args:
        arena: uint8 [num_pages + 1, page_bytes].
        page_size: tokens a page.
    """

    def __init__(self, config: ModelConfig, arena: torch.Tensor, page_size: int, dtype: torch.dtype, ops: Ops) -> None:
        heads, dim = config.num_kv_heads, config.head_dim
        flat = arena.view(dtype)  # [pages, elements a page]
        part = page_size * heads * dim
        shape, stride = (len(arena), page_size, heads, dim), (flat.stride(0), heads * dim, dim, 1)
        self.arena = arena
        self.page_size = page_size
        self.scale = dim**-0.5
        self.ops = ops
        reference = torch_ops()
        self.on_reference = ops.flash_prefill is reference.flash_prefill
        self.has_decode = ops.flash_decode is not reference.flash_decode
        self.k = [flat.as_strided(shape, stride, (2 * layer) * part) for layer in range(config.num_layers)]
        self.v = [flat.as_strided(shape, stride, (2 * layer + 1) * part) for layer in range(config.num_layers)]

    def plan(self, host: HostBatch) -> object | None:
        """What every layer of a step can share: the reference's gather indices; the kernel needs nothing."""
        if not self.on_reference:
            return None
        device = self.arena.device
        return self.ops.plan_attention(host.block_table, host.cu_seqlens, host.seq_lens, self.page_size, host.num_tokens, device=device)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> None:
        self.ops.kv_write(k, v, self.k[layer], self.v[layer], batch.slot_mapping)

    def rotate_and_write(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope, batch: Batch) -> None:
        self.ops.rope_kv_write(q, k, v, *rope, batch.positions, self.k[layer], self.v[layer], batch.slot_mapping)

    def project_and_write(self, layer: int, x: torch.Tensor, projection: Projection, rope: Rope, batch: Batch) -> torch.Tensor:
        norm, eps, weight, bias = projection
        heads = weight.shape[0] // self.k[layer].shape[3] - 2 * self.k[layer].shape[2]
        q = x.new_empty(len(x), heads, self.k[layer].shape[3])
        self.ops.decode_qkv(
            x, norm, weight, eps, *rope, batch.positions, batch.slot_mapping, q, self.k[layer], self.v[layer], bias, x.is_cuda
        )  # fmt: skip
        return q

    def attend(self, layer: int, q: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Sequences with few queries go to the split-KV kernel, the others to the prefill kernel: by their own number, never
        by what else is in the batch."""
        longest = batch.host.max_query_len
        inputs = (
            q, self.k[layer], self.v[layer], batch.block_table, batch.cu_seqlens, batch.seq_lens, self.scale, longest
        )  # fmt: skip
        if self.on_reference or not self.has_decode:
            return self.ops.flash_prefill(*inputs, host=batch.attention_plan)
        if longest <= MAX_QUERIES:
            return self.ops.flash_decode(*inputs)
        if batch.host.min_query_len > MAX_QUERIES:
            return self.ops.flash_prefill(*inputs)
        return self.ops.flash_decode(*inputs, out=self.ops.flash_prefill(*inputs, min_query_len=MAX_QUERIES + 1))

    def copy_pages(self, copies: torch.Tensor) -> None:
        if self.arena.shape[1] % 16 == 0:  # what the kernel asks of a page; odd shapes of small models are torch's
            self.ops.block_copy(self.arena, copies)
        else:
            self.arena[copies[:, 1]] = self.arena[copies[:, 0]]
