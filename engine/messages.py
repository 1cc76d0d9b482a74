"""What crosses between a session and its core, both ways. Plain data: it may have to cross processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.request import SamplingParams
from engine.trace import TraceDelta


@dataclass(frozen=True, slots=True)
class Command:
    """`name` is a method of Loop without its `do_`; `number` comes back with the answer."""

    number: int
    name: str
    args: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Answer:
    number: int
    value: object = None
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Loading, or a job."""

    fraction: float
    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded. `folder` is where its tokenizer lies; `meta` goes into every Trace."""

    config: EngineConfig
    folder: object
    meta: Mapping[str, object]
    rooms: tuple[str, ...] = ("main",)


@dataclass(frozen=True, slots=True)
class Report:
    """What happened in a room since the last report."""

    room: str
    delta: TraceDelta
    state: str  # "running", "paused", "idle"; "closed" in a room's last
    pace: float | None
    waiting: tuple[int, ...]
    running: tuple[int, ...]
    config: EngineConfig
    job: Progress | None = None
    note: str = ""  # what went wrong outside a step


@dataclass(frozen=True, slots=True)
class Closed:
    """The room is gone; its last report came before."""

    room: str


@dataclass(frozen=True, slots=True)
class Died:
    """The loop ended by a fault."""

    sentence: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a workload script: added once the room has run `after_steps` more steps."""

    prompt: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    after_steps: int = 0
