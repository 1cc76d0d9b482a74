"""What leaves the page as a file: a picture's figure, a timeline, and a whole run in one HTML file.

The one-file page holds up to 300 steps of the views that somebody looks at, as the stage's own messages: every figure,
list of marks and array once, by its digest, and for each step which of them it shows. Stage code, plotly.min.js and
data are packed and in base64, so no text of a user is ever markup, and a content policy keeps the file off the network.
viz/stage/client/export.js plays it. Rejected: pictures for every step (larger, and nothing can be chosen in them).
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import html
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from urllib.parse import quote

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.trace import Trace
from viz import theme
from viz.figure import plot_size, to_json
from viz.stage import page
from viz.stage.codec import Json, encode
from viz.stage.composer import Composer, draw
from viz.stage.hub import Hub, Refused, failure_of
from viz.stage.parts import Panel
from viz.stage.refusal import GONE
from viz.stage.timeline import timeline
from viz.stage.viewer import Viewer
from viz.view import View, ViewState, render

MAX_STEPS = 300
MAX_BYTES = 15_000_000
PER_MINUTE = 6  # files that one person may have made
SAVES_PER_MINUTE = 20  # recordings of one person
PICTURES_PER_MINUTE, PICTURES_WAITING = 40, 20
WIDTH, HEIGHT = 1280, 720  # a picture's layout; the browser draws it 1.5 times as large


def routes(hub: Hub) -> list[Route]:
    """Pictures are quick and have a desk of their own."""
    desk, pictures = Desk(PER_MINUTE), Desk(PICTURES_PER_MINUTE, line=PICTURES_WAITING)
    paths = {"/glass/figure.json": (_figure, pictures), "/glass/export": (_export, desk), "/glass/trace.json": (_timeline, desk)}
    return [Route(path, _bound(hub, *what), methods=["GET"]) for path, what in paths.items()]


def _bound(hub: Hub, make: Callable, desk: Desk) -> Callable:
    async def bound(request: Request) -> Response:
        return await _answer(hub, request, make, desk)

    return bound


@dataclass
class Desk:
    """One file at a time: making one takes seconds that an engine on the same cores would miss.

    Args:
        per_minute: files that one person may have made.
        line: how many may wait for their turn; who comes then, or has had enough, is refused.
    """

    per_minute: int
    line: int = 0
    waiting: int = 0
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    made: dict[str, deque[float]] = field(default_factory=dict)

    @asynccontextmanager
    async def turn(self, person: str) -> AsyncIterator[None]:
        """Raises Refused."""
        self._admit(person)
        self.waiting += 1
        try:
            await self.busy.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self.busy.release()

    def _admit(self, person: str) -> None:
        now = time.monotonic()
        made = self.made.setdefault(person, deque())
        while made and made[0] < now - 60:
            made.popleft()
        if (self.busy.locked() and self.waiting >= self.line) or len(made) >= self.per_minute:
            raise Refused("export_busy", "Files are being made already. Try again in a minute.")
        made.append(now)
        while len(self.made) > 512:
            self.made.pop(next(iter(self.made)))


async def _answer(hub: Hub, request: Request, make: Callable, desk: Desk) -> Response:
    viewer = hub.viewers.get(request.query_params.get("viewer", ""))
    if viewer is None:
        return JSONResponse(GONE, 404)
    try:
        hub.check(viewer, "export", {})
        async with desk.turn(viewer.person):
            return await asyncio.to_thread(make, hub, viewer, request)
    except Exception as error:
        return JSONResponse(failure_of(error), 409)


def _asked_int(request: Request, name: str, low: int, high: int) -> int | None:
    text = request.query_params.get(name, "")
    return min(max(int(text), low), high) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _download(content: bytes | str, name: str, media: str, note: str = "") -> Response:
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(name)}", "cache-control": "no-store"}
    return Response(content, media_type=media, headers=headers | ({"x-glass-note": quote(note)} if note else {}))


# ---- a picture ----


def _figure(hub: Hub, viewer: Viewer, request: Request) -> Response:
    """A view's frame as a Plotly figure; the browser makes PNG or SVG of it."""
    view = hub.views.get(request.query_params.get("view", ""))
    if view is None:
        raise Refused("unknown_view", "There is no view of that name.")
    trace = hub.source.trace(viewer.room)
    step = trace.clamp(_asked_int(request, "step", 0, 2**31 - 1))
    footer = request.query_params.get("link", "") or hub.title
    state = viewer.state.with_(step=step, views=(), ranges=(), size=plot_size(WIDTH, HEIGHT, viewer.state.theme, footer))
    text = to_json(render(view, trace, state), viewer.state.theme, WIDTH, HEIGHT, footer)
    return Response(text, media_type="application/json", headers={"cache-control": "no-store"})


