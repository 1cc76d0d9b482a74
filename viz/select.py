"""Trace → the small arrays that several views need. Pure; reads slices, never a whole table a frame.

Identity: a request's letter is its identity, its hue only helps. A hue is leased to a request from arrival to
its end, so two requests that live together never share one; with more than six alive only the selected keep
theirs. Memos hang on the Trace, which never changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from engine.trace import Comparison, Trace
from viz.theme import NUM_REQUEST_COLORS, request_color

NOBODY = -1


# ---- two modes side by side ----


def comparison_id(knob: str, value: str | bool) -> str:
    """The selection that names the newest comparison of a knob with this value on one side."""
    return f"compare:{knob}:{value}"


def comparison(trace: Trace, selection: str | None = None) -> Comparison | None:
    """The newest comparison of a trace (None), or the newest that a selection names."""
    for found in reversed(trace.artifacts):
        if isinstance(found, Comparison) and (
            selection is None or selection in [comparison_id(found.knob, run.value) for run in found.runs]
        ):
            return found
    return None


# ---- who is who ----


def live_at(trace: Trace, step: int) -> tuple[int, ...]:
    """seq_ids that took part in a step or waited in it, those that computed first."""
    works, waits = trace.rows("works", step, step), trace.rows("waits", step, step)
    return tuple(dict.fromkeys((*works["seq_id"].tolist(), *waits["seq_id"].tolist())))


def request_of(trace: Trace, seq_id: int) -> int:
    info = trace.sequences.get(seq_id)
    return info.request_id if info else seq_id


def prompt_len(trace: Trace, seq_id: int) -> int:
    info = trace.sequences.get(seq_id)
    return info.num_prompt_tokens if info else 0


def admitted(works: np.ndarray) -> np.ndarray:
    """Of WORK rows, the first of each request: no chunk that goes on, no return after a preemption, and no computing
    again of what a run without a cache does not keep."""
    return works[(works["start"] == works["num_cached"]) & (works["resumed"] == 0) & (works["num_recomputed"] == 0)]


def selected(trace: Trace, step: int | None, selection: str | None) -> tuple[int, ...]:
    """seq_ids that a selection speaks of: "seq:3", "token:3:12", "query:3:12", "page:17" (all its owners)."""
    kind, _, rest = (selection or "").partition(":")
    head = rest.split(":")[0]
    if not (head.isascii() and head.isdigit() and len(head) < 10):
        return ()
    if kind in ("seq", "token", "query"):
        return (int(head),) if int(head) in trace.sequences else ()
    if kind == "page" and step is not None:
        return trace.pool_at(step).owners.get(int(head), ())
    return ()


@dataclass(frozen=True)
class Identity:
    """Which hue each sequence has in one frame; None is grey."""

    of_request: Mapping[int, int]
    requests: Mapping[int, int]  # seq_id → request_id
    coloured: frozenset[int] | None  # requests that keep their hue; None: all

    def slot(self, seq_id: int) -> int | None:
        request = self.requests.get(seq_id, seq_id)
        if self.coloured is not None and request not in self.coloured:
            return None
        return self.of_request.get(request, (request - 1) % NUM_REQUEST_COLORS)

    def color(self, seq_id: int) -> str:
        return request_color(self.slot(seq_id))

    def code(self, seq_id: int) -> int:
        """0 … 5 for a hue, 6 for grey: an index into tables of paints."""
        slot = self.slot(seq_id)
        return NUM_REQUEST_COLORS if slot is None else slot

    def codes(self, seq_ids: np.ndarray) -> np.ndarray:
        """int64 of the same shape: each one's code."""
        known, inverse = np.unique(seq_ids, return_inverse=True)
        return np.array([self.code(int(i)) for i in known], np.int64)[inverse.reshape(seq_ids.shape)]


def identity(trace: Trace, step: int, selection: str | None = None) -> Identity:
    """Hues for a frame that shows `step`."""
    return _identity(trace, live_at(trace, step), selected(trace, step, selection))


def hues(trace: Trace, live: tuple[int, ...], selection: str | None) -> dict[int, int | None]:
    """seq_id → hue, None for grey: the same identity for lists of requests (the stage's chips)."""
    who = _identity(trace, live, selected(trace, None, selection))
    return {seq_id: who.slot(seq_id) for seq_id in live}


def _identity(trace: Trace, live: Iterable[int], chosen: Iterable[int]) -> Identity:
    requests = {seq_id: info.request_id for seq_id, info in trace.sequences.items()}
    crowded = len({requests.get(i, i) for i in live}) > NUM_REQUEST_COLORS
    coloured = frozenset(requests.get(i, i) for i in chosen) if crowded else None
    return Identity(leased_hues(trace), requests, coloured)


