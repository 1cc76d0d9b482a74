"""Frame.to_figure and the theme it reads."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from engine.trace import Trace
from tests.viz.test_stage_support import HOSTILE, VIEWS, make_trace
from viz import theme
from viz.figure import to_figure, to_json
from viz.view import Frame, Paint, Raster, Series, ViewState, render

STATE = ViewState(step=60)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("trace", [Trace(), make_trace()], ids=["empty", "long"])
def test_every_frame_becomes_the_same_strict_json(name, trace):
    frame = render(VIEWS[name], trace, STATE)
    first = to_json(frame)
    assert first == to_json(render(VIEWS[name], trace, STATE))
    assert json.loads(first, parse_constant=pytest.fail)["layout"]["meta"]["summary"] == frame.summary


def test_cells_keep_their_place_and_their_class():
    values = np.array([[0, 1, 255], [1, 0, 0]], np.uint8)
    frame = Frame(
        "v",
        "V",
        (),
        {"xaxis": {"range": [0, 3]}, "yaxis": {"range": [2, 0]}},
        (Raster("r", values, 0, 3, 0, 2, (Paint("free"), Paint("request-0"))),),
    )
    heat = to_figure(frame).data[0]
    assert list(heat.x) == [0.5, 1.5, 2.5] and list(heat.y) == [0.5, 1.5]
    assert heat.z[0][1] == 1 and np.isnan(heat.z[0][2]) and (heat.zmin, heat.zmax) == (-0.5, 1.5)
    assert heat.colorscale[2][1] == "rgba(0,114,178,1)"


def test_continuous_values_are_what_they_stand_for():
    frame = Frame(
        "v", "V", (), {"xaxis": {}, "yaxis": {}}, (Raster("r", np.array([[0, 255]], np.uint8), 0, 2, 0, 1, None, (-2.0, 3.0), "diverging"),)
    )
    heat = to_figure(frame).data[0]
    assert heat.z[0][0] == -2.0 and heat.z[0][1] == 3.0 and heat.colorscale[0][1] == "rgb(122,46,11)"


def test_bars_start_at_their_base_and_hatches_stay():
    bars = Series("b", np.arange(2), np.array([5.0, 7.0]), "bars", Paint("waste", hatch="diagonal"), 0.5, np.array([1.0, 2.0]))
    bar = to_figure(Frame("v", "V", (), {"xaxis": {}, "yaxis": {}}, (), (bars,))).data[0]
    assert list(bar.y) == [4, 5] and list(bar.base) == [1, 2] and bar.marker.pattern.shape == "/"


def test_a_strangers_text_is_never_markup():
    figure = to_figure(render(VIEWS["hostile"], make_trace(3), ViewState()))
    texts = [a.text for a in figure.layout.annotations] + [d.name for d in figure.data] + [figure.layout.title.text]
    assert any("&lt;img" in t for t in texts)
    assert not any(bad in t for t in texts for bad in ("<img", "<script", "</script"))
    assert figure.layout.meta["summary"] == HOSTILE[0] * 2


def test_an_error_and_an_empty_frame_say_so():
    assert "could not be drawn" in to_figure(render(VIEWS["broken"], make_trace(3), ViewState())).layout.annotations[0].text
    assert to_figure(Frame("v", "V", summary="Nothing to see.")).layout.annotations[0].text == "Nothing to see."
    assert "Nothing has run yet" in to_figure(render(VIEWS["batching"], Trace(), ViewState())).layout.annotations[0].text


# ---- theme ----


@pytest.mark.parametrize("name", theme.THEME_NAMES)
def test_outlines_and_text_stand_out(name):
    colors = theme.table(name)
    for key, color in colors.items():
        if key.endswith("-line") and key != "paper-line":
            assert theme.contrast(color, colors["paper"]) >= 3, key
        if key.startswith("on-"):
            assert theme.contrast(color, colors[key[3:]]) >= 4.5, key
    for text in ("ink", "muted", "accent", "error", "good"):
        for ground in ("paper", "stage", "raised"):
            assert theme.contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
    assert theme.contrast(colors["control"], colors["paper"]) >= 3


def test_request_colours_go_round_and_strangers_are_grey():
    assert [theme.request_color(i) for i in (0, 5, 6, None)] == ["request-0", "request-5", "request-0", "request-other"]
    assert theme.color("request-0") == "#0072B2" and theme.color("no such name") == theme.color("ink")


@pytest.mark.parametrize("name", theme.THEME_NAMES)
def test_maps_go_one_way(name):
    light = np.array([theme.luminance("#{:02X}{:02X}{:02X}".format(*c)) for c in theme.lut("sequential", name)])
    steps = np.diff(light)
    assert (steps <= 1e-4).all() or (steps >= -1e-4).all()
    assert theme.lut("diverging", name).shape == (256, 3)


def test_the_page_reads_the_same_table():
    css = theme.css_variables()
    for name in theme.THEME_NAMES:
        block = css.split(f'data-theme="{name}"')[1].split("}")[0]
        assert all(f"--g-{key}: {color};" in block for key, color in theme.table(name).items())
    assert len(bytes.fromhex(theme.client_theme()["maps"]["dark"]["sequential"])) == 768


def test_units():
    assert [theme.duration(us) for us in (12, 3_240, 1_250_000, 125_000_000, -5)] == ["12 µs", "3.24 ms", "1.25 s", "2 min 5 s", "-5 µs"]
    assert [theme.data_size(b) for b in (96, 1536, 192 * 2**30)] == ["96 B", "1.5 KiB", "192 GiB"]
    assert theme.rate(18_500, "tok/s") == "18.5 ktok/s" and theme.rate(4.25e12, "B/s") == "4.25 TB/s"
    assert theme.count(1234567) == "1,234,567" and theme.percent(6, 100) == "6 %" and theme.percent(1, 0) == "0 %"
    assert [theme.round_up(v) for v in (0, 1, 1.01, 350, 700, 1e6, 9.1e6)] == [1, 1, 1.5, 400, 800, 1e6, 1e7]


def test_the_stage_and_the_figure_load_no_engine():
    code = "import sys, viz.figure, viz.stage.routes; sys.exit(bool({'torch', 'gradio', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
