"""The drafter's contract: what it is given, what it keeps, what it returns, what it costs; and what is refused beforehand.

A drafter guesses what follows each sequence's newest known token, the root, whose K/V the target has not computed yet.
Everything it keeps of a token lies by cache slot, under the target's own block tables, in arenas beside the target's
that have as many pages: prefix hits, copies on write, preemption and eviction need no second bookkeeping, and what
belongs to a token does not depend on whose request computed it:

    slot of token i   the drafter's K/V of (token i, feature of token i - 1)      state.kv, layers as in drafter.kv
                      feature of token i, once the target has computed it         state.features

So a row needs its token and the slot before it. A drafter is called twice:

    extend(rows, state)   keep K/V of tokens whose predecessors' features are there (prefill chunks)
    propose(rows, state)  the same of the newest rows, then a tree behind each sequence's last row

While it drafts it writes `slots_ahead` slots behind the root, which must be allocated; nothing there is kept: after a
verification the accepted tokens are rows of the next call, with the target's features in place of the drafter's guesses.

Does not know the scheduler, batches or graphs. Asks the host nothing: shapes are the host's, values the device's.
Rejected: K/V in one slab a row slot (prefix hits would have to be computed again, and rooms could not share an arena).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from engine.attention.full import FullAttention, bytes_per_token
from engine.config import ModelConfig
from engine.errors import EngineError
from engine.models.decoder import Decoder
from engine.ops import Ops
from engine.speculative.compact import slots_of
from engine.speculative.device import DraftBatch
from engine.speculative.rows import Draws, Rows
from engine.speculative.tree import MAX_NODES

FINAL = "final"  # a tap: the hidden state after the last norm, which the LM head reads
Tap = int | str  # an int: the residual stream after that layer


class Shape(Enum):
    """How a tree gets its form."""

    CHAIN = "chain"  # the best guess after the best guess
    STATIC = "static"  # the same form in each step: measured accuracies (Medusa), else every node `width` children
    DYNAMIC = "dynamic"  # the most confident paths of this step (EAGLE-2)


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """What a person chooses; frozen, a knob makes a new one.

    Args:
        drafter: a name of the registry.
        source: the head's file or folder (trained drafters), or the smaller checkpoint (draft_model); None: the default.
        shape: None: the drafter's own.
        depth: tokens ahead.
        width: children tried of a node (chain: 1); n-gram: matches followed.
        budget: nodes that are verified.
        layers: an early exit after so many of the target's layers (draft_model without a source); None: a quarter.
        drawn: draft by chance from the drafter's distribution, verified by rejection; else the most probable tokens.
    """

    drafter: str
    source: str | None = None
    shape: Shape | None = None
    depth: int = 4
    width: int = 4
    budget: int = 16
    layers: int | None = None
    drawn: bool = False


@dataclass(frozen=True)
class Target:
    """The model that verifies.

    Args:
        vocabulary: tokenizer fingerprint (fingerprint()), "" where there is none (tests).
    """

    model: Decoder
    ops: Ops
    vocabulary: str = ""
    name: str = ""

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embedding.dtype


@dataclass(frozen=True)
class DraftState:
    """What a drafter keeps, by slot. The same pages as the target's arena.

    Args:
        kv: its K/V, or the target's own for an early exit; None: none.
        features: [pages, page_size, drafter.feature_width] in the model's type; None: none.
        own: kv is the drafter's: pages must be copied in it too.
    """

    page_size: int
    kv: FullAttention | None = None
    features: torch.Tensor | None = None
    own: bool = False

    def features_at(self, slots: torch.Tensor) -> torch.Tensor:
        """[…, width]."""
        return self.features[torch.div(slots, self.page_size, rounding_mode="floor"), slots % self.page_size]

    def keep_features(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """values [m, width] of tokens that the target has computed; slot 0 is the sink."""
        self.features[torch.div(slots, self.page_size, rounding_mode="floor"), slots % self.page_size] = values.to(self.features.dtype)

    def keep_accepted(self, path_rows: torch.Tensor, values: torch.Tensor, roots: torch.Tensor, block_table: torch.Tensor) -> None:
        """Features of a verification's root and accepted nodes, each at its token's final slot.

        Args:
            path_rows: int64 [b, d + 1] of AcceptedBatch.rows(): -1 behind the accepted ones.
            values: [b, n + 1, width] of all rows.
            roots: int64 [b] positions of the roots.
        """
        steps = torch.arange(path_rows.shape[1], device=roots.device)
        slots = torch.where(path_rows >= 0, slots_of(block_table, roots[:, None] + steps, self.page_size), 0)
        index = path_rows.clamp(min=0)[:, :, None].expand(-1, -1, values.shape[2])
        self.keep_features(slots.reshape(-1), values.gather(1, index).flatten(0, 1))

    def copy_pages(self, copies: torch.Tensor) -> None:
        """int64 [c, 2] source and destination pages: what the target's arena does at the same moment."""
        if self.own:
            self.kv.copy_pages(copies)
        if self.features is not None:
            self.features[copies[:, 1]] = self.features[copies[:, 0]]


