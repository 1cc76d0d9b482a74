"""Records the examples that ship: each preset, run as the page runs it, with what chapters show of it: comparisons, tiles
of its steps, profiled steps, kernels' runs, the speed ladder and the ceilings of this machine.

    python -m benchmarks.record --out assets/recordings [--name h200] [--only PRESET] [--device cuda] [--model …]

A recording is a real run on this machine; its device, date and commit are in it. It is taken step by step, and each
beat's job is done at the beat's own moment, as in a talk: so a recording brings what the live engine would show there.
Rejected: jobs at fixed steps (a chapter that changes would find nothing).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.compare import last_requests
from engine.config import CacheConfig, EngineConfig, ModelSource
from engine.errors import EngineError
from engine.recording import save
from engine.session import Session
from engine.tiles import past_step
from engine.trace import Comparison, Trace
from engine.workloads import LADDER, WORKLOADS
from viz.chapter import Beat, Job, decided, find, moment
from viz.moments import going_on, long_read, writing
from viz.registry import load_chapters
from viz.tiles import a_step

PATIENCE_S = 180
LADDER_S = 30.0  # that the ladder's slowest rung may take: longer answers than a page waits for
READY_S = 10.0  # until the engine tells of a job: its first slice may be long
KERNELS = ("silu_mul", "add_rms_norm", "flash_prefill", "flash_decode")  # runs beside those that chapters ask for
EXTRA = (  # of a preset whose steps no chapter looks into
    Beat("", (), until=lambda trace, step: long_read(trace, step) is not None, job=("tiles", {})),
    Beat("", (), until=lambda trace, step: 0 < len(writing(trace, step)) == len(going_on(trace, step)), job=("profile", {})),
    Beat("", (), job=("timeline", {})),
    Beat("", (), job=("tiles", {"kernel": "flash_decode", "splits": 1})),
    Beat("", (), job=("tiles", {"kernel": "flash_decode", "splits": 4})),
)


def comparisons(preset: str) -> list[tuple[str, tuple]]:
    """(knob, values) of the beats that compare modes of a preset."""
    return list(dict.fromkeys((b.compare[0], tuple(b.compare[1:])) for beats in _runs(preset) for b in beats if b.compare is not None))


def _runs(preset: str) -> list[list[Beat]]:
    """The beats of each chapter that are played on one run of a preset, in order."""
    found = []
    for chapter in load_chapters().values():
        run = chapter.preset
        for beat in chapter.beats:
            if beat.preset or beat is chapter.beats[0]:
                run = beat.preset or run
                found.append((run, []))
            found[-1][1].append(beat)
    return [beats for run, beats in found if run == preset]


def _jobs(beats: Iterable[Beat]) -> list[Job]:
    return [job for beat in beats for job in (beat.job, beat.predict.job if beat.predict else None) if job is not None]


class _Reel:
    """The beats of one chapter on one run: as steps come, each is looked for, and its jobs are done at its moment."""

    def __init__(self, camera: _Camera, beats: Iterable[Beat]) -> None:
        self._camera, self._beats = camera, list(beats)
        self._begin = 0
        self._asked: tuple[int, str | None] | None = None  # a question that is open: where, and what was selected

    def look(self) -> None:
        """Go on as far as the run has come."""
        while self._beats and self._go_on(self._beats[0]):
            pass

    def _go_on(self, beat: Beat) -> bool:
        trace = self._camera.trace
        if self._asked is None:
            step = find(trace, beat.until, self._begin)
            if step is None:
                return False
            if beat.job is not None:
                step = self._camera.make(beat.job, step, beat.select(trace, step)) or step
            self._asked = step, beat.select(self._camera.trace, step)
            self._begin = step
        asked, select = self._asked
        if beat.predict is not None:
            step = decided(self._camera.trace, beat.predict, asked)
            if step is None:
                return False
            if beat.predict.job is not None:
                step = self._camera.make(beat.predict.job, step, select) or step
            self._begin = step
        self._asked = None
        self._beats.pop(0)
        return True


class _Camera:
    """One room of an engine, a step at a time.

    Args:
        failed: takes the sentences of jobs that could not be done; the recording goes on without them.
    """

    def __init__(self, session: Session, room: str) -> None:
        self._session, self._room = session, room
        self.failed: list[str] = []

    @property
    def trace(self) -> Trace:
        return self._session.trace(self._room)

    def step(self) -> bool:
        """One step; False when nothing is left to run."""
        before, begun = self.trace.last_step, time.monotonic()
        self._session.ask("step", room=self._room, n=1)
        while self.trace.last_step == before:
            if self._session.ask("is_idle", room=self._room) and self.trace.last_step == before:
                return False
            _within(begun, f"{self._room}: a step")
        return True

    def make(self, job: Job, step: int, select: str | None) -> int | None:
        """As viz/stage/walk.py does it."""
        at = moment(self.trace, job, step, select)
        if at is not None:
            return at
        try:
            self.ask(job, step, select)
            if job[0] == "profile":
                begun = time.monotonic()
                while not self._fraction and time.monotonic() < begun + READY_S:
                    time.sleep(0.01)
                self.step()
            at = self.wait(lambda: moment(self.trace, job, step, select))
        except EngineError as error:
            self.failed.append(f"{job} at step {step}: {error.sentence}")
            return None
        if at is None:
            self.failed.append(f"{job} at step {step}: {self._session.status(self._room).sentence or 'it made nothing'}")
        return at

    def ask(self, job: Job, step: int, select: str | None = None) -> None:
        """Start a job as LiveSource (engine/audience.py) does."""
        name, args = job
        args = dict(args)
        if name == "tiles":
            args = a_step(self.trace, step, 0, select) | args
            args |= {"past": past_step(self.trace, args.pop("step"))}
            args |= {"num_splits": args.pop("splits")} if "splits" in args else {}
        if name == "timeline":
            args |= {"past": past_step(self.trace, step)}
        if name == "ladder":
            args |= {"prompts": self._session.script(LADDER), "seconds": LADDER_S}
        self._session.ask("job", room=self._room, name=name, args=args)

    def wait(self, made: Callable[[], int | None]) -> int | None:
        """What `made` says once the job has ended; the engine takes no other before."""
        begun, was_seen = time.monotonic(), False
        while True:
            is_seen = self._session.status(self._room).progress is not None
            was_seen, at = was_seen or is_seen, made()
            if not is_seen and (at is not None or was_seen or time.monotonic() > begun + READY_S):
                return at
            _within(begun, f"{self._room}: a job")

    @property
    def _fraction(self) -> float:
        progress = self._session.status(self._room).progress
        return 0.0 if progress is None else progress.fraction


def _within(begun: float, what: str) -> None:
    if time.monotonic() - begun > PATIENCE_S:
        raise TimeoutError(f"{what} took too long.")
    time.sleep(0.01)


def record(session: Session, preset: str, failed: list[str] | None = None) -> Trace:
    """One preset in a room of its own, so that its numbers begin at zero.

    Args:
        failed: takes a sentence for each job that could not be done here.
    """
    session.open_room(preset)
    try:
        camera, beats = _Camera(session, preset), _runs(preset)
        session.ask("pause", room=preset)
        session.run_workload(WORKLOADS[preset], room=preset)
        looks_in = any(name in ("tiles", "profile") for name, _ in _jobs(b for run in beats for b in run))
        reels = [_Reel(camera, run) for run in (beats if looks_in else [*beats, EXTRA]) if _jobs(run)]
        while camera.step():
            for reel in reels:
                reel.look()
        _add_measurements(camera, any(name == "kernel" for name, _ in _jobs(b for run in beats for b in run)))
        prompts, names = last_requests(session.trace(preset), -1)
        for knob, values in comparisons(preset):
            before = _num_comparisons(session.trace(preset))
            args = {"knob": knob, "values": values, "prompts": prompts, "names": names}
            session.ask("job", room=preset, name="compare", args=args)
            if camera.wait(lambda before=before: _num_comparisons(session.trace(preset)) - before or None) is None:
                raise TimeoutError(f"{preset}: comparing {knob} made nothing. {session.status(preset).sentence}")
        if failed is not None:
            failed += camera.failed
        return session.trace(preset)
    finally:
        session.close_room(preset)


def _add_measurements(camera: _Camera, kernels: bool) -> None:
    """The ceilings, so that every recording's steps can be judged; a few kernels where a chapter shows one."""
    last = camera.trace.last_step or 0
    camera.make(("ceilings", {}), last, None)
    for name in KERNELS if kernels else ():
        camera.make(("kernel", {"name": name}), last, None)


def _num_comparisons(trace: Trace) -> int:
    return sum(isinstance(a, Comparison) for a in trace.artifacts)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--name", default="h200", help="ends the file names")
    p.add_argument("--only", action="append", choices=sorted(WORKLOADS))
    p.add_argument("--model")
    p.add_argument("--device", default="auto")
    args = p.parse_args()
    session = Session(EngineConfig(ModelSource(args.model, args.device), CacheConfig(num_pages=96))).start().wait_ready(600)
    try:
        for preset in args.only or WORKLOADS:
            failed: list[str] = []
            trace, path = record(session, preset, failed), args.out / f"{preset}-{args.name}.glass"
            save(trace, path)
            kinds = sorted({type(a).__name__ for a in trace.artifacts})
            print(f"{preset}: {len(trace)} steps, {path.stat().st_size:,} bytes, with {', '.join(kinds)}", flush=True)
            for sentence in failed:
                print(f"  not made: {sentence}", flush=True)
    finally:
        session.close()


if __name__ == "__main__":
    main()
