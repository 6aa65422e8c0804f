"""`memir lint TARGET`: habits of model code that cost memory, each with what leaving it would give back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memir.cli.options import Request, also_option, cache_option, output_option, progress, step_options, write
from memir.errors import EXIT_INCONCLUSIVE, EXIT_NO, EXIT_OK

FORMATS = ("text", "json", "markdown", "github", "sarif")

if TYPE_CHECKING:
    from memir.diff.side import Side


def peak_of(side: Side) -> int:
    """The requested bytes at the peak of a side."""
    return side.line.evaluate(side.point).peak


@click.command("lint")
@step_options
@cache_option
@click.option("--all", "everything", is_flag=True, help="Also what would not lower the peak.")
@click.option("--exit-zero", is_flag=True, help="Report only: exit 0 whatever is found.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@also_option(FORMATS)
@output_option
def command(
    request: Request, everything: bool, exit_zero: bool, form: str, also: list[tuple[str, Path]], output: Path | None
) -> int:
    """Find what in TARGET's step costs memory without need. Each finding lowers the peak by the bytes that it says.

    A comment on the line silences it: # memir: ignore[logits-in-fp32]. The rules are in docs/lint.md.

    Exit code 1: something was found. 3: the program is not proved.
    """
    from memir.api import program_of
    from memir.diff.inputs import side
    from memir.lint.run import lint, reader, render
    from memir.lint.step import LintStep

    with progress() as stage:
        traced = program_of(request.model, request.recipe, **request.program_keywords(), progress=stage)
        unrecomputed = None
        if request.recipe.checkpoint != "none":
            stage("tracing without checkpointing")
            plain = replace(request.recipe, checkpoint="none")
            unchecked = program_of(request.model, plain, **request.program_keywords(), progress=stage)
            unrecomputed = peak_of(side(request.model, unchecked))
        stage("looking")
        subject = traced.subject
        frozen = subject.num_trainable != subject.num_parameters
        step = LintStep(side(request.model, traced), frozen, unrecomputed)
        found = lint(step, reader(Path.cwd()), everything=everything)
    write(render(found, step, form, Path.cwd()), output)
    for other, file in also:
        write(render(found, step, other, Path.cwd()), file)
    if exit_zero:
        return EXIT_OK
    return EXIT_INCONCLUSIVE if traced.inconclusive else EXIT_NO if found else EXIT_OK
