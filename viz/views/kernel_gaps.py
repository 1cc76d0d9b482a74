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
LENS_KERNELS = 8  # on a CPU, whose operations are longer: about so many
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
    """ "a → b" of a GPU's two modes, else what the only (or the CPU's) burst says."""
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
        "how": t(f"kernel_gaps.how.{'gpu' if found[-1].is_gpu else 'cpu'}"),
    }  # fmt: skip
    return tuple(t(f"kernel_gaps.says{form}", **fields) for form in ("", ".short", ".shorter"))


def figures_of(b: Burst, t: Words) -> tuple[tuple[str, str], ...]:
    """(name, what it says) of the figures that can be chosen."""
    values = {"kernels": f"{b.kernels:,.0f}", "gap": brief(b.mean_gap_us), "token": duration(b.token_us)}
    what = t(f"kernel_gaps.what.{'gpu' if b.is_gpu else 'cpu'}")
    return tuple((key, t(f"kernel_gaps.figure.{key}", value=value, what=what)) for key, value in values.items())


def notes(found: tuple[Burst, ...], step: int, t: Words) -> tuple[str, ...]:
    """What is not shown, and which step's requests these are."""
    own, foreign = [b for b in found if not b.foreign], [b for b in found if b.foreign]
    said = [t("kernel_gaps.recorded", device=visible(foreign[-1].it.device)[:60])] if foreign else []
    said += [t("kernel_gaps.other_step", step=own[-1].it.step_id)] if own and own[-1].it.step_id != step else []
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


def foremost(found: tuple[Burst, ...]) -> Burst:
    """Whose waits are listed: those with graphs off where there is a GPU."""
    return next((b for b in found if b.is_gpu), found[0])


