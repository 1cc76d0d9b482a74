"""A sequence on its way through the scheduler: mutable, never leaves engine/.

One request makes `n` sequences. Counters, in tokens:

    0 ≤ num_settled ≤ num_computed ≤ len(tokens) + num_in_flight

`num_computed` counts what is planned (steps in flight included), `num_settled` what the device has finished,
`num_in_flight` tokens that will be sampled by planned steps but have not come back.

A sequence in a cohort (engine/steady.py) has the same counters: its own, plus what the cohort has done since it joined.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from engine.pages import chain_hash
from engine.request import FinishReason, Request

if TYPE_CHECKING:
    from engine.steady import Cohort


class Status(Enum):
    SIBLING = "sibling"  # waits for sample 0 to compute the shared prompt
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class TextStream(Protocol):
    """What the scheduler needs of a detokeniser (engine/detokenizer.py). One that also has a `vocabulary` and says when it
    `is_plain` need not be asked for the text of tokens that always say the same (engine/steady.py)."""

    stopped: bool  # a stop string was met

    def push(self, token_id: int) -> tuple[str, bool]:
        """(text that became certain, whether a stop string was met)."""

    def flush(self) -> str:
        """Held-back text, at the end."""


class Sequence:
    """One sample of a request."""

    def __init__(self, seq_id: int, request: Request, sample: int, text: TextStream) -> None:
        self.seq_id = seq_id
        self.request = request
        self.sample = sample
        self.text = text
        self.own_tokens = list(request.prompt_token_ids)
        self.status = Status.WAITING if sample == 0 else Status.SIBLING
        self.finish_reason: FinishReason | None = None
        self._num_computed = self._num_settled = self._num_in_flight = 0
        self.high_water = 0  # most tokens ever computed: what a recomputation repeats
        self.was_preempted = False
        self.row: int | None = None
        self._last_step = -1
        self.epoch = 0  # grows with every loss of pages: results planned before it publish nothing
        self.num_published = 0
        self._hashes: list[bytes] = []
        self._cohort: Cohort | None = None
        self.place = self.pulled = 0  # in the cohort: its place, and how many of the kept tokens it has taken

    # ---- in a cohort and out of it ----

    def join(self, cohort: Cohort, place: int) -> None:
        self._cohort, self.place, self.pulled = cohort, place, 0

    def leave(self) -> None:
        """Take along what the cohort did."""
        cohort = self._cohort
        if cohort is None:
            return
        cohort.pull(self)
        computed, settled, in_flight, last = self.num_computed, self.num_settled, self.num_in_flight, self.last_step
        self._cohort = None
        self._num_computed, self._num_settled, self._num_in_flight, self._last_step = computed, settled, in_flight, last

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far."""
        if self._cohort is not None:
            self._cohort.pull(self)
        return self.own_tokens

    @property
    def num_computed(self) -> int:
        return self._num_computed if self._cohort is None else self._num_computed + self._cohort.planned

    @num_computed.setter
    def num_computed(self, value: int) -> None:
        self._num_computed = value if self._cohort is None else value - self._cohort.planned

    @property
    def num_settled(self) -> int:
        return self._num_settled if self._cohort is None else self._num_settled + self._cohort.committed

    @num_settled.setter
    def num_settled(self, value: int) -> None:
        self._num_settled = value if self._cohort is None else value - self._cohort.committed

    @property
    def num_in_flight(self) -> int:
        cohort = self._cohort
        return self._num_in_flight if cohort is None else self._num_in_flight + cohort.planned - cohort.committed

    @num_in_flight.setter
    def num_in_flight(self, value: int) -> None:
        cohort = self._cohort
        self._num_in_flight = value if cohort is None else value - cohort.planned + cohort.committed

    @property
    def last_step(self) -> int:
        """Last step planned with its pages."""
        return self._last_step if self._cohort is None else max(self._last_step, self._cohort.last_step)

    @last_step.setter
    def last_step(self, value: int) -> None:
        self._last_step = value

    # ---- counts ----

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_known(self) -> int:
        """Tokens that can be planned, those in flight included."""
        return len(self.tokens) + self.num_in_flight

    @property
    def num_planned_outputs(self) -> int:
        return self.num_known - self.num_prompt_tokens

    @property
    def order(self) -> tuple[int, int]:
        """Order of arrival."""
        return (self.request.request_id, self.sample)

    def page_hashes(self, page_size: int, root: bytes, num_pages: int) -> Seq[bytes]:
        """Hashes of the first `num_pages` full pages of the known tokens, kept as the sequence grows."""
        while len(self._hashes) < num_pages:
            at = len(self._hashes)
            parent = self._hashes[-1] if self._hashes else root
            self._hashes.append(chain_hash(parent, self.tokens[at * page_size : (at + 1) * page_size]))
        return self._hashes[:num_pages]

    def lose_pages(self) -> None:
        """Its cache is gone (preempted, flushed, or never kept): everything must be computed again."""
        self.high_water = max(self.high_water, self.num_computed)
        self.num_computed = self.num_settled = self.num_published = 0
        self.epoch += 1

    def forget_hashes(self) -> None:
        """The page size changed."""
        self._hashes.clear()
