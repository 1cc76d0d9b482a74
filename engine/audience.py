"""A Session as the page's Source (viz/stage/source.py): status as plain JSON, commands as names and plain dicts.

Everything a browser says is checked here once more: types, lengths, ranges. When the last viewer of a room
has left, its requests end after a short grace, so that a reload does not kill them and a closed tab does.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.config import KNOBS, Cost, knob_values
from engine.errors import EngineError
from engine.recording import load, save
from engine.request import SamplingParams
from engine.session import Session
from engine.trace import Trace
from engine.workloads import WORKLOADS, Workload

GRACE_S = 3.0
MAX_LIVE = 32  # prompts of one room at a time


class LiveSource:
    """Args:
    session: started or not yet ready.
    grace: seconds between the last viewer's leaving and the end of the room's requests.
    """

    def __init__(self, session: Session, grace: float = GRACE_S) -> None:
        self.session = session
        self._grace = grace
        self._viewers: dict[str, set[str]] = {}
        self._timers: dict[str, threading.Timer] = {}
        self._requests: dict[str, dict[int, str]] = {}
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
            "recording": {"save": session.is_ready, "open": True},
            "hint": "Type a sentence: it becomes the next request.",
            **rates,
        }
        return said

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
        answer = await asyncio.to_thread(act, room, args)
        return {"ok": True, **(answer or {})}

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
        self.session.ask("workload", room=room, prompts=self.script(workload), knobs=dict(workload.knobs))
        return {"point": workload.point}

    def script(self, workload: Workload) -> tuple:
        return tuple(
            self.session.prompt(
                line.text, SamplingParams(line.max_tokens, line.temperature, n=line.n), chat=line.chat, system=line.system,
                priority=line.priority, after_steps=line.after_steps,
            )
            for line in workload.lines
        )  # fmt: skip

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
        return f"glass-engine-{time.strftime('%Y%m%d-%H%M%S')}.glass", await asyncio.to_thread(recording_bytes, trace)

    # ---- who is watching ----

    def viewer_joined(self, room: str, viewer: str) -> None:
        timer = self._timers.pop(room, None)
        if timer is not None:
            timer.cancel()
        self._viewers.setdefault(room, set()).add(viewer)

    def viewer_left(self, room: str, viewer: str) -> None:
        watching = self._viewers.get(room, set())
        watching.discard(viewer)
        if not watching:
            timer = threading.Timer(self._grace, self._abandon, (room,))
            timer.daemon = True
            self._timers[room] = timer
            timer.start()

    def _abandon(self, room: str) -> None:
        if not self._viewers.get(room) and self.session.is_ready:
            self.session.ask("abort", room=room, request_id=None)


def sampling_of(args: Mapping[str, object]) -> SamplingParams:
    """SamplingParams from what a browser sent; SamplingParams checks the ranges."""

    def take(name: str, kinds: tuple, otherwise):
        value = args.get(name)
        if value is None:
            return otherwise
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise EngineError("bad_sampling", f"{name} must be a number.", name=name, rule="a number", value=str(value)[:40])
        return value

    return SamplingParams(
        max_tokens=take("max_tokens", (int,), 48),
        temperature=float(take("temperature", (int, float), 0.0)),
        top_k=take("top_k", (int,), None),
        top_p=float(take("top_p", (int, float), 1.0)),
        seed=take("seed", (int,), None),
        n=take("n", (int,), 1),
    )


def recording_bytes(trace: Trace) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recording"
        save(trace, path)
        return path.read_bytes()


def recording_from(content: bytes) -> Trace:
    """A Trace from an uploaded file. Raises EngineError with a sentence."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recording"
        path.write_bytes(content)
        return load(path)


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
