"""What each method learns, in plain differentiable torch: the same formulas as the drafters, on whole padded texts.

    target     feature f_i = hidden state after token i, law p_i = softmax(lm_head(f_i)): no gradient
    medusa     head d at i guesses t_{i+1+d}:             sum_d 0.8^(d-1) CE(head_d(f_i), t_{i+1+d})
    mtp, eagle slot j: (t_j, f_{j-1}) → what follows t_j: CE(student_j, p_j), and for EAGLE-1/2 smooth-L1(f'_j, f_j)

Guesses are fed back while training, as they are when drafting (EAGLE-3's training-time test): in round s a slot's feature
is the student's own of round s - 1, and it sees the keys of round 0 up to s places back and, nearer, those of the rounds
between: exactly the K/V that it would find s tokens into a draft.

Tokens of prompts are read and not learned. Does not know files, engines or optimisers. Rejected: the engine's ops (their
rope works in place, which a gradient does not survive).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.models.decoder import Decoder, Layer
from engine.speculative.base import FINAL, Tap
from engine.speculative.medusa import run_heads

DECAY = 0.8  # a guess further ahead counts less
FEATURE_WEIGHT = 0.5


@dataclass(frozen=True)
class Texts:
    """A batch of padded texts.

    Args:
        tokens: int64 [b, l].
        learned: bool [b, l]: the token belongs to an answer (and is no padding).
    """

    tokens: torch.Tensor
    learned: torch.Tensor


@dataclass(frozen=True)
class Seen:
    """What the target made of Texts: final [b, l, hidden] and taps [b, l, width], or final itself."""

    final: torch.Tensor
    taps: torch.Tensor


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = x.float()
    y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps)
    return (weight * y.to(x.dtype)).to(x.dtype)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rope of x [b, heads, l, dim] by cos and sin [l, dim / 2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def project(model: Decoder, layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [b, heads, l, dim] and k, v [b, kv_heads, l, dim] of x [b, l, hidden], turned by position."""
    config, (b, l, _) = model.config, x.shape
    heads, kv = config.num_heads, config.num_kv_heads
    qkv = F.linear(rms_norm(x, layer.input_norm, config.rms_norm_eps), layer.qkv, layer.qkv_bias)
    q, k, v = qkv.view(b, l, heads + 2 * kv, config.head_dim).split((heads, kv, kv), 2)
    q, k = model.queries_keys(layer, q, k, _Norms)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    cos, sin = model.cos[:l], model.sin[:l]
    return turn(q, cos, sin), turn(k, cos, sin), v


class _Norms:
    """What a family's queries_keys needs of Ops."""

    rms_norm = staticmethod(rms_norm)


