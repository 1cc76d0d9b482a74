"""Finds the drafters: every module of this folder declares DRAFTER, apart from the helpers named here.

Adding a drafter is adding one file; a module that is neither stops the walk.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import engine.speculative
from engine.errors import EngineError
from engine.speculative.base import Drafter, DrafterSpec, DraftOptions, Room, Target, check_options

HELPERS = frozenset(
    {
        "base", "rows", "registry", "tree", "device", "accept", "compact", "verify", "layers", "grow", "heads", "autoregressive",
        "train", "prompts", "answers", "losses", "optimiser", "report",
    }
)  # fmt: skip


@cache
def load_drafters() -> dict[str, DrafterSpec]:
    """Every drafter by name.

    Raises:
        RuntimeError: a module declares nothing, or another name than its file's.
    """
    return collect(engine.speculative)


def collect(package) -> dict[str, DrafterSpec]:
    """The drafters that the modules of `package` declare."""
    found: dict[str, DrafterSpec] = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.name in HELPERS:
            continue
        name = f"{package.__name__}.{module.name}"
        spec = getattr(importlib.import_module(name), "DRAFTER", None)
        if not isinstance(spec, DrafterSpec):
            raise RuntimeError(f"{name} declares no DRAFTER and is not in HELPERS of engine/speculative/registry.py")
        if spec.name != module.name:
            raise RuntimeError(f"{name}: DRAFTER.name is {spec.name!r}; file and drafter have the same name")
        found[spec.name] = spec
    return found


def find_drafter(name: str) -> DrafterSpec:
    """Raises EngineError "unknown_drafter", naming those that there are."""
    known = load_drafters()
    if name not in known:
        names = ", ".join(sorted(known))
        raise EngineError("unknown_drafter", f"There is no drafter called {name[:80]!r}. There are: {names}.", name=name[:80], known=names)
    return known[name]


def build_drafter(target: Target, options: DraftOptions, room: Room) -> Drafter:
    """A drafter ready to draft; everything that can be refused is refused here, before anything runs.

    Raises:
        EngineError: "unknown_drafter", "bad_draft_options", "draft_too_deep", "draft_budget", "draft_vocabulary",
            "bad_draft_tree", "bad_drafter", and what load_model raises.
    """
    spec = find_drafter(options.drafter)
    check_options(options, spec, room)
    drafter = spec.build(target, options)
    if drafter.slots_ahead >= room.pool_tokens:
        limit = room.pool_tokens - 1
        sentence = f"Drafting this tree takes {drafter.slots_ahead:,} tokens of cache; at most {limit:,} fit."
        raise EngineError("draft_budget", sentence, budget=drafter.slots_ahead, limit=limit, of_pool=True)
    return drafter
