"""The record of what happened: append-only tables, and small objects read from them. numpy and stdlib only.

The engine's hot path only keeps references (engine/recorder.py turns them into rows here, off that path);
views, recordings and the browser read nothing but a Trace. A Trace is an immutable snapshot: its arrays are
read-only slices of buffers that only grow, so taking one costs nothing and it never changes under a view.

The pool's state is not stored: it is keyframe + replay of the event log (`Trace.pool_at`). A test shows that
replay equals the live pool. Rejected: one object a step (a thousand times the memory), pickles (unsafe).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np

from engine.plan import WaitReason
from engine.request import FinishReason

WAIT_REASONS = tuple(WaitReason)  # codes in tables index these tuples; append only, never reorder
FINISH_REASONS = tuple(FinishReason)
NEAR = 64  # rows that are looked at one by one
TOP_WIDTH = 5  # most alternatives kept a sampled token


class Op(IntEnum):
    """Pool events, rows of (op, page, owner, index). Owners are seq_ids; index is the block-table position."""

    ALLOC = 1  # page leaves the free list; owner's table[index] = page; its reference count becomes 1
    SHARE = 2  # owner's table[index] = page; reference count + 1 (prefix hit, fork)
    RELEASE = 3  # owner's table loses index; reference count − 1
    FREE = 4  # reference count 0 and every step that used it has settled: page can be taken again
    PUBLISH = 5  # page's content became a prefix hit for later requests
    EVICT = 6  # page's content is forgotten
    COPY = 7  # copy-on-write: content of page (source) went to page `index`; owner is the writer


STEP = np.dtype(
    [
        ("step_id", "<i4"),
        ("start_us", "<i8"),
        ("schedule_us", "<i4"),
        ("build_us", "<i4"),
        ("run_us", "<i4"),
        ("settle_us", "<i4"),
        ("commit_us", "<i4"),
        ("token_budget", "<i4"),
        ("max_num_seqs", "<i4"),
        ("event_end", "<i8"),  # rows of the event log that exist once this step has been committed
        ("config", "<i4"),  # index into meta["configs"]: the knobs in force
        ("launch_id", "<i4"),  # steps of one launch share it
        ("probed", "u1"),
        ("failed", "u1"),
        ("graph_size", "<i4"),  # sequences of the CUDA graph that was replayed; 0: the step ran eagerly
        # finer clocks (engine/plan.py says what each sees); 0: not recorded, or not to be seen there
        ("settle_at_us", "<i8"),
        ("gpu_us", "<i4"),
        ("sample_us", "<i4"),  # part of run_us
        ("text_us", "<i4"),  # part of commit_us
        ("record_us", "<i4"),
    ]
)
WORK = np.dtype(
    [
        ("step_id", "<i4"),
        ("seq_id", "<i4"),
        ("row", "<i4"),
        ("start", "<i4"),
        ("num_tokens", "<i4"),
        ("num_cached", "<i4"),
        ("num_recomputed", "<i4"),
        ("num_draft", "<i4"),
        ("resumed", "u1"),
        ("samples", "u1"),  # 1: the last row's logits were sampled
    ]
)
TOKEN = np.dtype(  # one accepted token
    [
        ("step_id", "<i4"),
        ("seq_id", "<i4"),
        ("position", "<i4"),
        ("token_id", "<i4"),
        ("logprob", "<f4"),
        ("num_top", "u1"),
        ("top_ids", "<i4", (TOP_WIDTH,)),
        ("top_logprobs", "<f4", (TOP_WIDTH,)),
    ]
)
WAIT = np.dtype([("step_id", "<i4"), ("seq_id", "<i4"), ("reason", "u1"), ("needed", "<i4"), ("available", "<i4")])
PREEMPT = np.dtype(
    [("step_id", "<i4"), ("seq_id", "<i4"), ("has_cause", "u1"), ("for_seq_id", "<i4"), ("num_pages", "<i4"), ("num_tokens", "<i4")]
)
FINISH = np.dtype([("step_id", "<i4"), ("seq_id", "<i4"), ("reason", "u1"), ("num_pages", "<i4")])
TEXT = np.dtype([("step_id", "<i4"), ("seq_id", "<i4"), ("offset", "<i8"), ("num_bytes", "<i4")])
EVENT = np.dtype([("op", "<i4"), ("page", "<i4"), ("owner", "<i4"), ("index", "<i4")])
KEYFRAME = np.dtype([("event_at", "<i8"), ("op", "<i4"), ("page", "<i4"), ("owner", "<i4"), ("index", "<i4")])

CLOCKS = ("schedule_us", "build_us", "run_us", "settle_us", "commit_us")  # of a step: its stages, one after the other

TABLES: dict[str, np.dtype] = {
    "steps": STEP,
    "works": WORK,
    "tokens": TOKEN,
    "waits": WAIT,
    "preempts": PREEMPT,
    "finishes": FINISH,
    "texts": TEXT,
    "events": EVENT,
    "keyframes": KEYFRAME,
    "text_bytes": np.dtype("u1"),
}


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """What does not change about a sequence. `name` is what a person sees: "A", or "A·2" for n > 1.

    With the sampling parameters a run can be repeated exactly from its record; those with a default are missing in
    recordings of the first days, where nobody had set them.
    """

    seq_id: int
    request_id: int
    sample: int
    name: str
    prompt: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    priority: int
    arrival_us: int
    room: str
    top_k: int | None = None
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class TensorSample:
    """A named tensor kept by a probe at one step. `provenance`: "measured" (the step itself) or "recomputed"."""

    step_id: int
    name: str
    layer: int
    values: np.ndarray
    provenance: str = "measured"


@dataclass(frozen=True, slots=True)
class KernelReport:
    """A kernel's check against its reference at start, or a measured run. Plain data."""

    name: str
    backend: str  # "triton", "torch"
    device: str
    max_error: float
    tolerance: float
    passed: bool
    detail: str = ""


