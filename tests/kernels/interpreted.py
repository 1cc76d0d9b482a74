"""Child process: every kernel in Triton's interpreter, one JSON line a result. `python -m tests.kernels.interpreted`
with TRITON_INTERPRET=1 in the environment; setting it later does not work.

The interpreter returns 0 for masked loads without `other`, where a GPU returns anything. Here it returns NaN (or a
large integer), so that a forgotten fill value shows on a CPU too.
"""

from __future__ import annotations

import json
import os
import traceback

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from kernels.registry import load_specs
from tests.kernels.harness import check_case, dtypes_of
from tests.kernels.traps import TRAPS


def poison_masked_loads() -> None:
    builder = interpreter.InterpreterBuilder
    original = builder.create_masked_load

    def create_masked_load(self, ptrs, mask, other, *rest):
        if other is None:
            element = ptrs.get_element_ty()
            kind = interpreter._get_np_dtype(element)
            garbage = np.nan if np.issubdtype(kind, np.floating) else np.iinfo(kind).max
            other = interpreter.TensorHandle(np.full(ptrs.data.shape, garbage, dtype=kind), element)
        return original(self, ptrs, mask, other, *rest)

    builder.create_masked_load = create_masked_load


@triton.jit
def _careless_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, 4)
    tl.store(out + i, tl.load(x + i, mask=i < N))


def say(name: str, problems: list[str], **more: float) -> None:
    print("RESULT " + json.dumps({"name": name, "problems": problems, **more}), flush=True)


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    poison_masked_loads()
    out = torch.zeros(4)
    _careless_kernel[(1,)](torch.ones(4), out, N=3)
    say("poison", [] if out.isnan().tolist() == [False, False, False, True] else [f"masked load gave {out.tolist()}"])
    specs = load_specs()
    for spec in specs.values():
        if spec.compiled_only:
            continue
        for case in spec.cases:
            for dtype in dtypes_of(case, (torch.float32, torch.float16)):
                name = f"{spec.name}-{case.name}-{str(dtype).removeprefix('torch.')}"
                try:
                    verdict = check_case(spec, case, dtype, "cpu")
                    say(name, list(verdict.problems), error=verdict.error if verdict.error < float("inf") else 1e30)
                except Exception:
                    say(name, [traceback.format_exc(limit=-3)])
    for kernel, trap in TRAPS:
        try:
            trap(specs[kernel].fn, "cpu")
            say(trap.__name__, [])
        except Exception:
            say(trap.__name__, [traceback.format_exc(limit=-3)])


if __name__ == "__main__":
    main()
