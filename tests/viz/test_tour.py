"""The player of chapters: to each beat's moment and not past it, back without running again, guesses, ways out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette

from engine.recording import load
from engine.trace import STEP, WORK, SequenceInfo, Trace
from tests.viz.test_stage_support import VIEWS
from viz.chapter import Beat, Chapter, Predict, TryThis
from viz.registry import load_chapters
from viz.stage.hub import Hub, HubConfig, Refused
from viz.stage.lobby import Lobby, Shelf
from viz.stage.people import People
from viz.stage.routes import routes
from viz.stage.source import RecordingSource
from viz.stage.tour import Tour
from viz.stage.walk import Speed
from viz.words.catalogue import words

FAST = Speed(steps_per_s=1000, max_steps_per_s=1000, patience=0.6)
RECORDINGS = Path(__file__).parents[2] / "assets" / "recordings"
NOT_RECORDED = words("en")("ui.chapter.notRecorded")


def make_steps(num_steps: int) -> Trace:
    """One request that is in every step."""
    steps, works = np.zeros(num_steps, STEP), np.zeros(num_steps, WORK)
    steps["step_id"] = works["step_id"] = np.arange(num_steps)
    works["num_tokens"] = 1
    info = SequenceInfo(0, 0, 0, "A", "hello", (1,), 99, 0.0, 0, 0, 0, "main")
    return Trace({"steps": steps, "works": works}, {0: info} if num_steps else {})


class Engine:
    """A live source that runs a step when it is told to; a preset has `length` more steps."""

    def __init__(self, length: int = 12, at: int = 0) -> None:
        self.length, self.at, self.left, self.state = length, at, 0, "paused"
        self.said: list[tuple[str, dict]] = []
        self.compares, self.dies_at, self.refuses = False, None, None

    def trace(self, room: str) -> Trace:
        return make_steps(self.at)

    def version(self, room: str) -> int:
        return self.at

    def status(self, room: str) -> dict:
        alive = ["A"] if self.left else []
        return {"state": self.state, "live": True, "running": alive, "queued": [], "compare": self.compares}

    async def command(self, room: str, viewer: str, name: str, args: Mapping[str, object]) -> dict:
        if self.state == "dead":
            raise Refused("engine_not_ready", "The engine is not running.")
        if name == self.refuses:
            return {"ok": False, "code": "no", "sentence": "Not now."}
        self.said.append((name, dict(args)))
        if name == "preset":
            self.left = self.length
        elif name == "step" and self.left:
            self.at, self.left = self.at + 1, self.left - 1
            if self.at == self.dies_at:
                self.state = "dead"
        return {"ok": True}

    def viewer_joined(self, room: str, viewer: str) -> None:
        pass

    def viewer_left(self, room: str, viewer: str) -> None:
        pass


def until_step(n: int):
    """True from the n-th step on."""
    return lambda trace, step: step >= n


PREDICT = Predict(
    "chapter.one.ask", ("page",), lambda trace, asked, decided: frozenset({f"page:{decided}"}), "chapter.one.reveal",
    fields=lambda trace, asked: {"asked": asked}, until=lambda trace, asked, step: step >= asked + 2,
    found=lambda trace, asked, decided: {"step": decided},
)  # fmt: skip


def text(key: str = "text", **more) -> Beat:
    return Beat(f"chapter.one.{key}", ("blocks", "nowhere"), fields=lambda trace, step: {"step": step}, **more)


def chapter(*beats: Beat, name: str = "one", order: int = 1) -> Chapter:
    own = {
        "title": "One",
        "question": "Why?",
        "text": "Step {step}.",
        "ask": "After {asked}?",
        "reveal": "It was {step}.",
        "try": "Turn it.",
    }
    return Chapter(name, order, "ragged", beats, {f"chapter.{n}.{key}": t for n in ("one", name) for key, t in own.items()})


THREE = chapter(
    text(until=until_step(3), select=lambda trace, step: f"seq:{step}"),
    text(until=until_step(5), predict=PREDICT),
    text(until=until_step(9)),
)


class Stage:
    """A hub with a tour and one viewer in it."""

    def __init__(self, source, *chapters: Chapter, speed: Speed = FAST) -> None:
        self.source = source
        self.hub = Hub(source, VIEWS, config=HubConfig(max_fps=120))
        self.tour = Tour(self.hub, {c.name: c for c in chapters}, speed)

    async def enter(self, **hello):
        return await self.hub.join(hello, "websocket")

    def told(self, viewer) -> dict:
        return self.hub.parts["tour"](viewer)

    async def press(self, viewer, by: int = 1) -> dict:
        """The clicker, and then whatever it set going."""
        await self.hub.act(viewer, "beat", {"by": by})
        return await self.arrived(viewer)

    async def arrived(self, viewer) -> dict:
        async with asyncio.timeout(20):
            while (told := self.told(viewer)) and told["phase"] == "going":
                await asyncio.sleep(0.002)
        return told


def plays(scenario):
    """A test that is a coroutine."""

    def run():
        asyncio.run(scenario())

    run.__name__, run.__doc__ = scenario.__name__, scenario.__doc__
    return run


def steps_run(engine: Engine) -> int:
    return sum(name == "step" for name, _ in engine.said)


@plays
async def test_the_first_press_starts_the_first_chapter_and_stops_at_its_moment():
    engine = Engine()
    stage = Stage(engine, THREE)
    viewer = await stage.enter()
    assert stage.told(viewer) is None
    told = await stage.press(viewer)
    assert engine.at == 4, "step 3 is the newest: not one more was run"
    assert (told["phase"], told["sentence"], told["beat"], told["beats"]) == ("here", "Step 3.", 0, 3)
    assert told["go"]["views"] == ["blocks"] and told["go"]["select"] == "seq:3" and told["go"]["step"] is None
    names = [name for name, _ in engine.said]
    assert names.index("pause") < names.index("preset") < names.index("step")


@plays
async def test_a_walk_is_taken_step_by_step_and_a_second_press_hurries_it():
    engine = Engine()
    stage = Stage(engine, THREE, speed=Speed(steps_per_s=2, max_steps_per_s=2))
    viewer = await stage.enter()
    await stage.hub.act(viewer, "beat", {"by": 1})
    await asyncio.sleep(0.7)
    assert engine.at == 1 and stage.told(viewer)["phase"] == "going" and "sentence" not in stage.told(viewer)
    assert (await stage.press(viewer))["phase"] == "here" and engine.at == 4


def test_the_speed_begins_slowly_grows_and_slows_down_before_a_known_moment():
    speed = Speed()
    waits = [speed.wait(taken, None) for taken in range(30)]
    assert waits[:4] == [0.5] * 4 and waits == sorted(waits, reverse=True) and waits[-1] == 1 / 8
    assert speed.wait(20, 1) == speed.wait(20, 4) == 0.5 > speed.wait(20, 12)


@plays
async def test_a_question_is_asked_and_answered_by_the_next_record_that_decides_it():
    stage = Stage(Engine(), THREE)
    viewer = await stage.enter()
    await stage.press(viewer)
    told = await stage.press(viewer)
    assert told["phase"] == "asked" and told["predict"] == {"question": "After 5?", "marks": ["page"], "guess": None, "votes": 0}
    for mark in ("page:6", "page:7"):
        await stage.hub.act(viewer, "guess", {"mark": mark})
    assert stage.told(viewer)["predict"]["guess"] == "page:7"
    told = await stage.press(viewer)
    found = told["predict"]
    assert (told["phase"], stage.source.at, found["verdict"], found["right"], found["reveal"]) == (
        "revealed",
        8,
        "right",
        ["page:7"],
        "It was 7.",
    )
    assert found["tally"] == [{"mark": "page:7", "votes": 1, "right": True}]
    told = await stage.press(viewer)
    assert told["beat"] == 2 and told["sentence"] == "Step 9."


@plays
async def test_a_question_can_be_revealed_without_a_guess():
    stage = Stage(Engine(), THREE)
    viewer = await stage.enter()
    for _ in range(3):
        told = await stage.press(viewer)
    assert told["phase"] == "revealed" and told["predict"]["verdict"] == "none" and told["predict"]["tally"] == []


@plays
async def test_the_latest_guess_of_each_person_counts_and_the_tally_is_told_only_then():
    stage = Stage(Engine(), THREE)
    host, *guests = [await stage.enter() for _ in range(4)]
    await stage.press(host)
    await stage.press(host)
    for viewer, mark in zip(guests, ("page:1", "page:7", "page:7"), strict=True):
        await stage.hub.act(viewer, "guess", {"mark": "page:2"})
        await stage.hub.act(viewer, "guess", {"mark": mark})
    for viewer in (host, *guests):
        told = stage.told(viewer)["predict"]
        assert told["votes"] == 3 and not {"tally", "right", "agreed"} & set(told)
    assert stage.told(guests[0])["predict"]["guess"] == "page:1" and stage.told(host)["predict"]["guess"] is None
    await stage.press(host)
    told = stage.told(guests[0])["predict"]
    assert told["verdict"] == "wrong" and told["agreed"] == 2
    assert told["tally"] == [{"mark": "page:7", "votes": 2, "right": True}, {"mark": "page:1", "votes": 1, "right": False}]


@plays
async def test_what_cannot_be_guessed_is_refused_with_a_sentence():
    stage = Stage(Engine(), THREE)
    viewer = await stage.enter()
    for args in ({"mark": "page:1"}, {"mark": None}):
        with pytest.raises(Refused, match="Nothing is being asked"):
            await stage.hub.act(viewer, "guess", args)
    await stage.press(viewer)
    await stage.press(viewer)
    for mark in ("seq:1", 7, None, "page:" + "9" * 300, ""):
        with pytest.raises(Refused, match="cannot be guessed"):
            await stage.hub.act(viewer, "guess", {"mark": mark})


@plays
async def test_back_shows_the_step_that_was_reached_and_forward_runs_nothing_again():
    stage = Stage(Engine(), THREE)
    viewer = await stage.enter()
    for _ in range(4):
        await stage.press(viewer)
    ran = steps_run(stage.source)
    back = await stage.press(viewer, -1)
    assert (back["beat"], back["phase"], back["go"]["step"], back["predict"]["reveal"]) == (1, "revealed", 7, "It was 7.")
    first = await stage.press(viewer, -1)
    assert (first["beat"], first["go"]["step"], first["sentence"]) == (0, 3, "Step 3.")
    assert (await stage.press(viewer, -1))["beat"] == 0, "there is nothing before it"
    for beat, step in ((1, 7), (2, None)):
        told = await stage.press(viewer)
        assert (told["beat"], told["go"]["step"]) == (beat, step)
    assert steps_run(stage.source) == ran


@plays
async def test_back_before_the_answer_and_forward_again_still_asks():
    stage = Stage(Engine(), THREE)
    viewer = await stage.enter()
    await stage.press(viewer)
    await stage.press(viewer)
    await stage.press(viewer, -1)
    assert (await stage.press(viewer))["phase"] == "asked"
    assert (await stage.press(viewer))["phase"] == "revealed"


@plays
async def test_a_run_that_ends_too_early_says_so_and_the_talk_goes_on():
    stage = Stage(Engine(length=4), THREE, chapter(text(until=until_step(0)), name="two", order=2))
    viewer = await stage.enter()
    await stage.press(viewer)
    told = await stage.press(viewer)
    assert told["phase"] == "here" and "ended before" in told["note"] and "sentence" not in told and "predict" not in told
    assert "ended before" in (await stage.press(viewer))["note"]
    assert (await stage.press(viewer))["chapter"] == "two"
    assert (await stage.hub.act(viewer, "beat", {"by": 1}))["sentence"] == "That was the last chapter."


@plays
async def test_an_answer_that_never_comes_is_said():
    stage = Stage(Engine(length=6), THREE)
    viewer = await stage.enter()
    for _ in range(3):
        told = await stage.press(viewer)
    assert told["phase"] == "revealed" and "before the answer" in told["note"] and "right" not in told["predict"]
    assert (await stage.press(viewer))["beat"] == 2


@plays
async def test_a_beat_that_raises_does_not_hold_up_the_talk():
    broken = text(until=lambda trace, step: 1 / 0)
    stage = Stage(Engine(), chapter(broken, text(until=until_step(2))))
    viewer = await stage.enter()
    assert "could not be shown" in (await stage.press(viewer))["note"]
    assert (await stage.press(viewer))["sentence"] == "Step 2."


@plays
async def test_a_hand_on_the_transport_stops_the_walk_and_the_next_press_goes_on():
    slow = Speed(steps_per_s=4, max_steps_per_s=4)
    stage = Stage(Engine(), THREE, speed=slow)
    viewer = await stage.enter()
    await stage.hub.act(viewer, "beat", {"by": 1})
    await asyncio.sleep(0.3)
    await stage.hub.act(viewer, "play", {})
    await asyncio.sleep(0.02)
    at = stage.source.at
    await asyncio.sleep(0.4)
    assert stage.source.at == at and stage.told(viewer)["phase"] == "here"
    await stage.hub.act(viewer, "beat", {"by": 1})
    assert (await stage.press(viewer))["sentence"] == "Step 3."


@plays
async def test_a_guest_who_stops_his_own_request_does_not_stop_the_hosts_walk():
    stage = Stage(Engine(), THREE, speed=Speed(steps_per_s=20, max_steps_per_s=20))
    host, guest = await stage.enter(), await stage.enter()
    await stage.hub.act(host, "beat", {"by": 1})
    await asyncio.sleep(0.02)
    for name in ("abort", "prompt"):
        await stage.hub.act(guest, name, {"request_id": 1})
        assert stage.told(host)["phase"] == "going"
    assert (await stage.arrived(host))["sentence"] == "Step 3."
    await stage.hub.act(host, "beat", {"by": 1})
    await stage.hub.act(host, "abort", {"request_id": 1})
    assert stage.told(host)["phase"] == "here", "his own hand takes over"


@plays
async def test_a_preset_that_is_refused_leaves_the_chapter_where_it_is():
    stage = Stage(Engine(), THREE)
    viewer = await stage.enter()
    await stage.press(viewer)
    stage.source.refuses = "preset"
    assert not (await stage.hub.act(viewer, "preset", {"name": "ragged"}))["ok"]
    assert stage.told(viewer)["sentence"] == "Step 3."
    assert (await stage.press(viewer))["phase"] == "asked"
    stage.source.refuses = None
    await stage.hub.act(viewer, "preset", {"name": "ragged"})
    assert stage.told(viewer) is None


@plays
async def test_opening_a_file_leaves_the_chapter_once_it_could_be_read():
    base = lobby(Engine())
    base.shelf = Shelf(lambda content: make_steps(5) if content == b"good" else 1 / 0, base.shelf.shipped)
    stage = Stage(base, THREE)
    viewer = await stage.enter(room="main")
    await stage.hub.act(viewer, "live", {})
    await stage.press(viewer)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(Starlette(routes=routes(stage.hub))), base_url="http://t") as client:
        post = lambda content: client.post("/glass/recording", params={"viewer": viewer.id}, content=content)  # noqa: E731
        assert not (await post(b"bad")).json()["ok"] and stage.told(viewer)["sentence"] == "Step 3."
        assert (await post(b"good")).json()["ok"] and stage.told(viewer) is None


# ---- trying ----


TRY = TryThis("chapter.one.try", "max_num_seqs", 2)
TRIED = chapter(
    text(until=until_step(3)),
    text(until=until_step(5), try_this=TRY),
    text(until=until_step(7), predict=PREDICT),
)


@plays
async def test_trying_starts_the_beats_workload_again_with_the_knob_and_lets_it_run():
    stage = Stage(Engine(length=30), TRIED)
    viewer = await stage.enter()
    with pytest.raises(Refused, match="nothing to try"):
        await stage.hub.act(viewer, "chapter_try", {})
    await stage.press(viewer)
    with pytest.raises(Refused, match="nothing to try"):
        await stage.hub.act(viewer, "chapter_try", {})
    told = await stage.press(viewer)
    assert told["try"]["knob"] == "max_num_seqs"
    said = len(stage.source.said)
    await stage.hub.act(viewer, "chapter_try", {})
    told = await stage.arrived(viewer)
    now = stage.source.said[said:]
    assert ("preset", {"name": "ragged", "knobs": {"max_num_seqs": 2}}) in now and now[-1][0] == "play" and now[0][0] == "pause"
    assert (told["phase"], told["beat"], told["go"]["step"]) == ("here", 1, None), "the newest step is shown, the talk stays"


@plays
async def test_after_trying_the_talk_goes_on_with_a_run_of_its_own():
    """The run that was tried is not mistaken for the talk's: its beats are walked over again, without the knob."""
    engine = Engine(length=30)
    stage = Stage(engine, TRIED)
    viewer = await stage.enter()
    await stage.press(viewer)
    await stage.press(viewer)
    await stage.hub.act(viewer, "chapter_try", {})
    await stage.arrived(viewer)
    engine.at, engine.left = 18, 20  # it has run on meanwhile, past what the next beat looks for
    back = await stage.press(viewer, -1)
    assert (back["beat"], back["go"]["step"], back["sentence"]) == (0, 3, "Step 3."), "what was found can still be seen"
    await stage.press(viewer)
    said = len(engine.said)
    told = await stage.press(viewer)
    assert ("preset", {"name": "ragged"}) in engine.said[said:] and told["phase"] == "asked" and told["at"] >= 18
    told = await stage.press(viewer)
    assert told["phase"] == "revealed" and told["predict"]["reveal"] == f"It was {told['at'] + 2}."


