"""What the cache modes change, and nothing else: how pages are reserved, shared and kept after a step.

    paged        a page when a token needs one; pages can be shared
    contiguous   one run of consecutive pages for the longest the request could get, held to its end
    none         pages live for one step; the next one recomputes the whole sequence

The last two are the baselines that paging is measured against. They run on the same kernels and scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.config import CacheMode
from engine.pages import PagePool
from engine.sequence import Sequence


class CacheRule:
    """Paged."""

    shares = True  # pages may be shared and hit again
    may_overlap = True  # a next step may be planned while tokens are in flight

    def pages_wanted(self, pool: PagePool, seq: Sequence, max_known: int) -> int:
        """Pages (hits included) that must be free before it is admitted: all its known tokens."""
        return pool.pages_for(seq.num_known)

    def pages_available(self, pool: PagePool, hit: Seq[int]) -> int:
        return pool.num_free_besides(hit)

    def take(self, pool: PagePool, seq: Sequence, wanted: int, end: int) -> None:
        """Hold pages for tokens [0, end) at admission; `wanted` is known to be there."""
        pool.allocate(seq.seq_id, pool.pages_for(end) - len(pool.table(seq.seq_id)))

    def after_step(self, pool: PagePool, seq: Sequence, step_id: int) -> None:
        """A step that sampled a token for it has settled."""


class ContiguousRule(CacheRule):
    """Padded slabs."""

    shares = False

    def pages_wanted(self, pool: PagePool, seq: Sequence, max_known: int) -> int:
        longest = min(seq.num_prompt_tokens + seq.request.sampling.max_tokens, max_known)
        return pool.pages_for(min(longest, pool.capacity))

    def pages_available(self, pool: PagePool, hit: Seq[int]) -> int:
        return pool.largest_free_run()

    def take(self, pool: PagePool, seq: Sequence, wanted: int, end: int) -> None:
        pool.allocate_run(seq.seq_id, wanted)


class NoCacheRule(CacheRule):
    """Recompute."""

    shares = False
    may_overlap = False

    def after_step(self, pool: PagePool, seq: Sequence, step_id: int) -> None:
        pool.release(seq.seq_id, step_id)
        seq.lose_pages()


_RULES = {CacheMode.PAGED: CacheRule(), CacheMode.CONTIGUOUS: ContiguousRule(), CacheMode.NONE: NoCacheRule()}


def cache_rule(mode: CacheMode) -> CacheRule:
    return _RULES[mode]
