"""EngineCore: add, abort, step(). A step is schedule → build → run → settle → commit → record.

Rooms share weights, runner and arena; each has its own scheduler, pages and records. Steps of busy rooms take
turns. With run_ahead a step is planned and launched before the one before it is settled. A step that raises
ends the requests that it concerned and nothing else.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from engine.batch import HostBatch, build_host
from engine.config import EngineConfig, knob_values
from engine.errors import reason_of
from engine.pages import Arena, PagePool
from engine.plan import Clocks, Committed, StepError, StepPlan, StepResult
from engine.probe import NO_PROBE
from engine.recorder import KEYFRAME_EVERY, Record, Recorder
from engine.request import FinishReason, Request, SamplingParams
from engine.rows import RowSlots
from engine.runner import ModelRunner, PendingStep
from engine.sampler import SampleRows, uniform
from engine.scheduler import Scheduler
from engine.sequence import Sequence, TextStream
from engine.trace import SequenceInfo, TensorSample


def letters(index: int) -> str:
    """0 → A, 25 → Z, 26 → AA."""
    text = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        text = chr(ord("A") + rest) + text
    return text


@dataclass
class _Launched:
    """A step between launch and settlement, with the clocks so far."""

    plan: StepPlan
    pending: PendingStep
    start_us: int
    schedule_us: int
    build_us: int
    run_us: int
    probe: object


@dataclass
class Room:
    """One audience's share of the engine: its queue, its leased pages, its records."""

    name: str
    scheduler: Scheduler
    recorder: Recorder
    flying: deque[_Launched] = field(default_factory=deque)
    num_requests: int = 0
    config_index: int = 0
    num_events: int = 0

    @property
    def has_work(self) -> bool:
        return bool(self.flying) or self.scheduler.has_work


