"""Colours, request identity, colour maps and units: the one table that Python, CSS and the canvas share.

A view names colours ("request-2", "free", "ink"); this file says what they are in each theme. `css_variables`
exports the same table to the browser, `lut` the colour maps. Every colour X that fills an area has an
"X-line" (an outline with at least 3:1 against the paper) and an "on-X" (text with at least 4.5:1 on it).

Does not know what a view draws. Rejected: a rainbow map (order is lost, and a colour-blind reader sees bands),
per-request generated hues (beyond six nobody tells them apart from the last row).
"""

from __future__ import annotations

from functools import cache

import numpy as np

REQUEST_HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
NUM_REQUEST_COLORS = len(REQUEST_HUES)

_BASE: dict[str, dict[str, str]] = {
    "light": {
        "paper": "#FFFFFF",
        "stage": "#F3F4F7",
        "raised": "#FFFFFF",
        "ink": "#14171F",
        "muted": "#565E6C",
        "grid": "#E2E5EB",
        "border": "#D5D9E1",
        "control": "#7A8393",
        "accent": "#6236C9",
        "error": "#B3261E",
        "good": "#1B7340",
        "free": "#E3E6EC",
        "cached": "#C6D0E2",
        "waste": "#F3E3E0",
        "request-other": "#A3ABB8",
    },
    "dark": {
        "paper": "#161A21",
        "stage": "#0D1015",
        "raised": "#1E232C",
        "ink": "#F1F3F7",
        "muted": "#A7B0BF",
        "grid": "#2B313C",
        "border": "#323945",
        "control": "#7F899A",
        "accent": "#B9A2FF",
        "error": "#FF9B8F",
        "good": "#6FD49A",
        "free": "#2A303A",
        "cached": "#3B4860",
        "waste": "#40302E",
        "request-other": "#78828F",
    },
    "projector": {
        "paper": "#FFFFFF",
        "stage": "#FFFFFF",
        "raised": "#FFFFFF",
        "ink": "#000000",
        "muted": "#3B414C",
        "grid": "#D3D7DE",
        "border": "#A9B0BC",
        "control": "#5A6270",
        "accent": "#4B1FB8",
        "error": "#9A1710",
        "good": "#0E5C30",
        "free": "#DFE3EA",
        "cached": "#B9C6DD",
        "waste": "#F0D9D5",
        "request-other": "#8E97A5",
    },
}
_MAPS = {  # anchors from low to high, equally spaced; lightness falls (light) or rises (dark) steadily
    "light": {
        "sequential": ("#F1F4FA", "#C9D8EC", "#94B5DB", "#5A8AC3", "#2F5FA3", "#123A78", "#061C45"),
        "diverging": ("#7A2E0B", "#C06A2B", "#E9B583", "#F5F3F0", "#9CBEDD", "#4381B8", "#0E4477"),
    },
    "dark": {
        "sequential": ("#1B2230", "#22406B", "#2F66A5", "#5590CB", "#8DB9E4", "#C4DDF4", "#F4F9FF"),
        "diverging": ("#FFB27A", "#CF7A3C", "#7F4A26", "#262A31", "#2C567E", "#4F90C8", "#A6D4FF"),
    },
}
_MAPS["projector"] = _MAPS["light"]
THEME_NAMES = tuple(_BASE)
MIN_FONT = {"light": 16, "dark": 16, "projector": 22}
_FILLS = ("free", "cached", "waste", "request-other", "accent", "error", "good", *(f"request-{i}" for i in range(NUM_REQUEST_COLORS)))


def request_color(slot: int | None) -> str:
    """The theme name of the `slot`-th live request's hue; None (not among the coloured ones) is "request-other"."""
    return "request-other" if slot is None else f"request-{slot % NUM_REQUEST_COLORS}"


HUES = tuple(map(request_color, (*range(NUM_REQUEST_COLORS), None)))  # by Identity.code (viz/select.py)


# ---- contrast ----


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def _hex(rgb: tuple[float, ...]) -> str:
    return "#" + "".join(f"{round(min(max(c, 0), 255)):02X}" for c in rgb)


def mix(a: str, b: str, t: float) -> str:
    """`a` at t = 0, `b` at t = 1, linear in sRGB."""
    return _hex(tuple(x + (y - x) * t for x, y in zip(_rgb(a), _rgb(b), strict=True)))


