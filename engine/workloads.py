"""The presets of the page: prompts, the step at which each arrives, and the knobs that make the point.

Plain data. The texts are ours; nothing here is tuned to a result: what happens is up to the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Line:
    """One prompt of a workload."""

    text: str
    max_tokens: int = 32
    after_steps: int = 0
    system: str = ""
    chat: bool = True
    n: int = 1
    temperature: float = 0.0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """`title` for the menu, `point` for what to watch."""

    title: str
    point: str
    lines: tuple[Line, ...]
    knobs: Mapping[str, object] = field(default_factory=dict)


TEACHING = {
    "mode": "paged", "batching": "continuous", "page_size": 16, "num_pages": 96, "max_num_seqs": 8, "max_num_batched_tokens": 256,
    "chunked_prefill": True, "prefix_caching": True, "policy": "fcfs", "run_ahead": 0, "steps_per_launch": 1,
}  # fmt: skip

SYSTEM = (
    "You are a patient teacher who explains how computers work to curious people. Answer in short, plain sentences. "
    "Use one everyday comparison in each answer. Never use a technical word without saying what it means. "
    "If you do not know something, say so."
)
ARTICLE = (
    "The lighthouse on the northern cape was built in the year of the great storm. For a hundred years a keeper lit its lamp "
    "each evening and put it out each morning. Ships from many countries passed the cape, and their captains knew the light by "
    "its rhythm: two short flashes, a pause, and one long flash. When electricity came, the lamp was replaced by a bulb as large "
    "as a pumpkin, and the keeper's work became lighter. He planted a small garden behind the tower, where the wind was weak, and "
    "grew potatoes, cabbages and, in good summers, a few strawberries. One autumn a cargo ship lost its engine in heavy seas. The "
    "keeper saw that her lights did not move as they should and called the rescue boat by radio. All nineteen sailors were saved, "
    "and every year afterwards a crate of oranges arrived at the lighthouse without a letter. Today the light is switched by a "
    "computer in the city, two hundred kilometres away. The last keeper still lives in the house by the tower. He says that he "
    "wakes up each evening at the hour when the lamp used to be lit, looks out of the window, and counts: two short, one long. "
) * 2  # fmt: skip

WORKLOADS: dict[str, Workload] = {
    "one": Workload(
        "One prompt", "prefill once, then one token a step", (Line("Why is the sky blue?", 48),), TEACHING
    ),
    "ragged": Workload(
        "Three ragged prompts",
        "prompts of different lengths share every step; each leaves when it is done",
        (
            Line("Hello!", 20),
            Line("Write two sentences about a cat that likes to read books in the library.", 44),
            Line(
                "Explain to a child, in a few friendly words, why we see the moon change its shape during a month, and what a full moon is.",
                36,
            ),
        ),
        TEACHING,
    ),
    "shared": Workload(
        "Shared system prompt, sent again",
        "the second and third request find the system prompt's blocks in the cache",
        (
            Line("What is a cache?", 32, 0, SYSTEM),
            Line("What is a queue?", 32, 12, SYSTEM),
            Line("What is a page?", 32, 20, SYSTEM),
        ),
        TEACHING,
    ),
    "flood": Workload(
        "A flood that forces preemption",
        "six requests outgrow the cache: the last to come gives its blocks back and starts again later",
        tuple(Line(f"Tell me a story about a {who} who finds a {what}.", 60) for who, what in (
            ("sailor", "map"), ("baker", "golden spoon"), ("girl", "talking bird"), ("farmer", "meteor"),
            ("robot", "flower"), ("king", "paper boat"),
        )),
        {**TEACHING, "num_pages": 28},
    ),
    "long": Workload(
        "A long prompt while others decode",
        "a long prompt is computed in chunks beside the others' single tokens, so nobody stalls",
        (
            Line("Count from one to forty in words.", 60),
            Line("Name ten animals and one thing that each of them eats.", 60),
            Line("Summarize this text in one sentence.\n\n" + ARTICLE, 24, 8),
        ),
        {**TEACHING, "max_num_batched_tokens": 64},
    ),
    "samples": Workload(
        "Three answers to one prompt",
        "the samples share the prompt's blocks; the first to write into a shared block copies it",
        (Line("Give my grey cat a name and say why it fits.", 28, n=3, temperature=0.9),),
        TEACHING,
    ),
}  # fmt: skip

LADDER = Workload(  # no preset: the job `ladder` runs the first few of them
    "Speed ladder",
    "the same requests, ever faster",
    tuple(Line(text) for text in (
        "Why is the sky blue?",
        "Name three animals that live in the sea.",
        "What does a lighthouse do?",
        "Write a sentence about a cat that reads.",
        "Why do we sleep at night?",
        "How is bread made?",
        "What is a computer?",
        "Say something kind about rain.",
    )),
)  # fmt: skip
