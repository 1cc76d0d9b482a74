"""The session: both ways to run the core behave alike; pausing, stepping, knobs, faults and deaths."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from safetensors.torch import load_file, save_file

import engine.session
from engine.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig
from engine.errors import EngineError
from engine.messages import Died
from engine.request import FinishReason, SamplingParams
from engine.session import Session
from engine.workloads import WORKLOADS

LONG = SamplingParams(max_tokens=400, ignore_eos=True)


def make_session(folder, own_process=False, **cache) -> Session:
    config = EngineConfig(ModelSource(str(folder), "cpu", "float32"), CacheConfig(**{"num_pages": 64, **cache}), SchedulerConfig(4, 32))
    return Session(config, own_process=own_process).start().wait_ready(60)


@pytest.fixture(params=[False, True], ids=["thread", "process"])
def session(request, tiny_llama):
    made = make_session(tiny_llama, request.param)
    yield made
    made.close()


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_a_prompt_gets_its_text(session):
    handle = session.add("alpha beta", SamplingParams(max_tokens=12, ignore_eos=True))
    assert session.wait(handle.seq_ids) == {handle.seq_ids[0]: FinishReason.LENGTH}
    trace = session.trace()
    ids = trace.tokens_of(handle.seq_ids[0])["token_id"].tolist()
    assert len(ids) == 12
    assert trace.text_of(handle.seq_ids[0]) == session.tokenizer.decode(ids)
    assert handle.name == "A"


def test_pause_holds_and_step_takes_exactly_so_many(session):
    session.ask("pause", room="main")
    handle = session.add("hello", LONG)
    time.sleep(0.2)
    assert len(session.trace()) == 0
    session.ask("step", room="main", n=3)
    until(lambda: len(session.trace()) == 3)
    time.sleep(0.2)
    assert len(session.trace()) == 3
    session.ask("play", room="main")
    session.wait(handle.seq_ids)


def test_pace_limits_the_steps_a_second(session):
    session.ask("pace", room="main", steps_per_s=20.0)
    session.add("hello", LONG)
    until(lambda: len(session.trace()) >= 5)
    before, began = len(session.trace()), time.monotonic()
    time.sleep(1.0)
    rate = (len(session.trace()) - before) / (time.monotonic() - began)
    assert 5 < rate < 25  # the upper bound is the point; the lower one only says that it runs


def test_an_aborted_request_is_seen_at_once_even_while_paused(session):
    handle = session.add("hello", LONG)
    until(lambda: len(session.trace()) > 2)
    session.ask("pause", room="main")
    session.ask("abort", room="main", request_id=handle.request_id)
    assert session.wait(handle.seq_ids, 5) == {handle.seq_ids[0]: FinishReason.ABORT}
    trace = session.trace()
    assert trace.pool_at(trace.last_step).tables == {}


def test_a_knob_that_flushes_loses_no_text(session):
    alone = session.add("hello there", SamplingParams(max_tokens=60, ignore_eos=True))
    session.wait(alone.seq_ids)
    expected = session.trace().tokens_of(alone.seq_ids[0])["token_id"].tolist()
    session.ask("pause", room="main")
    handle = session.add("hello there", SamplingParams(max_tokens=60, ignore_eos=True))
    session.ask("step", room="main", n=10)
    until(lambda: len(session.trace().tokens_of(handle.seq_ids[0])) >= 9)
    session.ask("knobs", knobs={"page_size": 4, "num_pages": 200})
    session.ask("play", room="main")
    session.wait(handle.seq_ids)
    trace = session.trace()
    assert trace.tokens_of(handle.seq_ids[0])["token_id"].tolist() == expected
    assert trace.preempts["seq_id"].tolist() == [handle.seq_ids[0]]
    assert trace.page_size_at(trace.last_step) == 4


@pytest.mark.parametrize(
    "text, code",
    [("", "prompt_empty"), ("  \n", "prompt_empty"), ("x" * 5000, "prompt_too_long"), ("x" * 10_000_000, "prompt_too_long"), ("\ud800", "bad_text")],
    ids=["empty", "blank", "long", "10 MB", "surrogate"],
)
def test_a_bad_prompt_is_refused_and_nothing_running_is_lost(session, text, code):
    running = session.add("hello", SamplingParams(max_tokens=80, ignore_eos=True))
    with pytest.raises(EngineError) as refused:
        session.add(text, LONG)
    assert refused.value.code == code
    assert str(refused.value).endswith(".")
    assert session.wait(running.seq_ids) == {running.seq_ids[0]: FinishReason.LENGTH}


def test_a_prompt_larger_than_the_pool_is_refused_with_the_numbers(tiny_llama):
    session = make_session(tiny_llama, num_pages=4)
    try:
        with pytest.raises(EngineError) as refused:
            session.add("x" * 65, LONG)
        assert refused.value.fields == {"num_tokens": 65, "needed": 5, "num_pages": 4}
        assert len(session.trace().sequences) == 0
        session.wait(session.add("x" * 64, LONG).seq_ids)
    finally:
        session.close()


def test_unknown_knobs_values_and_jobs_are_refused(session):
    for name, args in (
        ("knobs", {"knobs": {"speed": 3}}),
        ("knobs", {"knobs": {"page_size": 5}}),
        ("knobs", {"knobs": {"max_num_seqs": 0}}),
        ("knobs", {"knobs": {"num_pages": 2**20, "page_size": 64}}),
        ("job", {"name": "mine bitcoin", "args": {}}),
        ("job", {"name": "probe", "args": {"points": ("nothing",)}}),
    ):
        with pytest.raises(EngineError):
            session.ask(name, **args)
    session.wait(session.add("hello", SamplingParams(max_tokens=4)).seq_ids)


def test_a_probe_keeps_tensors_of_the_next_step_and_marks_it(session):
    session.ask("pause", room="main")
    session.add("hello", LONG)
    session.ask("job", name="probe", args={"points": ("attention.q",), "layers": (1,)})
    session.ask("step", room="main", n=2)
    until(lambda: len(session.trace()) == 2 and session.trace().artifacts)
    trace = session.trace()
    samples = [a for a in trace.artifacts if getattr(a, "name", "") == "attention.q"]
    assert [(s.step_id, s.layer, s.provenance) for s in samples] == [(0, 1, "measured")]
    assert samples[0].values.shape[0] == trace.works[0]["num_tokens"]
    assert trace.steps["probed"].tolist() == [1, 0]


def test_a_dead_process_is_seen_and_a_new_one_goes_on(tiny_llama):
    session = make_session(tiny_llama, own_process=True)
    try:
        handle = session.add("hello", LONG)
        until(lambda: len(session.trace()) > 5)
        os.kill(session._process.pid, signal.SIGKILL)
        with pytest.raises(EngineError) as died:
            session.wait(handle.seq_ids, 20)
        assert died.value.code == "engine_dead"
        steps = len(session.trace())
        assert session.status().state == "dead"
        session.restart()
        session.wait_ready(60)
        again = session.add("hello", SamplingParams(max_tokens=5, ignore_eos=True))
        assert again.name == "B"
        session.wait(again.seq_ids)
        trace = session.trace()
        assert len(trace) > steps
        assert (trace.steps["step_id"][1:] > trace.steps["step_id"][:-1]).all()
        assert trace.errors[-1].code == "core_died"
        assert trace.pool_at(trace.last_step).tables == {}
        assert len(trace.text_of(again.seq_ids[0])) > 0
    finally:
        session.close()


def test_two_people_who_press_restart_get_one_new_engine(tiny_llama, monkeypatch):
    session, launched = make_session(tiny_llama), []

    def launch(starts):
        time.sleep(0.2)
        launched.append(starts)
        session._state = "loading"

    try:
        session._take(Died("The engine stopped: it broke."), session._generation)
        with monkeypatch.context() as patch:
            patch.setattr(session, "_launch", launch)
            both = [threading.Thread(target=session.restart) for _ in range(2)]
            for thread in both:
                thread.start()
            for thread in both:
                thread.join()
        assert len(launched) == 1
    finally:
        session._inbox.put(None)


def test_a_command_to_an_engine_that_dies_just_then_is_answered(tiny_llama, monkeypatch):
    session = make_session(tiny_llama)
    numbers = session._numbers

    def dies_first():
        session._take(Died("The engine stopped: it broke.", "Traceback"), session._generation)
        return next(numbers)

    monkeypatch.setattr(engine.session, "ANSWER_S", 0.3)
    session._numbers = iter(dies_first, None)
    with pytest.raises(EngineError) as refused:
        session.ask("play", room="main")
    assert refused.value.sentence == "The engine stopped: it broke." and not session._answers
    session._inbox.put(None)


def test_what_another_process_says_of_its_death_is_told(tiny_llama, capsys):
    session = make_session(tiny_llama)
    session._take(Died("The engine stopped: it broke.", "Traceback: where it broke"), session._generation)
    assert "where it broke" in capsys.readouterr().err and session.status().sentence == "The engine stopped: it broke."
    session._inbox.put(None)


def test_the_model_that_cannot_be_loaded_is_said(tmp_path):
    session = Session(EngineConfig(ModelSource(str(tmp_path / "nothing"), "cpu")), own_process=False).start()
    with pytest.raises(EngineError, match="not found"):
        session.wait_ready(30)
    assert session.status().state == "dead"
    session.close()


def test_token_ids_beyond_the_vocabulary_are_refused(session):
    for ids in ((1, 10_000), (-1, 2)):
        with pytest.raises(EngineError) as refused:
            session.add_ids("", ids, LONG)
        assert refused.value.code == "bad_token"


def test_the_cores_process_ends_when_its_parent_is_killed(tiny_llama):
    program = f"""
