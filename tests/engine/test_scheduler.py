"""The scheduler with pages, batches and records, on a stand-in model that lags: random lives, and the traps of TRAPS A."""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import engine.core
from engine.config import with_knob
from engine.errors import EngineError
from engine.plan import Sampled, StepResult, WaitReason
from engine.request import FinishReason, SamplingParams
from tests.engine.audit import Watch, check_replay, knob, make_lazy_core, solo
from tests.engine.lives import KNOBS, PROMPTS, Life, random_life
from tests.factories import add, fake_continuation, piece, prompt_of, run, trace_of

MODES = [(mode, ahead) for mode in ("paged", "contiguous", "none") for ahead in (0, 1)]


@pytest.fixture(autouse=True)
def many_keyframes(monkeypatch):
    monkeypatch.setattr(engine.core, "KEYFRAME_EVERY", 8)


# ---- random lives ----

REQUEST = {
    "prompt": st.sampled_from(PROMPTS),
    "max_tokens": st.integers(1, 20),
    "n": st.sampled_from((1, 1, 1, 2, 3)),
    "greedy": st.booleans(),
    "seed": st.integers(0, 5),
    "priority": st.integers(0, 2),
    "stop": st.sampled_from(((), (), ("cat", "tea"))),
    "ignore_eos": st.booleans(),
}


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis finds short lives that go wrong and makes them shorter."""

    @initialize(
        pages=st.integers(3, 16), page_size=st.sampled_from((4, 4, 8)), mode=st.sampled_from(("paged", "paged", "contiguous", "none")),
        batching=st.sampled_from(("continuous", "continuous", "static")), chunked_prefill=st.booleans(), prefix_caching=st.booleans(),
        policy=st.sampled_from(("fcfs", "priority")), max_num_seqs=st.integers(1, 5), max_num_batched_tokens=st.integers(2, 24),
        run_ahead=st.integers(0, 1), steps_per_launch=st.sampled_from((1, 1, 3)), has_eos=st.booleans(),
        max_model_len=st.sampled_from((12, 30, 512)),
        ring_bytes=st.sampled_from((6000, 2**24)),
    )  # fmt: skip
    def start(self, **born):
        self.life = Life(**born)
        self.rare = 0  # knobs and faults so far: at most one in six steps

    def few(self) -> bool:
        return len(self.life.scheduler.sequences) < 12

    def calm(self) -> bool:
        return len(self.life.watch.plans) > 6 * self.rare

    @precondition(few)
    @rule(**REQUEST)
    def add(self, prompt, priority, greedy, **params):
        self.life.add(prompt, SamplingParams(temperature=0.0 if greedy else 0.9, stop_token_ids=(50,), **params), priority)

    @precondition(few)
    @rule(data=st.data(), count=st.integers(2, 4))
    def add_several(self, data, count):
        for _ in range(count):
            self.add(**{name: data.draw(choice) for name, choice in REQUEST.items()})

    @rule(times=st.integers(1, 8))
    def step(self, times):
        for _ in range(times):
            self.life.step()

    @precondition(lambda self: self.life.request_ids)
    @rule(data=st.data())
    def abort(self, data):
        self.life.abort(data.draw(st.sampled_from(self.life.request_ids)))

    @precondition(calm)
    @rule(late=st.booleans(), after=st.integers(0, 2))
    def fail_soon(self, late, after):
        self.rare += 1
        self.life.fail(late, after)

    @precondition(calm)
    @rule(change=st.sampled_from(KNOBS))
    def turn_knob(self, change):
        self.rare += 1
        self.life.turn_knob(*change)

    @rule()
    def drain(self):
        self.life.drain()

    def teardown(self):
        if hasattr(self, "life"):
            self.life.end()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("seeds", [range(first, first + 10) for first in range(0, 100, 10)], ids=lambda seeds: f"from {seeds[0]}")
def test_random_lives(seeds):
    for seed in seeds:
        random_life(seed)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", ["paged", "contiguous", "none"])
def test_random_lives_in_a_tight_pool_that_runs_ahead(mode, seed):
    random_life(1000 + seed, mode=mode, run_ahead=1, pages=8, page_size=4, max_num_seqs=5)


# ---- helpers of the named tests ----


def texts_of(watch: Watch) -> dict[int, list[int]]:
    return watch.made


def greedy(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return fake_continuation(prompt, num_tokens)


def watched(**settings: object):
    core = make_lazy_core(**settings)
    return core, Watch(core)


# ---- S1: prefix-hit arithmetic ----


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 47, 48, 49])
def test_s1_a_prompt_that_is_wholly_cached_still_computes_its_last_token(length, run_ahead):
    core, watch = watched(pages=16, page_size=16, run_ahead=run_ahead, max_num_batched_tokens=64)
    prompt = prompt_of(length, 1)
    for _ in range(3):
        add(core, prompt, 6)
        run(core)
    assert watch.made == {1: greedy(prompt, 6), 2: greedy(prompt, 6), 3: greedy(prompt, 6)}
    second = next(w for plan in watch.plans.values() for w in plan.works if w.seq_id == 2)
    cached = (length - 1) // 16 * 16
    assert (second.num_cached, second.start, second.num_tokens, second.resumed) == (cached, cached, length - cached, False)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_s1_a_preempted_request_returns_to_its_own_pages(run_ahead):
    core, watch = watched(pages=7, page_size=4, run_ahead=run_ahead, max_num_batched_tokens=64)
    prompts = prompt_of(9, 1), prompt_of(9, 2)
    for prompt in prompts:
        add(core, prompt, 10)
    run(core)
    assert watch.made == {1: greedy(prompts[0], 10), 2: greedy(prompts[1], 10)}
    lost = [p for plan in watch.plans.values() for p in plan.preempted]
    assert lost and {p.seq_id for p in lost} == {2} and {p.for_seq_id for p in lost} <= {1, 2}  # 2: it made way for itself
    back = [w for plan in watch.plans.values() for w in plan.works if w.resumed]
    assert back and all(w.seq_id == 2 and w.start == w.num_cached for w in back)
    assert all(w.num_recomputed == min(w.start + w.num_tokens, lost[0].num_tokens) - w.start for w in back)


@pytest.mark.parametrize("budget", [1, 2, 3, 7])
def test_s1_a_hit_that_grows_while_chunks_are_computed(budget):
    core, watch = watched(pages=32, page_size=4, max_num_batched_tokens=budget)
    prompt = prompt_of(19, 3)
    add(core, prompt, 4)
    for _ in range(4):
        core.step()
    add(core, prompt, 4)
    add(core, prompt[:16], 4)
    run(core)
    assert watch.made == {1: greedy(prompt, 4), 2: greedy(prompt, 4), 3: greedy(prompt[:16], 4)}


# ---- S2: nothing is offered before it exists ----


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_s2_two_equal_prompts_at_once(run_ahead):
    core, watch = watched(pages=16, page_size=16, max_num_batched_tokens=24, run_ahead=run_ahead)
    prompt = prompt_of(40, 1)
    add(core, prompt, 5)
    add(core, prompt, 5)
    run(core)
    assert watch.made == {1: greedy(prompt, 5), 2: greedy(prompt, 5)}


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_s2_an_abort_in_the_middle_of_a_prompt_offers_only_what_was_computed(run_ahead, steps):
    core, watch = watched(pages=16, page_size=16, max_num_batched_tokens=24, run_ahead=run_ahead)
    prompt = prompt_of(40, 1)
    add(core, prompt, 5)
    for _ in range(steps):
        core.step()
    assert core.abort(1)
    add(core, prompt, 5)
    run(core)
    assert watch.made[2] == greedy(prompt, 5)
    settled = sum(w.num_tokens for plan in list(watch.plans.values())[:steps] for w in plan.works if w.seq_id == 1)
    hit = next(w for plan in watch.plans.values() for w in plan.works if w.seq_id == 2).num_cached
    assert hit <= min(settled, 39) // 16 * 16
    pool = core.rooms["main"].scheduler.pool
    assert not pool.tables and pool.num_free == 16


def test_s2_nothing_is_offered_of_a_step_that_failed():
    core, watch = watched(pages=16, page_size=4, max_num_batched_tokens=8, run_ahead=1)
    prompt = prompt_of(20, 1)
    add(core, prompt, 5)
    core.runner.fail_late.add(1)
    run(core)
    assert watch.ended == {1: FinishReason.ERROR}
    add(core, prompt, 5)
    run(core)
    assert watch.made[2] == greedy(prompt, 5)
    first = next(w for plan in watch.plans.values() for w in plan.works if w.seq_id == 2)
    assert first.num_cached == 8  # what step 0 computed, and nothing of steps 1 and 2


def test_s2_a_page_that_a_parent_filled_while_running_ahead_is_not_offered_once_a_sample_writes_it():
    """The parent's next token fills the page that its sample then shares; the parent ends, the sample overwrites it."""
    prompt, params = prompt_of(11, 9), {"temperature": 0.9, "seed": 3, "n": 2, "max_tokens": 6}
    alone = [solo(prompt, SamplingParams(**params), sample, 512, frozenset())[0] for sample in range(2)]
    end = alone[0][1]
    assert end not in alone[1] and alone[0][0] != alone[1][0]
    core, watch = watched(pages=16, page_size=4, run_ahead=1)
    add(core, prompt, **params, stop_token_ids=(end,))
    core.step()
    core.step()
    knob(core, "max_num_seqs", 4)  # settles the parent's last step before its sample was planned
    assert watch.ended == {1: FinishReason.STOP}
    run(core)
    add(core, (*prompt, alone[0][0], 5), 6)
    add(core, (*prompt, alone[1][0], 5), 6)
    run(core)
    assert watch.made[1] == alone[0][:2] and watch.made[2] == alone[1]
    watch.check_texts((65, 65))
    assert [w.num_cached for plan in watch.plans.values() for w in plan.works if w.seq_id in (3, 4) and w.start < 13] == [8, 12]


