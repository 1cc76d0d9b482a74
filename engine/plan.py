"""What one step will do, why the others wait, and what came out. All frozen, all plain data.

A plan gives upper bounds (tokens that will be computed, sequences that will get a token); the StepResult
gives what the device really returned, and Committed what the scheduler made of it. There are no phases:
prefill, chunk, prefix hit, decode and verification differ only in Work's numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from engine.request import FinishReason


class WaitReason(Enum):
    """Why a sequence got nothing in a step."""

    TOKEN_BUDGET = "token_budget"  # max_num_batched_tokens is used up; needed/available in tokens
    NO_FREE_PAGES = "no_free_pages"  # needed/available in pages
    MAX_SEQS = "max_seqs"  # max_num_seqs rows are taken; needed/available in rows
    SIBLING_PROMPT = "sibling_prompt"  # n > 1: the first sample computes the shared prompt
    STATIC_BATCH = "static_batch"  # static batching: the running batch must end first
    QUEUE_ORDER = "queue_order"  # somebody before it in the queue waits, and overtaking is not allowed
    PREEMPTION = "preemption"  # pages were taken from somebody in this step: nobody is admitted in it
    PAUSED = "paused"  # the step only records who was ended while the room is paused: nobody computes
    IN_FLIGHT = "in_flight"  # run-ahead: nothing to compute until an earlier step settles


class Work(NamedTuple):
    """A sequence's share of one step: tokens [start, start + num_tokens) of it are computed.

    Invariant: 1 ≤ num_tokens and start + num_tokens ≤ known tokens + tokens in flight.

    Args:
        seq_id: the sequence.
        row: its row slot (a lease, ≥ 1; row 0 is the sink for padding).
        start: num_computed_tokens when scheduled.
        num_tokens: query tokens in this step.
        num_cached: tokens skipped by a prefix hit at admission in this step (0 otherwise).
        num_recomputed: of num_tokens, those that had been computed before a preemption.
        resumed: admitted again after a preemption (then num_cached is its own old pages, not a prefix hit).
        sample_seq_ids: who gets a token from the last row's logits: () for a chunk that is not the last,
            (seq_id,) usually, all samples of the request when an n > 1 prompt completes.
        num_draft: of num_tokens, draft tokens to verify (speculative decoding).
    """

    seq_id: int
    row: int
    start: int
    num_tokens: int
    num_cached: int = 0
    num_recomputed: int = 0
    resumed: bool = False
    sample_seq_ids: tuple[int, ...] = ()
    num_draft: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sequence that got nothing, with the numbers behind the reason."""

    seq_id: int
    reason: WaitReason
    needed: int
    available: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence that lost its pages in this step. `for_seq_id` needed them (None: a knob changed)."""

    seq_id: int
    for_seq_id: int | None
    num_pages: int
    num_tokens: int  # computed tokens thrown away


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of one room.

    Args:
        copies: (source page, destination page) to copy before the step: copy-on-write.
        token_budget: max_num_batched_tokens in force.
        max_num_seqs: rows in force.
    """

    step_id: int
    room: str
    works: tuple[Work, ...]
    waiting: tuple[Waiting, ...]
    preempted: tuple[Preempted, ...]
    copies: tuple[tuple[int, int], ...]
    token_budget: int
    max_num_seqs: int

    @property
    def num_tokens(self) -> int:
        return sum(w.num_tokens for w in self.works)

    @property
    def is_empty(self) -> bool:
        """Nobody computes anything."""
        return not self.works


class Sampled(NamedTuple):
    """One token that the device returned. Log-probabilities are of the raw logits (temperature 1)."""

    seq_id: int
    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class StepResult:
    """What a settled step returned, in plan order: made from tokens, or (`of_values`) from the array that the device
    returned; the other form is made when somebody looks. Never changes.

    `graph_size`: of the CUDA graph that ran it, 0: none did. `gpu_us`: between two events in the device's stream, before its
    first and behind its last operation (a GPU that waits for launches in between counts); `sample_us`: choosing tokens, where
    a host clock can see it apart (a CPU). 0: no such clock."""

    def __init__(self, step_id: int, sampled: tuple[Sampled, ...], graph_size: int = 0, gpu_us: int = 0, sample_us: int = 0) -> None:
        self.step_id, self.graph_size, self.gpu_us, self.sample_us = step_id, graph_size, gpu_us, sample_us
        self.sampled = sampled

    @classmethod
    def of_values(
        cls, step_id: int, seq_ids: tuple[int, ...], values: np.ndarray, graph_size: int = 0, gpu_us: int = 0, sample_us: int = 0
    ) -> StepResult:
        """`values` float64 [s, 2 + 2 * width]: token, logprob, top ids, top log-probabilities; or [s, 1]: the token alone."""
        made = cls.__new__(cls)
        made.step_id, made.graph_size, made.gpu_us, made.sample_us = step_id, graph_size, gpu_us, sample_us
        made.seq_ids, made.values = seq_ids, values
        return made

    @cached_property
    def sampled(self) -> tuple[Sampled, ...]:
        width = (self.values.shape[1] - 2) // 2
        found = []
        for seq_id, (token, *rest) in zip(self.seq_ids, self.values.tolist(), strict=True):
            logprob, *tops = rest or (0.0,)
            found.append(Sampled(seq_id, int(token), logprob, tuple(map(int, tops[:width])), tuple(tops[width:])))
        return tuple(found)

    @cached_property
    def seq_ids(self) -> tuple[int, ...]:
        return tuple(s.seq_id for s in self.sampled)

    @cached_property
    def values(self) -> np.ndarray:
        """As for of_values(); every token has as many alternatives."""
        return np.array([(s.token_id, s.logprob, *s.top_ids, *s.top_logprobs) for s in self.sampled], np.float64, ndmin=2)

    @cached_property
    def tokens(self) -> np.ndarray:
        """int64 [s]."""
        made = self.__dict__.get("sampled")
        return self.values[:, 0].astype(np.int64) if made is None else np.array([s.token_id for s in made], np.int64)


@dataclass(frozen=True, slots=True)
class Finished:
    seq_id: int
    reason: FinishReason
    num_pages: int  # references given back


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that became certain. `text` never ends inside a character or a possible stop string."""

    seq_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Committed:
    """What commit() made of a result. `accepted` lists (seq_id, token_id) really appended: a result for a
    sequence that had ended meanwhile (run-ahead, abort) is dropped. `text_us`: turning tokens into text, 0 where it was not
    timed apart."""

    step_id: int
    accepted: tuple[tuple[int, int], ...]
    finished: tuple[Finished, ...]
    texts: tuple[TextPiece, ...]
    text_us: int = 0


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where a step's time went, microseconds on the engine's monotonic clock; pauses and pace excluded.

    `start_us` is the engine time (sum of busy time) at which the step began, `settle_at_us` that at which it was waited for
    (with run-ahead a later step was launched in between).
    """

    start_us: int
    schedule_us: int
    build_us: int
    run_us: int
    settle_us: int
    commit_us: int
    settle_at_us: int = 0


@dataclass(frozen=True, slots=True)
class StepError:
    """A step that failed: what the page says, and whom it concerned."""

    code: str
    sentence: str
    seq_ids: tuple[int, ...]
