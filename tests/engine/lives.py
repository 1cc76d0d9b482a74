"""One life of a core on a lagging device: requests, aborts, knobs, failures; everything audited as it happens.

Driven by Hypothesis (which shrinks) and by seeds (which reach deep states fast), see test_scheduler.py.
"""

from __future__ import annotations

from random import Random

from engine.errors import EngineError
from engine.request import SamplingParams
from engine.store import TraceStore
from tests.engine.audit import Watch, check_replay, knob, make_lazy_core
from tests.factories import piece, prompt_of

_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 21, 32)
PROMPTS = tuple(prompt_of(size, seed) for seed, size in enumerate(_SIZES))
PROMPTS += (PROMPTS[10][:8], PROMPTS[10][:20], (*PROMPTS[10][:9], 5, 6), (*PROMPTS[11][:16], 1), PROMPTS[11][:24])  # shared beginnings
EOS = frozenset({3, 11, 40, 77})
KNOBS = (
    ("max_num_seqs", 1), ("max_num_seqs", 4), ("max_num_batched_tokens", 3), ("max_num_batched_tokens", 32), ("chunked_prefill", False),
    ("chunked_prefill", True), ("policy", "fcfs"), ("policy", "priority"), ("run_ahead", 0), ("run_ahead", 1), ("prefix_caching", False),
    ("prefix_caching", True), ("steps_per_launch", 1), ("steps_per_launch", 4), ("batching", "static"), ("batching", "continuous"),
    ("mode", "paged"), ("mode", "contiguous"),
    ("mode", "none"), ("page_size", 4), ("page_size", 8), ("num_pages", 5), ("num_pages", 9),
)  # fmt: skip


class Life:
    """A core, who watches it, and what may happen to it."""

    def __init__(self, pages: int, page_size: int, max_model_len: int, has_eos: bool, ring_bytes: int, **knobs: object) -> None:
        self.core = make_lazy_core(pages, page_size, EOS if has_eos else frozenset(), max_model_len, **knobs)
        self.watch = Watch(self.core)
        self.store = TraceStore(ring_bytes, piece, {})
        self.scheduler = self.core.rooms["main"].scheduler
        self.limits = [self.scheduler._max_known] * 2
        self.request_ids: list[int] = []

    def add(self, prompt: tuple[int, ...], sampling: SamplingParams, priority: int) -> None:
        fits = len(prompt) <= self.scheduler.pool.capacity and len(prompt) < self.scheduler.config.max_model_len
        try:
            request, _ = self.core.add("", prompt, sampling, priority=priority)
        except EngineError as error:
            assert not fits and error.code in ("prompt_exceeds_pool", "prompt_too_long")
        else:
            assert fits
            self.request_ids.append(request.request_id)

    def step(self) -> None:
        self.core.step()
        self._audit()

    def abort(self, request_id: int) -> None:
        self.core.abort(request_id)
        self._audit()

    def fail(self, late: bool, after: int) -> None:
        (self.core.runner.fail_late if late else self.core.runner.fail_on).add(self.scheduler._next_step + after)

    def turn_knob(self, name: str, value: object) -> None:
        knob(self.core, name, value)
        self._audit()
        longest = self.scheduler._max_known
        self.limits = [min(self.limits[0], longest), max(self.limits[1], longest)]

    def _audit(self) -> None:
        self.core.runner.poison_free_pages()
        self.scheduler.check_integrity()

    def drain(self) -> None:
        """Pack the records and compare every step's pool with what it was."""
        self.store.apply(self.core.rooms["main"].recorder.drain())
        trace = self.store.snapshot()
        check_replay(self.watch, trace, exact=not self.core.rooms["main"].flying)

    def end(self) -> None:
        """Run to the end, in a bounded number of steps; then nothing may be left and every text must be right."""
        left = [len(s.request.prompt_token_ids) + s.request.sampling.max_tokens for s in self.scheduler.sequences.values()]
        limit = 20 + 2 * sum(n * n for n in left)  # every token at the price of its whole sequence, a token a step, twice
        for _ in range(limit):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, f"still working after {limit} steps"
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_pages, "pages are lost"
        assert not self.scheduler.sequences and len(self.watch.ended) == self.scheduler._next_seq - 1
        self.watch.check_texts(tuple(self.limits))
        self.drain()


def random_sampling(rng: Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(1, 20), temperature=rng.choice((0.0, 0.9)), seed=rng.randint(0, 5), n=rng.choice((1, 1, 1, 2, 3)),
        stop=rng.choice(((), (), ("cat", "tea"))), ignore_eos=rng.random() < 0.3, stop_token_ids=(50,),
    )  # fmt: skip


def random_life(seed: int, num_actions: int = 60, **fixed: object) -> Life:
    """A life from birth to end. `fixed` overrides what the seed would choose."""
    rng = Random(seed)
    born = {
        "pages": rng.randint(4, 16), "page_size": rng.choice((4, 4, 8)), "max_model_len": rng.choice((16, 30, 512)),
        "has_eos": rng.random() < 0.5, "ring_bytes": rng.choice((6000, 2**24)), "run_ahead": rng.choice((0, 1, 1)),
        "mode": rng.choice(("paged", "paged", "paged", "contiguous", "none")), "policy": rng.choice(("fcfs", "priority")),
        "batching": rng.choice(("continuous", "continuous", "static")), "chunked_prefill": rng.random() < 0.7,
        "prefix_caching": rng.random() < 0.7, "max_num_seqs": rng.randint(1, 6), "max_num_batched_tokens": rng.randint(3, 30),
        "steps_per_launch": Random(seed + 1).choice((1, 1, 4)),
    } | fixed  # fmt: skip
    life = Life(**born)
    calm = rng.random() < 0.5  # no faults and no knobs
    for _ in range(num_actions):
        dice = rng.random()
        if dice < 0.2 and len(life.scheduler.sequences) < 10:
            for _ in range(rng.randint(1, 3)):
                life.add(rng.choice(PROMPTS), random_sampling(rng), rng.randint(0, 2))
        elif dice < 0.26 and life.request_ids:
            life.abort(rng.choice(life.request_ids[-6:]))
        elif dice < 0.28 and not calm:
            life.fail(rng.random() < 0.5, rng.randint(0, 2))
        elif dice < 0.32 and not calm:
            life.turn_knob(*rng.choice(KNOBS))
        elif dice < 0.35:
            life.drain()
        else:
            life.step()
    life.end()
    return life
