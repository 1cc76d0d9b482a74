"""The contract of a view: View, ViewState, Frame and its parts, and render().

A view is a pure function (Trace, ViewState) -> Frame; the same input gives the same bytes. A Frame says what
to draw in data coordinates and theme names, never in pixels of a colour: `axes` is a Plotly layout fragment
that changes rarely, everything that changes every step is an array. The browser (viz/stage) draws rasters on
a canvas under transparent Plotly axes; `Frame.to_figure()` (viz/figure.py) gives an ordinary go.Figure.

render() is the only caller of a view. It draws the empty trace itself, fills in what every frame has in common
and never raises: a view that fails draws its own error.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from urllib.parse import parse_qsl, urlencode

import numpy as np

from engine.trace import Trace
from viz.words.catalogue import Template, words

BADGES = ("measured", "state", "computed", "recomputed", "recorded")
THEMES = ("light", "dark", "projector")
AXES = ("step", "time")
OFFERED_JOBS = ("tiles", "kernel", "ceilings", "profile", "timeline", "ladder")  # what a view may offer: do_<job>(room, args)
DOCUMENT_KINDS = ("prose", "code", "formula")


@dataclass(frozen=True, slots=True)
class Paint:
    """How one class of cells or marks looks. `color` is a theme name ("request-0" … "request-5",
    "request-other", "free", "cached", "waste", "ink", "muted", "accent", "paper"); `hatch` one of None,
    "diagonal", "cross", "dots"; `label` its legend text."""

    color: str
    label: str = ""
    hatch: str | None = None
    alpha: float = 1.0


@dataclass(frozen=True)
class Raster:
    """A grid of cells. `values` uint8 [rows, cols], row 0 at the top (y0), drawn without smoothing.

    Categorical: `paints[value]`, 255 is transparent. Continuous: `range` is what 0…255 stand for, on the
    "sequential" or "diverging" map.
    """

    name: str
    values: np.ndarray
    x0: float
    x1: float
    y0: float
    y1: float
    paints: tuple[Paint, ...] | None = None
    range: tuple[float, float] | None = None
    colormap: str = "sequential"
    unit: str = ""
    axes: str = "xy"


@dataclass(frozen=True)
class Series:
    """A line, markers or bars. x and y float32 of equal length; NaN breaks a line. For bars, `y` is where each ends
    (its top, not its length: a stacked bar has y = base + length), `base` (float32; None: 0) where it begins and
    `width` how wide it is, in data units. `symbol` is a Plotly marker symbol: "circle"
    (a finish), "x" (a preemption), "triangle-right" (a join); `width` is then the marker's size in pixels."""

    name: str
    x: np.ndarray
    y: np.ndarray
    kind: str = "line"  # "line", "markers", "steps", "bars"
    paint: Paint = Paint("ink")
    width: float = 2.0
    base: np.ndarray | None = None
    axes: str = "xy"
    symbol: str = "circle"


