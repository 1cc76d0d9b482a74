"""Each language says everything: same keys, same fields, no sentence left in English, every error code and phrase."""

from __future__ import annotations

import ast
import json
import re
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.audience import NEEDS_KERNELS, SHARED
from engine.compare import _SAID
from engine.config import KNOBS
from engine.recording import load
from engine.request import FinishReason
from engine.trace import WAIT_REASONS
from engine.workloads import WORKLOADS
from tests.viz.scenarios import scenario, some_steps
from tests.viz.valid import check_frame
from viz import calculator
from viz.layout import ADVANCE, NOT_FIRST, text_em, wrap
from viz.registry import load_chapters, load_views, load_words, to_translate
from viz.view import BADGES, ViewState, render
from viz.words import catalogue, errors
from viz.words.caption import MAX_CAPTION, caption
from viz.words.catalogue import Template, words
from viz.words.en import WORDS as ENGLISH
from viz.words.ui import client_languages, client_words

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = load_words()
OTHERS = [name for name in LANGUAGES if name != "en"]
VIEWS = load_views()
EVERYTHING = to_translate(VIEWS.values(), load_chapters().values()) | calculator.WORDS
RECORDINGS = sorted((ROOT / "assets" / "recordings").glob("*.glass"))
SAME = {  # said alike in every language: signs, names, units
    "*": {
        "blocks.entry", "blocks.times", "engine_map.more", "mask.cached.short", "mask.counts.short", "mask.row.short", "mask.rows.short",
        "ui.more", "error.step_failed", "engine_map.clock.schedule", "engine_map.clock.commit", "engine_map.clock.build",
        "engine_map.clock.run", "engine_map.clock.settle", "engine_map.unit.logits", "ui.chapter.beatOf",
        "chapter.kv_cache.price", "calc.field.head_dim", "calc.result",
        "kv_cache.kept", "engine_map.summary.done", "chapter.cuda_graphs.waits", "chapter.cuda_graphs.graph",
        "chapter.speed.cache", "chapter.speed.together", "error.ladder_stopped",
        "speed_ladder.again", "step_anatomy.row.gpu",
    }
}  # fmt: skip


def parts(template: Template) -> tuple[str, ...]:
    return (template,) if isinstance(template, str) else template


def fields(template: Template) -> set[str]:
    return {name for part in parts(template) for _, name, _, _ in string.Formatter().parse(part) if name}


# ---- complete ----


@pytest.mark.parametrize("language", OTHERS)
def test_every_language_has_every_key_with_the_same_fields(language: str) -> None:
    table = LANGUAGES[language]
    assert not sorted(set(EVERYTHING) - set(table)), f"viz/words/{language}.py lacks these"
    assert not sorted(set(table) - set(EVERYTHING)), f"viz/words/{language}.py has words for nothing"
    for key, english in EVERYTHING.items():
        assert fields(table[key]) == fields(english), key


@pytest.mark.parametrize("language", OTHERS)
def test_no_sentence_is_left_in_english(language: str) -> None:
    table = LANGUAGES[language]
    alike = {key for key, english in EVERYTHING.items() if parts(table[key])[0] in parts(english)}
    assert not sorted(alike - SAME["*"] - SAME.get(language, set()))


def test_japanese_is_written_in_japanese() -> None:
    """Every text has kana or kanji, except signs and the names of the engine's clocks and units."""
    japanese = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
    bare = {key for key, template in LANGUAGES["ja"].items() if not all(japanese.search(part) for part in parts(template))}
    signs = {"list.comma", "list.last", "blocks.slab", "blocks.summary", "caption.join", "engine_map.unit.tokens"}
    signs |= {"error.core_died", "phrase.rule.arena", "ui.chapter.tally"}
    signs |= {"speed_ladder.lane", "speed_ladder.lane.done", "speed_ladder.value"}
    signs |= {"engine_map.summary.clocks", "badge.recorded", "tokens.option", "tokens.summary", "kv_cache.kept", "kv_cache.says.first"}
    signs |= {"kernel_gaps.mark.kernel", "kernel_gaps.wait.why"}
    assert not sorted(bare - signs - SAME["*"])


