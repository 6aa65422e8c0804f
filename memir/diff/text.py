"""A difference on one screen, and as data.

before.py -> after.py   B=2, S=64

  peak   1.33 MiB -> 1.95 MiB   +0.62 MiB (+46.6 %)   at this point: +512*B*S + 4096
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memir.analysis.words import Unit, shortened, shortened_end, wrapped
from memir.diff.blame import Blame
from memir.diff.change import Change
from memir.diff.compare import Difference, Spot
from memir.ir.symbolic import formula_text

WIDTH = 100
SHOWN = 12  # groups of storages on the screen
FEW = 5  # changed lines on the screen
LEAST = 0.01  # of the evidence
SCHEMA_VERSION = 1


def signed(unit: Unit, nbytes: int) -> str:
    """`+0.62`, `-1.30`."""
    return f"{'-' if nbytes < 0 else '+'}{unit.number(abs(nbytes))}"


def percent(difference: Difference) -> str:
    """`+46.6 %` of the base's peak."""
    return f"{100 * difference.nbytes / difference.before:+.1f} %" if difference.before else "from nothing"


def delta_text(found: Difference) -> str:
    """The difference of the formulas, with its sign: `+512*B*S + 4096`."""
    text = formula_text(found.delta)
    return text if text.startswith("-") or text == "0" else "+" + text


def place(spot: Spot) -> str:
    """`backward at aten.mm (model.py:42)`."""
    if not spot.op:
        return "the step's start"
    return f"{spot.phase} at {spot.op}" + (f" ({shortened(spot.source, 44)})" if spot.source else "")


def where(found: Difference) -> str:
    """Whether the peak is still in the same place, in words."""
    if not found.moved:
        return f"{place(found.spot_after)}, as before"
    return f"moved from {place(found.spot_before)} to {place(found.spot_after)}"


def to_text(found: Difference) -> str:
    """The screen, ending in a newline."""
    unit = Unit.of(max(found.before, found.after))
    point = ", ".join(f"{name}={value}" for name, value in found.point)
    lines = [f"{found.base} -> {found.head}   {point}", ""]
    change = f"{signed(unit, found.nbytes)} {unit.name} ({percent(found)})" if found.nbytes else "unchanged"
    exact = "" if not found.nbytes else f"   {found.nbytes:+,} bytes"
    lines += [f"  peak    {unit.text(found.before)} -> {unit.text(found.after)}   {change}{exact}"]
    lines += [f"  place   {where(found)}"]
    lines += wrapped("formula at this point  ", delta_text(found), WIDTH, 3)
    lines += [f"  {order.words}, {unit.text(order.nbytes)} here" for order in found.orders]
    if found.changes:
        lines += ["", f"  {'changed at the peak':<43}{unit.name:>10}  count"]
        lines += [_change(c, unit) for c in found.changes[:SHOWN]]
        rest = found.changes[SHOWN:]
        if rest:
            lines += [f"  {signed(unit, sum(c.nbytes for c in rest)):>53}         in {len(rest)} further groups"]
    if found.elsewhere:
        which = (
            "the old peak was elsewhere, and higher than this place was" if found.nbytes >= 0 else "the new peak is elsewhere"
        )
        lines += [f"  {signed(unit, found.elsewhere):>53}         {which}"]
    lines += _blames(found.blames) if found.nbytes or found.changes else []
    if found.formula_before != found.formula_after:
        lines += [
            "",
            *wrapped("peak before = ", found.formula_before, WIDTH, 3),
            *wrapped("peak after = ", found.formula_after, WIDTH, 3),
        ]
    lines += [f"  inconclusive: {reason}" for reason in found.inconclusive]
    return "\n".join(lines) + "\n"


def _change(change: Change, unit: Unit) -> str:
    kind = change.kind.replace("_", " ").replace("activation", "saved for backward")
    name = f"{change.what:<13} {shortened_end(kind, 18):<18}"
    words = [shortened(change.module, 22), shortened(change.op, 24), change.source.rpartition("/")[2]]
    made = shortened("  ".join(filter(None, words)) or "the step", 48)
    return f"  {name}{signed(unit, change.nbytes):>21}  {change.count:>5}  {made}"


def origin(change: Change) -> str:
    """Module, operator and line of a group."""
    words = [change.module, change.op, change.source]
    return "  ".join(filter(None, words)) or "the step"


def _blames(blames: Sequence[Blame]) -> list[str]:
    if not blames:
        return []
    lines = ["", "  changed code behind it"]
    for found in [blame for blame in blames if blame.weight >= LEAST][:FEW]:
        gone = "removed: " if found.base_line else ""
        lines += [f"    {100 * found.weight:3.0f} %  {found.file}:{found.line}  {shortened_end(gone + found.text, 70)}"]
    return lines


def to_data(found: Difference) -> dict[str, Any]:
    """The difference as JSON data; bytes are whole numbers."""
    return {
        "schema_version": SCHEMA_VERSION,
        "quantity": "requested",
        "base": found.base,
        "head": found.head,
        "symbols": dict(found.point),
        "before_bytes": found.before,
        "after_bytes": found.after,
        "delta_bytes": found.nbytes,
        "delta_formula": formula_text(found.delta),
        "formula_before": found.formula_before,
        "formula_after": found.formula_after,
        "peak_moved": found.moved,
        "place_before": _spot(found.spot_before),
        "place_after": _spot(found.spot_after),
        "orders": [
            {"gained": o.is_new, "order": o.product, "term": o.term, "bytes": o.nbytes, "words": o.words} for o in found.orders
        ],
        "changes": [
            {
                "what": c.what,
                "kind": c.kind,
                "op": c.op,
                "module": c.module,
                "source": c.source,
                "count": c.count,
                "before_bytes": c.before,
                "after_bytes": c.after,
                "delta_formula": formula_text(c.delta),
            }
            for c in found.changes
        ],
        "elsewhere_bytes": found.elsewhere,
        "lines": [
            {"file": b.file, "line": b.line, "removed_line": b.base_line or None, "text": b.text, "bytes": b.nbytes}
            for b in found.blames
        ],
        "inconclusive": list(found.inconclusive),
    }


def _spot(spot: Spot) -> dict[str, str]:
    return {"phase": spot.phase, "op": spot.op, "module": spot.module, "source": spot.source}
