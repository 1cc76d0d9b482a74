"""The comparison's picture and sentence say what was counted in both runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.recording import decode, encode
from engine.trace import Comparison, Trace
from tests.viz.scenarios import COMPARED, compared, scenario
from tests.viz.valid import check_frame
from viz.registry import load_views
from viz.view import ViewState, render

VIEW = load_views()["compare"]
SIZES = (
    (960, 540), (732, 426), (484, 403), (1242, 426), (732, 306), (484, 283), (1116, 786), (1882, 839), (360, 437), (1242, 255), (390, 300),
    (200, 120),
)  # fmt: skip


def comparison(kind: str) -> Comparison:
    return compared(kind).artifacts[-1]


def with_runs(kind: str, **changes: object) -> Trace:
    trace = compared(kind)
    return Trace({"steps": trace.steps}, trace.sequences, {}, trace.meta, (replace(comparison(kind), **changes),))


@pytest.mark.parametrize("theme", ["light", "dark", "projector"])
@pytest.mark.parametrize("kind", COMPARED)
def test_every_kind_is_a_valid_frame_at_every_size(kind: str, theme: str) -> None:
    for size in SIZES:
        state = ViewState(size=size, theme=theme)
        frame = render(VIEW, compared(kind), state)
        check_frame(frame, state)
        assert frame.marks or size[1] < 320 or theme == "projector"


def test_without_a_comparison_it_says_how_to_make_one() -> None:
    frame = render(VIEW, scenario("busy"), ViewState())
    check_frame(frame, ViewState())
    assert "inspector" in frame.summary and not frame.marks
    assert {ask.answer(scenario("busy"), ViewState()) for ask in VIEW.asks} == {""}


def test_the_sentence_says_the_counted_difference() -> None:
    one, other = comparison("none").runs
    few, many = (sum(work[3] for work in run.works) for run in (one, other))
    said = VIEW.summary(compared("none"), ViewState())
    assert said.startswith(f"Without a cache: {many:,} tokens computed instead of {few:,} ({many / few:.1f}×), ")
    assert said.endswith("Both wrote the same tokens.")
    assert VIEW.summary(compared("swapped"), ViewState()).startswith("With paged blocks: ")


def test_tokens_that_differ_are_said_and_named() -> None:
    same = tuple(name != "C" for name in comparison("none").names)
    assert "They did not write the same tokens: C differ" in VIEW.summary(with_runs("none", same=same), ViewState())


def test_both_runs_share_one_axis_of_time_and_the_badge_names_the_device() -> None:
    frame = render(VIEW, compared("static"), ViewState())
    assert (
        frame.axes["xaxis2"]["range"] == frame.axes["xaxis3"]["range"] and frame.axes["xaxis2"]["domain"] == frame.axes["xaxis3"]["domain"]
    )
    assert frame.axes["yaxis4"]["range"] == frame.axes["yaxis5"]["range"]
    assert [badge.kind for badge in frame.badges] == ["measured"] and "test" in frame.badges[0].text


def test_a_row_is_its_request_in_both_runs() -> None:
    trace = compared("none")
    marks = [mark for mark in render(VIEW, trace, ViewState()).marks]
    ids = [f"seq:{i}" for i in trace.sequences]
    assert [m.id for m in marks if m.axes == "x2y2"] == [m.id for m in marks if m.axes == "x3y3"] == ids


def test_textures_say_what_a_step_was() -> None:
    upper, lower = render(VIEW, compared("none"), ViewState()).rasters
    hatches = [{r.paints[v].hatch for v in np.unique(r.values) if v != 255} for r in (upper, lower)]
    assert "cross" in hatches[1] and "cross" not in hatches[0] and "dots" in hatches[0] and "diagonal" in hatches[1]


def test_the_newest_comparison_is_shown() -> None:
    old, new = compared("none"), compared("static")
    trace = Trace({"steps": new.steps}, new.sequences, {}, new.meta, (*old.artifacts, *new.artifacts))
    assert VIEW.summary(trace, ViewState()) == VIEW.summary(new, ViewState())


@pytest.mark.parametrize("kind", COMPARED)
def test_a_recording_keeps_the_picture(kind: str) -> None:
    back = decode(encode(compared(kind)))
    assert back.artifacts == compared(kind).artifacts and encode(back) == encode(decode(encode(back)))
    one, again = render(VIEW, compared(kind), ViewState()), render(VIEW, back, ViewState())
    assert one.labels == again.labels and one.marks == again.marks