def test_english_gives_the_plural_where_a_number_stands_before_a_noun() -> None:
    assert words("en")("ui.perSecond", n=1) == "1 step/s" and words("en")("ui.perSecond", n=0.5) == "0.5 steps/s"
    assert words("ja")("ui.perSecond", n=1) == "1ステップ/秒"


@pytest.mark.parametrize("language", ["ui", "xx", "UI-x", "", "e", "catalogue", "../en", "\0\0", "ｅｎ", "en\n"])
def test_what_is_no_language_is_english(language: str) -> None:
    assert words(language).language == "en" and words(language)("blocks", n=3) == "3 blocks"


def test_nothing_that_is_asked_for_is_kept() -> None:
    for n in range(500):
        words(f"ja-{n}"), words(f"x{n}"), client_words(f"y{n}")
    assert catalogue._catalogue.cache_info().currsize <= len(LANGUAGES)
    assert words("ja-JP").language == "ja" == words("JA").language


# ---- captions ----


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("file", RECORDINGS, ids=lambda f: f.stem)
def test_captions_of_the_shipped_recordings_are_one_short_sentence(file: Path, language: str) -> None:
    trace = load(file)
    for step in trace.steps["step_id"].tolist():
        text = caption(trace, step, language)
        assert 0 < len(text) <= MAX_CAPTION and "{" not in text and "\n" not in text
        assert text_em(text) <= MAX_CAPTION * ADVANCE + 1e-6 and not text.endswith("…"), "it does not fit into its bar"


def test_a_caption_in_japanese_reads_as_two_sentences() -> None:
    trace = scenario("preempted")
    step = int(trace.preempts["step_id"][0])
    who, cause = trace.name(int(trace.preempts["seq_id"][0])), trace.name(int(trace.preempts["for_seq_id"][0]))
    n = int(trace.preempts["num_pages"][0])
    assert caption(trace, step, "ja").startswith(f"ステップ{step}：{who}は{cause}のためにプリエンプトされ、{n}ブロックを返しました。")


# ---- views ----


@pytest.mark.parametrize("language", OTHERS)
@pytest.mark.parametrize("view", VIEWS)
def test_texts_stay_apart_in_every_language(view: str, language: str) -> None:
    for name in ("busy", "preempted", "crowded", "large_pool", "slabs", "static", "no_cache", "broken", "hostile", "empty"):
        for step in some_steps(scenario(name), 3):
            for theme, size in (("light", (960, 540)), ("projector", (620, 430)), ("dark", (390, 300))):
                state = ViewState(step=step, size=size, theme=theme, language=language)
                frame = render(VIEWS[view], scenario(name), state)
                check_frame(frame, state)
                assert frame.title == LANGUAGES[language][f"{view}.title"]


def test_wide_characters_are_wrapped_by_their_width() -> None:
    text = "このステップでは、何も計算されませんでした。次のステップを待ちます。"
    for columns in (4, 7, 10, 23):
        lines = wrap(text, columns)
        assert "".join(lines) == text
        assert all(text_em(line) / ADVANCE <= columns + 1e-6 for line in lines)
        assert columns < 7 or not any(line[0] in NOT_FIRST for line in lines)
    assert wrap("漢", 1) == ["漢"] and wrap("one two", 3) == ["one", "two"] and wrap("", 5) == [""]


# ---- errors ----


