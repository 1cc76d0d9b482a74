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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from viz.view import THEMES, ViewState

MAX_PANELS = 3
MAX_OUTBOX = 64
MAX_CREDIT = 4
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")


@dataclass(eq=False)
class Viewer:
    """`sent` maps a part to the digest that the browser has. `credit`: frames it may still be sent."""

    room: str
    transport: str
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
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
    dirty: bool = True  # the viewer looks at something else now
    commands: int = 0  # in flight
    gone: bool = False

    def post(self, message: bytes) -> None:
        """Queue a small message; the oldest goes first when a browser does not take them."""
        if len(self.outbox) >= MAX_OUTBOX:
            self.outbox.popleft()
        self.outbox.append(message)
        self.wake.set()


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
    changes: dict[str, object] = {}
    for key, value in said.items():
        if key == "step":
            changes[key] = _int(value)
        elif key in ("layer", "head", "beat") and _int(value) is not None:
            changes[key] = _int(value)
        elif key == "selection" and (value is None or isinstance(value, str)):
            changes[key] = value[:200] if value else None
        elif key in ("source", "chapter") and isinstance(value, str):
            changes[key] = value[:200]
        elif key == "theme" and isinstance(value, str) and value in THEMES:
            changes[key] = value
        elif key == "language" and isinstance(value, str) and re.fullmatch(r"[a-z]{2}(-[A-Za-z]{2,4})?", value):
            changes[key] = value
        elif key == "views" and isinstance(value, list):
            changes[key] = tuple(dict.fromkeys(v for v in value if isinstance(v, str) and v in views))[:MAX_PANELS]
        elif key == "ranges" and isinstance(value, list):
            numbers = [_number(v) for v in value[:8]]
            if None not in numbers:
                changes[key] = tuple(numbers)
    return state.with_(**changes) if changes else state


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
