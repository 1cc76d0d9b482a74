"""Roofline: what holds each operation of a step back: the memory, the arithmetic units, or the launches?

A point is one operation of the profiled step nearest to the shown one, its layers added up: FLOP a byte against FLOP/s,
both axes logarithmic. The roof is measured on the same device: copy bandwidth as a slope, matmul as a ceiling. FLOPs
and bytes are the operations' formulas, times are clocks. Earlier profiles stay as a fading trail, so that points move
as the batch grows. The verdict is in words with the numbers that say so.

Rejected: a verdict by the nearer roof alone (an operation that waits for its launch lies far below both), a point a layer
(thirty that cover each other), and hue for prefill (it tells requests apart).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from engine.artifacts import Ceilings, StepProfile, of_kind
from engine.trace import Trace
from viz.layout import Sheet, message, too_small, visible
from viz.measured import LogScale, brief, ceilings, first_fit, fit_lines, nearest, positive, put_lines, ridge, window
from viz.theme import count, data_size, duration, rate
from viz.view import Ask, Badge, Frame, Mark, Offer, Paint, Series, View, ViewState
from viz.words.catalogue import Words, cut, words

MEMORY, COMPUTE, LAUNCH, UNKNOWN = "memory", "compute", "launch", "unknown"
SYMBOLS = {"prefill": "square", "decode": "circle", "mixed": "diamond"}
SIGNS = {"prefill": "■", "decode": "●", "mixed": "◆"}
NEAR_LAUNCH = 1.5  # an operation as short as this many launches waits for the launch
TRAIL = 6  # earlier profiles
MAX_POINTS = 24
MAX_ROWS = 13
FORMS = ("whole", "short", "shorter")  # of the list's lines; all lines have the same
DOT = 13.0  # px
PLACES = ((12, 0, "left"), (-12, 0, "right"), (0, -1, "center"), (0, 1, "center"), (9, -0.8, "left"), (9, 0.8, "left"))  # of a point's name
WIDE = 68  # characters: from here on the list stands beside the plot


# ---- what was measured ----


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a step, all its calls added up. µs, FLOP and bytes; 0 where not known."""

    name: str
    calls: int
    device_us: float
    host_us: float
    flops: float
    bytes: float
    verdict: str = UNKNOWN
    roof: str = UNKNOWN  # memory or compute: what would hold it back if launches cost nothing

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.device_us * 1e6 if self.device_us else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.device_us * 1e6 if self.device_us else 0.0

    @property
    def drawn(self) -> bool:
        """It has a place on logarithmic axes: one that only moves bytes has none."""
        return bool(self.intensity and self.flops_per_s)


def judged(op: Operation, top: Ceilings | None) -> str:
    """launch: the host needs longer to launch it than the device to run it, it is about as short as an empty launch, or
    its work is so little that the ceilings would do it in less than one. Else by the lower ceiling at its intensity;
    unknown without ceilings or bytes."""
    launch = positive(top.launch_us) if top is not None else 0.0
    is_short = op.device_us / op.calls <= NEAR_LAUNCH * launch
    return LAUNCH if op.host_us > op.device_us or is_short or at_best(op, top) < launch else under(op, top)


def at_best(op: Operation, top: Ceilings | None) -> float:
    """µs that the ceilings need for the work of one call; infinite where it is not known."""
    if top is None or not (op.flops or op.bytes):
        return math.inf
    return max(op.bytes / (top.copy_gbps * 1e3), op.flops / (top.matmul_tflops * 1e6)) / op.calls


def under(op: Operation, top: Ceilings | None) -> str:
    """The lower of both ceilings at its intensity."""
    if top is None or not op.device_us or not (op.flops or op.bytes):
        return UNKNOWN
    return COMPUTE if not op.bytes or op.intensity >= ridge(top) else MEMORY


