"""What an attention variant owns: page layout, write, attend, copy. One file a variant.

The model hands over q, k and v of a layer; where they are kept and how they are read is the variant's.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from engine.batch import Batch, HostBatch


class Rope(NamedTuple):
    """Tables [positions, rotary / 2] fp32."""

    cos: torch.Tensor
    sin: torch.Tensor


class Projection(NamedTuple):
    """From the residual stream to q, k and v: RMSNorm weight [hidden] and eps, fused weight [(heads + 2 kv_heads) * head_dim,
    hidden] and bias or None."""

    norm: torch.Tensor
    eps: float
    weight: torch.Tensor
    bias: torch.Tensor | None


class Attention(Protocol):
    """One KV group's cache of one room's pages, as the model sees it."""

    def plan(self, host: HostBatch) -> object | None:
        """Made once a step, handed to every layer as batch.attention_plan."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> None:
        """Keep k and v [t, kv_heads, head_dim] of `layer` in the batch's slots."""

    def rotate_and_write(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope, batch: Batch) -> None:
        """Turn q in place; keep k, turned, and v."""

    def project_and_write(self, layer: int, x: torch.Tensor, projection: Projection, rope: Rope, batch: Batch) -> torch.Tensor:
        """q [t, heads, head_dim], turned, from the residual stream x [t, hidden] of a few rows; its k and v are kept."""

    def attend(self, layer: int, q: torch.Tensor, batch: Batch) -> torch.Tensor:
        """q [t, heads, head_dim] → [t, heads, head_dim] over the keys each token may see."""

    def copy_pages(self, copies: torch.Tensor) -> None:
        """Copy whole pages, all layers: int64 [c, 2] of source and destination."""
