"""The SM timeline draws clock readings and nothing else: shares are counted again nanosecond by nanosecond."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import numpy as np
import pytest

from engine.artifacts import PARTLY
from engine.jobs import JOBS
from engine.recording import decode, encode
from engine.trace import Trace
from tests.viz import tile_scenarios as tiles
from tests.viz.kernel_scenarios import KERNEL_MAKERS, kernels
from tests.viz.scenarios import scenario
from tests.viz.tile_scenarios import TRACES, Shape, tile_trace, with_artifacts
from tests.viz.valid import check_frame, frame_bytes
from viz.registry import load_views
from viz.view import Frame, ViewState, render
from viz.views.sm_timeline import Launch, launches

VIEW = load_views()["sm_timeline"]
TIMED, UNTIMED = ("cached", "decode", "huge"), ("prefill", "windowed", "one_token")
SIZES = (
    (960, 540), (732, 426), (484, 403), (1242, 426), (732, 306), (484, 283), (1116, 786), (1882, 839), (360, 437), (1242, 255), (390, 300),
    (200, 120),
)  # fmt: skip


def state_of(trace: Trace, **changes: object) -> ViewState:
    return ViewState(step=trace.artifacts[-1].step_id, **changes)


def draw(trace: Trace, **changes: object) -> Frame:
    return render(VIEW, trace, state_of(trace, **changes))


def texts(frame: Frame) -> str:
    return "\n".join(label.text for label in frame.labels)


def found(name: str) -> tuple[Launch, ...]:
    trace = TRACES[name]()
    return launches(trace, trace.artifacts[-1].step_id)


def by_the_ns(of: Launch) -> np.ndarray:
    """int [SMs, ns]: how many programs live there."""
    alive = np.zeros((of.num_sms, of.end), np.int64)
    rows, zero = of.it.tiles, int(of.it.tiles["start_ns"].min())
    for program in np.unique(rows["program"]).tolist():
        mine = rows[rows["program"] == program]
        alive[int(mine["sm"][0]), int(mine["start_ns"].min()) - zero : int(mine["stop_ns"].max()) - zero] += 1
    return alive


@pytest.mark.parametrize("theme", ["light", "dark", "projector"])
@pytest.mark.parametrize("name", TRACES)
def test_every_trace_is_a_valid_frame_at_every_size(name: str, theme: str) -> None:
    trace = TRACES[name]()
    for size in SIZES:
        for language in ("en", "ja"):
            state = state_of(trace, size=size, theme=theme, language=language)
            check_frame(render(VIEW, trace, state), state)


# ---- what was counted ----


@pytest.mark.parametrize("name", TIMED)
def test_shares_waves_and_residents_are_those_of_every_nanosecond(name: str) -> None:
    for of in found(name):
        alive = by_the_ns(of)
        assert of.residents == alive.max()
        assert of.busy_share == pytest.approx((alive > 0).mean())
        tail = sum(of.end - 1 - np.flatnonzero(row).max() for row in alive if row.any()) / alive.size
        assert of.tail_share == pytest.approx(tail, abs=1e-9)
        assert of.waves == pytest.approx(len(np.unique(of.it.tiles["program"])) / (of.num_sms * of.residents))


@pytest.mark.parametrize("name", ["cached", "decode"])
def test_every_tile_is_drawn_on_its_sm_at_its_time_in_its_colour(name: str) -> None:
    trace = TRACES[name]()
    frame = draw(trace, size=(1882, 839))
    for number, of in enumerate(found(name)):
        raster = next(r for r in frame.rasters if r.name == f"SMs {number + 1}")
        rows, wide = raster.values.shape
        lanes, codes = rows // of.num_sms, {}
        for i, tile in enumerate(of.it.tiles):
            middle = (of.start[i] + of.stop[i]) / 2 / raster.x1 * wide
            cells = raster.values[int(tile["sm"]) * lanes : (int(tile["sm"]) + 1) * lanes, int(middle)]
            codes.setdefault((int(tile["seq_id"]), bool(tile["kind"] == PARTLY)), set()).update(set(cells.tolist()) - {255})
        assert all(len(c) >= 1 for c in codes.values())
        if lanes == 1:
            assert all(len(c) == 1 for c in codes.values()) and len(set(map(min, codes.values()))) == len(codes)


def test_nothing_is_drawn_behind_the_end_of_the_shorter_launch() -> None:
    trace = TRACES["decode"]()
    one, other = found("decode")
    raster = next(r for r in draw(trace).rasters if r.name == "SMs 2")
    assert one.end > other.end and raster.x1 == one.end
    end = int(np.ceil(other.end * raster.values.shape[1] / one.end))
    assert (raster.values[:, end:] == 255).all() and not (raster.values[:, : end - 1] == 255).all()


# ---- splits ----


def test_with_and_without_splits_stand_below_each_other_whichever_is_newer() -> None:
    trace = TRACES["decode"]()
    plain, split = trace.artifacts
    for artifacts in ((plain, split), (split, plain)):
        of = launches(with_artifacts(trace, *artifacts), 6)
        assert [launch.it.num_splits for launch in of] == [1, 4]
    said = texts(draw(trace))
    assert (
        "Keys in one part: 9 programs" in said
        and "Keys in 4 parts: 36 programs" in said
        and "With the keys in 4 parts: 24 µs → 11 µs" in said
    )


@pytest.mark.parametrize(
    "changes", [{"step_id": 5}, {"layer": 4}, {"device": "another"}, {"sequences": ((2, 1, 640), (3, 1, 1000), (4, 1, 301))}]
)
def test_a_launch_of_something_else_is_no_comparison(changes: dict) -> None:
    trace = TRACES["decode"]()
    plain, split = trace.artifacts
    assert len(launches(with_artifacts(trace, replace(plain, **changes), split), 6)) == 1


# ---- without a clock ----


@pytest.mark.parametrize("name", UNTIMED)
def test_where_no_clock_was_read_there_is_no_time_no_sm_and_no_wave(name: str) -> None:
    trace = TRACES[name]()
    frame = draw(trace, size=(1242, 590))
    said = texts(frame) + frame.summary + "".join(mark.text + mark.detail for mark in frame.marks)
    assert not re.search(r"\d ?(ns|µs|ms|s)\b|SM \d|\d waves|idle", said)
    assert "no SM and no time" in frame.badges[0].text and "do not exist" in frame.summary
    assert "" in {ask.answer(trace, state_of(trace)) for ask in VIEW.asks}


def test_in_launch_order_a_program_is_as_high_as_it_has_tiles() -> None:
    trace = TRACES["prefill"]()
    of = found("prefill")[0]
    values = next(r for r in draw(trace).rasters if r.name == "launch 1").values
    programs = of.it.tiles["program"]
    assert (values != 255).sum(0).tolist() == [int((programs == p).sum()) for p in np.unique(programs)]
    assert (values[-1] != 255).all(), "they stand on the ground"


# ---- which trace ----


def test_without_tiles_it_says_what_to_press() -> None:
    frame = render(VIEW, scenario("busy"), ViewState(step=3))
    check_frame(frame, ViewState(step=3))
    assert frame.offers[0].label in frame.summary and dict(frame.offers[0].choices[0][1]) == {"step": 3, "layer": 0}


def test_damaged_tiles_are_said_to_be_damaged() -> None:
    frame = render(VIEW, tiles.broken(), ViewState(step=0))
    check_frame(frame, ViewState(step=0))
    assert "damaged" in frame.summary and not frame.marks


def test_tiles_of_another_step_say_so() -> None:
    frame = render(VIEW, TRACES["cached"](), ViewState(step=9))
    assert "These are tiles of step 1; step 9 has not been traced." in texts(frame)
    assert any(offer.id == "step" for offer in frame.offers)


@pytest.mark.parametrize("name", KERNEL_MAKERS)
def test_traces_of_other_views_are_survived(name: str) -> None:
    for selection in (None, "seq:1", "sm:0:3", "program:0:1"):
        state = ViewState(selection=selection)
        check_frame(render(VIEW, kernels(name), state), state)


def test_a_recording_gives_the_same_picture() -> None:
    trace = TRACES["decode"]()
    back = decode(encode(trace))
    again = Trace({n: getattr(back, n) for n in ("steps", "works")}, trace.sequences, trace.token_texts, trace.meta, back.artifacts)
    assert frame_bytes(draw(again)) == frame_bytes(draw(trace))


def test_an_sm_that_nobody_used_is_a_row_of_its_own() -> None:
    """Nine programs on a device of which another launch used sixteen SMs: seven of them stood idle."""
    one = found("decode")[0]
    assert one.num_sms == 16 and len(np.unique(one.sm)) == 9 and one.waves == pytest.approx(9 / 16)


def test_a_launch_of_one_tile_is_drawn() -> None:
    base = TRACES["prefill"]()
    trace = with_artifacts(base, tile_trace(1, ((1, 1, 1),), Shape(sms=1, heads=1, kv_heads=1, row_head=0)))
    state = state_of(trace)
    check_frame(render(VIEW, trace, state), state)
    assert launches(trace, 1)[0].tail_share == 0


# ---- offers ----


def test_what_is_offered_are_arguments_of_the_engines_job() -> None:
    known = set(inspect.signature(JOBS["tiles"]).parameters) - {"core", "past"} | {"step", "splits"}
    for name, make in TRACES.items():
        for offer in draw(make()).offers:
            assert all(set(args) <= known for _, args in offer.choices), name
    splits = next(o for o in draw(TRACES["decode"]()).offers if o.id == "splits")
    assert {args["splits"] for _, args in splits.choices} == {2, 8, 16}
    assert not [o for o in draw(TRACES["cached"]()).offers if o.id == "splits"], "prefill splits no keys"
