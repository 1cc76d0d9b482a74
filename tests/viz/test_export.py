"""Files that leave the page: pictures, a run in one file that plays from disk, a timeline; and what a stranger puts in them."""

from __future__ import annotations

import json
import struct
import time
from contextlib import contextmanager
from xml.etree import ElementTree

import numpy as np
import pytest

from engine.chrome_trace import chrome_trace
from engine.trace import TABLES, Trace
from tests.viz.test_stage_browser import browser, stage, until  # noqa: F401
from tests.viz.test_stage_browser import pytestmark as needs_chromium
from tests.viz.test_stage_hub import Browser, setup
from tests.viz.test_stage_support import HOSTILE, VIEWS, HandSource, caption, make_trace
from viz.stage import export
from viz.stage.composer import Composer
from viz.stage.export import MAX_BYTES, MAX_STEPS, Film, choose, offer_timeline, thin
from viz.stage.source import RecordingSource
from viz.view import ViewState

TWO = ((VIEWS["batching"], (700, 480)), (VIEWS["blocks"], (460, 480)))


def composer() -> Composer:
    return Composer(HandSource(), VIEWS, caption, lambda trace, live, selection: dict.fromkeys(live), {})


# ---- which steps ----


def test_without_a_wish_the_three_hundred_steps_around_are_taken():
    trace = make_trace()
    assert choose(trace, 200, None, None).tolist() == list(range(50, 350))
    assert choose(trace, 0, None, None).tolist() == list(range(300))
    assert choose(trace, 399, None, None).tolist() == list(range(100, 400))


def test_a_longer_range_is_thinned_evenly_and_keeps_the_step_looked_at():
    trace = make_trace()
    assert choose(trace, 15, 10, 20).tolist() == list(range(10, 21)) == choose(trace, 15, 20, 10).tolist()
    whole = choose(trace, 201, 0, 10**6)
    assert 201 in whole and len(whole) <= MAX_STEPS and set(np.diff(whole).tolist()) == {2}
    assert choose(trace, 7, 5000, 6000).tolist() == [7]
    assert thin(np.arange(10), 5, 3).tolist() == [2, 5, 8]


# ---- routes ----


@contextmanager
def connected(source=None, **hello):
    kit = setup(source)
    offer_timeline(kit.hub, chrome_trace)
    with kit.client.websocket_connect("/glass/ws") as ws:
        kit.browser = Browser(ws, **hello)
        kit.get = lambda path, **query: kit.client.get(f"/glass/{path}", params={"viewer": kit.browser.welcome["viewer"], **query})
        yield kit


def test_the_page_is_told_what_is_offered():
    with connected() as kit:
        assert kit.browser.welcome["offers"] == ["trace"]


def test_a_figure_has_the_size_of_its_picture_the_summary_and_the_link():
    with connected() as kit:
        answer = kit.get("figure.json", view="blocks", step=20, link="http://h/<b>?rec=x")
        figure = answer.json()
        assert (figure["layout"]["width"], figure["layout"]["height"]) == (1280, 720)
        assert "blocks are in use" in figure["layout"]["meta"]["summary"] and figure["layout"]["meta"]["title"] == "Paged blocks"
        assert figure["layout"]["annotations"][-1]["text"] == "http://h/&lt;b&gt;?rec=x"


@pytest.mark.parametrize("path", ["figure.json", "export", "trace.json"])
def test_who_is_not_watching_gets_no_file(path):
    with connected() as kit:
        for viewer in ("x", "", "../x", "\0"):
            assert kit.get(path, viewer=viewer, view="blocks").status_code == 404


@pytest.mark.parametrize("query", [{"view": "nothing"}, {"view": "../blocks"}, {"view": ""}])
def test_a_view_that_does_not_exist_is_a_sentence(query):
    with connected() as kit:
        answer = kit.get("figure.json", **query)
        assert answer.status_code == 409 and answer.json()["sentence"] == "There is no view of that name."


