"""Device work that is not a step: queued, run on the engine's thread between steps, cancellable, bounded.

A job is a generator that yields (fraction done, text) after each slice; what it finds goes into the trace of the
room that asked, as artifacts. Adding a job is one function in JOBS: (core, **args) -> Job.

A job may run requests of its own. It opens a scratch room, adds to it and steps it once a slice; the loop takes one
step of a due room between two slices, so nobody stands still meanwhile:

    room = job.open_scratch(with_knob(core.rooms[job.room].config, "mode", "none"))
    core.add("", token_ids, sampling, room=room.name)
    while room.has_work:
        core.step(room.name)
        yield fraction, "running it again without a cache"
    delta = room.recorder.drain()  # a TraceStore makes a Trace of it

Scratch rooms lease pages like any room (EngineError "no_room" if there are none), but nobody sees them: no reports,
no commands, no place among max_rooms, and their steps are on nobody's clock. They close when the job ends, however
it ends.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping

from engine.ceilings import measured_ceilings
from engine.compare import COMPARE_S, check_pair, compared
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineError
from engine.kernel_page import chosen, kernel_run
from engine.ladder import LADDER_S, SECONDS, climbed
from engine.ladder import check as check_ladder
from engine.messages import Prompt
from engine.ops import choose_ops
from engine.probe import POINTS, Probe, StepProbe
from engine.profile import PROFILE_S, profiled_step
from engine.recorder import Record
from engine.rooms import Room
from engine.runner import DTYPES
from engine.tiles import TILES_S, Asked, PastStep, traced_tiles
from engine.tiles import check as check_tiles
from engine.timeline import MODES, TIMELINE_S, bursts
from engine.timeline import check as check_timeline

TIMEOUT_S = 20.0
KERNEL_S = 60.0  # a kernel may have to be compiled
_numbers = itertools.count(1)


class Job:
    """A running job. `probe_for` lets it look into the next step of its room; `saw` tells it what that step was.

    Args:
        core: on the thread that steps it.
        work: the job's generator; each `advance()` runs it to its next yield.
        timeout: seconds after which it is stopped between two slices.
        check: raises EngineError for what cannot be done for this room, before the job starts.
    """

    def __init__(
        self, core: EngineCore, name: str, work: Callable[[Job], Iterator[tuple[float, str]]], timeout: float = TIMEOUT_S,
        check: Callable[[str], None] = lambda room: None,
    ) -> None:  # fmt: skip
        self.core = core
        self.number = next(_numbers)
        self.name = name
        self.fraction, self.text = 0.0, name
        self.probe: StepProbe | None = None
        self.room = "main"
        self.record: Record | None = None
        self.waits = False  # for a step of its room, and does nothing meanwhile
        self.note = ""  # why it ended early
        self._artifacts: list[object] = []
        self._scratch: list[str] = []
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self._work = work(self)
        self.check = check

    def advance(self) -> bool:
        """One slice, once a turn of the loop; True when it is over (done or out of time). What it raises, it failed with."""
        if time.monotonic() > self._deadline:
            self.note = f"The job “{self.name}” was stopped after {self._timeout:.0f} seconds."
            return True
        try:
            self.fraction, self.text = next(self._work)
            return False
        except StopIteration:
            return True

    def open_scratch(self, config: EngineConfig | None = None) -> Room:
        """A private room with these knobs (None: the engine's defaults). Raises EngineError "no_room"."""
        name = f"scratch {self.number}.{len(self._scratch) + 1}"
        room = self.core.open_room(name, config, scratch=True)
        self._scratch.append(name)
        return room

    def close(self) -> None:
        """The job is over: stop its generator, close its scratch rooms."""
        self._work.close()
        for name in self._scratch:
            if name in self.core.rooms:
                self.core.close_room(name)

    def publish(self, artifact: object) -> None:
        self._artifacts.append(artifact)

    def take_artifacts(self) -> list[object]:
        taken = self._artifacts[:]
        self._artifacts.clear()
        return taken

    def probe_for(self, room: str) -> Probe | None:
        """The probe that the next step of `room` should carry, if no step has taken it yet."""
        waits = self.probe is not None and self.probe.step_id is None
        return self.probe if waits and room == self.room else None

    def saw(self, record: Record) -> None:
        """The record of the step that took the probe (with run-ahead one settles before it), or of the one with which it
        was lost."""
        taken = None if self.probe is None else self.probe.step_id
        if taken is not None and self.record is None and record.plan.room == self.room and record.plan.step_id >= taken:
            self.record, self.waits = record, False


def start_job(core: EngineCore, name: str, args: Mapping[str, object], room: str = "main") -> Job:
    """A job on behalf of a room. Raises EngineError for an unknown job or bad arguments."""
    make = JOBS.get(name)
    if make is None:
        raise EngineError("unknown_job", f"There is no job called {name!r}.", name=str(name)[:80])
    job = make(core, **args)
    job.check(room)
    job.room = room
    return job


def probe_step(core: EngineCore, points: tuple[str, ...] = POINTS, layers: tuple[int, ...] = (0,)) -> Job:
    """Keep named tensors of the next step; they appear in the trace as TensorSamples of that step."""
    unknown = [p for p in points if p not in POINTS]
    if unknown:
        raise EngineError("unknown_probe", f"There is no probe point called {unknown[0]!r}.", name=unknown[0])

    def work(job: Job) -> Iterator[tuple[float, str]]:
        job.probe = Probe(frozenset(points), frozenset(layers))
        job.waits = True
        while job.record is None:
            yield 0.0, "Waiting for the next step"

    return Job(core, "probe", work)


def check_kernels(core: EngineCore) -> Job:
    """Each kernel in use against its reference again; KernelReports go into the trace."""

    def work(job: Job) -> Iterator[tuple[float, str]]:
        yield 0.0, "Checking kernels against their references"
        source = core.config.source
        for report in choose_ops(source.backend, core.runner.device, DTYPES[source.dtype])[1]:
            job.publish(report)

    return Job(core, "check_kernels", work)


def compare(core: EngineCore, knob: str, values: tuple[str | bool, str | bool], prompts: tuple[Prompt, ...], names: tuple[str, ...]) -> Job:
    """The same requests in two modes, each in a scratch room; a Comparison goes into the trace."""
    check_pair(knob, values)
    return Job(core, "compare", lambda job: compared(job, knob, values, prompts, names), COMPARE_S)


def tiles(
    core: EngineCore, layer: int = 0, head: int = 0, seq_id: int | None = None, position: int | None = None, kernel: str | None = None,
    block_m: int | None = None, block_n: int | None = None, num_splits: int | None = None, past: PastStep | None = None,
) -> Job:  # fmt: skip
    """An attention kernel tile by tile; a TileTrace (on a GPU also a TrafficRun) goes into the trace.

    Args:
        seq_id: None: the one that computes most in the step.
        position: of the query row; None: the sequence's last one in the step.
        kernel: None: flash_prefill for more than 8 queries, else flash_decode.
        block_m, block_n, num_splits: None: as the kernel chooses.
        past: a recorded step, computed again; None: the next step of the room that has this row.
    """
    asked = Asked(layer, head, seq_id, position, kernel, block_m, block_n, num_splits)

    def check(room: str) -> None:
        check_tiles(core, asked, past, room)

    return Job(core, "tiles", lambda job: traced_tiles(job, asked, past), TILES_S, check)


def kernel(core: EngineCore, name: str, case: str | None = None, dims: Mapping[str, object] | None = None, dtype: str | None = None) -> Job:
    """A kernel on chosen shapes, checked and timed; a KernelRun goes into the trace.

    Args:
        case: a declared case by its name; None: the first.
        dims: shapes in place of a case's.
        dtype: None: the engine's.
    """
    what = chosen(core, name, case, dims, dtype)
    return Job(core, "kernel", lambda job: kernel_run(job, *what), KERNEL_S)


def ceilings(core: EngineCore) -> Job:
    """What the device can do at most; a Ceilings goes into the trace."""
    return Job(core, "ceilings", measured_ceilings)


def profile(core: EngineCore) -> Job:
    """The next step of the room, with a clock around every operation; a StepProfile goes into the trace."""
    return Job(core, "profile", profiled_step, PROFILE_S)


def timeline(core: EngineCore, past: PastStep, modes: tuple[bool, ...] = MODES) -> Job:
    """A burst of decode steps under a profiler, of the requests of a recorded step; a Timeline a mode goes into the trace.

    Args:
        modes: CUDA graphs off and on, one after the other; on is left out where there are none.
    """
    check_timeline(core, past.token_ids, modes)
    return Job(core, "timeline", lambda job: bursts(job, past.step_id, past.token_ids, modes), TIMELINE_S)


def ladder(core: EngineCore, prompts: tuple[Prompt, ...], seconds: float = SECONDS) -> Job:
    """The same requests from transformers' generate to everything switched on; a LadderRun goes into the trace, again after
    each rung.

    Args:
        seconds: that the slowest rung should take.
    """
    check_ladder(prompts, seconds)
    return Job(core, "ladder", lambda job: climbed(job, prompts, seconds), 2 * LADDER_S)


JOBS: dict[str, Callable[..., Job]] = {
    "probe": probe_step, "check_kernels": check_kernels, "compare": compare, "tiles": tiles, "kernel": kernel, "ceilings": ceilings,
    "profile": profile, "timeline": timeline, "ladder": ladder,
}  # fmt: skip
