"""Paged blocks: where do the tokens of each request lie, and what would padded slabs have wasted?

Each cell is one block of the cache, filled in proportion to the tokens in it; shared blocks show the stripes of
all owners. The block table of one request stands at the left, with links. Below, the same tokens in one padded
slab a request: min(prompt + max_tokens, limit) places each. Large pools fold to a density map.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.trace import Trace
from viz.layout import Sheet, message, too_small
from viz.select import MAX_STRIPES, PageCells, PageState, identity, padded, page_cells, selected
from viz.theme import HUES, percent
from viz.view import Ask, Badge, Frame, Mark, Paint, Raster, Series, View, ViewState
from viz.words.catalogue import words

ALL = -1
MAX_CELLS = 192
MIN_CELL, MAX_WIDE, MAX_HIGH = 32, 112, 56  # px from cell to cell; at least 28 of them are the cell
MAX_LANE = 56  # px from slab to slab
_WASTE, _CACHED, _PENDING, _FREE, _CLEAR = 7, 8, 9, 10, 255
_PAINTS = (*map(Paint, HUES), Paint("waste", hatch="diagonal"), Paint("cached"), Paint("cached", hatch="dots"), Paint("free"))
_OF_STATE = np.array([_FREE, _CACHED, _PENDING, _WASTE], np.uint8)  # by PageState
_SUB = 6  # raster rows of a cell: divides by one, two and three stripes


def figure(trace: Trace, state: ViewState) -> Frame:
    if too_small(state):
        return message(summary(trace, state), state, Badge("state"))
    return _Picture(trace, state, trace.clamp(state.step)).frame()


def shown_request(trace: Trace, state: ViewState, step: int, cells: PageCells) -> int | None:
    """Whose block table is shown: the selected one's if it holds blocks, else the one that holds most."""
    chosen = [i for i in selected(trace, step, state.selection) if i in cells.tables]
    return chosen[0] if chosen else max(cells.tables, key=lambda i: (len(cells.tables[i]), -i), default=None)


