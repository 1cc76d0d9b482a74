"""Random lives of a scheduler: requests, aborts, knobs, failures, late results, in every mode."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import engine.core
from engine.errors import EngineError
from engine.request import SamplingParams
from engine.store import TraceStore
from tests.engine.audit import Watch, check_replay, knob, make_lazy_core
from tests.factories import piece, prompt_of

engine.core.KEYFRAME_EVERY = 8  # many keyframes in short runs

PROMPTS = tuple(prompt_of(n, seed) for n, seed in ((1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (8, 5), (9, 6), (13, 7), (16, 8), (21, 9), (40, 10)))
PROMPTS += (PROMPTS[9][:8], (*PROMPTS[9][:9], 5, 6), (*PROMPTS[10][:16], 1), PROMPTS[10][:32])  # shared beginnings
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
KNOBS = (
    ("max_num_seqs", 1), ("max_num_seqs", 4), ("max_num_batched_tokens", 3), ("max_num_batched_tokens", 32), ("chunked_prefill", False),
    ("chunked_prefill", True), ("policy", "fcfs"), ("policy", "priority"), ("run_ahead", 0), ("run_ahead", 1), ("prefix_caching", False),
    ("prefix_caching", True), ("batching", "static"), ("batching", "continuous"), ("mode", "paged"), ("mode", "contiguous"),
    ("mode", "none"), ("page_size", 4), ("page_size", 8), ("num_pages", 5), ("num_pages", 9),
)  # fmt: skip
EOS = frozenset({3, 11, 40, 77})


class SchedulerMachine(RuleBasedStateMachine):
    """One room on a lagging device."""

    @initialize(
        pages=st.integers(3, 16), page_size=st.sampled_from((4, 4, 8)), mode=st.sampled_from(("paged", "paged", "contiguous", "none")),
        batching=st.sampled_from(("continuous", "continuous", "static")), chunked=st.booleans(), caching=st.booleans(),
        policy=st.sampled_from(("fcfs", "priority")), rows=st.integers(1, 5), budget=st.integers(2, 24), run_ahead=st.integers(0, 1),
        has_eos=st.booleans(), length=st.sampled_from((12, 30, 512)), small_ring=st.booleans(),
    )  # fmt: skip
    def start(self, pages, page_size, mode, batching, chunked, caching, policy, rows, budget, run_ahead, has_eos, length, small_ring):
        eos = EOS if has_eos else frozenset()
        self.core = make_lazy_core(
            pages, page_size, eos, length, mode=mode, batching=batching, chunked_prefill=chunked, prefix_caching=caching,
            policy=policy, max_num_seqs=rows, max_num_batched_tokens=budget, run_ahead=run_ahead,
        )  # fmt: skip
        self.watch = Watch(self.core)
        self.store = TraceStore(6000 if small_ring else 2**24, piece, {})
        self.scheduler = self.core.rooms["main"].scheduler
        self.limits = [self.scheduler._max_known] * 2
        self.alive: list[int] = []
        self.rare = 0  # knobs and faults so far: at most one in six steps

    @precondition(lambda self: len(self.scheduler.sequences) < 12)
    @rule(**REQUEST)
    def add(self, prompt, max_tokens, n, greedy, seed, priority, stop, ignore_eos):
        self._add(prompt, max_tokens, n, greedy, seed, priority, stop, ignore_eos)

    def _add(self, prompt, max_tokens, n, greedy, seed, priority, stop, ignore_eos):
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0 if greedy else 0.9, seed=seed, n=n, stop=stop, ignore_eos=ignore_eos, stop_token_ids=(50,)
        )
        fits = len(prompt) <= self.scheduler.pool.capacity and len(prompt) < self.scheduler.config.max_model_len
        try:
            request, _ = self.core.add("", prompt, params, priority=priority)
        except EngineError as error:
            assert not fits and error.code in ("prompt_exceeds_pool", "prompt_too_long")
        else:
            assert fits
            self.alive.append(request.request_id)

    @rule(times=st.integers(1, 8))
    def step(self, times):
        for _ in range(times):
            self.core.step()
            self.scheduler.check_integrity()

    @rule(times=st.integers(1, 3))
    def step_again(self, times):
        self.step(times)

    @precondition(lambda self: len(self.scheduler.sequences) < 12)
    @rule(data=st.data(), count=st.integers(2, 4))
    def add_several(self, data, count):
        for _ in range(count):
            self._add(*(data.draw(choice) for choice in REQUEST.values()))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data):
        self.core.abort(data.draw(st.sampled_from(self.alive)))
        self.core.runner.poison_free_pages()
        self.scheduler.check_integrity()

    @precondition(lambda self: len(self.watch.plans) > 6 * self.rare)
    @rule(late=st.booleans(), after=st.integers(0, 2))
    def fail_soon(self, late, after):
        self.rare += 1
        step = self.scheduler._next_step + after
        (self.core.runner.fail_late if late else self.core.runner.fail_on).add(step)

    @precondition(lambda self: len(self.watch.plans) > 6 * self.rare)
    @rule(change=st.sampled_from(KNOBS))
    def turn_knob(self, change):
        self.rare += 1
        knob(self.core, *change)
        self.core.runner.poison_free_pages()
        self.scheduler.check_integrity()
        longest = self.scheduler._max_known
        self.limits = [min(self.limits[0], longest), max(self.limits[1], longest)]

    @rule()
    def drain(self):
        self.store.apply(self.core.rooms["main"].recorder.drain())
        trace = self.store.snapshot()
        check_replay(self.watch, trace)
        for step in trace.steps["step_id"].tolist():
            assert trace.computed_at(step).keys() == trace.pool_at(step).tables.keys()

    def teardown(self):
        if not hasattr(self, "core"):
            return
        left = [len(s.request.prompt_token_ids) + s.request.sampling.max_tokens for s in self.scheduler.sequences.values()]
        limit = 20 + 2 * sum(n * n for n in left)  # every token at the price of its whole sequence, a token a step, twice
        for _ in range(limit):
            if not self.core.has_work:
                break
            self.core.step()
        assert not self.core.has_work, f"still working after {limit} steps"
        self.scheduler.check_integrity()
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_pages, "pages are lost"
        assert not self.scheduler.sequences and len(self.watch.ended) == self.scheduler._next_seq - 1
        self.watch.check_texts(tuple(self.limits))
        self.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=int(__import__("os").environ.get("EX", 120)), stateful_step_count=40, report_multiple_bugs=False, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=False
)
TestSchedulerMachine = SchedulerMachine.TestCase
