"""Every knob, frozen. A change makes a new config (dataclasses.replace); a Knob says whom it concerns and what it costs.

resolve() fills in what depends on the hardware and the model and returns a new config; nothing downstream
sees "auto" or None where a number is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum

from engine.errors import EngineError


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind` as in Hugging Face configs ("default", "linear", "dynamic", "llama3", …);
    `params` are that kind's own numbers. `dim` is the rotated part of head_dim."""

    theta: float
    dim: int
    kind: str = "default"
    params: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape, read from a Hugging Face config.json by its family file (engine/models)."""

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None


class CacheMode(Enum):
    PAGED = "paged"
    CONTIGUOUS = "contiguous"  # each request reserves one contiguous slab for its longest possible length
    NONE = "none"  # nothing is kept between steps: every step recomputes the whole sequence


class Batching(Enum):
    CONTINUOUS = "continuous"
    STATIC = "static"  # the next batch starts when the whole running batch has ended


class Policy(Enum):
    FCFS = "fcfs"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Which weights, and on what they run. `model` None is the default model (engine/models/default.py)."""

    model: str | None = None
    device: str = "auto"  # "auto", "cpu", "cuda"
    dtype: str = "auto"  # "auto": bfloat16 on cuda, float32 on cpu
    backend: str = "auto"  # "auto", "triton", "torch"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """A room's pages. Page 0 (a sink) is not counted.

    Args:
        num_pages: the room's lease; None: sized from memory, or an equal share of a fixed arena.
        arena_pages: pages of all rooms together, fixed; None: the arena grows to what the rooms need.
    """

    mode: CacheMode = CacheMode.PAGED
    page_size: int = 16
    num_pages: int | None = None
    prefix_caching: bool = True
    arena_pages: int | None = None


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`run_ahead` steps may be planned before the oldest is committed (0: none)."""

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
    chunked_prefill: bool = True
    policy: Policy = Policy.FCFS
    batching: Batching = Batching.CONTINUOUS
    run_ahead: int = 0


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """How a step runs on the device.

    Args:
        cuda_graphs: decode steps replay a captured graph where there is one.
        fused: the model's operations are joined into fewer kernels (Triton only).
        steps_per_launch: decode steps that go to the device at once while nothing but the tokens changes; it stops rows by
            itself that draw a stop id. A stop string is found when the tokens are back, and what came after it is dropped.
            A probe, pause, single step and pace take one.
    """

    cuda_graphs: bool = True
    fused: bool = True
    steps_per_launch: int = 1


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that decides how the engine runs: a room's knobs and what all rooms share (Scope says which).

    Args:
        max_model_len: longest sequence (prompt + new tokens); None: the model's.
        top_logprobs: alternatives recorded a sampled token (0 to 5).
        tracing: keep records of steps.
        trace_bytes: the ring's bound, a room.
        max_rooms: most rooms at a time.
        nvtx: name stages and operations for Nsight Systems (engine/ranges.py).
    """

    source: ModelSource = ModelSource()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    runner: RunnerConfig = RunnerConfig()
    max_model_len: int | None = None
    top_logprobs: int = 5
    tracing: bool = True
    trace_bytes: int = 256 * 2**20
    max_rooms: int = 32
    nvtx: bool = False


def resolve(config: EngineConfig, model: ModelConfig, *, has_cuda: bool, free_bytes: int, page_bytes: int) -> EngineConfig:
    """A config with no "auto" left.

    Args:
        free_bytes: memory that the arena may take.
        page_bytes: bytes of one page for this model, page size and type.
    Raises:
        EngineError: "bad_config" for values that cannot run, naming the knob.
    """
    source, cache, scheduler = config.source, config.cache, config.scheduler
    device = ("cuda" if has_cuda else "cpu") if source.device == "auto" else source.device
    if device.startswith("cuda") and not has_cuda:
        raise EngineError("no_cuda", "The device cuda was asked for, but this machine has no usable NVIDIA GPU.")
    on_gpu = device.startswith("cuda")
    dtype = ("bfloat16" if on_gpu else "float32") if source.dtype == "auto" else source.dtype
    backend = ("triton" if on_gpu else "torch") if source.backend == "auto" else source.backend
    _need(source.dtype in ("auto", "float32", "float16", "bfloat16"), "dtype", "auto, float32, float16 or bfloat16", source.dtype)
    _need(backend in ("torch", "triton"), "backend", "auto, torch or triton", backend)
    _need(backend == "torch" or on_gpu, "backend", "torch on a CPU (Triton needs a GPU)", backend)
    _need(cache.page_size in (1, 2, 4, 8, 16, 32, 64, 128), "page_size", "a power of two from 1 to 128", cache.page_size)
    _need(scheduler.max_num_seqs >= 1, "max_num_seqs", "at least 1", scheduler.max_num_seqs)
    _need(scheduler.max_num_batched_tokens >= 1, "max_num_batched_tokens", "at least 1", scheduler.max_num_batched_tokens)
    _need(scheduler.run_ahead in (0, 1), "run_ahead", "0 or 1", scheduler.run_ahead)
    _need(1 <= config.runner.steps_per_launch <= 8, "steps_per_launch", "1 to 8", config.runner.steps_per_launch)
    _need(0 <= config.top_logprobs <= 5, "top_logprobs", "0 to 5", config.top_logprobs)
    length = min(config.max_model_len or model.max_position_embeddings, model.max_position_embeddings)
    _need(length >= 2, "max_model_len", "at least 2", length)
    _need(config.max_rooms >= 1, "max_rooms", "at least 1", config.max_rooms)
    wanted = cache.num_pages
    if wanted is None:
        useful = scheduler.max_num_seqs * -(-length // cache.page_size)
        there = free_bytes // page_bytes if cache.arena_pages is None else cache.arena_pages // config.max_rooms
        wanted = max(min(there, useful), 1)
    _need(wanted >= 1, "num_pages", "at least 1", wanted)
    total = wanted if cache.arena_pages is None else cache.arena_pages
    _need(total >= wanted, "num_pages", f"at most arena_pages ({total})", wanted)
    if total * page_bytes > max(free_bytes, page_bytes):
        raise EngineError(
            "pool_too_large",
            f"{total} pages of {page_bytes:,} bytes do not fit in the {free_bytes:,} bytes of free memory.",
            num_pages=total,
            page_bytes=page_bytes,
            free_bytes=free_bytes,
        )
    return replace(
        config,
        source=replace(source, device=device, dtype=dtype, backend=backend),
        cache=replace(cache, num_pages=wanted),
        max_model_len=length,
    )


def _need(ok: bool, name: str, rule: str, value: object) -> None:
    if not ok:
        raise EngineError("bad_config", f"{name} must be {rule}, got {value}.", name=name, rule=rule, value=str(value))


class Cost(Enum):
    """What changing a knob costs. FLUSH: running requests lose their cached tokens and recompute them."""

    NOTHING = "nothing"
    FLUSH = "flush"
    REBUILD = "rebuild"


class Scope(Enum):
    """Whom a knob concerns."""

    ROOM = "room"  # the room in which it is turned
    ENGINE = "engine"  # every room: what they share would have to be built twice


@dataclass(frozen=True, slots=True)
class Knob:
    """A knob as the page shows it: where it lives, what it may be, what a change costs and whom."""

    section: str
    kind: type
    cost: Cost
    choices: tuple = ()
    low: int = 0
    high: int = 0
    scope: Scope = Scope.ROOM


KNOBS: dict[str, Knob] = {
    "max_num_seqs": Knob("scheduler", int, Cost.NOTHING, low=1, high=256),
    "max_num_batched_tokens": Knob("scheduler", int, Cost.NOTHING, low=1, high=8192),
    "chunked_prefill": Knob("scheduler", bool, Cost.NOTHING),
    "policy": Knob("scheduler", Policy, Cost.NOTHING, choices=tuple(p.value for p in Policy)),
    "run_ahead": Knob("scheduler", int, Cost.NOTHING, low=0, high=1),
    "prefix_caching": Knob("cache", bool, Cost.NOTHING),
    "batching": Knob("scheduler", Batching, Cost.NOTHING, choices=tuple(b.value for b in Batching)),
    "mode": Knob("cache", CacheMode, Cost.FLUSH, choices=tuple(m.value for m in CacheMode)),
    "page_size": Knob("cache", int, Cost.FLUSH, choices=(4, 8, 16, 32, 64), scope=Scope.ENGINE),
    "num_pages": Knob("cache", int, Cost.FLUSH, low=1, high=2**20),
    "cuda_graphs": Knob("runner", bool, Cost.NOTHING),
    "fused": Knob("runner", bool, Cost.NOTHING, scope=Scope.ENGINE),
    "steps_per_launch": Knob("runner", int, Cost.NOTHING, low=1, high=8),
}


def with_knob(config: EngineConfig, name: str, value: object) -> EngineConfig:
    """A new config with one knob changed.

    Raises:
        EngineError: "unknown_knob", or "bad_config" when the value is not one the knob can take.
    """
    knob = KNOBS.get(name)
    if knob is None:
        raise EngineError("unknown_knob", f"There is no knob called {name!r}.", name=str(name)[:80])
    rule = (
        "one of " + ", ".join(map(str, knob.choices))
        if knob.choices
        else f"{knob.low} to {knob.high}"
        if knob.kind is int
        else "true or false"
    )
    try:
        parsed = knob.kind(value) if issubclass(knob.kind, Enum) else value
    except ValueError:
        parsed = None
    if knob.kind is int:
        ok = (
            isinstance(parsed, int)
            and not isinstance(parsed, bool)
            and (parsed in knob.choices if knob.choices else knob.low <= parsed <= knob.high)
        )
    else:
        ok = isinstance(parsed, knob.kind)
    _need(ok, name, rule, str(value)[:80])
    return replace(config, **{knob.section: replace(getattr(config, knob.section), **{name: parsed})})


def with_wide_parts(room: EngineConfig, engine: EngineConfig) -> EngineConfig:
    """A room's own knobs, and from `engine` everything that all rooms share."""
    for section in ("cache", "scheduler", "runner"):
        names = [name for name, knob in KNOBS.items() if knob.section == section and knob.scope is Scope.ROOM]
        own = {name: getattr(getattr(room, section), name) for name in names}
        engine = replace(engine, **{section: replace(getattr(engine, section), **own)})
    return engine


