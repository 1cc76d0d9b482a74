"""A whole talk by the clicker alone, in Chromium: on the recordings that ship, and on an engine that runs."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
from playwright.sync_api import TimeoutError

from benchmarks.browser import chromium, page, say, wait_live
from benchmarks.record import record
from engine.audience import LiveSource
from engine.config import CacheConfig, EngineConfig, ModelSource
from engine.recording import decode, encode, load
from engine.session import Session
from engine.workloads import WORKLOADS
from tests.app.test_page import until
from tests.viz.test_stage_support import serve
from tests.viz.test_tour import FAST, RECORDINGS
from viz.registry import load_chapters, load_views
from viz.stage.hub import Hub, HubConfig
from viz.stage.lobby import Lobby, Shelf
from viz.stage.people import People
from viz.stage.source import RecordingSource
from viz.stage.tour import Tour
from viz.words.caption import caption
from viz.words.catalogue import words

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium")

CHAPTERS = load_chapters()
TOLD = "glass.stage.tour.told"
ARRIVED = f"{TOLD} && {TOLD}.phase !== 'going' && glass.stage.tour.serial === {TOLD}.go.serial && !glass.stage.credits"
SETTLED = "glass.stage.shown().every((p) => p.model && p.model.figure && p.model.items)"
GUESS = """() => {
  const tour = glass.stage.tour;
  for (const panel of glass.stage.shown())
    for (const mark of panel.marks()) {
      const box = tour.guessable(mark) && panel.painter.box(mark, panel.axes), at = panel.plot.getBoundingClientRect();
      if (!box || box.w < 4 || box.h < 4) continue;
      const [x, y] = [at.left + box.x + box.w / 2, at.top + box.y + box.h / 2];
      const hit = panel.hit(x, y, (m) => tour.guessable(m));
      if (hit >= 0) return [panel.marks()[hit][0], x, y];
    }
  return null;
}"""


def shipped(preset: str):
    found = sorted(RECORDINGS.glob(f"{preset}-*.glass"))
    return load(found[0]) if found else None


@contextmanager
def hosted(base, find=shipped):
    hub = Hub(
        Lobby(base, Shelf(decode, find)),
        load_views(),
        caption=caption,
        default_views=("blocks", "batching"),
        config=HubConfig(max_fps=60),
    )
    People(hub)
    Tour(hub, CHAPTERS, FAST)
    with serve(hub) as address:
        yield address


@pytest.fixture
def recorded():
    with hosted(RecordingSource(shipped("ragged"))) as address:
        yield address


@pytest.fixture(scope="module")
def session(tiny_llama):
    """The engine with a random model: here a byte is a token, so long prompts are cut."""
    config = EngineConfig(ModelSource(str(tiny_llama), "cpu", "float32"), CacheConfig(num_pages=96))
    with pytest.MonkeyPatch.context() as patch:
        for name, workload in WORKLOADS.items():
            patch.setitem(WORKLOADS, name, replace(workload, lines=tuple(replace(line, text=line.text[:700]) for line in workload.lines)))
        session = Session(config, own_process=False).start().wait_ready(60)
        yield session
        session.close()


@pytest.fixture(scope="module")
def live(session):
    with hosted(LiveSource(session)) as address:
        yield address


@pytest.fixture(scope="module")
def taken(session):
    """Recordings of that engine, as benchmarks/record.py takes them: with all that chapters have the engine make."""
    presets = {preset for chapter in CHAPTERS.values() for preset in chapter.presets}
    content = {preset: encode(record(session, preset)) for preset in sorted(presets)}
    with hosted(RecordingSource(decode(content["ragged"])), lambda preset: decode(content[preset])) as address:
        yield address


@contextmanager
def tab(address: str, query: str = "", **options):
    with page(address + query, **options) as found:
        problems: list[str] = []
        found.on("pageerror", lambda error: problems.append(str(error)))
        found.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        found.wait_for_function(SETTLED)
        yield found
        assert problems == []


def arrive(opened) -> dict:
    opened.wait_for_function(ARRIVED, timeout=30_000)
    return opened.evaluate(TOLD)


def press(opened, key: str = "PageDown") -> dict:
    """One press of the clicker, until the stage stands where it leads."""
    before = opened.evaluate(f"({TOLD} || {{go: {{serial: 0}}}}).go.serial")
    opened.keyboard.press(key)
    opened.wait_for_function(f"{TOLD} && {TOLD}.go.serial !== {before}", timeout=30_000)
    return arrive(opened)


def begin(opened, name: str, beat: int) -> dict:
    say(opened, "chapter", name=name, beat=beat)
    opened.wait_for_function(f"{ARRIVED} && {TOLD}.chapter === {name!r} && {TOLD}.beat === {beat}", timeout=30_000)
    return arrive(opened)


def seen_step(opened) -> int:
    """The step on screen, once it stays the same."""
    steps = [None, opened.evaluate("glass.stage.at.step")]
    while steps[-1] != steps[-2]:
        opened.wait_for_timeout(300)
        steps.append(opened.evaluate("glass.stage.at.step"))
    return steps[-1]


def guess(opened) -> str:
    """Click the first mark that may be guessed, wherever it is drawn, and again where the picture changed under the mouse;
    the mark that the page took it for."""
    for _ in range(6):
        opened.wait_for_function(f"({GUESS})()", timeout=30_000)
        mark, x, y = opened.evaluate(GUESS)
        opened.wait_for_timeout(50)
        if opened.evaluate(GUESS) != [mark, x, y]:
            continue  # it is still being drawn
        opened.mouse.click(x, y)
        try:
            opened.wait_for_function(f"{TOLD}.predict.guess", timeout=5_000)
        except TimeoutError:
            continue
        return opened.evaluate(f"{TOLD}.predict.guess")
    raise AssertionError("no click on a mark became a guess")


MISSING = ("ui.chapter.notRecorded", "ui.chapter.notMade")


def talk(opened, lacks: bool = False) -> list[tuple[str, int]]:
    """Every beat of every chapter, in order; each question is guessed at. `lacks`: a beat may say that what it shows was
    not recorded."""
    seen: list[tuple[str, int]] = []
    missing = [words("en")(key) for key in MISSING]
    for chapter in CHAPTERS.values():
        for index, beat in enumerate(chapter.beats):
            told = press(opened)
            where = f"{chapter.name} {index}: {told}"
            assert (told["chapter"], told["beat"]) == (chapter.name, index), where
            seen.append((told["chapter"], told["beat"]))
            if lacks and beat.job and told["note"] == missing[0]:
                assert "sentence" not in told and "predict" not in told
                assert opened.text_content(".glass-asks") == missing[0], where
                continue
            assert told.get("sentence"), where
            opened.wait_for_function(f"document.querySelector('.glass-sentence').textContent === {told['sentence']!r}")
            if beat.predict is not None:
                assert told["phase"] == "asked", where
                mark = guess(opened)
                told = press(opened)
                if lacks and beat.predict.job and told["note"] == missing[0]:
                    continue
                assert told["phase"] == "revealed" and told["predict"]["right"] and told["predict"]["reveal"], where
                assert told["predict"]["verdict"] == ("right" if mark in told["predict"]["right"] else "wrong")
                assert opened.text_content(".glass-asks") == told["predict"]["reveal"]
    return seen


ALL = [(c.name, i) for c in CHAPTERS.values() for i in range(len(c.beats))]


def test_a_whole_talk_on_the_recordings_by_the_clicker_alone(recorded):
    with tab(recorded) as opened:
        assert talk(opened, lacks=True) == ALL
        assert opened.evaluate(f"{TOLD}.recorded")
        opened.keyboard.press("PageDown")
        until(lambda: "last chapter" in (opened.text_content(".glass-notice") or ""))


def test_a_whole_talk_on_an_engine_by_the_clicker_alone(live):
    with tab(live) as opened:
        wait_live(opened)
        assert talk(opened) == ALL
        assert not opened.evaluate(f"{TOLD}.recorded") and opened.evaluate("glass.stage.status.live")
        assert opened.evaluate("[glass.stage.status.state, glass.stage.status.pace]") == ["paused", FAST.steps_per_s]


def test_a_whole_talk_on_recordings_that_bring_everything(taken):
    with tab(taken) as opened:
        assert talk(opened) == ALL
        assert opened.evaluate(f"{TOLD}.recorded")


def test_back_and_forth_shows_the_same_steps(live):
    with tab(live) as opened:
        wait_live(opened)
        begin(opened, "continuous_batching", 0)
        steps = [seen_step(opened)]
        for _ in range(3):
            press(opened)
            steps.append(seen_step(opened))
        assert steps == sorted(steps) and len(set(steps)) >= 3
        last = opened.evaluate("glass.stage.at.last")
        for key, expected in (("PageUp", steps[2]), ("PageUp", steps[0]), ("PageDown", steps[2]), ("PageDown", steps[3])):
            press(opened, key)
            until(lambda expected=expected: opened.evaluate("glass.stage.at.step") == expected)
        assert opened.evaluate("glass.stage.at.last") == last, "nothing was run again"


def test_a_knob_is_tried_on_the_beats_example_and_the_talk_goes_on_without_it(live):
    mode = "glass.stage.status.knobs.mode.value"
    with tab(live) as opened:
        wait_live(opened)
        told = begin(opened, "kv_cache", 4)
        assert told["try"]["knob"] == "mode" and opened.evaluate(mode) == "paged"
        before = opened.evaluate("glass.stage.at.last")
        opened.locator(".glass-strip button", has_text="Try this").click()
        opened.locator("dialog[open] button[value=yes]").click()
        until(lambda: opened.evaluate(mode) == "none" and opened.evaluate("glass.stage.at.last") > before + 5)
        assert opened.evaluate("glass.stage.status.state") != "paused" and opened.evaluate(TOLD)["beat"] == 4
        told = press(opened)
        while told["beat"] != 5:  # over the beats before, on a run of its own
            opened.wait_for_timeout(50)
            told = arrive(opened)
        assert told["sentence"] and not told["recorded"] and opened.evaluate(mode) == "paged"


def test_a_link_to_a_beat_leads_there_and_a_reload_too(recorded):
    with tab(recorded, "?chapter=kv_cache&beat=2") as opened:
        told = arrive(opened)
        assert (told["chapter"], told["beat"]) == ("kv_cache", 2)
        begin(opened, "kv_cache", 1)
        until(lambda: "chapter=kv_cache" in opened.evaluate("location.search") and "beat=1" in opened.evaluate("location.search"))
        opened.reload()
        opened.wait_for_function("window.glass && window.glass.stats.frames > 0")
        told = arrive(opened)
        assert (told["chapter"], told["beat"]) == ("kv_cache", 1)
        say(opened, "chapter_end")
        until(lambda: "chapter" not in opened.evaluate("location.search"))
        assert not opened.locator(".glass-strip").is_visible()


def test_a_question_is_answered_with_the_keyboard(recorded):
    with tab(recorded) as opened:
        assert begin(opened, "paged_attention", 1)["phase"] == "asked"
        opened.focus(".glass-focus")
        for _ in range(3):
            opened.keyboard.press("ArrowRight")
        opened.keyboard.press("Enter")
        opened.wait_for_function(f"{TOLD}.predict.guess")
        assert opened.evaluate("glass.state.selection") == opened.evaluate(f"{TOLD}.go.select"), "a guess is no selection"
        assert "Click a block" in opened.text_content(".glass-strip [aria-live]")
        press(opened)
        assert opened.text_content(".glass-verdict") in ("Right", "Not this time")
        assert "got block" in opened.text_content(".glass-strip [aria-live]")


@pytest.mark.parametrize("size", [(1280, 720), (1280, 600), (390, 844)])
@pytest.mark.parametrize("theme", ["light", "projector"])
def test_the_strip_fits_on_every_screen(recorded, size, theme):
    small = """() => [...document.querySelectorAll('.glass-strip *, .glass-contents *')].filter((e) => e.offsetParent && !e.classList.contains('glass-hidden')
      && e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < glass.stage.look.font).map((e) => e.className)"""
    outside = """() => [...document.querySelectorAll('.glass-strip, .glass-strip *, .glass-header > *')]
      .filter((e) => e.offsetParent && !e.classList.contains('glass-hidden'))
      .filter((e) => { const b = e.getBoundingClientRect(); return b.right > innerWidth + 1 || b.left < -1; }).map((e) => e.className)"""
    with tab(recorded, f"?theme={theme}", width=size[0], height=size[1]) as opened:
        begin(opened, "paged_attention", 1)
        for _ in range(2):
            assert opened.evaluate(
                "[document.documentElement.scrollHeight - innerHeight, document.documentElement.scrollWidth - innerWidth]"
            ) == [0, 0]
            assert opened.evaluate(small) == [] and opened.evaluate(outside) == []
            press(opened)
        opened.click(".glass-chapters")
        assert opened.locator(".glass-contents").is_visible()
        assert opened.evaluate(small) == []
        opened.keyboard.press("Escape")
        assert not opened.locator(".glass-contents").is_visible()


@pytest.mark.parametrize("theme", ["light", "dark", "projector"])
def test_axe_finds_nothing_serious_in_a_chapter(recorded, theme):
    axe = pytest.importorskip("axe_core_python.sync_playwright", reason="axe-core-python is not installed")
    with tab(recorded, f"?theme={theme}") as opened:
        begin(opened, "paged_attention", 1)
        guess(opened)
        for menu in (False, True):
            if menu:
                press(opened)
                opened.click(".glass-chapters")
            found = axe.Axe().run(opened)["violations"]
            assert [(v["id"], [n["html"][:120] for n in v["nodes"]]) for v in found if v["impact"] in ("serious", "critical")] == []


def test_another_language_leaves_the_chapter_where_it_was(recorded):
    with tab(recorded) as opened:
        before = begin(opened, "paged_attention", 1)
        opened.evaluate("glass.stage.setLanguage([...document.querySelector('.glass-language').options].at(-1).value)")
        opened.wait_for_function("document.querySelectorAll('.glass-strip').length === 1 && !document.querySelector('.glass-strip').hidden")
        after = arrive(opened)
        assert (after["beat"], after["phase"], after["go"]) == (before["beat"], "asked", before["go"])
        guess(opened)
