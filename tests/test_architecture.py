"""Who may import what, and where things lie: the import table of the design, read from the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("engine", "viz", "kernels")
TOP_LEVEL = {
    "app.py", "engine", "viz", "kernels", "tests", "requirements.txt", "README.md", "benchmarks", "assets", "LICENSE", "pyproject.toml",
}  # fmt: skip
STDLIB = set(sys.stdlib_module_names)
WITHOUT_TORCH = ("request", "sequence", "plan", "trace", "artifacts", "recording", "pages", "cache", "scheduler")
ALLOWED = {  # beside the standard library and the package itself
    "kernels": {"torch", "triton", "numpy"},
    "engine": {"kernels", "torch", "numpy", "transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub"},
    "viz": {"engine.trace", "engine.artifacts", "engine.plan", "engine.request", "plotly", "numpy"},
    "viz.stage": {"engine.trace", "engine.artifacts", "engine.plan", "engine.request", "plotly", "numpy", "starlette"},
    "app": {"engine", "viz", "gradio", "spaces"},  # spaces: only on ZeroGPU, which brings it
}


def modules() -> dict[str, Path]:
    """Dotted name → file, for everything that ships."""
    found = {"app": ROOT / "app.py"} if (ROOT / "app.py").exists() else {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(source: str, module: str, is_package: bool = False) -> set[str]:
    """Every dotted name that a module imports anywhere in it, relative ones resolved; `from a import b` gives a.b too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            found.update({base, *(f"{base}.{alias.name}" for alias in node.names)})
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                found.add(node.args[0].value)
    return {name for name in found if name}


def imports_of(module: str) -> set[str]:
    path = MODULES[module]
    return imports(path.read_text("utf-8"), module, path.name == "__init__.py")


