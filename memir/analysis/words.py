"""Bytes, counts and names as people read them: shared by the outputs, so that all say the same."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

GIB = 2**30
MIB = 2**20
SMALL = GIB // 10  # below this a screen is in MiB, or every line of it would say 0.00


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of one screen."""

    name: str
    nbytes: int

    @staticmethod
    def of(largest: int) -> Unit:
        """GiB, or MiB where the largest number on the screen is below a tenth of one."""
        return Unit("GiB", GIB) if largest >= SMALL else Unit("MiB", MIB)

    def number(self, nbytes: int) -> str:
        """Two decimals without the unit's name: `9.84`."""
        return f"{nbytes / self.nbytes:,.2f}"

    def text(self, nbytes: int) -> str:
        """Two decimals and the unit's name: `9.84 GiB`."""
        return f"{self.number(nbytes)} {self.name}"


def small_bytes(nbytes: int) -> str:
    """A difference such as bytes for one more token, in the unit that suits it: `0.57 MiB`, `512 bytes`."""
    for name, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(nbytes) >= size / 2 and nbytes:
            return f"{nbytes / size:,.2f} {name}"
    return f"{nbytes:,} bytes"


def exactly(traced: int, passes: int) -> str:
    """What the trace of PyTorch's own distributed code says beside the passes, in bytes."""
    said = f"PyTorch's own code, traced on a fake rank, takes {traced:,} bytes at its peak"
    return f"{said}; the passes differ by {passes - traced:+,}"


def count(number: int) -> str:
    """Parameters and the like: `123.7 M`, `8.03 B`, `512`."""
    for name, size, digits in (("B", 10**9, 2), ("M", 10**6, 1), ("K", 10**3, 1)):
        if number >= size:
            return f"{number / size:,.{digits}f} {name}"
    return str(number)


def plural(number: int, noun: str) -> str:
    """`1 storage`, `12 storages`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def option(value: str | float | bool | None) -> str:
    """An option's value: `on`, `off`, `none`, `0.1`, `adamw`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def shortened(text: str, width: int) -> str:
    """The text if it fits, else its end after an ellipsis: the end of a module path or file says more than its start."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def shortened_end(text: str, width: int) -> str:
    """The text, or its start and an ellipsis."""
    return text if len(text) <= width else text[: width - 1] + "…"


def wrapped(label: str, text: str, width: int, height: int) -> list[str]:
    """Lines of `width`, the further ones indented, at most `height` of them; none without text."""
    if not text:
        return []
    return textwrap.wrap(
        label + text,
        width,
        initial_indent="  ",
        subsequent_indent="    ",
        max_lines=height,
        placeholder=" … (--format json)",
        break_on_hyphens=False,
    )
