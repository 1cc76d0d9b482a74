"""A Source that can be exchanged, room by room: somebody opens a recording, looks at it, and goes back to live.

The engine goes on behind a recording. Rejected: a second hub (every viewer would have to reconnect).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from engine.trace import Trace
from viz.stage.hub import Refused
from viz.stage.source import RecordingSource, Source


class SwitchingSource:
    """Args:
    base: what rooms show unless a recording was opened in them.
    read: file content → Trace; raises an error with a `sentence` for a file that cannot be shown.
    """

    def __init__(self, base: Source, read: Callable[[bytes], Trace]) -> None:
        self.base = base
        self._read = read
        self._opened: dict[str, RecordingSource] = {}
        self._viewers: dict[str, set[str]] = {}
        self._switches = 0

    def trace(self, room: str) -> Trace:
        return self._of(room).trace(room)

    def version(self, room: str) -> object:
        return (self._switches, self._of(room).version(room))

    def status(self, room: str) -> dict:
        status = self._of(room).status(room)
        offers = self.base.status(room).get("recording") or {}
        return {**status, "recording": {**offers, "open": True, "back": room in self._opened}}

    async def command(self, room: str, viewer: str, name: str, args: Mapping[str, object]) -> dict:
        if name == "live":
            self._close(room)
            return {"ok": True}
        return await self._of(room).command(room, viewer, name, args)

    def viewer_joined(self, room: str, viewer: str) -> None:
        self.base.viewer_joined(room, viewer)
        self._viewers.setdefault(room, set()).add(viewer)
        if room in self._opened:
            self._opened[room].viewer_joined(room, viewer)

    def viewer_left(self, room: str, viewer: str) -> None:
        self._viewers.get(room, set()).discard(viewer)
        if not self._viewers.get(room):
            self._viewers.pop(room, None)
            self._close(room)
        self.base.viewer_left(room, viewer)

    async def save_recording(self, room: str, viewer: str) -> tuple[str, bytes]:
        save = getattr(self.base, "save_recording", None)
        if save is None:
            raise Refused("nothing_recorded", "This page shows a recording: there is nothing new to save.")
        return await save(room, viewer)

    async def open_recording(self, room: str, viewer: str, name: str, content: bytes) -> dict:
        trace = await asyncio.to_thread(self._read, content)
        source = RecordingSource(trace, playing=True)
        for watching in self._viewers.get(room, ()):
            source.viewer_joined(room, watching)
        self._opened[room] = source
        self._switches += 1
        return {"ok": True, "steps": len(trace)}

    def _of(self, room: str) -> Source:
        return self._opened.get(room, self.base)

    def _close(self, room: str) -> None:
        if self._opened.pop(room, None) is not None:
            self._switches += 1
