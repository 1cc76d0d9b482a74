"""The training loop: AdamW over a dictionary of tensors, a learning rate that falls to zero by the end, a state that resumes.

The end is a time, a number of steps, or both; the rate follows whichever is nearer. A step's batch depends on its number
only, so a run that was stopped and resumed has learned from the same batches. The state is one safetensors file: weights,
AdamW's two moments, and the curve.

Its progress is a terminal's (show), so its sentences need no words. Does not know methods, models or texts. Rejected:
torch.save (a pickle), a schedule by epochs (a visit to a GPU is minutes).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.errors import EngineError
from engine.speculative.losses import Loss

WARM_UP = 30  # steps
CLIP = 1.0  # of the gradient's norm
KEEP_EVERY = 30.0  # seconds between two states
POINTS = 60  # of the curve that is kept

Weights = dict[str, torch.Tensor]
Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Learning:
    """How long and how fast.

    Args:
        rate: the highest learning rate.
        seconds, steps: the end; steps None: the time alone.
        file: the state.
        resume: begin with it.
    """

    rate: float
    seconds: float
    steps: int | None
    file: Path
    resume: bool = False


@dataclass
class State:
    """Where training is."""

    weights: Weights
    first: Weights  # AdamW's moments
    second: Weights
    step: int = 0
    seconds: float = 0.0
    curve: tuple[dict, ...] = ()


def learn(start: Weights, loss_at: Callable[[Weights, int], Loss], learning: Learning, key: Mapping, show: Progress) -> State:
    """Train from `start`, or from the kept state.

    Args:
        loss_at: (weights, step) → Loss.
        key: what the state depends on; a state of another run is refused.
    Raises:
        EngineError: "training_failed" if there is nothing to resume, or the loss is no number.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
    state = load_state(learning.file, digest, start) if learning.resume else fresh(start)
    for weight in state.weights.values():
        weight.requires_grad_(True)
    kept_at, began, before, since = time.monotonic(), time.monotonic(), state.seconds, []
    while (done := _done(state, learning)) < 1:
        loss = loss_at(state.weights, state.step)
        grads = torch.autograd.grad(loss.total, list(state.weights.values()))
        update(state, dict(zip(state.weights, grads, strict=True)), learning.rate * _shape(state.step, done))
        state.step += 1
        state.seconds = before + time.monotonic() - began
        since.append((loss.total.detach(), [r.detach() for r in loss.right]))
        if len(since) >= 10 or _done(state, learning) >= 1:  # asking for the value waits for the device
            _note(state, since)
            since = []
            last = state.curve[-1]
            right = " ".join(f"{100 * r:.0f}" for r in last["right"])
            show(_done(state, learning), f"Learning: step {state.step:,}, loss {last['loss']:.3f}, right by depth {right} %")
        if time.monotonic() - kept_at > KEEP_EVERY:
            save_state(learning.file, digest, state)
            kept_at = time.monotonic()
    save_state(learning.file, digest, state)
    return state


def fresh(start: Weights) -> State:
    """At step 0."""
    return State({n: t.clone() for n, t in start.items()}, *({n: torch.zeros_like(t) for n, t in start.items()} for _ in "mv"))


@torch.no_grad()
def update(state: State, grads: Weights, rate: float) -> None:
    """One step of AdamW, the gradient's norm clipped; matrices decay, vectors do not."""
    norm = torch.stack([g.float().norm() for g in grads.values()]).norm()
    scale = (CLIP / (norm + 1e-6)).clamp(max=1.0)
    b1, b2, t = 0.9, 0.95, state.step + 1
    for name, weight in state.weights.items():
        grad, first, second = grads[name] * scale, state.first[name], state.second[name]
        first.lerp_(grad, 1 - b1)
        second.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        step = (first / (1 - b1**t)) / ((second / (1 - b2**t)).sqrt() + 1e-8)
        if weight.ndim > 1:
            weight.mul_(1 - rate * 0.01)
        weight.sub_(step, alpha=rate)


def _done(state: State, learning: Learning) -> float:
    return max(state.seconds / max(learning.seconds, 1e-9), state.step / learning.steps if learning.steps else 0.0)


def _shape(step: int, done: float) -> float:
    """Warm up, then a cosine that ends at zero."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def _note(state: State, since: list) -> None:
    """Add a mean to the curve, thinned to every second point when it is full."""
    loss = float(torch.stack([x for x, _ in since]).mean())
    if not math.isfinite(loss):
        raise EngineError("training_failed", "Training stopped: the loss is no number any more. Try a lower --lr.", reason="loss")
    right = torch.tensor([[float(r) for r in rights] for _, rights in since]).nanmean(0).tolist()
    curve = [*state.curve, {"step": state.step, "loss": round(loss, 4), "right": [round(r, 4) for r in right]}]
    state.curve = tuple(curve if len(curve) <= POINTS else [*curve[1::2], *([] if len(curve) % 2 == 0 else curve[-1:])])


# ---- the state's file ----


def save_state(file: Path, digest: str, state: State) -> None:
    """Written whole, then renamed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    parts = {"weights": state.weights, "first": state.first, "second": state.second}
    tensors = {f"{part}/{name}": t.detach().cpu().contiguous() for part, found in parts.items() for name, t in found.items()}
    facts = {"key": digest, "step": state.step, "seconds": state.seconds, "curve": list(state.curve)}
    part = file.with_suffix(".part")
    save_file(tensors, part, metadata={"state": json.dumps(facts)})
    part.replace(file)


def load_state(file: Path, digest: str, start: Weights) -> State:
    """Raises EngineError "training_failed" if it is not there, broken, or of another run."""
    try:
        with safe_open(file, framework="pt") as opened:
            facts = json.loads((opened.metadata() or {}).get("state", "null"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError):
        raise EngineError("training_failed", f"There is nothing to resume: {file.name} is missing or broken.", reason="state") from None
    if not isinstance(facts, dict) or facts.get("key") != digest:
        sentence = f"{file.name} is the state of a training with other data or settings. Leave --resume out to begin anew."
        raise EngineError("training_failed", sentence, reason="other")
    parts = ({name: tensors[f"{part}/{name}"].to(t.device) for name, t in start.items()} for part in ("weights", "first", "second"))
    return State(*parts, facts["step"], facts["seconds"], tuple(facts["curve"]))
