"""Errors for people: what is wrong, where, and what to do; each knows the process's exit code."""

from __future__ import annotations

from typing import ClassVar

EXIT_OK = 0
EXIT_NO = 1  # the answer is no: does not fit, over budget, differs
EXIT_USAGE = 2  # usage or configuration
EXIT_INCONCLUSIVE = 3  # memir cannot prove the number
EXIT_INTERNAL = 4  # a bug in memir


class MemirError(Exception):
    """Base class. `where` is a file, line or module; `hint` says what to type or change."""

    exit_code: ClassVar[int] = EXIT_INTERNAL

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def render(self) -> str:
        """The text a person sees, at most one screen, without a traceback."""
        lines = [f"error: {self.message}"]
        lines += [f"  {line}" for line in self.where.splitlines()]
        lines += [f"  {line}" for line in self.hint.splitlines()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render().removeprefix("error: ")


class UsageError(MemirError):
    """The input or an option is wrong; the user can mend it (exit 2)."""

    exit_code = EXIT_USAGE


class InconclusiveError(MemirError):
    """memir cannot prove the answer for this input (exit 3)."""

    exit_code = EXIT_INCONCLUSIVE


class ParseError(UsageError):
    """Text that does not follow a grammar. Shows the line and a caret under the column (both from 1)."""

    def __init__(self, message: str, *, file: str, line: int, column: int, text: str, hint: str = "") -> None:
        where = f"{file}:{line}:{column}\n{text}\n{' ' * (column - 1)}^"
        super().__init__(message, where=where, hint=hint)
        self.line = line
        self.column = column


class VerifyError(MemirError):
    """A program breaks a rule of the IR. From a pass this is a bug (exit 4); from a user's text file it is usage.

    `place` says which part of the program: ("storage" or "value" or "op", its number in textual order, from 0).
    """

    def __init__(self, message: str, *, where: str = "", hint: str = "", place: tuple[str, int] | None = None) -> None:
        super().__init__(message, where=where, hint=hint)
        self.place = place
