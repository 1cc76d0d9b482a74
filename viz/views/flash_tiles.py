"""FlashAttention tiles: which tiles of the score matrix does the kernel visit, and what does one query row keep of each?

Left: the score matrix of one sequence and one key head, cut into tiles as the kernel met them: visited ones in the
request's colour (a masked half stays empty), tiles that no program visited hatched. One tile is boxed. Right: what lies
on the chip for it: Q, K and V, the chosen row's scores, its running max m, sum l and acc, and how far acc / l still is from
plain softmax. Everything is read from a TileTrace; only the line "plain softmax" is a second computation, on the host,
and said to be one. Nothing is drawn for rows that the kernel kept no numbers of.

Rejected: one cell a tile (a diagonal tile's empty half, which the kernel computes in vain, would not be seen).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from engine.artifacts import PARTLY, TileTrace, of_kind
from engine.trace import Trace
from viz.layout import Sheet, framed, message, too_small, visible
from viz.measured import first_fit, fit_lines
from viz.select import identity
from viz.theme import data_size, percent
from viz.tiles import (
    Block,
    Chosen,
    Matrix,
    Online,
    a_step,
    chosen,
    differences,
    has_clock,
    is_complete,
    online,
    row_acc,
    same_launch,
    shown,
    tile_bytes,
    tile_scores,
)
from viz.view import Ask, Badge, Frame, Mark, Offer, Paint, Raster, Series, View, ViewState
from viz.words.catalogue import Words, cut, words

SIDE_BY_SIDE = 38  # em of a panel from which on the two halves stand beside each other
DENSE = 7  # px of a tile, below which its borders are not drawn
MOST_MARKS = 300
SIZES = (16, 32, 64, 128)
SPLITS = (1, 2, 4, 8, 16)
_NOW, _OTHER, _SKIPPED, _CLEAR = 0, 1, 2, 255


def figure(trace: Trace, state: ViewState) -> Frame:
    step = trace.clamp(state.step)
    it = shown(trace, step, state.selection)
    if it is None or too_small(state):
        frame = message(summary(trace, state), state, Badge("state") if it is None else _badge(it, words(state.language, WORDS)))
    else:
        frame = _Picture(trace, state, step, it).frame()
    return replace(frame, offers=offers(trace, state, step, it))


# ---- numbers ----


def number(value: float) -> str:
    """Two or three digits with a real minus sign: "2.1", "−15.3", "0.07", "3×10⁻⁸"."""
    if not np.isfinite(value):
        return "−∞" if value < 0 else "∞"
    size = abs(value)
    sign = "−" if value < 0 else ""
    if size == 0:
        return "0"
    if 0.01 <= size < 10_000:
        return sign + (f"{size:,.0f}" if size >= 100 else f"{size:.1f}" if size >= 1 else f"{size:.2f}")
    digits, _, power = f"{size:.0e}".partition("e")
    return f"{sign}{digits}×10{_raised(int(power))}"


def _raised(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


# ---- sentences ----


def counts(of: Matrix, t: Words) -> str:
    all_ = of.visited + of.skipped
    return t("flash_tiles.counts", n=of.visited, of=all_, skipped=of.skipped, share=percent(of.skipped, all_))


def says(of: Chosen, now: Online | None, t: Words) -> tuple[str, ...]:
    """What happened to the row's max and sum in this tile: a long form and a short one."""
    it = of.matrix.it
    if now is None:
        who = {"position": it.row_position + 1, "head": it.row_head}
        return (t("flash_tiles.says.unknown", **who), t("flash_tiles.says.unknown.short", **who))
    if not now.sees:
        return (t("flash_tiles.says.nothing"),)
    if now.before is None:
        return tuple(t(f"flash_tiles.says.first{form}", m=number(now.m), l=number(now.l)) for form in ("", ".short"))
    said = {"m0": number(now.before[0]), "m": number(now.m), "l0": number(now.before[1]), "l": number(now.l)}
    said |= {"factor": number(now.rescale), "added": number(now.added), "by": number(now.before[0] - now.m)}
    kind = "kept" if now.m == now.before[0] else "grown"
    return tuple(t(f"flash_tiles.says.{kind}{form}", **said) for form in ("", ".short"))


def end_of(it: TileTrace) -> float | None:
    """The difference from plain softmax after the row's last tile; None where that is not the whole row."""
    last = float(differences(it)[-1])
    return last if is_complete(it) and np.isfinite(last) else None


def elsewhere(it: TileTrace, step: int, t: Words) -> str:
    """Where the tiles belong to another step than the one that is shown."""
    return "" if it.step_id == step else t("flash_tiles.other_step", step=it.step_id, here=step)


def _badge(it: TileTrace, t: Words) -> Badge:
    where = visible(it.device)[:60] if has_clock(it) else t("flash_tiles.interpreter", device=visible(it.device)[:60])
    if it.provenance == "measured":
        return Badge("measured", where)
    return Badge("recomputed", t("flash_tiles.difference", device=where, difference=number(it.difference)))


# ---- the picture ----