def leased_hues(trace: Trace) -> dict[int, int]:
    """request_id → hue: leased at arrival, given back at the end, handed on to who has waited longest. A part of a run
    brings the hues along that its requests had in the whole (viz/stage/pins.py)."""
    memo: dict[int, int] | None = trace.__dict__.get("_hues")
    if memo is not None:
        return memo
    kept = trace.meta.get("hues")
    if isinstance(kept, Mapping):
        known = {str(info.request_id): info.request_id for info in trace.sequences.values()}
        return {known[k]: v for k, v in kept.items() if k in known and type(v) is int and 0 <= v < NUM_REQUEST_COLORS}
    given: dict[int, int] = {}
    free = list(range(NUM_REQUEST_COLORS))  # given back longest ago first
    without: list[int] = []
    for _, ends, request in _lives(trace):
        if not ends:
            without.append(request)
        elif request in given:
            free.append(given[request])
        elif request in without:
            without.remove(request)
        while free and without:
            request = without.pop(0)
            liked = (request - 1) % NUM_REQUEST_COLORS
            given[request] = free.pop(free.index(liked) if liked in free else 0)
    trace.__dict__["_hues"] = given
    return given


def _lives(trace: Trace) -> list[tuple[int, int, int]]:
    """(engine time, 0 arrives or 1 ends, request_id), in order."""
    samples: dict[int, list[int]] = {}
    arrival: dict[int, int] = {}
    for seq_id, info in trace.sequences.items():
        samples.setdefault(info.request_id, []).append(seq_id)
        arrival[info.request_id] = info.arrival_us
    ends: dict[int, int] = {}
    if len(trace.finishes) and len(trace.steps):
        at = np.searchsorted(trace.steps["step_id"], trace.finishes["step_id"]).clip(0, len(trace.steps) - 1)
        ends = dict(zip(trace.finishes["seq_id"].tolist(), trace.steps["start_us"][at].tolist()))
    begin = int(trace.steps["start_us"][0]) if len(trace.steps) else 0
    alive = set(live_at(trace, trace.last_step)) if trace.last_step is not None else set()
    events = []
    for request, seq_ids in samples.items():
        if all(i in ends for i in seq_ids):
            events.append((max(ends[i] for i in seq_ids), 1, request))
        elif arrival[request] < begin and not alive.intersection(seq_ids):
            continue  # ended before the record begins
        events.append((arrival[request], 0, request))
    return sorted(events)


def last_works(trace: Trace, step: int, seq_ids: Iterable[int]) -> dict[int, np.void]:
    """seq_id → its newest WORK row at or before a step."""
    return trace.newest("works", seq_ids, step)


# ---- pages ----


class PageState(IntEnum):
    FREE = 0
    CACHED = 1  # nobody holds it, its content can be hit
    PENDING = 2
    HELD = 3


MAX_STRIPES = 3


@dataclass(frozen=True)
class PageCells:
    """Arrays over page ids 0 … num_pages (0, the sink, is never shown)."""

    page_size: int
    state: np.ndarray  # uint8 of PageState
    used: np.ndarray  # int32: tokens that are there
    owners: np.ndarray  # int32 [num_pages + 1, MAX_STRIPES], NOBODY pads
    num_owners: np.ndarray  # int32
    published: np.ndarray  # bool
    tables: Mapping[int, tuple[int, ...]]
    computed: Mapping[int, int]  # seq_id → tokens stored

    @property
    def num_pages(self) -> int:
        return len(self.state) - 1

    def count(self, state: PageState) -> int:
        return int(np.count_nonzero(self.state[1:] == state))


def page_cells(trace: Trace, step: int) -> PageCells:
    pool, size = trace.pool_at(step), trace.page_size_at(step)
    n = pool.num_pages + 1
    state = np.zeros(n, np.uint8)
    state[pool.cached] = PageState.CACHED
    state[pool.pending] = PageState.PENDING
    state[pool.ref_counts > 0] = PageState.HELD
    used = np.where(state == PageState.CACHED, size, 0).astype(np.int32)
    owners = np.full((n, MAX_STRIPES), NOBODY, np.int32)
    num_owners = np.zeros(n, np.int32)
    computed = trace.computed_at(step)
    for seq_id, table in sorted(pool.tables.items()):
        pages = np.array(table, np.int64)
        used[pages] = np.maximum(used[pages], np.clip(computed[seq_id] - np.arange(len(pages)) * size, 0, size))
        room = pages[num_owners[pages] < MAX_STRIPES]
        owners[room, num_owners[room]] = seq_id
        num_owners[pages] += 1
    return PageCells(size, state, used, owners, num_owners, pool.cached, pool.tables, computed)


