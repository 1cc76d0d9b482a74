"""Reading a Trace: steps, texts, the pool and the counters at any step."""

from __future__ import annotations

import numpy as np
import pytest

import engine.core
from engine.trace import KEYFRAME, STEP, Op, Trace, replay
from tests.engine.audit import Watch, check_replay, make_lazy_core
from tests.factories import add, make_core, make_trace, piece, prompt_of, run, trace_of


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace()


def test_an_empty_trace_answers_everything_without_raising():
    empty = Trace()
    assert len(empty) == 0 and empty.first_step is None and empty.last_step is None and empty.clamp(5) is None
    assert empty.text_of(1) == "" and len(empty.tokens_of(1)) == 0 and empty.name(3) == "#3" and empty.token_text(9) == "⟨9⟩"
    assert empty.pool_at(0).tables == {} and empty.computed_at(0) == {} and empty.config_at(0) == {}
    with pytest.raises(KeyError):
        empty.step(0)


def test_clamp_finds_the_step_at_or_before():
    steps = np.zeros(3, STEP)
    steps["step_id"] = [2, 5, 9]
    sparse = Trace({"steps": steps})
    assert [sparse.clamp(i) for i in (0, 2, 4, 5, 8, 9, 100, None)] == [2, 2, 2, 5, 5, 9, 9, 9]


def test_nothing_in_a_trace_can_be_written():
    trace = make_trace()
    with pytest.raises(ValueError, match="read-only"):
        trace.steps["start_us"] = 0
    with pytest.raises(ValueError, match="read-only"):
        trace.text_bytes[0] = 1


def test_a_step_gathers_its_own_rows(trace):
    for step in trace.steps["step_id"].tolist():
        parts = trace.step(step)
        assert parts.step_id == step
        for name in ("works", "tokens", "waits", "preempts", "finishes"):
            table = getattr(trace, name)
            np.testing.assert_array_equal(getattr(parts, name), table[table["step_id"] == step])


def test_texts_and_tokens_grow_step_by_step(trace):
    for seq_id in trace.sequences:
        before = ""
        for step in trace.steps["step_id"].tolist():
            text, tokens = trace.text_of(seq_id, step), trace.tokens_of(seq_id, step)
            assert text.startswith(before) and text == "".join(piece(t) for t in tokens["token_id"])
            assert (tokens["step_id"] <= step).all()
            before = text
        assert trace.text_of(seq_id) == before


@pytest.mark.parametrize("every", [1, 3, 256])
def test_the_pool_at_every_step_is_what_it_was(every, monkeypatch):
    monkeypatch.setattr(engine.core, "KEYFRAME_EVERY", every)
    core = make_lazy_core(pages=9, page_size=4, max_num_batched_tokens=9)
    watch = Watch(core)
    for length in (9, 14, 3, 9):
        add(core, length, 9, n=1 + length % 2, temperature=0.5, seed=1)
    run(core)
    check_replay(watch, trace_of(core))


def test_two_keyframes_at_the_same_event_do_not_count_double(monkeypatch):
    """A slab is taken once: hundreds of steps pass without an event, and keyframes pile up at one place."""
    monkeypatch.setattr(engine.core, "KEYFRAME_EVERY", 4)
    core = make_lazy_core(pages=16, page_size=4, mode="contiguous")
    watch = Watch(core)
    add(core, 4, 30)
    run(core)
    trace = trace_of(core)
    marks = trace.keyframes["event_at"][trace.keyframes["op"] == 0]
    assert len(marks) > len(set(marks.tolist()))
    check_replay(watch, trace)


def test_pages_of_a_larger_pool_that_is_gone_are_left_out():
    events = [(Op.ALLOC, 9, 1, 0), (Op.RELEASE, 9, 1, 0), (Op.FREE, 9, 0, 0), (Op.ALLOC, 2, 1, 0)]
    state = replay(3, events)
    assert state.num_pages == 3 and state.num_free == 2 and state.tables == {1: (2,)}
    assert replay(3, events[:1]).num_pages == 9


def test_nonsense_in_the_log_does_not_raise():
    state = replay(2, [(Op.RELEASE, 1, 5, 0), (Op.RELEASE, 1, 5, 0), (Op.SHARE, 2, 1, 7), (Op.RELEASE, 1, 1, 7), (99, 1, 1, 1)])
    assert state.ref_counts.tolist() == [0, 0, 1] and state.tables == {1: (2,)}


def test_owners_lists_who_holds_a_page():
    state = replay(3, [(Op.ALLOC, 1, 7, 0), (Op.SHARE, 1, 3, 0), (Op.ALLOC, 2, 7, 1)])
    assert state.owners == {1: (3, 7), 2: (7,)}


def test_counters_follow_a_preemption_a_fork_and_a_hit():
    for run_ahead in (0, 1):
        core = make_lazy_core(pages=7, page_size=4, run_ahead=run_ahead)
        watch = Watch(core)
        add(core, prompt_of(9, 1), 10)
        add(core, prompt_of(9, 2), 10)
        add(core, prompt_of(6, 3), 5, n=2, temperature=1.0, seed=1)
        run(core)
        assert any(plan.preempted for plan in watch.plans.values())
        check_replay(watch, trace_of(core))


def test_words_for_a_token_that_the_trace_does_not_know(trace):
    assert trace.token_text(10**6) == "⟨1000000⟩"


def test_the_reading_cache_stays_small():
    core = make_core(pages=32)
    add(core, 4, 100)
    run(core)
    trace = trace_of(core)
    for step in range(len(trace)):
        trace.pool_at(step)
    assert len(trace.__dict__["_pools"]) <= 64
    assert KEYFRAME.names[0] == "event_at"
