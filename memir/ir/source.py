"""A program from a person's text: parsed, verified, and every error at its line."""

from __future__ import annotations

from memir.errors import UsageError, VerifyError
from memir.ir.core import Program
from memir.ir.parser import Lines, parse_located
from memir.ir.verify import verify as verify_program


def read_program(text: str, file: str = "<text>", *, verify: bool = True) -> Program:
    """The program that `text` spells. ParseError, or UsageError if it breaks a rule; `where` of both begins with file:line."""
    program, lines = parse_located(text, file)
    if verify:
        try:
            verify_program(program)
        except VerifyError as error:
            place = _place(lines, error.place)
            raise UsageError(error.message, where=f"{place}\n{error.where}".rstrip(), hint=error.hint) from error
    return program


def _place(lines: Lines, place: tuple[str, int] | None) -> str:
    if place is None:
        return lines.file
    what, number = place
    numbers = {"storage": lines.storages, "value": lines.values, "op": lines.ops}[what]
    return f"{lines.file}:{numbers[number]}"
