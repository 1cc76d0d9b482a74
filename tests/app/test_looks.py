"""What VIEWS promises of every page, measured in Chromium: one screen, letters large enough, nothing over anything else,
contrast, focus, calm. The states are made from recordings, so nothing has to be computed; one run is the real app's."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest

from app import shipped
from benchmarks.browser import FLAGS, app, chromium, wait_live
from engine.chrome_trace import chrome_trace
from engine.recording import clip, decode, encode
from engine.trace import Trace
from tests.viz.test_stage_support import VIEWS, HandSource, serve
from viz.registry import load_chapters, load_views
from viz.stage.export import offer_timeline
from viz.stage.hub import Hub
from viz.stage.lobby import Lobby, Shelf
from viz.stage.people import NO_LIMITS, People
from viz.stage.pins import Pins, offer_links
from viz.stage.source import RecordingSource
from viz.stage.tour import Tour
from viz.words.caption import caption

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium")

SIZES = ((1280, 720), (1280, 600), (1920, 1080), (390, 844))
THEMES = ("light", "dark", "projector")
LANGUAGES = ("en", "ja")
PHONE = SIZES[-1]
DRAWN = "window.glass && glass.stats.updates > 0 && window.Plotly && glass.stage.shown().every((p) => p.model && p.model.figure)"
LONG = "Meta-Llama-3.1-405B-Instruct-FP8-dynamic-with-a-name-that-has-no-end"
SENTENCE = "Step 1,234,567: F was preempted for A and gave back 12 blocks; B finished and freed 6 blocks, more or less, too."


class Loading(HandSource):
    """An engine whose model is still on its way."""

    def trace(self, room: str) -> Trace:
        return Trace()

    def status(self, room: str) -> dict:
        progress = {"text": "Downloading SmolLM2-135M-Instruct: 47 of 105 MB", "fraction": 0.45}
        return {**super().status(room), "state": self.state, "progress": progress if self.state == "loading" else None}


class Playing(RecordingSource):
    """A recording in the place of an engine that runs."""

    def status(self, room: str) -> dict:
        return {**HandSource().status(room), **super().status(room), "live": True, "knobs": HandSource().status(room)["knobs"]}


class Crowded(HandSource):
    """The longest texts that the bars can get."""

    def __init__(self) -> None:
        super().__init__(at=390, names=("a long name of a request",))
        self.model, self.state = LONG, "running"
        self.extra = {
            "device": f"{LONG} on 8 × NVIDIA H200 NVL",
            "progress": {"text": f"Downloading {LONG}: 47 of 105 MB", "fraction": 0.3},
        }


def house(base: object) -> Hub:
    """The app's hub over any source."""
    pins = Pins(encode, decode, clip)
    hub = Hub(Lobby(base, Shelf(decode, shipped, pins)), load_views(), caption=caption, default_views=("blocks", "batching"))
    People(hub, NO_LIMITS)
    offer_links(hub, pins)
    offer_timeline(hub, chrome_trace)
    Tour(hub, load_chapters())
    return hub


@pytest.fixture(scope="module")
def loading() -> Loading:
    source = Loading()
    source.state = "loading"
    return source


@pytest.fixture(scope="module")
def addresses(loading) -> Iterator[dict[str, str]]:
    flood = shipped("flood")
    hubs = {
        "intro": house(loading), "running": house(Playing(flood)), "recording": house(RecordingSource(flood, playing=False)),
        "talk": house(RecordingSource(flood, playing=False)),
        "crowded": Hub(Crowded(), VIEWS, caption=lambda *_: SENTENCE, default_views=("batching", "blocks", "attention")),
    }  # fmt: skip
    servers = {name: serve(hub) for name, hub in hubs.items()}
    yield {name: server.__enter__() for name, server in servers.items()}
    for server in servers.values():
        server.__exit__(None, None, None)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        found = p.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        yield found
        found.close()


