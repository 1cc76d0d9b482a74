"""The super-sequence of one step, folded to what a panel can show: which queries see which keys. Pure.

Every work is a chunk of queries at positions start … start + num_tokens − 1; its keys are the cached ones before
start and its own. Long chunks keep their first and last rows around a fold, long histories become one wide
fold. What a cell says is computed from positions alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

FOLD_WIDTH, MAX_FOLD = 4, 10  # columns that a folded history takes, so that its label fits


class Sees(IntEnum):
    OTHER = 0  # another request
    ALLOWED = 1
    CAUSAL = 2  # a later token of the same request
    PART = 3  # a fold in which some pairs are allowed and some are not


@dataclass(frozen=True, slots=True)
class Span:
    """Positions first … last of a request, drawn as one row or as `width` columns. A fold if there are several."""

    first: int
    last: int
    width: int = 1

    @property
    def count(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class Block:
    """One request's share: its rows, and its columns (cached first). `row0`/`col0` are where they begin."""

    seq_id: int
    start: int
    num_tokens: int
    rows: tuple[Span, ...]
    cached: tuple[Span, ...]
    new: tuple[Span, ...]
    row0: int
    col0: int

    @property
    def num_cols(self) -> int:
        return sum(s.width for s in (*self.cached, *self.new))

    @property
    def num_cached_cols(self) -> int:
        return sum(s.width for s in self.cached)


@dataclass(frozen=True)
class Folded:
    blocks: tuple[Block, ...]
    num_rows: int
    num_cols: int
    hidden: int  # requests that did not fit


def fold(works: np.ndarray, max_rows: int, max_cols: int, prefer: tuple[int, ...] = ()) -> Folded:
    """Blocks in plan order. `prefer`: seq_ids that must be among those shown."""
    chosen = list(range(len(works)))
    room = max(min(max_rows, max_cols // (FOLD_WIDTH + 1)), 1)
    if len(chosen) > room:
        first = [i for i in chosen if int(works["seq_id"][i]) in prefer][:room]
        chosen = sorted([*first, *[i for i in chosen if i not in first][: room - len(first)]])
    counts = [int(works["num_tokens"][i]) for i in chosen]
    rows = share(counts, max_rows)
    spans = [_ends(int(works["start"][i]), n, shown) for i, n, shown in zip(chosen, counts, rows)]
    starts = [int(works["start"][i]) for i in chosen]
    spare = max_cols - sum(map(len, spans))
    cached = [_history(start, cols) for start, cols in zip(starts, share(starts, max(spare, 0), FOLD_WIDTH))]
    blocks, row, col = [], 0, 0
    for i, start, n, new, old in zip(chosen, starts, counts, spans, cached):
        block = Block(int(works["seq_id"][i]), start, n, new, old, new, row, col)
        blocks.append(block)
        row, col = row + len(new), col + block.num_cols
    return Folded(tuple(blocks), row, col, len(works) - len(chosen))


def share(wanted: list[int], room: int, least: int = 1) -> list[int]:
    """Give each what it wants, or an equal cap so that all fit; nobody with a wish gets less than `least`."""
    low, high = least, max([least, *wanted])
    while low < high:
        cap = (low + high + 1) // 2
        low, high = (cap, high) if sum(min(w, cap) for w in wanted) <= room else (low, cap - 1)
    return [min(w, low) for w in wanted]


def _ends(start: int, n: int, shown: int) -> tuple[Span, ...]:
    """A chunk as `shown` spans: all of it, or its first and last tokens around a fold."""
    if shown >= n:
        return tuple(Span(p, p) for p in range(start, start + n))
    if shown == 1:
        return (Span(start, start + n - 1),)
    head, foot = (shown - 1) // 2, shown - 1 - (shown - 1) // 2
    folded = Span(start + head, start + n - foot - 1)
    heads = (Span(p, p) for p in range(start, start + head))
    return (*heads, folded, *(Span(p, p) for p in range(start + n - foot, start + n)))


def _history(start: int, cols: int) -> tuple[Span, ...]:
    """`start` cached keys in at most `cols` columns: each alone, or all in one wide fold."""
    if start <= cols:
        return tuple(Span(p, p) for p in range(start))
    return (Span(0, start - 1, min(cols, MAX_FOLD)),)


def sees(folded: Folded) -> np.ndarray:
    """uint8 [num_rows, num_cols] of Sees: query span × key span, by position."""
    grid = np.full((folded.num_rows, folded.num_cols), Sees.OTHER, np.uint8)
    for block in folded.blocks:
        keys = (*block.cached, *block.new)
        width = [k.width for k in keys]
        k_first = np.repeat([k.first for k in keys], width)
        k_last = np.repeat([k.last for k in keys], width)
        q_first = np.array([q.first for q in block.rows])[:, None]
        q_last = np.array([q.last for q in block.rows])[:, None]
        part = np.where(k_first[None] > q_last, Sees.CAUSAL, np.where(k_last[None] <= q_first, Sees.ALLOWED, Sees.PART))
        grid[block.row0 : block.row0 + len(block.rows), block.col0 : block.col0 + block.num_cols] = part
    return grid