# ---- S4: it ends, or is refused ----


@pytest.mark.parametrize("mode", ["paged", "contiguous", "none"])
def test_s4_a_prompt_that_can_never_fit_is_refused_and_holds_nobody_up(mode):
    core, watch = watched(pages=8, page_size=16, max_model_len=2048, mode=mode, max_num_batched_tokens=256)
    with pytest.raises(EngineError, match="200 tokens and needs 13 pages; the whole cache has 8") as refusal:
        add(core, 200, 4)
    assert refusal.value.code == "prompt_exceeds_pool" and refusal.value.fields == {"num_tokens": 200, "needed": 13, "num_pages": 8}
    add(core, 5, 4)
    run(core)
    assert watch.made == {1: greedy(prompt_of(5, 5), 4)}


@pytest.mark.parametrize("mode", ["paged", "contiguous", "none"])
def test_s4_sizes_around_the_capacity(mode):
    for length, most in ((127, 2), (128, 1), (129, None)):
        core, watch = watched(pages=8, page_size=16, max_model_len=2048, mode=mode, max_num_batched_tokens=256)
        if most is None:
            with pytest.raises(EngineError):
                add(core, length, 50)
            continue
        add(core, length, 50)
        run(core, 500)
        assert watch.made == {1: greedy(prompt_of(length, length), most)}
        assert watch.ended == {1: FinishReason.LENGTH}


