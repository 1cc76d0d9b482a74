"""The draft tree that every drafter shares: a chain is a tree, a tree is parents in numpy. Frozen; no torch in it.

Node i guesses tokens[i] after its parent; parents[i] is an earlier node, or ROOT: the sequence's newest known token.
So a tree lies in the cache as it lies in the array: behind the root at position p, node i takes the slot of position
p + 1 + i, is turned by rope at p + depth[i], and sees the drafts whose bits are in masks()[i]: kernels.attention.Tree.

    parents  [-1, -1, 0, 0, 2]        root ─┬─ 0 ─┬─ 2 ── 4
    depths   [ 1,  1, 2, 2, 3]              └─ 1  └─ 3

`static_tree` places nodes where measured per-head accuracies multiply to the most (Medusa); `rerank` keeps the best
of what was grown by confidence (EAGLE-2). The same choices on the device, for a whole batch: device.py.

Does not know drafters, models or caches. Rejected: nested node objects (every reader wants arrays), paths with padding
(Medusa's retrieve_indices; follows from parents), a tree without its order (slots and mask bits are the order).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import EngineError

ROOT = -1  # as a parent: the newest known token, which is no draft
MAX_NODES = 64  # the bits of a mask (kernels.attention.MAX_DRAFTS)


def bad_tree(reason: str, **fields: object) -> EngineError:
    """A draft tree that cannot be verified."""
    return EngineError("bad_draft_tree", f"The draft tree is not usable: {reason}.", reason=reason, **fields)


@dataclass(frozen=True, eq=False)
class DraftTree:
    """One sequence's drafts of one step.

    Invariant: parents come before their children, siblings differ in their tokens, at most MAX_NODES nodes.

    Args:
        tokens: int64 [n].
        parents: int64 [n], ROOT or an earlier node.
        probabilities: float64 [n]: what the drafter gave the token after its parent, in [0, 1]; 1 where it gives none.
    Raises:
        EngineError: "bad_draft_tree" with the reason.
    """

    tokens: np.ndarray
    parents: np.ndarray
    probabilities: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in (("tokens", np.int64), ("parents", np.int64), ("probabilities", np.float64)):
            array = np.array(getattr(self, name), dtype)  # a copy: whoever made it may write on
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        n = len(self.tokens)
        if self.tokens.ndim != 1 or self.parents.shape != (n,) or self.probabilities.shape != (n,):
            raise bad_tree("tokens, parents and probabilities differ in length")
        check_parents(self.parents)
        if not ((self.probabilities >= 0) & (self.probabilities <= 1)).all():
            raise bad_tree("a probability lies outside 0 to 1")
        if len(set(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))) < n:
            raise bad_tree("two siblings guess the same token")

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        names = ("tokens", "parents", "probabilities")
        return isinstance(other, DraftTree) and all(np.array_equal(getattr(self, n), getattr(other, n)) for n in names)

    @property
    def depths(self) -> np.ndarray:
        """int64 [n]: 1 for the root's children."""
        return depths_of(self.parents)

    @property
    def confidences(self) -> np.ndarray:
        """float64 [n]: the product of the probabilities from the root down to the node: EAGLE-2's estimate that the
        node is accepted."""
        out = np.zeros(len(self))
        for i, parent in enumerate(self.parents.tolist()):
            out[i] = self.probabilities[i] * (1.0 if parent == ROOT else out[parent])
        return out

    def masks(self) -> np.ndarray:
        """int64 [n]: bit j of row i: node i sees node j (itself and its ancestors)."""
        return masks_of(self.parents)

    def positions(self, root_position: int) -> np.ndarray:
        """int64 [n] for a root at that position."""
        return root_position + self.depths

    def children(self, node: int) -> list[int]:
        """In the tree's order. `node` may be ROOT."""
        return np.flatnonzero(self.parents == node).tolist()

    def path(self, node: int) -> list[int]:
        """From the root's child down to the node itself."""
        out: list[int] = []
        while node != ROOT:
            out.append(node)
            node = int(self.parents[node])
        return out[::-1]

    def keep(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of these nodes alone, in their old order.

        Raises:
            EngineError: "bad_draft_tree" if a kept node's parent is not kept.
        """
        order = sorted(nodes)
        at = {old: new for new, old in enumerate(order)} | {ROOT: ROOT}
        parents = self.parents[order].tolist()
        if any(p not in at for p in parents):
            raise bad_tree("a node was kept without its parent")
        return DraftTree(self.tokens[order], np.array([at[p] for p in parents], np.int64), self.probabilities[order])

    def cut(self, budget: int | None = None, depth: int | None = None) -> DraftTree:
        """At most `budget` nodes, those of most confidence, none deeper than `depth`: what the room left in the pool,
        the window or the request's max_tokens allows."""
        nodes = np.arange(len(self)) if depth is None else np.flatnonzero(self.depths <= depth)
        if budget is not None and len(nodes) > budget:
            nodes = nodes[rerank(self.confidences[nodes], max(0, budget))]
        return self if len(nodes) == len(self) else self.keep(nodes.tolist())


def chain(tokens: Sequence[int], probabilities: Sequence[float] | None = None) -> DraftTree:
    """Each token after the one before."""
    n = len(tokens)
    return DraftTree(np.array(tokens, np.int64), np.arange(n) - 1, np.ones(n) if probabilities is None else np.array(probabilities))


def check_parents(parents: np.ndarray) -> None:
    """Raises EngineError "bad_draft_tree" unless these are the parents of a tree that can be verified."""
    if len(parents) > MAX_NODES:
        raise bad_tree(f"it has {len(parents)} nodes, and at most {MAX_NODES} can be verified", nodes=len(parents), limit=MAX_NODES)
    if ((parents < ROOT) | (parents >= np.arange(len(parents)))).any():
        raise bad_tree("a node's parent does not come before it")


def depths_of(parents: np.ndarray) -> np.ndarray:
    """int64 [n]."""
    out = np.zeros(len(parents), np.int64)
    for i, parent in enumerate(parents.tolist()):
        out[i] = 1 if parent == ROOT else out[parent] + 1
    return out


def masks_of(parents: np.ndarray) -> np.ndarray:
    """int64 [n] of ancestor bits; node 63's bit is the sign."""
    bits: list[int] = []
    for i, parent in enumerate(parents.tolist()):
        bits.append((1 << i) | (0 if parent == ROOT else bits[parent]))
    return np.array(bits, np.uint64).view(np.int64)


def rerank(confidences: np.ndarray, budget: int) -> np.ndarray:
    """The `budget` nodes of most confidence, in the tree's order; among equals the earlier ones.

    A child is never more confident than its parent and comes after it, so no node is kept without its parent.
    """
    return np.sort(np.argsort(-confidences, kind="stable")[:budget])


@dataclass(frozen=True)
class Topology:
    """A tree's shape before anything is guessed: node i is its parent's `ranks[i]`-th best guess (0: the best).

    A static tree is one of these; the drafter fills in tokens. Invariant: as DraftTree, and ranks of siblings differ.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.ranks):
            raise bad_tree("parents and ranks differ in length")
        check_parents(np.array(self.parents, np.int64))
        if any(r < 0 for r in self.ranks) or len(set(zip(self.parents, self.ranks, strict=True))) < len(self.ranks):
            raise bad_tree("two siblings are the same guess")

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        return tuple(depths_of(np.array(self.parents, np.int64)).tolist())

    @property
    def depth(self) -> int:
        return max(self.depths, default=0)

    @property
    def width(self) -> int:
        """Guesses that the best-filled place takes: what top-k a drafter must make."""
        return max(self.ranks, default=-1) + 1

    def require(self, heads: int) -> Topology:
        """Itself.

        Raises:
            EngineError: "bad_draft_tree" if it is deeper than there are heads.
        """
        if self.depth > heads:
            raise bad_tree(f"it is {self.depth} deep and the drafter has {heads} heads", depth=self.depth, heads=heads)
        return self


def chain_topology(depth: int) -> Topology:
    """The best guess after the best guess."""
    return Topology(tuple(range(-1, depth - 1)), (0,) * depth)


def full_topology(branching: Sequence[int]) -> Topology:
    """Every node of depth d has branching[d] children."""
    parents, ranks, level = [], [], [ROOT]
    for width in branching:
        below = []
        for parent in level:
            for rank in range(width):
                below.append(len(parents))
                parents.append(parent)
                ranks.append(rank)
        level = below
    return Topology(tuple(parents), tuple(ranks))


def static_tree(accuracies: np.ndarray, budget: int) -> Topology:
    """The tree of `budget` nodes with the largest expected accepted length, if heads guess independently (Medusa, 2.3.3).

    A node of depth d and ranks r_1 … r_d is accepted with probability a[0, r_1] · … · a[d - 1, r_d]; the greedy choice
    is the best, since no node is worth more than its parent.

    Args:
        accuracies: [heads, k]: how often head h's r-th guess was right, measured on held-out text.
        budget: at most MAX_NODES; fewer nodes are returned if the rest is never right.
    Returns:
        nodes in the order of depth, then of their parents, then of rank.
    """
    heads, k = accuracies.shape
    if budget > MAX_NODES:
        raise bad_tree(f"a budget of {budget} nodes is more than the {MAX_NODES} that can be verified", nodes=budget, limit=MAX_NODES)
    order = [np.argsort(-row, kind="stable") for row in accuracies]  # a head's guesses by how often they were right
    chosen: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = []  # (-value, places in each head's order)

    def offer(path: tuple[int, ...]) -> None:
        if len(path) <= heads and path[-1] < k:
            value = float(np.prod([accuracies[d, order[d][place]] for d, place in enumerate(path)]))
            if value > 0:
                heapq.heappush(waiting, (-value, path))

    if heads and k:
        offer((0,))
    while waiting and len(chosen) < budget:
        _, path = heapq.heappop(waiting)
        chosen.append(path)
        offer((*path, 0))
        offer((*path[:-1], path[-1] + 1))
    chosen.sort(key=lambda path: (len(path), path))
    index = {path: i for i, path in enumerate(chosen)}
    parents = tuple(index.get(path[:-1], ROOT) for path in chosen)
    return Topology(parents, tuple(int(order[len(path) - 1][path[-1]]) for path in chosen))


def expected_length(topology: Topology, accuracies: np.ndarray) -> float:
    """Drafts that a verification accepts on average, by the same independent accuracies; the bonus token is not counted."""
    value: list[float] = []
    for parent, rank, depth in zip(topology.parents, topology.ranks, topology.depths, strict=True):
        value.append(float(accuracies[depth - 1, rank]) * (1.0 if parent == ROOT else value[parent]))
    return sum(value)


EMPTY = DraftTree(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
