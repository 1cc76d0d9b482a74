"""The app on a ZeroGPU Space, as far as that can be had without one: tests/app/zerogpu stands in for the package `spaces`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from benchmarks.browser import ROOT, app, chromium, page
from engine.config import CacheConfig, EngineConfig, ModelSource
from engine.recording import decode
from engine.request import SamplingParams
from engine.session import Session
from engine.trace import Trace
from tests.app.test_page import until
from tests.app.test_rooms import Tab

FAKE = Path(__file__).parent / "zerogpu"
TEXTS = ("why is the sky blue", "and the sea", "one more")


def environment(folder: Path) -> dict[str, str]:
    return {
        "SPACES_ZERO_GPU": "true", "FAKE_GPU": str(folder), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(FAKE), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip


class Gpu:
    """The folder through which a test tells the stand-in what should happen, and reads what did."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def wish(self, **wishes: object) -> None:
        for name in ("quota", "die", "seconds", "slow"):
            (self.folder / name).unlink(missing_ok=True)
        for name, value in wishes.items():
            (self.folder / name).write_text(str(value))

    def calls(self) -> list[dict]:
        log = self.folder / "log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture(scope="module")
def space(tiny_llama, tmp_path_factory):
    """(address of the stage, the GPU) of an app whose one room is everybody's."""
    folder = tmp_path_factory.mktemp("gpu")
    with app(["--model", str(tiny_llama), "--dtype", "float32"], env=environment(folder)) as address:
        yield address, Gpu(folder)


@pytest.fixture
def gpu(space):
    space[1].wish()
    yield space[1]
    space[1].wish()


@pytest.fixture
def tab(space):
    with Tab(space[0] + "glass/") as found:
        go_live(found)
        yield found


def go_live(tab: Tab) -> None:
    until(lambda: tab.known.get("status") and engine_state(tab) != "loading", 120)
    if tab.room.startswith("~"):
        assert tab.ask("live")["ok"]
        until(lambda: tab.room == "main")
    until(lambda: not tab.room.startswith("~") and status(tab)["state"] == "idle")


def status(tab: Tab) -> dict:
    return tab.known["status"]


def engine_state(tab: Tab) -> str:
    return status(tab).get("engine", status(tab))["state"]


def prompt(tab: Tab, text: str, **args: object) -> dict:
    return tab.ask("prompt", text=text, chat=False, temperature=0.0, **{"max_tokens": 12, **args})


def trace(space, tab: Tab) -> Trace:
    deadline = time.monotonic() + 90
    while True:
        try:
            with urllib.request.urlopen(f"{space[0]}glass/recording?viewer={tab.known['viewer']}", timeout=30) as answer:
                return decode(answer.read())
        except urllib.error.HTTPError as error:
            if json.load(error)["code"] != "export_busy":  # nothing has been recorded yet
                return Trace()
        assert time.monotonic() < deadline, "so many recordings a minute are saved"
        time.sleep(2)


def rest(space, tab: Tab, reply: dict) -> Trace:
    """Until a request has ended and its burst is over; what was recorded."""

    def over() -> bool:
        chips = tab.known.get("chips", {}).get("items", ())
        mine = {chip["state"] for chip in chips if chip["request"] == reply["request_id"]}
        return mine == {"finished"}

    until(over, 120)
    until(lambda: status(tab)["burst"] == "idle", 120)
    return trace(space, tab)


def newest(found):
    """The sequence that came last, and its token ids."""
    seq_id = max(found.sequences)
    tokens = found.rows("tokens", found.first_step, found.last_step)
    return found.sequences[seq_id], tokens["token_id"][tokens["seq_id"] == seq_id].tolist()


@pytest.fixture(scope="module")
def ordinary(tiny_llama):
    """The tokens that an ordinary session makes of a prompt."""
    session = Session(EngineConfig(ModelSource(str(tiny_llama), "cpu", "float32"), CacheConfig(num_pages=96)), own_process=False).start()
    session.wait_ready(120)

    def tokens(text: str) -> list[int]:
        handle = session.add(text, SamplingParams(12))
        session.wait(handle.seq_ids, 60)
        session.wait_idle()
        return newest(session.trace())[1]

    yield tokens
    session.close()


