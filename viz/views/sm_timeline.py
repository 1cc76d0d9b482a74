"""SM timeline: which tile ran on which streaming multiprocessor (SM) of the GPU, and when?

Rows are SMs, x is the device's own clock since the kernel's first tile, a bar is a tile in its request's colour. Where a
decode kernel was traced with and without splitting the keys, both stand below each other on one axis. Everything is read
from TileTraces (the traced variant of the kernel, whose clock reads cost some of the time that they show). The interpreter
on a CPU has no SM and no time: then the programs stand in launch order, and nothing else is drawn.

Rejected: the launch's time split evenly among tiles where no clock was read (a picture of something that nobody measured).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from engine.artifacts import PARTLY, TileTrace, of_kind
from engine.trace import Trace
from viz.layout import Sheet, message, too_small, visible
from viz.measured import brief, first_fit, fit_lines
from viz.select import identity
from viz.theme import NUM_REQUEST_COLORS, percent, request_color
from viz.tiles import a_step, has_clock, same_launch, shown, tile_traces
from viz.view import Ask, Badge, Frame, Mark, Offer, Paint, Raster, Series, View, ViewState
from viz.words.catalogue import Words, cut, words

_HUES = [request_color(i) for i in range(NUM_REQUEST_COLORS)] + [request_color(None)]
_PAINTS = (*(p for hue in _HUES for p in (Paint(hue), Paint(hue, hatch="dots", alpha=0.5))), Paint("free", hatch="diagonal"))
_IDLE, _CLEAR = len(_PAINTS) - 1, 255
SEPARATED = 5  # px of a tile, from which on it is drawn apart from the next
MOST_PROGRAMS = 120  # marks of single programs; of more, one mark an SM
MOST_WAVES = 6
SPLITS = (1, 2, 4, 8, 16)


def figure(trace: Trace, state: ViewState) -> Frame:
    step, t = trace.clamp(state.step), words(state.language, WORDS)
    found = launches(trace, step, state.selection)
    if not found or too_small(state):
        frame = message(summary(trace, state), state, _badge(found[0].it, t) if found else Badge("state"))
    else:
        frame = _Picture(trace, state, step, found).frame()
    return replace(frame, offers=offers(trace, state, step, found))


# ---- what was counted ----


@dataclass(frozen=True)
class Launch:
    """One launch in arrays. Times in ns since its first tile. `num_sms`: those up to the highest that any launch on this
    device is known to have used; how many the device has is not in the trace. 0 without a clock."""

    it: TileTrace
    num_sms: int

    @cached_property
    def first_of(self) -> np.ndarray:
        """int64 [programs]: the first of each program's tiles, which lie together."""
        return np.flatnonzero(np.diff(self.it.tiles["program"], prepend=-1))

    @property
    def programs(self) -> int:
        return len(self.first_of)

    @cached_property
    def is_timed(self) -> bool:
        return has_clock(self.it)

    @cached_property
    def start(self) -> np.ndarray:
        return self.it.tiles["start_ns"] - int(self.it.tiles["start_ns"].min())

    @cached_property
    def stop(self) -> np.ndarray:
        return self.it.tiles["stop_ns"] - int(self.it.tiles["start_ns"].min())

    @property
    def end(self) -> int:
        return max(int(self.stop.max()), 1)

    @cached_property
    def begins(self) -> np.ndarray:
        return np.minimum.reduceat(self.start, self.first_of)

    @cached_property
    def ends(self) -> np.ndarray:
        return np.maximum.reduceat(self.stop, self.first_of)

    @cached_property
    def sm(self) -> np.ndarray:
        """Of each program."""
        return self.it.tiles["sm"][self.first_of].astype(np.int64)

    @cached_property
    def places(self) -> np.ndarray:
        """int64 [programs]: which of the programs that an SM holds at a time each of them is."""
        place = np.zeros(self.programs, np.int64)
        free: dict[int, list[int]] = {}
        for p in np.argsort(self.begins, kind="stable").tolist():
            until = free.setdefault(int(self.sm[p]), [])
            at = next((k for k, end in enumerate(until) if end <= self.begins[p]), len(until))
            until[at : at + 1] = [int(self.ends[p])]
            place[p] = at
        return place

    @property
    def residents(self) -> int:
        return int(self.places.max()) + 1

    @property
    def waves(self) -> float:
        return self.programs / (self.num_sms * self.residents)

    @cached_property
    def last(self) -> np.ndarray:
        """float64 [SMs]: when each ended its last tile; NaN for one that ran nothing."""
        found = np.full(self.num_sms, np.nan)
        for sm in np.unique(self.sm).tolist():
            found[sm] = self.ends[self.sm == sm].max()
        return found

    @property
    def tail_share(self) -> float:
        """Of all SM time: what lies behind each SM's last tile."""
        return float(np.nansum(self.end - self.last)) / (self.end * self.num_sms)

    @cached_property
    def busy_share(self) -> float:
        """Of all SM time: what some program lived through."""
        return sum(_covered(self.begins[self.sm == sm], self.ends[self.sm == sm]) for sm in np.unique(self.sm)) / (self.end * self.num_sms)

    @cached_property
    def tiles_of(self) -> dict[int, int]:
        """seq_id → its tiles, in the batch's order."""
        known, counts = np.unique(self.it.tiles["seq_id"], return_counts=True)
        got = dict(zip(known.tolist(), counts.tolist()))
        return {s: got[s] for s, _, _ in self.it.sequences if s in got}


