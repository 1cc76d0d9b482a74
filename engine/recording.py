"""Save and load a Trace: one safetensors file, the same bytes for the same Trace.

One metadata key, "manifest", holds strict JSON (who, where, which sequences, which words); every table column is a
tensor "steps.step_id", …; so are prompts and probed arrays. Nothing in the file can execute code. A stranger's file
is measured before it is parsed and checked before it becomes a Trace (engine/recording_check.py); what is wrong
with it is said in one sentence. Rejected: pickle (runs code), zip of npy (member sizes can lie).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import secrets
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as unpack
from safetensors.numpy import save as pack

from engine.errors import EngineError
from engine.recording_artifacts import Loader, columns_of, words_of
from engine.recording_check import (
    MAX_BYTES,
    MAX_HEADER,
    MAX_PROMPT,
    MAX_SAMPLES,
    MAX_WORD,
    Bad,
    Reader,
    check_comparison,
    check_layout,
    check_tables,
    parse,
)
from engine.trace import TABLES, KernelReport, Op, SequenceInfo, StepError, TensorSample, Trace

FORMAT = "glass-recording"
VERSION = 1
FINER_CLOCKS = ("settle_at_us", "gpu_us", "sample_us", "text_us", "record_us")
ADDED_LATER = frozenset({"steps.graph_size", *(f"steps.{clock}" for clock in FINER_CLOCKS)})  # that the first recordings lack: zeros
PROMPTS = "prompt_token_ids"  # the tensor with all prompts, one after the other


# ---- files ----


def save(trace: Trace, path: str | os.PathLike) -> None:
    """Write a recording; the file appears whole or not at all.

    Raises:
        EngineError: "recording_not_saved" (full disk, read-only folder), "recording_too_large".
    """
    data, path = encode(trace), Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        reason = error.strerror or type(error).__name__
        raise EngineError("recording_not_saved", f"The recording was not saved: {reason} ({path.name}).", reason=reason) from error


def load(path: str | os.PathLike) -> Trace:
    """Read a recording.

    Raises:
        EngineError: "recording_missing", "recording_corrupt" (saying what is wrong), "recording_newer".
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise EngineError("recording_missing", f"The recording {path.name} cannot be opened: {reason}.", reason=reason) from error
    return decode(data)


# ---- bytes ----


