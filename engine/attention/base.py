"""What an attention variant owns: page layout, write, attend, copy. One file a variant.

The model hands over q, k and v of a layer; where they are kept and how they are read is the variant's.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.batch import Batch, HostBatch


class Attention(Protocol):
    """One KV group's cache of one room's pages, as the model sees it."""

    def plan(self, host: HostBatch) -> object | None:
        """Made once a step, handed to every layer as batch.attention_plan."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> None:
        """Keep k and v [t, kv_heads, head_dim] of `layer` in the batch's slots."""

    def attend(self, layer: int, q: torch.Tensor, batch: Batch) -> torch.Tensor:
        """q [t, heads, head_dim] → [t, heads, head_dim] over the keys each token may see."""

    def copy_pages(self, copies: torch.Tensor) -> None:
        """Copy whole pages, all layers: int64 [c, 2] of source and destination."""
