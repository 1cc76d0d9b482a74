"""Frame → an ordinary plotly Figure, for export, notebooks and tests.

The browser's stage draws the same Frame on a canvas (viz/stage); here everything is a Plotly trace, shape or
annotation, so that a still picture needs nothing of ours. Differences, by design: hatches of cells are a
scatter of small strokes and bars use Plotly's own patterns; cells have no rounded corners.

Text is escaped, because Plotly reads a little HTML in annotations, titles and legends.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go

from viz import theme as themes
from viz.view import Frame, Paint, Raster, Series

_BAR_PATTERN = {"diagonal": "/", "cross": "x", "dots": "."}
_CELL_PATTERN = {"diagonal": "line-ne", "cross": "x-thin", "dots": "circle"}
_MAX_HATCHED = 3000
FONT = "Inter, Segoe UI, Roboto, Helvetica Neue, Noto Sans, Liberation Sans, Arial, sans-serif"

MONO = "DejaVu Sans Mono, Liberation Mono, Menlo, Consolas, monospace"


def to_figure(frame: Frame, theme: str = "light", width: int = 1280, height: int = 720) -> go.Figure:
    """The frame as a figure of `width` × `height` pixels."""
    colors, size = themes.table(theme), themes.MIN_FONT.get(theme, 16)
    figure = go.Figure()
    for raster in frame.rasters:
        figure.add_trace(_heatmap(raster, theme))
        figure.add_traces(_hatches(raster, theme))
    for series in frame.series:
        figure.add_trace(_series(series, theme))
    figure.add_traces([_key(paint, theme) for paint in frame.legend if paint.label])
    figure.update_layout(
        width=width,
        height=height,
        title={"text": _title(frame), "font": {"size": round(size * 1.4)}, "x": 0, "xref": "container", "pad": {"l": 24}},
        font={"family": FONT, "size": size, "color": colors["ink"]},
        paper_bgcolor=colors["paper"],
        plot_bgcolor=colors["paper"],
        margin=_margin(frame, size),
        legend={"orientation": "h", "x": 0, "y": 1.01, "yanchor": "bottom", "itemclick": False, "itemdoubleclick": False},
        barmode="overlay",
        shapes=_outlines(frame, colors),
        annotations=[*_labels(frame, colors, size), *_message(frame, colors, size)],
        meta={"view": frame.view, "summary": frame.summary, "badges": [[b.kind, b.text] for b in frame.badges]},
    )
    for name, axis in frame.axes.items():
        figure.update_layout({name: {**_axis_style(colors), **_safe_axis(axis)}})
    if not frame.axes:
        figure.update_layout(xaxis={"visible": False}, yaxis={"visible": False})
    return figure


def plot_size(width: int = 1280, height: int = 720, theme: str = "light") -> tuple[int, int]:
    """The drawing area of a view without visible axes: render it with this ViewState.size and its pixels are the figure's."""
    margin = _margin(None, themes.MIN_FONT.get(theme, 16))
    return width - margin["l"] - margin["r"], height - margin["t"] - margin["b"]


def _margin(frame: Frame | None, size: int) -> dict[str, int]:
    bare = frame is None or all(axis.get("visible") is False for axis in frame.axes.values())
    return {"l": 24 if bare else 80, "r": 24, "t": round(size * 5.5), "b": 24 if bare else 64}


def to_json(frame: Frame, theme: str = "light", width: int = 1280, height: int = 720) -> str:
    """The figure as strict JSON: the same frame gives the same text."""
    plain = json.loads(to_figure(frame, theme, width, height).to_json())
    plain["layout"].pop("template", None)
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))


# ---- text ----


def _text(text: str) -> str:
    return html.escape(text, quote=False).replace("\n", "<br>")


def _title(frame: Frame) -> str:
    badges = " · ".join(_text(f"{b.kind} {b.text}".strip()) for b in frame.badges)
    return f"<b>{_text(frame.title)}</b>" + (f"  [{badges}]" if badges else "")


