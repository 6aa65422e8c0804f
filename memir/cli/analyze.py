"""`memir analyze TARGET`: the peak of a training step, its place, its formula, and what is alive there."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memir.cli.allocator import alloc_conf_option
from memir.cli.options import Request, cache_option, output_option, progress, step_options, write
from memir.cli.parallel import parallel_option
from memir.errors import EXIT_INCONCLUSIVE, EXIT_NO, EXIT_OK, InconclusiveError, UsageError

if TYPE_CHECKING:
    from memir.recipe import Recipe
    from memir.report import Report


@click.command("analyze")
@step_options
@cache_option
@parallel_option
@click.option(
    "--format",
    "format_text",
    metavar="FORMAT",
    default="text",
    show_default=True,
    help="text, json, markdown, explain, formula; with options as in formula{latex}.",
)
@click.option("--explain", "format_text", flag_value="explain", help="Every term in exact bytes; the same as --format explain.")
@click.option(
    "--gpu", metavar="NAME|MEMORY", help="Take its kernels, and say whether the step fits: h100, 80GiB (see memir gpus)."
)
@alloc_conf_option
@click.option("--exact", is_flag=True, help="With --parallel: trace PyTorch's own FSDP2 and DTensor too, and print their peak.")
@output_option
def command(request: Request, format_text: str, gpu: str | None, alloc_conf: str, exact: bool, output: Path | None) -> int:
    """Say what one training step of TARGET takes at its peak, without a GPU and without weights.

    Bytes are requested bytes: what PyTorch asks of the allocator. Exit code 1: it does not fit --gpu. Exit code 3: the number
    is printed but not proved; the reason stands under it.
    """
    from memir.allocator.settings import parse_settings
    from memir.api import analyze, on_gpu, program_of
    from memir.cuda.verdict import DOES_NOT
    from memir.hardware import parse_gpu
    from memir.pipeline import parse_backend

    if format_text == "text" and output is None and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        format_text = "text{color}"
    backend = parse_backend(format_text)
    render = getattr(backend, "render", None)  # of a report; a backend without it prints programs
    memory = None if gpu is None else parse_gpu(gpu)
    parse_settings(alloc_conf)  # before anything takes long
    if alloc_conf and memory is None:
        raise UsageError("--alloc-conf: the allocator is played for a GPU's verdict", hint="add  --gpu NAME")
    recipe = request.recipe if memory is None else on_gpu(request.recipe, memory)
    if exact and not request.parallel:
        raise UsageError(
            "--exact: traces a distributed method with PyTorch's own code", hint="add  --parallel 'fsdp{degree=8}'"
        )
    with progress() as stage:
        if render is None:
            out = io.StringIO()
            step = program_of(request.model, recipe, **request.program_keywords(), progress=stage)
            backend.emit(step.program, out)
            text, code = out.getvalue(), EXIT_OK
        else:
            options = {"gpu": memory, "alloc_conf": alloc_conf, **request.program_keywords()}
            report = analyze(request.model, recipe, **options, progress=stage)
            if exact:
                report = replace(report, assumptions=(*report.assumptions, _exact(request, recipe, report, stage)))
            refused = report.verdict is not None and report.verdict.answer == DOES_NOT
            text, code = render(report), EXIT_INCONCLUSIVE if report.inconclusive else EXIT_NO if refused else EXIT_OK
    write(text, output)
    return code


def _exact(request: Request, recipe: Recipe, report: Report, stage: Callable[[str], None]) -> str:
    """What PyTorch's own code takes beside the passes, or why that cannot be told."""
    from memir.analysis.words import exactly
    from memir.api import exact_peak

    try:
        if request.batch is None or request.seq is None:
            raise UsageError("give  -b  and  -s")
        keywords = {**request.keywords(), "batch": request.batch, "seq": request.seq, "parallel": request.parallel}
        found = exact_peak(request.model, recipe, **keywords, progress=stage)
    except (UsageError, InconclusiveError) as error:
        return f"--exact is not possible: {error.message}"
    return f"exact: {exactly(found, report.peak.requested)}"