def luminance(color: str) -> float:
    """WCAG relative luminance."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in _rgb(color))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """WCAG contrast ratio, 1 to 21."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def _reach(color: str, against: str, toward: str, ratio: float) -> str:
    """`color`, moved toward `toward` only as far as the ratio needs."""
    for step in range(21):
        moved = mix(color, toward, step / 20)
        if contrast(moved, against) >= ratio:
            return moved
    return toward


# ---- tables ----


@cache
def table(theme: str = "light") -> dict[str, str]:
    """Every theme name and its colour, "#RRGGBB". An unknown theme is "light"."""
    base = _BASE.get(theme, _BASE["light"])
    colors = dict(base)
    colors |= {f"request-{i}": hue for i, hue in enumerate(REQUEST_HUES)}
    for name in _FILLS:
        colors[f"{name}-line"] = _reach(colors[name], base["paper"], base["ink"], 3.0)
        dark, light = "#0B0D12", "#FFFFFF"
        colors[f"on-{name}"] = max((dark, light), key=lambda c, fill=colors[name]: contrast(c, fill))
    colors |= {"on-paper": base["ink"], "paper-line": base["control"], "ink-line": base["ink"], "on-ink": base["paper"]}
    colors |= {"muted-line": base["muted"], "on-muted": base["paper"]}
    return colors


def color(name: str, theme: str = "light") -> str:
    """The colour of a theme name; an unknown name is drawn in ink, so that it is seen and not lost."""
    colors = table(theme)
    return colors.get(name, colors["ink"])


@cache
def lut(colormap: str = "sequential", theme: str = "light") -> np.ndarray:
    """uint8 [256, 3]: the colours of 0…255 on "sequential" or "diverging". Read-only."""
    maps = _MAPS.get(theme, _MAPS["light"])
    anchors = np.array([_rgb(c) for c in maps.get(colormap, maps["sequential"])], np.float64)
    at = np.linspace(0, len(anchors) - 1, 256)
    found = np.stack([np.interp(at, np.arange(len(anchors)), anchors[:, c]) for c in range(3)], 1)
    found = np.rint(found).astype(np.uint8)
    found.flags.writeable = False
    return found


def css_variables() -> str:
    """The tables as CSS custom properties: `.glass-root[data-theme="dark"] { --g-ink: …; }`."""
    blocks = []
    for theme in THEME_NAMES:
        lines = "".join(f"  --g-{name}: {value};\n" for name, value in table(theme).items())
        size = MIN_FONT[theme]
        blocks.append(f'.glass-root[data-theme="{theme}"] {{\n{lines}  --g-font: {size}px;\n}}\n')
    return "".join(blocks)


def client_theme() -> dict[str, object]:
    """What the canvas needs and CSS cannot carry: the colour maps as one hex string each."""
    maps = {theme: {name: lut(name, theme).tobytes().hex() for name in ("sequential", "diverging")} for theme in THEME_NAMES}
    return {"themes": list(THEME_NAMES), "maps": maps, "min_font": dict(MIN_FONT)}


# ---- units ----


def count(value: float) -> str:
    """1234567 → "1,234,567"."""
    return f"{value:,.0f}"


def duration(us: float) -> str:
    """Microseconds for a person: "640 µs", "3.2 ms", "1.25 s", "2 min 5 s"."""
    if us < 0:
        return "-" + duration(-us)
    if us < 1_000:
        return f"{us:.0f} µs"
    if us < 1_000_000:
        return f"{_three(us / 1_000)} ms"
    if us < 120_000_000:
        return f"{_three(us / 1_000_000)} s"
    minutes, seconds = divmod(round(us / 1_000_000), 60)
    return f"{minutes:,} min {seconds} s"


def data_size(num_bytes: float) -> str:
    """Bytes in powers of 1,024, three digits: "96 B", "1.5 KiB", "192 GiB"."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:,.0f} B" if unit == "B" else f"{_three(value)} {unit}"


def rate(per_second: float, unit: str) -> str:
    """Decimal prefixes, three digits: 4.25 TB/s."""
    value, prefix = float(per_second), ""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{_three(value)} {prefix}{unit}"


def round_up(value: float) -> float:
    """A round number not below the value: the end of an axis that rarely changes."""
    power = 10.0 ** np.floor(np.log10(max(value, 1.0)))
    return float(next(power * k for k in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if power * k >= value))


def percent(part: float, whole: float) -> str:
    return "0 %" if not whole else f"{100 * part / whole:.0f} %"


def _three(value: float) -> str:
    """Three significant digits, without trailing zeros after a point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".")