def _badges(found: tuple[Burst, ...], t: Words) -> tuple[Badge, ...]:
    made = [
        Badge(
            "recorded" if b.foreign else "measured",
            t(f"kernel_gaps.badge.{'cupti' if b.is_gpu else 'cpu'}", device=visible(b.it.device)[:60]),
        )
        for b in found
    ]
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
        for b in self.found:
            top = self._whole(b, top, top + each) + 4
        top = self._axis(top, self.end, t("kernel_gaps.axis.token"))
        if beside:
            self._aside(sheet.width * 0.68 + 20, sheet.width - 10, self._body + 4, sheet.height - 6)
        if sheet.height - top >= 5.8 * sheet.line:
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
        figures = figures_of([*(b for b in self.found if b.foreign), *(b for b in self.found if not b.foreign)][-1], self.t)
        wide = sum(sheet.span(text) + 18 for _, text in figures)
        big = BIG if tall >= 15 and len(said) * BIG * 0.6 <= sheet.width - 20 - wide else sheet.font
        high = round(big * 1.3)
        sheet.put(said, 10, 4 + high / 2, weight=700, size=big)
        top = 6 + high
        if len(said) * big * 0.6 <= sheet.width - 20 - wide:
            self._figures(figures, sheet.width - 10, 4 + high / 2)
        elif tall >= 11 and wide <= sheet.width:
            self._figures(figures, wide - 8, top + sheet.line / 2)
            top += sheet.line + 2
        lines = fit_lines(sheet, sheet.width - 20, 2 if tall >= 14 else 1, *sentences(self.found, self.t))
        top = put_lines(sheet, lines, 10, top)
        for note in notes(self.found, step, self.t)[: 2 if tall >= 16 else 1 if tall >= 11 else 0]:
            sheet.put(note, 10, top + sheet.line / 2, "muted", room=sheet.width - 20)
            top += sheet.line
        self._body = top + 2
        return top + 4

    def _figures(self, figures: tuple[tuple[str, str], ...], right: float, y: float) -> None:
        """What can be chosen of the last burst's figures: each a text with a frame."""
        half = self.sheet.font * 0.75
        for key, text in reversed(figures):
            span = self.sheet.span(text)
            self.sheet.put(text, right - span / 2, y, "muted", anchor="center")
            self.marks.insert(0, Mark(f"figure:{key}", right - span - 3, right + 3, y - half, y + half, text, "control"))
            right -= span + 18

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
        """As many as have room, the chosen one and the last ones first; at the bottom their scale."""
        sheet = self.sheet
        y1 -= sheet.line
        side, most = self._selected()[0], int((y1 - y0) / (4.6 * sheet.line))
        ranked = sorted(self.found, key=lambda b: (b.side == side, self.found.index(b)))
        shown = [b for b in self.found if b in ranked[-most:]] if most else []
        for i, b in enumerate(shown):
            high = min((y1 - y0) / len(shown), 9 * sheet.line)
            self._lens(b, y0 + i * high, y0 + (i + 1) * high - 6)
        if shown:
            text = self.t("kernel_gaps.axis.lens", time=duration(self.span / 1e3))
            bottom = y0 + len(shown) * min((y1 - y0) / len(shown), 9 * sheet.line)
            sheet.put(text, self.left, bottom + sheet.line / 2, "muted", room=self.right - 10)

    def _lens(self, b: Burst, y0: float, y1: float) -> None:
        """The host's stages and launches, names, what the device ran."""
        sheet, window = self.sheet, self._window(b)
        name = self.t("kernel_gaps.lens", side=title(b, self.t), time=duration(max(window[0], 0) / 1e3))
        sheet.put(name, self.left, y0 + sheet.line / 2, room=self.right - self.left)
        y0 += sheet.line
        axes = self._new_axes(window, (0, 1), (self.left, self.right, y0, y1))
        wide = max(int(self.right - self.left), 1)
        names_at = min(0.55, 0.3 + sheet.line / (y1 - y0))
        for what, values, top, bottom in (
            ("stages", host_cells(b, wide, window, stages=True), 0.0, 0.18),
            ("launches", host_cells(b, wide, window, stages=False), 0.18, 0.28),
            ("kernels", lens_cells(b, wide, window), names_at, 1.0),
        ):
            self.rasters.append(Raster(f"{what} {b.side}", values[None], *window, top, bottom, PAINTS, axes=axes))
        self._stage_names(b, window, y0, y0 + 0.18 * (y1 - y0))
        self._links(b, window, axes, names_at)
        self._kernel_marks(b, window, axes, names_at, y0 + 0.28 * (y1 - y0), y0 + names_at * (y1 - y0))
        self._layer_marks(b, window, axes)

    def _stage_names(self, b: Burst, window: tuple[float, float], y0: float, y1: float) -> None:
        """In the stages of the host that are wide enough."""
        per_ns = (self.right - self.left) / (window[1] - window[0])
        for row in b.it.host if y1 - y0 >= self.sheet.font else ():
            name = b.it.names[row["name"]]
            low, high = max(int(row["start_ns"]) - b.zero, window[0]), min(int(row["stop_ns"]) - b.zero, window[1])
            if name in _STAGES and high > low:
                said = self.t(f"kernel_gaps.stage.{name}")
                if self.sheet.span(said) <= (high - low) * per_ns - 8:
                    self.sheet.put(said, self.left + ((low + high) / 2 - window[0]) * per_ns, (y0 + y1) / 2, "on-cached", anchor="center")

    def _links(self, b: Burst, window: tuple[float, float], axes: str, bottom: float) -> None:
        """A thin line from each launch to its (first) kernel."""
        launch = b.it.kernels["launch"][b.rows]
        _, first = np.unique(launch, return_index=True)
        first = first[launch[first] >= 0]
        begins, ends = b.it.host["start_ns"][launch[first]] - b.zero, b.start[first] - b.zero
        seen = (ends >= window[0]) & (begins <= window[1]) & (begins >= window[0]) & (ends <= window[1])
        if not 0 < seen.sum() <= MOST_MARKS:
            return
        nan = np.full(int(seen.sum()), np.nan)
        x = np.stack([begins[seen], ends[seen], nan], 1).ravel().astype(np.float32)
        y = np.tile(np.array([0.28, bottom, np.nan], np.float32), int(seen.sum()))
        self.series.append(Series("links", x, y, "line", Paint("muted"), 1.0, axes=axes))

    def _kernel_marks(self, b: Burst, window: tuple[float, float], axes: str, top: float, y0: float, y1: float) -> None:
        """Marks of kernels and of waits that can be seen. A name stands over its kernel, from where that begins, where there
        is room before the next one begins."""
        a, z = b.token
        per_ns = (self.right - self.left) / (window[1] - window[0])
        chosen, marks = self._selected(), []
        inside = [i for i in range(a, z) if b.stop[i] - b.zero > window[0] and b.start[i] - b.zero < window[1]]
        for i in inside:
            low, high = max(float(b.start[i]) - b.zero, window[0]), min(float(b.stop[i]) - b.zero, window[1])
            until = min(float(b.start[i + 1]) - b.zero, window[1])
            name, layer = b.name(i), b.layer(i)
            x = self.left + (low - window[0]) * per_ns
            if b.start[i] - b.zero >= window[0] and self.sheet.span(name) <= (until - low) * per_ns - 2 and y1 - y0 >= self.sheet.line - 1:
                self.sheet.put(name, x, (y0 + y1) / 2)
            begin, end = b.gap(i)
            if (high - low) * per_ns >= 4 and len(marks) < MOST_MARKS:
                kind = "kernel" if b.is_named(i) and name in self.pages else "op"
                time = self.t("kernel_gaps.mark.coarse") if b.is_coarse else brief(float(b.stop[i] - b.start[i]) / 1e3)
                text = self.t(f"kernel_gaps.mark.kernel{'.layer' if layer is not None else ''}", name=name, time=time, layer=layer)
                outline = "ink" if chosen == (b.side, "kernel", i) else None
                marks.append(Mark(f"{kind}:{name[:60]}:{b.side}-{i}", low, high, top, 1.0, text, outline, axes=axes))
            low, high = max(begin - b.zero, window[0]), min(end - b.zero, window[1])
            is_chosen = chosen == (b.side, "gap", i)
            if is_chosen or ((high - low) * per_ns >= 6 and len(marks) < MOST_MARKS):
                text = self.t("kernel_gaps.mark.gap", time=brief((end - begin) / 1e3), name=name)
                marks.append(Mark(f"gap:{b.side}-{i}", float(low), float(high), top, 1.0, text, "error" if is_chosen else None, axes=axes))
        self.marks += marks

    def _layer_marks(self, b: Burst, window: tuple[float, float], axes: str) -> None:
        for layer, (begin, end) in b.layers.items():
            low, high = max(begin - b.zero, window[0]), min(end - b.zero, window[1])
            if high - low < (window[1] - window[0]) * 0.02:
                continue
            text = self.t("kernel_gaps.mark.layer", layer=layer, time=brief((end - begin) / 1e3))
            self.marks.append(Mark(f"layer:{b.side}-{layer}", float(low), float(high), 0.0, 0.28, text, axes=axes))

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
            label = high >= 2.2 * sheet.line
            axes = self._new_axes((first - 0.5, last + 0.5), (1.0, 0), (x0, x1, y0 + (sheet.line if label else 0), y0 + high - 4))
            part = (b.histogram / b.histogram.sum())[first : last + 1].astype(np.float32)
            x = np.arange(first, last + 1, dtype=np.float32)
            self.series.append(Series(title(b, t), x, part, "bars", Paint("error", hatch="diagonal"), 0.8, np.zeros_like(part), axes))
            name = title(b, t) if label else t(f"kernel_gaps.side.{b.side}.short")
            sheet.put(name, x1, y0 + sheet.line / 2, "muted", anchor="right", room=x1 - x0)
            y0 += high
        low_edge = "0" if first == 0 else brief(float(edges[first - 1]))
        sheet.put(low_edge, x0, y1 + sheet.line / 2, "muted")
        top_edge = brief(float(edges[min(last, len(edges) - 1)]))
        sheet.put(top_edge, x1, y1 + sheet.line / 2, "muted", anchor="right")

    def _waits(self, x0: float, x1: float, y0: float, y1: float) -> None:
        sheet, t, b = self.sheet, self.t, foremost(self.found)
        sheet.put(
            first_fit(sheet, x1 - x0, t("kernel_gaps.waits", side=title(b, t)), t("kernel_gaps.waits.short")), x0, y0 + sheet.line / 2
        )
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
        found = [
            replace(BUSY, label=busy),
            replace(WAIT, label=t("kernel_gaps.legend.wait")),
            replace(HOST, label=t("kernel_gaps.legend.host")),
        ]
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


