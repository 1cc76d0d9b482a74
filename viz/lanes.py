"""Who sat in which batch slot, step by step, and who waits without one. Pure.

A slot is a row that the scheduler leased: a cell says what its sequence did in a step, also when it held the
slot and got nothing. Built from the works, waits and preemptions of the window alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from engine.trace import Trace
from viz.select import NOBODY, last_works, prompt_len


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
    """WAIT rows of those that wait without a slot, in the queue's order."""
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
        keep.append(seq_id not in holders and (ran is None or lost))
    return waits[np.array(keep)]
