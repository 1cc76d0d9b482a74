"""Speed ladder: how much faster does each thing make the same requests?

A row is a rung of the newest LadderRun. As bars: tokens a second of all requests together on a linear axis that begins at
zero, with the factor over the first measured rung; the talk's factor is a line at as many times the first bar. As a race
(selection "race:k", k of RACE): the first request's answer as it stood at that moment on each rung, from the times at which
the host had its tokens, with the count and speed of all requests; the mark "race:play" has the browser go through the moments.
All numbers are clocks of the runs; what was not run says why. The step shown plays no part.

Rejected: a logarithmic axis (equal factors look alike, and the talk's point is how unlike they are), a race by the engine's
steps (rungs without an engine have none).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from engine.artifacts import LadderRun, Rung, of_kind
from engine.trace import Trace
from viz.layout import Sheet, message, too_small, visible
from viz.measured import brief, first_fit, fit_lines, put_lines, times, window
from viz.theme import duration, percent
from viz.view import Ask, Badge, Frame, Mark, Offer, Paint, Series, View, ViewState
from viz.words.catalogue import Words, words

TALK = (5.97, 94.84, 15.88)  # tokens a second before and after, and the factor
RACE = 24  # moments of a race
WIDE = 84  # characters: from here on the rows have columns
BAR, FASTEST, LINE = Paint("request-0"), Paint("accent"), Paint("muted")


def newest(trace: Trace) -> LadderRun | None:
    return next(iter(of_kind(trace, LadderRun)[::-1]), None)


def fastest(it: LadderRun) -> Rung | None:
    return max(it.measured, key=lambda rung: rung.per_s, default=None)


def moment_of(it: LadderRun, state: ViewState) -> int | None:
    """Which moment of the race a selection asks for; None: the bars."""
    kind, _, number = (state.selection or "").partition(":")
    return int(number) if it.measured and kind == "race" and number.isascii() and number.isdigit() and int(number) <= RACE else None


def figure(trace: Trace, state: ViewState) -> Frame:
    it = newest(trace)
    if it is None or too_small(state):
        frame = message(summary(trace, state), state, Badge("state") if it is None else _badge(it, state, None))
        return replace(frame, offers=_offers(state))
    return _Picture(it, state).frame()


class _Picture:
    """A sentence, a row a rung, below them what the chosen rung measured or the race's clock."""

    def __init__(self, it: LadderRun, state: ViewState) -> None:
        self.it, self.state = it, state
        self.t, self.sheet = words(state.language, WORDS), Sheet(state)
        self.at = moment_of(it, state)
        self.first, self.best = next(iter(it.measured), None), fastest(it)
        self.chosen = self._chosen()
        sheet = self.sheet
        tall, room = sheet.height / sheet.line, sheet.width - 24
        said = race_sentences(it, self.at, self.t) if self.at is not None else sentences(it, self.t)
        self.head = fit_lines(sheet, room, 2 if tall >= 13 else 1, *said)
        self.top = 8 + len(self.head) * sheet.line + 4
        self.foot = self._foot(tall, room)
        under = sheet.line * 1.3 if self.at is not None else len(self.foot) * sheet.line
        self.bottom = sheet.height - 8 - under - (sheet.line * 1.3 if self.at is None and it.measured else 0)
        self.marks: list[Mark] = []
        self.series: list[Series] = []
        self.has_columns = self.at is None and sheet.width >= WIDE * sheet.advance and self.bottom - self.top >= 9.5 * sheet.line
        self.rows = self._rows()
        self.left = 12 + max(sheet.span(self._name(rung)) for rung in self.rows) + sheet.font
        self.left = min(self.left, sheet.width * 0.42)

    def _chosen(self) -> Rung | None:
        kind, _, name = (self.state.selection or "").partition(":")
        return next((rung for rung in self.it.rungs if kind == "rung" and rung.name == name), self.best)

    def _foot(self, tall: float, room: float) -> list[str]:
        if self.at is not None or self.chosen is None or tall < 11:
            return []
        return fit_lines(self.sheet, room, 3 if tall >= 20 else 2 if tall >= 15 else 1, *read_out(self.it, self.chosen, self.t))

    def _rows(self) -> list[Rung]:
        """All rungs; where they have no room, those that ran, and of these the ones around the chosen one."""
        most = max(int((self.bottom - self.top - (self.sheet.line if self._lined else 0)) / self.sheet.line), 1)
        rungs = list(self.it.rungs)
        if len(rungs) > most and len(self.it.measured) > 1:
            rungs = [rung for rung in rungs if rung.state == "measured"]
        if len(rungs) <= most:
            return rungs
        at = next((i for i, rung in enumerate(rungs) if rung is self.chosen), 0)
        return [rungs[i] for i in window(len(rungs), at, most)]

    @property
    def _lined(self) -> bool:
        """The talk's line has words above it."""
        return self.at is None and self.first is not None

    def _name(self, rung: Rung) -> str:
        return rung_name(rung, self.t)

    def frame(self) -> Frame:
        sheet = self.sheet
        put_lines(sheet, self.head, 12, 8, weight=700)
        put_lines(sheet, self.foot, 12, sheet.height - 6 - len(self.foot) * sheet.line)
        top = self.top + (sheet.line if self._lined else 0)
        high = (self.bottom - top) / len(self.rows)
        self._lanes(top, high) if self.at is not None else self._bars(top, high)
        self._clock() if self.at is not None else self._button()
        return Frame(
            badges=(_badge(self.it, self.state, self.at),), axes=sheet.axes(), series=tuple(self.series), labels=tuple(sheet.labels),
            marks=tuple(self.marks), legend=self._legend(), offers=_offers(self.state),
        )  # fmt: skip

    def _legend(self) -> tuple[Paint, ...]:
        if self.at is not None:
            return (replace(BAR, label=self.t("speed_ladder.legend.progress")),)
        lines = [replace(BAR, label=self.t("speed_ladder.legend.bar"))]
        if self._lined:
            lines.append(replace(LINE, label=self.t("speed_ladder.legend.talk", low=TALK[0], high=TALK[1], times=TALK[2])))
        return tuple(lines)

    def _rect(self, name: str, x0: float, x1: float, y0: float, y1: float, paint: Paint) -> None:
        one = lambda v: np.array([v], np.float32)  # noqa: E731
        self.series.append(Series(name, one((x0 + x1) / 2), one(y1), "bars", paint, max(x1 - x0, 0.5), one(y0)))

    def _mark(self, rung: Rung, y: float, high: float) -> None:
        outline = "accent" if self.at is None and rung is self.chosen and rung.state == "measured" else None
        box = (4, self.sheet.width - 4, max(y - high / 2 + 1, 0), min(y + high / 2 - 1, self.sheet.height))
        hidden = self.at is not None  # a race says nothing of how it ends
        said = self._name(rung) if hidden else f"{self._name(rung)}: {result(self.it, rung, self.t)}"
        self.marks.append(Mark(f"rung:{rung.name}", *box, said, outline, "" if hidden else read_out(self.it, rung, self.t)[0]))

    # ---- bars ----

    def _bars(self, top: float, high: float) -> None:
        sheet = self.sheet
        right = self._columns(top, high) if self.has_columns else sheet.width - 12
        values = {rung.name: self._value(rung) for rung in self.rows}
        widest = max((sheet.span(values[r.name]) for r in self.rows if r.state == "measured"), default=0)
        end = max(right - widest - 10, self.left + 40)
        most = max([rung.per_s for rung in self.it.measured] + ([TALK[2] * self.first.per_s] if self.first else [1.0]))
        if self._lined:
            self._talk_line(top, top + high * len(self.rows), end, most)
        for i, rung in enumerate(self.rows):
            y = top + (i + 0.5) * high
            sheet.put(self._name(rung), 12, y, weight=700 if rung is self.chosen else 400, room=self.left - 18)
            if rung.state == "measured":
                x = self.left + rung.per_s / most * (end - self.left)
                half = min(high * 0.34, sheet.line * 0.6)
                self._rect(f"bar {rung.name}", self.left, max(x, self.left + 1), y - half, y + half, FASTEST if rung is self.best else BAR)
                sheet.put(values[rung.name], x + 8, y, weight=700 if rung is self.chosen else 400, room=right - x - 8)
            else:
                forms = (why_not(rung, self.t), why_not(rung, self.t, short=True))
                sheet.put(first_fit(sheet, right - self.left, *forms), self.left, y, "muted", room=right - self.left)
            self._mark(rung, y, high)

    def _value(self, rung: Rung) -> str:
        return result(self.it, rung, self.t) if rung.state == "measured" else ""

    def _talk_line(self, y0: float, y1: float, end: float, most: float) -> None:
        sheet, x = self.sheet, self.left + TALK[2] * self.first.per_s / most * (end - self.left)
        xy = np.array([[x, y0], [x, y1]], np.float32)
        self.series.append(Series("the talk", xy[:, 0].copy(), xy[:, 1].copy(), "line", replace(LINE, hatch="diagonal"), 2.0))
        long, short = (self.t(f"speed_ladder.talk{form}", times=TALK[2], low=TALK[0], high=TALK[1]) for form in ("", ".short"))
        y = y0 - sheet.line / 2
        for text in (long, short):
            for at, anchor in ((x, "center"), (x, "right"), (x, "left")):
                x0 = at - {"center": 0.5, "right": 1.0, "left": 0.0}[anchor] * sheet.span(text)
                if x0 >= 8 and x0 + sheet.span(text) <= sheet.width - 8 and sheet.put(text, at, y, "muted", anchor=anchor):
                    return

    def _columns(self, top: float, high: float) -> float:
        """What else was measured, at the right; where the bars' room ends."""
        sheet, t, x = self.sheet, self.t, self.sheet.width - 12.0
        columns: list[tuple[str, Callable[[Rung], str]]] = [
            ("busy", lambda r: percent(r.busy, 1) if r.busy is not None else "–"),
            ("times", lambda r: f"{brief(r.first_us)}, {brief(r.each_us)}"),
        ]  # fmt: skip
        if all(rung.busy is None for rung in self.it.measured):
            columns = columns[1:]
        for key, value in columns:
            title = t(f"speed_ladder.column.{key}")
            shown = [(i, value(rung)) for i, rung in enumerate(self.rows) if rung.state == "measured"]
            wide = max([sheet.span(title), *(sheet.span(text) for _, text in shown)])
            sheet.put(title, x, top - sheet.line / 2, "muted", anchor="right")
            for i, text in shown:
                if len(sheet.labels) < 37 - 2 * len(self.rows) + i:  # names and values matter more
                    sheet.put(text, x, top + (i + 0.5) * high, anchor="right")
            x -= wide + 2 * sheet.advance
        return x

    def _button(self) -> None:
        """What starts the race."""
        if not self.it.measured:
            return
        sheet = self.sheet
        y = sheet.height - 10 - len(self.foot) * sheet.line - sheet.line * 0.6
        text = first_fit(sheet, sheet.width - 24, self.t("speed_ladder.play"), self.t("speed_ladder.play.short"))
        if sheet.put(text, 16, y, "accent", weight=700):
            half = sheet.line * 0.55
            self.marks.append(Mark("race:play", 8, 24 + sheet.span(text), y - half, y + half, self.t("speed_ladder.play"), "accent"))

    # ---- the race ----

    def _lanes(self, top: float, high: float) -> None:
        sheet, it, now = self.sheet, self.it, race_us(self.it, self.at)
        total = it.new_tokens * len(it.prompt_tokens)
        said = {rung.name: count_said(it, rung, now, self.t) for rung in self.rows if rung.state == "measured"}
        widest = max(sheet.span(text) for text in said.values()) if said else 0
        right = sheet.width - 12
        for i, rung in enumerate(self.rows):
            y = top + (i + 0.5) * high
            sheet.put(self._name(rung), 12, y, room=self.left - 18, weight=700)
            self._mark(rung, y, high)
            if rung.state != "measured":
                text = first_fit(sheet, right - self.left, why_not(rung, self.t), why_not(rung, self.t, short=True))
                sheet.put(text, self.left, y, "muted", room=right - self.left)
                continue
            made = sum(bisect.bisect_right(row, now) for row in rung.token_us)
            thin = max(min(high * 0.16, 6.0), 3.0)
            low = min(y + sheet.line / 2 + thin, y + high / 2 - 1)
            self._rect(f"lane {rung.name}", self.left, right, low - thin, low, Paint("free"))
            if made:
                self._rect(f"made {rung.name}", self.left, self.left + made / total * (right - self.left), low - thin, low, BAR)
            sheet.put(said[rung.name], right, y, anchor="right")
            room = right - widest - 2 * sheet.advance - self.left
            typed = typed_by(rung, now)
            if typed and room > 6 * sheet.advance:
                sheet.put(_tail(sheet, typed, room), self.left, y, room=room)

    def _clock(self) -> None:
        """The race's own time: a tick a moment, each can be chosen."""
        sheet, t = self.sheet, self.t
        y, now = sheet.height - 8 - sheet.line * 0.65, race_us(self.it, self.at)
        play, half = t("speed_ladder.again"), sheet.line * 0.55
        sheet.put(play, 16, y, "accent", weight=700)
        x0 = 32 + sheet.span(play)
        self.marks.append(Mark("race:play", 8, x0 - 8, y - half, y + half, t("speed_ladder.play"), "accent"))
        said = duration(race_us(self.it, RACE))
        x1 = sheet.width - 24 - max(sheet.span(said), sheet.span(duration(now)))
        sheet.put(said, sheet.width - 12, y, "muted", anchor="right")
        step = (x1 - x0) / (RACE + 1)
        self._rect("race", x0, x1, y - 3, y + 3, Paint("free"))
        self._rect("race so far", x0, x0 + (self.at + 0.5) * step, y - 3, y + 3, BAR)
        for k in range(RACE + 1):
            text = t("speed_ladder.moment", time=duration(race_us(self.it, k)))
            outline = "accent" if k == self.at else None
            self.marks.append(Mark(f"race:{k}", x0 + k * step, x0 + (k + 1) * step, y - half, y + half, text, outline))


