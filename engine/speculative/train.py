"""Trains a draft head for a model: python -m engine.speculative.train --method medusa|eagle|mtp --data FOLDER

Three parts, each with a progress line: the model answers the prompts (this engine, batched), the head learns from the
answers, and the file that ships is read back and measured on answers it has not seen. What was made is kept in --work, and
--resume goes on from there: answers, weights, optimiser and learning curve.

The head is one safetensors file of at most 16 MiB with its card inside and beside it. Refusals are one sentence on stderr
and exit code 2. Rejected: nn.Module and a trainer (a head is a dictionary of a dozen tensors), other texts than the
target's own (a drafter guesses what this model says).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from engine.build import build_core, commit, device_name
from engine.config import CacheConfig, EngineConfig, ModelSource
from engine.errors import EngineError
from engine.models.default import cache_folder
from engine.speculative.answers import Answer, Asking, answer_all, engine_for
from engine.speculative.base import FINAL, DraftOptions, Room, Shape, Target
from engine.speculative.heads import FOLDER, save_head, shape_of, target_of
from engine.speculative.losses import Plan, Texts, loss_of, new_weights
from engine.speculative.optimiser import Learning, State, learn
from engine.speculative.prompts import PromptSet, bad_data, load_prompts
from engine.speculative.registry import build_drafter
from engine.speculative.report import Report, head_accuracies, replay

ACCURACY_WIDTH = 10
REPORT_SECONDS = 60.0  # a tree
PAGES = 8192  # of 16 tokens, for the answers

Progress = Callable[[float, str], None]


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or 2 with a sentence."""
    args = parser().parse_args(argv)
    try:
        card = train(args, progress_line(sys.stderr))
    except EngineError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped. --resume goes on from the last state.", file=sys.stderr)
        return 130
    print(json.dumps({"file": card["file"], "held_out": card["held_out"]}))
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m engine.speculative.train", description=__doc__.splitlines()[0])
    p.add_argument("--method", required=True, choices=("medusa", "eagle", "mtp"))
    p.add_argument("--data", required=True, type=Path, help="folder with the data sets (engine/speculative/prompts.py names them)")
    p.add_argument("--model", help="checkpoint folder or Hub id; without it SmolLM2-135M-Instruct")
    p.add_argument("--out", type=Path, default=FOLDER, help="where the head is written")
    p.add_argument("--work", type=Path, help="where answers and the state of training are kept; without it the cache folder")
    p.add_argument("--resume", action="store_true", help="go on from the state in --work")
    p.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    p.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    p.add_argument("--minutes", type=float, default=5.0, help="of learning; answers and report not counted")
    p.add_argument("--answer-minutes", type=float, default=3.0, help="no new batch of answers is begun after that")
    p.add_argument("--steps", type=int, help="stop after so many steps, even if there is time")
    p.add_argument("--prompts", type=int, help="only so many of them, spread over the data sets")
    p.add_argument("--samples", type=int, default=4, help="answers to each prompt, the first one greedy")
    p.add_argument("--max-tokens", type=int, default=256)
    p.add_argument("--at-once", type=int, default=64, help="prompts that are answered in one batch")
    p.add_argument("--batch", type=int, default=16, help="texts a step")
    p.add_argument("--length", type=int, default=512, help="tokens of a text that are read")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--heads", type=int, default=4, help="medusa: places ahead")
    p.add_argument("--blocks", type=int, default=1, help="medusa: residual blocks of a head")
    p.add_argument("--sees-token", action="store_true", help="medusa: heads read the newest token too")
    p.add_argument("--features", default="final", choices=("final", "three"), help="eagle: three layers' features, as EAGLE-3")
    p.add_argument("--rounds", type=int, help="eagle, mtp: times that guesses are fed back while learning (3; mtp 1)")
    p.add_argument("--seed", type=int, default=0)
    return p


