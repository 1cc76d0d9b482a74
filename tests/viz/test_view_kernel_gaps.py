"""Kernel gaps: what is busy and what waits is counted again nanosecond by nanosecond; every state of a record is drawn."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from engine.jobs import JOBS
from engine.recording import decode, encode
from engine.trace import Trace
from tests.viz.kernel_scenarios import CPU, GPU, KERNEL_MAKERS, kernels
from tests.viz.scenarios import scenario
from tests.viz.timeline_scenarios import TIMELINE_MAKERS, cpu, off, on, run_on, timeline, timelines
from tests.viz.valid import check_frame, frame_bytes
from viz.chapter import moment
from viz.registry import load_views
from viz.timelines import Burst, brief_name, bursts
from viz.view import Frame, ViewState, render
from viz.views.kernel_gaps import CELLS, PLACES, busy_columns, density

VIEW = load_views()["kernel_gaps"]
SIZES = (
    (960, 540), (732, 426), (484, 403), (1242, 426), (732, 306), (484, 283), (1116, 786), (1882, 839), (360, 437), (1242, 255), (390, 300),
    (200, 120),
)  # fmt: skip
SELECTIONS = (
    None, "lens:off-3", "lens:on-15", "layer:on-2", "layer:off-99", "gap:off-50", "gap:cpu-40", "op:sample:on-46", "kernel:rms_norm",
    "lens:x", "gap:off-999999", "figure:gap", "seq:1",
)  # fmt: skip


def draw(trace: Trace, **changes: object) -> Frame:
    return render(VIEW, trace, ViewState(**{"step": 4, **changes}))


def texts(frame: Frame) -> str:
    return "\n".join(label.text for label in frame.labels)


def by_the_ns(b: Burst) -> np.ndarray:
    """bool [ns]: whether a kernel runs in each nanosecond of the steady part."""
    begin, end = int(b.start[b.first]), int(b.start[b.last])
    runs = np.zeros(end - begin, bool)
    for start, stop in zip(b.start.tolist(), b.stop.tolist()):
        runs[max(start - begin, 0) : max(stop - begin, 0)] = True
    return runs


OVERLAPPING = timeline(gap_ns=-1000, between_ns=20_000)  # as with programmatic dependent launch
ALL = {"off": off(), "on": on(), "cpu": cpu(layers=2, kernel_ns=9000), "overlapping": OVERLAPPING}


@pytest.mark.parametrize("theme", ["light", "dark", "projector"])
@pytest.mark.parametrize("name", TIMELINE_MAKERS)
def test_every_trace_is_a_valid_frame_at_every_size(name: str, theme: str) -> None:
    for size in SIZES:
        for language in ("en", "ja"):
            state = ViewState(step=4, size=size, theme=theme, language=language)
            check_frame(render(VIEW, timelines(name), state), state)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", TIMELINE_MAKERS)
def test_every_selection_is_a_valid_frame(name: str, selection: str | None) -> None:
    state = ViewState(step=4, selection=selection)
    check_frame(render(VIEW, timelines(name), state), state)


# ---- what was counted ----


@pytest.mark.parametrize("name", ALL)
def test_busy_and_waits_are_those_of_every_nanosecond(name: str) -> None:
    b = Burst(ALL[name])
    runs = by_the_ns(b)
    assert b.busy_share == pytest.approx(runs.mean())
    assert b.gaps.sum() == (~runs).sum() and b.wall == len(runs)
    assert b.mean_gap_us == pytest.approx((~runs).sum() / 1e3 / (b.last - b.first))
    assert b.kernels == 5 * b.it.num_layers + 3 and b.tokens == 4 and len(b.gaps) == 4 * b.kernels


@pytest.mark.parametrize("name", ALL)
def test_each_column_of_a_token_is_filled_as_far_as_the_device_was_busy(name: str) -> None:
    b = Burst(ALL[name])
    runs = by_the_ns(b)[b.zero - int(b.start[b.first]) :][: b.length]
    wide = 100
    edges = np.linspace(0, b.length, wide + 1)
    want = [runs[int(a) : int(z)].mean() for a, z in pairwise(edges)]
    assert busy_columns(b, wide, (0, b.length)) == pytest.approx(np.array(want), abs=2e-2)
    filled = (density(b, wide) == 0).sum(0)
    assert np.abs(filled / CELLS - want).max() <= 0.5 / CELLS + 0.02


def test_copies_are_no_work_of_the_device() -> None:
    it = off()
    copied = replace(it, names=(*it.names, "Memcpy DtoH"), kernels=it.kernels.copy())
    copied.kernels["kernel"][::23] = len(it.names)
    assert Burst(copied).kernels == Burst(it).kernels - 1 and Burst(copied).busy_share < Burst(it).busy_share


def test_the_first_step_and_the_last_are_not_counted() -> None:
    it = off()
    slow = replace(it, kernels=it.kernels.copy())
    slow.kernels["stop_ns"][slow.kernels["step"] == 0] += 20_000
    slow.kernels["stop_ns"][slow.kernels["step"] == 5] += 20_000
    assert Burst(slow).busy_share == Burst(it).busy_share


def test_a_wait_is_named_by_the_kernel_before_it_and_by_what_the_host_did() -> None:
    b = Burst(off())
    places = b.longest(2)
    assert b.name(places[0]) == "sample" and b.layer(places[0]) is None
    begin, end = b.gap(places[1])
    assert end - begin == 27_000 and b.meanwhile(places[1]) == "launch"
    assert Burst(replace(off(), host=off().host[:0], kernels=off().kernels)).meanwhile(places[1]) == ""


def test_the_histogram_has_every_wait_once() -> None:
    for it in ALL.values():
        b = Burst(it)
        assert b.histogram.sum() == len(b.gaps)
    assert Burst(on()).histogram[1] == 4 * 22, "0.3 µs lies between 0.1 and 0.32"


def test_a_functions_name_is_said_without_its_types() -> None:
    assert brief_name("void at::native::vectorized_kernel<4, at::Fn>(int, at::Array)") == "vectorized_kernel"
    assert brief_name("_decode_qkv_kernel") == "decode_qkv_kernel" and brief_name("") == "?"


# ---- which timelines ----


def test_graphs_off_stand_above_graphs_on_whichever_is_newer() -> None:
    for artifacts in ((off(), on()), (on(), off())):
        assert [b.side for b in bursts(run_on(GPU, *artifacts), 4)] == ["off", "on"]
    said = texts(draw(run_on(GPU, on(), off()), size=(1240, 560)))
    assert "GPU busy 9 % → 72 %" in said and "Mean wait between two kernels: 30 µs → 1.2 µs" in said


def test_those_of_the_nearest_step_are_shown_and_the_newest_of_a_kind() -> None:
    trace = run_on(GPU, off(), on(), off(step_id=9), off(step_id=9, num_seqs=5))
    assert [(b.it.step_id, b.side) for b in bursts(trace, 5)] == [(4, "off"), (4, "on")]
    (only,) = bursts(trace, 9)
    assert only.it.num_seqs == 5
    said = texts(draw(trace, step=9, size=(1240, 560)))
    assert "With CUDA graphs on there is no timeline yet." in said
    assert "These are the requests of step 4." in texts(draw(trace, step=5, size=(1240, 560)))


def test_a_recorded_gpu_stands_beside_a_live_cpu_each_with_its_badge() -> None:
    frame = draw(timelines("cpu_beside_gpu"), size=(1240, 560))
    assert [(badge.kind, badge.text.partition(":")[0]) for badge in frame.badges] == [("measured", CPU), ("recorded", GPU)]
    assert [r.name for r in frame.rasters if r.name.startswith("token")] == ["token cpu", "token off", "token on"]
    assert f"The GPU's part is of a recording: {GPU}." in frame.summary
    figures = {mark.id: mark.text for mark in frame.marks if mark.id.startswith("figure:")}
    assert figures["figure:kernels"] == "23 operations", "the live run's own"


def test_what_a_recording_lends_is_nobodys_own_step() -> None:
    trace = timelines("cpu_beside_gpu")
    assert [b.foreign for b in bursts(trace, 4)] == [False, True, True]
    assert moment(trace, ("timeline", {}), 4) == 4 and moment(run_on(CPU, off()), ("timeline", {}), 4) is None


def test_a_cpu_alone_says_that_it_runs_the_operations_itself() -> None:
    frame = draw(timelines("only_cpu"), size=(1240, 560))
    assert "In operations 86 %" in texts(frame) and "the CPU runs each operation itself" in texts(frame) and "GPU busy" not in frame.summary


def test_what_was_not_seen_is_said_and_a_coarse_clock_hides_times_of_kernels() -> None:
    trace = timelines("unnamed")
    frame = draw(trace, size=(1240, 560))
    assert "could not be matched" in frame.summary and "incomplete" in frame.summary and "ticks every" in frame.summary
    mine = [mark.text for mark in frame.marks if mark.id.startswith("op:") and ":on-" in mark.id]
    assert mine == [] or all("not shown" in text for text in mine)
    assert not [mark for mark in frame.marks if mark.id.startswith("kernel:")], "a function that is not named has no page"


def test_without_timelines_it_says_what_to_press_and_broken_ones_are_said_to_be_broken() -> None:
    frame = render(VIEW, scenario("busy"), ViewState(step=3))
    check_frame(frame, ViewState(step=3))
    assert frame.offers[0].label in frame.summary
    assert "damaged" in draw(run_on(GPU, timeline(steps=2))).summary


@pytest.mark.parametrize("name", KERNEL_MAKERS)
def test_traces_of_other_views_are_survived(name: str) -> None:
    state = ViewState()
    check_frame(render(VIEW, kernels(name), state), state)


def test_a_recording_gives_the_same_picture() -> None:
    trace = timelines("both")
    back = decode(encode(trace))
    again = Trace({n: getattr(back, n) for n in ("steps", "works")}, trace.sequences, trace.token_texts, trace.meta, back.artifacts)
    assert frame_bytes(draw(again)) == frame_bytes(draw(trace))


# ---- the lens ----


def lens_of(frame: Frame, side: str) -> tuple[float, float]:
    raster = next(r for r in frame.rasters if r.name == f"kernels {side}")
    return raster.x0, raster.x1


def test_a_lens_is_200_us_wide_and_goes_where_was_clicked_on_both() -> None:
    trace = timelines("both")
    assert lens_of(draw(trace, size=(1240, 560)), "off")[1] - lens_of(draw(trace, size=(1240, 560)), "off")[0] == 200_000
    frame = draw(trace, size=(1240, 560), selection=f"lens:off-{PLACES - 1}")
    length = bursts(trace, 4)[0].length
    assert lens_of(frame, "off")[1] == pytest.approx(length, rel=0.02)
    first = draw(trace, size=(1240, 560), selection="lens:off-0")
    assert lens_of(first, "off")[0] <= 0 < lens_of(first, "off")[1]


def test_a_layer_fills_the_lens_and_the_same_layer_is_shown_on_the_other() -> None:
    trace = run_on(GPU, off(layers=30), on(layers=30))
    frame = draw(trace, size=(1240, 700), selection="layer:on-7")
    for b in bursts(trace, 4):
        low, high = (t - b.zero for t in b.layers[7])
        a, z = lens_of(frame, b.side)
        assert a <= (low + high) / 2 <= z
        if b.side == "on":
            assert a <= low and high <= z and z - a == pytest.approx(1.1 * (high - low), rel=0.01)


def test_a_kernel_with_a_page_chooses_it_and_a_wait_is_outlined() -> None:
    frame = draw(timelines("both"), size=(1240, 560))
    chosen = [m.id for m in frame.marks if m.id.startswith("kernel:")]
    assert any(i.startswith("kernel:flash_decode:off-") for i in chosen)
    page = render(
        load_views()["kernel_page"], timelines("both"), ViewState(step=4, selection=next(i for i in chosen if "flash_decode" in i))
    )
    assert "flash_decode" in page.summary
    wait = next(m.id for m in frame.marks if m.id.startswith("gap:off-"))
    again = draw(timelines("both"), size=(1240, 560), selection=wait)
    assert [m.id for m in again.marks if m.outline == "error"] == [wait]


def test_launches_are_joined_to_their_kernels() -> None:
    frame = draw(timelines("both"), size=(1240, 560))
    b = bursts(timelines("both"), 4)[0]
    links = next(s for s in frame.series if s.name == "links")
    begins = {round(float(x)) for x in links.x[0::3]}
    host = b.it.host["start_ns"] - b.zero
    assert begins and begins <= set(host.tolist())
    assert np.isnan(links.x[2::3]).all()


# ---- offers ----


def test_what_is_offered_are_arguments_of_the_engines_job() -> None:
    known = set(inspect.signature(JOBS["timeline"]).parameters) - {"core", "past"} | {"step"}
    (offer,) = draw(timelines("both")).offers
    assert offer.job == "timeline" and not offer.why and all(set(args) <= known for _, args in offer.choices)
    assert [args.get("modes") for _, args in offer.choices] == [None, [False], [True]]
    (alone,) = draw(timelines("only_cpu")).offers
    assert [dict(args) for _, args in alone.choices] == [{"step": 4, "modes": [False]}], "a CPU has no graphs"
