"""A verification as rows of a ragged batch, made on the device: each sequence's root, then its drafts, the tree as a mask.

    sequence s:  root at position p, draft i at position p + depth(i), K/V of both in slots p and p + 1 + i

A sequence without drafts is a plain decode step, padding has no rows; nothing else is special, so rows of prefills can
stand beside these. There is room for b · (n + 1) rows; those behind the last sequence are padding: they write to the sink,
and attention leaves them out.

Does not know the model. Rejected: n + 1 rows for each sequence (rows that are no drafts would need slots and masks).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.speculative.compact import slots_of
from engine.speculative.device import DraftBatch
from kernels.attention import Tree


@dataclass(frozen=True)
class Verification:
    """What the target is run on.

    Args:
        tokens, positions, slots: int64 [b · (n + 1)].
        cu_seqlens: int32 [b + 1]; seq_lens: int32 [b] keys, drafts included.
        tree: for the attention kernels.
        rows: int64 [b, n + 1]: where row j of a sequence stands among these; behind its drafts, its root's.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    tree: Tree
    rows: torch.Tensor

    def by_row(self, values: torch.Tensor) -> torch.Tensor:
        """[b, n + 1, …] of values [b · (n + 1), …]: what accept.py and DraftState.keep_accepted take."""
        return values[self.rows.reshape(-1)].view(*self.rows.shape, *values.shape[1:])


def verification(
    drafts: DraftBatch, roots: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, page_size: int
) -> Verification:  # fmt: skip
    """The rows of a batch.

    Args:
        roots: int64 [b], the newest known tokens.
        seq_lens: int32 [b], how many tokens are known, the root included; 0 is padding.
        block_table: int32 [b, w]; slots up to seq_lens + lens - 1 are allocated.
    """
    (b, n), device = drafts.tokens.shape, roots.device
    real = seq_lens > 0
    lens = torch.where(real, drafts.lens, 0)
    counts = torch.where(real, lens + 1, 0)
    cu = torch.zeros(b + 1, dtype=torch.int64, device=device)
    torch.cumsum(counts, 0, out=cu[1:])
    row = torch.arange(b * (n + 1), device=device)
    of = torch.searchsorted(cu[1:], row, right=True).clamp(max=b - 1)  # [t] whose row
    j = row - cu[of]
    inside = row < cu[-1]

    def pick(first: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """[t]: the root's value [b], or the draft's [b, n]; 0 in padding."""
        both = torch.cat([first[:, None], others], 1)
        return torch.where(inside, both[of, j.clamp(max=n)], 0)

    root_at = (seq_lens.long() - 1).clamp(min=0)
    positions = pick(root_at, root_at[:, None] + drafts.depths())
    where = root_at[:, None] + torch.arange(n + 1, device=device)
    slots = slots_of(block_table, where, page_size)
    tree = Tree(lens.int(), pick(torch.zeros_like(roots), drafts.masks()), positions.int())
    place = torch.arange(n + 1, device=device)
    rows = cu[:-1, None] + torch.where(place <= lens[:, None], place, 0)
    return Verification(
        pick(roots, drafts.tokens), positions, pick(slots[:, 0], slots[:, 1:]), cu.int(), (seq_lens + lens).int(), tree,
        rows.clamp(max=b * (n + 1) - 1),
    )  # fmt: skip
