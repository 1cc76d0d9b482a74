"""The engine's own thread, a turn at a time: scripts, jobs that only wait, what is left when all must end."""

from __future__ import annotations

import queue
from dataclasses import replace

import pytest

from engine.config import arena_config
from engine.core import EngineCore
from engine.jobs import JOBS, Job
from engine.loop import IDLE_S, Loop
from engine.messages import Answer, Command, Prompt, Report
from engine.request import FinishReason, SamplingParams
from engine.store import TraceStore
from engine.trace import FINISH_REASONS, Trace
from tests.factories import FakeRunner, FakeText, make_config, make_core, piece, prompt_of


class Driven:
    """A Loop whose commands come from a test; what it sends is kept."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.sent, self.waits = core, [], []
        self._commands: list[Command] = []
        self.loop = Loop(core, self._receive, self.sent.append)
        self._turns = self.loop.turns()

    def _receive(self, timeout: float) -> Command:
        if self._commands:
            return self._commands.pop(0)
        self.waits.append(timeout)
        raise queue.Empty

    def ask(self, name: str, /, **args: object) -> Answer:
        self._commands.append(Command(len(self.sent) + 1000, name, args))
        self.turn()
        return [m for m in self.sent if isinstance(m, Answer)][-1]

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            next(self._turns)

    def until_idle(self) -> None:
        for _ in range(500):
            if self.loop.is_idle:
                return
            self.turn()
        raise AssertionError("it never came to rest")

    def notes(self, room: str = "main") -> list[str]:
        self.loop._report()
        return [m.note for m in self.sent if isinstance(m, Report) and m.room == room and m.note]

    def trace(self, room: str = "main") -> Trace:
        self.loop._report()
        store = TraceStore(2**24, piece)
        for message in self.sent:
            if isinstance(message, Report) and message.room == room:
                store.apply(message.delta)
        return store.snapshot()


@pytest.fixture
def driven() -> Driven:
    return Driven(make_core(pages=16, page_size=4))


def line(length: int, after_steps: int = 0, max_tokens: int = 4) -> Prompt:
    return Prompt(f"line of {length}", prompt_of(length, length), SamplingParams(max_tokens, ignore_eos=True), after_steps=after_steps)


TOO_LONG = 65  # tokens: the pool of the fixture holds 64


# ---- scripts ----


def test_a_line_that_is_refused_is_said_and_the_rest_of_the_script_goes_on(driven):
    lines = (line(5), line(TOO_LONG, 2), line(TOO_LONG, 50), line(6, 60))
    assert driven.ask("workload", room="main", prompts=lines, knobs={}).error is None
    driven.until_idle()
    assert [info.prompt for info in driven.trace().sequences.values()] == ["line of 5", "line of 6"]
    assert driven.notes() and all("65 tokens" in note for note in driven.notes())


def test_a_script_of_which_nothing_can_run_any_more_does_not_keep_the_engine_busy(driven):
    driven.ask("workload", room="main", prompts=(line(5), line(TOO_LONG, 90), line(TOO_LONG, 95)), knobs={})
    driven.until_idle()
    assert len(driven.trace().sequences) == 1 and driven.ask("is_idle", room="main").value is True


def test_an_example_that_is_refused_leaves_nothing_of_itself_behind(driven):
    lines = (line(5), line(TOO_LONG), line(7, 3))
    assert driven.ask("workload", room="main", prompts=lines, knobs={}).error.code == "prompt_exceeds_pool"
    driven.until_idle()
    driven.ask("add", room="main", prompt=line(8))
    driven.until_idle()
    trace = driven.trace()
    assert [info.prompt for info in trace.sequences.values()] == ["line of 5", "line of 8"]
    assert [FINISH_REASONS[r] for r in trace.finishes["reason"]] == [FinishReason.ABORT, FinishReason.LENGTH]


@pytest.mark.parametrize(("knobs", "code"), [({"num_pages": 25}, "pool_too_large"), ({"page_size": 5}, "bad_config")])
def test_knobs_that_cannot_be_set_end_nobody(knobs, code):
    config = make_config(pages=16)
    config = replace(config, cache=replace(config.cache, arena_pages=24))
    driven = Driven(EngineCore(config, FakeRunner(arena_config(config)), FakeText))
    driven.ask("add", room="main", prompt=line(5, max_tokens=9))
    assert driven.ask("workload", room="main", prompts=(line(6),), knobs=knobs).error.code == code
    driven.until_idle()
    trace = driven.trace()
    assert [FINISH_REASONS[r] for r in trace.finishes["reason"]] == [FinishReason.LENGTH] and len(trace.tokens_of(1)) == 9


def test_what_an_example_still_has_to_say_comes_after_its_only_request_was_ended_in_a_pause(driven):
    driven.ask("workload", room="main", prompts=(line(5, max_tokens=30), line(6, 40)), knobs={})
    driven.ask("pause", room="main")
    driven.ask("abort", room="main", request_id=1)
    driven.turn(3)
    assert len(driven.trace().sequences) == 1, "a paused room stands still"
    driven.ask("play", room="main")
    driven.until_idle()
    assert [FINISH_REASONS[r] for r in driven.trace().finishes["reason"]] == [FinishReason.ABORT, FinishReason.LENGTH]


# ---- jobs ----


def test_a_job_that_only_waits_lets_the_thread_sleep_and_one_that_works_does_not(driven, monkeypatch):
    def busy(core: EngineCore) -> Job:
        def work(job):
            while True:
                yield 0.5, "working"

        return Job(core, "busy", work)

    monkeypatch.setitem(JOBS, "busy", busy)
    driven.ask("pause", room="main")
    driven.ask("job", name="probe", args={})
    driven.turn(2)
    driven.waits.clear()
    driven.turn(3)
    assert min(driven.waits) > IDLE_S / 10
    driven.ask("cancel_job")
    driven.ask("job", name="busy", args={})
    driven.waits.clear()
    driven.turn(3)
    assert max(driven.waits) == 0


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_one_step_takes_the_probe_also_where_steps_overlap(run_ahead):
    driven = Driven(make_core(pages=16, run_ahead=run_ahead))
    driven.ask("add", room="main", prompt=line(5, max_tokens=12))
    driven.turn(3)
    driven.ask("job", name="probe", args={})
    job = driven.loop._job
    driven.until_idle()
    probed = driven.trace().steps
    assert probed["probed"].sum() == 1 and job.record.plan.step_id == probed["step_id"][probed["probed"] > 0][0]


def test_when_all_must_end_a_job_leaves_a_sentence_too(driven):
    driven.ask("job", name="probe", args={})
    driven.loop.end_all("The time was over.")
    assert driven.notes() == ["The time was over."] and driven.loop.is_idle


# ---- faults ----


def test_the_traceback_of_a_bug_goes_to_stderr_and_that_of_a_refusal_does_not(driven, capsys, monkeypatch):
    driven.core.runner.fail_on.add(1)
    driven.ask("add", room="main", prompt=line(5))
    driven.until_idle()
    assert "Traceback" in (said := capsys.readouterr().err) and "the fake device was told to fail" in said
    assert driven.ask("step", room="main", n="three").error.code == "command_failed"
    assert "Traceback" in (said := capsys.readouterr().err) and "TypeError" in said
    driven.ask("play", room="main")

    def broken(core: EngineCore) -> Job:
        def work(job):
            yield 0.0, "about to break"
            raise ZeroDivisionError("the job broke")

        return Job(core, "broken", work)

    monkeypatch.setitem(JOBS, "broken", broken)
    driven.ask("job", name="broken", args={})
    driven.until_idle()
    assert "ZeroDivisionError: the job broke" in capsys.readouterr().err
    assert driven.ask("add", room="main", prompt=line(TOO_LONG)).error.code == "prompt_exceeds_pool"
    assert capsys.readouterr().err == ""
