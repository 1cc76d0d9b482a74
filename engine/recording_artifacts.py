"""How the artifacts about kernels (engine/artifacts.py) travel in a recording, and what a stranger's must satisfy.

Small fields stand in the manifest, arrays are tensors named after the artifact's place ("tiles.4.m"). Of a TileTrace's
m, l and rescale only the rows of the chosen sequence and key head are written: the others are NaN by definition.
Every check raises Bad with a clause, as in engine/recording_check.py; after them a view finds what the types promise.
numpy and stdlib only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields

import numpy as np

from engine.artifacts import (
    FULL,
    HOST_ROW,
    KERNEL_ROW,
    PARTLY,
    RUNG_REASONS,
    RUNG_STATES,
    TILE,
    Ceilings,
    KernelCard,
    KernelRun,
    LadderRun,
    OpTime,
    Rung,
    StepProfile,
    TileTrace,
    Timeline,
    TrafficRun,
)
from engine.recording_check import Bad, Reader, need

MAX_TILE_BYTES = 192 * 2**20  # of all tile traces of a file, once they are unpacked
MAX_OPS = 50_000  # of a profiled step
MAX_ROWS = 200_000  # of a timeline, host or device
MAX_STEPS = 1000  # of a burst
MAX_NAMES = 2000
MAX_SOURCE = 400_000  # characters of a kernel card's text
MAX_RUNGS, MAX_RUNG_REQUESTS, MAX_RUNG_TOKENS, MAX_RUNG_RUNS = 32, 64, 4096, 64  # of a ladder; tokens a request
LARGE = 2**31 - 1
KERNELS = ("flash_prefill", "flash_decode")
PROVENANCES = ("measured", "recomputed")
DTYPES = ("float32", "float16", "bfloat16")
SOURCES = ("CUPTI", "CPU operations")
UNSEEN = ("lost", "not_named", "partly_named")
_ROWS = ("m", "l", "rescale")  # kept for the chosen sequence and key head alone
_OP_NUMBERS = ("layer", "start_us", "device_us", "host_us", "flops", "bytes", "rows")
Tensors = dict[str, np.ndarray]


# ---- saving ----


def columns_of(artifact: object, at: int) -> Tensors:
    """The tensors of the artifact that stands at place `at`; {} for one that has none."""
    if isinstance(artifact, TileTrace):
        return _tile_columns(artifact, f"tiles.{at}.")
    if isinstance(artifact, StepProfile):
        names = _op_names(artifact)
        rows = [[names.index(op.name), *(getattr(op, name) for name in _OP_NUMBERS)] for op in artifact.ops]
        return {f"profile.{at}": np.array(rows, np.float64).reshape(-1, 1 + len(_OP_NUMBERS))}
    if isinstance(artifact, Timeline):
        rows = {"host": artifact.host, "kernels": artifact.kernels}
        found = {f"timeline.{at}.{kind}.{n}": np.ascontiguousarray(of[n]) for kind, of in rows.items() for n in of.dtype.names}
        return found | {f"timeline.{at}.steps": np.ascontiguousarray(artifact.steps, np.int64)}
    return {}


def words_of(artifact: object) -> Mapping[str, object]:
    """Fields of the manifest that differ from the artifact's own."""
    return {"ops": _op_names(artifact)} if isinstance(artifact, StepProfile) else {}


def _op_names(profile: StepProfile) -> list[str]:
    return list(dict.fromkeys(op.name for op in profile.ops))


def _tile_columns(trace: TileTrace, at: str) -> Tensors:
    found = {f"{at}{name}": np.ascontiguousarray(trace.tiles[name]) for name in TILE.names}
    mine = _chosen(trace.tiles, trace.row_seq_id, trace.row_kv_head)
    found |= {f"{at}{name}": np.ascontiguousarray(getattr(trace, name)[mine], np.float32) for name in _ROWS}
    found[f"{at}row_tiles"] = np.ascontiguousarray(trace.row_tiles, np.int32)
    return found | {f"{at}{name}": np.ascontiguousarray(getattr(trace, name), np.float32) for name in ("acc", "scores", "plain")}


def _chosen(tiles: np.ndarray, seq_id: int, kv_head: int) -> np.ndarray:
    return (tiles["seq_id"] == seq_id) & (tiles["kv_head"] == kv_head)


# ---- loading ----


