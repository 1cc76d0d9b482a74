"""The speed ladder on a real tiny model: the same tokens on every rung, time of its own, what cannot run says why."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

import engine.ladder
from engine.artifacts import LadderRun, Rung, of_kind
from engine.audience import LiveSource
from engine.build import build_core
from engine.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig, with_knob
from engine.errors import EngineError
from engine.graphs import again
from engine.jobs import start_job
from engine.ladder import WAYS, kernel_us
from engine.messages import Prompt
from engine.peer import Late, TransformersPeer
from engine.recording import decode, encode
from engine.request import SamplingParams
from engine.store import TraceStore
from engine.trace import Trace, TraceDelta
from tests.engine.test_profile import CPU, CUDA, Event
from tests.engine.test_session import make_session, until
from tests.factories import prompt_of

PROMPTS = tuple(Prompt(f"prompt {i}", tuple(t % 250 + 1 for t in prompt_of(6 + 3 * i, i)), SamplingParams()) for i in range(5))
ON_CPU = ["hf_no_cache", "hf_cache", "eager", "batching"]


@pytest.fixture
def core(tiny_llama):
    return build_core(EngineConfig(ModelSource(str(tiny_llama), "cpu", "float32"), CacheConfig(num_pages=96), SchedulerConfig(4, 64)))[0]


def states(job, slices: int | None = None) -> list[LadderRun]:
    """What was published, in order."""
    found = []
    while slices is None or slices > 0:
        over = job.advance()
        found += job.take_artifacts()
        if over:
            break
        slices = None if slices is None else slices - 1
    job.close()
    return found + job.take_artifacts()


def ladder(core, **args: object) -> LadderRun:
    return states(start_job(core, "ladder", {"prompts": PROMPTS, "seconds": 0.5, **args}))[-1]


@pytest.fixture(scope="module")
def climbed(tiny_llama) -> LadderRun:
    config = EngineConfig(ModelSource(str(tiny_llama), "cpu", "float32"), CacheConfig(num_pages=96), SchedulerConfig(4, 64))
    return ladder(build_core(config)[0])


# ---- what it measures ----


def test_on_a_cpu_four_rungs_run_and_the_others_say_why_not(climbed):
    assert [rung.name for rung in climbed.rungs] == [way.name for way in WAYS]
    assert [rung.name for rung in climbed.measured] == ON_CPU and climbed.is_over
    assert {r.name: r.why for r in climbed.rungs if r.state == "skipped"} == {
        "fused": "no_kernels", "graphs": "no_graphs", "overlap": "no_overlap",
    }  # fmt: skip


def test_every_rung_writes_the_same_tokens_in_float32(climbed):
    """transformers with and without its cache, our engine one at a time and together."""
    assert {rung.token_ids for rung in climbed.measured} == {climbed.measured[0].token_ids}
    assert [(rung.num_differ, rung.differing) for rung in climbed.measured] == [(0, 0)] * 4
    assert all("".join(rung.pieces) == "".join(climbed.rungs[0].pieces) for rung in climbed.measured)
    assert {rung.busy for rung in climbed.measured} == {None}


def test_tokens_that_differ_from_the_first_rungs_are_counted(core):
    peer = core.peer()

    class Flips:
        def generate(self, prompt, new_tokens, cache, deadline):
            ids, times = peer.generate(prompt, new_tokens, cache, deadline)
            return ([*ids[:-2], ids[-2] ^ 1, ids[-1] ^ 1] if cache and prompt == PROMPTS[1].token_ids else ids), times

        def close(self):
            pass

    core.peer = Flips
    assert [(r.num_differ, r.differing) for r in ladder(core).measured] == [(0, 0), (2, 1), (0, 0), (0, 0)]


def test_all_requests_run_on_each_rung_and_their_times_rise(climbed):
    assert climbed.prompt_tokens == tuple(len(p.token_ids) for p in PROMPTS[: len(climbed.prompt_tokens)])
    for rung in climbed.measured:
        assert [len(row) for row in rung.token_us] == [climbed.new_tokens] * len(climbed.prompt_tokens)
        assert all(list(row) == sorted(row) for row in rung.token_us)
        assert max(row[-1] for row in rung.token_us) == rung.wall_us
        assert rung.per_s == pytest.approx(sorted(rung.runs)[(len(rung.runs) - 1) // 2], rel=1e-3)
        assert rung.each_us > 0 and 0 < rung.first_us < rung.wall_us


def test_one_at_a_time_each_waits_for_the_one_before_and_together_nobody_does(climbed):
    by_name = {rung.name: rung.token_us for rung in climbed.measured}
    assert len(climbed.prompt_tokens) > 1
    for name in ("hf_no_cache", "hf_cache", "eager"):
        assert all(a[-1] <= b[0] for a, b in zip(by_name[name], by_name[name][1:])), name
    assert max(row[0] for row in by_name["batching"]) < min(row[-1] for row in by_name["batching"])


def test_the_workload_is_as_large_as_the_machine_allows(core):
    class Slow(TransformersPeer):
        def generate(self, prompt, new_tokens, cache, deadline):
            ids, times = super().generate(prompt, new_tokens, cache, deadline)
            return ids, [times[0] + 0.02 * i for i in range(len(times))]

    folder = core.peer().model.config._name_or_path
    core.peer = lambda: Slow(folder, torch.device("cpu"), torch.float32)
    some = ladder(core, seconds=1.3)
    assert some.trial_us == pytest.approx(20_000, rel=0.01) and (len(some.prompt_tokens), some.new_tokens) == (4, 16)
    few = ladder(core, seconds=0.4)
    assert (len(few.prompt_tokens), few.new_tokens) == (2, 8)


def test_a_rung_that_fails_is_said_and_the_others_are_climbed(core):
    class Broken:
        def generate(self, *args):
            raise RuntimeError("no such thing")

        def close(self):
            pass

    core.peer = Broken
    it = ladder(core)
    assert [(r.state, r.detail) for r in it.rungs[:2]] == [("failed", "no such thing")] * 2
    assert [r.name for r in it.measured] == ["eager", "batching"]


def test_a_peer_that_is_too_slow_is_late_and_the_others_are_climbed(core):
    peer = core.peer()

    class Slow:
        def generate(self, prompt, new_tokens, cache, deadline):
            if cache:
                raise Late
            return peer.generate(prompt, new_tokens, cache, deadline)

        def close(self):
            pass

    core.peer = Slow
    assert [r.state for r in ladder(core).rungs[:4]] == ["measured", "late", "measured", "measured"]


def test_generate_is_ended_where_it_is_late(core):
    peer = core.peer()
    with pytest.raises(Late):
        peer.generate(PROMPTS[0].token_ids, 400, False, time.perf_counter() + 0.01)
    ids, times = peer.generate(PROMPTS[0].token_ids, 5, True, time.perf_counter() + 60)
    assert len(ids) == len(times) == 5
    peer.close()
    assert peer.model is None


@pytest.mark.parametrize("cache", [False, True])
def test_without_a_cache_generate_computes_the_whole_text_for_each_token(core, cache):
    peer, lengths = core.peer(), []
    peer.model.model.register_forward_pre_hook(lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    peer.generate(PROMPTS[0].token_ids, 4, cache, time.perf_counter() + 60)
    n = len(PROMPTS[0].token_ids)
    assert lengths == ([n, 1, 1, 1] if cache else [n, n + 1, n + 2, n + 3])


def test_without_a_peer_our_own_rungs_are_climbed(core):
    core.peer = None
    it = ladder(core)
    assert [r.why for r in it.rungs[:2]] == ["no_peer"] * 2 and [r.name for r in it.measured] == ["eager", "batching"]


def test_each_rung_runs_with_its_own_knobs_and_operations(core, monkeypatch):
    """On a CPU with a recorder that only runs the function, as engine/graphs.py has it for tests."""
    runner = core.runner
    runner.record_graph, runner.on_kernels = again, True
    runner.ops = runner.attention.ops = replace(runner.ops, is_captured=True, fused=True)
    monkeypatch.setattr(engine.ladder, "_no_overlap", lambda core: "")
    ops, seen = runner.ops, {}
    run = runner.run

    def spy(step_id, host, rows, probe, graphs):
        pending = run(step_id, host, rows, probe, graphs)
        name = job.text
        key = (runner.ops.fused, runner.attention.ops is runner.ops, graphs, pending.graph_size > 0, len(host.rows) > 1)
        seen.setdefault(name, set()).add(key)
        return pending

    runner.run = spy
    job, found = start_job(core, "ladder", {"prompts": PROMPTS[:2], "seconds": 0.5}), []
    while not job.advance():
        found += job.take_artifacts()
        assert runner.ops.fused and runner.attention.ops.fused, "between two slices everybody finds the engine's own"
    it = [*found, *job.take_artifacts()][-1]
    job.close()
    names = {r.name for r in it.measured}
    assert {"fused", "graphs"} <= names and all(r.num_differ == 0 for r in it.measured)
    assert runner.ops == ops and runner.attention.ops == ops
    kinds = set().union(*seen.values())
    assert {k[0] for k in kinds} == {False, True} and all(k[1] for k in kinds)
    assert any(k[3] and k[0] for k in kinds) and not any(k[3] and not k[2] for k in kinds)


# ---- nobody is disturbed, what was measured stays ----


def test_it_goes_on_rung_by_rung_under_one_key_and_the_newest_takes_its_place(core):
    found = states(start_job(core, "ladder", {"prompts": PROMPTS, "seconds": 0.3}))
    assert len({it.key for it in found}) == 1 and [len(it.measured) for it in found] == [0, 1, 2, 3, 4, 4, 4, 4]
    store = TraceStore(2**20)
    for it in found:
        store.apply(TraceDelta(artifacts=(it,)))
    assert store.snapshot().artifacts == (found[-1],)
    store.apply(TraceDelta(artifacts=(replace(found[0], key="another"),)))
    assert [it.key for it in store.snapshot().artifacts] == [found[0].key, "another"]


@pytest.mark.parametrize("slices", [1, 4, 12, 25, 40])
def test_cancelled_at_any_slice_what_was_measured_stays_and_the_pages_are_back(core, slices):
    found = states(start_job(core, "ladder", {"prompts": PROMPTS, "seconds": 0.3}), slices)
    if found:
        assert found[-1].is_over and {r.state for r in found[-1].rungs} <= {"measured", "cancelled", "skipped"}
        assert any(r.state == "cancelled" for r in found[-1].rungs)
    assert list(core.rooms) == ["main"] and list(core.arena.leases) == ["main"]


def test_another_room_goes_on_and_its_time_is_not_counted(core):
    core.add("", PROMPTS[0].token_ids, SamplingParams(max_tokens=30, ignore_eos=True))
    job, clock = start_job(core, "ladder", {"prompts": PROMPTS, "seconds": 0.3}), core.housing.clock.busy_us
    while not job.advance():
        assert core.housing.clock.busy_us == clock
        time.sleep(0.02)  # what other rooms take
    job.close()
    it = job.take_artifacts()[-1]
    assert all(r.wall_us < 1e6 for r in it.measured) and core.rooms["main"].has_work


def test_time_goes_on_where_the_last_slice_ended(core, monkeypatch):
    monkeypatch.setattr(engine.ladder, "SLICE_S", 0.0)  # a step each
    for rung in ladder(core, seconds=0.2).measured:
        order = sorted(t for row in rung.token_us for t in row)
        assert order[-1] == rung.wall_us and all(list(row) == sorted(row) and len(set(row)) == len(row) for row in rung.token_us)


def test_a_knob_of_the_whole_engine_turned_meanwhile_ends_the_rung_with_a_sentence(core, monkeypatch):
    monkeypatch.setattr(engine.ladder, "SLICE_S", 0.0)
    job = start_job(core, "ladder", {"prompts": PROMPTS, "seconds": 0.5})
    while "rung 3" not in job.text or not any(room.scratch for room in core.rooms.values()):
        assert not job.advance()
    core.reconfigure(with_knob(core.config, "page_size", 8))
    it = states(job)[-1]
    assert it.rungs[2].state == "failed" and "turned meanwhile" in it.rungs[2].detail and it.rungs[3].state == "measured"


def test_nothing_to_run_is_refused(core):
    for args in ({"prompts": ()}, {"prompts": PROMPTS, "seconds": 1e9}, {"prompts": PROMPTS, "seconds": True}):
        with pytest.raises(EngineError, match="cannot be run so"):
            start_job(core, "ladder", args)


# ---- what the profiler says ----


def test_kernels_that_overlap_count_once():
    events = [Event("launch", CPU, 0, 900), Event("a", CUDA, 1000, 400), Event("b", CUDA, 1200, 100), Event("c", CUDA, 1300, 300)]
    assert kernel_us([*events, Event("d", CUDA, 5000, 1000)]) == 1.6 and kernel_us(events[:1]) is None


# ---- records ----


def recorded(it: LadderRun) -> Trace:
    return Trace(meta={"configs": ()}, artifacts=(it,))


def test_a_ladder_survives_a_recording_byte_for_byte(climbed):
    data = encode(recorded(climbed))
    assert decode(data).artifacts == (climbed,) and encode(decode(data)) == data


def test_a_strangers_ladder_is_checked(climbed):
    one, rest = climbed.rungs[0], climbed.rungs[1:]
    rungs = [
        replace(one, state="flying"), replace(one, why="because"), replace(one, wall_us=0), replace(one, wall_us=-1), replace(one, runs=()),
        replace(one, runs=(float("inf"),)), replace(one, token_us=one.token_us[:1]), replace(one, token_us=((1, 2), *one.token_us[1:])),
        replace(one, token_us=(one.token_us[0][::-1], *one.token_us[1:])), replace(one, token_us="12"), replace(one, pieces=one.pieces[1:]),
        replace(one, token_ids=(-1, *one.token_ids[1:])), replace(one, busy=1.5), replace(one, state="waits"), replace(one, num_differ=-1),
        replace(one, token_us=((True, *one.token_us[0][1:]), *one.token_us[1:])), replace(one, name=rest[0].name), {}, [1, 2],
    ]  # fmt: skip
    bad = [replace(climbed, rungs=(rung, *rest)) for rung in rungs]
    bad += [replace(climbed, rungs=()), replace(climbed, rungs=(one,) * 40), replace(climbed, new_tokens=0), replace(climbed, dtype="int3")]
    bad += [replace(climbed, prompt_tokens=()), replace(climbed, prompt_tokens="x"), replace(climbed, trial_us=-1)]
    for it in bad:
        with pytest.raises(EngineError, match="This recording cannot be read"):
            decode(encode(recorded(it)))


# ---- as the page asks ----


def test_the_page_runs_it_as_a_job_of_its_room_and_cancelling_keeps_what_was_measured(tiny_llama):
    session = make_session(tiny_llama)
    until(lambda: session.is_ready)
    source = LiveSource(session)
    try:
        source.do_ladder("main", {"prompts": "mine", "seconds": 1e9})
        with pytest.raises(EngineError, match="The job “ladder” is still running"):
            source.do_ladder("main", {})
        until(lambda: any(ladder.measured for ladder in of_kind(session.trace(), LadderRun)), 60)
        assert session.ask("cancel_job")
        until(lambda: session.status().progress is None)
        (it,) = of_kind(session.trace(), LadderRun)
        assert it.is_over and it.measured and it.prompt == "Why is the sky blue?" and isinstance(it.rungs[0], Rung)
    finally:
        session.close()
