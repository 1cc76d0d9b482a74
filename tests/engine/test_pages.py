"""The arena and a room's pool: ownership, sharing, publication, eviction, and the log that rebuilds them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.pages import Arena, PagePool, chain_hash
from engine.trace import Op, replay
from tests.engine.audit import live_state, same_state


def make_pool(pages: int = 6, page_size: int = 4) -> PagePool:
    return PagePool(range(1, pages + 1), page_size)


def digests(count: int, salt: int = 0) -> list[bytes]:
    found, parent = [], b"root"
    for i in range(count):
        parent = chain_hash(parent, [salt, i])
        found.append(parent)
    return found


class PoolMachine(RuleBasedStateMachine):
    """A model of plain sets beside the pool. Contents are numbers; pages of one owner hold a chain of them."""

    @initialize(pages=st.integers(1, 9))
    def start(self, pages):
        self.pool = make_pool(pages)
        self.log: list[tuple] = []
        self.step = 0  # newest planned
        self.settled = -1
        self.last: dict[int, int] = {}  # owner → last step planned with its pages
        self.used: dict[int, int] = {}  # page → last step that any owner, past or present, planned with it
        self.next_owner = 1

    def _owner(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.pool.tables)))

    @rule(count=st.integers(1, 4), contiguous=st.booleans())
    def allocate(self, count, contiguous):
        owner, free = self.next_owner, self.pool.num_free
        run = self.pool.largest_free_run()
        blank = set(self.pool._blank)
        ok = (self.pool.allocate_run if contiguous else self.pool.allocate)(owner, count)
        assert ok == (count <= (run if contiguous else free))
        if ok:
            table = self.pool.table(owner)
            assert all(self.pool.ref_count(page) == 1 for page in table) and len(table) == count
            assert not contiguous or table == list(range(table[0], table[0] + count))
            assert contiguous or len(blank) < count or set(table) <= blank, "content was evicted while blank pages were left"
            assert all(self.used.get(page, -1) <= self.settled for page in table), "a page came back before its last step had settled"
            self.next_owner += 1
            self._plan(owner)

    def _plan(self, owner):
        self.last[owner] = self.step
        for page in self.pool.table(owner):
            self.used[page] = self.step

    @precondition(lambda self: self.pool.tables)
    @rule(data=st.data())
    def grow(self, data):
        owner, before = self._owner(data), self.pool.num_free
        assert self.pool.allocate(owner, 1) == (before > 0)
        self._plan(owner)

    @precondition(lambda self: self.pool.tables)
    @rule(data=st.data())
    def fork(self, data):
        parent = self._owner(data)
        self.pool.share(self.next_owner, list(self.pool.table(parent)))
        self.last[self.next_owner] = -1  # not planned yet
        self.next_owner += 1

    @precondition(lambda self: self.pool.tables)
    @rule(data=st.data(), salt=st.integers(0, 2))
    def publish(self, data, salt):
        owner = self._owner(data)
        for index, digest in enumerate(digests(len(self.pool.table(owner)), salt)):
            self.pool.publish(owner, index, digest)

    @rule(salt=st.integers(0, 2), count=st.integers(1, 4))
    def hit(self, salt, count):
        found = self.pool.match(digests(count, salt))
        assert all(self.pool._hash_of[page] == digest for page, digest in zip(found, digests(count, salt), strict=False))
        if found:
            free = self.pool.num_free_besides(found)
            self.pool.share(self.next_owner, found)
            assert self.pool.num_free == free
            self._plan(self.next_owner)
            self.next_owner += 1

    @precondition(lambda self: self.pool.tables)
    @rule(data=st.data())
    def copy_on_write(self, data):
        owner = self._owner(data)
        shared = [i for i, page in enumerate(self.pool.table(owner)) if self.pool.ref_count(page) > 1]
        if not shared:
            return
        source = self.pool.table(owner)[shared[-1]]
        free, refs = self.pool.num_free, self.pool.ref_count(source)
        copy = self.pool.copy_on_write(owner, shared[-1], self.step)
        assert (copy is None) == (free == 0)
        if copy:
            assert copy == (source, self.pool.table(owner)[shared[-1]]) and self.pool.ref_count(source) == refs - 1
            assert self.pool.ref_count(copy[1]) == 1
            self.used[source] = self.step
            self._plan(owner)

    @precondition(lambda self: self.pool.tables)
    @rule(data=st.data())
    def release(self, data):
        owner = self._owner(data)
        held = len(self.pool.table(owner))
        assert self.pool.release(owner, self.last.pop(owner)) == held
        assert self.pool.release(owner) == 0 and owner not in self.pool.tables

    @rule()
    def plan_a_step(self):
        self.step += 1
        for owner in list(self.pool.tables)[::2]:
            self._plan(owner)

    @precondition(lambda self: self.settled < self.step)
    @rule()
    def settle(self):
        self.settled += 1
        self.pool.settle(self.settled)

    @rule()
    def forget(self):
        self.pool.forget()
        assert not self.pool.match(digests(1)) and not self.pool._idle

    @precondition(lambda self: self.pool.tables)
    @rule(data=st.data())
    def unpublish(self, data):
        self.pool.unpublish(self.pool.table(self._owner(data))[0])

    @rule()
    def keyframe(self):
        same_state(replay(self.pool.num_pages, self.pool.snapshot_events()), live_state(self.pool))

    @invariant()
    def audit(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        self.log += self.pool.take_events()
        assert self.pool.num_events == len(self.log) and not self.pool.take_events()
        same_state(replay(self.pool.num_pages, self.log), live_state(self.pool))
        state = live_state(self.pool)
        assert state.num_free == self.pool.num_free
        free = {*self.pool._blank, *self.pool._idle}
        assert all(self.used.get(page, -1) <= self.settled for page in free), "free before its last step has settled"
        assert not free & {page for table in self.pool.tables.values() for page in table}


PoolMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestPoolMachine = PoolMachine.TestCase


def test_an_arena_leases_disjoint_pages_and_never_page_0():
    arena = Arena(10)
    a, b = arena.lease("a", 4), arena.lease("b", 5)
    assert a == (1, 2, 3, 4) and b == (5, 6, 7, 8, 9) and arena.num_free == 1
    with pytest.raises(ValueError, match="already"):
        arena.lease("a", 1)
    with pytest.raises(ValueError, match="2 pages asked for, 1 are free"):
        arena.lease("c", 2)
    arena.give_back("a")
    assert arena.num_free == 5 and arena.lease("c", 5) == (1, 2, 3, 4, 10)


def test_rooms_and_formats_do_not_hit_each_others_prefixes():
    assert PagePool([1], 4, b"a").root_hash != PagePool([1], 4, b"b").root_hash
    assert chain_hash(b"a", [1, 2]) != chain_hash(b"b", [1, 2]) != chain_hash(b"b", [2, 1])


def test_content_is_evicted_least_recently_released_first_and_a_tail_before_its_head():
    pool = make_pool(6)
    pool.allocate(1, 2)
    pool.allocate(2, 2)
    for owner in (1, 2):
        for index, digest in enumerate(digests(2, owner)):
            pool.publish(owner, index, digest)
    (a1, a2), (b1, b2) = pool.tables[1], pool.tables[2]
    pool.release(1)
    pool.release(2)
    order = []
    for owner in range(10, 16):
        pool.allocate(owner, 1)
        order += pool.tables[owner]
    assert order[:2] == [5, 6], "blank pages first"
    assert order[2:] == [a2, a1, b2, b1]
    assert not pool.allocate(16, 1)


def test_a_refused_allocation_changes_nothing():
    pool = make_pool(3)
    pool.allocate(1, 2)
    before = live_state(pool)
    assert not pool.allocate(1, 2) and not pool.allocate_run(2, 2)
    same_state(live_state(pool), before)
    assert 2 not in pool.tables


def test_a_slab_needs_neighbouring_pages():
    pool = make_pool(6)
    for owner in range(1, 7):
        pool.allocate(owner, 1)
    for owner in (1, 3, 4, 6):
        pool.release(owner)
    assert pool.num_free == 4 and pool.largest_free_run() == 2
    assert not pool.allocate_run(9, 3) and pool.allocate_run(9, 2)
    assert pool.tables[9] == [3, 4]


def test_the_first_page_with_a_content_keeps_it():
    pool = make_pool()
    pool.allocate(1, 1)
    pool.allocate(2, 1)
    (digest,) = digests(1)
    pool.publish(1, 0, digest)
    pool.publish(2, 0, digest)
    assert pool.match([digest]) == pool.tables[1]
    pool.release(2)
    assert pool.match([digest]) == pool.tables[1] and pool.num_free == 5


def test_a_hit_may_revive_a_page_whose_last_owner_is_gone_and_whose_step_is_in_flight():
    pool = make_pool(2)
    pool.allocate(1, 1)
    (digest,) = digests(1)
    pool.publish(1, 0, digest)
    pool.release(1, after_step=5)
    assert pool.num_pending == 1 and pool.num_free == 1
    pool.share(2, pool.match([digest]))
    assert pool.num_pending == 0 and pool.num_free == 1
    pool.release(2, after_step=3)  # it was never planned after step 3, but step 5 still uses the page
    pool.settle(4)
    assert pool.num_pending == 1
    pool.settle(5)
    assert pool.num_pending == 0 and pool.num_free == 2


def test_a_page_that_a_step_copies_stays_out_until_that_step_has_settled():
    pool = make_pool(3)
    pool.allocate(1, 1)
    pool.share(2, pool.tables[1])
    source, target = pool.copy_on_write(1, 0, step_id=4)
    assert (source, pool.tables[1]) == (1, [target])
    pool.release(2)  # it was never planned
    assert pool.num_pending == 1 and pool.num_free == 1
    pool.settle(4)
    assert pool.num_pending == 0 and pool.num_free == 2


def test_content_that_will_be_overwritten_is_no_longer_offered():
    pool = make_pool()
    pool.allocate(1, 1)
    pool.publish(1, 0, digests(1)[0])
    pool.unpublish(pool.tables[1][0])
    assert not pool.match(digests(1)) and pool.ref_count(1) == 1
    pool.unpublish(pool.tables[1][0])
    pool.release(1)
    assert pool.num_free == 6 and not pool._idle


def test_a_new_pool_follows_an_emptied_one_in_the_log():
    old = make_pool(9)
    old.allocate(1, 7)
    old.publish(1, 0, digests(1)[0])
    old.take_events()
    old.release(1)
    new = make_pool(3)
    with pytest.raises(AssertionError, match="still holds"):
        new.follow(old)
    old.forget()
    new.follow(old)
    new.allocate(2, 1)
    events = new.take_events()
    assert [e[0] for e in events[:2]] == [Op.RELEASE, Op.FREE] and events[-1] == (Op.ALLOC, 1, 2, 0)
    assert old.take_events() == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p._refs.__setitem__(1, 2), "reference counts"),
        (lambda p: p._blank.append(1), "partition"),
        (lambda p: p.tables[1].append(p.tables[1][0]), "twice"),
        (lambda p: p._hash_of.__setitem__(6, b"x"), "blank page with content"),
        (lambda p: p._page_of.clear(), "disagree"),
    ],
)
def test_the_audit_finds_damage(damage, message):
    pool = make_pool()
    pool.allocate(1, 2)
    pool.publish(1, 0, digests(1)[0])
    pool.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()
