"""The tokens view: what a card says of a request that ended long ago."""

from __future__ import annotations

from functools import cache

import pytest

from engine.trace import TABLES, Trace
from tests.factories import add, make_core, run, trace_of
from viz.registry import load_views
from viz.view import ViewState, render

VIEW = load_views()["tokens"]


@cache
def many() -> Trace:
    """Eighty short requests, one after the other; the last still runs."""
    core = make_core(pages=64)
    for _ in range(80):
        add(core, 3, 2)
        run(core)
    add(core, 4, 40)
    for _ in range(3):
        core.step()
    return trace_of(core)


def without(trace: Trace, first: int) -> Trace:
    """What a full ring keeps of it: no row of a step before `first`, but every sequence."""
    logs = ("events", "keyframes", "text_bytes")
    tables = {t: rows if t in logs else rows[rows["step_id"] >= first] for t, rows in ((t, getattr(trace, t)) for t in TABLES)}
    return Trace(tables, trace.sequences, trace.token_texts, trace.meta)


def card(trace: Trace, seq_id: int, step: int | None = None, language: str = "en") -> str:
    """The headline of the selected request's card."""
    frame = render(VIEW, trace, ViewState(step=step, selection=f"seq:{seq_id}", size=(1200, 700), language=language))
    return next(mark.text for mark in frame.marks if mark.id == f"seq:{seq_id}")


def test_a_request_that_ended_more_than_64_ends_ago_has_finished_and_does_not_wait():
    assert card(many(), 1) == "A  finished: 2 of 2 tokens, at its limit"
    assert card(many(), 81) == "CC  3 of 40 tokens"


@pytest.mark.parametrize(
    ("language", "said"), [("en", "A  has ended; how is no longer recorded"), ("ja", "A  終了済み（終わり方の記録なし）")]
)
def test_one_whose_end_a_full_ring_has_dropped_has_ended(language, said):
    trace = many()
    assert card(without(trace, trace.last_step - 20), 1, language=language) == said


def test_one_whose_steps_are_there_but_not_its_end_has_ended_too():
    trace = many()
    tables = {t: getattr(trace, t) for t in TABLES} | {"finishes": trace.finishes[40:]}
    found = Trace(tables, trace.sequences, trace.token_texts, trace.meta)
    assert card(found, 1).endswith("how is no longer recorded") and card(found, 1, step=1) == "A  2 of 2 tokens"


def test_one_that_no_step_has_seen_yet_still_waits():
    core = make_core(pages=64)
    add(core, 3, 9)
    core.step()
    add(core, 4, 5)
    assert card(trace_of(core), 2) == "B  waits, 0 of 5 tokens"
