"""Who computes what in the next step: schedule() -> StepPlan, commit(plan, result) -> Committed.

There are no phases: every running sequence asks for the tokens it has not computed yet, one for a decode,
hundreds for a prompt, and the budget is dealt out in this order:

    1. running sequences that need one token, then running prompts, both by rank;
       who needs a page and finds none takes it from the lowest rank (preemption by recompute)
    2. waiting sequences by rank, with what the prefix cache already holds; nobody overtakes a sequence that
       waits for pages, and nobody is admitted in a step that preempted somebody

Rank is arrival (FCFS) or (priority, arrival). schedule(t + 1) may come before commit(t): a token still in
flight counts as known, its value stays on the device. The modes (no cache, contiguous slabs, static batches)
are in engine/baselines.py; a batch in which nothing but the positions changes is engine/steady.py's, until something else
does. This file knows no tensors and decodes no text.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.baselines import CacheRule, cache_rule
from engine.config import Batching, EngineConfig, Policy
from engine.errors import EngineError
from engine.pages import PagePool
from engine.plan import Committed, Finished, Preempted, StepPlan, StepResult, TextPiece, Waiting, WaitReason, Work
from engine.request import FinishReason, Request
from engine.rows import RowSlots
from engine.sequence import Sequence, Status, TextStream
from engine.steady import Cohort, SteadyCommitted, SteadyPlan, form, stop_ids_of

# Reasons that keep everybody behind from overtaking.
_BLOCKING = frozenset({WaitReason.NO_FREE_PAGES, WaitReason.TOKEN_BUDGET, WaitReason.QUEUE_ORDER, WaitReason.PREEMPTION})
# Reasons that hold for as long as the same sequences run.
_STANDING = frozenset({WaitReason.MAX_SEQS, WaitReason.STATIC_BATCH})

TIMED_TEXTS = 8  # tokens of a step whose text is timed apart; a clock around each of hundreds would cost what it measures


@dataclass
class _Draft:
    """A plan in the making. Works can still be withdrawn when their sequence is preempted."""

    budget: int
    works: dict[int, tuple[Work, Sequence]] = field(default_factory=dict)
    waiting: dict[int, Waiting] = field(default_factory=dict)
    preempted: list[Preempted] = field(default_factory=list)
    copies: dict[int, tuple[int, int]] = field(default_factory=dict)

    def wait(self, seq: Sequence, reason: WaitReason, needed: int, available: int) -> None:
        self.waiting[seq.seq_id] = Waiting(seq.seq_id, reason, needed, available)


class _InFlight(NamedTuple):
    """What commit() must know of a planned work: `epoch` tells whether its pages are still the sequence's."""

    seq: Sequence
    epoch: int
    end: int
    samples: tuple[Sequence, ...]