@plays
async def test_a_question_that_waits_is_asked_again_when_its_run_was_replaced():
    engine = Engine(length=40)
    stage = Stage(engine, TRIED)
    viewer = await stage.enter()
    for _ in range(3):
        told = await stage.press(viewer)
    assert told["phase"] == "asked" and "try" not in told
    await stage.press(viewer, -1)
    await stage.hub.act(viewer, "chapter_try", {})
    await stage.arrived(viewer)
    assert (await stage.press(viewer))["phase"] == "asked"
    begun = engine.at
    told = await stage.press(viewer)
    assert told["phase"] == "asked" and told["at"] >= begun
    assert (await stage.press(viewer))["phase"] == "revealed"


@plays
async def test_only_the_host_tries():
    stage = Stage(Engine(length=30), TRIED)
    people = People(stage.hub)
    host = await stage.enter()
    await stage.hub.act(host, "people_claim", {})
    guest = await stage.enter(join=people.part(host)["links"]["prompt"])
    await stage.press(host)
    await stage.press(host)
    with pytest.raises(Refused, match="Only the host"):
        await stage.hub.act(guest, "chapter_try", {})


@plays
async def test_a_preset_or_the_end_leaves_the_chapter():
    stage = Stage(Engine(), THREE)
    viewer = await stage.enter()
    for name, args in (("preset", {"name": "ragged"}), ("chapter_end", {})):
        await stage.hub.act(viewer, "beat", {"by": 1})
        await stage.hub.act(viewer, name, args)
        assert stage.told(viewer) is None
        ran = steps_run(stage.source)
        await asyncio.sleep(0.05)
        assert steps_run(stage.source) == ran


