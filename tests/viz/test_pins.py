"""Links: an address says where somebody looks, and a pinned moment keeps the picture that its maker saw."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest

from app import RECORDINGS
from engine.recording import clip, decode, encode, load
from engine.trace import TABLES, TensorSample, Trace
from tests.viz import scenarios
from tests.viz.test_stage_hub import Browser, setup
from tests.viz.test_stage_support import HandSource
from viz.registry import load_views
from viz.stage.chips import chips
from viz.stage.composer import draw
from viz.stage.hub import Refused
from viz.stage.lobby import Lobby, Shelf
from viz.stage.people import People
from viz.stage.pins import PinConfig, Pins, offer_links
from viz.stage.viewer import _CHECKS
from viz.view import QUERY_KEYS, ViewState
from viz.words.caption import caption

VIEWS = load_views()
STATES = (
    ViewState(),
    ViewState("ragged", "paging", 3, ("blocks", "mask"), 42, "token:3:12", 2, 5, (0.25, 1.5, -2.0, 1e-05), "projector", "ja", axis="time"),
    ViewState(source="x" * 22, step=0, selection="ü & <b>?#%", ranges=(0.0,) * 8, views=("a", "b", "c"), theme="dark"),
)
WRONG = [
    "",
    "x",
    "../x",
    "../../etc/passwd",
    "..%2f",
    "/etc/passwd",
    "a" * 22,
    "a" * 10_000,
    "é" * 22,
    "\u0661" * 22,
    "\ud800",
    "\0" * 22,
    "~main",
    "main",
]


def pins_of(**config) -> Pins:
    return Pins(encode, decode, clip, PinConfig(**config))


# ---- addresses ----


@pytest.mark.parametrize("state", STATES)
def test_a_state_comes_back_from_its_query(state):
    assert ViewState.from_query(state.to_query()) == state


def test_every_field_has_a_key_and_a_check_and_the_recording_is_called_rec():
    fields = {f.name for f in dataclasses.fields(ViewState)} - {"size"}
    assert {key.field for key in QUERY_KEYS} == fields == {*_CHECKS, "views"}
    assert len({key.key for key in QUERY_KEYS}) == len(QUERY_KEYS)
    assert ViewState(source="abc").to_query() == "rec=abc"


@pytest.mark.parametrize(
    "query",
    [
        "step=-1",
        "step=1e3",
        "step=" + "9" * 400,
        "step=٣",
        "ranges=1,nan",
        "ranges=,",
        "ranges=inf",
        "theme=x",
        "axis=",
        "beat=1.5",
        "=&&;=",
        "%ff=%ff",
    ],
)
def test_what_cannot_be_read_is_ignored(query):
    assert ViewState.from_query(query) == ViewState()


# ---- keeping ----


def pictures(trace: Trace, step: int, selection: str | None) -> list:
    """What a viewer sees of a step, without the badges that say where it comes from."""
    found = []
    for view in VIEWS.values():
        panel = draw(view, trace, ViewState(step=step, selection=selection, size=(760, 520)))
        figure = re.sub(r'"badges":\[.*?\],"axes"', '"axes"', panel.figure)
        found.append((view.name, figure, panel.items, panel.arrays_digest))
    return [*found, caption(trace, step, "en"), chips(trace, step, selection)]


TRACES = {"long": scenarios.long, "preempted": scenarios.preempted, "crowded": scenarios.crowded, "broken": scenarios.broken}


@pytest.mark.parametrize("name", TRACES)
def test_a_pinned_step_shows_what_the_run_showed(name):
    trace, pins = TRACES[name](), pins_of()
    for step in (1, len(trace) // 3, len(trace) // 2, trace.last_step):
        step = trace.clamp(step)
        for selection in (None, f"seq:{trace.step(step).works['seq_id'][0]}" if len(trace.step(step).works) else None):
            back, state = pins.find(pins.keep(trace, step, {"step": step}))
            assert state == {"step": step} and back.meta["source"] == "recording"
            assert pictures(back, step, selection) == pictures(trace, step, selection)


def test_only_what_lies_around_is_kept_of_a_long_run_and_colours_stay():
    trace, step = scenarios.long(), 250
    pins = pins_of(look_back=(100,))
    back, _ = pins.find(pins.keep(trace, step, {}))
    assert (back.first_step, back.last_step) == (100, 300)
    assert chips(back, step)["items"][:4] == chips(trace, step)["items"][:4]
    assert dict(back.pool_at(step).tables) == dict(trace.pool_at(step).tables) and back.computed_at(step) == trace.computed_at(step)
    for view in ("blocks", "mask", "tokens"):
        assert draw(VIEWS[view], back, ViewState(step=step)).arrays_digest == draw(VIEWS[view], trace, ViewState(step=step)).arrays_digest


def test_probed_arrays_travel_while_they_are_small():
    trace, rng = scenarios.one_step(), np.random.default_rng(0)
    step = trace.last_step
    with_sample = lambda n: Trace(  # noqa: E731
        {name: getattr(trace, name) for name in TABLES}, trace.sequences, trace.token_texts, trace.meta,
        (TensorSample(step, "q", 0, rng.standard_normal(n, np.float32)),),
    )  # fmt: skip
    pins = pins_of(max_bytes=100_000)
    assert len(pins.find(pins.keep(with_sample(1000), step, {}))[0].artifacts) == 1
    assert pins.find(pins.keep(with_sample(200_000), step, {}))[0].artifacts == ()
    with pytest.raises(Refused, match="too large"):
        pins_of(max_bytes=10).keep(trace, step, {})


def test_the_pin_that_was_used_longest_ago_goes_first_and_bytes_are_bounded():
    trace, pins = scenarios.preempted(), pins_of(most=3)
    names = [pins.keep(trace, step, {"step": step}) for step in (1, 2, 3)]
    assert pins.keep(trace, 2, {"step": 2}) == names[1] and len(pins) == 3, "the same moment is kept once"
    pins.find(names[0])
    newest = pins.keep(trace, 4, {"step": 4})
    assert [name in pins for name in (*names, newest)] == [True, True, False, True] and pins.find(names[2]) is None
    assert 0 < pins.num_bytes <= 3 * pins.config.max_bytes
    assert len({*names, newest}) == 4 and all(re.fullmatch(r"[\w-]{22}", name) for name in names)


@pytest.mark.parametrize("name", [*WRONG, None, 5, [], {}])
def test_a_crafted_name_opens_nothing(name, monkeypatch):
    monkeypatch.setattr("builtins.open", pytest.fail)
    pins = pins_of()
    pins.keep(scenarios.one_step(), 0, {})
    assert pins.find(name) is None


def test_one_person_may_make_so_many_links_a_minute():
    now = [0.0]
    pins = Pins(encode, decode, clip, PinConfig(per_minute=2, all_per_minute=5), clock=lambda: now[0])
    for person in ("a", "a", "b", "b"):
        pins.allow(person)
    with pytest.raises(Refused, match="minute"):
        pins.allow("a")
    pins.allow("c")
    with pytest.raises(Refused):
        pins.allow("d")
    now[0] = 61.0
    pins.allow("a")


# ---- a hub with links ----


def stage_with(source=None, **config):
    stage = setup(source)
    pins = pins_of(**config)
    offer_links(stage.hub, pins)
    return SimpleNamespace(pins=pins, **vars(stage))


def ask(browser: Browser, number: int, **args) -> dict:
    browser.say(t="command", id=number, name="pin", args=args)
    reply = browser.take("reply")
    assert reply["id"] == number
    return reply["result"]


def test_a_viewer_pins_the_step_that_it_sees():
    stage = stage_with(per_minute=3)
    with stage.client.websocket_connect("/glass/ws") as ws:
        browser = Browser(ws)
        assert "link" in browser.welcome["offers"]
        reply = ask(browser, 1, step=20, state={"selection": "seq:1", "views": ["blocks"], "theme": "dark", "step": "x", "evil": 1})
        trace, state = stage.pins.find(reply["rec"])
        assert reply["ok"] and reply["step"] == 20 and trace.last_step == 60
        assert (
            (state["step"], state["selection"], state["views"]) == (20, "seq:1", ("blocks",))
            and "evil" not in state
            and "size" not in state
        )
        for number, step in enumerate((2**60, -4, "../x"), 2):
            reply = ask(browser, number, step=step)
            assert reply.get("step") == 60 or reply["code"] == "pins_busy"
        assert ask(browser, 9)["code"] == "pins_busy"


class Hides(HandSource):
    def hide(self, room, requests):
        pass


def test_a_link_to_a_text_that_the_host_hides_leads_nowhere_any_more():
    stage = stage_with(Hides())
    People(stage.hub)
    with stage.client.websocket_connect("/glass/ws") as ws:
        browser = Browser(ws)
        trace = stage.source.trace("main")
        shown = int(trace.step(20).works["seq_id"][0])
        names = [ask(browser, 1, step=20)["rec"], stage.pins.keep(trace, 20, {}, "other")]
        for number, (request, on) in enumerate(((999, True), (trace.sequences[shown].request_id, False)), 2):
            browser.say(t="command", id=number, name="people_hide", args={"request_id": request, "on": on})
            browser.take("reply")
            assert all(name in stage.pins for name in names), "no text of theirs was hidden"
        browser.say(t="command", id=9, name="people_hide", args={"request_id": trace.sequences[shown].request_id})
        assert browser.take("reply")["result"]["ok"]
        assert [stage.pins.find(name) is None for name in names] == [True, False], "another room's request has the same number"


def land(lobby: Lobby, **said) -> object:
    async def run():
        landing = await lobby.land("place", "person", said)
        lobby.viewer_joined(landing.room, "person")
        return landing

    return asyncio.run(run())


class Live(HandSource):
    def is_open(self, room):
        return room == "main"


def test_a_link_leads_to_its_moment_and_a_shipped_recording_needs_no_pin():
    pins, trace = pins_of(), scenarios.preempted()
    shipped = {"ragged": load(RECORDINGS / "ragged-h200.glass")}.get
    lobby = Lobby(Live(), Shelf(decode, shipped, pins))
    name = pins.keep(trace, 5, {"step": 5, "selection": "seq:1"})
    landing = land(lobby, rec=name)
    assert landing.state == {"step": 5, "selection": "seq:1"} and landing.room == "~place"
    assert lobby.status(landing.room)["state"] == "paused" and lobby.trace(landing.room).last_step == min(55, trace.last_step)
    assert lobby.link_of(landing.room) == name
    landing = land(lobby, rec="ragged")
    assert landing.room == "~place" and lobby.link_of(landing.room) == "ragged" and lobby.status(landing.room)["live"] is False


@pytest.mark.parametrize("name", WRONG[1:])
def test_an_expired_or_crafted_link_gives_a_sentence_and_names_its_chapter(name, monkeypatch):
    lobby = Lobby(Live(), Shelf(decode, lambda preset: None, pins_of()))
    landing = land(lobby, rec=name, chapter="paging")
    assert landing.room == "main" and "expired" in landing.sentence and landing.problem["code"] == "link_expired"
    assert landing.state == {"expired": True, "chapter": "paging"}
    assert land(lobby, rec=name, chapter=["x"]).state["chapter"] == ""
