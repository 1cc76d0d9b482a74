"""What a TileTrace says, in small arrays for the views of tiles. Pure.

A picture shows the programs of one sequence and one key head: its blocks, a row of the score matrix each (a split of the
keys: a row of its own). Nothing is filled in: numbers that the kernel did not write down are None. A TileTrace may come
from a stranger's file, so one whose parts do not belong together counts as none (`whole`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.artifacts import FULL, PARTLY, TILE, TileTrace, of_kind
from engine.trace import Trace

MOST_TILES = 4_000_000


# ---- which one ----


def tile_traces(trace: Trace) -> tuple[TileTrace, ...]:
    """Those whose parts belong together, oldest first."""
    memo: tuple[TileTrace, ...] | None = trace.__dict__.get("_tile_traces")
    if memo is None:
        memo = trace.__dict__["_tile_traces"] = tuple(it for it in of_kind(trace, TileTrace) if whole(it))
    return memo


def shown(trace: Trace, step: int, selection: str | None = None) -> TileTrace | None:
    """The newest of a step, one with the selected sequence if there is one; else the newest of all."""
    found = tile_traces(trace)
    here = [it for it in found if it.step_id == step]
    seq_id = sequence_of(selection)
    with_it = [it for it in here if any(s == seq_id for s, _, _ in it.sequences)]
    return next(iter((with_it or here)[::-1]), found[-1] if found else None)


def sequence_of(selection: str | None) -> int | None:
    kind, _, rest = (selection or "").partition(":")
    head = rest.split(":")[0]
    return int(head) if kind in ("seq", "query", "token") and head.isascii() and head.isdigit() and len(head) < 10 else None


def whole(it: TileTrace) -> bool:
    """Whether its parts belong together."""
    try:
        return _whole(it)
    except (TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError, OverflowError):
        return False


def _whole(it: TileTrace) -> bool:
    tiles, n = it.tiles, len(it.tiles)
    if it.provenance not in ("measured", "recomputed"):
        return False
    counts = (it.block_q, it.block_m, it.block_n, it.num_splits, it.heads, it.kv_heads, it.head_dim)
    if tiles.dtype != TILE or tiles.ndim != 1 or not 0 < n <= MOST_TILES or min(counts) < 1 or it.heads % it.kv_heads:
        return False
    keys = {s: (queries, keys) for s, queries, keys in it.sequences}
    if it.row_seq_id not in keys or not 0 <= it.row_head < it.heads or not set(np.unique(tiles["seq_id"]).tolist()) <= set(keys):
        return False
    longest = max(k for _, k in keys.values())
    spans = (tiles["k_start"] >= 0) & (tiles["k_start"] < tiles["k_stop"]) & (tiles["k_stop"] <= longest + it.block_n)
    rows = (tiles["q_start"] >= 0) & (tiles["num_q"] > 0) & (tiles["num_q"] * it.group <= it.block_m)
    heads = (tiles["kv_head"] >= 0) & (tiles["kv_head"] < it.kv_heads) & np.isin(tiles["kind"], (FULL, PARTLY))
    clocks = (tiles["start_ns"] >= 0) & (tiles["stop_ns"] >= tiles["start_ns"])
    lanes = all(a.shape == (n, it.block_m) for a in (it.m, it.l, it.rescale))
    if not ((spans & rows & heads & clocks).all() and lanes):
        return False
    k = len(it.row_tiles)
    mine = it.row_tiles.ndim == 1 and k > 0 and bool(((it.row_tiles >= 0) & (it.row_tiles < n)).all())
    if not mine or it.acc.shape != (k, it.head_dim) or it.plain.shape != (it.head_dim,) or it.scores.shape != (keys[it.row_seq_id][1],):
        return False
    own = tiles[it.row_tiles]
    theirs = (own["seq_id"] == it.row_seq_id) & (own["kv_head"] == it.row_kv_head) & (own["q_start"] <= it.row_position)
    inside = theirs & (it.row_position < own["q_start"] + own["num_q"])
    return bool(inside.all()) and bool(np.isfinite(it.plain).all()) and not np.isnan(it.scores).any()


def same_launch(it: TileTrace) -> dict[str, object]:
    """Arguments of the job "tiles" that make this trace again; a change to one of them makes another."""
    same: dict[str, object] = {"step": it.step_id, "layer": it.layer, "head": it.row_head, "seq_id": it.row_seq_id}
    same |= {"position": it.row_position, "kernel": it.kernel, "block_n": it.block_n}
    return same | ({"splits": it.num_splits} if it.kernel == "flash_decode" else {"block_m": it.block_m})


def a_step(trace: Trace, step: int, layer: int, selection: str | None) -> dict[str, object]:
    """Arguments of the job "tiles" for a step that was not traced, with the row that is selected where it computed one."""
    asked: dict[str, object] = {"step": step, "layer": layer}
    works = trace.rows("works", step, step)
    mine = works[works["seq_id"] == sequence_of(selection)] if sequence_of(selection) is not None else works[:0]
    if len(mine):
        asked["seq_id"] = sequence_of(selection)
        at = (selection or "").split(":")[2:]
        position = int(at[0]) if at and at[0].isascii() and at[0].isdigit() and len(at[0]) < 10 else -1
        if int(mine["start"][0]) <= position < int(mine["start"][0] + mine["num_tokens"][0]):
            asked["position"] = position
    return asked


# ---- its tiles ----


@dataclass(frozen=True)
class Block:
    """One program: a Q-block, or its share of the keys. `tiles`: indices in the order in which it visited them."""

    program: int
    q_start: int
    num_q: int
    split: int
    tiles: tuple[int, ...]


@dataclass(frozen=True)
class Matrix:
    """The score matrix of a sequence and a key head: `blocks` from top to bottom; queries first … first + queries − 1 and
    keys 0 … keys − 1 by position."""

    it: TileTrace
    seq_id: int
    kv_head: int
    first: int
    queries: int
    keys: int
    blocks: tuple[Block, ...]

    @cached_property
    def visited(self) -> int:
        return sum(len(block.tiles) for block in self.blocks)

    @cached_property
    def skipped(self) -> int:
        """Tiles of the whole matrix that no program visited."""
        rows = len({block.q_start for block in self.blocks})
        return max(rows * -(-self.keys // self.it.block_n) - self.visited, 0)

    @cached_property
    def partly(self) -> int:
        return sum(int(self.it.tiles["kind"][i]) == PARTLY for block in self.blocks for i in block.tiles)

    @property
    def has_numbers(self) -> bool:
        """Whether the kernel wrote down m and l of these rows."""
        return self.seq_id == self.it.row_seq_id and self.kv_head == self.it.row_kv_head

    def block_of(self, tile: int) -> Block | None:
        return next((block for block in self.blocks if tile in block.tiles), None)

    @cached_property
    def in_time(self) -> tuple[int, ...]:
        """All its tiles in the order of the device's clock; without one, in launch order."""
        every = [i for block in sorted(self.blocks, key=lambda b: b.program) for i in block.tiles]
        return tuple(sorted(every, key=lambda i: int(self.it.tiles["start_ns"][i])))


