"""Traces with TileTraces, for the views of tiles only: numpy walks the keys as the kernels do, on made-up q, K and V.

The tiles are those of the shipped kernels' structure (Q-blocks of queries × group, full key blocks before partly masked
ones, splits of equal key ranges); m, l, rescale, acc and plain are computed by an online and by a plain softmax, so they
belong together. SMs and times are invented by a greedy scheduler and stand for no device: nothing here is shown to a
person as a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from engine.artifacts import FULL, PARTLY, TILE, TileTrace
from engine.trace import TABLES, Trace
from tests.factories import add, make_core, prompt_of, run, trace_of

NS_A_KEY, NS_A_PROGRAM = 9, 900


@dataclass(frozen=True)
class Shape:
    """A launch. `sms` 0: interpreted, without SM and time. `residents`: programs that an SM holds at a time."""

    layer: int = 3
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    block_m: int = 64
    block_n: int = 16
    window: int = 0
    splits: int = 1
    sms: int = 0
    residents: int = 1
    row_head: int = 4
    page_size: int = 16
    large: float = 1.0  # how far scores lie apart


def tile_trace(step: int, sequences: tuple[tuple[int, int, int], ...], shape: Shape = Shape(), **changes: object) -> TileTrace:
    """`sequences`: (seq_id, queries, keys). The row is the last query of the sequence with the most keys, or `row` =
    (seq_id, position)."""
    row = changes.pop("row", None)
    group = shape.heads // shape.kv_heads
    is_decode = shape.splits > 1 or all(queries <= 8 for _, queries, _ in sequences)
    block_q = max(shape.block_m // group, 1) if not is_decode else max(q for _, q, _ in sequences)
    block_m = shape.block_m if not is_decode else -(-block_q * group // 16) * 16
    who, position = row or max(((s, keys - 1) for s, _, keys in sequences), key=lambda found: found[1])
    rows, m, l, rescale, row_tiles, acc = [], [], [], [], [], []
    scores, plain = np.zeros(0, np.float32), np.zeros(shape.head_dim, np.float32)
    program = 0
    for seq_id, queries, keys in sequences:
        data = _qkv(step, seq_id, keys, shape)
        for first in range(keys - queries, keys, block_q):
            count = min(block_q, keys - first)
            for kv_head in range(shape.kv_heads):
                for split in range(shape.splits):
                    spans = _spans(first, count, keys, shape, split)
                    mine = kv_head == shape.row_head // group and seq_id == who
                    lanes = _lanes(data, spans, first, count, kv_head, shape, block_m) if mine else None
                    is_row = mine and first <= position < first + count
                    for k, (start, stop, kind) in enumerate(spans):
                        rows.append((seq_id, kv_head, split, program, first, count, start, stop, kind, -1, 0, 0))
                        empty = np.full(block_m, np.nan, np.float32)
                        m.append(empty if lanes is None else lanes[0][k])
                        l.append(empty if lanes is None else lanes[1][k])
                        rescale.append(empty if lanes is None else lanes[2][k])
                        if is_row:
                            row_tiles.append(len(rows) - 1)
                            acc.append(lanes[3][k][(position - first) * group + shape.row_head % group])
                    program += bool(spans)
        if seq_id == who:
            scores, plain = _plain(data, position, keys, shape)
    tiles = np.array(rows, TILE)
    if shape.sms:
        _schedule(tiles, shape)
    made = TileTrace(
        step, shape.layer, "flash_decode" if is_decode else "flash_prefill",
        "NVIDIA H200" if shape.sms else "x86-64 CPU, 2 threads (Triton interpreter)", "recomputed", 3.1e-4,
        "bfloat16" if shape.sms else "float32",
        shape.heads, shape.kv_heads, shape.head_dim, shape.page_size, shape.window, 0.0, shape.head_dim**-0.5,
        block_q, block_m, shape.block_n, shape.splits, float(tiles["stop_ns"].max()) / 1000, sequences, tiles,
        *(np.array(x, np.float32).reshape(len(tiles), block_m) for x in (m, l, rescale)),
        who, position, shape.row_head, np.array(row_tiles, np.int32), np.array(acc, np.float32).reshape(-1, shape.head_dim),
        scores, plain,
    )  # fmt: skip
    return replace(made, **changes)


def _qkv(step: int, seq_id: int, keys: int, shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [keys, heads, d], k and v [keys, kv_heads, d], float64."""
    rng = np.random.default_rng([step, seq_id, shape.layer])
    q = rng.normal(size=(keys, shape.heads, shape.head_dim)) * 1.6 * shape.large
    k, v = (rng.normal(size=(keys, shape.kv_heads, shape.head_dim)) for _ in range(2))
    return q, k, v