def _tail(sheet: Sheet, text: str, room: float) -> str:
    """The end of a text, as much as fits."""
    whole, text = text, visible(text[-int(room / sheet.advance) - 2 :]).strip()
    if sheet.span(text) <= room and len(text) >= len(whole.strip()):
        return text
    begin = next((i for i in range(len(text)) if sheet.span("…" + text[i:]) <= room), len(text))
    return "…" + text[begin:]


# ---- the race's numbers ----


def race_us(it: LadderRun, at: int) -> int:
    """The time at a moment of the race; it ends with the slowest rung."""
    return round(max((rung.wall_us for rung in it.measured), default=0) * at / RACE)


def typed_by(rung: Rung, now: int) -> str:
    """The first request's answer as it stood, of a long one the end."""
    there = bisect.bisect_right(rung.token_us[0], now) if rung.token_us else 0
    return "".join(rung.pieces[max(there - 200, 0) : there])


def count_said(it: LadderRun, rung: Rung, now: int, t: Words) -> str:
    """How many tokens of all requests were there, and how many a second so far."""
    made = sum(bisect.bisect_right(row, now) for row in rung.token_us)
    if now >= rung.wall_us:
        return t("speed_ladder.lane.done", time=duration(rung.wall_us), speed=per_second(rung.per_s))
    return t("speed_ladder.lane", made=made, all=rung.num_tokens, speed=per_second(made / now * 1e6 if now else 0.0))


