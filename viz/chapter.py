"""The contract of a chapter: Chapter, Beat, Predict, TryThis. Plain data and pure functions of a Trace and steps.

A chapter is one file of viz/chapters/ with a CHAPTER of the file's name. A beat is what a speaker shows between two
presses of a clicker: a sentence, the views, what is selected. Going to a beat may start a workload and advance the
engine (or a recording's playhead) until an event; a beat that predicts asks before the step that decides, takes
guesses as clicks on marks of its first view, and the next real record is the answer key. Nothing here knows a
browser, a source or an engine: viz/stage/tour.py plays it.

Events and answers must hold on any honest run of the workload: live on a CPU or GPU, or recorded, and also where the
trace holds earlier runs. So they look at one step and at those who are in it, never at a step number, a letter or the
words that a model says; and never at later steps, which a live engine has not run yet. What a player owes them: a
preset starts with nothing in the prefix cache, and a beat is looked for from where the last one ended (after a
prediction, from the step that decided it).

A beat, and an answer, may stand on what a job of the engine makes (engine/artifacts.py): tiles of the step, a profile
of the next one, a kernel's run, the ceilings. `moment` says at which step that is to be seen; a recording may bring it
or not. Events know nothing of artifacts, so the same step is found with and without them.

Sentences come from `say`: fields that are tuples are names ("A and B"), a Said is said first, in the same language.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.artifacts import Ceilings, KernelRun, LadderRun, StepProfile, TileTrace, of_kind
from engine.trace import Trace
from viz.tiles import sequence_of, tile_traces
from viz.timelines import bursts
from viz.words.catalogue import Template, words

Event = Callable[[Trace, int], bool]
Pick = Callable[[Trace, int], str | None]
Fields = Callable[[Trace, int], Mapping[str, object]]
Decided = Callable[[Trace, int, int], bool]  # (trace, asked, a later step)
Answer = Callable[[Trace, int, int], frozenset[str]]  # (trace, asked, decided)
Outcome = Callable[[Trace, int, int], Mapping[str, object]]  # (trace, asked, decided)
Shown = Callable[[Trace, int, int], str | None]  # (trace, asked, decided)
Job = tuple[str, Mapping[str, object]]  # ("tiles", {"block_n": 16}): the engine's do_<job>; tiles are of the step found

NEAR = 4  # steps within which a profile of the next step is to be found; a GPU's profiler may need one to begin


def at_once(trace: Trace, step: int) -> bool:
    """The event of a beat that stays where the last one was."""
    return True


def next_step(trace: Trace, asked: int, step: int) -> bool:
    """The answer is in the very next step."""
    return True


def nothing(trace: Trace, step: int) -> str | None:
    return None


def no_fields(trace: Trace, step: int) -> Mapping[str, object]:
    return {}


def nothing_found(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    return {}


@dataclass(frozen=True, slots=True)
class Said:
    """A field that is itself a sentence or a part of one: a key of the chapter's or of the shared words."""

    key: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Predict:
    """A question that is asked at one step and answered by the record of a later one.

    Args:
        question: words key; says what to click.
        marks: prefixes of the Mark ids that may be guessed ("page", "seq"), as viz/select and the views name them.
        answer: ids of the marks that are right; never empty. It may name more than a small panel draws (each token of
            a request, where the panel has folded some), at least one is drawn, and at least one mark is wrong.
        reveal: words key of the sentence that states the answer.
        fields: numbers and names of the question, known when it is asked.
        until: whether a step after the question decides it; by default the very next one does. None: the step itself
            does, by an artifact of it.
        found: numbers and names of the reveal.
        job: what the engine must make of the step that decides, before the answer is read.
        views: what is on screen with the answer; () leaves the beat's.
        select: which mark is selected then; None leaves the beat's.
    """

    question: str
    marks: tuple[str, ...]
    answer: Answer
    reveal: str
    fields: Fields = no_fields
    until: Decided | None = next_step
    found: Outcome = nothing_found
    job: Job | None = None
    views: tuple[str, ...] = ()
    select: Shown | None = None


