"""What drafters share that predict one token after another with decoder layers of their own: EAGLE, MTP, a draft model.

A drafter says how a token (and the feature before it) enters its layers and how logits and the next feature leave them;
rows, slots, masks and growing are done here once. While it drafts, the feature before a guess is the drafter's own, and
the guess's K/V lie behind the root in the order in which guesses are run.

Knows no weights of its own and no file formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from engine.models.decoder import Decoder, Layer
from engine.speculative.base import DraftOptions, DraftState, Plain, Shape, Target
from engine.speculative.device import DraftBatch
from engine.speculative.grow import StaticGrowth, dynamic_slots, grow_dynamic
from engine.speculative.layers import Where, planned, run_layers, where_of
from engine.speculative.rows import Draws, Rows, next_slots
from engine.speculative.tree import MAX_NODES, Topology, bad_tree, chain_topology, full_topology
from kernels.attention import Tree


@dataclass(frozen=True)
class Growth:
    """A tree's form: a topology, or dynamic with depth, width and budget."""

    topology: Topology | None
    depth: int
    width: int
    budget: int

    @property
    def slots(self) -> int:
        """Nodes that are run."""
        return dynamic_slots(self.depth, self.width) if self.topology is None else len(set(self.topology.parents) - {-1})

    @property
    def nodes(self) -> int:
        return self.budget if self.topology is None else len(self.topology)


def growth_of(options: DraftOptions, shape: Shape, vocab_size: int) -> Growth:
    """The form that the options ask for.

    Raises:
        EngineError: "bad_draft_tree": more nodes than a mask has bits, while drafting or when verified.
    """
    width = min(options.width, vocab_size)
    if shape is Shape.CHAIN:
        depth = min(options.depth, options.budget)
        growth = Growth(chain_topology(depth), depth, 1, depth)
    elif shape is Shape.STATIC:
        topology = _first(full_topology([width, *[1] * (options.depth - 1)]), options.budget)
        growth = Growth(topology, topology.depth, width, len(topology))
    else:
        most = width + (options.depth - 1) * width * width
        growth = Growth(None, options.depth, width, min(options.budget, most))
    if growth.slots > MAX_NODES:
        reason = f"{growth.slots} guesses would be tried, and at most {MAX_NODES} can be"
        raise bad_tree(f"depth {growth.depth} with width {growth.width} is too much: {reason}", nodes=growth.slots, limit=MAX_NODES)
    return growth


def _first(topology: Topology, budget: int) -> Topology:
    """The first nodes, in the order of depth: parents come first."""
    order = sorted(range(len(topology)), key=lambda i: (topology.depths[i], i))[:budget]
    at = {old: new for new, old in enumerate(order)} | {-1: -1}
    return Topology(tuple(at[topology.parents[i]] for i in order), tuple(topology.ranks[i] for i in order))


class Autoregressive(Plain):
    """Layers over paged K/V that are fed their own guesses.

    Args:
        body: whose shapes, rope and rule for q and k the layers have.
        layers: run in order; layer i keeps its K/V in state.kv's layer i.
    """

    catch_up = True

    def __init__(self, target: Target, body: Decoder, layers: list[Layer], growth: Growth) -> None:
        self.target, self.body, self.layers, self.growth = target, body, layers, growth
        self.static = None if growth.topology is None else StaticGrowth(growth.topology, target.device)
        self.nodes, self.max_depth, self.slots_ahead = growth.nodes, growth.depth, growth.slots

    def enter(self, tokens: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """[t, hidden] of the layers' input from tokens [t] and the features [t, feature_width] of the tokens before."""
        raise NotImplementedError

    def leave(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(the next feature [t, feature_width], what the head reads [t, hidden]) from the layers' output."""
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [t, vocab]. The target's head, unless a drafter has one."""
        return self.target.model.logits(hidden)

    def features_before(self, rows: Rows, state: DraftState) -> torch.Tensor | None:
        """[t, width]: the target's, of the tokens before these rows; zeros before the first."""
        if not self.feature_width:
            return None
        return torch.where(rows.positions[:, None] > 0, state.features_at(rows.before), 0)

    def extend(self, rows: Rows, state: DraftState) -> None:
        self._run(rows, state)

    def _run(self, rows: Rows, state: DraftState) -> torch.Tensor:
        x = self.enter(rows.tokens, self.features_before(rows, state))
        return run_layers(self.body, self.layers, x, where_of(rows, state.kv), state.kv, self.target.ops)

    def propose(self, rows: Rows, state: DraftState, draws: Draws | None = None) -> DraftBatch:
        feature, hidden = self.leave(self._run(rows, state).index_select(0, rows.last))
        behind = _Behind(rows, next_slots(rows, self.slots_ahead, state.page_size), None if feature is None else feature[:, None])
        step = partial(self._step, behind, state)
        root = self.logits(hidden)
        if self.static is not None:
            return self.static.grow(root, step, draws)
        return grow_dynamic(root, step, self.growth.depth, self.growth.width, self.growth.budget)

    def _step(self, behind: _Behind, state: DraftState, tokens, above, bits, depth: int, first: int) -> torch.Tensor:
        """A Stepper: the nodes are the last of first + m drafts."""
        b, m = tokens.shape
        before = None if behind.features is None else behind.features.gather(1, above[:, :, None].expand(-1, -1, behind.features.shape[2]))
        where = planned(behind.where(bits, depth, first, m), state.kv)
        x = self.enter(tokens.reshape(-1), None if before is None else before.flatten(0, 1))
        x = run_layers(self.body, self.layers, x, where, state.kv, self.target.ops)
        feature, hidden = self.leave(x)
        behind.features = None if feature is None else feature.view(b, m, -1)
        return self.logits(hidden).view(b, m, -1)


@dataclass
class _Behind:
    """Where guesses go, and the features of those that were run last [b, m, width]."""

    rows: Rows
    slots: torch.Tensor  # int64 [b, slots_ahead]
    features: torch.Tensor | None

    def where(self, bits: torch.Tensor, depth: int, first: int, m: int) -> Where:
        """Of m nodes at `depth` after `first` others. Padding (seq_lens 0) stays padding."""
        rows, (b, device) = self.rows, (len(bits), bits.device)
        real = rows.seq_lens > 0
        positions = (rows.positions[rows.last] + depth)[:, None].expand(b, m).reshape(-1)
        drafts = torch.where(real, first + m, 0).int()
        tree = Tree(drafts, bits.reshape(-1).contiguous(), positions.int())
        cu = torch.arange(b + 1, dtype=torch.int32, device=device) * m
        return Where(positions, self.slots[:, first : first + m].reshape(-1), rows.block_table, cu, rows.seq_lens + drafts, m, tree)
