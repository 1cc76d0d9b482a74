"""Engine map: where is everybody, and what flows through the engine in this step?

Boxes carry vLLM's names, our files beneath. A request sits in the area of the scheduler in which this step's plan
found it; whom the step ended stands at the end, with the reason. An arrow is as wide as its tokens are many, on one
scale for all arrows of a frame. Numbers come from the step's rows and its part of the pool's log; bars are its clocks.
The sampler runs inside run, and on a GPU settle waits for both: so the clocks keep their own names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.plan import WaitReason
from engine.trace import WAIT_REASONS, Trace
from viz.layout import ADVANCE, MAX_LABELS, Sheet, device_name, message, text_em, too_small, visible, wrap
from viz.select import identity
from viz.stepfacts import CLOCKS, Facts, facts
from viz.theme import count, duration
from viz.view import Ask, Badge, Frame, Mark, Paint, Series, View, ViewState
from viz.words.caption import finish_words, first_sample, reason_words
from viz.words.catalogue import Words, words

BOXES = ("front", "scheduler", "cache", "executor", "sampler")  # in the order of the flow
FILES = {"front": "tokenizer.py", "scheduler": "scheduler.py", "cache": "pages.py", "executor": "runner.py", "sampler": "sampler.py"}
AREAS = ("waiting", "running", "preempted")
MAX_CHIPS = 12
ROW_WIDTH, NARROW_ROW_WIDTH, FLAT_WIDTH, TALL_WIDTH, PHONE_WIDTH = 126, 93.5, 62, 44, 34  # characters that a layout needs
TIGHT_GAP = 12  # px: an arrow without words
_ARROW, _NO_FLOW, _CLOCK, _AREA = Paint("accent"), Paint("control", hatch="diagonal"), Paint("muted"), Paint("free", alpha=0.3)

Rect = tuple[float, float, float, float]  # x0, x1, y0, y1


# ---- the picture ----


def figure(trace: Trace, state: ViewState) -> Frame:
    if too_small(state):
        return message(summary(trace, state), state, Badge("state"))
    picture = _Picture(trace, state, trace.clamp(state.step))
    if picture.fits:
        return picture.frame()
    # the legend stays: it takes room, and without it the picture might fit again, and again not
    return replace(message(summary(trace, state), state, *picture.badges()), legend=picture.legend())


class _Picture:
    """One frame while it is laid out: boxes beside each other where the panel is wide, else one below the other; on a
    phone without the clocks."""

    def __init__(self, trace: Trace, state: ViewState, step: int) -> None:
        self.trace, self.state, self.step = trace, state, step
        self.t: Words = words(state.language, WORDS)
        self.sheet = Sheet(state)
        self.who = identity(trace, step, state.selection)
        self.facts = facts(trace, step)
        sheet = self.sheet
        self.wide, self.high = sheet.width / sheet.advance, sheet.height / sheet.line
        self.is_roomy = self.wide >= ROW_WIDTH and self.high >= 18
        self.is_row = self.is_roomy or (self.wide >= NARROW_ROW_WIDTH and self.high >= 12.4)
        self.is_flat = self.wide >= FLAT_WIDTH
        self.is_phone = not self.is_row and self.wide < TALL_WIDTH
        self.is_timed = self.facts.is_timed and not self.is_phone
        self.letter = round(sheet.font * 1.4) if self.is_roomy else sheet.font
        self.chip = round(self.letter * 1.5)  # a chip's height, and its least width
        self.bar = max(round(sheet.font * 0.4), 6)
        self.series: list[Series] = []
        self.marks: list[Mark] = []
        self.fills: dict[tuple[str, bool], list[Rect]] = {}  # (colour, pale) → chips
        self.fits = self.is_row or (self.wide >= PHONE_WIDTH and self._column_height(TIGHT_GAP) <= sheet.height)
        self.is_tight = self._column_height(self._text_gap) > sheet.height  # no room for words beside the arrows

    def frame(self) -> Frame:
        self._row() if self.is_row else self._column()
        chips = [_rects(f"chips {color}", rects, Paint(color, alpha=0.35 if pale else 1.0))
                 for (color, pale), found in self.fills.items() for rects in _same_width(found)]  # fmt: skip
        return Frame(
            badges=self.badges(), axes=self.sheet.axes(), series=(*self.series, *chips), labels=tuple(self.sheet.labels),
            marks=tuple(self.marks), legend=self.legend(),
        )  # fmt: skip

    def badges(self) -> tuple[Badge, ...]:
        timed = (Badge("measured", self.t("engine_map.measured", device=device_name(self.trace, self.t))),) if self.is_timed else ()
        return Badge("state"), *timed

    def legend(self) -> tuple[Paint, ...]:
        t, f = self.t, self.facts
        return (
            Paint("accent", t("engine_map.legend.arrow")),
            *([Paint("muted", t("engine_map.legend.clock"))] if self.is_timed else []),
            *([Paint("request-other", t("engine_map.legend.idle"), alpha=0.35)] if f.idle else []),
        )

    # ---- beside each other ----

    def _row(self) -> None:
        sheet, a, line, t = self.sheet, self.sheet.advance, self.sheet.line, self.t
        roomy = self.is_roomy
        widths = np.array([13.2, 21, 19.5, 16, 12.5, 13.2] if roomy else [6, 13.5, 13.4, 11, 8, 9])
        spare = sheet.width / a - 2 - widths.sum()
        gap = min(max(6.1, spare / 5 * 0.55), 12) * a
        widths[1] += min(max(spare - 5 * gap / a, 0), 30)
        left = (sheet.width - widths.sum() * a - 5 * gap) / 2
        top, bottom = 8.0, min(sheet.height - 2 * (line + self.bar + 4) - 8, 8 + 26 * line)
        rects, x = [], left
        for width in widths:
            rects.append((x, x + width * a, top, bottom))
            x += width * a + gap
        head = 2 * line + (10 if roomy else 4)  # name and file, or a name in two lines
        middle = (top + head + bottom) / 2
        for name, rect in zip(BOXES, rects):
            self._box(name, rect)
            self._title(t(f"engine_map.{name}"), rect)
        x0, x1, y0, y1 = rects[1]
        self._lanes_below((x0 + 8, x1 - 8, y0 + head, y1 - 8))
        self._done_below(rects[5], head)
        for i, (n, unit) in enumerate(self._flows()):
            self._arrow_right(rects[i][1] + 4, rects[i + 1][0] - 4, middle, n, "" if BOXES[i] == "cache" else unit)
        self._lines_in(rects[2], self._cache_lines(long=roomy), middle)
        for name, (x0, _, _, y1) in zip(BOXES, rects):
            self._clocks_below(name, x0, y1)
        self._share(rects[3], middle)
        self._whats_new(rects[0], middle)
        self._samples(rects[4], middle)
        self._reason()
        if roomy and len(sheet.labels) + len(BOXES) <= MAX_LABELS:
            for name, (x0, x1, y0, _) in zip(BOXES, rects):
                sheet.put(FILES[name], (x0 + x1) / 2, y0 + 6 + 1.5 * line, "muted", anchor="center", room=x1 - x0 - 4)
        for name, (x0, x1, _, y1) in zip(BOXES, rects):
            if self._no_clock(name) and len(sheet.labels) <= MAX_LABELS - 2:
                sheet.put(self._no_clock(name), (x0 + x1) / 2, y1 + 6 + line / 2, "muted", anchor="center")

    def _title(self, text: str, rect: Rect) -> None:
        """A name on one line, or on two where the box is narrow."""
        x0, x1, y0, _ = rect
        parts = [text] if self.sheet.span(text) <= x1 - x0 - 6 else wrap(text, int((x1 - x0 - 4) / self.sheet.advance))
        for i, part in enumerate(parts[:2]):
            y = y0 + 6 + self.sheet.line * (i + 0.5)
            self.sheet.put(part, (x0 + x1) / 2, y, anchor="center", weight=700, room=x1 - x0 - 2)

    def _big(self, text: str, x: float, y: float, color: str = "ink", *, room: float) -> None:
        """A centred bold text, larger where the panel has room."""
        sheet = self.sheet
        usual = sheet.font, sheet.advance
        sheet.font, sheet.advance = self.letter, self.letter * ADVANCE
        sheet.put(text, x, y, color, anchor="center", weight=700, room=room)
        sheet.font, sheet.advance = usual

    def _whats_new(self, rect: Rect, middle: float) -> None:
        """In the front end: who came."""
        names, (x0, x1, _, _) = [visible(self.trace.name(i)) for i in self.facts.new or ()], rect
        for most in range(min(len(names), 3), 0, -1):
            who = self.t("list.comma").join(names[:most])
            who += f" {self.t('engine_map.more', n=len(names) - most)}" if len(names) > most else ""
            text = self.t("engine_map.new", who=who)
            if self.sheet.span(text) <= x1 - x0 - 4 or most == 1:
                if len(self.sheet.labels) + (1 if self.is_roomy else 3) <= MAX_LABELS:
                    self._lines_in(rect, [text], middle)
                return

    def _samples(self, rect: Rect, middle: float) -> None:
        """In the sampler, where it is not a token a row: several samples begin with one row of logits."""
        f, t = self.facts, self.t
        key = "samples" if f.sampled > f.logits else "tokens"
        lines = [t("engine_map.flow.logits", n=f.logits), t(f"engine_map.sampler.{key}", n=f.sampled)]
        if f.logits and f.sampled != f.logits and len(self.sheet.labels) + 4 <= MAX_LABELS:
            self._lines_in(rect, lines, middle)

    def _flows(self) -> list[tuple[int | None, str]]:
        f, t = self.facts, self.t
        units = ("prompt", "tokens", "tokens", "logits", "tokens")
        numbers = (f.prompt_tokens, f.scheduled, f.scheduled, f.logits, f.sampled)
        return [(n, t(f"engine_map.unit.{unit}", n=n or 0)) for n, unit in zip(numbers, units)]

    def _arrow_right(self, x0: float, x1: float, y: float, n: int | None, unit: str) -> None:
        """`unit` "": the flow goes on as it was, and is not said again."""
        sheet, line = self.sheet, self.sheet.line
        half = self._thickness(n, 2.4 * line) / 2
        head = min(max(10.0, half * 1.3), (x1 - x0) * 0.5)
        if n:
            x = np.arange(x0 + 0.5, x1, dtype=np.float32)  # columns of a pixel
            tall = np.where(x < x1 - head, half, (half + 6) * (x1 - x) / head)
            self.series.append(_columns("arrow", x, y - tall, y + tall))
        else:
            self.series.append(_line("no flow", [(x0, y), (x1, y)], _NO_FLOW))
        if unit:
            self._big("?" if n is None else count(n), (x0 + x1) / 2, y - half - self.letter * 0.7 - 8, room=x1 - x0 + 8)
            sheet.put(unit, (x0 + x1) / 2, y + half + line / 2 + 8, "muted", anchor="center", room=x1 - x0 + 8)

    def _thickness(self, n: int | None, most: float) -> float:
        return max(most * (n or 0) / self.facts.widest, 2.0)

    def _lanes_below(self, box: Rect) -> None:
        """The three areas, one below the other, each with its name above its chips."""
        x0, x1, y0, y1 = box
        f, line = self.facts, self.sheet.line
        shown = self._shares()
        gap = 8 if self.is_roomy else 5
        height = (y1 - y0 - 2 * gap) / 3
        for i, (name, ids) in enumerate(zip(AREAS, (f.waiting, f.running, f.preempted))):
            top = y0 + i * (height + gap)
            self.series.append(_rects(f"area {name}", [(x0, x1, top, top + height)], _AREA))
            self.sheet.put(self.t(f"engine_map.{name}", n=len(ids)), x0 + 6, top + 1 + line / 2, room=x1 - x0 - 8)
            _, low = self._chips(ids, shown[i], (x0 + 6, x1 - 4, top + line + 2, top + height - 1), name)
            if name == "waiting":
                self.under_waiting = (x0 + 6, x1 - 4, low + 3, top + height - 1)

    def _reason(self) -> None:
        """Under the waiting chips, if there is room for all of it: why they wait."""
        sheet, (x0, x1, y0, y1) = self.sheet, self.under_waiting
        for said in self._whys():
            lines = wrap(said, int((x1 - x0) / sheet.advance))
            if y0 + len(lines) * sheet.line <= y1 + 3 and len(sheet.labels) + len(lines) <= MAX_LABELS:
                for i, text in enumerate(lines):
                    sheet.put(text, x0, y0 + (i + 0.5) * sheet.line, "muted")
                return

    def _done_below(self, rect: Rect, head: float) -> None:
        x0, x1, y0, y1 = rect
        line, ids = self.sheet.line, self.facts.done
        self.series.append(_rects("area done", [rect], _AREA))
        self.sheet.put(self.t("engine_map.done", n=len(ids)), x0 + 8, y0 + 6 + line / 2, weight=700, room=x1 - x0 - 10)
        pitch = self.chip + line + 10
        room = int((y1 - y0 - head) / pitch)
        most = min(3, room if len(ids) <= room else int((y1 - y0 - head - line) / pitch))
        for i, (seq_id, why) in enumerate(ids[:most]):
            top = y0 + head + i * pitch
            self._chip(seq_id, x0 + 8, top, "done")
            text = self.t(f"engine_map.why.{why}")
            text = text if self.sheet.span(text) <= x1 - x0 - 8 else self.t(f"engine_map.why.short.{why}")
            self.sheet.put(text, x0 + 8, top + self.chip + 2 + line / 2, room=x1 - x0 - 8)
        if len(ids) > most:
            self.sheet.put(self.t("engine_map.more", n=len(ids) - most), x0 + 8, y0 + head + most * pitch + line / 2, "muted")

    def _lines_in(self, rect: Rect, lines: Sequence[str], middle: float) -> None:
        """Lines of a box, around the height of the arrows."""
        x0, x1, line = rect[0], rect[1], self.sheet.line
        lines = [part for text in lines for part in (wrap(text, int((x1 - x0 - 6) / self.sheet.advance)) if text else ())][:6]
        for i, text in enumerate(lines):
            y = middle + (i - (len(lines) - 1) / 2) * line * 1.15
            self.sheet.put(text, (x0 + x1) / 2, y, anchor="center", room=x1 - x0 - 6)

    def _clocks_below(self, name: str, x0: float, y: float) -> None:
        sheet, line = self.sheet, self.sheet.line
        for i, clock in enumerate(CLOCKS.get(name, ()) if self.is_timed else ()):
            top = y + 4 + i * (line + self.bar + 4)
            sheet.put(self._clock(clock), x0, top + line / 2)
            self._bar(clock, x0, top + line - 1)

    # ---- one below the other ----

    def _column_height(self, gap: float) -> float:
        """Pixels that the column needs, its lanes one chip high, its arrows `gap` long."""
        lines = 5 if self.is_flat else 6 if self.is_phone else 7
        pads = sum(map(self._pad, BOXES)) + (0 if self.is_flat or self.is_phone else self.bar)
        return lines * self.sheet.line + pads + 4 * (self.chip + 3) + 5 * gap + 10

    @property
    def _text_gap(self) -> float:
        return self.sheet.font * 1.25 + 4

    def _pad(self, name: str) -> float:
        """What a box is higher than its lines: room for the bar of its last clock."""
        return 6.0 + (self.bar if name in CLOCKS and not self.is_phone else 0)

    def _column(self) -> None:
        sheet, line, f, t = self.sheet, self.sheet.line, self.facts, self.t
        least = TIGHT_GAP if self.is_tight else self._text_gap
        spare = sheet.height - self._column_height(least)
        lane = (self.chip + 3) + min(spare * 0.35 / 4, self.chip)
        gap = least + min(spare * (0.6 if self.is_tight else 0.4) / 5, 1.2 * line)
        x0, x1, y = 10.0, min(sheet.width - 10, 110 * sheet.advance), 5.0
        heights = {
            "scheduler": line + 3 * lane,
            "cache": line * (1 if self.is_flat else 2),
            "executor": line if self.is_flat or self.is_phone else 2 * line + self.bar,
        }
        tops: dict[str, float] = {}
        for name in BOXES:
            tops[name] = y
            height = heights.get(name, line) + self._pad(name)
            self._box(name, (x0, x1, y, y + height))
            sheet.put(t(f"engine_map.{name}"), x0 + 8, y + 3 + line / 2, weight=700, room=x1 - x0 - 16)
            y += height + gap
        self._lanes_right(x0, x1, tops["scheduler"] + line + self._pad("scheduler") - 4, lane)
        said = self._flow_words()
        for i, (name, (n, _)) in enumerate(zip(BOXES, self._flows())):
            top = tops[name] + heights.get(name, line) + self._pad(name)
            x = x0 + (4 if self.is_phone else 7) * sheet.advance
            self._arrow_down(x, top + 2, top + gap - 2, n, "" if self.is_tight else said[i], x1)
        self._done_right(x0, x1, y - 2, lane)
        for name in CLOCKS:
            self._clocks_right(name, x1 - 8, tops[name])
        self._box_words(tops, x0, x1)
        for name, text in (("front", said[0]), ("scheduler", said[1]), ("sampler", said[4])) if self.is_tight else ():
            x = x0 + 8 + sheet.span(t(f"engine_map.{name}")) + 1.5 * sheet.advance
            sheet.put(text, x, tops[name] + 3 + line / 2, room=x1 - 8 - x)
        if self.is_phone:
            return
        for name in BOXES:
            width = sheet.span(t(f"engine_map.{name}"))
            sheet.put(FILES[name], x0 + 8 + width + 1.5 * sheet.advance, tops[name] + 3 + line / 2, "muted")
        for name in ("front", "cache", *(CLOCKS if not f.is_timed else ())):
            sheet.put(self._no_clock(name), x1 - 8, tops[name] + 3 + line / 2, "muted", anchor="right")

    def _box_words(self, tops: dict[str, float], x0: float, x1: float) -> None:
        """What the cache and the executor did: after their names, or on a line of its own."""
        sheet, line = self.sheet, self.sheet.line
        taken, shared, freed, free = self._cache_lines()
        for name, texts in (("cache", (f"{taken} · {shared} · {freed} · {free}", f"{taken} · {shared} · {freed}")),
                            ("executor", (self._executor_line(),))):  # fmt: skip
            after = x0 + 8 + sheet.span(self.t(f"engine_map.{name}")) + 1.5 * sheet.advance
            is_beside = self.is_flat or (self.is_phone and name == "executor")
            x, y = (after, tops[name] + 3 + line / 2) if is_beside else (x0 + 8, tops[name] + 3 + 1.5 * line)
            for text in texts:
                if sheet.span(text) <= x1 - 6 - x and sheet.put(text, x, y):
                    break

    def _lanes_right(self, x0: float, x1: float, y: float, lane: float) -> None:
        """The three areas as lanes, names at the left."""
        f, sheet, shown = self.facts, self.sheet, self._shares()
        label = 12.5 * sheet.advance
        right = x1 - 8 - (0 if self.is_flat or self.is_phone else self._clock_width + sheet.advance)
        for i, (name, ids) in enumerate(zip(AREAS, (f.waiting, f.running, f.preempted))):
            top = y + i * lane
            end = right if i == 0 else x1 - 8
            self.series.append(_rects(f"area {name}", [(x0 + 8, end, top, top + lane - 3)], _AREA))
            middle = top + (lane - 3) / 2
            sheet.put(self.t(f"engine_map.{name}", n=len(ids)), x0 + 14, middle, room=label)
            used, _ = self._chips(ids, shown[i], (x0 + 14 + label, end - 4, middle - self.chip / 2, middle + self.chip / 2), name)
            if name == "waiting" and ids:
                text = next((text for text in self._whys() if sheet.span(text) <= end - used - 20), "")
                sheet.put(text, used + 12, middle, "muted")

    def _why(self, seq_id: int) -> str:
        rows = self.trace.rows("waits", self.step, self.step)
        return visible(next((reason_words(r, self.trace, self.state.language) for r in rows if r["seq_id"] == seq_id), ""))

    def _whys(self) -> list[str]:
        """Why they wait, longest first: samples that begin where their sibling's prompt ends in one sentence; else the first's."""
        if not self.facts.waiting:
            return []
        rows = self.trace.rows("waits", self.step, self.step)
        siblings = rows[rows["reason"] == WAIT_REASONS.index(WaitReason.SIBLING_PROMPT)]["seq_id"].tolist()
        ids = [i for i in self.facts.waiting if i in siblings]
        parents = {first_sample(self.trace, i) for i in ids}
        if len(ids) < len(self.facts.waiting) or len(parents) != 1:
            return [self._why(self.facts.waiting[0])]
        names, parent = self.t.names([self.trace.name(i) for i in ids], 3), self.trace.name(parents.pop())
        return [visible(self.t(f"engine_map.siblings{form}", n=len(ids), who=names, parent=parent)) for form in ("", ".short")]

    def _arrow_down(self, x: float, y0: float, y1: float, n: int | None, said: str, right: float) -> None:
        sheet = self.sheet
        half = self._thickness(n, (6 if self.is_phone else 11) * sheet.advance) / 2
        head = min(max(6.0, half * 0.5), (y1 - y0) * 0.5)
        if n:
            off = np.arange(-half - 5.5, half + 6, dtype=np.float32)  # columns of a pixel
            begin, tip = np.where(np.abs(off) <= half, y0, y1 - head), y1 - head * np.abs(off) / (half + 6)
            self.series.append(_columns("arrow", x + off, begin, tip))
        else:
            self.series.append(_line("no flow", [(x, y0), (x, y1)], _NO_FLOW))
        left = x + (5 if self.is_phone else 7) * sheet.advance
        sheet.put(said, left, (y0 + y1) / 2, room=right - left, weight=700 if n else 400)

    def _flow_words(self) -> list[str]:
        f, t = self.facts, self.t
        if f.new is None:
            first = t("engine_map.flow.unknown")
        elif f.new:
            names = t.names([self.trace.name(i) for i in f.new], 2)
            first = t("engine_map.flow.new", n=f.prompt_tokens, who=visible(names))
            first = t("engine_map.flow.new.short", n=f.prompt_tokens) if self.is_phone else first
        else:
            first = t("engine_map.flow.nobody")
        rest = (("scheduled", f.scheduled), ("computed", f.scheduled), ("logits", f.logits), ("sampled", f.sampled))
        return [first, *(t(f"engine_map.flow.{key}", n=n) for key, n in rest)]

    def _done_right(self, x0: float, x1: float, y: float, lane: float) -> None:
        sheet, ids = self.sheet, self.facts.done
        self.series.append(_rects("area done", [(x0, x1, y, y + lane - 3)], _AREA))
        middle = y + (lane - 3) / 2
        sheet.put(self.t("engine_map.done", n=len(ids)), x0 + 14, middle, weight=700)
        x = x0 + 14 + 12.5 * sheet.advance
        for i, (seq_id, why) in enumerate(ids):
            text = self.t(f"engine_map.why.{why}")
            width = self._chip_width(seq_id) + 6 + sheet.span(text) + 2 * sheet.advance
            left = len(ids) - i
            more = self.t("engine_map.more", n=left)
            if i == 3 or x + width + (sheet.span(more) if left > 1 else 0) > x1 - 4:
                sheet.put(more, x, middle, "muted")
                return
            self._chip(seq_id, x, middle - self.chip / 2, "done")
            sheet.put(text, x + self._chip_width(seq_id) + 6, middle)
            x += width

    @property
    def _clock_width(self) -> float:
        return 16.5 * self.sheet.advance

    def _clocks_right(self, name: str, right: float, top: float) -> None:
        """A box's clocks at its right: side by side where there is one line, else below each other."""
        if not self.is_timed:
            return
        width, line = self._clock_width, self.sheet.line
        clocks = CLOCKS[name]
        for i, clock in enumerate(clocks):
            x, y = (right - (len(clocks) - i) * (width + 8) + 8, top) if self.is_flat else (right - width, top + i * (line + self.bar - 2))
            self.sheet.put(self._clock(clock), x, y + 3 + line / 2, room=width + 6)
            self._bar(clock, x, y + line + 1)

    # ---- parts ----

    def _box(self, name: str, rect: Rect) -> None:
        x0, x1, y0, y1 = rect
        title = f"{self.t(f'engine_map.{name}')} ({FILES[name]}): {self._said(name)}"
        self.marks.append(Mark(f"box:{name}", x0, x1, y0, y1, title, "control", self.t(f"engine_map.about.{name}")))

    def _said(self, name: str) -> str:
        """What a box did, for its mark."""
        f, said = self.facts, self._flow_words()
        if name == "front":
            return said[0]
        if name == "scheduler":
            return self.t("list.comma").join(
                self.t(f"engine_map.{area}", n=len(ids)) for area, ids in zip(AREAS, (f.waiting, f.running, f.preempted))
            )
        if name == "cache":
            return self.t("list.comma").join(self._cache_lines())
        return self._executor_line() if name == "executor" else said[4]

    def _cache_lines(self, *, long: bool = False) -> list[str]:
        """What the cache manager did in this step, and what is free after it."""
        f, t, much = self.facts, self.t, ".long" if long else ""
        moved = [
            t(f"engine_map.cache.{key}{much}", n=n, count="?" if n is None else count(n))
            for key, n in (("taken", f.taken), ("shared", f.shared), ("freed", f.freed))
        ]
        moved = [t("engine_map.cache.step"), *moved] if long else moved
        return [*moved, t(f"engine_map.cache.free{much}", free=f.free, total=f.num_pages)]

    def _executor_line(self) -> str:
        return self.t("engine_map.failed") if self.facts.failed else self.t("requests", n=self.facts.num_works)

    def _clock(self, clock: str) -> str:
        return self.t(f"engine_map.clock.{clock}", time=duration(self.facts.clocks[clock]))

    def _no_clock(self, name: str) -> str:
        if not self.facts.is_timed and name in CLOCKS:
            return self.t("engine_map.no_clock")
        return self.t(f"engine_map.no_clock.{name}") if name in ("front", "cache") else ""

    def _bar(self, clock: str, x: float, y: float) -> None:
        """All bars of a frame share one scale."""
        longest = (12.4 if self.is_roomy or not self.is_row else 10.5) * self.sheet.advance
        span = longest * self.facts.clocks[clock] / max(self.facts.clocks.values())
        self.series.append(_rects(f"clock {clock}", [(x, x + max(span, 1.0), y, y + self.bar)], _CLOCK))

    def _share(self, box: Rect, middle: float) -> None:
        """In the executor: the step's tokens as one bar in the requests' colours, one pass for all."""
        x0, x1 = box[0] + 8, box[1] - 8
        works, total = self.trace.rows("works", self.step, self.step), max(self.facts.scheduled, 1)
        self.sheet.put(
            self._executor_line(), (x0 + x1) / 2, middle - self.chip * 0.4 - self.sheet.line * 0.7, anchor="center", room=x1 - x0 + 12
        )
        x, y0, y1 = x0, middle - self.chip * 0.4, middle + self.chip * 0.4
        for work in works:
            end = x + (x1 - x0) * int(work["num_tokens"]) / total
            self.series.append(_rects("share", [(x, max(end - 1.5, x + 0.5), y0, y1)], Paint(self.who.color(int(work["seq_id"])))))
            x = end

    def _shares(self) -> list[int]:
        """How many chips of each area get a letter: MAX_CHIPS in all, dealt round."""
        f = self.facts
        sizes, shown = [len(f.waiting), len(f.running), len(f.preempted)], [0, 0, 0]
        for _ in range(MAX_CHIPS):
            for i in sorted(range(3), key=lambda i: shown[i]):
                if shown[i] < sizes[i] and sum(shown) < MAX_CHIPS:
                    shown[i] += 1
                    break
        return shown

    def _chips(self, ids: Sequence[int], most: int, box: Rect, area: str) -> tuple[float, float]:
        """Chips from the top left, line by line; how many are left out is said. Returns where the last one ends, and their
        lower edge."""
        x0, x1, y0, y1 = box
        x, y, end = x0, y0, x0
        for i, seq_id in enumerate(ids):
            left = len(ids) - i
            more = self.sheet.span(self.t("engine_map.more", n=left))
            width = self._chip_width(seq_id)
            last_line = y + 2 * self.chip + 5 > y1 + 0.5
            room = more if left > 1 and last_line else 0
            if x + width + room > x1 and x > x0 and not last_line:
                x, y = x0, y + self.chip + 5
                last_line = y + 2 * self.chip + 5 > y1 + 0.5
                room = more if left > 1 and last_line else 0
            if i >= most or x + width + room > x1 or y + self.chip > y1 + 0.5:
                self.sheet.put(self.t("engine_map.more", n=left), x, y + self.chip / 2, "muted", room=x1 - x + 4)
                return x + more, y + self.chip
            self._chip(seq_id, x, y, area)
            end = max(end, x + width)
            x += width + 5
        return end, y + self.chip

    def _chip_width(self, seq_id: int) -> float:
        letter = self.letter * ADVANCE
        return max(text_em(self._short_name(seq_id)) * self.letter + letter, self.chip)

    def _short_name(self, seq_id: int) -> str:
        return self.sheet.fit(self.trace.name(seq_id), 8 * self.sheet.advance)

    def _chip(self, seq_id: int, x: float, y: float, area: str) -> None:
        width, color = self._chip_width(seq_id), self.who.color(seq_id)
        pale = area == "running" and seq_id in self.facts.idle
        self.fills.setdefault((color, pale), []).append((x, x + width, y, y + self.chip))
        self._big(self._short_name(seq_id), x + width / 2, y + self.chip / 2, "ink" if pale else f"on-{color}", room=width)
        said = self.t(f"engine_map.mark.{area}", who=visible(self.trace.name(seq_id))[:40])
        mark = Mark(f"seq:{seq_id}", x, x + width, y, y + self.chip, said, f"{color}-line", self._detail(seq_id, area))
        self.marks.append(mark)

    def _detail(self, seq_id: int, area: str) -> str:
        """Why it waits, how it ended, or what it computed."""
        if area == "done":
            rows = self.trace.rows("finishes", self.step, self.step)
            return next((finish_words(r, self.trace, self.state.language) for r in rows if r["seq_id"] == seq_id), "")
        works = self.trace.rows("works", self.step, self.step)
        n = int(works["num_tokens"][works["seq_id"] == seq_id].sum())
        return self.t("engine_map.mark.computed", n=n) if n else self._why(seq_id)