def has_clock(it: TileTrace) -> bool:
    """Whether times and SMs are known: a GPU wrote them down."""
    return bool((it.tiles["sm"] >= 0).all()) and int(it.tiles["stop_ns"].max()) > 0


def matrix(it: TileTrace, seq_id: int, kv_head: int) -> Matrix | None:
    """None where the launch had no tile of them."""
    at = np.flatnonzero((it.tiles["seq_id"] == seq_id) & (it.tiles["kv_head"] == kv_head))
    if not len(at):
        return None
    _, queries, keys = next(entry for entry in it.sequences if entry[0] == seq_id)
    programs = it.tiles["program"][at]
    blocks = [_block(it, at[programs == program]) for program in np.unique(programs).tolist()]
    blocks.sort(key=lambda b: (b.q_start, b.split))
    keys = max(keys, int(it.tiles["k_stop"][at].max()))
    return Matrix(it, seq_id, kv_head, keys - queries, queries, keys, tuple(blocks))


def _block(it: TileTrace, at: np.ndarray) -> Block:
    """The row's own order where this is its program; else the clock's, else the log's."""
    rows, inside = it.tiles[at], set(at.tolist())
    own = tuple(i for i in it.row_tiles.tolist() if i in inside)
    order = own if len(own) == len(at) else tuple(at[np.argsort(rows["start_ns"], kind="stable")].tolist())
    first = rows[0]
    return Block(int(first["program"]), int(first["q_start"]), int(first["num_q"]), int(first["split"]), order)


@dataclass(frozen=True)
class Chosen:
    """The tile that is looked at: `at` is its place in its block's order."""

    matrix: Matrix
    block: Block
    at: int

    @property
    def tile(self) -> int:
        return self.block.tiles[self.at]

    @property
    def row(self) -> np.void:
        return self.matrix.it.tiles[self.tile]

    @property
    def is_followed(self) -> bool:
        """Whether its program is that of the chosen query row, whose scores and acc were kept."""
        return self.tile in self.matrix.it.row_tiles.tolist()

    @property
    def position(self) -> int:
        """The query row whose m and l are read: the chosen one, else the block's last."""
        return self.matrix.it.row_position if self.is_followed else self.block.q_start + self.block.num_q - 1

    @property
    def lane(self) -> int:
        it = self.matrix.it
        return (self.position - self.block.q_start) * it.group + it.row_head % it.group


