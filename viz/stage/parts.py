"""A Frame as the parts that travel: the figure (rarely changes), the items (labels, marks), the documents, the arrays.

Each part carries a digest; the hub sends a part to a viewer only if that viewer does not have it yet. The
parts are serialised once and shared by everybody who looks at the same thing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from viz.stage.codec import Json, as_array, dumps
from viz.view import Frame, Offer, Paint, Raster, Series

MAX_TEXT = 400  # characters of one label or mark that travel; the whole text of a request has its own view
MAX_DOCUMENT = 60_000  # characters of one document


@dataclass(frozen=True, slots=True)
class Panel:
    """One rendered frame, ready to be put into messages."""

    view: str
    figure: Json
    items: Json
    documents: Json
    arrays: tuple[np.ndarray, ...]
    figure_digest: str
    items_digest: str
    documents_digest: str
    arrays_digest: str

    def message(self, have: Mapping[str, str], base: int) -> tuple[dict[str, object], list[np.ndarray], dict[str, str]]:
        """(header entry, its arrays, digests the viewer will have). `base`: arrays already in the message."""
        entry: dict[str, object] = {"view": self.view}
        got = {f"a:{self.view}": self.arrays_digest}
        for part in ("figure", "items", "documents"):
            key, mark = f"{part[0]}:{self.view}", getattr(self, f"{part}_digest")
            got[key] = mark
            if have.get(key) != mark:
                entry[part] = getattr(self, part)
        if have.get(f"a:{self.view}") == self.arrays_digest:
            return entry, [], got
        entry["base"], entry["count"] = base, len(self.arrays)
        return entry, list(self.arrays), got


def digest(*parts: bytes) -> str:
    found = hashlib.blake2b(digest_size=12)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def panel(frame: Frame) -> Panel:
    """Split and serialise a frame. Raises TypeError or ValueError where a frame breaks its contract."""
    arrays: list[np.ndarray] = []
    rasters = [_raster(r, arrays) for r in frame.rasters]
    series = [_series(s, arrays) for s in frame.series]
    figure = dumps(
        {
            "title": frame.title,
            "badges": [{"kind": b.kind, "text": b.text[:MAX_TEXT]} for b in frame.badges],
            "axes": {name: dict(axis) for name, axis in frame.axes.items()},
            "rasters": rasters,
            "series": series,
            "legend": [_paint(p) for p in frame.legend],
            "error": frame.error[:MAX_TEXT],
            "offers": [_offer(offer) for offer in frame.offers],
        }
    )
    items = dumps(
        {
            "labels": [[_cut(x.text), float(x.x), float(x.y), x.color, x.anchor, x.size, x.weight, x.axes, x.mono] for x in frame.labels],
            "marks": [
                [m.id, float(m.x0), float(m.x1), float(m.y0), float(m.y1), _cut(m.text), m.outline, m.detail[:MAX_TEXT], m.axes]
                for m in frame.marks
            ],
            "summary": frame.summary,
            # cells move with the window; their place belongs to what changes every step
            "places": [[float(v) for v in (r.x0, r.x1, r.y0, r.y1)] for r in frame.rasters],
            "ranges": [list(map(float, r.range)) if r.range else None for r in frame.rasters],
        }
    )
    documents = dumps([{"title": _cut(d.title), "text": d.text[:MAX_DOCUMENT], "kind": d.kind} for d in frame.documents])
    kept = tuple(arrays)
    blob = [f"{a.dtype.str}{a.shape}".encode() + a.tobytes() for a in kept]
    marks = [digest(text.encode(errors="replace")) for text in (figure, items, documents)]
    return Panel(frame.view, figure, items, documents, kept, *marks, digest(*blob))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _offer(offer: Offer) -> dict[str, object]:
    """Without its arguments: those stay here."""
    return {"id": offer.id, "label": _cut(offer.label), "choices": [_cut(text) for text, _ in offer.choices], "why": _cut(offer.why)}


def _paint(paint: Paint) -> dict[str, object]:
    return {"color": paint.color, "label": paint.label[:MAX_TEXT], "hatch": paint.hatch, "alpha": float(paint.alpha)}


def _raster(raster: Raster, arrays: list[np.ndarray]) -> dict[str, object]:
    values = np.asarray(raster.values)
    if values.dtype != np.uint8 or values.ndim != 2:
        raise TypeError(f"raster {raster.name!r} must be uint8 [rows, cols], not {values.dtype} {values.shape}")
    arrays.append(as_array(values))
    paints = None if raster.paints is None else [_paint(p) for p in raster.paints]
    return {"name": raster.name, "paints": paints, "colormap": raster.colormap, "unit": raster.unit, "axes": raster.axes}


def _series(series: Series, arrays: list[np.ndarray]) -> dict[str, object]:
    x, y = as_array(series.x).astype("<f4"), as_array(series.y).astype("<f4")
    if x.shape != y.shape or x.ndim != 1:
        raise TypeError(f"series {series.name!r} needs x and y of equal length, got {x.shape} and {y.shape}")
    arrays += (x, y)
    if series.base is not None:
        base = as_array(series.base).astype("<f4")
        arrays.append(np.ascontiguousarray(np.broadcast_to(base, x.shape)))
    return {
        "name": series.name,
        "kind": series.kind,
        "paint": _paint(series.paint),
        "width": float(series.width),
        "base": series.base is not None,
        "axes": series.axes,
        "symbol": series.symbol,
    }
