"""Step anatomy: where does one step's time go?

A stacked bar a step, the shown one last: the host's stages in their order, and beside it the GPU's own bar where a clock saw
it. Below, the shown step alone on an axis of time: the host's row, the device's row, and with run-ahead the row in which the
next step was planned and launched meanwhile; what lies above each other happened at the same time. All from the clocks that
the record carries (engine/plan.py, StepResult and Record):

    schedule, build          host clocks                 launch      host clock; on a CPU the same call computes
    sync                     host clock, until the tokens are there   GPU   two events in the device's stream
    sample                   on a CPU a part of launch; in a CUDA graph or a GPU's step no clock sees it apart
    detokenise               part of commit, timed apart in steps of few tokens      record   making the record

What a clock cannot see is said. The device runs steps in order, so a step's GPU time begins with its launch or when the step
before has ended, whichever is later: where it begins is inferred by that rule, how long it took is measured.

Rejected: shares of the GPU's time by formula (the step was not profiled), filling what no clock saw with "other".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.trace import Trace
from viz.layout import Sheet, device_name, message, too_small
from viz.measured import brief, first_fit, fit_lines, put_lines
from viz.theme import duration, percent, round_up
from viz.view import Ask, Badge, Frame, Mark, Paint, Series, View, ViewState
from viz.words.catalogue import Words, words

HOST = ("schedule", "build", "launch", "sample", "sync", "detokenise", "commit", "record")  # in the order in which they happen
PARTS = (*HOST, "gpu")
PAINTS = {
    "schedule": Paint("request-1"), "build": Paint("request-4"), "launch": Paint("request-0"), "sample": Paint("request-3"),
    "sync": Paint("free", hatch="diagonal"), "detokenise": Paint("request-5"), "commit": Paint("request-2"),
    "record": Paint("request-other"), "gpu": Paint("accent"),
}  # fmt: skip
STEPS = 24  # bars
NO_GAP_US = 10  # between launch and wait, from one call to the next: nobody else's work
WIDE = 62  # characters: from here on the list stands beside the bars


@dataclass(frozen=True)
class Anatomy:
    """One step's clocks. µs; `start` and `settle_at` on the engine's own clock. `gpu`, `settle_at`: 0 where no clock saw it."""

    step_id: int
    start: int
    parts: dict[str, int]  # of HOST, without those that took no time or were not timed apart
    gpu: int
    settle_at: int
    is_gpu: bool
    graph_size: int
    num_tokens: int
    num_sampled: int
    failed: bool
    is_fine: bool  # the record has the finer clocks
    runs_ahead: bool  # the knob in force

    @property
    def total(self) -> int:
        """The host's time, which is the step's where nothing overlaps."""
        return sum(self.parts.values())

    @property
    def ahead(self) -> int:
        """Host time between this step's launch and the moment at which it was waited for: other steps' work."""
        launched = self.start + sum(self.parts.get(part, 0) for part in ("schedule", "build", "launch", "sample"))
        apart = self.settle_at - launched if self.settle_at and self.runs_ahead else 0
        return apart if apart >= NO_GAP_US else 0

    @property
    def longest(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part], default="")


def anatomy(trace: Trace, row: np.void) -> Anatomy:
    """Of a STEP row."""
    at = {
        name: max(int(row[f"{name}_us"]), 0) for name in ("schedule", "build", "run", "settle", "commit", "sample", "text", "record", "gpu")
    }
    sample, text, step = min(at["sample"], at["run"]), min(at["text"], at["commit"]), int(row["step_id"])
    parts = {
        "schedule": at["schedule"], "build": at["build"], "launch": at["run"] - sample, "sample": sample, "sync": at["settle"],
        "detokenise": text, "commit": at["commit"] - text, "record": at["record"],
    }  # fmt: skip
    works, tokens = trace.rows("works", step, step), trace.rows("tokens", step, step)
    settle_at = max(int(row["settle_at_us"]), 0)
    return Anatomy(
        step, int(row["start_us"]), {name: us for name, us in parts.items() if us}, at["gpu"], settle_at, on_gpu(trace),
        int(row["graph_size"]), int(works["num_tokens"].sum()), len(tokens), bool(row["failed"]), bool(settle_at or at["record"] or sample),
        bool(trace.config_at(step).get("run_ahead")),
    )  # fmt: skip


def on_gpu(trace: Trace) -> bool:
    """Whether the run's device was a GPU, as the record says of its machine; else by what its newest steps have clocks for."""
    config = trace.meta.get("config")
    source = config.get("source") if hasattr(config, "get") else None
    device = source.get("device") if hasattr(source, "get") else None
    return str(device).startswith("cuda") if device else bool((trace.steps["gpu_us"][-STEPS:] > 0).any())