def is_under(name: str, prefixes: set[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def foreign(names: set[str], allowed: set[str]) -> set[str]:
    """Imports that are neither the standard library nor allowed; a package that merely leads to an allowed module is not one."""
    leads = {".".join(a.split(".")[:i]) for a in allowed for i in range(1, len(a.split(".")))}
    return {name for name in names if name.split(".")[0] not in STDLIB and not is_under(name, allowed) and name not in leads}


def rule_for(module: str) -> str:
    parts = module.split(".")
    return "viz.stage" if parts[:2] == ["viz", "stage"] else parts[0]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_follow_the_table(module):
    rule = rule_for(module)
    wrong = foreign(imports_of(module), ALLOWED[rule] | {rule.split(".")[0]})
    assert not wrong, f"{module} may not import {sorted(wrong)}"


def test_only_the_stage_waits_for_sockets():
    users = {m for m in MODULES if m.startswith("viz.") and any(n.split(".")[0] == "asyncio" for n in imports_of(m))}
    assert all(rule_for(module) == "viz.stage" for module in users), users


def closure(module: str) -> dict[str, str]:
    """Modules of ours that are reached from one, each with the one that imports it."""
    reached, todo = {module: ""}, [module]
    while todo:
        at = todo.pop()
        parents = {".".join(at.split(".")[:i]) for i in range(1, at.count(".") + 1)}
        for name in imports_of(at) | parents:
            if name in MODULES and name not in reached:
                reached[name] = at
                todo.append(name)
    return reached


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_the_deciding_half_of_the_engine_reaches_no_torch(name):
    for module, importer in closure(f"engine.{name}").items():
        allowed = {"engine", "numpy"} | ({"safetensors"} if name == "recording" else set())
        wrong = foreign(imports_of(module), allowed)
        assert not wrong, f"engine.{name} reaches {module} (through {importer or 'itself'}), which imports {sorted(wrong)}"


def test_only_the_peer_runs_models_of_transformers():
    """Everywhere else transformers supplies configs and tokenizers: the forward pass is ours."""
    made = re.compile(r"transformers\.(Auto\w*Model|models\b|generation|GenerationConfig|PreTrainedModel|pipeline|modeling_utils)")
    assert {module for module in MODULES if any(made.match(name) for name in imports_of(module))} == {"engine.peer"}


def test_only_a_recording_reads_safetensors_among_them():
    users = {module for module in closure("engine.recording") if any(n.split(".")[0] == "safetensors" for n in imports_of(module))}
    assert users <= {"engine.recording", "engine.recording_check"}


def test_importing_the_views_and_the_trace_loads_no_torch():
    names = [m for m in MODULES if m == "viz" or m.startswith("viz.")]
    names += [f"engine.{name}" for name in WITHOUT_TORCH]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "heavy = sorted(set(sys.modules) & {'torch', 'triton', 'gradio', 'transformers', 'kernels', 'engine.core', 'engine.session'})\n"
        "sys.exit('loaded ' + ', '.join(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_package_init_files_are_empty():
    folders = [*(ROOT / p for p in (*PACKAGES, "tests", "benchmarks"))]
    filled = [str(p.relative_to(ROOT)) for folder in folders for p in folder.rglob("__init__.py") if p.read_text("utf-8").strip()]
    assert not filled


def test_every_folder_of_code_is_a_package():
    missing = {str(p.parent.relative_to(ROOT)) for package in PACKAGES for p in (ROOT / package).rglob("*.py")}
    assert not {folder for folder in missing if not (ROOT / folder / "__init__.py").exists()}


def tracked() -> list[Path]:
    """Files that ship: what git tracks, and what it would add."""
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_the_top_level_is_fixed():
    top = {path.relative_to(ROOT).parts[0] for path in tracked()}
    extra = {name for name in top if not name.startswith(".")} - TOP_LEVEL
    assert not extra, f"{sorted(extra)} do not belong at the top level"
    assert {"app.py", "engine", "viz", "kernels", "tests", "requirements.txt", "README.md"} <= top


def test_no_file_names_a_place_on_somebodys_machine():
    place = re.compile(r"(?<![\w./-])/(?:work|root|opt|home|Users)/[\w.-]")
    wrong = []
    for path in tracked():
        if path.suffix in (".png", ".jpg", ".gif", ".woff2", ".safetensors", ".glass", ".npz", ".mp4", ".webm", ".ico"):
            continue
        text = path.read_text("utf-8", "replace")
        if path != Path(__file__).resolve():
            wrong += [f"{path.relative_to(ROOT)}: {found.group()}" for found in place.finditer(text)]
    assert not wrong, wrong[:10]


# ---- registries ----


def registries():
    """(name, call that walks a folder given as a package) of every registry there is."""
    import engine.models.registry
    import engine.quantization.base
    import engine.speculative.registry
    import kernels.registry
    import viz.registry

    def by_path(load):
        return lambda package: load(package.__name__, package.__path__)

    return {
        "kernels": by_path(kernels.registry.load_specs),
        "viz.views": by_path(viz.registry.load_views),
        "viz.words": by_path(viz.registry.load_words),
        "engine.models": engine.models.registry.collect,
        "engine.speculative": engine.speculative.registry.collect,
    }


@pytest.mark.parametrize("name", ["kernels", "viz.views", "viz.words", "engine.models", "engine.speculative"])
def test_a_registry_stops_at_a_module_that_declares_nothing(name, tmp_path, monkeypatch):
    folder = tmp_path / "forgetful"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "newcomer.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("forgetful", "forgetful.newcomer"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    package = types.ModuleType("forgetful")
    package.__path__ = [str(folder)]
    with pytest.raises((LookupError, RuntimeError), match="newcomer"):
        registries()[name](package)


def test_every_folder_that_is_meant_to_grow_is_walked_and_not_empty():
    import engine.models.registry
    import engine.quantization.base
    import kernels.registry
    import viz.registry

    assert kernels.registry.load_specs() and viz.registry.load_views() and viz.registry.load_words()
    assert engine.models.registry.load_families() and engine.quantization.base.load_formats()


# ---- the reader of imports itself ----


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch", "torch"),
        ("import torch.nn as t", "torch.nn"),
        ("def f():\n    from torch import nn", "torch.nn"),
        ("from . import core", "engine.core"),
        ("from .core import step", "engine.core.step"),
        ("from ..viz import view", "viz.view"),
        ("class A:\n    import gradio as gr", "gradio"),
        ("import importlib\nimportlib.import_module('torch')", "torch"),
        ("__import__('triton')", "triton"),
        ("try:\n    import plotly\nexcept ImportError:\n    pass", "plotly"),
        ("from engine import core as c", "engine.core"),
    ],
)
def test_imports_are_found_however_they_are_written(source, name):
    assert name in imports(source, "engine.scheduler")


def test_relative_imports_of_a_package_start_one_level_lower():
    assert "engine.core" in imports("from . import core", "engine", is_package=True)
    assert "engine.models.base" in imports("from .base import Family", "engine.models.llama")


def test_the_table_bites():
    assert foreign({"engine.core", "engine.trace", "engine", "numpy.linalg", "os.path"}, ALLOWED["viz"]) == {"engine.core"}
    assert foreign({"torch", "engine.trace.Trace"}, ALLOWED["viz"] | {"viz"}) == {"torch"}
