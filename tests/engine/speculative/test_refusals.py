"""The folder of drafters is walked, and what cannot work is refused with a sentence before anything runs."""

import json
import pickle
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import EngineError
from engine.models.loading import load_model
from engine.speculative import registry
from engine.speculative.base import DraftOptions, Room, Shape, bytes_per_slot
from engine.speculative.heads import CARD, LIMIT, fingerprint, load_head, read_card, save_head
from engine.speculative.registry import build_drafter, load_drafters
from tests.engine.speculative.heads_of import card, random_head
from tests.engine.speculative.reference import ROOM, small_target
from tests.engine.stories import convert_stories, stories_data
from viz.words.en import WORDS as EN
from viz.words.ja import WORDS as JA

CHAIN, STATIC, DYNAMIC = Shape.CHAIN, Shape.STATIC, Shape.DYNAMIC


@pytest.fixture(scope="module")
def target():
    return small_target()


def refusal(call):
    with pytest.raises(EngineError) as refused:
        call()
    error = refused.value
    assert error.sentence.endswith(".") and "\n" not in error.sentence
    assert pickle.loads(pickle.dumps(error)).fields == error.fields
    assert f"error.{error.code}" in EN and f"error.{error.code}" in JA
    return error


def test_every_drafter_of_the_issue_is_there():
    assert set(load_drafters()) == {"ngram", "draft_model", "medusa", "eagle", "mtp"}


def test_a_registry_stops_at_a_module_that_declares_nothing(tmp_path, monkeypatch):
    (tmp_path / "strays").mkdir()
    (tmp_path / "strays" / "__init__.py").write_text("")
    (tmp_path / "strays" / "newcomer.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    package = types.ModuleType("strays")
    package.__path__ = [str(tmp_path / "strays")]
    with pytest.raises(RuntimeError, match="newcomer declares no DRAFTER"):
        registry.collect(package)


@pytest.mark.parametrize(
    ("options", "room", "code", "says"),
    [
        (DraftOptions("oracle"), ROOM, "unknown_drafter", "no drafter called 'oracle'. There are: draft_model, eagle, medusa, mtp, ngram"),
        (DraftOptions("ngram", depth=9), Room(9, 4096), "draft_too_deep", "9 deep does not fit a window of 9 tokens"),
        (DraftOptions("ngram", budget=65), ROOM, "draft_budget", "65 tokens is too large: at most 64 can be verified"),
        (DraftOptions("ngram", budget=16), Room(256, 16), "draft_budget", "at most 15 fit the cache"),
        (DraftOptions("draft_model", shape=DYNAMIC, depth=5, width=4, budget=8), Room(256, 16), "draft_budget", "takes 16 tokens of cache"),
        (DraftOptions("ngram", depth=0), ROOM, "bad_draft_options", "depth must be a whole number of at least 1"),
        (DraftOptions("ngram", width=True), ROOM, "bad_draft_options", "width must be a whole number"),
        (DraftOptions("mtp", shape=DYNAMIC), ROOM, "bad_draft_options", "shape must be one of chain for"),
        (DraftOptions("ngram", drawn=True), ROOM, "bad_draft_options", "drawn must be off ("),
        (DraftOptions("draft_model", shape=DYNAMIC, drawn=True), ROOM, "bad_draft_options", "shape must be one of chain, static for"),
        (DraftOptions("draft_model", layers=4), ROOM, "bad_draft_options", "layers must be a whole number from 1 to 3"),
        (
            DraftOptions("draft_model", shape=DYNAMIC, depth=6, width=16),
            ROOM,
            "bad_draft_tree",
            "80 guesses would be tried, and at most 64",
        ),
        (DraftOptions("eagle", source="nowhere.safetensors"), ROOM, "bad_drafter", "there is no such file"),
        (DraftOptions("draft_model", source="no such folder"), ROOM, "model_not_found", "was not found"),
    ],
)
def test_what_cannot_work_is_refused(options, room, code, says, target):
    error = refusal(lambda: build_drafter(target, options, room))
    assert error.code == code and says in error.sentence


def test_the_largest_that_is_allowed_is_allowed(target):
    drafter = build_drafter(target, DraftOptions("draft_model", shape=DYNAMIC, depth=5, width=16, budget=64), Room(6, 65))
    assert drafter.slots_ahead == 64 and drafter.nodes == 64


def test_a_medusa_tree_deeper_than_its_heads_is_refused(target, tmp_path):
    head = random_head(target, "medusa", tmp_path)
    error = refusal(lambda: build_drafter(target, DraftOptions("medusa", head, CHAIN, depth=4), ROOM))
    assert error.code == "bad_draft_tree" and "4 deep and the drafter has 3 heads" in error.sentence


def edited(path, change):
    """A head's file with another card or other tensors."""
    tensors, found = load_file(path), read_card(path)
    change(found, tensors)
    save_file(tensors, path, metadata={CARD: json.dumps(found)})


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (lambda c, t: c.update(method="mtp"), "bad_drafter", "trained as mtp, not as eagle"),
        (lambda c, t: c["target"].update(vocab_size=99), "draft_vocabulary", "it has 99 tokens, the model 24"),
        (lambda c, t: c.update(vocabulary="other"), "draft_vocabulary", "the same numbers stand for other texts"),
        (lambda c, t: c["target"].update(hidden_size=64), "bad_drafter", "hidden_size 64, and this one has 32"),
        (lambda c, t: c.update(target=None), "draft_vocabulary", "it has 0 tokens"),
        (lambda c, t: c.update(format=7), "bad_drafter", "its format 7 is not 1"),
        (lambda c, t: c.update(taps=[0, 1, 9]), "bad_drafter", "which features it reads"),
        (lambda c, t: c.update(taps="final"), "bad_drafter", "which features it reads"),
        (lambda c, t: t.pop("fc"), "bad_drafter", "the tensor fc is missing"),
        (lambda c, t: t.update(fc=torch.zeros(2, 2)), "bad_drafter", "fc has the shape [2, 2]"),
    ],
)
def test_a_head_of_another_model_is_refused(change, code, says, tmp_path):
    target = replace(small_target(), vocabulary="ours")
    path = tmp_path / "head.safetensors"
    path.write_bytes(Path(random_head(target, "eagle", tmp_path)).read_bytes())
    assert build_drafter(target, DraftOptions("eagle", str(path)), ROOM).parameters > 0
    edited(path, change)
    error = refusal(lambda: build_drafter(target, DraftOptions("eagle", str(path)), ROOM))
    assert error.code == code and says in error.sentence