def with_room_knobs(config: EngineConfig, knobs: Mapping[str, object]) -> EngineConfig:
    """What a new room begins with. Raises as with_knob does, and "engine_wide_knob" for what no room has to itself."""
    for name, value in knobs.items():
        changed = with_knob(config, name, value)
        if changed != config and KNOBS[name].scope is Scope.ENGINE:
            sentence = f"{name} is the same for all rooms. Open the room without it."
            raise EngineError("engine_wide_knob", sentence, name=name)
        config = changed
    return config


def arena_config(config: EngineConfig) -> EngineConfig:
    """What the runner cuts its tensor by: as many pages as the arena begins with."""
    pages = config.cache.num_pages if config.cache.arena_pages is None else config.cache.arena_pages
    return replace(config, cache=replace(config.cache, num_pages=pages))


def knob_values(config: EngineConfig) -> dict[str, object]:
    """Knob name → plain value, as recorded in a trace."""
    found = {name: getattr(getattr(config, knob.section), name) for name, knob in KNOBS.items()}
    return {name: value.value if isinstance(value, Enum) else value for name, value in found.items()}


def config_facts(config: EngineConfig) -> dict[str, object]:
    """The whole config as plain data, for a recording's manifest."""

    def plain(value: object) -> object:
        if isinstance(value, Enum):
            return value.value
        if hasattr(value, "__dataclass_fields__"):
            return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
        return value

    return plain(config)
