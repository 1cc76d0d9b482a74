"""What flash_decode promises beyond its SPEC: splits, the trace, rows that are another kernel's, graphs, accuracy.

The CPU half runs in one child process with Triton's interpreter: `python -m tests.kernels.test_flash_decode`."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import flash_decode as module
from kernels.attention import attention_ref, make_inputs
from kernels.block_copy import SPEC as BLOCK_COPY
from kernels.flash_decode import MAX_QUERIES, SPEC, SPLIT_LIMIT, DecodePlan, flash_decode, locate, plan_decode
from kernels.naive_attention import SPEC as NAIVE
from kernels.naive_attention import naive_bytes
from kernels.spec import Case, KernelSpec
from kernels.tile_log import FULL, PARTLY, SKIPPED, TileLog, make_log
from tests.kernels import traps
from tests.kernels.harness import as_tuple, distance

ROOT = Path(__file__).parents[2]
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

# what is traced: (name, dims, num_splits, block_n)
TRACED = (
    ("decode", {"sequences": "1:100 1:1 1:33", "hq": 4, "hk": 2, "d": 32, "dv": 24}, 1, 16),
    ("verify_in_splits", {"sequences": "4:70 1:33 8:41 3:2", "hq": 4, "hk": 2, "d": 32}, 3, 16),
    ("more_splits_than_tiles", {"sequences": "2:40 1:9 0:5", "hq": 3, "hk": 1, "d": 16, "pad_rows": 2}, 7, 32),
    ("window", {"sequences": "4:90 1:100 8:30", "hq": 4, "hk": 2, "d": 32, "window": 21}, 2, 16),
    ("softcap", {"sequences": "4:50 1:60", "hq": 4, "hk": 2, "d": 32, "softcap": 5.0, "q_scale": 20.0}, 2, 16),
    ("drafts", {"sequences": "6:40 8:70 1:33", "hq": 4, "hk": 2, "d": 32, "drafts": "5 7 0", "sinks": True}, 2, 16),
    ("rows_without_keys", {"sequences": "5:3 1:0 4:4", "hq": 4, "hk": 2, "d": 32, "pad_rows": 3}, 2, 16),
    ("shared_by_length", {"sequences": "2:90 1:5 1:30 7:50", "hq": 4, "hk": 2, "d": 32, "window": 60}, None, 16),
)


def seen_keys(inputs: dict, s: int, row: int) -> list[int]:
    """Keys that a row of q sees, by attention.py's words."""
    length, stop, tree = int(inputs["seq_lens"][s]), int(inputs["cu_seqlens_q"][s + 1]), inputs["tree"]
    drafts = 0 if tree is None else int(tree.lens[s])
    position = int(tree.positions[row]) if drafts else length - stop + row
    before = [j for j in range(length - drafts) if j <= position and (inputs["window"] is None or j > position - inputs["window"])]
    return before + [length - drafts + i for i in range(drafts) if int(tree.mask[row]) >> i & 1]


