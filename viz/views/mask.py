"""Super-sequence mask: which keys may each query of this step see?

All tokens that a step computes stand below each other as queries, whoever they belong to; the keys of the same
requests stand side by side, cached ones before new ones. A query sees the keys of its own request up to
itself. The picture is computed from the step's works (start, num_tokens) and from nothing else.
"""

from __future__ import annotations

import numpy as np

from engine.trace import Trace
from viz.fold import FOLD_WIDTH, Block, Folded, Sees, fold, sees
from viz.layout import Sheet, framed, message, too_small, visible, wrap
from viz.select import identity, selected, token_ids
from viz.theme import NUM_REQUEST_COLORS, request_color
from viz.view import Ask, Badge, Frame, Mark, Paint, Raster, Series, View, ViewState
from viz.words.catalogue import words

MIN_ROW, MAX_ROW = 14, 56
MIN_COL, MAX_COL = 12, 44
_HUES = [request_color(i) for i in range(NUM_REQUEST_COLORS)] + [request_color(None)]
_OTHER, _CLEAR = Paint("free", hatch="diagonal"), 255
_PAINTS = (*(Paint(hue, hatch=hatch, alpha=alpha) for hue in _HUES for hatch, alpha in ((None, 1.0), (None, 0.22), ("dots", 0.6))), _OTHER)


def figure(trace: Trace, state: ViewState) -> Frame:
    step = trace.clamp(state.step)
    if too_small(state) or not len(trace.rows("works", step, step)):
        return message(summary(trace, state), state, Badge("state"))
    return _Picture(trace, state, step).frame()


