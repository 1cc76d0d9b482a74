"""Every view, chapter and language, found by walking their folders: a new one is one new file, nothing is listed.

Rejected: skipping a module that declares nothing (a view that nobody misses is lost in silence).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from types import ModuleType

import viz.chapters
import viz.views
import viz.words
from viz.chapter import Chapter
from viz.view import View
from viz.words.catalogue import FALLBACK, Template

WORD_HELPERS = frozenset({"catalogue", "caption", "errors", "ui", "why"})


def load_views(package: str = viz.views.__name__, path: Iterable[str] = tuple(viz.views.__path__)) -> dict[str, View]:
    """name → View, by View.order, then by name.

    Raises:
        LookupError: a module declares no View named VIEW, one whose name is not the file's, or words of another.
    """
    found: dict[str, View] = {}
    for name, module in _modules(package, path):
        view, place = getattr(module, "VIEW", None), f"{package.replace('.', '/')}/{name}.py"
        if not isinstance(view, View):
            raise LookupError(f"{place} declares no VIEW (a View); helpers of views go into viz/, as viz/lanes.py")
        if view.name != name:
            raise LookupError(f"{place}: VIEW.name is {view.name!r}, must be the file's name")
        strangers = [key for key in view.words if not key.startswith(f"{name}.")]
        if strangers:
            raise LookupError(f"{place}: the key {strangers[0]!r} must begin with {name + '.'!r}")
        found[name] = view
    return {view.name: view for view in sorted(found.values(), key=lambda v: (v.order, v.name))}


def load_chapters(package: str = viz.chapters.__name__, path: Iterable[str] = tuple(viz.chapters.__path__)) -> dict[str, Chapter]:
    """name → Chapter, by Chapter.order, then by name.

    Raises:
        LookupError: a module declares no Chapter named CHAPTER, one whose name is not the file's, words of another, or
            no title or question.
    """
    found: dict[str, Chapter] = {}
    for name, module in _modules(package, path):
        chapter, place = getattr(module, "CHAPTER", None), f"{package.replace('.', '/')}/{name}.py"
        if not isinstance(chapter, Chapter):
            raise LookupError(f"{place} declares no CHAPTER (a Chapter); helpers of chapters go into viz/, as viz/moments.py")
        if chapter.name != name:
            raise LookupError(f"{place}: CHAPTER.name is {chapter.name!r}, must be the file's name")
        own = f"chapter.{name}."
        strangers = [key for key in chapter.words if not key.startswith(own)]
        if strangers:
            raise LookupError(f"{place}: the key {strangers[0]!r} must begin with {own!r}")
        missing = [key for key in (f"{own}title", f"{own}question") if key not in chapter.words]
        if missing:
            raise LookupError(f"{place}: the words lack {missing[0]!r}")
        found[name] = chapter
    return {chapter.name: chapter for chapter in sorted(found.values(), key=lambda c: (c.order, c.name))}


def load_words(package: str = viz.words.__name__, path: Iterable[str] = tuple(viz.words.__path__)) -> dict[str, dict[str, Template]]:
    """language → the WORDS of its file, English first.

    Raises:
        LookupError: a module declares no dict named WORDS.
    """
    found: dict[str, dict[str, Template]] = {}
    for name, module in _modules(package, path):
        if name in WORD_HELPERS:
            continue
        table = getattr(module, "WORDS", None)
        if not isinstance(table, dict):
            place = f"{package.replace('.', '/')}/{name}.py"
            raise LookupError(f"{place} declares no WORDS (a dict) and is not in WORD_HELPERS of viz/registry.py")
        found[name] = table
    return dict(sorted(found.items(), key=lambda pair: (pair[0] != FALLBACK, pair[0])))


def to_translate(views: Iterable[View], chapters: Iterable[Chapter] = ()) -> dict[str, Template]:
    """Everything that a language says, in English: the shared catalogue; each view's title, question and words; each
    chapter's words."""
    own = [{f"{view.name}.title": view.title, f"{view.name}.question": view.question} | dict(view.words) for view in views]
    own += [chapter.words for chapter in chapters]
    return {key: template for table in (load_words()[FALLBACK], *own) for key, template in table.items()}


def _modules(package: str, path: Iterable[str]) -> Iterator[tuple[str, ModuleType]]:
    for info in sorted(pkgutil.iter_modules(list(path)), key=lambda m: m.name):
        yield info.name, importlib.import_module(f"{package}.{info.name}")
