"""Bursts, where it can be told without a GPU that is lent: when one begins."""

from __future__ import annotations

import contextvars
import threading
import time

import pytest

from engine.burst_session import BurstSession, _Room
from engine.messages import Died, Prompt
from engine.request import SamplingParams
from tests.engine.test_session import until
from tests.factories import make_config, prompt_of


@pytest.fixture
def session():
    """Ready, with the room main, and without the thread that would run its bursts."""
    made = BurstSession(make_config(), lambda function: function, patience=0.3)
    made._state, made._tokenizer = "ready", type("Pieces", (), {"piece": staticmethod(str)})()
    made._ledgers["main"], made._rooms["main"] = made._new_ledger(), _Room(made.config)
    return made


def add(session: BurstSession) -> None:
    session.ask("add", room="main", prompt=Prompt("", prompt_of(4), SamplingParams(3)))


def waiting(session: BurstSession) -> tuple[threading.Thread, list[bool]]:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(session._wait_for_orders()), daemon=True)
    thread.start()
    return thread, found


def test_an_order_that_is_withdrawn_while_a_payer_is_waited_for_begins_no_burst(session):
    thread, found = waiting(session)
    add(session)
    time.sleep(0.05)
    assert session.ask("abort", room="main", request_id=None) is True
    time.sleep(0.6)  # twice its patience
    assert not found and session.burst == "idle"
    add(session)
    thread.join(5)
    assert found == [True] and session.burst == "wanted"


@pytest.mark.parametrize("how", ["abort", "cancel_job"])
def test_who_lent_a_gpu_for_what_was_withdrawn_does_not_pay_for_the_next(session, how):
    add(session) if how == "abort" else session.ask("job", name="probe", args={}, room="main")
    session.lend(contextvars.copy_context())
    assert session._lent is not None
    session.ask(how, **({"room": "main", "request_id": None} if how == "abort" else {}))
    assert session._lent is None


def test_closing_ends_the_wait(session):
    thread, found = waiting(session)
    with session._changed:
        session._state = "closed"
        session._changed.notify_all()
    thread.join(5)
    assert found == [False]


def test_the_traceback_of_a_burst_that_died_is_told(session, capsys):
    add(session)
    with session._changed:
        _, _, run = session._begin()
    session._take(Died("The engine stopped: it broke.", "Traceback: where it broke"), session._generation)
    assert run.fault == "The engine stopped: it broke." and "where it broke" in capsys.readouterr().err
    until(lambda: session.burst == "running")