def encode(trace: Trace) -> bytes:
    """A Trace as the bytes of a recording."""
    columns: dict[str, np.ndarray] = {}
    for name, dtype in TABLES.items():
        table = getattr(trace, name)
        for field in dtype.names or ():
            columns[f"{name}.{field}"] = np.ascontiguousarray(table[field])
        if not dtype.names:
            columns[name] = np.ascontiguousarray(table)
    infos = [trace.sequences[i] for i in sorted(trace.sequences)]
    columns[PROMPTS] = np.array([token for info in infos for token in info.prompt_token_ids], np.int32)
    artifacts = []
    for artifact in trace.artifacts:
        artifacts.append({"type": type(artifact).__name__, **_fields(artifact), **words_of(artifact)})
        columns |= columns_of(artifact, len(artifacts) - 1)
        if isinstance(artifact, TensorSample):
            columns[f"samples.{len(artifacts) - 1}"] = np.ascontiguousarray(artifact.values, np.float32)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "meta": _plain({k: v for k, v in trace.meta.items() if k not in ("configs", "source")}),
        "configs": _plain(list(trace.meta.get("configs", ()))),
        "sequences": [_fields(info) | {"num_prompt_tokens": info.num_prompt_tokens} for info in infos],
        "token_texts": sorted([int(i), _text(text)[:MAX_WORD]] for i, text in trace.token_texts.items()),
        "errors": [_fields(error) for error in trace.errors],
        "artifacts": artifacts,
    }
    words = json.dumps(manifest, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
    data = pack(columns, {"manifest": words})
    if len(data) > MAX_BYTES or int.from_bytes(data[:8], "little") > MAX_HEADER:
        raise EngineError("recording_too_large", "This run is too long for one recording; save fewer steps.", num_bytes=len(data))
    return data


def decode(data: bytes) -> Trace:
    """The Trace in a recording's bytes; raises as load() does."""
    try:
        manifest = _manifest(data)
        return _build(manifest, unpack(data))
    except (Bad, SafetensorError, RecursionError) as error:
        raise EngineError("recording_corrupt", f"This recording cannot be read: {error}.", what=str(error)[:200]) from error


def _manifest(data: bytes) -> Reader:
    """Check the container without trusting it, then the manifest's format and version."""
    metadata = check_layout(data)
    manifest = Reader("the manifest", parse(metadata.get("manifest"), "its manifest"))
    if manifest.value.get("format") != FORMAT:
        raise Bad("it is not a recording of this engine")
    version = manifest.integer("version", 1, 2**31)
    if version > VERSION:
        sentence = f"This recording has format {version}; this version reads up to {VERSION}. Update to open it."
        raise EngineError("recording_newer", sentence, version=version, newest=VERSION)
    return manifest


def _build(manifest: Reader, tensors: dict[str, np.ndarray]) -> Trace:
    meta = dict(manifest.plain("meta"))
    meta["configs"] = manifest.configs()
    meta["source"] = "recording"
    sequences = _sequences(manifest, _tensor(tensors, PROMPTS, np.int32, 1))
    artifacts = _artifacts(manifest, tensors)
    tables = {}
    for name, dtype in TABLES.items():
        if not dtype.names:
            tables[name] = _tensor(tensors, name, dtype, 1)
            continue
        there = [f for f in dtype.names if f"{name}.{f}" in tensors or f"{name}.{f}" not in ADDED_LATER]
        parts = {f: _tensor(tensors, f"{name}.{f}", dtype[f].base, 1 + dtype[f].ndim, dtype[f].shape) for f in there}
        if len({len(part) for part in parts.values()}) > 1:
            raise Bad(f"the columns of {name} differ in length")
        tables[name] = np.zeros(len(parts[dtype.names[0]]), dtype)
        for field, part in parts.items():
            tables[name][field] = part
    if tensors:
        raise Bad(f"it holds a tensor that does not belong there: {min(tensors)[:80]}")
    check_tables(tables, meta, sequences)
    texts = {item.integer(0, 0, 2**31 - 1): item.text(1, MAX_WORD) for item in manifest.items("token_texts")}
    errors = tuple(
        StepError(e.integer("step_id", 0, 2**31 - 1), e.text("code", 200), e.text("sentence", 2000), e.integers("seq_ids"))
        for e in manifest.items("errors")
    )
    return Trace(tables, sequences, texts, meta, artifacts, errors)


def _tensor(tensors: dict[str, np.ndarray], name: str, dtype: np.dtype, ndim: int, shape: tuple[int, ...] = ()) -> np.ndarray:
    """Take a tensor out, as what it must be."""
    array = tensors.pop(name, None)
    if array is None:
        raise Bad(f"{name} is missing")
    if array.dtype != dtype or array.ndim != ndim or array.shape[1:] != shape:
        raise Bad(f"{name} has type {array.dtype} and shape {list(array.shape)}, not what this format has")
    return array


def _sequences(manifest: Reader, prompts: np.ndarray) -> dict[int, SequenceInfo]:
    found: dict[int, SequenceInfo] = {}
    at, large = 0, 2**31 - 1
    if len(prompts) and prompts.min() < 0:
        raise Bad("a prompt has a token id below 0")
    for item in manifest.items("sequences"):
        end = at + item.integer("num_prompt_tokens", 0, len(prompts) - at)
        seq_id = item.integer("seq_id", 0, large)
        if seq_id in found:
            raise Bad(f"sequence {seq_id} is there twice")
        found[seq_id] = SequenceInfo(
            seq_id, item.integer("request_id", 0, large), item.integer("sample", 0, large), item.text("name", 80),
            item.text("prompt", MAX_PROMPT), tuple(prompts[at:end].tolist()), item.integer("max_tokens", 0, large),
            item.number("temperature"), item.integer("seed", 0, 2**63 - 1), item.integer("priority", -large, large),
            item.integer("arrival_us", 0, 2**62), item.text("room", 200), **_sampling(item),
        )  # fmt: skip
        at = end
    if at != len(prompts):
        raise Bad("the prompts do not add up")
    return found


def _sampling(item: Reader) -> dict[str, object]:
    """Parameters that the first recordings lack."""
    found: dict[str, object] = {}
    if item.has("top_k"):
        found["top_k"] = item.integer("top_k", 1, 2**63 - 1)
    if item.has("top_p"):
        found["top_p"] = item.number("top_p")
    if item.has("stop"):
        found["stop"] = item.texts("stop", MAX_PROMPT)
    if item.has("stop_token_ids"):
        found["stop_token_ids"] = item.integers("stop_token_ids")
    if item.has("ignore_eos"):
        found["ignore_eos"] = item.flag("ignore_eos")
    return found


def _artifacts(manifest: Reader, tensors: dict[str, np.ndarray]) -> tuple[object, ...]:
    found: list[object] = []
    kernels = Loader(tensors)
    for at, item in enumerate(manifest.items("artifacts", MAX_SAMPLES)):
        kind = item.text("type", 80)
        if kind == "TensorSample":
            values = tensors.pop(f"samples.{at}", None)
            if values is None or values.dtype != np.float32:
                raise Bad(f"the probed array {at} is missing or not float32")
            where = (item.integer("step_id", 0, 2**31 - 1), item.text("name", 200), item.integer("layer", 0, 10_000))
            found.append(TensorSample(*where, values, item.text("provenance", 80)))
        elif kind == "KernelReport":
            words = (item.text("name", 200), item.text("backend", 80), item.text("device", 200))
            numbers = (item.number("max_error"), item.number("tolerance"), item.flag("passed"))
            found.append(KernelReport(*words, *numbers, item.text("detail", 2000)))
        elif kind == "Comparison":
            found.append(check_comparison(item))
        elif make := kernels.get(kind):
            found.append(make(item, at))
        else:
            raise Bad(f"it holds an artifact of an unknown kind, {kind[:40]}")
    return tuple(found)


# ---- plain data ----


def _text(text: str) -> str:
    """Text that UTF-8 can hold (a lone half of a surrogate pair becomes "?")."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _fields(record: object) -> dict[str, object]:
    """A small record as JSON. Arrays and prompts travel as tensors; numbers that JSON lacks become words."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name == PROMPTS or isinstance(value, np.ndarray):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        if isinstance(value, str):
            value = value[:MAX_PROMPT]
        found[field.name] = _plain(value)
    return found


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {_text(str(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(v) for v in value)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, np.generic):
        return _plain(value.item())
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int)) else _text(str(value))


