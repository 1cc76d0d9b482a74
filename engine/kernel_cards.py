"""A kernel's file as a card: its formula, text, reference, source, and the shapes that it can be run on.

Read from the source by its names: the module's docstring, the reference with the functions of its file that it calls, the
Triton kernels with their launcher. Deliberately knows no kernel but through its SPEC, with one exception: attention's inputs
are counted from their "sequences", since making them costs a loop over the sequences. Rejected: inspect.getsource for
each function (it parses the whole file every time: seconds at start).
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import ModuleType

import torch

from engine.artifacts import KernelCard
from engine.ops import CALLED, Ops
from kernels.registry import load_specs
from kernels.spec import Case, KernelSpec

MAX_INPUT_BYTES = {"cuda": 2 * 2**30, "cpu": 2**30}
MAX_FLOPS = {"cuda": 2e13, "cpu": 2e10}  # of one run: about half a second of it
MAX_SEQUENCES = 256
ITEMSIZE = {"cuda": 2, "cpu": 4}  # of the type that is usual there


def cards(ops: Ops, device: torch.device) -> tuple[KernelCard, ...]:
    """A card for every kernel of the folder.

    Args:
        ops: of this engine: which of a kernel and its reference its model calls.
        device: cases that are too large for it are left out.
    """
    return tuple(_card(spec, ops, device.type) for spec in load_specs().values())


def _card(spec: KernelSpec, ops: Ops, device: str) -> KernelCard:
    called = getattr(ops, spec.name, None) if spec.name in CALLED else None
    backend = "" if called is None else "triton" if called is spec.fn else "torch"
    cases = tuple((case.name, said(case.dims)) for case in (*spec.bench_cases, *spec.cases) if fits(spec, case, device))
    text = inspect.cleandoc(sys.modules[spec.fn.__module__].__doc__ or "")
    return KernelCard(spec.name, spec.formula, text, reference_source(spec.ref), kernel_source(spec.fn), cases, backend)


def said(dims: Mapping[str, object]) -> str:
    """Dimensions in words: "tokens 8192, n 14336"."""
    return ", ".join(f"{name} {value}" for name, value in dims.items())


class _File:
    """A kernel's file by the names of its functions and classes."""

    def __init__(self, module: ModuleType) -> None:
        text = inspect.getsource(module)
        self._lines = text.splitlines()
        self.nodes = {n.name: n for n in ast.parse(text).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}

    def source(self, names: Iterable[str]) -> str:
        """These, in the file's order."""
        nodes = sorted((self.nodes[name] for name in names), key=lambda n: n.lineno)
        return "\n\n\n".join("\n".join(self._lines[_first(n) - 1 : n.end_lineno]) for n in nodes)


def _first(node: ast.FunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])


@lru_cache(maxsize=100)
def _file(module: str) -> _File:
    return _File(sys.modules[module])


@lru_cache(maxsize=100)
def reference_source(ref: Callable) -> str:
    """The reference with what it calls of its own file."""
    file, todo, found = _file(ref.__module__), [ref.__name__], set()
    while todo:
        name = todo.pop()
        found.add(name)
        used = {n.id for n in ast.walk(file.nodes[name]) if isinstance(n, ast.Name)}
        todo += [u for u in used & file.nodes.keys() if u not in found]
    return file.source(found)


@lru_cache(maxsize=100)
def kernel_source(launcher: Callable) -> str:
    """The jit functions of a kernel's file, and the function that launches them."""
    file = _file(launcher.__module__)
    jit = {name for name, n in file.nodes.items() if any("jit" in ast.unparse(d) for d in n.decorator_list)}
    return file.source(jit | {launcher.__name__})


# ---- which shapes ----


def attention_size(dims: Mapping[str, object], itemsize: int) -> tuple[int, int]:
    """(bytes while q, keys and values are made, floating-point operations) of kernels.attention.make_inputs' dims."""
    pairs = _pairs(str(dims["sequences"]))
    hq, hk, d = (int(dims[name]) for name in ("hq", "hk", "d"))
    wide = d + int(dims.get("dv", 0) or d)
    page, layers = int(dims.get("page_size", 16)), int(dims.get("layers", 1))
    keys = sum(-(-length // page) * page for _, length in pairs) + 2 * page
    tokens = sum(n for n, _ in pairs) + int(dims.get("pad_rows", 0))
    rows = sum(n * max(length - n // 2, 1) for n, length in pairs)
    drawn = tokens * (hq + hk) * d  # in float32 first
    return drawn * (itemsize + 4) + keys * hk * wide * layers * itemsize, 2 * rows * hq * wide


def _pairs(text: str) -> list[tuple[int, int]]:
    """ "3:17 1:40x2" → (3, 17), (1, 40), (1, 40). Raises ValueError, also for too many."""
    pairs = []
    for item in text.split():
        found = re.fullmatch(r"(\d{1,7}):(\d{1,7})(?:x(\d{1,3}))?", item)
        if found is None:
            raise ValueError(f"sequences are written as “queries:keys”, not {item[:20]!r}")
        pairs += [(int(found[1]), int(found[2]))] * int(found[3] or 1)
        if len(pairs) > MAX_SEQUENCES:
            raise ValueError(f"there may be at most {MAX_SEQUENCES} sequences")
    return pairs


def fits(spec: KernelSpec, case: Case, device: str) -> bool:
    """Whether a declared case can be run on the device, as far as that is known without making its inputs: the two largest
    dimensions are about a tensor, and there are about four of them."""
    if case in spec.cases:
        return True  # made to be checked everywhere
    if "sequences" in case.dims:
        size, flops = attention_size(case.dims, ITEMSIZE[device])
        return size <= MAX_INPUT_BYTES[device] and flops <= MAX_FLOPS[device]
    sizes = sorted(n for n in case.dims.values() if isinstance(n, int))
    return 16 * math.prod(sizes[-2:]) <= MAX_INPUT_BYTES[device]
