"""The memory-bound and the sampling kernels: fused against unfused, draws against the engine's rule, their traps.

Run as a module with TRITON_INTERPRET=1 in the environment this is the child process that tries the traps in Triton's
interpreter; setting it later does not work.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.request import SamplingParams
from engine.sampler import describe as engine_describe
from engine.sampler import draw
from kernels.add_rms_norm import add_rms_norm_ref
from kernels.add_rms_norm import make_inputs as norm_inputs
from kernels.describe import describe_ref
from kernels.kv_write import kv_write_ref
from kernels.registry import load_specs
from kernels.rms_norm import rms_norm_ref
from kernels.rope import rope_ref
from kernels.rope_kv_write import make_inputs as rope_inputs
from kernels.rope_kv_write import rope_kv_write_ref
from kernels.sample import gumbel_ref, sample_ref
from tests.kernels.harness import as_tuple, distance, whole_storage

ROOT = Path(__file__).parents[2]
OURS = ("add_rms_norm", "rope_kv_write", "embedding", "sample", "describe", "rms_norm", "rope", "kv_write", "silu_mul")
SPECS = load_specs()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FAR = 1_100_000_000  # elements between rows: twice this is past 2^31
CHI_SQUARE_7 = 29.88  # a chi-square of 7 degrees of freedom is larger once in 10,000


# ---- traps: functions of the function under test ----


def _far_rows(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """[3, *shape] whose third row starts past 2^31 elements; only touched memory pages are ever committed on a CPU."""
    pool = torch.empty(2 * FAR + math.prod(shape), dtype=dtype, device=device)
    inner = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    x = pool.as_strided((3, *shape), (FAR, *inner))
    return x.copy_(torch.randn(3, *shape, generator=torch.Generator().manual_seed(1)))


def _ones(n: int, value: float, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((n,), value, dtype=dtype, device=device)


def k1_add_rms_norm_reads_and_writes_rows_past_2_31_elements(fn: Callable, device: str) -> None:
    weight = torch.ones(64, dtype=torch.float16, device=device)
    for far_residual in (False, True):
        far, near = _far_rows(device, torch.float16, 64), torch.ones(3, 64, dtype=torch.float16, device=device)
        wanted = [far.contiguous(), near.clone()]
        given = [far, near]
        if far_residual:
            wanted, given = wanted[::-1], given[::-1]
        fn(*wanted, weight, 1e-5)
        fn(*given, weight, 1e-5)
        assert all(torch.equal(a.contiguous(), b) for a, b in zip(given, wanted))
        assert not torch.equal(near, torch.ones_like(near))


def _rope_far(device: str, **dims: int) -> dict:
    return rope_inputs(device, torch.float16, 0, tokens=3, hq=2, hk=1, d=32, page_size=8, pages=4, **dims)


def k1_rope_kv_write_takes_rows_past_2_31_elements(fn: Callable, device: str) -> None:
    near = _rope_far(device)
    x = _far_rows(device, torch.float16, 4, 32)
    far = {**near, "q": x[:, :2], "k": x[:, 2:3], "v": x[:, 3:]}
    near |= {name: far[name].clone(memory_format=torch.contiguous_format) for name in ("q", "k", "v")}
    near |= {name: near[name].clone() for name in ("k_cache", "v_cache")}
    for a, b in zip(fn(**near), fn(**far)):
        assert distance(a.contiguous(), b.contiguous()) == 0


def k1_rope_kv_write_reaches_a_page_past_2_31_elements(fn: Callable, device: str) -> None:
    page, stride = 7_800, 276_480  # their product is past 2^31
    inputs = _rope_far(device)
    pool = torch.empty((page + 1) * stride, dtype=torch.float16, device=device)
    results = []
    for target in (page, 1):
        caches = {
            name: pool.as_strided((page + 1, 8, 1, 32), (stride, 32, 32, 1), at * 256) for at, name in enumerate(("k_cache", "v_cache"))
        }
        for cache in caches.values():
            cache[target] = 7.0
        slots = torch.tensor([target * 8 + i for i in (3, 0, 7)], device=device)
        again = {**inputs, "q": inputs["q"].clone(), **caches, "slot_mapping": slots}
        fn(**again)
        results.append([cache[target].clone() for cache in caches.values()])
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][1][[3, 0, 7]], inputs["v"]) and bool((results[0][1][1] == 7).all())


def k1_a_cache_whose_heads_lie_far_apart_is_written(fn: Callable, device: str) -> None:
    inputs = rope_inputs(device, torch.float16, 0, tokens=3, hq=3, hk=3, d=32, page_size=8, pages=1)
    pool = torch.empty(2 * FAR + 2 * 256, dtype=torch.float16, device=device)
    far = [pool.as_strided((1, 8, 3, 32), (256, 32, FAR, 1), at * 256) for at in range(2)]
    near = rope_inputs(device, torch.float16, 0, tokens=3, hq=3, hk=3, d=32, page_size=8, pages=1)
    fn(**{**inputs, "k_cache": far[0], "v_cache": far[1]})
    fn(**near)
    at = near["slot_mapping"]
    for a, name in zip(far, ("k_cache", "v_cache")):
        assert torch.equal(a[0][at], near[name][0][at])


def k1_embedding_reads_a_row_past_2_31_elements(fn: Callable, device: str) -> None:
    weight = _far_rows(device, torch.float16, 100)
    token_ids = torch.tensor([2, 0, 1, 2], device=device)
    assert torch.equal(fn(token_ids, weight), fn(token_ids, weight.contiguous()))


def k1_sample_reads_a_row_past_2_31_elements(fn: Callable, device: str) -> None:
    logits = _far_rows(device, torch.float32, 5000)
    for k, p in ((0, 1.0), (40, 0.9)):
        rest = (_ones(3, 0.8, device), _ones(3, k, device, torch.int32), _ones(3, p, device), _ones(3, 0.7, device))
        assert torch.equal(fn(logits, *rest), fn(logits.contiguous(), *rest))


def k1_describe_reads_a_row_past_2_31_elements(fn: Callable, device: str) -> None:
    logits, tokens = _far_rows(device, torch.float32, 100), torch.tensor([3, 1, 99], device=device)
    assert all(torch.equal(a, b) for a, b in zip(fn(logits, tokens, 3), fn(logits.contiguous(), tokens, 3)))


def c1_padding_rows_are_rotated_and_written_nowhere(fn: Callable, device: str) -> None:
    inputs = rope_inputs(device, torch.float32, 0, tokens=8, hq=2, hk=2, d=16, page_size=8, pages=4)
    k_cache, v_cache, slots = inputs["k_cache"].fill_(-5.0), inputs["v_cache"].fill_(-6.0), inputs["slot_mapping"]
    slots.fill_(-1)
    slots[-1] = -17  # any negative slot
    slots[:3] = torch.tensor([17, 30, 5])
    before = inputs["q"].clone()
    fn(**inputs)
    flat_k, flat_v = k_cache.reshape(32, 2, 16), v_cache.reshape(32, 2, 16)
    untouched = [i for i in range(32) if i not in (17, 30, 5)]
    assert bool((flat_k[untouched] == -5).all()) and bool((flat_v[untouched] == -6).all())
    assert torch.equal(flat_v[[17, 30, 5]], inputs["v"][:3])
    moved = inputs["positions"] != 0
    assert bool((inputs["q"] != before)[moved].flatten(1).any(1).all())


def k_stays_unless_it_is_to_be_rotated(fn: Callable, device: str) -> None:
    for rotate_k in (False, True):
        inputs = rope_inputs(device, torch.float32, 0, tokens=5, hq=2, hk=2, d=20, r=12, rotate_k=rotate_k)
        before = inputs["k"].clone()
        fn(**inputs)
        page, offset = inputs["slot_mapping"] // 16, inputs["slot_mapping"] % 16
        written = inputs["k_cache"][page, offset]
        assert torch.equal(inputs["k"], written if rotate_k else before)
        assert torch.equal(written[..., 12:], before[..., 12:]) and not torch.equal(written, before)


def a_row_is_drawn_alike_alone_and_in_any_batch(fn: Callable, device: str) -> None:
    inputs = SPECS["sample"].make_inputs(device, torch.float32, 3, rows=10, v=500, k=7, p=0.8, mixed=True)
    inputs["uniform"].copy_(torch.linspace(0.05, 0.95, 10, dtype=torch.float64))
    whole = fn(**inputs)
    for order in ([9, 3, 0, 7], [4], list(range(9, -1, -1))):
        some = {name: x[order] for name, x in inputs.items()}
        assert torch.equal(fn(**some), whole[order])


def a_grid_of_uniforms_gives_every_id_its_share(fn: Callable, device: str) -> None:
    """The uniforms (i + 1/2) / n hit an id of mass p in n * p of n cases, give or take one."""
    v = 8
    row = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -torch.inf, 1.0, 0.2], device=device)
    p = torch.softmax(row.double() / 0.7, 0)
    for n, k, top_p, kept in ((100, 0, 1.0, range(v)), (20, 3, 1.0, (3, 1, 6)), (20, 0, 0.7, (3, 1)), (20, 4, 0.9, (3, 1, 6))):
        u = (torch.arange(n, device=device, dtype=torch.float64) + 0.5) / n
        tokens = fn(row.repeat(n, 1), _ones(n, 0.7, device), _ones(n, k, device, torch.int32), _ones(n, top_p, device), u)
        want = torch.zeros(v, dtype=torch.float64, device=device)
        want[list(kept)] = p[list(kept)] / p[list(kept)].sum()
        assert float((torch.bincount(tokens, minlength=v) - n * want).abs().max()) <= 1, (k, top_p)
    assert fn(row[None], _ones(1, 0.7, device), _ones(1, 0, device, torch.int32), _ones(1, 1.0, device), u[:1] * 0).tolist() == [0]


def ties_go_to_the_lowest_id(fn: Callable, device: str) -> None:
    row = torch.full((1, 6000), -3.0, device=device)
    row[0, [5001, 40, 4097]] = 2.0
    row[0, [7, 8]] = torch.tensor([0.0, -0.0], device=device)
    zero = _ones(1, 0, device, torch.int32)

    def drawn(t: float, k: int, p: float, u: float) -> int:
        return int(fn(row, _ones(1, t, device), zero + k, _ones(1, p, device), _ones(1, u, device))[0])

    assert drawn(0.0, 0, 1.0, 0.5) == 40
    assert [drawn(0.5, 3, 1.0, u) for u in (0.1, 0.5, 0.9)] == [40, 4097, 5001]
    assert [drawn(0.5, 2, 1.0, u) for u in (0.1, 0.5, 0.9)] == [40, 4097, 4097]
    assert [drawn(0.5, 3, 0.4, u) for u in (0.1, 0.45, 0.9)] == [40, 40, 4097]
    assert [drawn(100.0, 5, 1.0, u) for u in (0.69, 0.9)] == [7, 8]  # 0 and -0 are equal
    flat = torch.zeros(1, 6000, device=device)
    for k, p, u, want in ((0, 0.5, 0.5, 1500), (5000, 1.0, 0.5, 2500), (3, 1.0, 0.5, 1), (0, 1.0, 0.25, 1500)):
        got = fn(flat, _ones(1, 1.0, device), zero + k, _ones(1, p, device), _ones(1, u, device, torch.float64) + 1e-7)
        assert int(got[0]) == want, (k, p, u)


def broken_rows_give_valid_ids(fn: Callable, device: str) -> None:
    inf, nan = torch.inf, torch.nan
    rows = [[nan] * 5, [inf, nan, 1.0, 0.0, 2.0], [-inf] * 5, [inf] * 5, [-inf, -inf, 3.0, -inf, -inf], [1e38, -1e38, 3e38, 0.0, nan]]
    logits = torch.tensor(rows, device=device).repeat(1, 30)
    s = len(rows)
    for t in (0.0, 1e-6, 1.0):
        for k, p in ((0, 1.0), (3, 1.0), (0, 0.5)):
            rest = (_ones(s, t, device), _ones(s, k, device, torch.int32), _ones(s, p, device), _ones(s, 0.999, device))
            tokens = fn(logits, *rest)
            assert bool(((tokens >= 0) & (tokens < 150)).all())
            assert int(tokens[4]) % 5 == 2, (t, k, p)


def gumbel_draws_follow_the_softmax(fn: Callable, device: str) -> None:
    n, t = 800, 0.7
    row = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -0.3, 1.0, 0.2], device=device)
    seeds = torch.randint(-(1 << 62), 1 << 62, (n,), generator=torch.Generator().manual_seed(0)).to(device)

    def drawn(n: int, k: int) -> torch.Tensor:
        rest = (_ones(n, t, device), _ones(n, k, device, torch.int32), _ones(n, 1.0, device), None)
        return fn(row.repeat(n, 1), *rest, seeds[:n], torch.arange(n, device=device))

    tokens = drawn(n, 0)
    assert _chi_square(tokens, torch.softmax(row.double() / t, 0)) < CHI_SQUARE_7
    assert _chi_square(tokens, torch.softmax(row.double() / (2 * t), 0)) > CHI_SQUARE_7  # another temperature is noticed
    assert torch.equal(drawn(20, 8), tokens[:20])  # top_k of all ids cuts nothing and takes the other path
    assert set(drawn(40, 2).tolist()) == {3, 1}


def _chi_square(tokens: torch.Tensor, p: torch.Tensor) -> float:
    want = p * len(tokens)
    return float(((torch.bincount(tokens, minlength=len(p)) - want) ** 2 / want).sum())


def the_best_ids_are_in_order_and_ties_go_to_the_lowest(fn: Callable, device: str) -> None:
    logits = torch.zeros(2, 6000, device=device)
    logits[0, [5999, 3, 4500]], logits[0, 77] = 1.0, 2.0
    logits[1] = -torch.inf
    logits[1, 4321] = 5.0
    chosen, ids, logprobs = fn(logits, torch.tensor([77, 4321], device=device), 5)
    assert ids.tolist() == [[77, 3, 4500, 5999, 0], [4321, 0, 1, 2, 3]]
    norm = math.log(5996 + 3 * math.e + math.e**2)
    assert abs(float(chosen[0]) - (2 - norm)) < 1e-5 and abs(float(logprobs[0, 4]) + norm) < 1e-5
    assert float(chosen[1]) == 0.0 and logprobs[1].tolist() == [0.0] + [-math.inf] * 4


def a_row_with_no_number_in_it_has_no_log_probability(fn: Callable, device: str) -> None:
    logits = torch.zeros(2, 100, device=device)
    logits[1, 30] = torch.nan
    chosen, ids, logprobs = fn(logits, torch.tensor([5, 5], device=device), 3)
    assert bool(torch.isfinite(chosen[0])) and bool(chosen[1].isnan()) and bool(logprobs[1].isnan().all())
    assert bool(((ids >= 0) & (ids < 100)).all())


TRAPS: tuple[tuple[str, Callable], ...] = (
    ("rope_kv_write", c1_padding_rows_are_rotated_and_written_nowhere),
    ("rope_kv_write", k_stays_unless_it_is_to_be_rotated),
    ("sample", a_row_is_drawn_alike_alone_and_in_any_batch),
    ("sample", a_grid_of_uniforms_gives_every_id_its_share),
    ("sample", ties_go_to_the_lowest_id),
    ("sample", broken_rows_give_valid_ids),
    ("sample", gumbel_draws_follow_the_softmax),
    ("describe", the_best_ids_are_in_order_and_ties_go_to_the_lowest),
    ("describe", a_row_with_no_number_in_it_has_no_log_probability),
    ("add_rms_norm", k1_add_rms_norm_reads_and_writes_rows_past_2_31_elements),
    ("embedding", k1_embedding_reads_a_row_past_2_31_elements),
    ("sample", k1_sample_reads_a_row_past_2_31_elements),
    ("describe", k1_describe_reads_a_row_past_2_31_elements),
    ("rope_kv_write", k1_rope_kv_write_takes_rows_past_2_31_elements),
    ("rope_kv_write", k1_a_cache_whose_heads_lie_far_apart_is_written),
    ("rope_kv_write", k1_rope_kv_write_reaches_a_page_past_2_31_elements),
)


# ---- what a kernel does where its reference raises ----


def an_id_outside_the_table_gives_a_row_of_nan(fn: Callable, device: str) -> None:
    weight = SPECS["embedding"].make_inputs(device, torch.float32, 0, tokens=1, v=5, n=100)["weight"]
    out = fn(torch.tensor([4, -1, 5, 0, 1 << 40], device=device), weight)
    assert torch.equal(out[[0, 3]], weight[[4, 0]]) and bool(out[[1, 2, 4]].isnan().all())


def a_position_outside_the_tables_gives_nan_and_a_slot_behind_the_cache_is_skipped(fn: Callable, device: str) -> None:
    inputs = rope_inputs(device, torch.float32, 0, tokens=4, hq=2, hk=1, d=20, r=12, rows=8, page_size=8, pages=2)
    inputs["positions"].copy_(torch.tensor([1, -1, 8, 3]))
    inputs["slot_mapping"].copy_(torch.tensor([0, 5, 9, 16]))
    arena = inputs["k_cache"]._base if inputs["k_cache"]._base is not None else whole_storage(inputs["k_cache"])
    before = arena.isnan().sum()
    fn(**inputs)
    nan = inputs["q"].isnan()
    assert bool(nan[1:3, :, :12].all()) and not bool(nan[[0, 3]].any()) and not bool(nan[..., 12:].any())
    flat = inputs["k_cache"].reshape(16, 1, 20)
    assert bool(flat[[5, 9], :, :12].isnan().all()) and bool(torch.isfinite(flat[0]).all())
    written = 3 * 20 * 2 - 2 * 12  # three rows of k and v, without the two that have no position
    assert int(before - arena.isnan().sum()) == written


STRAYS: tuple[tuple[str, Callable], ...] = (
    ("embedding", an_id_outside_the_table_gives_a_row_of_nan),
    ("rope_kv_write", a_position_outside_the_tables_gives_nan_and_a_slot_behind_the_cache_is_skipped),
)


def main() -> None:
    """The child: every trap on the interpreted kernels, a JSON line each."""
    from tests.kernels.interpreted import poison_masked_loads, say

    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    poison_masked_loads()
    for kernel, trap in (*STRAYS, *TRAPS):
        try:
            trap(SPECS[kernel].fn, "cpu")
            say(trap.__name__, [])
        except Exception:
            say(trap.__name__, [traceback.format_exc(limit=-3)])


@pytest.fixture(scope="module")
def interpreted() -> tuple[dict[str, dict], str]:
    """name -> result, and what to say about a name that is missing."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_fused"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    lines = [json.loads(line[7:]) for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    missing = f"no result: the child ended with {child.returncode}\n{child.stderr[-2000:]}"
    return {line["name"]: line for line in lines}, missing


@pytest.mark.parametrize("name", [trap.__name__ for _, trap in (*STRAYS, *TRAPS)])
def test_the_interpreted_kernel_avoids_the_trap(interpreted: tuple[dict[str, dict], str], name: str) -> None:
    results, missing = interpreted
    assert name in results, missing
    assert not results[name]["problems"], "\n".join(results[name]["problems"])


@pytest.mark.parametrize("kernel, trap", [pytest.param(k, t, id=t.__name__) for k, t in TRAPS])
def test_the_reference_avoids_the_trap(kernel: str, trap: Callable) -> None:
    trap(SPECS[kernel].ref, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kernel, trap", [pytest.param(k, t, id=t.__name__) for k, t in (*STRAYS, *TRAPS)])
def test_the_compiled_kernel_avoids_the_trap(kernel: str, trap: Callable) -> None:
    trap(SPECS[kernel].fn, "cuda")


# ---- the references ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fused_norm_is_the_sum_and_then_the_norm_bit_by_bit(dtype: torch.dtype) -> None:
    inputs = norm_inputs("cpu", dtype, 0, 17, 63, pad=3)
    want_residual = inputs["residual"] + inputs["x"]
    want = rms_norm_ref(want_residual, inputs["weight"], 1e-5)
    out, residual = add_rms_norm_ref(**inputs)
    assert out is inputs["x"] and residual is inputs["residual"]
    assert torch.equal(out, want) and torch.equal(residual, want_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotate_k", [False, True])
def test_fused_rope_and_write_is_one_and_then_the_other_bit_by_bit(dtype: torch.dtype, rotate_k: bool) -> None:
    dims = {"tokens": 9, "hq": 4, "hk": 2, "d": 20, "r": 12, "padding": 2}
    fused, apart = (rope_inputs("cpu", dtype, 0, rotate_k=rotate_k, **dims) for _ in range(2))
    rope_ref(*(apart[n] for n in ("q", "k", "cos", "sin", "positions")))
    kv_write_ref(*(apart[n] for n in ("k", "v", "k_cache", "v_cache", "slot_mapping")))
    rope_kv_write_ref(**fused)
    for name in ("q", "k_cache", "v_cache", *(["k"] if rotate_k else [])):
        assert distance(fused[name], apart[name]) == 0, name


def test_the_references_raise_where_the_kernels_write_nan() -> None:
    for outside in (-1, 5):
        with pytest.raises(IndexError):
            SPECS["embedding"].ref(torch.tensor([0, outside]), torch.zeros(5, 3))
    inputs = rope_inputs("cpu", torch.float32, 0, tokens=4, hq=2, hk=1, d=20, rows=8, page_size=8, pages=2)
    for name, outside in (("positions", 8), ("positions", -1), ("slot_mapping", 16)):
        broken = {**inputs, name: inputs[name].clone()}
        broken[name][2] = outside
        with pytest.raises(IndexError):
            rope_kv_write_ref(**broken)


def test_a_draw_is_the_engines_draw() -> None:
    g = np.random.default_rng(0)
    cases = [(None, 1.0), (1, 1.0), (5, 1.0), (500, 1.0), (None, 0.9), (None, 0.05), (20, 0.8)]
    for trial in range(40):
        logits = torch.from_numpy(g.normal(0, 3, (len(cases), 300)).astype(np.float32))
        if trial % 2:
            logits = logits.round()  # ties
        u = torch.from_numpy(g.random(len(cases)))
        t = float(g.uniform(0.2, 2.0))
        got = sample_ref(
            logits,
            torch.full((len(cases),), t, dtype=torch.float64),
            torch.tensor([k or 0 for k, _ in cases], dtype=torch.int32),
            torch.tensor([p for _, p in cases], dtype=torch.float64),
            u,
        )
        want = [int(draw(logits[i], SamplingParams(temperature=t, top_k=k, top_p=p), float(u[i]))) for i, (k, p) in enumerate(cases)]
        assert got.tolist() == want


def test_greedy_is_argmax() -> None:
    logits = torch.randn(20, 50).round()
    zero = torch.zeros(20)
    got = sample_ref(logits, zero, zero.int(), zero + 1, zero)
    assert torch.equal(got, logits.argmax(-1))


def test_the_noise_is_philoxs() -> None:
    """The published answer for key 0 and counter 0 begins with 6627e8d5."""
    zero = torch.zeros(1, dtype=torch.int64)

    def word(seed: int, position: int, at: int) -> int:
        g = gumbel_ref(zero + seed, zero + position, at + 1)[0, at]
        return round(-math.expm1(-math.exp(-float(g))) * 2**32 - 0.5)

    assert word(0, 0, 0) == 0x6627E8D5
    seen = {word(seed, position, at) for seed in (0, 1, 1 << 32, -1) for position in (0, 1, 1 << 32) for at in (0, 1, 2)}
    assert len(seen) == 36  # every part of key and counter matters


def test_gumbel_noise_draws_the_softmax() -> None:
    n, t = 200_000, 0.7
    row = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -0.3, 1.0, 0.2], dtype=torch.float64)
    seeds = torch.randint(-(1 << 62), 1 << 62, (n,), generator=torch.Generator().manual_seed(1))
    for seed, position in ((seeds, torch.zeros_like(seeds)), (torch.zeros_like(seeds) + 7, torch.arange(n))):
        tokens = (row / t + gumbel_ref(seed, position, 8)).argmax(-1)
        assert _chi_square(tokens, torch.softmax(row / t, 0)) < CHI_SQUARE_7
        # neighbours in time are independent: pairs follow the product
        pairs = tokens[0::2] * 8 + tokens[1::2]
        p = torch.softmax(row / t, 0)
        assert _chi_square(pairs, torch.outer(p, p).flatten()) < 130  # 63 degrees of freedom; 115 once in 10,000


def test_descriptions_are_the_engines() -> None:
    logits, tokens = torch.randn(5, 300) * 4, torch.tensor([0, 299, 5, 17, 100])
    for got, want in zip(describe_ref(logits, tokens, 5), engine_describe(logits, tokens, 5)):
        assert torch.equal(got, want) and got.dtype == want.dtype
    logprobs = F.log_softmax(logits.double(), -1)
    assert distance(describe_ref(logits, tokens, 5)[0].double(), logprobs.gather(1, tokens[:, None])[:, 0]) < 1e-6


@pytest.mark.parametrize("name", OURS)
def test_the_loop_is_the_reference_slowly(name: str) -> None:
    spec = SPECS[name]
    for case in spec.cases[:6]:
        ours, theirs = (spec.make_inputs("cpu", torch.float32, 0, **case.dims) for _ in range(2))
        loop, count = spec.loop(**ours), 0
        try:
            while True:
                next(loop)
                count += 1
        except StopIteration as end:
            results = as_tuple(end.value)
        assert count == spec.loop_iterations(ours)
        for a, b in zip(results, as_tuple(spec.ref(**theirs)), strict=True):
            assert distance(a, b) <= 2 * spec.tolerance[torch.float32], case.name
        for output in spec.outputs:
            assert distance(whole_storage(ours[output]), whole_storage(theirs[output])) <= 2 * spec.tolerance[torch.float32]


if __name__ == "__main__":
    main()
