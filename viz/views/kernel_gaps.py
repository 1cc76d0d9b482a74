"""Kernel gaps: why does the device wait, and how much of a token's time does it work?

Above, one whole token of each burst (CUDA graphs off and on; without a GPU the CPU's own operations) on one axis of time:
in each column as much is filled as the device was busy, the rest, hatched red, is waiting. Below, a lens on each at one
scale: what the host launched, what the device ran, and the wait between two kernels. A click on a whole token, on one of its
layers, on a kernel or on one of the longest waits moves the lens there; a kernel that has a page is chosen there too. The
histogram counts every wait of the steady steps. What is counted, and how, stands in viz/timelines.py.

Rejected: drawing each kernel of a whole token as a bar of at least a pixel (a thousand of them would look like a busy device).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from engine.artifacts import KernelCard, Timeline, of_kind
from engine.trace import Trace
from viz.layout import Sheet, message, too_small, visible
from viz.measured import brief, first_fit, fit_lines, put_lines
from viz.theme import duration
from viz.timelines import Burst, bins, bursts
from viz.view import Ask, Badge, Frame, Mark, Offer, Paint, Raster, Series, View, ViewState
from viz.words.catalogue import Words, words

LENS_NS = 200_000
LENS_KERNELS = 12  # on a CPU, whose operations are longer: about so many
BIG = 40  # px
BESIDE = 86  # characters: from here on the histogram and the waits stand beside the lenses
CELLS = 12  # rows of a column of a whole token
PLACES = 16  # of the lens, that can be chosen on a whole token
MOST_MARKS = 40  # kernels a lens
MOST_WAITS = 5
BUSY, WAIT, HOST, LAUNCH = Paint("accent"), Paint("error", hatch="diagonal", alpha=0.35), Paint("cached"), Paint("ink")
PAINTS = (BUSY, WAIT, HOST, LAUNCH)
CLEAR = 255


def figure(trace: Trace, state: ViewState) -> Frame:
    found = bursts(trace, trace.clamp(state.step))
    if not found or too_small(state):
        frame = message(summary(trace, state), state, *(_badges(found, words(state.language, WORDS)) or (Badge("state"),)))
    else:
        frame = _Picture(trace, state, found).frame()
    return replace(frame, offers=_offers(trace, state, found))


# ---- sentences ----


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _arrow(found: tuple[Burst, ...], say: Callable[[Burst], str]) -> str:
    """"a → b" of a GPU's two modes, else what the only (or the CPU's) burst says."""
    pair = [b for b in found if b.is_gpu] or list(found)
    said = [say(b) for b in pair]
    return " → ".join(dict.fromkeys(said))


def headline(found: tuple[Burst, ...], t: Words) -> str:
    return t(f"kernel_gaps.busy.{'gpu' if found[-1].is_gpu else 'cpu'}", busy=_arrow(found, lambda b: share(b.busy_share)))


def sentences(found: tuple[Burst, ...], t: Words) -> tuple[str, ...]:
    fields = {
        "gap": _arrow(found, lambda b: brief(b.mean_gap_us)), "kernels": _arrow(found, lambda b: f"{b.kernels:,.0f}"),
        "token": _arrow(found, lambda b: duration(b.token_us)), "plain": _arrow(found, lambda b: duration(b.it.plain_us)),
        "what": t(f"kernel_gaps.what.{'gpu' if found[-1].is_gpu else 'cpu'}"),
    }  # fmt: skip
    return tuple(t(f"kernel_gaps.says{form}", **fields) for form in ("", ".short", ".shorter"))


def notes(found: tuple[Burst, ...], step: int, t: Words) -> tuple[str, ...]:
    """What is not shown, and which step's requests these are."""
    said = [t("kernel_gaps.other_step", step=found[-1].it.step_id)] if found[-1].it.step_id != step else []
    said += [t(f"kernel_gaps.unseen.{code}") for code in dict.fromkeys(c for b in found for c in b.it.unseen)]
    said += [t("kernel_gaps.coarse", tick=brief(b.it.resolution_ns / 1e3)) for b in found if b.is_coarse][:1]
    sides = {b.side for b in found}
    said += [t(f"kernel_gaps.only.{side}") for side in ("off", "on", "cpu") if sides == {side}]
    return tuple(said)


