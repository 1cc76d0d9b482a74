"""Rooms and the arena that they share: who leases how many pages, and what a change costs whom.

A room is one audience's share of the engine: its own knobs, queue, leased pages and records. Knobs of a room concern
that room alone; engine-wide ones (engine/config.py, Scope) are spread to all. The arena is fixed (`arena_pages`) or
grows to what the rooms need. A lease that needs a larger tensor takes it before anything else changes, so a refusal
leaves everything as it was; where old and new tensor fit side by side the contents move along, else every room
recomputes what it had cached. A growing arena never shrinks under rooms that stay: the pages of a closed one wait
for the next, and a room that is alone is cut to size when it next changes its pages. Knows nothing of steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from engine.config import EngineConfig, knob_values, with_wide_parts
from engine.errors import EngineError
from engine.pages import Arena, PagePool
from engine.recorder import Recorder
from engine.request import Request
from engine.rows import RowSlots
from engine.scheduler import Scheduler
from engine.sequence import TextStream

MAX_NAME = 80


@dataclass
class Clock:
    """Engine time: the sum of the time that steps took. Rooms share one; a scratch room has its own, so that a job
    is excluded from everybody's clocks."""

    busy_us: int = 0
    began: float | None = None  # perf_counter when the step that is being taken began

    def now(self) -> int:
        """Engine time, within a step too."""
        return self.busy_us if self.began is None else self.busy_us + int((time.perf_counter() - self.began) * 1e6)


@dataclass
class Room:
    """One audience's share of the engine. A scratch room belongs to a job: nobody takes turns with it or sees it."""

    name: str
    config: EngineConfig
    scheduler: Scheduler
    recorder: Recorder
    clock: Clock
    scratch: bool = False
    flying: deque = field(default_factory=deque)  # launched steps that have not settled (engine/core.py)
    last_turn: int = 0
    num_requests: int = 0
    config_index: int = 0
    num_events: int = 0

    @property
    def num_launches(self) -> int:
        """Launches of which a step has not settled."""
        return len({step.launch_id for step in self.flying}) if len(self.flying) > 1 else len(self.flying)

    @property
    def has_work(self) -> bool:
        return bool(self.flying) or self.scheduler.has_work


def unknown_room(name: object) -> EngineError:
    sentence = f"This engine has no room called “{str(name)[:MAX_NAME]}”; it may have been closed. Open it again or choose another."
    return EngineError("unknown_room", sentence, name=str(name)[:MAX_NAME])