def finish(model: Decoder, layer: Layer, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The rest of a layer after attention: out [b, heads, l, dim]."""
    b, l, _ = x.shape
    x = x + F.linear(out.transpose(1, 2).reshape(b, l, -1), layer.o, layer.o_bias)
    gate, up = F.linear(rms_norm(x, layer.post_norm, model.config.rms_norm_eps), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)


@torch.no_grad()
def watch(model: Decoder, tokens: torch.Tensor, taps: Sequence[Tap]) -> Seen:
    """The target over whole texts; padding at the end is seen by nothing that counts."""
    x, kept = F.embedding(tokens, model.embedding), {}
    for index, layer in enumerate(model.layers):
        q, k, v = project(model, layer, x)
        x = finish(model, layer, x, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        if index in taps:
            kept[index] = x
    kept[FINAL] = rms_norm(x, model.norm, model.config.rms_norm_eps)
    return Seen(kept[FINAL], torch.cat([kept[tap] for tap in taps], -1) if tuple(taps) != (FINAL,) else kept[FINAL])


def attend_rounds(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """Attention s rounds into a draft, for every slot at once.

    Args:
        q: [b, heads, l, dim] of round s = len(keys) - 1.
        keys, values: of rounds 0 to s, [b, kv_heads, l, dim]. Slot j of round s sees round 0 up to slot j - s, and of
            round r ≥ 1 the slot j - s + r.
    """
    rounds, l, scale = len(keys) - 1, q.shape[2], q.shape[3] ** -0.5
    group = q.shape[1] // keys[0].shape[1]
    keys, values = ([t.repeat_interleave(group, 1) for t in x] for x in (keys, values))
    place = torch.arange(l, device=q.device)
    scores = (q @ keys[0].transpose(2, 3)).float() * scale
    scores = scores.masked_fill(place[None, :] > place[:, None] - rounds, -torch.inf)
    near = []
    for r in range(1, rounds + 1):
        back = rounds - r
        dot = (q * _shifted(keys[r], back)).sum(-1).float() * scale
        near.append(dot.masked_fill(place < back, -torch.inf))
    weights = torch.cat([scores, *(n[..., None] for n in near)], -1)
    weights = torch.softmax(weights, -1).to(q.dtype)  # a slot sees itself, so no row is empty
    out = weights[..., :l] @ values[0]
    for r in range(1, rounds + 1):
        out = out + weights[..., l + r - 1, None] * _shifted(values[r], rounds - r)
    return out


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """x [b, h, l, d] with slot j holding what was at j - by."""
    return x if by == 0 else F.pad(x, (0, 0, by, 0))[:, :, : x.shape[2]]


# ---- the students ----


@dataclass(frozen=True)
class Plan:
    """What is trained.

    Args:
        method: "medusa", "eagle" or "mtp".
        taps: features that are read: (FINAL,), or three layers (EAGLE-3).
        heads, blocks, sees_token: Medusa's.
        rounds: how often an EAGLE or MTP head is fed its own guesses while it learns.
    """

    method: str
    taps: tuple[Tap, ...] = (FINAL,)
    heads: int = 4
    blocks: int = 1
    sees_token: bool = False
    rounds: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Loss:
    """A batch's loss, and how often each depth's best guess was right (of those that had a label)."""

    total: torch.Tensor
    right: list[torch.Tensor]


def loss_of(model: Decoder, weights: Mapping[str, torch.Tensor], texts: Texts, plan: Plan) -> Loss:
    """Of one batch."""
    seen = watch(model, texts.tokens, plan.taps)
    return (medusa_loss if plan.method == "medusa" else chain_loss)(model, weights, texts, seen, plan)


def layer_of(weights: Mapping[str, torch.Tensor]) -> Layer:
    """The head's layer as drafters take it, from trainable tensors."""
    names = ("input_norm", "qkv", "o", "post_norm", "gate_up", "down")
    found = {name: weights[f"layer.{name}"] for name in names}
    return Layer(**found, qkv_bias=None, o_bias=None, gate_up_bias=None, down_bias=None)


def medusa_loss(model: Decoder, weights: Mapping[str, torch.Tensor], texts: Texts, seen: Seen, plan: Plan) -> Loss:
    """Hard labels: the text's own tokens."""
    heads, blocks = plan.heads, plan.blocks
    stacked = [[(weights[f"{h}.{i}.weight"], weights[f"{h}.{i}.bias"]) for i in range(blocks)] for h in range(heads)]
    usable = texts.tokens.shape[1] - 1
    tokens, learned = F.pad(texts.tokens, (0, heads)), F.pad(texts.learned, (0, heads))  # labels past the end do not count
    roots = learned[:, 1 : usable + 1]  # the root t_{i+1} is an answer's token
    feature = seen.final[:, :usable][roots]
    embedded = F.embedding(tokens[:, 1 : usable + 1][roots], model.embedding)
    given = [weights[f"{h}.token"] for h in range(heads)] if "0.token" in weights else None
    x = run_heads(feature, embedded, stacked, given)  # [m, heads, hidden]
    total, right = x.new_zeros((), dtype=torch.float32), []
    for d in range(heads):
        at = slice(2 + d, usable + 2 + d)
        label, counts = tokens[:, at][roots], learned[:, at][roots]
        logits, some = F.linear(x[:, d][counts], model.lm_head).float(), max(1, int(counts.sum()))
        total = total + DECAY**d * F.cross_entropy(logits, label[counts], reduction="sum") / some  # short answers: no label, no loss
        right.append((logits.argmax(-1) == label[counts]).float().mean().detach())
    return Loss(total, right)


def chain_loss(model: Decoder, weights: Mapping[str, torch.Tensor], texts: Texts, seen: Seen, plan: Plan) -> Loss:
    """EAGLE and MTP, soft labels: the target's own laws."""
    features = plan.method == "eagle" and plan.taps == (FINAL,)  # EAGLE-1/2: they shall become the target's
    layer, tokens = layer_of(weights), texts.tokens
    embedded = F.embedding(tokens, model.embedding)
    feature = F.linear(seen.taps, weights["fuse"]) if "fuse" in weights else seen.taps
    keys, values, total, right = [], [], seen.final.new_zeros((), dtype=torch.float32), []
    for s in range(plan.rounds):
        before = F.pad(feature, (0, 0, 1, 0))[:, :-1]  # slot j gets the feature of j - 1
        x = enter(plan.method, weights, embedded, before, model.config.rms_norm_eps)
        q, k, v = project(model, layer, x)
        keys.append(k)
        values.append(v)
        x = finish(model, layer, x, attend_rounds(q, keys, values))
        normed = rms_norm(x, weights["norm"], model.config.rms_norm_eps)
        feature = x if "fuse" in weights else normed
        counts = texts.learned.clone()  # slot j guesses t_{j+1}; the root of its draft, t_{j-s}, is an answer's token
        counts[:, :s] = False
        counts[:, s:] &= texts.learned[:, : tokens.shape[1] - s]
        counts[:, :-1] &= texts.learned[:, 1:]
        counts[:, -1] = False
        student, some = F.linear(normed[counts], model.lm_head).float(), max(1, int(counts.sum()))
        with torch.no_grad():
            teacher = F.linear(seen.final[counts], model.lm_head).float().softmax(-1)
        loss = -(teacher * student.log_softmax(-1)).sum() / some
        if features:
            apart = F.smooth_l1_loss(normed[counts].float(), seen.final[counts].float(), reduction="sum")
            loss = loss + FEATURE_WEIGHT * apart / (some * normed.shape[-1])
        total = total + DECAY**s * loss
        right.append((student.argmax(-1) == teacher.argmax(-1)).float().mean().detach())
    return Loss(total, right)


def enter(method: str, weights: Mapping[str, torch.Tensor], embedded: torch.Tensor, before: torch.Tensor, eps: float) -> torch.Tensor:
    """The layer's input, as Eagle.enter and MTP.enter make it."""
    if "token_norm" in weights:
        embedded, before = rms_norm(embedded, weights["token_norm"], eps), rms_norm(before, weights["feature_norm"], eps)
    return F.linear(torch.cat([embedded, before] if method == "eagle" else [before, embedded], -1), weights["fc"])


def new_weights(model: Decoder, plan: Plan) -> dict[str, torch.Tensor]:
    """Where training begins, fp32: every head repeats what the target chose last, and has yet to add anything.

    A layer has the target's last weights, but o and down are zero: of SmolLM2's first 30 steps, 17 % of guesses were right
    then, and 6 % with the last layer as it is, 4 % with a random fc.
    """
    config, g = model.config, torch.Generator().manual_seed(plan.seed)
    method, taps, heads, blocks = plan.method, plan.taps, plan.heads, plan.blocks
    hidden, device = config.hidden_size, model.embedding.device
    if method == "medusa":
        start = {f"{h}.{i}.weight": torch.zeros(hidden, hidden) for h in range(heads) for i in range(blocks)}
        start |= {f"{h}.{i}.bias": torch.zeros(hidden) for h in range(heads) for i in range(blocks)}
        start |= {f"{h}.token": torch.zeros(hidden, hidden) for h in range(heads)} if plan.sees_token else {}
        for h in range(heads):
            for i in range(blocks - 1):  # or all blocks of a head would stay alike
                start[f"{h}.{i}.weight"] += torch.randn(hidden, hidden, generator=g) * 0.01
        return {name: t.to(device) for name, t in start.items()}
    last, eye, zero = model.layers[-1], torch.eye(hidden), torch.zeros(hidden, hidden)
    on_final = taps == (FINAL,)
    size = model.norm.float().pow(2).mean().sqrt().cpu()  # of a final feature
    start = {
        "fc": torch.cat([zero, eye] if method == "eagle" else [eye, zero], 1),
        "norm": torch.ones(hidden) * size if on_final else model.norm,
    }
    for name in ("input_norm", "qkv", "o", "post_norm", "gate_up", "down"):
        weight = getattr(last, name)
        start[f"layer.{name}"] = torch.zeros_like(weight) if name in ("o", "down") else weight
    if method == "mtp" or not on_final:
        start |= {"token_norm": torch.ones(hidden), "feature_norm": torch.ones(hidden)}
    if not on_final:
        start["fuse"] = torch.cat([zero, zero, eye], 1)
    return {name: t.detach().to(device, torch.float32).clone().contiguous() for name, t in start.items()}
