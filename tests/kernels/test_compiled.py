"""Every kernel, compiled, against its reference on a GPU; and the traps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.registry import load_specs
from kernels.spec import Case, KernelSpec
from tests.kernels.harness import check_case, dtypes_of
from tests.kernels.traps import TRAPS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
SPECS = load_specs()
CASES = [
    pytest.param(spec, case, dtype, id=f"{spec.name}-{case.name}-{str(dtype).removeprefix('torch.')}")
    for spec in SPECS.values()
    for case in spec.cases
    for dtype in dtypes_of(case)
]


@pytest.mark.parametrize("spec, case, dtype", CASES)
def test_the_compiled_kernel_is_right(spec: KernelSpec, case: Case, dtype: torch.dtype) -> None:
    verdict = check_case(spec, case, dtype, "cuda")
    assert not verdict.problems, "\n".join(verdict.problems)


@pytest.mark.parametrize("kernel, trap", [pytest.param(k, t, id=t.__name__) for k, t in TRAPS])
def test_the_compiled_kernel_avoids_the_trap(kernel: str, trap: Callable) -> None:
    trap(SPECS[kernel].fn, "cuda")


def test_a_captured_decode_step_is_right_when_the_sequences_grow() -> None:
    spec = SPECS["flash_prefill"]
    inputs = spec.make_inputs("cuda", torch.bfloat16, 0, "1:300 1:17 1:90", 9, 3, 64, lse=False)
    final = inputs["seq_lens"].clone()
    inputs["seq_lens"].fill_(16)
    spec.fn(**inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = spec.fn(**inputs)
    inputs["seq_lens"].copy_(final)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, spec.fn(**inputs))