def operations(profile: StepProfile, top: Ceilings | None) -> tuple[Operation, ...]:
    """The operations of a profiled step that took time, longest first, each with its verdict."""
    found: dict[str, Operation] = {}
    for op in profile.ops:
        if not positive(op.device_us) and not positive(op.host_us):
            continue
        name = visible(str(op.name))
        old = found.get(name, Operation(name, 0, 0.0, 0.0, 0.0, 0.0))
        found[name] = Operation(
            name, old.calls + 1, old.device_us + positive(op.device_us), old.host_us + positive(op.host_us),
            old.flops + positive(op.flops), old.bytes + positive(op.bytes),
        )  # fmt: skip
    ordered = sorted(found.values(), key=lambda o: (-o.device_us, o.name))
    return tuple(replace(op, verdict=judged(op, top), roof=under(op, top)) for op in ordered)


def kind_of(profile: StepProfile) -> str:
    if positive(profile.prefill_tokens):
        return "mixed" if positive(profile.decode_tokens) else "prefill"
    return "decode"


@dataclass(frozen=True)
class Measured:
    """A profiled step with its device's ceilings and the profiles before it, newest first."""

    profile: StepProfile | None
    top: Ceilings | None
    ops: tuple[Operation, ...]
    before: tuple[StepProfile, ...]

    def of(self, *verdicts: str) -> int:
        return sum(op.verdict in verdicts for op in self.ops)


def measured(trace: Trace, state: ViewState) -> Measured:
    """Whatever there is; all of it may be missing."""
    profiles = [p for p in of_kind(trace, StepProfile) if any(positive(op.device_us) or positive(op.host_us) for op in p.ops)]
    profile = nearest(profiles, trace.clamp(state.step))
    top = ceilings(trace, profile.device if profile else None)
    if profile is None:
        return Measured(None, top, (), ())
    before = [p for p in profiles if p.step_id < profile.step_id and p.device == profile.device]
    before.sort(key=lambda p: -p.step_id)
    return Measured(profile, top, operations(profile, top), tuple(before[:TRAIL]))


def figure(trace: Trace, state: ViewState) -> Frame:
    it = measured(trace, state)
    if too_small(state) or (it.profile is None and it.top is None):
        frame = message(summary(trace, state), state, Badge("measured"))
        return replace(frame, offers=_offers(state))
    return _Picture(trace, state, it).frame()


