"""Kernel page: what does a kernel compute, how exact and how fast is it, and why not in Python?

A list of the engine's kernels; of the chosen one its formula and its newest run: largest error against the reference,
time, bytes and FLOPs a second, and how much of this device's measured ceiling that is. Below, the same operation as a
Python loop, as torch operations and as our kernel on one logarithmic axis of time. Reference, Triton source and
docstring stand beside the plot as documents. One iteration of the loop is measured; all of them are that times their
number, which is said, unless all were run.

Rejected: bars (on a logarithmic axis a bar's length means nothing), and a bar for a kernel that could not run here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.artifacts import Ceilings, KernelCard, KernelRun, of_kind
from engine.trace import Trace
from viz.layout import Sheet, message, too_small, visible, wrap
from viz.measured import LogScale, brief, ceilings, first_fit, fit_lines, positive, put_lines, window
from viz.theme import count, rate
from viz.view import Ask, Badge, Document, Frame, Mark, Offer, Paint, Raster, Series, View, ViewState
from viz.words.catalogue import Words, cut, words

TALK_US = (10.0, 100.0)  # the talk: an iteration of a Python loop
NARROW = 46  # characters: below, the list is one line over the page
MAX_CHOICES = 30
MAX_LIST = 12  # kernels that are named at once: a panel has 40 texts
TALL = 2.0  # lines a way, from which on its name stands above its time


# ---- what is known ----


@dataclass(frozen=True)
class Page:
    """A kernel, its newest run and the ceilings of the device that ran it."""

    cards: tuple[KernelCard, ...]
    card: KernelCard
    run: KernelRun | None
    top: Ceilings | None

    @property
    def ours_us(self) -> float:
        """Our kernel's time: the graph's replay where that is shorter, since it leaves the launch out; 0.0 if it did not run."""
        found = [us for us in (positive(self.run.kernel_us), positive(self.run.graph_us)) if us] if self.run else []
        return min(found, default=0.0)

    @property
    def bytes_per_s(self) -> float:
        return positive(self.run.bytes) / self.ours_us * 1e6 if self.ours_us else 0.0

    @property
    def flops_per_s(self) -> float:
        return positive(self.run.flops) / self.ours_us * 1e6 if self.ours_us else 0.0

    @property
    def of_ceiling(self) -> tuple[float, str]:
        """(share of the ceiling that it comes nearer to, "copy" or "matmul"); (0.0, "") where one of both is not known."""
        if self.top is None or not (self.bytes_per_s or self.flops_per_s):
            return 0.0, ""
        return max((self.bytes_per_s / (self.top.copy_gbps * 1e9), "copy"), (self.flops_per_s / (self.top.matmul_tflops * 1e12), "matmul"))

    @property
    def loop_us(self) -> float:
        """The whole loop: one iteration times their number; 0.0 without a loop."""
        return positive(self.run.loop_us) * positive(self.run.loop_iterations) if self.run else 0.0

    @property
    def loop_measured(self) -> bool:
        return self.run is not None and self.run.loop_ran >= self.run.loop_iterations

    @property
    def exact(self) -> bool | None:
        """Is the error within the tolerance? None if it is not known."""
        if self.run is None or not np.isfinite(self.run.max_error) or not positive(self.run.tolerance):
            return None
        return self.run.max_error <= self.run.tolerance


def page(trace: Trace, state: ViewState) -> Page | None:
    """The selected kernel's, else that of the newest run, else the first; None without cards."""
    cards = tuple({c.name: c for c in of_kind(trace, KernelCard)}.values())
    if not cards:
        return None
    named = {c.name: c for c in cards}
    runs = of_kind(trace, KernelRun)
    kind, _, name = (state.selection or "").partition(":")
    last = next((r.name for r in reversed(runs) if r.name in named), cards[0].name)
    wanted = next((n for n in (name, name.rpartition(":")[0]) if kind == "kernel" and n in named), last)
    run = next((r for r in reversed(runs) if r.name == wanted), None)
    return Page(cards, named[wanted], run, ceilings(trace, run.device) if run else None)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to do the operation: µs, and whether that was computed from one iteration."""

    id: str
    us: float
    computed: bool = False


def ways(it: Page) -> tuple[Way, ...]:
    """Those that have a time, as they stand below each other."""
    if it.run is None:
        return ()
    found = (
        Way("iteration", positive(it.run.loop_us)), Way("loop", it.loop_us, not it.loop_measured), Way("torch", positive(it.run.torch_us)),
        Way("kernel", positive(it.run.kernel_us)), Way("graph", positive(it.run.graph_us)),
    )  # fmt: skip
    return tuple(w for w in found if w.us)


def figure(trace: Trace, state: ViewState) -> Frame:
    it = page(trace, state)
    if it is None:
        return message(summary(trace, state), state, Badge("measured"))
    t = words(state.language, WORDS)
    extra = {"offers": _offers(it, t), "documents": _documents(it, t), "badges": _badges(it, t)}
    if too_small(state):
        return replace(message(summary(trace, state), state), **extra)
    return replace(_Picture(state, it, t).frame(), **extra)


class _Picture:
    """The list of kernels at the left (narrow: a line at the top); the chosen one's page at the right."""

    def __init__(self, state: ViewState, it: Page, t: Words) -> None:
        self.state, self.it, self.t, self.sheet = state, it, t, Sheet(state)
        sheet = self.sheet
        self.narrow = sheet.width < NARROW * sheet.advance
        longest = max(sheet.span(visible(c.name)) for c in it.cards) + 8
        self.list_width = 0.0 if self.narrow else min(longest, sheet.width * 0.3)
        self.x0 = 12.0 if self.narrow else 12 + self.list_width + 28
        self.x1 = sheet.width - 12.0
        self.marks: list[Mark] = []
        self.series: list[Series] = []
        self.rasters: list[Raster] = []

    def frame(self) -> Frame:
        sheet = self.sheet
        top = self._switch() if self.narrow else self._list()
        y = self._facts(top)
        self._times(y + 4)
        legend = ()
        if any(w.computed for w in ways(self.it)):
            legend = (Paint("ink", self.t("kernel_page.legend.measured")), Paint("paper", self.t("kernel_page.legend.computed")))
        return Frame(
            axes=sheet.axes(), rasters=tuple(self.rasters), series=tuple(self.series), labels=tuple(sheet.labels), marks=tuple(self.marks),
            legend=legend,
        )  # fmt: skip

    # ---- which kernel ----

    def _list(self) -> float:
        """A name a line; what has no room is counted, and its mark leads on."""
        sheet, names = self.sheet, [c.name for c in self.it.cards]
        at = names.index(self.it.card.name)
        sheet.put(self.t("kernel_page.list"), 12, 8 + sheet.line / 2, "muted", room=self.list_width)
        top, most = 8 + sheet.line, min(int((sheet.height - 14) / sheet.line) - 1, MAX_LIST)
        shown = window(len(names), at, most)
        for i, place in enumerate(shown):
            y = top + (i + 0.5) * sheet.line
            before, after = place == shown[0] and place > 0, place == shown[-1] and place < len(names) - 1
            text = visible(names[place])
            if (before or after) and place != at:
                n = place + 1 if before else len(names) - place
                text = self.t("kernel_page.before" if before else "kernel_page.after", n=n)
            chosen = place == at
            sheet.put(text, 12, y, "ink" if chosen else "muted", room=self.list_width, weight=700 if chosen else 400)
            self._choose(place, (4, 12 + self.list_width + 6, y - sheet.line / 2 + 1, min(y + sheet.line / 2 - 1, sheet.height)))
        x = self.x0 - 12
        self.series.append(Series("border", *np.array([[x, x], [8, sheet.height - 8]], np.float32), "line", Paint("muted", alpha=0.6), 1.0))
        return 8.0

    def _switch(self) -> float:
        """‹ and › around the name: the kernels before and after it."""
        sheet, names = self.sheet, [c.name for c in self.it.cards]
        at, y = names.index(self.it.card.name), 8 + sheet.line / 2
        half = sheet.line / 2
        for place, x, sign in (((at - 1) % len(names), 12, "‹"), ((at + 1) % len(names), sheet.width - 12 - sheet.span("›"), "›")):
            if place != at:
                sheet.put(sign, x, y, weight=700)
                self._choose(place, (max(x - 10, 0), min(x + 24, sheet.width), y - half, y + half))
        name = f"{visible(names[at])} ({at + 1}/{len(names)})"
        sheet.put(first_fit(sheet, sheet.width - 90, name, visible(names[at])), sheet.width / 2, y, anchor="center", weight=700)
        return 8.0 + sheet.line

    def _choose(self, place: int, box: tuple[float, float, float, float]) -> None:
        card = self.it.cards[place]
        chosen = card.name == self.it.card.name
        said = visible(card.name)[:60]
        self.marks.append(Mark(f"kernel:{card.name}", *box, said, "accent" if chosen else None, visible(card.formula)[:200]))

    # ---- what it is and how good ----

    def _facts(self, top: float) -> float:
        """Name, formula, the run's shapes, its error and its speed: as many lines as leave room for the times. Where they end."""
        sheet, t, it = self.sheet, self.t, self.it
        room = self.x1 - self.x0
        rows = len(ways(it)) + 1
        free = int((sheet.height - top - 8) / sheet.line) - (max(rows + 1, 3) if it.run else 1)
        if not self.narrow:
            name = visible(it.card.name)
            role = t(f"kernel_page.backend.{it.card.backend}" if it.card.backend in ("triton", "torch") else "kernel_page.backend.none")
            sheet.put(first_fit(sheet, room, f"{name}: {role}", name), self.x0, top + sheet.line / 2, weight=700)
            top, free = top + sheet.line, free - 1
        speed = self._speed_lines(max(free, 1))
        formula = wrap(visible(it.card.formula), max(int(room / sheet.advance), 4))
        most = max(min(len(formula), free - len(speed), 3), 0)
        if most:
            formula = formula if most == len(formula) else [*formula[: most - 1], sheet.fit(formula[most - 1] + " …", room)]
            for i, line in enumerate(formula):
                sheet.put(line, self.x0, top + (i + 0.5) * sheet.line, room=room, mono=True)
            top += len(formula) * sheet.line
        for line, color, weight in speed:
            sheet.put(line, self.x0, top + sheet.line / 2, color, room=room, weight=weight)
            top += sheet.line
        return top

    def _speed_lines(self, most: int) -> list[tuple[str, str, int]]:
        """(text, colour, weight) of each line about the run, the most telling ones where not all have room."""
        sheet, t, it, room = self.sheet, self.t, self.it, self.x1 - self.x0
        if it.run is None:
            lines = fit_lines(sheet, room, max(most, 1), t("kernel_page.not_run"), t("kernel_page.not_run.short"))
            return [(line, "muted", 400) for line in lines]
        speed = speed_forms(it, t)
        blocks = [  # (how early it goes when room is scarce, forms, colour, weight)
            (1, self._case(), "muted", 400),
            (2, error_forms(it, t), "error" if it.exact is False else "ink", 400),
            *((0 if i == 0 else 3, forms, "ink", 700) for i, forms in enumerate(speed)),
        ]
        kept = sorted(range(len(blocks)), key=lambda i: blocks[i][0])[: max(most, 1)]
        lines, spare = [], max(most, 1) - len(kept)
        for i in sorted(kept):
            _, forms, color, weight = blocks[i]
            wrapped = fit_lines(sheet, room, 2 if spare > 0 else 1, *forms)
            spare -= len(wrapped) - 1
            lines += [(line, color, weight) for line in wrapped]
        return lines

    def _case(self) -> tuple[str, str]:
        """The run's case, shapes, type and device; without the first and last."""
        run = self.it.run
        case, shapes, dtype, device = (visible(text)[:80] for text in (run.case, run.shapes, run.dtype, run.device))
        return f"{case}: {shapes}, {dtype}, {device}", f"{shapes}, {dtype}"

    # ---- one axis of time ----

    def _times(self, top: float) -> None:
        """A way a line, its time as a point on a logarithmic axis and in words; the sentence about the loop below."""
        sheet, t, it = self.sheet, self.t, self.it
        found = ways(it)
        if not found or sheet.height - top < 2.5 * sheet.line:
            self._sentence(top, sheet.height - 6)
            return
        total = (sheet.height - top - 8) / sheet.line
        most = min(max(int(total - (TALL * len(found) + 1 if total > TALL * len(found) + 4 else len(found)) - 1), 0), 4)
        lines = fit_lines(sheet, self.x1 - self.x0, most, *conclusion(it, t)) if most else []
        rows_end = sheet.height - 8 - (len(lines) + 1) * sheet.line
        found = found[-max(int((rows_end - top) / sheet.line + 0.01), 1) :]
        step = min((rows_end - top - sheet.line) / len(found), 3.0 * sheet.line)
        tall = step >= TALL * sheet.line
        step = step if tall else (rows_end - top) / len(found)
        step = step if tall else min(step, 1.6 * sheet.line)
        names = {w.id: self._way_name(w, 1.0 if tall else 0.45) for w in found}
        widest = 0.0 if tall else min(max(sheet.span(n) for n in names.values()), (self.x1 - self.x0) * 0.45) + 14
        axis = LogScale.over([*(w.us for w in found), *TALK_US], self.x0 + widest, self.x1 - 8 * sheet.advance, 2.0, 0.06)
        self._band(axis, top, top + step * len(found) + (sheet.line if tall else 0), tall)
        top += sheet.line if tall else 0
        bottom = top + step * len(found)
        for i, way in enumerate(found):
            self._way(way, names[way.id], axis, (top + i * step, top + (i + 1) * step))
        put_lines(sheet, lines, self.x0, bottom + 4 + sheet.line if tall else sheet.height - 6 - len(lines) * sheet.line)
        self._axis(axis, bottom)  # last: the times stand beside their points too

    def _way_name(self, way: Way, share: float) -> str:
        n = int(positive(self.it.run.loop_iterations))
        room = (self.x1 - self.x0) * share
        key = f"kernel_page.way.{way.id}" + (".computed" if way.computed else "")
        return first_fit(self.sheet, room, self.t(key, n=n), "torch" if way.id == "torch" else self.t(f"kernel_page.way.{way.id}.short"))

    def _way(self, way: Way, name: str, axis: LogScale, box: tuple[float, float]) -> None:
        """Its name left of its line; above it where there are two lines."""
        sheet, x, (y0, y1) = self.sheet, axis(way.us), box
        tall, ours = y1 - y0 >= TALL * sheet.line, way.id in ("kernel", "graph")
        y = y0 + 1.4 * sheet.line if tall else (y0 + y1) / 2
        room = self.x1 - self.x0 if tall else axis.start - self.x0 - 8
        sheet.put(name, self.x0, y0 + 0.5 * sheet.line if tall else y, weight=700 if ours else 400, room=room)
        line, hatch = np.array([[axis.start, x], [y, y]], np.float32), "diagonal" if way.computed else None
        self.series.append(Series(f"line {way.id}", *line, "line", Paint("accent" if ours else "muted", hatch=hatch), 2.0))
        color, symbol = "paper" if way.computed else "accent" if ours else "ink", "diamond" if ours else "circle"
        self.series.append(Series(way.id, *np.array([[x], [y]], np.float32), "markers", Paint(color), 13.0, symbol=symbol))
        text = brief(way.us)
        sheet.put(text, x + 12, y, weight=700, room=sheet.width - x - 14)
        ident = f"kernel:{self.it.card.name}:{way.id}"
        area = (self.x0 - 4, self.x1, y0 + 1, min(y1 - 1, sheet.height))
        outline = "accent" if self.state.selection == ident else None
        self.marks.append(Mark(ident, *area, f"{name}: {text}", outline, self._detail(way)))

    def _detail(self, way: Way) -> str:
        """Computed how, and how often ours is in it."""
        it, said = self.it, []
        if way.id == "loop":
            fields = {"n": int(it.run.loop_iterations), "each": brief(positive(it.run.loop_us)), "ran": int(positive(it.run.loop_ran))}
            said.append(self.t("kernel_page.detail.loop" if way.computed else "kernel_page.detail.loop.ran", **fields))
        if it.ours_us and way.id in ("loop", "torch"):
            said.append(self.t("kernel_page.detail.ours", times=_often(way.us / it.ours_us)))
        return " ".join(said)

    def _band(self, axis: LogScale, top: float, bottom: float, tall: bool) -> None:
        """What the talk says an iteration costs, in words over it where there is a line, else under the axis."""
        sheet, (a, b) = self.sheet, (axis(us) for us in TALK_US)
        self.rasters.append(Raster("talk", np.zeros((1, 1), np.uint8), a, b, top, bottom, (Paint("free", alpha=0.5),)))
        y = top + sheet.line / 2 if tall else bottom + 2 + sheet.line / 2
        for form in (self.t("kernel_page.talk"), "10–100 µs"):
            x = min(max((a + b) / 2, axis.start + sheet.span(form) / 2), sheet.width - 12 - sheet.span(form) / 2)
            if sheet.span(form) <= sheet.width - 12 - axis.start and sheet.put(form, x, y, "muted", anchor="center"):
                break

    def _axis(self, axis: LogScale, bottom: float) -> None:
        """Powers of ten below, with as many names as fit."""
        sheet, y = self.sheet, bottom + 2 + self.sheet.line / 2
        self.series.append(Series("axis", *np.array([[axis.start, axis.stop], [bottom, bottom]], np.float32), "line", Paint("muted"), 1.5))
        points: list[tuple[float, float]] = []
        for us in axis.decades(min(max(int((axis.stop - axis.start) / (9 * sheet.advance)), 1), 4)):
            at = axis(us)
            points += [(at, bottom), (at, bottom + 5), (np.nan, np.nan)]
            sheet.put(brief(us), at, y, "muted", anchor="center")
        xy = np.array(points, np.float32).reshape(-1, 2)
        self.series.append(Series("ticks", xy[:, 0].copy(), xy[:, 1].copy(), "line", Paint("muted"), 1.5))

    def _sentence(self, top: float, bottom: float) -> None:
        most = int((bottom - top) / self.sheet.line)
        if self.it.run is not None and most > 0:
            put_lines(self.sheet, fit_lines(self.sheet, self.x1 - self.x0, most, *conclusion(self.it, self.t)), self.x0, top)


