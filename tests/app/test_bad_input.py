"""Bad input on the page and at its start: one sentence each, and what is already running goes on."""

from __future__ import annotations

import errno
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import app as program
from benchmarks.browser import ROOT, app, chromium, page, say, wait_live
from engine.audience import LiveSource
from engine.config import CacheConfig, EngineConfig, ModelSource
from engine.generate import main as generate
from engine.recording import decode, load
from engine.session import Session
from tests.app.test_page import last_step, prompt, status, until
from tests.engine.test_generate import check_sentence, damaged
from tests.viz.test_stage_support import serve
from viz.registry import load_views
from viz.stage.hub import Hub
from viz.stage.lobby import Lobby, Shelf

needs_chromium = pytest.mark.skipif(chromium() is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def opened(tiny_llama):
    with app(["--model", str(tiny_llama), "--pages", "40"]) as address, page(address) as found:
        found.address, found.problems = address, []
        found.on("pageerror", lambda error: found.problems.append(str(error)))
        wait_live(found)
        say(found, "pace", value=30)
        yield found
        assert found.problems == []


@contextmanager
def undisturbed(opened):
    """A request that runs meanwhile is still there at the end, and has gone on."""
    say(opened, "play")
    reply = prompt(opened, "stay alive", max_tokens=500)
    until(lambda: reply["name"] in status(opened)["running"])
    before = last_step(opened)
    yield
    until(lambda: last_step(opened) > before)
    assert reply["name"] in status(opened)["running"]
    say(opened, "abort", request_id=reply["request_id"])


@contextmanager
def another(opened, address: str):
    """A tab of the same browser on another server."""
    tab = opened.context.browser.new_page(viewport={"width": 1280, "height": 720})
    tab.goto(address)
    yield tab
    tab.close()


@contextmanager
def loading(model: str):
    """The address of a stage whose engine begins to load this model."""
    session = Session(EngineConfig(ModelSource(model, "cpu"), CacheConfig(num_pages=40)), own_process=False).start()
    with serve(Hub(Lobby(LiveSource(session), Shelf(decode)), load_views())) as address:
        yield address
    session.close()


def refused(reply: dict) -> str:
    assert reply["ok"] is False, reply
    check_sentence(reply["sentence"])
    return reply["sentence"]


def notice(opened, words: str) -> str:
    """The sentence that the page shows, once it has these words."""
    shown = "(words) => document.querySelector('.glass-notice:not([hidden]) span')?.textContent.includes(words)"
    opened.wait_for_function(shown, arg=words, timeout=30_000)
    said = opened.locator(".glass-notice span").first.text_content()
    check_sentence(said)
    return said


# ---- commands ----


@needs_chromium
def test_every_bad_prompt_gets_a_sentence_and_nothing_running_is_lost(opened):
    cases = [
        ({"text": ""}, "empty"), ({"text": " \n"}, "empty"), ({"text": 7}, "text"), ({"text": None}, "text"),
        ({"text": "\ud800"}, "Unicode"),
        ({"text": "x" * 5000}, "5,000 tokens"), ({"text": "x" * 700}, "whole cache"), ({"text": "x" * 10_000_000}, "60,000 characters"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -3}, "max_tokens"), ({"max_tokens": 1.5}, "whole number"),
        ({"max_tokens": 10**17}, "max_tokens"), ({"max_tokens": True}, "max_tokens"), ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_p": 2}, "top_p"), ({"top_k": 0}, "top_k"),
        ({"seed": -1}, "seed"), ({"n": 0}, "n must"), ({"n": 65}, "n must"),
        ({"stop": ["a"] * 5}, "at most 4"), ({"stop": "x" * 101}, "100 characters"), ({"stop": [""]}, "stop"), ({"stop": {"a": 1}}, "stop"),
    ]  # fmt: skip
    with undisturbed(opened):
        for args, words in cases:
            assert words in refused(say(opened, "prompt", **{"text": "a", "chat": False, **args})), args


@needs_chromium
def test_other_bad_commands_get_a_sentence_too(opened):
    cases = [
        ("explode", {}), ("prompt__", {}), ("knob", {"name": "page_size", "value": [1]}),
        ("knob", {"name": "mode", "value": {"a": 1}}),
        ("knob", {"name": "speed", "value": 1}), ("knob", {"name": "num_pages", "value": 2**40}),
        ("knob", {"name": "max_num_seqs", "value": 0}),
        ("abort", {"request_id": "x"}), ("pace", {"value": 0}), ("pace", {"value": "x"}), ("preset", {"name": [1]}),
    ]  # fmt: skip
    with undisturbed(opened):
        for name, args in cases:
            refused(say(opened, name, **args))


