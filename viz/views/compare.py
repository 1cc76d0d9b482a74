"""Compare: what does one mode of the engine save over another, for the same requests?

The newest Comparison of the trace, or the one that is selected: the same requests and seeds, run twice. Both runs lie on one axis of engine time: a
row a request, a cell a step (prompt tokens, one token, recomputation, waiting). Under each run is the curve that the
knob is about. One sentence says the difference in numbers. Times are measured, the rest is counted from the records of
both runs; the step shown plays no part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.trace import Comparison, ModeRun, Pass, Trace
from viz.layout import Sheet, message, too_small, visible, wrap
from viz.select import comparison, hues
from viz.theme import NUM_REQUEST_COLORS, duration, percent, request_color
from viz.view import Ask, Badge, Frame, Mark, Paint, Raster, Series, View, ViewState
from viz.words.catalogue import Words, cut, words

_HUES = [request_color(i) for i in range(NUM_REQUEST_COLORS)] + [request_color(None)]
_KINDS = {Pass.DECODE: None, Pass.PREFILL: "dots", Pass.RECOMPUTE: "cross"}
_PAINTS = (*(Paint(hue, hatch=hatch) for hue in _HUES for hatch in _KINDS.values()), Paint("free", hatch="diagonal"))
_WAITS, _CLEAR = len(_PAINTS) - 1, 255
SEPARATED = 4  # px of a step, from which on its cell is drawn apart from the next
FINE = 5  # raster rows a request, the last one a gap
SAMPLES = 600  # most points of a curve


def chosen(trace: Trace, state: ViewState) -> Comparison | None:
    """The selected one; else the newest."""
    return comparison(trace, state.selection) or comparison(trace)


# ---- what was counted ----


@dataclass(frozen=True)
class Measured:
    """A run in arrays. Ends are engine time in µs."""

    run: ModeRun
    prompts: tuple[int, ...]
    max_num_seqs: int
    page_size: int

    @cached_property
    def start(self) -> np.ndarray:
        return np.array(self.run.start_us, np.int64)

    @cached_property
    def end(self) -> np.ndarray:
        return np.maximum.accumulate(self.start + np.array(self.run.step_us, np.int64))

    @cached_property
    def works(self) -> np.ndarray:
        """int64 [works, 5]: step, sequence, start, num_tokens, Pass."""
        return np.array(self.run.works, np.int64).reshape(-1, 5)

    @cached_property
    def tokens(self) -> np.ndarray:
        """int64 [tokens, 2]: step, sequence."""
        return np.array(self.run.tokens, np.int64).reshape(-1, 2)

    @property
    def num_steps(self) -> int:
        return len(self.start)

    @property
    def total_us(self) -> int:
        return max(int(self.end[-1]), 1)

    def per_step(self, rows: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(rows, weights, self.num_steps)

    @cached_property
    def computed(self) -> np.ndarray:
        """Tokens a step."""
        return self.per_step(self.works[:, 0], self.works[:, 3])

    @cached_property
    def prompt_tokens(self) -> np.ndarray:
        """Prompt tokens computed a step."""
        lengths = np.array(self.prompts, np.int64)[self.works[:, 1]]
        return self.per_step(self.works[:, 0], np.clip(lengths - self.works[:, 2], 0, self.works[:, 3]))

    @cached_property
    def idle(self) -> np.ndarray:
        """Slots without work a step."""
        return np.maximum(self.max_num_seqs - self.per_step(self.works[:, 0]), 0)

    @property
    def idle_share(self) -> float:
        return float(self.idle.sum() / (self.max_num_seqs * self.num_steps))

    @cached_property
    def held(self) -> np.ndarray:
        return np.array(self.run.held, np.int64)

    @cached_property
    def filled(self) -> np.ndarray:
        """Blocks' worth of tokens that the held blocks store."""
        return np.array(self.run.used, np.int64) / self.page_size

    @property
    def empty_share(self) -> float:
        return 1 - float(self.filled.sum() / max(self.held.sum(), 1))

    @cached_property
    def gaps(self) -> np.ndarray:
        """µs that the one who waited longest for another token had waited when a step gave it; 0 where nobody got one."""
        found = np.zeros(self.num_steps)
        last: dict[int, int] = {}
        for step, sequence in self.tokens.tolist():
            if sequence in last:
                found[step] = max(found[step], self.end[step] - self.end[last[sequence]])
            last[sequence] = step
        return found

    def last_token(self, sequence: int) -> int:
        """The step that gave a sequence its last token; -1 if it got none."""
        steps = self.tokens[self.tokens[:, 1] == sequence, 0]
        return int(steps[-1]) if len(steps) else -1

    def first_token_us(self, sequence: int) -> int | None:
        steps = self.tokens[self.tokens[:, 1] == sequence, 0]
        return int(self.end[steps[0]]) if len(steps) else None


