"""Training: what it reads, what it leaves out, what it learns, and what the file that ships does in the engine's drafters."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.errors import EngineError
from engine.speculative import grow, losses, optimiser, train
from engine.speculative.answers import Answer, is_held_out
from engine.speculative.base import FINAL, DraftOptions, Shape, make_state
from engine.speculative.heads import read_card, save_head
from engine.speculative.losses import Loss, Plan, Texts, attend_rounds, loss_of, new_weights, watch
from engine.speculative.medusa import Medusa
from engine.speculative.optimiser import Learning, learn
from engine.speculative.prompts import Prompt, benchmark_turns, load_prompts, normalised, occurs
from engine.speculative.registry import build_drafter
from engine.speculative.report import head_accuracies, replay, rows_of
from engine.speculative.train import Batches, describe
from engine.speculative.tree import chain_topology
from tests.engine.model_harness import Harness
from tests.engine.speculative.reference import ROOM, Loop, plain_greedy, small_target
from tests.engine.stories import convert_stories, stories_data

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data():
    found = stories_data()
    if found is None or not (found / "spec_bench.jsonl").is_file():
        pytest.skip("../shared/data is not there")
    return found


# ---- prompts ----


def test_no_prompt_that_a_benchmark_asks_is_trained_on(data):
    found = load_prompts(data)
    lines = [json.loads(line) for line in (data / "spec_bench.jsonl").read_text("utf-8").splitlines()]
    maths = [normalised(line["turns"][0]) for line in lines if line["category"] == "math_reasoning"]
    dropped = {normalised(p.text) for p in found.dropped}
    assert len(maths) == 80 and set(maths) <= dropped  # all of them are questions of GSM8K's test set
    first_turns = [normalised(json.loads(line)["turns"][0]) for line in (data / "mt_bench.jsonl").read_text("utf-8").splitlines()]
    turns = {normalised(t) for line in lines for t in line["turns"]}
    assert len(first_turns) == 80 and set(first_turns) <= turns
    every = " | ".join([*turns, *first_turns])
    assert len(found.kept) > 1500 and not any(f" {normalised(p.text)} " in every for p in found.kept)
    assert found.counts()["gsm8k"] == {"kept": 1239, "dropped": 80}


def write_data(folder, questions, turns=("What is it?",)):
    (folder / "gsm8k_test.jsonl").write_text("\n".join(json.dumps({"question": q}) for q in questions))
    for name in ("spec_bench.jsonl", "mt_bench.jsonl"):
        (folder / name).write_text(json.dumps({"turns": list(turns)}))
    return folder


def test_copies_are_found_behind_other_writing_and_inside_longer_texts(tmp_path):
    turns = ("Compose a blog post about a trip to Hawaii!", "Now shorter.", "Read this: THE  CAT sat—on the mat. Why?")
    asked = [
        "compose a blog post, about a TRIP to “Hawaii”", "The cat sat on the mat",
        "Please: compose a blog post about a trip to Hawaii. Thanks", "Now shorter, and count the sheep", "a mat sat on the cat",
    ]  # fmt: skip
    found = load_prompts(write_data(tmp_path, [*asked, asked[4].upper()], turns))
    assert [p.text for p in found.dropped] == asked[:3] and [p.text for p in found.kept] == asked[3:]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "spec_bench.jsonl").unlink(), "spec_bench.jsonl is missing"),
        (lambda f: (f / "mt_bench.jsonl").write_text("{"), "line 1 of mt_bench.jsonl is not JSON"),
        (lambda f: (f / "mt_bench.jsonl").write_text('{"a": 1}'), "a line of mt_bench.jsonl lacks"),
        (lambda f: (f / "gsm8k_test.jsonl").write_text("[]"), "a line of gsm8k_test.jsonl lacks"),
        (lambda f: (f / "gsm8k_test.jsonl").unlink(), "holds no prompts"),
        (lambda f: (f / "gsm8k_test.jsonl").write_bytes(b"\xff\xfe"), "cannot be read"),
        (
            lambda f: (f / "humaneval.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "def f(): pass"}')[:-9]),
            "humaneval.jsonl.gz cannot be read",
        ),
    ],
)
def test_data_that_cannot_be_used_is_refused(spoil, says, tmp_path):
    spoil(write_data(tmp_path, ["How many?"]))
    with pytest.raises(EngineError, match=says) as refused:
        load_prompts(tmp_path)
    assert refused.value.code == "bad_training_data"


def test_words_are_whole_when_texts_are_compared():
    assert occurs("the cat", frozenset({"see the cat run"})) and not occurs("the cat", frozenset({"see the catalogue"}))
    assert benchmark_turns.__doc__ and not occurs("cat", frozenset())


# ---- losses are the drafters' formulas ----


def texts_of(target, lengths, prompt=3, seed=0):
    rng = np.random.default_rng(seed)
    answers = [Answer(rng.integers(0, target.config.vocab_size, n), prompt, False) for n in lengths]
    return answers, Batches(answers, len(answers), 512, 0, CPU).batch(0)


def test_watching_gives_the_engines_own_hidden_states():
    target = small_target(num_layers=4)
    answers, texts = texts_of(target, [17, 9])
    seen = watch(target.model, texts.tokens, (0, 1, 3))
    assert seen.taps.shape == (2, 17, 96)
    rows = {tuple(t.tolist()): i for i, t in enumerate(texts.tokens)}
    for answer in answers:
        n = len(answer.tokens)
        i = next(i for key, i in rows.items() if list(key[:n]) == answer.tokens.tolist())
        logits = target.model.logits(seen.final[i, :n])
        torch.testing.assert_close(logits, Harness(target.model).logits(answer.tokens.tolist()), rtol=1e-3, atol=1e-3)


def test_rounds_of_attention_are_those_of_the_definition():
    g = torch.Generator().manual_seed(0)
    b, heads, kv, l, d = 2, 4, 2, 7, 8
    keys, values = ([torch.randn(b, kv, l, d, generator=g) for _ in range(3)] for _ in "kv")
    for s in range(3):
        q = torch.randn(b, heads, l, d, generator=g)
        out = attend_rounds(q, keys[: s + 1], values[: s + 1])
        for i in range(b):
            for h in range(heads):
                for j in range(s, l):
                    seen = [(0, k) for k in range(j - s + 1)] + [(r, j - s + r) for r in range(1, s + 1)]
                    k = torch.stack([keys[r][i, h // 2, at] for r, at in seen])
                    v = torch.stack([values[r][i, h // 2, at] for r, at in seen])
                    wanted = torch.softmax(k @ q[i, h, j] * d**-0.5, 0) @ v
                    torch.testing.assert_close(out[i, h, j], wanted)


PLANS = {
    "medusa": Plan("medusa", heads=3), "medusa that sees the token": Plan("medusa", heads=2, blocks=2, sees_token=True),
    "eagle": Plan("eagle", rounds=3), "eagle on three": Plan("eagle", (0, 1, 2), rounds=3), "mtp": Plan("mtp", rounds=2),
}  # fmt: skip


def trained(plan, target, texts, steps, lr=3e-3):
    """Weights after some steps on one batch, and the losses."""
    state, history = optimiser.fresh(new_weights(target.model, plan)), []
    for w in state.weights.values():
        w.requires_grad_(True)
    for _ in range(steps):
        loss = loss_of(target.model, state.weights, texts, plan)
        grads = torch.autograd.grad(loss.total, list(state.weights.values()))
        optimiser.update(state, dict(zip(state.weights, grads, strict=True)), lr)
        history.append(float(loss.total.detach()))
    return {n: w.detach() for n, w in state.weights.items()}, history


def own_texts(target, count=6, new=30):
    """Answers that the target gives to random prompts."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, target.config.vocab_size, 4).tolist() for _ in range(count)]
    return [Answer(np.array(p + plain_greedy(target, p, new)), 4, False) for p in prompts]


