"""`memir opt FILE -p PIPELINE`: passes on a memory program in text form, without torch."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memir.cli.options import output_option, write
from memir.errors import UsageError

if TYPE_CHECKING:
    from memir.ir.core import Program
    from memir.pipeline import Pass


@click.command("opt")
@click.argument("file", metavar="FILE|-")
@click.option("-p", "--pipeline", default="", metavar="PASSES", help="Passes to run, such as  bind{B=4 S=2048},unroll")
@click.option("--print-after", is_flag=True, help="Print the program after every pass, on stderr.")
@click.option("--verify/--no-verify", default=True, show_default=True, help="Check the program first and after every pass.")
@click.option(
    "--emit", "backend", default="ir", show_default=True, metavar="BACKEND", help="What to write: ir, json, formula, ..."
)
@click.option("--reproducer", type=click.Path(dir_okay=False, path_type=Path), help="Where to leave a test when a pass fails.")
@output_option
def command(
    file: str, pipeline: str, print_after: bool, verify: bool, backend: str, reproducer: Path | None, output: Path | None
) -> None:
    """Run passes on a memory program in text form.

    FILE is what `memir ir` prints, docs/ir.md describes it; - reads stdin. A program with a syntax error, or one that breaks a
    rule of the IR, ends with exit code 2.
    """
    from memir.ir.source import read_program
    from memir.pipeline import Pipeline, parse_backend

    passes = Pipeline.parse(pipeline)
    emitter = parse_backend(backend)
    name, text = ("<stdin>", _decoded(sys.stdin.buffer.read(), "stdin")) if file == "-" else (file, _read(Path(file)))
    program = read_program(text, name, verify=verify and not passes.accepts_unverified)
    after = _printer() if print_after else None
    program = passes.run(program, verify=verify, after=after, reproducer=reproducer)
    out = io.StringIO()
    emitter.emit(program, out)
    write(out.getvalue(), output)


def _read(path: Path) -> str:
    try:
        return _decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{name} is not UTF-8 text", where=f"line {line}, byte {error.start}") from None


def _printer() -> Callable[[Pass, Program], None]:
    from memir.ir.printer import to_text
    from memir.options import spec

    def show(one: Pass, program: Program) -> None:
        click.echo(f"# after {spec(one)}\n{to_text(program)}", err=True, nl=False)

    return show