def title(b: Burst, t: Words) -> str:
    fields = {"n": b.it.num_seqs, "size": b.it.graph_size}
    return t(f"kernel_gaps.side.{b.side}", **fields)


def waits(b: Burst, t: Words, most: int = MOST_WAITS) -> list[tuple[int, str]]:
    """(place, "12 µs after qkv, layer 3: launch") of the longest waits of the shown token."""
    found = []
    for i in b.longest(most):
        begin, end = b.gap(i)
        layer, busy = b.layer(i), b.meanwhile(i)
        where = t("kernel_gaps.wait.layer", name=b.name(i), layer=layer) if layer is not None else b.name(i)
        why = t("kernel_gaps.wait.why", stage=t(f"kernel_gaps.stage.{busy}")) if busy in _STAGES else ""
        found.append((i, t("kernel_gaps.wait", time=brief((end - begin) / 1e3), where=where) + why))
    return found


_STAGES = ("schedule", "build", "launch", "sync", "commit")


def _badges(found: tuple[Burst, ...], t: Words) -> tuple[Badge, ...]:
    made = [Badge("measured", t(f"kernel_gaps.badge.{'cupti' if b.is_gpu else 'cpu'}", device=visible(b.it.device)[:60])) for b in found]
    return tuple(dict.fromkeys(made))


# ---- the picture ----