class Loader:
    """Makes artifacts of what a file says. Takes their tensors out of `tensors`, so that a stray one is left over.

    Args:
        tensors: all that the file holds.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._unpacked = 0

    def get(self, kind: str) -> Callable[[Reader, int], object] | None:
        """(fields, place in the file) -> artifact; None for a kind that is none of these."""
        makes = {
            "TileTrace": self._tiles, "TrafficRun": _traffic, "KernelCard": _card, "KernelRun": _run, "Ceilings": _ceilings,
            "StepProfile": self._profile, "Timeline": self._timeline, "LadderRun": _ladder,
        }  # fmt: skip
        return makes.get(kind)

    def _take(self, name: str, dtype: np.dtype | type, shape: tuple[int | None, ...]) -> np.ndarray:
        array = self._tensors.pop(name, None)
        need(array is not None, f"{name} is missing")
        fits = array.ndim == len(shape) and all(want is None or want == got for want, got in zip(shape, array.shape))
        need(array.dtype == dtype and fits, f"{name} has type {array.dtype} and shape {list(array.shape)}, not what this format has")
        return array

    # ---- tiles ----

    def _tiles(self, item: Reader, place: int) -> TileTrace:
        at = f"tiles.{place}."
        head = _tile_head(item)
        tiles = self._tile_rows(at, head)
        n, block_m = len(tiles), head["block_m"]
        self._unpacked += n * (TILE.itemsize + 12 * block_m)
        need(self._unpacked <= MAX_TILE_BYTES, "its tiles would take too much memory")
        mine = _chosen(tiles, head["row_seq_id"], head["row_head"] // (head["heads"] // head["kv_heads"]))
        rows = {}
        for name in _ROWS:
            rows[name] = np.full((n, block_m), np.nan, np.float32)
            rows[name][mine] = self._take(f"{at}{name}", np.float32, (int(mine.sum()), block_m))
        _check_rows(rows)
        row_tiles = self._take(f"{at}row_tiles", np.int32, (None,))
        need(
            ((row_tiles >= 0) & (row_tiles < n)).all() and len(np.unique(row_tiles)) == len(row_tiles),
            "a row names a tile that is not there",
        )
        need(mine[row_tiles].all(), "a row names a tile of another row")
        dim = head["head_dim"]
        acc = self._take(f"{at}acc", np.float32, (len(row_tiles), dim))
        keys = next(keys for seq_id, _, keys in head["sequences"] if seq_id == head["row_seq_id"])
        scores, plain = self._take(f"{at}scores", np.float32, (keys,)), self._take(f"{at}plain", np.float32, (dim,))
        need(np.isfinite(acc).all() and np.isfinite(plain).all(), "a row's output is not a number")
        need((np.isfinite(scores) | np.isneginf(scores)).all(), "a score is not a number")
        return TileTrace(**head, tiles=tiles, **rows, row_tiles=row_tiles, acc=acc, scores=scores, plain=plain)

    def _tile_rows(self, at: str, head: Mapping[str, object]) -> np.ndarray:
        first = self._tensors.get(f"{at}{TILE.names[0]}")
        n = len(first) if first is not None and first.ndim == 1 else 0
        tiles = np.zeros(n, TILE)
        for name in TILE.names:
            tiles[name] = self._take(f"{at}{name}", TILE[name], (n,))
        for name in ("kv_head", "split", "program", "q_start", "num_q", "k_start", "start_ns", "stop_ns"):
            need((tiles[name] >= 0).all(), f"a tile's {name} is below 0")
        need(np.isin(tiles["kind"], (FULL, PARTLY)).all(), "a tile is of an unknown kind")
        need((tiles["sm"] >= -1).all(), "a tile's sm is below -1")
        need((tiles["stop_ns"] >= tiles["start_ns"]).all(), "a tile stops before it starts")
        need((np.diff(tiles["program"]) >= 0).all(), "its tiles are out of order")
        need(
            (tiles["kv_head"] < head["kv_heads"]).all() and (tiles["split"] < head["num_splits"]).all(),
            "a tile's head or split is not there",
        )
        need((tiles["num_q"] <= head["block_q"]).all(), "a tile has too many queries")
        keys = {seq_id: keys for seq_id, _, keys in head["sequences"]}
        need(np.isin(tiles["seq_id"], list(keys)).all(), "a tile belongs to a sequence that is not there")
        stop = np.array([keys[i] for i in tiles["seq_id"].tolist()], np.int64)
        need(((tiles["k_start"] < tiles["k_stop"]) & (tiles["k_stop"] <= stop)).all(), "a tile has keys that are not there")
        need((tiles["q_start"].astype(np.int64) + tiles["num_q"] <= stop).all(), "a tile has queries that are not there")
        return tiles

    # ---- a profiled step ----

    def _profile(self, item: Reader, place: int) -> StepProfile:
        names = item.texts("ops", 80)
        numbers = self._take(f"profile.{place}", np.float64, (None, 1 + len(_OP_NUMBERS)))
        need(len(numbers) <= MAX_OPS, "a profiled step has too many operations")
        need(
            np.isfinite(numbers).all() and (numbers >= 0).all() and (numbers < 2**53).all(), "a profiled operation has an impossible number"
        )
        whole = [0, *(1 + _OP_NUMBERS.index(name) for name in ("layer", "flops", "bytes", "rows"))]
        need((numbers[:, whole] == np.floor(numbers[:, whole])).all(), "a profiled operation has a fraction where none can be")
        need(not len(numbers) or numbers[:, 0].max() < len(names), "a profiled operation has no name")
        kinds = {f.name: int if f.type == "int" else float for f in fields(OpTime) if f.name in _OP_NUMBERS}
        ops = tuple(
            OpTime(names[int(row[0])], **{name: kinds[name](v) for name, v in zip(_OP_NUMBERS, row[1:])}) for row in numbers.tolist()
        )
        need(len(set(names)) == len(names) and _op_names_of(ops) == list(names), "a profiled step's names are out of order")
        return StepProfile(
            item.integer("step_id", 0, LARGE), item.text("device", 200), _dtype(item), _amount(item, "wall_us"),
            item.integer("prefill_tokens", 0, LARGE), item.integer("decode_tokens", 0, LARGE), item.integer("num_seqs", 0, LARGE), ops,
        )  # fmt: skip

    # ---- timelines ----

    def _timeline(self, item: Reader, place: int) -> Timeline:
        at, names = f"timeline.{place}.", item.texts("names", 500)
        need(len(names) <= MAX_NAMES, "a timeline has too many names")
        host, kernels = (self._rows(f"{at}{kind}.", dtype, len(names)) for kind, dtype in (("host", HOST_ROW), ("kernels", KERNEL_ROW)))
        steps = self._take(f"{at}steps", np.int64, (None,))
        need(2 <= len(steps) <= MAX_STEPS and steps[0] == 0 and steps[-1] < 2**53, "a burst has an impossible number of steps")
        need((np.diff(steps) > 0).all(), "the steps of a burst are out of order")
        layers = item.integer("num_layers", 0, 10_000)
        need((host["name"] >= 0).all() and (kernels["kernel"] >= 0).all(), "a row of a timeline has no name")
        need(((kernels["layer"] >= -1) & (kernels["layer"] <= layers)).all(), "a kernel of a timeline is in a layer that is not there")
        need(((kernels["launch"] >= -1) & (kernels["launch"] < len(host))).all(), "a kernel of a timeline has a launch that is not there")
        for rows in (host, kernels):
            need(((rows["step"] >= 0) & (rows["step"] < len(steps) - 1)).all(), "a row of a timeline is in a step that is not there")
        unseen = item.texts("unseen", 80)
        need(set(unseen) <= set(UNSEEN) and len(set(unseen)) == len(unseen), "a timeline says that something unknown was not seen")
        return Timeline(
            item.integer("step_id", 0, LARGE), item.text("device", 200), _dtype(item), _one_of(item, "source", SOURCES),
            item.integer("graph_size", 0, LARGE), item.integer("num_seqs", 0, LARGE), layers, _amount(item, "resolution_ns"),
            _amount(item, "plain_us"), names, host, kernels, steps, unseen,
        )  # fmt: skip

    def _rows(self, at: str, dtype: np.dtype, num_names: int) -> np.ndarray:
        """Rows of a timeline, by start; each stops not before it starts."""
        first = self._tensors.get(f"{at}{dtype.names[0]}")
        n = len(first) if first is not None and first.ndim == 1 else 0
        need(n <= MAX_ROWS, "a timeline has too many rows")
        rows = np.zeros(n, dtype)
        for name in dtype.names:
            rows[name] = self._take(f"{at}{name}", dtype[name], (n,))
        for name in {"name", "kernel"} & set(dtype.names):
            need(((rows[name] >= -1) & (rows[name] < num_names)).all(), "a row of a timeline has a name that is not there")
        need(((rows["start_ns"] > -(2**53)) & (rows["stop_ns"] < 2**53)).all(), "a time of a timeline is impossible")
        need((rows["start_ns"] <= rows["stop_ns"]).all(), "a row of a timeline stops before it starts")
        need((np.diff(rows["start_ns"]) >= 0).all(), "the rows of a timeline are out of order")
        return rows


def _op_names_of(ops: tuple[OpTime, ...]) -> list[str]:
    return list(dict.fromkeys(op.name for op in ops))


def _tile_head(item: Reader) -> dict[str, object]:
    """The fields of a TileTrace that are no arrays."""
    found: dict[str, object] = {
        "step_id": item.integer("step_id", 0, LARGE), "layer": item.integer("layer", 0, 10_000), "kernel": _one_of(item, "kernel", KERNELS),
        "device": item.text("device", 200), "provenance": _one_of(item, "provenance", PROVENANCES),
        "difference": _amount(item, "difference"), "dtype": _dtype(item), "heads": item.integer("heads", 1, 4096),
        "kv_heads": item.integer("kv_heads", 1, 4096), "head_dim": item.integer("head_dim", 1, 1024),
        "page_size": item.integer("page_size", 1, 2**16), "window": item.integer("window", 0, LARGE), "softcap": _amount(item, "softcap"),
        "scale": _amount(item, "scale"), "block_q": item.integer("block_q", 1, 4096), "block_m": item.integer("block_m", 1, 4096),
        "block_n": item.integer("block_n", 1, 4096), "num_splits": item.integer("num_splits", 1, 4096),
        "launch_us": _amount(item, "launch_us"), "sequences": item.rows("sequences", (LARGE, LARGE, LARGE), 4096),
        "row_seq_id": item.integer("row_seq_id", 0, LARGE), "row_position": item.integer("row_position", 0, LARGE),
        "row_head": item.integer("row_head", 0, 4095),
    }  # fmt: skip
    need(found["heads"] % found["kv_heads"] == 0, "a launch's heads do not share its key heads")
    need(found["row_head"] < found["heads"], "a row's head is not there")
    need(len({s[0] for s in found["sequences"]}) == len(found["sequences"]), "a launch has a sequence twice")
    need(all(queries <= keys for _, queries, keys in found["sequences"]), "a launch has more queries than keys")
    keys = {seq_id: keys for seq_id, _, keys in found["sequences"]}
    need(found["row_seq_id"] in keys and found["row_position"] < keys[found["row_seq_id"]], "a row's sequence or position is not there")
    return found


def _check_rows(rows: Mapping[str, np.ndarray]) -> None:
    m, l, rescale = (rows[name] for name in _ROWS)
    need(not np.isposinf(m).any(), "a running maximum is infinite")
    need(not np.isinf(l).any() and not (l < 0).any(), "a running sum is below 0 or infinite")
    need(not np.isinf(rescale).any() and not (rescale < 0).any(), "a rescale factor is below 0 or infinite")


# ---- the small ones ----


def _traffic(item: Reader, place: int) -> TrafficRun:
    return TrafficRun(
        item.integer("step_id", 0, LARGE), item.integer("layer", 0, 10_000), _one_of(item, "kernel", KERNELS), item.text("device", 200),
        _maybe(item, "flash_us"), _maybe(item, "naive_us"),
    )  # fmt: skip


def _card(item: Reader, place: int) -> KernelCard:
    words = [item.text(name, MAX_SOURCE) for name in ("name", "formula", "text", "reference", "source")]
    cases = tuple((case.text(0, 200), case.text(1, 2000)) for case in item.items("cases", 1000))
    return KernelCard(*words, cases, _one_of(item, "backend", ("triton", "torch", "")))


def _run(item: Reader, place: int) -> KernelRun:
    words = [item.text(name, 2000) for name in ("name", "case", "shapes")]
    return KernelRun(
        *words, _dtype(item), item.text("device", 200), item.number("max_error"), _amount(item, "tolerance"),
        item.integer("flops", 0, 2**62), item.integer("bytes", 0, 2**62), _maybe(item, "kernel_us"), _maybe(item, "graph_us"),
        _maybe(item, "torch_us"), _maybe(item, "loop_us"), item.integer("loop_iterations", 0, 2**62), item.integer("loop_ran", 0, 2**62),
    )  # fmt: skip


def _ceilings(item: Reader, place: int) -> Ceilings:
    levels = tuple(
        (level.text(0, 80), level.integer(1, 0, 2**62), _number(level.value[2] if len(level.value) == 3 else None))
        for level in item.items("levels", 64)
    )
    numbers = [_amount(item, name) for name in ("copy_gbps", "matmul_tflops", "launch_us", "python_us")]
    return Ceilings(item.text("device", 200), _dtype(item), *numbers, levels)


def _ladder(item: Reader, place: int) -> LadderRun:
    rungs = tuple(_rung(rung) for rung in item.items("rungs", MAX_RUNGS))
    need(len({rung.name for rung in rungs}) == len(rungs) > 0, "a ladder has no rungs, or one twice")
    found = LadderRun(
        item.text("key", 80), item.text("device", 200), _dtype(item), item.text("prompt", MAX_SOURCE),
        _whole(_list(item, "prompt_tokens"), MAX_RUNG_REQUESTS), item.integer("new_tokens", 1, MAX_RUNG_TOKENS),
        item.integer("trial_us", 0, 2**53), rungs,
    )  # fmt: skip
    need(len(found.prompt_tokens) > 0, "a ladder has no requests")
    for rung in found.measured:
        need(
            len(rung.token_us) == len(found.prompt_tokens) and all(len(row) == found.new_tokens for row in rung.token_us),
            "a rung did not run the ladder's requests",
        )
    return found


def _rung(item: Reader) -> Rung:
    rows, runs = _list(item, "token_us"), _list(item, "runs")
    need(len(rows) <= MAX_RUNG_REQUESTS and len(runs) <= MAX_RUNG_RUNS, "a rung has too many requests or runs")
    token_us = tuple(_whole(row, MAX_RUNG_TOKENS) for row in rows)
    rung = Rung(
        item.text("name", 80), item.texts("switched", 80), _one_of(item, "state", RUNG_STATES), _one_of(item, "why", RUNG_REASONS),
        item.text("detail", 400), item.integer("wall_us", 0, 2**53), tuple(map(_number, runs)), token_us,
        _whole(_list(item, "token_ids"), MAX_RUNG_TOKENS), item.texts("pieces", 400), item.integer("num_differ", 0, LARGE),
        item.integer("differing", 0, MAX_RUNG_REQUESTS), _maybe(item, "busy"),
    )  # fmt: skip
    need(all(list(row) == sorted(row) and row[-1] <= rung.wall_us for row in token_us if row), "a rung's tokens are out of order")
    need(rung.busy is None or rung.busy <= 1, "a rung's device was busy for more than all of the time")
    if rung.state == "measured":
        need(rung.wall_us > 0 and rung.runs and all(rung.runs) and rung.token_us, "a rung was measured, but has no time")
        need(len(rung.token_ids) == len(rung.pieces) == len(rung.token_us[0]), "a rung's answer does not fit its times")
    else:
        need(not (rung.wall_us or rung.token_us or rung.pieces), "a rung that was not measured has times")
    return rung


def _list(item: Reader, key: str) -> list:
    value = item.value.get(key) if isinstance(item.value, dict) else None
    need(isinstance(value, list), f"{item.what} lacks {key}")
    return value


def _whole(value: object, most: int) -> tuple[int, ...]:
    """A list of whole numbers that are not below zero."""
    plain = isinstance(value, list) and len(value) <= most and all(type(n) is int and 0 <= n < 2**53 for n in value)
    need(plain, "a ladder's numbers are not what this format has")
    return tuple(value)


def _one_of(item: Reader, key: str, choices: tuple[str, ...]) -> str:
    value = item.text(key, 80)
    need(value in choices, f"{item.what} has an impossible {key}")
    return value


def _dtype(item: Reader) -> str:
    return _one_of(item, "dtype", DTYPES)


def _number(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < 2**63:
        raise Bad("a measured number is impossible")
    return float(value)


def _amount(item: Reader, key: str) -> float:
    """A finite number that is not below zero."""
    value = item.number(key)
    need(0 <= value < 2**63, f"{item.what} has an impossible {key}")
    return value


def _maybe(item: Reader, key: str) -> float | None:
    return _amount(item, key) if item.has(key) else None
