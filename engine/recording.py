"""Save and load a Trace: one safetensors file, columns of the tables as tensors, the rest as strict JSON.

A safetensors file cannot execute anything and its library checks offsets, shapes and types; what it cannot know
is checked here before a view sees it: sizes, names, ranges, order, references. A stranger's file costs bounded
time and memory and is refused with a sentence that says what is wrong. Saving is deterministic: load, then
save, gives the same bytes. Rejected: pickle, and zip (a member can lie about its size).
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from engine.errors import EngineError
from engine.trace import (
    FINISH_REASONS,
    KEYFRAME,
    TABLES,
    TOP_WIDTH,
    WAIT_REASONS,
    KernelReport,
    Op,
    SequenceInfo,
    StepError,
    TensorSample,
    Trace,
)

FORMAT, VERSION = "glass-engine-recording", 1
MAX_FILE = 512 * 2**20
MAX_HEADER = 8 * 2**20
MAX_SEQUENCES, MAX_TEXT, MAX_PAGES, MAX_SAMPLES = 100_000, 2**20, 2**22, 4096


# ---- saving ----


def save(trace: Trace, path: str | os.PathLike) -> None:
    """Write a recording, all of it or nothing.

    Raises:
        EngineError: "cannot_write" (folder missing, read-only or full).
    """
    path, temporary = Path(path), None
    try:
        content = dump(trace)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".recording-", delete=False) as file:
            temporary = Path(file.name)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise EngineError("cannot_write", f"The recording could not be written to {path}: {error.strerror}.", path=str(path)) from None


def dump(trace: Trace) -> bytes:
    """A recording as bytes."""
    tensors: dict[str, np.ndarray] = {}
    for name, dtype in TABLES.items():
        rows = getattr(trace, name)
        for field in dtype.names or ("",):
            column = rows[field] if field else rows
            tensors[f"{name}.{field}" if field else name] = np.ascontiguousarray(column)
    samples = [a for a in trace.artifacts if isinstance(a, TensorSample)]
    for at, sample in enumerate(samples):
        tensors[f"sample.{at:04d}"] = np.ascontiguousarray(sample.values, np.float32)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "meta": _plain({k: v for k, v in trace.meta.items() if k != "source"}),
        "sequences": [asdict(info) for _, info in sorted(trace.sequences.items())],
        "token_texts": {str(i): text for i, text in sorted(trace.token_texts.items())},
        "errors": [asdict(error) for error in trace.errors],
        "reports": [_plain(asdict(a)) for a in trace.artifacts if isinstance(a, KernelReport)],
        "samples": [{k: v for k, v in _described(s).items()} for s in samples],
    }
    text = json.dumps(manifest, ensure_ascii=True, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return save_tensors(tensors, {"manifest": text})


def _described(sample: TensorSample) -> dict[str, object]:
    return {f.name: getattr(sample, f.name) for f in fields(sample) if f.name != "values"}


def _plain(value: object) -> object:
    """JSON can hold it: tuples become lists, infinities and NaN become null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    if isinstance(value, np.generic):
        return _plain(value.item())
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


# ---- loading ----


