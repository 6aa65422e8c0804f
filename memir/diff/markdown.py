"""A difference as GitHub-flavoured markdown, for a comment that is kept up to date: one table, then details."""

from __future__ import annotations

from memir.analysis.words import Unit
from memir.diff.compare import Difference
from memir.diff.text import delta_text, origin, percent, signed, where
from memir.ir.symbolic import formula_text

SHOWN = 20


def to_markdown(found: Difference) -> str:
    """The section, ending in a newline."""
    unit = Unit.of(max(found.before, found.after))
    point = ", ".join(f"{name}={value}" for name, value in found.point)
    lines = [
        f"| | base | head | change | |\n|---|---:|---:|---:|---:|\n"
        f"| peak, {point} | {unit.text(found.before)} | {unit.text(found.after)} "
        f"| {signed(unit, found.nbytes)} {unit.name} | {percent(found)} |",
        f"Formula at this point: `{delta_text(found)}` bytes. Peak {cell(where(found))}.",
    ]
    for order in found.orders:
        what = f"**The peak {'gained' if order.is_new else 'lost'} a `{order.product}` term**: `{order.term}` bytes"
        lines.append(f"{what}, {unit.text(order.nbytes)} here.")
    lines += what_changed(found)
    lines += [f"Inconclusive: {cell(reason)}" for reason in found.inconclusive]
    details = storages(found, unit)
    if details:
        lines.append(f"<details><summary>What changed at the peak</summary>\n\n{details}\n\n</details>")
    return "\n\n".join(lines) + "\n"


def what_changed(found: Difference) -> list[str]:
    """The likeliest changed line, in a sentence; nothing without one."""
    if not found.blames or not found.nbytes:
        return []
    first = found.blames[0]
    gone = "removed " if first.base_line else ""
    return [f"Because of {gone}`{code(first.text)}` at `{first.file}:{first.line}`."]


def storages(found: Difference, unit: Unit) -> str:
    """The table of changed storages; "" without any."""
    if not found.changes:
        return ""
    rows = [f"| | kind | made by | {unit.name} | count | formula |", "|---|---|---|---:|---:|---|"]
    for c in found.changes[:SHOWN]:
        kind = c.kind.replace("_", " ")
        made = f"`{code(origin(c))}`"
        rows.append(f"| {c.what} | {kind} | {made} | {signed(unit, c.nbytes)} | {c.count} | `{formula_text(c.delta)}` |")
    rest = found.changes[SHOWN:]
    if rest:
        rows.append(f"| | {len(rest)} further groups | | {signed(unit, sum(c.nbytes for c in rest))} | | |")
    if found.elsewhere:
        rows.append(f"| | the other peak is elsewhere | | {signed(unit, found.elsewhere)} | | |")
    return "\n".join(rows)


def cell(text: str) -> str:
    """Plain text within a table or a paragraph."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def code(text: str) -> str:
    """Text within backticks, in a table too."""
    return text.replace("`", "'").replace("|", "\\|").replace("\n", " ")