def codes() -> Iterator[tuple[str, str]]:
    """(code, where) of every refusal and fault in the source: EngineError, StepError, Refused, failure, {"code": …}."""
    raisers = {"EngineError", "StepError", "TraceError", "Refused", "failure", "_refused", "_complain", "_within"}
    for path in (*(ROOT / "engine").rglob("*.py"), *(ROOT / "viz").rglob("*.py"), ROOT / "app.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found: list[ast.expr] = []
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                found = [*node.args, *(k.value for k in node.keywords if k.arg == "code")][:3] if name in raisers else []
            elif isinstance(node, ast.Dict):
                found = [v for k, v in zip(node.keys, node.values) if isinstance(k, ast.Constant) and k.value == "code"]
            texts = [a.value for a in found[:3] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from (
                (text, f"{path.name}:{node.lineno}") for text in texts if re.fullmatch(r"[a-z]+(_[a-z]+)*", text) and text != "engine"
            )


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_error_code_of_the_source_has_words(language: str) -> None:
    found = dict(codes())
    assert {"prompt_too_long", "step_failed", "core_died", "unknown_room", "busy", "port_in_use"} <= set(found)
    missing = {code: where for code, where in found.items() if f"error.{code}" not in LANGUAGES[language]}
    assert not missing, f"add error.<code> to viz/words/{language}.py for {missing}"


def test_an_error_is_said_with_its_numbers_and_what_to_do() -> None:
    said = errors.sentence("prompt_too_long", {"num_tokens": 5000, "limit": 2047}, "x")
    assert said == "The prompt has 5,000 tokens; this model reads at most 2,047 and writes one more. Shorten it."
    assert errors.sentence("prompt_too_long", {"num_characters": 9000, "limit": 100}, "x", "ja").startswith("プロンプトは9,000文字ですが")
    assert errors.sentence("load_timeout", {"seconds": 600.0}).startswith("The model was not ready after 600 seconds.")
    assert errors.sentence("unsupported_model", {"what": "x", "supported": ("a", "b")}).endswith("one of these: a, b.")
    assert errors.sentence("bad_checkpoint", {"file": "a"}, "The file a is broken.") == "The file a is broken."


def test_an_unknown_code_or_a_missing_field_leaves_the_sentence_that_came() -> None:
    assert errors.sentence("prompt_too_long", {}, "engine's own") == "engine's own"
    assert errors.sentence("never_heard_of", {"a": 1}, "engine's own", "ja") == "engine's own"
    assert errors.sentence("prompt_too_long", {"num_tokens": "many", "limit": None}, "engine's own") == "engine's own"


def test_what_a_stranger_put_into_a_field_stays_literal() -> None:
    said = errors.sentence("bad_config", {"name": "{rule}", "rule": "<b>", "value": "{value}"}, "x")
    assert said == "{rule} must be <b>, got {value}. Choose another value."


@pytest.mark.parametrize("language", LANGUAGES)
def test_people_read_of_blocks_and_never_of_pages(language: str) -> None:
    for key, template in {**EVERYTHING, **LANGUAGES[language]}.items():
        for part in parts(template):
            plain = re.sub(r"\{\w+[^}]*\}|--pages|[Tt]he page|[Tt]his page|Reload|page_size|num_pages|arena_pages", "", part)
            assert "pages" not in plain, f"{key}: {part}"


IN_JOBS = {  # only their sentence goes out
    "trace_failed", "too_many_tiles", "interpreter_failed", "profile_incomplete", "compare_stopped", "timeline_stopped",
}  # fmt: skip


def sent(group: str) -> Iterator[str]:
    """English that the engine sends as it is: rules of what a value must be, texts of what is loading or what a job does
    ("progress"), why a job ended early ("said")."""
    for path in (ROOT / "engine").rglob("*.py"):
        if path.name in ("recording_check.py", "recording_artifacts.py"):  # their `need` says what is wrong with a file, inside a sentence
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for text in sent_by(node, group):
                if isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value:
                    yield text.value
                elif isinstance(text, ast.JoinedStr):
                    for mode in _SAID.values() if "self._said" in ast.unparse(text) else ("",):
                        yield "".join(str(v.value) if isinstance(v, ast.Constant) else filled(v, mode) for v in text.values)


def filled(value: ast.expr, mode: str) -> str:
    return mode if "self._said" in ast.unparse(value) else "7"


def sent_by(node: ast.AST, group: str) -> list[ast.expr]:
    """What a statement may send of a group."""
    called = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
    if group == "rule":
        return [node.args[2]] if called in ("need", "_need") else []
    if group == "progress":
        pair = isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2
        return [node.value.elts[1]] if pair else [node.args[1]] if called == "progress" and len(node.args) >= 2 else []
    if isinstance(node, ast.Assign):
        target, value = node.targets[0], node.value
        both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        pairs = zip(target.elts, value.elts) if both else ((target, value),)
        return [value for name, value in pairs if isinstance(name, ast.Attribute) and name.attr == "note"]
    return [node.args[1]] if called == "EngineError" and isinstance(node.args[0], ast.Constant) and node.args[0].value in IN_JOBS else []


EXAMPLES = {
    "rule": {"one of a, b", "1 to 256", "true or false", "at most 4 texts of 1 to 100 characters", "a power of two from 16 to 256"},
    "progress": set(),
    "said": {
        NEEDS_KERNELS,
        SHARED,
        "At most 8 requests and 16 samples can be compared. Send fewer.",
        "That would be 7 tiles, more than a trace holds. Choose larger tiles or a shorter sequence.",
        "That would be 7 tiles; Triton's interpreter takes up to 7. Choose larger tiles or a shorter sequence.",
    },
}


@pytest.mark.parametrize("group", EXAMPLES)
def test_english_that_the_engine_sends_is_known_by_its_template(group: str) -> None:
    found = set(sent(group))
    assert len(found) > 8
    for text in found | EXAMPLES[group]:
        assert errors.phrase(text, group, "en") == text
        assert errors.phrase(text, group, "ja") != text, f"add a template for {text!r} under phrase.{group}."


def test_a_rule_is_said_in_the_language() -> None:
    said = errors.sentence("bad_sampling", {"name": "n", "rule": "a whole number from 1 to 64", "value": "0"}, "x", "ja")
    assert said == "nに0は使えません。使える値：1から64までの整数。インスペクタの「次のプロンプト」で変更してください。"


# ---- what the browser gets ----


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_browser_gets_every_word_it_says(language: str) -> None:
    sent_words = client_words(language)
    assert json.loads(json.dumps(sent_words)) == {k: list(t) if isinstance(t, tuple) else t for k, t in sent_words.items()}
    for reason in (*WAIT_REASONS, *FinishReason):
        assert f"ui.why.{reason.value}" in sent_words
    assert {f"ui.kind.{kind}" for kind in BADGES} | {f"ui.badges.{kind}" for kind in BADGES} <= set(sent_words)
    assert {f"knob.{name}" for name in KNOBS} <= set(sent_words)
    assert {f"choice.{c}" for knob in KNOBS.values() for c in knob.choices if isinstance(c, str)} <= set(sent_words)
    for name, workload in WORKLOADS.items():
        assert ENGLISH[f"preset.{name}.title"] == workload.title and ENGLISH[f"preset.{name}.point"] == workload.point
    if language != "en":
        assert all(f"{view}.title" in sent_words and f"{view}.question" in sent_words for view in VIEWS)


def test_a_template_for_the_browser_uses_only_what_its_formatter_knows() -> None:
    for language in LANGUAGES:
        for key, template in client_words(language).items():
            for part in parts(template):
                specs = {(spec, conversion) for _, name, spec, conversion in string.Formatter().parse(part) if name}
                assert specs <= {("", None), (",", None)}, key


def test_every_word_that_the_client_asks_for_exists() -> None:
    groups = {key.split(".")[1] for key in ENGLISH if key.startswith("ui.")}
    for file in (ROOT / "viz" / "stage" / "client").glob("*.js"):
        for name, inner in re.findall(r"\bWORDS\.(\w+)(?:\.(\w+))?", file.read_text(encoding="utf-8")):
            leaf = f"ui.{name}" in ENGLISH or any(key.startswith(f"ui.{name}.{inner}") for key in ENGLISH)
            assert name in groups and leaf, f"{file.name} says WORDS.{name}: add ui.{name} to viz/words/en.py"


def test_all_languages_together_are_small() -> None:
    assert len(json.dumps(client_languages(LANGUAGES), ensure_ascii=False).encode()) < 45_000 * len(LANGUAGES)
