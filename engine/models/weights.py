"""Reads a checkpoint folder: config.json, generation_config.json and safetensors, whole or in shards.

Everything that can be wrong is found from the files' headers, before a weight is allocated: a missing or cut-off
shard, an index that names what is not there, a wrong shape, a weight that the model would not read. Only the files
that the index names are read, and each parameter is assigned exactly once. Sharding over GPUs reads only the rank's
part of a tensor.

Rejected: safetensors' load_file on every file of the folder (merges strays, and a missing shard stays silent).
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import EngineError
from engine.models.base import Param

Progress = Callable[[float, str], None]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADER_LIMIT = 100 * 2**20  # safetensors' own
HEAD = "lm_head.weight"
WEIGHTS = (".weight", ".bias")  # what else is stored (rotary_emb.inv_freq, masked_bias) is a constant that code makes again
HARMLESS = re.compile(r"lm_head\.weight|.*\.attn\.bias")  # a tied model's head (load_tied compares it), GPT-2's causal mask
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def no_progress(fraction: float, text: str) -> None:
    """The progress callback that shows nothing."""


def bad(file: str, reason: str) -> EngineError:
    """What is wrong with which file."""
    return EngineError("bad_checkpoint", f"The checkpoint is not usable: {file} {reason}.", file=file, reason=reason)


def read_json(path: Path) -> dict:
    """A JSON object from a file.

    Raises:
        EngineError: "bad_checkpoint", naming the file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise bad(path.name, "is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise bad(path.name, f"cannot be read ({type(error).__name__})") from None
    except (ValueError, RecursionError):
        raise bad(path.name, "is not valid JSON") from None
    if not isinstance(found, dict):
        raise bad(path.name, "does not hold a JSON object")
    return found


def read_config(folder: Path) -> dict:
    """config.json with the EOS ids in force, as transformers' generate takes them: generation_config.json decides
    alone where it exists (a number, a list or none at all), else config.json; the tokenizer's eos_token never counts."""
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        config["eos_token_id"] = read_json(generation).get("eos_token_id")
    return config


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies and what it is, from its file's header."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, with every size checked against the file's length.

    Raises:
        EngineError: "bad_checkpoint", naming the file: missing, cut off or damaged.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if len(start) < 8 or length > size - 8 or length > HEADER_LIMIT:
                raise bad(path.name, "is cut off or is no safetensors file")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise bad(path.name, "is missing") from None
    except OSError as error:
        raise bad(path.name, f"cannot be read ({type(error).__name__})") from None
    except ValueError:
        raise bad(path.name, "is damaged: its header is not valid JSON") from None
    found, end = {}, 0
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, stop = entry["data_offsets"]
            found[name] = Stored(path.name, str(entry["dtype"]), tuple(map(int, entry["shape"])), int(stop) - int(begin))
            end = max(end, int(stop))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise bad(path.name, "is damaged: its header is not that of a safetensors file") from None
    whole = 8 + length + end
    if size < whole:
        raise bad(path.name, f"is cut off: {size:,} bytes of {whole:,}")
    if size > whole:
        raise bad(path.name, "has bytes at its end that belong to no tensor")
    return found


def checkpoint_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint by name. With an index only the files that it names are opened."""
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise bad(SINGLE, f"is missing, and so is {INDEX}")
        return read_header(folder / SINGLE)
    mapping = read_json(folder / INDEX).get("weight_map")
    if not isinstance(mapping, Mapping) or not mapping:
        raise bad(INDEX, "has no weight_map")
    for name in mapping.values():
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            raise bad(INDEX, f"names a file outside the folder: {str(name)[:80]}")
    headers = {name: read_header(folder / name) for name in sorted(set(mapping.values()))}
    found = {}
    for tensor, name in mapping.items():
        if tensor not in headers[name]:
            raise bad(name, f"does not hold {tensor[:120]}, although {INDEX} says so")
        found[tensor] = headers[name][tensor]
    return found


def check_tensors(stored: Mapping[str, Stored], params: tuple[Param, ...], world: int = 1) -> None:
    """Every parameter is there, once, with its shape and a type that can be converted; and no weight is left unread.

    Raises:
        EngineError: "bad_checkpoint", naming file and tensor.
    """
    for param in params:
        found = stored.get(param.name)
        if found is None:
            raise bad("the set of weights", f"lacks the tensor {param.name}")
        if found.shape != param.shape:
            raise bad(found.file, f"holds {param.name} with the shape {list(found.shape)}, and config.json asks for {list(param.shape)}")
        if found.dtype not in DTYPES:
            raise EngineError(
                "unsupported_model", f"This model needs weights of the type {found.dtype[:20]} ({param.name}), which is not supported.",
                what=f"weights of the type {found.dtype[:20]}",
            )
        if param.shard_axis is not None and param.shape[param.shard_axis] % world:
            raise bad(found.file, f"holds {param.name}, which does not split into {world} equal parts")
    read = {param.name for param in params}
    unread = [name for name in stored if name not in read and name.endswith(WEIGHTS) and not HARMLESS.fullmatch(name)]
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        raise bad(stored[unread[0]].file, f"holds {unread[0][:120]}{more}, which a model of this config.json does not read")


def load_weights(
    folder: Path, params: tuple[Param, ...], device: torch.device, dtype: torch.dtype, progress: Progress = no_progress,
    shard: tuple[int, int] = (0, 1),
) -> dict[str, torch.Tensor]:
    """Every parameter by name, on `device` and in `dtype`, copied out of the files (which may then change or go).

    Args:
        shard: (rank, world): each parameter is cut into `world` equal parts along its shard_axis.
    """
    stored = checkpoint_tensors(folder)
    check_tensors(stored, params, shard[1])
    by_file: dict[str, list[Param]] = {}
    for param in params:
        by_file.setdefault(stored[param.name].file, []).append(param)
    total, done, weights = sum(stored[p.name].nbytes for p in params) or 1, 0, {}
    for name, wanted in by_file.items():
        try:
            with safe_open(folder / name, framework="pt") as file:
                for param in wanted:
                    if param.name in weights:
                        raise RuntimeError(f"{param.name} is declared twice")
                    weights[param.name] = _read(file, param, shard).to(device=device, dtype=dtype, copy=True)
                    done += stored[param.name].nbytes
                    progress(done / total, f"Loading weights: {done / 2**20:,.0f} of {total / 2**20:,.0f} MB")
        except (SafetensorError, OSError) as error:
            raise bad(name, f"cannot be read ({type(error).__name__})") from None
    if len(weights) != len(params):
        raise RuntimeError(f"{len(weights)} tensors were assigned to {len(params)} parameters")
    return weights


def _read(file, param: Param, shard: tuple[int, int]) -> torch.Tensor:
    rank, world = shard
    if param.shard_axis is None or world == 1:
        return file.get_tensor(param.name)
    size = param.shape[param.shard_axis] // world
    part = slice(rank * size, (rank + 1) * size)
    return file.get_slice(param.name)[(slice(None),) * param.shard_axis + (part,)].contiguous()


def stored_types(folder: Path) -> str:
    """The types that the checkpoint's weights are kept in, most bytes first, for people: "bfloat16"."""
    sizes: dict[str, int] = {}
    for tensor in checkpoint_tensors(folder).values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    ranked = sorted(sizes, key=lambda d: -sizes[d])
    return " and ".join(DTYPES.get(d, d) for d in ranked)