@needs_chromium
def test_what_the_drawer_says_goes_with_the_prompt_and_what_is_wrong_is_shown(opened):
    with undisturbed(opened):
        opened.evaluate("glass.stage.toggleDrawer(true)")
        opened.locator(".glass-drawer summary").click()
        values = {"max_tokens": "5", "temperature": "0.5", "top_k": "3", "top_p": "0.9", "seed": "7", "n": "2", "stop": "zz"}
        for name, value in values.items():
            opened.get_by_label(opened.evaluate(f"glass.stage.drawer.fields.{name}.parentElement.textContent"), exact=True).fill(value)
        opened.get_by_label("chat template").uncheck()
        assert opened.evaluate("glass.stage.sampling") == {
            "max_tokens": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 7, "n": 2, "stop": "zz", "chat": False,
        }  # fmt: skip
        box = opened.locator(".glass-input")
        opened.get_by_label("Most new tokens").fill("0")
        box.fill("from the drawer")
        box.press("Enter")
        notice(opened, "max_tokens")
        until(lambda: box.input_value() == "from the drawer")  # what was typed is not lost
        opened.get_by_label("Most new tokens").fill("3")
        box.press("Enter")
        until(lambda: box.input_value() == "")
        until(lambda: opened.evaluate("glass.stage.chipRow.items.filter((c) => c.prompt === 'from the drawer').length") == 2)
        opened.evaluate("glass.stage.toggleDrawer(false)")


@needs_chromium
def test_a_pasted_text_that_is_too_long_is_refused_and_kept(opened):
    box = opened.locator(".glass-input")
    box.evaluate("(e) => { e.value = 'x'.repeat(10_000_000); }")
    box.press("Enter")
    notice(opened, "60,000 characters")
    assert box.evaluate("(e) => e.value.length") == 10_000_000
    box.evaluate("(e) => { e.value = ''; }")


@needs_chromium
def test_an_unknown_room_is_refused_and_the_engine_stays(opened):
    before = opened.url
    opened.goto(opened.address + "?room=other")
    notice(opened, "room")
    opened.goto(before)
    opened.wait_for_function("window.glass && window.glass.stats.frames > 0")
    wait_live(opened)
    with undisturbed(opened):
        pass


# ---- recordings ----


@pytest.fixture(scope="module")
def recorded(tiny_llama, tmp_path_factory) -> bytes:
    file = tmp_path_factory.mktemp("recorded") / "run.glass"
    assert generate(["--model", str(tiny_llama), "--prompt", "alpha", "--max-tokens", "8", "--pages", "20", "--save", str(file)]) == 0
    return file.read_bytes()


