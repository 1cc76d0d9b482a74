"""Where texts go: an estimate of a text's width, a sheet that refuses intersecting texts, axes in pixels.

Every view draws its texts on the axes "xy", which count the panel's CSS pixels from the top left (Sheet.put); data
axes lie over them by their domains (Sheet.data_axes). So a test can check that no two texts meet and none leaves
the panel. Fonts differ, hence the estimate is generous: 0.6 em a character, 1 em for wide ones.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

from engine.trace import Trace
from viz.theme import MIN_FONT
from viz.view import Badge, Frame, Label, Paint, ViewState
from viz.words.catalogue import Words, words

MAX_LABELS = 40
ADVANCE = 0.6
LINE = 1.25  # height of a text box in em
NOT_FIRST = frozenset("、。，．：；？！）」』】〜ー…・っゃゅょッャュョァィゥェォ")
TOUCH = 0.25  # px that boxes may share: neighbours on a line touch


@lru_cache(maxsize=4096)
def text_em(text: str) -> float:
    """Estimated width in em."""
    if text.isascii():
        return ADVANCE * len(text)
    return sum(0.0 if unicodedata.combining(c) else 1.0 if unicodedata.east_asian_width(c) in "WF" else ADVANCE for c in text)


@lru_cache(maxsize=8192)
def visible(text: str) -> str:
    """One line for a person: line ends and tabs get a sign, characters that steer the text a dot."""
    if text.isascii() and text.isprintable():
        return text
    signs = {"\n": "⏎", "\t": "⇥", "\r": ""}
    return "".join(signs.get(c, c if c == "\u200d" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else "·") for c in text)


class Sheet:
    """The texts of one frame while it is laid out, on pixel axes.

    Invariant: no two boxes intersect, each lies inside the panel, there are at most MAX_LABELS.
    """

    def __init__(self, state: ViewState) -> None:
        self.width, self.height = max(state.size[0], 120), max(state.size[1], 80)
        self.font = MIN_FONT.get(state.theme, MIN_FONT["light"])
        self.line = round(self.font * 1.45)
        self.advance = self.font * ADVANCE
        self.labels: list[Label] = []
        self._boxes: list[tuple[float, float, float, float]] = []

    def span(self, text: str) -> float:
        return text_em(text) * self.font

    def fit(self, text: str, room: float) -> str:
        """The text, shortened with an ellipsis to a width in pixels; "" if nothing fits."""
        text = visible(text)
        if self.span(text) <= room:
            return text
        most = int(room / self.advance) + 1
        for size in range(min(most, len(text)) - 1, 0, -1):
            cut = text[:size].rstrip() + "…"
            if self.span(cut) <= room:
                return cut
        return ""

    def free(self, x0: float, x1: float, y: float, size: int | None = None) -> bool:
        half = (size or self.font) * LINE / 2
        if x0 < -0.01 or x1 > self.width + 0.01 or y - half < -0.01 or y + half > self.height + 0.01:
            return False
        x0, x1, y0, y1 = x0 + TOUCH, x1 - TOUCH, y - half + TOUCH, y + half - TOUCH
        return not any(x0 < b[1] and b[0] < x1 and y0 < b[3] and b[2] < y1 for b in self._boxes)

    def put(
        self, text: str, x: float, y: float, color: str = "ink", *, anchor: str = "left", room: float | None = None,
        weight: int = 400, mono: bool = False, size: int | None = None,
    ) -> Label | None:  # fmt: skip
        """Place a text (cut to `room` pixels) if its box is free; None if it is not, or the sheet is full. `size`: its font's in
        pixels, where it is larger than the panel's."""
        size = max(size or 0, self.font)
        text = self.fit(text, (self.width if room is None else room) * self.font / size)
        if not text or len(self.labels) >= MAX_LABELS:
            return None
        span = text_em(text) * size
        x0 = x - {"left": 0.0, "center": 0.5, "right": 1.0}[anchor] * span
        if not self.free(x0, x0 + span, y, size):
            return None
        half = size * LINE / 2
        self._boxes.append((x0, x0 + span, y - half, y + half))
        self.labels.append(Label(text, float(x), float(y), color, anchor, size, weight, mono=mono))
        return self.labels[-1]

    def axes(self) -> dict[str, dict[str, object]]:
        """The pixel axes."""
        return {"xaxis": _axis((0, self.width), (0, 1), "y"), "yaxis": _axis((self.height, 0), (0, 1), "x")}

    def data_axes(
        self, number: int, x: tuple[float, float], y: tuple[float, float], box: tuple[float, float, float, float]
    ) -> dict[str, dict[str, object]]:
        """Axes "x{number}y{number}" with the given ranges over the pixel box (x0, x1, y0, y1); y[0] is at y0."""
        x0, y0 = min(max(box[0], 0), self.width - 2), min(max(box[2], 0), self.height - 2)
        x1, y1 = min(max(box[1], x0 + 1), self.width), min(max(box[3], y0 + 1), self.height)
        wide = (x0 / self.width, x1 / self.width)
        high = (1 - y1 / self.height, 1 - y0 / self.height)
        return {
            f"xaxis{number}": _axis(x, wide, f"y{number}"),
            f"yaxis{number}": _axis((y[1], y[0]), high, f"x{number}"),
        }