@plays
async def test_earlier_runs_in_the_record_are_not_mistaken_for_this_one():
    anything = chapter(text())
    stage = Stage(Engine(at=40), anything)
    viewer = await stage.enter()
    told = await stage.press(viewer)
    assert told["sentence"] == "Step 40." and stage.source.at == 41


@plays
async def test_comparing_needs_the_engines_word_and_trying_needs_the_engine():
    beat = text(until=until_step(1), compare=("mode", "paged", "none"), try_this=TryThis("chapter.one.try", "mode", "none"))
    for compares in (False, True):
        engine = Engine()
        engine.compares = compares
        stage = Stage(engine, chapter(beat))
        viewer = await stage.enter()
        told = await stage.press(viewer)
        assert ("needs the live engine" in told["note"]) is not compares
        assert (("compare", {"knob": "mode", "values": ["paged", "none"]}) in engine.said) is compares
        assert told["try"] == {"text": "Turn it.", "knob": "mode", "value": "none"}


@plays
async def test_a_comparison_that_is_refused_leaves_the_beat_standing():
    engine = Engine()
    engine.compares, engine.refuses = True, "compare"
    stage = Stage(engine, chapter(text(until=until_step(1), compare=("mode", "paged", "none"))))
    viewer = await stage.enter()
    told = await stage.press(viewer)
    assert told["sentence"] == "Step 1." and b"Not now." in viewer.outbox[-1]