def test_bursts_make_the_tokens_of_an_ordinary_session_and_one_continuous_record(space, gpu, tab, ordinary):
    calls = len(gpu.calls())
    assert status(tab)["burst"] == "idle" and status(tab)["model"]["vocab_size"]  # known before any burst
    steps = 0
    for number, text in enumerate(TEXTS):
        reply = prompt(tab, text)
        assert reply["ok"] and reply["burst"], reply
        found = rest(space, tab, reply)
        info, made = newest(found)
        assert (info.name, info.request_id, info.seq_id) == ("ABC"[number], number + 1, number + 1)
        assert (info.name, info.request_id) == (reply["name"], reply["request_id"])
        assert info.prompt == text and made == ordinary(text)
        assert found.first_step == 0 and len(found) > steps + len(made) - 1
        assert np.array_equal(found.steps["step_id"], np.arange(len(found))) and (np.diff(found.steps["start_us"]) >= 0).all()
        if number:  # what the burst before had cached is gone
            assert not found.pool_at(steps).cached.any() and not found.pool_at(steps).ref_counts.any()
            assert found.rows("works", steps + 1, steps + 1)["num_cached"].tolist() == [0]
        steps = len(found)
    assert found.meta["backend"] == "torch" and "bursts" not in str(found.errors)
    made = gpu.calls()[calls:]
    assert len({call["worker"] for call in made}) == 3
    assert not any(call["dirt"] for call in made)


def test_two_viewers_see_the_same(space, gpu, tab):
    with Tab(space[0] + "glass/") as other:
        go_live(other)
        reply = prompt(tab, "for both")
        mine, theirs = rest(space, tab, reply), rest(space, other, reply)
        assert mine.last_step == theirs.last_step and newest(mine) == newest(theirs)
        until(lambda: tab.known["last"] == other.known["last"] == mine.last_step)


def test_a_preset_runs_its_script_and_what_comes_during_a_burst_waits_for_the_next(space, gpu, tab):
    before, calls = max(trace(space, tab).sequences, default=0), len(gpu.calls())
    gpu.wish(slow=4)
    assert tab.ask("preset", name="shared")["burst"]
    until(lambda: status(tab)["burst"] == "running", 60)
    late = prompt(tab, "for the next one")
    assert (
        late["code"] == "queued_burst"
        and late["sentence"] == f"Queued as {late['name']} for the next burst: the GPU is lent to one at a time."
    )
    for name, args in (("pause", {}), ("step", {"n": 1}), ("pace", {"value": 2.0})):
        refused = tab.ask(name, **args)
        assert refused["code"] == "not_in_bursts" and "arrows" in refused["sentence"]
    assert tab.ask("knob", name="max_num_seqs", value=2)["code"] == "burst_running"
    gpu.wish()
    found = rest(space, tab, late)
    asked = [found.sequences[i] for i in sorted(found.sequences) if i > before]
    assert [info.prompt for info in asked][3:] == ["for the next one"] and len(asked) == 4
    assert asked[3].name == late["name"] and asked[3].request_id == late["request_id"]
    assert len({info.name for info in asked}) == len({info.request_id for info in asked}) == 4
    assert len(gpu.calls()) == calls + 2
    assert tab.ask("knob", name="max_num_seqs", value=2)["knobs"]["max_num_seqs"] == 2  # between two bursts it is turned
    assert rest(space, tab, prompt(tab, "with the knob")).meta["configs"][-1]["max_num_seqs"] == 2


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"die": 3}, "The GPU was taken back before the burst had ended. What was waiting can be sent again."),
        ({"seconds": 0.05}, "The GPU was taken back before the burst had ended. What was waiting can be sent again."),
        ({"quota": 1}, "There was no burst: You have exceeded your free ZeroGPU quota (60s requested vs. 3s left). Try again in 1:00:00."),
    ],
)
def test_a_burst_that_fails_is_a_sentence_and_the_next_one_works(space, gpu, tab, ordinary, wishes, said):
    gpu.wish(**wishes)
    reply = prompt(tab, "in vain", max_tokens=400)
    assert reply["ok"]
    until(lambda: (status(tab)["error"] or {}).get("sentence") == said and status(tab)["burst"] == "idle", 60)
    assert status(tab)["state"] == "idle" and not status(tab)["running"] and not status(tab)["queued"]
    gpu.wish()
    reply = prompt(tab, TEXTS[0])
    found = rest(space, tab, reply)
    until(lambda: status(tab)["error"] is None)
    info, made = newest(found)
    assert info.name == reply["name"] and made == ordinary(TEXTS[0])
    if "die" in wishes:
        (error,) = found.errors
        assert error.code == "burst_ended" and error.sentence == said
        assert found.steps["failed"].sum() == 1