@dataclass(frozen=True, slots=True)
class TryThis:
    """One knob that changes the picture, offered beside the beat: the last workload starts again with it. `text` is a
    words key."""

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
    job: what the engine must make of the step that was found, before the beat is shown; of the sequence that is selected,
        where one is. `fields`, `select` and the question are read once it is there, from the step where it is to be seen.
        Where it cannot be made, nothing is said and nothing asked.
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
    job: Job | None = None


@dataclass(frozen=True, slots=True)
class Chapter:
    """`question` is what the chapter answers; `order` its place in the talk. `words` is its English: keys that begin
    with "chapter.<name>."; the title is "chapter.<name>.title", the question "chapter.<name>.question". The first
    beat starts `preset`."""

    name: str
    order: int
    preset: str
    beats: tuple[Beat, ...]
    words: Mapping[str, Template] = field(default_factory=dict)

    @property
    def presets(self) -> tuple[str, ...]:
        """The workloads that it plays, in order."""
        return tuple(dict.fromkeys((self.preset, *(beat.preset for beat in self.beats if beat.preset))))


def find(trace: Trace, event: Event, begin: int) -> int | None:
    """The first step from `begin` on that fits; None if it has not come (yet)."""
    last = trace.last_step
    steps = trace.rows("steps", begin, begin if last is None else last)["step_id"]
    return next((step for step in steps.tolist() if event(trace, step)), None)


def decided(trace: Trace, predict: Predict, asked: int) -> int | None:
    """The step that answers a question which was asked at another; None if it has not come (yet). Its job is not looked at."""
    if predict.until is None:
        return asked
    return find(trace, lambda trace, step: predict.until(trace, asked, step), asked + 1)


def moment(trace: Trace, job: Job, step: int, select: str | None = None) -> int | None:
    """The step at which what a job made of a step is to be seen: that step, for a profile one after it. None: it was not
    made."""
    name, args = job
    if name == "profile":
        near = trace.rows("steps", step + 1, step + 1 if trace.last_step is None else trace.last_step)["step_id"][:NEAR].tolist()
        return min((p.step_id for p in of_kind(trace, StepProfile) if p.ops and p.step_id in near), default=None)
    if name == "tiles":
        made = any(_is_of(it, args, sequence_of(select)) for it in tile_traces(trace) if it.step_id == step)
    elif name == "timeline":
        made = any(b.it.step_id == step and not b.foreign for b in bursts(trace, step))
    elif name == "kernel":
        made = any(run.name == args["name"] and args.get("case") in (None, run.case) for run in of_kind(trace, KernelRun))
    elif name == "ladder":
        made = any(ladder.is_over and len(ladder.measured) >= 2 for ladder in of_kind(trace, LadderRun)[-1:])  # the one shown
    else:
        made = name == "ceilings" and bool(of_kind(trace, Ceilings))
    return step if made else None


def _is_of(it: TileTrace, args: Mapping[str, object], seq_id: int | None) -> bool:
    """Whether these arguments made it. A kernel may cut the keys into fewer parts than it was asked to."""
    same = all(getattr(it, name) == args[name] for name in ("kernel", "block_m", "block_n", "layer") if name in args)
    splits = args.get("splits", it.num_splits)
    return same and (it.num_splits > 1) == (splits > 1) and seq_id in (None, it.row_seq_id)


def say(chapter: Chapter, key: str, fields: Mapping[str, object], language: str = "en") -> str:
    """A sentence of a chapter in a language."""
    t = words(language, chapter.words)

    def ready(value: object) -> object:
        if isinstance(value, Said):
            return t(value.key, **{name: ready(part) for name, part in value.fields.items()})
        return t.names(value) if isinstance(value, tuple) else value

    return t(key, **{name: ready(value) for name, value in fields.items()})
