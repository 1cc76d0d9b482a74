"""The job `tiles`: what an attention kernel did tile by tile, on the queries, keys and values of a real step.

    next step of the room   a TileProbe stands in the way of one layer. On a GPU the step itself runs the traced kernel
                            there; on a CPU its operands are kept, and a child runs the kernel on them in Triton's interpreter
    a step that is past     its sequences are computed again from the recorded token ids in a scratch room, up to where the
                            step began, then the step with the probe: badge "recomputed", with the largest difference in
                            the log-probability of the tokens that the step gave

What comes out is a TileTrace (engine/artifacts.py); on a GPU also a TrafficRun. The chosen row's scores and plain softmax
are computed here in fp64 from the same operands, so a view can hold the kernel's own numbers against them.

Deliberately does not know pictures, nor how tiles are cut (kernels/). Rejected: tracing every layer of a step (gigabytes for
a picture of one), the interpreter in the engine's process (it must be chosen before triton is imported).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.artifacts import SKIPPED, TILE, TileTrace, TrafficRun
from engine.batch import HostBatch, build_host
from engine.build import device_name
from engine.clock import median_us
from engine.config import with_knob
from engine.core import EngineCore
from engine.errors import EngineError
from engine.plan import StepPlan, Work
from engine.probe import Parts, StepProbe
from engine.trace import Trace
from engine.traced import KERNELS, MAX_QUERIES, Blocks, Operands, arrays_of, count_tiles, has_twin, launch, plan, trace
from kernels.registry import load_specs

if TYPE_CHECKING:
    from engine.jobs import Job

TILES_S = 90.0
INTERPRETED_S = 60  # of the child, for one request
MAX_INTERPRETED = 1500  # tiles; 5 to 11 ms each, by their size, on a free core (SmolLM2's heads), 30 ms on a busy one
FEW_TILES = 300  # above, the interpreter gets larger tiles unless somebody chose
MAX_TRACE_BYTES = 32 * 2**20  # of one TileTrace
MAX_LOG_BYTES = 2**30  # on the device
MAX_AGAIN = {"cuda": 65_536, "cpu": 8_192}  # tokens to compute again
MAX_TILE, MAX_SPLITS = 256, 128
ITEM_BYTES = TILE.itemsize


@dataclass(frozen=True, slots=True)
class PastStep:
    """A recorded step as it can be computed again. Plain data.

    Args:
        works: (seq_id, start, num_tokens), in the batch's order.
        token_ids: of each work's sequence, up to start + num_tokens.
        sampled: (index of the work, token, its log-probability as recorded).
    """

    step_id: int
    works: tuple[tuple[int, int, int], ...]
    token_ids: tuple[tuple[int, ...], ...]
    sampled: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """What to trace; None: the default of engine/jobs.py's `tiles`."""

    layer: int
    head: int
    seq_id: int | None = None
    position: int | None = None
    kernel: str | None = None
    block_m: int | None = None
    block_n: int | None = None
    num_splits: int | None = None

    def fits(self, seq_id: int, start: int, num_tokens: int) -> bool:
        """Whether a work has the row that was asked for."""
        named = self.seq_id in (None, seq_id) and (self.kernel != "flash_decode" or num_tokens <= MAX_QUERIES)
        return named and (self.position is None or start <= self.position < start + num_tokens)


@dataclass(frozen=True, slots=True)
class Target:
    """The launch to trace and the row in it: `members` are the batch's sequences that take part, in order."""

    kernel: str
    members: tuple[int, ...]
    seq_ids: tuple[int, ...]
    sequence: int  # index into members
    query: int
    position: int


# ---- what was asked for ----


def past_step(trace: Trace, step_id: int) -> PastStep:
    """A step from its records. Raises EngineError "unknown_step" or "not_recorded"."""
    if not len(trace.rows("steps", step_id, step_id)):
        raise EngineError("unknown_step", f"Step {step_id} is not in the record (any more).", step=step_id)
    it = trace.step(step_id)
    if it.error is not None or not len(it.works):
        raise EngineError("not_recorded", f"Step {step_id} computed nothing that can be computed again.", step=step_id)
    works = [(int(w["seq_id"]), int(w["start"]), int(w["num_tokens"])) for w in it.works]
    tokens = [_tokens_up_to(trace, seq_id, start + n) for seq_id, start, n in works]
    if any(t is None for t in tokens):
        sentence = f"Tokens that step {step_id} read are not in the record any more; choose a later step."
        raise EngineError("not_recorded", sentence, step=step_id, lost=True)
    requests = {trace.sequences[seq_id].request_id: i for i, (seq_id, _, _) in enumerate(works)}  # samples share the first one's work
    own = {seq_id: i for i, (seq_id, _, _) in enumerate(works)}
    sampled = [
        (own.get(int(t["seq_id"]), requests.get(trace.sequences[int(t["seq_id"])].request_id)), int(t["token_id"]), float(t["logprob"]))
        for t in it.tokens
        if int(t["seq_id"]) in trace.sequences
    ]
    return PastStep(step_id, tuple(works), tuple(tokens), tuple(sorted(s for s in sampled if s[0] is not None)))


