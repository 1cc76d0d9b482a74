"""Every kernel against its reference in Triton's interpreter, on a CPU. One child process runs them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.registry import load_specs
from tests.kernels.harness import dtypes_of
from tests.kernels.traps import TRAPS

ROOT = Path(__file__).parents[2]
NAMES = [
    f"{spec.name}-{case.name}-{str(dtype).removeprefix('torch.')}"
    for spec in load_specs().values()
    if not spec.compiled_only
    for case in spec.cases
    for dtype in dtypes_of(case, (torch.float32, torch.float16))
]


@pytest.fixture(scope="session")
def interpreted() -> tuple[dict[str, dict], str]:
    """name -> result, and what to say about a name that is missing."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    lines = [json.loads(line[7:]) for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    last = lines[-1]["name"] if lines else "nothing"
    missing = f"no result: the child ended with {child.returncode} after {last}\n{child.stderr[-2000:]}"
    return {line["name"]: line for line in lines}, missing


@pytest.mark.parametrize("name", ["poison", *NAMES, *(trap.__name__ for _, trap in TRAPS)])
def test_the_interpreted_kernel_is_right(interpreted: tuple[dict[str, dict], str], name: str) -> None:
    results, missing = interpreted
    assert name in results, missing
    assert not results[name]["problems"], "\n".join(results[name]["problems"])
