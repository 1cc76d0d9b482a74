"""The KV cache view: every cell and every FLOP is what the record says, computed here once more by hand."""

from __future__ import annotations

import numpy as np
import pytest

from engine.trace import TABLES, Trace
from tests.factories import add, make_core, prompt_of, run, trace_of
from tests.viz.scenarios import scenario, some_steps
from tests.viz.valid import check_frame
from viz.life import Costs, costs, flops, life, spent
from viz.registry import load_views
from viz.view import ViewState, render

VIEW = load_views()["kv_cache"]
ROOMY = (2600, 1500)  # one cell a token, for all that is drawn here
SMOL = {"name": "m", "parameters": 134_515_008, "layers": 30, "hidden_size": 576, "heads": 9, "head_dim": 64, "vocab_size": 49_152}
TINY = {"name": "m", "parameters": 140, "layers": 2, "hidden_size": 4, "heads": 2, "head_dim": 2, "vocab_size": 10}


def with_facts(trace: Trace, model: dict = SMOL, kv_bytes: int = 23_040) -> Trace:
    tables = {name: getattr(trace, name) for name in TABLES}
    meta = {**trace.meta, "model": model, "kv_bytes_per_token": kv_bytes}
    return Trace(tables, trace.sequences, trace.token_texts, meta, (), trace.errors)


def texts(frame) -> list[str]:
    return [label.text for label in frame.labels]


def said(frame) -> str:
    return " ".join(texts(frame))


def cells(frame) -> list[list[str]]:
    """What each cell looks like, in words."""
    picture = next(r for r in frame.rasters if r.name == "triangle")

    def word(value: int) -> str:
        if value == 255:
            return "clear"
        p = picture.paints[value]
        hue = "own" if p.color.startswith("request") else p.color
        return f"{hue} {'solid' if p.alpha == 1 else 'pale'} {p.hatch or 'plain'}"

    return [[word(v) for v in row] for row in picture.values.tolist()]


def expected(trace: Trace, seq_id: int, step: int) -> list[str]:
    """The look of each position's row, from the works alone, one token at a time."""
    failed = set(trace.steps["step_id"][trace.steps["failed"] > 0].tolist())
    computed, now, again, start = set(), set(), set(), None
    for w in trace.works.tolist():
        row = dict(zip(trace.works.dtype.names, w))
        if row["seq_id"] != seq_id or row["step_id"] > step or row["step_id"] in failed:
            continue
        span = range(row["start"], row["start"] + row["num_tokens"])
        if row["step_id"] == step:
            start, now, again = row["start"], set(span), set(span[: row["num_recomputed"]])
            if not trace.sequences[seq_id].sample:  # a sample also counts the prompt that its first sibling computed
                assert again == set(span) & computed
        else:
            computed |= set(span)
    there = set(range(start)) if start is not None else set(range(stored(trace, seq_id, step, computed)))
    cached_mode = trace.config_at(step)["mode"] != "none"
    looks = []
    for q in range(max([*computed, *now, *there, -1]) + 1):
        if q in again:
            looks.append("own solid cross")
        elif q in now:
            looks.append("own solid plain")
        elif q in there:
            ghost = "diagonal" if start is not None and cached_mode else "plain"
            looks.append(f"own pale {ghost}" if q in computed else f"cached solid {ghost}")
        else:
            looks.append("free solid dots")
    return looks


def stored(trace: Trace, seq_id: int, step: int, computed: set[int]) -> int:
    """Tokens kept after a step in which the sequence did nothing."""
    table = trace.pool_at(step).tables.get(seq_id)
    if table is None:
        return 0
    last = [w for w in trace.works if w["seq_id"] == seq_id and w["step_id"] <= step]
    known = last[-1]["start"] + last[-1]["num_tokens"] if last else trace.sequences[seq_id].num_prompt_tokens
    return min(int(known), len(table) * trace.page_size_at(step))


def prefix_hit() -> Trace:
    core = make_core(pages=64)
    add(core, prompt_of(33, 1), 2)
    run(core)
    add(core, prompt_of(33, 1), 5)
    run(core)
    return trace_of(core)