def _same_width(rects: Sequence[Rect]) -> list[list[Rect]]:
    """Bars of a series are equally wide."""
    groups: dict[float, list[Rect]] = {}
    for rect in rects:
        groups.setdefault(round(rect[1] - rect[0], 3), []).append(rect)
    return list(groups.values())


def _rects(name: str, rects: Sequence[Rect], paint: Paint) -> Series:
    """Filled boxes of one width, in pixels."""
    x = np.array([(r[0] + r[1]) / 2 for r in rects], np.float32)
    base, y = np.array([r[2] for r in rects], np.float32), np.array([r[3] for r in rects], np.float32)
    return Series(name, x, y, "bars", paint, float(rects[0][1] - rects[0][0]), base)


def _line(name: str, points: Sequence[tuple[float, float]], paint: Paint) -> Series:
    xy = np.array(points, np.float32)
    return Series(name, xy[:, 0].copy(), xy[:, 1].copy(), "line", paint, 2.0)


def _columns(name: str, x: np.ndarray, base: np.ndarray, y: np.ndarray) -> Series:
    """A filled shape, drawn as columns that overlap a little."""
    return Series(name, x.astype(np.float32), y.astype(np.float32), "bars", _ARROW, 1.2, base.astype(np.float32))


def summary(trace: Trace, state: ViewState) -> str:
    step, t = trace.clamp(state.step), words(state.language, WORDS)
    f = facts(trace, step)
    named = [
        t(f"engine_map.summary.{area}", n=len(ids), who=t.names([trace.name(i) for i in ids], 6))
        for area, ids in zip(AREAS, (f.waiting, f.running, f.preempted))
        if ids
    ]
    ended = [t("engine_map.summary.done", who=trace.name(i), why=t(f"engine_map.why.{why}")) for i, why in f.done[:4]]
    where = "; ".join([*named, *ended]) or t("nobody")
    unknown = t("engine_map.flow.unknown")
    blocks = unknown if f.taken is None else t("engine_map.summary.blocks", taken=f.taken, shared=f.shared, freed=f.freed)
    key = "engine_map.summary.failed" if f.failed else "engine_map.summary"
    said = t(key, step=step, where=where, tokens=t("tokens", n=f.scheduled), sampled=t("tokens", n=f.sampled), blocks=blocks)
    return said if not f.is_timed else f"{said} {t('engine_map.summary.clocks', **{k: duration(v) for k, v in f.clocks.items()})}"


