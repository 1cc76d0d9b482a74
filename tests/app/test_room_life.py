"""Who leaves takes its requests along and nobody else's; an engine that fails or dies says so and comes back."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from websockets.sync.client import connect

from benchmarks.browser import app, chromium, page, say, wait_live
from engine.audience import LiveSource
from engine.config import CacheConfig, EngineConfig, ModelSource
from engine.recording import decode
from engine.request import FinishReason, SamplingParams
from engine.runner import ModelRunner
from engine.session import Session
from tests.app.test_page import prompt, status, until
from tests.engine.test_generate import check_sentence
from tests.viz.test_stage_support import serve
from viz.registry import load_views
from viz.stage.hub import Hub, HubConfig
from viz.stage.lobby import Lobby, Shelf

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium")

GRACE, SILENCE = 0.8, 4.0
STAYS = "I am reloaded"  # 900 tokens without an end-of-text token: 45 s at 20 steps/s, longer than any test here


@pytest.fixture(scope="module")
def live(tiny_llama):
    """(session, hub, address) of a server in this process, with short times and the real engine."""
    config = EngineConfig(ModelSource(str(tiny_llama), "cpu", "float32"), CacheConfig(num_pages=96))
    session = Session(config, own_process=False).start().wait_ready(60)
    hub = Hub(Lobby(LiveSource(session, GRACE), Shelf(decode)), load_views(), config=HubConfig(silence=SILENCE, ping=0.4))
    with serve(hub) as address:
        yield session, hub, address
    session.close()


@pytest.fixture(scope="module")
def tab(live):
    """The tab that stays."""
    with page(live[2]) as found:
        wait_live(found)
        yield found


@pytest.fixture
def room(live, tab):
    """The session, at 20 steps a second, with a long request of the tab that stays."""
    session = live[0]
    say(tab, "abort", request_id=None)
    say(tab, "play")
    say(tab, "pace", value=20)
    session.stays = prompt(tab, STAYS, max_tokens=900)["name"]
    until(lambda: alive(session) == {session.stays})
    yield session
    assert alive(session) == {session.stays}  # the other tab is untouched
    before = len(session.trace())
    until(lambda: len(session.trace()) > before)


def alive(session: Session) -> set[str]:
    said = session.status()
    return {*said.running, *said.waiting}


def owners(session: Session) -> set[str]:
    """Whose pages the pool holds."""
    trace = session.trace()
    return {trace.sequences[i].name for i in trace.pool_at(trace.last_step).tables}


def until_alone(session: Session, seconds: float = 20.0) -> None:
    until(lambda: alive(session) == {session.stays} and owners(session) == {session.stays}, seconds)


@contextmanager
def another(tab, address: str, script: str = ""):
    found = tab.context.browser.new_page()
    found.add_init_script(script)
    found.goto(address)
    found.wait_for_function("window.glass && window.glass.stats.frames > 0")
    yield found
    if not found.is_closed():
        found.close()


@contextmanager
def stranger(address: str):
    """A bare socket that says hello and sends a long prompt."""
    where = urlsplit(address)
    with connect(f"ws://{where.netloc}{where.path}ws", max_size=None, close_timeout=0.1) as ws:
        ws.send(json.dumps({"t": "hello", "credit": 1, "room": "main", "state": {}, "panels": []}))
        args = {"text": "I leave", "max_tokens": 900, "chat": False}
        ws.send(json.dumps({"t": "command", "id": 1, "name": "prompt", "args": args}))
        yield ws


@pytest.mark.parametrize("way", ["reset", "cut", "silent"])
def test_a_socket_that_is_gone_without_a_word_ends_its_requests_only(live, room, way):
    with stranger(live[2]) as ws:
        until(lambda: len(alive(room)) == 2 and len(owners(room)) == 2)
        if way == "reset":
            ws.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            ws.socket.close()
        elif way == "cut":
            ws.socket.shutdown(socket.SHUT_RDWR)
        until_alone(room)  # "silent": it never answers the hub's pings


def test_the_request_that_stays_does_not_end_by_itself(live):
    """Other texts reach an end-of-text token: "I stay" after 252 tokens, and a test that took 13 seconds found nobody."""
    session = live[0]
    handle = session.add(STAYS, SamplingParams(900))
    session.ask("pace", room="main", steps_per_s=None)
    assert session.wait(handle.seq_ids, 60) == {handle.seq_ids[0]: FinishReason.LENGTH}


def test_closing_one_of_two_tabs_ends_its_requests_only(live, tab, room):
    with another(tab, live[2]) as second:
        prompt(second, "mine", max_tokens=900)
        prompt(second, "mine too", max_tokens=900, n=2)
        until(lambda: len(alive(room)) == 4)
        second.close()
    until_alone(room)


def test_a_reload_keeps_the_requests_and_closing_afterwards_ends_them(live, tab, room, monkeypatch):
    grace = 4.0  # a page must be back within it, on a busy machine too
    monkeypatch.setattr(live[1].source.base, "_grace", grace)
    with another(tab, live[2]) as second:
        name = prompt(second, "I am reloaded", max_tokens=900)["name"]
        until(lambda: name in alive(room))
        second.reload()
        second.wait_for_function("window.glass && window.glass.stats.frames > 0")
        time.sleep(grace + 0.7)
        assert name in alive(room)
    until_alone(room)


def test_a_tab_in_the_background_stays_and_draws_again_when_it_is_seen(live, tab, room):
    script = """(() => { let hidden = false; const frame = window.requestAnimationFrame.bind(window);
      Object.defineProperty(document, 'hidden', { get: () => hidden });
      window.requestAnimationFrame = (f) => hidden ? 0 : frame(f);
      window.hide = (value) => { hidden = value; document.dispatchEvent(new Event('visibilitychange')); }; })()"""
    with another(tab, live[2], script) as second:
        name = prompt(second, "I go on", max_tokens=900)["name"]
        viewer = second.evaluate("glass.stage.link.viewer")
        second.evaluate("hide(true)")
        second.wait_for_timeout((SILENCE + GRACE + 1) * 1000)
        assert viewer in live[1].viewers and name in alive(room)
        drawn = second.evaluate("glass.stats.updates")
        second.evaluate("hide(false)")
        until(lambda: second.evaluate("glass.stats.updates") > drawn + 2)
        assert second.evaluate("glass.stage.link.viewer") == viewer
    until_alone(room)


def test_a_step_that_fails_says_so_and_the_next_prompt_works(live, tab, monkeypatch):
    session = live[0]
    say(tab, "abort", request_id=None)
    say(tab, "pace", value=None)
    until(lambda: not alive(session))
    tab.evaluate("glass.stage.dismiss()")

    def fail(*args, **kwargs):
        raise RuntimeError("the device is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "run", fail)
        name = prompt(tab, "it fails", max_tokens=5)["name"]
        tab.wait_for_function("document.querySelector('.glass-notice:not([hidden])')?.textContent.includes('on fire')", timeout=10_000)
        until(lambda: not alive(session))
    trace = session.trace()
    failed = next(i for i, info in trace.sequences.items() if info.name == name)
    assert trace.errors[-1].seq_ids == (failed,)
    check_sentence(trace.errors[-1].sentence)
    assert owners(session) == set()
    reply = prompt(tab, "it works", max_tokens=5, temperature=0.0)
    until(lambda: any(info.name == reply["name"] for info in session.trace().sequences.values()) and not alive(session))
    assert status(tab)["state"] in ("idle", "running")
    tab.wait_for_function("document.querySelector('.glass-notice').hidden", timeout=5_000)


# ---- the core in its own process dies ----


def core_of(address: str) -> int:
    """The process id of the engine of an app: spawned by the process that has this port on its command line."""
    port = str(urlsplit(address).port)
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
            parent = re.search(r"PPid:\s+(\d+)", (entry / "status").read_text())[1]
            if "spawn_main" in command and port in Path(f"/proc/{parent}/cmdline").read_bytes().decode().split("\0"):
                return int(entry.name)
        except (OSError, TypeError):  # it ended meanwhile
            continue
    raise AssertionError("there is no engine process")


def test_a_killed_engine_is_said_its_records_stay_and_restart_brings_it_back(tiny_llama, tab):
    with app(["--model", str(tiny_llama), "--own-process"]) as address, another(tab, address) as opened:
        wait_live(opened, 60)
        say(opened, "pace", value=30)
        prompt(opened, "to be cut off", max_tokens=900)
        until(lambda: (opened.evaluate("glass.stage.at.last") or 0) > 20)
        os.kill(core_of(address), signal.SIGKILL)
        opened.wait_for_function("glass.stage.status.state === 'dead'", timeout=10_000)
        said = opened.locator(".glass-notice:visible span").first.text_content()
        check_sentence(said)
        assert "stopped" in said
        check_sentence(say(opened, "prompt", text="too late")["sentence"])
        last = opened.evaluate("glass.stage.at.last")
        opened.keyboard.press("Escape")
        opened.keyboard.press("Home")
        until(lambda: opened.evaluate("glass.stage.at.step") == 0)
        opened.keyboard.press("ArrowRight")
        until(lambda: opened.evaluate("glass.stage.at.step") == 1)
        assert "Step 1" in opened.locator(".glass-count").text_content()
        content = opened.request.get(f"{address}glass/recording?viewer={opened.evaluate('glass.stage.link.viewer')}")
        assert len(decode(content.body())) == last + 1  # what happened can still be saved
        opened.reload()
        opened.get_by_role("button", name="Restart the engine").click()
        wait_live(opened, 60)
        again = prompt(opened, "and on", max_tokens=5)
        assert again["name"] == "E"  # after the three that play before anything is typed, and the one that was cut off
        until(lambda: opened.evaluate("glass.stage.at.last") > last + 3)
        assert opened.locator(".glass-source").get_attribute("data-state") == "live"
