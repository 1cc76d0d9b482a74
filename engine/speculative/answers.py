"""The target's own answers to prompts, made with this engine: one batch after another, kept in a file as they are made.

The first sample of a prompt is greedy (what is measured), the others are drawn with temperature 1. Whether a prompt is
held out follows from its text, so it is the same in each run; held-out prompts get the greedy sample only.

Nothing is recorded while it runs. Does not know heads or losses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from engine.core import EngineCore
from engine.errors import EngineError
from engine.models.loading import LoadedModel
from engine.request import FinishReason, SamplingParams
from engine.speculative.prompts import Prompt

HELD_OUT = 16  # one prompt in so many


@dataclass(frozen=True)
class Answer:
    """Token ids of prompt and answer, an EOS at the end included."""

    tokens: np.ndarray  # int64
    num_prompt: int
    held_out: bool


@dataclass(frozen=True, slots=True)
class Asking:
    """How answers are made: samples of a prompt, new tokens, and prompts in one batch."""

    samples: int = 1
    max_tokens: int = 256
    at_once: int = 64
    temperature: float = 1.0


Progress = Callable[[float, str], None]


def is_held_out(prompt: Prompt) -> bool:
    return hashlib.sha256(prompt.text.encode()).digest()[0] % HELD_OUT == 0


def answer_all(
    core: EngineCore, loaded: LoadedModel, prompts: Sequence[Prompt], asking: Asking, file: Path | None, show: Progress, until=None
) -> list[Answer]:
    """Answers in the prompts' order. What `file` holds already is not made again.

    Args:
        file: kept after each batch; None: not kept.
        until: called between batches; true: stop and return what there is.
    """
    key = _key(loaded, prompts, asking)
    made = _load(file, key) if file is not None and file.is_file() else []
    done = int(made[-1][0]) + 1 if made else 0
    out = [(i, answer) for i, answer in made]
    for start in range(done, len(prompts), asking.at_once):
        if until is not None and until():
            break
        stop = min(len(prompts), start + asking.at_once)
        out += _ask(core, loaded, list(enumerate(prompts))[start:stop], asking)
        if file is not None:
            _save(file, key, out)
        count = sum(len(a.tokens) - a.num_prompt for _, a in out)
        show(stop / len(prompts), f"Answers: {stop:,} of {len(prompts):,} prompts, {count:,} tokens")
    return [answer for _, answer in out]


def prompt_ids(loaded: LoadedModel, text: str) -> tuple[int, ...]:
    """As the model is asked: in its chat template if it has one."""
    if loaded.tokenizer.has_chat_template:
        return loaded.tokenizer.chat([{"role": "user", "content": text}])[1]
    return loaded.tokenizer.encode(text)


def _ask(core: EngineCore, loaded: LoadedModel, some: Sequence[tuple[int, Prompt]], asking: Asking) -> list[tuple[int, Answer]]:
    scheduler, live = core.rooms["main"].scheduler, []
    for index, prompt in some:
        ids, held = prompt_ids(loaded, prompt.text), is_held_out(prompt)
        for sample in range(1 if held else asking.samples):
            params = SamplingParams(asking.max_tokens, 0.0 if sample == 0 else asking.temperature, seed=index * 64 + sample)
            try:
                _, (seq_id,) = core.add(prompt.text, ids, params)
            except EngineError as error:
                if error.code not in ("prompt_too_long", "prompt_exceeds_pool"):
                    raise
                break  # this one is too long for the model: go on without it
            live.append((index, held, scheduler.sequences[seq_id]))
    while core.has_work:
        core.capture_next()
        core.step()
    for _, _, seq in live:
        if seq.finish_reason is FinishReason.ERROR:
            raise EngineError("training_failed", "The engine could not answer a prompt; its own message stands above.")
    core.report("main")
    return [
        (index, Answer(np.array(seq.tokens, np.int64), seq.num_prompt_tokens, held))
        for index, held, seq in live
        if len(seq.tokens) > seq.num_prompt_tokens + 2
    ]


def _key(loaded: LoadedModel, prompts: Sequence[Prompt], asking: Asking) -> str:
    """What the answers depend on: a file with another key is not used."""
    parts = [loaded.folder.name, loaded.num_parameters, asking.samples, asking.max_tokens, asking.temperature, [p.text for p in prompts]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _save(file: Path, key: str, answers: Sequence[tuple[int, Answer]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        "tokens": np.concatenate([a.tokens for _, a in answers] or [np.zeros(0, np.int64)]),
        "table": np.array([(i, len(a.tokens), a.num_prompt, a.held_out) for i, a in answers], np.int64).reshape(-1, 4),
    }
    part = file.with_suffix(".part")
    save_file(arrays, part, metadata={"key": key})
    part.replace(file)


def _load(file: Path, key: str) -> list[tuple[int, Answer]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            if (opened.metadata() or {}).get("key") != key:
                return []
        arrays = load_file(file)
    except (SafetensorError, OSError):
        return []  # cut off or another's: made anew
    out, at = [], 0
    for index, length, num_prompt, held in arrays["table"].tolist():
        out.append((index, Answer(arrays["tokens"][at : at + length], num_prompt, bool(held))))
        at += length
    return out


def engine_for(config, asking: Asking):
    """The engine's config for many answers at once, unrecorded."""
    return replace(
        config, tracing=False, top_logprobs=0,
        scheduler=replace(config.scheduler, max_num_seqs=asking.at_once * asking.samples, max_num_batched_tokens=8192),
    )  # fmt: skip