def train(args: argparse.Namespace, show: Progress) -> dict:
    """The card of the head that was written.

    Raises:
        EngineError: "bad_training_data", "training_failed", and what building an engine raises.
    """
    prompts = some_of(load_prompts(args.data), args.prompts)
    target, answers = ask_target(args, prompts, show)
    plan = plan_of(args, target.config.num_layers)
    learned, held = ([a for a in answers if a.held_out is out] for out in (False, True))
    if not learned or not held:
        raise bad_data(f"{len(learned)} answers to learn from and {len(held)} to measure on are too few")
    texts = Batches(learned, args.batch, args.length, args.seed, target.device)
    file = work_folder(args, target.name) / f"{args.method}.state.safetensors"
    learning = Learning(args.lr, args.minutes * 60, args.steps, file, args.resume)
    key = {"plan": asdict(plan), "texts": texts.key, "batch": args.batch, "length": args.length, "target": shape_of(target)}
    state = learn(new_weights(target.model, plan), lambda weights, step: _loss(target, weights, texts, step, plan), learning, key, show)
    card = {
        **describe(target, plan), "data": {**prompts.counts(), "answers": len(learned), "tokens": texts.count, "held_out": len(held)},
        "training": {**asdict(plan), "batch": args.batch, "length": args.length, "lr": args.lr, "samples": args.samples},
        "steps": state.step, "seconds": round(state.seconds, 1), "loss": list(state.curve),
        "device": device_name(target.device), "commit": commit(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    return finish(args.out / f"{args.method}-{target.name}.safetensors", target, state, card, held, show)


def _loss(target: Target, weights: dict[str, torch.Tensor], texts: Batches, step: int, plan: Plan):
    """On a GPU in the target's half precision; the weights that learn are fp32."""
    with torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=target.dtype is torch.bfloat16):
        return loss_of(target.model, weights, texts.batch(step), plan)


def some_of(prompts: PromptSet, count: int | None) -> PromptSet:
    """Only `count` of them, spread evenly."""
    if count is None or count >= len(prompts.kept):
        return prompts
    places = np.linspace(0, len(prompts.kept) - 1, max(1, count)).astype(int)
    return replace(prompts, kept=tuple(prompts.kept[i] for i in places))


def work_folder(args: argparse.Namespace, name: str) -> Path:
    return args.work if args.work is not None else cache_folder() / "drafters" / name


def ask_target(args: argparse.Namespace, prompts: PromptSet, show: Progress) -> tuple[Target, list[Answer]]:
    """The model and its answers; the engine that made them is gone, its memory free."""
    asking = Asking(args.samples, args.max_tokens, args.at_once)
    config = EngineConfig(source=ModelSource(args.model, args.device, args.dtype), cache=CacheConfig(num_pages=PAGES))
    core, loaded = build_core(engine_for(config, asking), show)
    target = target_of(loaded, core.runner.ops)
    deadline = time.monotonic() + args.answer_minutes * 60
    file = work_folder(args, target.name) / "answers.safetensors"
    answers = answer_all(core, loaded, prompts.kept, asking, file, show, lambda: time.monotonic() > deadline)
    return target, answers


def plan_of(args: argparse.Namespace, layers: int) -> Plan:
    """Low, middle and high as EAGLE-3 chooses them: near the beginning, in the middle, near the end."""
    three = (min(2, layers - 1), layers // 2, max(0, layers - 3)) if args.method == "eagle" and args.features == "three" else (FINAL,)
    rounds = args.rounds if args.rounds is not None else 1 if args.method == "mtp" else 3
    return Plan(args.method, three, args.heads, args.blocks, args.sees_token, rounds, args.seed)


class Batches:
    """Texts in an order that depends on the seed only. A text longer than `length` loses the beginning of its prompt or, if
    it must, the end of its answer."""

    def __init__(self, answers: Sequence[Answer], batch: int, length: int, seed: int, device: torch.device) -> None:
        self.answers, self.size, self.length, self.seed, self.device = answers, min(batch, len(answers)), length, seed, device
        self.count = sum(len(a.tokens) - a.num_prompt for a in answers)
        digest = hashlib.sha256(f"{seed}".encode())
        for a in answers:
            digest.update(a.tokens.tobytes())
        self.key = digest.hexdigest()

    def batch(self, step: int) -> Texts:
        per_epoch = len(self.answers) // self.size
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.answers))
        cut = [self._cut(self.answers[i]) for i in order[place * self.size : (place + 1) * self.size]]
        width = max(len(tokens) for tokens, _ in cut)
        tokens, learned = np.zeros((len(cut), width), np.int64), np.zeros((len(cut), width), bool)
        for row, (ids, start) in enumerate(cut):
            tokens[row, : len(ids)] = ids
            learned[row, start : len(ids)] = True
        return Texts(torch.from_numpy(tokens).to(self.device), torch.from_numpy(learned).to(self.device))

    def _cut(self, answer: Answer) -> tuple[np.ndarray, int]:
        drop = max(0, min(len(answer.tokens) - self.length, answer.num_prompt - 1))
        return answer.tokens[drop : drop + self.length], answer.num_prompt - drop