@dataclass(frozen=True, slots=True)
class Slab:
    seq_id: int
    stored: int
    reserved: int


@dataclass(frozen=True)
class Padded:
    """What a contiguous padded cache would reserve for the sequences that hold pages now.

    reserved = Σ min(prompt + max_tokens, limit); waste = 1 − stored / reserved.
    """

    slabs: tuple[Slab, ...]
    limit: int

    @property
    def stored(self) -> int:
        return sum(s.stored for s in self.slabs)

    @property
    def reserved(self) -> int:
        return sum(s.reserved for s in self.slabs)

    @property
    def waste(self) -> float:
        return 1 - self.stored / self.reserved if self.reserved else 0.0


def padded(trace: Trace, step: int, computed: Mapping[int, int] | None = None) -> Padded:
    """`limit` is the model's longest sequence where the record knows it, and never more than the whole pool."""
    computed = trace.computed_at(step) if computed is None else computed
    limit = trace.num_pages_at(step) * trace.page_size_at(step) or max(computed.values(), default=0)
    model = trace.meta.get("model")
    lengths = (trace.meta.get("max_model_len"), model.get("max_model_len") if isinstance(model, Mapping) else None)
    limit = min([limit, *(n for n in lengths if isinstance(n, int) and n > 0)])
    slabs = []
    for seq_id, stored in sorted(computed.items()):
        info = trace.sequences.get(seq_id)
        longest = min(info.num_prompt_tokens + info.max_tokens, limit) if info else stored
        slabs.append(Slab(seq_id, stored, max(longest, stored)))
    return Padded(tuple(slabs), limit)


# ---- tokens ----


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a sequence. `step_id` is the step that gave it, None for the prompt; `top` its likeliest
    alternatives as (token id, log-probability)."""

    position: int
    text: str
    step_id: int | None = None
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()

    @property
    def probability(self) -> float:
        return math.exp(min(self.logprob, 0.0))


def newest_tokens(trace: Trace, seq_id: int, step: int, limit: int) -> np.ndarray:
    """TOKEN rows of a sequence up to a step: at least its newest `limit` where there are so many."""
    first, window = trace.first_step, 128
    memo: dict[tuple[int, int], np.ndarray] = trace.__dict__.setdefault("_token_windows", {})
    while first is not None:
        near = memo.get((step, window))  # other threads draw from the same trace
        if near is None:
            if len(memo) > 16:
                memo.clear()
            near = memo[step, window] = trace.rows("tokens", step - window, step)
        rows = near[near["seq_id"] == seq_id]
        if len(rows) >= limit or step - window <= first:
            return rows
        window *= 8
    return trace.tokens[:0]


def tail(trace: Trace, seq_id: int, step: int, limit: int) -> tuple[Token, ...]:
    """The last `limit` tokens of a sequence, prompt included, as they were after a step."""
    rows = newest_tokens(trace, seq_id, step, limit)[-limit:]
    made = []
    for row in rows.tolist():
        at, _, position, token_id, logprob, num_top, ids, logprobs = row
        text = trace.token_text(token_id)
        if "\ufffd" in text:
            text = _emitted(trace, seq_id, at)
        top = tuple(zip(ids, logprobs))[:num_top]
        made.append(Token(position, text, at, logprob, top))
    info = trace.sequences.get(seq_id)
    prompt = info.prompt_token_ids if info else ()
    room = limit - len(made)
    if room <= 0 or (made and made[0].position > len(prompt)):
        return tuple(made)
    first = max(len(prompt) - room, 0)
    return (*(Token(i, trace.token_text(prompt[i])) for i in range(first, len(prompt))), *made)


def _emitted(trace: Trace, seq_id: int, step: int) -> str:
    """The text that a step made certain: what to show for a token that is only part of a character."""
    rows = trace.rows("texts", step, step)
    rows = rows[rows["seq_id"] == seq_id]
    base = int(trace.meta.get("text_base", 0))
    parts = [trace.text_bytes[int(r["offset"]) - base : int(r["offset"]) - base + int(r["num_bytes"])].tobytes() for r in rows]
    return b"".join(parts).decode("utf-8", "replace")


def token_ids(trace: Trace, seq_id: int, step: int) -> dict[int, int]:
    """position → token id of everything that a sequence had after a step."""
    info = trace.sequences.get(seq_id)
    found = dict(enumerate(info.prompt_token_ids)) if info else {}
    rows = trace.tokens_of(seq_id, step)
    found.update(zip(rows["position"].tolist(), rows["token_id"].tolist()))
    return found