def _safe_axis(axis: Mapping[str, object]) -> dict[str, object]:
    safe = dict(axis)
    title = safe.get("title")
    if isinstance(title, str):
        safe["title"] = {"text": _text(title)}
    elif isinstance(title, Mapping):
        safe["title"] = {**title, "text": _text(str(title.get("text", "")))}
    if isinstance(safe.get("ticktext"), (list, tuple)):
        safe["ticktext"] = [_text(str(t)) for t in safe["ticktext"]]
    return safe


def _axis_style(colors: Mapping[str, str]) -> dict[str, object]:
    line = {"linecolor": colors["control"], "tickcolor": colors["control"], "gridcolor": colors["grid"]}
    return {"showgrid": False, "zeroline": False, "showline": True, "ticks": "outside", "separatethousands": True, **line}


def _axes(pair: str) -> dict[str, str]:
    at = pair.index("y")
    return {"xaxis": pair[:at], "yaxis": pair[at:]}


def _refs(pair: str) -> dict[str, str]:
    at = pair.index("y")
    return {"xref": pair[:at], "yref": pair[at:]}


def _rgba(color: str, alpha: float) -> str:
    return f"rgba({int(color[1:3], 16)},{int(color[3:5], 16)},{int(color[5:7], 16)},{min(max(alpha, 0.0), 1.0):g})"


# ---- rasters ----


def _centres(low: float, high: float, count: int) -> np.ndarray:
    return low + (np.arange(count) + 0.5) * (high - low) / max(count, 1)


def _heatmap(raster: Raster, theme: str) -> go.Heatmap:
    rows, cols = raster.values.shape
    x, y = _centres(raster.x0, raster.x1, cols), _centres(raster.y0, raster.y1, rows)
    common = {"x": x, "y": y, "name": raster.name, "zsmooth": False, "hoverongaps": False, **_axes(raster.axes)}
    if raster.paints is None:
        low, high = raster.range or (0.0, 255.0)
        z = low + raster.values.astype(np.float64) * (high - low) / 255
        scale = [[i / 255, "rgb({},{},{})".format(*c)] for i, c in enumerate(themes.lut(raster.colormap, theme).tolist())]
        bar = {"title": {"text": _text(raster.unit or raster.name)}, "thickness": 16}
        return go.Heatmap(z=z, zmin=low, zmax=high, colorscale=scale, colorbar=bar, **common)
    count = max(len(raster.paints), 1)
    z = np.where(raster.values < len(raster.paints), raster.values.astype(np.float64), np.nan)
    steps = []
    for i, paint in enumerate(raster.paints):
        color = _rgba(themes.color(paint.color, theme), paint.alpha)
        steps += [[i / count, color], [(i + 1) / count, color]]
    names = np.array([_text(p.label) for p in raster.paints] + [""], object)
    text = names[np.minimum(raster.values, len(raster.paints))]
    scale = steps or [[0, "#000"], [1, "#000"]]
    return go.Heatmap(
        z=z, zmin=-0.5, zmax=count - 0.5, colorscale=scale, showscale=False, text=text, hoverinfo="x+y+text", xgap=1, ygap=1, **common
    )


def _hatches(raster: Raster, theme: str) -> list[go.Scatter]:
    """One mark in the middle of each hatched cell; too many cells to see a hatch have none."""
    if raster.paints is None:
        return []
    rows, cols = raster.values.shape
    x, y = _centres(raster.x0, raster.x1, cols), _centres(raster.y0, raster.y1, rows)
    found = []
    for i, paint in enumerate(raster.paints):
        at = np.argwhere(raster.values == i)
        if not paint.hatch or not 0 < len(at) <= _MAX_HATCHED:
            continue
        ink = themes.color(f"on-{paint.color}", theme)
        marker = {
            "symbol": _CELL_PATTERN[paint.hatch],
            "size": 7,
            "color": _rgba(ink, 0.6),
            "line": {"width": 1.5, "color": _rgba(ink, 0.6)},
        }
        found.append(
            go.Scatter(
                x=x[at[:, 1]], y=y[at[:, 0]], mode="markers", marker=marker, hoverinfo="skip", showlegend=False, **_axes(raster.axes)
            )
        )
    return found


