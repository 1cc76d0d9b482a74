"""Marks in a real Chromium: the axis of continuous batching is chosen by a mark, Shift + arrow goes through all marks."""

from __future__ import annotations

import pytest

from engine.recording import load
from tests.viz.strangers import DRAWN, RECORDINGS
from tests.viz.test_stage_browser import CHROMIUM, FLAGS, until
from tests.viz.test_stage_support import serve
from viz.registry import load_views
from viz.stage.hub import Hub, HubConfig
from viz.stage.source import RecordingSource

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: set CHROMIUM or install it")


@pytest.fixture(scope="module")
def batching():
    hub = Hub(RecordingSource(load(RECORDINGS / "flood-h200.glass"), playing=False), load_views(), config=HubConfig(max_fps=60))
    with serve(hub) as url, playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = chromium.new_page(viewport={"width": 1280, "height": 720})
        page.goto(f"{url}?embed=batching&step=30")
        page.wait_for_function(DRAWN, timeout=20_000)
        yield page
        chromium.close()


def test_shift_and_an_arrow_visit_every_mark(batching) -> None:
    batching.locator(".glass-focus").first.focus()
    count = batching.evaluate("glass.stage.panels[0].marks().length")
    seen = set()
    for _ in range(count):
        batching.keyboard.press("Shift+ArrowRight")
        seen.add(batching.evaluate("glass.stage.panels[0].focusAt"))
    assert seen == set(range(count)) and batching.evaluate("glass.stage.state.step") == 30


def test_enter_on_the_axis_mark_changes_the_axis_and_back(batching) -> None:
    batching.locator(".glass-focus").first.focus()
    for axis in ("time", "step"):
        batching.evaluate(f"glass.stage.panels[0].focusAt = glass.stage.panels[0].marks().findIndex((m) => m[0] === 'axis:{axis}')")
        batching.keyboard.press("Enter")
        other = "step" if axis == "time" else "time"
        until(batching, f"glass.stage.panels[0].marks().some((m) => m[0] === 'axis:{other}')")
        assert batching.evaluate("glass.stage.state.axis") == axis


def test_a_badge_that_is_cut_off_says_all_of_itself_in_the_inspector(batching) -> None:
    badge = batching.locator(".glass-badge[data-kind=computed]").first
    whole = badge.get_attribute("title")
    assert whole.endswith("then the next begins")
    badge.click()
    until(
        batching,
        "document.querySelector('.glass-drawer') && document.querySelector('.glass-drawer').innerText.includes('then the next begins')",
    )
