"""Continuous batching: who sits in which batch slot, step by step, and why do the others wait?

Rows are batch slots, x is the step or the engine's own time. A cell's colour is the request, its texture what the
step did (prompt tokens, one token, recomputation); a finish is a dot, a preemption a cross. The waiting queue stands
above with its reasons; below, on the same x, the same requests in static batches (a formula, viz/lanes.py) and the
tokens of each step against the budget. Steps after the shown one are not drawn.
"""

from __future__ import annotations

import numpy as np

from engine.trace import Trace
from viz.lanes import Cell, Lanes, Run, engine_time, lanes, queue, static_lanes, work_kinds
from viz.layout import MAX_LABELS, Sheet, device_name, message, too_small, visible, wrap
from viz.select import Identity, identity, live_at, prompt_len
from viz.theme import HUES, duration, percent, round_up
from viz.view import Ask, Badge, Frame, Mark, Paint, Raster, Series, View, ViewState
from viz.words.caption import reason_words
from viz.words.catalogue import Words, words

WINDOWS = (24, 40, 60)  # steps in the window, as the run grows
MIN_COLUMN = 10  # px
MIN_ROW, MAX_ROW = 16, 60
_KINDS = {Cell.DECODE: (None, 1.0), Cell.PREFILL: ("dots", 1.0), Cell.RECOMPUTE: ("cross", 1.0), Cell.HELD: (None, 0.12)}
_PAINTS = (
    *(Paint(hue, hatch=hatch, alpha=alpha) for hue in HUES for hatch, alpha in _KINDS.values()),
    Paint("free", hatch="diagonal"),
    Paint("error", hatch="cross"),
)
_IDLE, _FAILED, _CLEAR = len(_PAINTS) - 2, len(_PAINTS) - 1, 255