# ---- parts of a run ----


def clip(trace: Trace, first: int, last: int) -> Trace:
    """The steps first … last of a trace, as a trace of its own: pool, counters and texts are right at each of them."""
    steps = trace.rows("steps", first, last)
    if not len(steps):
        return Trace(meta=trace.meta, token_texts=trace.token_texts)
    before = trace.rows("steps", 0, int(steps["step_id"][0]) - 1)
    base = int(trace.meta.get("event_base", 0))
    frames = trace.keyframes["event_at"]
    begin = int(before["event_end"][-1]) if len(before) else base if not base or base in frames else int(frames[0])
    end = int(steps["event_end"][-1])
    tables = {name: trace.rows(name, first, last) for name in ("works", "waits", "preempts", "finishes")}
    tables["steps"] = steps
    tables["events"] = trace.events[begin - base : end - base]
    later = trace.keyframes[(frames > begin) & (frames <= end)]
    tables["keyframes"] = np.concatenate([_keyframe(trace, before, begin), later])
    held = np.concatenate([tables[name]["owner"] for name in ("events", "keyframes")])
    named = {int(i) for name in ("works", "waits", "preempts", "finishes") for i in np.unique(tables[name]["seq_id"])}
    named |= {int(i) for i in np.unique(held)} | {int(i) for i in tables["preempts"]["for_seq_id"]}
    named |= {int(i) for i in np.unique(trace.rows("tokens", first, last)["seq_id"])}
    tables |= _texts(trace, named, last)
    meta = {**trace.meta, "event_base": begin, "text_base": 0}
    if len(before):
        meta["computed_before"] = {str(i): n for i, n in trace.computed_at(int(before["step_id"][-1])).items()}
    infos = {i: info for i, info in trace.sequences.items() if i in named}
    used = {token for info in infos.values() for token in info.prompt_token_ids}
    used |= {*tables["tokens"]["token_id"].tolist(), *tables["tokens"]["top_ids"].ravel().tolist()}
    words = {i: text for i, text in trace.token_texts.items() if i in used}
    inside = [a for a in trace.artifacts if first <= getattr(a, "step_id", first) <= last]
    errors = tuple(e for e in trace.errors if first <= e.step_id <= last)
    return Trace(tables, infos, words, meta, tuple(inside), errors)


def _keyframe(trace: Trace, before: np.ndarray, begin: int) -> np.ndarray:
    """Rows that rebuild the pool as it was before the first step."""
    rows = [(begin, 0, 0, 0, 0)]
    state = trace.pool_at(int(before["step_id"][-1])) if len(before) else trace.pool_after(begin)
    seen: set[int] = set()
    for owner, table in state.tables.items():
        for index, page in enumerate(table):
            rows.append((begin, Op.SHARE if page in seen else Op.ALLOC, page, owner, index))
            seen.add(page)
    rows += [(begin, Op.PUBLISH, page, 0, 0) for page in np.flatnonzero(state.cached).tolist()]
    for page in np.flatnonzero(state.pending).tolist():
        rows += [(begin, Op.ALLOC, page, 0, 0), (begin, Op.RELEASE, page, 0, 0)]
    return np.array(rows, TABLES["keyframes"])


def _texts(trace: Trace, named: set[int], last: int) -> dict[str, np.ndarray]:
    """Tokens and texts of these sequences up to a step, with the text moved together."""
    ids = np.array(sorted(named), np.int64)
    tokens, texts = (trace.rows(name, 0, last) for name in ("tokens", "texts"))
    texts = texts[np.isin(texts["seq_id"], ids)].copy()
    starts = texts["offset"] - int(trace.meta.get("text_base", 0))
    blob = b"".join(trace.text_bytes[a : a + n].tobytes() for a, n in zip(starts.tolist(), texts["num_bytes"].tolist()))
    texts["offset"] = np.cumsum(texts["num_bytes"]) - texts["num_bytes"]
    return {"tokens": tokens[np.isin(tokens["seq_id"], ids)], "texts": texts, "text_bytes": np.frombuffer(blob, np.uint8)}
