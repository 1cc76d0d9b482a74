"""What each picture shows is what the record says."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from engine.trace import Trace
from tests.factories import add, make_core, prompt_of, run, trace_of
from tests.viz.scenarios import scenario
from viz.lanes import queue
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
        for wait in queue(trace, step):
            assert reason_words(wait, trace) in said


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
    first, second = (picture.paints[int(picture.values[6, c])] for c in (0, 1))
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
    assert len(shared) == 3 and texts(frame).count("×2") == 3
    mark = next(m for m in frame.marks if m.id == f"page:{shared[0]}")
    assert "held by A and B" in mark.text and "shared" in mark.detail


def test_the_block_table_is_the_pools_and_links_are_for_a_selection_only() -> None:
    trace = scenario("busy")
    frame = render(VIEWS["blocks"], trace, ViewState(step=3, selection="seq:1"))
    wanted = [f"{i} → {page}" for i, page in enumerate(trace.pool_at(3).tables[1])]
    assert set(wanted) <= set(texts(frame)) and "A's block table" in texts(frame)
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