TRACES = {name: lambda name=name: scenario(name) for name in ("busy", "preempted", "no_cache", "broken", "slabs")} | {"hit": prefix_hit}


@pytest.mark.parametrize("name", TRACES)
def test_every_cell_is_what_the_works_say(name: str) -> None:
    trace, looks = TRACES[name](), set()
    for step in (
        trace.steps["step_id"].tolist()[:: 1 if len(trace) < 40 else 5] + trace.works["step_id"][trace.works["resumed"] > 0].tolist()
    ):
        for seq_id in sorted(set(trace.rows("works", 0, step)["seq_id"].tolist())):
            frame = render(VIEW, trace, ViewState(step=step, selection=f"seq:{seq_id}", size=ROOMY))
            want, got = expected(trace, seq_id, step), cells(frame)
            looks |= set(want)
            for q, row in enumerate(got):
                for k, look in enumerate(row):
                    shown = want[q] if q < len(want) and k <= q else "clear"
                    assert look == shown, f"{name}: {trace.name(seq_id)} at step {step}, query {q}, key {k}"
    assert "own solid plain" in looks
    assert name != "no_cache" or ("own solid cross" in looks and "own pale diagonal" not in looks)
    assert name != "preempted" or {"own solid cross", "own pale diagonal", "free solid dots"} <= looks
    assert name != "hit" or "cached solid diagonal" in looks


def test_the_strip_of_keys_has_no_ghosts() -> None:
    frame = render(VIEW, scenario("busy"), ViewState(step=3, size=ROOMY))
    strip = next(r for r in frame.rasters if r.name == "kv")
    assert not any(strip.paints[v].hatch == "diagonal" for v in np.unique(strip.values) if v != 255)


