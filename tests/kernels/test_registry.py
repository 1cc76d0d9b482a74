"""What every SPEC promises, and what the registry does with a file that promises nothing."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch

from kernels.registry import load_specs
from kernels.spec import KernelSpec

SPECS = load_specs()


def test_the_registry_finds_every_kernel_file() -> None:
    assert {"rms_norm", "rope", "silu_mul", "kv_write", "flash_prefill"} <= set(SPECS)


@pytest.mark.parametrize("source, said", [("x = 1\n", "declares no SPEC"), ("SPEC = 'flash_prefill'\n", "declares no SPEC")])
def test_a_file_without_a_spec_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str) -> None:
    folder = tmp_path / "other_kernels"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "forgotten.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "other_kernels.forgotten", raising=False)
    with pytest.raises(LookupError, match=rf"forgotten\.py {said}"):
        load_specs("other_kernels", [str(folder)])


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_kernel_and_reference_have_one_signature(spec: KernelSpec) -> None:
    """A kernel may take more: what it writes down, which rows are another kernel's."""
    own, wanted = (list(inspect.signature(f).parameters.values()) for f in (spec.fn, spec.ref))
    assert own[: len(wanted)] == wanted
    assert all(p.default is not inspect.Parameter.empty for p in own[len(wanted) :])


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_spec_is_complete(spec: KernelSpec) -> None:
    names = [case.name for case in (*spec.cases, *spec.bench_cases)]
    assert len(set(names)) == len(names) and spec.cases and spec.bench_cases
    assert {torch.float32, torch.float16, torch.bfloat16} <= set(spec.tolerance)
    parameters = inspect.signature(spec.fn).parameters
    assert set(spec.outputs) <= set(parameters)
    for case in spec.cases:
        inputs = spec.make_inputs("cpu", torch.float32, 0, **case.dims)
        assert set(inputs) <= set(parameters)
        assert type(spec.flops(inputs)) is int and type(spec.bytes(inputs)) is int
        assert spec.flops(inputs) >= 0 and spec.bytes(inputs) > 0
        again = spec.make_inputs("cpu", torch.float32, 0, **case.dims)
        for name, x in inputs.items():
            if isinstance(x, torch.Tensor):
                assert torch.equal(x.nan_to_num(), again[name].nan_to_num()), f"{name} differs between two calls of one seed"


def test_attention_counts_the_pairs_that_are_seen() -> None:
    spec = SPECS["flash_prefill"]
    # 3 queries at positions 2, 3, 4 see 3 + 4 + 5 keys; with a window of 2 each sees 2
    for window, pairs, keys in ((0, 12, 5), (2, 6, 4)):
        inputs = spec.make_inputs("cpu", torch.float32, 0, "3:5", 4, 2, 16, dv=32, window=window, lse=False)
        assert spec.flops(inputs) == 2 * pairs * 4 * (16 + 32)
        assert spec.bytes(inputs) == 4 * (3 * 4 * 48 + keys * 2 * 48)
    blind = spec.make_inputs("cpu", torch.float32, 0, "5:3 2:0", 4, 2, 16)
    assert spec.flops(blind) == 2 * (1 + 2 + 3) * 4 * 32