# ---- asks ----


def _facts(trace: Trace, state: ViewState) -> Facts:
    return facts(trace, trace.clamp(state.step))


def _first_waiting(trace: Trace, state: ViewState) -> str:
    waiting = _facts(trace, state).waiting
    return trace.name(waiting[0]) if waiting else "nobody"


def _taken(trace: Trace, state: ViewState) -> str:
    taken = _facts(trace, state).taken
    return "?" if taken is None else str(taken)


WORDS = {
    "engine_map.front": "front end",
    "engine_map.scheduler": "scheduler",
    "engine_map.cache": "KV cache manager",
    "engine_map.executor": "model executor",
    "engine_map.sampler": "sampler",
    "engine_map.about.front": "Turns a prompt into tokens and queues the request. Its time is not part of a step.",
    "engine_map.about.scheduler": "Decides who computes what in this step, and takes the result at its end (commit).",
    "engine_map.about.cache": "Gives blocks to requests and takes them back. It works inside schedule and commit.",
    "engine_map.about.executor": "Builds one batch of all tokens and launches the model on it (build, run).",
    "engine_map.about.sampler": "Draws a token from each row of logits. It is launched inside run; settle waits for all of it.",
    "engine_map.waiting": "waiting {n:,}",
    "engine_map.running": "running {n:,}",
    "engine_map.preempted": "preempted {n:,}",
    "engine_map.done": "done {n:,}",
    "engine_map.why.stop": "done: stop",
    "engine_map.why.length": "done: length",
    "engine_map.why.abort": "done: abort",
    "engine_map.why.error": "done: error",
    "engine_map.why.short.stop": "stop",
    "engine_map.why.short.length": "length",
    "engine_map.why.short.abort": "abort",
    "engine_map.why.short.error": "error",
    "engine_map.new": "new: {who}",
    "engine_map.more": "+{n:,}",
    "engine_map.unit.prompt": "prompt",
    "engine_map.unit.tokens": ("token", "tokens"),
    "engine_map.unit.logits": ("row", "rows"),
    "engine_map.sampler.tokens": ("→ {n:,} token", "→ {n:,} tokens"),
    "engine_map.sampler.samples": ("→ {n:,} sample", "→ {n:,} samples"),
    "engine_map.flow.unknown": "the step before is not recorded",
    "engine_map.flow.new": ("new: {who}, {n:,} prompt token", "new: {who}, {n:,} prompt tokens"),
    "engine_map.flow.new.short": ("new: {n:,} prompt token", "new: {n:,} prompt tokens"),
    "engine_map.flow.nobody": "nobody new",
    "engine_map.flow.scheduled": ("{n:,} token scheduled", "{n:,} tokens scheduled"),
    "engine_map.flow.computed": ("{n:,} token and its block table", "{n:,} tokens, block tables"),
    "engine_map.flow.logits": ("{n:,} row of logits", "{n:,} rows of logits"),
    "engine_map.flow.sampled": ("{n:,} token sampled", "{n:,} tokens sampled"),
    "engine_map.cache.step": "in this step:",
    "engine_map.cache.taken": "{count} taken",
    "engine_map.cache.taken.long": ("{count} block taken", "{count} blocks taken"),
    "engine_map.cache.shared": ("{count} ref added", "{count} refs added"),
    "engine_map.cache.shared.long": ("{count} reference added", "{count} references added"),
    "engine_map.cache.freed": "{count} freed",
    "engine_map.cache.freed.long": ("{count} block freed", "{count} blocks freed"),
    "engine_map.cache.free": "{free:,} of {total:,} free",
    "engine_map.cache.free.long": "then {free:,} of {total:,} free",
    "engine_map.siblings": ("{who} starts from {parent}'s prompt", "{who} start from {parent}'s prompt"),
    "engine_map.siblings.short": "from {parent}'s prompt",
    "engine_map.failed": "failed",
    "engine_map.clock.schedule": "schedule {time}",
    "engine_map.clock.commit": "commit {time}",
    "engine_map.clock.build": "build {time}",
    "engine_map.clock.run": "run {time}",
    "engine_map.clock.settle": "settle {time}",
    "engine_map.no_clock": "no time",
    "engine_map.no_clock.front": "not timed",
    "engine_map.no_clock.cache": "inside schedule",
    "engine_map.measured": "times: {device}",
    "engine_map.legend.arrow": "arrow width: tokens",
    "engine_map.legend.clock": "bar: time",
    "engine_map.legend.idle": "running, but computed nothing",
    "engine_map.mark.waiting": "{who} is waiting",
    "engine_map.mark.running": "{who} is running",
    "engine_map.mark.preempted": "{who} is preempted: it lost its blocks and waits to come back",
    "engine_map.mark.done": "{who} is done",
    "engine_map.mark.computed": ("{n:,} token computed in this step", "{n:,} tokens computed in this step"),
    "engine_map.summary": "Step {step:,}: {where}. {tokens} scheduled, {sampled} sampled; {blocks}.",
    "engine_map.summary.failed": "Step {step:,} failed: {where}. {tokens} scheduled, {sampled} sampled; {blocks}.",
    "engine_map.summary.waiting": "{who} waiting",
    "engine_map.summary.running": "{who} running",
    "engine_map.summary.preempted": "{who} preempted",
    "engine_map.summary.done": "{who} {why}",
    "engine_map.summary.blocks": "blocks: {taken:,} taken, {shared:,} references added, {freed:,} freed",
    "engine_map.summary.clocks": "Schedule {schedule}, build {build}, run {run}, settle {settle}, commit {commit}.",
}


VIEW = View(
    name="engine_map",
    title="Engine map",
    question="Where is everybody, and what flows through the engine in this step?",
    figure=figure,
    summary=summary,
    words=WORDS,
    asks=(
        Ask("How many tokens did the scheduler schedule in this step?", lambda trace, state: str(_facts(trace, state).scheduled)),
        Ask("How many requests sit in the running area?", lambda trace, state: str(len(_facts(trace, state).running))),
        Ask("Which request is first in the waiting area (nobody if it is empty)?", _first_waiting),
        Ask("How many blocks did the KV cache manager newly take in this step?", _taken),
        Ask("How many tokens were sampled in this step?", lambda trace, state: str(_facts(trace, state).sampled)),
    ),
    order=50,
)
