"""What one sequence computed, reused and lost, position by position, and what that cost. Pure.

Built from the sequence's works up to a step and from the pool; FLOPs are formulas over the model's sizes. The KV cache
view draws it.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from engine.trace import Trace
from viz.select import prompt_len


class Row(IntEnum):
    """What one position is at the shown step. In a cell of several positions the highest is shown."""

    NOT_YET = 0
    HIT = 1  # another request's K and V, found in the cache
    HIT_GHOST = 2  # the same, and computed now without a cache
    KEPT = 3  # computed in an earlier step; without a cache nothing would be computed now either
    GHOST = 4  # computed in an earlier step and read now; without a cache computed again
    LOST = 5  # its K and V were there once and were given back
    NOW = 6
    AGAIN = 7  # computed now, as before


@dataclass(frozen=True)
class Life:
    """One sequence up to a step. `works` are its rows of steps that did not fail, `work` the one of this step."""

    seq_id: int
    step: int
    works: np.ndarray
    work: np.void | None
    cached: np.ndarray  # bool a work: its step had a cache
    kept: int  # tokens whose K and V are there after the step
    num_known: int  # tokens of the prompt, or more
    whole: bool  # the record holds its first work

    @property
    def start(self) -> int:
        return int(self.work["start"]) if self.work is not None else 0

    @property
    def num_new(self) -> int:
        return int(self.work["num_tokens"]) if self.work is not None else 0

    @property
    def num_again(self) -> int:
        return int(self.work["num_recomputed"]) if self.work is not None else 0

    @property
    def end(self) -> int:
        return self.start + self.num_new

    @property
    def has_cache(self) -> bool:
        return bool(self.cached[-1]) if self.work is not None else True


def life(trace: Trace, seq_id: int, step: int) -> Life:
    info = trace.sequences.get(seq_id)
    at = bisect.bisect_left(trace.steps["start_us"], info.arrival_us) - 1 if info else 0
    works = trace.rows("works", int(trace.steps["step_id"][max(at, 0)]), step)
    works = works[works["seq_id"] == seq_id]
    if len(works):
        steps = trace.rows("steps", int(works["step_id"][0]), step)
        works = works[~np.isin(works["step_id"], steps["step_id"][steps["failed"] > 0])]
    work = works[-1] if len(works) and works["step_id"][-1] == step else None
    modes: dict[int, bool] = {}
    steps = trace.rows("steps", int(works["step_id"][0]), step) if len(works) else trace.steps[:0]
    of = dict(zip(steps["step_id"].tolist(), steps["config"].tolist()))
    for s in works["step_id"].tolist():
        if of.get(s) not in modes:
            modes[of.get(s)] = trace.config_at(s).get("mode") != "none"
    cached = np.array([modes[of.get(s)] for s in works["step_id"].tolist()], bool)
    prompt = prompt_len(trace, seq_id)
    whole = True
    if len(works):
        first = works[0]
        hit = first["num_cached"] == first["start"] or (info is not None and info.sample > 0 and first["start"] <= prompt)
        whole = bool(first["start"] == 0 or hit) and not first["resumed"]
    high = int((works["start"] + works["num_tokens"]).max(initial=0))
    kept = trace.computed_at(step).get(seq_id, 0)
    return Life(seq_id, step, works, work, cached, kept, max(prompt, high, kept), whole)


def rows_of(it: Life) -> np.ndarray:
    """uint8 [num_known] of Row, by position."""
    rows = np.zeros(it.num_known, np.uint8)
    computed, high = np.zeros(it.num_known, bool), 0
    for start, n in zip(it.works["start"].tolist(), it.works["num_tokens"].tolist()):
        computed[start : start + n], high = True, max(high, start + n)
    there = it.start if it.work is not None else it.kept
    rows[:there] = np.where(computed[:there] | (not it.whole), Row.KEPT, Row.HIT)
    rows[there:high] = Row.LOST
    if it.work is not None:
        if it.has_cache:
            rows[: it.start] += 1  # their ghosts
        rows[it.start : it.end] = Row.NOW
        rows[it.start : it.start + it.num_again] = Row.AGAIN
    return rows


# ---- FLOPs ----


@dataclass(frozen=True, slots=True)
class Costs:
    """FLOPs of a model: `body` a token, `key` a token and key that it attends to, `head` a row of logits."""

    body: int
    key: int
    head: int

    def of(self, start: np.ndarray, end: np.ndarray, heads: np.ndarray) -> np.ndarray:
        """float64: tokens [start, end) computed, each attending to itself and all before it."""
        start, end = start.astype(np.float64), end.astype(np.float64)
        keys = (end * (end + 1) - start * (start + 1)) / 2
        return self.body * (end - start) + self.key * keys + self.head * heads.astype(np.float64)


def costs(meta: Mapping[str, object]) -> Costs | None:
    """None where the record does not say the model's sizes."""
    model = meta.get("model")
    names = ("parameters", "layers", "hidden_size", "heads", "head_dim", "vocab_size")
    sizes = [model.get(name) for name in names] if isinstance(model, Mapping) else []
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        return None
    parameters, layers, hidden, heads, head_dim, vocab = sizes
    tied = model.get("tie_word_embeddings", True)
    body = parameters - vocab * hidden * (1 if tied else 2)
    return Costs(2 * body, 4 * layers * heads * head_dim, 2 * hidden * vocab) if body > 0 else None


@dataclass(frozen=True)
class Spent:
    """FLOPs of a sequence's steps, cumulative: each token once, as this run did it, as a run without a cache would."""

    once: np.ndarray
    run: np.ndarray
    without: np.ndarray

    def totals(self, has_cache: bool) -> tuple[float, float]:
        """(with a cache, without)."""
        return float((self.run if has_cache else self.once)[-1]), float(self.without[-1])


def spent(it: Life, cost: Costs) -> Spent:
    start = it.works["start"].astype(np.int64)
    end = start + it.works["num_tokens"]
    heads = np.where(it.works["samples"] > 0, 1 + it.works["num_draft"], 0)
    before = np.concatenate([[0], np.maximum.accumulate(end)[:-1]]) if len(end) else end
    fresh = np.minimum(np.maximum(start, before), end)
    run = cost.of(start, end, heads)
    without = np.where(it.cached, cost.of(np.zeros_like(end), end, heads), run)
    return Spent(np.cumsum(cost.of(fresh, end, heads)), np.cumsum(run), np.cumsum(without))


def flops(value: float, largest: float) -> str:
    """In the unit that suits the largest of the numbers beside it, so that they can be compared: "24.1 GFLOP"."""
    units = ((1e13, 1e12, "T"), (1e8, 1e9, "G"), (1e5, 1e6, "M"), (1e2, 1e3, "k"))
    unit, prefix = next(((unit, prefix) for least, unit, prefix in units if largest >= least), (1.0, ""))
    text = f"{value / unit:,.{0 if value >= 100 * unit else 1 if value >= 10 * unit else 2}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {prefix}FLOP"