def window(trace: Trace, step: int, most: int = STEPS) -> list[Anatomy]:
    """The steps up to the shown one, as many as are drawn; those that computed nothing are left out."""
    rows = trace.rows("steps", step - 4 * most, step)
    busy = rows[np.isin(rows["step_id"], trace.rows("works", step - 4 * most, step)["step_id"]) | (rows["step_id"] == step)]
    return [anatomy(trace, row) for row in busy[-most:]]


def figure(trace: Trace, state: ViewState) -> Frame:
    step = trace.clamp(state.step)
    found = window(trace, step)
    if too_small(state) or not found[-1].parts:
        return message(summary(trace, state), state, _badge(trace, state))
    return _Picture(trace, state, found).frame()


class _Picture:
    """A sentence; a bar a step, the list of parts beside or below them; the shown step on an axis of time."""

    def __init__(self, trace: Trace, state: ViewState, found: list[Anatomy]) -> None:
        self.trace, self.state = trace, state
        self.t, self.sheet = words(state.language, WORDS), Sheet(state)
        self.it, sheet = found[-1], self.sheet
        tall, room = sheet.height / sheet.line, sheet.width - 24
        self.head = fit_lines(sheet, room, 2 if tall >= 13 else 1, *sentences(self.it, self.t))
        self.foot = fit_lines(sheet, room, 2 if tall >= 17 else 1, *unseen(self.it, self.t)) if tall >= 12 else []
        self.top = 8 + len(self.head) * sheet.line + 6
        self.low = sheet.height - 6 - len(self.foot) * sheet.line
        rows = 2 if self._has_device else 1
        self.span = rows * 1.25 * sheet.line + sheet.line if tall >= 16 else 0.0  # of the time axis
        self.parts = [(part, us) for part, us in self.it.parts.items()]
        if self.it.gpu:
            self.parts.append(("gpu", self.it.gpu))
        self.beside = sheet.width >= WIDE * sheet.advance
        self.found = found[-(STEPS if sheet.width >= 600 else 12) :]
        self.series: list[Series] = []
        self.marks: list[Mark] = []

    @property
    def _has_device(self) -> bool:
        return self.it.gpu > 0

    def frame(self) -> Frame:
        sheet = self.sheet
        put_lines(sheet, self.head, 12, 8, weight=700)
        put_lines(sheet, self.foot, 12, self.low, "muted")
        bottom = self.low - self.span - (8 if self.span else 2)
        if self.beside:
            widest = max(sheet.span(self._row(part, us)) for part, us in self.parts)
            x = sheet.width - 12 - max(widest, 10 * sheet.advance)
            self._list(x, self.top, bottom)
            self._bars(12, x - 20 - 1.4 * sheet.line, self.top, bottom)
        else:
            high = len(self.parts) * sheet.line
            self._list(12 + 1.4 * sheet.line, bottom - high, bottom)
            self._bars(12, sheet.width - 12, self.top, bottom - high - 8)
        if self.span:
            self._time(self.low - self.span, self.low - 4)
        return Frame(
            badges=(_badge(self.trace, self.state),), axes=sheet.axes(), series=tuple(self.series), labels=tuple(sheet.labels),
            marks=tuple(self.marks),
        )  # fmt: skip

    def _rect(self, name: str, x0: float, x1: float, y0: float, y1: float, paint: Paint) -> None:
        one = lambda v: np.array([v], np.float32)  # noqa: E731
        self.series.append(Series(name, one((x0 + x1) / 2), one(y1), "bars", paint, max(x1 - x0, 0.5), one(y0)))

    # ---- a bar a step ----

    def _bars(self, x0: float, x1: float, y0: float, y1: float) -> None:
        """Stacked from the bottom up; the GPU's time is a thin bar of its own beside the host's."""
        sheet = self.sheet
        most = round_up(max(max(a.total, a.gpu) for a in self.found))
        unit, low = duration(most), y1 - sheet.line - 2
        left = x0 + sheet.span(unit) + 8
        if low - y0 < 1.5 * sheet.line or x1 - left < 60:
            return
        sheet.put(unit, left - 8, y0 + sheet.line / 2, "muted", anchor="right")
        sheet.put("0", left - 8, low - sheet.line / 2, "muted", anchor="right")
        wide = min((x1 - left) / len(self.found), 64.0)
        xy = np.array([[left, y0], [left, low], [left + wide * len(self.found), low]], np.float32)
        self.series.append(Series("axes", xy[:, 0].copy(), xy[:, 1].copy(), "line", Paint("muted"), 1.5))
        scale = (low - y0) / most
        for part in HOST:
            made = [(i, a) for i, a in enumerate(self.found) if part in a.parts]
            if not made:
                continue
            begin = [low - scale * sum(a.parts.get(p, 0) for p in HOST[: HOST.index(part)]) for _, a in made]
            x = np.array([left + (i + 0.42) * wide for i, _ in made], np.float32)
            base, end = np.array(begin, np.float32), np.array([b - scale * a.parts[part] for b, (_, a) in zip(begin, made)], np.float32)
            self.series.append(Series(part, x, end, "bars", PAINTS[part], wide * (0.56 if self._has_device else 0.7), base))
        gpus = [(i, a.gpu) for i, a in enumerate(self.found) if a.gpu]
        if gpus:
            x = np.array([left + (i + 0.82) * wide for i, _ in gpus], np.float32)
            end = np.array([low - scale * us for _, us in gpus], np.float32)
            self.series.append(Series("gpu", x, end, "bars", PAINTS["gpu"], wide * 0.16, np.full(len(gpus), low, np.float32)))
        for i, a in enumerate(self.found):
            outline = "accent" if a is self.it else None
            text = self.t("step_anatomy.mark", step=a.step_id, total=duration(a.total), tokens=a.num_tokens, n=a.num_tokens)
            self.marks.append(Mark(f"step:{a.step_id}", left + i * wide + 1, left + (i + 1) * wide - 1, y0, low, text, outline))
        y = low + 2 + sheet.line / 2
        last = left + wide * (len(self.found) - 0.5)
        sheet.put(self.t("step_anatomy.step", step=self.it.step_id), last, y, anchor="right" if wide < 90 else "center", weight=700)
        sheet.put(self.t("step_anatomy.step", step=self.found[0].step_id), left, y, "muted")

    # ---- the parts of the shown step ----

    def _row(self, part: str, us: int) -> str:
        share = "" if part == "gpu" else f", {percent(us, self.it.total)}"
        return f"{part_name(self.it, part, self.t)} {brief(us)}{share}"

    def _list(self, x: float, top: float, bottom: float) -> None:
        sheet = self.sheet
        high = min((bottom - top) / len(self.parts), 1.5 * sheet.line)
        for i, (part, us) in enumerate(self.parts):
            y = top + (i + 0.5) * high
            bold = 700 if part == self.it.longest else 400
            if high >= sheet.line - 0.5:
                size = sheet.font * 0.8
                self._rect(f"key {part}", x - 1.2 * sheet.line, x - 1.2 * sheet.line + size, y - size / 2, y + size / 2, PAINTS[part])
                sheet.put(self._row(part, us), x, y, weight=bold, room=sheet.width - 12 - x)
            box = (x - 1.3 * sheet.line, sheet.width - 8, y - high / 2 + 1, y + high / 2 - 1)
            outline = "accent" if self.state.selection == f"part:{part}" else None
            self.marks.append(
                Mark(f"part:{part}", *box, self._row(part, us), outline, self.t(f"step_anatomy.about.{_about(self.it, part)}"))
            )

    # ---- the shown step in time ----

    def _time(self, y0: float, y1: float) -> None:
        """Host and device, each a row, on one axis that begins with the step."""
        sheet, t, it = self.sheet, self.t, self.it
        names = ["host", *(["gpu"] if self._has_device else [])]
        left = 12 + max(sheet.span(t(f"step_anatomy.row.{name}")) for name in names) + 10
        spans, end = spans_of(self.trace, it)
        end = max(end, 1)
        right = sheet.width - 16
        row = 1.25 * sheet.line

        def x(us: float) -> float:
            return left + us / end * (right - left)

        for k, name in enumerate(names):
            y = y0 + (k + 0.5) * row
            sheet.put(t(f"step_anatomy.row.{name}"), 12, y, "muted")
            for part, begin, stop in spans:
                if (part == "gpu") == (name == "gpu"):
                    paint = Paint("control", hatch="dots", alpha=0.5) if part == "other" else PAINTS[part]
                    self._rect(f"time {part}", x(begin), max(x(stop), x(begin) + 0.5), y - row * 0.36, y + row * 0.36, paint)
        y = y1 - sheet.line / 2
        sheet.put("0", left, y, "muted")
        sheet.put(duration(end), right, y, "muted", anchor="right")
        if it.ahead:
            said = t("step_anatomy.ahead", time=brief(it.ahead))
            sheet.put(first_fit(sheet, right - left - 12 * sheet.advance, said), (left + right) / 2, y, anchor="center")