def test_nothing_recorded_is_a_sentence_and_a_broken_view_is_still_a_picture():
    with connected(RecordingSource(Trace())) as kit:
        for path in ("export", "trace.json"):
            assert "Nothing has been recorded" in kit.get(path).json()["sentence"]
        assert kit.get("figure.json", view="blocks", step="x" * 9).status_code == 200
    with connected() as kit:
        assert "could not be drawn" in kit.get("figure.json", view="broken", step=3).json()["layout"]["meta"]["summary"]


def test_the_timeline_is_the_chrome_trace():
    with connected() as kit:
        answer = kit.get("trace.json")
        assert "glass-engine-step-60.trace.json" in answer.headers["content-disposition"]
        assert json.loads(answer.text)["otherData"]["steps"] == 61


def test_one_person_gets_so_many_files_a_minute(monkeypatch):
    monkeypatch.setattr(export, "PER_MINUTE", 2)
    with connected() as kit:
        assert [kit.get("trace.json").status_code for _ in range(3)] == [200, 200, 409]
        assert kit.get("figure.json", view="blocks").status_code == 200


# ---- one file ----


def test_a_file_of_three_hundred_steps_is_small_and_the_same_every_time():
    film = Film("Glass Engine", TWO, ViewState(), (1280, 720))
    trace = make_trace()
    first, note = film.develop(composer(), trace, choose(trace, 200, None, None), 200)
    assert len(first) < MAX_BYTES and note == "300 steps, 50 to 349"
    assert film.develop(composer(), trace, choose(trace, 200, None, None), 200)[0] == first
    static = Film("Glass Engine", (TWO[1],), ViewState(), (1280, 720))
    alone, _ = static.develop(composer(), trace, np.arange(6, 12), 6)
    assert len(alone) < len(first)


def test_a_file_that_would_be_too_large_has_fewer_steps_and_says_so(monkeypatch):
    size = len(Film("x", TWO, ViewState(), (1280, 720)).develop(composer(), make_trace(), np.arange(2), 0)[0])
    monkeypatch.setattr(export, "MAX_BYTES", size + 40_000)
    with connected(panels=[{"view": "heavy", "w": 900, "h": 500}]) as kit:
        answer = kit.get("export", step=30, first=0, last=60)
        assert answer.status_code == 200 and len(answer.content) <= size + 40_000
        assert "%2C%20every%20" in answer.headers["x-glass-note"]
    monkeypatch.setattr(export, "MAX_BYTES", 1000)
    with connected() as kit:
        assert kit.get("export").json()["code"] == "export_too_large"


def poll(page, condition: str, seconds: float = 20.0) -> None:
    """until() where a page forbids eval."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.05)


def hostile_trace() -> Trace:
    trace = make_trace(names=tuple(HOSTILE))
    meta = {
        **trace.meta,
        "source": "recording",
        "model": {"name": HOSTILE[3]},
        "device": HOSTILE[0],
        "commit": HOSTILE[1],
        "date": HOSTILE[2],
    }
    return Trace({name: getattr(trace, name) for name in TABLES}, trace.sequences, trace.token_texts, meta)


@pytest.fixture
def from_disk(browser, tmp_path):  # noqa: F811
    """Opens a file: no network, no error on the page, no request but the file's own."""
    problems, asked = [], []

    @contextmanager
    def open_(content: bytes, name: str = "run.html", size=(1280, 720)):
        file = tmp_path / name
        file.write_bytes(content)
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, offline=True)
        page = context.new_page()
        page.on("pageerror", lambda e: problems.append(str(e)))
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.on("request", lambda r: asked.append(r.url) if not r.url.startswith(("data:", "blob:", "file:")) else None)
        page.goto(file.as_uri())
        if name.endswith(".html"):
            poll(page, "Boolean(window.glass && glass.stats.updates > 0 && glass.stage.shown().every((p) => p.model && p.model.figure))")
        yield page
        context.close()

    yield open_
    assert problems == [] and asked == []