def _spans(first: int, count: int, keys: int, shape: Shape, split: int) -> list[tuple[int, int, int]]:
    """(start, stop, kind) of a program's tiles in visiting order: those that every query sees whole come first."""
    low, high = max(first - shape.window + 1, 0) if shape.window else 0, first + count
    blocks = range(low // shape.block_n, -(-high // shape.block_n))
    each = -(-len(blocks) // shape.splits)
    found = []
    for block in blocks[split * each : (split + 1) * each]:
        start, stop = block * shape.block_n, min((block + 1) * shape.block_n, keys)
        whole = stop - 1 <= first and (not shape.window or start > first + count - 1 - shape.window)
        found.append((start, stop, FULL if whole else PARTLY))
    return sorted(found, key=lambda span: (span[2] == PARTLY, span[0]))


def _seen(start: int, stop: int, positions: np.ndarray, window: int) -> np.ndarray:
    key = np.arange(start, stop)[None]
    return (key <= positions[:, None]) & ((key > positions[:, None] - window) if window else True)


def _lanes(data, spans, first: int, count: int, kv_head: int, shape: Shape, block_m: int):
    """m, l, rescale [tiles, block_m] and acc [tiles, block_m, d] of one program; lanes behind its queries see nothing."""
    q, k, v = data
    group = shape.heads // shape.kv_heads
    lane = np.arange(count * group)
    positions = first + lane // group
    queries = q[positions, kv_head * group + lane % group]
    m, l, acc = np.full(len(lane), -np.inf), np.zeros(len(lane)), np.zeros((len(lane), shape.head_dim))
    kept: list[list[np.ndarray]] = [[], [], [], []]
    for start, stop, _ in spans:
        x = queries @ k[start:stop, kv_head].T * shape.head_dim**-0.5
        x = np.where(_seen(start, stop, positions, shape.window), x, -np.inf)
        new = np.maximum(m, x.max(1))
        safe = np.where(np.isfinite(new), new, 0.0)
        shrink, p = np.exp(m - safe), np.exp(x - safe[:, None])
        l, acc, m = l * shrink + p.sum(1), acc * shrink[:, None] + p @ v[start:stop, kv_head], new
        for found, values, rest in zip(kept, (m, l, shrink, acc), (-np.inf, 0.0, 0.0, 0.0)):
            padded = np.full((block_m, *values.shape[1:]), rest, np.float32)
            padded[: len(lane)] = values
            found.append(padded)
    return kept


def _plain(data, position: int, keys: int, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    q, k, v = data
    kv_head = shape.row_head // (shape.heads // shape.kv_heads)
    x = k[:, kv_head] @ q[position, shape.row_head] * shape.head_dim**-0.5
    x = np.where(_seen(0, keys, np.array([position]), shape.window)[0], x, -np.inf)
    p = np.exp(x - x.max())
    return x.astype(np.float32), (p / p.sum() @ v[:, kv_head]).astype(np.float32)


def _schedule(tiles: np.ndarray, shape: Shape) -> None:
    """Programs go, in order, to whichever place of an SM is free first."""
    free = np.zeros(shape.sms * shape.residents, np.int64)
    rng = np.random.default_rng(5)
    for program in np.unique(tiles["program"]).tolist():
        mine = np.flatnonzero(tiles["program"] == program)
        place = int(free.argmin())
        at = int(free[place]) + (NS_A_PROGRAM if free[place] else int(rng.integers(0, 200)))
        for i in mine:
            took = 200 + NS_A_KEY * shape.block_n * (2 if tiles["kind"][i] == PARTLY else 1) + int(rng.integers(0, 60))
            tiles["sm"][i], tiles["start_ns"][i], tiles["stop_ns"][i] = place % shape.sms, at, at + took
            at += took
        free[place] = at


# ---- traces ----


def with_artifacts(trace: Trace, *artifacts: object) -> Trace:
    tables = {name: getattr(trace, name) for name in TABLES}
    return Trace(tables, trace.sequences, trace.token_texts, {**trace.meta, "model": {"name": "m", "layers": 30}}, artifacts, trace.errors)


@cache
def _base() -> Trace:
    """Three prompts, mixed steps of chunks and single tokens."""
    core = make_core(pages=64, page_size=16, max_num_seqs=4, max_num_batched_tokens=64)
    for length, most in ((5, 9), (75, 12), (40, 8), (130, 5)):
        add(core, prompt_of(length, length), most)
    run(core)
    return trace_of(core)


def batch(trace: Trace, step: int) -> tuple[tuple[int, int, int], ...]:
    works = trace.rows("works", step, step)
    return tuple((int(w["seq_id"]), int(w["num_tokens"]), int(w["start"] + w["num_tokens"])) for w in works)


@cache
def prefill() -> Trace:
    """A step with a whole prompt of 5 and a chunk of 59, in the interpreter."""
    return with_artifacts(_base(), tile_trace(0, batch(_base(), 0)))


@cache
def cached() -> Trace:
    """Chunks behind a cached prefix, on a GPU."""
    step = next(s for s in _base().steps["step_id"].tolist() if any(q > 8 and k > q + 16 for _, q, k in batch(_base(), s)))
    return with_artifacts(_base(), tile_trace(step, batch(_base(), step), Shape(sms=6, block_m=32)))


@cache
def decode() -> Trace:
    """A decode step without and with splits."""
    step, sequences = 6, ((2, 1, 640), (3, 1, 1000), (4, 1, 300))
    shape = Shape(sms=16, block_n=16)
    return with_artifacts(_base(), tile_trace(step, sequences, shape), tile_trace(step, sequences, replace(shape, splits=4)))


@cache
def windowed() -> Trace:
    return with_artifacts(_base(), tile_trace(4, ((2, 75, 75), (3, 40, 40)), Shape(window=24, block_m=48, block_n=16)))


@cache
def one_token() -> Trace:
    return with_artifacts(_base(), tile_trace(1, ((1, 1, 1),), Shape(block_n=64)))


@cache
def huge() -> Trace:
    """As many programs as fill 132 SMs several times."""
    shape = Shape(heads=16, kv_heads=8, head_dim=64, block_m=128, block_n=64, sms=132, residents=2, large=2.0)
    return with_artifacts(_base(), tile_trace(2, ((1, 900, 4100), (2, 1500, 1500), (3, 700, 700), (4, 64, 64)), shape))


@cache
def broken() -> Trace:
    """Artifacts that no kernel wrote: cut short, out of range, not finite."""
    good = tile_trace(0, batch(_base(), 0))
    bad = good.tiles.copy()
    bad["k_stop"] = bad["k_start"]
    return with_artifacts(
        _base(),
        replace(good, m=good.m[:-1]),
        replace(good, row_tiles=np.array([10**6], np.int32)),
        replace(good, tiles=bad),
        replace(good, scores=good.scores[:1]),
        replace(good, plain=good.plain * np.nan),
        replace(good, sequences=()),
        replace(good, tiles=good.tiles[:0], m=good.m[:0], l=good.l[:0], rescale=good.rescale[:0]),
    )


TRACES = {f.__name__: f for f in (prefill, cached, decode, windowed, one_token, huge)}


def moments() -> tuple[tuple[Trace, int], ...]:
    """(trace, the step that its tiles are of)."""
    return tuple((make(), make().artifacts[-1].step_id) for make in TRACES.values())