def spans_of(trace: Trace, it: Anatomy) -> tuple[list[tuple[str, float, float]], float]:
    """(part, begin, stop) in µs since the step began, and where the last ends; "other": the host was with other steps."""
    spans, at = [], 0.0
    for part in HOST:
        if part == "sync" and it.ahead:
            spans.append(("other", at, at + it.ahead))
            at += it.ahead
        us = it.parts.get(part, 0)
        if us:
            spans.append((part, at, at + us))
            at += us
    if it.gpu:
        begin = max(it.parts.get("schedule", 0) + it.parts.get("build", 0), gpu_free_at(trace, it) - it.start)
        spans.append(("gpu", begin, begin + it.gpu))
        at = max(at, begin + it.gpu)
    return spans, at


def gpu_free_at(trace: Trace, it: Anatomy) -> float:
    """Engine time at which the device had ended the step before, at the latest when the host had waited for it."""
    rows = trace.rows("steps", it.step_id - 1, it.step_id - 1)
    if not len(rows) or not int(rows[0]["settle_at_us"]):
        return it.start
    return float(max(int(rows[0]["settle_at_us"]) + int(rows[0]["settle_us"]), 0)) if it.ahead else float(it.start)


# ---- words ----


def _about(it: Anatomy, part: str) -> str:
    """On a CPU launch is where everything is computed."""
    return f"{part}.cpu" if part in ("launch", "sync") and not it.is_gpu else part


