"""What each picture shows is what the record says."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from engine.trace import Trace
from tests.factories import add, make_core, prompt_of, run, trace_of
from tests.viz.scenarios import scenario
from tests.viz.strangers import moments
from viz.lanes import queue, static_lanes
from viz.registry import load_views, load_words
from viz.select import identity, page_cells
from viz.theme import contrast, table
from viz.view import ViewState, render
from viz.words.caption import reason_words

VIEWS = load_views()


def texts(frame) -> list[str]:
    return [label.text for label in frame.labels]


def raster(frame, name: str):
    return next(r for r in frame.rasters if r.name == name)


# ---- registry ----


def test_views_come_in_the_order_of_the_talk() -> None:
    assert list(VIEWS)[:4] == ["batching", "blocks", "mask", "tokens"]
    assert all(view.name == name and view.question.endswith("?") for name, view in VIEWS.items())


@pytest.mark.parametrize(("loader", "what"), [(load_views, "VIEW"), (load_words, "WORDS")])
def test_a_module_that_declares_nothing_fails_by_name(loader, what: str, tmp_path, monkeypatch) -> None:
    package = tmp_path / f"half_{what.lower()}"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "forgotten.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LookupError, match=rf"forgotten\.py.*{what}"):
        loader(package.name, [str(package)])
    sys.modules.pop(f"{package.name}.forgotten", None)


def test_words_of_another_view_fail_by_name(tmp_path, monkeypatch) -> None:
    package = tmp_path / "borrowing"
    package.mkdir()
    (package / "__init__.py").write_text("")
    view = 'VIEW = View("thief", "T", "?", lambda t, s: None, lambda t, s: "", words={"blocks.title": "mine"})'
    (package / "thief.py").write_text(f"from viz.view import View\n{view}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LookupError, match=r"thief\.py.*'blocks\.title' must begin with 'thief\.'"):
        load_views("borrowing", [str(package)])


@pytest.mark.parametrize("view", ["batching", "mask", "tokens"])
def test_the_summary_of_a_view_of_requests_names_who_is_there(view: str) -> None:
    text = VIEWS[view].summary(scenario("busy"), ViewState(step=3))
    assert all(name in text for name in "ABC")


# ---- continuous batching ----


def test_the_queue_is_said_with_its_reasons() -> None:
    trace = scenario("busy")
    for step in (7, 9):
        said = texts(render(VIEWS["batching"], trace, ViewState(step=step)))
        for n, wait in enumerate(queue(trace, step), 1):
            assert f"{n}. {reason_words(wait, trace)}" in said


def test_samples_wait_in_the_queue_while_their_prompt_is_read() -> None:
    core = make_core(pages=32, max_num_seqs=8)
    add(core, prompt_of(9, 1), 4, n=3, temperature=0.7, seed=1)
    core.step()
    core.step()
    trace = trace_of(core)
    said = texts(render(VIEWS["batching"], trace, ViewState(step=0)))
    assert [trace.name(int(w["seq_id"])) for w in queue(trace, 0)] == ["A·2", "A·3"] and not len(queue(trace, 1))
    assert said[0] == "waiting" and "1. A·2 waits: A·1 computes the shared prompt first (9 tokens)" in said and said.count("idle now") == 7
    answers = [[ask.answer(trace, ViewState(step=step)) for ask in VIEWS["batching"].asks] for step in (0, 1)]
    assert answers == [["A·1", "7", "9", "A·2", "1"], ["A·1", "5", "3", "nobody", "0"]]


def test_the_queue_is_a_list_and_not_spans_of_time() -> None:
    frame = render(VIEWS["batching"], scenario("preempted"), ViewState(step=9))
    lines = [m for m in frame.marks if m.text.count(" waits: ") and m.axes == "xy"]
    assert len(lines) > 1 and len({(m.x0, m.x1) for m in lines}) == 1 and not any(m.outline for m in lines)
    chips = [r for r in frame.rasters if r.name == "waiting"]
    assert len(chips) == len(lines) and all(max(r.x1 - r.x0, r.y1 - r.y0) < 20 for r in chips)


def test_what_a_slot_does_is_told_apart_without_colour() -> None:
    core = make_core(pages=16, page_size=4, max_num_seqs=3)
    add(core, 6, 5)
    core.step()
    legend = {p.label: p for p in render(VIEWS["batching"], trace_of(core), ViewState()).legend}
    looks = {(p.hatch, p.alpha if p.alpha < 0.5 else 1.0) for p in legend.values()}
    assert len(looks) == len(legend)
    assert legend["keeps its slot, computes nothing"].alpha < 0.2 and legend["idle slot"].hatch


def test_ticks_are_regular_up_to_the_shown_step() -> None:
    for name in ("busy", "preempted", "crowded", "long"):
        trace = scenario(name)
        for step in (9, 30, 39):
            step = trace.clamp(step)
            for size in ((1242, 606), (960, 540), (620, 430)):
                frame = render(VIEWS["batching"], trace, ViewState(step=step, size=size))
                now = next((label for label in frame.labels if label.text == f"step {step}"), None)
                ticks = [int(label.text) for label in frame.labels if now and label.y == now.y and label.text.isdigit()]
                gap = min(np.diff(ticks), default=0)
                before = [at for at in range(0, step, int(gap))] if gap else []
                shown = frame.axes["xaxis2"]["range"]
                missing = [at for at in before if at > shown[0] and at not in ticks]
                assert all(step - at < 2 * (shown[1] - shown[0]) / 10 for at in missing), (name, step, size, ticks)


@pytest.mark.parametrize(("size", "said"), [((1242, 606), "Static batches: by now"), ((732, 540), "Static: "), ((620, 560), "Static: ")])
def test_the_static_batches_say_both_numbers_whatever_the_width(size: tuple[int, int], said: str) -> None:
    frame = render(VIEWS["batching"], scenario("long"), ViewState(step=38, size=size))
    line = next(text for text in texts(frame) if text.startswith("Static"))
    assert line.startswith(said) and line.count("finished") == 2 and line.count("%") == 2 and "…" not in line


def test_a_long_formula_is_short_on_the_badge_and_whole_at_its_mark() -> None:
    frame = render(VIEWS["batching"], scenario("long"), ViewState(step=38, size=(1242, 606)))
    mark = next(m for m in frame.marks if m.id == "static")
    badge = next(b for b in frame.badges if b.kind == "computed")
    assert len(badge.text) < 80 and "as many steps as it took here" in mark.detail


def test_a_frame_shows_which_step_of_the_slots_is_now() -> None:
    frame = render(VIEWS["batching"], scenario("busy"), ViewState(step=9))
    box = next(s for s in frame.series if s.name == "shown step")
    step = next(m for m in frame.marks if m.id == "step:9")
    axis, width = frame.axes["xaxis2"], ViewState().size[0]
    low, high = axis["domain"]
    at = [(low + (high - low) * (x - axis["range"][0]) / (axis["range"][1] - axis["range"][0])) * width for x in (step.x0, step.x1)]
    assert (box.x.min(), box.x.max()) == (pytest.approx(at[0], abs=1), pytest.approx(at[1], abs=1))


def test_a_stay_is_a_mark_of_its_sequence_and_a_step_one_of_its_own() -> None:
    trace = scenario("busy")
    marks = {m.id for m in render(VIEWS["batching"], trace, ViewState(step=9)).marks}
    assert {f"seq:{int(w['seq_id'])}" for w in trace.rows("works", 0, 9)} <= marks
    assert {f"step:{s}" for s in range(10)} <= marks and "step:10" not in marks


def test_axes_stay_while_steps_go_by() -> None:
    trace = scenario("long")
    seen = {repr(render(VIEWS["batching"], trace, ViewState(step=s)).axes) for s in range(100, 160)}
    assert len(seen) <= 6


def test_finishes_and_preemptions_are_drawn_once_each() -> None:
    trace = scenario("preempted")
    for step in (int(trace.preempts["step_id"][0]), 50):
        series = {s.name: s for s in render(VIEWS["batching"], trace, ViewState(step=step)).series}
        assert len(series["preempts"].x) == np.count_nonzero(trace.preempts["step_id"] <= step) > 0
        assert len(series["finishes"].x) == np.count_nonzero(trace.finishes["step_id"] <= step)
        assert {round(float(x)) for x in series["finishes"].x} <= set(trace.finishes["step_id"].tolist())
    assert len(series["finishes"].x)


def test_idle_slots_of_a_static_batch_are_hatched() -> None:
    trace = scenario("static")
    picture = raster(render(VIEWS["batching"], trace, ViewState(step=7)), "slots")
    assert any(picture.paints[v].color == "free" and picture.paints[v].hatch for v in np.unique(picture.values) if v != 255)


def test_prefill_and_decode_differ_by_texture_and_not_by_hue() -> None:
    core = make_core()
    add(core, 6, 5)
    core.step()
    core.step()
    picture = raster(render(VIEWS["batching"], trace_of(core), ViewState()), "slots")
    first, second = (picture.paints[int(picture.values[1, c])] for c in (0, 1))
    assert first.color == second.color == "request-0" and first.hatch and not second.hatch


# ---- mask ----


def test_the_selected_row_reads_out_what_it_sees() -> None:
    core = make_core()
    prompt = prompt_of(7, 3)
    add(core, prompt, 4)
    core.step()
    trace = trace_of(core)
    said = " ".join(texts(render(VIEWS["mask"], trace, ViewState(step=0, selection="query:1:2"))))
    seen = "".join(trace.token_text(i) for i in prompt[:3]).strip()
    assert f"A's 3rd token sees these 3: {seen}" in said


@pytest.mark.parametrize("language", ["en", "ja"])
def test_a_long_sentence_keeps_its_head_and_the_newest_text(language: str) -> None:
    core = make_core(pages=60, page_size=8, max_model_len=300, max_num_batched_tokens=200)
    prompt = prompt_of(90, 1)
    add(core, prompt, 3)
    core.step()
    trace = trace_of(core)
    newest = "".join(trace.token_text(i) for i in prompt[-6:]).strip()
    for size in ((1240, 560), (620, 430)):
        said = texts(render(VIEWS["mask"], trace, ViewState(step=0, size=size, language=language)))
        at = next(i for i, text in enumerate(said) if text.endswith(newest))
        assert said[at].startswith("… ") and "90" in said[at - 1] and said[at - 1][-1] in ":："


def test_the_mask_of_whole_prompts_is_the_causal_triangle() -> None:
    core = make_core()
    add(core, 4, 2)
    add(core, 3, 2)
    core.step()
    picture = raster(render(VIEWS["mask"], trace_of(core), ViewState(step=0)), "mask")
    paints = [[picture.paints[v] for v in row] for row in picture.values.tolist()]
    allowed = np.array([[p.color.startswith("request") and p.alpha == 1 for p in row] for row in paints])
    want = np.zeros((7, 7), bool)
    want[:4, :4], want[4:, 4:] = np.tril(np.ones((4, 4))), np.tril(np.ones((3, 3)))
    assert np.array_equal(allowed, want)
    assert all(paints[i][j].hatch for i, j in ((0, 4), (6, 0)))


def test_rows_of_the_mask_are_at_least_14_px() -> None:
    for name in ("busy", "long", "crowded", "large_pool"):
        for size in ((960, 540), (620, 430)):
            frame = render(VIEWS["mask"], scenario(name), ViewState(step=3, size=size))
            picture, axis = raster(frame, "mask"), frame.axes["yaxis2"]["domain"]
            assert (axis[1] - axis[0]) * size[1] / len(picture.values) >= 13.99


def test_the_mask_says_how_many_queries_there_are_and_where_keys_are_folded() -> None:
    core = make_core(pages=60, page_size=8, max_model_len=300, max_num_batched_tokens=200)
    add(core, prompt_of(90, 1), 3)
    add(core, prompt_of(25, 2), 3)
    core.step()
    trace = trace_of(core)
    for size in ((1240, 560), (620, 430), (620, 320)):
        said = texts(render(VIEWS["mask"], trace, ViewState(step=0, size=size)))
        assert "115 query tokens in this step" in said or (size[1] < 370 and "115 queries ↓" in said), size
        rows = [int(text.split()[1]) for text in said if text.startswith("⋯ ") and text.endswith("rows")]
        keys = [text for text in said if text.startswith("⋯") and not text.endswith("rows")]
        assert rows and len(keys) == len(rows), said


def test_what_is_outlined_has_a_frame_in_the_legend() -> None:
    framed = {
        p.label for view in ("mask", "tokens") for p in render(VIEWS[view], scenario("busy"), ViewState(step=9)).legend if p.alpha < 0.05
    }
    assert framed == {"framed: the row read out below", "new in this step"}


# ---- blocks ----


def test_cells_are_filled_in_proportion_and_in_their_owners_colour() -> None:
    trace = scenario("busy")
    for step in (3, 8, 12):
        frame, cells = render(VIEWS["blocks"], trace, ViewState(step=step)), page_cells(trace, step)
        picture, who = raster(frame, "blocks"), identity(trace, step)
        marks = {m.id: m for m in frame.marks}
        per_x = picture.values.shape[1] / (picture.x1 - picture.x0)
        per_y = picture.values.shape[0] / (picture.y1 - picture.y0)
        for page in range(1, cells.num_pages + 1):
            m = marks[f"page:{page}"]
            assert m.x1 - m.x0 >= 28 and m.y1 - m.y0 >= 27
            x0, x1 = (round((x - picture.x0) * per_x) for x in (m.x0, m.x1))
            y0, y1 = (round((y - picture.y0) * per_y) for y in (m.y0, m.y1))
            part = picture.values[y0:y1, x0:x1]
            owners = [int(i) for i in cells.owners[page] if i >= 0]
            colors = {picture.paints[v].color for v in np.unique(part)}
            if owners:
                share = np.mean([[picture.paints[v].color.startswith("request") for v in row] for row in part.tolist()])
                assert share == pytest.approx(cells.used[page] / cells.page_size, abs=0.01)
                assert {who.color(i) for i in owners} >= {c for c in colors if c.startswith("request")}
            else:
                assert colors <= {"free", "cached"}


def test_a_shared_block_shows_all_owners_and_their_number() -> None:
    core = make_core(pages=24)
    add(core, prompt_of(13, 1), 9)
    core.step()
    add(core, prompt_of(13, 1), 9)
    core.step()
    trace = trace_of(core)
    frame = render(VIEWS["blocks"], trace, ViewState())
    shared = [p for p, owners in trace.pool_at(1).owners.items() if len(owners) == 2]
    assert len(shared) == 3 and [text for text in texts(frame) if text.endswith("×2")] == [f"{page} ×2" for page in shared]
    mark = next(m for m in frame.marks if m.id == f"page:{shared[0]}")
    assert "held by A and B" in mark.text and "shared" in mark.detail


def test_the_block_table_is_the_pools_and_links_are_for_a_selection_only() -> None:
    trace = scenario("busy")
    frame = render(VIEWS["blocks"], trace, ViewState(step=3, selection="seq:1"))
    wanted = [f"{i} → {page}" for i, page in enumerate(trace.pool_at(3).tables[1])]
    assert set(wanted) <= set(texts(frame)) and {"A's block table", "entry → block"} <= set(texts(frame))
    links = frame.series[0]
    assert np.count_nonzero(np.isnan(links.x)) == len(wanted)
    assert not len(render(VIEWS["blocks"], trace, ViewState(step=3)).series[0].x)


def test_reserved_and_empty_blocks_of_a_slab_are_waste() -> None:
    trace = scenario("slabs")
    picture = raster(render(VIEWS["blocks"], trace, ViewState(step=1)), "blocks")
    waste = next(i for i, paint in enumerate(picture.paints) if paint.color == "waste")
    assert (picture.values == waste).mean() > 0.1 and picture.paints[waste].hatch


def test_the_padded_comparison_shows_its_formula() -> None:
    badge = next(b for b in render(VIEWS["blocks"], scenario("busy"), ViewState(step=5)).badges if b.kind == "computed")
    assert "min(prompt + max_tokens" in badge.text and "÷" in badge.text


def test_a_large_pool_folds() -> None:
    frame = render(VIEWS["blocks"], scenario("large_pool"), ViewState(step=5))
    assert len(frame.marks) < 60 and "of 3,000 blocks held" in " ".join(texts(frame))


# ---- tokens ----


def test_the_text_on_the_cards_is_the_requests_text() -> None:
    core = make_core(pages=32)
    prompt = prompt_of(4, 2)
    add(core, prompt, 9)
    run(core)
    trace = trace_of(core)
    mono = "".join(label.text for label in render(VIEWS["tokens"], trace, ViewState()).labels if label.mono)
    whole = "".join(trace.token_text(i) for i in prompt) + trace.text_of(1)
    assert mono.replace(" ", "") == whole.replace(" ", "")


def test_a_finish_in_this_step_is_told_from_an_earlier_one() -> None:
    trace = scenario("preempted")
    row = trace.finishes[0]
    name, step = trace.name(int(row["seq_id"])), int(row["step_id"])
    for at, word in ((step, "finished now: "), (step + 1, "finished: ")):
        state = ViewState(step=at, selection=f"seq:{row['seq_id']}")
        assert [text for text in texts(render(VIEWS["tokens"], trace, state)) if text.startswith(f"{name}  {word}")]


def test_an_excerpt_that_begins_later_than_its_prompt_begins_with_an_ellipsis() -> None:
    def first(trace: Trace, step: int) -> str:
        return next(label.text for label in render(VIEWS["tokens"], trace, ViewState(step=step, size=(620, 430))).labels if label.mono)

    assert first(scenario("long"), 150).startswith("…") and not first(scenario("busy"), 2).startswith("…")


def test_a_token_mark_carries_its_alternatives() -> None:
    trace = scenario("busy")
    row = trace.rows("tokens", 3, 3)[0]
    mark = next(m for m in render(VIEWS["tokens"], trace, ViewState(step=3)).marks if m.id == f"token:{row['seq_id']}:{row['position']}")
    percent = f"{100 * np.exp(row['top_logprobs'][0]):.0f} %"
    assert trace.token_text(int(row["top_ids"][0])).strip() in mark.detail and percent in mark.detail
    assert mark.outline == "accent"


def test_underlines_are_thicker_for_more_probable_tokens() -> None:
    lines = [s for s in render(VIEWS["tokens"], scenario("busy"), ViewState(step=12)).series if s.kind == "line"]
    widths = [s.width for s in lines]
    assert widths == sorted(widths) and len(set(widths)) == 4


# ---- colours ----


@pytest.mark.parametrize("theme", ["light", "dark", "projector"])
@pytest.mark.parametrize("view", VIEWS)
def test_texts_and_outlines_have_contrast_on_paper(view: str, theme: str) -> None:
    colors = table(theme)
    for name in ("busy", "preempted"):
        frame = render(VIEWS[view], scenario(name), ViewState(step=9, theme=theme))
        for label in frame.labels:
            on = colors[label.color[3:]] if label.color.startswith("on-") else colors["paper"]
            assert contrast(colors[label.color], on) >= 4.5, label
        assert all(contrast(colors[m.outline], colors["paper"]) >= 2.99 for m in frame.marks if m.outline)


def test_views_need_no_tables_but_steps() -> None:
    """A trace whose other tables were dropped is drawn as far as it goes."""
    trace = scenario("busy")
    thin = Trace({"steps": trace.steps, "works": trace.works}, trace.sequences, {}, {})
    for view in VIEWS.values():
        assert not render(view, thin, ViewState(step=5)).error


# ---- clause by clause ----


def as_static_rows(trace: Trace, step: int, rows: int) -> list[list[str]]:
    """Static batches by hand, a step at a time: '.' idle, else the name."""
    ends = {int(f["seq_id"]) for f in trace.finishes if f["step_id"] <= step}
    need = {i: np.count_nonzero(trace.rows("works", 0, step)["seq_id"] == i) for i in trace.sequences}
    came = {i: int(trace.steps["step_id"][np.searchsorted(trace.steps["start_us"], s.arrival_us)]) for i, s in trace.sequences.items()
            if s.arrival_us <= trace.steps["start_us"][step]}  # fmt: skip
    places, waiting, batch, drawn = trace.num_pages_at(step) * trace.page_size_at(step), sorted(came, key=lambda i: (came[i], i)), {}, []
    for now in range(step + 1):
        if not any(left for left in batch.values()):
            batch, room = {}, places
            for i in [i for i in waiting if came[i] <= now][:rows]:
                room -= trace.sequences[i].num_prompt_tokens + trace.sequences[i].max_tokens
                if batch and room < 0:
                    break
                batch[i] = need[i] if i in ends else 10**6
            waiting = [i for i in waiting if i not in batch]
        drawn.append([trace.name(i) if left else "." for i, left in batch.items()])
        batch = {i: max(left - 1, 0) for i, left in batch.items()}
    return drawn


def test_static_batches_run_below_on_the_same_x_and_are_the_formula() -> None:
    trace = scenario("long")
    for step in (11, 38):
        rows = int(trace.step(step).step["max_num_seqs"])
        found, want = static_lanes(trace, 0, step, 60, rows), as_static_rows(trace, step, rows)
        for at in range(step + 1):
            names = [trace.name(int(i)) if i >= 0 else "." for i in found.seqs[:, at]]
            assert names == want[at] + ["."] * (rows - len(want[at])), at
        assert not found.cells[:, step + 1 :].any() and found.done <= found.done_here
    frame = render(VIEWS["batching"], trace, ViewState(step=38, size=(1240, 620)))
    assert (
        frame.axes["xaxis4"]["range"] == frame.axes["xaxis2"]["range"] and frame.axes["xaxis4"]["domain"] == frame.axes["xaxis2"]["domain"]
    )
    assert raster(frame, "static batches").values.shape[0] == 4 * rows and any("static batches" in b.text for b in frame.badges)
    assert any(text.startswith("Static batches: ") for text in texts(frame))
    assert not [r for r in render(VIEWS["batching"], scenario("static"), ViewState(size=(1240, 620))).rasters if r.name != "slots"]


def test_a_time_axis_is_the_engines_clocks_without_pauses() -> None:
    trace, at = scenario("busy"), 9
    frame = render(VIEWS["batching"], trace, ViewState(step=at, axis="time"))
    clocks = ("schedule_us", "build_us", "run_us", "settle_us", "commit_us")
    spent = [sum(int(s[c]) for c in clocks) for s in trace.rows("steps", 0, at)]
    marks = {m.id: m for m in frame.marks}
    for step in range(at + 1):
        if spent[step]:
            mark = marks[f"step:{step}"]
            assert (mark.x0, mark.x1) == (pytest.approx(sum(spent[:step])), pytest.approx(sum(spent[: step + 1])))
    assert any(b.kind == "measured" and "pauses and pace excluded" in b.text for b in frame.badges)
    assert "axis:step" in marks and "axis:time" in {m.id for m in render(VIEWS["batching"], trace, ViewState(step=at)).marks}


def test_the_axis_is_part_of_a_link() -> None:
    state = ViewState(axis="time", step=3)
    assert "axis=time" in state.to_query() and ViewState.from_query(state.to_query()) == state
    assert ViewState.from_query("axis=sideways").axis == "step"


def test_the_token_bars_add_up_to_the_step_and_share_x_with_the_slots() -> None:
    trace = scenario("busy")
    frame = render(VIEWS["batching"], trace, ViewState(step=9))
    bars = {s.name: s for s in frame.series}
    done = np.bincount(trace.rows("works", 0, 9)["step_id"], trace.rows("works", 0, 9)["num_tokens"])
    assert bars["prompt tokens"].y[:10].tolist() == done.tolist()
    assert np.nanmax(bars["budget"].y) == trace.steps["token_budget"][9]
    assert (
        frame.axes["xaxis3"]["range"] == frame.axes["xaxis2"]["range"] and frame.axes["xaxis3"]["domain"] == frame.axes["xaxis2"]["domain"]
    )


def test_a_long_history_is_one_wide_fold_that_says_how_long_it_is() -> None:
    core = make_core(pages=120, page_size=8, max_model_len=900, max_num_batched_tokens=600)
    add(core, prompt_of(513, 1), 6)
    core.step()
    core.step()
    frame = render(VIEWS["mask"], trace_of(core), ViewState())
    fold, matrix = raster(frame, "fold"), raster(frame, "mask")
    assert "⋯ 513 cached" in texts(frame) and fold.values.shape == (1, 1) and fold.x1 - fold.x0 >= 4
    assert (matrix.values[:, int(fold.x0) : int(fold.x1)] == 255).all()


def test_cached_blocks_are_outlined_and_free_ones_grey() -> None:
    core = make_core(pages=40)
    add(core, prompt_of(33, 1), 2)
    run(core)
    trace = trace_of(core)
    frame, cells = render(VIEWS["blocks"], trace, ViewState()), page_cells(trace, trace.last_step)
    marks = {m.id: m for m in frame.marks}
    kept = [page for page in range(1, 41) if cells.state[page] == 1]
    assert kept and all(marks[f"page:{page}"].outline == "cached-line" for page in kept)
    assert all(marks[f"page:{page}"].outline is None for page in range(1, 41) if cells.state[page] == 0)


def test_the_count_says_what_is_shared_and_what_of_the_free_is_cached() -> None:
    core = make_core(pages=40)
    add(core, prompt_of(33, 1), 2)
    run(core)
    trace = trace_of(core)
    said = " ".join(texts(render(VIEWS["blocks"], trace, ViewState())))
    assert "0 of 40 blocks held, 0 shared; 40 free, 8 of them cached" in said


def test_the_stripes_of_a_shared_block_are_its_owners_hues() -> None:
    core = make_core(pages=24)
    add(core, prompt_of(13, 1), 9)
    core.step()
    add(core, prompt_of(13, 1), 9)
    core.step()
    trace = trace_of(core)
    picture = raster(render(VIEWS["blocks"], trace, ViewState()), "blocks")
    assert [picture.paints[v].color for v in picture.values[:6, 0]] == ["request-0"] * 3 + ["request-1"] * 3


def test_a_clicked_token_shows_its_likeliest_alternatives() -> None:
    trace = scenario("busy")
    row = next(t for t in trace.tokens if t["num_top"])
    chosen = f"token:{row['seq_id']}:{row['position']}"
    said = " ".join(texts(render(VIEWS["tokens"], trace, ViewState(step=int(row["step_id"]), selection=chosen))))
    assert trace.token_text(int(row["top_ids"][0])).strip() in said and f"{100 * np.exp(row['top_logprobs'][0]):.0f} %" in said


def test_the_chosen_word_is_marked_among_its_alternatives_also_when_it_is_none_of_the_likeliest() -> None:
    trace = scenario("busy")
    tokens = trace.tokens.copy()
    tables = {n: getattr(trace, n) for n in ("steps", "works", "waits", "finishes", "preempts", "events", "keyframes")}
    for row in (0, 3):
        seq_id, step, position = (int(tokens[name][row]) for name in ("seq_id", "step_id", "position"))
        for chosen in (2, 7):  # its place among the likeliest; beyond them
            tokens["num_top"][row] = 5
            tokens["top_ids"][row] = np.arange(5) + 40
            tokens["top_logprobs"][row] = np.log([0.4, 0.2, 0.1, 0.06, 0.05])
            tokens["token_id"][row] = 42 if chosen == 2 else 60
            tokens["logprob"][row] = np.log(0.1 if chosen == 2 else 0.02)
            again = Trace({**tables, "tokens": tokens}, trace.sequences, trace.token_texts, trace.meta)
            state = ViewState(step=step, selection=f"token:{seq_id}:{position}")
            said = next(text for text in texts(render(VIEWS["tokens"], again, state)) if "▸" in text)
            assert said.count("▸") == 1 and said.partition("▸")[2].split("%")[0].strip().endswith(" 10" if chosen == 2 else " 2"), said
            assert ("…" in said) == (chosen == 7), said


def test_readers_are_shown_no_moment_without_one_answer() -> None:
    works, ask = scenario("busy").works, VIEWS["mask"].asks[1]
    for step in range(12):
        counts = works["num_tokens"][works["step_id"] == step]
        said = ask.answer(scenario("busy"), ViewState(step=step))
        assert (said == "") == (np.count_nonzero(counts == counts.max()) > 1)
    plan = moments(VIEWS["mask"], {Path("a"): scenario("busy"), Path("b"): scenario("long")})
    assert all(all(moment.answers) for moment in plan)
    with pytest.raises(LookupError, match="one answer"):
        moments(VIEWS["mask"], {Path("a"): scenario("busy")})


def test_drafted_tokens_are_marked_and_the_targets_own_is_not() -> None:
    trace = scenario("busy")
    works, tokens = trace.works.copy(), trace.tokens.copy()
    mine = np.flatnonzero(tokens["seq_id"] == 1)[1:3]
    step = int(tokens["step_id"][mine[1]])
    tokens["step_id"][mine[0]] = step
    works["num_draft"][(works["seq_id"] == 1) & (works["step_id"] == step)] = 3
    tables = {n: getattr(trace, n) for n in ("steps", "waits", "finishes", "preempts", "events", "keyframes")}
    order = np.argsort(tokens["step_id"], kind="stable")
    drafted = Trace({**tables, "works": works, "tokens": tokens[order]}, trace.sequences, trace.token_texts, trace.meta)
    frame = render(VIEWS["tokens"], drafted, ViewState(step=step))
    marks = {m.id: m for m in frame.marks}
    first, own = (marks[f"token:1:{tokens['position'][i]}"] for i in mine)
    assert first.outline == "good" and "drafted and accepted" in first.text and "drafted" not in own.text
    assert "drafted and accepted" in [p.label for p in frame.legend]
    assert "drafted and accepted" not in [p.label for p in render(VIEWS["tokens"], trace, ViewState(step=step)).legend]
