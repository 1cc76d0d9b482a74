"""What the page asks of a session, where it can be told without a model: hidden texts, rooms that come and go, limits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

import engine.audience as audience
from engine.artifacts import Timeline, of_kind
from engine.audience import Hosting, LiveSource, for_many
from engine.config import CacheConfig, arena_config
from engine.core import EngineCore
from engine.errors import EngineError
from engine.recording import decode
from engine.veil import SENTENCE, veiled
from engine.workloads import TEACHING, WORKLOADS, Line, Workload
from tests.factories import FakeRunner, FakeText, make_config, make_trace
from tests.viz.kernel_scenarios import CPU, GPU
from tests.viz.timeline_scenarios import cpu, off, on, run_on


class FakeSession:
    """As much of a Session as a source asks for. `refusing`: the code with which every command is refused."""

    def __init__(self, pages: int = 96) -> None:
        self.config = make_config(pages)
        self.meta: dict[str, object] = {"backend": "triton"}
        self.burst = None
        self.refusing = ""
        self.rooms: tuple[str, ...] = ()
        self.commands: list[tuple] = []
        self.workload: Workload | None = None
        self.shown = make_trace()

    @property
    def is_ready(self) -> bool:
        return self.refusing != "engine_not_ready"

    def trace(self, room: str):
        return self.shown

    def status(self, room: str):
        return SimpleNamespace(state="idle")

    def ask(self, name: str, /, **args: object) -> None:
        self.commands.append((name, args))
        if self.refusing:
            raise EngineError(self.refusing, "No.")

    def open_room(self, room: str) -> None:
        self.rooms = (*self.rooms, room)
        self.ask("open_room", name=room)

    def close_room(self, room: str) -> None:
        self.ask("close_room", name=room)
        if room not in self.rooms:
            raise EngineError("unknown_room", "No.")
        self.rooms = tuple(r for r in self.rooms if r != room)

    def run_workload(self, workload: Workload, **how: object) -> None:
        self.workload = workload


NEVER = Hosting(10**6, 10**6)


# ---- hidden texts ----


def test_hiding_while_a_trace_is_veiled_on_another_thread_is_not_undone(monkeypatch):
    source = LiveSource(FakeSession())
    source.hide("main", {1})

    def hides_more_meanwhile(trace, hidden):
        found = veiled(trace, hidden)
        source.hide("main", {1, 2})
        return found

    monkeypatch.setattr(audience, "veiled", hides_more_meanwhile)
    source.trace("main")
    monkeypatch.setattr(audience, "veiled", veiled)
    trace = source.trace("main")
    assert trace.sequences[1].prompt == trace.sequences[2].prompt == SENTENCE != trace.sequences[3].prompt
    assert source.trace("main") is trace, "it is made once a snapshot"
    source.hide("main", ())
    assert source.trace("main").sequences[1].prompt != SENTENCE


# ---- rooms ----


@pytest.mark.parametrize("code", ["engine_not_ready", "no_answer", "engine_dead"])
def test_a_room_that_could_not_be_closed_is_closed_once_the_engine_is_there(code):
    session = FakeSession()
    source = LiveSource(session, hosting=NEVER)
    source.open_room("a")
    source.open_room("b")
    session.refusing = code
    source.close_room("a")
    source.reap(NEVER)
    assert session.rooms == ("a", "b")
    session.refusing = ""
    source.reap(NEVER)
    assert session.rooms == ("b",)
    asked = len(session.commands)
    source.reap(NEVER)
    assert len(session.commands) == asked, "and then it is forgotten"


def test_a_room_that_was_opened_too_late_is_given_back_and_one_opened_again_is_kept():
    session = FakeSession()
    source = LiveSource(session, hosting=NEVER)
    session.refusing = "no_answer"
    with pytest.raises(EngineError):
        source.open_room("late")
    session.refusing = ""
    assert session.rooms == ("late",)
    source.reap(NEVER)
    assert session.rooms == ()
    session.refusing = "no_answer"
    with pytest.raises(EngineError):
        source.open_room("again")
    session.refusing = ""
    source.open_room("again")
    source.reap(NEVER)
    assert "again" in session.rooms


def test_a_busy_room_does_not_end_before_an_idle_one_would():
    assert Hosting(60 * 30.0).busy_s == 60 * 30.0 and (Hosting(120.0).busy_s, Hosting(5.0, 9.0).busy_s) == (600.0, 9.0)


def test_when_a_person_leaves_all_that_was_his_ends_though_one_is_refused(monkeypatch):
    session = FakeSession()
    source = LiveSource(session, grace=600.0)
    monkeypatch.setattr(source, "owned", lambda room, viewer: [7, 8])
    source.viewer_joined("main", "stays")
    source.viewer_joined("main", "goes")
    source._rooms["main"].owned["goes"] = []
    source.viewer_left("main", "goes")
    session.refusing = "burst_running"
    source._abandon("main", "goes")
    assert [args["request_id"] for name, args in session.commands if name == "abort"] == [7, 8]


# ---- limits ----


def test_an_example_takes_no_more_than_a_room_among_many_may_have(monkeypatch):
    monkeypatch.setitem(WORKLOADS, "greedy", Workload("", "", (Line("hello"),), {**TEACHING, "num_pages": 500, "page_size": 32}))
    session = FakeSession(pages=40)
    LiveSource(session, hosting=NEVER).do_preset("r", {"name": "greedy"})
    assert session.workload.knobs == {k: v for k, v in {**TEACHING, "num_pages": 40}.items() if k != "page_size"}
    LiveSource(session).do_preset("main", {"name": "greedy"})
    assert session.workload.knobs == WORKLOADS["greedy"].knobs, "on a laptop it may"


def test_knobs_that_concern_kernels_are_greyed_and_refused_where_torch_runs(monkeypatch):
    """On a CPU they would turn nothing. Where nobody knows yet what will run (a GPU is lent later), they can be turned."""
    monkeypatch.setitem(WORKLOADS, "eager", Workload("", "", (Line("hello"),), {**TEACHING, "cuda_graphs": False, "fused": False}))
    for hosting in (None, NEVER):
        session = FakeSession()
        session.meta = {"backend": "torch"}
        source = LiveSource(session, hosting=hosting)
        knobs = source._knobs("main")
        whys = {name: knob["why"] for name, knob in knobs.items() if "why" in knob and name != "page_size"}
        assert whys == dict.fromkeys(("cuda_graphs", "fused"), "needs the Triton kernels and a GPU")
        for name in whys:
            with pytest.raises(EngineError) as no:
                source.do_knob("main", {"name": name, "value": False})
            assert no.value.code == "knob_needs_kernels" and no.value.fields == {"name": name}
        assert not session.commands
        source.do_preset("main", {"name": "eager"})
        kept = {name: value for name, value in TEACHING.items() if hosting is None or name != "page_size"}
        assert session.workload.knobs == kept, "an example begins without them"
    for meta in ({"backend": "triton"}, {}):
        session.meta = meta
        assert not {name for name, knob in LiveSource(session)._knobs("main").items() if "why" in knob}
        greyed = {name for name, knob in LiveSource(session, hosting=NEVER)._knobs("main").items() if "why" in knob}
        assert greyed == {"page_size", "fused"}, "on a public page also what all rooms share"
        LiveSource(session, hosting=NEVER).do_knob("main", {"name": "cuda_graphs", "value": False})
        assert session.commands.pop() == ("knobs", {"room": "main", "knobs": {"cuda_graphs": False}})


def test_a_comparison_finds_its_pages_also_when_every_room_is_taken():
    config = for_many(make_config(), 3)
    config = replace(
        config, cache=replace(CacheConfig(page_size=4), num_pages=config.cache.num_pages, arena_pages=config.cache.arena_pages)
    )
    core = EngineCore(config, FakeRunner(arena_config(config)), FakeText)
    for name in "abc":
        core.open_room(name)
    with pytest.raises(EngineError, match="rooms are taken"):
        core.open_room("d")
    core.open_room("scratch", scratch=True)
    assert core.arena.num_free == 0


# ---- a GPU's timelines beside a CPU's run ----


def test_a_page_without_a_gpu_shows_recorded_timelines_and_saves_none_of_them() -> None:
    session, asked = FakeSession(), []

    def beside() -> tuple:
        asked.append(1)
        return (off(), on())

    session.shown = run_on(CPU, cpu())
    source = LiveSource(session, beside=beside)
    shown = source.trace("main")
    assert [it.device for it in of_kind(shown, Timeline)] == [GPU, GPU, CPU] and source.trace("main") is shown and asked == [1]
    _, content = asyncio.run(source.save_recording("main", ""))
    assert [it.device for it in of_kind(decode(content), Timeline)] == [CPU]
    session.shown = run_on(GPU, on())
    assert source.trace("main") is session.shown