def test_s4_the_models_length_is_a_limit_too():
    core, watch = watched(pages=64, page_size=4, max_model_len=20)
    with pytest.raises(EngineError, match="at most 19") as refusal:
        add(core, 20, 4)
    assert refusal.value.code == "prompt_too_long"
    with pytest.raises(EngineError) as refusal:
        add(core, (), 4)
    assert refusal.value.code == "prompt_empty"
    add(core, 19, 4)
    add(core, 15, 40)
    run(core)
    assert watch.made == {1: greedy(prompt_of(19, 19), 1), 2: greedy(prompt_of(15, 15), 5)}


@pytest.mark.parametrize(("mode", "run_ahead"), MODES)
def test_s4_two_requests_that_each_need_most_of_the_pool_both_end(mode, run_ahead):
    core, watch = watched(pages=8, page_size=16, max_model_len=2048, mode=mode, run_ahead=run_ahead, max_num_batched_tokens=256)
    a, b = prompt_of(50, 1), prompt_of(50, 2)
    add(core, a, 40)  # each comes to 89 slots, 6 of 8 pages
    add(core, b, 40)
    run(core, 400)
    assert watch.made == {1: greedy(a, 40), 2: greedy(b, 40)}
    victims = [p.seq_id for plan in watch.plans.values() for p in plan.preempted]
    assert set(victims) <= {2} and len(victims) <= 2
    waits = {w.reason for plan in watch.plans.values() for w in plan.waiting if w.seq_id == 2}
    assert WaitReason.NO_FREE_PAGES in waits


