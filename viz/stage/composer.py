"""What a message to one viewer holds: the newest frames, caption, chips, scrubber and status, minus what it has.

Frames are rendered on two worker threads and shared by all who look at the same thing in the same version.
Knows nothing of sockets or credits (viz/stage/hub.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from engine.trace import Trace
from viz.stage.chips import Slots, chips
from viz.stage.codec import Json, dumps, encode
from viz.stage.parts import Panel, digest, panel
from viz.stage.source import Source
from viz.stage.timeline import timeline
from viz.stage.viewer import Viewer
from viz.view import Frame, View, ViewState, render
from viz.words.why import why_selected

Caption = Callable[[Trace, int, str], str]
Part = Callable[[Viewer], object]  # plain JSON for one viewer, None for nothing
WORKERS = 2
CACHED_PANELS = 96
TIMELINE_EVERY = 0.4  # seconds; the scrubber reads whole tables
PINNED_EVERY = 2.0  # seconds; a viewer in the past sees the same step however far the engine is, until a job finds something


@dataclass(eq=False)
class Turn:
    """Everybody in a room who wants frames when its turn comes gets those of the same version."""

    granted: asyncio.Future
    users: int = 0


@dataclass(eq=False)
class Room:
    """What the viewers of one room share: the newest version, when it was seen, and what follows from it."""

    name: str
    viewers: set[Viewer] = field(default_factory=set)
    version: object = None
    stamp: float = 0.0  # milliseconds since 1970, when this version was first seen
    status: dict = field(default_factory=dict)
    status_json: Json = field(default_factory=lambda: Json("{}"))
    status_at: float = 0.0
    edits: int = 0  # of what the stage's own parts say
    bins: tuple[str, dict, list[np.ndarray]] = ("", {}, [])
    bins_at: float = 0.0
    bins_version: object = None
    turn: Turn | None = None
    texts: OrderedDict = field(default_factory=OrderedDict)
    watcher: asyncio.Task | None = None

    @property
    def now(self) -> tuple[object, str, int]:
        return self.version, self.status_json, self.edits


class Composer:
    """Reads a Source; writes only into rooms and viewers that it is handed."""

    def __init__(self, source: Source, views: Mapping[str, View], caption: Caption | None, slots: Slots, parts: Mapping[str, Part]) -> None:
        self._source, self._views, self._caption, self._slots, self._parts = source, views, caption, slots, parts
        self._panels: OrderedDict[tuple, asyncio.Task] = OrderedDict()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="glass-render")
        self._free_workers = asyncio.Semaphore(WORKERS)
        self.num_rendered = 0

    async def in_turn(self, viewer: Viewer, room: Room) -> bytes:
        """compose(), once it is the room's turn: what is sent is chosen then, so many busy rooms make frames rarer, not
        older."""
        turn = room.turn
        if turn is None:
            turn = room.turn = Turn(asyncio.ensure_future(self._free_workers.acquire()))
        turn.users += 1
        try:
            await asyncio.shield(turn.granted)
            if room.turn is turn:
                room.turn = None  # who comes later waits for the next one
            return await self.compose(viewer, room)
        finally:
            turn.users -= 1
            if not turn.users:
                room.turn = None if room.turn is turn else room.turn
                turn.granted.add_done_callback(lambda _: self._free_workers.release())

    async def compose(self, viewer: Viewer, room: Room) -> bytes:
        """The newest state of everything that a viewer looks at, without what it already has."""
        version, stamp, fresh = room.version, room.stamp, viewer.dirty
        viewer.dirty, viewer.seen = False, room.now
        # what the viewer has and looks at now: it may go to another room while this one is drawn
        sent, state, following = viewer.sent, looked_at(viewer, room), viewer.state.step is None
        wanted = [(name, state.with_(size=size)) for name, size in viewer.panels]
        trace = self._trace(room.name)
        shown = trace.clamp(state.step)
        header: dict[str, object] = {"t": "frames", "seq": viewer.seq, "stamp": stamp, "now": time.time() * 1000}
        header |= {"step": shown, "first": trace.first_step, "last": trace.last_step, "following": following}
        add_if_new(sent, header, "status", room.status_json)
        for name, part in self._parts.items():
            add_if_new(sent, header, name, dumps(part(viewer)))
        arrays: list[np.ndarray] = []
        try:
            for name, text in (await self._texts(room, version, trace, shown, state)).items():
                add_if_new(sent, header, name, text)
            await self._add_bins(sent, room, trace, header, arrays)
        except Exception as error:
            header["fault"] = f"The bars could not be drawn: {type(error).__name__}: {error}"[:400]
        found = trace.artifacts[-1] if trace.artifacts else None  # by a job: that changes also what is past
        if fresh or following or found is not viewer.found or time.monotonic() >= viewer.pinned_until:
            viewer.pinned_until, viewer.found = time.monotonic() + PINNED_EVERY, found
            header["panels"] = await self._drawn(sent, wanted, (room.name, version), trace, arrays)
        return encode(header, arrays)

    def _trace(self, room: str) -> Trace:
        try:
            return self._source.trace(room)
        except Exception:  # the status says what is wrong; an empty trace keeps the page alive
            return Trace()

    async def _texts(self, room: Room, version: object, trace: Trace, step: int | None, state: ViewState) -> dict[str, Json]:
        paused = room.status.get("state") == "paused" and step == trace.last_step
        key = (version, step, state.language, state.selection, paused)
        if key not in room.texts:
            room.texts[key] = await self._at_work(self.make_texts, trace, step, state, paused)
            while len(room.texts) > 16:
                room.texts.popitem(last=False)
        return room.texts[key]

    def make_texts(self, trace: Trace, step: int | None, state: ViewState, paused: bool = False) -> dict[str, Json]:
        """caption, chips, and why the selected request is where it is."""
        caption = self._caption(trace, step, state.language) if self._caption and step is not None else ""
        why = why_selected(trace, state.selection, step, state.language, paused=paused) if state.selection and step is not None else ()
        return {
            "caption": dumps(str(caption)[:400]),
            "chips": dumps(chips(trace, step, state.selection, self._slots)),
            "why": dumps({"of": state.selection, "lines": list(why)}),
        }

    async def _at_work(self, function: Callable, *args: object) -> object:
        return await asyncio.get_running_loop().run_in_executor(self._workers, function, *args)

    async def _add_bins(self, sent: dict[str, str], room: Room, trace: Trace, header: dict, arrays: list) -> None:
        now = time.monotonic()
        if room.bins_version != room.version and now - room.bins_at >= TIMELINE_EVERY:
            room.bins_at, version = now, room.version
            facts, bins = await self._at_work(timeline, trace)
            room.bins_version = version
            room.bins = (digest(repr(facts).encode(), *(b.tobytes() for b in bins)), facts, bins)
        mark, facts, bins = room.bins
        if mark and sent.get("timeline") != mark:
            sent["timeline"] = mark
            header["timeline"] = {**facts, "base": len(arrays)}
            arrays += bins

    def bins_due(self, viewer: Viewer, room: Room) -> float | None:
        """The scrubber may lag behind the last step of a burst: seconds until it can catch up, None if it has."""
        if room.bins_version == room.version and viewer.sent.get("timeline", "") == room.bins[0]:
            return None
        return max(room.bins_at + TIMELINE_EVERY - time.monotonic(), 0.0)

    async def _drawn(self, sent: dict[str, str], wanted: list[tuple[str, ViewState]], of: tuple, trace: Trace, arrays: list) -> list[dict]:
        """Header entries of the wanted panels; their arrays are appended. `of`: the room and its version."""
        entries = []
        for found in await asyncio.gather(*(self._panel(of, name, trace, state) for name, state in wanted)):
            entry, own, got = found.message(sent, len(arrays))
            arrays += own
            sent |= got
            entries.append(entry)
        return entries

    async def _panel(self, of: tuple, name: str, trace: Trace, state: ViewState) -> Panel:
        """Rendered once for all who ask for the same thing at the same time."""
        key = (*of, name, state)
        task = self._panels.get(key)
        if task is None:
            task = self._panels[key] = asyncio.create_task(self._render(name, trace, state))
            while len(self._panels) > CACHED_PANELS:
                self._panels.popitem(last=False)
        self._panels.move_to_end(key)
        return await asyncio.shield(task)

    async def _render(self, name: str, trace: Trace, state: ViewState) -> Panel:
        self.num_rendered += 1
        return await self._at_work(draw, self._views[name], trace, state)


def looked_at(viewer: Viewer, room: Room) -> ViewState:
    """What a viewer's pictures are drawn for: who follows sees the room's playhead. Without a size."""
    cursor = room.status.get("cursor")
    step = viewer.state.step if viewer.state.step is not None else cursor if isinstance(cursor, int) else None
    return viewer.state.with_(step=step, views=())


def draw(view: View, trace: Trace, state: ViewState) -> Panel:
    """Render and serialise. A frame that breaks its contract draws its own error, like a view that raises."""
    frame = render(view, trace, state)
    try:
        return panel(frame)
    except Exception as error:
        sentence = f"This view gave a frame that cannot be sent: {type(error).__name__}: {error}."
        return panel(Frame(view.name, view.title, (), summary=sentence, error=sentence))


def add_if_new(sent: dict[str, str], header: dict, name: str, text: Json) -> None:
    if sent.get(name) != text:
        sent[name] = text
        header[name] = text
