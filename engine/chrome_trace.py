"""A Trace as Chrome trace JSON, which Perfetto and chrome://tracing open. numpy and stdlib only.

One process is the engine. Its first track holds the steps, and in each the stages that took its time; a track below
for every request says when it waited, computed its prompt, decoded, computed again what it had computed before (after a
preemption, or in each step without a cache) or had been preempted; two counters give the free blocks and the tokens of
each step. Times are engine time in µs (pauses and pace excluded), counted from shortly before
the first step, so that none is 0: Perfetto drops digits of large ones.

On a track spans never overlap: where two steps overlapped in the engine, the later is drawn when the earlier has
ended, and keeps its length.

Each burst (Timeline) is a process of its own below: the host's stages, its launches, the device, and an arrow from every
launch to its first kernel. Its times are its own, from its first step on; kernels that overlap on the device (programmatic
dependent launch) stand on a second track, so that each keeps its length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import numpy as np

from engine.artifacts import STAGES as HOST_STAGES
from engine.artifacts import Timeline, of_kind
from engine.trace import CLOCKS, FINISH_REASONS, Op, Trace, spent_us

STAGES = tuple(clock.removesuffix("_us") for clock in CLOCKS)
MAX_STEPS = 20_000  # the newest; Perfetto grows slow with larger files
FIRST_US = 1  # where time begins
ENGINE, STEPS, REQUESTS = 1, 1, 10  # process; track of the steps; the first request's track
BURSTS = 2  # the first burst's process
HOST_TRACK, LAUNCH_TRACK, DEVICE_TRACK = 1, 2, 3

Event = dict[str, object]


def chrome_trace(trace: Trace, max_steps: int = MAX_STEPS) -> str:
    """Strict JSON of the newest `max_steps` steps: {"traceEvents": […], "otherData": {…}}."""
    steps = trace.steps[-max_steps:]
    starts = _starts(steps)
    events = [*_names(trace), *_steps(trace, steps, starts), *_counters(trace, steps, starts), *_requests(trace, steps, starts)]
    for number, timeline in enumerate(of_kind(trace, Timeline)):
        events += timeline_events(timeline, BURSTS + number, f"{number}.")
    facts = {key: str(trace.meta[key]) for key in ("device", "date", "commit") if trace.meta.get(key)}
    about = {"engine": "Glass Engine", "steps": len(steps), "steps_recorded": len(trace), **facts}
    made = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    return json.dumps(made, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _starts(steps: np.ndarray) -> list[int]:
    """When each step begins; never before the one before has ended."""
    found, free = [], FIRST_US
    base = int(steps["start_us"][0]) - FIRST_US if len(steps) else 0
    for start, spent in zip(steps["start_us"].tolist(), spent_us(steps).tolist()):
        found.append(max(start - base, free))
        free = found[-1] + spent
    return found


def _span(name: str, track: int, begin: int, length: int, **args: object) -> Event:
    return {"ph": "X", "name": name, "cat": "engine", "pid": ENGINE, "tid": track, "ts": begin, "dur": length, "args": args}


def _names(trace: Trace) -> Iterator[Event]:
    model = trace.meta.get("model")
    name = model.get("name") if isinstance(model, Mapping) else model
    title = " · ".join(str(part) for part in ("Glass Engine", name, trace.meta.get("device")) if part)
    tracks = {STEPS: "steps", **{REQUESTS + i: f"request {trace.name(i)}" for i in sorted(trace.sequences)}}
    yield {"ph": "M", "name": "process_name", "pid": ENGINE, "tid": 0, "args": {"name": title}}
    for track, text in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": ENGINE, "tid": track, "args": {"name": text}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": ENGINE, "tid": track, "args": {"sort_index": track}}


# ---- steps ----


def _steps(trace: Trace, steps: np.ndarray, starts: list[int]) -> Iterator[Event]:
    for row, spent, begin in zip(steps, spent_us(steps).tolist(), starts):
        step_id = int(row["step_id"])
        works = trace.rows("works", step_id, step_id)
        made = len(trace.rows("tokens", step_id, step_id))
        args = {"step": step_id, "requests": len(works), "tokens_computed": int(works["num_tokens"].sum()), "tokens_made": made}
        if row["failed"] or not spent:
            text = f"step {step_id} failed" if row["failed"] else f"step {step_id}"
            yield {"ph": "i", "s": "t", "name": text, "cat": "engine", "pid": ENGINE, "tid": STEPS, "ts": begin, "args": args}
        if not spent:
            continue
        yield _span(f"step {step_id}", STEPS, begin, spent, **args)
        for clock, stage in zip(CLOCKS, STAGES):
            length = max(int(row[clock]), 0)
            if length:
                yield _span(stage, STEPS, begin, length, step=step_id)
            begin += length


def _counters(trace: Trace, steps: np.ndarray, starts: list[int]) -> Iterator[Event]:
    for step_id, begin, free in zip(steps["step_id"].tolist(), starts, free_blocks(trace, steps)):
        works = trace.rows("works", step_id, step_id)
        common = {"ph": "C", "pid": ENGINE, "tid": 0, "ts": begin}
        yield {**common, "name": "free blocks", "args": {"blocks": free}}
        yield {**common, "name": "tokens per step", "args": {"tokens": int(works["num_tokens"].sum())}}


def free_blocks(trace: Trace, steps: np.ndarray) -> list[int]:
    """Blocks that a new request could take after each of these steps; the event log is read once."""
    if not len(steps):
        return []
    first = int(steps["step_id"][0])
    pool, base, at = trace.pool_at(first), int(trace.meta.get("event_base", 0)), int(steps["event_end"][0])
    held = {page: int(pool.ref_counts[page]) for page in np.flatnonzero(pool.ref_counts).tolist()}
    pending = set(np.flatnonzero(pool.pending).tolist())
    found = []
    for step_id, end in zip(steps["step_id"].tolist(), steps["event_end"].tolist()):
        for op, page, _, _ in trace.events[max(at - base, 0) : max(end - base, 0)].tolist():
            if op in (Op.ALLOC, Op.SHARE):
                held[page] = held.get(page, 0) + 1
                pending.discard(page)
            elif op == Op.RELEASE:
                held[page] = held.get(page, 0) - 1
                if held[page] <= 0:
                    del held[page]
                    pending.add(page)
            elif op == Op.FREE:
                pending.discard(page)
        at = max(at, end)
        found.append(max(trace.num_pages_at(step_id) - len(held.keys() | pending), 0))
    return found


# ---- requests ----


def _requests(trace: Trace, steps: np.ndarray, starts: list[int]) -> Iterator[Event]:
    """What each request did: spans of equal states, one after the other."""
    ids = steps["step_id"].tolist()
    begins = dict(zip(ids, starts))
    ends = dict(zip(ids, (b + s for b, s in zip(starts, spent_us(steps).tolist()))))
    following = dict(pairwise(ids))
    for seq_id, rows in _states(trace, ids).items():
        info = trace.sequences.get(seq_id)
        free = FIRST_US
        if info is not None and rows and rows[0][1] != "waiting":
            free = arrived = max(info.arrival_us - int(steps["start_us"][0]) + FIRST_US, FIRST_US)
            begin = begins[rows[0][0]]
            if info.arrival_us >= int(steps["start_us"][0]) and begin > arrived:
                yield _span("waiting", REQUESTS + seq_id, arrived, begin - arrived, request=info.name)
                free = begin
        while rows:
            step_id, state, tokens = rows[0]
            count = next((i for i, (s, k, _) in enumerate(rows) if k != state or (i and following.get(rows[i - 1][0]) != s)), len(rows))
            last, rest = rows[count - 1][0], rows[count:]
            end = begins[rest[0][0]] if rest and following.get(last) == rest[0][0] else ends[last]
            begin = max(begins[step_id], free)
            tokens = sum(n for _, _, n in rows[:count])
            args = {"first_step": step_id, "last_step": last, "tokens": tokens, "request": trace.name(seq_id)}
            if end > begin:
                yield _span(state, REQUESTS + seq_id, begin, end - begin, **args)
                free = end
            rows = rest
    for row in trace.rows("finishes", ids[0], ids[-1]) if ids else ():
        reason = FINISH_REASONS[int(row["reason"])].value
        at, where = ends[int(row["step_id"])], REQUESTS + int(row["seq_id"])
        args = {"reason": reason, "step": int(row["step_id"])}
        yield {"ph": "i", "s": "t", "name": f"finished: {reason}", "cat": "engine", "pid": ENGINE, "tid": where, "ts": at, "args": args}


def _states(trace: Trace, ids: list[int]) -> dict[int, list[tuple[int, str, int]]]:
    """seq_id → (step, "waiting" | "preempted" | "prefill" | "decode" | "recompute", tokens computed), by step."""
    found: dict[int, list[tuple[int, str, int]]] = {}
    lost: set[int] = set()
    for step_id in ids:
        lost |= set(trace.rows("preempts", step_id, step_id)["seq_id"].tolist())
        for row in trace.rows("works", step_id, step_id):
            seq_id = int(row["seq_id"])
            info = trace.sequences.get(seq_id)
            decode = info is not None and int(row["start"]) >= info.num_prompt_tokens
            state = "recompute" if row["num_recomputed"] else "decode" if decode else "prefill"
            found.setdefault(seq_id, []).append((step_id, state, int(row["num_tokens"])))
            lost.discard(seq_id)
        for row in trace.rows("waits", step_id, step_id):
            seq_id = int(row["seq_id"])
            found.setdefault(seq_id, []).append((step_id, "preempted" if seq_id in lost else "waiting", 0))
    return found


# ---- bursts ----


def timeline_events(it: Timeline, process: int, flows: str = "") -> Iterator[Event]:
    """A timeline as a process. µs with three digits behind the point, which is what Chrome's format counts in.

    Args:
        flows: begins the ids of its arrows, so that those of several timelines differ.
    """
    graph = f"graph of {it.graph_size}" if it.graph_size else "no graph"
    yield _meta("process_name", process, 0, name=f"burst of step {it.step_id} · {it.device} · {it.source} · {graph}")
    yield _meta("process_sort_index", process, 0, sort_index=process)
    places = _device_tracks(it.kernels)
    tracks = {HOST_TRACK: "host: stages", LAUNCH_TRACK: "host: launches"}
    device = "GPU" if it.source == "CUPTI" else "operations"
    tracks |= {DEVICE_TRACK + k: device + (f" ({k + 1})" if k else "") for k in range(max(places, default=0) + 1)}
    for track, name in tracks.items():
        yield _meta("thread_name", process, track, name=name)
        yield _meta("thread_sort_index", process, track, sort_index=track)
    zero = int(min(0, *(int(rows["start_ns"].min()) for rows in (it.host, it.kernels) if len(rows)), 0))
    at = lambda ns: round((ns - zero) / 1e3 + FIRST_US, 3)  # noqa: E731
    where = {}
    for i, row in enumerate(it.host):
        name = it.names[row["name"]]
        track = HOST_TRACK if name in HOST_STAGES else LAUNCH_TRACK
        where[i] = (track, at(int(row["start_ns"])))
        yield _slice(name, "host", process, track, row, at, {"step": int(row["step"])})
    arrows = set()
    for row, place in zip(it.kernels, places, strict=True):
        function, name = it.names[row["kernel"]], it.names[row["name"]] if row["name"] >= 0 else it.names[row["kernel"]]
        args = {"step": int(row["step"]), "kernel": function, **({"layer": int(row["layer"])} if row["layer"] >= 0 else {})}
        yield _slice(name, "device", process, DEVICE_TRACK + place, row, at, args)
        launch = int(row["launch"])
        if launch >= 0 and launch not in arrows:
            arrows.add(launch)
            track, begin = where[launch]
            arrow = {"name": "launch", "cat": "launch", "id": f"{flows}{launch}", "pid": process}
            yield {**arrow, "ph": "s", "tid": track, "ts": begin}
            yield {**arrow, "ph": "f", "bp": "e", "tid": DEVICE_TRACK + place, "ts": at(int(row["start_ns"]))}


def _meta(what: str, process: int, track: int, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": args}


def _slice(name: str, kind: str, process: int, track: int, row: np.void, at: Callable[[int], float], args: dict[str, object]) -> Event:
    begin, end = at(int(row["start_ns"])), at(int(row["stop_ns"]))
    return {"ph": "X", "name": name, "cat": kind, "pid": process, "tid": track, "ts": begin, "dur": round(end - begin, 3), "args": args}


def _device_tracks(kernels: np.ndarray) -> list[int]:
    """For each kernel the first track that is free when it begins."""
    free: list[int] = []
    found = []
    for start, stop in zip(kernels["start_ns"].tolist(), kernels["stop_ns"].tolist()):
        place = next((k for k, end in enumerate(free) if end <= start), len(free))
        free[place : place + 1] = [stop]
        found.append(place)
    return found
