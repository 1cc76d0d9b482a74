"""TRAPS.md, rows K1 K2 K3 K5 C1, as functions of the function under test. Each runs on a reference, on the
interpreted kernel (in a child process) and on the compiled kernel."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kernels.attention import make_inputs as attention_inputs
from kernels.kv_write import make_inputs as kv_inputs
from tests.kernels import oracle
from tests.kernels.harness import distance

FAR_PAGE, FAR_STRIDE = 7_800, 276_480  # their product is past 2^31
FAR_ROW = 1_100_000_000  # twice this too


def _far_caches(device: str, hk: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp16 caches of one virtual 4.3 GB pool; only touched memory pages are ever committed."""
    pool = torch.empty(FAR_PAGE * FAR_STRIDE + 2 * 16 * hk * d, dtype=torch.float16, device=device)
    shape, stride = (FAR_PAGE + 1, 16, hk, d), (FAR_STRIDE, hk * d, d, 1)
    return pool.as_strided(shape, stride, 0), pool.as_strided(shape, stride, 16 * hk * d)


def k1_kv_write_reaches_a_page_past_2_31_elements(fn: Callable, device: str) -> None:
    k_cache, v_cache = _far_caches(device, 2, 32)
    for page in (FAR_PAGE, 1):
        k_cache[page], v_cache[page] = 7.0, 7.0
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(5, 2, 32, generator=g).to(device, torch.float16) for _ in range(2))
    far, near = (torch.tensor([page * 16 + i for i in (3, 0, 15, 8, 4)], device=device) for page in (FAR_PAGE, 1))
    fn(k, v, k_cache, v_cache, far)
    fn(k, v, k_cache, v_cache, near)
    assert torch.equal(k_cache[FAR_PAGE, 3], k[0]) and torch.equal(v_cache[FAR_PAGE, 4], v[4])
    assert torch.equal(k_cache[FAR_PAGE], k_cache[1]) and torch.equal(v_cache[FAR_PAGE], v_cache[1])


def k1_attention_reads_a_page_past_2_31_elements(fn: Callable, device: str) -> None:
    k_cache, v_cache = _far_caches(device, 2, 32)
    g = torch.Generator().manual_seed(0)
    for cache in (k_cache, v_cache):
        for page in (2, 3):
            cache[page] = torch.randn(16, 2, 32, generator=g).to(device, torch.float16)
        cache[FAR_PAGE] = cache[2]
    q = torch.randn(3, 4, 32, generator=g).to(device, torch.float16)
    results = []
    for first in (FAR_PAGE, 2):
        # long enough for whole blocks of keys and for a part of one
        table = torch.tensor([[first, 3] * 5, [3, first] * 5], dtype=torch.int32, device=device)
        cu, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1, 3], [151, 148]))
        results.append(fn(q, k_cache, v_cache, table, cu, lens, 0.2, 2))
    assert bool(torch.isfinite(results[0]).all())
    assert torch.equal(results[0], results[1])


def _far_rows(device: str, *shape: int) -> torch.Tensor:
    """[3, *shape] fp16 whose third row starts past 2^31 elements."""
    pool = torch.empty(2 * FAR_ROW + math.prod(shape), dtype=torch.float16, device=device)
    inner = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    x = pool.as_strided((3, *shape), (FAR_ROW, *inner))
    x.copy_(torch.randn(3, *shape, generator=torch.Generator().manual_seed(1)))
    return x


def k1_rms_norm_reads_a_row_past_2_31_elements(fn: Callable, device: str) -> None:
    x, weight = _far_rows(device, 2, 64), torch.ones(64, dtype=torch.float16, device=device)
    assert torch.equal(fn(x, weight, 1e-5), fn(x.contiguous(), weight, 1e-5))


def k1_silu_mul_reads_a_row_past_2_31_elements(fn: Callable, device: str) -> None:
    x = _far_rows(device, 128)
    assert torch.equal(fn(x), fn(x.contiguous()))


def k1_rope_rotates_a_row_past_2_31_elements(fn: Callable, device: str) -> None:
    x = _far_rows(device, 3, 32)
    near = x.contiguous()
    cos, sin = torch.rand(5, 16, device=device), torch.rand(5, 16, device=device)
    positions = torch.tensor([4, 0, 2], device=device)
    fn(x[:, :2], x[:, 2:], cos, sin, positions)
    fn(near[:, :2], near[:, 2:], cos, sin, positions)
    assert torch.equal(x.contiguous(), near)


def k1_kv_write_takes_a_row_past_2_31_elements(fn: Callable, device: str) -> None:
    x = _far_rows(device, 4, 32)
    caches = [torch.zeros(2, 8, 2, 32, dtype=torch.float16, device=device) for _ in range(2)]
    fn(x[:, :2], x[:, 2:], *caches, torch.tensor([0, 5, 9], device=device))
    assert torch.equal(caches[0][1, 1], x[2, :2]) and torch.equal(caches[1][1, 1], x[2, 2:])


def k1_attention_takes_a_query_row_past_2_31_elements(fn: Callable, device: str) -> None:
    inputs = attention_inputs(device, torch.float16, 0, "3:20", 2, 1, 32, lse=False)
    far = {**inputs, "q": _far_rows(device, 2, 32)}
    assert torch.equal(fn(**far), fn(**{**far, "q": far["q"].contiguous()}))


def k2_nan_in_slots_that_were_never_written_does_not_reach_the_output(fn: Callable, device: str) -> None:
    for length in (1, 15, 16, 17, 33):
        for n_q in {1, min(3, length), length}:
            for window in (0, 4):
                inputs = attention_inputs(device, torch.float32, length, f"{n_q}:{length} 1:5", 4, 2, 32, window=window)
                _agrees(fn, inputs)