def host_cells(b: Burst, wide: int, window: tuple[float, float], stages: bool) -> np.ndarray:
    """uint8 [wide]: stages of the host, or its launches, each at least a cell wide; clear elsewhere."""
    cells = np.full(wide, CLEAR, np.uint8)
    is_launch = np.array([name.startswith("cu") for name in b.it.names], bool)
    mine = b.it.host[is_launch[b.it.host["name"]] != stages] if len(b.it.host) else b.it.host
    scale = wide / (window[1] - window[0])
    for start, stop in zip((mine["start_ns"] - b.zero).tolist(), (mine["stop_ns"] - b.zero).tolist()):
        first, last = (start - window[0]) * scale, (stop - window[0]) * scale
        if last < 0 or first >= wide:
            continue
        first = max(int(first), 0)
        cells[first : max(int(last), first + 1)] = 2 if stages else 3
        if stages and last < wide and int(last) > first + 3:
            cells[int(last) - 1] = CLEAR
    return cells


# ---- what can be asked for ----


def _offers(trace: Trace, state: ViewState, found: tuple[Burst, ...]) -> tuple[Offer, ...]:
    t, step = words(state.language, WORDS), trace.clamp(state.step)
    works = len(trace.rows("works", step, step))
    why = "" if works else t("kernel_gaps.offer.why")
    both = t("kernel_gaps.offer.both")
    one = tuple((t(f"kernel_gaps.offer.{'on' if on else 'off'}"), {"step": step, "modes": [on]}) for on in (False, True))
    modes = ((both, {"step": step}), *one)
    if " CPU" in str(trace.meta.get("device", "")):  # it has no graphs
        modes = ((t("kernel_gaps.offer"), {"step": step, "modes": [False]}),)
    return (Offer("timeline", t("kernel_gaps.offer"), "timeline", modes, why),)