def test_s4_many_requests_in_a_pool_for_one_all_end():
    core, watch = watched(pages=4, page_size=4, max_num_seqs=6)
    prompts = [prompt_of(5 + i, i) for i in range(6)]
    for prompt in prompts:
        add(core, prompt, 6)
    run(core, 400)
    assert watch.made == {i + 1: greedy(p, 6) for i, p in enumerate(prompts)}


# ---- S6: a seed is a seed ----


SEEDED = {"temperature": 0.8, "seed": 42}


def seeded_alone() -> list[int]:
    return solo(prompt_of(6, 1), SamplingParams(max_tokens=8, **SEEDED), 0, 512, frozenset())[0]


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("neighbour", [{}, {"temperature": 0.8}, SEEDED, {"temperature": 2.0, "seed": 1, "top_k": 3}])
@pytest.mark.parametrize("last", [False, True])
def test_s6_a_neighbour_changes_nothing(neighbour, last, run_ahead):
    for length in (1, 20):  # the neighbour ends first, or last
        core, watch = watched(pages=32, run_ahead=run_ahead)
        if last:
            add(core, 3, length, **neighbour)
        (mine,) = add(core, prompt_of(6, 1), 8, **SEEDED)
        if not last:
            add(core, 3, length, **neighbour)
        run(core)
        assert watch.made[mine] == seeded_alone()


def test_s6_a_preemption_changes_nothing():
    core, watch = watched(pages=5, page_size=4)
    add(core, prompt_of(7, 2), 12)
    (mine,) = add(core, prompt_of(6, 1), 8, **SEEDED)
    run(core)
    assert any(p.seq_id == mine for plan in watch.plans.values() for p in plan.preempted)
    assert watch.made[mine] == seeded_alone()


@pytest.mark.parametrize(("mode", "run_ahead"), MODES)
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_s6_three_samples_are_three_texts_and_the_same_each_time(mode, run_ahead, rows):
    found = []
    for _ in range(2):
        core, watch = watched(pages=32, page_size=4, mode=mode, run_ahead=run_ahead, max_num_seqs=rows)
        ids = add(core, prompt_of(6, 1), 8, n=3, temperature=1.0, seed=9)
        run(core)
        found.append([watch.made[i] for i in ids])
    assert found[0] == found[1] and len({tuple(text) for text in found[0]}) == 3
    params = SamplingParams(max_tokens=8, n=3, temperature=1.0, seed=9)
    assert found[0] == [solo(prompt_of(6, 1), params, sample, 512, frozenset())[0] for sample in range(3)]


# ---- n > 1 ----


