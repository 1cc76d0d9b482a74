"""Growing trees on the device with a drafter that predicts one token at a time (EAGLE, MTP, a draft model).

A Stepper runs the drafter on m nodes a sequence and returns what it says comes after each. The nodes that were run lie
behind the root in the order in which they were run; `bits` says which of them a node sees.

static   the form is known: of each inner node the topology's children are taken by rank (or drawn by chance).
dynamic  EAGLE-2: at each depth the `width` most confident nodes are run, each with its `width` best children; of all
         children the `budget` most confident are kept. Confidence is the product of probabilities from the root.

Does not know weights, caches or layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.speculative.accept import distribution
from engine.speculative.device import DraftBatch, keep, rerank
from engine.speculative.rows import Draws
from engine.speculative.tree import ROOT, Topology, masks_of


class Stepper(Protocol):
    """Runs nodes."""

    def __call__(self, tokens: torch.Tensor, above: torch.Tensor, bits: torch.Tensor, depth: int, first: int) -> torch.Tensor:
        """fp32 [b, m, vocab].

        Args:
            tokens: int64 [b, m].
            above: int64 [b, m]: each node's parent among the rows of the call before (the first call: the root, 0).
            bits: int64 [b, m]: bit j: it sees the j-th node that was run.
            depth: of all m nodes.
            first: how many nodes were run before.
        """


def dynamic_slots(depth: int, width: int) -> int:
    """Nodes that are run: a level each but the last."""
    return (depth - 1) * width


def grow_dynamic(root: torch.Tensor, step: Stepper, depth: int, width: int, budget: int) -> DraftBatch:
    """root: fp32 [b, vocab], what follows the root. width is at most the vocabulary."""
    b, device = len(root), root.device
    place = torch.arange(width, device=device)
    values, tokens = root.log_softmax(-1).topk(width, -1)  # [b, k]
    all_tokens, all_parents, all_logs, all_scores = [tokens], [torch.full_like(tokens, ROOT)], [values], [values]
    frontier, scores, bits = place.expand(b, width), values, torch.ones_like(tokens) << place  # nodes, as numbered in all_*
    above, known = torch.zeros_like(tokens), width
    for level in range(1, depth):
        run = torch.cat(all_tokens, 1).gather(1, frontier)
        logits = step(run, above, bits, level, (level - 1) * width)
        values, tokens = logits.log_softmax(-1).topk(width, -1)  # [b, k, k]
        confidence = (scores[:, :, None] + values).flatten(1)
        all_tokens.append(tokens.flatten(1))
        all_parents.append(frontier.repeat_interleave(width, 1))
        all_logs.append(values.flatten(1))
        all_scores.append(confidence)
        if level + 1 < depth:
            best = torch.sort(confidence, dim=1, descending=True, stable=True).indices[:, :width]
            above, scores, frontier = torch.div(best, width, rounding_mode="floor"), confidence.gather(1, best), known + best
            bits = bits.gather(1, above) | (torch.ones_like(best) << (level * width + place))
        known += width * width
    nodes = rerank(torch.cat(all_scores, 1), budget)
    parents = keep(torch.cat(all_parents, 1), nodes)
    lens = torch.full((b,), nodes.shape[1], dtype=torch.int64, device=device)
    tokens, logs = (torch.cat(x, 1).gather(1, nodes) for x in (all_tokens, all_logs))
    return DraftBatch(tokens, parents, logs.exp(), lens, depth, width)


def inner_nodes(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Nodes with children, a level: those that are run."""
    inner = sorted(set(topology.parents) - {ROOT})
    return tuple(tuple(i for i in inner if topology.depths[i] == d) for d in range(1, topology.depth))


