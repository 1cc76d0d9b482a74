"""Artifacts about kernels in recordings and in the ring: they come back byte for byte, a stranger's is checked, the newest stay."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import numpy as np
import pytest

from engine import recording
from engine.artifacts import (
    FULL,
    HOST_ROW,
    KERNEL_ROW,
    PARTLY,
    TILE,
    Ceilings,
    KernelCard,
    KernelRun,
    OpTime,
    StepProfile,
    TileTrace,
    Timeline,
    TrafficRun,
    of_kind,
)
from engine.errors import EngineError
from engine.recording import clip, decode, encode
from engine.recording_artifacts import MAX_TILE_BYTES
from engine.store import ARTIFACT_BYTES, NEWEST, TraceStore
from engine.trace import KernelReport, TensorSample, Trace, TraceDelta
from tests.factories import make_trace


def make_tiles(step: int = 3, **changes: object) -> TileTrace:
    """Two sequences, two key heads, two splits; the row is head 3 of sequence 5 (key head 1)."""
    tiles = np.zeros(9, TILE)
    tiles["seq_id"], tiles["kv_head"] = [5, 5, 5, 5, 5, 5, 8, 8, 8], [0, 0, 0, 1, 1, 1, 0, 1, 1]
    tiles["split"], tiles["program"] = [0, 0, 1, 0, 0, 1, 0, 0, 1], [0, 0, 1, 2, 2, 3, 4, 6, 7]
    tiles["q_start"], tiles["num_q"] = [19] * 6 + [9] * 3, 1
    tiles["k_start"], tiles["k_stop"] = [0, 8, 16, 0, 8, 16, 0, 0, 8], [8, 16, 20, 8, 16, 20, 8, 8, 10]
    tiles["kind"], tiles["sm"] = [FULL, FULL, PARTLY] * 3, [0, 0, 1, 2, 2, 3, 4, 5, 131]
    tiles["start_ns"] = np.arange(9) * 32
    tiles["stop_ns"] = tiles["start_ns"] + 64
    rows = {}
    for i, name in enumerate(("m", "l", "rescale")):
        rows[name] = np.full((9, 16), np.nan, np.float32)
        rows[name][3:6, :2] = np.arange(6, dtype=np.float32).reshape(3, 2) + i
    rows["m"][3, 1] = -np.inf
    scores = np.linspace(-2, 2, 20).astype(np.float32)
    scores[0] = -np.inf
    it = TileTrace(
        step, 1, "flash_decode", "device", "measured", 0.0, "bfloat16", 4, 2, 6, 16, 0, 0.0, 0.5, 1, 16, 8, 2, 12.5, ((5, 1, 20), (8, 1, 10)),
        tiles, **rows, row_seq_id=5, row_position=19, row_head=3, row_tiles=np.array([3, 4, 5], np.int32),
        acc=np.arange(18, dtype=np.float32).reshape(3, 6), scores=scores, plain=np.arange(6, dtype=np.float32),
    )  # fmt: skip
    return replace(it, **changes)


OPS = (
    OpTime("embedding", 0, 0.0, 1.5, 2.5, 0, 100, 4),
    OpTime("qkv", 0, 2.0, 7.25, 3.5, 2**52, 999, 4),
    OpTime("embedding", 1, 9.5, 1.0, 2.0, 3, 4, 5),
)
PROFILE = StepProfile(3, "device", "float32", 20.5, 3, 1, 2, OPS)
CARD = KernelCard("silu_mul", "y = x", "text 火", "def ref", "def kernel", (("t64", "tokens 64"), ("t1", "tokens 1")), "")
RUN = KernelRun("silu_mul", "t64", "tokens 64", "float16", "device", 1e-4, 1e-3, 5, 6, 7.5, None, 8.5, 9.5, 64, 64)
NOT_RUN = replace(RUN, max_error=float("inf"), kernel_us=None, loop_us=None, loop_iterations=0, loop_ran=0)
CEILINGS = Ceilings("device", "float32", 100.5, 1.25, 4.0, 0.02, (("L1, one core", 24576, 150.5), ("memory", 2**28, 20.0)))
TRAFFIC = TrafficRun(3, 1, "flash_prefill", "device", 12.5, None)
TIMELINE = Timeline(
    3, "device", "bfloat16", "CUPTI", 4, 3, 2, 32.0, 480.5, ("launch", "cudaGraphLaunch", "norm", "_norm_kernel"),
    np.array([(0, 0, 10, 90), (1, 0, 20, 30), (0, 1, 510, 590), (1, 1, 520, 530)], HOST_ROW),
    np.array([(2, 3, 0, 0, 1, 40, 60), (-1, 3, -1, 0, 1, 55, 70), (2, 3, 2, 1, 3, 540, 560)], KERNEL_ROW),
    np.array([0, 500, 1000]), ("partly_named",),
)  # fmt: skip
ALL = (make_tiles(), PROFILE, CARD, RUN, NOT_RUN, CEILINGS, TRAFFIC, TIMELINE)


def equal(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)]
    return all(np.array_equal(x, y, equal_nan=x.dtype.kind == "f") if isinstance(x, np.ndarray) else x == y for x, y in pairs)


# ---- what is saved comes back ----


@pytest.mark.parametrize("artifact", ALL, ids=lambda a: type(a).__name__)
def test_an_artifact_comes_back_and_saving_it_again_gives_the_same_bytes(artifact):
    data = encode(Trace(artifacts=(artifact,)))
    (back,) = decode(data).artifacts
    assert equal(back, artifact) and encode(decode(data)) == data


def test_all_of_them_live_in_one_recording_beside_the_others():
    busy = make_trace()
    report = KernelReport("rope", "torch", "cpu", 0.0, 1e-3, True)
    sample = TensorSample(3, "hidden", 0, np.ones((2, 2), np.float32))
    artifacts = (report, *ALL, sample, make_tiles(4), replace(PROFILE, step_id=4))
    trace = Trace({n: getattr(busy, n) for n in ("steps",)}, {}, {}, {"configs": busy.meta["configs"]}, artifacts)
    data = encode(Trace(artifacts=artifacts))
    back = decode(data)
    assert len(back.artifacts) == len(artifacts) and encode(back) == data
    assert all(equal(a, b) for a, b in zip(back.artifacts, artifacts) if type(a) is not KernelReport and type(a) is not TensorSample)
    assert [a.step_id for a in of_kind(back, TileTrace)] == [3, 4]
    kept = clip(trace, 4, 4).artifacts
    assert {a.step_id for a in kept if hasattr(a, "step_id")} == {4} and CARD in kept and CEILINGS in kept


def test_an_empty_profile_and_a_trace_of_no_tiles_come_back():
    none = replace(
        make_tiles(), tiles=np.zeros(0, TILE), **{name: np.zeros((0, 16), np.float32) for name in ("m", "l", "rescale")},
        row_tiles=np.zeros(0, np.int32), acc=np.zeros((0, 6), np.float32),
    )  # fmt: skip
    for artifact in (none, replace(PROFILE, ops=())):
        assert equal(decode(encode(Trace(artifacts=(artifact,)))).artifacts[0], artifact)


# ---- a stranger's file ----


def refused(*artifacts: object, change=None, array=None) -> str:
    """The sentence with which a file with these artifacts is refused."""
    data = encode(Trace(artifacts=artifacts))
    if change is not None:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        manifest = json.loads(header["__metadata__"]["manifest"])
        change(manifest["artifacts"][0])
        header["__metadata__"]["manifest"] = json.dumps(manifest)
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    with pytest.raises(EngineError, match="This recording cannot be read") as caught:
        decode(data)
    assert caught.value.code == "recording_corrupt" and len(caught.value.sentence) < 300
    return caught.value.sentence


def put(**values: object):
    return lambda artifact: artifact.update(values)


@pytest.mark.parametrize(
    "values",
    [
        {"step_id": -1}, {"layer": 10**6}, {"kernel": "softmax"}, {"provenance": "guessed"}, {"difference": -1.0}, {"difference": "nan"},
        {"difference": "inf"}, {"dtype": "int8"}, {"heads": 0}, {"heads": 3}, {"kv_heads": 3}, {"head_dim": 0}, {"head_dim": 7}, {"head_dim": 2**20},
        {"page_size": 0}, {"window": -1}, {"softcap": "inf"}, {"scale": "nan"}, {"block_q": 0}, {"block_m": 0}, {"block_m": 17},
        {"block_m": 10**6}, {"block_n": 0}, {"num_splits": 0}, {"num_splits": 1}, {"launch_us": -1}, {"launch_us": "inf"}, {"sequences": []},
        {"sequences": [[5, 1, 20]]}, {"sequences": [[5, 1, 20], [5, 1, 20], [8, 1, 10]]}, {"sequences": [[5, 1, 19], [8, 1, 10]]},
        {"sequences": [[5, 30, 20], [8, 1, 10]]}, {"sequences": [[5, 1], [8, 1]]}, {"sequences": "x"}, {"row_seq_id": 6}, {"row_seq_id": 8},
        {"row_position": 20}, {"row_position": -1}, {"row_head": 4}, {"row_head": 0}, {"device": "x" * 1000}, {"device": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_tile_traces_words_out_of_range_are_refused(values):
    refused(make_tiles(), change=put(**values))


def tiles_with(name: str, at: int, value: object) -> TileTrace:
    it = make_tiles()
    array = (it.tiles if name in TILE.names else getattr(it, name)).copy()
    (array[name] if name in TILE.names else array)[at] = value
    return replace(it, **{"tiles" if name in TILE.names else name: array})


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("seq_id", 0, 6), ("kv_head", 0, 2), ("kv_head", 0, -1), ("split", 0, 2), ("split", 0, -1), ("program", 0, 5), ("program", 0, -1),
        ("q_start", 0, -1), ("q_start", 0, 20), ("num_q", 0, 2), ("num_q", 0, -1), ("k_start", 0, 8), ("k_start", 0, -1), ("k_stop", 0, 21),
        ("kind", 0, 0), ("kind", 0, 3), ("sm", 0, -2), ("start_ns", 0, -1), ("stop_ns", 8, 3), ("m", (4, 0), np.inf), ("l", (4, 0), -1.0),
        ("l", (4, 0), np.inf), ("rescale", (4, 0), -0.5), ("rescale", (4, 0), np.inf), ("row_tiles", 0, 9), ("row_tiles", 0, -1),
        ("row_tiles", 0, 4), ("row_tiles", 0, 0), ("acc", (0, 0), np.nan), ("acc", (0, 0), np.inf), ("scores", 3, np.nan), ("scores", 3, np.inf),
        ("plain", 0, np.nan), ("plain", 0, -np.inf),
    ],
    ids=str,
)  # fmt: skip
def test_a_tile_traces_numbers_out_of_range_are_refused(name, at, value):
    refused(tiles_with(name, at, value))


@pytest.mark.parametrize("name", ["m", "row_tiles", "acc", "scores", "plain"])
def test_a_tile_traces_arrays_of_other_lengths_are_refused(name):
    it = make_tiles()
    wrong = getattr(it, name)
    wrong = wrong[:, :-1] if name == "m" else wrong[:-1]
    refused(replace(it, **{name: wrong}))


@pytest.mark.parametrize("name", ["sm", "seq_id", "l"])
def test_a_tile_traces_columns_that_differ_in_length_are_refused(monkeypatch, name):
    columns = recording.columns_of
    monkeypatch.setattr(
        recording, "columns_of", lambda artifact, at: {k: v[:-1] if k.endswith(f".{name}") else v for k, v in columns(artifact, at).items()}
    )
    refused(make_tiles())


def test_tile_traces_that_would_unpack_to_too_much_are_refused():
    n = MAX_TILE_BYTES // (12 * 4096) + 1
    tiles = np.zeros(n, TILE)
    tiles["seq_id"], tiles["k_stop"], tiles["kind"], tiles["num_q"] = 8, 1, FULL, 1
    none = np.zeros((n, 0), np.float32)
    it = replace(make_tiles(), tiles=tiles, m=none, l=none, rescale=none, row_tiles=np.zeros(0, np.int32), acc=np.zeros((0, 6), np.float32))
    assert "too much memory" in refused(replace(it, block_m=4096))


@pytest.mark.parametrize(
    ("artifact", "values"),
    [
        (PROFILE, {"step_id": -1}), (PROFILE, {"dtype": "x"}), (PROFILE, {"wall_us": "nan"}), (PROFILE, {"prefill_tokens": -1}),
        (PROFILE, {"ops": ["embedding"]}), (PROFILE, {"ops": ["embedding", "qkv", "more"]}), (PROFILE, {"ops": ["qkv", "qkv"]}),
        (PROFILE, {"ops": [1, 2]}), (PROFILE, {"ops": "x"}), (PROFILE, {"device": "d" * 1000}),
        (CARD, {"backend": "cuda"}), (CARD, {"cases": [["a"]]}), (CARD, {"cases": [[1, 2]]}), (CARD, {"source": "x" * 500_000}), (CARD, {"text": None}),
        (RUN, {"max_error": None}), (RUN, {"tolerance": "nan"}), (RUN, {"flops": -1}), (RUN, {"bytes": 0.5}), (RUN, {"kernel_us": -1.0}),
        (RUN, {"torch_us": "inf"}), (RUN, {"loop_us": "x"}), (RUN, {"loop_ran": 2**63}), (RUN, {"dtype": "float64"}), (RUN, {"shapes": 3}),
        (CEILINGS, {"copy_gbps": "inf"}), (CEILINGS, {"python_us": -1}), (CEILINGS, {"levels": [["L1", 5]]}), (CEILINGS, {"levels": [["L1", 5, None]]}),
        (CEILINGS, {"levels": [["L1", -5, 1.0]]}), (CEILINGS, {"levels": [["L1", 5, -1.0]]}), (CEILINGS, {"levels": [{"a": 1}]}),
        (CEILINGS, {"levels": [["x", 1, 1]] * 100}), (TRAFFIC, {"kernel": "x"}), (TRAFFIC, {"flash_us": -1}), (TRAFFIC, {"naive_us": "nan"}),
        (TRAFFIC, {"layer": 0.5}), (TRAFFIC, {"step_id": None}),
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, dict) else str(v)[:60],
)  # fmt: skip
def test_the_other_artifacts_words_out_of_range_are_refused(artifact, values):
    refused(artifact, change=put(**values))


@pytest.mark.parametrize(
    ("at", "value"),
    [((0, 0), 2.0), ((0, 0), 0.5), ((0, 0), -1.0), ((0, 1), 0.5), ((1, 2), np.nan), ((1, 3), -1.0), ((1, 5), 2.0**60), ((1, 7), 0.5)],
)
def test_a_profiles_numbers_out_of_range_are_refused(monkeypatch, at, value):
    columns = recording.columns_of

    def changed(artifact, place):
        found = columns(artifact, place)
        for array in found.values():
            array[at] = value
        return found

    monkeypatch.setattr(recording, "columns_of", changed)
    refused(PROFILE)


def test_a_tensor_too_many_and_one_too_few_are_refused():
    data = encode(Trace(artifacts=(make_tiles(),)))
    assert "tiles.0.seq_id" in data.decode("latin1")
    assert "missing" in refused(
        make_tiles(), change=put(type="StepProfile", ops=["a"], wall_us=1.0, prefill_tokens=1, decode_tokens=1, num_seqs=1)
    )
    assert "does not belong there" in refused(make_tiles(), change=put(type="TrafficRun", flash_us=None, naive_us=None))


# ---- the ring ----


def test_the_newest_tile_traces_that_fit_the_budget_stay_with_probed_arrays():
    store, size = TraceStore(2**20), 1 + ARTIFACT_BYTES // 4 // (3 * 16 * 4)
    large = {name: np.zeros((size, 16), np.float32) for name in ("m", "l", "rescale")}
    store.apply(TraceDelta(artifacts=(CARD, CEILINGS)))
    for step in range(5):
        store.apply(TraceDelta(artifacts=(make_tiles(step, **large),)))
    assert [a.step_id for a in of_kind(store.snapshot(), TileTrace)] == [2, 3, 4]
    store.apply(TraceDelta(artifacts=(TensorSample(9, "hidden", 0, np.zeros(ARTIFACT_BYTES // 8, np.float32)),)))
    assert [a.step_id for a in of_kind(store.snapshot(), TileTrace)] == [4] and len(of_kind(store.snapshot(), TensorSample)) == 1
    assert store.snapshot().artifacts[:2] == (CARD, CEILINGS)


@pytest.mark.parametrize("artifact", [RUN, CEILINGS, PROFILE, TRAFFIC, make_tiles()], ids=lambda a: type(a).__name__)
def test_so_many_of_a_kind_are_kept_and_the_oldest_go(artifact):
    store, most = TraceStore(2**20), NEWEST[type(artifact)]
    for i in range(most + 5):
        store.apply(TraceDelta(artifacts=(replace(artifact, device=f"device {i}"),)))
    kept = of_kind(store.snapshot(), type(artifact))
    assert [a.device for a in kept] == [f"device {i}" for i in range(5, most + 5)]
    assert len(decode(encode(store.snapshot())).artifacts) == most


# ---- timelines ----


def changed(rows: np.ndarray, name: str, value: int, at: int = 0) -> np.ndarray:
    rows = rows.copy()
    rows[name][at] = value
    return rows


@pytest.mark.parametrize(
    "broken, said",
    [
        ({"kernels": changed(TIMELINE.kernels, "launch", 9)}, "a launch that is not there"),
        ({"kernels": changed(TIMELINE.kernels, "kernel", -1)}, "has no name"),
        ({"kernels": changed(TIMELINE.kernels, "name", 4)}, "a name that is not there"),
        ({"kernels": changed(TIMELINE.kernels, "layer", 3)}, "a layer that is not there"),
        ({"kernels": changed(TIMELINE.kernels, "step", 2)}, "a step that is not there"),
        ({"kernels": changed(TIMELINE.kernels, "stop_ns", 39)}, "stops before it starts"),
        ({"kernels": TIMELINE.kernels[::-1]}, "out of order"),
        ({"host": changed(TIMELINE.host, "name", -1)}, "has no name"),
        ({"host": changed(TIMELINE.host, "start_ns", -(2**63))}, "impossible"),
        ({"steps": np.array([0])}, "impossible number of steps"),
        ({"steps": np.array([0, 500, 400])}, "out of order"),
        ({"unseen": ("everything",)}, "something unknown"),
        ({"source": "a script"}, "impossible source"),
        ({"resolution_ns": -1.0}, "impossible resolution_ns"),
    ],
)
def test_a_timeline_that_cannot_be_is_refused(broken, said):
    assert said in refused(replace(TIMELINE, **broken))