@pytest.mark.parametrize(("mode", "run_ahead"), MODES)
def test_the_first_sample_may_end_with_its_first_token_while_the_others_go_on(mode, run_ahead):
    params = {"temperature": 1.5, "seed": 5, "n": 3}
    prompt = prompt_of(6, 1)
    firsts = [solo(prompt, SamplingParams(max_tokens=1, **params), sample, 512, frozenset())[0][0] for sample in range(3)]
    assert firsts[0] not in firsts[1:]
    core, watch = watched(pages=32, eos=frozenset({firsts[0]}), mode=mode, run_ahead=run_ahead)
    ids = add(core, prompt, 6, **params)
    run(core)
    assert watch.made[ids[0]] == [firsts[0]] and watch.ended[ids[0]] is FinishReason.STOP
    watch.check_texts((512, 512))
    assert len(watch.made[ids[1]]) > 1


def test_samples_share_the_prompts_pages_and_copy_before_they_write():
    core, watch = watched(pages=32, page_size=4)
    ids = add(core, prompt_of(10, 1), 6, n=3, temperature=1.0, seed=1)
    for _ in range(2):
        core.step()
    pool = core.rooms["main"].scheduler.pool
    tables = [pool.table(i) for i in ids]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3  # the page that holds prompt and own tokens
    assert len(watch.plans[1].copies) == 2
    run(core)
    watch.check_texts((512, 512))


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_an_abort_ends_every_sample_wherever_it_is(run_ahead, steps):
    core, watch = watched(pages=8, page_size=4, run_ahead=run_ahead, max_num_batched_tokens=4, max_num_seqs=2)
    add(core, prompt_of(6, 1), 6, n=3, temperature=1.0, seed=1)
    add(core, prompt_of(5, 2), 6)
    for _ in range(steps):
        core.step()
    core.abort(1)
    run(core)
    assert all(watch.ended[i] is FinishReason.ABORT for i in (1, 2, 3))
    assert watch.made[4] == greedy(prompt_of(5, 2), 6)
    assert not core.abort(1) and not core.abort(99)


# ---- S8: steps overlap, pages do not ----


def test_s8_many_short_requests_with_aborts_equal_the_synchronous_run():
    results = []
    for run_ahead in (0, 1):
        rng = Random(5)
        core, watch = watched(pages=24, page_size=4, run_ahead=run_ahead, max_num_seqs=8, max_num_batched_tokens=32)
        for i in range(64):
            add(core, prompt_of(rng.randint(1, 20), i), rng.randint(1, 12))
        aborted = set()
        for _ in range(2000):
            if not core.has_work:
                break
            if rng.random() < 0.1:
                aborted.add(victim := rng.randint(1, 64))
                core.abort(victim)
                core.runner.poison_free_pages()
            core.step()
            core.rooms["main"].scheduler.check_integrity()
        assert not core.has_work
        watch.check_texts((97, 97))
        results.append({i: t for i, t in watch.made.items() if watch.ended[i] is FinishReason.LENGTH})
    both = results[0].keys() & results[1].keys()
    assert len(both) > 20 and all(results[0][i] == results[1][i] for i in both)


def test_s8_pages_wait_for_the_last_step_of_any_of_their_owners():
    """A sample that was never planned ends after the parent whose step is in flight: the shared pages stay out."""
    core, _ = watched(pages=8, page_size=4, run_ahead=1)
    add(core, prompt_of(6, 1), 6, n=2, temperature=1.0, seed=1)
    core.step()  # launches the prompt
    core.step()  # launches the parent's next token, settles the prompt: the sample forks
    scheduler = core.rooms["main"].scheduler
    assert len(scheduler.running) == 2 and len(scheduler._in_flight) == 1
    core.abort(1)
    assert scheduler.pool.num_free == 6 and scheduler.pool.num_pending == 2
    core.runner.poison_free_pages()
    core.step()
    assert scheduler.pool.num_free == 8
    assert not any(record.error for record in core.rooms["main"].recorder._records)


