"""From a plan to the arrays of one step: HostBatch (numpy, what is recorded and drawn) and Batch (device).

The mask is data: cumulative query lengths, sequence lengths, positions and block tables say who sees whom.
Tokens that an earlier step has sampled but not yet returned (run-ahead) are marked and taken on the device
from `last_token`, indexed by the sequence's row slot, never by its place in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from engine.pages import PagePool
from engine.plan import StepPlan
from engine.sequence import Sequence
from engine.steady import SteadyPlan


@dataclass(frozen=True)
class HostBatch:
    """One step as a ragged super-sequence of t tokens from b sequences, s of them sampled.

    Args:
        token_ids: int64 [t]; 0 where `from_row` is true.
        from_row: bool [t]: the id comes from last_token[row] on the device.
        rows: int64 [b] row slots.
        positions: int64 [t].
        slot_mapping: int64 [t]: page * page_size + offset where the token's K/V go.
        cu_seqlens: int32 [b + 1]: query tokens of sequence i are [cu_seqlens[i], cu_seqlens[i + 1]).
        seq_lens: int32 [b]: keys that the sequence's last query sees.
        block_table: int32 [b, max_blocks], padded with page 0.
        logits_rows: int64 [s]: which tokens' logits are wanted.
        copies: int64 [c, 2] source and destination pages.
    """

    token_ids: np.ndarray
    from_row: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    cu_seqlens: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    logits_rows: np.ndarray
    copies: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def max_query_len(self) -> int:
        return int(np.diff(self.cu_seqlens).max()) if len(self.cu_seqlens) > 1 else 0

    @property
    def min_query_len(self) -> int:
        return int(np.diff(self.cu_seqlens).min()) if len(self.cu_seqlens) > 1 else 0


class SteadyHost:
    """The HostBatch of a SteadyPlan. Each array is made when it is asked for: a graph that goes on where it was needs few.

    Args:
        members, ahead, new_pages: the plan's; with them a reader knows what has changed since the step before.
    """

    num_tokens: int
    max_query_len = min_query_len = 1

    def __init__(self, plan: SteadyPlan, page_size: int) -> None:
        self._plan, self._page_size = plan, page_size
        self.members, self.ahead, self.new_pages = plan.members, plan.ahead, plan.new_pages
        self.num_tokens = len(plan.members)
        self.rows = plan.members.rows
        self.copies, self.logits_rows, self.cu_seqlens = _shape_of(self.num_tokens)

    @cached_property
    def token_ids(self) -> np.ndarray:
        return np.zeros(self.num_tokens, np.int64) if self._plan.known is None else self._plan.known[0]

    @cached_property
    def from_row(self) -> np.ndarray:
        return np.ones(self.num_tokens, bool) if self._plan.known is None else self._plan.known[1]

    @cached_property
    def positions(self) -> np.ndarray:
        return self.members.starts + self.ahead

    @cached_property
    def slot_mapping(self) -> np.ndarray:
        index, offset = np.divmod(self.positions, self._page_size)
        return self._plan.table[self.logits_rows, index].astype(np.int64) * self._page_size + offset

    @cached_property
    def seq_lens(self) -> np.ndarray:
        return (self.positions + 1).astype(np.int32)

    @cached_property
    def block_table(self) -> np.ndarray:
        return self._plan.table[:, : self._plan.width].copy()


@lru_cache(maxsize=512)
def _shape_of(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(copies, logits_rows, cu_seqlens) of n sequences with one token each. Read only by custom: torch takes them as they are."""
    return np.zeros((0, 2), np.int64), np.arange(n, dtype=np.int64), np.arange(n + 1, dtype=np.int32)


@dataclass(frozen=True)
class Batch:
    """The device half: the same arrays as tensors, plus the numbers that launches need on the host."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    logits_rows: torch.Tensor
    host: HostBatch
    attention_plan: object | None = None  # the attention variant's own, made once a step


def build_host(plan: StepPlan | SteadyPlan, sequences: Mapping[int, Sequence], pool: PagePool) -> HostBatch | SteadyHost:
    """The numpy half of a plan. Reads tokens and block tables as they are right after schedule()."""
    if isinstance(plan, SteadyPlan):
        return SteadyHost(plan, pool.page_size)
    works = plan.works
    starts = np.array([w.start for w in works], np.int64)
    counts = np.array([w.num_tokens for w in works], np.int64)
    cu_seqlens = np.zeros(len(works) + 1, np.int32)
    np.cumsum(counts, out=cu_seqlens[1:])
    total = int(cu_seqlens[-1])
    tables = [pool.table(w.seq_id) for w in works]
    block_table = np.zeros((len(works), max(map(len, tables), default=0)), np.int32)
    token_ids, from_row = np.zeros(total, np.int64), np.zeros(total, bool)
    for i, (work, table) in enumerate(zip(works, tables, strict=True)):
        block_table[i, : len(table)] = table
        known = sequences[work.seq_id].tokens[work.start : work.start + work.num_tokens]
        begin = cu_seqlens[i]
        token_ids[begin : begin + len(known)] = known
        from_row[begin + len(known) : cu_seqlens[i + 1]] = True
    of_token = np.repeat(np.arange(len(works)), counts)  # [t] which sequence
    positions = np.arange(total) - cu_seqlens[:-1].astype(np.int64)[of_token] + starts[of_token]
    pages = block_table[of_token, positions // pool.page_size].astype(np.int64)
    return HostBatch(
        token_ids=token_ids,
        from_row=from_row,
        rows=np.array([w.row for w in works], np.int64),
        positions=positions,
        slot_mapping=pages * pool.page_size + positions % pool.page_size,
        cu_seqlens=cu_seqlens,
        seq_lens=(starts + counts).astype(np.int32),
        block_table=block_table,
        logits_rows=np.repeat(cu_seqlens[1:].astype(np.int64) - 1, np.array([len(w.sample_seq_ids) for w in works], np.int64)),
        copies=np.array(plan.copies, np.int64).reshape(-1, 2),
    )


def to_device(host: HostBatch, device: torch.device, last_token: torch.Tensor, attention_plan: object | None = None) -> Batch:
    """The device half. `last_token` int64 [rows] holds each row slot's newest sampled token."""

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    token_ids = put(host.token_ids)
    if host.from_row.any():
        of_token = np.repeat(host.rows, np.diff(host.cu_seqlens))
        token_ids = torch.where(put(host.from_row), last_token[put(of_token)], token_ids)
    return Batch(
        token_ids, put(host.positions), put(host.slot_mapping), put(host.cu_seqlens), put(host.seq_lens),
        put(host.block_table), put(host.logits_rows), host, attention_plan,
    )  # fmt: skip
