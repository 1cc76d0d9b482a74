"""Prompt lookup: what followed the last few tokens the last time they stood in the text is guessed to follow again.

At each earlier place j the match is the longest n with text[j - n + 1 .. j] = the text's last n tokens. The `width` best
places (longest match, among equals the latest) are followed for `depth` tokens each and joined where they begin alike.
No weights; of use where answers repeat their prompts (summaries, retrieval, code).

Rejected: a hash table of n-grams on the host (with run-ahead the newest token is not there yet; a comparison of the whole
history is `longest` passes over some kilobytes), one place alone (a second one is nearly free to verify).
"""

from __future__ import annotations

import torch

from engine.speculative.base import DrafterSpec, DraftOptions, DraftState, Plain, Shape, Target
from engine.speculative.device import DraftBatch, merge_chains
from engine.speculative.rows import Draws, Rows

LONGEST = 5  # tokens of a match that are compared
SHORTEST = 2  # one token alone says too little


class NGram(Plain):
    """Args: depth, tokens ahead; width, places followed; nodes verified at most."""

    name = "ngram"
    reads_history = True

    def __init__(self, depth: int, width: int, budget: int) -> None:
        self.max_depth, self.width, self.nodes = depth, width, min(budget, depth * width)

    def propose(self, rows: Rows, state: DraftState, draws: Draws | None = None) -> DraftBatch:
        tokens, lens = lookup(rows.history, rows.seq_lens.long(), self.max_depth, self.width)
        merged = merge_chains(tokens, lens)
        n = self.nodes
        return DraftBatch(
            merged.tokens[:, :n], merged.parents[:, :n].contiguous(), merged.probabilities[:, :n], merged.lens.clamp(max=n),
            self.max_depth, self.width,
        )  # fmt: skip


def lookup(history: torch.Tensor, lengths: torch.Tensor, depth: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What followed the best matches.

    Args:
        history: int64 [b, L]; lengths int64 [b].
    Returns:
        tokens int64 [b, width, depth], lens int64 [b, width]; best match first.
    """
    b, size = history.shape
    place = torch.arange(size, device=history.device)
    last = lengths[:, None] - 1
    match, same = torch.zeros_like(history), torch.ones_like(history, dtype=torch.bool)
    for n in range(LONGEST):
        wanted = history.gather(1, (last - n).clamp(min=0))  # [b, 1]: the n-th token from the end
        shifted = torch.nn.functional.pad(history, (n, 0), value=-1)[:, :size]  # [b, L]: at j the token at j - n
        same = same & (shifted == wanted) & (last - n >= 0)
        match = match + same
    match = torch.where(place < last, match, 0)  # not the end itself
    k = min(width, size)
    score, best = (match * size + place).topk(k, 1)
    good = torch.div(score, size, rounding_mode="floor") >= SHORTEST
    ahead = best[:, :, None] + 1 + torch.arange(depth, device=history.device)
    tokens = history.gather(1, ahead.clamp(max=size - 1).flatten(1)).view(b, k, depth)
    return tokens, torch.where(good, (last - best).clamp(max=depth), 0)


def build(target: Target, options: DraftOptions) -> NGram:
    return NGram(options.depth, options.width, options.budget)


DRAFTER = DrafterSpec("ngram", (Shape.DYNAMIC,), build)
