"""A whole language for the browser: the page's own words, errors, examples and knobs, as plain JSON.

Templates travel as they are; viz/stage/client/words.js fills them in (fields, thousands, one or many).
"""

from __future__ import annotations

from collections.abc import Mapping

from viz.words.catalogue import FALLBACK, Template, table

SENT = ("ui.", "error.", "phrase.", "preset.", "knob.", "choice.", "language.")  # beside titles and questions


def client_words(language: str) -> dict[str, Template]:
    """Key → template; what the language lacks is English. Titles and questions of views where it translates them."""
    own = table(language)
    spoken = {key: template for key, template in own.items() if key.endswith((".title", ".question"))}
    return {key: own.get(key, template) for key, template in table(FALLBACK).items() if key.startswith(SENT)} | spoken


def client_languages(languages: Mapping[str, object]) -> dict[str, dict[str, Template]]:
    """Language → client_words, in the order given."""
    return {language: client_words(language) for language in languages}