# ---- words ----


def _often(ratio: float) -> str:
    """How often: "1.4", "18", "9,600"."""
    return f"{ratio:.2g}" if ratio < 9.95 else count(float(f"{ratio:.2g}") if ratio >= 1000 else ratio)


def error_forms(it: Page, t: Words) -> tuple[str, ...]:
    if it.exact is None:
        return (t("kernel_page.error.unknown"),)
    fields = {"error": f"{it.run.max_error:.2g}", "tolerance": f"{it.run.tolerance:.2g}"}
    key = "kernel_page.error" if it.exact else "kernel_page.error.over"
    return t(key, **fields), t(f"{key}.short", **fields)


def speed_forms(it: Page, t: Words) -> list[tuple[str, ...]]:
    """A tuple of forms a line: time and share of the ceiling, then bytes and FLOPs a second."""
    if not it.ours_us:
        return [(t("kernel_page.no_gpu"), t("kernel_page.no_gpu.short"))]
    graph = positive(it.run.graph_us) == it.ours_us
    fields = {"time": brief(it.ours_us), "gbps": rate(it.bytes_per_s, "B/s"), "tflops": rate(it.flops_per_s, "FLOP/s")}
    share, which = it.of_ceiling
    moved = (t("kernel_page.rates", **fields), f"{fields['gbps']}, {fields['tflops']}")
    where = t("kernel_page.in_graph") if graph else ""
    if not (it.bytes_per_s or it.flops_per_s):
        return [(fields["time"],)]
    if not which:
        return [(t("kernel_page.time.no_ceiling", where=where, **fields), fields["time"]), moved]
    top = it.top.copy_gbps * 1e9 if which == "copy" else it.top.matmul_tflops * 1e12
    fields |= {
        "share": percent_of(share),
        "ceiling": rate(top, "B/s" if which == "copy" else "FLOP/s"),
        "which": t(f"kernel_page.ceiling.{which}"),
    }
    return [
        (
            t("kernel_page.time", where=where, **fields),
            t("kernel_page.time.shorter", **fields),
            fields["time"],
        ),
        moved,
    ]


