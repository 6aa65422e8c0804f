"""Values that a class with `get_default_config()` leaves open, read from its own code (the way of minGPT)."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any


def fill_default_config(
    owner: str, node: ast.ClassDef | None, defaults: Mapping[str, Any], given: Mapping[str, Any], assumptions: list[str]
) -> dict[str, Any]:
    """`given` and values for fields whose default is None, as the class itself uses them elsewhere; says which were taken.

    - a constant that another method assigns (`config.vocab_size = 50257` in `from_pretrained`);
    - a table of sizes in the constructor, `{"gpt2": dict(n_layer=12, ...)}[config.model_type]`: its row by the field's value,
      or by the first row that another method names. Options that override part of a row make the row explicit and the
      selecting field None, because such constructors take one or the other.
    """
    filled = dict(given)
    if node is None:
        return filled
    constants = dict(_assigned_constants(node))
    taken = {n: constants[n] for n, v in defaults.items() if v is None and n not in given and n in constants}
    for selector, table in _tables(node):
        if selector not in defaults:
            continue
        row = _row(node, table, given.get(selector, defaults[selector]))
        columns = set(table[row])
        chosen = columns & set(given)
        if chosen:
            filled[selector] = None
            taken |= {n: v for n, v in table[row].items() if n not in given}
            if chosen != columns:
                taken.setdefault(selector, None)
                assumptions.append(f"sizes that are not set are those of {selector}={row}")
        elif selector not in given and defaults[selector] != row:
            taken[selector] = row
        break
    taken = {n: v for n, v in taken.items() if n in defaults}
    shown = [f"{n}={v}" for n, v in taken.items() if v is not None]
    if shown:
        assumptions.append(
            f"{owner}.get_default_config() with {', '.join(shown)}, as the class uses elsewhere (change with --set)"
        )
    return {**taken, **filled}


def _assigned_constants(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """`config.name = 50257` in any method but the one that makes the defaults."""
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or method.name in ("get_default_config", "__init__"):
            continue
        for part in ast.walk(method):
            if isinstance(part, ast.Assign) and isinstance(part.value, ast.Constant) and part.value.value is not None:
                for place in part.targets:
                    if isinstance(place, ast.Attribute) and isinstance(place.value, ast.Name) and place.value.id != "self":
                        yield place.attr, part.value.value


def _tables(node: ast.ClassDef) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Tables of sizes in the constructor with the field that selects a row: `{...}[config.model_type]`."""
    for method in node.body:
        if not (isinstance(method, ast.FunctionDef) and method.name == "__init__"):
            continue
        for part in ast.walk(method):
            if isinstance(part, ast.Subscript) and isinstance(part.value, ast.Dict) and isinstance(part.slice, ast.Attribute):
                table = {
                    str(key.value): row
                    for key, value in zip(part.value.keys, part.value.values, strict=True)
                    if isinstance(key, ast.Constant) and isinstance(key.value, str) and (row := _literal_row(value))
                }
                if table:
                    yield part.slice.attr, table


def _literal_row(node: ast.expr) -> dict[str, Any]:
    """`dict(n_layer=12)` or `{"n_layer": 12}` as a dictionary; empty when it is anything else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return {k.arg: k.value.value for k in node.keywords if k.arg and isinstance(k.value, ast.Constant)}
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(k.value): v.value for k, v in pairs if isinstance(k, ast.Constant) and isinstance(v, ast.Constant)}
    return {}


def _row(node: ast.ClassDef, table: Mapping[str, Any], value: Any) -> str:
    """The row for a value; when the table has none for it, the first row that another method names, else the first."""
    if value in table:
        return str(value)
    named = {
        part.value
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name != "__init__"
        for part in ast.walk(method)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }
    return next((row for row in table if row in named), next(iter(table)))
