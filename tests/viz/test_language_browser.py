"""The page in another language, in a real Chromium: chosen by the browser, by the address or in the menu, without a reload."""

from __future__ import annotations

import json

from tests.viz.test_stage_browser import browser, heard, pytestmark, stage, until  # noqa: F401
from viz.registry import load_words
from viz.words import errors
from viz.words.ui import client_words

JA = client_words("ja")
CHOOSE = "(name) => { const menu = document.querySelector('.glass-language'); menu.value = name; menu.dispatchEvent(new Event('change')); }"


def labels(page) -> dict[str, str]:
    return {
        "send": page.text_content(".glass-form button"),
        "play": page.get_attribute(".glass-play", "aria-label"),
        "count": page.text_content(".glass-count"),
        "lang": page.evaluate("document.documentElement.lang + ' ' + document.querySelector('.glass-root').lang"),
    }


def test_a_first_visit_speaks_the_language_of_the_browser(stage) -> None:  # noqa: F811
    with stage(locale="ja-JP") as page:
        assert labels(page) == {"send": JA["ui.send"], "play": JA["ui.play"], "count": "ステップ 60 / 60", "lang": "ja ja"}
        until(page, "glass.stage.state.language === 'ja'")
        assert "language" not in page.url
    with stage(locale="fr-FR") as page:
        assert labels(page)["send"] == "Send" and labels(page)["lang"] == "en en"


def test_the_address_decides_and_the_server_hears_it(stage) -> None:  # noqa: F811
    with stage(query="?lang=ja") as page:
        assert labels(page)["send"] == JA["ui.send"]
        until(page, "location.search.includes('language=ja') && !location.search.includes('lang=ja&')")
        assert {viewer.state.language for viewer in page.hub.viewers.values()} == {"ja"}
    with stage(query="?language=xx") as page:
        assert labels(page)["send"] == "Send"


def test_the_menu_relabels_everything_and_keeps_what_was_typed(stage) -> None:  # noqa: F811
    with stage() as page:
        page.fill(".glass-input", "half a senten")
        page.keyboard.press("Escape")
        page.keyboard.press("i")
        page.evaluate("glass.stage.seek(30)")
        until(page, "glass.stage.at.step === 30 && !glass.stage.credits")
        page.evaluate("window.sameTab = true")
        assert page.evaluate("[...document.querySelector('.glass-language').options].map((o) => o.textContent)") == ["English", "日本語"]
        page.evaluate(CHOOSE, "ja")
        until(page, "glass.stage.shown().every((p) => p.model && p.model.figure) && document.documentElement.lang === 'ja'")
        assert labels(page)["send"] == JA["ui.send"] and page.text_content(".glass-count") == "ステップ 30 / 60"
        assert page.input_value(".glass-input") == "half a senten"
        assert page.evaluate("sameTab && !glass.stage.drawer.root.hidden && glass.stage.panels.length === 2")
        assert page.text_content(".glass-drawer h2") == JA["ui.selected"]
        assert page.evaluate("[...document.querySelectorAll('.glass-view')].every((m) => m.options.length > 0)")
        page.evaluate(CHOOSE, "en")
        assert labels(page)["send"] == "Send" and labels(page)["lang"] == "en en"
        page.evaluate(CHOOSE, "ja")
        page.reload()
        page.wait_for_function("window.glass && glass.stats.updates > 0", timeout=20_000)
        assert labels(page)["send"] == JA["ui.send"]  # remembered


def test_keys_and_buttons_work_once_after_the_language_changed(stage) -> None:  # noqa: F811
    with stage() as page:
        page.evaluate(CHOOSE, "ja")
        page.evaluate(CHOOSE, "en")
        page.evaluate("document.activeElement.blur()")
        before = len(page.source.commands)
        page.keyboard.press("ArrowRight")
        assert heard(page.source, "step") == {"n": 1}
        page.wait_for_timeout(300)
        assert [name for name, _ in page.source.commands[before:]] == ["step"]


def test_the_browser_says_errors_and_phrases_as_the_catalogue_does(stage) -> None:  # noqa: F811
    """Both formatters, on every error with numbers, names, lists and missing fields, in every language."""
    given = {"n": 1, "name": "max_num_seqs", "rule": "a whole number from 1 to 64", "value": "0", "reason": "it is <b>", "file": "a.json"}
    numbers = (
        "num_tokens",
        "limit",
        "needed",
        "num_pages",
        "page_bytes",
        "free_bytes",
        "vocab_size",
        "version",
        "newest",
        "num_characters",
    )
    given |= {name: 1234567 for name in numbers} | {"seconds": 600.0, "what": "x", "supported": ["a", "b"], "wanted": 5, "free": 4}
    cases = []
    for language in load_words():
        for key in client_words(language):
            if key.startswith("error."):
                code = key.split(".")[1]
                sentence = "Step 7 failed: out of memory. Its requests ended; the next prompt can be sent."
                for some in ({}, given, {k: v for k, v in given.items() if k != "num_tokens"}, {"name": "x", "rule": "at least 1"}):
                    cases.append(
                        (language, {"code": code, "fields": some, "sentence": sentence}, errors.sentence(code, some, sentence, language))
                    )
    with stage() as page:
        for language in load_words():
            page.evaluate(CHOOSE, language)
            own = [case for case in cases if case[0] == language]
            said = page.evaluate("(list) => list.map((e) => glass.say(e))", [error for _, error, _ in own])
            wrong = [(e, want, got) for (_, e, want), got in zip(own, said) if want != got]
            assert not wrong, json.dumps(wrong[:3], ensure_ascii=False)


def test_the_inspector_says_why_for_what_is_selected_and_for_nothing_else(stage) -> None:  # noqa: F811
    with stage() as page:
        page.keyboard.press("i")
        page.evaluate("glass.stage.select(glass.stage.chipRow.items[0].id)")
        shown = page.evaluate(  # at one go: the next frame brings its own
            """() => { const { stage } = glass;
                       stage.why = {of: stage.state.selection, lines: ['A waits: <b>1</b>.', 'It lost 5 tokens.']};
                       stage.showBars();
                       return document.querySelector('.glass-why').textContent; }"""
        )
        assert shown == "A waits: <b>1</b>.\nIt lost 5 tokens."
        gone = "() => { glass.stage.select(null); glass.stage.showBars(); return document.querySelector('.glass-why').hidden; }"
        assert page.evaluate(gone)