def percent_of(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.2g} %"


def conclusion(it: Page, t: Words) -> tuple[str, ...]:
    """Why a Python loop cannot do, in numbers."""
    each = positive(it.run.loop_us) if it.run else 0.0
    base = it.ours_us or positive(it.run.torch_us if it.run else 0)
    if not each or not base:
        return (t("kernel_page.says.no_loop"), t("kernel_page.says.no_loop.short"))
    whose = t("kernel_page.ours") if it.ours_us else "torch"
    fields = {"each": brief(each), "n": int(positive(it.run.loop_iterations)), "whole": brief(it.loop_us), "whose": whose}
    fields |= {"times": _often(it.loop_us / base), "time": brief(base)}
    forms = ("", ".short", ".shorter")
    if each >= base:
        return tuple(t(f"kernel_page.says.one{form}", **fields) for form in forms)
    return tuple(t(f"kernel_page.says{form}", **fields) for form in forms)


def _badges(it: Page, t: Words) -> tuple[Badge, ...]:
    if it.run is None:
        return (Badge("state", t("kernel_page.badge.card")),)
    found = [Badge("measured", t("kernel_page.badge.run", device=visible(it.run.device)[:60]))]
    if it.loop_us and not it.loop_measured:
        found.append(Badge("computed", t("kernel_page.badge.loop")))
    return tuple(found)