def measured(it: Comparison) -> tuple[Measured, Measured]:
    one, other = it.runs
    return tuple(Measured(run, it.num_prompt_tokens, it.max_num_seqs, it.page_size) for run in (one, other))


def kind_of(it: Comparison) -> str:
    """Which curve and sentence: the knob, and for the cache the mode that is not paging."""
    values = {run.value for run in it.runs}
    return it.knob if it.knob != "mode" else "contiguous" if "contiguous" in values else "none"


_CURVES = {
    "none": lambda m: (np.cumsum(m.computed),),
    "contiguous": lambda m: (m.held, m.filled),
    "chunked_prefill": lambda m: (m.gaps / 1000,),
    "batching": lambda m: (m.idle,),
    "prefix_caching": lambda m: (np.cumsum(m.prompt_tokens),),
}


def sentences(it: Comparison, t: Words) -> list[str]:
    """The difference in numbers, the longest form first."""
    a, b = measured(it)
    kind, other = kind_of(it), t(f"compare.value.{it.knob}.{it.runs[1].value}")
    key = f"compare.says.{kind}"
    numbers = {
        "other": other[:1].upper() + other[1:],
        "time": duration(b.total_us), "time_a": duration(a.total_us), "time_x": _times(b.total_us, a.total_us),
        "tokens": int(b.computed.sum()), "tokens_a": int(a.computed.sum()), "tokens_x": _times(b.computed.sum(), a.computed.sum()),
        "prompt": int(b.prompt_tokens.sum()), "prompt_a": int(a.prompt_tokens.sum()),
        "prompt_x": _times(b.prompt_tokens.sum(), a.prompt_tokens.sum()),
        "gap": duration(b.gaps.max()), "gap_a": duration(a.gaps.max()), "gap_x": _times(b.gaps.max(), a.gaps.max()),
        "most": int(b.computed.max()), "most_a": int(a.computed.max()), "steps": b.num_steps, "steps_a": a.num_steps,
        "held": int(b.held.max()), "held_a": int(a.held.max()), "empty": percent(b.empty_share, 1), "empty_a": percent(a.empty_share, 1),
        "idle": percent(b.idle_share, 1), "idle_a": percent(a.idle_share, 1),
    }  # fmt: skip
    differ = [name for name, same in zip(it.names, it.same) if not same]
    end = t("compare.differ", who=t.names([visible(name) for name in differ])) if differ else t("compare.same")
    long, short = t(key, **numbers), t(f"{key}.short", **numbers)
    return [f"{long} {end}", *([f"{short} {end}"] if differ else [long]), short]


def _times(value: float, base: float) -> str:
    return "–" if not base else f"{value / base:.1f}×" if value >= base else f"{value / base:.2f}×"


# ---- the picture ----


def figure(trace: Trace, state: ViewState) -> Frame:
    it = chosen(trace, state)
    if it is None:
        return message(summary(trace, state), state, Badge("state"))
    badge = _badge(trace, words(state.language, WORDS))
    if too_small(state):
        return message(summary(trace, state), state, badge)
    return _Picture(trace, state, it, badge).frame()


def _badge(trace: Trace, t: Words) -> Badge:
    device = visible(str(trace.meta.get("device") or t("badge.recorded.nowhere")))[:80]
    return Badge("measured", t("compare.measured", device=device))


