"""From a config to a running core: load the model, find the hardware, choose kernels, cut the arena."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from engine.config import EngineConfig, ModelSource, arena_config, config_facts, resolve
from engine.core import EngineCore
from engine.detokenizer import Detokenizer
from engine.errors import EngineError
from engine.models.loading import LoadedModel, load_model
from engine.ops import choose_ops
from engine.request import Request
from engine.runner import DTYPES, ModelRunner, free_bytes, layout_of


def settle_source(source: ModelSource) -> ModelSource:
    """The device and type that "auto" means on this machine."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if source.device == "auto" else source.device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise EngineError("no_cuda", "This machine has no NVIDIA GPU that can be used. Start with --device cpu.")
    dtype = ("bfloat16" if device.startswith("cuda") else "float32") if source.dtype == "auto" else source.dtype
    return replace(source, device=device, dtype=dtype)


def build_core(
    config: EngineConfig, progress: Callable[[float, str], None] = lambda fraction, text: None
) -> tuple[EngineCore, LoadedModel]:
    """Everything an engine needs, ready to step. Raises EngineError with a sentence when it cannot be had."""
    config = replace(config, source=settle_source(config.source))
    device, dtype = torch.device(config.source.device), DTYPES.get(config.source.dtype, torch.float32)
    loaded = load_model(config.source.model, device, dtype, progress)
    page_bytes = layout_of(loaded.config, config.cache.page_size, config.source.dtype).page_bytes
    free = free_bytes(device)
    config = resolve(config, loaded.config, has_cuda=torch.cuda.is_available(), free_bytes=free, page_bytes=page_bytes)
    progress(0.97, "Checking kernels against their references")
    ops, reports = choose_ops(config.source.backend, device, dtype)
    core = EngineCore(config, ModelRunner(loaded.model, arena_config(config), ops), text_maker(loaded), loaded.config.eos_token_ids)
    for report in reports:
        core.announce(report)
    return core, loaded


def text_maker(loaded: LoadedModel) -> Callable[[Request], Detokenizer]:
    """A detokeniser for each sample of a request."""
    return lambda request: Detokenizer(loaded.tokenizer, request.prompt_token_ids, request.sampling.stop)


def facts(core: EngineCore, loaded: LoadedModel) -> dict[str, object]:
    """What every Trace of this run carries: plain data."""
    config, shape = core.config, loaded.config
    return {
        "source": "live",
        "device": device_name(core.runner.device),
        "device_memory_bytes": device_memory(core.runner.device),
        "backend": core.runner.ops.backend,
        "dtype": config.source.dtype,
        "model": {
            "name": loaded.folder.name, "family": shape.family, "parameters": loaded.num_parameters, "layers": shape.num_layers,
            "hidden_size": shape.hidden_size, "heads": shape.num_heads, "kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim,
            "vocab_size": shape.vocab_size, "tie_word_embeddings": shape.tie_word_embeddings,
            "max_model_len": config.max_model_len, "weights": loaded.folder.source, "precision": loaded.folder.precision,
        },
        "eos_token_ids": sorted(shape.eos_token_ids),
        "kv_bytes_per_token": core.runner.arena.shape[1] // config.cache.page_size,
        "config": config_facts(config),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


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
    """The checkout's commit; outside one what GLASS_COMMIT says, else "unknown"."""
    root = Path(__file__).resolve().parent.parent
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("GLASS_COMMIT", "unknown")
