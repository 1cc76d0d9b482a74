"""Finds the model families: every module of this folder declares FAMILY, apart from the helpers named here.

Adding a family is adding one file. A module that is neither a helper nor a family stops the walk, so that a
forgotten FAMILY is seen at once. Rejected: a decorator that registers on import (needs the import somewhere).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

import engine.models
from engine.config import ModelConfig
from engine.errors import EngineError
from engine.models.base import Family

HELPERS = frozenset({"base", "registry", "parse", "rope", "decoder", "weights", "hub", "default", "loading"})


@cache
def load_families() -> dict[str, Family]:
    """Every family by name.

    Raises:
        RuntimeError: a module declares nothing or another name than its file's, or two declare the same name or architecture.
    """
    return collect(engine.models)


def collect(package) -> dict[str, Family]:
    """The families that the modules of `package` declare."""
    found: dict[str, Family] = {}
    owners: dict[str, str] = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.name in HELPERS:
            continue
        name = f"{package.__name__}.{module.name}"
        family = getattr(importlib.import_module(name), "FAMILY", None)
        if not isinstance(family, Family):
            raise RuntimeError(f"{name} declares no FAMILY and is not in HELPERS of engine/models/registry.py")
        if family.name != module.name:
            raise RuntimeError(f"{name}: FAMILY.name is {family.name!r}; file and FAMILY are both named after config.json's model_type")
        for key in (family.name, *family.architectures, *([f"GGUF {family.gguf}"] if family.gguf else [])):
            if key in owners:
                raise RuntimeError(f"{key} is declared by both {owners[key]} and {module.name}")
            owners[key] = module.name
        found[family.name] = family
    return found


def parse_config(config: Mapping) -> tuple[Family, ModelConfig]:
    """The family of a config.json and what its parse makes of it."""
    family = find_family(config)
    parsed = family.parse(config)
    if parsed.family != family.name:
        raise RuntimeError(f"engine/models/{family.name}.py: parse returns a ModelConfig of the family {parsed.family!r}")
    return family, parsed


def find_family(config: Mapping) -> Family:
    """The family of a config.json: by its architectures, else by its model_type.

    Raises:
        EngineError: "unsupported_model", naming it and what is supported.
    """
    families = load_families()
    named = config.get("architectures")
    named = [str(n) for n in named] if isinstance(named, (list, tuple)) else []
    for family in families.values():
        if any(name in family.architectures for name in named):
            return family
    if not named and config.get("model_type") in families:
        return families[config["model_type"]]
    wanted = (named[0] if named else str(config.get("model_type") or "(none named)"))[:80]
    supported = sorted(name for family in families.values() for name in family.architectures)
    raise EngineError(
        "unsupported_model",
        f"The architecture {wanted} is not supported. Supported: {', '.join(supported)}.",
        what=f"the architecture {wanted}", supported=supported,
    )
