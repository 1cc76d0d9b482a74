"""Cohorts: steps without a loop over their sequences leave the same records, also when several go in one launch."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from engine.config import with_knob
from engine.core import EngineCore
from engine.detokenizer import Detokenizer
from engine.graphs import STOPS, Inbox, advance_inbox
from engine.plan import Sampled, StepResult
from engine.probe import NO_PROBE, Probe
from engine.recording import FINER_CLOCKS
from engine.request import SamplingParams
from engine.runner import PendingStep
from engine.sampler import uniform, uniforms
from engine.scheduler import Scheduler
from engine.steady import HISTORY, SteadyCommitted, SteadyPlan
from engine.tokenizer import TextTokenizer
from engine.trace import CLOCKS, Trace
from tests.engine.audit import LazyRunner, Watch, check_replay, knob, make_lazy_core
from tests.engine.test_detokenizer import BYTES
from tests.engine.test_graphs import GREEDY, PROMPTS, make
from tests.engine.test_loop import Driven, line
from tests.factories import FakeRunner, add, fake_continuation, make_config, make_core, prompt_of, run, trace_of

TABLES = ("works", "tokens", "preempts", "finishes", "texts", "text_bytes", "events", "keyframes")
TIMES = (*CLOCKS, "start_us", *FINER_CLOCKS)


class Bytes(TextTokenizer):
    """The fake model's ids as bytes from 60 on, every second: a third of them are no character by themselves."""

    def __init__(self) -> None:
        super().__init__(BYTES.backend)
        self.special_ids = frozenset({5})

    def token(self, token_id: int) -> str | None:
        return super().token(60 + 2 * token_id)


SPLIT = Bytes()


def new_text(request):
    return Detokenizer(SPLIT, request.prompt_token_ids, request.sampling.stop)


def a_life(seed: int, **knobs: object) -> Trace:
    """Requests that come, are aborted, stop and run into full pools; text by a real detokeniser."""
    rng = Random(seed)
    config = make_config(pages=rng.choice((14, 60)), page_size=4, max_num_seqs=rng.choice((3, 6)), run_ahead=rng.choice((0, 1)))
    for name, value in knobs.items():
        config = with_knob(config, name, value)
    core = EngineCore(config, FakeRunner(config), new_text, frozenset({40}))
    for _ in range(60):
        dice = rng.random()
        if dice < 0.12:
            more = {"temperature": 0.9, "seed": 3} if rng.random() < 0.3 else {}
            stop = rng.choice(((), (), (), ("n", "P\u0000", "�z")))
            add(core, prompt_of(rng.randint(1, 9), rng.randint(0, 99)), rng.randint(1, 40), stop=stop, n=rng.choice((1, 1, 1, 2)), **more)
        elif dice < 0.14:
            core.abort(rng.randint(1, 6))
        else:
            core.step()
            core.rooms["main"].scheduler.check_integrity()
    run(core)
    return trace_of(core)


def same(a: Trace, b: Trace) -> None:
    for name in TABLES:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    np.testing.assert_array_equal(np.sort(a.waits), np.sort(b.waits))
    for name in set(a.steps.dtype.names) - set(TIMES):
        np.testing.assert_array_equal(a.steps[name], b.steps[name], err_msg=name)


def test_a_run_leaves_the_same_records_with_cohorts_and_without(monkeypatch):
    with_cohorts = [a_life(seed) for seed in range(16)]
    texts = "".join(trace.text_of(i) for trace in with_cohorts for i in trace.sequences)
    assert texts.count("\ufffd") > 50 < sum(map(str.isascii, texts))
    monkeypatch.setattr(Scheduler, "repeat", lambda self: None)
    for seed, trace in enumerate(with_cohorts):
        same(trace, a_life(seed))


def test_most_steps_of_a_batch_that_stays_are_a_cohorts():
    core = make_lazy_core(pages=200, run_ahead=1)
    watch = Watch(core)
    for length in (5, 9, 2):
        add(core, length, 3 * HISTORY)
    run(core)
    steady = [isinstance(plan, SteadyPlan) for plan in watch.plans.values()]
    assert sum(steady) > 0.9 * len(steady)
    watch.check_texts((512, 512))
    assert [len(made) for made in watch.made.values()] == [3 * HISTORY] * 3


def test_who_ends_leaves_the_others_together():
    core = make_lazy_core(pages=200)
    watch = Watch(core)
    for length, most in ((5, 30), (9, 12), (2, 21)):
        add(core, length, most)
    run(core)
    cohorts = {id(plan.cohort) for plan in watch.plans.values() if isinstance(plan, SteadyPlan)}
    assert len(cohorts) == 1 and watch.made == {
        i + 1: fake_continuation(prompt_of(n, n), m) for i, (n, m) in enumerate(((5, 30), (9, 12), (2, 21)))
    }