class _Picture:
    """A large figure and a sentence; whole tokens on one axis; a lens on each; beside them the histogram and the waits."""

    def __init__(self, trace: Trace, state: ViewState, found: tuple[Burst, ...]) -> None:
        self.trace, self.state, self.found = trace, state, found
        self.t, self.sheet = words(state.language, WORDS), Sheet(state)
        self.pages = {card.name for card in of_kind(trace, KernelCard)}
        self.axes = dict(self.sheet.axes())
        self.number = 1
        self.rasters: list[Raster] = []
        self.series: list[Series] = []
        self.marks: list[Mark] = []
        self.end = max(b.length for b in found)
        self.span = self._span()
        self.centers = self._centers()

    # ---- where the lens is ----

    def _span(self) -> int:
        """ns that a lens shows: the selected layer with a little around it, else always the same."""
        side, kind, value = self._selected()
        chosen = next((b for b in self.found if b.side == side), None)
        if chosen is not None and kind == "layer" and value in chosen.layers:
            low, high = chosen.layers[value]
            return max(int((high - low) * 1.1), 1000)
        if all(not b.is_gpu for b in self.found):
            return max(min(int(self.end / self.found[0].kernels * LENS_KERNELS), self.end), 1)
        return min(LENS_NS, self.end)

    def _selected(self) -> tuple[str, str, int]:
        """(side, "lens", "layer", "gap" or "kernel", number) of the selection; side "" where it is none of these."""
        parts = (self.state.selection or "").split(":")
        kind, at = parts[0], parts[-1].partition("-")
        plain = at[2].isascii() and at[2].isdigit() and len(at[2]) < 8
        if kind in ("lens", "layer", "gap", "kernel", "op") and plain and at[0] in ("cpu", "off", "on"):
            return at[0], "kernel" if kind == "op" else kind, int(at[2])
        return "", "", 0

    def _centers(self) -> dict[str, float]:
        """Of each burst's lens, ns since its token began; the others stand at the same share of theirs."""
        side, kind, value = self._selected()
        chosen = next((b for b in self.found if b.side == side), None)
        at = None
        if chosen is not None:
            a, b = chosen.token
            if kind == "lens" and value < PLACES:
                at = (value + 0.5) / PLACES * chosen.length
            elif kind == "layer" and value in chosen.layers:
                at = sum(chosen.layers[value]) / 2 - chosen.zero
            elif kind == "gap" and a <= value < b:
                at = sum(chosen.gap(value)) / 2 - chosen.zero
            elif kind == "kernel" and a <= value < b:
                at = (int(chosen.start[value]) + int(chosen.stop[value])) / 2 - chosen.zero
        part = 0.5 if at is None or chosen is None else at / chosen.length
        return {b.side: at if b is chosen and at is not None else self._same_place(b, chosen, kind, value, part) for b in self.found}

    def _same_place(self, b: Burst, chosen: Burst | None, kind: str, value: int, part: float) -> float:
        """The same layer where it is known, else the same share of the token."""
        layer = value if kind == "layer" else chosen.layer(value) if chosen is not None and kind in ("gap", "kernel") and self._is_in(
            chosen, value) else None  # fmt: skip
        return sum(b.layers[layer]) / 2 - b.zero if layer in b.layers else part * b.length

    @staticmethod
    def _is_in(b: Burst, place: int) -> bool:
        return 0 <= place < len(b.rows)

    def _window(self, b: Burst) -> tuple[float, float]:
        """(begin, end) of a lens, ns since the token began; it may reach a little beyond."""
        low = min(max(self.centers[b.side] - self.span / 2, -0.02 * self.span), max(b.length - 0.98 * self.span, -0.02 * self.span))
        return low, low + self.span

    # ---- layout ----

    def frame(self) -> Frame:
        sheet, t = self.sheet, self.t
        tall = sheet.height / sheet.line
        top = self._head(tall)
        beside = sheet.width >= BESIDE * sheet.advance and tall >= 12
        self.left, self.right = 10.0, (sheet.width * 0.68 if beside else sheet.width - 10)
        each = (2 if tall >= 9 else 1) * sheet.line + 2
        lens = tall >= 6 + 2.2 * len(self.found) + (4 * len(self.found))
        for b in self.found:
            top = self._whole(b, top, top + each) + 4
        top = self._axis(top, self.end, t("kernel_gaps.axis.token"))
        if beside:
            self._aside(sheet.width * 0.68 + 20, sheet.width - 10, self._body + 4, sheet.height - 6)
        if lens:
            self._lenses(top + 4, sheet.height - 4)
        elif not beside and sheet.height - top >= 2 * sheet.line:
            self._waits(self.left, self.right, top + 4, sheet.height - 4)
        return Frame(
            badges=_badges(self.found, t), axes=self.axes, rasters=tuple(self.rasters), series=tuple(self.series),
            labels=tuple(sheet.labels), marks=tuple(self.marks), legend=self._legend(),
        )  # fmt: skip

    def _head(self, tall: float) -> float:
        """The figure and its sentence; where the next thing may begin."""
        sheet, said, step = self.sheet, headline(self.found, self.t), self.trace.clamp(self.state.step)
        big = BIG if tall >= 15 and len(said) * BIG * 0.6 <= sheet.width - 20 else sheet.font
        high = round(big * 1.3)
        sheet.put(said, 10, 4 + high / 2, weight=700, size=big)
        self._figures(4, 4 + high)
        lines = fit_lines(sheet, sheet.width - 20, 2 if tall >= 14 else 1, *sentences(self.found, self.t))
        top = put_lines(sheet, lines, 10, 6 + high)
        for note in notes(self.found, step, self.t)[: 2 if tall >= 16 else 1 if tall >= 11 else 0]:
            sheet.put(note, 10, top + sheet.line / 2, "muted", room=sheet.width - 20)
            top += sheet.line
        self._body = top + 2
        return top + 4

    def _figures(self, y0: float, y1: float) -> None:
        """What can be chosen of the figures at the right of the head: each a small text with a mark."""
        sheet, t, b = self.sheet, self.t, self.found[-1]
        x = sheet.width - 10
        values = {"kernels": f"{b.kernels:,.0f}", "gap": brief(b.mean_gap_us), "token": duration(b.token_us)}
        for key in ("token", "gap", "kernels"):
            text = t(f"kernel_gaps.figure.{key}", value=values[key])
            label = sheet.put(text, x, (y0 + y1) / 2, "muted", anchor="right")
            if label is None:
                return
            span = sheet.span(label.text)
            self.marks.insert(0, Mark(f"figure:{key}", x - span - 3, x + 3, (y0 + y1) / 2 - 12, (y0 + y1) / 2 + 12, text, "control"))
            x -= span + 18

    def _new_axes(self, x: tuple[float, float], y: tuple[float, float], box: tuple[float, float, float, float]) -> str:
        self.number += 1
        self.axes |= self.sheet.data_axes(self.number, x, y, box)
        return f"x{self.number}y{self.number}"

    # ---- whole tokens ----

    def _whole(self, b: Burst, y0: float, y1: float) -> float:
        """The title, and below (beside, where there is one line) the token; returns its bottom."""
        sheet = self.sheet
        said = self.t("kernel_gaps.whole", side=title(b, self.t), time=duration(b.length / 1e3), busy=share(b.busy_share))
        short = title(b, self.t)
        if y1 - y0 >= 2 * sheet.line:
            sheet.put(first_fit(sheet, self.right - self.left, said, short), self.left, y0 + sheet.line / 2)
            y0 += sheet.line
            left = self.left
        else:
            label = sheet.put(first_fit(sheet, (self.right - self.left) * 0.4, short), self.left, (y0 + y1) / 2)
            left = self.left + (self.right - self.left) * 0.42 if label is not None else self.left
        box = (left, self.right, y0, y1)
        self._token_left = left
        axes = self._new_axes((0, self.end), (0, 1), box)
        wide = max(int((self.right - left) * b.length / self.end), 1)
        self.rasters.append(Raster(f"token {b.side}", density(b, wide), 0, b.length, 0, 1, PAINTS, axes=axes))
        low, high = self._window(b)
        low, high = max(low, 0), min(high, b.length)
        for k in range(PLACES):
            text = self.t("kernel_gaps.mark.lens", side=title(b, self.t), time=brief((k + 0.5) / PLACES * b.length / 1e3))
            a, z = k / PLACES * b.length, (k + 1) / PLACES * b.length
            if wide / PLACES >= 3:
                self.marks.append(Mark(f"lens:{b.side}-{k}", a, z, 0, 1, text, axes=axes))
        outline = np.array([low, high, high, low, low], np.float32)
        self.series.append(Series("lens", outline, np.array([0, 0, 1, 1, 0], np.float32), "line", Paint("ink"), 2.0, axes=axes))
        return y1

    def _axis(self, y: float, end: float, name: str) -> float:
        """0, the end of the longest token, and what the axis is."""
        sheet = self.sheet
        y += sheet.line / 2
        sheet.put("0", self._token_left, y, "muted")
        sheet.put(duration(end / 1e3), self.right, y, "muted", anchor="right")
        sheet.put(name, (self._token_left + self.right) / 2, y, "muted", anchor="center", room=(self.right - self._token_left) * 0.6)
        return y + sheet.line / 2

    # ---- lenses ----

    def _lenses(self, y0: float, y1: float) -> None:
        sheet = self.sheet
        y1 -= sheet.line
        height = (y1 - y0) / len(self.found)
        for b in self.found:
            self._lens(b, y0, y0 + height - 6)
            y0 += height
        sheet.put(self.t("kernel_gaps.axis.lens", time=duration(self.span / 1e3)), self.left, y1 + sheet.line / 2, "muted", room=self.right - 10)

    def _lens(self, b: Burst, y0: float, y1: float) -> None:
        """Layers, what the host did, what the device ran."""
        sheet, low_high = self.sheet, self._window(b)
        name = self.t("kernel_gaps.lens", side=title(b, self.t), time=duration(max(low_high[0], 0) / 1e3))
        sheet.put(name, self.left, y0 + sheet.line / 2, room=self.right - self.left)
        y0 += sheet.line
        middle = y0 + (y1 - y0) * 0.4
        box = (self.left, self.right, y0, y1)
        axes = self._new_axes(low_high, (0, 1), box)
        wide = max(int(self.right - self.left), 1)
        values = np.full((20, wide), CLEAR, np.uint8)
        _lay(values[:4], b.it.host, b.it.names, low_high, b.zero, stages=True)
        _lay(values[4:8], b.it.host, b.it.names, low_high, b.zero, stages=False)
        values[9:] = lens_cells(b, wide, low_high)
        self.rasters.append(Raster(f"lens {b.side}", values, *low_high, 0, 1, PAINTS, axes=axes))
        self._kernel_marks(b, low_high, axes, y0 + (y1 - y0) * 0.45, y1)
        self._layer_marks(b, low_high, axes, middle)

    def _kernel_marks(self, b: Burst, window: tuple[float, float], axes: str, y0: float, y1: float) -> None:
        """Marks of kernels and of waits that can be seen; names where they fit."""
        a, z = b.token
        per_ns = (self.right - self.left) / (window[1] - window[0])
        chosen = self._selected()
        inside = [i for i in range(a, z) if b.stop[i] - b.zero > window[0] and b.start[i] - b.zero < window[1]]
        shown = [i for i in inside if (b.stop[i] - b.start[i]) * per_ns >= 4][:MOST_MARKS]
        for i in shown:
            low, high = max(float(b.start[i]) - b.zero, window[0]), min(float(b.stop[i]) - b.zero, window[1])
            name, layer = b.name(i), b.layer(i)
            kind = "kernel" if b.is_named(i) and name in self.pages else "op"
            time = self.t("kernel_gaps.mark.coarse") if b.is_coarse else brief(float(b.stop[i] - b.start[i]) / 1e3)
            text = self.t(f"kernel_gaps.mark.kernel{'.layer' if layer is not None else ''}", name=name, time=time, layer=layer)
            outline = "ink" if chosen == (b.side, "kernel", i) else None
            self.marks.append(Mark(f"{kind}:{name[:60]}:{b.side}-{i}", low, high, 0.45, 1.0, text, outline, axes=axes))
            x = self.left + ((low + high) / 2 - window[0]) * per_ns
            if self.sheet.span(name) <= (high - low) * per_ns - 4 and y1 - y0 >= self.sheet.line:
                self.sheet.put(name, x, (y0 + y1) / 2, "on-accent", anchor="center")
        for i in inside:
            begin, end = b.gap(i)
            low, high = max(begin - b.zero, window[0]), min(end - b.zero, window[1])
            if (high - low) * per_ns < 6 or len(self.marks) > 200:
                continue
            text = self.t("kernel_gaps.mark.gap", time=brief((end - begin) / 1e3), name=b.name(i))
            outline = "error" if chosen == (b.side, "gap", i) else None
            self.marks.append(Mark(f"gap:{b.side}-{i}", float(low), float(high), 0.45, 1.0, text, outline, axes=axes))

    def _layer_marks(self, b: Burst, window: tuple[float, float], axes: str, y: float) -> None:
        for layer, (begin, end) in b.layers.items():
            low, high = max(begin - b.zero, window[0]), min(end - b.zero, window[1])
            if high - low < (window[1] - window[0]) * 0.02:
                continue
            text = self.t("kernel_gaps.mark.layer", layer=layer, time=brief((end - begin) / 1e3))
            self.marks.append(Mark(f"layer:{b.side}-{layer}", float(low), float(high), 0.0, 0.4, text, axes=axes))

    # ---- beside ----

    def _aside(self, x0: float, x1: float, y0: float, y1: float) -> None:
        middle = y0 + (y1 - y0) * 0.46
        self._histogram(x0, x1, y0, middle)
        self._waits(x0, x1, middle + 8, y1)

    def _histogram(self, x0: float, x1: float, y0: float, y1: float) -> None:
        """Waits of all steady steps by length: one row of bars a burst, as shares of its waits."""
        sheet, t = self.sheet, self.t
        sheet.put(first_fit(sheet, x1 - x0, t("kernel_gaps.histogram"), t("kernel_gaps.histogram.short")), x0, y0 + sheet.line / 2)
        edges = bins()
        seen = [k for b in self.found for k in np.flatnonzero(b.histogram).tolist()]
        first, last = min(seen), max(seen)
        y0, y1 = y0 + sheet.line + 2, y1 - sheet.line
        high = (y1 - y0) / len(self.found)
        if high < 8:
            return
        for b in self.found:
            axes = self._new_axes((first - 0.5, last + 0.5), (1.0, 0), (x0, x1, y0, y0 + high - 4))
            part = (b.histogram / b.histogram.sum())[first : last + 1].astype(np.float32)
            x = np.arange(first, last + 1, dtype=np.float32)
            self.series.append(Series(title(b, t), x, part, "bars", Paint("error", hatch="diagonal"), 0.8, np.zeros_like(part), axes))
            sheet.put(first_fit(sheet, x1 - x0, title(b, t), t(f"kernel_gaps.side.{b.side}.short")), x1, y0 + sheet.line / 2, "muted", anchor="right")
            y0 += high
        low_edge = "0" if first == 0 else brief(float(edges[first - 1]))
        sheet.put(low_edge, x0, y1 + sheet.line / 2, "muted")
        top_edge = brief(float(edges[min(last, len(edges) - 1)]))
        sheet.put(top_edge, x1, y1 + sheet.line / 2, "muted", anchor="right")

    def _waits(self, x0: float, x1: float, y0: float, y1: float) -> None:
        sheet, t, b = self.sheet, self.t, self.found[0]
        sheet.put(first_fit(sheet, x1 - x0, t("kernel_gaps.waits", side=title(b, t)), t("kernel_gaps.waits.short")), x0, y0 + sheet.line / 2)
        y0 += sheet.line
        known = {mark.id for mark in self.marks}
        for i, text in waits(b, t, max(min(int((y1 - y0) / sheet.line), MOST_WAITS), 0)):
            label = sheet.put(text, x0, y0 + sheet.line / 2, "muted", room=x1 - x0)
            ident = f"wait:{b.side}-{i}" if f"gap:{b.side}-{i}" in known else f"gap:{b.side}-{i}"
            if label is not None:
                self.marks.append(Mark(ident, x0, x1, y0 + 1, y0 + sheet.line - 1, text))
            y0 += sheet.line

    def _legend(self) -> tuple[Paint, ...]:
        t = self.t
        busy = t(f"kernel_gaps.legend.{'gpu' if self.found[-1].is_gpu else 'cpu'}")
        found = [replace(BUSY, label=busy), replace(WAIT, label=t("kernel_gaps.legend.wait")), replace(HOST, label=t("kernel_gaps.legend.host"))]
        if any(b.is_gpu for b in self.found):
            found.append(replace(LAUNCH, label=t("kernel_gaps.legend.launch")))
        return tuple(found)