# ---- words ----


def per_second(value: float) -> str:
    """Three digits: "0", "5.97", "23.8", "1,230"."""
    return f"{value:,.0f}" if value >= 99.95 or not value else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def rung_name(rung: Rung, t: Words) -> str:
    key = f"speed_ladder.rung.{rung.name}"
    return t(key) if t.has(key) else visible(rung.name)[:24]


def factor(it: LadderRun, rung: Rung) -> float:
    """Times the first measured rung's speed."""
    return rung.per_s / it.measured[0].per_s


def result(it: LadderRun, rung: Rung, t: Words) -> str:
    if rung.state != "measured":
        return why_not(rung, t)
    return t("speed_ladder.value", speed=per_second(rung.per_s), times=times(factor(it, rung)))


def why_not(rung: Rung, t: Words, short: bool = False) -> str:
    """Why a rung has no bar."""
    if rung.state == "skipped":
        return t("speed_ladder.skipped.short") if short else t("speed_ladder.skipped", why=t(f"speed_ladder.why.{rung.why or 'none'}"))
    if rung.state == "failed" and not short:
        return t("speed_ladder.failed", why=visible(rung.detail)[:200])
    return t(f"speed_ladder.state.{rung.state}")


def sentences(it: LadderRun, t: Words) -> tuple[str, ...]:
    """What was gained, the longest form first."""
    best, n = fastest(it), len(it.prompt_tokens)
    if best is None:
        return (t("speed_ladder.says.none", n=n, new=it.new_tokens),)
    first = it.measured[0]
    fields = {
        "best": rung_name(best, t), "speed": per_second(best.per_s), "first": rung_name(first, t), "speed0": per_second(first.per_s),
        "times": times(factor(it, best)), "n": n, "new": it.new_tokens,
    }  # fmt: skip
    ran = len(it.measured)
    more = "" if it.is_over else " " + t("speed_ladder.says.goes_on", ran=ran, all=len(it.rungs))
    stopped = next((r for r in it.rungs if r.state in ("cancelled", "late")), None)
    more += "" if stopped is None else " " + t(f"speed_ladder.says.{stopped.state}", ran=ran, all=len(it.rungs))
    short = t("speed_ladder.says.short", **fields)
    return t("speed_ladder.says", **fields) + more, short + more, short