@pytest.mark.parametrize("accuracies", [None, [], [[0.5]], [[0.5, 2.0]] * 3, [["x"]] * 3, [[0.1] * 25] * 3, {"a": 1}])
def test_medusa_accuracies_that_are_none_are_refused(accuracies, target, tmp_path):
    head = random_head(target, "medusa", tmp_path, accuracies=accuracies)
    assert "no accuracies of 3 heads" in refusal(lambda: build_drafter(target, DraftOptions("medusa", head), ROOM)).sentence


def test_broken_files_are_refused(target, tmp_path):
    whole = Path(random_head(target, "mtp", tmp_path)).read_bytes()
    path = tmp_path / "broken.safetensors"
    for content in (b"", b"junk", whole[:100], whole[:-10], whole + b"x"):
        path.write_bytes(content)
        assert refusal(lambda: load_head(str(path), "mtp", target)).code == "bad_drafter"
    save_file({"fc": torch.zeros(1)}, path)
    assert "it has no card" in refusal(lambda: load_head(str(path), "mtp", target)).sentence


def test_a_head_larger_than_what_ships_is_not_written(target, tmp_path):
    big = {"x": torch.zeros(LIMIT // 2 + 1)}
    assert "at most 16 are shipped" in refusal(lambda: save_head(tmp_path / "big.safetensors", card(target, "mtp"), big)).sentence
    assert not list(tmp_path.iterdir())


def test_a_draft_model_with_another_vocabulary_is_refused(target, tmp_path):
    source = stories_data()
    if source is None:
        pytest.skip("../shared/data has no stories260K.bin")
    folder = convert_stories(source, tmp_path / "stories")
    error = refusal(lambda: build_drafter(target, DraftOptions("draft_model", str(folder)), ROOM))
    assert error.code == "draft_vocabulary" and "it has 512 tokens, the model 24" in error.sentence
    loaded = load_model(str(folder), "cpu", torch.float32)
    assert len(fingerprint(loaded.tokenizer)) == 16


def test_a_slot_costs_what_the_arenas_take(target, tmp_path):
    eagle = build_drafter(target, DraftOptions("eagle", random_head(target, "eagle", tmp_path)), ROOM)
    assert bytes_per_slot(eagle, torch.float32) == 4 * (2 * 1 * 2 * 8 + 32)
    exit_early = build_drafter(target, DraftOptions("draft_model", layers=1), ROOM)
    assert bytes_per_slot(exit_early, torch.float32) == 0 and exit_early.shares_kv and not exit_early.catch_up
