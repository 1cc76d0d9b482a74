"""From references to rows: the hot path appends one Record a step, pack() makes a TraceDelta later.

Watching costs the engine one small object a step; the packing runs when somebody drains (at most 30 times a
second), after the step, and goes by arrays where a cohort (engine/steady.py) took many steps alike. A keyframe of the
pool goes in every KEYFRAME_EVERY steps, so that a reader never replays more events than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from engine.pages import Event
from engine.plan import Clocks, Committed, StepError, StepPlan, StepResult
from engine.steady import Members, SteadyCommitted, SteadyPlan
from engine.trace import FINISH_REASONS, TABLES, TOP_WIDTH, WAIT_REASONS, SequenceInfo, TensorSample, TraceDelta
from engine.trace import StepError as TraceError

KEYFRAME_EVERY = 256
_WAIT_CODE = {reason: code for code, reason in enumerate(WAIT_REASONS)}
_FINISH_CODE = {reason: code for code, reason in enumerate(FINISH_REASONS)}


@dataclass(frozen=True, slots=True)
class Record:
    """References to what one step made. `keyframe`: (event count, events that rebuild the pool there). `record_us`: what it
    took to make this; packing rows for readers comes later, between steps."""

    plan: StepPlan | SteadyPlan
    result: StepResult
    committed: Committed | SteadyCommitted
    clocks: Clocks
    events: Sequence[Event]
    event_end: int
    config: int
    keyframe: tuple[int, Sequence[Event]] | None = None
    samples: tuple[TensorSample, ...] = ()
    error: StepError | None = None
    probed: bool = False
    launch_id: int | None = None  # the first step of its launch; None: it was launched alone
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
    """Rows of every table for these records, in step order. Steps of one cohort are packed together, by arrays."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in TABLES}
    offset = text_offset
    for steady, some in groupby(records, key=_cohort_of):
        some = list(some)
        tables = _pack_each(some, offset) if steady is None else _pack_steady(some, offset)
        for name, part in tables.items():
            parts[name].append(part)
        offset += len(tables["text_bytes"])
    return {name: np.concatenate(some) if some else np.zeros(0, TABLES[name]) for name, some in parts.items()}


def _cohort_of(record: Record) -> Members | None:
    """What the steps that can be packed together have in common."""
    return record.plan.members if isinstance(record.committed, SteadyCommitted) else None


def _pack_each(records: Sequence[Record], text_offset: int) -> dict[str, np.ndarray]:
    rows: dict[str, list] = {name: [] for name in TABLES if name not in ("text_bytes",)}
    blob = bytearray()
    for record in records:
        _pack_one(record, rows, blob, text_offset)
    tables = {name: np.array(part, TABLES[name]) for name, part in rows.items()}
    tables["text_bytes"] = np.frombuffer(bytes(blob), np.uint8)
    return tables


def _pack_steady(records: Sequence[Record], text_offset: int) -> dict[str, np.ndarray]:
    """Records of SteadyPlans with the same members, packed as _pack_each would."""
    rows: dict[str, list] = {name: [] for name in ("steps", "waits", "finishes", "events", "keyframes")}
    for record in records:
        _pack_step(record, rows)
    tables = {name: np.array(part, TABLES[name]) for name, part in rows.items()}
    tables["preempts"] = np.zeros(0, TABLES["preempts"])
    members, n, k = records[0].plan.members, len(records[0].plan.members), len(records)
    steps = np.repeat(np.array([r.plan.step_id for r in records]), n)
    ends = (members.starts + 1 + np.array([r.plan.ahead for r in records])[:, None]).ravel()
    works = tables["works"] = np.zeros(k * n, TABLES["works"])
    works["step_id"], works["start"], works["num_tokens"], works["samples"] = steps, ends - 1, 1, 1
    works["seq_id"], works["row"] = np.tile(members.seq_ids, k), np.tile(members.rows, k)
    values = np.concatenate([r.result.values for r in records])
    tokens, width = np.zeros(k * n, TABLES["tokens"]), (values.shape[1] - 2) // 2
    tokens["step_id"], tokens["seq_id"], tokens["position"], tokens["token_id"] = steps, works["seq_id"], ends, values[:, 0]
    if values.shape[1] > 1:
        tokens["logprob"], tokens["num_top"] = values[:, 1], width
        tokens["top_ids"][:, :width], tokens["top_logprobs"][:, :width] = values[:, 2 : 2 + width], values[:, 2 + width :]
    if any(r.committed.taken is not None for r in records):
        tokens = tokens[np.concatenate([np.ones(n, bool) if r.committed.taken is None else r.committed.taken for r in records])]
    tables["tokens"] = tokens
    tables["texts"], tables["text_bytes"] = _pack_texts(records, text_offset)
    return tables


