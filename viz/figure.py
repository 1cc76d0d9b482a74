"""Frame → an ordinary plotly Figure, for export, notebooks and tests.

The browser's stage draws the same Frame on a canvas (viz/stage); here everything is a Plotly trace, shape or
annotation, so that a still picture needs nothing of ours. Differences, by design: hatches of cells are strokes of
a line trace, bars use Plotly's own patterns, cells have no rounded corners.

Text is escaped, because Plotly reads a little HTML in annotations, titles and legends.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from viz import theme as themes
from viz.view import Frame, Paint, Raster, Series

_BAR_PATTERN = {"diagonal": "/", "cross": "x", "dots": "."}
_HATCH, _CROSS = 8.0, 12.0  # pixels between two strokes, as on the stage
_MAX_STROKES = 8000
_GAP_FROM = 9.0  # cells so wide are told apart by a gap
FONT = "Inter, Segoe UI, Roboto, Helvetica Neue, Noto Sans, Liberation Sans, Arial, sans-serif"

MONO = "DejaVu Sans Mono, Liberation Mono, Menlo, Consolas, monospace"


def to_figure(frame: Frame, theme: str = "light", width: int = 1280, height: int = 720, footer: str = "") -> go.Figure:
    """The frame as a figure of `width` × `height` pixels. `footer` is printed small at the bottom: where it is from."""
    colors, size = themes.table(theme), themes.MIN_FONT.get(theme, 16)
    figure = go.Figure()
    margin = _margin(frame, size, footer)
    for raster in frame.rasters:
        plane = _Plane.of(frame, raster, width - margin["l"] - margin["r"], height - margin["t"] - margin["b"])
        figure.add_trace(_heatmap(raster, theme, plane))
        figure.add_traces(_hatches(raster, theme, plane))
    for series in frame.series:
        figure.add_trace(_series(series, theme))
    figure.add_traces([_key(paint, theme) for paint in frame.legend if paint.label])
    figure.update_layout(
        width=width,
        height=height,
        title={
            "text": _title(frame, width / size, size),
            "font": {"size": round(size * 1.4)},
            "x": 0,
            "y": 1 - 1.45 * size / height,
            "xref": "container",
            "yref": "container",
            "yanchor": "top",
            "pad": {"l": 24},
        },
        font={"family": FONT, "size": size, "color": colors["ink"]},
        paper_bgcolor=colors["paper"],
        plot_bgcolor=colors["paper"],
        margin=margin,
        legend={"orientation": "h", "x": 0, "y": 1.01, "yanchor": "bottom", "itemclick": False, "itemdoubleclick": False},
        barmode="overlay",
        shapes=_outlines(frame, colors),
        annotations=[*_labels(frame, colors, size), *_message(frame, colors, size), *_footer(footer, colors, size)],
        meta={"view": frame.view, "title": frame.title, "summary": frame.summary, "badges": [[b.kind, b.text] for b in frame.badges]},
    )
    for name, axis in frame.axes.items():
        figure.update_layout({name: {**_axis_style(colors), **_safe_axis(axis)}})
    if not frame.axes:
        figure.update_layout(xaxis={"visible": False}, yaxis={"visible": False})
    return figure


def plot_size(width: int = 1280, height: int = 720, theme: str = "light", footer: str = "") -> tuple[int, int]:
    """The drawing area of a view without visible axes: render it with this ViewState.size and its pixels are the figure's."""
    margin = _margin(None, themes.MIN_FONT.get(theme, 16), footer)
    return width - margin["l"] - margin["r"], height - margin["t"] - margin["b"]


def _margin(frame: Frame | None, size: int, footer: str = "") -> dict[str, int]:
    bare = frame is None or all(axis.get("visible") is False for axis in frame.axes.values())
    return {"l": 24 if bare else 80, "r": 24, "t": round(size * 5.5), "b": (24 if bare else 64) + (size if footer else 0)}


