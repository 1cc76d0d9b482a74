"""The first half of a gated MLP for the few rows of a decode step: RMSNorm, gate and up projections, SiLU, product.

    y = rms_norm(x, norm, eps),    out[:, i] = silu(y gate[i]) * (y up[i]),    gate, up = weight[:n], weight[n:]

One kernel in place of three; gate and up never reach memory. The norm rounds as kernels/rms_norm.py does; gate and up are
rounded to the tensors' type before SiLU, as the unfused kernels do. Each program normalises all rows again: x is small.
See kernels/gemv.py for how the weight is read.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.common import check_devices, check_tensor, fenced, make_generator
from kernels.gemv import add_product, check_rows, inverse_rms, let_next_begin, load_rows, load_weight, shape_of, wait_for_inputs
from kernels.rms_norm import rms_norm_ref
from kernels.spec import Bad, Case, KernelSpec


def decode_gate_up_ref(
    x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """x [b, k], norm [k], weight [2n, k], gate first, bias [2n] or None -> [b, n]. pdl: no meaning here."""
    y = rms_norm_ref(x, norm, eps).float()
    gate, up = F.linear(y, weight.float(), None if bias is None else bias.float()).to(x.dtype).float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


@triton.jit(do_not_specialize=["rows", "eps"])
def _decode_gate_up_kernel(
    x, norm, weight, bias, out, rows, eps, stride_x, stride_w, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_B)
    col_mask, row_mask = col < N, row < rows
    gate_w = load_weight(weight, col, col_mask, 0, stride_w, K, BLOCK_K)
    up_w = load_weight(weight, col + N, col_mask, 0, stride_w, K, BLOCK_K)
    wait_for_inputs(PDL)
    scale = inverse_rms(x, row, row_mask, stride_x, eps, K, BLOCK_K, BLOCK_B)
    v = load_rows(x, norm, row, row_mask, scale, 0, stride_x, K, BLOCK_K, True)
    gate = add_product(tl.zeros([BLOCK_N, BLOCK_B], tl.float32), gate_w, v, BLOCK_B)
    up = add_product(tl.zeros([BLOCK_N, BLOCK_B], tl.float32), up_w, v, BLOCK_B)
    for start in range(BLOCK_K, K, BLOCK_K):
        v = load_rows(x, norm, row, row_mask, scale, start, stride_x, K, BLOCK_K, True)
        gate = add_product(gate, load_weight(weight, col, col_mask, start, stride_w, K, BLOCK_K), v, BLOCK_B)
        up = add_product(up, load_weight(weight, col + N, col_mask, start, stride_w, K, BLOCK_K), v, BLOCK_B)
    let_next_begin(PDL)
    if BIAS:
        gate += tl.load(bias + col, mask=col_mask, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + N + col, mask=col_mask, other=0.0).to(tl.float32)[:, None]
    g = gate.to(v.dtype).to(tl.float32)
    y = g / (1.0 + tl.exp(-g)) * up.to(v.dtype).to(tl.float32)
    at = out + row.to(tl.int64)[None, :] * N + col[:, None]
    tl.store(at, y.to(v.dtype), mask=col_mask[:, None] & row_mask[None, :])


def decode_gate_up(
    x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """x [b, k], norm [k], weight [2n, k], gate first, bias [2n] or None -> [b, n]; b at most MAX_ROWS. pdl: the kernel
    before it on the stream lets its successor begin early, and so does this one."""
    check_tensor("x", x, (None, None))
    check_rows("x", x)
    b, k = x.shape
    check_tensor("norm", norm, (k,), (x.dtype,))
    check_tensor("weight", weight, (None, k), (x.dtype,))
    n = weight.shape[0] // 2
    if weight.shape[0] % 2:
        raise ValueError(f"weight has {weight.shape[0]} rows, must be an even number: gate, then up")
    if not eps >= 0:
        raise ValueError(f"eps is {eps}, must be >= 0")
    if bias is not None:
        check_tensor("bias", bias, (2 * n,), (x.dtype,))
    check_devices(x=x, norm=norm, weight=weight, **({} if bias is None else {"bias": bias}))
    out = torch.empty((b, n), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block_b, block_k = shape_of(b, k, x.element_size() == 2)
    block_n = 8 if block_b == 1 else 16
    _decode_gate_up_kernel[(triton.cdiv(n, block_n),)](
        x, norm, weight, bias, out, b, float(eps), x.stride(0), weight.stride(0), N=n, K=k, BIAS=bias is not None,
        BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_B=block_b, PDL=pdl, num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


def decode_gate_up_loop(
    x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None, pdl: bool = False
) -> Generator[None, None, torch.Tensor]:
    """decode_gate_up_ref, one output column an iteration."""
    n, columns = weight.shape[0] // 2, []
    for i in range(n):
        two = [i, n + i]
        columns.append(decode_gate_up_ref(x, norm, weight[two], eps, None if bias is None else bias[two]))
        yield
    return torch.cat(columns, dim=1)


def make_inputs(device: str, dtype: torch.dtype, seed: int, tokens: int, k: int, n: int, bias: bool = False) -> dict:
    g = make_generator(device, seed)
    return {
        "x": fenced(g, (tokens, k), dtype, row_pad=5), "norm": fenced(g, (k,), dtype), "weight": fenced(g, (2 * n, k), dtype, scale=k**-0.5),
        "eps": 1e-5, "bias": fenced(g, (2 * n,), dtype) if bias else None,
    }  # fmt: skip


def _flops(inputs: Mapping) -> int:
    x, weight = inputs["x"], inputs["weight"]
    return 2 * x.shape[0] * weight.numel() + 4 * x.numel() + 5 * x.shape[0] * weight.shape[0] // 2


def _bytes(inputs: Mapping) -> int:
    x, weight = inputs["x"], inputs["weight"]
    return (x.numel() + weight.numel() + weight.shape[1] + x.shape[0] * weight.shape[0] // 2) * x.element_size()


SPEC = KernelSpec(
    name="decode_gate_up",
    formula="out = silu(y gate^T) * (y up^T), y = rms_norm(x, norm, eps)",
    fn=decode_gate_up,
    ref=decode_gate_up_ref,
    make_inputs=make_inputs,
    outputs=(),
    cases=(
        Case("b1_576_1536", {"tokens": 1, "k": 576, "n": 1536}),
        Case("b3_100_63", {"tokens": 3, "k": 100, "n": 63}),
        Case("b1_k1100_n33", {"tokens": 1, "k": 1100, "n": 33}),
        Case("b17_bias", {"tokens": 17, "k": 63, "n": 20, "bias": True}),
        Case("b64_k13", {"tokens": 64, "k": 13, "n": 5}),
    ),
    bench_cases=(
        Case("bench_b1_576_1536", {"tokens": 1, "k": 576, "n": 1536}),
        Case("b32_576_1536", {"tokens": 32, "k": 576, "n": 1536}),
        Case("b1_1024_3072", {"tokens": 1, "k": 1024, "n": 3072}),
    ),
    flops=_flops,
    bytes=_bytes,
    bad=(
        Bad("x", lambda x: x[0]),
        Bad("x", lambda x: torch.zeros(65, x.shape[1])),
        Bad("norm", lambda w: w[:-1]),
        Bad("weight", lambda w: w[:, :-1]),
        Bad("weight", lambda w: w[:-1]),
        Bad("weight", lambda w: w.half()),
        Bad("eps", lambda eps: -1.0),
    ),
    loop=decode_gate_up_loop,
    loop_iterations=lambda inputs: inputs["weight"].shape[0] // 2,
    tolerance={torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2},
)
