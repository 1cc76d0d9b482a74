"""From references to rows: the hot path appends one Record a step, pack() makes a TraceDelta later.

Watching costs the engine one small object a step; the packing runs when somebody drains (at most 30 times a
second), after the step. A keyframe of the pool goes in every KEYFRAME_EVERY steps, so that a reader never
replays more events than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine.pages import Event
from engine.plan import Clocks, Committed, StepError, StepPlan, StepResult
from engine.trace import FINISH_REASONS, TABLES, TOP_WIDTH, WAIT_REASONS, SequenceInfo, TensorSample, TraceDelta
from engine.trace import StepError as TraceError

KEYFRAME_EVERY = 256
_WAIT_CODE = {reason: code for code, reason in enumerate(WAIT_REASONS)}
_FINISH_CODE = {reason: code for code, reason in enumerate(FINISH_REASONS)}


@dataclass(frozen=True, slots=True)
class Record:
    """References to what one step made. `keyframe`: (event count, events that rebuild the pool there). `record_us`: what it
    took to make this; packing rows for readers comes later, between steps."""

    plan: StepPlan
    result: StepResult
    committed: Committed
    clocks: Clocks
    events: Sequence[Event]
    event_end: int
    config: int
    keyframe: tuple[int, Sequence[Event]] | None = None
    samples: tuple[TensorSample, ...] = ()
    error: StepError | None = None
    probed: bool = False
    record_us: int = 0


class Recorder:
    """Collects records between drains. Appending is all the hot path does."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._sequences: list[SequenceInfo] = []
        self._configs: list[Mapping[str, object]] = []
        self._artifacts: list[object] = []
        self.text_bytes = 0

    def append(self, record: Record) -> None:
        self._records.append(record)

    def sequence(self, info: SequenceInfo) -> None:
        self._sequences.append(info)

    def config(self, knobs: Mapping[str, object]) -> None:
        self._configs.append(knobs)

    def artifact(self, artifact: object) -> None:
        self._artifacts.append(artifact)

    @property
    def num_pending(self) -> int:
        return len(self._records)

    def drain(self) -> TraceDelta:
        """Everything since the last drain, packed."""
        records, self._records = self._records, []
        sequences, self._sequences = tuple(self._sequences), []
        configs, self._configs = tuple(self._configs), []
        artifacts = (*self._artifacts, *(s for r in records for s in r.samples))
        self._artifacts = []
        tables = pack(records, self.text_bytes)
        self.text_bytes += len(tables["text_bytes"])
        errors = tuple(TraceError(r.plan.step_id, r.error.code, r.error.sentence, r.error.seq_ids) for r in records if r.error)
        return TraceDelta(tables, sequences, artifacts, errors, configs)


def pack(records: Sequence[Record], text_offset: int) -> dict[str, np.ndarray]:
    """Rows of every table for these records, in step order."""
    rows: dict[str, list] = {name: [] for name in TABLES if name not in ("text_bytes",)}
    blob = bytearray()
    for record in records:
        _pack_one(record, rows, blob, text_offset)
    tables = {name: np.array(part, TABLES[name]) for name, part in rows.items()}
    tables["text_bytes"] = np.frombuffer(bytes(blob), np.uint8)
    return tables


def _pack_one(record: Record, rows: dict[str, list], blob: bytearray, text_offset: int) -> None:
    plan, clocks, step = record.plan, record.clocks, record.plan.step_id
    rows["steps"].append(
        (
            step, clocks.start_us, clocks.schedule_us, clocks.build_us, clocks.run_us, clocks.settle_us, clocks.commit_us,
            plan.token_budget, plan.max_num_seqs, record.event_end, record.config, step, record.probed, record.error is not None,
            record.result.graph_size, clocks.settle_at_us, record.result.gpu_us, record.result.sample_us, record.committed.text_us,
            record.record_us,
        )
    )  # fmt: skip
    position: dict[int, int] = {}
    for w in plan.works:
        sampled = bool(w.sample_seq_ids)
        rows["works"].append(
            (step, w.seq_id, w.row, w.start, w.num_tokens, w.num_cached, w.num_recomputed, w.num_draft, w.resumed, sampled)
        )
        position.update(dict.fromkeys(w.sample_seq_ids, w.start + w.num_tokens))
    accepted = dict(record.committed.accepted)
    for s in record.result.sampled:
        if s.seq_id in accepted:
            pad = TOP_WIDTH - len(s.top_ids)
            tops = (len(s.top_ids), (*s.top_ids, *(0,) * pad), (*s.top_logprobs, *(0.0,) * pad))
            rows["tokens"].append((step, s.seq_id, position[s.seq_id], s.token_id, s.logprob, *tops))
    rows["waits"] += [(step, w.seq_id, _WAIT_CODE[w.reason], w.needed, w.available) for w in plan.waiting]
    rows["preempts"] += [(step, p.seq_id, p.for_seq_id is not None, p.for_seq_id or 0, p.num_pages, p.num_tokens) for p in plan.preempted]
    rows["finishes"] += [(step, f.seq_id, _FINISH_CODE[f.reason], f.num_pages) for f in record.committed.finished]
    for piece in record.committed.texts:
        data = piece.text.encode("utf-8", "replace")
        rows["texts"].append((step, piece.seq_id, text_offset + len(blob), len(data)))
        blob += data
    rows["events"] += record.events
    if record.keyframe is not None:
        at, events = record.keyframe
        rows["keyframes"] += [(at, 0, 0, 0, 0), *((at, *event) for event in events)]
