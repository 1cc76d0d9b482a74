"""Captions tell what happened, in at most 110 characters; every code has words in every language."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import viz.words
from engine.request import FinishReason
from engine.trace import FINISH, WAIT_REASONS, SequenceInfo, Trace
from tests.factories import add, make_core, make_trace, prompt_of, run, trace_of
from tests.viz import example_view
from tests.viz.scenarios import MAKERS, scenario
from viz.registry import load_views, load_words
from viz.view import View, ViewState, render
from viz.words import catalogue
from viz.words.caption import MAX_CAPTION, caption, finish_words, reason_words
from viz.words.catalogue import words
from viz.words.en import WORDS, ordinal

LANGUAGES = load_words()
VIEWS = load_views() | {"example_view": example_view.VIEW}


def captions(trace: Trace, language: str = "en") -> dict[int, str]:
    return {s: caption(trace, s, language) for s in trace.steps["step_id"].tolist()}


# ---- captions ----


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", MAKERS)
def test_a_caption_is_one_short_sentence(name: str, language: str) -> None:
    trace = scenario(name)
    for step, text in captions(trace, language).items():
        assert 0 < len(text) <= MAX_CAPTION and "\n" not in text and "{" not in text
        assert f"{step:,}" in text
    assert caption(trace, None, language)


def test_a_join_says_how_much_of_the_prompt_it_read() -> None:
    core = make_core(max_num_batched_tokens=16, pages=32)
    add(core, 40, 3)
    core.step()
    core.step()
    text = captions(trace_of(core))
    assert text[0] == "Step 0: A joined with 16 of 40 prompt tokens."
    assert text[1].startswith("Step 1: A took 4 new blocks")


def test_a_prefix_hit_is_said_with_its_tokens() -> None:
    core = make_core(pages=64)
    add(core, prompt_of(33, 1), 2)
    run(core)
    add(core, prompt_of(33, 1), 2)
    run(core)
    text = " ".join(captions(trace_of(core)).values())
    assert "B joined, found 32 tokens in the cache and computed 1" in text


def test_a_finish_says_the_blocks_that_became_free() -> None:
    core = make_core()
    add(core, 6, 2)
    run(core)
    trace = trace_of(core)
    assert caption(trace, 1) == "Step 1: A finished and freed 2 blocks."
    assert trace.finishes["num_pages"].tolist() == [2]


def test_blocks_that_others_still_hold_are_not_called_freed() -> None:
    core = make_core(pages=32)
    add(core, prompt_of(9, 1), 2)
    core.step()
    add(core, prompt_of(9, 1), 9)
    core.step()
    assert "A finished and gave back 3 blocks, some shared" in caption(trace_of(core), 1)


def test_a_preemption_comes_first_and_names_both() -> None:
    trace = scenario("preempted")
    for row in trace.preempts:
        text = caption(trace, int(row["step_id"]))
        who, cause = trace.name(int(row["seq_id"])), trace.name(int(row["for_seq_id"]))
        assert text.startswith(f"Step {row['step_id']}: {who} was preempted for {cause} and gave back {row['num_pages']} block")


def test_a_preemption_comes_before_a_finish_and_a_finish_before_a_join() -> None:
    trace = scenario("preempted")
    step = int(trace.preempts["step_id"][0])
    finishes = np.array([(step, 2, 0, 0)], FINISH)
    names = ("steps", "works", "tokens", "waits", "preempts", "events", "keyframes")
    both = Trace({**{n: getattr(trace, n) for n in names}, "finishes": finishes}, trace.sequences, {}, trace.meta)
    assert re.match(rf"Step {step}: C was preempted for \w and gave back \d+ blocks; B finished", caption(both, step))
    assert caption(scenario("busy"), 11).startswith("Step 11: A finished and freed 4 blocks")


def test_recomputation_is_never_called_a_prefix_hit() -> None:
    found = 0
    for name in ("preempted", "busy"):
        trace = scenario(name)
        for work in trace.works[trace.works["resumed"] > 0]:
            text = caption(trace, int(work["step_id"]))
            assert "joined, found" not in text
            found += "came back" in text
    assert found


def test_a_sample_that_writes_into_a_shared_block_gets_a_copy() -> None:
    core = make_core(pages=32)
    add(core, 6, 5, n=2, temperature=0.8, seed=7)
    run(core)
    text = captions(trace_of(core))
    assert "A·1 joined with all 6 prompt tokens; A·2 joined on the prompt of A·1" in text[0]
    assert "own copy of block" in text[1]


def test_a_failed_step_says_whom_it_ended() -> None:
    trace = scenario("broken")
    assert caption(trace, 2) == "Step 2 failed and ended A and B; everyone else goes on."


def test_an_abort_is_not_called_a_finish() -> None:
    core = make_core()
    add(core, 6, 9)
    core.step()
    core.abort(1)
    core.step()
    assert caption(trace_of(core), 1) == "Step 1: A was stopped and freed 2 blocks."


def test_a_quiet_step_says_who_got_a_token() -> None:
    core = make_core(pages=32, page_size=16)
    for n in (3, 4, 5):
        add(core, n, 9)
    core.step()
    core.step()
    assert caption(trace_of(core), 1) == "Step 1: A, B and C each got one token."


def test_at_most_two_facts() -> None:
    for name in MAKERS:
        assert all(text.count(";") <= 1 for text in captions(scenario(name)).values())


def test_a_hostile_name_stays_short_and_literal() -> None:
    trace = scenario("busy")
    named = {
        i: SequenceInfo(**{f: getattr(s, f) for f in s.__dataclass_fields__} | {"name": "{x}<b>" * 50}) for i, s in trace.sequences.items()
    }
    odd = Trace(
        {n: getattr(trace, n) for n in ("steps", "works", "tokens", "waits", "finishes", "preempts", "events")}, named, {}, trace.meta
    )
    for step in odd.steps["step_id"].tolist():
        assert len(caption(odd, step)) <= MAX_CAPTION
        for wait in odd.rows("waits", step, step):
            assert "{x}<b>" in reason_words(wait, odd)


# ---- why, how it ended ----


def test_waiting_for_blocks_gives_both_numbers() -> None:
    trace = scenario("busy")
    said = [reason_words(w, trace) for w in trace.waits if WAIT_REASONS[w["reason"]].value == "no_free_pages"]
    assert "E waits: needs 8 blocks, 1 is free" in said


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", [n for n in MAKERS if n != "empty"])
def test_every_wait_has_words_with_its_name(name: str, language: str) -> None:
    trace = scenario(name)
    for wait in trace.waits[:200]:
        text = reason_words(wait, trace, language)
        assert trace.name(int(wait["seq_id"])) in text and "{" not in text


def test_a_wait_in_the_queue_names_who_is_before_it() -> None:
    trace = scenario("busy")
    said = {reason_words(w, trace) for w in trace.waits}
    assert "F·1 waits: E is before it in the queue" in said
    assert "F·2 waits: F·1 computes the shared prompt first (6 tokens)" in said


def test_static_batching_says_how_many_are_left() -> None:
    trace = make_trace(batching="static")
    rows = [w for w in trace.waits if WAIT_REASONS[w["reason"]].value == "static_batch"]
    assert rows and all(re.search(r"must end first \(\d+ (is|are) left\)", reason_words(w, trace)) for w in rows)


def test_how_somebody_ended_is_said_in_words() -> None:
    trace = scenario("busy")
    said = {trace.name(int(f["seq_id"])): finish_words(f, trace) for f in trace.finishes}
    assert said["A"] == "reached its limit of 12 tokens" and said["D"] == "was stopped"
    ended = {finish_words(f, scenario("broken")) for f in scenario("broken").finishes}
    assert "ended with an error" in ended


def test_a_text_that_ran_out_of_room_is_not_said_to_have_reached_its_limit() -> None:
    core = make_core(pages=2, page_size=4)
    add(core, 5, 60)
    run(core)
    trace = trace_of(core)
    assert finish_words(trace.finishes[0], trace) == "ran out of room after 4 tokens"


# ---- catalogues ----


def test_the_words_of_a_view_stand_in_its_own_file_only() -> None:
    assert not [key for key in WORDS if key.split(".")[0] in VIEWS and "." in key]


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_every_key_that_a_view_uses_has_english_words(view: View) -> None:
    """Read from its source: keys of its own, and what it says by a whole key. Keys that are put together are met
    when the scenarios are drawn: an unknown one raises."""
    t, used = words("en", view.words), set()
    for node in ast.walk(ast.parse(Path(inspect.getsourcefile(view.figure)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(rf"{view.name}(\.[a-z_]+)+", node.value):
            used.add(node.value)
        if isinstance(node, ast.Call) and (getattr(node.func, "id", "") == "t" or getattr(node.func, "attr", "") == "t"):
            used |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant)}
    missing = sorted(key for key in used if not t.has(key))
    assert used and not missing, f"{missing} have no English; add them to WORDS of the view {view.name!r}"


def test_a_key_that_nobody_has_is_an_error_that_names_it() -> None:
    with pytest.raises(LookupError, match=r"blocks\.nothing"):
        words("en", VIEWS["blocks"].words)("blocks.nothing")


def test_one_file_translates_the_shared_words_and_those_of_views(tmp_path, monkeypatch) -> None:
    (tmp_path / "qq.py").write_text(
        'WORDS = {"nobody": "niemand", "example_view.title": "Größe", "example_view.now": ("{n} in {step}",) * 2}\n'
    )
    monkeypatch.setattr(viz.words, "__path__", [*viz.words.__path__, str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    catalogue._languages.cache_clear()
    try:
        frame = render(example_view.VIEW, scenario("one_step"), ViewState(language="qq"))
        assert (frame.title, frame.summary) == ("Größe", "5 in 0")
        assert frame.legend[0].label == "tokens in the step"  # what it lacks is said in English
        assert words("qq")("nobody") == "niemand"
    finally:
        sys.modules.pop("viz.words.qq", None)
        catalogue._languages.cache_clear()
        catalogue._catalogue.cache_clear()


def test_every_reason_code_has_words() -> None:
    t = words("en")
    for reason in WAIT_REASONS:
        assert t.has(f"wait.{reason.value}"), reason
    for reason in FinishReason:
        assert t.has(f"finish.{reason.value}") and f"tokens.why.{reason.value}" in VIEWS["tokens"].words, reason


def test_an_unknown_language_is_english() -> None:
    for language in ("xx", "", "../en", "e" * 50, "EN", "en-GB"):
        assert words(language)("blocks", n=2) == "2 blocks"


def test_lists_and_ordinals_read_well() -> None:
    t = words("en")
    assert [t.names("ABCDE"[:n]) for n in range(6)] == ["", "A", "A and B", "A, B and C", "A, B and 2 others", "A, B and 3 others"]
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 112, 1003)] == [
        "1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "112th", "1,003rd",
    ]  # fmt: skip
