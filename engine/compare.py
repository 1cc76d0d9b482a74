"""Compare: the same requests and seeds in two modes of the engine, one run after the other, counted and timed.

`last_requests` reads from a record what there is to run again. The job (engine/jobs.py) runs it twice, each time in a
scratch room with the asking room's knobs but for one, with an empty cache, after a short run that warms the device up
and is not counted. Requests arrive as they did, by the number of steps after the first. What is compared is a
Comparison (engine/trace.py) in the asking room's trace. Knows no pictures; reads no text.

Rejected: runs that take turns (each would pay for the other's cold caches), times of the record that is there already
(another length of the queue, other neighbours).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from engine.config import EngineConfig, with_knob
from engine.errors import EngineError
from engine.messages import Prompt
from engine.recorder import Record
from engine.request import SamplingParams, letters
from engine.trace import CLOCKS, COMPARABLE, WAIT_REASONS, Comparison, ModeRun, Op, Pass, SequenceInfo, Trace

if TYPE_CHECKING:
    from engine.jobs import Job
    from engine.rooms import Room

COMPARE_S = 120.0
MAX_REQUESTS = 8
MAX_SEQUENCES = 16
MAX_STEPS = 2000  # of a run
MAX_WORKS = 8000
ENGINE_CHANGED = "The comparison ended: a knob that all rooms share was turned, or the cache moved for another room. Start it again."
_SAID = {
    ("mode", "paged"): "with paged blocks",
    ("mode", "none"): "without a cache",
    ("mode", "contiguous"): "in contiguous slabs",
    ("batching", "continuous"): "with continuous batching",
    ("batching", "static"): "in static batches",
    ("chunked_prefill", True): "with chunked prefill",
    ("chunked_prefill", False): "without chunked prefill",
    ("prefix_caching", True): "with prefix caching",
    ("prefix_caching", False): "without prefix caching",
}


# ---- what to run ----


def check_pair(knob: object, values: object) -> None:
    """Raises EngineError "bad_comparison" for two modes that cannot be compared."""
    pairs = COMPARABLE.get(knob, ()) if isinstance(knob, str) else ()
    asked = list(values) if isinstance(values, (list, tuple)) else []
    plain = all(isinstance(v, (str, bool)) for v in asked)
    if not plain or not any(asked in (list(pair), list(pair[::-1])) for pair in pairs):
        raise EngineError("bad_comparison", "These two modes cannot be compared. Choose one of the knobs with a Compare button.")


def last_requests(trace: Trace, after: int | None = None) -> tuple[tuple[Prompt, ...], tuple[str, ...]]:
    """The requests since the room was last idle (or with a seq_id above `after`), with their names; the newest MAX_REQUESTS."""
    requests: dict[int, list[SequenceInfo]] = {}
    for seq_id, info in sorted(trace.sequences.items()):
        if after is None or seq_id > after:
            requests.setdefault(info.request_id, []).append(info)
    busy = trace.steps[np.isin(trace.steps["step_id"], trace.works["step_id"])]
    came = {i: int(np.searchsorted(busy["start_us"], infos[0].arrival_us)) for i, infos in requests.items()}
    order = sorted(requests, key=lambda i: (came[i], i))
    group = order if after is not None else order[_idle_before(trace, busy["step_id"], [(requests[i], came[i]) for i in order]) :]
    while len(group) > 1 and (len(group) > MAX_REQUESTS or sum(len(requests[i]) for i in group) > MAX_SEQUENCES):
        group = group[1:]
    prompts = tuple(_again(requests[i], came[i] - came[group[0]]) for i in group)
    return prompts, tuple(requests[i][0].name.partition("·")[0] for i in group)


def _idle_before(trace: Trace, steps: np.ndarray, arrivals: list[tuple[list[SequenceInfo], int]]) -> int:
    """Index of the first request since the room was last idle."""
    last = np.searchsorted(steps, trace.finishes["step_id"], side="right") - 1  # what was stopped ends between two busy steps
    ended = dict(zip(trace.finishes["seq_id"].tolist(), last.tolist()))
    begin, busy_until = 0, -1
    for at, (infos, came) in enumerate(arrivals):
        if came > busy_until:
            begin = at
        busy_until = max(busy_until, *(ended.get(info.seq_id, len(steps)) for info in infos))
    return begin


def _again(infos: list[SequenceInfo], after_steps: int) -> Prompt:
    """A request as it was asked for. Its text does not matter: the ids do."""
    one = infos[0]
    sampling = SamplingParams(
        one.max_tokens, one.temperature, one.top_k, one.top_p, one.seed, len(infos), one.stop, one.stop_token_ids, one.ignore_eos
    )
    return Prompt(one.prompt, one.prompt_token_ids, sampling, one.priority, after_steps)


def with_rest(
    known: tuple[tuple[Prompt, ...], tuple[str, ...]], script: Sequence[Prompt], num_named: int
) -> tuple[tuple[Prompt, ...], tuple[str, ...]]:
    """What came, and those lines of its script that have not come yet. `num_named`: requests that the room has had."""
    prompts, names = known
    rest = list(script)
    for prompt in prompts:
        found = next((line for line in rest if line.prompt == prompt.prompt), None)
        if found is not None:
            rest.remove(found)
    together = ((*prompts, *rest), (*names, *(letters(num_named + i) for i in range(len(rest)))))
    return together[0][:MAX_REQUESTS], together[1][:MAX_REQUESTS]


# ---- the job ----


def compared(
    job: Job, knob: str, values: Sequence[str | bool], prompts: Sequence[Prompt], names: Sequence[str]
) -> Iterator[tuple[float, str]]:
    """The job's slices: a step each. A run that cannot be made ends it with a note."""
    try:
        _check_prompts(prompts)
        config = job.core.rooms[job.room].config
        prompts = [replace(p, prompt="", sampling=_seeded(p.sampling)) for p in prompts]
        runs = []
        for i, value in enumerate(values):
            for _, text in _Run(job, with_knob(config, knob, value), [_short(prompts[0])], knob, value).slices():
                yield i / 2, text
            run = _Run(job, with_knob(config, knob, value), prompts, knob, value)
            for fraction, text in run.slices():
                yield (i + fraction) / 2, text
            runs.append(run)
    except EngineError as error:
        job.note = error.sentence
        return
    one, other = runs
    job.publish(
        Comparison(
            knob,
            tuple(_sample_name(name, p.sampling, k) for name, p in zip(names, prompts, strict=True) for k in range(p.sampling.n)),
            tuple(len(p.token_ids) for p in prompts for _ in range(p.sampling.n)),
            tuple(a == b for a, b in zip(one.outputs, other.outputs, strict=True)),
            config.cache.page_size, config.cache.num_pages, config.scheduler.max_num_seqs, (one.result(), other.result()),
        )
    )  # fmt: skip