def chosen(it: TileTrace, selection: str | None) -> Chosen:
    """By "tile:INDEX", or a sequence or query; else the last tile that the chosen row's program visited."""
    kind, _, rest = (selection or "").partition(":")
    if kind == "tile" and rest.isascii() and rest.isdigit() and len(rest) < 10 and int(rest) < len(it.tiles):
        row = it.tiles[int(rest)]
        found = matrix(it, int(row["seq_id"]), int(row["kv_head"]))
        block = found.block_of(int(rest))
        return Chosen(found, block, block.tiles.index(int(rest)))
    seq_id = sequence_of(selection)
    other = None if seq_id in (None, it.row_seq_id) else matrix(it, seq_id, it.row_kv_head)
    if other is not None:
        block = other.blocks[-1]
        return Chosen(other, block, len(block.tiles) - 1)
    own = matrix(it, it.row_seq_id, it.row_kv_head)
    block = own.block_of(int(it.row_tiles[-1]))
    return Chosen(own, block, block.tiles.index(int(it.row_tiles[-1])))


# ---- online softmax ----


@dataclass(frozen=True, slots=True)
class Online:
    """Running max and sum of one query row before and after a tile. `before` None: this tile brought its first keys;
    `m` None: the row has seen no key yet."""

    before: tuple[float, float] | None
    m: float | None
    l: float
    rescale: float
    sees: bool  # some of the tile's keys

    @property
    def added(self) -> float:
        return self.l - (self.before[1] * self.rescale if self.before else 0.0)


def online(of: Chosen, at: int | None = None) -> Online | None:
    """What the chosen row's numbers became in its tile, or in another of the same block. None: the kernel kept none."""
    it, at = of.matrix.it, of.at if at is None else at
    if not of.matrix.has_numbers:
        return None
    tile = of.block.tiles[at]
    m, l, shrink = (float(a[tile, of.lane]) for a in (it.m, it.l, it.rescale))
    if np.isnan(m) or not np.isfinite(l) or not np.isfinite(shrink):
        return None
    before = None
    if at:
        last = of.block.tiles[at - 1]
        m0, l0 = float(it.m[last, of.lane]), float(it.l[last, of.lane])
        before = (m0, l0) if np.isfinite(m0) and np.isfinite(l0) and l0 > 0 else None
    if not np.isfinite(m):
        return Online(None, None, l, shrink, False)
    return Online(before, m, l, shrink, before is None or m != before[0] or l != before[1])


def tile_scores(of: Chosen) -> np.ndarray | None:
    """float32 [keys of the tile]: the chosen row's scores, −inf where it may not look. None where they were not kept."""
    it = of.matrix.it
    if not of.is_followed:
        return None
    return it.scores[int(of.row["k_start"]) : int(of.row["k_stop"])]


def row_acc(of: Chosen) -> np.ndarray | None:
    """float32 [head_dim]: acc of the chosen row after the tile."""
    it = of.matrix.it
    at = it.row_tiles.tolist().index(of.tile) if of.is_followed else -1
    return it.acc[at] if at >= 0 and np.isfinite(it.acc[at]).all() else None


def differences(it: TileTrace) -> np.ndarray:
    """float64 [row_tiles]: largest |acc / l − plain| of the chosen row after each tile; NaN before it has seen a key. Where
    splits share its keys, those before are merged with the tile's own, as the kernel's reduction does it."""
    own = it.tiles[it.row_tiles]
    lanes = (it.row_position - own["q_start"]) * it.group + it.row_head % it.group
    found = np.full(len(own), np.nan)
    done: list[tuple[float, float, np.ndarray]] = []  # m, l, acc of the splits before
    for j, (tile, lane) in enumerate(zip(it.row_tiles.tolist(), lanes.tolist())):
        now = (float(it.m[tile, lane]), float(it.l[tile, lane]), it.acc[j].astype(np.float64))
        parts = [part for part in (*done, now) if np.isfinite(part[0]) and part[1] > 0]
        if parts:
            most = max(m for m, _, _ in parts)
            l = sum(l * np.exp(m - most) for m, l, _ in parts)
            found[j] = np.abs(sum(acc * np.exp(m - most) for m, _, acc in parts) / l - it.plain).max()
        if j + 1 < len(own) and own["program"][j + 1] != own["program"][j]:
            done.append(now)
    return found


def is_complete(it: TileTrace) -> bool:
    """Whether the tiles of the chosen row hold every key that it may see."""
    own, seen = it.tiles[it.row_tiles], np.isfinite(it.scores)
    for start, stop in zip(own["k_start"].tolist(), own["k_stop"].tolist()):
        seen[start:stop] = False
    return not seen.any()


def tile_bytes(it: TileTrace) -> dict[str, int]:
    """Bytes that one program holds on the chip for a tile: Q, K, V in the inputs' type, acc in fp32."""
    size = it.itemsize * it.head_dim
    return {"Q": it.block_m * size, "K": it.block_n * size, "V": it.block_n * size, "acc": it.block_m * it.head_dim * 4}