class _Picture:
    """The sentence, two lanes of equal height on one axis of time, the axis below."""

    def __init__(self, trace: Trace, state: ViewState, it: Comparison, badge: Badge) -> None:
        self.trace, self.state, self.it, self.badge = trace, state, it, badge
        self.t, self.sheet = words(state.language, WORDS), Sheet(state)
        self.lanes = measured(it)
        self.ids = self._ids()
        self.kind = kind_of(it)
        self.curves = [_CURVES[self.kind](lane) for lane in self.lanes]
        self.highest = max(float(c.max()) for curves in self.curves for c in curves) or 1.0
        self.unit = self.t(f"compare.curve.{self.kind}")
        sheet, font = self.sheet, self.sheet.font
        names = max(sheet.span(cut(visible(name), 6)) for name in it.names)
        self.left = round(max(names, min(sheet.span(self.unit), sheet.width * 0.2), sheet.span(self._top())) + font)
        self.right = sheet.width - 12
        self.end = _nice(max(lane.total_us for lane in self.lanes))
        self._heights()

    def _ids(self) -> list[int | None]:
        """Whose rows these are: the sequences of the room, by their names."""
        known = {info.name: seq_id for seq_id, info in self.trace.sequences.items()}
        return [known.get(name) for name in self.it.names]

    def _top(self) -> str:
        return f"{self.highest:,.0f}" if self.highest >= 10 else f"{self.highest:.1f}"

    def _heights(self) -> None:
        sheet = self.sheet
        most = 3 if sheet.height >= 16 * sheet.line else 2 if sheet.height >= 11 * sheet.line else 1
        columns = int((sheet.width - 24) / sheet.advance)
        forms = [wrap(text, columns) for text in sentences(self.it, self.t)]
        self.lines = next((lines for lines in forms if len(lines) <= most), forms[-1][:most])
        self.lane_top = 6 + len(self.lines) * sheet.line + 4
        self.lane_height = (sheet.height - self.lane_top - sheet.line - 8) / 2
        room = self.lane_height - sheet.line - 14
        rows = len(self.it.names)
        self.curve = min(room * 0.42, 4.2 * sheet.line) if room >= 3.2 * sheet.line else 0.0
        self.row = min((room - self.curve - (10 if self.curve else 0)) / rows, 2 * sheet.line)

    def frame(self) -> Frame:
        sheet = self.sheet
        for i, line in enumerate(self.lines):
            sheet.put(line, 12, 6 + (i + 0.5) * sheet.line, weight=700, room=sheet.width - 24)
        axes, rasters, series, marks = sheet.axes(), [], [], []
        hue = self._hues()
        for i, lane in enumerate(self.lanes):
            top = self.lane_top + i * self.lane_height
            y0 = top + sheet.line + 4
            y1 = y0 + self.row * len(self.it.names)
            axes |= sheet.data_axes(2 + i, (0, self.end), (0, len(self.it.names)), (self.left, self.right, y0, y1))
            rasters.append(self._cells(i, lane, hue))
            series.append(self._border(i, lane, y0, y1))
            self._title(i, lane, top)
            self._names(y0)
            marks += self._marks(i, lane, hue)
            if self.curve:
                c0, c1 = y1 + 10, y1 + 10 + self.curve
                axes |= sheet.data_axes(4 + i, (0, self.end), (self.highest * 1.08, 0), (self.left, self.right, c0, c1))
                series += self._curve(i, lane)
                self._curve_words(c0, c1)
        self._ticks()
        return Frame(
            badges=(self.badge,), axes=axes, rasters=tuple(rasters), series=tuple(series), labels=tuple(sheet.labels),
            marks=tuple(marks), legend=self._legend(),
        )  # fmt: skip

    def _hues(self) -> list[int | None]:
        known = hues(self.trace, tuple(i for i in self.ids if i is not None), self.state.selection)
        return [k % NUM_REQUEST_COLORS if i is None else known[i] for k, i in enumerate(self.ids)]

    def _cells(self, number: int, lane: Measured, hue: list[int | None]) -> Raster:
        """A column a pixel: what each request did in the step that ran then."""
        rows, wide = len(self.it.names), int(self.right - self.left)
        grid = np.full((rows, lane.num_steps), _CLEAR, np.uint8)
        for sequence, first, last, _ in lane.run.waits:
            grid[sequence, first : last + 1] = _WAITS
        codes = np.array([NUM_REQUEST_COLORS if h is None else h for h in hue], np.int64)
        if len(lane.works):
            grid[lane.works[:, 1], lane.works[:, 0]] = codes[lane.works[:, 1]] * len(_KINDS) + lane.works[:, 4]
        at = (np.arange(wide) + 0.5) * self.end / wide
        ran = np.searchsorted(lane.start, at, side="right") - 1
        inside = (ran >= 0) & (at <= lane.total_us)
        values = np.where(inside, grid[:, np.clip(ran, 0, lane.num_steps - 1)], _CLEAR).astype(np.uint8)
        edges = np.flatnonzero(np.diff(ran) > 0)
        values[:, edges[np.diff(edges, prepend=-1) >= SEPARATED]] = _CLEAR
        lines = np.repeat(values, FINE, 0)
        lines[FINE - 1 :: FINE] = _CLEAR
        return Raster(f"run {number + 1}", np.ascontiguousarray(lines), 0, self.end, 0, rows, _PAINTS, axes=f"x{number + 2}y{number + 2}")

    def _border(self, number: int, lane: Measured, y0: float, y1: float) -> Series:
        """Where the run ends."""
        x = self.left + lane.total_us / self.end * (self.right - self.left)
        return Series(f"end of run {number + 1}", np.array([x, x], np.float32), np.array([y0, y1], np.float32), "line", Paint("ink"), 2.0)

    def _curve(self, number: int, lane: Measured) -> list[Series]:
        """Values hold from one step to the next; many steps are thinned to their highest."""
        made, axes = [], f"x{number + 4}y{number + 4}"
        group = -(-lane.num_steps // SAMPLES)
        begins = np.arange(0, lane.num_steps, group)
        x = np.append(lane.start[begins], lane.total_us).astype(np.float32)
        for k, values in enumerate(self.curves[number]):
            y = np.maximum.reduceat(values, begins)
            paint = Paint("accent") if k == 0 else Paint("muted")
            made.append(Series(f"curve {number + 1}.{k + 1}", x, np.append(y, y[-1]).astype(np.float32), "steps", paint, 2.5, axes=axes))
        return made

    # ---- words ----

    def _said(self, number: int) -> str:
        value = self.t(f"compare.value.{self.it.knob}.{self.it.runs[number].value}")
        return value[:1].upper() + value[1:]

    def _title(self, number: int, lane: Measured, top: float) -> None:
        sheet, t = self.sheet, self.t
        numbers = {"mode": self._said(number), "steps": lane.num_steps, "tokens": int(lane.computed.sum()), "time": duration(lane.total_us)}
        for key in ("compare.lane", "compare.lane.short", "compare.lane.shorter", "compare.lane.shortest"):
            if sheet.span(t(key, **numbers)) <= sheet.width - 24:
                break
        sheet.put(t(key, **numbers), 12, top + sheet.line / 2, room=sheet.width - 24)

    def _names(self, y0: float) -> None:
        for k, name in enumerate(self.it.names):
            if len(self.sheet.labels) < 30:
                y = y0 + (k + 0.5 - 0.5 / FINE) * self.row
                self.sheet.put(cut(visible(name), 6), self.left - 8, y, anchor="right", room=self.left - 8, weight=700)

    def _curve_words(self, y0: float, y1: float) -> None:
        sheet = self.sheet
        at = y1 - (y1 - y0) / 1.08
        sheet.put(self._top(), self.left - 8, max(at, y0 + sheet.font * 0.65), "muted", anchor="right", room=self.left - 8)
        lines = wrap(self.unit, max(int((self.left - 10) / sheet.advance), 3))
        for i, line in enumerate(lines):
            sheet.put(line, self.left - 8, y1 - (len(lines) - 1 - i) * sheet.line - sheet.font * 0.65, "muted", anchor="right")

    def _ticks(self) -> None:
        sheet, y = self.sheet, self.sheet.height - 4 - self.sheet.line / 2
        sheet.put(self.t("compare.time"), self.left - 8, y, "muted", anchor="right", room=self.left - 10)
        widest = max(sheet.span(duration(part * self.end)) for part in (0.25, 0.5, 0.75, 1.0))
        parts = (0.0, 0.25, 0.5, 0.75, 1.0) if 5.5 * widest < self.right - self.left else (0.0, 0.5, 1.0)
        for part in parts:
            said, anchor = duration(part * self.end) if part else "0", "left" if not part else "right" if part == 1 else "center"
            sheet.put(said, self.left + part * (self.right - self.left), y, "muted", anchor=anchor)

    def _marks(self, number: int, lane: Measured, hue: list[int | None]) -> list[Mark]:
        marks, t = [], self.t
        for k, name in enumerate(self.it.names):
            mine = lane.works[lane.works[:, 1] == k]
            first, last = lane.first_token_us(k), lane.last_token(k)
            if first is None:
                text = t("compare.mark.nothing", who=visible(name), mode=self._said(number))
            else:
                text = t(
                    "compare.mark", who=visible(name), mode=self._said(number), first=duration(first), end=duration(int(lane.end[last])),
                    tokens=int(mine[:, 3].sum()), n=int(np.count_nonzero(lane.tokens[:, 1] == k)),
                )  # fmt: skip
            there = [*mine[:1, 0].tolist(), *(w[1] for w in lane.run.waits if w[0] == k)]
            x0 = float(lane.start[min(there)]) if there else 0.0
            x1 = max(float(lane.end[last]) if last >= 0 else lane.total_us, x0 + self.end / 100)
            ident = f"seq:{self.ids[k]}" if self.ids[k] is not None else f"run:{k}"
            marks.append(
                Mark(ident, x0, x1, k, k + 1 - 1 / FINE, text, f"{request_color(hue[k])}-line", axes=f"x{number + 2}y{number + 2}")
            )
        return marks

    def _legend(self) -> tuple[Paint, ...]:
        t, kinds = self.t, {int(k) for lane in self.lanes for k in np.unique(lane.works[:, 4])}
        cells = [Paint("request-other", t(f"compare.legend.{k.name.lower()}"), hatch) for k, hatch in _KINDS.items() if k in kinds]
        if any(lane.run.waits for lane in self.lanes):
            cells.append(Paint("free", t("compare.legend.waiting"), "diagonal"))
        lines = [Paint("accent", t(f"compare.legend.{self.kind}"))] if self.curve else []
        if self.curve and self.kind == "contiguous":
            lines.append(Paint("muted", t("compare.legend.filled")))
        return (*cells, *lines)


def _nice(value: float) -> float:
    power = 10.0 ** np.floor(np.log10(max(value, 1.0)))
    return float(next(power * k for k in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if power * k >= value))


def summary(trace: Trace, state: ViewState) -> str:
    t, it = words(state.language, WORDS), chosen(trace, state)
    return t("compare.empty") if it is None else sentences(it, t)[0]


# ---- asks ----


def _ask(answer) -> object:
    """An answer from both runs; "" where there is nothing to compare."""

    def found(trace: Trace, state: ViewState) -> str:
        it = chosen(trace, state)
        return "" if it is None else answer(it, *measured(it))

    return found


def _first_to_end(it: Comparison, run: Measured) -> str:
    ends = [run.last_token(k) for k in range(len(it.names))]
    first = [k for k, end in enumerate(ends) if end == min(ends)]
    return it.names[first[0]][:20] if len(first) == 1 else ""


WORDS = {
    "compare.empty": (
        "Two modes side by side: open the inspector and press “Compare” at a knob. The last requests run again in both modes, "
        "and this picture shows them on one axis of time."
    ),
    "compare.measured": "engine time of both runs, one after the other: {device}",
    "compare.value.mode.paged": "with paged blocks",
    "compare.value.mode.none": "without a cache",
    "compare.value.mode.contiguous": "in contiguous slabs",
    "compare.value.batching.continuous": "with continuous batching",
    "compare.value.batching.static": "in static batches",
    "compare.value.chunked_prefill.True": "with chunked prefill",
    "compare.value.chunked_prefill.False": "without chunked prefill",
    "compare.value.prefix_caching.True": "with prefix caching",
    "compare.value.prefix_caching.False": "without prefix caching",
    "compare.says.none": (
        "{other}: {tokens:,} tokens computed instead of {tokens_a:,} ({tokens_x}), {time} instead of {time_a} ({time_x})."
    ),
    "compare.says.none.short": "{other}: {tokens_x} the tokens, {time_x} the time.",
    "compare.says.contiguous": (
        "{other}: {empty} of the held slots empty instead of {empty_a}, up to {held:,} blocks held instead of {held_a:,}, "
        "{time} instead of {time_a} ({time_x})."
    ),
    "compare.says.contiguous.short": "{other}: {empty} held in vain instead of {empty_a}.",
    "compare.says.chunked_prefill": (
        "{other}: up to {gap} between two tokens instead of {gap_a} ({gap_x}), up to {most:,} tokens in a step instead of "
        "{most_a:,}, {time} instead of {time_a} ({time_x})."
    ),
    "compare.says.chunked_prefill.short": "{other}: gaps up to {gap} instead of {gap_a} ({gap_x}).",
    "compare.says.batching": (
        "{other}: {idle} of the slots idle instead of {idle_a}, {steps:,} steps instead of {steps_a:,}, {time} instead of {time_a} ({time_x})."
    ),
    "compare.says.batching.short": "{other}: {steps:,} steps instead of {steps_a:,}.",
    "compare.says.prefix_caching": (
        "{other}: {prompt:,} prompt tokens computed instead of {prompt_a:,} ({prompt_x}), {time} instead of {time_a} ({time_x})."
    ),
    "compare.says.prefix_caching.short": "{other}: {prompt_x} the prompt tokens, {time_x} the time.",
    "compare.same": "Both wrote the same tokens.",
    "compare.differ": "They did not write the same tokens: {who} differ.",
    "compare.lane": "{mode}: {steps:,} steps, {tokens:,} tokens computed, {time}",
    "compare.lane.short": "{mode}: {steps:,} steps, {tokens:,} tokens, {time}",
    "compare.lane.shorter": "{mode}: {steps:,} steps, {time}",
    "compare.lane.shortest": "{mode}: {time}",
    "compare.time": "time",
    "compare.curve.none": "tokens",
    "compare.curve.contiguous": "blocks",
    "compare.curve.chunked_prefill": "gap, ms",
    "compare.curve.batching": "idle slots",
    "compare.curve.prefix_caching": "tokens",
    "compare.legend.decode": "one token (decode)",
    "compare.legend.prefill": "prompt tokens (prefill)",
    "compare.legend.recompute": "computed again",
    "compare.legend.waiting": "waits",
    "compare.legend.none": "curve: tokens computed so far",
    "compare.legend.contiguous": "curve: blocks held",
    "compare.legend.filled": "curve: blocks' worth of tokens in them",
    "compare.legend.chunked_prefill": "curve: longest time since one's last token",
    "compare.legend.batching": "curve: idle slots",
    "compare.legend.prefix_caching": "curve: prompt tokens computed so far",
    "compare.mark": (
        "{who}, {mode}: first token after {first}, done after {end}; {n:,} token written, {tokens:,} computed",
        "{who}, {mode}: first token after {first}, done after {end}; {n:,} tokens written, {tokens:,} computed",
    ),
    "compare.mark.nothing": "{who}, {mode}: no token",
}


VIEW = View(
    name="compare",
    title="Compare",
    question="What does one mode of the engine save over another, for the same requests?",
    figure=figure,
    summary=summary,
    words=WORDS,
    asks=(
        Ask("How many steps did the upper run take?", _ask(lambda it, a, b: str(a.num_steps))),
        Ask("How many steps did the lower run take?", _ask(lambda it, a, b: str(b.num_steps))),
        Ask("How many tokens did the upper run compute in all?", _ask(lambda it, a, b: f"{int(a.computed.sum()):,}")),
        Ask("How many tokens did the lower run compute in all?", _ask(lambda it, a, b: f"{int(b.computed.sum()):,}")),
        Ask("Which request was done first in the lower run?", _ask(lambda it, a, b: _first_to_end(it, b))),
    ),
    order=60,
)
