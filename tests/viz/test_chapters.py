"""Chapters on real runs: every beat is reached, every question can be asked, answered and guessed wrong, words are whole."""

from __future__ import annotations

import string
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks.record import record
from engine.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig, with_knob
from engine.recording import decode, encode, load
from engine.session import Session
from engine.trace import Trace
from engine.workloads import TEACHING, WORKLOADS, Workload
from tests.factories import VOCAB, add, make_core, prompt_of, trace_of
from viz import registry
from viz.chapter import Beat, Chapter, Predict, Said, decided, find, moment, next_step, say
from viz.chapters import super_sequence
from viz.registry import load_chapters, load_views, to_translate
from viz.view import ViewState, render
from viz.words.catalogue import words

CHAPTERS, VIEWS = load_chapters(), load_views()
RECORDINGS = Path(__file__).parents[2] / "assets" / "recordings"
SIZES = ((620, 430), (960, 540), (1240, 560))
MAX_SENTENCE = 150
LATER = frozenset({"compare"})  # Beat.compare brings it; no beat lists it
FOLDED = frozenset({"query", "area", "op", "row"})  # marks of which a small panel leaves some out

Runs = Callable[[str], tuple[Trace, int]]  # preset → its trace, and the step at which it began


# ---- a player that knows only finished traces ----


@dataclass(frozen=True)
class Scene:
    """A beat that was reached: `found` by its event, shown at `step`. `decided` is the step that answered its question.
    `missing`: what it stands on was not made in this run, so it says nothing."""

    index: int
    beat: Beat
    trace: Trace
    begin: int
    found: int
    step: int
    decided: int | None
    missing: bool = False

    @property
    def answer(self) -> frozenset[str]:
        return self.beat.predict.answer(self.trace, self.step, self.decided)


def play(chapter: Chapter, runs: Runs) -> list[Scene]:
    scenes, trace, at = [], None, 0
    for index, beat in enumerate(chapter.beats):
        if beat.preset or trace is None:
            trace, at = runs(beat.preset or chapter.preset)
        found = find(trace, beat.until, at)
        assert found is not None, f"beat {index} of {chapter.name} ({beat.text}) is not reached from step {at}"
        made = found if beat.job is None else moment(trace, beat.job, found, beat.select(trace, found))
        step = found if made is None else made
        answered = decided(trace, beat.predict, step) if beat.predict else None
        assert beat.predict is None or answered is not None, f"{beat.predict.question} is never answered"
        if made is not None and beat.predict and beat.predict.job:
            made = moment(trace, beat.predict.job, answered, beat.select(trace, step))
            answered = answered if made is None else made
        scenes.append(Scene(index, beat, trace, at, found, step, answered, made is None))
        at = step if answered is None else answered
    return scenes


def played(chapter: Chapter, runs: Runs) -> list[Scene]:
    """Those that can say something on these runs."""
    return [scene for scene in play(chapter, runs) if not scene.missing]


def sentences(chapter: Chapter, scene: Scene) -> list[str]:
    beat, trace, step = scene.beat, scene.trace, scene.step
    said = [say(chapter, beat.text, beat.fields(trace, step))]
    if beat.predict:
        said.append(say(chapter, beat.predict.question, beat.predict.fields(trace, step)))
        said.append(say(chapter, beat.predict.reveal, beat.predict.found(trace, step, scene.decided)))
    return said + ([say(chapter, beat.try_this.text, {})] if beat.try_this else [])


# ---- where runs come from ----


@cache
def recorded(preset: str) -> tuple[Trace, int]:
    trace = load(RECORDINGS / f"{preset}-h200.glass")
    return trace, trace.first_step


def play_script(core, workload: Workload, stretch: int) -> int:
    """As engine/loop.py: a line is added once so many steps have run, or when nothing is left to do. Returns how many
    steps it took."""
    lines, steps = sorted(workload.lines, key=lambda line: line.after_steps), 0
    while lines or core.has_work:
        while lines and (lines[0].after_steps <= steps or not core.has_work):
            line = lines.pop(0)
            text = f"{line.system} you are asked here and you answer now {line.text}".split()
            ids = tuple(1 + sum(word.encode()) * (i + 1) % (VOCAB - 1) for word in text for i in range(stretch))
            add(core, ids, line.max_tokens, line.priority, n=line.n, temperature=line.temperature, seed=7)
        core.step()
        steps += 1
    return steps


