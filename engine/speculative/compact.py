"""After a verification: the accepted path's keys and values move to the places that plain decoding would have used.

A verification writes the root at its position p and draft i at slot p + 1 + i, turned by rope at p + depth. The accepted
node of depth d therefore belongs to slot p + d, at which it is already turned: K and V are copied as they are. Everything
behind p + count is free again; stale values there are never read (attention goes by lengths and masks).

    nodes  0 1 2 3 4 5      path 1, 4      slots  p+1 p+2 p+3 p+4 p+5 p+6
                                                       └──► p+1        │
                                                            p+2 ◄── p+5

Works on slot numbers (page · page_size + offset), so pages, block tables and owners stay another's matter. What is
not moved has source and destination 0: the sink. Sources may be destinations of the same call (a path 1, 2 reads
p + 2 and writes it): everything is read before anything is written.

Rejected: turning tables around instead of moving (a page holds several tokens); copying only what differs (the count is
the device's to know; max_depth tokens a sequence are little).
"""

from __future__ import annotations

import torch

from engine.config import ModelConfig


def slots_of(block_table: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """int64 [b, m] slots of positions [b, m] by block_table [b, w]; 0 (the sink) outside the table."""
    place = torch.div(positions, page_size, rounding_mode="floor")
    inside = (positions >= 0) & (place < block_table.shape[1])
    page = block_table.gather(1, place.clamp(0, block_table.shape[1] - 1)).long()
    return torch.where(inside, page * page_size + positions % page_size, 0)


def moves(path: torch.Tensor, root_positions: torch.Tensor, block_table: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(source, destination) slots of the accepted paths, int64 [b, max_depth] each; 0, 0 where there is nothing to move.

    Args:
        path: int64 [b, max_depth]: accepted nodes from the root's child down, -1 behind them.
        root_positions: int64 [b]: positions of the tokens that were known before.
    """
    accepted = path >= 0
    steps = torch.arange(path.shape[1], device=path.device)
    there = accepted & (path != steps)  # node d - 1 at depth d lies where it belongs
    source = slots_of(block_table, root_positions[:, None] + 1 + path, page_size)
    destination = slots_of(block_table, root_positions[:, None] + 1 + steps, page_size)
    return torch.where(there, source, 0), torch.where(there, destination, 0)


def move_tokens(
    arena: torch.Tensor, config: ModelConfig, page_size: int, dtype: torch.dtype, source: torch.Tensor, destination: torch.Tensor
) -> torch.Tensor:
    """Copy tokens of every layer within a full-attention arena, in place, and return it.

    Args:
        arena: uint8 [pages, page_bytes], a page being [layer][K, V][page_size][kv_heads][head_dim] (engine/attention/full.py).
        source, destination: int64 [m] or [b, m] slots.
    """
    parts = arena.view(dtype).view(len(arena), 2 * config.num_layers, page_size, config.num_kv_heads * config.head_dim)
    _move(parts, source, destination, page_size)
    return arena


def move_features(features: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
    """The same of features [pages, page_size, width] that a drafter keeps a token."""
    _move(features.view(len(features), 1, *features.shape[1:]), source, destination, features.shape[1])
    return features


def _move(parts: torch.Tensor, source: torch.Tensor, destination: torch.Tensor, page_size: int) -> None:
    """parts [pages, p, page_size, n]."""
    source, destination = source.reshape(-1), destination.reshape(-1)
    read = parts[source // page_size, :, source % page_size]  # a copy: [m, p, n]
    parts[destination // page_size, :, destination % page_size] = read
