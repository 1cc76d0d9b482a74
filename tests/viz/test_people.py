"""Roles, links, following, removal, locks and limits, over real sockets: the tests talk to the hub as any program could."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from engine.trace import Trace
from tests.viz.test_stage_hub import Browser, wait_for
from tests.viz.test_stage_support import VIEWS, HandSource, caption, make_trace
from viz.stage.hub import Hub, HubConfig, Refused
from viz.stage.limits import PUBLIC, Limits, Meter
from viz.stage.lobby import Lobby, Shelf
from viz.stage.names import fresh_room_name, person_name
from viz.stage.people import FOR_GUESTS, NO_LIMITS, People, Times
from viz.stage.routes import address_of, routes
from viz.stage.viewer import room_name
from viz.view import OFFERED_JOBS

COMMANDS = (
    "prompt", "preset", "abort", "play", "pause", "step", "pace", "knob", "restart", "probe", "seek", "live", "chapter", "beat", "chapter_end",
    "chapter_try", "compare", "job", "guess", "pin", "export", "people_remove", "people_lock", "people_hide", "people_offer", "people_accept",
    "people_claim", "whatever", "",
)  # fmt: skip


class ManySource(HandSource):
    """Rooms that open and close; who asked for what, where."""

    def __init__(self, rooms=("main",)) -> None:
        super().__init__()
        self.rooms, self.closed, self.hidden, self.alive = set(rooms), set(), {}, {}
        self.said: list[tuple[str, str, str]] = []
        self.numbers = 0

    def is_open(self, room: str) -> bool:
        return room in self.rooms

    def open_room(self, room: str) -> None:
        self.rooms.add(room)

    def status(self, room: str) -> dict:
        if room in self.closed:
            return {"state": "closed", "live": True, "sentence": "This room has ended."}
        return super().status(room)

    def owned(self, room: str, viewer: str) -> set[int]:
        return self.alive.get((room, viewer), set())

    def hide(self, room: str, requests) -> None:
        self.hidden[room] = set(requests)

    async def command(self, room, viewer, name, args):
        self.said.append((room, viewer, name))
        if name == "prompt":
            await asyncio.sleep(0.02)
            self.numbers += 1
            self.alive.setdefault((room, viewer), set()).add(self.numbers)
            return {"ok": True, "name": "F", "request_id": self.numbers, "queued": self.state == "paused"}
        if name == "guess":
            return {"ok": True, "guessed": args.get("mark")}
        return await super().command(room, viewer, name, args)


class Person(Browser):
    """A tab that can be closed and opened again."""

    def __init__(self, ws, person: str = "", **hello) -> None:
        self.person, self.number, self.now = person or secrets.token_hex(18), 0, {}
        super().__init__(ws, person=self.person, **hello)

    def ask(self, name: str, /, **args) -> dict:
        self.number += 1
        self.say(t="command", id=self.number, name=name, args=args)
        while (reply := self.take("reply"))["id"] != self.number:
            pass
        return reply["result"]

    def take(self, kind: str) -> dict:
        while True:
            found = super().take("frames") if kind == "frames" else self._any(kind)
            self.now |= {k: v for k, v in found.items() if k in ("people", "status", "caption")}
            return found

    def _any(self, kind: str) -> dict:
        from viz.stage import codec

        while True:
            header, arrays = codec.decode(self.ws.receive_bytes())
            self.now |= {k: v for k, v in header.items() if k in ("people", "status", "caption")}
            if header["t"] == "frames":
                self.drawn()
            if header["t"] == kind:
                return header | {"data": arrays}

    def until(self, condition) -> dict:
        """What people of the room know, once it is so."""
        for _ in range(50):
            if self.now.get("people") is not None and condition(self.now["people"]):
                return self.now["people"]
            self.take("frames")
            self.drawn()
        raise AssertionError(f"it never became so: {self.now.get('people')}")


QUICK = Times(tick=0.05)


@pytest.fixture
def stage():
    def build(source=None, *, public=False, limits: Limits = NO_LIMITS, times: Times = QUICK, shipped=True, **config):
        source = source or ManySource(() if public else ("main",))
        shelf = Shelf(lambda content: Trace(), lambda name: make_trace(40) if shipped and name == "ragged" else None)
        lobby = Lobby(source, shelf, public=public)
        hub = Hub(lobby, VIEWS, caption=caption, config=HubConfig(max_fps=120, **config))
        people = People(hub, limits, times)
        client = TestClient(Starlette(routes=routes(hub)))
        made.append(client)
        client.__enter__()  # one event loop for all sockets of a test
        return SimpleNamespace(
            source=source, lobby=lobby, hub=hub, people=people, client=client, open=lambda: client.websocket_connect("/glass/ws")
        )

    made: list[TestClient] = []
    yield build
    for client in made:
        client.__exit__(None, None, None)


def host_and_guest(made, host_ws, guest_ws, link: str = "prompt"):
    host = Person(host_ws)
    known = host.until(lambda p: p["links"])
    guest = Person(guest_ws, room=known["room"], join=known["links"][link])
    guest.until(lambda p: p["role"] != "host")
    return host, guest


# ---- names ----


def test_names_are_readable_and_nobody_is_called_like_somebody_else():
    taken: set[str] = set()
    for _ in range(200):
        taken.add(person_name(taken))
    assert len(taken) == 200
    assert all(room_name(fresh_room_name(), "") for _ in range(50))


# ---- roles ----


def test_on_a_laptop_who_comes_without_a_link_is_a_host(stage):
    made = stage()
    with made.open() as a, made.open() as b:
        first, second = Person(a), Person(b)
        assert first.until(lambda p: p["count"] == 2)["everyone_hosts"]
        assert second.until(lambda p: True)["role"] == "host"
        assert second.ask("play")["ok"] and first.ask("pause")["ok"]


@pytest.mark.parametrize("link", ["prompt", "watch"])
def test_a_guest_may_do_nothing_that_only_the_host_may(stage, link):
    made = stage()
    with made.open() as a, made.open() as b:
        host, guest = host_and_guest(made, a, b, link)
        for name in (*COMMANDS, *OFFERED_JOBS):
            if name in FOR_GUESTS:
                continue
            before = len(made.source.said)
            reply = guest.ask(name, request_id=None, guest="g1", on=True, value=1, name="x", n=1)
            code = "only_offered" if name in OFFERED_JOBS else "host_only"  # the former is nobody's to say, also not the host's
            assert not reply["ok"] and reply["code"] == code and reply["sentence"].endswith("."), name
            assert len(made.source.said) == before, name
        assert guest.ask("guess", mark="page:1")["guessed"] == "page:1"  # a vote
        assert not guest.ask("people_accept")["ok"]
        assert host.ask("step", n=1)["ok"]


def test_only_the_prompt_link_lets_a_guest_prompt_and_two_at_a_time(stage):
    made = stage()
    with made.open() as a, made.open() as b, made.open() as c:
        host, guest = host_and_guest(made, a, b)
        watcher = Person(c, room="main", join=host.now["people"]["links"]["watch"])
        assert watcher.ask("prompt", text="hello")["code"] == "watch_only"
        for number in range(4):  # all at once
            guest.say(t="command", id=900 + number, name="prompt", args={"text": "hello"})
        replies = [guest.take("reply")["result"] for _ in range(4)]
        assert sorted(r["ok"] for r in replies) == [False, False, True, True]
        assert {r["code"] for r in replies if not r["ok"]} == {"two_alive"}
        mine = next(r["request_id"] for r in replies if r["ok"])
        theirs = host.ask("prompt", text="mine")["request_id"]
        assert guest.ask("abort", request_id=theirs)["code"] == "not_yours"
        assert guest.ask("abort", request_id=None)["code"] == "not_yours"
        assert guest.ask("abort", request_id=[theirs])["code"] in ("not_yours", "bug")
        assert guest.ask("abort", request_id=mine)["ok"]
        made.source.alive[("main", guest.person)].clear()
        assert guest.ask("prompt", text="again")["ok"]


def test_a_guests_prompt_in_a_paused_room_says_that_it_is_queued(stage):
    made = stage()
    with made.open() as a, made.open() as b:
        host, guest = host_and_guest(made, a, b)
        made.source.state = "paused"
        assert guest.ask("prompt", text="hello")["sentence"] == "Queued as F; the host has paused."
        assert "sentence" not in host.ask("prompt", text="hello")


def test_links_differ_and_nobody_is_told_what_opens_more_than_he_may(stage):
    made = stage()
    with made.open() as a, made.open() as b, made.open() as c:
        host, guest = host_and_guest(made, a, b)
        links = host.now["people"]["links"]
        assert links["prompt"] != links["watch"] and min(map(len, links.values())) >= 20
        watcher = Person(c, room="main", join=links["watch"])
        watcher.until(lambda p: p["role"] == "watcher")
        said = json.dumps([watcher.now["people"], watcher.welcome | {"data": 0}])
        assert links["prompt"] not in said and host.person not in said and guest.person not in said
        assert "links" not in guest.now["people"] and guest.now["people"]["join"] == links["prompt"]


@pytest.mark.parametrize("token", ["", "x", "x" * 24, "prompt", None, 7, ["a"], {"a": 1}, "../..", "é" * 24, "A" * 10_000])
@pytest.mark.parametrize("room", ["main", "", "~main", "other", "../main", "a" * 500, None, 7, ["main"], "main\0", "<b>", "MAIN"])
def test_hostile_rooms_and_tokens_open_nothing(stage, room, token):
    made = stage(public=True)
    made.source.rooms.add("secret-room-1")
    made.lobby._openers["secret-room-1"] = "p" * 24
    with made.open() as a:
        person = Person(a, room=room, join=token)
        assert person.welcome["room"].startswith("~")
    with made.open() as a:
        person = Person(a, room="secret-room-1", join=token)
        assert person.welcome["room"].startswith("~") and "link" in person.welcome["sentence"]
        assert set(made.people.homes["secret-room-1"].members) == {"p" * 24}


# ---- a room of one's own ----


def test_a_visitor_of_a_public_page_gets_a_room_with_his_first_prompt_and_is_its_host(stage):
    made = stage(public=True)
    with made.open() as a, made.open() as b, made.open() as c:
        visitor, other = Person(a), Person(b)
        assert visitor.welcome["room"].startswith("~") and made.source.rooms == set()
        assert visitor.ask("play")["ok"]  # a recording of his own
        visitor.say(t="command", id=77, name="prompt", args={"text": "hello"})
        room = visitor.take("moved")["room"]
        assert made.source.rooms == {room}
        assert visitor.until(lambda p: True)["role"] == "host"
        links = visitor.now["people"]["links"]
        assert visitor.now["people"]["join"] == links["watch"]  # his address bar invites to watch, no more
        guest = Person(c, room=room, join=links["prompt"])
        assert guest.until(lambda p: True)["role"] == "guest" and guest.ask("pause")["code"] == "host_only"
        other.say(t="command", id=78, name="preset", args={"name": "ragged"})
        assert other.take("moved")["room"] not in (room, "main") and len(made.source.rooms) == 2


def test_a_reload_keeps_the_host_and_a_copied_address_does_not_make_one(stage):
    made = stage(public=True)
    with made.open() as a:
        host = Person(a)
        host.say(t="command", id=77, name="prompt", args={"text": "hello"})
        room = host.take("moved")["room"]
        join = host.until(lambda p: True)["join"]
    with made.open() as a, made.open() as b, made.open() as c:
        again = Person(a, host.person, room=room, join=join)
        assert again.welcome["room"] == room and again.until(lambda p: True)["role"] == "host"
        assert again.ask("pause")["ok"]
        copied = Person(b, room=room, join=join)
        assert copied.until(lambda p: True)["role"] == "watcher"
        assert Person(c, room=room).welcome["room"].startswith("~")
    with made.open() as a:
        assert Person(a, host.person).welcome["room"] == room, "also without its address"


def test_a_room_that_has_ended_is_left_with_a_sentence_and_the_next_prompt_opens_another(stage):
    made = stage(public=True)
    with made.open() as a:
        host = Person(a)
        host.say(t="command", id=77, name="prompt", args={"text": "hello"})
        room = host.take("moved")["room"]
        made.source.rooms.discard(room)
        made.source.closed.add(room)
        moved = host.take("moved")
        assert moved["room"].startswith("~") and moved["sentence"] == "This room has ended."
        host.say(t="command", id=78, name="prompt", args={"text": "hello"})
        assert host.take("moved")["room"] not in (room, "main")


def test_when_no_room_is_left_a_sentence_says_so_and_the_recording_goes_on(stage):
    made = stage(public=True)

    def full(room):
        raise Refused("no_room", "All rooms are taken just now.")

    made.source.open_room = full
    with made.open() as a:
        visitor = Person(a)
        assert visitor.ask("prompt", text="hello")["code"] == "no_room"
        assert visitor.ask("prompt", text="hello")["sentence"] == "All rooms are taken just now."
        frames = visitor.take("frames")
        assert frames.get("status", visitor.now["status"])["state"] in ("running", "paused") and made.lobby._homes == {}
        assert made.lobby._openers == {}


# ---- moderation ----


def test_a_removed_guest_is_outside_and_stays_there(stage):
    made = stage()
    with made.open() as a, made.open() as b, made.open() as c, made.open() as d:
        host, guest = host_and_guest(made, a, b)
        link = host.now["people"]["links"]["prompt"]
        running = guest.ask("prompt", text="hello")["request_id"]
        key = next(p["id"] for p in host.until(lambda p: p["count"] == 2)["people"] if not p["me"])
        assert host.ask("people_remove", guest=key)["ok"]
        moved = guest.take("moved")
        assert moved["room"].startswith("~") and "removed" in moved["sentence"]
        assert ("main", guest.person, "abort") in made.source.said and running
        assert guest.ask("prompt", text="again")["code"] == "removed"
        back = Person(c, guest.person, room="main", join=link)
        assert back.welcome["room"].startswith("~") and "removed" in back.welcome["sentence"]
        assert back.welcome["problem"]["code"] == "removed"
        claims_to_be_new = Person(d, room="main", join=link)
        claims_to_be_new.until(lambda p: True)
        assert claims_to_be_new.now["people"]["role"] != "guest", "the link that he has is dead"
        assert host.until(lambda p: p["links"]["prompt"] != link)
        assert host.ask("people_remove", guest="g999")["code"] == "unknown_guest"


def test_locks_stop_prompts_and_newcomers_but_not_who_is_there(stage):
    made = stage()
    with made.open() as a, made.open() as b, made.open() as c:
        host, guest = host_and_guest(made, a, b)
        assert host.ask("people_lock", prompts=True)["door"] is False
        assert guest.ask("prompt", text="hello")["code"] == "prompts_locked"
        assert host.ask("people_lock", door=True, prompts=False) == {"ok": True, "prompts": False, "door": True}
        late = Person(c, room="main", join=host.now["people"]["links"]["prompt"])
        assert late.welcome["room"].startswith("~") and "newcomers" in late.welcome["sentence"]
        assert guest.ask("prompt", text="hello")["ok"]
    with made.open() as a, made.open() as b:
        Person(a, host.person)
        assert Person(b, guest.person, room="main").welcome["room"] == "main", "a reload is no newcomer"


def test_a_hidden_text_is_the_sources_to_hide(stage):
    made = stage()
    with made.open() as a:
        host = Person(a)
        assert host.ask("people_hide", request_id=3)["ok"] and made.source.hidden == {"main": {3}}
        assert host.until(lambda p: p["hidden"] == [3])
        assert host.ask("people_hide", request_id=3, on=False)["ok"] and made.source.hidden == {"main": set()}
        assert not host.ask("people_hide", request_id="3")["ok"]


def test_a_claimed_room_has_one_host_and_newcomers_without_a_link_watch(stage):
    made = stage()
    with made.open() as a, made.open() as b, made.open() as c:
        first, second = Person(a), Person(b)
        assert first.ask("people_claim")["ok"]
        assert second.ask("pause")["code"] == "host_only" and second.ask("prompt", text="still")["ok"]
        third = Person(c)
        assert third.until(lambda p: True)["role"] == "watcher" and third.ask("people_claim")["code"] == "host_only"
        assert first.ask("people_claim")["code"] == "has_host"


# ---- following ----


def test_a_guest_follows_the_host_until_he_scrubs_and_again_with_f(stage):
    made = stage()
    with made.open() as a, made.open() as b:
        host, guest = host_and_guest(made, a, b)
        host.say(t="view", state={"step": 20, "selection": "seq:1", "views": ["blocks"], "chapter": "paged"})
        people = guest.until(lambda p: p["lead"] and p["lead"]["step"] == 20)
        assert people["following"] and people["lead"]["views"] == ["blocks"] and people["lead"]["chapter"] == "paged"
        viewer = next(v for v in made.hub.viewers.values() if v.person == guest.person)
        assert (viewer.state.step, viewer.state.selection) == (20, "seq:1")
        guest.say(t="view", state={"step": 3, "theme": "dark"}, follow=True)  # a resize; its own step is not asked for
        guest.drawn()
        assert wait_for(lambda: viewer.state.theme == "dark" and viewer.state.step == 20)
        guest.say(t="view", state={"step": 7}, follow=False)
        assert wait_for(lambda: viewer.state.step == 7)
        host.say(t="view", state={"step": 30})
        assert not guest.until(lambda p: not p["following"])["lead"]
        assert wait_for(lambda: made.people.homes["main"].lead.step == 30) and viewer.state.step == 7
        guest.say(t="view", state={"step": 7}, follow=True)
        assert guest.until(lambda p: p["lead"] and p["lead"]["step"] == 30) and viewer.state.step == 30
        host.say(t="view", state={"step": 31, "views": ["batching"]})
        assert guest.until(lambda p: p["lead"]["step"] == 31)


def test_the_host_follows_nobody_and_a_guests_view_moves_nobody_else(stage):
    made = stage()
    with made.open() as a, made.open() as b:
        host, guest = host_and_guest(made, a, b)
        guest.say(t="view", state={"step": 5, "selection": "seq:2"}, follow=False)
        viewers = {v.person: v for v in made.hub.viewers.values()}
        assert wait_for(lambda: viewers[guest.person].state.step == 5)
        assert viewers[host.person].state.step is None and host.now["people"]["lead"] is None


# ---- the host is away ----


def test_a_host_who_is_away_pauses_the_room_and_the_oldest_guest_may_take_over(stage):
    made = stage(times=Times(pause_after=0.3, offer_after=0.6, tick=0.05))
    made.source.state = "running"
    with made.open() as b, made.open() as c:
        with made.open() as a:
            host, guest = host_and_guest(made, a, b)
            younger = Person(c, room="main", join=host.now["people"]["links"]["prompt"])
            younger.until(lambda p: p["count"] == 3)
        guest.until(lambda p: p["away"])
        assert made.source.state == "paused" and ("main", "", "pause") in made.source.said
        assert younger.ask("people_accept")["code"] == "not_offered"
        guest.until(lambda p: p["offered"])
        assert guest.ask("people_accept")["ok"] and guest.until(lambda p: p["role"] == "host")["links"]
        assert guest.ask("play")["ok"] and younger.ask("pause")["code"] == "host_only"
        with made.open() as a:
            assert Person(a, host.person, room="main").until(lambda p: True)["role"] == "guest", "he gave it away by staying out"


def test_a_host_who_comes_back_in_time_keeps_the_role(stage):
    made = stage(times=Times(pause_after=0.2, offer_after=0.3, tick=0.05))
    with made.open() as b:
        with made.open() as a:
            host, guest = host_and_guest(made, a, b)
        guest.until(lambda p: p["offered"])
        with made.open() as a:
            back = Person(a, host.person, room="main")
            assert back.until(lambda p: True)["role"] == "host"
            guest.until(lambda p: not p["offered"] and not p["away"])
            assert guest.ask("people_accept")["code"] == "not_offered"


def test_a_host_may_hand_the_role_over(stage):
    made = stage()
    with made.open() as a, made.open() as b:
        host, guest = host_and_guest(made, a, b)
        key = next(p["id"] for p in host.until(lambda p: p["count"] == 2)["people"] if not p["me"])
        assert host.ask("people_offer", guest=key)["ok"]
        guest.until(lambda p: p["offered"])
        assert guest.ask("people_accept")["ok"] and host.until(lambda p: p["role"] == "guest")
        assert host.ask("pause")["code"] == "host_only" and host.ask("prompt", text="as a guest")["ok"]


# ---- limits ----


def test_limits_refuse_with_numbers():
    now = [0.0]
    meter = Meter(PUBLIC, lambda: now[0])
    for args, code in (
        ({"text": "x" * 4001}, "prompt_capped"),
        ({"text": "a", "max_tokens": 257}, "sampling_capped"),
        ({"text": "a", "n": 5}, "sampling_capped"),
    ):
        with pytest.raises(Refused) as refused:
            meter.check("p", "prompt", args)
        assert refused.value.code == code and refused.value.fields["limit"]
    for _ in range(PUBLIC.prompts_per_minute):
        meter.check("p", "prompt", {"text": "a", "max_tokens": 256})
    with pytest.raises(Refused, match="seconds"):
        meter.check("p", "prompt", {"text": "a"})
    meter.check("q", "prompt", {"text": "a"})
    now[0] = 61.0
    meter.check("p", "prompt", {"text": "a"})
    for _ in range(PUBLIC.jobs_per_minute):
        meter.check("p", "probe", {})
    with pytest.raises(Refused):
        meter.check("p", "probe", {})


def test_commands_fill_a_bucket_that_empties_with_time():
    now = [0.0]
    meter = Meter(Limits(commands_per_s=10, burst=20), lambda: now[0])
    for _ in range(20):
        meter.check("p", "step", {})
    with pytest.raises(Refused):
        meter.check("p", "step", {})
    now[0] = 0.5
    for _ in range(5):
        meter.check("p", "step", {})
    with pytest.raises(Refused):
        meter.check("p", "step", {})


def test_a_meter_forgets_and_hostile_arguments_do_no_harm():
    meter = Meter(PUBLIC)
    for number in range(5000):
        meter.check(f"person {number}", "step", {})
    assert len(meter._spent) <= 2000
    for value in (None, "9" * 9, [1], {"a": 1}, float("nan"), True):
        meter.check("x", "prompt", {"text": value, "max_tokens": value, "n": value})


def test_one_address_opens_so_many_pages_and_rooms(stage):
    made = stage(public=True, limits=Limits(rooms_per_address=1), max_per_address=2)
    with made.open() as a, made.open() as b, made.open() as c:
        first, second = Person(a), Person(b)
        c.send_text('{"t":"hello"}')
        from viz.stage import codec

        assert codec.decode(c.receive_bytes())[0]["code"] == "full_address"
        first.say(t="command", id=1, name="prompt", args={"text": "a"})
        first.take("moved")
        assert second.ask("prompt", text="a")["code"] == "rooms_from_here"


@pytest.mark.parametrize("header,proxies,address", [
    ("", 0, "10.0.0.9"), ("1.2.3.4", 0, "10.0.0.9"), ("1.2.3.4", 1, "1.2.3.4"), ("6.6.6.6, 1.2.3.4", 1, "1.2.3.4"),
    ("6.6.6.6, 1.2.3.4, 10.1.1.1", 2, "1.2.3.4"), ("", 1, "10.0.0.9"), (", ,", 1, "10.0.0.9"),
])  # fmt: skip
def test_only_a_trusted_proxy_says_where_somebody_comes_from(header, proxies, address):
    connection = SimpleNamespace(headers={"x-forwarded-for": header}, client=SimpleNamespace(host="10.0.0.9"))
    assert address_of(connection, proxies) == address


# ---- rooms that play a recording ----


def test_a_guests_prompt_does_not_end_the_recording_that_the_host_shows(stage):
    made = stage()
    with made.open() as a, made.open() as b:
        host, guest = host_and_guest(made, a, b)
        viewer = next(v for v in made.hub.viewers.values() if v.person == host.person)
        reply = made.client.post(f"/glass/recording?viewer={viewer.id}&name=a.glass", content=b"abc").json()
        assert reply["ok"] and not made.lobby.status("main")["live"]
        said = guest.ask("prompt", text="hello")
        assert said["code"] == "not_live" and ("main", guest.person, "prompt") not in made.source.said
        assert not made.lobby.status("main")["live"], "the recording goes on"
        assert host.ask("prompt", text="hello")["ok"] and made.lobby.status("main")["live"], "the host goes back to the engine by it"
        assert guest.ask("prompt", text="hello")["ok"]


# ---- who is forgotten ----


def test_a_laptops_only_room_is_open_again_after_the_role_was_handed_over_and_all_have_left(stage):
    made = stage(times=Times(offer_after=0.2, tick=0.05))
    with made.open() as a, made.open() as b:
        first, second = Person(a), Person(b)
        key = next(p["id"] for p in first.until(lambda p: p["count"] == 2)["people"] if not p["me"])
        assert first.ask("people_offer", guest=key)["ok"]
        second.until(lambda p: p["offered"])
        assert second.ask("people_accept")["ok"] and second.until(lambda p: not p["everyone_hosts"])
        with made.open() as c:
            assert Person(c).until(lambda p: True)["role"] == "watcher"
    assert wait_for(lambda: made.people.homes["main"].empty_since is not None)
    asyncio.run(asyncio.sleep(0.3))
    with made.open() as a:
        assert Person(a).until(lambda p: True)["role"] == "host"


def test_who_is_away_for_long_is_forgotten_but_not_the_host_nor_who_waits_for_an_answer(stage):
    made = stage(times=Times(pause_after=60, forget_after=0.2, tick=0.05))
    with made.open() as b:
        with made.open() as a:
            host, guest = host_and_guest(made, a, b)
            links = host.now["people"]["links"]
            assert host.ask("people_claim")["ok"]
            with made.open() as c, made.open() as d:
                passing, asking = Person(c, room="main", join=links["watch"]), Person(d, room="main", join=links["prompt"])
                request = asking.ask("prompt", text="hello")["request_id"]
                assert passing.until(lambda p: p["count"] == 4)
        members = made.people.homes["main"].members
        assert wait_for(lambda: passing.person not in members)
        assert set(members) == {host.person, guest.person, asking.person}
        made.source.alive["main", asking.person].discard(request)
        assert wait_for(lambda: set(members) == {host.person, guest.person})


def test_a_room_has_so_many_members_and_who_left_first_makes_space(stage, monkeypatch):
    monkeypatch.setattr("viz.stage.people.MAX_MEMBERS", 3)
    made = stage()
    with made.open() as a, made.open() as b:
        host, guest = host_and_guest(made, a, b)
        link = host.now["people"]["links"]["watch"]
        for _ in range(4):
            with made.open() as c:
                assert Person(c, room="main", join=link).until(lambda p: p["count"] == 3)
            host.until(lambda p: p["count"] == 2)
        assert len(made.people.homes["main"].members) == 3
        with made.open() as c, made.open() as d:
            Person(c, room="main", join=link).until(lambda p: p["count"] == 3)
            late = Person(d, room="main", join=link)
            assert late.welcome["room"].startswith("~") and late.welcome["problem"]["code"] == "room_full"
        assert {host.person, guest.person} <= set(made.people.homes["main"].members)


# ---- limits that count before anything is awaited ----


class Slow(ManySource):
    async def command(self, room, viewer, name, args):
        await asyncio.sleep(0.05)
        return await super().command(room, viewer, name, args)

    def open_room(self, room):
        time.sleep(0.1)
        super().open_room(room)


@pytest.mark.parametrize("name", ["prompt", "preset", "live"])
def test_two_who_open_a_room_at_once_are_two(stage, name):
    made = stage(Slow(()), public=True, limits=Limits(rooms_per_address=1))
    with made.open() as a, made.open() as b:
        first, second = Person(a), Person(b)
        for person in (first, second):
            person.say(t="command", id=1, name=name, args={"text": "a", "name": "ragged"})
        replies = [person.take("reply")["result"] for person in (first, second)]
        assert sorted(reply["ok"] for reply in replies) == [False, True] and len(made.source.rooms) == 1
        assert next(reply for reply in replies if not reply["ok"])["code"] == "rooms_from_here"
        assert not made.people._opening
