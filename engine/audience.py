"""A Session as the page's Source (viz/stage/source.py): status as plain JSON, commands as names and plain dicts.

Everything a browser says is checked here once more: types, lengths, ranges. When a viewer has left, the requests
that it made end after a short grace; when the room is empty, all of them do. A viewer is a tab, which keeps its name
over a reload or a lost connection: coming back within the grace keeps its requests, closing the tab does not.

On a laptop there is the room main. For strangers (Hosting) rooms are opened on demand and end when they are idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.artifacts import Timeline
from engine.compare import check_pair, last_requests, with_rest
from engine.config import KNOBS, Cost, EngineConfig, Scope, knob_values, with_knob
from engine.errors import EngineError
from engine.recording import encode
from engine.request import SamplingParams
from engine.session import Handle, Session, Status
from engine.tiles import past_step
from engine.tokenizer import check_text
from engine.trace import COMPARABLE, TABLES, Trace
from engine.veil import veiled
from engine.workloads import LADDER, WORKLOADS, Workload

GRACE_S = 3.0
SHARED_FPS = 3  # frames a second while a CPU engine runs freely: each costs about 45 ms of both cores where the browser runs here too
MAX_LIVE = 32  # prompts of one room at a time
MAX_STOPS, MAX_STOP = 4, 100  # stop strings of a prompt, characters of one
MAIN = "main"
ENDED = "This room was idle and has ended. Type a sentence to start a new one."
KERNEL_KNOBS = ("cuda_graphs", "fused")
NEEDS_KERNELS = "needs the Triton kernels and a GPU"  # why a knob is greyed
SHARED = "the same for all rooms of this public page"
ROOM_BYTES = 24 * 2**20  # of records, in a room among many
PAGES_BYTES = 72 * 2**20  # 96 blocks of the default model in float32
MAX_ENDED = 500  # closed rooms that are remembered


@dataclass(frozen=True, slots=True)
class Hosting:
    """How rooms of strangers live; without it there is the one room, which stays.

    Args:
        idle_s: a room ends when nobody is there, or nobody does anything, for so long.
        busy_s: the same while requests run and somebody looks on; never shorter than idle_s.
    """

    idle_s: float = 120.0
    busy_s: float = 600.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "busy_s", max(self.busy_s, self.idle_s))


def for_many(config: EngineConfig, rooms: int) -> EngineConfig:
    """One arena for so many rooms beside the engine's own and a job's scratch room, and records that fit in memory
    together."""
    each = config.cache.num_pages or 96
    cache = replace(config.cache, num_pages=each, arena_pages=each * (rooms + 2))
    return replace(config, cache=cache, max_rooms=rooms + 1, trace_bytes=min(config.trace_bytes, ROOM_BYTES))


def rooms_that_fit(most: int = 20) -> int:
    """As many rooms as half of the free memory carries, when each takes its pages of the default model and its records."""
    try:
        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        free = int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return most
    return max(min(most, free // 2 // (2 * ROOM_BYTES + PAGES_BYTES)), 2)


@dataclass(eq=False)
class _Room:
    """Who watches a room, what they asked for, and what the host hid."""

    acted: float = field(default_factory=time.monotonic)
    viewers: Counter[str] = field(default_factory=Counter)  # person → connections
    leavers: dict[str, threading.Timer] = field(default_factory=dict)
    owned: dict[str, list[Handle]] = field(default_factory=dict)  # person → requests that it made and that may be alive
    hidden: frozenset[int] = frozenset()
    veil: tuple[object, frozenset[int], Trace] = (None, frozenset(), Trace())  # a snapshot, what was hidden, the same without it
    edits: int = 0
    script: tuple[str, int] | None = None  # the example that was started last, and the newest sequence before it


class LiveSource:
    """Args:
    session: started or not yet ready.
    grace: seconds between a viewer's leaving and the end of its requests.
    hosting: many rooms, which close when they are idle; None: the room main.
    beside: gives recorded timelines of a GPU, which a page without one shows beside its own.
    """

    def __init__(
        self,
        session: Session,
        grace: float = GRACE_S,
        hosting: Hosting | None = None,
        beside: Callable[[], tuple[Timeline, ...]] | None = None,
    ) -> None:
        self.session, self.hosting = session, hosting
        self._beside = beside
        self._joined: dict[str, tuple[Trace, Trace]] = {}  # room → a snapshot, the same with the recorded timelines
        self._grace = grace
        self._rooms: dict[str, _Room] = {} if hosting else {MAIN: _Room()}
        self._ended: OrderedDict[str, str] = OrderedDict()  # room → why
        self._left_over: set[str] = set()  # rooms that nobody has here, but the engine perhaps
        self._lock = threading.RLock()
        self._rate = _Rate()
        if hosting is not None:
            threading.Thread(target=self._reap_for_ever, args=(hosting,), daemon=True, name="rooms").start()

    # ---- what the page reads ----

    def trace(self, room: str) -> Trace:
        """Without what the host hid; without a GPU with recorded timelines of one."""
        return self._with_beside(room, self._own(room))

    def _own(self, room: str) -> Trace:
        trace, home = self.session.trace(room), self._rooms.get(room)
        hidden = home.hidden if home is not None else frozenset()
        if not hidden:
            return trace
        of, without, found = home.veil
        if of is not trace or without != hidden:
            found = veiled(trace, hidden)
            home.veil = (trace, hidden, found)  # hide() may have come meanwhile: then it is of no use to anybody
        return found

    def _with_beside(self, room: str, trace: Trace) -> Trace:
        """Recorded timelines beside what a run on a CPU brings. What is saved has none of them."""
        if self._beside is None or not len(trace) or " CPU" not in str(trace.meta.get("device", "")):
            return trace
        of, joined = self._joined.get(room, (None, trace))
        if of is not trace:
            tables = {name: getattr(trace, name) for name in TABLES}
            artifacts = (*self._beside(), *trace.artifacts)
            joined = Trace(tables, trace.sequences, trace.token_texts, trace.meta, artifacts, trace.errors)
            self._joined = {r: pair for r, pair in self._joined.items() if r in self._rooms} | {room: (trace, joined)}
        return joined

    def version(self, room: str) -> tuple[int, int]:
        home = self._rooms.get(room)
        return self.session.version_of(room), home.edits if home else -1

    def status(self, room: str) -> dict[str, object]:
        session, status = self.session, self.session.status(room)
        if room in self._ended or status.state == "closed":
            return {"state": "closed", "live": True, "code": "room_closed", "sentence": self._ended.get(room, ENDED)}
        meta = session.meta
        model = dict(meta.get("model") or {"name": session.config.source.model or "SmolLM2-135M-Instruct"})
        rates = self._rate.of(session.trace(room)) if status.state == "running" else {}
        said: dict[str, object] = {
            "state": status.state if status.state != "new" else "loading",
            "pace": status.pace,
            "live": True,
            "model": model,
            "device": str(meta.get("device", "")),
            "badge": self._badge(meta),
            "queued": list(status.waiting),
            "running": list(status.running),
            "burst": session.burst,
            "progress": None if status.progress is None else {"text": status.progress.text, "fraction": status.progress.fraction},
            "error": {"code": "engine", "sentence": status.sentence} if status.sentence else None,
            "knobs": self._knobs(room) if session.is_ready else {},
            "presets": [{"name": name, "title": w.title, "point": w.point} for name, w in WORKLOADS.items()],
            "recording": {"save": bool(len(session.trace(room))), "open": True},
            "compare": session.is_ready and bool(session.trace(room).sequences),
            "max_fps": SHARED_FPS if self._needs_the_cores(status) else None,
            "hint": "Type a sentence: it becomes the next request.",
            **rates,
        }
        return said

    def _needs_the_cores(self, status: Status) -> bool:
        """In free run an engine on a CPU takes every core that drawing leaves it."""
        return status.state == "running" and status.pace is None and self.session.config.source.device == "cpu"

    def _badge(self, meta: Mapping[str, object]) -> str:
        model = meta.get("model")
        if not isinstance(model, Mapping):
            return ""
        weights = f"weights from {model['weights']}, {model['precision']}"
        if "backend" not in meta:
            return f"{weights}; a GPU is lent for each burst"
        lacking = "; Triton lacks a C compiler" if meta.get("no_compiler") else ""
        return f"{weights}, running in {meta['dtype']} on {meta['backend']} kernels{lacking}"

    def _knobs(self, room: str) -> dict[str, dict[str, object]]:
        values = knob_values(self._config(room))
        found = {}
        for name, knob in KNOBS.items():
            entry: dict[str, object] = {"value": values[name], "label": name, "cost": knob.cost.value}
            if knob.choices:
                entry["choices"] = list(knob.choices)
            elif knob.kind is bool:
                entry["choices"] = [True, False]
            else:
                entry |= {"min": knob.low, "max": min(knob.high, self._most(name))}
            pairs = [(a, b) if a == values[name] else (b, a) for a, b in COMPARABLE.get(name, ()) if values[name] in (a, b)]
            if pairs:
                entry["compare"] = [list(pair) for pair in pairs]  # with the value that it has first
            if knob.cost is Cost.FLUSH:
                entry["note"] = "running requests recompute their cache"
            why = self._why_fixed(name)
            if why:
                entry["why"] = why
            found[name] = entry
        return found

    def _config(self, room: str) -> EngineConfig:
        return self.session.config_of(room) if room in self.session.rooms else self.session.config

    def _why_fixed(self, knob: str) -> str:
        """Why a knob cannot be turned here; "" if it can."""
        if self._lacks_kernels(knob):
            return NEEDS_KERNELS
        return SHARED if self.hosting is not None and KNOBS[knob].scope is Scope.ENGINE else ""

    def _lacks_kernels(self, knob: str) -> bool:
        """Whether it concerns Triton kernels only, and the torch references run. Nobody knows where a GPU is lent later."""
        return knob in KERNEL_KNOBS and self.session.meta.get("backend") == "torch"

    def _most(self, knob: str) -> int:
        """A room among many may not take the others' blocks."""
        lease = self.session.config.cache.num_pages if self.hosting and knob == "num_pages" else None
        return 2**31 if lease is None else lease

    # ---- what the page asks for ----

    async def command(self, room: str, viewer: str, name: str, args: Mapping[str, object]) -> dict[str, object]:
        """Answers on a worker thread: tokenising and waiting for the engine must not hold the event loop. `viewer` "" is
        the page itself, which keeps no room from being idle."""
        act = getattr(self, f"do_{name}", None)
        if act is None:
            raise EngineError("unknown_command", "The page asked for something that the engine does not know.", name=name[:60])
        if not self.is_open(room) and self.session.is_ready:
            raise EngineError("unknown_room", ENDED)
        if viewer:
            self.touched(room)
        if name == "prompt":
            return {"ok": True, **await asyncio.to_thread(self.do_prompt, room, args, viewer)}
        return {"ok": True, **(await asyncio.to_thread(act, room, args) or {})}

    def do_prompt(self, room: str, args: Mapping[str, object], viewer: str = "") -> dict[str, object]:
        text, sampling = _asked(args)
        status = self.session.status(room)
        if len(status.running) + len(status.waiting) >= MAX_LIVE:
            raise EngineError("too_many", f"{MAX_LIVE} requests are alive already; wait until one has finished.", limit=MAX_LIVE)
        burst = self.session.burst
        handle = self.session.add(text, sampling, room=room, chat=args.get("chat", True) is True)
        self._made(room, viewer, handle)
        made = {"name": handle.name, "request_id": handle.request_id, "queued": status.state == "paused"}
        return {**made, **_said_of(burst, handle.name)}

    def check_prompt(self, args: Mapping[str, object]) -> None:
        """Refuses a prompt that no room would take, before one is opened for it. Raises EngineError."""
        text, sampling = _asked(args)
        if self.session.is_ready:
            self.session.prompt(text, sampling)

    def _made(self, room: str, viewer: str, handle: Handle) -> None:
        with self._lock:
            home = self._rooms.get(room)
            if home is None or not viewer:
                return
            home.owned[viewer] = [*(h for h in home.owned.get(viewer, ()) if self._is_alive(room, h)), handle]
            if not home.viewers[viewer]:  # it left meanwhile
                self._start_grace(room, viewer)

    def _is_alive(self, room: str, handle: Handle) -> bool:
        try:
            self.session.wait(handle.seq_ids, 0.0, room=room)
        except EngineError as error:
            return error.code == "timeout"
        return False

    def do_preset(self, room: str, args: Mapping[str, object]) -> dict[str, object]:
        workload = WORKLOADS.get(str(args.get("name")))
        if workload is None:
            raise EngineError("unknown_preset", "There is no preset of that name.")
        if isinstance(args.get("knobs"), Mapping):  # {"knobs": {name: value}}: turned for this run
            for knob, value in args["knobs"].items():
                self._check_knob(room, knob, value)
            workload = replace(workload, knobs={**workload.knobs, **args["knobs"]})
        home, before = self._rooms.get(room), max(self.session.trace(room).sequences, default=0)
        self.session.run_workload(self._within_limits(workload), room=room, with_knobs=args.get("with_knobs") is not False)
        if home is not None:
            home.script = (str(args["name"]), before)
        return {"point": workload.point, **_said_of(self.session.burst)}

    def _within_limits(self, workload: Workload) -> Workload:
        """An example with no more than a room among many may have."""
        knobs = {name: min(value, self._most(name)) if _is_int(value) else value for name, value in workload.knobs.items()}
        return replace(workload, knobs={name: value for name, value in knobs.items() if not self._why_fixed(name)})

    def do_compare(self, room: str, args: Mapping[str, object]) -> None:
        """The room's last requests again in two modes: {"knob", "values"}; a Comparison comes in its trace. Where nothing
        has run yet, the example named as "preset" is started first."""
        knob, values = args.get("knob"), args.get("values")
        check_pair(knob, values)
        prompts, names = self._last_requests(room)
        if not prompts and "preset" in args:
            self.do_preset(room, {"name": args["preset"]})
            prompts, names = self._last_requests(room)
        if not prompts:
            raise EngineError("nothing_to_compare", "There is nothing to run again yet. Send a prompt or start an example first.")
        self.session.ask("job", room=room, name="compare", args={"knob": knob, "values": tuple(values), "prompts": prompts, "names": names})

    def _last_requests(self, room: str) -> tuple:
        """(prompts, names): the example that runs or ran, also the lines of it that are still to come; else what was
        asked for since the room was last idle."""
        trace, home = self.session.trace(room), self._rooms.get(room)
        if home is not None and home.script is not None:
            name, before = home.script
            known, lines = last_requests(trace, before), self.session.script(WORKLOADS[name])
            if {p.prompt for p in known[0]} <= {line.prompt for line in lines} and len(known[0]) <= len(lines):
                return with_rest(known, lines, len({info.request_id for info in trace.sequences.values()}))
        return last_requests(trace)

    def do_abort(self, room: str, args: Mapping[str, object]) -> dict[str, object]:
        request_id = args.get("request_id")
        if request_id is not None and not _is_int(request_id):
            raise EngineError("bad_request", "The request to end is not known.")
        return {"ended": self.session.ask("abort", room=room, request_id=request_id)}

    def do_play(self, room: str, args: Mapping[str, object]) -> None:
        self.session.ask("play", room=room)

    def do_pause(self, room: str, args: Mapping[str, object]) -> None:
        self.session.ask("pause", room=room)

    def do_step(self, room: str, args: Mapping[str, object]) -> None:
        n = args.get("n", 1)
        self.session.ask("step", room=room, n=min(max(n, 1), 1000) if _is_int(n) else 1)

    def do_pace(self, room: str, args: Mapping[str, object]) -> None:
        value = args.get("value")
        if value is not None and not (isinstance(value, (int, float)) and not isinstance(value, bool) and 0.05 <= value <= 1000):
            raise EngineError("bad_pace", "The pace must be from 0.05 to 1,000 steps a second, or free.")
        self.session.ask("pace", room=room, steps_per_s=None if value is None else float(value))

    def do_knob(self, room: str, args: Mapping[str, object]) -> dict[str, object]:
        """With {"dry_run": true} nothing changes: the answer names the requests that would recompute their cache."""
        name, value = str(args.get("name")), args.get("value")
        changed = self._check_knob(room, name, value)
        if args.get("dry_run") is True:
            flushes = KNOBS[name].cost is Cost.FLUSH and changed != self._config(room)
            return {"recompute": list(self.session.status(room).running) if flushes else []}
        return {"knobs": self.session.ask("knobs", room=room, knobs={name: value})}

    def _check_knob(self, room: str, name: str, value: object) -> EngineConfig:
        """The room's config with a knob turned. Raises EngineError for what cannot be."""
        changed = with_knob(self._config(room), name, value)
        if self._lacks_kernels(name):
            raise EngineError("knob_needs_kernels", f"{name} needs the Triton kernels, and here their torch references run.", name=name)
        if self._why_fixed(name):
            raise EngineError("knob_fixed", f"{name} is the same for all rooms of this public page. It cannot be changed here.", name=name)
        if _is_int(value) and value > self._most(name):
            most = self._most(name)
            raise EngineError(
                "bad_config", f"{name} must be at most {most}, got {value}.", name=name, rule=f"at most {most}", value=str(value)
            )
        return changed

    def do_restart(self, room: str, args: Mapping[str, object]) -> None:
        self.session.restart()

    def do_probe(self, room: str, args: Mapping[str, object]) -> None:
        layer = args.get("layer", 0)
        self.session.ask("job", room=room, name="probe", args={"layers": (layer if _is_int(layer) else 0,)})

    def do_tiles(self, room: str, args: Mapping[str, object]) -> None:
        """An attention kernel tile by tile: {"step", "seq_id", "layer", "head", "position", "kernel", "block_m", "block_n",
        "splits"}, all optional. Without a step the next one is traced, else that one is computed again."""
        step = args.get("step")
        if step is not None and not _is_int(step):
            raise EngineError("unknown_step", "The step to trace is not known.")
        chosen = _some(args, "seq_id", "position", "kernel", "block_m", "block_n", "layer", "head")
        if args.get("splits") is not None:
            chosen["num_splits"] = args["splits"]
        past = None if step is None else past_step(self.session.trace(room), step)
        self.session.ask("job", room=room, name="tiles", args={**chosen, "past": past})

    def do_kernel(self, room: str, args: Mapping[str, object]) -> None:
        """A kernel on chosen shapes: {"name", "case" or "dims", "dtype"}."""
        self.session.ask("job", room=room, name="kernel", args={"name": args.get("name"), **_some(args, "case", "dims", "dtype")})

    def do_ceilings(self, room: str, args: Mapping[str, object]) -> None:
        self.session.ask("job", room=room, name="ceilings", args={})

    def do_profile(self, room: str, args: Mapping[str, object]) -> None:
        """The next step with a clock around every operation."""
        self.session.ask("job", room=room, name="profile", args={})

    def do_timeline(self, room: str, args: Mapping[str, object]) -> None:
        """A burst of the requests of a step under a profiler: {"step", "modes"}; without a step those of the newest."""
        trace = self.session.trace(room)
        step = args.get("step", trace.last_step)
        if not _is_int(step):
            raise EngineError("unknown_step", "The step to trace is not known.")
        modes = {"modes": tuple(args["modes"])} if isinstance(args.get("modes"), (list, tuple)) else {}
        self.session.ask("job", room=room, name="timeline", args={"past": past_step(trace, step), **modes})

    def do_ladder(self, room: str, args: Mapping[str, object]) -> None:
        """A fixed workload on one rung after another, from transformers' generate to everything switched on."""
        self.session.ask("job", room=room, name="ladder", args={"prompts": self.session.script(LADDER)})

    # ---- recordings ----

    async def save_recording(self, room: str, viewer: str) -> tuple[str, bytes]:
        """(file name, content)."""
        trace = self._own(room)
        if not len(trace):
            raise EngineError("nothing_recorded", "Nothing has been recorded yet; run a prompt first.")
        return f"glass-engine-{time.strftime('%Y%m%d-%H%M%S')}.glass", await asyncio.to_thread(encode, trace)

    # ---- rooms ----

    def is_open(self, room: str) -> bool:
        """An engine that died and came back may have had no space for all of them."""
        return room in self._rooms and (not self.session.is_ready or room in self.session.rooms)

    def open_room(self, room: str) -> None:
        """Raises EngineError "no_room"."""
        try:
            self.session.open_room(room)
        except EngineError as error:
            if error.code in ("no_answer", "engine_dead"):
                self._left_over.add(room)  # it may have been opened all the same
            if error.code != "no_room":
                raise
            raise EngineError("no_room", "All rooms are taken just now. The recording goes on; try again in a minute or two.") from error
        with self._lock:
            self._rooms[room] = _Room()
            self._left_over.discard(room)

    def close_room(self, room: str, why: str = "") -> None:
        """Its requests end and its pages go back; whoever is in it is told why."""
        with self._lock:
            home = self._rooms.pop(room, None)
            if home is None:
                return
            self._ended[room] = why or ENDED
            while len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)
            for timer in home.leavers.values():
                timer.cancel()
            self._left_over.add(room)
        self._give_back(room)

    def _give_back(self, room: str) -> None:
        """Close a room in the engine. One that is loading again opens it first: then the next reap() does it."""
        try:
            self.session.close_room(room)
        except EngineError as error:
            if error.code != "unknown_room":
                return
        self._left_over.discard(room)

    def touched(self, room: str) -> None:
        """Somebody did something there."""
        home = self._rooms.get(room)
        if home is not None:
            home.acted = time.monotonic()

    def reap(self, hosting: Hosting) -> None:
        """Close the rooms that have been idle for too long."""
        now = time.monotonic()
        for name in tuple(self._left_over) if self.session.is_ready else ():
            self._give_back(name)
        for name, home in tuple(self._rooms.items()):
            if not self.is_open(name):
                self.close_room(name)
                continue
            idle, busy = now - home.acted, self.session.status(name).state == "running"
            if idle >= (hosting.busy_s if busy and home.viewers else hosting.idle_s):
                self.close_room(name)

    def _reap_for_ever(self, hosting: Hosting) -> None:
        while True:
            time.sleep(min(hosting.idle_s / 4, 5.0))
            with contextlib.suppress(EngineError):
                self.reap(hosting)

    # ---- what a room's host needs ----

    def owned(self, room: str, viewer: str) -> list[int]:
        """Live requests of a person."""
        home = self._rooms.get(room)
        return [h.request_id for h in (home.owned.get(viewer, ()) if home else ()) if self._is_alive(room, h)]

    def hide(self, room: str, requests: Collection[int]) -> None:
        """Nobody reads these requests' texts any more: not in a view, nor in a recording."""
        home = self._rooms.get(room)
        if home is not None:
            home.hidden = frozenset(requests)
            home.edits += 1

    # ---- who is watching ----

    def viewer_joined(self, room: str, viewer: str) -> None:
        """Raises EngineError "unknown_room"."""
        with self._lock:
            home = self._rooms.get(room)
            if home is None:
                raise EngineError("unknown_room", "This engine has no room of that name. Open the page without ?room= in its address.")
            home.viewers[viewer] += 1
            home.acted = time.monotonic()
            timer = home.leavers.pop(viewer, None)
            if timer is not None:
                timer.cancel()

    def viewer_left(self, room: str, viewer: str) -> None:
        with self._lock:
            home = self._rooms.get(room)
            if home is None:  # it has been closed
                return
            home.acted = time.monotonic()
            home.viewers[viewer] -= 1
            home.viewers += Counter()  # drops who has no connection left
            if home.viewers[viewer] or (home.viewers and viewer not in home.owned):
                return
            self._start_grace(room, viewer)

    def _start_grace(self, room: str, viewer: str) -> None:
        leavers = self._rooms[room].leavers
        timer = threading.Timer(self._grace, self._abandon, (room, viewer))
        timer.daemon = True
        if viewer in leavers:
            leavers[viewer].cancel()
        leavers[viewer] = timer
        timer.start()

    def _abandon(self, room: str, viewer: str) -> None:
        with self._lock:
            home = self._rooms.get(room)
            if home is None or home.leavers.pop(viewer, None) is None:
                return  # it came back
            ending: list[int | None] = [*self.owned(room, viewer)] if home.viewers else [None]
            home.owned.pop(viewer, None)
        for request_id in ending:
            with contextlib.suppress(EngineError):  # an engine that is not there runs nothing
                self.session.ask("abort", room=room, request_id=request_id)