# ---- cells ----


def busy_columns(b: Burst, wide: int, window: tuple[float, float]) -> np.ndarray:
    """float64 [wide]: which share of each column's time kernels run. `window`: ns since the token began."""
    edges = np.linspace(*window, wide + 1) + b.zero
    starts, stops = b.start.astype(np.float64), b.covered.astype(np.float64)
    starts = np.maximum(starts, np.concatenate([[-np.inf], stops[:-1]]))  # what the kernels before already cover
    long = np.maximum(stops - starts, 0)
    total = np.concatenate([[0.0], np.cumsum(long)])
    i = np.searchsorted(starts, edges, side="right")
    inside = np.minimum(edges - starts[np.maximum(i - 1, 0)], long[np.maximum(i - 1, 0)])
    before = np.where(i > 0, total[np.maximum(i - 1, 0)] + inside, 0.0)
    return np.clip(np.diff(before) / np.diff(edges), 0.0, 1.0)


def density(b: Burst, wide: int) -> np.ndarray:
    """uint8 [CELLS, wide]: from below as many cells as the device was busy, the rest waits."""
    filled = np.rint(busy_columns(b, wide, (0, b.length)) * CELLS)
    rows = CELLS - np.arange(CELLS)[:, None]
    return np.ascontiguousarray(np.where(rows <= filled[None], 0, 1).astype(np.uint8))


