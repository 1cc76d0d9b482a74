"""Pages: who leases, holds and shares them, which contents can be hit again, and a log of every change.

Arena counts the pages of one big tensor (which it never sees) and leases page sets to rooms. A room's
PagePool hands them to sequences: block tables, reference counts, prefix hashes, eviction order. A page is in
exactly one of four states:

    held     reference count ≥ 1
    pending  nobody holds it, but a step in flight was planned with it (settle() ends that)
    idle     free, its content can still be hit; taken last, least recently released first
    blank    free, no content worth keeping

Invariant (check_integrity): reference counts equal the tables, the states partition the lease, and every
published hash names a page that still has that content. Every change appends one event (engine/trace.Op);
replaying the log from an empty pool gives the same state.

Page ids are the arena's, but the log numbers a room's pages from 1 in ascending order: what a room does reads the
same wherever its lease happens to lie, and a reader needs to know nothing but how many pages it has.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from engine.trace import Op

Event = tuple[int, int, int, int]


class Arena:
    """Accounts for pages 1 … num_pages (page 0 is the sink). Rooms lease disjoint sets, ascending, in one run where
    there is one (the first that fits)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._leases: dict[str, tuple[int, ...]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lease(self, room: str, num_pages: int) -> tuple[int, ...]:
        """Page ids for a room. Raises ValueError if it has a lease already or too few pages are free."""
        if room in self._leases:
            raise ValueError(f"room {room!r} already leases pages")
        if num_pages > len(self._free):
            raise ValueError(f"{num_pages} pages asked for, {len(self._free)} are free")
        pages = self._first_run(num_pages)
        self._free = sorted(set(self._free) - set(pages), reverse=True)
        self._leases[room] = pages
        return pages

    @property
    def leases(self) -> Mapping[str, tuple[int, ...]]:
        """Room → its page ids."""
        return self._leases

    def give_back(self, room: str) -> None:
        self._free.extend(self._leases.pop(room))
        self._free.sort(reverse=True)

    def grow(self, num_pages: int) -> None:
        """More pages; leases stay."""
        assert num_pages >= self.num_pages, "leased pages cannot be taken away"
        self._free = [*range(num_pages, self.num_pages, -1), *self._free]
        self.num_pages = num_pages

    def check_integrity(self) -> None:
        """Raises AssertionError unless free and leased pages are all pages, once."""
        parts = sorted([*self._free, *(page for pages in self._leases.values() for page in pages)])
        assert parts == list(range(1, self.num_pages + 1)), "free and leased pages do not partition the arena"

    def _first_run(self, num_pages: int) -> tuple[int, ...]:
        free = self._free[::-1]
        last = num_pages - 1
        at = next((i for i in range(len(free) - last) if free[i + last] - free[i] == last), 0)
        return tuple(free[at : at + num_pages])


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The identity of a full page: everything before it and its own tokens."""
    return hashlib.blake2b(parent + np.asarray(token_ids, np.int32).tobytes(), digest_size=16).digest()


class PagePool:
    """The pages of one room and KV group.

    Args:
        pages: leased page ids, ascending.
        page_size: tokens a page.
        salt: distinguishes rooms, groups and KV formats in the prefix hashes.
    """

    def __init__(self, pages: Iterable[int], page_size: int, salt: bytes = b"") -> None:
        self.pages = tuple(pages)
        self.page_size = page_size
        self.root_hash = hashlib.blake2b(salt, digest_size=16).digest()
        self.tables: dict[int, list[int]] = {}
        self.num_events = 0
        self.number_of = {page: number for number, page in enumerate(self.pages, 1)}  # as the log calls it
        self._log: list[Event] = []
        self._refs = dict.fromkeys(self.pages, 0)
        self._blank = deque(sorted(self.pages))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._pending: dict[int, int] = {}  # page → step that must settle first
        self._used_until: dict[int, int] = {}  # page → last step planned with it by somebody who let go of it
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._settled = -1

    # ---- questions ----

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._idle)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that could ever be held."""
        return len(self.pages) * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def ref_count(self, page: int) -> int:
        return self._refs[page]

    def table(self, owner: int) -> list[int]:
        return self.tables.get(owner, [])

    def is_own(self, owner: int, position: int) -> bool:
        """Whether a token can be written there as things are: in a page that nobody else holds and nobody was offered."""
        table, index = self.tables.get(owner, ()), position // self.page_size
        return index < len(table) and self._refs[table[index]] == 1 and table[index] not in self._hash_of

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages holding the longest run of these page hashes, from the first on."""
        found: list[int] = []
        for digest in hashes:
            page = self._page_of.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def num_free_besides(self, pages: Sequence[int]) -> int:
        """Free pages once `pages` (a match) are held."""
        return self.num_free - sum(1 for page in pages if page in self._idle)

    def largest_free_run(self) -> int:
        best = run = 0
        last = None
        for number in sorted(self.number_of[page] for page in (*self._blank, *self._idle)):
            run = run + 1 if last is not None and number == last + 1 else 1
            best, last = max(best, run), number
        return best

    # ---- changes ----

    def share(self, owner: int, pages: Sequence[int]) -> None:
        """Append pages with known content to the owner's table: a prefix hit or a fork."""
        table = self.tables.setdefault(owner, [])
        for page in pages:
            if self._refs[page] == 0:
                self._idle.pop(page, None)
                self._pending.pop(page, None)
            self._refs[page] += 1
            self._event(Op.SHARE, page, owner, len(table))
            table.append(page)

    def allocate(self, owner: int, num_pages: int) -> bool:
        """Append fresh pages to the owner's table; False, and nothing changed, if too few are free."""
        if num_pages > self.num_free:
            return False
        for _ in range(num_pages):
            self._append(owner, self._take())
        return True

    def allocate_run(self, owner: int, num_pages: int) -> bool:
        """As allocate(), but the pages must be consecutive in the lease: a contiguous slab."""
        free = sorted((*self._blank, *self._idle))
        for at in range(len(free) - num_pages + 1):
            if self.number_of[free[at + num_pages - 1]] - self.number_of[free[at]] == num_pages - 1:
                for page in free[at : at + num_pages]:
                    self._take(page)
                    self._append(owner, page)
                return True
        return False

    def copy_on_write(self, owner: int, index: int, step_id: int) -> tuple[int, int] | None:
        """Give the owner its own copy of a shared page: (source, destination), or None if no page is free.
        Step `step_id` copies it; the source stays out of the free list until that has settled."""
        if not self.num_free:
            return None
        table = self.tables[owner]
        source, target = table[index], self._take()
        assert self._refs[source] > 1, "copy-on-write of a page that nobody else holds"
        self._refs[source] -= 1
        self._use_until(source, step_id)
        self._event(Op.RELEASE, source, owner, index)
        self._refs[target] = 1
        self._event(Op.ALLOC, target, owner, index)
        self._event(Op.COPY, source, owner, self.number_of[target])
        table[index] = target
        return source, target

    def release(self, owner: int, after_step: int = -1) -> int:
        """Take every page from an owner; returns how many references it had.

        Pages that nobody else holds become free once the last step planned with them by any of their owners
        settles; `after_step` is this owner's.
        The tail goes first, so that a prompt's head survives longest in the eviction order.
        """
        table = self.tables.pop(owner, [])
        for index in range(len(table) - 1, -1, -1):
            page = table[index]
            self._refs[page] -= 1
            self._use_until(page, after_step)
            self._event(Op.RELEASE, page, owner, index)
            if self._refs[page] == 0:
                if page in self._used_until:
                    self._pending[page] = self._used_until[page]
                else:
                    self._free(page)
        return len(table)

    def settle(self, step_id: int) -> None:
        """Step `step_id` and all before it are done on the device."""
        self._settled = max(self._settled, step_id)
        for page in [p for p, until in self._used_until.items() if until <= self._settled]:
            del self._used_until[page]
        for page in [p for p, after in self._pending.items() if after <= self._settled]:
            del self._pending[page]
            self._free(page)

    def publish(self, owner: int, index: int, digest: bytes) -> None:
        """Content of the owner's page is complete and may be hit. The first page with a content keeps it."""
        page = self.tables[owner][index]
        if digest in self._page_of or page in self._hash_of:
            return
        self._hash_of[page] = digest
        self._page_of[digest] = page
        self._event(Op.PUBLISH, page, owner, index)

    def unpublish(self, page: int) -> None:
        """The page is about to be written: what was offered of it will no longer be true."""
        if page in self._hash_of:
            self._evict(page)

    def forget(self) -> None:
        """Drop every cached content. Held pages stay held."""
        for page in list(self._hash_of):
            self._evict(page)
        while self._idle:
            self._blank.append(self._idle.popitem(last=False)[0])

    # ---- the log ----

    def follow(self, old: PagePool) -> None:
        """Take the place of an emptied pool: its unread events come first in this one's log."""
        assert not old.tables and not old._hash_of and not old._pending, "the old pool still holds something"
        self._log[:0] = old.take_events()

    def take_events(self) -> list[Event]:
        """Events since the last call, oldest first. The log itself is emptied in place."""
        taken = self._log[:]
        self._log.clear()
        return taken

    def snapshot_events(self) -> list[Event]:
        """Events that rebuild the present state from an empty pool: a keyframe."""
        found: list[Event] = []
        seen: set[int] = set()
        for owner, table in self.tables.items():
            for index, page in enumerate(table):
                found.append((Op.SHARE if page in seen else Op.ALLOC, self.number_of[page], owner, index))
                seen.add(page)
        found += [(Op.PUBLISH, self.number_of[page], 0, 0) for page in self._hash_of]
        for page in self._pending:
            found += [(Op.ALLOC, self.number_of[page], 0, 0), (Op.RELEASE, self.number_of[page], 0, 0)]
        return found

    def check_integrity(self) -> None:
        """Raises AssertionError naming the first broken invariant."""
        counted = dict.fromkeys(self.pages, 0)
        for owner, table in self.tables.items():
            assert len(set(table)) == len(table), f"owner {owner} holds a page twice: {table}"
            for page in table:
                counted[page] += 1
        assert counted == self._refs, "reference counts differ from the block tables"
        held = [p for p, count in self._refs.items() if count]
        parts = [*held, *self._pending, *self._idle, *self._blank]
        assert sorted(parts) == sorted(self.pages), "held, pending, idle and blank pages do not partition the lease"
        assert all(p in self._hash_of for p in self._idle), "an idle page without content"
        assert not any(p in self._hash_of for p in self._blank), "a blank page with content"
        assert {h: p for p, h in self._hash_of.items()} == self._page_of, "hash maps disagree"
        assert all(until > self._settled for until in self._used_until.values()), "a page waits for a step that has settled"
        assert all(self._used_until.get(p) == after for p, after in self._pending.items()), "a pending page without a step"

    # ---- inside ----

    def _event(self, op: Op, page: int, owner: int, index: int) -> None:
        self._log.append((op, self.number_of[page], owner, index))
        self.num_events += 1

    def _use_until(self, page: int, step_id: int) -> None:
        if step_id > self._settled:
            self._used_until[page] = max(step_id, self._used_until.get(page, -1))

    def _append(self, owner: int, page: int) -> None:
        table = self.tables.setdefault(owner, [])
        self._refs[page] = 1
        self._event(Op.ALLOC, page, owner, len(table))
        table.append(page)

    def _take(self, page: int | None = None) -> int:
        """A free page, content forgotten: blank ones first, then the idle one released longest ago."""
        if page is None:
            page = self._blank.popleft() if self._blank else next(iter(self._idle))
        elif page not in self._idle:
            self._blank.remove(page)
        if page in self._idle:
            del self._idle[page]
            self._evict(page)
        return page

    def _evict(self, page: int) -> None:
        del self._page_of[self._hash_of.pop(page)]
        self._event(Op.EVICT, page, 0, 0)

    def _free(self, page: int) -> None:
        if page in self._hash_of:
            self._idle[page] = None
        else:
            self._blank.append(page)
        self._event(Op.FREE, page, 0, 0)
