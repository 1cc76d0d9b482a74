"""Memory traffic: how many bytes does attention move between HBM and SRAM, written naively and as FlashAttention?

The shape is that of one TileTrace (viz/tiles.py says which). Flash is counted from its tiles: every visited tile
loads its keys and values, every program its Q-block once and writes its output once. These are bytes requested, L2 hits
included; what reaches HBM is not known here. Naive is a formula: it writes the scores (fp32) and P and reads them again.
Beside the areas: the time that so many bytes take at measured bandwidths and at the talk's, and both kernels' measured
times where a TrafficRun is there.

Rejected: bars of one width (18 times less is then a sliver in which Q, K, V and O are not seen), and counting naive's
re-reads (its formula is its best case; what its matmul loads again depends on the library).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from engine.artifacts import SKIPPED, TileTrace, TrafficRun, of_kind
from engine.trace import Trace
from viz.layout import Sheet, message, too_small, visible
from viz.measured import brief, ceilings, first_fit, fit_lines, positive, put_cells, put_lines, times
from viz.theme import data_size, rate
from viz.tiles import shown
from viz.view import Ask, Badge, Frame, Mark, Offer, Paint, Raster, View, ViewState
from viz.words.catalogue import Words, words

PARTS = ("q", "k", "v", "scores", "p", "o")  # as they follow each other in the formula
SIGNS = {"q": "Q", "k": "K", "v": "V", "p": "P"}  # those that are called alike in every language
PAINTS = {
    "q": Paint("request-other"),
    "k": Paint("accent"),
    "v": Paint("accent", alpha=0.45),
    "scores": Paint("waste", hatch="diagonal"),
    "p": Paint("waste", hatch="cross"),
    "o": Paint("cached"),
}
SIDES = ("naive", "flash")
TALK = (("sram", "A100 SRAM", 19_000.0), ("hbm", "A100 HBM", 1_500.0), ("dram", "CPU DRAM", 12.8))  # the talk's figures, GB/s
FORMULAS = {  # a part's, without words
    "naive.q": "{part}: {queries:,} × {heads:,} × {d:,} × {bytes} B = {size}",
    "naive.kv": "{part}: {keys:,} × {kv_heads:,} × {d:,} × {bytes} B = {size}",
    "naive.scores": "{part}: 2 × {heads:,} × {pairs:,} × {bytes} B = {size}",
    "naive.o": "{part}: {queries:,} × {heads:,} × {d:,} × {bytes} B = {size}",
    "flash.q": "{part}: {rows:,} × {d:,} × {bytes} B = {size}",
    "flash.kv": "{part}: {tile_keys:,} × {d:,} × {bytes} B = {size}",
    "flash.o": "{part}: {rows:,} × {d:,} × {bytes} B = {size}",
    "flash.o.split": "{part}: 2 × {rows:,} × ({d:,} + 2) × 4 B + {queries:,} × {heads:,} × {d:,} × {bytes} B = {size}",
}
MAX_SIDE = 520  # px of the larger area
NARROW, WIDE = 46, 100  # characters: below, the table stands under the areas; from here on the times may have their own column
BOTH_TABLES = 15.5  # lines that both tables need below each other


# ---- bytes ----


@dataclass(frozen=True)
class Traffic:
    """Bytes of both, by part; 0 where a part does not exist. `counts`: what the formulas multiply."""

    tiles: TileTrace
    run: TrafficRun | None
    parts: dict[str, dict[str, int]]
    counts: dict[str, int]

    def total(self, side: str) -> int:
        return sum(self.parts[side].values())

    @property
    def ratio(self) -> float:
        """How often Flash's bytes are in naive's."""
        return self.total("naive") / self.total("flash")

    def measured(self, side: str) -> float:
        """µs, 0.0 where it was not timed."""
        if self.run is None:
            return 0.0
        return positive(self.run.naive_us if side == "naive" else self.run.flash_us)


def traffic(trace: Trace, state: ViewState) -> Traffic | None:
    """Of the TileTrace that the other views of tiles show; None without one whose parts belong together."""
    it = shown(trace, trace.clamp(state.step), state.selection)
    if it is None or not all(n > 0 and k > 0 for _, n, k in it.sequences):
        return None
    runs = (r for r in of_kind(trace, TrafficRun) if (r.step_id, r.layer, r.kernel) == (it.step_id, it.layer, it.kernel))
    counts = _counts(it)
    return Traffic(it, next(reversed(tuple(runs)), None), _parts(it, counts), counts)


def _counts(it: TileTrace) -> dict[str, int]:
    """What is multiplied: tiles and their keys, programs and their query rows; tokens and pairs of the sequences."""
    tiles = it.tiles[it.tiles["kind"] != SKIPPED]
    spans = np.maximum(tiles["k_stop"].astype(np.int64) - tiles["k_start"], 0)
    _, first = np.unique(tiles["program"], return_index=True)
    rows = int(tiles["num_q"][first].astype(np.int64).sum()) * it.group
    queries, keys = (sum(int(s[i]) for s in it.sequences) for i in (1, 2))
    pairs = sum(int(n) * int(k) for _, n, k in it.sequences)
    return {
        "tiles": len(tiles), "tile_keys": int(spans.sum()), "programs": len(first), "rows": rows, "queries": queries, "keys": keys,
        "pairs": pairs, "heads": it.heads, "kv_heads": it.kv_heads, "d": it.head_dim, "bytes": it.itemsize, "splits": it.num_splits,
    }  # fmt: skip


def _parts(it: TileTrace, n: dict[str, int]) -> dict[str, dict[str, int]]:
    row, d = it.head_dim * it.itemsize, it.head_dim
    tokens, cache, cells = n["queries"] * it.heads * row, n["keys"] * it.kv_heads * row, 2 * it.heads * n["pairs"]
    loads = n["tile_keys"] * row
    out = n["rows"] * row
    if it.num_splits > 1:  # fp32 parts of the output with m and l, written and read by the merge, which writes the output itself
        out = 2 * n["rows"] * (d + 2) * 4 + tokens
    flash = {"q": n["rows"] * row, "k": loads, "v": loads, "scores": 0, "p": 0, "o": out}
    return {"naive": {"q": tokens, "k": cache, "v": cache, "scores": cells * 4, "p": cells * it.itemsize, "o": tokens}, "flash": flash}


# ---- bandwidths ----


@dataclass(frozen=True, slots=True)
class Speed:
    """A bandwidth: its name, GB/s, and whether it was measured on this device."""

    id: str
    name: str
    gbps: float
    measured: bool


def speeds(trace: Trace, it: TileTrace, t: Words) -> tuple[Speed, ...]:
    """This device's copy bandwidth and its fastest measured level, then the talk's three."""
    top, found = ceilings(trace, it.device), []
    if top is not None:
        found.append(Speed("copy", t("memory_traffic.speed.copy"), top.copy_gbps, True))
        levels = [level for level in top.levels if len(level) == 3 and positive(level[2]) > top.copy_gbps]
        if levels:
            name, _, gbps = max(levels, key=lambda level: level[2])
            found.append(Speed("level", visible(str(name)).partition(",")[0][:8], gbps, True))
    return (*found, *(Speed(*speed, False) for speed in TALK))


def takes(num_bytes: int, gbps: float) -> float:
    """µs."""
    return num_bytes / (gbps * 1e3)


def figure(trace: Trace, state: ViewState) -> Frame:
    it = traffic(trace, state)
    if it is None or too_small(state):
        frame = message(summary(trace, state), state, Badge("state"))
        return replace(frame, offers=_offers(trace, state))
    return _Picture(trace, state, it).frame()


class _Picture:
    """A sentence; two areas to scale; beside them the parts in numbers and the times; below, the chosen part's formula."""

    def __init__(self, trace: Trace, state: ViewState, it: Traffic) -> None:
        self.trace, self.state, self.it = trace, state, it
        self.t, self.sheet = words(state.language, WORDS), Sheet(state)
        self.side, self.part = self._chosen()
        sheet = self.sheet
        room, tall = sheet.width - 24, sheet.height / sheet.line
        self.head = fit_lines(sheet, room, 2 if tall >= 12 else 1, *sentences(it, self.t))
        self.foot = fit_lines(sheet, room, 2 if tall >= 15 else 1, *self._explained())
        self.top = 8 + len(self.head) * sheet.line + 6
        self.bottom = sheet.height - 6 - len(self.foot) * sheet.line - 6
        self.columns = sheet.width / sheet.advance
        self.marks: list[Mark] = []
        self.rasters: list[Raster] = []

    def frame(self) -> Frame:
        sheet, t = self.sheet, self.t
        put_lines(sheet, self.head, 12, 8, weight=700)
        put_lines(sheet, self.foot, 12, self.bottom + 6)
        if self.columns < NARROW:
            rows = max(min(len(PARTS) + 2, int((self.bottom - self.top) / sheet.line) - 5), 0)
            middle = self.bottom - rows * sheet.line - (6 if rows else 0)
            self._areas(12, sheet.width - 12, self.top, middle)
            self._table(12, sheet.width - 12, middle + 6, self.bottom)
        elif self.columns < WIDE or (self.bottom - self.top) / sheet.line >= BOTH_TABLES:
            left = sheet.width - 12 - min((45 if self.columns > 74 else 29) * sheet.advance, sheet.width * 0.62)
            self._areas(12, left - 24, self.top, self.bottom)
            end = self._table(left, sheet.width - 12, self.top, self.bottom)
            self._times(left, sheet.width - 12, end + sheet.line * 0.4, self.bottom)
        else:
            times_at = sheet.width - 12 - 45 * sheet.advance
            left = times_at - 33 * sheet.advance
            self._areas(12, left - 24, self.top, self.bottom)
            self._table(left, times_at - 4 * sheet.advance, self.top, self.bottom)
            self._times(times_at, sheet.width - 12, self.top, self.bottom)
        self._band_names()
        legend = tuple(Paint(p.color, part_name(t, k), p.hatch, p.alpha) for k, p in PAINTS.items())
        return Frame(
            badges=_badges(self.trace, self.it, t), axes=sheet.axes(), rasters=tuple(self.rasters), labels=tuple(sheet.labels),
            marks=tuple(self.marks), legend=legend, offers=_offers(self.trace, self.state),
        )  # fmt: skip

    def _chosen(self) -> tuple[str, str]:
        """The part that is explained: the selected one, else naive's scores."""
        kind, _, rest = (self.state.selection or "").partition(":")
        side, _, part = rest.partition(":")
        if kind in ("part", "area") and side in SIDES and part in PARTS and self.it.parts[side][part]:
            return side, part
        return "naive", "scores"

    def _explained(self) -> list[str]:
        speed = self._speed()
        if speed is not None:
            numbers = {f"{s}_bytes": data_size(self.it.total(s)) for s in SIDES} | {
                s: brief(takes(self.it.total(s), speed.gbps)) for s in SIDES
            }
            numbers |= {"name": speed.name, "gbps": rate(speed.gbps * 1e9, "B/s")}
            short = "{naive_bytes}, {flash_bytes} ÷ {gbps} = {naive}, {flash}".format(**numbers)
            return [self.t("memory_traffic.explain.speed", **numbers), short]
        return [explain(self.it, self.side, self.part, self.t, short) for short in (False, True)]

    def _speed(self) -> Speed | None:
        kind, _, name = (self.state.selection or "").partition(":")
        return next((s for s in speeds(self.trace, self.it.tiles, self.t) if kind == "speed" and s.id == name), None)

    # ---- the areas ----

    def _areas(self, x0: float, x1: float, top: float, bottom: float) -> None:
        """Squares with one scale: as many bytes a pixel in both. Their names stand over them, side by side."""
        sheet, gap = self.sheet, 16
        names = {s: self._name(s) for s in SIDES}
        high, wide = bottom - top - sheet.line - 6, x1 - x0
        roots = {s: sqrt(self.it.total(s)) for s in SIDES}
        small, large = sorted(roots.values())
        least = max(small / large, 1e-9)
        side = min(high, (wide - gap) / (1 + least), MAX_SIDE)
        widths = {s: max(side * roots[s] / large, 3.0) for s in SIDES}
        if side < 1.5 * sheet.font:
            return
        title = f"{names['naive']}: {data_size(self.it.total('naive'))}"
        first = max(widths["naive"], min(sheet.span(title), wide - gap - widths["flash"], wide / 2 - gap / 2))
        for name, left, room in (("naive", x0, first), ("flash", x0 + first + gap, wide - first - gap)):
            size = min(widths[name], room)
            title = f"{names[name]}: {data_size(self.it.total(name))}"
            sheet.put(first_fit(sheet, room, title, names[name]), left, top + sheet.line / 2, room=room, weight=700)
            self._area(name, left, left + size, top + sheet.line + 4, top + sheet.line + 4 + widths[name])

    def _name(self, side: str) -> str:
        return side_name(self.t, side)

    def _area(self, side: str, x0: float, x1: float, y0: float, y1: float) -> None:
        """Its parts as bands of heights in proportion, in the formula's order."""
        total, y = self.it.total(side), y0
        for part in PARTS:
            size = self.it.parts[side][part]
            high = (y1 - y0) * size / total
            if high <= 0:
                continue
            end = min(y + high, self.sheet.height)
            self.rasters.append(Raster(f"{side} {part}", np.zeros((1, 1), np.uint8), x0, x1, y, end, (PAINTS[part],)))
            if high >= 8 and x1 - x0 >= 12:
                outline = "accent" if (side, part) == (self.side, self.part) and self._speed() is None else None
                self.marks.append(Mark(f"area:{side}:{part}", x0, x1, y, end, self._said(side, part), outline))
            y += high

    def _band_names(self) -> None:
        """Inside the bands that are high enough; last, since the table says them too."""
        sheet = self.sheet
        for band in self.rasters:
            part = band.name.split()[1]
            color = "ink" if part == "v" else f"on-{PAINTS[part].color}"
            if band.y1 - band.y0 >= 1.4 * sheet.font:
                text = part_name(self.t, part)
                if sheet.span(text) <= band.x1 - band.x0 - 4:
                    sheet.put(text, (band.x0 + band.x1) / 2, (band.y0 + band.y1) / 2, color, anchor="center")

    def _said(self, side: str, part: str) -> str:
        return f"{self._name(side)}, {part_name(self.t, part)}: {data_size(self.it.parts[side][part])}"

    # ---- the numbers ----

    def _table(self, x0: float, x1: float, top: float, bottom: float) -> float:
        """A line a part, naive and Flash; as many as there is room for. Where it ends."""
        sheet, t, widths = self.sheet, self.t, (10, 11)
        room = int((bottom - top) / sheet.line) - 1
        if room < 1:
            return top
        right = min(x1, x0 + 45 * sheet.advance)
        needed = sorted(PARTS, key=lambda p: ("scores", "p", "k", "v", "q", "o").index(p))[: max(room - 1, 0)]
        rows = [p for p in PARTS if p in needed]
        y = top + sheet.line / 2
        sheet.put(t("memory_traffic.table"), x0, y, "muted", room=right - x0 - 21 * sheet.advance)
        put_cells(sheet, [self._name(s) for s in SIDES], widths, right, y, "muted") if t.language == "en" else self._heads(widths, right, y)
        for part in rows:
            y += sheet.line
            sheet.put(part_name(t, part), x0, y, room=right - x0 - 21 * sheet.advance)
            put_cells(sheet, [data_size(self.it.parts[s][part]) if self.it.parts[s][part] else "—" for s in SIDES], widths, right, y)
            self._cells(part, widths, right, y)
        y += sheet.line
        sheet.put(t("memory_traffic.total"), x0, y, weight=700, room=right - x0 - 21 * sheet.advance)
        put_cells(sheet, [data_size(self.it.total(s)) for s in SIDES], widths, right, y, weight=700)
        return y + sheet.line / 2

    def _heads(self, widths: tuple[int, ...], right: float, y: float) -> None:
        """Column names of wide characters do not line up in one text."""
        for i, side in enumerate(SIDES):
            at = right - sum(widths[i + 1 :]) * self.sheet.advance
            self.sheet.put(self._name(side), at, y, "muted", anchor="right", room=widths[i] * self.sheet.advance)

    def _cells(self, part: str, widths: tuple[int, ...], right: float, y: float) -> None:
        sheet, edge = self.sheet, right - sum(widths) * self.sheet.advance
        for side, width in zip(SIDES, widths):
            x0, x1 = edge + 4, edge + width * sheet.advance
            edge = x1
            if self.it.parts[side][part]:
                outline = "accent" if (side, part) == (self.side, self.part) and self._speed() is None else None
                box = (x0, min(x1 + 3, sheet.width), y - sheet.line / 2 + 1, y + sheet.line / 2 - 1)
                self.marks.append(Mark(f"part:{side}:{part}", *box, self._said(side, part), outline, explain(self.it, side, part, self.t)))

    def _times(self, x0: float, x1: float, top: float, bottom: float) -> None:
        """How long these bytes take at each bandwidth, and how long both kernels took."""
        sheet, t, it, widths = self.sheet, self.t, self.it, (9, 9)
        rows = [(s.id, s.name, s.gbps) for s in speeds(self.trace, it.tiles, t)]
        both = all(it.measured(s) for s in SIDES)
        room = int((bottom - top) / sheet.line + 0.1) - 1 - both
        if room < 1:
            return
        keep = [name for name in ("copy", "hbm", "dram", "sram", "level") if name in {r[0] for r in rows}][:room]
        y, right, name_room = top + sheet.line / 2, x1, x1 - x0 - 18.5 * sheet.advance
        sheet.put(t("memory_traffic.times"), x0, y, "muted", room=name_room)
        put_cells(sheet, [self._name(s) for s in SIDES], widths, right, y, "muted") if t.language == "en" else self._heads(widths, right, y)
        rows = [row for row in rows if row[0] in keep]
        full = {ident: f"{name} {rate(gbps * 1e9, 'B/s')}" for ident, name, gbps in rows}
        whose = {ident: t(f"memory_traffic.{'here' if ident in ('copy', 'level') else 'talk'}", speed=full[ident]) for ident in full}
        forms = next((f for f in (whose, full) if all(sheet.span(text) <= name_room for text in f.values())), {r[0]: r[1] for r in rows})
        for ident, _, gbps in rows:
            y += sheet.line
            sheet.put(forms[ident], x0, y, room=name_room)
            spent = {s: brief(takes(it.total(s), gbps)) for s in SIDES}
            put_cells(sheet, [spent[s] for s in SIDES], widths, right, y)
            said = t("memory_traffic.mark.speed", name=full[ident], **spent)
            outline = "accent" if (chosen := self._speed()) is not None and chosen.id == ident else None
            self.marks.append(Mark(f"speed:{ident}", x0, x1, y - sheet.line / 2 + 1, y + sheet.line / 2 - 1, said, outline))
        if both:
            y += sheet.line
            sheet.put(t("memory_traffic.measured"), x0, y, weight=700, room=name_room)
            put_cells(sheet, [brief(it.measured(s)) for s in SIDES], widths, right, y, weight=700)


