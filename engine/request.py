"""What a caller asks for: SamplingParams and Request. Frozen; the scheduler never writes into them.

Knows nothing of pages, steps or text decoding. Stop strings are only stated here; engine/detokenizer.py
looks for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from engine.errors import EngineError


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"  # an EOS id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, the model's length or the pool's capacity
    ABORT = "abort"  # the caller went away or asked
    ERROR = "error"  # a step that it took part in failed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. The defaults are greedy.

    A sampled token is a function of (logits row, these parameters, seed, sample index, position) and of
    nothing else: neighbours in the batch, the row and preemption cannot change it.

    Args:
        max_tokens: at most this many new tokens, ≥ 1.
        temperature: 0 is greedy (ties go to the lowest id); otherwise logits / temperature.
        top_k: keep the k most probable tokens; None keeps all.
        top_p: keep the smallest set with at least this probability, in (0, 1].
        seed: None draws one when the request is added (it is recorded, so a run can be repeated).
        n: independent samples of one prompt; they share the prompt's pages.
        stop: stop strings; the text ends before the first match.
        stop_token_ids: ids that end the text besides the model's EOS set.
        ignore_eos: go on past every EOS id (stop_token_ids still count).
    Raises:
        EngineError: code "bad_sampling", naming the parameter.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                value = getattr(self, name)
                raise EngineError("bad_sampling", f"{name} must be {rule}, got {value!r}.", name=name, rule=rule, value=str(value))

        def whole(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        def number(value: object) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

        need(whole(self.max_tokens) and 1 <= self.max_tokens < 2**31, "max_tokens", "a whole number from 1 to 2^31 - 1")
        need(number(self.temperature) and self.temperature >= 0, "temperature", "a number of at least 0")
        need(self.top_k is None or (whole(self.top_k) and self.top_k >= 1), "top_k", "a whole number of at least 1")
        need(number(self.top_p) and 0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        need(self.seed is None or (whole(self.seed) and 0 <= self.seed < 2**63), "seed", "a whole number from 0 to 2^63 - 1")
        need(whole(self.n) and 1 <= self.n <= 64, "n", "a whole number from 1 to 64")
        need(all(isinstance(s, str) and s for s in self.stop), "stop", "non-empty strings")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with its parameters, as the scheduler receives it.

    Args:
        request_id: unique in the engine's life, ascending in order of arrival.
        name: the letter a person sees (A, B, … Z, AA, …).
        prompt: the text as typed, for display.
        prompt_token_ids: at least one id.
        sampling: with `seed` already drawn.
        room: whose scheduler and pages it uses.
        priority: lower runs first under the "priority" policy; ties by arrival.
        arrival_us: microseconds on the engine's clock.
        eos_token_ids: the model's EOS set in force for this request.
    """

    request_id: int
    name: str
    prompt: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    room: str = "main"
    priority: int = 0
    arrival_us: int = 0
    eos_token_ids: frozenset[int] = frozenset()


def letters(index: int) -> str:
    """The name of a room's request: 0 → A, 25 → Z, 26 → AA."""
    text = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        text = chr(ord("A") + rest) + text
    return text