def _said_of(burst: str | None, name: str = "") -> dict[str, object]:
    """Where the engine runs in bursts: the page is told to ask for one, and when it will be."""
    if burst is None:
        return {}
    if burst != "running" or not name:
        return {"burst": True}
    sentence = f"Queued as {name} for the next burst: the GPU is lent to one at a time."
    return {"burst": True, "code": "queued_burst", "sentence": sentence, "fields": {"name": name}}


def _asked(args: Mapping[str, object]) -> tuple[str, SamplingParams]:
    """The prompt that a browser sent. Raises EngineError."""
    text = args.get("text")
    if not isinstance(text, str):
        raise EngineError("bad_text", "The prompt must be text.")
    if not text.strip():
        raise EngineError("prompt_empty", "The prompt is empty; type at least one character.")
    return text, sampling_of(args)


def sampling_of(args: Mapping[str, object]) -> SamplingParams:
    """SamplingParams from what a browser sent; SamplingParams checks the ranges."""

    def take(name: str, kinds: tuple, otherwise):
        value = args.get(name)
        if value is None:
            return otherwise
        if isinstance(value, bool) or not isinstance(value, kinds) or (isinstance(value, int) and abs(value) >= 2**63):
            rule = "a whole number below 2^63" if kinds == (int,) else "a number below 2^63"
            raise EngineError("bad_sampling", f"{name} must be {rule}.", name=name, rule=rule)
        return value

    return SamplingParams(
        max_tokens=take("max_tokens", (int,), 48),
        temperature=float(take("temperature", (int, float), 0.0)),
        top_k=take("top_k", (int,), None),
        top_p=float(take("top_p", (int, float), 1.0)),
        seed=take("seed", (int,), None),
        n=take("n", (int,), 1),
        stop=stops_of(args.get("stop")),
    )


