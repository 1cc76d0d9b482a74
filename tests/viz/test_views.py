"""Every view on every scenario: valid frames, the same bytes twice, texts that never meet, true asks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.trace import Trace
from tests.factories import add, make_core, prompt_of, trace_of
from tests.viz import example_view
from tests.viz.scenarios import MAKERS, own_traces, scenario, some_steps
from tests.viz.valid import check_frame, check_labels, frame_bytes
from viz.registry import load_views
from viz.view import Badge, Frame, Label, View, ViewState, render

VIEWS = load_views() | {"example_view": example_view.VIEW}
SIZES = ((960, 540), (620, 430), (1240, 560))
THEMES = ("light", "dark", "projector")
PANELS = {  # drawing areas of the stage: two panels, one, a drawer beside them, a phone
    "1280x720": [(732, 426), (484, 403), (1242, 426), (560, 426)],
    "1280x600": [(732, 306), (484, 283), (1242, 306)],
    "1920x1080": [(1116, 786), (740, 786), (1882, 839)],
    "390x844": [(360, 437)],
    "projector": [(732, 375), (484, 342), (1242, 375), (1242, 255), (1116, 735), (740, 704), (360, 408)],
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_draws_every_trace_as_a_valid_frame(view: str, name: str) -> None:
    trace = scenario(name)
    for step in some_steps(trace):
        state = ViewState(step=step)
        check_frame(render(VIEWS[view], trace, state), state)


@pytest.mark.parametrize("view", VIEWS)
def test_the_same_input_gives_the_same_bytes(view: str) -> None:
    for name in ("busy", "preempted", "crowded", "hostile"):
        first, again = MAKERS[name](), scenario(name)
        for step in some_steps(again, 4):
            state = ViewState(step=step)
            once = frame_bytes(render(VIEWS[view], again, state))
            assert once == frame_bytes(render(VIEWS[view], again, state))
            assert len(first.steps) == len(again.steps)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("view", VIEWS)
def test_texts_stay_apart_and_inside_the_panel(view: str, size: tuple[int, int], theme: str) -> None:
    for name in ("busy", "preempted", "crowded", "large_pool", "slabs", "hostile", "empty", "long"):
        trace = scenario(name)
        for step in some_steps(trace, 5):
            state = ViewState(step=step, size=size, theme=theme)
            check_labels(render(VIEWS[view], trace, state), state)


@pytest.mark.parametrize("screen", PANELS)
@pytest.mark.parametrize("view", VIEWS)
def test_on_every_screen_a_frame_keeps_all_rules(view: str, screen: str) -> None:
    for size in PANELS[screen]:
        for theme in ("projector",) if screen == "projector" else ("light", "dark"):
            for name, step in (("busy", 9), ("preempted", 42), ("crowded", 6), ("long", 150)):
                state = ViewState(step=step, size=size, theme=theme)
                frame = render(VIEWS[view], scenario(name), state)
                check_frame(frame, state)
                small = theme == "projector" or size[1] < 320
                assert frame.marks or small or own_traces(view), f"{view} is only a sentence at {size}"
            for trace in own_traces(view):
                state = ViewState(size=size, theme=theme)
                check_frame(render(VIEWS[view], trace, state), state)


def test_the_rules_are_kept_by_check_frame_itself() -> None:
    """Each broken in turn: a check that passes everything would be worth nothing."""
    state = ViewState(step=9)
    good = render(VIEWS["batching"], scenario("busy"), state)
    check_frame(good, state)
    mark = good.marks[0]
    broken = (
        {"labels": (replace(good.labels[0], color="grid"),)},
        {"labels": (good.labels[0], replace(good.labels[0], x=good.labels[0].x + 3))},
        {"labels": (replace(good.labels[0], size=15),)},
        {"marks": (replace(mark, outline="grid"),)},
        {"marks": (replace(mark, x0=mark.x1),)},
        {"marks": (replace(mark, x0=2000, x1=2010),)},
        {"marks": (mark, replace(mark, id="seq:98"), replace(mark, id="seq:99"))},  # on top of each other
        {"badges": ()},
    )
    for changes in broken:
        with pytest.raises(AssertionError):
            check_frame(replace(good, **changes), state)


@pytest.mark.parametrize("size", [(200, 120), (390, 300), (4000, 3980)], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_odd_panel_sizes_still_give_valid_frames(view: str, size: tuple[int, int]) -> None:
    for name in ("busy", "crowded", "large_pool"):
        state = ViewState(size=size, step=12)
        check_frame(render(VIEWS[view], scenario(name), state), state)


@pytest.mark.parametrize(
    "selection", ["seq:2", "seq:99", "page:3", "page:9999", "token:2:12", "query:2:9", "token:2", "x", "seq:", "seq:²", "page:-1"]
)
@pytest.mark.parametrize("view", VIEWS)
def test_any_selection_is_survived(view: str, selection: str) -> None:
    for step in (0, 3, 7, 12):
        state = ViewState(step=step, selection=selection)
        check_frame(render(VIEWS[view], scenario("busy"), state), state)


@pytest.mark.parametrize("view", VIEWS)
def test_every_mark_can_be_selected_and_then_the_frame_is_valid(view: str) -> None:
    trace = scenario("busy")
    for step in (2, 12):
        for mark in render(VIEWS[view], trace, ViewState(step=step)).marks[:40]:
            state = ViewState(step=step, selection=mark.id)
            check_frame(render(VIEWS[view], trace, state), state)


@pytest.mark.parametrize("view", VIEWS)
def test_each_view_ships_five_asks_with_short_answers(view: str) -> None:
    asks = VIEWS[view].asks
    assert len(asks) == 5 and len({a.question for a in asks}) == 5
    for name in ("busy", "preempted", "broken", "crowded"):
        trace = scenario(name)
        for step in some_steps(trace, 4):
            for ask in asks:
                if len(trace.step(trace.clamp(step)).works):
                    answer = ask.answer(trace, ViewState(step=step))
                    said = f"{ask.question!r} is answered {answer!r} at step {step} of {name!r}"
                    assert isinstance(answer, str) and len(answer) <= 20, f"{said}: a string of at most 20 characters is asked for"


@pytest.mark.parametrize("view", VIEWS)
def test_answers_differ_between_moments(view: str) -> None:
    """A question whose answer is always the same could be answered without the picture."""
    traces = own_traces(view) or [scenario(n) for n in ("busy", "preempted", "crowded", "long")]
    for ask in VIEWS[view].asks:
        answers = {ask.answer(t, ViewState(step=s)) for t in traces for s in (1, 4, 9) if len(t.rows("works", s, s))}
        assert len(answers - {""}) >= 2, f"{ask.question!r} is answered {answers} at every moment; ask what differs between steps"


@pytest.mark.parametrize("view", VIEWS)
def test_a_recording_says_so_and_other_traces_do_not(view: str) -> None:
    trace = scenario("busy")
    recorded = Trace(
        {"steps": trace.steps, "works": trace.works, "tokens": trace.tokens, "events": trace.events},
        trace.sequences, trace.token_texts, {**trace.meta, "source": "recording", "device": "H200", "date": "2026-11-30"},
    )  # fmt: skip
    said = [b for b in render(VIEWS[view], recorded, ViewState(step=3)).badges if b.kind == "recorded"]
    assert len(said) == 1 and "H200" in said[0].text and "2026-11-30" in said[0].text
    assert not [b for b in render(VIEWS[view], trace, ViewState(step=3)).badges if b.kind == "recorded"]


@pytest.mark.parametrize("view", VIEWS)
def test_an_empty_trace_gets_a_friendly_sentence(view: str) -> None:
    frame = render(VIEWS[view], Trace(), ViewState())
    assert "request A" in " ".join(label.text for label in frame.labels)


def test_a_view_is_never_asked_about_a_trace_without_steps() -> None:
    def asked(trace: Trace, state: ViewState):
        raise AssertionError("a view need not think of it")

    frame = render(View("x", "X", "?", asked, asked), Trace(), ViewState())
    check_frame(frame, ViewState())
    assert "request A" in frame.summary


def test_what_all_frames_share_is_filled_in() -> None:
    view = View("x", "An X", "?", lambda trace, state: Frame("y", badges=(Badge("state"),)), lambda trace, state: "nothing to see")
    frame = render(view, scenario("one_step"), ViewState())
    assert (frame.view, frame.title, frame.summary) == ("x", "An X", "nothing to see")


def test_a_broken_view_draws_its_own_error() -> None:
    def fails(trace: Trace, state: ViewState):
        raise ValueError("no such thing")

    frame = render(View("x", "X", "?", fails, lambda t, s: ""), scenario("one_step"), ViewState())
    assert "no such thing" in frame.error and "no such thing" in frame.summary


@pytest.mark.parametrize("view", VIEWS)
def test_user_text_reaches_labels_and_marks_only(view: str) -> None:
    frame = render(VIEWS[view], scenario("hostile"), ViewState())
    assert "onerror" not in repr(frame.axes) + repr(frame.legend) + repr(frame.title) + repr([r.name for r in frame.rasters])
    assert all("\u202e" not in label.text and "\x00" not in label.text for label in frame.labels)


@pytest.mark.parametrize("view", VIEWS)
def test_the_summary_is_short_and_differs_between_moments(view: str) -> None:
    """It is all that a person who cannot see the picture gets."""
    traces = own_traces(view) or [scenario("busy")]
    said = {VIEWS[view].summary(trace, ViewState(step=step)) for trace in traces for step in (1, 4, 9)}
    assert all(0 < len(text) < 2000 for text in said) and len(said) > 1, said


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_random_runs_give_valid_frames(data) -> None:
    pick = data.draw
    page_size = pick(st.sampled_from([4, 8, 16]))
    mode = pick(st.sampled_from(["paged", "paged", "contiguous", "none"]))
    core = make_core(
        pages=pick(st.integers(8, 40)), page_size=page_size, mode=mode, max_num_seqs=pick(st.integers(1, 9)),
        max_num_batched_tokens=pick(st.integers(1, 48)), batching=pick(st.sampled_from(["continuous", "static"])),
        run_ahead=pick(st.integers(0, 1)), prefix_caching=pick(st.booleans()),
    )  # fmt: skip
    shared = prompt_of(2 * page_size, 77)
    for _ in range(pick(st.integers(1, 9))):
        prompt = prompt_of(pick(st.integers(1, 30)), pick(st.integers(0, 9)))
        prompt = (*shared, *prompt)[: 8 * page_size - 2] if pick(st.booleans()) else prompt[: 8 * page_size - 2]
        add(core, prompt, pick(st.integers(1, 20)), n=pick(st.sampled_from([1, 1, 1, 2, 3])), temperature=0.7, seed=1)
        for _ in range(pick(st.integers(0, 6))):
            core.step()
        if pick(st.integers(0, 9)) == 0:
            core.abort(pick(st.integers(1, 5)))
    for _ in range(pick(st.integers(0, 30))):
        core.step()
    trace = trace_of(core)
    size, theme = pick(st.sampled_from(SIZES)), pick(st.sampled_from(THEMES))
    for step in some_steps(trace, 3):
        state = ViewState(step=step, size=size, theme=theme, selection=pick(st.sampled_from([None, "seq:1", "page:2", "token:1:3"])))
        for view in VIEWS.values():
            check_frame(render(view, trace, state), state)


def test_a_view_reads_only_what_was_there_at_its_step() -> None:
    """Later steps must not change an earlier picture."""
    trace = scenario("busy")
    for at in (3, 8, 13):
        cut = {}
        for name in ("steps", "works", "tokens", "waits", "preempts", "finishes", "texts"):
            rows = getattr(trace, name)
            cut[name] = rows[rows["step_id"] <= at]
        cut |= {"events": trace.events, "keyframes": trace.keyframes, "text_bytes": trace.text_bytes}
        earlier = Trace(cut, trace.sequences, trace.token_texts, trace.meta, (), trace.errors)
        for view in VIEWS.values():
            now, then = render(view, trace, ViewState(step=at)), render(view, earlier, ViewState(step=at))
            assert [label.text for label in now.labels] == [label.text for label in then.labels], view.name
            assert all(np.array_equal(a.values.shape, b.values.shape) for a, b in zip(now.rasters, then.rasters))
            assert replace(now, rasters=(), series=(), marks=()).axes == then.axes


@pytest.mark.parametrize(("theme", "least"), [("light", 16), ("projector", 22)])
def test_a_small_label_fails_by_its_text_its_size_and_the_least_size(theme: str, least: int) -> None:
    frame = Frame("x", "X", (Badge("state"),), labels=(Label("tiny", 100, 100, size=least - 1),))
    with pytest.raises(AssertionError, match=rf"'tiny' has {least - 1} px.* at least {least}"):
        check_labels(frame, ViewState(theme=theme))
