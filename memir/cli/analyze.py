"""`memir analyze TARGET`: the peak of a training step, its place, its formula, and what is alive there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from memir.cli.options import Request, output_option, progress, step_options, write
from memir.errors import EXIT_INCONCLUSIVE, EXIT_OK


@click.command("analyze")
@step_options
@click.option("--format", "format_name", type=click.Choice(("text", "json", "markdown")), default="text", show_default=True)
@output_option
def command(request: Request, format_name: str, output: Path | None) -> int:
    """Say what one training step of TARGET takes at its peak, without a GPU and without weights.

    Bytes are requested bytes: what PyTorch asks of the allocator. Exit code 3: the number is printed but not proved; the
    reason stands under it.
    """
    from memir.api import analyze

    with progress() as stage:
        report = analyze(request.model, request.recipe, **request.keywords(), progress=stage)
    if format_name == "json":
        from memir.backends.json import Json

        text = Json().render(report)
    elif format_name == "markdown":
        from memir.backends.markdown import Markdown

        text = Markdown().render(report)
    else:
        from memir.backends.text import Text

        text = Text(color=output is None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")).render(report)
    write(text, output)
    return EXIT_INCONCLUSIVE if report.inconclusive else EXIT_OK