@pytest.fixture
def opened(browser, addresses):
    """Opens pages of a hub by its name; none of them may throw."""
    errors: list[str] = []

    @contextmanager
    def open_(name: str, query: str = "", size: tuple[int, int] = (1280, 720), wait: str = DRAWN, **options: object):
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        found = context.new_page()
        found.on("pageerror", lambda error: errors.append(str(error)))
        found.goto(addresses[name] + query)
        found.wait_for_function(wait, timeout=30_000)
        yield found
        context.close()

    yield open_
    assert errors == []


def until(found, condition: str, seconds: float = 10) -> None:
    found.wait_for_function(condition, timeout=seconds * 1000)


# ---- the states ----


def intro(found) -> None:
    found.evaluate("glass.stage.begun -= 10000; glass.stage.frame()")
    found.wait_for_selector(".glass-invite:visible")


def running(found) -> None:
    found.keyboard.press("i")
    found.wait_for_selector(".glass-drawer:visible .glass-calculator label")


def asking(found) -> None:
    found.evaluate("glass.send('chapter', {name: 'continuous_batching', beat: 1})")
    until(found, "glass.stage.tour.asking && glass.stage.at.step !== null", 30)


def sharing(found) -> None:
    found.keyboard.press("e")
    found.wait_for_selector(".glass-menu:visible")


def meeting(found) -> None:
    found.click(".glass-people")
    found.wait_for_selector("dialog[open]")


STATES = {
    "intro": ("intro", intro), "drawer": ("recording", running), "question": ("talk", asking), "share": ("running", sharing),
    "people": ("running", meeting), "crowded": ("crowded", lambda found: None),
}  # fmt: skip


# ---- one screen ----

MEASURE = """() => {
  const root = document.querySelector('.glass-root'), font = glass.stage.look.font, phone = glass.stage.phone;
  const box = (r) => ({x0: r.left, y0: r.top, x1: r.right, y1: r.bottom});
  const cut = (r, e) => { // what is seen of it
    for (let at = e; at && at !== root; at = at.parentElement) {
      if (getComputedStyle(at).overflowX === 'visible') continue;
      const c = at.getBoundingClientRect();
      r = {x0: Math.max(r.x0, c.left), y0: Math.max(r.y0, c.top), x1: Math.min(r.x1, c.right), y1: Math.min(r.y1, c.bottom)};
    }
    return r.x1 - r.x0 > 1 && r.y1 - r.y0 > 1 ? r : null;
  };
  const silent = (e) => e.closest('.glass-hidden, .glass-focus, .glass-tip, .glass-notice, option, [hidden]') || !e.checkVisibility();
  const dialog = root.querySelector('dialog[open]'), menu = [...root.querySelectorAll('.glass-menu')].find((m) => !m.hidden);
  const words = [], small = [], hidden = [];
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    const e = node.parentElement;
    if (!node.textContent.trim() || silent(e) || e.tagName === 'STYLE') continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const r = cut(box(range.getBoundingClientRect()), e);
    if (!r) continue;
    const text = node.textContent.slice(0, 50);
    if (parseFloat(getComputedStyle(e).fontSize) < font) small.push(text + ' ' + getComputedStyle(e).fontSize);
    if (e.closest('svg')) continue; // the axes of a picture have tests of their own
    const layer = e.closest('dialog') ? 2 : e.closest('.glass-menu, .glass-minor.glass-on') || (phone && e.closest('.glass-drawer')) ? 1 : 0;
    words.push({...r, text, e, layer});
  }
  for (const e of root.querySelectorAll('*')) {
    const whole = !e.clientWidth || e.scrollWidth <= e.clientWidth + 1 || getComputedStyle(e).overflowX !== 'hidden';
    if (whole || silent(e) || !e.textContent.trim()) continue;
    if (!e.closest('[title], [aria-label]') && getComputedStyle(e).textOverflow === 'ellipsis') hidden.push(e.className + ': ' + e.textContent.slice(0, 50));
  }
  const over = [];
  words.forEach((a, i) => words.slice(i + 1).forEach((b) => {
    if (a.layer !== b.layer || a.e === b.e) return;
    const wide = Math.min(a.x1, b.x1) - Math.max(a.x0, b.x0), tall = Math.min(a.y1, b.y1) - Math.max(a.y0, b.y0);
    if (wide > 2 && tall > 4) over.push(a.text + ' / ' + b.text);
  }));
  const outside = [], targets = [];
  for (const e of root.querySelectorAll('button, select, input, summary, [tabindex="0"]')) {
    if (silent(e) || e.closest('.glass-plotly')) continue;
    const r = e.getBoundingClientRect(), name = e.className + ' ' + (e.getAttribute('aria-label') || e.textContent).slice(0, 40);
    if (!r.width) continue;
    if (phone && Math.min(r.width, r.height) < 43.5 && !e.closest('label')) targets.push(name + ' ' + [r.width, r.height]);
    const scrolls = e.closest('.glass-drawer, .glass-chips, .glass-menu, dialog, .glass-card');
    if (scrolls && scrolls !== e) continue;
    if (r.left < -0.5 || r.top < -0.5 || r.right > innerWidth + 0.5 || r.bottom > innerHeight + 0.5) outside.push(name);
    const bar = e.closest('.glass-minor') ? null : e.closest('.glass-header, .glass-transport, .glass-panel-head');
    const b = bar && bar.getBoundingClientRect();
    if (b && (r.right > b.right + 1 || r.left < b.left - 1)) outside.push(name);
  }
  const page = document.documentElement;
  const beyond = [page.scrollHeight - innerHeight, page.scrollWidth - innerWidth, root.scrollWidth - root.clientWidth, root.scrollHeight - root.clientHeight];
  const scroll = beyond.map((n) => Math.max(n, 0));
  const seen = dialog || menu; // what lies over the page is inside it
  const over_ = seen ? seen.getBoundingClientRect() : null;
  if (over_ && (over_.left < 0 || over_.top < 0 || over_.right > innerWidth || over_.bottom > innerHeight)) outside.push(seen.className);
  return {scroll: scroll.some(Boolean) ? scroll : [], small, over, hidden, outside, targets};
}"""


