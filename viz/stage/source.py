"""What the hub asks of whoever owns the records: the Source protocol, and RecordingSource over a finished Trace.

A Source hides where records come from (live engine in this process, in another one, a file). The hub calls
it on the event loop, so every synchronous method must return at once: snapshots, not work.

RecordingSource plays a Trace: each room has its own playhead that moves by the clock, so nothing runs while
nobody looks. Rejected: truncating the trace at the playhead (nobody could scrub ahead in a recording).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from engine.trace import Trace

ROOM = "main"


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a newcomer comes in, and what it is told: `sentence` (or `problem`, a refusal with code and fields), and the
    `state` to look at (a link's step)."""

    room: str
    sentence: str = ""
    state: Mapping[str, object] = field(default_factory=dict)
    problem: Mapping[str, object] = field(default_factory=dict)

    def facts(self) -> dict[str, object]:
        return {"sentence": self.sentence, "at": dict(self.state), "problem": dict(self.problem)}


@runtime_checkable
class Source(Protocol):
    """Records and commands of every room. `room` is a short name, `viewer` the secret name of one tab (a person).

    Where status()["recording"] says so, it also has `async save_recording(room, viewer)`, which gives (file name,
    content), and `async open_recording(room, viewer, name, content)`, which answers as command() does.
    """

    def trace(self, room: str) -> Trace:
        """An immutable snapshot."""

    def version(self, room: str) -> int:
        """Changes whenever trace() or status() would say something new. Asked up to 30 times a second."""

    def status(self, room: str) -> dict:
        """Plain JSON. Keys (all but `state` may be missing):

        state: "paused", "running", "idle", "loading", "dead" or "closed" (the room has ended: `sentence` says why); pace: steps a second, None is free-run;
        live: False for a recording; model: {"name", …}; device; badge: a sentence about the source;
        cursor: the room's playhead (step_id) where it is not the newest record; queued, running: names;
        progress: {"text", "fraction"} or None; error: {"code", "sentence"} or None;
        knobs: {name: {"value", "label", "choices" | "min", "max", "cost": "nothing" | "flush" | "rebuild", "why"}},
        a knob with "why" is greyed; presets: [{"name", "title"}]; tokens_per_s, steps_per_s;
        burst: where a GPU is lent: "idle", "wanted" (something waits for one) or "running"; else None or missing;
        max_fps: fewer frames a second than the hub's own limit, while the engine needs the machine;
        recording: {"save": bool, "open": bool}; hint: a sentence for the prompt's placeholder.
        """

    async def command(self, room: str, viewer: str, name: str, args: Mapping[str, object]) -> dict:
        """{"ok": True, …} or {"ok": False, "code", "sentence"}. May raise EngineError (it has code and sentence).
        {"move": room, "again": bool} takes the viewer to another room (and says the command there)."""

    def viewer_joined(self, room: str, viewer: str) -> None:
        """May raise an error with a `sentence` to refuse."""

    def viewer_left(self, room: str, viewer: str) -> None:
        """Also for a browser that vanished; the last one to leave lets the source end the room's requests."""


@dataclass
class _Playhead:
    """Where one room is: `index` rows into trace.steps at time `since`, moving if `playing`."""

    index: float = 0.0
    since: float = 0.0
    playing: bool = False
    pace: float | None = 2.0
    edits: int = 0
    viewers: int = 0