# ---- the file ----


def describe(target: Target, plan: Plan) -> dict:
    """What a drafter must know to run the head."""
    own = {"taps": list(plan.taps)}
    if plan.method == "medusa":
        own = {"heads": plan.heads, "blocks": plan.blocks, "sees_token": plan.sees_token}
    return {"method": plan.method, "model": target.name, "target": shape_of(target), "vocabulary": target.vocabulary, **own}


def finish(path: Path, target: Target, state: State, card: dict, held: Sequence[Answer], show: Progress) -> dict:
    """Write the head, read it back with the engine's drafter, measure, and write it with what was measured."""
    room = Room(target.config.max_position_embeddings, 2**20)
    if card["method"] == "medusa":
        heads = card["heads"]
        save_head(path, {**card, "accuracies": [[0.0]] * heads}, state.weights)
        show(0.2, "Measuring each head's guesses")
        drafter = build_drafter(target, DraftOptions("medusa", str(path), Shape.CHAIN, depth=heads, width=1), room)
        width = min(ACCURACY_WIDTH, target.config.vocab_size)
        card["accuracies"] = np.round(head_accuracies(drafter, target, held, heads, width), 4).tolist()
    save_head(path, card, state.weights)
    card["held_out"] = {}
    for name, options in trees(card, str(path)).items():
        show(0.5, f"Measuring on answers that were not learned from: {name}")
        end = time.monotonic() + REPORT_SECONDS
        found = replay(build_drafter(target, options, room), target, held, lambda end=end: time.monotonic() > end)
        card["held_out"][name] = as_card(found)
    size = save_head(path, card, state.weights)
    show(1.0, f"Wrote {path.name}, {size / 2**20:.1f} MiB")
    return {**card, "file": str(path), "bytes": size}


def trees(card: dict, source: str) -> dict[str, DraftOptions]:
    """What a head is measured with, by the name that the card says."""
    chain = {f"chain of {n}": DraftOptions(card["method"], source, Shape.CHAIN, n, 1, n) for n in (1, 3)}
    if card["method"] == "medusa":
        heads = card["heads"]
        return {f"static tree of {n}": DraftOptions("medusa", source, Shape.STATIC, heads, ACCURACY_WIDTH, n) for n in (16, 64)} | {
            f"chain of {n}": DraftOptions("medusa", source, Shape.CHAIN, n, 1, n) for n in {1, heads}
        }
    if card["method"] == "eagle":
        return chain | {
            f"dynamic tree of {n}": DraftOptions("eagle", source, Shape.DYNAMIC, depth, 8, n) for depth, n in ((4, 16), (6, 60))
        }
    return chain


def as_card(found: Report) -> dict:
    reached = [round(x, 4) for x in found.reached]
    return {"steps": found.steps, "tokens_per_step": round(found.tokens_per_step, 4), "reached_depth": reached}


def progress_line(stream) -> Progress:
    """One line that is overwritten; where it is no terminal, a line every ten seconds or when a part is done."""
    last = [0.0]

    def show(fraction: float, text: str) -> None:
        done = int(min(1.0, fraction) * 24)
        bar = f"[{'#' * done}{'.' * (24 - done)}] {text[:100]}"
        if stream.isatty():
            print(f"\r{bar:<130}", end="" if fraction < 1 else "\n", file=stream, flush=True)
        elif fraction >= 1 or time.monotonic() - last[0] > 10:
            last[0] = time.monotonic()
            print(bar, file=stream, flush=True)

    return show


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    raise SystemExit(main())
