"""Every drafter and tree on small random models in fp32: the text is that of plain decoding, and drafts are aligned."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.request import SamplingParams
from engine.sampler import draw, uniform
from engine.speculative.base import DraftOptions, Shape
from engine.speculative.device import DraftBatch
from engine.speculative.heads import save_head
from engine.speculative.ngram import LONGEST, SHORTEST, lookup
from engine.speculative.registry import load_drafters
from engine.speculative.rows import newest_rows
from tests.engine.speculative.heads_of import card, perfect_head, random_head
from tests.engine.speculative.reference import PAGE, Loop, is_perfect, mean_accepted, plain_greedy, small_target

NEW = 24
PROMPTS = [[3, 5, 7, 11, 2, 3, 5, 7], [1], [9, 9, 4, 20, 6, 6, 6, 8, 10, 12, 9, 9, 4]]
CHAIN, STATIC, DYNAMIC = Shape.CHAIN, Shape.STATIC, Shape.DYNAMIC


@pytest.fixture(scope="module")
def target():
    return small_target()


def options_for(name, target, folder):
    """Every form of every drafter."""
    trees = [
        (CHAIN, 1, 1, 1),
        (CHAIN, 4, 1, 4),
        (STATIC, 3, 3, 9),
        (STATIC, 3, 4, 7),
        (DYNAMIC, 3, 4, 10),
        (DYNAMIC, 5, 3, 30),
        (DYNAMIC, 1, 4, 4),
    ]
    base = DraftOptions(name)
    if name == "ngram":
        return [replace(base, depth=d, width=w, budget=n) for d, w, n in [(4, 1, 4), (5, 3, 8), (2, 2, 3)]]
    if name == "medusa":
        heads = [random_head(target, name, folder), random_head(target, name, folder, sees_token=True, heads=4)]
        return [replace(base, source=h, shape=s, depth=3, budget=n) for h in heads for s, n in [(STATIC, 9), (CHAIN, 3), (STATIC, 64)]]
    allowed = load_drafters()[name].shapes
    if name == "draft_model":
        sources = [{"layers": 1}, {"layers": 3}]
    elif name == "eagle":
        sources = [{"source": random_head(target, name, folder, **more)} for more in ({}, {"taps": [0, 1, 2]})]
    else:
        sources = [{"source": random_head(target, name, folder)}]
    return [replace(base, shape=s, depth=d, width=w, budget=n, **src) for src in sources for s, d, w, n in trees if s in allowed]


@pytest.mark.parametrize("name", sorted(load_drafters()))
@torch.inference_mode()
def test_greedy_text_is_that_of_plain_decoding(name, target, tmp_path):
    plain = [plain_greedy(target, p, NEW) for p in PROMPTS]
    accepted = 0
    for options in options_for(name, target, tmp_path):
        loop = Loop(target, options)
        some = [loop.add(p, new=NEW) for p in PROMPTS]
        loop.run(some, NEW)
        assert [s.tokens[s.prompt :][:NEW] for s in some] == plain, options
        accepted += sum(len(a.path) for s in some for _, a in s.steps)
    assert accepted > 0  # at least some of it was drafts


@torch.inference_mode()
def test_rooms_that_change_from_step_to_step_change_no_text(target, tmp_path):
    """Budgets cut at random, none at all at times: what a scheduler does that has little room or many requests."""
    rng = np.random.default_rng(0)
    for options in (
        DraftOptions("draft_model", shape=DYNAMIC, depth=3, width=3, budget=9, layers=2),
        DraftOptions("eagle", random_head(target, "eagle", tmp_path), DYNAMIC, 3, 4, 12),
    ):
        loop = Loop(target, options)
        some = [loop.add(p, chunk=3, new=NEW) for p in PROMPTS]
        loop.run(some, NEW, room=lambda: int(rng.integers(0, 6)))
        assert [s.tokens[s.prompt :][:NEW] for s in some] == [plain_greedy(target, p, NEW) for p in PROMPTS]


@torch.inference_mode()
def test_sampled_text_is_that_of_plain_sampling_with_the_same_seed(target):
    params = SamplingParams(temperature=1.0, top_k=12, top_p=0.95)

    def choose(logits, position):
        return draw(logits, params, uniform(7, 0, position))

    plain = Loop(target, DraftOptions("ngram", depth=1, width=1, budget=1), choose=choose)
    alone = plain.add(PROMPTS[0], new=NEW)
    plain.run([alone], NEW, room=lambda: 0)
    assert all(len(tree) == 0 for tree, _ in alone.steps)
    loop = Loop(target, DraftOptions("draft_model", shape=DYNAMIC, depth=3, width=4, budget=12, layers=3), choose=choose)
    s = loop.add(PROMPTS[0], new=NEW)
    loop.run([s], NEW)
    assert s.tokens[: s.prompt + NEW] == alone.tokens[: alone.prompt + NEW]
    assert mean_accepted(s) > 0.3 and s.tokens[s.prompt :][:NEW] != plain_greedy(target, PROMPTS[0], NEW)


# ---- alignment: with the target's own weights every draft is right ----


def rounded(target):
    """Weights that survive bfloat16, embeddings of unit mean square."""
    model = target.model
    table = model.embedding / model.embedding.pow(2).mean(1, keepdim=True).sqrt()
    model.embedding = table.bfloat16().float()
    for layer in model.layers:
        for name in ("input_norm", "qkv", "o", "post_norm", "gate_up", "down"):
            setattr(layer, name, getattr(layer, name).bfloat16().float())
    model.norm = model.norm.bfloat16().float()
    return target


def perfect_loops(tmp_path):
    """(name, Loop) with drafters that cannot be wrong."""
    whole = small_target(seed=5)
    yield Loop(whole, DraftOptions("draft_model", shape=CHAIN, depth=4, budget=4, layers=3))
    yield Loop(whole, DraftOptions("draft_model", shape=DYNAMIC, depth=4, width=3, budget=12, layers=3))
    one = rounded(small_target(seed=6, num_layers=1))
    # no unit mean square after rounding is exact: MTP's norm of the embedding moves it by less than a guess
    yield Loop(one, DraftOptions("eagle", perfect_head(one, "eagle", tmp_path), CHAIN, 4, 1, 4))
    yield Loop(one, DraftOptions("eagle", perfect_head(one, "eagle", tmp_path), DYNAMIC, 4, 3, 14))
    yield Loop(one, DraftOptions("mtp", perfect_head(one, "mtp", tmp_path), CHAIN, 3, 1, 3))


@torch.inference_mode()
def test_a_perfect_drafter_is_always_right_after_chunks_prefix_hits_and_rejections(tmp_path):
    for loop in perfect_loops(tmp_path):
        prompt = PROMPTS[2] + PROMPTS[0]
        whole = loop.add(prompt, new=NEW)
        chunks = loop.add(prompt, chunk=3, new=NEW)
        hit = loop.add([*prompt[:13], 1, 2, 3], shares=whole, new=NEW)
        assert hit.pages[:3] == whole.pages[:3] and hit.pages[3] != whole.pages[3]
        loop.run([whole, chunks, hit], NEW, room=None)
        for s in (whole, chunks, hit):
            assert is_perfect(s), loop.options


@torch.inference_mode()
def test_a_perfect_drafter_stays_right_after_a_rejection(tmp_path):
    """One step is verified against another choice than the drafter could know; the steps after it are right again."""
    for loop in perfect_loops(tmp_path):
        s = loop.add(PROMPTS[0], new=NEW)
        loop.step([s])
        honest = loop.choose
        wrong = {s.root + 1}
        loop.choose = lambda logits, position, honest=honest, wrong=wrong: (
            logits.argsort()[0] if position in wrong else honest(logits, position)
        )  # fmt: skip
        loop.step([s])
        assert not is_perfect(s)
        loop.choose = honest
        s.steps.clear()
        loop.run([s], NEW)
        assert is_perfect(s) and len(s.steps) > 2, loop.options


@torch.inference_mode()
def test_a_misaligned_drafter_would_be_seen(tmp_path):
    """The same figure with each token one place off (vllm#14647) is far from perfect."""
    loop = next(iter(perfect_loops(tmp_path)))
    s = loop.add(PROMPTS[0], new=NEW)
    real = loop.drafter.propose
    loop.drafter.propose = lambda rows, state: real(replace(rows, tokens=rows.history[0, rows.positions - 1]), state)
    loop.run([s], NEW)
    assert not is_perfect(s)


@torch.inference_mode()
def test_medusas_heads_start_from_the_state_that_chose_the_root(target, tmp_path):
    """Heads of zero weights repeat the target's own choice: the root."""
    hidden = target.config.hidden_size
    tensors = {f"{h}.0.weight": torch.zeros(hidden, hidden) for h in range(2)} | {f"{h}.0.bias": torch.zeros(hidden) for h in range(2)}
    path = tmp_path / "zero.safetensors"
    save_head(path, card(target, "medusa", heads=2, blocks=1, accuracies=[[0.5, 0.1]] * 2), tensors)
    loop = Loop(target, DraftOptions("medusa", str(path), budget=2, width=1))
    s = loop.add(PROMPTS[0], new=NEW)
    roots = []
    while len(s.tokens) < s.prompt + NEW:
        roots.append(s.tokens[-1])
        loop.step([s])
    assert [tree.tokens[0] for tree, _ in s.steps] == roots


@torch.inference_mode()
def test_rows_of_a_fixed_count_draft_what_ragged_rows_draft(target, tmp_path):
    """What a graph uses: the last rows again, computed or not, also of sequences shorter than that and of padding."""
    for name in ("eagle", "mtp"):
        options = DraftOptions(name, random_head(target, name, tmp_path), CHAIN, 3, 1, 3)
        ragged, fixed = Loop(target, options), Loop(target, options)
        pairs = [[loop.add(p, new=NEW) for p in PROMPTS] for loop in (ragged, fixed)]
        real = fixed.drafter.propose

        def propose(rows, state, real=real):
            pad = torch.zeros(1, rows.history.shape[1], dtype=torch.int64)
            lens, table = torch.cat([rows.seq_lens, torch.zeros(1).int()]), torch.cat([rows.block_table, rows.block_table[:1] * 0])
            drafts = real(newest_rows(torch.cat([rows.history, pad]), lens, table, 4, PAGE), state)
            parts = (x[:-1] for x in (drafts.tokens, drafts.parents, drafts.probabilities, drafts.lens))
            return DraftBatch(*parts, drafts.max_depth, drafts.max_width)

        fixed.drafter.propose = propose
        for _ in range(8):
            ragged.step(pairs[0])
            fixed.step(pairs[1])
        for a, b in zip(*pairs, strict=True):
            assert a.tokens == b.tokens
            for (x, p), (y, q) in zip(a.steps, b.steps, strict=True):
                assert x.tokens.tolist() == y.tokens.tolist() and p == q
                assert x.probabilities == pytest.approx(y.probabilities, abs=1e-4)


# ---- n-gram ----


def lookup_by_hand(text, depth, width):
    found = []
    for end in range(len(text) - 1):
        n = 0
        while n < LONGEST and end - n >= 0 and text[end - n] == text[len(text) - 1 - n]:
            n += 1
        if n >= SHORTEST:
            found.append((n, end))
    best = sorted(found, reverse=True)[:width]
    return [text[end + 1 : end + 1 + depth] for _, end in best]


def test_prompt_lookup_is_the_longest_match_and_then_the_latest():
    rng = np.random.default_rng(0)
    for _ in range(300):
        texts = [rng.integers(0, 3, rng.integers(1, 25)).tolist() for _ in range(3)]
        size = max(map(len, texts)) + 2
        history = torch.tensor([t + [int(rng.integers(0, 3)) for _ in range(size - len(t))] for t in texts])  # rubbish behind the end
        tokens, lens = lookup(history, torch.tensor([len(t) for t in texts]), 4, 3)
        got = [[t[:n] for t, n in zip(ts, ns, strict=True) if n] for ts, ns in zip(tokens.tolist(), lens.tolist(), strict=True)]
        assert got == [lookup_by_hand(t, 4, 3) for t in texts]


@torch.inference_mode()
def test_a_text_that_repeats_itself_is_drafted_from_itself(target):
    loop = Loop(target, DraftOptions("ngram", depth=4, width=2, budget=8))
    s = loop.add([1, 2, 3, 4, 5, 6, 1, 2, 3], new=NEW)
    s.tokens[-1] = 4  # as if the model had said so
    loop.step([s])
    assert s.steps[0][0].tokens.tolist()[:3] == [5, 6, 1]