def stops_of(said: object) -> tuple[str, ...]:
    """Stop strings: one, or a list of a few."""
    stops = [] if said is None or said == "" else [said] if isinstance(said, str) else said
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP for s in stops):
        rule = f"at most {MAX_STOPS} texts of 1 to {MAX_STOP} characters"
        raise EngineError("bad_sampling", f"stop must be {rule}.", name="stop", rule=rule)
    for stop in stops:
        check_text(stop)
    return tuple(stops)


def _some(args: Mapping[str, object], *names: str) -> dict[str, object]:
    """Those that were said; the job checks them."""
    return {name: args[name] for name in names if args.get(name) is not None}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


class _Rate:
    """Tokens and steps a second over the last second of engine time."""

    def of(self, trace: Trace) -> dict[str, float]:
        steps = trace.steps
        if len(steps) < 2:
            return {}
        end = int(steps["start_us"][-1])
        first = int(max((steps["start_us"] >= end - 1_000_000).argmax(), 0))
        span = (end - int(steps["start_us"][first])) / 1e6
        if span <= 0:
            return {}
        tokens = len(trace.rows("tokens", int(steps["step_id"][first]) + 1, int(steps["step_id"][-1])))
        return {"steps_per_s": round((len(steps) - 1 - first) / span, 1), "tokens_per_s": round(tokens / span, 1)}