def to_json(frame: Frame, theme: str = "light", width: int = 1280, height: int = 720, footer: str = "") -> str:
    """The figure as strict JSON: the same frame gives the same text."""
    plain = json.loads(to_figure(frame, theme, width, height, footer).to_json())
    plain["layout"].pop("template", None)
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))


# ---- text ----


def _text(text: str) -> str:
    return html.escape(text, quote=False).replace("\n", "<br>")


def _title(frame: Frame, width_em: float, size: int) -> str:
    """The title, and under it the badges: as much of each as fits on a line."""
    badges, room = [f"{b.kind}: {b.text}" if b.text else b.kind for b in frame.badges], int(width_em / 0.55) - 6
    for at in sorted(range(len(badges)), key=lambda i: -len(badges[i])):
        over = len(" · ".join(badges)) - room
        if over > 0:
            badges[at] = badges[at][: max(len(badges[at]) - over - 1, 12)] + "…"
    line = f'<br><span style="font-size:{size}px">{_text(" · ".join(badges))}</span>' if badges else ""
    return f"<b>{_text(frame.title)}</b>{line}"


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


@dataclass(frozen=True)
class _Plane:
    """Where a raster's axes lie: value at the low end, value at the high end, pixels between them; y upwards."""

    x: tuple[float, float, float]
    y: tuple[float, float, float]

    @staticmethod
    def of(frame: Frame, raster: Raster, width: float, height: float) -> _Plane:
        names = _axes(raster.axes)
        found = []
        for letter, ends, length in (("x", (raster.x0, raster.x1), width), ("y", (raster.y1, raster.y0), height)):
            axis = frame.axes.get(names[f"{letter}axis"].replace(letter, f"{letter}axis"), {})
            low, high = axis.get("range") or ends
            start, end = axis.get("domain") or (0, 1)
            found.append((float(low), float(high), max(float(end) - float(start), 1e-9) * length))
        return _Plane(*found)

    def pixels(self, xs: np.ndarray, ys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return tuple((values - low) / ((high - low) or 1) * length for values, (low, high, length) in ((xs, self.x), (ys, self.y)))

    def values(self, xs: np.ndarray, ys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return tuple(low + pixels / length * (high - low) for pixels, (low, high, length) in ((xs, self.x), (ys, self.y)))

    def cell(self, raster: Raster) -> tuple[float, float]:
        """A cell's size in pixels."""
        rows, cols = raster.values.shape
        x, y = self.pixels(np.array([raster.x0, raster.x1]), np.array([raster.y0, raster.y1]))
        return abs(x[1] - x[0]) / max(cols, 1), abs(y[1] - y[0]) / max(rows, 1)


def _heatmap(raster: Raster, theme: str, plane: _Plane) -> go.Heatmap:
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
    gaps = [int(size >= _GAP_FROM) for size in plane.cell(raster)]
    return go.Heatmap(
        z=z,
        zmin=-0.5,
        zmax=count - 0.5,
        colorscale=scale,
        showscale=False,
        text=text,
        hoverinfo="x+y+text",
        xgap=gaps[0],
        ygap=gaps[1],
        **common,
    )


def _hatches(raster: Raster, theme: str, plane: _Plane) -> list[go.Scatter]:
    """Strokes or dots over the hatched cells, in one pattern over the whole picture."""
    found = []
    for i, paint in enumerate(raster.paints or ()):
        if not paint.hatch or not np.any(raster.values == i):
            continue
        ink = themes.table(theme).get(f"{paint.color}-line" if paint.color == "waste" else f"on-{paint.color}", themes.color("ink", theme))
        boxes = _boxes(raster, i, plane)
        look = {"hoverinfo": "skip", "showlegend": False, **_axes(raster.axes)}
        if paint.hatch == "dots":
            x, y = plane.values(*_dots(boxes))
            found.append(go.Scatter(x=x, y=y, mode="markers", marker={"size": 2.6, "color": _rgba(ink, 0.55)}, **look))
        else:
            cross = paint.hatch == "cross"
            x, y = plane.values(*_strokes(boxes, _CROSS if cross else _HATCH, both=cross))
            found.append(
                go.Scatter(
                    x=x,
                    y=y,
                    mode="lines",
                    line={"width": 1.8 if cross else 1.2, "color": _rgba(ink, 0.8 if paint.color == "waste" else 0.65 if cross else 0.45)},
                    connectgaps=False,
                    **look,
                )
            )
    return found


def _boxes(raster: Raster, kind: int, plane: _Plane) -> list[tuple[float, float, float, float]]:
    """Pixel boxes (x0, x1, y0, y1) of one class: runs of cells, those that lie under each other as one."""
    rows, cols = raster.values.shape
    x, y = plane.pixels(np.linspace(raster.x0, raster.x1, cols + 1), np.linspace(raster.y0, raster.y1, rows + 1))
    open_: dict[tuple[int, int], int] = {}
    found: list[tuple[int, int, int, int]] = []
    for row in range(rows + 1):
        line = raster.values[row] == kind if row < rows else np.zeros(cols, bool)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], line, [False]])))
        runs = set(zip(edges[::2].tolist(), edges[1::2].tolist()))
        found += [(*run, open_.pop(run), row) for run in [run for run in open_ if run not in runs]]
        open_ |= {run: row for run in runs if run not in open_}
    return [(*sorted((x[a], x[b])), *sorted((y[c], y[d]))) for a, b, c, d in found]