def lobby(base, trace: Trace | None = None) -> Lobby:
    trace = make_steps(12) if trace is None else trace
    return Lobby(base, Shelf(lambda content: trace, lambda preset: trace))


@plays
async def test_an_engine_that_dies_on_the_way_is_replaced_by_the_recording():
    engine = Engine()
    engine.dies_at = 5
    stage = Stage(lobby(engine), THREE)
    viewer = await stage.enter(room="main")
    await stage.hub.act(viewer, "live", {})
    assert not (await stage.press(viewer))["recorded"]
    told = await stage.press(viewer)
    assert told["recorded"] and told["phase"] == "asked" and told["predict"]["question"] == "After 5?"
    assert stage.source.status(viewer.room)["cursor"] == 5


@plays
async def test_a_newcomer_who_presses_goes_to_the_engine_and_a_link_stays_on_the_recording():
    for link in (False, True):
        stage = Stage(lobby(Engine()), THREE)
        viewer = await stage.enter()
        assert viewer.room.startswith("~")
        if link:
            await stage.hub.act(viewer, "chapter", {"name": "one", "beat": 2, "link": True})
            told = await stage.arrived(viewer)
            assert viewer.room.startswith("~") and told["recorded"] and told["beat"] == 2 and told["sentence"] == "Step 9."
            assert stage.source.status(viewer.room)["cursor"] == 9
        else:
            assert not (await stage.press(viewer))["recorded"] and viewer.room == "main"