def part_name(it: Anatomy, part: str, t: Words) -> str:
    return t(f"step_anatomy.part.{_about(it, part)}")


def sentences(it: Anatomy, t: Words) -> tuple[str, ...]:
    """Where most of the step went, the longest form first."""
    if not it.parts:
        return (t("step_anatomy.none", step=it.step_id),)
    fields = {
        "step": it.step_id, "total": duration(it.total), "n": it.num_tokens, "part": part_name(it, it.longest, t),
        "time": brief(it.parts[it.longest]), "share": percent(it.parts[it.longest], it.total),
    }  # fmt: skip
    more = " " + t("step_anatomy.says.gpu", gpu=brief(it.gpu)) if it.gpu else ""
    more += " " + t("step_anatomy.says.ahead", time=brief(it.ahead)) if it.ahead else ""
    short = t("step_anatomy.says.short", **fields)
    return t("step_anatomy.says", **fields) + more, short + more, short


def unseen(it: Anatomy, t: Words) -> tuple[str, ...]:
    """What no clock saw in this step."""
    if not it.is_fine:
        return t("step_anatomy.unseen.old"), t("step_anatomy.unseen.old.short")
    if not it.is_gpu:
        return t("step_anatomy.unseen.cpu"), t("step_anatomy.unseen.cpu.short")
    keys = ["unwaited" if not it.gpu else "graph" if it.graph_size else "gpu", *(["text"] if it.num_sampled and "detokenise" not in it.parts else [])]
    return " ".join(t(f"step_anatomy.unseen.{key}") for key in keys), t(f"step_anatomy.unseen.{keys[0]}.short")


def _badge(trace: Trace, state: ViewState) -> Badge:
    t = words(state.language, WORDS)
    return Badge("measured", t("step_anatomy.badge", device=device_name(trace, t)))


def summary(trace: Trace, state: ViewState) -> str:
    t = words(state.language, WORDS)
    it = anatomy(trace, trace.step(trace.clamp(state.step)).step)
    if not it.parts:
        return sentences(it, t)[0]
    rows = [f"{part_name(it, part, t)} {brief(us)}" for part, us in it.parts.items()]
    return " ".join([sentences(it, t)[0], t("list.comma").join(rows) + ".", unseen(it, t)[0]])


# ---- asks ----


def _ask(answer) -> object:
    """An answer from the shown step; "" where no clock ran."""

    def found(trace: Trace, state: ViewState) -> str:
        it = anatomy(trace, trace.step(trace.clamp(state.step)).step)
        return answer(it) if it.parts else ""

    return found


def _time_of(part: str):
    return _ask(lambda it: brief(it.parts[part]) if part in it.parts else "")


