"""How much one person may ask for: prompts, their size, commands a second, jobs. Refuses with a sentence.

Counts by person (a tab) and, where a new tab would be a new person, by client address. Knows no rooms and no roles
(viz/stage/people.py). None is no limit, which is what a laptop has.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from viz.stage.hub import Refused
from viz.view import OFFERED_JOBS

JOBS = ("probe", "check_kernels", "job", "ladder", "bench", "recompute", "compare", "open_recording", *OFFERED_JOBS)
MAX_KNOWN = 2000  # persons
MAX_UPLOAD = 8 << 20  # bytes of a recording that a stranger opens; those that ship have less than 100 KB
MAX_PER_ADDRESS = 40  # pages of a public server open at one client address: a classroom is behind one


@dataclass(frozen=True, slots=True)
class Limits:
    """Args:
    guest_live: prompts that one guest may have alive.
    max_tokens, prompt_chars, samples: of one prompt.
    prompts_per_minute, jobs_per_minute: of one person.
    commands_per_s: of one person, on average; `burst` of them at once.
    rooms_per_address: rooms opened from one client address.
    """

    guest_live: int = 2
    max_tokens: int | None = None
    prompt_chars: int | None = None
    samples: int | None = None
    prompts_per_minute: int | None = None
    jobs_per_minute: int | None = None
    commands_per_s: float | None = None
    burst: int = 60
    rooms_per_address: int | None = None


PUBLIC = Limits(
    max_tokens=256, prompt_chars=4000, samples=4, prompts_per_minute=12, jobs_per_minute=10, commands_per_s=20.0, rooms_per_address=8
)


@dataclass
class _Spent:
    """What one person has asked for lately."""

    tokens: float
    at: float
    prompts: deque[float] = field(default_factory=deque)
    jobs: deque[float] = field(default_factory=deque)


class Meter:
    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self._clock = limits, clock
        self._spent: dict[str, _Spent] = {}

    def check(self, person: str, name: str, args: Mapping[str, object]) -> None:
        """Raises Refused, or counts the command."""
        now, limits = self._clock(), self.limits
        spent = self._of(person, now)
        if limits.commands_per_s is not None:
            spent.tokens = min(spent.tokens + (now - spent.at) * limits.commands_per_s, limits.burst)
            spent.at = now
            if spent.tokens < 1:
                raise Refused("too_fast", "That was too much at once. Wait a second and try again.")
            spent.tokens -= 1
        if name == "prompt":
            self._check_prompt(args)
            _within_a_minute(spent.prompts, limits.prompts_per_minute, now, "prompts_per_minute", "prompts")
        elif name in JOBS:
            _within_a_minute(spent.jobs, limits.jobs_per_minute, now, "jobs_per_minute", "measurements")

    def _check_prompt(self, args: Mapping[str, object]) -> None:
        limits, text = self.limits, args.get("text")
        if limits.prompt_chars is not None and isinstance(text, str) and len(text) > limits.prompt_chars:
            sentence = f"A prompt may have at most {limits.prompt_chars:,} characters here; this one has {len(text):,}. Shorten it."
            raise Refused("prompt_capped", sentence, num_characters=len(text), limit=limits.prompt_chars)
        for name, most in (("max_tokens", limits.max_tokens), ("n", limits.samples)):
            value = args.get(name)
            if most is not None and isinstance(value, (int, float)) and value > most:
                raise Refused("sampling_capped", f"{name} may be at most {most:,} here. Lower it in the inspector.", name=name, limit=most)

    def _of(self, person: str, now: float) -> _Spent:
        if person not in self._spent:
            while len(self._spent) >= MAX_KNOWN:  # the one that has been here longest
                del self._spent[next(iter(self._spent))]
            self._spent[person] = _Spent(float(self.limits.burst), now)
        return self._spent[person]


def _within_a_minute(times: deque[float], most: int | None, now: float, code: str, what: str) -> None:
    if most is None:
        return
    while times and times[0] <= now - 60:
        times.popleft()
    if len(times) >= most:
        wait = max(int(times[0] + 60 - now) + 1, 1)
        raise Refused(code, f"At most {most} {what} a minute here. Try again in {wait} seconds.", limit=most, seconds=wait)
    times.append(now)