def test_an_arrival_is_seen_in_the_next_step():
    core = make_lazy_core(pages=200)
    watch = Watch(core)
    add(core, 5, 30)
    for _ in range(6):
        core.step()
    add(core, 7, 3)
    core.step()
    assert [w.seq_id for w in watch.plans[6].works] == [1, 2]
    run(core)
    check_replay(watch, trace_of(core))


# ---- several steps a launch ----


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("steps", [2, 5, 8])
@pytest.mark.parametrize("how", ["length", "eos", "stop string", "drawn", "tight"])
def test_several_steps_a_launch_write_what_single_steps_write(steps, run_ahead, how):
    found = []
    for n in (1, steps):
        eos = frozenset(fake_continuation(prompt_of(7, 7), 9)[8:9]) if how == "eos" else frozenset()
        core = make_lazy_core(pages=9 if how == "tight" else 64, page_size=4, eos=eos, run_ahead=run_ahead, steps_per_launch=n)
        watch = Watch(core)
        more = {"stop": ("cat", "tea")} if how == "stop string" else {"temperature": 0.9, "seed": 4} if how == "drawn" else {}
        for length, most in ((3, 14), (7, 23), (5, 6)):
            add(core, length, most, **more)
        run(core)
        watch.check_texts((512, 512) if how != "tight" else (37, 37))
        trace = trace_of(core)
        check_replay(watch, trace)
        assert core.rooms["main"].scheduler.pool.num_free == core.rooms["main"].scheduler.pool.num_pages
        launches = np.unique(trace.steps["launch_id"], return_counts=True)[1]
        assert launches.max() == 1 if n == 1 else launches.max() > 1
        found.append((watch.made, watch.ended, watch.texts))
    assert found[0] == found[1]


def test_a_launch_of_three_steps_leaves_three_records_that_share_its_id():
    core = make_lazy_core(pages=64, steps_per_launch=3)
    add(core, 5, 9)
    run(core)
    ids = trace_of(core).steps["launch_id"].tolist()
    assert ids == [0, 1, 2, 2, 2, 5, 5, 5, 8]  # the prompt, a step that was dealt out, then launches


def test_a_step_that_is_to_be_alone_is():
    core = make_lazy_core(pages=64, steps_per_launch=4)
    add(core, 5, 9)
    while core.has_work:
        core.step(alone=True)
    assert trace_of(core).steps["launch_id"].tolist() == list(range(9))


@pytest.mark.parametrize("how", ["pause", "pace", "play"])
def test_a_room_that_is_paused_or_paced_launches_one_step_at_a_time(how):
    driven = Driven(make_core(pages=32, page_size=4, steps_per_launch=4))
    driven.ask("pause", room="main")
    driven.ask("add", room="main", prompt=line(5, max_tokens=14))
    if how == "pause":
        driven.ask("step", room="main", n=500)
    else:
        driven.ask("pace", room="main", steps_per_s=1e6 if how == "pace" else None)
        driven.ask("play", room="main")
    driven.until_idle()
    launches = np.unique(driven.trace().steps["launch_id"], return_counts=True)[1]
    assert launches.max() == (4 if how == "play" else 1) and launches.sum() == 14


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_in_the_middle_of_a_launch_keeps_what_came_before(late):
    core = make_lazy_core(pages=32, steps_per_launch=4, max_num_seqs=1)
    watch = Watch(core)
    add(core, 5, 12)
    add(core, 6, 5)
    (core.runner.fail_late if late else core.runner.fail_on).add(4)
    run(core)
    assert watch.made[1] == fake_continuation(prompt_of(5, 5), 4) and watch.made[2] == fake_continuation(prompt_of(6, 6), 5)
    assert core.rooms["main"].scheduler.pool.num_free == 32


def test_a_knob_turned_within_a_launch_settles_it():
    core = make_lazy_core(pages=32, steps_per_launch=4)
    watch = Watch(core)
    add(core, 5, 20)
    for _ in range(4):
        core.step()
    knob(core, "page_size", 8)
    run(core)
    assert watch.made[1] == fake_continuation(prompt_of(5, 5), 20)


# ---- on the device ----


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("more", [{}, {"temperature": 0.8, "seed": 7}, {"temperature": 0.8, "seed": 7, "top_k": 5}], ids=str)
def test_the_device_moves_on_by_itself_as_the_host_says(tiny_llama: Path, run_ahead: int, more: dict) -> None:
    def tokens(steps: int, graphs: bool, stops: tuple[int, ...] = ()) -> tuple[dict[int, list[int]], list[int]]:
        core = make(tiny_llama, graphs, run_ahead=run_ahead)
        core.reconfigure(with_knob(core.config, "steps_per_launch", steps))
        core.runner.graphs.checks = True
        found, sizes = {}, []
        for i, ids in enumerate(PROMPTS):
            core.add("", ids, replace(GREEDY, max_tokens=30 - 4 * i, stop_token_ids=stops, **more))
        while core.has_work:
            record = core.step()
            if record is not None:
                assert record.error is None, record.error
                sizes.append(record.result.graph_size)
                for seq_id, token in record.committed.accepted:
                    found.setdefault(seq_id, []).append(token)
        return found, sizes

    eager, _ = tokens(1, False)
    graphs, sizes = tokens(5, True)
    assert graphs == eager and sizes.count(0) < 6
    ends = (eager[1][11], eager[2][7])
    stopped, _ = tokens(5, True, ends)
    assert stopped == tokens(1, False, ends)[0] and stopped != eager