@pytest.mark.parametrize("name", PLANS)
def test_every_method_learns_and_its_file_drafts_in_the_engine_what_it_learned(name, tmp_path):
    """Overfit a few of the target's own answers; the drafter that reads the file must then draft them: what training calls
    right and what the paged drafter finds right are the same thing, so their inputs are aligned."""
    plan, target = PLANS[name], small_target(seed=3)
    answers = own_texts(target)
    texts = Batches(answers, len(answers), 512, 0, CPU).batch(0)
    weights, history = trained(plan, target, texts, 150)
    assert history[-1] < 0.6 * history[0]
    path = tmp_path / "head.safetensors"
    card = {**describe(target, plan), "accuracies": [[0.5, 0.2]] * plan.heads}
    save_head(path, card, weights)
    depth = plan.heads if plan.method == "medusa" else plan.rounds
    drafter = build_drafter(target, DraftOptions(plan.method, str(path), Shape.CHAIN, depth, 1, depth), ROOM)
    with torch.no_grad():
        right = [float(r) for r in loss_of(target.model, weights, texts, plan).right]
    found = replay(drafter, target, answers)
    assert right[0] > 0.85
    assert found.reached[0] == pytest.approx(right[0], abs=0.1) and found.tokens_per_step > 1.7
    # and in the loop that verifies, after rejections and all
    loop = Loop(target, DraftOptions(plan.method, str(path), Shape.CHAIN, depth, 1, depth), pages=200)
    some = [loop.add(a.tokens[:4].tolist(), new=30) for a in answers]
    with torch.inference_mode():
        loop.run(some, 28)
    assert [s.tokens[:32] for s in some] == [a.tokens[:32].tolist() for a in answers]
    per_step = np.mean([len(a.path) for s in some for _, a in s.steps[:-1]]) + 1
    assert per_step == pytest.approx(found.tokens_per_step, abs=0.35)


