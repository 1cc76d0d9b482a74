"""Drafters on a GPU with the Triton kernels: the text of plain decoding in fp32, and a whole step inside one CUDA graph."""

from dataclasses import replace

import pytest
import torch

from engine.models.decoder import Decoder
from engine.ops import choose_ops
from engine.speculative.accept import follow
from engine.speculative.base import DraftOptions, Shape, Target
from engine.speculative.compact import move_tokens, moves
from tests.engine.speculative.heads_of import random_head
from tests.engine.speculative.reference import PAGE, Loop, plain_greedy, small_config, small_target, small_weights

pytestmark = pytest.mark.gpu
SHAPE = dict(hidden_size=128, intermediate_size=256, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=96)
NEW = 24
PROMPTS = [[3, 5, 7, 11, 2, 3, 5, 7], [1], [9, 9, 4, 20, 6, 6, 6, 8, 10, 12, 9, 9, 4]]


def shape():
    config = small_config(**SHAPE)
    return {**SHAPE, "rope": replace(config.rope, dim=32)}


@pytest.fixture(scope="module")
def targets():
    """(the model on the CPU, the same on the GPU with Triton kernels)."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config = small_config(**shape())
    ops, _ = choose_ops("triton", torch.device("cuda"), torch.float32)
    weights = {name: t.cuda() for name, t in small_weights(config).items()}
    return small_target(**shape()), Target(Decoder(config, weights), ops)


def options_of(target, folder):
    return [
        DraftOptions("ngram", depth=4, width=2, budget=8),
        DraftOptions("draft_model", shape=Shape.DYNAMIC, depth=4, width=4, budget=24, layers=2),
        DraftOptions("draft_model", shape=Shape.STATIC, depth=3, width=3, budget=9, layers=1),
        DraftOptions("medusa", random_head(target, "medusa", folder), depth=3, budget=12),
        DraftOptions("eagle", random_head(target, "eagle", folder), Shape.DYNAMIC, 3, 4, 12),
        DraftOptions("mtp", random_head(target, "mtp", folder), Shape.CHAIN, 2, 1, 2),
    ]


@torch.inference_mode()
def test_fp32_text_on_the_gpu_is_that_of_plain_decoding(targets, tmp_path):
    cpu, gpu = targets
    plain = [plain_greedy(cpu, p, NEW) for p in PROMPTS]
    for options in options_of(cpu, tmp_path):
        with torch.device("cuda"):
            loop = Loop(gpu, options, checked=False)
            some = [loop.add(p, new=NEW) for p in PROMPTS]
            loop.run(some, NEW)
        assert [s.tokens[s.prompt :][:NEW] for s in some] == plain, options


@torch.inference_mode()
def test_a_graph_holds_a_whole_step(targets, tmp_path):
    """Captured once, replayed on other rows: the drafts and the accepted path are those of the eager step."""
    cpu, gpu = targets
    for options in options_of(cpu, tmp_path):
        with torch.device("cuda"):
            loop = Loop(gpu, options, checked=False)
            some = [loop.add(p, new=NEW) for p in PROMPTS[::2]]
            loop.step(some)
            first = loop.rows([(s, s.root, len(s.tokens)) for s in some])
            kept = {f: getattr(first, f).clone() for f in first.__dataclass_fields__ if isinstance(getattr(first, f), torch.Tensor)}
            static = replace(first, **{**kept, "history": torch.zeros(len(some), 96, dtype=torch.int64)})

            def step(rows=static, loop=loop):
                drafts = loop.drafter.propose(rows, loop.state)
                chosen = torch.ones(len(drafts.tokens), drafts.tokens.shape[1] + 1, dtype=torch.int64)
                out = follow(drafts, chosen)
                source, destination = moves(out.path, rows.positions[rows.last], rows.block_table, PAGE)
                move_tokens(loop.attention.arena, gpu.config, PAGE, torch.float32, source, destination)
                return drafts.tokens, drafts.parents, drafts.masks(), out.tokens(drafts)

            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                step()
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = step()
            loop.step(some)
            rows = loop.rows([(s, s.root, len(s.tokens)) for s in some])
            for name in kept:
                if name != "history":
                    getattr(static, name).copy_(getattr(rows, name))
            static.history[:, : rows.history.shape[1]] = rows.history
            before = loop.attention.arena.clone()
            graph.replay()
            torch.cuda.synchronize()
            found = [x.clone() for x in captured]
            loop.attention.arena.copy_(before)
            for a, b in zip(found, step(), strict=True):
                assert torch.equal(a, b), options