def label_box(label: Label) -> tuple[float, float, float, float]:
    """(x0, x1, y0, y1) of a Label on pixel axes, as the sheet and the tests count it."""
    span = text_em(label.text) * label.size
    x0 = label.x - {"left": 0.0, "center": 0.5, "right": 1.0}[label.anchor] * span
    half = label.size * LINE / 2
    return x0, x0 + span, label.y - half, label.y + half


def _axis(ends: tuple[float, float], domain: tuple[float, float], anchor: str) -> dict[str, object]:
    return {
        "range": [float(ends[0]), float(ends[1])],
        "domain": [round(min(max(d, 0.0), 1.0), 6) for d in domain],
        "anchor": anchor,
        "visible": False,
        "fixedrange": True,
    }


def wrap(text: str, columns: int) -> list[str]:
    """Lines of at most `columns` characters of ordinary width, broken at blanks where possible. Wide characters (kana,
    kanji) count for what they are; between them a line may break anywhere, but none begins with one of NOT_FIRST."""
    lines, line = [], ""
    for word in text.split(" "):
        while _columns(word) > columns:
            head = _head(word, columns - _columns(line) - bool(line))
            lines.append(f"{line} {head}".strip() if head else line)
            if not head and not line:  # not even one character has room
                head, lines[-1] = word[0], word[0]
            word, line = word[len(head) :], ""
        if _columns(line) + bool(line) + _columns(word) > columns:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line] if line or not lines else lines


def _columns(text: str) -> float:
    return len(text) if text.isascii() else round(text_em(text) / ADVANCE, 6)


def _head(word: str, columns: float) -> str:
    """As much of a word that is too long as has room; the rest begins with a character that may begin a line."""
    size = most = next((n for n in range(len(word), 0, -1) if _columns(word[:n]) <= columns), 0)
    while size and word[size] in NOT_FIRST:
        size -= 1
    return word[: size or most]


def recorded(trace: Trace, state: ViewState) -> tuple[Badge, ...]:
    """The badge "recorded" with device and date if the trace comes from a file; render() adds it to every frame."""
    if trace.meta.get("source") != "recording":
        return ()
    t = words(state.language)
    device, date = device_name(trace, t), trace.meta.get("date")
    return (Badge("recorded", t("badge.recorded", device=device, date=visible(str(date))[:10]) if date else device),)


def device_name(trace: Trace, t: Words) -> str:
    """Where the run was, for a badge."""
    return visible(str(trace.meta.get("device") or t("badge.recorded.nowhere")))[:80]


def framed(color: str, label: str) -> Paint:
    """A legend entry for what is outlined in the picture: its swatch is a frame."""
    return Paint(color, label, alpha=0.01)


def too_small(state: ViewState) -> bool:
    """A panel in which only a sentence fits: then a view draws message(summary(trace, state), state, …)."""
    font = MIN_FONT.get(state.theme, MIN_FONT["light"])
    return state.size[0] < 19 * font or state.size[1] < 13 * font


def message(text: str, state: ViewState, *badges: Badge) -> Frame:
    """A calm frame with one sentence in the middle."""
    sheet = Sheet(state)
    lines = wrap(text, max(int(sheet.width * 0.9 / sheet.advance), 4))[: max(int(sheet.height / sheet.line), 1)]
    top = sheet.height / 2 - (len(lines) - 1) * sheet.line / 2
    for i, line in enumerate(lines):
        sheet.put(line, sheet.width / 2, top + i * sheet.line, "muted", anchor="center")
    return Frame(badges=badges, axes=sheet.axes(), labels=tuple(sheet.labels), summary=text)
