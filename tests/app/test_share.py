"""Links copied from a live run, addresses in the browser, recordings by name, and one view inside somebody's slide."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager

import pytest

from app import shipped
from benchmarks.browser import chromium, page, say, wait_live
from engine.audience import LiveSource
from engine.chrome_trace import chrome_trace
from engine.config import CacheConfig, EngineConfig, ModelSource
from engine.recording import clip, decode, encode
from engine.session import Session
from tests.app.test_page import last_step, prompt, status, until
from tests.engine.test_generate import check_sentence
from tests.viz.test_pins import STATES, WRONG
from tests.viz.test_stage_support import serve
from viz.registry import load_views
from viz.stage.export import offer_timeline
from viz.stage.hub import Hub
from viz.stage.lobby import Lobby, Shelf
from viz.stage.pins import PinConfig, Pins, offer_links
from viz.view import ViewState
from viz.words.caption import caption

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium")
STILL = "glass.stage.shown().every((p) => p.model && p.model.figure && !p.model.changed) && !glass.stage.credits"
SEEN = """() => ({
  canvases: glass.stage.shown().map((p) => p.canvas.toDataURL()), sizes: glass.stage.shown().map((p) => p.size()),
  labels: glass.stage.shown().map((p) => p.model.items.labels), summaries: glass.stage.shown().map((p) => p.model.items.summary),
  caption: document.querySelector('.glass-sentence').textContent,
  chips: [...document.querySelectorAll('.glass-chip')].filter((c) => !c.hidden).map((c) => [c.title, c.getAttribute('aria-pressed'), c.dataset.color]),
  selection: glass.state.selection, theme: glass.state.theme, step: glass.stage.at.step, ranges: glass.stage.ranges(),
})"""


@pytest.fixture(scope="module")
def live(tiny_llama):
    """(hub, pins, address) of a server in this process with the real engine."""
    session = Session(EngineConfig(ModelSource(str(tiny_llama), "cpu", "float32"), CacheConfig(num_pages=96)), own_process=False).start()
    session.wait_ready(60)
    pins = Pins(encode, decode, clip, PinConfig(per_minute=1000, all_per_minute=1000))
    hub = Hub(Lobby(LiveSource(session), Shelf(decode, shipped, pins)), load_views(), caption=caption, default_views=("blocks", "batching"))
    offer_links(hub, pins)
    offer_timeline(hub, chrome_trace)
    with serve(hub) as address:
        yield hub, pins, address
    session.close()


@pytest.fixture(scope="module")
def tab(live):
    """A tab whose engine has run a while and goes on."""
    with page(live[2]) as found:
        found.problems = []
        found.on("pageerror", lambda error: found.problems.append(str(error)))
        say(found, "live")
        wait_live(found)
        say(found, "pace", value=60)
        say(found, "pause")
        for text in ("alpha beta", "gamma", "delta epsilon zeta", "eta"):
            prompt(found, text, max_tokens=400)
        say(found, "play")
        until(lambda: last_step(found) > 130)
        yield found
        assert found.problems == []


@contextmanager
def another(tab, address: str, width: int = 1280, height: int = 720, **context):
    """The same browser, but another visitor."""
    visitor = tab.context.browser.new_context(viewport={"width": width, "height": height}, **context)
    found = visitor.new_page()
    found.on("pageerror", lambda error: tab.problems.append(str(error)))
    found.goto(address)
    found.wait_for_function("window.glass && window.glass.stats.frames > 0 && window.Plotly")
    yield found
    visitor.close()


def settled(found) -> dict:
    """What is seen once nothing moves any more."""
    found.mouse.move(5, 5)
    found.wait_for_function(STILL)
    last, end = None, time.monotonic() + 15
    while time.monotonic() < end:
        now = found.evaluate(SEEN)
        if now == last:
            return now
        last = now
        time.sleep(0.4)
    raise AssertionError("the picture does not come to rest")


def copied(found) -> str:
    address = found.evaluate("glass.stage.share.copy()")
    assert address.startswith("http"), found.evaluate("document.querySelector('.glass-notice').textContent")
    for dialog in found.locator("dialog[open] button").all():
        dialog.click()
    return address


def look(found, **state) -> None:
    found.evaluate("(state) => { glass.stage.setState(state); glass.stage.arrange(); }", state)
    if state.get("step") is not None:
        found.wait_for_function("(step) => glass.stage.at.step === step", arg=state["step"])


@pytest.mark.parametrize("views", [["blocks", "batching"], ["tokens", "kv_cache"], ["mask", "engine_map"]])
def test_a_link_shows_another_visitor_the_same_picture_byte_for_byte(live, tab, views):
    look(tab, step=100, views=views, selection=None)
    names = tab.evaluate("glass.stage.chipRow.items.map((c) => c.id)")
    look(tab, selection=names[1])
    mine, address = settled(tab), copied(tab)
    assert "rec=" in address and "step=100" in address and "../" not in address
    with another(tab, address) as other:
        assert status(other)["live"] is False and status(other)["state"] == "paused"
        theirs = settled(other)
        assert theirs == mine
        assert len(set(mine["canvases"])) == 2
        for found in (tab, other):
            found.evaluate("glass.stage.dismiss()")
        for at in (0, 1):
            shots = [found.locator(".glass-plot").nth(at).screenshot() for found in (tab, other)]
            assert shots[0] == shots[1]
        badges = other.evaluate("[...document.querySelectorAll('.glass-badge')].map((b) => b.dataset.kind)")
        assert "recorded" in badges, "it says that it is no longer live"
        other.keyboard.press("ArrowRight")
        other.wait_for_function("glass.stage.at.step === 101 && location.search.includes('step=101')")
        other.reload()
        other.wait_for_function("window.glass && glass.stage.at.step === 101")
    assert status(tab)["live"] is True
    look(tab, step=None, selection=None)


def test_a_zoom_travels_along(live, tab):
    look(tab, step=90, views=["blocks", "batching"])
    settled(tab)
    box = tab.locator(".glass-plot").nth(1).bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
    tab.mouse.wheel(0, -500)
    tab.wait_for_function("glass.state.ranges.length === 8")
    mine, address = settled(tab), copied(tab)
    assert "ranges=0,0,0,0," in address
    with another(tab, address) as other:
        assert settled(other) == mine
        other.locator(".glass-reset:visible").click()
        other.wait_for_function("glass.state.ranges.length === 0 && !location.search.includes('ranges')")
    tab.locator(".glass-reset:visible").click()
    look(tab, step=None)


def test_a_maximised_panel_and_the_theme_travel_along(live, tab):
    look(tab, step=90, views=["blocks", "batching"])
    tab.keyboard.press("2")
    tab.evaluate("glass.stage.setTheme('dark', false)")
    mine, address = settled(tab), copied(tab)
    with another(tab, address, color_scheme="light") as other:
        assert settled(other) == mine and mine["theme"] == "dark"
    tab.keyboard.press("2")
    tab.evaluate("glass.stage.setTheme('light', false)")
    look(tab, step=None)


def test_the_clipboard_gets_the_link_and_where_it_is_closed_a_dialog_shows_it(live, tab):
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=live[2].split("/glass")[0])
    tab.evaluate("glass.stage.dismiss()")
    tab.keyboard.press("l")
    tab.wait_for_function("document.querySelector('.glass-notice:not([hidden])')?.textContent.includes('copied')")
    assert "rec=" in tab.evaluate("navigator.clipboard.readText()")
    tab.context.clear_permissions()
    tab.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined, configurable: true})")
    tab.keyboard.press("l")
    tab.wait_for_selector("dialog[open] input")
    assert (
        tab.evaluate("getSelection().toString()").startswith("http")
        or tab.evaluate("(i => i.selectionEnd - i.selectionStart)(document.querySelector('dialog input'))") > 40
    )
    tab.keyboard.press("Escape")
    tab.evaluate("delete navigator.clipboard")


def test_too_many_links_a_minute_are_refused_on_the_page(live, tab, monkeypatch):
    monkeypatch.setattr(live[1], "config", PinConfig(per_minute=0))
    assert tab.evaluate("glass.stage.share.copy()") == ""
    sentence = tab.text_content(".glass-notice.glass-bad span")
    check_sentence(sentence)
    assert "minute" in sentence


def test_a_recording_that_ships_is_linked_by_its_name(live, tab):
    before = len(live[1])
    with another(tab, live[2] + "?rec=ragged&step=7") as other:
        other.wait_for_function("glass.stage.at.step === 7")
        assert status(other)["live"] is False and "rec=ragged" in copied(other) and len(live[1]) == before
        reply = prompt(other, "from a link to life", max_tokens=3)
        assert reply["ok"]
        other.wait_for_function("glass.stage.status.live === true && !location.search.includes('rec=')")


@pytest.mark.parametrize("name", [name for name in WRONG[1:] if name != "\ud800"])
def test_a_crafted_link_says_that_it_has_expired_and_the_page_lives(live, tab, name):
    with another(
        tab, live[2] + "?chapter=none&selection=seq:1&step=3&rec=" + tab.evaluate("(t) => encodeURIComponent(t)", name[:3000])
    ) as other:
        other.wait_for_function("document.querySelector('.glass-notice:not([hidden])')?.textContent.includes('expired')")
        assert status(other)["live"] is True and other.evaluate("glass.state.step") is None
        assert say(other, "pace", value=60)["ok"]


@pytest.mark.parametrize("state", STATES, ids=("plain", "full", "strange"))
def test_browser_and_server_write_and_read_the_same_addresses(live, tab, state):
    read = """(query) => {
      const stage = glass.stage, made = stage.share.constructor.fromQuery(new URLSearchParams(query));
      return {made, query: stage.share.constructor.toQuery(made, new URLSearchParams()).toString()};
    }"""
    found = tab.evaluate(read, state.to_query())
    assert ViewState.from_query(found["query"]) == state
    plain = json.loads(json.dumps({key: value for key, value in found["made"].items()}))
    assert all(plain[key] == (list(value) if isinstance(value := getattr(state, key), tuple) else value) for key in plain)


@pytest.mark.parametrize(
    "query", ["step=-1", "step=1e3", "ranges=1,nan", "ranges=,", "theme=x", "axis=", "beat=1.5", "%ff=%ff", "step=%D9%A3"]
)
def test_the_browser_ignores_what_the_server_ignores(live, tab, query):
    assert tab.evaluate("(q) => glass.stage.share.constructor.fromQuery(new URLSearchParams(q))", query) == {}


# ---- one view in a slide ----


def test_a_view_embedded_in_a_slide_has_a_caption_and_a_small_transport_and_keeps_its_height(live, tab):
    deck = tab.context.browser.new_page(viewport={"width": 1000, "height": 640})
    deck.goto(live[2] + "static/stage.css")  # a page of the same host
    deck.evaluate(
        f"""() => {{ document.body.innerHTML = '<h1>A slide</h1><iframe id="view" width="760" height="420" src="{live[2]}?embed=blocks"></iframe>'; }}"""
    )
    frame = deck.wait_for_selector("#view").content_frame()
    frame.wait_for_function(
        "window.glass && window.Plotly && glass.stats.updates > 0 && glass.stage.shown().every((p) => p.model && p.model.figure)",
        timeout=20_000,
    )

    def shown(name: str) -> bool:
        return frame.evaluate("(n) => Boolean(document.querySelector(n)?.offsetParent)", name)

    assert [shown(f".glass-{part}") for part in ("caption", "transport", "play", "header", "prompt")] == [True, True, True, False, False]
    assert frame.evaluate("glass.stage.shown().map((p) => p.view)") == ["blocks"]
    assert frame.evaluate("document.querySelector('.glass-sentence').textContent.length") > 5
    height = (
        "[document.documentElement.scrollHeight, document.querySelector('.glass-root').offsetHeight, document.documentElement.scrollWidth]"
    )
    before = frame.evaluate(height)
    assert before == [420, 420, 760]
    frames = frame.evaluate("glass.stats.frames")
    prompt(tab, "while the slide is shown", max_tokens=100)
    say(tab, "play")
    for _ in range(20):  # U6: a frame that follows what its page reports must not grow
        deck.evaluate("(h) => { document.querySelector('#view').height = h; }", frame.evaluate("document.documentElement.scrollHeight"))
        time.sleep(0.05)
    frame.wait_for_function(f"glass.stats.frames > {frames}")
    assert frame.evaluate(height) == before
    frame.evaluate("window.dispatchEvent(new Event('blur'))")
    assert frame.evaluate("document.querySelector('.glass-click').textContent") == "Click for keys" and shown(".glass-click")
    frame.locator(".glass-sentence").click()
    frame.evaluate("window.dispatchEvent(new Event('focus'))")
    assert not shown(".glass-click")
    said = frame.evaluate("glass.stage.commands")
    deck.keyboard.press("Space")
    frame.wait_for_function(f"glass.stage.commands > {said}")
    deck.close()
