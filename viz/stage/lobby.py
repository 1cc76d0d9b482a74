"""Who sees which source: live rooms, and private places where somebody plays a recording by himself.

A newcomer lands on the shipped recording unless a link names a room or the only room has already run; that costs
the engine nothing. The first prompt or preset takes him to a live room. A recording that was opened is played in
the room where it was opened; the engine goes on behind it. Knows no sockets (viz/stage/hub.py) and no roles
(viz/stage/people.py). Rejected: a second hub (every viewer would have to reconnect).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.trace import Trace
from viz.stage.hub import Refused
from viz.stage.source import ROOM, Landing, RecordingSource, Source
from viz.stage.viewer import room_name

PRIVATE = "~"  # begins the name of a place that no link can name
MOVES_TO_LIVE = ("prompt", "preset")
INTRO = "ragged"  # the preset that plays before anything is typed, and that a first prompt joins


@dataclass(frozen=True, slots=True)
class Shelf:
    """Recordings at hand. `read`: file content → Trace, raises an error with a `sentence`; `shipped`: preset name →
    a Trace that comes with the product, or None; `pinned`: id of a link → (Trace, its state), or None once expired."""

    read: Callable[[bytes], Trace]
    shipped: Callable[[str], Trace | None] = lambda name: None
    pinned: Callable[[str], tuple[Trace, Mapping[str, object]] | None] = lambda name: None


class Lobby:
    """Args:
    base: a live source (viz/stage/source.py), or the recording that was asked for.
    shelf: where recordings come from.
    public: many rooms, opened by the first prompt and closed when idle; otherwise there is the one room.
    """

    def __init__(self, base: Source, shelf: Shelf, *, public: bool = False) -> None:
        self.base, self.shelf, self.public = base, shelf, public
        self._playing: dict[str, RecordingSource] = {}
        self._viewers: dict[str, list[str]] = {}
        self._homes: dict[str, str] = {}  # person → the live room it made
        self._fresh: set[str] = set()  # rooms whose first prompt joins the intro's requests
        self._switches: dict[str, int] = {}

    # ---- where to ----

    async def land(self, place: str, person: str, said: Mapping[str, object]) -> Landing:
        """`place`: a name for a private place."""
        private = PRIVATE + place
        if isinstance(said.get("rec"), str) and said["rec"]:
            return self._land_on_pin(private, str(said["rec"]), said)
        asked = room_name(said.get("room"), "")
        if asked and self._is_open(asked):
            return Landing(asked)
        sentence = "That room has ended. Here is a recording; type a sentence to start a room of your own." if asked else ""
        home = self._homes.get(person, ROOM)
        if not self._is_live or (self._is_open(home) and (home != ROOM or self._has_run(home))):
            return Landing(home if self._is_open(home) else ROOM, sentence)
        trace = await asyncio.to_thread(self.shelf.shipped, INTRO)
        if trace is None:
            return Landing(ROOM, sentence)
        self._playing[private] = RecordingSource(trace)
        return Landing(private, sentence)

    def _land_on_pin(self, private: str, pin: str, said: Mapping[str, object]) -> Landing:
        found = self.shelf.pinned(pin)
        if found is None:
            return Landing(ROOM, "This link has expired: its moment is no longer kept here.", {"expired": True, "chapter": said.get("chapter")})
        trace, state = found
        self._playing[private] = RecordingSource(trace, playing=False, loop=False)
        return Landing(private, "", state)

    async def until_ready(self) -> None:
        while self.base.status(ROOM).get("state") == "loading":
            await asyncio.sleep(0.25)

    @property
    def _is_live(self) -> bool:
        return bool(self.base.status(ROOM).get("live"))

    def _is_open(self, room: str) -> bool:
        is_open = getattr(self.base, "is_open", None)
        return room == ROOM and not (self.public and self._is_live) if is_open is None else is_open(room)

    def _has_run(self, room: str) -> bool:
        return len(self.base.trace(room)) > 0

    # ---- Source ----

    def trace(self, room: str) -> Trace:
        return self._of(room).trace(room)

    def version(self, room: str) -> object:
        return (self._switches.get(room, 0), self._of(room).version(room))

    def status(self, room: str) -> dict:
        if room not in self._playing:
            status = self.base.status(room)
            return {**status, "recording": {**(status.get("recording") or {}), "open": True, "back": False}}
        return self._playing_status(room)

    def _playing_status(self, room: str) -> dict:
        """A recording over an engine: what the engine offers stays on offer."""
        base = self.base.status(room if room[0] != PRIVATE else ROOM)
        live = bool(base.get("live"))
        offers = {"save": False, "open": True, "back": live and base.get("state") != "loading"}
        return {
            **self._playing[room].status(room),
            "engine": {"state": base.get("state"), "live": live, "device": base.get("device")},
            "presets": base.get("presets", []),
            "progress": base.get("progress"),
            "error": base.get("error"),
            "hint": base.get("hint", ""),
            "intro": room[0] == PRIVATE,
            "recording": offers,
        }

    async def command(self, room: str, viewer: str, name: str, args: Mapping[str, object]) -> dict:
        playing = self._playing.get(room)
        if name == "live":
            return await self._go_live(room, viewer)
        if playing is None:
            return await self._live_command(room, viewer, name, args)
        if name in MOVES_TO_LIVE and self._is_live:
            return await self._to_a_room(room, viewer, name, args)
        if name == "preset":
            return await self.play_shipped(room, str(args.get("name")))
        return await playing.command(room, viewer, name, args)

    async def _live_command(self, room: str, viewer: str, name: str, args: Mapping[str, object]) -> dict:
        if name == "prompt" and room in self._fresh:
            self._fresh.discard(room)
            await self.base.command(room, viewer, "preset", {"name": INTRO})  # so that the prompt becomes request D
        return await self.base.command(room, viewer, name, args)

    async def _to_a_room(self, room: str, viewer: str, name: str, args: Mapping[str, object]) -> dict:
        """From a recording to a live room, where the command is said again."""
        state = self.base.status(ROOM).get("state")
        if state == "loading":
            return await self._while_loading(room, name, args)
        if state == "dead":
            return await (self.play_shipped(room, str(args.get("name"))) if name == "preset" else self.base.command(ROOM, viewer, name, args))
        if room[0] != PRIVATE:
            self._stop(room)
            return await self._live_command(room, viewer, name, args)
        return {"ok": True, "move": await self._home(viewer, joins=name == "prompt"), "again": True}

    async def _while_loading(self, room: str, name: str, args: Mapping[str, object]) -> dict:
        if name == "preset":
            return await self.play_shipped(room, str(args.get("name")))
        return {"ok": True, "later": True, "queued": True, "sentence": "Your prompt is queued: it starts when the model has been loaded."}

    async def _home(self, person: str, joins: bool = False) -> str:
        """The live room of a person: the only one, or one of its own, opened now. Raises EngineError "no_room"."""
        room = self._homes.get(person, ROOM)
        if not self._is_open(room):
            room = secrets.token_hex(4)
            await asyncio.to_thread(self.base.open_room, room)
            self._homes[person] = room
        if joins and not self._has_run(room):
            self._fresh.add(room)
        return room

    async def _go_live(self, room: str, viewer: str) -> dict:
        if room[0] == PRIVATE:
            return {"ok": True, "move": await self._home(viewer)}
        self._stop(room)
        return {"ok": True}

    def viewer_joined(self, room: str, viewer: str) -> None:
        if room[0] != PRIVATE:
            self.base.viewer_joined(room, viewer)
        elif room not in self._playing:
            raise Refused("unknown_room", "That place does not exist any more.")
        self._viewers.setdefault(room, []).append(viewer)
        if room in self._playing:
            self._playing[room].viewer_joined(room, viewer)

    def viewer_left(self, room: str, viewer: str) -> None:
        watching = self._viewers.get(room, [])
        if viewer in watching:
            watching.remove(viewer)
        if not watching:
            self._viewers.pop(room, None)
            self._stop(room)
            self._switches.pop(room, None)
        if room[0] != PRIVATE:
            self.base.viewer_left(room, viewer)

    # ---- recordings ----

    async def save_recording(self, room: str, viewer: str) -> tuple[str, bytes]:
        save = getattr(self.base, "save_recording", None)
        if save is None or room[0] == PRIVATE:
            raise Refused("nothing_recorded", "This page shows a recording: there is nothing new to save.")
        return await save(room, viewer)

    async def open_recording(self, room: str, viewer: str, name: str, content: bytes) -> dict:
        trace = await asyncio.to_thread(self.shelf.read, content)
        self._play(room, trace)
        return {"ok": True, "steps": len(trace)}

    async def play_shipped(self, room: str, preset: str) -> dict:
        """Play the recording of a preset in a room. Raises Refused when none ships."""
        trace = await asyncio.to_thread(self.shelf.shipped, preset)
        if trace is None:
            raise Refused("no_recording", "There is no recording of this example, and no engine to run it.")
        self._play(room, trace)
        return {"ok": True, "steps": len(trace)}

    def _play(self, room: str, trace: Trace) -> None:
        source = RecordingSource(trace)
        for watching in self._viewers.get(room, ()):
            source.viewer_joined(room, watching)
        self._playing[room] = source
        self._switches[room] = self._switches.get(room, 0) + 1

    def _stop(self, room: str) -> None:
        if self._playing.pop(room, None) is not None:
            self._switches[room] = self._switches.get(room, 0) + 1

    def _of(self, room: str) -> Source:
        return self._playing.get(room, self.base)