@dataclass(frozen=True)
class _Level:
    """What a depth needs, on the device: rows are the root, or the nodes of the depth above that were run."""

    children: torch.Tensor  # int64 [c] nodes of this depth
    of_row: torch.Tensor  # int64 [c] whose children they are
    ranks: torch.Tensor  # int64 [c]
    rows: torch.Tensor  # int64 [m] rows as numbered in q: 0 the root, i + 1 node i
    run: torch.Tensor  # int64 [r] nodes of this depth that have children themselves
    above: torch.Tensor  # int64 [r] their parents among the rows
    bits: torch.Tensor  # int64 [r]
    first: int  # nodes run before


class StaticGrowth:
    """Grows trees of one form. Its constants lie on the device, so that a graph can hold a call."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self.topology = topology
        self.parents = torch.tensor(topology.parents, dtype=torch.int64, device=device)
        levels = (*inner_nodes(topology), ())  # the deepest nodes are not run
        order = [i for level in levels for i in level]
        at = {node: i for i, node in enumerate(order)} | {ROOT: ROOT}
        masks = masks_of(np.array([at[topology.parents[node]] for node in order], np.int64))
        self.levels, rows, first = [], (ROOT,), 0

        def put(values) -> torch.Tensor:
            return torch.tensor(list(values), dtype=torch.int64, device=device)

        for depth, level in enumerate(levels if len(topology) else (), start=1):
            children = [i for i in range(len(topology)) if topology.depths[i] == depth]
            self.levels.append(
                _Level(
                    put(children), put(rows.index(topology.parents[i]) for i in children), put(topology.ranks[i] for i in children),
                    put(row + 1 for row in rows), put(level), put(rows.index(topology.parents[i]) for i in level),
                    put(masks[first : first + len(level)].tolist()), first,
                )
            )  # fmt: skip
            rows, first = level, first + len(level)
        self.slots = first  # nodes that are run

    def grow(self, root: torch.Tensor, step: Stepper, draws: Draws | None = None) -> DraftBatch:
        """A tree behind each root, nodes in the topology's order.

        Args:
            root: fp32 [b, vocab], what follows the root.
            draws: children are drawn by chance without replacement, the first of them with rank 0; None: the most probable.
        """
        b, n, device = len(root), len(self.topology), root.device
        tokens, probabilities = torch.zeros(b, n, dtype=torch.int64, device=device), torch.zeros(b, n, device=device)
        q = torch.zeros(b, n + 1, root.shape[1], device=device) if draws is not None else None
        logits = root[:, None]
        for depth, level in enumerate(self.levels, start=1):
            values, best, law = choose(logits, self.topology.width, draws)
            tokens.index_copy_(1, level.children, best[:, level.of_row, level.ranks])
            probabilities.index_copy_(1, level.children, values[:, level.of_row, level.ranks])
            if law is not None:
                q.index_copy_(1, level.rows, law)
            if len(level.run):
                run = tokens.index_select(1, level.run)
                logits = step(run, level.above.expand(b, -1), level.bits.expand(b, -1), depth, level.first)
        lens = torch.full((b,), n, dtype=torch.int64, device=device)
        return DraftBatch(
            tokens, self.parents.expand(b, n).contiguous(), probabilities, lens, self.topology.depth, self.topology.width, q
        )  # fmt: skip


def choose(logits: torch.Tensor, width: int, draws: Draws | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(probabilities [b, m, width], tokens, the law they were drawn from [b, m, vocab] or None) after rows [b, m, vocab]."""
    if draws is None:
        values, best = logits.log_softmax(-1).topk(width, -1)
        return values.exp(), best, None
    b, m, vocab = logits.shape
    each = [x.repeat_interleave(m) for x in (draws.temperature, draws.top_k, draws.top_p)]
    law = distribution(logits.reshape(b * m, vocab), *each).view(b, m, vocab).float()
    noise = torch.empty_like(law).exponential_(generator=draws.generator)
    best = (law / noise).topk(width, -1).indices  # a race of exponentials: drawn one by one without replacement
    return law.gather(2, best), best, law
