"""Artifacts about kernels: what a job measured or wrote down, as plain data in a Trace. numpy and stdlib only.

Each type says where its numbers come from. A recording carries them (engine/recording.py); viz reads them from
`trace.artifacts` (`of_kind` below). KernelReport, TensorSample and Comparison are in engine/trace.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from engine.trace import Trace

TILE = np.dtype(
    [
        ("seq_id", "<i4"),
        ("kv_head", "<i4"),
        ("split", "<i4"),  # 0 where there is one
        ("program", "<i4"),  # in launch order
        ("q_start", "<i4"),  # position of the Q-block's first query
        ("num_q", "<i4"),  # its queries
        ("k_start", "<i4"),  # position of the tile's first key
        ("k_stop", "<i4"),  # behind its last one
        ("kind", "u1"),  # SKIPPED, FULL, PARTLY
        ("sm", "<i2"),  # -1: not known (interpreter)
        ("start_ns", "<i8"),  # globaltimer since the first tile; 0: not known
        ("stop_ns", "<i8"),
    ]
)
SKIPPED, FULL, PARTLY = 0, 1, 2  # a tile that no row may see is never visited; every row sees all of it; only some


@dataclass(frozen=True, slots=True)
class TileTrace:
    """What one launch of an attention kernel did, tile by tile, and the softmax of one chosen query row.

    Args:
        step_id, layer: of the step whose queries, keys and values were used.
        kernel: "flash_prefill" or "flash_decode".
        device: that ran the kernel; on a CPU it ran in Triton's interpreter, without SM and time.
        provenance: "measured" (the step itself ran this variant) or "recomputed" (a second pass over the recorded tokens).
        difference: recomputed: largest |log-probability now − recorded| of the step's tokens; measured: 0.
        dtype: of q, K and V.
        heads, kv_heads, head_dim, page_size, window (0: none), softcap (0: none), scale: of the launch.
        block_q, block_m, block_n: queries, rows (queries × heads a key head) and keys of a tile. Row i of a Q-block is
            its query i // group, of head kv_head * group + i % group, group = heads // kv_heads.
        num_splits: of the decode kernel; 1 for prefill.
        launch_us: the kernel's time, 0 where it was not timed.
        sequences: (seq_id, queries, keys) of the batch, in order.
        tiles: TILE [n], visited ones, by program and key.
        m, l, rescale: float32 [n, block_m]: after each tile, per row: running max (of the scaled, capped scores), running
            sum of exp(score − m), and exp(m before − m after). NaN outside `row_kv_head` and `row_seq_id`.
        row_seq_id, row_position, row_head: the chosen query row. row_kv_head = row_head * kv_heads // heads.
        row_tiles: int32 [k]: indices into tiles that this row's program visited, in order; split by split where its keys are
            split. Each split has an m, l and acc of its own, and `plain` is what their combination must give.
        acc: float32 [k, head_dim]: the row's output accumulator after each of them, not yet divided by l.
        scores: float32 [keys]: its scaled, capped scores by key position; −inf where it may not look.
        plain: float32 [head_dim]: its output by plain softmax, fp64 on the host from the same q, K and V.
    """

    step_id: int
    layer: int
    kernel: str
    device: str
    provenance: str
    difference: float
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    window: int
    softcap: float
    scale: float
    block_q: int
    block_m: int
    block_n: int
    num_splits: int
    launch_us: float
    sequences: tuple[tuple[int, int, int], ...]
    tiles: np.ndarray
    m: np.ndarray
    l: np.ndarray
    rescale: np.ndarray
    row_seq_id: int
    row_position: int
    row_head: int
    row_tiles: np.ndarray
    acc: np.ndarray
    scores: np.ndarray
    plain: np.ndarray

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def row_kv_head(self) -> int:
        return self.row_head // self.group

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2


@dataclass(frozen=True, slots=True)
class KernelCard:
    """What a kernel's file says about itself. `cases`: (name, "tokens 8192, n 14336") of its benchmark and test cases,
    those that can be run from the page; `backend`: which of the two serves this engine's model, "" where none calls it."""

    name: str
    formula: str
    text: str
    reference: str
    source: str
    cases: tuple[tuple[str, str], ...]
    backend: str