def lens_cells(b: Burst, wide: int, window: tuple[float, float]) -> np.ndarray:
    """uint8 [wide]: busy or waiting, whichever is more; clear where the steady part is over."""
    cells = np.where(busy_columns(b, wide, window) >= 0.5, 0, 1).astype(np.uint8)
    middles = (np.linspace(*window, wide + 1)[:-1] + np.linspace(*window, wide + 1)[1:]) / 2
    cells[(middles < 0) & (cells == 1)] = CLEAR
    return cells


def _lay(values: np.ndarray, rows: np.ndarray, names: tuple[str, ...], window: tuple[float, float], zero: int, stages: bool) -> None:
    """Host rows into cells, each at least one wide."""
    is_launch = np.array([name.startswith("cu") for name in names], bool)
    mine = rows[is_launch[rows["name"]] != stages] if len(rows) else rows
    wide = values.shape[1]
    scale = wide / (window[1] - window[0])
    for start, stop in zip((mine["start_ns"] - zero).tolist(), (mine["stop_ns"] - zero).tolist()):
        a, z = (start - window[0]) * scale, (stop - window[0]) * scale
        if z >= 0 and a < wide:
            a = max(int(a), 0)
            values[:, a : max(int(z), a + 1)] = 2 if stages else 3
            if stages and z < wide and int(z) > a + 3:
                values[:, int(z) - 1] = CLEAR


