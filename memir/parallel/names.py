"""Names of what a pass adds beside a storage or value: `layers.*.up.bucket[3]` beside `layers.*.up[3]`."""

from __future__ import annotations


def beside(name: str, suffix: str) -> str:
    """The name with `.suffix` before its index, so that a family's members stay one family."""
    base, bracket, index = name.partition("[")
    return f"{base}.{suffix}{bracket}{index}"
