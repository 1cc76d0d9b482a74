"""A decode batch that stays as it is: the same sequences, one token each, step after step, without a loop over them.

A Cohort is formed when every running sequence needs exactly one token and nobody can be admitted. What changes from step
to step is then one number (`planned`), so plans, inputs and what is committed come from arrays by place in the batch;
only who ends, needs a page, or writes text that depends on more than its token is looked at by itself. Any other change
(an arrival, an abort, a knob, too few pages) disbands the cohort, and engine/scheduler.py deals out steps one sequence at
a time, with the same outcome.

While a sequence is a member, its counters are its own plus what the cohort has done since (engine/sequence.py); leaving
makes them its own again. Plans and records keep a `Members`, which never changes.

Knows no queue, no ranks, no device. Rejected: one array of counters for all sequences by row slot (every rare path would
read it element by element, which numpy does slowly).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from engine.pages import PagePool
from engine.plan import Finished, TextPiece, Waiting, WaitReason, Work
from engine.sequence import Sequence

HISTORY = 64  # steps whose tokens are kept as a matrix before they go to their sequences
MOST_STOPS = 16  # stop ids compared for all at once; who has more is looked at by itself
_NEVER = 2**62


class Vocabulary(Protocol):
    """What tokens say that always say the same (engine/detokenizer.py)."""

    def are_plain(self, token_ids: np.ndarray) -> np.ndarray:
        """bool, of the ids' shape: whole characters, whatever came before."""

    def text(self, token_id: int) -> str:
        """Of a plain token."""

    def spell(self, token_ids: np.ndarray) -> list[bytes]:
        """UTF-8 of plain tokens."""


@dataclass(frozen=True, eq=False)
class Members:
    """Who decodes together, in plan order.

    Args:
        seqs: the sequences; `epochs`: of each when it became a member.
        seq_ids, rows: int64 [n].
        starts: int64 [n], the position that the cohort's step 0 computes; step k computes starts + k.
    """

    seqs: tuple[Sequence, ...]
    epochs: tuple[int, ...]
    seq_ids: np.ndarray
    rows: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.seqs)

    @cached_property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.seq_ids.tolist())

    @cached_property
    def stops(self) -> np.ndarray:
        """int64 [n, MOST_STOPS]: ids that end each, padded with -1."""
        found = np.full((len(self.seqs), MOST_STOPS), -1, np.int64)
        for row, seq in zip(found, self.seqs, strict=True):
            ids = stop_ids_of(seq)[:MOST_STOPS]
            row[: len(ids)] = ids
        return found

    @classmethod
    def of(cls, seqs: Seq[Sequence], starts: Seq[int]) -> Members:
        ids, rows = np.array([s.seq_id for s in seqs], np.int64), np.array([s.row for s in seqs], np.int64)
        return cls(tuple(seqs), tuple(s.epoch for s in seqs), ids, rows, np.array(starts, np.int64))

    def keep(self, mask: np.ndarray) -> Members:
        at = np.flatnonzero(mask).tolist()
        seqs, epochs = tuple(self.seqs[i] for i in at), tuple(self.epochs[i] for i in at)
        return Members(seqs, epochs, self.seq_ids[mask], self.rows[mask], self.starts[mask])


@dataclass(frozen=True, eq=False)
class SteadyPlan:
    """A StepPlan in which every member computes one token and gets one.

    Args:
        ahead: which step of its cohort it is.
        table: int32 [n, …] block tables, `width` columns of which are in use; later steps only write behind a row's end.
        known: (token ids, from_row) as HostBatch has them; None: every token is still on the device.
        new_pages: (places, columns, pages) that this step took.
    """

    step_id: int
    room: str
    cohort: Cohort
    members: Members
    ahead: int
    waiting: tuple[Waiting, ...]
    token_budget: int
    max_num_seqs: int
    table: np.ndarray
    width: int
    known: tuple[np.ndarray, np.ndarray] | None
    new_pages: tuple[np.ndarray, np.ndarray, np.ndarray] | None

    preempted = copies = ()
    is_empty = False

    @property
    def num_tokens(self) -> int:
        return len(self.members)

    @cached_property
    def works(self) -> tuple[Work, ...]:
        m = self.members
        rows, starts = m.rows.tolist(), (m.starts + self.ahead).tolist()
        return tuple(Work(i, row, start, 1, sample_seq_ids=(i,)) for i, row, start in zip(m.ids, rows, starts, strict=True))


