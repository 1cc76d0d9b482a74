"""From what a person wrote after --model to a model that runs: find it, read it, build it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.config import ModelConfig
from engine.errors import EngineError
from engine.models.base import Family, Model, count_parameters
from engine.models.default import default_model
from engine.models.hub import REPO, ModelFolder, fetch
from engine.models.registry import parse_config
from engine.models.weights import HEAD, Progress, checkpoint_tensors, load_weights, no_progress, read_config, stored_types
from engine.tokenizer import TextTokenizer

EMBEDDING = "model.embed_tokens.weight"
ADVICE = {
    "model_not_found": "Check the name, or leave --model out: then the default model is used.",
    "bad_checkpoint": "Fetch the model again, or give another one with --model.",
    "unsupported_model": "Give another one with --model.",
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with what belongs to it."""

    model: Model
    config: ModelConfig
    tokenizer: TextTokenizer
    folder: ModelFolder
    num_parameters: int


def resolve_model(model: str | None, progress: Progress = no_progress) -> ModelFolder:
    """The folder that `model` means: a folder, a Hub id, or None for GLASS_MODEL and then the default model.

    Raises:
        EngineError: "model_not_found" or "bad_checkpoint" with the reason.
    """
    wanted = model or os.environ.get("GLASS_MODEL") or None
    if wanted is None:
        return default_model(progress)
    path = Path(wanted).expanduser()
    if os.path.isdir(path):  # unlike Path.is_dir, no name is too long for it
        return ModelFolder(path, "folder", stored_types(path) if (path / "config.json").is_file() else "", path.resolve().name)
    if os.path.isfile(path):
        raise _not_found(wanted, "it is a file; give the folder that holds config.json and the safetensors files")
    if not REPO.fullmatch(wanted):
        raise _not_found(wanted, "there is no such folder, and it is no Hub id (owner/name)")
    folder = fetch(wanted, progress)
    return ModelFolder(folder, "hub", stored_types(folder), wanted)


def check_folder(model: str) -> None:
    """What can be seen in a moment of a model that is not on the Hub: config.json, its family, the sizes of the weights.

    Raises:
        EngineError: as load_model, with advice.
    """
    if REPO.fullmatch(model) and not os.path.exists(model):
        return
    try:
        folder = resolve_model(model).path
        parse_config(read_config(folder))
        checkpoint_tensors(folder)
    except EngineError as error:
        raise advised(error, model) from None


def advised(error: EngineError, model: str | None) -> EngineError:
    """The error with what a person can do about it; the default model's own sentence says so already."""
    advice = ADVICE.get(error.code) if model else None
    return EngineError(error.code, f"{error.sentence} {advice}", **error.fields) if advice else error


def load_model(
    model: str | None, device: torch.device | str, dtype: torch.dtype, progress: Progress = no_progress, rank: int = 0, world: int = 1
) -> LoadedModel:
    """Find, check and load a model.

    Raises:
        EngineError: "model_not_found", "bad_checkpoint" or "unsupported_model".
    """
    folder = resolve_model(model, progress)
    family, config = parse_config(read_config(folder.path))
    if config.num_heads % world or config.num_kv_heads % world:
        raise EngineError("bad_config", f"{config.num_heads} heads and {config.num_kv_heads} KV heads do not split over {world} devices.")
    tokenizer = TextTokenizer.load(folder.path)  # small: its faults are found before the weights are read
    with one_thread():
        config, weights = load_tied(folder.path, family, config, torch.device(device), dtype, progress, (rank, world))
        progress(1.0, "Building the model")
        model = family.build(config, weights)
    return LoadedModel(model, config, tokenizer, folder, count_parameters(family.params(config)))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Copying hundreds of small weights on two shared cores, torch's threads mostly wait for one another: SmolLM2-135M
    took 1.8 to 2.5 s, and with one thread 0.5 to 0.8."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_tied(
    folder: Path, family: Family, config: ModelConfig, device: torch.device, dtype: torch.dtype, progress: Progress = no_progress,
    shard: tuple[int, int] = (0, 1),
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Weights, and the config with tying as the checkpoint has it: like transformers, a head that is stored beside
    the embeddings and differs from them is used, whatever config.json says."""
    if not (config.tie_word_embeddings and HEAD in checkpoint_tensors(folder)):
        return config, load_weights(folder, family.params(config), device, dtype, progress, shard)
    untied = replace(config, tie_word_embeddings=False)
    weights = load_weights(folder, family.params(untied), device, dtype, progress, shard)
    if not torch.equal(weights[HEAD], weights[EMBEDDING]):
        return untied, weights
    del weights[HEAD]
    return config, weights


def _not_found(model: str, reason: str) -> EngineError:
    return EngineError("model_not_found", f"The model {model[:200]} was not found: {reason}.", model=model[:200], reason=reason)
