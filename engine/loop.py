"""The engine's own thread: takes commands, runs rooms at their pace, works off jobs between steps, reports.

A room that is paused or paced holds nobody up: a turn goes to the due room that has waited longest. Scratch rooms
(engine/jobs.py) have no pace and send no reports; to commands they do not exist.

The same loop runs in a thread of the page's process or in a process of its own (engine/session.py); commands
and reports are plain data either way. Reports leave at most REPORTS_PER_S times a second, so that a fast
engine is not slowed by who watches it.
"""

from __future__ import annotations

import queue
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from engine.config import EngineConfig, knob_values, with_knob, with_room_knobs
from engine.core import EngineCore
from engine.errors import EngineError, reason_of, tell
from engine.jobs import Job, start_job
from engine.messages import Answer, Closed, Command, Died, Progress, Prompt, Report
from engine.rooms import Room, unknown_room

REPORTS_PER_S = 30.0
IDLE_S = 0.25  # how long an idle loop sleeps before it looks round


@dataclass
class _Pace:
    """How a room runs. `credit` steps may be taken while paused; `next_at` is when the next is due."""

    paused: bool = False
    steps_per_s: float | None = None
    credit: int = 0
    next_at: float = 0.0
    script: list[Prompt] = field(default_factory=list)
    steps: int = 0
    reported: tuple = ()
    note: str = ""  # to be reported once