def resize(found, size: tuple[int, int]) -> None:
    found.set_viewport_size({"width": size[0], "height": size[1]})
    found.wait_for_timeout(300)


def measured(found, where: tuple[object, ...]) -> list[object]:
    problems = {name: what for name, what in found.evaluate(MEASURE).items() if what}
    return [(*where, problems)] if problems else []


def serious(found) -> list[object]:
    axe = pytest.importorskip("axe_core_python.sync_playwright", reason="axe-core-python is not installed")
    violations = axe.Axe().run(found)["violations"]
    return [(v["id"], [n["html"][:160] for n in v["nodes"]][:4]) for v in violations if v["impact"] in ("serious", "critical")]


LOOKS = {"en": (("light", *SIZES), ("projector", *SIZES[:2])), "ja": (("projector", SIZES[0]), ("dark", *SIZES))}
AXE = {("en", "light", SIZES[0]), ("en", "projector", SIZES[0]), ("ja", "dark", SIZES[0]), ("ja", "dark", PHONE)}


@pytest.mark.parametrize("state", STATES)
def test_it_fits_on_one_screen_in_letters_that_can_be_read_and_axe_finds_nothing_serious(opened, state):
    hub, reach = STATES[state]
    wrong = []
    for language in LANGUAGES:
        with opened(hub, f"?lang={language}") as found:
            reach(found)
            for theme, *sizes in LOOKS[language]:
                found.evaluate("(t) => { glass.stage.setTheme(t, false); glass.stage.dismiss(); }", theme)
                for size in sizes:
                    resize(found, size)
                    wrong += measured(found, (language, theme, size))
                    wrong += [(language, theme, size, each) for each in (serious(found) if (language, theme, size) in AXE else ())]
    assert wrong == []


