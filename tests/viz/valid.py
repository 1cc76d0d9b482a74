"""What every Frame must be. Raises AssertionError naming the first thing that is not so."""

from __future__ import annotations

import json
import math

import numpy as np

from viz.layout import MAX_LABELS, label_box
from viz.theme import MIN_FONT, contrast, table
from viz.view import BADGES, DOCUMENT_KINDS, Frame, ViewState

HATCHES = (None, "diagonal", "cross", "dots")


def check_frame(frame: Frame, state: ViewState) -> None:
    assert not frame.error, frame.error
    assert frame.title and frame.summary, "a frame has a title and a summary"
    assert frame.badges and all(b.kind in BADGES for b in frame.badges), f"badges {frame.badges}: at least one, of {BADGES}"
    _check_axes(frame)
    for raster in frame.rasters:
        _check_raster(frame, raster)
    for series in frame.series:
        _check_series(frame, series)
    for paint in frame.legend:
        _check_paint(paint)
        assert paint.label, f"a legend entry without text: {paint}"
    for mark in frame.marks:
        assert mark.id and mark.text and mark.axes in _pairs(frame), f"{mark}: an id, a text and one of the axes {_pairs(frame)}"
        assert all(map(math.isfinite, (mark.x0, mark.x1, mark.y0, mark.y1))), mark
        assert mark.outline is None or mark.outline in table(), f"{mark}: no such colour in viz/theme.py"
    check_around(frame)
    check_labels(frame, state)
    check_contrast(frame, state.theme)
    check_reachable(frame, state)


def check_around(frame: Frame) -> None:
    """What an offer gives to the engine is plain and small, and each has a name of one line; documents have a tab each."""
    ids, titles = [offer.id for offer in frame.offers], [document.title for document in frame.documents]
    assert len(set(ids)) == len(ids) and len(set(titles)) == len(titles), f"twice the same offer or document: {ids}, {titles}"
    for offer in frame.offers:
        labels = [label for label, _ in offer.choices]
        said = [offer.id, offer.label, *labels]
        assert all(said) and not any("\n" in text for text in said) and len(set(labels)) == len(labels), (
            f"{offer}: one name for each choice"
        )
        assert json.loads(json.dumps([dict(args) for _, args in offer.choices])), f"{offer}: arguments must be plain"
    for document in frame.documents:
        assert document.title and document.text and document.kind in DOCUMENT_KINDS, document


def check_contrast(frame: Frame, theme: str) -> None:
    """Text 4.5:1 on what it names as its ground, outlines and lines 3:1 on paper."""
    colors = table(theme)
    for label in frame.labels:
        ground = colors[label.color[3:]] if label.color.startswith("on-") else colors["paper"]
        assert contrast(colors[label.color], ground) >= 4.5, f"label {label.text!r}: {label.color} has too little contrast"
    for mark in frame.marks:
        assert mark.outline is None or contrast(colors[mark.outline], colors["paper"]) >= 2.99, f"{mark}: its outline is too faint"
    for series in frame.series:
        if series.kind in ("line", "steps", "markers"):
            color = colors.get(f"{series.paint.color}-line", colors[series.paint.color])
            assert contrast(color, colors["paper"]) >= 2.99, f"series {series.name!r} is too faint"


def check_reachable(frame: Frame, state: ViewState) -> None:
    """Every mark has an area inside the panel and a name of one line. Arrows lead to nearly all of them by where they
    lie; Shift + arrow goes through all in order."""
    boxes = [mark_box(mark, frame, state) for mark in frame.marks]
    for mark, (x0, x1, y0, y1) in zip(frame.marks, boxes):
        assert "\n" not in mark.text, f"{mark.id}: its name has several lines"
        assert x1 > x0 and y1 > y0, f"{mark.id} has no area: {(x0, x1, y0, y1)}"
        inside = x1 > 0 and y1 > 0 and x0 < state.size[0] and y0 < state.size[1]
        assert inside, f"{mark.id} lies outside the panel"
    missed = set(range(len(boxes))) - _led_to(boxes)
    assert len(missed) <= max(0.1 * len(boxes), 2 if len(boxes) > 10 else 0), (
        f"no arrow leads to {[frame.marks[i].id for i in sorted(missed)][:5]}"
    )


def mark_box(mark, frame: Frame, state: ViewState) -> tuple[float, float, float, float]:
    """A mark in pixels from the top left, as the browser places it."""
    number = mark.axes[1 : mark.axes.index("y")]
    found = []
    for axis, ends, long, name in (("x", (mark.x0, mark.x1), state.size[0], "xaxis"), ("y", (mark.y0, mark.y1), state.size[1], "yaxis")):
        spec = frame.axes[f"{name}{number}"]
        (low, high), (a, b) = spec["domain"], spec["range"]
        at = sorted(low + (high - low) * min(max((v - a) / (b - a), 0.0), 1.0) for v in ends)
        found += [v * long for v in at] if axis == "x" else [(1 - v) * long for v in reversed(at)]
    return tuple(found)


