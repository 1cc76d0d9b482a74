"""What a ledger writes when a core has gone: a step that ends everybody, on the clock of the steps before it."""

from __future__ import annotations

import numpy as np
import pytest

from engine.ledger import Ledger
from engine.messages import Report
from engine.trace import FINISH_REASONS, spent_us
from tests.factories import add, make_core, piece, run


def taken(core, steps: int) -> Ledger:
    """A ledger that has seen so many steps of a core."""
    ledger = Ledger(2**24, piece, {})
    for _ in range(steps):
        core.step()
    report(ledger, core)
    return ledger


def report(ledger: Ledger, core) -> None:
    room = core.rooms["main"]
    ledger.take(Report("main", room.recorder.drain(), "running", None, (), (), room.config))


@pytest.mark.parametrize("end", ["bury", "rest"])
def test_the_closing_step_begins_when_the_last_one_is_over_and_keeps_its_limits(end):
    core = make_core(pages=16, max_num_seqs=3, max_num_batched_tokens=40)
    add(core, 9, 30)
    ledger = taken(core, 5)
    last = ledger.store.snapshot().steps[-1].copy()
    over = int(last["start_us"]) + int(spent_us(last[None])[0])
    assert over > last["start_us"]
    start = getattr(ledger, end)("The engine stopped: it broke.")
    trace = ledger.store.snapshot()
    row = trace.steps[-1]
    assert start.clock_us == row["start_us"] == over and spent_us(trace.steps[-1:])[0] == 0
    assert (row["token_budget"], row["max_num_seqs"], row["config"]) == (40, 3, last["config"])
    assert not trace.pool_at(trace.last_step).ref_counts.any() and FINISH_REASONS[trace.finishes["reason"][-1]].value == "error"
    again = make_core(pages=16)
    again.begin_at(start)
    add(again, 5, 3)
    run(again)
    report(ledger, again)
    trace = ledger.store.snapshot()
    assert trace.sequences[2].arrival_us == over and (np.diff(trace.steps["start_us"]) >= 0).all()


def test_who_died_before_the_first_step_is_ended_in_a_step_with_limits():
    core = make_core(pages=16, max_num_seqs=3, max_num_batched_tokens=40)
    add(core, 9, 30)
    ledger = taken(core, 0)
    assert ledger.bury("The engine stopped: it broke.").clock_us == 0
    (row,) = ledger.store.snapshot().steps
    assert (row["token_budget"], row["max_num_seqs"], row["failed"]) == (40, 3, 1)


def test_a_death_says_that_requests_ended_only_where_some_did_and_a_second_one_says_nothing():
    core = make_core(pages=16)
    add(core, 9, 30)
    ledger = taken(core, 3)
    ledger.bury("The engine stopped: it broke.")
    (error,) = ledger.store.snapshot().errors
    assert error.sentence == "The engine stopped: it broke. Its requests ended; a new engine was started."
    steps = len(ledger.store.snapshot())
    ledger.bury("The engine could not start: no.")
    assert len(ledger.store.snapshot()) == steps and len(ledger.store.snapshot().errors) == 1


def test_a_death_in_which_nobody_was_alive_empties_the_cache_and_says_so():
    core = make_core(pages=16)
    add(core, 9, 3)
    ledger = taken(core, 5)
    assert not ledger.alive and ledger.store.snapshot().pool_at(ledger.store.snapshot().last_step).cached.any()
    ledger.bury("The engine stopped: it broke.")
    trace = ledger.store.snapshot()
    assert [e.sentence for e in trace.errors] == ["The engine stopped: it broke. A new engine was started."]
    assert not trace.pool_at(trace.last_step).cached.any()


def test_what_a_job_made_is_there_before_the_report_that_it_has_ended(monkeypatch):
    """Others read on their own threads while a report is taken."""
    ledger, seen = Ledger(2**20, piece, {}), []
    apply = ledger.store.apply
    monkeypatch.setattr(ledger.store, "apply", lambda delta: (seen.append(ledger.report), apply(delta)))
    core = make_core()
    said = Report("main", core.rooms["main"].recorder.drain(), "idle", None, (), (), core.config)
    ledger.take(said)
    assert seen == [None] and ledger.report is said