class _Picture:
    """Header of requests, the matrix, names of rows at its left, what the last row sees at its right, a sentence."""

    def __init__(self, trace: Trace, state: ViewState, step: int) -> None:
        self.trace, self.state, self.step = trace, state, step
        self.t, self.sheet = words(state.language, WORDS), Sheet(state)
        self.who = identity(trace, step, state.selection)
        self.works = trace.rows("works", step, step)
        sheet = self.sheet
        self.left, right = round(sheet.advance * (17 if sheet.width >= 80 * sheet.advance else 14)), round(sheet.advance * 11)
        self.counts_total = sheet.height >= 16 * sheet.line  # else the total stands at the axis
        bottom = sheet.height - (3 if len(self.works) > 8 or self.counts_total else 2) * sheet.line - 16
        min_row = max(MIN_ROW, round(sheet.font * 1.3))
        chosen = selected(trace, step, state.selection)
        for lines in (2, 3):  # above the matrix: whose keys, how many, and folded ones where there are some
            self.top = 8 + lines * sheet.line + 4
            room = (max(int((bottom - self.top) / min_row), 1), max(int((sheet.width - self.left - right) / MIN_COL), FOLD_WIDTH + 1))
            self.folded: Folded = fold(self.works, room[0] - (len(self.works) > room[0]), room[1], chosen)
            if not any(span.count > 1 for block in self.folded.blocks for span in block.new):
                break
        self.grid = sees(self.folded)
        self.row = min((bottom - self.top) / self.folded.num_rows, MAX_ROW)
        self.col = min((sheet.width - self.left - right) / self.folded.num_cols, MAX_COL)
        self.right = self.left + self.col * self.folded.num_cols
        self.bottom = self.top + self.row * self.folded.num_rows

    def x(self, col: float) -> float:
        return self.left + col * self.col

    def y(self, row: float) -> float:
        return self.top + row * self.row

    def frame(self) -> Frame:
        sheet, t, folded = self.sheet, self.t, self.folded
        box = (self.left, self.right, self.top, self.bottom)
        axes = sheet.axes() | sheet.data_axes(2, (0, folded.num_cols), (0, folded.num_rows), box)
        sheet.put(t("mask.keys"), self.left - 10, 8 + sheet.line / 2, "muted", anchor="right")
        total = int(self.works["num_tokens"].sum())
        queries = t("mask.queries") if self.counts_total else t("mask.queries.counted", n=total)
        beside = self.left - (10 if sheet.span(queries) <= self.left - 12 else 4)
        sheet.put(
            queries if sheet.span(queries) <= beside else t("mask.queries"), beside, self.top - 4 - sheet.line / 2, "muted", anchor="right"
        )
        chosen = self._chosen()
        self._sentence(chosen)
        under = self.bottom + sheet.line / 2 + 4
        if folded.hidden:
            sheet.put(t("mask.more_requests", n=folded.hidden), self.left - 10, under, "muted", anchor="right")
        if self.counts_total:
            sheet.put(t("mask.total", n=total), self.left, under, weight=700)
        for block in folded.blocks:
            self._names(block)
        for block in folded.blocks:
            self._counts(block)
        legend = (
            Paint("request-other", t("mask.legend.allowed")),
            Paint("request-other", t("mask.legend.causal"), alpha=0.22),
            Paint("free", t("mask.legend.other"), "diagonal"),
            framed("accent", t("mask.legend.chosen")),
            *([Paint("request-other", t("mask.legend.folded"), "dots", 0.6)] if (self.grid == Sees.PART).any() else []),
        )
        return Frame(
            badges=(Badge("state"),), axes=axes, rasters=self._rasters(), series=(self._lines(),), labels=tuple(sheet.labels),
            marks=tuple(self._marks(chosen)), legend=legend,
        )  # fmt: skip

    def _rasters(self) -> tuple[Raster, ...]:
        """The matrix, a cell a query and key; a folded history is one wide cell in each row, not many keys."""
        values, rasters = self._values(), []
        for block in self.folded.blocks:
            col = block.col0
            for span in block.cached:
                if span.count > 1:
                    wide = np.ascontiguousarray(values[:, col : col + 1])
                    rasters.append(Raster("fold", wide, col, col + span.width, 0, self.folded.num_rows, _PAINTS, axes="x2y2"))
                    values[:, col : col + span.width] = _CLEAR
                col += span.width
        return Raster("mask", values, 0, self.folded.num_cols, 0, self.folded.num_rows, _PAINTS, axes="x2y2"), *rasters

    def _values(self) -> np.ndarray:
        grid = self.grid
        values = np.full(grid.shape, len(_PAINTS) - 1, np.uint8)
        kinds = {Sees.ALLOWED: 0, Sees.CAUSAL: 1, Sees.PART: 2}
        for block in self.folded.blocks:
            area = np.s_[block.row0 : block.row0 + len(block.rows), block.col0 : block.col0 + block.num_cols]
            lookup = np.zeros(len(Sees), np.uint8)
            lookup[list(kinds)] = [3 * self.who.code(block.seq_id) + k for k in kinds.values()]
            values[area] = lookup[grid[area]]
        return values

    def _lines(self) -> Series:
        """Borders between requests, and between cached and new keys of one."""
        points: list[tuple[float, float]] = []
        rows, cols, gap = self.folded.num_rows, self.folded.num_cols, (np.nan, np.nan)
        for block in self.folded.blocks:
            if block.row0:
                points += [(0, block.row0), (cols, block.row0), gap, (block.col0, 0), (block.col0, rows), gap]
            if block.cached:
                at = block.col0 + block.num_cached_cols
                points += [(at, block.row0), (at, block.row0 + len(block.rows)), gap]
        xy = np.array(points, np.float32).reshape(-1, 2)
        return Series("borders", xy[:, 0].copy(), xy[:, 1].copy(), "line", Paint("ink"), 1.5, axes="x2y2")

    # ---- words ----

    def _names(self, block: Block) -> None:
        """Left: whose rows. Top: whose keys. Right: how many keys its last row sees."""
        sheet, t, name = self.sheet, self.t, self.trace.name(block.seq_id)
        first, last = block.start + 1, block.start + block.num_tokens
        key, room = "mask.row" if first == last else "mask.rows", self.left - 12
        text = t(key, who=name, n=last, first=first, last=last)
        text = text if sheet.span(text) <= room else t(f"{key}.short", who=name, n=last, first=first, last=last)
        sheet.put(text, self.left - 10, self.y(block.row0 + 0.5), anchor="right", room=room)
        for i, span in enumerate(block.rows[1:], 1):
            if span.count > 1:
                sheet.put(t("mask.fold", n=span.count), self.left - 10, self.y(block.row0 + i + 0.5), "muted", anchor="right", room=room)
        sheet.put(t("mask.sees", n=last), self.right + 8, self.y(block.row0 + len(block.rows) - 0.5), room=sheet.width - self.right - 10)
        x0, x1 = self.x(block.col0), self.x(block.col0 + block.num_cols)
        sheet.put(name, (x0 + x1) / 2, 8 + sheet.line / 2, anchor="center", weight=700, room=x1 - x0 + sheet.advance)

    def _counts(self, block: Block) -> None:
        """Top, second line: how many of its keys are cached and new. On a folded history: how long it is."""
        sheet, t = self.sheet, self.t
        x0, x1 = self.x(block.col0), self.x(block.col0 + block.num_cols)
        for key in ("mask.counts", "mask.counts.short"):
            text = t(key, cached=block.start, new=block.num_tokens)
            if sheet.span(text) <= x1 - x0 - 4 and sheet.put(text, (x0 + x1) / 2, 8 + sheet.line * 1.5, "muted", anchor="center"):
                break
        self._folded_keys(block)
        fold = next((s for s in block.cached if s.count > 1), None)
        if fold is not None and len(sheet.labels) < 36:
            width = fold.width * self.col
            for text in (t("mask.cached", n=fold.count), t("mask.cached.short", n=fold.count), "⋯"):
                if sheet.span(text) <= width - 2:
                    y = self.y(block.row0 + 0.5 if len(block.rows) > 1 else block.row0 + len(block.rows) / 2)
                    sheet.put(text, x0 + width / 2, y, f"on-{self.who.color(block.seq_id)}", anchor="center")
                    break

    def _folded_keys(self, block: Block) -> None:
        """Over a column that stands for several new keys: how many, as folded rows say it at the left."""
        sheet, col = self.sheet, block.col0 + block.num_cached_cols
        for span in block.new:
            if span.count > 1:
                for text in (self.t("mask.fold.keys", n=span.count), f"⋯{span.count:,}", "⋯"):
                    if sheet.put(text, self.x(col + span.width / 2), self.top - 4 - sheet.line / 2, "muted", anchor="center"):
                        break
            col += span.width

    def _chosen(self) -> tuple[int, int]:
        """(seq_id, position) of the row that is read out: the selected one, else the longest chunk's last."""
        kind, _, rest = (self.state.selection or "").partition(":")
        blocks = {b.seq_id: b for b in self.folded.blocks}
        block = max(self.folded.blocks, key=lambda b: b.num_tokens)
        numbers = [int(n) for n in rest.split(":") if n.isascii() and n.isdigit() and len(n) < 10]
        if kind in ("query", "seq", "token") and numbers and numbers[0] in blocks:
            block = blocks[numbers[0]]
            if kind == "query" and len(numbers) == 2 and block.start <= numbers[1] < block.start + block.num_tokens:
                return block.seq_id, numbers[1]
        return block.seq_id, block.start + block.num_tokens - 1

    def _sentence(self, chosen: tuple[int, int]) -> None:
        """ "E's 7th token sees these 7: …" in two lines, the newest text kept."""
        sheet, room = self.sheet, self.sheet.width - 24
        whole, head, seen = self._reads(chosen)
        lines = wrap(whole, int(room / sheet.advance))
        if len(lines) > 2:
            while sheet.span(f"… {seen}") > room:
                seen = seen.partition(" ")[2] or seen[1:]
            lines = [head, f"… {seen}"]
        under = self.bottom + (2 if self.folded.hidden or self.counts_total else 1) * sheet.line + 12
        y = min(max(under, 0), sheet.height - 1.5 * sheet.line - 6)
        for i, line in enumerate(lines):
            sheet.put(line, 12, y + i * sheet.line, room=room)

    def _reads(self, chosen: tuple[int, int]) -> tuple[str, str, str]:
        """The sentence, its part before the text, the text."""
        seq_id, position = chosen
        ids = token_ids(self.trace, seq_id, self.step - 1)
        seen = range(max(0, position - 120), position + 1)
        text = "".join(visible(self.trace.token_text(ids[p])) if p in ids else "▯" for p in seen).strip()
        fields = {"n": position + 1, "who": self.trace.name(seq_id), "nth": self.t.ordinal(position + 1)}
        whole = self.t("mask.sentence", **fields, text=("…" if seen[0] else "") + text)
        return whole, self.t("mask.sentence", **fields, text="").rstrip(), text

    def _marks(self, chosen: tuple[int, int]) -> list[Mark]:
        marks = []
        for block in self.folded.blocks:
            name = self.trace.name(block.seq_id)
            for i, span in enumerate(block.rows):
                here = block.seq_id == chosen[0] and span.first <= chosen[1] <= span.last
                position = chosen[1] if here else span.last
                text = f"{self.t('mask.row', who=name, n=position + 1)} {self.t('mask.sees', n=position + 1)}"
                outline = "accent" if here else None
                y = block.row0 + i
                marks.append(Mark(f"query:{block.seq_id}:{position}", 0, self.folded.num_cols, y, y + 1, text, outline, axes="x2y2"))
        return marks


