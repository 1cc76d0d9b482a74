"""A step's clocks as a picture: stacked to scale, overlap where it was, what no clock saw in words."""

from __future__ import annotations

import numpy as np
import pytest

from engine.recording import FINER_CLOCKS
from engine.trace import TABLES, Trace
from tests.viz.scenarios import scenario, some_steps
from tests.viz.valid import check_frame
from viz.registry import load_views
from viz.theme import round_up
from viz.view import ViewState, render
from viz.views.step_anatomy import HOST, anatomy, spans_of, window

VIEW = load_views()["step_anatomy"]
SIZES = (
    (960, 540),
    (732, 426),
    (484, 403),
    (1242, 426),
    (732, 306),
    (484, 283),
    (1882, 839),
    (360, 437),
    (1242, 255),
    (390, 300),
    (200, 120),
)


def with_clocks(name: str = "busy", device: str = "cuda", **columns: object) -> Trace:
    """A real run with clocks of our own: a number a column, or one a step."""
    trace = scenario(name)
    tables = {table: getattr(trace, table) for table in TABLES}
    steps = tables["steps"] = trace.steps.copy()
    for column, value in columns.items():
        steps[column] = value
    meta = {**trace.meta, "config": {"source": {"device": device}}}
    return Trace(tables, trace.sequences, trace.token_texts, meta, trace.artifacts, trace.errors)


def on_gpu(**columns: object) -> Trace:
    """Serial: each step begins when the one before has been recorded."""
    n = len(scenario("busy").steps)
    clocks = {"schedule_us": 40, "build_us": 60, "run_us": 80, "settle_us": 400, "commit_us": 50, "text_us": 20, "record_us": 10}
    start = np.arange(n) * 640
    return with_clocks(start_us=start, settle_at_us=start + 180, gpu_us=450, sample_us=0, graph_size=4, **clocks, **columns)


def ahead() -> Trace:
    """Run-ahead: step t + 1 is launched before step t is waited for."""
    n = len(scenario("ahead").steps)
    start = 500 * np.arange(n)
    clocks = {"schedule_us": 40, "build_us": 60, "run_us": 80, "settle_us": 250, "commit_us": 60, "text_us": 20, "record_us": 10}
    return with_clocks("ahead", start_us=start, settle_at_us=start + 500 + 180, gpu_us=450, sample_us=0, graph_size=4, **clocks)


def draw(trace: Trace, step: int = 9, size: tuple[int, int] = (1242, 700)):
    state = ViewState(step=step, size=size)
    frame = render(VIEW, trace, state)
    check_frame(frame, state)
    return frame


def texts(frame) -> str:
    return " ".join(label.text for label in frame.labels)


@pytest.mark.parametrize("theme", ["light", "projector"])
@pytest.mark.parametrize("make", [on_gpu, ahead, lambda: with_clocks(device="cpu")], ids=["gpu", "ahead", "cpu"])
def test_it_is_a_valid_frame_at_every_size(make, theme: str) -> None:
    trace = make()
    for size in SIZES:
        for step in some_steps(trace, 3):
            state = ViewState(size=size, theme=theme, step=step)
            check_frame(render(VIEW, trace, state), state)


def test_parts_are_stacked_to_scale_in_their_order_and_add_up_to_the_step() -> None:
    trace = on_gpu()
    it = anatomy(trace, trace.step(9).step)
    assert it.parts == {"schedule": 40, "build": 60, "launch": 80, "sync": 400, "detokenise": 20, "commit": 30, "record": 10}
    assert it.total == 640 and (it.gpu, it.ahead, it.longest) == (450, 0, "sync")
    stacks = {s.name: s for s in draw(trace).series if s.name in HOST}
    last = {name: (float(s.base[-1]), float(s.y[-1])) for name, s in stacks.items()}
    assert all(last[a][1] == pytest.approx(last[b][0]) for a, b in zip([p for p in HOST if p in last], [p for p in HOST if p in last][1:]))
    whole = last["schedule"][0] - last["record"][1]
    assert all((y0 - y1) / whole == pytest.approx(it.parts[name] / 640, abs=0.01) for name, (y0, y1) in last.items())
    gpu = next(s for s in draw(trace).series if s.name == "gpu")
    assert (float(gpu.base[-1]) - float(gpu.y[-1])) / whole == pytest.approx(450 / 640, abs=0.01) and round_up(640) == 800


