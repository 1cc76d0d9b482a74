"""KV cache: what of one sequence does this step compute, what does it reuse, and what would it cost without a cache?

A triangle of one sequence, a row a query, a column a key. Rows of this step are solid; rows of earlier steps are
pale, because their K and V are read and not computed; hatched ones a run without a cache would compute again now.
Beside it the FLOPs of all its steps so far, by a formula over the model's sizes. All is computed from the
sequence's works (start, num_tokens, num_recomputed) up to the shown step and from the pool.
"""

from __future__ import annotations

import numpy as np

from engine.trace import Trace
from viz.layout import Sheet, framed, message, too_small, wrap
from viz.life import Life, Row, costs, flops, life, rows_of, spent
from viz.select import identity, last_works, live_at, selected
from viz.theme import data_size, round_up
from viz.view import Ask, Badge, Frame, Mark, Paint, Raster, Series, View, ViewState
from viz.words.catalogue import Words, words

MIN_CELL, MAX_CELL = 6, 40  # px
MAX_BARS = 120
WIDE = 58  # characters: from here the bytes and the FLOPs stand side by side
CLEAR = 255


# ---- who is shown ----


def shown(trace: Trace, state: ViewState) -> Life | None:
    """The selected sequence, else the one with most tokens in this step; None if nobody is there."""
    step = trace.clamp(state.step)
    live = live_at(trace, step)
    for seq_id in selected(trace, step, state.selection):
        if seq_id in live or last_works(trace, step, (seq_id,)):
            return life(trace, seq_id, step)
    works = trace.rows("works", step, step)
    if len(works):
        return life(trace, int(works["seq_id"][np.argmax(works["start"] + works["num_tokens"])]), step)
    tables = trace.computed_at(step)
    there = sorted(set(live) | set(tables))
    return life(trace, max(there, key=lambda i: (tables.get(i, 0), -i)), step) if there else None


def figure(trace: Trace, state: ViewState) -> Frame:
    it = None if too_small(state) else shown(trace, state)
    if it is None:
        return message(summary(trace, state), state, Badge("state"))
    return _Picture(trace, state, it).frame()