def _led_to(boxes: list[tuple[float, float, float, float]]) -> set[int]:
    """Marks that arrows, Home and End reach, by the rule of panel.js: the nearest, sideways distance counts twice."""
    if not boxes:
        return set()
    middles = np.array([((x0 + x1) / 2, (y0 + y1) / 2) for x0, x1, y0, y1 in boxes])
    found, waiting = {0, len(boxes) - 1}, [0, len(boxes) - 1]
    while waiting:
        away = middles - middles[waiting.pop()]
        for dx, dy in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            along, aside = away @ (dx, dy), np.abs(away @ (dy, dx))
            cost = np.where(along >= 1, along + 2 * aside, np.inf)
            if np.isfinite(cost.min()) and int(cost.argmin()) not in found:
                found.add(int(cost.argmin()))
                waiting.append(int(cost.argmin()))
    return found


def check_labels(frame: Frame, state: ViewState) -> None:
    """Texts are large enough, few enough, inside the panel and apart."""
    width, height = state.size
    least = MIN_FONT[state.theme]
    assert len(frame.labels) <= MAX_LABELS, f"{len(frame.labels)} labels, at most {MAX_LABELS} (layout.Sheet stops there)"
    boxes = []
    for label in frame.labels:
        said = f"label {label.text!r}"
        assert label.text and "\n" not in label.text, f"{said} is not one line"
        assert label.size >= least, f"{said} has {label.size} px, the theme {state.theme!r} asks for at least {least} (layout.Sheet.font)"
        assert label.axes == "xy" and label.anchor in ("left", "center", "right"), f"{said} on {label.axes!r}, anchor {label.anchor!r}"
        assert label.color in table(), f"{said}: no colour {label.color!r} in viz/theme.py"
        x0, x1, y0, y1 = label_box(label)
        assert x0 >= -0.5 and x1 <= width + 0.5 and y0 >= -0.5 and y1 <= height + 0.5, f"{label.text!r} leaves the panel"
        for other, box in boxes:
            apart = x0 >= box[1] - 0.5 or box[0] >= x1 - 0.5 or y0 >= box[3] - 0.5 or box[2] >= y1 - 0.5
            assert apart, f"{label.text!r} meets {other!r}"
        boxes.append((label.text, (x0, x1, y0, y1)))


def _pairs(frame: Frame) -> set[str]:
    return {f"x{name[5:]}y{name[5:]}" for name in frame.axes if name.startswith("xaxis")}


def _check_axes(frame: Frame) -> None:
    for name, axis in frame.axes.items():
        assert name.startswith(("xaxis", "yaxis")), name
        ends, (low, high) = axis["range"], axis["domain"]
        assert len(ends) == 2 and all(map(math.isfinite, ends)) and ends[0] != ends[1], f"{name}: range {ends}"
        assert 0 <= low < high <= 1, f"{name}: domain {axis['domain']}"
        bare = "title" not in axis and axis["visible"] is False
        assert bare, f"{name} has ticks or a title: texts are Labels, so that none meets Plotly's parser (layout.Sheet.data_axes)"


def _check_raster(frame: Frame, raster) -> None:
    values = raster.values
    said = f"raster {raster.name!r}"
    plain = values.dtype == np.uint8 and values.ndim == 2 and values.size and values.flags.c_contiguous
    assert plain, f"{said}: values must be uint8 [rows, cols], not empty, C-contiguous; got {values.dtype} {values.shape}"
    assert raster.axes in _pairs(frame), f"{said} on {raster.axes!r}, the frame has {_pairs(frame)}"
    assert raster.x0 != raster.x1 and raster.y0 != raster.y1, f"{said} has no area"
    assert (raster.paints is None) != (raster.range is None), f"{said}: either paints or a range"
    if raster.paints is not None:
        shown = values[values != 255]
        assert not shown.size or int(shown.max()) < len(raster.paints), f"{said}: value {shown.max()}, {len(raster.paints)} paints"
        for paint in raster.paints:
            _check_paint(paint)


def _check_series(frame: Frame, series) -> None:
    said = f"series {series.name!r}"
    plain = series.x.dtype == series.y.dtype == np.float32 and series.x.shape == series.y.shape and series.x.ndim == 1
    assert plain, f"{said}: x and y must be float32 of equal length"
    assert series.kind in ("line", "markers", "steps", "bars"), f"{said}: kind {series.kind!r}"
    assert series.axes in _pairs(frame), f"{said} on {series.axes!r}, the frame has {_pairs(frame)}"
    assert series.base is None or (series.base.dtype == np.float32 and series.base.shape == series.x.shape), f"{said}: base"
    assert not np.isinf(series.x).any() and not np.isinf(series.y).any(), f"{said} is infinite somewhere"
    _check_paint(series.paint)


def _check_paint(paint) -> None:
    assert paint.color in table() and paint.hatch in HATCHES and 0 < paint.alpha <= 1, paint


def frame_bytes(frame: Frame) -> bytes:
    """Everything that a frame says, as bytes."""
    arrays = [r.values for r in frame.rasters] + [a for s in frame.series for a in (s.x, s.y, s.base) if a is not None]
    rest = [(r.name, r.x0, r.x1, r.y0, r.y1, r.paints, r.axes) for r in frame.rasters]
    rest += [(s.name, s.kind, s.paint, s.width, s.axes, s.symbol) for s in frame.series]
    around = (frame.offers, frame.documents)
    said = repr((frame.view, frame.title, frame.badges, frame.axes, rest, frame.labels, frame.marks, frame.legend, frame.summary, around))
    return said.encode() + b"".join(a.tobytes() for a in arrays)