# ---- words ----


def part_name(t: Words, part: str) -> str:
    return SIGNS.get(part) or t(f"memory_traffic.part.{part}")


def side_name(t: Words, side: str) -> str:
    return "Flash" if side == "flash" else t("memory_traffic.naive")


def _compared(it: Traffic, t: Words) -> str:
    """ "18× less", "1.1× more", "as much"."""
    ratio = it.ratio
    if 0.995 <= ratio < 1.005:
        return t("memory_traffic.same")
    return t("memory_traffic.less", times=times(ratio)) if ratio > 1 else t("memory_traffic.more", times=times(1 / ratio))


def sentences(it: Traffic, t: Words) -> list[str]:
    """The comparison in words, the longest form first."""
    kept = it.parts["naive"]["scores"] + it.parts["naive"]["p"]
    said = {
        "flash": data_size(it.total("flash")),
        "naive": data_size(it.total("naive")),
        "compared": _compared(it, t),
        "scores": data_size(kept),
    }
    said |= {"queries": it.counts["queries"], "keys": it.counts["keys"], "step": it.tiles.step_id, "layer": it.tiles.layer}
    return [t(f"memory_traffic.says{form}", **said) for form in ("", ".short", ".shorter", ".shortest")]


def explain(it: Traffic, side: str, part: str, t: Words, short: bool = False) -> str:
    """A part's formula with its numbers; short: without words."""
    n, size = it.counts, it.parts[side][part]
    key = {"k": "kv", "v": "kv", "scores": "scores", "p": "scores"}.get(part, "q" if part == "q" else "o")
    key += ".split" if (side, part) == ("flash", "o") and n["splits"] > 1 else ""
    fields = {"part": part_name(t, part), "side": side_name(t, side), "size": data_size(size), **n}
    fields |= {"bytes": 4} if part == "scores" else {}
    return FORMULAS[f"{side}.{key}"].format(**fields) if short else t(f"memory_traffic.explain.{side}.{key}", **fields)