def made(trace: Trace, views: tuple[str, ...] = ("batching", "blocks"), at: int = 60, steps: np.ndarray | None = None) -> bytes:
    panels = tuple((VIEWS[name], size) for name, size in zip(views, ((700, 480), (460, 480))))
    return Film("Glass Engine", panels, ViewState(), (1280, 720)).develop(
        composer(), trace, np.arange(40, 90) if steps is None else steps, at
    )[0]


COUNT = "document.querySelector('.glass-count').textContent"


@needs_chromium
def test_the_file_plays_from_disk_without_a_network(from_disk):
    with from_disk(made(make_trace(), steps=np.arange(40, 90, 2))) as page:
        assert page.evaluate(COUNT) == "Step 60 of 88" and page.evaluate("glass.stats.transport") == "file"
        assert page.text_content(".glass-source") == "recording" and "NVIDIA H200 · 2026-11-30" in page.text_content(".glass-device")
        assert page.text_content(".glass-sentence").startswith("Step 60") and page.locator(".glass-chip:visible").count() >= 4
        assert "requests share one step" in page.get_attribute(".glass-canvas", "aria-label")
        assert not page.locator(".glass-form").is_visible() and not page.locator(".glass-online").first.is_visible()
        before = page.evaluate("document.querySelector('.glass-canvas').toDataURL()")
        for key, shown in (("ArrowRight", 62), ("ArrowRight", 64), ("ArrowLeft", 62), ("Home", 40), ("ArrowRight", 42)):
            page.keyboard.press(key)
            poll(page, f"{COUNT} === 'Step {shown} of 88'")
        assert page.evaluate("document.querySelector('.glass-canvas').toDataURL()") != before
        scrubber = page.locator(".glass-scrubber").bounding_box()
        page.mouse.click(scrubber["x"] + scrubber["width"] / 2, scrubber["y"] + 10)
        poll(page, f"{COUNT} === 'Step 64 of 88'")
        page.select_option(".glass-pace", "32")
        page.keyboard.press("Space")
        poll(page, f"{COUNT} === 'Step 88 of 88' && glass.stage.status.state === 'idle'")
        page.locator(".glass-chip").first.click()
        poll(page, "glass.state.selection.startsWith('seq:')")
        page.click(".glass-tools [aria-label='Light or dark']")
        assert page.get_attribute(".glass-root", "data-theme") == "dark"
        page.keyboard.press("i")
        assert page.locator(".glass-drawer").is_visible() and not page.locator(".glass-drawer details").is_visible()
        assert page.evaluate("glass.send('prompt', {text: 'x'})")["code"] == "recording"


@needs_chromium
@pytest.mark.parametrize("size", [(1280, 720), (1920, 1200), (900, 500)])
def test_the_file_is_scaled_to_its_window_and_clicks_still_hit(from_disk, size):
    with from_disk(made(make_trace(), ("blocks",)), size=size) as page:
        box = page.evaluate(
            "(({left, right, top, bottom}) => [left, right, top, bottom])(document.querySelector('.glass-root').getBoundingClientRect())"
        )
        assert min(box) >= -0.5 and box[1] <= size[0] + 0.5 and box[3] <= size[1] + 0.5
        assert max((box[1] - box[0]) / size[0], (box[3] - box[2]) / size[1]) == pytest.approx(1, abs=0.01)
        at = page.evaluate("""(() => { const p = glass.stage.panels[0], b = p.painter.box(p.marks()[30], p.axes), r = p.plot.getBoundingClientRect();
          const k = r.width / p.plot.clientWidth; return [r.left + (b.x + b.w / 2) * k, r.top + (b.y + b.h / 2) * k]; })()""")
        page.mouse.click(*at)
        poll(page, "glass.state.selection === 'page:30'")