class Scheduler:
    """The queue and the running set of one room.

    Invariants: a sequence is in exactly one of `waiting`, `running` or ended; both are in order of rank; running ones hold a
    row each;
    computed + scheduled ≤ known tokens; a step's tokens stay within max_num_batched_tokens (except one
    prompt alone when chunked prefill is off).

    Args:
        config: resolved.
        pool: this room's pages.
        new_text: Request -> TextStream, called once a sample.
        room: its name, written into plans.
        rows: the engine's row slots, shared by all its rooms.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: PagePool,
        new_text: Callable[[Request], TextStream],
        room: str = "main",
        rows: RowSlots | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.room = room
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.sequences: dict[int, Sequence] = {}
        self._new_text = new_text
        self._rule: CacheRule = cache_rule(config.cache.mode)
        self._next_seq = 1
        self._next_step = 0
        self._rows = RowSlots() if rows is None else rows
        self._in_flight: dict[int, tuple[_InFlight, ...] | SteadyPlan] = {}
        self._cohort: Cohort | None = None
        self._calm = False  # the last plan may be repeated: nothing but the tokens has changed since
        self._standing: tuple[Waiting, ...] = ()  # then: why the queue waits
        self._ended: list[Finished] = []  # not yet reported
        self._texts: list[TextPiece] = []
        self._times_text, self._text_s = False, 0.0
        self._preempted: list[Preempted] = []

    # ---- the caller's side ----

    def add(self, request: Request) -> tuple[Sequence, ...]:
        """Queue a request. Raises EngineError if it can never run ("prompt_empty", "prompt_too_long",
        "prompt_exceeds_pool")."""
        self.check_fits(request)
        self._calm = False
        made = []
        for sample in range(request.sampling.n):
            seq = Sequence(self._next_seq, request, sample, self._new_text(request))
            self._next_seq += 1
            self.sequences[seq.seq_id] = seq
            self.waiting.append(seq)
            made.append(seq)
        self.waiting.sort(key=self._rank)
        return tuple(made)

    def begin_at(self, step_id: int, seq_id: int) -> None:
        """Number steps and sequences from here on. Before anything was added."""
        self._next_step, self._next_seq = step_id, seq_id

    def number_from(self, seq_id: int) -> None:
        """The next sequence's number; it only ever rises."""
        self._next_seq = max(self._next_seq, seq_id)

    def check_fits(self, request: Request) -> None:
        """Refuse what could never run, before it queues."""
        length = len(request.prompt_token_ids)
        if length == 0:
            raise EngineError("prompt_empty", "The prompt has no tokens; type at least one character.")
        if length >= self.config.max_model_len:
            raise EngineError(
                "prompt_too_long",
                f"The prompt has {length:,} tokens; this model reads at most {self.config.max_model_len - 1:,} and writes one more.",
                num_tokens=length,
                limit=self.config.max_model_len - 1,
            )
        if length > self.pool.capacity:
            raise EngineError(
                "prompt_exceeds_pool",
                f"The prompt has {length:,} tokens and needs {self.pool.pages_for(length):,} pages; "
                f"the whole cache has {self.pool.num_pages:,}.",
                num_tokens=length,
                needed=self.pool.pages_for(length),
                num_pages=self.pool.num_pages,
            )

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> tuple[int, ...]:
        """End every sample of a request now; returns the seq_ids that were alive."""
        self._disband()
        alive = [s for s in (*self.running, *self.waiting) if s.request.request_id == request_id]
        for seq in alive:
            self._finish(seq, reason)
        return tuple(s.seq_id for s in alive)

    @property
    def has_work(self) -> bool:
        """Whether a step would do or report something."""
        return bool(self.running or self.waiting) or self.has_report

    def reconfigure(self, config: EngineConfig, pool: PagePool | None = None) -> None:
        """Take new knobs; with a new pool every running sequence is preempted first (its pages are gone).

        Nothing may be in flight. Requests that no longer fit end with FinishReason.ERROR.
        """
        assert not self._in_flight, "settle every step before changing knobs"
        self._disband()
        if pool is not None:
            for seq in list(self.running):
                self._preempted.append(self._preempt(seq, None))
            self.pool.forget()
            for seq in self.sequences.values():
                seq.forget_hashes()
            pool.follow(self.pool)
            self.pool = pool
        elif self.config.cache.prefix_caching and not config.cache.prefix_caching:
            self.pool.forget()
        self.config = config
        self._rule = cache_rule(config.cache.mode)
        self.waiting.sort(key=self._rank)
        self.running.sort(key=self._rank)
        for seq in list(self.waiting):
            if len(seq.tokens) > min(self.pool.capacity, self.config.max_model_len - 1):
                self._finish(seq, FinishReason.ERROR)

    # ---- one step ----

    def schedule(self) -> StepPlan | SteadyPlan:
        """The next step. Never empty-handed without a reason: everyone who gets nothing is in `waiting`."""
        return self.repeat() or self._deal()

    def repeat(self) -> SteadyPlan | None:
        """A step as the one before: the same sequences decode, and nobody joins. None: something else must be decided first.
        It may be asked for several steps at once."""
        if not self._calm:
            return None
        limits = self.config.scheduler
        if self._cohort is None:
            self._cohort = form(self.running, self._standing, self.pool, self._max_known, limits.max_num_batched_tokens)
        plan = self._cohort and self._cohort.plan(self._next_step, self.room, limits.max_num_batched_tokens, limits.max_num_seqs)
        if plan is None:
            self._disband()
            return None
        self._in_flight[plan.step_id] = plan
        self._next_step += 1
        return plan

    def _disband(self) -> None:
        """Whoever decodes is looked at by itself again."""
        self._calm = False
        if self._cohort is not None:
            self._cohort.disband()
            self._cohort = None

    def _deal(self) -> StepPlan:
        """A step dealt out one sequence at a time."""
        self._disband()
        draft = _Draft(self.config.scheduler.max_num_batched_tokens)
        draft.preempted += self._preempted
        self._preempted = []
        batch_is_running = bool(self.running)
        for seq in self._running_order():
            if seq.status is Status.RUNNING:
                self._continue(seq, draft)
        blocked = bool(draft.preempted)
        for seq in list(self.waiting):
            if not self._admit(seq, draft, blocked, batch_is_running):
                blocked = blocked or draft.waiting[seq.seq_id].reason in _BLOCKING
        return self._seal(draft)

    @property
    def has_report(self) -> bool:
        """Somebody ended, or lost pages, since the last step."""
        return bool(self._ended or self._preempted)

    def schedule_nothing(self) -> StepPlan:
        """An empty step that only reports, for a paused room: what was ended should be seen at once."""
        self._disband()
        draft = _Draft(self.config.scheduler.max_num_batched_tokens)
        draft.preempted, self._preempted = self._preempted, []
        for seq in (*self.running, *self.waiting):
            draft.wait(seq, WaitReason.PAUSED, 0, 0)
        return self._seal(draft)

    def commit(self, plan: StepPlan | SteadyPlan, result: StepResult) -> Committed | SteadyCommitted:
        """Take a settled step's tokens. Steps settle in order; what ended meanwhile is dropped."""
        self.pool.settle(plan.step_id)
        flights = self._in_flight.pop(plan.step_id)
        self._times_text, self._text_s = len(result.seq_ids) <= TIMED_TEXTS, 0.0
        if isinstance(flights, SteadyPlan) and flights.cohort is self._cohort:
            return self._commit_steady(flights, result)
        tokens, accepted = dict(zip(result.seq_ids, result.tokens.tolist(), strict=True)), []
        for flight in _one_by_one(flights):
            accepted += self._land(flight, tokens, plan.step_id)
        if self._cohort is not None:  # formed while this step was in flight
            self._part(self._cohort)
            self._cohort.look_again(range(len(self._cohort.members)))
        return self._report(plan.step_id, tuple(accepted), round(self._text_s * 1e6))

    def _land(self, flight: _InFlight, tokens: dict[int, int], step_id: int) -> list[tuple[int, int]]:
        """What one work of a settled step computed and sampled; (seq_id, token) of those who take it."""
        alive = flight.seq.status is Status.RUNNING and flight.seq.epoch == flight.epoch
        accepted = []
        if alive:
            flight.seq.num_settled = flight.end
            self._publish(flight.seq)
        for seq in flight.samples:
            seq.num_in_flight -= 1
            if seq.status is Status.SIBLING:  # before anybody's first token: it may end the one whose pages they share
                self._fork(seq, flight.seq if alive else None)
        for seq in flight.samples:
            if seq.status is not Status.FINISHED:
                token_id = tokens[seq.seq_id]
                accepted.append((seq.seq_id, token_id))
                seq.tokens.append(token_id)
                self._judge(seq, token_id)
        if alive and flight.samples and flight.seq.status is Status.RUNNING:
            self._rule.after_step(self.pool, flight.seq, step_id)
        return accepted

    def _commit_steady(self, plan: SteadyPlan, result: StepResult) -> SteadyCommitted:
        """As commit(), for those who are still together; only who may have ended, filled a page or writes text that its token
        does not tell is looked at, in plan order."""
        cohort, tokens = self._cohort, result.tokens
        pieces = [(-1, piece) for piece in self._texts]
        self._texts = []
        stay = None  # places in the plan of those who are still members
        if plan.members is not cohort.members:
            stay = np.flatnonzero(np.isin(plan.members.seq_ids, cohort.members.seq_ids))
        full, odd, spoken = cohort.take(tokens if stay is None else tokens[stay])
        taken, places = None, range(len(tokens)) if stay is None else stay.tolist()
        looks = {places[i]: i for i in (*full, *odd)}
        if stay is not None:
            looks |= dict.fromkeys(set(range(len(tokens))) - set(places))
            taken, of_plan = np.ones(len(tokens), bool), np.zeros(len(tokens), bool)
            of_plan[stay], spoken = spoken, of_plan
        full, odd = set(full), set(odd)
        for place in sorted(looks):
            at, seq = looks[place], plan.members.seqs[place]
            token_id = int(tokens[place])
            if at is None:
                taken[place] = bool(self._land(_flight(plan, place), {seq.seq_id: token_id}, plan.step_id))
            elif at in full:
                self._publish(seq)
            if at in odd:
                self._judge(seq, token_id)
                cohort.look_again((at,))
            pieces += [(place, piece) for piece in self._texts]
            self._texts = []
        self._part(cohort)
        ended, self._ended = tuple(self._ended), []
        text_us = round(self._text_s * 1e6)
        return SteadyCommitted(plan.step_id, plan.members, tokens, taken, ended, spoken, tuple(pieces), cohort.vocabulary, text_us)

    def _part(self, cohort: Cohort) -> None:
        """Those who have ended leave the others."""
        alive = [seq.status is Status.RUNNING for seq in cohort.members.seqs] if self._ended else ()
        if not all(alive):
            cohort.keep(np.array(alive))
        cohort.forget_ended()

    def fail(self, plan: StepPlan | SteadyPlan) -> Committed:
        """The step broke (before, in or after the device): end the requests that it concerned, keep everyone
        else and an intact pool."""
        self._disband()
        for flight in _one_by_one(self._in_flight.pop(plan.step_id, ())):
            for seq in {s.seq_id: s for s in (flight.seq, *flight.samples, *self._siblings(flight.seq))}.values():
                if seq.status is not Status.FINISHED:
                    self._finish(seq, FinishReason.ERROR)
        self.pool.settle(plan.step_id)
        return self._report(plan.step_id, ())

    def withdraw(self, plan: StepPlan) -> None:
        """Take back an empty plan: nothing could be planned until a step in flight settles."""
        assert plan.is_empty and not plan.preempted and plan.step_id == self._next_step - 1
        del self._in_flight[plan.step_id]
        self._next_step -= 1

    def _report(self, step_id: int, accepted: tuple[tuple[int, int], ...], text_us: int = 0) -> Committed:
        """Hand over what ended and what text became certain since the last report."""
        ended, self._ended = tuple(self._ended), []
        texts, self._texts = tuple(self._texts), []
        return Committed(step_id, accepted, ended, texts, text_us)

    def check_integrity(self) -> None:
        """Raises AssertionError naming the first broken invariant."""
        self.pool.check_integrity()
        holders = {s.seq_id for s in self.running}
        assert set(self.pool.tables) <= holders, f"pages held by sequences that do not run: {set(self.pool.tables) - holders}"
        rows = [s.row for s in self.running]
        assert None not in rows and len(set(rows)) == len(rows), f"rows are not one each: {rows}"
        assert all(map(self._rows.is_used, rows)), "a row is both leased and free"
        for seq in (*self.running, *self.waiting):
            assert 0 <= seq.num_settled <= seq.num_computed <= seq.num_known, f"counters of sequence {seq.seq_id}"
            assert seq.num_computed <= len(self.pool.table(seq.seq_id)) * self.pool.page_size, (
                f"sequence {seq.seq_id} computed past its pages"
            )
        assert all(s.num_computed == 0 and s.row is None for s in self.waiting), "a waiting sequence holds something"
        assert all(s.status is Status.RUNNING for s in self.running)
        assert self.running == sorted(self.running, key=self._rank), "the running set is out of order"
        assert all(s.status in (Status.WAITING, Status.SIBLING) for s in self.waiting)
        if self._cohort is not None and self._calm:
            self._cohort.check_integrity(self.running)

    # ---- running sequences ----

    def _rank(self, seq: Sequence) -> tuple:
        first = seq.request.priority if self.config.scheduler.policy is Policy.PRIORITY else 0
        return (first, *seq.order)

    def _running_order(self) -> list[Sequence]:
        one = [seq for seq in self.running if seq.num_known - seq.num_computed <= 1]
        return one if len(one) == len(self.running) else one + [seq for seq in self.running if seq.num_known - seq.num_computed > 1]

    def _continue(self, seq: Sequence, draft: _Draft) -> None:
        """Plan the next tokens of a running sequence, preempting lower ranks for pages if it must."""
        todo = self._todo(seq, draft)
        if todo is None:
            return
        if todo == 1 and self.pool.is_own(seq.seq_id, seq.num_computed):  # most decodes
            self._plan(seq, 1, draft)
            return
        end = seq.num_computed + todo
        while (short := self._pages_short(seq, end)) > 0:
            if short <= self.pool.num_pending:  # enough pages come back when the steps in flight settle
                draft.wait(seq, WaitReason.NO_FREE_PAGES, self.pool.num_free + short, self.pool.num_free)
                return
            victim = self.running[-1]
            draft.preempted.append(self._withdraw_and_preempt(victim, seq, draft))
            if victim is seq:
                return
        self._hold_pages(seq, end, draft)
        self._plan(seq, todo, draft)

    def _todo(self, seq: Sequence, draft: _Draft) -> int | None:
        """How many tokens it computes now; None (with the reason noted) for nothing."""
        ready = seq.num_known - seq.num_computed
        if ready <= 0 or self._ends_in_flight(seq) or (not self._rule.may_overlap and seq.num_in_flight):
            draft.wait(seq, WaitReason.IN_FLIGHT, max(ready, 1), 0)
            return None
        return self._fit_budget(seq, ready, draft)

    def _ends_in_flight(self, seq: Sequence) -> bool:
        """A planned token already reaches its last position; only a stop could come earlier."""
        return bool(seq.num_in_flight) and (seq.num_planned_outputs >= seq.request.sampling.max_tokens or seq.num_known >= self._max_known)

    def _fit_budget(self, seq: Sequence, ready: int, draft: _Draft) -> int | None:
        if ready <= draft.budget:
            return ready
        if self.config.scheduler.chunked_prefill and draft.budget > 0:
            return draft.budget
        if not self.config.scheduler.chunked_prefill and not draft.works:
            return ready  # a whole prompt that exceeds the budget runs alone
        draft.wait(seq, WaitReason.TOKEN_BUDGET, ready, max(draft.budget, 0))
        return None

    def _is_shared(self, seq: Sequence) -> bool:
        """Whether the page that its next token is written to is held by others too."""
        table, index = self.pool.table(seq.seq_id), seq.num_computed // self.pool.page_size
        return index < len(table) and self.pool.ref_count(table[index]) > 1

    def _pages_short(self, seq: Sequence, end: int) -> int:
        """How many pages are missing to write [num_computed, end)."""
        wanted = self.pool.pages_for(end) - len(self.pool.table(seq.seq_id))
        return max(wanted, 0) + self._is_shared(seq) - self.pool.num_free

    def _hold_pages(self, seq: Sequence, end: int, draft: _Draft) -> None:
        """Make [num_computed, end) writable: fresh pages, and an own copy of a shared one. They are there."""
        pool, table, index = self.pool, self.pool.table(seq.seq_id), seq.num_computed // self.pool.page_size
        if self._is_shared(seq):
            draft.copies[seq.seq_id] = pool.copy_on_write(seq.seq_id, index, self._next_step)
        elif index < len(table):
            pool.unpublish(table[index])  # a sample's parent that ran ahead may have filled and published it
        pool.allocate(seq.seq_id, max(pool.pages_for(end) - len(pool.table(seq.seq_id)), 0))

    def _plan(self, seq: Sequence, num_tokens: int, draft: _Draft, num_cached: int = 0, resumed: bool = False) -> None:
        end = seq.num_computed + num_tokens
        samples: tuple[int, ...] = ()
        if end == seq.num_known:
            siblings = self._siblings(seq) if end == seq.num_prompt_tokens else ()
            samples = (seq.seq_id, *(s.seq_id for s in siblings))
        work = Work(
            seq.seq_id,
            seq.row,
            seq.num_computed,
            num_tokens,
            num_cached,
            num_recomputed=max(0, min(end, seq.high_water) - seq.num_computed),
            resumed=resumed,
            sample_seq_ids=samples,
        )
        draft.works[seq.seq_id] = (work, seq)
        draft.budget -= num_tokens

    def _siblings(self, seq: Sequence) -> list[Sequence]:
        """Samples of the same request that still wait for its prompt."""
        return [s for s in self.waiting if s.status is Status.SIBLING and s.request is seq.request]

    def _withdraw_and_preempt(self, victim: Sequence, cause: Sequence, draft: _Draft) -> Preempted:
        planned = draft.works.pop(victim.seq_id, None)
        if planned:
            draft.budget += planned[0].num_tokens
        draft.copies.pop(victim.seq_id, None)
        draft.waiting.pop(victim.seq_id, None)
        return self._preempt(victim, cause)

    def _preempt(self, seq: Sequence, cause: Sequence | None) -> Preempted:
        num_tokens = seq.num_computed
        self._leave_running(seq)
        num_pages = self.pool.release(seq.seq_id, seq.last_step)
        seq.lose_pages()
        seq.was_preempted = True
        self._queue(seq)
        return Preempted(seq.seq_id, cause.seq_id if cause else None, num_pages, num_tokens)

    # ---- waiting sequences ----

    def _admit(self, seq: Sequence, draft: _Draft, blocked: bool, batch_is_running: bool) -> bool:
        """Start a waiting sequence if everything it needs is there; else note the first thing that is not."""
        limits = self.config.scheduler
        if seq.status is Status.SIBLING:
            draft.wait(seq, WaitReason.SIBLING_PROMPT, seq.num_prompt_tokens, 0)
        elif seq.num_in_flight:
            draft.wait(seq, WaitReason.IN_FLIGHT, seq.num_in_flight, 0)
        elif limits.batching is Batching.STATIC and batch_is_running and not seq.was_preempted:
            draft.wait(seq, WaitReason.STATIC_BATCH, 0, len(self.running))
        elif len(self.running) >= limits.max_num_seqs:
            draft.wait(seq, WaitReason.MAX_SEQS, 1, 0)
        elif draft.budget <= 0:
            draft.wait(seq, WaitReason.TOKEN_BUDGET, seq.num_known, 0)
        else:
            return self._admit_with_pages(seq, draft, blocked)
        return False

    def _admit_with_pages(self, seq: Sequence, draft: _Draft, blocked: bool) -> bool:
        pool = self.pool
        if blocked:
            reason = WaitReason.PREEMPTION if draft.preempted else WaitReason.QUEUE_ORDER
            draft.wait(seq, reason, self._rule.pages_wanted(pool, seq, self._max_known), pool.num_free)
            return False
        hit = self._prefix_hit(seq)
        want = self._rule.pages_wanted(pool, seq, self._max_known) - len(hit)
        free = self._rule.pages_available(pool, hit)
        if want > free:
            own = pool.num_free - pool.num_free_besides(hit)  # free pages that it would hit: counted on both sides
            draft.wait(seq, WaitReason.NO_FREE_PAGES, want + own, free + own)
            return False
        num_cached = len(hit) * pool.page_size
        todo = self._fit_budget(seq, seq.num_known - num_cached, draft)
        if todo is None:
            return False
        pool.share(seq.seq_id, hit)
        self._rule.take(pool, seq, want, num_cached + todo)
        resumed = seq.was_preempted
        self._start(seq)
        seq.num_computed = seq.num_settled = num_cached
        seq.num_published = len(hit)
        self._plan(seq, todo, draft, num_cached, resumed)
        seq.was_preempted = False
        return True

    def _prefix_hit(self, seq: Sequence) -> list[int]:
        """Cached pages of its longest known prefix; the last token is always computed (it must be sampled)."""
        if not (self.config.cache.prefix_caching and self._rule.shares):
            return []
        most = (len(seq.tokens) - 1) // self.pool.page_size
        return self.pool.match(seq.page_hashes(self.pool.page_size, self.pool.root_hash, most))

    # ---- moving between the sets ----

    def _start(self, seq: Sequence) -> None:
        self._calm = False
        if seq in self.waiting:
            self.waiting.remove(seq)
        seq.row = self._rows.take()
        seq.status = Status.RUNNING
        bisect.insort(self.running, seq, key=self._rank)

    def _leave_running(self, seq: Sequence) -> None:
        self._calm = self._calm and not self.waiting  # somebody may take its place
        self.running.remove(seq)
        self._rows.give_back(seq.row)
        seq.row = None

    def _queue(self, seq: Sequence) -> None:
        self._calm = False
        seq.status = Status.WAITING
        if seq not in self.waiting:
            self.waiting.append(seq)
        self.waiting.sort(key=self._rank)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End it now; the next report says so. Text that was held back (a possible stop string) comes out."""
        rest = seq.text.flush()
        if rest:
            self._texts.append(TextPiece(seq.seq_id, rest))
        if reason is FinishReason.LENGTH and seq.text.stopped:  # a stop string that only the end made certain
            reason = FinishReason.STOP
        seq.leave()
        num_pages = self.pool.release(seq.seq_id, seq.last_step)
        if seq.status is Status.RUNNING:
            self._leave_running(seq)
        else:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        del self.sequences[seq.seq_id]
        self._ended.append(Finished(seq.seq_id, reason, num_pages))

    # ---- sealing and committing ----

    @property
    def _max_known(self) -> int:
        """Longest a sequence may get: the model's length, or the pool and the one token that needs no slot."""
        return min(self.config.max_model_len, self.pool.capacity + 1)

    def _seal(self, draft: _Draft) -> StepPlan:
        """Make the plan final: advance the counters and remember what commit() needs."""
        step_id, self._next_step = self._next_step, self._next_step + 1
        flights = []
        for work, seq in draft.works.values():
            end = work.start + work.num_tokens
            seq.num_computed = end
            seq.last_step = step_id
            samples = tuple(self.sequences[i] for i in work.sample_seq_ids)
            for sampled in samples:
                sampled.num_in_flight += 1
                sampled.last_step = step_id
            flights.append(_InFlight(seq, seq.epoch, end, samples))
        self._in_flight[step_id] = tuple(flights)
        self._settle_down(draft)
        limits = self.config.scheduler
        return StepPlan(
            step_id,
            self.room,
            tuple(work for work, _ in draft.works.values()),
            tuple(draft.waiting.values()),
            tuple(draft.preempted),
            tuple(draft.copies.values()),
            limits.max_num_batched_tokens,
            limits.max_num_seqs,
        )

    def _settle_down(self, draft: _Draft) -> None:
        """Note whether the next step can be as this one: all that run got one token each, and nobody else will."""
        self._standing = tuple(wait for wait in draft.waiting.values() if wait.reason is not WaitReason.IN_FLIGHT)
        self._calm = (
            self._rule.may_overlap
            and not draft.preempted
            and not draft.copies
            and len(draft.works) > 0
            and all(work.num_tokens == 1 and len(work.sample_seq_ids) == 1 for work, _ in draft.works.values())
            and all(wait.reason in _STANDING for wait in self._standing)
            and len(self._standing) == len(self.waiting)
        )

    def _publish(self, seq: Sequence) -> None:
        """Offer pages whose every token has been computed by a settled step."""
        if not (self.config.cache.prefix_caching and self._rule.shares):
            return
        pool = self.pool
        full = min(seq.num_settled, len(seq.tokens)) // pool.page_size
        if full > seq.num_published:
            hashes = seq.page_hashes(pool.page_size, pool.root_hash, full)
            for index in range(seq.num_published, full):
                pool.publish(seq.seq_id, index, hashes[index])
            seq.num_published = full

    def _fork(self, seq: Sequence, parent: Sequence | None) -> None:
        """A sample starts where the prompt ends, sharing its pages; without a row or pages to share it queues."""
        if parent is None or not self._rule.shares or len(self.running) >= self.config.scheduler.max_num_seqs:
            self._queue(seq)
            return
        prompt = parent.num_prompt_tokens
        self.pool.share(seq.seq_id, self.pool.table(parent.seq_id)[: self.pool.pages_for(prompt)])
        self._start(seq)
        seq.num_computed = seq.num_settled = prompt
        seq.num_published = prompt // self.pool.page_size

    def _judge(self, seq: Sequence, token_id: int) -> None:
        """It was given one more token: text, then the first reason to stop that holds."""
        reason = None
        params = seq.request.sampling
        if token_id in stop_ids_of(seq):
            reason = FinishReason.STOP
        else:
            began = time.perf_counter() if self._times_text else 0.0
            text, stopped = seq.text.push(token_id)
            if began:
                self._text_s += time.perf_counter() - began
            if text:
                self._texts.append(TextPiece(seq.seq_id, text))
            if stopped:
                reason = FinishReason.STOP
        if reason is None and (len(seq.tokens) - seq.num_prompt_tokens >= params.max_tokens or len(seq.tokens) >= self._max_known):
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(seq, reason)


def _flight(plan: SteadyPlan, place: int) -> _InFlight:
    seq, end = plan.members.seqs[place], int(plan.members.starts[place]) + plan.ahead + 1
    return _InFlight(seq, plan.members.epochs[place], end, (seq,))


def _one_by_one(flights: tuple[_InFlight, ...] | SteadyPlan) -> Iterable[_InFlight]:
    return [_flight(flights, place) for place in range(len(flights.members))] if isinstance(flights, SteadyPlan) else flights
