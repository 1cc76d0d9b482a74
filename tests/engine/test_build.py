"""What the engine does about the machine that it finds."""

from __future__ import annotations

import pytest

from engine.audience import LiveSource
from engine.build import with_compiler
from engine.config import EngineConfig, ModelSource
from engine.errors import EngineError
from engine.session import Session


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def test_without_a_c_compiler_a_gpu_runs_the_torch_references(no_compiler):
    gpu = ModelSource(device="cuda", dtype="bfloat16")
    assert with_compiler(gpu).backend == "torch"
    with pytest.raises(EngineError, match="C compiler") as refused:
        with_compiler(ModelSource(device="cuda", backend="triton"))
    assert refused.value.code == "no_compiler"
    cpu = ModelSource(device="cpu")
    assert with_compiler(cpu) is cpu


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_a_compiler_that_triton_finds_is_used(no_compiler, name):
    tool = no_compiler / name
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    gpu = ModelSource(device="cuda")
    assert with_compiler(gpu) is gpu


def test_the_page_says_why_there_is_no_triton_and_that_a_gpu_is_lent():
    source, model = LiveSource(Session(EngineConfig())), {"weights": "hub", "precision": "bfloat16"}
    ran = {"model": model, "dtype": "bfloat16", "backend": "torch"}
    assert source._badge(ran) == "weights from hub, bfloat16, running in bfloat16 on torch kernels"
    assert (
        source._badge({**ran, "no_compiler": True})
        == "weights from hub, bfloat16, running in bfloat16 on torch kernels; Triton lacks a C compiler"
    )
    assert source._badge({"model": model}) == "weights from hub, bfloat16; a GPU is lent for each burst"
