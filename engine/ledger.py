"""What a session knows of one room: its records, who is alive in it, and how it stood when it last reported.

Sequence numbers, names and steps are a room's own, so nothing here is shared between rooms. After the core died a
Ledger writes the end of what it had in hand into the record and says where the room's numbering goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from engine.config import EngineConfig
from engine.messages import Report
from engine.request import FinishReason
from engine.store import TraceStore
from engine.trace import FINISH_REASONS, TABLES, Op, StepError, Trace, TraceDelta


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
        delta, self.report = report.delta, report
        self.store.apply(delta)
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

    # ---- after a death ----

    def bury(self, sentence: str) -> Start:
        """End what the dead core had in hand, in the records too, and say where a new one begins."""
        trace = self.store.snapshot()
        settings = self.report.config if self.report else None
        num_events = int(trace.meta.get("event_base", 0)) + len(trace.events)
        step = (trace.last_step if trace.last_step is not None else -1) + 1
        if len(trace) or self.alive:
            num_events = self._end_all(trace, step, num_events, f"{sentence} Its requests ended; a new engine was started.")
            step += 1
        requests = {info.request_id for info in trace.sequences.values()}
        text_bytes = int(trace.meta.get("text_base", 0)) + len(trace.text_bytes)
        return Start(
            step, max(trace.sequences, default=0) + 1, max(requests, default=0) + 1, len(requests), text_bytes, num_events,
            len(trace.meta.get("configs", ())), settings,
        )  # fmt: skip

    def _end_all(self, trace: Trace, step: int, num_events: int, sentence: str) -> int:
        """Record a failed step that ends everybody and empties the pool; returns the length of the event log."""
        events = _release_all(trace.pool_at(trace.last_step)) if len(trace) else []
        last = trace.steps[-1] if len(trace) else np.zeros((), TABLES["steps"])
        row = np.zeros(1, TABLES["steps"])
        values = {"step_id": step, "start_us": last["start_us"], "config": last["config"], "launch_id": step, "failed": 1}
        for field, value in (values | {"event_end": num_events + len(events)}).items():
            row[field] = value
        tables = {name: np.zeros(0, dtype) for name, dtype in TABLES.items()}
        tables |= {"steps": row, "events": np.array(events, TABLES["events"])}
        reason = FINISH_REASONS.index(FinishReason.ERROR)
        tables["finishes"] = np.array([(step, i, reason, 0) for i in self.alive], TABLES["finishes"])
        self.store.apply(TraceDelta(tables, errors=(StepError(step, "core_died", sentence, tuple(self.alive)),)))
        self.finished.update(dict.fromkeys(self.alive, FinishReason.ERROR))
        self.alive.clear()
        self.version += 1
        return num_events + len(events)


def _release_all(pool) -> list[tuple[int, int, int, int]]:
    """Events that empty a pool."""
    events = [(Op.RELEASE, page, owner, index) for owner, table in pool.tables.items() for index, page in enumerate(table)]
    events += [(Op.FREE, page, 0, 0) for page in range(1, pool.num_pages + 1) if pool.pending[page] or pool.ref_counts[page]]
    return events + [(Op.EVICT, page, 0, 0) for page in range(1, pool.num_pages + 1) if pool.cached[page]]