def _badges(trace: Trace, it: Traffic, t: Words) -> tuple[Badge, ...]:
    tiles = it.tiles
    fields = {"n": it.counts["tiles"], "step": tiles.step_id, "layer": tiles.layer, "difference": f"{positive(tiles.difference):.2g}"}
    counted = "recomputed" if tiles.provenance == "recomputed" else "state"
    found = [Badge(counted, t(f"memory_traffic.badge.{counted}", **fields)), Badge("computed", t("memory_traffic.badge.naive"))]
    if ceilings(trace, tiles.device) is not None or it.measured("flash"):
        found.append(Badge("measured", visible(tiles.device)[:60]))
    return tuple(found)


def _offers(trace: Trace, state: ViewState) -> tuple[Offer, ...]:
    t, step = words(state.language, WORDS), trace.clamp(state.step)
    now = (t("memory_traffic.offer.tiles.now", step=step), {"step": step, "layer": state.layer})
    measure = t("memory_traffic.offer.ceilings")
    return Offer("tiles", t("memory_traffic.offer.tiles"), "tiles", (now,)), Offer("ceilings", measure, "ceilings", ((measure, {}),))


def summary(trace: Trace, state: ViewState) -> str:
    t, it = words(state.language, WORDS), traffic(trace, state)
    if it is None:
        return t("memory_traffic.broken" if of_kind(trace, TileTrace) else "memory_traffic.empty")
    said = sentences(it, t)[0]
    if all(it.measured(s) for s in SIDES):
        said += t("memory_traffic.says.measured", flash=brief(it.measured("flash")), naive=brief(it.measured("naive")))
    return said


