"""Every view and every language, found by walking their folders: a new one is one new file, nothing is listed.

Rejected: skipping a module that declares nothing (a view that nobody misses is lost in silence).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from types import ModuleType

import viz.views
import viz.words
from viz.view import View
from viz.words.catalogue import FALLBACK, Template

WORD_HELPERS = frozenset({"catalogue", "caption"})


def load_views(package: str = viz.views.__name__, path: Iterable[str] = tuple(viz.views.__path__)) -> dict[str, View]:
    """name → View, by View.order, then by name.

    Raises:
        LookupError: a module declares no View named VIEW, or one whose name is not the file's.
    """
    found: dict[str, View] = {}
    for name, module in _modules(package, path):
        view = getattr(module, "VIEW", None)
        if not isinstance(view, View):
            raise LookupError(f"{package.replace('.', '/')}/{name}.py declares no VIEW (a View)")
        if view.name != name:
            raise LookupError(f"{package.replace('.', '/')}/{name}.py: VIEW.name is {view.name!r}, must be the file's name")
        found[name] = view
    return {view.name: view for view in sorted(found.values(), key=lambda v: (v.order, v.name))}


def load_words(package: str = viz.words.__name__, path: Iterable[str] = tuple(viz.words.__path__)) -> dict[str, dict[str, Template]]:
    """language → its catalogue, English first.

    Raises:
        LookupError: a module declares no dict named WORDS.
    """
    found: dict[str, dict[str, Template]] = {}
    for name, module in _modules(package, path):
        if name in WORD_HELPERS:
            continue
        table = getattr(module, "WORDS", None)
        if not isinstance(table, dict):
            raise LookupError(f"{package.replace('.', '/')}/{name}.py declares no WORDS (a dict)")
        found[name] = table
    return dict(sorted(found.items(), key=lambda pair: (pair[0] != FALLBACK, pair[0])))


def _modules(package: str, path: Iterable[str]) -> Iterator[tuple[str, ModuleType]]:
    for info in sorted(pkgutil.iter_modules(list(path)), key=lambda m: m.name):
        yield info.name, importlib.import_module(f"{package}.{info.name}")
