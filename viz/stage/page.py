"""The stage's page pieces: script, styles, the element for one gr.HTML, and a page without Gradio.

The script is served as one file made of client/*.js in a fixed order (a browser opens an export from disk,
where modules cannot be imported). Nothing here takes text from a user: Gradio runs Handlebars and then a
JavaScript template over html_template, so names and prompts travel in messages and are set as text.
"""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path

from viz import theme
from viz.registry import load_words
from viz.view import QUERY_KEYS, ViewState
from viz.words.ui import client_languages

_HERE = Path(__file__).parent
PARTS = (
    "words", "util", "codec", "link", "look", "axes", "canvas", "offers", "documents", "panel", "bars", "card", "chapter", "scrubber", "calculator", "people",
    "drawer", "share", "export", "stage",
)  # fmt: skip

ELEMENT = '<div class="glass-root" data-theme="light" data-glass></div>'
_LOADER = """
const mount = element.querySelector('[data-glass]') || element;
const base = location.pathname.replace(/[^/]*$/, '') + 'glass/';
const start = () => window.glassMount(mount, {base: base, lend: () => trigger('submit')});
if (window.glassMount) { start(); } else {
  const style = document.createElement('link');
  style.rel = 'stylesheet';
  style.href = base + 'static/stage.css';
  document.head.append(style);
  const script = document.createElement('script');
  script.src = base + 'static/stage.js';
  script.onload = start;
  document.head.append(script);
}
"""


@cache
def script() -> str:
    """stage.js: every part inside one function, so that nothing but window.glass and glassMount leaks."""
    parts = "\n".join((_HERE / "client" / f"{name}.js").read_text(encoding="utf-8") for name in PARTS)
    languages = json.dumps(client_languages(load_words()), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    keys = json.dumps([{**asdict(key), "otherwise": getattr(ViewState(), key.field)} for key in QUERY_KEYS])
    facts = f'const PLOTLY_VERSION = "{version("plotly")}";\nconst LANGUAGES = {languages};\nconst VIEW_KEYS = {keys};'
    return f'(() => {{\n"use strict";\n{facts}\n{parts}\n}})();\n'


@cache
def styles() -> str:
    """stage.css: the colour tables of viz/theme.py, then the layout."""
    return theme.css_variables() + (_HERE / "stage.css").read_text(encoding="utf-8")


def stage_html() -> tuple[str, str, str]:
    """(html_template, css_template, js_on_load) for gr.HTML(html_template=…, css_template=…, js_on_load=…)."""
    return ELEMENT, "", _LOADER


def standalone_page(title: str = "Glass Engine") -> str:
    """The same stage without Gradio: tests, a bare Starlette server, frames in slides."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="static/stage.css">
<style>html, body {{ margin: 0; padding: 0; overflow: hidden; }}</style>
</head>
<body>
<main>{ELEMENT}</main>
<script src="static/stage.js"></script>
<script>window.glassMount(document.querySelector("[data-glass]"), {{base: ""}});</script>
</body>
</html>
"""
