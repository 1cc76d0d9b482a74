"""The stage in a real Chromium: what is drawn, what survives an update, what a stranger's text can do."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import contextmanager

import pytest

from tests.viz.test_stage_support import HOSTILE, VIEWS, HandSource, caption, serve
from tests.viz.test_tour import FAST, chapter, text
from viz.chapter import TryThis
from viz.stage.hub import Hub, HubConfig
from viz.stage.people import People
from viz.stage.source import RecordingSource
from viz.stage.tour import Tour

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: set CHROMIUM or install it")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--js-flags=--expose-gc",
]  # fmt: skip
DRAWN = "window.glass && glass.stats.updates > 0 && window.Plotly && glass.stage.shown().every((p) => p.model && p.model.figure)"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def stage(browser):
    """Opens stages; at the end no page has thrown and none has talked to another host."""
    pages, errors, strangers = [], [], []

    @contextmanager
    def open_(source=None, views=("batching", "blocks"), query="", size=(1280, 720), wait=DRAWN, prepare=None, path="", **context):
        source = source or HandSource()
        hub = Hub(source, VIEWS, caption=caption, default_views=views, config=HubConfig(max_fps=60))
        with serve(hub) as url:
            page = browser.new_page(viewport={"width": size[0], "height": size[1]}, **context)
            pages.append(page)
            page.on("pageerror", lambda e: errors.append(str(e)))
            page.on("request", lambda r: strangers.append(r.url) if not r.url.startswith(("http://127.0.0.1", "data:", "blob:")) else None)
            page.source, page.hub = source, hub
            if prepare:
                prepare(page)
            page.goto(url + path + query)
            page.wait_for_function(wait, timeout=20_000)
            yield page
            page.close()

    yield open_
    assert errors == [] and strangers == []


def until(page, condition: str, seconds: float = 5.0):
    page.wait_for_function(condition, timeout=seconds * 1000)


def heard(source, name: str, seconds: float = 3.0) -> dict:
    """The arguments of the newest command of a name."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = [args for n, args in source.commands if n == name]
        if found:
            return found[-1]
        time.sleep(0.02)
    raise AssertionError(f"no {name} in {source.commands}")


def advance(page, steps: int = 1) -> None:
    """Engine steps, each drawn before the next."""
    for _ in range(steps):
        page.source.advance()
        until(page, f"glass.stage.at.last === {page.source.at} && !glass.stage.credits")


PIXELS = """(index) => {
  const canvas = glass.stage.panels[index].canvas;
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const colors = new Set();
  for (let i = 0; i < data.length; i += 64) if (data[i + 3]) colors.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
  return colors.size;
}"""


def test_two_panels_draw_and_every_bar_has_its_words(stage):
    with stage() as page:
        assert page.evaluate(PIXELS, 0) > 8 and page.evaluate(PIXELS, 1) > 5
        assert page.text_content(".glass-sentence") == "Step 60: F joined."
        assert page.text_content(".glass-count") == "Step 60 of 60"
        assert page.text_content(".glass-model") == "SmolLM2-135M-Instruct"
        assert page.locator(".glass-chip:visible").count() >= 4
        before = page.evaluate("document.querySelector('.glass-canvas').toDataURL()")
        advance(page, 9)
        assert page.text_content(".glass-count") == "Step 69 of 69"
        assert page.evaluate("document.querySelector('.glass-canvas').toDataURL()") != before
        assert 0 <= page.evaluate("glass.stats.latency") < 5000 and page.evaluate("glass.stats.transport") == "websocket"


def test_a_change_that_was_on_its_way_when_the_tab_moved_is_left_out(stage):
    """It changes a picture that the tab has no more; the room's first frame brings all of its own."""
    with stage(views=("batching",)) as page:
        page.evaluate("""() => { const { stage } = glass, { items } = stage.models.get("batching"), { at } = stage;
                                 stage.moved({ room: "main" });
                                 stage.frames({ ...at, stamp: stage.stamp, panels: [{ view: "batching", items }] }, []); }""")
        until(page, "!glass.stage.credits")
        assert page.evaluate("glass.stage.models.has('batching')") is False


