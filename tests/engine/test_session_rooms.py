"""Rooms of a session: opened and closed live, apart in every respect, and all there again after a death."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from engine.build import build_core
from engine.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig, with_knob
from engine.errors import EngineError
from engine.jobs import JOBS, Job
from engine.recording import decode, encode
from engine.request import FinishReason, SamplingParams
from engine.session import Session
from tests.engine.test_session import LONG, make_session, until

SHORT = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(params=[False, True], ids=["thread", "process"])
def session(request, tiny_llama):
    made = make_session(tiny_llama, request.param)
    yield made
    made.close()


@pytest.fixture
def threaded(tiny_llama):
    made = make_session(tiny_llama)
    yield made
    made.close()


def tokens(session: Session, handle, room: str) -> list[int]:
    return session.trace(room).tokens_of(handle.seq_ids[0])["token_id"].tolist()


def job_of(session: Session, room: str = "main") -> str:
    """What the room's status says of a running job."""
    progress = session.status(room).progress
    return progress.text if progress else ""


def test_rooms_have_names_numbers_knobs_and_records_of_their_own(session):
    session.open_room("b", {"num_pages": 32, "max_num_seqs": 2})
    assert session.rooms == ("main", "b")
    one, other = session.add("alpha", SHORT), session.add("alpha", SHORT, room="b")
    assert (one.name, one.seq_ids) == (other.name, other.seq_ids) == ("A", (1,)) and one.request_id != other.request_id
    assert session.wait(one.seq_ids) == session.wait(other.seq_ids, room="b") == {1: FinishReason.LENGTH}
    assert tokens(session, one, "main") == tokens(session, other, "b")
    assert session.trace("b").first_step == session.trace().first_step == 0
    assert (session.config_of("b").cache.num_pages, session.config.cache.num_pages, session.config_of().cache.num_pages) == (32, 64, 64)
    session.ask("knobs", room="b", knobs={"max_num_seqs": 3})
    until(lambda: session.config_of("b").scheduler.max_num_seqs == 3)
    assert session.config.scheduler.max_num_seqs == 4
    assert session.trace("b").num_pages_at(0) == 32
    assert [a.name for a in session.trace("b").artifacts] == [a.name for a in session.trace().artifacts] != []


def test_a_prompt_of_one_room_is_no_hit_in_another(session):
    session.open_room("b")
    found = []
    for room in ("main", "main", "b", "b"):
        session.wait(session.add("the same sixty-four characters in every room, so that pages fill", SHORT, room=room).seq_ids, room=room)
        found.append(int(session.trace(room).works["num_cached"].max()))
    assert found[0] == found[2] == 0 and found[1] == found[3] > 0


def test_busy_rooms_write_what_each_writes_alone(threaded):
    def ask(room: str, salt: int):
        params = [SamplingParams(24, ignore_eos=True), SamplingParams(24, temperature=0.9, seed=salt, ignore_eos=True)]
        return [threaded.add(f"room {salt} says", p, room=room) for p in params]

    def read(room: str, handles) -> list[list[int]]:
        threaded.wait([i for h in handles for i in h.seq_ids], room=room)
        return [tokens(threaded, h, room) for h in handles]

    alone = [read("main", ask("main", salt)) for salt in range(3)]
    for salt in range(3):
        threaded.open_room(f"r{salt}", {"num_pages": 24})
    handles = [ask(f"r{salt}", salt) for salt in range(3)]
    assert [read(f"r{salt}", h) for salt, h in enumerate(handles)] == alone


def test_a_paused_or_slow_room_holds_nobody_up(session):
    for name in ("paused", "slow"):
        session.open_room(name)
    session.ask("pause", room="paused")
    session.ask("pace", room="slow", steps_per_s=0.5)
    session.add("hello", LONG, room="paused"), session.add("hello", LONG, room="slow")
    session.wait(session.add("hello", SHORT).seq_ids)
    assert session.status("paused").state == "paused" and not len(session.trace("paused"))
    assert len(session.trace("slow")) <= 3
    assert session.status("paused").waiting == ("A",) and session.status().waiting == ()