@dataclass(frozen=True, slots=True)
class Label:
    """Text at a data point. `anchor` is which part of the text sits on the point ("left", "center",
    "right"; vertically always its middle); `size` in CSS pixels, at least theme.MIN_FONT of the state's theme: 16,
    on the projector 22 (layout.Sheet takes care of it). `mono` asks for a monospaced
    font of 0.6 em a character, where a view places things under single characters. Every text of a view is a
    Label: axes are drawn without ticks and titles, so that no text meets Plotly's parser."""

    text: str
    x: float
    y: float
    color: str = "ink"
    anchor: str = "center"
    size: int = 16
    weight: int = 400
    axes: str = "xy"
    mono: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that can be chosen by click or by arrows + Enter. `id` is the selection ("seq:3", "page:17",
    "token:3:12"); `text` is its accessible name and what the inspector shows first. `outline` names a theme
    colour to draw a border with (None: only when focused or selected)."""

    id: str
    x0: float
    x1: float
    y0: float
    y1: float
    text: str
    outline: str | None = None
    detail: str = ""
    axes: str = "xy"


@dataclass(frozen=True, slots=True)
class Badge:
    """What kind of truth the picture holds. `text` adds the formula, device, difference or date."""

    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """Something that the live engine can be asked to do for this picture: a button, with several choices a menu.

    Invariant: `job` is one of OFFERED_JOBS, and there is at least one choice: (label, arguments). A click names view,
    `id` and choice; the server renders the view again, finds the offer there and takes the arguments from it
    (viz/stage/offers.py), so a browser never sends arguments of its own. A `why` greys it: what it lacks, in a sentence.
    """

    id: str
    label: str
    job: str
    choices: tuple[tuple[str, Mapping[str, object]], ...]
    why: str = ""

    def __post_init__(self) -> None:
        if self.job not in OFFERED_JOBS:
            raise ValueError(f"{self.job!r} is none of the jobs that a view may offer: {OFFERED_JOBS}")
        if not self.choices:
            raise ValueError(f"the offer {self.id!r} has no choice")


@dataclass(frozen=True, slots=True)
class Document:
    """A text beside the picture: `title` is its tab's, `kind` one of DOCUMENT_KINDS ("code" and "formula" keep their line
    ends and stand in a monospaced font). Shown as text, never as markup. Whether a frame has documents must not depend
    on the panel's size: they take room from the picture, so it would change its mind for ever."""

    title: str
    text: str
    kind: str = "prose"


@dataclass(frozen=True, slots=True)
class ViewState:
    """Where a person is looking. Immutable; round-trips through a URL query.

    `source` is "live", or what a link calls a recording: a pinned moment or a preset's name. `ranges` is the zoom, four
    numbers a panel: the part of the picture that is seen as shares of it (x0, x1, y0, y1), or the ranges of its first
    axes where those can be seen; four zeros: not zoomed. `step` None is the live edge. `selection` is a Mark id. `axis`
    is what runs along x where a view offers both: the step, or "time", the engine's own (a mark "axis:time" chooses it).
    `size` is the panel's drawing area (width, height) in CSS pixels: without title, badges, legend, offers and documents.
    Plot margins are 0: an axis with the range [0, width] and the domain [0, 1] counts pixels, and views lay out their texts on such axes.
    """

    source: str = "live"
    chapter: str = ""
    beat: int = 0
    views: tuple[str, ...] = ()
    step: int | None = None
    selection: str | None = None
    layer: int = 0
    head: int = 0
    ranges: tuple[float, ...] = ()
    theme: str = "light"
    language: str = "en"
    size: tuple[int, int] = (960, 540)
    axis: str = "step"

    def with_(self, **changes: object) -> ViewState:
        return replace(self, **changes)

    def to_query(self) -> str:
        default, pairs = ViewState(), []
        for key in QUERY_KEYS:
            value = getattr(self, key.field)
            if value != getattr(default, key.field):
                pairs.append((key.key, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)))
        return urlencode(pairs)

    @staticmethod
    def from_query(query: str) -> ViewState:
        """Unknown keys and unreadable values are ignored: a link from a stranger never breaks the page."""
        keys = {key.key: key for key in QUERY_KEYS}
        read = ((keys[k].field, keys[k].read(value)) for k, value in parse_qsl(query, errors="replace") if k in keys)
        return ViewState(**{name: value for name, value in read if value is not None})


@dataclass(frozen=True, slots=True)
class QueryKey:
    """How a field of ViewState is called and written in an address. The browser reads the same list (viz/stage/page.py)."""

    field: str
    key: str
    kind: str  # "text", "whole", "names" or "numbers"
    choices: tuple[str, ...] = ()

    def read(self, text: str) -> object:
        """The value, None for what cannot be read."""
        if self.kind == "whole":
            return int(text) if re.fullmatch("[0-9]{1,9}", text) else None
        if self.kind == "names":
            return tuple(v for v in text.split(",")[:3] if v) or None
        if self.kind == "numbers":
            parts = text.split(",")[:8]
            return tuple(map(float, parts)) if all(re.fullmatch(_NUMBER, part) for part in parts) else None
        return text[:200] if text and (not self.choices or text in self.choices) else None