def test_zoom_survives_updates_and_a_double_click_resets_it(stage):
    with stage(views=("attention",)) as page:
        ranges = "glass.stage.panels[0].axes.div._fullLayout.xaxis.range"
        box = page.locator(".glass-plot").first.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 3)
        page.mouse.wheel(0, -400)
        until(page, f"{ranges}[1] - {ranges}[0] < 480")
        time.sleep(0.4)
        zoomed = page.evaluate(ranges)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2 + 60, box["y"] + box["height"] / 3, steps=4)
        page.mouse.up()
        until(page, f"Math.abs({ranges}[0] - {zoomed[0]}) > 1")
        panned = page.evaluate(ranges)
        advance(page, 5)
        assert page.evaluate(ranges) == panned
        assert page.evaluate(
            "glass.stage.panels[0].axes.project('xy').inverse.x(glass.stage.panels[0].axes.project('xy').left)"
        ) == pytest.approx(panned[0])
        assert page.locator(".glass-reset:visible").count() == 1
        time.sleep(0.5)
        page.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + box["height"] / 3)
        until(page, f"{ranges}[0] === 0 && {ranges}[1] === 500")
        assert page.locator(".glass-reset:visible").count() == 0


def test_a_strangers_text_is_shown_literally_everywhere(stage):
    source = HandSource(names=tuple(HOSTILE))
    source.model = HOSTILE[0]
    source.fault = {"code": "x", "sentence": HOSTILE[3]}
    source.extra = {
        "hint": HOSTILE[1],
        "presets": [{"name": "a", "title": HOSTILE[0]}],
        "knobs": {HOSTILE[0]: {"value": HOSTILE[1], "choices": [HOSTILE[1], HOSTILE[3]], "cost": "nothing", "label": HOSTILE[2]}},
        "progress": {"text": HOSTILE[0], "fraction": 0.5},
    }
    with stage(source, ("hostile", "broken")) as page:
        page.keyboard.press("i")
        page.locator(".glass-plot").first.click(position={"x": 250, "y": 60})
        until(page, "document.querySelector('.glass-what').textContent.includes('<img')")
        advance(page, 2)
        page.evaluate("glass.send('prompt', {text: `<img src=x onerror=window.canary=1>` + '${window.canary=1}'})")
        page.locator(".glass-plot").first.hover(position={"x": 260, "y": 70})
        text = page.evaluate("document.querySelector('.glass-root').textContent")
        for hostile in (HOSTILE[0], HOSTILE[1], HOSTILE[2], HOSTILE[3]):
            assert hostile in text
        assert page.text_content(".glass-model") == HOSTILE[0]
        assert page.evaluate("window.canary") is None
        assert page.evaluate("document.querySelectorAll('.glass-root img, .glass-root b b, .glass-root script').length") == 0
        assert page.evaluate("glass.stage.panels[1].note.textContent").count("<img") == 1


def test_keys_steer_the_transport_and_keep_out_of_inputs(stage):
    with stage() as page:
        page.keyboard.press("Space")
        heard(page.source, "play")
        until(page, "glass.stage.status.state === 'running'")
        page.keyboard.press("Space")
        heard(page.source, "pause")
        page.keyboard.press("ArrowRight")
        assert heard(page.source, "step") == {"n": 1}
        until(page, "document.querySelector('.glass-count').textContent === 'Step 61 of 61'")
        page.keyboard.press("ArrowLeft")
        until(page, "glass.state.step === 60 && document.querySelector('.glass-count').textContent === 'Step 60 of 61'")
        page.keyboard.press("Home")
        until(page, "glass.state.step === 0")
        page.keyboard.press("End")
        until(page, "glass.state.step === null")
        for key in ("PageDown", "PageUp"):
            page.keyboard.press(key)
        page.keyboard.press("i")
        assert page.locator(".glass-drawer").is_visible()
        page.keyboard.press("b")
        assert page.locator(".glass-blank").is_visible()
        page.keyboard.press("b")
        page.keyboard.press("p")
        assert page.get_attribute(".glass-root", "data-theme") == "projector"
        page.keyboard.press("?")
        assert page.locator("dialog").is_visible()
        page.keyboard.press("Escape")
        page.keyboard.press("1")
        assert page.locator(".glass-panel:visible").count() == 1
        page.keyboard.press("1")
        assert page.locator(".glass-panel:visible").count() == 2
        commands = len(page.source.commands)
        page.focus(".glass-input")
        page.keyboard.type("hi pib ?1 ")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("Home")
        assert page.input_value(".glass-input") == "hi pib ?1 " and len(page.source.commands) == commands
        page.keyboard.press("Enter")
        assert heard(page.source, "prompt") == {"text": "hi pib ?1 ", "max_tokens": 64, "temperature": 0}
        assert page.input_value(".glass-input") == ""
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement === document.body")


