"""EngineCore: rooms, faults, knobs and records around the scheduler."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from engine.config import with_knob
from engine.errors import EngineError
from engine.request import FinishReason, SamplingParams, letters
from engine.scheduler import TIMED_TEXTS
from engine.store import TraceStore
from tests.engine.audit import Watch, check_replay, knob, make_lazy_core
from tests.factories import add, fake_continuation, make_core, piece, prompt_of, run, trace_of


def two_rooms(run_ahead: int):
    core = make_lazy_core(pages=48, page_size=4, run_ahead=run_ahead)
    core.close_room("main")
    for name in ("left", "right"):
        core.open_room(name, with_knob(core.config, "num_pages", 24))
    return core, {name: Watch(core, name) for name in core.rooms}


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_rooms_take_turns_and_do_not_touch_each_others_tokens(run_ahead):
    """Persistent device state is indexed by row slot: with run-ahead, two rooms must not share one."""
    core, watches = two_rooms(run_ahead)
    prompts = {"left": [prompt_of(5, 1), prompt_of(9, 2)], "right": [prompt_of(5, 3), prompt_of(2, 4)]}
    for room, some in prompts.items():
        for prompt in some:
            core.add("", prompt, SamplingParams(max_tokens=10), room=room)
    run(core, 200)
    for room, some in prompts.items():
        assert watches[room].made == {i + 1: fake_continuation(p, 10) for i, p in enumerate(some)}
    assert [len(w.plans) for w in watches.values()] == [10, 10]


def test_rooms_hold_different_pages_and_hit_only_their_own_prefixes():
    core, watches = two_rooms(0)
    for room in ("left", "right"):
        core.add("", prompt_of(9, 1), SamplingParams(max_tokens=2), room=room)
        run(core)
    assert not any(w.num_cached for watch in watches.values() for plan in watch.plans.values() for w in plan.works)
    left, right = (set(core.rooms[name].scheduler.pool.pages) for name in core.rooms)
    assert not left & right and len(left) == len(right) == 24


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_failed_launch_ends_its_own_requests_with_a_sentence_and_nobody_elses(run_ahead):
    core = make_lazy_core(pages=32, run_ahead=run_ahead, max_num_seqs=2)
    watch = Watch(core)
    for length in (3, 4, 5):
        add(core, length, 6)
    core.runner.fail_on.add(2)
    run(core)
    assert watch.ended == {1: FinishReason.ERROR, 2: FinishReason.ERROR, 3: FinishReason.LENGTH}
    assert watch.made[3] == fake_continuation(prompt_of(5, 5), 6)
    assert watch.made[1] == fake_continuation(prompt_of(3, 3), 2)
    trace = trace_of(core)
    (error,) = trace.errors
    assert (error.step_id, error.code, error.seq_ids) == (2, "step_failed", (1, 2))
    assert error.sentence == "Step 2 failed: the fake device was told to fail. Its requests ended; the next prompt can be sent."
    assert trace.step(2).error == error and trace.steps["failed"].tolist().count(1) == 1


@pytest.mark.parametrize("late", [1, 2])
def test_a_late_failure_voids_the_steps_planned_on_it_and_returns_every_page(late):
    core = make_lazy_core(pages=16, run_ahead=1)
    watch = Watch(core)
    add(core, 5, 8)
    core.runner.fail_late.add(late)
    run(core)
    add(core, 5, 8)
    run(core)
    assert watch.ended == {1: FinishReason.ERROR, 2: FinishReason.LENGTH} and watch.made[2] == fake_continuation(prompt_of(5, 5), 8)
    trace = trace_of(core)
    assert [e.step_id for e in trace.errors] == [late, late + 1]
    assert core.rooms["main"].scheduler.pool.num_free == 16
    check_replay(watch, trace)


def test_r3_records_equal_steps_whoever_drains_and_how_often():
    whole = make_core(pages=12, max_num_batched_tokens=8)
    often = make_core(pages=12, max_num_batched_tokens=8)
    store = TraceStore(2**24, piece, {"model": {"name": "fake", "parameters": 0}, "device": "test", "source": "live"})
    for core in (whole, often):
        for length in (3, 14, 6):
            add(core, length, 7, seed=1)
    steps = 0
    while often.has_work:
        whole.step()
        often.step()
        steps += 1
        store.apply(often.rooms["main"].recorder.drain())
        store.apply(often.rooms["main"].recorder.drain())  # a second reader finds nothing, and adds nothing
    a, b = trace_of(whole), store.snapshot()
    assert a.steps["step_id"].tolist() == b.steps["step_id"].tolist() == list(range(steps))
    for name in ("works", "tokens", "waits", "preempts", "finishes", "texts", "events", "text_bytes", "keyframes"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert a.sequences == b.sequences


def test_r3_step_ids_go_on_for_a_reader_who_starts_again():
    core = make_core()
    add(core, 4, 3)
    run(core)
    first = trace_of(core)
    add(core, 4, 3)
    run(core)
    second = trace_of(core)
    assert second.first_step == first.last_step + 1 and second.first_step is not None


def test_watching_changes_nothing():
    texts = []
    for tracing in (True, False):
        core = make_core(pages=8, max_num_batched_tokens=9)
        core.config = replace(core.config, tracing=tracing)
        for length in (3, 10, 6):
            add(core, length, 7)
        made: dict[int, list[int]] = {}
        while core.has_work:
            for seq_id, token in core.step().committed.accepted:
                made.setdefault(seq_id, []).append(token)
        texts.append(made)
        assert core.rooms["main"].recorder.num_pending == (0 if not tracing else core.rooms["main"].scheduler._next_step)
    assert texts[0] == texts[1]


def test_a_report_records_an_abort_while_nobody_steps():
    for run_ahead in (0, 1):
        core = make_lazy_core(pages=16, run_ahead=run_ahead)
        watch = Watch(core)
        add(core, 4, 6)
        add(core, 5, 6)
        core.step()
        core.step()
        core.abort(1)
        steps = len(watch.plans)
        record = core.report("main")
        assert watch.ended == {1: FinishReason.ABORT} and len(watch.plans) == steps + 1
        assert run_ahead or not record.plan.works  # what was in flight settles, and tells
        assert core.report("main") is None
        run(core)
        assert watch.made[2] == fake_continuation(prompt_of(5, 5), 6)
        check_replay(watch, trace_of(core))


def test_a_core_that_follows_a_dead_one_goes_on_counting():
    core = make_core()
    core.begin_at(SimpleNamespace(step=700, sequence=40, request=30, name=26, text_bytes=1000, events=5000, config=3, clock_us=9))
    (seq_id,) = add(core, 4, 3)
    run(core)
    trace = trace_of(core)
    assert (seq_id, trace.first_step, trace.sequences[40].name, trace.sequences[40].request_id) == (40, 700, "AA", 30)
    assert trace.texts["offset"][0] == 1000 and trace.steps["event_end"][0] > 5000 and trace.steps["config"].tolist() == [3] * 3


def test_a_knob_that_needs_a_flush_keeps_who_runs_and_one_that_does_not_keeps_their_pages():
    core = make_lazy_core(pages=16)
    Watch(core)
    add(core, 5, 8)
    core.step()
    pool = core.rooms["main"].scheduler.pool
    knob(core, "max_num_batched_tokens", 8)
    assert core.rooms["main"].scheduler.pool is pool and pool.tables
    knob(core, "page_size", 8)
    assert core.rooms["main"].scheduler.pool is not pool and not core.rooms["main"].scheduler.pool.tables
    run(core)
    trace = trace_of(core)
    assert trace.meta["configs"][-1]["page_size"] == 8 and trace.page_size_at(0) == 4 and trace.page_size_at(trace.last_step) == 8


def test_a_seed_is_drawn_and_recorded_so_that_a_run_can_be_repeated():
    core = make_core(pages=32)
    add(core, 4, 6, temperature=1.0)
    run(core)
    trace = trace_of(core)
    again = make_core(pages=32)
    add(again, 4, 6, temperature=1.0, seed=trace.sequences[1].seed)
    run(again)
    assert trace_of(again).tokens["token_id"].tolist() == trace.tokens["token_id"].tolist()


def test_a_refused_request_uses_up_no_letter_and_no_number():
    core = make_core(pages=4)
    with pytest.raises(EngineError):
        add(core, 100, 4)
    add(core, 4, 2)
    run(core)
    assert trace_of(core).sequences[1].name == "A"


def test_letters():
    assert [letters(i) for i in (0, 25, 26, 27, 51, 52, 701, 702)] == ["A", "Z", "AA", "AB", "AZ", "BA", "ZZ", "AAA"]


# ---- clocks ----


def test_a_steps_finer_clocks_are_parts_of_its_stages_and_say_when_it_was_waited_for():
    core = make_core(pages=64)
    add(core, 6, 8)
    run(core)
    steps = trace_of(core).steps
    launched = steps["start_us"] + steps["schedule_us"] + steps["build_us"] + steps["run_us"]
    assert (steps["text_us"] <= steps["commit_us"] + 1).all() and (steps["gpu_us"] == 0).all()
    assert (steps["settle_at_us"] >= launched - 3).all(), "waited for at once; clocks are whole microseconds"
    assert (steps["settle_at_us"][:-1] <= steps["start_us"][1:]).all()


def test_with_run_ahead_a_step_is_waited_for_once_the_next_has_been_launched():
    core = make_core(pages=64, run_ahead=1)
    add(core, 6, 8)
    run(core)
    steps = trace_of(core).steps
    launched = steps["start_us"] + steps["schedule_us"] + steps["build_us"] + steps["run_us"]
    assert len(steps) >= 8 and (steps["settle_at_us"][:-1] >= launched[1:] - 3)[: len(steps) - 2].all()


def test_text_is_timed_apart_in_steps_of_few_tokens_only():
    core, asked = make_core(pages=256, max_num_seqs=2 * TIMED_TEXTS, max_num_batched_tokens=256), []
    for i in range(TIMED_TEXTS + 1):
        add(core, 4 + i, 6 if i else 30)
    while core.has_work:
        record = core.step()
        asked.append((len(record.result.sampled), record.committed.text_us))
    assert all(us == 0 for n, us in asked if n > TIMED_TEXTS) and any(n > TIMED_TEXTS for n, _ in asked)
    assert sum(us for n, us in asked if n <= TIMED_TEXTS) > 0
