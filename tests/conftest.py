"""Shared fixtures. In CI a skipped test is a failure, unless it needs a GPU."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads that wait for each other on busy cores are ten times slower
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

_skipped: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and "gpu" not in report.keywords:
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if os.environ.get("CI") and _skipped and exitstatus == 0:
        print("\nskipped in CI, which counts as failed:", *_skipped, sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def smollm2():
    """The default model's folder, fetched and converted once into the cache folder."""
    from engine.errors import EngineError
    from engine.models.default import default_model

    try:
        return default_model()
    except EngineError as error:
        pytest.skip(f"the default model cannot be had here: {error}")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """A random Llama checkpoint with a byte-level tokenizer: loads in a moment, and its text depends on the prompt."""
    return make_tiny(tmp_path_factory.mktemp("tiny-llama"))


def make_tiny(folder):
    from tests.engine.model_harness import save_hf
    from tests.engine.test_models import llama_config, make_hf
    from tests.engine.toy_tokenizers import byte_level, save_folder

    tokenizer = byte_level()
    config = llama_config(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=1024, eos_token_id=258)
    save_hf(make_hf(config), folder)
    save_folder(folder, tokenizer)
    return folder