def test_drawer_and_bars_send_commands(stage):
    with stage() as page:
        page.keyboard.press("i")
        page.select_option(".glass-knobs select", "static")
        assert heard(page.source, "knob") == {"name": "mode", "value": "static"}
        page.locator(".glass-requests button", has_text="Stop").first.click()
        assert isinstance(heard(page.source, "abort")["request_id"], int)
        page.select_option(".glass-transport select", "8")
        assert heard(page.source, "pace") == {"value": 8}
        page.select_option(".glass-transport select", "free")
        page.select_option(".glass-header select", "ragged")
        assert heard(page.source, "preset") == {"name": "ragged"}
        until(page, "glass.stage.status.pace === null")
        assert page.locator(".glass-knobs select").nth(1).is_disabled()
        scrubber = page.locator(".glass-scrubber").bounding_box()
        page.mouse.click(scrubber["x"] + scrubber["width"] / 2, scrubber["y"] + 10)
        until(page, "glass.state.step === 30")
        page.locator(".glass-chip").first.click()
        until(page, "document.querySelector('.glass-chip').getAttribute('aria-pressed') === 'true'")
        assert page.evaluate("glass.state.selection").startswith("seq:")
        assert "selection=" in page.evaluate("(glass.stage.toUrl(), location.search)")


def test_marks_are_reached_by_arrows_and_chosen_with_enter_or_a_click(stage):
    with stage(views=("blocks",)) as page:
        page.focus(".glass-focus")
        assert page.text_content("[role=option]") == "Block 0"
        for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
            page.keyboard.press(key)
        assert page.text_content("[role=option]") == "Block 14"
        page.keyboard.press("Enter")
        assert page.evaluate("glass.state.selection") == "page:14"
        assert page.get_attribute("[role=option]", "aria-selected") == "true" and page.source.commands == []
        box = page.locator(".glass-plot").first.bounding_box()
        page.mouse.click(box["x"] + 20, box["y"] + 20)
        until(page, "glass.state.selection === 'page:0'")
        until(page, "document.querySelector('.glass-tip').textContent === 'Block 0'")


@pytest.mark.parametrize("size", [(1280, 720), (1280, 600), (1920, 1080), (390, 844)])
def test_the_page_never_scrolls_and_no_text_is_small(stage, size):
    small = """() => [...document.querySelectorAll('.glass-root *')].filter((e) => e.offsetParent && e.tagName !== 'OPTION'
      && ![...e.classList].some((c) => c === 'glass-focus' || c === 'glass-hidden') && !e.closest('.glass-focus')
      && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())
      && parseFloat(getComputedStyle(e).fontSize) < glass.stage.look.font)
      .map((e) => e.className + ':' + e.textContent)"""
    scroll = "[document.documentElement.scrollHeight - innerHeight, document.documentElement.scrollWidth - innerWidth]"
    with stage(views=("batching", "blocks", "attention"), size=size) as page:
        for _ in range(2):
            assert page.evaluate(scroll) == [0, 0]
            assert page.evaluate("document.querySelector('.glass-root').getBoundingClientRect().height") == size[1]
            assert page.evaluate(small) == []
            page.keyboard.press("p")