COMPARABLE: dict[str, tuple[tuple[str | bool, str | bool], ...]] = {  # knob → pairs of values whose runs can be compared
    "mode": (("paged", "none"), ("paged", "contiguous")),
    "batching": (("continuous", "static"),),
    "chunked_prefill": ((True, False),),
    "prefix_caching": ((True, False),),
}


class Pass(IntEnum):
    """What a work of a compared run was."""

    DECODE = 0
    PREFILL = 1
    RECOMPUTE = 2  # of tokens that had been computed before


@dataclass(frozen=True, slots=True)
class ModeRun:
    """One of two compared runs. Steps are numbered from 0, sequences as in Comparison.names.

    Args:
        value: of the knob.
        start_us, step_us: when each step began on this run's own engine time, and how long it took.
        held: blocks held after each step.
        used: token slots of theirs that hold a token.
        works: (step, sequence, start, num_tokens, Pass) in step order.
        tokens: (step, sequence) of each token that was given, in step order.
        waits: (sequence, first step, last step, code in WAIT_REASONS).
    """

    value: str | bool
    start_us: tuple[int, ...]
    step_us: tuple[int, ...]
    held: tuple[int, ...]
    used: tuple[int, ...]
    works: tuple[tuple[int, int, int, int, int], ...]
    tokens: tuple[tuple[int, int], ...]
    waits: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same requests and seeds run again in two modes, measured one after the other on the engine's device. The knobs
    are those of the room that asked, but for `knob`; both runs began with an empty cache. `same`: whether a sequence got
    the same tokens in both."""

    knob: str
    names: tuple[str, ...]
    num_prompt_tokens: tuple[int, ...]
    same: tuple[bool, ...]
    page_size: int
    num_pages: int
    max_num_seqs: int
    runs: tuple[ModeRun, ModeRun]


@dataclass(frozen=True)
class StepError:
    """Words for a failed step."""

    step_id: int
    code: str
    sentence: str
    seq_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TraceDelta:
    """New rows since the last delta, as they cross from the engine to its readers. Plain data."""

    tables: Mapping[str, np.ndarray] = field(default_factory=dict)
    sequences: tuple[SequenceInfo, ...] = ()
    artifacts: tuple[object, ...] = ()
    errors: tuple[StepError, ...] = ()
    configs: tuple[Mapping[str, object], ...] = ()
    meta: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        parts = (self.sequences, self.artifacts, self.errors, self.configs, self.meta)
        return not any(map(len, parts)) and not any(map(len, self.tables.values()))


@dataclass(frozen=True)
class PoolState:
    """The pool as it was after a step, rebuilt from the log.

    Args:
        num_pages: page ids run from 1 to num_pages; page 0 is the sink for padding.
        ref_counts: int32 [num_pages + 1].
        cached: bool [num_pages + 1]: content can be hit by a later prompt.
        pending: bool [num_pages + 1]: no owner, but a step in flight may still use it.
        tables: seq_id → page ids in order.
    """

    num_pages: int
    ref_counts: np.ndarray
    cached: np.ndarray
    pending: np.ndarray
    tables: Mapping[int, tuple[int, ...]]

    @cached_property
    def num_free(self) -> int:
        """Pages that a new sequence could take (cached content without an owner counts as free)."""
        return int(np.count_nonzero((self.ref_counts[1:] == 0) & ~self.pending[1:]))

    @cached_property
    def owners(self) -> dict[int, tuple[int, ...]]:
        """page id → seq_ids that hold it, ascending."""
        found: dict[int, list[int]] = {}
        for seq_id, table in sorted(self.tables.items()):
            for page in table:
                found.setdefault(page, []).append(seq_id)
        return {page: tuple(ids) for page, ids in found.items()}


@dataclass(frozen=True)
class StepTrace:
    """One step's rows, gathered. Every array is a slice of the Trace's tables, in plan order."""

    step: np.void
    works: np.ndarray
    tokens: np.ndarray
    waits: np.ndarray
    preempts: np.ndarray
    finishes: np.ndarray
    error: StepError | None

    @property
    def step_id(self) -> int:
        return int(self.step["step_id"])


class Trace:
    """A snapshot of a run. `meta` holds: device, model (facts), source ("live" or "recording"), versions, commit,
    date, eos_token_ids, configs (tuple of knob dicts, page_size and num_pages among them)."""

    def __init__(
        self,
        tables: Mapping[str, np.ndarray] | None = None,
        sequences: Mapping[int, SequenceInfo] | None = None,
        token_texts: Mapping[int, str] | None = None,
        meta: Mapping[str, object] | None = None,
        artifacts: tuple[object, ...] = (),
        errors: tuple[StepError, ...] = (),
    ) -> None:
        tables = tables or {}
        for name, dtype in TABLES.items():
            array = tables.get(name)
            array = np.zeros(0, dtype) if array is None else array.view()
            array.flags.writeable = False
            setattr(self, name, array)
        self.sequences: Mapping[int, SequenceInfo] = sequences or {}
        self.token_texts: Mapping[int, str] = token_texts or {}
        self.meta: Mapping[str, object] = meta or {}
        self.artifacts = artifacts
        self.errors = errors

    steps: np.ndarray
    works: np.ndarray
    tokens: np.ndarray
    waits: np.ndarray
    preempts: np.ndarray
    finishes: np.ndarray
    texts: np.ndarray
    events: np.ndarray
    keyframes: np.ndarray
    text_bytes: np.ndarray

    # ---- steps ----

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def first_step(self) -> int | None:
        return int(self.steps["step_id"][0]) if len(self.steps) else None

    @property
    def last_step(self) -> int | None:
        return int(self.steps["step_id"][-1]) if len(self.steps) else None

    def clamp(self, step_id: int | None) -> int | None:
        """The nearest recorded step at or before `step_id` (None: the newest); None on an empty trace."""
        if not len(self.steps):
            return None
        if step_id is None:
            return self.last_step
        at = bisect.bisect_right(self.steps["step_id"], step_id) - 1
        return int(self.steps["step_id"][max(at, 0)])

    def rows(self, table: str, first: int, last: int) -> np.ndarray:
        """Rows of a per-step table with first ≤ step_id ≤ last (tables are sorted by step_id)."""
        array = getattr(self, table)
        ids = array["step_id"]  # bisect: searchsorted would copy the whole strided column
        return array[bisect.bisect_left(ids, first) : bisect.bisect_right(ids, last)]

    def step(self, step_id: int) -> StepTrace:
        """One recorded step. Raises KeyError if it is not in the trace (not run, or evicted)."""
        found = self.rows("steps", step_id, step_id)
        if not len(found):
            raise KeyError(f"step {step_id} is not in this trace")
        error = next((e for e in self.errors if e.step_id == step_id), None)
        parts = {t: self.rows(t, step_id, step_id) for t in ("works", "tokens", "waits", "preempts", "finishes")}
        return StepTrace(step=found[0], error=error, **parts)

    def config_at(self, step_id: int) -> Mapping[str, object]:
        """The knobs in force at a step."""
        configs = self.meta.get("configs") or ()
        found = self.rows("steps", step_id, step_id)
        at = int(found["config"][0]) if len(found) else len(configs) - 1
        return configs[at] if configs and 0 <= at < len(configs) else {}

    def page_size_at(self, step_id: int) -> int:
        """Tokens a page."""
        return int(self.config_at(step_id).get("page_size", self.meta.get("page_size", 16)))

    def num_pages_at(self, step_id: int) -> int:
        """Pages of the room's lease; the record numbers them from 1, wherever in the arena they lie."""
        return int(self.config_at(step_id).get("num_pages", self.meta.get("num_pages", 0)))

    # ---- sequences ----

    def name(self, seq_id: int) -> str:
        info = self.sequences.get(seq_id)
        return info.name if info else f"#{seq_id}"

    def token_text(self, token_id: int) -> str:
        return self.token_texts.get(int(token_id), f"⟨{int(token_id)}⟩")

    def tokens_of(self, seq_id: int, last: int | None = None) -> np.ndarray:
        """TOKEN rows that the sequence had been given by step `last`, in order."""
        last = self.clamp(last)
        if last is None:
            return self.tokens[:0]
        rows = self.rows("tokens", 0, last)  # tokens outlive the steps that a full ring dropped
        return rows[rows["seq_id"] == seq_id]

    def text_of(self, seq_id: int, last: int | None = None) -> str:
        """The text that the sequence had been given by step `last`; never half a character."""
        last = self.clamp(last)
        if last is None:
            return ""
        rows = self.rows("texts", 0, last)
        rows = rows[rows["seq_id"] == seq_id]
        base = int(self.meta.get("text_base", 0))
        starts = rows["offset"] - base
        blob = b"".join(self.text_bytes[a:b].tobytes() for a, b in zip(starts.tolist(), (starts + rows["num_bytes"]).tolist()))
        return blob.decode("utf-8", "replace")

    def computed_at(self, step_id: int) -> dict[int, int]:
        """seq_id → num_computed_tokens after a step, for the sequences that hold pages then."""
        pool, page_size = self.pool_at(step_id), self.page_size_at(step_id)
        last = {name: self.newest(name, pool.tables, step_id) for name in ("preempts", "works", "tokens")}
        later, found = self._next_works(pool.tables, step_id), {}
        for seq_id, table in pool.tables.items():
            known = self._computed(seq_id, step_id, *(rows.get(seq_id) for rows in last.values()), later.get(seq_id))
            if known is None:  # admitted by a plan that is not in the trace yet: it starts with what it hit
                known = next((i for i, page in enumerate(table) if not pool.cached[page]), len(table)) * page_size
            found[seq_id] = min(known, len(table) * page_size)
        return found

    def _computed(
        self, seq_id: int, step_id: int, lost: np.void | None, work: np.void | None, token: np.void | None, later: np.void | None
    ) -> int | None:
        """Tokens computed by a sequence that holds pages: where its last work ended, if it kept its pages since;
        else where its next work starts. None if the trace has neither. `token`: its step may have been dropped by a full
        ring."""
        since = int(lost["step_id"]) + 1 if lost is not None else 0
        known, before = None, self.meta.get("computed_before") or {}  # what a clipped trace remembers
        if token is not None and token["step_id"] >= since and (work is None or token["step_id"] > work["step_id"]):
            known = int(token["position"])
        elif work is not None and work["step_id"] >= since:
            no_cache = work["samples"] and self.config_at(int(work["step_id"])).get("mode") == "none"
            known = None if no_cache else int(work["start"]) + int(work["num_tokens"])
        elif str(seq_id) in before and not since:
            known = int(before[str(seq_id)])
        if later is None or (known is not None and known <= later["start"]):
            return known
        between = self.rows("preempts", step_id + 1, int(later["step_id"]))["seq_id"]
        return known if known is not None and seq_id in between else int(later["start"])

    def newest(self, table: str, seq_ids: Iterable[int], step_id: int) -> dict[int, np.void]:
        """seq_id → its newest row of a table at or before a step, for those that have one. Looks at recent rows first."""
        return _nearest(self.rows(table, 0, step_id)[::-1], seq_ids)

    def _next_works(self, seq_ids: Iterable[int], step_id: int) -> dict[int, np.void]:
        """seq_id → its first work after a step."""
        return _nearest(self.works[bisect.bisect_right(self.works["step_id"], step_id) :], seq_ids)

    # ---- the pool ----

    def pool_at(self, step_id: int) -> PoolState:
        """The pool after `step_id`: the last keyframe before it, then the events up to it."""
        cache: dict[int, PoolState] = self.__dict__.setdefault("_pools", {})
        found = cache.get(step_id)
        if found is None:
            rows = self.rows("steps", step_id, step_id)
            end = int(rows["event_end"][0]) if len(rows) else 0
            while len(cache) >= 64:
                cache.pop(next(iter(cache), None), None)
            found = cache[step_id] = self.pool_after(end, self.num_pages_at(step_id))
        return found

    def pool_after(self, end: int, num_pages: int = 0) -> PoolState:
        """The pool once the log had `end` rows."""
        base = int(self.meta.get("event_base", 0))  # events before this one were evicted
        before = self.keyframes[: bisect.bisect_right(self.keyframes["event_at"], end)]
        begins = np.flatnonzero(before["op"] == 0)  # a keyframe begins with a row that is no event
        begin, frame = base, before[:0]
        if len(begins):
            frame = before[begins[-1] :]
            begin = int(frame["event_at"][0])
        log = self.events[max(begin - base, 0) : max(end - base, 0)]
        return replay(num_pages, [*frame[["op", "page", "owner", "index"]].tolist(), *log.tolist()])


