"""Step sizes: how many tokens did each of the last steps compute?

The smallest complete view, to be copied into viz/views/ under the name of its VIEW. Every test of views runs on it.
"""

from __future__ import annotations

import numpy as np

from engine.trace import Trace
from viz.layout import Sheet, message, too_small
from viz.view import Ask, Badge, Frame, Mark, Paint, Series, View, ViewState
from viz.words.catalogue import words

SHOWN = 24  # steps


def figure(trace: Trace, state: ViewState) -> Frame:
    if too_small(state):
        return message(summary(trace, state), state, Badge("state"))
    t, sheet, (steps, tokens) = words(state.language, WORDS), Sheet(state), sizes(trace, state)
    sheet.put(summary(trace, state), 12, 8 + sheet.line / 2, weight=700, room=sheet.width - 24)
    left, right, top, bottom = 12, sheet.width - 12, 16 + 2 * sheet.line, sheet.height - 12  # pixels
    most, column, marks = int(tokens.max()) + 1, (right - left) / SHOWN, []
    for i, (step, n) in enumerate(zip(steps.tolist(), tokens.tolist())):
        sheet.put(f"{n:,}", left + (i + 0.5) * column, bottom - (bottom - top) * n / most - sheet.line / 2, anchor="center")
        marks.append(Mark(f"step:{step}", step - 0.5, step + 0.5, 0, n, t("example_view.now", step=step, n=n), axes="x2y2"))
    ends = (float(steps[0]) - 0.5, float(steps[0]) + SHOWN - 0.5)
    x, y = steps.astype(np.float32), tokens.astype(np.float32)
    return Frame(
        badges=(Badge("state"),),
        axes=sheet.axes() | sheet.data_axes(2, ends, (most, 0), (left, right, top, bottom)),
        series=(Series("tokens", x, y, "bars", Paint("accent"), width=0.8, axes="x2y2"),),
        labels=tuple(sheet.labels),
        marks=tuple(marks),
        legend=(Paint("accent", t("example_view.legend")),),
    )


def sizes(trace: Trace, state: ViewState) -> tuple[np.ndarray, np.ndarray]:
    """(step ids, tokens of each) up to the shown step; a trace may hold later ones, which are not looked at."""
    last = trace.clamp(state.step)
    steps = trace.rows("steps", last - SHOWN + 1, last)["step_id"]
    works = trace.rows("works", int(steps[0]), last)
    return steps, np.bincount(works["step_id"] - steps[0], works["num_tokens"], SHOWN)[steps - steps[0]].astype(np.int64)


def summary(trace: Trace, state: ViewState) -> str:
    steps, tokens = sizes(trace, state)
    return words(state.language, WORDS)("example_view.now", step=int(steps[-1]), n=int(tokens[-1]))


WORDS = {
    "example_view.now": ("Step {step:,} computed {n:,} token", "Step {step:,} computed {n:,} tokens"),
    "example_view.legend": "tokens in the step",
}

VIEW = View(
    name="example_view",
    title="Step sizes",
    question="How many tokens did each of the last steps compute?",
    figure=figure,
    summary=summary,
    words=WORDS,
    asks=(
        Ask("How many tokens did the newest step shown compute?", lambda trace, state: str(sizes(trace, state)[1][-1])),
        Ask("How many tokens did the oldest step shown compute?", lambda trace, state: str(sizes(trace, state)[1][0])),
        Ask("How many tokens did the largest step shown compute?", lambda trace, state: str(sizes(trace, state)[1].max())),
        Ask("How many tokens did the smallest step shown compute?", lambda trace, state: str(sizes(trace, state)[1].min())),
        Ask("How many steps are shown?", lambda trace, state: str(len(sizes(trace, state)[0]))),
    ),
    order=50,
)