import time
from tests.engine.test_session import make_session
if __name__ == "__main__":
    session = make_session({str(tiny_llama)!r}, own_process=True)
    print(session._process.pid, flush=True)
    time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    os.kill(child, 0)  # it is there
    parent.kill()
    parent.wait()

    def gone() -> bool:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return True
        return False

    until(gone, 15)


def test_a_fault_in_a_command_is_answered_and_ends_nothing(session):
    running = session.add("hello", SamplingParams(max_tokens=60, ignore_eos=True))
    with pytest.raises(EngineError) as answered:
        session.ask("step", room="main", n="three")
    assert answered.value.code == "command_failed" and str(answered.value).endswith(".")
    session.ask("play", room="main")
    assert session.wait(running.seq_ids) == {running.seq_ids[0]: FinishReason.LENGTH}


def test_scores_that_are_no_numbers_fail_the_step_with_a_sentence(tiny_llama, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors")
    session = make_session(folder)
    try:
        handle = session.add("hello", LONG)
        assert session.wait(handle.seq_ids) == {handle.seq_ids[0]: FinishReason.ERROR}
        assert "not numbers" in session.trace().errors[-1].sentence
        assert session.trace().pool_at(session.trace().last_step).tables == {}
    finally:
        session.close()


def test_a_workload_that_is_started_again_finds_nothing_of_its_first_run_in_the_cache(session):
    for _ in range(2):
        first = (session.trace().last_step or -1) + 1
        session.run_workload(WORKLOADS["shared"])
        session.wait_idle()
        trace = session.trace()
        begun = trace.rows("works", first, trace.last_step)
        earliest = begun[begun["seq_id"] == begun["seq_id"].min()]
        assert earliest["num_cached"].max() == 0
        assert begun["num_cached"].max() > 0, "the later ones of the same run do hit it"