class _Picture:
    """Two lines of counts, the matrix at the left (or on top), what lies on the chip at the right (or below), a sentence."""

    def __init__(self, trace: Trace, state: ViewState, step: int, it: TileTrace) -> None:
        self.trace, self.state, self.step, self.it = trace, state, step, it
        self.t, self.sheet = words(state.language, WORDS), Sheet(state)
        self.at = chosen(it, state.selection)
        self.of = self.at.matrix
        self.now = online(self.at)
        self.who = visible(trace.name(self.of.seq_id))
        self.hue = identity(trace, step, state.selection).color(self.of.seq_id)
        self.in_time = state.axis == "time"
        self.axes: dict[str, dict[str, object]] = {}
        self.rasters: list[Raster] = []
        self.series: list[Series] = []
        self.marks: list[Mark] = []
        self.legend: list[Paint] = []

    def frame(self) -> Frame:
        sheet = self.sheet
        self.axes |= sheet.axes()
        wide = sheet.width >= SIDE_BY_SIDE * sheet.font
        bottom = sheet.height - self._sentence(3 if not wide else 2) - 4
        top = self._head() + 4
        middle = sheet.width * 0.47
        left = (8, middle - 8, top, bottom) if wide else (8, sheet.width - 8, top, top + (bottom - top) * 0.42)
        right = (middle + 8, sheet.width - 8, top, bottom) if wide else (8, sheet.width - 8, left[3] + 4, bottom)
        self._matrix(*left)
        self._chip(*right)
        self._key()
        return Frame(
            badges=tuple(self._badges()), axes=self.axes, rasters=tuple(self.rasters), series=tuple(self.series),
            labels=tuple(sheet.labels), marks=tuple(self.marks), legend=tuple(self.legend),
        )  # fmt: skip

    def _badges(self) -> list[Badge]:
        return [_badge(self.it, self.t), Badge("computed", self.t("flash_tiles.plain"))]

    def _key(self) -> None:
        t = self.t
        self.legend = [
            Paint(self.hue, t("flash_tiles.legend.now.time" if self.in_time else "flash_tiles.legend.now")),
            Paint(self.hue, t("flash_tiles.legend.later" if self.in_time else "flash_tiles.legend.other"), alpha=0.35),
            *([framed("ink", t("flash_tiles.legend.masked"))] if self.of.partly else []),
            *([Paint("free", t("flash_tiles.legend.skipped"), "diagonal")] if self.of.skipped else []),
        ]

    # ---- words around ----

    def _head(self) -> float:
        """What is visited and skipped; whose matrix it is; from which step, if that is another one. Returns where it ends."""
        sheet, t, it, of = self.sheet, self.t, self.it, self.of
        room = sheet.width - 16
        order = "clock" if has_clock(it) else "launch"
        other = t("flash_tiles.axis.step" if self.in_time else f"flash_tiles.axis.{order}")
        span = sheet.span(other) + 20
        y = 4 + sheet.line / 2
        short = t("flash_tiles.counts.short", n=of.visited, skipped=of.skipped)
        both = sheet.span(short) + span + 12 <= room
        sheet.put(first_fit(sheet, room - (span + 12 if both else 0), counts(of, t), short), 8, y, weight=700)
        fields = {
            "who": self.who, "n": of.queries, "keys": of.keys, "layer": it.layer, "head": of.kv_head, "heads": it.kv_heads,
            "rows": it.block_q, "columns": it.block_n,
        }  # fmt: skip
        whose = [t(f"flash_tiles.whose{form}", **fields) for form in ("", ".short", ".shorter", ".shortest")]
        y += sheet.line
        beside = room if both else room - span - 12
        sheet.put(first_fit(sheet, beside, *whose), 8, y, "muted", room=beside)
        self._toggle(other, sheet.width - 8, y - sheet.line if both else y, span)
        said = elsewhere(it, self.step, t)
        for text in fit_lines(sheet, room, 1, said, t("flash_tiles.other_step.short", step=it.step_id)) if said else ():
            y += sheet.line
            sheet.put(text, 8, y, "accent", weight=700)
        return y + sheet.line / 2

    def _toggle(self, text: str, right: float, y: float, span: float) -> None:
        half = self.sheet.line / 2 + 1
        if self.sheet.put(text, right - span / 2, y, anchor="center"):
            other = "step" if self.in_time else "time"
            self.marks.append(
                Mark(f"axis:{other}", right - span, right, y - half, y + half, self.t(f"flash_tiles.mark.axis.{other}"), "control")
            )

    def _sentence(self, most: int) -> float:
        """At the bottom; its height."""
        sheet = self.sheet
        most = most if sheet.height >= 14 * sheet.line else 1
        lines = fit_lines(sheet, sheet.width - 16, most, *says(self.at, self.now, self.t))
        for i, line in enumerate(lines):
            sheet.put(line, 8, sheet.height - 4 - (len(lines) - i - 0.5) * sheet.line, weight=700)
        return len(lines) * sheet.line + 4

    # ---- the matrix ----

    def _matrix(self, x0: float, x1: float, y0: float, y1: float) -> None:
        sheet, t, of = self.sheet, self.t, self.of
        ends = {"first": of.first + 1, "last": of.first + of.queries, "keys": of.keys, "n": len(of.blocks)}
        room = x1 - x0
        keys = ("flash_tiles.edges.splits",) if self._is_strip and len(of.blocks) > 1 else ("flash_tiles.edges", "flash_tiles.edges.short")
        title = first_fit(sheet, room, *(t(key, **ends) for key in (*keys, "flash_tiles.edges.shorter")))
        sheet.put(title, x0, y0 + sheet.line / 2, "muted")
        box = self._said_of_box(room)
        sheet.put(box, x0, y1 - sheet.line / 2)
        y0, y1 = y0 + sheet.line + 2, y1 - sheet.line - 4
        if self._is_strip:
            y1 = min(y1, y0 + len(of.blocks) * 3 * sheet.line)
        self.size = (room, y1 - y0)
        self.rows = stretched([1 if self._is_strip else block.num_q for block in of.blocks], y1 - y0, 14)
        starts = {int(self.it.tiles["k_start"][i]) for block in of.blocks for i in block.tiles}
        self.key_edges = np.array(sorted({0, of.keys, *range(0, of.keys, self.it.block_n), *starts}), np.float64)
        self.columns = stretched(np.diff(self.key_edges).tolist(), room, 14)
        self.axes |= sheet.data_axes(2, (0, room), (0, y1 - y0), (x0, x1, y0, y1))
        self.rasters.append(self._cells())
        self._borders()
        self._tiles_to_choose()

    def _span(self, tile: int) -> tuple[int, int]:
        row = self.it.tiles[tile]
        return int(row["k_start"]), int(row["k_stop"])

    def _x(self, key: float) -> float:
        """Pixels from the matrix' left edge."""
        return float(np.interp(key, self.key_edges, self.columns))

    @property
    def _is_strip(self) -> bool:
        """One Q-block, whose programs share the keys: a row each."""
        return len({block.q_start for block in self.of.blocks}) == 1 and self.of.queries <= 16

    def _said_of_box(self, room: float) -> str:
        t, row, block = self.t, self.at.row, self.at.block
        order = self.of.in_time
        fields = {
            "n": order.index(self.at.tile) + 1 if self.in_time else self.at.at + 1,
            "of": len(order) if self.in_time else len(block.tiles), "split": block.split + 1,
            "first": block.q_start + 1, "last": block.q_start + block.num_q, "key0": int(row["k_start"]) + 1, "key1": int(row["k_stop"]),
        }  # fmt: skip
        order_ = "time" if self.in_time else "split" if self.it.num_splits > 1 else "query" if block.num_q == 1 else "block"
        keys = (f"flash_tiles.box.{order_}", "flash_tiles.box.short", "flash_tiles.box.shorter")
        return first_fit(self.sheet, room, *(t(key, **fields) for key in keys))

    def _reached(self) -> frozenset[int]:
        """Tiles that were visited up to the boxed one: of its program, or in time."""
        order = self.of.in_time if self.in_time else self.at.block.tiles
        return frozenset(order[: order.index(self.at.tile) + 1])

    def _cells(self) -> Raster:
        """Which pairs of query and key were computed, a cell a few pixels: enough for the edge of the mask."""
        of, tiles, window = self.of, self.it.tiles, self.it.window
        cols, rows = (max(int(px / cell), 1) for px, cell in zip(self.size, (2, 4)))
        keys = np.interp((np.arange(cols) + 0.5) * self.size[0] / cols, self.columns, self.key_edges).astype(np.int64)
        lines = (np.arange(rows) + 0.5) * self.size[1] / rows
        at = np.clip(np.searchsorted(self.rows, lines, side="right") - 1, 0, len(of.blocks) - 1)
        values, reached = np.full((rows, cols), _SKIPPED, np.uint8), self._reached()
        if self._is_strip:  # what one split leaves out, another one visits
            for i in (i for block in of.blocks for i in block.tiles):
                values[:, slice(*np.searchsorted(keys, self._span(i)))] = _CLEAR
        for b, block in enumerate(of.blocks):
            mine = np.flatnonzero(at == b)
            if not len(mine):
                continue
            share = (lines[mine] - self.rows[b]) / (self.rows[b + 1] - self.rows[b])
            positions = block.q_start + np.clip((share * block.num_q).astype(np.int64), 0, block.num_q - 1)
            for i in block.tiles:
                low, high = np.searchsorted(keys, self._span(i))
                part = np.full((len(mine), high - low), _NOW if i in reached else _OTHER, np.uint8)
                if tiles["kind"][i] == PARTLY:
                    key = keys[None, low:high]
                    seen = (key <= positions[:, None]) & ((key > positions[:, None] - window) if window else True)
                    part[~seen] = _CLEAR
                values[mine[0] : mine[-1] + 1, low:high] = part
        paints = (Paint(self.hue), Paint(self.hue, alpha=0.35), Paint("free", hatch="diagonal"))
        return Raster("tiles", values, 0, self.size[0], 0, self.size[1], paints, axes="x2y2")

    def _borders(self) -> None:
        """Of tiles that are large enough; thinner where there are many."""
        points: list[tuple[float, float]] = []
        gap, narrow = (np.nan, np.nan), float(np.diff(self.columns).min())
        for b, block in enumerate(self.of.blocks):
            y0, y1 = self.rows[b], self.rows[b + 1]
            spans = sorted(self._span(i) for i in block.tiles)
            if y1 - y0 >= DENSE:
                points += [p for y in (y0, y1) for p in ((self._x(spans[0][0]), y), (self._x(spans[-1][1]), y), gap)]
            if narrow >= DENSE and len(points) < 12_000:
                points += [p for x in sorted({x for span in spans for x in span}) for p in ((self._x(x), y0), (self._x(x), y1), gap)]
        if points:
            xy = np.array(points, np.float32)
            paint = Paint("ink", alpha=1.0 if min(narrow, self.size[1] / len(self.of.blocks)) >= 20 else 0.4)
            self.series.append(Series("borders", xy[:, 0].copy(), xy[:, 1].copy(), "line", paint, 1.0, axes="x2y2"))

    def _tiles_to_choose(self) -> None:
        """All tiles; of very many those of the boxed one's program, and each other program's last."""
        of = self.of
        for b, block in enumerate(of.blocks):
            few = of.visited <= MOST_MARKS
            own = block is self.at.block or few
            every = max(len(block.tiles) // MOST_MARKS, 1)
            for at in (
                [*range(0, len(block.tiles), every)] if own else [len(block.tiles) - 1] if b % max(len(of.blocks) // 60, 1) == 0 else []
            ):
                if block.tiles[at] != self.at.tile:
                    self._tile_mark(b, block, at)
            if block is self.at.block:
                self._tile_mark(b, block, self.at.at)

    def _tile_mark(self, b: int, block: Block, at: int) -> None:
        i = block.tiles[at]
        row = self.it.tiles[i]
        fields = {
            "n": at + 1, "of": len(block.tiles), "first": block.q_start + 1, "last": block.q_start + block.num_q,
            "key0": int(row["k_start"]) + 1, "key1": int(row["k_stop"]), "program": block.program, "split": block.split + 1,
        }  # fmt: skip
        text = self.t("flash_tiles.mark" if self.it.num_splits == 1 else "flash_tiles.mark.split", **fields)
        kind = self.t("flash_tiles.mark.partly" if row["kind"] == PARTLY else "flash_tiles.mark.full")
        detail = self.t("flash_tiles.mark.where", sm=int(row["sm"]), ns=int(row["stop_ns"] - row["start_ns"])) if has_clock(self.it) else ""
        box = (self._x(int(row["k_start"])), self._x(int(row["k_stop"])), float(self.rows[b]), float(self.rows[b + 1]))
        self.marks.append(Mark(f"tile:{i}", *box, f"{text}, {kind}", "accent" if i == self.at.tile else None, detail, "x2y2"))

    # ---- what lies on the chip ----

    def _chip(self, x0: float, x1: float, y0: float, y1: float) -> None:
        """From top to bottom, what matters most first as long as there is room; what is left is shared by the two pictures."""
        line, kept = self.sheet.line, self._kept(y1 - y0 - 12)
        left = y1 - y0 - 12 - sum(kept.values()) - 4 * len(kept)
        growing = [name for name in ("scores", "curve") if kept.get(name, 0) > line]
        for name in growing:
            kept[name] += min(max(left, 0) / len(growing), 5 * line)
        y = y0 + 6
        for name in ("memory", "row", "scores", "numbers", "acc", "curve"):
            if name in kept:
                getattr(self, f"_{name}")(x0 + 10, x1 - 10, y, y + kept[name])
                y += kept[name] + 4
        self._frame_around(x0, x1, y0, min(y + 2, y1))
        if not self.at.is_followed:
            self._unknown(x0 + 10, x1 - 10, y + 4, y1)

    def _kept(self, room: float) -> dict[str, float]:
        """Which parts have room, and their least heights: some as one line of text first, as a picture where more is left."""
        line, kept = self.sheet.line, {}
        scores = tile_scores(self.at)
        there = {"row", "memory", *(["numbers"] if self.now is not None else [])}
        there |= {"curve"} if self.at.is_followed else set()
        there |= {"scores"} if scores is not None and np.isfinite(scores).any() else set()
        there |= {"acc"} if row_acc(self.at) is not None else set()
        wishes = [("row", 1), ("numbers", 2), ("scores", 3), ("curve", 1), ("memory", 1), ("curve", 2.8), ("acc", 1.9), ("memory", 3.3)]
        if end_of(self.it) is None:
            wishes.remove(("curve", 2.8))
        for name, lines in wishes:
            more = lines * line - kept.get(name, -4)
            if name in there and more <= room:
                kept[name] = lines * line
                room -= more
        return kept

    def _frame_around(self, x0: float, x1: float, y0: float, y1: float) -> None:
        x, y = np.array([x0, x1, x1, x0, x0], np.float32), np.array([y0, y0, y1, y1, y0], np.float32)
        self.series.append(Series("chip", x, y, "line", Paint("muted"), 1.5))

    def _memory(self, x0: float, x1: float, y0: float, y1: float) -> None:
        """Q, K, V and acc as boxes with their sizes; in one line where there is no room for boxes."""
        sheet, t, it = self.sheet, self.t, self.it
        sizes = tile_bytes(it)
        total, each = data_size(sum(sizes.values())), ", ".join(f"{name} {data_size(size)}" for name, size in sizes.items())
        boxes = y1 - y0 > 2 * sheet.line
        forms = [t(f"flash_tiles.memory{form}", size=total) for form in ("", ".short")]
        forms = forms if boxes else [t("flash_tiles.memory.each", each=each), each, *forms]
        sheet.put(first_fit(sheet, x1 - x0, *forms), x0, y0 + sheet.line / 2, "muted")
        if not boxes:
            return
        shapes = {"Q": it.block_m, "K": it.block_n, "V": it.block_n, "acc": it.block_m}
        colors = {"Q": self.hue, "K": "cached", "V": "cached", "acc": "free"}
        wide, top = (x1 - x0 - 3 * 6) / 4, y0 + sheet.line + 2
        for k, (name, size) in enumerate(sizes.items()):
            left, half, ink = x0 + k * (wide + 6), (y1 - top) / 4, f"on-{colors[name]}"
            self.rasters.append(Raster(name, np.zeros((1, 1), np.uint8), left, left + wide, top, y1, (Paint(colors[name]),)))
            said = first_fit(sheet, wide - 8, f"{name} {shapes[name]}×{it.head_dim}", name)
            sheet.put(said, left + wide / 2, top + half, ink, anchor="center", weight=700)
            sheet.put(data_size(size), left + wide / 2, top + 3 * half, ink, anchor="center", room=wide - 4)

    def _row(self, x0: float, x1: float, y0: float, y1: float) -> None:
        """Whose query row is followed."""
        sheet, t = self.sheet, self.t
        fields = {"who": self.who, "position": self.at.position + 1, "head": self.it.row_head}
        if self.now is None:
            fields["position"] = self.at.block.q_start + self.at.block.num_q
        sheet.put(
            first_fit(sheet, x1 - x0, *(t(f"flash_tiles.row{form}", **fields) for form in ("", ".short"))), x0, (y0 + y1) / 2, weight=700
        )

    def _scores(self, x0: float, x1: float, y0: float, y1: float) -> None:
        """The row's scores in this tile as bars from below, with the max before and after as lines."""
        sheet, t, now, row = self.sheet, self.t, self.now, self.at.row
        scores = tile_scores(self.at)
        n = int(row["k_stop"]) - int(row["k_start"])
        seen = np.isfinite(scores)
        n = max(n, len(scores))
        fields = {"key0": int(row["k_start"]) + 1, "key1": int(row["k_stop"]), "n": int(seen.sum()), "of": n}
        forms = (
            ("flash_tiles.scores", "flash_tiles.scores.short") if seen.all() else ("flash_tiles.scores.masked", "flash_tiles.scores.short")
        )
        sheet.put(first_fit(sheet, x1 - x0, *(t(key, **fields) for key in forms)), x0, y0 + sheet.line / 2, "muted")
        levels = [v for v in (now.before[0] if now and now.before else None, now.m if now else None) if v is not None]
        values = [0.0, *scores[seen].tolist(), *levels]
        pad = (max(values) - min(values)) * 0.08 or 1.0
        low, high = min(values) - pad, max(values) + pad
        gutter = max((sheet.span(number(v)) for v in levels), default=0) + 10
        self.axes |= sheet.data_axes(3, (0, n), (high, low), (x0, x1 - gutter, y0 + sheet.line + 2, y1))
        at = np.arange(len(scores), dtype=np.float32) + 0.5
        zero = np.zeros(int(seen.sum()), np.float32)
        bars = Series("scores", at[seen], scores[seen].astype(np.float32), "bars", Paint(self.hue), 0.8, zero, "x3y3")
        self.series += [
            bars,
            Series("zero", np.array([0, n], np.float32), np.zeros(2, np.float32), "line", Paint("muted"), 1.0, axes="x3y3"),
        ]
        self._levels(n, x1 - gutter + 6, (low, high), (y0 + sheet.line + 2, y1))

    def _levels(self, n: int, x: float, ends: tuple[float, float], box: tuple[float, float]) -> None:
        """The max before (dashed) and after (solid), each with its number at the right."""
        now, sheet = self.now, self.sheet
        if now is None or now.m is None:
            return
        levels = [(now.m, Paint("accent"))]
        if now.before and now.before[0] != now.m:
            levels.append((now.before[0], Paint("muted", hatch="diagonal")))
        for value, paint in levels:
            line = np.array([value, value], np.float32)
            self.series.append(Series("max", np.array([0, n], np.float32), line, "line", paint, 2.5, axes="x3y3"))
            y = box[0] + (ends[1] - value) / (ends[1] - ends[0]) * (box[1] - box[0])
            half = sheet.font * 0.63
            sheet.put(number(value), x, min(max(y, box[0] + half), box[1] - half), "accent" if paint.color == "accent" else "muted")

    def _numbers(self, x0: float, x1: float, y0: float, y1: float) -> None:
        """m and l before → after, and what the old sum was multiplied with."""
        sheet, t, now = self.sheet, self.t, self.now
        m0, l0 = (number(now.before[0]), number(now.before[1])) if now.before else ("−∞", "0")
        m = "−∞" if now.m is None else number(now.m)
        lines = (
            (t("flash_tiles.m", before=m0, after=m), t("flash_tiles.m.short", before=m0, after=m)),
            (
                t("flash_tiles.l", before=l0, after=number(now.l), factor=number(now.rescale)),
                t("flash_tiles.l.short", before=l0, after=number(now.l)),
            ),
        )
        for i, forms in enumerate(lines):
            sheet.put(first_fit(sheet, x1 - x0, *forms), x0, y0 + (i + 0.5) * sheet.line)

    def _acc(self, x0: float, x1: float, y0: float, y1: float) -> None:
        """The row's accumulator, a cell a number."""
        sheet, acc = self.sheet, row_acc(self.at)
        most = float(np.abs(acc).max()) or 1.0
        title = [self.t(f"flash_tiles.acc{form}", n=len(acc), most=number(most)) for form in ("", ".short")]
        sheet.put(first_fit(sheet, x1 - x0, *title), x0, y0 + sheet.line / 2, "muted")
        values = np.clip(np.rint((acc.astype(np.float64) / most + 1) * 127.5), 0, 254).astype(np.uint8)[None]
        strip = Raster("acc", np.ascontiguousarray(values), x0, x1, y0 + sheet.line + 2, y1, None, (-most, most), "diverging", "acc")
        self.rasters.append(strip)

    def _curve(self, x0: float, x1: float, y0: float, y1: float) -> None:
        """How far acc / l is from plain softmax after each tile, on a logarithmic axis."""
        sheet, t, it = self.sheet, self.t, self.it
        found, end = differences(it), end_of(it)
        here = float(found[it.row_tiles.tolist().index(self.at.tile)])
        kind = "curve" if it.num_splits == 1 else "merged"
        fields = {"here": number(here), "end": number(end) if end is not None else "?"}
        said = [t(f"flash_tiles.{kind}{form}", **fields) for form in ("", ".short", ".shorter")]
        sheet.put(first_fit(sheet, x1 - x0, *said), x0, y0 + sheet.line / 2, "muted")
        if end is None or y1 - y0 < 1.5 * sheet.line:
            return
        logs = np.log10(np.maximum(found, 1e-9))
        ok = np.isfinite(logs)
        low, high = float(logs[ok].min()) - 0.5, float(logs[ok].max()) + 0.5
        self.axes |= sheet.data_axes(4, (0.5, len(found) + 0.5), (high, low), (x0, x1, y0 + sheet.line + 2, y1))
        at = np.arange(1, len(found) + 1, dtype=np.float32)
        y = np.where(ok, logs, np.nan).astype(np.float32)
        self.series.append(Series("difference", at, y, "line", Paint("ink"), 2.0, axes="x4y4"))
        k = it.row_tiles.tolist().index(self.at.tile)
        if ok[k]:
            self.series.append(Series("here", at[k : k + 1], y[k : k + 1], "markers", Paint("accent"), 11.0, axes="x4y4"))

    def _unknown(self, x0: float, x1: float, y0: float, y1: float) -> None:
        """In place of what the kernel did not keep of this row."""
        sheet = self.sheet
        who = visible(self.trace.name(self.it.row_seq_id))
        key = "flash_tiles.kept_elsewhere" if self.now is None else "flash_tiles.kept_partly"
        text = self.t(key, who=who, position=self.it.row_position + 1, **({} if self.now else {"head": self.it.row_kv_head}))
        for i, line in enumerate(fit_lines(sheet, x1 - x0, int((y1 - y0) / sheet.line), text)):
            sheet.put(line, x0, y0 + (i + 0.5) * sheet.line, "muted")


def stretched(sizes: Sequence[float], pixels: float, least: float) -> np.ndarray:
    """float64 [sizes + 1]: where each begins and ends along `pixels`, in proportion, but none narrower than `least` (or
    nine tenths of an equal share, where there is no room for that): the last tile of a chunk may hold a single query."""
    wanted = np.array(sizes, np.float64)
    least = min(least, 0.9 * pixels / len(wanted))
    got = np.full(len(wanted), least)
    free = np.ones(len(wanted), bool)
    while free.any():
        share = wanted * (pixels - got[~free].sum()) / wanted[free].sum()
        small = free & (share < least)
        if not small.any():
            got[free] = share[free]
            break
        free &= ~small
    return np.concatenate([[0.0], np.cumsum(got * pixels / got.sum())])


# ---- what can be asked for ----


def offers(trace: Trace, state: ViewState, step: int, it: TileTrace | None) -> tuple[Offer, ...]:
    t = words(state.language, WORDS)
    found = []
    if it is None or it.step_id != step:
        layer = it.layer if it is not None else state.layer
        found.append(_offer("step", t, [(t("flash_tiles.offer.step"), a_step(trace, step, layer, state.selection))]))
    if it is not None:
        found += _again(trace, it, t)
    found.append(_offer("next", t, [(t("flash_tiles.offer.next"), {"layer": state.layer if it is None else it.layer})]))
    return tuple(found)


def _again(trace: Trace, it: TileTrace, t: Words) -> list[Offer]:
    """The same launch with one thing changed."""
    same, is_decode = same_launch(it), it.kernel == "flash_decode"
    heights = [it.block_m] if is_decode else [m for m in SIZES if m >= it.group]
    sizes = [(f"{m} × {n}", {"block_n": n} if is_decode else {"block_m": m, "block_n": n}) for m in heights for n in SIZES]
    sizes = [(text, change) for text, change in sizes if text != f"{it.block_m} × {it.block_n}"]
    model = trace.meta.get("model")
    count = model.get("layers") if isinstance(model, Mapping) else None
    layers = range(count) if isinstance(count, int) and 0 < count <= 256 else ()
    names = [(s, cut(visible(trace.name(s)), 12)) for s, _, _ in it.sequences if s != it.row_seq_id][:60]
    choices: dict[str, list[tuple[str, dict[str, object]]]] = {
        "tiles": sizes,
        "layer": [(t("flash_tiles.offer.layer.one", n=n), {"layer": n}) for n in layers if n != it.layer],
        "head": [(t("flash_tiles.offer.head.one", n=n), {"head": n}) for n in range(it.heads) if n != it.row_head][:256],
        "sequence": list({name: {"seq_id": s} for s, name in names}.items()),
        "splits": [(t("flash_tiles.offer.splits.one", n=n), {"splits": n}) for n in SPLITS if n != it.num_splits] if is_decode else [],
    }
    made = [_offer(name, t, [(text, _with(same, change)) for text, change in each]) for name, each in choices.items() if each]
    return [
        replace(o, label=t("flash_tiles.offer.follow", who=o.choices[0][0])) if o.id == "sequence" and len(o.choices) == 1 else o
        for o in made
    ]


def _with(same: Mapping[str, object], change: Mapping[str, object]) -> dict[str, object]:
    """Another sequence has other positions: its last row is followed."""
    return {key: value for key, value in same.items() if key != "position" or "seq_id" not in change} | dict(change)


def _offer(name: str, t: Words, choices: list[tuple[str, dict[str, object]]]) -> Offer:
    return Offer(name, t(f"flash_tiles.offer.{name}"), "tiles", tuple(choices))


def summary(trace: Trace, state: ViewState) -> str:
    step, t = trace.clamp(state.step), words(state.language, WORDS)
    it = shown(trace, step, state.selection)
    if it is None:
        return t("flash_tiles.damaged" if of_kind(trace, TileTrace) else "flash_tiles.empty", step=step)
    at = chosen(it, state.selection)
    parts = [
        elsewhere(it, step, t),
        t("flash_tiles.summary", who=visible(trace.name(at.matrix.seq_id)), layer=it.layer, head=at.matrix.kv_head),
    ]
    parts += [counts(at.matrix, t), says(at, online(at), t)[0]]
    if (end := end_of(it)) is not None:
        parts.append(t("flash_tiles.summary.end", difference=number(end)))
    return " ".join(part for part in parts if part)


# ---- asks ----


def _ask(answer: Callable[[Chosen, Online | None], str]) -> Callable[[Trace, ViewState], str]:
    def found(trace: Trace, state: ViewState) -> str:
        it = shown(trace, trace.clamp(state.step), state.selection)
        if it is None:
            return ""
        at = chosen(it, state.selection)
        return answer(at, online(at))

    return found


def _factor(now: Online | None) -> str:
    return "" if now is None or now.before is None or not now.sees else number(now.rescale)


WORDS = {
    "flash_tiles.empty": (
        "No kernel wrote down its tiles yet. Press “Trace this step's tiles”: the attention kernel then runs once more over "
        "step {step:,} and notes every tile that it visits."
    ),
    "flash_tiles.damaged": (
        "The tiles of this recording are damaged. Press “Trace this step's tiles” on the live engine to get those of step {step:,}."
    ),
    "flash_tiles.interpreter": "{device}: no SM and no time",
    "flash_tiles.difference": "{device}; log-probabilities differ by {difference} at most",
    "flash_tiles.plain": "plain softmax of the row, fp64 on the host",
    "flash_tiles.other_step": "These are tiles of step {step:,}; step {here:,} has not been traced.",
    "flash_tiles.other_step.short": "Tiles of step {step:,}",
    "flash_tiles.counts": (
        "The kernel visits {n:,} tile of {of:,} and skips {skipped:,} ({share}).",
        "The kernel visits {n:,} tiles of {of:,} and skips {skipped:,} ({share}).",
    ),
    "flash_tiles.counts.short": "{n:,} visited, {skipped:,} skipped",
    "flash_tiles.whose": (
        "{who}: {n:,} query × {keys:,} keys, layer {layer}, KV head {head} of {heads}; a tile is {rows:,} × {columns:,} of them",
        "{who}: {n:,} queries × {keys:,} keys, layer {layer}, KV head {head} of {heads}; a tile is {rows:,} × {columns:,} of them",
    ),
    "flash_tiles.whose.short": "{who}, layer {layer}, KV head {head}; tiles of {rows:,} × {columns:,}",
    "flash_tiles.whose.shorter": "{who}, layer {layer}, KV head {head}",
    "flash_tiles.whose.shortest": "{who}, layer {layer}",
    "flash_tiles.axis.clock": "→ in time order",
    "flash_tiles.axis.launch": "→ in launch order",
    "flash_tiles.axis.step": "→ one query block",
    "flash_tiles.mark.axis.time": "Show the order in which the device visited the tiles of all query blocks",
    "flash_tiles.mark.axis.step": "Show the tiles of one query block in its own order",
    "flash_tiles.edges": "queries {first:,}–{last:,} ↓, keys 1–{keys:,} →",
    "flash_tiles.edges.short": "queries ↓, {keys:,} keys →",
    "flash_tiles.edges.splits": "a row a split ({n:,}) ↓, keys 1–{keys:,} →",
    "flash_tiles.edges.shorter": "keys →",
    "flash_tiles.box.block": "boxed: tile {n:,} of {of:,} of queries {first:,}–{last:,}, keys {key0:,}–{key1:,}",
    "flash_tiles.box.query": "boxed: tile {n:,} of {of:,} of query {first:,}, keys {key0:,}–{key1:,}",
    "flash_tiles.box.split": "boxed: tile {n:,} of {of:,} of split {split:,}, keys {key0:,}–{key1:,}",
    "flash_tiles.box.time": "boxed: tile {n:,} of all {of:,}, keys {key0:,}–{key1:,}",
    "flash_tiles.box.short": "tile {n:,} of {of:,}, keys {key0:,}–{key1:,}",
    "flash_tiles.box.shorter": "tile {n:,} of {of:,}",
    "flash_tiles.mark": "Tile {n:,} of {of:,}: queries {first:,}–{last:,}, keys {key0:,}–{key1:,}",
    "flash_tiles.mark.split": "Tile {n:,} of {of:,} of split {split:,}: keys {key0:,}–{key1:,}",
    "flash_tiles.mark.full": "every query sees every key",
    "flash_tiles.mark.partly": "partly masked",
    "flash_tiles.mark.where": "SM {sm}, {ns:,} ns",
    "flash_tiles.memory": "on the chip (SRAM and registers): {size}",
    "flash_tiles.memory.each": "on the chip: {each}",
    "flash_tiles.memory.short": "on the chip: {size}",
    "flash_tiles.row": "Followed: {who}'s token {position:,}, query head {head}",
    "flash_tiles.row.short": "{who}'s token {position:,}, head {head}",
    "flash_tiles.scores": "its scores against keys {key0:,}–{key1:,}",
    "flash_tiles.scores.masked": "its scores against keys {key0:,}–{key1:,} ({n:,} of {of:,} seen)",
    "flash_tiles.scores.short": "scores of keys {key0:,}–{key1:,}",
    "flash_tiles.m": "max m: {before} → {after}",
    "flash_tiles.m.short": "m: {before} → {after}",
    "flash_tiles.l": "sum l: {before} → {after} (old sum × {factor})",
    "flash_tiles.l.short": "l: {before} → {after}",
    "flash_tiles.acc": ("acc: {n:,} number, −{most} to {most}", "acc: {n:,} numbers, −{most} to {most}"),
    "flash_tiles.acc.short": "acc, ±{most}",
    "flash_tiles.curve": "acc / l differs from plain softmax by {here}; at the end {end}",
    "flash_tiles.curve.short": "off plain softmax by {here}; at the end {end}",
    "flash_tiles.curve.shorter": "off plain softmax by {here}",
    "flash_tiles.merged": "splits so far, merged: off plain softmax by {here}; at the end {end}",
    "flash_tiles.merged.short": "merged, off plain softmax by {here}; at the end {end}",
    "flash_tiles.merged.shorter": "merged: off by {here}",
    "flash_tiles.kept_elsewhere": (
        "m, l and acc were kept for {who}'s token {position:,}, KV head {head}. Choose another request or head above to follow that one."
    ),
    "flash_tiles.kept_partly": "Scores and acc were kept for {who}'s token {position:,} only: click a tile of its row.",
    "flash_tiles.says.unknown": "The kernel kept m and l for another row: token {position:,}, head {head}.",
    "flash_tiles.says.unknown.short": "m and l were kept for token {position:,}, head {head}.",
    "flash_tiles.says.nothing": "The row sees no key of this tile: m, l and acc stay as they are.",
    "flash_tiles.says.first": "First keys: max {m}, and the sum of e^(score − max) is {l}. There is nothing to shrink yet.",
    "flash_tiles.says.first.short": "First keys: max {m}, sum {l}.",
    "flash_tiles.says.kept": "max stays {m}: the old sum {l0} is kept, {added} is added: {l}.",
    "flash_tiles.says.kept.short": "max stays {m}; sum {l0} + {added} = {l}.",
    "flash_tiles.says.grown": "max {m0} → {m}: the old sum shrinks by e^{by} = {factor}; {l0} × {factor} + {added} = {l}.",
    "flash_tiles.says.grown.short": "max {m0} → {m}: the old sum shrinks by e^{by} = {factor}.",
    "flash_tiles.legend.now": "visited so far",
    "flash_tiles.legend.other": "other visited tiles",
    "flash_tiles.legend.now.time": "visited up to the boxed tile",
    "flash_tiles.legend.later": "visited later",
    "flash_tiles.legend.masked": "empty: computed, then masked",
    "flash_tiles.legend.skipped": "skipped: never visited",
    "flash_tiles.offer.step": "Trace this step's tiles",
    "flash_tiles.offer.next": "Trace the next step",
    "flash_tiles.offer.tiles": "Tile sizes",
    "flash_tiles.offer.layer": "Layer",
    "flash_tiles.offer.layer.one": "layer {n}",
    "flash_tiles.offer.head": "Head",
    "flash_tiles.offer.head.one": "query head {n}",
    "flash_tiles.offer.sequence": "Request",
    "flash_tiles.offer.follow": "Follow {who}",
    "flash_tiles.offer.splits": "Splits",
    "flash_tiles.offer.splits.one": ("keys in {n} part", "keys in {n} parts"),
    "flash_tiles.summary": "The attention of {who} in layer {layer}, KV head {head}.",
    "flash_tiles.summary.end": "After the last tile it differs from plain softmax by {difference}.",
}


VIEW = View(
    name="flash_tiles",
    title="FlashAttention tiles",
    question="Which tiles does the kernel visit, and what does a row keep of each?",
    figure=figure,
    summary=summary,
    words=WORDS,
    asks=(
        Ask("How many tiles does the kernel visit for the request shown?", _ask(lambda at, now: f"{at.matrix.visited:,}")),
        Ask("How many tiles does it skip?", _ask(lambda at, now: f"{at.matrix.skipped:,}")),
        Ask("Which token's query row is followed (its number)?", _ask(lambda at, now: "" if now is None else f"{at.position + 1:,}")),
        Ask(
            "What is the row's running max after the boxed tile?",
            _ask(lambda at, now: "" if now is None or now.m is None else number(now.m)),
        ),
        Ask("By which factor does the old sum shrink in the boxed tile?", _ask(lambda at, now: _factor(now))),
    ),
    order=110,
)
