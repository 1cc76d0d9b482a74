"""Comparisons: the same requests in two modes differ as theory says in what is counted, and disturb nobody."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from engine.audience import LiveSource
from engine.compare import ENGINE_CHANGED, MAX_STEPS, check_pair, last_requests, with_rest
from engine.config import arena_config, with_knob
from engine.core import EngineCore
from engine.errors import EngineError
from engine.jobs import start_job
from engine.messages import Prompt
from engine.recording import decode, encode
from engine.request import SamplingParams
from engine.store import MAX_COMPARISONS, TraceStore
from engine.trace import COMPARABLE, Comparison, ModeRun, Pass, Trace, TraceDelta
from engine.workloads import WORKLOADS, Line, Workload
from tests.engine.test_rooms import audit
from tests.engine.test_session import make_session, until
from tests.factories import FakeRunner, FakeText, add, make_config, make_core, prompt_of, run, trace_of

KINDS = [(knob, pair) for knob, pairs in COMPARABLE.items() for pair in pairs]


def prompts_of(*lengths: int, max_tokens: int = 10, after: tuple[int, ...] = ()) -> tuple[Prompt, ...]:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    later = (*after, *(0,) * (len(lengths) - len(after)))
    return tuple(Prompt("", prompt_of(n, i), sampling, after_steps=at) for i, (n, at) in enumerate(zip(lengths, later)))


def in_an_arena(pages: int, arena_pages: int) -> EngineCore:
    """Where another room takes its pages beside the others'."""
    config = make_config(pages)
    config = replace(config, cache=replace(config.cache, arena_pages=arena_pages))
    return EngineCore(config, FakeRunner(arena_config(config)), FakeText)


def job_of(core, knob: str, values: tuple, prompts: tuple[Prompt, ...]):
    args = {"knob": knob, "values": values, "prompts": prompts, "names": tuple("ABCDEFGH"[: len(prompts)])}
    return start_job(core, "compare", args)


def compared(core, knob: str, values: tuple, prompts: tuple[Prompt, ...]) -> Comparison:
    job = job_of(core, knob, values, prompts)
    while not job.advance():
        assert len(core.rooms) <= 2
    job.close()
    assert not job.note, job.note
    (found,) = job.take_artifacts()
    return found


def computed(it: ModeRun) -> int:
    return sum(work[3] for work in it.works)


def prompt_tokens(it: Comparison, at: int) -> int:
    return sum(min(max(it.num_prompt_tokens[s] - start, 0), n) for _, s, start, n, _ in it.runs[at].works)


# ---- what theory says ----


def test_without_a_cache_more_tokens_are_computed_for_the_same_text():
    it = compared(make_core(pages=64, max_num_batched_tokens=64), "mode", ("paged", "none"), prompts_of(7, 20))
    cached, without = it.runs
    assert computed(cached) == 7 + 20 + 2 * 9 and computed(without) == sum(n + k for n in (7, 20) for k in range(10))
    assert all(it.same) and {work[4] for work in without.works} == {Pass.PREFILL, Pass.RECOMPUTE}
    assert [len(r.tokens) for r in it.runs] == [20, 20]


