"""How the stage says no: a refusal with a code and a sentence, and any exception as the page gets it."""

from __future__ import annotations

from collections.abc import Mapping


class Refused(Exception):
    """A refusal with a code, its numbers and a sentence for the page."""

    def __init__(self, code: str, sentence: str, **fields: object) -> None:
        super().__init__(sentence)
        self.code, self.sentence, self.fields = code, sentence, fields


def failure_of(error: Exception) -> dict[str, object]:
    """An exception as the page gets it. EngineError and Refused bring their own words."""
    sentence = getattr(error, "sentence", None)
    if isinstance(sentence, str):
        return failure(str(getattr(error, "code", "error")), sentence, getattr(error, "fields", None))
    return failure("bug", f"Something went wrong in the server: {type(error).__name__}: {error}"[:400])


def failure(code: str, sentence: str, fields: Mapping[str, object] | None = None) -> dict[str, object]:
    return {"ok": False, "code": code, "sentence": sentence, **({"fields": dict(fields)} if fields else {})}


GONE = failure("gone", "This page was away too long.")