def _pack_texts(records: Sequence[Record], text_offset: int) -> tuple[np.ndarray, np.ndarray]:
    """(TEXT rows, the text) of steady records: what tokens say by themselves, and the other pieces in their places."""
    spoken = np.stack([r.committed.spoken for r in records])
    at, place = np.nonzero(spoken)
    said, seq_ids = [], records[0].plan.members.seq_ids[place]
    if len(at):
        said = records[0].committed.vocabulary.spell(np.stack([r.committed.tokens for r in records])[at, place])
    others = [(k, where, piece) for k, r in enumerate(records) for where, piece in r.committed.pieces]
    if others:
        at = np.concatenate([at, [k for k, _, _ in others]])
        place = np.concatenate([place, [where for _, where, _ in others]])
        seq_ids = np.concatenate([seq_ids, [piece.seq_id for _, _, piece in others]])
        said += [piece.text.encode("utf-8", "replace") for _, _, piece in others]
        order = np.lexsort((place, at))  # stable
        at, seq_ids, said = at[order], seq_ids[order], list(map(said.__getitem__, order.tolist()))
    rows = np.zeros(len(said), TABLES["texts"])
    rows["step_id"] = np.array([r.plan.step_id for r in records])[at]
    rows["seq_id"], rows["num_bytes"] = seq_ids, np.fromiter(map(len, said), np.int64, len(said))
    rows["offset"] = np.cumsum(rows["num_bytes"], dtype=np.int64) - rows["num_bytes"] + text_offset
    return rows[rows["num_bytes"] > 0], np.frombuffer(b"".join(said), np.uint8)


def _pack_step(record: Record, rows: dict[str, list]) -> None:
    """What does not grow with who takes part."""
    plan, clocks, step = record.plan, record.clocks, record.plan.step_id
    rows["steps"].append(
        (
            step, clocks.start_us, clocks.schedule_us, clocks.build_us, clocks.run_us, clocks.settle_us, clocks.commit_us,
            plan.token_budget, plan.max_num_seqs, record.event_end, record.config, step if record.launch_id is None else record.launch_id,
            record.probed, record.error is not None, record.result.graph_size, clocks.settle_at_us, record.result.gpu_us,
            record.result.sample_us, record.committed.text_us, record.record_us,
        )
    )  # fmt: skip
    rows["waits"] += [(step, w.seq_id, _WAIT_CODE[w.reason], w.needed, w.available) for w in plan.waiting]
    rows["finishes"] += [(step, f.seq_id, _FINISH_CODE[f.reason], f.num_pages) for f in record.committed.finished]
    rows["events"] += record.events
    if record.keyframe is not None:
        at, events = record.keyframe
        rows["keyframes"] += [(at, 0, 0, 0, 0), *((at, *event) for event in events)]


def _pack_one(record: Record, rows: dict[str, list], blob: bytearray, text_offset: int) -> None:
    plan, step = record.plan, record.plan.step_id
    _pack_step(record, rows)
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
    rows["preempts"] += [(step, p.seq_id, p.for_seq_id is not None, p.for_seq_id or 0, p.num_pages, p.num_tokens) for p in plan.preempted]
    for piece in record.committed.texts:
        data = piece.text.encode("utf-8", "replace")
        rows["texts"].append((step, piece.seq_id, text_offset + len(blob), len(data)))
        blob += data