def bad_recordings(whole: bytes, model: Path) -> dict[str, tuple[bytes, str]]:
    newer = whole.replace(b'\\"version\\":1', b'\\"version\\":9')
    assert newer != whole
    return {
        "empty": (b"", "cut off"), "text": (b"hello there, this is no recording", "bytes"),
        "half": (whole[: len(whole) // 2], "cannot be read"),
        "tail": (whole[:-1], "cannot be read"), "more": (whole + b"\0", "cannot be read"), "newer": (newer, "Update"),
        "model": ((model / "model.safetensors").read_bytes(), "manifest"),
    }  # fmt: skip


@needs_chromium
def test_a_bad_recording_is_refused_on_the_page_and_nothing_running_is_lost(opened, recorded, tiny_llama, tmp_path):
    with undisturbed(opened):
        for name, (content, words) in bad_recordings(recorded, tiny_llama).items():
            file = tmp_path / f"{name}.glass"
            file.write_bytes(content)
            opened.evaluate("glass.stage.dismiss()")
            opened.locator(".glass-header input[type=file]").set_input_files(str(file))
            notice(opened, words)
            assert status(opened)["live"] is True
        good = tmp_path / "good.glass"
        good.write_bytes(recorded)
        opened.evaluate("glass.stage.dismiss()")
        opened.locator(".glass-header input[type=file]").set_input_files(str(good))
        until(lambda: status(opened)["live"] is False)
        opened.get_by_role("button", name="Back to live").click()
        until(lambda: status(opened)["live"] is True)
        assert opened.locator(".glass-notice.glass-bad:visible").count() <= 1
        opened.locator(".glass-header input[type=file]").set_input_files(str(good))
        until(lambda: status(opened)["live"] is False)
        assert say(opened, "prompt", text="a", chat=False, max_tokens=2)["ok"], "a prompt goes back to the engine by itself"
        until(lambda: status(opened)["live"] is True and len(status(opened)["running"]) == 1)


# ---- the start ----


def fails(capsys, *args: str) -> str:
    assert program.main([*args]) == 2
    out, said = capsys.readouterr()
    assert out == "" and said.startswith("error: ")
    check_sentence(said[7:].rstrip("\n"))
    return said


@pytest.fixture
def taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield str(other.getsockname()[1])


def test_a_port_that_is_in_use_or_none_is_said(capsys, taken):
    assert taken in fails(capsys, "--port", taken)
    for port in ("0", "-1", "99999"):
        assert "65535" in fails(capsys, "--port", port)
    assert "--host" in fails(capsys, "--host", "no such host")


def test_rooms_that_would_end_at_once_or_that_nobody_gets_are_refused(capsys):
    for minutes in ("0", "-2", "nan"):
        assert "--room-minutes" in fails(capsys, "--port", "7999", "--public", "--room-minutes", minutes)
    for rooms in ("0", "-1"):
        assert "--rooms" in fails(capsys, "--port", "7999", "--public", "--rooms", rooms)


def test_only_a_port_that_was_taken_is_called_so(capsys, monkeypatch):
    def start(error: OSError) -> str:
        def raises(*_):
            raise error

        monkeypatch.setattr(program, "source_of", raises)
        return fails(capsys, "--port", "7999")

    for error in (OSError(errno.EADDRINUSE, "Address already in use"), OSError("Cannot find empty port in range: 7999-7999.")):
        assert "Port 7999 was taken" in start(error)
    assert start(OSError(errno.ENOSPC, "No space left on device")) == "error: The start failed: No space left on device.\n"
    assert start(OSError(errno.EACCES, "Permission denied", "a/b")).endswith("Permission denied (a/b).\n")
    assert "does not say why" in start(OSError())


def test_a_recording_that_ships_is_read_once(monkeypatch):
    program.read_once.cache_clear()
    reads = []
    monkeypatch.setattr(program, "load", lambda path: reads.append(path) or load(path))
    assert program.shipped("one") is program.shipped("one") and len(reads) == 1
    assert program.shipped("nothing") is None and program.shipped("../one") is None and program.read_once.cache_info().currsize == 1


def test_the_program_itself_ends_with_two_and_without_a_traceback(taken):
    done = subprocess.run([sys.executable, "app.py", "--port", taken], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: Port {taken} ") and done.stderr.count("\n") == 1


def test_a_bad_recording_is_said_before_a_page_is_served(capsys, recorded, tiny_llama, tmp_path):
    for name, (content, words) in bad_recordings(recorded, tiny_llama).items():
        file = tmp_path / f"{name}.glass"
        file.write_bytes(content)
        assert words in fails(capsys, "--port", "7999", "--recording", str(file))
    assert "No such file" in fails(capsys, "--port", "7999", "--recording", str(tmp_path / "nothing"))
    assert "directory" in fails(capsys, "--port", "7999", "--recording", str(tmp_path))


def test_a_model_that_cannot_be_loaded_is_said_before_a_page_is_served(capsys, tiny_llama, tmp_path):
    whole = (tiny_llama / "model.safetensors").read_bytes()
    assert "not found" in fails(capsys, "--port", "7999", "--model", str(tmp_path / "nothing"))
    assert "cut off" in fails(capsys, "--port", "7999", "--model", damaged(tiny_llama, tmp_path / "cut", model__safetensors=whole[:9999]))
    assert "config.json" in fails(capsys, "--port", "7999", "--model", damaged(tiny_llama, tmp_path / "json", config__json=b"{"))


@needs_chromium
def test_a_model_that_fails_while_it_loads_is_said_on_the_page_and_can_be_tried_again(opened, tiny_llama, tmp_path):
    folder = Path(damaged(tiny_llama, tmp_path / "model", tokenizer__json=b'{"a": 1}'))
    with loading(str(folder)) as address, another(opened, address) as tab:
        assert "--model" in notice(tab, "tokenizer.json")
        refused(say(tab, "prompt", text="a"))
        tab.reload()
        notice(tab, "tokenizer.json")
        shutil.copy(tiny_llama / "tokenizer.json", folder)
        tab.get_by_role("button", name="Restart the engine").click()
        wait_live(tab, 30)
        assert prompt(tab, "now", max_tokens=3)["ok"]


@needs_chromium
def test_an_unknown_model_of_the_hub_is_said_on_the_page(opened, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with loading("nobody/nothing") as address, another(opened, address) as tab:
        assert "--model" in notice(tab, "nobody/nothing")