@pytest.mark.parametrize("name", PLANS)
def test_answers_too_short_for_the_last_guess_are_no_fault(name):
    target = small_target()
    answers = [Answer(np.arange(8), 6, False)] * 2
    loss = loss_of(target.model, new_weights(target.model, PLANS[name]), Batches(answers, 2, 8, 0, CPU).batch(0), PLANS[name])
    assert bool(torch.isfinite(loss.total)) and float(loss.total) > 0


@pytest.mark.parametrize("name", ["eagle", "eagle on three", "mtp"])
def test_a_round_of_training_is_a_step_of_drafting(name, tmp_path, monkeypatch):
    """The student's logits for the s-th guess equal the paged drafter's: one formula, twice."""
    plan, target = replace(PLANS[name], rounds=3), small_target(seed=4)
    g = torch.Generator().manual_seed(0)  # as training begins, a layer adds nothing
    weights = {n: (w + 0.1 * torch.randn(w.shape, generator=g)).bfloat16().float() for n, w in new_weights(target.model, plan).items()}
    path = tmp_path / "head.safetensors"
    save_head(path, describe(target, plan), weights)
    drafter = build_drafter(target, DraftOptions(plan.method, str(path), Shape.CHAIN, 3, 1, 3), ROOM)
    answers = own_texts(target, 1)
    tokens = torch.from_numpy(answers[0].tokens)[None]
    caught = {}
    real = losses.F.linear

    def spy(x, weight, bias=None):
        out = real(x, weight, bias)
        if weight is target.model.lm_head and not caught.get("teacher"):
            caught.setdefault("student", []).append(out)
            caught["teacher"] = True
        elif weight is target.model.lm_head:
            caught["teacher"] = False
        return out

    root = 12
    learned = torch.zeros_like(tokens, dtype=torch.bool)
    learned[0, root : root + 4] = True
    with torch.no_grad():
        seen = watch(target.model, tokens, plan.taps)
        monkeypatch.setattr(losses.F, "linear", spy)
        losses.chain_loss(target.model, weights, Texts(tokens, learned), seen, plan)
        monkeypatch.undo()
    table = torch.arange(1, 9)[None].int()
    state = make_state(drafter, target, 9, 16)
    slots = table.long()[0, torch.arange(tokens.shape[1]) // 16] * 16 + torch.arange(tokens.shape[1]) % 16
    state.keep_features(slots, drafter.store(seen.taps[0]))
    said, after = [], drafter.logits
    drafter.logits = lambda hidden: said.append(after(hidden)) or said[-1]
    forced = iter(tokens[0, root + 1 :].tolist())  # feed the text's own tokens, as training does

    def follow_text(logits, width, draws):
        return torch.ones(1, 1, 1), torch.full((1, 1, 1), next(forced)), None

    monkeypatch.setattr(grow, "choose", follow_text)
    with torch.inference_mode():
        drafter.propose(rows_of(tokens, table, [0], [0], [root + 1]), state)
    for s in range(3):  # the guess behind slot root + s of the draft whose root is `root`: the first that counts in round s
        torch.testing.assert_close(caught["student"][s][0], said[s][0], rtol=1e-3, atol=1e-3)


# ---- the loop ----


def bowl(weights, step):
    """A loss with a known lowest point, different in each step."""
    target = torch.tensor([1.0, -2.0, 3.0])
    return Loss(((weights["x"] - target) ** 2).sum() + 0.01 * np.cos(step), [torch.tensor(0.5)])


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    start, show = {"x": torch.zeros(3)}, lambda fraction, text: None
    whole = learn(start, bowl, Learning(0.2, 1e9, 60, tmp_path / "whole"), {"a": 1}, show)

    def stops(weights, step):
        if step == 25:
            raise KeyboardInterrupt
        return bowl(weights, step)

    monkeypatch.setattr(optimiser, "KEEP_EVERY", 0.0)
    with pytest.raises(KeyboardInterrupt):
        learn(start, stops, Learning(0.2, 1e9, 60, tmp_path / "part"), {"a": 1}, show)
    resumed = learn(start, bowl, Learning(0.2, 1e9, 60, tmp_path / "part", resume=True), {"a": 1}, show)
    torch.testing.assert_close(resumed.weights["x"].detach(), whole.weights["x"].detach())
    assert resumed.step == 60 and resumed.curve[-1]["step"] == 60
    assert (whole.weights["x"] - torch.tensor([1.0, -2.0, 3.0])).abs().max() < 1.5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: f.unlink(), "missing or broken"), (lambda f: f.write_bytes(b"x" * 40), "missing or broken"),
        (None, "other data or settings"),
    ],
)  # fmt: skip
def test_a_state_that_does_not_fit_is_not_resumed(change, says, tmp_path):
    file, show = tmp_path / "state", lambda fraction, text: None
    learn({"x": torch.zeros(3)}, bowl, Learning(0.05, 1e9, 3, file), {"a": 1}, show)
    if change:
        change(file)
    with pytest.raises(EngineError, match=says):
        learn({"x": torch.zeros(3)}, bowl, Learning(0.05, 1e9, 9, file, resume=True), {"a": 1 if change else 2}, show)


