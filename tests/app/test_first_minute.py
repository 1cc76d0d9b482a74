"""Before anything is typed: no network, no model, and yet a real recording moves; a prompt then joins it live."""

from __future__ import annotations

import os
import time

import pytest
from playwright.sync_api import sync_playwright

from benchmarks.browser import FLAGS, app, chromium, page, wait_live
from tests.app.test_page import until

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium")

NOTHING_TO_LOAD = {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/nonexistent"}


def ink_of(opened) -> int:
    """A number that changes whenever a pixel of a panel does."""
    return opened.evaluate(
        """() => { let n = 0;
                   for (const c of document.querySelectorAll('.glass-panel canvas')) {
                     if (!c.width || !c.height) continue;
                     const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
                     for (let i = 0; i < d.length; i += 41) n = (n * 31 + d[i]) | 0;
                   }
                   return n; }"""
    )


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The app where there is neither a network nor a model."""
    env = {**NOTHING_TO_LOAD, "GLASS_CACHE": str(tmp_path_factory.mktemp("cache")), "HOME": str(tmp_path_factory.mktemp("home"))}
    with app(env=env) as address:
        yield address


def test_something_moves_within_three_seconds_without_network_or_model(bare):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=[*FLAGS, "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost"])
        opened = browser.new_page(viewport={"width": 1280, "height": 720})
        problems = []
        opened.on("pageerror", lambda error: problems.append(str(error)))
        begun = time.monotonic()
        opened.goto(bare, wait_until="load")
        loaded = time.monotonic()
        opened.wait_for_function("window.glass && window.glass.stats.updates > 0", timeout=30_000)
        first = ink_of(opened)
        until(lambda: ink_of(opened) != first, 10)
        moved = time.monotonic()
        assert opened.evaluate("glass.stage.at.last") > 10, "a whole recording lies behind it"
        assert "Step" in opened.locator(".glass-sentence").text_content()
        assert opened.locator(".glass-panel canvas").count() >= 2
        assert not problems
        if os.environ.get("GLASS_QUIET"):  # a busy machine says nothing about the page
            assert moved - loaded < 3, (loaded - begun, moved - loaded)
        browser.close()


def test_a_model_that_cannot_be_had_is_said_and_the_recording_goes_on(bare):
    with page(bare) as opened:
        opened.wait_for_function("document.querySelector('.glass-notice:not([hidden])')", timeout=60_000)
        at = opened.evaluate("glass.stage.at.step")
        until(lambda: opened.evaluate("glass.stage.at.step") != at)
        reply = opened.evaluate("glass.send('preset', {name: 'flood'})")
        assert reply["ok"], "an example plays its recording where there is no engine"
        until(lambda: opened.evaluate("glass.stage.at.last") > 60)


def test_the_first_prompt_joins_the_three_as_request_d(tiny_llama):
    with app(["--model", str(tiny_llama), "--pages", "96"]) as address, page(address) as opened:
        assert opened.evaluate("glass.stage.status.live") is False
        reply = opened.evaluate("glass.send('prompt', {text: 'hello', chat: false, max_tokens: 40})")
        assert reply["ok"]
        wait_live(opened)
        until(lambda: opened.evaluate("glass.stage.status.live") is True, 60)
        until(lambda: "D" in opened.evaluate("(glass.stage.chipRow?.items || []).map((c) => c.name)"), 30)
        names = opened.evaluate("glass.stage.chipRow.items.map((c) => c.name)")
        assert {"A", "B", "C", "D"} <= set(names)


def test_who_comes_after_the_engine_has_run_sees_it_at_once(tiny_llama):
    with app(["--model", str(tiny_llama), "--pages", "96"]) as address, page(address) as opened:
        wait_live(opened)
        opened.evaluate("glass.send('preset', {name: 'one'})")
        until(lambda: (opened.evaluate("glass.stage.at.last") or 0) > 3)
        other = opened.context.browser.new_page()
        other.goto(address)
        other.wait_for_function("window.glass && window.glass.stats.frames > 0")
        assert other.evaluate("glass.stage.status.live") is True