def test_the_bars_are_as_low_as_promised_and_the_drawer_as_wide(opened):
    with opened("running") as found:
        found.keyboard.press("i")
        tall = "(name) => document.querySelector('.glass-' + name).offsetHeight"
        assert [found.evaluate(tall, name) for name in ("header", "prompt", "caption", "transport")] == [36, 44, 32, 40]
        assert found.evaluate("document.querySelector('.glass-drawer').offsetWidth") == 280
        found.evaluate("glass.stage.setState({views: ['blocks', 'batching', 'tokens']}); glass.stage.arrange()")
        assert found.locator(".glass-panel:visible").count() == 2 and found.locator(".glass-tab:visible").count() == 2
        found.keyboard.press("3")
        assert found.evaluate("glass.stage.shown().map((p) => p.view)") == ["tokens"]


def test_what_a_narrow_header_leaves_out_is_in_its_menu(opened):
    with opened("running", size=(900, 600)) as found:
        assert not found.locator(".glass-language").is_visible()
        found.click(".glass-others")
        for name in ("Language", "Open recording", "Light or dark", "Projector (P)", "Keys (?)"):
            assert found.locator(f".glass-minor [aria-label='{name}']").is_visible(), name
        found.keyboard.press("Tab")
        found.keyboard.press("Escape")
        assert not found.locator(".glass-language").is_visible()
        assert found.evaluate("document.activeElement.classList.contains('glass-others')")
        found.click(".glass-source")
        assert "NVIDIA H200" in found.text_content(".glass-drawer:visible")
        resize(found, (1920, 1080))
        assert found.locator(".glass-language").is_visible() and not found.locator(".glass-others").is_visible()


def test_on_a_phone_there_is_one_panel_and_a_swipe_or_a_tab_shows_the_next(opened):
    with opened("running", size=PHONE, has_touch=True) as found:
        order = """[...document.querySelectorAll('.glass-question, .glass-plot, .glass-input, .glass-play')]
          .filter((e) => e.checkVisibility() && e.offsetWidth).sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top)
          .map((e) => e.classList[0] === 'glass-button' ? 'glass-play' : e.classList[0])"""
        assert found.evaluate(order) == ["glass-question", "glass-plot", "glass-input", "glass-play"]
        assert found.evaluate("glass.stage.shown().map((p) => p.view)") == ["blocks"]
        found.locator(".glass-tab:visible").nth(1).click()
        assert found.evaluate("glass.stage.shown().map((p) => p.view)") == ["batching"]
        swipe = """(x) => { const area = glass.stage.stageArea, at = (clientX) => [new Touch({identifier: 1, target: area, clientX, clientY: 300})];
          area.dispatchEvent(new TouchEvent('touchstart', {touches: at(100)}));
          area.dispatchEvent(new TouchEvent('touchend', {changedTouches: at(100 + x)})); }"""
        found.evaluate(swipe, 150)
        assert found.evaluate("glass.stage.shown().map((p) => p.view)") == ["blocks"]


# ---- the first sixty seconds ----


def test_the_source_says_how_far_the_model_is_and_then_that_one_may_type(opened, loading):
    with opened("intro") as found:
        until(found, "document.querySelector('.glass-source').textContent === 'recording · model loading 45 %'")
        assert not found.locator(".glass-back").is_visible()
        strip, body = (found.locator(name).bounding_box() for name in (".glass-progress", ".glass-body"))
        assert strip["y"] >= body["y"] + body["height"], "the strip covers no panel"
        loading.state, loading.moves = "idle", loading.moves + 1
        try:
            until(found, "document.querySelector('.glass-source').textContent === 'live engine ready · type a sentence'")
            assert found.get_attribute(".glass-source", "data-state") == "ready"
            assert not found.locator(".glass-progress").is_visible()
            assert "recorded" in found.evaluate("[...document.querySelectorAll('.glass-badge')].map((b) => b.dataset.kind)")
        finally:
            loading.state, loading.moves = "loading", loading.moves + 1