# ---- asks ----


def _ask(answer) -> object:
    """An answer from the bytes; "" where there are none."""

    def found(trace: Trace, state: ViewState) -> str:
        it = traffic(trace, state)
        return "" if it is None else answer(it)

    return found


WORDS = {
    "memory_traffic.empty": (
        "How many bytes attention moves is counted from its tiles, and none were traced yet. Press “Trace the tiles”: "
        "the attention of this step runs once more and writes down every tile that it visits."
    ),
    "memory_traffic.broken": "The tile trace of this recording has no sizes that bytes could be counted from.",
    "memory_traffic.naive": "naive",
    "memory_traffic.part.scores": "scores",
    "memory_traffic.part.o": "output",
    "memory_traffic.table": "bytes",
    "memory_traffic.total": "in all",
    "memory_traffic.times": "time they take at",
    "memory_traffic.measured": "kernels, measured",
    "memory_traffic.here": "{speed} (measured)",
    "memory_traffic.talk": "{speed} (talk)",
    "memory_traffic.speed.copy": "copy",
    "memory_traffic.same": "as much",
    "memory_traffic.less": "{times} less",
    "memory_traffic.more": "{times} more",
    "memory_traffic.says": (
        "Flash asks for {flash} where naive moves {naive}: {compared}. It keeps scores and P in SRAM; naive writes and reads {scores} of "
        "them. Step {step:,}, layer {layer:,}: {queries:,} queries, {keys:,} keys."
    ),
    "memory_traffic.says.short": "Flash asks for {flash} where naive moves {naive}: {compared}. Scores and P ({scores}) stay in SRAM.",
    "memory_traffic.says.shorter": "Flash asks for {flash} where naive moves {naive}: {compared}.",
    "memory_traffic.says.shortest": "{flash}, naive {naive}: {compared}",
    "memory_traffic.says.measured": " Measured: {flash} and {naive}.",
    "memory_traffic.explain.naive.q": "{side}, {part}: {queries:,} queries × {heads:,} heads × {d:,} × {bytes} B, read once = {size}",
    "memory_traffic.explain.naive.kv": "{side}, {part}: {keys:,} keys × {kv_heads:,} key heads × {d:,} × {bytes} B, read once = {size}",
    "memory_traffic.explain.naive.scores": (
        "{side}, {part}: {heads:,} heads × {pairs:,} pairs of query and key × {bytes} B, written and read = {size}"
    ),
    "memory_traffic.explain.naive.o": "{side}, {part}: {queries:,} queries × {heads:,} heads × {d:,} × {bytes} B, written once = {size}",
    "memory_traffic.explain.flash.q": "{side}, {part}: {programs:,} programs load {rows:,} query rows once, × {d:,} × {bytes} B = {size}",
    "memory_traffic.explain.flash.kv": (
        "{side}, {part}: {tiles:,} tiles ask for {tile_keys:,} keys, × {d:,} × {bytes} B = {size}, L2 hits included"
    ),
    "memory_traffic.explain.flash.o": "{side}, {part}: {programs:,} programs write {rows:,} rows once, × {d:,} × {bytes} B = {size}",
    "memory_traffic.explain.flash.o.split": (
        "{side}, {part}: {splits:,} splits write {rows:,} rows × ({d:,} + 2) × 4 B, the merge reads them and writes "
        "{queries:,} queries × {heads:,} heads × {d:,} × {bytes} B = {size}"
    ),
    "memory_traffic.explain.speed": (
        "{name}: {naive_bytes} ÷ {gbps} = {naive} for naive, {flash_bytes} ÷ {gbps} = {flash} for Flash (computed)"
    ),
    "memory_traffic.mark.speed": "{name}: naive {naive}, Flash {flash}",
    "memory_traffic.badge.state": (
        "Flash: bytes requested, L2 hits included, counted from {n:,} tile (step {step:,}, layer {layer:,})",
        "Flash: bytes requested, L2 hits included, counted from {n:,} tiles (step {step:,}, layer {layer:,})",
    ),
    "memory_traffic.badge.recomputed": (
        "Flash: bytes requested, L2 hits included, from {n:,} tile of a second pass (step {step:,}, layer {layer:,}, off by {difference})",
        "Flash: bytes requested, L2 hits included, from {n:,} tiles of a second pass (step {step:,}, layer {layer:,}, off by {difference})",
    ),
    "memory_traffic.badge.naive": "naive: Q, K, V read once; scores (fp32) and P written, read; output written once",
    "memory_traffic.offer.tiles": "Trace the tiles",
    "memory_traffic.offer.tiles.now": "of step {step:,}",
    "memory_traffic.offer.ceilings": "Measure the bandwidths",
}

VIEW = View(
    name="memory_traffic",
    title="Memory traffic",
    question="How many bytes does attention move between HBM and SRAM, naively and as FlashAttention?",
    figure=figure,
    summary=summary,
    words=WORDS,
    asks=(
        Ask("How many bytes does Flash ask for in all?", _ask(lambda it: data_size(it.total("flash")))),
        Ask("How many bytes does naive attention move in all?", _ask(lambda it: data_size(it.total("naive")))),
        Ask("How many bytes of scores does naive attention write and read?", _ask(lambda it: data_size(it.parts["naive"]["scores"]))),
        Ask("How many bytes of K does Flash ask for?", _ask(lambda it: data_size(it.parts["flash"]["k"]))),
        Ask("How long would naive's bytes take at an A100's HBM bandwidth?", _ask(lambda it: brief(takes(it.total("naive"), 1500)))),
    ),
    order=82,
)
