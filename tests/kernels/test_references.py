"""The references against answers that are not ours: torch, transformers, fp64."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kernels.attention import PADDED_KEYS, attention_ref, make_inputs, plan_host
from kernels.flash_prefill import SPEC
from kernels.kv_write import kv_write_ref
from kernels.kv_write import make_inputs as kv_inputs
from kernels.registry import load_specs
from kernels.rms_norm import rms_norm_ref
from kernels.rope import make_inputs as rope_inputs
from kernels.rope import rope_ref
from kernels.silu_mul import silu_mul_ref
from tests.kernels import oracle
from tests.kernels.harness import as_tuple, check_case, distance, dtypes_of, unfenced, whole_storage
from tests.kernels.traps import TRAPS

SPECS = load_specs()


@pytest.mark.parametrize("kernel, trap", [pytest.param(k, t, id=t.__name__) for k, t in TRAPS])
def test_the_reference_avoids_the_trap(kernel: str, trap: Callable) -> None:
    trap(SPECS[kernel].ref, "cpu")


@pytest.mark.parametrize("case", SPEC.cases, ids=lambda c: c.name)
def test_attention_equals_fp64_query_by_query(case) -> None:
    inputs = SPEC.make_inputs("cpu", torch.float32, 1, **case.dims)
    want_out, want_lse = oracle.attention(inputs)
    out, lse = attention_ref(**{**inputs, "return_lse": True})
    assert out.dtype == torch.float32 and distance(out.double(), want_out) < 2e-6
    assert lse.dtype == torch.float32 and distance(lse.double(), want_lse) < 2e-6
    # without lse another path runs
    assert distance(attention_ref(**{**inputs, "return_lse": False}).double(), want_out) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_in_16_bits_is_fp32_attention_rounded_once(dtype: torch.dtype) -> None:
    inputs = make_inputs("cpu", dtype, 0, "1:33 5:40 17:17", 9, 3, 64, lse=False)
    full = {n: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in inputs.items()}
    assert torch.equal(attention_ref(**inputs), attention_ref(**full).to(dtype))


def test_prefill_equals_torch_sdpa_on_the_contiguous_prompt() -> None:
    inputs = make_inputs("cpu", torch.float32, 0, "63:63", 8, 2, 64, lse=False)
    pages = inputs["block_table"][0, :4].long()
    k, v = (inputs[n][pages].reshape(64, 2, 64)[:63].transpose(0, 1) for n in ("k_cache", "v_cache"))
    want = F.scaled_dot_product_attention(inputs["q"].transpose(0, 1), k, v, is_causal=True, enable_gqa=True).transpose(0, 1)
    assert distance(attention_ref(**inputs), want) < 2e-6


def test_the_soft_cap_is_gemma_2s() -> None:
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    inputs = make_inputs("cpu", torch.float32, 0, "40:40", 4, 2, 64, softcap=50.0, q_scale=60.0, lse=False)
    pages = inputs["block_table"][0, :3].long()
    k, v = (inputs[n][pages].reshape(48, 2, 64)[:40].transpose(0, 1)[None] for n in ("k_cache", "v_cache"))
    module = torch.nn.Module()
    module.num_key_value_groups, module.head_dim = 2, 64
    mask = torch.full((40, 40), -torch.inf).triu(1)[None, None]
    want, _ = eager_attention_forward(module, inputs["q"].transpose(0, 1)[None], k, v, mask, scaling=inputs["scale"], softcap=50.0)
    assert distance(attention_ref(**inputs), want[0]) < 1e-5
    assert distance(attention_ref(**{**inputs, "softcap": None}), want[0]) > 1e-2


@pytest.mark.parametrize("window", [4, 5])
def test_a_window_shows_a_query_itself_and_the_window_minus_one_before_it(window: int) -> None:
    inputs = make_inputs("cpu", torch.float32, 0, "1:12", 2, 1, 16, page_size=8, window=window, lse=False)
    before = attention_ref(**inputs)
    changed = []
    for j in range(12):
        v_cache = inputs["v_cache"].clone()
        v_cache[inputs["block_table"][0, j // 8], j % 8] += 1.0
        changed.append(not torch.equal(before, attention_ref(**{**inputs, "v_cache": v_cache})))
    assert changed == [j > 11 - window for j in range(12)]


def test_a_plan_made_once_serves_every_layer_and_both_caches() -> None:
    for dims in ({"sequences": "1:33 5:40 1:500 1:2", "dv": 32}, {"sequences": "1:90 1:30 1:0", "pad_rows": 2, "window": 20}):
        layers = [make_inputs("cpu", torch.float32, seed, hq=4, hk=2, d=64, lse=False, **dims) for seed in range(3)]
        layers = [{**layer, "block_table": layers[0]["block_table"]} for layer in layers]
        for layer in layers[1:]:
            for name in ("k_cache", "v_cache"):  # the values of another layer in the first one's pages
                layer[name].nan_to_num_().add_(1.0)
        first = layers[0]
        plan = plan_host(first["block_table"], first["cu_seqlens_q"], first["seq_lens"], 16, first["q"].shape[0], first["window"])
        for layer in layers:
            assert torch.equal(attention_ref(**layer, host=plan), attention_ref(**layer))


def test_a_plan_for_another_window_is_refused() -> None:
    inputs = make_inputs("cpu", torch.float32, 0, "1:33", 2, 1, 16, window=4)
    plan = plan_host(inputs["block_table"], inputs["cu_seqlens_q"], inputs["seq_lens"], 16, 1)
    with pytest.raises(ValueError, match="host"):
        attention_ref(**inputs, host=plan)


def test_decodes_of_very_different_lengths_are_not_padded_to_the_longest() -> None:
    inputs = make_inputs("cpu", torch.float32, 0, f"1:3 1:{3 * PADDED_KEYS} 1:9 1:20", 2, 1, 16)
    plan = plan_host(inputs["block_table"], inputs["cu_seqlens_q"], inputs["seq_lens"], 16, 4)
    assert sorted((d.n, d.keys) for d in plan.decodes) == [(1, 3 * PADDED_KEYS), (3, 20)]
    _, lse = attention_ref(**inputs)
    assert distance(lse.double(), oracle.attention(inputs)[1]) < 2e-6


def test_caches_whose_pages_are_no_whole_number_of_slots_apart() -> None:
    inputs = make_inputs("cpu", torch.float32, 0, "1:33 5:40", 4, 2, 32)
    want = attention_ref(**inputs)
    for name in ("k_cache", "v_cache"):
        x = inputs[name]
        odd = torch.full((x.shape[0] * 1031,), torch.nan).as_strided(x.shape, (1031, 64, 32, 1))
        inputs[name] = odd.copy_(x)
    got = attention_ref(**inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d", [13, 63, 576, 1000])
def test_rms_norm_equals_llamas(d: int, dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(d, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    norm = norm.to(dtype)
    x = torch.randn(17, d).to(dtype)
    with torch.no_grad():
        want = norm(x)
        got = rms_norm_ref(x, norm.weight, 1e-5)
    assert got.dtype == dtype
    assert distance(got, want) <= (1e-6 if dtype is torch.float32 else 0.0)


@pytest.mark.parametrize("d", [16, 64, 80])
def test_rope_equals_llamas(d: int) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    inputs = rope_inputs("cpu", torch.float32, 0, 17, 9, 3, d)
    cos, sin = (torch.cat([inputs[n][inputs["positions"]]] * 2, -1)[None] for n in ("cos", "sin"))
    want_q, want_k = apply_rotary_pos_emb(inputs["q"].transpose(0, 1)[None], inputs["k"].transpose(0, 1)[None], cos, sin)
    q, k = rope_ref(**inputs)
    assert q is inputs["q"] and k is inputs["k"]
    assert distance(q, want_q[0].transpose(0, 1)) < 1e-6 and distance(k, want_k[0].transpose(0, 1)) < 1e-6


def test_rope_leaves_the_dimensions_behind_the_rotary_ones() -> None:
    inputs = rope_inputs("cpu", torch.float32, 0, 5, 2, 1, 32, r=8)
    before = inputs["q"].clone()
    q, _ = rope_ref(**inputs)
    assert torch.equal(q[..., 8:], before[..., 8:]) and not torch.equal(q[..., :8], before[..., :8])


def test_rope_refuses_a_position_outside_the_tables() -> None:
    inputs = rope_inputs("cpu", torch.float32, 0, 2, 2, 1, 32, rows=8)
    for outside in (-1, 8):
        with pytest.raises(IndexError):
            rope_ref(**{**inputs, "positions": torch.tensor([0, outside])})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_silu_mul_equals_fp64_rounded(dtype: torch.dtype) -> None:
    x = (torch.randn(17, 200) * 8).to(dtype)
    gate, up = x.double().chunk(2, -1)
    assert distance(silu_mul_ref(x), (gate / (1 + torch.exp(-gate)) * up).to(dtype)) < 8e-3 * (dtype is not torch.float32) + 1e-6


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("padding", [0, 1])
def test_kv_write_equals_a_loop(tokens: int, padding: int) -> None:
    inputs = kv_inputs("cpu", torch.float32, tokens, tokens, 3, 20, dv=12, layers=3, padding=padding)
    want_k, want_v = inputs["k_cache"].clone(), inputs["v_cache"].clone()
    for i, slot in enumerate(inputs["slot_mapping"].tolist()):
        if slot >= 0:
            want_k[slot // 16, slot % 16], want_v[slot // 16, slot % 16] = inputs["k"][i], inputs["v"][i]
    kv_write_ref(**inputs)
    assert distance(inputs["k_cache"], want_k) == 0 and distance(inputs["v_cache"], want_v) == 0


@pytest.mark.parametrize("tokens", [1, 17])
def test_kv_write_refuses_a_slot_behind_the_last_page(tokens: int) -> None:
    inputs = kv_inputs("cpu", torch.float32, 0, tokens, 3, 20, pages=4)
    inputs["slot_mapping"][0] = 64
    with pytest.raises(IndexError):
        kv_write_ref(**inputs)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_no_token_at_all_is_fine(spec) -> None:
    where, dims = f"kernels/{spec.name}.py", dict(spec.cases[0].dims)
    assert set(spec.empty_dims) <= set(inspect.signature(spec.make_inputs).parameters), (
        f"{where}: make_inputs does not take SPEC.empty_dims, {dict(spec.empty_dims)}; set it to the dims that leave nothing to compute"
    )
    dims.update(spec.empty_dims)
    ours, theirs, pristine = (spec.make_inputs("cpu", torch.float32, 0, **dims) for _ in range(3))
    try:
        out = as_tuple(spec.fn(**ours))
    except Exception as error:
        pytest.fail(f"{where}: with {dict(spec.empty_dims)} {spec.name} must return before it launches anything, but it raised {error!r}")
    ref = as_tuple(spec.ref(**theirs))
    assert [x.shape for x in out] == [x.shape for x in ref]
    assert all(distance(a, b) == 0 for a, b in zip(out, ref, strict=True))
    for name in spec.outputs:
        for inputs in (ours, theirs):
            assert distance(whole_storage(inputs[name]), whole_storage(pristine[name])) == 0, f"{where}: {name} was written"
    if not spec.outputs:
        assert all(x.numel() == 0 for x in out), f"{where}: SPEC.empty_dims leaves results of the shapes {[list(x.shape) for x in out]}"


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_harness_finds_the_reference_equal_to_itself(spec) -> None:
    same = dataclasses.replace(spec, fn=spec.ref)
    for case in spec.cases:
        for dtype in dtypes_of(case):
            assert check_case(same, case, dtype, "cpu").problems == ()


def test_the_harness_names_an_input_without_a_fence() -> None:
    spec = SPECS["rms_norm"]

    def bare(*args, **dims) -> dict:
        inputs = spec.make_inputs(*args, **dims)
        return {**inputs, "weight": inputs["weight"].clone()}

    careless = dataclasses.replace(spec, fn=spec.ref, make_inputs=bare)
    problems = check_case(careless, spec.cases[0], torch.float32, "cpu").problems
    assert len(problems) == 1 and "rms_norm" in problems[0] and "weight" in problems[0] and "fenced" in problems[0]
    assert unfenced(torch.zeros(4)) and not unfenced(torch.arange(4))
