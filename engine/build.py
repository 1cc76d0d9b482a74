"""From a config to a running core: load the model, find the hardware, choose kernels, cut the arena."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from engine.config import EngineConfig, ModelConfig, ModelSource, arena_config, config_facts, resolve
from engine.core import EngineCore
from engine.detokenizer import Detokenizer
from engine.errors import EngineError
from engine.kernel_cards import cards
from engine.messages import Ready
from engine.models.base import count_parameters
from engine.models.hub import ModelFolder
from engine.models.loading import LoadedModel, load_model, resolve_model
from engine.models.registry import parse_config
from engine.models.weights import read_config
from engine.ops import choose_ops
from engine.peer import TransformersPeer
from engine.ranges import nvtx_sink, watch
from engine.request import Request
from engine.runner import DTYPES, ModelRunner, free_bytes, layout_of


def settle_source(source: ModelSource) -> ModelSource:
    """The device and type that "auto" means on this machine."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if source.device == "auto" else source.device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise EngineError("no_cuda", "This machine has no NVIDIA GPU that can be used. Start with --device cpu.")
    dtype = ("bfloat16" if device.startswith("cuda") else "float32") if source.dtype == "auto" else source.dtype
    return replace(source, device=device, dtype=dtype)


def with_compiler(source: ModelSource) -> ModelSource:
    """Triton compiles a launcher for each kernel when it first runs, with the machine's C compiler; without one the torch
    references run, which the page says (facts). Who asked for Triton by name is refused.

    Raises EngineError "no_compiler".
    """
    if not source.device.startswith("cuda") or source.backend == "torch" or c_compiler() is not None:
        return source
    if source.backend == "triton":
        sentence = "The Triton kernels need a C compiler, and there is none here. Install gcc, or start with --backend torch."
        raise EngineError("no_compiler", sentence)
    return replace(source, backend="torch")


def c_compiler() -> str | None:
    """What Triton would call: CC, gcc or clang."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def build_core(
    config: EngineConfig, progress: Callable[[float, str], None] = lambda fraction, text: None
) -> tuple[EngineCore, LoadedModel]:
    """Everything an engine needs, ready to step. Raises EngineError with a sentence when it cannot be had."""
    config = replace(config, source=with_compiler(settle_source(config.source)))
    device, dtype = torch.device(config.source.device), DTYPES.get(config.source.dtype, torch.float32)
    loaded = load_model(config.source.model, device, dtype, progress)
    page_bytes = layout_of(loaded.config, config.cache.page_size, config.source.dtype).page_bytes
    free = free_bytes(device)
    config = resolve(config, loaded.config, has_cuda=torch.cuda.is_available(), free_bytes=free, page_bytes=page_bytes)
    progress(0.97, "Checking kernels against their references")
    ops, reports = choose_ops(config.source.backend, device, dtype)
    core = EngineCore(config, ModelRunner(loaded.model, arena_config(config), ops), text_maker(loaded), loaded.config.eos_token_ids)
    for fact in (*reports, *cards(ops, device)):
        core.announce(fact)
    if config.nvtx:
        watch(core, nvtx_sink())
    core.peer = lambda: TransformersPeer(loaded.folder.path, device, dtype)
    return core, loaded


def text_maker(loaded: LoadedModel) -> Callable[[Request], Detokenizer]:
    """A detokeniser for each sample of a request."""
    return lambda request: Detokenizer(loaded.tokenizer, request.prompt_token_ids, request.sampling.stop)


def facts(core: EngineCore, loaded: LoadedModel) -> dict[str, object]:
    """What every Trace of this run carries: plain data."""
    config = core.config
    return {
        "source": "live",
        "device": device_name(core.runner.device),
        "device_memory_bytes": device_memory(core.runner.device),
        "backend": core.runner.ops.backend,
        **({} if c_compiler() or core.runner.device.type != "cuda" else {"no_compiler": True}),
        "dtype": config.source.dtype,
        "model": model_facts(loaded.folder, loaded.config, loaded.num_parameters, config.max_model_len),
        "eos_token_ids": sorted(loaded.config.eos_token_ids),
        "kv_bytes_per_token": core.runner.arena.shape[1] // config.cache.page_size,
        "config": config_facts(config),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def model_facts(folder: ModelFolder, shape: ModelConfig, parameters: int, max_model_len: int | None) -> dict[str, object]:
    """What can be said of a model before its weights are read."""
    return {
        "name": folder.name, "family": shape.family, "parameters": parameters, "layers": shape.num_layers,
        "hidden_size": shape.hidden_size, "heads": shape.num_heads, "kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size, "tie_word_embeddings": shape.tie_word_embeddings,
        "max_model_len": max_model_len, "weights": folder.source, "precision": folder.precision,
    }  # fmt: skip


def find_model(config: EngineConfig, progress: Callable[[float, str], None]) -> Ready:
    """What there is to know, and to fetch, before a device is there: the model's files, its tokenizer's folder, its shape.

    Raises EngineError as load_model does, for what can be seen without reading the weights.
    """
    folder = resolve_model(config.source.model, progress)
    family, shape = parse_config(read_config(folder.path))
    length = min(config.max_model_len or shape.max_position_embeddings, shape.max_position_embeddings)
    model = model_facts(folder, shape, count_parameters(family.params(shape)), length)
    meta = {"source": "live", "model": model, "eos_token_ids": sorted(shape.eos_token_ids), "versions": versions(), "commit": commit()}
    return Ready(replace(config, max_model_len=length), folder, meta)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"


def device_memory(device: torch.device) -> int:
    """All of it, used or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """What GLASS_COMMIT says (a copied tree may lie in somebody else's checkout), else the checkout's commit, else "unknown"."""
    root = Path(__file__).resolve().parent.parent
    try:
        return os.environ.get("GLASS_COMMIT") or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
