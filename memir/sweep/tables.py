"""A sweep or its largest sizes as CSV and JSON: every number, one row a line. docs/sweeps.md describes the columns.

Bytes are whole numbers. What is not known is empty in CSV and null in JSON.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from memir.recipe import Recipe
from memir.sweep.grid import Numbers
from memir.sweep.run import Row, Table, Variant
from memir.sweep.solve import Largest

SCHEMA_VERSION = 1
Value = str | int | float | bool | None


def options_of(recipe: Recipe) -> dict[str, Value]:
    """The recipe's options by name; adapters as they are typed, or None."""
    items = ((field.name, getattr(recipe, field.name)) for field in fields(recipe) if getattr(recipe, field.name) != "")
    return {name: value if isinstance(value, Value) else str(value) for name, value in items}


def varying(variants: Sequence[Variant]) -> list[str]:
    """The options in which the variants differ."""
    options = [options_of(variant.recipe) for variant in variants]
    return [name for name in (options[0] if options else ()) if len({str(each[name]) for each in options}) > 1]


def row_of(row: Row | Largest) -> dict[str, Value]:
    """One row's columns after the recipe's."""
    return _cell(row) if isinstance(row, Row) else _solved(row)


def _cell(row: Row) -> dict[str, Value]:
    return {
        "B": row.batch,
        "S": row.seq,
        **_bytes(row.numbers, ""),
        "steady_requested_bytes": None if row.numbers is None else row.numbers.steady_requested,
        "steady_allocated_bytes": None if row.numbers is None else row.numbers.steady_allocated,
        **_place(row.numbers),
        "fits": row.fits,
        "proven": not row.reason,
        "reason": row.reason,
    }


def _solved(row: Largest) -> dict[str, Value]:
    other = "S" if row.symbol == "B" else "B"
    return {
        other: row.at,
        f"largest_{row.symbol}": row.value,
        **_bytes(row.numbers, ""),
        f"next_{row.symbol}": row.over_at,
        **_bytes(row.over, "next_"),
        "next_peak": row.formula or None,
        **_place(row.over),
        "limit": row.limit or None,
        "proven": not row.reason,
        "reason": row.reason,
    }


def _bytes(numbers: Numbers | None, prefix: str) -> dict[str, Value]:
    return {
        f"{prefix}requested_bytes": None if numbers is None else numbers.requested,
        f"{prefix}allocated_bytes": None if numbers is None else numbers.allocated,
    }


def _place(numbers: Numbers | None) -> dict[str, Value]:
    if numbers is None:
        return dict.fromkeys(("phase", "op", "module", "source"))
    place = numbers.place
    return {"phase": place.phase or "start", "op": place.opcode, "module": place.path, "source": place.source}


def to_csv(table: Table) -> str:
    """A header and one line a row: the options of its recipe, then its columns."""
    options = [options_of(variant.recipe) for variant in table.variants]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*options[0], *row_of(table.lines[0])])
    first = [[_csv_text(value) for value in each.values()] for each in options]
    writer.writerows([*first[row.variant], *map(_csv_text, row_of(row).values())] for row in table.lines)
    return out.getvalue()


def _csv_text(value: Value) -> Value:
    return ("true" if value else "false") if isinstance(value, bool) else value


def to_json(table: Table, target: str) -> str:
    """One document; its rows, one a line, name their recipe by its position in `recipes`."""
    gpu = table.gpu
    head: Mapping[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "target": target,
        "name": table.name,
        "versions": dict(table.versions),
        "gpu": None if gpu is None else {"name": gpu.name, "bytes": gpu.nbytes},
        "recipes": [{**options_of(variant.recipe), "assumptions": list(variant.assumptions)} for variant in table.variants],
    }
    rows = [{"recipe": row.variant, **row_of(row)} for row in table.lines]
    text = json.dumps({**head, "rows": []}, indent=2, ensure_ascii=False)
    line = json.JSONEncoder(ensure_ascii=False).encode
    body = ",\n".join(f"    {line(row)}" for row in rows)
    return text.removesuffix("[]\n}") + f"[\n{body}\n  ]\n}}\n"