def _agrees(fn: Callable, inputs: dict, tolerance: float = 2e-5) -> None:
    out, lse = fn(**inputs)
    want_out, want_lse = oracle.attention(inputs)
    assert not bool(out.isnan().any()) and not bool(lse.isnan().any())
    errors = distance(out.cpu().double(), want_out), distance(lse.cpu().double(), want_lse)
    assert max(errors) < tolerance, errors


def k3a_scores_near_minus_60000_keep_their_softmax(fn: Callable, device: str) -> None:
    for sequences in ("1:40", "40:40", "3:40"):
        inputs = attention_inputs(device, torch.float32, 0, sequences, 2, 1, 16)
        q, k_cache = inputs["q"], inputs["k_cache"]
        q.zero_()
        q[..., :2] = -1.0
        offset = (torch.arange(k_cache.shape[0] * 16, device=device) % 5).view(-1, 16, 1).float()
        written = ~k_cache.isnan()
        k = torch.zeros_like(k_cache)
        k[..., 0], k[..., 1] = 60_000.0, offset
        k_cache.copy_(torch.where(written, k, torch.nan))
        _agrees(fn, {**inputs, "scale": 1.0}, 2e-6)


def k3b_rows_that_see_no_key_give_zero_and_minus_infinity(fn: Callable, device: str) -> None:
    for window in (0, 3):
        inputs = attention_inputs(device, torch.float32, 0, "5:3 1:0 3:0 1:20 4:4", 4, 2, 32, window=window, pad_rows=5)
        out, lse = fn(**inputs)
        blind = [0, 1, 5, 6, 7, 8, 14, 15, 16, 17, 18]  # 5 queries on 3 keys, no keys at all, behind the last sequence
        assert bool((out[blind] == 0).all()) and bool((lse[blind] == -torch.inf).all())
        seeing = [row for row in range(19) if row not in blind]
        assert bool(torch.isfinite(lse[seeing]).all())
        _agrees(fn, inputs)


def k5_the_soft_cap_is_cap_tanh_of_scale_times_x_over_cap(fn: Callable, device: str) -> None:
    for sequences in ("1:1", "1:9", "4:9", "9:9", "80:80"):  # decode, verify, prefill, several key blocks
        inputs = attention_inputs(device, torch.float32, 0, sequences, 2, 1, 64, softcap=50.0)
        inputs["q"].zero_()[..., 0] = 80.0
        k = torch.zeros_like(inputs["k_cache"])
        k[..., 0] = 1.0
        inputs["k_cache"].copy_(torch.where(inputs["k_cache"].isnan(), torch.nan, k))
        assert inputs["scale"] == 1 / 8
        n_q, length = (int(n) for n in sequences.split(":"))
        _, lse = fn(**inputs)
        # all keys are alike: lse = capped score + ln(number of keys seen). Dropped it is 10, in the wrong order 5.7604
        for row in range(n_q):
            score = float(lse[row, 0]) - math.log(length - n_q + row + 1)
            assert abs(score - 9.8688) < 1e-4, (sequences, row, score)


def k5_the_soft_cap_holds_far_above_the_cap(fn: Callable, device: str) -> None:
    for sequences in ("1:40 1:17", "40:40 3:17"):
        _agrees(fn, attention_inputs(device, torch.float32, 3, sequences, 4, 2, 64, softcap=50.0, q_scale=300.0))


def c1_padding_rows_write_nothing(fn: Callable, device: str) -> None:
    for padded in (4, 8):
        inputs = kv_inputs(device, torch.float32, 0, padded, 2, 16, page_size=16, pages=4)
        k_cache, v_cache = inputs["k_cache"], inputs["v_cache"]
        k_cache.fill_(-5.0)
        v_cache.fill_(-6.0)
        slots = torch.full((padded,), -1, device=device)
        slots[-1] = -17  # any negative slot
        slots[:3] = torch.tensor([17, 40, 5])
        for _ in range(10):
            fn(inputs["k"], inputs["v"], k_cache, v_cache, slots)
        flat_k, flat_v = k_cache.reshape(64, 2, 16), v_cache.reshape(64, 2, 16)
        untouched = [i for i in range(64) if i not in (17, 40, 5)]
        assert bool((flat_k[untouched] == -5).all()) and bool((flat_v[untouched] == -6).all())
        assert torch.equal(flat_k[[17, 40, 5]], inputs["k"][:3]) and torch.equal(flat_v[[17, 40, 5]], inputs["v"][:3])


# (kernel, trap); the far ones last: a wrapped offset may end the process that runs them
TRAPS: tuple[tuple[str, Callable], ...] = (
    ("flash_prefill", k2_nan_in_slots_that_were_never_written_does_not_reach_the_output),
    ("flash_prefill", k3a_scores_near_minus_60000_keep_their_softmax),
    ("flash_prefill", k3b_rows_that_see_no_key_give_zero_and_minus_infinity),
    ("flash_prefill", k5_the_soft_cap_is_cap_tanh_of_scale_times_x_over_cap),
    ("flash_prefill", k5_the_soft_cap_holds_far_above_the_cap),
    ("kv_write", c1_padding_rows_write_nothing),
    ("rms_norm", k1_rms_norm_reads_a_row_past_2_31_elements),
    ("silu_mul", k1_silu_mul_reads_a_row_past_2_31_elements),
    ("rope", k1_rope_rotates_a_row_past_2_31_elements),
    ("kv_write", k1_kv_write_takes_a_row_past_2_31_elements),
    ("kv_write", k1_kv_write_reaches_a_page_past_2_31_elements),
    ("flash_prefill", k1_attention_takes_a_query_row_past_2_31_elements),
    ("flash_prefill", k1_attention_reads_a_page_past_2_31_elements),
)