def test_after_ten_seconds_a_hint_says_what_typing_does_once_a_visit(opened):
    with opened("intro") as found:
        assert not found.locator(".glass-invite").is_visible()
        intro(found)
        assert found.text_content(".glass-invite [role=status]") == "Type a sentence: it becomes request D."
        found.click(".glass-invite button")
        assert not found.locator(".glass-invite").is_visible()
        found.reload()
        found.wait_for_function(DRAWN)
        found.evaluate("glass.stage.begun -= 10000; glass.stage.frame()")
        found.wait_for_timeout(300)
        assert not found.locator(".glass-invite").is_visible()


# ---- why? ----


@pytest.fixture(scope="module")
def held_up() -> tuple[int, str, str]:
    """A step of the flood at which somebody waits who was preempted: (step, name, mark)."""
    trace = shipped("flood")
    step, victim = int(trace.preempts["step_id"][0]) + 2, int(trace.preempts["seq_id"][0])
    assert victim in trace.step(step).waits["seq_id"]
    return step, trace.name(victim), f"seq:{victim}"


def test_a_click_on_who_waits_opens_the_inspector_with_the_reason_in_numbers(opened, held_up):
    step, name, ident = held_up
    with opened("recording", f"?step={step}") as found:
        until(found, f"glass.stage.at.step === {step}")
        found.locator(".glass-chip[data-state=preempted]:visible").click()
        until(
            found,
            rf"/{name} waits: it needs \d+ blocks? for its \d+ tokens/.test(document.querySelector('.glass-drawer .glass-why').textContent)",
        )
        assert re.search(r"\d+ (is|are) free", found.text_content(".glass-drawer .glass-why"))
        assert found.locator(".glass-drawer").is_visible()
        found.keyboard.press("i")
        found.evaluate("glass.stage.select(null)")
        assert not found.locator(".glass-drawer").is_visible()
        found.wait_for_timeout(800)  # the panels are wider now, and so are their marks
        mark = f"glass.stage.panels[1].marks().findIndex((m) => m[0] === '{ident}')"
        until(found, f"{mark} >= 0")
        found.evaluate(f"(p => {{ p.focus.focus(); p.focusAt = {mark}; }})(glass.stage.panels[1])")
        found.keyboard.press("Enter")
        found.wait_for_selector(".glass-drawer:visible .glass-why")
        until(found, f"document.querySelector('.glass-drawer .glass-why').textContent.includes('{name} waits')")


def test_on_a_phone_the_card_says_why(opened, held_up):
    step, name, _ = held_up
    with opened("recording", f"?step={step}", size=PHONE, has_touch=True) as found:
        until(found, f"glass.stage.at.step === {step}")
        found.locator(".glass-chip[data-state=preempted]").click()
        until(found, f"document.querySelector('.glass-card .glass-why').textContent.includes('{name} waits: it needs')")
        assert found.locator(".glass-card").is_visible() and not found.locator(".glass-drawer").is_visible()
        assert found.evaluate(MEASURE)["targets"] == [] and found.evaluate(MEASURE)["scroll"] == []


def test_a_preempted_request_keeps_the_tokens_that_it_wrote(opened, held_up):
    step, name, _ = held_up
    with opened("recording", f"?step={step}") as found:
        until(found, f"glass.stage.at.step === {step}")
        assert re.fullmatch(
            rf"{name}: preempted, .*, [1-9]\d* tokens", found.get_attribute(".glass-chip[data-state=preempted]", "aria-label")
        )


# ---- refusals ----


def test_a_refused_download_shows_its_sentence(opened, addresses):
    with opened("recording") as found:
        found.evaluate("glass.stage.saveRecording()")
        until(found, "document.querySelector('.glass-notice.glass-bad:not([hidden])')")
        assert "nothing new to save" in found.text_content(".glass-notice")
        found.evaluate("glass.stage.link.viewer = 'somebody else'; glass.stage.saveRecording()")
        until(found, "document.querySelector('.glass-notice').textContent.includes('away too long')")
    with opened("crowded") as found:
        found.evaluate("glass.stage.share.fetch('recording', {viewer: 'nobody'})")
        until(found, "document.querySelector('.glass-notice').textContent.includes('away too long')")


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_list_of_keys_has_them_all(opened, language):
    with opened("recording", f"?lang={language}", size=(1280, 600)) as found:
        found.keyboard.press("?")
        said = found.text_content("dialog[open]")
        for key in ("Space", "← →", "Home End", "1 2 3", "Shift + ", "Page Up", "Esc", *"IPBFLE?"):
            assert key in said, key
        assert found.evaluate("document.querySelectorAll('dialog[open] dt').length") >= 18
        assert found.evaluate(MEASURE)["outside"] == []


