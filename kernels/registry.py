"""Every kernel of this folder by name. A new kernel is one new file; nothing is listed here.

Walks the folder, imports each module that is not a helper and takes its SPEC. Rejected: registration by decorator
(a kernel nobody imported would be missing in silence) and skipping files without a SPEC (the same).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

import kernels
from kernels.spec import KernelSpec

HELPERS = frozenset({"spec", "registry", "common", "attention", "flash_hopper", "gemv", "tile_log"})


def load_specs(package: str = kernels.__name__, path: Iterable[str] = tuple(kernels.__path__)) -> dict[str, KernelSpec]:
    """name -> SPEC, in alphabetical order.

    Raises:
        LookupError: a module declares no KernelSpec named SPEC, or one whose name is not the file's.
    """
    specs: dict[str, KernelSpec] = {}
    for module_info in sorted(pkgutil.iter_modules(list(path)), key=lambda m: m.name):
        if module_info.name in HELPERS:
            continue
        module = importlib.import_module(f"{package}.{module_info.name}")
        spec = getattr(module, "SPEC", None)
        if not isinstance(spec, KernelSpec):
            raise LookupError(f"{package}/{module_info.name}.py declares no SPEC (a KernelSpec)")
        if spec.name != module_info.name:
            raise LookupError(f"{package}/{module_info.name}.py: SPEC.name is {spec.name!r}, must be the file's name")
        specs[spec.name] = spec
    return specs