# ---- what can be asked for ----


def _offers(trace: Trace, state: ViewState, found: tuple[Burst, ...]) -> tuple[Offer, ...]:
    t, step = words(state.language, WORDS), trace.clamp(state.step)
    works = len(trace.rows("works", step, step))
    why = "" if works else t("kernel_gaps.offer.why")
    both = t("kernel_gaps.offer.both")
    modes = ((both, {"step": step}), (t("kernel_gaps.offer.off"), {"step": step, "modes": [False]}), (t("kernel_gaps.offer.on"), {"step": step, "modes": [True]}))
    return (Offer("timeline", t("kernel_gaps.offer"), "timeline", modes, why),)


def summary(trace: Trace, state: ViewState) -> str:
    step, t = trace.clamp(state.step), words(state.language, WORDS)
    found = bursts(trace, step)
    if not found:
        return t("kernel_gaps.damaged" if of_kind(trace, Timeline) else "kernel_gaps.empty", step=step)
    longest = waits(found[0], t, 1)
    last = [t("kernel_gaps.longest", wait=longest[0][1])] if longest else []
    return " ".join([headline(found, t) + ".", sentences(found, t)[0], *notes(found, step, t), *last])


def _ask(answer: Callable[[tuple[Burst, ...]], str]) -> Callable[[Trace, ViewState], str]:
    def found(trace: Trace, state: ViewState) -> str:
        of = bursts(trace, trace.clamp(state.step))
        return answer(of)[:20] if of else ""

    return found