class EngineCore:
    """The engine without a thread of its own.

    Args:
        config: resolved.
        runner: holds the model.
        new_text: Request -> TextStream (a detokeniser).
        eos_token_ids: the model's EOS set.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        new_text: Callable[[Request], TextStream],
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.config = config
        self.runner = runner
        self.eos_token_ids = eos_token_ids
        self.arena = Arena(config.cache.num_pages)
        self.rows = RowSlots()
        self.rooms: dict[str, Room] = {}
        self._new_text = new_text
        self._next_request = 1
        self._turn = 0
        self._busy_us = 0
        self.open_room("main", config.cache.num_pages)

    def begin_at(self, start) -> None:
        """Number steps, sequences and requests from `start` on (engine/session.py's Start): after a crash the
        new core's records follow the old one's."""
        self._next_request = start.request
        room = self.rooms["main"]
        room.num_requests, room.num_events, room.config_index = start.name, start.events, start.config
        room.recorder.text_bytes = start.text_bytes
        room.scheduler.begin_at(start.step, start.sequence)

    # ---- rooms and requests ----

    def open_room(self, name: str, num_pages: int) -> Room:
        """Lease pages to a new room."""
        pool = PagePool(self.arena.lease(name, num_pages), self.config.cache.page_size, name.encode())
        room = Room(name, Scheduler(self.config, pool, self._new_text, name, self.rows), Recorder())
        room.recorder.config(knob_values(self.config))
        self.rooms[name] = room
        return room

    def add(
        self, prompt: str, token_ids: tuple[int, ...], sampling: SamplingParams, *, room: str = "main", priority: int = 0
    ) -> tuple[Request, tuple[int, ...]]:
        """Queue a prompt; returns its request and the seq_ids of its samples. Raises EngineError on refusal."""
        home = self.rooms[room]
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(31))
        request = Request(
            self._next_request, letters(home.num_requests), prompt, token_ids, sampling, room, priority, self._busy_us, self.eos_token_ids
        )
        sequences = home.scheduler.add(request)
        self._next_request += 1
        home.num_requests += 1
        for seq in sequences:
            home.recorder.sequence(_info(seq))
        return request, tuple(s.seq_id for s in sequences)

    def abort(self, request_id: int, room: str = "main") -> bool:
        """End a request; False if it was not alive. The next step reports it."""
        return bool(self.rooms[room].scheduler.abort(request_id, FinishReason.ABORT))

    @property
    def has_work(self) -> bool:
        return any(room.has_work for room in self.rooms.values())

    def reconfigure(self, config: EngineConfig) -> None:
        """Take new knobs between steps. A new page geometry or cache mode flushes: running sequences recompute.

        Raises EngineError "pool_too_large"; then nothing has changed.
        """
        for room in self.rooms.values():
            while room.flying:
                self._settle(room, room.flying.popleft())
        self.runner.configure(config)  # refuses before anything has changed
        old, self.config = self.config.cache, config
        flush = (old.page_size, old.num_pages, old.mode) != (config.cache.page_size, config.cache.num_pages, config.cache.mode)
        if flush:
            self.arena = Arena(config.cache.num_pages)
        for room in self.rooms.values():
            pool = None
            if flush:
                pool = PagePool(
                    self.arena.lease(room.name, config.cache.num_pages // len(self.rooms)), config.cache.page_size, room.name.encode()
                )
            room.scheduler.reconfigure(config, pool)
            room.recorder.config(knob_values(config))
            room.config_index += 1

    # ---- stepping ----

    def rooms_in_turn(self) -> list[str]:
        """Room names, the one that has waited longest first."""
        names = sorted(self.rooms)
        at = self._turn % len(names)
        return names[at:] + names[:at]

    def step(self, room: str | None = None, probe=NO_PROBE) -> Record | None:
        """One step of a room (None: whose turn it is). None if nobody has work or nothing settled yet."""
        home = self._next_room() if room is None else self.rooms[room]
        if home is None or not home.has_work:
            return None
        self._turn = sorted(self.rooms).index(home.name) + 1
        began = time.perf_counter()
        launched = self._launch(home, probe)
        if launched is not None:
            home.flying.append(launched)
        record = None
        if home.flying and (launched is None or len(home.flying) > self.config.scheduler.run_ahead or not launched.plan.works):
            record = self._settle(home, home.flying.popleft())
        self._busy_us += int((time.perf_counter() - began) * 1e6)
        return record

    def report(self, room: str) -> Record | None:
        """Record what was ended or flushed since the last step without computing anything."""
        home = self.rooms[room]
        while home.flying:
            self._settle(home, home.flying.popleft())
        if not home.scheduler.has_report:
            return None
        plan = home.scheduler.schedule_nothing()
        result = StepResult(plan.step_id, ())
        return self._record(home, plan, result, home.scheduler.commit(plan, result), Clocks(self._busy_us, 0, 0, 0, 0, 0), ())

    def _launch(self, room: Room, probe) -> _Launched | None:
        """Schedule, build, run. None: nothing can be planned until a step in flight settles, or it failed."""
        clock = _Stopwatch()
        plan = room.scheduler.schedule()
        if room.flying and not plan.works and not plan.preempted:
            room.scheduler.withdraw(plan)
            return None
        try:
            schedule_us = clock.lap()
            host = build_host(plan, room.scheduler.sequences, room.scheduler.pool)
            rows = self._sample_rows(plan, host, room.scheduler.sequences)
            build_us = clock.lap()
            pending = self.runner.run(plan.step_id, host, rows, probe)
            return _Launched(plan, pending, self._busy_us, schedule_us, build_us, clock.lap(), probe)
        except Exception as error:
            while room.flying:  # steps launched earlier are sound
                self._settle(room, room.flying.popleft())
            self._fail(room, [plan], error)
            return None

    def _settle(self, room: Room, launched: _Launched) -> Record | None:
        """Wait for a step, commit it, record it."""
        clock = _Stopwatch()
        try:
            result = launched.pending.settle()
            settle_us = clock.lap()
            kept = launched.probe.arrays()
            committed = room.scheduler.commit(launched.plan, result)
        except Exception as error:
            broken = [launched.plan, *(later.plan for later in room.flying)]
            room.flying.clear()
            return self._fail(room, broken, error)
        clocks = Clocks(launched.start_us, launched.schedule_us, launched.build_us, launched.run_us, settle_us, clock.lap())
        samples = tuple(TensorSample(launched.plan.step_id, n, layer, a) for (n, layer), a in kept.items())
        return self._record(room, launched.plan, result, committed, clocks, samples)

    def _fail(self, room: Room, broken: list[StepPlan], error: Exception) -> Record:
        """Steps that raised, or were planned on one that did, are void; their requests end with a sentence."""
        for plan in broken:
            sentence = f"Step {plan.step_id} failed: {reason_of(error)}. Its requests ended; the next prompt can be sent."
            failure = StepError("step_failed", sentence, tuple(w.seq_id for w in plan.works))
            clocks = Clocks(self._busy_us, 0, 0, 0, 0, 0)
            record = self._record(room, plan, StepResult(plan.step_id, ()), room.scheduler.fail(plan), clocks, (), failure)
        return record

    def _record(
        self, room: Room, plan: StepPlan, result: StepResult, committed: Committed, clocks: Clocks,
        samples: tuple[TensorSample, ...], error: StepError | None = None,
    ) -> Record:  # fmt: skip
        pool = room.scheduler.pool
        events = pool.take_events()
        num_events = room.num_events = room.num_events + len(events)
        keyframe = (num_events, pool.snapshot_events()) if plan.step_id % KEYFRAME_EVERY == 0 else None
        record = Record(plan, result, committed, clocks, events, num_events, room.config_index, keyframe, samples, error)
        if self.config.tracing:
            room.recorder.append(record)
        return record

    # ---- parts ----

    def _next_room(self) -> Room | None:
        return next((self.rooms[name] for name in self.rooms_in_turn() if self.rooms[name].has_work), None)

    def _sample_rows(self, plan: StepPlan, host: HostBatch, sequences: dict[int, Sequence]) -> SampleRows:
        seq_ids, slots, params, uniforms = [], [], [], []
        for work in plan.works:
            for seq_id in work.sample_seq_ids:
                seq = sequences[seq_id]
                seq_ids.append(seq_id)
                slots.append(seq.row or 0)
                params.append(seq.request.sampling)
                position = work.start + work.num_tokens
                uniforms.append(0.0 if params[-1].greedy else uniform(params[-1].seed, seq.sample, position))
        return SampleRows(tuple(seq_ids), np.array(slots, np.int64), tuple(params), tuple(uniforms))


class _Stopwatch:
    """Microseconds between laps."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> int:
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return int(elapsed * 1e6)


def _info(seq: Sequence) -> SequenceInfo:
    request, params = seq.request, seq.request.sampling
    name = request.name if params.n == 1 else f"{request.name}·{seq.sample + 1}"
    return SequenceInfo(
        seq.seq_id, request.request_id, seq.sample, name, request.prompt, request.prompt_token_ids, params.max_tokens,
        params.temperature, params.seed or 0, request.priority, request.arrival_us, request.room,
    )  # fmt: skip