# ---- seen by everybody ----


MARKS = (
    ".glass-chip b", ".glass-source i", ".glass-live i", ".glass-badge", ".glass-swatch", ".glass-play", ".glass-input", ".glass-select",
    ".glass-tab", ".glass-dots i",
)  # fmt: skip


@pytest.mark.parametrize("theme", THEMES)
def test_without_colour_every_mark_of_the_bars_still_stands_out(opened, theme):
    from PIL import Image

    with opened("talk", f"?theme={theme}") as found:
        asking(found)
        found.wait_for_timeout(500)
        session = found.context.new_cdp_session(found)
        session.send("Emulation.setEmulatedVisionDeficiency", {"type": "achromatopsia"})
        image = np.asarray(Image.open(io.BytesIO(found.screenshot())).convert("L"), np.float64) / 255
        light = np.where(image <= 0.04045, image / 12.92, ((image + 0.055) / 1.055) ** 2.4) + 0.05
        faint = []
        for name in MARKS:
            for element in found.locator(f"{name}:visible").all():
                box = element.bounding_box()
                x, y, wide, tall = (round(box[key]) for key in ("x", "y", "width", "height"))
                cell = light[max(y - 2, 0) : y + tall + 2, max(x - 2, 0) : x + wide + 2]
                if cell.size and cell.max() / cell.min() < 3:
                    faint.append((name, element.get_attribute("class"), round(cell.max() / cell.min(), 2)))
        assert faint == []


# ---- reached by everybody ----

RING = """() => {
  const e = document.activeElement, style = getComputedStyle(e), r = e.getBoundingClientRect();
  if (e === document.body) return null;
  const name = e.tagName + '.' + e.className + ' ' + (e.getAttribute('aria-label') || e.textContent).slice(0, 30);
  e.tabNumber ??= (window.tabNumbers = (window.tabNumbers || 0) + 1);
  const ring = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
  return {name, number: e.tabNumber, ring, seen: r.width > 0 && r.bottom > 0 && r.top < innerHeight};
}"""


@pytest.mark.parametrize(("state", "size"), [("drawer", (1280, 720)), ("question", (1280, 720)), ("intro", PHONE)])
def test_tab_comes_by_everything_and_shows_where_it_is(opened, state, size):
    hub, reach = STATES[state]
    with opened(hub, size=size) as found:
        reach(found)
        found.evaluate("glass.send('pause')")
        found.wait_for_timeout(500)
        found.evaluate("document.activeElement.blur()")
        seen: dict[int, dict] = {}
        for _ in range(120):
            found.keyboard.press("Tab")
            at = found.evaluate(RING)
            if at is None or at["number"] in seen:
                break
            seen[at["number"]] = at
        assert [at["name"] for at in seen.values() if not (at["ring"] and at["seen"])] == []
        controls = """[...document.querySelectorAll('.glass-root :is(button, select, input, summary)')]
          .filter((e) => e.checkVisibility() && e.offsetWidth && !e.disabled && e.tabIndex >= 0 && !e.tabNumber)
          .filter((e) => !e.closest('details:not([open]) > :not(summary)')).map((e) => e.className + e.textContent)"""
        assert found.evaluate(controls) == []
        assert sum("glass-focus" in at["name"] for at in seen.values()) == found.locator(".glass-panel:visible").count()


