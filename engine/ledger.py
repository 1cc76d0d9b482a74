"""What a session knows of one room: its records, who is alive in it, and how it stood when it last reported.

Sequence numbers, names and steps are a room's own, so nothing here is shared between rooms. After the core died, or
went away as planned, a Ledger writes the end of what it had in hand into the record and says where the room's
numbering goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from engine.config import EngineConfig
from engine.messages import Report
from engine.request import FinishReason
from engine.store import TraceStore
from engine.trace import FINISH_REASONS, TABLES, Op, StepError, Trace, TraceDelta, spent_us


@dataclass(frozen=True, slots=True)
class Start:
    """Where a room's numbering begins: after a crash it goes on where the last core stopped. `settings`: its knobs."""

    step: int = 0
    sequence: int = 1
    request: int = 1
    name: int = 0
    text_bytes: int = 0
    events: int = 0
    config: int = 0
    settings: EngineConfig | None = None
    clock_us: int = 0


class Ledger:
    """One room's side of a session. Changed by one thread at a time, under the session's lock.

    Args:
        max_bytes: bound of the records.
        piece: token id -> the text to show for it.
        meta: facts that every trace carries.
        version: counts on from here with everything that changes; a room opened again goes on above the old one.
    """

    def __init__(self, max_bytes: int, piece: Callable[[int], str], meta: Mapping[str, object], version: int = 0) -> None:
        self.store = TraceStore(max_bytes, piece, meta)
        self.report: Report | None = None
        self.version = version
        self.sentence = ""  # what just went wrong in the room
        self.finished: dict[int, FinishReason] = {}
        self.alive: dict[int, int] = {}  # seq_id -> request_id
        self._names: dict[int, str] = {}

    def take(self, report: Report) -> None:
        delta = report.delta
        self.store.apply(delta)
        self.report = report  # after the records: who reads that a job has ended finds what it made
        for info in delta.sequences:
            self._names[info.seq_id] = info.name
            self.alive[info.seq_id] = info.request_id
        finishes = delta.tables.get("finishes")
        for row in finishes if finishes is not None else ():
            self.finished[int(row["seq_id"])] = FINISH_REASONS[row["reason"]]
            self.alive.pop(int(row["seq_id"]), None)
        said = [error.sentence for error in delta.errors] + [report.note] * bool(report.note)
        if said:
            self.sentence = said[-1]
        self.version += 1

    def names(self, seq_ids: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self._names.get(i, f"#{i}") for i in seq_ids)

    # ---- after the core has gone ----

    def bury(self, sentence: str) -> Start:
        """End what the dead core had in hand, in the records too, and say where a new one begins. Where it had nothing in
        hand (another death before anything ran, too), nothing is said."""
        trace = self.store.snapshot()
        if self.alive:
            said = f"{sentence} Its requests ended; a new engine was started."
            self._end_all(StepError(_next_step(trace), "core_died", said, tuple(self.alive)))
        elif len(trace) and _release_all(trace.pool_at(trace.last_step)):
            self._end_all(StepError(_next_step(trace), "core_died", f"{sentence} A new engine was started."))
        return self._start()

    def rest(self, sentence: str = "") -> Start:
        """The core went away as planned: what it had cached is gone, which the records say. With a sentence it was torn
        away, and what still ran has ended. Says where the next one begins."""
        trace = self.store.snapshot()
        if self.alive:
            self._end_all(StepError(_next_step(trace), "burst_ended", sentence, tuple(self.alive)))
        elif len(trace) and _release_all(trace.pool_at(trace.last_step)):
            self._end_all()
        return self._start()

    def _start(self) -> Start:
        trace = self.store.snapshot()
        requests = {info.request_id for info in trace.sequences.values()}
        return Start(
            step=_next_step(trace),
            sequence=max(trace.sequences, default=0) + 1,
            request=max(requests, default=0) + 1,
            name=len(requests),
            text_bytes=int(trace.meta.get("text_base", 0)) + len(trace.text_bytes),
            events=int(trace.meta.get("event_base", 0)) + len(trace.events),
            config=len(trace.meta.get("configs", ())),
            settings=self.report.config if self.report else None,
            clock_us=_end_us(trace),
        )

    def _end_all(self, error: StepError | None = None) -> None:
        """Record a step that empties the pool and ends everybody; without an error it has not failed."""
        trace = self.store.snapshot()
        step = _next_step(trace)
        events = _release_all(trace.pool_at(trace.last_step)) if len(trace) else []
        num_events = int(trace.meta.get("event_base", 0)) + len(trace.events) + len(events)
        row = np.zeros(1, TABLES["steps"])
        if len(trace):
            for field in ("config", "token_budget", "max_num_seqs"):
                row[field] = trace.steps[-1][field]
        elif self.report is not None:
            limits = self.report.config.scheduler
            row["token_budget"], row["max_num_seqs"] = limits.max_num_batched_tokens, limits.max_num_seqs
        values = {"step_id": step, "start_us": _end_us(trace), "launch_id": step, "failed": error is not None, "event_end": num_events}
        for field, value in values.items():
            row[field] = value
        tables = {name: np.zeros(0, dtype) for name, dtype in TABLES.items()}
        tables |= {"steps": row, "events": np.array(events, TABLES["events"])}
        reason = FINISH_REASONS.index(FinishReason.ERROR)
        tables["finishes"] = np.array([(step, i, reason, 0) for i in self.alive], TABLES["finishes"])
        self.store.apply(TraceDelta(tables, errors=() if error is None else (error,)))
        self.finished.update(dict.fromkeys(self.alive, FinishReason.ERROR))
        self.alive.clear()
        self.version += 1


def _next_step(trace: Trace) -> int:
    return 0 if trace.last_step is None else trace.last_step + 1


def _end_us(trace: Trace) -> int:
    """Engine time when the last step was over."""
    return int(trace.steps["start_us"][-1]) + int(spent_us(trace.steps[-1:])[0]) if len(trace) else 0


def _release_all(pool) -> list[tuple[int, int, int, int]]:
    """Events that empty a pool."""
    events = [(Op.RELEASE, page, owner, index) for owner, table in pool.tables.items() for index, page in enumerate(table)]
    events += [(Op.FREE, page, 0, 0) for page in range(1, pool.num_pages + 1) if pool.pending[page] or pool.ref_counts[page]]
    return events + [(Op.EVICT, page, 0, 0) for page in range(1, pool.num_pages + 1) if pool.cached[page]]
