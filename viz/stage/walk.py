"""Takes a room to a moment of a run: one step of the engine, or of a recording's playhead, after the other.

The speed is one that an eye can follow, until somebody is in a hurry. Everything is said through the hub, as if a
viewer had said it. Knows no chapters (viz/stage/tour.py). Rejected: play and pause
in time (an engine runs past the moment before the pause arrives).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from engine.trace import Trace
from viz.chapter import Event, Job, find, moment
from viz.stage.hub import Hub, Refused
from viz.stage.viewer import Viewer
from viz.tiles import a_step
from viz.view import OFFERED_JOBS

POLL_S = 0.01
QUIET_S = 0.15  # a run that was just paused may still report its last step
ENDED_S = 0.4  # nobody is alive and no step came for so long: the run is over
NO_ENGINE = ("loading", "dead", "closed")
JOB_S = 60.0  # a kernel may have to be compiled, or interpreted
LONG_JOBS = {"ladder": 240.0}
READY_S = 10.0  # until the engine tells of a job: its first slice may be long


GATED = ("preset", "live", "compare", *OFFERED_JOBS)  # what starts something; single steps are not counted as a person's commands


class Ours(dict):
    """Arguments of a command that the stage says by itself: nobody has taken over."""


class Left(Exception):
    """Whoever was walking is gone, or elsewhere."""


@dataclass(frozen=True, slots=True)
class Speed:
    """`steps_per_s` for `slow_steps` at the beginning (and before a moment that is known), then faster and faster up
    to `max_steps_per_s` (1,000 is the most that an engine takes). `patience`: seconds that one step may take."""

    steps_per_s: float = 2.0
    max_steps_per_s: float = 8.0
    slow_steps: int = 4
    growth: float = 1.35
    patience: float = 30.0

    def wait(self, taken: int, left: int | None) -> float:
        """Seconds before the next step, after `taken` of them, with `left` to go (None: nobody knows)."""
        near = taken if left is None else min(taken, left - 1)
        return 1 / min(self.steps_per_s * self.growth ** max(near - self.slow_steps + 1, 0), self.max_steps_per_s)


SLOWLY = Speed()


class Walk:
    """One person's way through one room. `hurry` may be set at any time."""

    def __init__(self, hub: Hub, viewer: Viewer, speed: Speed, hurry: bool = False) -> None:
        self.hub, self.viewer, self.speed = hub, viewer, speed
        self.room = viewer.room
        self.hurry = asyncio.Event()
        if hurry:
            self.hurry.set()

    # ---- where it is ----

    @property
    def trace(self) -> Trace:
        return self.hub.source.trace(self.room)

    @property
    def status(self) -> Mapping[str, object]:
        return self.hub.source.status(self.room)

    @property
    def is_live(self) -> bool:
        return bool(self.status.get("live"))

    async def say(self, name: str, /, **args: object) -> Mapping[str, object]:
        """Raises what the hub raises, Left, and Refused for an answer that is a refusal."""
        if self.viewer.gone or self.viewer.room != self.room:
            raise Left
        ask = self.hub.act if name in GATED else self.hub.ask
        answer = await ask(self.viewer, name, Ours(args))
        if answer.get("ok") is False:
            raise Refused(str(answer.get("code", "error")), str(answer.get("sentence", "")))
        return answer

    # ---- runs ----

    async def start(self, preset: str, recorded: bool) -> int:
        """Begin a workload, or its recording; the step from which its moments are looked for."""
        if recorded:
            await self._open(preset)
            return self.trace.first_step or 0
        await self.return_to(preset, recorded=False)
        await self._stand_still()
        before = self.trace.last_step
        await self.say("preset", name=preset)
        await self.say("pause")
        return 0 if before is None else before + 1

    async def start_with(self, preset: str, knob: str, value: object) -> None:
        """Begin a workload with a knob turned; it plays on at the walk's pace."""
        await self.return_to(preset, recorded=False)
        await self._stand_still()
        await self.say("preset", name=preset, knobs={knob: value})
        await self.say("pace", value=self.speed.steps_per_s)
        await self.say("play")

    async def return_to(self, preset: str, recorded: bool) -> None:
        """Make sure that the room shows the run that a moment belongs to."""
        link_of = getattr(self.hub.source, "link_of", None)
        if recorded and link_of is not None and link_of(self.room) != preset:
            await self._open(preset)
        elif not recorded and not self.is_live:
            await self.say("live")

    async def _open(self, preset: str) -> None:
        """The recording that ships; a source that has no shelf is the recording itself. Raises Refused."""
        play = getattr(self.hub.source, "play_shipped", None)
        if play is not None:
            await play(self.room, preset)
        await self.say("pause")
        await self.say("pace", value=self.speed.steps_per_s)
        await self.say("seek", step=self.trace.first_step or 0)

    async def _stand_still(self) -> None:
        was_running = self.status.get("state") == "running"
        await self.say("pause")
        if was_running:
            await asyncio.sleep(QUIET_S)

    # ---- moments ----

    async def seek(self, step: int) -> int | None:
        """Show an earlier step. A recording's playhead goes there; for an engine the viewers must look at it."""
        if self.is_live:
            await self.say("pause")
            return None if step == self.trace.last_step else step
        await self.say("pause")
        await self.say("seek", step=step)
        return None

    async def until(self, event: Event, begin: int) -> int | None:
        """The first step from `begin` on that fits; the room stands there. None: the run ended before."""
        return await (self._run(event, begin) if self.is_live else self._play(event, begin))

    async def _play(self, event: Event, begin: int) -> int | None:
        trace = self.trace
        found = await asyncio.to_thread(find, trace, event, begin)
        target = trace.last_step if found is None else found
        if target is None:
            return None
        at = trace.clamp(begin)
        await self.say("pause")
        await self.say("seek", step=min(at, target))
        taken = 0
        while (cursor := self.status.get("cursor")) is not None and cursor < target and not self.hurry.is_set():
            await self._wait(taken, len(trace.rows("steps", cursor + 1, target)))
            await self.say("step", n=1)
            taken += 1
        await self.say("seek", step=target)
        return found

    async def _run(self, event: Event, begin: int) -> int | None:
        await self.say("pause")
        fast = False
        taken, pace = 0, self.speed.max_steps_per_s
        try:
            while True:
                trace = self.trace
                found = await asyncio.to_thread(find, trace, event, begin)
                if found is not None:
                    return found
                last = trace.last_step
                begin = begin if last is None else max(begin, last + 1)
                if not fast:  # a paused engine takes single steps no faster than its pace
                    await self.say("pace", value=pace)
                    fast = True
                await self._wait(taken, None)
                if not await self._step(last):
                    return None
                taken += 1
        finally:
            if fast and not self.viewer.gone and self.viewer.room == self.room:
                await self.say("pace", value=self.speed.steps_per_s)

    # ---- what a step leaves to be made ----

    async def make(self, job: Job, step: int, select: str | None) -> int | None:
        """Have a job done on a step, where an engine is and it was not done before; the step at which its artifact is to be
        seen. None: a recording has none. Raises Refused."""
        at = await asyncio.to_thread(moment, self.trace, job, step, select)
        if at is not None or not self.is_live:
            return at
        name, args = job
        of_step = a_step(self.trace, step, 0, select) if name == "tiles" else {"step": step} if name == "timeline" else {}
        await self.say(name, **of_step, **args)
        if name == "profile":
            await self._is_ready()
            await self._step(self.trace.last_step)
        begun, was_seen, most = time.monotonic(), name == "profile", LONG_JOBS.get(name, JOB_S)
        while True:
            status = self.status  # before the trace: what a job made comes not later than that it has ended
            at = await asyncio.to_thread(moment, self.trace, job, step, select)
            spent, is_seen = time.monotonic() - begun, status.get("progress") is not None
            was_seen |= is_seen
            if at is not None and (not is_seen or spent > most):  # the engine takes no other job before
                return at
            if status.get("state") in NO_ENGINE:
                raise Refused("engine_not_ready", "The engine is not running.")
            if spent > most or (not is_seen and spent > (ENDED_S if was_seen else READY_S)):
                raise Refused("not_made", "That could not be measured now. The talk goes on.")
            await asyncio.sleep(POLL_S * 5)

    async def _is_ready(self) -> None:
        """The job looks into the next step: it has begun to wait for it."""
        begun = time.monotonic()
        while not (self.status.get("progress") or {}).get("fraction") and time.monotonic() < begun + READY_S:
            await asyncio.sleep(POLL_S)

    async def _wait(self, taken: int, left: int | None) -> None:
        try:
            await asyncio.wait_for(self.hurry.wait(), self.speed.wait(taken, left))
        except TimeoutError:
            return

    async def _step(self, before: int | None) -> bool:
        """One step of the engine; False when there is nothing left to run."""
        await self.say("step", n=1)
        asked = time.monotonic()
        while time.monotonic() < asked + self.speed.patience:
            if self.trace.last_step != before:
                return True
            status = self.status
            if status.get("state") in NO_ENGINE:
                raise Refused("engine_not_ready", "The engine is not running.")
            alive = status.get("running"), status.get("queued")
            if alive == ([], []) and time.monotonic() > asked + ENDED_S:
                return False
            await asyncio.sleep(POLL_S)
        return False