def test_marks_are_reached_by_arrows_and_chosen_with_enter(opened):
    with opened("recording", "?step=30") as found:
        until(found, "glass.stage.at.step === 30")
        for panel in (0, 1):
            found.evaluate("(i) => glass.stage.panels[i].focus.focus()", panel)
            before = found.evaluate("(i) => glass.stage.panels[i].focusAt", panel)
            found.keyboard.press("Shift+ArrowRight")
            assert found.evaluate("(i) => glass.stage.panels[i].focusAt", panel) != before
            seen = {found.evaluate("(i) => glass.stage.panels[i].focusAt", panel)}
            for key in ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp"):
                found.keyboard.press(key)
                seen.add(found.evaluate("(i) => glass.stage.panels[i].focusAt", panel))
            assert len(seen) > 2
            found.keyboard.press("Home")
            found.keyboard.press("Enter")
            until(found, "glass.state.selection !== null || glass.state.axis !== 'step'")
            found.evaluate("glass.stage.select(null)")


# ---- calm ----

HEARD = """() => {
  if (window.watch) watch.disconnect();
  window.heard = [];
  window.watch = new MutationObserver((changes) => { if (changes.some((c) => c.target.textContent.trim())) heard.push(performance.now()); });
  for (const e of document.querySelectorAll('.glass-root :is([aria-live]:not([aria-live=off]), [role=status], [role=alert], output)'))
    watch.observe(e, {childList: true, characterData: true, subtree: true});
}"""


def test_readers_hear_at_most_one_sentence_in_three_seconds_and_none_in_free_run(opened):
    with opened("running") as found:
        for pace in (2, 4):
            found.evaluate("(value) => glass.send('pace', {value})", pace)
            found.wait_for_timeout(600)
            found.evaluate(HEARD)
            found.wait_for_timeout(6500)
            heard = found.evaluate("heard")
            assert 1 <= len(heard) <= 3 and all(b - a >= 2900 for a, b in pairwise(heard)), heard
        found.evaluate("glass.send('pace', {value: null})")
        until(found, "glass.stage.status.pace === null")
        found.wait_for_timeout(300)
        found.evaluate(HEARD)
        found.wait_for_timeout(3500)
        assert found.evaluate("heard") == []


def test_who_asked_for_less_motion_gets_one_update_a_second_and_no_transitions(opened):
    with opened("running", reduced_motion="reduce") as found:
        found.evaluate("glass.send('pace', {value: 30})")
        found.wait_for_timeout(1200)
        begun, drawn = time.monotonic(), found.evaluate("glass.stats.updates")
        found.wait_for_timeout(3000)
        assert found.evaluate("glass.stats.updates") - drawn <= time.monotonic() - begun + 1
        moving = """[...document.querySelectorAll('.glass-root, .glass-root *')].filter((e) => { const s = getComputedStyle(e);
          return s.transitionDuration.split(',').some((t) => parseFloat(t) > 0) || s.animationName !== 'none'; }).map((e) => e.className)"""
        assert found.evaluate(moving) == []


# ---- the app itself ----


def test_the_real_app_keeps_all_of_it(tiny_llama, browser):
    with app(["--model", str(tiny_llama), "--pages", "96"]) as address:
        found = browser.new_context(viewport={"width": 1280, "height": 720}).new_page()
        found.goto(address)
        found.wait_for_function(DRAWN, timeout=60_000)
        wait_live(found)
        found.wait_for_timeout(500)
        assert found.evaluate(MEASURE) == {"scroll": [], "small": [], "over": [], "hidden": [], "outside": [], "targets": []}
        found.fill(".glass-input", "Why is the sky blue?")
        found.keyboard.press("Enter")
        until(found, "glass.stage.status.live === true && (glass.stage.chipRow?.items || []).some((c) => c.name === 'D')", 60)
        assert found.text_content(".glass-source") == "live"
        found.keyboard.press("Escape")
        found.keyboard.press("i")
        for size in SIZES:
            resize(found, size)
            assert {k: v for k, v in found.evaluate(MEASURE).items() if v} == {}, size
        assert serious(found) == []
        found.context.close()
