"""`memir compare TARGET RECORDED`: the predicted step beside a recorded CUDA memory snapshot."""

from __future__ import annotations

import json
from pathlib import Path

import click

from memir.cli.allocator import allocator_options
from memir.cli.options import Request, cache_option, gpu_option, output_option, progress, step_options, write
from memir.cli.parallel import parallel_option
from memir.errors import EXIT_NO, EXIT_OK


@click.command("compare")
@step_options
@gpu_option
@click.argument("recorded", metavar="RECORDED", type=click.Path(path_type=Path))
@cache_option
@parallel_option
@click.option("--device", type=click.IntRange(min=0), help="Which GPU of the recording.  [default: the only one]")
@click.option("--tolerance", type=click.IntRange(min=0), default=0, show_default=True, metavar="BYTES", help="Error allowed.")
@click.option("--format", "format_name", type=click.Choice(("text", "json")), default="text", show_default=True)
@allocator_options
@output_option
def command(
    request: Request,
    recorded: Path,
    device: int | None,
    tolerance: int,
    format_name: str,
    alloc_conf: str,
    steps: int,
    output: Path | None,
) -> int:
    """Compare the predicted step of TARGET with a memory snapshot that PyTorch recorded.

    RECORDED is what torch.cuda.memory._dump_snapshot wrote after _record_memory_history. It is read as data: nothing in it is
    run. The last whole step in it is found by annotations (record_function("forward"), "backward" and torch.optim's own, under
    global_record_annotations=True), or else by the sizes of its allocations.

    Exit code 1: the bytes between steps or at the peak are off by more than the tolerance. 2: RECORDED is no snapshot, or has
    no history. 3: no step in it looks like the predicted one.
    """
    from memir.allocator.settings import parse_settings
    from memir.api import program_of
    from memir.backends.snapshot import Snapshot
    from memir.ir.unroll import bind
    from memir.recorded.compare import compare
    from memir.recorded.recording import parse_recording, read_recording
    from memir.recorded.text import to_data, to_text

    parse_settings(alloc_conf)
    recording = read_recording(recorded, device)
    with progress() as stage:
        step = program_of(request.model, request.recipe, **request.program_keywords(), progress=stage)
        stage("playing the allocator")
        snapshot = Snapshot(alloc_conf, steps).build(bind(step.program, step.env))
    found = compare(parse_recording(snapshot, "the predicted snapshot"), recording, str(recorded))
    title = f"{step.subject.target}   B={step.point['B']} S={step.point['S']}"
    write(json.dumps(to_data(found), indent=2) if format_name == "json" else to_text(found, title), output)
    return EXIT_OK if found.agrees(tolerance) else EXIT_NO
