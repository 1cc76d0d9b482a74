"""What a weight format declares (FORMAT in its file): how a file becomes a checkpoint folder that the loaders read.

Today's formats are widened when they are converted; a format whose blocks stay packed on the device will add its
own matmul here.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import engine.quantization

HELPERS = frozenset({"base"})


@dataclass(frozen=True)
class Format:
    """A weight format.

    Args:
        name: as people write it.
        suffix: of its files, with the dot.
        convert: (file, folder, progress(fraction, text)) → the precision for people ("float32, dequantised from Q4_1").
            Writes config.json, generation_config.json, model.safetensors and the tokenizer into an existing folder.
    """

    name: str
    suffix: str
    convert: Callable[[Path, Path, Callable[[float, str], None]], str]


@cache
def load_formats() -> dict[str, Format]:
    """Every format by name; a module that declares none stops the walk."""
    found = {}
    for module in pkgutil.iter_modules(engine.quantization.__path__):
        if module.name in HELPERS:
            continue
        name = f"{engine.quantization.__name__}.{module.name}"
        declared = getattr(importlib.import_module(name), "FORMAT", None)
        if not isinstance(declared, Format):
            raise RuntimeError(f"{name} declares no FORMAT and is not in HELPERS of engine/quantization/base.py")
        found[declared.name] = declared
    return found