def _offers(it: Page, t: Words) -> tuple[Offer, ...]:
    """Run it on each of its cases; measure the ceilings that its speed is compared with."""
    cases = [case for case in it.card.cases if len(case) == 2][:MAX_CHOICES]
    choices = tuple((cut(visible(f"{name}: {shapes}"), 60), {"name": it.card.name, "case": name}) for name, shapes in cases)
    ceiling = Offer("ceilings", t("kernel_page.offer.ceilings"), "ceilings", ((t("kernel_page.offer.ceilings"), {}),))
    return (Offer("run", t("kernel_page.offer.run"), "kernel", choices), ceiling) if choices else (ceiling,)


def _documents(it: Page, t: Words) -> tuple[Document, ...]:
    card = it.card
    texts = (
        ("formula", card.formula, "formula"),
        ("reference", card.reference, "code"),
        ("source", card.source, "code"),
        ("text", card.text, "prose"),
    )
    return tuple(Document(t(f"kernel_page.document.{name}"), str(text), kind) for name, text, kind in texts if str(text).strip())


def summary(trace: Trace, state: ViewState) -> str:
    t, it = words(state.language, WORDS), page(trace, state)
    if it is None:
        return t("kernel_page.empty")
    said = [": ".join(text for text in (visible(it.card.name), visible(it.card.formula)) if text)[:400]]
    if it.run is None:
        return f"{said[0]}. {t('kernel_page.not_run')}"
    said += [forms[0] for forms in speed_forms(it, t)] + [error_forms(it, t)[0], conclusion(it, t)[0]]
    return ". ".join(text.rstrip(".。") for text in said) + "."


