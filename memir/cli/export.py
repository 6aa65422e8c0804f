"""`memir export TARGET --to snapshot -o FILE`: the predicted step in a form that other tools read."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import click

from memir.cli.allocator import allocator_options
from memir.cli.options import Request, cache_option, gpu_option, output_option, progress, step_options
from memir.cli.parallel import parallel_option
from memir.errors import UsageError


@click.command("export")
@step_options
@gpu_option
@cache_option
@parallel_option
@click.option("--to", "form", type=click.Choice(("snapshot",)), required=True, help="snapshot: a CUDA memory snapshot.")
@click.option(
    "--record",
    type=click.Choice(("last", "all")),
    default="last",
    show_default=True,
    help="The events of the last step, or all from an empty GPU on.",
)
@allocator_options
@output_option
def command(request: Request, form: str, record: str, alloc_conf: str, steps: int, output: Path | None) -> None:
    """Write the memory timeline of a training step of TARGET in another tool's form.

    A snapshot is what torch.cuda.memory._dump_snapshot writes: python -m torch.cuda._memory_viz and PyTorch's memory viewer
    open it. Blocks and segments are those of the simulated caching allocator, frames are lines of the model's code.
    """
    if output is None and sys.stdout.isatty():
        raise UsageError("a snapshot is binary and no text for a terminal", hint="write it to a file:  -o mem.pickle")
    from memir.allocator.settings import parse_settings
    from memir.api import program_of
    from memir.backends.snapshot import Snapshot
    from memir.ir.unroll import bind

    parse_settings(alloc_conf)  # before anything takes long
    with progress() as stage:
        step = program_of(request.model, request.recipe, **request.program_keywords(), progress=stage)
        stage("playing the allocator")
        out = io.BytesIO()
        Snapshot(alloc_conf, steps, record).emit(bind(step.program, step.env), out)
    if output is None:
        click.echo(out.getvalue(), nl=False)  # bytes as they are
        return
    try:
        output.write_bytes(out.getvalue())
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from None
