"""`memir verify TARGET`: the step run for real, beside the prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click
from click.core import ParameterSource

from memir.cli.options import Request, output_option, progress, step_options, write
from memir.errors import EXIT_NO, EXIT_OK

DEFAULT_BATCH, DEFAULT_SEQ = 2, 128  # smaller than elsewhere: this step really runs


@click.command("verify")
@step_options
@click.option(
    "--tolerance", type=click.IntRange(min=0), default=1024, show_default=True, metavar="BYTES", help="Error allowed."
)
@click.option("--format", "format_name", type=click.Choice(("text", "json")), default="text", show_default=True)
@output_option
def command(request: Request, tolerance: int, format_name: str, output: Path | None) -> int:
    """Run one training step of TARGET for real, with random weights, and compare it with the prediction.

    It runs on a GPU where there is one and --target is not cpu, else on the CPU with one thread, in a process of its own; the
    allocator's own accounting is the measure. -b and -s are 2 and 128 unless given. Exit code 1: a figure is off by more than
    the tolerance.
    """
    from memir.runtime.real import RealStep
    from memir.runtime.verify import gpu_here, has_cuda, to_data, to_text, verify

    recipe = request.recipe
    source = click.get_current_context().get_parameter_source("recipe_target")
    if recipe.target == "cuda" and source is ParameterSource.DEFAULT and not has_cuda():
        recipe = replace(recipe, target="cpu")
    if recipe.target == "cuda" and has_cuda():
        recipe = replace(recipe, gpu=gpu_here())
    real = RealStep(
        request.model,
        recipe,
        DEFAULT_BATCH if request.batch is None else request.batch,
        DEFAULT_SEQ if request.seq is None else request.seq,
        request.sets,
        request.inputs,
        request.trust_remote_code,
    )
    with progress() as stage:
        found = verify(real, stage)
    write(json.dumps(to_data(found, tolerance), indent=2) if format_name == "json" else to_text(found, tolerance), output)
    return EXIT_OK if found.agrees(tolerance) else EXIT_NO
