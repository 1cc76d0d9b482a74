"""The contract of a chapter: Chapter, Beat, Predict, TryThis. Plain data and pure functions of (Trace, step_id).

A chapter is one file of viz/chapters/ with a CHAPTER of the file's name. A beat is what a speaker shows between two
presses of a clicker: a sentence, the views, what is selected. Going to a beat may start a workload and advance the
engine (or a recording's playhead) until an event; a beat that predicts asks before the step that decides, takes
guesses as clicks on marks, and the next real record is the answer key. Nothing here knows a browser, a source or an
engine: viz/stage/tour.py plays it.

Events and answers must hold on any honest run of the workload: live on a CPU or GPU, or recorded. They read the
record; they never count on a step number or on the words that a model says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.trace import Trace
from viz.words.catalogue import Template

Event = Callable[[Trace, int], bool]
Pick = Callable[[Trace, int], str | None]
Fields = Callable[[Trace, int], Mapping[str, object]]


def at_once(trace: Trace, step: int) -> bool:
    """The event of a beat that stays where the last one was."""
    return True


def nothing(trace: Trace, step: int) -> str | None:
    return None


def no_fields(trace: Trace, step: int) -> Mapping[str, object]:
    return {}


@dataclass(frozen=True, slots=True)
class Predict:
    """A question that is asked at step s and answered by the record.

    Args:
        question: words key; says what to click.
        marks: prefixes of the Mark ids that may be guessed ("page", "seq"), as viz/select and the views name them.
        answer: (trace, s) → ids of the marks that are right, read from steps after s; empty while undecided.
        reveal: words key of the sentence that states the answer.
        fields: numbers and names of both sentences.
        until: (trace, step > s) → the answer has been recorded; by default that is the very next step.
    """

    question: str
    marks: tuple[str, ...]
    answer: Callable[[Trace, int], frozenset[str]]
    reveal: str
    fields: Fields = no_fields
    until: Event = at_once


@dataclass(frozen=True, slots=True)
class TryThis:
    """One knob that changes the picture, offered beside the beat. `text` is a words key."""

    text: str
    knob: str
    value: object


@dataclass(frozen=True, slots=True)
class Beat:
    """Args:
    text: words key of the one sentence.
    views: what is on screen; the first is the main panel.
    preset: a workload that is started (again) before this beat; None goes on with the last one.
    until: (trace, step) → this step is the moment; the first step that fits is taken. A chapter's first beat and
        one with a preset begin before the first step.
    select: which mark is selected then.
    fields: of `text`.
    compare: (knob, value, other value): rerun the last workload's requests in both modes (view "compare").
    """

    text: str
    views: tuple[str, ...]
    preset: str | None = None
    until: Event = at_once
    select: Pick = nothing
    fields: Fields = no_fields
    predict: Predict | None = None
    try_this: TryThis | None = None
    compare: tuple[str, object, object] | None = None


@dataclass(frozen=True, slots=True)
class Chapter:
    """`question` is what the chapter answers; `order` its place in the talk. `words` is its English: keys that begin
    with "chapter.<name>."; the title is "chapter.<name>.title", the question "chapter.<name>.question"."""

    name: str
    order: int
    preset: str
    beats: tuple[Beat, ...]
    words: Mapping[str, Template] = field(default_factory=dict)