def race_sentences(it: LadderRun, at: int, t: Words) -> tuple[str, ...]:
    now, n = race_us(it, at), len(it.prompt_tokens)
    if not at:
        return t("speed_ladder.race.start", n=n, new=it.new_tokens), t("speed_ladder.race.start.short")
    done = sum(rung.wall_us <= now for rung in it.measured)
    fields = {"time": duration(now), "done": done, "all": len(it.measured), "n": done}
    return t("speed_ladder.race", **fields), t("speed_ladder.race.short", **fields)


def read_out(it: LadderRun, rung: Rung, t: Words) -> tuple[str, ...]:
    """All that was measured of a rung, the longest form first."""
    name = rung_name(rung, t)
    if rung.state != "measured":
        return (f"{name}: {why_not(rung, t)}",)
    fields = {
        "name": name, "value": result(it, rung, t), "wall": duration(rung.wall_us), "first": brief(rung.first_us),
        "each": brief(rung.each_us), "low": per_second(min(rung.runs)), "high": per_second(max(rung.runs)), "n": len(rung.runs),
        "busy": t("speed_ladder.busy", share=percent(rung.busy, 1)) if rung.busy is not None else t("speed_ladder.busy.none"),
        "same": t("speed_ladder.same") if not rung.num_differ else t(
            "speed_ladder.differ", n=rung.num_differ, all=rung.num_tokens, requests=rung.differing),
    }  # fmt: skip
    return t("speed_ladder.read", **fields), t("speed_ladder.read.short", **fields), t("speed_ladder.read.shortest", **fields)


