"""A bad argument raises ValueError that names it, before anything is launched."""

from __future__ import annotations

import pytest
import torch

from kernels.registry import load_specs

SPECS = load_specs()
SMALL = {
    "rms_norm": {"tokens": 3, "d": 64},
    "silu_mul": {"tokens": 3, "n": 64},
    "rope": {"tokens": 3, "hq": 4, "hk": 2, "d": 32},
    "kv_write": {"tokens": 3, "hk": 2, "d": 32},
    "paged_attention": {"sequences": "1:9 2:5", "hq": 4, "hk": 2, "d": 32},
}
BAD = [
    ("rms_norm", "x", lambda x: x.long()),
    ("rms_norm", "x", lambda x: x.double()),
    ("rms_norm", "x", lambda x: x.t().contiguous().t()),
    ("rms_norm", "x", lambda x: torch.zeros(2, 9, 3, 7, 64)[:, ::2, :2, ::3]),
    ("rms_norm", "x", lambda x: torch.zeros(())),
    ("rms_norm", "x", lambda x: x.tolist()),
    ("rms_norm", "weight", lambda w: w[:-1]),
    ("rms_norm", "weight", lambda w: torch.zeros(128)[::2]),
    ("rms_norm", "weight", lambda w: w.to("meta")),
    ("rms_norm", "eps", lambda e: -1e-5),
    ("rms_norm", "eps", lambda e: float("nan")),
    ("silu_mul", "x", lambda x: x[:, :-1]),
    ("silu_mul", "x", lambda x: x[0]),
    ("silu_mul", "x", lambda x: x.int()),
    ("silu_mul", "x", lambda x: torch.zeros(3, 256)[:, ::2]),
    ("rope", "q", lambda q: q[0]),
    ("rope", "q", lambda q: q[:1].expand(3, -1, -1)),
    ("rope", "k", lambda k: k[:-1]),
    ("rope", "k", lambda k: k.half()),
    ("rope", "k", lambda k: k[..., :-1]),
    ("rope", "cos", lambda c: c.half()),
    ("rope", "cos", lambda c: torch.zeros(64, 17)),
    ("rope", "sin", lambda s: s[:, :-1]),
    ("rope", "sin", lambda s: s[:-1]),
    ("rope", "positions", lambda p: p.int()),
    ("rope", "positions", lambda p: p[:-1]),
    ("rope", "positions", lambda p: p.to("meta")),
    ("kv_write", "k", lambda k: k[0]),
    ("kv_write", "v", lambda v: v[:-1]),
    ("kv_write", "v", lambda v: v.half()),
    ("kv_write", "k_cache", lambda c: c[:, :, :1]),
    ("kv_write", "k_cache", lambda c: c.half()),
    ("kv_write", "k_cache", lambda c: c[:1].expand(8, -1, -1, -1)),
    ("kv_write", "v_cache", lambda c: c[:-1]),
    ("kv_write", "v_cache", lambda c: c[..., ::2]),
    ("kv_write", "slot_mapping", lambda s: s.int()),
    ("kv_write", "slot_mapping", lambda s: s[:-1]),
    ("kv_write", "slot_mapping", lambda s: s.to("meta")),
    ("paged_attention", "q", lambda q: q[:, :3]),
    ("paged_attention", "q", lambda q: q.transpose(1, 2).contiguous().transpose(1, 2)),
    ("paged_attention", "q", lambda q: q.double()),
    ("paged_attention", "k_cache", lambda c: c[..., :-1]),
    ("paged_attention", "k_cache", lambda c: c.half()),
    ("paged_attention", "v_cache", lambda c: c[:-1]),
    ("paged_attention", "v_cache", lambda c: c[:, :, :1]),
    ("paged_attention", "block_table", lambda b: b.long()),
    ("paged_attention", "block_table", lambda b: b[:-1]),
    ("paged_attention", "cu_seqlens_q", lambda c: c[:-1]),
    ("paged_attention", "cu_seqlens_q", lambda c: c.long()),
    ("paged_attention", "seq_lens", lambda s: s.float()),
    ("paged_attention", "seq_lens", lambda s: s.to("meta")),
    ("paged_attention", "scale", lambda s: 0.0),
    ("paged_attention", "scale", lambda s: float("inf")),
    ("paged_attention", "softcap", lambda s: -50.0),
    ("paged_attention", "softcap", lambda s: 0.0),
    ("paged_attention", "window", lambda w: 0),
    ("paged_attention", "max_query_len", lambda m: 0),
]


@pytest.mark.parametrize("kernel, argument, spoil", BAD, ids=[f"{k}-{a}-{i}" for i, (k, a, _) in enumerate(BAD)])
def test_a_bad_argument_is_named(kernel: str, argument: str, spoil) -> None:
    inputs = SPECS[kernel].make_inputs("cpu", torch.float32, 0, **SMALL[kernel])
    inputs[argument] = spoil(inputs[argument])
    with pytest.raises(ValueError, match=rf"^{argument}\b"):
        SPECS[kernel].fn(**inputs)


@pytest.mark.parametrize("page_size", [4, 24, 256])
def test_a_page_size_that_is_no_power_of_two_from_8_to_128_is_refused(page_size: int) -> None:
    spec = SPECS["paged_attention"]
    inputs = spec.make_inputs("cpu", torch.float32, 0, "1:9", 4, 2, 32, page_size=page_size)
    with pytest.raises(ValueError, match=r"^k_cache has page size"):
        spec.fn(**inputs)
