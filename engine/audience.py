"""A Session as the page's Source (viz/stage/source.py): status as plain JSON, commands as names and plain dicts.

Everything a browser says is checked here once more: types, lengths, ranges. When a viewer has left, the requests
that it made end after a short grace; when the room is empty, all of them do. A viewer is a tab, which keeps its name
over a reload or a lost connection: coming back within the grace keeps its requests, closing the tab does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping

from engine.config import KNOBS, Cost, knob_values
from engine.errors import EngineError
from engine.recording import encode
from engine.request import SamplingParams
from engine.session import Session, Status
from engine.tokenizer import check_text
from engine.trace import Trace
from engine.workloads import WORKLOADS

GRACE_S = 3.0
SHARED_FPS = 3  # frames a second while a CPU engine runs freely: each costs about 45 ms of both cores where the browser runs here too
MAX_LIVE = 32  # prompts of one room at a time
MAX_STOPS, MAX_STOP = 4, 100  # stop strings of a prompt, characters of one
ROOMS = frozenset({"main"})  # what the core opens


class LiveSource:
    """Args:
    session: started or not yet ready.
    grace: seconds between the last viewer's leaving and the end of the room's requests.
    """

    def __init__(self, session: Session, grace: float = GRACE_S) -> None:
        self.session = session
        self._grace = grace
        self._viewers: dict[str, Counter[str]] = {}  # viewer → connections
        self._leavers: dict[str, dict[str, threading.Timer]] = {}
        self._owned: dict[str, deque[int]] = {}  # viewer -> requests that it made
        self._lock = threading.Lock()
        self._rate = _Rate()

    # ---- what the page reads ----

    def trace(self, room: str) -> Trace:
        return self.session.trace(room)

    def version(self, room: str) -> int:
        return self.session.version

    def status(self, room: str) -> dict[str, object]:
        session, status = self.session, self.session.status(room)
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
            "progress": None if status.progress is None else {"text": status.progress.text, "fraction": status.progress.fraction},
            "error": {"code": "engine", "sentence": status.sentence} if status.sentence else None,
            "knobs": self._knobs() if session.is_ready else {},
            "presets": [{"name": name, "title": w.title, "point": w.point} for name, w in WORKLOADS.items()],
            "recording": {"save": bool(len(session.trace(room))), "open": True},
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
        return f"weights from {model['weights']}, {model['precision']}, running in {meta['dtype']} on {meta['backend']} kernels"

    def _knobs(self) -> dict[str, dict[str, object]]:
        values = knob_values(self.session.config)
        found = {}
        for name, knob in KNOBS.items():
            entry: dict[str, object] = {"value": values[name], "label": name, "cost": knob.cost.value}
            if knob.choices:
                entry["choices"] = list(knob.choices)
            elif knob.kind is bool:
                entry["choices"] = [True, False]
            else:
                entry |= {"min": knob.low, "max": knob.high}
            if knob.cost is Cost.FLUSH:
                entry["note"] = "running requests recompute their cache"
            found[name] = entry
        return found

    # ---- what the page asks for ----

    async def command(self, room: str, viewer: str, name: str, args: Mapping[str, object]) -> dict[str, object]:
        """Answers on a worker thread: tokenising and waiting for the engine must not hold the event loop."""
        act = getattr(self, f"do_{name}", None)
        if act is None:
            raise EngineError("unknown_command", "The page asked for something that the engine does not know.", name=name[:60])
        answer = await asyncio.to_thread(act, room, args) or {}
        if name == "prompt":
            self._owned.setdefault(viewer, deque(maxlen=1000)).append(answer["request_id"])
            if not self._viewers.get(room, {}).get(viewer):  # it left meanwhile
                with self._lock:
                    self._start_grace(room, viewer)
        return {"ok": True, **answer}

    def do_prompt(self, room: str, args: Mapping[str, object]) -> dict[str, object]:
        text = args.get("text")
        if not isinstance(text, str):
            raise EngineError("bad_text", "The prompt must be text.")
        status = self.session.status(room)
        if len(status.running) + len(status.waiting) >= MAX_LIVE:
            raise EngineError("too_many", f"{MAX_LIVE} requests are alive already; wait until one has finished.", limit=MAX_LIVE)
        handle = self.session.add(text, sampling_of(args), room=room, chat=args.get("chat", True) is True)
        return {"name": handle.name, "request_id": handle.request_id, "queued": status.state == "paused"}

    def do_preset(self, room: str, args: Mapping[str, object]) -> dict[str, object]:
        workload = WORKLOADS.get(str(args.get("name")))
        if workload is None:
            raise EngineError("unknown_preset", "There is no preset of that name.")
        self.session.run_workload(workload, room=room)
        return {"point": workload.point}

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
        return {"knobs": self.session.ask("knobs", knobs={str(args.get("name")): args.get("value")})}

    def do_restart(self, room: str, args: Mapping[str, object]) -> None:
        self.session.restart()

    def do_probe(self, room: str, args: Mapping[str, object]) -> None:
        layer = args.get("layer", 0)
        self.session.ask("job", name="probe", args={"layers": (layer if _is_int(layer) else 0,)})

    # ---- recordings ----

    async def save_recording(self, room: str, viewer: str) -> tuple[str, bytes]:
        """(file name, content)."""
        trace = self.session.trace(room)
        if not len(trace):
            raise EngineError("nothing_recorded", "Nothing has been recorded yet; run a prompt first.")
        return f"glass-engine-{time.strftime('%Y%m%d-%H%M%S')}.glass", await asyncio.to_thread(encode, trace)

    # ---- who is watching ----

    def is_open(self, room: str) -> bool:
        return room in ROOMS

    def viewer_joined(self, room: str, viewer: str) -> None:
        """Raises EngineError "unknown_room"."""
        if not self.is_open(room):
            raise EngineError("unknown_room", "This engine has no room of that name. Open the page without ?room= in its address.")
        with self._lock:
            self._viewers.setdefault(room, Counter())[viewer] += 1
            timer = self._leavers.get(room, {}).pop(viewer, None)
            if timer is not None:
                timer.cancel()

    def viewer_left(self, room: str, viewer: str) -> None:
        with self._lock:
            watching = self._viewers.setdefault(room, Counter())
            watching[viewer] -= 1
            watching += Counter()  # drops who has no connection left
            self._viewers[room] = watching
            if watching[viewer] or (watching and viewer not in self._owned):
                return
            self._start_grace(room, viewer)

    def _start_grace(self, room: str, viewer: str) -> None:
        timer = threading.Timer(self._grace, self._abandon, (room, viewer))
        timer.daemon = True
        self._leavers.setdefault(room, {})[viewer] = timer
        timer.start()

    def _abandon(self, room: str, viewer: str) -> None:
        with self._lock:
            if self._leavers.get(room, {}).pop(viewer, None) is None:
                return  # it came back
            owned = set(self._owned.pop(viewer, ()))
            ending = owned & self.session.alive if self._viewers.get(room) else {None}
        with contextlib.suppress(EngineError):  # an engine that is not there runs nothing
            for request_id in ending:
                self.session.ask("abort", room=room, request_id=request_id)


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