def test_a_closed_room_ends_for_who_waits_and_its_trace_stays_for_who_holds_it(session):
    session.open_room("b")
    handle = session.add("hello", LONG, room="b")
    until(lambda: len(session.trace("b")) > 3)
    ledger = session._ledgers["b"]
    session.close_room("b")
    assert ledger.finished == {1: FinishReason.ABORT}
    trace = ledger.store.snapshot()
    assert len(trace) > 3 and trace.pool_at(trace.last_step).tables == {} and not session.alive
    assert session.rooms == ("main",) and session.status("b").state == "closed" and not len(session.trace("b"))
    for call in (
        lambda: session.close_room("b"), lambda: session.add("x", SHORT, room="b"), lambda: session.config_of("b"),
        lambda: session.wait(handle.seq_ids, room="b"), lambda: session.ask("pause", room="b"), lambda: session.ask("is_idle", room="b"),
        lambda: session.ask("abort", room="b", request_id=None), lambda: session.ask("job", name="probe", args={}, room="b"),
        lambda: session.ask("knobs", room="b", knobs={}), lambda: session.ask("step", room="b", n=1),
    ):  # fmt: skip
        with pytest.raises(EngineError) as refused:
            call()
        assert refused.value.code == "unknown_room"
    session.open_room("b")
    again = session.add("hello", SHORT, room="b")
    assert (again.name, session.wait(again.seq_ids, room="b")) == ("A", {1: FinishReason.LENGTH})


def test_a_room_too_many_is_refused_with_advice(tiny_llama):
    config = EngineConfig(ModelSource(str(tiny_llama), "cpu"), CacheConfig(arena_pages=64), SchedulerConfig(4, 32), max_rooms=3)
    session = Session(config, own_process=False).start().wait_ready(60)
    try:
        assert session.config.cache.num_pages == 21, "an equal share"
        session.open_room("b")
        for knobs, code in (({"num_pages": 40}, "no_room"), ({"page_size": 8}, "engine_wide_knob"), ({"num_pages": 0}, "bad_config")):
            with pytest.raises(EngineError) as refused:
                session.open_room("c", knobs)
            assert refused.value.code == code
        session.ask("knobs", knobs={"num_pages": 43})
        with pytest.raises(EngineError) as refused:
            session.ask("knobs", knobs={"num_pages": 44})
        assert refused.value.code == "pool_too_large"
        session.ask("knobs", knobs={"num_pages": 21})
        session.open_room("c")
        with pytest.raises(EngineError) as refused:
            session.open_room("d")
        assert refused.value.code == "no_room" and "Wait until one closes" in refused.value.sentence
        with pytest.raises(EngineError) as refused:
            session.open_room("c")
        assert refused.value.code == "room_exists"
    finally:
        session.close()


def test_a_rooms_version_changes_with_the_room_and_the_engine_only(session):
    session.open_room("b")
    time.sleep(0.3)
    quiet, busy = session.version_of("b"), session.version_of()
    session.wait(session.add("hello", SHORT).seq_ids)
    assert session.version_of() > busy and session.version_of("b") == quiet
    session.ask("pause", room="b")
    until(lambda: session.version_of("b") > quiet)
    before = session.version_of("b")
    session.close_room("b")
    assert session.version_of("b") != before
    session.open_room("b")
    assert session.version_of("b") > before


def test_a_script_line_that_fits_no_more_is_said_and_ends_nobody(threaded):
    threaded.open_room("b")
    lines = [threaded.prompt("hello", SHORT), threaded.prompt("x" * 300, SHORT, after_steps=5)]
    threaded.ask("pause", room="b")
    threaded.ask("workload", room="b", prompts=tuple(lines), knobs={"num_pages": 4})
    running = threaded.add("hello", SHORT)
    threaded.ask("play", room="b")
    threaded.wait(running.seq_ids)
    until(lambda: "300 tokens" in threaded.status("b").sentence)
    assert threaded.is_ready and threaded.status().sentence == ""


def test_a_jobs_answer_goes_to_the_room_that_asked_and_all_see_that_it_runs(threaded):
    threaded.open_room("b")
    for room in ("main", "b"):
        threaded.ask("pause", room=room)
        threaded.add("hello", LONG, room=room)
    threaded.ask("job", name="probe", args={"points": ("attention.q",)}, room="b")
    until(lambda: job_of(threaded) == job_of(threaded, "b") != "")
    with pytest.raises(EngineError) as refused:
        threaded.ask("job", name="probe", args={})
    assert refused.value.code == "job_running"
    threaded.ask("step", room="main", n=2)
    until(lambda: len(threaded.trace()) == 2)
    assert not threaded.trace().steps["probed"].any()
    threaded.ask("step", room="b", n=1)
    until(lambda: threaded.trace("b").steps["probed"].any())
    until(lambda: job_of(threaded) == "")
    assert any(getattr(a, "name", "") == "attention.q" for a in threaded.trace("b").artifacts)
    threaded.ask("job", name="probe", args={}, room="b")
    threaded.close_room("b")
    until(lambda: job_of(threaded) == "")