def test_steps_that_ran_without_the_graph_are_made_up_for(tiny_llama: Path) -> None:
    """Probed steps run eagerly and take pages; the graph that goes on afterwards has them too."""

    def tokens(graphs: bool, steps: int) -> list[int]:
        core, found = make(tiny_llama, graphs), []
        core.reconfigure(with_knob(core.config, "steps_per_launch", steps))
        core.add("", PROMPTS[0], replace(GREEDY, max_tokens=80))
        for at in range(200):
            probe = Probe(frozenset({"hidden"})) if at % 30 > 13 else NO_PROBE
            record = core.step(probe=probe)
            found += [token for _, token in record.committed.accepted] if record else []
            if not core.has_work:
                return found
        raise AssertionError

    assert tokens(True, 1) == tokens(False, 1) == tokens(True, 4)


def test_a_row_that_drew_a_stop_or_its_last_token_has_no_keys_and_no_slot_from_then_on() -> None:
    inbox, tables, last = Inbox(4, 8, torch.device("cpu")), torch.arange(32).view(4, 8).int(), torch.tensor([0, 11, 12, 13])
    box = inbox.next()
    box["rows"][:], box["positions"][:], box["seq_lens"][:] = (1, 2, 3, 0), (15, 16, 17, 0), (16, 17, 18, 0)
    box["slot_mapping"][:], box["left"][:] = (5, 6, 7, -1), (9, 9, 1, 0)
    box["stops"].reshape(4, STOPS)[:] = [[12, -1, -1, -1]] * 4
    inbox.send()
    for times in (1, 2):
        advance_inbox(inbox.device, last, tables, 16)
        assert inbox.device["seq_lens"].tolist() == [16 + times, 0, 0, 0]
        assert inbox.device["slot_mapping"].tolist() == [9 * 16 + times - 1, -1, -1, -1]
    assert inbox.device["from_row"].tolist() == [1] * 4 and inbox.device["positions"].tolist() == [17, 0, 0, 0]


# ---- the parts ----


def test_uniforms_are_those_of_each_alone():
    rng = np.random.default_rng(0)
    seeds = np.array([0, 1, 2**31, 2**63 - 1, *rng.integers(0, 2**63, 40).tolist()], np.uint64)
    samples, positions = np.arange(len(seeds)) % 5, rng.integers(0, 100_000, len(seeds))
    want = [uniform(int(a), int(b), int(c)) for a, b, c in zip(seeds, samples, positions)]
    assert uniforms(seeds, samples, positions).tolist() == want


def test_a_result_reads_the_same_from_an_array_and_from_tokens():
    sampled = (Sampled(3, 17, -0.5, (17, 4), (-0.5, -2.0)), Sampled(9, 4, -1.5, (4, 17), (-1.5, -1.75)))
    made = StepResult(1, sampled)
    array = StepResult.of_values(1, (3, 9), made.values)
    assert array.sampled == sampled and array.tokens.tolist() == [17, 4] == made.tokens.tolist() and made.seq_ids == (3, 9)
    assert StepResult.of_values(1, (3,), np.array([[5.0]])).sampled == (Sampled(3, 5, 0.0),)
    assert StepResult(1, ()).tokens.tolist() == []


def test_scores_that_are_no_numbers_break_the_step():
    with pytest.raises(FloatingPointError):
        PendingStep(0, (1,), torch.tensor([[5.0, float("nan")]], dtype=torch.float64)).settle()


def test_what_was_committed_lists_who_took_a_token_and_all_text_in_plan_order():
    core = make_lazy_core(pages=64)
    seen = []
    core.rooms["main"].recorder.append = seen.append
    for length in (3, 4):
        add(core, length, 8)
    add(core, 5, 8, stop=("never",))
    run(core)
    steady = [r.committed for r in seen if isinstance(r.committed, SteadyCommitted)]
    assert steady and all([t.seq_id for t in c.texts] == [1, 2, 3] and [i for i, _ in c.accepted] == [1, 2, 3] for c in steady)
    assert isinstance(core.runner, LazyRunner)


def test_a_closed_room_leaves_no_sequences_behind():
    core = make_core(pages=64)
    core.open_room("guest", core.config)
    core.add("", prompt_of(4), SamplingParams(max_tokens=12), room="guest")
    sequence, plans = weakref.ref(core.rooms["guest"].scheduler.waiting[0]), []
    while core.rooms["guest"].has_work:
        record = core.step("guest")
        plans += [type(record.plan)] if record else []
    del record
    assert SteadyPlan in plans
    core.close_room("guest").recorder.drain()
    gc.collect()
    assert sequence() is None