_NUMBER = r"-?[0-9]{1,16}(\.[0-9]{1,20})?(e[+-]?[0-9]{1,2})?"
_KINDS = {"str": "text", "str | None": "text", "int": "whole", "int | None": "whole", "tuple[str, ...]": "names", "tuple[float, ...]": "numbers"}
_CHOICES = {"theme": THEMES, "axis": AXES}
_CALLED = {"source": "rec"}
QUERY_KEYS = tuple(
    QueryKey(f.name, _CALLED.get(f.name, f.name), _KINDS[str(f.type)], _CHOICES.get(f.name, ())) for f in fields(ViewState) if f.name != "size"
)


@dataclass(frozen=True)
class Frame:
    """What one panel shows. `axes` maps Plotly layout names ("xaxis", "yaxis2", …) to plain dicts with fixed
    ranges (fixed ranges halve a react). `summary` is the canvas's label, the alt text and the phone's text.

    render() fills in `view`, `title`, `summary` and the badge "recorded"; a view gives at least one badge of its own.
    """

    view: str = ""
    title: str = ""
    badges: tuple[Badge, ...] = ()
    axes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    rasters: tuple[Raster, ...] = ()
    series: tuple[Series, ...] = ()
    labels: tuple[Label, ...] = ()
    marks: tuple[Mark, ...] = ()
    legend: tuple[Paint, ...] = ()
    summary: str = ""
    error: str = ""
    offers: tuple[Offer, ...] = ()
    documents: tuple[Document, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """A question that a stranger must be able to answer from the picture, and its true answer from the record.

    Only tests read asks (the page never shows them). An answer has 1 to 20 characters, or none where the question has
    no single answer: readers are not shown such a moment. A test checks that each question has at least two different
    answers over its moments: else the picture is not needed for it.
    """

    question: str
    answer: Callable[[Trace, ViewState], str]


@dataclass(frozen=True, slots=True)
class View:
    """One view, declared as VIEW in a file of viz/views/ that has the view's name. Copy tests/viz/example_view.py:
    it is the shortest, and complete. viz/views/mask.py is the shortest that ships.

    `question` is what the view answers. `figure` draws it, `summary` says it in a sentence or two, at most 2,000
    characters. Neither is ever called on a trace without steps, so `trace.clamp(state.step)` is a step. `words` is the
    view's English: keys that begin with "<name>.", read by `words(state.language, WORDS)` (viz/words/catalogue.py);
    `title` and `question` are English too, a translation has them under "<name>.title" and "<name>.question". Five
    `asks`. Menus list views by `order`, then by name.

    What a figure needs is in viz/layout.py: `Sheet` places texts on pixel axes, so that none meets another or leaves
    the panel (`put`, `axes`), and lays data axes over a box of pixels (`data_axes`); `too_small` says that a panel has
    room for a sentence only, `message` draws one. viz/select.py has the arrays that several views share, the hue of a
    request among them; viz/theme.py the colours and units. Every frame is checked by tests/viz/valid.py.
    """

    name: str
    title: str
    question: str
    figure: Callable[[Trace, ViewState], Frame]
    summary: Callable[[Trace, ViewState], str]
    asks: tuple[Ask, ...] = ()
    order: int = 100
    words: Mapping[str, Template] = field(default_factory=dict)


def render(view: View, trace: Trace, state: ViewState) -> Frame:
    """The view's frame with its name, title, summary and the badge "recorded" where it applies. A trace without
    steps gets a sentence that says what to do. Never raises: a failure becomes a frame that says so."""
    from viz.layout import message, recorded  # layout is made of the types above

    try:
        t = words(state.language)
        frame = view.figure(trace, state) if len(trace) else message(t("empty"), state, Badge("state"))
        return replace(
            frame,
            view=view.name,
            title=frame.title or (t(f"{view.name}.title") if t.has(f"{view.name}.title") else view.title),
            badges=(*frame.badges, *recorded(trace, state)),
            summary=frame.summary or view.summary(trace, state),
        )
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        sentence = f"This view could not be drawn: {type(error).__name__}: {error} ({where.name}, line {where.lineno})."
        return Frame(view.name, view.title, (), summary=sentence, error=sentence)
