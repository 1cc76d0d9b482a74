"""One browser connection as the hub sees it: its state, its credit, what it already has. Validates what it says.

Everything that arrives from a browser passes `changed_state` and `wanted_panels`: unknown keys, wrong types
and huge numbers are ignored, so nothing a stranger sends can raise later.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from viz.view import AXES, THEMES, ViewState

MAX_PANELS = 3
MAX_OUTBOX = 64
MAX_CREDIT = 4
_PERSON = re.compile(r"[A-Za-z0-9_-]{20,60}")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")


@dataclass(eq=False)
class Viewer:
    """`sent` maps a part to the digest that the browser has. `credit`: frames it may still be sent."""

    transport: str
    room: str = ""
    address: str = ""  # of the client, as far as it is known
    invite: str = ""  # the token of the link that it came by
    follow: bool = True  # looks where its host looks (viz/stage/people.py)
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))  # of this connection
    person: str = field(default_factory=lambda: secrets.token_urlsafe(18))  # of this tab, also after a reload; a secret
    state: ViewState = field(default_factory=ViewState)
    panels: tuple[tuple[str, tuple[int, int]], ...] = ()
    credit: int = 0
    seq: int = 0
    sent: dict[str, str] = field(default_factory=dict)
    outbox: deque[bytes] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    heard: float = field(default_factory=time.monotonic)
    max_fps: float = 30.0
    next_at: float = 0.0
    seen: object = None  # the room's `now` when the last frames were composed
    pinned_until: float = 0.0
    found: object = None  # the newest artifact of the room's trace, when its panels were composed last
    dirty: bool = True  # the viewer looks at something else now
    commands: int = 0  # in flight
    gone: bool = False

    def post(self, message: bytes) -> None:
        """Queue a small message; the oldest goes first when a browser does not take them."""
        if len(self.outbox) >= MAX_OUTBOX:
            self.outbox.popleft()
        self.outbox.append(message)
        self.wake.set()


def person_of(value: object) -> str:
    """What a tab calls itself, if that is long enough not to be guessed; otherwise a new name."""
    return value if isinstance(value, str) and _PERSON.fullmatch(value) else secrets.token_urlsafe(18)


def invite_of(value: object) -> str:
    """The token of a link, or nothing."""
    return value if isinstance(value, str) and _PERSON.fullmatch(value) else ""


def room_name(value: object, otherwise: str) -> str:
    return value if isinstance(value, str) and _NAME.fullmatch(value) else otherwise


def _number(value: object) -> float | None:
    """A finite number, or None. An integer of a thousand digits is not one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e15 < value < 1e15:
        return None
    return float(value)


def _int(value: object, high: int = 2**31 - 1) -> int | None:
    number = _number(value)
    return None if number is None else min(max(int(number), 0), high)


def changed_state(state: ViewState, said: Mapping[str, object], views: Collection[str]) -> ViewState:
    """`state` with what a browser said about it; whatever is not valid keeps its old value."""
    changes = {key: _CHECKS[key](value) for key, value in said.items() if key in _CHECKS}
    if isinstance(said.get("views"), list):
        known = (v for v in said["views"] if isinstance(v, str) and v in views)
        changes["views"] = tuple(dict.fromkeys(known))[:MAX_PANELS]
    return state.with_(**{key: value for key, value in changes.items() if value is not _KEEP})


def _whole(value: object) -> object:
    number = _int(value)
    return _KEEP if number is None else number


def _ranges(value: object) -> object:
    numbers = [_number(v) for v in value[:8]] if isinstance(value, list) else [None]
    return _KEEP if None in numbers else tuple(numbers)


def _text(pattern: str) -> Callable[[object], object]:
    return lambda value: value if isinstance(value, str) and re.fullmatch(pattern, value, re.DOTALL) else _KEEP


_KEEP = object()
_CHECKS: dict[str, Callable[[object], object]] = {
    "step": _int,
    "layer": _whole,
    "head": _whole,
    "beat": _whole,
    "ranges": _ranges,
    "selection": lambda value: None if value in (None, "") else _text(".{1,200}")(value),
    "source": _text(".{0,200}"),
    "chapter": _text(".{0,200}"),
    "theme": _text("|".join(THEMES)),
    "axis": _text("|".join(AXES)),
    "language": _text("[a-z]{2}(-[A-Za-z]{2,4})?"),
}


def wanted_panels(said: object, views: Collection[str]) -> tuple[tuple[str, tuple[int, int]], ...] | None:
    """[{view, w, h}] → ((view, (w, h)), …); sizes in steps of 20 px, so that similar screens share a frame."""
    if not isinstance(said, list):
        return None
    found: dict[str, tuple[int, int]] = {}
    for entry in said[:MAX_PANELS]:
        name = entry.get("view") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or name not in views:
            continue
        width, height = (_int(entry.get(k), 4000) or d for k, d in (("w", 960), ("h", 540)))
        found[name] = (max(width // 20 * 20, 200), max(height // 20 * 20, 120))
    return tuple(found.items())
