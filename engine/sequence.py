"""A sequence on its way through the scheduler: mutable, never leaves engine/.

One request makes `n` sequences. Counters, in tokens:

    0 ≤ num_settled ≤ num_computed ≤ len(tokens) + num_in_flight

`num_computed` counts what is planned (steps in flight included), `num_settled` what the device has finished,
`num_in_flight` tokens that will be sampled by planned steps but have not come back.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import Enum
from typing import Protocol

from engine.pages import chain_hash
from engine.request import FinishReason, Request


class Status(Enum):
    SIBLING = "sibling"  # waits for sample 0 to compute the shared prompt
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class TextStream(Protocol):
    """What the scheduler needs of a detokeniser (engine/detokenizer.py)."""

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
        self.tokens = list(request.prompt_token_ids)
        self.status = Status.WAITING if sample == 0 else Status.SIBLING
        self.finish_reason: FinishReason | None = None
        self.num_computed = 0
        self.num_settled = 0
        self.num_in_flight = 0
        self.high_water = 0  # most tokens ever computed: what a recomputation repeats
        self.was_preempted = False
        self.row: int | None = None
        self.last_step = -1  # last step planned with its pages
        self.epoch = 0  # grows with every loss of pages: results planned before it publish nothing
        self.num_published = 0
        self._hashes: list[bytes] = []

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
