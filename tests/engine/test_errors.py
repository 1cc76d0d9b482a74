"""A bug keeps its traceback, a refusal needs none."""

from __future__ import annotations

import sys

from engine.errors import EngineError, tell


def test_a_bugs_traceback_is_told_and_a_refusal_is_silent(capsys):
    try:
        [][1]
    except IndexError as error:
        tell(error)
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and "[][1]" in said and said.rstrip().endswith("IndexError: list index out of range")
    tell(EngineError("no_room", "There is no room."))
    tell("")
    assert capsys.readouterr().err == ""
    tell("what another process said")
    assert capsys.readouterr().err == "what another process said\n"


def test_where_nobody_reads_stderr_nothing_breaks(monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError

    for stderr in (Closed(), None):
        monkeypatch.setattr(sys, "stderr", stderr)
        tell(ValueError("unheard"))