@cache
def fake(preset: str, stretch: int = 1, times: int = 1) -> tuple[Trace, int]:
    """The real scheduler with a stand-in model and `stretch` tokens a word; the last of several runs in one trace."""
    workload = WORKLOADS[preset]
    knobs = {**TEACHING, **workload.knobs}
    core = make_core(knobs.pop("num_pages"), knobs.pop("page_size"), max_model_len=2048, **knobs)
    took = []
    for _ in range(times):
        took.append(play_script(core, workload, stretch))
        for on in (False, True):  # what a player owes a chapter: nothing is cached when a preset starts
            core.reconfigure(with_knob(core.config, "prefix_caching", on))
    return trace_of(core), sum(took[:-1])


@pytest.fixture(scope="module")
def live(tiny_llama) -> Runs:
    """One session that runs the presets one after the other, as a person does: one trace, letters go on."""
    config = EngineConfig(ModelSource(str(tiny_llama), "cpu", "float32"), CacheConfig(num_pages=96), SchedulerConfig(8, 256))
    session = Session(config, own_process=False).start().wait_ready(60)
    began: dict[str, tuple[Trace, int]] = {}

    def run(preset: str) -> tuple[Trace, int]:
        if preset not in began:
            workload, last = WORKLOADS[preset], session.trace().last_step
            lines = tuple(replace(line, text=line.text[:700]) for line in workload.lines)  # here a byte is a token
            session.ask("knobs", knobs={"prefix_caching": False})
            session.run_workload(replace(workload, lines=lines))
            deadline = time.monotonic() + 60
            while not session.ask("is_idle", room="main"):
                assert time.monotonic() < deadline, f"{preset} did not end in time"
                time.sleep(0.02)
            began[preset] = session.trace(), 0 if last is None else last + 1
        return began[preset]

    yield run
    session.close()


@pytest.fixture(scope="module")
def made(tiny_llama) -> Runs:
    """Recordings as benchmarks/record.py makes them, of the tiny model on a CPU: with all that the chapters' jobs make."""
    config = EngineConfig(ModelSource(str(tiny_llama), "cpu", "float32"), CacheConfig(num_pages=96), SchedulerConfig(8, 256))
    session = Session(config, own_process=False).start().wait_ready(60)

    @cache
    def run(preset: str) -> tuple[Trace, int]:
        lines = tuple(replace(line, text=line.text[:700]) for line in WORKLOADS[preset].lines)
        failed: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(WORKLOADS, preset, replace(WORKLOADS[preset], lines=lines))
            content = encode(record(session, preset, failed))
        assert not failed and len(content) < 3 * 2**20
        trace = decode(content)
        return trace, trace.first_step

    yield run
    session.close()


SOURCES = ("recorded", "fake", "stretched", "again", "live", "made")


@pytest.fixture(params=SOURCES)
def runs(request) -> Runs:
    if request.param in ("live", "made"):
        return request.getfixturevalue(request.param)
    return {
        "recorded": recorded,
        "fake": fake,
        "stretched": lambda preset: fake(preset, stretch=2),
        "again": lambda preset: fake(preset, times=2),
    }[request.param]


def up_to(trace: Trace, step: int) -> Trace:
    """What a live engine knew after a step."""
    steps = trace.rows("steps", 0, step)
    end = int(steps["event_end"][-1]) if len(steps) else 0
    tables = {name: trace.rows(name, 0, step) for name in ("works", "tokens", "waits", "preempts", "finishes", "texts")}
    tables |= {"steps": steps, "events": trace.events[: end - int(trace.meta.get("event_base", 0))], "text_bytes": trace.text_bytes}
    tables["keyframes"] = trace.keyframes[trace.keyframes["event_at"] <= end]
    artifacts = tuple(a for a in trace.artifacts if getattr(a, "step_id", step) <= step)
    return Trace(tables, trace.sequences, trace.token_texts, trace.meta, artifacts)


