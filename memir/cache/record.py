"""What is kept of a traced step, as text: its programs in memir's own text form, the rest as JSON. Nothing here runs code."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memir.ir.core import Program


@dataclass(frozen=True, slots=True)
class Record:
    """A traced step without its graph, and what a report says of the model."""

    program: Program
    general: Program | None  # of the neighbouring points, where `program` holds at the traced one only
    method: str  # "symbolic" or "fit"
    num_parameters: int
    num_trainable: int
    assumptions: tuple[str, ...]
    inconclusive: tuple[str, ...]
    dims: tuple[tuple[str, int], ...]  # symbols of the programs whose values the target fixes
    name: str  # of the model
    source: str  # "model.py:118" of its class
    num_layers: int | None
    max_seq: int | None  # the longest sequence the model accepts
    versions: tuple[tuple[str, str], ...]  # of memir, torch, transformers, ...


def to_text(record: Record) -> str:
    """The record as JSON. ValueError if a program would not read back as it is."""
    from memir.ir.parser import parse
    from memir.ir.printer import to_text as program_text

    programs = [record.program, *([] if record.general is None else [record.general])]
    texts = [program_text(program) for program in programs]
    if [parse(text) for text in texts] != programs:
        raise ValueError(f"the text form of {record.program.name} reads back differently")
    plain = {name: getattr(record, name) for name in _PLAIN}
    return json.dumps({"programs": texts, **plain, "dims": dict(record.dims), "versions": dict(record.versions)})


def from_text(text: str) -> Record:
    """The record that `to_text` wrote; ParseError, ValueError, KeyError or TypeError for anything else."""
    from memir.ir.parser import parse

    data = json.loads(text)
    if set(data) != {"programs", "dims", "versions", *_PLAIN} or len(data["programs"]) not in (1, 2):
        raise ValueError("other fields than a record has")
    for name, kinds in _PLAIN.items():
        if not isinstance(data[name], kinds):
            raise TypeError(f"{name} is {type(data[name]).__name__}")
    program, general = [*map(parse, data["programs"]), None][:2]
    assert program is not None
    return Record(
        program=program,
        general=general,
        method=data["method"],
        num_parameters=data["num_parameters"],
        num_trainable=data["num_trainable"],
        assumptions=_texts(data["assumptions"]),
        inconclusive=_texts(data["inconclusive"]),
        dims=tuple((name, int(value)) for name, value in data["dims"].items()),
        name=data["name"],
        source=data["source"],
        num_layers=data["num_layers"],
        max_seq=data["max_seq"],
        versions=tuple(zip(data["versions"], _texts(data["versions"].values()), strict=True)),
    )


_PLAIN: dict[str, Any] = {
    "method": str,
    "num_parameters": int,
    "num_trainable": int,
    "assumptions": (list, tuple),
    "inconclusive": (list, tuple),
    "name": str,
    "source": str,
    "num_layers": (int, type(None)),
    "max_seq": (int, type(None)),
}  # field of a record -> its types in JSON


def _texts(items: Iterable[object]) -> tuple[str, ...]:
    items = tuple(items)
    if not all(isinstance(item, str) for item in items):
        raise TypeError("a list of texts has something else in it")
    return tuple(map(str, items))