class _Picture:
    """One frame while it is laid out: count on top, table at the left, cells, slabs below."""

    def __init__(self, trace: Trace, state: ViewState, step: int) -> None:
        self.trace, self.state, self.step = trace, state, step
        self.t, self.sheet = words(state.language, WORDS), Sheet(state)
        self.who = identity(trace, step, state.selection)
        self.cells: PageCells = page_cells(trace, step)
        self.padded = padded(trace, step, self.cells.computed)
        self.chosen = shown_request(trace, state, step, self.cells)
        self.places = {}  # page → [(seq_id, index)]
        for seq_id, table in sorted(self.cells.tables.items()):
            for index, page in enumerate(table):
                self.places.setdefault(page, []).append((seq_id, index))
        self.num_shared = sum(len(owners) > 1 for owners in self.places.values())
        sheet = self.sheet
        self.narrow = sheet.width < 62 * sheet.advance  # then the table is one line
        wide = sheet.width >= 70 * sheet.advance
        self.table_right = 0 if self.narrow else round(sheet.advance * (16 if wide else 15)) + 12
        self.left = self.table_right + round(sheet.advance * max(len(f"{self.cells.num_pages:,}"), 3)) + 14
        self.right, self.top = sheet.width - 12, 8 + sheet.line * (2 if self.narrow else 1) + 6
        self._grid()

    def _grid(self) -> None:
        """Columns and cell size: the largest cells that fit, if need be without slabs; else a density map."""
        pages, wide, height = max(self.cells.num_pages, 1), self.right - self.left, self.sheet.height
        usual = max(height * (0.78 if self.narrow else 0.58) - self.top, MIN_CELL)
        all_but_title = height - self.top - self.sheet.line - 18
        self.dense, self.per_cell = pages > MAX_CELLS, 1
        fits = [
            (room, columns)
            for room in (usual, all_but_title)
            for columns in range(4, int(wide / MIN_CELL) + 1, 4)
            if -(-pages // columns) * MIN_CELL <= room and (wide / columns <= MAX_WIDE or columns >= pages)
        ]
        if self.dense or not fits:
            self.dense = True
            self._density(pages, wide, usual)
        else:
            room, columns = fits[0]
            self.columns, self.rows = min(columns, pages), -(-pages // columns)
            self.pitch_x = min(wide / columns, MAX_WIDE)
            self.pitch_y = min(max(room / self.rows, MIN_CELL), MAX_HIGH)
        entries = 0 if self.narrow else min(len(self.cells.tables.get(self.chosen, ())), 6)
        entries += bool(entries)  # the heads of their columns
        self.bottom = self.top + max(self.rows * self.pitch_y, min(entries * self.sheet.line, usual))

    def _density(self, pages: int, wide: float, room: float) -> None:
        size = next((s for s in (16, 12, 10, 8, 6, 5, 4) if int(wide / s) * int(room / s) >= pages), 4)
        self.columns, most = int(wide / size), max(int(room / size), 1)
        self.per_cell = max(-(-pages // (self.columns * most)), 1)
        self.rows = -(-pages // (self.per_cell * self.columns))
        self.pitch_x = self.pitch_y = float(size)

    def cell(self, page: int) -> tuple[float, float, float, float]:
        """Pixel box of a page's cell, without its gap."""
        row, column = divmod((page - 1) // self.per_cell, self.columns)
        x, y = self.left + column * self.pitch_x, self.top + row * self.pitch_y
        gap = (0.0, 0.0) if self.dense else (self.pitch_x * self.gap_x, self.pitch_y / (_SUB + 1))
        return x, x + self.pitch_x - gap[0], y, y + self.pitch_y - gap[1]

    def frame(self) -> Frame:
        sheet, t = self.sheet, self.t
        rasters = (self._density_raster() if self.dense else self._cell_raster(), *self._slabs())
        sheet.put(self._count(), 12 if self.narrow else self.left, 8 + sheet.line / 2, room=self.right - 12)
        links = self._table_line() if self.narrow else self._table()
        if not self.dense:
            self._cell_texts()
        p = self.padded
        formula = t("blocks.formula", limit=p.limit, stored=p.stored, reserved=p.reserved) if p.slabs else t("blocks.formula.none")
        return Frame(
            badges=(Badge("state"), Badge("computed", formula)), axes=sheet.axes(), rasters=rasters, series=(links,),
            labels=tuple(sheet.labels), marks=tuple(self._marks()), legend=self._legend(),
        )  # fmt: skip

    def _count(self) -> str:
        c = self.cells
        held, cached, pending = (c.count(s) for s in (PageState.HELD, PageState.CACHED, PageState.PENDING))
        counts = {"held": held, "total": c.num_pages, "free": c.num_pages - held - pending, "cached": cached, "shared": self.num_shared}
        more = self.t("blocks.count.pending", pending=pending) if pending else ""
        texts = [self.t(key, **counts) + more for key in ("blocks.count.cached" if cached else "blocks.count", "blocks.count.short")]
        room = self.right - (12 if self.narrow else self.left)
        text = next((text for text in texts if self.sheet.span(text) <= room), None)
        if text is None:
            return self.t("blocks.count.shortest", **counts)
        places = held * c.page_size
        filled = int(c.used[1:][c.state[1:] == PageState.HELD].sum())
        more = text + self.t("blocks.paged", percent=percent(places - filled, places))
        return more if places and self.sheet.span(more) <= self.right - self.left else text

    # ---- cells ----

    def _cell_raster(self) -> Raster:
        c = self.cells
        group = -(-c.page_size // 32)  # tokens a raster column
        columns = -(-c.page_size // group)
        fine = max(round(self.pitch_x * 0.88 / (columns * 3)), 1)  # raster columns a token
        inner = columns * fine
        gap = max(round(inner * 0.1), 1)
        self.gap_x = gap / (inner + gap)
        shown = self.rows * self.columns
        cells = np.full((shown, _SUB + 1, inner + gap), _CLEAR, np.uint8)
        body = cells[: c.num_pages, :_SUB, :inner]
        body[:] = _OF_STATE[c.state[1:]][:, None, None]
        filled = -(-c.used[1:] // group) * fine
        held = np.flatnonzero(c.num_owners[1:])
        stripes = np.minimum(c.num_owners[1:][held], MAX_STRIPES)
        which = np.arange(_SUB)[None] * stripes[:, None] // _SUB
        hue = self.who.codes(np.take_along_axis(c.owners[1:][held], which, 1))
        body[held] = np.where(np.arange(inner)[None, None] < filled[held][:, None, None], hue[:, :, None], np.uint8(_WASTE))
        grid = cells.reshape(self.rows, self.columns, _SUB + 1, inner + gap).swapaxes(1, 2)
        grid = np.ascontiguousarray(grid.reshape(self.rows * (_SUB + 1), self.columns * (inner + gap)))
        x1, y1 = self.left + self.columns * self.pitch_x, self.top + self.rows * self.pitch_y
        return Raster("blocks", grid, self.left, x1, self.top, y1, _PAINTS)

    def _density_raster(self) -> Raster:
        c = self.cells
        values = _OF_STATE[c.state[1:]]
        held = c.num_owners[1:] > 0
        values[held] = self.who.codes(c.owners[1:, 0][held])
        places = self.rows * self.columns * self.per_cell
        padded_values = np.full(places, _CLEAR, np.uint8)
        padded_values[: len(values)] = values
        bins = padded_values.reshape(-1, self.per_cell)
        if self.per_cell > 1:  # the commonest in each bin
            counts = np.stack([(bins == v).sum(1) for v in (*range(_FREE + 1), _CLEAR)])
            bins = np.array([*range(_FREE + 1), _CLEAR], np.uint8)[counts.argmax(0)][:, None]
        grid = np.ascontiguousarray(bins.reshape(self.rows, self.columns))
        x1, y1 = self.left + self.columns * self.pitch_x, self.top + self.rows * self.pitch_y
        return Raster("blocks", grid, self.left, x1, self.top, y1, _PAINTS)

    def _cell_texts(self) -> None:
        """Numbers of rows, numbers of the shown request's blocks, ×n on shared ones, letters on the others."""
        sheet, t, c = self.sheet, self.t, self.cells
        for row in range(self.rows):
            page = row * self.columns + 1
            sheet.put(f"{page:,}", self.left - 8, sum(self.cell(page)[2:]) / 2, "muted", anchor="right")
        mine = set(c.tables.get(self.chosen, ()))
        texts = [(page, f"{page:,} {t('blocks.times', n=len(owners))}") for page, owners in self.places.items() if len(owners) > 1]
        texts += [(page, f"{page:,}") for page in mine if len(self.places[page]) == 1]
        before: int | None = None
        for page in sorted(self.places):
            owner = self.places[page][0][0]
            if page not in mine and len(self.places[page]) == 1 and (owner != before or (page - 1) % self.columns == 0):
                texts.append((page, self.trace.name(owner)))
            before = owner
        for page, text in texts:
            if len(sheet.labels) < 38:
                self._cell_text(page, text, 700 if page in mine else 400)

    def _cell_text(self, page: int, text: str, weight: int) -> None:
        """In the larger part of the cell, filled or empty, in a colour that reads on it."""
        x0, x1, y0, y1 = self.cell(page)
        border = x0 + (x1 - x0) * float(self.cells.used[page]) / self.cells.page_size
        filled = border - x0 >= x1 - border
        left, right = (x0, border) if filled else (border, x1)
        text = text if self.sheet.span(text) <= right - left else text.rpartition(" ")[2]  # "×3" of "17 ×3"
        span = self.sheet.span(text)
        middle = (left + right) / 2 if span <= right - left else (x0 + x1) / 2
        color = f"on-{self.who.color(self.places[page][0][0])}" if filled else "ink"
        if span <= x1 - x0:
            self.sheet.put(text, middle, (y0 + y1) / 2, color, anchor="center", weight=weight)

    def _marks(self) -> Iterator[Mark]:
        if self.dense:
            yield from self._bin_marks()
            return
        t, c = self.t, self.cells
        mine = set(c.tables.get(self.chosen, ()))
        for page in range(1, c.num_pages + 1):
            x0, x1, y0, y1 = self.cell(page)
            owners, state = self.places.get(page, ()), PageState(int(c.state[page]))
            if owners:
                names = t.names([self.trace.name(i) for i, _ in owners], 4)
                text = t("blocks.mark.held", page=page, used=int(c.used[page]), size=c.page_size, who=names)
                outline = "ink" if page in mine else f"{self.who.color(owners[0][0])}-line"
            else:
                text = t(f"blocks.mark.{state.name.lower()}", page=page, size=c.page_size)
                outline = "cached-line" if state is PageState.CACHED else None
            yield Mark(f"page:{page}", x0, x1, y0, y1, text, outline, self._detail(page, owners))

    def _detail(self, page: int, owners) -> str:
        t, c, said = self.t, self.cells, []
        for seq_id, index in owners:
            first = index * c.page_size
            last = min(first + c.page_size, c.computed[seq_id]) - 1
            if last >= first:
                said.append(t("blocks.detail.range", who=self.trace.name(seq_id), first=first, last=last))
        if len(owners) > 1:
            said.append(t("blocks.detail.shared"))
        if owners and c.published[page]:
            said.append(t("blocks.detail.published"))
        return "; ".join(said)

    def _bin_marks(self) -> Iterator[Mark]:
        c = self.cells
        tall = max(int(np.ceil(16 / self.pitch_y)), 1)
        for row in range(0, self.rows, tall):
            first = row * self.columns * self.per_cell + 1
            last = min(first + tall * self.columns * self.per_cell - 1, c.num_pages)
            held = int(np.count_nonzero(c.state[first : last + 1] == PageState.HELD))
            cached = int(np.count_nonzero(c.state[first : last + 1] == PageState.CACHED))
            text = self.t("blocks.mark.bin", first=first, last=last, held=held, cached=cached)
            y0, y1 = self.top + row * self.pitch_y, self.top + min(row + tall, self.rows) * self.pitch_y
            yield Mark(f"page:{first}", self.left, self.left + self.columns * self.pitch_x, y0, y1, text)
        yield from self._mine()

    def _mine(self) -> Iterator[Mark]:
        """The shown request's blocks on the density map, outlined: runs of neighbours, the first of them."""
        cells = sorted({(page - 1) // self.per_cell for page in self.cells.tables.get(self.chosen, ())})
        runs: list[list[int]] = []
        for cell in cells:
            if runs and cell == runs[-1][1] + 1 and cell % self.columns:
                runs[-1][1] = cell
            else:
                runs.append([cell, cell])
        for first, last in runs[:24]:
            x0, _, y0, y1 = self.cell(first * self.per_cell + 1)
            x1 = self.cell(last * self.per_cell + 1)[1]
            pages = {"first": first * self.per_cell + 1, "last": min((last + 1) * self.per_cell, self.cells.num_pages)}
            text = self.t("blocks.mark.run", who=self.trace.name(self.chosen), **pages)
            yield Mark(f"page:{pages['first']}", x0, x1, y0, y1, text, "ink")

    # ---- the block table ----

    def _linked(self) -> int | None:
        """The selected page, ALL for a selected request, else None: links are drawn for a selection only."""
        kind, _, rest = (self.state.selection or "").partition(":")
        if kind == "page" and rest.isascii() and rest.isdigit() and len(rest) < 10:
            return int(rest)
        return ALL if self.chosen in selected(self.trace, self.step, self.state.selection) else None

    def _table(self) -> Series:
        """Entries "index → block" of the shown request, with links to their cells."""
        sheet, t, c = self.sheet, self.t, self.cells
        table = c.tables.get(self.chosen, ())
        points: list[tuple[float, float]] = []
        room = self.table_right - 12
        if not table:
            sheet.put(t("blocks.table.none"), 12, 8 + sheet.line / 2, "muted", room=room)
            return Series("links", np.zeros(0, np.float32), np.zeros(0, np.float32))
        name = self.trace.name(self.chosen)
        sheet.put(t("blocks.table", who=name), 12, 8 + sheet.line / 2, weight=700, room=self.left - 20)
        sheet.put(t("blocks.table.heads"), 24, self.top + sheet.line / 2, "muted", room=room - 12)
        fits = max(min(int((self.bottom - self.top) / sheet.line) - 1, 10), 2)
        linked = self._linked()
        entries: list[int | None] = list(range(len(table)))
        if len(table) > fits:
            head = (fits - 1) // 2
            entries = [*range(head), None, *range(len(table) - (fits - 1 - head), len(table))]
            wanted = table.index(linked) if linked in table else 0
            if wanted not in entries:
                entries[head - 1 if head else head + 1] = wanted
                entries = sorted((i for i in entries if i is not None), key=int)
                entries.insert(entries.index(wanted) + 1, None)
        for line, index in enumerate(entries):
            y = self.top + (line + 1.5) * sheet.line
            if index is None:
                sheet.put(t("blocks.entry.more", n=len(table) - fits + 1), 24, y, "muted", room=room - 12)
                continue
            label = sheet.put(t("blocks.entry", index=index, page=table[index]), 24, y, room=room - 12)
            if label is not None and (linked == table[index] or linked == ALL):
                x0, _, y0, y1 = self.cell(table[index])
                points += [(24 + sheet.span(label.text) + 6, y), (self.table_right, y), (x0, (y0 + y1) / 2), (np.nan, np.nan)]
        xy = np.array(points, np.float32).reshape(-1, 2)
        return Series("links", xy[:, 0].copy(), xy[:, 1].copy(), "line", Paint(f"{self.who.color(self.chosen)}-line", alpha=0.8), 1.5)

    def _table_line(self) -> Series:
        """The whole table in one line, for a narrow panel; no links."""
        sheet, table = self.sheet, self.cells.tables.get(self.chosen, ())
        text = self.t("blocks.table.none")
        if table:
            text = self.t("blocks.table.line", who=self.trace.name(self.chosen), pages=" ".join(f"{page:,}" for page in table))
        sheet.put(text, 12, 8 + sheet.line * 1.5, "ink" if table else "muted", room=self.right - 12)
        return Series("links", np.zeros(0, np.float32), np.zeros(0, np.float32))

    # ---- padded slabs ----

    def _slabs(self) -> tuple[Raster, ...]:
        sheet, t, p = self.sheet, self.t, self.padded
        if not p.slabs:
            return ()
        y = self.bottom + 10 + sheet.line / 2
        numbers = {"stored": p.stored, "reserved": p.reserved, "percent": percent(p.reserved - p.stored, p.reserved)}
        title = t("blocks.slabs", **numbers)
        for key in ("blocks.slabs.short", "blocks.slabs.shortest"):
            title = title if sheet.span(title) <= sheet.width - 24 else t(key, **numbers)
        sheet.put(title, 12, y, weight=700, room=sheet.width - 24)
        top, least = y + sheet.line / 2 + 4, max(round(sheet.font * 1.3), 16)
        fits = int((sheet.height - 8 - top) / least)
        if fits < 1:
            return ()
        slabs = p.slabs if len(p.slabs) <= fits else self._most_wanted(fits - 1)
        lane = min((sheet.height - 8 - top) / (len(slabs) + (len(slabs) < len(p.slabs))), MAX_LANE)
        left, right = 12, sheet.width - 16 - round(sheet.advance * 19)
        longest = max((s.reserved for s in slabs), default=1)
        columns = min(longest, 256)
        fine = max(_SUB, int(np.ceil(lane / 8)))  # raster rows a slab, the last one a gap; the browser rules higher ones
        values = np.full((len(slabs) * fine, columns), _CLEAR, np.uint8)
        for i, slab in enumerate(slabs):
            line = values[i * fine : (i + 1) * fine - 1]
            line[:, : -(-slab.reserved * columns // longest)] = _WASTE
            line[:, : -(-slab.stored * columns // longest)] = self.who.code(slab.seq_id)
            end = left + (right - left) * slab.reserved / longest
            text = t("blocks.slab", who=self.trace.name(slab.seq_id), stored=slab.stored, reserved=slab.reserved)
            sheet.put(text, end + 8, top + (i + 0.42) * lane, room=sheet.width - end - 10)
        if len(slabs) < len(p.slabs):
            text = t("blocks.slabs.more", n=len(p.slabs) - len(slabs))
            sheet.put(text, left, top + (len(slabs) + 0.42) * lane, "muted")
        return (Raster("slabs", values, left, right, top, top + len(slabs) * lane, _PAINTS),) if slabs else ()

    def _most_wanted(self, most: int) -> list:
        """The shown request's slab and the first others."""
        slabs = sorted(self.padded.slabs, key=lambda s: (s.seq_id != self.chosen, s.seq_id))[:most]
        return sorted(slabs, key=lambda s: s.seq_id)

    def _legend(self) -> tuple[Paint, ...]:
        t, legend = self.t, "blocks.legend."
        paints = [Paint("request-other", t(legend + "held")), Paint("waste", t(legend + "empty"), "diagonal")]
        paints += [Paint("request-other", t(legend + "shared"))] if self.num_shared and not self.dense else []
        paints.append(Paint("cached", t(legend + "cached")))
        if self.cells.count(PageState.PENDING):
            paints.append(Paint("cached", t(legend + "pending"), "dots"))
        return (*paints, Paint("free", t(legend + "free")))


def summary(trace: Trace, state: ViewState) -> str:
    step, t = trace.clamp(state.step), words(state.language, WORDS)
    pool, p = trace.pool_at(step), padded(trace, step)
    held = int(np.count_nonzero(pool.ref_counts[1:]))
    shared = int(np.count_nonzero(pool.ref_counts[1:] > 1))
    count = t("blocks.count", held=held, total=pool.num_pages, free=pool.num_free, shared=shared)
    waste = percent(p.reserved - p.stored, p.reserved)
    return t("blocks.summary", count=count, waste=t("blocks.slabs.short", stored=p.stored, reserved=p.reserved, percent=waste))


# ---- asks ----


def _whose(trace: Trace, state: ViewState) -> str:
    step = trace.clamp(state.step)
    chosen = shown_request(trace, state, step, page_cells(trace, step))
    return trace.name(chosen) if chosen is not None else "none"


def _entry_zero(trace: Trace, state: ViewState) -> str:
    step = trace.clamp(state.step)
    chosen = shown_request(trace, state, step, page_cells(trace, step))
    return str(trace.pool_at(step).tables[chosen][0]) if chosen is not None else "none"


def _free(trace: Trace, state: ViewState) -> str:
    return str(trace.pool_at(trace.clamp(state.step)).num_free)


def _shared(trace: Trace, state: ViewState) -> str:
    return str(int(np.count_nonzero(trace.pool_at(trace.clamp(state.step)).ref_counts[1:] > 1)))


def _waste(trace: Trace, state: ViewState) -> str:
    p = padded(trace, trace.clamp(state.step))
    return percent(p.reserved - p.stored, p.reserved)


WORDS = {
    "blocks.count": "{held:,} of {total:,} blocks held, {shared:,} shared; {free:,} free",
    "blocks.count.short": "{held:,} of {total:,} held, {shared:,} shared; {free:,} free",
    "blocks.count.shortest": "{held:,} of {total:,} held, {free:,} free",
    "blocks.count.cached": "{held:,} of {total:,} blocks held, {shared:,} shared; {free:,} free, {cached:,} of them cached",
    "blocks.count.pending": ", {pending:,} pending",
    "blocks.paged": "; held blocks are {percent} empty",
    "blocks.table": "{who}'s block table",
    "blocks.table.line": "{who}'s block table: {pages}",
    "blocks.table.heads": "entry → block",
    "blocks.table.none": "no block is held",
    "blocks.entry": "{index:,} → {page:,}",
    "blocks.entry.more": "⋯ {n:,} more",
    "blocks.times": "×{n:,}",
    "blocks.slabs": "Same tokens in padded slabs: {stored:,} of {reserved:,} places used, the slabs are {percent} waste",
    "blocks.slabs.short": "Padded slabs are {percent} waste ({stored:,} of {reserved:,} used)",
    "blocks.slabs.shortest": "Padded slabs are {percent} waste",
    "blocks.slab": "{who}  {stored:,} of {reserved:,}",
    "blocks.slabs.more": ("+{n:,} request", "+{n:,} requests"),
    "blocks.formula": "padded waste = 1 − stored ÷ Σ min(prompt + max_tokens, {limit:,}) = 1 − {stored:,} ÷ {reserved:,}",
    "blocks.formula.none": "padded waste = 1 − stored ÷ Σ min(prompt + max_tokens, limit); nobody holds a block now",
    "blocks.legend.held": "tokens (request's colour)",
    "blocks.legend.empty": "reserved, empty",
    "blocks.legend.shared": "×n: held by n requests",
    "blocks.legend.cached": "cached, nobody holds it",
    "blocks.legend.pending": "freed when the step settles",
    "blocks.legend.free": "free",
    "blocks.mark.held": "Block {page:,}: {used:,} of {size:,} tokens, held by {who}",
    "blocks.mark.cached": "Block {page:,}: free, its {size:,} tokens can still be found in the cache",
    "blocks.mark.pending": "Block {page:,}: given back, free once the step in flight has settled",
    "blocks.mark.free": "Block {page:,}: free",
    "blocks.detail.range": "{who}: tokens {first:,}–{last:,}",
    "blocks.detail.shared": "shared; a write would copy it first",
    "blocks.detail.published": "a later prompt can find it in the cache",
    "blocks.mark.bin": "Blocks {first:,} to {last:,}: {held:,} held, {cached:,} cached",
    "blocks.mark.run": "Blocks {first:,} to {last:,}, with {who}",
    "blocks.summary": "{count}. {waste}",
}


VIEW = View(
    name="blocks",
    title="Paged blocks",
    question="Where do the tokens of each request lie, and what would padded slabs have wasted?",
    figure=figure,
    summary=summary,
    words=WORDS,
    asks=(
        Ask("Whose block table is shown?", _whose),
        Ask("In which block do the first tokens of that request lie (its table's entry 0)?", _entry_zero),
        Ask("How many blocks are free (cached ones included)?", _free),
        Ask("How many blocks are shared by more than one request?", _shared),
        Ask("How many percent of the padded slabs are waste?", _waste),
    ),
    order=20,
)