# ---- what they say and ask ----


@pytest.mark.parametrize("chapter", CHAPTERS.values(), ids=CHAPTERS)
def test_every_beat_is_reached_and_says_a_whole_short_sentence(chapter: Chapter, runs: Runs) -> None:
    for scene in played(chapter, runs):
        for text in sentences(chapter, scene):
            assert 0 < len(text) <= MAX_SENTENCE and text[-1] in ".?", text
            assert not set("{}") & set(text) and "  " not in text and "()" not in text, text


@pytest.mark.parametrize("chapter", CHAPTERS.values(), ids=CHAPTERS)
def test_a_question_can_be_guessed_right_and_wrong_on_the_picture_that_asks_it(chapter: Chapter, runs: Runs) -> None:
    for scene in played(chapter, runs):
        predict = scene.beat.predict
        if predict is None:
            continue
        assert scene.decided == scene.step if predict.until is None else scene.decided > scene.step
        answer, view = scene.answer, VIEWS[scene.beat.views[0]]
        assert answer and all(mark.split(":")[0] in predict.marks for mark in answer)
        for size in SIZES:
            state = ViewState(step=scene.step, selection=scene.beat.select(scene.trace, scene.step), size=size)
            frame = render(view, scene.trace, state)
            marks = {mark.id for mark in frame.marks if mark.id.split(":")[0] in predict.marks}
            assert not frame.error and marks & answer, f"{predict.question}: no right mark at {size}"
            assert marks - answer, f"{predict.question}: no wrong mark at {size}"
            lost = {mark for mark in answer - marks if mark.split(":")[0] not in FOLDED}
            assert size != SIZES[1] or not lost, f"{predict.question}: {lost} is not drawn"


@pytest.mark.parametrize("chapter", CHAPTERS.values(), ids=CHAPTERS)
def test_a_live_engine_that_knows_no_later_step_tells_the_same_story(chapter: Chapter, runs: Runs) -> None:
    for scene in play(chapter, runs):
        beat, now = scene.beat, up_to(scene.trace, scene.step)
        assert find(up_to(scene.trace, scene.found), beat.until, scene.begin) == scene.found
        for before in scene.trace.rows("steps", scene.begin, scene.found - 1)["step_id"].tolist():
            assert not beat.until(up_to(scene.trace, before), before), f"{beat.text} would have come at step {before}"
        if scene.missing:
            continue
        assert beat.select(now, scene.step) == beat.select(scene.trace, scene.step)
        assert beat.fields(now, scene.step) == beat.fields(scene.trace, scene.step)
        if beat.predict is None:
            continue
        assert decided(now, beat.predict, scene.step) == (scene.step if beat.predict.until is None else None)
        assert beat.predict.fields(now, scene.step) == beat.predict.fields(scene.trace, scene.step)
        then = up_to(scene.trace, scene.decided)
        assert decided(then, beat.predict, scene.step) == decided(scene.trace, beat.predict, scene.step) <= scene.decided
        assert beat.predict.answer(then, scene.step, scene.decided) == scene.answer
        assert beat.predict.found(then, scene.step, scene.decided) == beat.predict.found(scene.trace, scene.step, scene.decided)


@pytest.mark.parametrize("chapter", CHAPTERS.values(), ids=CHAPTERS)
def test_who_is_selected_is_named_on_the_main_panel(chapter: Chapter, runs: Runs) -> None:
    for scene in played(chapter, runs):
        selected = scene.beat.select(scene.trace, scene.step)
        frames = [render(VIEWS[name], scene.trace, ViewState(step=scene.step, selection=selected)) for name in scene.beat.views]
        assert not any(frame.error for frame in frames)
        if selected is not None and not selected.startswith("seq:"):
            assert selected in [mark.id for mark in frames[0].marks]
        elif selected is not None:
            seq_id = int(selected.removeprefix("seq:"))
            assert scene.trace.name(seq_id) in frames[0].summary + " ".join(label.text for label in frames[0].labels)


