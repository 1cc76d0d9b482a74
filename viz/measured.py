"""What the views of kernels share: which artifact belongs to a step, ceilings, short times, log axes, texts that fit.

A number that is not finite or not above zero was never measured: `positive` makes it 0.0, and a view then says that it
is missing. Artifacts may come from a stranger's file, so nothing here trusts them to be whole.

Rejected: the newest artifact whatever the step (scrubbing through a recording would never show the others), and the
newest one before the step (who stands paused at step 42 and profiles the next step would see nothing happen).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from engine.artifacts import Ceilings, of_kind
from engine.trace import Trace
from viz.layout import Sheet, wrap
from viz.theme import duration
from viz.view import Label

A = TypeVar("A")
GLUE = "\u00a0"  # a blank at which no line ends
_UNIT = re.compile(r"(?<=\d) (?=(?:[nµm]?s|min|%|[KMGT]?i?B|[kMGTP]?(?:FLOP|B)(?:/s|/byte)?|FLOP/byte)(?![A-Za-z]))")


def positive(value: object) -> float:
    """The number if it is finite and above zero, else 0.0."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return 0.0
    try:
        number = float(value)
    except OverflowError:
        return 0.0
    return number if math.isfinite(number) and number > 0 else 0.0


def nearest(found: Iterable[A], step: int) -> A | None:
    """The one whose step_id is nearest to a step; of several the one made last."""
    return min(reversed(tuple(found)), key=lambda a: abs(a.step_id - step), default=None)


def ceilings(trace: Trace, device: str | None = None) -> Ceilings | None:
    """The newest that has both ceilings, of this device (None: of any). A remark in brackets behind a device's name, as
    "(Triton interpreter)", is not part of it."""
    whole = (c for c in of_kind(trace, Ceilings) if positive(c.copy_gbps) and positive(c.matmul_tflops))
    return next((c for c in reversed(tuple(whole)) if device is None or device == c.device or device.startswith(f"{c.device} (")), None)


def ridge(top: Ceilings) -> float:
    """FLOP a byte from which on the matmul ceiling is the lower one."""
    return top.matmul_tflops * 1e12 / (top.copy_gbps * 1e9)


def brief(us: float) -> str:
    """theme.duration with two digits below 10 µs: "0.49 µs", "3.2 µs"; below 0.1 µs "89 ns"."""
    if not 0 < us < 9.95:
        return duration(us)
    return f"{us * 1000:.2g} ns" if us < 0.095 else f"{us:.2g} µs"


def times(ratio: float) -> str:
    """How often one number is in another: "1.03×", "1.4×", "18×", "9,600×"."""
    digits = 0 if ratio >= 9.95 else 1 if ratio >= 1.095 or ratio < 0.995 else 2
    return f"{float(f'{ratio:.2g}') if ratio >= 1000 else ratio:,.{digits}f}×"


# ---- texts ----


def first_fit(sheet: Sheet, room: float, *forms: str) -> str:
    """The first form that fits the room in pixels; else the last, cut."""
    return next((form for form in forms if sheet.span(form) <= room), sheet.fit(forms[-1], room))


def fit_lines(sheet: Sheet, room: float, most: int, *forms: str) -> list[str]:
    """The first form that needs at most `most` lines; else the beginning of the last one. A number stays with its unit."""
    columns = max(int(room / sheet.advance), 4)
    wrapped = [[line.replace(GLUE, " ") for line in wrap(_UNIT.sub(GLUE, form), columns)] for form in forms]
    lines = next((lines for lines in wrapped if len(lines) <= most), wrapped[-1])
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], sheet.fit(lines[most - 1] + " …", room)] if most > 0 else []


def put_lines(sheet: Sheet, lines: Sequence[str], x: float, top: float, color: str = "ink", weight: int = 400) -> float:
    """Lines below each other from `top` on; where the next would begin."""
    for i, line in enumerate(lines):
        sheet.put(line, x, top + (i + 0.5) * sheet.line, color, weight=weight)
    return top + len(lines) * sheet.line


def put_cells(
    sheet: Sheet, cells: Sequence[str], widths: Sequence[int], right: float, y: float, color: str = "ink", weight: int = 400
) -> Label | None:
    """Cells of a table row in one text of a monospaced font, each right-aligned in its width in characters."""
    row = "".join(cell.rjust(width) for cell, width in zip(cells, widths)).lstrip()
    return sheet.put(row, right, y, color, anchor="right", weight=weight, mono=True)


def window(count: int, chosen: int, most: int) -> range:
    """At most `most` of `count` places, with the chosen one among them, as far in the middle as the ends allow."""
    first = min(max(chosen - most // 2, 0), max(count - most, 0))
    return range(first, min(first + max(most, 0), count))


# ---- axes of powers of ten ----


@dataclass(frozen=True, slots=True)
class LogScale:
    """Values from 10**low to 10**high over the pixels start … stop. Invariant: low < high."""

    low: float
    high: float
    start: float
    stop: float

    @staticmethod
    def over(values: Iterable[float], start: float, stop: float, least: float = 1.0, pad: float = 0.15) -> LogScale:
        """Room for all positive values, at least `least` decades, and a little on both sides."""
        logs = [math.log10(v) for v in values if positive(v)] or [0.0]
        low, high = min(logs), max(logs)
        more = max(least - (high - low), 0.0) / 2
        low, high = low - more, high + more
        return LogScale(low - pad * (high - low), high + pad * (high - low), start, stop)

    def __call__(self, value: float) -> float:
        """The pixel of a positive value, clipped to the axis."""
        share = (math.log10(max(value, 1e-300)) - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.stop - self.start)

    def decades(self, most: int) -> list[float]:
        """Powers of ten on the axis, at most `most`, equally far apart."""
        first, last = math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9)
        apart = max(-(-(last - first + 1) // max(most, 1)), 1)
        return [10.0**n for n in range(first, last + 1, apart)]
