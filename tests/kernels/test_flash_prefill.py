"""flash_prefill beyond its SPEC: its tile log against an online softmax of our own, tile sizes, rows of others, accuracy.

What needs Triton's interpreter runs in one child (`python -m tests.kernels.test_flash_prefill`), as tests/kernels/interpreted.py does.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

import kernels.flash_prefill
from kernels import flash_hopper
from kernels.attention import attention_ref
from kernels.flash_prefill import SPEC, PrefillPlan, find_lane, flash_prefill, plan_prefill
from kernels.spec import Case
from kernels.tile_log import FULL, PARTLY, SKIPPED, TileLog, make_log
from tests.kernels.harness import check_case, distance, nan_filled_outputs

ROOT = Path(__file__).parents[2]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")

SHAPE = {"hq": 4, "hk": 2, "d": 32}
LOGGED = {  # dims of make_inputs, block_m, block_n
    "causal": ({"sequences": "40:40 1:1 17:50", **SHAPE}, 16, 16),
    "as_chosen": ({"sequences": "40:140 1:1 17:50 9:300", **SHAPE}, None, None),
    "decode": ({"sequences": "1:40 1:64 1:17", **SHAPE}, None, 32),
    "rows_without_keys": ({"sequences": "5:3 1:0 20:4 4:4", "pad_rows": 3, **SHAPE}, 16, 16),
    "window": ({"sequences": "40:100 1:33 6:90", "window": 21, **SHAPE}, 16, 16),
    "wide_window": ({"sequences": "12:200", "window": 100, **SHAPE}, 16, 32),
    "softcap": ({"sequences": "20:40", "softcap": 3.0, "q_scale": 6.0, **SHAPE}, 32, 16),
    "sinks": ({"sequences": "20:40 1:9", "sinks": True, **SHAPE}, 16, 16),
    "tree": ({"sequences": "9:40 1:20 12:70", "drafts": "6 0 12", **SHAPE}, 16, 16),
    "tree_window": ({"sequences": "9:40 1:20 12:70", "drafts": "6 0 12", "window": 15, **SHAPE}, 16, 16),
    "group_3": ({"sequences": "30:45", "hq": 9, "hk": 3, "d": 64}, 32, 64),
}


def visible_keys(inputs: dict, s: int, row: int) -> np.ndarray:
    """bool [seq_len]: the keys that query row `row` of sequence s sees."""
    cu, length = inputs["cu_seqlens_q"].tolist(), int(inputs["seq_lens"][s])
    tree, window = inputs["tree"], inputs["window"]
    drafts = 0 if tree is None else int(tree.lens[s])
    position = int(tree.positions[row]) if drafts else length - cu[s + 1] + row
    key = np.arange(length)
    seen = (key <= position) & (key < length - drafts)
    if window is not None:
        seen &= key > position - window
    for i in range(drafts):
        seen[length - drafts + i] = bool(int(tree.mask[row]) >> i & 1)
    return seen


def expected_tiles(inputs: dict, s: int, rows: range, seen: np.ndarray, block_n: int) -> list[tuple[int, int]]:
    """[first key, behind the last) of each tile, in order. seen: [rows, keys]."""
    any_row = np.flatnonzero(seen.any(0))
    if not len(any_row):
        return []
    low, high = int(any_row[0]), int(any_row[-1]) + 1
    drafts = 0 if inputs["tree"] is None else int(inputs["tree"].lens[s])
    length = seen.shape[1]
    if drafts and length - int(inputs["cu_seqlens_q"][s + 1]) + rows[-1] >= length - drafts:
        high = length  # a block with a draft row visits all drafts
    if inputs["window"] is None:
        low = 0
    return [(max(low, at), min(high, at + block_n)) for at in range(low // block_n * block_n, high, block_n)]


def online_softmax(x: np.ndarray, seen: np.ndarray, v: np.ndarray, tiles: list[tuple[int, int]]) -> list[tuple]:
    """(m, l, rescale, acc) after each tile, fp64, of one lane: x, seen [keys], v [keys, Dv]."""
    m, l, acc, found = -math.inf, 0.0, np.zeros(v.shape[1]), []
    for start, stop in tiles:
        key = np.arange(start, stop)[seen[start:stop]]
        new = max(m, x[key].max(initial=-math.inf))
        rescale = math.exp(m - new) if m > -math.inf else 0.0
        p = np.exp(x[key] - new)
        m, l, acc = new, l * rescale + p.sum(), acc * rescale + p @ v[key]
        found.append((m, l, rescale, acc))
    return found


def fill_log(inputs: dict, block_m: int | None, block_n: int | None, row: int, head: int) -> tuple[PrefillPlan, TileLog, torch.Tensor]:
    q, (_, _, hk, dv) = inputs["q"], inputs["v_cache"].shape
    plan = plan_prefill(
        q, inputs["v_cache"], len(inputs["seq_lens"]), inputs["max_query_len"], int(inputs["seq_lens"].max()), block_m, block_n
    )
    chosen = find_lane(plan, inputs["cu_seqlens_q"].tolist(), row, head, q.shape[1], hk)
    log = make_log(plan.programs, plan.tiles, plan.block_m, dv, chosen, q.device)
    out, _ = flash_prefill(**inputs, log=log, block_m=block_m, block_n=block_n)
    return plan, log, out


def log_problems(name: str, device: str, dtype: torch.dtype = torch.float32) -> list[str]:
    """What a traced run wrote down that an online softmax in numpy does not say. The queries' last row is the chosen one."""
    dims, block_m, block_n = LOGGED[name]
    inputs = SPEC.make_inputs(device, dtype, 3, **dims)
    (_, hq, _), (_, page_size, hk, _), cu = inputs["q"].shape, inputs["v_cache"].shape, inputs["cu_seqlens_q"].tolist()
    group, kept_row, kept_head = hq // hk, cu[-1] - 1, hq - 1
    plan, log, out = fill_log(inputs, block_m, block_n, kept_row, kept_head)
    q, k_cache, v_cache = (inputs[n].cpu().double().numpy() for n in ("q", "k_cache", "v_cache"))
    owner, span, kind, sm, time, m, l, rescale, acc = (x.cpu().numpy() for x in log[:9])
    table, tolerance, problems, visited = inputs["block_table"].cpu().numpy(), 2e-4 if dtype == torch.float32 else 3e-2, [], set()

    def differ(what: str, a: np.ndarray, b: np.ndarray) -> None:
        if not np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            problems.append(f"{name}: {what}: {a} is not {b}")

    for s, (start, stop) in enumerate(pairwise(cu)):
        length = int(inputs["seq_lens"][s])
        for first in range(start, stop, plan.block_q):
            rows = range(first, min(first + plan.block_q, stop))
            seen = np.stack([visible_keys(inputs, s, row) for row in rows])  # [rows, keys]
            tiles = expected_tiles(inputs, s, rows, seen, plan.block_n)
            for kv_head in range(hk):
                program, lane = find_lane(plan, cu, first, kv_head * group, hq, hk)
                visited.add(program)
                if lane != 0 or owner[program].tolist() != [s, first, kv_head, 0, len(rows)]:
                    problems.append(f"{name}: owner of {program} is {owner[program].tolist()}, not {[s, first, kv_head, 0, len(rows)]}")
                count = int((kind[program] != SKIPPED).sum())
                if [tuple(x) for x in span[program, :count].tolist()] != tiles or kind[program, count:].any():
                    problems.append(f"{name}: tiles of {program} are {span[program].tolist()}, not {tiles}")
                    continue
                kinds = [FULL if seen[:, a:b].all() else PARTLY for a, b in tiles]
                if kind[program, :count].tolist() != kinds:
                    problems.append(f"{name}: kinds of {program} are {kind[program].tolist()}, not {kinds}")
                timed = device == "cuda" and count
                if timed and not ((sm[program, :count] >= 0).all() and (np.diff(time[program, :count].reshape(-1)) >= 0).all()):
                    problems.append(f"{name}: SMs {sm[program, :count]} or times {time[program, :count].tolist()} of {program}")
                if not timed and (sm[program] != -1).any() | time[program].any():
                    problems.append(f"{name}: {program} has an SM or a time from nowhere")
                keys = np.arange(length)
                k, v = (c[table[s][keys // page_size], keys % page_size, kv_head] for c in (k_cache, v_cache))
                for lane, (row, head) in enumerate((row, kv_head * group + g) for row in rows for g in range(group)):
                    x = inputs["scale"] * (k @ q[row, head])
                    if inputs["softcap"] is not None:
                        x = inputs["softcap"] * np.tanh(x / inputs["softcap"])
                    steps = online_softmax(x, seen[lane // group], v, tiles)
                    for i, (m_i, l_i, rescale_i, acc_i) in enumerate(steps):
                        at = f"{program}, tile {i}, lane {lane}"
                        differ(f"m of {at}", m[program, i, lane], m_i)
                        differ(f"l of {at}", l[program, i, lane], l_i)
                        differ(f"rescale of {at}", rescale[program, i, lane], rescale_i)
                        if log.chosen == (program, lane):
                            differ(f"acc of {at}", acc[i], acc_i)
                    if log.chosen == (program, lane) and (row, head) != (kept_row, kept_head):
                        problems.append(f"{name}: lane {log.chosen} is not row {kept_row}, head {kept_head}")
                unused = m[program, :, len(rows) * group :], l[program, :, len(rows) * group :], m[program, count:]
                if not all(np.isnan(part).all() for part in unused):
                    problems.append(f"{name}: {program} wrote outside its lanes and tiles")
    idle = [p for p in range(plan.programs) if p not in visited and owner[p, 0] != -1]
    if idle or any(kind[p].any() for p in range(plan.programs) if p not in visited):
        problems.append(f"{name}: programs {idle} own nothing and wrote")
    want = attention_ref(**inputs)[0]
    if distance(out, want) > SPEC.tolerance[dtype]:
        problems.append(f"{name}: the traced run gave another output, {distance(out, want):.3g} away")
    return problems


def rows_of_others(device: str) -> list[str]:
    """Sequences below min_query_len keep their rows; padding rows are zeroed; `out` may have strides of its own."""
    problems = []
    inputs = SPEC.make_inputs(device, torch.float32, 1, "1:33 5:40 2:17 9:30", 4, 2, 32, pad_rows=2)
    want = attention_ref(**inputs)[0]
    for least in (1, 2, 3, 6, 10):
        out = torch.full((19, 8, 40), 7.0, device=device)[:, ::2, 4:36]
        got, _ = flash_prefill(**inputs, out=out, min_query_len=least)
        expected = want.clone()
        for start, stop in pairwise(inputs["cu_seqlens_q"].tolist()):
            if stop - start < least:
                expected[start:stop] = 7.0
        if got is not out or distance(out.contiguous(), expected) > 2e-5:
            problems.append(f"min_query_len {least}: {distance(out.contiguous(), expected)}")
    return problems


def any_tile_size(device: str) -> list[str]:
    problems = []
    for dims in ({"sequences": "70:130 1:40 5:9", "hq": 6, "hk": 2, "d": 40}, LOGGED["tree_window"][0]):
        inputs = SPEC.make_inputs(device, torch.float32, 2, **dims)
        want = attention_ref(**inputs)
        for block_m, block_n in ((16, 16), (16, 128), (64, 32), (128, 16), (32, None), (None, 64)):
            with nan_filled_outputs():
                got = flash_prefill(**inputs, block_m=block_m, block_n=block_n)
            errors = [distance(a, b) for a, b in zip(got, want)]
            if max(errors) > 2e-5:
                problems.append(f"block_m {block_m}, block_n {block_n}: {errors}")
    return problems


CHECKS: dict[str, Callable[[str], list[str]]] = {
    **{f"log_{name}": lambda device, name=name: log_problems(name, device) for name in LOGGED},
    "rows_of_others": rows_of_others,
    "any_tile_size": any_tile_size,
}


def main() -> None:
    """In the child."""
    torch.set_num_threads(1)
    for name, check in CHECKS.items():
        try:
            problems = check("cpu")
        except Exception:
            problems = [traceback.format_exc(limit=-3)]
        print("RESULT " + json.dumps([name, problems]), flush=True)


@pytest.fixture(scope="module")
def interpreted() -> tuple[dict[str, list[str]], str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_flash_prefill"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    lines = [json.loads(line[7:]) for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    return dict(lines), f"no result: the child ended with {child.returncode}\n{child.stderr[-2000:]}"


@pytest.mark.parametrize("name", CHECKS)
def test_the_interpreted_kernel_holds(interpreted: tuple[dict[str, list[str]], str], name: str) -> None:
    results, missing = interpreted
    assert name in results, missing
    assert not results[name], "\n".join(results[name][:5])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", CHECKS)
def test_the_compiled_kernel_holds(name: str) -> None:
    problems = CHECKS[name]("cuda")
    assert not problems, "\n".join(problems[:5])


_ROWS = "1:33 5:40 17:17 1:1 3:16 200:200 130:300 5:3 1:0"
HOPPER_CASES = [
    Case(
        f"d{d}_group_{group}_pages_{page_size}",
        {"sequences": _ROWS, "hq": 2 * group, "hk": 2, "d": d, "page_size": page_size, **more},
    )
    for d in (64, 128)
    for group, page_size, more in (
        (1, 16, {"pad_rows": 3, "layers": 2}),
        (1, 128, {"sinks": True}),
        (4, 8, {}),
        (3, 32, {"pad_rows": 2, "layers": 3, "sinks": True}),
        (8, 64, {"lse": False}),
    )
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("d, page_size, group", [(64, 16, 3), (128, 128, 1)])
def test_the_hopper_kernel_compiles_into_three_roles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, d: int, page_size: int, group: int
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = flash_hopper._flash_hopper_kernel
    constants = {
        "HQ": 2 * group, "HK": 2, "GROUP": group, "D": d, "PAGE_SIZE": page_size, "SINKS": True, "RETURN_LSE": True, "HEADS": 8,
        "BLOCK_Q": 128 // group, "BLOCK_N": 128, **flash_hopper._resources(d),
    }  # fmt: skip
    shared = gl.NVMMASharedLayout(128, 16, rank=2)
    types = dict.fromkeys(["q", "out"], "*bf16") | dict.fromkeys(["block_table", "cu_seqlens_q", "seq_lens", "counter"], "*i32")
    types |= dict.fromkeys(["lse", "sinks"], "*fp32") | {"scale": "fp32"} | dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(["k_map", "v_map"], f"tensordesc<bf16[{page_size}, 64],{shared!r}>")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    source = GluonASTSource(kernel, signature, constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    # two consumers: q k^T of the first tile, of a masked and of an unmasked one; 16 bytes of d an instruction
    assert ptx.count("wgmma.mma_async") == 2 * (3 * (d // 16) + 3 * 8)
    assert f"setmaxnreg.inc.sync.aligned.u32 \t{flash_hopper._resources(d)['REGISTERS']}" in ptx
    assert ptx.count("cp.async.bulk.tensor.2d") == 2 * 2 * (d // 64) * (128 // page_size)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", HOPPER_CASES, ids=lambda case: case.name)
def test_the_hopper_kernel_is_right(monkeypatch: pytest.MonkeyPatch, case: Case, dtype: torch.dtype) -> None:
    launches = []
    launch = flash_hopper.launch
    monkeypatch.setattr(flash_hopper, "launch", lambda *args: launches.append(launch(*args)))
    verdict = check_case(SPEC, case, dtype, "cuda")
    assert launches and not verdict.problems, "\n".join(verdict.problems)


@pytest.mark.gpu
@needs_hopper
def test_the_hopper_kernel_leaves_rows_of_others_and_can_be_captured() -> None:
    inputs = SPEC.make_inputs("cuda", torch.bfloat16, 1, "1:330 150:300 2:17 200:700", 4, 2, 64, pad_rows=2, lse=False)
    want = attention_ref(**inputs)
    want[:1], want[151:153] = 7.0, 7.0
    out = torch.full_like(want, 7.0)
    flash_prefill(**inputs, out=out, min_query_len=3)
    assert distance(out, want) < SPEC.tolerance[torch.bfloat16]
    out.fill_(7.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flash_prefill(**inputs, out=out, min_query_len=3)
    for _ in range(2):
        out.fill_(7.0)
        graph.replay()
        torch.cuda.synchronize()
        assert distance(out, want) < SPEC.tolerance[torch.bfloat16]


@pytest.mark.parametrize("name", ["tree_all", "mixed_9_3_64", "sinks_without_keys", "softcap_window"])
def test_the_python_loop_gives_what_the_reference_gives(name: str) -> None:
    case = next(case for case in SPEC.cases if case.name == name)
    inputs = SPEC.make_inputs("cpu", torch.float32, 0, **case.dims)
    loop, yields = SPEC.loop(**inputs), 0
    try:
        while True:
            next(loop)
            yields += 1
    except StopIteration as end:
        got = end.value
    want = attention_ref(**inputs)
    assert yields == SPEC.loop_iterations(inputs)
    assert max(distance(a, b) for a, b in zip(got, want)) < 2e-5


def test_every_row_has_one_program_and_lane() -> None:
    inputs = SPEC.make_inputs("cpu", torch.float32, 0, "33:33 0:5 5:40 1:1 70:90", 6, 2, 32)
    plan = plan_prefill(inputs["q"], inputs["v_cache"], 5, 70, 90, 16, 16)
    places = {find_lane(plan, inputs["cu_seqlens_q"].tolist(), row, head, 6, 2) for row in range(109) for head in range(6)}
    assert len(places) == 109 * 6
    assert max(program for program, _ in places) < plan.programs and max(lane for _, lane in places) < plan.block_m
    assert plan.tiles == 6


@pytest.mark.parametrize(
    "argument, value", [("block_m", 8), ("block_m", 48), ("block_m", 256), ("block_n", 8), ("block_n", 100), ("min_query_len", 0)]
)
def test_a_bad_size_is_named(argument: str, value: int) -> None:
    inputs = SPEC.make_inputs("cpu", torch.float32, 0, "9:9", 4, 2, 32)
    with pytest.raises(ValueError, match=rf"^{argument} is {value}"):
        flash_prefill(**inputs, **{argument: value})


@pytest.mark.parametrize("spoil", [lambda o: o[:8], lambda o: o.half(), lambda o: o[:, :1].expand(-1, 4, -1), lambda o: o.to("meta")])
def test_a_bad_output_is_named(spoil: Callable) -> None:
    inputs = SPEC.make_inputs("cpu", torch.float32, 0, "9:9", 4, 2, 32)
    with pytest.raises(ValueError, match=r"^out\b"):
        flash_prefill(**inputs, out=spoil(torch.zeros(9, 4, 32)))


def test_a_log_that_is_too_small_is_refused() -> None:
    inputs = SPEC.make_inputs("cpu", torch.float32, 0, "9:9", 4, 2, 32)
    with pytest.raises(ValueError, match=r"^log holds 1 programs"):
        flash_prefill(**inputs, log=make_log(1, 1, 16, 32, (0, 0), "cpu"))
    with pytest.raises(ValueError, match=r"^log must be"):
        flash_prefill(**inputs, log=(1, 2))


def without_trace(folder: Path) -> ModuleType:
    """kernels/flash_prefill.py with every `if TRACE:` block cut out of its source."""

    class Cut(ast.NodeTransformer):
        blocks = 0

        def visit_If(self, node: ast.If) -> ast.AST | None:
            self.generic_visit(node)
            if isinstance(node.test, ast.Name) and node.test.id == "TRACE":
                assert not node.orelse
                self.blocks += 1
                return None
            return node

    cut = Cut()
    tree = cut.visit(ast.parse(Path(kernels.flash_prefill.__file__).read_text()))
    assert cut.blocks >= 3
    file = folder / "untraced_flash_prefill.py"
    file.write_text(ast.unparse(tree))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # Triton looks the source up
    spec.loader.exec_module(module)
    return module


def compile_for_hopper(kernel: object, d: int, dtype: str, warps: int, trace: bool = False, **constants: object) -> object:
    """The compiled kernel for compute capability 9.0; needs no GPU. Arguments that are not named are absent."""
    block = max(16, d)
    constants = {
        "HQ": 8, "HK": 4, "GROUP": 2, "D": d, "DV": d, "PAGE_SIZE": 16, "WINDOW": 0, "SOFTCAP": False, "SINKS": False, "TREE": False,
        "RETURN_LSE": True, "PRECISE": dtype == "fp32", "MAPPED": False, "TRACE": trace, "TIMED": trace, "HEADS": 4, "BLOCK_Q": 32,
        "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": block, "BLOCK_DV": block, **constants,
    }  # fmt: skip
    pointers = {
        "q": dtype,
        "k_cache": dtype,
        "v_cache": dtype,
        "out": dtype,
        "block_table": "i32",
        "cu_seqlens_q": "i32",
        "seq_lens": "i32",
        "lse": "fp32",
    }
    if constants["SINKS"]:
        pointers["sinks"] = "fp32"
    if constants["TREE"]:
        pointers |= {"tree_lens": "i32", "tree_mask": "i64", "tree_positions": "i32"}
    if trace:
        pointers |= dict.fromkeys(["log_owner", "log_span", "log_kind", "log_sm"], "i32") | {"log_time": "i64"}
        pointers |= dict.fromkeys(["log_m", "log_l", "log_rescale", "log_acc"], "fp32")
    optional = {"k_map", "v_map", "sinks", "tree_lens", "tree_mask", "tree_positions", "lse"}
    optional |= {f"log_{f}" for f in TileLog._fields[:9]}
    constants |= dict.fromkeys(optional - set(pointers))
    signature = {}
    for name in kernel.arg_names:
        plain = "fp32" if name in ("scale", "softcap") else "i32"
        signature[name] = "constexpr" if name in constants else f"*{pointers[name]}" if name in pointers else plain
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in pointers or name.startswith("stride_")}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 2})


def instructions(compiled: object) -> list[str]:
    """PTX without comments and places in the source."""
    body = re.sub(r"//.*", "", compiled.asm["ptx"]).split(".section")[0]
    lines = (line.strip() for line in body.splitlines())
    return [line for line in lines if line and not line.startswith((".loc", ".file"))]


@pytest.mark.parametrize(
    "d, dtype, more",
    [
        (64, "bf16", {}),
        (128, "fp16", {"BLOCK_M": 128, "BLOCK_Q": 64, "WINDOW": 100, "SINKS": True, "SOFTCAP": True}),
        (32, "fp32", {"TREE": True, "BLOCK_N": 16}),
    ],
)
def test_tracing_leaves_the_untraced_kernel_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, d: int, dtype: str, more: dict
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    warps = 8 if d == 128 else 4
    ours = compile_for_hopper(kernels.flash_prefill._flash_prefill_kernel, d, dtype, warps, **more)
    bare = compile_for_hopper(without_trace(tmp_path)._flash_prefill_kernel, d, dtype, warps, **more)
    traced = compile_for_hopper(kernels.flash_prefill._flash_prefill_kernel, d, dtype, warps, trace=True, **more)
    assert len(instructions(ours)) > 200
    assert instructions(ours) == instructions(bare)
    assert not any("globaltimer" in line for line in instructions(ours))
    assert any("globaltimer" in line for line in instructions(traced)) and any("%smid" in line for line in instructions(traced))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("kind", ["random", "large", "constant"])
def test_it_is_about_as_accurate_as_torch(d: int, dtype: torch.dtype, page_size: int, kind: str) -> None:
    length, heads, batch = 1000, 4, 2
    inputs = SPEC.make_inputs("cuda", dtype, 5, f"{length}:{length}x{batch}", heads, heads, d, page_size=page_size, lse=False)
    if kind == "large":
        inputs["q"].mul_(12.0)
        inputs["v_cache"].mul_(30.0)
    if kind == "constant":
        for name in ("q", "k_cache", "v_cache"):
            inputs[name].copy_(torch.where(inputs[name].isnan(), torch.nan, 0.7))
    got = flash_prefill(**inputs)
    exact = attention_ref(**{n: x.float() if n in ("q", "k_cache", "v_cache") else x for n, x in inputs.items()})
    keys = torch.arange(length, device="cuda")
    k, v = (
        torch.stack([inputs[n][inputs["block_table"][s].long()[keys // page_size], keys % page_size] for s in range(batch)])
        for n in ("k_cache", "v_cache")
    )
    q = inputs["q"].reshape(batch, length, heads, d)
    theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    theirs = theirs.transpose(1, 2).reshape(got.shape)
    ours, bound = (got.float() - exact).abs().max(), (theirs.float() - exact).abs().max()
    assert ours <= 1.5 * bound + 1e-6 * exact.abs().max(), (float(ours), float(bound))


if __name__ == "__main__":
    main()