@pytest.mark.skipif(chromium() is None, reason="needs Chromium")
def test_a_page_asks_for_the_burst_in_the_visitors_name(space, gpu):
    """ZeroGPU takes the quota of whoever's Gradio event it sees."""
    calls = len(gpu.calls())
    with page(space[0]) as opened:
        problems: list[str] = []
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.wait_for_function(
            "glass.stage.status.burst === 'idle' || (glass.stage.status.engine || {}).state === 'idle'", timeout=60_000
        )
        opened.keyboard.press("Escape")
        box = opened.locator(".glass-root input[type=text]").first
        box.fill("hello there")
        box.press("Enter")
        until(lambda: len(gpu.calls()) > calls, 60)
        opened.wait_for_function("glass.stage.status.burst === 'idle'", timeout=60_000)
        assert problems == []
    assert gpu.calls()[-1]["visitor"] is True


ALONE = """
import json, sys, threading, time
import spaces
from engine.burst_session import BurstSession
from engine.config import CacheConfig, EngineConfig, ModelSource
from engine.request import SamplingParams

def main():
    config = EngineConfig(ModelSource(sys.argv[1], "cpu", "float32"), CacheConfig(num_pages=96))
    session = BurstSession(config, spaces.GPU(duration=60), seconds=float(sys.argv[2])).start().wait_ready(120)
    handle = session.add("a long one", SamplingParams(900, ignore_eos=True))
    other = session.add("another", SamplingParams(900, ignore_eos=True))
    if sys.argv[3] == "stop":
        deadline = time.monotonic() + 60
        while not session.status().running and time.monotonic() < deadline:
            time.sleep(0.02)
        session.ask("abort", room="main", request_id=None)
    ended = session.wait((*handle.seq_ids, *other.seq_ids), 120)
    session.wait_idle(timeout=60)
    status, trace = session.status(), session.trace()
    again = session.add("short", SamplingParams(3, ignore_eos=True))
    session.wait(again.seq_ids, 120)
    print(json.dumps({
        "ended": [r.value for r in ended.values()], "sentence": status.sentence, "state": status.state, "names": [handle.name, other.name, again.name],
        "steps": len(trace), "failed": int(trace.steps["failed"].sum()), "held": int(trace.pool_at(trace.last_step).ref_counts.sum()),
    }))
    session.close()
    print(json.dumps([t.name for t in threading.enumerate() if t is not threading.main_thread() and t.is_alive() and t.name == "bursts"]))

main()
"""


def alone(tiny_llama, folder: Path, seconds: float, how: str) -> tuple[dict, list]:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tiny_llama), str(seconds), how], cwd=ROOT, env={**os.environ, **environment(folder)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = done.stdout.strip().splitlines()[-2:]
    return json.loads(first), json.loads(second)


def test_what_still_runs_when_the_time_is_over_ends_with_a_sentence(tiny_llama, tmp_path):
    found, left = alone(tiny_llama, tmp_path, 0.6, "wait")
    assert found["ended"] == ["abort", "abort"] and found["state"] == "idle" and found["held"] == 0 and found["failed"] == 0
    assert found["sentence"] == "The burst's 1 seconds were over before this was done. Send it again for another burst."
    assert found["names"] == ["A", "B", "C"] and found["steps"] >= 1
    assert left == [] and nobody_left(Gpu(tmp_path))


def test_a_burst_that_only_one_room_uses_can_be_stopped(tiny_llama, tmp_path):
    found, left = alone(tiny_llama, tmp_path, 50, "stop")
    assert found["ended"] == ["error", "error"] and found["sentence"] == "The burst was stopped." and found["held"] == 0
    assert left == [] and nobody_left(Gpu(tmp_path))


def nobody_left(gpu: Gpu) -> bool:
    return not any(Path(f"/proc/{call['worker']}").exists() for call in gpu.calls())


def test_nothing_is_left_running(space, gpu):
    deadline = time.monotonic() + 20
    while not nobody_left(gpu):
        assert time.monotonic() < deadline
        time.sleep(0.1)