# ---- series ----


def _series(series: Series, theme: str) -> go.Scatter | go.Bar:
    paint = series.paint
    color, line = themes.color(paint.color, theme), themes.table(theme).get(f"{paint.color}-line", themes.color(paint.color, theme))
    common = {
        "x": series.x,
        "y": series.y,
        "name": _text(series.name),
        "showlegend": False,
        "opacity": min(max(paint.alpha, 0), 1),
        **_axes(series.axes),
    }
    if series.kind == "bars":
        base = np.zeros_like(series.y) if series.base is None else series.base
        marker: dict[str, object] = {"color": color, "line": {"color": line, "width": 1}}
        if paint.hatch:
            marker["pattern"] = {"shape": _BAR_PATTERN[paint.hatch], "fgcolor": themes.color(f"on-{paint.color}", theme), "size": 8}
        return go.Bar(**common | {"y": series.y - base}, base=base, width=series.width, marker=marker)
    if series.kind == "markers":
        return go.Scatter(
            mode="markers",
            marker={"symbol": series.symbol, "color": color, "size": max(series.width, 5), "line": {"color": line, "width": 1.5}},
            **common,
        )
    shape = {
        "color": line,
        "width": series.width,
        "shape": "hv" if series.kind == "steps" else "linear",
        "dash": "dash" if paint.hatch else "solid",
    }
    return go.Scatter(mode="lines", line=shape, connectgaps=False, **common)


def _key(paint: Paint, theme: str) -> go.Bar:
    """A legend entry without data."""
    colors = themes.table(theme)
    color = themes.color(paint.color, theme)
    marker: dict[str, object] = {
        "color": _rgba(color, paint.alpha),
        "line": {"color": colors.get(f"{paint.color}-line", color), "width": 1.5},
    }
    if paint.hatch:
        marker["pattern"] = {"shape": _BAR_PATTERN[paint.hatch], "fgcolor": colors.get(f"on-{paint.color}", colors["ink"]), "size": 6}
    return go.Bar(x=[None], y=[None], name=_text(paint.label), marker=marker, showlegend=True)


# ---- labels, marks, messages ----


def _labels(frame: Frame, colors: Mapping[str, str], size: int) -> list[dict[str, object]]:
    found = []
    for label in frame.labels:
        ink = colors.get(label.color, colors["ink"])
        font = {"size": max(label.size, size), "color": ink, "weight": label.weight, "family": MONO if label.mono else FONT}
        place = {"x": label.x, "y": label.y, "xanchor": label.anchor, "yanchor": "middle", "showarrow": False}
        found.append({"text": _text(label.text), "font": font, **place, **_refs(label.axes)})
    return found


def _outlines(frame: Frame, colors: Mapping[str, str]) -> list[dict[str, object]]:
    found = []
    for mark in frame.marks:
        if mark.outline:
            color = colors.get(f"{mark.outline}-line", colors.get(mark.outline, colors["ink"]))
            box = {"x0": mark.x0, "x1": mark.x1, "y0": mark.y0, "y1": mark.y1}
            found.append({"type": "rect", **box, "line": {"color": color, "width": 2}, "name": _text(mark.id), **_refs(mark.axes)})
    return found


def _message(frame: Frame, colors: Mapping[str, str], size: int) -> list[dict[str, object]]:
    """A frame that draws nothing says why, in the middle."""
    text = frame.error or ("" if frame.axes else frame.summary)
    if not text:
        return []
    font = {"size": size + 2, "color": colors["error" if frame.error else "muted"]}
    return [{"text": _text(_wrapped(text)), "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False, "font": font}]


def _wrapped(text: str, most: int = 90) -> str:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + len(word) + 1 > most:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return "\n".join([*lines, line])
