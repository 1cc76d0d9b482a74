"""Many rooms on one real engine, over real sockets: nothing of one room reaches another, and rooms come and go."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
import urllib.request
from urllib.parse import urlsplit

import pytest
from websockets.sync.client import connect

from benchmarks.browser import chromium, page
from engine.audience import Hosting, LiveSource, for_many, rooms_that_fit
from engine.config import CacheConfig, EngineConfig, ModelSource
from engine.errors import EngineError
from engine.recording import decode, encode
from engine.request import SamplingParams
from engine.session import Session
from engine.veil import HIDDEN, SENTENCE, veiled
from tests.app.test_page import until
from tests.viz.test_stage_support import make_trace, serve
from viz.registry import load_views
from viz.stage.codec import decode as decode_message
from viz.stage.hub import Hub
from viz.stage.limits import PUBLIC
from viz.stage.lobby import FIRST_PACE, Lobby, Shelf
from viz.stage.people import People, Times
from viz.words.caption import caption

ROOMS, IDLE = 3, 2.0
CANARY = "ZQXJ-canary-7731-KVWP"


@pytest.fixture(scope="module")
def session(tiny_llama):
    config = for_many(EngineConfig(ModelSource(str(tiny_llama), "cpu", "float32"), CacheConfig(num_pages=96)), ROOMS)
    found = Session(config, own_process=False).start().wait_ready(60)
    yield found
    found.close()


@pytest.fixture
def public(session, request):
    """(session, source, hub, address) of a public page over that engine; every room is closed afterwards."""
    idle = getattr(request, "param", 600.0)
    source = LiveSource(session, 0.5, Hosting(idle, 10 * idle))
    shelf = Shelf(decode, lambda name: make_trace(40) if name == "ragged" else None)
    hub = Hub(Lobby(source, shelf, public=True), load_views(), caption=caption)
    People(hub, PUBLIC, Times(tick=0.1))
    with serve(hub) as address:
        yield session, source, hub, address
    for room in list(source._rooms):
        source.close_room(room)


class Tab:
    """A tab without a browser: keeps every byte that it is sent, returns credits, answers commands."""

    def __init__(self, address: str, person: str = "", **hello) -> None:
        where = urlsplit(address)
        self.person, self.number = person or secrets.token_hex(18), 0
        self.bytes: list[bytes] = []
        self.replies: dict[int, dict] = {}
        self.known: dict[str, object] = {}
        self.moves: list[dict] = []
        self._open = contextlib.ExitStack()
        self.ws = self._open.enter_context(connect(f"ws://{where.netloc}{where.path}ws", max_size=None, close_timeout=0.2))
        self.say(t="hello", credit=2, person=self.person, panels=[{"view": "tokens", "w": 900, "h": 500}], **hello)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        until(lambda: "viewer" in self.known)

    def _read(self) -> None:
        try:
            for message in self.ws:
                self.bytes.append(message)
                header, _ = decode_message(message)
                kind = header["t"]
                if kind == "ping":
                    self.say(t="pong")
                elif kind == "frames":
                    self.known |= header
                    self.say(t="drawn")
                elif kind == "reply":
                    self.replies[header["id"]] = header["result"]
                elif kind == "moved":
                    self.moves.append(header)
                    self.known |= {"room": header["room"]}
                elif kind == "welcome":
                    self.known |= header
        except Exception:
            pass

    def say(self, **message) -> None:
        self.ws.send(json.dumps(message))

    def ask(self, name: str, /, **args) -> dict:
        self.number += 1
        number = self.number
        self.say(t="command", id=number, name=name, args=args)
        until(lambda: number in self.replies)
        return self.replies[number]

    def saw(self, text: str) -> bool:
        return any(text.encode() in message for message in tuple(self.bytes))

    @property
    def room(self) -> str:
        return str(self.known["room"])

    def close(self) -> None:
        self._open.close()

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.close()


def begin(tab: Tab, text: str = "hello", **args) -> dict:
    """A room of one's own, which stands where the visitor's first prompt put it."""
    reply = tab.ask("prompt", **{"text": text, "max_tokens": 40, "chat": False, **args})
    assert reply["ok"], reply
    until(lambda: not tab.room.startswith("~"))
    return reply


# ---- cross-talk ----


def test_nothing_of_one_room_reaches_another(public):
    _session, _source, hub, address = public
    with Tab(address) as a, Tab(address) as b, Tab(address) as lounge:
        begin(a, "a plain question")
        begin(b, CANARY)
        assert a.room != b.room
        for name in (CANARY + " once more", "and " + CANARY):
            b.ask("prompt", text=name, max_tokens=30, chat=False)
        b.say(t="view", state={"selection": CANARY + "-selection", "chapter": CANARY + "-chapter", "step": 3})
        b.ask("pace", value=3)
        b.ask("pause")
        views = list(load_views())
        for at in range(0, len(views), 2):
            for tab in (a, b, lounge):
                tab.say(t="view", panels=[{"view": v, "w": 900, "h": 500} for v in views[at : at + 2]])
            a.ask("prompt", text="another question", max_tokens=4, chat=False)
            time.sleep(0.4)
        until(lambda: b.saw(CANARY))  # the test can fail: its own room does get it
        assert not a.saw("canary") and not lounge.saw("canary")
        for secret in (b.person, b.room, hub.viewers[b.known["viewer"]].id):
            assert not a.saw(secret) and not lounge.saw(secret)
        assert a.known["status"]["state"] != "paused" and a.known["status"]["pace"] == FIRST_PACE and a.known["following"]
        assert b.known["status"]["state"] == "paused" and b.known["status"]["pace"] == 3
        mine = {chip["prompt"] for chip in a.known["chips"]["items"]}
        assert mine <= {"a plain question", "another question", *(line for line in mine if "canary" not in line)}
        for tab, has in ((a, False), (b, True)):
            content = urllib.request.urlopen(f"{address}recording?viewer={tab.known['viewer']}").read()
            prompts = [info.prompt for info in decode(content).sequences.values()]
            assert any(CANARY in prompt for prompt in prompts) == has


def test_one_room_cannot_end_or_hide_what_another_asked_for(public):
    _session, source, _hub, address = public
    with Tab(address) as a, Tab(address) as b:
        begin(a, "first")
        begin(b, "second")
        assert b.ask("pause")["ok"]
        request = b.ask("prompt", text="mine", max_tokens=200, chat=False)["request_id"]
        a.ask("abort", request_id=request)
        a.ask("abort", request_id=None)
        a.ask("people_hide", request_id=request)
        time.sleep(0.3)
        assert request in source.owned(b.room, b.person)
        assert any(info.prompt == "mine" for info in source.trace(b.room).sequences.values())


def test_each_room_computes_what_it_would_compute_alone(public):
    session, source, _hub, address = public
    texts = {"one": "Tell me about rain", "two": "Tell me about snow"}
    with Tab(address) as a, Tab(address) as b:
        for tab, text in ((a, texts["one"]), (b, texts["two"])):
            begin(tab, text, max_tokens=40, temperature=0.8, seed=5)
        found = {}
        for tab, text in ((a, texts["one"]), (b, texts["two"])):
            until(lambda tab=tab: source.status(tab.room)["state"] == "idle")
            trace = source.trace(tab.room)
            seq = next(i for i, info in trace.sequences.items() if info.prompt == text)
            found[text] = trace.tokens_of(seq)["token_id"].tolist()
    for text, tokens in found.items():
        alone = session.add(text, SamplingParams(40, temperature=0.8, seed=5))
        session.wait(alone.seq_ids)
        assert session.trace().tokens_of(alone.seq_ids[0])["token_id"].tolist() == tokens


# ---- rooms end ----


@pytest.mark.parametrize("public", [IDLE], indirect=True, ids=["short"])
def test_an_idle_room_ends_its_viewer_is_told_and_its_pages_go_back(public):
    session, source, _hub, address = public
    for _ in range(2):  # twice as many rooms as fit
        tabs = [Tab(address) for _ in range(ROOMS)]
        for tab in tabs:
            begin(tab, "hello", max_tokens=3)
        with Tab(address) as late:
            reply = late.ask("prompt", text="one too many", chat=False)
            assert reply["code"] == "no_room" and reply["sentence"].endswith(".")
            assert late.room.startswith("~") and late.known["status"]["state"] == "running"
        rooms = [tab.room for tab in tabs]
        assert len(set(rooms)) == ROOMS
        until(lambda: all(tab.moves and tab.room.startswith("~") for tab in tabs), 30)  # noqa: B023
        assert all("ended" in tab.moves[-1]["sentence"] for tab in tabs)
        assert set(session.rooms) == {"main"} and not source._rooms
        for tab in tabs:
            tab.close()


@pytest.mark.parametrize("public", [IDLE], indirect=True, ids=["short"])
def test_a_room_in_which_somebody_does_something_goes_on_and_an_empty_one_does_not(public):
    session, _source, _hub, address = public
    with Tab(address) as busy:
        begin(busy, "hello", max_tokens=3)
        with Tab(address) as gone:
            begin(gone, "hello", max_tokens=3)
            room = gone.room
        end = time.monotonic() + 2 * IDLE
        step = 0
        while time.monotonic() < end:
            step += 1
            busy.say(t="view", state={"step": step % 3})
            time.sleep(0.2)
        assert not busy.room.startswith("~") and busy.room in session.rooms
        until(lambda: room not in session.rooms)


@pytest.mark.parametrize("public", [IDLE], indirect=True, ids=["short"])
def test_a_room_that_computes_outlives_its_idle_minutes_while_somebody_looks(public):
    session, _source, _hub, address = public
    with Tab(address) as tab:
        begin(tab, "I am reloaded", max_tokens=256)
        tab.ask("pace", value=20)
        time.sleep(2 * IDLE)
        assert tab.room in session.rooms


def test_leaving_a_room_ends_its_requests_and_coming_back_finds_it(public):
    _session, source, _hub, address = public
    with Tab(address) as tab:
        begin(tab, "I am reloaded", max_tokens=256)
        tab.ask("pace", value=5)
        room, person = tab.room, tab.person
    until(lambda: source.status(room)["state"] == "idle")
    with Tab(address, person) as again:
        assert again.room == room and again.ask("pause")["ok"]


# ---- knobs ----


def test_engine_wide_knobs_are_greyed_and_refused_and_a_room_keeps_to_its_lease(public):
    _session, _source, _hub, address = public
    with Tab(address) as tab:
        begin(tab, "hello")
        until(lambda: tab.known["status"].get("knobs"))
        knobs = tab.known["status"]["knobs"]
        assert "same for all rooms" in knobs["page_size"]["why"] and "why" not in knobs["max_num_seqs"] and knobs["num_pages"]["max"] == 96
        assert tab.ask("knob", name="page_size", value=8)["code"] == "knob_fixed"
        for name in ("fused", "cuda_graphs"):
            assert "needs the Triton kernels" in knobs[name]["why"]
            assert tab.ask("knob", name=name, value=False)["code"] == "knob_needs_kernels"
        assert tab.ask("knob", name="num_pages", value=97)["code"] == "bad_config"
        assert tab.ask("knob", name="num_pages", value=64)["ok"] and tab.ask("knob", name="num_pages", value=96)["ok"]
        assert tab.ask("knob", name="max_num_seqs", value=3)["knobs"]["max_num_seqs"] == 3
        with Tab(address) as other:
            begin(other, "hello")
            until(lambda: other.known["status"].get("knobs"))
            assert other.known["status"]["knobs"]["max_num_seqs"]["value"] == 8


def test_a_knob_that_flushes_names_the_requests_first_and_changes_nothing(public):
    _session, source, _hub, address = public
    with Tab(address) as tab:
        begin(tab, "I am reloaded", max_tokens=256)
        tab.ask("pace", value=5)
        tab.ask("pause")
        until(lambda: tab.known["status"]["state"] == "paused" and tab.known["status"]["running"])
        dry = tab.ask("knob", name="mode", value="none", dry_run=True)
        assert dry["ok"] and dry["recompute"] == tab.known["status"]["running"]
        assert source._config(tab.room).cache.mode.value == "paged"
        assert tab.ask("knob", name="mode", value="paged", dry_run=True)["recompute"] == []
        assert tab.ask("knob", name="max_num_seqs", value=4, dry_run=True)["recompute"] == []
        assert tab.ask("knob", name="mode", value="nonsense", dry_run=True)["code"] == "bad_config"


def test_an_example_begins_with_knobs_of_its_own_and_only_with_those_that_may_be_turned(public):
    session, source, _hub, address = public
    with Tab(address) as tab:
        begin(tab, "hello")
        tab.ask("pause")
        assert tab.ask("preset", name="one", knobs={"mode": "none", "max_num_seqs": 3})["ok"]
        knobs = session.config_of(tab.room)
        assert (knobs.cache.mode.value, knobs.scheduler.max_num_seqs) == ("none", 3)
        before = len(source.trace(tab.room).sequences)
        for wrong, code in (
            ({"page_size": 8}, "knob_fixed"), ({"num_pages": 97}, "bad_config"), ({"speed": 1}, "unknown_knob"), ({"mode": [1]}, "bad_config"),
        ):  # fmt: skip
            assert tab.ask("preset", name="one", knobs=wrong)["code"] == code
        assert len(source.trace(tab.room).sequences) == before and session.config_of(tab.room) == knobs
        assert tab.ask("preset", name="one", knobs="x")["ok"]
        assert session.config_of(tab.room).cache.mode.value == "paged", "the next one begins as it is written"


# ---- hidden texts ----


def test_a_hidden_text_is_gone_for_everybody_and_from_recordings(public):
    _session, source, _hub, address = public
    with Tab(address) as host:
        request = begin(host, CANARY, max_tokens=20)["request_id"]
        links = host.known["people"]["links"] if "people" in host.known else {}
        until(lambda: host.saw(CANARY))
        until(lambda: "people" in host.known)
        links = host.known["people"]["links"]
        assert host.ask("people_hide", request_id=request)["ok"]
        with Tab(address, room=host.room, join=links["watch"]) as guest:
            for view in load_views():
                guest.say(t="view", panels=[{"view": view, "w": 900, "h": 500}])
                time.sleep(0.2)
            until(lambda: guest.saw(SENTENCE))
            assert not guest.saw(CANARY)
        content = urllib.request.urlopen(f"{address}recording?viewer={host.known['viewer']}").read()
        trace = decode(content)
        assert [info.prompt for info in trace.sequences.values() if info.request_id == request] == [SENTENCE]
        assert CANARY.encode() not in content
        assert host.ask("people_hide", request_id=request, on=False)["ok"]
        assert any(info.prompt == CANARY for info in source.trace(host.room).sequences.values())


def test_a_veil_hides_one_request_and_changes_nothing_else(session):
    handles = [session.add(text, SamplingParams(12, n=n)) for text, n in ((CANARY, 2), ("visible", 1))]
    session.wait([i for handle in handles for i in handle.seq_ids])
    trace = session.trace()
    hidden = veiled(trace, {handles[0].request_id})
    assert veiled(trace, set()) is trace and veiled(trace, {10**6}) is trace
    for seq in handles[0].seq_ids:
        assert set(hidden.tokens_of(seq)["token_id"]) == {HIDDEN} and hidden.token_text(HIDDEN) == "▒"
        assert set(hidden.text_of(seq)) == {"."} and len(hidden.tokens_of(seq)) == len(trace.tokens_of(seq))
        assert hidden.sequences[seq].num_prompt_tokens == trace.sequences[seq].num_prompt_tokens
    other = handles[1].seq_ids[0]
    assert hidden.text_of(other) == trace.text_of(other) and hidden.tokens_of(other).tobytes() == trace.tokens_of(other).tobytes()
    assert hidden.steps.tobytes() == trace.steps.tobytes() and hidden.works.tobytes() == trace.works.tobytes()
    assert CANARY.encode() not in encode(hidden) and len(decode(encode(hidden))) == len(trace)


# ---- the arena ----


def test_so_many_rooms_are_divided_from_one_arena():
    config = for_many(EngineConfig(cache=CacheConfig(num_pages=96)), 20)
    assert (config.cache.num_pages, config.cache.arena_pages, config.max_rooms) == (96, 96 * 22, 21)
    assert config.trace_bytes * 20 < 2**30 and 2 <= rooms_that_fit() <= 20


def test_a_source_without_hosting_has_the_one_room(session):
    source = LiveSource(session)
    assert source.is_open("main") and not source.is_open("other")
    with pytest.raises(EngineError, match="no room"):
        source.viewer_joined("other", "x" * 20)


# ---- in the browser ----


@pytest.mark.skipif(chromium() is None, reason="needs Chromium")
def test_a_visitor_opens_a_room_hands_out_a_link_and_his_guest_follows_and_is_removed(public):
    _session, _source, _hub, address = public
    with page(address) as host:
        host.problems, bars = [], heights(host)
        host.on("pageerror", lambda error: host.problems.append(str(error)))
        host.locator(".glass-input").fill("hello there")
        host.keyboard.press("Enter")
        host.wait_for_function("glass.stage.people.said && glass.stage.people.said.role === 'host'")
        host.wait_for_function("location.search.includes('join=') && location.search.includes('room=')")
        assert heights(host) == bars and bars[0] == 36
        host.get_by_role("button", name="People").click()
        assert host.locator(".glass-people-dialog").is_visible()
        link = host.evaluate("glass.stage.people.address(glass.stage.people.said.links.prompt)")
        host.locator(".glass-people-dialog .glass-primary").click()
        guest = host.context.browser.new_page(viewport={"width": 1280, "height": 720})
        guest.on("pageerror", lambda error: host.problems.append(str(error)))
        guest.goto(link)
        guest.wait_for_function("glass.stage.people.said && glass.stage.people.said.role === 'guest'")
        assert guest.locator(".glass-play").is_disabled() and "host" in guest.locator(".glass-play").get_attribute("title")
        assert guest.locator(".glass-pace").is_disabled() and guest.locator(".glass-input").is_enabled()
        assert "Following" in guest.locator(".glass-follow").text_content() and heights(guest) == bars
        host.evaluate("glass.stage.command('pause')")
        until(lambda: (host.evaluate("glass.stage.at.last") or 0) > 5)
        host.evaluate("glass.stage.setState({ step: 2, views: ['batching'] }); glass.stage.arrange()")
        guest.wait_for_function("glass.stage.at.step === 2 && glass.stage.state.views.join() === 'batching'")
        guest.evaluate("glass.stage.seek(4)")
        guest.wait_for_function("glass.stage.at.step === 4")
        until(lambda: "F: follow" in guest.locator(".glass-follow").text_content())
        host.evaluate("glass.stage.seek(3)")
        guest.wait_for_timeout(600)
        assert guest.evaluate("glass.stage.at.step") == 4
        guest.locator("body").press("f")
        guest.wait_for_function("glass.stage.at.step === 3")
        guest.locator(".glass-input").fill("from a guest")
        guest.locator(".glass-input").press("Enter")
        guest.wait_for_function("document.querySelector('.glass-notice:not([hidden]) span')?.textContent.includes('the host has paused')")
        host.reload()
        host.wait_for_function("glass.stage.people.said && glass.stage.people.said.role === 'host'")
        host.get_by_role("button", name="People").click()
        host.locator(".glass-guests").get_by_role("button", name="Remove").click()
        guest.wait_for_function(
            "glass.stage.intro && document.querySelector('.glass-notice:not([hidden]) span')?.textContent.includes('removed')"
        )
        guest.wait_for_function("!location.search.includes('join=') && !location.search.includes('room=')")
        assert host.problems == []


def heights(opened) -> list[int]:
    return opened.evaluate(
        "['.glass-header', '.glass-prompt'].map((s) => Math.round(document.querySelector(s).getBoundingClientRect().height))"
    )
