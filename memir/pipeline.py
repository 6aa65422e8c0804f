"""Passes and backends from text, run one after another, each result verified.

    Pipeline.parse("bind{B=4 S=2048},unroll").run(program)

A pass is a frozen dataclass with `name: ClassVar[str]` and a pure `run(program) -> program`; a backend the same with
`emit(program, out)`. Their fields are their options.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, TextIO, cast

from memir import registry
from memir.errors import InconclusiveError, MemirError, UsageError
from memir.ir.core import Program
from memir.ir.printer import to_text
from memir.ir.verify import verify as verify_program
from memir.options import parse_list, spec


class Pass(Protocol):
    """A rewrite of a program. One that mends what the verifier would reject sets `accepts_unverified` to True."""

    name: ClassVar[str]

    def run(self, program: Program) -> Program:
        """The new program; the given one is unchanged. UsageError or InconclusiveError where that cannot be."""


class Backend(Protocol):
    """What a program is compiled to."""

    name: ClassVar[str]

    def emit(self, program: Program, out: TextIO) -> None:
        """Write the result."""


class PassError(MemirError):
    """A pass raised what it should not, or made a program that breaks a rule: a bug in the pass (exit 4)."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Passes in the order in which they run."""

    passes: tuple[Pass, ...] = ()

    @staticmethod
    def parse(text: str) -> Pipeline:
        """`bind{B=4 S=2048},unroll`; empty text is no pass. ParseError or UsageError if it is no such thing."""
        return Pipeline(parse_list(text, lambda name: cast("type[Pass]", registry.passes.load(name))))

    def spec(self) -> str:
        """The text that parses to this pipeline."""
        return ",".join(spec(p) for p in self.passes)

    @property
    def accepts_unverified(self) -> bool:
        """Whether the first pass takes programs that the verifier would reject."""
        return bool(self.passes) and bool(getattr(self.passes[0], "accepts_unverified", False))

    def run(
        self,
        program: Program,
        *,
        verify: bool = True,
        after: Callable[[Pass, Program], None] | None = None,
        reproducer: Path | None = None,
    ) -> Program:
        """The program after all passes. `after` is called with each pass and what it made, before that is verified.

        A bug in a pass raises PassError and leaves a golden test that shows it: at `reproducer`, or in the temporary folder.
        What a pass says about its input (UsageError, InconclusiveError) goes through unchanged.
        """
        for one in self.passes:
            program = _run_one(one, program, verify, after, reproducer)
        return program


def parse_backend(text: str) -> Backend:
    """The backend that `json` or `text{unit=mib}` spells; ParseError or UsageError if there is none or several."""
    found = parse_list(text, lambda name: cast("type[Backend]", registry.backends.load(name)))
    if len(found) != 1:
        raise UsageError(
            f"one backend is wanted, not {len(found)}", where=text, hint=f"known: {', '.join(registry.backends.names())}"
        )
    return found[0]


def golden_text(directive: str, shown: str, program: Program, expected: str | None = None) -> str:
    """A golden test: directive and purpose as comments, the input, and, unless it is yet to be blessed, the expected text."""
    comments = "".join(f"# {line}\n" for line in shown.splitlines())
    tail = "" if expected is None else f"# ---\n{expected}"
    return f"# {directive}\n{comments}{to_text(program)}{tail}"


def _run_one(
    one: Pass, program: Program, verify: bool, after: Callable[[Pass, Program], None] | None, reproducer: Path | None
) -> Program:
    try:
        result = one.run(program)
    except (UsageError, InconclusiveError):
        raise
    except Exception as error:  # a pass may come from anybody: whatever it raises is a bug in it, to be reproduced
        message = error.message if isinstance(error, MemirError) else f"{type(error).__name__}: {error}"
        where = error.where if isinstance(error, MemirError) else ""
        raise _bug(one, f"the pass {one.name} failed: {message}", where, program, reproducer) from error
    if after is not None:
        after(one, result)
    if verify and result is not program:
        try:
            verify_program(result)
        except MemirError as error:
            message = f"the pass {one.name} made a program that breaks a rule: {error.message}"
            raise _bug(one, message, error.where, program, reproducer) from error
    return result


def _bug(one: Pass, message: str, where: str, program: Program, path: Path | None) -> PassError:
    try:
        text = golden_text(f"run: {spec(one)}", message, program)
        if path is None:
            with tempfile.NamedTemporaryFile("w", prefix="memir-", suffix=".memir", delete=False, encoding="utf-8") as file:
                file.write(text)
            path = Path(file.name)
        else:
            path.write_text(text, encoding="utf-8")
        hint = f"the program before it, as a golden test: {path}\nagain:  memir opt {path} -p '{spec(one)}'"
    except (OSError, ValueError) as error:  # no place to write to, or a name that has no text form
        hint = f"no golden test could be written: {error}"
    return PassError(message, where=where, hint=hint)
