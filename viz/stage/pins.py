"""Links to a moment: the steps around it are kept in memory as a small recording, under a name that nobody can guess.

A pin must show the picture that its maker saw. Views look back (slots of the last hundred steps, finished requests,
a request's whole life), so a pin keeps as much of the run before its steps as fits, the tokens so far, the pool as it
was, and each request's hue. What is kept are bytes, checked like a stranger's file when they are opened. Pins live as
long as the server, or until the host hides the text of a request that is in them: no name ever reaches a file system.
Rejected: keeping the Trace (it would hold all of a run).
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields

from engine.trace import TABLES, Trace
from viz.select import leased_hues
from viz.stage.hub import Hub, Refused
from viz.stage.viewer import Viewer, changed_state
from viz.view import ViewState

_NAME = re.compile(r"[A-Za-z0-9_-]{22}", re.ASCII)
NOT_KEPT = ("source", "size")


@dataclass(frozen=True, slots=True)
class PinConfig:
    most: int = 64  # pins; the one that was used longest ago goes first
    around: int = 50  # steps before and after that can always be played
    look_back: tuple[int, ...] = (100_000, 2_000, 500)  # more steps before those, as far as they fit
    max_bytes: int = 1 << 20  # of one pin
    per_minute: int = 12  # pins that one person may make
    all_per_minute: int = 120


@dataclass(frozen=True, slots=True)
class Pin:
    """A kept moment. `room` and `requests`: whose texts are in it."""

    packed: bytes
    state: Mapping[str, object]
    digest: bytes
    room: str
    requests: frozenset[int]


class Pins:
    """Args:
    encode, decode: Trace → the bytes of a recording, and back; decode raises an error for what is none.
    clip: (trace, first, last) → that part of a run.
    """

    def __init__(
        self,
        encode: Callable[[Trace], bytes],
        decode: Callable[[bytes], Trace],
        clip: Callable[[Trace, int, int], Trace],
        config: PinConfig = PinConfig(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encode, self._decode, self._clip, self.config, self._clock = encode, decode, clip, config, clock
        self._pins: OrderedDict[str, Pin] = OrderedDict()
        self._made: OrderedDict[str, deque[float]] = OrderedDict()  # person → when
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._pins

    @property
    def num_bytes(self) -> int:
        return sum(len(pin.packed) for pin in tuple(self._pins.values()))

    # ---- keeping ----

    def allow(self, person: str) -> None:
        """Count one more pin of a person. Raises Refused."""
        now = self._clock()
        for key, most in (("", self.config.all_per_minute), (person, self.config.per_minute)):
            made = self._made.setdefault(key, deque())
            while made and made[0] <= now - 60:
                made.popleft()
            if len(made) >= most:
                raise Refused("pins_busy", "Too many links were copied within a minute. Try again shortly.")
        for key in ("", person):
            self._made[key].append(now)
            self._made.move_to_end(key)
        while len(self._made) > 512:
            self._made.popitem(last=False)

    def keep(self, trace: Trace, step: int, state: Mapping[str, object], room: str = "") -> str:
        """The name of a link to a step of a room's trace. Takes a moment: not for an event loop. Raises Refused."""
        for part in self._parts(trace, step):
            packed = zlib.compress(self._encode(part), 3)
            if len(packed) <= self.config.max_bytes:
                digest = hashlib.blake2b(packed + repr((room, state)).encode("utf-8", "replace")).digest()
                requests = frozenset(info.request_id for info in part.sequences.values())
                return self._store(Pin(packed, dict(state), digest, room, requests))
        raise Refused("pin_too_large", "This moment is too large to keep for a link. Save a recording instead.")

    def _parts(self, trace: Trace, step: int) -> Iterator[Trace]:
        """What may be kept, the most first: how much of the time before, and which probed arrays."""
        around, hues = self.config.around, {str(request): hue for request, hue in leased_hues(trace).items()}
        for back in (*self.config.look_back, 0):
            part = self._clip(trace, max(step - around - back, 0), step + around)
            kept = {info.request_id for info in part.sequences.values()}
            meta = {**part.meta, "hues": {k: v for k, v in hues.items() if int(k) in kept}}
            tables = {name: getattr(part, name) for name in TABLES}
            for artifacts in (part.artifacts, tuple(a for a in part.artifacts if getattr(a, "step_id", step) == step), ()):
                yield Trace(tables, part.sequences, part.token_texts, meta, artifacts, part.errors)
                if not part.artifacts:
                    break

    def _store(self, pin: Pin) -> str:
        with self._lock:
            known = next((name for name, other in self._pins.items() if other.digest == pin.digest), None)
            name = known or secrets.token_urlsafe(16)
            self._pins[name] = pin
            self._pins.move_to_end(name)
            while len(self._pins) > self.config.most:
                self._pins.popitem(last=False)
        return name

    def drop(self, room: str, request: int) -> None:
        """Links to moments of a room with this request in them lead nowhere any more."""
        with self._lock:
            for name, pin in tuple(self._pins.items()):
                if pin.room == room and request in pin.requests:
                    del self._pins[name]

    # ---- opening ----

    def __call__(self, name: object) -> tuple[Trace, Mapping[str, object]] | None:
        return self.find(name)

    def find(self, name: object) -> tuple[Trace, Mapping[str, object]] | None:
        """The moment behind a name, and where its maker looked; None for everything that is no pin (any more)."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return None
        with self._lock:
            pin = self._pins.get(name)
            if pin is None:
                return None
            self._pins.move_to_end(name)
        return self._decode(zlib.decompress(pin.packed)), pin.state


def offer_links(hub: Hub, pins: Pins) -> None:
    """The command "pin": {"step", "state"} → {"rec", "step"}, what a link says."""

    async def pin(viewer: Viewer, args: Mapping[str, object]) -> Mapping[str, object]:
        trace = hub.source.trace(viewer.room)
        step = args.get("step")
        shown = trace.clamp(step if type(step) is int and 0 <= step < 2**31 else viewer.state.step)
        if shown is None:
            raise Refused("nothing_recorded", "Nothing has been recorded yet; run a prompt first.")
        known = getattr(hub.source, "link_of", lambda room: "")(viewer.room)
        if known and (known in pins or not _NAME.fullmatch(known)):
            return {"ok": True, "rec": known, "step": shown}
        pins.allow(viewer.person)
        said = args.get("state")
        state = changed_state(viewer.state, said if isinstance(said, Mapping) else {}, hub.views).with_(step=shown)
        return {"ok": True, "rec": await asyncio.to_thread(pins.keep, trace, shown, plain(state), viewer.room), "step": shown}

    def hid(room: str, name: str, args: Mapping[str, object]) -> None:
        if name == "people_hide" and args.get("on") is not False and type(args.get("request_id")) is int:
            pins.drop(room, args["request_id"])

    hub.done.append(hid)
    hub.handlers["pin"] = pin
    hub.offers["link"] = pin


def plain(state: ViewState) -> dict[str, object]:
    """A state as JSON, without what belongs to the viewer's own window."""
    return {f.name: getattr(state, f.name) for f in fields(state) if f.name not in NOT_KEPT}