def _tokens_up_to(trace: Trace, seq_id: int, end: int) -> tuple[int, ...] | None:
    """A sequence's first `end` token ids; None where the record has lost some."""
    info = trace.sequences.get(seq_id)
    if info is None:
        return None
    found = dict(enumerate(info.prompt_token_ids))
    rows = trace.tokens[trace.tokens["seq_id"] == seq_id]
    found |= dict(zip(rows["position"].tolist(), rows["token_id"].tolist()))
    return tuple(found[i] for i in range(end)) if all(i in found for i in range(end)) else None


def check(core: EngineCore, asked: Asked, past: PastStep | None, room: str) -> None:
    """Raises EngineError for what cannot be traced."""
    config = getattr(getattr(core.runner, "model", None), "config", None)
    if config is None:
        raise EngineError("no_model", "This engine has no model whose attention could be traced.")
    _within("unknown_layer", asked.layer, config.num_layers)
    _within("unknown_head", asked.head, config.num_heads)
    for name, most in (("block_m", MAX_TILE), ("block_n", MAX_TILE), ("num_splits", MAX_SPLITS)):
        value = getattr(asked, name)
        tile = name != "num_splits"
        least, rule = (16, f"a power of two from 16 to {most}") if tile else (1, f"a whole number from 1 to {most}")
        if value is not None and (not _whole(value) or not least <= value <= most or (tile and value & (value - 1))):
            got = str(value)[:40]
            raise EngineError("bad_tiles", f"{name} must be {rule}, got {got}.", name=name, rule=rule, value=got)
    if asked.kernel not in (None, *KERNELS):
        raise EngineError("bad_tiles", f"There is no traced kernel called {str(asked.kernel)[:40]!r}.", kernel=str(asked.kernel)[:40])
    if asked.position is not None and not (_whole(asked.position) and asked.position >= 0):
        raise EngineError("unknown_position", "The position must be a whole number from 0 on.")
    if past is None:
        alive = core.rooms[room].scheduler if room in core.rooms else None
        here = () if alive is None else [s.seq_id for s in (*alive.running, *alive.waiting)]
        if asked.seq_id is not None and asked.seq_id not in here:
            wrong = str(asked.seq_id)[:40]
            raise EngineError("unknown_sequence", f"Sequence {wrong} is not running. Choose one that is.", sequence=wrong)
        return
    step = past.step_id
    if asked.seq_id is not None and asked.seq_id not in [w[0] for w in past.works]:
        wrong = str(asked.seq_id)[:40]
        raise EngineError("unknown_sequence", f"Sequence {wrong} computed nothing in step {step}.", sequence=wrong, step=step)
    if not any(asked.fits(*work) for work in past.works):
        if asked.kernel == "flash_decode" and asked.position is None:
            sentence = f"flash_decode takes at most {MAX_QUERIES} queries a sequence; in step {step} there were more."
            raise EngineError("bad_tiles", sentence, step=step, limit=MAX_QUERIES)
        raise EngineError("unknown_position", f"Step {step} did not compute that position. Choose a row of this step.", step=step)
    total, most = sum(map(len, past.token_ids)), MAX_AGAIN[core.runner.device.type]
    if total > most:
        sentence = f"Step {step} stands on {total:,} tokens; at most {most:,} can be computed again here."
        raise EngineError("step_too_large", sentence, step=step, num_tokens=total, limit=most)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _within(code: str, value: object, count: int) -> None:
    if not _whole(value) or not 0 <= value < count:
        sentence = f"This model has {code.removeprefix('unknown_')}s 0 to {count - 1}; {str(value)[:40]} is not one of them."
        raise EngineError(code, sentence, value=str(value)[:40], most=count - 1)