class Drafter(Protocol):
    """Attributes are the host's to plan with.

    name; taps: what of the target's forward pass `store` is given, concatenated in this order (empty: nothing);
    feature_width: of what is kept a token (0: nothing); kv: the shape of its own K/V (None: none of its own);
    shares_kv: it reads and writes the target's K/V; catch_up: it must see every token as a row (False: the newest is
    enough); reads_history; slots_ahead; nodes, max_depth: most of a tree; parameters: weights of its own.
    """

    name: str
    taps: tuple[Tap, ...]
    feature_width: int
    kv: ModelConfig | None
    shares_kv: bool
    catch_up: bool
    reads_history: bool
    slots_ahead: int
    nodes: int
    max_depth: int
    parameters: int

    def store(self, features: torch.Tensor) -> torch.Tensor:
        """[t, sum of the taps' widths] → [t, feature_width], what state.features keeps."""

    def extend(self, rows: Rows, state: DraftState) -> None:
        """Keep what later drafts need of these tokens. Features before each of them are there."""

    def propose(self, rows: Rows, state: DraftState, draws: Draws | None = None) -> DraftBatch:
        """extend(), then a tree behind each sequence's last row. Draws: only where the options say `drawn`."""


class Plain:
    """A drafter without K/V, features or weights; the others change what they have."""

    name = ""
    taps: tuple[Tap, ...] = ()
    feature_width = 0
    kv: ModelConfig | None = None
    shares_kv = False
    catch_up = False
    reads_history = False
    slots_ahead = 0
    nodes = 0
    max_depth = 0
    parameters = 0

    def store(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def extend(self, rows: Rows, state: DraftState) -> None:
        return None


@dataclass(frozen=True)
class DrafterSpec:
    """What a file of this folder declares as DRAFTER.

    Args:
        name: the file's.
        shapes: trees it can make, its own first.
        trained: it needs a head made by engine.speculative.train.
        drawn: it can draft by chance.
        build: (target, options) → Drafter; raises EngineError.
        methods: methods of `train` whose heads it reads.
    """

    name: str
    shapes: tuple[Shape, ...]
    build: Callable[[Target, DraftOptions], Drafter]
    trained: bool = False
    drawn: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """What the engine can give: max_model_len (or the shortest attention window), and the pool in tokens."""

    window: int
    pool_tokens: int


def check_options(options: DraftOptions, spec: DrafterSpec, room: Room) -> Shape:
    """The shape in force.

    Raises:
        EngineError: "bad_draft_options", "draft_too_deep", "draft_budget".
    """
    shape = options.shape or spec.shapes[0]

    def need(ok: bool, name: str, rule: str, value: object) -> None:
        if not ok:
            sentence = f"{name} must be {rule} for the drafter {spec.name}, got {value}."
            raise EngineError("bad_draft_options", sentence, name=name, rule=rule, value=str(value), drafter=spec.name)

    for name in ("depth", "width", "budget"):
        value = getattr(options, name)
        need(isinstance(value, int) and not isinstance(value, bool) and value >= 1, name, "a whole number of at least 1", value)
    shapes = [s for s in spec.shapes if not (options.drawn and s is Shape.DYNAMIC)]  # keeping the best drawn ones is no drawing
    need(spec.drawn or not options.drawn, "drawn", "off (it does not draft by chance)", options.drawn)
    need(shape in shapes, "shape", f"one of {', '.join(s.value for s in shapes)}", shape.value)
    if options.depth >= room.window:
        sentence = f"A draft tree {options.depth:,} deep does not fit a window of {room.window:,} tokens."
        raise EngineError("draft_too_deep", sentence, depth=options.depth, window=room.window)
    limit = min(MAX_NODES, room.pool_tokens - 1)
    if options.budget > limit:
        reason = "can be verified at once" if limit == MAX_NODES else "fit the cache beside the token they follow"
        sentence = f"A draft tree of {options.budget:,} tokens is too large: at most {limit:,} {reason}."
        raise EngineError("draft_budget", sentence, budget=options.budget, limit=limit, of_pool=limit != MAX_NODES)
    return shape


def check_vocabulary(what: str, theirs: tuple[int, str], target: Target) -> None:
    """A draft is token ids: they must mean the same to both.

    Args:
        theirs: vocabulary size, and the fingerprint ("" where it is not known).
    Raises:
        EngineError: "draft_vocabulary".
    """
    size, fingerprint = theirs
    if size != target.config.vocab_size:
        reason = f"it has {size:,} tokens, the model {target.config.vocab_size:,}"
    elif fingerprint and target.vocabulary and fingerprint != target.vocabulary:
        reason = "the same numbers stand for other texts"
    else:
        return
    raise EngineError(
        "draft_vocabulary", f"{what} cannot draft for this model: its vocabulary is another one ({reason}).", what=what, reason=reason
    )


def bytes_per_slot(drafter: Drafter, dtype: torch.dtype) -> int:
    """What a token costs in a drafter's arenas."""
    kv = bytes_per_token(drafter.kv, dtype.itemsize) if drafter.kv is not None else 0
    return kv + drafter.feature_width * dtype.itemsize


def make_state(drafter: Drafter, target: Target, pages: int, page_size: int, attention: FullAttention | None = None) -> DraftState:
    """Arenas for a drafter beside the target's, on its device.

    Args:
        pages: of the target's arena, the sink included.
        attention: the target's, for a drafter that shares its K/V.
    """
    kv = attention if drafter.shares_kv else None
    if drafter.kv is not None:
        arena = torch.zeros(pages, page_size * bytes_per_token(drafter.kv, target.dtype.itemsize), dtype=torch.uint8, device=target.device)
        kv = FullAttention(drafter.kv, arena, page_size, target.dtype, target.ops)
    width = drafter.feature_width
    features = torch.zeros(pages, page_size, width, dtype=target.dtype, device=target.device) if width else None
    return DraftState(page_size, kv, features, drafter.kv is not None)