class Housing:
    """Opens, changes and closes rooms.

    Invariants: a room's pool has exactly the pages that the arena leases to its name; the runner's tensor has the
    arena's pages and page 0.

    Args:
        config: resolved; what a new room begins with (`defaults`, whose engine-wide parts are kept up to date).
        runner: owns the tensor; configure(config) returns whether cached contents survived.
        settle: waits for a room's steps in flight and records them.
    """

    def __init__(self, config: EngineConfig, runner, new_text: Callable[[Request], TextStream], settle: Callable[[Room], None]) -> None:
        self.defaults = config
        self.runner = runner
        self.rooms: dict[str, Room] = {}
        self.arena = Arena(0)
        self.rows = RowSlots()
        self.clock = Clock()
        self.new_text = new_text
        self._settle = settle

    def get(self, name: str) -> Room:
        """Raises EngineError "unknown_room"."""
        room = self.rooms.get(name)
        if room is None:
            raise unknown_room(name)
        return room

    # ---- opening and closing ----

    def open(self, name: str, config: EngineConfig | None = None, scratch: bool = False) -> Room:
        """A new room with these knobs (None: the defaults). Raises EngineError "bad_room", "room_exists", "no_room"."""
        self._check_new(name, scratch)
        config = self.defaults if config is None else with_wide_parts(config, self.defaults)
        try:
            lost = self._resize({name: config.cache.num_pages}, self.defaults)
        except EngineError as error:
            if error.code != "pool_too_large":
                raise
            sentence = f"There is no space for another room: {error.sentence} Wait until a room closes."
            raise EngineError("no_room", sentence, num_pages=config.cache.num_pages) from error
        self._flush(lost)
        pool = self._lease(name, config)
        clock = Clock() if scratch else self.clock
        room = Room(name, config, Scheduler(config, pool, self.new_text, name, self.rows), Recorder(), clock, scratch)
        room.recorder.config(knob_values(config))
        self.rooms[name] = room
        return room

    def close(self, name: str) -> None:
        """Give an emptied room's pages back."""
        room = self.rooms.pop(name)
        assert not room.scheduler.sequences and not room.flying, "end a room's requests before closing it"
        self.arena.give_back(name)

    def _check_new(self, name: str, scratch: bool) -> None:
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
            raise EngineError("bad_room", f"A room's name must have 1 to {MAX_NAME} printable characters.", limit=MAX_NAME)
        if name in self.rooms:
            raise EngineError("room_exists", f"There is a room called “{name}” already; enter it or choose another name.", name=name)
        limit = self.defaults.max_rooms
        if not scratch and sum(not room.scratch for room in self.rooms.values()) >= limit:
            raise EngineError("no_room", f"All {limit} rooms are taken. Wait until one closes.", limit=limit)

    # ---- knobs ----

    def check(self, name: str, config: EngineConfig) -> None:
        """Refuse what reconfigure() would refuse, but for what only the device's memory can say. Changes nothing.

        Raises EngineError "pool_too_large".
        """
        wide, configs = self._concerned(name, config)
        self._check_fits(self._other_pages(configs), wide)

    def reconfigure(self, name: str, config: EngineConfig) -> None:
        """New knobs for a room; engine-wide ones for all. Who gets other pages or another cache mode is flushed.

        Raises EngineError "pool_too_large"; then nothing has changed.
        """
        wide, configs = self._concerned(name, config)
        for changed in configs:
            self._settle(self.rooms[changed])
        wanted = self._other_pages(configs)
        lost = self._resize(wanted, wide)
        self.defaults = wide
        self._flush(lost - configs.keys())
        for changed, its in configs.items():
            again = changed in wanted or changed in lost
            self._take(self.rooms[changed], its, self._lease(changed, its) if again else None)

    def _concerned(self, name: str, config: EngineConfig) -> tuple[EngineConfig, dict[str, EngineConfig]]:
        """The new defaults, and the new knobs of every room for which something changes."""
        self.get(name)
        wide = with_wide_parts(self.defaults, config)
        if wide == self.defaults:
            return wide, {name: config}
        return wide, {n: with_wide_parts(room.config, config) for n, room in self.rooms.items()} | {name: config}

    def _other_pages(self, configs: Mapping[str, EngineConfig]) -> dict[str, int]:
        """Rooms that need a fresh lease, and of how many pages."""
        return {n: c.cache.num_pages for n, c in configs.items() if _geometry(c) != _geometry(self.rooms[n].config)}

    def _take(self, room: Room, config: EngineConfig, pool: PagePool | None) -> None:
        room.config = config
        room.scheduler.reconfigure(config, pool)
        room.recorder.config(knob_values(config))
        room.config_index += 1

    # ---- the arena ----

    def _resize(self, wanted: Mapping[str, int], wide: EngineConfig) -> set[str]:
        """Make the arena hold new leases of these sizes in place of what those rooms lease now, and cut the tensor.

        Returns the rooms that keep their pages but lost what was in them. Raises EngineError "pool_too_large".
        """
        staying, total = self._check_fits(wanted, wide)
        size = wide.cache.arena_pages or (max(total, self.arena.num_pages) if staying else total)
        resized, survived = size != self.arena.num_pages, True
        if resized or wide != self.defaults:
            for room in self.rooms.values():
                self._settle(room)
            survived = self.runner.configure(replace(wide, cache=replace(wide.cache, num_pages=size)))
        for name in wanted.keys() & self.arena.leases.keys():
            self.arena.give_back(name)
        if staying:
            self.arena.grow(size)
        else:
            self.arena = Arena(size)
        return staying if resized and not survived else set()

    def _check_fits(self, wanted: Mapping[str, int], wide: EngineConfig) -> tuple[set[str], int]:
        """(rooms that keep their leases, pages of all leases). Raises EngineError "pool_too_large" in a fixed arena."""
        staying = {name: len(pages) for name, pages in self.arena.leases.items() if name not in wanted}
        held, needed, fixed = sum(staying.values()), sum(wanted.values()), wide.cache.arena_pages
        if fixed is not None and held + needed > fixed:
            sentence = f"{needed:,} pages were asked for, but this engine has {fixed:,} and other rooms hold {held:,} of them."
            raise EngineError("pool_too_large", sentence, wanted=needed, free=fixed - held)
        return set(staying), held + needed

    def _lease(self, name: str, config: EngineConfig) -> PagePool:
        """A fresh pool on a room's lease, which is taken if it has none."""
        pages = self.arena.leases.get(name) or self.arena.lease(name, config.cache.num_pages)
        return PagePool(pages, config.cache.page_size, name.encode())

    def _flush(self, names: set[str]) -> None:
        """Rooms that changed no knob, but lost what was cached."""
        for name in names:
            room = self.rooms[name]
            room.scheduler.reconfigure(room.config, self._lease(name, room.config))


def _geometry(config: EngineConfig) -> tuple:
    """What cached contents depend on."""
    return (config.cache.page_size, config.cache.num_pages, config.cache.mode)