# ---- the probe ----


class TileProbe(StepProbe):
    """Stands in the way of one layer's attention and takes what the launch reads.

    Invariant: it never breaks the step: what goes wrong is in `fault`, and the step has its ordinary result.

    Args:
        asked: what to trace.
        on_device: run the traced kernel as part of the step; else the operands are kept for the interpreter.
    """

    def __init__(self, asked: Asked, on_device: bool) -> None:
        super().__init__()
        self.asked, self._on_device = asked, on_device
        self.works: tuple[tuple[int, int, int], ...] = ()
        self.target: Target | None = None
        self.operands: Operands | None = None
        self.blocks: Blocks | None = None
        self.traced: tuple | None = None  # (log, accs), on the device
        self.fault: EngineError | None = None

    def wants(self, plan: StepPlan) -> bool:
        self.works = tuple((w.seq_id, w.start, w.num_tokens) for w in plan.works)
        return any(self.asked.fits(*work) for work in self.works)

    def around(self, parts: Parts, host: HostBatch) -> Parts:
        return replace(parts, attention=_Tapped(parts.attention, self, host))

    def tap(self, attention, layer: int, q: torch.Tensor, host: HostBatch, out: torch.Tensor) -> torch.Tensor:
        """The layer's output; of the traced kernel where it ran."""
        try:
            self.target, seen, self.blocks = _choose(self.asked, self.works, attention, layer, q, host, not self._on_device)
            if self._on_device:
                traced, *self.traced = trace(seen, self.blocks, self.target.sequence, self.target.query, self.asked.head)
                out = out.clone()
                out[_rows(host, self.target.members, q.device)] = traced
            self.operands = seen.compact()
        except EngineError as error:
            self.fault = error
        except Exception as error:
            self.fault = EngineError("trace_failed", f"The traced kernel could not be run: {str(error).partition(chr(10))[0][:300]}.")
        return out


class _Tapped:
    """An attention variant with a probe in the way of one layer."""

    def __init__(self, attention, probe: TileProbe, host: HostBatch) -> None:
        self._attention, self._probe, self._host = attention, probe, host

    def attend(self, layer: int, q: torch.Tensor, *rest, **more) -> torch.Tensor:
        out = self._attention.attend(layer, q, *rest, **more)
        return self._probe.tap(self._attention, layer, q, self._host, out) if layer == self._probe.asked.layer else out

    def __getattr__(self, name: str) -> object:
        return getattr(self._attention, name)


def _choose(
    asked: Asked, works: tuple[tuple[int, int, int], ...], attention, layer: int, q: torch.Tensor, host: HostBatch, interpreted: bool
) -> tuple[Target, Operands, Blocks]:
    """Which launch: the sequences of the batch that the engine gives this kernel (those with few queries, or those with
    many) if that stays within the budget, else the row's own alone."""
    of = max((i for i, work in enumerate(works) if asked.fits(*work)), key=lambda i: (works[i][2], -i))
    _, start, num_tokens = works[of]
    position = start + num_tokens - 1 if asked.position is None else asked.position
    kernel = asked.kernel or ("flash_prefill" if num_tokens > MAX_QUERIES else "flash_decode")
    few = num_tokens <= MAX_QUERIES
    everybody = tuple(i for i, work in enumerate(works) if (work[2] <= MAX_QUERIES) == few or (few and kernel == "flash_prefill"))
    for members in dict.fromkeys((everybody, (of,))):
        seen = _operands(attention, layer, q, host, works, members)
        blocks = _cut(asked, kernel, seen, interpreted)
        refusal = _over_budget(seen, blocks, interpreted)
        if refusal is None:
            seq_ids = tuple(works[i][0] for i in members)
            return Target(kernel, members, seq_ids, members.index(of), position - start, position), seen, blocks
    raise refusal


def _cut(asked: Asked, kernel: str, it: Operands, interpreted: bool) -> Blocks:
    """As asked for, else by the kernel's own choice; the interpreter, which pays by the tile and has no registers to
    spill, gets larger tiles where there would be many."""
    blocks = plan(kernel, it, asked.block_m, asked.block_n, asked.num_splits)
    if interpreted and kernel == "flash_prefill" and asked.block_m is None and asked.block_n is None:
        for size in (64, 128):
            if count_tiles(it, blocks) > FEW_TILES and blocks.block_m <= size:
                blocks = plan(kernel, it, size, size)
    return blocks