def _longest_after(found: tuple[Burst, ...]) -> str:
    places = found[0].longest(1)
    return found[0].name(places[0]) if places else ""


WORDS = {
    "kernel_gaps.empty": (
        "No burst was taken yet. Press “Take a timeline”: the requests of step {step:,} then run on for some steps with a clock on every "
        "launch and every kernel."
    ),
    "kernel_gaps.damaged": "The timelines of this record are too short or damaged. Press “Take a timeline” on the live engine.",
    "kernel_gaps.busy.gpu": "GPU busy {busy}",
    "kernel_gaps.busy.cpu": "In operations {busy}",
    "kernel_gaps.what.gpu": "kernels",
    "kernel_gaps.what.cpu": "operations",
    "kernel_gaps.says": (
        "Mean wait between two {what}: {gap}. {kernels} {what} a step, {token} a step under the profiler, {plain} without it."
    ),
    "kernel_gaps.says.short": "Mean wait {gap}; {kernels} {what} a step in {token}.",
    "kernel_gaps.says.shorter": "Mean wait {gap}.",
    "kernel_gaps.other_step": "These are the requests of step {step:,}.",
    "kernel_gaps.unseen.lost": "The profiler lost kernels: this timeline is incomplete.",
    "kernel_gaps.unseen.not_named": "Kernels could not be matched with operations: they have their functions' names.",
    "kernel_gaps.unseen.partly_named": "Some kernels could not be matched with operations: they have their functions' names.",
    "kernel_gaps.coarse": "The clock ticks every {tick}: times of single kernels are not shown.",
    "kernel_gaps.only.off": "With CUDA graphs on there is no timeline yet.",
    "kernel_gaps.only.on": "With CUDA graphs off there is no timeline yet.",
    "kernel_gaps.only.cpu": "Without a GPU the CPU runs each operation itself; what lies between them is Python.",
    "kernel_gaps.side.off": ("Graphs off, {n:,} request", "Graphs off, {n:,} requests"),
    "kernel_gaps.side.on": ("Graph of {size:,}, {n:,} request", "Graph of {size:,}, {n:,} requests"),
    "kernel_gaps.side.cpu": ("CPU, {n:,} request", "CPU, {n:,} requests"),
    "kernel_gaps.side.off.short": "off",
    "kernel_gaps.side.on.short": "on",
    "kernel_gaps.side.cpu.short": "CPU",
    "kernel_gaps.whole": "{side}: one step of {time}, busy {busy}",
    "kernel_gaps.axis.token": "one step, whole",
    "kernel_gaps.axis.lens": "each lens: {time} wide",
    "kernel_gaps.lens": "Lens: {side}, from {time} on",
    "kernel_gaps.figure.kernels": "{value} launched",
    "kernel_gaps.figure.gap": "{value} mean wait",
    "kernel_gaps.figure.token": "{value} a step",
    "kernel_gaps.mark.lens": "{side}: lens at {time}",
    "kernel_gaps.mark.kernel": "{name}: {time}",
    "kernel_gaps.mark.kernel.layer": "{name}, layer {layer}: {time}",
    "kernel_gaps.mark.coarse": "time not shown",
    "kernel_gaps.mark.gap": "Waits {time} after {name}",
    "kernel_gaps.mark.layer": "Layer {layer}: {time}",
    "kernel_gaps.histogram": "Waits of all steps by length",
    "kernel_gaps.histogram.short": "Waits by length",
    "kernel_gaps.waits": "Longest waits ({side})",
    "kernel_gaps.waits.short": "Longest waits",
    "kernel_gaps.wait": "{time} after {where}",
    "kernel_gaps.wait.layer": "{name}, layer {layer}",
    "kernel_gaps.wait.why": " ({stage})",
    "kernel_gaps.longest": "Longest wait: {wait}.",
    "kernel_gaps.stage.schedule": "host schedules",
    "kernel_gaps.stage.build": "host builds inputs",
    "kernel_gaps.stage.launch": "host launches",
    "kernel_gaps.stage.sync": "host waits for the device",
    "kernel_gaps.stage.commit": "host commits tokens",
    "kernel_gaps.badge.cupti": "{device}: CUPTI, with the profiler attached",
    "kernel_gaps.badge.cpu": "{device}: the host's clock around each operation",
    "kernel_gaps.legend.gpu": "GPU runs a kernel",
    "kernel_gaps.legend.cpu": "CPU runs an operation",
    "kernel_gaps.legend.wait": "waiting",
    "kernel_gaps.legend.host": "host: a stage of the step",
    "kernel_gaps.legend.launch": "host: a launch",
    "kernel_gaps.offer": "Take a timeline",
    "kernel_gaps.offer.both": "Graphs off, then on",
    "kernel_gaps.offer.off": "Graphs off",
    "kernel_gaps.offer.on": "Graphs on",
    "kernel_gaps.offer.why": "This step computed nothing. Choose one that did.",
}


VIEW = View(
    name="kernel_gaps",
    title="Kernel gaps",
    question="How much of a token's time does the device work, and what does it wait for?",
    figure=figure,
    summary=summary,
    words=WORDS,
    asks=(
        Ask("Which share of the time is the device busy (last figure)?", _ask(lambda f: share(f[-1].busy_share))),
        Ask("How long is the mean wait between two kernels or operations (last figure)?", _ask(lambda f: brief(f[-1].mean_gap_us))),
        Ask("How many kernels or operations does one step launch (last figure)?", _ask(lambda f: f"{f[-1].kernels:,.0f}")),
        Ask("How long is the (upper) whole step?", _ask(lambda f: duration(f[0].length / 1e3))),
        Ask("After which kernel or operation does the device wait longest?", _ask(_longest_after)),
    ),
    order=125,
)