def load(path: str | os.PathLike) -> Trace:
    """A recording, checked.

    Raises:
        EngineError: "recording_missing", "recording_newer", "recording_too_large" or "recording_corrupt".
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MAX_FILE:
            raise EngineError("recording_too_large", f"The file has {size:,} bytes; a recording has at most {MAX_FILE:,}.", size=size)
        content = path.read_bytes()
    except OSError as error:
        raise EngineError("recording_missing", f"The recording {path} cannot be read: {error.strerror}.", path=str(path)) from None
    return parse(content)


def parse(content: bytes) -> Trace:
    """load() for bytes in memory."""
    if len(content) > MAX_FILE:
        raise EngineError(
            "recording_too_large", f"The file has {len(content):,} bytes; a recording has at most {MAX_FILE:,}.", size=len(content)
        )
    try:
        manifest = _manifest(content)
        tensors = load_tensors(content)
        return _trace(manifest, tensors)
    except EngineError:
        raise
    except SafetensorError as error:
        raise _corrupt(f"its container is broken ({str(error)[:160]})") from None
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, AttributeError, MemoryError) as error:
        raise _corrupt(f"{type(error).__name__}: {str(error)[:160]}") from None


def _corrupt(what: str) -> EngineError:
    return EngineError("recording_corrupt", f"This file is not a usable recording: {what}.", what=what)


def _need(ok: object, what: str) -> None:
    if not ok:
        raise _corrupt(what)


def _manifest(content: bytes) -> dict:
    """The JSON part, read before the container is trusted with anything."""
    _need(len(content) >= 10, "it is too short")
    (length,) = struct.unpack("<Q", content[:8])
    _need(length <= min(MAX_HEADER, len(content) - 8), "its header is longer than the file or than 8 MiB")
    header = json.loads(content[8 : 8 + length])
    _need(isinstance(header, dict) and isinstance(header.get("__metadata__"), dict), "it has no manifest")
    _need(len(header) < len(_COLUMNS) + MAX_SAMPLES + 2, "it names too many arrays")
    manifest = json.loads(header["__metadata__"].get("manifest", "null"), parse_constant=_no_constant)
    _need(isinstance(manifest, dict) and manifest.get("format") == FORMAT, "it was not written by Glass Engine")
    version = manifest.get("version")
    _need(isinstance(version, int) and version >= 1, "it names no format version")
    if version > VERSION:
        raise EngineError(
            "recording_newer", f"This recording has format {version}; this program reads up to {VERSION}. Update it to open the file.",
            version=version, reads=VERSION,
        )  # fmt: skip
    return manifest


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_COLUMNS = {
    (f"{name}.{field}" if field else name): (dtype[field] if field else dtype)
    for name, dtype in TABLES.items()
    for field in dtype.names or ("",)
}


def _trace(manifest: dict, tensors: dict[str, np.ndarray]) -> Trace:
    tables = {name: _table(name, dtype, tensors) for name, dtype in TABLES.items()}
    meta = manifest.get("meta")
    _need(isinstance(meta, dict), "its facts are missing")
    sequences = _sequences(manifest.get("sequences"))
    texts = manifest.get("token_texts")
    _need(isinstance(texts, dict) and all(isinstance(v, str) and len(v) < MAX_TEXT for v in texts.values()), "its token texts are wrong")
    errors = tuple(
        StepError(int(e["step_id"]), str(e["code"]), str(e["sentence"])[:2000], tuple(map(int, e["seq_ids"]))) for e in manifest["errors"]
    )
    reports = tuple(KernelReport(**r) for r in manifest.get("reports", ()))
    samples = tuple(
        TensorSample(int(s["step_id"]), str(s["name"]), int(s["layer"]), tensors[f"sample.{at:04d}"], str(s["provenance"]))
        for at, s in enumerate(manifest.get("samples", ())[:MAX_SAMPLES])
    )
    meta = {**meta, "configs": tuple(meta.get("configs") or ()), "source": "recording"}
    _check_meta(meta)
    trace = Trace(tables, sequences, {int(k): v for k, v in texts.items()}, meta, (*reports, *samples), errors)
    _check_tables(trace)
    _check_log(trace)
    return trace


def _table(name: str, dtype: np.dtype, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """One table from its columns, each of exactly the type and shape that this version writes."""
    names = dtype.names or ("",)
    keys = [f"{name}.{field}" if field else name for field in names]
    missing = [k for k in keys if k not in tensors]
    _need(not missing, f"the column {missing[0] if missing else ''} is missing")
    count = len(tensors[keys[0]]) if tensors[keys[0]].ndim else -1
    table = np.zeros(max(count, 0), dtype)
    for field, key in zip(names, keys, strict=True):
        base, shape = (dtype[field].base, dtype[field].shape) if field else (dtype, ())
        column = tensors[key]
        _need(column.dtype == base and column.shape == (count, *shape), f"the column {key} has the wrong type or length")
        if field:
            table[field] = column
        else:
            table = column
    return table


def _sequences(listed: object) -> dict[int, SequenceInfo]:
    _need(isinstance(listed, list) and len(listed) <= MAX_SEQUENCES, "its list of requests is wrong")
    found: dict[int, SequenceInfo] = {}
    for entry in listed:
        info = SequenceInfo(**{**entry, "prompt_token_ids": tuple(entry["prompt_token_ids"])})
        numbers = (
            info.seq_id,
            info.request_id,
            info.sample,
            info.max_tokens,
            info.seed,
            info.priority,
            info.arrival_us,
            *info.prompt_token_ids,
        )
        _need(all(type(n) is int and abs(n) < 2**63 for n in numbers), "a request's numbers are wrong")
        _need(isinstance(info.temperature, (int, float)), "a request's temperature is wrong")
        strings = (info.name, info.prompt, info.room)
        _need(all(isinstance(s, str) and len(s) <= 16 * MAX_TEXT for s in strings) and len(info.name) <= 40, "a request's texts are wrong")
        found[info.seq_id] = info
    return found


def _check_meta(meta: Mapping) -> None:
    configs = meta["configs"]
    _need(all(isinstance(c, dict) for c in configs), "its knobs are wrong")
    for config in configs or ({},):
        pages, size = config.get("num_pages", 0), config.get("page_size", 16)
        _need(type(pages) is int and 0 <= pages <= MAX_PAGES, "it names an impossible number of pages")
        _need(type(size) is int and 1 <= size <= 4096, "it names an impossible page size")
    for key in ("event_base", "text_base"):
        _need(type(meta.get(key, 0)) is int and 0 <= meta.get(key, 0) < 2**62, f"its {key} is wrong")


def _check_tables(trace: Trace) -> None:
    """Every reference from one table into another holds."""
    steps = trace.steps
    _need((np.diff(steps["step_id"]) > 0).all() and (steps["step_id"] >= 0).all(), "its steps are not in order")
    _need((np.diff(steps["event_end"]) >= 0).all(), "its event log is not in order")
    base = int(trace.meta.get("event_base", 0))
    _need(
        not len(steps) or (base <= steps["event_end"][0] and steps["event_end"][-1] <= base + len(trace.events)),
        "steps point outside the event log",
    )
    _need(not len(steps) or steps["config"].max() < max(len(trace.meta["configs"]), 1), "a step names knobs that are not there")
    _need(not len(steps) or steps["config"].min() >= 0, "a step names knobs that are not there")
    known = np.array(sorted(trace.sequences), np.int64)
    for name in ("works", "tokens", "waits", "preempts", "finishes", "texts"):
        rows = getattr(trace, name)
        _need((np.diff(rows["step_id"]) >= 0).all(), f"{name} are not in order")
        _need(np.isin(rows["seq_id"], known).all(), f"{name} name a request that is not there")
    works = trace.works
    _need(
        (works["num_tokens"] >= 1).all() and (works["start"] >= 0).all() and (works["num_tokens"] < 2**24).all(),
        "a step computes an impossible number of tokens",
    )
    _need(
        (works["start"] < 2**24).all() and (works["row"] >= 0).all() and (works["row"] < 2**16).all(),
        "a step has an impossible position or row",
    )
    _need((trace.tokens["num_top"] <= TOP_WIDTH).all(), "a token has too many alternatives")
    _need((trace.waits["reason"] < len(WAIT_REASONS)).all(), "a waiting reason is unknown")
    _need((trace.finishes["reason"] < len(FINISH_REASONS)).all(), "a finish reason is unknown")
    start = trace.texts["offset"] - int(trace.meta.get("text_base", 0))
    _need((start >= 0).all() and (trace.texts["num_bytes"] >= 0).all(), "a text lies outside the file")
    _need((start + trace.texts["num_bytes"] <= len(trace.text_bytes)).all(), "a text lies outside the file")


def _check_log(trace: Trace) -> None:
    """The event log can be replayed: pages exist, nothing is released that is not held."""
    most = max([int(c.get("num_pages", 0)) for c in trace.meta["configs"]], default=0)
    for rows in (trace.events, trace.keyframes):
        _need((rows["page"] >= 0).all() and (rows["page"] <= most).all(), "an event names a page that is not there")
        _need((rows["index"] >= 0).all(), "an event has an impossible place")
    ops = trace.keyframes["op"]
    _need(np.isin(trace.events["op"], list(Op)).all() and np.isin(ops, [0, *Op]).all(), "an event is of an unknown kind")
    _need((np.diff(trace.keyframes["event_at"]) >= 0).all() and KEYFRAME == trace.keyframes.dtype, "its keyframes are not in order")
    held: dict[tuple[int, int], int] = {}
    begin = int(trace.meta.get("event_base", 0))
    first = trace.keyframes[trace.keyframes["event_at"] == begin]
    for op, page, owner, index in [*first[["op", "page", "owner", "index"]].tolist(), *trace.events.tolist()]:
        if op in (Op.ALLOC, Op.SHARE):
            held[owner, index] = page
        elif op == Op.RELEASE:
            _need(held.pop((owner, index), None) == page, "its event log releases a page that is not held")
