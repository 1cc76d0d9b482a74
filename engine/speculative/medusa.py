"""Medusa: heads side by side on one hidden state, each guessing one place further ahead; a static tree of their guesses.

    h = feature of the token before the root (the hidden state that chose the root)
    head d:  r = h + silu(W_1 h + b_1), …;   logits = lm_head(r)          guesses the token d places behind the root

The LM head is the target's. A head that sees the token adds T_d · embedding(root) first (what Hydra found: the heads of
Medusa do not know which token was chosen). The tree is the best one for the accuracies that training measured (tree.py).

Rejected: growing by confidence (heads do not see each other's guesses, so their probabilities multiply badly), an LM head
for each (28 million weights each here).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from engine.speculative.base import FINAL, DrafterSpec, DraftOptions, DraftState, Plain, Shape, Target
from engine.speculative.device import DraftBatch
from engine.speculative.heads import Head, bad_head, load_head
from engine.speculative.rows import Draws, Rows
from engine.speculative.tree import Topology, chain_topology, static_tree


class Medusa(Plain):
    """Args: blocks [head][block] of (W [hidden, hidden], b [hidden]); tokens [head] T_d or None."""

    name = "medusa"
    taps = (FINAL,)

    def __init__(self, target: Target, blocks: list[list[tuple[torch.Tensor, torch.Tensor]]], seen: list[torch.Tensor] | None,
                 topology: Topology) -> None:  # fmt: skip
        self.target, self.blocks, self.seen = target, blocks, seen
        self.topology = topology.require(len(blocks))
        self.feature_width = target.config.hidden_size
        self.nodes, self.max_depth = len(topology), topology.depth
        put = lambda x: torch.tensor(x, dtype=torch.int64, device=target.device)  # noqa: E731
        self.parents, self.ranks, self.head = put(topology.parents), put(topology.ranks), put(topology.depths) - 1
        self.parameters = sum(w.numel() + b.numel() for head in blocks for w, b in head) + sum(t.numel() for t in seen or [])

    def head_logits(self, feature: torch.Tensor, tokens: torch.Tensor, heads: int) -> torch.Tensor:
        """fp32 [b, heads, vocab] of the first heads, from features [b, hidden] and the tokens [b] that they chose."""
        x = run_heads(feature, self.target.ops.embedding(tokens, self.target.model.embedding), self.blocks[:heads], self.seen)
        return self.target.model.logits(x.flatten(0, 1)).view(len(feature), heads, -1)

    def propose(self, rows: Rows, state: DraftState, draws: Draws | None = None) -> DraftBatch:
        last = rows.last
        feature = torch.where(rows.positions[last, None] > 0, state.features_at(rows.before[last]), 0)
        logits = self.head_logits(feature, rows.tokens[last], self.max_depth)
        values, best = logits.log_softmax(-1).topk(self.topology.width, -1)  # [b, heads, k]
        b, n = len(last), self.nodes
        lens = torch.full((b,), n, dtype=torch.int64, device=feature.device)
        tokens, probabilities = best[:, self.head, self.ranks], values.exp()[:, self.head, self.ranks]
        parents = self.parents.expand(b, n).contiguous()
        return DraftBatch(tokens, parents, probabilities, lens, self.max_depth, self.topology.width)


def run_heads(feature, embedded, blocks, seen) -> torch.Tensor:
    """[b, heads, hidden]: what the LM head reads. Training runs the same lines."""
    out = []
    for d, head in enumerate(blocks):
        x = feature if seen is None else feature + F.linear(embedded, seen[d])
        for weight, bias in head:
            x = x + F.silu(F.linear(x, weight, bias))
        out.append(x)
    return torch.stack(out, 1)


def accuracies_of(head: Head, heads: int, vocab_size: int) -> np.ndarray:
    """The card's [heads, k]."""
    try:
        found = np.array(head.card.get("accuracies"), float)
    except (TypeError, ValueError):
        found = np.zeros(0)
    if found.ndim != 2 or len(found) != heads or not ((found >= 0) & (found <= 1)).all() or found.shape[1] > vocab_size:
        raise bad_head(head.file, f"its card has no accuracies of {heads} heads")
    return found


def build(target: Target, options: DraftOptions) -> Medusa:
    head = load_head(options.source, "medusa", target)
    hidden = target.config.hidden_size
    counts = [head.card.get(name) for name in ("heads", "blocks")]
    if not all(isinstance(n, int) and 1 <= n <= 16 for n in counts):
        raise bad_head(head.file, "its card does not say how many heads and blocks it has")
    heads, depth = counts
    blocks = [
        [(head.take(f"{h}.{i}.weight", hidden, hidden), head.take(f"{h}.{i}.bias", hidden)) for i in range(depth)] for h in range(heads)
    ]
    seen = [head.take(f"{h}.token", hidden, hidden) for h in range(heads)] if head.card.get("sees_token") else None
    if (options.shape or Shape.STATIC) is Shape.CHAIN:
        topology = chain_topology(min(options.depth, options.budget))
    else:
        topology = static_tree(accuracies_of(head, heads, target.config.vocab_size)[: options.depth, : options.width], options.budget)
    return Medusa(target, blocks, seen, topology)


DRAFTER = DrafterSpec("medusa", (Shape.STATIC, Shape.CHAIN), build, trained=True)