class _Picture:
    """A sentence; the plot with its roof; the verdicts beside or below it; what the chosen operation measured."""

    def __init__(self, trace: Trace, state: ViewState, it: Measured) -> None:
        self.trace, self.state, self.it = trace, state, it
        self.t, self.sheet = words(state.language, WORDS), Sheet(state)
        self.chosen = self._chosen()
        self.numbers = {op.name: i + 1 for i, op in enumerate(it.ops)}
        sheet = self.sheet
        tall, room = sheet.height / sheet.line, sheet.width - 24
        self.head = fit_lines(sheet, room, 2 if tall >= 12 else 1, *sentences(it, self.t))
        self.foot = fit_lines(sheet, room, 3 if tall >= 20 else 2 if tall >= 15 else 1, *self._read_out()) if tall >= 11 else []
        self.top = 8 + len(self.head) * sheet.line + 6
        self.bottom = sheet.height - 6 - len(self.foot) * sheet.line
        self.marks: list[Mark] = []
        self.series: list[Series] = []
        self._boxes()

    def _boxes(self) -> None:
        """Where the plot and the list are, and their scales."""
        sheet, it = self.sheet, self.it
        beside = sheet.width >= WIDE * sheet.advance
        listed = len(it.ops)
        if beside:
            longest = max((sheet.span(self._row(op)) for op in it.ops), default=0.0) + 1
            list_width = min(max(longest, 24 * sheet.advance), sheet.width * 0.48)
            self.list_box = (sheet.width - 12 - list_width, sheet.width - 12, self.top, self.bottom)
            right, low = self.list_box[0] - 20, self.bottom
        else:
            rows = min(max(int((self.bottom - self.top) / sheet.line) - 7, 0), listed + 1, 8)
            low = self.bottom - rows * sheet.line
            self.list_box, right = (12, sheet.width - 12, low, self.bottom), sheet.width - 12
        self.plot = (12 + sheet.advance * 7.5, right, self.top + sheet.line + 4, low - 2 * sheet.line - 4)
        points = [p for ops in (it.ops, *(operations(b, None) for b in it.before)) for p in ops if p.drawn]
        x, y = [p.intensity for p in points], [p.flops_per_s for p in points]
        if it.top is not None:
            edge, peak = ridge(it.top), it.top.matmul_tflops * 1e12
            x, y = [*x, edge * 4, min([*x, edge]) / 2], [*y, peak * 1.5]
            if not points:
                x, y = [*x, edge / 300], [*y, peak / 300]
        x0, x1, y0, y1 = self.plot
        self.x = LogScale.over(x, x0, max(x1, x0 + 1), 2.0, 0.08)
        self.y = LogScale.over(y, max(y1, y0 + 1), y0, 2.0, 0.06)

    def frame(self) -> Frame:
        sheet, t, it = self.sheet, self.t, self.it
        put_lines(sheet, self.head, 12, 8, weight=700)
        put_lines(sheet, self.foot, 12, self.bottom)
        roomy = self.plot[3] - self.plot[2] >= 2.5 * sheet.line
        self._list()  # first: its texts matter more than the ticks'
        if roomy:
            self._axes()
            self._roof()
            self._trail()
            self._points()
        legend = []
        if it.ops:
            legend = [Paint("ink", t("roofline.legend.point")), Paint("paper", t("roofline.legend.launch"))]
            if it.before:
                legend.append(Paint("muted", t("roofline.legend.trail"), alpha=0.5))
        return Frame(
            badges=_badges(it, t), axes=sheet.axes(), series=tuple(self.series), labels=tuple(sheet.labels), marks=tuple(self.marks),
            legend=tuple(legend), offers=_offers(self.state),
        )  # fmt: skip

    def _chosen(self) -> Operation | None:
        """The selected operation, else the longest."""
        kind, _, name = (self.state.selection or "").partition(":")
        if kind in ("op", "row"):
            found = next((op for op in self.it.ops if op.name == name), None)
            if found is not None:
                return found
        return self.it.ops[0] if self.it.ops else None

    # ---- the plot ----

    def _line(self, name: str, points: list[tuple[float, float]], paint: Paint, width: float = 1.5) -> None:
        xy = np.array(points, np.float32).reshape(-1, 2)
        self.series.append(Series(name, xy[:, 0].copy(), xy[:, 1].copy(), "line", paint, width))

    def _axes(self) -> None:
        sheet, (x0, x1, y0, y1) = self.sheet, self.plot
        self._line("axes", [(x0, y0), (x0, y1), (x1, y1)], Paint("muted"), 1.5)
        ticks: list[tuple[float, float]] = []
        for value in self.x.decades(min(max(int((x1 - x0) / (8 * sheet.advance)), 1), 4)):
            at = self.x(value)
            sheet.put(_plain(value), at, y1 + 4 + sheet.line / 2, "muted", anchor="center")
            ticks += [(at, y1), (at, y1 + 5), (np.nan, np.nan)]
        for value in self.y.decades(min(max(int((y1 - y0) / (1.6 * sheet.line)), 1), 4)):
            at = self.y(value)
            sheet.put(rate(value, ""), x0 - 8, at, "muted", anchor="right", room=x0 - 8)
            ticks += [(x0 - 5, at), (x0, at), (np.nan, np.nan)]
        self._line("ticks", ticks, Paint("muted"), 1.5)
        sheet.put(self.t("roofline.axis.y"), 12, y0 - 4 - sheet.line / 2, "muted", room=x1 - 12)
        name = first_fit(sheet, x1 - x0, self.t("roofline.axis.x"), self.t("roofline.axis.x.short"))
        sheet.put(name, x1, y1 + 4 + sheet.line * 1.5, "muted", anchor="right")

    def _roof(self) -> None:
        """The lower of both ceilings at each intensity; what each is stands along it."""
        top, sheet, t = self.it.top, self.sheet, self.t
        if top is None:
            return
        low, high = 10.0**self.x.low, 10.0**self.x.high
        edge, peak, bytes_per_s = ridge(top), top.matmul_tflops * 1e12, top.copy_gbps * 1e9
        start = max(low, 10.0**self.y.low / bytes_per_s)
        bend = (self.x(edge), self.y(peak))
        self._line("roof", [(self.x(start), self.y(start * bytes_per_s)), bend, (self.x(high), self.y(peak))], Paint("accent"), 3.0)
        self._line("ridge", [bend, (bend[0], self.plot[3])], Paint("accent", hatch="diagonal"), 1.5)
        matmul, copy = rate(peak, "FLOP/s"), rate(bytes_per_s, "B/s")
        said = (t("roofline.roof.matmul", value=matmul), matmul)
        y = self.plot[2] - 4 - sheet.line / 2
        sheet.put(
            first_fit(sheet, self.plot[1] - self.plot[0], *said),
            self.plot[1],
            max(bend[1] - 6 - sheet.line / 2, y),
            "accent",
            anchor="right",
        )
        where = t("roofline.roof.ridge", value=count(edge) if edge >= 10 else f"{edge:.2g}")
        for x, anchor in ((bend[0] + 6, "left"), (bend[0] - 6, "right")):
            inside = self.plot[0] < (x + sheet.span(where) if anchor == "left" else x - sheet.span(where)) < self.plot[1]
            if inside and self._put_clear(where, x, self.plot[3] - 4 - sheet.line / 2, "accent", anchor):
                break
        self._slope_name(copy, start, edge, bytes_per_s)

    def _slope_name(self, copy: str, start: float, edge: float, bytes_per_s: float) -> None:
        """Left above the slope, where it is free of points."""
        text = self.t("roofline.roof.copy", value=copy)
        for share in (0.62, 0.45, 0.75, 0.3):
            at = start * (edge / start) ** share
            x, y = self.x(at) - 12, self.y(at * bytes_per_s) - self.sheet.line * 0.4
            for said in (text, copy):
                if x - self.sheet.span(said) > self.plot[0] + 4 and y > self.plot[2] and self._put_clear(said, x, y, "accent", "right"):
                    return

    def _put_clear(self, text: str, x: float, y: float, color: str, anchor: str) -> bool:
        """Put a text where it covers no point."""
        sheet, span = self.sheet, self.sheet.span(text)
        x0 = x - (span if anchor == "right" else 0)
        near = ((self.x(op.intensity), self.y(op.flops_per_s)) for op in self.it.ops if op.drawn)
        if any(x0 - 8 < px < x0 + span + 8 and abs(py - y) < sheet.line / 2 + 6 for px, py in near):
            return False
        return sheet.put(text, x, y, color, anchor=anchor) is not None

    def _trail(self) -> None:
        """Where the same operations were in earlier profiles; the chosen one's way is a line."""
        way = [self._at(self.chosen)] if self.chosen is not None and self.chosen.drawn else []
        for age, profile in enumerate(self.it.before, 1):
            ops = [op for op in operations(profile, None) if op.drawn and op.name in self.numbers]
            points = np.array([self._at(op) for op in ops], np.float32).reshape(-1, 2)
            paint = Paint("muted", alpha=max(0.75 - 0.1 * age, 0.2))
            symbol = SYMBOLS[kind_of(profile)]
            self.series.append(
                Series(f"step {profile.step_id}", points[:, 0].copy(), points[:, 1].copy(), "markers", paint, 7.0, symbol=symbol)
            )
            way += [self._at(op) for op in ops if way and op.name == self.chosen.name]
        if len(way) > 1:
            self._line("way", way, Paint("muted"), 1.5)

    def _at(self, op: Operation) -> tuple[float, float]:
        return self.x(op.intensity), self.y(op.flops_per_s)

    def _points(self) -> None:
        it = self.it
        drawn = [op for op in it.ops if op.drawn][:MAX_POINTS]
        if not drawn:
            return
        symbol = SYMBOLS[kind_of(it.profile)]
        for launch, paint in ((False, Paint("ink")), (True, Paint("paper"))):
            xy = np.array([self._at(op) for op in drawn if (op.verdict == LAUNCH) == launch], np.float32).reshape(-1, 2)
            name = "launch-bound" if launch else "operations"
            self.series.append(Series(name, xy[:, 0].copy(), xy[:, 1].copy(), "markers", paint, DOT, symbol=symbol))
        places: list[tuple[float, float]] = []
        for op in drawn:
            x, y = self._at(op)
            if all(abs(x - a) >= DOT or abs(y - b) >= DOT for a, b in places):
                places.append((x, y))
                outline = "accent" if op == self.chosen else None
                half = DOT / 2 + 4
                box = (max(x - half, 0), min(x + half, self.sheet.width), max(y - half, 0), min(y + half, self.sheet.height))
                self.marks.append(Mark(f"op:{op.name}", *box, self._row(op), outline, read_out(it, op, self.t)[0]))
        for op in drawn:
            self._name(op)

    def _name(self, op: Operation) -> None:
        """Its number and name beside the point, else its number, where there is room."""
        sheet, (x, y) = self.sheet, self._at(op)
        left, right, high, low = self.plot
        for text in (f"{self.numbers[op.name]} {cut(op.name, 16)}", f"{self.numbers[op.name]}"):
            span = sheet.span(text)
            for dx, dy, anchor in PLACES:
                at, level = x + dx, y + dy * (sheet.line / 2 + 10)
                x0 = at - {"left": 0, "right": span, "center": span / 2}[anchor]
                others = (self._at(o) for o in self.it.ops if o.drawn and o is not op)
                hits = any(x0 - 8 < px < x0 + span + 8 and abs(py - level) < sheet.line / 2 + 4 for px, py in others)
                inside = x0 >= left + 3 and x0 + span <= right and level - sheet.line / 2 >= high and level + sheet.line / 2 <= low
                if inside and not hits and sheet.put(text, at, level, anchor=anchor, weight=700 if op == self.chosen else 400):
                    return

    # ---- the list ----

    def _row(self, op: Operation, form: str = "whole") -> str:
        n, name, t = self.numbers[op.name], cut(op.name, 20), self.t
        if form == "whole":
            return f"{n} {name}: {t(f'roofline.verdict.{op.verdict}')}, {evidence(self.it, op, t)}"
        why = f", {evidence(self.it, op, t, short=True)}" if form == "short" else ""
        return f"{n} {name}: {t(f'roofline.word.{op.verdict}')}{why}"

    def _list(self) -> None:
        """A line an operation, longest first: its verdict and why."""
        sheet, t, it = self.sheet, self.t, self.it
        x0, x1, top, bottom = self.list_box
        most = int((bottom - top) / sheet.line + 0.01)
        if most < 1:
            return
        if not it.ops:
            put_lines(sheet, fit_lines(sheet, x1 - x0, most, t("roofline.no_profile")), x0, top, "muted")
            return
        beside = x0 > 12
        if beside and most >= 3:
            kind = kind_of(it.profile)
            said = t(f"roofline.shape.{kind}", sign=SIGNS[kind])
            sheet.put(first_fit(sheet, x1 - x0, said, SIGNS[kind]), x0, top + sheet.line / 2, "muted", room=x1 - x0)
            top, most = top + sheet.line, most - 1
        most = min(most, MAX_ROWS)
        hidden = len(it.ops) - most
        at = it.ops.index(self.chosen)
        shown = window(len(it.ops), at, most - (1 if hidden > 0 else 0)) if most > 1 else range(at, at + 1)
        form = next((f for f in FORMS if all(sheet.span(self._row(it.ops[k], f)) <= x1 - x0 for k in shown)), FORMS[-1])
        for i, place in enumerate(shown):
            op, y = it.ops[place], top + (i + 0.5) * sheet.line
            sheet.put(self._row(op, form), x0, y, weight=700 if op == self.chosen else 400, room=x1 - x0)
            outline = "accent" if op == self.chosen else None
            box = (x0 - 4, x1, max(y - sheet.line / 2 + 1, 0), min(y + sheet.line / 2 - 1, sheet.height))
            self.marks.append(Mark(f"row:{op.name}", *box, self._row(op), outline, read_out(it, op, t)[0]))
        if hidden > 0 and most > 1:
            y = top + (len(shown) + 0.5) * sheet.line
            sheet.put(t("roofline.more", n=len(it.ops) - len(shown)), x0, y, "muted", room=x1 - x0)

    def _read_out(self) -> tuple[str, ...]:
        return read_out(self.it, self.chosen, self.t) if self.chosen is not None else (self.t("roofline.ceilings.only"),)


