"""Draft trees of a whole batch on the device: what drafters return, and what verification takes. Asks the host nothing.

Every sequence has room for the same n nodes; `lens` says how many are real. The others have the parent ROOT, the token 0
and no meaning. tree.py says the same of one sequence in numpy, and tests hold the two together.

Does not know drafters or caches. Rejected: ragged trees on the device (a graph has fixed shapes; a mask of lens is free).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.speculative.tree import ROOT, DraftTree


@dataclass(frozen=True)
class DraftBatch:
    """b trees of up to n nodes.

    Invariant: a sequence's first lens nodes are a tree in the sense of tree.DraftTree; n is at most 64.

    Args:
        tokens: int64 [b, n].
        parents: int64 [b, n], ROOT (-1) or an earlier node.
        probabilities: fp32 [b, n].
        lens: int64 [b].
        max_depth, max_width: no node lies deeper or has more children; numbers of the host.
        q: fp32 [b, n + 1, vocab] or None. Row 0 is the root's: the distribution that the node's children were drawn from,
            one after the other without replacement, exactly as drawn (temperature, top-k, top-p included). None: the
            children were chosen without chance.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    probabilities: torch.Tensor
    lens: torch.Tensor
    max_depth: int
    max_width: int
    q: torch.Tensor | None = None

    @property
    def valid(self) -> torch.Tensor:
        """bool [b, n]."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lens[:, None]

    def masks(self) -> torch.Tensor:
        """int64 [b, n]: bit j of row i: node i sees node j."""
        return ancestor_bits(self.parents, self.max_depth)

    def depths(self) -> torch.Tensor:
        """int64 [b, n]."""
        out, at = torch.ones_like(self.parents), self.parents
        for _ in range(self.max_depth - 1):
            out = out + (at >= 0)
            at = step_up(self.parents, at)
        return out

    def limit(self, room: torch.Tensor) -> DraftBatch:
        """The first `room` [b] nodes of each tree; parents come first, so what is left is a tree."""
        return replace(self, lens=torch.minimum(self.lens, room.clamp(min=0)))

    def trees(self) -> list[DraftTree]:
        """For records and tests; waits for the device."""
        arrays = [x.cpu().numpy() for x in (self.tokens, self.parents, self.probabilities.double().clamp(0, 1), self.lens)]
        return [DraftTree(t[:n], p[:n], q[:n]) for t, p, q, n in zip(*arrays, strict=True)]


def step_up(parents: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """The parents of `nodes`, both [b, …]; ROOT's is ROOT."""
    return torch.where(nodes >= 0, parents.gather(1, nodes.clamp(min=0)), ROOT)


def ancestor_bits(parents: torch.Tensor, max_depth: int) -> torch.Tensor:
    """int64 [b, n]: each node's bit and its ancestors'."""
    n = parents.shape[1]
    own = torch.ones(n, dtype=torch.int64, device=parents.device) << torch.arange(n, device=parents.device)
    bits, at = own.expand_as(parents), parents
    for _ in range(max_depth - 1):
        bits = bits | torch.where(at >= 0, own[at.clamp(min=0)], 0)
        at = step_up(parents, at)
    return bits.contiguous()


def rerank(confidences: torch.Tensor, budget: int) -> torch.Tensor:
    """int64 [b, budget]: the most confident nodes in their old order, among equals the earlier ones; as tree.rerank."""
    best = torch.sort(confidences, dim=1, descending=True, stable=True).indices[:, :budget]
    return best.sort(dim=1).values


def keep(parents: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """The parents [b, m] of the kept `nodes` [b, m], numbered anew. Each kept node's parent is kept."""
    place = torch.zeros_like(parents)  # [b, n] old node → new
    place.scatter_(1, nodes, torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes))
    old = parents.gather(1, nodes)
    return torch.where(old >= 0, place.gather(1, old.clamp(min=0)), ROOT)


def chains(tokens: torch.Tensor, probabilities: torch.Tensor, lens: torch.Tensor) -> DraftBatch:
    """One chain a sequence: tokens and probabilities [b, d], lens [b]."""
    depth = tokens.shape[1]
    parents = (torch.arange(depth, device=tokens.device) - 1).expand_as(tokens).contiguous()
    return DraftBatch(tokens, parents, probabilities, lens, depth, 1)


def merge_chains(tokens: torch.Tensor, lens: torch.Tensor) -> DraftBatch:
    """w chains a sequence as one tree: where two begin alike they share nodes.

    Args:
        tokens: int64 [b, w, d]; earlier chains come first in the tree's order of each depth.
        lens: int64 [b, w].
    Returns:
        n = w · d nodes of room, in the order of depth; probabilities 1.
    """
    b, w, d = tokens.shape
    steps = torch.arange(d, device=tokens.device)
    real = steps < lens[:, :, None]  # [b, w, d]
    same = (tokens[:, :, None] == tokens[:, None]) & real[:, :, None] & real[:, None]  # [b, w, w, d]
    same = same.cumprod(3)  # the two chains agree up to here
    first = same.argmax(2)  # [b, w, d]: the earliest chain that has this node; argmax takes the first of equals
    own = real & (first == torch.arange(w, device=tokens.device)[None, :, None])
    # nodes by depth, then chain: [b, d * w]
    number, owner = (own.transpose(1, 2).reshape(b, d * w), first.transpose(1, 2).reshape(b, d * w))
    depth_of = steps.repeat_interleave(w)
    above = torch.cat([torch.full((b, w), ROOT, device=tokens.device), owner[:, :-w] + depth_of[:-w] * w], 1)
    # above: the parent's place, if this chain's node one step up was given to `owner`
    order = torch.sort((~number).to(torch.int8), dim=1, stable=True).indices
    place = torch.zeros_like(order).scatter_(1, order, torch.arange(d * w, device=tokens.device).expand(b, -1))
    old = above.gather(1, order)
    kept = number.gather(1, order)
    parents = torch.where(kept & (old >= 0), place.gather(1, old.clamp(min=0)), ROOT)
    flat = tokens.transpose(1, 2).reshape(b, d * w).gather(1, order)
    return DraftBatch(torch.where(kept, flat, 0), parents, torch.ones_like(flat, dtype=torch.float32), number.sum(1), d, w)