class RecordingSource:
    """Plays a recorded Trace. Prompts are refused with a sentence: nothing computes here.

    Args:
        pace: steps a second at the start; None plays at the speed of the recorded engine clock.
        loop: begins again after the last step, `hold` seconds later.
        clock: seconds; a test's own clock.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        pace: float | None = 2.0,
        playing: bool = True,
        loop: bool = True,
        hold: float = 4.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trace = trace
        self._defaults = (pace, playing)
        self._loop, self._hold, self._clock = loop, hold, clock
        self._rooms: dict[str, _Playhead] = {}
        start = trace.steps["start_us"].astype(np.int64) if len(trace) else np.zeros(0, np.int64)
        self._seconds = (start - start[0]) / 1e6 if len(start) else np.zeros(0)

    # ---- Source ----

    def trace(self, room: str) -> Trace:
        return self._trace

    def version(self, room: str) -> int:
        head = self._room(room)
        return head.edits * (len(self._trace) + 1) + self._at(head)

    def status(self, room: str) -> dict:
        head = self._room(room)
        at = self._at(head)
        ended = not len(self._trace) or (at == len(self._trace) - 1 and not self._loop)
        meta = self._trace.meta
        model = meta.get("model")
        return {
            "state": "idle" if ended else "running" if head.playing else "paused",
            "pace": head.pace,
            "live": False,
            "cursor": int(self._trace.steps["step_id"][at]) if len(self._trace) else None,
            "model": dict(model) if isinstance(model, Mapping) else {"name": str(model or "")},
            "device": str(meta.get("device", "")),
            "badge": " · ".join(str(meta[k]) for k in ("device", "date", "commit") if meta.get(k)),
        }

    async def command(self, room: str, viewer: str, name: str, args: Mapping[str, object]) -> dict:
        head = self._room(room)
        if not len(self._trace):
            return _refused("empty", "This recording has no steps.")
        at, last = self._at(head), len(self._trace) - 1
        if name == "play":
            self._move(head, 0 if at == last else at, playing=True)
        elif name == "pause":
            self._move(head, at, playing=False)
        elif name == "step":
            self._move(head, min(at + max(_whole(args.get("n"), 1), 1), last), playing=False)
        elif name == "seek":
            step = self._trace.clamp(_whole(args.get("step"), 0))
            self._move(head, int(np.searchsorted(self._trace.steps["step_id"], step)), playing=head.playing)
        elif name == "pace":
            value = args.get("value")
            if value is not None and not (isinstance(value, (int, float)) and 0.05 <= value <= 1000):
                return _refused("bad_pace", "The pace must be from 0.05 to 1,000 steps a second, or free.")
            head.pace = None if value is None else float(value)
            self._move(head, at, playing=head.playing)
        else:
            return _refused("recording", "This is a recording: it can be played, but nothing new can be computed.")
        return {"ok": True}

    def viewer_joined(self, room: str, viewer: str) -> None:
        self._room(room).viewers += 1

    def viewer_left(self, room: str, viewer: str) -> None:
        head = self._room(room)
        head.viewers -= 1
        if head.viewers <= 0:
            del self._rooms[room]

    # ---- the playhead ----

    def _room(self, room: str) -> _Playhead:
        if room not in self._rooms:
            pace, playing = self._defaults
            self._rooms[room] = _Playhead(since=self._clock(), playing=playing, pace=pace)
        return self._rooms[room]

    def _move(self, head: _Playhead, index: int, playing: bool) -> None:
        head.index, head.since, head.playing = float(index), self._clock(), playing
        head.edits += 1

    def _at(self, head: _Playhead) -> int:
        """The row of trace.steps under the playhead now."""
        last = len(self._trace) - 1
        if last < 0 or not head.playing:
            return max(min(int(head.index), last), 0)
        elapsed = self._clock() - head.since
        first = int(head.index)
        if head.pace is None:
            at = int(np.searchsorted(self._seconds, self._seconds[first] + elapsed, side="right")) - 1
            end = float(self._seconds[-1] - self._seconds[first])
        else:
            at = first + int(elapsed * head.pace)
            end = (last - first) / head.pace
        if self._loop and elapsed > end + self._hold:
            self._move(head, 0, playing=True)
            return 0
        return min(max(at, 0), last)


def _whole(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def _refused(code: str, sentence: str) -> dict:
    return {"ok": False, "code": code, "sentence": sentence}
