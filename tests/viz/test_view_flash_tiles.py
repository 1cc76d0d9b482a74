"""The tiles' picture says what the trace holds: counted again pair by pair, the softmax again from the scores alone."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import numpy as np
import pytest

from engine.artifacts import PARTLY, TileTrace
from engine.jobs import JOBS
from engine.recording import decode, encode
from engine.trace import Trace
from tests.viz import tile_scenarios as tiles
from tests.viz.kernel_scenarios import KERNEL_MAKERS, kernels
from tests.viz.scenarios import scenario
from tests.viz.tile_scenarios import TRACES, Shape, tile_trace, with_artifacts
from tests.viz.valid import check_frame, frame_bytes
from viz.registry import load_views
from viz.tiles import chosen, differences, is_complete, matrix, shown, tile_traces, whole
from viz.view import Frame, ViewState, render
from viz.views.flash_tiles import end_of, number, stretched

VIEW = load_views()["flash_tiles"]
NOW, OTHER, SKIPPED, CLEAR = 0, 1, 2, 255
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


def tile_marks(frame: Frame) -> dict[int, object]:
    return {int(mark.id[5:]): mark for mark in frame.marks if mark.id.startswith("tile:")}


def boxed(frame: Frame) -> int:
    (found,) = [i for i, mark in tile_marks(frame).items() if mark.outline == "accent"]
    return found


def seen(it: TileTrace, query: int, key: int) -> bool:
    return key <= query and (not it.window or key > query - it.window)


# ---- what is drawn ----


@pytest.mark.parametrize("theme", ["light", "dark", "projector"])
@pytest.mark.parametrize("name", TRACES)
def test_every_trace_is_a_valid_frame_at_every_size(name: str, theme: str) -> None:
    trace = TRACES[name]()
    for size in SIZES:
        for language in ("en", "ja"):
            for axis in ("step", "time"):
                state = state_of(trace, size=size, theme=theme, language=language, axis=axis)
                check_frame(render(VIEW, trace, state), state)


@pytest.mark.parametrize("name", TRACES)
def test_every_tile_can_be_boxed_and_then_the_frame_is_valid(name: str) -> None:
    trace = TRACES[name]()
    for i in list(tile_marks(draw(trace)))[::7]:
        state = state_of(trace, selection=f"tile:{i}")
        frame = render(VIEW, trace, state)
        check_frame(frame, state)
        assert boxed(frame) == i


@pytest.mark.parametrize("name", ["prefill", "cached", "windowed", "one_token"])
def test_visited_and_skipped_tiles_are_those_of_every_pair_of_query_and_key(name: str) -> None:
    trace = TRACES[name]()
    it = shown(trace, trace.artifacts[-1].step_id)
    of = matrix(it, it.row_seq_id, it.row_kv_head)
    _, queries, keys = next(entry for entry in it.sequences if entry[0] == it.row_seq_id)
    visited = skipped = 0
    for first in range(keys - queries, keys, it.block_q):
        for start in range(0, keys, it.block_n):
            rows, columns = range(first, min(first + it.block_q, keys)), range(start, min(start + it.block_n, keys))
            any_seen = any(seen(it, q, k) for q in rows for k in columns)
            visited, skipped = visited + any_seen, skipped + (not any_seen)
    assert (of.visited, of.skipped) == (visited, skipped)
    assert f"visits {visited:,} tile" in texts(draw(trace)) and f"skips {skipped:,} " in texts(draw(trace))


@pytest.mark.parametrize("name", ["prefill", "cached", "windowed", "huge"])
def test_cells_are_solid_in_full_tiles_half_empty_on_the_diagonal_and_hatched_where_nobody_came(name: str) -> None:
    trace = TRACES[name]()
    frame = draw(trace, size=(1882, 839))
    raster = next(r for r in frame.rasters if r.name == "tiles")
    rows, cols = raster.values.shape
    left = np.ones((rows, cols), bool)
    it = shown(trace, trace.artifacts[-1].step_id)
    for block in matrix(it, it.row_seq_id, it.row_kv_head).blocks:
        for i in block.tiles:
            mark = tile_marks(frame).get(i)
            if mark is None:
                continue
            ys = (np.arange(rows) + 0.5) * raster.y1 / rows
            xs = (np.arange(cols) + 0.5) * raster.x1 / cols
            box = np.ix_((ys > mark.y0) & (ys < mark.y1), (xs > mark.x0) & (xs < mark.x1))
            inside, left[box] = raster.values[box], False
            assert inside.size and SKIPPED not in inside
            if it.tiles["kind"][i] == PARTLY:
                assert {NOW, OTHER} & set(np.unique(inside)), f"tile {i} has nothing that is seen"
                assert CLEAR in inside or mark.x1 - mark.x0 < 8, f"tile {i} hides nothing"
            else:
                assert CLEAR not in inside
    if left.any() and len(tile_marks(frame)) == matrix(it, it.row_seq_id, it.row_kv_head).visited:
        assert (raster.values[left] == SKIPPED).mean() > 0.97, "edges may fall on a cell's middle"


def test_the_masked_half_of_a_diagonal_tile_is_as_large_as_it_is() -> None:
    trace = TRACES["prefill"]()
    it = trace.artifacts[-1]
    frame = draw(trace, size=(1882, 839))
    raster = next(r for r in frame.rasters if r.name == "tiles")
    for i, mark in tile_marks(frame).items():
        row = it.tiles[i]
        queries = range(int(row["q_start"]), int(row["q_start"] + row["num_q"]))
        pairs = [seen(it, q, k) for q in queries for k in range(int(row["k_start"]), int(row["k_stop"]))]
        rows, cols = raster.values.shape
        ys, xs = (np.arange(rows) + 0.5) * raster.y1 / rows, (np.arange(cols) + 0.5) * raster.x1 / cols
        inside = raster.values[np.ix_((ys > mark.y0) & (ys < mark.y1), (xs > mark.x0) & (xs < mark.x1))]
        assert abs((inside != CLEAR).mean() - np.mean(pairs)) < 0.06


def test_splits_have_a_row_each_and_hide_nothing_as_skipped() -> None:
    trace = TRACES["decode"]()
    it = shown(trace, 6)
    of = matrix(it, it.row_seq_id, it.row_kv_head)
    assert [block.split for block in of.blocks] == [0, 1, 2, 3] and of.skipped == 0
    raster = next(r for r in draw(trace).rasters if r.name == "tiles")
    assert SKIPPED not in raster.values and {NOW, CLEAR} <= set(np.unique(raster.values).tolist())


def test_scrubbing_makes_the_tiles_up_to_the_boxed_one_solid() -> None:
    trace = TRACES["cached"]()
    it = shown(trace, trace.artifacts[-1].step_id)
    block = chosen(it, None).block
    shares = []
    for i in block.tiles:
        values = next(r for r in draw(trace, selection=f"tile:{i}").rasters if r.name == "tiles").values
        shares.append((values == NOW).sum())
    assert shares == sorted(shares) and shares[0] > 0 and len(set(shares)) == len(shares)


def test_in_time_order_every_block_takes_part() -> None:
    trace = TRACES["cached"]()
    it = shown(trace, trace.artifacts[-1].step_id)
    of = chosen(it, None).matrix
    starts = it.tiles["start_ns"][list(of.in_time)]
    assert (np.diff(starts) >= 0).all() and len(of.in_time) == of.visited
    last = draw(trace, axis="time", selection=f"tile:{of.in_time[-1]}")
    assert OTHER not in next(r for r in last.rasters if r.name == "tiles").values
    assert any(mark.id == "axis:step" for mark in last.marks) and any(mark.id == "axis:time" for mark in draw(trace).marks)
    assert "in time order" in texts(draw(trace)) and "in launch order" in texts(draw(TRACES["prefill"]()))


def test_very_many_tiles_get_few_marks_those_of_the_boxed_block_among_them() -> None:
    frame = draw(TRACES["huge"]())
    it = shown(TRACES["huge"](), 2)
    assert len(frame.marks) < 400 and set(chosen(it, None).block.tiles) <= set(tile_marks(frame))


# ---- the numbers ----


@pytest.mark.parametrize("name", TRACES)
def test_max_sum_and_factor_follow_from_the_scores_alone(name: str) -> None:
    trace = TRACES[name]()
    it = shown(trace, trace.artifacts[-1].step_id)
    m, l, program = -math.inf, 0.0, None
    for i in it.row_tiles.tolist():
        row = it.tiles[i]
        if row["program"] != program:
            m, l, program = -math.inf, 0.0, row["program"]
        x = [float(v) for v in it.scores[row["k_start"] : row["k_stop"]] if math.isfinite(v)]
        new = max([m, *x])
        factor = math.exp(m - new) if x and math.isfinite(m) else 1.0
        before, added = l, sum(math.exp(v - new) for v in x)
        m, l = new, l * factor + added
        said = texts(draw(trace, size=(1882, 839), selection=f"tile:{i}"))
        if not x:
            assert "sees no key" in said
        elif before == 0:
            assert f"First keys: max {number(m)}" in said
        elif factor < 1:
            assert f"shrinks by e^{number(math.log(factor))} = {number(factor)}" in said
            assert f"{number(before)} × {number(factor)} + {number(added)} = {number(l)}." in said
        else:
            assert f"max stays {number(m)}: the old sum {number(before)} is kept" in said
        assert not x or f"→ {number(m)}" in said


def test_numbers_have_two_or_three_digits_and_real_signs() -> None:
    given = (0, 2.13, -15.34, 0.2004, 0.004, 3e-8, 153.6, 1e6, -math.inf, math.inf)
    assert [number(v) for v in given] == ["0", "2.1", "−15.3", "0.20", "4×10⁻³", "3×10⁻⁸", "154", "1×10⁶", "−∞", "∞"]


@pytest.mark.parametrize("name", TRACES)
def test_the_end_is_plain_softmax_also_where_splits_are_merged(name: str) -> None:
    trace = TRACES[name]()
    for it in tile_traces(trace):
        found = differences(it)
        assert is_complete(it) and end_of(it) == found[-1] < 1e-6 and len(found) == len(it.row_tiles)
        assert len(found) < 3 or np.nanmax(found) > 0.01, "it was not there from the beginning"


def test_a_wrong_end_is_shown_as_it_is() -> None:
    """The difference is measured, not assumed."""
    trace = TRACES["prefill"]()
    wrong = with_artifacts(trace, replace(trace.artifacts[-1], plain=trace.artifacts[-1].plain + np.float32(0.5)))
    assert end_of(wrong.artifacts[-1]) == pytest.approx(0.5, abs=1e-5)
    assert "at the end 0.50" in texts(draw(wrong, size=(1882, 839))) and "by 0.50." in VIEW.summary(wrong, ViewState(step=0))


def test_sizes_on_the_chip_are_those_of_the_tiles() -> None:
    said = texts(draw(TRACES["huge"](), size=(1882, 839)))
    assert "Q 128×64" in said and "16 KiB" in said and "acc 128×64" in said and "32 KiB" in said and "64 KiB" in said


def test_rows_whose_numbers_were_not_kept_get_a_sentence_and_no_numbers() -> None:
    trace = TRACES["prefill"]()
    frame = draw(trace, selection="seq:1", size=(1882, 839))
    assert "were kept for" in texts(frame) and "→" not in texts(frame).replace("→ in", "").replace("keys 1–5 →", "")
    assert not [s for s in frame.series if s.name in ("scores", "difference")]
    it = trace.artifacts[-1]
    other = next(
        i for i, t in enumerate(it.tiles) if t["seq_id"] == it.row_seq_id and t["kv_head"] == it.row_kv_head and i not in it.row_tiles
    )
    frame = draw(trace, selection=f"tile:{other}", size=(1882, 839))
    assert "max m" in texts(frame) and "Scores and acc were kept" in texts(frame) and not [s for s in frame.series if s.name == "scores"]


# ---- which trace ----


def test_the_newest_of_the_step_is_shown_and_another_steps_says_so() -> None:
    base = TRACES["prefill"]()
    first, second = (tile_trace(0, tiles.batch(base, 0), Shape(layer=layer)) for layer in (3, 7))
    late = tile_trace(2, tiles.batch(base, 2), Shape(layer=9))
    trace = with_artifacts(base, first, second, late)
    assert shown(trace, 0) is second and shown(trace, 2) is late and shown(trace, 5) is late
    frame = render(VIEW, trace, ViewState(step=5))
    assert "These are tiles of step 2; step 5 has not been traced." in texts(frame)
    assert "These are tiles" not in texts(render(VIEW, trace, ViewState(step=0)))


def test_without_tiles_it_says_what_to_press() -> None:
    frame = render(VIEW, scenario("busy"), ViewState(step=3))
    check_frame(frame, ViewState(step=3))
    offer = next(o for o in frame.offers if o.id == "step")
    assert offer.label in frame.summary and dict(offer.choices[0][1]) == {"step": 3, "layer": 0}
    assert {ask.answer(scenario("busy"), ViewState(step=3)) for ask in VIEW.asks} == {""}


@pytest.mark.parametrize("at", range(len(tiles.broken().artifacts)))
def test_parts_that_do_not_belong_together_count_as_none(at: int) -> None:
    bad = tiles.broken().artifacts[at]
    assert not whole(bad) and whole(TRACES["prefill"]().artifacts[-1])
    frame = render(VIEW, with_artifacts(TRACES["prefill"](), bad), ViewState(step=0))
    check_frame(frame, ViewState(step=0))
    assert "damaged" in frame.summary and not frame.marks


@pytest.mark.parametrize("name", KERNEL_MAKERS)
def test_traces_of_other_views_are_survived(name: str) -> None:
    for selection in (None, "seq:1", "tile:0", "tile:99999"):
        state = ViewState(selection=selection)
        check_frame(render(VIEW, kernels(name), state), state)


def test_a_recording_gives_the_same_picture() -> None:
    trace = TRACES["cached"]()
    back = decode(encode(trace))
    again = Trace({n: getattr(back, n) for n in ("steps", "works")}, trace.sequences, trace.token_texts, trace.meta, back.artifacts)
    assert frame_bytes(draw(again)) == frame_bytes(draw(trace))


def test_the_badge_says_where_it_ran_and_how_far_it_is_from_the_record() -> None:
    ours = draw(TRACES["prefill"]()).badges
    assert [b.kind for b in ours] == ["recomputed", "computed"] and "no SM and no time" in ours[0].text and "3×10⁻⁴" in ours[0].text
    there = draw(TRACES["cached"]()).badges[0]
    assert "NVIDIA H200" in there.text and "no SM" not in there.text
    live = with_artifacts(TRACES["cached"](), replace(TRACES["cached"]().artifacts[-1], provenance="measured", difference=0.0))
    assert draw(live).badges[0].kind == "measured"


# ---- offers ----


@pytest.mark.parametrize("name", TRACES)
def test_what_is_offered_are_arguments_of_the_engines_job(name: str) -> None:
    trace = TRACES[name]()
    known = set(inspect.signature(JOBS["tiles"]).parameters) - {"core", "past"} | {"step", "splits"}
    for offer in draw(trace).offers:
        assert offer.job == "tiles" and not offer.why
        for _, args in offer.choices:
            assert set(args) <= known and all(isinstance(v, (int, str)) for v in args.values())


def test_one_thing_changes_in_each_offer_and_it_is_never_what_is_shown() -> None:
    trace = TRACES["cached"]()
    it, offers = trace.artifacts[-1], {o.id: o for o in draw(trace).offers}
    assert set(offers) == {"tiles", "layer", "head", "sequence", "next"}
    assert len(offers["layer"].choices) == 29 and all(args["layer"] != it.layer for _, args in offers["layer"].choices)
    assert len(offers["head"].choices) == 8 and all(args["head"] != it.row_head for _, args in offers["head"].choices)
    sizes = {(args["block_m"], args["block_n"]) for _, args in offers["tiles"].choices}
    assert len(sizes) == 15 and (it.block_m, it.block_n) not in sizes
    assert all("position" not in args and args["seq_id"] != it.row_seq_id for _, args in offers["sequence"].choices)
    assert "step" not in offers["next"].choices[0][1]
    decode_ = {o.id: o for o in draw(TRACES["decode"]()).offers}
    assert {args["splits"] for _, args in decode_["splits"].choices} == {1, 2, 8, 16}
    assert all("block_m" not in args for _, args in decode_["tiles"].choices), "the decode kernel chooses its rows itself"


def test_a_selected_row_of_an_untraced_step_is_asked_for() -> None:
    trace = scenario("busy")
    work = trace.rows("works", 2, 2)[0]
    seq_id, last = int(work["seq_id"]), int(work["start"] + work["num_tokens"]) - 1
    for selection, more in (
        (f"query:{seq_id}:{last}", {"seq_id": seq_id, "position": last}),
        (f"seq:{seq_id}", {"seq_id": seq_id}),
        ("seq:99", {}),
    ):
        offer = render(VIEW, trace, ViewState(step=2, layer=5, selection=selection)).offers[0]
        assert dict(offer.choices[0][1]) == {"step": 2, "layer": 5} | more


# ---- geometry ----


@pytest.mark.parametrize(("sizes", "pixels"), [([64, 64, 4], 300), ([1], 50), ([5] * 400, 200), ([1, 1000, 1, 1000], 100)])
def test_small_parts_keep_a_width_and_all_fill_the_room(sizes: list[int], pixels: float) -> None:
    edges = stretched(sizes, pixels, 14)
    assert edges[0] == 0 and edges[-1] == pytest.approx(pixels) and len(edges) == len(sizes) + 1
    assert np.diff(edges).min() >= min(14, 0.9 * pixels / len(sizes)) - 1e-9
    assert stretched([10, 10, 20], 400, 14).tolist() == [0, 100, 200, 400]