# ---- a timeline ----


def _timeline(hub: Hub, viewer: Viewer, request: Request) -> Response:
    make, trace = hub.offers.get("trace"), hub.source.trace(viewer.room)
    if make is None or not len(trace):
        raise Refused("nothing_recorded", "Nothing has been recorded yet; run a prompt first.")
    return _download(make(trace), f"glass-engine-step-{trace.last_step}.trace.json", "application/json")


# ---- one file ----


def _export(hub: Hub, viewer: Viewer, request: Request) -> Response:
    trace = hub.source.trace(viewer.room)
    if not len(trace):
        raise Refused("nothing_recorded", "Nothing has been recorded yet; run a prompt first.")
    at = trace.clamp(_asked_int(request, "step", 0, 2**31 - 1) if "step" in request.query_params else viewer.state.step)
    chosen = choose(trace, at, _asked_int(request, "first", 0, 2**31 - 1), _asked_int(request, "last", 0, 2**31 - 1))
    panels = [(hub.views[name], size) for name, size in viewer.panels] or [(hub.views[n], (960, 540)) for n in hub.default_views]
    size = (_asked_int(request, "width", 320, 3840) or WIDTH, _asked_int(request, "height", 240, 2160) or HEIGHT)
    film = Film(hub.title, tuple(panels), viewer.state, size)
    every = 1
    while True:
        content, note = film.develop(hub.composer, trace, thin(chosen, at, every), at)
        if len(content) <= MAX_BYTES:
            return _download(content, f"glass-engine-step-{at}.html", "text/html; charset=utf-8", note)
        every += max(len(content) // MAX_BYTES, 1)
        if every > len(chosen):
            raise Refused("export_too_large", "These steps do not fit into one file. Choose fewer views.")


def choose(trace: Trace, at: int, first: int | None, last: int | None) -> np.ndarray:
    """The steps asked for; without a wish the 300 around `at`. Of more than 300, an even choice."""
    ids = trace.steps["step_id"]
    if first is None and last is None:
        begin = min(max(int(np.searchsorted(ids, at)) - MAX_STEPS // 2, 0), max(len(ids) - MAX_STEPS, 0))
        return ids[begin : begin + MAX_STEPS]
    low, high = sorted((first or 0, 2**31 - 1 if last is None else last))
    found = trace.rows("steps", low, high)["step_id"]
    found = found if len(found) else ids[ids == at]
    return thin(found, at, -(-len(found) // MAX_STEPS))


def thin(ids: np.ndarray, at: int, every: int) -> np.ndarray:
    """Every n-th, so that the step looked at is among them."""
    return ids[int(np.searchsorted(ids, at)) % every :: every] if every > 1 else ids


@dataclass(frozen=True)
class Film:
    """What a one-file page is made of.

    Args:
        panels: views and the sizes of their panels.
        size: the page's; it is scaled to the window that it is opened in.
    """

    title: str
    panels: tuple[tuple[View, tuple[int, int]], ...]
    state: ViewState
    size: tuple[int, int]

    def develop(self, composer: Composer, trace: Trace, steps: np.ndarray, at: int) -> tuple[bytes, str]:
        """(the page, what to know about its steps)."""
        store = _Store()
        shown = []
        for step in steps.tolist():
            texts = composer.make_texts(trace, step, self.state)
            drawn = [draw(view, trace, self.state.with_(step=step, views=(), ranges=(), size=size)) for view, size in self.panels]
            shown.append([step, store.text(texts["caption"]), store.text(texts["chips"]), [store.panel(panel) for panel in drawn]])
            time.sleep(0)  # an engine on the same interpreter goes first
        facts, bins = timeline(_between(trace, int(steps[0]), int(steps[-1])))
        every = round((int(steps[-1]) - int(steps[0])) / max(len(steps) - 1, 1))
        note = f"{len(steps):,} steps, {int(steps[0]):,} to {int(steps[-1]):,}" + (f", every {every:,}th" if every > 1 else "")
        header = {
            "t": "file",
            "title": self.title,
            "views": [{"name": v.name, "title": v.title, "question": v.question} for v, _ in self.panels],
            "theme": theme.client_theme(),
            "state": {
                "theme": self.state.theme,
                "language": self.state.language,
                "selection": self.state.selection,
                "axis": self.state.axis,
            },
            "at": at,
            "size": list(self.size),
            "status": _status(trace, note),
            "steps": shown,
            "texts": store.texts,
            "groups": store.groups,
            "timeline": {**facts, "base": len(store.arrays)},
        }
        return one_file(self.title, encode(header, [*store.arrays, *bins])), note


class _Store:
    """Texts and groups of arrays, each kept once."""

    def __init__(self) -> None:
        self.texts: list[Json] = []
        self.groups: list[list[int]] = []  # [first array, how many]
        self.arrays: list[np.ndarray] = []
        self._known: dict[str, int] = {}

    def text(self, text: Json) -> int:
        at = self._known.setdefault(text, len(self.texts))
        if at == len(self.texts):
            self.texts.append(text)
        return at

    def panel(self, panel: Panel) -> list[int]:
        key = "arrays:" + panel.arrays_digest
        at = self._known.setdefault(key, len(self.groups))
        if at == len(self.groups):
            self.groups.append([len(self.arrays), len(panel.arrays)])
            self.arrays += panel.arrays
        return [self.text(panel.figure), self.text(panel.items), at, self.text(panel.documents)]


def _between(trace: Trace, first: int, last: int) -> Trace:
    tables = {name: trace.rows(name, first, last) for name in ("steps", "works", "preempts", "finishes")}
    return Trace(tables, trace.sequences, meta=trace.meta)


def _status(trace: Trace, note: str) -> dict[str, object]:
    model, meta = trace.meta.get("model"), trace.meta
    date = str(meta.get("date") or time.strftime("%Y-%m-%d"))[:10]
    device = " · ".join(part for part in (str(meta.get("device", "")), date) if part)
    badge = " · ".join(str(part) for part in (meta.get("device"), date, meta.get("commit"), note) if part)
    return {"model": {"name": str(model.get("name", "") if isinstance(model, dict) else model or "")}, "device": device, "badge": badge}


_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
_PLAYER = """
const unpack = async (id) => {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
};
const run = async (id) => {
  const script = document.createElement("script");
  script.textContent = new TextDecoder().decode(await unpack(id));
  document.head.append(script);
};
(async () => {
  await run("glass-plotly");
  await run("glass-stage");
  window.glassMount(document.querySelector("[data-glass]"), { file: await unpack("glass-data") });
})().catch(() => { document.querySelector("main").textContent = "This file needs a newer browser (one of 2023 or later)."; });
"""


def one_file(title: str, data: bytes) -> bytes:
    """A page that needs nothing but itself."""
    plotly = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    parts = {"glass-plotly": plotly, "glass-stage": page.script().encode(), "glass-data": data}
    packed = "\n".join(f'<script type="application/octet-stream" id="{name}">{_packed(blob)}</script>' for name, blob in parts.items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>{page.styles()}
html, body {{ margin: 0; padding: 0; overflow: hidden; height: 100%; }}</style>
</head>
<body>
<main>{page.ELEMENT}</main>
{packed}
<script>{_PLAYER}</script>
</body>
</html>
""".encode()


def _packed(blob: bytes) -> str:
    return base64.b64encode(gzip.compress(blob, 6, mtime=0)).decode()


def offer_timeline(hub: Hub, make: Callable[[Trace], str]) -> None:
    """Put the timeline of a run on the share menu; `make`: Trace → Chrome trace JSON."""
    hub.offers["trace"] = make
