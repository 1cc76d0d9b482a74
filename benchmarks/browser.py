"""The app in a process of its own and Chromium in front of it, for benchmarks and tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--js-flags=--expose-gc",
)  # fmt: skip


def chromium() -> str | None:
    """Path of an installed Chromium; GLASS_CHROMIUM overrides."""
    return os.environ.get("GLASS_CHROMIUM") or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def app(args: Sequence[str] = (), port: int | None = None, env: dict[str, str] | None = None) -> Iterator[str]:
    """`python app.py …`; yields its address once it answers, ends it afterwards."""
    port = port or free_port()
    process = subprocess.Popen(
        [sys.executable, "app.py", "--port", str(port), *args], cwd=ROOT, env={**os.environ, **(env or {})}, start_new_session=True
    )
    try:
        address = f"http://localhost:{port}/"
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(address, timeout=2).read()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the app did not start") from None
                time.sleep(0.3)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


@contextlib.contextmanager
def page(address: str, width: int = 1280, height: int = 720, **options: object) -> Iterator[object]:
    """A Playwright page that has connected."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        try:
            opened = browser.new_page(viewport={"width": width, "height": height}, **options)
            opened.goto(address)
            opened.wait_for_function("window.glass && window.glass.stats.frames > 0", timeout=60_000)
            yield opened
        finally:
            browser.close()


def wait_live(opened, timeout_s: float = 180) -> None:
    """Until the model is loaded, whatever the page shows meanwhile."""
    state = "(s => s && (s.engine || s).state)(window.glass.stage.status)"
    opened.wait_for_function(f"['idle', 'running', 'paused'].includes({state})", timeout=timeout_s * 1000)


def say(opened, name: str, /, **args: object) -> dict:
    """A command of the page; its reply."""
    return opened.evaluate("([name, args]) => window.glass.send(name, args)", [name, args])