@dataclass(frozen=True, slots=True)
class KernelRun:
    """A kernel run on chosen shapes, measured on `device`. Times are medians in microseconds; None: it could not run here
    (a Triton kernel on a CPU) or there is no such thing.

    `loop_us`: one iteration of the same operation as a Python loop; `loop_iterations`: how many the whole takes (their
    product is computed, not measured, unless `loop_ran` equals it). `flops`, `bytes`: the SPEC's formulas. `max_error`:
    NaN where our kernel did not run.
    `graph_us`: our kernel replayed in a CUDA graph (None without one).
    """

    name: str
    case: str
    shapes: str
    dtype: str
    device: str
    max_error: float
    tolerance: float
    flops: int
    bytes: int
    kernel_us: float | None
    graph_us: float | None
    torch_us: float | None
    loop_us: float | None
    loop_iterations: int
    loop_ran: int


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device can do at most, measured: `copy_gbps` (bytes read + written, data several times the caches),
    `matmul_tflops` in `dtype`, `launch_us` (the host's time to launch an empty kernel; a CPU: to call a torch operation),
    `python_us` (one iteration of an empty Python loop), `levels`: (name, working set in bytes, GB/s) of smaller copies."""

    device: str
    dtype: str
    copy_gbps: float
    matmul_tflops: float
    launch_us: float
    python_us: float
    levels: tuple[tuple[str, int, float], ...]


@dataclass(frozen=True, slots=True)
class OpTime:
    """One operation of a profiled step, named by the kernel that was called, a matmul by its weight. `layer`: what follows
    the last one has the number of layers. `start_us` since the first operation began. `device_us`: on the device;
    `host_us`: of the host to launch it (on a CPU both are the call). `flops`, `bytes`: by formula from its shapes. `rows`:
    its tokens."""

    name: str
    layer: int
    start_us: float
    device_us: float
    host_us: float
    flops: int
    bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step, run eagerly with a clock around every operation; its time is in no average. `wall_us`: the whole step as
    profiled; `prefill_tokens`, `decode_tokens`: what it computed."""

    step_id: int
    device: str
    dtype: str
    wall_us: float
    prefill_tokens: int
    decode_tokens: int
    num_seqs: int
    ops: tuple[OpTime, ...]


@dataclass(frozen=True, slots=True)
class TrafficRun:
    """Naive and Flash attention over the same q, K and V (a TileTrace's, by step_id, layer and kernel), both timed on
    the device. None: not timed (interpreter). Bytes are computed from the tiles by viz, not here."""

    step_id: int
    layer: int
    kernel: str
    device: str
    flash_us: float | None
    naive_us: float | None


HOST_ROW = np.dtype([("name", "<i4"), ("step", "<i4"), ("start_ns", "<i8"), ("stop_ns", "<i8")])
KERNEL_ROW = np.dtype(
    [
        ("name", "<i4"),  # the operation; -1: not named
        ("kernel", "<i4"),  # the function that ran; on a CPU the operation again
        ("layer", "<i4"),  # -1: none
        ("step", "<i4"),  # of the burst, from 0
        ("launch", "<i4"),  # the host row that launched it; -1: the host ran it itself
        ("start_ns", "<i8"),
        ("stop_ns", "<i8"),
    ]
)
STAGES = ("schedule", "build", "launch", "sync", "commit")


@dataclass(frozen=True, slots=True)
class Timeline:
    """A burst: consecutive decode steps with a profiler attached (its cost is in these times, and in no average).

    The requests of a step run again in a scratch room, from where that step left them. Times are ns since the first step
    of the burst began, all on one clock.

    Args:
        step_id: of the step whose requests they are.
        source: "CUPTI" (kernels of a GPU) or "CPU operations" (a clock around each operation: the CPU runs them itself).
        graph_size: of the CUDA graph that was replayed; 0: none, each kernel was launched by itself.
        num_seqs, num_layers: of the batch and of the model.
        resolution_ns: the smallest difference between two readings of the clock that was seen.
        plain_us: median of a step right before, without a profiler.
        names: what `name` and `kernel` of the rows point at.
        host: HOST_ROW [h], by start: stages (STAGES) and launches.
        kernels: KERNEL_ROW [k], by start: kernels, and copies, whose function begins with "Mem".
        steps: int64 [n + 1]: when each step began on the host, and when the last ended.
        unseen: what was not seen: "lost" (launches without a kernel), "not_named", "partly_named".
    """

    step_id: int
    device: str
    dtype: str
    source: str
    graph_size: int
    num_seqs: int
    num_layers: int
    resolution_ns: float
    plain_us: float
    names: tuple[str, ...]
    host: np.ndarray
    kernels: np.ndarray
    steps: np.ndarray
    unseen: tuple[str, ...] = ()


RUNG_STATES = ("measured", "waits", "skipped", "cancelled", "late", "failed")
RUNG_REASONS = ("", "no_peer", "no_memory", "no_kernels", "fused_off", "no_graphs", "no_overlap")  # why one was skipped


@dataclass(frozen=True, slots=True)
class Rung:
    """One way to run a ladder's workload. All requests arrive at once; what waits for others counts.

    Args:
        name: code (engine/ladder.py); its words are viz's. `switched`: what differs from the rung before, as codes.
        state: of RUNG_STATES. Where it was skipped, `why` is of RUNG_REASONS; where it failed, `detail` a sentence.
        wall_us: from the arrival to the last token, of the run whose speed is the median of `runs`.
        runs: tokens a second of each run, in order.
        token_us: µs since the arrival of each token that the host had in hand, a row a request.
        token_ids, pieces: of the first request: its answer, and the text that each token made certain.
        num_differ: tokens that are not those of the ladder's first measured rung at their places; `differing`: requests
            that have one.
        busy: share of the time between two tokens in which the device computed; None: not to be had.
    """

    name: str
    switched: tuple[str, ...]
    state: str = "waits"
    why: str = ""
    detail: str = ""
    wall_us: int = 0
    runs: tuple[float, ...] = ()
    token_us: tuple[tuple[int, ...], ...] = ()
    token_ids: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    num_differ: int = 0
    differing: int = 0
    busy: float | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_us))

    @property
    def per_s(self) -> float:
        """Tokens a second of all requests together; 0.0 where it was not measured."""
        return self.num_tokens / self.wall_us * 1e6 if self.wall_us else 0.0

    @property
    def first_us(self) -> float:
        """Time to first token: the median over the requests, since they arrived."""
        return float(np.median([row[0] for row in self.token_us if row])) if any(self.token_us) else 0.0

    @property
    def each_us(self) -> float:
        """Time per output token after the first: the median over the requests."""
        found = [(row[-1] - row[0]) / (len(row) - 1) for row in self.token_us if len(row) > 1]
        return float(np.median(found)) if found else 0.0


@dataclass(frozen=True, slots=True)
class LadderRun:
    """The same requests, greedy, on one rung after another, each with one thing more switched on.

    A ladder that goes on is published again under the same `key`: the newer one takes the older one's place.

    Args:
        device, dtype: what ran. prompt: of the first request, as text.
        prompt_tokens: of each request. new_tokens: that each was given, whatever its text says.
        trial_us: what a token cost on the slowest rung when the workload's size was chosen.
    """

    key: str
    device: str
    dtype: str
    prompt: str
    prompt_tokens: tuple[int, ...]
    new_tokens: int
    trial_us: int
    rungs: tuple[Rung, ...]

    @property
    def measured(self) -> tuple[Rung, ...]:
        return tuple(rung for rung in self.rungs if rung.state == "measured")

    @property
    def is_over(self) -> bool:
        return not any(rung.state == "waits" for rung in self.rungs)


A = TypeVar("A")


def of_kind(trace: Trace, kind: type[A]) -> tuple[A, ...]:
    """A trace's artifacts of one type, oldest first."""
    return tuple(a for a in trace.artifacts if isinstance(a, kind))