def test_s8_a_page_that_is_being_copied_waits_for_the_copy():
    """One sample copies the shared page in a step in flight; the other, which holds the source, is aborted."""
    core, _ = watched(pages=8, page_size=4, run_ahead=1)
    add(core, prompt_of(6, 1), 6, n=2, temperature=1.0, seed=1)
    scheduler = core.rooms["main"].scheduler
    pool = scheduler.pool
    scheduler.commit(scheduler.schedule(), StepResult(0, (Sampled(1, 5, 0.0), Sampled(2, 6, 0.0))))
    scheduler.reconfigure(with_knob(core.config, "max_num_batched_tokens", 1))  # room for the first sample only
    source = pool.table(1)[1]
    plan = scheduler.schedule()
    assert [w.seq_id for w in plan.works] == [1] and plan.copies == ((source, pool.table(1)[1]),)
    scheduler._finish(scheduler.sequences[2], FinishReason.ABORT)
    assert pool.ref_count(source) == 0 and source in pool._pending
    scheduler.commit(plan, StepResult(1, (Sampled(1, 7, 0.0),)))
    assert source not in pool._pending
    scheduler.check_integrity()


def test_s8_nobody_is_preempted_for_pages_that_are_on_their_way_back():
    core, watch = watched(pages=6, page_size=4, run_ahead=1, max_num_batched_tokens=64)
    add(core, prompt_of(4, 1), 20)
    add(core, prompt_of(11, 2), 20)
    add(core, prompt_of(4, 3), 1)
    run(core)
    waited = [w for plan in watch.plans.values() for w in plan.waiting if w.reason is WaitReason.NO_FREE_PAGES]
    assert waited
    watch.check_texts((25, 25))


# ---- P1, without drafts: the first reason to stop wins ----


@pytest.mark.parametrize(("mode", "run_ahead"), MODES)
@pytest.mark.parametrize("how", ["eos", "stop id", "stop string"])
@pytest.mark.parametrize("max_tokens", [5, 6, 7])
def test_p1_a_stop_ends_the_text_where_it_stands(mode, run_ahead, how, max_tokens):
    prompt = prompt_of(7, 4)
    free = greedy(prompt, 8)
    sixth = free[5]
    assert sixth not in free[:5] and piece(sixth) not in map(piece, free[:5])
    settings = {"stop id": {"stop_token_ids": (sixth,)}, "stop string": {"stop": (piece(sixth).strip(),)}, "eos": {}}[how]
    core, watch = watched(pages=32, page_size=4, mode=mode, run_ahead=run_ahead, eos=frozenset({sixth} if how == "eos" else ()))
    add(core, prompt, max_tokens, **settings)
    run(core)
    if max_tokens == 5:
        assert (watch.made[1], watch.ended[1]) == (free[:5], FinishReason.LENGTH)
    else:
        assert (watch.made[1], watch.ended[1]) == (free[:6], FinishReason.STOP)
    assert watch.texts[1] == "".join(map(piece, free[:5]))
    computed = max(w.start + w.num_tokens for plan in watch.plans.values() for w in plan.works)
    kept = len(prompt) + len(watch.made[1]) - 1
    assert computed in (kept, kept + run_ahead)


def test_p1_ignore_eos_covers_every_eos_but_not_stop_ids():
    prompt = prompt_of(7, 4)
    free = greedy(prompt, 8)
    core, watch = watched(pages=32, eos=frozenset(free[2:4]))
    add(core, prompt, 8, ignore_eos=True)
    add(core, prompt, 8, ignore_eos=True, stop_token_ids=(free[5],))
    add(core, prompt, 8)
    run(core)
    assert [watch.made[i] for i in (1, 2, 3)] == [free, free[:6], free[:3]]


# ---- reasons, order, knobs ----