def _covered(begins: np.ndarray, ends: np.ndarray) -> int:
    """Length of a union of intervals."""
    order = np.argsort(begins)
    total, until = 0, -1
    for begin, end in zip(begins[order].tolist(), ends[order].tolist()):
        total += max(end - max(begin, until), 0)
        until = max(until, end)
    return total


def launches(trace: Trace, step: int, selection: str | None = None) -> tuple[Launch, ...]:
    """The launch to show; of a decode kernel also the newest of the same step and layer that splits the keys where this
    one does not, or the other way round. Without splits first."""
    it = shown(trace, step, selection)
    if it is None:
        return ()
    like = [o for o in tile_traces(trace) if _launched(o) == _launched(it)]
    other = next((o for o in reversed(like) if (o.num_splits > 1) != (it.num_splits > 1)), None)
    sms = max((int(o.tiles["sm"].max()) + 1 for o in tile_traces(trace) if o.device == it.device), default=0)
    found = [Launch(it, sms), *([Launch(other, sms)] if other is not None else [])]
    return tuple(sorted(found, key=lambda launch: launch.it.num_splits))


def _launched(it: TileTrace) -> tuple[object, ...]:
    """What two launches have in common that differ in their splits."""
    return it.step_id, it.layer, it.kernel, it.device, it.sequences, has_clock(it)


# ---- sentences ----


def titles(of: Launch, t: Words) -> tuple[str, ...]:
    """What one picture shows, in forms that become shorter."""
    it = of.it
    kind = t("sm_timeline.split", n=it.num_splits) if it.num_splits > 1 else t(f"sm_timeline.{it.kernel}")
    fields = {"kind": kind[:1].upper() + kind[1:], "n": of.programs, "tiles": len(it.tiles)}
    if not of.is_timed:
        return tuple(t(f"sm_timeline.launch.order{form}", **fields) for form in ("", ".short"))
    fields |= {"sms": of.num_sms, "time": brief(of.end / 1000), "waves": f"{of.waves:.1f}", "tail": percent(of.tail_share, 1)}
    return tuple(t(f"sm_timeline.launch{form}", **fields) for form in ("", ".short", ".shorter", ".shortest"))