# ---- words ----


def _plain(value: float) -> str:
    """A power of ten: "0.01", "1", "1,000"."""
    return f"{value:,.0f}" if value >= 1 else f"{value:.10f}".rstrip("0")


def _share(part: float, whole: float) -> str:
    """ "62 %", and "0.4 %" where that says more."""
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 9.5 else f"{share:.2g} %"


def evidence(it: Measured, op: Operation, t: Words, verdict: str = "", short: bool = False) -> str:
    """The few numbers behind a verdict (the operation's own, or this one)."""
    verdict = verdict or op.verdict
    if verdict == LAUNCH:
        each = {"host": brief(op.host_us / op.calls), "device": brief(op.device_us / op.calls) if op.device_us else "0 µs"}
        if op.host_us > op.device_us:
            number, _, unit = each["host"].partition(" ")
            host = number if each["device"].endswith(f" {unit}") else each["host"]
            return f"{host} > {each['device']}" if short else t("roofline.why.launch", **each)
        launch = brief(it.top.launch_us)
        if op.device_us / op.calls <= NEAR_LAUNCH * it.top.launch_us:
            return t("roofline.why.short", device=each["device"], launch=launch)
        work = brief(at_best(op, it.top))
        return f"{work} < {launch}" if short else t("roofline.why.small", work=work, launch=launch)
    if verdict == COMPUTE:
        return t("roofline.why.compute", share=_share(op.flops_per_s, it.top.matmul_tflops * 1e12))
    if verdict == MEMORY:
        return t("roofline.why.memory", share=_share(op.bytes_per_s, it.top.copy_gbps * 1e9))
    return rate(op.bytes_per_s, "B/s") if op.bytes else brief(op.device_us)