WORDS = {
    "step_anatomy.none": "Step {step:,} has no clocks: nothing was computed in it, or it failed.",
    "step_anatomy.badge": "the clocks in the step's record: {device}",
    "step_anatomy.step": "step {step:,}",
    "step_anatomy.mark": ("step {step:,}: {total} for {tokens:,} token", "step {step:,}: {total} for {tokens:,} tokens"),
    "step_anatomy.says": (
        "Step {step:,} took the host {total} for {n:,} token; most of it, {time} ({share}), was: {part}.",
        "Step {step:,} took the host {total} for {n:,} tokens; most of it, {time} ({share}), was: {part}.",
    ),
    "step_anatomy.says.short": "Step {step:,}: {total}, most of it {part} ({share}).",
    "step_anatomy.says.gpu": "The GPU took {gpu}, at the same time.",
    "step_anatomy.says.ahead": "While it ran, the host spent {time} on other steps.",
    "step_anatomy.ahead": "dotted: {time} of other steps' work meanwhile",
    "step_anatomy.row.host": "host",
    "step_anatomy.row.gpu": "GPU",
    "step_anatomy.part.schedule": "schedule",
    "step_anatomy.part.build": "build the batch",
    "step_anatomy.part.launch": "launch",
    "step_anatomy.part.launch.cpu": "launch = compute",
    "step_anatomy.part.sample": "sample",
    "step_anatomy.part.sync": "wait for the GPU",
    "step_anatomy.part.sync.cpu": "unpack",
    "step_anatomy.part.detokenise": "detokenise",
    "step_anatomy.part.commit": "commit",
    "step_anatomy.part.record": "record",
    "step_anatomy.part.gpu": "GPU, its own clock:",
    "step_anatomy.about.schedule": "The scheduler plans who computes how many tokens.",
    "step_anatomy.about.build": "The plan becomes arrays: ids, positions, block tables.",
    "step_anatomy.about.launch": "The host hands the kernels to the GPU, or replays one CUDA graph; it does not wait.",
    "step_anatomy.about.launch.cpu": "On a CPU the call that launches an operation computes it: both are one.",
    "step_anatomy.about.sample": "The next tokens are chosen from the logits.",
    "step_anatomy.about.sync": "The host stands still until the tokens are back.",
    "step_anatomy.about.sync.cpu": "Nothing to wait for on a CPU: the tokens are taken from the tensor.",
    "step_anatomy.about.detokenise": "Tokens become text.",
    "step_anatomy.about.commit": "The scheduler takes the tokens: who is done, which blocks are free.",
    "step_anatomy.about.record": "The step's record is made. Packing it into rows for readers comes later, between steps.",
    "step_anatomy.about.gpu": (
        "Between two events in the GPU's stream, before the first kernel and behind the last: waiting for launches in between counts."
    ),
    "step_anatomy.unseen.old": (
        "This recording has the coarse clocks only: detokenising is in commit, sampling in launch; "
        "GPU time and recording were not recorded."
    ),
    "step_anatomy.unseen.old.short": "Coarse clocks only: GPU time was not recorded.",
    "step_anatomy.unseen.cpu": (
        "On a CPU launching and computing are one call, drawn as one. Packing the records for readers happens between steps: "
        "no step's clock sees it."
    ),
    "step_anatomy.unseen.cpu.short": "On a CPU launching and computing are one call.",
    "step_anatomy.unseen.gpu": (
        "Sampling is in the GPU's time; no clock sees it apart. Where the GPU's bar begins is inferred from the order of launches."
    ),
    "step_anatomy.unseen.gpu.short": "Sampling is in the GPU's time; no clock sees it apart.",
    "step_anatomy.unseen.graph": (
        "Sampling is inside the CUDA graph; no clock sees it apart. Where the GPU's bar begins is inferred from the order of launches."
    ),
    "step_anatomy.unseen.graph.short": "Sampling is inside the CUDA graph; no clock sees it apart.",
    "step_anatomy.unseen.unwaited": "This step gave no token, so nobody waited for it: no clock saw how long the GPU took.",
    "step_anatomy.unseen.unwaited.short": "Nobody waited for this step: no clock saw its GPU time.",
    "step_anatomy.unseen.text": "With so many tokens detokenising is in commit.",
}

VIEW = View(
    name="step_anatomy",
    title="Step anatomy",
    question="Where does one step's time go?",
    figure=figure,
    summary=summary,
    words=WORDS,
    asks=(
        Ask("How long did the shown step take the host?", _ask(lambda it: duration(it.total))),
        Ask("Which share of its time, in percent, went into the longest part?", _ask(lambda it: percent(it.parts[it.longest], it.total))),
        Ask("How long did planning (schedule) take in the shown step?", _time_of("schedule")),
        Ask("How long did building the batch take?", _time_of("build")),
        Ask("How long did taking the result (commit) take?", _time_of("commit")),
    ),
    order=92,
)