def _over_budget(it: Operands, blocks: Blocks, interpreted: bool) -> EngineError | None:
    """Why a launch is too large to be traced; None if it is not."""
    tiles = count_tiles(it, blocks)
    if tiles * (ITEM_BYTES + 12 * blocks.block_m) > MAX_TRACE_BYTES or blocks.log_bytes > MAX_LOG_BYTES:
        sentence = f"That would be {tiles:,} tiles, more than a trace holds. Choose larger tiles or a shorter sequence."
        return EngineError("too_many_tiles", sentence, tiles=tiles)
    most = MAX_INTERPRETED
    if interpreted and tiles > most:
        sentence = f"That would be {tiles:,} tiles; Triton's interpreter takes up to {most:,}. Choose larger tiles or a shorter sequence."
        return EngineError("too_many_tiles", sentence, tiles=tiles, limit=most)
    return None


def _operands(
    attention, layer: int, q: torch.Tensor, host: HostBatch, works: tuple[tuple[int, int, int], ...], members: tuple[int, ...]
) -> Operands:
    """Those sequences of the batch, on the arena itself."""
    device, some = q.device, list(members)
    if len(some) != len(works):
        q = q[_rows(host, members, device)]
    return Operands(
        q, attention.k[layer], attention.v[layer], torch.from_numpy(np.ascontiguousarray(host.block_table[some])).to(device),
        tuple(works[i][2] for i in some), tuple(works[i][1] + works[i][2] for i in some), attention.scale,
        getattr(attention, "window", None), getattr(attention, "softcap", None),
    )  # fmt: skip