def summary(trace: Trace, state: ViewState) -> str:
    step, t = trace.clamp(state.step), words(state.language, WORDS)
    found = bursts(trace, step)
    if not found:
        return t("kernel_gaps.damaged" if of_kind(trace, Timeline) else "kernel_gaps.empty", step=step)
    longest = waits(foremost(found), t, 1)
    last = [t("kernel_gaps.longest", wait=longest[0][1])] if longest else []
    return " ".join([headline(found, t) + ".", sentences(found, t)[0], *notes(found, step, t), *last])


def _ask(answer: Callable[[tuple[Burst, ...]], str]) -> Callable[[Trace, ViewState], str]:
    def found(trace: Trace, state: ViewState) -> str:
        of = bursts(trace, trace.clamp(state.step))
        return answer(of)[:20] if of else ""

    return found


def _longest_after(found: tuple[Burst, ...]) -> str:
    of = foremost(found)
    places = of.longest(1)
    return of.name(places[0]) if places else ""


WORDS = {
    "kernel_gaps.empty": (
        "No burst was taken yet. Press “Take a timeline”: the requests of step {step:,} then run on for some steps with a clock on every "
        "launch and every kernel."
    ),
    "kernel_gaps.damaged": "The timelines of this record are too short or damaged. Press “Take a timeline” on the live engine.",
    "kernel_gaps.busy.gpu": "GPU busy {busy}",
    "kernel_gaps.busy.cpu": "In operations {busy}",
    "kernel_gaps.how.gpu": "under the profiler",
    "kernel_gaps.how.cpu": "with the clocks",
    "kernel_gaps.what.gpu": "kernels",
    "kernel_gaps.what.cpu": "operations",
    "kernel_gaps.says": ("Mean wait between two {what}: {gap}. {kernels} {what} a step. A step takes {token} {how}, {plain} without."),
    "kernel_gaps.says.short": "Mean wait {gap}; {kernels} {what} a step in {token}.",
    "kernel_gaps.says.shorter": "Mean wait {gap}.",
    "kernel_gaps.recorded": "The GPU's part is of a recording: {device}.",
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
    "kernel_gaps.figure.kernels": "{value} {what}",
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
    "kernel_gaps.wait.layer": "{name}, L{layer}",
    "kernel_gaps.wait.why": " ({stage})",
    "kernel_gaps.longest": "Longest wait: {wait}.",
    "kernel_gaps.stage.schedule": "schedule",
    "kernel_gaps.stage.build": "build",
    "kernel_gaps.stage.launch": "launch",
    "kernel_gaps.stage.sync": "sync",
    "kernel_gaps.stage.commit": "commit",
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
        Ask("After which kernel or operation is the longest of the listed waits?", _ask(_longest_after)),
    ),
    order=125,
)