def test_the_budget_that_a_preempted_sequence_gives_back_is_not_called_used_up():
    """The urgent prompt takes pages from a sequence that had been planned in the same step, and its budget is free again."""
    core, watch = watched(pages=5, page_size=4, policy="priority", max_num_batched_tokens=4)
    add(core, 3, 9, priority=1)
    add(core, 14, 2, priority=0)
    add(core, 2, 2, priority=2)
    scheduler = core.rooms["main"].scheduler
    scheduler.waiting.sort(key=lambda seq: seq.seq_id)  # the first is admitted first, once
    run(core)
    plan = next(plan for plan in watch.plans.values() if plan.preempted)
    assert [(w.seq_id, w.num_tokens) for w in plan.works] == [(2, 3)] and plan.preempted[0].for_seq_id == 2
    assert [(w.seq_id, w.reason) for w in plan.waiting] == [(1, WaitReason.PREEMPTION), (3, WaitReason.PREEMPTION)]
    watch.check_texts((21, 21))


def test_priority_runs_the_urgent_first_and_fcfs_the_first():
    for policy, order in (("fcfs", [1, 2, 3]), ("priority", [3, 2, 1])):
        core, watch = watched(pages=32, max_num_seqs=1, policy=policy)
        for priority in (2, 1, 0):
            add(core, 4, 3, priority=priority)
        run(core)
        assert list(watch.ended) == order


def test_static_batching_waits_for_the_whole_batch_and_says_so():
    core, watch = watched(pages=32, max_num_seqs=2, batching="static")
    for length in (2, 6, 3, 3):
        add(core, 4, length)
    run(core)
    together = [{w.seq_id for w in plan.works} for plan in watch.plans.values()]
    assert together == [{1, 2}] * 2 + [{2}] * 4 + [{3, 4}] * 3
    assert {w.reason for w in watch.plans[1].waiting} == {WaitReason.STATIC_BATCH}


def test_a_whole_prompt_runs_alone_when_chunks_are_off():
    core, watch = watched(pages=32, chunked_prefill=False, max_num_batched_tokens=8)
    add(core, prompt_of(20, 1), 3)
    add(core, prompt_of(5, 2), 3)
    run(core)
    assert [[w.num_tokens for w in plan.works] for plan in watch.plans.values()] == [[20], [1, 5], [1, 1], [1]]
    (wait,) = watch.plans[0].waiting
    assert (wait.reason, wait.available) == (WaitReason.TOKEN_BUDGET, 0)


def test_fewer_rows_than_run_is_no_negative_number():
    core, watch = watched(pages=32, max_num_seqs=4)
    for _ in range(5):
        add(core, 4, 6)
    core.step()
    knob(core, "max_num_seqs", 1)
    core.step()
    assert [(w.reason, w.available) for w in watch.plans[1].waiting] == [(WaitReason.MAX_SEQS, 0)]
    run(core)


def test_rows_are_lent_again():
    core, watch = watched(pages=32, max_num_seqs=3)
    for i in range(12):
        add(core, 3, 1 + i % 4)
    run(core)
    assert {w.row for plan in watch.plans.values() for w in plan.works} == {1, 2, 3}


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("change", [("page_size", 8), ("num_pages", 5), ("num_pages", 40), ("mode", "contiguous"), ("mode", "none")])
def test_a_flush_recomputes_and_the_log_goes_on(change, run_ahead):
    core, watch = watched(pages=12, page_size=4, run_ahead=run_ahead)
    prompts = prompt_of(6, 1), prompt_of(9, 2)
    for prompt in prompts:
        add(core, prompt, 8)
    for _ in range(4):
        core.step()
    knob(core, *change)
    run(core)
    assert watch.made == {1: greedy(prompts[0], 8), 2: greedy(prompts[1], 8)}
    gone = [p for plan in watch.plans.values() for p in plan.preempted if p.for_seq_id is None]
    assert {p.seq_id for p in gone} == {1, 2}
    check_replay(watch, trace_of(core))


def test_a_pool_that_became_too_small_for_a_request_ends_it_with_an_error():
    core, watch = watched(pages=12, page_size=4)
    add(core, prompt_of(20, 1), 8)
    add(core, prompt_of(6, 2), 8)
    core.step()
    knob(core, "num_pages", 4)
    run(core)
    assert watch.ended == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}
    assert watch.made[2] == greedy(prompt_of(6, 2), 8)