def _badge(it: LadderRun, state: ViewState, at: int | None) -> Badge:
    key = "speed_ladder.badge" if at is None else "speed_ladder.badge.replayed"
    return Badge("measured", words(state.language, WORDS)(key, device=visible(it.device)[:60], dtype=visible(it.dtype)[:12]))


def _offers(state: ViewState) -> tuple[Offer, ...]:
    said = words(state.language, WORDS)("speed_ladder.offer")
    return (Offer("ladder", said, "ladder", ((said, {}),)),)


def summary(trace: Trace, state: ViewState) -> str:
    t, it = words(state.language, WORDS), newest(trace)
    if it is None:
        return t("speed_ladder.empty")
    at = moment_of(it, state)
    if at is not None:
        now = race_us(it, at)
        lanes = [f"{rung_name(r, t)}: {count_said(it, r, now, t)}" for r in it.measured] if at else []
        return " ".join([race_sentences(it, at, t)[0], "; ".join(lanes)]).strip()
    rows = "; ".join(f"{rung_name(rung, t)}: {result(it, rung, t)}" for rung in it.rungs)
    return f"{sentences(it, t)[0]} {rows}"[:1990]


# ---- asks ----


def _ask(answer) -> object:
    """An answer from a ladder with at least two rungs, as bars; "" without one."""

    def found(trace: Trace, state: ViewState) -> str:
        it = newest(trace)
        return "" if it is None or len(it.measured) < 2 else answer(it)

    return found


