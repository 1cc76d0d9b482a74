"""The hub: newest frame only, parts sent once, strangers' messages, viewers that leave."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from engine.request import FinishReason
from engine.trace import FINISH_REASONS, Trace
from tests.factories import add, make_core, prompt_of, run, trace_of
from tests.viz.scenarios import scenario
from tests.viz.test_stage_support import HOSTILE, VIEWS, HandSource, caption, make_trace
from viz.moments import begun
from viz.stage import chips, codec, export, timeline
from viz.stage import routes as routes_module
from viz.stage.hub import Hub, HubConfig, Refused
from viz.stage.lobby import Lobby, Shelf
from viz.stage.routes import routes
from viz.stage.source import Landing, RecordingSource, Source


class Browser:
    """A browser without a screen: says things, collects messages."""

    def __init__(self, ws, **hello) -> None:
        self.ws = ws
        self.say(t="hello", **{"credit": 1, "panels": [{"view": "batching", "w": 900, "h": 500}], **hello})
        self.welcome = self.take("welcome")

    def say(self, **message) -> None:
        self.ws.send_text(json.dumps(message))

    def take(self, kind: str) -> dict:
        """The next message of a kind; earlier others are dropped."""
        while True:
            header, arrays = codec.decode(self.ws.receive_bytes())
            if header["t"] == kind:
                return header | {"data": arrays}

    def drawn(self) -> None:
        self.say(t="drawn")


def setup(source=None, **config):
    source = source or HandSource()
    hub = Hub(source, VIEWS, caption=caption, config=HubConfig(max_fps=120, **config))
    return SimpleNamespace(source=source, hub=hub, client=TestClient(Starlette(routes=routes(hub, with_page=True))))


def wait_for(condition, seconds: float = 3.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def test_the_fakes_are_sources():
    assert isinstance(HandSource(), Source)
    assert isinstance(RecordingSource(Trace()), Source)


def test_a_newcomer_gets_the_catalogue_and_then_everything_once():
    stage = setup()
    with stage.client.websocket_connect("/glass/ws") as ws:
        browser = Browser(ws)
        assert [v["name"] for v in browser.welcome["views"]] == list(VIEWS)
        first = browser.take("frames")
        assert "caption" in first, first.get("fault", list(first))
        assert first["step"] == 60 and first["status"]["state"] == "paused" and first["caption"].startswith("Step 60")
        panel = first["panels"][0]
        assert panel["view"] == "batching" and panel["figure"]["axes"]["yaxis"]["range"] == [5.5, -0.5]
        assert first["data"][panel["base"]].shape == (6, 48)
        assert first["timeline"]["bins"] == 61
        assert abs(first["stamp"] - time.time() * 1000) < 5000


def test_a_part_is_sent_again_only_when_it_changed():
    stage = setup()
    with stage.client.websocket_connect("/glass/ws") as ws:
        browser = Browser(ws, panels=[{"view": "blocks", "w": 900, "h": 500}])
        assert "figure" in browser.take("frames")["panels"][0]
        stage.source.advance()
        browser.drawn()
        second = browser.take("frames")
        assert second["step"] == 61 and "figure" not in second["panels"][0] and "status" not in second
        assert "base" not in second["panels"][0], "the arrays are the same, too"
        browser.say(t="hello", credit=1, panels=[{"view": "blocks", "w": 900, "h": 500}])
        assert "figure" in browser.take("frames")["panels"][0], "a page that starts again has nothing"


def test_a_slow_viewer_skips_to_the_newest_frame():
    stage = setup()
    with stage.client.websocket_connect("/glass/ws") as ws:
        browser = Browser(ws)
        browser.take("frames")
        for _ in range(30):
            stage.source.advance()
            time.sleep(0.005)
        assert wait_for(lambda: stage.hub._rooms["main"].version == 30)
        browser.drawn()
        assert browser.take("frames")["step"] == 90
        browser.say(t="command", id=1, name="pause", args={})
        assert browser.take("reply")["id"] == 1, "nothing piled up before the reply"


def test_viewers_share_one_rendering():
    stage = setup()
    with stage.client.websocket_connect("/glass/ws") as a, stage.client.websocket_connect("/glass/ws") as b:
        frames = [Browser(ws).take("frames") for ws in (a, b)]
        assert frames[0]["panels"][0]["items"] == frames[1]["panels"][0]["items"]
        assert stage.hub.composer.num_rendered == 1


def test_a_viewer_in_the_past_stays_there():
    stage = setup()
    with stage.client.websocket_connect("/glass/ws") as ws:
        browser = Browser(ws, state={"step": 20, "selection": "seq:1"})
        first = browser.take("frames")
        assert first["step"] == 20 and first["last"] == 60 and not first["following"]
        stage.source.advance(5)
        browser.drawn()
        later = browser.take("frames")
        assert later["step"] == 20 and later["last"] == 65 and "panels" not in later
        browser.say(t="view", state={"step": None})
        browser.drawn()
        assert browser.take("frames")["step"] == 65


def test_commands_are_answered_even_when_they_fail():
    stage = setup()
    with stage.client.websocket_connect("/glass/ws") as ws:
        browser = Browser(ws)
        for number, name in enumerate(["step", "refuse", "fail"]):
            browser.say(t="command", id=number, name=name, args={"n": 2})
        replies = {r["id"]: r["result"] for r in (browser.take("reply") for _ in range(3))}
        assert replies[0]["ok"] and stage.source.commands[0] == ("step", {"n": 2})
        assert replies[1]["sentence"] == "Not today."
        assert not replies[2]["ok"] and "RuntimeError" in replies[2]["sentence"]


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "1e999", '{"t":"nothing"}', '{"t":{}}', "[" * 60_000, '{"t":"command"}',
        '{"t":"command","name":1,"args":{}}',
        '{"t":"view","panels":[{"view":["x"]},7,{"view":"blocks","w":1e300,"h":"x"}],"state":{"step":NaN,"theme":[],"views":[[]],"language":7}}',
        '{"t":"view","max_fps":-1,"state":[],"panels":{}}', '{"t":"view","state":{"step":' + "9" * 4000 + ',"ranges":[1e999,"a"]}}',
        '{"t":"drawn"}', '{"t":"view","state":{"selection":"\\ud800"}}', "x" * 70_000, '{"t":"view","state":{"step":' + "9" * 5000 + "}}",
    ],
)  # fmt: skip
def test_no_message_of_a_stranger_breaks_the_connection(text):
    stage = setup()
    with stage.client.websocket_connect("/glass/ws") as ws:
        browser = Browser(ws)
        browser.take("frames")
        ws.send_text(text)
        browser.say(t="command", id=9, name="pause", args={})
        assert browser.take("reply")["result"]["ok"]
        browser.say(t="hello", credit=1, panels=[{"view": "batching", "w": 900, "h": 500}])
        assert browser.take("frames")["panels"]


def test_hello_comes_first_and_a_binary_message_ends_it():
    stage = setup()
    with stage.client.websocket_connect("/glass/ws") as ws:
        ws.send_text('{"t":"drawn"}')
        assert ws.receive()["type"] == "websocket.close"
    with stage.client.websocket_connect("/glass/ws") as ws:
        Browser(ws).take("frames")
        ws.send_bytes(b"\0")
        assert wait_for(lambda: not stage.hub.viewers)


def test_the_source_hears_who_left():
    stage = setup()
    with stage.client.websocket_connect("/glass/ws") as ws:
        viewer = stage.hub.viewers[Browser(ws).welcome["viewer"]].person
        assert stage.source.joined == [viewer] and stage.source.left == []
    assert wait_for(lambda: stage.source.left == [viewer]) and not stage.hub.viewers and not stage.hub._rooms


def test_a_browser_that_says_nothing_is_gone():
    stage = setup(silence=0.3)
    with stage.client.websocket_connect("/glass/ws") as ws:
        Browser(ws).take("frames")
        assert wait_for(lambda: len(stage.source.left) == 1)


def test_a_silent_browser_is_asked_whether_it_is_there():
    stage = setup(ping=0.1)
    with stage.client.websocket_connect("/glass/ws") as ws:
        browser = Browser(ws)
        assert browser.take("ping")
        browser.say(t="pong")


def test_a_page_of_another_host_is_refused():
    stage = setup()
    with pytest.raises(Exception), stage.client.websocket_connect("/glass/ws", headers={"origin": "http://evil.example"}):  # noqa: B017
        pass
    assert stage.client.post("/glass/poll", content="{}", headers={"origin": "http://evil.example"}).status_code == 403
    with stage.client.websocket_connect("/glass/ws", headers={"origin": "http://testserver"}) as ws:
        assert Browser(ws).welcome


def test_too_many_viewers_get_a_sentence():
    stage = setup(max_viewers=1)
    with stage.client.websocket_connect("/glass/ws") as a, stage.client.websocket_connect("/glass/ws") as b:
        Browser(a)
        b.send_text('{"t":"hello"}')
        assert "Too many people" in codec.decode(b.receive_bytes())[0]["sentence"]


def test_a_broken_source_is_shown_and_a_broken_view_stays_in_its_panel():
    stage = setup()
    with stage.client.websocket_connect("/glass/ws") as ws:
        browser = Browser(ws, panels=[{"view": "broken"}, {"view": "batching"}])
        panels = browser.take("frames")["panels"]
        assert HOSTILE[0] in panels[0]["figure"]["error"] and not panels[1]["figure"]["error"]
        stage.source.status = None
        stage.source.advance()
        browser.drawn()
        assert browser.take("frames")["status"]["state"] == "dead"


def test_an_empty_trace_is_fine():
    stage = setup(RecordingSource(Trace()))
    with stage.client.websocket_connect("/glass/ws") as ws:
        frames = Browser(ws).take("frames")
        assert frames["step"] is None and frames["chips"] == {"items": [], "more": 0}


# ---- polling ----


def _messages(body: bytes) -> list[dict]:
    found = []
    while body:
        (size,) = struct.unpack_from("<I", body)
        found.append(codec.decode(body[4 : 4 + size])[0])
        body = body[4 + size :]
    return found


def test_polling_gives_the_same_messages_and_survives_a_lost_answer():
    stage = setup(long_poll=0.2, silence=1.0)
    hello = {"t": "hello", "credit": 1, "panels": [{"view": "blocks", "w": 900, "h": 500}]}
    with stage.client:
        first = _messages(stage.client.post("/glass/poll", json={"say": [hello], "seq": 0}).content)
        viewer = first[0]["viewer"]
        person = stage.hub.viewers[viewer].person
        ask = lambda **body: _messages(stage.client.post(f"/glass/poll?viewer={viewer}", json=body).content)  # noqa: E731
        frames = ask(seq=0, say=[])[-1]
        assert "figure" in frames["panels"][0]
        stage.source.advance()
        lost = ask(seq=frames["seq"], say=[{"t": "drawn"}])[-1]
        assert lost["step"] == 61 and "figure" not in lost["panels"][0]
        again = ask(seq=frames["seq"], say=[])[-1]
        assert "figure" in again["panels"][0], "the browser never saw the last answer"
        assert ask(say=[{"t": "command", "id": 3, "name": "pause", "args": {}}], wait=0) == []
        assert ask(seq=again["seq"], say=[])[0] == {"t": "reply", "id": 3, "result": {"ok": True, "name": "D"}, "arrays": []}
        assert wait_for(lambda: stage.source.left == [person])
        assert ask(seq=1, say=[])[0]["code"] == "gone"


# ---- files ----


def test_files_are_packed_and_revalidated():
    stage = setup()
    plain = stage.client.get("/glass/static/stage.css", headers={"accept-encoding": "identity"})
    assert "--g-request-0: #0072B2" in plain.text and "content-encoding" not in plain.headers
    packed = stage.client.get("/glass/plotly.min.js", headers={"accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip" and len(packed.content) > 4_000_000
    assert stage.client.get("/glass/plotly.min.js", headers={"if-none-match": packed.headers["etag"]}).status_code == 304
    assert stage.client.get("/glass/static/stage.hub.py").status_code == 404
    assert stage.client.get("/glass/static/..%2fhub.py").status_code == 404
    assert "<script" in stage.client.get("/glass/").text


def test_recordings_need_a_viewer():
    stage = setup()
    assert stage.client.get("/glass/recording?viewer=x").status_code == 404
    with stage.client.websocket_connect("/glass/ws") as ws:
        viewer = Browser(ws).welcome["viewer"]
        saved = stage.client.get(f"/glass/recording?viewer={viewer}")
        assert saved.content == b"recording" and "run%20%C3%BC.glass" in saved.headers["content-disposition"]
        assert stage.client.post(f"/glass/recording?viewer={viewer}&name=a.glass", content=b"abc").json() == {
            "ok": True,
            "name": "a.glass",
            "size": 3,
        }


# ---- a recording ----


def test_a_recording_plays_by_the_clock_and_loops():
    now = [0.0]
    source = RecordingSource(make_trace(), pace=2.0, hold=1.0, clock=lambda: now[0])
    source.viewer_joined("main", "a")
    assert source.status("main")["cursor"] == 0
    before = source.version("main")
    now[0] = 5.0
    assert source.status("main")["cursor"] == 10 and source.version("main") != before
    now[0] = 199.9
    assert source.status("main")["cursor"] == 399
    now[0] = 201.0
    assert source.status("main")["cursor"] == 0, "it begins again"
    source.viewer_left("main", "a")
    assert source._rooms == {}


@pytest.mark.anyio
async def test_a_recording_obeys_the_transport():
    now = [0.0]
    source = RecordingSource(make_trace(), clock=lambda: now[0])
    ask = lambda name, **args: source.command("main", "a", name, args)  # noqa: E731
    await ask("seek", step=100)
    await ask("pause")
    now[0] = 50.0
    assert source.status("main") | {"badge": ""} == source.status("main") | {"badge": "", "cursor": 100, "state": "paused"}
    await ask("step", n=3)
    assert source.status("main")["cursor"] == 103
    await ask("pace", value=None)
    await ask("play")
    now[0] += 0.0405
    assert source.status("main")["cursor"] == 113, "free is the speed of the recorded clock: 4 ms a step"
    assert not (await ask("pace", value=-1))["ok"] and not (await ask("prompt", text="hi"))["ok"]


@pytest.fixture
def anyio_backend():
    return "asyncio"


# ---- chips and timeline ----


def test_chips_follow_a_request_through_its_life():
    trace = make_trace()
    seen: dict[str, list[str]] = {}
    for step in range(len(trace)):
        row = chips.chips(trace, step)
        for chip in row["items"]:
            states = seen.setdefault(chip["id"], [])
            if not states or states[-1] != chip["state"]:
                states.append(chip["state"])
            assert 0 <= chip["done"] <= chip["of"] and chip["tokens"] <= chip["max"]
    assert seen["seq:0"] == ["prefill", "decode", "finished"]
    assert any("preempted" in s for s in seen.values())
    live = [c for c in chips.chips(trace, 30)["items"] if c["state"] != "finished"]
    assert len({c["slot"] for c in live}) == len(live) == 4
    assert {c["slot"] for c in chips.chips(trace, 120)["items"]} == {None}, "more than six live: only the selected keep theirs"


def test_the_timeline_bins_steps_and_keeps_events():
    trace = make_trace()
    facts, (load, flags) = timeline.timeline(trace, 100)
    assert facts == {"first": 0, "last": 399, "bins": 100} and load.dtype == flags.dtype == "uint8"
    assert flags[0] & timeline.JOIN and (flags & timeline.FINISH).any() and (flags & timeline.PREEMPT).any()
    assert timeline.timeline(Trace())[0]["bins"] == 0


# ---- uploads and files ----


def upload(stage, viewer: str, content, **more):
    return stage.client.post(f"/glass/recording?viewer={viewer}&name=a.glass", content=content, **more)


def test_who_may_not_open_a_recording_is_refused_before_it_is_read(monkeypatch):
    stage = setup()

    def no(viewer, name, args):
        raise Refused("host_only", "Only the host may do that.")

    with stage.client.websocket_connect("/glass/ws") as ws:
        viewer = Browser(ws).welcome["viewer"]
        stage.hub.gates.append(no)
        monkeypatch.setattr(routes_module, "_body", pytest.fail)
        answer = upload(stage, viewer, b"x" * 1000)
        assert answer.status_code == 409 and answer.json()["code"] == "host_only"


def test_a_file_that_is_too_large_is_refused_with_the_limit():
    stage = setup(max_upload=2 << 20)
    with stage.client.websocket_connect("/glass/ws") as ws:
        viewer = Browser(ws).welcome["viewer"]
        answer = upload(stage, viewer, b"x" * (2 << 20))
        assert answer.json()["size"] == 2 << 20
        answer = upload(stage, viewer, b"x" * ((2 << 20) + 1))
        assert answer.status_code == 413 and answer.json()["fields"] == {"limit": 2}
        assert answer.json()["sentence"] == "The file is larger than 2 MiB. Save fewer steps."


@pytest.mark.anyio
async def test_one_recording_is_opened_at_a_time_and_one_that_never_arrives_is_given_up(monkeypatch):
    monkeypatch.setattr(routes_module, "UPLOAD_SECONDS", 0.3)
    stage = setup()
    viewer = await stage.hub.join({}, "websocket")
    transport = httpx.ASGITransport(stage.client.app)

    async def never():
        yield b"x"
        await asyncio.sleep(30)

    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
        post = lambda content: client.post("/glass/recording", params={"viewer": viewer.id}, content=content)  # noqa: E731
        slow = asyncio.create_task(post(never()))
        await asyncio.sleep(0.1)
        assert (await post(b"abc")).json()["code"] == "upload_busy"
        assert (await slow).json()["code"] == "upload_slow"
        assert (await post(b"abc")).json()["ok"]


def test_saving_and_pictures_are_counted_too(monkeypatch):
    monkeypatch.setattr(export, "SAVES_PER_MINUTE", 2)
    monkeypatch.setattr(export, "PICTURES_PER_MINUTE", 3)
    stage = setup()
    with stage.client.websocket_connect("/glass/ws") as ws:
        viewer = Browser(ws).welcome["viewer"]
        saved = [stage.client.get(f"/glass/recording?viewer={viewer}").status_code for _ in range(3)]
        drawn = [stage.client.get(f"/glass/figure.json?viewer={viewer}&view=blocks").status_code for _ in range(4)]
        assert saved == [200, 200, 409] and drawn == [200, 200, 200, 409]


@pytest.mark.anyio
async def test_pictures_wait_in_a_short_line():
    desk, order = export.Desk(10, line=1), []

    async def one(name: str) -> None:
        async with desk.turn(name):
            order.append(name)
            await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(one(name)) for name in "abc"]
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "b"] and isinstance(done[2], Refused) and desk.waiting == 0 and not desk.busy.locked()


# ---- what is counted, and what is sent, while something is awaited ----


class SlowLanding(HandSource):
    async def land(self, place, person, said):
        await asyncio.sleep(0.02)
        return Landing("main")


@pytest.mark.anyio
@pytest.mark.parametrize("limit, code", [({"max_viewers": 3}, "full"), ({"max_per_address": 3}, "full_address")])
async def test_those_who_come_at_the_same_time_are_counted(limit, code):
    hub = setup(SlowLanding(), **limit).hub
    found = await asyncio.gather(*(hub.join({}, "websocket", "10.0.0.1") for _ in range(8)), return_exceptions=True)
    assert [getattr(one, "code", None) for one in found].count(code) == 5 and len(hub.viewers) == 3
    await hub.leave(next(iter(hub.viewers.values())))
    await hub.join({}, "websocket", "10.0.0.1")


class TwoRooms(HandSource):
    def trace(self, room):
        return super().trace(room) if room == "main" else make_trace(5)


@pytest.mark.anyio
async def test_a_viewer_that_moves_while_its_frames_are_drawn_gets_everything_of_its_new_room():
    gate = threading.Event()

    def slow(trace, state):
        gate.wait(5)
        return VIEWS["blocks"].figure(trace, state)

    hub = Hub(TwoRooms(), {"blocks": replace(VIEWS["blocks"], figure=slow)}, caption=caption, config=HubConfig(max_fps=120))
    viewer = await hub.join({"panels": [{"view": "blocks", "w": 900, "h": 500}], "credit": 1}, "websocket")
    viewer.outbox.clear()
    drawing = asyncio.create_task(hub.next(viewer, 5))
    await asyncio.sleep(0.1)
    await hub.move(viewer, "other")
    gate.set()
    assert codec.decode(await drawing)[0]["last"] == 60
    assert codec.decode(await hub.next(viewer, 5))[0]["t"] == "moved"
    frames, _ = codec.decode(await hub.next(viewer, 5))
    assert frames["last"] == 4 and {"status", "caption", "chips", "timeline"} <= set(frames)
    assert {"figure", "items", "base"} <= set(frames["panels"][0])
    assert not [key for key in hub.composer._panels if key[0] == "other" and key[-1].step == 60]


# ---- a name that leads here ----


@pytest.mark.parametrize("host, local", [
    ("localhost:7860", True), ("127.0.0.1:7860", True), ("[::1]:7860", True), ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True),
    ("evil.example:7860", False), ("localhost.evil.example", False), ("127.0.0.1.evil.example", False), ("", False), ("[", False),
    ("10.0.0.1:7860", False), ("0.0.0.0", False), ("user@127.0.0.1@evil.example", False),
])  # fmt: skip
def test_a_server_on_this_machine_answers_only_to_its_own_names(host, local):
    assert routes_module.is_local(host) is local
    connection = SimpleNamespace(headers={"host": host, "origin": f"http://{host}"})
    assert routes_module.same_host(connection, local=True) is local
    assert routes_module.same_host(SimpleNamespace(headers={"host": host}), local=True) is local


def test_a_strangers_page_whose_name_leads_here_reaches_nothing():
    stage = setup(local=True)
    evil = {"host": "evil.example:7860", "origin": "http://evil.example:7860", "x-forwarded-host": "localhost"}
    with pytest.raises(Exception), stage.client.websocket_connect("/glass/ws", headers=evil):  # noqa: B017
        pass
    assert stage.client.post("/glass/poll", content="{}", headers=evil).status_code == 403
    own = {"host": "localhost:7860", "origin": "http://localhost:7860"}
    with stage.client.websocket_connect("/glass/ws", headers=own) as ws:
        viewer = Browser(ws).welcome["viewer"]
        assert upload(stage, viewer, b"abc", headers=evil).status_code == 404
        assert upload(stage, viewer, b"abc", headers=own).json()["ok"]


# ---- a lobby ----


class Open(HandSource):
    def is_open(self, room):
        return room == "main"


@pytest.mark.anyio
async def test_a_place_never_shows_a_picture_of_what_played_there_before():
    traces = {b"a": make_trace(12), b"b": make_trace(30)}
    lobby, seen = Lobby(Open(), Shelf(traces.get)), []
    for content in (b"a", b"b", b"a"):
        lobby.viewer_joined("main", "p")
        seen.append(lobby.version("main"))
        await lobby.open_recording("main", "p", "x.glass", content)
        await lobby.command("main", "p", "pause", {})
        seen.append(lobby.version("main"))
        lobby.viewer_left("main", "p")
    live, playing = seen[::2], seen[1::2]
    assert len(set(playing)) == 3 and len(set(live)) == 1, "the live room is the same again"


@pytest.mark.anyio
async def test_a_private_place_that_is_landed_in_again_has_another_version():
    links = {"one": (make_trace(12), {}), "two": (make_trace(30), {})}
    lobby, seen = Lobby(Open(), Shelf(None, pinned=links.get)), []
    for name in links:
        room = (await lobby.land("id", "p", {"rec": name})).room
        lobby.viewer_joined(room, "p")
        seen.append((room, lobby.version(room)))
        lobby.viewer_left(room, "p")
    assert len(set(seen)) == 2 and not lobby._switches


@pytest.mark.anyio
async def test_a_place_where_nobody_comes_in_is_given_up(monkeypatch):
    monkeypatch.setattr("viz.stage.lobby.LANDING_S", 0.0)
    lobby = Lobby(Open(), Shelf(None, lambda name: make_trace(12)))
    for number in range(5):
        await lobby.land(f"id{number}", "p", {"alone": True})
    assert list(lobby._playing) == ["~id4"]
    lobby.viewer_joined("~id4", "p")
    await lobby.land("id5", "p", {"alone": True})
    assert set(lobby._playing) == {"~id4", "~id5"} and set(lobby._names) == set(lobby._playing)


@pytest.mark.anyio
async def test_a_recording_that_is_read_after_everybody_left_does_not_play():
    lobby = Lobby(Open(), Shelf(lambda content: make_trace(12)))
    await lobby.open_recording("main", "p", "x.glass", b"a")
    assert lobby.status("main")["live"] and not lobby._playing


# ---- chips and timeline of real runs ----


def test_only_the_first_work_of_a_request_is_a_join_also_without_a_cache():
    trace = scenario("no_cache")
    bins = np.flatnonzero(timeline.timeline(trace, bins=10**6)[1][1] & timeline.JOIN)
    first = {int(trace.works["step_id"][trace.works["seq_id"] == i][0]) for i in np.unique(trace.works["seq_id"]).tolist()}
    joins = set((bins + trace.first_step).tolist())
    assert joins <= first and len(joins) >= 3
    assert joins == {step for step in trace.steps["step_id"].tolist() if len(begun(trace, step))}


def test_without_a_cache_who_writes_is_said_to_write():
    trace, states = scenario("no_cache"), {}
    for step in trace.steps["step_id"].tolist():
        for chip in chips.chips(trace, step)["items"]:
            states.setdefault(chip["id"], []).append((chip["state"], chip["tokens"]))
    for seen in states.values():
        assert [s for s, n in seen if s == "prefill" and n > 1] == [], "it has tokens already, so it writes"
        assert ("decode", 2) in seen or len(seen) < 4


def test_a_chip_counts_every_token_that_its_request_was_given():
    for name in ("broken", "preempted", "crowded", "no_cache"):
        trace = scenario(name)
        for step in trace.steps["step_id"].tolist():
            for chip in chips.chips(trace, step)["items"]:
                assert chip["tokens"] == len(trace.tokens_of(int(chip["id"].split(":")[1]), step)), (name, step, chip)


def test_who_was_stopped_keeps_its_tokens_and_a_recomputation_is_no_writing():
    trace = scenario("broken")
    stopped = trace.finishes[trace.finishes["reason"] == FINISH_REASONS.index(FinishReason.ABORT)]
    row = chips.chips(trace, int(stopped["step_id"][0]))
    chip = next(c for c in row["items"] if c["id"] == f"seq:{int(stopped['seq_id'][0])}")
    assert chip["state"] == "finished" and chip["why"] == "abort" and chip["tokens"] > 0
    core = make_core(pages=10, page_size=8, max_num_seqs=3, max_num_batched_tokens=16, prefix_caching=False)
    for length in (30, 28):
        add(core, prompt_of(length, length), 40)
    run(core)
    trace = trace_of(core)
    again = trace.works[trace.works["num_recomputed"] > 0]
    assert len(again) > len(trace.preempts) > 0, "some are computed again in chunks"
    for work in again:
        chip = next(c for c in chips.chips(trace, int(work["step_id"]))["items"] if c["id"] == f"seq:{int(work['seq_id'])}")
        assert chip["state"] == "prefill" and chip["tokens"] > 0
