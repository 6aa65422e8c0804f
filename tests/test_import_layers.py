"""Who may import whom (docs/index.md): read from the source of every module, imports inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATA = {"ir", "recipe", "hardware", "errors"}
ALLOWED = {
    "errors": set(),
    "ir": {"errors"},
    "garbage": set(),
    "recipe": {"errors"},
    "hardware": {"errors"},
    "cuda": {"errors", "hardware", "ir"},
    "analysis": DATA - {"recipe"},
    "allocator": {"errors", "ir", "analysis"},
    "recorded": {"errors", "allocator"},
    "rewrite": {"errors", "ir"},
    "parallel": {"errors", "ir", "hardware", "rewrite"},
    "updates": {"errors", "ir", "cuda"},
    "passes": DATA | {"analysis", "parallel", "rewrite", "updates"},
    "cuts": DATA | {"analysis", "garbage", "rewrite"},
    "formulas": DATA | {"analysis"},
    "derivation": DATA | {"analysis", "cuts", "rewrite"},
    "report": DATA | {"analysis", "formulas", "cuda"},
    "backends": DATA | {"analysis", "allocator", "cuda", "formulas", "report"},
    "frontend": DATA | {"cuda", "updates", "garbage", "options", "registry"},
    "runtime": DATA | {"analysis", "frontend", "api"},
    "freezing": {"runtime"},
    "registry": {"errors"},
    "options": {"errors", "ir", "registry"},
    "pipeline": DATA | {"analysis", "options", "registry"},
    "cache": DATA | {"analysis", "pipeline"},
    "workers": {"errors"},
    "findings": {"__version__"},
    "diff": DATA | {"analysis", "api", "findings", "workers"},
    "check": DATA | {"analysis", "api", "cuda", "diff", "findings", "pipeline", "report", "workers"},
    "lint": DATA | {"analysis", "diff", "findings"},
    "pytest": {"check", "errors"},
    "one_rank": {"errors", "ir", "options", "parallel", "pipeline", "rewrite"},
    "one_rank_widths": {"errors", "ir", "pipeline"},
    "planner": DATA | {"analysis", "one_rank", "parallel", "pipeline", "cache", "registry", "sweep"},
    "sweep": DATA | {"analysis", "pipeline", "cache"},
    "api": DATA
    | {
        "analysis",
        "allocator",
        "cuda",
        "derivation",
        "formulas",
        "report",
        "frontend",
        "pipeline",
        "passes",
        "backends",
        "cache",
        "planner",
        "one_rank",
        "one_rank_widths",
        "sweep",
    },
}  # package or module under memir -> what it may import of memir besides itself; cli may import everything
LIGHT = {"cli", "errors", "recipe", "hardware", "__version__"}  # what `memir --help` may import
FLAT = ("passes", "backends")  # modules of these never import one another
HEAVY = {"torch", "transformers", "peft", "accelerate", "numpy"}
USES_TORCH = {"frontend", "runtime"}


@dataclass(frozen=True)
class Import:
    line: int
    name: str
    lazy: bool  # inside a function
    typing: bool  # under `if TYPE_CHECKING`


def modules() -> list[tuple[str, Path]]:
    """Every module of memir by its import name; the links memir/passes and memir/backends are followed."""
    folders = {"memir": ROOT / "memir", "memir.passes": ROOT / "passes", "memir.backends": ROOT / "backends"}
    found = []
    for package, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder)
            if package == "memir" and relative.parts[0] in FLAT:
                continue
            parts = [p for p in relative.with_suffix("").parts if p != "__init__"]
            found.append((".".join([package, *parts]), path))
    return found


def imports(path: Path) -> Iterator[Import]:
    def visit(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, lazy, typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: import absolutely"
            module = node.module or ""
            yield from (Import(node.lineno, f"{module}.{alias.name}", lazy, typing) for alias in node.names)
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If):
            named = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for child in node.body:
                yield from visit(child, lazy, typing or named)
            for child in node.orelse:
                yield from visit(child, lazy, typing)
        else:
            for child in ast.iter_child_nodes(node):
                yield from visit(child, lazy, typing)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), lazy=False, typing=False)


def layer(name: str) -> str:
    """`memir.ir.core.Size` -> `ir`; memir itself is empty, `memir.__main__` belongs to the command line."""
    parts = [*name.split("."), ""]
    return "cli" if parts[1] == "__main__" else parts[1]


def faults(name: str, path: Path) -> Iterator[str]:
    own = layer(name)
    for found in imports(path):
        where = f"{path.relative_to(ROOT)}:{found.line}: {name} imports {found.name}"
        top = found.name.split(".")[0]
        if top in HEAVY and own not in USES_TORCH and not (own == "api" and found.typing):
            yield f"{where}: only frontend and runtime import {top}"
        if top == "sympy" and own not in USES_TORCH and not found.lazy and not found.typing:
            yield f"{where}: sympy is imported inside functions"
        if top in FLAT:
            yield f"{where}: by its long name memir.{top}"
        if top != "memir":
            continue
        other = layer(found.name)
        if own in FLAT and other == own and found.name.split(".")[2:]:
            yield f"{where}: modules of {own} never import one another"
        if own in ("cli", ""):
            if not found.lazy and not found.typing and other not in LIGHT:
                yield f"{where}: at import time; do it inside the command"
        elif other not in {"__version__", own} | ALLOWED[own]:
            yield f"{where}: {own} may import {sorted(ALLOWED[own])}"


@pytest.mark.parametrize(("name", "path"), [pytest.param(n, p, id=n) for n, p in modules()])
def test_a_module_imports_only_what_its_layer_may(name: str, path: Path) -> None:
    assert layer(name) in {*ALLOWED, "cli", ""}, f"{name}: give it a layer in this test and in docs/index.md"
    assert list(faults(name, path)) == []


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("memir.ir.core", "import torch", "only frontend and runtime import torch"),
        ("memir.analysis.peak", "def f():\n    from memir.frontend.load import load", "analysis may import"),
        ("memir.passes.freeze", "from memir.passes.lifetimes import Lifetimes", "never import one another"),
        ("memir.passes.freeze", "from memir.backends.text import render", "passes may import"),
        ("memir.backends.text", "import passes", "by its long name"),
        ("memir.backends.formula", "import sympy", "inside functions"),
        ("memir.cli.ir", "from memir.api import trace", "inside the command"),
    ],
)
def test_each_rule_finds_its_fault(name: str, source: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (message,) = faults(name, path)
    assert fault in message


def test_allowed_layers_have_no_cycle() -> None:
    remaining = {name: set(others) for name, others in ALLOWED.items()}
    while remaining:
        free = {name for name, others in remaining.items() if not others & remaining.keys()}
        assert free, f"cycle among {sorted(remaining)}"
        remaining = {name: others for name, others in remaining.items() if name not in free}