def test_a_long_sequence_is_binned_and_what_is_new_stays_seen() -> None:
    core = make_core(pages=300, page_size=16, max_num_batched_tokens=1024, max_model_len=2048)
    add(core, prompt_of(900, 1), 4)
    for _ in range(3):
        core.step()
    frame = render(VIEW, trace_of(core), ViewState(size=(960, 540)))
    picture = next(r for r in frame.rasters if r.name == "triangle")
    bin_size = picture.x1 / len(picture.values)
    assert bin_size in (4, 8, 16, 32) and f"(a cell: {bin_size:.0f} tokens)" in said(frame)
    solid = [q for q, row in enumerate(cells(frame)) if "own solid plain" in row]
    assert solid == [901 // bin_size] and "902" in texts(frame) and "1–901" in texts(frame)


# ---- FLOPs ----


def tiny(**knobs) -> Trace:
    """Three prompt tokens, then two steps of one token."""
    core = make_core(**knobs)
    add(core, 3, 3)
    run(core)
    return with_facts(trace_of(core), TINY, 2048)


def test_costs_are_the_formula_by_hand() -> None:
    # 140 parameters less 10 × 4 of the embedding, twice; 4 × 2 layers × 2 heads × 2; 2 × 4 × 10
    assert costs({"model": TINY}) == Costs(body=200, key=32, head=80)
    assert costs({"model": {**TINY, "parameters": 180, "tie_word_embeddings": False}}) == Costs(200, 32, 80)


@pytest.mark.parametrize("mode", ["paged", "none"])
def test_flops_of_three_steps_by_hand(mode: str) -> None:
    trace = tiny(mode=mode)
    it = life(trace, 1, trace.last_step)
    found = spent(it, costs(trace.meta))
    prompt = 3 * 200 + 32 * (1 + 2 + 3) + 80
    second, third = 200 + 32 * 4 + 80, 200 + 32 * 5 + 80
    all_four, all_five = 4 * 200 + 32 * (1 + 2 + 3 + 4) + 80, 5 * 200 + 32 * (1 + 2 + 3 + 4 + 5) + 80
    cached, without = [872, 1280, 1720], [872, 2072, 3632]
    assert np.cumsum([prompt, second, third]).tolist() == cached and np.cumsum([prompt, all_four, all_five]).tolist() == without
    assert found.once.tolist() == cached and found.without.tolist() == without
    assert found.run.tolist() == (cached if mode == "paged" else without)
    frame = render(VIEW, trace, ViewState(step=trace.last_step, selection="seq:1"))
    assert {"with cache 1.72 kFLOP", "without 3.63 kFLOP", "without ÷ with = 2.1"} <= set(texts(frame))
    badge = next(b for b in frame.badges if b.kind == "computed")
    assert "4 × layers × heads × head_dim × keys" in badge.text and frame.badges[0].kind == "state"


def test_flops_are_the_sum_over_tokens_for_every_sequence() -> None:
    """Chunks, preemption and a prefix hit, one token and one key at a time."""
    cost = Costs(7, 3, 11)
    for trace in (scenario("busy"), scenario("preempted"), scenario("no_cache"), prefix_hit()):
        for seq_id in trace.sequences:
            run_, once, without, seen = 0, 0, 0, 0
            for w in trace.works[trace.works["seq_id"] == seq_id]:
                start, end, head = int(w["start"]), int(w["start"] + w["num_tokens"]), 11 * int(w["samples"])
                run_ += sum(7 + 3 * (p + 1) for p in range(start, end)) + head
                once += sum(7 + 3 * (p + 1) for p in range(start, end) if p >= seen) + head
                whole = 0 if trace.config_at(int(w["step_id"]))["mode"] != "none" else start
                without += sum(7 + 3 * (p + 1) for p in range(whole, end)) + head
                seen = max(seen, end)
            it = life(trace, seq_id, trace.last_step)
            if len(it.works):
                found = spent(it, cost)
                assert (found.run[-1], found.once[-1], found.without[-1]) == (run_, once, without), trace.name(seq_id)


def test_bars_add_up_to_the_printed_numbers() -> None:
    trace = with_facts(scenario("preempted"))
    frame = render(VIEW, trace, ViewState(step=41, selection="seq:3", size=(1240, 560)))
    found = spent(life(trace, 3, 41), costs(trace.meta))
    bars = {s.name: s for s in frame.series if s.kind == "bars"}
    assert bars["once"].y[-1] == pytest.approx(found.once[-1]) and bars["recomputed"].y[-1] == pytest.approx(found.run[-1])
    assert bars["without a cache"].y[-1] == pytest.approx(found.without[-1]) and found.run[-1] > found.once[-1]
    assert f"with cache {flops(found.run[-1], found.without[-1])}" in texts(frame)


def test_numbers_beside_each_other_have_one_unit() -> None:
    assert [flops(v, 2.9e12) for v in (47.4e9, 2.927e12)] == ["47.4 GFLOP", "2,927 GFLOP"]
    assert flops(3.2e13, 3.2e13) == "32 TFLOP" and flops(0.21e9, 0.21e9) == "0.21 GFLOP" and flops(5, 5) == "5 FLOP"


# ---- bytes, words, marks ----


def test_bytes_kept_are_tokens_times_bytes_a_token() -> None:
    trace = tiny()
    assert "4 tokens × 2 KiB = 8 KiB" in said(render(VIEW, trace, ViewState(step=1)))
    assert "0 tokens: given back" in said(render(VIEW, trace, ViewState(step=2, selection="seq:1")))
    assert "0 tokens: dropped after each step" in said(render(VIEW, tiny(mode="none"), ViewState(step=1)))


@pytest.mark.parametrize("model", [None, {}, {"name": "fake", "parameters": 0}, {**TINY, "layers": "two"}, {**TINY, "parameters": 40}])
def test_without_the_models_sizes_there_is_a_sentence_and_no_flops(model) -> None:
    trace = with_facts(scenario("busy"), model, 0)
    state = ViewState(step=5)
    frame = render(VIEW, trace, state)
    check_frame(frame, state)
    assert "this record does not say the model's sizes" in said(frame) and "GFLOP" not in said(frame)
    assert [b.kind for b in frame.badges] == ["state"] and "FLOP" not in frame.summary


def test_the_selected_request_is_shown_else_the_longest_of_the_step() -> None:
    trace = scenario("busy")
    longest = max(trace.rows("works", 3, 3), key=lambda w: w["start"] + w["num_tokens"])
    assert f"Step 3: {trace.name(int(longest['seq_id']))} computes" in said(render(VIEW, trace, ViewState(step=3)))
    assert "Step 3: A computes" in said(render(VIEW, trace, ViewState(step=3, selection="seq:1")))


def test_a_row_is_a_mark_and_a_selected_one_is_read_out() -> None:
    trace = with_facts(scenario("busy"))
    frame = render(VIEW, trace, ViewState(step=3, selection="query:1:2", size=(1240, 560)))
    marks = {m.id: m for m in frame.marks}
    assert set(marks) == {f"query:1:{p}" for p in range(8)}
    assert marks["query:1:2"].outline == "accent" and not marks["query:1:7"].outline
    assert "computed earlier, reused now" in marks["query:1:2"].text and "computed now" in marks["query:1:7"].text
    assert "attends to 3 keys" in marks["query:1:2"].detail and "22.5 KiB" in marks["query:1:2"].detail
    assert "A's token 3 sees 3 keys: computed earlier, reused now" in said(frame)


@pytest.mark.parametrize("theme", ["light", "dark", "projector"])
@pytest.mark.parametrize("size", [(1240, 560), (960, 540), (620, 430), (470, 400), (360, 520)], ids=str)
def test_texts_stay_apart_with_all_facts(size: tuple[int, int], theme: str) -> None:
    for name in ("busy", "preempted", "no_cache", "broken", "long", "crowded"):
        trace = with_facts(scenario(name))
        for step in some_steps(trace, 4):
            for selection in (None, "seq:2", "query:3:1"):
                state = ViewState(step=step, size=size, theme=theme, selection=selection)
                check_frame(render(VIEW, trace, state), state)


def test_the_scale_stands_at_the_chart_and_the_steps_are_those_it_took_part_in() -> None:
    trace = with_facts(scenario("preempted"))
    for size in ((1240, 560), (960, 540), (1116, 786)):
        frame = render(VIEW, trace, ViewState(step=30, size=size))
        chart, scale = frame.axes["yaxis4"], next(s for s in frame.series if s.name == "scale")
        top, bottom = ((1 - d) * size[1] for d in reversed(chart["domain"]))
        assert (scale.y.min(), scale.y.max()) == (pytest.approx(top, abs=1), pytest.approx(bottom, abs=1))
        largest = flops(max(chart["range"]), max(chart["range"]))
        label = next(label for label in frame.labels if label.text == largest)
        assert abs(label.y - top) <= label.size and (label.anchor == "left" or label.x < scale.x.min())
        assert "took part in" in said(frame)


def test_what_a_preemption_cost_is_said_and_other_recomputation_is_not_blamed_on_it() -> None:
    trace = scenario("preempted")
    again = trace.works[trace.works["num_recomputed"] > 0]
    for work in again:
        state = ViewState(step=int(work["step_id"]), selection=f"seq:{work['seq_id']}", size=(1240, 560))
        assert f"{work['num_recomputed']} again after preemption" in said(render(VIEW, trace, state))
    tables = {name: getattr(trace, name) for name in TABLES if name != "preempts"}
    silent = Trace(tables, trace.sequences, trace.token_texts, trace.meta)
    text = said(render(VIEW, silent, ViewState(step=int(again[0]["step_id"]), selection=f"seq:{again[0]['seq_id']}", size=(1240, 560))))
    assert f"{again[0]['num_recomputed']} again)" in text and "preemption" not in text


def test_the_empty_staircase_has_a_legend_entry() -> None:
    seen = set()
    for step in some_steps(scenario("busy"), 8):
        frame = render(VIEW, scenario("busy"), ViewState(step=step))
        grid = next((r.values for r in frame.rasters if r.name == "triangle"), None)
        if grid is not None:
            is_empty = bool((np.diag(grid) == 255).any())
            assert [p.alpha < 0.05 for p in frame.legend if p.label == "not computed yet"] == [True] * is_empty
            seen.add(is_empty)
    assert True in seen
