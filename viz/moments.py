"""What one step did and what the next one must do, in words that chapters use: who began, ended, grew, came back.

Each answer is read from one step's rows and the pool after it. Sequences and rows are those of the record; nothing
here looks at a later step.
"""

from __future__ import annotations

import numpy as np

from engine.request import FinishReason
from engine.trace import FINISH_REASONS, Op, Trace
from viz.select import admitted, page_cells, prompt_len
from viz.words.caption import step_events

_BY_THEMSELVES = frozenset(FINISH_REASONS.index(reason) for reason in (FinishReason.STOP, FinishReason.LENGTH))


def computed(trace: Trace, step: int) -> np.ndarray:
    """WORK rows of a step, none of a failed one."""
    failed = trace.rows("steps", step, step)["failed"].any()
    return trace.rows("works", step, step)[: 0 if failed else None]


def work_of(trace: Trace, step: int, seq_id: int) -> np.void | None:
    rows = computed(trace, step)
    rows = rows[rows["seq_id"] == seq_id]
    return rows[0] if len(rows) else None


def ended(trace: Trace, step: int) -> tuple[int, ...]:
    """seq_ids that came to their own end; who was stopped is not among them."""
    rows = trace.rows("finishes", step, step)
    return tuple(rows["seq_id"][np.isin(rows["reason"], list(_BY_THEMSELVES))].tolist())


def going_on(trace: Trace, step: int) -> np.ndarray:
    """WORK rows of those that computed and did not end with it."""
    rows = computed(trace, step)
    return rows[~np.isin(rows["seq_id"], trace.rows("finishes", step, step)["seq_id"])]


def end_of(work: np.void) -> int:
    """Tokens of its sequence that are computed after a work."""
    return int(work["start"]) + int(work["num_tokens"])


def longest(works: np.ndarray) -> np.void | None:
    return works[np.argmax(works["start"] + works["num_tokens"])] if len(works) else None


def begun(trace: Trace, step: int) -> np.ndarray:
    """WORK rows of requests that were admitted for the first time."""
    return admitted(computed(trace, step))


def resumed(trace: Trace, step: int) -> np.ndarray:
    """WORK rows of requests that came back after a preemption."""
    rows = computed(trace, step)
    return rows[rows["resumed"] > 0]


def writing(trace: Trace, step: int) -> np.ndarray:
    """WORK rows of decodes: one token after the prompt."""
    rows = computed(trace, step)
    return rows[(rows["start"] >= _prompts(trace, rows)) & (rows["num_tokens"] == 1)]


def reading(trace: Trace, step: int, left: int = 1) -> np.ndarray:
    """WORK rows of prompts of which at least `left` tokens are still to be computed."""
    rows = computed(trace, step)
    return rows[_prompts(trace, rows) - rows["start"] - rows["num_tokens"] >= left]


def read(trace: Trace, step: int) -> np.ndarray:
    """WORK rows that computed the last token of a prompt."""
    rows = computed(trace, step)
    prompts = _prompts(trace, rows)
    return rows[(rows["start"] < prompts) & (rows["start"] + rows["num_tokens"] >= prompts) & (rows["resumed"] == 0)]


def last_chunk(trace: Trace, step: int) -> np.void | None:
    """The WORK row of a prompt that came to its end in this step, after earlier chunks of it."""
    return next((w for w in read(trace, step) if w["start"] > w["num_cached"]), None)


def long_prompt(trace: Trace, step: int) -> np.void | None:
    """The WORK row of a prompt that is too long to end in the next step either, beside others that write and go on."""
    rows = reading(trace, step, left=int(trace.step(step).step["token_budget"]) + 1)
    others = np.isin(writing(trace, step)["seq_id"], going_on(trace, step)["seq_id"])
    return rows[0] if len(rows) and others.any() else None


def long_read(trace: Trace, step: int) -> np.void | None:
    """The WORK row of the longest prompt that this step computed in one piece, from its first token on."""
    rows = read(trace, step)
    return longest(rows[rows["start"] == 0])


def deep_chunk(trace: Trace, step: int, left: int = 1, at_least: int = 16) -> np.void | None:
    """The WORK row of a chunk that stands on at least three times as many tokens, with `left` of its prompt to come."""
    rows = reading(trace, step, left)
    return longest(rows[(rows["num_tokens"] >= at_least) & (rows["start"] >= 3 * rows["num_tokens"])])


def long_writer(trace: Trace, step: int) -> np.void | None:
    """The WORK row of a decode whose prompt did not fit into one step."""
    rows, budget = writing(trace, step), int(trace.step(step).step["token_budget"])
    return longest(rows[_prompts(trace, rows) > budget])


def all_write(trace: Trace, step: int) -> bool:
    """Whether everybody in the step writes, and two or more go on."""
    return len(going_on(trace, step)) >= 2 and len(writing(trace, step)) == len(computed(trace, step))


def chunks(trace: Trace, seq_id: int, step: int) -> np.ndarray:
    """WORK rows of a sequence's prompt up to a step."""
    rows = trace.rows("works", 0, step)
    return rows[(rows["seq_id"] == seq_id) & (rows["start"] < prompt_len(trace, seq_id))]


def events(trace: Trace, step: int, op: Op) -> np.ndarray:
    rows = step_events(trace, trace.step(step))
    return rows[rows["op"] == op]


def grown(trace: Trace, step: int) -> dict[int, int]:
    """seq_id → block that it took while it was running already (a copy of a shared one is not growth)."""
    first = set(begun(trace, step)["seq_id"].tolist()) | set(resumed(trace, step)["seq_id"].tolist())
    copied = set(events(trace, step, Op.COPY)["owner"].tolist())
    return {owner: page for _, page, owner, _ in events(trace, step, Op.ALLOC).tolist() if owner not in first | copied}


def full(trace: Trace, step: int) -> tuple[int, ...]:
    """seq_ids that go on and have no place left for their next token: the next step must find a block for each."""
    tables, size = trace.pool_at(step).tables, trace.page_size_at(step)
    rows = going_on(trace, step)
    rows = rows[rows["samples"] > 0]
    return tuple(int(w["seq_id"]) for w in rows if end_of(w) == len(tables.get(int(w["seq_id"]), ())) * size)


def half_full(trace: Trace, step: int) -> tuple[int, ...]:
    """seq_ids that go on and whose next token goes into a block that they alone hold and that has tokens already."""
    pool, size = trace.pool_at(step), trace.page_size_at(step)
    rows = going_on(trace, step)
    found = []
    for work in rows[rows["samples"] > 0]:
        seq_id, (index, used) = int(work["seq_id"]), divmod(end_of(work), size)
        table = pool.tables.get(seq_id, ())
        if used and index < len(table) and pool.ref_counts[table[index]] == 1:
            found.append(seq_id)
    return tuple(found)


def shared_tails(trace: Trace, step: int) -> tuple[int, ...]:
    """Blocks that several hold and that have room: whoever writes first must copy them."""
    cells = page_cells(trace, step)
    return tuple(np.flatnonzero((cells.num_owners > 1) & (cells.used < cells.page_size)).tolist())


def victims(trace: Trace, step: int) -> np.ndarray:
    """PREEMPT rows of those that gave their blocks to somebody."""
    rows = trace.rows("preempts", step, step)
    return rows[rows["has_cause"] > 0]


def names(trace: Trace, seq_ids) -> tuple[str, ...]:
    return tuple(trace.name(int(i)) for i in seq_ids)


def _prompts(trace: Trace, rows: np.ndarray) -> np.ndarray:
    return np.array([prompt_len(trace, int(i)) for i in rows["seq_id"]], np.int64)
