"""The recordings that ship: they load, say where they come from, and every view draws every kind of step of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load as unpack

from engine.recording import ADDED_LATER, decode, encode, load
from engine.trace import STEP
from viz.registry import load_views
from viz.view import ViewState, render
from viz.words.caption import caption

FILES = sorted((Path(__file__).parent.parent / "assets" / "recordings").glob("*.glass"))


def test_there_are_recordings():
    assert len(FILES) >= 5


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_recording_loads_and_says_where_it_comes_from(path):
    trace = load(path)
    assert trace.meta["device"].startswith("NVIDIA") and trace.meta["commit"] != "unknown" and trace.meta["date"]
    content, saved = path.read_bytes(), encode(trace)
    lacks = {f"steps.{field}" for field in STEP.names} - set(unpack(content))
    assert saved == content or (lacks and lacks <= ADDED_LATER)
    assert encode(decode(saved)) == saved
    ended = set(trace.finishes["seq_id"].tolist())
    assert ended == set(trace.sequences), "everybody in it ran to the end"


@pytest.mark.parametrize("view", load_views().values(), ids=lambda view: view.name)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_view_draws_it(path, view):
    trace = load(path)
    for step in trace.steps["step_id"][::5].tolist():
        frame = render(view, trace, ViewState(step=step))
        assert not frame.error
        assert any(badge.kind == "recorded" for badge in frame.badges)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_step_has_a_caption(path):
    trace = load(path)
    captions = [caption(trace, step) for step in trace.steps["step_id"].tolist()]
    assert all(0 < len(text) <= 110 for text in captions)
    assert len(set(captions)) == len(captions), "each names its step"