def spent_us(steps: np.ndarray) -> np.ndarray:
    """int64 [n]: µs that each of these STEP rows took, the sum of its stages (a stranger's file may have negative ones: 0)."""
    return np.sum([np.maximum(steps[clock], 0).astype(np.int64) for clock in CLOCKS], axis=0)


def _nearest(rows: np.ndarray, seq_ids: Iterable[int]) -> dict[int, np.void]:
    """seq_id → its first row. A row by hand first: most are among the nearest, where numpy's set operations cost more."""
    wanted, found = set(seq_ids), {}
    for at, seq_id in enumerate(rows["seq_id"][:NEAR].tolist() if wanted else ()):
        if seq_id in wanted:
            wanted.remove(seq_id)
            found[seq_id] = rows[at]
            if not wanted:
                break
    for window in (8192, len(rows)):
        if not wanted or len(rows) <= NEAR:
            break
        near = rows[NEAR:window]
        near = near[np.isin(near["seq_id"], sorted(wanted))]
        ids, at = np.unique(near["seq_id"], return_index=True)
        found |= {seq_id: near[i] for seq_id, i in zip(ids.tolist(), at.tolist())}
        wanted.difference_update(found)
    return found


def replay(num_pages: int, events: list[tuple[int, int, int, int]]) -> PoolState:
    """Rebuild a pool's state from events, starting from an empty pool of `num_pages` pages. Pages beyond it that
    hold nothing any more (the pool was larger once) are left out. Never raises: a file's log may be nonsense."""
    highest = max([num_pages, *(e[1] for e in events)])
    counts = [0] * (highest + 1)
    cached = [False] * (highest + 1)
    pending = [False] * (highest + 1)
    tables: dict[int, dict[int, int]] = {}
    for op, page, owner, index in events:
        if op in (Op.ALLOC, Op.SHARE):
            counts[page] += 1
            pending[page] = False
            tables.setdefault(owner, {})[index] = page
        elif op == Op.RELEASE:
            counts[page] = max(counts[page] - 1, 0)
            pending[page] = counts[page] == 0
            table = tables.get(owner, {})
            if table.get(index) == page:
                del table[index]
            if not table:
                tables.pop(owner, None)
        elif op == Op.FREE:
            pending[page] = False
        elif op == Op.PUBLISH:
            cached[page] = True
        elif op == Op.EVICT:
            cached[page] = False
    ordered = {seq_id: tuple(page for _, page in sorted(table.items())) for seq_id, table in tables.items()}
    while highest > num_pages and not (counts[highest] or cached[highest] or pending[highest]):
        highest -= 1
    counts, cached, pending = counts[: highest + 1], cached[: highest + 1], pending[: highest + 1]
    return PoolState(highest, np.array(counts, np.int32), np.array(cached), np.array(pending), ordered)