def sentences(found: tuple[Launch, ...], t: Words) -> tuple[str, ...]:
    one, other = found[0], found[-1]
    if not one.is_timed:
        return (t("sm_timeline.says.order"), t("sm_timeline.says.order.short"))
    if one is other:
        fields = {"busy": percent(one.busy_share, 1), "tail": percent(one.tail_share, 1), "n": one.residents}
        return (t("sm_timeline.says.one", **fields), t("sm_timeline.says.one.short", **fields))
    fields = {
        "n": other.it.num_splits, "before": brief(one.end / 1000), "after": brief(other.end / 1000),
        "programs": one.programs, "programs_after": other.programs,
        "busy": percent(one.busy_share, 1), "busy_after": percent(other.busy_share, 1),
    }  # fmt: skip
    return tuple(t(f"sm_timeline.says.both{form}", **fields) for form in ("", ".short"))


def _badge(it: TileTrace, t: Words) -> Badge:
    device = visible(it.device)[:60]
    if not has_clock(it):
        return Badge("recomputed" if it.provenance != "measured" else "measured", t("sm_timeline.interpreter", device=device))
    return Badge("measured", t("sm_timeline.clock" if it.provenance == "measured" else "sm_timeline.clock.again", device=device))


def elsewhere(found: tuple[Launch, ...], step: int, t: Words) -> str:
    at = found[0].it.step_id
    return "" if at == step else t("sm_timeline.other_step", step=at, here=step)


# ---- the picture ----


