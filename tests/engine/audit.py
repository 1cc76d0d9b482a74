"""What the engine tests share: a device that lags, a scheduler that is watched, and oracles without a cache.

LazyRunner does a step's work only when it is settled, in launch order, as the slowest allowed device would; every
page that the pool calls free and empty is overwritten at once. A page that returns to the pool too early, a page
that is written while somebody else may read it, and a hit on content that is not there all change the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from engine.config import EngineConfig, with_knob
from engine.core import EngineCore
from engine.pages import PagePool, chain_hash
from engine.plan import StepPlan, WaitReason
from engine.request import FinishReason, SamplingParams
from engine.sampler import draw, uniform
from engine.scheduler import Scheduler
from engine.sequence import Sequence, Status
from engine.trace import PoolState, Trace
from tests.factories import POISON, FakeRunner, FakeText, fake_logits, make_config, piece


class _LazyPending:
    def __init__(self, work) -> None:
        self._work = work

    def settle(self):
        return self._work()


class LazyRunner(FakeRunner):
    """A FakeRunner that runs at settle() and poisons what is free.

    `fail_on` raises at launch, `fail_late` when the step is settled.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.fail_late: set[int] = set()
        self.pools = lambda: ()
        super().__init__(config)

    def run(self, step_id, host, rows, probe=None, graphs=True):
        if step_id in self.fail_on:
            raise RuntimeError("the fake device was told to fail")
        self.poison_free_pages()
        pools = self.pools()
        for page in np.unique(host.slot_mapping // self.page_size).tolist():
            holders = [pool for pool in pools if page in pool.pages]
            assert len(holders) == 1, f"page {page} belongs to {len(holders)} rooms"
            assert holders[0].ref_count(page) == 1, f"step {step_id} writes into page {page}, which is shared or free"
            assert page not in holders[0]._hash_of, f"step {step_id} writes into page {page}, which is offered as a hit"

        def work():
            if step_id in self.fail_late:
                raise RuntimeError("the fake device failed late")
            return super(LazyRunner, self).run(step_id, host, rows, probe).settle()

        return _LazyPending(work)

    def poison_free_pages(self) -> None:
        pages = self.slots.reshape(-1, self.page_size)
        for pool in self.pools():
            for page in pool._blank:
                pages[page] = POISON


@lru_cache(maxsize=4096)
def _next_token(tokens: tuple[int, ...], params: SamplingParams, sample: int) -> int:
    logits = fake_logits(np.array(tokens))
    if params.greedy:
        return int(logits.argmax())
    return int(draw(logits, params, uniform(params.seed, sample, len(tokens))))


def solo(prompt: tuple[int, ...], params: SamplingParams, sample: int, limit: int, eos: frozenset[int]) -> tuple[list[int], FinishReason]:
    """What one sample must write, and why it ends, computed without a cache. `limit`: longest sequence."""
    tokens = list(prompt)
    while True:
        token = _next_token(tuple(tokens), params, sample)
        tokens.append(token)
        made = tokens[len(prompt) :]
        if token in params.stop_token_ids or (token in eos and not params.ignore_eos) or piece(token).strip() in params.stop:
            return made, FinishReason.STOP
        if len(made) >= params.max_tokens or len(tokens) >= limit:
            return made, FinishReason.LENGTH


@dataclass
class Watch:
    """Everything that one room of a core did, checked while it happens."""

    core: EngineCore
    room: str = "main"
    plans: dict[int, StepPlan] = field(default_factory=dict)
    pools: dict[int, PoolState] = field(default_factory=dict)  # after each record
    computed: dict[int, dict[int, int]] = field(default_factory=dict)
    made: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, FinishReason] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    seen: dict[int, Sequence] = field(default_factory=dict)
    contents: dict[bytes, tuple[int, ...]] = field(default_factory=dict)  # page hash → its tokens

    def __post_init__(self) -> None:
        scheduler = self.core.rooms[self.room].scheduler
        schedule, record = scheduler.schedule, self.core.rooms[self.room].recorder.append

        def watched_schedule() -> StepPlan:
            was_running = {s.seq_id for s in scheduler.running}
            plan = schedule()
            check_plan(scheduler, plan, was_running)
            self.seen.update(scheduler.sequences)
            return plan

        def watched_append(item) -> None:
            self._note(item)
            record(item)

        scheduler.schedule = watched_schedule
        self.core.rooms[self.room].recorder.append = watched_append

    def _note(self, record) -> None:
        scheduler = self.core.rooms[self.room].scheduler
        scheduler.check_integrity()
        step = record.plan.step_id
        assert record.error is None or "the fake device" in record.error.sentence, record.error.sentence
        assert step not in self.plans, f"step {step} was recorded twice"
        assert not self.plans or step == max(self.plans) + 1, f"step {step} follows {max(self.plans, default=None)}"
        self.plans[step] = record.plan
        self.pools[step] = live_state(scheduler.pool)
        self.computed[step] = {s.seq_id: s.num_settled for s in scheduler.running if scheduler.pool.table(s.seq_id)}
        self._check_contents(scheduler.pool)
        for seq_id, token in record.committed.accepted:
            assert seq_id not in self.ended, f"sequence {seq_id} got a token after its end"
            self.made.setdefault(seq_id, []).append(token)
        for text in record.committed.texts:
            self.texts[text.seq_id] = self.texts.get(text.seq_id, "") + text.text
        for done in record.committed.finished:
            assert done.seq_id not in self.ended, f"sequence {done.seq_id} ended twice"
            self.ended[done.seq_id] = done.reason

    def _check_contents(self, pool: PagePool) -> None:
        """Every page that is offered as a hit holds, on the device and now, the tokens that its hash stands for."""
        slots = self.core.runner.slots.reshape(-1, pool.page_size)
        for digest, page in pool._page_of.items():
            if digest not in self.contents:
                self._learn(pool)
            assert tuple(slots[page].tolist()) == self.contents[digest], f"page {page} is offered before or after it holds its content"

    def _learn(self, pool: PagePool) -> None:
        for seq in self.seen.values():
            parent, size = pool.root_hash, pool.page_size
            for at in range(0, len(seq.tokens) - size + 1, size):
                parent = chain_hash(parent, seq.tokens[at : at + size])
                self.contents[parent] = tuple(seq.tokens[at : at + size])

    def check_texts(self, limits: tuple[int, int]) -> None:
        """Every sequence that ended says what a cache-free run of it alone says. `limits`: the smallest and the
        largest longest-sequence in force while it ran."""
        for seq_id, reason in self.ended.items():
            seq = self.seen.get(seq_id)
            if seq is None:  # ended before any step saw it
                assert seq_id not in self.made
                continue
            params, prompt, eos = seq.request.sampling, tuple(seq.request.prompt_token_ids), seq.request.eos_token_ids
            want, why = solo(prompt, params, seq.sample, limits[1], eos)
            got = self.made.get(seq_id, [])
            assert got == want[: len(got)], f"sequence {seq_id} wrote {got}, alone it writes {want}"
            assert seq.tokens[len(prompt) :] == got
            if reason is FinishReason.STOP or (reason is FinishReason.LENGTH and limits[0] == limits[1]):
                assert (got, reason) == (want, why), f"sequence {seq_id} ended after {got} by {reason}, alone {want} by {why}"
            elif reason is FinishReason.LENGTH:
                assert len(got) == params.max_tokens or len(got) + len(prompt) >= limits[0]
            words = [piece(t) for t in got]
            if reason is FinishReason.STOP:
                words = words[:-1]
            assert self.texts.get(seq_id, "") == "".join(words)