def read_out(it: Measured, op: Operation, t: Words) -> tuple[str, ...]:
    """All that was measured of an operation, the longest form first."""
    fields = {
        "name": op.name, "n": op.calls, "device": brief(op.device_us) if op.device_us else "0 µs",
        "host": brief(op.host_us) if op.host_us else "0 µs", "size": data_size(op.bytes), "flops": rate(op.flops, "FLOP"),
        "gbps": rate(op.bytes_per_s, "B/s"), "tflops": rate(op.flops_per_s, "FLOP/s"), "intensity": f"{op.intensity:.3g}",
        "verdict": t(f"roofline.verdict.{op.verdict}"), "why": evidence(it, op, t),
    }  # fmt: skip
    form = "roofline.read.call" if op.host_us == op.device_us else "roofline.read"  # a CPU's two clocks are one
    shortest = "{name}: {device}, {gbps}, {tflops}; {verdict}".format(**fields)
    said = [t(form, **fields), t(f"{form}.short", **fields), shortest]
    if op.verdict == LAUNCH and op.host_us > op.device_us and op.roof != UNKNOWN:
        without = t("roofline.read.without", verdict=t(f"roofline.verdict.{op.roof}"), why=evidence(it, op, t, op.roof))
        said = [said[0] + without, said[0], said[1] + without, *said[1:]]
    return tuple(said)