@dataclass(frozen=True, eq=False)
class SteadyCommitted:
    """A Committed of a SteadyPlan.

    Args:
        tokens: int64 [n], one a member of the plan.
        taken: bool [n]: whose token was appended; None: everybody's.
        spoken: bool [n]: whose text is its token's in `vocabulary`; the others' is in `pieces`.
        pieces: (place in the plan, text) in order; -1: from before this step.
        text_us: making the text of `pieces`, where it was timed; that of plain tokens is made when the record is packed.
    """

    step_id: int
    members: Members
    tokens: np.ndarray
    taken: np.ndarray | None
    finished: tuple[Finished, ...]
    spoken: np.ndarray
    pieces: tuple[tuple[int, TextPiece], ...]
    vocabulary: Vocabulary | None
    text_us: int = 0

    @cached_property
    def accepted(self) -> tuple[tuple[int, int], ...]:
        pairs = zip(self.members.ids, self.tokens.tolist(), strict=True)
        return tuple(pairs) if self.taken is None else tuple(p for p, taken in zip(pairs, self.taken.tolist(), strict=True) if taken)

    @cached_property
    def texts(self) -> tuple[TextPiece, ...]:
        found = list(self.pieces)
        for place in np.flatnonzero(self.spoken).tolist():
            text = self.vocabulary.text(int(self.tokens[place]))
            if text:
                found.append((place, TextPiece(self.members.ids[place], text)))
        return tuple(piece for _, piece in sorted(found, key=lambda item: item[0]))  # stable


class _Due:
    """When something is due for each member, in steps of the cohort; `next` is the earliest."""

    def __init__(self, at: np.ndarray, period: int = 0) -> None:
        self.at, self.period = at, period
        self._find()

    def _find(self) -> None:
        self.next = int(self.at.min()) if len(self.at) else _NEVER

    def now(self, count: int) -> list[int]:
        """Places at which it is."""
        return np.flatnonzero(self.at <= count).tolist() if count >= self.next else []

    def done(self, places: list[int]) -> None:
        self.at[places] += self.period
        self._find()

    def keep(self, mask: np.ndarray) -> None:
        self.at = self.at[mask]
        self._find()