def test_contiguous_slabs_hold_blocks_for_tokens_that_never_come():
    prompts = prompts_of(6, 9, max_tokens=30)
    prompts = tuple(replace(p, sampling=replace(p.sampling, max_tokens=30)) for p in prompts)
    it = compared(make_core(pages=32), "mode", ("paged", "contiguous"), prompts)
    paged, slabs = it.runs
    assert all(it.same) and slabs.held[0] == -(-36 // 4) + -(-39 // 4) > paged.held[0] == 2 + 3
    assert paged.used == slabs.used and all(u <= h * it.page_size for r in it.runs for u, h in zip(r.used, r.held))


def test_in_static_batches_a_latecomer_waits_and_slots_stand_idle():
    prompts = prompts_of(4, 5, 6, after=(0, 0, 3))
    it = compared(make_core(pages=64), "batching", ("continuous", "static"), prompts)
    continuous, static = it.runs
    assert all(it.same) and len(static.start_us) > len(continuous.start_us) and not any(w[0] == 2 for w in continuous.waits)
    assert any(w[0] == 2 for w in static.waits) and computed(static) == computed(continuous)


def test_without_chunked_prefill_a_step_takes_a_whole_prompt():
    it = compared(make_core(pages=64, max_num_batched_tokens=8), "chunked_prefill", (True, False), prompts_of(4, 40, after=(0, 2)))
    most = [max(np.bincount([w[0] for w in r.works], [w[3] for w in r.works])) for r in it.runs]
    assert all(it.same) and most == [8, 40]


def test_with_prefix_caching_a_shared_prompt_is_computed_once():
    shared = prompt_of(16, 9)
    prompts = tuple(Prompt("", (*shared, 3 + i), SamplingParams(max_tokens=4), after_steps=3 * i) for i in range(3))
    it = compared(make_core(pages=64), "prefix_caching", (True, False), prompts)
    assert all(it.same) and (prompt_tokens(it, 0), prompt_tokens(it, 1)) == (17 + 1 + 1, 3 * 17)


@pytest.mark.parametrize(("knob", "pair"), KINDS)
def test_an_empty_prefix_cache_and_drawn_seeds_are_the_same_for_both(knob, pair):
    """The warm-up and the first run leave nothing behind; a seed that nobody set is drawn once."""
    core = make_core(pages=64)
    drawn = Prompt("", prompt_of(16, 9), SamplingParams(max_tokens=6, temperature=1.0, n=2))
    it = compared(core, knob, pair[::-1], (drawn, *prompts_of(9)))
    assert it.names == ("A·1", "A·2", "B") and it.same == (True, True, True)
    assert all(r.works[0][:4] == (0, 0, 0, 16) for r in it.runs)
    assert [r.value for r in it.runs] == list(pair[::-1])


# ---- nobody is disturbed ----


@pytest.mark.parametrize(("knob", "pair"), KINDS)
def test_the_asking_room_goes_on_as_if_nothing_was(knob, pair):
    texts = []
    for asks in (False, True):
        core = in_an_arena(32, 64)
        ids = [*add(core, 6, 20), *add(core, 9, 20)]
        core.step()
        before, clock = dict(core.rooms["main"].scheduler.pool.tables), core.housing.clock.busy_us
        job = job_of(core, knob, pair, prompts_of(5, 8)) if asks else None
        while job is not None and not job.advance():
            assert core.rooms["main"].scheduler.pool.tables == before and core.housing.clock.busy_us == clock
            assert core.rooms_in_turn() == ["main"]
        if job is not None:
            job.close()
        assert list(core.rooms) == ["main"] and list(core.arena.leases) == ["main"]
        audit(core)
        run(core)
        trace = trace_of(core)
        texts.append([trace.tokens_of(i)["token_id"].tolist() for i in ids])
        assert not len(trace.preempts)
    assert texts[0] == texts[1]


def test_cancelled_at_any_slice_the_pages_are_back():
    for slices in (1, 4, 9, 14):
        core = make_core(pages=32)
        job = job_of(core, "mode", ("paged", "none"), prompts_of(5, 8))
        for _ in range(slices):
            job.advance()
        job.close()
        assert list(core.rooms) == ["main"] and list(core.arena.leases) == ["main"] and not job.take_artifacts()


# ---- refusals ----


def noted(core, prompts: tuple[Prompt, ...]) -> str:
    job = job_of(core, "mode", ("paged", "none"), prompts)
    while not job.advance():
        pass
    job.close()
    assert not job.take_artifacts() and list(core.rooms) == ["main"] and list(core.arena.leases) == ["main"]
    return job.note


def test_a_run_that_cannot_be_made_ends_with_a_sentence_and_gives_its_pages_back():
    assert noted(make_core(pages=4), prompts_of(40)).startswith("The prompt has 40 tokens and needs 10 pages")
    assert noted(in_an_arena(8, 10), prompts_of(4)).startswith("There is no space for another room")
    assert noted(make_core(), ()).startswith("There is nothing to run again yet.")
    assert "At most 8 requests" in noted(make_core(), prompts_of(*(3,) * 9))
    core = make_core()
    core.runner.fail_on.add(3)
    assert noted(core, prompts_of(4)).startswith("The comparison ended: Step 3 failed")


@pytest.mark.parametrize(
    ("change", "slices"),
    [
        *((change, n) for change in ("another block size", "other kernels") for n in (1, 4, 12, 13, 16, 22)),
        *(("an arena that loses its contents", n) for n in (1, 4, 13, 16, 22)),
    ],
)
def test_an_engine_that_was_changed_meanwhile_ends_it_with_a_sentence(change, slices):
    """In a warm-up, in a run or between two: the second run may not differ from the first in more than its knob."""
    core = make_core(pages=32, page_size=4)
    job = job_of(core, "mode", ("paged", "none"), prompts_of(5, 8))
    for _ in range(slices):
        assert not job.advance()
    if change == "another block size":
        core.reconfigure(with_knob(core.config, "page_size", 8))
    elif change == "other kernels":
        core.reconfigure(with_knob(core.config, "fused", not core.config.runner.fused))
    else:
        core.runner.configure = lambda config, configure=core.runner.configure: configure(config) or False
        core.reconfigure(with_knob(core.config, "num_pages", 50))
    while not job.advance():
        pass
    job.close()
    assert job.note == ENGINE_CHANGED and not job.take_artifacts() and list(core.rooms) == ["main"]
    audit(core)


def test_a_run_of_too_many_steps_is_stopped():
    core = make_core(pages=1024, max_model_len=4096)
    said = noted(core, prompts_of(3, max_tokens=MAX_STEPS + 5))
    assert said == "These requests take more than 2,000 steps with paged blocks. Compare shorter ones."


@pytest.mark.parametrize(
    ("knob", "values"),
    [
        ("mode", ("none", "contiguous")), ("mode", ("paged", "paged")), ("mode", ("paged",)), ("mode", "paged"), ("policy", ("fcfs", "priority")),
        ("prefix_caching", (1, 0)), ("prefix_caching", ([], {})), ({}, (True, False)), (None, None), ("max_num_seqs", (1, 2)),
    ],
)  # fmt: skip
def test_only_the_five_kinds_can_be_compared(knob, values):
    with pytest.raises(EngineError, match="cannot be compared"):
        check_pair(knob, values)


# ---- what there is to run again ----


def test_the_last_requests_are_those_since_the_room_was_idle_with_all_that_was_asked():
    core = make_core(pages=64)
    add(core, 4, 3)
    run(core)
    core.step()
    params = SamplingParams(9, 0.7, 5, 0.9, 3, 2, ("tea",), (50,), True)
    add(core, 5, 8)
    for _ in range(3):
        core.step()
    core.add("", prompt_of(6), params, priority=2)
    core.step()
    prompts, names = last_requests(trace_of(core))
    assert names == ("B", "C") and [p.after_steps for p in prompts] == [0, 3]
    assert prompts[1].sampling == params and prompts[1].token_ids == prompt_of(6) and prompts[1].priority == 2
    assert last_requests(Trace()) == ((), ())


def test_what_was_stopped_is_not_among_the_requests_since_the_room_was_idle():
    core = make_core(pages=64)
    first = add(core, 4, 30)
    for _ in range(3):
        core.step()
    core.abort(core.rooms["main"].scheduler.sequences[first[0]].request.request_id)
    core.report("main")
    add(core, 5, 4)
    run(core)
    prompts, names = last_requests(trace_of(core))
    assert names == ("B",) and prompts[0].token_ids == prompt_of(5, 5)


def test_lines_of_an_example_that_have_not_come_yet_come_after_those_that_have():
    known, rest = prompts_of(3, 4), prompts_of(3, 4, 5, after=(0, 0, 9))
    known, rest = ([replace(p, prompt=f"line {i}") for i, p in enumerate(ps)] for ps in (known, rest))
    prompts, names = with_rest((tuple(known), ("D", "E")), rest, 5)
    assert names == ("D", "E", "F") and [p.after_steps for p in prompts] == [0, 0, 9]


# ---- records ----


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compared(make_core(pages=64), "batching", ("continuous", "static"), prompts_of(4, 5, after=(0, 2)))


def recorded(it: Comparison) -> Trace:
    core = make_core()
    add(core, 4, 3)
    run(core)
    core.rooms["main"].recorder.artifact(it)
    return trace_of(core)


def test_a_comparison_survives_a_recording_byte_for_byte(found):
    data = encode(recorded(found))
    assert decode(data).artifacts == (found,) and encode(decode(data)) == data


def test_a_strangers_comparison_is_checked(found):
    trace = recorded(found)
    one, other = found.runs
    bad = [
        replace(found, knob="policy"), replace(found, names=("A",)), replace(found, same=(1, 0)), replace(found, runs=(one,)),
        replace(found, runs=(one, one)), replace(found, runs=(replace(one, value=True), other)), replace(found, page_size=0),
        replace(found, runs=(replace(one, held=one.held[1:]), other)), replace(found, runs=(replace(one, works=((9999, 0, 0, 1, 0),)), other)),
        replace(found, runs=(replace(one, works=((0, 7, 0, 1, 0),)), other)), replace(found, runs=(replace(one, works=((0, 0, 0, 0, 0),)), other)),
        replace(found, runs=(replace(one, tokens=((2, 0), (1, 0))), other)), replace(found, runs=(replace(one, waits=((0, 3, 1, 0),)), other)),
        replace(found, runs=(replace(one, start_us=(-1, *one.start_us[1:])), other)), replace(found, runs=({"value": "x"}, other)),
        replace(found, runs=(replace(one, start_us=(), step_us=(), held=(), used=(), works=(), tokens=(), waits=()), other)),
    ]  # fmt: skip
    for it in bad:
        with pytest.raises(EngineError, match="This recording cannot be read"):
            decode(encode(Trace({"steps": trace.steps[:0]}, meta={"configs": ()}, artifacts=(it,))))


def test_only_the_newest_comparisons_are_kept(found):
    store = TraceStore(2**20)
    for i in range(MAX_COMPARISONS + 3):
        store.apply(TraceDelta(artifacts=("fact", replace(found, num_pages=i + 1)) if not i else (replace(found, num_pages=i + 1),)))
    assert [getattr(a, "num_pages", a) for a in store.snapshot().artifacts] == ["fact", 4, 5, 6, 7]


# ---- a real model, as the page asks ----


@pytest.fixture
def source(tiny_llama, monkeypatch):
    session = make_session(tiny_llama)
    until(lambda: session.is_ready)
    lines = (Line("one two three", 12), Line("four five six seven eight", 10), Line("nine", 8, after_steps=6))
    monkeypatch.setitem(WORKLOADS, "tiny", Workload("Tiny", "", lines, {"num_pages": 64}))
    yield LiveSource(session)
    session.close()


@pytest.mark.parametrize(("knob", "pair"), KINDS)
def test_in_float32_a_real_model_writes_the_same_in_every_mode(source, knob, pair):
    source.do_preset("main", {"name": "tiny"})
    source.session.wait_idle()
    source.do_compare("main", {"knob": knob, "values": list(pair)})
    until(lambda: any(isinstance(a, Comparison) for a in source.trace("main").artifacts))
    it = source.trace("main").artifacts[-1]
    assert all(it.same) and it.names == ("A", "B", "C") and [r.value for r in it.runs] == list(pair)
    trace = source.trace("main")
    assert len(it.runs[0].tokens) == len(trace.tokens), "the requests wrote as much as before"
    json.dumps([it.names, it.runs[0].works])
    until(lambda: source.session.status().progress is None)


def test_the_page_is_told_when_and_what_it_can_compare(source):
    status = source.status("main")
    assert status["compare"] is False and status["knobs"]["mode"]["compare"] == [["paged", "none"], ["paged", "contiguous"]]
    assert status["knobs"]["prefix_caching"]["compare"] == [[True, False]] and "compare" not in status["knobs"]["policy"]
    asked = {"knob": "mode", "values": ["paged", "none"]}
    with pytest.raises(EngineError, match="There is nothing to run again yet"):
        source.do_compare("main", asked)
    with pytest.raises(EngineError, match="There is no preset"):
        source.do_compare("main", {**asked, "preset": "no such"})
    with pytest.raises(EngineError, match="cannot be compared"):
        source.do_compare("main", {"knob": "num_pages", "values": [1, 2]})
    source.do_pause("main", {})
    source.do_compare("main", {**asked, "preset": "tiny"})  # the room is paused: lines that have not come are run all the same
    with pytest.raises(EngineError, match="The job “compare” is still running"):
        source.do_compare("main", asked)
    until(lambda: any(isinstance(a, Comparison) for a in source.trace("main").artifacts))
    assert source.trace("main").artifacts[-1].names == ("A", "B", "C")
    assert not len(source.trace("main")) and source.status("main")["compare"] is True and source.session.rooms == ("main",)