def test_a_row_that_gets_no_token_is_one_of_the_step_that_was_asked_about() -> None:
    """Somebody who joined in the step that decides has no row in the one before it."""
    core = make_core(pages=40, page_size=8, max_num_seqs=4, max_num_batched_tokens=16)
    add(core, prompt_of(60, 1), 4)
    core.step()
    assert core.abort(1)
    add(core, prompt_of(60, 2), 4)
    core.step()
    trace = trace_of(core)
    asked, later = trace.steps["step_id"].tolist()[:2]
    silent = trace.step(later).works
    assert silent["samples"].tolist() == [0] and not len(trace.step(asked).works[trace.step(asked).works["seq_id"] == silent["seq_id"][0]])
    assert super_sequence._without_token(trace, asked, later) == frozenset()


@pytest.mark.parametrize("chapter", [c for c in CHAPTERS.values() if any(beat.job for beat in c.beats)], ids=lambda c: c.name)
def test_a_recording_brings_all_that_a_chapter_stands_on_and_an_old_one_says_what_it_lacks(chapter: Chapter, made: Runs) -> None:
    assert not any(scene.missing for scene in play(chapter, made))
    for scene in play(chapter, lambda preset: fake(preset)):
        needs = scene.beat.job or (scene.beat.predict and scene.beat.predict.job)
        assert scene.missing == (needs is not None)


def test_a_reveal_shows_the_tile_that_set_the_maximum(made: Runs) -> None:
    scene = next(s for s in play(CHAPTERS["flash_attention"], made) if s.beat.predict and "tile" in s.beat.predict.marks)
    shown = scene.beat.predict.select(scene.trace, scene.step, scene.decided)
    assert shown in scene.answer
    frame = render(VIEWS["flash_tiles"], scene.trace, ViewState(step=scene.decided, selection=shown))
    assert [m.id for m in frame.marks if m.outline == "accent" and m.id.startswith("tile:")] == [shown]


def test_attention_alone_has_more_to_do_for_a_later_chunk(made: Runs) -> None:
    """By the operations' own formulas: on a CPU there is one attention, on a GPU the prefill kernel."""
    scene = next(s for s in play(CHAPTERS["kernels"], made) if s.beat.text.endswith(".prefill"))
    assert {mark.split(":")[1] for mark in scene.answer} <= {"attention", "flash_prefill"}


def test_what_reads_weights_moves_right_with_more_writers_and_the_rest_stays(made: Runs) -> None:
    scene = next(s for s in play(CHAPTERS["kernels"], made) if s.beat.text.endswith(".decode"))
    named = {mark.split(":")[1] for mark in scene.answer}
    assert {"qkv", "o", "gate_up", "down", "lm_head"} <= named and not named & {"embedding", "silu_mul", "rope", "sample"}


# ---- what they are made of ----


def test_the_talk_has_seven_chapters_in_its_order() -> None:
    order = ["kv_cache", "continuous_batching", "super_sequence", "paged_attention", "engine_insides", "flash_attention", "kernels"]
    assert list(CHAPTERS)[:7] == order


@pytest.mark.parametrize("chapter", CHAPTERS.values(), ids=CHAPTERS)
def test_a_chapter_has_four_to_seven_beats_two_questions_and_a_knob(chapter: Chapter) -> None:
    assert 4 <= len(chapter.beats) <= 7
    assert sum(beat.predict is not None for beat in chapter.beats) >= 2
    assert any(beat.try_this for beat in chapter.beats)
    assert chapter.beats[0].preset in (None, chapter.preset)
    for beat in chapter.beats:
        assert 1 <= len(beat.views) <= 2 and set(beat.views) <= set(VIEWS) - LATER
        assert beat.predict is None or set(beat.predict.views) <= set(VIEWS) - LATER
    for preset in chapter.presets:
        assert preset in WORKLOADS and (RECORDINGS / f"{preset}-h200.glass").exists()