def sentences(it: Measured, t: Words) -> tuple[str, ...]:
    """What most operations wait for, the longest form first."""
    if it.profile is None:
        device = {
            "device": visible(it.top.device)[:40],
            "copy": rate(it.top.copy_gbps * 1e9, "B/s"),
            "matmul": rate(it.top.matmul_tflops * 1e12, "FLOP/s"),
        }
        return t("roofline.says.ceilings", **device), t("roofline.says.ceilings.short", **device)
    p, device = it.profile, sum(op.device_us for op in it.ops)
    done = t(f"roofline.did.{kind_of(p)}", prefill=int(positive(p.prefill_tokens)), decode=int(positive(p.decode_tokens)))
    fields = {"step": p.step_id, "did": done, "device": duration(device), "wall": duration(positive(p.wall_us)), "total": len(it.ops)}
    if it.top is None and positive(p.wall_us):
        return t("roofline.says.no_roof", n=it.of(LAUNCH), **fields), t("roofline.says.no_roof.short", n=it.of(LAUNCH), **fields)
    if it.top is None:
        return (t("roofline.says.no_roof.short", n=it.of(LAUNCH), **fields),)
    fields |= {"memory": it.of(MEMORY), "compute": it.of(COMPUTE), "launch": it.of(LAUNCH)}
    forms = ("", ".short", ".shorter") if positive(p.wall_us) else (".short", ".shorter")
    return tuple(t(f"roofline.says{form}", **fields) for form in forms)


