"""Errors that cross the engine's border: a code, its numbers, and one English sentence.

The page translates by `code` and `fields` (viz/words); the command line prints `str(error)`.
An EngineError is a refusal or a fault that a person can understand. Anything else that is raised inside
the engine is a bug: it becomes a sentence where it must not end everybody's requests, and its traceback is told.
"""

from __future__ import annotations

import contextlib
import sys
import traceback


class EngineError(Exception):
    """A refusal or fault with a stable code.

    Args:
        code: stable snake_case name, the key into the word catalogues.
        sentence: plain English, complete, without a traceback's jargon.
        fields: the numbers and names in the sentence; plain data only (they cross processes).
    """

    def __init__(self, code: str, sentence: str, **fields: object) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence
        self.fields = fields

    def __reduce__(self):
        return (_rebuild, (self.code, self.sentence, self.fields))


def reason_of(error: BaseException) -> str:
    """What an unforeseen fault says of itself, to stand inside a sentence: its first line, without its class."""
    return str(error).strip().partition("\n")[0][:300].rstrip(" .:") or "a fault in the program"


def tell(error: BaseException | str) -> None:
    """A bug's traceback (or what another process made of it) goes to stderr; a refusal has said all in its sentence."""
    if isinstance(error, EngineError) or not error:
        return
    with contextlib.suppress(Exception):  # nobody may be reading stderr any more
        print(error if isinstance(error, str) else "".join(traceback.format_exception(error)), file=sys.stderr, flush=True)


def _rebuild(code: str, sentence: str, fields: dict) -> EngineError:
    return EngineError(code, sentence, **fields)