def scores(inputs: dict, s: int, row: int, head: int, keys: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """x [keys] and v [keys, Dv] in fp64."""
    group, page_size = inputs["q"].shape[1] // inputs["k_cache"].shape[2], inputs["k_cache"].shape[1]
    at = [(int(inputs["block_table"][s, j // page_size]), j % page_size, head // group) for j in keys]
    k, v = (np.array([inputs[name][i].double().cpu().numpy() for i in at]) for name in ("k_cache", "v_cache"))
    x = inputs["scale"] * k @ inputs["q"][row, head].double().cpu().numpy()
    return x if inputs["softcap"] is None else inputs["softcap"] * np.tanh(x / inputs["softcap"]), v


def check_log(inputs: dict, plan: DecodePlan, log: TileLog, tolerance: float) -> None:
    """The log against an online softmax in fp64 that walks the same tiles."""
    inputs = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    if inputs["tree"] is not None:
        inputs["tree"] = type(inputs["tree"])(*(x.cpu() for x in inputs["tree"]))
    owner, span, kind, m_log, l_log, rescale_log, acc_log = (
        getattr(log, n).cpu().numpy() for n in ("owner", "span", "kind", "m", "l", "rescale", "acc")
    )
    (_, hq, _), hk, cu = inputs["q"].shape, inputs["k_cache"].shape[2], inputs["cu_seqlens_q"].tolist()
    group, covered, visited = hq // hk, {}, set()
    for program in range(plan.programs):
        s, first, kv_head, split, queries = owner[program].tolist()
        assert (s >= 0) == bool((kind[program] != SKIPPED).any())
        if s < 0:
            continue
        assert program == locate(plan, hq, hk, inputs["max_query_len"], s, first - cu[s], kv_head * group, split)[0]
        lanes = [(i // group + first, kv_head * group + i % group) for i in range(queries * group)]
        tiles = [(i, *span[program, i].tolist()) for i in range(plan.tiles) if kind[program, i] != SKIPPED]
        for row, _ in lanes[::group]:
            covered.setdefault((row, kv_head), []).extend((split, low, high) for _, low, high in tiles)
        everybody = []
        for lane, (row, head) in enumerate(lanes):
            keys = seen_keys(inputs, s, row)
            m, l, acc = -np.inf, 0.0, np.zeros(inputs["v_cache"].shape[3])
            for n, (tile, low, high) in enumerate(tiles):
                assert tile == n and 0 < high - low <= plan.block_n
                here = [j for j in keys if low <= j < high]
                everybody.append((tile, len(here) == high - low))
                before = m
                if here:
                    x, v = scores(inputs, s, row, head, here)
                    m = max(m, x.max())
                    l, acc = l * np.exp(before - m) + np.exp(x - m).sum(), acc * np.exp(before - m) + np.exp(x - m) @ v
                rescale = np.exp(before - m) if np.isfinite(m) else 1.0
                got = [a[program, tile, lane] for a in (m_log, l_log, rescale_log)]
                if not np.isfinite(m):  # nothing seen yet: nothing to rescale, so any factor will do
                    assert got[0] == -np.inf and got[1] == 0.0
                    continue
                assert np.allclose(got, [m, l, rescale], rtol=tolerance, atol=tolerance), (program, tile, lane, got, [m, l, rescale])
                if (program, lane) == log.chosen:
                    visited.add(tile)
                    assert np.allclose(acc_log[tile], acc, rtol=tolerance, atol=tolerance)
        for tile, _, _ in tiles:
            assert kind[program, tile] == (FULL if all(full for i, full in everybody if i == tile) else PARTLY)
        assert np.isnan(m_log[program, len(tiles) :]).all() and np.isnan(m_log[program, :, len(lanes) :]).all()
    for s in range(len(cu) - 1):
        for row in range(cu[s], cu[s + 1]):
            keys = set(seen_keys(inputs, s, row))
            for kv_head in range(hk):
                parts = sorted(covered.get((row, kv_head), []))
                assert all(a[2] <= b[1] for a, b in pairwise(parts))  # splits and tiles in order, no key twice
                assert keys <= {j for _, low, high in parts for j in range(low, high)}
    assert visited, "the chosen lane visited nothing"


def a_log_is_an_online_softmax_over_the_same_tiles(device: str, traced: tuple) -> None:
    _, dims, num_splits, block_n = traced
    inputs = make_inputs(device, torch.float32, 0, **dims)
    plan = plan_decode(
        *(inputs[n] for n in ("q", "k_cache", "v_cache", "block_table", "max_query_len", "window")), num_splits=num_splits, block_n=block_n
    )
    hq, hk = inputs["q"].shape[1], inputs["k_cache"].shape[2]
    last = int(inputs["cu_seqlens_q"][1]) - 1  # a query that sees keys
    chosen = locate(plan, hq, hk, inputs["max_query_len"], 0, last, hq - 1, 0)
    log = make_log(plan.programs, plan.tiles, plan.block_m, inputs["v_cache"].shape[3], chosen, device)
    plain = flash_decode(**inputs, num_splits=num_splits, block_n=block_n)
    traced_result = flash_decode(**inputs, num_splits=num_splits, block_n=block_n, log=log)
    for a, b in zip(plain, traced_result):
        assert torch.equal(a, b)
    check_log(inputs, plan, log, 2e-5)
    if device == "cuda":
        began, ended = log.time[log.kind != SKIPPED].unbind(-1)
        assert bool((began > 0).all()) and bool((ended >= began).all())
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        sm = log.sm[log.kind != SKIPPED]
        assert int(sm.min()) >= 0 and int(sm.max()) < sms
    else:
        assert not bool(log.time.any()) and bool((log.sm == -1).all())


def any_number_of_splits_gives_the_same(device: str) -> None:
    for dims in ({}, {"window": 30}, {"softcap": 3.0, "sinks": True}, {"drafts": "3 0 8 1"}):
        inputs = make_inputs(device, torch.float32, 0, "4:200 1:33 8:90 2:2", 4, 2, 32, pad_rows=1, **dims)
        want = flash_decode(**inputs, num_splits=1)
        for num_splits, block_n in ((2, 64), (7, 16), *(((SPLIT_LIMIT, 16), (SPLIT_LIMIT, 64)) if device == "cuda" else ())):
            for a, b in zip(want, flash_decode(**inputs, num_splits=num_splits, block_n=block_n)):
                assert distance(b, a) < 2e-6, (dims, num_splits, block_n)


def a_long_sequence_gets_more_splits_than_a_short_one(device: str) -> None:
    inputs = make_inputs(device, torch.float32, 0, "1:400 1:20x11 30:390", 2, 2, 16)
    names = ("q", "k_cache", "v_cache", "block_table", "max_query_len", "window")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_count_sms", lambda device: 8)
        patch.setattr(module, "TILES_ALONE", 4)
        plan = plan_decode(*(inputs[n] for n in names), block_n=16)
        log = make_log(plan.programs, plan.tiles, plan.block_m, 16, (0, 0), device)
        out, lse = flash_decode(**inputs, block_n=16, log=log)
    want, want_lse = attention_ref(**inputs)
    assert distance(out[:12], want[:12]) < 2e-5 and distance(lse[:12], want_lse[:12]) < 2e-5
    # 25 tiles of 47, two key heads, 32 programs at once: 8.5 programs are its part; there are 6, and with 5 tiles
    # each 5 are enough. A short one's part is 0.7
    assert plan.num_splits == 6
    assert [int(((log.owner[:, 0] == s) & (log.owner[:, 2] == 0)).sum()) for s in range(13)] == [5] + [1] * 11 + [0]


def longer_sequences_are_left_alone_and_padding_is_zeroed(device: str) -> None:
    for num_splits in (1, 3):
        inputs = make_inputs(device, torch.float32, 0, "1:40 9:30 8:50 20:20 1:7", 4, 2, 32, pad_rows=7)
        out = torch.full((46, 4, 2, 32), 7.0, device=device)[:, :, 0]  # heads lie apart: strides are the caller's
        result, lse = flash_decode(**inputs, out=out, num_splits=num_splits)
        assert result.data_ptr() == out.data_ptr()
        want, want_lse = attention_ref(**inputs)
        own = torch.tensor([0, *range(10, 18), 38], device=device)
        assert distance(out[own], want[own]) < 2e-5 and distance(lse[own], want_lse[own]) < 2e-5
        assert bool((out[1:10] == 7).all()) and bool((out[18:38] == 7).all())
        assert bool((out[39:] == 0).all()) and bool((lse[39:] == -torch.inf).all())


def rows_without_a_sequence_are_zeroed(device: str) -> None:
    inputs = make_inputs(device, torch.float32, 0, "", 4, 2, 32, pad_rows=3)
    out, lse = flash_decode(**inputs, out=torch.full((3, 4, 32), 7.0, device=device))
    assert bool((out == 0).all()) and bool((lse == -torch.inf).all())


def _for_any_length(*args: object, **kwargs: object) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """flash_decode in the rows that are its own, the reference in the others: traps speak of prompts too."""
    inputs = inspect.signature(attention_ref).bind(*args, **kwargs).arguments
    cu = inputs["cu_seqlens_q"].tolist()
    long = [row for a, b in pairwise(cu) if b - a > MAX_QUERIES for row in range(a, b)]
    results = []
    for num_splits in (None, 3):
        result = flash_decode(**inputs, num_splits=num_splits)
        results.append(result if isinstance(result, tuple) else (result,))
    assert all(torch.allclose(a[row], b[row], 1e-4, 1e-4) for a, b in zip(*results) for row in range(cu[-1]) if row not in long)
    result = results[0]
    if long:
        want = attention_ref(**inputs)
        for mine, theirs in zip(result, want if isinstance(want, tuple) else (want,)):
            mine[long] = theirs[long]
    return result if len(result) > 1 else result[0]


TRAPS = (
    traps.k2_nan_in_slots_that_were_never_written_does_not_reach_the_output,
    traps.k3a_scores_near_minus_60000_keep_their_softmax,
    traps.k3b_rows_that_see_no_key_give_zero_and_minus_infinity,
    traps.k5_the_soft_cap_is_cap_tanh_of_scale_times_x_over_cap,
    traps.k5_the_soft_cap_holds_far_above_the_cap,
    traps.k1_attention_takes_a_query_row_past_2_31_elements,
    traps.k1_attention_reads_a_page_past_2_31_elements,  # the last: a wrapped offset may end the process
)
CHECKS: dict[str, Callable[[str], None]] = {
    **{f"log_{traced[0]}": partial(a_log_is_an_online_softmax_over_the_same_tiles, traced=traced) for traced in TRACED},
    "any_number_of_splits_gives_the_same": any_number_of_splits_gives_the_same,
    "a_long_sequence_gets_more_splits_than_a_short_one": a_long_sequence_gets_more_splits_than_a_short_one,
    "longer_sequences_are_left_alone_and_padding_is_zeroed": longer_sequences_are_left_alone_and_padding_is_zeroed,
    "rows_without_a_sequence_are_zeroed": rows_without_a_sequence_are_zeroed,
    **{trap.__name__: (lambda device, trap=trap: trap(_for_any_length, device)) for trap in TRAPS},
}


@pytest.fixture(scope="session")
def interpreted() -> tuple[dict[str, dict], str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.kernels.test_flash_decode"]
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    lines = [json.loads(line[7:]) for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    return {line["name"]: line for line in lines}, f"no result: the child ended with {child.returncode}\n{child.stderr[-2000:]}"


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(interpreted: tuple[dict[str, dict], str], name: str) -> None:
    results, missing = interpreted
    assert name in results, missing
    assert not results[name]["problems"], "\n".join(results[name]["problems"])


@pytest.mark.parametrize("spec, case", [pytest.param(x, c, id=f"{x.name}-{c.name}") for x in (SPEC, NAIVE, BLOCK_COPY) for c in x.cases])
def test_the_loop_form_is_the_reference(spec: KernelSpec, case: Case) -> None:
    ours, theirs = (spec.make_inputs("cpu", torch.float32, 0, **case.dims) for _ in range(2))
    loop, iterations = spec.loop(**ours), 0
    try:
        while True:
            next(loop)
            iterations += 1
    except StopIteration as stop:
        got = as_tuple(stop.value)
    assert iterations == spec.loop_iterations(ours)
    assert all(distance(a, b) < 5e-6 for a, b in zip(got, as_tuple(spec.ref(**theirs)), strict=True))


def test_naive_attention_moves_four_matrices_of_scores() -> None:
    inputs = make_inputs("cpu", torch.float16, 0, "3:70 1:64 0:9", 4, 2, 16, dv=32, lse=False)
    scores = 4 * (3 * 128 + 1 * 64)  # keys in whole blocks of 64
    assert naive_bytes(inputs) == scores * (4 + 4 + 2 + 2) + 2 * (4 * 4 * 48 + (70 + 64) * 2 * 48)
    # quadratic in a prompt's length; what has to be read and written is not
    naive, least = (
        [count(make_inputs("cpu", torch.float16, 0, f"{n}:{n}", 4, 2, 16)) for n in (512, 1024)] for count in (naive_bytes, SPEC.bytes)
    )
    assert naive[1] > 3.9 * naive[0] and least[1] < 2.1 * least[0]


def plan(sequences: str, max_pages: int = 64, **more) -> DecodePlan:
    inputs = make_inputs("cpu", torch.bfloat16, 0, sequences, 32, 8, 128)
    table = torch.zeros(inputs["block_table"].shape[0], max_pages, dtype=torch.int32)
    return plan_decode(inputs["q"], inputs["k_cache"], inputs["v_cache"], table, inputs["max_query_len"], **more)


def test_the_launch_depends_on_shapes_alone_and_fills_the_gpu() -> None:
    assert plan("1:900") == plan("1:3")
    alone, full, ragged = plan("1:3", 1024), plan("1:3x64", 256), plan("1:3x64", 1024)
    assert alone.programs == 8 * alone.num_splits and 132 < alone.programs <= 2 * 132
    assert full.num_splits == 1 and full.programs == 8 * 64
    # one of these could be long: splits for it, though the others would fill the GPU
    assert ragged.num_splits == 4 and ragged.tiles == 256
    # no more splits than tiles, and tiles enough for the longest sequence
    assert plan("1:3", 8).num_splits == 2 and plan("1:3", 8).tiles == 1
    for pages in (1, 7, 64, 1000, 8192):
        for window in (None, 1, 100):
            p = plan("1:3 4:9", pages, window=window)
            longest = pages * 16 if window is None else min(pages * 16, window + MAX_QUERIES)
            assert p.num_splits * p.tiles * p.block_n >= longest and 1 <= p.num_splits <= SPLIT_LIMIT


@pytest.mark.parametrize(
    "argument, value",
    [
        ("num_splits", 0),
        ("num_splits", SPLIT_LIMIT + 1),
        ("block_n", 24),
        ("block_n", 256),
        ("out", torch.zeros(6, 9, 63)),
        ("out", torch.zeros(6, 9, 64, dtype=torch.float16)),
        ("out", torch.zeros(1, 9, 64).expand(6, -1, -1)),
        ("out", torch.zeros(6, 9, 64, device="meta")),
        ("log", 3),
        ("log", make_log(1, 2, 16, 64, (0, 0), "cpu")),
        ("log", make_log(36, 2, 16, 64, (0, 0), "meta")),
    ],
)
def test_a_bad_argument_of_its_own_is_named(argument: str, value: object) -> None:
    inputs = {**make_inputs("cpu", torch.float32, 0, **SPEC.cases[0].dims), "num_splits": 2, "block_n": 32}
    with pytest.raises(ValueError, match=rf"^{argument}\b"):
        flash_decode(**{**inputs, argument: value})


@dataclass
class Recorder:
    """Stands in for a kernel and keeps what it was launched with."""

    fn: triton.JITFunction
    calls: list[tuple[tuple, dict]] = field(default_factory=list)

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *args, **kwargs: self.calls.append((args, kwargs))


POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}


def compile_for_hopper(source: ModuleType, **more) -> dict[str, str]:
    """kernel name -> PTX of what flash_decode launches, without a GPU."""
    inputs = make_inputs("cpu", torch.bfloat16, 0, "1:100 3:50", 8, 2, 64, drafts="0 2", sinks=True)
    recorders = {name: Recorder(getattr(source, name)) for name in ("_flash_decode_kernel", "_merge_splits_kernel")}
    with pytest.MonkeyPatch.context() as patch:
        for name, recorder in recorders.items():
            patch.setattr(source, name, recorder)
        source.flash_decode(**inputs, **more)
    ptx = {}
    for name, recorder in recorders.items():
        for args, kwargs in recorder.calls:
            given = {**dict(zip(recorder.fn.arg_names, args)), **kwargs}
            given.update(PDL="num_splits" in more, TIMED=given.get("TRACE", False))
            options = {n: given.pop(n) for n in list(given) if n not in recorder.fn.arg_names}
            signature, constants = {}, {}
            for i, parameter in enumerate(recorder.fn.params):
                value = given[parameter.name]
                if parameter.is_constexpr or value is None:
                    signature[parameter.name], constants[(i,)] = "constexpr", value
                elif isinstance(value, torch.Tensor):
                    signature[parameter.name] = POINTERS[value.dtype]
                else:
                    signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            asm = triton.compile(ASTSource(recorder.fn, signature, constants), target=GPUTarget("cuda", 90, 32), options=options).asm
            ptx[name] = asm["ptx"]
    return ptx


def instructions(ptx: str) -> list[str]:
    """Without what names source lines."""
    code = ptx.split(".section")[0]
    lines = (re.sub(r"//.*", "", line).strip() for line in code.splitlines())
    return [line for line in lines if line and not line.startswith((".loc", ".file", "$L__tmp", "$L__func")) and "debug" not in line]


def test_the_trace_leaves_the_untraced_kernel_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")

    class WithoutTrace(ast.NodeTransformer):
        removed = 0

        def visit_If(self, node: ast.If) -> ast.AST | None:
            if "TRACE" in ast.unparse(node.test):
                self.removed += 1
                return None
            return self.generic_visit(node)

    strip = WithoutTrace()
    tree = strip.visit(ast.parse(Path(module.__file__).read_text()))
    assert strip.removed >= 3
    (tmp_path / "never_traced.py").write_text(ast.unparse(ast.fix_missing_locations(tree)))
    spec = importlib.util.spec_from_file_location("never_traced", tmp_path / "never_traced.py")
    never = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "never_traced", never)
    spec.loader.exec_module(never)
    for more in ({}, {"num_splits": 2}):
        with_trace, without = compile_for_hopper(module, **more), compile_for_hopper(never, **more)
        assert "globaltimer" not in with_trace["_flash_decode_kernel"] and "smid" not in with_trace["_flash_decode_kernel"]
        assert instructions(with_trace["_flash_decode_kernel"]) == instructions(without["_flash_decode_kernel"])


def test_a_traced_kernel_reads_clock_and_sm_and_the_merge_waits_for_the_splits() -> None:
    inputs = make_inputs("cpu", torch.bfloat16, 0, "1:100 3:50", 8, 2, 64)
    names = ("q", "k_cache", "v_cache", "block_table", "max_query_len")
    p = plan_decode(*(inputs[n] for n in names), num_splits=2)
    ptx = compile_for_hopper(module, num_splits=2, log=make_log(p.programs, p.tiles, p.block_m, 64, (0, 0), "cpu"))
    assert "%globaltimer" in ptx["_flash_decode_kernel"] and "%smid" in ptx["_flash_decode_kernel"]
    assert "griddepcontrol.launch_dependents" in ptx["_flash_decode_kernel"]
    assert "griddepcontrol.wait" in ptx["_merge_splits_kernel"]


def test_the_merge_of_the_most_splits_compiles() -> None:
    assert compile_for_hopper(module, num_splits=SPLIT_LIMIT)["_merge_splits_kernel"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=gpu) for name in CHECKS])
def test_compiled(name: str) -> None:
    CHECKS[name]("cuda")


@pytest.mark.parametrize("num_splits", [pytest.param(n, marks=gpu) for n in (None, 1, 3)])
def test_a_captured_step_is_right_when_the_sequences_grow(num_splits: int | None) -> None:
    inputs = make_inputs("cuda", torch.bfloat16, 0, "1:300 4:170 1:2000", 9, 3, 64, lse=False)
    final = inputs["seq_lens"].clone()
    inputs["seq_lens"].fill_(16)
    flash_decode(**inputs, num_splits=num_splits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_decode(**inputs, num_splits=num_splits)
    for lens in (final // 2, final):
        inputs["seq_lens"].copy_(lens)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, flash_decode(**inputs, num_splits=num_splits))
    assert distance(out, attention_ref(**inputs)) < SPEC.tolerance[torch.bfloat16]


def gathered(inputs: dict) -> list[torch.Tensor]:
    """q, k, v as SDPA takes them: [b, heads, queries or keys, D]. All sequences are equally long."""
    (length, *_), group = inputs["seq_lens"].tolist(), inputs["q"].shape[1] // inputs["k_cache"].shape[2]
    q = inputs["q"][:, :, None]
    pages = inputs["block_table"].long()
    return [q, *(inputs[n][pages].flatten(1, 2)[:, :length].repeat_interleave(group, 2).transpose(1, 2) for n in ("k_cache", "v_cache"))]


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=gpu) for d in (torch.float32, torch.float16, torch.bfloat16)])
@pytest.mark.parametrize("kind", ["random", "large", "constant"])
@pytest.mark.parametrize("num_splits", [1, 5])
def test_no_less_accurate_than_sdpa_in_the_same_type(num_splits: int, kind: str, dtype: torch.dtype) -> None:
    inputs = make_inputs("cuda", dtype, 0, "1:700x16", 32, 8, 64, lse=False, q_scale=30.0 if kind == "large" else 1.0)
    if kind == "constant":
        for name, value in (("q", 1.3), ("k_cache", 0.7), ("v_cache", 0.9)):
            inputs[name].copy_(torch.where(inputs[name].isnan(), torch.nan, value))
    qkv = gathered(inputs)
    want = F.scaled_dot_product_attention(*(x.double() for x in qkv))[:, :, 0]
    results = flash_decode(**inputs, num_splits=num_splits), F.scaled_dot_product_attention(*qkv)[:, :, 0]
    errors = [float((x.double() - want).abs().max()) for x in results]
    # of one number, 0.9, an average can be exact by luck; here: rounded once, and some roundings of a sum in fp32
    luck = (torch.finfo(dtype).eps / 2 + 8 * torch.finfo(torch.float32).eps) * 0.9 if kind == "constant" else 0.0
    assert errors[0] <= max(1.5 * errors[1], luck), errors


def main() -> None:
    from tests.kernels.interpreted import poison_masked_loads, say

    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    poison_masked_loads()
    for name, check in CHECKS.items():
        try:
            check("cpu")
            say(name, [])
        except Exception:
            say(name, [traceback.format_exc(limit=-3)])


if __name__ == "__main__":
    main()