WORDS = {
    "speed_ladder.empty": (
        "How much faster does each thing make the same requests? Press “Climb the ladder”: they run with transformers' generate first, "
        "then with this engine, one thing more switched on each time."
    ),
    "speed_ladder.offer": "Climb the ladder",
    "speed_ladder.play": "▶ Watch the race: the same answer on every rung",
    "speed_ladder.play.short": "▶ Race",
    "speed_ladder.again": "▶",
    "speed_ladder.moment": "the race at {time}",
    "speed_ladder.rung.hf_no_cache": "transformers, no cache",
    "speed_ladder.rung.hf_cache": "transformers, KV cache",
    "speed_ladder.rung.eager": "this engine, one by one",
    "speed_ladder.rung.batching": "+ paged, batched",
    "speed_ladder.rung.fused": "+ fused kernels",
    "speed_ladder.rung.graphs": "+ CUDA graphs",
    "speed_ladder.rung.overlap": "+ overlapped",
    "speed_ladder.value": "{speed} tok/s, {times}",
    "speed_ladder.column.times": "first token, then each",
    "speed_ladder.column.busy": "GPU busy",
    "speed_ladder.talk": "the talk: {low} → {high} tok/s, {times}×",
    "speed_ladder.talk.short": "talk {times}×",
    "speed_ladder.legend.bar": "tokens a second, all requests",
    "speed_ladder.legend.talk": "line: {times}× the first bar, as the talk found ({low} → {high})",
    "speed_ladder.legend.progress": "tokens so far, all requests",
    "speed_ladder.lane": "{made:,} of {all:,}, {speed} tok/s",
    "speed_ladder.lane.done": "✓ {time}, {speed} tok/s",
    "speed_ladder.skipped": "not run: {why}",
    "speed_ladder.skipped.short": "not run",
    "speed_ladder.failed": "failed: {why}",
    "speed_ladder.state.waits": "not yet",
    "speed_ladder.state.cancelled": "not run: cancelled",
    "speed_ladder.state.late": "not run to its end: out of time",
    "speed_ladder.state.failed": "failed",
    "speed_ladder.why.none": "no reason is given",
    "speed_ladder.why.no_peer": "transformers has no model here",
    "speed_ladder.why.no_memory": "no memory for a second copy of the weights",
    "speed_ladder.why.no_kernels": "needs Triton kernels and a GPU",
    "speed_ladder.why.fused_off": "the knob “fused” is off",
    "speed_ladder.why.no_graphs": "a CPU has no CUDA graphs",
    "speed_ladder.why.no_overlap": "a CPU computes a step while it is asked to: nothing overlaps",
    "speed_ladder.says": (
        "{best}: {speed} tokens a second, {times} as many as “{first}” ({speed0}). {n:,} request, {new:,} tokens, the same on every rung.",
        (
            "{best}: {speed} tokens a second, {times} as many as “{first}” ({speed0}). {n:,} requests, {new:,} tokens each, "
            "the same on every rung."
        ),
    ),
    "speed_ladder.says.short": "{speed0} → {speed} tokens a second: {times}.",
    "speed_ladder.says.none": (
        "{n:,} request, {new:,} tokens: no rung has been measured yet.",
        "{n:,} requests, {new:,} tokens each: no rung has been measured yet.",
    ),
    "speed_ladder.says.goes_on": "{ran:,} of {all:,} rungs so far.",
    "speed_ladder.says.cancelled": "Cancelled after {ran:,} of {all:,} rungs.",
    "speed_ladder.says.late": "Out of time: {ran:,} of {all:,} rungs ran to their end.",
    "speed_ladder.race.start": (
        "{n:,} request arrives in every lane now; each makes {new:,} tokens of it. Typed: the answer.",
        "{n:,} requests arrive at once in every lane now, {new:,} tokens each. Typed: the first one's answer.",
    ),
    "speed_ladder.race.start.short": "All lanes start now.",
    "speed_ladder.race": (
        "After {time}, {done:,} of {all:,} lanes is done with all its requests. Typed: the first one's answer.",
        "After {time}, {done:,} of {all:,} lanes are done with all their requests. Typed: the first one's answer.",
    ),
    "speed_ladder.race.short": "After {time}: {done:,} of {all:,} lanes done.",
    "speed_ladder.read": (
        (
            "{name}: {value}. {wall} in all ({n:,} run); first token after {first} (waiting counts), then one every "
            "{each} (medians). {busy} {same}"
        ),
        (
            "{name}: {value}. {wall} in all ({n:,} runs: {low} to {high}); first token after {first} (waiting counts), then one every "
            "{each} (medians). {busy} {same}"
        ),
    ),
    "speed_ladder.read.short": "{name}: {value}. First token after {first}, then one every {each}. {same}",
    "speed_ladder.read.shortest": "{name}: first token {first}, then {each} each",
    "speed_ladder.busy": "GPU busy {share}.",
    "speed_ladder.busy.none": "How busy the device was is not known.",
    "speed_ladder.same": "Its tokens are the first rung's.",
    "speed_ladder.differ": (
        "{n:,} of {all:,} tokens differs from the first rung's (requests: {requests:,}).",
        "{n:,} of {all:,} tokens differ from the first rung's (requests: {requests:,}).",
    ),
    "speed_ladder.badge": "clocks of each rung: {device}, {dtype}",
    "speed_ladder.badge.replayed": "replayed by its measured times: {device}, {dtype}",
}

VIEW = View(
    name="speed_ladder",
    title="Speed ladder",
    question="How much faster does each thing make the same requests?",
    figure=figure,
    summary=summary,
    words=WORDS,
    asks=(
        Ask("How many tokens a second does the first bar stand for?", _ask(lambda it: per_second(it.measured[0].per_s))),
        Ask("How many tokens a second does the longest bar stand for?", _ask(lambda it: per_second(fastest(it).per_s))),
        Ask("How many times as fast as the first bar is the longest?", _ask(lambda it: times(factor(it, fastest(it))))),
        Ask("How many rungs have no bar?", _ask(lambda it: str(len(it.rungs) - len(it.measured)))),
        Ask("How many tokens a second did transformers make with its cache?", _ask(
            lambda it: next((per_second(r.per_s) for r in it.measured if r.name == "hf_cache"), ""))),
    ),
    order=90,
)  # fmt: skip