@pytest.mark.parametrize("end", ["done", "fault", "cancel"])
def test_a_jobs_scratch_room_is_seen_by_nobody_and_gone_however_it_ends(threaded, monkeypatch, end):
    cores = []

    def compare(core) -> Job:
        def work(job):
            room = job.open_scratch(with_knob(core.rooms[job.room].config, "mode", "none"))
            cores.append(core)
            core.add("", (5, 6, 7), SHORT, room=room.name)
            while room.has_work or end == "cancel":
                core.step(room.name)
                yield 0.5, "again"
                if end == "fault":
                    raise RuntimeError("it broke")
            job.publish("compared")

        return Job(core, "compare", work)

    monkeypatch.setitem(JOBS, "compare", compare)
    running = threaded.add("hello", LONG)
    threaded.ask("job", name="compare", args={})
    if end == "cancel":
        until(lambda: cores)
        assert threaded.rooms == ("main",)
        with pytest.raises(EngineError):
            threaded.ask("pause", room="scratch 1.1")
        assert threaded.ask("cancel_job") is True
    until(lambda: cores and list(cores[0].rooms) == ["main"])
    until(lambda: job_of(threaded) == "")
    assert ("compared" in threaded.trace().artifacts) == (end == "done")
    assert (threaded.status().sentence == "The job “compare” failed: it broke.") == (end == "fault")
    assert threaded.wait(running.seq_ids) == {1: FinishReason.LENGTH}
    assert not len(threaded.trace().preempts), "the growing arena kept what was cached"


def test_after_a_death_every_room_is_there_again_and_goes_on_counting(tiny_llama):
    session = make_session(tiny_llama, own_process=True)
    try:
        for name, pages in (("b", 32), ("idle", 16), ("gone", 16)):
            session.open_room(name, {"num_pages": pages})
        session.close_room("gone")
        session.ask("knobs", knobs={"max_num_seqs": 3})
        handles = {room: session.add("hello", LONG, room=room) for room in ("main", "b")}
        until(lambda: all(len(session.trace(room)) > 5 for room in handles))
        seen = {room: session.version_of(room) for room in session.rooms}
        os.kill(session._process.pid, signal.SIGKILL)
        until(lambda: session.status("b").state == "dead")
        held = {room: session.trace(room) for room in session.rooms}
        assert len(held["b"]) > 5 and all(session.version_of(room) > v for room, v in seen.items())
        session.restart()
        session.wait_ready(60)
        assert session.rooms == ("main", "b", "idle")
        until(lambda: session.config_of().scheduler.max_num_seqs == 3 and session.config_of("b").cache.num_pages == 32)
        for room, lost in handles.items():
            assert session.wait(lost.seq_ids, room=room) == {1: FinishReason.ERROR}
            again = session.add("hello", SHORT, room=room)
            assert again.name == "B" and again.request_id > max(h.request_id for h in handles.values())
            session.wait(again.seq_ids, room=room)
            trace = session.trace(room)
            assert (trace.steps["step_id"][1:] > trace.steps["step_id"][:-1]).all() and len(trace) > len(held[room])
            assert trace.errors[-1].code == "core_died" and trace.errors[-1].sentence.endswith("a new engine was started.")
            assert trace.pool_at(trace.last_step).tables == {}
            assert trace.config_at(trace.last_step)["num_pages"] == {"main": 64, "b": 32}[room]
            assert len(tokens(session, again, room)) == 12
            decode(encode(trace))
        assert not session.trace("idle").errors
        session.wait(session.add("hello", SHORT, room="idle").seq_ids, room="idle")
    finally:
        session.close()


def test_a_larger_arena_takes_the_cached_pages_along(tiny_llama):
    config = EngineConfig(ModelSource(str(tiny_llama), "cpu", "float32"), CacheConfig(num_pages=16), SchedulerConfig(4, 32))
    core, _ = build_core(config)
    core.add("", (5, 6, 7, 8), LONG)
    for _ in range(20):
        core.step()
    old, pool = core.runner.arena.clone(), core.rooms["main"].scheduler.pool
    core.open_room("b")
    assert core.runner.arena.shape[0] == 33 and core.rooms["main"].scheduler.pool is pool
    assert torch.equal(core.runner.arena[:17], old)


def test_the_parameters_of_a_request_survive_a_recording(threaded):
    params = SamplingParams(6, 0.7, 5, 0.9, 3, 1, ("zzz", "☃"), (4000,), True)
    threaded.wait(threaded.add("hello", params).seq_ids)
    info = decode(encode(threaded.trace())).sequences[1]
    assert (info.top_k, info.top_p, info.stop, info.stop_token_ids, info.ignore_eos) == (5, 0.9, ("zzz", "☃"), (4000,), True)