def live_state(pool: PagePool) -> PoolState:
    """The pool as it is, in the reader's terms: its pages are numbered from 1, wherever in the arena they lie."""
    size = len(pool.pages)
    counts, cached, pending = np.zeros(size + 1, np.int32), np.zeros(size + 1, bool), np.zeros(size + 1, bool)
    for number, page in enumerate(sorted(pool.pages), 1):
        counts[number] = pool.ref_count(page)
        cached[number] = page in pool._hash_of
        pending[number] = page in pool._pending
    tables = {owner: tuple(map(sorted(pool.pages).index, table)) for owner, table in pool.tables.items() if table}
    return PoolState(size, counts, cached, pending, {owner: tuple(at + 1 for at in table) for owner, table in tables.items()})


def same_state(a: PoolState, b: PoolState) -> None:
    assert a.num_pages == b.num_pages
    assert dict(a.tables) == dict(b.tables)
    for name in ("ref_counts", "cached", "pending"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert a.num_free == b.num_free


def check_replay(watch: Watch, trace: Trace, exact: bool = True) -> None:
    """Every recorded step's pool and counters, rebuilt from the log, are what they were."""
    for step in trace.steps["step_id"].tolist():
        same_state(trace.pool_at(step), watch.pools[step])
        if exact or step < trace.last_step:
            got = trace.computed_at(step)
            assert got == watch.computed[step], f"counters after step {step} of {trace.last_step}: {got}, not {watch.computed[step]}"


def check_plan(scheduler: Scheduler, plan: StepPlan, was_running: set[int]) -> None:
    """The plan's invariants, and every reason recomputed from the state right after schedule()."""
    limits, pool, live = scheduler.config.scheduler, scheduler.pool, scheduler.sequences
    for work in plan.works:
        seq = live[work.seq_id]
        known = seq.num_known - (seq.seq_id in work.sample_seq_ids)  # before this plan put its own token in flight
        assert work.num_tokens >= 1 and work.start >= 0
        assert work.start + work.num_tokens <= known, f"computed + scheduled > known: {work}"
        assert work.row >= 1 and work.row == seq.row
        assert bool(work.sample_seq_ids) == (work.start + work.num_tokens == known)
        assert seq.num_known <= min(seq.num_prompt_tokens + seq.request.sampling.max_tokens, scheduler._max_known), "a token too many"
        assert work.num_cached <= work.start and work.num_recomputed <= work.num_tokens
        assert len(pool.table(seq.seq_id)) * pool.page_size >= work.start + work.num_tokens
    assert len({w.seq_id for w in plan.works}) == len(plan.works)
    assert len({w.row for w in plan.works}) == len(plan.works)
    sampled = [i for w in plan.works for i in w.sample_seq_ids]
    assert len(set(sampled)) == len(sampled)
    lone = not limits.chunked_prefill and len(plan.works) == 1
    assert plan.num_tokens <= plan.token_budget or lone, f"{plan.num_tokens} tokens in a budget of {plan.token_budget}"
    assert len(scheduler.running) <= max(limits.max_num_seqs, len(was_running))
    worked, waited = {w.seq_id for w in plan.works}, {w.seq_id for w in plan.waiting}
    assert not worked & waited and worked | waited == set(live), "somebody got nothing and no reason, or both"
    targets = [t for _, t in plan.copies]
    assert len(set(targets)) == len(targets) and all(pool.ref_count(t) == 1 for t in targets)
    assert all(any(t in pool.table(i) for i in worked) for t in targets), "a copy for nobody"
    ranks = {i: scheduler._rank(s) for i, s in live.items()}
    for gone in plan.preempted:
        assert gone.seq_id not in worked
        assert gone.for_seq_id is None or ranks[gone.seq_id] >= ranks[gone.for_seq_id], "a higher rank was preempted"
    for wait in plan.waiting:
        check_reason(scheduler, plan, wait, was_running, ranks)


def check_reason(scheduler: Scheduler, plan: StepPlan, wait, was_running: set[int], ranks: dict) -> None:
    limits, pool, seq = scheduler.config.scheduler, scheduler.pool, scheduler.sequences[wait.seq_id]
    runs = seq.status is Status.RUNNING
    assert wait.needed >= 0 and wait.available >= 0, f"a count below zero: {wait}"
    match wait.reason:
        case WaitReason.TOKEN_BUDGET:
            assert wait.needed > wait.available
            assert wait.available == 0 or not limits.chunked_prefill
            if not runs:
                assert wait.available == max(plan.token_budget - plan.num_tokens, 0)
        case WaitReason.NO_FREE_PAGES if runs:
            assert wait.available < wait.needed <= wait.available + pool.num_pending + sum(p.num_pages for p in plan.preempted)
            assert pool.num_pending, "nothing is on its way back"
        case WaitReason.NO_FREE_PAGES:
            shares = scheduler.config.cache.mode.value == "paged"
            hit = []
            if shares and scheduler.config.cache.prefix_caching:
                hit = pool.match(seq.page_hashes(pool.page_size, pool.root_hash, (len(seq.tokens) - 1) // pool.page_size))
            longest = len(seq.tokens)
            if scheduler.config.cache.mode.value == "contiguous":
                free = pool.largest_free_run()
                longest = min(seq.num_prompt_tokens + seq.request.sampling.max_tokens, pool.capacity, scheduler.config.max_model_len)
            else:
                free = pool.num_free
            held = sum(pool.ref_count(p) > 0 or p in pool._pending for p in hit)  # found, and not free: others hold them
            assert (wait.needed, wait.available) == (-(-longest // pool.page_size) - held, free)
            assert wait.needed > wait.available
        case WaitReason.MAX_SEQS:
            assert len(scheduler.running) >= limits.max_num_seqs and wait.available == 0
        case WaitReason.SIBLING_PROMPT:
            first = next(s for s in scheduler.sequences.values() if s.request is seq.request and s.sample == 0)
            assert seq.sample > 0 and first.num_settled < first.num_prompt_tokens
        case WaitReason.STATIC_BATCH:
            assert limits.batching.value == "static" and was_running and not runs and not seq.was_preempted
        case WaitReason.QUEUE_ORDER:
            blocking = (WaitReason.NO_FREE_PAGES, WaitReason.TOKEN_BUDGET)
            ahead = [w for w in plan.waiting if w.reason in blocking and ranks[w.seq_id] < ranks[wait.seq_id]]
            assert ahead and not plan.preempted
        case WaitReason.PREEMPTION:
            assert plan.preempted and not runs
        case WaitReason.PAUSED:
            assert not plan.works
        case WaitReason.IN_FLIGHT:
            assert seq.num_in_flight > 0 or seq.num_known == seq.num_computed


def make_lazy_core(
    pages: int = 16, page_size: int = 4, eos: frozenset[int] = frozenset(), max_model_len: int = 512, **knobs: object
) -> EngineCore:
    """As factories.make_core, on a LazyRunner."""
    config = make_config(pages, page_size, max_model_len, **knobs)
    runner = LazyRunner(config)
    core = EngineCore(config, runner, FakeText, eos)
    runner.pools = lambda: [room.scheduler.pool for room in core.rooms.values()]
    return core


def knob(core: EngineCore, name: str, value: object) -> None:
    core.reconfigure(with_knob(core.config, name, value))
