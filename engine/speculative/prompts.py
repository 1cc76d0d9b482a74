"""Prompts to train on, from a folder of public data sets, without any that the benchmarks ask.

Read: self_instruct_seeds.jsonl (instruction and its first input), gsm8k_test.jsonl (question), humaneval.jsonl(.gz)
(prompt). Held against: spec_bench.jsonl and mt_bench.jsonl, every turn. A prompt is dropped if its normalised text occurs
in a benchmark's turn, or a turn (of 20 characters or more) occurs in it: Spec-Bench's maths are questions of GSM8K's test
set, so this is not a formality.

The folder is an argument; nothing of it is copied into the project. Knows no models.
"""

from __future__ import annotations

import gzip
import json
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineError

BENCHMARKS = ("spec_bench.jsonl", "mt_bench.jsonl")
SHORTEST_TURN = 20  # a shorter turn inside a prompt is no copy


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and the data set it is from."""

    source: str
    text: str


@dataclass(frozen=True)
class PromptSet:
    """What is trained on, and what was left out because a benchmark asks it."""

    kept: tuple[Prompt, ...]
    dropped: tuple[Prompt, ...]

    def counts(self) -> dict[str, dict[str, int]]:
        """{source: {"kept", "dropped"}}."""
        sources = sorted({p.source for p in (*self.kept, *self.dropped)})
        return {s: {"kept": sum(p.source == s for p in self.kept), "dropped": sum(p.source == s for p in self.dropped)} for s in sources}


def bad_data(reason: str) -> EngineError:
    return EngineError("bad_training_data", f"The training data cannot be used: {reason}.", reason=reason)


def normalised(text: str) -> str:
    """Letters and digits only, in lower case, compatible forms made equal, words one blank apart."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join("".join(c if c.isalnum() else " " for c in folded).split())


def load_prompts(folder: Path) -> PromptSet:
    """Every prompt of the folder, each text once.

    Raises:
        EngineError: "bad_training_data" if a benchmark is missing (then nothing could be held against it), if no data set
            is there, or if one cannot be read.
    """
    turns = benchmark_turns(folder)
    kept, dropped, known = [], [], set()
    for name, (file, text_of) in SOURCES.items():
        path = _find(folder, file)
        for line in _lines(path) if path else ():
            text = _field(path, line, text_of).strip()
            plain = normalised(text)
            if plain and plain not in known:
                known.add(plain)
                (dropped if occurs(plain, turns) else kept).append(Prompt(name, text))
    if not kept:
        raise bad_data(f"the folder {folder.name} holds no prompts ({', '.join(f for f, _ in SOURCES.values())})")
    return PromptSet(tuple(kept), tuple(dropped))


def benchmark_turns(folder: Path) -> frozenset[str]:
    """Every turn of the benchmarks, normalised."""
    found = set()
    for file in BENCHMARKS:
        path = _find(folder, file)
        if path is None:
            raise bad_data(f"{file} is missing, so prompts cannot be held against it")
        for line in _lines(path):
            turns = _field(path, line, lambda line: line["turns"])
            found.update(normalised(str(turn)) for turn in turns)
    return frozenset(found - {""})


def occurs(prompt: str, turns: frozenset[str]) -> bool:
    """Whether a normalised prompt is part of a turn or has one in it; whole words."""
    padded = f" {prompt} "
    return any(padded in f" {turn} " or (len(turn) >= SHORTEST_TURN and f" {turn} " in padded) for turn in turns)


def _self_instruct(line: dict) -> str:
    first = (line.get("instances") or [{}])[0].get("input") or ""
    return f"{line['instruction']}\n\n{first}".strip()


SOURCES: dict[str, tuple[str, Callable[[dict], str]]] = {
    "self-instruct": ("self_instruct_seeds.jsonl", _self_instruct),
    "gsm8k": ("gsm8k_test.jsonl", lambda line: line["question"]),
    "humaneval": ("humaneval.jsonl", lambda line: line["prompt"]),
}


def _find(folder: Path, file: str) -> Path | None:
    return next((path for path in (folder / file, folder / f"{file}.gz") if path.is_file()), None)


def _lines(path: Path) -> Iterator[dict]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except (ValueError, RecursionError):
                        raise bad_data(f"line {number} of {path.name} is not JSON") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise bad_data(f"{path.name} cannot be read ({type(error).__name__})") from None


def _field(path: Path, line: object, read: Callable):
    try:
        return read(line)
    except (KeyError, TypeError, IndexError, AttributeError):
        raise bad_data(f"a line of {path.name} lacks what is read from it") from None
