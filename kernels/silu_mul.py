"""SwiGLU's gate: silu of the first half of each row times its second half.

    out[t, i] = silu(x[t, i]) * x[t, n + i],    silu(g) = g / (1 + exp(-g)),    x [t, 2n]

Computed in fp32 and rounded once. Gate first, as in a fused gate_up projection. Does not know the matmuls around it.

Rejected: two inputs in place of the fused one (the projection writes one tensor), and rounding silu(g) to x's type
before the product as the eager code does (a second rounding for nothing).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.common import check_tensor, fenced, make_generator, power_of_two
from kernels.spec import Bad, Case, KernelSpec


def silu_mul_ref(x: torch.Tensor) -> torch.Tensor:
    """x [t, 2n], gate first -> [t, n]."""
    gate, up = x.float().chunk(2, dim=-1)
    return F.silu(gate).mul_(up).to(x.dtype)


@triton.jit
def _silu_mul_kernel(x, out, stride_t, N: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    mask = col < N
    gate = tl.load(x + row * stride_t + col, mask=mask, other=0.0)
    up = tl.load(x + row * stride_t + N + col, mask=mask, other=0.0)
    g = gate.to(tl.float32)
    y = g / (1.0 + tl.exp(-g)) * up.to(tl.float32)  # exp(-g) = inf gives -0, silu's limit
    tl.store(out + row * N + col, y.to(gate.dtype), mask=mask)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """x [t, 2n], gate first -> [t, n], contiguous. See the module's formula."""
    check_tensor("x", x, (None, None))
    if x.shape[1] % 2:
        raise ValueError(f"x has {x.shape[1]} columns, must be an even number: gate, then up")
    t, n = x.shape[0], x.shape[1] // 2
    out = torch.empty((t, n), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block_n = min(4096, power_of_two(n))  # at most two 16-byte loads of each half a thread
    _silu_mul_kernel[(t, triton.cdiv(n, block_n))](x, out, x.stride(0), N=n, BLOCK_N=block_n, num_warps=8 if block_n > 1024 else 4)
    return out


def make_inputs(device: str, dtype: torch.dtype, seed: int, tokens: int, n: int, pad: int = 0, scale: float = 1.0) -> dict:
    return {"x": fenced(make_generator(device, seed), (tokens, 2 * n), dtype, row_pad=pad, scale=scale)}


def silu_mul_loop(x: torch.Tensor) -> Generator[None, None, torch.Tensor]:
    """silu_mul_ref, a row an iteration."""
    t, n = x.shape[0], x.shape[1] // 2
    out = torch.empty((t, n), dtype=x.dtype, device=x.device)
    for i in range(t):
        gate, up = x[i, :n].float(), x[i, n:].float()
        out[i] = F.silu(gate) * up
        yield
    return out


def _flops(inputs: Mapping) -> int:
    return 5 * inputs["x"].numel() // 2


def _bytes(inputs: Mapping) -> int:
    x = inputs["x"]
    return x.numel() * x.element_size() * 3 // 2


SPEC = KernelSpec(
    name="silu_mul",
    formula="out = silu(x[:, :n]) * x[:, n:]",
    fn=silu_mul,
    ref=silu_mul_ref,
    make_inputs=make_inputs,
    outputs=(),
    cases=(
        Case("n63", {"tokens": 3, "n": 63}),
        Case("n100_strided", {"tokens": 17, "n": 100, "pad": 9}),
        Case("n1000", {"tokens": 1, "n": 1000}),
        Case("n1", {"tokens": 3, "n": 1}),
        Case("n1536", {"tokens": 3, "n": 1536}),
        Case("saturated", {"tokens": 3, "n": 63, "scale": 60.0}),
    ),
    bench_cases=(
        Case("t8192_n14336", {"tokens": 8192, "n": 14336}),
        Case("t64_n1536", {"tokens": 64, "n": 1536}),
    ),
    flops=_flops,
    bytes=_bytes,
    bad=(Bad("x", lambda x: x[:, :-1]), Bad("x", lambda x: x[0]), Bad("x", lambda x: torch.zeros(3, 252)[:, ::2])),
    tolerance={torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3},
    loop=silu_mul_loop,
    loop_iterations=lambda inputs: inputs["x"].shape[0],
)
