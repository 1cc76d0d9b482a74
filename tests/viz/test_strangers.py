"""What strangers read from the pictures, against what the records say.

stranger_results.json holds every reader's answers: three with ordinary vision, one under emulated deuteranopia, one in
greyscale, each at two moments of each view (tests/viz/strangers.py makes the pictures), and their guesses before
they saw one. The true answers are computed here from the traces. A view whose questions or record change must be
shown to readers again.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from engine.recording import load
from tests.viz.strangers import RECORDINGS, answers
from viz.registry import load_views

RESULTS = json.loads(Path(__file__).with_name("stranger_results.json").read_text())
SHOWN_TO_STRANGERS = ("batching", "blocks", "engine_map", "kv_cache", "mask", "tokens")


@cache
def truth(view: str, recording: str, step: int) -> tuple[str, ...]:
    return answers(load_views()[view], load(RECORDINGS / recording), step)


def same(said: str, true: str) -> bool:
    """Apart from case, a percent sign, and a hyphen read for the dot of A·1."""
    return plain(said) == plain(true)


def plain(text: str) -> str:
    return re.sub(r"[^a-z0-9·]", "", text.lower().replace("-", "·"))


def right(said: list[str], entry: dict) -> int:
    return sum(map(same, said, truth(entry["view"], entry["recording"], entry["step"])))


@pytest.mark.parametrize("entry", RESULTS, ids=lambda e: f"{e['view']}-{e['step']}-{e['reader']}")
def test_a_stranger_reads_four_of_five_from_the_picture_and_guesses_at_most_one(entry):
    assert len(entry["given"]) == len(entry["blind"]) == 5
    assert right(entry["given"], entry) >= 4
    assert right(entry["blind"], entry) <= 1


@pytest.mark.parametrize("view", SHOWN_TO_STRANGERS)
def test_each_view_was_read_at_two_moments_by_three_readers_and_in_both_kinds_of_poor_colour(view):
    mine = [e for e in RESULTS if e["view"] == view]
    moments = {(e["recording"], e["step"]) for e in mine}
    assert len(moments) == 2
    for moment in moments:
        readers = [e["vision"] for e in mine if (e["recording"], e["step"]) == moment]
        assert readers.count("normal") >= 3 and {"deuteranopia", "greyscale"} <= set(readers)
