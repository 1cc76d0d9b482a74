"""What the stage's tests share: a made-up trace, four made-up views, a source that steps by hand, a server.

Not a picture of any engine: numbers here only have to look like a run and be the same every time.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np
from starlette.applications import Starlette

from engine.trace import FINISH, PREEMPT, STEP, TOKEN, WAIT, WORK, SequenceInfo, Trace
from viz.stage.hub import Hub
from viz.stage.routes import routes
from viz.theme import request_color
from viz.view import Badge, Frame, Label, Mark, Paint, Raster, Series, View, ViewState

SLOTS, BUDGET = 6, 256
HOSTILE = [
    "<img src=x onerror=window.canary=1>",
    "${window.canary=1}",
    "{{canary}}",
    "</script><script>window.canary=1</script>",
    "`<b>b</b>`",
]


@lru_cache(maxsize=4)
def make_trace(num_steps: int = 400, names: tuple[str, ...] = ()) -> Trace:
    """Requests arrive every 9 steps, prefill in chunks of 96, decode to their length; every 60th is preempted."""
    rng = np.random.default_rng(7)
    works, tokens, waits, preempts, finishes, steps = [], [], [], [], [], []
    sequences: dict[int, SequenceInfo] = {}
    running: dict[int, list[int]] = {}  # seq → [computed, generated, slot]
    queue: list[int] = []
    for step in range(num_steps):
        if step % 9 == 0:
            seq, prompt = len(sequences), int(rng.integers(20, 240))
            name = names[seq % len(names)] if names else chr(65 + seq % 26) + ("" if seq < 26 else str(seq // 26))
            text = f"Why does the {name} request wait for a block before it decodes?"
            sequences[seq] = SequenceInfo(
                seq, seq, 0, name, text, tuple(range(prompt)), int(rng.integers(20, 90)), 0.0, 0, 0, step * 1000, "main"
            )
            queue.append(seq)
        while queue and len(running) < SLOTS:
            used = {r[2] for r in running.values()}
            running[queue.pop(0)] = [0, 0, min(set(range(SLOTS)) - used)]
        if step % 60 == 59 and len(running) > 2:
            victim = max(running)
            preempts.append((step, victim, 0, 0, 4, running.pop(victim)[0]))
            queue.insert(0, victim)
        budget = BUDGET
        for seq, state in list(running.items()):
            info = sequences[seq]
            left = info.num_prompt_tokens - state[0]
            share = min(max(left, 1), 96, budget)
            if share <= 0:
                continue
            samples = left - share <= 0
            works.append((step, seq, state[2] + 1, state[0], share, 0, 0, 0, 0, samples))
            state[0] += share
            budget -= share
            if samples:
                state[1] += 1
                tokens.append((step, seq, info.num_prompt_tokens + state[1] - 1, state[1] % 50, -0.3, 0, (0,) * 5, (0.0,) * 5))
                if state[1] >= info.max_tokens:
                    finishes.append((step, seq, 1, 5))
                    del running[seq]
        waits += [(step, seq, 2, 1, 0) for seq in queue]
        steps.append((step, step * 4000, 80, 120, 2400, 200, 90, BUDGET, SLOTS, 0, 0, step, *(0,) * (len(STEP.names) - 12)))
    tables = {
        "steps": np.array(steps, STEP),
        "works": np.array(works, WORK),
        "tokens": np.array(tokens, TOKEN),
        "waits": np.array(waits, WAIT),
        "preempts": np.array(preempts, PREEMPT),
        "finishes": np.array(finishes, FINISH),
    }
    meta = {"model": {"name": "SmolLM2-135M-Instruct"}, "device": "NVIDIA H200", "num_pages": 96, "page_size": 16, "date": "2026-11-30"}
    return Trace(tables, sequences, meta=meta)


def upto(trace: Trace, step: int) -> Trace:
    """The trace as it was after `step`."""
    tables = {t: trace.rows(t, 0, step) for t in ("steps", "works", "tokens", "waits", "preempts", "finishes")}
    return Trace(tables, trace.sequences, trace.token_texts, trace.meta)


# ---- views ----

PAINTS = (
    Paint("free", "idle slot", "diagonal"),
    *(Paint(request_color(i), "" if i else "decode") for i in range(6)),
    *(Paint(request_color(i), "" if i else "prefill", "dots") for i in range(6)),
)


def _batching(trace: Trace, state: ViewState) -> Frame:
    at = trace.clamp(state.step)
    if at is None:
        return Frame("batching", "Continuous batching", (Badge("state"),), summary="No step has run yet.")
    window = 48
    first = max(0, at - window + 1)
    works = trace.rows("works", first, at)
    cells = np.full((SLOTS, window), 255, np.uint8)
    cells[:, : at - first + 1] = 0
    prompts = np.array([trace.sequences[int(s)].num_prompt_tokens for s in works["seq_id"]])
    cells[works["row"] - 1, works["step_id"] - first] = 1 + works["seq_id"] % 6 + 6 * (works["start"] < prompts)
    x0, x1 = first - 0.5, first + window - 0.5
    per_step = np.bincount(works["step_id"] - first, weights=works["num_tokens"], minlength=window)
    labels, marks = [], []
    now = works[works["step_id"] == at]
    for row in works[(works["start"] == 0)]:
        labels.append(Label(trace.name(int(row["seq_id"])), float(row["step_id"]), float(row["row"] - 1), "ink", weight=700))
    for row in now:
        seq, slot = int(row["seq_id"]), int(row["row"]) - 1
        mine = works[works["seq_id"] == seq]["step_id"]
        text = f"Request {trace.name(seq)}: {int(row['num_tokens'])} tokens in step {at}"
        detail = f"Position {int(row['start'])} of {trace.sequences[seq].num_prompt_tokens} prompt tokens.\n{trace.sequences[seq].prompt}"
        marks.append(Mark(f"seq:{seq}", mine.min() - 0.5, at + 0.5, slot - 0.5, slot + 0.5, text, None, detail))
    axes = {
        "xaxis": {"range": [x0, x1], "title": {"text": "step"}, "anchor": "y2"},
        "yaxis": {
            "range": [SLOTS - 0.5, -0.5], "title": {"text": "batch slot"}, "domain": [0.34, 1],
            "tickvals": list(range(SLOTS)), "ticktext": [str(i + 1) for i in range(SLOTS)],
        },
        "yaxis2": {"range": [0, BUDGET], "title": {"text": "tokens"}, "domain": [0, 0.26], "showgrid": True, "nticks": 4},
    }  # fmt: skip
    bars = Series(
        "tokens", np.arange(first, first + window), per_step, "bars", Paint("accent", "tokens in the step"), 0.8, np.zeros(window), "xy2"
    )
    raster = Raster("slots", cells, x0, x1, -0.5, SLOTS - 0.5, PAINTS)
    legend = (PAINTS[1], PAINTS[7], PAINTS[0])
    summary = f"Step {at}: {len(now)} requests share one step, {int(now['num_tokens'].sum())} tokens."
    badges = (Badge("state"), Badge("measured", "NVIDIA H200"))
    return Frame("batching", "Continuous batching", badges, axes, (raster,), (bars,), tuple(labels), tuple(marks), legend, summary)


def _blocks(trace: Trace, state: ViewState) -> Frame:
    at = trace.clamp(state.step)
    rng = np.random.default_rng(3)
    owner = rng.integers(0, 9, 96)
    if at is not None:
        owner = (owner + (np.arange(96) * 7919 + at // 6 * 31) % 97 // 90) % 9
    paints = (Paint("free", "free"), *(Paint(request_color(i)) for i in range(6)), Paint("cached", "cached, no owner"), Paint("free"))
    cells = owner.astype(np.uint8).reshape(8, 12)
    labels = [Label(str(i), i % 12, i // 12, "ink" if owner[i] in (0, 7, 8) else "paper") for i in range(96)]
    marks = [
        Mark(f"page:{i}", i % 12 - 0.5, i % 12 + 0.5, i // 12 - 0.5, i // 12 + 0.5, f"Block {i}", None, f"Owner class {owner[i]}")
        for i in range(96)
    ]
    axes = {"xaxis": {"range": [-0.5, 11.5], "visible": False}, "yaxis": {"range": [7.5, -0.5], "visible": False}}
    used = int(np.count_nonzero((owner > 0) & (owner < 7)))
    legend = (paints[0], paints[7], Paint(request_color(0), "in use"))
    raster, summary = Raster("pool", cells, -0.5, 11.5, -0.5, 7.5, paints), f"{used} of 96 blocks are in use."
    return Frame("blocks", "Paged blocks", (Badge("state"),), axes, (raster,), (), tuple(labels[:40]), tuple(marks), legend, summary)


def _attention(trace: Trace, state: ViewState) -> Frame:
    at = trace.clamp(state.step) or 0
    i, j = np.mgrid[0:100, 0:500]
    values = np.where(j <= i * 5 + 4, 128 + 120 * np.sin((i * 3 + j + at * 4) / 40), 0)
    line = np.sin(np.arange(500) / 30 + at / 5).astype(np.float32)
    line[200:220] = np.nan
    axes = {
        "xaxis": {"range": [0, 500], "title": {"text": "key"}, "anchor": "y2"},
        "yaxis": {"range": [100, 0], "title": {"text": "query"}, "domain": [0.3, 1]},
        "yaxis2": {"range": [-1.2, 1.2], "domain": [0, 0.22], "showgrid": True, "nticks": 3},
    }
    raster = Raster("scores", values.astype(np.uint8), 0, 500, 0, 100, None, (0.0, 0.31), "sequential", "probability")
    series = (
        Series("entropy", np.arange(500), line, "line", Paint("request-5", "entropy"), 2.5, axes="xy2"),
        Series("peaks", np.arange(0, 500, 25), line[::25], "markers", Paint("request-0", "peaks"), 9, axes="xy2"),
    )
    badges = (Badge("recomputed", "difference 0.002"),)
    return Frame(
        "attention",
        "Attention scores",
        badges,
        axes,
        (raster,),
        series,
        (),
        (),
        (series[0].paint, series[1].paint),
        f"Scores at step {at}.",
    )


def _heavy(trace: Trace, state: ViewState) -> Frame:
    """The size that the stage must carry: 100 × 500 cells, 150 marks, 100 labels; everything moves every step."""
    at = trace.clamp(state.step) or 0
    cells = np.repeat(((np.arange(100)[:, None] * 7 + (np.arange(500)[None, :] + at) // 20) % 8), 1, 0).astype(np.uint8)
    paints = (Paint("free", "free", "diagonal"), *(Paint(request_color(i)) for i in range(6)), Paint("waste", "waste", "diagonal"))
    labels = [Label(f"{at + i}", (i * 37) % 490 + 5, (i * 13) % 95 + 3) for i in range(100)]
    marks = [
        Mark(f"cell:{i}", i * 3, i * 3 + 3, (i + at) % 90, (i + at) % 90 + 6, f"Mark {i} at {at}", "ink" if i % 3 else None, "detail")
        for i in range(150)
    ]
    axes = {"xaxis": {"range": [at, at + 500], "title": {"text": "step"}}, "yaxis": {"range": [100, 0], "title": {"text": "row"}}}
    raster, legend = Raster("cells", cells, at, at + 500, 0, 100, paints), (paints[0], paints[7])
    return Frame("heavy", "Heavy", (Badge("state"),), axes, (raster,), (), tuple(labels), tuple(marks), legend, f"Heavy at {at}")


def _hostile(trace: Trace, state: ViewState) -> Frame:
    labels = tuple(Label(t, 0.5, i + 0.5) for i, t in enumerate(HOSTILE))
    marks = tuple(Mark(f"seq:{i}", 0, 1, i, i + 1, t, "accent", t * 3) for i, t in enumerate(HOSTILE))
    legend = tuple(Paint(request_color(i), t) for i, t in enumerate(HOSTILE))
    axes = {"xaxis": {"range": [0, 1]}, "yaxis": {"range": [5, 0]}}
    return Frame("hostile", HOSTILE[0], (Badge("state", HOSTILE[3]),), axes, (), (), labels, marks, legend, HOSTILE[0] * 2, error="")


def _broken(trace: Trace, state: ViewState) -> Frame:
    raise RuntimeError(HOSTILE[0])


def _view(name: str, title: str, question: str, figure) -> View:
    return View(name, title, question, figure, lambda trace, state: title)


VIEWS = {
    v.name: v
    for v in (
        _view("batching", "Continuous batching", "Who shares this step?", _batching),
        _view("blocks", "Paged blocks", "Who owns which block?", _blocks),
        _view("attention", "Attention scores", "Where does a query look?", _attention),
        _view("heavy", "Heavy", "How fast can it draw?", _heavy),
        _view("hostile", "Hostile", HOSTILE[2], _hostile),
        _view("broken", "Broken", "Does an error stay in its panel?", _broken),
    )
}


def caption(trace: Trace, step: int, language: str) -> str:
    now = trace.step(step)
    names = [trace.name(int(s)) for s in now.finishes["seq_id"]]
    joined = [trace.name(int(r["seq_id"])) for r in now.works if r["start"] == 0]
    facts = [f"{n} finished" for n in names[:1]] + [f"{n} joined" for n in joined[:1]]
    return f"Step {step}: " + ("; ".join(facts) or f"{len(now.works)} requests each got a token") + "."


# ---- a source that moves when it is told to ----


class HandSource:
    """A Source at step `at`; `advance()` is one engine step. Keeps what it was asked."""

    def __init__(self, at: int = 60, names: tuple[str, ...] = (), num_steps: int = 400) -> None:
        self.full, self.at, self.moves = make_trace(num_steps, names), at, 0
        self.state, self.pace = "paused", 2.0
        self.commands: list[tuple[str, dict]] = []
        self.joined: list[str] = []
        self.left: list[str] = []
        self.fault: dict | None = None
        self.model, self.extra = "SmolLM2-135M-Instruct", {}

    def advance(self, steps: int = 1) -> None:
        self.at = (self.at + steps) % len(self.full)
        self.moves += 1

    def trace(self, room: str) -> Trace:
        return upto(self.full, self.at)

    def version(self, room: str) -> int:
        return self.moves

    def status(self, room: str) -> dict:
        return {
            "state": self.state,
            "pace": self.pace,
            "live": True,
            "model": {"name": self.model},
            "device": "NVIDIA H200",
            "badge": "live on this machine",
            "tokens_per_s": 1534.2,
            "steps_per_s": self.pace,
            "error": self.fault,
            "presets": [{"name": "ragged", "title": "Three ragged prompts"}, {"name": "shared", "title": "A shared system prompt"}],
            "knobs": {
                "max_num_seqs": {"label": "Most requests at once", "value": 6, "min": 1, "max": 64, "cost": "nothing"},
                "mode": {"label": "Batching", "value": "continuous", "choices": ["continuous", "static"], "cost": "flush"},
                "weights": {"label": "Weights", "value": "bf16", "choices": ["bf16", "int8"], "cost": "rebuild", "why": "greyed here"},
            },
            "recording": {"save": True, "open": True},
            **self.extra,
        }

    async def command(self, room: str, viewer: str, name: str, args: Mapping[str, object]) -> dict:
        self.commands.append((name, dict(args)))
        if name == "step":
            self.advance(int(args.get("n", 1)))
        elif name in ("play", "pause"):
            self.state = "running" if name == "play" else "paused"
            self.moves += 1
        elif name == "pace":
            self.pace = args.get("value")
            self.moves += 1
        elif name == "fail":
            raise RuntimeError("<b>broken</b>")
        elif name == "refuse":
            return {"ok": False, "code": "no", "sentence": "Not today."}
        return {"ok": True, "name": "D"}

    def viewer_joined(self, room: str, viewer: str) -> None:
        self.joined.append(viewer)

    def viewer_left(self, room: str, viewer: str) -> None:
        self.left.append(viewer)

    async def save_recording(self, room: str, viewer: str) -> tuple[str, bytes]:
        return "run ü.glass", b"recording"

    async def open_recording(self, room: str, viewer: str, name: str, content: bytes) -> dict:
        return {"ok": True, "name": name, "size": len(content)}


@contextlib.contextmanager
def serve(hub: Hub) -> Iterator[str]:
    """A real server on a free port of localhost; its address."""
    import uvicorn

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = uvicorn.Config(
        Starlette(routes=routes(hub, with_page=True)), port=port, log_level="error", ws="websockets-sansio", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}/glass/"
    finally:
        server.should_exit = True
        thread.join(5)
