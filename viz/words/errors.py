"""What went wrong, in a language: errors arrive as a code with fields and the engine's own English sentence.

Words stand under "error.<code>" (also of what went well and has a code); where a field changes the sentence, under
"error.<code>.<field>", which is taken when that field came along. `{sentence}` in a template is the engine's own.
English that the engine sends as it is (the rule in a "bad_config", what is loading now) is known by its template under
"phrase.<group>." and said in the language.

viz/stage/client/words.js does the same in the browser; a test compares the two.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from functools import cache

from viz.words.catalogue import Words, words


def sentence(code: str, fields: Mapping[str, object] | None = None, fallback: str = "", language: str = "en") -> str:
    """The sentence of an error. An unknown code, or fields that are missing, leave the engine's own."""
    t = words(language)
    given = {str(k): _plain(v) for k, v in (fields or {}).items()} | {"sentence": phrase(fallback, "said", language)}
    if "rule" in given:
        given["rule"] = phrase(str(given["rule"]), "rule", language)
    for key in (*(f"error.{code}.{name}" for name in given), f"error.{code}"):
        found = _filled(t, key, given)
        if found:
            return found
    return str(given["sentence"])


def phrase(text: str, group: str, language: str = "en") -> str:
    """English that the engine sent, in a language; what no template of the group fits stays as it is."""
    t = words(language)
    for key, pattern in _patterns(group):
        found = pattern.fullmatch(text)
        if found:
            return t(key, **found.groupdict())
    return text


def _filled(t: Words, key: str, fields: Mapping[str, object]) -> str:
    try:
        return t(key, **fields) if t.has(key) else ""
    except (KeyError, IndexError, ValueError, TypeError):  # a field is missing, or is no number where one is needed
        return ""


def _plain(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


@cache
def _patterns(group: str) -> tuple[tuple[str, re.Pattern[str]], ...]:
    """(key, what its English looks like), in the catalogue's order: the first that fits is taken."""
    from viz.words.en import WORDS

    found = []
    for key, template in WORDS.items():
        if key.startswith(f"phrase.{group}."):
            parts = string.Formatter().parse(template)
            found.append((key, re.compile("".join(re.escape(text) + (f"(?P<{name}>.+?)" if name else "") for text, name, _, _ in parts))))
    return tuple(found)