def _badges(it: Measured, t: Words) -> tuple[Badge, ...]:
    source = it.profile or it.top
    found = [Badge("measured", t("roofline.badge.times", device=visible(source.device)[:60], dtype=visible(str(source.dtype))[:12]))]
    return (*found, Badge("computed", t("roofline.badge.formula"))) if it.ops else tuple(found)


def _offers(state: ViewState) -> tuple[Offer, ...]:
    t = words(state.language, WORDS)
    return tuple(Offer(job, t(f"roofline.offer.{job}"), job, ((t(f"roofline.offer.{job}"), {}),)) for job in ("profile", "ceilings"))


def summary(trace: Trace, state: ViewState) -> str:
    t, it = words(state.language, WORDS), measured(trace, state)
    if it.profile is None and it.top is None:
        return t("roofline.empty")
    said = [sentences(it, t)[0]]
    if it.ops:
        said.append(read_out(it, it.ops[0], t)[0])
    return " ".join(said)


# ---- asks ----


def _ask(answer) -> object:
    """An answer from a profiled step with ceilings; "" where one of both is missing."""

    def found(trace: Trace, state: ViewState) -> str:
        it = measured(trace, state)
        return "" if it.profile is None or it.top is None else answer(it)

    return found


WORDS = {
    "roofline.empty": (
        "Which operations wait for memory, which for arithmetic, which for their launch? Press “Profile the next step” and "
        "“Measure the ceilings”: the next step then runs with a clock around every operation."
    ),
    "roofline.no_profile": "No step was profiled yet: press “Profile the next step”.",
    "roofline.ceilings.only": "The lines are what this device can do at most. Profile a step to see its operations below them.",
    "roofline.axis.x": "FLOP for each byte moved →",
    "roofline.axis.x.short": "FLOP/byte →",
    "roofline.axis.y": "FLOP/s ↑",
    "roofline.roof.matmul": "matmul ceiling {value}",
    "roofline.roof.copy": "copy {value}",
    "roofline.roof.ridge": "ridge: {value} FLOP/byte",
    "roofline.verdict.memory": "memory-bound",
    "roofline.verdict.compute": "compute-bound",
    "roofline.verdict.launch": "launch-bound",
    "roofline.verdict.unknown": "no ceiling",
    "roofline.why.memory": "{share} of copy",
    "roofline.why.compute": "{share} of matmul",
    "roofline.why.launch": "host {host} > device {device}",
    "roofline.why.short": "{device}, a launch {launch}",
    "roofline.why.small": "work {work} < launch {launch}",
    "roofline.word.memory": "memory",
    "roofline.word.compute": "compute",
    "roofline.word.launch": "launch",
    "roofline.word.unknown": "no ceiling",
    "roofline.more": "+{n:,} more",
    "roofline.shape.prefill": "{sign} a prefill step, longest first:",
    "roofline.shape.decode": "{sign} a decode step, longest first:",
    "roofline.shape.mixed": "{sign} prefill and decode, longest first:",
    "roofline.did.prefill": "{prefill:,} prompt tokens",
    "roofline.did.decode": "{decode:,} decoded tokens",
    "roofline.did.mixed": "{prefill:,} prompt and {decode:,} decoded tokens",
    "roofline.says": (
        "Step {step:,} ({did}): of {total:,} operations {launch:,} are launch-bound, {memory:,} memory-bound, {compute:,} compute-bound. "
        "On the device they took {device}, the step {wall}."
    ),
    "roofline.says.short": "Step {step:,} ({did}): {launch:,} launch-bound, {memory:,} memory-bound, {compute:,} compute-bound operations.",
    "roofline.says.shorter": "Step {step:,}: {launch:,} launch-, {memory:,} memory-, {compute:,} compute-bound",
    "roofline.says.no_roof": (
        "Step {step:,} ({did}): {n:,} of {total:,} operations are launch-bound. Measure the ceilings to judge the others. "
        "On the device they took {device}, the step {wall}."
    ),
    "roofline.says.no_roof.short": "Step {step:,}: {n:,} of {total:,} launch-bound. Measure the ceilings to judge the others.",
    "roofline.says.ceilings": "{device} copies at most {copy} and multiplies matrices at most at {matmul}.",
    "roofline.says.ceilings.short": "At most {copy} and {matmul}.",
    "roofline.read": (
        (
            "{name}: {n:,} call, {device} on the device, {host} to launch; {size} and {flops}: {gbps}, {tflops} at {intensity} FLOP/byte. "
            "{verdict}: {why}."
        ),
        (
            "{name}: {n:,} calls, {device} on the device, {host} to launch; {size} and {flops}: {gbps}, {tflops} at {intensity} FLOP/byte. "
            "{verdict}: {why}."
        ),
    ),
    "roofline.read.short": "{name}: {device} on the device, {host} to launch; {gbps}, {tflops} at {intensity} FLOP/byte. {verdict}: {why}.",
    "roofline.read.call": (
        "{name}: {n:,} call, {device}; {size} and {flops}: {gbps}, {tflops} at {intensity} FLOP/byte. {verdict}: {why}.",
        "{name}: {n:,} calls, {device}; {size} and {flops}: {gbps}, {tflops} at {intensity} FLOP/byte. {verdict}: {why}.",
    ),
    "roofline.read.call.short": "{name}: {device}; {gbps}, {tflops} at {intensity} FLOP/byte. {verdict}: {why}.",
    "roofline.read.without": " Without its launches: {verdict}, {why}.",
    "roofline.legend.point": "an operation, all layers",
    "roofline.legend.launch": "hollow: launch-bound",
    "roofline.legend.trail": "earlier profiled steps (■ prefill ● decode ◆ both)",
    "roofline.badge.times": "times and ceilings: {device}, {dtype}",
    "roofline.badge.formula": "FLOPs and bytes by each operation's formula",
    "roofline.offer.profile": "Profile the next step",
    "roofline.offer.ceilings": "Measure the ceilings",
}

VIEW = View(
    name="roofline",
    title="Roofline",
    question="What holds each operation of a step back: memory, arithmetic or its launch?",
    figure=figure,
    summary=summary,
    words=WORDS,
    asks=(
        Ask("Which operation takes the most device time (number 1 of the list)?", _ask(lambda it: it.ops[0].name[:20])),
        Ask("How many operations of this step are launch-bound?", _ask(lambda it: str(it.of(LAUNCH)))),
        Ask("How many operations of this step are memory-bound?", _ask(lambda it: str(it.of(MEMORY)))),
        Ask("What is the measured copy bandwidth of this device?", _ask(lambda it: rate(it.top.copy_gbps * 1e9, "B/s"))),
        Ask("Which step was profiled?", _ask(lambda it: str(it.profile.step_id))),
    ),
    order=86,
)
