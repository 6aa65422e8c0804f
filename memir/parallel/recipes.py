"""Names for lists of passes: LLMem's four methods (arXiv 2404.10933, sections 3.4 to 3.6), as what people run today.

| name | passes | in the paper |
|---|---|---|
| `llmem-cdp{degree=4}` | `data-parallel` | conventional data parallelism: everything on every GPU |
| `llmem-adp{degree=4}` | `fsdp`, kept after forward, fp32 shards | advanced: fp16 parameters whole, the rest divided |
| `llmem-tp{degree=4}` | `tensor-parallel` | 1-D tensor parallelism |
| `llmem-dp-tp{degree=4 tp=2}` | `tensor-parallel`, then `fsdp` as above | `degree` ranks in all, `tp` of them share a copy |
"""

from __future__ import annotations

import re
from collections.abc import Callable

from memir.errors import UsageError

_RECIPE = re.compile(r"(?<![\w-])(llmem-[\w-]*)(?:\{([^}]*)\})?")
_RANKS = 4  # the paper's
_SHARDED = "reshard=false param-dtype=f16"


def _cdp(degree: int, tp: int) -> str:
    return f"data-parallel{{degree={degree}}}"


def _adp(degree: int, tp: int) -> str:
    return f"fsdp{{degree={degree} {_SHARDED}}}"


def _tp(degree: int, tp: int) -> str:
    return f"tensor-parallel{{degree={degree}}}"


def _dp_tp(degree: int, tp: int) -> str:
    if degree % tp:
        raise UsageError(f"llmem-dp-tp: tp={tp} does not divide the degree {degree}", hint="llmem-dp-tp{degree=4 tp=2}")
    return f"tensor-parallel{{degree={tp} placed-gradients}},fsdp{{degree={degree // tp} {_SHARDED}}}"


RECIPES: dict[str, Callable[[int, int], str]] = {
    "llmem-cdp": _cdp,
    "llmem-adp": _adp,
    "llmem-tp": _tp,
    "llmem-dp-tp": _dp_tp,
}


def expanded(text: str) -> str:
    """The text of passes with every recipe's passes in its place. UsageError for a recipe or an option that there is not."""
    return _RECIPE.sub(lambda found: _passes(found[1], found[2] or ""), text)


def _passes(name: str, options: str) -> str:
    if name not in RECIPES:
        raise UsageError(f"--parallel: there is no recipe {name}", hint=f"known: {', '.join(RECIPES)}")
    numbers = {"degree": _RANKS, "tp": 2}
    for word in options.split():
        key, _, value = word.partition("=")
        allowed = key == "degree" or (key == "tp" and name == "llmem-dp-tp")
        if not allowed or not value.isdigit() or not int(value):
            raise UsageError(f"--parallel: {name} has no option {word!r}", hint=f"{name}{{degree={_RANKS}}}")
        numbers[key] = int(value)
    return RECIPES[name](numbers["degree"], numbers["tp"])
