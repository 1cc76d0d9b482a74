"""The memory traffic: every byte is counted here once more by hand, areas are to scale, no sentence says more than is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.artifacts import TileTrace, of_kind
from engine.recording import decode, encode
from engine.trace import Trace
from tests.viz.kernel_scenarios import CPU, GPU, KERNEL_MAKERS, ceilings, kernels, tile_trace, traffic_run, with_artifacts
from tests.viz.valid import check_frame
from viz.registry import load_views
from viz.theme import data_size
from viz.view import Frame, ViewState, render
from viz.views.memory_traffic import PARTS, SIDES, traffic

VIEW = load_views()["memory_traffic"]
WITH_TILES = ("prefill", "decode", "cpu", "short_chunk", "no_ceilings")
SIZES = ((1242, 590), (960, 540), (732, 426), (484, 283), (1882, 839), (360, 437), (304, 208), (740, 704), (4000, 3000), (200, 120))


def texts(frame: Frame) -> list[str]:
    return [label.text for label in frame.labels]


def of(trace: Trace, **state: object) -> Frame:
    return render(VIEW, trace, ViewState(size=(1242, 590), **state))


def tiles_of(trace: Trace) -> TileTrace:
    return of_kind(trace, TileTrace)[-1]


def bytes_by_hand(it: TileTrace) -> dict[str, dict[str, int]]:
    """One tile, one program, one pair of query and key at a time."""
    size, flash, seen = it.itemsize, dict.fromkeys(PARTS, 0), set()
    for tile in it.tiles:
        for part in ("k", "v"):
            for _ in range(int(tile["k_start"]), int(tile["k_stop"])):
                flash[part] += it.head_dim * size
        if int(tile["program"]) not in seen:
            seen.add(int(tile["program"]))
            rows = int(tile["num_q"]) * it.heads // it.kv_heads
            flash["q"] += rows * it.head_dim * size
            flash["o"] += rows * it.head_dim * size if it.num_splits == 1 else 2 * rows * (it.head_dim + 2) * 4
    naive = dict.fromkeys(PARTS, 0)
    for _, queries, keys in it.sequences:
        output = it.heads * queries * it.head_dim * size
        naive["q"] += output
        naive["o"] += output
        flash["o"] += output if it.num_splits > 1 else 0
        for part in ("k", "v"):
            naive[part] += it.kv_heads * keys * it.head_dim * size
        naive["scores"] += 2 * it.heads * queries * keys * 4
        naive["p"] += 2 * it.heads * queries * keys * size
    return {"naive": naive, "flash": flash}


@pytest.mark.parametrize("name", WITH_TILES)
def test_bytes_are_those_counted_by_hand(name: str) -> None:
    found = traffic(kernels(name), ViewState())
    assert found.parts == bytes_by_hand(tiles_of(kernels(name)))
    assert found.parts["flash"]["scores"] == found.parts["flash"]["p"] == 0


@pytest.mark.parametrize("language", ["en", "ja"])
@pytest.mark.parametrize("theme", ["light", "dark", "projector"])
def test_every_trace_is_a_valid_frame_at_every_size_with_every_selection(theme: str, language: str) -> None:
    for name in KERNEL_MAKERS:
        for size in SIZES:
            state = ViewState(size=size, theme=theme, language=language)
            frame = render(VIEW, kernels(name), state)
            check_frame(frame, state)
            for mark in frame.marks if size == (732, 426) else ():
                check_frame(render(VIEW, kernels(name), state.with_(selection=mark.id)), state)


@pytest.mark.parametrize("name", WITH_TILES)
def test_both_areas_have_one_scale_and_their_parts_too(name: str) -> None:
    it = traffic(kernels(name), ViewState())
    for size in ((1242, 590), (732, 426), (484, 403), (360, 437)):
        frame = render(VIEW, kernels(name), ViewState(size=size))
        pixels = {raster.name: (raster.x1 - raster.x0) * (raster.y1 - raster.y0) for raster in frame.rasters}
        assert set(pixels) == {f"{s} {p}" for s in SIDES for p in PARTS if it.parts[s][p]}
        scale = sum(pixels.values()) / (it.total("naive") + it.total("flash"))
        for side in SIDES:
            for part in PARTS:
                if it.parts[side][part]:
                    assert pixels[f"{side} {part}"] == pytest.approx(it.parts[side][part] * scale, rel=0.02)


@pytest.mark.parametrize(("name", "words"), [("prefill", "× less."), ("short_chunk", "× more."), ("decode", "× less.")])
def test_the_sentence_says_both_sums_and_their_ratio(name: str, words: str) -> None:
    it = traffic(kernels(name), ViewState())
    said = VIEW.summary(kernels(name), ViewState())
    assert said.startswith(f"Flash asks for {data_size(it.total('flash'))} where naive moves {data_size(it.total('naive'))}: ")
    ratio = it.total("naive") / it.total("flash")
    number = float(said.partition("×")[0].rpartition(" ")[2])
    assert number == pytest.approx(max(ratio, 1 / ratio), rel=0.05) and words in said


def test_what_is_equal_is_called_equal() -> None:
    """No scores to speak of: one head of large size, one query, its cache read once."""
    one = tile_trace(4, ((1, 1, 64),), heads=1, kv_heads=1, head_dim=1024, block_q=1, block_n=64)
    assert "as much" in VIEW.summary(with_artifacts(one), ViewState())


def test_flash_bytes_are_never_called_hbm_bytes() -> None:
    for name in WITH_TILES:
        frame = of(kernels(name))
        counted = next(b for b in frame.badges if b.kind in ("state", "recomputed"))
        assert "bytes requested, L2 hits included" in counted.text
        assert "HBM" not in counted.text + VIEW.summary(kernels(name), ViewState())
        assert [b.kind for b in frame.badges][1] == "computed"


def test_a_second_pass_is_badged_with_its_difference_and_a_probed_step_is_not() -> None:
    assert of(kernels("prefill")).badges[0].kind == "recomputed" and "0.003" in of(kernels("prefill")).badges[0].text
    assert of(kernels("cpu")).badges[0].kind == "state"


def test_every_part_is_printed_and_explains_its_formula_with_numbers() -> None:
    it = traffic(kernels("prefill"), ViewState())
    for side in SIDES:
        for part in PARTS:
            if it.parts[side][part]:
                frame = of(kernels("prefill"), selection=f"part:{side}:{part}")
                said = " ".join(texts(frame)[-40:])
                size = data_size(it.parts[side][part])
                assert f"= {size}" in said.replace("\n", " "), f"{side} {part}"
                assert any(size in text for text in texts(frame) if "=" not in text)
    assert "9 heads × 2,250,000 pairs of query and key × 4 B, written and read" in " ".join(texts(of(kernels("prefill"))))
    assert "tiles ask for" in " ".join(texts(of(kernels("prefill"), selection="area:flash:k")))
    assert "the merge reads them" in " ".join(texts(of(kernels("decode"), selection="part:flash:o")))


def test_times_are_bytes_by_bandwidth() -> None:
    it, frame = traffic(kernels("prefill"), ViewState()), of(kernels("prefill"))
    marks = {mark.id: mark.text for mark in frame.marks}
    assert {"speed:copy", "speed:level", "speed:sram", "speed:hbm", "speed:dram"} <= set(marks)
    assert marks["speed:hbm"] == f"A100 HBM 1.5 TB/s: naive {it.total('naive') / 1.5e6:.0f} µs, Flash {it.total('flash') / 1.5e6:.0f} µs"
    assert marks["speed:level"].startswith("L1 26 TB/s") and marks["speed:copy"].startswith("copy 4.25 TB/s")
    explained = " ".join(texts(of(kernels("prefill"), selection="speed:hbm")))
    assert "÷ 1.5 TB/s" in explained and "(computed)" in explained


def test_only_timed_kernels_have_a_measured_line() -> None:
    assert "kernels, measured" in texts(of(kernels("prefill"))) and "61 µs" in " ".join(texts(of(kernels("prefill"))))
    tiles = tile_trace(4)
    for artifacts in ((tiles,), (tiles, traffic_run(tiles, None, None)), (tiles, replace(traffic_run(tiles), layer=5))):
        frame = of(with_artifacts(*artifacts, ceilings()))
        assert "kernels, measured" not in texts(frame)
    assert "Measured" not in VIEW.summary(kernels("cpu"), ViewState()) and "Measured: 9" in VIEW.summary(kernels("prefill"), ViewState())


def test_bandwidths_are_of_the_device_that_ran_the_tiles() -> None:
    tiles = tile_trace(4)
    ids = {mark.id for mark in of(with_artifacts(tiles, ceilings(CPU))).marks}
    assert "speed:copy" not in ids and "speed:hbm" in ids
    remark = replace(tiles, device=f"{CPU} (Triton interpreter)")
    assert "speed:copy" in {mark.id for mark in of(with_artifacts(remark, ceilings(CPU), ceilings(GPU))).marks}
    assert "21 GB/s" in " ".join(texts(of(with_artifacts(remark, ceilings(CPU), ceilings(GPU)))))


def test_the_shown_step_chooses_its_tiles() -> None:
    two = with_artifacts(tile_trace(2, ((1, 16, 16),)), tile_trace(5, ((1, 16, 400),)))
    assert traffic(two, ViewState(step=2)).tiles.step_id == 2 and traffic(two, ViewState(step=5)).tiles.step_id == 5


def test_without_tiles_it_says_what_to_press_and_offers_it() -> None:
    frame = of(kernels("nothing_yet"), step=3, layer=2)
    assert "Trace the tiles" in frame.summary and not frame.marks
    assert [(o.job, o.choices[0][1]) for o in frame.offers] == [("tiles", {"step": 3, "layer": 2}), ("ceilings", {})]
    assert "no sizes" in of(kernels("unusable")).summary
    assert {ask.answer(kernels("unusable"), ViewState()) for ask in VIEW.asks} == {""}


def test_asks_are_answered_by_texts_of_the_picture() -> None:
    for name in WITH_TILES:
        state = ViewState(size=(1242, 590))
        frame = render(VIEW, kernels(name), state)
        whole = " ".join(texts(frame))
        for ask in VIEW.asks:
            assert ask.answer(kernels(name), state) in whole, f"{name}: {ask.question}"


@pytest.mark.parametrize("name", WITH_TILES)
def test_a_recording_keeps_the_picture(name: str) -> None:
    back = decode(encode(kernels(name)))
    assert of(back).labels == of(kernels(name)).labels and of(back).marks == of(kernels(name)).marks