def summary(trace: Trace, state: ViewState) -> str:
    step, t = trace.clamp(state.step), words(state.language, WORDS)
    works = trace.rows("works", step, step)
    if not len(works):
        return t("mask.nothing")
    parts = [t("mask.summary.part", who=trace.name(int(w["seq_id"])), new=int(w["num_tokens"]), cached=int(w["start"])) for w in works[:8]]
    rows, requests = t("mask.summary.rows", n=int(works["num_tokens"].sum())), t("requests", n=len(works))
    return t("mask.summary", step=step, rows=rows, requests=requests, who=", ".join(parts))


# ---- asks ----


def _works(trace: Trace, state: ViewState) -> np.ndarray:
    step = trace.clamp(state.step)
    return trace.rows("works", step, step)


def _most(trace: Trace, state: ViewState) -> str:
    """ "" where several have as many."""
    works = _works(trace, state)
    most = works["seq_id"][works["num_tokens"] == works["num_tokens"].max()]
    return trace.name(int(most[0])) if len(most) == 1 else ""


def _first_cached(trace: Trace, state: ViewState) -> str:
    return str(int(_works(trace, state)["start"][0]))


def _last_sees(trace: Trace, state: ViewState) -> str:
    last = _works(trace, state)[-1]
    return str(int(last["start"] + last["num_tokens"]))