def test_panels_fit_their_boxes_after_hiding_and_resizing(stage):
    fits = """() => glass.stage.shown().every((p) => {
      const [w, h] = [p.plot.clientWidth, p.plot.clientHeight], l = p.axes.div._fullLayout;
      const canvas = p.canvas.getBoundingClientRect().width;
      return w > 100 && l.width === w && l.height === h && Math.abs(canvas - w) < 1 && p.painter.width === w;
    })"""
    with stage() as page:
        page.wait_for_function(fits)
        page.keyboard.press("i")
        page.wait_for_function(fits)
        page.set_viewport_size({"width": 1000, "height": 640})
        page.wait_for_function(fits)
        page.evaluate("document.querySelector('.glass-root').style.display = 'none'")
        advance(page, 3)
        page.evaluate("document.querySelector('.glass-root').style.display = ''")
        page.wait_for_function(fits)
        page.keyboard.press("2")
        page.wait_for_function(fits)
        page.keyboard.press("2")
        page.wait_for_function(fits)
        until(page, "true")
        assert dict(next(iter(page.hub.viewers.values())).panels)["blocks"][0] > 200


def test_three_hundred_updates_leave_no_nodes_behind(stage):
    count = "(gc(), document.querySelectorAll('*').length)"
    with stage(views=("heavy", "batching")) as page:
        page.keyboard.press("i")
        page.source.pace = None
        page.evaluate("window.before = 0")
        for _ in range(20):
            page.source.advance()
            time.sleep(0.02)
        nodes, heap = page.evaluate(count), page.evaluate("performance.memory.usedJSHeapSize")
        drawn = page.evaluate("glass.stats.updates")
        while page.evaluate("glass.stats.updates") < drawn + 300:
            for _ in range(10):
                page.source.advance()
                time.sleep(0.015)
        assert abs(page.evaluate(count) - nodes) < 60, "nodes of the chips and requests that came meanwhile"
        assert page.evaluate("performance.memory.usedJSHeapSize") < heap * 1.5 + 20e6


def test_without_websockets_the_page_polls(stage):
    with stage(prepare=lambda page: page.route_web_socket("**/glass/ws", lambda ws: ws.close())) as page:
        assert page.evaluate("glass.stats.transport") == "poll"
        advance(page, 4)
        assert page.text_content(".glass-count") == "Step 64 of 64"
        assert page.evaluate("glass.send('step', {n: 2})")["ok"]
        until(page, "document.querySelector('.glass-count').textContent === 'Step 66 of 66'")


def test_a_lost_connection_comes_back(stage):
    with stage() as page:
        page.evaluate("glass.stage.link.socket.close()")
        until(page, "glass.stats.reconnects === 1")
        advance(page, 2)
        assert page.text_content(".glass-count") == "Step 62 of 62"


def test_an_element_that_leaves_the_page_takes_its_connection_along(stage):
    with stage() as page:
        assert len(page.hub.viewers) == 1
        page.evaluate("window.old = document.querySelector('.glass-root'); old.remove()")
        end = time.monotonic() + 4
        while page.hub.viewers and time.monotonic() < end:
            time.sleep(0.05)
        assert not page.hub.viewers and page.source.left
        assert page.evaluate("old.childElementCount === 0 && window.glass === undefined")
        page.evaluate("document.querySelector('main').append(old); glassMount(old)")
        page.wait_for_function(DRAWN)


def test_an_empty_stage_invites_and_an_error_is_a_sentence(stage):
    class Empty(HandSource):
        def trace(self, room):
            return type(self.full)()

    source = Empty()
    with stage(source, wait="window.glass && glass.stats.updates > 0") as page:
        page.locator(".glass-empty button", has_text="Three ragged prompts").click()
        assert heard(source, "preset") == {"name": "ragged"}
        assert page.evaluate("glass.send('refuse', {})")["code"] == "no"
        assert page.text_content(".glass-notice span") == "Not today."
        page.click(".glass-notice button:visible")
        assert not page.locator(".glass-notice").is_visible()
        source.state, source.fault, source.moves = "dead", {"code": "engine", "sentence": "The engine stopped."}, 9
        page.locator(".glass-notice button", has_text="Restart").click()
        assert heard(source, "restart") == {}


def test_a_recording_goes_on_from_where_somebody_scrubbed(stage):
    source = RecordingSource(HandSource().full, playing=False)
    with stage(source) as page:
        assert page.text_content(".glass-source") == "recording"
        page.evaluate("glass.stage.seek(200)")
        until(page, "document.querySelector('.glass-count').textContent === 'Step 200 of 399'")
        page.keyboard.press("Space")
        until(page, "glass.state.step === null && glass.stage.at.step >= 200 && glass.stage.status.state === 'running'")