def _rows(host: HostBatch, members: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Rows of the super-sequence that belong to these sequences."""
    cu = host.cu_seqlens
    return torch.from_numpy(np.concatenate([np.arange(cu[i], cu[i + 1]) for i in members]).astype(np.int64)).to(device)


# ---- the job ----


def traced_tiles(job: Job, asked: Asked, past: PastStep | None) -> Iterator[tuple[float, str]]:
    """The job's slices. What cannot be traced ends it with a note."""
    core = job.core
    probe = TileProbe(asked, core.runner.device.type == "cuda")
    try:
        if past is None:
            difference = 0.0
            yield from _next_step(job, probe)
            step_id, provenance = probe.step_id, "measured"
        else:
            step_id, provenance = past.step_id, "recomputed"
            difference = yield from _again(job, probe, past)
        if probe.fault is not None:
            raise probe.fault
        if probe.operands is None:
            raise EngineError("trace_failed", f"Step {step_id} did not reach that layer.")
        if probe.traced is not None:
            arrays, it = arrays_of(*probe.traced), probe.operands
            where = device_name(core.runner.device) + (" (Triton twin of the Gluon kernel)" if has_twin(it, probe.target.kernel) else "")
            yield 0.8, "Timing it"
            launch_us, naive_us = _times(it, probe.blocks)
            job.publish(TrafficRun(step_id, asked.layer, probe.target.kernel, where, launch_us, naive_us))
        else:
            it, where = _for_interpreter(probe.operands, device_name(core.runner.device))
            launch_us, arrays = 0.0, (yield from _interpreted(job, it, probe))
    except EngineError as error:
        job.note = error.sentence
        return
    job.publish(assemble(it, probe.blocks, probe.target, asked, arrays, step_id, where, provenance, difference, launch_us))


def _next_step(job: Job, probe: TileProbe) -> Iterator[tuple[float, str]]:
    job.probe, job.waits = probe, True
    while job.record is None:
        yield 0.0, "Waiting for the next step"
    if job.record.error is not None or job.record.plan.step_id != probe.step_id:
        raise EngineError("trace_failed", "The step that was to be traced failed. Try another one.")


def _again(job: Job, probe: TileProbe, past: PastStep) -> Iterator[tuple[float, str]]:
    """Compute a recorded step again; returns the largest difference in its tokens' log-probabilities."""
    core = job.core
    config = core.rooms[job.room].config
    size = config.cache.page_size
    needed = sum(-(-len(ids) // size) for ids in past.token_ids)
    room = job.open_scratch(with_knob(config, "num_pages", needed))
    pool = room.scheduler.pool
    for i, ids in enumerate(past.token_ids):
        pool.allocate(i + 1, pool.pages_for(len(ids)))

    def batch(works: list[tuple[int, int, int, int]]) -> HostBatch:
        """(index, start, num_tokens, how often its last row's logits are wanted)."""
        if room.scheduler.pool is not pool:
            raise EngineError("trace_failed", "The cache was set up anew meanwhile. Start it again.")
        planned = tuple(Work(i + 1, 0, start, n, sample_seq_ids=(i + 1,) * times) for i, start, n, times in works)
        sequences = {i + 1: SimpleNamespace(tokens=ids) for i, ids in enumerate(past.token_ids)}
        return build_host(StepPlan(0, room.name, planned, (), (), (), 0, 0), sequences, pool)

    done, total = 0, max(sum(start for _, start, _ in past.works), 1)
    for works in _chunks([start for _, start, _ in past.works], config.scheduler.max_num_batched_tokens):
        core.runner.score(batch(works), np.zeros(0, np.int64))
        done += sum(n for _, _, n, _ in works)
        yield 0.5 * done / total, f"Computing step {past.step_id} again: {done:,} of {total:,} tokens before it"
    counts = [sum(of == i for of, _, _ in past.sampled) for i in range(len(past.works))]
    host = batch([(i, start, n, counts[i]) for i, (_, start, n) in enumerate(past.works)])
    probe.works = past.works
    now = core.runner.score(host, np.array([token for _, token, _ in past.sampled], np.int64), probe)
    core.close_room(room.name)
    yield 0.6, f"Computing step {past.step_id} again"
    return max((abs(a - b) for a, (_, _, b) in zip(now.tolist(), past.sampled, strict=True)), default=0.0)


def _chunks(lengths: list[int], budget: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """Batches of (index, start, num_tokens, 0) that compute the first `lengths` tokens of each sequence."""
    works, room = [], budget
    for i, length in enumerate(lengths):
        start = 0
        while start < length:
            n = min(length - start, room)
            works.append((i, start, n, 0))
            start, room = start + n, room - n
            if room == 0:
                yield works
                works, room = [], budget
    if works:
        yield works


def _for_interpreter(it: Operands, device: str) -> tuple[Operands, str]:
    """On a CPU, in a type that the interpreter multiplies rightly; what the page calls it."""
    if it.q.dtype is not torch.bfloat16:
        return it, f"{device} (Triton interpreter)"
    wide = replace(it, q=it.q.float(), k_cache=it.k_cache.float(), v_cache=it.v_cache.float())
    return wide, f"{device} (Triton interpreter, bfloat16 widened to float32)"


def _interpreted(job: Job, it: Operands, probe: TileProbe) -> Iterator[tuple[float, str]]:
    """Have the child run it; returns the arrays of its log. Ended before its time, the child ends too."""
    arrays = {name: getattr(it, name).numpy() for name in ("q", "k_cache", "v_cache", "block_table")}
    target, choice = probe.target, {"num_splits": probe.blocks.num_splits, "block_n": probe.blocks.block_n}
    if target.kernel == "flash_prefill":
        choice = {"block_m": probe.blocks.block_m, "block_n": probe.blocks.block_n}
    values = {
        "limit_s": INTERPRETED_S, "kernel": target.kernel, "choice": choice, "row": [target.sequence, target.query, probe.asked.head],
        "queries": it.queries, "keys": it.keys, "scale": it.scale, "window": it.window, "softcap": it.softcap,
    }  # fmt: skip
    run = job.core.interpreter.run(values, arrays)
    job.waits = True
    try:
        while not run.wait(0.002):
            yield 0.7, "Running the kernel in Triton's interpreter"
    except GeneratorExit:
        run.cancel()
        raise
    job.waits = False
    return run.result()[1]


def _times(it: Operands, blocks: Blocks) -> tuple[float, float | None]:
    """(the kernel without a log, the naive one where there is one), microseconds."""
    flash_us = median_us(lambda: launch(it, blocks), it.q.device)
    naive = load_specs().get("naive_attention")
    if naive is None:
        return flash_us, None
    try:
        return flash_us, median_us(lambda: naive.fn(**it.arguments()), it.q.device)
    except (ValueError, torch.cuda.OutOfMemoryError):  # its scores do not fit
        return flash_us, None


# ---- from a log to an artifact ----


def assemble(
    it: Operands, blocks: Blocks, target: Target, asked: Asked, arrays: dict[str, np.ndarray], step_id: int, device: str,
    provenance: str, difference: float, launch_us: float,
) -> TileTrace:  # fmt: skip
    """A TileTrace of a run's arrays (engine/traced.py)."""
    heads, kv_heads, head_dim = it.q.shape[1], it.k_cache.shape[2], it.q.shape[2]
    tiles, at = _tiles(it, arrays, target.seq_ids)
    kv_head = asked.head // (heads // kv_heads)
    mine = (tiles["seq_id"] == target.seq_ids[target.sequence]) & (tiles["kv_head"] == kv_head)
    rows = {name: np.full((len(tiles), blocks.block_m), np.nan, np.float32) for name in ("m", "l", "rescale")}
    for name, values in rows.items():
        values[mine] = arrays[name][at[0][mine], at[1][mine]]
    of_row = mine & (tiles["q_start"] <= target.position) & (target.position < tiles["q_start"] + tiles["num_q"])
    row_tiles = np.flatnonzero(of_row)
    row_tiles = row_tiles[np.lexsort((at[1][row_tiles], tiles["split"][row_tiles]))].astype(np.int32)
    acc = arrays["acc"][tiles["split"][row_tiles], at[1][row_tiles]]
    scores, plain = softmax_row(it, target.sequence, target.position, asked.head)
    return TileTrace(
        step_id, asked.layer, target.kernel, device, provenance, float(difference), str(it.q.dtype).removeprefix("torch."), heads, kv_heads,
        head_dim, it.k_cache.shape[1], it.window or 0, it.softcap or 0.0, float(it.scale), blocks.block_q, blocks.block_m, blocks.block_n,
        blocks.num_splits, float(launch_us), tuple(zip(target.seq_ids, it.queries, it.keys, strict=True)), tiles, **rows,
        row_seq_id=target.seq_ids[target.sequence], row_position=target.position, row_head=asked.head, row_tiles=row_tiles,
        acc=np.ascontiguousarray(acc, np.float32), scores=scores, plain=plain,
    )  # fmt: skip


def _tiles(it: Operands, arrays: dict[str, np.ndarray], seq_ids: tuple[int, ...]) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """(TILE rows by program and key, where each stands in the log: program, tile)."""
    owner, span = arrays["owner"], arrays["span"]
    program, tile = np.nonzero((arrays["kind"] != SKIPPED) & (owner[:, :1] >= 0))
    order = np.lexsort((span[program, tile, 0], program))
    program, tile = program[order], tile[order]
    of, starts = owner[program], np.array(it.starts)
    queries, keys = np.array(it.queries), np.array(it.keys)
    rows = np.zeros(len(program), TILE)
    rows["seq_id"] = np.array(seq_ids)[of[:, 0]]
    rows["kv_head"], rows["split"], rows["program"], rows["num_q"] = of[:, 2], of[:, 3], program, of[:, 4]
    rows["q_start"] = (keys - queries)[of[:, 0]] + of[:, 1] - starts[of[:, 0]]
    rows["k_start"], rows["k_stop"] = span[program, tile].T
    rows["kind"], rows["sm"] = arrays["kind"][program, tile], arrays["sm"][program, tile]
    time = arrays["time"][program, tile]
    if len(time) and time.min() > 0:
        rows["start_ns"] = time[:, 0] - time[:, 0].min()
        rows["stop_ns"] = np.maximum(time[:, 1] - time[:, 0].min(), rows["start_ns"])
    return rows, (program, tile)


def softmax_row(it: Operands, sequence: int, position: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    """(scores float32 [keys], plain softmax's output float32 [head_dim]) of one query row, in fp64 on the host."""
    keys, page_size = it.keys[sequence], it.k_cache.shape[1]
    row = it.starts[sequence] + it.queries[sequence] - keys + position
    kv_head = head // (it.q.shape[1] // it.k_cache.shape[2])
    pages = it.block_table[sequence, : -(-keys // page_size)].long()
    k, v = (cache[pages, :, kv_head].flatten(0, 1)[:keys].cpu().double().numpy() for cache in (it.k_cache, it.v_cache))
    x = it.scale * (k @ it.q[row, head].cpu().double().numpy())
    if it.softcap:
        x = it.softcap * np.tanh(x / it.softcap)
    at = np.arange(keys)
    hidden = at > position
    if it.window:
        hidden |= at <= position - it.window
    x[hidden] = -math.inf
    p = np.exp(x - x.max())
    return x.astype(np.float32), (p[~hidden] @ v[~hidden] / p.sum()).astype(np.float32)