# ---- asks ----


def _ask(answer) -> object:
    """An answer from a kernel that ran; "" where none did."""

    def found(trace: Trace, state: ViewState) -> str:
        it = page(trace, state)
        return "" if it is None or it.run is None else answer(it)

    return found


def _loop_whole(it: Page) -> str:
    return brief(it.loop_us) if it.loop_us else ""


WORDS = {
    "kernel_page.empty": (
        "Each kernel of the engine has a page here, with its formula, its source and its measured speed. The live engine brings them: "
        "type a prompt, or open a recording that has them."
    ),
    "kernel_page.list": "kernels",
    "kernel_page.before": "↑ {n:,} more",
    "kernel_page.after": "↓ {n:,} more",
    "kernel_page.backend.triton": "serves this model in Triton",
    "kernel_page.backend.torch": "serves this model in torch",
    "kernel_page.backend.none": "not used by this model",
    "kernel_page.not_run": "Not run yet: press “Run it” and choose the shapes. It is then timed beside torch and a Python loop.",
    "kernel_page.not_run.short": "Not run yet: press “Run it”.",
    "kernel_page.error": "largest error {error} of {tolerance} allowed: ✓",
    "kernel_page.error.short": "error {error} ≤ {tolerance} ✓",
    "kernel_page.error.over": "largest error {error}, more than the {tolerance} allowed: ✗",
    "kernel_page.error.over.short": "error {error} > {tolerance} ✗",
    "kernel_page.error.unknown": "error not measured",
    "kernel_page.time": "{time}{where}: {share} of the measured {which} ceiling, {ceiling}",
    "kernel_page.time.shorter": "{time}: {share} of {which} ({ceiling})",
    "kernel_page.time.no_ceiling": "{time}{where}; measure the ceilings to see how good that is",
    "kernel_page.in_graph": " in a CUDA graph",
    "kernel_page.ceiling.copy": "copy",
    "kernel_page.ceiling.matmul": "matmul",
    "kernel_page.rates": "moves {gbps}, computes {tflops}",
    "kernel_page.no_gpu": "The Triton kernel needs a GPU; its reference runs here.",
    "kernel_page.no_gpu.short": "needs a GPU; the reference runs here",
    "kernel_page.way.iteration": "one Python iteration",
    "kernel_page.way.iteration.short": "one iteration",
    "kernel_page.way.loop": "Python loop, all {n:,}",
    "kernel_page.way.loop.computed": "Python loop: × {n:,} (computed)",
    "kernel_page.way.loop.short": "Python loop",
    "kernel_page.way.torch": "torch operations",
    "kernel_page.way.kernel": "our Triton kernel",
    "kernel_page.way.kernel.short": "our kernel",
    "kernel_page.way.graph": "ours in a CUDA graph",
    "kernel_page.way.graph.short": "in a graph",
    "kernel_page.talk": "talk: one iteration 10–100 µs",
    "kernel_page.ours": "our kernel",
    "kernel_page.says": "At {each} an iteration, {n:,} iterations of Python take {whole}: {times} times as long as {whose} ({time}).",
    "kernel_page.says.short": "{n:,} × {each} in Python = {whole}: {times} times {whose}.",
    "kernel_page.says.shorter": "Python: {times} × {whose}",
    "kernel_page.says.one": (
        "One iteration in Python ({each}) already takes longer than all of {whose} ({time}); {n:,} of them take {whole}, "
        "{times} times as long."
    ),
    "kernel_page.says.one.short": "One Python iteration takes {each}, all of {whose} {time}; the loop {times} times that.",
    "kernel_page.says.one.shorter": "Python: {times} × {whose}",
    "kernel_page.says.no_loop": "It was not timed as a Python loop.",
    "kernel_page.says.no_loop.short": "no Python loop",
    "kernel_page.detail.loop": "Computed: {n:,} × {each}; {ran:,} iterations were run.",
    "kernel_page.detail.loop.ran": "Measured: all {n:,} iterations were run, {each} each.",
    "kernel_page.detail.ours": "{times} times as long as our kernel.",
    "kernel_page.legend.measured": "measured",
    "kernel_page.legend.computed": "hollow: computed from one iteration",
    "kernel_page.badge.card": "the kernel's own file",
    "kernel_page.badge.run": "median times: {device}",
    "kernel_page.badge.loop": "whole loop = one iteration × iterations",
    "kernel_page.document.formula": "Formula",
    "kernel_page.document.reference": "Reference",
    "kernel_page.document.source": "Triton source",
    "kernel_page.document.text": "What it does",
    "kernel_page.offer.run": "Run it",
    "kernel_page.offer.ceilings": "Measure the ceilings",
}

VIEW = View(
    name="kernel_page",
    title="Kernel page",
    question="What does a kernel compute, how exact and fast is it, and why not in Python?",
    figure=figure,
    summary=summary,
    words=WORDS,
    asks=(
        Ask("Which kernel's page is this?", _ask(lambda it: it.card.name[:20])),
        Ask(
            "How long do the torch operations take?", _ask(lambda it: brief(positive(it.run.torch_us)) if positive(it.run.torch_us) else "")
        ),
        Ask(
            "How long does one iteration of the Python loop take?",
            _ask(lambda it: brief(positive(it.run.loop_us)) if positive(it.run.loop_us) else ""),
        ),
        Ask("How long would the whole Python loop take?", _ask(_loop_whole)),
        Ask("What is the largest error?", _ask(lambda it: f"{it.run.max_error:.2g}" if it.exact is not None else "")),
    ),
    order=88,
)
