"""What the app takes from a Hugging Face Space: its address, its proxy, that strangers come."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from starlette.requests import HTTPConnection

from benchmarks.browser import ROOT
from viz.stage.routes import same_host

SPACE = {"SPACE_ID": "owner/glass", "SPACE_HOST": "owner-glass.hf.space", "SYSTEM": "spaces"}
CODE = "import json, app; print(json.dumps(vars(app.parser().parse_args({args}))))"


def defaults(env: dict[str, str], *args: str) -> dict:
    clean = {k: v for k, v in os.environ.items() if k not in ("SPACE_ID", "GRADIO_SERVER_NAME", "GRADIO_SERVER_PORT", "SPACES_ZERO_GPU")}
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(args=list(args))], cwd=ROOT, env={**clean, **env}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_space_binds_every_address_and_is_public_behind_one_proxy():
    found = defaults(SPACE)
    assert (found["host"], found["port"], found["public"], found["proxies"]) == ("0.0.0.0", 7860, True, 1)
    found = defaults({**SPACE, "GRADIO_SERVER_NAME": "0.0.0.0", "GRADIO_SERVER_PORT": "8123"}, "--no-public")
    assert (found["host"], found["port"], found["public"]) == ("0.0.0.0", 8123, False)


def test_a_laptop_binds_itself_alone_and_has_one_room():
    found = defaults({})
    assert (found["host"], found["port"], found["public"], found["proxies"]) == ("127.0.0.1", 7860, False, 0)


@pytest.mark.parametrize(
    ("origin", "headers", "space", "ok"),
    [
        ("https://owner-glass.hf.space", {"host": "10.0.0.7:7860"}, SPACE["SPACE_HOST"], True),
        ("https://owner-glass.hf.space", {"host": "10.0.0.7:7860", "x-forwarded-host": "owner-glass.hf.space"}, "", True),
        ("https://owner-glass.hf.space", {"host": "owner-glass.hf.space"}, "", True),
        ("https://evil.example", {"host": "owner-glass.hf.space"}, SPACE["SPACE_HOST"], False),
        ("https://owner-glass.hf.space", {"host": "localhost:7860"}, "", False),
        ("null", {"host": "owner-glass.hf.space"}, SPACE["SPACE_HOST"], False),
        ("https://", {"host": "owner-glass.hf.space"}, "", False),
    ],
)
def test_only_the_spaces_own_page_may_drive_it(monkeypatch, origin, headers, space, ok):
    monkeypatch.setenv("SPACE_HOST", space)
    raw = [(k.encode(), v.encode()) for k, v in {**headers, "origin": origin}.items()]
    assert same_host(HTTPConnection({"type": "http", "headers": raw, "path": "/glass/poll"})) is ok
