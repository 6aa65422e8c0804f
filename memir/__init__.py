"""memir: how much GPU memory a decoder language model's training step takes, and why.

    import memir

    report = memir.analyze("gpt2", batch=4, seq=1024)   # what `memir analyze gpt2 -b 4 -s 1024` prints
    traced = memir.trace("model.py:GPT")                # one step as a memory program
    peak = memir.peak(traced.program)                   # exact, over B and S

Importing memir is light: torch is imported when something is traced, sympy when a formula is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "analyze": "memir.api",
    "peak": "memir.api",
    "trace": "memir.api",
    "Report": "memir.report",
    "Recipe": "memir.recipe",
    "Lora": "memir.recipe",
    "Program": "memir.ir.core",
    "Phase": "memir.ir.core",
    "Repeat": "memir.ir.core",
    "Op": "memir.ir.core",
    "Storage": "memir.ir.core",
    "Value": "memir.ir.core",
    "Kind": "memir.ir.core",
    "Size": "memir.ir.size",
    "parse": "memir.ir.parser",
    "to_text": "memir.ir.printer",
    "MemirError": "memir.errors",
    "UsageError": "memir.errors",
    "InconclusiveError": "memir.errors",
    "ParseError": "memir.errors",
    "VerifyError": "memir.errors",
}  # public name -> the module it is imported from on first use

__all__ = [
    "InconclusiveError",
    "Kind",
    "Lora",
    "MemirError",
    "Op",
    "ParseError",
    "Phase",
    "Program",
    "Recipe",
    "Repeat",
    "Report",
    "Size",
    "Storage",
    "UsageError",
    "Value",
    "VerifyError",
    "__version__",
    "analyze",
    "parse",
    "peak",
    "to_text",
    "trace",
]

if TYPE_CHECKING:
    from memir.api import analyze, peak, trace
    from memir.errors import InconclusiveError, MemirError, ParseError, UsageError, VerifyError
    from memir.ir.core import Kind, Op, Phase, Program, Repeat, Storage, Value
    from memir.ir.parser import parse
    from memir.ir.printer import to_text
    from memir.ir.size import Size
    from memir.recipe import Lora, Recipe
    from memir.report import Report


def __getattr__(name: str) -> Any:
    """A public name, imported now (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'memir' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