@plays
async def test_a_recording_is_played_to_the_moment_and_back():
    stage = Stage(RecordingSource(make_steps(12)), THREE)
    viewer = await stage.enter()
    cursor = lambda: stage.source.status(viewer.room)["cursor"]  # noqa: E731
    for expected in (3, 5, 7, 9):
        told = await stage.press(viewer)
        assert cursor() == expected and told["go"]["step"] is None and "try" not in told
    await stage.press(viewer, -1)
    assert cursor() == 7 and stage.source.status(viewer.room)["state"] == "paused"


@plays
async def test_a_reload_finds_the_chapter_where_it_was():
    stage = Stage(Engine(), THREE)
    viewer = await stage.enter(person="p" * 24)
    await stage.press(viewer)
    await stage.hub.leave(viewer)
    again = await stage.enter(person="p" * 24)
    assert stage.told(again)["sentence"] == "Step 3."


@plays
async def test_who_leaves_on_the_way_stops_the_walk():
    stage = Stage(Engine(), THREE, speed=Speed(steps_per_s=50, max_steps_per_s=50))
    viewer = await stage.enter()
    await stage.hub.act(viewer, "beat", {"by": 1})
    await stage.hub.leave(viewer)
    await asyncio.sleep(0.2)
    assert steps_run(stage.source) <= 1


