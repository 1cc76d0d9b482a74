"""Beats and answers that stand on what a job makes: done once and at the beat's step, waited for, missing in plain words."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from engine.recording import load
from engine.trace import Trace
from tests.viz.kernel_scenarios import ceilings, profile
from tests.viz.test_tour import FAST, PREDICT, RECORDINGS, Engine, Stage, chapter, plays, steps_run, text, until_step
from tests.viz.tile_scenarios import decode
from viz.chapter import Beat, Predict, moment
from viz.stage import walk
from viz.stage.lobby import Lobby, Shelf
from viz.stage.source import RecordingSource
from viz.tiles import tile_traces
from viz.view import OFFERED_JOBS
from viz.words.catalogue import words

NOT_RECORDED, NOT_MADE = (words("en")(f"ui.chapter.{key}") for key in ("notRecorded", "notMade"))
CEILINGS = text(until=until_step(2), job=("ceilings", {}))
PROFILE = Beat("chapter.one.text", ("blocks",), until=until_step(2), fields=lambda trace, step: {"step": step}, job=("profile", {}))


class Lab(Engine):
    """An engine whose jobs make something; `broken`: they end and have made nothing."""

    def __init__(self, broken: bool = False, hangs: bool = False) -> None:
        super().__init__()
        self.made: list[object] = []
        self.broken, self.hangs, self.waits = broken, hangs, False

    def trace(self, room: str) -> Trace:
        it = super().trace(room)
        it.artifacts = tuple(self.made)
        return it

    def status(self, room: str) -> dict:
        busy = {"text": "Waiting for the next step", "fraction": 0.1} if self.waits or self.hangs else None
        return super().status(room) | {"progress": busy}

    async def command(self, room: str, viewer: str, name: str, args: Mapping[str, object]) -> dict:
        at, answer = self.at, await super().command(room, viewer, name, args)
        if name in OFFERED_JOBS and answer["ok"] and not self.broken and not self.hangs:
            self.waits = name == "profile"
            self.made += [ceilings()] if name == "ceilings" else []
        elif name == "step" and self.waits and self.at > at:
            self.made.append(profile(at, 3, 1))
            self.waits = False
        return answer


def jobs_of(engine: Engine) -> list[tuple[str, dict]]:
    return [said for said in engine.said if said[0] in OFFERED_JOBS]


@plays
async def test_a_job_is_done_at_the_beats_step_and_once():
    engine = Lab()
    stage = Stage(engine, chapter(CEILINGS, CEILINGS))
    viewer = await stage.enter()
    told = await stage.press(viewer)
    assert (told["phase"], told["sentence"], engine.at) == ("here", "Step 2.", 3)
    assert (await stage.press(viewer))["sentence"] == "Step 2."
    await stage.press(viewer, -1)
    assert jobs_of(engine) == [("ceilings", {})]


@plays
async def test_tiles_are_asked_for_with_the_step_and_the_sequence_that_is_selected():
    engine = Lab(broken=True)
    beat = text(until=until_step(2), select=lambda trace, step: "seq:0", job=("tiles", {"block_n": 16, "splits": 1}))
    stage = Stage(engine, chapter(beat))
    await stage.press(await stage.enter())
    assert jobs_of(engine) == [("tiles", {"step": 2, "layer": 0, "seq_id": 0, "block_n": 16, "splits": 1})]


@plays
async def test_a_profile_is_of_the_next_step_and_the_beat_stands_there():
    engine = Lab()
    stage = Stage(engine, chapter(PROFILE))
    told = await stage.press(await stage.enter())
    assert (told["sentence"], told["at"], engine.at, steps_run(engine)) == ("Step 3.", 3, 4, 4)


@plays
async def test_an_answer_waits_for_its_job_and_may_be_of_the_same_step():
    answer = Predict(
        "chapter.one.ask", ("page",), lambda trace, asked, decided: frozenset({f"page:{decided}"}), "chapter.one.reveal",
        fields=lambda trace, asked: {"asked": asked}, until=None, found=lambda trace, asked, decided: {"step": decided},
        job=("ceilings", {}), views=("tokens",), select=lambda trace, asked, decided: "page:2",
    )  # fmt: skip
    engine = Lab()
    stage = Stage(engine, chapter(text(until=until_step(2), predict=answer)))
    stage.hub.views["tokens"] = stage.hub.views["blocks"]
    viewer = await stage.enter()
    told = await stage.press(viewer)
    assert told["phase"] == "asked" and told["go"]["views"] == ["blocks"] and not jobs_of(engine)
    told = await stage.press(viewer)
    assert (told["phase"], told["predict"]["right"], told["predict"]["reveal"]) == ("revealed", ["page:2"], "It was 2.")
    assert (told["go"]["views"], told["go"]["select"], steps_run(engine)) == (["tokens"], "page:2", 3)


@pytest.mark.parametrize("how", ["refused", "broken", "hangs"])
def test_what_cannot_be_made_is_said_and_the_talk_goes_on(how: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(walk, "JOB_S", 0.5)

    @plays
    async def scenario():
        engine = Lab(broken=how == "broken", hangs=how == "hangs")
        engine.refuses = "ceilings" if how == "refused" else None
        late = text(until=until_step(4), predict=PREDICT)
        stage = Stage(engine, chapter(text(until=until_step(2), job=("ceilings", {}), predict=PREDICT), late))
        viewer = await stage.enter()
        told = await stage.press(viewer)
        assert (told["phase"], told["note"]) == ("here", NOT_MADE) and "sentence" not in told and "predict" not in told
        assert (b"Not now." if how == "refused" else b"could not be measured") in b"".join(viewer.outbox)
        assert (await stage.press(viewer))["sentence"] == "Step 4."

    scenario()


@plays
async def test_an_answer_that_cannot_be_made_is_left_open():
    engine = Lab()
    engine.refuses = "profile"
    question = Predict("chapter.one.ask", ("page",), PREDICT.answer, "chapter.one.reveal", fields=PREDICT.fields, job=("profile", {}))
    stage = Stage(engine, chapter(text(until=until_step(2), predict=question), text(until=until_step(6))))
    viewer = await stage.enter()
    assert (await stage.press(viewer))["phase"] == "asked"
    told = await stage.press(viewer)
    assert (told["phase"], told["note"]) == ("revealed", NOT_MADE) and "right" not in told["predict"]
    assert (await stage.press(viewer))["sentence"] == "Step 6."


@pytest.mark.parametrize("brings", [False, True])
def test_a_recording_shows_what_it_brings_and_says_what_it_does_not(brings: bool):
    @plays
    async def scenario():
        trace = load(RECORDINGS / "ragged-h200.glass")
        trace.artifacts = (ceilings(), profile(3, 1, 2)) if brings else ()
        source = Lobby(RecordingSource(trace), Shelf(lambda content: trace, lambda preset: trace))
        stage = Stage(source, chapter(CEILINGS, PROFILE), speed=FAST)
        viewer = await stage.enter()
        for said in ("Step 2.", "Step 3."):
            told = await stage.press(viewer)
            assert told["recorded"] and told["phase"] == "here"
            assert told.get("sentence") == (said if brings else None) and told["note"] == ("" if brings else NOT_RECORDED)
        assert stage.source.status(viewer.room)["cursor"] == (3 if brings else 2)

    scenario()


def test_tiles_belong_to_a_job_by_step_kernel_blocks_sequence_and_splits():
    it = tile_traces(decode())[-1]
    trace = Trace(artifacts=(it,))
    same = {"kernel": it.kernel, "block_n": it.block_n, "splits": it.num_splits}
    assert moment(trace, ("tiles", {}), it.step_id) == moment(trace, ("tiles", same), it.step_id, f"seq:{it.row_seq_id}") == it.step_id
    for other in ({"block_n": it.block_n * 2}, {"splits": 1 if it.num_splits > 1 else 4}, {"kernel": "other"}, {"layer": it.layer + 1}):
        assert moment(trace, ("tiles", same | other), it.step_id) is None
    assert moment(trace, ("tiles", same), it.step_id + 1) is None
    assert moment(trace, ("tiles", same), it.step_id, f"seq:{it.row_seq_id + 99}") is None


def test_a_profile_is_looked_for_in_the_next_few_steps_only():
    trace = load(RECORDINGS / "ragged-h200.glass")
    trace.artifacts = (profile(8, 1, 2), profile(20, 1, 2))
    assert [moment(trace, ("profile", {}), step) for step in (3, 4, 7, 8, 19)] == [None, 8, 8, None, 20]
