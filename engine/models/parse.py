"""Reading values out of a config.json: types checked, what is not supported refused by name.

A checkpoint's config is a stranger's file: a wrong type, a missing number or an option that this engine does
not compute ends in a sentence, never in a traceback or in fluent nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import EngineError

_REQUIRED = object()


def refuse(what: str) -> EngineError:
    """What the checkpoint asks for and this engine does not do."""
    return EngineError("unsupported_model", f"This model needs {what}, which is not supported.", what=what)


def broken(sentence: str) -> EngineError:
    """What is wrong with config.json."""
    return EngineError("bad_checkpoint", f"config.json is not usable: {sentence}.", file="config.json", reason=sentence)


def whole(config: Mapping, key: str, default: object = _REQUIRED, low: int = 1) -> int:
    """A whole number of at least `low`. Null counts as missing."""
    value = config.get(key)
    if value is None:
        if default is _REQUIRED:
            raise broken(f"{key} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise broken(f"{key} must be a whole number of at least {low}, got {str(value)[:40]}")
    return value


def real(config: Mapping, key: str, default: float) -> float:
    """A positive number."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise broken(f"{key} must be a positive number, got {str(value)[:40]}")
    return float(value)


def token_ids(value: object, key: str = "eos_token_id") -> frozenset[int]:
    """A token id, a list of them, or null."""
    listed = [] if value is None else list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
        raise broken(f"{key} must be a whole number or a list of them, got {str(value)[:40]}")
    return frozenset(i for i in listed if i >= 0)  # a negative id never matches, as in transformers
