"""What a drafter is given: the newest tokens of each sequence as rows, and how drafts are drawn by chance.

Does not know drafters or what they keep.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.speculative.compact import slots_of


@dataclass(frozen=True)
class Rows:
    """The newest tokens of b sequences, t together.

    Args:
        tokens, positions: int64 [t].
        slots: int64 [t] where each token's own things lie.
        before: int64 [t] the slot of the token before it; anything at position 0.
        cu_seqlens: int32 [b + 1].
        seq_lens: int32 [b]: the last row's position + 1; 0 is padding.
        block_table: int32 [b, w].
        last: int64 [b]: the row of each sequence's newest token.
        max_query_len: most rows of a sequence.
        history: int64 [b, length] all known tokens in order, the newest included; only for drafters with `reads_history`.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    before: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    last: torch.Tensor
    max_query_len: int
    history: torch.Tensor | None = None


@dataclass(frozen=True)
class Draws:
    """How drafts are drawn by chance, a sequence: temperature fp32 [b], top_k int64 [b] (0: all), top_p fp32 [b]."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    generator: torch.Generator | None = None


def next_slots(rows: Rows, count: int, page_size: int) -> torch.Tensor:
    """int64 [b, count]: slots of the positions behind each sequence's last row."""
    ahead = rows.positions[rows.last][:, None] + 1 + torch.arange(count, device=rows.tokens.device)
    return slots_of(rows.block_table, ahead, page_size)


def newest_rows(history: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, count: int, page_size: int) -> Rows:
    """The last `count` tokens of each sequence as rows, whatever is new of them: the form that a graph can hold.

    A verification settles at most max_depth + 1 tokens, so that many rows catch up. Rows that were seen before are computed
    again and give the same; those before a sequence's beginning see nothing and write to the sink.

    Args:
        history: int64 [b, length] known tokens, the newest included; seq_lens: int32 [b], how many (0: padding).
    """
    b, device = len(seq_lens), history.device
    positions = seq_lens.long()[:, None] - count + torch.arange(count, device=device)
    real, at = positions >= 0, positions.clamp(min=0)
    slots = slots_of(block_table, positions, page_size)
    before = slots_of(block_table, positions - 1, page_size)
    last = torch.arange(b, device=device) * count + count - 1
    cu = torch.arange(b + 1, dtype=torch.int32, device=device) * count
    tokens = torch.where(real, history.gather(1, at), 0)
    flat = (x.reshape(-1) for x in (tokens, at, slots, before))
    return Rows(*flat, cu, seq_lens, block_table, last, count, history)
