"""Who sat in which batch slot, step by step, and who waits without one. Pure.

A slot is a row that the scheduler leased: a cell says what its sequence did in a step, also when it held the
slot and got nothing. Built from the works, waits and preemptions of the window alone. `static_lanes` is a formula
over the same requests: how they would have sat in static batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from engine.plan import WaitReason
from engine.trace import WAIT_REASONS, Trace, spent_us
from viz.select import NOBODY, last_works, prompt_len

STATIC_STEPS = 1000  # static batches are computed from the last 1,000 to 2,000 steps


class Cell(IntEnum):
    """What a batch slot did in a step."""

    NOTHING = 0  # no record
    IDLE = 1
    DECODE = 2
    PREFILL = 3
    RECOMPUTE = 4
    HELD = 5  # leased, but nothing computed
    FAILED = 6


@dataclass(frozen=True, slots=True)
class Run:
    """A sequence's unbroken stay in one slot, clipped to the window."""

    seq_id: int
    row: int
    first: int
    last: int


@dataclass(frozen=True)
class Lanes:
    """Slots 1 … num_rows (index 0 … num_rows − 1) over steps first … first + columns − 1."""

    first: int
    cells: np.ndarray  # uint8 [num_rows, columns] of Cell
    seqs: np.ndarray  # int32 [num_rows, columns], NOBODY where nobody is
    runs: tuple[Run, ...]
    num_tokens: np.ndarray  # int32 [columns]
    num_prompt: np.ndarray  # int32 [columns]: those that read a prompt or recompute
    budget: np.ndarray  # int32 [columns]


def lanes(trace: Trace, first: int, last: int, columns: int) -> Lanes:
    """The window of `columns` steps from `first`; nothing after `last` is shown."""
    steps = trace.rows("steps", first, last)
    works = trace.rows("works", first - 32, last)  # a stay may begin before the window
    newest = int(steps["max_num_seqs"][-1]) if len(steps) else 1
    num_rows = max(newest, int(works["row"].max(initial=0)), 1)
    cells = np.zeros((num_rows, columns), np.uint8)
    seqs = np.full((num_rows, columns), NOBODY, np.int32)
    budget = np.zeros(columns, np.int32)
    at = steps["step_id"] - first
    cells[:, at] = Cell.IDLE
    budget[at] = steps["token_budget"]
    kinds = work_kinds(trace, works)
    failed = steps["step_id"][steps["failed"] > 0]
    kinds[np.isin(works["step_id"], failed)] = Cell.FAILED
    for row, begin, end, seq_id in _held(trace, works, last):
        at = [i for i in range(max(begin - first, 0), end - first) if cells[row - 1, i] == Cell.IDLE]
        cells[row - 1, at], seqs[row - 1, at] = Cell.HELD, seq_id
    inside = works["step_id"] >= first
    works, kinds = works[inside], kinds[inside]
    at = works["step_id"] - first
    cells[works["row"] - 1, at] = kinds
    seqs[works["row"] - 1, at] = works["seq_id"]
    tokens = np.bincount(at, works["num_tokens"], columns).astype(np.int32)
    many = (kinds == Cell.PREFILL) | (kinds == Cell.RECOMPUTE)
    prompt = np.bincount(at[many], works["num_tokens"][many], columns).astype(np.int32)
    return Lanes(first, cells, seqs, _runs(seqs, first), tokens, prompt, budget)


@dataclass(frozen=True)
class StaticLanes:
    """The same requests in static batches: a batch begins when the one before has ended, with those who have come;
    all of it that fits: a slot each, and places for prompt + max_tokens each. It ends with its longest; each takes as
    many steps as it took in the run (recomputed ones left out)."""

    cells: np.ndarray  # uint8 [num_rows, columns] of Cell: IDLE, DECODE or NOTHING
    seqs: np.ndarray  # int32 [num_rows, columns]
    done: int  # requests that it would have finished by the last step
    done_here: int  # those that the run has
    busy: float  # share of all slots × steps since `since`
    busy_here: float
    since: int