@pytest.mark.parametrize("chapter", CHAPTERS.values(), ids=CHAPTERS)
def test_a_knob_can_be_turned_and_is_not_there_yet(chapter: Chapter) -> None:
    preset = chapter.preset
    for beat in chapter.beats:
        preset = beat.preset or preset
        knobs = WORKLOADS[preset].knobs
        if beat.try_this:
            with_knob(EngineConfig(), beat.try_this.knob, beat.try_this.value)
            assert knobs[beat.try_this.knob] != beat.try_this.value
        if beat.compare:
            knob, usual, other = beat.compare
            with_knob(EngineConfig(), knob, usual), with_knob(EngineConfig(), knob, other)
            assert knobs[knob] == usual != other


@pytest.mark.parametrize("chapter", CHAPTERS.values(), ids=CHAPTERS)
def test_words_are_all_said_and_both_numbers_have_the_same_fields(chapter: Chapter) -> None:
    def fields(template: str) -> set[str]:
        return {name for _, name, _, _ in string.Formatter().parse(template) if name} - {"n"}

    used = {f"chapter.{chapter.name}.title", f"chapter.{chapter.name}.question"}
    for beat in chapter.beats:
        used.add(beat.text)
        used |= {beat.predict.question, beat.predict.reveal} if beat.predict else set()
        used |= {beat.try_this.text} if beat.try_this else set()
    assert used <= set(chapter.words), used - set(chapter.words)
    source = Path(registry.__file__).with_name("chapters") / f"{chapter.name}.py"
    parts = set(chapter.words) - used
    assert all(key.removeprefix(f"chapter.{chapter.name}.").split(".")[0] in source.read_text("utf-8") for key in parts)
    for template in chapter.words.values():
        assert isinstance(template, str) or fields(template[0]) == fields(template[1])
    title, question = (words("en", chapter.words)(f"chapter.{chapter.name}.{key}") for key in ("title", "question"))
    assert len(title) <= 40 and question.endswith("?") and len(question) <= 100


def test_a_language_is_asked_for_the_words_of_chapters() -> None:
    english = to_translate(VIEWS.values(), CHAPTERS.values())
    assert all(key in english for chapter in CHAPTERS.values() for key in chapter.words)


def test_names_and_parts_of_a_sentence_are_said_in_its_language() -> None:
    chapter = Chapter("x", 1, "ragged", (), {"chapter.x.a": ("{who}: {what}", "{who}: {what} ({n})"), "chapter.x.b": "{n} of {who}"})
    fields = {"who": ("A", "B"), "what": Said("chapter.x.b", {"n": 3, "who": ("C",)})}
    assert say(chapter, "chapter.x.a", {**fields, "n": 1}) == "A and B: 3 of C"
    assert say(chapter, "chapter.x.a", {**fields, "n": 2}) == "A and B: 3 of C (2)"


def test_an_event_that_has_not_come_is_not_found() -> None:
    trace = fake("ragged")[0]
    assert find(trace, lambda trace, step: False, 0) is None and find(Trace(), lambda trace, step: True, 0) is None
    predict = Predict("q", ("seq",), lambda *a: frozenset(), "r")
    assert predict.until is next_step
    assert decided(trace, predict, trace.last_step) is None and decided(trace, predict, trace.first_step) == trace.first_step + 1


@pytest.mark.parametrize(
    "source, said",
    [
        ("", "declares no CHAPTER"),
        ("CHAPTER = 3", "declares no CHAPTER"),
        ('CHAPTER = Chapter("other", 1, "ragged", ())', "must be the file's name"),
        ('CHAPTER = Chapter("odd", 1, "ragged", (), {"odd.title": "x"})', "must begin with 'chapter.odd.'"),
        ('CHAPTER = Chapter("odd", 1, "ragged", (), {"chapter.odd.title": "x"})', "lack 'chapter.odd.question'"),
    ],
)
def test_a_file_that_is_no_chapter_is_refused_with_the_reason(tmp_path, monkeypatch, source: str, said: str) -> None:
    package = tmp_path / "strange_chapters"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "odd.py").write_text(f"from viz.chapter import Chapter\n{source}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("strange_chapters", "strange_chapters.odd"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(LookupError, match=said):
        load_chapters("strange_chapters", [str(package)])