def window(trace: Trace, step: int, width: float) -> tuple[int, int]:
    """(first step, columns): moves in jumps of a quarter, so the axes rarely change."""
    most = max(min(WINDOWS[-1], int(width / MIN_COLUMN)), 8)
    begin = trace.first_step or 0
    columns = min(next((n for n in WINDOWS if step - begin < n), most), most)
    jump = max(columns // 4, 1)
    past = max(step - begin + 1 - columns, 0)
    return begin + -(-past // jump) * jump, columns


def figure(trace: Trace, state: ViewState) -> Frame:
    if too_small(state):
        return message(summary(trace, state), state, Badge("state"))
    return _Picture(trace, state, trace.clamp(state.step)).frame()


class _Picture:
    """One frame while it is laid out: the queue on top, slots, steps, token bars."""

    def __init__(self, trace: Trace, state: ViewState, step: int) -> None:
        self.trace, self.state, self.step = trace, state, step
        self.chips: list[Raster] = []  # of the queue
        self.now = trace.rows("steps", step, step)[0]
        self.t: Words = words(state.language, WORDS)
        self.sheet = Sheet(state)
        self.who: Identity = identity(trace, step, state.selection)
        sheet = self.sheet
        self.left = round(sheet.advance * 8)
        wide = sheet.width >= 75 * sheet.advance
        self.right = sheet.width - (round(sheet.advance * 21) if wide else 12)
        self.first, self.columns = window(trace, step, self.right - self.left)
        self.lanes: Lanes = lanes(trace, self.first, step, self.columns)
        self.timed = state.axis == "time"
        self.edges = np.arange(self.first, self.first + self.columns + 1) - 0.5
        if self.timed:
            self.edges = engine_time(trace, self.first, step)
        self._edge = self.edges.tolist()  # for single places
        self.ends = (0.0, round_up(self.edges[-1])) if self.timed else (self.first - 0.5, self.first + self.columns - 0.5)
        self.pixel = (self.ends[1] - self.ends[0]) / (self.right - self.left)  # of the data axes
        self._heights()

    def _heights(self) -> None:
        sheet, wanted = self.sheet, len(self.lanes.cells)
        self.queue_lines = 3 if sheet.height >= 14 * sheet.line else 2
        self.slots_top = 8 + self.queue_lines * sheet.line + 8
        bars = max(round(sheet.height * 0.16), 2 * sheet.line)
        config = self.trace.config_at(self.step)
        thin = float(np.clip(sheet.height * 0.13 / wanted, 5, 9))
        room = sheet.height - 26 - bars - 2 * sheet.line - wanted * thin - self.slots_top
        roomy = room >= wanted * 1.05 * sheet.font and config.get("batching") != "static"
        self.static_row = thin if roomy and not self.timed else 0.0
        self.static = static_lanes(self.trace, self.first, self.step, self.columns, wanted) if self.static_row else None
        below = sheet.line + 4 + wanted * self.static_row if self.static else 0  # its title and rows
        bottom = sheet.height - 10 - bars - sheet.line - 12 - below  # of the slots: static batches, ticks and bars follow
        self.row = float(np.clip((bottom - self.slots_top) / wanted, MIN_ROW, MAX_ROW))
        fits = max(int((bottom - self.slots_top) / self.row), 1)
        more = -(-sheet.line // self.row)  # slots that the line "+27 slots" takes
        self.rows = wanted if wanted <= fits else max(int(fits - more), 1)
        self.fine = int(np.clip(self.row / 4, 4, 9))  # raster rows a slot, the last one a gap
        self.slots_bottom = self.slots_top + self.rows * self.row
        self.static_top = self.slots_bottom + (sheet.line if self.rows < wanted else 0) + sheet.line + 2
        self.static_bottom = self.static_top + wanted * self.static_row if self.static else self.static_top - sheet.line - 2
        self.ticks_y = self.static_bottom + 4 + sheet.line / 2
        self.bars_top, self.bars_bottom = self.ticks_y + sheet.line / 2 + 6, sheet.height - 10

    def at(self, step: float) -> float:
        """Where `step` (its left edge) lies on the data axes; a time axis ends with the shown step."""
        behind, edge = step - self.first, self._edge
        i = min(max(int(behind), 0), len(edge) - 2)
        return edge[i] + (edge[i + 1] - edge[i]) * min(max(behind - i, 0.0), 1.0)

    def x(self, step: float) -> float:
        """The same as a pixel."""
        return self.left + (self.at(step) - self.ends[0]) / self.pixel

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Columns of steps as the columns of a raster: on a time axis one a pixel, each the step that ran then."""
        if not self.timed:
            return values
        times = (np.arange(int(self.right - self.left)) + 0.5) * self.pixel
        ran = np.searchsorted(self.edges, times, side="right") - 1
        found = values[..., np.minimum(ran, len(self.edges) - 2)]
        found[..., ran >= len(self.edges) - 1] = _CLEAR if values.dtype == np.uint8 else 0
        return found

    def y(self, row: float) -> float:
        """Pixel of the middle of a slot, its gap below left out."""
        return self.slots_top + (row - 0.5 - 0.5 / self.fine) * self.row

    def frame(self) -> Frame:
        sheet, ends = self.sheet, self.ends
        most = float(max(self.lanes.budget.max(initial=1), self.lanes.num_tokens.max(initial=1), 1)) * 1.08
        axes = sheet.axes()
        axes |= sheet.data_axes(2, ends, (0.5, self.rows + 0.5), (self.left, self.right, self.slots_top, self.slots_bottom))
        axes |= sheet.data_axes(3, ends, (most, 0), (self.left, self.right, self.bars_top, self.bars_bottom))
        queue_, slots, static = self._queue(), self._slots(), self._static()
        marks = (*queue_, *slots, *static, *self._ticks(most))
        rasters = (self._raster(),)
        if self.static:
            axes |= sheet.data_axes(4, ends, (0, 1), (self.left, self.right, self.static_top, self.static_bottom))
            rasters += (self._static_raster(),)
        return Frame(
            badges=self._badges(),
            axes=axes,
            rasters=(*rasters, *self.chips),
            series=(*self._bars(most), *self._glyphs(), self._present()),
            labels=tuple(sheet.labels),
            marks=marks,
            legend=self._legend(),
        )

    # ---- the queue ----

    def _queue(self) -> list[Mark]:
        sheet, waits, left = self.sheet, queue(self.trace, self.step), self.left
        sheet.put(self.t("batching.queue"), left - 8, 8 + sheet.line / 2, "muted", anchor="right", room=left - 8)
        if not len(waits):
            sheet.put(self.t("batching.nobody"), left, 8 + sheet.line / 2, "muted")
            return []
        marks, line, shown, indent = [], 0, 0, round(1.4 * sheet.font)
        wide = sheet.width - left - indent - 12
        for i, row in enumerate(waits[: self.queue_lines]):
            text, seq_id = reason_words(row, self.trace, self.state.language), int(row["seq_id"])
            parts = wrap(f"{i + 1:,}. {visible(text)}", int(wide / sheet.advance))
            room = self.queue_lines - line - (i + 1 < len(waits))  # a line is kept for "+2 more wait"
            if room < 1:
                break
            y0, parts = 8 + line * sheet.line, [*parts[: room - 1], " ".join(parts[room - 1 :])] if len(parts) > room else parts
            for part in parts:
                sheet.put(part, left + indent, 8 + (line + 0.5) * sheet.line, room=wide)
                line += 1
            marks.append(Mark(f"seq:{seq_id}", left, sheet.width - 8, y0 + 1, 8 + line * sheet.line - 1, text))
            self.chips.append(self._queue_chip(seq_id, left, y0 + sheet.line / 2))
            shown += 1
        if shown < len(waits):
            sheet.put(self.t("batching.more_wait", n=len(waits) - shown), left + indent, 8 + (line + 0.5) * sheet.line, "muted")
        return marks

    def _queue_chip(self, seq_id: int, x: float, middle: float) -> Raster:
        """A square in the request's colour: a line of a list, nothing that lies on the axis of steps."""
        code, half = np.array([[self.who.code(seq_id) * len(_KINDS)]], np.uint8), self.sheet.font * 0.42
        return Raster("waiting", code, x, x + 2 * half, middle - half, middle + half, _PAINTS)

    # ---- slots ----

    def _raster(self) -> Raster:
        cells, seqs = self.lanes.cells[: self.rows], self.lanes.seqs[: self.rows]
        hue = self.who.codes(seqs)
        kind = np.zeros(len(Cell), np.int64)
        kind[list(_KINDS)] = range(len(_KINDS))
        values = hue * len(_KINDS) + kind[cells]
        values[cells == Cell.IDLE], values[cells == Cell.FAILED], values[cells == Cell.NOTHING] = _IDLE, _FAILED, _CLEAR
        lines = np.repeat(self.spread(values.astype(np.uint8)), self.fine, 0)
        lines[self.fine - 1 :: self.fine] = _CLEAR  # a gap between slots
        return Raster("slots", lines, *self.ends, 0.5, self.rows + 0.5, _PAINTS, axes="x2y2")

    # ---- static batches ----

    def _badges(self) -> tuple[Badge, ...]:
        t = self.t
        found = [Badge("state")]
        if self.timed:
            found.append(Badge("measured", t("batching.measured", device=device_name(self.trace, t))))
        if self.static:
            found.append(Badge("computed", t("batching.formula")))
        return tuple(found)

    def _static_raster(self) -> Raster:
        cells, seqs = self.static.cells, self.static.seqs
        hue = self.who.codes(seqs)
        values = np.where(cells == Cell.DECODE, hue * len(_KINDS), np.where(cells == Cell.IDLE, _IDLE, _CLEAR)).astype(np.uint8)
        lines = np.repeat(values, 4, 0)
        lines[3::4] = _CLEAR
        return Raster("static batches", lines, *self.ends, 0, 1, _PAINTS, axes="x4y4")

    def _static(self) -> list[Mark]:
        """The title of the static batches, and one mark that says the comparison."""
        if not self.static:
            return []
        s, sheet, t = self.static, self.sheet, self.t
        numbers = {
            "done": s.done, "here": s.done_here, "busy": percent(s.busy, 1), "busy_here": percent(s.busy_here, 1), "since": s.since,
        }  # fmt: skip
        for key in ("batching.static", "batching.static.short", "batching.static.shortest"):
            text, at = t(key, **numbers), self.left
            if sheet.span(text) <= sheet.width - 24:
                at = min(at, sheet.width - 12 - sheet.span(text))
                break
        sheet.put(text, at, self.static_top - 2 - sheet.line / 2, weight=700, room=sheet.width - at - 12)
        sheet.put(t("batching.static.row"), self.left - 8, (self.static_top + self.static_bottom) / 2, "muted", anchor="right")
        return [Mark("static", *self.ends, 0, 1, t("batching.static", **numbers), None, t("batching.formula.full"), axes="x4y4")]

    def _slots(self) -> list[Mark]:
        """Letters, names of slots, what each does now; a mark a stay."""
        sheet, t, step = self.sheet, self.t, self.step
        now = {int(w["row"]): w for w in self.trace.rows("works", step, step)}
        held = {r.row: r.seq_id for r in self.lanes.runs if r.last == step}
        every = max(int(np.ceil(sheet.font * 1.3 / self.row)), 1)
        for row in range(1, self.rows + 1):
            if (row - 1) % every == 0:
                sheet.put(t("batching.slot", n=row), self.left - 8, self.y(row), "muted", anchor="right")
        if self.rows < len(self.lanes.cells):
            hidden = len(self.lanes.cells) - self.rows
            sheet.put(t("batching.more_slots", n=hidden), self.left - 8, self.slots_bottom + sheet.line / 2, "muted", anchor="right")
        if self.right < sheet.width - 20:
            for row in range(1, self.rows + 1):
                text = self._now(now.get(row), held.get(row))
                sheet.put(text, self.right + 12, self.y(row), room=sheet.width - self.right - 16)
        marks = []
        for run in self.lanes.runs:
            if run.row > self.rows:
                continue
            name, color = self.trace.name(run.seq_id), self.who.color(run.seq_id)
            text = t("batching.mark.run", who=name, row=run.row, first=run.first, last=run.last)
            y0, y1 = run.row - 0.5, run.row + 0.5 - 1 / self.fine
            x0, x1 = self.at(run.first), self.at(run.last + 1)
            marks.append(Mark(f"seq:{run.seq_id}", x0, x1, y0, y1, text, f"{color}-line", axes="x2y2"))
        for run in sorted(self.lanes.runs, key=lambda r: (-r.last, r.first - r.last)):
            if run.row <= self.rows and len(sheet.labels) < 27:
                self._letter(run)
        return marks

    def _letter(self, run: Run) -> None:
        """The name on a stay that is wide enough: after its prompt, or after a stay that is all prompt and goes on (a
        name on a texture is hard to read)."""
        name, sheet = self.trace.name(run.seq_id), self.sheet
        x0, x1 = self.x(run.first), self.x(run.last + 1)
        did = self.lanes.cells[run.row - 1, run.first - self.first : run.last + 1 - self.first]
        plain = np.flatnonzero(did == Cell.DECODE)
        plain = plain if len(plain) else np.flatnonzero(did == Cell.HELD)
        after = self.x(run.first + int(plain[0])) if len(plain) else x1
        span = sheet.span(name)
        at = after if x1 - after >= span + 20 else x0
        if at == x0 and did[0] in (Cell.PREFILL, Cell.RECOMPUTE) and run.last == self.step and x1 + 8 + span <= self.right:
            sheet.put(name, x1 + 8, self.y(run.row), weight=700)
            return
        if x1 - x0 >= span + 2:
            is_held = len(plain) > 0 and did[plain[0]] == Cell.HELD
            color = "ink" if is_held else f"on-{self.who.color(run.seq_id)}"
            sheet.put(name, min(at + 6, x1 - span - 1), self.y(run.row), color, weight=700, room=x1 - x0)

    def _now(self, work: np.void | None, held: int | None) -> str:
        t = self.t
        if self.now["failed"] and work is not None:
            return t("batching.now.failed")
        if work is None:
            return t("batching.now.idle") if held is None else t("batching.now.held", who=self.trace.name(held))
        seq_id = int(work["seq_id"])
        info, end = self.trace.sequences.get(seq_id), int(work["start"]) + int(work["num_tokens"])
        who, prompt = self.trace.name(seq_id), prompt_len(self.trace, seq_id)
        if work["num_recomputed"]:
            return t("batching.now.recompute", who=who, n=int(work["num_recomputed"]))
        if end < prompt:
            return t("batching.now.prompt", who=who, done=end, total=prompt)
        return t("batching.now.token", who=who, n=end - prompt + 1, total=info.max_tokens if info else 0)

    def _glyphs(self) -> list[Series]:
        """Finishes and preemptions, at the end of the stay that they end."""
        trace, last = self.trace, self.step
        ends = {}
        for run in self.lanes.runs:
            ends.setdefault(run.seq_id, []).append(run)
        found: dict[str, list[tuple[float, float]]] = {"finishes": [], "preempts": []}
        for table, places in found.items():
            for event in trace.rows(table, self.first, last):
                before = [r for r in ends.get(int(event["seq_id"]), ()) if r.last <= event["step_id"] and r.row <= self.rows]
                if before:
                    run = max(before, key=lambda r: r.last)
                    inside = self.x(run.last + 1) - self.x(run.first) >= self.sheet.span(trace.name(run.seq_id)) + 24
                    places.append((self.at(run.last + 1) - (8 * self.pixel if inside else 0), run.row - 0.5 / self.fine))
        made = []
        for table, symbol, paint in (("finishes", "circle", Paint("ink")), ("preempts", "x", Paint("error"))):
            at = np.array(found[table], np.float32).reshape(-1, 2)
            made.append(Series(table, at[:, 0].copy(), at[:, 1].copy(), "markers", paint, 11.0, axes="x2y2", symbol=symbol))
        return made

    def _present(self) -> Series:
        """A frame around the shown step in all slots: what is inside it is now, the rest is the past."""
        x0, x1, y0, y1 = self.x(self.step), self.x(self.step + 1), self.slots_top - 3, self.slots_bottom
        x, y = np.array([x0, x1, x1, x0, x0], np.float32), np.array([y0, y0, y1, y1, y0], np.float32)
        return Series("shown step", x, y, "line", Paint("ink"), 2.0)

    # ---- steps and tokens ----

    def _ticks(self, most: float) -> list[Mark]:
        sheet, t, step = self.sheet, self.t, self.step
        sheet.put(t("step", step=step), self.x(step + 0.5), self.ticks_y, "ink", anchor="center", weight=700) or sheet.put(
            t("step", step=step), self.x(step + 1), self.ticks_y, "ink", anchor="right", weight=700
        )
        other = "step" if self.timed else "time"
        said = sheet.put(t(f"batching.axis.{'time' if self.timed else 'step'}"), self.left - 8, self.ticks_y, "muted", anchor="right")
        budget = int(self.now["token_budget"])
        used = int(self.lanes.num_tokens[step - self.first])
        middle = (self.bars_top + self.bars_bottom) / 2
        at_budget = self.bars_bottom - (self.bars_bottom - self.bars_top) * budget / most
        sheet.put(f"{budget:,}", self.left - 8, max(at_budget, self.bars_top + 2), "muted", anchor="right")
        sheet.put(t("batching.tokens"), self.left - 8, max(middle, at_budget + sheet.font * 1.4), "muted", anchor="right")
        text, key = t("batching.used", n=used, budget=budget), f"● {t('batching.finished')}  × {t('batching.preempted')}"
        if self.right < sheet.width - 20:
            room = sheet.width - self.right - 16
            sheet.put(f"{text} {t('batching.tokens')}", self.right + 12, self.bars_top + sheet.font, room=room)
            for i, part in enumerate(key.split("  ")):
                sheet.put(part, self.right + 12, self.bars_bottom - sheet.font * 0.7 - (1 - i) * sheet.line, "muted", room=room)
        else:
            late = self.x(step) > (self.left + self.right) / 2
            at, anchor = (self.x(step) - 6, "right") if late else (self.x(step + 1) + 6, "left")
            sheet.put(text, at, self.bars_top + sheet.font * 1.1, anchor=anchor)
            sheet.put(key, self.right, 8 + (self.queue_lines - 0.5) * sheet.line, "muted", anchor="right")
        self._numbers()
        marks = []
        if said is not None:
            y0, y1 = self.ticks_y - sheet.font * 0.7, self.ticks_y + sheet.font * 0.7
            x0 = self.left - 12 - sheet.span(said.text)
            marks.append(Mark(f"axis:{other}", x0, self.left - 4, y0, y1, t(f"batching.mark.axis.{other}"), "control"))
        for i in np.flatnonzero(self.lanes.cells[0] != Cell.NOTHING).tolist():
            at = self.first + i
            said = t("batching.mark.step", step=at, n=int(self.lanes.num_tokens[i]), budget=int(self.lanes.budget[i]))
            x0, x1 = self.at(at), self.at(at + 1)
            if x1 > x0:
                marks.append(Mark(f"step:{at}", x0, x1, 0, most, said, "ink" if at == step else None, axes="x3y3"))
        return marks

    def _numbers(self) -> None:
        """Of steps or times, under the slots."""
        sheet, long = self.sheet, self.right - self.left
        if self.timed:
            for part in (0.25, 0.5, 0.75, 1.0):
                at = self.left + part * long
                sheet.put(duration(part * self.ends[1]), at, self.ticks_y, "muted", anchor="center" if part < 1 else "right")
            return
        room = MAX_LABELS - len(sheet.labels)  # regular ticks to the end or none
        fits = (n for n in (5, 10, 20, 50) if n * long / self.columns >= 8 * sheet.advance and self.columns / n <= room)
        gap = next(fits, 100)
        for at in range(-(-self.first // gap) * gap, self.first + self.columns, gap):
            sheet.put(f"{at:,}", self.x(at + 0.5), self.ticks_y, "muted", anchor="center")

    def _bars(self, most: float) -> list[Series]:
        x = np.arange(self.first, self.first + self.columns, dtype=np.float32)
        if self.timed:
            x = ((np.arange(int(self.right - self.left)) + 0.5) * self.pixel).astype(np.float32)
        prompt = self.spread(self.lanes.num_prompt).astype(np.float32)
        rest = self.spread(self.lanes.num_tokens).astype(np.float32) - prompt
        known = self.spread(self.lanes.cells[0] != Cell.NOTHING) > 0
        budget = np.where(known, self.spread(self.lanes.budget), np.nan).astype(np.float32)
        wide = float(self.pixel) if self.timed else 0.8
        return [
            Series("one token", x, rest, "bars", Paint("muted"), wide, np.zeros_like(rest), "x3y3"),
            Series("prompt tokens", x, rest + prompt, "bars", Paint("muted", hatch="dots", alpha=0.6), wide, rest, "x3y3"),
            Series("budget", x, budget, "line", Paint("ink"), 1.5, axes="x3y3"),
        ]

    def _legend(self) -> tuple[Paint, ...]:
        paints = [
            Paint("request-other", self.t(f"batching.legend.{kind.name.lower()}"), hatch, alpha) for kind, (hatch, alpha) in _KINDS.items()
        ]
        if (self.lanes.cells == Cell.FAILED).any():
            paints.append(Paint("error", self.t("batching.legend.failed"), "cross"))
        return (*paints, Paint("free", self.t("batching.legend.idle"), "diagonal"))


def summary(trace: Trace, state: ViewState) -> str:
    step, t = trace.clamp(state.step), words(state.language, WORDS)
    found = trace.rows("works", step, step)
    rows = int(trace.step(step).step["max_num_seqs"])
    waiting = [reason_words(w, trace, state.language) for w in queue(trace, step)[:3]]
    names = t.names([trace.name(int(i)) for i in found["seq_id"]], 8) or t("nobody")
    said = "; ".join(waiting) + "." if waiting else t("batching.nobody")
    return t("batching.summary", busy=len(found), rows=rows, step=step, who=names, waiting=said)


# ---- asks ----


def _in_slot_one(trace: Trace, state: ViewState) -> str:
    works = trace.rows("works", trace.clamp(state.step), trace.clamp(state.step))
    return next((trace.name(int(w["seq_id"])) for w in works if w["row"] == 1), "none")


def _most_tokens(trace: Trace, state: ViewState) -> str:
    step = trace.clamp(state.step)
    works = trace.rows("works", step, step)
    return str(int(works["num_tokens"].sum()))


def _first_waiting(trace: Trace, state: ViewState) -> str:
    waits = queue(trace, trace.clamp(state.step))
    return trace.name(int(waits[0]["seq_id"])) if len(waits) else "nobody"


def _idle_slots(trace: Trace, state: ViewState) -> str:
    step = trace.clamp(state.step)
    waiting = {int(w["seq_id"]) for w in queue(trace, step)}
    return str(int(trace.step(step).step["max_num_seqs"]) - sum(i not in waiting for i in live_at(trace, step)))


def _reading_prompt(trace: Trace, state: ViewState) -> str:
    step = trace.clamp(state.step)
    works = trace.rows("works", step, step)
    kinds = work_kinds(trace, works)
    return str(int(np.count_nonzero(kinds == Cell.PREFILL)))


WORDS = {
    "batching.slot": "slot {n:,}",
    "batching.more_slots": ("+{n:,} slot", "+{n:,} slots"),
    "batching.queue": "waiting",
    "batching.nobody": "Nobody waits.",
    "batching.more_wait": ("+{n:,} more waits", "+{n:,} more wait"),
    "batching.tokens": "tokens",
    "batching.used": "{n:,} of {budget:,}",
    "batching.now.prompt": "{who}  prompt {done:,} of {total:,}",
    "batching.now.token": "{who}  token {n:,} of {total:,}",
    "batching.now.recompute": "{who}  recomputes {n:,}",
    "batching.now.idle": "idle now",
    "batching.now.held": "{who}  waits in its slot",
    "batching.now.failed": "failed",
    "batching.legend.decode": "one token (decode)",
    "batching.legend.prefill": "prompt tokens (prefill)",
    "batching.legend.recompute": "computed again",
    "batching.legend.held": "keeps its slot, computes nothing",
    "batching.legend.idle": "idle slot",
    "batching.legend.failed": "failed step",
    "batching.axis.step": "step ⇄",
    "batching.axis.time": "time ⇄",
    "batching.mark.axis.step": "Show steps along the axis, all equally wide",
    "batching.mark.axis.time": "Show the engine's time along the axis; pauses and the pace do not count",
    "batching.measured": "engine time, pauses and pace excluded: {device}",
    "batching.static": (
        "Static batches: by now {done:,} finished, slots {busy} busy (continuous above: {here:,} finished, {busy_here} busy)"
    ),
    "batching.static.short": "Static: {done:,} finished, {busy} busy (above: {here:,} finished, {busy_here} busy)",
    "batching.static.shortest": "Static: {busy} busy (above: {busy_here})",
    "batching.static.row": "static",
    "batching.formula": "static batches: each runs until its longest request ends, then the next begins",
    "batching.formula.full": (
        "static batches: one begins when the one before has ended, with those who have come and have room for prompt + "
        "max_tokens; it ends with its longest; a request takes as many steps as it took here"
    ),
    "batching.finished": "finished",
    "batching.preempted": "preempted",
    "batching.mark.run": "{who}, slot {row:,}, steps {first:,} to {last:,}",
    "batching.mark.step": "Step {step:,}: {n:,} of {budget:,} tokens",
    "batching.summary": "{busy:,} of {rows:,} batch slots are busy at step {step:,}: {who}. {waiting}",
}


VIEW = View(
    name="batching",
    title="Continuous batching",
    question="Who sits in which batch slot, step by step, and why do the others wait?",
    figure=figure,
    summary=summary,
    words=WORDS,
    asks=(
        Ask("Which request sits in slot 1 at the step shown (none if idle)?", _in_slot_one),
        Ask("How many batch slots are idle at the step shown?", _idle_slots),
        Ask("How many tokens were computed in the step shown?", _most_tokens),
        Ask("Which request is first in the waiting queue (nobody if it is empty)?", _first_waiting),
        Ask("How many requests read prompt tokens (prefill) in the step shown?", _reading_prompt),
    ),
    order=10,
)
