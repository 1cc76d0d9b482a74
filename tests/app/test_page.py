"""The app as the README starts it, driven in Chromium: prompt, pause, step, rewind, zoom, hostile text, closing the tab."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

import pytest
import torch

from benchmarks.browser import app, chromium, page, say, wait_live

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium")

HOSTILE = ["<img src=x onerror=window.hacked=1>", "${window.hacked=2}", "{{window.hacked=3}}", "</script><script>window.hacked=4</script>", "`${1+1}`"]


@pytest.fixture(scope="module")
def address(tiny_llama):
    with app(["--model", str(tiny_llama), "--pages", "96"]) as where:
        yield where


@pytest.fixture
def opened(address):
    with page(address) as found:
        found.problems, found.foreign = [], []
        found.on("pageerror", lambda error: found.problems.append(str(error)))
        found.on("console", lambda m: found.problems.append(m.text) if m.type == "error" else None)
        found.on("request", lambda r: found.foreign.append(r.url) if not local(r.url) else None)
        wait_live(found)
        say(found, "abort", request_id=None)
        say(found, "play")
        say(found, "pace", value=None)
        yield found
        assert found.problems == []
        assert found.foreign == []


def local(url: str) -> bool:
    return urlsplit(url).scheme in ("data", "blob", "about") or urlsplit(url).hostname in ("localhost", "127.0.0.1")


def prompt(opened, text: str, **args: object) -> dict:
    return say(opened, "prompt", text=text, chat=False, **{"max_tokens": 300, **args})


def last_step(opened) -> int:
    return opened.evaluate("window.glass.stage.timeline ? window.glass.stage.timeline.last : (window.glass.stage.at.last ?? -1)")


def status(opened) -> dict:
    return opened.evaluate("window.glass.stage.status")


def until(condition, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def ink(opened) -> int:
    """Pixels of the panels' canvases that are not transparent."""
    return opened.evaluate(
        """() => { let n = 0;
                   for (const c of document.querySelectorAll('.glass-panel canvas')) {
                     if (!c.width || !c.height) continue;
                     const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
                     for (let i = 3; i < d.length; i += 4) n += d[i] > 0;
                   }
                   return n; }"""
    )


def test_a_typed_prompt_is_served_and_drawn(opened):
    opened.keyboard.press("Escape")
    box = opened.locator(".glass-root textarea, .glass-root input[type=text]").first
    box.fill("hello there")
    box.press("Enter")
    until(lambda: opened.evaluate("window.glass.stats.updates") > 5)
    until(lambda: ink(opened) > 1000)
    caption = opened.locator(".glass-caption [aria-live]")
    until(lambda: "Step" in (caption.text_content() or ""))


def test_pause_step_and_rewind(opened):
    say(opened, "pace", value=20)
    prompt(opened, "a long one", max_tokens=900)
    until(lambda: status(opened)["state"] == "running")
    say(opened, "pause")
    until(lambda: status(opened)["state"] == "paused")
    opened.wait_for_timeout(500)
    shown = opened.evaluate("window.glass.stage.at.step")
    opened.keyboard.press("ArrowRight")
    until(lambda: opened.evaluate("window.glass.stage.at.step") == shown + 1)
    opened.keyboard.press("ArrowLeft")
    opened.keyboard.press("ArrowLeft")
    until(lambda: opened.evaluate("window.glass.stage.at.step") == shown - 1)
    opened.keyboard.press("Home")
    until(lambda: opened.evaluate("window.glass.stage.at.step") < shown - 1)
    opened.keyboard.press("End")
    until(lambda: opened.evaluate("window.glass.stage.at.step") == shown + 1)


def test_zoom_survives_updates(opened):
    say(opened, "pace", value=10)
    prompt(opened, "zoom", max_tokens=900)
    until(lambda: opened.evaluate("window.glass.stats.updates") > 3)
    area = opened.locator(".js-plotly-plot").first.bounding_box()
    read = "(() => { const at = window.glass.stage.panels[0].axes.project('xy'); return [at.left, at.top, at.width, at.height]; })()"
    natural = opened.evaluate(read)
    opened.mouse.move(area["x"] + area["width"] * 0.4, area["y"] + area["height"] * 0.4)
    opened.mouse.wheel(0, -400)
    until(lambda: opened.evaluate(read)[2] > natural[2] * 1.2)
    opened.wait_for_timeout(500)
    zoomed = opened.evaluate(read)
    before = opened.evaluate("window.glass.stats.updates")
    until(lambda: opened.evaluate("window.glass.stats.updates") > before + 8)
    assert opened.evaluate(read) == zoomed
    opened.mouse.dblclick(area["x"] + area["width"] * 0.4, area["y"] + area["height"] * 0.4)
    until(lambda: opened.evaluate(read) == natural)