def test_the_gpus_time_is_drawn_at_the_same_time_as_the_hosts() -> None:
    trace = on_gpu()
    spans, end = spans_of(trace, anatomy(trace, trace.step(9).step))
    assert ("gpu", 100, 550) in spans and ("sync", 180, 580) in spans and end == 640


def test_with_run_ahead_other_steps_work_is_drawn_between_launch_and_wait() -> None:
    trace = ahead()
    it = anatomy(trace, trace.step(5).step)
    spans, end = spans_of(trace, it)
    assert it.ahead == 500 and ("other", 180, 680) in spans and ("sync", 680, 930) in spans
    # the step before was waited for until 180 + 500 + 250 after its own start, 430 after this one's
    assert ("gpu", 430, 880) in spans and end == 1000
    assert "the host spent 500 µs on other steps" in draw(trace, 5).summary and "dotted: 500 µs" in texts(draw(trace, 5))


def test_without_run_ahead_nothing_lies_between() -> None:
    """Whatever the clocks' rounding leaves there."""
    late = (
        on_gpu(),
        with_clocks("ahead", start_us=0, schedule_us=10, build_us=10, run_us=10, settle_at_us=36),
        with_clocks(settle_at_us=10**6),
    )
    assert all(anatomy(trace, trace.step(5).step).ahead == 0 for trace in late)
    assert not any(part == "other" for part, _, _ in spans_of(on_gpu(), anatomy(on_gpu(), on_gpu().step(9).step))[0])


def test_on_a_cpu_launching_and_computing_are_one_part() -> None:
    frame = draw(
        with_clocks(device="cpu", schedule_us=9, build_us=9, run_us=900, settle_us=2, commit_us=9, sample_us=100, text_us=3, gpu_us=0)
    )
    said = texts(frame)
    assert "launch = compute 800 µs" in said and "sample 100 µs" in said and "On a CPU launching and computing are one call" in said
    assert not any("gpu" in s.name for s in frame.series) and "GPU" not in said


def test_what_no_clock_saw_is_said() -> None:
    assert "Sampling is inside the CUDA graph" in texts(draw(on_gpu(), size=(1882, 839)))
    unwaited = with_clocks(run_us=9, settle_us=9, gpu_us=0, settle_at_us=30)
    assert "no clock saw how long the GPU took" in VIEW.summary(unwaited, ViewState(step=9))
    assert "detokenising is in commit" not in texts(draw(on_gpu(), size=(1882, 839)))
    crowded = with_clocks(
        schedule_us=9, build_us=9, run_us=9, settle_us=9, commit_us=9, text_us=0, gpu_us=20, settle_at_us=30, graph_size=0
    )
    assert "With so many tokens detokenising is in commit" in VIEW.summary(crowded, ViewState(step=9))


def test_an_old_recording_says_that_it_has_the_coarse_clocks_only() -> None:
    old = with_clocks(**dict.fromkeys(FINER_CLOCKS, 0), schedule_us=9, build_us=9, run_us=9, settle_us=30, commit_us=9)
    said = VIEW.summary(old, ViewState(step=9))
    assert "coarse clocks only" in said and "detokenise" not in [p for p in anatomy(old, old.step(9).step).parts]


def test_the_shown_step_is_the_last_bar_and_each_bar_is_a_mark() -> None:
    frame = draw(on_gpu(), 9)
    steps = [m for m in frame.marks if m.id.startswith("step:")]
    assert steps[-1].id == "step:9" and steps[-1].outline == "accent" and [m.outline for m in steps[:-1]] == [None] * (len(steps) - 1)
    assert [a.step_id for a in window(on_gpu(), 9)] == [int(m.id[5:]) for m in steps]
    assert {m.id for m in frame.marks if m.id.startswith("part:")} == {
        "part:schedule", "part:build", "part:launch", "part:sync", "part:detokenise", "part:commit", "part:record", "part:gpu",
    }  # fmt: skip
