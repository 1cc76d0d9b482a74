"""A step in numbers: who is where, how many tokens flow between the engine's parts, what its clocks say. Pure.

Counted from the step's rows and its part of the pool's log; what the record does not say is None. The engine map draws it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.plan import WaitReason
from engine.trace import FINISH_REASONS, WAIT_REASONS, Op, Trace
from viz.select import last_works, live_at, prompt_len, request_of
from viz.words.caption import step_events

CLOCKS = {"scheduler": ("schedule", "commit"), "executor": ("build", "run"), "sampler": ("settle",)}
RECENT = 60  # steps whose largest gives the arrows' scale
_MAYBE_RUNNING = frozenset({WaitReason.IN_FLIGHT, WaitReason.TOKEN_BUDGET, WaitReason.NO_FREE_PAGES, WaitReason.PAUSED})


@dataclass(frozen=True)
class Facts:
    """A step in numbers. None: the record does not say (the step before is not in it)."""

    new: tuple[int, ...] | None  # seq_ids that no earlier step knew
    prompt_tokens: int | None  # of the new requests
    waiting: tuple[int, ...]
    running: tuple[int, ...]
    preempted: tuple[int, ...]
    idle: frozenset[int]  # of `running`: computed nothing
    done: tuple[tuple[int, str], ...]
    num_works: int
    scheduled: int
    logits: int
    sampled: int
    taken: int | None
    shared: int | None
    freed: int | None
    free: int
    num_pages: int
    clocks: dict[str, int]
    failed: bool
    widest: int  # tokens of the widest possible arrow

    @property
    def is_timed(self) -> bool:
        return any(self.clocks.values())


def facts(trace: Trace, step: int) -> Facts:
    now, pool = trace.step(step), trace.pool_at(step)
    works, failed = now.works, bool(now.step["failed"])
    done = tuple((int(f["seq_id"]), FINISH_REASONS[int(f["reason"])].value) for f in now.finishes)
    areas = _areas(trace, step, {i for i, _ in done})
    known = _before_is_known(trace, step)
    events, new, prompt_tokens = step_events(trace, now), None, None
    if known:
        before = set(live_at(trace, step - 1))
        new = tuple(i for i in dict.fromkeys((*live_at(trace, step), *(i for i, _ in done))) if i not in before)
        prompt_tokens = sum({request_of(trace, i): prompt_len(trace, i) for i in new}.values())
    recent = trace.rows("works", step - RECENT + 1, step)
    widest = int(np.bincount(recent["step_id"] - max(step - RECENT + 1, 0), recent["num_tokens"]).max(initial=1))
    return Facts(
        new, prompt_tokens, *areas, frozenset(areas[1]) - set(works["seq_id"].tolist()), done,
        len(works), int(works["num_tokens"].sum()), 0 if failed else int(np.count_nonzero(works["samples"])), len(now.tokens),
        *(int(np.count_nonzero(events["op"] == op)) if known else None for op in (Op.ALLOC, Op.SHARE, Op.FREE)),
        pool.num_free, pool.num_pages, {c: int(now.step[f"{c}_us"]) for names in CLOCKS.values() for c in names}, failed,
        max(widest, prompt_tokens or 0, 1),
    )  # fmt: skip


def _before_is_known(trace: Trace, step: int) -> bool:
    """Whether the step before is in the record, or there was none."""
    at = int(np.searchsorted(trace.steps["step_id"], step))
    return int(trace.steps["step_id"][at - 1]) == step - 1 if at else step == 0 and not int(trace.meta.get("event_base", 0))


def _areas(trace: Trace, step: int, done: set[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(waiting, running, preempted) as the step's plan found or put them, without those that the step ended."""
    works, waits = trace.rows("works", step, step), trace.rows("waits", step, step)
    worked = last_works(trace, step, waits["seq_id"].tolist())
    lost = {int(p["seq_id"]): int(p["step_id"]) for p in trace.rows("preempts", trace.first_step or 0, step)}
    held = trace.pool_at(step - 1).tables if len(waits) and len(trace.rows("steps", step - 1, step - 1)) else {}
    running, waiting, preempted = [int(i) for i in works["seq_id"]], [], []
    for wait in waits:
        seq_id, code = int(wait["seq_id"]), int(wait["reason"])
        ran = int(worked[seq_id]["step_id"]) if seq_id in worked else -1
        may_run = code < len(WAIT_REASONS) and WAIT_REASONS[code] in _MAYBE_RUNNING
        if lost.get(seq_id, -1) > ran:
            preempted.append(seq_id)
        elif may_run and (ran >= 0 or seq_id in held):
            running.append(seq_id)
        else:
            waiting.append(seq_id)
    return tuple(tuple(i for i in dict.fromkeys(ids) if i not in done) for ids in (waiting, running, preempted))