def _all_queries(trace: Trace, state: ViewState) -> str:
    return str(int(_works(trace, state)["num_tokens"].sum()))


WORDS = {
    "mask.queries": "queries ↓",
    "mask.queries.counted": "{n:,} queries ↓",
    "mask.total": ("{n:,} query token in this step", "{n:,} query tokens in this step"),
    "mask.keys": "keys →",
    "mask.cached": "⋯ {n:,} cached",
    "mask.cached.short": "⋯{n:,}",
    "mask.counts": "{cached:,} cached + {new:,} new",
    "mask.counts.short": "{cached:,}+{new:,}",
    "mask.row": "{who} token {n:,}",
    "mask.row.short": "{who} {n:,}",
    "mask.rows": "{who} tokens {first:,}–{last:,}",
    "mask.rows.short": "{who} {first:,}–{last:,}",
    "mask.sees": "sees {n:,}",
    "mask.fold": ("⋯ {n:,} row", "⋯ {n:,} rows"),
    "mask.fold.keys": ("⋯ {n:,} key", "⋯ {n:,} keys"),
    "mask.sentence": ("{who}'s {nth} token sees only itself: {text}", "{who}'s {nth} token sees these {n:,}: {text}"),
    "mask.more_requests": ("+{n:,} request", "+{n:,} requests"),
    "mask.legend.allowed": "sees (request's colour)",
    "mask.legend.causal": "later token: not seen",
    "mask.legend.other": "other request: not seen",
    "mask.legend.chosen": "framed: the row read out below",
    "mask.legend.folded": "folded, seen in part",
    "mask.nothing": "Nobody computed anything in this step.",
    "mask.summary": "Step {step:,} computes {rows} of {requests} in one pass: {who}.",
    "mask.summary.part": "{who} {new:,} new after {cached:,} cached",
    "mask.summary.rows": ("{n:,} query row", "{n:,} query rows"),
}


VIEW = View(
    name="mask",
    title="Super-sequence mask",
    question="Which keys may each query of this step see?",
    figure=figure,
    summary=summary,
    words=WORDS,
    asks=(
        Ask("How many requests are in this step?", lambda trace, state: str(len(_works(trace, state)))),
        Ask("Which request has the most query tokens in this step?", _most),
        Ask("How many keys of the topmost request were cached before this step?", _first_cached),
        Ask("How many keys does the very last query row see?", _last_sees),
        Ask("How many query tokens are in this step, all requests together?", _all_queries),
    ),
    order=30,
)
