"""EngineCore: add, abort, step(). A step is schedule → build → run → settle → commit → record.

Rooms share weights, runner and arena (engine/rooms.py); each has its own knobs, scheduler, pages and records. Steps
of busy rooms take turns. With run_ahead a step is planned and launched before the one before it is settled. A step
that raises ends the requests that it concerned and nothing else.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from engine.batch import HostBatch, build_host
from engine.config import EngineConfig, with_wide_parts
from engine.errors import reason_of, tell
from engine.interpreted import Interpreter
from engine.pages import Arena
from engine.plan import Clocks, Committed, StepError, StepPlan, StepResult
from engine.probe import NO_PROBE
from engine.recorder import KEYFRAME_EVERY, Record
from engine.request import FinishReason, Request, SamplingParams, letters
from engine.rooms import Housing, Room
from engine.rows import RowSlots
from engine.runner import ModelRunner, PendingStep
from engine.sampler import SampleRows, SteadyRows, uniform
from engine.sequence import Sequence, TextStream
from engine.steady import SteadyPlan
from engine.trace import SequenceInfo, TensorSample


@dataclass
class _Launched:
    """A step between launch and settlement, with the clocks so far: of a launch of several, the first has them all.

    `start_us` None: when the step before has been settled. `launch_id`: of the first step of the launch.
    """

    plan: StepPlan | SteadyPlan
    pending: PendingStep
    launch_id: int
    start_us: int | None
    schedule_us: int
    build_us: int
    run_us: int
    probe: object


class EngineCore:
    """The engine without a thread of its own. It is born with the room "main".

    Args:
        config: resolved. `self.config` stays main's knobs with everything engine-wide; new rooms begin with these.
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
        self.housing = Housing(config, runner, new_text, self._settle_all)
        self.rooms: dict[str, Room] = self.housing.rooms
        self._next_request = 1
        self._turn = 0
        self._facts: list[object] = []
        self._steady_rows: dict[str, SteadyRows] = {}  # of each room's newest cohort
        self.interpreter = Interpreter()
        self.peer: Callable[[], object] | None = None  # makes another implementation of the same model (engine/peer.py)
        self.open_room("main")

    def begin_at(self, start, room: str = "main") -> None:
        """Number a room's steps, sequences and requests from `start` on (engine/ledger.py's Start): after a crash the
        new core's records follow the old one's. Request numbers are the engine's, so they only ever rise."""
        self._next_request = max(self._next_request, start.request)
        home = self.housing.get(room)
        home.num_requests, home.num_events, home.config_index = start.name, start.events, start.config
        home.recorder.text_bytes = start.text_bytes
        home.clock.busy_us = max(home.clock.busy_us, start.clock_us)
        home.scheduler.begin_at(start.step, start.sequence)

    def number_from(self, room: str, request: int, sequence: int, name: int) -> None:
        """What a room's next request is called, where somebody else has promised it (engine/burst.py)."""
        home = self.housing.get(room)
        self._next_request = max(self._next_request, request)
        home.num_requests = max(home.num_requests, name)
        home.scheduler.number_from(sequence)

    # ---- rooms and requests ----

    @property
    def arena(self) -> Arena:
        return self.housing.arena

    @property
    def rows(self) -> RowSlots:
        return self.housing.rows

    def open_room(self, name: str, config: EngineConfig | None = None, *, scratch: bool = False) -> Room:
        """A room with the knobs of `config` (None: those that the engine was born with). A scratch room is a job's:
        it is stepped by name only, and its time is on no other room's clock.

        Raises EngineError "room_exists", "no_room", "bad_room".
        """
        room = self.housing.open(name, config, scratch)
        room.last_turn = self._turn
        for artifact in self._facts:
            room.recorder.artifact(artifact)
        return room

    def close_room(self, name: str) -> Room:
        """End a room's requests and give its pages back; what it recorded can still be drained."""
        home = self.housing.get(name)
        self._settle_all(home)
        for request_id in {s.request.request_id for s in home.scheduler.sequences.values()}:
            home.scheduler.abort(request_id, FinishReason.ABORT)
        self.report(name)
        self.housing.close(name)
        self._steady_rows.pop(name, None)  # it holds the room's sequences
        return home

    def forget(self, name: str) -> None:
        """Drop what a room's ended requests left for others to hit."""
        self.report(name)
        self.housing.get(name).scheduler.pool.forget()

    def announce(self, artifact: object) -> None:
        """Something that the record of every room says, also of those that open later."""
        self._facts.append(artifact)
        for room in self.rooms.values():
            room.recorder.artifact(artifact)

    def add(
        self, prompt: str, token_ids: tuple[int, ...], sampling: SamplingParams, *, room: str = "main", priority: int = 0
    ) -> tuple[Request, tuple[int, ...]]:
        """Queue a prompt; returns its request and the seq_ids of its samples. Raises EngineError on refusal."""
        home = self.housing.get(room)
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(31))
        request = Request(
            self._next_request, letters(home.num_requests), prompt, token_ids, sampling, room, priority, home.clock.busy_us,
            self.eos_token_ids,
        )  # fmt: skip
        sequences = home.scheduler.add(request)
        self._next_request += 1
        home.num_requests += 1
        for seq in sequences:
            home.recorder.sequence(_info(seq))
        return request, tuple(s.seq_id for s in sequences)

    def abort(self, request_id: int, room: str = "main") -> bool:
        """End a request; False if it was not alive. The next step reports it."""
        return bool(self.housing.get(room).scheduler.abort(request_id, FinishReason.ABORT))

    @property
    def has_work(self) -> bool:
        return any(room.has_work for room in self._public())

    def reconfigure(self, config: EngineConfig, room: str = "main") -> None:
        """Take new knobs between steps: a room's own for that room, engine-wide ones for all. A new page geometry or
        cache mode flushes: running sequences recompute.

        Raises EngineError "pool_too_large"; then nothing has changed.
        """
        self.housing.reconfigure(room, config)
        self.config = config if room == "main" else with_wide_parts(self.config, config)

    # ---- stepping ----

    def rooms_in_turn(self) -> list[str]:
        """Room names, the one that has waited longest first."""
        return [room.name for room in sorted(self._public(), key=lambda room: room.last_turn)]

    def capture_next(self) -> int | None:
        """Between steps: capture one more decode graph if one is missing and wanted; its size."""
        return self.runner.capture_next() if self.captures_left else None

    @property
    def captures_left(self) -> bool:
        wanted = any(room.config.runner.cuda_graphs for room in self.rooms.values())
        return wanted and self.runner.graphs is not None and bool(self.runner.graphs.missing)

    def step(self, room: str | None = None, probe=NO_PROBE, alone: bool = False) -> Record | None:
        """One step of a room (None: whose turn it is). None if nobody has work or nothing settled yet. What is launched is one
        step where it is to be `alone`, else as many as the room's steps_per_launch says and the next calls settle."""
        home = self._next_room() if room is None else self.housing.get(room)
        if home is None or not home.has_work:
            return None
        home.last_turn = self._turn = self._turn + 1
        began = home.clock.began = time.perf_counter()
        ahead, record, launched = home.config.scheduler.run_ahead, None, []
        if home.num_launches <= ahead:
            launched = self._launch(home, probe, 1 if alone else home.config.runner.steps_per_launch)
            if isinstance(launched, Record):
                record, launched = launched, []
            home.flying.extend(launched)
        if home.flying and (not launched or home.num_launches > ahead or launched[0].plan.is_empty):
            record = self._settle(home, home.flying.popleft())
        home.clock.busy_us += int((time.perf_counter() - began) * 1e6)
        home.clock.began = None
        return record

    def report(self, room: str) -> Record | None:
        """Record what was ended or flushed since the last step without computing anything."""
        home = self.housing.get(room)
        self._settle_all(home)
        if not home.scheduler.has_report:
            return None
        plan = home.scheduler.schedule_nothing()
        result = StepResult(plan.step_id, ())
        return self._record(home, plan, result, home.scheduler.commit(plan, result), Clocks(home.clock.busy_us, 0, 0, 0, 0, 0), ())

    def _launch(self, room: Room, probe, num_steps: int) -> list[_Launched] | Record:
        """Schedule, build, run, up to `num_steps` steps. []: nothing can be planned until a step in flight settles. A Record: it
        failed."""
        clock = _Stopwatch()
        plan = room.scheduler.schedule()
        if room.flying and plan.is_empty and not plan.preempted:
            room.scheduler.withdraw(plan)
            return []
        if not probe.wants(plan):
            probe = NO_PROBE
        if probe.active:
            probe.step_id = plan.step_id
        plans, hosts, launched, schedule_us, build_us = [], [], [], 0, 0
        try:
            for each in self._with_repeats(room, plan, 1 if probe.active else num_steps):
                plans.append(each)
                schedule_us += clock.lap()
                hosts.append(build_host(each, room.scheduler.sequences, room.scheduler.pool))
                build_us += clock.lap()
            rows = [self._sample_rows(each, host, room.scheduler.sequences) for each, host in zip(plans, hosts, strict=True)]
            build_us, begun = build_us + clock.lap(), room.clock.busy_us
            for each, pending in zip(plans, self._run(room, plans, hosts, rows, probe), strict=True):
                launched.append(_Launched(each, pending, plan.step_id, None, 0, 0, 0, probe))
            first = launched[0]
            first.start_us, first.schedule_us, first.build_us, first.run_us = begun, schedule_us, build_us, clock.lap()
            return launched
        except Exception as error:
            room.flying.extend(launched)
            self._settle_all(room)  # steps launched earlier are sound
            return self._fail(room, plans[len(launched) :], error)

    def _with_repeats(self, room: Room, plan: StepPlan | SteadyPlan, most: int) -> Iterator[StepPlan | SteadyPlan]:
        """A plan, and more like it if nothing but the tokens changed."""
        yield plan
        if isinstance(plan, SteadyPlan):
            for _ in range(most - 1):
                again = room.scheduler.repeat()
                if again is None:
                    return
                yield again

    def _run(self, room: Room, plans: list, hosts: list, rows: list[SampleRows], probe) -> Iterable[PendingStep]:
        graphs = room.config.runner.cuda_graphs
        if len(plans) > 1 and self.runner.graphs is not None:
            return self.runner.run_several([plan.step_id for plan in plans], hosts, rows, graphs)
        each = zip(plans, hosts, rows, strict=True)
        return (self.runner.run(plan.step_id, host, drawn, probe, graphs) for plan, host, drawn in each)

    def _settle_all(self, room: Room) -> None:
        while room.flying:
            self._settle(room, room.flying.popleft())

    def _settle(self, room: Room, launched: _Launched) -> Record | None:
        """Wait for a step, commit it, record it."""
        clock, settle_at = _Stopwatch(), room.clock.now()
        try:
            result = launched.pending.settle()
            settle_us = clock.lap()
            kept = launched.probe.arrays()
            committed = room.scheduler.commit(launched.plan, result)
        except Exception as error:
            broken = [launched.plan, *(later.plan for later in room.flying)]
            room.flying.clear()
            return self._fail(room, broken, error)
        start_us = room.clock.busy_us if launched.start_us is None else launched.start_us
        clocks = Clocks(start_us, launched.schedule_us, launched.build_us, launched.run_us, settle_us, clock.lap(), settle_at)
        samples = tuple(TensorSample(launched.plan.step_id, n, layer, a) for (n, layer), a in kept.items())
        return self._record(
            room, launched.plan, result, committed, clocks, samples, probed=launched.probe.active, launch_id=launched.launch_id
        )

    def _fail(self, room: Room, broken: list[StepPlan], error: Exception) -> Record:
        """Steps that raised, or were planned on one that did, are void; their requests end with a sentence."""
        tell(error)
        for plan in broken:
            sentence = f"Step {plan.step_id} failed: {reason_of(error)}. Its requests ended; the next prompt can be sent."
            failure = StepError("step_failed", sentence, tuple(w.seq_id for w in plan.works))
            clocks = Clocks(room.clock.busy_us, 0, 0, 0, 0, 0)
            record = self._record(room, plan, StepResult(plan.step_id, ()), room.scheduler.fail(plan), clocks, (), failure)
        return record

    def _record(
        self, room: Room, plan: StepPlan, result: StepResult, committed: Committed, clocks: Clocks,
        samples: tuple[TensorSample, ...], error: StepError | None = None, probed: bool = False, launch_id: int | None = None,
    ) -> Record:  # fmt: skip
        clock, pool = _Stopwatch(), room.scheduler.pool
        events = pool.take_events()
        num_events = room.num_events = room.num_events + len(events)
        keyframe = (num_events, pool.snapshot_events()) if plan.step_id % KEYFRAME_EVERY == 0 else None
        record = Record(
            plan, result, committed, clocks, events, num_events, room.config_index, keyframe, samples, error, probed, launch_id, clock.lap()
        )  # fmt: skip
        if self.config.tracing:
            room.recorder.append(record)
        return record

    # ---- parts ----

    def _public(self) -> list[Room]:
        return [room for room in self.rooms.values() if not room.scratch]

    def _next_room(self) -> Room | None:
        return next((self.rooms[name] for name in self.rooms_in_turn() if self.rooms[name].has_work), None)

    def _sample_rows(self, plan: StepPlan | SteadyPlan, host: HostBatch, sequences: dict[int, Sequence]) -> SampleRows:
        if isinstance(plan, SteadyPlan):
            kept = self._steady_rows.get(plan.room)
            if kept is None or kept.members is not plan.members:
                kept = self._steady_rows[plan.room] = SteadyRows(plan.members)
            return kept.at(plan)
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
        params.temperature, params.seed or 0, request.priority, request.arrival_us, request.room, params.top_k, params.top_p,
        params.stop, params.stop_token_ids, params.ignore_eos,
    )  # fmt: skip