@needs_chromium
def test_a_strangers_words_stay_words_in_the_file(from_disk):
    content = made(hostile_trace(), ("hostile", "broken"))
    assert b"canary" not in content
    with from_disk(content) as page:
        page.keyboard.press("i")
        text = page.evaluate("document.querySelector('.glass-root').textContent")
        assert all(hostile in text for hostile in HOSTILE)
        assert page.evaluate("window.canary") is None and page.evaluate("document.querySelectorAll('.glass-root img').length") == 0


@needs_chromium
def test_pictures_are_downloaded_with_their_words(stage, from_disk, tmp_path):  # noqa: F811
    trace = hostile_trace()
    with stage(RecordingSource(trace, playing=False), ("hostile", "blocks")) as page:
        page.keyboard.press("e")
        assert page.evaluate("document.activeElement.textContent") == "Picture (PNG)"
        with page.expect_download() as download:
            page.keyboard.press("Enter")
        assert download.value.suggested_filename == "glass-hostile-step-0.png"
        download.value.save_as(tmp_path / "a.png")
        head = (tmp_path / "a.png").read_bytes()[:24]
        assert head[:4] == b"\x89PNG" and struct.unpack(">II", head[16:]) == (1920, 1080)
        page.locator(".glass-plot").nth(1).click(position={"x": 3, "y": 3})
        page.keyboard.press("e")
        page.keyboard.press("ArrowDown")
        with page.expect_download() as download:
            page.keyboard.press("Enter")
        assert download.value.suggested_filename == "glass-blocks-step-0.svg"
        page.locator(".glass-plot").nth(0).click(position={"x": 3, "y": 3})
        with page.expect_download() as download:
            page.evaluate("void glass.stage.share.picture('svg')")
        download.value.save_as(tmp_path / "b.svg")
        assert page.evaluate("window.canary") is None
    content = (tmp_path / "b.svg").read_bytes()
    root = ElementTree.fromstring(content)
    assert [child.tag.rsplit("}")[-1] for child in root][:2] == ["title", "desc"]
    assert root[0].text == HOSTILE[0] and root[1].text == HOSTILE[0] * 2 and root.get("viewBox") == "0 0 1280 720"
    words = "".join(root.itertext())
    assert all(hostile in words for hostile in HOSTILE), "labels, legend and badges"
    assert not [e for e in root.iter() if e.tag.rsplit("}")[-1] in ("script", "foreignObject")]
    assert not [name for e in root.iter() for name in e.attrib if name.lower().startswith("on")]
    with from_disk(content, "b.svg") as page:
        assert page.evaluate("window.canary") is None


@needs_chromium
def test_the_menu_makes_a_file_of_the_range_asked_for(stage, from_disk, tmp_path):  # noqa: F811
    with stage() as page:
        page.click(".glass-tools [aria-haspopup=menu]")
        page.locator(".glass-item", has_text="one HTML file").click()
        page.get_by_label("First step").fill("20")
        page.get_by_label("Last step").fill("45")
        with page.expect_download() as download:
            page.get_by_role("button", name="Save file").click()
        download.value.save_as(tmp_path / "run.html")
        until(page, "document.querySelector('.glass-notice').textContent.includes('26 steps, 20 to 45')")
        sizes = page.evaluate("glass.stage.shown().map((p) => p.size())")
    with from_disk((tmp_path / "run.html").read_bytes()) as page:
        assert page.evaluate("[glass.stage.at.first, glass.stage.at.last]") == [20, 45]
        assert page.evaluate("glass.stage.shown().map((p) => p.size())") == sizes, "the same layout as where it was made"


@needs_chromium
def test_a_refused_download_shows_its_sentence(stage):  # noqa: F811
    class Empty(HandSource):
        async def save_recording(self, room, viewer):
            raise export.Refused("nothing_recorded", "Nothing has been recorded yet; run a prompt first.")

    with stage(Empty()) as page:
        page.keyboard.press("e")
        page.locator(".glass-item", has_text="Save recording").click()
        until(page, "document.querySelector('.glass-notice.glass-bad:not([hidden])')?.textContent.includes('Nothing has been recorded')")
