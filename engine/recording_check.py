"""What a stranger's recording must satisfy before it becomes a Trace. numpy and stdlib only.

Every check runs in a time and memory that the file's own size bounds, and raises Bad with a clause that completes
"This recording cannot be read: …". After them no method of Trace can raise, read outside an array, or build
something much larger than the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from engine.trace import COMPARABLE, FINISH_REASONS, TOP_WIDTH, WAIT_REASONS, Comparison, ModeRun, Op, Pass, SequenceInfo

MAX_BYTES = 384 * 2**20  # the ring's bound, probed arrays, and room
MAX_HEADER = 8 * 2**20
MAX_TENSORS = 5000
MAX_SAMPLES = 4096
MAX_PAGES = 2**22
MAX_PROMPT = 2**20  # characters
MAX_WORD = 500  # characters of a token
MAX_REPLAY = 2**22  # events between two keyframes
MAX_COMPARED = {"steps": 4000, "rows": 20_000, "sequences": 64}  # of one compared run
_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}


class Bad(Exception):
    """What is wrong with a file: a clause without a full stop."""


def need(ok: bool, what: str) -> None:
    if not ok:
        raise Bad(what)


# ---- the container ----


def check_layout(data: bytes) -> Mapping[str, str]:
    """Measure the header and the span of every tensor before anybody acts on them; returns the metadata."""
    need(len(data) <= MAX_BYTES, f"it is larger than {MAX_BYTES // 2**20} MiB")
    need(len(data) >= 8, "it is cut off before its header")
    length = int.from_bytes(data[:8], "little")
    need(length <= MAX_HEADER, f"its header claims {length:,} bytes")
    need(8 + length <= len(data), "it is cut off inside its header")
    header = data[8 : 8 + length]
    need(header.count(b'"data_offsets"') <= MAX_TENSORS, "it claims too many tensors")
    entries = parse(header, "its header")
    metadata = entries.pop("__metadata__", None)
    need(isinstance(metadata, dict) and set(metadata) == {"manifest"} and isinstance(metadata["manifest"], str), "it has no manifest")
    need(len(entries) <= MAX_TENSORS, "it claims too many tensors")
    spans = sorted(_span(name, entry) for name, entry in entries.items())
    end = 0
    for begin, stop in spans:
        need(begin == end, "its tensors overlap or leave gaps")
        end = stop
    need(end == len(data) - 8 - length, "its tensors and its size do not agree (cut off, or something was added)")
    return metadata


def _span(name: str, entry: object) -> tuple[int, int]:
    need(isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}, f"the entry {name[:80]} is malformed")
    size, shape, offsets = _SIZES.get(str(entry["dtype"])), entry["shape"], entry["data_offsets"]
    need(size is not None, f"{name[:80]} has an unknown type")
    for numbers, most in ((shape, 8), (offsets, 2)):
        ok = isinstance(numbers, list) and len(numbers) <= most and all(type(n) is int and 0 <= n <= MAX_BYTES for n in numbers)
        need(ok, f"{name[:80]} has a malformed shape or place")
    need(len(offsets) == 2 and offsets[1] - offsets[0] == size * math.prod(shape), f"{name[:80]} has a shape that does not fit its place")
    return offsets[0], offsets[1]


def parse(text: str | bytes | None, what: str) -> dict:
    """Strict JSON: no NaN, no infinities, no key twice; the top is an object."""

    def refuse(word: str) -> None:
        raise Bad(f"{what} is not strict JSON ({word})")

    def number(word: str) -> float:
        value = float(word)
        need(math.isfinite(value), f"{what} holds a number beyond all bounds")
        return value

    def unique(pairs: list[tuple[str, object]]) -> dict:
        found = dict(pairs)
        need(len(found) == len(pairs), f"{what} names something twice")
        return found

    need(text is not None, f"{what} is missing")
    try:
        value = json.loads(text, parse_constant=refuse, parse_float=number, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise Bad(f"{what} is not valid JSON") from error
    need(isinstance(value, dict), f"{what} is not a JSON object")
    return value


class Reader:
    """A JSON object or array whose parts are asked for by type and range."""

    def __init__(self, what: str, value: dict | list) -> None:
        self.what, self.value = what, value

    def _get(self, key: str | int) -> object:
        try:
            return self.value[key]
        except (KeyError, IndexError, TypeError):
            raise Bad(f"{self.what} lacks {key}") from None

    def integer(self, key: str | int, low: int, high: int) -> int:
        value = self._get(key)
        need(type(value) is int and low <= value <= high, f"{self.what} has an impossible {key}")
        return value

    def number(self, key: str) -> float:
        """A finite number, or one of the words "nan", "inf", "-inf"."""
        value = self._get(key)
        ok = value in ("nan", "inf", "-inf") or (type(value) in (int, float) and abs(value) < 2**63)
        need(ok, f"{self.what} has an impossible {key}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._get(key)
        need(type(value) is bool, f"{self.what} has an impossible {key}")
        return value

    def flags(self, key: str) -> tuple[bool, ...]:
        value = self._get(key)
        need(isinstance(value, list) and all(type(v) is bool for v in value), f"{self.what} has an impossible {key}")
        return tuple(value)

    def text(self, key: str | int, most: int) -> str:
        value = self._get(key)
        need(isinstance(value, str) and len(value) <= most, f"{self.what} has an impossible or overlong {key}")
        return value.encode("utf-8", "replace").decode("utf-8")

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._get(key)
        need(isinstance(value, list) and all(type(v) is int and 0 <= v < 2**31 for v in value), f"{self.what} has an impossible {key}")
        return tuple(value)

    def rows(self, key: str, highs: tuple[int, ...], most: int) -> tuple[tuple[int, ...], ...]:
        """Rows of whole numbers from 0, each at most what stands in its place in `highs`."""
        value = self._get(key)
        need(isinstance(value, list) and len(value) <= most, f"{self.what} has an impossible {key}")
        ok = all(
            isinstance(row, list) and len(row) == len(highs) and all(type(v) is int and 0 <= v <= high for v, high in zip(row, highs))
            for row in value
        )
        need(ok, f"{self.what} has an impossible {key}")
        return tuple(map(tuple, value))

    def texts(self, key: str, most: int) -> tuple[str, ...]:
        value = self._get(key)
        need(isinstance(value, list) and len(value) <= 10_000, f"{self.what} has an impossible {key}")
        inner = Reader(f"{self.what}'s {key}", value)
        return tuple(inner.text(at, most) for at in range(len(value)))

    def has(self, key: str) -> bool:
        """Whether there is anything of that name but null."""
        return isinstance(self.value, dict) and self.value.get(key) is not None

    def items(self, key: str, most: int = 2**20) -> list[Reader]:
        value = self._get(key)
        ok = isinstance(value, list) and len(value) <= most and all(isinstance(v, (dict, list)) for v in value)
        need(ok, f"{self.what} has impossible {key}")
        return [Reader(f"one of its {key.replace('_', ' ')}", v) for v in value]

    def plain(self, key: str) -> Mapping:
        """A JSON object as it is, its lists as tuples; strings and depth bounded."""
        value = self._get(key)
        need(isinstance(value, dict), f"{self.what} has an impossible {key}")
        return _frozen(value, 8)

    def configs(self) -> tuple[Mapping[str, object], ...]:
        found = []
        for item in self.items("configs", 100_000):
            need(isinstance(item.value, dict), "one of its configs is malformed")
            for name, high in (("page_size", 2**16), ("num_pages", MAX_PAGES)):
                if name in item.value:
                    item.integer(name, 1, high)
            found.append(_frozen(item.value, 3))
        return tuple(found)


def _frozen(value: object, depth: int) -> object:
    need(depth > 0, "its manifest is nested too deeply")
    if isinstance(value, dict):
        return {_frozen(k, depth): _frozen(v, depth - 1) for k, v in value.items()}
    if isinstance(value, list):
        return tuple(_frozen(v, depth - 1) for v in value)
    if isinstance(value, str):
        need(len(value) <= 20_000, "its manifest holds an overlong text")
        return value.encode("utf-8", "replace").decode("utf-8")
    return value


# ---- artifacts ----


def check_comparison(item: Reader) -> Comparison:
    """Two runs whose steps and sequences refer to each other rightly, so that no picture of them can fail."""
    knob = item.text("knob", 80)
    need(knob in COMPARABLE, "it compares modes that cannot be compared")
    names, lengths = item.texts("names", 80), item.integers("num_prompt_tokens")
    same = item.flags("same")
    need(0 < len(names) <= MAX_COMPARED["sequences"] and len(names) == len(lengths) == len(same), "a comparison's sequences do not add up")
    sizes = item.integer("page_size", 1, 2**16), item.integer("num_pages", 1, MAX_PAGES), item.integer("max_num_seqs", 1, 2**20)
    runs = tuple(_mode_run(run, len(names)) for run in item.items("runs", 2))
    values = [run.value for run in runs]
    known = [list(pair[::way]) for pair in COMPARABLE[knob] for way in (1, -1)]
    need([(type(v), v) for v in values] in [[(type(v), v) for v in pair] for pair in known], "it compares modes that cannot be compared")
    return Comparison(knob, names, lengths, same, *sizes, runs)


def _mode_run(run: Reader, sequences: int) -> ModeRun:
    need(isinstance(run.value, dict), "a compared run is malformed")
    value = run.flag("value") if type(run.value.get("value")) is bool else run.text("value", 80)
    columns = [run.integers(name) for name in ("start_us", "step_us", "held", "used")]
    steps, most, last = len(columns[0]), MAX_COMPARED["rows"], sequences - 1
    need(0 < steps <= MAX_COMPARED["steps"] and all(len(c) == steps for c in columns), "a compared run's steps do not add up")
    need(all(a <= b for a, b in pairwise(columns[0])), "a compared run's steps are out of order")
    works = run.rows("works", (steps - 1, last, 2**30, 2**30, max(Pass)), most)
    tokens = run.rows("tokens", (steps - 1, last), most)
    waits = run.rows("waits", (last, steps - 1, steps - 1, len(WAIT_REASONS) - 1), most)
    for rows in (works, tokens):
        need(all(a[0] <= b[0] for a, b in pairwise(rows)), "a compared run's steps are out of order")
    need(all(work[3] >= 1 for work in works), "a work computes no tokens")
    need(all(wait[1] <= wait[2] for wait in waits), "a wait ends before it begins")
    return ModeRun(value, *columns, works, tokens, waits)


# ---- the tables ----


def check_tables(tables: Mapping[str, np.ndarray], meta: Mapping[str, object], sequences: Mapping[int, SequenceInfo]) -> None:
    """Ranges, order and references of every column."""
    bases = Reader("the manifest", dict(meta))
    for name, high in (("event_base", 2**62), ("text_base", 2**62), ("page_size", 2**16), ("num_pages", MAX_PAGES)):
        if name in meta:
            bases.integer(name, 0 if name.endswith("base") else 1, high)
    if "computed_before" in meta:
        counts = meta["computed_before"]
        need(isinstance(counts, dict) and all(type(n) is int and 0 <= n < 2**31 for n in counts.values()), "computed_before is malformed")
    _check_signs(tables)
    _check_steps(tables, meta)
    _check_log(tables, meta)
    _check_texts(tables, meta)
    known = np.array(sorted(sequences), np.int64)
    for name in ("works", "tokens", "waits", "preempts", "finishes", "texts"):
        need(_ascending(tables[name]["step_id"]), f"the steps of {name} are out of order")
        need(np.isin(tables[name]["seq_id"], known).all(), f"{name} names a sequence that is not in the file")
    causes = tables["preempts"][tables["preempts"]["has_cause"] == 1]
    need(np.isin(causes["for_seq_id"], known).all(), "preempts names a sequence that is not in the file")


def _check_signs(tables: Mapping[str, np.ndarray]) -> None:
    """No count or id is below zero; codes and flags stay within their meaning."""
    for name, table in tables.items():
        for field in table.dtype.names or ():
            if table.dtype[field].base.kind == "i":
                need(not (table[field] < 0).any(), f"{name}.{field} has a value below 0")
    most = [
        ("steps", "probed", 1), ("steps", "failed", 1), ("works", "resumed", 1), ("works", "samples", 1), ("tokens", "num_top", TOP_WIDTH),
        ("waits", "reason", len(WAIT_REASONS) - 1), ("finishes", "reason", len(FINISH_REASONS) - 1), ("preempts", "has_cause", 1),
        ("events", "op", max(Op)), ("keyframes", "op", max(Op)),
    ]  # fmt: skip
    for table in ("events", "keyframes"):
        most += [(table, "page", MAX_PAGES), (table, "index", MAX_PAGES)]
    for table, field, high in most:
        need(not (tables[table][field] > high).any(), f"{table}.{field} has a value beyond {high}")
    need((tables["events"]["op"] > 0).all(), "events.op has a value below 1")
    works = tables["works"]
    need((works["num_tokens"] >= 1).all(), "a work computes no tokens")
    need((works["start"].astype(np.int64) + works["num_tokens"] < 2**31).all(), "a work is longer than any sequence")


def _ascending(values: np.ndarray) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def _check_steps(tables: Mapping[str, np.ndarray], meta: Mapping[str, object]) -> None:
    steps = tables["steps"]
    need(bool((steps["step_id"][1:] > steps["step_id"][:-1]).all()), "its steps are not in ascending order")
    need(_ascending(steps["event_end"]), "the steps' places in the event log are out of order")
    base = meta.get("event_base", 0)
    ends = steps["event_end"]
    need(not len(ends) or (ends[0] >= base and ends[-1] - base <= len(tables["events"])), "a step's events are not in the file")
    need(not (steps["config"] >= max(len(meta["configs"]), 1)).any(), "a step names a config that is not in the file")


def _check_log(tables: Mapping[str, np.ndarray], meta: Mapping[str, object]) -> None:
    """Keyframes lie within the log, and no two are so far apart that replay takes long."""
    frames, base, count = tables["keyframes"], meta.get("event_base", 0), len(tables["events"])
    at = frames["event_at"]
    need(_ascending(at), "its keyframes are out of order")
    begins = np.flatnonzero(frames["op"] == 0)
    if len(frames):
        need(at[0] >= base and at[-1] - base <= count, "a keyframe lies outside the event log")
        need(len(begins) > 0 and begins[0] == 0, "its keyframes do not begin with a mark")
        changes = np.flatnonzero(at[1:] != at[:-1]) + 1
        need(np.isin(changes, begins).all(), "a keyframe lacks its mark")
    if base and len(tables["steps"]):
        need(len(frames) > 0 and at[0] <= tables["steps"]["event_end"][0], "the log's beginning is missing and no keyframe replaces it")
    marks = np.concatenate([[base], at[begins], [base + count]])
    sizes = np.diff(np.append(begins, len(frames)))
    longest = max(int(np.diff(marks).max()), int(sizes.max()) if len(sizes) else 0)
    need(longest <= MAX_REPLAY, "its event log has no keyframe for too long")


def _check_texts(tables: Mapping[str, np.ndarray], meta: Mapping[str, object]) -> None:
    """Every piece lies within the text, after the one before it."""
    texts, base = tables["texts"], meta.get("text_base", 0)
    if not len(texts):
        return
    end = base + len(tables["text_bytes"])
    need(texts["offset"].min() >= base and texts["offset"].max() <= end, "a text lies outside the file")
    stops = texts["offset"] + texts["num_bytes"]
    need(bool((texts["offset"][1:] >= stops[:-1]).all()) and stops[-1] <= end, "texts overlap or lie outside the file")
