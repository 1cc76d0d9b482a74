"""The server side of the stage: who looks at what, and the newest frame for each of them.

A viewer returns a credit after drawing; only then is the newest state composed for it, so a slow browser skips
frames and nothing piles up. One core, `receive` and `next`, serves both transports: a WebSocket, and `poll`
where those are blocked (viz/stage/routes.py).

The hub owns no records and takes no decision about the engine: it asks a Source and passes commands on. What else
the stage can do (people, chapters, pins) registers itself: `doors` may refuse to let somebody in, `gates` a command,
`handlers` answer one, `parts` add something to what each viewer is told.
Rejected: pushing every step (a backlog in a slow tab), a frame a viewer (fifty renderings of one picture).
"""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import isawaitable

from viz import theme
from viz.select import hues
from viz.stage.chips import Slots
from viz.stage.codec import dumps, encode
from viz.stage.composer import Caption, Composer, Part, Room, looked_at
from viz.stage.offers import take_offer
from viz.stage.refusal import GONE, Refused, failure, failure_of
from viz.stage.source import ROOM, Landing, Source
from viz.stage.viewer import MAX_CREDIT, Viewer, changed_state, invite_of, person_of, room_name, wanted_panels
from viz.view import OFFERED_JOBS, View, ViewState

Gate = Callable[[Viewer, str, Mapping[str, object]], None]  # raises an error with a `sentence` to refuse
Door = Callable[[Viewer, str], None]  # may this viewer come into that room? Raises to refuse
Handler = Callable[[Viewer, Mapping[str, object]], Awaitable[Mapping[str, object]]]
Watcher = Callable[[Viewer], None]
Done = Callable[[str, str, Mapping[str, object]], None]  # (room, name, args) of a command


@dataclass(frozen=True, slots=True)
class HubConfig:
    """Limits. Times in seconds."""

    max_fps: float = 30.0
    max_message: int = 65_536  # characters a browser may send at once
    max_upload: int = 256 << 20  # bytes of a recording that somebody opens
    local: bool = False  # only this machine can reach the server: only its own names may be the Host of a page
    max_viewers: int = 256
    max_per_address: int | None = None  # viewers of one client address; None: as many as there are
    proxies: int = 0  # trusted ones in front: so many entries of X-Forwarded-For, from the right, are true
    max_commands: int = 8  # of one viewer, in flight
    silence: float = 15.0  # a browser that says nothing for so long is gone
    ping: float = 4.0
    status_every: float = 0.5
    long_poll: float = 4.0


