"""The kernel page: the chosen kernel's own texts and newest run, computed times said to be computed, nothing for what did not run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.artifacts import KernelCard, of_kind
from engine.recording import decode, encode
from engine.trace import Trace
from tests.viz.kernel_scenarios import CPU, GPU, KERNEL_MAKERS, card, cards, ceilings, kernel_run, kernels, on_cpu, with_artifacts
from tests.viz.valid import check_frame
from viz.registry import load_views
from viz.view import Frame, ViewState, render
from viz.views.kernel_page import page

VIEW = load_views()["kernel_page"]
SIZES = (
    (615, 590),
    (1242, 590),
    (960, 540),
    (732, 426),
    (484, 283),
    (1882, 839),
    (360, 437),
    (304, 208),
    (740, 704),
    (4000, 3000),
    (200, 120),
)


def texts(frame: Frame) -> list[str]:
    return [label.text for label in frame.labels]


def of(trace: Trace, size: tuple[int, int] = (960, 590), **state: object) -> Frame:
    return render(VIEW, trace, ViewState(size=size, **state))


def at(frame: Frame, way: str) -> float:
    """The pixel of a time."""
    return float(next(s for s in frame.series if s.name == way).x[0])


# ---- which kernel ----


@pytest.mark.parametrize("size", [(960, 590), (732, 426), (484, 283), (732, 306), (360, 437)])
def test_every_kernel_is_reached_by_marks(size: tuple[int, int]) -> None:
    trace = with_artifacts(*(card(f"kernel_{k:02}") for k in range(40)))
    found, waiting = set(), [None]
    while waiting:
        for mark in of(trace, size, selection=waiting.pop()).marks:
            if mark.id not in found:
                found.add(mark.id)
                waiting.append(mark.id)
    assert found == {f"kernel:kernel_{k:02}" for k in range(40)}


def test_the_selected_kernel_is_shown_else_that_of_the_newest_run_else_the_first() -> None:
    trace = with_artifacts(*cards(), kernel_run("rope"), kernel_run("silu_mul"), kernel_run("not_there"))
    assert page(trace, ViewState()).card.name == "silu_mul"
    assert page(trace, ViewState(selection="kernel:embedding")).card.name == "embedding"
    assert page(trace, ViewState(selection="kernel:rope:loop")).card.name == "rope"
    assert page(trace, ViewState(selection="kernel:gone")).card.name == page(trace, ViewState(selection="seq:3")).card.name == "silu_mul"
    assert page(kernels("nothing_yet"), ViewState()).card.name == "argmax_sample"
    assert [m.id for m in of(trace, selection="kernel:rope").marks if m.outline == "accent"] == ["kernel:rope"]


def test_the_newest_run_of_a_kernel_is_the_one_shown() -> None:
    trace = with_artifacts(*cards(), kernel_run("rope", kernel_us=50.0, graph_us=None), kernel_run("rope", kernel_us=70.0, graph_us=None))
    assert "70 µs" in texts(of(trace)) and "50 µs" not in texts(of(trace))


# ---- documents and offers ----


def test_documents_are_the_cards_own_texts_at_every_size() -> None:
    it = card("silu_mul")
    for size in SIZES:
        found = of(with_artifacts(it), size).documents
        assert [(d.title, d.text, d.kind) for d in found] == [
            ("Formula", it.formula, "formula"), ("Reference", it.reference, "code"), ("Triton source", it.source, "code"),
            ("What it does", it.text, "prose"),
        ]  # fmt: skip
    assert [d.title for d in of(with_artifacts(replace(it, source="", text=" "))).documents] == ["Formula", "Reference"]


def test_it_can_be_run_on_each_of_its_cases() -> None:
    run, top = of(kernels("nothing_yet"), selection="kernel:rope").offers
    assert (run.job, top.job, top.choices[0][1]) == ("kernel", "ceilings", {})
    assert [choice for _, choice in run.choices] == [{"name": "rope", "case": "t8192_n14336"}, {"name": "rope", "case": "n63"}]
    assert run.choices[0][0] == "t8192_n14336: tokens 8192, n 14336"
    assert [o.job for o in of(with_artifacts(card("rope", cases=()))).offers] == ["ceilings"]


# ---- the run ----


def test_the_error_stands_beside_its_tolerance_and_too_large_a_one_is_said_so() -> None:
    good, bad = of(kernels("prefill")), of(kernels("short_chunk"))
    assert "largest error 0.0031 of 0.008 allowed: ✓" in texts(good)
    found = next(label for label in bad.labels if "✗" in label.text)
    assert "0.02" in found.text and "0.008" in found.text and found.color == "error"
    assert "error not measured" in texts(of(kernels("unusable"), selection="kernel:silu_mul"))


def test_speed_is_bytes_and_flops_by_the_fastest_way_the_kernel_ran() -> None:
    it = page(kernels("prefill"), ViewState())
    assert it.ours_us == 194.0
    assert it.bytes_per_s == pytest.approx(704_643_072 / 194e-6) and it.flops_per_s == pytest.approx(587_202_560 / 194e-6)
    share, which = it.of_ceiling
    assert which == "copy" and share == pytest.approx(704_643_072 / 194e-6 / 4.25e12)
    assert "194 µs in a CUDA graph: 85 % of the measured copy ceiling, 4.25 TB/s" in texts(of(kernels("prefill")))
    assert "moves 3.63 TB/s, computes 3.03 TFLOP/s" in texts(of(kernels("prefill")))


def test_the_nearer_ceiling_is_named_and_another_devices_is_not_used() -> None:
    heavy = kernel_run("rope", flops=10**11, bytes=10**6, kernel_us=200.0, graph_us=None)
    assert page(with_artifacts(*cards(), heavy, ceilings()), ViewState()).of_ceiling == (pytest.approx(500 / 784), "matmul")
    other = with_artifacts(*cards(), heavy, ceilings(CPU))
    assert page(other, ViewState()).of_ceiling == (0.0, "") and "measure the ceilings" in " ".join(texts(of(other)))


def test_a_loop_that_was_not_run_whole_is_computed_and_said_so() -> None:
    frame = of(kernels("prefill"))
    loop = next(s for s in frame.series if s.name == "loop")
    assert loop.paint.color == "paper" and any("(computed)" in text for text in texts(frame)) and "315 ms" in texts(frame)
    assert [b.kind for b in frame.badges] == ["measured", "computed"]
    mark = next(m for m in frame.marks if m.id == "kernel:silu_mul:loop")
    assert "Computed: 8,192 × 38 µs; 64 iterations were run." in mark.detail
    whole = of(kernels("cpu"))
    assert next(s for s in whole.series if s.name == "loop").paint.color == "ink" and [b.kind for b in whole.badges] == ["measured"]
    assert "Python loop, all 17" in texts(whole) and not whole.legend


def test_where_the_triton_kernel_cannot_run_there_is_a_sentence_and_no_time_of_it() -> None:
    frame = of(kernels("cpu"))
    assert "The Triton kernel needs a GPU; its reference runs here." in texts(frame)
    assert {"kernel", "graph"}.isdisjoint(s.name for s in frame.series) and "torch" in {s.name for s in frame.series}
    assert "needs a GPU" in frame.summary and CPU in frame.badges[0].text


def test_times_lie_on_one_logarithmic_axis() -> None:
    run = kernel_run("rope", kernel_us=10.0, graph_us=None, torch_us=1000.0, loop_us=100.0, loop_iterations=1000, loop_ran=5)
    for size in ((960, 590), (732, 426), (1242, 306), (360, 437)):
        frame = of(with_artifacts(*cards(), run), size)
        kernel, each, torch, loop = (at(frame, way) for way in ("kernel", "iteration", "torch", "loop"))
        assert each - kernel == pytest.approx(torch - each, abs=0.1) and loop - torch == pytest.approx(2 * (torch - each), abs=0.1)
        talk = next(r for r in frame.rasters if r.name == "talk")
        assert (talk.x0, talk.x1) == (pytest.approx(kernel, abs=0.1), pytest.approx(each, abs=0.1)), "10 to 100 µs"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "At 38 µs an iteration, 8,192 iterations of Python take 315 ms: 1,600 times as long as our kernel (194 µs)."),
        ({"graph_us": 20.0}, "One iteration in Python (38 µs) already takes longer than all of our kernel (20 µs)"),
        ({"kernel_us": None, "graph_us": None}, "549 times as long as torch (574 µs)."),
        ({"loop_us": None}, "It was not timed as a Python loop."),
    ],
)
def test_the_sentence_says_what_a_python_loop_costs(changes: dict, said: str) -> None:
    assert said in VIEW.summary(with_artifacts(*cards(), kernel_run(**changes)), ViewState())


def test_before_a_run_it_says_what_to_press_and_without_cards_where_they_come_from() -> None:
    frame = of(kernels("nothing_yet"))
    assert "press “Run it”" in " ".join(texts(frame)) and [b.kind for b in frame.badges] == ["state"] and not frame.rasters
    assert "Each kernel of the engine has a page here" in of(with_artifacts()).summary
    assert {ask.answer(kernels("nothing_yet"), ViewState()) for ask in VIEW.asks} == {""}


def test_a_hostile_card_is_only_text() -> None:
    frame = of(kernels("unusable"))
    bad = next(c for c in of_kind(kernels("unusable"), KernelCard) if "onerror" in c.name)
    shown = of(kernels("unusable"), selection=f"kernel:{bad.name}")
    for found in (frame, shown):
        check_frame(found, ViewState(size=(960, 590)))
        assert "onerror" not in repr(found.axes) + repr(found.legend) + repr([s.name for s in found.series])
        assert all("\u202e" not in text for text in texts(found))


# ---- every picture ----


@pytest.mark.parametrize("size", [(615, 590), (1242, 590), (1882, 839)])
def test_many_kernels_leave_room_for_the_page(size: tuple[int, int]) -> None:
    run = kernel_run("silu_mul", shapes="tokens 8192, n 14336, pages 1024, layers 30, scale 0.125")
    many = (*cards(), *(card(f"another_kernel_{k}") for k in range(30)))
    frame = of(with_artifacts(*many, run, ceilings()), size)
    whole = " ".join(texts(frame))
    assert {"38 µs", "315 ms", "574 µs", "197 µs", "194 µs"} <= set(texts(frame)) and "times as long as" in whole
    assert "largest error" in whole and "85 %" in whole and "more" in whole and len(frame.labels) <= 40


@pytest.mark.parametrize("language", ["en", "ja"])
@pytest.mark.parametrize("theme", ["light", "dark", "projector"])
def test_every_trace_is_a_valid_frame_at_every_size_with_every_selection(theme: str, language: str) -> None:
    for name in KERNEL_MAKERS:
        for size in SIZES:
            state = ViewState(size=size, theme=theme, language=language)
            frame = render(VIEW, kernels(name), state)
            check_frame(frame, state)
            for mark in frame.marks if size in ((615, 590), (484, 283)) else ():
                check_frame(render(VIEW, kernels(name), state.with_(selection=mark.id)), state)


def test_asks_are_answered_by_texts_of_the_picture() -> None:
    for name in ("prefill", "decode", "cpu"):
        whole = " ".join(texts(of(kernels(name), (615, 570))))
        for ask in VIEW.asks:
            assert ask.answer(kernels(name), ViewState()) in whole, f"{name}: {ask.question}"


@pytest.mark.parametrize("name", ["prefill", "decode", "cpu", "nothing_yet"])
def test_a_recording_keeps_the_picture_and_the_documents(name: str) -> None:
    back = decode(encode(kernels(name)))
    one, again = of(kernels(name)), of(back)
    assert (one.labels, one.marks, one.documents) == (again.labels, again.marks, again.documents)


def test_a_run_on_another_device_keeps_its_name() -> None:
    trace = with_artifacts(*cards(), ceilings(GPU), on_cpu("rope"))
    assert page(trace, ViewState()).top is None and CPU in " ".join(texts(of(trace)))