@pytest.mark.parametrize("args", [{"name": "nowhere"}, {}, {"name": ["x"]}])
def test_an_unknown_chapter_is_refused(args):
    async def scenario():
        stage = Stage(Engine(), THREE)
        with pytest.raises(Refused, match="no chapter of that name"):
            await stage.hub.act(await stage.enter(), "chapter", args)

    asyncio.run(scenario())


@plays
async def test_hostile_arguments_are_harmless():
    stage = Stage(Engine(), THREE)
    viewer = await stage.enter()
    await stage.hub.act(viewer, "chapter", {"name": "one", "beat": 10**9, "link": "yes"})
    assert (await stage.arrived(viewer))["beat"] == 2
    for by in (None, "x", 10**9, [1], True):
        await stage.hub.act(viewer, "beat", {"by": by})
        await stage.arrived(viewer)


@plays
async def test_guests_vote_and_only_the_host_turns_the_page():
    stage = Stage(Engine(), THREE)
    people = People(stage.hub)
    host = await stage.enter()
    await stage.hub.act(host, "people_claim", {})
    guest = await stage.enter(join=people.part(host)["links"]["watch"])
    await stage.press(host)
    await stage.press(host)
    for name, args in (("beat", {"by": 1}), ("chapter", {"name": "one"}), ("chapter_end", {})):
        with pytest.raises(Refused, match="Only the host"):
            await stage.hub.act(guest, name, args)
    await stage.hub.act(guest, "guess", {"mark": "page:7"})
    assert stage.told(host)["predict"]["votes"] == 1 and stage.told(host)["phase"] == "asked"
    await stage.press(host)
    assert stage.told(guest)["predict"]["verdict"] == "right" and stage.told(host)["predict"]["agreed"] == 1


@plays
async def test_the_shipped_chapters_play_on_the_shipped_recordings():
    """Every beat of every chapter has its moment, every question its answer."""
    traces = {path.name.split("-")[0]: load(path) for path in sorted(RECORDINGS.glob("*.glass"))}
    chapters = load_chapters()
    stage = Stage(Lobby(RecordingSource(make_steps(3)), Shelf(None, traces.get)), *chapters.values())
    viewer = await stage.enter()
    seen = []
    while True:
        told = await stage.press(viewer)
        where = told["chapter"], told["beat"]
        if told["phase"] == "asked":
            continue
        if seen and seen[-1] == where:
            break
        seen.append(where)
        beat = chapters[told["chapter"]].beats[told["beat"]]
        if told["note"] == NOT_RECORDED and (beat.job or (beat.predict and beat.predict.job)):
            continue  # an old recording
        assert told["sentence"] and (told["phase"] == "here" or told["predict"]["right"]), (where, told.get("note"))
    assert seen == [(name, beat) for name, c in chapters.items() for beat in range(len(c.beats))]