def test_inside_a_frame_the_page_does_not_grow(stage):
    with stage() as page:
        page.evaluate("""() => {
          const frame = document.createElement('iframe');
          frame.src = location.href; frame.id = 'outer'; frame.style.width = '1200px'; frame.style.height = '800px';
          document.body.replaceChildren(frame);
        }""")
        height = "document.querySelector('#outer').contentDocument.documentElement.scrollHeight"
        until(page, "(document.querySelector('#outer').contentWindow.glass || {stats: {}}).stats.updates > 0", 10)
        seen = []
        for _ in range(20):
            seen.append(page.evaluate(f"document.querySelector('#outer').style.height = ({height} + 20) + 'px', {height}"))
            time.sleep(0.02)
        stage_height = page.evaluate("document.querySelector('#outer').contentDocument.querySelector('.glass-root').offsetHeight")
        time.sleep(0.3)
        assert stage_height in (600, 720, 900)
        assert page.evaluate("document.querySelector('#outer').contentDocument.querySelector('.glass-root').offsetHeight") == stage_height


@pytest.mark.parametrize("theme", ["light", "dark", "projector"])
def test_axe_finds_nothing_serious(stage, theme):
    axe = pytest.importorskip("axe_core_python.sync_playwright", reason="axe-core-python is not installed")
    with stage(query=f"?theme={theme}") as page:
        page.keyboard.press("i")
        found = axe.Axe().run(page)["violations"]
        serious = [(v["id"], [n["html"][:120] for n in v["nodes"]]) for v in found if v["impact"] in ("serious", "critical")]
        assert serious == []


def test_reduced_motion_means_one_update_a_second(stage):
    with stage(reduced_motion="reduce") as page:
        drawn = page.evaluate("glass.stats.updates")
        for _ in range(30):
            page.source.advance()
            time.sleep(0.03)
        assert page.evaluate("glass.stats.updates") - drawn <= 3


# ---- the theme and the system's ----


def test_a_theme_that_was_chosen_stays_when_the_systems_changes(stage):
    with stage(color_scheme="light") as page:
        theme = "glass.stage.root.dataset.theme"
        page.emulate_media(color_scheme="dark")
        until(page, f"{theme} === 'dark'")
        page.emulate_media(color_scheme="light")
        until(page, f"{theme} === 'light'")
        page.evaluate("glass.stage.toggleTheme()")
        page.emulate_media(color_scheme="dark")
        page.emulate_media(color_scheme="light")
        page.wait_for_timeout(200)
        assert page.evaluate(theme) == "dark"


# ---- trying a knob in a chapter ----


class Recomputes(HandSource):
    """Turning its mode empties somebody's cache."""

    async def command(self, room, viewer, name, args):
        said = await super().command(room, viewer, name, args)
        return {**said, "recompute": ["A", "B"]} if args.get("dry_run") else said


@pytest.mark.parametrize("knob, value, asks", [("max_num_seqs", 2, False), ("mode", "static", True)])
def test_trying_begins_the_example_again_and_names_first_who_ends_with_it(stage, knob, value, asks):
    tried = chapter(text(until=lambda trace, step: True, try_this=TryThis("chapter.one.try", knob, value)))

    def prepare(page):
        People(page.hub)
        Tour(page.hub, {"one": tried}, FAST)

    with stage(Recomputes(), prepare=prepare) as page:
        page.keyboard.press("PageDown")
        page.locator(".glass-strip button", has_text="Try this").click()
        if asks:
            dialog = page.locator("dialog[open]")
            assert dialog.locator("p").text_content() == "A, B will end, because the example begins again. Change the knob?"
            assert [args for name, args in page.source.commands if name == "preset"] == [{"name": "ragged"}], "nothing has begun yet"
            dialog.locator("button[value=yes]").click()
        page.locator(".glass-notice", has_text="begins again").wait_for()
        assert heard(page.source, "play") == {}
        assert heard(page.source, "preset") == {"name": "ragged", "knobs": {knob: value}}
        assert asks == any(name == "knob" for name, _ in page.source.commands)
        assert all(args.get("dry_run") for name, args in page.source.commands if name == "knob")
        until(page, "glass.stage.tour.told.phase === 'here'")
