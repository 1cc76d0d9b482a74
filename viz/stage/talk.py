"""Where one room is in the talk: its chapter and beat, the places that it has reached, and what a browser is told.

A Place is a beat whose moment was found; it keeps all that the beat says there, so showing it again reads no record.
Knows no hub and takes no step (viz/stage/tour.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.trace import Trace
from viz.chapter import Beat, Chapter, Predict, TryThis, say
from viz.stage.walk import Walk
from viz.words.catalogue import words


@dataclass
class Place:
    """A beat where its moment was found. `step` is that moment (or the run's last step: `missed`), `decided` the step
    that answered its question."""

    run: str
    recorded: bool
    step: int
    missed: bool = False
    views: tuple[str, ...] = ()
    select: str | None = None
    fields: Mapping[str, object] = field(default_factory=dict)
    asked: Mapping[str, object] = field(default_factory=dict)
    decided: int | None = None
    found: Mapping[str, object] = field(default_factory=dict)
    right: frozenset[str] = frozenset()
    unanswered: bool = False  # the run ended before the answer came
    note: str = ""  # words key of something that must be said beside it
    guesses: dict[str, str] = field(default_factory=dict)  # person → mark; the latest counts

    @property
    def end(self) -> int:
        """Where the next beat is looked for."""
        return self.step if self.decided is None else self.decided

    def read(self, trace: Trace, beat: Beat) -> None:
        """What the beat says about this step."""
        self.fields, self.select = dict(beat.fields(trace, self.step)), beat.select(trace, self.step)
        if beat.predict is not None:
            self.asked = dict(beat.predict.fields(trace, self.step))

    def answer(self, trace: Trace, predict: Predict, decided: int) -> None:
        self.right, self.found = predict.answer(trace, self.step, decided), dict(predict.found(trace, self.step, decided))
        if predict.select is not None:
            self.select = predict.select(trace, self.step, decided)
        self.decided = decided


@dataclass
class Talk:
    """Where a room is. `phase`: "going", "asked", "revealed", "here"."""

    room: str
    chapter: Chapter
    recorded: bool
    beat: int = 0
    phase: str = "going"
    places: dict[tuple[str, int], Place] = field(default_factory=dict)
    serial: int = 0  # counts what the browsers are told to show
    views: tuple[str, ...] = ()
    step: int | None = None
    select: str | None = None
    linked: bool = False
    replaced: bool = False  # the run that the places were found in has ended for another one (viz/chapter.py TryThis)
    task: asyncio.Task | None = None
    walk: Walk | None = None

    @property
    def now(self) -> Beat:
        return self.chapter.beats[self.beat]

    @property
    def place(self) -> Place | None:
        return self.places.get((self.chapter.name, self.beat))

    @property
    def begins_a_run(self) -> bool:
        return self.beat == 0 or self.now.preset is not None

    @property
    def offer(self) -> TryThis | None:
        """What may be tried here and now: only an engine can."""
        fits = self.place is not None and not self.place.missed and not self.recorded and self.phase in ("here", "revealed")
        return self.now.try_this if fits else None

    def forget_run(self) -> None:
        """This beat's run must be run again: its places are no longer on the way."""
        first = max((i for i in range(self.beat + 1) if self.chapter.beats[i].preset), default=0)
        for beat in range(first, len(self.chapter.beats)):
            self.places.pop((self.chapter.name, beat), None)

    def show(self, step: int | None, views: tuple[str, ...], select: str | None) -> None:
        self.serial += 1
        self.step, self.views, self.select = step, views, select

    def stop(self) -> None:
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        self.task = self.walk = None


# ---- what a browser is told ----


def contents(chapters: Iterable[Chapter], language: str) -> list[dict[str, object]] | None:
    """The menu of chapters."""
    found = []
    for chapter in chapters:
        t, own = words(language, chapter.words), f"chapter.{chapter.name}."
        found.append({"name": chapter.name, "title": t(f"{own}title"), "question": t(f"{own}question"), "beats": len(chapter.beats)})
    return found or None


def tell(talk: Talk, person: str, language: str) -> dict[str, object]:
    """Where the room is, in words. `go` is what to look at, once for each `serial`; `at` the step that `sentence` is
    about."""
    own, place = f"chapter.{talk.chapter.name}.", talk.place
    t = words(language, talk.chapter.words)
    told = {
        "chapter": talk.chapter.name, "title": t(f"{own}title"), "question": t(f"{own}question"),
        "beat": talk.beat, "beats": len(talk.chapter.beats), "phase": talk.phase, "recorded": talk.recorded,
        "at": None if place is None else place.step,
        "go": {"serial": talk.serial, "step": talk.step, "views": list(talk.views), "select": talk.select},
    }  # fmt: skip
    if place is None or (talk.phase == "going" and place.decided is None and not place.missed):
        return told
    told["note"] = t(place.note) if place.note else ""
    if not place.missed:
        told["sentence"] = say(talk.chapter, talk.now.text, place.fields, language)
    if talk.phase in ("asked", "revealed"):
        told["predict"] = _asked(talk, place, person, language)
    if talk.offer is not None:
        told["try"] = {"text": t(talk.offer.text), "knob": talk.offer.knob, "value": talk.offer.value}
    return told


def _asked(talk: Talk, place: Place, person: str, language: str) -> dict[str, object]:
    """The tally and the right marks leave the server only once the record has decided."""
    predict, mine = talk.now.predict, place.guesses.get(person)
    question = say(talk.chapter, predict.question, {**place.fields, **place.asked}, language)
    told = {"question": question, "marks": list(predict.marks), "guess": mine, "votes": len(place.guesses)}
    if place.decided is not None:
        tally = Counter(place.guesses.values()).most_common(5)
        told |= {
            "right": sorted(place.right),
            "verdict": "none" if mine is None else "right" if mine in place.right else "wrong",
            "reveal": say(talk.chapter, predict.reveal, {**place.asked, **place.found}, language),
            "tally": [{"mark": mark, "votes": n, "right": mark in place.right} for mark, n in tally],
            "agreed": sum(mark in place.right for mark in place.guesses.values()),
        }
    return told