def test_a_loss_that_is_no_number_ends_in_a_sentence(tmp_path):
    def bad(weights, step):
        return Loss(weights["x"].sum() * float("nan"), [torch.tensor(0.0)])

    with pytest.raises(EngineError, match="loss is no number"):
        learn({"x": torch.zeros(3)}, bad, Learning(0.05, 1e9, 20, tmp_path / "s"), {}, lambda *x: None)


def test_batches_depend_on_the_step_alone_and_hold_every_text_once_an_epoch():
    answers = [Answer(np.full(5 + i, i), 2, False) for i in range(7)]
    batches = Batches(answers, 2, 8, 0, CPU)
    seen = [int(row[0]) for step in range(3) for row in batches.batch(step).tokens]
    assert len(set(seen)) == 6
    again = Batches(answers, 2, 8, 0, CPU).batch(2)
    assert torch.equal(again.tokens, batches.batch(2).tokens) and again.tokens.shape[1] <= 8
    long = Batches([Answer(np.arange(20), 15, False)], 1, 8, 0, CPU).batch(0)
    assert long.tokens.tolist() == [list(range(12, 20))] and long.learned.tolist() == [[False] * 3 + [True] * 5]


def test_head_accuracies_are_ranks_counted_by_hand(tmp_path):
    target = small_target(seed=8)
    answers = own_texts(target, 2, 12)
    blocks = [[(torch.randn(32, 32) * 0.3, torch.zeros(32))] for _ in range(2)]
    medusa = Medusa(target, blocks, None, chain_topology(2))
    found = head_accuracies(medusa, target, answers, 2, 24)
    assert found.sum(1) == pytest.approx([1, 1])  # with the whole vocabulary every label has a rank
    hits = np.zeros(2)
    for a in answers:
        final = watch(target.model, torch.from_numpy(a.tokens)[None], (FINAL,)).final[0]
        for root in range(a.num_prompt, len(a.tokens) - 2):
            logits = medusa.head_logits(final[root - 1 : root], torch.tensor([a.tokens[root]]), 2)[0]
            hits += [int(logits[h].argmax()) == a.tokens[root + 1 + h] for h in range(2)]
    total = sum(len(a.tokens) - 2 - a.num_prompt for a in answers)
    assert found[1, 0] == pytest.approx(hits[1] / total)


# ---- the command ----


@pytest.mark.slow
def test_the_command_trains_a_head_for_a_real_model_and_resumes(data, tmp_path, capsys):
    model = convert_stories(data, tmp_path / "stories")
    common = [
        "--method", "medusa", "--model", str(model), "--data", str(data), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"),
        "--device", "cpu", "--prompts", "48", "--samples", "1", "--max-tokens", "24", "--batch", "4", "--length", "96", "--heads", "2",
    ]  # fmt: skip
    assert train.main([*common, "--steps", "4"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert train.main([*common, "--steps", "8", "--resume"]) == 0
    card = read_card(tmp_path / "out" / "medusa-stories.safetensors")
    assert card["steps"] == 8 and json.loads((tmp_path / "out" / "medusa-stories.json").read_text()) == card
    assert len(card["accuracies"]) == 2 and card["data"]["gsm8k"]["dropped"] == 80
    assert first["held_out"].keys() == card["held_out"].keys() and "static tree of 64" in card["held_out"]
    assert all(1 <= r["tokens_per_step"] <= 3 and r["steps"] > 0 for r in card["held_out"].values())
    assert train.main([*common, "--steps", "9", "--resume", "--heads", "3"]) == 2
    assert "other data or settings" in capsys.readouterr().err


def test_what_is_held_out_follows_from_the_text():
    prompts = [Prompt("x", f"prompt {i}") for i in range(800)]
    share = np.mean([is_held_out(p) for p in prompts])
    assert 0.03 < share < 0.1 and [is_held_out(p) for p in prompts] == [is_held_out(replace(p, source="y")) for p in prompts]