def _strokes(boxes: list[tuple[float, float, float, float]], pitch: float, both: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rising lines (and falling ones) through boxes; NaN parts them."""
    xs: list[float] = []
    ys: list[float] = []
    for x0, x1, y0, y1 in boxes:
        for k in range(math.ceil((y0 - x1) / pitch), math.floor((y1 - x0) / pitch) + 1):
            low, high = max(x0, y0 - k * pitch), min(x1, y1 - k * pitch)
            xs += [low, high, math.nan]
            ys += [low + k * pitch, high + k * pitch, math.nan]
        for k in range(math.ceil((y0 + x0) / pitch), math.floor((y1 + x1) / pitch) + 1) if both else ():
            low, high = max(x0, k * pitch - y1), min(x1, k * pitch - y0)
            xs += [low, high, math.nan]
            ys += [k * pitch - low, k * pitch - high, math.nan]
        if len(xs) > 3 * _MAX_STROKES:
            break
    return np.array(xs), np.array(ys)


def _dots(boxes: list[tuple[float, float, float, float]]) -> tuple[np.ndarray, np.ndarray]:
    xs: list[float] = []
    ys: list[float] = []
    for x0, x1, y0, y1 in boxes:
        for shift in (0.25 * _HATCH, 0.75 * _HATCH):
            across = np.arange(math.ceil((x0 - shift) / _HATCH), math.floor((x1 - shift) / _HATCH) + 1) * _HATCH + shift
            down = np.arange(math.ceil((y0 - shift) / _HATCH), math.floor((y1 - shift) / _HATCH) + 1) * _HATCH + shift
            xs += np.tile(across, len(down)).tolist()
            ys += np.repeat(down, len(across)).tolist()
        if len(xs) > _MAX_STROKES:
            break
    return np.array(xs), np.array(ys)


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


def _footer(text: str, colors: Mapping[str, str], size: int) -> list[dict[str, object]]:
    if not text:
        return []
    place = {"x": 0, "y": 0, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "top", "yshift": -12, "showarrow": False}
    return [{"text": _text(text[:300]), "font": {"size": round(size * 0.75), "color": colors["muted"]}, **place}]


def _wrapped(text: str, most: int = 90) -> str:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + len(word) + 1 > most:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return "\n".join([*lines, line])
