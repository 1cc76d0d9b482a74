"""The roofline: verdicts follow from the numbers, points lie where flops, bytes and time put them, earlier profiles trail."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from engine.artifacts import OpTime, StepProfile
from engine.recording import decode, encode
from engine.trace import Trace
from tests.viz.kernel_scenarios import CPU, GPU, KERNEL_MAKERS, ceilings, kernels, profile, with_artifacts
from tests.viz.valid import check_frame
from viz.registry import load_views
from viz.view import Frame, Series, ViewState, render
from viz.views.roofline import COMPUTE, LAUNCH, MEMORY, UNKNOWN, measured, operations

VIEW = load_views()["roofline"]
SIZES = ((1242, 590), (960, 540), (732, 426), (484, 283), (1882, 839), (360, 437), (304, 208), (740, 704), (4000, 3000), (200, 120))


def texts(frame: Frame) -> list[str]:
    return [label.text for label in frame.labels]


def of(trace: Trace, **state: object) -> Frame:
    return render(VIEW, trace, ViewState(size=(1242, 590), **state))


def series(frame: Frame, name: str) -> Series:
    return next(s for s in frame.series if s.name == name)


def op(name: str = "x", device: float = 10.0, host: float = 3.0, flops: int = 10**7, num_bytes: int = 10**7, layer: int = 0) -> OpTime:
    return OpTime(name, layer, 0.0, device, host, flops, num_bytes, 1)


def step(*ops: OpTime, at: int = 4, prefill: int = 0, decode: int = 2, device: str = GPU) -> StepProfile:
    return StepProfile(at, device, "bfloat16", 100.0, prefill, decode, 1, ops)


# ---- verdicts ----


@pytest.mark.parametrize(
    ("one", "verdict"),
    [
        (op(device=10, host=11), LAUNCH),  # the host is slower than the device
        (op(device=3.1, host=1), LAUNCH),  # hardly longer than an empty launch (2.1 µs)
        (op(device=3.2, host=1), MEMORY),
        (op(flops=10**10, num_bytes=10**7), COMPUTE),  # 1,000 FLOP a byte, the ridge lies at 184
        (op(flops=184 * 10**7, num_bytes=10**7), MEMORY),
        (op(flops=185 * 10**7, num_bytes=10**7), COMPUTE),
        (op(flops=0), MEMORY),
        (op(flops=0, num_bytes=0), UNKNOWN),
        (op(device=40, host=1, flops=1000, num_bytes=1000), LAUNCH),  # the ceilings would need less than one launch for it
        (op(device=40, host=1, num_bytes=8_900_000), LAUNCH),
        (op(device=40, host=1, num_bytes=9_000_000), MEMORY),  # 2.1 µs at 4.25 TB/s
    ],
)
def test_a_verdict_follows_from_time_launch_and_ridge(one: OpTime, verdict: str) -> None:
    assert operations(step(one), ceilings())[0].verdict == verdict


def test_without_ceilings_only_launches_are_judged() -> None:
    found = operations(step(op("a", 10, 11), op("b", 10, 1)), None)
    assert {o.name: o.verdict for o in found} == {"a": LAUNCH, "b": UNKNOWN}


def test_on_a_cpu_where_both_clocks_are_the_call_only_short_calls_wait_for_it() -> None:
    found = operations(step(op("long", 900, 900), op("short", 1.5, 1.5), device=CPU), ceilings(CPU))
    assert {o.name: o.verdict for o in found} == {"long": MEMORY, "short": LAUNCH}


def test_the_layers_of_one_operation_are_added_up() -> None:
    ops = [op("a", 10 + k, 2 + k, 100 * k, 50, layer=k) for k in range(5)] + [op("b", 1000.0)]
    b, a = operations(step(*ops), ceilings())
    assert (a.name, a.calls, a.device_us, a.host_us, a.flops, a.bytes) == ("a", 5, 60, 20, 1000, 250)
    assert b.name == "b", "the longest comes first"


def test_each_operation_is_listed_with_its_verdict_and_its_numbers() -> None:
    for name in ("prefill", "decode", "cpu"):
        it, frame = measured(kernels(name), ViewState()), of(kernels(name))
        listed = [mark.text for mark in frame.marks if mark.id.startswith("row:")]
        assert set(listed) <= set(texts(frame))
        assert [text.split(":")[0] for text in listed] == [f"{i} {o.name}" for i, o in enumerate(it.ops, 1)]
        for text, o in zip(listed, it.ops):
            words = {LAUNCH: "launch-bound, host", MEMORY: "memory-bound,", COMPUTE: "compute-bound,"}[o.verdict]
            assert words in text and ("%" in text or "µs" in text)


def test_shares_are_of_the_ceiling_that_the_verdict_names() -> None:
    ops = op("copies", 100, 1, 10, 212_500_000), op("multiplies", 100, 1, 39_200_000_000, 1000)
    said = texts(of(with_artifacts(ceilings(), step(*ops))))
    assert "1 copies: memory-bound, 50 % of copy" in said and "2 multiplies: compute-bound, 50 % of matmul" in said


def test_the_sentence_counts_the_verdicts() -> None:
    it = measured(kernels("decode"), ViewState())
    said = VIEW.summary(kernels("decode"), ViewState())
    assert f"of 11 operations {it.of(LAUNCH)} are launch-bound, {it.of(MEMORY)} memory-bound, {it.of(COMPUTE)} compute-bound" in said
    assert said.startswith("Step 9 (11 decoded tokens)") and "the step 3.41 ms" in said


def test_a_selected_operation_says_its_numbers_and_what_its_launches_hide() -> None:
    frame = of(kernels("decode"), selection="row:lm_head")
    assert "lm_head: 1 call" in " ".join(texts(frame)) and "of copy" in " ".join(texts(frame)[-30:])
    assert [m.id for m in frame.marks if m.outline == "accent"] == ["row:lm_head", "op:lm_head"]
    other = " ".join(texts(of(kernels("decode"), selection="op:gate_up_proj")))
    assert "host 14 µs > device" in other and "Without its launches: memory-bound" in other


# ---- the plot ----


def points(frame: Frame) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for name in ("operations", "launch-bound") for s in [series(frame, name)] for x, y in zip(s.x, s.y)]


def test_a_point_lies_where_flops_bytes_and_time_put_it() -> None:
    ops = op("a", 100, 1, 10**8, 10**8), op("b", 100, 1, 10**9, 10**7), op("c", 100, 1, 10**10, 10**8)
    frame = of(with_artifacts(ceilings(), step(*ops)))
    (ax, ay), (bx, by), (cx, cy) = (
        ((m.x0 + m.x1) / 2, (m.y0 + m.y1) / 2) for m in sorted((m for m in frame.marks if m.id.startswith("op:")), key=lambda m: m.id)
    )
    assert bx == pytest.approx(cx, abs=0.1) and bx - ax > 20, "100 FLOP a byte twice, two decades right of 1"
    assert (ay - by) == pytest.approx((by - cy), abs=0.1), "each ten times as fast as the one before"
    roof = series(frame, "roof")
    (_, y0), (x1, y1), (x2, y2) = zip(roof.x.tolist(), roof.y.tolist())
    assert y1 == y2 and y0 > y1 and x2 > x1, "a slope, then a ceiling"
    at_ridge = (math.log10(784e12 / 4.25e12) - 0) / 2 * (bx - ax) + ax
    assert x1 == pytest.approx(at_ridge, abs=0.5)


def test_an_operation_at_the_copy_bandwidth_lies_on_the_slope() -> None:
    us = 4.25e8 / 4.25e12 * 1e6
    frame = of(with_artifacts(ceilings(), step(op("a", us, 1, 10**8, int(4.25e8)), op("b", 1, 0.5, 10, 10))))
    (x, y), roof = points(frame)[0], series(frame, "roof")
    (x0, x1, _), (y0, y1, _) = roof.x.tolist(), roof.y.tolist()
    assert y == pytest.approx(y0 + (x - x0) / (x1 - x0) * (y1 - y0), abs=0.5)


def test_an_operation_that_only_moves_bytes_is_listed_and_has_no_point() -> None:
    frame = of(kernels("decode"))
    assert any("embedding" in text for text in texts(frame)) and "op:embedding" not in {m.id for m in frame.marks}
    assert len(points(frame)) == 10


@pytest.mark.parametrize(("prefill", "decode", "symbol"), [(9, 0, "square"), (0, 9, "circle"), (9, 9, "diamond")])
def test_shapes_tell_prefill_from_decode_and_launch_bound_points_are_hollow(prefill: int, decode: int, symbol: str) -> None:
    ops = op("a", 10, 1), op("b", 10, 20)
    frame = of(with_artifacts(ceilings(), step(*ops, prefill=prefill, decode=decode)))
    solid, hollow = series(frame, "operations"), series(frame, "launch-bound")
    assert solid.symbol == hollow.symbol == symbol
    assert (solid.paint.color, hollow.paint.color, len(solid.x), len(hollow.x)) == ("ink", "paper", 1, 1)
    assert {p.color for s in frame.series for p in [s.paint]} <= {"ink", "paper", "muted", "accent"}, "no hue of a request"


def test_earlier_profiles_of_the_device_trail_and_fade_and_later_ones_do_not() -> None:
    artifacts = (*(profile(s, 0, s) for s in range(1, 10)), profile(3, 9, 0, CPU), ceilings(), ceilings(CPU))
    frame = of(with_artifacts(*artifacts), step=5)
    trail = [s for s in frame.series if s.name.startswith("step ")]
    assert [s.name for s in trail] == ["step 4", "step 3", "step 2", "step 1"]
    assert [s.paint.alpha for s in trail] == sorted((s.paint.alpha for s in trail), reverse=True)
    assert len(series(frame, "way").x) == 5, "the chosen operation's way through them"
    assert frame.summary.startswith("Step 5 ")


def test_the_nearest_profile_belongs_to_a_step() -> None:
    trace = with_artifacts(profile(2), profile(8), ceilings())
    assert [measured(trace, ViewState(step=s)).profile.step_id for s in (0, 2, 4, 6, 8, 12)] == [2, 2, 2, 8, 8, 8]


def test_ceilings_are_of_the_device_that_ran_the_step() -> None:
    it = measured(with_artifacts(profile(4, device=CPU), ceilings(CPU), ceilings(GPU)), ViewState())
    assert it.top.device == CPU
    assert measured(with_artifacts(profile(4, device=CPU), ceilings(GPU)), ViewState()).top is None


# ---- what is missing ----


def test_without_a_profile_and_ceilings_it_says_what_to_press() -> None:
    frame = of(kernels("nothing_yet"))
    assert "Profile the next step" in frame.summary and "Measure the ceilings" in frame.summary and not frame.marks
    assert [(o.job, len(o.choices)) for o in frame.offers] == [("profile", 1), ("ceilings", 1)]


def test_ceilings_alone_draw_the_roof_and_a_profile_alone_its_points() -> None:
    roof, alone = of(kernels("only_ceilings")), of(kernels("no_ceilings"))
    assert series(roof, "roof") and "No step was profiled yet" in " ".join(texts(roof))
    assert "roof" not in {s.name for s in alone.series} and len(points(alone)) == 10
    assert "Measure the ceilings" in alone.summary and not any("memory-bound" in text for text in texts(alone))


def test_numbers_that_are_none_are_left_out() -> None:
    it = measured(kernels("unusable"), ViewState())
    assert [o.name for o in it.ops] == ["a⏎b", ""] or {o.name for o in it.ops} == {"a⏎b", ""}
    assert not of(kernels("unusable")).error and "nan" not in of(kernels("unusable")).summary


@pytest.mark.parametrize("language", ["en", "ja"])
@pytest.mark.parametrize("theme", ["light", "dark", "projector"])
def test_every_trace_is_a_valid_frame_at_every_size_with_every_selection(theme: str, language: str) -> None:
    for name in KERNEL_MAKERS:
        for size in SIZES:
            state = ViewState(size=size, theme=theme, language=language)
            frame = render(VIEW, kernels(name), state)
            check_frame(frame, state)
            for mark in frame.marks if size in ((732, 426), (484, 283)) else ():
                check_frame(render(VIEW, kernels(name), state.with_(selection=mark.id)), state)


def test_a_hundred_operations_leave_the_chosen_one_in_the_list() -> None:
    ops = [op(f"op_{k:03}", 10 + k, 1, 10**5 * (k + 1), 10**6) for k in range(100)]
    trace = with_artifacts(ceilings(), step(*ops))
    for name in ("op_000", "op_050", "op_099"):
        frame = of(trace, selection=f"row:{name}")
        check_frame(frame, ViewState(size=(1242, 590)))
        assert f"row:{name}" in {m.id for m in frame.marks if m.outline == "accent"} and any("more" in text for text in texts(frame))


def test_asks_are_answered_by_texts_of_the_picture() -> None:
    for name in ("prefill", "decode", "cpu"):
        frame = of(kernels(name))
        whole = " ".join(texts(frame))
        for ask in VIEW.asks:
            assert ask.answer(kernels(name), ViewState()) in whole, f"{name}: {ask.question}"
    assert {ask.answer(kernels("no_ceilings"), ViewState()) for ask in VIEW.asks} == {""}


@pytest.mark.parametrize("name", ["prefill", "decode", "cpu", "only_ceilings"])
def test_a_recording_keeps_the_picture(name: str) -> None:
    back = decode(encode(kernels(name)))
    assert of(back).labels == of(kernels(name)).labels and of(back).marks == of(kernels(name)).marks


def test_a_profile_without_times_is_none() -> None:
    dead = replace(profile(4), ops=tuple(replace(o, device_us=0.0, host_us=0.0) for o in profile(4).ops))
    assert measured(with_artifacts(dead), ViewState()).profile is None