class _Picture:
    """A sentence; keys as a strip over the triangle of queries and keys, and what a row is below; at the right the
    bytes that are kept and the FLOPs. A narrow panel has those as lines at the bottom."""

    def __init__(self, trace: Trace, state: ViewState, it: Life) -> None:
        self.trace, self.state, self.it = trace, state, it
        self.t, self.sheet = words(state.language, WORDS), Sheet(state)
        self.color = identity(trace, it.step, state.selection).color(it.seq_id)
        self.name = trace.name(it.seq_id)
        self.rows = rows_of(it)
        self.cost = costs(trace.meta)
        self.spent = spent(it, self.cost) if self.cost and len(it.works) else None
        sheet = self.sheet
        self.left = 12 + round(sheet.advance * 7.5)
        self.head = _lines(_says(self.t, trace, it), sheet.width - 24, sheet, 3 if sheet.height >= 18 * sheet.line else 2)
        self.strip_top = 8 + (len(self.head) + 1) * sheet.line + 6
        self.strip = max(round(sheet.font * 1.2), 14)
        self.top = self.strip_top + self.strip + 8
        column = round(sheet.advance * (WIDE if sheet.width >= 110 * sheet.advance else 21))
        self.beside = sheet.width - self.left - 36 - column >= 7.5 * sheet.font
        below = sheet.line + 10 + (0 if self.beside else 3 * sheet.line)
        wide = sheet.width - self.left - (column + 40 if self.beside else 12)
        side = max(min(sheet.height - self.top - below, wide), 40)
        self.size = _ladder(max(it.num_known, 1))
        self.bin = 1
        while self.size / self.bin > max(side / MIN_CELL, 4):
            self.bin *= 2
        self.num = -(-self.size // self.bin)
        self.cell = min(side / self.num, MAX_CELL)
        self.right, self.bottom = self.left + self.cell * self.num, self.top + self.cell * self.num
        padded = np.zeros(self.num * self.bin, np.uint8)
        padded[: len(self.rows)] = self.rows
        self.kinds = padded.reshape(self.num, self.bin).max(1)

    def frame(self) -> Frame:
        sheet, t = self.sheet, self.t
        across = (0, self.num * self.bin)
        axes = sheet.axes() | sheet.data_axes(2, across, across, (self.left, self.right, self.top, self.bottom))
        axes |= sheet.data_axes(3, across, (0, 1), (self.left, self.right, self.strip_top, self.strip_top + self.strip))
        for i, line in enumerate(self.head):
            sheet.put(line, 12, 8 + (i + 0.5) * sheet.line, weight=700)
        y = self.strip_top - 3 - sheet.line / 2
        room = self.right + (24 if self.beside else 0) - self.left
        binned = (t("kv_cache.keys.binned", n=self.bin), t("kv_cache.keys.binned.short", n=self.bin)) if self.bin > 1 else ()
        keys = next((text for text in (*binned, t("kv_cache.keys"), t("kv_cache.keys.short")) if sheet.span(text) <= room), "")
        sheet.put(keys, self.left, y, "muted", room=room)
        sheet.put(t("kv_cache.strip"), self.left - 8, self.strip_top + self.strip / 2, "muted", anchor="right", room=self.left - 10)
        self._ranges()
        chosen = self._chosen()
        if chosen is not None:
            y = sheet.height - 4 - sheet.line / 2 if self.beside else self.bottom + 6 + sheet.line / 2
            sheet.put(self._reads(chosen), 12, y, room=sheet.width - 24)
        series = [self._border()]
        if self.beside:
            axes, bars = self._beside(axes)
            series += bars
        else:
            for i, text in enumerate(self._facts(short=True)[:3]):
                sheet.put(text, 12, sheet.height - (2.5 - i) * sheet.line - 2, room=sheet.width - 24)
        badges = [Badge("state")]
        if self.spent is not None:
            badges.append(Badge("computed", t("kv_cache.formula")))
        return Frame(
            badges=tuple(badges), axes=axes, rasters=self._rasters(), series=tuple(series), labels=tuple(sheet.labels),
            marks=tuple(self._marks(chosen)), legend=self._legend(),
        )  # fmt: skip

    # ---- the triangle ----

    def paint(self, kind: Row, label: str = "") -> Paint:
        return {
            Row.HIT: Paint("cached", label),
            Row.HIT_GHOST: Paint("cached", label, "diagonal"),
            Row.KEPT: Paint(self.color, label, alpha=0.3),
            Row.GHOST: Paint(self.color, label, "diagonal", 0.3),
            Row.LOST: Paint("free", label, "dots"),
            Row.NOW: Paint(self.color, label),
            Row.AGAIN: Paint(self.color, label, "cross"),
        }.get(kind, Paint("paper", label))

    def _rasters(self) -> tuple[Raster, ...]:
        paints = tuple(self.paint(kind) for kind in Row)
        values = np.where(self.kinds == Row.NOT_YET, CLEAR, self.kinds).astype(np.uint8)
        grid = np.where(np.tri(self.num, dtype=bool), values[:, None], CLEAR).astype(np.uint8)
        plain = {Row.GHOST: Row.KEPT, Row.HIT_GHOST: Row.HIT}  # K and V themselves are there: nobody computes them
        strip = np.array([plain.get(Row(k), k) if k != CLEAR else CLEAR for k in values], np.uint8)[None]
        edge = self.num * self.bin
        return (
            Raster("triangle", grid, 0, edge, 0, edge, paints, axes="x2y2"),
            Raster("kv", np.ascontiguousarray(strip), 0, edge, 0, 1, paints, axes="x3y3"),
        )

    def _border(self) -> Series:
        """The outline of all that the sequence's axis has room for."""
        edge = self.num * self.bin
        steps = np.repeat(np.arange(self.num + 1, dtype=np.float32) * self.bin, 2)
        x, y = np.append(steps[1:], [0, 0]), np.append(steps[:-1], [edge, 0])
        return Series("border", x.astype(np.float32), y.astype(np.float32), "line", Paint("muted", alpha=0.6), 1.0, axes="x2y2")

    def _ranges(self) -> None:
        """Which tokens the rows at the right are, run by run; those of this step first."""
        edges = np.flatnonzero(np.diff(self.rows)) + 1
        runs = [r for r in np.split(np.arange(len(self.rows)), edges) if len(r) and self.rows[r[0]] != Row.NOT_YET]
        for run in sorted(runs, key=lambda r: (self.rows[r[0]] < Row.NOW, -len(r))):
            first, last, now = int(run[0]), int(run[-1]), self.rows[run[0]] >= Row.NOW
            y, room = self.top + (first + last + 1) / 2 / self.bin * self.cell, self.left - 10
            text = f"{first + 1:,}" if first == last else f"{first + 1:,}–{last + 1:,}"
            text = text if self.sheet.span(text) <= room else f"…{last + 1:,}"
            self.sheet.put(text, self.left - 8, y, "ink" if now else "muted", anchor="right", weight=700 if now else 400, room=room)

    def _chosen(self) -> int | None:
        """The position that is read out: the selected one, else the last of this step."""
        kind, _, rest = (self.state.selection or "").partition(":")
        numbers = [int(n) for n in rest.split(":") if n.isascii() and n.isdigit() and len(n) < 10]
        if kind == "query" and len(numbers) == 2 and numbers[0] == self.it.seq_id and numbers[1] < len(self.rows):
            return numbers[1]
        if self.it.work is not None:
            return self.it.end - 1
        there = np.flatnonzero(self.rows != Row.NOT_YET)
        return int(there[-1]) if len(there) else None

    def _kind(self, position: int) -> str:
        return self.t(f"kv_cache.row.{Row(int(self.rows[position])).name.lower()}")

    def _reads(self, position: int) -> str:
        """The longest sentence about a row that fits."""
        fields = {"n": position + 1, "who": self.name, "kind": self._kind(position)}
        said = [self.t("kv_cache.reads", **fields), self.t("kv_cache.reads.short", **fields)]
        said = [f"{said[0]}; {self._flops(position)}", *said] if self.cost is not None else said
        return next((text for text in said if self.sheet.span(text) <= self.sheet.width - 24), said[-1])

    def _flops(self, position: int) -> str:
        value = float(self.cost.of(np.array([position]), np.array([position + 1]), np.array([0]))[0])
        return self.t("kv_cache.detail.flops", value=flops(value, value))

    def _marks(self, chosen: int | None) -> list[Mark]:
        marks = []
        for i in np.flatnonzero(self.kinds != Row.NOT_YET).tolist():
            first, last = i * self.bin, min((i + 1) * self.bin, len(self.rows)) - 1
            here = chosen is not None and first <= chosen <= last
            of_kind = np.flatnonzero(self.rows[first : last + 1] == self.kinds[i])
            at = chosen if here else first + int(of_kind[-1])
            text = self.t("kv_cache.mark", who=self.name, n=at + 1, kind=self._kind(at))
            box, outline = (0, (i + 1) * self.bin, i * self.bin, (i + 1) * self.bin), "accent" if here else None
            marks.append(Mark(f"query:{self.it.seq_id}:{at}", *box, text, outline, self._detail(at), axes="x2y2"))
        return marks

    def _detail(self, position: int) -> str:
        said = [self.t("kv_cache.detail.keys", n=position + 1)]
        if self.cost is not None:
            said.append(self._flops(position))
        size = self.trace.meta.get("kv_bytes_per_token")
        if isinstance(size, int) and size > 0:
            said.append(self.t("kv_cache.detail.bytes", size=data_size(size)))
        return "; ".join(said)

    # ---- beside it ----

    def _facts(self, short: bool = False) -> list[str]:
        """How many bytes, FLOPs with a cache and without, their ratio: one line each, `short` the last two in one."""
        said = [_kept(self.t, self.trace, self.it)]
        if self.spent is None:
            return [*said, self.t("kv_cache.no_flops" if self.cost is None else "kv_cache.no_steps")]
        with_, without, ratio = _compared(self.t, *self.spent.totals(self.it.has_cache))
        return (
            [*said, with_, self.t("kv_cache.flops.short", without=without, ratio=ratio.rpartition(" ")[2])]
            if short
            else [*said, with_, without, ratio]
        )

    def _beside(self, axes: dict) -> tuple[dict, list[Series]]:
        """The lines, and under them bars: one a step of this sequence, cumulative."""
        sheet, t = self.sheet, self.t
        x0, x1 = self.right + 28, sheet.width - 12
        wide = x1 - x0 >= WIDE * sheet.advance
        middle = x0 + 35 * sheet.advance if wide else x0
        facts, begin = self._facts(), self.strip_top - 3 - sheet.line

        def put(text: str, x: float, y: float, color: str = "ink", weight: int = 400) -> float:
            for line in _lines(text, (middle - 8 if wide and x < middle else x1) - x, sheet, 4):
                sheet.put(line, x, y + sheet.line / 2, color, weight=weight)
                y += sheet.line
            return y

        left = put(facts[0], x0, put(t("kv_cache.kept.title"), x0, begin, "muted"), weight=700)
        if self.spent is None:
            put(facts[1], middle, begin if wide else left + sheet.line * 0.4, "muted")
            return axes, []
        if wide:
            left = put(t("kv_cache.formula.numbers", body=self.cost.body // 2, per_key=self.cost.key), x0, left, "muted")
        title = t("kv_cache.flops.title", who=self.name) if self.it.whole else t("kv_cache.flops.since", who=self.name, step=self._first())
        y = put(title, middle, begin if wide else left + sheet.line * 0.4, "muted")
        for text in facts[1:]:
            y = put(text, middle, y, weight=700 if text == facts[-1] else 400)
        top, bottom = max(y, left) + sheet.line + 4, sheet.height - 2 * sheet.line - 10
        if bottom - top < 2.5 * sheet.font:
            return axes, []
        chart, scale = self._chart_axes(x0, x1, top, bottom, wide)
        return axes | chart, [*self._bars(), scale]

    def _first(self) -> int:
        return int(self.it.works["step_id"][0])

    def _chart_axes(self, x0: float, x1: float, top: float, bottom: float, wide: bool) -> tuple[dict, Series]:
        """The bars' axes, and at their left a line with a tick at its labelled end: beside it, or above in a narrow panel."""
        sheet, t, n = self.sheet, self.t, len(self.it.works)
        largest = round_up(float(self.spent.without[-1]))
        steps = _ladder(n)
        text = flops(largest, largest)
        if wide:
            x0 += sheet.span(text) + 10
            sheet.put(text, x0 - 10, top, "muted", anchor="right")
            sheet.put("0", x0 - 10, bottom, "muted", anchor="right")
        else:
            sheet.put(text, x0, top - sheet.line / 2, "muted", room=x1 - x0)
        tick = x0 - 6 if wide else x0 + 8
        x, y = np.array([tick, x0, x0, tick], np.float32), np.array([top, top, bottom, bottom], np.float32)
        edge = x0 + (x1 - x0) * n / steps
        text = t("kv_cache.steps", n=n, who=self.name)
        text = text if sheet.span(text) <= x1 - x0 else t("kv_cache.steps.short", n=n, who=self.name)
        half = sheet.span(text) / 2
        sheet.put(text, min(max(edge, x0 + half), x1 - half), bottom + 4 + sheet.line / 2, "muted", anchor="center", room=x1 - x0)
        return sheet.data_axes(4, (0, steps), (largest, 0), (x0, x1, top, bottom)), Series("scale", x, y, "line", Paint("muted"), 1.5)

    def _bars(self) -> list[Series]:
        n = len(self.it.works)
        every = -(-_ladder(n) // MAX_BARS)
        ends = np.unique(np.append(np.arange(every, n + 1, every), n))
        x = (ends - every / 2).astype(np.float32)
        once, run, without = (a[ends - 1].astype(np.float32) for a in (self.spent.once, self.spent.run, self.spent.without))
        width = every * (0.86 if every == 1 and n < 60 else 1.0)
        zero = np.zeros_like(once)
        parts = (("once", Row.NOW, zero, once), ("recomputed", Row.AGAIN, once, run), ("without a cache", Row.GHOST, run, without))
        line = Series("base", np.array([0, _ladder(n)], np.float32), np.zeros(2, np.float32), "line", Paint("muted"), 1.5, axes="x4y4")
        bars = [
            Series(name, x, top, "bars", self.paint(kind), width, base, "x4y4") for name, kind, base, top in parts if (top > base).any()
        ]
        return [*bars, line]

    def _legend(self) -> tuple[Paint, ...]:
        wanted = set(np.unique(self.kinds).tolist()) - {Row.NOT_YET}
        if self.spent is not None:
            wanted |= {Row.NOW}
            wanted |= {Row.AGAIN} if (self.spent.run > self.spent.once).any() else set()
            wanted |= {Row.GHOST} if (self.spent.without > self.spent.run).any() else set()
        order = (Row.NOW, Row.AGAIN, Row.GHOST, Row.KEPT, Row.HIT_GHOST, Row.HIT, Row.LOST)
        paints = [self.paint(kind, self.t(f"kv_cache.legend.{kind.name.lower()}")) for kind in order if kind in wanted]
        return (*paints, *([framed("muted", self.t("kv_cache.legend.not_yet"))] if (self.kinds == Row.NOT_YET).any() else []))


def _lines(text: str, room: float, sheet: Sheet, most: int) -> list[str]:
    """Wrapped to a width; the last line takes the rest and is cut by Sheet.put."""
    parts = wrap(text, max(int(room / sheet.advance), 4))
    parts = parts if len(parts) <= most else [*parts[: most - 1], " ".join(parts[most - 1 :])]
    return [sheet.fit(part, room) for part in parts]


def _ladder(n: int) -> int:
    """8, 10, 12, 14, 16, 20, 24 …: axes that change rarely while a sequence grows."""
    size, by = 8, 2
    while size < n:
        size += by
        by *= 2 if size == 8 * by else 1
    return size


# ---- sentences ----


def _says(t: Words, trace: Trace, it: Life) -> str:
    who = trace.name(it.seq_id)
    if it.work is None:
        key = "failed" if trace.rows("steps", it.step, it.step)["failed"].any() else "idle" if len(it.works) or it.kept else "none"
        return t(f"kv_cache.says.{key}", step=it.step, who=who)
    if not it.has_cache:
        return t("kv_cache.says.again", step=it.step, who=who, n=it.num_new, again=it.num_again)
    head = t("kv_cache.says.computes", step=it.step, who=who, n=it.num_new)
    key = "kv_cache.says.recomputed.lost" if _was_preempted(trace, it) else "kv_cache.says.recomputed"
    again = t(key, new=it.num_new - it.num_again, again=it.num_again) if it.num_again else ""
    if not it.start:
        return t("kv_cache.says.first", head=head, again=again)
    hits = int(np.count_nonzero(rows_of(it)[: it.start] == Row.HIT_GHOST))
    of_others = t("kv_cache.says.hits", n=hits) if hits else ""
    return t("kv_cache.says.reuses", head=head, again=again, n=it.start, hits=of_others, all=it.end)


def _was_preempted(trace: Trace, it: Life) -> bool:
    """Between its last work and this one: what it computes again it had lost then."""
    before = int(it.works["step_id"][-2]) if len(it.works) > 1 else it.step
    return bool((trace.rows("preempts", before, it.step)["seq_id"] == it.seq_id).any())


def _kept(t: Words, trace: Trace, it: Life) -> str:
    size = trace.meta.get("kv_bytes_per_token")
    tokens = t("tokens", n=it.kept)
    if not it.kept and len(it.works):
        return t("kv_cache.kept.gone" if it.has_cache else "kv_cache.kept.never", tokens=tokens)
    if not isinstance(size, int) or size <= 0:
        return tokens
    return t("kv_cache.kept", tokens=tokens, each=data_size(size), total=data_size(size * it.kept))


def _compared(t: Words, with_: float, without: float) -> list[str]:
    return [
        t("kv_cache.flops.with", value=flops(with_, without)),
        t("kv_cache.flops.without", value=flops(without, without)),
        t("kv_cache.flops.ratio", ratio=f"{without / with_:,.1f}" if with_ else "1.0"),
    ]


def summary(trace: Trace, state: ViewState) -> str:
    it, t = shown(trace, state), words(state.language, WORDS)
    if it is None:
        return t("kv_cache.nobody", step=trace.clamp(state.step))
    parts = [_says(t, trace, it), t("kv_cache.summary.kept", kept=_kept(t, trace, it))]
    cost = costs(trace.meta)
    if cost is not None and len(it.works):
        with_, without, ratio = _compared(t, *spent(it, cost).totals(it.has_cache))
        parts.append(t("kv_cache.summary.flops", with_=with_, without=without, ratio=ratio))
    return " ".join(parts)


# ---- asks ----


def _name(trace: Trace, state: ViewState) -> str:
    it = shown(trace, state)
    return trace.name(it.seq_id) if it else "nobody"


def _ask(what: str):
    def answer(trace: Trace, state: ViewState) -> str:
        it = shown(trace, state)
        return str(getattr(it, what)) if it else "0"

    return answer


WORDS = {
    "kv_cache.keys": "key → query ↓",
    "kv_cache.keys.short": "key →",
    "kv_cache.keys.binned": "key → query ↓ (a cell: {n:,} tokens)",
    "kv_cache.keys.binned.short": "a cell: {n:,} tokens",
    "kv_cache.strip": "K and V",
    "kv_cache.says.computes": ("Step {step:,}: {who} computes {n:,} token", "Step {step:,}: {who} computes {n:,} tokens"),
    "kv_cache.says.recomputed": " ({new:,} new, {again:,} again)",
    "kv_cache.says.recomputed.lost": " ({new:,} new, {again:,} again after preemption)",
    "kv_cache.says.hits": " ({n:,} of them another request's)",
    "kv_cache.says.first": "{head}{again}; nothing was cached yet.",
    "kv_cache.says.reuses": "{head}{again}, reuses K and V of {n:,}{hits}; without a cache it would compute {all:,}.",
    "kv_cache.says.again": (
        "Step {step:,}, no cache: {who} computes {n:,} token, {again:,} again.",
        "Step {step:,}, no cache: {who} computes {n:,} tokens, {again:,} of them again.",
    ),
    "kv_cache.says.idle": "Step {step:,}: {who} computes nothing.",
    "kv_cache.says.none": "Step {step:,}: {who} has computed nothing yet.",
    "kv_cache.says.failed": "Step {step:,} failed: nothing of {who} was computed.",
    "kv_cache.row.not_yet": "not computed yet",
    "kv_cache.row.hit": "computed for another request, kept",
    "kv_cache.row.hit_ghost": "computed for another request, reused now",
    "kv_cache.row.kept": "computed in an earlier step",
    "kv_cache.row.ghost": "computed earlier, reused now",
    "kv_cache.row.lost": "was kept, given back",
    "kv_cache.row.now": "computed now",
    "kv_cache.row.again": "computed again now",
    "kv_cache.reads": ("{who}'s token {n:,} sees {n:,} key: {kind}", "{who}'s token {n:,} sees {n:,} keys: {kind}"),
    "kv_cache.reads.short": ("Token {n:,}: {n:,} key, {kind}", "Token {n:,}: {n:,} keys, {kind}"),
    "kv_cache.mark": ("{who}'s token {n:,}, {kind}", "{who}'s token {n:,}, {kind}"),
    "kv_cache.detail.keys": ("attends to {n:,} key", "attends to {n:,} keys"),
    "kv_cache.detail.flops": "{value} without logits",
    "kv_cache.detail.bytes": "its K and V take {size}",
    "kv_cache.kept.title": "K and V kept now",
    "kv_cache.kept": "{tokens} × {each} = {total}",
    "kv_cache.kept.gone": "{tokens}: given back",
    "kv_cache.kept.never": "{tokens}: dropped after each step",
    "kv_cache.flops.title": "{who}'s FLOPs so far",
    "kv_cache.flops.since": "{who}'s FLOPs since step {step:,}",
    "kv_cache.flops.with": "with cache {value}",
    "kv_cache.flops.without": "without {value}",
    "kv_cache.flops.short": "{without}: {ratio} times that",
    "kv_cache.flops.ratio": "without ÷ with = {ratio}",
    "kv_cache.formula": "FLOP a token = 2 × weights + 4 × layers × heads × head_dim × keys, and its logits",
    "kv_cache.formula.numbers": "a token: 2 × {body:,} weights + {per_key:,} × keys FLOP",
    "kv_cache.no_flops": "No FLOPs: this record does not say the model's sizes.",
    "kv_cache.no_steps": "No FLOPs yet.",
    "kv_cache.steps": ("{who} took part in {n:,} step", "{who} took part in {n:,} steps"),
    "kv_cache.steps.short": ("{who}: {n:,} step", "{who}: {n:,} steps"),
    "kv_cache.legend.now": "computed in this step",
    "kv_cache.legend.again": "computed again",
    "kv_cache.legend.ghost": "reused (without a cache: again)",
    "kv_cache.legend.kept": "computed earlier, kept",
    "kv_cache.legend.hit": "another request's, kept",
    "kv_cache.legend.hit_ghost": "reused, another request's",
    "kv_cache.legend.lost": "was kept, given back",
    "kv_cache.legend.not_yet": "not computed yet",
    "kv_cache.nobody": "Nobody has anything in the cache at step {step:,}.",
    "kv_cache.summary.kept": "Kept after it: {kept}.",
    "kv_cache.summary.flops": "FLOPs so far: {with_}, {without}, {ratio}.",
}


VIEW = View(
    name="kv_cache",
    title="KV cache",
    question="What does the cache save one request?",
    figure=figure,
    summary=summary,
    words=WORDS,
    asks=(
        Ask("Which request is shown (nobody if there is none)?", _name),
        Ask("How many tokens does the request shown compute in this step?", _ask("num_new")),
        Ask("Of how many tokens does this step reuse K and V that were there before it?", _ask("start")),
        Ask("How many tokens of the request shown have their K and V kept now, after this step?", _ask("kept")),
        Ask("How many keys does the last row computed in this step see (0 if none is)?", _ask("end")),
    ),
    order=45,
)
