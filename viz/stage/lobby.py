"""Who sees which source: live rooms, and private places where somebody plays a recording by himself.

A newcomer lands on the shipped recording unless a link names a room or the only room has already run; that costs
the engine nothing. The first prompt or preset takes him to a live room. A recording that was opened is played in
the room where it was opened; the engine goes on behind it. Knows no sockets (viz/stage/hub.py) and no roles
(viz/stage/people.py). Rejected: a second hub (every viewer would have to reconnect).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from engine.trace import Trace
from viz.stage.hub import Refused
from viz.stage.names import fresh_room_name
from viz.stage.source import ROOM, Landing, RecordingSource, Source
from viz.stage.viewer import room_name

PRIVATE = "~"  # begins the name of a place that no link can name
MOVES_TO_LIVE = ("prompt", "preset")
ENDED = "That room has ended. Here is a recording; type a sentence to start a room of your own."
FIRST_PACE = 4.0  # steps a second of a first prompt
INTRO = "ragged"  # the preset that plays before anything is typed, and that a first prompt joins
LANDING_S = 60.0  # a place where nobody has come in by then is given up


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
        self._openers: dict[str, str] = {}  # room → who made it
        self._opening = asyncio.Lock()
        self._fresh: set[str] = set()  # rooms whose first prompt joins the intro's requests
        self._numbers = itertools.count(1)  # never the same again: pictures are kept by a place's name and version
        self._switches: dict[str, int] = {}  # place → number of what plays there, or stopped to
        self._landed: dict[str, float] = {}  # private place that nobody has entered yet → since when
        self._names: dict[str, str] = {}  # place → what a link calls the recording that plays there

    # ---- where to ----

    async def land(self, place: str, person: str, said: Mapping[str, object]) -> Landing:
        """`place`: a name for a private place."""
        private = PRIVATE + place
        if said.get("alone"):
            return await self._land_alone(private)
        if isinstance(said.get("rec"), str) and said["rec"] not in ("", "live"):
            return await self._land_on_link(private, person, said)
        asked = room_name(said.get("room"), "")
        if asked and self.is_open(asked):
            return Landing(asked)
        sentence = ENDED if asked else ""
        home = self._homes.get(person, ROOM)
        if self.is_open(home) and (home != ROOM or not self._is_live or self._has_run(home)):
            return Landing(home, sentence)
        return await self._land_alone(private, sentence)

    async def _land_alone(self, private: str, sentence: str | None = None) -> Landing:
        """Where nobody else is: the recording that ships, or the one that was asked for. `sentence` None: the caller has
        a reason why it must not be the one room."""
        trace = await asyncio.to_thread(self.shelf.shipped, INTRO) if self._is_live else self.base.trace(ROOM)
        if trace is None and sentence is not None and self.is_open(ROOM):
            return Landing(ROOM, sentence)
        self._prepare(private, RecordingSource(Trace() if trace is None else trace), INTRO if self._is_live else "")
        return Landing(private, sentence or "")

    async def _land_on_link(self, private: str, person: str, said: Mapping[str, object]) -> Landing:
        """A pinned moment, or a recording that ships; both wait, paused, at the link's step."""
        name = str(said["rec"])
        found = await asyncio.to_thread(self._linked, name)
        if found is None:
            landing = await self.land(private[1:], person, {**said, "rec": ""})
            chapter = said.get("chapter")
            state = {"expired": True, "chapter": chapter[:200] if isinstance(chapter, str) else ""}
            sentence = "This link has expired: its moment is no longer kept here."
            return Landing(landing.room, sentence, state, {"ok": False, "code": "link_expired", "sentence": sentence})
        trace, state = found
        self._prepare(private, RecordingSource(trace, playing=False, loop=False), name)
        return Landing(private, "", state)

    def _prepare(self, private: str, source: RecordingSource, name: str) -> None:
        """For one who is about to come; who never did leaves nothing behind."""
        now = time.monotonic()
        for place in [place for place, since in self._landed.items() if now - since > LANDING_S]:
            self._leave(place)
        if private not in self._viewers:
            self._landed[private] = now
        self._put(private, source, name)

    def _linked(self, name: str) -> tuple[Trace, Mapping[str, object]] | None:
        found = self.shelf.pinned(name)
        if found is None and (trace := self.shelf.shipped(name)) is not None:
            found = trace, {"step": trace.first_step}
        return found

    def link_of(self, room: str) -> str:
        """What a link calls the recording that plays in a room; "" for a live one, or one that somebody opened."""
        return self._names.get(room, "")

    async def until_ready(self) -> None:
        while self.base.status(ROOM).get("state") == "loading":
            await asyncio.sleep(0.25)

    @property
    def _is_live(self) -> bool:
        return bool(self.base.status(ROOM).get("live"))

    def is_open(self, room: str) -> bool:
        """May be entered by its name."""
        is_open = getattr(self.base, "is_open", None)
        return room == ROOM and not self.public if is_open is None else is_open(room)

    def opener(self, room: str) -> str | None:
        """Who made a room; None for the one that is always there."""
        return self._openers.get(room)

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
            await self.base.command(room, viewer, "preset", {"name": INTRO, "with_knobs": False})  # the prompt becomes request D
            await self.base.command(room, viewer, "pace", {"value": FIRST_PACE})  # at full speed nobody would see it
        return await self.base.command(room, viewer, name, args)

    async def _to_a_room(self, room: str, viewer: str, name: str, args: Mapping[str, object]) -> dict:
        """From a recording to a live room, where the command is said again."""
        state = self.base.status(ROOM).get("state")
        check = getattr(self.base, "check_prompt", None)
        if name == "prompt" and check is not None:
            await asyncio.to_thread(check, args)
        if state == "loading":
            return await self._while_loading(room, name, args)
        if state == "dead":
            return await (
                self.play_shipped(room, str(args.get("name"))) if name == "preset" else self.base.command(ROOM, viewer, name, args)
            )
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
        if not self.is_open(room):
            room = await self._open_room(person)
        if joins and not self._has_run(room):
            self._fresh.add(room)
        return room

    async def _open_room(self, person: str) -> str:
        """Raises EngineError "no_room"."""
        async with self._opening:  # two commands of one person make one room
            room = self._homes.get(person, ROOM)
            if self.is_open(room):
                return room
            name = fresh_room_name()
            self._openers[name] = person  # before anybody can come in
            try:
                await asyncio.to_thread(self.base.open_room, name)
            except Exception:
                del self._openers[name]
                raise
            self._forget_closed()
            self._homes[person] = name
            return name

    def _forget_closed(self) -> None:
        for room in [r for r in self._openers if not self.is_open(r) and r not in self._viewers]:
            person = self._openers.pop(room)
            if self._homes.get(person) == room:
                del self._homes[person]
            self._fresh.discard(room)

    async def _go_live(self, room: str, viewer: str) -> dict:
        if room[0] == PRIVATE:
            return {"ok": True, "move": await self._home(viewer)}
        self._stop(room)
        return {"ok": True}

    # ---- what the people of a room need (viz/stage/people.py) ----

    def owned(self, room: str, person: str) -> Collection[int]:
        """Live requests of a person."""
        owned = getattr(self.base, "owned", None)
        return () if owned is None or room[0] == PRIVATE else owned(room, person)

    def hide(self, room: str, requests: Collection[int]) -> None:
        hide = getattr(self.base, "hide", None)
        if hide is not None and room[0] != PRIVATE:
            hide(room, requests)

    def touched(self, room: str) -> None:
        """Somebody did something in a room: it is not idle."""
        touched = getattr(self.base, "touched", None)
        if touched is not None and room[0] != PRIVATE:
            touched(room)

    def viewer_joined(self, room: str, viewer: str) -> None:
        if room[0] != PRIVATE:
            self.base.viewer_joined(room, viewer)
        elif room not in self._playing:
            raise Refused("unknown_room", "That place does not exist any more.")
        self._landed.pop(room, None)
        self._viewers.setdefault(room, []).append(viewer)
        if room in self._playing:
            self._playing[room].viewer_joined(room, viewer)

    def viewer_left(self, room: str, viewer: str) -> None:
        watching = self._viewers.get(room, [])
        if viewer in watching:
            watching.remove(viewer)
        if not watching:
            self._leave(room)
        if room[0] != PRIVATE:
            self.base.viewer_left(room, viewer)

    # ---- recordings ----

    async def save_recording(self, room: str, viewer: str) -> tuple[str, bytes]:
        save = getattr(self.base, "save_recording", None)
        if save is None or room[0] == PRIVATE:
            raise Refused("nothing_to_save", "This page shows a recording: there is nothing new to save.")
        return await save(room, viewer)

    async def open_recording(self, room: str, viewer: str, name: str, content: bytes) -> dict:
        trace = await asyncio.to_thread(self.shelf.read, content)
        self._play(room, trace, "")
        return {"ok": True, "steps": len(trace)}

    async def play_shipped(self, room: str, preset: str) -> dict:
        """Play the recording of a preset in a room. Raises Refused when none ships."""
        trace = await asyncio.to_thread(self.shelf.shipped, preset)
        if trace is None:
            raise Refused("no_recording", "There is no recording of this example, and no engine to run it.")
        self._play(room, trace, preset)
        return {"ok": True, "steps": len(trace)}

    def _play(self, room: str, trace: Trace, name: str) -> None:
        if room in self._viewers:  # whoever asked for it may have left meanwhile
            self._put(room, RecordingSource(trace), name)

    def _put(self, room: str, source: RecordingSource, name: str) -> None:
        for watching in self._viewers.get(room, ()):
            source.viewer_joined(room, watching)
        self._playing[room], self._names[room], self._switches[room] = source, name, next(self._numbers)

    def _stop(self, room: str) -> None:
        self._names.pop(room, None)
        if self._playing.pop(room, None) is not None:
            self._switches[room] = next(self._numbers)

    def _leave(self, room: str) -> None:
        """Nobody is there any more."""
        for known in (self._viewers, self._landed, self._playing, self._names, self._switches):
            known.pop(room, None)

    def _of(self, room: str) -> Source:
        return self._playing.get(room, self.base)