class _Picture:
    """One or two launches below each other on one axis: title, waves, SM × time; ticks; a sentence."""

    def __init__(self, trace: Trace, state: ViewState, step: int, found: tuple[Launch, ...]) -> None:
        self.trace, self.state, self.step, self.found = trace, state, step, found
        self.t, self.sheet = words(state.language, WORDS), Sheet(state)
        self.who = identity(trace, step, state.selection)
        self.timed = found[0].is_timed
        self.axes: dict[str, dict[str, object]] = {}
        self.rasters: list[Raster] = []
        self.series: list[Series] = []
        self.marks: list[Mark] = []
        names = [f"SM {launch.num_sms - 1}" if self.timed else self.t("sm_timeline.tiles", n=self._tallest()) for launch in found]
        self.left = max(self.sheet.span(name) for name in names) + 14
        self.right = self.sheet.width - 10
        self.end = max(launch.end for launch in found) if self.timed else max(launch.programs for launch in found)

    def _tallest(self) -> int:
        return max(int(np.diff(launch.first_of, append=len(launch.it.tiles)).max()) for launch in self.found)

    def frame(self) -> Frame:
        sheet = self.sheet
        self.axes |= sheet.axes()
        bottom = sheet.height - self._sentence() - 2
        top = self._elsewhere()
        self._ticks(bottom - sheet.line / 2)
        bottom -= sheet.line + 4
        height = (bottom - top) / len(self.found)
        for i, launch in enumerate(self.found):
            self._launch(i, launch, top + i * height, top + (i + 1) * height - (8 if i + 1 < len(self.found) else 0))
        return Frame(
            badges=tuple(dict.fromkeys(_badge(launch.it, self.t) for launch in self.found)), axes=self.axes, rasters=tuple(self.rasters),
            series=tuple(self.series), labels=tuple(sheet.labels), marks=tuple(self.marks), legend=self._legend(),
        )  # fmt: skip

    def _sentence(self) -> float:
        sheet = self.sheet
        most = 2 if sheet.height >= 14 * sheet.line else 1
        lines = fit_lines(sheet, sheet.width - 20, most, *sentences(self.found, self.t))
        for i, line in enumerate(lines):
            sheet.put(line, 10, sheet.height - 4 - (len(lines) - i - 0.5) * sheet.line, weight=700)
        return len(lines) * sheet.line + 6

    def _elsewhere(self) -> float:
        sheet, said = self.sheet, elsewhere(self.found, self.step, self.t)
        if said:
            short = self.t("sm_timeline.other_step.short", step=self.found[0].it.step_id)
            sheet.put(first_fit(sheet, sheet.width - 20, said, short), 10, 4 + sheet.line / 2, "accent", weight=700)
        return 4 + (sheet.line if said else 0)

    def _ticks(self, y: float) -> None:
        """The shared axis: time, or programs in launch order."""
        sheet, t, long = self.sheet, self.t, self.right - self.left
        if not self.timed:
            text = first_fit(sheet, long, t("sm_timeline.programs", n=int(self.end)), t("sm_timeline.programs.short", n=int(self.end)))
            sheet.put(text, self.left, y, "muted")
            return
        sheet.put(
            first_fit(sheet, self.left - 8, t("sm_timeline.time"), "0"), self.left - 8, y, "muted", anchor="right", room=self.left - 10
        )
        nice = _nice(self.end / 5 if long >= 30 * sheet.font else self.end / 2)
        for k in range(int(self.end / nice) + 1):
            x = self.left + k * nice / self.end * long
            said = brief(k * nice / 1000) if k else "0"
            sheet.put(said, x, y, "muted", anchor="left" if not k else "center" if x + sheet.span(said) / 2 <= self.right else "right")

    def _launch(self, number: int, of: Launch, y0: float, y1: float) -> None:
        sheet = self.sheet
        sheet.put(first_fit(sheet, sheet.width - 20, *titles(of, self.t)), 10, y0 + sheet.line / 2)
        top = y0 + sheet.line + 2
        waves = self.timed and y1 - top >= 5 * sheet.line
        if waves:
            top += sheet.line
        self.box = (self.left, self.right, top, max(y1, top + 8))
        if self.timed:
            self._on_sms(number, of)
            self._lines(number, of, top - sheet.line / 2 - 1 if waves else None)
        else:
            self._in_order(number, of)

    def _pair(self, number: int) -> str:
        return f"x{number + 2}y{number + 2}"

    def _code(self, of: Launch) -> np.ndarray:
        """uint8 [tiles]: index into _PAINTS."""
        tiles = of.it.tiles
        known, at = np.unique(tiles["seq_id"], return_inverse=True)
        codes = np.array([self.who.code(int(s)) for s in known], np.int64)
        return (2 * codes[at] + (tiles["kind"] == PARTLY)).astype(np.uint8)

    # ---- SM × time ----

    def _on_sms(self, number: int, of: Launch) -> None:
        x0, x1, y0, y1 = self.box
        lanes = of.residents if of.residents * of.num_sms <= y1 - y0 else 1
        rows, wide = of.num_sms * lanes, max(int(x1 - x0), 1)
        self.axes |= self.sheet.data_axes(2 + number, (0, self.end), (0, of.num_sms), self.box)
        values = np.full((rows, wide), _CLEAR, np.uint8)
        values[:, : max(int(np.ceil(of.end * wide / self.end)), 1)] = _IDLE
        owner = np.repeat(np.arange(of.programs), np.diff(of.first_of, append=len(of.it.tiles)))
        row = of.it.tiles["sm"].astype(np.int64) * lanes + (of.places[owner] if lanes > 1 else 0)
        first, last = of.start * wide // self.end, -(-of.stop * wide // self.end)
        codes = self._code(of).tolist()
        for r, a, b, code in zip(row.tolist(), first.tolist(), last.tolist(), codes):
            values[r, a : max(b, a + 1)] = code
        self._letters(of, values)
        for r, a, b in zip(row.tolist(), first.tolist(), last.tolist()):
            if b - a >= SEPARATED:
                values[r, b - 1] = _CLEAR
        self.rasters.append(Raster(f"SMs {number + 1}", values, 0, self.end, 0, of.num_sms, _PAINTS, axes=self._pair(number)))
        self._names(of.num_sms, y0, y1)
        (self._program_marks if of.programs <= MOST_PROGRAMS else self._sm_marks)(number, of)

    def _letters(self, of: Launch, values: np.ndarray) -> None:
        """Each request's name where its cells leave room for it: on full tiles, else on any of its own, else on most."""
        sheet, (x0, x1, y0, y1) = self.sheet, self.box
        rows, cols = values.shape
        high = max(int(np.ceil(sheet.font * 1.3 * rows / (y1 - y0))), 1)
        for seq_id in sorted(of.tiles_of, key=lambda s: -of.tiles_of[s])[:NUM_REQUEST_COLORS]:
            code, name = 2 * self.who.code(seq_id), cut(visible(self.trace.name(seq_id)), 6)
            wide = max(int(np.ceil((sheet.span(name) + 4) * cols / (x1 - x0))), 1)
            full, any_ = values == code, (values == code) | (values == code + 1)
            for mask, least, ink in ((full, 1.0, f"on-{_HUES[code // 2]}"), (any_, 1.0, "ink"), (any_, 0.45, "ink")):
                at = _room_in(mask, high, wide, least)
                if at is not None:
                    x, y = x0 + (at[1] + wide / 2) * (x1 - x0) / cols, y0 + (at[0] + high / 2) * (y1 - y0) / rows
                    sheet.put(name, x, y, ink, anchor="center", weight=700)
                    break

    def _names(self, count: int, y0: float, y1: float) -> None:
        """First and last SM, at the left."""
        sheet, half = self.sheet, self.sheet.font * 0.65
        sheet.put("SM 0", self.left - 8, y0 + half, "muted", anchor="right")
        if count > 1 and y1 - y0 > 2.2 * sheet.line:
            sheet.put(f"SM {count - 1:,}", self.left - 8, y1 - half, "muted", anchor="right")

    def _lines(self, number: int, of: Launch, y: float | None) -> None:
        """Where each wave begins and the tail does, with their names above where there is room."""
        order, places = np.sort(of.begins), of.num_sms * of.residents
        starts = order[::places].tolist()
        shown_ = range(len(starts)) if len(starts) <= MOST_WAVES else (0, 1, len(starts) - 1)
        at = [(float(starts[k]), self.t("sm_timeline.wave", n=k + 1)) for k in shown_]
        ends = of.last[np.isfinite(of.last)]
        if len(ends) > 1 and of.tail_share > 0.005:
            self._upright(number, of, float(ends.min()), Paint("accent"), self.t("sm_timeline.tail"), y, "accent")
        for x, text in at:
            self._upright(number, of, x, Paint("ink", hatch="diagonal"), text, y, "muted")

    def _upright(self, number: int, of: Launch, x: float, paint: Paint, text: str, y: float | None, color: str) -> None:
        if x > 0:
            line = np.array([x, x], np.float32)
            ends = np.array([0, of.num_sms], np.float32)
            self.series.append(Series(text, line, ends, "line", paint, 2.0, axes=self._pair(number)))
        if y is not None:
            px = self.left + x / self.end * (self.right - self.left)
            self.sheet.put(text, px if px + self.sheet.span(text) < self.sheet.width else px - self.sheet.span(text), y, color)

    def _program_marks(self, number: int, of: Launch) -> None:
        it, first = of.it, of.first_of.tolist()
        lanes = of.residents
        for p, i in enumerate(first):
            row = it.tiles[i]
            count = (first[p + 1] if p + 1 < len(first) else len(it.tiles)) - i
            text = self.t(
                "sm_timeline.mark.program", program=int(row["program"]), who=visible(self.trace.name(int(row["seq_id"]))),
                head=int(row["kv_head"]), sm=int(of.sm[p]), n=count, time=brief(int(of.ends[p] - of.begins[p]) / 1000),
            )  # fmt: skip
            y = float(of.sm[p]) + float(of.places[p]) / lanes
            box = (float(of.begins[p]), float(max(of.ends[p], of.begins[p] + self.end / 500)), y, y + 1 / lanes)
            ident = f"tile:{i}" if it is shown(self.trace, self.step, self.state.selection) else f"program:{number}:{p}"
            self.marks.append(Mark(ident, *box, text, axes=self._pair(number)))

    def _sm_marks(self, number: int, of: Launch) -> None:
        for sm in np.unique(of.sm).tolist():
            mine = of.sm == sm
            begin, end = int(of.begins[mine].min()), int(of.ends[mine].max())
            busy = percent(_covered(of.begins[mine], of.ends[mine]), of.end)
            text = self.t("sm_timeline.mark.sm", sm=sm, n=int(mine.sum()), busy=busy, end=brief(end / 1000))
            self.marks.append(Mark(f"sm:{number}:{sm}", float(begin), float(end), float(sm), sm + 1.0, text, axes=self._pair(number)))

    # ---- launch order ----

    def _in_order(self, number: int, of: Launch) -> None:
        """A column a program, a cell a tile, from below in the order of the visits."""
        _, _, y0, y1 = self.box
        counts, tallest = np.diff(of.first_of, append=len(of.it.tiles)), self._tallest()
        self.axes |= self.sheet.data_axes(2 + number, (0, self.end), (tallest, 0), self.box)
        values = np.full((tallest, of.programs), _CLEAR, np.uint8)
        owner = np.repeat(np.arange(of.programs), counts)
        at = np.arange(len(owner)) - of.first_of[owner]
        values[tallest - 1 - at, owner] = self._code(of)
        self._letters(of, values)
        self.rasters.append(Raster(f"launch {number + 1}", values, 0, of.programs, tallest, 0, _PAINTS, axes=self._pair(number)))
        sheet, half = self.sheet, self.sheet.font * 0.65
        sheet.put(self.t("sm_timeline.tiles", n=tallest), self.left - 8, y0 + half, "muted", anchor="right")
        sheet.put("0", self.left - 8, y1 - half, "muted", anchor="right")
        self._column_marks(number, of, counts.tolist())

    def _column_marks(self, number: int, of: Launch, counts: list[int]) -> None:
        every = max(of.programs // MOST_PROGRAMS, 1)
        is_shown = of.it is shown(self.trace, self.step, self.state.selection)
        for p in range(0, of.programs, every):
            i = int(of.first_of[p])
            row = of.it.tiles[i]
            text = self.t(
                "sm_timeline.mark.column", program=int(row["program"]), who=visible(self.trace.name(int(row["seq_id"]))),
                head=int(row["kv_head"]), n=counts[p],
            )  # fmt: skip
            ident = f"tile:{i}" if is_shown else f"program:{number}:{p}"
            self.marks.append(Mark(ident, float(p), p + 1.0, 0.0, float(counts[p]), text, axes=self._pair(number)))

    # ---- legend ----

    def _legend(self) -> tuple[Paint, ...]:
        t, of = self.t, self.found[0]
        most = sorted(of.tiles_of, key=lambda s: -of.tiles_of[s])[:NUM_REQUEST_COLORS]
        names = [s for s in of.tiles_of if s in most]
        found = [
            Paint(self.who.color(s), t("sm_timeline.legend.request", who=cut(visible(self.trace.name(s)), 8), n=of.tiles_of[s]))
            for s in names
        ]
        kinds = set(np.unique(of.it.tiles["kind"]).tolist())
        if PARTLY in kinds:
            found.append(Paint("request-other", t("sm_timeline.legend.partly"), "dots", 0.5))
        return (*found, *([Paint("free", t("sm_timeline.legend.idle"), "diagonal")] if self.timed else []))


def _room_in(mask: np.ndarray, high: int, wide: int, least: float) -> tuple[int, int] | None:
    """(row, column) of a box of cells of which at least that share is set: of the fullest, the one nearest to their middle."""
    rows, cols = mask.shape
    if high > rows or wide > cols:
        return None
    sums = np.zeros((rows + 1, cols + 1), np.int32)
    sums[1:, 1:] = mask.cumsum(0, dtype=np.int32).cumsum(1, dtype=np.int32)
    inside = sums[high:, wide:] - sums[:-high, wide:] - sums[high:, :-wide] + sums[:-high, :-wide]
    if inside.max(initial=0) < least * high * wide or not inside.max(initial=0):
        return None
    at = np.argwhere(inside == inside.max())
    middle = at.mean(0)
    return tuple(at[np.abs((at - middle) / (rows, cols)).sum(1).argmin()].tolist())


def _nice(value: float) -> float:
    power = 10.0 ** np.floor(np.log10(max(value, 1e-9)))
    return float(next(power * k for k in (1, 2, 5, 10) if power * k >= value * 0.999))


# ---- what can be asked for ----


def offers(trace: Trace, state: ViewState, step: int, found: tuple[Launch, ...]) -> tuple[Offer, ...]:
    t = words(state.language, WORDS)
    made = []
    if not found or found[0].it.step_id != step:
        layer = found[0].it.layer if found else state.layer
        label = t("sm_timeline.offer.step")
        made.append(Offer("step", label, "tiles", ((label, a_step(trace, step, layer, state.selection)),)))
    if found and found[0].it.kernel == "flash_decode":
        known = {launch.it.num_splits for launch in found}
        same = same_launch(found[-1].it)
        choices = [(t("sm_timeline.offer.splits.one", n=n), same | {"splits": n}) for n in SPLITS if n not in known]
        made.append(Offer("splits", t("sm_timeline.offer.splits"), "tiles", tuple(choices)))
    layer = found[0].it.layer if found else state.layer
    made.append(Offer("next", t("sm_timeline.offer.next"), "tiles", ((t("sm_timeline.offer.next"), {"layer": layer}),)))
    return tuple(made)


def summary(trace: Trace, state: ViewState) -> str:
    step, t = trace.clamp(state.step), words(state.language, WORDS)
    found = launches(trace, step, state.selection)
    if not found:
        return t("sm_timeline.damaged" if of_kind(trace, TileTrace) else "sm_timeline.empty", step=step)
    parts = [elsewhere(found, step, t), *(titles(launch, t)[0] + "." for launch in found), sentences(found, t)[0]]
    return " ".join(part for part in parts if part)


# ---- asks ----


def _ask(answer: Callable[[Launch], str], timed: bool = False) -> Callable[[Trace, ViewState], str]:
    """Of the upper launch; "" where there is none, or no clock for what needs one."""

    def found(trace: Trace, state: ViewState) -> str:
        of = launches(trace, trace.clamp(state.step), state.selection)
        return answer(of[0]) if of and (of[0].is_timed or not timed) else ""

    return found


def _most(trace: Trace, state: ViewState) -> str:
    """The request with the most tiles; "" where several have as many."""
    of = launches(trace, trace.clamp(state.step), state.selection)
    if not of:
        return ""
    counts = of[0].tiles_of
    most = [s for s, n in counts.items() if n == max(counts.values())]
    return trace.name(most[0])[:20] if len(most) == 1 else ""


WORDS = {
    "sm_timeline.empty": (
        "No kernel wrote down its tiles yet. Press “Trace this step's tiles”: the attention kernel then runs once more over "
        "step {step:,} and notes where and when each tile ran."
    ),
    "sm_timeline.damaged": (
        "The tiles of this recording are damaged. Press “Trace this step's tiles” on the live engine to get those of step {step:,}."
    ),
    "sm_timeline.interpreter": "{device}: no SM and no time",
    "sm_timeline.clock": "{device}: the GPU's own clock, in the traced kernel",
    "sm_timeline.clock.again": "{device}: the GPU's own clock, in a second run of the traced kernel",
    "sm_timeline.other_step": "These are tiles of step {step:,}; step {here:,} has not been traced.",
    "sm_timeline.other_step.short": "Tiles of step {step:,}",
    "sm_timeline.flash_prefill": "prefill",
    "sm_timeline.flash_decode": "keys in one part",
    "sm_timeline.split": ("keys in {n:,} part", "keys in {n:,} parts"),
    "sm_timeline.launch": (
        "{kind}: {n:,} program, {tiles:,} tiles on {sms:,} SMs in {time}; {waves} waves, the tail idles {tail}",
        "{kind}: {n:,} programs, {tiles:,} tiles on {sms:,} SMs in {time}; {waves} waves, the tail idles {tail}",
    ),
    "sm_timeline.launch.short": (
        "{kind}: {n:,} program on {sms:,} SMs in {time}; {waves} waves, tail {tail}",
        "{kind}: {n:,} programs on {sms:,} SMs in {time}; {waves} waves, tail {tail}",
    ),
    "sm_timeline.launch.shorter": (
        "{n:,} program, {time}, {waves} waves, tail {tail}",
        "{n:,} programs, {time}, {waves} waves, tail {tail}",
    ),
    "sm_timeline.launch.shortest": "{time}, {waves} waves",
    "sm_timeline.launch.order": (
        "{kind}: {n:,} program, {tiles:,} tiles, in launch order",
        "{kind}: {n:,} programs, {tiles:,} tiles, in launch order",
    ),
    "sm_timeline.launch.order.short": ("{n:,} program, {tiles:,} tiles", "{n:,} programs, {tiles:,} tiles"),
    "sm_timeline.says.order": (
        "Triton's interpreter ran these programs one after the other on a CPU: their order is known, an SM and a time do not exist."
    ),
    "sm_timeline.says.order.short": "Run on a CPU: only the order is known, no SM and no time.",
    "sm_timeline.says.one": (
        "SMs are busy {busy} of the time; after their last tile they wait for {tail} of it. An SM holds one program at a time.",
        "SMs are busy {busy} of the time; after their last tile they wait for {tail} of it. An SM holds up to {n:,} programs at a time.",
    ),
    "sm_timeline.says.one.short": "SMs are busy {busy} of the time; the tail idles {tail}.",
    "sm_timeline.says.both": (
        "With the keys in {n:,} parts: {before} → {after}, {programs:,} → {programs_after:,} programs, SMs busy {busy} → {busy_after}."
    ),
    "sm_timeline.says.both.short": "In {n:,} parts: {before} → {after}.",
    "sm_timeline.tiles": ("{n:,} tile", "{n:,} tiles"),
    "sm_timeline.programs": "programs 1–{n:,} in launch order →, tiles of each ↑",
    "sm_timeline.programs.short": "{n:,} programs →",
    "sm_timeline.time": "time",
    "sm_timeline.wave": "wave {n:,}",
    "sm_timeline.tail": "tail",
    "sm_timeline.mark.program": (
        "Program {program:,}: {who}, KV head {head}, {n:,} tile on SM {sm} in {time}",
        "Program {program:,}: {who}, KV head {head}, {n:,} tiles on SM {sm} in {time}",
    ),
    "sm_timeline.mark.sm": (
        "SM {sm}: {n:,} program, busy {busy}, done after {end}",
        "SM {sm}: {n:,} programs, busy {busy}, done after {end}",
    ),
    "sm_timeline.mark.column": (
        "Program {program:,}: {who}, KV head {head}, {n:,} tile",
        "Program {program:,}: {who}, KV head {head}, {n:,} tiles",
    ),
    "sm_timeline.legend.request": ("{who}: {n:,} tile", "{who}: {n:,} tiles"),
    "sm_timeline.legend.partly": "paler: partly masked",
    "sm_timeline.legend.idle": "SM idle",
    "sm_timeline.offer.step": "Trace this step's tiles",
    "sm_timeline.offer.next": "Trace the next step",
    "sm_timeline.offer.splits": "Split the keys",
    "sm_timeline.offer.splits.one": ("in {n} part", "in {n} parts"),
}


VIEW = View(
    name="sm_timeline",
    title="SM timeline",
    question="Which tile ran on which SM of the GPU, and when?",
    figure=figure,
    summary=summary,
    words=WORDS,
    asks=(
        Ask("How many programs are in the (upper) picture?", _ask(lambda of: f"{of.programs:,}")),
        Ask("Which request has the most tiles in the (upper) picture?", _most),
        Ask("How long did the (upper) launch take in all?", _ask(lambda of: brief(of.end / 1000), timed=True)),
        Ask("How many waves were there in the (upper) picture?", _ask(lambda of: f"{of.waves:.1f}", timed=True)),
        Ask("Which share of the SMs' time does the tail idle (upper picture)?", _ask(lambda of: percent(of.tail_share, 1), timed=True)),
    ),
    order=115,
)