class Loop:
    """Drives one EngineCore.

    Args:
        core: ready to step.
        receive: (timeout seconds) -> Command, raising queue.Empty.
        send: takes answers and reports.
    """

    def __init__(self, core: EngineCore, receive: Callable[[float], Command | None], send: Callable[[object], None]) -> None:
        self.core = core
        self._receive, self._send = receive, send
        self._paces = {name: _Pace() for name, room in core.rooms.items() if not room.scratch}
        self._job: Job | None = None
        self._stopping = False
        self._report_at = 0.0

    def run(self) -> None:
        """Until told to stop."""
        for _ in self.turns():
            pass

    def turns(self) -> Iterator[None]:
        """The same a turn at a time. A fault outside a step ends it with a Died message."""
        try:
            self._report()
            while not self._stopping:
                self._take_commands(self._sleep_time())
                self._turn()
                if time.monotonic() >= self._report_at:
                    self._report()
                yield
            self._report()
        except Exception as error:
            self._send(Died(f"The engine stopped: {reason_of(error)}.", traceback.format_exc()))

    @property
    def is_idle(self) -> bool:
        """No room has anything left to do, nor has a job."""
        return self._job is None and not any(self.core.rooms[name].has_work or pace.script for name, pace in self._paces.items())

    def end_all(self, sentence: str) -> None:
        """End what runs in every room, with a sentence for those who lost something."""
        if self._job is not None:
            self._paces[self._job.room].note = sentence
        self._end_job()
        for name, pace in self._paces.items():
            if self._abort_all(name):
                pace.note = sentence

    # ---- one turn ----

    def _turn(self) -> None:
        """One step if a room may take one, and one slice of the job."""
        if self._job is not None:
            self._advance_job()
        for name, pace in self._paces.items():
            if self.core.rooms[name].scheduler.has_report and not self._may_step(name):
                self.core.report(name)
            if pace.script and not self.core.rooms[name].has_work and (not pace.paused or pace.credit > 0):
                self._run_script(name, pace)  # all that ran was ended while the room was paused
        self._capture()
        room = self._due_room()
        if room is None:
            return
        pace = self._paces[room]
        probe = self._job.probe_for(room) if self._job is not None else None
        alone = pace.paused or bool(pace.steps_per_s)
        record = self.core.step(room, alone=alone) if probe is None else self.core.step(room, probe, alone)
        if pace.paused:
            pace.credit -= 1
        if pace.steps_per_s:
            pace.next_at = max(pace.next_at + 1 / pace.steps_per_s, time.monotonic())
        pace.steps += 1
        self._run_script(room, pace)
        if record is not None and self._job is not None:
            self._job.saw(record)

    def _capture(self) -> None:
        """One decode graph that is missing; a failure is said once, and steps go on eagerly."""
        if not self.core.captures_left:
            return
        self.core.capture_next()
        failed = self.core.runner.graphs.failed
        if failed:
            for pace in self._paces.values():
                pace.note = f"Not every CUDA graph could be captured ({failed}); larger steps run eagerly."

    def _may_step(self, name: str) -> bool:
        pace = self._paces[name]
        return self.core.rooms[name].has_work and (not pace.paused or pace.credit > 0)

    def _due_room(self) -> str | None:
        now = time.monotonic()
        for name in self.core.rooms_in_turn():
            pace = self._paces[name]
            if self._may_step(name) and (not pace.steps_per_s or now >= pace.next_at):
                return name
            if pace.credit and not self.core.rooms[name].has_work:
                pace.credit = 0
        return None

    def _sleep_time(self) -> float:
        """How long commands may be waited for: not at all while a room is due."""
        now = time.monotonic()
        waits = [IDLE_S, *([max(self._report_at - now, 0.0)] if self._unreported() else [])]
        if (self._job is not None and not self._job.waits) or self.core.captures_left:
            return 0.0
        for name in self._paces:
            if self._may_step(name):
                pace = self._paces[name]
                waits.append(max(pace.next_at - now, 0.0) if pace.steps_per_s else 0.0)
        return min(waits)

    def _run_script(self, room: str, pace: _Pace) -> None:
        """Add the prompts of a workload that are due. One that no longer fits is said, and the next has its turn: it ends
        neither the script nor anybody's requests."""
        for line in self._due_lines(room, pace):
            try:
                self._add_line(room, line)
            except EngineError as error:
                pace.note = error.sentence

    def _due_lines(self, room: str, pace: _Pace) -> Iterator[Prompt]:
        """Taken from the script: those whose time has come; the next one at once when nothing else is left to run."""
        while pace.script and (pace.script[0].after_steps <= pace.steps or not self.core.rooms[room].has_work):
            yield pace.script.pop(0)

    def _add_line(self, room: str, line: Prompt) -> None:
        self.core.add(line.prompt, line.token_ids, line.sampling, room=room, priority=line.priority)

    # ---- commands ----

    def _take_commands(self, timeout: float) -> None:
        while True:
            try:
                command = self._receive(timeout)
            except queue.Empty:
                return
            timeout = 0.0
            if command is None:
                self._stopping = True
                return
            try:
                value = getattr(self, f"do_{command.name}")(**command.args)
                self._send(Answer(command.number, value))
            except EngineError as error:
                self._send(Answer(command.number, error=error))
            except Exception as error:  # a fault in one command must not end everybody's requests
                tell(error)
                sentence = f"That could not be done: {reason_of(error)}."
                self._send(Answer(command.number, error=EngineError("command_failed", sentence)))
            self._report_at = 0.0

    def do_add(self, room: str, prompt: Prompt) -> tuple[int, str, tuple[int, ...]]:
        """(request_id, name, seq_ids)."""
        self._pace(room)
        request, seq_ids = self.core.add(prompt.prompt, prompt.token_ids, prompt.sampling, room=room, priority=prompt.priority)
        return request.request_id, request.name, seq_ids

    def do_workload(self, room: str, prompts: tuple[Prompt, ...], knobs: Mapping[str, object]) -> None:
        """End what runs, set the knobs, forget cached prefixes (a workload shows the same each time), start a script. Knobs
        that cannot be set end nothing; where a line that is due at once is refused, nothing of the script runs."""
        pace, config = self._pace(room), self._with_knobs(room, knobs)
        self.core.housing.check(room, config)
        self._abort_all(room)
        self._take_knobs(room, config)
        self.core.forget(room)
        pace.steps = 0
        pace.script = sorted(prompts, key=lambda p: p.after_steps)
        try:
            for line in self._due_lines(room, pace):
                self._add_line(room, line)
        except EngineError:
            self._abort_all(room)
            raise

    def do_abort(self, room: str, request_id: int | None) -> bool:
        """One request, or all of them (None)."""
        self._pace(room)
        if request_id is None:
            return self._abort_all(room)
        return self.core.abort(request_id, room)

    def do_play(self, room: str) -> None:
        pace = self._pace(room)
        pace.paused, pace.credit = False, 0

    def do_pause(self, room: str) -> None:
        pace = self._pace(room)
        pace.paused, pace.credit = True, 0

    def do_step(self, room: str, n: int) -> None:
        pace = self._pace(room)
        pace.paused, pace.credit = True, min(pace.credit + n, 1000)

    def do_pace(self, room: str, steps_per_s: float | None) -> None:
        pace = self._pace(room)
        pace.steps_per_s, pace.next_at = steps_per_s, 0.0

    def do_is_idle(self, room: str) -> bool:
        """Nothing left to do, and everything that was done has been reported."""
        pace, home = self._pace(room), self.core.rooms[room]
        return not (home.has_work or home.recorder.num_pending or pace.script)

    def do_knobs(self, knobs: Mapping[str, object], room: str = "main") -> dict[str, object]:
        self._pace(room)
        self._take_knobs(room, self._with_knobs(room, knobs))
        return knob_values(self.core.rooms[room].config)

    def do_open_room(self, name: str, knobs: Mapping[str, object]) -> None:
        """Its first report leaves before the answer, so that the room is known when the answer comes."""
        room = self.core.open_room(name, with_room_knobs(self.core.housing.defaults, knobs))
        self._paces[name] = _Pace()
        self._report_room(room)

    def do_close_room(self, name: str) -> None:
        """End its requests; the last report says so. A job that was started in it ends too."""
        self._pace(name)
        if self._job is not None and self._job.room == name:
            self._end_job()
        room = self.core.close_room(name)
        self._report_room(room, closed=True)
        del self._paces[name]
        self._send(Closed(name))

    def do_job(self, name: str, args: Mapping[str, object], room: str = "main") -> int:
        """Start a job; its answer comes as an artifact in the room's trace. One at a time in the whole engine."""
        self._pace(room)
        if self._job is not None:
            sentence = f"The job “{self._job.name}” is still running. Wait until it has ended, or cancel it."
            raise EngineError("job_running", sentence, name=self._job.name)
        self._job = start_job(self.core, name, args, room)
        return self._job.number

    def do_cancel_job(self) -> bool:
        running = self._job is not None
        self._end_job()
        return running

    def _pace(self, room: str) -> _Pace:
        """Raises EngineError "unknown_room"."""
        pace = self._paces.get(room)
        if pace is None:
            raise unknown_room(room)
        return pace

    def _abort_all(self, room: str) -> bool:
        scheduler = self.core.rooms[room].scheduler
        self._paces[room].script.clear()
        found = {s.request.request_id for s in (*scheduler.running, *scheduler.waiting)}
        for request_id in found:
            self.core.abort(request_id, room)
        return bool(found)

    def _with_knobs(self, room: str, knobs: Mapping[str, object]) -> EngineConfig:
        config = self.core.rooms[room].config
        for name, value in knobs.items():
            config = with_knob(config, name, value)
        return config

    def _take_knobs(self, room: str, config: EngineConfig) -> None:
        if config != self.core.rooms[room].config:
            self.core.reconfigure(config, room)

    # ---- jobs and reports ----

    def _advance_job(self) -> None:
        job = self._job
        try:
            done = job.advance()
        except Exception as error:  # a fault in a job must not end everybody's requests
            tell(error)
            done, job.note = True, f"The job “{job.name}” failed: {reason_of(error)}."
        self._publish(job)
        if done:
            self._paces[job.room].note = job.note
            self._end_job()

    def _end_job(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.close()
            self._publish(job)  # one that was stopped may have something to say of what it had done
        self._report_at = 0.0

    def _publish(self, job: Job) -> None:
        for artifact in job.take_artifacts():
            self.core.rooms[job.room].recorder.artifact(artifact)

    def _unreported(self) -> bool:
        return any(self.core.rooms[name].recorder.num_pending for name in self._paces)

    def _report(self) -> None:
        self._report_at = time.monotonic() + 1 / REPORTS_PER_S
        for name in self._paces:
            self._report_room(self.core.rooms[name])

    def _report_room(self, room: Room, closed: bool = False) -> None:
        """Say what happened in a room, if anything did."""
        pace = self._paces[room.name]
        state = "paused" if pace.paused and not pace.credit else "running" if room.has_work else "idle"
        queue_now = tuple(s.seq_id for s in room.scheduler.waiting)
        running = tuple(s.seq_id for s in room.scheduler.running)
        job = Progress(self._job.fraction, self._job.text) if self._job else None
        delta = room.recorder.drain()
        said = ("closed" if closed else state, pace.steps_per_s, queue_now, running, room.config, job)
        note, pace.note = pace.note, ""
        if delta.is_empty and said == pace.reported and not note:
            return
        pace.reported = said
        self._send(Report(room.name, delta, *said, note))