def test_hostile_text_is_shown_as_text(opened):
    for text in HOSTILE:
        reply = prompt(opened, text, max_tokens=4)
        assert reply["ok"], reply
    opened.evaluate("window.glass.stage.show && window.glass.stage.show(['tokens'])")
    opened.wait_for_timeout(1500)
    assert opened.evaluate("window.hacked") is None
    assert opened.locator(".glass-root img").count() == 0


@pytest.mark.parametrize(
    "args", [{"text": ""}, {"text": "x" * 5000}, {"text": "a", "max_tokens": 0}, {"text": "a", "max_tokens": -3}, {"text": "a", "temperature": -1},
             {"text": "a", "temperature": "hot"}, {"text": 7}, {"text": "a", "top_p": 2}],
)  # fmt: skip
def test_bad_input_gets_a_sentence_and_nothing_running_is_lost(opened, args):
    say(opened, "pace", value=20)  # 900 tokens outlive the test
    running = prompt(opened, "stay alive", max_tokens=900)
    reply = say(opened, "prompt", **{"chat": False, **args})
    assert reply["ok"] is False
    assert reply["sentence"].endswith(".")
    refused_at = last_step(opened)
    until(lambda: last_step(opened) > refused_at + 2)  # the engine went on
    until(lambda: status(opened)["running"] == [running["name"]])


def test_an_unknown_command_and_a_bad_knob_get_a_sentence(opened):
    for name, args in (("explode", {}), ("knob", {"name": "page_size", "value": 5}), ("knob", {"name": "x", "value": 1}), ("preset", {"name": "?"})):
        reply = say(opened, name, **args)
        assert reply["ok"] is False and reply["sentence"].endswith(".")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU they can be turned")
@pytest.mark.parametrize(("language", "graphs", "why"), [("en", "CUDA graphs", "needs the Triton kernels"), ("ja", "CUDAグラフ", "Tritonカーネル")])
def test_knobs_that_need_kernels_are_greyed_with_their_reason(opened, language, graphs, why):
    prompt(opened, "the engine instead of a recording", max_tokens=4)
    opened.evaluate(f"glass.stage.setLanguage('{language}')")
    if opened.locator(".glass-drawer:visible").count() == 0:
        opened.keyboard.press("i")
    greyed = opened.locator(".glass-drawer:visible .glass-knobs label.glass-off")
    greyed.first.wait_for()
    assert greyed.count() == 2 and graphs in greyed.first.text_content()
    for label in greyed.all():
        assert why in label.locator("small").text_content() and label.locator("select").is_disabled()
    reply = say(opened, "knob", name="cuda_graphs", value=False)
    assert reply["ok"] is False and why in reply["sentence"]
    assert opened.evaluate("glass.stage.status.knobs.cuda_graphs.value") is True
    opened.evaluate("glass.stage.setLanguage('en')")


def test_closing_the_last_tab_ends_the_rooms_requests(address):
    with page(address) as first:
        wait_live(first)
        say(first, "pace", value=5)
        prompt(first, "will be left alone", max_tokens=900)
        until(lambda: status(first)["running"])
    time.sleep(6)  # the grace after which nobody is expected back
    with page(address) as second:
        wait_live(second)
        second.wait_for_timeout(1000)
        assert status(second)["running"] == [] and status(second)["queued"] == []
        say(second, "pace", value=None)


def test_the_inspector_says_which_source_and_precision_runs(opened):
    opened.keyboard.press("i")
    until(lambda: "running in float32 on torch kernels" in (opened.locator(".glass-drawer").text_content() or ""))
    assert "weights from folder" in opened.locator(".glass-drawer").text_content()


def test_inputs_follow_the_projectors_size_inside_gradio(opened):
    opened.keyboard.press("p")
    sizes = """[...document.querySelectorAll('.glass-root select, .glass-root input:not([type=checkbox])')]
               .filter((e) => e.offsetParent).map((e) => parseFloat(getComputedStyle(e).fontSize))"""
    until(lambda: opened.evaluate(sizes) and min(opened.evaluate(sizes)) >= 22, 5)
    opened.keyboard.press("p")


def test_the_page_does_not_scroll(address):
    for width, height in ((1280, 720), (1280, 600), (1920, 1080)):
        with page(address, width, height) as opened:
            opened.wait_for_timeout(500)
            assert opened.evaluate("document.documentElement.scrollHeight <= window.innerHeight")
            assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