class Cohort:
    """Members and what concerns them, by place.

    Invariants: nobody outside engine/scheduler.py changes a member's pages or tokens; `committed` ≤ `planned`; every
    plan that is not yet committed names these members, or a cohort of which these are what is left.

    Args:
        seqs: each needs one token, which it may write to a page of its own (or needs one for).
        ending: running, and wait for their last token in flight.
        queue: why the others wait, for as long as the cohort stays.
        max_known: most tokens that a sequence may get.
    """

    def __init__(self, seqs: Seq[Sequence], ending: Seq[Sequence], queue: tuple[Waiting, ...], pool: PagePool, max_known: int) -> None:
        self.pool, self.ending, self.queue = pool, list(ending), queue
        self.planned = self.committed = 0
        self.last_step = -1
        starts = [s.num_computed for s in seqs]
        self._known = _known_now(seqs, starts)
        self.members = Members.of(seqs, starts)
        tables = [pool.table(s.seq_id) for s in seqs]
        held = np.array([len(t) for t in tables], np.int64)
        self._width = int(held.max())
        self._table = np.zeros((len(seqs), self._width + 8), np.int32)
        for row, table in zip(self._table, tables, strict=True):
            row[: len(table)] = table
        size, first = pool.page_size, self.members.starts
        self._pages = _Due(held * size - first, size)
        self._full = _Due(size - first % size, size)
        self._ends = _Due(np.array([steps_left(s, max_known) for s in seqs], np.int64))
        self._stops = _stop_ids(seqs)
        self.vocabulary, self._plain = _plain_texts(seqs)
        self._history = np.zeros((HISTORY, len(seqs)), np.int64)
        self._filled = 0
        self._newest = np.zeros(len(seqs), np.int64)
        self._waiting: tuple[Waiting, ...] | None = None
        for place, seq in enumerate(seqs):
            seq.join(self, place)

    # ---- planning ----

    def plan(self, step_id: int, room: str, token_budget: int, max_num_seqs: int) -> SteadyPlan | None:
        """The next step; None if it cannot be planned this way."""
        if self.planned >= self._ends.next:
            self.ending += [self.members.seqs[place] for place in self._ends.now(self.planned)]
            self._waiting = None
            self.keep(self._ends.at > self.planned)
        needy = self._pages.now(self.planned)
        if not self.members.seqs or len(needy) > self.pool.num_free:
            return None
        pages = self._take_pages(needy) if needy else None
        known = self._known
        if self.planned:
            known = (self._newest, _nothing(len(self.members))) if self.committed == self.planned else None
        plan = SteadyPlan(
            step_id, room, self, self.members, self.planned, self.waiting, token_budget, max_num_seqs, self._table, self._width,
            known, pages,
        )  # fmt: skip
        self.planned += 1
        self.last_step = step_id
        return plan

    @property
    def waiting(self) -> tuple[Waiting, ...]:
        if self._waiting is None:
            self._waiting = (*(Waiting(s.seq_id, WaitReason.IN_FLIGHT, 1, 0) for s in self.ending), *self.queue)
        return self._waiting

    def _take_pages(self, places: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        columns, pages = [], []
        for place in places:
            seq_id = self.members.ids[place]
            self.pool.allocate(seq_id, 1)
            table = self.pool.table(seq_id)
            columns.append(len(table) - 1)
            pages.append(table[-1])
        self._width = max(self._width, max(columns) + 1)
        if self._width > self._table.shape[1]:
            self._table = np.pad(self._table, ((0, 0), (0, self._width)))
        at = np.array(places, np.int64), np.array(columns, np.int64), np.array(pages, np.int32)
        self._table[at[0], at[1]] = at[2]
        self._pages.done(places)
        return at

    # ---- committing ----

    def take(self, tokens: np.ndarray) -> tuple[list[int], list[int], np.ndarray]:
        """A step's tokens, int64 [n].

        Returns:
            (places whose page has become full, places to look at one by one: they may have ended or their text depends on
            more than the token, bool [n]: whose text is the vocabulary's).
        """
        self.committed += 1
        if self._filled == HISTORY:
            self.flush()
        self._history[self._filled] = self._newest = tokens
        self._filled += 1
        full = self._full.now(self.committed)
        if full:
            self._full.done(full)
        odd = ~self._plain
        if self.vocabulary is not None:
            odd |= ~self.vocabulary.are_plain(tokens)
        if self._stops is not None:
            odd |= (tokens[:, None] == self._stops).any(axis=1)
        if self.committed >= self._ends.next:
            odd |= self._ends.at <= self.committed
        return full, np.flatnonzero(odd).tolist(), ~odd

    def look_again(self, places: Iterable[int]) -> None:
        """The texts of these members have moved on by themselves."""
        for place in places:
            self._plain[place] = _is_plain(self.members.seqs[place], self.vocabulary)

    def forget_ended(self) -> None:
        """Of those who waited for their last token, keep who still does."""
        if self.ending and not all(seq.row is not None for seq in self.ending):
            self.ending = [seq for seq in self.ending if seq.row is not None]
            self._waiting = None

    def flush(self) -> None:
        """Hand the tokens over to their sequences."""
        for seq in self.members.seqs:
            self.pull(seq)
            seq.pulled = 0
        self._filled = 0

    def pull(self, seq: Sequence) -> None:
        """Append what a member was given since it last asked."""
        if seq.pulled < self._filled:
            seq.own_tokens.extend(self._history[seq.pulled : self._filled, seq.place].tolist())
            seq.pulled = self._filled

    def disband(self) -> None:
        """Every member's counters are its own again."""
        for seq in self.members.seqs:
            seq.leave()

    def check_integrity(self, running: Seq[Sequence]) -> None:
        """Raises AssertionError unless what is kept by place is what the sequences and the pool say."""
        assert self.committed <= self.planned
        members = self.members.seqs
        assert sorted(s.seq_id for s in (*members, *self.ending)) == sorted(s.seq_id for s in running), "who runs is not who decodes"
        for place, seq in enumerate(members):
            table = self.pool.table(seq.seq_id)
            assert seq.place == place and seq.row == self.members.rows[place]
            assert self._table[place, : len(table)].tolist() == table and not self._table[place, len(table) :].any()
            assert seq.num_computed == self.members.starts[place] + self.planned
            assert self._pages.at[place] == len(table) * self.pool.page_size - self.members.starts[place]

    def keep(self, mask: np.ndarray) -> None:
        """Whoever is not in the mask leaves, or has left."""
        for place in np.flatnonzero(~mask).tolist():
            self.members.seqs[place].leave()
        self.members = self.members.keep(mask)
        for due in (self._pages, self._full, self._ends):
            due.keep(mask)
        self._table, self._plain, self._newest = self._table[mask], self._plain[mask], self._newest[mask]
        held = (self._pages.at + self.members.starts) // self.pool.page_size
        self._width = int(held.max(initial=0))
        self._history = np.ascontiguousarray(self._history[:, mask])
        self._known = tuple(part[mask] for part in self._known)
        if self._stops is not None:
            self._stops = self._stops[mask]
        for place, seq in enumerate(self.members.seqs):
            seq.place = place


def form(running: Seq[Sequence], queue: tuple[Waiting, ...], pool: PagePool, max_known: int, budget: int) -> Cohort | None:
    """A cohort of the running sequences; None unless each decodes, writes to pages of its own, or waits for its last token."""
    members, ending = [], []
    for seq in running:
        if seq.num_known - seq.num_computed != 1 or seq.num_computed < max(seq.num_prompt_tokens, seq.high_water):
            return None
        if steps_left(seq, max_known) <= 0:
            ending.append(seq)
            continue
        at = seq.num_computed
        if at < len(pool.table(seq.seq_id)) * pool.page_size and not pool.is_own(seq.seq_id, at):
            return None
        members.append(seq)
    if not 0 < len(members) <= budget:
        return None
    return Cohort(members, ending, queue, pool, max_known)


def steps_left(seq: Sequence, max_known: int) -> int:
    """Tokens that may still be planned for a sequence that has one in flight, or has not ended."""
    return min(seq.request.sampling.max_tokens - seq.num_planned_outputs, max_known - seq.num_known)


def stop_ids_of(seq: Sequence) -> tuple[int, ...]:
    """Ids that end it."""
    params = seq.request.sampling
    return (*params.stop_token_ids, *(() if params.ignore_eos else sorted(seq.request.eos_token_ids)))


def _known_now(seqs: Seq[Sequence], starts: Seq[int]) -> tuple[np.ndarray, np.ndarray]:
    """(token ids, bool: it is still on the device) of the first step."""
    ids = [seq.tokens[start] if start < len(seq.tokens) else None for seq, start in zip(seqs, starts, strict=True)]
    return np.array([i or 0 for i in ids], np.int64), np.array([i is None for i in ids], bool)


def _stop_ids(seqs: Seq[Sequence]) -> np.ndarray | None:
    """int64 [n, most], padded with -1; None: nobody has any."""
    ids = [stop_ids_of(seq)[:MOST_STOPS] for seq in seqs]
    most = max(map(len, ids))
    return np.array([[*some, *[-1] * (most - len(some))] for some in ids], np.int64) if most else None


def _plain_texts(seqs: Seq[Sequence]) -> tuple[Vocabulary | None, np.ndarray]:
    """(the vocabulary, bool [n]: whose text is made of it as things are)."""
    found = next((v for seq in seqs if (v := getattr(seq.text, "vocabulary", None)) is not None), None)
    return found, np.array([_is_plain(seq, found) for seq in seqs], bool)


def _is_plain(seq: Sequence, vocabulary: Vocabulary | None) -> bool:
    text = seq.text
    few = len(stop_ids_of(seq)) <= MOST_STOPS
    return few and vocabulary is not None and getattr(text, "vocabulary", None) is vocabulary and text.is_plain


_NOTHING: dict[int, np.ndarray] = {}


def _nothing(n: int) -> np.ndarray:
    """bool [n], all False, read only."""
    found = _NOTHING.get(n)
    if found is None:
        found = _NOTHING[n] = np.zeros(n, bool)
        found.flags.writeable = False
    return found