def static_lanes(trace: Trace, first: int, last: int, columns: int, num_rows: int) -> StaticLanes:
    """The window of `columns` steps from `first`, as far as it can be known at `last`."""
    since = trace.first_step if last - trace.first_step < STATIC_STEPS else (last // STATIC_STEPS - 1) * STATIC_STEPS
    since = max(since, trace.first_step)
    works = trace.rows("works", since, last)
    works = works[works["num_recomputed"] < works["num_tokens"]]
    known, counts = np.unique(works["seq_id"], return_counts=True)
    took, ended = dict(zip(known.tolist(), counts.tolist())), set(trace.rows("finishes", since, last)["seq_id"].tolist())
    waits = trace.rows("waits", last, last)["seq_id"].tolist()
    begun = dict(zip(works["seq_id"][::-1].tolist(), works["step_id"][::-1].tolist()))
    coming = _arrivals(trace, [i for i in {*took, *waits} if not _is_sample(trace, i)], since)
    coming += [(begun[i], i) for i in took if _is_sample(trace, i)]  # it cannot begin before its prompt has been read
    cells = np.full((num_rows, columns), Cell.NOTHING, np.uint8)
    seqs = np.full((num_rows, columns), NOBODY, np.int32)
    cells[:, max(since - first, 0) : last + 1 - first] = Cell.IDLE
    coming, gone, now, done, busy = sorted(coming), 0, since, 0, 0
    room = trace.num_pages_at(last) * trace.page_size_at(last)
    while gone < len(coming) and now <= last:
        now = max(now, coming[gone][0])
        batch = _fitting(trace, [i for at, i in coming[gone : gone + num_rows] if at <= now], room)
        gone += len(batch)  # the first of those who have come
        ends = [now + took.get(i, 0) if i in ended else last + 1 for i in batch]
        for row, (seq_id, end) in enumerate(zip(batch, ends)):
            shown = slice(max(now - first, 0), max(min(end, last + 1) - first, 0))
            if shown.stop:  # most have ended before the window
                cells[row, shown], seqs[row, shown] = Cell.DECODE, seq_id
            done, busy = done + (end <= last), busy + max(min(end, last + 1) - now, 0)
        now = max(ends)
    places = num_rows * (last + 1 - since)
    return StaticLanes(cells, seqs, done, len(ended & took.keys()), busy / places, len(works) / places, since)


def _fitting(trace: Trace, seq_ids: list[int], room: int) -> list[int]:
    """The first ones, as many as have room (in tokens) for their longest sequences; at least one."""
    batch = []
    for seq_id in seq_ids:
        info = trace.sequences.get(seq_id)
        room -= info.num_prompt_tokens + info.max_tokens if info else 0
        if batch and room < 0:
            break
        batch.append(seq_id)
    return batch


def _is_sample(trace: Trace, seq_id: int) -> bool:
    """A further answer to a prompt that its first sibling reads."""
    info = trace.sequences.get(seq_id)
    return info is not None and info.sample > 0


def _arrivals(trace: Trace, seq_ids: list[int], since: int) -> list[tuple[int, int]]:
    """(the first step that could have taken it, seq_id) of each."""
    infos = [trace.sequences.get(i) for i in seq_ids]
    starts, ids = np.ascontiguousarray(trace.steps["start_us"]), trace.steps["step_id"]
    at = np.searchsorted(starts, [info.arrival_us if info else 0 for info in infos])
    steps = np.maximum(ids[np.minimum(at, len(ids) - 1)], since).tolist()
    return [(step if info else since, i) for step, info, i in zip(steps, infos, seq_ids)]


def engine_time(trace: Trace, first: int, last: int) -> np.ndarray:
    """float64 [last − first + 2]: µs of the engine's own clocks before each step from `first` on, and after the last.
    Pauses and the pace lie between steps, so they do not count."""
    steps = trace.rows("steps", first, last)
    spent = np.zeros(last - first + 1)
    spent[steps["step_id"] - first] = spent_us(steps)
    return np.concatenate([[0.0], np.cumsum(spent)])


def work_kinds(trace: Trace, works: np.ndarray) -> np.ndarray:
    """uint8 Cell of each work: prefill, decode or recomputation."""
    known, inverse = np.unique(works["seq_id"], return_inverse=True)
    prompts = np.array([prompt_len(trace, int(i)) for i in known], np.int64)[inverse] if len(known) else np.zeros(0, np.int64)
    kinds = np.where(works["start"] < prompts, Cell.PREFILL, Cell.DECODE).astype(np.uint8)
    kinds[works["num_recomputed"] > 0] = Cell.RECOMPUTE
    return kinds


def _held(trace: Trace, works: np.ndarray, last: int) -> list[tuple[int, int, int, int]]:
    """(row, first step, end step, seq_id) of gaps in which a sequence kept its slot and computed nothing."""
    if not len(works):
        return []
    first = int(works["step_id"][0])
    order = np.lexsort((works["step_id"], works["seq_id"]))
    seq, row, step = (works[name][order] for name in ("seq_id", "row", "step_id"))
    lost = {(int(p["seq_id"]), int(p["step_id"])) for p in trace.rows("preempts", first, last)}
    gaps = np.flatnonzero((seq[1:] == seq[:-1]) & (row[1:] == row[:-1]) & (step[1:] > step[:-1] + 1))
    found = [(int(row[i]), int(step[i]) + 1, int(step[i + 1]), int(seq[i])) for i in gaps]
    waiting = set(trace.rows("waits", last, last)["seq_id"].tolist())
    ends = np.flatnonzero(np.append(seq[1:] != seq[:-1], True))
    found += [(int(row[i]), int(step[i]) + 1, last + 1, int(seq[i])) for i in ends if int(seq[i]) in waiting]
    return [gap for gap in found if not any(who == gap[3] and gap[1] <= when < gap[2] for who, when in lost)]


def _runs(seqs: np.ndarray, first: int) -> tuple[Run, ...]:
    found = []
    for row, line in enumerate(seqs.tolist(), 1):
        begin = 0
        for at in range(1, len(line) + 1):
            if at == len(line) or line[at] != line[begin]:
                if line[begin] != NOBODY:
                    found.append(Run(line[begin], row, first + begin, first + at - 1))
                begin = at
    return tuple(found)


def queue(trace: Trace, step: int) -> np.ndarray:
    """WAIT rows of those that wait without a slot, in the queue's order. A sample whose prompt is still being read has
    none either: it gets its slot, and its share of the blocks, when the step that reads the prompt ends."""
    waits = trace.rows("waits", step, step)
    if not len(waits):
        return waits
    holders = trace.pool_at(step).tables
    last = last_works(trace, step, waits["seq_id"].tolist())
    keep = []
    for row in waits:
        seq_id = int(row["seq_id"])
        ran = int(last[seq_id]["step_id"]) if seq_id in last else None
        lost = ran is not None and bool(np.any(trace.rows("preempts", ran, step)["seq_id"] == seq_id))
        reason = int(row["reason"])
        is_sibling = reason < len(WAIT_REASONS) and WAIT_REASONS[reason] is WaitReason.SIBLING_PROMPT
        keep.append(is_sibling or (seq_id not in holders and (ran is None or lost)))
    return waits[np.array(keep)]
