"""How a catalogue of words is read. A language is one file of this folder (en.py) that declares WORDS.

WORDS maps a key to a template, or to (one, many): then the field `n` chooses. The file may also define
ordinal(n). Templates use str.format; the values that go in are never parsed, so a hostile name stays literal.

A view brings its English along: a dict of its own file, keys beginning with "<view>.", handed to words(). A
translation (de.py) says all of it in its one file, those keys and "<view>.title" among the others. What a language
lacks is said in English; a key that nobody has is an error. Knows nothing of traces; caption.py makes
sentences of them. Rejected: merging every view's words into one table (then a sentence loads all views).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from functools import cache

import viz.words

Template = str | tuple[str, str]
FALLBACK = "en"


class Words:
    """words("blocks", n=3) → "3 blocks"."""

    def __init__(self, language: str, tables: Iterable[Mapping[str, Template]], ordinal: Callable[[int], str]) -> None:
        self.language = language
        self.ordinal = ordinal
        self._tables = tuple(tables)  # the first that has a key says it

    def __call__(self, key: str, **fields: object) -> str:
        """Raises LookupError for a key that neither the catalogues nor the view's own words have."""
        template = next((table[key] for table in self._tables if key in table), None)
        if template is None:
            raise LookupError(f"no words for {key!r} in viz/words/{FALLBACK}.py or in the words handed to words()")
        if not isinstance(template, str):
            template = template[0] if fields.get("n") == 1 else template[1]
        return template.format(**fields)

    def has(self, key: str) -> bool:
        return any(key in table for table in self._tables)

    def names(self, names: Iterable[str], most: int = 3) -> str:
        """ "A", "A and B", "A, B and C", "A, B and 5 others"."""
        names = [cut(name, 12) for name in names]
        if len(names) > most:
            names = [*names[: most - 1], self("others", n=len(names) - most + 1)]
        if len(names) < 2:
            return "".join(names)
        return self("list.last", head=self("list.comma").join(names[:-1]), tail=names[-1])


def words(language: str, own: Mapping[str, Template] | None = None) -> Words:
    """The catalogue of a language, an unknown one is English; `own` is the English that a view brings along."""
    name, table, english, ordinal = _catalogue(_known(language))
    return Words(name, (table, own or {}, english), ordinal)


def table(language: str) -> Mapping[str, Template]:
    """Everything that a language's own file says; English for an unknown language."""
    return _catalogue(_known(language))[1]


def _known(language: str) -> str:
    """The name of a language's file; English where there is none. Whatever is asked for, only these are ever loaded."""
    name = language.split("-")[0].lower()
    return name if name in _languages() else FALLBACK


@cache
def _languages() -> frozenset[str]:
    """Two letters and WORDS make a language: ui.py is none."""
    names = [module.name for module in pkgutil.iter_modules(viz.words.__path__) if len(module.name) == 2]
    return frozenset(name for name in names if hasattr(importlib.import_module(f"viz.words.{name}"), "WORDS"))


@cache
def _catalogue(name: str) -> tuple[str, Mapping[str, Template], Mapping[str, Template], Callable[[int], str]]:
    """(language, its words, the shared English, its ordinal)."""
    module, english = (importlib.import_module(f"viz.words.{language}") for language in (name, FALLBACK))
    return name, module.WORDS, english.WORDS, getattr(module, "ordinal", str)


def cut(text: str, most: int) -> str:
    """At most `most` characters, the last one an ellipsis if something is missing."""
    return text if len(text) <= most else text[: max(most - 1, 0)] + "…"