class Hub:
    """Args:
    source: see viz/stage/source.py.
    views: name → View, in menu order.
    caption: (trace, step_id, language) → one sentence; None for no caption.
    default_views: what a newcomer sees, at most three names.
    slots: who gets which identity colour (viz/stage/chips.py).
    title: the product's name in the header.
    """

    def __init__(
        self,
        source: Source,
        views: Mapping[str, View],
        *,
        caption: Caption | None = None,
        default_views: tuple[str, ...] = (),
        slots: Slots = hues,
        title: str = "Glass Engine",
        config: HubConfig = HubConfig(),
    ) -> None:
        self.source, self.views, self.title, self.config = source, dict(views), title, config
        self.default_views = tuple(v for v in default_views if v in self.views) or tuple(self.views)[:2]
        self.viewers: dict[str, Viewer] = {}
        self.doors: list[Door] = []
        self.gates: list[Gate] = []
        self.handlers: dict[str, Handler] = {}
        self.parts: dict[str, Part] = {}
        self.offers: dict[str, Callable] = {}  # what the page's share menu has beside pictures: name → what makes it
        self.entered: list[Watcher] = []  # told when a viewer has come into a room
        self.left: list[Watcher] = []  # told when one is about to leave it, or has vanished
        self.acted: list[Gate] = []  # told what somebody asks for and no gate refused
        self.done: list[Done] = []  # told what was asked for in a room and has been done
        self.heard_view: list[Watcher] = []  # told when a viewer looks at something else
        self.composer = Composer(source, self.views, caption, slots, self.parts)
        self.handlers["offer"] = self._take_offer
        self._rooms: dict[str, Room] = {}
        self._arriving: set[Viewer] = set()  # counted already, in no room yet
        self._tasks: set[asyncio.Task] = set()
        self._reaper: asyncio.Task | None = None

    # ---- viewers ----

    async def join(self, said: Mapping[str, object], transport: str, address: str = "") -> Viewer:
        """A new viewer after its hello. Raises an error with a `sentence` when it cannot be taken."""
        self._check_space(address)
        viewer = Viewer(transport=transport, person=person_of(said.get("person")), max_fps=self.config.max_fps, address=address)
        viewer.state, viewer.invite = ViewState(views=self.default_views), invite_of(said.get("join"))
        self._arriving.add(viewer)  # before anything is awaited: two at once are two
        try:
            landing = await self._landing(viewer, said)
            await self._enter(viewer, landing.room)
            self.viewers[viewer.id] = viewer
        finally:
            self._arriving.discard(viewer)
        self._said_hello(viewer, said)
        viewer.post(encode(self._welcome(viewer) | landing.facts()))
        return viewer

    def _check_space(self, address: str) -> None:
        here = (*self.viewers.values(), *self._arriving)
        if len(here) >= self.config.max_viewers:
            raise Refused("full", "Too many people are watching. Please try again in a few minutes.")
        most = self.config.max_per_address
        if most is not None and address and sum(v.address == address for v in here) >= most:
            raise Refused("full_address", f"{most} pages are open from your network's address already. Close one of them.", limit=most)

    async def leave(self, viewer: Viewer) -> None:
        """Idempotent. The source hears of it even when the browser vanished."""
        if self.viewers.pop(viewer.id, None) is None:
            return
        viewer.gone = True
        viewer.wake.set()
        await self._exit(viewer, viewer.room)

    async def move(self, viewer: Viewer, room: str, **facts: object) -> None:
        """Take a viewer to another room; `facts` travel with the message. Raises what the source refuses with."""
        before = viewer.room
        if before == room or viewer.gone:
            return
        await self._enter(viewer, room)
        await self._exit(viewer, before)
        viewer.sent = {}  # not cleared: frames of the room before may be on their way and say what they bring
        viewer.state = viewer.state.with_(step=None, selection=None)
        viewer.dirty, viewer.seen = True, None
        viewer.credit = max(viewer.credit, 1)
        viewer.post(encode({"t": "moved", "room": room, **facts}))

    def in_room(self, name: str) -> tuple[Viewer, ...]:
        return tuple(self._rooms[name].viewers) if name in self._rooms else ()

    def touch(self, name: str) -> None:
        """A part (people, chapter) says something new in this room."""
        room = self._rooms.get(name)
        if room is not None:
            room.edits += 1
            for viewer in room.viewers:
                viewer.wake.set()

    async def _landing(self, viewer: Viewer, said: Mapping[str, object]) -> Landing:
        """Where a viewer comes in. A closed door leads to a private place, with the sentence."""
        land = getattr(self.source, "land", None)
        if land is None:
            return Landing(room_name(said.get("room"), ROOM))
        landing = await land(viewer.id, viewer.person, said)
        try:
            self._knock(viewer, landing.room)
        except Refused as no:
            landing = await land(viewer.id, viewer.person, {"alone": True})
            return replace(landing, sentence=no.sentence, problem=failure_of(no))
        return landing

    def _knock(self, viewer: Viewer, room: str) -> None:
        for door in self.doors:
            door(viewer, room)

    async def turn_out(self, viewer: Viewer, sentence: str, **facts: object) -> None:
        """Take a viewer out of its room; it lands again, with a sentence."""
        landing = await self._landing(viewer, {})
        await self.move(viewer, landing.room, sentence=sentence, **facts)

    async def _enter(self, viewer: Viewer, name: str) -> None:
        self._knock(viewer, name)
        await _maybe(self.source.viewer_joined(name, viewer.person))
        viewer.room = name
        room = self._rooms.setdefault(name, Room(name))
        room.viewers.add(viewer)
        if room.watcher is None:
            self._look(room, force=True)
            room.watcher = asyncio.create_task(self._watch(room))
        for told in self.entered:
            told(viewer)

    async def _exit(self, viewer: Viewer, name: str) -> None:
        room = self._rooms[name]
        room.viewers.discard(viewer)
        for told in self.left:
            told(viewer)
        if not room.viewers:
            del self._rooms[name]
            if room.watcher:
                room.watcher.cancel()
        await _maybe(self.source.viewer_left(name, viewer.person))

    def _notified(self, name: str) -> None:
        if name in self._rooms:
            self._look(self._rooms[name])

    def _welcome(self, viewer: Viewer) -> dict[str, object]:
        catalogue = [{"name": v.name, "title": v.title, "question": v.question} for v in self.views.values()]
        return {
            "t": "welcome",
            "viewer": viewer.id,
            "room": viewer.room,
            "title": self.title,
            "views": catalogue,
            "default_views": list(self.default_views),
            "offers": sorted({*self.offers, *({"chapter"} & self.handlers.keys())}),
            "theme": theme.client_theme(),
        }

    # ---- what a browser says ----

    def receive(self, viewer: Viewer, text: str) -> None:
        """One JSON message. Never raises: what cannot be understood is answered with an error."""
        viewer.heard = time.monotonic()
        if len(text) > self.config.max_message:
            return self._complain(viewer, "too_long", f"A message may have at most {self.config.max_message:,} characters.")
        said = parse(text)
        if said is None:
            return self._complain(viewer, "bad_message", "The server could not read a message from this page.")
        self.hear(viewer, said)

    def hear(self, viewer: Viewer, said: Mapping[str, object]) -> None:
        kind = said.get("t")
        if kind == "drawn":
            viewer.credit = min(viewer.credit + 1, MAX_CREDIT)
        elif kind == "hello":
            self._said_hello(viewer, said)
        elif kind == "view":
            self._said_view(viewer, said)
        elif kind == "command":
            self._said_command(viewer, said)
        elif kind != "pong":
            return self._complain(viewer, "bad_message", "The server does not know this kind of message.")
        viewer.wake.set()

    def _said_hello(self, viewer: Viewer, said: Mapping[str, object]) -> None:
        viewer.sent = {}
        credit = said.get("credit")
        viewer.credit = min(max(credit, 1), MAX_CREDIT) if type(credit) is int else 1
        self._said_view(viewer, said)

    def _said_view(self, viewer: Viewer, said: Mapping[str, object]) -> None:
        state = said.get("state")
        if isinstance(said.get("follow"), bool):
            viewer.follow = said["follow"]
        if isinstance(state, Mapping):
            viewer.state = changed_state(viewer.state, state, self.views)
        panels = wanted_panels(said.get("panels"), self.views)
        if panels is not None:
            viewer.panels = panels
        fps = said.get("max_fps")
        if isinstance(fps, (int, float)) and 0 < fps < 1e6:
            viewer.max_fps = min(max(float(fps), 0.2), self.config.max_fps)
        viewer.dirty = True
        for told in self.heard_view:
            told(viewer)

    def _said_command(self, viewer: Viewer, said: Mapping[str, object]) -> None:
        name, args, number = said.get("name"), said.get("args"), said.get("id")
        number = number if type(number) is int and abs(number) < 2**53 else 0
        if not isinstance(name, str) or not isinstance(args, Mapping):
            return self._complain(viewer, "bad_message", "A command needs a name and arguments.")
        if viewer.commands >= self.config.max_commands:
            return self._reply(viewer, number, failure("busy", "Too many commands at once; please wait a moment."))
        viewer.commands += 1
        self._soon(self._command(viewer, number, name[:60], args))

    async def _command(self, viewer: Viewer, number: int, name: str, args: Mapping[str, object]) -> None:
        try:
            if name in OFFERED_JOBS:
                raise Refused("only_offered", "This can only be started from the picture that offers it.")
            result = await self.act(viewer, name, args)
        except Exception as error:
            result = failure_of(error)
        finally:
            viewer.commands -= 1
        self._reply(viewer, number, result)
        self._notified(viewer.room)

    async def act(self, viewer: Viewer, name: str, args: Mapping[str, object]) -> Mapping[str, object]:
        """Do what a viewer asks for. A source may answer {"move": room}: then the viewer goes there first and the
        command is said again; {"later": True}: it is said again when the source is ready. Raises refusals."""
        self.check(viewer, name, args)
        handler = self.handlers.get(name)
        return await self.perform(viewer, name, args, lambda: handler(viewer, args) if handler else self.ask(viewer, name, args))

    async def perform(self, viewer: Viewer, name: str, args: Mapping[str, object], work: Callable[[], Awaitable]) -> Mapping[str, object]:
        """Do what no gate refused; who wants to hear of it is told before, and once it is done."""
        room = viewer.room
        for told in self.acted:
            told(viewer, name, args)
        result = await work()
        if result.get("ok") is not False:
            for told in self.done:
                told(room, name, args)
        return result

    async def _take_offer(self, viewer: Viewer, args: Mapping[str, object]) -> Mapping[str, object]:
        """A picture's button: {"view", "id", "choice"}."""
        name, room = str(args.get("view")), self._rooms[viewer.room]
        state = looked_at(viewer, room).with_(size=dict(viewer.panels).get(name, ViewState().size))
        act = partial(self.act, viewer)
        return await take_offer(self.views.get(name), self.source.trace(room.name), state, args, act)

    def check(self, viewer: Viewer, name: str, args: Mapping[str, object]) -> None:
        """Raises what a gate refuses with."""
        for gate in self.gates:
            gate(viewer, name, args)

    async def ask(self, viewer: Viewer, name: str, args: Mapping[str, object]) -> Mapping[str, object]:
        """What the source answers, wherever that takes the viewer."""
        result = await self.source.command(viewer.room, viewer.person, name, args)
        if isinstance(result.get("move"), str):
            await self.move(viewer, result["move"])
            if result.get("again"):
                return await self.source.command(viewer.room, viewer.person, name, args)
        elif result.get("later"):
            self._soon(self._act_later(viewer, name, args))
        return result

    async def _act_later(self, viewer: Viewer, name: str, args: Mapping[str, object]) -> None:
        await self.source.until_ready()
        if viewer.gone:
            return
        try:
            await self.act(viewer, name, args)
        except Exception as error:
            viewer.post(encode({"t": "error", **failure_of(error)}))

    def _soon(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _reply(self, viewer: Viewer, number: int, result: Mapping[str, object]) -> None:
        try:
            viewer.post(encode({"t": "reply", "id": number, "result": dict(result)}))
        except (TypeError, ValueError):
            viewer.post(encode({"t": "reply", "id": number, "result": failure("bug", "The answer could not be sent.")}))

    def _complain(self, viewer: Viewer, code: str, sentence: str) -> None:
        viewer.post(encode({"t": "error", **failure(code, sentence)}))

    # ---- what is new ----

    async def _watch(self, room: Room) -> None:
        while room.viewers:
            await asyncio.sleep(1 / self.config.max_fps)
            self._look(room)

    def _look(self, room: Room, force: bool = False) -> None:
        """Ask the source whether something changed, and wake whom it concerns."""
        now = time.monotonic()
        try:
            version = self.source.version(room.name)
            if version == room.version and not force and now - room.status_at < self.config.status_every:
                return
            status = self.source.status(room.name)
            text = dumps(status)
        except Exception as error:  # a broken source must not take the page down
            version, status = room.version, {"state": "dead", "error": failure_of(error)}
            text = dumps(status)
        room.status_at = now
        if force or (version, text) != room.now:
            room.version, room.status, room.status_json = version, status, text
            room.stamp = time.time() * 1000
            for viewer in room.viewers:
                viewer.wake.set()
            if status.get("state") == "closed":
                self._soon(self._turn_out(room, status))

    async def _turn_out(self, room: Room, status: Mapping[str, object]) -> None:
        """A room has ended: whoever is still in it lands again, with the sentence."""
        for viewer in tuple(room.viewers):
            await self.turn_out(viewer, str(status.get("sentence", "")), code=status.get("code", "room_closed"))

    def _due(self, viewer: Viewer, room: Room) -> float | None:
        """Seconds until frames may be composed for a viewer; None when there is nothing to say to it."""
        if viewer.credit <= 0:
            return None
        wait = max(viewer.next_at - time.monotonic(), 0.0)
        if viewer.dirty or viewer.seen != room.now:
            return wait
        bins = self.composer.bins_due(viewer, room)
        return None if bins is None else max(bins, wait)

    async def next(self, viewer: Viewer, timeout: float) -> bytes | None:
        """The next message for a viewer: a reply or the newest frames; None when there was nothing to say."""
        deadline = time.monotonic() + timeout
        while not viewer.gone:
            viewer.wake.clear()
            if viewer.outbox:
                return viewer.outbox.popleft()
            room = self._rooms.get(viewer.room)
            if room is None:
                return None
            due = self._due(viewer, room)
            if due == 0.0:
                viewer.next_at = time.monotonic() + 1 / _fps(viewer, room)
                viewer.credit -= 1
                viewer.seq += 1
                return await self.composer.in_turn(viewer, room)
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            try:
                await asyncio.wait_for(viewer.wake.wait(), left if due is None else min(due, left))
            except TimeoutError:
                continue
        return None

    # ---- the second transport ----

    async def poll(self, viewer_id: str | None, message: str, address: str = "") -> bytes:
        """One exchange where WebSockets are blocked. `message` is JSON: {"say": [messages], "seq": newest frame
        received, "wait": seconds}; the first one of a viewer begins with a hello. The answer is any number of
        (u32 length, message). Unknown viewers get an error with the code "gone" and say hello again."""
        said = parse(message) if len(message) <= self.config.max_message else None
        if said is None:
            return _framed(encode({"t": "error", **failure("bad_message", "The server could not read this.")}))
        say = [m for m in said.get("say") or () if isinstance(m, Mapping)] if isinstance(said.get("say"), list) else []
        viewer = self.viewers.get(viewer_id or "")
        if viewer is None:
            if not say or say[0].get("t") != "hello":
                return _framed(encode({"t": "error", **GONE}))
            try:
                viewer = await self.join(say.pop(0), "poll", address)
            except Exception as error:
                return _framed(encode({"t": "error", **failure_of(error)}))
            if self._reaper is None or self._reaper.done():
                self._reaper = asyncio.create_task(self._reap())
        viewer.heard = time.monotonic()
        for entry in say:
            self.hear(viewer, entry)
        if said.get("wait") == 0:  # only says something; answers come with the poll that is waiting
            return b""
        if said.get("seq") != viewer.seq:  # an answer was lost on the way
            viewer.sent = {}
            viewer.credit, viewer.dirty = max(viewer.credit, 1), True
        answers = [await self.next(viewer, self.config.long_poll)]
        while viewer.outbox:
            answers.append(viewer.outbox.popleft())
        return b"".join(_framed(answer) for answer in answers if answer is not None)

    async def _reap(self) -> None:
        """Pollers have no socket that breaks: they are gone when they have been silent."""
        while any(v.transport == "poll" for v in self.viewers.values()):
            await asyncio.sleep(min(self.config.silence / 4, 1.0))
            late = time.monotonic() - self.config.silence
            for viewer in [v for v in self.viewers.values() if v.transport == "poll" and v.heard < late]:
                await self.leave(viewer)


def _fps(viewer: Viewer, room: Room) -> float:
    """A source may ask for fewer frames: an engine that shares its cores with the browser needs them itself."""
    wish = room.status.get("max_fps")
    return min(viewer.max_fps, wish) if isinstance(wish, (int, float)) and wish > 0 else viewer.max_fps


def parse(text: str) -> dict[str, object] | None:
    """A JSON object, or None. Deep nesting and huge numbers are None too."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def _framed(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


async def _maybe(value: object) -> None:
    if isawaitable(value):
        await value
