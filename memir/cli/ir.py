"""`memir ir TARGET`: a training step as a memory program in text form."""

from __future__ import annotations

import io
from pathlib import Path

import click

from memir.cli.options import Request, cache_option, gpu_option, output_option, progress, step_options, write
from memir.cli.parallel import parallel_option


@click.command("ir")
@step_options
@gpu_option
@cache_option
@parallel_option
@click.option("--live", is_flag=True, help="After each operator: live bytes as a polynomial, and the live storages.")
@output_option
def command(request: Request, live: bool, output: Path | None) -> None:
    """Print one training step of TARGET as a memory program: storages, values, operators, frees.

    docs/ir.md has the grammar. `memir opt` reads the text back; the lines that --live adds are comments.
    """
    from memir.api import program_of
    from memir.backends.ir import Ir

    with progress() as stage:
        step = program_of(request.model, request.recipe, **request.program_keywords(), progress=stage)
        stage("printing")
        out = io.StringIO()
        Ir(live=live).emit(step.program, out)
    write(out.getvalue(), output)
