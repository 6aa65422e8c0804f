"""Names that keep their index, so that layers can be folded again."""

from __future__ import annotations


def suffixed(name: str, suffix: str) -> str:
    """`h[3]` and `.tp` make `h.tp[3]`."""
    at = name.index("[") if name.endswith("]") else len(name)
    return name[:at] + suffix + name[at:]


def fresh(name: str, suffix: str, taken: set[str]) -> str:
    """The suffixed name, with a plus sign for each that is taken already; it is taken from then on."""
    new = suffixed(name, suffix)
    while new in taken:
        suffix += "+"
        new = suffixed(name, suffix)
    taken.add(new)
    return new