def _check_prompts(prompts: Sequence[Prompt]) -> None:
    if not prompts:
        raise EngineError("nothing_to_compare", "There is nothing to run again yet. Send a prompt or start an example first.")
    if len(prompts) > MAX_REQUESTS or sum(p.sampling.n for p in prompts) > MAX_SEQUENCES:
        sentence = f"At most {MAX_REQUESTS} requests and {MAX_SEQUENCES} samples can be compared. Send fewer."
        raise EngineError("compare_stopped", sentence)


def _seeded(sampling: SamplingParams) -> SamplingParams:
    """Both runs draw the same."""
    return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(31))


def _short(prompt: Prompt) -> Prompt:
    return replace(prompt, sampling=replace(prompt.sampling, max_tokens=2, n=1), after_steps=0)


def _sample_name(name: str, sampling: SamplingParams, sample: int) -> str:
    return name if sampling.n == 1 else f"{name}·{sample + 1}"


class _Run:
    """One run of the requests in a scratch room, and what was counted in it.

    Invariant: between two slices the room's steps so far are in the lists; after the last one the room is closed. Its
    knobs and its cache are those with which it began: a knob of the whole engine, or an arena that grows, may change
    everybody's.
    """

    def __init__(self, job: Job, config: EngineConfig, prompts: Sequence[Prompt], knob: str, value: str | bool) -> None:
        self._job, self._config, self._value = job, config, value
        self._prompts = prompts
        self._lengths = [len(p.token_ids) for p in prompts for _ in range(p.sampling.n)]
        self._said = _SAID[knob, value]
        self._steps: list[tuple[int, int, int, int]] = []  # start, duration, held, used
        self._works: list[tuple[int, int, int, int, int]] = []
        self._tokens: list[tuple[int, int]] = []
        self._waits: list[list[int]] = []
        self._open: dict[int, list[int]] = {}  # sequence → its newest wait
        self._pages = _Pages(config.cache.page_size)
        self.outputs: list[list[int]] = [[] for _ in self._lengths]

    def slices(self) -> Iterator[tuple[float, str]]:
        room = self._job.open_scratch(self._config)
        pool = room.scheduler.pool
        coming = list(self._prompts)
        most = sum(p.sampling.max_tokens * p.sampling.n for p in coming)
        while coming or room.has_work:
            if room.scheduler.pool is not pool or room.config != self._config:
                raise EngineError("compare_stopped", ENGINE_CHANGED)
            self._add(room, coming)
            record = self._job.core.step(room.name, alone=True)
            if record is not None:
                self._take(record)
            yield len(self._tokens) / most, f"Running it {self._said}: step {len(self._steps)}"
        self._job.core.close_room(room.name)

    def _add(self, room: Room, coming: list[Prompt]) -> None:
        """Those whose time has come; the next one at once when nobody is left."""
        while coming and (coming[0].after_steps <= len(self._steps) or not room.has_work):
            prompt = coming.pop(0)
            self._job.core.add(prompt.prompt, prompt.token_ids, prompt.sampling, room=room.name, priority=prompt.priority)

    def _take(self, record: Record) -> None:
        """Sequences of a scratch room count from 1, in the order in which they were added."""
        if record.error is not None:
            raise EngineError("compare_stopped", f"The comparison ended: {record.error.sentence}")
        step, clocks = len(self._steps), record.clocks
        for work in record.plan.works:
            prompt = self._lengths[work.seq_id - 1]
            kind = Pass.RECOMPUTE if work.num_recomputed else Pass.PREFILL if work.start < prompt else Pass.DECODE
            self._works.append((step, work.seq_id - 1, work.start, work.num_tokens, int(kind)))
        for seq_id, token in record.committed.accepted:
            self._tokens.append((step, seq_id - 1))
            self.outputs[seq_id - 1].append(token)
        for wait in record.plan.waiting:
            self._wait(step, wait.seq_id - 1, WAIT_REASONS.index(wait.reason))
        held, used = self._pages.after(record)
        spent = sum(getattr(clocks, clock) for clock in CLOCKS)
        self._steps.append((clocks.start_us, spent, held, used))
        if len(self._steps) > MAX_STEPS or len(self._works) > MAX_WORKS:
            sentence = f"These requests take more than {MAX_STEPS:,} steps {self._said}. Compare shorter ones."
            raise EngineError("compare_stopped", sentence)

    def _wait(self, step: int, sequence: int, reason: int) -> None:
        last = self._open.get(sequence)
        if last is not None and last[2] == step - 1 and last[3] == reason:
            last[2] = step
            return
        self._open[sequence] = [sequence, step, step, reason]
        self._waits.append(self._open[sequence])

    def result(self) -> ModeRun:
        columns = tuple(zip(*self._steps, strict=True))
        return ModeRun(self._value, *columns, tuple(self._works), tuple(self._tokens), tuple(map(tuple, self._waits)))


class _Pages:
    """The pool's tables from its events: how many pages are held, and how many of their slots hold a token."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._tables: dict[int, dict[int, int]] = {}  # owner → index → page
        self._computed: dict[int, int] = {}

    def after(self, record: Record) -> tuple[int, int]:
        """(held, used) after a step."""
        for op, page, owner, index in record.events:
            if op in (Op.ALLOC, Op.SHARE):
                self._tables.setdefault(owner, {})[index] = page
            elif op == Op.RELEASE and self._tables.get(owner, {}).get(index) == page:
                del self._tables[owner][index]
        for work in record.plan.works:
            for seq_id in {work.seq_id, *work.sample_seq_ids}:
                self._computed[seq_id] = work.start + work.num_tokens
        filled: dict[int, int] = {}
        for owner, table in self._tables.items():
            for index, page in table.items():
                tokens = min(max(self._computed.get(owner, 0) - index * self._size, 0), self._size)
                filled[page] = max(filled.get(page, 0), tokens)
        return len(filled), sum(filled.values())
