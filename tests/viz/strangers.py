"""Pictures for the stranger test: each view at two moments, as a reader sees it, halved to 640 × 360.

    python -m tests.viz.strangers OUT_FOLDER [--answers FOLDER] [--view NAME] [--theme NAME] [--deuteranopia] [--greyscale]

OUT_FOLDER gets VIEW-1.png, VIEW-2.png and questions.json ({view: its five questions}); nothing there tells an answer.
The answers go elsewhere, OUT_FOLDER-answers/answers.json: {"VIEW-1": [five], …}, from each view's own asks. A picture is
the panel of the real stage in Chromium with title, badges and legend; the caption is left out, since it answers questions.

The moments are the two whose answers differ most; an answer that a reader would guess (0, 1, A, nobody) counts little.
A moment at which a question has no single answer (an ask says "") is never chosen.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from engine.recording import load
from engine.trace import Trace
from viz.registry import load_views
from viz.stage.hub import Hub, HubConfig
from viz.stage.source import RecordingSource
from viz.view import View, ViewState

RECORDINGS = Path(__file__).resolve().parents[2] / "assets" / "recordings"
SIZE, SHOWN = (1280, 720), (640, 360)
MOMENTS_A_RECORDING = 96
GUESSES = frozenset({"0", "1", "2", "3", "A", "A·1", "none", "nobody"})  # what readers without the picture say
ONLY_THE_PANEL = """
.glass-root.glass-embed { grid-template-rows: minmax(0, 1fr) !important; }
.glass-root > :not(.glass-body) { display: none !important; }
"""
DRAWN = "window.glass && glass.stats.updates > 0 && window.Plotly && glass.stage.shown().every((p) => p.model && p.model.figure)"
VISION = {"deuteranopia": "deuteranopia", "greyscale": "achromatopsia"}


@dataclass(frozen=True)
class Moment:
    recording: Path
    step: int
    answers: tuple[str, ...]

    def worth(self) -> float:
        """How little of it a reader could guess: more than one right guess spoils a moment."""
        guessed = sum(a in GUESSES for a in self.answers)
        return len(self.answers) - 0.7 * guessed - 5 * max(guessed - 1, 0)


def answers(view: View, trace: Trace, step: int) -> tuple[str, ...]:
    return tuple(ask.answer(trace, ViewState(step=step, size=SIZE)) for ask in view.asks)


def moments(view: View, traces: dict[Path, Trace]) -> tuple[Moment, Moment]:
    """Two moments of different recordings."""
    found = []
    for path, trace in traces.items():
        steps = sorted(set(trace.works["step_id"].tolist()))
        picked = steps[:: max(len(steps) // MOMENTS_A_RECORDING, 1)]
        asked = [Moment(path, step, answers(view, trace, step)) for step in picked]
        found += [moment for moment in asked if all(moment.answers)]

    def differ(pair: tuple[Moment, Moment]) -> tuple[float, float]:
        a, b = pair
        unlike = sum(x != y for x, y in zip(a.answers, b.answers))
        return unlike + 0.5 * (a.worth() + b.worth()), -abs(a.worth() - b.worth())

    pairs = [(a, b) for a, b in combinations(found, 2) if a.recording != b.recording]
    if not pairs:
        raise LookupError(f"{view.name}: no two recordings have a moment at which each of its questions has one answer")
    return max(pairs, key=differ)


def halved(page, picture: bytes) -> bytes:
    """As a reader at the back sees it, by the browser's own smooth scaling."""
    source = "data:image/png;base64," + base64.b64encode(picture).decode()
    url = page.evaluate(
        """async ([source, [w, h]]) => {
          const image = new Image(); image.src = source; await image.decode();
          const canvas = document.createElement("canvas"); canvas.width = w; canvas.height = h;
          const ctx = canvas.getContext("2d"); ctx.imageSmoothingQuality = "high"; ctx.drawImage(image, 0, 0, w, h);
          return canvas.toDataURL("image/png"); }""",
        [source, list(SHOWN)],
    )
    return base64.b64decode(url.partition(",")[2])


def pictures(views: dict[str, View], plan: dict[str, tuple[Moment, Moment]], theme: str, vision: str | None) -> Iterator[tuple[str, bytes]]:
    """(file name, PNG) of every moment."""
    from playwright.sync_api import sync_playwright

    from benchmarks.browser import FLAGS, chromium
    from tests.viz.test_stage_support import serve

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        for path in sorted({m.recording for pair in plan.values() for m in pair}):
            hub = Hub(RecordingSource(load(path), playing=False), views, config=HubConfig(max_fps=60))
            with serve(hub) as url:
                for name, pair in plan.items():
                    for i, moment in enumerate(pair, 1):
                        if moment.recording == path:
                            yield f"{name}-{i}.png", _picture(browser, f"{url}?embed={name}&step={moment.step}&theme={theme}", vision)
        browser.close()


def _picture(browser, address: str, vision: str | None) -> bytes:
    page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light")
    if vision:
        page.context.new_cdp_session(page).send("Emulation.setEmulatedVisionDeficiency", {"type": VISION[vision]})
    page.goto(address)
    page.wait_for_function(DRAWN, timeout=30_000)
    page.add_style_tag(content=ONLY_THE_PANEL)
    page.wait_for_timeout(1500)  # the panel grew: it asks for a frame of its size, and draws it
    picture = halved(page, page.screenshot())
    page.close()
    return picture


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("out", type=Path)
    p.add_argument("--answers", type=Path, help="where answers.json goes (OUT-answers)")
    p.add_argument("--view", help="only this one")
    p.add_argument("--theme", default="light", choices=("light", "dark", "projector"))
    p.add_argument("--deuteranopia", dest="vision", action="store_const", const="deuteranopia")
    p.add_argument("--greyscale", dest="vision", action="store_const", const="greyscale")
    args = p.parse_args()
    views = {n: v for n, v in load_views().items() if args.view in (None, n)}
    traces = {path: load(path) for path in sorted(RECORDINGS.glob("*.glass"))}
    plan = {}
    for name, view in views.items():
        try:
            plan[name] = moments(view, traces)
        except LookupError as error:  # say so, and make the other views' pictures
            print(error, file=sys.stderr)
    secret = args.answers or args.out.with_name(f"{args.out.name}-answers")
    for folder in (args.out, secret):
        folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures(views, plan, args.theme, args.vision):
        (args.out / name).write_bytes(picture)
    _update(args.out / "questions.json", {name: [a.question for a in views[name].asks] for name in plan})
    _update(secret / "answers.json", {f"{n}-{i}": list(m.answers) for n, pair in plan.items() for i, m in enumerate(pair, 1)})
    _update(secret / "moments.json", {f"{n}-{i}": [m.recording.name, m.step] for n, pair in plan.items() for i, m in enumerate(pair, 1)})


def _update(path: Path, entries: dict[str, list]) -> None:
    """Entries of other views stay."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | entries, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
